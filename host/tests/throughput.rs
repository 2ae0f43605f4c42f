//! Time, memory and number of ranks that keep the host runtime usable in CI.

mod common;

use std::ptr;
use std::time::{Duration, Instant};

use common::reference::{Case, Session, step};
use common::*;
use nvte_ep_bindings::*;

const RANKS: usize = 8;
const TOKENS: usize = 4096;
const HIDDEN: usize = 1024;
const TOP_K: usize = 8;
const EXPERTS: usize = 64;

/// Processor time that this process has taken, which other load on the machine does not change much.
fn processor_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: fills the structure that it is given.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) }, 0);
    // SAFETY: filled above.
    let usage = unsafe { usage.assume_init() };
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// All five operations of a layer, forward and backward.
#[test]
#[ignore = "timed: run with --release"]
fn a_step_takes_two_seconds_of_two_cores_at_most() {
    let capacity = TOKENS * TOP_K;
    let together = std::sync::Barrier::new(RANKS);
    run_ranks(RANKS, |rank| {
        let group = rank.create_group(&group_config(EXPERTS, TOKENS, capacity, HIDDEN * 2)).unwrap();
        let handle = TestHandle::new(rank, group, TOP_K, 128);
        let (ep, stream) = (handle.handle, rank.stream);
        let indices: Vec<i64> =
            (0..TOKENS * TOP_K).map(|i| ((i / TOP_K * 5 + i % TOP_K * 7 + rank.rank) % EXPERTS) as i64).collect();
        let indices = Buffer::of(&indices, stream);
        let weights = Buffer::of(&vec![1f32; TOKENS * TOP_K], stream);
        let tokens = Buffer::of(&vec![0x3f80u16; TOKENS * HIDDEN], stream);
        let received = Buffer::<u16>::new(capacity * HIDDEN, stream);
        let received_weights = Buffer::<f32>::new(capacity, stream);
        let result = Buffer::<u16>::new(TOKENS * HIDDEN, stream);
        let gradients = Buffer::<f32>::new(TOKENS * TOP_K, stream);
        let mut topk = Desc::of(&indices, ncclInt64, &[TOKENS, TOP_K]);
        let mut tokens = Desc::of(&tokens, ncclBfloat16, &[TOKENS, HIDDEN]);
        let mut weights = Desc::of(&weights, ncclFloat32, &[TOKENS, TOP_K]);
        let mut rows = Desc::of(&received, ncclBfloat16, &[capacity, HIDDEN]);
        let mut row_weights = Desc::of(&received_weights, ncclFloat32, &[capacity]);
        let mut output = Desc::of(&result, ncclBfloat16, &[TOKENS, HIDDEN]);
        let mut by_token = Desc::of(&gradients, ncclFloat32, &[TOKENS, TOP_K]);
        let mut dispatch = |forward: bool| {
            let optional = |pointer| if forward { pointer } else { ptr::null_mut() };
            let sent =
                ep_struct!(ncclEpDispatchInputs_t { tokens: tokens.ptr(), topk_weights: optional(weights.ptr()) });
            let there =
                ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr(), topk_weights: optional(row_weights.ptr()) });
            let pass = if forward { NCCL_EP_FWD_PASS } else { NCCL_EP_BWD_PASS };
            let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: pass });
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe {
                ncclEpDispatch(ep, &raw const sent, &raw const there, ptr::null(), &raw const config, stream)
            });
        };
        let mut rows = Desc::of(&received, ncclBfloat16, &[capacity, HIDDEN]);
        let mut row_weights = Desc::of(&received_weights, ncclFloat32, &[capacity]);
        let mut combine = |forward: bool| {
            let optional = |pointer| if forward { ptr::null_mut() } else { pointer };
            let there =
                ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr(), topk_weights: optional(row_weights.ptr()) });
            let back =
                ep_struct!(ncclEpCombineOutputs_t { tokens: output.ptr(), topk_weights: optional(by_token.ptr()) });
            let pass = if forward { NCCL_EP_FWD_PASS } else { NCCL_EP_BWD_PASS };
            let config = ep_struct!(ncclEpCombineConfig_t { pass_direction: pass });
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe { ncclEpCombine(ep, &raw const there, &raw const back, &raw const config, stream) });
        };
        rank.sync();
        for round in 0..3 {
            together.wait();
            let (start, before) = (Instant::now(), processor_time());
            together.wait();
            // SAFETY: all pointers are ours and valid.
            nccl_ok(unsafe { ncclEpUpdateHandle(ep, topk.ptr(), ptr::null(), stream) });
            dispatch(true);
            combine(true);
            dispatch(false);
            combine(false);
            rank.sync();
            together.wait();
            let taken = processor_time() - before;
            together.wait();
            if rank.rank == 0 {
                println!("round {round}: {:?}, processor time {taken:?}", start.elapsed());
            }
            assert!(taken < Duration::from_secs(4), "{taken:?}");
        }
        // Every token came back as the sum of its eight copies, and every weight as it was.
        assert_eq!(result.get(), vec![half::bf16::from_f32(8.0).to_bits(); TOKENS * HIDDEN]);
        assert_eq!(gradients.get(), vec![1f32; TOKENS * TOP_K]);
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
