//! How far each rank of a group has come: the calls that it made, seen by all ranks of one machine through shared memory.
//! It costs a call two stores, and no rank waits for another. A rank that waits too long for a call on the device, or at a
//! rendezvous, reads here which rank is missing. Ranks on other machines cannot be seen.

mod note;

use crate::atomic::{AtomicU64, Ordering};
use crate::dtype::DType;
use crate::log::report;
use memmap2::{MmapOptions, MmapRaw};
use note::Note;
use parking_lot::Mutex;
use std::fmt::{self, Write};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// A collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Call {
    Prepare,
    Dispatch,
    Combine,
    CombineBwd,
    DispatchBwd,
    SymmAlloc,
    WindowRegister,
    WindowDeregister,
    Shutdown,
    LlDispatch,
    LlCombine,
    LlComplete,
    LlShutdown,
}

impl Call {
    const ALL: [Self; 13] = [
        Self::Prepare,
        Self::Dispatch,
        Self::Combine,
        Self::CombineBwd,
        Self::DispatchBwd,
        Self::SymmAlloc,
        Self::WindowRegister,
        Self::WindowDeregister,
        Self::Shutdown,
        Self::LlDispatch,
        Self::LlCombine,
        Self::LlComplete,
        Self::LlShutdown,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "nvte_ep_prepare",
            Self::Dispatch => "nvte_ep_dispatch",
            Self::Combine => "nvte_ep_combine",
            Self::CombineBwd => "nvte_ep_combine_bwd",
            Self::DispatchBwd => "nvte_ep_dispatch_bwd",
            Self::SymmAlloc => "nvte_ep_ext_symm_alloc",
            Self::WindowRegister => "nvte_ep_ext_window_register",
            Self::WindowDeregister => "nvte_ep_ext_window_deregister",
            Self::Shutdown => "nvte_ep_shutdown",
            Self::LlDispatch => "nvte_ep_ext_ll_dispatch",
            Self::LlCombine => "nvte_ep_ext_ll_combine",
            Self::LlComplete => "nvte_ep_ext_ll_complete",
            Self::LlShutdown => "nvte_ep_ext_ll_shutdown",
        }
    }
}

impl Call {
    /// Whether the C function `name` makes a collective call.
    pub(crate) fn is_name(name: &str) -> bool {
        name == "nvte_ep_prepare_and_dispatch" || Self::ALL.iter().any(|call| call.name() == name)
    }

    /// Whether the call queues work on a stream; the others wait for all ranks inside.
    const fn is_queued(self) -> bool {
        !matches!(
            self,
            Self::SymmAlloc | Self::WindowRegister | Self::WindowDeregister | Self::Shutdown | Self::LlShutdown
        )
    }
}

/// What all ranks' n-th calls have to have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) call: Call,
    /// Experts per token of the layer; 0 = none.
    pub(crate) top_k: u32,
    /// Elements of a row.
    pub(crate) size: usize,
    /// Data type of the rows; told, and not compared: what travels is bytes.
    pub(crate) dtype: Option<DType>,
    /// Whether weights travel with the rows.
    pub(crate) weights: bool,
}

impl Step {
    pub(crate) const fn of(call: Call) -> Self {
        Self { call, top_k: 0, size: 0, dtype: None, weights: false }
    }

    /// Bits: 0-3 call, 4 weights, 5-8 data type + 1, 9-15 top_k, 16-31 size, cut off.
    #[inline]
    pub(crate) fn pack(self) -> u32 {
        let dtype = self.dtype.map_or(0, |dtype| dtype as u32 + 1);
        let size = (self.size as u32).min((1 << 16) - 1);
        self.call as u32 | u32::from(self.weights) << 4 | dtype << 5 | (self.top_k & 127) << 9 | size << 16
    }

    /// Whether the kernels of both ranks fit together.
    fn fits(self, other: Self) -> bool {
        let bytes = |step: Self| step.dtype.map(|dtype| dtype.bytes(step.size));
        (self.call, self.weights, self.top_k, bytes(self)) == (other.call, other.weights, other.top_k, bytes(other))
    }

