//! The CUDA runtime interface: devices and errors.

use std::ffi::{c_char, c_int, c_uint};

use nvte_ep_bindings::*;

pub use super::cuda_memory::*;
pub use super::cuda_stream::*;
use super::{LAST_RUNTIME_ERROR, put, runtime, runtime_query};
use crate::fault::Fault;
use crate::queue::Stream;
use crate::{device, errors, graph, memory};

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

/// Properties of a device, those of the modelled one.
///
/// # Safety
///
/// `prop` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceProperties(prop: *mut cudaDeviceProp, device: c_int) -> cudaError_t {
    runtime_query(|| {
        let found = device::get(device)
            .ok_or_else(|| Fault::cuda(cudaErrorInvalidDevice, format!("there is no device {device}")))?;
        // SAFETY: the caller's contract.
        unsafe { put(prop, found.properties()) }
    })
}

/// Whether a device can read and write the memory of another: all are memory of the host.
///
/// # Safety
///
/// `canAccessPeer` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaDeviceCanAccessPeer(
    canAccessPeer: *mut c_int,
    device: c_int,
    peerDevice: c_int,
) -> cudaError_t {
    runtime_query(|| {
        if let Some(unknown) = [device, peerDevice].into_iter().find(|ordinal| device::get(*ordinal).is_none()) {
            return Err(Fault::cuda(cudaErrorInvalidDevice, format!("there is no device {unknown}")));
        }
        // SAFETY: the caller's contract.
        unsafe { put(canAccessPeer, c_int::from(device != peerDevice)) }
    })
}

/// Lets this device use the memory of another, which it can do anyway.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaDeviceEnablePeerAccess(peerDevice: c_int, flags: c_uint) -> cudaError_t {
    runtime(|device| {
        if flags != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("flags {flags:#x} of peer access are unknown")));
        }
        match device::get(peerDevice) {
            Some(peer) if peer.ordinal != device.ordinal => Ok(()),
            _ => Err(Fault::cuda(cudaErrorInvalidDevice, format!("device {peerDevice} is no peer of the current one"))),
        }
    })
}

/// Waits for the device's work, and destroys what the program made on it: streams and memory.
///
/// # Safety
///
/// Nobody uses them any more; what NCCL and NCCL EP hold on the device has been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceReset() -> cudaError_t {
    runtime(|device| {
        graph::refuse_device_wait(device, "a reset of the device")?;
        device.synchronize();
        Stream::destroy_all_of(device);
        memory::forget_all_of(device.ordinal).into_iter().for_each(memory::release);
        device.check()
    })
}

/// Starts the profiler, of which there is none.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaProfilerStart() -> cudaError_t {
    runtime(|_| Ok(()))
}

/// Stops the profiler, of which there is none.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaProfilerStop() -> cudaError_t {
    runtime(|_| Ok(()))
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
