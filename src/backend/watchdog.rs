//! Watches the calls of a group that the device has begun and not ended. NCCL EP's kernels wait for the other ranks without
//! a limit: if one is missing, the caller's synchronization does not return. So the library records an event before and after
//! the work of each call, and a thread looks at the events. It reports a call that takes long, with the missing rank. A call
//! that cannot end, or takes longer than the limit, ends the group; if the program then makes no call, the process.
//!
//! Calls that are captured are not watched: graphs are replayed without the library.

use super::engine::Abort;
use super::in_flight::{self, Cursor, RingSlot};
use crate::error::{Error, Result};
use crate::log::report;
use crate::progress::{Call, Progress, Step};
use crate::sys::Base;
use crate::sys::cuda::{Stream, StreamState};
use crate::sys::thread::{self, Mailbox, Thread};
use nvte_ep_bindings as b;
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
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
// SAFETY: as above; the driver takes calls about one event from several threads.
unsafe impl Sync for Events {}

/// A call in flight, as the thread knows it.
#[derive(Debug, Clone, Copy)]
struct Running {
    call: in_flight::Call,
    events: Events,
    /// When it, or one in front of it that is not watched, was first seen to run.
    since: Option<Instant>,
    reported: bool,
}

/// A group that is watched: what its calls go through.
#[derive(Debug)]
pub(super) struct Watched {
    base: &'static Base,
    /// None: calls are counted, and not watched.
    limit: Option<Duration>,
    /// How long a process that takes no notice goes on; none = for ever.
    grace: Option<Duration>,
    progress: Progress,
    /// Ends the kernels of the calls in flight.
    abort: Option<Abort>,
    /// Where calls in flight are kept; none where calls are not watched.
    places: Box<[RingSlot<Events>]>,
    /// Why the group is at its end.
    ended: OnceLock<String>,
    /// Whether a caller has been told.
    noticed: AtomicBool,
    /// Whether it was said that a call is not watched.
    unwatched: AtomicBool,
    /// The group's shutdown, and since when it waits for the other ranks.
    leaving: OnceLock<(Call, Instant)>,
    stopped: Mutex<bool>,
    stop: Condvar,
}

/// The watchdog of one group.
#[derive(Debug)]
pub(super) struct Watchdog {
    watched: Arc<Watched>,
    turn: Cursor,
    thread: Option<Thread<()>>,
}

/// What a watchdog takes of the system and of the device. It is had before the ranks agree on a group: without it, a rank that
/// is missing would be waited for without an end, and nobody would know.
#[derive(Debug)]
pub(super) struct Means {
    base: &'static Base,
    /// How long a call may take on the device; none = calls are counted, and not watched.
    limit: Option<Duration>,
    places: Box<[RingSlot<Events>]>,
    /// The thread, and how it gets what it watches; none where nothing is watched.
    thread: Option<(Assignment, Thread<()>)>,
}

impl Means {
    /// The device is current.
    ///
    /// # Errors
    /// No thread, or no events, and why.
    pub(super) fn new(base: &'static Base, device: i32, limit: Option<Duration>) -> Result<Self> {
        let mut means = Self { base, limit, places: Box::default(), thread: None };
        if limit.is_some() {
            means.places = make_places(base)?;
            means.thread = Some(start_thread(base, device)?);
        }
        Ok(means)
    }

    /// Watches the calls of a group. `grace`: how long a process goes on that takes no notice of the group's end; none = for
    /// ever. `abort`: of the group's engine, which is destroyed after [`Watchdog::stop`] at the earliest.
    pub(super) fn watch(mut self, progress: Progress, grace: Option<Duration>, abort: Option<Abort>) -> Watchdog {
        let watched = Arc::new(Watched {
            base: self.base,
            limit: self.limit,
            grace,
            progress,
            abort,
            places: std::mem::take(&mut self.places),
            ended: OnceLock::new(),
            noticed: AtomicBool::new(false),
            unwatched: AtomicBool::new(false),
            leaving: OnceLock::new(),
            stopped: Mutex::new(false),
            stop: Condvar::new(),
        });
        let thread = self.thread.take().map(|(sender, thread)| {
            sender.put(Some(Arc::clone(&watched)));
            thread
        });
        Watchdog { watched, turn: Cursor::default(), thread }
    }
}

impl Drop for Means {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.thread.take() {
            // The thread waits for a group to watch, and ends where there will be none.
            sender.put(None);
            let _ = thread.join();
        }
        destroy(self.base, &self.places);
    }
}

/// What the thread is to watch; none where there will be no group.
type Assignment = Arc<Mailbox<Option<Arc<Watched>>>>;

