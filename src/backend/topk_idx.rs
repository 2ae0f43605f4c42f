//! The copy of the expert indices that NCCL EP gets to see: `kernels/topk_idx.cu` says what it holds and why.

use crate::dtype::DType;
use crate::error::Result;
use crate::sys::cuda::{Cuda, Stream};
use crate::tensor::TensorView;
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_void};

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("../../kernels/topk_idx.ptx"), "\0").as_bytes())
{
    Ok(text) => text,
    Err(_) => panic!("a PTX text has no zero byte"),
};

/// Tokens of a block; a block takes several where there are more than [`MAX_BLOCKS`] of them.
const THREADS: u32 = 128;
const MAX_BLOCKS: usize = 1024;

/// The kernels, loaded on one device.
#[derive(Debug)]
pub(super) struct IndexCopier {
    cuda: &'static Cuda,
    module: b::CUmodule,
    int32: b::CUfunction,
    int64: b::CUfunction,
}

// SAFETY: modules and functions belong to the device's primary context, whatever thread names them.
unsafe impl Send for IndexCopier {}

impl IndexCopier {
    /// Loads them into the current context; the driver translates them for its GPU.
    pub(super) fn load(cuda: &'static Cuda) -> Result<Self> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends in a zero byte, and `module` lives across the call.
        cuda.check("cuModuleLoadData", unsafe { (cuda.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) })?;
        let function = |name: &CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is live, and `function` lives across the call.
            let code = unsafe { (cuda.cuModuleGetFunction)(&raw mut function, module, name.as_ptr()) };
            cuda.check("cuModuleGetFunction", code).map(|()| function)
        };
        let int32 = function(c"nvte_ep_copy_topk_idx_i32")?;
        let int64 = function(c"nvte_ep_copy_topk_idx_i64")?;
        Ok(Self { cuda, module, int32, int64 })
    }

    /// Queues the copy of `topk_idx`, `[T, K]`, to the address `copied`, and adds the number of indices that are no
    /// expert to the uint32 at the address `not_experts`.
    ///
    /// # Safety
    /// `topk_idx` is device memory; `copied` has room for T * K int64; all live until the queued work is done; `stream` is
    /// a stream of the device.
    pub(super) unsafe fn copy(
        &self,
        topk_idx: &TensorView,
        copied: u64,
        not_experts: u64,
        num_experts: u32,
        stream: Stream,
    ) -> Result<()> {
        let &[tokens, top_k] = topk_idx.shape.sizes() else { unreachable!("prepare checked that it is 2D") };
        if tokens > 0 {
            let function = if topk_idx.dtype == DType::Int32 { self.int32 } else { self.int64 };
            let (mut given, mut copied, mut not_experts) = (topk_idx.data, copied, not_experts);
            let (mut token_count, mut top_k, mut num_experts) = (tokens as u32, top_k as u32, num_experts);
            let mut arguments: [*mut c_void; 6] = [
                (&raw mut given).cast(),
                (&raw mut copied).cast(),
                (&raw mut not_experts).cast(),
                (&raw mut token_count).cast(),
                (&raw mut top_k).cast(),
                (&raw mut num_experts).cast(),
            ];
            let blocks = tokens.div_ceil(THREADS as usize).min(MAX_BLOCKS) as u32;
            let (raw_stream, arguments, none) = (stream.as_raw(), arguments.as_mut_ptr(), std::ptr::null_mut());
            // SAFETY: the arguments are the kernel's six, read by the call; the caller vouches for the memory.
            let code = unsafe {
                (self.cuda.cuLaunchKernel)(function, blocks, 1, 1, THREADS, 1, 1, 0, raw_stream, arguments, none)
            };
            self.cuda.check("cuLaunchKernel", code)?;
        }
        Ok(())
    }
}

impl Drop for IndexCopier {
    fn drop(&mut self) {
        // SAFETY: the module is live, and nothing queued uses it any more.
        let unloaded = self.cuda.check("cuModuleUnload", unsafe { (self.cuda.cuModuleUnload)(self.module) });
        if let Err(error) = unloaded {
            tracing::warn!(target: "nvte_ep", "{error}");
        }
    }
}
