//! Queues of work: what a stream is to those below captures.
//!
//! A stream is a queue with a worker thread. Each piece of work names what it waits for as (stream, sequence) pairs of
//! work enqueued earlier, so the dependencies of a process form no cycle. When a device has a sticky error the work that
//! is left is passed over: its sequence numbers still complete, so nobody waits for ever.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, OnceLock};

use nvte_ep_bindings::cudaErrorMemoryAllocation;
use parking_lot::{Condvar, Mutex};

use crate::check;
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome, contain};
use crate::order::{self, Behind};
use crate::rule::Rule;
use crate::{float, sys};

/// How a stream relates to the legacy NULL stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
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
    kind: StreamKind,
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

/// The streams of a device.
#[derive(Default)]
struct OfDevice {
    /// Those with work or a handle, under the lock that gives all enqueued work of the device one order.
    streams: Mutex<Vec<Arc<Stream>>>,
    legacy: OnceLock<Arc<Stream>>,
}

static OF_DEVICES: LazyLock<Box<[OfDevice]>> =
    LazyLock::new(|| device::all().iter().map(|_| OfDevice::default()).collect());

fn of(device: &Device) -> &'static OfDevice {
    &OF_DEVICES[device.ordinal as usize]
}

impl Device {
    /// The legacy NULL stream.
    pub fn legacy(&'static self) -> &'static Arc<Stream> {
        of(self).legacy.get_or_init(|| Stream::create(self, StreamKind::Legacy))
    }

    /// Waits until all work enqueued on the device so far has ended.
    pub fn synchronize(&self) {
        let tails: Vec<_> = of(self).streams.lock().iter().map(Stream::tail).collect();
        for tail in tails {
            tail.host_wait();
        }
    }
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a stream's worker, where CUDA calls are not allowed.
pub fn on_worker() -> bool {
    IS_WORKER.get()
}

impl Stream {
    /// Makes a stream known to its device.
    pub fn create(device: &'static Device, kind: StreamKind) -> Arc<Self> {
        let stream =
            Arc::new(Self { device, kind, queue: Mutex::default(), arrival: Condvar::new(), progress: Condvar::new() });
        of(device).streams.lock().push(Arc::clone(&stream));
        stream
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
            of(self.device).streams.lock().retain(|stream| !Arc::ptr_eq(stream, self));
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
    pub fn kind(&self) -> StreamKind {
        self.kind
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
        let streams = of(self.device).streams.lock();
        match self.kind {
            StreamKind::Legacy => {
                after.extend(streams.iter().filter(|s| s.kind == StreamKind::Blocking).map(Self::tail))
            }
            StreamKind::Blocking => after.push(legacy.tail()),
            StreamKind::NonBlocking => {}
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

    /// The ends of what a wait for the stream waits for: on the NULL stream those of all blocking streams too.
    pub fn tails(self: &Arc<Self>) -> Vec<Point> {
        let mut tails = vec![self.tail()];
        if self.kind == StreamKind::Legacy {
            tails.extend(
                of(self.device).streams.lock().iter().filter(|s| s.kind == StreamKind::Blocking).map(Self::tail),
            );
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
        of(self.device).streams.lock().retain(|stream| !Arc::ptr_eq(stream, &self));
    }
}