fn start_thread(base: &'static Base, device: i32) -> Result<(Assignment, Thread<()>)> {
    let (assignment, ready): (Assignment, _) = (Mailbox::new(), Mailbox::new());
    let (of_thread, started) = (Arc::clone(&assignment), Arc::clone(&ready));
    let thread = thread::spawn(c"nvte_ep_watch", move || {
        let cuda = &base.cuda;
        let prepare = || cuda.set_current_device(device).and_then(|()| cuda.ignore_captures());
        let panicked = |_| Err(Error::Internal("the watching thread panicked".into()));
        ready.put(catch_unwind(AssertUnwindSafe(prepare)).unwrap_or_else(panicked));
        if let Some(watched) = of_thread.take() {
            watched.run();
        }
    });
    let thread = thread.map_err(|error| Error::Preflight {
        problem: format!("the thread that watches the group's calls could not be started ({error})"),
        remedy:
            "raise the limit of threads or of memory (ulimit -u, ulimit -v, the container's pids limit); or do without \
                 it (NVTE_EP_TIMEOUT_MS=0): a rank that is missing is then waited for without an end"
                .into(),
    })?;
    let ready = started.take();
    if ready.is_err() {
        assignment.put(None);
    }
    ready.map(|()| (assignment, thread))
}

fn destroy(base: &Base, places: &[RingSlot<Events>]) {
    for event in places.iter().flat_map(|place| [place.events.begin, place.events.end]) {
        // SAFETY: an event of ours that nothing queued waits for.
        let _ = unsafe { (base.cuda.cuEventDestroy_v2)(event) };
    }
}

impl Watchdog {
    pub(super) fn share(&self) -> Arc<Watched> {
        Arc::clone(&self.watched)
    }

    /// Does the work of a collective call that queues on `stream`, and watches what it queues.
    pub(super) fn queue(
        &mut self,
        step: Step,
        stream: Stream,
        state: StreamState,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if state == StreamState::Capturing {
            self.watched.progress.captured();
            return work();
        }
        let watched = &*self.watched;
        let number = watched.progress.enter(step);
        let place = self.turn.take(&watched.places);
        let begun = place.filter(|place| watched.record(place.events.begin, stream));
        work().inspect_err(|_| watched.progress.retract(number))?;
        watched.progress.queued(number);
        if let Some(place) = begun.filter(|place| watched.record(place.events.end, stream)) {
            place.fill(number, step, self.turn.take_skipped());
        }
        Ok(())
    }

    /// # Errors
    /// The group is at its end.
    #[inline]
    pub(super) fn require_alive(&self) -> Result<()> {
        self.watched.require_alive()
    }

    /// Notes why the call `name` failed, for the ranks that wait for it.
    pub(super) fn failed(&self, name: &str, error: &Error) {
        if self.watched.ended.get().is_none() {
            self.progress().refuse(&format!("{name}: {error}"), Call::is_name(name));
        }
    }

    /// Notes that the group's `shutdown` begins.
    pub(super) fn leave(&self, shutdown: Call) {
        self.progress().enter_shutdown(shutdown);
        let _ = self.watched.leaving.set((shutdown, Instant::now()));
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
        let Self { watched, turn: _, thread } = self;
        *watched.stopped.lock() = true;
        watched.stop.notify_all();
        // It panics nowhere; if it did, there is nothing to add.
        let _ = thread.map(Thread::join);
        destroy(watched.base, &watched.places);
    }
}

