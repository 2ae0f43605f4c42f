//! The seam between the core and what moves the rows. Above it there is no type of NCCL EP: the core checks arguments, finds the
//! routing that a call means, orders and watches the calls; an engine queues their work. To add one, add a variant to
//! [`EngineKind`], [`Candidate`], [`Fit`], [`Engine`] and [`Handle`], and its limits to `limits`.

mod nccl_ep;

use super::communicator::Communicator;
use crate::config::{GroupConfig, LayerConfig};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::limits::{self, Limits};
use crate::memory::GroupMemory;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use crate::options::{EngineChoice, Options};
use crate::preflight::Place;
use crate::sys::Base;
use crate::sys::cuda::{DeviceFacts, Stream};
use crate::sys::nccl::CommFacts;
use crate::tensor::TensorView;

/// Which engine a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineKind {
    /// NCCL EP's high-throughput mode.
    NcclEp = 1,
}

impl EngineKind {
    /// What it takes.
    pub(super) fn limits(self) -> &'static Limits {
        match self {
            Self::NcclEp => &limits::NCCL_EP,
        }
    }

    /// The engine that the option `backend` or, where that leaves it open, NVTE_EP_BACKEND asks for.
    ///
    /// # Errors
    /// An engine that this build does not have.
    pub(super) fn choose(options: &Options, env: &Env) -> Result<Self> {
        let (name, choice) = match options.backend {
            EngineChoice::Auto => ("NVTE_EP_BACKEND", env.backend),
            choice => ("option backend", choice),
        };
        match choice {
            EngineChoice::Auto | EngineChoice::NcclEp => Ok(Self::NcclEp),
            EngineChoice::Native => {
                let required = "must be nccl_ep or auto: this build has no native engine";
                Err(Error::argument(name, required, choice.name()))
            }
        }
    }
}

/// What a group is created from, on this rank.
pub(super) struct Machine<'a> {
    pub(super) base: &'static Base,
    pub(super) env: Env,
    pub(super) device: i32,
    pub(super) facts: DeviceFacts,
    pub(super) comm: Communicator,
    pub(super) comm_facts: CommFacts,
    /// NCCL's version.
    pub(super) nccl: i32,
    pub(super) config: GroupConfig,
    pub(super) options: &'a Options,
}

/// An engine that this rank can create: all that it needs here was found. Nothing has been asked of the other ranks yet.
pub(super) enum Candidate {
    NcclEp(nccl_ep::Candidate),
}

/// What the locations of all ranks decided about an engine, the same on every rank.
pub(super) enum Fit {
    NcclEp(nccl_ep::Fit),
}

impl Candidate {
    /// # Errors
    /// What this machine lacks.
    pub(super) fn find(kind: EngineKind, machine: &Machine<'_>) -> Result<Self> {
        match kind {
            EngineKind::NcclEp => nccl_ep::Candidate::find(machine).map(Self::NcclEp),
        }
    }

    /// What this rank tells the others of itself; also where it has found no candidate.
    pub(super) fn location(kind: EngineKind, machine: &Machine<'_>, found: Option<&Self>) -> Place {
        match (kind, found) {
            (EngineKind::NcclEp, Some(Self::NcclEp(found))) => nccl_ep::Candidate::location(machine, Some(found)),
            (EngineKind::NcclEp, None) => nccl_ep::Candidate::location(machine, None),
        }
    }

    /// Creates the engine; collective over the communicator.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// The communicator is live, of the machine's NCCL, outlives the engine, and its device is current.
    pub(super) unsafe fn create(self, machine: &Machine<'_>, fit: Fit, places: &[Place], own: Place) -> Result<Engine> {
        match (self, fit) {
            (Self::NcclEp(found), Fit::NcclEp(fit)) => {
                // SAFETY: passed on.
                unsafe { found.create(machine, fit, places, own) }.map(Engine::NcclEp)
            }
        }
    }
}

impl Fit {
    /// Whether all ranks together have what the engine needs.
    ///
    /// # Errors
    /// The same on every rank.
    pub(super) fn of(kind: EngineKind, config: &GroupConfig, options: &Options, places: &[Place]) -> Result<Self> {
        match kind {
            EngineKind::NcclEp => nccl_ep::Fit::of(config, options, places).map(Self::NcclEp),
        }
    }
}

/// The engine of one group.
#[derive(Debug)]
pub(super) enum Engine {
    NcclEp(nccl_ep::Group),
}

/// An engine's access to one layer's routing in one piece of handle memory. An engine whose kernels go by the address
/// alone has nothing to keep here.
#[derive(Debug)]
pub(super) enum Handle {
    NcclEp(nccl_ep::Handle),
}

