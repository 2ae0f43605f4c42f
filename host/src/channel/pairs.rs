//! Transfers between two ranks, which the others know nothing of.
//!
//! A rank has an outbox: a slot for each destination, in a memory file that it makes at its first send. A message travels in
//! pieces through a file of the pair: the sender fills it and counts `sent` up, the receiver empties it and counts `taken`
//! up. Transfers of a batch go on side by side, so that ranks which send to each other do not wait for each other.

use std::collections::HashMap;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use nvte_ep_bindings::{
    cudaErrorLaunchFailure, cudaErrorLaunchTimeout, ncclDataType_t, ncclInvalidUsage, ncclRemoteError, ncclSystemError,
};

use super::control::system;
use super::staging::Staging;
use super::{Channel, LIVENESS_PERIOD, PIECE_BYTES, name_ranks};
use crate::dtype;
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::rule::Rule;
use crate::settings;
use crate::sys::{self, FileId, Mapping};

/// The two ends of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Which end.
    pub direction: Direction,
    /// The other rank, which may be the own one.
    pub peer: usize,
    /// The caller's memory.
    pub span: Span,
    /// Elements.
    pub count: usize,
    /// Their type.
    pub datatype: ncclDataType_t,
}

/// What a rank sends to one other; zero bytes are a slot without a message.
#[repr(C)]
struct OutboxSlot {
    /// Pieces filled so far.
    sent: AtomicU64,
    /// Pieces emptied so far.
    taken: AtomicU64,
    /// Of the message: elements and their type.
    count: AtomicU64,
    datatype: AtomicU32,
    /// Descriptor number, in the sender's process, of the pair's file, and bytes in it.
    file: AtomicU32,
    capacity: AtomicU64,
    /// Which file that is.
    file_id: [AtomicU64; 2],
    reserved: AtomicU64,
}

/// A mapped outbox.
#[derive(Debug)]
struct Outbox(Mapping);

impl Outbox {
    fn map(fd: &OwnedFd, ranks: usize) -> std::io::Result<Self> {
        Mapping::shared(fd.as_fd(), ranks * size_of::<OutboxSlot>()).map(Self)
    }

    fn of(&self, destination: usize) -> &OutboxSlot {
        assert!((destination + 1) * size_of::<OutboxSlot>() <= self.0.byte_len(), "destination {destination}");
        // The mapping starts at a page.
        let slot = self.0.base().wrapping_add(destination * size_of::<OutboxSlot>()).cast::<OutboxSlot>();
        // SAFETY: the slot is inside the mapping and aligned, and any bytes are valid atomics.
        unsafe { &*slot }
    }
}

/// What a rank has opened for its transfers so far.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// The own outbox.
    own: Option<(OwnedFd, Outbox)>,
    /// The own files, by destination.
    files: HashMap<usize, Staging>,
    /// Outboxes by source, this rank among them.
    sources: HashMap<usize, Source>,
}

#[derive(Debug)]
struct Source {
    slots: Outbox,
    /// The pair's file.
    file: Option<(OwnedFd, Mapping)>,
}

/// A transfer that is going on.
struct Cursor<'a> {
    transfer: &'a Transfer,
    /// Bytes and pieces that have passed.
    bytes: usize,
    pieces: usize,
    done: bool,
}

impl Transfer {
    fn pieces(&self) -> usize {
        self.span.byte_len().div_ceil(PIECE_BYTES).max(1)
    }

    fn describe(&self) -> String {
        let (call, to) = match self.direction {
            Direction::Send => ("ncclSend", "to"),
            Direction::Receive => ("ncclRecv", "from"),
        };
        format!("{call}(count={}, datatype={}) {to} rank {}", self.count, dtype::name(self.datatype), self.peer)
    }
}

