//! The kernels of `kernels/native.cu`, loaded on one device.

use super::layout::{
    COMBINE_THREADS, CombineArguments, DISPATCH_THREADS, DispatchArguments, PREPARE_THREADS, PrepareArguments,
    SHARED_BYTES,
};
use crate::error::{Error, Result};
use crate::sys::cuda::{Cuda, Stream};
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_int, c_void};

/// With the zero byte at its end that the driver asks for.
const PTX: &str = concat!(include_str!("../../../../kernels/native.ptx"), "\0");

#[derive(Debug)]
pub(super) struct Kernels {
    cuda: &'static Cuda,
    module: b::CUmodule,
    prepare: b::CUfunction,
    dispatch: b::CUfunction,
    /// By row type: bf16, f16, f32.
    combine: [b::CUfunction; 3],
}

// SAFETY: modules and functions belong to the device's primary context, whatever thread names them.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Loads them into the current context; the driver translates them for its GPU, or finds them in its cache.
    ///
    /// # Errors
    /// The driver's; on the host runtime, that it has no such kernels.
    pub(super) fn load(cuda: &'static Cuda) -> Result<Self> {
        let set_attribute = cuda.cuFuncSetAttribute.ok_or_else(|| Error::Preflight {
            problem: "the native engine's kernels run on GPUs only".into(),
            remedy: "set the option backend, or NVTE_EP_BACKEND, to nccl_ep or auto".into(),
        })?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends in a zero byte, and `module` lives across the call.
        cuda.check("cuModuleLoadData", unsafe { (cuda.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) })?;
        let function = |name: &CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is live, and `function` lives across the call.
            let code = unsafe { (cuda.cuModuleGetFunction)(&raw mut function, module, name.as_ptr()) };
            cuda.check("cuModuleGetFunction", code)?;
            let (attribute, bytes) = (b::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES as c_int);
            // SAFETY: the function is live.
            let code = unsafe { set_attribute(function, attribute, bytes) };
            cuda.check("cuFuncSetAttribute", code).map(|()| function)
        };
        Ok(Self {
            cuda,
            module,
            prepare: function(c"nvte_ep_native_prepare")?,
            dispatch: function(c"nvte_ep_native_dispatch")?,
            combine: [
                function(c"nvte_ep_native_combine_bf16")?,
                function(c"nvte_ep_native_combine_f16")?,
                function(c"nvte_ep_native_combine_f32")?,
            ],
        })
    }

    /// # Safety
    /// What the arguments name is device memory that lives until the queued work is done; `stream` is of the device.
    pub(super) unsafe fn prepare(&self, arguments: &PrepareArguments, shared: u32, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.launch(self.prepare, arguments.group.blocks, PREPARE_THREADS, shared, arguments, stream) }
    }

    /// # Safety
    /// As for [`Kernels::prepare`].
    pub(super) unsafe fn dispatch(&self, arguments: &DispatchArguments, shared: u32, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.launch(self.dispatch, arguments.group.blocks, DISPATCH_THREADS, shared, arguments, stream) }
    }

    /// # Safety
    /// As for [`Kernels::prepare`].
    pub(super) unsafe fn combine(&self, arguments: &CombineArguments, shared: u32, stream: Stream) -> Result<()> {
        let function = self.combine[arguments.row_type as usize];
        // SAFETY: passed on.
        unsafe { self.launch(function, arguments.group.blocks, COMBINE_THREADS, shared, arguments, stream) }
    }

    /// # Safety
    /// `arguments` is what the kernel takes, by value.
    unsafe fn launch<A>(
        &self,
        function: b::CUfunction,
        blocks: u32,
        threads: u32,
        shared: u32,
        arguments: &A,
        stream: Stream,
    ) -> Result<()> {
        let mut pointers: [*mut c_void; 1] = [std::ptr::from_ref(arguments).cast_mut().cast()];
        let (stream, pointers, none) = (stream.as_raw(), pointers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the driver copies the arguments, and writes nothing through the pointers; the rest is the caller's.
        let code = unsafe {
            (self.cuda.cuLaunchKernel)(function, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, none)
        };
        self.cuda.check("cuLaunchKernel", code)
    }

    /// Unloads them; nothing queued uses them any more.
    pub(super) fn unload(self) -> Result<()> {
        // SAFETY: the module is live.
        self.cuda.check("cuModuleUnload", unsafe { (self.cuda.cuModuleUnload)(self.module) })
    }
}
