//! Memory for when the C library has none left.
//!
//! Strings, collections, locks and threads of Rust end the process where an allocation fails, and an allocator may not
//! unwind. So the C libraries allocate through [`Reserve`]: where malloc fails, it takes the memory from pages that have been set
//! aside, and the call goes on to its end. Each call begins with `require`, which refuses it before it has any effect
//! where too little of the reserve is left. What grows with what a caller asks for is not left to the reserve: those
//! collections grow by `try_reserve`.

use crate::error::{Error, Result};
use linked_list_allocator::Heap;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of the reserve. They are zeroes of the library's file, so they cost no memory before they are used.
const BYTES: usize = 2 << 20;

/// What a call may take; initialize, which takes most, was seen to take less than 100 kB.
const OF_A_CALL: usize = BYTES / 2;

#[repr(align(4096))]
struct Pages(UnsafeCell<MaybeUninit<[u8; BYTES]>>);

// SAFETY: only what `HEAP`, which is locked, has given out is touched, by whom it was given to.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new(MaybeUninit::uninit()));

/// What of the pages is free. The standard library's lock allocates nothing.
static HEAP: Mutex<Heap> = Mutex::new(Heap::empty());

/// Bytes in use, as `HEAP` counts them.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The allocator of the C libraries: malloc, and the reserve where that fails.
#[derive(Debug)]
pub struct Reserve;

fn heap() -> MutexGuard<'static, Heap> {
    let mut heap = HEAP.lock().unwrap_or_else(PoisonError::into_inner);
    if heap.size() == 0 {
        // SAFETY: the pages are this heap's alone, for ever.
        unsafe { heap.init(PAGES.0.get().cast(), BYTES) };
    }
    heap
}

fn is_of_reserve(memory: *mut u8) -> bool {
    memory.addr().wrapping_sub(PAGES.0.get().addr()) < BYTES
}

/// Memory of the reserve; null if there is too little.
#[cold]
fn take(layout: Layout) -> *mut u8 {
    let mut heap = heap();
    let memory = heap.allocate_first_fit(layout).map_or(null_mut(), NonNull::as_ptr);
    USED.store(heap.used(), Ordering::Relaxed);
    memory
}

/// # Safety
/// `memory` was taken with this layout, and is not used any more.
#[cold]
unsafe fn give(memory: *mut u8, layout: Layout) {
    let mut heap = heap();
    if let Some(memory) = NonNull::new(memory) {
        // SAFETY: the caller vouches for it.
        unsafe { heap.deallocate(memory, layout) };
    }
    USED.store(heap.used(), Ordering::Relaxed);
}

/// Moves what `old` holds to memory of the reserve; null, and nothing done, if there is too little.
///
/// # Safety
/// `old` is memory of this allocator with layout `old_layout`, and is not used any more if the result is not null.
#[cold]
unsafe fn move_here(old: *mut u8, old_layout: Layout, layout: Layout) -> *mut u8 {
    let new = take(layout);
    if !new.is_null() {
        // SAFETY: both have so many bytes, and are not one memory.
        unsafe { new.copy_from_nonoverlapping(old, old_layout.size().min(layout.size())) };
        // SAFETY: the caller vouches for it.
        unsafe { Reserve.dealloc(old, old_layout) };
    }
    new
}

// SAFETY: each memory is the system's or the reserve's, whole and its own, and goes back to whom it came from.
unsafe impl GlobalAlloc for Reserve {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { take(layout) } else { memory }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if !memory.is_null() {
            return memory;
        }
        let memory = take(layout);
        if !memory.is_null() {
            // SAFETY: it has so many bytes.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if is_of_reserve(memory) {
            // SAFETY: passed on.
            unsafe { give(memory, layout) }
        } else {
            // SAFETY: passed on.
            unsafe { System.dealloc(memory, layout) }
        }
    }

    #[inline]
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: a size that realloc is asked for fits a layout, by its contract.
        let new_layout = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        if is_of_reserve(old) {
            // SAFETY: passed on.
            let memory = unsafe { System.alloc(new_layout) };
            if memory.is_null() {
                // SAFETY: passed on.
                return unsafe { move_here(old, layout, new_layout) };
            }
            // SAFETY: both have so many bytes.
            unsafe { memory.copy_from_nonoverlapping(old, layout.size().min(bytes)) };
            // SAFETY: it was taken with this layout.
            unsafe { give(old, layout) };
            return memory;
        }
        // SAFETY: passed on.
        let memory = unsafe { System.realloc(old, layout, bytes) };
        // SAFETY: what the system did not move is as it was.
        if memory.is_null() { unsafe { move_here(old, layout, new_layout) } } else { memory }
    }
}

