//! The CUDA runtime interface.

use std::ffi::{c_char, c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::{LAST_RUNTIME_ERROR, free_device, free_pinned, put, runtime, runtime_query};
use crate::device;
use crate::fault::Fault;
use crate::graph;
use crate::memory::{self, Kind};
use crate::stream::{Event, Stream};
use crate::{copy, errors, sys};

/// An event.
#[allow(non_camel_case_types, reason = "name of the C interface")]
pub type cudaEvent_t = *mut CUevent_st;

/// A graph.
#[allow(non_camel_case_types, reason = "name of the C interface")]
pub type cudaGraph_t = *mut c_void;

/// A graph that can be launched.
#[allow(non_camel_case_types, reason = "name of the C interface")]
pub type cudaGraphExec_t = *mut c_void;

/// A function that a stream calls on the host.
#[allow(non_camel_case_types, non_snake_case, reason = "names of the C interface")]
pub type cudaHostFn_t = Option<unsafe extern "C" fn(userData: *mut c_void)>;

/// Number of devices.
///
/// # Safety
///
/// `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime_query(|| unsafe { put(count, device::all().len() as c_int) })
}

/// Device that this thread uses.
///
/// # Safety
///
/// `device` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDevice(device: *mut c_int) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime_query(|| unsafe { put(device, device::selected().ordinal) })
}

/// Selects the device that this thread uses.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaSetDevice(device: c_int) -> cudaError_t {
    runtime_query(|| {
        device::select(device)?;
        device::selected().check()
    })
}

/// Waits for all work of the device.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceSynchronize() -> cudaError_t {
    runtime(|device| {
        graph::refuse_device_wait(device, "a wait for the device")?;
        device.synchronize();
        device.check()
    })
}

/// Attribute of a device.
///
/// # Safety
///
/// `value` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetAttribute(value: *mut c_int, attr: cudaDeviceAttr, device: c_int) -> cudaError_t {
    runtime_query(|| {
        let found = device::get(device)
            .ok_or_else(|| Fault::cuda(cudaErrorInvalidDevice, format!("there is no device {device}")))?
            .attribute(attr);
        let unknown = || Fault::cuda(cudaErrorInvalidValue, format!("device attribute {attr} is unknown"));
        // SAFETY: the caller's contract.
        unsafe { put(value, found.ok_or_else(unknown)?) }
    })
}

/// CUDA version of the runtime.
///
/// # Safety
///
/// `runtimeVersion` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaRuntimeGetVersion(runtimeVersion: *mut c_int) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime_query(|| unsafe { put(runtimeVersion, device::CUDA_VERSION) })
}

/// CUDA version that the driver supports.
///
/// # Safety
///
/// `driverVersion` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaDriverGetVersion(driverVersion: *mut c_int) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime_query(|| unsafe { put(driverVersion, device::CUDA_VERSION) })
}

/// Allocates device memory.
///
/// # Safety
///
/// `devPtr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaMalloc(devPtr: *mut *mut c_void, size: usize) -> cudaError_t {
    runtime(|device| {
        // SAFETY: the caller's contract.
        unsafe { put(devPtr, std::ptr::null_mut()) }?;
        let pointer = super::allocate(size, Kind::Device, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(devPtr, pointer) }
    })
}

/// Frees device memory after all work of the device.
///
/// # Safety
///
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaFree(devPtr: *mut c_void) -> cudaError_t {
    runtime(|device| free_device(devPtr, device))
}

/// Allocates pinned host memory.
///
/// # Safety
///
/// `ptr` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocHost(ptr: *mut *mut c_void, size: usize) -> cudaError_t {
    runtime(|device| {
        // SAFETY: the caller's contract.
        unsafe { put(ptr, std::ptr::null_mut()) }?;
        let pointer = super::allocate(size, Kind::Pinned, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, pointer) }
    })
}

/// Allocates pinned host memory.
///
/// # Safety
///
/// `pHost` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaHostAlloc(pHost: *mut *mut c_void, size: usize, flags: c_uint) -> cudaError_t {
    runtime(|device| {
        if flags > 7 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown allocation flags {flags:#x}")));
        }
        // SAFETY: the caller's contract.
        unsafe { put(pHost, std::ptr::null_mut()) }?;
        let pointer = super::allocate(size, Kind::Pinned, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(pHost, pointer) }
    })
}

