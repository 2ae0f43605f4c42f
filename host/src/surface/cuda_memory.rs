//! The CUDA runtime interface: memory, copies and fills.

use std::ffi::{c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::{free_device, free_pinned, put, runtime};
use crate::fault::Fault;
use crate::memory::{self, Kind};
use crate::queue::Stream;
use crate::{copy, device, graph, machine};

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
        let pointer = super::allocate_in_order(size, &stream)?;
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

/// Copies rows and waits.
///
/// # Safety
///
/// Both rectangles are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy2D(
    dst: *mut c_void,
    dpitch: usize,
    src: *const c_void,
    spitch: usize,
    width: usize,
    height: usize,
    kind: cudaMemcpyKind,
) -> cudaError_t {
    runtime(|device| {
        let stream = device.legacy();
        let to = copy::Rectangle { base: dst, pitch: dpitch };
        let from = copy::Rectangle { base: src, pitch: spitch };
        // SAFETY: the caller's contract.
        unsafe { copy::copy_rows(to, from, width, height, kind, stream) }?;
        stream.synchronize()
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
        let (available, all) = machine::memory();
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
