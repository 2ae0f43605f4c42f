//! The routing header of handle memory: which UpdateHandle filled it, and which routing the last dispatch over it used.
//!
//! It is a part of the bytes, so it moves with them, and replays of a graph keep it current.

use crate::check;
use crate::ep::handle::HandleMemory;
use crate::fault::Outcome;
use crate::rule::Rule;

const MAGIC: u64 = 0x6e76_7465_726f_7574;
/// Words of a header; the part of handle memory that it lies in has 256 bytes at least.
const WORDS: usize = 7;

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
        header
    }

    /// Writes the header.
    pub fn write(&self, memory: &HandleMemory) {
        let words = [MAGIC, self.number, self.digest].into_iter().chain(self.open).chain(self.early);
        let words: Vec<i64> = words.map(u64::cast_signed).collect();
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

    /// A dispatch uses the routing; the combine in its direction has to do the same.
    pub fn dispatch(&mut self, forward: bool) {
        let direction = usize::from(!forward);
        if std::mem::take(&mut self.early[direction]) != self.digest {
            self.open[direction] = self.digest;
        }
    }

    /// A combine uses the routing: that of the dispatch before it, which its rows come from.
    pub fn combine(&mut self, function: &str, forward: bool) -> Outcome<()> {
        let direction = usize::from(!forward);
        let open = std::mem::take(&mut self.open[direction]);
        if open == 0 {
            self.early[direction] = self.digest;
        }
        if open == 0 || open == self.digest {
            return Ok(());
        }
        let text = format!(
            "{function}: handle_mem holds the routing of operation {}, but the last dispatch over this handle_mem used \
             another one: keep a handle_mem for each micro-batch until its gradients are done",
            self.number
        );
        if forward {
            return check::breach(Rule::RoutingChanged, text);
        }
        // A program may use one half of a backward pass alone, as tests of single operations do.
        check::warn(Rule::RoutingChanged, text);
        Ok(())
    }
}
