//! What a low-latency group consists of, on one device.

use crate::backend::agreement::Rendezvous;
use crate::backend::engine::low_latency::{Group as Engine, Handle, Held};
use crate::backend::live::enter;
use crate::backend::residency::{Fit, Residency};
use crate::backend::watchdog::Watchdog;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::ops::{Arguments, LlDispatched, Ranges, scales_of};
use crate::progress::Step;
use crate::sys::Base;
use crate::sys::cuda::{Stream, StreamState};
use crate::tensor::TensorView;
use lru::LruCache;
use rustc_hash::FxBuildHasher;

/// A group and the watchdog of its calls.
pub(in crate::backend) struct Live {
    pub(in crate::backend) watchdog: Watchdog,
    pub(super) group: Group,
}

/// One piece of handle memory.
pub(super) struct Entry {
    pub(super) handle: Handle,
    pub(super) top_k: u32,
    /// What the last dispatch over it left.
    pub(super) dispatched: Option<LlDispatched>,
}

/// An operation whose receive half is still to come.
pub(super) struct Staged {
    pub(super) step: Step,
    /// Address of its handle memory.
    pub(super) memory: u64,
    pub(super) stream: Stream,
    /// Whether its send half was captured.
    pub(super) state: StreamState,
    /// What NCCL EP points to until then.
    pub(super) held: Held,
    /// What its combine needs, of a dispatch.
    pub(super) dispatched: Option<LlDispatched>,
}

/// Engine and handles of one device.
pub(super) struct Group {
    pub(super) base: &'static Base,
    pub(super) env: Env,
    pub(super) engine: Engine,
    pub(super) rendezvous: Rendezvous,
    /// By the address of their memory.
    pub(super) handles: LruCache<u64, Entry, FxBuildHasher>,
    pub(super) handle_bytes: usize,
    pub(super) staged: Option<Staged>,
    /// Of operations whose receive half could not be queued: NCCL EP may still look at them.
    pub(super) left: Vec<Held>,
    pub(super) residency: Residency,
    pub(super) stream: Option<Stream>,
}

/// Device memory of a low-latency group, of this rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlMemoryUsage {
    /// Rows on their way.
    pub buffers: u64,
    /// Scratch of the kernels.
    pub workspace: u64,
    /// The library's own.
    pub library: u64,
    /// Handle memory, which callers allocate, of all open handles.
    pub handles: u64,
    /// How many handles are open.
    pub open_handles: u64,
}

impl Group {
    /// Whether `stream` captures, if it is of the group's device.
    pub(super) fn enter(&mut self, stream: Stream) -> Result<StreamState> {
        enter(&self.base.cuda, &mut self.stream, stream)
    }

    /// # Errors
    /// Handle memory that is none, too small, or not the device's.
    pub(super) fn require_memory(&mut self, mem: &TensorView) -> Result<()> {
        let found = mem.vector("[bytes]")?;
        mem.require_dtype(&[crate::dtype::DType::Byte])?;
        if found < self.handle_bytes {
            let required = format!("must have the size of nvte_ep_ext_ll_handle_mem_size, {} bytes", self.handle_bytes);
            return Err(Error::argument(mem.name, required, found));
        }
        mem.require_storage(256)?;
        self.residency.check(&self.base.cuda, mem, self.handle_bytes as u64, Fit::OnDevice)
    }

    /// # Errors
    /// Tensors that the device cannot reach, or that share memory which the call writes.
    pub(super) fn require_places<C: Arguments>(&mut self, mem: &TensorView, call: &mut C) -> Result<()> {
        for tensor in call.tensors().into_iter().flatten() {
            for part in [Some(*tensor), scales_of(tensor)].into_iter().flatten() {
                self.residency.check(&self.base.cuda, &part, part.byte_len(), Fit::Reachable)?;
            }
        }
        Ranges::new::<C>(mem, self.handle_bytes).with(call).require_disjoint()
    }

    /// # Errors
    /// An operation is staged: NCCL EP has one place for it, and traps over another.
    pub(super) fn require_none_staged(&self) -> Result<()> {
        let Some(staged) = &self.staged else { return Ok(()) };
        Err(Error::State(format!(
            "the {} that was called with send_only has not been completed, and a group has one such operation at a time: call \
             nvte_ep_ext_ll_complete first",
            staged.step.call.name()
        )))
    }

    /// The handle over `memory` for `top_k` experts a token, opened if it is not.
    pub(super) fn open(&mut self, mem: &TensorView, top_k: u32) -> Result<()> {
        if self.handles.get(&mem.data).is_some_and(|entry| entry.top_k == top_k) {
            return Ok(());
        }
        if let Some(other) = self.handles.pop(&mem.data) {
            self.engine.close(other.handle)?;
        }
        let memory = mem.bytes(0, self.handle_bytes);
        // SAFETY: the memory is the caller's, of the size that was checked, for as long as the handle is used.
        let handle = unsafe { self.engine.open(top_k, &memory) }?;
        tracing::debug!(target: "nvte_ep", memory = mem.data, top_k, "low-latency handle created");
        // The least recently used one goes where there are too many; none is staged now.
        if let Some((_, gone)) = self.handles.push(mem.data, Entry { handle, top_k, dispatched: None }) {
            self.engine.close(gone.handle)?;
        }
        Ok(())
    }

    /// What the receive half of the staged operation is, if `mem` and `stream` are its own.
    pub(super) fn staged(&self, mem: &TensorView, stream: Stream, state: StreamState) -> Result<&Staged> {
        let staged = self.staged.as_ref().ok_or_else(|| {
            Error::State(
                "there is nothing to complete: call nvte_ep_ext_ll_dispatch or nvte_ep_ext_ll_combine with send_only = 1 first"
                    .into(),
            )
        })?;
        let name = staged.step.call.name();
        if mem.data != staged.memory {
            let required = format!("must be what {name} was given, at {:#x}", staged.memory);
            return Err(Error::argument(mem.name, required, format!("{:#x}", mem.data)));
        }
        if stream != staged.stream {
            let required =
                format!("must be the stream of {name}, {:#x}: both halves are queued there", staged.stream.address());
            return Err(Error::argument("stream", required, format!("{:#x}", stream.address())));
        }
        if state != staged.state {
            let what = |state| if state == StreamState::Capturing { "captured" } else { "not captured" };
            return Err(Error::State(format!(
                "{name} was {} and this call is {}: both halves of an operation belong into one graph, or into none",
                what(staged.state),
                what(state)
            )));
        }
        Ok(staged)
    }

    /// What a dispatch over `mem` left for this combine.
    pub(super) fn dispatched(&mut self, mem: &TensorView) -> Result<LlDispatched> {
        let found = self.handles.get(&mem.data).and_then(|entry| entry.dispatched);
        found.ok_or_else(|| {
            Error::State(format!(
                "nothing was dispatched over the {} at {:#x}: call nvte_ep_ext_ll_dispatch with it first (if it was, more handles \
                 than NVTE_EP_HANDLE_CACHE_SIZE were used since)",
                mem.name, mem.data
            ))
        })
    }

    /// Whether a shutdown would leave an operation on the device half done.
    pub(super) fn require_nothing_open(&self) -> Result<()> {
        match &self.staged {
            Some(staged) if staged.state == StreamState::Working => self.require_none_staged(),
            _ => Ok(()),
        }
    }
}
