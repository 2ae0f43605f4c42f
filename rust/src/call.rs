//! The arguments of a step's calls, by their names. Shapes: T = tokens of this rank in this step, H = hidden size, K = the
//! layer's top_k, C = the group's `max_recv_tokens_per_rank`.

use crate::dtype::{Element, Index, Token};
use crate::memory::{DeviceSlice, DeviceSliceMut, Rows, RowsMut, Uses};
use crate::stream::Stream;
use nvte_ep_core::error::Result;
use nvte_ep_core::ops;
use nvte_ep_core::tensor::TensorView;

/// Arguments of [`HandleMemory::prepare`](crate::HandleMemory::prepare).
pub struct Prepare<'a, I, C> {
    /// `[T, K]`: each token's experts. An index that is no expert routes nowhere.
    pub topk_idx: &'a dyn DeviceSlice<Element = I>,
    /// One for each expert of this rank; receives the rows of its slab, with padding.
    pub token_counts: &'a mut dyn DeviceSliceMut<Element = C>,
    /// One; receives the sum of all slabs' rows, before any are dropped.
    pub total: Option<&'a mut dyn DeviceSliceMut<Element = C>>,
}

/// Arguments of [`Prepared::dispatch`](crate::Prepared::dispatch).
#[derive(Debug)]
pub struct Dispatch<'a, T> {
    /// `[T, H]`.
    pub tokens: Rows<'a, T>,
    /// `[C, H]`; receives the rows, expert after expert.
    pub recv_tokens: RowsMut<'a, T>,
    /// The weights of the routing, where they are to be sent too.
    pub weights: Option<Weights<'a>>,
}

/// Weights that go with rows: what is sent, and what is received.
pub struct Weights<'a> {
    /// `[T, K]`.
    pub topk_weights: &'a dyn DeviceSlice<Element = f32>,
    /// `[C]`; receives the weight of each row.
    pub recv_topk_weights: &'a mut dyn DeviceSliceMut<Element = f32>,
}

/// Arguments of [`Prepared::combine`](crate::Prepared::combine).
#[derive(Debug)]
pub struct Combine<'a, T> {
    /// `[C, H]`.
    pub expert_out: Rows<'a, T>,
    /// `[T, H]`; receives the sum over each token's rows.
    pub result: RowsMut<'a, T>,
}

/// Arguments of [`Prepared::dispatch_bwd`](crate::Prepared::dispatch_bwd).
#[derive(Debug)]
pub struct DispatchBwd<'a, T> {
    /// `[C, H]`: the gradient of `recv_tokens`.
    pub grad: Rows<'a, T>,
    /// `[T, H]`; receives the gradient of `tokens`.
    pub grad_tokens: RowsMut<'a, T>,
    /// The gradients of the weights, where they were sent.
    pub weights: Option<WeightGrads<'a>>,
}

/// Gradients of weights: what is sent back, and what is received.
pub struct WeightGrads<'a> {
    /// `[C]`: the gradient of `recv_topk_weights`.
    pub g_recv_topk_weights: &'a dyn DeviceSlice<Element = f32>,
    /// `[T, K]`; receives the gradient of `topk_weights`.
    pub grad_topk_weights: &'a mut dyn DeviceSliceMut<Element = f32>,
}

/// Arguments of [`Prepared::combine_bwd`](crate::Prepared::combine_bwd).
#[derive(Debug)]
pub struct CombineBwd<'a, T> {
    /// `[T, H]`: the gradient of `result`.
    pub grad: Rows<'a, T>,
    /// `[C, H]`; receives the gradient of `expert_out`, zeroes in the padding.
    pub grad_expert_out: RowsMut<'a, T>,
}

macro_rules! opaque {
    ($($Type:ident<$($lifetime:lifetime),+ $(, $T:ident)*>;)*) => { $(
        impl<$($T),*> std::fmt::Debug for $Type<$($lifetime),+ $(, $T)*> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($Type)).finish_non_exhaustive()
            }
        }
    )* };
}

opaque! {
    Prepare<'_, I, C>;
    Weights<'_>;
    WeightGrads<'_>;
}

