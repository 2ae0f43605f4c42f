//! Windows: memory that is registered with a communicator, and mapped by its peers.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::batch;
use crate::check;
use crate::fault::{Fault, Outcome};
use crate::line::Line;
use crate::memory::{self, Span};
use crate::rule::Rule;
use crate::sys::{self, FileId, Mapping};

/// Memory registered with a communicator.
#[derive(Debug)]
pub struct Window {
    base: usize,
    bytes: usize,
    /// What a collective registration adds.
    symmetric: Option<Symmetric>,
    /// Cleared when it is deregistered; queued operations may still hold it.
    registered: AtomicBool,
}

/// The same window on every rank.
#[derive(Debug)]
struct Symmetric {
    /// Counts the collective registrations of the communicator.
    number: u64,
    by_rank: Vec<PeerMemory>,
}

/// A rank's part of a window.
#[derive(Debug)]
struct PeerMemory {
    /// Its allocation; nothing for the own rank.
    map: Option<Mapping>,
    /// Address of the window in this process.
    base: usize,
    bytes: usize,
}

impl Window {
    /// The number of the collective registration; nothing for a window that peers cannot reach.
    pub fn number(&self) -> Option<u64> {
        self.symmetric.as_ref().map(|symmetric| symmetric.number)
    }

    /// Address in this process of a rank's part, at `offset`.
    pub fn peer_address(&self, rank: i32, offset: usize) -> Outcome<usize> {
        const FUNCTION: &str = "ncclGetPeerDevicePointer";
        let symmetric = self.symmetric.as_ref();
        let by_rank = symmetric.ok_or_else(|| usage(format!("{FUNCTION}: the window is not symmetric")))?;
        let part = usize::try_from(rank).ok().and_then(|rank| by_rank.by_rank.get(rank));
        match part {
            Some(part) if offset < part.bytes => Ok(part.base + offset),
            Some(part) => {
                let text = format!("{FUNCTION}: offset {offset} in a window of {} bytes", part.bytes);
                Err(usage(text).breaks(Rule::WindowBounds))
            }
            None => Err(usage(format!("{FUNCTION}: peer {rank} of {} ranks", by_rank.by_rank.len()))),
        }
    }

    /// Reports a use after the window was deregistered.
    pub fn check_registered(&self) -> Outcome<()> {
        if self.registered.load(Ordering::SeqCst) {
            return Ok(());
        }
        let text = format!("window of {} bytes at {:#x} was deregistered before this ran", self.bytes, self.base);
        check::breach(Rule::WindowLifetime, text)
    }

    /// The bytes from `offset` to the end of a rank's part.
    pub fn part(&self, rank: usize, offset: usize) -> Outcome<Span> {
        let part = self.symmetric.as_ref().map(|symmetric| &symmetric.by_rank[rank]);
        match part {
            Some(part) if offset <= part.bytes => {
                // The mapping is what keeps the address valid.
                debug_assert!(part.map.as_ref().is_none_or(|map| map.byte_len() >= part.bytes));
                // SAFETY: this part of the peer's allocation is mapped for as long as the window lives, and ranks touch
                // it only between the barriers of an operation.
                unsafe { Span::new((part.base + offset) as *const c_void, part.bytes - offset) }
            }
            _ => {
                let text = format!("offset {offset} is outside the window of rank {rank}");
                Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidArgument, text).breaks(Rule::WindowBounds))
            }
        }
    }
}

/// The windows of a communicator.
#[derive(Debug, Default)]
pub struct Windows {
    registered: Mutex<HashMap<usize, Arc<Window>>>,
    /// Collective registrations so far.
    collective: AtomicU64,
}

fn usage(text: impl Into<String>) -> Fault {
    Fault::nccl(ncclInvalidArgument, text)
}

impl Windows {
    /// How many are registered.
    pub fn count(&self) -> usize {
        self.registered.lock().len()
    }

    /// Whether one begins in a range of addresses.
    pub fn any_in(&self, range: &Range<usize>) -> bool {
        self.registered.lock().values().any(|window| range.contains(&window.base))
    }

