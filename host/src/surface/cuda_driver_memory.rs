//! The CUDA driver interface: memory, copies and fills.

use std::ffi::{c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::cuda_driver::{device_of, on_stream};
use super::{driver, driver_current, free_device, free_pinned, put};
use crate::device;
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Allocation, Kind};
use crate::settings::{self, Policy};
use crate::{copy, machine};

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

/// Allocates device memory in stream order; on a captured stream each launch of the graph does.
///
/// # Safety
///
/// `dptr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) -> CUresult {
    on_stream(hStream, |stream| {
        if bytesize == 0 {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes"));
        }
        // SAFETY: the caller's contract.
        unsafe { put(dptr, 0) }?;
        let pointer = super::allocate_in_order(bytesize, &stream)?;
        // SAFETY: the caller's contract.
        unsafe { put(dptr, pointer as CUdeviceptr) }
    })
}

/// Frees device memory in stream order; on a captured stream, memory that the graph allocated.
///
/// # Safety
///
/// Nobody uses the memory once the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream) -> CUresult {
    on_stream(hStream, |stream| copy::free_async(dptr as *mut c_void, &stream))
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
        let (available, all) = machine::memory();
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

/// Copies within device memory in stream order.
///
/// # Safety
///
/// Both ranges have `ByteCount` bytes and stay valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    let (to, from) = (dstDevice as *mut c_void, srcDevice as *const c_void);
    on_stream(hStream, |stream| {
        // SAFETY: the caller's contract.
        unsafe { copy::copy(to, from, ByteCount, cudaMemcpyDeviceToDevice, &stream, false) }
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

/// The allocation that holds an address. Where devices reach pageable memory, or the contract checker takes any memory for a
/// device's, all the rest of the address space is one allocation of the current device.
fn allocation_at(ptr: CUdeviceptr) -> Option<Allocation> {
    let address = ptr as usize;
    memory::find(address).or_else(|| {
        let anything = settings::pageable_memory() || settings::policy() != Policy::Error;
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
