//! Communicators: rendezvous, windows, and the collectives that run on streams.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::channel::{self, Breaker, Channel};
use crate::device::{self, Device};
use crate::dtype::{self, Reduction};
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Span};
use crate::stats;
use crate::stream::{Point, Stream};
use crate::sys;

/// Marks a unique id made by this library; the path of the rendezvous file follows.
const ID_PREFIX: &[u8] = b"nvte-ep-host:";

/// The ordered line of operations of one channel: each waits for the one enqueued before it.
#[derive(Debug)]
pub struct Line {
    channel: Arc<Mutex<Channel>>,
    breaker: Breaker,
    last: Mutex<Option<Point>>,
    status: Arc<Status>,
}

/// What a communicator's operations, and those of EP groups over it, say about its health.
#[derive(Debug, Default)]
pub struct Status {
    error: Mutex<Option<Fault>>,
    aborted: AtomicBool,
    breakers: Mutex<Vec<Breaker>>,
}

impl Line {
    /// Wraps a fresh channel; its failures are noted in `status`.
    pub fn new(channel: Channel, status: Arc<Status>) -> Self {
        let breaker = channel.breaker();
        status.breakers.lock().push(breaker.clone());
        Self { channel: Arc::new(Mutex::new(channel)), breaker, last: Mutex::new(None), status }
    }

    /// Enqueues an operation on a stream, behind all earlier ones of this line.
    pub fn enqueue(
        &self,
        stream: &Arc<Stream>,
        run: impl FnOnce(&mut Channel) -> Outcome<()> + Send + 'static,
    ) -> Outcome<()> {
        if let Err(fault) = stream.device().check() {
            // Peers wait for this operation and it will never run.
            self.breaker.trip(&fault.text);
            return Err(fault);
        }
        let channel = Arc::clone(&self.channel);
        let breaker = self.breaker.clone();
        let status = Arc::clone(&self.status);
        let mut last = self.last.lock();
        let point = stream.enqueue_always(last.iter().cloned().collect(), move |sticky| {
            if let Some(fault) = sticky {
                breaker.trip(&fault.text);
                return Ok(());
            }
            let mut channel = channel.lock();
            let done = crate::fault::contain(|| run(&mut channel));
            if let Err(fault) = &done {
                channel.fail(fault);
                status.error.lock().get_or_insert_with(|| fault.clone());
                if status.aborted.load(Ordering::SeqCst) {
                    // The caller asked for the end of the operation; the device stays usable.
                    return Ok(());
                }
                set_last_error(&fault.text);
            }
            done
        })?;
        *last = Some(point);
        Ok(())
    }

    /// Waits for all enqueued operations.
    pub fn wait(&self) {
        let last = self.last.lock().clone();
        if let Some(point) = last {
            point.wait();
        }
    }

    /// Runs a host-blocking operation on the calling thread, behind all enqueued ones.
    pub fn run<T>(&self, run: impl FnOnce(&mut Channel) -> Outcome<T>) -> Outcome<T> {
        self.wait();
        run(&mut self.channel.lock())
    }

    /// Ends the line for the peers, with a reason.
    pub fn trip(&self, text: &str) {
        self.breaker.trip(text);
    }
}

/// One rank of a communicator.
#[derive(Debug)]
pub struct Comm {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Device on which it was made.
    pub device: &'static Device,
    /// Its operations.
    pub line: Line,
    /// Its health.
    pub status: Arc<Status>,
    windows: Mutex<HashMap<usize, Box<Window>>>,
}

/// Memory registered with a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    base: usize,
    bytes: usize,
}

static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);
static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// A communicator creation that waits for `ncclGroupEnd`.
struct Deferred {
    out: usize,
    id: ncclUniqueId,
    ranks: i32,
    rank: i32,
    device: &'static Device,
}

thread_local! {
    static GROUP: RefCell<(u32, Vec<Deferred>)> = const { RefCell::new((0, Vec::new())) };
}

/// Remembers the text that `ncclGetLastError` returns.
pub fn set_last_error(text: &str) {
    text.clone_into(&mut LAST_ERROR.lock());
}

/// The text that `ncclGetLastError` returns.
pub fn last_error() -> String {
    LAST_ERROR.lock().clone()
}

