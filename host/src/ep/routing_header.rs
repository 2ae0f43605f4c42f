//! The routing header of handle memory: which UpdateHandle filled it, and which routings dispatches have used over it.
//!
//! It is a part of the bytes, so it moves with them, and replays of a graph keep it current.

use crate::check::{self, Rule};
use crate::ep::handle::HandleMemory;
use crate::fault::Outcome;

const MAGIC: u64 = 0x6e76_7465_726f_7574;
/// Routings that a header remembers. With more of them it knows nothing about gradients any more.
const REMEMBERED: usize = 24;
/// Words of a header; the part of handle memory that it lies in has 256 bytes at least.
const WORDS: usize = 8 + REMEMBERED;

/// What a header says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingHeader {
    /// Number of the UpdateHandle among the group's operations, the same on every rank; 0 for none.
    pub number: u64,
    /// Tells routings apart by what they say; never 0.
    digest: u64,
    /// Digest of the routing that the last dispatch forward, and backward, used, until a combine follows it; 0 for none.
    open: [u64; 2],
    /// Digest of the routing of a combine forward, and backward, that came before its dispatch: programs that compare single
    /// operations do so. 0 for none.
    early: [u64; 2],
    /// How many routings were dispatched.
    dispatched: u64,
    digests: [u64; REMEMBERED],
}

/// A digest of the experts of every rank's tokens.
pub fn digest(top_k: usize, indices: &[Vec<i32>]) -> u64 {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let start = mix(0xcbf2_9ce4_8422_2325, top_k as u64);
    let of_rank = |hash, rank: &Vec<i32>| {
        rank.iter().fold(mix(hash, rank.len() as u64), |hash, index| mix(hash, u64::from(index.cast_unsigned())))
    };
    indices.iter().fold(start, of_rank) | 1
}

impl RoutingHeader {
    /// Reads the header; of memory that no UpdateHandle filled it is empty.
    pub fn read(memory: &HandleMemory) -> Self {
        let words = memory.read_i64(memory.layout.header, WORDS);
        let mut words = words.into_iter().map(i64::cast_unsigned);
        let mut next = || words.next().unwrap_or_default();
        if next() != MAGIC {
            return Self::default();
        }
        let mut header = Self { number: next(), digest: next(), ..Self::default() };
        header.open.fill_with(&mut next);
        header.early.fill_with(&mut next);
        header.dispatched = next();
        header.digests.fill_with(next);
        header
    }

    /// Writes the header.
    pub fn write(&self, memory: &HandleMemory) {
        let words = [MAGIC, self.number, self.digest].into_iter().chain(self.open).chain(self.early);
        let words: Vec<i64> = words.chain([self.dispatched]).chain(self.digests).map(u64::cast_signed).collect();
        memory.write_i64(memory.layout.header, &words);
    }

    /// `what` with the routing that it uses, on which the ranks have to agree.
    pub fn name(&self, what: &str) -> String {
        format!("{what} with the routing of operation {}", self.number)
    }

    /// An UpdateHandle has filled the memory.
    pub fn update(&mut self, number: u64, digest: u64) {
        (self.number, self.digest) = (number, digest);
    }

    /// A dispatch uses the routing. Backward, its rows are gradients of a combine over the same routing.
    pub fn dispatch(&mut self, function: &str, forward: bool) -> Outcome<()> {
        let sound = if forward { Ok(()) } else { self.expect_dispatched(function) };
        let direction = usize::from(!forward);
        if std::mem::take(&mut self.early[direction]) != self.digest {
            self.open[direction] = self.digest;
        }
        if !self.remembered().contains(&self.digest) {
            if let Some(place) = self.digests.get_mut(self.dispatched as usize) {
                *place = self.digest;
            }
            self.dispatched += 1;
        }
        sound
    }

    /// A combine uses the routing: that of the dispatch before it, which its rows come from.
    pub fn combine(&mut self, function: &str, forward: bool) -> Outcome<()> {
        let direction = usize::from(!forward);
        match std::mem::take(&mut self.open[direction]) {
            0 => {
                self.early[direction] = self.digest;
                self.expect_dispatched(function)
            }
            open if open == self.digest => Ok(()),
            _ => self.breach(function, "the last dispatch over this handle_mem used another routing"),
        }
    }

    fn remembered(&self) -> &[u64] {
        &self.digests[..REMEMBERED.min(self.dispatched as usize)]
    }

    /// Fails where dispatches have used the memory, but none with the routing that it holds now.
    fn expect_dispatched(&self, function: &str) -> Outcome<()> {
        let known = self.remembered();
        if self.dispatched as usize > REMEMBERED || known.is_empty() || known.contains(&self.digest) {
            return Ok(());
        }
        self.breach(function, "dispatches over this handle_mem have used other routings only")
    }

    fn breach(&self, function: &str, found: &str) -> Outcome<()> {
        let text = format!(
            "{function}: handle_mem holds the routing of operation {}, but {found}: keep a handle_mem for each \
             micro-batch until its gradients are done",
            self.number
        );
        check::breach(Rule::RoutingChanged, text)
    }
}
