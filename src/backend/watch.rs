//! Watches the calls of a group that the device has begun and not ended. NCCL EP's kernels wait for the other ranks without
//! a limit: where one is missing, the caller sees a synchronization that does not return, and no more. So two events stand
//! around what each call queues, and a thread looks at them: a call that takes long is reported with the rank that is
//! missing, one that cannot end, or takes longer than the limit, ends the group; if nobody takes notice, the process.
//!
//! Calls that are captured are not watched: graphs are replayed without the library.

use crate::error::{Error, Result};
use crate::progress::{Call, Progress, Step};
use crate::sys::Base;
use crate::sys::cuda::{Stream, StreamState};
use nvte_ep_bindings as b;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Calls in flight that are watched: with more, the oldest and the newest.
const IN_FLIGHT: usize = 64;
/// A call that takes longer is reported.
const SLOW: Duration = Duration::from_secs(30);
/// A call that takes longer is asked about: other ranks may be gone.
const SUSPICIOUS: Duration = Duration::from_millis(500);
/// How often the thread looks.
const PERIOD: Duration = Duration::from_millis(250);

/// The events around what a call queues.
#[derive(Debug, Clone, Copy)]
struct Events {
    begin: b::CUevent,
    end: b::CUevent,
}

// SAFETY: events belong to the device's context, whatever thread names them.
unsafe impl Send for Events {}

/// A call that was queued.
#[derive(Debug)]
struct Queued {
    number: u64,
    step: Step,
    events: Events,
    /// Whether calls in front of it are not watched.
    behind_others: bool,
    /// When it, or one of those, was first seen to run.
    since: Option<Instant>,
    reported: bool,
}

/// Calls in flight, and events for more.
#[derive(Debug)]
struct Ring {
    queued: VecDeque<Queued>,
    free: Vec<Events>,
}

/// A group under watch: what its calls go through.
#[derive(Debug)]
pub(super) struct Watched {
    base: &'static Base,
    device: i32,
    /// None: calls are counted, and not watched.
    limit: Option<Duration>,
    /// How long a process that takes no notice goes on; none = for ever.
    grace: Option<Duration>,
    progress: Progress,
    ring: Mutex<Ring>,
    /// Why the group is at its end.
    ended: OnceLock<String>,
    /// Whether a caller has been told.
    noticed: AtomicBool,
    stopped: Mutex<bool>,
    stop: Condvar,
}

/// The watch over one group.
#[derive(Debug)]
pub(super) struct Watch {
    watched: Arc<Watched>,
    /// Events for more calls, taken from the ring many at a time.
    spare: Vec<Events>,
    /// Whether calls since the last one that is watched are not.
    skipped: bool,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `limit`: how long a call may take on the device; none = calls are counted, and not watched. `grace`: how long a process
    /// goes on that takes no notice of the group's end; none = for ever.
    pub(super) fn start(
        base: &'static Base,
        device: i32,
        progress: Progress,
        limit: Option<Duration>,
        grace: Option<Duration>,
    ) -> Self {
        let watched = Arc::new(Watched {
            base,
            device,
            limit,
            grace,
            progress,
            ring: Mutex::new(Ring { queued: VecDeque::with_capacity(IN_FLIGHT), free: Vec::with_capacity(IN_FLIGHT) }),
            ended: OnceLock::new(),
            noticed: AtomicBool::new(false),
            stopped: Mutex::new(false),
            stop: Condvar::new(),
        });
        let thread = limit.and_then(|_| {
            let watched = Arc::clone(&watched);
            let thread = std::thread::Builder::new().name("nvte_ep_watch".into()).spawn(move || watched.run());
            thread
                .inspect_err(|error| tracing::warn!(target: "nvte_ep", "the group's calls are not watched: {error}"))
                .ok()
        });
        Self { watched, spare: Vec::with_capacity(IN_FLIGHT), skipped: false, thread }
    }

    pub(super) fn share(&self) -> Arc<Watched> {
        Arc::clone(&self.watched)
    }

