//! The end of a group.

use super::agreement::Rendezvous;
use super::fork;
use super::live::{Group, Live};
use super::registry::{EpGroup, Slot};
use super::watchdog::Watchdog;
use crate::error::{Error, Result};
use crate::progress::Call;
use crate::sys::{Base, thread};
use crate::wait::bounded;
use nvte_ep_bindings as b;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Ends every EP group of this process: waits for queued work and for the other ranks (both bounded), then destroys
/// handles and group. The communicators stay the callers'. Without a group nothing happens.
///
/// # Errors
/// [`Error::Teardown`] with all that failed; the groups are gone all the same.
pub fn shutdown() -> Result<()> {
    if fork::is_child() {
        return Ok(());
    }
    let slots: Vec<&'static Slot> = Slot::all().collect();
    let failures: Vec<String> = match slots.as_slice() {
        [one] => end(one),
        // Ranks of one process wait for each other, so each device gets a thread.
        many => {
            let start = |slot: &'static Slot| thread::spawn(c"nvte_ep_end", move || end(slot)).map_err(|_| end(slot));
            let threads: Vec<_> = many.iter().map(|slot| start(slot)).collect();
            let joined = threads.into_iter().flat_map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|| vec!["a panic during tear-down".into()]),
                // No thread could be started, so this one was ended at once, on this thread.
                Err(failures) => failures,
            });
            joined.collect()
        }
    };
    outcome(failures)
}

pub(super) fn outcome(failures: Vec<String>) -> Result<()> {
    if failures.is_empty() { Ok(()) } else { Err(Error::Teardown(failures)) }
}

/// Ends the group of a device, if there is one; returns what failed. The lock is kept until all is destroyed: who comes next
/// finds the device free, not half torn down.
fn end(slot: &Slot) -> Vec<String> {
    let mut group = slot.group.lock();
    let Some(live) = group.take() else { return Vec::new() };
    slot.was_ended.store(true, Ordering::Relaxed);
    live.destroy(slot.device)
}

impl EpGroup {
    /// Ends this group alone, as [`shutdown`] does all.
    ///
    /// # Errors
    /// As there.
    pub fn shutdown(&self) -> Result<()> {
        if fork::is_child() { Ok(()) } else { outcome(end(self.slot())) }
    }
}

impl Live {
    /// Tears down in order and returns what failed.
    pub(super) fn destroy(self, device: i32) -> Vec<String> {
        let Self { watchdog, group } = self;
        let (base, limit) = (group.base, group.env.shutdown_timeout);
        let (call, what) = (Call::Shutdown, "all ranks to call nvte_ep_shutdown");
        // SAFETY: the communicator outlives shutdown, by initialize's contract.
        let met = unsafe { meet(base, device, limit, &watchdog, &group.rendezvous, (call, what)) };
        if met.as_ref().is_err_and(is_cuda_gone) {
            // Called from a destructor that runs after CUDA's own: the process ends, and the driver has freed everything.
            tracing::info!(target: "nvte_ep", device, "CUDA is gone already; nothing to destroy");
            return Vec::new();
        }
        if let Err(error) = met.map_err(|error| group.engine.explain(error)) {
            // Freeing would wait for the same stuck work, or pull memory from under a peer: the group's memory stays
            // until the process ends.
            let text = format!("{error}; the group's device memory is left to the process's end");
            // The caller gets it as an exception.
            tracing::info!(target: "nvte_ep", device, "{text}");
            watchdog.progress().give_up(&text);
            if let Some(abort) = group.engine.abort() {
                // SAFETY: the engine is not destroyed, here or later.
                unsafe { abort.now() };
            }
            watchdog.abandon();
            return vec![text];
        }
        watchdog.progress().leave();
        let Group { engine, rendezvous, handles, symm, .. } = group;
        watchdog.stop();
        let mut ended = handles.into_handles().map(|handle| engine.close(handle)).collect::<Vec<_>>();
        ended.push(engine.destroy());
        ended.extend(symm.destroy());
        ended.push(rendezvous.close());
        let failures = failures_of(ended, device);
        tracing::info!(target: "nvte_ep", device, "EP group destroyed");
        failures
    }
}

/// What failed of the steps of an end, which the log has too.
pub(super) fn failures_of(ended: Vec<Result<()>>, device: i32) -> Vec<String> {
    let failures: Vec<String> = ended.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
    failures.iter().for_each(|error| tracing::info!(target: "nvte_ep", device, "{error}"));
    failures
}

/// Waits for this rank's queued work, and for the other ranks: peers may still read this rank's memory until they come here too.
///
/// # Safety
/// The communicator is live.
pub(super) unsafe fn meet(
    base: &'static Base,
    device: i32,
    limit: Option<Duration>,
    watchdog: &Watchdog,
    rendezvous: &Rendezvous,
    (call, what): (Call, &str),
) -> Result<()> {
    watchdog.require_alive()?;
    watchdog.leave(call);
    let futile = || watchdog.require_alive().err().map(|error| error.to_string());
    bounded(limit, "the work queued on the device", &futile, move || {
        base.cuda.set_current_device(device)?;
        // SAFETY: takes nothing.
        base.cuda.check("cuCtxSynchronize", unsafe { (base.cuda.cuCtxSynchronize)() })
    })?;
    base.cuda.set_current_device(device)?;
    // SAFETY: the caller vouches for the communicator.
    unsafe { rendezvous.barrier(limit, what) }
}

/// Whether CUDA has shut down already, as it has in destructors that run after its own.
pub(super) fn is_cuda_gone(error: &Error) -> bool {
    let gone = i64::from(b::CUDA_ERROR_DEINITIALIZED);
    // NCCL has codes of its own, so only the driver's functions count.
    matches!(error, Error::Library { call, code, .. } if call.starts_with("cu") && *code == gone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::current_group;

    #[test]
    fn without_initialize_there_is_no_group() {
        let text = current_group().err().unwrap().to_string();
        assert_eq!(text, "there is no EP group: call nvte_ep_initialize first");
        shutdown().unwrap();
    }

    #[test]
    fn only_the_driver_can_be_gone() {
        let error = |call| Error::Library { call, code: 4, text: String::new() };
        assert!(is_cuda_gone(&error("cuInit")));
        assert!(!is_cuda_gone(&error("ncclAllGather")), "4 is ncclInvalidArgument");
    }
}
