//! What a group in low-latency mode has beside its ranks: the buffer that they send through, and the one operation that may be
//! between its halves.

use std::sync::Arc;

use nvte_ep_bindings::{cudaErrorIllegalAddress, cudaErrorLaunchFailure, ncclEpTensor_t, ncclInvalidUsage};
use parking_lot::Mutex;

use crate::channel::Channel;
use crate::check;
use crate::comm::Comm;
use crate::ep::desc::Tensor;
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::line::{Counter, Line};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;

/// An operation whose halves may be apart.
pub trait Halves: Send + Sync {
    /// The exported function.
    fn function(&self) -> &'static str;
    /// Reads what this rank sends; no peer is needed.
    fn send(&self) -> Outcome<()>;
    /// Meets the peers and writes what this rank receives.
    fn receive(&self, channel: &mut Channel) -> Outcome<()>;
    /// The memory that the operation uses.
    fn spans(&self) -> Vec<Span>;
}

/// A descriptor whose address NCCL EP keeps until it completes an operation.
#[derive(Debug)]
pub struct Kept {
    address: usize,
    argument: &'static str,
    was: Tensor,
}

impl Kept {
    /// Keeps the address of a descriptor that has been read.
    pub fn new(pointer: *const ncclEpTensor_t, argument: &'static str, was: &Tensor) -> Self {
        Self { address: pointer as usize, argument, was: was.clone() }
    }

    /// Fails where a descriptor has no address of its own.
    fn check_data(&self) -> Outcome<()> {
        if self.was.has_data || self.was.is_empty() {
            return Ok(());
        }
        let text = "must give data, and not only a window, in a staged operation";
        Err(self.was.wrong(text).breaks(Rule::StagedTensors))
    }

    /// Fails where the descriptor is no longer what it was.
    ///
    /// # Safety
    ///
    /// The descriptor is still there.
    unsafe fn check_same(&self, comm: &Comm, function: &str) -> Outcome<()> {
        let pointer = std::ptr::with_exposed_provenance(self.address);
        // SAFETY: passed on to the caller.
        let now = unsafe { Tensor::read(pointer, comm, function, self.argument) };
        let is = |now: &Tensor| {
            now.datatype == self.was.datatype
                && now.shape == self.was.shape
                && now.span.address() == self.was.span.address()
        };
        let found = match now {
            Ok(Some(now)) if is(&now) => return Ok(()),
            Ok(Some(now)) => format!("{} at {:#x}", now.describe(), now.span.address()),
            Ok(None) => "nothing".to_owned(),
            Err(fault) => fault.text,
        };
        let Self { argument, was, .. } = self;
        let text = format!(
            "{function}: the descriptor of {argument} was {} at {:#x} when the operation was staged and is {found}: keep the \
             descriptors until ncclEpComplete",
            was.describe(),
            was.span.address()
        );
        Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::StagedTensors))
    }
}

/// An operation between its halves, as the calls say.
struct Staged {
    /// Address of the handle.
    handle: usize,
    stream: Arc<Stream>,
    operation: Arc<dyn Halves>,
    generation: u64,
    kept: Vec<Kept>,
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: usize,
    /// How often it was replaced by a larger one.
    generation: u64,
}

/// The state of a group in low-latency mode.
pub struct LowLatency {
    /// Multiprocessors that its kernels use.
    pub sms: usize,
    grows: bool,
    buffer: Mutex<Buffer>,
    /// What the calls have staged.
    staged: Mutex<Option<Staged>>,
    /// What has run its first half only: calls and replays of graphs run in another order than they are made.
    half_run: Mutex<Option<&'static str>>,
}

impl std::fmt::Debug for LowLatency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LowLatency").field("sms", &self.sms).field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

fn staged_rule(text: String) -> Fault {
    Fault::both(cudaErrorLaunchFailure, ncclInvalidUsage, text).breaks(Rule::StagedOperation)
}

impl LowLatency {
    /// `buffer_bytes` is `rdma_buffer_size`: 0 for a buffer that grows.
    pub fn new(buffer_bytes: usize, sms: usize) -> Self {
        let buffer = Mutex::new(Buffer { bytes: buffer_bytes, generation: 0 });
        Self { sms, grows: buffer_bytes == 0, buffer, staged: Mutex::default(), half_run: Mutex::default() }
    }

