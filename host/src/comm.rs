//! Communicators: rendezvous, windows, and the collectives that run on streams.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::channel::pairs::{Direction, Transfer};
use crate::channel::{self, Breaker, Channel, PIECE_BYTES};
use crate::check::{self, Rule};
use crate::device::{self, Device};
use crate::dtype::{self, Reduction};
use crate::fault::{Fault, Outcome};
use crate::graph::{self, Action};
use crate::inject;
use crate::memory::{self, Span};
use crate::order;
use crate::stats::{self, Counters};
use crate::stream::{Ordered, Point, Stream};
use crate::sys::{self, Mapping};

/// Marks a unique id made by this library; the path of the rendezvous file follows.
const ID_PREFIX: &[u8] = b"nvte-ep-host:";

/// The ordered line of operations of one channel: each waits for the one enqueued before it.
#[derive(Debug)]
pub struct Line(Arc<LineState>);

#[derive(Debug)]
struct LineState {
    channel: Mutex<Channel>,
    breaker: Breaker,
    last: Mutex<Option<Point>>,
    status: Arc<Status>,
    /// Set when the communicator or group is destroyed; graphs may still hold operations.
    closed: AtomicBool,
    /// For an EP group, its number in [`order`] and how many operations it had. NCCL orders those of a communicator.
    ordered: Mutex<Option<Ordered>>,
}

/// An operation of a line.
type Operation = Arc<dyn Fn(&mut Channel) -> Outcome<()> + Send + Sync>;
/// Picks the counter of an operation.
type Counter = fn(&'static Counters) -> &'static AtomicU64;

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
        let closed = AtomicBool::new(false);
        let (channel, last, ordered) = (Mutex::new(channel), Mutex::default(), Mutex::default());
        Self(Arc::new(LineState { channel, breaker, last, status, closed, ordered }))
    }

    /// Asks the caller to order the operations, as an EP group does.
    pub fn expect_order(&self) {
        *self.0.ordered.lock() = Some(Ordered { group: order::open(), operation: 0 });
    }

    /// Ranks that are not done with the operations that this one is done with.
    pub fn busy(&self) -> Vec<usize> {
        self.0.channel.lock().busy()
    }

    /// Enqueues an operation on a stream, behind all earlier ones of this line, or records it if the stream is captured.
    ///
    /// `spans` names the callers' memory that it uses; `counter` counts it each time that it is enqueued.
    pub fn enqueue(
        &self,
        stream: &Arc<Stream>,
        counter: Counter,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        if let Err(fault) = stream.device().check() {
            // Peers wait for this operation and it will never run.
            self.trip(&fault.text);
            return Err(fault);
        }
        let run: Operation = Arc::new(run);
        let action = || {
            let (state, run) = (Arc::clone(&self.0), Arc::clone(&run));
            Action {
                enqueue: Arc::new(move |stream, after| state.push(stream, after, counter, Arc::clone(&run))),
                spans: spans.to_vec(),
                breaker: Some(self.0.breaker.clone()),
                memory: None,
            }
        };
        if graph::record(stream, action)? {
            return Ok(());
        }
        self.0.push(stream, Vec::new(), counter, run).map(drop)
    }

    /// Waits for all enqueued operations.
    pub fn wait(&self) {
        let last = self.0.last.lock().clone();
        if let Some(point) = last {
            point.wait();
        }
    }

    /// Runs a host-blocking operation on the calling thread, behind all enqueued ones.
    pub fn run<T>(&self, run: impl FnOnce(&mut Channel) -> Outcome<T>) -> Outcome<T> {
        self.wait();
        run(&mut self.0.channel.lock())
    }

    /// Ends the line for the peers, with a reason.
    pub fn trip(&self, text: &str) {
        self.0.breaker.trip(text);
    }

    /// Whether the communicator or group is destroyed.
    pub fn is_closed(&self) -> bool {
        self.0.closed.load(Ordering::SeqCst)
    }

    /// Refuses operations from now on, also those of graphs.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.channel.lock().leave();
        if let Some(Ordered { group, .. }) = *self.0.ordered.lock() {
            order::close(group);
        }
        self.0.status.breakers.lock().retain(|breaker| !breaker.is(&self.0.breaker));
    }
}

