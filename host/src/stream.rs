//! Streams and events.
//!
//! A stream is a queue with a worker thread. Each piece of work names what it waits for as (stream, sequence) pairs of
//! work enqueued earlier, so the dependencies of a process form no cycle. When a device has a sticky error the work that
//! is left is passed over: its sequence numbers still complete, so nobody waits for ever.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use nvte_ep_bindings::{
    CUevent, CUstream, cudaErrorInvalidResourceHandle, cudaErrorInvalidValue, cudaErrorMemoryAllocation,
    cudaErrorNotReady, cudaEventBlockingSync, cudaEventDisableTiming, cudaEventInterprocess, cudaStreamNonBlocking,
};
use parking_lot::{Condvar, Mutex};

use crate::check::{self, Rule};
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome, contain};
use crate::graph::{self, Action, Mark};
use crate::memory::Span;
use crate::order::{self, Behind};
use crate::{float, sys};

/// The handle that names the legacy NULL stream explicitly.
const LEGACY_HANDLE: usize = 1;
/// The handle that names the calling thread's own stream.
const PER_THREAD_HANDLE: usize = 2;

/// How a stream relates to the legacy NULL stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The NULL stream: waits for all blocking streams, and they for it.
    Legacy,
    /// Created without flags.
    Blocking,
    /// Created with `cudaStreamNonBlocking`.
    NonBlocking,
}

/// Work for a stream; it is told the sticky error when the device already has one. Graphs run it again and again.
pub type Run = Arc<dyn Fn(Option<&Fault>) -> Outcome<()> + Send + Sync>;

struct Work {
    after: Vec<Point>,
    behind: Behind,
    run: Run,
}

/// A place in a stream: reached when the work with this sequence number has ended.
#[derive(Clone, Debug)]
pub struct Point {
    stream: Arc<Stream>,
    sequence: u64,
    /// What is before it, itself included.
    behind: Behind,
}

impl Point {
    /// Waits until the point is reached.
    pub fn wait(&self) {
        let mut queue = self.stream.queue.lock();
        while queue.completed < self.sequence {
            self.stream.progress.wait(&mut queue);
        }
    }

    /// Whether the point is reached.
    pub fn reached(&self) -> bool {
        self.stream.queue.lock().completed >= self.sequence
    }

    /// As [`Point::wait`] for the program, which may build on it.
    pub fn host_wait(&self) {
        self.wait();
        order::host_learns(&self.behind);
    }

    /// As [`Point::reached`] for the program, which may build on it.
    pub fn host_reached(&self) -> bool {
        let reached = self.reached();
        if reached {
            order::host_learns(&self.behind);
        }
        reached
    }
}

/// An operation of an EP group: the caller has to order it behind the one before.
#[derive(Clone, Copy, Debug)]
pub struct Ordered {
    /// The group's number in [`order`].
    pub group: u64,
    /// Number of the operation, from 1.
    pub operation: u64,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    enqueued: u64,
    completed: u64,
    worker: bool,
    closing: bool,
    /// What the next work comes behind.
    behind: Behind,
}

/// An ordered queue of work.
pub struct Stream {
    device: &'static Device,
    kind: Kind,
    queue: Mutex<Queue>,
    /// Signals the worker.
    arrival: Condvar,
    /// Signals those who wait for work to end.
    progress: Condvar,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.ordinal).field("kind", &self.kind).finish_non_exhaustive()
    }
}

static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<Stream>>>> = LazyLock::new(Mutex::default);
static EVENTS: LazyLock<Mutex<HashMap<usize, Arc<Event>>>> = LazyLock::new(Mutex::default);

