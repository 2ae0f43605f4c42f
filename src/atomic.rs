//! The atomics of the lock-free modules. They are named here so that `qa/models` can put a model checker's in their place.

pub(crate) use std::hint::spin_loop as pause;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How often a reader tries again where a writer is at work.
pub(crate) const TRIES: u32 = 1000;
