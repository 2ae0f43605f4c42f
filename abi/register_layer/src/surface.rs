//! The eight functions of the register_layer ABI, and one of ours about layers: parse, call. `exports` and `twins` are generated from them; what they do
//! is in abi/ep.md.
//!
//! Shapes: T = tokens of this rank in this step (0 to max_tokens_per_rank), H = hidden size, K = the layer's top_k,
//! C = max_recv_tokens_per_rank. Receive-side tensors have at least C rows; rows from C on are neither read nor written.

#![allow(clippy::too_many_arguments, reason = "the C functions have them")]

use crate::calls::{combine_bwd_of, combine_of, dispatch_bwd_of, dispatch_of};
use crate::core::{self, Tensors};
use nvte_ep_core::backend::{Communicator, LayerClaim};
use nvte_ep_core::config::{LayerConfig, SlabAlignment};
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::comm_window::NVTECommWindow;
use nvte_ep_core::ffi::register_layer::{NVTEEpGroupConfig, NVTEEpHandle, NVTEEpLayerConfig};
use nvte_ep_core::ffi::types::{NVTETensor, cudaStream_t};
use nvte_ep_core::ffi::view::{Windows, required};
use nvte_ep_core::ops::Prepare;
use nvte_ep_core::options::Options;
use nvte_ep_core::sys::cuda::Stream;
use std::ffi::c_void;

pub(crate) unsafe fn nvte_ep_initialize(ep_comm: *mut c_void, group_config: NVTEEpGroupConfig) -> Result<()> {
    core::refuse_other_abi()?;
    let comm = Communicator(ep_comm.expose_provenance());
    // SAFETY: the caller vouches for the communicator.
    unsafe { core::initialize(comm, group_config.into(), &Options::default()) }
}

pub(crate) fn nvte_ep_shutdown() -> Result<()> {
    core::shutdown()
}

pub(crate) unsafe fn nvte_ep_register_layer(
    layer_config: NVTEEpLayerConfig,
    handle_mem_size: *mut usize,
) -> Result<u64> {
    let group = core::current_group()?;
    let config = LayerConfig::try_from(layer_config)?;
    if handle_mem_size.is_null() {
        return Err(Error::argument("handle_mem_size", "must not be NULL", "NULL")
            .with_remedy("pass the address of a size_t for the bytes of handle memory that the layer needs"));
    }
    let (id, bytes) = group.register_layer(config)?;
    // SAFETY: not NULL, and the caller vouches for what it points to.
    unsafe { handle_mem_size.write(bytes) };
    Ok(id)
}

pub(crate) fn nvte_ep_ext_unregister_layer(id: u64) -> Result<()> {
    core::current_group()?.unregister_layer(id)
}

pub(crate) unsafe fn nvte_ep_prepare(
    handle: NVTEEpHandle,
    topk_idx: NVTETensor,
    token_counts: NVTETensor,
    dispatch_output_per_expert_alignment: usize,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = Prepare {
        topk_idx: required(&tensors, "topk_idx", topk_idx, Windows::default())?,
        token_counts: Some(required(&tensors, "token_counts", token_counts, Windows::default())?),
        total: None,
    };
    let alignment = SlabAlignment::parse("dispatch_output_per_expert_alignment", dispatch_output_per_expert_alignment)?;
    let handle = handle.parse(&tensors)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.prepare(&handle, LayerClaim::Registered(alignment), &mut call, unsafe {
        Stream::bind(stream.expose_provenance())
    })
}

pub(crate) unsafe fn nvte_ep_dispatch(
    handle: NVTEEpHandle,
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
    let handle = handle.parse(&tensors)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.dispatch(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_combine(
    handle: NVTEEpHandle,
    expert_out: NVTETensor,
    expert_out_win: NVTECommWindow,
    result: NVTETensor,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = combine_of(&tensors, (expert_out, expert_out_win.parse()), result)?;
    let handle = handle.parse(&tensors)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.combine(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_dispatch_bwd(
    handle: NVTEEpHandle,
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
    let handle = handle.parse(&tensors)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.dispatch_bwd(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}

pub(crate) unsafe fn nvte_ep_combine_bwd(
    handle: NVTEEpHandle,
    grad: NVTETensor,
    grad_win: NVTECommWindow,
    grad_expert_out: NVTETensor,
    grad_expert_out_win: NVTECommWindow,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let tensors = Tensors::open();
    let mut call = combine_bwd_of(&tensors, (grad, grad_win.parse()), (grad_expert_out, grad_expert_out_win.parse()))?;
    let handle = handle.parse(&tensors)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.combine_bwd(&handle, &mut call, unsafe { Stream::bind(stream.expose_provenance()) })
}
