//! The few Linux facilities below the shared-memory channels: futex, memfd, mappings, process liveness.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, Timespec};
use rustix::io::Errno;
use rustix::thread::futex;

/// A shared mapping of a file, unmapped when dropped.
///
/// Who may touch which bytes when is the channel protocol's business: shared access goes through atomics or through ranges that
/// it hands to one rank.
#[derive(Debug)]
pub struct Mapping(MmapRaw);

impl Mapping {
    /// Maps the first `len` bytes (non-zero) of `fd` shared, readable and writable.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        MmapOptions::new().len(len).map_raw(&fd).map(Self)
    }

    /// Bytes mapped.
    pub fn byte_len(&self) -> usize {
        self.0.len()
    }

    /// Start of the mapping.
    pub fn base(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// The first `len` bytes.
    pub fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.byte_len(), "mapping of {} bytes read to {len}", self.byte_len());
        // SAFETY: the range is mapped for as long as self lives; the channel protocol lets no rank write it meanwhile.
        unsafe { std::slice::from_raw_parts(self.base(), len) }
    }

    /// The first `len` bytes, writable.
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.byte_len(), "mapping of {} bytes written to {len}", self.byte_len());
        // SAFETY: the range is mapped for as long as self lives; the channel protocol lets no peer read it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.base(), len) }
    }
}

/// Creates an anonymous shared-memory file.
pub fn memfd(name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?)
}

/// Grows `fd` to at least `len` bytes with memory really reserved, so that running out is an error and no SIGBUS.
pub fn reserve(fd: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    let len = len as u64;
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len)) {
        // A file system without fallocate (the temporary folder may be one): write the size instead.
        Err(Errno::OPNOTSUPP) => Ok(rustix::fs::ftruncate(fd, len)?),
        reserved => Ok(reserved?),
    }
}

/// Which file a descriptor is open on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileId {
    /// Its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
}

impl FileId {
    /// The file behind a descriptor.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self::from(&File::from(fd.try_clone_to_owned()?).metadata()?))
    }

    fn from(metadata: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Opens descriptor `fd` of process `pid`, which has to belong to the same user and to be open on the file `id`: a process of
/// another namespace with the same number has other files, which are not ours to open.
pub fn open_fd_of(pid: u32, fd: u32, id: FileId) -> io::Result<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let expect = |found: &std::fs::Metadata| match FileId::from(found) == id {
        true => Ok(()),
        false => Err(io::Error::other("it is another file than the rank offered")),
    };
    let open = || {
        expect(&std::fs::metadata(&path)?)?;
        let file = File::options().read(true).write(true).open(&path)?;
        expect(&file.metadata()?)?;
        Ok(OwnedFd::from(file))
    };
    open().map_err(|error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

/// The PID namespace of this process, or 0 where it cannot be told.
pub fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| FileId::from(&metadata).inode)
}

/// Bytes that a folder's file system has room for.
pub fn free_space(folder: &std::path::Path) -> u64 {
    rustix::fs::statvfs(folder).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

/// Sleeps until `word` no longer holds `expected`, somebody wakes it, or `timeout` passed.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Not private: ranks are processes. Whatever it returns, the caller looks again.
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&timeout));
}

/// Wakes every thread that sleeps on `word`, in every process.
pub fn futex_wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Keeps the process's signals away from the calling thread, so that its handlers run where programs expect them.
pub fn block_signals() {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set that it is given.
    unsafe { libc::sigfillset(signals.as_mut_ptr()) };
    // SAFETY: the set was filled above; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), ptr::null_mut()) };
}

/// Start time of process `pid` in clock ticks since boot; `None` when there is no such process or it has ended.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name, second field, may hold blanks and parentheses; the last ')' ends it.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
    // A zombie has ended; only its parent has not looked yet.
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// Sixteen random bytes.
pub fn random_bytes() -> io::Result<[u8; 16]> {
    let mut bytes = [0u8; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        16 => Ok(bytes),
        got => Err(io::Error::other(format!("the kernel gave {got} random bytes of 16"))),
    }
}