/// Frees pinned host memory after all work of the device.
///
/// # Safety
///
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFreeHost(ptr: *mut c_void) -> cudaError_t {
    runtime(|device| free_pinned(ptr, device))
}

/// Allocates device memory in stream order; on a captured stream each launch of the graph does.
///
/// # Safety
///
/// `devPtr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaMallocAsync(devPtr: *mut *mut c_void, size: usize, hStream: cudaStream_t) -> cudaError_t {
    runtime(|device| {
        let stream = Stream::resolve(hStream, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(devPtr, std::ptr::null_mut()) }?;
        let pointer = match graph::allocate_memory(size, &stream)? {
            Some(address) => address as *mut c_void,
            None => {
                graph::refuse_on_captured(&stream, "an allocation in stream order")?;
                memory::allocate(size, Kind::Device, device.ordinal)?
            }
        };
        // SAFETY: the caller's contract.
        unsafe { put(devPtr, pointer) }
    })
}

/// Frees device memory in stream order; on a captured stream, memory that the graph allocated.
///
/// # Safety
///
/// Nobody uses the memory once the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaFreeAsync(devPtr: *mut c_void, hStream: cudaStream_t) -> cudaError_t {
    runtime(|device| copy::free_async(devPtr, &Stream::resolve(hStream, device)?))
}

/// Copies and waits.
///
/// # Safety
///
/// Both ranges have `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy(
    dst: *mut c_void,
    src: *const c_void,
    count: usize,
    kind: cudaMemcpyKind,
) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|device| unsafe { copy::copy(dst, src, count, kind, device.legacy(), true) })
}

/// Copies in stream order.
///
/// # Safety
///
/// The ranges have `count` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpyAsync(
    dst: *mut c_void,
    src: *const c_void,
    count: usize,
    kind: cudaMemcpyKind,
    stream: cudaStream_t,
) -> cudaError_t {
    runtime(|device| {
        let stream = Stream::resolve(stream, device)?;
        // SAFETY: the caller's contract.
        unsafe { copy::copy(dst, src, count, kind, &stream, false) }
    })
}

/// Copies rows in stream order.
///
/// # Safety
///
/// Both rectangles stay valid until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy2DAsync(
    dst: *mut c_void,
    dpitch: usize,
    src: *const c_void,
    spitch: usize,
    width: usize,
    height: usize,
    kind: cudaMemcpyKind,
    stream: cudaStream_t,
) -> cudaError_t {
    runtime(|device| {
        let stream = Stream::resolve(stream, device)?;
        let to = copy::Rectangle { base: dst, pitch: dpitch };
        let from = copy::Rectangle { base: src, pitch: spitch };
        // SAFETY: the caller's contract.
        unsafe { copy::copy_rows(to, from, width, height, kind, &stream) }
    })
}

/// Copies between devices in stream order.
///
/// # Safety
///
/// The ranges have `count` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaMemcpyPeerAsync(
    dst: *mut c_void,
    dstDevice: c_int,
    src: *const c_void,
    srcDevice: c_int,
    count: usize,
    stream: cudaStream_t,
) -> cudaError_t {
    runtime(|device| {
        for ordinal in [dstDevice, srcDevice] {
            device::get(ordinal)
                .ok_or_else(|| Fault::cuda(cudaErrorInvalidDevice, format!("there is no device {ordinal}")))?;
        }
        let stream = Stream::resolve(stream, device)?;
        // SAFETY: the caller's contract.
        unsafe { copy::copy(dst, src, count, cudaMemcpyDeviceToDevice, &stream, false) }
    })
}

/// Makes the caller's memory count as pinned.
///
/// # Safety
///
/// `ptr` has `size` bytes until `cudaHostUnregister`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostRegister(ptr: *mut c_void, size: usize, flags: c_uint) -> cudaError_t {
    runtime(|device| {
        if flags > 15 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown registration flags {flags:#x}")));
        }
        graph::refuse_unsafe("the registration of host memory")?;
        memory::register(ptr as usize, size, device.ordinal)
    })
}

/// Ends what `cudaHostRegister` began, after all work of the device.
///
/// # Safety
///
/// Nobody uses the memory as pinned any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostUnregister(ptr: *mut c_void) -> cudaError_t {
    runtime(|device| {
        graph::refuse_unsafe("the end of a registration of host memory")?;
        device.synchronize();
        let registered = memory::forget(ptr as usize, |kind| kind == Kind::Registered);
        registered.map_err(|fault| Fault::cuda(cudaErrorHostMemoryNotRegistered, fault.text))?;
        device.check()
    })
}

