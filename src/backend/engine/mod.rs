//! The interface between the core and the engines, which move the rows. The core has no type of an engine: it checks arguments,
//! finds the routing that a call means, orders and watches the calls; an engine queues their work. To add one, add a variant to
//! [`EngineKind`], [`Candidate`], [`Fit`], [`Engine`] and [`Handle`], and its limits to `limits`.

mod invalid_indices;
mod native;
mod nccl_ep;

/// Low-latency groups, which are NCCL EP's: the native engine has no such mode.
pub(super) use nccl_ep::low_latency;

use super::communicator::Communicator;
use crate::config::{GroupConfig, GroupRequest, LayerConfig};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::limits::{self, Limits};
use crate::memory::GroupMemory;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use crate::options::{EngineChoice, Options};
use crate::preflight::RankLocation;
use crate::sys::cuda::{DeviceFacts, Stream};
use crate::sys::nccl::CommFacts;
use crate::sys::{Base, NcclEpLibrary};
use crate::tensor::TensorView;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// What moves the rows of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineKind {
    /// NCCL EP's high-throughput mode.
    #[default]
    NcclEp = 1,
    /// The library's own kernels.
    Native = 2,
}

impl EngineKind {
    /// What it takes.
    pub(super) fn limits(self) -> &'static Limits {
        match self {
            Self::NcclEp => &limits::NCCL_EP,
            Self::Native => &limits::NATIVE,
        }
    }
}

impl From<EngineKind> for EngineChoice {
    fn from(kind: EngineKind) -> Self {
        match kind {
            EngineKind::NcclEp => Self::NcclEp,
            EngineKind::Native => Self::Native,
        }
    }
}

/// What `auto` tries first. With the native engine here, NCCL EP takes what that cannot.
const AUTO: EngineKind = EngineKind::NcclEp;

/// The engine of a group to be, with the group's configuration by its rules.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) kind: EngineKind,
    pub(super) config: GroupConfig,
    /// Who asked for it; with `auto` why the native engine cannot take the group.
    pub(super) reason: String,
    /// Another may still take its place.
    is_open: bool,
}

impl Choice {
    /// The engine that the option `backend` or, where that leaves it open, NVTE_EP_BACKEND asks for; with `auto` one that takes the
    /// configuration.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub(super) fn of(options: &Options, env: &Env, request: GroupRequest) -> Result<Self> {
        let (asked, by) = match options.backend {
            EngineChoice::Auto => (env.backend, "NVTE_EP_BACKEND"),
            choice => (choice, "the option backend"),
        };
        let (kind, reason) = match asked {
            EngineChoice::Auto => (AUTO, "auto".to_owned()),
            EngineChoice::NcclEp => (EngineKind::NcclEp, by.to_owned()),
            EngineChoice::Native => (EngineKind::Native, by.to_owned()),
        };
        let is_open = asked == EngineChoice::Auto && kind == EngineKind::Native;
        match GroupConfig::of(request, kind.limits()) {
            Err(error) if is_open => Self::other(request, &error),
            config => Ok(Self { kind, config: config?, reason, is_open }),
        }
    }

    fn other(request: GroupRequest, problem: &Error) -> Result<Self> {
        let kind = EngineKind::NcclEp;
        let config = GroupConfig::of(request, kind.limits())?;
        Ok(Self { kind, config, reason: problem.to_string(), is_open: false })
    }

    /// Another engine where `auto` chose one that the device or the communicator is not fit for. Ranks that come to another result
    /// are told in the agreement.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub(super) fn settle(
        self,
        request: GroupRequest,
        facts: &DeviceFacts,
        comm: &CommFacts,
        nccl: i32,
    ) -> Result<Self> {
        if !self.is_open {
            return Ok(self);
        }
        match native::require_fit(&self.config, facts, comm, nccl) {
            Ok(()) => Ok(self),
            Err(problem) => Self::other(request, &problem),
        }
    }
}

/// Ends the kernels of a group that wait for another rank: a word that they look at. It is the engine's, and lives until the
/// engine's [`Engine::destroy`].
#[derive(Debug)]
pub(super) struct Abort(NonNull<AtomicU32>);

// SAFETY: an atomic word.
unsafe impl Send for Abort {}
// SAFETY: as above.
unsafe impl Sync for Abort {}

impl Abort {
    /// # Safety
    /// The engine is not destroyed.
    pub(super) unsafe fn now(&self) {
        // SAFETY: the word is the engine's, which the caller says is there.
        unsafe { self.0.as_ref() }.store(1, Ordering::Release);
    }
}