/// Refuses the call of the function `name` if the reserve may be too small for it and the system has no memory either.
///
/// # Errors
/// [`Error::OutOfMemory`].
#[inline]
pub(crate) fn require(name: &str) -> Result<()> {
    match USED.load(Ordering::Relaxed) {
        0 => Ok(()),
        used => look(name, used),
    }
}

#[cold]
fn look(name: &str, used: usize) -> Result<()> {
    tracing::warn!(target: "nvte_ep", "memory ran out: {used} bytes of the library's reserve of {BYTES} are in use");
    // What gives memory back goes on.
    let gives_back = ["shutdown", "destroy", "free", "deregister", "unregister"].iter().any(|word| name.contains(word));
    if gives_back || BYTES - used >= OF_A_CALL {
        return Ok(());
    }
    let layout = Layout::new::<[u8; OF_A_CALL]>();
    // SAFETY: the layout is not empty.
    let memory = unsafe { System.alloc(layout) };
    if memory.is_null() {
        return Err(Error::OutOfMemory { what: "a call".into(), bytes: OF_A_CALL });
    }
    // SAFETY: allocated with this layout just now.
    unsafe { System.dealloc(memory, layout) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 16).unwrap()
    }

    /// Tests of one process share the reserve, so that there is one.
    #[test]
    fn what_malloc_does_not_give_comes_from_the_reserve_and_goes_back() {
        assert!(require("nvte_ep_prepare").is_ok());
        let first = take(layout(1000));
        assert!(is_of_reserve(first) && first.cast::<u128>().is_aligned());
        assert!(USED.load(Ordering::Relaxed) >= 1000);
        // SAFETY: it has so many bytes.
        unsafe { first.write_bytes(7, 1000) };

        // The system refuses what no memory has; of the reserve there is less too, and the old memory stays.
        let too_much = layout(usize::MAX / 4);
        // SAFETY: a valid layout.
        assert!(unsafe { Reserve.alloc(too_much) }.is_null());
        // SAFETY: as above.
        assert!(unsafe { Reserve.alloc_zeroed(too_much) }.is_null());
        // SAFETY: taken above with this layout.
        assert!(unsafe { Reserve.realloc(first, layout(1000), too_much.size()) }.is_null());

        // Memory of the system moves here whole, and zeroed memory is zero.
        // SAFETY: a valid layout.
        let of_system = unsafe { Reserve.alloc(layout(64)) };
        assert!(!is_of_reserve(of_system));
        // SAFETY: it has so many bytes.
        unsafe { of_system.write_bytes(9, 64) };
        // SAFETY: allocated with this layout, and not used any more.
        let moved = unsafe { move_here(of_system, layout(64), layout(128)) };
        assert!(is_of_reserve(moved));
        // SAFETY: it has so many bytes, of which 64 were copied.
        assert!(unsafe { std::slice::from_raw_parts(moved, 64) }.iter().all(|byte| *byte == 9));

        // Memory of the reserve that grows is the system's again.
        // SAFETY: taken with this layout.
        let grown = unsafe { Reserve.realloc(first, layout(1000), 2000) };
        assert!(!is_of_reserve(grown));
        // SAFETY: it has so many bytes, of which 1000 were copied.
        assert!(unsafe { std::slice::from_raw_parts(grown, 1000) }.iter().all(|byte| *byte == 7));
        // SAFETY: allocated with this layout.
        unsafe { Reserve.dealloc(grown, layout(2000)) };
        // SAFETY: as above.
        unsafe { Reserve.dealloc(moved, layout(128)) };
        assert_eq!(USED.load(Ordering::Relaxed), 0, "all is back");

        // More than a half in use: calls go on as long as the system has memory.
        let most = take(layout(OF_A_CALL + 4096));
        assert!(!most.is_null() && require("nvte_ep_prepare").is_ok() && require("nvte_ep_shutdown").is_ok());
        // SAFETY: taken with this layout.
        unsafe { give(most, layout(OF_A_CALL + 4096)) };
        assert!(take(layout(BYTES + 1)).is_null());
        assert_eq!(USED.load(Ordering::Relaxed), 0);
    }
}
