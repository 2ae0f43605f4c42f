//! The few Linux facilities below the shared-memory channels: futex, memfd, mappings, process liveness.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A shared mapping of a file, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned memory; who may touch which bytes when is the channel protocol's business.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access goes through atomics or through ranges that the protocol hands to one rank.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes (non-zero) of `fd` shared, readable and writable.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address zero"))?;
        Ok(Self { base, len })
    }

    /// Bytes mapped.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// Start of the mapping.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The first `len` bytes.
    pub fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len, "mapping of {} bytes read to {len}", self.len);
        // SAFETY: the range is mapped for as long as self lives; the channel protocol lets no rank write it meanwhile.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), len) }
    }

    /// The first `len` bytes, writable.
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len, "mapping of {} bytes written to {len}", self.len);
        // SAFETY: the range is mapped for as long as self lives; the channel protocol lets no peer read it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of a mapping made in `shared`, which nothing outlives.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Creates an anonymous shared-memory file.
pub fn memfd(name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: name is a C string that lives through the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Grows `fd` to at least `len` bytes with memory really reserved, so that running out is an error and no SIGBUS.
pub fn reserve(fd: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    loop {
        // SAFETY: fallocate touches no memory of ours.
        if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // A file system without fallocate (the temporary folder may be one): write the size instead.
            // SAFETY: ftruncate touches no memory of ours.
            Some(libc::EOPNOTSUPP) if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } == 0 => return Ok(()),
            _ => return Err(error),
        }
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
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else { return 0 };
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: path is a C string that lives through the call, and the result is ours.
    if unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return 0;
    }
    // SAFETY: filled by the call that succeeded.
    let found = unsafe { found.assume_init() };
    found.f_bavail.saturating_mul(found.f_frsize)
}

/// Sleeps until `word` no longer holds `expected`, somebody wakes it, or `timeout` passed.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
    };
    // SAFETY: word and timeout live through the call; every return reason is handled by the caller's loop.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
            ptr::null::<u32>(),
            0,
        )
    };
}

/// Wakes every thread that sleeps on `word`, in every process.
pub fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: word lives through the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            i32::MAX,
            ptr::null::<u8>(),
            ptr::null::<u32>(),
            0,
        )
    };
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
    // SAFETY: the buffer is ours and as long as we say.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) == Ok(bytes.len()) { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}