/// A handle that another engine opened: a group keeps its engine and its handles together.
#[cold]
fn foreign_handle() -> Error {
    Error::Internal("a handle of another engine".into())
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
    Native(native::Candidate),
}

/// What the locations of all ranks decided about an engine, the same on every rank.
pub(super) enum Fit {
    NcclEp(nccl_ep::Fit),
    Native(native::Fit),
}

impl Candidate {
    /// # Errors
    /// What this machine lacks.
    pub(super) fn find(kind: EngineKind, machine: &Machine<'_>) -> Result<Self> {
        match kind {
            EngineKind::NcclEp => nccl_ep::Candidate::find(machine).map(Self::NcclEp),
            EngineKind::Native => native::Candidate::find(machine).map(Self::Native),
        }
    }

    /// What this rank tells the others of itself; also where it has found no candidate.
    pub(super) fn location(kind: EngineKind, machine: &Machine<'_>, found: Option<&Self>) -> RankLocation {
        match (kind, found) {
            (EngineKind::NcclEp, Some(Self::NcclEp(found))) => nccl_ep::Candidate::location(machine, Some(found)),
            (EngineKind::NcclEp, _) => nccl_ep::Candidate::location(machine, None),
            (EngineKind::Native, _) => native::Candidate::location(machine),
        }
    }

    /// Creates the engine; collective over the communicator.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// The communicator is live, of the machine's NCCL, outlives the engine, and its device is current.
    pub(super) unsafe fn create(
        self,
        machine: &Machine<'_>,
        fit: Fit,
        places: &[RankLocation],
        own: RankLocation,
    ) -> Result<Engine> {
        match (self, fit) {
            (Self::NcclEp(found), Fit::NcclEp(fit)) => {
                // SAFETY: passed on.
                unsafe { found.create(machine, fit, places, own) }.map(Engine::NcclEp)
            }
            // SAFETY: passed on.
            (Self::Native(found), Fit::Native(fit)) => unsafe { found.create(machine, fit) }.map(Engine::Native),
            _ => Err(Error::Internal("a candidate and the fit of another engine".into())),
        }
    }
}

impl Fit {
    /// Whether all ranks together have what the engine needs.
    ///
    /// # Errors
    /// The same on every rank.
    pub(super) fn of(
        kind: EngineKind,
        config: &GroupConfig,
        options: &Options,
        places: &[RankLocation],
    ) -> Result<Self> {
        match kind {
            EngineKind::NcclEp => nccl_ep::Fit::of(config, options, places).map(Self::NcclEp),
            EngineKind::Native => native::Fit::of(config, options, places).map(Self::Native),
        }
    }
}

/// The engine of one group.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a group has one, and its calls go through it")]
pub(super) enum Engine {
    NcclEp(nccl_ep::Group),
    Native(native::Group),
}

/// An engine's access to one layer's routing in one piece of handle memory. An engine whose kernels go by the address
/// alone has nothing to keep here.
#[derive(Debug)]
pub(super) enum Handle {
    NcclEp(nccl_ep::Handle),
    Native(native::Handle),
}

/// The header of the handle memory that a prepare fills (`routing::header`).
#[derive(Debug, Clone, Copy)]
pub(super) struct HeaderOut {
    /// Its address.
    pub(super) address: u64,
    /// Its first words, which say that the memory holds a routing.
    pub(super) words: [u32; 2],
    /// The step's total in it, of the caller's data type.
    pub(super) total: TensorView,
}

impl Engine {
    /// Which one it is.
    pub(super) const fn kind(&self) -> EngineKind {
        match self {
            Self::NcclEp(_) => EngineKind::NcclEp,
            Self::Native(_) => EngineKind::Native,
        }
    }

