//! The parts of handle memory and their offsets, as NCCL EP lays them out.

use crate::device::SM_COUNT;

/// Every part starts at a multiple of this.
const PART_ALIGNMENT: usize = 256;

/// Offsets of the parts that this implementation uses, relative to the start of handle memory, and the total.
///
/// The other parts hold what kernels need between themselves; they are counted so that the size is that of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLayout {
    /// u64s: the routing header ([`crate::ep::routing_header`]).
    pub header: usize,
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
    /// Where the rows of a received token are.
    pub slots: TokenRows,
    /// i32 `[ranks, max_tokens]`: index of a peer's token among those received, or -1.
    pub token_map: usize,
    /// Bytes in all.
    pub total: usize,
}

/// Where the receive buffer's rows come from, which decides what handle memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The flat layout.
    Flat,
    /// Expert-major, permuted out of staging (local permute).
    Permuted,
    /// Expert-major, written as duplicates of one (local dup).
    Duplicates,
}

/// How the rows of a received token are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRows {
    /// i32 `[capacity, top_k]`: rows by local expert, or -1 (local permute).
    Rows(usize),
    /// u8 `[capacity, local experts]`: 1 where the token goes to an expert; the rows follow (local dup, flat).
    Experts(usize),
}

impl MemoryLayout {
    /// The layout for a communicator of `ranks` in load/store domains of `domain` each.
    pub fn new(
        (ranks, domain): (usize, usize),
        experts: usize,
        max_tokens: usize,
        top_k: usize,
        capacity: usize,
        rows: Rows,
    ) -> Self {
        let domains = ranks / domain;
        let local_experts = experts / ranks;
        let mut total = 0usize;
        let mut part = |bytes: usize| {
            let offset = total;
            total += bytes.next_multiple_of(PART_ALIGNMENT);
            offset
        };
        // NCCL EP's kernels have a byte for each token here.
        let header = part(domains * max_tokens.next_multiple_of(16));
        part(max_tokens * (domains - 1));
        let routing = part(capacity * local_experts);
        let recv_count = part(4);
        let sent = part(domains * max_tokens * 4 * if rows == Rows::Duplicates { top_k } else { domain });
        let rank_mask = part(max_tokens * ranks * 8 * domain.div_ceil(64));
        part(SM_COUNT as usize * domain * 8);
        // Over several domains the group has it.
        part(if domains == 1 { max_tokens * experts * 4 } else { 0 });
        let topk = part(max_tokens * top_k * 8);
        let expert_major = usize::from(rows != Rows::Flat);
        let counts = part(local_experts * 4 * expert_major);
        let bases = part((local_experts + 1) * 8 * expert_major);
        // The mask has 8 bytes for each token and rank, room for both maps.
        let mut source_map = rank_mask;
        let mut token_map = rank_mask + max_tokens * ranks * 4;
        let mut slots = TokenRows::Experts(routing);
        match rows {
            Rows::Flat => {}
            Rows::Duplicates => {
                part(capacity / 2 * top_k.min(local_experts) * 4);
                part(4);
            }
            Rows::Permuted => {
                slots = TokenRows::Rows(part(capacity * top_k * 4));
                part(capacity * top_k * 4);
                token_map = part(max_tokens * ranks * 4);
                source_map = sent;
            }
        }
        Self { header, recv_count, source_map, topk, counts, bases, slots, token_map, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_of_the_worked_example() {
        assert_eq!(MemoryLayout::new((4, 4), 16, 64, 2, 512, Rows::Permuted).total, 24_832);
    }

    /// MiB a layer of 4096 tokens, top-k 8 and 256 experts, 8 ranks a machine, without drops; from NCCL EP's source.
    #[test]
    fn size_over_several_domains() {
        for (domains, mebibytes) in [(1, 29), (2, 41), (8, 140)] {
            let ranks = 8 * domains;
            let size = MemoryLayout::new((ranks, 8), 256, 4096, 8, ranks * 4096 * 8, Rows::Permuted).total;
            assert_eq!((size as f64 / f64::from(1 << 20)).round() as i32, mebibytes, "{size} at {domains}");
        }
    }

    #[test]
    fn size_with_duplicates() {
        // In order: 64, 2048, 4, 512, 2048, 4224, 4096, 1024, 16, 40, 2048 and 4 bytes, each to a multiple of 256.
        let parts = [256, 2048, 256, 512, 2048, 4352, 4096, 1024, 256, 256, 2048, 256];
        assert_eq!(MemoryLayout::new((4, 4), 16, 64, 2, 512, Rows::Duplicates).total, parts.iter().sum());
    }

    #[test]
    fn size_of_the_flat_layout() {
        // In order: 64, 2048, 4, 1024, 2048, 4224, 4096 and 1024 bytes, each to a multiple of 256.
        let parts = [256, 2048, 256, 1024, 2048, 4352, 4096, 1024];
        assert_eq!(MemoryLayout::new((4, 4), 16, 64, 2, 512, Rows::Flat).total, parts.iter().sum());
    }
}
