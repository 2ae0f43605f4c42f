//! Channels: how the ranks of a communicator or EP group meet and exchange data.
//!
//! A channel is a control block in shared memory plus, for every rank, two memory files ("staging") in which it offers
//! data to its peers. An operation is: fill the own staging, [`Channel::exchange`], read the peers' staging. Staging and
//! slots alternate between two sets by the parity of the operation, so one barrier an operation is enough: a rank that
//! passed barrier n knows that everyone has finished operation n-1, and with that the set which operation n+1 fills.
//!
//! Bulk data lives in memory files that peers open through `/proc/<pid>/fd`, so the size of /dev/shm does not matter;
//! they are opened when the channel is made, so a rank may exit while slower peers still read what it offered.

pub mod pairs;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvte_ep_bindings::{
    cudaErrorLaunchFailure, cudaErrorLaunchTimeout, cudaErrorMemoryAllocation, cudaErrorOperatingSystem,
    ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclSystemError,
};

use crate::check::{self, Rule};
use crate::fault::{Fault, Outcome};
use crate::sys::{self, Mapping};

/// Environment variable with the time in milliseconds that a rank waits for its peers (default 60000).
pub const TIMEOUT_VARIABLE: &str = "NVTE_EP_HOST_TIMEOUT_MS";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a waiting rank looks whether its missing peers still live.
const LIVENESS_PERIOD: Duration = Duration::from_millis(200);
/// Most ranks of a channel.
pub const MAX_RANKS: usize = 1024;
/// Bytes that a rank offers at a time where an operation has more: bounds the staging, and keeps it in the caches.
pub const PIECE_BYTES: usize = 4 << 20;
/// Marks a control block and its format.
const MAGIC: u32 = 0x4e56_0002;

const TEXT_WORDS: usize = 64;
const SEAT_FREE: u32 = 0;
const SEAT_TAKEN: u32 = 1;
const SEAT_READY: u32 = 2;

/// Text in shared memory; written before and read after an atomic that orders the two.
#[repr(C)]
struct Text([AtomicU64; TEXT_WORDS]);

impl Text {
    fn store(&self, text: &str) {
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

    fn load(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
    }
}

#[repr(C)]
struct Header {
    magic: AtomicU32,
    ranks: AtomicU32,
    /// Futex word: moves whenever a waiting rank should look again.
    bell: AtomicU32,
    /// 0, or 1 + the rank whose failure ended the channel; it claims `failure_claim` first and sets this last.
    failed_rank: AtomicU32,
    failure_claim: AtomicU32,
    reserved: AtomicU32,
    failure: Text,
}

/// What one rank says about one operation.
#[repr(C)]
struct Slot {
    number: AtomicU64,
    digest: AtomicU64,
    /// Bytes offered in the staging of this parity.
    bytes: AtomicU64,
    args: [AtomicU64; 4],
    /// 0, or which replay of a graph the operation is from.
    replay: AtomicU64,
    text: Text,
}

#[repr(C)]
struct Seat {
    state: AtomicU32,
    pid: AtomicU32,
    start_time: AtomicU64,
    /// Descriptor numbers, in process `pid`, of the two staging files.
    staging: [AtomicU32; 2],
    /// 1 + the descriptor number of the outbox, once there is one.
    outbox: AtomicU32,
    reserved: AtomicU32,
    /// Barriers that the rank has reached.
    arrived: AtomicU64,
    /// Operations that it is done with.
    finished: AtomicU64,
    /// 0, or 1 + the operations after which it destroyed its end.
    left: AtomicU64,
    slots: [Slot; 2],
}

/// The control block: header and one seat a rank, all atomics.
struct Control {
    map: Mapping,
    ranks: usize,
}

impl Control {
    fn bytes(ranks: usize) -> usize {
        size_of::<Header>() + ranks * size_of::<Seat>()
    }

