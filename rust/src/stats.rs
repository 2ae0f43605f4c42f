//! What a group has done.

use nvte_ep_core::backend;

/// Calls of one kind that queued their work. A call that a graph captures counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallStats {
    /// How many.
    pub count: u64,
    /// Bytes of this rank's rows in them, one for each token, without scales; of prepare, of its indices.
    pub bytes: u64,
}

/// What a group has done on this rank so far, by [`Group::stats`](crate::Group::stats).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    /// Those of them that were given up: for room, for another layer in their memory, or with their handle.
    pub handles_closed: u64,
    /// Rows that had no place, of the steps whose totals were asked for.
    pub dropped_rows: u64,
    /// Indices that were no expert, of the steps that have run.
    pub invalid_indices: u64,
    /// Calls that failed.
    pub errors: u64,
}

impl From<backend::Stats> for Stats {
    fn from(stats: backend::Stats) -> Self {
        let backend::Stats {
            prepare,
            dispatch,
            combine,
            combine_bwd,
            dispatch_bwd,
            handles_opened,
            handles_closed,
            ..
        } = stats;
        let backend::Stats { dropped_rows, invalid_indices, errors, .. } = stats;
        let of = |calls: backend::CallStats| CallStats { count: calls.count, bytes: calls.bytes };
        Self {
            prepare: of(prepare),
            dispatch: of(dispatch),
            combine: of(combine),
            combine_bwd: of(combine_bwd),
            dispatch_bwd: of(dispatch_bwd),
            handles_opened,
            handles_closed,
            dropped_rows,
            invalid_indices,
            errors,
        }
    }
}
