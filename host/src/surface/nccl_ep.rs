//! The NCCL EP interface.

use std::ffi::{c_int, c_uint};

use nvte_ep_bindings::*;

use super::{nccl, put};
use crate::comm::Comm;
use crate::device;
use crate::ep::desc::{self, Tensor};
use crate::ep::group::Group;
use crate::ep::mode;
use crate::fault::{self, Fault, Outcome};
use crate::inject;
use crate::queue::Stream;

/// Version of NCCL EP whose interface this is.
const VERSION: c_int = (NCCL_EP_MAJOR * 10_000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH) as c_int;

fn stream_of(stream: cudaStream_t) -> Outcome<std::sync::Arc<Stream>> {
    Stream::resolve(stream, device::make_current())
}

fn without_mask(ep_group: ncclEpGroup_t, function: &str) -> Outcome<()> {
    Group::resolve(ep_group, function)?;
    let text = format!("{function}: the group has no mask of live ranks (enable_mask is 0)");
    Err(Fault::nccl(ncclInvalidUsage, text))
}

/// Version code.
///
/// # Safety
///
/// `version` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetVersion(version: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(version, VERSION) })
}

/// Allocates a tensor descriptor without memory.
///
/// # Safety
///
/// `tensor` is null or writable, `sizes` null or `ndim` values, `config` null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpTensorAlloc(
    tensor: *mut *mut ncclEpTensor_t,
    ndim: c_uint,
    datatype: ncclDataType_t,
    sizes: *const usize,
    config: *const ncclEpTensorAllocConfig_t,
) -> ncclResult_t {
    nccl(|| {
        // SAFETY: the caller's contract.
        unsafe { desc::read_optional(config, "ncclEpTensorAlloc") }?;
        // SAFETY: the caller's contract.
        unsafe { put(tensor, std::ptr::null_mut()) }?;
        // SAFETY: the caller's contract.
        let descriptor = unsafe { desc::allocate(ndim, datatype, sizes) }?;
        // SAFETY: the caller's contract.
        unsafe { put(tensor, descriptor) }
    })
}

/// Frees a descriptor of `ncclEpTensorAlloc`.
///
/// # Safety
///
/// Always safe to call; other descriptors are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpTensorDestroy(tensor: *mut ncclEpTensor_t) -> ncclResult_t {
    nccl(|| desc::free(tensor))
}

/// Creates one rank of an EP group; collective over the communicator.
///
/// # Safety
///
/// `ep_group` is null or writable, `config` null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCreateGroup(
    ep_group: *mut ncclEpGroup_t,
    comm: ncclComm_t,
    config: *const ncclEpGroupConfig_t,
) -> ncclResult_t {
    nccl(|| {
        // SAFETY: the caller's contract.
        unsafe { put(ep_group, std::ptr::null_mut()) }?;
        let comm = Comm::resolve(comm, "ncclEpCreateGroup")?;
        // SAFETY: the caller's contract.
        let config = unsafe { desc::read_struct(config, "ncclEpCreateGroup") }?;
        comm.device.check()?;
        device::select(comm.device.ordinal)?;
        let group = Group::create(&comm, &config)?;
        // SAFETY: the caller's contract.
        unsafe { put(ep_group, group) }
    })
}

/// Destroys an EP group after this rank's work.
///
/// # Safety
///
/// Always safe to call; an unknown group is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupDestroy(ep_group: ncclEpGroup_t) -> ncclResult_t {
    nccl(|| Group::destroy(ep_group))
}

/// Bytes of handle memory.
///
/// # Safety
///
/// `size_out` is null or writable, `config` null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleMemSize(
    ep_group: ncclEpGroup_t,
    layout: ncclEpLayout_t,
    config: *const ncclEpHandleConfig_t,
    size_out: *mut usize,
    num_topk: c_int,
) -> ncclResult_t {
    nccl(|| {
        let group = Group::resolve(ep_group, "ncclEpHandleMemSize")?;
        // SAFETY: the caller's contract.
        unsafe { desc::read_optional(config, "ncclEpHandleMemSize") }?;
        // SAFETY: the caller's contract.
        unsafe { put(size_out, mode::memory_size(&group, layout, num_topk)?) }
    })
}

/// Creates a handle over handle memory, or over memory of its own.
///
/// # Safety
///
/// `handle` is null or writable, `config` and `handle_mem` null or valid, the memory until the handle is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpInitHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: ncclEpLayout_t,
    config: *const ncclEpHandleConfig_t,
    num_topk: c_int,
    handle_mem: *const ncclEpTensor_t,
) -> ncclResult_t {
    nccl(|| {
        let function = "ncclEpInitHandle";
        let group = Group::resolve(ep_group, function)?;
        // SAFETY: the caller's contract.
        unsafe { put(handle, std::ptr::null_mut()) }?;
        // SAFETY: the caller's contract.
        let config = unsafe { desc::read_optional(config, function) }?.unwrap_or_default();
        // SAFETY: the caller's contract.
        let memory = unsafe { Tensor::read(handle_mem, &group.comm, function, "handle_mem") }?;
        let alignment = config.dispatch_output_per_expert_alignment;
        let created = mode::init(&group, layout, alignment, num_topk, memory.as_ref())?;
        // SAFETY: the caller's contract.
        unsafe { put(handle, created) }
    })
}

