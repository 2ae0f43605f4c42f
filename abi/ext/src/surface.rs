//! Our additions to the interface.

use crate::core::{self, NVTEEpGroupConfig, Tensors};
use nvte_ep_core::backend::Communicator;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::comm_window::ncclWindow_t;
use nvte_ep_core::ffi::ext::{self, NVTEEpExtMemoryUsage, NVTEEpExtOptions, NVTEEpExtRecvTotals, NVTEEpExtStats};
use nvte_ep_core::ffi::low_latency::{
    NVTEEpExtLLConfig, NVTEEpExtLLMemoryUsage, ll_combine_of, ll_dispatch_of, ll_handle_of, send_only_of,
};
use nvte_ep_core::ffi::types::{NVTETensor, cudaStream_t};
use nvte_ep_core::ffi::versioned::write_versioned;
use nvte_ep_core::ffi::view::{Windows, required};
use nvte_ep_core::sys::cuda::Stream;
use nvte_ep_core::tensor::Window;
use std::ffi::{c_char, c_int, c_void};

/// Names this library, its version and its ABI, as in "libnvte_ep 0.1.0 (register_layer ABI)". The string is static.
pub(crate) fn nvte_ep_ext_version() -> *const c_char {
    core::VERSION.as_ptr()
}

/// Makes options for nvte_ep_ext_initialize, all at their defaults.
pub(crate) fn nvte_ep_ext_options_create() -> Result<*mut NVTEEpExtOptions> {
    core::refuse_other_abi()?;
    Ok(ext::options_create())
}

/// Sets one option. Numbers are decimal.
///
/// key and value:
/// "overflow": "trap" (default: rows beyond max_recv_tokens_per_rank are a fatal error of the device) or "drop" (they are
/// dropped: they are missing from the sums, and their gradients are zero; nvte_ep_ext_recv_totals counts them).
/// "eager": "on" (max_recv_tokens_per_rank is 0, num_topk is set, and the caller sizes the receive buffers of every step by
/// nvte_ep_ext_recv_totals, one wait for the device a step) or "off".
/// "num_topk": most experts per token of any layer; default: not set.
/// "dispatch_sms", "combine_sms": multiprocessors of dispatch and combine and their gradients; default: the
/// configuration's. They may differ with NCCL EP builds of API 3 only.
/// "preprocess_sms": multiprocessors of nvte_ep_prepare's scan; default: all, or where ranks share a device the
/// configuration's.
/// "timeout_ms": how long nvte_ep_ext_initialize, and later the calls about symmetric memory, wait for other ranks, in
/// milliseconds, 0 = for ever; default: NVTE_EP_TIMEOUT_MS.
/// "shutdown_timeout_ms": how long nvte_ep_shutdown waits; default: NVTE_EP_SHUTDOWN_TIMEOUT_MS.
/// "backend": "nccl_ep", "native" or "auto"; default: auto, as NVTE_EP_BACKEND says.
/// "deterministic": "on" (rows of a slab come by source rank and row) or "off" (NCCL EP builds of API 3 may then use a
/// faster order that differs from run to run); default: on, unless NCCL_EP_HT_EM_AG_SCAN_MODE is set.
/// "symm_segment_bytes": smallest piece of symmetric memory that is registered at a time; default 67108864.
/// "undocumented_scale": "on" (more than 8 NVLink domains, or more than 8 ranks in each of several, which NCCL EP 0.1.0 does
/// not document) or "off"; default: off.
/// Throws for a key or value other than these, with the valid ones, and for options that were destroyed.
///
/// # Safety
/// key and value are NULL, which throws, or NUL-terminated.
pub(crate) unsafe fn nvte_ep_ext_options_set(
    options: *mut NVTEEpExtOptions,
    key: *const c_char,
    value: *const c_char,
) -> Result<()> {
    core::refuse_other_abi()?;
    // SAFETY: the caller vouches for it.
    let key = unsafe { ext::text("key", key) }?;
    // SAFETY: the caller vouches for it.
    let value = unsafe { ext::text("value", value) }?;
    ext::options_set(options, &key, &value)
}

