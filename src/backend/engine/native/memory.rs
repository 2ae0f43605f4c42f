//! Memory of a group of the native engine: the segment in NCCL's symmetric memory, which peers reach, this rank's own device
//! memory, and a status in host memory that the kernels write.

use super::layout::{Group, GroupLayout, Status, WAITS};
use crate::backend::communicator::Communicator;
use crate::backend::engine::{Abort, Machine};
use crate::error::{Error, Result};
use crate::sys::Base;
use crate::sys::cuda::Stream;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Memory {
    base: &'static Base,
    comm: Communicator,
    segment: u64,
    window: usize,
    own: u64,
    status: *mut c_void,
}

// SAFETY: addresses of device and pinned memory; CUDA and NCCL take them from any thread.
unsafe impl Send for Memory {}

impl Memory {
    /// Allocates and registers; collective.
    ///
    /// # Safety
    /// The communicator is live, of the machine's NCCL, outlives the memory, and its device is current.
    pub(super) unsafe fn create(machine: &Machine<'_>, layout: &GroupLayout) -> Result<Self> {
        let Machine { base, comm, comm_facts, .. } = machine;
        let (cuda, nccl) = (&base.cuda, &base.nccl);
        let mut status = std::ptr::null_mut();
        let mut own = 0;
        let segment = nccl.mem_alloc(layout.segment_bytes)?;
        // SAFETY: `own` lives across the call.
        cuda.check("cuMemAlloc_v2", unsafe { (cuda.cuMemAlloc_v2)(&raw mut own, layout.own_bytes as usize) })?;
        // SAFETY: as above.
        cuda.check("cuMemAllocHost_v2", unsafe { (cuda.cuMemAllocHost_v2)(&raw mut status, size_of::<Status>()) })?;
        // SAFETY: room for a status, which nobody else knows yet; all zero bytes are one.
        unsafe { status.cast::<Status>().write_bytes(0, 1) };
        // Signals start at zero, before any peer can write one: registering is collective.
        // SAFETY: the default stream.
        let none = unsafe { Stream::bind(0) };
        // SAFETY: memory of these sizes, allocated just now.
        unsafe { cuda.zero(segment, layout.segment_bytes as usize, none) }?;
        // SAFETY: as above.
        unsafe { cuda.zero(own, layout.own_bytes as usize, none) }?;
        // SAFETY: takes nothing.
        cuda.check("cuCtxSynchronize", unsafe { (cuda.cuCtxSynchronize)() })?;
        // SAFETY: the caller vouches for the communicator; the memory is NCCL's and stays until the window is gone.
        let window = unsafe { nccl.window_register(comm.as_raw(), segment, layout.segment_bytes) }?;
        let mut peers = Vec::new();
        for rank in 0..comm_facts.size {
            // SAFETY: the window is live.
            let peer = unsafe { nccl.peer_address(window, rank) }?;
            if peer == 0 {
                return Err(Error::Preflight {
                    problem: format!("rank {rank}'s memory cannot be reached by load and store"),
                    remedy: "set the option backend, or NVTE_EP_BACKEND, to nccl_ep".into(),
                });
            }
            peers.push(peer);
        }
        // SAFETY: the list lives until the copy is done; its room is at the start of our own memory.
        let code = unsafe {
            (cuda.cuMemcpyHtoDAsync_v2)(own, peers.as_ptr().cast(), size_of_val(peers.as_slice()), none.as_raw())
        };
        cuda.check("cuMemcpyHtoDAsync_v2", code)?;
        // SAFETY: takes nothing.
        cuda.check("cuCtxSynchronize", unsafe { (cuda.cuCtxSynchronize)() })?;
        Ok(Self { base, comm: *comm, segment, window, own, status })
    }

    /// The group for the kernels, with its addresses.
    pub(super) fn addresses(&self, layout: &GroupLayout) -> Group {
        Group {
            peers: self.own,
            own: self.segment,
            counters: self.own + layout.counters_offset,
            histogram: self.own + layout.histogram_offset,
            status: self.status.expose_provenance() as u64,
            ..layout.group
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: a word of the status, which lives as long as this does; the kernels and we access it atomically.
        unsafe { AtomicU32::from_ptr(self.status.wrapping_byte_add(offset).cast()) }
    }

    fn long(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as for `word`.
        unsafe { AtomicU64::from_ptr(self.status.wrapping_byte_add(offset).cast()) }
    }

    /// Whether no kernel has found anything wrong.
    #[inline]
    pub(super) fn is_sound(&self) -> bool {
        let words = [std::mem::offset_of!(Status, failed), std::mem::offset_of!(Status, overflowed)];
        words.iter().all(|offset| self.word(*offset).load(Ordering::Relaxed) == 0)
    }

    /// The word that ends waits.
    pub(super) fn abort(&self) -> Abort {
        Abort(NonNull::from(self.word(std::mem::offset_of!(Status, abort))))
    }

    /// What a kernel waited for in vain.
    pub(super) fn failed_wait(&self) -> Option<String> {
        let read = |offset| self.word(offset).load(Ordering::Acquire);
        let failed = read(std::mem::offset_of!(Status, failed));
        let (_, what) = WAITS.iter().find(|(kind, _)| *kind == failed)?;
        Some(format!("rank {}: {what}", read(std::mem::offset_of!(Status, peer))))
    }

    /// The rows that a step needed beyond its capacity, once.
    pub(super) fn take_overflow(&self) -> Option<u64> {
        let overflowed = self.word(std::mem::offset_of!(Status, overflowed)).swap(0, Ordering::Acquire);
        (overflowed != 0).then(|| self.long(std::mem::offset_of!(Status, needed)).load(Ordering::Relaxed))
    }

    /// All indices of this group's life that were no expert.
    #[inline]
    pub(super) fn invalid_indices(&self) -> u64 {
        self.long(std::mem::offset_of!(Status, invalid_indices)).load(Ordering::Relaxed)
    }

    /// Frees all of it.
    pub(super) fn destroy(self) -> Result<()> {
        let (cuda, nccl) = (&self.base.cuda, &self.base.nccl);
        // SAFETY: the communicator outlives the group; the window is live, and no rank uses it any more.
        let window = unsafe { nccl.window_deregister(self.comm.as_raw(), self.window) };
        // SAFETY: the memory is ours, and nothing queued uses it any more.
        let segment = unsafe { nccl.mem_free(self.segment) };
        // SAFETY: as above.
        let own = cuda.check("cuMemFree_v2", unsafe { (cuda.cuMemFree_v2)(self.own) });
        // SAFETY: as above.
        let status = cuda.check("cuMemFreeHost", unsafe { (cuda.cuMemFreeHost)(self.status) });
        window.and(segment).and(own).and(status)
    }
}
