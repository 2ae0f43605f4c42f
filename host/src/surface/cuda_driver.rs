//! The CUDA driver interface: devices, contexts and errors.

use std::ffi::{c_char, c_int, c_uint};

use nvte_ep_bindings::*;

use super::{driver, driver_current, put};
use crate::acting::Call;
use crate::device::{self, Device};
use crate::fault::{Fault, Outcome};
use crate::queue::Stream;
use crate::{errors, graph};

/// The device that a handle names.
pub(super) fn device_of(dev: CUdevice) -> Outcome<&'static Device> {
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
