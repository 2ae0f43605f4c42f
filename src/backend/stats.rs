//! What a group has done, counted as it is done: under the group's lock, so that no devices share a cache line of it.
#![forbid(unsafe_code)]

use crate::progress::Call;

/// Calls of one kind that were queued, captured ones once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallStats {
    /// How many.
    pub count: u64,
    /// Bytes of this rank's rows in them, one for each token; of prepare, of its indices.
    pub bytes: u64,
}

/// What one group has done on this rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// `nvte_ep_prepare`, also as part of prepare_and_dispatch.
    pub prepare: CallStats,
    /// `nvte_ep_dispatch`.
    pub dispatch: CallStats,
    /// `nvte_ep_combine`.
    pub combine: CallStats,
    /// `nvte_ep_combine_bwd`.
    pub combine_bwd: CallStats,
    /// `nvte_ep_dispatch_bwd`.
    pub dispatch_bwd: CallStats,
    /// Handles that were opened over handle memory.
    pub handles_opened: u64,
    /// Those of them that were given up: for room, for another layer in their memory, or with their registration.
    pub handles_closed: u64,
    /// Rows that steps had no place for, of the steps whose totals were asked for.
    pub dropped_rows: u64,
    /// Indices that were no expert, of the steps that have run.
    pub invalid_indices: u64,
    /// Calls that failed or were refused.
    pub errors: u64,
    /// The number of the engine: 1 is NCCL EP, 2 the native engine.
    pub engine: u64,
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
            Call::SymmAlloc | Call::WindowRegister | Call::WindowDeregister | Call::Shutdown => return,
        };
        calls.count += 1;
        calls.bytes += bytes;
    }
}
