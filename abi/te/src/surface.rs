//! The nine functions of TransformerEngine's ABI since 2.19: guard, parse, call. Here is what all of them share.
//!
//! Shapes: T = tokens of this rank in this step (0 to max_tokens_per_rank), H = hidden size, K = the layer's top_k,
//! C = max_recv_tokens_per_rank. Receive-side tensors have at least C rows; rows from C on are neither read nor written.
//! In eager mode they have at least as many rows as the step's total.

use crate::core::{self, Tensors};
use nvte_ep_core::backend::{Communicator, LayerClaim};
use nvte_ep_core::config::LayerConfig;
use nvte_ep_core::error::Result;
use nvte_ep_core::ffi::guard;
use nvte_ep_core::ffi::te::{NVTEEpGroupConfig, NVTEEpLayerConfig, parse_handle};
use nvte_ep_core::ffi::te_window::NVTECommWindow;
use nvte_ep_core::ffi::types::{NVTETensor, cudaStream_t};
use nvte_ep_core::ffi::versioned::read_versioned;
use nvte_ep_core::ffi::view::{Windows, optional, required};
use nvte_ep_core::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use nvte_ep_core::options::Options;
use nvte_ep_core::sys::cuda::Stream;
use std::ffi::c_void;

/// # Safety
/// `layer_cfg` is null or points to as many bytes as it says.
unsafe fn layer_of(layer_cfg: *const NVTEEpLayerConfig) -> Result<LayerConfig> {
    // SAFETY: passed on.
    unsafe { read_versioned("layer_cfg", layer_cfg) }?.try_into()
}

// Inlined, since what it makes is large and would be copied.
#[inline(always)]
fn prepare_of(tensors: &Tensors, topk_idx: NVTETensor, counts: NVTETensor, total: NVTETensor) -> Result<Prepare> {
    Ok(Prepare {
        topk_idx: required(tensors, "topk_idx", topk_idx, Windows::default())?,
        token_counts: optional(tensors, "recv_tokens_per_expert", counts, Windows::default())?,
        total: optional(tensors, "total_recv_tokens_per_rank", total, Windows::default())?,
    })
}

#[inline(always)]
fn dispatch_of(
    tensors: &Tensors,
    topk_idx: NVTETensor,
    (tokens, tokens_win): (NVTETensor, NVTECommWindow),
    (topk_weights, topk_weights_win): (NVTETensor, NVTECommWindow),
    (recv_tokens, recv_tokens_win): (NVTETensor, NVTECommWindow),
    (recv_topk_weights, recv_topk_weights_win): (NVTETensor, NVTECommWindow),
) -> Result<Dispatch> {
    Ok(Dispatch {
        topk_idx: optional(tensors, "topk_idx", topk_idx, Windows::default())?,
        tokens: required(tensors, "tokens", tokens, tokens_win.parse())?,
        topk_weights: optional(tensors, "topk_weights", topk_weights, topk_weights_win.parse())?,
        recv_tokens: required(tensors, "recv_tokens", recv_tokens, recv_tokens_win.parse())?,
        recv_topk_weights: optional(tensors, "recv_topk_weights", recv_topk_weights, recv_topk_weights_win.parse())?,
    })
}

/// Creates the EP group of the calling thread's current device. Collective over ep_comm; every rank passes the same
/// group_config.
///
/// ep_comm: an ncclComm_t of exactly group_config.ep_size ranks, on the current device. It is borrowed and outlives
/// nvte_ep_shutdown.
/// Throws when the device has a group already, for a bad configuration or communicator, when the machine lacks something
/// that is needed (the text says what and how to provide it), and when ranks disagree (then on every rank).
///
/// # Safety
/// ep_comm is NULL, which throws, or a live communicator; group_config is NULL, which throws, or points to as many bytes as
/// its struct_size says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_initialize(ep_comm: *mut c_void, group_config: *const NVTEEpGroupConfig) {
    guard("nvte_ep_initialize", || {
        core::refuse_other_abi()?;
        // SAFETY: the caller vouches for the configuration.
        let request = unsafe { NVTEEpGroupConfig::read(group_config) }?;
        let comm = Communicator(ep_comm.expose_provenance());
        // SAFETY: the caller vouches for the communicator.
        unsafe { core::initialize(comm, request, &Options::default()) }
    });
}

/// Ends the EP groups of this process: waits for queued work and for the other ranks, then frees what the library holds.
/// The communicators stay the callers'. Without a group it does nothing.
///
/// Every order of ending is fine in which the communicator lives until this returns: this, then ncclCommDestroy; this twice;
/// another nvte_ep_initialize afterwards; this at exit, in a destructor, after an exception, or never. Tensors, streams and
/// handle memory may go before or after it.
/// Throws when queued work or another rank does not finish within NVTE_EP_SHUTDOWN_TIMEOUT_MS; the group is gone all the
/// same.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn nvte_ep_shutdown() {
    guard("nvte_ep_shutdown", core::shutdown);
}

