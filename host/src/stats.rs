//! Counters behind `nvte_ep_host_stats`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Process-wide counters; they only grow.
#[derive(Debug, Default)]
pub struct Counters {
    /// EP groups created.
    pub groups_created: AtomicU64,
    /// EP groups destroyed.
    pub groups_destroyed: AtomicU64,
    /// EP handles created.
    pub handles_created: AtomicU64,
    /// EP handles destroyed.
    pub handles_destroyed: AtomicU64,
    /// `ncclEpUpdateHandle` operations enqueued.
    pub updates: AtomicU64,
    /// `ncclEpDispatch` operations enqueued.
    pub dispatches: AtomicU64,
    /// `ncclEpCombine` operations enqueued.
    pub combines: AtomicU64,
    /// Communicators created.
    pub comms_created: AtomicU64,
    /// Communicators destroyed.
    pub comms_destroyed: AtomicU64,
    /// Collectives that callers enqueued on communicators.
    pub collectives: AtomicU64,
}

/// The process's counters.
pub static COUNTERS: Counters = Counters {
    groups_created: AtomicU64::new(0),
    groups_destroyed: AtomicU64::new(0),
    handles_created: AtomicU64::new(0),
    handles_destroyed: AtomicU64::new(0),
    updates: AtomicU64::new(0),
    dispatches: AtomicU64::new(0),
    combines: AtomicU64::new(0),
    comms_created: AtomicU64::new(0),
    comms_destroyed: AtomicU64::new(0),
    collectives: AtomicU64::new(0),
};

/// Adds one to a counter.
pub fn count(counter: impl FnOnce(&'static Counters) -> &'static AtomicU64) {
    counter(&COUNTERS).fetch_add(1, Ordering::Relaxed);
}