/// Returns one option as it was set, or "default" if it was not set.
///
/// value: receives the NUL-terminated text; an array of value_bytes bytes (32 hold every value).
/// Throws for an unknown key, for options that were destroyed, and for an array that is too short.
///
/// # Safety
/// key is NULL, which throws, or NUL-terminated; value is NULL, which throws, or has value_bytes bytes.
pub(crate) unsafe fn nvte_ep_ext_options_get(
    options: *const NVTEEpExtOptions,
    key: *const c_char,
    value: *mut c_char,
    value_bytes: usize,
) -> Result<()> {
    core::refuse_other_abi()?;
    // SAFETY: the caller vouches for the key.
    let text = ext::options_read(options)?.get(&unsafe { ext::text("key", key) }?)?;
    // SAFETY: the caller vouches for the array.
    unsafe { ext::put_text("value", value, value_bytes, &text) }
}

/// Ends options; groups that were made with them keep their settings. NULL is allowed.
///
/// Throws for options that were destroyed before.
pub(crate) fn nvte_ep_ext_options_destroy(options: *mut NVTEEpExtOptions) -> Result<()> {
    ext::options_destroy(options)
}

/// nvte_ep_initialize with options.
///
/// options: NULL for all defaults; every rank sets the same, time-outs excepted. They may be destroyed afterwards.
/// Throws as nvte_ep_initialize; for options that contradict group_config or were destroyed; and, on every rank, when ranks
/// set different ones.
///
/// # Safety
/// As nvte_ep_initialize; group_config is NULL, which throws, or points to a configuration.
pub(crate) unsafe fn nvte_ep_ext_initialize(
    ep_comm: *mut c_void,
    group_config: *const NVTEEpGroupConfig,
    options: *const NVTEEpExtOptions,
) -> Result<()> {
    core::refuse_other_abi()?;
    // SAFETY: the caller vouches for the configuration.
    let request = unsafe { NVTEEpGroupConfig::read(group_config) }?;
    let options = ext::options_read(options)?;
    let comm = Communicator(ep_comm.expose_provenance());
    // SAFETY: the caller vouches for the communicator.
    unsafe { core::initialize(comm, request, &options) }
}

/// Returns the totals of the last nvte_ep_prepare over handle_mem. Waits for all work that is queued on stream.
///
/// In eager mode this is the step's one wait for the device: the receive buffers need at least `needed` rows, and none for
/// 0. In groups that drop it returns how many rows of the step are missing.
///
/// handle_mem: the layer's handle memory; in the register_layer ABI, handle.mem.
/// totals: receives the numbers; struct_size is set before.
/// Throws for memory that holds no routing, while stream captures a graph, and when queued work has failed.
///
/// # Safety
/// totals is NULL, which throws, or points to as many bytes as its struct_size says; stream is a stream of the group's device
/// on which nvte_ep_prepare was queued, or which waits for it.
pub(crate) unsafe fn nvte_ep_ext_recv_totals(
    handle_mem: NVTETensor,
    totals: *mut NVTEEpExtRecvTotals,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_group()?;
    let mem = required(&Tensors::open(), "handle_mem", handle_mem, Windows::default())?;
    // SAFETY: the caller vouches for memory and stream.
    let found = group.recv_totals(&mem, unsafe { Stream::bind(stream.expose_provenance()) })?;
    // SAFETY: the caller vouches for the structure.
    unsafe { write_versioned("totals", totals, found.into()) }
}

/// Tells how much device memory the current device's group takes on this rank; host only.
///
/// usage: receives the numbers; struct_size is set before.
/// Throws without a group.
///
/// # Safety
/// usage is NULL, which throws, or points to as many bytes as its struct_size says.
pub(crate) unsafe fn nvte_ep_ext_memory_usage(usage: *mut NVTEEpExtMemoryUsage) -> Result<()> {
    let found = core::current_group()?.memory_usage()?;
    // SAFETY: the caller vouches for the structure.
    unsafe { write_versioned("usage", usage, found.into()) }
}

/// Tells what the current device's group has done on this rank since nvte_ep_initialize; host only, it waits for nothing.
///
/// stats: receives the numbers; struct_size is set before.
/// Throws without a group.
///
/// # Safety
/// stats is NULL, which throws, or points to as many bytes as its struct_size says.
pub(crate) unsafe fn nvte_ep_ext_stats(stats: *mut NVTEEpExtStats) -> Result<()> {
    let found = core::current_group()?.stats()?;
    // SAFETY: the caller vouches for the structure.
    unsafe { write_versioned("stats", stats, found.into()) }
}

