//! The end of a low-latency group.

use super::current::current_ll_group;
use super::live::{Group, Live};
use crate::backend::fork;
use crate::backend::teardown::{failures_of, is_cuda_gone, meet, outcome};
use crate::error::Result;
use crate::progress::Call;

/// Ends the low-latency group of the calling thread's current device: waits for queued work and for the other ranks (both bounded),
/// then destroys handles and group. Without a group nothing happens.
///
/// # Errors
/// An operation is staged, and the group stays; or [`crate::error::Error::Teardown`] with all that failed, and the group is gone.
pub fn ll_shutdown() -> Result<()> {
    if fork::is_child() {
        return Ok(());
    }
    let Ok(current) = current_ll_group() else { return Ok(()) };
    let mut group = current.0.low_latency.lock();
    if let Some(live) = group.as_ref().filter(|live| live.watchdog.require_alive().is_ok()) {
        live.group.require_nothing_open()?;
    }
    let Some(live) = group.take() else { return Ok(()) };
    outcome(live.destroy(current.0.device))
}

impl Live {
    /// Tears down in order and returns what failed.
    fn destroy(self, device: i32) -> Vec<String> {
        let Self { watchdog, group } = self;
        let (base, limit) = (group.base, group.env.shutdown_timeout);
        let (call, what) = (Call::LlShutdown, "all ranks to call nvte_ep_ext_ll_shutdown");
        // SAFETY: the communicator outlives the group, by initialize's contract.
        let met = unsafe { meet(base, device, limit, &watchdog, &group.rendezvous, (call, what)) };
        if met.as_ref().is_err_and(is_cuda_gone) {
            tracing::info!(target: "nvte_ep", device, "CUDA is gone already; nothing to destroy");
            return Vec::new();
        }
        if let Err(error) = met {
            // The destruction waits for the other ranks without an end, and frees what they may still use.
            let text = format!("{error}; the group's device memory is left to the process's end");
            tracing::info!(target: "nvte_ep", device, "{text}");
            watchdog.progress().give_up(&text);
            watchdog.abandon();
            return vec![text];
        }
        watchdog.progress().leave();
        let Group { engine, rendezvous, mut handles, staged, left, .. } = group;
        watchdog.stop();
        let open = std::iter::from_fn(|| handles.pop_lru());
        let mut ended: Vec<Result<()>> = open.map(|(_, entry)| engine.close(entry.handle)).collect();
        ended.push(engine.destroy());
        // NCCL EP pointed to them until now.
        drop((staged, left));
        ended.push(rendezvous.close());
        let failures = failures_of(ended, device);
        tracing::info!(target: "nvte_ep", device, "low-latency group destroyed");
        failures
    }
}