    /// Bytes of handle memory behind the header that a layer needs.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn handle_bytes(&self, layer: &LayerConfig) -> Result<usize> {
        match self {
            Self::NcclEp(group) => group.handle_bytes(layer),
            Self::Native(group) => Ok(group.handle_bytes(layer)),
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
            Self::Native(group) => Ok(Handle::Native(group.open(layer, memory))),
        }
    }

    /// Ends what [`Engine::open`] began; host only. Queued work and captured graphs use the memory, not the handle.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn close(&self, handle: Handle) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.close(handle),
            (Self::Native(_), Handle::Native(_)) => Ok(()),
            _ => Err(foreign_handle()),
        }
    }

    /// Words of the header behind the total that hold the count of indices that are no expert.
    pub(super) const fn counts(&self) -> usize {
        match self {
            Self::NcclEp(_) => nccl_ep::Group::COUNTS,
            Self::Native(_) => 1,
        }
    }

    /// Exchanges the routing and fills the handle memory, its header and counters, and the caller's counts and total; collective,
    /// queued on `stream`.
    ///
    /// # Errors
    /// The library's; then the memory holds no routing.
    pub(super) fn prepare(&self, handle: &Handle, call: &Prepare, header: &HeaderOut, stream: Stream) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.prepare(handle, call, header, stream),
            // SAFETY: the stream is bound, and so is what the call names.
            (Self::Native(group), Handle::Native(handle)) => unsafe { group.prepare(handle, call, header, stream) },
            _ => Err(foreign_handle()),
        }
    }

    /// Sends rows, and weights if there are any, to their experts' ranks.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn dispatch(&self, handle: &Handle, call: &Dispatch, stream: Stream) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.dispatch(handle, call, stream),
            // SAFETY: the stream is bound, and so is what the call names.
            (Self::Native(group), Handle::Native(handle)) => unsafe { group.dispatch(handle, call, stream) },
            _ => Err(foreign_handle()),
        }
    }

    /// Sums each token's rows back on its own rank.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn combine(&self, handle: &Handle, call: &Combine, stream: Stream) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.combine(handle, call, stream),
            // SAFETY: the stream is bound, and so is what the call names.
            (Self::Native(group), Handle::Native(handle)) => unsafe { group.combine(handle, call, stream) },
            _ => Err(foreign_handle()),
        }
    }

    /// Gradient of dispatch: sums the rows' gradients and gathers the weights' gradients.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn dispatch_bwd(&self, handle: &Handle, call: &DispatchBwd, stream: Stream) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.dispatch_bwd(handle, call, stream),
            // SAFETY: the stream is bound, and so is what the call names.
            (Self::Native(group), Handle::Native(handle)) => unsafe { group.dispatch_bwd(handle, call, stream) },
            _ => Err(foreign_handle()),
        }
    }

    /// Gradient of combine: sends each token's gradient to the rows that the token was summed from.
    ///
    /// # Errors
    /// The library's.
    pub(super) fn combine_bwd(&self, handle: &Handle, call: &CombineBwd, stream: Stream) -> Result<()> {
        match (self, handle) {
            (Self::NcclEp(group), Handle::NcclEp(handle)) => group.combine_bwd(handle, call, stream),
            // SAFETY: the stream is bound, and so is what the call names.
            (Self::Native(group), Handle::Native(handle)) => unsafe { group.combine_bwd(handle, call, stream) },
            _ => Err(foreign_handle()),
        }
    }

    /// The library behind it, if there is one.
    pub(super) const fn library(&self) -> Option<&'static NcclEpLibrary> {
        match self {
            Self::NcclEp(group) => Some(group.library()),
            Self::Native(_) => None,
        }
    }

    /// Indices that were no expert, as the kernels have counted them in the group's life.
    pub(super) fn invalid_indices(&self) -> u64 {
        match self {
            Self::NcclEp(group) => group.invalid_indices(),
            Self::Native(group) => group.invalid_indices(),
        }
    }

    /// Logs what the kernels have counted since the last report: indices that are no expert. Not too often.
    #[inline]
    pub(super) fn report(&mut self) {
        match self {
            Self::NcclEp(group) => group.report(),
            Self::Native(group) => group.report(),
        }
    }

    /// Whether peers reach into a call's windows; else those tensors go by their addresses too.
    #[inline]
    pub(super) const fn reaches_windows(&self) -> bool {
        matches!(self, Self::NcclEp(_))
    }

    /// Device memory that the engine holds.
    pub(super) fn memory(&self) -> GroupMemory {
        match self {
            Self::NcclEp(group) => group.memory(),
            Self::Native(group) => group.memory(),
        }
    }

    /// By what its queued kernels are ended, where they can be.
    pub(super) fn abort(&self) -> Option<Abort> {
        match self {
            Self::NcclEp(_) => None,
            Self::Native(group) => Some(group.abort()),
        }
    }

    /// An error of queued work, with the reason that the engine's kernels may have given for it.
    pub(super) fn explain(&self, error: Error) -> Error {
        match self {
            Self::NcclEp(group) => group.explain(error),
            Self::Native(_) => error,
        }
    }

    /// Destroys the engine. Its handles are closed, its queued work is done, and every rank has stopped using its windows.
    /// An engine that is dropped instead leaves its memory to the end of the process.
    pub(super) fn destroy(self) -> Result<()> {
        match self {
            Self::NcclEp(group) => group.destroy(),
            Self::Native(group) => group.destroy(),
        }
    }
}