    /// Maps a control block and agrees on its number of ranks with whoever came first.
    fn open(fd: &OwnedFd, rank: usize, ranks: usize) -> Outcome<Self> {
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

    fn header(&self) -> &Header {
        // SAFETY: the block is mapped, larger than a header, page-aligned, and zero bytes are valid atomics.
        unsafe { &*self.map.base().cast::<Header>() }
    }

    fn seats(&self) -> &[Seat] {
        // SAFETY: `bytes` sized the mapping as a header followed by this many seats, whose size is a multiple of 8.
        let first = unsafe { self.map.base().add(size_of::<Header>()) };
        // SAFETY: as above; zero bytes are valid atomics.
        unsafe { std::slice::from_raw_parts(first.cast::<Seat>(), self.ranks) }
    }

    fn ring(&self) {
        let bell = &self.header().bell;
        bell.fetch_add(1, Ordering::SeqCst);
        sys::futex_wake_all(bell);
    }

    /// Ends the channel for everyone, unless somebody has already.
    fn fail(&self, rank: usize, text: &str) {
        let header = self.header();
        let mine = rank as u32 + 1;
        if header.failure_claim.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            header.failure.store(text);
            header.failed_rank.store(mine, Ordering::SeqCst);
            self.ring();
        }
    }

    fn failure(&self) -> Option<(usize, String)> {
        let failed = self.header().failed_rank.load(Ordering::SeqCst);
        (failed != 0).then(|| (failed as usize - 1, self.header().failure.load()))
    }
}

fn system(what: &str, error: &io::Error) -> Fault {
    Fault::both(cudaErrorOperatingSystem, ncclSystemError, format!("{what}: {error}"))
}

/// A rank's own staging file of one parity.
#[derive(Debug)]
struct Staging {
    fd: OwnedFd,
    map: Option<Mapping>,
}

impl Staging {
    fn new() -> Outcome<Self> {
        let fd = sys::memfd("nvte-ep-staging").map_err(|e| system("cannot create a staging file", &e))?;
        Ok(Self { fd, map: None })
    }

    fn capacity(&self) -> usize {
        self.map.as_ref().map_or(0, Mapping::byte_len)
    }

    fn grow(&mut self, bytes: usize) -> Outcome<()> {
        if self.capacity() < bytes {
            let target = bytes.max((self.capacity() * 2).min(PIECE_BYTES)).next_multiple_of(64 * 1024);
            let full = |e: &io::Error| {
                let text = format!("cannot reserve {target} bytes of staging: {e}");
                Fault::both(cudaErrorMemoryAllocation, ncclSystemError, text)
            };
            sys::reserve(self.fd.as_fd(), target).map_err(|e| full(&e))?;
            self.map = Some(Mapping::shared(self.fd.as_fd(), target).map_err(|e| full(&e))?);
        }
        Ok(())
    }
}

/// A peer's staging file of one parity.
struct PeerStaging {
    fd: OwnedFd,
    map: Option<Mapping>,
}

/// What a rank offered in the current operation.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Its data.
    pub bytes: &'a [u8],
    /// The numbers it passed to [`Channel::exchange`].
    pub args: [u64; 4],
}

/// Marks a channel as ended by this rank, from outside an operation (an abort, a skipped operation).
#[derive(Clone)]
pub struct Breaker {
    control: std::sync::Arc<Control>,
    rank: usize,
}

impl std::fmt::Debug for Breaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Breaker").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Breaker {
    /// Whether both end the same channel.
    pub fn is(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.control, &other.control)
    }

    /// Ends the channel; peers that wait get an error with this text.
    pub fn trip(&self, text: &str) {
        self.control.fail(self.rank, text);
    }
}

/// One rank's end of a channel.
pub struct Channel {
    control: std::sync::Arc<Control>,
    rank: usize,
    /// For messages: what the channel belongs to.
    label: String,
    timeout: Duration,
    operations: u64,
    barriers: u64,
    /// 0, or which replay of a graph the operation is from that comes next.
    pub replay: u64,
    own: [Staging; 2],
    peers: Vec<Option<[PeerStaging; 2]>>,
    pairs: pairs::Pairs,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel")
            .field("label", &self.label)
            .field("rank", &self.rank)
            .field("operations", &self.operations)
            .finish_non_exhaustive()
    }
}