impl LineState {
    fn push(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        after: Vec<Point>,
        counter: Counter,
        run: Operation,
    ) -> Outcome<Point> {
        if self.closed.load(Ordering::SeqCst) {
            let text = "an operation of a communicator or EP group that has been destroyed";
            return Err(
                Fault::both(cudaErrorInvalidResourceHandle, ncclInvalidUsage, text).breaks(Rule::DestroyedObject)
            );
        }
        let state = Arc::clone(self);
        let replay = graph::replay();
        let mut last = self.last.lock();
        let mut ordered = self.ordered.lock();
        let next = ordered.map(|before| Ordered { operation: before.operation + 1, ..before });
        let work = move |sticky: Option<&Fault>| {
            if let Some(fault) = sticky {
                state.breaker.trip(&fault.text);
                return Ok(());
            }
            let mut channel = state.channel.lock();
            channel.replay = replay;
            check::act_as(channel.rank());
            let done = crate::fault::contain(|| run(&mut channel)).map_err(check::sign);
            channel.finish();
            if let Err(fault) = &done {
                channel.fail(fault);
                state.status.error.lock().get_or_insert_with(|| fault.clone());
                if state.status.aborted.load(Ordering::SeqCst) {
                    // The caller asked for the end of the operation; the device stays usable.
                    return Ok(());
                }
                set_last_error(&fault.text);
            }
            done
        };
        let point = stream.push_ordered(after, last.as_ref(), next, Arc::new(work))?;
        *last = Some(point.clone());
        *ordered = next;
        stats::count(counter);
        Ok(point)
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
    windows: Mutex<HashMap<usize, Arc<Window>>>,
    symmetric_windows: AtomicU64,
}

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

static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);
static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// A communicator to create.
struct Creation {
    id: ncclUniqueId,
    ranks: i32,
    rank: i32,
    device: &'static Device,
}

/// A collective set-up call that waits for `ncclGroupEnd`; it writes its result through the caller's pointer.
type Deferred = Box<dyn FnOnce() -> Outcome<()> + Send>;

/// A transfer, with what it was called on.
type Pending = (Arc<Comm>, Arc<Stream>, Transfer);

thread_local! {
    static GROUP: RefCell<(u32, Vec<Deferred>)> = const { RefCell::new((0, Vec::new())) };
    /// Transfers between two ranks that wait for `ncclGroupEnd`.
    static TRANSFERS: RefCell<Vec<Pending>> = const { RefCell::new(Vec::new()) };
}

/// Does a collective set-up now, or when the group of the calling thread ends.
fn now_or_at_group_end(job: impl FnOnce() -> Outcome<()> + Send + 'static) -> Outcome<()> {
    let mut job: Option<Deferred> = Some(Box::new(job));
    GROUP.with_borrow_mut(|(depth, list)| {
        if *depth > 0 {
            list.extend(job.take());
        }
    });
    job.map_or(Ok(()), |job| job())
}

/// Remembers the text that `ncclGetLastError` returns.
pub fn set_last_error(text: &str) {
    text.clone_into(&mut LAST_ERROR.lock());
}

/// The text that `ncclGetLastError` returns.
pub fn last_error() -> String {
    LAST_ERROR.lock().clone()
}

/// The rank of the only communicator on a device.
pub fn rank_on(device: i32) -> Option<usize> {
    let comms = COMMS.lock();
    let mut ranks = comms.values().filter(|comm| comm.device.ordinal == device).map(|comm| comm.rank);
    ranks.next().filter(|_| ranks.next().is_none())
}

/// Reports memory that is freed while a window is registered over it.
pub fn check_freed(memory: &memory::Allocation) -> Outcome<()> {
    let inside = memory.base..memory.base + memory.bytes;
    let over = COMMS.lock().values().any(|comm| comm.windows.lock().values().any(|w| inside.contains(&w.base)));
    if over {
        let text = format!("ncclMemFree: ptr {:#x} has a window that is still registered", memory.base);
        check::breach(Rule::WindowLifetime, text)?;
    }
    Ok(())
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
        *there = c_char::from_ne_bytes([byte]);
    }
    Ok(id)
}