    pub(crate) fn unpack(word: u32) -> Option<Self> {
        let dtype = match word >> 5 & 15 {
            0 => None,
            number => Some(DType::from_index(number as usize - 1)?),
        };
        Some(Self {
            call: *Call::ALL.get(word as usize & 15)?,
            top_k: word >> 9 & 127,
            size: (word >> 16) as usize,
            dtype,
            weights: word >> 4 & 1 == 1,
        })
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call.name())?;
        match (self.call, self.dtype) {
            (Call::Prepare, _) => write!(f, " (top_k {})", self.top_k),
            (_, Some(dtype)) => {
                let weights = if self.weights { ", with weights" } else { "" };
                write!(f, " (top_k {}, rows of {} {dtype}{weights})", self.top_k, self.size)
            }
            (_, None) => Ok(()),
        }
    }
}

/// Words of one rank's record: its state, its number of calls, the latest of them, and why it refused or gave up.
const WORDS: usize = 64;
const CALLS: usize = 0;
/// The last call whose work was queued.
const QUEUED: usize = 1;
/// The process, and the namespace of its number.
const PROCESS: usize = 2;
const NAMESPACE: usize = 3;
/// Not 0 once a call was captured: what graphs replay is not counted, so that numbers of calls mean nothing any more.
const CAPTURED: usize = 4;
const RING: usize = 5;
const RING_WORDS: usize = 16;
/// The rank's [`note`], up to the record's end.
const NOTE: usize = RING + RING_WORDS;

/// What a rank is, in its note; 0 = it has not come yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Member = 1,
    Left,
    GaveUp = note::GAVE_UP as isize,
}

/// The shared memory of one group on one machine.
#[derive(Debug)]
struct Shared {
    /// Each rank holds a lock on the byte of its number: it goes when the process ends, however it ends. A child that was
    /// forked and lives on keeps it, so the process is looked for too.
    file: File,
    memory: MmapRaw,
    ranks: usize,
}

impl Shared {
    fn path(key: u64) -> PathBuf {
        format!("/dev/shm/nvte_ep_{key:016x}").into()
    }

    fn open(key: u64, ranks: usize, own: usize) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(Self::path(key))?;
        let bytes = 8 * WORDS * ranks;
        // Not just the length: where there is no room for it, a store into the mapping would end the process.
        // SAFETY: the file is open.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => {}
            code => {
                let _ = std::fs::remove_file(Self::path(key));
                return Err(io::Error::from_raw_os_error(code));
            }
        }
        lock(&file, libc::F_OFD_SETLK, own)?;
        let memory = MmapOptions::new().len(bytes).map_raw(&file)?;
        let shared = Self { file, memory, ranks };
        let record = shared.record(own);
        record[PROCESS].store(std::process::id().into(), Ordering::Relaxed);
        record[NAMESPACE].store(process_namespace(), Ordering::Relaxed);
        note::write(&record[NOTE..], State::Member as u64, 0, "");
        Ok(shared)
    }

    #[inline]
    fn record(&self, rank: usize) -> &[AtomicU64] {
        assert!(rank < self.ranks, "a rank of the group");
        // SAFETY: the mapping starts on a page and has `ranks` records, which all processes use as atomic words only.
        let words = unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), self.ranks * WORDS) };
        &words[rank * WORDS..][..WORDS]
    }

    /// Whether the process of a rank that joined is still there. Asking is no lock.
    fn is_alive(&self, rank: usize) -> bool {
        if lock(&self.file, libc::F_OFD_GETLK, rank).is_ok_and(|free| free) {
            return false;
        }
        let record = self.record(rank);
        let namespace = record[NAMESPACE].load(Ordering::Relaxed);
        namespace == 0 || namespace != process_namespace() || is_running(record[PROCESS].load(Ordering::Relaxed))
    }

    fn note(&self, rank: usize) -> Note {
        note::read(&self.record(rank)[NOTE..])
    }

    fn has_come(&self, rank: usize) -> bool {
        note::state(&self.record(rank)[NOTE..]) != 0
    }
}

/// In which namespace process numbers of this process are; 0 = not known.
fn process_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino())
}

