//! What a group consists of, on one device.

use super::agreement::Rendezvous;
use super::engine::{Engine, EngineKind, Handle};
use super::residency::Residency;
use super::routing::handles::Handles;
use super::routing::notes::HandleKey;
use super::stats::Stats;
use super::symm::Symm;
use super::watchdog::Watchdog;
use crate::config::{GroupConfig, LayerConfig, SlabAlignment};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::memory::HEADER_BYTES;
use crate::sys::Base;
use crate::sys::cuda::{Cuda, Stream, StreamState};
use crate::tensor::TensorView;
use rustc_hash::FxHashMap;

/// A group and the watchdog of its calls.
pub(super) struct Live {
    pub(super) watchdog: Watchdog,
    pub(super) group: Group,
}

/// A layer's routing: which it is, and the memory that holds it.
#[derive(Debug, Clone, Copy)]
pub struct HandleRef {
    /// The registered id, or the memory's address.
    pub key: HandleKey,
    /// The caller's handle memory.
    pub mem: TensorView,
}

/// What a prepare says of its layer.
#[derive(Debug, Clone, Copy)]
pub enum LayerClaim {
    /// The layer is registered; the alignment is repeated and has to be the registered one.
    Registered(SlabAlignment),
    /// All of it.
    Given(LayerConfig),
}

/// A layer, resolved. Its handle memory is a header of [`HEADER_BYTES`] and the engine's part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    pub(super) config: LayerConfig,
    /// Bytes of the engine's part.
    pub(super) engine_bytes: usize,
}

impl Layer {
    pub(super) const fn mem_bytes(&self) -> usize {
        HEADER_BYTES + self.engine_bytes
    }
}

/// Engine, layers and handles of one device.
pub(super) struct Group {
    pub(super) base: &'static Base,
    pub(super) env: Env,
    pub(super) config: GroupConfig,
    pub(super) engine: Engine,
    pub(super) rendezvous: Rendezvous,
    pub(super) symm: Symm,
    pub(super) layers: FxHashMap<u64, Layer>,
    /// All layer configurations that there have been, registered or not.
    pub(super) layer_configs: Vec<Layer>,
    pub(super) handles: Handles<Handle>,
    /// Tells this group's routing headers from those of another time.
    pub(super) epoch: u64,
    pub(super) residency: Residency,
    /// The stream of the last call, which is one of the group's device.
    pub(super) stream: Option<Stream>,
    pub(super) stats: Stats,
}

/// What a step's routing needs of this rank's receive buffers, in rows with their padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecvTotals {
    /// Rows that arrive, before any are dropped.
    pub needed: u64,
    /// Rows of the receive buffers that they take up.
    pub received: u64,
    /// Rows that have no place; 0 unless the group drops.
    pub dropped: u64,
    /// This rank's indices that name no expert, and routed nowhere.
    pub invalid_indices: u64,
}

/// Device memory of this rank that a group takes, in bytes unless said otherwise. `docs/memory.md` has the formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Buffers for rows, weights and scales on their way.
    pub staging: u64,
    /// The map of who sends to whom.
    pub routing_map: u64,
    /// Scratch of the kernels.
    pub workspace: u64,
    /// The library's own scratch.
    pub library: u64,
    /// Segments of symmetric memory.
    pub symm_reserved: u64,
    /// Handle memory of all layers that were prepared.
    pub handle_memory: u64,
    /// Number of these handles.
    pub handles: u64,
    /// Bytes of symmetric memory that are handed out.
    pub symm_in_use: u64,
    /// Most bytes of it that were ever handed out at a time.
    pub symm_peak: u64,
    /// Number of live allocations of symmetric memory.
    pub symm_allocations: u64,
    /// Number of segments.
    pub symm_segments: u64,
    /// Number of live registrations of callers' memory.
    pub registered: u64,
    /// What moves the rows.
    pub backend: EngineKind,
}

impl MemoryUsage {
    /// All that the group has allocated.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.staging + self.routing_map + self.workspace + self.library + self.symm_reserved
    }
}

impl Group {
    #[inline]
    pub(super) fn enter(&mut self, stream: Stream) -> Result<StreamState> {
        enter(&self.base.cuda, &mut self.stream, stream)
    }
}

/// Whether `stream` captures, if it is one of the current device; `last` is the last one that was found to be.
#[inline]
pub(super) fn enter(cuda: &Cuda, last: &mut Option<Stream>, stream: Stream) -> Result<StreamState> {
    if *last != Some(stream) && !stream.is_legacy() {
        if !cuda.is_of_current_context(stream)? {
            let required = "must be a stream of the calling thread's current device, which is the group's";
            return Err(Error::argument("stream", required, format!("{:#x}, one of another device", stream.address())));
        }
        *last = Some(stream);
    }
    cuda.stream_state(stream)
}
