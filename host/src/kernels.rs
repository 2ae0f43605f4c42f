//! The kernels that this runtime can launch. It cannot run PTX: it knows the kernels of nvte-ep (`kernels/*.cu`) by name, and has
//! them compiled for the CPU.

use std::ffi::c_void;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::native::{self, Arguments};
use crate::queue::Stream;
use crate::tensor_check;

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its name in PTX.
    pub name: &'static str,
    work: Work,
}

#[derive(Debug)]
enum Work {
    /// `kernels/topk_idx.cu`, for indices of so many bytes.
    CopyTopkIdx(u32),
    /// One of the native engine's, by its number in native/kernels.cc.
    Native(u32),
}

static KERNELS: [Kernel; 7] = [
    Kernel { name: "nvte_ep_copy_topk_idx_i32", work: Work::CopyTopkIdx(4) },
    Kernel { name: "nvte_ep_copy_topk_idx_i64", work: Work::CopyTopkIdx(8) },
    Kernel { name: "nvte_ep_native_prepare", work: Work::Native(0) },
    Kernel { name: "nvte_ep_native_dispatch", work: Work::Native(1) },
    Kernel { name: "nvte_ep_native_combine_bf16", work: Work::Native(2) },
    Kernel { name: "nvte_ep_native_combine_f16", work: Work::Native(2) },
    Kernel { name: "nvte_ep_native_combine_f32", work: Work::Native(2) },
];

/// The kernels whose entries a PTX text has.
pub fn of_ptx(text: &str) -> Outcome<Vec<&'static Kernel>> {
    let entries = text.lines().filter_map(|line| line.trim_start().strip_prefix(".visible .entry "));
    let known = |line: &str| {
        let name = line.split('(').next().unwrap_or_default().trim();
        KERNELS.iter().find(|kernel| kernel.name == name).ok_or_else(|| {
            let text = format!("the host runtime cannot run PTX, and knows no kernel {name:?}");
            Fault::cuda(CUDA_ERROR_NO_BINARY_FOR_GPU, text)
        })
    };
    let kernels = entries.map(known).collect::<Outcome<Vec<_>>>()?;
    if kernels.is_empty() {
        return Err(Fault::cuda(CUDA_ERROR_INVALID_IMAGE, "the image is no PTX text with a kernel"));
    }
    Ok(kernels)
}

impl Kernel {
    /// Queues one launch of `blocks` blocks.
    ///
    /// # Safety
    ///
    /// `arguments` holds what the kernel's parameters are, and memory that it is given stays valid until the stream has
    /// got there.
    pub unsafe fn launch(&self, arguments: Arguments, blocks: u32, stream: &Arc<Stream>) -> Outcome<()> {
        if arguments.0.is_null() {
            return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, format!("{}: kernelParams is NULL", self.name)));
        }
        match self.work {
            // SAFETY: passed on.
            Work::CopyTopkIdx(width) => unsafe { copy_topk_idx(width, arguments, blocks, stream) },
            // SAFETY: passed on.
            Work::Native(kernel) => unsafe { native::launch(kernel, self.name, arguments, blocks, stream) },
        }
    }
}

unsafe extern "C" {
    /// In native/topk_idx.cc.
    fn nvte_ep_host_copy_topk_idx(
        given: *const c_void,
        width: u32,
        copied: *mut c_void,
        header: *mut c_void,
        log: *mut c_void,
        first_word: u32,
        second_word: u32,
        tokens: u32,
        top_k: u32,
        num_experts: u32,
        blocks: u32,
    );
}

/// Queues the kernel for indices of `width` bytes.
unsafe fn copy_topk_idx(width: u32, arguments: Arguments, blocks: u32, stream: &Arc<Stream>) -> Outcome<()> {
    // SAFETY: the caller passes these eight.
    let pointers = unsafe { arguments.0.cast::<[*const c_void; 8]>().read() };
    // SAFETY: the first four are addresses.
    let address = |index: usize| unsafe { pointers[index].cast::<u64>().read_unaligned() };
    // SAFETY: the fifth is two numbers of 32 bits.
    let [first_word, second_word] = unsafe { pointers[4].cast::<[u32; 2]>().read_unaligned() };
    // SAFETY: the others are numbers of 32 bits.
    let number = |index: usize| unsafe { pointers[index].cast::<u32>().read_unaligned() };
    let (tokens, top_k, num_experts) = (number(5), number(6), number(7));
    let (indices, row_bytes) = (tokens as usize * top_k as usize, (width * top_k) as usize);
    // SAFETY: the caller vouches for the memory.
    let span = |index: usize, bytes: usize| unsafe { Span::new(address(index) as *const c_void, bytes) };
    let (given, copied) = (span(0, tokens as usize * row_bytes)?, span(1, indices * 8)?);
    // Two words of the header, two of the total, and a count of each block.
    let (header, log) = (span(2, (4 + blocks as usize) * 4)?, address(3) as usize);
    if log == 0 || !log.is_multiple_of(8) {
        return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "nvte_ep_copy_topk_idx: log is no place of 8 bytes"));
    }
    let run = move || {
        tensor_check::written("nvte_ep_copy_topk_idx: topk_idx", &given, row_bytes, 0..tokens as usize)?;
        let places = [given.address(), copied.address(), header.address(), log];
        let [given, copied, header, log] = places.map(std::ptr::with_exposed_provenance_mut::<c_void>);
        // SAFETY: the caller vouches for the memory, which is of the sizes that `span` looked at.
        unsafe {
            nvte_ep_host_copy_topk_idx(
                given,
                width,
                copied,
                header,
                log,
                first_word,
                second_word,
                tokens,
                top_k,
                num_experts,
                blocks,
            );
        }
        Ok(())
    };
    stream.enqueue(&[given, copied, header], run).map(drop)
}
