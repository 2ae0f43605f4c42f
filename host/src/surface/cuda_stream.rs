//! The CUDA runtime interface: streams, events, captures and graphs.

use std::ffi::{c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::{put, runtime, runtime_query};
use crate::event::Event;
use crate::fault::Fault;
use crate::queue::Stream;
use crate::{device, graph};

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
