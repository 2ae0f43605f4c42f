//! The CUDA driver interface: streams, events, captures and graphs.

use std::ffi::{c_uint, c_void};

use nvte_ep_bindings::*;

use super::cuda_driver::on_stream;
use super::{driver, driver_current, put};
use crate::event::Event;
use crate::fault::Fault;
use crate::queue::Stream;
use crate::{device, graph};

/// A graph.
pub type CUgraph = *mut c_void;
/// A graph that can be launched.
pub type CUgraphExec = *mut c_void;

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
