//! Whether all ranks want the same group, and can all make it. One small all-gather finds out before the collective
//! group creation, in which a rank that differs or is missing would hang or corrupt the others (NCCL EP compares only the
//! receive capacity). This is also the ranks' rendezvous at shutdown.

use super::communicator::Communicator;
use super::watchdog::Watched;
use crate::error::{Error, Result};
use crate::sys::Base;
use crate::sys::cuda::Stream;
use crate::sys::nccl::CommFacts;
use crate::wait::Deadline;
use nvte_ep_bindings as b;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of one rank's record: a word for its kind, a word for the text's length plus one, the fields, the text.
const RECORD: usize = 2048;
const MAX_FIELDS: usize = 64;
const HEAD: usize = 8 * (MAX_FIELDS + 2);
const MAX_TEXT: usize = RECORD - HEAD;

/// What a record is for. A rank that gave up waiting leaves its call on the communicator, where the next one of another
/// rank meets it; the kind, and which try it was, tell that such a pair does not belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Kind {
    /// The first round of initialize.
    RankInfo = 0x4E56_5445_0001,
    /// The second round of initialize: a rank that gave up in the first has not been counted on.
    Confirm,
    /// shutdown.
    Barrier,
    /// A collective call about symmetric memory.
    Symmetric,
    /// The first round of the initialize of a low-latency group.
    LlRankInfo,
}

/// What a rank says of itself: numbers that must agree, numbers that tell where it runs, and why it cannot go on, if so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankInfo {
    /// Must be equal on all ranks, in the order of the names given to [`compare`].
    pub(crate) equal: Vec<u64>,
    /// May differ.
    pub(crate) own: Vec<u64>,
    /// The rank's own error.
    pub(crate) refusal: Option<String>,
}

impl RankInfo {
    fn encode(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        let numbers = self.equal.iter().chain(&self.own);
        assert!(self.equal.len() + self.own.len() <= MAX_FIELDS, "a record holds {MAX_FIELDS} numbers");
        let (words, text) = record.split_at_mut(HEAD);
        let (length, fields) = words[8..].split_at_mut(8);
        for (slot, number) in fields.chunks_exact_mut(8).zip(numbers) {
            slot.copy_from_slice(&number.to_le_bytes());
        }
        if let Some(refusal) = &self.refusal {
            let end = (0..=MAX_TEXT.min(refusal.len())).rev().find(|&end| refusal.is_char_boundary(end)).unwrap_or(0);
            text[..end].copy_from_slice(&refusal.as_bytes()[..end]);
            length.copy_from_slice(&(end as u64 + 1).to_le_bytes());
        }
        record
    }

    fn decode(record: &[u8], equal: usize, own: usize) -> Self {
        let word = |index: usize| u64::from_le_bytes(record[8 * (index + 1)..][..8].try_into().expect("8 bytes"));
        let text = &record[HEAD..];
        let refusal = match word(0) as usize {
            0 => None,
            length => Some(String::from_utf8_lossy(&text[..(length - 1).min(text.len())]).into_owned()),
        };
        Self { equal: (1..=equal).map(word).collect(), own: (equal + 1..=equal + own).map(word).collect(), refusal }
    }
}

/// The text that every rank reports, if any rank refuses or differs from rank 0.
pub(crate) fn compare(names: &[String], infos: &[RankInfo]) -> Result<()> {
    if let Some((rank, refusal)) =
        infos.iter().enumerate().find_map(|(rank, s)| s.refusal.as_ref().map(|text| (rank, text)))
    {
        return Err(Error::Disagreement(format!("rank {rank} cannot take part: {refusal}")));
    }
    let first = infos.first().map_or(&[][..], |s| &s.equal);
    for (rank, info) in infos.iter().enumerate() {
        for ((name, value), expected) in names.iter().zip(&info.equal).zip(first) {
            if value != expected {
                return Err(Error::Disagreement(format!(
                    "all ranks must pass the same {name}: rank {rank} has {}, rank 0 has {}",
                    *value as i64, *expected as i64
                )));
            }
        }
    }
    Ok(())
}

/// Scratch memory and a stream of our own on the group's device, for small collectives on the borrowed communicator.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    base: &'static Base,
    comm: Communicator,
    facts: CommFacts,
    stream: Stream,
    scratch: u64,
    /// Knows which ranks are missing, once there is a group.
    watched: Option<Arc<Watched>>,
}

/// What to do where a rank has not come.
const ALIVE: &str = "check that every rank of the communicator makes this call and is alive";
const ABSENT: &str = "check that every rank of the communicator makes this call and is alive; this call stays behind on the \
                      communicator, so make a new one before trying again";

/// A time-out whose remedy was `remedy`, with what is known of the missing ranks in front of that.
fn naming_missing(error: Error, remedy: &'static str, why: impl FnOnce() -> String) -> Error {
    match error {
        Error::TimeOut { waited_for, milliseconds, remedy: own } if own == remedy => {
            Error::TimeOut { waited_for, milliseconds, remedy: format!("{}; {remedy}", why()) }
        }
        error => error,
    }
}