fn rendezvous_path(id: &ncclUniqueId) -> Outcome<PathBuf> {
    let bytes: Vec<u8> = id.internal.iter().map(|b| b.to_ne_bytes()[0]).take_while(|b| *b != 0).collect();
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
        graph::refuse_unsafe("ncclCommInitRank")?;
        let creation = Creation { id, ranks, rank, device };
        let out = out as usize;
        now_or_at_group_end(move || {
            let comm = creation.create()?;
            // SAFETY: the caller vouches for `out`, inside a group until it ends.
            unsafe { (out as *mut ncclComm_t).write(comm as ncclComm_t) };
            Ok(())
        })
    }

    /// `ncclCommInitRankConfig`: as `ncclCommInitRank`; nothing that a configuration can ask for has a meaning here.
    ///
    /// # Safety
    ///
    /// As [`Comm::init_rank`]; `config` is null or points to a structure as long as its `size` field says.
    pub unsafe fn init_rank_config(
        out: *mut ncclComm_t,
        ranks: i32,
        id: ncclUniqueId,
        rank: i32,
        config: *const ncclConfig_t,
    ) -> Outcome<()> {
        // SAFETY: passed on to the caller.
        unsafe { check_header(config.cast(), "ncclCommInitRankConfig: config") }?;
        // SAFETY: passed on to the caller.
        unsafe { Self::init_rank(out, ranks, id, rank) }
    }

    /// `ncclCommInitAll`.
    ///
    /// # Safety
    ///
    /// `out` has room for `devices` communicators; `list` is null or holds as many ordinals.
    pub unsafe fn init_all(out: *mut ncclComm_t, devices: i32, list: *const i32) -> Outcome<()> {
        if out.is_null() || devices < 1 {
            return Err(usage(format!("ncclCommInitAll: {devices} devices, result at {out:p}")));
        }
        let chosen: Vec<i32> = if list.is_null() {
            (0..devices).collect()
        } else {
            // SAFETY: the caller vouches for the list.
            unsafe { std::slice::from_raw_parts(list, devices as usize) }.to_vec()
        };
        let here = device::selected().ordinal;
        let id = unique_id()?;
        group_start();
        let begun = chosen.iter().enumerate().try_for_each(|(rank, ordinal)| {
            device::select(*ordinal)?;
            // SAFETY: the caller vouches for the place of each communicator.
            unsafe { Self::init_rank(out.wrapping_add(rank), devices, id, rank as i32) }
        });
        if begun.is_err() {
            // Those that were to be made would wait for the others.
            GROUP.with_borrow_mut(|(_, list)| list.clear());
        }
        let ended = group_end();
        device::select(here)?;
        begun.and(ended)
    }

    /// `ncclCommSplit`: collective; a rank without a color gets no communicator. Inside a group it is done when that ends.
    ///
    /// # Safety
    ///
    /// `out` must be writable, inside a group until it ends; `config` is null or points to a structure as long as its
    /// `size` field says.
    pub unsafe fn split(
        self: &Arc<Self>,
        color: i32,
        key: i32,
        out: *mut ncclComm_t,
        config: *const ncclConfig_t,
    ) -> Outcome<()> {
        const FUNCTION: &str = "ncclCommSplit";
        // SAFETY: passed on to the caller.
        unsafe { check_header(config.cast(), "ncclCommSplit: config") }?;
        if out.is_null() {
            return Err(usage(format!("{FUNCTION}: newcomm is null")));
        }
        if color < 0 && color != NCCL_SPLIT_NOCOLOR {
            return Err(usage(format!("{FUNCTION}: color {color} is negative and not NCCL_SPLIT_NOCOLOR")));
        }
        self.device.check()?;
        graph::refuse_unsafe(FUNCTION)?;
        let (comm, out) = (Arc::clone(self), out as usize);
        now_or_at_group_end(move || {
            let channel = comm.line.run(|channel| {
                channel.exchange(FUNCTION, [color as u32 as u64, key as u32 as u64, 0, 0], 0)?;
                let mut members = Vec::new();
                for rank in 0..channel.ranks() {
                    let [theirs, key, ..] = channel.offer(rank)?.args;
                    if theirs as u32 as i32 == color && color != NCCL_SPLIT_NOCOLOR {
                        members.push((key as u32 as i32, rank));
                    }
                }
                members.sort_unstable();
                let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
                let label = format!("communicator of {} ranks", members.len());
                channel.split(FUNCTION, &members, label)
            })?;
            let made = channel.map_or(0, |channel| Self::keep(channel, comm.device));
            // SAFETY: the caller vouches for `out`, inside a group until it ends.
            unsafe { (out as *mut ncclComm_t).write(made as ncclComm_t) };
            Ok(())
        })
    }

    /// Makes a communicator known; gives its handle.
    fn keep(channel: Channel, device: &'static Device) -> usize {
        let status = Arc::new(Status::default());
        let comm = Arc::new(Self {
            rank: channel.rank(),
            ranks: channel.ranks(),
            device,
            line: Line::new(channel, Arc::clone(&status)),
            status,
            windows: Mutex::default(),
            symmetric_windows: AtomicU64::new(0),
        });
        let handle = Arc::as_ptr(&comm) as usize;
        COMMS.lock().insert(handle, comm);
        stats::count(|s| &s.comms_created);
        handle
    }

    /// `ncclCommQueryProperties`.
    ///
    /// # Safety
    ///
    /// `properties` is null or points to a structure as long as its `size` field says.
    pub unsafe fn query_properties(&self, properties: *mut ncclCommProperties_t) -> Outcome<()> {
        const NAME: &str = "ncclCommQueryProperties: props";
        if properties.is_null() {
            return Err(usage(format!("{NAME} is null")));
        }
        // SAFETY: passed on to the caller.
        let size = unsafe { check_header(properties.cast(), NAME) }?;
        if size < size_of::<ncclCommProperties_t>() {
            let needed = size_of::<ncclCommProperties_t>();
            return Err(usage(format!("{NAME}.size is {size}, at least {needed} is needed")));
        }
        let answer = ncclCommProperties_t {
            rank: self.rank as i32,
            nRanks: self.ranks as i32,
            cudaDev: self.device.ordinal,
            nvmlDev: self.device.ordinal,
            // What EP programs ask for before they create a group.
            deviceApiSupport: true,
            multimemSupport: false,
            ginType: NCCL_GIN_TYPE_NONE,
            nLsaTeams: 1,
            hostRmaSupport: false,
            railedGinType: NCCL_GIN_TYPE_NONE,
            // SAFETY: the caller vouches for as many bytes as the size says.
            ..unsafe { properties.read() }
        };
        // SAFETY: as above.
        unsafe { properties.write(answer) };
        Ok(())
    }

    /// The communicator that a handle names.
    pub fn resolve(handle: ncclComm_t, function: &str) -> Outcome<Arc<Comm>> {
        if handle.is_null() {
            return Err(usage(format!("{function}: comm is null")));
        }
        let found = COMMS.lock().get(&(handle as usize)).cloned();
        let comm = found.ok_or_else(|| {
            usage(format!("{function}: {handle:p} is not a live communicator")).breaks(Rule::DestroyedObject)
        })?;
        check::act_as(comm.rank);
        Ok(comm)
    }

    /// `ncclCommDestroy` and `ncclCommAbort`.
    pub fn close(handle: ncclComm_t, function: &str, abort: bool) -> Outcome<()> {
        let comm = Self::resolve(handle, function)?;
        graph::refuse_unsafe(function)?;
        if abort {
            comm.status.aborted.store(true, Ordering::SeqCst);
            for breaker in &*comm.status.breakers.lock() {
                breaker.trip(&format!("rank {} aborted the communicator", comm.rank));
            }
        }
        comm.line.run(|_| Ok(()))?;
        comm.line.close();
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

    /// Registers memory and writes the window to `out`: with `NCCL_WIN_COLL_SYMMETRIC` collective and mapped by the
    /// peers, inside a group when it ends; without it local.
    ///
    /// # Safety
    ///
    /// `out` must be writable, inside a group until it ends.
    pub unsafe fn register(
        self: &Arc<Self>,
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
        let (base, out, comm) = (base as usize, out as usize, Arc::clone(self));
        let register = move |symmetric: Option<Symmetric>| {
            let window = Arc::new(Window { base, bytes, symmetric, registered: AtomicBool::new(true) });
            let handle = Arc::as_ptr(&window) as usize;
            comm.windows.lock().insert(handle, window);
            // SAFETY: the caller vouches for `out`, inside a group until it ends.
            unsafe { (out as *mut ncclWindow_t).write(handle as ncclWindow_t) };
            Ok(())
        };
        if flags & NCCL_WIN_COLL_SYMMETRIC as i32 == 0 {
            return register(None);
        }
        let comm = Arc::clone(self);
        now_or_at_group_end(move || register(Some(comm.meet_windows(&memory, base, bytes)?)))
    }

    /// Tells the peers where the own part of a window is, and maps theirs.
    fn meet_windows(&self, memory: &memory::Allocation, base: usize, bytes: usize) -> Outcome<Symmetric> {
        const FUNCTION: &str = "ncclCommWindowRegister";
        let file = memory::shared_file(memory.base)
            .ok_or_else(|| usage(format!("{FUNCTION}: {base:#x} was freed meanwhile")))?;
        let own = [std::process::id() as usize, file as usize, memory.bytes, base - memory.base, bytes]
            .map(usize::to_ne_bytes);
        self.line.run(|channel| {
            let own = own.as_flattened();
            channel.stage(own.len())?.copy_from_slice(own);
            channel.exchange(FUNCTION, [0; 4], own.len())?;
            let mapped = (0..channel.ranks())
                .map(|rank| {
                    let words = channel.offer(rank)?.bytes.as_chunks::<{ size_of::<usize>() }>().0;
                    let words: Vec<usize> = words.iter().map(|word| usize::from_ne_bytes(*word)).collect();
                    let [pid, file, total, offset, bytes] = words[..] else {
                        return Err(Fault::nccl(
                            ncclInternalError,
                            format!("{FUNCTION}: rank {rank} offered too little"),
                        ));
                    };
                    if rank == channel.rank() {
                        return Ok(PeerMemory { map: None, base, bytes });
                    }
                    let map = sys::open_fd_of(pid as u32, file as u32)
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
            Ok(Symmetric { number: self.symmetric_windows.fetch_add(1, Ordering::Relaxed) + 1, by_rank })
        })
    }

    /// The window that a handle names.
    pub fn window(&self, handle: usize) -> Outcome<Arc<Window>> {
        let found = self.windows.lock().get(&handle).cloned();
        found.ok_or_else(|| {
            usage(format!("{handle:#x} is not a window of the group's communicator")).breaks(Rule::WindowMissing)
        })
    }

    /// Ends a registration.
    pub fn deregister(&self, window: ncclWindow_t) -> Outcome<()> {
        let removed = self.windows.lock().remove(&(window as usize));
        match removed {
            Some(window) => {
                window.registered.store(false, Ordering::SeqCst);
                Ok(())
            }
            None => Err(usage(format!("ncclCommWindowDeregister: {window:p} is not a window of this communicator"))),
        }
    }

    /// Address of `bytes` bytes at `offset` in a registered window.
    pub fn window_address(&self, window: ncclWindow_t, offset: u64, bytes: usize) -> Outcome<*mut c_void> {
        let window = self.window(window as usize)?;
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
        match end {
            Some(end) if end <= window.bytes => Ok((window.base + end - bytes) as *mut c_void),
            _ => {
                let text = format!("{bytes} bytes at offset {offset} of a window of {} bytes", window.bytes);
                Err(usage(text).breaks(Rule::WindowBounds))
            }
        }
    }

    fn collective(
        &self,
        stream: &Arc<Stream>,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        check::stream_device(stream.device().ordinal, self.device.ordinal)?;
        self.line.enqueue(stream, |s| &s.collectives, spans, run)
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
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                for rank in 0..channel.ranks() {
                    receive.write(rank * bytes + piece.start, channel.offer(rank)?.bytes);
                }
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
        let reduction = Self::checked_reduction("ncclAllReduce", datatype, op)?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclAllReduce", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclAllReduce", "recvbuff", receive, bytes) }?;
        let what = format!("ncclAllReduce(count={count}, datatype={}, op={reduction:?})", dtype::name(datatype));
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                reduce_offers(channel, datatype, reduction, 0..piece.len(), &receive, piece.start)?;
            }
            Ok(())
        })
    }

    /// A reduction that this library does on this type.
    fn checked_reduction(function: &str, datatype: ncclDataType_t, op: ncclRedOp_t) -> Outcome<Reduction> {
        let reduction = Reduction::from_nccl(op)
            .ok_or_else(|| usage(format!("{function}: reduction {op} is not supported by the host runtime")))?;
        if !dtype::reducible(datatype) {
            let text = format!("{function}: {} is not supported by the host runtime", dtype::name(datatype));
            return Err(usage(text));
        }
        Ok(reduction)
    }

    fn checked_rank(&self, function: &str, argument: &str, rank: i32) -> Outcome<usize> {
        let known = usize::try_from(rank).ok().filter(|rank| *rank < self.ranks);
        known.ok_or_else(|| usage(format!("{function}: {argument} {rank} of {} ranks", self.ranks)))
    }

    /// `ncclReduce`.
    ///
    /// # Safety
    ///
    /// `send`, and on the root `receive` (`count` elements each), must stay valid until the stream has got there.
    #[expect(clippy::too_many_arguments, reason = "those of the C function")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        root: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclReduce", count, datatype)?;
        let reduction = Self::checked_reduction("ncclReduce", datatype, op)?;
        let root = self.checked_rank("ncclReduce", "root", root)?;
        let is_root = root == self.rank;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclReduce", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive` on the root; elsewhere it is not looked at.
        let receive = unsafe { span("ncclReduce", "recvbuff", receive, if is_root { bytes } else { 0 }) }?;
        let name = dtype::name(datatype);
        let what = format!("ncclReduce(count={count}, datatype={name}, op={reduction:?}, root={root})");
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                if is_root {
                    reduce_offers(channel, datatype, reduction, 0..piece.len(), &receive, piece.start)?;
                }
            }
            Ok(())
        })
    }

    /// `ncclReduceScatter`.
    ///
    /// # Safety
    ///
    /// `send` (`count` elements for each rank) and `receive` (`count`) must stay valid until the stream has got there.
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclReduceScatter", count, datatype)?;
        let reduction = Self::checked_reduction("ncclReduceScatter", datatype, op)?;
        let (rank, ranks) = (self.rank, self.ranks);
        let total = bytes
            .checked_mul(ranks)
            .ok_or_else(|| usage(format!("ncclReduceScatter: recvcount {count} is too large")))?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclReduceScatter", "sendbuff", send, total) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclReduceScatter", "recvbuff", receive, bytes) }?;
        let what =
            format!("ncclReduceScatter(recvcount={count}, datatype={}, op={reduction:?})", dtype::name(datatype));
        // Whole elements of any type.
        let most = (PIECE_BYTES / ranks).next_multiple_of(8);
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, most) {
                let length = piece.len();
                let staged = channel.stage(length * ranks)?;
                for (to, part) in staged.chunks_exact_mut(length.max(1)).enumerate() {
                    send.read(to * bytes + piece.start, part);
                }
                channel.exchange(&what, [0; 4], length * ranks)?;
                reduce_offers(channel, datatype, reduction, rank * length..(rank + 1) * length, &receive, piece.start)?;
            }
            Ok(())
        })
    }

    /// `ncclSend` and `ncclRecv`: inside a group the transfers go on side by side when it ends.
    ///
    /// # Safety
    ///
    /// `buffer` (`count` elements) must stay valid until the stream has got there.
    pub unsafe fn transfer(
        self: &Arc<Self>,
        direction: Direction,
        buffer: *const c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let (function, argument) = match direction {
            Direction::Send => ("ncclSend", "sendbuff"),
            Direction::Receive => ("ncclRecv", "recvbuff"),
        };
        let bytes = Self::checked_bytes(function, count, datatype)?;
        let peer = self.checked_rank(function, "peer", peer)?;
        // SAFETY: the caller vouches for the buffer.
        let span = unsafe { span(function, argument, buffer, bytes) }?;
        let transfer = Transfer { direction, peer, span, count, datatype };
        if GROUP.with_borrow(|(depth, _)| *depth > 0) {
            TRANSFERS.with_borrow_mut(|list| list.push((Arc::clone(self), Arc::clone(stream), transfer)));
            return Ok(());
        }
        self.transfer_all(vec![transfer], stream)
    }

    fn transfer_all(&self, batch: Vec<Transfer>, stream: &Arc<Stream>) -> Outcome<()> {
        let spans: Vec<Span> = batch.iter().map(|transfer| transfer.span).collect();
        self.collective(stream, &spans, move |channel| channel.transfer(&batch))
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
        let root = self.checked_rank("ncclBroadcast", "root", root)?;
        let is_root = root == self.rank;
        // SAFETY: the caller vouches for `send` on the root; elsewhere it is not looked at.
        let send = unsafe { span("ncclBroadcast", "sendbuff", send, if is_root { bytes } else { 0 }) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclBroadcast", "recvbuff", receive, bytes) }?;
        let what = format!("ncclBroadcast(count={count}, datatype={}, root={root})", dtype::name(datatype));
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                let own = if is_root { piece.len() } else { 0 };
                send.read(if is_root { piece.start } else { 0 }, channel.stage(own)?);
                channel.exchange(&what, [0; 4], own)?;
                receive.write(piece.start, channel.offer(root)?.bytes);
            }
            Ok(())
        })
    }
}