/// Bytes of handle memory that a layer needs on the current device's group; host only.
///
/// Throws without a group and for a bad configuration.
///
/// # Safety
/// layer_cfg is NULL, which throws, or points to as many bytes as its struct_size says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_handle_mem_size(layer_cfg: *const NVTEEpLayerConfig) -> usize {
    guard("nvte_ep_handle_mem_size", || {
        let group = core::current_group()?;
        // SAFETY: the caller vouches for the configuration.
        group.handle_mem_size(unsafe { layer_of(layer_cfg) }?)
    })
}

/// Exchanges the routing of one step among the ranks and keeps it in handle_mem. Collective, queued on stream.
///
/// handle_mem: byte tensor of at least the size that nvte_ep_handle_mem_size reports, on a 256-byte boundary. Its bytes may
/// be moved afterwards.
/// topk_idx: [T, K] int64 or int32, the experts of each token. An index that is negative, or no expert, routes
/// nowhere; an expert that a token names again counts once, with the weight of the first mention, and the later mentions
/// have no gradient. Read until the queued work is done, and not written.
/// recv_tokens_per_expert: [num_experts / ep_size] int32 or int64, or null; receives the rows of each local expert's slab:
/// the tokens routed to it, padded to the alignment (no rows where there are no tokens).
/// total_recv_tokens_per_rank: [1], dtype of recv_tokens_per_expert, or null; receives the sum over all slabs, before rows
/// are dropped. Device memory or pinned host memory.
/// layer_cfg: each handle memory keeps its own.
/// Throws, before anything is queued, for unfit handle memory, and shapes or dtypes other than these.
///
/// # Safety
/// The tensors are device memory of their extent, live until the queued work is done. The calls of a group come in one
/// order on every rank and on one stream, or on streams ordered by events. This holds for all functions below.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_prepare(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    recv_tokens_per_expert: NVTETensor,
    total_recv_tokens_per_rank: NVTETensor,
    layer_cfg: *const NVTEEpLayerConfig,
    stream: cudaStream_t,
) {
    guard("nvte_ep_prepare", || {
        let group = core::current_group()?;
        // SAFETY: the caller vouches for the configuration.
        let claim = LayerClaim::Given(unsafe { layer_of(layer_cfg) }?);
        let tensors = Tensors::open();
        let call = prepare_of(&tensors, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank)?;
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.prepare(&handle, claim, &call, Stream::from_raw(stream)) }
    });
}

/// Sends each token's row, and its weights, to the ranks of its experts. Collective, queued on stream.
///
/// recv_tokens then holds the local experts' slabs one after the other; in a slab, rows come by source rank and then by
/// source row, and the padding is zero. Rows beyond the last slab keep what they held.
///
/// topk_idx: [T, K] as given to nvte_ep_prepare; its contents are not read again. May be null without weights.
/// tokens: [T, H] bfloat16, float16 or float32; or MXFP8, with its row-wise inverse scales [T, H / 32] float8_e8m0 and H a
/// multiple of 512.
/// topk_weights: [T, K] float32, or null to move rows only.
/// recv_tokens: [C, H], dtype and scaling of tokens. In a zero-copy group its windows are required.
/// recv_topk_weights: [C] float32, null if topk_weights is; receives each row's weight, 0 in the padding.
/// ..._win: the tensor's place in symmetric memory, or all zero. With a window, the tensor's data pointer is NULL or the same
/// place.
/// Throws, before anything is queued, when handle_mem was not prepared and for shapes or dtypes other than these.
///
/// # Safety
/// As nvte_ep_prepare; windows cover their tensors on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_dispatch(
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
) {
    guard("nvte_ep_dispatch", || {
        let group = core::current_group()?;
        let tensors = Tensors::open();
        let mut call = dispatch_of(
            &tensors,
            topk_idx,
            (tokens, tokens_win),
            (topk_weights, topk_weights_win),
            (recv_tokens, recv_tokens_win),
            (recv_topk_weights, recv_topk_weights_win),
        )?;
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.dispatch(&handle, &mut call, Stream::from_raw(stream)) }
    });
}

/// nvte_ep_prepare and nvte_ep_dispatch in one call; the arguments are theirs. Both are checked before either is queued.
///
/// # Safety
/// As nvte_ep_dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_prepare_and_dispatch(
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
) {
    guard("nvte_ep_prepare_and_dispatch", || {
        let group = core::current_group()?;
        // SAFETY: the caller vouches for the configuration.
        let claim = LayerClaim::Given(unsafe { layer_of(layer_cfg) }?);
        let tensors = Tensors::open();
        let prepare = prepare_of(&tensors, topk_idx, recv_tokens_per_expert, total_recv_tokens_per_rank)?;
        let mut dispatch = dispatch_of(
            &tensors,
            topk_idx,
            (tokens, tokens_win),
            (topk_weights, topk_weights_win),
            (recv_tokens, recv_tokens_win),
            (recv_topk_weights, recv_topk_weights_win),
        )?;
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.prepare_and_dispatch(&handle, claim, &prepare, &mut dispatch, Stream::from_raw(stream)) }
    });
}