    /// Does the work of a collective call that queues on `stream`, and watches what it queues.
    ///
    /// # Safety
    /// `stream` is a live stream of the group's device, in the state `state`.
    pub(super) unsafe fn queue<T>(
        &mut self,
        step: Step,
        stream: Stream,
        state: StreamState,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if state == StreamState::Capturing {
            self.watched.progress.captured();
            return work();
        }
        let number = self.watched.progress.enter(step);
        let events = self.take_events();
        // SAFETY: the caller vouches for the stream; the events are ours.
        let begun = events.is_some_and(|events| unsafe { self.watched.record(events.begin, stream) });
        let result = work();
        match result.is_ok() {
            true => self.watched.progress.queued(number),
            false => self.watched.progress.retract(number),
        }
        if let Some(events) = events {
            // SAFETY: as above.
            let ended = begun && result.is_ok() && unsafe { self.watched.record(events.end, stream) };
            match ended {
                true => self.watched.watch_over(number, step, events, std::mem::take(&mut self.skipped)),
                false => self.spare.push(events),
            }
        }
        result
    }

    /// Events for another call; none when as many as may be are in flight, or calls are not watched.
    #[inline]
    fn take_events(&mut self) -> Option<Events> {
        self.watched.limit?;
        self.spare.pop().or_else(|| self.find_events())
    }

    #[inline(never)]
    fn find_events(&mut self) -> Option<Events> {
        let mut ring = self.watched.ring.lock();
        if ring.free.is_empty() && ring.queued.len() < IN_FLIGHT {
            return self.watched.make_events();
        }
        if ring.free.is_empty() {
            // The newest gives way to one that is newer: it comes after it on the device too.
            let newest = ring.queued.pop_back()?;
            self.skipped = true;
            return Some(newest.events);
        }
        std::mem::swap(&mut ring.free, &mut self.spare);
        self.spare.pop()
    }

    /// # Errors
    /// The group is at its end.
    #[inline]
    pub(super) fn require_alive(&self) -> Result<()> {
        self.watched.require_alive()
    }

    /// Notes why the call `name` failed, for the ranks that wait for it.
    pub(super) fn failed(&self, name: &str, error: &Error) {
        // Others are no calls that ranks wait for.
        if self.watched.ended.get().is_none() && Call::is_name(name) {
            self.progress().refuse(&format!("{name}: {error}"));
        }
    }

    pub(super) fn progress(&self) -> &Progress {
        self.watched.progress()
    }

    /// Ends the watch over work that is left to the end of the process.
    pub(super) fn abandon(self) {
        *self.watched.stopped.lock() = true;
        self.watched.stop.notify_all();
    }

    /// Ends the thread and gives its events back; what was queued is done.
    pub(super) fn stop(self) {
        let Self { watched, spare, skipped: _, thread } = self;
        *watched.stopped.lock() = true;
        watched.stop.notify_all();
        // It panics nowhere; if it did, there is nothing to add.
        let _ = thread.map(JoinHandle::join);
        let Ring { queued, free } = &mut *watched.ring.lock();
        for Events { begin, end } in queued.drain(..).map(|call| call.events).chain(free.drain(..)).chain(spare) {
            for event in [begin, end] {
                // SAFETY: an event of ours that nothing queued waits for.
                let _ = unsafe { (watched.base.cuda.cuEventDestroy_v2)(event) };
            }
        }
    }
}

impl Watched {
    /// # Errors
    /// The group is at its end.
    #[inline]
    pub(super) fn require_alive(&self) -> Result<()> {
        self.ended.get().map_or(Ok(()), |reason| Err(self.at_its_end(reason)))
    }

    #[cold]
    fn at_its_end(&self, reason: &str) -> Error {
        self.noticed.store(true, Ordering::Relaxed);
        Error::State(format!("the group has ended: {reason}; end this process"))
    }

