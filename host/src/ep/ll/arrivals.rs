//! Which tokens a dispatch brought and which rows they have: kept in handle memory, from where combine sends them back.

use std::ops::Range;

use nvte_ep_bindings::{cudaErrorIllegalAddress, ncclInvalidUsage};

use crate::ep::ll::limits::Shape;
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::rule::Rule;

const MAGIC: u64 = 0x6e76_7465_5f6c_6c31;

/// The tokens that a dispatch brought, source rank after source rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// Number of the dispatch among the group's operations, the same on every rank.
    pub number: u64,
    /// Those of each source rank.
    pub of_rank: Vec<Range<usize>>,
    /// Their rows on the source rank, ascending for each rank.
    pub tokens: Vec<i32>,
    /// For each, `top_k` rows of the receive buffer, in the order of the token's experts; -1 for none.
    pub slots: Vec<i32>,
}

/// Handle memory of low-latency mode.
#[derive(Clone, Copy, Debug)]
pub struct HandleMemory {
    /// The bytes.
    pub span: Span,
    /// What they are for.
    pub shape: Shape,
}

impl HandleMemory {
    /// First byte of a source rank's tokens. Before all of them are the ranks' numbers of tokens.
    fn offset_of(&self, rank: usize) -> usize {
        let Shape { ranks, max_tokens, top_k, .. } = self.shape;
        (ranks + rank * max_tokens * (top_k + 1)) * 4
    }

    fn write_i32(&self, offset: usize, values: &[i32]) {
        self.span.write(offset, &values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>());
    }

    fn read_i32(&self, offset: usize, count: usize) -> Vec<i32> {
        let bytes = self.span.view(offset, count * 4);
        bytes.as_chunks::<4>().0.iter().map(|value| i32::from_ne_bytes(*value)).collect()
    }

    /// Keeps the arrivals of a dispatch.
    pub fn keep(&self, arrivals: &Arrivals) {
        let counts: Vec<i32> = arrivals.of_rank.iter().map(|tokens| tokens.len() as i32).collect();
        self.write_i32(0, &counts);
        let top_k = self.shape.top_k;
        for (rank, tokens) in arrivals.of_rank.iter().enumerate() {
            let entries: Vec<i32> = tokens
                .clone()
                .flat_map(|i| [&arrivals.tokens[i..=i], &arrivals.slots[i * top_k..][..top_k]].concat())
                .collect();
            self.write_i32(self.offset_of(rank), &entries);
        }
        let header = [MAGIC, arrivals.number].map(u64::to_ne_bytes).concat();
        self.span.write(self.shape.source_bytes(), &header);
    }

    /// The arrivals of the last dispatch over this memory; `rows` is the length of the receive buffer.
    pub fn arrivals(&self, rows: usize, function: &str) -> Outcome<Arrivals> {
        let text =
            format!("{function}: handle_mem holds no rows of a dispatch (ncclEpDispatch never ran over this memory)");
        let none = || Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text.clone()).breaks(Rule::DispatchFirst);
        let words = self.span.view(self.shape.source_bytes(), 16).as_chunks::<8>().0;
        let [magic, number] = [0, 1].map(|word: usize| u64::from_ne_bytes(words[word]));
        if magic != MAGIC {
            return Err(none());
        }
        let Shape { ranks, max_tokens, top_k, .. } = self.shape;
        let mut arrivals = Arrivals { number, ..Arrivals::default() };
        for (rank, count) in self.read_i32(0, ranks).into_iter().enumerate() {
            let count = usize::try_from(count).ok().filter(|count| *count <= max_tokens).ok_or_else(none)?;
            let first = arrivals.tokens.len();
            for entry in self.read_i32(self.offset_of(rank), count * (top_k + 1)).chunks_exact(top_k + 1) {
                arrivals.tokens.push(entry[0]);
                arrivals.slots.extend(&entry[1..]);
            }
            arrivals.of_rank.push(first..first + count);
        }
        let sane = arrivals.tokens.iter().all(|token| (0..max_tokens as i64).contains(&i64::from(*token)))
            && arrivals.slots.iter().all(|slot| (-1..rows as i64).contains(&i64::from(*slot)));
        if sane { Ok(arrivals) } else { Err(none()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_come_back_and_damage_is_noticed() {
        let shape = Shape { ranks: 2, experts: 4, max_tokens: 3, max_token_bytes: 1024, top_k: 2, rank_major: false };
        let mut bytes = vec![0u8; shape.handle_bytes()];
        // SAFETY: only this test knows the memory, and it outlives the span.
        let span = unsafe { Span::new(bytes.as_mut_ptr().cast(), bytes.len()) }.unwrap();
        let memory = HandleMemory { span, shape };
        let of = |rows| memory.arrivals(rows, "f").map_err(|fault| fault.rule);
        assert_eq!(of(12), Err(Some(Rule::DispatchFirst)), "zeros are no dispatch");
        let kept =
            Arrivals { number: 7, of_rank: vec![0..2, 2..3], tokens: vec![0, 2, 1], slots: vec![0, -1, 6, 11, -1, 1] };
        memory.keep(&kept);
        assert_eq!(of(12), Ok(kept.clone()));
        assert_eq!(of(11), Err(Some(Rule::DispatchFirst)), "a row behind the receive buffer");
        memory.write_i32(4, &[4]);
        assert_eq!(of(12), Err(Some(Rule::DispatchFirst)), "more tokens than a rank has");
        memory.keep(&kept);
        memory.write_i32(memory.offset_of(1), &[3]);
        assert_eq!(of(12), Err(Some(Rule::DispatchFirst)), "a token behind a rank's last");
    }
}
