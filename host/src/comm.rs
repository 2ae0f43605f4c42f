//! Communicators: how they are made and destroyed, and what they say of themselves.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_void};
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::acting;
use crate::channel::{self, Channel, rendezvous};
use crate::check;
use crate::device::{self, Device};
use crate::domains;
use crate::fault::{Fault, Outcome};
use crate::inject::{self, Missing};
use crate::line::{Line, Status};
use crate::rule::Rule;
use crate::windows::{Window, Windows};
use crate::{batch, graph, memory, stats};

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
    /// Memory registered with it.
    pub windows: Arc<Windows>,
}

static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);

/// A communicator to create.
struct Creation {
    id: ncclUniqueId,
    ranks: i32,
    rank: i32,
    device: &'static Device,
}

/// A unique id, and a rank.
type Use = (Vec<c_char>, i32);

/// Unique ids that communicators were made with, and the ranks of this process among them.
static USED: LazyLock<Mutex<HashSet<Use>>> = LazyLock::new(Mutex::default);

/// Reports memory that is freed while a window is registered over it.
pub fn check_freed(memory: &memory::Allocation) -> Outcome<()> {
    let inside = memory.base..memory.base + memory.bytes;
    let over = COMMS.lock().values().any(|comm| comm.windows.any_in(&inside));
    if over {
        let text = format!("ncclMemFree: ptr {:#x} has a window that is still registered", memory.base);
        check::breach(Rule::WindowLifetime, text)?;
    }
    Ok(())
}

/// Windows that are registered now.
pub fn live_windows() -> u64 {
    COMMS.lock().values().map(|comm| comm.windows.count() as u64).sum()
}

/// The window that a handle names, of whatever communicator.
pub fn window(handle: ncclWindow_t) -> Outcome<Arc<Window>> {
    let found = COMMS.lock().values().find_map(|comm| comm.windows.get(handle as usize).ok());
    found.ok_or_else(|| usage(format!("{handle:p} is not a window of a communicator")).breaks(Rule::WindowMissing))
}

/// An error for an argument of NCCL's.
pub fn usage(text: impl Into<String>) -> Fault {
    Fault::nccl(ncclInvalidArgument, text)
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
        batch::now_or_at_end(move || {
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
        let id = rendezvous::unique_id()?;
        batch::start();
        let begun = chosen.iter().enumerate().try_for_each(|(rank, ordinal)| {
            device::select(*ordinal)?;
            // SAFETY: the caller vouches for the place of each communicator.
            unsafe { Self::init_rank(out.wrapping_add(rank), devices, id, rank as i32) }
        });
        if begun.is_err() {
            // Those that were to be made would wait for the others.
            batch::forget_set_ups();
        }
        let ended = batch::end();
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
        batch::now_or_at_end(move || {
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
            windows: Arc::default(),
        });
        let handle = Arc::as_ptr(&comm) as usize;
        acting::joined(device.ordinal, comm.rank);
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
        let domain = domains::size(self.ranks);
        // One domain has no use for a network.
        let gin = match domain == self.ranks || inject::is_missing(Missing::Gin) {
            true => NCCL_GIN_TYPE_NONE,
            false => NCCL_GIN_TYPE_GDAKI,
        };
        let answer = ncclCommProperties_t {
            rank: self.rank as i32,
            nRanks: self.ranks as i32,
            cudaDev: self.device.ordinal,
            nvmlDev: self.device.ordinal,
            // What EP programs ask for before they create a group.
            deviceApiSupport: true,
            multimemSupport: false,
            ginType: gin,
            nLsaTeams: (self.ranks / domain) as i32,
            hostRmaSupport: false,
            railedGinType: gin,
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
        acting::act_as(comm.rank);
        Ok(comm)
    }

    /// `ncclCommDestroy` and `ncclCommAbort`.
    pub fn close(handle: ncclComm_t, function: &str, abort: bool) -> Outcome<()> {
        let comm = Self::resolve(handle, function)?;
        graph::refuse_unsafe(function)?;
        if abort {
            comm.status.abort(&format!("rank {} aborted the communicator", comm.rank));
        }
        comm.line.run(|_| Ok(()))?;
        comm.line.close();
        if COMMS.lock().remove(&(handle as usize)).is_some() {
            acting::left(comm.device.ordinal, comm.rank);
            stats::count(|s| &s.comms_destroyed);
        }
        Ok(())
    }
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

impl Creation {
    fn create(&self) -> Outcome<usize> {
        let path = rendezvous::path_of(&self.id)?;
        let (rank, ranks) = (self.rank as usize, self.ranks as usize);
        acting::will_be(self.device.ordinal, rank);
        let label = format!("communicator of {ranks} ranks");
        let used = (self.id.internal.to_vec(), self.rank);
        if USED.lock().contains(&used) {
            acting::act_as(rank);
            let text = format!(
                "ncclCommInitRank: commId made a communicator before, with rank {rank} in this process: call \
                 ncclGetUniqueId for each communicator"
            );
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::UniqueId));
        }
        let channel = Channel::meet(&path, rank, ranks, self.device.ordinal, label)?;
        USED.lock().insert(used);
        Ok(Comm::keep(channel, self.device))
    }
}
