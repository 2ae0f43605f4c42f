//! The exported C functions, one file an interface, and what each of them does around its body.

pub mod cuda_driver;
pub mod cuda_runtime;
pub mod host_ext;
pub mod nccl;
pub mod nccl_ep;

use std::cell::Cell;
use std::ffi::c_void;

use nvte_ep_bindings::*;

use crate::comm;
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome, contain, report};
use crate::stream;

thread_local! {
    static LAST_RUNTIME_ERROR: Cell<cudaError_t> = const { Cell::new(cudaSuccess) };
}

/// A runtime call: current context, no sticky error, and a failure is remembered for `cudaGetLastError`.
fn runtime(work: impl FnOnce(&'static Device) -> Outcome<()>) -> cudaError_t {
    runtime_query(|| {
        let device = device::make_current();
        device.check()?;
        work(device)
    })
}

/// A runtime call that neither needs a context nor minds a sticky error.
fn runtime_query(work: impl FnOnce() -> Outcome<()>) -> cudaError_t {
    let code = code_of(|| {
        refuse_on_worker()?;
        work()
    });
    if code != cudaSuccess {
        LAST_RUNTIME_ERROR.set(code);
    }
    code
}

/// A driver call that needs no context.
fn driver(work: impl FnOnce() -> Outcome<()>) -> CUresult {
    code_of(|| {
        refuse_on_worker()?;
        if !device::driver_ready() {
            return Err(Fault::cuda(CUDA_ERROR_NOT_INITIALIZED, "cuInit was not called"));
        }
        work()
    })
}

/// A driver call on the current context.
fn driver_current(work: impl FnOnce(&'static Device) -> Outcome<()>) -> CUresult {
    driver(|| {
        let no_context = || Fault::cuda(CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
        let device = device::current().ok_or_else(no_context)?;
        device.check()?;
        work(device)
    })
}

fn code_of(work: impl FnOnce() -> Outcome<()>) -> cudaError_t {
    contain(work).map_or_else(|fault| fault.cuda, |()| cudaSuccess)
}

/// An NCCL call: a failure is remembered for `ncclGetLastError` and printed.
fn nccl(work: impl FnOnce() -> Outcome<()>) -> ncclResult_t {
    let done = contain(|| {
        refuse_on_worker()?;
        work()
    });
    match done {
        Ok(()) => ncclSuccess,
        Err(fault) => {
            // A sticky error was printed when it happened.
            if device::all().iter().all(|device| device.sticky().is_none_or(|there| there.fault.text != fault.text)) {
                report(&fault.text);
            }
            comm::set_last_error(&fault.text);
            fault.nccl
        }
    }
}

fn refuse_on_worker() -> Outcome<()> {
    if stream::on_worker() {
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

/// What the two CUDA interfaces have in common to free device memory.
fn free_device(pointer: *mut c_void, device: &'static Device) -> Outcome<()> {
    if pointer.is_null() {
        return Ok(());
    }
    // An unknown pointer must not wait for work that may never end.
    let known = crate::memory::find(pointer as usize);
    if known.is_none_or(|allocation| allocation.base != pointer as usize || !allocation.kind.on_device()) {
        return Err(Fault::cuda(cudaErrorInvalidValue, format!("{pointer:p} is not the start of device memory")));
    }
    device.synchronize();
    device.check()?;
    let allocation = crate::memory::forget(pointer as usize, crate::memory::Kind::on_device)?;
    crate::memory::release(allocation);
    Ok(())
}
