//! The routing header of handle memory: which UpdateHandle filled it, and which routings the dispatches over it used.
//!
//! It is a part of the bytes, so it moves with them, and replays of a graph keep it current.

use crate::check;
use crate::ep::handle::HandleMemory;
use crate::fault::Outcome;
use crate::rule::Rule;

const MAGIC: u64 = 0x6e76_7465_726f_7574;
/// Words of a header; the part of handle memory that it lies in has 256 bytes at least.
const WORDS: usize = 9 + KEPT;
/// How many routings of forward passes a header keeps.
const KEPT: usize = 16;

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
    forwards: Forwards,
}

/// The routings that forward passes used, for the gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Forwards {
    /// Their digests; 0 for none.
    digests: [u64; KEPT],
    /// A bit for each of them whose gradients were not computed.
    owed: u64,
    /// 1 once more than `KEPT` were owed: then nothing is known of the others.
    lost: u64,
}

impl Forwards {
    fn dispatched(&mut self, digest: u64) {
        let find = |wanted: u64| self.digests.iter().position(|kept| *kept == wanted);
        let done = || (0..KEPT).find(|slot| self.owed & 1 << slot == 0);
        let slot = find(digest).or_else(|| find(0)).or_else(done);
        self.lost |= u64::from(slot.is_none());
        let slot = slot.unwrap_or_default();
        self.digests[slot] = digest;
        self.owed |= 1 << slot;
    }

    fn gradients_are_done(&mut self, digest: u64) {
        if let Some(slot) = self.digests.iter().position(|kept| *kept == digest) {
            self.owed &= !(1 << slot);
        }
    }

    /// Whether gradients by this routing are of no forward pass over this memory, while a forward pass over it lacks its gradients.
    fn lacks(&self, digest: u64) -> bool {
        self.lost == 0 && self.owed != 0 && !self.digests.contains(&digest)
    }
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
        header.forwards.digests.fill_with(&mut next);
        (header.forwards.owed, header.forwards.lost) = (next(), next());
        header
    }

    /// Writes the header.
    pub fn write(&self, memory: &HandleMemory) {
        let Forwards { digests, owed, lost } = self.forwards;
        let words = [MAGIC, self.number, self.digest].into_iter().chain(self.open).chain(self.early);
        let words: Vec<i64> = words.chain(digests).chain([owed, lost]).map(u64::cast_signed).collect();
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
    pub fn dispatch(&mut self, function: &str, forward: bool) {
        let direction = usize::from(!forward);
        if forward {
            self.forwards.dispatched(self.digest);
        }
        if std::mem::take(&mut self.early[direction]) != self.digest {
            self.open[direction] = self.digest;
            self.look_for_forward(function, forward);
        } else if !forward {
            self.forwards.gradients_are_done(self.digest);
        }
    }

    /// A combine uses the routing: that of the dispatch before it, which its rows come from.
    pub fn combine(&mut self, function: &str, forward: bool) -> Outcome<()> {
        let direction = usize::from(!forward);
        let open = std::mem::take(&mut self.open[direction]);
        if open == 0 {
            self.early[direction] = self.digest;
            self.look_for_forward(function, forward);
            return Ok(());
        }
        if open == self.digest {
            if !forward {
                self.forwards.gradients_are_done(self.digest);
            }
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

    /// The first operation of a backward pass uses the routing of a forward pass. A program may prepare handle memory for gradients
    /// alone, so what is found is a warning.
    fn look_for_forward(&self, function: &str, forward: bool) {
        if !forward && self.forwards.lacks(self.digest) {
            let text = format!(
                "{function}: handle_mem holds the routing of operation {}, which no forward pass over this handle_mem used, \
                 and one that used another routing lacks its gradients: keep a handle_mem for each micro-batch until its \
                 gradients are done",
                self.number
            );
            check::warn(Rule::RoutingChanged, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_of_a_forward_pass_that_is_known() {
        let mut forwards = Forwards::default();
        assert!(!forwards.lacks(999), "no forward pass: the memory may be for gradients alone");
        forwards.dispatched(1);
        assert!(forwards.lacks(999) && !forwards.lacks(1));
        forwards.gradients_are_done(1);
        assert!(!forwards.lacks(999), "no forward pass lacks its gradients");
        // Steps whose gradients are done are not kept for ever.
        for digest in 1..=4 * KEPT as u64 {
            forwards.dispatched(digest);
            forwards.gradients_are_done(digest);
        }
        // As many as are kept, and a recomputation of one.
        for digest in (101..101 + KEPT as u64).chain([101]) {
            forwards.dispatched(digest);
            assert!(forwards.lacks(999) && !forwards.lacks(101) && !forwards.lacks(digest), "{digest}");
        }
        forwards.dispatched(200);
        assert!(!forwards.lacks(999), "one was lost, and it may be that");
    }
}
