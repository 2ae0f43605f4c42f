//! The CUDA driver interface.

use std::ffi::{c_char, c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::{driver, driver_current, free_device, free_pinned, put};
use crate::check::{self, Call, Policy};
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::{self, Allocation, Kind};
use crate::stream::{Event, Stream};
use crate::{copy, errors, sys};

/// A graph.
pub type CUgraph = *mut c_void;
/// A graph that can be launched.
pub type CUgraphExec = *mut c_void;

fn device_of(dev: CUdevice) -> Outcome<&'static Device> {
    device::get(dev).ok_or_else(|| Fault::cuda(CUDA_ERROR_INVALID_DEVICE, format!("there is no device {dev}")))
}

/// A call about a stream: the NULL stream belongs to the current context, others know their device.
pub(super) fn on_stream(stream: CUstream, work: impl FnOnce(std::sync::Arc<Stream>) -> Outcome<()>) -> CUresult {
    let _call = Call::enter(&work);
    if stream as usize <= 2 {
        return driver_current(|device| work(Stream::resolve(stream, device)?));
    }
    driver(|| {
        let stream = Stream::resolve(stream, device::selected())?;
        stream.device().check()?;
        work(stream)
    })
}

/// Initialises the driver interface.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> CUresult {
    if flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    device::initialize_driver();
    CUDA_SUCCESS
}

/// CUDA version that the driver supports.
///
/// # Safety
///
/// `driverVersion` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuDriverGetVersion(driverVersion: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    super::code_of(|| unsafe { put(driverVersion, device::CUDA_VERSION) })
}

/// Name of an error code.
///
/// # Safety
///
/// `pStr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) -> CUresult {
    let name = errors::driver_name(error).map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: the caller's contract.
    let code = super::code_of(|| unsafe { put(pStr, name) });
    if name.is_null() { CUDA_ERROR_INVALID_VALUE } else { code }
}

/// Description of an error code; for the sticky error it says what happened.
///
/// # Safety
///
/// `pStr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) -> CUresult {
    let sticky = device::selected().sticky().filter(|sticky| sticky.fault.cuda == error);
    let text = sticky.map(|sticky| sticky.text.as_c_str()).or_else(|| errors::description(error));
    let text = text.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: the caller's contract.
    let code = super::code_of(|| unsafe { put(pStr, text) });
    if text.is_null() { CUDA_ERROR_INVALID_VALUE } else { code }
}

/// Device with an ordinal.
///
/// # Safety
///
/// `device` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    driver(|| {
        device_of(ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { put(device, ordinal) }
    })
}

/// Number of devices.
///
/// # Safety
///
/// `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    driver(|| unsafe { put(count, device::all().len() as c_int) })
}

/// Name of a device, cut to `len` bytes with the final zero.
///
/// # Safety
///
/// `name` is null or has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice) -> CUresult {
    driver(|| {
        device_of(dev)?;
        let room = usize::try_from(len).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "no room for the device name"));
        }
        let mut text = device::NAME.as_bytes()[..device::NAME.len().min(room - 1)].to_vec();
        text.push(0);
        // SAFETY: the caller vouches for `len` bytes, and the text is not longer.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        Ok(())
    })
}

/// Attribute of a device.
///
/// # Safety
///
/// `pi` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice) -> CUresult {
    driver(|| {
        let value = device_of(dev)?.attribute(attrib);
        let unknown = || Fault::cuda(CUDA_ERROR_INVALID_VALUE, format!("device attribute {attrib} is unknown"));
        // SAFETY: the caller's contract.
        unsafe { put(pi, value.ok_or_else(unknown)?) }
    })
}

/// Primary context of a device.
///
/// # Safety
///
/// `pctx` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) -> CUresult {
    driver(|| {
        let device = device_of(dev)?;
        // SAFETY: the caller's contract.
        unsafe { put(pctx, device.context()) }?;
        device.retain();
        Ok(())
    })
}

/// Gives back a reference to the primary context.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> CUresult {
    driver(|| device_of(dev)?.give_back())
}

/// Context that is current on this thread, or null.
///
/// # Safety
///
/// `pctx` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(pctx: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's contract.
    driver(|| unsafe { put(pctx, device::current().map_or(std::ptr::null_mut(), Device::context)) })
}