/// Address at which the device sees pinned memory: the same.
///
/// # Safety
///
/// `pDevice` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaHostGetDevicePointer(
    pDevice: *mut *mut c_void,
    pHost: *mut c_void,
    flags: c_uint,
) -> cudaError_t {
    runtime(|_| {
        let pinned = memory::find(pHost as usize).is_some_and(|allocation| !allocation.kind.on_device());
        if flags != 0 || !pinned {
            let text = format!("{pHost:p} is not pinned memory, or the flags {flags:#x} are not 0");
            return Err(Fault::cuda(cudaErrorInvalidValue, text));
        }
        // SAFETY: the caller's contract.
        unsafe { put(pDevice, pHost) }
    })
}

/// Fills memory with a byte and waits.
///
/// # Safety
///
/// The range has `count` bytes.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaMemset(devPtr: *mut c_void, value: c_int, count: usize) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|device| unsafe { copy::fill(devPtr, &[value as u8], count, device.legacy(), true) })
}

/// Fills memory with a byte in stream order.
///
/// # Safety
///
/// The range stays valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaMemsetAsync(
    devPtr: *mut c_void,
    value: c_int,
    count: usize,
    stream: cudaStream_t,
) -> cudaError_t {
    runtime(|device| {
        let stream = Stream::resolve(stream, device)?;
        // SAFETY: the caller's contract.
        unsafe { copy::fill(devPtr, &[value as u8], count, &stream, false) }
    })
}

/// Free and total memory.
///
/// # Safety
///
/// Both pointers are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> cudaError_t {
    runtime(|_| {
        let (available, all) = sys::memory_info();
        // SAFETY: the caller's contract.
        unsafe { put(free, available) }?;
        // SAFETY: the caller's contract.
        unsafe { put(total, all) }
    })
}

/// What kind of memory a pointer names.
///
/// # Safety
///
/// `attributes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaPointerGetAttributes(
    attributes: *mut cudaPointerAttributes,
    ptr: *const c_void,
) -> cudaError_t {
    runtime(|_| {
        let pointer = ptr.cast_mut();
        let mut found = cudaPointerAttributes::default();
        match memory::find(ptr as usize) {
            Some(allocation) => {
                found.device = allocation.device;
                found.devicePointer = pointer;
                found.type_ = cudaMemoryTypeDevice;
                if !allocation.kind.on_device() {
                    found.type_ = cudaMemoryTypeHost;
                    found.hostPointer = pointer;
                }
            }
            None => {
                found.type_ = cudaMemoryTypeUnregistered;
                // cudaInvalidDeviceId.
                found.device = -2;
                found.hostPointer = pointer;
            }
        }
        // SAFETY: the caller's contract.
        unsafe { put(attributes, found) }
    })
}

/// Creates a stream.
///
/// # Safety
///
/// `pStream` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamCreate(pStream: *mut cudaStream_t) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|device| unsafe { put(pStream, Stream::open(device, 0)?) })
}

/// Creates a stream.
///
/// # Safety
///
/// `pStream` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamCreateWithFlags(pStream: *mut cudaStream_t, flags: c_uint) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|device| unsafe { put(pStream, Stream::open(device, flags)?) })
}

/// Creates a stream; streams have no priorities here.
///
/// # Safety
///
/// `pStream` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamCreateWithPriority(
    pStream: *mut cudaStream_t,
    flags: c_uint,
    priority: c_int,
) -> cudaError_t {
    let _ = priority;
    // SAFETY: the caller's contract.
    runtime(|device| unsafe { put(pStream, Stream::open(device, flags)?) })
}

/// Priorities that streams may have: none but 0.
///
/// # Safety
///
/// Both pointers are null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaDeviceGetStreamPriorityRange(
    leastPriority: *mut c_int,
    greatestPriority: *mut c_int,
) -> cudaError_t {
    runtime(|_| {
        for place in [leastPriority, greatestPriority].into_iter().filter(|place| !place.is_null()) {
            // SAFETY: the caller's contract.
            unsafe { put(place, 0) }?;
        }
        Ok(())
    })
}

/// Destroys a stream after its work.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamDestroy(stream: cudaStream_t) -> cudaError_t {
    runtime(|_| Stream::destroy(stream))
}

