//! What a group's device memory amounts to, from its configuration alone: NCCL EP (0.1.0) does not tell. docs/memory.md
//! has the formulas in words and a table, which a test here compares.
#![forbid(unsafe_code)]

use crate::config::{GroupConfig, LlConfig, Transfer};

/// Bytes in front of the engine's part of handle memory, in which it says what it holds: one unit of its alignment.
pub(crate) const HEADER_BYTES: usize = 256;

/// Parts of NCCL EP's buffers start at multiples of this.
const PART: u64 = 256;

/// Device memory comes in pieces of this.
const PIECE: u64 = 2 << 20;

/// NCCL EP's workspace for the scan over the routing.
const WORKSPACE: u64 = 32 << 20;

/// Device memory that NCCL EP holds for a group, by rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Rows, weights and scales on their way, to ranks of other NVLink domains too. In zero-copy groups without the rows that go
    /// by load and store, which lie in the callers' windows.
    pub staging: u64,
    /// Who sends to whom, of all ranks.
    pub routing_map: u64,
    /// Scratch of the kernels.
    pub workspace: u64,
}

impl GroupMemory {
    /// What a group of `config` holds whose ranks are in so many NVLink domains.
    #[must_use]
    pub fn of(config: &GroupConfig, domains: u32) -> Self {
        let (ranks, tokens) = (u64::from(config.ep_size), u64::from(config.dispatch_limit()));
        let domain_experts = config.num_experts / domains;
        Self {
            staging: Self::staging_parts(config, domains).iter().sum::<u64>().next_multiple_of(PIECE),
            routing_map: piece(ranks * tokens * u64::from(domain_experts.div_ceil(8)) * u64::from(domains)),
            workspace: WORKSPACE,
        }
    }

    /// What staging holds: rows, scales, weights, and all of them between domains.
    #[must_use]
    pub fn staging_parts(config: &GroupConfig, domains: u32) -> [u64; 4] {
        let (ranks, tokens) = (u64::from(config.ep_size), u64::from(config.dispatch_limit()));
        let (rows, row) = (config.internal_rows(), config.max_token_bytes() as u64);
        let staged = match config.transfer {
            Transfer::Staged => part(ranks * tokens * row),
            Transfer::ZeroCopy => 0,
        };
        let weights = rows * u64::from(config.num_experts / domains) * 4;
        [2 * staged, part(rows * row), 2 * part(weights), Self::network(config, domains)]
    }