/// Places with events of the current device.
fn make_places(base: &Base) -> Result<Box<[RingSlot<Events>]>> {
    let make = || {
        let mut event = std::ptr::null_mut();
        let flags = b::CU_EVENT_DISABLE_TIMING;
        // SAFETY: `event` is live.
        let code = unsafe { (base.cuda.cuEventCreate)(&raw mut event, flags) };
        base.cuda.check("cuEventCreate", code).map(|()| event)
    };
    let mut places = Vec::new();
    for _ in 0..IN_FLIGHT {
        let events = make().and_then(|begin| {
            let end = make().inspect_err(|_| {
                // SAFETY: ours, and recorded nowhere.
                let _ = unsafe { (base.cuda.cuEventDestroy_v2)(begin) };
            })?;
            Ok(Events { begin, end })
        });
        match events {
            Ok(events) => places.push(RingSlot::new(events)),
            Err(error) => {
                destroy(base, &places);
                return Err(error);
            }
        }
    }
    Ok(places.into())
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

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    #[inline]
    fn record(&self, event: b::CUevent, stream: Stream) -> bool {
        // SAFETY: the stream is bound; the event is ours.
        let code = unsafe { (self.base.cuda.cuEventRecord)(event, stream.as_raw()) };
        code == b::CUDA_SUCCESS || self.not_recorded(event, code)
    }

    #[cold]
    fn not_recorded(&self, event: b::CUevent, code: b::CUresult) -> bool {
        // A device that has failed says so itself, in every call that waits for it.
        if self.is_done(event).is_none() {
            return false;
        }
        if let Err(error) = self.base.cuda.check("cuEventRecord", code) {
            // Once a group: what one call lacks, further calls lack as well.
            if !self.unwatched.swap(true, Ordering::Relaxed) {
                report(&format!("a call is not watched, so it may be waited for without an end: {error}"));
            }
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

    /// Brings `running`, which goes by places, up to date, and frees the places of what is done. False when the device has
    /// failed: what is queued on it will never say so.
    fn collect(&self, running: &mut [Option<Running>]) -> bool {
        let mut works = true;
        for (place, running) in self.places.iter().zip(running) {
            let Some(call) = place.look() else {
                *running = None;
                continue;
            };
            let done = self.is_done(place.events.end);
            works &= done.is_some();
            let known = running.filter(|known| known.call == call);
            *running = known.or(Some(Running { call, events: place.events, since: None, reported: false }));
            if done != Some(false) {
                place.free(call);
            }
            // Not if it is done, and not if it has given way meanwhile.
            *running = running.filter(|_| place.holds(call));
        }
        works
    }

    /// The shutdown that an error has led to may wait for a long time, with the error not yet reported: an exception is
    /// reported when it has left all scopes, and one of these has called the shutdown. Returns whether nothing is left to say.
    fn look_at_shutdown(&self) -> bool {
        let Some((shutdown, since)) = self.leaving.get().map(|(call, since)| (call.name(), since.elapsed())) else {
            return false;
        };
        let Some(refusal) = self.progress.left_for() else { return true };
        if since < SUSPICIOUS {
            return false;
        }
        let (seconds, missing) = (since.as_secs_f32(), self.progress.why().text);
        report(&format!(
            "{shutdown} has waited for {seconds:.1} s: {missing}; on this rank, this was refused before: {refusal}"
        ));
        true
    }

    fn run(&self) {
        let mut running = vec![None; self.places.len()];
        let mut all_said = false;
        loop {
            let mut stopped = self.stopped.lock();
            let _ = self.stop.wait_while_for(&mut stopped, |stopped| !*stopped, PERIOD);
            if *stopped {
                return;
            }
            drop(stopped);
            all_said = all_said || self.look_at_shutdown();
            match self.look(&mut running) {
                Look::Fine => {}
                // Every call finds the device's error by itself.
                Look::DeviceFailed => return,
                Look::Ended => return self.see_it_through(&mut running),
            }
        }
    }

    fn look(&self, running: &mut [Option<Running>]) -> Look {
        if !self.collect(running) {
            return Look::DeviceFailed;
        }
        let now = Instant::now();
        let oldest = running.iter().flatten().map(|running| running.call.number()).min();
        for running in running.iter_mut().flatten().filter(|running| running.since.is_none()) {
            let unwatched = running.call.is_behind_others() && Some(running.call.number()) == oldest;
            if unwatched || self.is_done(running.events.begin) == Some(true) {
                running.since = Some(now);
            }
        }
        let begun = running.iter_mut().flatten().filter_map(|running| Some((running.since?, running)));
        let Some((since, first)) = begun.min_by_key(|(since, running)| (*since, running.call.number())) else {
            return Look::Fine;
        };
        let (number, step) = (first.call.number(), first.call.step);
        let running = now - since;
        let late = self.limit.is_some_and(|limit| running > limit);
        if running < SUSPICIOUS && !late {
            return Look::Fine;
        }
        let reason = self.progress.reason(number, step);
        let is_slow = !first.reported && running > SLOW;
        first.reported |= is_slow;
        let seconds = running.as_secs_f32();
        let text =
            format!("{step}, call {number} of the group, has been on the device for {seconds:.1} s: {}", reason.text);
        if late || reason.futile {
            self.end(text);
            return Look::Ended;
        }
        if is_slow {
            report(&text);
        }
        Look::Fine
    }

    /// Ends the group: every call from now on throws.
    fn end(&self, text: String) {
        // First, so that a call that is refused from here on does not count as one that may be made again.
        let _ = self.ended.set(text.clone());
        self.progress.give_up(&text);
        if let Some(abort) = &self.abort {
            // SAFETY: the thread that calls this ends before the engine does.
            unsafe { abort.now() };
        }
        report(&text);
    }

    /// The caller may sit in a synchronization that never returns. If it has not taken notice when the grace is over, and
    /// the device is still at it, nothing is left but to end the process.
    fn see_it_through(&self, running: &mut [Option<Running>]) {
        let Some(grace) = self.grace else { return };
        let start = Instant::now();
        while start.elapsed() < grace {
            if *self.stopped.lock() || self.noticed.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(PERIOD.min(grace));
        }
        let stuck = self.collect(running) && running.iter().any(Option::is_some);
        if stuck && !self.noticed.load(Ordering::Relaxed) {
            let text = "nobody has called the library since, and the device is still waiting: the process ends here";
            report(text);
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