/// What the ranks' records are, if not all of them are of one kind.
fn check_kinds(kind: Kind, records: &[u8]) -> Result<()> {
    for (rank, record) in records.chunks_exact(RECORD).enumerate() {
        if record[..8] != (kind as u64).to_le_bytes() {
            return Err(Error::State(format!(
                "rank {rank} answered with another call: an nvte_ep call or a collective that was given up on is left on \
                 the communicator; make a new communicator on every rank"
            )));
        }
    }
    Ok(())
}

impl Rendezvous {
    /// Allocates on the current device.
    pub(crate) fn new(base: &'static Base, comm: Communicator, facts: CommFacts) -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a live pointer.
        let code = unsafe { (base.cuda.cuStreamCreate)(&raw mut stream, b::CU_STREAM_NON_BLOCKING) };
        base.cuda.check("cuStreamCreate", code)?;
        // SAFETY: ours, until it is destroyed.
        let stream = unsafe { Stream::bind(stream.expose_provenance()) };
        let mut scratch = 0;
        let bytes = RECORD * (facts.size as usize + 1);
        // SAFETY: `scratch` is a live pointer.
        let code = unsafe { (base.cuda.cuMemAlloc_v2)(&raw mut scratch, bytes) };
        if let Err(error) = base.cuda.check("cuMemAlloc_v2", code) {
            // SAFETY: our own stream, idle.
            unsafe { (base.cuda.cuStreamDestroy_v2)(stream.as_raw()) };
            return Err(error);
        }
        Ok(Self { base, comm, facts, stream, scratch, watched: None })
    }

    /// From now on waits end early where a rank cannot come any more, and time-outs name the missing.
    pub(crate) fn watch(&mut self, watched: Arc<Watched>) {
        self.watched = Some(watched);
    }

    /// Why the group is at its end, if it is.
    pub(crate) fn ended(&self) -> Option<String> {
        let ended = self.watched.as_deref().and_then(|watched| watched.require_alive().err());
        ended.map(|error| error.to_string())
    }

    /// Why this rank's latest call cannot come to its end, if that can be seen.
    pub(crate) fn futile(&self) -> Option<String> {
        self.watched.as_deref().and_then(|watched| watched.progress().futile())
    }

    /// What every rank says of itself, by rank; collective. `what` names the wait in the text of a time-out.
    ///
    /// # Safety
    /// The communicator is live.
    pub(crate) unsafe fn exchange(
        &self,
        kind: Kind,
        own: &RankInfo,
        limit: Option<Duration>,
        what: &str,
    ) -> Result<Vec<RankInfo>> {
        // SAFETY: the caller vouches for the communicator.
        let all = unsafe { self.all_gather(kind, own.encode(), limit, what)? };
        Ok(all.chunks_exact(RECORD).map(|r| RankInfo::decode(r, own.equal.len(), own.own.len())).collect())
    }

    /// Returns when every rank has seen what all say, so that none of them has given up waiting.
    ///
    /// # Safety
    /// The communicator is live.
    pub(crate) unsafe fn confirm(&self, limit: Option<Duration>, what: &str) -> Result<()> {
        // SAFETY: the caller vouches for the communicator.
        unsafe { self.all_gather(Kind::Confirm, [0; RECORD], limit, what) }.map(|_| ())
    }

    /// Returns when every rank has come here. `what` names the wait in the text of a time-out.
    ///
    /// # Safety
    /// The communicator is live.
    pub(crate) unsafe fn barrier(&self, limit: Option<Duration>, what: &str) -> Result<()> {
        let start = Instant::now();
        self.wait_for_calls(limit, what)?;
        let limit = limit.map(|limit| limit.saturating_sub(start.elapsed()));
        // SAFETY: the caller vouches for the communicator.
        unsafe { self.all_gather(Kind::Barrier, [0; RECORD], limit, what) }.map(|_| ())
    }

    /// Returns when all ranks that can be seen have made this rank's latest call. What is queued before would wait on the device
    /// for a rank that never comes, and so would all that the program does there afterwards: freeing its memory after an
    /// exception, say.
    fn wait_for_calls(&self, limit: Option<Duration>, what: &str) -> Result<()> {
        let Some(progress) = self.watched.as_deref().map(Watched::progress) else { return Ok(()) };
        let missing = || Some(progress.why()).filter(|reason| reason.is_missing);
        let futile = || missing().filter(|reason| reason.futile).map(|reason| reason.text);
        let mut deadline = Deadline::new(what, limit, ALIVE, &futile);
        while let Some(reason) = missing() {
            deadline.check().map_err(|error| naming_missing(error, ALIVE, || reason.text))?;
            // A look asks the system about each missing rank, so a long wait looks seldom.
            std::thread::sleep((deadline.waited() / 8).clamp(Duration::from_micros(200), Duration::from_millis(50)));
        }
        Ok(())
    }

