//! What a prepare does in front of NCCL EP, in one launch: the copy of the expert indices that NCCL EP gets to see, and the header
//! of the handle memory. `kernels/topk_idx.cu` says what they hold and why.

use crate::backend::engine::HeaderOut;
use crate::backend::engine::invalid_indices::InvalidIndices;
use crate::backend::routing::header::MAX_COUNTS;
use crate::dtype::DType;
use crate::error::Result;
use crate::sys::cuda::{Cuda, Stream};
use crate::sys::module::{Function, Grid, Module};
use crate::tensor::TensorView;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

const PTX: &str = concat!(include_str!("../../../../kernels/topk_idx.ptx"), "\0");

/// Blocks of a launch, each of which counts the indices that are no expert in a word of its own.
pub(super) const BLOCKS: usize = 32;
/// Threads of a block, by the number of tokens; a thread takes several where there are more.
const THREADS: std::ops::RangeInclusive<usize> = 128..=512;

const _: () = assert!(BLOCKS <= MAX_COUNTS);

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

    /// Indices that were no expert, so far.
    pub(super) fn found(&self) -> u64 {
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

    /// Queues the copy of `topk_idx`, `[T, K]`, to the address `copied`, and the header with a total of zero.
    ///
    /// # Safety
    /// `topk_idx` is device memory; `copied` has room for T * K int64; there is room for the header; all live until the queued
    /// work is done; `stream` is a stream of the device.
    #[inline]
    pub(super) unsafe fn copy(
        &self,
        topk_idx: &TensorView,
        copied: u64,
        header: &HeaderOut,
        num_experts: u32,
        stream: Stream,
    ) -> Result<()> {
        let &[tokens, top_k] = topk_idx.shape.sizes() else { unreachable!("prepare checked that it is 2D") };
        let function = if topk_idx.dtype == DType::Int32 { self.int32 } else { self.int64 };
        let (mut given, mut copied, mut address, mut log) =
            (topk_idx.data, copied, header.address, self.invalid_indices);
        let (mut words, mut token_count, mut top_k) = (header.words, tokens as u32, top_k as u32);
        let mut num_experts = num_experts;
        let mut arguments: [*mut c_void; 8] = [
            (&raw mut given).cast(),
            (&raw mut copied).cast(),
            (&raw mut address).cast(),
            (&raw mut log).cast(),
            (&raw mut words).cast(),
            (&raw mut token_count).cast(),
            (&raw mut top_k).cast(),
            (&raw mut num_experts).cast(),
        ];
        let threads = tokens.div_ceil(BLOCKS).next_multiple_of(32).clamp(*THREADS.start(), *THREADS.end());
        let grid = Grid { blocks: BLOCKS as u32, threads: threads as u32, shared_bytes: 0 };
        // SAFETY: the arguments are the kernel's eight; the caller vouches for the memory.
        unsafe { self.module.launch(function, grid, &mut arguments, stream) }
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