/// Makes a context current on this thread; null leaves it without one.
///
/// # Safety
///
/// Always safe to call; an unknown context is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(ctx: CUcontext) -> CUresult {
    driver(|| {
        let device = Device::from_context(ctx);
        if device.is_none() && !ctx.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_CONTEXT, format!("{ctx:p} is not a context")));
        }
        device::make_current_driver(device);
        Ok(())
    })
}

/// Device of the current context.
///
/// # Safety
///
/// `device` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut CUdevice) -> CUresult {
    driver(|| {
        let no_context = || Fault::cuda(CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
        // SAFETY: the caller's contract.
        unsafe { put(device, device::current().ok_or_else(no_context)?.ordinal) }
    })
}

/// Waits for all work of the current context.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> CUresult {
    driver_current(|device| {
        graph::refuse_device_wait(device, "a wait for the device")?;
        device.synchronize();
        device.check()
    })
}

/// Creates a stream.
///
/// # Safety
///
/// `phStream` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamCreate(phStream: *mut CUstream, Flags: c_uint) -> CUresult {
    // SAFETY: the caller's contract.
    driver_current(|device| unsafe { put(phStream, Stream::open(device, Flags)?) })
}

/// Destroys a stream after its work.
///
/// # Safety
///
/// Always safe to call; an unknown stream is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamDestroy_v2(hStream: CUstream) -> CUresult {
    driver(|| Stream::destroy(hStream))
}

/// Whether a stream's work is done.
///
/// # Safety
///
/// Always safe to call; an unknown stream is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamQuery(hStream: CUstream) -> CUresult {
    on_stream(hStream, |stream| stream.query())
}

/// Waits for a stream's work.
///
/// # Safety
///
/// Always safe to call; an unknown stream is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamSynchronize(hStream: CUstream) -> CUresult {
    on_stream(hStream, |stream| stream.synchronize())
}

/// Begins the capture of a stream.
///
/// # Safety
///
/// Memory of work that is captured stays valid until no launch of the graph uses it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(hStream: CUstream, mode: c_uint) -> CUresult {
    on_stream(hStream, |stream| graph::begin(&stream, mode))
}

/// Ends a capture and gives the graph.
///
/// # Safety
///
/// `phGraph` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph) -> CUresult {
    on_stream(hStream, |stream| {
        // SAFETY: the caller's contract.
        unsafe { put(phGraph, std::ptr::null_mut()) }?;
        let graph = graph::end(&stream)?;
        // SAFETY: the caller's contract.
        unsafe { put(phGraph, graph as CUgraph) }
    })
}

/// Whether a stream is captured.
///
/// # Safety
///
/// `captureStatus` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamIsCapturing(hStream: CUstream, captureStatus: *mut c_uint) -> CUresult {
    // SAFETY: the caller's contract.
    on_stream(hStream, |stream| unsafe { put(captureStatus, graph::status(&stream)?.0) })
}

/// The context of a stream's device.
///
/// # Safety
///
/// `pctx` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamGetCtx(hStream: CUstream, pctx: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's contract.
    on_stream(hStream, |stream| unsafe { put(pctx, stream.device().context()) })
}

/// Status and id of a stream's capture; graph and dependencies are not told.
///
/// # Safety
///
/// All pointers are null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    hStream: CUstream,
    captureStatus_out: *mut c_uint,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const c_void,
    numDependencies_out: *mut usize,
) -> CUresult {
    let details = [graph_out.cast::<c_void>(), dependencies_out.cast(), numDependencies_out.cast()];
    on_stream(hStream, |stream| {
        let info = super::capture_info(&stream, &details)?;
        // SAFETY: the caller's contract.
        unsafe { super::put_capture_info(info, captureStatus_out, id_out) }
    })
}

/// Status and id of a stream's capture; graph, dependencies and edges are not told.
///
/// # Safety
///
/// All pointers are null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    hStream: CUstream,
    captureStatus_out: *mut c_uint,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const c_void,
    edgeData_out: *mut *const c_void,
    numDependencies_out: *mut usize,
) -> CUresult {
    let details =
        [graph_out.cast::<c_void>(), dependencies_out.cast(), edgeData_out.cast(), numDependencies_out.cast()];
    on_stream(hStream, |stream| {
        let info = super::capture_info(&stream, &details)?;
        // SAFETY: the caller's contract.
        unsafe { super::put_capture_info(info, captureStatus_out, id_out) }
    })
}