/// Windows that are registered now.
pub fn live_windows() -> u64 {
    COMMS.lock().values().map(|comm| comm.windows.lock().len() as u64).sum()
}

fn usage(text: impl Into<String>) -> Fault {
    Fault::nccl(ncclInvalidArgument, text)
}

/// A fresh unique id.
pub fn unique_id() -> Outcome<ncclUniqueId> {
    let bytes = sys::random_bytes()
        .map_err(|e| Fault::nccl(ncclSystemError, format!("ncclGetUniqueId: no random bytes: {e}")))?;
    let name: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let path = channel::rendezvous_folder().join(format!("nvte-ep-{name}"));
    let mut id = ncclUniqueId::default();
    let text = [ID_PREFIX, path.as_os_str().as_bytes()].concat();
    if text.len() >= id.internal.len() {
        let text = format!("ncclGetUniqueId: the temporary folder's name is too long: {}", path.display());
        return Err(Fault::nccl(ncclSystemError, text));
    }
    for (there, byte) in id.internal.iter_mut().zip(text) {
        *there = byte.cast_signed();
    }
    Ok(id)
}

fn rendezvous_path(id: &ncclUniqueId) -> Outcome<PathBuf> {
    let bytes: Vec<u8> = id.internal.iter().map(|b| b.cast_unsigned()).take_while(|b| *b != 0).collect();
    match bytes.strip_prefix(ID_PREFIX) {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(std::ffi::OsString::from_vec(path.to_vec()))),
        _ => Err(usage("ncclCommInitRank: the unique id was not made by ncclGetUniqueId of the host runtime")),
    }
}

impl Comm {
    /// `ncclCommInitRank`: inside a group the work is left to `ncclGroupEnd`.
    ///
    /// # Safety
    ///
    /// `out` must be writable, inside a group until it ends.
    pub unsafe fn init_rank(out: *mut ncclComm_t, ranks: i32, id: ncclUniqueId, rank: i32) -> Outcome<()> {
        if out.is_null() {
            return Err(usage("ncclCommInitRank: comm is null"));
        }
        if ranks < 1 || ranks as usize > channel::MAX_RANKS || rank < 0 || rank >= ranks {
            return Err(usage(format!("ncclCommInitRank: rank {rank} of {ranks} ranks")));
        }
        let device = device::make_current();
        device.check()?;
        let deferred = Deferred { out: out as usize, id, ranks, rank, device };
        let alone = GROUP.with_borrow_mut(|(depth, list)| {
            if *depth > 0 {
                list.push(deferred);
                None
            } else {
                Some(deferred)
            }
        });
        alone.map_or(Ok(()), |deferred| {
            let comm = deferred.create()?;
            // SAFETY: the caller vouches for `out`.
            unsafe { out.write(comm as ncclComm_t) };
            Ok(())
        })
    }

    /// The communicator that a handle names.
    pub fn resolve(handle: ncclComm_t, function: &str) -> Outcome<Arc<Comm>> {
        if handle.is_null() {
            return Err(usage(format!("{function}: comm is null")));
        }
        COMMS
            .lock()
            .get(&(handle as usize))
            .cloned()
            .ok_or_else(|| usage(format!("{function}: {handle:p} is not a live communicator")))
    }

    /// `ncclCommDestroy` and `ncclCommAbort`.
    pub fn close(handle: ncclComm_t, function: &str, abort: bool) -> Outcome<()> {
        let comm = Self::resolve(handle, function)?;
        if abort {
            comm.status.aborted.store(true, Ordering::SeqCst);
            for breaker in &*comm.status.breakers.lock() {
                breaker.trip(&format!("rank {} aborted the communicator", comm.rank));
            }
        }
        comm.line.run(|_| Ok(()))?;
        if COMMS.lock().remove(&(handle as usize)).is_some() {
            stats::count(|s| &s.comms_destroyed);
        }
        Ok(())
    }

    /// The asynchronous error as an NCCL code.
    pub fn async_error(&self) -> ncclResult_t {
        match &*self.status.error.lock() {
            None => ncclSuccess,
            Some(fault) if fault.nccl == ncclRemoteError => ncclRemoteError,
            Some(_) => ncclSystemError,
        }
    }