/// Time that a rank waits for its peers.
pub fn timeout() -> Duration {
    let milliseconds = sys::positive_from_environment(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT.as_millis() as u64);
    Duration::from_millis(milliseconds)
}

/// Folder for rendezvous files.
pub fn rendezvous_folder() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let writable = is_writable(shm);
    if writable { shm.to_owned() } else { std::env::temp_dir() }
}

fn is_writable(folder: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::CString::new(folder.as_os_str().as_bytes()).is_ok_and(|path| {
        // SAFETY: path is a C string that lives through the call.
        unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
    })
}

impl Channel {
    /// Meets the other ranks at the rendezvous file `path`, which the first one creates.
    pub fn meet(path: &Path, rank: usize, ranks: usize, label: String) -> Outcome<Self> {
        check::act_as(rank);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(|e| system(&format!("cannot open the rendezvous file {}", path.display()), &e))?;
        let file = OwnedFd::from(file);
        // Until all have met: `nvte-ep launch` and `run` remove old rendezvous files that nobody has locked.
        // SAFETY: the descriptor is open. Where the file system has no locks, the file may be removed while ranks wait.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH) };
        let control = Control::open(&file, rank, ranks)?;
        let met = Self::join(control, rank, label);
        // Whether all met or the time is up, nobody needs the name any more; a peer may have removed it first.
        if rank == 0 || met.is_err() {
            let _ = std::fs::remove_file(path);
        }
        met
    }

    /// Makes a channel over `members`, ranks of this one in the order of their new numbers; collective over all ranks of
    /// this one, and nothing for those that are not among their own `members`.
    pub fn split(&mut self, what: &str, members: &[usize], label: String) -> Outcome<Option<Self>> {
        let rank = members.iter().position(|member| *member == self.rank);
        let fd = if rank == Some(0) {
            let fd = sys::memfd("nvte-ep-control").map_err(|e| system("cannot create a control block", &e))?;
            sys::reserve(fd.as_fd(), Control::bytes(members.len()))
                .map_err(|e| system("cannot reserve a control block", &e))?;
            Some(fd)
        } else {
            None
        };
        let number = fd.as_ref().map_or(0, |fd| fd.as_raw_fd() as u64);
        self.exchange(&format!("{what}: shared control block"), [number, 0, 0, 0], 0)?;
        let Some(rank) = rank else { return Ok(None) };
        let fd = match fd {
            Some(fd) => fd,
            None => {
                let first = members[0];
                let root = self.offer(first)?.args[0] as u32;
                let pid = self.control.seats()[first].pid.load(Ordering::Relaxed);
                sys::open_fd_of(pid, root)
                    .map_err(|e| system(&format!("cannot open rank {first}'s control block"), &e))?
            }
        };
        let joined = Control::open(&fd, rank, members.len()).and_then(|control| Self::join(control, rank, label));
        // The first member keeps its descriptor until everyone has joined, which `join` waits for.
        drop(fd);
        joined.map(Some)
    }

