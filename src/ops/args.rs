//! The arguments of the per-step operations, by name. Shapes: T = tokens of this rank in this step, H = hidden size, K = top_k,
//! C = max_recv_tokens_per_rank.
#![forbid(unsafe_code)]

use crate::config::LayerConfig;
use crate::dtype::DType;
use crate::progress::{Call, Step};
use crate::tensor::TensorView;

/// What the last prepare of a layer left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared {
    /// T of that step.
    pub num_tokens: usize,
    /// Data type of its `topk_idx`.
    pub index_dtype: DType,
    /// Rows that this rank receives, padding included; none where the host has not read it, which only eager mode does.
    pub recv_total: Option<u64>,
}

/// Arguments of prepare.
#[derive(Debug, Clone, Copy)]
pub struct Prepare {
    /// `[T, K]` int64 or int32; an index that is no expert routes nowhere.
    pub topk_idx: TensorView,
    /// `[local experts]` int32 or int64; receives the padded row count of every local expert's slab.
    pub token_counts: Option<TensorView>,
    /// `[1]`, dtype of `token_counts`; receives the sum of all slabs' rows, before any drop.
    pub total: Option<TensorView>,
}

/// Arguments of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch {
    /// `[T, K]`, as given to prepare; its contents are not read again.
    pub topk_idx: Option<TensorView>,
    /// `[T, H]`.
    pub tokens: TensorView,
    /// `[T, K]` float32; none = only rows move.
    pub topk_weights: Option<TensorView>,
    /// `[C, H]`; receives the rows.
    pub recv_tokens: TensorView,
    /// `[C]` float32; receives each row's weight. Present exactly if `topk_weights` is.
    pub recv_topk_weights: Option<TensorView>,
}

/// Arguments of combine.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// `[C, H]`.
    pub expert_out: TensorView,
    /// `[T, H]`; receives the sum over each token's rows.
    pub result: TensorView,
}

/// Arguments of the gradient of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct DispatchBwd {
    /// `[C, H]`: gradient of `recv_tokens`.
    pub grad: TensorView,
    /// `[C]` float32: gradient of `recv_topk_weights`; none = rows only.
    pub g_recv_topk_weights: Option<TensorView>,
    /// `[T, H]`; receives the gradient of `tokens`.
    pub grad_tokens: TensorView,
    /// `[T, K]` float32; receives the gradient of `topk_weights`. Present exactly if `g_recv_topk_weights` is.
    pub grad_topk_weights: Option<TensorView>,
}

/// Arguments of the gradient of combine.
#[derive(Debug, Clone, Copy)]
pub struct CombineBwd {
    /// `[T, H]`: gradient of `result`; may be MXFP8.
    pub grad: TensorView,
    /// `[C, H]`; receives the gradient of `expert_out`, zeroes in the padding.
    pub grad_expert_out: TensorView,
}

/// A call's tensors, handle memory excepted, of which there are at most so many.
pub(crate) const MOST_TENSORS: usize = 4;

/// What all calls have: tensors, in one order.
pub(crate) trait Arguments {
    /// The call.
    const CALL: Call;
    /// Which of its tensors it writes; it reads the others.
    const WRITTEN: [bool; MOST_TENSORS];
    /// Whether it writes the handle memory; else it reads it.
    const WRITES_HANDLE: bool = false;
    /// The tensors that it reads or writes; first the rows that peers reach in zero-copy groups. The others are this rank's
    /// alone.
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS];
}

/// What the calls over a layer have besides.
pub(crate) trait LayerArguments: Arguments {
    /// What the call is, for the comparison with the other ranks'.
    fn step(&self, layer: &LayerConfig) -> Step;
}

impl Arguments for Prepare {
    const CALL: Call = Call::Prepare;
    const WRITTEN: [bool; MOST_TENSORS] = [false, true, true, false];
    const WRITES_HANDLE: bool = true;

    #[inline]
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        [Some(&mut self.topk_idx), self.token_counts.as_mut(), self.total.as_mut(), None]
    }
}

impl LayerArguments for Prepare {
    fn step(&self, layer: &LayerConfig) -> Step {
        Step { call: Self::CALL, top_k: layer.top_k, size: 0, dtype: None, weights: false }
    }
}

impl Arguments for Dispatch {
    const CALL: Call = Call::Dispatch;
    const WRITTEN: [bool; MOST_TENSORS] = [true, false, false, true];

    #[inline]
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        let (weights, recv_weights) = (self.topk_weights.as_mut(), self.recv_topk_weights.as_mut());
        [Some(&mut self.recv_tokens), Some(&mut self.tokens), weights, recv_weights]
    }
}

impl LayerArguments for Dispatch {
    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.tokens, self.topk_weights.is_some())
    }
}

impl Arguments for Combine {
    const CALL: Call = Call::Combine;
    const WRITTEN: [bool; MOST_TENSORS] = [false, true, false, false];

    #[inline]
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        [Some(&mut self.expert_out), Some(&mut self.result), None, None]
    }
}

impl LayerArguments for Combine {
    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.result, false)
    }
}

impl Arguments for DispatchBwd {
    const CALL: Call = Call::DispatchBwd;
    const WRITTEN: [bool; MOST_TENSORS] = [false, true, false, true];

    #[inline]
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        let (recv_weights, weights) = (self.g_recv_topk_weights.as_mut(), self.grad_topk_weights.as_mut());
        [Some(&mut self.grad), Some(&mut self.grad_tokens), recv_weights, weights]
    }
}

impl LayerArguments for DispatchBwd {
    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.grad_tokens, self.grad_topk_weights.is_some())
    }
}

impl Arguments for CombineBwd {
    const CALL: Call = Call::CombineBwd;
    const WRITTEN: [bool; MOST_TENSORS] = [true, false, false, false];

    #[inline]
    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        [Some(&mut self.grad_expert_out), Some(&mut self.grad), None, None]
    }
}

impl LayerArguments for CombineBwd {
    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.grad, false)
    }
}

#[inline]
fn step(call: Call, layer: &LayerConfig, rows: &TensorView, weights: bool) -> Step {
    let size = rows.shape.sizes().last().copied().unwrap_or(0);
    Step { call, top_k: layer.top_k, size, dtype: Some(rows.dtype), weights }
}
