//! The exported C functions, one file an interface, and what each of them does around its body.

pub mod cuda_driver;
pub mod cuda_driver_memory;
pub mod cuda_driver_stream;
pub mod cuda_launch;
pub mod cuda_memory;
pub mod cuda_module;
pub mod cuda_runtime;
pub mod cuda_stream;
pub mod host_ext;
pub mod nccl;
pub mod nccl_ep;
pub mod not_supported;

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use nvte_ep_bindings::*;

use crate::acting::Call;
use crate::check;
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome, contain, report};
use crate::graph;
use crate::inject;
use crate::line;
use crate::queue;
use crate::settings;

thread_local! {
    static LAST_RUNTIME_ERROR: Cell<cudaError_t> = const { Cell::new(cudaSuccess) };
}

/// A runtime call: current context, no sticky error, and a failure is remembered for `cudaGetLastError`.
fn runtime(work: impl FnOnce(&'static Device) -> Outcome<()>) -> cudaError_t {
    let _call = Call::enter(&work);
    runtime_query(|| {
        let device = device::make_current();
        device.check()?;
        work(device)
    })
}

/// A runtime call that neither needs a context nor minds a sticky error.
fn runtime_query(work: impl FnOnce() -> Outcome<()>) -> cudaError_t {
    let _call = Call::enter(&work);
    let code = code_of(|| {
        refuse_out_of_place()?;
        inject::at_entry(&work)?;
        work()
    });
    if code != cudaSuccess {
        LAST_RUNTIME_ERROR.set(code);
    }
    code
}

/// A driver call that needs no context.
fn driver(work: impl FnOnce() -> Outcome<()>) -> CUresult {
    let _call = Call::enter(&work);
    code_of(|| {
        refuse_out_of_place()?;
        inject::at_entry(&work)?;
        if !device::driver_ready() {
            return Err(Fault::cuda(CUDA_ERROR_NOT_INITIALIZED, "cuInit was not called"));
        }
        work()
    })
}

/// A driver call on the current context.
fn driver_current(work: impl FnOnce(&'static Device) -> Outcome<()>) -> CUresult {
    let _call = Call::enter(&work);
    driver(|| {
        let no_context = || Fault::cuda(CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
        let device = device::current().ok_or_else(no_context)?;
        device.check()?;
        work(device)
    })
}

fn code_of(work: impl FnOnce() -> Outcome<()>) -> cudaError_t {
    let Err(fault) = contain(work) else { return cudaSuccess };
    let fault = check::annotate(fault);
    if fault.annotated && !is_sticky(&fault) {
        report(&fault.text);
    }
    fault.cuda
}

/// Whether the fault is a device's sticky error, which was printed when it happened.
fn is_sticky(fault: &Fault) -> bool {
    device::all().iter().any(|device| device.sticky().is_some_and(|there| there.fault.text == fault.text))
}

/// An NCCL call: a failure is remembered for `ncclGetLastError` and printed.
fn nccl(work: impl FnOnce() -> Outcome<()>) -> ncclResult_t {
    let _call = Call::enter(&work);
    let done = contain(|| {
        refuse_out_of_place()?;
        inject::at_entry(&work)?;
        work()
    });
    match done {
        Ok(()) => ncclSuccess,
        Err(fault) => {
            let fault = check::annotate(fault);
            if !is_sticky(&fault) {
                report(&fault.text);
            }
            line::set_last_error(&fault.text);
            fault.nccl
        }
    }
}

/// Whether this is a child of fork, whose parent had called before.
static IS_FORKED_CHILD: AtomicBool = AtomicBool::new(false);

/// Fails where no call can be served: in host functions, and in a forked child of a process that had called before, which
/// has a copy of the memory but none of the threads (CUDA fails there with the same code).
fn refuse_out_of_place() -> Outcome<()> {
    extern "C" fn mark() {
        IS_FORKED_CHILD.store(true, Ordering::Relaxed);
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler stores a flag, and the library is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(mark)) };
    });
    settings::readable().map_err(|text| {
        static SAID: Once = Once::new();
        // A CUDA call's error is a number only.
        SAID.call_once(|| report(&text));
        Fault::both(cudaErrorInvalidValue, ncclInvalidArgument, text)
    })?;
    if IS_FORKED_CHILD.load(Ordering::Relaxed) {
        let text = "CUDA and NCCL cannot be used in a process that was forked after their first use";
        return Err(Fault::both(cudaErrorInitializationError, ncclUnhandledCudaError, text));
    }
    if queue::on_worker() {
        return Err(Fault::cuda(cudaErrorNotPermitted, "CUDA calls are not allowed in host functions of a stream"));
    }
    Ok(())
}

/// Writes a result through a caller's pointer.
///
/// # Safety
///
/// `pointer` is null or writable.
unsafe fn put<T>(pointer: *mut T, value: T) -> Outcome<()> {
    if pointer.is_null() {
        return Err(Fault::both(cudaErrorInvalidValue, ncclInvalidArgument, "a pointer for a result is null"));
    }
    // SAFETY: not null, and writable by the caller's word.
    unsafe { pointer.write(value) };
    Ok(())
}

