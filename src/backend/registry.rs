//! Which device has which group. One lock a device around one `Option`: what one device does never blocks another, nothing can
//! be read outside the lock, and a failed initialize leaves nothing behind.

use super::fork;
use super::live::Live;
use super::low_latency;
use crate::error::{Error, Result};
use crate::sys;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The place of one device's group. Slots are made at the first initialize of a device and never removed, so a call finds
/// its own without a lock.
pub(super) struct Slot {
    pub(super) device: i32,
    pub(super) group: Mutex<Option<Live>>,
    /// The low-latency group beside it.
    pub(super) low_latency: Mutex<Option<low_latency::live::Live>>,
    /// Whether a group of the device was shut down.
    pub(super) was_ended: AtomicBool,
    next: OnceLock<Box<Slot>>,
}

/// Nothing is torn down at process exit: the libraries below may be gone by then.
static FIRST_SLOT: OnceLock<Box<Slot>> = OnceLock::new();

impl Slot {
    pub(super) fn all() -> impl Iterator<Item = &'static Self> {
        std::iter::successors(FIRST_SLOT.get(), |slot| slot.next.get()).map(Box::as_ref)
    }

    /// The slot of `device`, made if there is none.
    pub(super) fn of(device: i32) -> &'static Self {
        let mut place = &FIRST_SLOT;
        loop {
            let new = || {
                Box::new(Self {
                    device,
                    group: Mutex::new(None),
                    low_latency: Mutex::new(None),
                    was_ended: AtomicBool::new(false),
                    next: OnceLock::new(),
                })
            };
            let slot = place.get_or_init(new);
            if slot.device == device {
                return slot;
            }
            place = &slot.next;
        }
    }
}

/// The EP group of the calling thread's current device.
///
/// # Errors
/// [`Error::NotInitialized`].
pub fn current_group() -> Result<EpGroup> {
    fork::require_parent()?;
    // Without any slot there was no initialize, and perhaps there is no CUDA either.
    let Some(base) = FIRST_SLOT.get().and_then(|_| sys::loaded_base()) else {
        return Err(Error::NotInitialized { device: None, initialized: Vec::new(), was_ended: false });
    };
    let device = base.cuda.current_device()?;
    match Slot::all().find(|slot| slot.device == device) {
        Some(slot) => Ok(EpGroup(slot)),
        None => Err(no_group_on(device)),
    }
}

#[cold]
fn no_group_on(device: i32) -> Error {
    // A slot that is locked is at work, so it has a group.
    let has_group = |slot: &&Slot| slot.group.try_lock().is_none_or(|group| group.is_some());
    let mut initialized: Vec<i32> = Slot::all().filter(has_group).map(|slot| slot.device).collect();
    initialized.sort_unstable();
    Error::NotInitialized { device: Some(device), initialized, was_ended: false }
}

/// Tells the ranks that wait for this one that its call `name` failed with `error`, if the current device has a group.
pub fn report_failure(name: &str, error: &Error) {
    let Ok(EpGroup(slot)) = current_group() else { return };
    // A slot at work has another thread's call in it.
    if name.starts_with("nvte_ep_ext_ll_") {
        if let Some(live) = slot.low_latency.try_lock().as_deref().and_then(Option::as_ref) {
            live.watchdog.failed(name, error);
        }
        return;
    }
    let Some(mut group) = slot.group.try_lock() else { return };
    if let Some(live) = group.as_mut() {
        live.group.stats.errors += 1;
        live.watchdog.failed(name, error);
    }
}

/// Access to the EP group of one device.
pub struct EpGroup(&'static Slot);

impl std::fmt::Debug for EpGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EpGroup").field("device", &self.0.device).finish_non_exhaustive()
    }
}

impl EpGroup {
    /// Whether calls of this thread are the group's.
    ///
    /// # Errors
    /// Another current device, or a forked child.
    #[inline]
    pub fn require_current(&self) -> Result<()> {
        fork::require_parent()?;
        let base = sys::loaded_base().ok_or(Error::NotInitialized {
            device: None,
            initialized: Vec::new(),
            was_ended: false,
        })?;
        match base.cuda.current_device()? {
            current if current == self.0.device => Ok(()),
            current => Err(self.elsewhere(current)),
        }
    }

    #[cold]
    fn elsewhere(&self, current: i32) -> Error {
        Error::State(format!(
            "the EP group is on device {}, and the calling thread's current device is {current}: set the current device \
             to the group's before the call",
            self.0.device
        ))
    }

    /// The slot of the group's device.
    pub(super) fn slot(&self) -> &'static Slot {
        self.0
    }

    /// The group, locked.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    #[inline]
    pub(super) fn lock(&self) -> Result<MappedMutexGuard<'static, Live>> {
        MutexGuard::try_map(self.0.group.lock(), Option::as_mut).map_err(|_| Error::NotInitialized {
            device: Some(self.0.device),
            initialized: Vec::new(),
            was_ended: self.0.was_ended.load(Ordering::Relaxed),
        })
    }
}
