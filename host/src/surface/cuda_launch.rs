//! The CUDA runtime interface: what programs compiled by nvcc call as they start, and to launch their kernels.
//!
//! Such a program starts and runs; a launch of a kernel of its own is an error that names it, since there is no GPU to run it.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use super::{put, runtime};
use crate::fault::{self, Fault, Outcome};

/// Kernels by the address of their host function.
static KERNELS: LazyLock<Mutex<HashMap<usize, String>>> = LazyLock::new(Mutex::default);

/// What `kernel<<<grid, block, memory, stream>>>` says, until the function behind it takes it.
#[derive(Clone, Copy)]
struct Configuration {
    grid: dim3,
    block: dim3,
    memory: usize,
    stream: *mut c_void,
}

thread_local! {
    static PUSHED: Cell<Option<Configuration>> = const { Cell::new(None) };
}

fn refuse(kernel: usize) -> Outcome<()> {
    let name = KERNELS.lock().get(&kernel).cloned();
    let name = name.map_or_else(|| format!("at {kernel:#x}"), |name| format!("{name:?}"));
    let text = format!("the kernel {name} was launched, but the host runtime has no GPU to run it");
    fault::report(&text);
    Err(Fault::cuda(cudaErrorNotSupported, text))
}

/// Registers the device code of a program or library; gives a handle for the calls that follow.
///
/// # Safety
///
/// Always safe to call; the code is not looked at.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaRegisterFatBinary(fatCubin: *mut c_void) -> *mut *mut c_void {
    // As the real one's, the handle points to a pointer.
    Box::into_raw(Box::new(fatCubin))
}

/// Ends the registration of device code.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaRegisterFatBinaryEnd(fatCubinHandle: *mut *mut c_void) {
    let _ = fatCubinHandle;
}

/// Takes a registration back.
///
/// # Safety
///
/// The handle is null or from `__cudaRegisterFatBinary`, and not used afterwards.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaUnregisterFatBinary(fatCubinHandle: *mut *mut c_void) {
    if !fatCubinHandle.is_null() {
        // SAFETY: made by `__cudaRegisterFatBinary`, and given back once.
        drop(unsafe { Box::from_raw(fatCubinHandle) });
    }
}

/// Loads registered device code: nothing to do.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaInitModule(fatCubinHandle: *mut *mut c_void) -> c_char {
    let _ = fatCubinHandle;
    1
}

/// Registers a kernel.
///
/// # Safety
///
/// `deviceName` is null or a C string.
#[unsafe(no_mangle)]
#[allow(non_snake_case, clippy::too_many_arguments, reason = "the C interface")]
pub unsafe extern "C" fn __cudaRegisterFunction(
    fatCubinHandle: *mut *mut c_void,
    hostFun: *const c_char,
    deviceFun: *mut c_char,
    deviceName: *const c_char,
    thread_limit: c_int,
    tid: *mut c_void,
    bid: *mut c_void,
    bDim: *mut dim3,
    gDim: *mut dim3,
    wSize: *mut c_int,
) {
    let _ = (fatCubinHandle, deviceFun, thread_limit, tid, bid, bDim, gDim, wSize);
    if !deviceName.is_null() {
        // SAFETY: a C string, by the caller's word.
        let name = unsafe { CStr::from_ptr(deviceName) }.to_string_lossy().into_owned();
        KERNELS.lock().insert(hostFun as usize, name);
    }
}

/// Registers a device variable, which no kernel will use.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, clippy::too_many_arguments, reason = "the C interface")]
pub unsafe extern "C" fn __cudaRegisterVar(
    fatCubinHandle: *mut *mut c_void,
    hostVar: *mut c_char,
    deviceAddress: *mut c_char,
    deviceName: *const c_char,
    ext: c_int,
    size: usize,
    constant: c_int,
    global: c_int,
) {
    let _ = (fatCubinHandle, hostVar, deviceAddress, deviceName, ext, size, constant, global);
}

/// Registers a managed variable; memory of the host stands for it.
///
/// # Safety
///
/// `hostVarPtrAddress` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, clippy::too_many_arguments, reason = "the C interface")]
pub unsafe extern "C" fn __cudaRegisterManagedVar(
    fatCubinHandle: *mut *mut c_void,
    hostVarPtrAddress: *mut *mut c_void,
    deviceAddress: *mut c_char,
    deviceName: *const c_char,
    ext: c_int,
    size: usize,
    constant: c_int,
    global: c_int,
) {
    let _ = (fatCubinHandle, deviceAddress, deviceName, ext, constant, global);
    if !hostVarPtrAddress.is_null() {
        let memory = vec![0u64; size.div_ceil(8)].leak();
        // SAFETY: not null, and writable by the caller's word.
        unsafe { hostVarPtrAddress.write(memory.as_mut_ptr().cast()) };
    }
}

/// Keeps how the next kernel is launched.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaPushCallConfiguration(
    gridDim: dim3,
    blockDim: dim3,
    sharedMem: usize,
    stream: *mut c_void,
) -> c_uint {
    PUSHED.set(Some(Configuration { grid: gridDim, block: blockDim, memory: sharedMem, stream }));
    0
}

/// Gives what the last launch said.
///
/// # Safety
///
/// The pointers are null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaPopCallConfiguration(
    gridDim: *mut dim3,
    blockDim: *mut dim3,
    sharedMem: *mut usize,
    stream: *mut c_void,
) -> cudaError_t {
    runtime(|_| {
        let missing = || Fault::cuda(cudaErrorMissingConfiguration, "a kernel is launched without a configuration");
        let Configuration { grid, block, memory, stream: on } = PUSHED.take().ok_or_else(missing)?;
        // SAFETY: the caller's contract.
        unsafe { put(gridDim, grid) }?;
        // SAFETY: the caller's contract.
        unsafe { put(blockDim, block) }?;
        // SAFETY: the caller's contract.
        unsafe { put(sharedMem, memory) }?;
        // SAFETY: the caller's contract.
        unsafe { put(stream.cast::<*mut c_void>(), on) }
    })
}

/// A kernel's handle: the address of its host function.
///
/// # Safety
///
/// `kernel` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaGetKernel(kernel: *mut *mut c_void, entryFuncAddr: *const c_void) -> cudaError_t {
    // SAFETY: the caller's contract.
    runtime(|_| unsafe { put(kernel, entryFuncAddr.cast_mut()) })
}

/// Refuses the launch of a kernel, by its handle.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn __cudaLaunchKernel(
    kernel: *mut c_void,
    gridDim: dim3,
    blockDim: dim3,
    args: *mut *mut c_void,
    sharedMem: usize,
    stream: cudaStream_t,
) -> cudaError_t {
    let _ = (gridDim, blockDim, args, sharedMem, stream);
    runtime(|_| refuse(kernel as usize))
}

/// Refuses the launch of a kernel, by its host function.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn cudaLaunchKernel(
    func: *const c_void,
    gridDim: dim3,
    blockDim: dim3,
    args: *mut *mut c_void,
    sharedMem: usize,
    stream: cudaStream_t,
) -> cudaError_t {
    let _ = (gridDim, blockDim, args, sharedMem, stream);
    runtime(|_| refuse(func as usize))
}