/// Allocates symmetric memory of the current device's group, for payloads of zero-copy calls: the same offset of the same
/// window on every rank. Collective: every rank asks for the same bytes, and makes its calls of nvte_ep_ext_symm_alloc,
/// nvte_ep_ext_symm_free and nvte_ep_ext_window_* in the same order. Waits for the queued work of all ranks.
///
/// Memory comes from a few large segments, each registered once; a call that needs no new segment costs one small exchange.
///
/// bytes: 1 or more.
/// ptr: receives the address, a multiple of 256.
/// window, offset: receive where that is in symmetric memory, for an NVTECommWindow; each may be NULL.
/// The memory ends with nvte_ep_shutdown.
/// Throws without a group, and, on every rank, when a rank has no memory left, asks for other bytes, made other calls before,
/// or does not come within the time-out.
///
/// # Safety
/// ptr is NULL, which throws, or writable; window and offset are NULL or writable.
pub(crate) unsafe fn nvte_ep_ext_symm_alloc(
    bytes: usize,
    ptr: *mut *mut c_void,
    window: *mut ncclWindow_t,
    offset: *mut u64,
) -> Result<()> {
    let group = core::current_group()?;
    if ptr.is_null() {
        return Err(Error::argument("ptr", "must not be NULL", "NULL"));
    }
    let place = group.symm_alloc(bytes as u64)?;
    // SAFETY: the caller vouches for all three.
    unsafe { put_window(place.window, window, offset) };
    // SAFETY: not NULL, and the caller vouches for it.
    unsafe { ptr.write(std::ptr::with_exposed_provenance_mut(place.address as usize)) };
    Ok(())
}

/// Frees memory of nvte_ep_ext_symm_alloc; host only. Every rank does so at the same point of the order that
/// nvte_ep_ext_symm_alloc requires. Queued work may still use the memory: only a later nvte_ep_ext_symm_alloc, which waits
/// for that work, allocates it again. NULL is allowed.
///
/// Throws for an address that was not allocated or was freed already, and without a group (nvte_ep_shutdown has freed
/// all of it).
pub(crate) fn nvte_ep_ext_symm_free(ptr: *mut c_void) -> Result<()> {
    let group = core::current_group()?;
    if ptr.is_null() { Ok(()) } else { group.symm_free(ptr.addr() as u64) }
}

/// Finds the window and offset of an address in symmetric memory of the current device's group; host only.
///
/// ptr: in memory of nvte_ep_ext_symm_alloc or nvte_ep_ext_window_register, at its start or further in.
/// window, offset: receive the place, for an NVTECommWindow; each may be NULL.
/// Throws for any other address, and without a group.
///
/// # Safety
/// window and offset are NULL or writable. ptr is not read.
pub(crate) unsafe fn nvte_ep_ext_window_of(
    ptr: *const c_void,
    window: *mut ncclWindow_t,
    offset: *mut u64,
) -> Result<()> {
    let place = core::current_group()?.symmetric_place(ptr.addr() as u64)?.ok_or_else(|| {
        let required = "must be in memory of nvte_ep_ext_symm_alloc or nvte_ep_ext_window_register";
        Error::argument("ptr", required, format!("{ptr:p}"))
    })?;
    // SAFETY: the caller vouches for both.
    unsafe { put_window(place.window, window, offset) };
    Ok(())
}

/// Whether nvte_ep_ext_window_of takes an address: 1 or 0; host only.
///
/// Throws without a group.
pub(crate) fn nvte_ep_ext_is_symmetric(ptr: *const c_void) -> Result<c_int> {
    Ok(c_int::from(core::current_group()?.symmetric_place(ptr.addr() as u64)?.is_some()))
}

/// Registers memory that a framework's own pool holds as a window of the group's communicator, so that payloads may lie in
/// it. Collective as nvte_ep_ext_symm_alloc; every rank registers as many bytes.
///
/// ptr: a multiple of 4096, of ncclMemAlloc or the driver's virtual memory functions. It stays until
/// nvte_ep_ext_window_deregister or nvte_ep_shutdown, which ends the window.
/// window: receives it; may be NULL, nvte_ep_ext_window_of finds it.
/// Throws as nvte_ep_ext_symm_alloc, and for memory that is registered already or cannot be a window.
///
/// # Safety
/// ptr has `bytes` bytes of such memory; window is NULL or writable.
pub(crate) unsafe fn nvte_ep_ext_window_register(
    ptr: *mut c_void,
    bytes: usize,
    window: *mut ncclWindow_t,
) -> Result<()> {
    let group = core::current_group()?;
    // SAFETY: the caller vouches for the memory.
    let made = unsafe { group.window_register(ptr.expose_provenance() as u64, bytes as u64) }?;
    // SAFETY: the caller vouches for it.
    unsafe { put_window(made, window, std::ptr::null_mut()) };
    Ok(())
}

