//! Lines: the operations of a communicator or EP group, each behind the one before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvte_ep_bindings::{
    cudaErrorInvalidResourceHandle, ncclInvalidUsage, ncclRemoteError, ncclResult_t, ncclSuccess, ncclSystemError,
};
use parking_lot::Mutex;

use crate::acting;
use crate::caller;
use crate::channel::{Breaker, Channel};
use crate::check;
use crate::fault::{Fault, Outcome, contain};
use crate::graph::{self, Action};
use crate::memory::Span;
use crate::order;
use crate::queue::{Ordered, Point, Stream};
use crate::rule::Rule;
use crate::stats::{self, Counters};

/// The ordered line of operations of one channel: each waits for the one enqueued before it.
#[derive(Clone, Debug)]
pub struct Line(Arc<LineState>);

#[derive(Debug)]
struct LineState {
    channel: Mutex<Channel>,
    breaker: Breaker,
    last: Mutex<Option<Point>>,
    status: Arc<Status>,
    /// Set when the communicator or group is destroyed; graphs may still hold operations.
    closed: AtomicBool,
    /// For an EP group, its number in [`order`] and how many operations it had. NCCL orders those of a communicator.
    ordered: Mutex<Option<Ordered>>,
}

/// An operation of a line.
pub type Operation = Arc<dyn Fn(&mut Channel) -> Outcome<()> + Send + Sync>;
/// Picks the counter of an operation.
pub type Counter = fn(&'static Counters) -> &'static AtomicU64;

/// What a communicator's operations, and those of EP groups over it, say about its health.
#[derive(Debug, Default)]
pub struct Status {
    error: Mutex<Option<Fault>>,
    aborted: AtomicBool,
    breakers: Mutex<Vec<Breaker>>,
}

impl Status {
    /// Ends the operations of all lines.
    pub fn abort(&self, text: &str) {
        self.aborted.store(true, Ordering::SeqCst);
        for breaker in &*self.breakers.lock() {
            breaker.trip(text);
        }
    }

    /// The asynchronous error as an NCCL code.
    pub fn async_error(&self) -> ncclResult_t {
        match &*self.error.lock() {
            None => ncclSuccess,
            Some(fault) if fault.nccl == ncclRemoteError => ncclRemoteError,
            Some(_) => ncclSystemError,
        }
    }
}

impl Line {
    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Wraps a fresh channel; its failures are noted in `status`.
    pub fn new(channel: Channel, status: Arc<Status>) -> Self {
        let breaker = channel.breaker();
        status.breakers.lock().push(breaker.clone());
        let closed = AtomicBool::new(false);
        let (channel, last, ordered) = (Mutex::new(channel), Mutex::default(), Mutex::default());
        Self(Arc::new(LineState { channel, breaker, last, status, closed, ordered }))
    }

    /// Asks the caller to order the operations, as an EP group does.
    pub fn expect_order(&self) {
        *self.0.ordered.lock() = Some(Ordered { group: order::open(), operation: 0 });
    }

    /// Ranks that are not done with the operations that this one is done with.
    pub fn busy(&self) -> Vec<usize> {
        self.0.channel.lock().busy()
    }

    /// Enqueues an operation on a stream, behind all earlier ones of this line, or records it if the stream is captured.
    ///
    /// `spans` names the callers' memory that it uses; `counter` counts it each time that it is enqueued.
    pub fn enqueue(
        &self,
        stream: &Arc<Stream>,
        counter: Counter,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        self.enqueue_counted(stream, Some(counter), spans, run)
    }

    /// As [`Line::enqueue`], for the rest of an operation that has been counted.
    pub fn enqueue_rest(
        &self,
        stream: &Arc<Stream>,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        self.enqueue_counted(stream, None, spans, run)
    }

    fn enqueue_counted(
        &self,
        stream: &Arc<Stream>,
        counter: Option<Counter>,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        if let Err(fault) = stream.device().check() {
            // Peers wait for this operation and it will never run.
            self.trip(&fault.text);
            return Err(fault);
        }
        let caller = caller::current();
        // On the thread that does the work, whoever that is.
        let run: Operation = Arc::new(move |channel| {
            let before = caller::replace(caller.clone());
            let done = contain(|| run(channel)).map_err(check::annotate);
            caller::replace(before);
            done
        });
        let action = || {
            let (state, run) = (Arc::clone(&self.0), Arc::clone(&run));
            Action {
                enqueue: Arc::new(move |stream, after| state.push(stream, after, counter, Arc::clone(&run))),
                spans: spans.to_vec(),
                breaker: Some(self.0.breaker.clone()),
                memory: None,
            }
        };
        if graph::record(stream, action)? {
            return Ok(());
        }
        self.0.push(stream, Vec::new(), counter, run).map(drop)
    }

    /// Waits for all enqueued operations.
    pub fn wait(&self) {
        let last = self.0.last.lock().clone();
        if let Some(point) = last {
            point.wait();
        }
    }

    /// Runs a host-blocking operation on the calling thread, behind all enqueued ones.
    pub fn run<T>(&self, run: impl FnOnce(&mut Channel) -> Outcome<T>) -> Outcome<T> {
        self.wait();
        run(&mut self.0.channel.lock())
    }

    /// Ends the line for the peers, with a reason.
    pub fn trip(&self, text: &str) {
        self.0.breaker.trip(text);
    }

    /// Whether the communicator or group is destroyed.
    pub fn is_closed(&self) -> bool {
        self.0.closed.load(Ordering::SeqCst)
    }

    /// Refuses operations from now on, also those of graphs.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.channel.lock().leave();
        if let Some(Ordered { group, .. }) = *self.0.ordered.lock() {
            order::close(group);
        }
        self.0.status.breakers.lock().retain(|breaker| !breaker.is(&self.0.breaker));
    }
}

impl LineState {
    fn push(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        after: Vec<Point>,
        counter: Option<Counter>,
        run: Operation,
    ) -> Outcome<Point> {
        if self.closed.load(Ordering::SeqCst) {
            let text = "an operation of a communicator or EP group that has been destroyed";
            return Err(
                Fault::both(cudaErrorInvalidResourceHandle, ncclInvalidUsage, text).breaks(Rule::DestroyedObject)
            );
        }
        let state = Arc::clone(self);
        let replay = graph::replay();
        let mut last = self.last.lock();
        let mut ordered = self.ordered.lock();
        let next = ordered.map(|before| Ordered { operation: before.operation + 1, ..before });
        let work = move |sticky: Option<&Fault>| {
            if let Some(fault) = sticky {
                state.breaker.trip(&fault.text);
                return Ok(());
            }
            let mut channel = state.channel.lock();
            channel.replay = replay;
            acting::act_as(channel.rank());
            let done = run(&mut channel);
            channel.finish();
            if let Err(fault) = &done {
                channel.fail(fault);
                state.status.error.lock().get_or_insert_with(|| fault.clone());
                if state.status.aborted.load(Ordering::SeqCst) {
                    // The caller asked for the end of the operation; the device stays usable.
                    return Ok(());
                }
                set_last_error(&fault.text);
            }
            done
        };
        let point = stream.push_ordered(after, last.as_ref(), next, Arc::new(work))?;
        *last = Some(point.clone());
        *ordered = next;
        if let Some(counter) = counter {
            stats::count(counter);
        }
        Ok(point)
    }
}

static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// Remembers the text that `ncclGetLastError` returns.
pub fn set_last_error(text: &str) {
    text.clone_into(&mut LAST_ERROR.lock());
}

/// The text that `ncclGetLastError` returns.
pub fn last_error() -> String {
    LAST_ERROR.lock().clone()
}
