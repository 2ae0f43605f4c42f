//! Sizes of groups that no machine here could hold: products of many ranks, tokens and wide rows.

use nvte_ep_core::config::{Dialect, GroupConfig, GroupRequest};
use nvte_ep_core::memory::{GroupMemory, handle_bytes};

struct Group {
    ranks: i32,
    experts: i32,
    tokens: i32,
    hidden: i32,
    top_k: i32,
    rows: i32,
}

fn config(group: &Group) -> GroupConfig {
    GroupConfig::try_from(GroupRequest {
        ep_size: group.ranks,
        num_experts: group.experts,
        max_tokens_per_rank: group.tokens,
        max_recv_tokens_per_rank: group.rows,
        hidden_dim: group.hidden,
        max_num_sms: 0,
        max_token_dtype: 6,
        zero_copy: 0,
        allow_handle_mem_reloc: 0,
        num_topk: group.top_k,
        drop_on_overflow: 0,
        dialect: Dialect::TE,
    })
    .unwrap()
}

/// The formula of docs/memory.md without its roundings, with more bits than are needed; `rows` as resolved.
fn staging(group: &Group, rows: u128) -> u128 {
    let wide = |value: i32| u128::from(value.unsigned_abs());
    let row = 2 * wide(group.hidden);
    2 * wide(group.ranks) * wide(group.tokens) * row + 2 * rows * wide(group.experts) * 4 + rows * row
}

fn check(group: &Group, rows: u128) {
    let config = config(group);
    let memory = GroupMemory::of(&config, 1);
    let (found, wanted) = (u128::from(memory.staging), staging(group, rows));
    assert!((wanted..wanted + (4 << 20)).contains(&found), "{found} instead of {wanted}");
    let wide = |value: i32| u128::from(value.unsigned_abs());
    assert!(u128::from(memory.routing_map) >= wide(group.ranks) * wide(group.tokens) * wide(group.experts) / 8);
    // The tables of slots and weights, 4 bytes each, and less than that again for all others together.
    let slots = 2 * 4 * rows * wide(group.top_k);
    let handle = u128::from(handle_bytes(&config, group.top_k.unsigned_abs(), 132, 1));
    let others =
        rows * wide(group.experts / group.ranks) + wide(group.tokens) * (wide(group.experts) * 4 + 16 * 8 * 1024);
    assert!((slots..slots + others).contains(&handle), "{handle} instead of {slots} and up to {others} more");
}

#[test]
fn large_groups_do_not_wrap() {
    for ranks in [128, 256] {
        // Whatever the routing, in rows.
        let rows = ranks * 8192 * (256 / ranks).min(8);
        check(
            &Group { ranks, experts: 256, tokens: 8192, hidden: 7168, top_k: 8, rows },
            u128::from(rows.unsigned_abs()),
        );
    }
    // Sixteen machines of eight, rows as wide as there are tokens: 2^36 bytes a direction.
    let group = Group { ranks: 128, experts: 512, tokens: 16384, hidden: 16384, top_k: 8, rows: 128 * 16384 };
    assert_eq!(staging(&group, 0), 2 << 36);
    check(&group, 1 << 21);
    // As many rows as 32 bits count.
    check(&Group { ranks: 64, experts: 1024, tokens: 65536, hidden: 16384, top_k: 16, rows: i32::MAX }, (1 << 31) - 1);
}

#[test]
fn eager_groups_are_sized_for_the_worst() {
    check(&Group { ranks: 8, experts: 64, tokens: 65536, hidden: 7168, top_k: 8, rows: 0 }, 8 * 65536 * 8);
    check(&Group { ranks: 128, experts: 256, tokens: 65536, hidden: 7168, top_k: 8, rows: 0 }, 128 * 65536 * 8);
}