/// Whether there is a process of this number that has not ended.
fn is_running(process: u64) -> bool {
    match std::fs::read(format!("/proc/{process}/stat")) {
        // The state stands behind the name, which is in brackets.
        Ok(stat) => {
            let end = stat.iter().rposition(|byte| *byte == b')');
            !end.and_then(|end| stat.get(end + 2)).is_some_and(|state| matches!(state, b'Z' | b'X'))
        }
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Takes or asks for the lock on byte `rank`; of a question the answer is whether it is free.
fn lock(file: &File, command: libc::c_int, rank: usize) -> io::Result<bool> {
    // SAFETY: a flock of zeroes is valid.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    (range.l_start, range.l_len) = (rank as libc::off_t, 1);
    // SAFETY: the file is open, and `range` is live.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut range) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(range.l_type == libc::F_UNLCK as libc::c_short),
    }
}

/// What stands between a rank and another that waits for its call; first what explains most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Trouble {
    /// It made another call.
    Differs,
    /// It never can come.
    Lost,
    /// It has not come yet.
    Behind,
    /// It waits no longer, for another rank or for this one.
    GaveUp,
}

/// Why a call waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reason {
    /// Whether waiting longer cannot help.
    pub(crate) futile: bool,
    /// Whether a rank that can be seen has not come.
    pub(crate) is_missing: bool,
    /// In words.
    pub(crate) text: String,
}

/// One rank's view of its group.
#[derive(Debug)]
pub(crate) struct Progress {
    own: usize,
    /// Of each rank, whether its record can be seen.
    here: Vec<bool>,
    shared: Option<Shared>,
    /// Calls of this rank.
    calls: AtomicU64,
    /// Held while this rank's note is written: callers refuse calls, and the watch gives up.
    said: Mutex<Said>,
}

/// What this rank has to say of itself.
#[derive(Debug, Default)]
struct Said {
    /// The number that the latest refused call would have had, and the refusal.
    refused: Option<(u64, String)>,
    /// Whether the latest call is the shutdown.
    is_leaving: bool,
}

impl Said {
    /// Why this rank left, if its shutdown, call `number`, has the place of a call that was refused.
    fn left_for(&self, number: u64) -> Option<&str> {
        let (refused, text) = self.refused.as_ref()?;
        (self.is_leaving && *refused == number).then_some(text)
    }
}

impl Progress {
    /// Joins the ranks of this machine, of which `here` tells, at the place that `key`, the same on all of them, names.
    /// Without shared memory ranks are not seen.
    pub(crate) fn join(key: u64, own: usize, here: Vec<bool>) -> Self {
        let shared = Shared::open(key, here.len(), own);
        if let Err(error) = &shared {
            report(&format!(
                "/dev/shm cannot be used ({error}): a rank that has died is not noticed before the time-out, and not named"
            ));
        }
        Self { own, here, shared: shared.ok(), calls: AtomicU64::new(0), said: Mutex::default() }
    }

    /// Takes the name of the place away, once all ranks have joined, or will not.
    pub(crate) fn close_door(key: u64) {
        // Any rank may have done it before.
        let _ = std::fs::remove_file(Shared::path(key));
    }

    /// Notes that this rank makes a call; returns the call's number, from 1.
    #[inline]
    pub(crate) fn enter(&self, step: Step) -> u64 {
        // The group's lock lets one thread in at a time.
        let number = self.calls.load(Ordering::Relaxed) + 1;
        self.calls.store(number, Ordering::Relaxed);
        if let Some(shared) = &self.shared {
            let record = shared.record(self.own);
            record[RING + number as usize % RING_WORDS].store(number << 32 | u64::from(step.pack()), Ordering::Relaxed);
            record[CALLS].store(number, Ordering::Release);
        }
        number
    }

    /// Takes back that the latest call was made, which failed: who makes it again is no call ahead.
    pub(crate) fn retract(&self, number: u64) {
        self.calls.store(number - 1, Ordering::Relaxed);
        if let Some(shared) = &self.shared {
            shared.record(self.own)[CALLS].store(number - 1, Ordering::Release);
        }
    }

    /// Notes that a call was captured into a graph.
    pub(crate) fn captured(&self) {
        if let Some(shared) = &self.shared {
            shared.record(self.own)[CAPTURED].store(1, Ordering::Relaxed);
        }
    }

    /// Notes that the work of call `number` is queued.
    #[inline]
    pub(crate) fn queued(&self, number: u64) {
        if let Some(shared) = &self.shared {
            shared.record(self.own)[QUEUED].store(number, Ordering::Release);
        }
    }