/// Ends a registration. Collective as nvte_ep_ext_symm_alloc; afterwards no rank's queued work uses the window.
///
/// ptr: as given to nvte_ep_ext_window_register.
/// Throws for any other address, and as nvte_ep_ext_symm_alloc.
pub(crate) fn nvte_ep_ext_window_deregister(ptr: *mut c_void) -> Result<()> {
    core::current_group()?.window_deregister(ptr.addr() as u64)
}

/// Makes the current device's low-latency group, for steps of few tokens (docs/low_latency.md); collective. It may be there beside
/// the group of nvte_ep_initialize, over the same communicator, and has a life of its own.
///
/// Low latency always runs over NCCL EP: the native engine has no such mode.
///
/// ep_comm: an ncclComm_t over exactly the ranks of the group, on the calling thread's current device. It is borrowed and must
/// outlive nvte_ep_ext_ll_shutdown.
/// config: the same on every rank.
/// options: NULL, or options of which only timeout_ms, shutdown_timeout_ms, undocumented_scale and backend (nccl_ep, auto) are set.
/// Throws for a bad configuration, where NCCL EP or what it needs is missing, and, on every rank, when ranks differ or one
/// cannot take part.
///
/// # Safety
/// ep_comm is NULL, which throws, or a live communicator; config is NULL, which throws, or points to a configuration.
pub(crate) unsafe fn nvte_ep_ext_ll_initialize(
    ep_comm: *mut c_void,
    config: *const NVTEEpExtLLConfig,
    options: *const NVTEEpExtOptions,
) -> Result<()> {
    core::refuse_other_abi()?;
    // SAFETY: the caller vouches for the configuration.
    let request = unsafe { NVTEEpExtLLConfig::read(config) }?;
    let options = ext::options_read(options)?;
    let comm = Communicator(ep_comm.expose_provenance());
    // SAFETY: the caller vouches for the communicator.
    unsafe { core::ll_initialize(comm, request, &options) }
}

/// Ends the current device's low-latency group: waits for its queued work and for the other ranks. Collective; without such a
/// group nothing happens. nvte_ep_shutdown does not end it.
///
/// Throws while an operation is staged: complete it first; and for what fails on the way, when the group is gone all the same.
pub(crate) fn nvte_ep_ext_ll_shutdown() -> Result<()> {
    core::ll_shutdown()
}

/// Bytes of device memory that each handle needs; host only. The memory is the caller's, at a multiple of 256. A handle is
/// the address of its memory, and as many may be in use as there is memory for.
///
/// Throws without a low-latency group.
pub(crate) fn nvte_ep_ext_ll_handle_mem_size() -> Result<usize> {
    core::current_ll_group()?.handle_mem_size()
}