    /// Registers memory; local, as nothing here reads a peer's windows.
    pub fn register(&self, base: *mut c_void, bytes: usize, flags: i32) -> Outcome<ncclWindow_t> {
        let known = (NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING) as i32;
        if flags & !known != 0 {
            return Err(usage(format!("ncclCommWindowRegister: unknown flags {flags:#x}")));
        }
        if base.is_null() || bytes == 0 {
            return Err(usage(format!("ncclCommWindowRegister: {bytes} bytes at {base:p}")));
        }
        if !(base as usize).is_multiple_of(NCCL_WIN_REQUIRED_ALIGNMENT as usize) {
            let text =
                format!("ncclCommWindowRegister: {base:p} is not aligned to {NCCL_WIN_REQUIRED_ALIGNMENT} bytes");
            return Err(usage(text));
        }
        match memory::find(base as usize) {
            Some(memory) if base as usize + bytes > memory.base + memory.bytes => {
                Err(usage(format!("ncclCommWindowRegister: {bytes} bytes at {base:p} leave their allocation")))
            }
            Some(memory) if memory.kind == memory::Kind::Nccl => {
                let window = Box::new(Window { base: base as usize, bytes });
                let handle = std::ptr::from_ref(&*window) as usize;
                self.windows.lock().insert(handle, window);
                Ok(handle as ncclWindow_t)
            }
            _ => Err(usage(format!("ncclCommWindowRegister: {base:p} was not allocated by ncclMemAlloc"))),
        }
    }

    /// Ends a registration.
    pub fn deregister(&self, window: ncclWindow_t) -> Outcome<()> {
        match self.windows.lock().remove(&(window as usize)) {
            Some(_) => Ok(()),
            None => Err(usage(format!("ncclCommWindowDeregister: {window:p} is not a window of this communicator"))),
        }
    }

    /// Address of `bytes` bytes at `offset` in a registered window.
    pub fn window_address(&self, window: ncclWindow_t, offset: u64, bytes: usize) -> Outcome<*mut c_void> {
        let windows = self.windows.lock();
        let Some(window) = windows.get(&(window as usize)) else {
            return Err(usage(format!("{window:p} is not a window of the group's communicator")));
        };
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
        match end {
            Some(end) if end <= window.bytes => Ok((window.base + end - bytes) as *mut c_void),
            _ => Err(usage(format!("{bytes} bytes at offset {offset} of a window of {} bytes", window.bytes))),
        }
    }

    fn collective(
        &self,
        stream: &Arc<Stream>,
        run: impl FnOnce(&mut Channel) -> Outcome<()> + Send + 'static,
    ) -> Outcome<()> {
        self.line.enqueue(stream, run)?;
        stats::count(|s| &s.collectives);
        Ok(())
    }

    fn checked_bytes(function: &str, count: usize, datatype: ncclDataType_t) -> Outcome<usize> {
        let size =
            dtype::size_of(datatype).ok_or_else(|| usage(format!("{function}: unknown data type {datatype}")))?;
        count.checked_mul(size).ok_or_else(|| usage(format!("{function}: count {count} is too large")))
    }