    /// Notes that this rank makes its last call, a shutdown. If one was refused in its place, the other ranks read why.
    pub(crate) fn enter_shutdown(&self, shutdown: Call) {
        let number = self.enter(Step::of(shutdown));
        let mut said = self.said.lock();
        said.is_leaving = true;
        if let Some(refusal) = said.left_for(number) {
            self.write(State::Member, number, refusal);
        }
    }

    /// What was refused in the place of the shutdown, if it is called.
    pub(crate) fn left_for(&self) -> Option<String> {
        self.said.lock().left_for(self.calls.load(Ordering::Relaxed)).map(str::to_owned)
    }

    /// Notes why a call was refused. The next call may be right. `awaited`: other ranks wait for such calls.
    pub(crate) fn refuse(&self, text: &str, awaited: bool) {
        let mut said = self.said.lock();
        let number = self.calls.load(Ordering::Relaxed) + 1;
        if awaited {
            self.write(State::Member, number, text);
        }
        said.refused = Some((number, text.to_owned()));
    }

    /// Notes that this rank waits no longer.
    pub(crate) fn give_up(&self, text: &str) {
        let said = self.said.lock();
        let calls = self.calls.load(Ordering::Relaxed);
        // What was refused comes first: that the shutdown met nobody follows from it.
        match said.left_for(calls) {
            Some(refusal) => self.write(State::GaveUp, calls, refusal),
            None => self.write(State::GaveUp, calls + 1, text),
        }
    }

    /// Notes that this rank has left the group in order.
    pub(crate) fn leave(&self) {
        let _only_writer = self.said.lock();
        self.write(State::Left, 0, "");
    }

    /// Writes this rank's note; `said` is locked.
    fn write(&self, state: State, refused: u64, text: &str) {
        if let Some(shared) = &self.shared {
            note::write(&shared.record(self.own)[NOTE..], state as u64, refused, text);
        }
    }

    /// What keeps call `number`, which is `step`, from being done, as far as it can be seen.
    pub(crate) fn reason(&self, number: u64, step: Step) -> Reason {
        let Some(shared) = &self.shared else {
            let text = "which ranks are missing cannot be told without /dev/shm".into();
            return Reason { futile: false, is_missing: false, text };
        };
        let seen = |rank: &usize| self.here[*rank] && shared.has_come(*rank);
        let (here, elsewhere): (Vec<usize>, Vec<usize>) = (0..self.here.len()).partition(seen);
        let others = here.iter().filter(|rank| **rank != self.own);
        let mut troubles: Vec<(Trouble, String)> =
            others.filter_map(|rank| self.trouble(shared, *rank, number, step)).collect();
        let futile = troubles.iter().any(|(trouble, _)| *trouble != Trouble::Behind);
        let is_missing = !troubles.is_empty();
        troubles.sort_by_key(|(trouble, _)| *trouble);
        // Who gave up tells the same as who is here, where somebody here tells anything.
        if troubles.first().is_some_and(|(trouble, _)| *trouble != Trouble::GaveUp) {
            troubles.retain(|(trouble, _)| *trouble != Trouble::GaveUp);
        }
        const MOST: usize = 4;
        let told: Vec<&str> = troubles.iter().take(MOST).map(|(_, text)| text.as_str()).collect();
        let mut text = told.join("; ");
        if troubles.len() > MOST {
            let _ = write!(text, "; and {} more ranks", troubles.len() - MOST);
        }
        if text.is_empty() {
            text.push_str(
                "every rank that can be seen has made the call, as far as is known (calls of graphs are not counted): its device, \
                 a link, or work in front of it is slow or stuck",
            );
        }
        if !elsewhere.is_empty() {
            let _ = write!(text, "; ranks {elsewhere:?} run elsewhere and cannot be seen from here");
        }
        Reason { futile, is_missing, text }
    }

    /// What keeps this rank's latest call from being done.
    pub(crate) fn why(&self) -> Reason {
        let number = self.calls.load(Ordering::Relaxed);
        let latest = self.shared.as_ref().map_or(0, |shared| {
            shared.record(self.own)[RING + number as usize % RING_WORDS].load(Ordering::Relaxed) as u32
        });
        self.reason(number, Step::unpack(latest).unwrap_or(Step::of(Call::Shutdown)))
    }