/// Exchanges the mode in which captures bind the calling thread.
///
/// # Safety
///
/// `mode` is null or readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> CUresult {
    // SAFETY: the caller's contract.
    driver(|| unsafe { super::exchange_capture_mode(mode) })
}

/// Makes a graph launchable.
///
/// # Safety
///
/// `phGraphExec` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    flags: u64,
) -> CUresult {
    driver_current(|_| {
        // SAFETY: the caller's contract.
        unsafe { put(phGraphExec, std::ptr::null_mut()) }?;
        let exec = graph::instantiate(hGraph as usize, flags)?;
        // SAFETY: the caller's contract.
        unsafe { put(phGraphExec, exec as CUgraphExec) }
    })
}

/// Puts another graph of the same shape in the place of a launchable one's.
///
/// # Safety
///
/// `resultInfo` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGraphExecUpdate_v2(
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    resultInfo: *mut cudaGraphExecUpdateResultInfo,
) -> CUresult {
    // SAFETY: the caller's contract.
    driver(|| unsafe { super::update_exec(hGraphExec as usize, hGraph as usize, resultInfo) })
}

/// Replays a graph in stream order.
///
/// # Safety
///
/// The memory that the graph uses stays valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream) -> CUresult {
    driver(|| graph::launch(hGraphExec as usize, &Stream::resolve(hStream, device::selected())?))
}

/// Destroys a launchable graph; launches that are going on finish.
///
/// # Safety
///
/// Always safe to call; an unknown handle is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGraphExecDestroy(hGraphExec: CUgraphExec) -> CUresult {
    driver(|| graph::destroy_exec(hGraphExec as usize))
}

/// Destroys a graph; launchable ones made from it stay.
///
/// # Safety
///
/// Always safe to call; an unknown handle is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuGraphDestroy(hGraph: CUgraph) -> CUresult {
    driver(|| graph::destroy_graph(hGraph as usize))
}

/// Makes a stream wait for an event.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, Flags: c_uint) -> CUresult {
    on_stream(hStream, |stream| {
        if Flags != 0 {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, format!("unknown wait flags {Flags:#x}")));
        }
        Event::resolve(hEvent)?.hold_back(&stream)
    })
}

/// Creates an event.
///
/// # Safety
///
/// `phEvent` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventCreate(phEvent: *mut CUevent, Flags: c_uint) -> CUresult {
    // SAFETY: the caller's contract.
    driver_current(|_| unsafe { put(phEvent, Event::open(Flags)?) })
}

/// Destroys an event.
///
/// # Safety
///
/// Always safe to call; an unknown event is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventDestroy_v2(hEvent: CUevent) -> CUresult {
    driver(|| Event::destroy(hEvent))
}

/// Puts an event at the end of a stream.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventRecord(hEvent: CUevent, hStream: CUstream) -> CUresult {
    on_stream(hStream, |stream| Event::resolve(hEvent)?.record(&stream))
}

/// Whether an event has happened.
///
/// # Safety
///
/// Always safe to call; an unknown event is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventQuery(hEvent: CUevent) -> CUresult {
    driver(|| Event::resolve(hEvent)?.query())
}

/// Waits for an event.
///
/// # Safety
///
/// Always safe to call; an unknown event is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventSynchronize(hEvent: CUevent) -> CUresult {
    driver(|| Event::resolve(hEvent)?.synchronize())
}

/// Milliseconds between two events.
///
/// # Safety
///
/// `pMilliseconds` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventElapsedTime(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent) -> CUresult {
    driver(|| {
        let time = Event::resolve(hEnd)?.since(&*Event::resolve(hStart)?)?;
        // SAFETY: the caller's contract.
        unsafe { put(pMilliseconds, time) }
    })
}

/// Milliseconds between two events.
///
/// # Safety
///
/// As [`cuEventElapsedTime`].
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuEventElapsedTime_v2(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent) -> CUresult {
    // SAFETY: the same contract.
    unsafe { cuEventElapsedTime(pMilliseconds, hStart, hEnd) }
}