    /// `ncclAllGather`.
    ///
    /// # Safety
    ///
    /// `send` (`count` elements) and `receive` (`count` times the ranks) must stay valid until the stream has got there.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclAllGather", count, datatype)?;
        let total =
            bytes.checked_mul(self.ranks).ok_or_else(|| usage(format!("ncclAllGather: count {count} is too large")))?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclAllGather", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclAllGather", "recvbuff", receive, total) }?;
        let what = format!("ncclAllGather(sendcount={count}, datatype={})", dtype::name(datatype));
        self.collective(stream, move |channel| {
            send.read(0, channel.stage(bytes)?);
            channel.exchange(&what, [0; 4], bytes)?;
            for rank in 0..channel.ranks() {
                receive.write(rank * bytes, channel.offer(rank)?.bytes);
            }
            Ok(())
        })
    }

    /// `ncclAllReduce`.
    ///
    /// # Safety
    ///
    /// `send` and `receive` (`count` elements each) must stay valid until the stream has got there.
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclAllReduce", count, datatype)?;
        let reduction = Reduction::from_nccl(op)
            .ok_or_else(|| usage(format!("ncclAllReduce: reduction {op} is not supported by the host runtime")))?;
        if !dtype::reducible(datatype) {
            let text = format!("ncclAllReduce: {} is not supported by the host runtime", dtype::name(datatype));
            return Err(usage(text));
        }
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclAllReduce", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclAllReduce", "recvbuff", receive, bytes) }?;
        let what = format!("ncclAllReduce(count={count}, datatype={}, op={reduction:?})", dtype::name(datatype));
        self.collective(stream, move |channel| {
            send.read(0, channel.stage(bytes)?);
            channel.exchange(&what, [0; 4], bytes)?;
            let inputs =
                (0..channel.ranks()).map(|rank| Ok(channel.offer(rank)?.bytes)).collect::<Outcome<Vec<&[u8]>>>()?;
            let mut output = vec![0u8; bytes];
            dtype::reduce(datatype, reduction, &inputs, &mut output);
            receive.write(0, &output);
            Ok(())
        })
    }

    /// `ncclBroadcast`.
    ///
    /// # Safety
    ///
    /// `send` (on the root) and `receive` (`count` elements) must stay valid until the stream has got there.
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclBroadcast", count, datatype)?;
        let root = usize::try_from(root)
            .ok()
            .filter(|root| *root < self.ranks)
            .ok_or_else(|| usage(format!("ncclBroadcast: root {root} of {} ranks", self.ranks)))?;
        let is_root = root == self.rank;
        // SAFETY: the caller vouches for `send` on the root; elsewhere it is not looked at.
        let send = unsafe { span("ncclBroadcast", "sendbuff", send, if is_root { bytes } else { 0 }) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclBroadcast", "recvbuff", receive, bytes) }?;
        let what = format!("ncclBroadcast(count={count}, datatype={}, root={root})", dtype::name(datatype));
        self.collective(stream, move |channel| {
            send.read(0, channel.stage(send.byte_len())?);
            channel.exchange(&what, [0; 4], send.byte_len())?;
            receive.write(0, channel.offer(root)?.bytes);
            Ok(())
        })
    }
}

/// # Safety
///
/// As [`Span::new`].
unsafe fn span(function: &str, argument: &str, pointer: *const c_void, bytes: usize) -> Outcome<Span> {
    // SAFETY: passed on to the caller.
    unsafe { Span::new(pointer, bytes) }.map_err(|fault| usage(format!("{function}: {argument}: {}", fault.text)))
}

impl Deferred {
    fn create(&self) -> Outcome<usize> {
        let path = rendezvous_path(&self.id)?;
        let (rank, ranks) = (self.rank as usize, self.ranks as usize);
        let label = format!("communicator of {ranks} ranks");
        let channel = Channel::meet(&path, rank, ranks, label)?;
        let status = Arc::new(Status::default());
        let comm = Arc::new(Comm {
            rank,
            ranks,
            device: self.device,
            line: Line::new(channel, Arc::clone(&status)),
            status,
            windows: Mutex::default(),
        });
        let handle = Arc::as_ptr(&comm) as usize;
        COMMS.lock().insert(handle, comm);
        stats::count(|s| &s.comms_created);
        Ok(handle)
    }
}

/// `ncclGroupStart`.
pub fn group_start() {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
}

/// `ncclGroupEnd`: the communicators of the group are created at the same time, each on a thread of its own.
pub fn group_end() -> Outcome<()> {
    let jobs = GROUP.with_borrow_mut(|(depth, list)| {
        if *depth == 0 {
            return Err(Fault::nccl(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart before it"));
        }
        *depth -= 1;
        Ok(if *depth == 0 { std::mem::take(list) } else { Vec::new() })
    })?;
    let results: Vec<Outcome<usize>> = std::thread::scope(|scope| {
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| crate::fault::contain(|| job.create()))).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Fault::nccl(ncclInternalError, "ncclGroupEnd: a thread panicked")))
            })
            .collect()
    });
    let mut outcome = Ok(());
    for (job, result) in jobs.iter().zip(results) {
        match result {
            // SAFETY: `init_rank`'s caller vouched for the address until the group ends.
            Ok(comm) => unsafe { (job.out as *mut ncclComm_t).write(comm as ncclComm_t) },
            Err(fault) => outcome = Err(fault),
        }
    }
    outcome
}