    /// The same, where waiting longer cannot help.
    pub(crate) fn futile(&self) -> Option<String> {
        Some(self.why()).filter(|reason| reason.futile).map(|reason| reason.text)
    }

    fn trouble(&self, shared: &Shared, rank: usize, number: u64, step: Step) -> Option<(Trouble, String)> {
        let record = shared.record(rank);
        let Note { state, refused, text: said } = shared.note(rank);
        let graphs = |rank: usize| shared.record(rank)[CAPTURED].load(Ordering::Relaxed) != 0;
        if graphs(rank) || graphs(self.own) {
            // Only what does not go by numbers.
            let ended = state == State::Member as u64 && !shared.is_alive(rank);
            return ended.then(|| (Trouble::Lost, format!("the process of rank {rank} has ended")));
        }
        let calls = record[CALLS].load(Ordering::Acquire);
        let ring = record[RING + number as usize % RING_WORDS].load(Ordering::Relaxed);
        let theirs = (ring >> 32 == number & u64::from(u32::MAX)).then(|| Step::unpack(ring as u32)).flatten();
        if let Some(theirs) = theirs.filter(|theirs| calls >= number && !theirs.fits(step)) {
            let why = if refused == number && !said.is_empty() {
                format!(", after this was refused: {said}")
            } else {
                ": all ranks have to make the same calls in the same order".into()
            };
            return Some((
                Trouble::Differs,
                format!("rank {rank} made another call as its number {number}, {theirs}{why}"),
            ));
        }
        if state == State::GaveUp as u64 {
            return Some((Trouble::GaveUp, format!("rank {rank} gave up: {said}")));
        }
        if calls >= number {
            // It may have finished, left and ended since.
            if state == State::Member as u64 && !shared.is_alive(rank) {
                return Some((Trouble::Lost, format!("the process of rank {rank} has ended")));
            }
            let inside = step.call.is_queued() && record[QUEUED].load(Ordering::Acquire) < number;
            let text = "has entered the call and not come out of it: it compiles kernels, or was stopped";
            return inside.then(|| (Trouble::Behind, format!("rank {rank} {text}")));
        }
        if state == State::Left as u64 {
            return Some((Trouble::Lost, format!("rank {rank} has left the group after {calls} calls")));
        }
        if !shared.is_alive(rank) {
            return Some((Trouble::Lost, format!("the process of rank {rank} has ended, after {calls} calls")));
        }
        let mut text = format!("rank {rank} has made {calls} calls");
        if refused == calls + 1 {
            let _ = write!(text, ", and its next was refused: {said}");
        }
        Some((Trouble::Behind, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step = Step { call: Call::Dispatch, top_k: 8, size: 7168, dtype: Some(DType::BFloat16), weights: true };

    fn group(name: u64, ranks: usize) -> Vec<Progress> {
        let key = u64::from(std::process::id()) << 32 | name;
        let members = (0..ranks).map(|rank| Progress::join(key, rank, vec![true; ranks])).collect();
        Progress::close_door(key);
        assert!(!Shared::path(key).exists());
        members
    }

    #[test]
    fn steps_round_trip() {
        for call in Call::ALL {
            assert_eq!(Step::unpack(Step::of(call).pack()), Some(Step::of(call)));
        }
        assert_eq!(Step::unpack(STEP.pack()), Some(STEP));
        assert_eq!(STEP.to_string(), "nvte_ep_dispatch (top_k 8, rows of 7168 bfloat16, with weights)");
        let prepare = Step { call: Call::Prepare, top_k: 64, size: 0, dtype: None, weights: false };
        assert_eq!(Step::unpack(prepare.pack()), Some(prepare));
        assert_eq!(prepare.to_string(), "nvte_ep_prepare (top_k 64)");
        assert!(STEP.fits(Step { dtype: Some(DType::Float16), ..STEP }) && !STEP.fits(Step { size: 4096, ..STEP }));
        assert!(!STEP.fits(Step { weights: false, ..STEP }) && !STEP.fits(prepare));
        assert_eq!(Step::unpack(15), None);
    }

    #[test]
    fn who_is_missing_is_named() {
        let ranks = group(1, 4);
        for rank in &ranks {
            assert_eq!(rank.enter(Step::of(Call::Prepare)), 1);
            rank.queued(1);
        }
        assert_eq!(ranks[0].enter(STEP), 2);
        ranks[1].enter(STEP);
        ranks[1].queued(2);
        ranks[2].refuse("nvte_ep_dispatch: tokens must be 2D", true);
        let reason = ranks[0].reason(2, STEP);
        assert!(!reason.futile);
        assert_eq!(
            reason.text,
            "rank 2 has made 1 calls, and its next was refused: nvte_ep_dispatch: tokens must be 2D; rank 3 has made 1 calls"
        );
        ranks[2].enter(STEP);
        ranks[3].enter(STEP);
        ranks[1].queued(2);
        ranks[2].queued(2);
        let text = ranks[0].reason(2, STEP).text;
        assert!(text.starts_with("rank 3 has entered the call and not come out of it"), "{text}");
        ranks[3].queued(2);
        let reason = ranks[0].reason(2, STEP);
        assert!(
            !reason.futile && reason.text.starts_with("every rank that can be seen has made the call"),
            "{reason:?}"
        );
    }

    #[test]
    fn other_calls_and_lost_ranks_are_futile() {
        let mut ranks = group(2, 3);
        ranks[0].enter(STEP);
        ranks[1].enter(Step { size: 512, ..STEP });
        let text = ranks[0].futile().unwrap();
        assert!(
            text.starts_with("rank 1 made another call as its number 1, nvte_ep_dispatch (top_k 8, rows of 512"),
            "{text}"
        );
        assert!(text.ends_with("; rank 2 has made 0 calls"), "{text}");

        drop(ranks.pop());
        let text = ranks[1].futile().unwrap();
        assert!(text.starts_with("rank 0 made another call"), "{text}");
        assert!(text.ends_with("; the process of rank 2 has ended, after 0 calls"), "{text}");

        let ranks = group(3, 3);
        ranks[0].enter(STEP);
        ranks[1].leave();
        ranks[2].give_up("waited 5 ms");
        assert_eq!(ranks[0].futile().unwrap(), "rank 1 has left the group after 0 calls");
        ranks[1].enter(STEP);
        ranks[1].queued(1);
        assert_eq!(ranks[0].futile().unwrap(), "rank 2 gave up: waited 5 ms");
    }

    #[test]
    fn who_left_after_the_call_is_not_missed() {
        let ranks = group(4, 2);
        for rank in &ranks {
            rank.enter(Step::of(Call::Shutdown));
        }
        ranks[1].leave();
        assert_eq!(ranks[0].futile(), None);
    }

    /// As an exception does on its way through the scope that owns the group.
    #[test]
    fn why_a_rank_shut_down_is_told() {
        const REFUSAL: &str = "nvte_ep_dispatch: tokens must be 2D";
        const DIFFERS: &str = "rank 1 made another call as its number 2, nvte_ep_shutdown, after this was refused: \
                               nvte_ep_dispatch: tokens must be 2D";
        let ranks = group(11, 2);
        for rank in &ranks {
            rank.enter(Step::of(Call::Prepare));
            rank.queued(1);
        }
        ranks[1].refuse(REFUSAL, true);
        assert_eq!(ranks[1].left_for(), None, "it has not left");
        ranks[1].enter_shutdown(Call::Shutdown);
        assert_eq!(ranks[1].left_for().as_deref(), Some(REFUSAL));
        let missing = Reason { futile: false, is_missing: true, text: "rank 0 has made 1 calls".into() };
        assert_eq!(ranks[1].why(), missing);
        ranks[0].enter(STEP);
        ranks[0].queued(2);
        assert_eq!(ranks[0].futile().unwrap(), DIFFERS);
        assert!(ranks[1].futile().unwrap().starts_with("rank 0 made another call as its number 2, nvte_ep_dispatch"));
        // It waits no longer, and that is not what went wrong.
        ranks[1].give_up("waited 100 ms for all ranks to call nvte_ep_shutdown");
        assert_eq!(ranks[0].futile().unwrap(), DIFFERS);

        // What no rank waits for is told too, if it ends the group; a call that was made again is not.
        let ranks = group(12, 2);
        ranks[1].refuse("nvte_ep_register_layer: layer_config.top_k must be 1 to 64", false);
        ranks[0].enter(STEP);
        assert_eq!(ranks[0].why().text, "rank 1 has made 0 calls");
        ranks[1].enter_shutdown(Call::Shutdown);
        let text = ranks[0].futile().unwrap();
        assert!(text.ends_with(", after this was refused: nvte_ep_register_layer: layer_config.top_k must be 1 to 64"));
        let ranks = group(13, 2);
        ranks[1].refuse(REFUSAL, true);
        ranks[1].enter(STEP);
        ranks[1].enter_shutdown(Call::Shutdown);
        assert_eq!(ranks[1].left_for(), None);
        ranks[1].give_up("waited 5 ms");
        ranks[0].enter(STEP);
        ranks[0].enter(STEP);
        let text = ranks[0].futile().unwrap();
        assert!(text.ends_with("nvte_ep_shutdown: all ranks have to make the same calls in the same order"), "{text}");
    }

    #[test]
    fn graphs_make_numbers_meaningless() {
        let mut ranks = group(7, 3);
        ranks[0].enter(STEP);
        ranks[1].captured();
        ranks[1].enter(Step::of(Call::Prepare));
        ranks[2].enter(STEP);
        ranks[2].queued(1);
        assert_eq!(ranks[0].futile(), None);
        assert!(!ranks[0].why().text.contains("rank 1"), "{:?}", ranks[0].why());
        drop(ranks.remove(1));
        assert_eq!(ranks[0].futile().unwrap(), "the process of rank 1 has ended");
    }

    #[test]
    fn a_call_that_failed_is_not_counted() {
        let ranks = group(8, 2);
        let failed = ranks[1].enter(Step { size: 8, ..STEP });
        ranks[1].retract(failed);
        ranks[0].enter(STEP);
        assert_eq!(ranks[0].why(), Reason { futile: false, is_missing: true, text: "rank 1 has made 0 calls".into() });
        assert_eq!(ranks[1].enter(STEP), 1);
        assert_eq!(ranks[0].futile(), None);
    }

    #[test]
    fn a_process_that_has_ended_is_known_though_its_child_lives() {
        assert!(is_running(std::process::id().into()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = child.id().into();
        while is_running(process) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!is_running(process));
    }

    #[test]
    fn other_machines_are_not_seen() {
        let key = u64::from(std::process::id()) << 32 | 5;
        let alone = Progress::join(key, 0, vec![true, false, true]);
        Progress::close_door(key);
        alone.enter(STEP);
        let text = alone.reason(1, STEP).text;
        assert!(text.ends_with("; ranks [1, 2] run elsewhere and cannot be seen from here"), "{text}");
    }

    #[test]
    fn who_gave_up_stays_so() {
        let ranks = group(9, 2);
        ranks[1].give_up("rank 0 is missing");
        // A call of the program that fails between the end of the group and the note of it.
        ranks[1].refuse("nvte_ep_dispatch: tokens must be 2D", true);
        ranks[1].leave();
        assert_eq!(ranks[0].futile().unwrap(), "rank 1 gave up: rank 0 is missing");
    }

    /// As other processes read while a rank writes.
    #[test]
    fn texts_are_never_of_two_writers() {
        let ranks = group(10, 2);
        let texts: Vec<String> = (b'a'..=b'p').map(|letter| char::from(letter).to_string().repeat(300)).collect();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (writer, texts, done) = (&ranks[1], &texts, &done);
                scope.spawn(move || {
                    for text in texts.iter().skip(half).step_by(2).cycle().take(20_000) {
                        writer.refuse(text, true);
                    }
                    done.store(true, Ordering::Relaxed);
                });
            }
            let shared = ranks[0].shared.as_ref().unwrap();
            while !done.load(Ordering::Relaxed) {
                let text = shared.note(1).text;
                assert!(text.bytes().all(|byte| byte == text.as_bytes()[0]), "{text}");
            }
        });
    }

    #[test]
    fn texts_are_cut_at_characters() {
        let ranks = group(6, 2);
        ranks[1].refuse(&"ü".repeat(400), true);
        let text = ranks[0].reason(1, STEP).text;
        assert!(
            text.matches('ü').count() == 8 * (WORDS - NOTE - note::TEXT) / 2 && !text.contains('\u{FFFD}'),
            "{text}"
        );
    }
}
