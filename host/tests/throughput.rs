//! Time, memory and number of ranks that keep the host runtime usable in CI.

mod common;

use std::ptr;
use std::time::{Duration, Instant};

use common::reference::{Case, Session, step};
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

/// Bytes of memory that count as this process's; of shared pages its share.
fn own_memory() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn a_rank_takes_little_more_memory_than_its_buffers() {
    run_processes("memory_of_a_rank", 4, 60_000, &[]);
}

#[test]
#[ignore = "run by a_rank_takes_little_more_memory_than_its_buffers"]
fn memory_of_a_rank() {
    // Every token of every rank goes to rank 0.
    let (tokens, row) = (2048, 4096);
    let rank = join_as_process();
    let group = rank.create_group(&group_config(4, tokens, 4 * tokens, row)).unwrap();
    let before = own_memory();
    let handle = TestHandle::new(&rank, group, 1, 1);
    let indices = Buffer::of(&vec![0i64; tokens], rank.stream);
    let sent = Buffer::of(&vec![rank.rank as u8 + 1; tokens * row], rank.stream);
    let received = Buffer::<u8>::new(4 * tokens * row, rank.stream);
    let result = Buffer::<u8>::new(tokens * row, rank.stream);
    let mut topk = Desc::of(&indices, ncclInt64, &[tokens, 1]);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    let mut sent_desc = Desc::of(&sent, ncclBfloat16, &[tokens, row / 2]);
    let mut received_desc = Desc::of(&received, ncclBfloat16, &[4 * tokens, row / 2]);
    let mut result_desc = Desc::of(&result, ncclBfloat16, &[tokens, row / 2]);
    let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent_desc.ptr() });
    let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: received_desc.ptr() });
    let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
    let (ep, stream) = (handle.handle, rank.stream);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe {
        ncclEpDispatch(ep, &raw const inputs, &raw const outputs, ptr::null(), &raw const config, stream)
    });
    let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: received_desc.ptr() });
    let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result_desc.ptr() });
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpCombine(ep, &raw const inputs, &raw const outputs, ptr::null(), stream) });
    rank.sync();
    let taken = own_memory() - before;
    // Each token came back from one rank as it was sent.
    let mut returned = vec![0u8; tokens * row];
    // SAFETY: both ranges have that many bytes.
    ok(unsafe {
        cudaMemcpy(returned.as_mut_ptr().cast(), result.pointer.cast(), tokens * row, cudaMemcpyDeviceToHost)
    });
    assert!(returned.iter().all(|byte| *byte == rank.rank as u8 + 1));
    let buffers = (1 + 4 + 1) * tokens * row + handle.memory.len + 8 * tokens;
    println!("rank {}: {taken} bytes for buffers of {buffers}", rank.rank);
    assert!(taken < 2 * buffers, "{taken} bytes for buffers of {buffers}");
    handle.destroy();
    rank.destroy_group(group);
    drop((indices, sent, received, result));
    rank.leave();
}

#[test]
fn sixty_four_ranks() {
    run_processes("one_of_sixty_four", 64, 60_000, &[]);
}

#[test]
#[ignore = "run by sixty_four_ranks"]
fn one_of_sixty_four() {
    let tokens: Vec<usize> = (0..64).map(|rank| rank % 4).collect();
    let mut case = Case::new(64, 128, 3, &tokens, |rank, token, k| ((rank * 7 + token * 31 + k * 50) % 128) as i64);
    case.alignment = 4;
    case.capacity = 64;
    let rank = join_as_process();
    let config = group_config(case.experts, case.max_tokens, case.capacity, case.row_bytes());
    let group = rank.create_group(&config).unwrap();
    let handle = TestHandle::new(&rank, group, case.top_k, case.alignment);
    step(&Session { case: &case, rank: &rank, group }, &handle);
    handle.destroy();
    rank.destroy_group(group);
    rank.leave();
}