/// Sums each token's rows of expert_out back on its own rank; unweighted, so the caller multiplies by recv_topk_weights
/// before. Collective, queued on stream.
///
/// The sum is taken in float32 over a rank's local experts in ascending order and rounded to the dtype, then in float32
/// over ranks in ascending order and rounded. A token without rows gets zeroes.
///
/// expert_out: [C, H] in the layout of recv_tokens, bfloat16, float16 or float32; padding is not read. In zero-copy groups it is
/// modified: where a token has several rows on this rank, the first of them becomes their sum.
/// result: [T, H], dtype of expert_out.
/// Throws as nvte_ep_dispatch.
///
/// # Safety
/// As nvte_ep_dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_combine(
    handle_mem: NVTETensor,
    expert_out: NVTETensor,
    expert_out_win: NVTECommWindow,
    result: NVTETensor,
    stream: cudaStream_t,
) {
    guard("nvte_ep_combine", || {
        let group = core::current_group()?;
        let tensors = Tensors::open();
        let mut call = Combine {
            expert_out: required(&tensors, "expert_out", expert_out, expert_out_win.parse())?,
            result: required(&tensors, "result", result, Windows::default())?,
        };
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.combine(&handle, &mut call, Stream::from_raw(stream)) }
    });
}

/// Gradient of nvte_ep_dispatch: sums the rows' gradients as nvte_ep_combine does, and gathers the weights' gradients.
/// Collective, queued on stream.
///
/// grad: [C, H], gradient of recv_tokens; modified in zero-copy groups, as expert_out of nvte_ep_combine is.
/// g_recv_topk_weights: [C] float32, gradient of recv_topk_weights, or null for the rows alone.
/// grad_tokens: [T, H], dtype of grad; receives the gradient of tokens.
/// grad_topk_weights: [T, K] float32, null if g_recv_topk_weights is; receives the gradient of topk_weights, 0 where the
/// index was negative.
/// Throws as nvte_ep_dispatch.
///
/// # Safety
/// As nvte_ep_dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_dispatch_bwd(
    handle_mem: NVTETensor,
    grad: NVTETensor,
    grad_win: NVTECommWindow,
    g_recv_topk_weights: NVTETensor,
    g_recv_topk_weights_win: NVTECommWindow,
    grad_tokens: NVTETensor,
    grad_topk_weights: NVTETensor,
    stream: cudaStream_t,
) {
    guard("nvte_ep_dispatch_bwd", || {
        let group = core::current_group()?;
        let tensors = Tensors::open();
        let weights_win = g_recv_topk_weights_win.parse();
        let mut call = DispatchBwd {
            grad: required(&tensors, "grad", grad, grad_win.parse())?,
            g_recv_topk_weights: optional(&tensors, "g_recv_topk_weights", g_recv_topk_weights, weights_win)?,
            grad_tokens: required(&tensors, "grad_tokens", grad_tokens, Windows::default())?,
            grad_topk_weights: optional(&tensors, "grad_topk_weights", grad_topk_weights, Windows::default())?,
        };
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.dispatch_bwd(&handle, &mut call, Stream::from_raw(stream)) }
    });
}

/// Gradient of nvte_ep_combine: sends each token's gradient to all of its rows. Collective, queued on stream.
///
/// grad: [T, H], gradient of result; may be MXFP8, as tokens of nvte_ep_dispatch.
/// grad_expert_out: [C, H], dtype and scaling of grad; receives the gradient of expert_out, zeroes in the padding.
/// Throws as nvte_ep_dispatch.
///
/// # Safety
/// As nvte_ep_dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nvte_ep_combine_bwd(
    handle_mem: NVTETensor,
    grad: NVTETensor,
    grad_win: NVTECommWindow,
    grad_expert_out: NVTETensor,
    grad_expert_out_win: NVTECommWindow,
    stream: cudaStream_t,
) {
    guard("nvte_ep_combine_bwd", || {
        let group = core::current_group()?;
        let tensors = Tensors::open();
        let mut call = CombineBwd {
            grad: required(&tensors, "grad", grad, grad_win.parse())?,
            grad_expert_out: required(&tensors, "grad_expert_out", grad_expert_out, grad_expert_out_win.parse())?,
        };
        let handle = parse_handle(&tensors, handle_mem)?;
        tensors.close();
        // SAFETY: the caller vouches for tensors and stream.
        unsafe { group.combine_bwd(&handle, &mut call, Stream::from_raw(stream)) }
    });
}