impl Channel {
    /// Does all transfers of a batch; returns when each has passed whole.
    pub fn transfer(&mut self, batch: &[Transfer]) -> Outcome<()> {
        if batch.iter().any(|transfer| transfer.direction == Direction::Send) {
            self.make_outbox()?;
        }
        let mut open: Vec<_> =
            batch.iter().map(|transfer| Cursor { transfer, bytes: 0, pieces: 0, done: false }).collect();
        let mut last_move = Instant::now();
        let mut next_look = last_move + LIVENESS_PERIOD;
        loop {
            let bell = self.control.header().bell.load(Ordering::SeqCst);
            let mut moved = false;
            // Between two ranks messages keep their order.
            let mut waiting = Vec::new();
            for cursor in &mut open {
                let line = (cursor.transfer.direction, cursor.transfer.peer);
                if waiting.contains(&line) {
                    continue;
                }
                moved |= match line.0 {
                    Direction::Send => self.advance_send(cursor)?,
                    Direction::Receive => self.advance_receive(cursor)?,
                };
                if !cursor.done {
                    waiting.push(line);
                }
            }
            open.retain(|cursor| !cursor.done);
            if moved {
                last_move = Instant::now();
                self.control.ring();
            }
            let Some(first) = open.first() else { return Ok(()) };
            if moved {
                continue;
            }
            let mut missing: Vec<usize> = open.iter().map(|cursor| cursor.transfer.peer).collect();
            missing.sort_unstable();
            missing.dedup();
            let what = format!("{}: {}", self.label, first.transfer.describe());
            self.give_up(&what, &missing, last_move, &mut next_look)?;
            let until = next_look.min(last_move + self.timeout);
            sys::futex_wait(&self.control.header().bell, bell, until.saturating_duration_since(Instant::now()));
        }
    }

