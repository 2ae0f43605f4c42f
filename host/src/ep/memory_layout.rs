//! The parts of handle memory and their offsets, as NCCL EP lays them out for the expert-major local-permute path.

use crate::device::SM_COUNT;

/// Every part starts at a multiple of this.
const PART_ALIGNMENT: usize = 256;

/// Offsets of the parts that this implementation uses, relative to the start of handle memory, and the total.
///
/// The other parts hold what kernels need between themselves; they are counted so that the size is that of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLayout {
    /// i32: unique tokens received.
    pub recv_count: usize,
    /// i32 `[max_tokens, ranks]`: index of the own token among those that each rank receives, or -1.
    pub source_map: usize,
    /// `[max_tokens, top_k]` of the index type: the routing as given.
    pub topk: usize,
    /// i32 `[local experts]`: tokens received, without padding.
    pub counts: usize,
    /// i64 `[local experts + 1]`: first row of each expert's zone, and the padded total.
    pub bases: usize,
    /// i32 `[capacity, top_k]`: rows of a received token, by local expert, or -1.
    pub slots: usize,
    /// i32 `[ranks, max_tokens]`: index of a peer's token among those received, or -1.
    pub token_map: usize,
    /// Bytes in all.
    pub total: usize,
}

impl MemoryLayout {
    /// The layout for one communicator inside one load/store domain.
    pub fn new(ranks: usize, experts: usize, max_tokens: usize, top_k: usize, capacity: usize) -> Self {
        let local_experts = experts / ranks;
        let mut total = 0usize;
        let mut part = |bytes: usize| {
            let offset = total;
            total += bytes.next_multiple_of(PART_ALIGNMENT);
            offset
        };
        part(max_tokens.next_multiple_of(16));
        part(capacity * local_experts);
        let recv_count = part(4);
        let source_map = part(max_tokens * 4 * ranks);
        part(max_tokens * ranks * 8 * ranks.div_ceil(64));
        part(SM_COUNT as usize * ranks * 8);
        part(max_tokens * experts * 4);
        let topk = part(max_tokens * top_k * 8);
        let counts = part(local_experts * 4);
        let bases = part((local_experts + 1) * 8);
        let slots = part(capacity * top_k * 4);
        part(capacity * top_k * 4);
        let token_map = part(max_tokens * ranks * 4);
        Self { recv_count, source_map, topk, counts, bases, slots, token_map, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_of_the_worked_example() {
        assert_eq!(MemoryLayout::new(4, 16, 64, 2, 512).total, 24_832);
    }
}
