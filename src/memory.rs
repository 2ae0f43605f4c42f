//! What a group's device memory amounts to, from its configuration alone: NCCL EP (0.1.0) does not tell. docs/memory.md
//! has the formulas in words and a table, which a test here compares.
#![forbid(unsafe_code)]

use crate::config::{GroupConfig, Transfer};

/// Parts of NCCL EP's buffers start at multiples of this.
const PART: u64 = 256;

/// Device memory comes in pieces of this.
const PIECE: u64 = 2 << 20;

/// NCCL EP's workspace for the scan over the routing.
const WORKSPACE: u64 = 32 << 20;

/// Device memory that NCCL EP holds for a group, by rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Rows, weights and scales on their way. In zero-copy groups without the rows, which lie in the callers' windows.
    pub staging: u64,
    /// Who sends to whom, of all ranks.
    pub routing_map: u64,
    /// Scratch of the kernels.
    pub workspace: u64,
}

impl GroupMemory {
    /// What a group of `config` holds while its ranks reach each other by load and store (one NVLink domain).
    #[must_use]
    pub fn of(config: &GroupConfig) -> Self {
        let (ranks, tokens) = (u64::from(config.ep_size), u64::from(config.dispatch_limit()));
        let (rows, row) = (config.internal_rows(), config.max_token_bytes() as u64);
        let weights = part(rows * u64::from(config.num_experts) * 4);
        let staged = match config.transfer {
            Transfer::Staged => part(ranks * tokens * row),
            Transfer::ZeroCopy => 0,
        };
        let scales = part(rows * row);
        Self {
            staging: (2 * staged + 2 * weights + scales).next_multiple_of(PIECE),
            routing_map: piece(ranks * tokens * u64::from(config.num_experts.div_ceil(8))),
            workspace: WORKSPACE,
        }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.staging + self.routing_map + self.workspace
    }
}

fn part(bytes: u64) -> u64 {
    bytes.next_multiple_of(PART)
}

/// A piece of device memory of its own; small ones share a piece with others.
fn piece(bytes: u64) -> u64 {
    if bytes < PIECE { part(bytes) } else { bytes.next_multiple_of(PIECE) }
}

/// Bytes of handle memory that NCCL EP needs for a layer of `top_k` experts per token, on a device of `sm_count`
/// multiprocessors. A live group is asked instead; this is for planning.
#[must_use]
pub fn handle_bytes(config: &GroupConfig, top_k: u32, sm_count: u32) -> u64 {
    let (ranks, experts, tokens) =
        (u64::from(config.ep_size), u64::from(config.num_experts), u64::from(config.dispatch_limit()));
    let (local, rows, top_k) = (u64::from(config.local_experts()), config.internal_rows(), u64::from(top_k));
    let duplicates = config.transfer == Transfer::ZeroCopy;
    let common = [
        tokens.next_multiple_of(16),
        rows * local,
        4,
        tokens * 4 * if duplicates { top_k } else { ranks },
        tokens * ranks * 8 * ranks.div_ceil(64),
        u64::from(sm_count) * ranks * 8,
        tokens * experts * 4,
        tokens * top_k * 8,
        local * 4,
        (local + 1) * 8,
    ];
    let own = if duplicates {
        [rows / 2 * top_k.min(local) * 4, 4, 0]
    } else {
        [rows * top_k * 4, rows * top_k * 4, tokens * ranks * 4]
    };
    common.into_iter().chain(own).map(part).sum()
}
