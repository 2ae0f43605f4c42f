//! Channels: how the ranks of a communicator or EP group meet and exchange data.
//!
//! A channel is a control block in shared memory plus, for every rank, two memory files ("staging") in which it offers
//! data to its peers. An operation is: fill the own staging, [`Channel::exchange`], read the peers' staging. Staging and
//! slots alternate between two sets by the parity of the operation, so one barrier an operation is enough: a rank that
//! passed barrier n knows that everyone has finished operation n-1, and with that the set which operation n+1 fills.
//!
//! Bulk data lives in memory files that peers open through `/proc/<pid>/fd`, so the size of /dev/shm does not matter;
//! they are opened when the channel is made, so a rank may exit while slower peers still read what it offered. Peers are in
//! one PID namespace, and a file is opened only if it is the one that its rank means.

mod control;
pub mod pairs;
pub mod rendezvous;
mod staging;

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nvte_ep_bindings::{
    cudaErrorLaunchFailure, cudaErrorLaunchTimeout, cudaErrorOperatingSystem, ncclInvalidUsage, ncclRemoteError,
    ncclSystemError,
};

use self::control::{Control, MEMBER_FREE, MEMBER_READY, MEMBER_TAKEN, Member, system};
use self::staging::{PeerStaging, Staging};
use crate::acting;
use crate::check;
use crate::fault::{Fault, Outcome};
use crate::rule::Rule;
use crate::settings;
use crate::sys::{self, FileId, Mapping};

/// How often a waiting rank looks whether its missing peers still live.
const LIVENESS_PERIOD: Duration = Duration::from_millis(200);
/// Most ranks of a channel.
pub const MAX_RANKS: usize = 1024;
/// Bytes that a rank offers at a time where an operation has more: bounds the staging, and keeps it in the caches.
pub const PIECE_BYTES: usize = 4 << 20;

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
    control: Arc<Control>,
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
        Arc::ptr_eq(&self.control, &other.control)
    }

    /// Ends the channel; peers that wait get an error with this text.
    pub fn trip(&self, text: &str) {
        self.control.fail(self.rank, text);
    }
}

/// One rank's end of a channel.
pub struct Channel {
    control: Arc<Control>,
    rank: usize,
    /// Ordinal of its device.
    device: i32,
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

impl Channel {
    /// Meets the other ranks at the rendezvous file `path`, which the first one creates; `device` is this rank's.
    pub fn meet(path: &Path, rank: usize, ranks: usize, device: i32, label: String) -> Outcome<Self> {
        acting::act_as(rank);
        let file = rendezvous::open(path)?;
        let met = Control::open(&file, rank, ranks).and_then(|control| Self::join(control, rank, device, label));
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
        let cannot = |error: &std::io::Error| system("cannot create a control block", error);
        let fd = if rank == Some(0) {
            let fd = sys::memfd("nvte-ep-control").map_err(|e| cannot(&e))?;
            sys::reserve(fd.as_fd(), Control::bytes(members.len())).map_err(|e| cannot(&e))?;
            Some(fd)
        } else {
            None
        };
        let mut offered = [0; 4];
        if let Some(fd) = &fd {
            let id = FileId::of(fd.as_fd()).map_err(|e| cannot(&e))?;
            offered = [fd.as_raw_fd() as u64, id.device, id.inode, 0];
        }
        self.exchange(&format!("{what}: shared control block"), offered, 0)?;
        let Some(rank) = rank else { return Ok(None) };
        let fd = match fd {
            Some(fd) => fd,
            None => {
                let first = members[0];
                let [number, device, inode, _] = self.offer(first)?.args;
                self.open_of(first, number as u32, FileId { device, inode })
                    .map_err(|e| system(&format!("cannot open rank {first}'s control block"), &e))?
            }
        };
        let device = self.device;
        let joined =
            Control::open(&fd, rank, members.len()).and_then(|control| Self::join(control, rank, device, label));
        // The first member keeps its descriptor until everyone has joined, which `join` waits for.
        drop(fd);
        joined.map(Some)
    }

