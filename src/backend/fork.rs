//! Whether this process was forked off one that uses a GPU: its memory is a copy of the parent's, but neither CUDA nor NCCL
//! work in it.

use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use once_cell::sync::OnceCell;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// A page that the kernel clears in forked children: asking costs a load, where asking for the process's number is a
/// call into the kernel.
static MARK: OnceCell<MmapRaw> = OnceCell::new();

fn mark(page: &MmapRaw) -> &AtomicU8 {
    // SAFETY: the page stays mapped, readable and writable, and is used as this one atomic only.
    unsafe { &*page.as_ptr().cast() }
}

/// From now on a forked child is known as one.
pub(super) fn mark_parent() {
    let page = MARK.get_or_try_init(|| -> io::Result<MmapRaw> {
        let page = MmapRaw::from(MmapOptions::new().len(size_of::<AtomicU8>()).map_anon()?);
        // SAFETY: the advice is about a page of our own.
        let advised = unsafe { libc::madvise(page.as_mut_ptr().cast(), page.len(), libc::MADV_WIPEONFORK) };
        if advised == 0 { Ok(page) } else { Err(io::Error::last_os_error()) }
    });
    match page {
        Ok(page) => mark(page).store(1, Ordering::Relaxed),
        Err(error) => tracing::warn!(target: "nvte_ep", "forked children cannot be told ({error})"),
    }
}

pub(super) fn is_child() -> bool {
    MARK.get().is_some_and(|page| mark(page).load(Ordering::Relaxed) == 0)
}

/// # Errors
/// This is a forked child.
pub(super) fn require_parent() -> Result<()> {
    if !is_child() {
        return Ok(());
    }
    Err(Error::State(
        "this process was forked off one that has used an EP group, and CUDA does not work in it: call in the parent, or \
         start processes anew (multiprocessing's spawn)"
            .into(),
    ))
}