/// Allocates device memory.
///
/// # Safety
///
/// `dptr` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) -> CUresult {
    driver_current(|device| {
        if bytesize == 0 {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes"));
        }
        // SAFETY: the caller's contract.
        unsafe { put(dptr, 0) }?;
        let pointer = super::allocate(bytesize, Kind::Device, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(dptr, pointer as CUdeviceptr) }
    })
}

/// Frees device memory after all work of its device.
///
/// # Safety
///
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(dptr: CUdeviceptr) -> CUresult {
    driver_current(|device| free_device(dptr as *mut c_void, device))
}

/// Allocates pinned host memory.
///
/// # Safety
///
/// `pp` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) -> CUresult {
    driver_current(|device| {
        if bytesize == 0 {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes"));
        }
        // SAFETY: the caller's contract.
        unsafe { put(pp, std::ptr::null_mut()) }?;
        let pointer = super::allocate(bytesize, Kind::Pinned, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(pp, pointer) }
    })
}

/// Frees pinned host memory after all work.
///
/// # Safety
///
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(p: *mut c_void) -> CUresult {
    driver_current(|device| free_pinned(p, device))
}

/// Free and total memory.
///
/// # Safety
///
/// Both pointers are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    driver_current(|_| {
        let (available, all) = sys::memory_info();
        // SAFETY: the caller's contract.
        unsafe { put(free, available) }?;
        // SAFETY: the caller's contract.
        unsafe { put(total, all) }
    })
}

/// Copies to the device and waits.
///
/// # Safety
///
/// Both ranges have `ByteCount` bytes.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize) -> CUresult {
    let to = dstDevice as *mut c_void;
    driver_current(|device| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(to, srcHost, ByteCount, cudaMemcpyHostToDevice, device.legacy(), true) }
    })
}

/// Copies from the device and waits.
///
/// # Safety
///
/// Both ranges have `ByteCount` bytes.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize) -> CUresult {
    let from = srcDevice as *const c_void;
    driver_current(|device| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(dstHost, from, ByteCount, cudaMemcpyDeviceToHost, device.legacy(), true) }
    })
}

/// Copies to the device in stream order.
///
/// # Safety
///
/// The ranges have `ByteCount` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    dstDevice: CUdeviceptr,
    srcHost: *const c_void,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let to = dstDevice as *mut c_void;
    on_stream(hStream, |stream| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(to, srcHost, ByteCount, cudaMemcpyHostToDevice, &stream, false) }
    })
}

/// Copies in stream order; where to and from is found by the addresses.
///
/// # Safety
///
/// The ranges have `ByteCount` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyAsync(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let (to, from) = (dst as *mut c_void, src as *const c_void);
    on_stream(hStream, |stream| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(to, from, ByteCount, cudaMemcpyDefault, &stream, false) }
    })
}

/// Copies from the device in stream order.
///
/// # Safety
///
/// The ranges have `ByteCount` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    dstHost: *mut c_void,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let from = srcDevice as *const c_void;
    on_stream(hStream, |stream| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(dstHost, from, ByteCount, cudaMemcpyDeviceToHost, &stream, false) }
    })
}

/// Fills `N` bytes in stream order.
///
/// # Safety
///
/// The range stays valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: u8, N: usize, hStream: CUstream) -> CUresult {
    let to = dstDevice as *mut c_void;
    // SAFETY: the caller's contract.
    on_stream(hStream, |stream| unsafe { copy::fill(to, &[uc], N, &stream, false) })
}

/// Fills `N` 32-bit words in stream order.
///
/// # Safety
///
/// The range stays valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream) -> CUresult {
    let to = dstDevice as *mut c_void;
    on_stream(hStream, |stream| {
        let bytes = N.checked_mul(4).filter(|_| dstDevice.is_multiple_of(4));
        let bytes = bytes.ok_or_else(|| Fault::cuda(CUDA_ERROR_INVALID_VALUE, "misaligned or too large a fill"))?;
        // SAFETY: the caller's contract.
        unsafe { copy::fill(to, &ui.to_ne_bytes(), bytes, &stream, false) }
    })
}

/// Attribute of a pointer that this library allocated.
///
/// # Safety
///
/// `data` is null or has room for the attribute's type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> CUresult {
    driver(|| {
        let allocation = allocation_at(ptr)
            .ok_or_else(|| Fault::cuda(CUDA_ERROR_INVALID_VALUE, format!("{ptr:#x} is not memory of this library")))?;
        // SAFETY: the caller's contract.
        unsafe { put_attribute(data, attribute, ptr, allocation) }
    })
}

