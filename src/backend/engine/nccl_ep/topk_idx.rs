//! The copy of the expert indices that NCCL EP gets to see: `kernels/topk_idx.cu` says what it holds and why.

use crate::backend::engine::invalid_indices::InvalidIndices;
use crate::dtype::DType;
use crate::error::Result;
use crate::sys::cuda::{Cuda, Stream};
use crate::sys::module::{Function, Grid, Module};
use crate::tensor::TensorView;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

const PTX: &str = concat!(include_str!("../../../../kernels/topk_idx.ptx"), "\0");

/// Tokens of a block; a block takes several where there are more than [`MAX_BLOCKS`] of them.
const THREADS: u32 = 128;
const MAX_BLOCKS: usize = 1024;
/// The kernels, loaded on one device, and what they report to the host.
#[derive(Debug)]
pub(super) struct IndexCopier {
    cuda: &'static Cuda,
    module: Module,
    int32: Function,
    int64: Function,
    /// Pinned host memory: all indices of this group's life that were no expert. The kernels add to it.
    invalid_indices: *mut c_void,
    log: InvalidIndices,
}

// SAFETY: pinned memory is any thread's.
unsafe impl Send for IndexCopier {}

impl IndexCopier {
    /// Loads them into the current context, which is that of `device`; the driver translates them for its GPU.
    pub(super) fn load(cuda: &'static Cuda, device: i32) -> Result<Self> {
        let module = Module::load(cuda, PTX)?;
        let int32 = module.function(c"nvte_ep_copy_topk_idx_i32")?;
        let int64 = module.function(c"nvte_ep_copy_topk_idx_i64")?;
        let mut invalid_indices = std::ptr::null_mut();
        // SAFETY: `invalid_indices` lives across the call.
        let code = unsafe { (cuda.cuMemAllocHost_v2)(&raw mut invalid_indices, size_of::<u64>()) };
        cuda.check("cuMemAllocHost_v2", code)?;
        // SAFETY: room for one u64, which nobody else knows yet.
        unsafe { invalid_indices.cast::<u64>().write(0) };
        Ok(Self { cuda, module, int32, int64, invalid_indices, log: InvalidIndices::new(device) })
    }

    fn found(&self) -> u64 {
        // SAFETY: the kernels' memory, which they add to atomically.
        unsafe { AtomicU64::from_ptr(self.invalid_indices.cast()) }.load(Ordering::Relaxed)
    }

    /// See [`InvalidIndices::report`].
    #[inline]
    pub(super) fn report(&mut self) {
        self.log.report(self.found());
    }

    /// See [`InvalidIndices::report_last`].
    pub(super) fn report_last(&mut self) {
        self.log.report_last(self.found());
    }

    /// Queues the copy of `topk_idx`, `[T, K]`, to the address `copied`, and adds the number of indices that are no
    /// expert to the uint32 at the address `invalid_indices`. That and the next, the kernel's own, are zero before.
    ///
    /// # Safety
    /// `topk_idx` is device memory; `copied` has room for T * K int64; all live until the queued work is done; `stream` is
    /// a stream of the device.
    pub(super) unsafe fn copy(
        &self,
        topk_idx: &TensorView,
        copied: u64,
        invalid_indices: u64,
        num_experts: u32,
        stream: Stream,
    ) -> Result<()> {
        let &[tokens, top_k] = topk_idx.shape.sizes() else { unreachable!("prepare checked that it is 2D") };
        if tokens > 0 {
            let function = if topk_idx.dtype == DType::Int32 { self.int32 } else { self.int64 };
            let (mut given, mut copied, mut invalid_indices, mut log) =
                (topk_idx.data, copied, invalid_indices, self.invalid_indices);
            let (mut token_count, mut top_k, mut num_experts) = (tokens as u32, top_k as u32, num_experts);
            let mut arguments: [*mut c_void; 7] = [
                (&raw mut given).cast(),
                (&raw mut copied).cast(),
                (&raw mut invalid_indices).cast(),
                (&raw mut log).cast(),
                (&raw mut token_count).cast(),
                (&raw mut top_k).cast(),
                (&raw mut num_experts).cast(),
            ];
            let blocks = tokens.div_ceil(THREADS as usize).min(MAX_BLOCKS) as u32;
            let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
            // SAFETY: the arguments are the kernel's seven; the caller vouches for the memory.
            unsafe { self.module.launch(function, grid, &mut arguments, stream) }?;
        }
        Ok(())
    }
}

impl Drop for IndexCopier {
    fn drop(&mut self) {
        // SAFETY: nothing queued uses it any more, and this is its end.
        let unloaded = unsafe { self.module.unload() };
        // SAFETY: the memory is ours, and nothing queued uses it any more.
        let freed = self.cuda.check("cuMemFreeHost", unsafe { (self.cuda.cuMemFreeHost)(self.invalid_indices) });
        for error in [unloaded, freed].into_iter().filter_map(Result::err) {
            tracing::warn!(target: "nvte_ep", "{error}");
        }
    }
}
