//! Whether this process was forked off one that uses a GPU: its memory is a copy of the parent's, but neither CUDA nor NCCL
//! work in it.

use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use once_cell::sync::OnceCell;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// A page that the kernel clears in forked children: asking costs a load, where asking for the process's number is a
/// call into the kernel.
#[derive(Debug)]
pub(super) struct Mark(MmapRaw);

/// Published once there is an EP group.
static MARK: OnceCell<Mark> = OnceCell::new();

impl Mark {
    /// A mark that is set: whoever finds it unset is a child.
    ///
    /// # Errors
    /// The system has no page, or cannot clear it in children: then a child could not be told from its parent, and its
    /// calls would hang.
    pub(super) fn new() -> Result<Self> {
        let page = || {
            let page = MmapRaw::from(MmapOptions::new().len(size_of::<AtomicU8>()).map_anon()?);
            // SAFETY: the advice is about a page of our own.
            let advised = unsafe { libc::madvise(page.as_mut_ptr().cast(), page.len(), libc::MADV_WIPEONFORK) };
            if advised == 0 { Ok(page) } else { Err(io::Error::last_os_error()) }
        };
        let mark = Self(page().map_err(|error: io::Error| {
            Error::Preflight {
                problem: format!("forked children of this process could not be told from it ({error})"),
                remedy:
                    "the library needs one page of memory that is cleared in children (MADV_WIPEONFORK, Linux 4.14): \
                     update the system, or raise the memory limit"
                        .into(),
            }
        })?);
        mark.word().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    fn word(&self) -> &AtomicU8 {
        // SAFETY: the page stays mapped, readable and writable, and is used as this one atomic only.
        unsafe { &*self.0.as_ptr().cast() }
    }

    fn is_child(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }

    /// From now on a forked child of this process is known as one.
    pub(super) fn publish(self) {
        // An earlier group's serves too.
        let _ = MARK.set(self);
    }
}

pub(super) fn is_child() -> bool {
    MARK.get().is_some_and(Mark::is_child)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_mark_is_set() {
        for _ in 0..200 {
            let place = OnceCell::<Mark>::new();
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| place.wait().is_child());
                place.set(Mark::new().unwrap()).unwrap();
                assert!(!reader.join().unwrap(), "the process itself is no child");
            });
        }
        let mark = Mark::new().unwrap();
        // SAFETY: the child looks at memory and ends, and no more.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(if mark.is_child() { 7 } else { 8 }) };
        }
        let mut status = 0;
        // SAFETY: `status` is live, and the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 7);
        assert!(!mark.is_child());
    }
}