/// The parts in which `bytes` bytes travel: at least one, so that ranks meet even for nothing.
fn pieces(bytes: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.max(1)).step_by(most).map(move |start| start..(start + most).min(bytes))
}

/// Reduces `part` of what each rank offers into `receive`, at `offset`.
fn reduce_offers(
    channel: &Channel,
    datatype: ncclDataType_t,
    reduction: Reduction,
    part: Range<usize>,
    receive: &Span,
    offset: usize,
) -> Outcome<()> {
    let offer = |rank| channel.offer(rank).map(|offer| &offer.bytes[part.clone()]);
    let inputs = (0..channel.ranks()).map(offer).collect::<Outcome<Vec<&[u8]>>>()?;
    let mut output = vec![0u8; part.len()];
    dtype::reduce(datatype, reduction, &inputs, &mut output);
    receive.write(offset, &output);
    Ok(())
}

/// Size of a structure of NCCL's that starts with its size and a magic number; 0 for a null pointer.
///
/// # Safety
///
/// `pointer` is null or points to such a structure.
unsafe fn check_header(pointer: *const c_void, name: &str) -> Outcome<usize> {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Header {
        size: usize,
        magic: u32,
    }
    if pointer.is_null() {
        return Ok(0);
    }
    // SAFETY: the caller vouches for the two fields.
    let Header { size, magic } = unsafe { pointer.cast::<Header>().read() };
    if magic != NCCL_API_MAGIC {
        let text = format!("{name}.magic is {magic:#x}, not {NCCL_API_MAGIC:#x}: start from its initializer");
        return Err(usage(text));
    }
    Ok(size)
}