/// Several attributes of a pointer at once; of a pointer that this library did not allocate all are 0.
///
/// # Safety
///
/// `attributes` and `data` have `numAttributes` entries, each of `data` with room for its attribute's type.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuPointerGetAttributes(
    numAttributes: c_uint,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> CUresult {
    driver(|| {
        if numAttributes > 0 && (attributes.is_null() || data.is_null()) {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "null pointer"));
        }
        if numAttributes == 0 {
            return Ok(());
        }
        let allocation = allocation_at(ptr);
        // SAFETY: the caller's contract.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, numAttributes as usize) };
        // SAFETY: as above.
        let data = unsafe { std::slice::from_raw_parts(data, numAttributes as usize) };
        for (&attribute, &out) in attributes.iter().zip(data) {
            match allocation {
                // SAFETY: as above.
                Some(allocation) => unsafe { put_attribute(out, attribute, ptr, allocation) }?,
                None => {
                    let bytes = match attribute {
                        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
                        | CU_POINTER_ATTRIBUTE_IS_MANAGED
                        | CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
                        | CU_POINTER_ATTRIBUTE_MAPPED => 4,
                        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => 1,
                        _ => 8,
                    };
                    // SAFETY: as above.
                    unsafe { out.cast::<u8>().write_bytes(0, bytes) };
                }
            }
        }
        Ok(())
    })
}

/// The allocation that holds an address. Where the contract checker takes any memory for a device's, all the rest of the
/// address space is one allocation of the current device.
fn allocation_at(ptr: CUdeviceptr) -> Option<Allocation> {
    let address = ptr as usize;
    memory::find(address).or_else(|| {
        let anything = check::policy().is_ok_and(|policy| policy != Policy::Error);
        let device = device::selected().ordinal;
        let bytes = (usize::MAX >> 1) - address.min(usize::MAX >> 1);
        (anything && address != 0).then_some(Allocation { base: address, bytes, kind: Kind::Device, device, id: 0 })
    })
}

/// # Safety
///
/// `data` is null or has room for the attribute's type.
unsafe fn put_attribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
    allocation: Allocation,
) -> Outcome<()> {
    let device = device_of(allocation.device)?;
    match attribute {
        // SAFETY: the caller vouches for a CUcontext.
        CU_POINTER_ATTRIBUTE_CONTEXT => unsafe { put(data.cast(), device.context()) },
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            let memory_type = if allocation.kind.on_device() { cudaMemoryTypeDevice } else { cudaMemoryTypeHost };
            // SAFETY: the caller vouches for an unsigned int.
            unsafe { put(data.cast::<c_uint>(), memory_type) }
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER | CU_POINTER_ATTRIBUTE_HOST_POINTER => {
            let is_host = attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER;
            if is_host && allocation.kind.on_device() {
                return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "device memory has no host pointer"));
            }
            // SAFETY: the caller vouches for a pointer.
            unsafe { put(data.cast::<CUdeviceptr>(), ptr) }
        }
        // SAFETY: the caller vouches for an unsigned int.
        CU_POINTER_ATTRIBUTE_IS_MANAGED => unsafe { put(data.cast::<c_uint>(), 0) },
        // SAFETY: the caller vouches for a bool.
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => unsafe {
            put(data.cast::<bool>(), allocation.kind == Kind::Device)
        },
        // SAFETY: the caller vouches for an unsigned long long.
        CU_POINTER_ATTRIBUTE_BUFFER_ID => unsafe { put(data.cast::<u64>(), allocation.id) },
        // SAFETY: the caller vouches for an int.
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => unsafe { put(data.cast::<c_int>(), allocation.device) },
        // SAFETY: the caller vouches for a CUdeviceptr.
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => unsafe {
            put(data.cast::<CUdeviceptr>(), allocation.base as CUdeviceptr)
        },
        // SAFETY: the caller vouches for a size_t.
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => unsafe { put(data.cast::<usize>(), allocation.bytes) },
        // SAFETY: the caller vouches for an unsigned int.
        CU_POINTER_ATTRIBUTE_MAPPED => unsafe { put(data.cast::<c_uint>(), 1) },
        other => Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, format!("pointer attribute {other} is unknown"))),
    }
}