    /// Registers memory and writes the window to `out`: with `NCCL_WIN_COLL_SYMMETRIC` collective and mapped by the
    /// peers, inside a group when it ends; without it local.
    ///
    /// # Safety
    ///
    /// `out` must be writable, inside a group until it ends.
    pub unsafe fn register(
        self: &Arc<Self>,
        line: &Line,
        base: *mut c_void,
        bytes: usize,
        flags: i32,
        out: *mut ncclWindow_t,
    ) -> Outcome<()> {
        let known = (NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING) as i32;
        if flags & !known != 0 {
            return Err(usage(format!("ncclCommWindowRegister: unknown flags {flags:#x}")));
        }
        if base.is_null() || bytes == 0 || out.is_null() {
            return Err(usage(format!("ncclCommWindowRegister: {bytes} bytes at {base:p}, result at {out:p}")));
        }
        if !(base as usize).is_multiple_of(NCCL_WIN_REQUIRED_ALIGNMENT as usize) {
            let text =
                format!("ncclCommWindowRegister: {base:p} is not aligned to {NCCL_WIN_REQUIRED_ALIGNMENT} bytes");
            return Err(usage(text).breaks(Rule::WindowBounds));
        }
        let memory = match memory::find(base as usize) {
            Some(memory) if base as usize + bytes > memory.base + memory.bytes => {
                let text = format!("ncclCommWindowRegister: {bytes} bytes at {base:p} leave their allocation");
                return Err(usage(text).breaks(Rule::WindowBounds));
            }
            Some(memory) if memory.kind == memory::Kind::Nccl => memory,
            _ => return Err(usage(format!("ncclCommWindowRegister: {base:p} was not allocated by ncclMemAlloc"))),
        };
        let (base, out, windows) = (base as usize, out as usize, Arc::clone(self));
        let register = move |symmetric: Option<Symmetric>| {
            let window = Arc::new(Window { base, bytes, symmetric, registered: AtomicBool::new(true) });
            let handle = Arc::as_ptr(&window) as usize;
            windows.registered.lock().insert(handle, window);
            // SAFETY: the caller vouches for `out`, inside a group until it ends.
            unsafe { (out as *mut ncclWindow_t).write(handle as ncclWindow_t) };
            Ok(())
        };
        if flags & NCCL_WIN_COLL_SYMMETRIC as i32 == 0 {
            return register(None);
        }
        let (windows, line) = (Arc::clone(self), line.clone());
        batch::now_or_at_end(move || register(Some(windows.meet(&line, &memory, base, bytes)?)))
    }

    /// Tells the peers where the own part of a window is, and maps theirs.
    fn meet(&self, line: &Line, memory: &memory::Allocation, base: usize, bytes: usize) -> Outcome<Symmetric> {
        const FUNCTION: &str = "ncclCommWindowRegister";
        let file = memory::shared_file(memory.base)
            .ok_or_else(|| usage(format!("{FUNCTION}: {base:#x} was freed meanwhile")))?;
        let (number, id) = file;
        let own = [u64::from(std::process::id()), number.into(), id.device, id.inode]
            .into_iter()
            .chain([memory.bytes, base - memory.base, bytes].map(|it| it as u64));
        let own: Vec<[u8; 8]> = own.map(u64::to_ne_bytes).collect();
        line.run(|channel| {
            let own = own.as_flattened();
            channel.stage(own.len())?.copy_from_slice(own);
            channel.exchange(FUNCTION, [0; 4], own.len())?;
            let mapped = (0..channel.ranks())
                .map(|rank| {
                    let words = channel.offer(rank)?.bytes.as_chunks::<8>().0;
                    let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
                    let [pid, file, device, inode, total, offset, bytes] = words[..] else {
                        return Err(Fault::nccl(
                            ncclInternalError,
                            format!("{FUNCTION}: rank {rank} offered too little"),
                        ));
                    };
                    let (total, offset, bytes) = (total as usize, offset as usize, bytes as usize);
                    if rank == channel.rank() {
                        return Ok(PeerMemory { map: None, base, bytes });
                    }
                    let map = sys::open_fd_of(pid as u32, file as u32, FileId { device, inode })
                        .and_then(|fd| Mapping::shared(fd.as_fd(), total))
                        .map_err(|error| {
                            let text = format!("{FUNCTION}: cannot map {total} bytes of rank {rank}: {error}");
                            Fault::nccl(ncclSystemError, text)
                        })?;
                    let base = map.base() as usize + offset;
                    Ok(PeerMemory { map: Some(map), base, bytes })
                })
                .collect::<Outcome<Vec<_>>>();
            let by_rank = mapped.inspect_err(|fault| channel.fail(fault))?;
            // From here on a rank may free its memory: everyone has it mapped.
            channel.exchange(&format!("{FUNCTION}: mapped"), [0; 4], 0)?;
            Ok(Symmetric { number: self.collective.fetch_add(1, Ordering::Relaxed) + 1, by_rank })
        })
    }

    /// The window that a handle names.
    pub fn get(&self, handle: usize) -> Outcome<Arc<Window>> {
        let found = self.registered.lock().get(&handle).cloned();
        found.ok_or_else(|| {
            usage(format!("{handle:#x} is not a window of the group's communicator")).breaks(Rule::WindowMissing)
        })
    }

    /// Ends a registration.
    pub fn deregister(&self, window: ncclWindow_t) -> Outcome<()> {
        let removed = self.registered.lock().remove(&(window as usize));
        match removed {
            Some(window) => {
                window.registered.store(false, Ordering::SeqCst);
                Ok(())
            }
            None => Err(usage(format!("ncclCommWindowDeregister: {window:p} is not a window of this communicator"))),
        }
    }

    /// Address of `bytes` bytes at `offset` in a registered window.
    pub fn address(&self, window: ncclWindow_t, offset: u64, bytes: usize) -> Outcome<*mut c_void> {
        let window = self.get(window as usize)?;
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
        match end {
            Some(end) if end <= window.bytes => Ok((window.base + end - bytes) as *mut c_void),
            _ => {
                let text = format!("{bytes} bytes at offset {offset} of a window of {} bytes", window.bytes);
                Err(usage(text).breaks(Rule::WindowBounds))
            }
        }
    }
}
