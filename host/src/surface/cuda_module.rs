//! Modules and kernel launches of the CUDA driver interface.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use nvte_ep_bindings::*;

use super::cuda_driver::on_stream;
use super::{driver_current, put};
use crate::fault::Fault;
use crate::kernels::{self, Kernel};
use crate::native::Arguments;

/// Shared memory that a block may have, as on the GPU that devices report to be.
const SHARED_BYTES: c_int = 227 * 1024;

/// The kernels of one loaded image; behind every `CUmodule`.
struct Module(Vec<&'static Kernel>);

/// Loads a PTX text, whose kernels have to be those of nvte-ep.
///
/// # Safety
///
/// `module` is null or writable; `image` is null or a text that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    driver_current(|_| {
        if image.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "cuModuleLoadData: image is NULL"));
        }
        // SAFETY: the caller's contract.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        let kernels = kernels::of_ptx(&text.to_string_lossy())?;
        let made = Box::into_raw(Box::new(Module(kernels)));
        // SAFETY: the caller's contract.
        unsafe { put(module, made.cast()) }.inspect_err(|_| {
            // SAFETY: made above, and nobody got it.
            drop(unsafe { Box::from_raw(made) });
        })
    })
}

/// Unloads a module.
///
/// # Safety
///
/// `hmod` is null or a live module, which is gone afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(hmod: CUmodule) -> CUresult {
    driver_current(|_| {
        if hmod.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_HANDLE, "cuModuleUnload: the module is NULL"));
        }
        // SAFETY: made by `cuModuleLoadData`, and gone afterwards by the caller's word.
        drop(unsafe { Box::from_raw(hmod.cast::<Module>()) });
        Ok(())
    })
}

/// Finds a kernel of a module.
///
/// # Safety
///
/// `hfunc` is null or writable; `hmod` is null or a live module; `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char) -> CUresult {
    driver_current(|_| {
        if hmod.is_null() || name.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "cuModuleGetFunction: an argument is NULL"));
        }
        // SAFETY: live, by the caller's word.
        let module = unsafe { &*hmod.cast::<Module>() };
        // SAFETY: a C string, by the caller's word.
        let name = unsafe { CStr::from_ptr(name) };
        let found = module.0.iter().find(|kernel| kernel.name.as_bytes() == name.to_bytes());
        let kernel: &'static Kernel =
            found.ok_or_else(|| Fault::cuda(CUDA_ERROR_NOT_FOUND, format!("the module has no kernel {name:?}")))?;
        // SAFETY: the caller's contract.
        unsafe { put(hfunc, std::ptr::from_ref(kernel).cast_mut().cast()) }
    })
}

/// Queues a launch.
///
/// # Safety
///
/// `f` is null or from `cuModuleGetFunction`; `kernelParams` points to the kernel's arguments; memory among them stays
/// valid until the stream has got there.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
#[allow(clippy::too_many_arguments, reason = "the C interface")]
pub unsafe extern "C" fn cuLaunchKernel(
    f: CUfunction,
    gridDimX: c_uint,
    gridDimY: c_uint,
    gridDimZ: c_uint,
    blockDimX: c_uint,
    blockDimY: c_uint,
    blockDimZ: c_uint,
    _sharedMemBytes: c_uint,
    hStream: CUstream,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    let block = [blockDimX, blockDimY, blockDimZ].map(u64::from);
    let grid = [gridDimX, gridDimY, gridDimZ];
    on_stream(hStream, |stream| {
        if f.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_HANDLE, "cuLaunchKernel: the function is NULL"));
        }
        if grid.contains(&0) || block.contains(&0) || block.iter().product::<u64>() > 1024 {
            let text = format!("cuLaunchKernel: a grid of {grid:?} blocks of {block:?} threads");
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, text));
        }
        if !extra.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_NOT_SUPPORTED, "cuLaunchKernel: extra is not supported"));
        }
        // SAFETY: `cuModuleGetFunction` gives out static kernels only.
        let kernel = unsafe { &*f.cast::<Kernel>() };
        // SAFETY: the caller's contract.
        unsafe { kernel.launch(Arguments(kernelParams.cast_const().cast()), gridDimX, &stream) }
    })
}

/// Sets an attribute of a kernel; here there is nothing to set aside, and any amount of shared memory that a GPU has is there.
///
/// # Safety
///
/// `hfunc` is null or from `cuModuleGetFunction`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int) -> CUresult {
    driver_current(|_| {
        if hfunc.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_HANDLE, "cuFuncSetAttribute: the function is NULL"));
        }
        if attrib != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || !(0..=SHARED_BYTES).contains(&value) {
            let text = format!("cuFuncSetAttribute: attribute {attrib} with the value {value}");
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, text));
        }
        Ok(())
    })
}