/// Waits for a stream's work.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamSynchronize(stream: cudaStream_t) -> cudaError_t {
    runtime(|device| Stream::resolve(stream, device)?.synchronize())
}

/// Whether a stream's work is done.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamQuery(stream: cudaStream_t) -> cudaError_t {
    runtime(|device| Stream::resolve(stream, device)?.query())
}

/// Makes a stream wait for an event.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamWaitEvent(stream: cudaStream_t, event: cudaEvent_t, flags: c_uint) -> cudaError_t {
    runtime(|device| {
        if flags != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown wait flags {flags:#x}")));
        }
        Event::resolve(event)?.hold_back(&Stream::resolve(stream, device)?)
    })
}

/// Begins the capture of a stream.
///
/// # Safety
///
/// Memory of work that is captured stays valid until no launch of the graph uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamBeginCapture(stream: cudaStream_t, mode: c_uint) -> cudaError_t {
    runtime(|device| graph::begin(&Stream::resolve(stream, device)?, mode))
}

/// Ends a capture and gives the graph.
///
/// # Safety
///
/// `pGraph` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamEndCapture(stream: cudaStream_t, pGraph: *mut cudaGraph_t) -> cudaError_t {
    runtime(|device| {
        // SAFETY: the caller's contract.
        unsafe { put(pGraph, std::ptr::null_mut()) }?;
        let graph = graph::end(&Stream::resolve(stream, device)?)?;
        // SAFETY: the caller's contract.
        unsafe { put(pGraph, graph as cudaGraph_t) }
    })
}

/// Whether a stream is captured.
///
/// # Safety
///
/// `pCaptureStatus` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamIsCapturing(
    stream: cudaStream_t,
    pCaptureStatus: *mut cudaStreamCaptureStatus,
) -> cudaError_t {
    runtime(|device| {
        let (status, _) = graph::status(&Stream::resolve(stream, device)?)?;
        // SAFETY: the caller's contract.
        unsafe { put(pCaptureStatus, status) }
    })
}

/// Status and id of a stream's capture; graph and dependencies are not told.
///
/// # Safety
///
/// All pointers are null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: cudaStream_t,
    captureStatus_out: *mut cudaStreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut cudaGraph_t,
    dependencies_out: *mut *const c_void,
    numDependencies_out: *mut usize,
) -> cudaError_t {
    let details = [graph_out.cast::<c_void>(), dependencies_out.cast(), numDependencies_out.cast()];
    runtime(|device| {
        let info = super::capture_info(&Stream::resolve(stream, device)?, &details)?;
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
pub unsafe extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime_query(|| unsafe { super::exchange_capture_mode(mode) })
}

/// Makes a graph launchable; the signature is that of CUDA 12 and later.
///
/// # Safety
///
/// `pGraphExec` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaGraphInstantiate(
    pGraphExec: *mut cudaGraphExec_t,
    graph: cudaGraph_t,
    flags: u64,
) -> cudaError_t {
    runtime(|_| {
        // SAFETY: the caller's contract.
        unsafe { put(pGraphExec, std::ptr::null_mut()) }?;
        let exec = graph::instantiate(graph as usize, flags)?;
        // SAFETY: the caller's contract.
        unsafe { put(pGraphExec, exec as cudaGraphExec_t) }
    })
}

/// Makes a graph launchable.
///
/// # Safety
///
/// As [`cudaGraphInstantiate`].
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaGraphInstantiateWithFlags(
    pGraphExec: *mut cudaGraphExec_t,
    graph: cudaGraph_t,
    flags: u64,
) -> cudaError_t {
    // SAFETY: the same contract.
    unsafe { cudaGraphInstantiate(pGraphExec, graph, flags) }
}

/// Puts another graph of the same shape in the place of a launchable one's; the signature is that of CUDA 12 and later.
///
/// # Safety
///
/// `resultInfo` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaGraphExecUpdate(
    hGraphExec: cudaGraphExec_t,
    hGraph: cudaGraph_t,
    resultInfo: *mut cudaGraphExecUpdateResultInfo,
) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|_| unsafe { super::update_exec(hGraphExec as usize, hGraph as usize, resultInfo) })
}

/// Replays a graph in stream order.
///
/// # Safety
///
/// The memory that the graph uses stays valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaGraphLaunch(graphExec: cudaGraphExec_t, stream: cudaStream_t) -> cudaError_t {
    // A device with an error is the launch's own business: it has peers to tell.
    runtime_query(|| graph::launch(graphExec as usize, &Stream::resolve(stream, device::make_current())?))
}

