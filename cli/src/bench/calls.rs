//! The calls that are timed, with their arguments.

use super::contestant::{Contestant, Handle, Window};
use super::report::TIMED;
use super::{Exchanged, RowType, Run};
use crate::Outcome;
use crate::device::{Device, Memory};
use crate::library::Tensor;
use nvte_ep_core::ffi::types::{kNVTEFloat8E4M3, kNVTEFloat32, kNVTEInt32, kNVTEInt64};

/// The number of the last of [`TIMED`], which is all of a step.
pub const STEP: usize = TIMED.len() - 1;

/// The calls' arguments, made once.
pub struct Calls<'a> {
    library: &'a Contestant,
    device: &'a Device,
    handle: Handle,
    written: Window,
    read: Window,
    topk_idx: Tensor<'a>,
    counts: Tensor<'a>,
    weights: Tensor<'a>,
    tokens: Tensor<'a>,
    recv_tokens: Tensor<'a>,
    recv_weights: Tensor<'a>,
    expert_out: Tensor<'a>,
    result: Tensor<'a>,
    grad_result: Tensor<'a>,
    grad_recv_weights: Tensor<'a>,
    grad_tokens: Tensor<'a>,
    grad_weights: Tensor<'a>,
}

impl<'a> Calls<'a> {
    /// Of one group of a run.
    pub fn new(run: &'a Run, library: &'a Contestant, exchanged: &Exchanged, handle: Handle) -> Outcome<Self> {
        let (problem, inputs, tensors) = (&run.case.problem, &run.inputs, &library.tensors);
        let (tokens, hidden, top_k, rows) = (problem.tokens, problem.hidden, problem.top_k, run.capacity);
        let (written, read, scales) = (exchanged.written, exchanged.read, exchanged.scales);
        let (dtype, f32) = (run.case.dtype.combined(), kNVTEFloat32);
        // What is dispatched; as MXFP8 the first bytes of the memory.
        let sent = |memory: Memory, rows: usize, scales: Memory| match run.case.dtype {
            RowType::Mxfp8 => tensors.scaled(memory.address, kNVTEFloat8E4M3, [rows, hidden], scales.address),
            _ => tensors.tensor(memory.address, dtype, &[rows, hidden]),
        };
        Ok(Self {
            library,
            device: run.device(),
            handle,
            written: written.window,
            read: read.window,
            topk_idx: tensors.tensor(inputs.topk_idx.address, kNVTEInt64, &[tokens, top_k])?,
            counts: tensors.tensor(inputs.counts.address, kNVTEInt32, &[problem.local_experts()])?,
            weights: tensors.tensor(inputs.topk_weights.address, f32, &[tokens, top_k])?,
            tokens: sent(inputs.tokens, tokens, inputs.scales)?,
            recv_tokens: sent(written.memory, rows, scales)?,
            recv_weights: tensors.tensor(inputs.recv_weights.address, f32, &[rows])?,
            expert_out: tensors.tensor(read.memory.address, dtype, &[rows, hidden])?,
            result: tensors.tensor(inputs.result.address, dtype, &[tokens, hidden])?,
            grad_result: sent(inputs.grad_result, tokens, inputs.scales)?,
            grad_recv_weights: tensors.tensor(inputs.grad_recv_weights.address, f32, &[rows])?,
            grad_tokens: tensors.tensor(inputs.grad_tokens.address, dtype, &[tokens, hidden])?,
            grad_weights: tensors.tensor(inputs.grad_weights.address, f32, &[tokens, top_k])?,
        })
    }

    /// Queues one of [`TIMED`].
    pub fn run(&self, call: usize) -> Outcome<()> {
        let (library, handle, stream) = (self.library, &self.handle, self.device.stream());
        match call {
            0 => library.prepare(handle, self.topk_idx.raw, self.counts.raw, stream),
            1 => {
                let sent = [self.topk_idx.raw, self.tokens.raw, self.weights.raw];
                let received = [self.recv_tokens.raw, self.recv_weights.raw];
                library.dispatch(handle, sent, received, self.written, stream)
            }
            2 => library.combine(handle, [self.expert_out.raw, self.result.raw], self.read, stream),
            3 => library.combine_bwd(handle, [self.grad_result.raw, self.recv_tokens.raw], self.written, stream),
            4 => {
                let given = [self.expert_out.raw, self.grad_recv_weights.raw];
                library.dispatch_bwd(handle, given, [self.grad_tokens.raw, self.grad_weights.raw], self.read, stream)
            }
            5 => [0, 1].into_iter().try_for_each(|part| self.run(part)),
            STEP => (0..5).try_for_each(|part| self.run(part)),
            _ => unreachable!("there are {} calls", TIMED.len()),
        }
    }
}