    fn join(control: Control, rank: usize, label: String) -> Outcome<Self> {
        let own = [Staging::new()?, Staging::new()?];
        let seat = &control.seats()[rank];
        if seat.state.compare_exchange(SEAT_FREE, SEAT_TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            let text = format!("{label}: rank {rank} has joined already (two callers with the same rank)");
            control.fail(rank, &text);
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::ConfigDiffers));
        }
        let pid = std::process::id();
        seat.pid.store(pid, Ordering::Relaxed);
        seat.start_time.store(sys::start_time(pid).unwrap_or(0), Ordering::Relaxed);
        for (number, staging) in seat.staging.iter().zip(&own) {
            number.store(staging.fd.as_raw_fd() as u32, Ordering::Relaxed);
        }
        seat.state.store(SEAT_READY, Ordering::SeqCst);
        control.ring();
        let mut channel = Self {
            control: std::sync::Arc::new(control),
            rank,
            label,
            timeout: timeout(),
            operations: 0,
            barriers: 0,
            replay: 0,
            own,
            peers: Vec::new(),
            pairs: pairs::Pairs::default(),
        };
        let what = format!("{}: rendezvous", channel.label);
        channel.wait(&what, |seat| seat.state.load(Ordering::SeqCst) == SEAT_READY)?;
        if let Err(fault) = channel.open_peers() {
            channel.control.fail(rank, &fault.text);
            return Err(fault);
        }
        channel.barrier(&what)?;
        Ok(channel)
    }

    fn open_peers(&mut self) -> Outcome<()> {
        let mut peers = Vec::with_capacity(self.ranks());
        for (rank, seat) in self.control.seats().iter().enumerate() {
            if rank == self.rank {
                peers.push(None);
                continue;
            }
            let pid = seat.pid.load(Ordering::Relaxed);
            let open = |number: &AtomicU32| {
                sys::open_fd_of(pid, number.load(Ordering::Relaxed))
                    .map(|fd| PeerStaging { fd, map: None })
                    .map_err(|e| system(&format!("{}: cannot open staging of rank {rank}", self.label), &e))
            };
            peers.push(Some([open(&seat.staging[0])?, open(&seat.staging[1])?]));
        }
        self.peers = peers;
        Ok(())
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.control.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What ends the channel from outside.
    pub fn breaker(&self) -> Breaker {
        Breaker { control: std::sync::Arc::clone(&self.control), rank: self.rank }
    }

    /// Number of the operation that was exchanged last, the same on every rank.
    pub fn operation(&self) -> u64 {
        self.operations
    }

    fn parity(&self) -> usize {
        (self.operations & 1) as usize
    }

    /// The own staging for the operation about to be exchanged, `bytes` long, with stale content.
    pub fn stage(&mut self, bytes: usize) -> Outcome<&mut [u8]> {
        let parity = ((self.operations + 1) & 1) as usize;
        if bytes == 0 {
            return Ok(&mut []);
        }
        let staging = &mut self.own[parity];
        staging.grow(bytes)?;
        Ok(staging.map.as_mut().map_or(&mut [], |map| map.bytes_mut(bytes)))
    }

    /// Offers the first `bytes` bytes of the staging to all peers and waits for theirs.
    ///
    /// `what` names the operation and every argument that must agree; ranks that differ get an error naming both.
    pub fn exchange(&mut self, what: &str, args: [u64; 4], bytes: usize) -> Outcome<()> {
        self.operations += 1;
        let parity = self.parity();
        let slot = &self.control.seats()[self.rank].slots[parity];
        slot.number.store(self.operations, Ordering::Relaxed);
        slot.digest.store(digest(what), Ordering::Relaxed);
        slot.bytes.store(bytes as u64, Ordering::Relaxed);
        for (there, arg) in slot.args.iter().zip(args) {
            there.store(arg, Ordering::Relaxed);
        }
        slot.replay.store(self.replay, Ordering::Relaxed);
        slot.text.store(what);
        let text = format!("{}: {what}, operation {}", self.label, self.operations);
        self.barrier(&text)?;
        self.agree(what)?;
        self.map_peers()
    }

    fn agree(&self, what: &str) -> Outcome<()> {
        for (rank, seat) in self.control.seats().iter().enumerate() {
            let slot = &seat.slots[self.parity()];
            let number = slot.number.load(Ordering::Relaxed);
            if slot.digest.load(Ordering::Relaxed) != digest(what) || number != self.operations {
                let theirs = slot.replay.load(Ordering::Relaxed);
                let text = format!(
                    "{}: ranks disagree at operation {}: rank {} entered {what}{}, rank {rank} entered {}{}",
                    self.label,
                    self.operations,
                    self.rank,
                    name_replay(self.replay),
                    slot.text.load(),
                    name_replay(theirs),
                );
                let rule = if self.replay == theirs { Rule::CallOrder } else { Rule::ReplayCount };
                let fault = Fault::both(cudaErrorLaunchFailure, ncclInvalidUsage, text).breaks(rule);
                return Err(self.end(fault));
            }
        }
        Ok(())
    }

    fn map_peers(&mut self) -> Outcome<()> {
        let parity = self.parity();
        for (rank, (peer, seat)) in self.peers.iter_mut().zip(self.control.seats()).enumerate() {
            let bytes = seat.slots[parity].bytes.load(Ordering::Relaxed) as usize;
            let Some(peer) = peer else { continue };
            let peer = &mut peer[parity];
            if peer.map.as_ref().map_or(0, Mapping::byte_len) < bytes {
                let size = std::fs::File::from(
                    peer.fd.try_clone().map_err(|e| system("cannot duplicate a staging descriptor", &e))?,
                )
                .metadata()
                .map_err(|e| system("cannot size a peer's staging", &e))?
                .len() as usize;
                if size < bytes {
                    let text = format!("{}: rank {rank} offers {bytes} bytes in a file of {size}", self.label);
                    return Err(Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text));
                }
                let map = Mapping::shared(peer.fd.as_fd(), size)
                    .map_err(|e| system(&format!("cannot map {size} bytes of rank {rank}'s staging"), &e))?;
                peer.map = Some(map);
            }
        }
        Ok(())
    }

    /// What `rank` offered in the operation just exchanged.
    pub fn offer(&self, rank: usize) -> Outcome<Offer<'_>> {
        let parity = self.parity();
        let slot = &self.control.seats()[rank].slots[parity];
        let bytes = slot.bytes.load(Ordering::Relaxed) as usize;
        let map = match &self.peers[rank] {
            Some(peer) => peer[parity].map.as_ref(),
            None => self.own[parity].map.as_ref(),
        };
        let bytes = match map {
            Some(map) => map.bytes(bytes),
            None if bytes == 0 => &[],
            None => {
                let text = format!("{}: staging of rank {rank} is not mapped", self.label);
                return Err(Fault::both(cudaErrorLaunchFailure, ncclSystemError, text));
            }
        };
        Ok(Offer { bytes, args: [0, 1, 2, 3].map(|i| slot.args[i].load(Ordering::Relaxed)) })
    }

    fn barrier(&mut self, what: &str) -> Outcome<()> {
        self.barriers += 1;
        let target = self.barriers;
        let seats = self.control.seats();
        seats[self.rank].arrived.store(target, Ordering::SeqCst);
        if seats.iter().all(|seat| seat.arrived.load(Ordering::SeqCst) >= target) {
            self.control.ring();
            return Ok(());
        }
        self.wait(what, |seat| seat.arrived.load(Ordering::SeqCst) >= target)
    }

    /// Ends the channel for everyone with a breach that this rank has found.
    fn end(&self, fault: Fault) -> Fault {
        check::act_as(self.rank);
        let fault = check::sign(fault);
        self.control.fail(self.rank, &fault.text);
        fault
    }

    /// The operations so far have ended on this rank.
    pub fn finish(&self) {
        self.control.seats()[self.rank].finished.store(self.operations, Ordering::SeqCst);
    }

    /// Ranks that are not done with what this one is done with.
    pub fn busy(&self) -> Vec<usize> {
        let seats = self.control.seats().iter().enumerate();
        seats.filter(|(_, seat)| seat.finished.load(Ordering::SeqCst) < self.operations).map(|(rank, _)| rank).collect()
    }

    /// Tells peers that wait for this rank that it has destroyed its end.
    pub fn leave(&self) {
        self.control.seats()[self.rank].left.store(self.operations + 1, Ordering::SeqCst);
        self.control.ring();
    }

    /// The rule that a rank breaks which does not come to the operation at hand.
    fn absence(&self) -> Rule {
        if self.replay == 0 { Rule::MissingRank } else { Rule::ReplayCount }
    }

    /// Waits until every seat is `there`; ends with an error on a failed or dead peer and after the time-out.
    fn wait(&self, what: &str, there: impl Fn(&Seat) -> bool) -> Outcome<()> {
        let header = self.control.header();
        let start = Instant::now();
        let mut next_look = start + LIVENESS_PERIOD;
        loop {
            let bell = header.bell.load(Ordering::SeqCst);
            let missing: Vec<usize> = self
                .control
                .seats()
                .iter()
                .enumerate()
                .filter(|(_, seat)| !there(seat))
                .map(|(rank, _)| rank)
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if let Some((rank, text)) = self.control.failure() {
                let text = if rank == self.rank { text } else { format!("{what}: rank {rank} failed: {text}") };
                return Err(Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text));
            }
            let now = Instant::now();
            if now >= start + self.timeout {
                let replay = name_replay(self.replay);
                let (missing, time) = (name_ranks(&missing), self.timeout.as_millis());
                let text = format!("{what}{replay}: {missing} did not arrive within {time} ms");
                let fault = Fault::both(cudaErrorLaunchTimeout, ncclSystemError, text).breaks(self.absence());
                return Err(self.end(fault));
            }
            let left = |rank: &usize| self.control.seats()[*rank].left.load(Ordering::SeqCst);
            // It may have arrived before it left.
            if let Some(gone) = missing.iter().find(|rank| left(rank) != 0 && !there(&self.control.seats()[**rank])) {
                let replay = name_replay(self.replay);
                let text = format!("{what}{replay}: rank {gone} destroyed its end after operation {}", left(gone) - 1);
                let fault = Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text).breaks(self.absence());
                return Err(self.end(fault));
            }
            if now >= next_look {
                next_look = now + LIVENESS_PERIOD;
                if let Some(dead) = missing.iter().find(|rank| self.is_dead(**rank)) {
                    // It may have arrived between the look at its seat and the look at its process.
                    if !there(&self.control.seats()[*dead]) {
                        let pid = self.control.seats()[*dead].pid.load(Ordering::Relaxed);
                        let text = format!("{what}: the process of rank {dead} (pid {pid}) has ended");
                        let fault = Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text);
                        return Err(self.end(fault.breaks(Rule::MissingRank)));
                    }
                }
            }
            let until = next_look.min(start + self.timeout);
            sys::futex_wait(&header.bell, bell, until.saturating_duration_since(now));
        }
    }

    fn is_dead(&self, rank: usize) -> bool {
        let seat = &self.control.seats()[rank];
        if seat.state.load(Ordering::SeqCst) != SEAT_READY {
            return false;
        }
        sys::start_time(seat.pid.load(Ordering::Relaxed)) != Some(seat.start_time.load(Ordering::Relaxed))
    }

    /// Ends the channel for everyone with this rank's error.
    pub fn fail(&self, fault: &Fault) {
        self.control.fail(self.rank, &fault.text);
    }
}