/// # Safety
///
/// As [`Span::new`].
unsafe fn span(function: &str, argument: &str, pointer: *const c_void, bytes: usize) -> Outcome<Span> {
    // SAFETY: passed on to the caller.
    unsafe { Span::new(pointer, bytes) }.map_err(|fault| usage(format!("{function}: {argument}: {}", fault.text)))
}

impl Creation {
    fn create(&self) -> Outcome<usize> {
        let path = rendezvous_path(&self.id)?;
        let (rank, ranks) = (self.rank as usize, self.ranks as usize);
        inject::note_rank(self.device.ordinal, rank);
        let label = format!("communicator of {ranks} ranks");
        Ok(Comm::keep(Channel::meet(&path, rank, ranks, label)?, self.device))
    }
}

/// `ncclGroupStart`.
pub fn group_start() {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
}

/// `ncclGroupEnd`: communicators and windows of the group are set up at the same time, each on a thread of its own;
/// then the transfers of each communicator are enqueued as one operation.
pub fn group_end() -> Outcome<()> {
    let jobs = GROUP.with_borrow_mut(|(depth, list)| {
        if *depth == 0 {
            return Err(Fault::nccl(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart before it"));
        }
        *depth -= 1;
        Ok(if *depth == 0 { std::mem::take(list) } else { Vec::new() })
    })?;
    let results: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            jobs.into_iter().map(|job| scope.spawn(|| crate::fault::contain(job).map_err(check::sign))).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Fault::nccl(ncclInternalError, "ncclGroupEnd: a thread panicked")))
            })
            .collect()
    });
    let done = results.into_iter().rev().find(Result::is_err).unwrap_or(Ok(()));
    if GROUP.with_borrow(|(depth, _)| *depth > 0) {
        return done;
    }
    let mut open = TRANSFERS.take();
    done?;
    while let Some((comm, stream)) = open.first().map(|(comm, stream, _)| (Arc::clone(comm), Arc::clone(stream))) {
        let (own, others): (Vec<_>, Vec<_>) = open.into_iter().partition(|(there, ..)| Arc::ptr_eq(there, &comm));
        open = others;
        if own.iter().any(|(_, there, _)| !Arc::ptr_eq(there, &stream)) {
            let text = "ncclGroupEnd: ncclSend and ncclRecv of one communicator on several streams are not supported \
                        by the host runtime: use one stream in a group";
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        comm.transfer_all(own.into_iter().map(|(_, _, transfer)| transfer).collect(), &stream)?;
    }
    Ok(())
}