    /// The buffers between domains, of which those of dispatch and combine are apart. NCCL EP's device headers
    /// (device/ht_ep.cuh, `dispatch_memory_region_info_t` and `combine_memory_region_info_t`) name them and show how they are
    /// indexed: a rank's own tokens with their weights for every domain; and four that have a place for every token of a rank and
    /// every other domain, two that send and two that receive.
    fn network(config: &GroupConfig, domains: u32) -> u64 {
        if domains == 1 {
            return 0;
        }
        let (tokens, row) = (u64::from(config.dispatch_limit()), config.max_token_bytes() as u64);
        let weights = u64::from(config.num_experts / domains) * 4;
        let other = u64::from(domains - 1);
        let own = part(tokens * row) + part(tokens * weights * u64::from(domains));
        own + 4 * (part(other * tokens * row) + part(other * tokens * weights))
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

/// Bytes of the buffers of a low-latency group, which NCCL EP is told: it allocates them with the group, and they never grow.
#[must_use]
pub fn ll_buffer_bytes(config: &LlConfig) -> u64 {
    let (ranks, experts, tokens) =
        (u64::from(config.ep_size), u64::from(config.num_experts), u64::from(config.max_tokens_per_rank));
    let (row, top_k) = (config.max_token_bytes() as u64, u64::from(config.num_topk));
    // A row to dispatch: its experts of 16 bits and 4 bytes more in front. A row to combine: 4 bytes more for each 256.
    let dispatched = (4 + 2 * top_k).next_multiple_of(16) + row;
    let combined = row + 4 * (row / 256);
    let slot = (tokens * dispatched + ranks * tokens * dispatched)
        .max(experts * tokens * combined + top_k * tokens * combined);
    // Two of each: one step's receiver may still read while the next one's sender writes.
    2 * slot + 2 * (4 * experts).next_multiple_of(128)
}

/// Device memory of a low-latency group beside its handle memory: the buffers, and NCCL EP's workspace.
#[must_use]
pub fn ll_group_bytes(config: &LlConfig) -> [u64; 2] {
    [ll_buffer_bytes(config).next_multiple_of(PIECE), WORKSPACE]
}

/// Bytes of handle memory for a layer of `top_k` experts per token, on devices of `sm_count` multiprocessors in so many NVLink
/// domains: the header, what NCCL EP needs, and the copy of the indices. A live group asks NCCL EP instead; this is for planning.
#[must_use]
pub fn handle_bytes(config: &GroupConfig, top_k: u32, sm_count: u32, domains: u32) -> u64 {
    let (ranks, experts, tokens) =
        (u64::from(config.ep_size), u64::from(config.num_experts), u64::from(config.dispatch_limit()));
    let (local, rows, top_k) = (u64::from(config.local_experts()), config.internal_rows(), u64::from(top_k));
    let duplicates = config.transfer == Transfer::ZeroCopy;
    let domains = u64::from(domains);
    let domain = ranks / domains;
    let common = [
        domains * tokens.next_multiple_of(16),
        tokens * (domains - 1),
        rows * local,
        4,
        domains * tokens * 4 * if duplicates { top_k } else { domain },
        tokens * ranks * 8 * domain.div_ceil(64),
        u64::from(sm_count) * domain * 8,
        // Between domains it is among the group's buffers.
        if domains == 1 { tokens * experts * 4 } else { 0 },
        tokens * top_k * 8,
        local * 4,
        (local + 1) * 8,
    ];
    let own = if duplicates && domains > 1 {
        [0; 3]
    } else if duplicates {
        [rows / 2 * top_k.min(local) * 4, 4, 0]
    } else {
        [rows * top_k * 4, rows * top_k * 4, tokens * ranks * 4]
    };
    let indices = u64::from(config.max_tokens_per_rank) * top_k * 8;
    HEADER_BYTES as u64 + common.into_iter().chain(own).map(part).sum::<u64>() + indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{LL_REQUEST, REQUEST};
    use crate::config::{GroupRequest, LayerConfig, LlRequest};
    use std::fmt::Write;

    #[test]
    fn worked_example() {
        // Rows out and in: 2 * 4 * 64 * 1024; weights out and in: 2 * 512 * 16 * 4; scales: 512 * 1024.
        let staged = GroupMemory::of(&GroupConfig::try_from(REQUEST).unwrap(), 1);
        assert_eq!(staged.staging, (524_288u64 + 65_536 + 524_288).next_multiple_of(PIECE));
        assert_eq!((staged.routing_map, staged.workspace), (4 * 64 * 2, 32 << 20));
        let large = GroupRequest { max_tokens_per_rank: 4096, max_recv_tokens_per_rank: 131_072, ..REQUEST };
        let zero_copy = GroupConfig::try_from(GroupRequest { zero_copy: 1, ..large }).unwrap();
        let staged = GroupConfig::try_from(large).unwrap();
        let rows = 4 * 4096 * 1024;
        assert_eq!(GroupMemory::of(&staged, 1).staging - GroupMemory::of(&zero_copy, 1).staging, 2 * rows);
    }

    /// The sizes that NCCL EP reports, as the host runtime has them too, with the header and 64 tokens' indices.
    #[test]
    fn handle_memory() {
        let config = GroupConfig::try_from(REQUEST).unwrap();
        assert_eq!(handle_bytes(&config, 2, 132, 1), 24_832 + 256 + 1024);
        let config = GroupConfig::try_from(GroupRequest { zero_copy: 1, ..REQUEST }).unwrap();
        let parts = [256, 2048, 256, 512, 2048, 4352, 4096, 1024, 256, 256, 2048, 256];
        assert_eq!(handle_bytes(&config, 2, 132, 1), parts.iter().sum::<u64>() + 256 + 1024);
    }

    /// The figures that were read from NCCL EP's source before these formulas were written: 8 ranks a domain, 4096 tokens, hidden
    /// 7168, 256 experts, top-k 8, C for any routing.
    #[test]
    fn several_domains() {
        let mebibytes = |bytes: u64| (bytes as f64 / f64::from(1 << 20)).round() as u64;
        for (domains, network, handle) in [(1, 0, 29), (2, 292, 41), (4, 744, 74), (8, 1642, 140)] {
            let request = GroupRequest {
                ep_size: 8 * domains,
                num_experts: 256,
                max_tokens_per_rank: 4096,
                max_recv_tokens_per_rank: 8 * domains * 4096 * 8,
                hidden_dim: 7168,
                ..REQUEST
            };
            let config = GroupConfig::try_from(request).unwrap();
            let [rows, scales, weights, between] = GroupMemory::staging_parts(&config, domains as u32);
            assert_eq!(mebibytes(between), network, "{domains} domains");
            let memory = GroupMemory::of(&config, domains as u32);
            assert_eq!(memory.staging, (rows + scales + weights + between).next_multiple_of(PIECE));
            // The library's own part: the header, and the copy of the indices.
            let own = HEADER_BYTES as u64 + 4096 * 8 * 8;
            assert_eq!(mebibytes(handle_bytes(&config, 8, 132, domains as u32) - own), handle, "{domains} domains");
        }
    }

    /// Ranks, experts; 128 tokens of 7168 bfloat16 elements with 8 experts each.
    const LL_MODELS: [(i32, i32); 4] = [(4, 64), (8, 64), (8, 256), (64, 256)];

    fn ll_row((ranks, experts): (i32, i32)) -> String {
        let request = LlRequest {
            ep_size: ranks,
            num_experts: experts,
            max_tokens_per_rank: 128,
            hidden_dim: 7168,
            ..LL_REQUEST
        };
        let config = LlConfig::try_from(request).unwrap();
        let mib = |bytes: u64| format!("{:.0}", bytes as f64 / f64::from(1 << 20));
        let received = u64::from(config.local_experts()) * (config.slab_rows() * config.max_token_bytes()) as u64;
        format!("| {ranks} | {experts} | {} | {} |", mib(ll_buffer_bytes(&config)), mib(received))
    }

    #[test]
    fn low_latency_buffers() {
        // Rows of 1024 bytes, 32 more to dispatch and 16 more to combine.
        let config = LlConfig::try_from(LL_REQUEST).unwrap();
        assert_eq!(ll_buffer_bytes(&config), 2 * (16 * 64 * 1040 + 8 * 64 * 1040) + 2 * 128);
        // With few experts the rows to dispatch are more.
        let config = LlConfig::try_from(LlRequest { num_experts: 4, num_topk: 1, ..LL_REQUEST }).unwrap();
        assert_eq!(ll_buffer_bytes(&config), 2 * (64 * 1040 + 4 * 64 * 1040) + 2 * 128);
        let document = include_str!("../docs/memory.md");
        let rows: Vec<String> = LL_MODELS.into_iter().map(ll_row).collect();
        assert!(document.contains(&rows.join("\n")), "docs/memory.md should have these rows:\n{}", rows.join("\n"));
    }

    /// Experts, experts per token, hidden size; ranks, tokens of each.
    const MODELS: [(i32, i32, i32, i32, i32); 12] = [
        (64, 6, 2048, 8, 4096),
        (64, 6, 2048, 8, 16384),
        (128, 8, 4096, 8, 4096),
        (128, 8, 4096, 16, 8192),
        (256, 8, 7168, 8, 4096),
        (256, 8, 7168, 16, 8192),
        (256, 8, 7168, 32, 4096),
        (256, 8, 7168, 64, 4096),
        (256, 8, 7168, 64, 16384),
        (512, 10, 2048, 16, 8192),
        (512, 10, 2048, 64, 4096),
        (512, 10, 2048, 64, 16384),
    ];

    fn gib(bytes: u64) -> String {
        format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
    }

    fn row((experts, top_k, hidden, ranks, tokens): (i32, i32, i32, i32, i32)) -> String {
        let request = |zero_copy, rows| GroupRequest {
            ep_size: ranks,
            num_experts: experts,
            hidden_dim: hidden,
            max_tokens_per_rank: tokens,
            max_recv_tokens_per_rank: rows,
            zero_copy,
            ..REQUEST
        };
        let cells = |zero_copy, rows: i32| {
            let config = GroupConfig::try_from(request(zero_copy, rows)).ok()?;
            let layer = LayerConfig::parse("layer_config", top_k, 0).ok()?;
            layer.check_against(&config).ok()?;
            let handle = handle_bytes(&config, top_k as u32, 132, 1) as f64 / (1u64 << 20) as f64;
            Some((gib(GroupMemory::of(&config, 1).total()), format!("{handle:.1}")))
        };
        // Twice what a balanced routing brings a rank, and what any routing can bring it.
        let (twice, any) = (2 * tokens * top_k, ranks * tokens * top_k.min(experts / ranks));
        let mut text = format!("| {experts} | {top_k} | {hidden} | {ranks} | {tokens} |");
        for rows in [twice, any] {
            for zero_copy in [0, 1] {
                let (group, handle) = cells(zero_copy, rows).unwrap_or(("-".into(), "-".into()));
                write!(text, " {group} | {handle} |").unwrap();
            }
        }
        text
    }

    #[test]
    fn the_documents_table() {
        let document = include_str!("../docs/memory.md");
        let rows: Vec<String> = MODELS.into_iter().map(row).collect();
        assert!(document.contains(&rows.join("\n")), "docs/memory.md should have these rows:\n{}", rows.join("\n"));
    }
}
