//! The nine functions of TransformerEngine's ABI since 2.19: parse, call. `exports` and `twins` are generated from them; what
//! they do is in abi/ep.md.
//!
//! Shapes: T = tokens of this rank in this step (0 to max_tokens_per_rank), H = hidden size, K = the layer's top_k,
//! C = max_recv_tokens_per_rank. Receive-side tensors have at least C rows; rows from C on are neither read nor written.
//! In eager mode they have at least as many rows as the step's total.

#![allow(clippy::too_many_arguments, reason = "the C functions have them")]

use crate::calls::{combine_bwd_of, combine_of, dispatch_bwd_of, dispatch_of};
use crate::core::{self, Tensors};
use nvte_ep_core::backend::{Communicator, LayerClaim};
use nvte_ep_core::config::LayerConfig;
use nvte_ep_core::error::Result;
use nvte_ep_core::ffi::te::{NVTEEpGroupConfig, NVTEEpLayerConfig, parse_handle};
use nvte_ep_core::ffi::te_window::NVTECommWindow;
use nvte_ep_core::ffi::types::{NVTETensor, cudaStream_t};
use nvte_ep_core::ffi::versioned::read_versioned;
use nvte_ep_core::ffi::view::{Windows, optional, required};
use nvte_ep_core::ops::Prepare;
use nvte_ep_core::options::Options;
use nvte_ep_core::sys::cuda::Stream;
use std::ffi::c_void;

/// # Safety
/// `layer_cfg` is null or points to as many bytes as it says.
unsafe fn layer_of(layer_cfg: *const NVTEEpLayerConfig) -> Result<LayerConfig> {
    // SAFETY: passed on.
    unsafe { read_versioned("layer_cfg", layer_cfg) }?.try_into()
}

#[inline(always)]
fn prepare_of(tensors: &Tensors, topk_idx: NVTETensor, counts: NVTETensor, total: NVTETensor) -> Result<Prepare> {
    Ok(Prepare {
        topk_idx: required(tensors, "topk_idx", topk_idx, Windows::default())?,
        token_counts: optional(tensors, "recv_tokens_per_expert", counts, Windows::default())?,
        total: optional(tensors, "total_recv_tokens_per_rank", total, Windows::default())?,
    })
}

pub(crate) unsafe fn nvte_ep_initialize(ep_comm: *mut c_void, group_config: *const NVTEEpGroupConfig) -> Result<()> {
    core::refuse_other_abi()?;
    // SAFETY: the caller vouches for the configuration.
    let request = unsafe { NVTEEpGroupConfig::read(group_config) }?;
    let comm = Communicator(ep_comm.expose_provenance());
    // SAFETY: the caller vouches for the communicator.
    unsafe { core::initialize(comm, request, &Options::default()) }
}

pub(crate) fn nvte_ep_shutdown() -> Result<()> {
    core::shutdown()
}

pub(crate) unsafe fn nvte_ep_handle_mem_size(layer_cfg: *const NVTEEpLayerConfig) -> Result<usize> {
    let group = core::current_group()?;
    // SAFETY: the caller vouches for the configuration.
    group.handle_mem_size(unsafe { layer_of(layer_cfg) }?)
}

pub(crate) unsafe fn nvte_ep_prepare(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    recv_tokens_per_expert: NVTETensor,
    total_recv_tokens_per_rank: NVTETensor,
    layer_cfg: *const NVTEEpLayerConfig,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    // SAFETY: the caller vouches for the configuration.
    let claim = LayerClaim::Given(unsafe { layer_of(layer_cfg) }?);
    let tensors = Tensors::open();
    let mut call = prepare_of(&tensors, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank)?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.prepare(&handle, claim, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_dispatch(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    tokens: NVTETensor,
    tokens_win: NVTECommWindow,
    topk_weights: NVTETensor,
    topk_weights_win: NVTECommWindow,
    recv_tokens: NVTETensor,
    recv_tokens_win: NVTECommWindow,
    recv_topk_weights: NVTETensor,
    recv_topk_weights_win: NVTECommWindow,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = dispatch_of(
        &tensors,
        topk_idx,
        (tokens, tokens_win.parse()),
        (topk_weights, topk_weights_win.parse()),
        (recv_tokens, recv_tokens_win.parse()),
        (recv_topk_weights, recv_topk_weights_win.parse()),
    )?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.dispatch(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_prepare_and_dispatch(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    tokens: NVTETensor,
    tokens_win: NVTECommWindow,
    topk_weights: NVTETensor,
    topk_weights_win: NVTECommWindow,
    recv_tokens: NVTETensor,
    recv_tokens_win: NVTECommWindow,
    recv_topk_weights: NVTETensor,
    recv_topk_weights_win: NVTECommWindow,
    recv_tokens_per_expert: NVTETensor,
    total_recv_tokens_per_rank: NVTETensor,
    layer_cfg: *const NVTEEpLayerConfig,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    // SAFETY: the caller vouches for the configuration.
    let claim = LayerClaim::Given(unsafe { layer_of(layer_cfg) }?);
    let tensors = Tensors::open();
    let mut prepare = prepare_of(&tensors, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank)?;
    let mut dispatch = dispatch_of(
        &tensors,
        topk_idx,
        (tokens, tokens_win.parse()),
        (topk_weights, topk_weights_win.parse()),
        (recv_tokens, recv_tokens_win.parse()),
        (recv_topk_weights, recv_topk_weights_win.parse()),
    )?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.prepare_and_dispatch(&handle, claim, &mut prepare, &mut dispatch, unsafe {
        Stream::bind(stream.expose_provenance())
    })
}

pub(crate) unsafe fn nvte_ep_combine(
    handle_mem: NVTETensor,
    expert_out: NVTETensor,
    expert_out_win: NVTECommWindow,
    result: NVTETensor,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = combine_of(&tensors, (expert_out, expert_out_win.parse()), result)?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.combine(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_dispatch_bwd(
    handle_mem: NVTETensor,
    grad: NVTETensor,
    grad_win: NVTECommWindow,
    g_recv_topk_weights: NVTETensor,
    g_recv_topk_weights_win: NVTECommWindow,
    grad_tokens: NVTETensor,
    grad_topk_weights: NVTETensor,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let weights = (g_recv_topk_weights, g_recv_topk_weights_win.parse());
    let mut call = dispatch_bwd_of(&tensors, (grad, grad_win.parse()), weights, grad_tokens, grad_topk_weights)?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.dispatch_bwd(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_combine_bwd(
    handle_mem: NVTETensor,
    grad: NVTETensor,
    grad_win: NVTECommWindow,
    grad_expert_out: NVTETensor,
    grad_expert_out_win: NVTECommWindow,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = combine_bwd_of(&tensors, (grad, grad_win.parse()), (grad_expert_out, grad_expert_out_win.parse()))?;
    let handle = parse_handle(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.combine_bwd(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}
