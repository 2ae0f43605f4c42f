//! The kernels that this runtime can launch. It cannot run PTX: it knows the kernels of nvte-ep (`kernels/*.cu`) by name.
//! Those of the native engine it has compiled for the CPU ([`native`]); what the others do it does in Rust.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Reads the arguments, as `cuLaunchKernel` passes them, and queues the work; how many threads there would be makes no difference
    /// to what it does.
    InRust(unsafe fn(Arguments, &Arc<Stream>) -> Outcome<()>),
    /// One of the native engine's, by its number in native/kernels.cc.
    Native(u32),
}

static KERNELS: [Kernel; 7] = [
    Kernel { name: "nvte_ep_copy_topk_idx_i32", work: Work::InRust(copy_topk_idx::<4>) },
    Kernel { name: "nvte_ep_copy_topk_idx_i64", work: Work::InRust(copy_topk_idx::<8>) },
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
            Work::InRust(launch) => unsafe { launch(arguments, stream) },
            // SAFETY: passed on.
            Work::Native(kernel) => unsafe { native::launch(kernel, self.name, arguments, blocks, stream) },
        }
    }
}

/// `kernels/topk_idx.cu` for indices of `WIDTH` bytes.
unsafe fn copy_topk_idx<const WIDTH: usize>(arguments: Arguments, stream: &Arc<Stream>) -> Outcome<()> {
    // SAFETY: the caller passes these seven.
    let pointers = unsafe { arguments.0.cast::<[*const c_void; 7]>().read() };
    // SAFETY: the first four are addresses.
    let address = |index: usize| unsafe { pointers[index].cast::<u64>().read_unaligned() };
    // SAFETY: the others are numbers of 32 bits.
    let number = |index: usize| unsafe { pointers[index].cast::<u32>().read_unaligned() };
    let (tokens, top_k, num_experts) = (number(4) as usize, number(5) as usize, number(6));
    let indices = tokens * top_k;
    // SAFETY: the caller vouches for the memory.
    let span = |index: usize, bytes: usize| unsafe { Span::new(address(index) as *const c_void, bytes) };
    let (given, copied) = (span(0, indices * WIDTH)?, span(1, indices * 8)?);
    let (invalid_indices, log) = (span(2, 4)?, address(3));
    if log == 0 || log % 8 != 0 {
        return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, "nvte_ep_copy_topk_idx: log is no place of 8 bytes"));
    }
    let run = move || {
        tensor_check::written("nvte_ep_copy_topk_idx: topk_idx", &given, top_k * WIDTH, 0..tokens)?;
        let mut found = 0u32;
        let mut row = vec![0i64; top_k];
        for first in (0..indices).step_by(top_k.max(1)) {
            for (k, index) in row.iter_mut().enumerate() {
                let bytes = given.view((first + k) * WIDTH, WIDTH);
                *index = match bytes.try_into() {
                    Ok(wide) => i64::from_ne_bytes(wide),
                    Err(_) => i32::from_ne_bytes(bytes.try_into().expect("indices of 4 or 8 bytes")).into(),
                };
            }
            for (k, &index) in row.iter().enumerate() {
                let beyond = index >= i64::from(num_experts);
                found += u32::from(beyond);
                let kept = if index < 0 || beyond || row[..k].contains(&index) { -1 } else { index };
                copied.write((first + k) * 8, &kept.to_ne_bytes());
            }
        }
        let before = u32::from_ne_bytes(invalid_indices.view(0, 4).try_into().expect("four bytes"));
        invalid_indices.write(0, &(before + found).to_ne_bytes());
        if found > 0 {
            // SAFETY: the caller vouches for the memory, which other kernels and the host's reader take as atomic.
            let log = unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(log as usize)) };
            log.fetch_add(found.into(), Ordering::Relaxed);
        }
        Ok(())
    };
    stream.enqueue(&[given, copied, invalid_indices], run).map(drop)
}
