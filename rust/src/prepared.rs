//! The calls of a step.

use crate::call::{Combine, CombineBwd, Dispatch, DispatchBwd};
use crate::dtype::Token;
use crate::error::Result;
use crate::layer::HandleMemory;
use crate::memory::Uses;
use crate::stream::Stream;
use nvte_ep_core::backend::RecvTotals;
use nvte_ep_core::tensor::TensorView;

/// The routing of a step, and the step's calls: dispatch and combine, and in training their gradients.
///
/// Each may be made as often as the program needs it: not at all (inference has no gradients), or again (a backward pass
/// that recomputes activations dispatches again). They are queued on streams of the group's device, in an order that the
/// program keeps; a graph may capture them.
#[derive(Debug)]
#[must_use = "a routing is for the calls of its step"]
pub struct Prepared<'h, 'g> {
    handle: &'h mut HandleMemory<'g>,
    topk_idx: TensorView,
}

impl<'h, 'g> Prepared<'h, 'g> {
    pub(crate) fn new(handle: &'h mut HandleMemory<'g>, topk_idx: TensorView) -> Self {
        Self { handle, topk_idx }
    }

    /// Sends each token's row to the ranks of its experts.
    ///
    /// # Errors
    /// A broken rule, before anything is queued, or what the libraries below report.
    pub fn dispatch<'s, T: Token>(&self, call: Dispatch<'s, T>, stream: impl Into<Stream<'s>>) -> Result<()> {
        let stream = stream.into();
        self.handle.group.call("nvte_ep_dispatch", |ep| {
            let mut uses = Uses::new();
            let mut call = call.views(self.topk_idx, self.handle.config.top_k, &stream, &mut uses)?;
            ep.dispatch(&self.handle.handle, &mut call, stream.raw)
        })
    }

    /// Sums each token's rows back on its own rank; unweighted.
    ///
    /// # Errors
    /// As [`Prepared::dispatch`].
    pub fn combine<'s, T: Token>(&self, call: Combine<'s, T>, stream: impl Into<Stream<'s>>) -> Result<()> {
        let stream = stream.into();
        self.handle.group.call("nvte_ep_combine", |ep| {
            let mut uses = Uses::new();
            let mut call = call.views(&stream, &mut uses)?;
            ep.combine(&self.handle.handle, &mut call, stream.raw)
        })
    }

    /// Gradient of [`Prepared::dispatch`].
    ///
    /// # Errors
    /// As [`Prepared::dispatch`].
    pub fn dispatch_bwd<'s, T: Token>(&self, call: DispatchBwd<'s, T>, stream: impl Into<Stream<'s>>) -> Result<()> {
        let stream = stream.into();
        self.handle.group.call("nvte_ep_dispatch_bwd", |ep| {
            let mut uses = Uses::new();
            let mut call = call.views(self.handle.config.top_k, &stream, &mut uses)?;
            ep.dispatch_bwd(&self.handle.handle, &mut call, stream.raw)
        })
    }

    /// Gradient of [`Prepared::combine`].
    ///
    /// # Errors
    /// As [`Prepared::dispatch`].
    pub fn combine_bwd<'s, T: Token>(&self, call: CombineBwd<'s, T>, stream: impl Into<Stream<'s>>) -> Result<()> {
        let stream = stream.into();
        self.handle.group.call("nvte_ep_combine_bwd", |ep| {
            let mut uses = Uses::new();
            let mut call = call.views(&stream, &mut uses)?;
            ep.combine_bwd(&self.handle.handle, &mut call, stream.raw)
        })
    }

    /// What the step needs of this rank's receive buffers. Waits for all that is queued on `stream`; in eager mode that is
    /// the step's one wait.
    ///
    /// # Errors
    /// A stream that captures; queued work that failed.
    pub fn recv_totals<'s>(&self, stream: impl Into<Stream<'s>>) -> Result<RecvTotals> {
        let stream = stream.into();
        self.handle.group.call("nvte_ep_ext_recv_totals", |ep| ep.recv_totals(&self.handle.handle.mem, stream.raw))
    }

    /// Ends the step and gives the handle back, for a queue of handles. Where a handle is borrowed for one step only, to drop
    /// this is the same.
    #[must_use]
    pub fn finish(self) -> &'h mut HandleMemory<'g> {
        self.handle
    }
}