    fn join(control: Control, rank: usize, device: i32, label: String) -> Outcome<Self> {
        let own = [Staging::new()?, Staging::new()?];
        let member = &control.members()[rank];
        if member.state.compare_exchange(MEMBER_FREE, MEMBER_TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            let text = format!("{label}: rank {rank} has joined already (two callers with the same rank)");
            control.fail(rank, &text);
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::ConfigDiffers));
        }
        let pid = std::process::id();
        member.pid.store(pid, Ordering::Relaxed);
        member.pid_namespace.store(sys::pid_namespace(), Ordering::Relaxed);
        member.device.store(device as u32 + 1, Ordering::Relaxed);
        member.start_time.store(sys::start_time(pid).unwrap_or(0), Ordering::Relaxed);
        for (there, staging) in member.staging.iter().zip(&own) {
            there.offer(&staging.fd).map_err(|e| system("cannot offer a staging file", &e))?;
        }
        member.state.store(MEMBER_READY, Ordering::SeqCst);
        control.ring();
        let mut channel = Self {
            control: Arc::new(control),
            rank,
            device,
            label,
            timeout: settings::timeout(),
            operations: 0,
            barriers: 0,
            replay: 0,
            own,
            peers: Vec::new(),
            pairs: pairs::Pairs::default(),
        };
        let what = format!("{}: rendezvous", channel.label);
        channel.wait(&what, |member| member.state.load(Ordering::SeqCst) == MEMBER_READY)?;
        let opened = channel.check_members().and_then(|()| channel.open_peers());
        if let Err(fault) = opened {
            return Err(channel.end(fault));
        }
        channel.barrier(&what)?;
        Ok(channel)
    }

    /// Fails where ranks cannot reach each other, or are on one device.
    fn check_members(&self) -> Outcome<()> {
        let members = self.control.members();
        let process = |rank: usize| {
            let member = &members[rank];
            (member.pid_namespace.load(Ordering::Relaxed), member.pid.load(Ordering::Relaxed))
        };
        let own = process(self.rank);
        for (rank, member) in members.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            if process(rank).0 != own.0 {
                let text = format!(
                    "{}: rank {rank} is in another PID namespace than rank {} (another container): ranks open each \
                     other's memory through /proc, so start them in one, as with docker run --pid=container:NAME",
                    self.label, self.rank
                );
                return Err(Fault::both(cudaErrorOperatingSystem, ncclSystemError, text));
            }
            let same = process(rank) == own && member.device.load(Ordering::Relaxed) == self.device as u32 + 1;
            if same && !settings::ranks_share_devices() {
                let (first, second) = (self.rank.min(rank), self.rank.max(rank));
                let text = format!(
                    "{}: ranks {first} and {second} are both on device {} of their process: call cudaSetDevice with \
                     another one before ncclCommInitRank, or set NCCL_MULTI_RANK_GPU_ENABLE=1",
                    self.label, self.device
                );
                return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::RankDevice));
            }
        }
        Ok(())
    }

    /// Opens a file of a rank's process.
    fn open_of(&self, rank: usize, number: u32, id: FileId) -> std::io::Result<std::os::fd::OwnedFd> {
        sys::open_fd_of(self.control.members()[rank].pid.load(Ordering::Relaxed), number, id)
    }

    fn open_peers(&mut self) -> Outcome<()> {
        let mut peers = Vec::with_capacity(self.ranks());
        for (rank, member) in self.control.members().iter().enumerate() {
            if rank == self.rank {
                peers.push(None);
                continue;
            }
            let open = |file: &control::SharedFile| {
                let (number, id) = file.get().unwrap_or_default();
                self.open_of(rank, number, id)
                    .map(|fd| PeerStaging { fd, map: None })
                    .map_err(|e| system(&format!("{}: cannot open staging of rank {rank}", self.label), &e))
            };
            peers.push(Some([open(&member.staging[0])?, open(&member.staging[1])?]));
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
        Breaker { control: Arc::clone(&self.control), rank: self.rank }
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
        let slot = &self.control.members()[self.rank].slots[parity];
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
        for (rank, member) in self.control.members().iter().enumerate() {
            let slot = &member.slots[self.parity()];
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
        for (rank, (peer, member)) in self.peers.iter_mut().zip(self.control.members()).enumerate() {
            let bytes = member.slots[parity].bytes.load(Ordering::Relaxed) as usize;
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
        let slot = &self.control.members()[rank].slots[parity];
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
        let members = self.control.members();
        members[self.rank].arrived.store(target, Ordering::SeqCst);
        if members.iter().all(|member| member.arrived.load(Ordering::SeqCst) >= target) {
            self.control.ring();
            return Ok(());
        }
        self.wait(what, |member| member.arrived.load(Ordering::SeqCst) >= target)
    }

    /// Ends the channel for everyone with a breach that this rank has found.
    fn end(&self, fault: Fault) -> Fault {
        acting::act_as(self.rank);
        let fault = check::annotate(fault);
        self.control.fail(self.rank, &fault.text);
        fault
    }

    /// The operations so far have ended on this rank.
    pub fn finish(&self) {
        self.control.members()[self.rank].finished.store(self.operations, Ordering::SeqCst);
    }

    /// Ranks that are not done with what this one is done with.
    pub fn busy(&self) -> Vec<usize> {
        let members = self.control.members().iter().enumerate();
        members
            .filter(|(_, member)| member.finished.load(Ordering::SeqCst) < self.operations)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Tells peers that wait for this rank that it has destroyed its end.
    pub fn leave(&self) {
        self.control.members()[self.rank].left.store(self.operations + 1, Ordering::SeqCst);
        self.control.ring();
    }

    /// The rule that a rank breaks which does not come to the operation at hand.
    fn absence(&self) -> Rule {
        if self.replay == 0 { Rule::MissingRank } else { Rule::ReplayCount }
    }

    /// Waits until every member is `there`; ends with an error on a failed or dead peer and after the time-out.
    fn wait(&self, what: &str, there: impl Fn(&Member) -> bool) -> Outcome<()> {
        let header = self.control.header();
        let start = Instant::now();
        let mut next_look = start + LIVENESS_PERIOD;
        loop {
            let bell = header.bell.load(Ordering::SeqCst);
            let missing: Vec<usize> = self
                .control
                .members()
                .iter()
                .enumerate()
                .filter(|(_, member)| !there(member))
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
                let (missing, limit) = (name_ranks(&missing), settings::name_timeout(self.timeout));
                let text = format!("{what}{replay}: {missing} did not arrive within {limit}");
                let fault = Fault::both(cudaErrorLaunchTimeout, ncclSystemError, text).breaks(self.absence());
                return Err(self.end(fault));
            }
            let left = |rank: &usize| self.control.members()[*rank].left.load(Ordering::SeqCst);
            // It may have arrived before it left.
            if let Some(gone) = missing.iter().find(|rank| left(rank) != 0 && !there(&self.control.members()[**rank])) {
                let replay = name_replay(self.replay);
                let text = format!("{what}{replay}: rank {gone} destroyed its end after operation {}", left(gone) - 1);
                let fault = Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text).breaks(self.absence());
                return Err(self.end(fault));
            }
            if now >= next_look {
                next_look = now + LIVENESS_PERIOD;
                if let Some(dead) = missing.iter().find(|rank| self.is_dead(**rank)) {
                    // It may have arrived between the look at what it says and the look at its process.
                    if !there(&self.control.members()[*dead]) {
                        let pid = self.control.members()[*dead].pid.load(Ordering::Relaxed);
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
        let member = &self.control.members()[rank];
        if member.state.load(Ordering::SeqCst) != MEMBER_READY {
            return false;
        }
        sys::start_time(member.pid.load(Ordering::Relaxed)) != Some(member.start_time.load(Ordering::Relaxed))
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
    fn a_single_rank_reads_its_own_offers() {
        let path = rendezvous::folder().join(format!("nvte-ep-unit-{}", std::process::id()));
        let mut channel = Channel::meet(&path, 0, 1, 0, "unit".to_owned()).unwrap();
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
