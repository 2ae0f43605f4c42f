//! Low-latency mode against a float64 reference: routings, types, layouts, halves, graphs, and every error.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use common::low_latency::*;
use common::reference::noise;
use nvte_ep_bindings::*;

fn spread(experts: usize) -> impl Fn(usize, usize, usize) -> i64 {
    move |rank, token, k| ((rank * 5 + token * 7 + k * 3) % experts) as i64
}

#[test]
fn ranks_and_uneven_tokens() {
    for (ranks, tokens) in [(1, &[5][..]), (2, &[7, 3]), (4, &[4, 0, 9, 1])] {
        check_ll(&LlCase::new(ranks, 8, 2, tokens, spread(8)));
    }
}

#[test]
fn no_tokens_anywhere() {
    check_ll(&LlCase::new(2, 4, 2, &[0, 0], spread(4)));
}

#[test]
fn everything_for_one_expert() {
    check_ll(&LlCase::new(4, 8, 1, &[3, 8, 8, 2], |_, _, _| 5));
}

#[test]
fn masked_entries_have_no_row() {
    check_ll(&LlCase::new(2, 4, 3, &[6, 5], |rank, token, k| {
        [[-1, -1, -1], [2, -1, 0], [-5, 3, -1]][(rank + token) % 3][k]
    }));
}

#[test]
fn top_k_1_8_and_22_of_64_experts() {
    for top_k in [1, 8, 22] {
        check_ll(&LlCase::new(2, 64, top_k, &[5, 4], spread(64)));
    }
}

#[test]
fn experts_256() {
    check_ll(&LlCase::new(4, 256, 8, &[2, 3, 1, 2], |rank, token, k| {
        ((rank * 31 + token * 101 + k * 37) % 256) as i64
    }));
}

#[test]
fn types_and_index_widths() {
    for (datatype, wide_indices) in [(ncclFloat32, false), (ncclFloat16, true), (ncclBfloat16, false)] {
        let case = LlCase::new(2, 8, 4, &[6, 2], spread(8));
        check_ll(&LlCase { datatype, wide_indices, hidden: 512, ..case });
    }
}

#[test]
fn random_routings() {
    for seed in 0..8u64 {
        let draw = |index: u64, below: usize| (noise(700 + seed, index).abs() * 4096.0) as usize % below;
        let ranks = [1, 2, 4][draw(0, 3)];
        let tokens: Vec<usize> = (0..ranks).map(|rank| draw(2 + rank as u64, 9)).collect();
        check_ll(&LlCase::new(ranks, 8, 1 + draw(1, 3), &tokens, |rank, token, k| {
            // Negative ones included; no expert twice in a row.
            ((draw(1000 + (rank * 100 + token) as u64, 8) + k * 3) % 10) as i64 - 2
        }));
    }
}

#[test]
fn quantised_on_the_way() {
    for round_scales in [false, true] {
        let case = LlCase::new(2, 8, 2, &[5, 3], spread(8));
        check_ll(&LlCase { recipe: NCCL_EP_DISP_QUANT_DS_FP8E3M4, round_scales, hidden: 512, ..case });
    }
}

#[test]
fn rank_major_rows() {
    for (ranks, tokens) in [(1, &[5][..]), (4, &[4, 0, 9, 1])] {
        let case = LlCase::new(ranks, 8, 3, tokens, |rank, token, k| ((rank + token * 3 + k) % 9) as i64 - 1);
        check_ll(&LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, ..case });
    }
}
