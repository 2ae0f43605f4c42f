//! From tensors to the calls of the core, for both ABIs. What is made here is large, so all of it is inlined.

use crate::core::Tensors;
use nvte_ep_core::error::Result;
use nvte_ep_core::ffi::types::NVTETensor;
use nvte_ep_core::ffi::view::{Windows, optional, required};
use nvte_ep_core::ops::{Combine, CombineBwd, Dispatch, DispatchBwd};

/// A tensor and where it lies in symmetric memory.
pub(crate) type Payload = (NVTETensor, Windows);

#[inline(always)]
pub(crate) fn dispatch_of(
    tensors: &Tensors,
    topk_idx: NVTETensor,
    (tokens, tokens_win): Payload,
    (topk_weights, topk_weights_win): Payload,
    (recv_tokens, recv_tokens_win): Payload,
    (recv_topk_weights, recv_topk_weights_win): Payload,
) -> Result<Dispatch> {
    Ok(Dispatch {
        topk_idx: optional(tensors, "topk_idx", topk_idx, Windows::default())?,
        tokens: required(tensors, "tokens", tokens, tokens_win)?,
        topk_weights: optional(tensors, "topk_weights", topk_weights, topk_weights_win)?,
        recv_tokens: required(tensors, "recv_tokens", recv_tokens, recv_tokens_win)?,
        recv_topk_weights: optional(tensors, "recv_topk_weights", recv_topk_weights, recv_topk_weights_win)?,
    })
}

#[inline(always)]
pub(crate) fn combine_of(
    tensors: &Tensors,
    (expert_out, expert_out_win): Payload,
    result: NVTETensor,
) -> Result<Combine> {
    Ok(Combine {
        expert_out: required(tensors, "expert_out", expert_out, expert_out_win)?,
        result: required(tensors, "result", result, Windows::default())?,
    })
}

#[inline(always)]
pub(crate) fn dispatch_bwd_of(
    tensors: &Tensors,
    (grad, grad_win): Payload,
    (g_recv_topk_weights, g_recv_topk_weights_win): Payload,
    grad_tokens: NVTETensor,
    grad_topk_weights: NVTETensor,
) -> Result<DispatchBwd> {
    Ok(DispatchBwd {
        grad: required(tensors, "grad", grad, grad_win)?,
        g_recv_topk_weights: optional(tensors, "g_recv_topk_weights", g_recv_topk_weights, g_recv_topk_weights_win)?,
        grad_tokens: required(tensors, "grad_tokens", grad_tokens, Windows::default())?,
        grad_topk_weights: optional(tensors, "grad_topk_weights", grad_topk_weights, Windows::default())?,
    })
}

#[inline(always)]
pub(crate) fn combine_bwd_of(
    tensors: &Tensors,
    (grad, grad_win): Payload,
    (grad_expert_out, grad_expert_out_win): Payload,
) -> Result<CombineBwd> {
    Ok(CombineBwd {
        grad: required(tensors, "grad", grad, grad_win)?,
        grad_expert_out: required(tensors, "grad_expert_out", grad_expert_out, grad_expert_out_win)?,
    })
}