/// Destroys a launchable graph; launches that are going on finish.
///
/// # Safety
///
/// Always safe to call; an unknown handle is refused.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaGraphExecDestroy(graphExec: cudaGraphExec_t) -> cudaError_t {
    runtime_query(|| graph::destroy_exec(graphExec as usize))
}

/// Destroys a graph; launchable ones made from it stay.
///
/// # Safety
///
/// Always safe to call; an unknown handle is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphDestroy(graph: cudaGraph_t) -> cudaError_t {
    runtime_query(|| graph::destroy_graph(graph as usize))
}

/// Calls a host function in stream order.
///
/// # Safety
///
/// `hostFn` can be called with `userData` from another thread and does not unwind.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaLaunchHostFunc(
    stream: cudaStream_t,
    hostFn: cudaHostFn_t,
    userData: *mut c_void,
) -> cudaError_t {
    runtime(|device| {
        let host_fn = hostFn.ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, "the host function is null"))?;
        let data = userData as usize;
        let run = move || {
            crate::order::host_learns_from_running();
            // SAFETY: the caller vouches for the function and its argument.
            unsafe { host_fn(data as *mut c_void) };
            Ok(())
        };
        Stream::resolve(stream, device)?.enqueue(&[], run).map(drop)
    })
}

/// Creates an event.
///
/// # Safety
///
/// `event` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreate(event: *mut cudaEvent_t) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|_| unsafe { put(event, Event::open(0)?) })
}

/// Creates an event.
///
/// # Safety
///
/// `event` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreateWithFlags(event: *mut cudaEvent_t, flags: c_uint) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|_| unsafe { put(event, Event::open(flags)?) })
}

/// Puts an event at the end of a stream.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventRecord(event: cudaEvent_t, stream: cudaStream_t) -> cudaError_t {
    runtime(|device| Event::resolve(event)?.record(&Stream::resolve(stream, device)?))
}

/// Puts an event at the end of a stream.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventRecordWithFlags(
    event: cudaEvent_t,
    stream: cudaStream_t,
    flags: c_uint,
) -> cudaError_t {
    runtime(|device| {
        if flags != 0 {
            let text = format!("record flags {flags:#x} are not supported by the host runtime");
            return Err(Fault::cuda(cudaErrorInvalidValue, text));
        }
        Event::resolve(event)?.record(&Stream::resolve(stream, device)?)
    })
}

/// Whether an event has happened.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventQuery(event: cudaEvent_t) -> cudaError_t {
    runtime(|_| Event::resolve(event)?.query())
}

/// Waits for an event.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventSynchronize(event: cudaEvent_t) -> cudaError_t {
    runtime(|_| Event::resolve(event)?.synchronize())
}

/// Milliseconds between two events.
///
/// # Safety
///
/// `ms` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventElapsedTime(ms: *mut f32, start: cudaEvent_t, end: cudaEvent_t) -> cudaError_t {
    runtime(|_| {
        let time = Event::resolve(end)?.since(&*Event::resolve(start)?)?;
        // SAFETY: the caller's contract.
        unsafe { put(ms, time) }
    })
}

/// Destroys an event.
///
/// # Safety
///
/// Always safe to call; unknown handles are refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventDestroy(event: cudaEvent_t) -> cudaError_t {
    runtime(|_| Event::destroy(event))
}

/// The sticky error, else this thread's last error, which is then forgotten.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetLastError() -> cudaError_t {
    let last = LAST_RUNTIME_ERROR.replace(cudaSuccess);
    device::selected().sticky().map_or(last, |sticky| sticky.fault.cuda)
}

/// The sticky error, else this thread's last error.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaPeekAtLastError() -> cudaError_t {
    device::selected().sticky().map_or(LAST_RUNTIME_ERROR.get(), |sticky| sticky.fault.cuda)
}

/// Name of an error code.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetErrorName(error: cudaError_t) -> *const c_char {
    errors::runtime_name(error).as_ptr()
}

/// Description of an error code; for the sticky error it says what happened.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetErrorString(error: cudaError_t) -> *const c_char {
    let sticky = device::selected().sticky().filter(|sticky| sticky.fault.cuda == error);
    let text = sticky.map(|sticky| sticky.text.as_c_str()).or_else(|| errors::description(error));
    text.unwrap_or(c"unrecognized error code").as_ptr()
}