/// A call of the caller's that allocates device or pinned memory.
fn allocate(bytes: usize, kind: crate::memory::Kind, device: &'static Device) -> Outcome<*mut c_void> {
    graph::refuse_unsafe("an allocation")?;
    crate::memory::allocate(bytes, kind, device.ordinal)
}

/// The same in stream order; on a captured stream each launch of the graph allocates.
fn allocate_in_order(bytes: usize, stream: &std::sync::Arc<queue::Stream>) -> Outcome<*mut c_void> {
    match graph::allocate_memory(bytes, stream)? {
        Some(address) => Ok(address as *mut c_void),
        None => {
            graph::refuse_on_captured(stream, "an allocation in stream order")?;
            crate::memory::allocate(bytes, crate::memory::Kind::Device, stream.device().ordinal)
        }
    }
}

/// What the two CUDA interfaces have in common to free pinned host memory.
fn free_pinned(pointer: *mut c_void, device: &'static Device) -> Outcome<()> {
    if pointer.is_null() {
        return Ok(());
    }
    graph::refuse_unsafe("freeing pinned memory")?;
    let allocation = crate::memory::forget(pointer as usize, |kind| kind == crate::memory::Kind::Pinned)?;
    device.synchronize();
    crate::memory::release(allocation);
    device.check()
}

/// The same for device memory.
fn free_device(pointer: *mut c_void, device: &'static Device) -> Outcome<()> {
    if pointer.is_null() {
        return Ok(());
    }
    graph::refuse_unsafe("freeing device memory")?;
    // An unknown pointer must not wait for work that may never end.
    let known = crate::memory::find(pointer as usize);
    if let Some(memory) = graph::memory_at(pointer as usize) {
        device.synchronize();
        graph::free_memory(&memory, device.legacy())?;
        // The memory is not touched any more when the call returns.
        device.synchronize();
        return device.check();
    }
    let is_freeable =
        |there: &crate::memory::Allocation| there.base == pointer as usize && there.kind.is_freed_by_callers();
    if !known.as_ref().is_some_and(is_freeable) {
        return Err(Fault::cuda(cudaErrorInvalidValue, format!("{pointer:p} is not the start of device memory")));
    }
    device.synchronize();
    device.check()?;
    let allocation = crate::memory::forget(pointer as usize, crate::memory::Kind::is_freed_by_callers)?;
    crate::memory::release(allocation);
    Ok(())
}

/// Status and id of a stream's capture; `details` are places for what is not supported.
fn capture_info(
    stream: &std::sync::Arc<queue::Stream>,
    details: &[*mut c_void],
) -> Outcome<(cudaStreamCaptureStatus, u64)> {
    let info = graph::status(stream)?;
    if info.0 == cudaStreamCaptureStatusActive && details.iter().any(|place| !place.is_null()) {
        let text = "graph and dependencies of a capture are not supported by the host runtime";
        return Err(Fault::cuda(cudaErrorNotSupported, text));
    }
    Ok(info)
}

/// `cudaGraphExecUpdate` and its driver twin, which share numbers and structure.
///
/// # Safety
///
/// `info` is null or writable.
unsafe fn update_exec(exec: usize, graph: usize, info: *mut cudaGraphExecUpdateResultInfo) -> Outcome<()> {
    let updated = graph::update_exec(exec, graph)?;
    let result = updated.as_ref().map_or_else(|(result, _)| *result, |()| cudaGraphExecUpdateSuccess);
    let null = std::ptr::null_mut();
    // SAFETY: the caller's contract.
    unsafe { put(info, cudaGraphExecUpdateResultInfo { result, errorNode: null, errorFromNode: null }) }?;
    updated.map_err(|(_, text)| Fault::cuda(cudaErrorGraphExecUpdateFailure, text))
}

/// Writes what [`capture_info`] gave; the id only for a valid capture, as in CUDA.
///
/// # Safety
///
/// `status` and `id` are null or writable.
unsafe fn put_capture_info(
    info: (cudaStreamCaptureStatus, u64),
    status: *mut cudaStreamCaptureStatus,
    id: *mut u64,
) -> Outcome<()> {
    // SAFETY: the caller's contract.
    unsafe { put(status, info.0) }?;
    if info.0 == cudaStreamCaptureStatusActive && !id.is_null() {
        // SAFETY: not null, and writable by the caller's word.
        unsafe { id.write(info.1) };
    }
    Ok(())
}

/// `cudaThreadExchangeStreamCaptureMode`.
///
/// # Safety
///
/// `mode` is null or readable and writable.
unsafe fn exchange_capture_mode(mode: *mut u32) -> Outcome<()> {
    if mode.is_null() {
        return Err(Fault::cuda(cudaErrorInvalidValue, "the pointer to the capture mode is null"));
    }
    // SAFETY: not null, and readable by the caller's word.
    let new = graph::Mode::from_number(unsafe { mode.read() })?;
    // SAFETY: as above.
    unsafe { mode.write(graph::exchange_thread_mode(new).number()) };
    Ok(())
}