/// The header of the handle memory that a prepare fills (`routing::header`).
#[derive(Debug, Clone, Copy)]
pub(super) struct HeaderOut {
    /// Its address.
    pub(super) address: u64,
    /// Its first words, which say that the memory holds a routing: written last.
    pub(super) words: [u32; 2],
    /// The step's total in it, of the caller's data type.
    pub(super) total: TensorView,
}

impl Engine {
    /// Bytes of handle memory behind the header that a layer needs.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn handle_bytes(&self, layer: &LayerConfig) -> Result<usize> {
        match self {
            Self::NcclEp(group) => group.handle_bytes(layer),
        }
    }

    /// Opens handle memory, whose contents stay as they are; host only.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// `memory` is device memory of [`Engine::handle_bytes`], which outlives the handle's use.
    pub(super) unsafe fn open(&self, layer: &LayerConfig, memory: &TensorView) -> Result<Handle> {
        match self {
            // SAFETY: passed on.
            Self::NcclEp(group) => unsafe { group.open(layer, memory) }.map(Handle::NcclEp),
        }
    }

    /// Ends what [`Engine::open`] began; host only. Queued work and captured graphs use the memory, not the handle.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn close(&self, handle: Handle) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.close(handle),
        }
    }

    /// Exchanges the routing and fills the handle memory, its counters, the caller's counts and total, and at the end the
    /// words of the header; collective, queued on `stream`. From its begin to its end on the device the header says that there is no routing.
    ///
    /// # Errors
    /// The library's; then the memory holds no routing.
    ///
    /// # Safety
    /// The tensors and the handle memory are device memory of the described extent, live until the queued work is done;
    /// `stream` is a stream of the group's device.
    pub(super) unsafe fn prepare(
        &self,
        handle: &Handle,
        call: &Prepare,
        header: &HeaderOut,
        stream: Stream,
    ) -> Result<()> {
        match (self, handle) {
            // SAFETY: passed on.
            (Self::NcclEp(group), Handle::NcclEp(handle)) => unsafe { group.prepare(handle, call, header, stream) },
        }
    }

    /// Sends rows, and weights if there are any, to their experts' ranks.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// As for [`Engine::prepare`].
    pub(super) unsafe fn dispatch(&self, handle: &Handle, call: &Dispatch, stream: Stream) -> Result<()> {
        match (self, handle) {
            // SAFETY: passed on.
            (Self::NcclEp(group), Handle::NcclEp(handle)) => unsafe { group.dispatch(handle, call, stream) },
        }
    }

    /// Sums each token's rows back on its own rank.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// As for [`Engine::prepare`].
    pub(super) unsafe fn combine(&self, handle: &Handle, call: &Combine, stream: Stream) -> Result<()> {
        match (self, handle) {
            // SAFETY: passed on.
            (Self::NcclEp(group), Handle::NcclEp(handle)) => unsafe { group.combine(handle, call, stream) },
        }
    }

    /// Gradient of dispatch: sums the rows' gradients and gathers the weights' gradients.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// As for [`Engine::prepare`].
    pub(super) unsafe fn dispatch_bwd(&self, handle: &Handle, call: &DispatchBwd, stream: Stream) -> Result<()> {
        match (self, handle) {
            // SAFETY: passed on.
            (Self::NcclEp(group), Handle::NcclEp(handle)) => unsafe { group.dispatch_bwd(handle, call, stream) },
        }
    }

    /// Gradient of combine: sends each token's gradient to the rows that the token was summed from.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// As for [`Engine::prepare`].
    pub(super) unsafe fn combine_bwd(&self, handle: &Handle, call: &CombineBwd, stream: Stream) -> Result<()> {
        match (self, handle) {
            // SAFETY: passed on.
            (Self::NcclEp(group), Handle::NcclEp(handle)) => unsafe { group.combine_bwd(handle, call, stream) },
        }
    }

    /// Logs what the kernels have counted since the last report: indices that are no expert. Not too often.
    #[inline]
    pub(super) fn report(&mut self) {
        match self {
            Self::NcclEp(group) => group.report(),
        }
    }

    /// Device memory that the engine holds.
    pub(super) fn memory(&self) -> GroupMemory {
        match self {
            Self::NcclEp(group) => group.memory(),
        }
    }

    /// An error of queued work, with the reason that the engine's kernels may have given for it.
    pub(super) fn explain(&self, error: Error) -> Error {
        match self {
            Self::NcclEp(group) => group.explain(error),
        }
    }

    /// Destroys the engine. Its handles are closed, its queued work is done, and every rank has stopped using its windows.
    /// An engine that is dropped instead leaves its memory to the end of the process.
    pub(super) fn destroy(self) -> Result<()> {
        match self {
            Self::NcclEp(group) => group.destroy(),
        }
    }
}