    #[inline]
    fn watch_over(&self, number: u64, step: Step, events: Events, behind_others: bool) {
        let call = Queued { number, step, events, behind_others, since: None, reported: false };
        self.ring.lock().queued.push_back(call);
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    fn make_events(&self) -> Option<Events> {
        let make = || {
            let mut event = std::ptr::null_mut();
            let flags = b::CU_EVENT_DISABLE_TIMING;
            // SAFETY: `event` is live.
            let code = unsafe { (self.base.cuda.cuEventCreate)(&raw mut event, flags) };
            self.base.cuda.check("cuEventCreate", code).map(|()| event)
        };
        match make().and_then(|begin| make().map(|end| Events { begin, end })) {
            Ok(events) => Some(events),
            Err(error) => {
                tracing::warn!(target: "nvte_ep", "a call is not watched: {error}");
                None
            }
        }
    }

    /// # Safety
    /// `stream` is a live stream of the event's device.
    #[inline]
    unsafe fn record(&self, event: b::CUevent, stream: Stream) -> bool {
        // SAFETY: the caller vouches for the stream; the event is ours.
        let code = unsafe { (self.base.cuda.cuEventRecord)(event, stream.as_raw()) };
        code == b::CUDA_SUCCESS || self.not_recorded(code)
    }

    #[cold]
    fn not_recorded(&self, code: b::CUresult) -> bool {
        if let Err(error) = self.base.cuda.check("cuEventRecord", code) {
            tracing::warn!(target: "nvte_ep", "a call is not watched: {error}");
        }
        false
    }

    /// Whether the work in front of an event is done; none if it failed, and with it the device.
    fn is_done(&self, event: b::CUevent) -> Option<bool> {
        // SAFETY: the event is ours.
        match unsafe { (self.base.cuda.cuEventQuery)(event) } {
            b::CUDA_SUCCESS => Some(true),
            b::CUDA_ERROR_NOT_READY => Some(false),
            _ => None,
        }
    }

    /// Takes out what is done. False when the device has failed: what is queued on it will never say so.
    fn collect(&self, ring: &mut Ring) -> bool {
        let Ring { queued, free } = ring;
        let mut works = true;
        queued.retain(|call| {
            let done = self.is_done(call.events.end);
            works &= done.is_some();
            if done != Some(false) {
                free.push(call.events);
            }
            done == Some(false)
        });
        works
    }

    fn run(&self) {
        let cuda = &self.base.cuda;
        if let Err(error) = cuda.set_current_device(self.device).and_then(|()| cuda.ignore_captures()) {
            tracing::warn!(target: "nvte_ep", "the group's calls are not watched: {error}");
            return;
        }
        loop {
            let mut stopped = self.stopped.lock();
            let _ = self.stop.wait_while_for(&mut stopped, |stopped| !*stopped, PERIOD);
            if *stopped {
                return;
            }
            drop(stopped);
            match self.look() {
                Look::Fine => {}
                // Every call finds the device's error by itself.
                Look::DeviceFailed => return,
                Look::Ended => return self.see_it_through(),
            }
        }
    }

    fn look(&self) -> Look {
        let mut ring = self.ring.lock();
        if !self.collect(&mut ring) {
            return Look::DeviceFailed;
        }
        let now = Instant::now();
        for (index, call) in ring.queued.iter_mut().enumerate() {
            let unwatched = index == 0 && call.behind_others;
            if call.since.is_none() && (unwatched || self.is_done(call.events.begin) == Some(true)) {
                call.since = Some(now);
            }
        }
        let Some(call) = ring.queued.iter_mut().filter(|call| call.since.is_some()).min_by_key(|call| call.since)
        else {
            return Look::Fine;
        };
        let (number, step) = (call.number, call.step);
        let running = call.since.map_or(Duration::ZERO, |since| now - since);
        let late = self.limit.is_some_and(|limit| running > limit);
        if running < SUSPICIOUS && !late {
            return Look::Fine;
        }
        let reason = self.progress.reason(number, step);
        let report = !call.reported && running > SLOW;
        call.reported |= report;
        drop(ring);
        let seconds = running.as_secs_f32();
        let text =
            format!("{step}, call {number} of the group, has been on the device for {seconds:.1} s: {}", reason.text);
        if late || reason.hopeless {
            self.end(text);
            return Look::Ended;
        }
        if report {
            tracing::warn!(target: "nvte_ep", device = self.device, "{text}");
            say(&text);
        }
        Look::Fine
    }

    /// Ends the group: every call from now on throws.
    fn end(&self, text: String) {
        self.progress.give_up(&text);
        tracing::error!(target: "nvte_ep", device = self.device, "{text}");
        say(&text);
        let _ = self.ended.set(text);
    }

    /// The caller may sit in a synchronization that never returns. If it has not taken notice when the grace is over, and
    /// the device is still at it, nothing is left but to end the process.
    fn see_it_through(&self) {
        let Some(grace) = self.grace else { return };
        let start = Instant::now();
        while start.elapsed() < grace {
            if *self.stopped.lock() || self.noticed.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(PERIOD.min(grace));
        }
        let mut ring = self.ring.lock();
        let stuck = self.collect(&mut ring) && !ring.queued.is_empty();
        if stuck && !self.noticed.load(Ordering::Relaxed) {
            let text = "nobody has called the library since, and the device is still waiting: the process ends here";
            say(text);
            std::process::abort();
        }
    }
}

/// What a look at the calls in flight has found.
enum Look {
    Fine,
    DeviceFailed,
    Ended,
}

/// To stderr whether or not there is a log: a hang must not be silent.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "nvte_ep: {text}");
}