    unsafe fn all_gather(
        &self,
        kind: Kind,
        mut own: [u8; RECORD],
        limit: Option<Duration>,
        what: &str,
    ) -> Result<Vec<u8>> {
        own[..8].copy_from_slice(&(kind as u64).to_le_bytes());
        let (cuda, nccl, stream) = (&self.base.cuda, &self.base.nccl, self.stream.as_raw());
        let (send, receive) = (self.scratch, self.scratch + RECORD as u64);
        // SAFETY: the scratch memory holds one record more than there are ranks; pageable memory is read at the call.
        let code = unsafe { (cuda.cuMemcpyHtoDAsync_v2)(send, own.as_ptr().cast(), RECORD, stream) };
        cuda.check("cuMemcpyHtoDAsync_v2", code)?;
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: as above; the caller vouches for the communicator.
        let code = unsafe {
            (nccl.ncclAllGather)(pointer(send), pointer(receive), RECORD, b::ncclUint8, self.comm.as_raw(), stream)
        };
        nccl.check("ncclAllGather", code)?;
        let met = cuda.wait(self.stream, limit, what, ABSENT, &|| self.futile());
        met.map_err(|error| match self.watched.as_deref().map(Watched::progress) {
            Some(progress) => naming_missing(error, ABSENT, || progress.why().text),
            None => error,
        })?;
        let mut all = vec![0u8; RECORD * self.facts.size as usize];
        // SAFETY: `all` is as long as the copy.
        let code = unsafe { (cuda.cuMemcpyDtoHAsync_v2)(all.as_mut_ptr().cast(), receive, all.len(), stream) };
        cuda.check("cuMemcpyDtoHAsync_v2", code)?;
        cuda.wait(self.stream, limit, "a copy from the device", "look for a stuck kernel", &|| None)?;
        check_kinds(kind, &all)?;
        Ok(all)
    }

    /// As [`Rendezvous::close`] where an error is on its way to the caller, which another one must not hide.
    pub(crate) fn close_after_failure(self) {
        if let Err(error) = self.close() {
            tracing::warn!(target: "nvte_ep", "{error}");
        }
    }

    /// Bytes of its device memory.
    pub(crate) fn bytes(&self) -> u64 {
        RECORD as u64 * (self.facts.size as u64 + 1)
    }

    /// Frees stream and memory; only after everything queued is done.
    pub(crate) fn close(self) -> Result<()> {
        // SAFETY: our own memory, and nothing is queued on it.
        self.base.cuda.check("cuMemFree_v2", unsafe { (self.base.cuda.cuMemFree_v2)(self.scratch) })?;
        // SAFETY: our own stream, idle.
        let code = unsafe { (self.base.cuda.cuStreamDestroy_v2)(self.stream.as_raw()) };
        self.base.cuda.check("cuStreamDestroy_v2", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(equal: &[u64], refusal: Option<&str>) -> RankInfo {
        RankInfo { equal: equal.into(), own: vec![7, u64::MAX], refusal: refusal.map(Into::into) }
    }

    #[test]
    fn records_round_trip() {
        for refusal in [None, Some(""), Some("nvcc is missing")] {
            let own = info(&[1, 2, 3], refusal);
            assert_eq!(RankInfo::decode(&own.encode(), 3, 2), own);
        }
        let long = info(&[], Some(&"ü".repeat(RECORD)));
        let text = RankInfo::decode(&long.encode(), 0, 2).refusal.unwrap();
        assert!(text.len() >= MAX_TEXT - 1 && text.chars().all(|c| c == 'ü'));
    }

    #[test]
    fn calls_that_do_not_belong_together_are_told() {
        let record = |kind: Kind| {
            let mut record = vec![0u8; RECORD];
            record[..8].copy_from_slice(&(kind as u64).to_le_bytes());
            record
        };
        let pair = |a, b| [record(a), record(b)].concat();
        check_kinds(Kind::Barrier, &pair(Kind::Barrier, Kind::Barrier)).unwrap();
        for (kind, records) in [
            (Kind::RankInfo, pair(Kind::RankInfo, Kind::Barrier)),
            (Kind::Confirm, pair(Kind::Confirm, Kind::RankInfo)),
            (Kind::Barrier, [record(Kind::Barrier), vec![0; RECORD]].concat()),
        ] {
            let text = check_kinds(kind, &records).unwrap_err().to_string();
            assert!(text.starts_with("rank 1 answered with another call"), "{text}");
        }
    }

    #[test]
    fn the_odd_rank_and_field_are_named() {
        let names = ["group_config.hidden_dim", "group_config.max_num_sms"].map(String::from);
        compare(&names, &[info(&[512, 0], None), info(&[512, 0], None)]).unwrap();
        let error = compare(&names, &[info(&[512, 0], None), info(&[512, 8], None)]).unwrap_err();
        let text = "all ranks must pass the same group_config.max_num_sms: rank 1 has 8, rank 0 has 0";
        assert_eq!(error.to_string(), text);
        let error = compare(&names, &[info(&[512, 0], None), info(&[9, 0], Some("no nvcc"))]).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 cannot take part: no nvcc");
    }
}