impl<'a, I: Index, C: Index> Prepare<'a, I, C> {
    #[inline]
    pub(crate) fn views(self, top_k: u32, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<ops::Prepare> {
        let Self { topk_idx, token_counts, total } = self;
        let len = token_counts.len();
        let counts = uses.vector::<C>("token_counts", token_counts.lend_mut(stream), len)?;
        let total = match total {
            Some(total) => {
                let len = total.len();
                Some(uses.vector::<C>("total", total.lend_mut(stream), len)?)
            }
            None => None,
        };
        let len = topk_idx.len();
        let topk_idx = uses.matrix("topk_idx", I::DTYPE, topk_idx.lend(stream), len, top_k as usize)?;
        Ok(ops::Prepare { topk_idx, token_counts: Some(counts), total })
    }
}

impl<'a, T: Token> Dispatch<'a, T> {
    /// `topk_idx` is what the routing was made of.
    #[inline]
    pub(crate) fn views(
        self,
        topk_idx: TensorView,
        top_k: u32,
        stream: &Stream<'a>,
        uses: &mut Uses<'a>,
    ) -> Result<ops::Dispatch> {
        let Self { tokens, recv_tokens, weights } = self;
        let tokens = tokens.view("tokens", stream, uses)?;
        let recv_tokens = recv_tokens.view("recv_tokens", stream, uses)?;
        let (topk_weights, recv_topk_weights) = match weights {
            Some(Weights { topk_weights, recv_topk_weights }) => {
                let len = recv_topk_weights.len();
                let recv = uses.vector::<f32>("recv_topk_weights", recv_topk_weights.lend_mut(stream), len)?;
                (Some(of_tokens("topk_weights", topk_weights, top_k, stream, uses)?), Some(recv))
            }
            None => (None, None),
        };
        Ok(ops::Dispatch { topk_idx: Some(topk_idx), tokens, topk_weights, recv_tokens, recv_topk_weights })
    }
}

/// A `[T, K]` tensor of weights.
fn of_tokens<'a>(
    name: &'static str,
    weights: &'a dyn DeviceSlice<Element = f32>,
    top_k: u32,
    stream: &Stream<'a>,
    uses: &mut Uses<'a>,
) -> Result<TensorView> {
    uses.matrix(name, f32::DTYPE, weights.lend(stream), weights.len(), top_k as usize)
}

impl<'a, T: Token> Combine<'a, T> {
    #[inline]
    pub(crate) fn views(self, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<ops::Combine> {
        let Self { expert_out, result } = self;
        let expert_out = expert_out.view("expert_out", stream, uses)?;
        Ok(ops::Combine { expert_out, result: result.view("result", stream, uses)? })
    }
}

impl<'a, T: Token> DispatchBwd<'a, T> {
    #[inline]
    pub(crate) fn views(self, top_k: u32, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<ops::DispatchBwd> {
        let Self { grad, grad_tokens, weights } = self;
        let grad = grad.view("grad", stream, uses)?;
        let grad_tokens = grad_tokens.view("grad_tokens", stream, uses)?;
        let (g_recv_topk_weights, grad_topk_weights) = match weights {
            Some(WeightGrads { g_recv_topk_weights, grad_topk_weights }) => {
                let (sent, len) = (g_recv_topk_weights, grad_topk_weights.len());
                let sent = uses.vector::<f32>("g_recv_topk_weights", sent.lend(stream), sent.len())?;
                let name = "grad_topk_weights";
                let lent = grad_topk_weights.lend_mut(stream);
                (Some(sent), Some(uses.matrix(name, f32::DTYPE, lent, len, top_k as usize)?))
            }
            None => (None, None),
        };
        Ok(ops::DispatchBwd { grad, g_recv_topk_weights, grad_tokens, grad_topk_weights })
    }
}

impl<'a, T: Token> CombineBwd<'a, T> {
    #[inline]
    pub(crate) fn views(self, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<ops::CombineBwd> {
        let Self { grad, grad_expert_out } = self;
        let grad = grad.view("grad", stream, uses)?;
        Ok(ops::CombineBwd { grad, grad_expert_out: grad_expert_out.view("grad_expert_out", stream, uses)? })
    }
}
