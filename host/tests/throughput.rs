//! A step of a realistic size, to keep the host runtime usable in CI.

mod common;

use std::ptr;
use std::time::{Duration, Instant};

use common::*;
use nvte_ep_bindings::*;

const RANKS: usize = 4;
const TOKENS: usize = 4096;
const HIDDEN: usize = 1024;
const TOP_K: usize = 8;
const EXPERTS: usize = 32;

#[test]
#[ignore = "timed: run with --release"]
fn a_step_takes_seconds_at_most() {
    let capacity = RANKS * TOKENS * TOP_K / 2;
    let width = 2;
    run_ranks(RANKS, |rank| {
        let group = rank.create_group(&group_config(EXPERTS, TOKENS, capacity, HIDDEN * width)).unwrap();
        let handle = TestHandle::new(rank, group, TOP_K, 128);
        let indices: Vec<i64> =
            (0..TOKENS * TOP_K).map(|i| ((i / TOP_K * 5 + i % TOP_K * 7 + rank.rank) % EXPERTS) as i64).collect();
        let indices = Buffer::of(&indices, rank.stream);
        let weights = Buffer::of(&vec![1f32; TOKENS * TOP_K], rank.stream);
        let tokens = Buffer::of(&vec![0x3f80u16; TOKENS * HIDDEN], rank.stream);
        let received = Buffer::<u16>::new(capacity * HIDDEN, rank.stream);
        let received_weights = Buffer::<f32>::new(capacity, rank.stream);
        let result = Buffer::<u16>::new(TOKENS * HIDDEN, rank.stream);
        let mut topk = Desc::of(&indices, ncclInt64, &[TOKENS, TOP_K]);
        let mut tokens = Desc::of(&tokens, ncclBfloat16, &[TOKENS, HIDDEN]);
        let mut weights = Desc::of(&weights, ncclFloat32, &[TOKENS, TOP_K]);
        let mut rows = Desc::of(&received, ncclBfloat16, &[capacity, HIDDEN]);
        let mut row_weights = Desc::of(&received_weights, ncclFloat32, &[capacity]);
        let mut output = Desc::of(&result, ncclBfloat16, &[TOKENS, HIDDEN]);
        rank.sync();
        for round in 0..3 {
            let start = Instant::now();
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
            rank.sync();
            let updated = start.elapsed();
            let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: tokens.ptr(), topk_weights: weights.ptr() });
            let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr(), topk_weights: row_weights.ptr() });
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe {
                ncclEpDispatch(
                    handle.handle,
                    &raw const inputs,
                    &raw const outputs,
                    ptr::null(),
                    ptr::null(),
                    rank.stream,
                )
            });
            rank.sync();
            let dispatched = start.elapsed();
            let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
            let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: output.ptr() });
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe {
                ncclEpCombine(handle.handle, &raw const inputs, &raw const outputs, ptr::null(), rank.stream)
            });
            rank.sync();
            let all = start.elapsed();
            if rank.rank == 0 {
                println!(
                    "round {round}: update {updated:?}, dispatch {:?}, combine {:?}",
                    dispatched - updated,
                    all - dispatched
                );
            }
            assert!(all < Duration::from_secs(10), "{all:?}");
        }
        // Every token came back as the sum of its eight copies.
        assert_eq!(result.get(), vec![half::bf16::from_f32(8.0).to_bits(); TOKENS * HIDDEN]);
        handle.destroy();
        rank.destroy_group(group);
    });
}