    /// Sees to a buffer of `bytes` bytes; collective where it has to grow.
    pub fn fit(&self, line: &Line, bytes: usize, function: &str) -> Outcome<()> {
        let there = self.buffer.lock().bytes;
        if bytes <= there {
            return Ok(());
        }
        if !self.grows {
            let text = format!("{function}: the handle needs a buffer of {bytes} bytes, rdma_buffer_size is {there}");
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        if let Some(staged) = &*self.staged.lock() {
            let text = format!("{function}: the buffer has to grow while {} is staged", staged.operation.function());
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::BufferGrowth));
        }
        graph::refuse_unsafe(&format!("{function}: a larger buffer"))?;
        line.run(|channel| channel.exchange(&format!("{function}(buffer of {bytes} bytes)"), [0; 4], 0))?;
        let mut buffer = self.buffer.lock();
        *buffer = Buffer { bytes, generation: buffer.generation + 1 };
        Ok(())
    }

    /// Fails where an operation is staged.
    pub fn refuse_staged(&self, function: &str) -> Outcome<()> {
        self.staged.lock().as_ref().map_or(Ok(()), |staged| {
            let before = staged.operation.function();
            Err(staged_rule(format!(
                "{function}: {before} with send_only is staged: call ncclEpComplete on its handle first"
            )))
        })
    }

    /// As [`LowLatency::refuse_staged`], of one handle.
    pub fn refuse_staged_of(&self, handle: usize, function: &str) -> Outcome<()> {
        let is_its = self.staged.lock().as_ref().is_some_and(|staged| staged.handle == handle);
        if is_its { self.refuse_staged(function) } else { Ok(()) }
    }

    /// Enqueues an operation over the handle at an address: all of it, or its first half.
    pub fn start(
        self: &Arc<Self>,
        line: &Line,
        stream: &Arc<Stream>,
        handle: usize,
        counter: Counter,
        operation: Arc<dyn Halves>,
        kept: Option<Vec<Kept>>,
    ) -> Outcome<()> {
        self.refuse_staged(operation.function())?;
        let generation = self.buffer.lock().generation;
        let (mode, spans, work) = (Arc::clone(self), operation.spans(), Arc::clone(&operation));
        let Some(kept) = kept else {
            return line.enqueue(stream, counter, &spans, move |channel| {
                mode.begin(work.function(), false, generation)?;
                work.send()?;
                work.receive(channel)
            });
        };
        kept.iter().try_for_each(Kept::check_data)?;
        line.enqueue(stream, counter, &spans, move |_| {
            mode.begin(work.function(), true, generation)?;
            work.send()
        })?;
        *self.staged.lock() = Some(Staged { handle, stream: Arc::clone(stream), operation, generation, kept });
        Ok(())
    }

    /// Enqueues the second half of what is staged, on its own stream, as NCCL EP does whatever `stream` is given.
    ///
    /// # Safety
    ///
    /// The descriptors of the staged operation are still there.
    pub unsafe fn complete(
        self: &Arc<Self>,
        line: &Line,
        comm: &Comm,
        handle: usize,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let function = "ncclEpComplete";
        let mut staged = self.staged.lock();
        let there = match staged.take() {
            Some(there) if there.handle == handle => there,
            Some(there) => {
                let text = format!("{function}: the staged {} is of another handle", there.operation.function());
                *staged = Some(there);
                return Err(staged_rule(text));
            }
            None => return Err(staged_rule(format!("{function}: the handle has no staged operation"))),
        };
        // SAFETY: passed on to the caller.
        let same = there.kept.iter().try_for_each(|kept| unsafe { kept.check_same(comm, function) });
        let same = same.and_then(|()| {
            if Arc::ptr_eq(stream, &there.stream) {
                return Ok(());
            }
            let before = there.operation.function();
            let text = format!(
                "{function}: stream is another one than that of {before}, and the receive half runs on that one"
            );
            check::breach(Rule::StagedStream, text)
        });
        if let Err(fault) = same {
            *staged = Some(there);
            return Err(fault);
        }
        let Staged { stream, operation, generation, .. } = there;
        let (mode, spans) = (Arc::clone(self), operation.spans());
        line.enqueue_rest(&stream, &spans, move |channel| {
            mode.end(operation.function(), generation)?;
            operation.receive(channel)
        })
    }

    fn check_buffer(&self, function: &str, generation: u64) -> Outcome<()> {
        if self.buffer.lock().generation == generation {
            return Ok(());
        }
        let text =
            format!("{function}: ncclEpInitHandle has replaced the group's buffer since the operation was captured");
        Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::BufferGrowth))
    }

    fn begin(&self, function: &'static str, only_half: bool, generation: u64) -> Outcome<()> {
        self.check_buffer(function, generation)?;
        let mut half_run = self.half_run.lock();
        if let Some(before) = *half_run {
            return Err(staged_rule(format!(
                "{function}: {before} with send_only has run, and its ncclEpComplete has not"
            )));
        }
        if only_half {
            *half_run = Some(function);
        }
        Ok(())
    }

    fn end(&self, function: &'static str, generation: u64) -> Outcome<()> {
        self.check_buffer(function, generation)?;
        match self.half_run.lock().take() {
            Some(before) if before == function => Ok(()),
            _ => Err(staged_rule(format!("{function}: ncclEpComplete runs, but no first half has run before it"))),
        }
    }
}
