//! The control block of a channel: what its ranks tell each other, all of it atomics in shared memory.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nvte_ep_bindings::{cudaErrorOperatingSystem, ncclInvalidArgument, ncclSystemError};

use crate::fault::{Fault, Outcome};
use crate::rule::Rule;
use crate::sys::{self, FileId, Mapping};

/// Marks a control block and its format.
pub(super) const MAGIC: u32 = 0x4e56_0003;

const TEXT_WORDS: usize = 64;
pub(super) const MEMBER_FREE: u32 = 0;
pub(super) const MEMBER_TAKEN: u32 = 1;
pub(super) const MEMBER_READY: u32 = 2;

/// Text in shared memory; written before and read after an atomic that orders the two.
#[repr(C)]
pub(super) struct Text([AtomicU64; TEXT_WORDS]);

impl Text {
    pub(super) fn store(&self, text: &str) {
        let mut bytes = [0u8; TEXT_WORDS * 8];
        let mut len = text.len().min(bytes.len());
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        for (word, chunk) in self.0.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
    }

    pub(super) fn load(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
    }
}

#[repr(C)]
pub(super) struct Header {
    pub(super) magic: AtomicU32,
    pub(super) ranks: AtomicU32,
    /// Futex word: moves whenever a waiting rank should look again.
    pub(super) bell: AtomicU32,
    /// 0, or 1 + the rank whose failure ended the channel; it claims `failure_claim` first and sets this last.
    pub(super) failed_rank: AtomicU32,
    pub(super) failure_claim: AtomicU32,
    pub(super) reserved: AtomicU32,
    pub(super) failure: Text,
}

/// What one rank says about one operation.
#[repr(C)]
pub(super) struct Announcement {
    pub(super) number: AtomicU64,
    pub(super) digest: AtomicU64,
    /// Bytes offered in the staging of this parity.
    pub(super) bytes: AtomicU64,
    pub(super) args: [AtomicU64; 4],
    /// 0, or which replay of a graph the operation is from.
    pub(super) replay: AtomicU64,
    pub(super) text: Text,
}

/// A file of the rank that its peers open: the number of its descriptor, and which file that is.
#[repr(C)]
#[derive(Default)]
pub(super) struct SharedFile {
    /// 1 + the number; 0 for none.
    pub(super) number: AtomicU32,
    pub(super) reserved: AtomicU32,
    pub(super) device: AtomicU64,
    pub(super) inode: AtomicU64,
}

impl SharedFile {
    /// Offers a descriptor of this process.
    pub(super) fn offer(&self, fd: &OwnedFd) -> io::Result<()> {
        let id = FileId::of(fd.as_fd())?;
        self.device.store(id.device, Ordering::Relaxed);
        self.inode.store(id.inode, Ordering::Relaxed);
        self.number.store(fd.as_raw_fd() as u32 + 1, Ordering::SeqCst);
        Ok(())
    }

    /// The descriptor's number and file, if one is offered.
    pub(super) fn get(&self) -> Option<(u32, FileId)> {
        let number = self.number.load(Ordering::SeqCst).checked_sub(1)?;
        let id = FileId { device: self.device.load(Ordering::Relaxed), inode: self.inode.load(Ordering::Relaxed) };
        Some((number, id))
    }
}

#[repr(C)]
pub(super) struct Member {
    pub(super) state: AtomicU32,
    pub(super) pid: AtomicU32,
    pub(super) start_time: AtomicU64,
    /// 1 + the ordinal of its device; 0 for none.
    pub(super) device: AtomicU32,
    pub(super) reserved: AtomicU32,
    /// The PID namespace that `pid` is a number of; 0 where it cannot be told.
    pub(super) pid_namespace: AtomicU64,
    /// The two staging files.
    pub(super) staging: [SharedFile; 2],
    /// The outbox, once there is one.
    pub(super) outbox: SharedFile,
    /// Barriers that the rank has reached.
    pub(super) arrived: AtomicU64,
    /// Operations that it is done with.
    pub(super) finished: AtomicU64,
    /// 0, or 1 + the operations after which it destroyed its end.
    pub(super) left: AtomicU64,
    pub(super) slots: [Announcement; 2],
}

/// The control block: header and one member a rank, all atomics.
pub(super) struct Control {
    pub(super) map: Mapping,
    pub(super) ranks: usize,
}

impl Control {
    pub(super) fn bytes(ranks: usize) -> usize {
        size_of::<Header>() + ranks * size_of::<Member>()
    }

    /// Maps a control block and agrees on its number of ranks with whoever came first.
    pub(super) fn open(fd: &OwnedFd, rank: usize, ranks: usize) -> Outcome<Self> {
        let bytes = Self::bytes(ranks);
        sys::reserve(fd.as_fd(), bytes).map_err(|e| system("cannot reserve the control block", &e))?;
        let map = Mapping::shared(fd.as_fd(), bytes).map_err(|e| system("cannot map the control block", &e))?;
        let control = Self { map, ranks };
        let header = control.header();
        header.magic.store(MAGIC, Ordering::Relaxed);
        let claimed = header.ranks.compare_exchange(0, ranks as u32, Ordering::SeqCst, Ordering::SeqCst);
        match claimed {
            Err(there) if there as usize != ranks => {
                let text = format!("ncclCommInitRank: rank {rank} says {ranks} ranks, another one said {there}");
                control.fail(rank, &text);
                Err(Fault::nccl(ncclInvalidArgument, text).breaks(Rule::ConfigDiffers))
            }
            _ => Ok(control),
        }
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the block is mapped, larger than a header, page-aligned, and zero bytes are valid atomics.
        unsafe { &*self.map.base().cast::<Header>() }
    }

    pub(super) fn members(&self) -> &[Member] {
        // SAFETY: `bytes` sized the mapping as a header followed by this many members, whose size is a multiple of 8.
        let first = unsafe { self.map.base().add(size_of::<Header>()) };
        // SAFETY: as above; zero bytes are valid atomics.
        unsafe { std::slice::from_raw_parts(first.cast::<Member>(), self.ranks) }
    }

    pub(super) fn ring(&self) {
        let bell = &self.header().bell;
        bell.fetch_add(1, Ordering::SeqCst);
        sys::futex_wake_all(bell);
    }

    /// Ends the channel for everyone, unless somebody has already.
    pub(super) fn fail(&self, rank: usize, text: &str) {
        let header = self.header();
        let mine = rank as u32 + 1;
        if header.failure_claim.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            header.failure.store(text);
            header.failed_rank.store(mine, Ordering::SeqCst);
            self.ring();
        }
    }

    pub(super) fn failure(&self) -> Option<(usize, String)> {
        let failed = self.header().failed_rank.load(Ordering::SeqCst);
        (failed != 0).then(|| (failed as usize - 1, self.header().failure.load()))
    }
}

pub(super) fn system(what: &str, error: &io::Error) -> Fault {
    Fault::both(cudaErrorOperatingSystem, ncclSystemError, format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_at_a_character() {
        let text = Text([const { AtomicU64::new(0) }; TEXT_WORDS]);
        text.store(&"é".repeat(400));
        assert_eq!(text.load(), "é".repeat(TEXT_WORDS * 4));
    }
}
