//! The low-latency group of the calling thread's device.

use super::live::Live;
use crate::backend::fork;
use crate::backend::registry::Slot;
use crate::error::{Error, Result};
use crate::sys;
use parking_lot::{MappedMutexGuard, MutexGuard};

/// Access to the low-latency group of one device.
#[derive(Clone, Copy)]
pub struct LlGroup(pub(super) &'static Slot);

impl std::fmt::Debug for LlGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LlGroup").field("device", &self.0.device).finish_non_exhaustive()
    }
}

/// The low-latency group of the calling thread's current device.
///
/// # Errors
/// There is none.
pub fn current_ll_group() -> Result<LlGroup> {
    fork::require_parent()?;
    let base = sys::loaded_base().ok_or_else(none)?;
    let device = base.cuda.current_device()?;
    Slot::all().find(|slot| slot.device == device).map(LlGroup).ok_or_else(none)
}

#[cold]
fn none() -> Error {
    Error::State("there is no low-latency group on the current device: call nvte_ep_ext_ll_initialize first".into())
}

impl LlGroup {
    /// The group, locked.
    pub(super) fn lock(&self) -> Result<MappedMutexGuard<'static, Live>> {
        MutexGuard::try_map(self.0.low_latency.lock(), Option::as_mut).map_err(|_| none())
    }
}
