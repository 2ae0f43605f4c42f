//! The kernels of `kernels/native.cu`, loaded on one device.

use super::layout::{
    COMBINE_THREADS, CombineArguments, DISPATCH_THREADS, DispatchArguments, PREPARE_THREADS, PrepareArguments,
    SHARED_BYTES,
};
use crate::env::RuntimeKind;
use crate::error::Result;
use crate::sys::Base;
use crate::sys::cuda::{DeviceFacts, Stream};
use crate::sys::module::{Function, Grid, Module};
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_int, c_void};

/// With the zero byte at its end that the driver asks for.
const PTX: &str = concat!(include_str!("../../../../kernels/native.ptx"), "\0");

/// Machine code by compute capability (90 is 9.0), in releases alone (build.rs).
const CUBINS: &[(i32, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// As a compiler's own machine code lies in a program: its headers have 64-bit fields, which the driver may read in place.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

/// The machine code for a GPU; it runs on later ones of the same generation.
fn cubin(runtime: RuntimeKind, facts: &DeviceFacts) -> Option<&'static [u8]> {
    let (major, _) = facts.compute_capability;
    let found = CUBINS.iter().find(|(architecture, _)| *architecture == major * 10);
    found.filter(|_| runtime == RuntimeKind::Cuda).map(|(_, cubin)| &cubin.0)
}

#[derive(Debug)]
pub(super) struct Kernels {
    module: Module,
    prepare: Function,
    dispatch: Function,
    /// By row type: bf16, f16, f32.
    combine: [Function; 3],
}

impl Kernels {
    /// Loads them into the current context. Without machine code for its GPU the driver translates them, or finds them in its cache.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn load(base: &'static Base, facts: &DeviceFacts) -> Result<Self> {
        let cuda = &base.cuda;
        let module = match cubin(base.runtime, facts) {
            Some(cubin) => Module::load_cubin(cuda, cubin),
            None => Module::load(cuda, PTX),
        }?;
        let function = |name: &CStr| {
            let function = module.function(name)?;
            let (attribute, bytes) = (b::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES as c_int);
            // SAFETY: the function is live.
            let code = unsafe { (cuda.cuFuncSetAttribute)(function.0, attribute, bytes) };
            cuda.check("cuFuncSetAttribute", code).map(|()| function)
        };
        let (prepare, dispatch) = (function(c"nvte_ep_native_prepare")?, function(c"nvte_ep_native_dispatch")?);
        let combine = [
            function(c"nvte_ep_native_combine_bf16")?,
            function(c"nvte_ep_native_combine_f16")?,
            function(c"nvte_ep_native_combine_f32")?,
        ];
        Ok(Self { module, prepare, dispatch, combine })
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
        function: Function,
        blocks: u32,
        threads: u32,
        shared_bytes: u32,
        arguments: &A,
        stream: Stream,
    ) -> Result<()> {
        let mut pointers: [*mut c_void; 1] = [std::ptr::from_ref(arguments).cast_mut().cast()];
        // SAFETY: nothing is written through the pointer; the rest is the caller's.
        unsafe { self.module.launch(function, Grid { blocks, threads, shared_bytes }, &mut pointers, stream) }
    }

    /// Unloads them; nothing queued uses them any more.
    pub(super) fn unload(self) -> Result<()> {
        // SAFETY: passed on, and this is the module's end.
        unsafe { self.module.unload() }
    }
}