thread_local! {
    static PER_THREAD: RefCell<HashMap<i32, OwnStream>> = RefCell::default();
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A thread's own stream, closed when the thread ends.
struct OwnStream(Arc<Stream>);

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether the calling thread is a stream's worker, where CUDA calls are not allowed.
pub fn on_worker() -> bool {
    IS_WORKER.get()
}

/// Streams created by callers and not destroyed.
pub fn live_count() -> u64 {
    STREAMS.lock().len() as u64
}

impl Stream {
    /// Makes a stream known to its device.
    pub fn create(device: &'static Device, kind: Kind) -> Arc<Self> {
        let stream =
            Arc::new(Self { device, kind, queue: Mutex::default(), arrival: Condvar::new(), progress: Condvar::new() });
        device.streams.lock().push(Arc::clone(&stream));
        stream
    }

    /// Creates a stream for a caller.
    pub fn open(device: &'static Device, flags: u32) -> Outcome<CUstream> {
        if flags & !cudaStreamNonBlocking != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown stream flags {flags:#x}")));
        }
        let kind = if flags == 0 { Kind::Blocking } else { Kind::NonBlocking };
        let stream = Self::create(device, kind);
        let handle = Arc::as_ptr(&stream) as usize;
        STREAMS.lock().insert(handle, stream);
        Ok(handle as CUstream)
    }

    /// The stream that a handle names.
    pub fn resolve(handle: CUstream, device: &'static Device) -> Outcome<Arc<Stream>> {
        match handle as usize {
            0 | LEGACY_HANDLE => Ok(Arc::clone(device.legacy())),
            PER_THREAD_HANDLE => Ok(PER_THREAD.with_borrow_mut(|own| {
                let stream =
                    own.entry(device.ordinal).or_insert_with(|| OwnStream(Self::create(device, Kind::Blocking)));
                Arc::clone(&stream.0)
            })),
            handle => STREAMS.lock().get(&handle).cloned().ok_or_else(|| {
                Fault::cuda(cudaErrorInvalidResourceHandle, format!("{handle:#x} is not a live stream"))
            }),
        }
    }

    /// Destroys a caller's stream; work that it still holds is finished first.
    pub fn destroy(handle: CUstream) -> Outcome<()> {
        let stream = STREAMS.lock().remove(&(handle as usize)).ok_or_else(|| {
            Fault::cuda(cudaErrorInvalidResourceHandle, format!("{handle:p} is not a stream that can be destroyed"))
        })?;
        graph::abandon(&stream);
        stream.close();
        Ok(())
    }

    /// Destroys the streams that callers have made on a device.
    pub fn destroy_all_of(device: &'static Device) {
        let mut streams = STREAMS.lock();
        let theirs: Vec<usize> =
            streams.iter().filter(|(_, it)| std::ptr::eq(it.device, device)).map(|(handle, _)| *handle).collect();
        let removed: Vec<_> = theirs.iter().filter_map(|handle| streams.remove(handle)).collect();
        drop(streams);
        for stream in removed {
            graph::abandon(&stream);
            stream.close();
        }
    }

    /// Ends the worker after the work that is left.
    pub fn close(self: &Arc<Self>) {
        let worker = {
            let mut queue = self.queue.lock();
            queue.closing = true;
            self.arrival.notify_one();
            queue.worker
        };
        if !worker {
            self.device.streams.lock().retain(|stream| !Arc::ptr_eq(stream, self));
        }
    }

    /// Device on which the stream runs.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// The end of what has been enqueued so far.
    pub fn tail(self: &Arc<Self>) -> Point {
        let queue = self.queue.lock();
        Point { stream: Arc::clone(self), sequence: queue.enqueued, behind: queue.behind.clone() }
    }

    /// How the stream relates to the NULL stream.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Enqueues `run` behind everything in the stream, or records it if the stream is captured; it is passed over after a
    /// sticky error. `spans` names the callers' memory that it uses.
    ///
    /// Gives the place in the stream, and nothing for recorded work.
    pub fn enqueue(
        self: &Arc<Self>,
        spans: &[Span],
        run: impl Fn() -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<Option<Point>> {
        let run: Run = Arc::new(move |sticky| if sticky.is_none() { run() } else { Ok(()) });
        let action = || {
            let run = Arc::clone(&run);
            Action {
                enqueue: Arc::new(move |stream, after| stream.push(after, Arc::clone(&run))),
                spans: spans.to_vec(),
                breaker: None,
                memory: None,
            }
        };
        if graph::record(self, action)? { Ok(None) } else { self.push(Vec::new(), run).map(Some) }
    }

    /// Enqueues work behind everything in the stream and behind `after`, captured or not; it is called after a sticky
    /// error too, and told of it.
    pub fn push(self: &Arc<Self>, after: Vec<Point>, run: Run) -> Outcome<Point> {
        self.push_ordered(after, None, None, run)
    }

    /// As [`Stream::push`] for an operation of an EP group, behind `last`, the one before it, and checked to be so by the
    /// caller's doing.
    pub fn push_ordered(
        self: &Arc<Self>,
        mut after: Vec<Point>,
        last: Option<&Point>,
        operation: Option<Ordered>,
        run: Run,
    ) -> Outcome<Point> {
        // Taken before the device's lock, which it takes itself on first use.
        let legacy = self.device.legacy();
        let streams = self.device.streams.lock();
        match self.kind {
            Kind::Legacy => after.extend(streams.iter().filter(|s| s.kind == Kind::Blocking).map(Self::tail)),
            Kind::Blocking => after.push(legacy.tail()),
            Kind::NonBlocking => {}
        }
        let mut behind = self.queue.lock().behind.clone();
        behind.merge(&order::of_host());
        for point in &after {
            behind.merge(&point.behind);
        }
        if let Some(Ordered { group, operation }) = operation {
            if let Some(last) = last.filter(|_| behind.last(group) + 1 < operation) {
                let text = format!(
                    "stream {:p}: the group's operation before this one is on stream {:p}, and no event or wait orders them",
                    Arc::as_ptr(self),
                    Arc::as_ptr(&last.stream)
                );
                check::breach(Rule::StreamOrder, text)?;
            }
            behind.put(group, operation);
        }
        after.extend(last.cloned());
        after.retain(|point| !Arc::ptr_eq(&point.stream, self) && !point.reached());
        let mut queue = self.queue.lock();
        queue.behind = behind.clone();
        if !queue.worker {
            let stream = Arc::clone(self);
            std::thread::Builder::new()
                .name("nvte-ep-stream".to_owned())
                .spawn(move || stream.work())
                .map_err(|error| Fault::cuda(cudaErrorMemoryAllocation, format!("cannot start a stream: {error}")))?;
            queue.worker = true;
        }
        queue.enqueued += 1;
        queue.work.push_back(Work { after, behind: behind.clone(), run });
        self.arrival.notify_one();
        Ok(Point { stream: Arc::clone(self), sequence: queue.enqueued, behind })
    }

    /// Waits for the work enqueued so far; on the NULL stream that includes all blocking streams.
    pub fn synchronize(self: &Arc<Self>) -> Outcome<()> {
        graph::refuse_stream_wait(self, "a wait for a stream")?;
        for tail in self.tails() {
            tail.host_wait();
        }
        self.device.check()
    }

    /// Fails with `cudaErrorNotReady` while work is left.
    pub fn query(self: &Arc<Self>) -> Outcome<()> {
        graph::refuse_stream_wait(self, "a question about a stream")?;
        if self.tails().iter().all(Point::host_reached) {
            self.device.check()
        } else {
            Err(Fault::cuda(cudaErrorNotReady, "work is left in the stream"))
        }
    }

    fn tails(self: &Arc<Self>) -> Vec<Point> {
        let mut tails = vec![self.tail()];
        if self.kind == Kind::Legacy {
            tails.extend(self.device.streams.lock().iter().filter(|s| s.kind == Kind::Blocking).map(Self::tail));
        }
        tails
    }

    /// The worker thread.
    fn work(self: Arc<Self>) {
        IS_WORKER.set(true);
        // For reports.
        device::make_current_driver(Some(self.device));
        sys::block_signals();
        loop {
            let work = {
                let mut queue = self.queue.lock();
                loop {
                    if let Some(work) = queue.work.pop_front() {
                        break Some(work);
                    }
                    if queue.closing {
                        queue.worker = false;
                        // Later waits for the device do not see this stream any more.
                        order::host_learns(&queue.behind);
                        break None;
                    }
                    self.arrival.wait(&mut queue);
                }
            };
            let Some(work) = work else { break };
            for point in work.after {
                point.wait();
            }
            let sticky = self.device.sticky().map(|sticky| &sticky.fault);
            order::runs(&work.behind);
            // The thread began with that of the program's, and a host function may have changed it.
            float::reset();
            if let Err(fault) = contain(|| (work.run)(sticky)) {
                self.device.poison(check::annotate(fault));
            }
            // What the work held is gone for those who wait for its end.
            drop(work.run);
            self.queue.lock().completed += 1;
            self.progress.notify_all();
        }
        self.device.streams.lock().retain(|stream| !Arc::ptr_eq(stream, &self));
    }
}

/// A marker in a stream.
#[derive(Debug)]
pub struct Event {
    timing: bool,
    record: Mutex<Record>,
}

/// Where an event was last recorded.
#[derive(Clone, Debug)]
enum Record {
    Never,
    /// In a stream.
    At {
        point: Point,
        time: Arc<Mutex<Option<Instant>>>,
    },
    /// In a capture.
    Captured(Mark),
}

impl Event {
    /// Creates an event for a caller.
    pub fn open(flags: u32) -> Outcome<CUevent> {
        let known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
        if flags & !known != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown event flags {flags:#x}")));
        }
        if flags & cudaEventInterprocess != 0 {
            return Err(Fault::cuda(
                nvte_ep_bindings::cudaErrorNotSupported,
                "interprocess events are not supported by the host runtime",
            ));
        }
        let event = Arc::new(Event { timing: flags & cudaEventDisableTiming == 0, record: Mutex::new(Record::Never) });
        let handle = Arc::as_ptr(&event) as usize;
        EVENTS.lock().insert(handle, event);
        Ok(handle as CUevent)
    }

    /// The event that a handle names.
    pub fn resolve(handle: CUevent) -> Outcome<Arc<Event>> {
        EVENTS.lock().get(&(handle as usize)).cloned().ok_or_else(|| Self::unknown(handle))
    }

    /// Destroys a caller's event.
    pub fn destroy(handle: CUevent) -> Outcome<()> {
        EVENTS.lock().remove(&(handle as usize)).map(drop).ok_or_else(|| Self::unknown(handle))
    }

    fn unknown(handle: CUevent) -> Fault {
        Fault::cuda(cudaErrorInvalidResourceHandle, format!("{handle:p} is not a live event"))
    }

    /// Puts the event at the end of a stream.
    pub fn record(&self, stream: &Arc<Stream>) -> Outcome<()> {
        if let Some(mark) = graph::mark(stream)? {
            *self.record.lock() = Record::Captured(mark);
            return Ok(());
        }
        let time = Arc::new(Mutex::new(None));
        let stamp = Arc::clone(&time);
        let run: Run = Arc::new(move |sticky| {
            if sticky.is_none() {
                *stamp.lock() = Some(Instant::now());
            }
            Ok(())
        });
        let point = stream.push(Vec::new(), run)?;
        *self.record.lock() = Record::At { point, time };
        Ok(())
    }

    /// Makes a stream wait for the event as last recorded; without a record that is nothing.
    pub fn hold_back(&self, stream: &Arc<Stream>) -> Outcome<()> {
        let record = self.record.lock().clone();
        match record {
            Record::Captured(mark) => graph::join(stream, &mark),
            Record::Never => graph::refuse_outside_event(stream, false),
            Record::At { point, .. } => {
                graph::refuse_outside_event(stream, true)?;
                stream.push(vec![point], Arc::new(|_: Option<&Fault>| Ok(()))).map(drop)
            }
        }
    }

    /// The point at which the event happens, for a wait or question that captures may forbid.
    fn point(&self, what: &str) -> Outcome<Option<Point>> {
        let record = self.record.lock().clone();
        match record {
            Record::Captured(mark) => Err(graph::captured_event(&mark, true)),
            Record::Never => graph::refuse_unsafe(what).map(|()| None),
            Record::At { point, .. } => graph::refuse_unsafe(what).map(|()| Some(point)),
        }
    }

    /// Waits for the event.
    pub fn synchronize(&self) -> Outcome<()> {
        if let Some(point) = self.point("a wait for an event")? {
            point.host_wait();
        }
        device::selected().check()
    }

    /// Fails with `cudaErrorNotReady` while the event has not happened.
    pub fn query(&self) -> Outcome<()> {
        match self.point("a question about an event")? {
            Some(point) if !point.host_reached() => {
                Err(Fault::cuda(cudaErrorNotReady, "the event has not happened yet"))
            }
            _ => device::selected().check(),
        }
    }

    /// Milliseconds from `start` to `self`.
    pub fn since(&self, start: &Event) -> Outcome<f32> {
        let mut times = [None; 2];
        for (event, time) in [start, self].into_iter().zip(&mut times) {
            let record = event.record.lock().clone();
            let (point, stamp) = match record {
                Record::Captured(mark) => return Err(graph::captured_event(&mark, false)),
                Record::At { point, time } if event.timing => (point, time),
                _ => {
                    let text = "the event was never recorded or was created without timing";
                    return Err(Fault::cuda(cudaErrorInvalidResourceHandle, text));
                }
            };
            if !point.host_reached() {
                return Err(Fault::cuda(cudaErrorNotReady, "an event has not happened yet"));
            }
            *time = *stamp.lock();
        }
        match times {
            [Some(start), Some(end)] if end >= start => Ok((end - start).as_secs_f32() * 1e3),
            [Some(start), Some(end)] => Ok(-(start - end).as_secs_f32() * 1e3),
            _ => device::selected().check().map(|()| 0.0),
        }
    }
}