/// Exchanges the routing map; collective, in stream order.
///
/// # Safety
///
/// The descriptors are null or valid, their memory until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpUpdateHandle(
    handle: ncclEpHandle_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        if inject::is_missing(inject::Missing::Nvcc) {
            // As NCCL EP does, which compiles its first kernel here.
            fault::report("ncclEpUpdateHandle: nvcc is missing, asked for by NVTE_EP_HOST_FAULT; NCCL EP aborts here");
            std::process::abort();
        }
        // SAFETY: the caller's contract.
        unsafe { mode::update(handle, topk_idx, layout_info, &stream_of(stream)?) }
    })
}

/// `ncclEpInitHandle` with memory of its own and `topk_idx`'s width, then `ncclEpUpdateHandle`.
///
/// # Safety
///
/// As those two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCreateHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: ncclEpLayout_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpHandleConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let function = "ncclEpCreateHandle";
        let group = Group::resolve(ep_group, function)?;
        // SAFETY: the caller's contract.
        unsafe { put(handle, std::ptr::null_mut()) }?;
        // SAFETY: the caller's contract.
        let config = unsafe { desc::read_optional(config, function) }?.unwrap_or_default();
        // SAFETY: the caller's contract.
        let topk = unsafe { Tensor::require(topk_idx, &group.comm, function, "topk_idx") }?;
        let (_, top_k) = topk.matrix()?;
        let top_k = c_int::try_from(top_k).map_err(|_| topk.wrong("has too many columns"))?;
        let alignment = config.dispatch_output_per_expert_alignment;
        let created = mode::init(&group, layout, alignment, top_k, None)?;
        let stream = stream_of(stream)?;
        // SAFETY: the caller's contract.
        if let Err(fault) = unsafe { mode::update(created, topk_idx, layout_info, &stream) } {
            mode::destroy_handle(created)?;
            return Err(fault);
        }
        // SAFETY: the caller's contract.
        unsafe { put(handle, created) }
    })
}

/// Destroys a handle.
///
/// # Safety
///
/// Always safe to call; an unknown handle is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleDestroy(handle: ncclEpHandle_t) -> ncclResult_t {
    nccl(|| mode::destroy_handle(handle))
}

/// Sends token rows to their experts; collective, in stream order.
///
/// # Safety
///
/// The structures are null or valid, the tensors' memory until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpDispatch(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpDispatchInputs_t,
    outputs: *const ncclEpDispatchOutputs_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpDispatchConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { mode::dispatch(handle, inputs, outputs, layout_info, config, &stream_of(stream)?) })
}

/// Sums expert rows back into token rows; collective, in stream order.
///
/// # Safety
///
/// The structures are null or valid, the tensors' memory until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCombine(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpCombineInputs_t,
    outputs: *const ncclEpCombineOutputs_t,
    config: *const ncclEpCombineConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { mode::combine(handle, inputs, outputs, config, &stream_of(stream)?) })
}

/// Second half of a staged operation of low-latency mode; nothing to do in high-throughput mode.
///
/// # Safety
///
/// `config` is null or valid, and the descriptors of the staged operation are still there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpComplete(
    handle: ncclEpHandle_t,
    config: *const ncclEpCompleteConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        // SAFETY: the caller's contract.
        unsafe { desc::read_optional(config, "ncclEpComplete") }?;
        // SAFETY: the caller's contract.
        unsafe { mode::complete(handle, &stream_of(stream)?) }
    })
}

/// Reads the mask of live ranks: refused, no group has one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskQuery(
    ep_group: ncclEpGroup_t,
    mask_status: *mut c_int,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = (mask_status, stream);
    nccl(|| without_mask(ep_group, "ncclEpMaskQuery"))
}

/// Sets the mask of live ranks: refused, no group has one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskUpdate(
    ep_group: ncclEpGroup_t,
    mask: *const c_int,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = (mask, stream);
    nccl(|| without_mask(ep_group, "ncclEpMaskUpdate"))
}

/// Resets the mask of live ranks: refused, no group has one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskClean(ep_group: ncclEpGroup_t, stream: cudaStream_t) -> ncclResult_t {
    let _ = stream;
    nccl(|| without_mask(ep_group, "ncclEpMaskClean"))
}

/// Reads the time-out flag of the mask: refused, no group has one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetAsyncError(ep_group: ncclEpGroup_t, error_out: *mut c_int) -> ncclResult_t {
    let _ = error_out;
    nccl(|| without_mask(ep_group, "ncclEpGetAsyncError"))
}

/// Clears the time-out flag of the mask: refused, no group has one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpErrorClear(ep_group: ncclEpGroup_t) -> ncclResult_t {
    nccl(|| without_mask(ep_group, "ncclEpErrorClear"))
}
