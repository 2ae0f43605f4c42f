//! What a group consists of, on one device.

use super::agreement::Rendezvous;
use super::engine::{Engine, Handle};
use super::residency::Residency;
use super::routing::handles::Handles;
use super::routing::notes::HandleKey;
use super::stats::Stats;
use super::symm::Symm;
use super::watchdog::Watchdog;
use crate::config::{GroupConfig, LayerConfig, SlabAlignment};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::memory::{GroupMemory, HEADER_BYTES};
use crate::symm_pool::PoolStatistics;
use crate::sys::Base;
use crate::sys::cuda::{Stream, StreamState};
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

/// What a step's routing needs of a rank's receive buffers, in rows with their padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvTotals {
    /// Rows that arrive.
    pub needed: u64,
    /// Rows of those that the buffers take.
    pub received: u64,
    /// Rows of those that are dropped.
    pub dropped: u64,
    /// This rank's indices that were no expert, and routed nowhere.
    pub invalid_indices: u64,
}

/// Device memory of a group, of this rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUsage {
    /// The engine's buffers.
    pub group: GroupMemory,
    /// The library's own.
    pub library: u64,
    /// Handle memory, which callers allocate, of all open handles.
    pub handles: u64,
    /// How many handles are open.
    pub open_handles: u64,
    /// The symmetric pool.
    pub symmetric: PoolStatistics,
    /// The number of the engine: 1 is NCCL EP, 2 the native engine.
    pub engine: u64,
}

impl Group {
    #[inline]
    pub(super) fn enter(&mut self, stream: Stream) -> Result<StreamState> {
        if self.stream != Some(stream) && !stream.is_legacy() {
            if !self.base.cuda.is_of_current_context(stream)? {
                let required = "must be a stream of the calling thread's current device, which is the group's";
                return Err(Error::argument(
                    "stream",
                    required,
                    format!("{:#x}, one of another device", stream.address()),
                ));
            }
            self.stream = Some(stream);
        }
        self.base.cuda.stream_state(stream)
    }
}