    /// Fails when the wait for `missing` has to end.
    fn give_up(&self, what: &str, missing: &[usize], since: Instant, next_look: &mut Instant) -> Outcome<()> {
        if let Some((rank, text)) = self.control.failure() {
            let text = if rank == self.rank { text } else { format!("{what}: rank {rank} failed: {text}") };
            return Err(Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text));
        }
        let now = Instant::now();
        if now >= since + self.timeout {
            let ranks = name_ranks(missing);
            let limit = settings::name_timeout(self.timeout);
            let text = format!("{what}: {ranks} did not come to meet it within {limit}");
            let fault = Fault::both(cudaErrorLaunchTimeout, ncclSystemError, text).breaks(Rule::MissingRank);
            return Err(self.end(fault));
        }
        if now >= *next_look {
            *next_look = now + LIVENESS_PERIOD;
            if let Some(dead) = missing.iter().find(|rank| self.is_dead(**rank)) {
                let pid = self.control.members()[*dead].pid.load(Ordering::Relaxed);
                let text = format!("{what}: the process of rank {dead} (pid {pid}) has ended");
                let fault = Fault::both(cudaErrorLaunchFailure, ncclRemoteError, text).breaks(Rule::MissingRank);
                return Err(self.end(fault));
            }
        }
        Ok(())
    }

    fn make_outbox(&mut self) -> Outcome<()> {
        if self.pairs.own.is_some() {
            return Ok(());
        }
        let ranks = self.ranks();
        let made = sys::memfd("nvte-ep-outbox").and_then(|fd| {
            sys::reserve(fd.as_fd(), ranks * size_of::<OutboxSlot>())?;
            let slots = Outbox::map(&fd, ranks)?;
            Ok((fd, slots))
        });
        let (fd, slots) = made.map_err(|error| system("cannot create an outbox", &error))?;
        let offered = self.control.members()[self.rank].outbox.offer(&fd);
        offered.map_err(|error| system("cannot offer an outbox", &error))?;
        self.pairs.own = Some((fd, slots));
        Ok(())
    }

    /// Takes a send as far as it goes without waiting; gives whether something moved.
    fn advance_send(&mut self, cursor: &mut Cursor<'_>) -> Outcome<bool> {
        let transfer = cursor.transfer;
        let Pairs { own, files, .. } = &mut self.pairs;
        let Some((_, slots)) = own else { return Ok(false) };
        let slot = slots.of(transfer.peer);
        let sent = slot.sent.load(Ordering::SeqCst);
        if slot.taken.load(Ordering::SeqCst) != sent {
            return Ok(false);
        }
        if cursor.pieces == transfer.pieces() {
            cursor.done = true;
            return Ok(true);
        }
        let length = (transfer.span.byte_len() - cursor.bytes).min(PIECE_BYTES);
        let file = match files.entry(transfer.peer) {
            std::collections::hash_map::Entry::Occupied(there) => there.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(Staging::new()?),
        };
        file.grow(length)?;
        if let Some(map) = &mut file.map {
            transfer.span.read(cursor.bytes, map.bytes_mut(length));
        }
        slot.count.store(transfer.count as u64, Ordering::Relaxed);
        slot.datatype.store(transfer.datatype, Ordering::Relaxed);
        let id = FileId::of(file.fd.as_fd()).map_err(|error| system("cannot offer a message", &error))?;
        slot.file.store(file.fd.as_raw_fd() as u32, Ordering::Relaxed);
        slot.file_id[0].store(id.device, Ordering::Relaxed);
        slot.file_id[1].store(id.inode, Ordering::Relaxed);
        slot.capacity.store(file.capacity() as u64, Ordering::Relaxed);
        slot.sent.store(sent + 1, Ordering::SeqCst);
        cursor.bytes += length;
        cursor.pieces += 1;
        Ok(true)
    }

    /// Takes a receive as far as it goes without waiting; gives whether something moved.
    fn advance_receive(&mut self, cursor: &mut Cursor<'_>) -> Outcome<bool> {
        let transfer = cursor.transfer;
        let ranks = self.ranks();
        let member = &self.control.members()[transfer.peer];
        let Some((outbox, id)) = member.outbox.get() else { return Ok(false) };
        let pid = member.pid.load(Ordering::Relaxed);
        let cannot = |error: std::io::Error| {
            system(&format!("{}: cannot open what rank {} sends", self.label, transfer.peer), &error)
        };
        let source = match self.pairs.sources.entry(transfer.peer) {
            std::collections::hash_map::Entry::Occupied(there) => there.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                let slots = sys::open_fd_of(pid, outbox, id).and_then(|fd| Outbox::map(&fd, ranks)).map_err(cannot)?;
                place.insert(Source { slots, file: None })
            }
        };
        let slot = source.slots.of(self.rank);
        let taken = slot.taken.load(Ordering::SeqCst);
        if slot.sent.load(Ordering::SeqCst) == taken {
            return Ok(false);
        }
        let (count, datatype) = (slot.count.load(Ordering::Relaxed), slot.datatype.load(Ordering::Relaxed));
        if (count, datatype) != (transfer.count as u64, transfer.datatype) {
            let text = format!(
                "{}: rank {} called {}, but rank {} sends count={count}, datatype={}",
                self.label,
                self.rank,
                transfer.describe(),
                transfer.peer,
                dtype::name(datatype),
            );
            let fault = Fault::both(cudaErrorLaunchFailure, ncclInvalidUsage, text).breaks(Rule::CallOrder);
            return Err(self.end(fault));
        }
        let length = (transfer.span.byte_len() - cursor.bytes).min(PIECE_BYTES);
        let capacity = slot.capacity.load(Ordering::Relaxed) as usize;
        if length > 0 && source.file.as_ref().is_none_or(|(_, map)| map.byte_len() < capacity) {
            let opened = match source.file.take() {
                Some((fd, _)) => Ok(fd),
                None => {
                    let [device, inode] = [0, 1].map(|word| slot.file_id[word].load(Ordering::Relaxed));
                    sys::open_fd_of(pid, slot.file.load(Ordering::Relaxed), FileId { device, inode })
                }
            };
            let mapped = opened.and_then(|fd| Mapping::shared(fd.as_fd(), capacity).map(|map| (fd, map)));
            source.file = Some(mapped.map_err(cannot)?);
        }
        if let Some((_, map)) = source.file.as_ref().filter(|_| length > 0) {
            transfer.span.write(cursor.bytes, map.bytes(length));
        }
        slot.taken.store(taken + 1, Ordering::SeqCst);
        cursor.bytes += length;
        cursor.pieces += 1;
        cursor.done = cursor.pieces == transfer.pieces();
        Ok(true)
    }
}
