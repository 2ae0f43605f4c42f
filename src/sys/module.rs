//! Kernels of ours: a PTX text, loaded on one device.

use super::cuda::{Cuda, Stream};
use crate::error::Result;
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_void};

/// The kernels of one text.
#[derive(Debug)]
pub(crate) struct Module {
    cuda: &'static Cuda,
    raw: b::CUmodule,
}

// SAFETY: modules belong to the device's primary context, whatever thread names them.
unsafe impl Send for Module {}

/// One kernel of a module, as long as that is loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(pub(crate) b::CUfunction);

// SAFETY: as for `Module`.
unsafe impl Send for Function {}

/// How a kernel is launched: one-dimensional.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: u32,
    /// Of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

impl Module {
    /// Loads `ptx`, which ends with the zero byte that the driver asks for, into the current context; the driver translates it for
    /// its GPU, or finds it in its cache.
    pub(crate) fn load(cuda: &'static Cuda, ptx: &str) -> Result<Self> {
        assert!(ptx.ends_with('\0'), "the driver reads up to a zero byte");
        // SAFETY: the text ends in a zero byte.
        unsafe { Self::load_image(cuda, ptx.as_ptr()) }
    }

    /// Loads machine code, which is for this GPU, into the current context.
    pub(crate) fn load_cubin(cuda: &'static Cuda, cubin: &[u8]) -> Result<Self> {
        assert!(cubin.starts_with(b"\x7fELF"), "the driver reads what the ELF header says");
        // SAFETY: a whole ELF file.
        unsafe { Self::load_image(cuda, cubin.as_ptr()) }
    }

    /// # Safety
    /// `image` is an image that tells its own end.
    unsafe fn load_image(cuda: &'static Cuda, image: *const u8) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the caller's image; `raw` lives across the call.
        cuda.check("cuModuleLoadData", unsafe { (cuda.cuModuleLoadData)(&raw mut raw, image.cast()) })?;
        Ok(Self { cuda, raw })
    }

    /// The kernel of that name.
    pub(crate) fn function(&self, name: &CStr) -> Result<Function> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is live, and `function` lives across the call.
        let code = unsafe { (self.cuda.cuModuleGetFunction)(&raw mut function, self.raw, name.as_ptr()) };
        self.cuda.check("cuModuleGetFunction", code).map(|()| Function(function))
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// `arguments` point at what the kernel takes, which the call reads; what that names is fit for the kernel; the function is this
    /// module's; `stream` is a stream of its device.
    #[inline]
    pub(crate) unsafe fn launch(
        &self,
        Function(function): Function,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Stream,
    ) -> Result<()> {
        let Grid { blocks, threads, shared_bytes } = grid;
        let (stream, arguments, none) = (stream.as_raw(), arguments.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: passed on.
        let code = unsafe {
            (self.cuda.cuLaunchKernel)(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, none)
        };
        self.cuda.check("cuLaunchKernel", code)
    }

    /// Unloads the kernels.
    ///
    /// # Safety
    /// Nothing queued uses them any more, and no other call of this module comes after this.
    pub(crate) unsafe fn unload(&self) -> Result<()> {
        // SAFETY: passed on.
        self.cuda.check("cuModuleUnload", unsafe { (self.cuda.cuModuleUnload)(self.raw) })
    }
}