/// Sends each token's row to the ranks of its experts, and receives theirs. Collective; there is no nvte_ep_prepare before it.
/// Shapes: T = tokens of this rank in this step (0 to max_tokens_per_rank), H = hidden size, K = experts per token (1 to
/// num_topk), L = num_experts / ep_size, S = ep_size * max_tokens_per_rank. All are exact.
///
/// handle_mem: 1D, byte, of nvte_ep_ext_ll_handle_mem_size. It stays as it is, where it is, until the step's combine is done.
/// topk_idx: [T, K] int64 or int32: different experts in each row; a negative one sends nothing. The device reads it again in
/// nvte_ep_ext_ll_combine. Numbers of num_experts or more, and doubles, are not looked for: with them NCCL EP writes out of
/// bounds.
/// tokens: [T, H] bfloat16, float16 or float32, H a multiple of 512; or MXFP8 (NVTE_MXFP8_1D_SCALING), scales [T, H / 32] uint8
/// (kNVTEFloat8E8M0).
/// recv_tokens: [L, S, H], of the same type; receives the rows of each local expert, from the first of its slab on and in no
/// order. With MXFP8 tokens also scales, [L, S, H / 32]. Or, for bfloat16 tokens, kNVTEFloat8E4M3 with NVTE_BLOCK_SCALING_1D and
/// scales [L, S, H / 128] float32: then rows are quantized before they are sent, with a scale for each 128 values.
/// counts: [L] int32; receives the number of rows of each local expert. Read no row behind them.
/// send_only: 1 = only the first half, which sends: the step goes on with nvte_ep_ext_ll_complete on the same stream, before
/// any other call of the group. All tensors and the handle memory belong to the call until then. 0 = all of it.
/// Throws for tensors that break a rule, and while an operation is staged.
///
/// # Safety
/// Tensors describe device memory that lives until the queued work is done; stream is a stream of the current device.
pub(crate) unsafe fn nvte_ep_ext_ll_dispatch(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    tokens: NVTETensor,
    recv_tokens: NVTETensor,
    counts: NVTETensor,
    send_only: c_int,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_ll_group()?;
    let send_only = send_only_of(send_only)?;
    let tensors = Tensors::open();
    let mut call = ll_dispatch_of(&tensors, topk_idx, tokens, recv_tokens, counts)?;
    let mem = ll_handle_of(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.dispatch(&mem, &mut call, send_only, unsafe { Stream::bind(stream.expose_provenance()) })
}

/// Sums the rows of each token, multiplied by its weights, back on the token's rank, in the order of its K experts and in
/// float32. Collective. Tokens without an expert get zeroes.
///
/// handle_mem: as given to the nvte_ep_ext_ll_dispatch of the step.
/// topk_idx: [T, K], as given there.
/// topk_weights: [T, K] float32.
/// expert_out: [L, S, H] bfloat16, float16 or float32; the experts' results in the places of recv_tokens. The type and H may be
/// others than dispatch's, within the group's hidden_dim and max_token_dtype.
/// result: [T, H], of the same type.
/// send_only: as in nvte_ep_ext_ll_dispatch.
/// Throws for tensors that break a rule, when nothing was dispatched over handle_mem, and while an operation is staged.
///
/// # Safety
/// As nvte_ep_ext_ll_dispatch.
pub(crate) unsafe fn nvte_ep_ext_ll_combine(
    handle_mem: NVTETensor,
    topk_idx: NVTETensor,
    topk_weights: NVTETensor,
    expert_out: NVTETensor,
    result: NVTETensor,
    send_only: c_int,
    stream: cudaStream_t,
) -> Result<()> {
    let group = core::current_ll_group()?;
    let send_only = send_only_of(send_only)?;
    let tensors = Tensors::open();
    let mut call = ll_combine_of(&tensors, topk_idx, topk_weights, expert_out, result)?;
    let mem = ll_handle_of(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for tensors and stream.
    group.combine(&mem, &mut call, send_only, unsafe { Stream::bind(stream.expose_provenance()) })
}

/// The second half of the dispatch or combine that was called with send_only = 1: waits on the device for the other ranks' rows.
/// Collective. In a graph both halves are captured, in one graph.
///
/// handle_mem, stream: as given there.
/// Throws when nothing is staged, or was with another handle_mem or stream.
///
/// # Safety
/// As nvte_ep_ext_ll_dispatch.
pub(crate) unsafe fn nvte_ep_ext_ll_complete(handle_mem: NVTETensor, stream: cudaStream_t) -> Result<()> {
    let group = core::current_ll_group()?;
    let tensors = Tensors::open();
    let mem = ll_handle_of(&tensors, handle_mem)?;
    tensors.close();
    // SAFETY: the caller vouches for memory and stream.
    group.complete(&mem, unsafe { Stream::bind(stream.expose_provenance()) })
}

/// Tells how much device memory the current device's low-latency group takes on this rank; host only.
///
/// usage: receives the numbers; struct_size is set before.
/// Throws without such a group.
///
/// # Safety
/// usage is NULL, which throws, or points to as many bytes as its struct_size says.
pub(crate) unsafe fn nvte_ep_ext_ll_memory_usage(usage: *mut NVTEEpExtLLMemoryUsage) -> Result<()> {
    let found = core::current_ll_group()?.memory_usage()?;
    // SAFETY: the caller vouches for the structure.
    unsafe { write_versioned("usage", usage, found.into()) }
}

/// # Safety
/// Both pointers are NULL or writable.
unsafe fn put_window(found: Window, window: *mut ncclWindow_t, offset: *mut u64) {
    if !window.is_null() {
        // SAFETY: not NULL, and the caller vouches for it.
        unsafe { window.write(std::ptr::with_exposed_provenance_mut(found.handle())) };
    }
    if !offset.is_null() {
        // SAFETY: as above.
        unsafe { offset.write(found.offset) };
    }
}
