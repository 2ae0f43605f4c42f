//! What a group has done, counted as it is done: under the group's lock, so that no devices share a cache line of it.
#![forbid(unsafe_code)]

use super::engine::EngineKind;
use crate::progress::Call;
use std::path::Path;

/// Calls of one kind that queued their work. A call that a graph captures counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallStats {
    /// How many.
    pub count: u64,
    /// Bytes of this rank's rows in them, one for each token, without scales; of prepare, of its indices.
    pub bytes: u64,
}

/// A loaded library.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryFacts {
    /// The file it was loaded from; none where the loader does not tell.
    pub path: Option<&'static Path>,
    /// What it says of itself: major * 10000 + minor * 100 + patch.
    pub version: u32,
}

/// What one group has done on this rank so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Prepares, also as part of `prepare_and_dispatch`.
    pub prepare: CallStats,
    /// Dispatches, also as part of `prepare_and_dispatch`.
    pub dispatch: CallStats,
    /// Combines.
    pub combine: CallStats,
    /// Gradients of combine.
    pub combine_bwd: CallStats,
    /// Gradients of dispatch.
    pub dispatch_bwd: CallStats,
    /// Handles that were opened over handle memory.
    pub handles_opened: u64,
    /// Those of them that were given up: for room, for another layer in their memory, or with their registration. They are
    /// opened anew when a call needs them.
    pub handles_closed: u64,
    /// Handles that are open now.
    pub handles_bound: u64,
    /// Handles that were opened over a routing that was prepared before: their handle had been given up, or the memory is new to
    /// the group.
    pub handles_rebuilt: u64,
    /// Rows that had no place, of the steps whose totals were asked for.
    pub dropped_rows: u64,
    /// Indices that were no expert, of the steps that have run so far.
    pub invalid_indices: u64,
    /// Calls that failed.
    pub errors: u64,
    /// What moves the rows.
    pub backend: EngineKind,
    /// The NCCL whose communicator it is.
    pub nccl: LibraryFacts,
    /// The library behind the engine; none where the engine has none.
    pub nccl_ep: Option<LibraryFacts>,
}

impl Stats {
    /// Counts a call that was queued.
    #[inline]
    pub(super) const fn queued(&mut self, call: Call, bytes: u64) {
        let calls = match call {
            Call::Prepare => &mut self.prepare,
            Call::Dispatch => &mut self.dispatch,
            Call::Combine => &mut self.combine,
            Call::CombineBwd => &mut self.combine_bwd,
            Call::DispatchBwd => &mut self.dispatch_bwd,
            _ => return,
        };
        calls.count += 1;
        calls.bytes += bytes;
    }
}