/// "rank 3" or "ranks 1, 3".
pub fn name_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// " in replay 3 of its graph", or nothing.
fn name_replay(replay: u64) -> String {
    if replay == 0 { String::new() } else { format!(" in replay {replay} of its graph") }
}

/// FNV-1a, equal in every process.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_lists_read_as_text() {
        assert_eq!(name_ranks(&[3]), "rank 3");
        assert_eq!(name_ranks(&[1, 3]), "ranks 1, 3");
    }

    #[test]
    fn long_text_is_cut_at_a_character() {
        let text = Text([const { AtomicU64::new(0) }; TEXT_WORDS]);
        text.store(&"é".repeat(400));
        assert_eq!(text.load(), "é".repeat(TEXT_WORDS * 4));
    }

    #[test]
    fn a_single_rank_reads_its_own_offers() {
        let path = rendezvous_folder().join(format!("nvte-ep-unit-{}", std::process::id()));
        let mut channel = Channel::meet(&path, 0, 1, "unit".to_owned()).unwrap();
        assert!(!path.exists());
        for round in 0..5u8 {
            channel.stage(3).unwrap().copy_from_slice(&[round, 1, 2]);
            channel.exchange("op", [u64::from(round), 0, 0, 7], 3).unwrap();
            let offer = channel.offer(0).unwrap();
            assert_eq!((offer.bytes, offer.args), (&[round, 1, 2][..], [u64::from(round), 0, 0, 7]));
        }
        assert_eq!(channel.busy(), [0]);
        channel.finish();
        assert_eq!(channel.busy(), [0usize; 0]);
    }
}
