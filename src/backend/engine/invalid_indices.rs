//! The warning about indices that are no expert: the kernels count them, and the log has the count from time to time.

use std::time::{Duration, Instant};

/// How long the log says nothing of them after it did.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// What has been reported of one group's indices.
#[derive(Debug)]
pub(super) struct InvalidIndices {
    device: i32,
    reported: u64,
    reported_at: Option<Instant>,
}

impl InvalidIndices {
    pub(super) const fn new(device: i32) -> Self {
        Self { device, reported: 0, reported_at: None }
    }

    /// Logs how many indices of the steps so far were no expert, if those are more than at the last time; not too often.
    #[inline]
    pub(super) fn report(&mut self, found: u64) {
        if found != self.reported && self.reported_at.is_none_or(|at| at.elapsed() > BETWEEN_WARNINGS) {
            self.warn(found);
        }
    }

    /// The same at the end, when nothing may have been reported for a while.
    pub(super) fn report_last(&mut self, found: u64) {
        self.reported_at = None;
        self.report(found);
    }

    #[cold]
    fn warn(&mut self, found: u64) {
        (self.reported, self.reported_at) = (found, Some(Instant::now()));
        if !tracing::enabled!(target: "nvte_ep", tracing::Level::WARN) {
            return;
        }
        let text = format!(
            "{found} indices of topk_idx in the steps so far were num_experts or more: no expert, so they were routed nowhere \
             (-1 masks an entry without this warning; nvte_ep_ext_recv_totals tells of one step)"
        );
        tracing::warn!(target: "nvte_ep", device = self.device, "{text}");
    }
}
