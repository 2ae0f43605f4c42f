//! The streams of callers: created, named by handles, and recorded while they are captured.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::{
    CUstream, cudaErrorInvalidResourceHandle, cudaErrorInvalidValue, cudaErrorNotReady, cudaStreamNonBlocking,
};
use parking_lot::Mutex;

use crate::device::Device;
use crate::fault::{Fault, Outcome};
use crate::graph::{self, Action};
use crate::memory::Span;
use crate::queue::{Point, Run, Stream, StreamKind};

/// The handle that names the legacy NULL stream explicitly.
const LEGACY_HANDLE: usize = 1;
/// The handle that names the calling thread's own stream.
const PER_THREAD_HANDLE: usize = 2;

static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<Stream>>>> = LazyLock::new(Mutex::default);

thread_local! {
    static PER_THREAD: RefCell<HashMap<i32, OwnStream>> = RefCell::default();
}

/// A thread's own stream, closed when the thread ends.
struct OwnStream(Arc<Stream>);

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Streams created by callers and not destroyed.
pub fn live_count() -> u64 {
    STREAMS.lock().len() as u64
}

impl Stream {
    /// Creates a stream for a caller.
    pub fn open(device: &'static Device, flags: u32) -> Outcome<CUstream> {
        if flags & !cudaStreamNonBlocking != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown stream flags {flags:#x}")));
        }
        let kind = if flags == 0 { StreamKind::Blocking } else { StreamKind::NonBlocking };
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
                    own.entry(device.ordinal).or_insert_with(|| OwnStream(Self::create(device, StreamKind::Blocking)));
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
            streams.iter().filter(|(_, it)| std::ptr::eq(it.device(), device)).map(|(handle, _)| *handle).collect();
        let removed: Vec<_> = theirs.iter().filter_map(|handle| streams.remove(handle)).collect();
        drop(streams);
        for stream in removed {
            graph::abandon(&stream);
            stream.close();
        }
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

    /// Waits for the work enqueued so far; on the NULL stream that includes all blocking streams.
    pub fn synchronize(self: &Arc<Self>) -> Outcome<()> {
        graph::refuse_stream_wait(self, "a wait for a stream")?;
        for tail in self.tails() {
            tail.host_wait();
        }
        self.device().check()
    }

    /// Fails with `cudaErrorNotReady` while work is left.
    pub fn query(self: &Arc<Self>) -> Outcome<()> {
        graph::refuse_stream_wait(self, "a question about a stream")?;
        if self.tails().iter().all(Point::host_reached) {
            self.device().check()
        } else {
            Err(Fault::cuda(cudaErrorNotReady, "work is left in the stream"))
        }
    }
}
