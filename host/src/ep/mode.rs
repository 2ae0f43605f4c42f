//! The calls that both modes have: each goes to the mode of its group or handle.

use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::ep::desc::Tensor;
use crate::ep::group::Group;
use crate::ep::handle::Handle;
use crate::ep::{combine, dispatch, ll, update};
use crate::fault::Outcome;
use crate::queue::Stream;

/// `ncclEpHandleMemSize`.
pub fn memory_size(group: &Group, layout: ncclEpLayout_t, top_k: i32) -> Outcome<usize> {
    if group.low_latency.is_some() {
        return ll::handle::memory_size(group, layout, top_k);
    }
    Handle::memory_size(group, layout, top_k)
}

/// `ncclEpInitHandle`.
pub fn init(
    group: &Arc<Group>,
    layout: ncclEpLayout_t,
    alignment: usize,
    top_k: i32,
    memory: Option<&Tensor>,
) -> Outcome<ncclEpHandle_t> {
    let address = match &group.low_latency {
        Some(mode) => ll::handle::Handle::init(group, mode, layout, top_k, memory)?,
        None => Handle::init(group, layout, alignment, top_k, memory)?,
    };
    Ok(address as ncclEpHandle_t)
}

/// `ncclEpUpdateHandle`.
///
/// # Safety
///
/// The descriptors are valid, and their memory until the stream has got there; in low-latency mode that of `topk_idx` until the
/// last combine over it is done.
pub unsafe fn update(
    handle: ncclEpHandle_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    match ll::handle::Handle::resolve(handle, "ncclEpUpdateHandle")? {
        // SAFETY: passed on to the caller.
        Some(handle) => unsafe { handle.update(topk_idx, layout_info) },
        // SAFETY: passed on to the caller.
        None => unsafe { update::update(handle, topk_idx, layout_info, stream) },
    }
}

/// `ncclEpDispatch`.
///
/// # Safety
///
/// The structures and descriptors are valid, and the tensors' memory until the stream has got there; the descriptors of a staged
/// operation until it is completed.
pub unsafe fn dispatch(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpDispatchInputs_t,
    outputs: *const ncclEpDispatchOutputs_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpDispatchConfig_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    match ll::handle::Handle::resolve(handle, "ncclEpDispatch")? {
        // SAFETY: passed on to the caller.
        Some(handle) => unsafe { ll::dispatch::dispatch(&handle, inputs, outputs, layout_info, config, stream) },
        // SAFETY: passed on to the caller.
        None => unsafe { dispatch::dispatch(handle, inputs, outputs, layout_info, config, stream) },
    }
}

/// `ncclEpCombine`.
///
/// # Safety
///
/// As [`dispatch()`].
pub unsafe fn combine(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpCombineInputs_t,
    outputs: *const ncclEpCombineOutputs_t,
    config: *const ncclEpCombineConfig_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    match ll::handle::Handle::resolve(handle, "ncclEpCombine")? {
        // SAFETY: passed on to the caller.
        Some(handle) => unsafe { ll::combine::combine(&handle, inputs, outputs, config, stream) },
        // SAFETY: passed on to the caller.
        None => unsafe { combine::combine(handle, inputs, outputs, config, stream) },
    }
}

/// `ncclEpComplete`: high-throughput mode has nothing to complete.
///
/// # Safety
///
/// The descriptors of the staged operation are still there.
pub unsafe fn complete(handle: ncclEpHandle_t, stream: &Arc<Stream>) -> Outcome<()> {
    let function = "ncclEpComplete";
    match ll::handle::Handle::resolve(handle, function)? {
        // SAFETY: passed on to the caller.
        Some(handle) => unsafe { handle.complete(stream) },
        None => Handle::resolve(handle, function).map(drop),
    }
}

/// `ncclEpHandleDestroy`.
pub fn destroy_handle(handle: ncclEpHandle_t) -> Outcome<()> {
    if ll::handle::Handle::destroy(handle)? { Ok(()) } else { Handle::destroy(handle) }
}
