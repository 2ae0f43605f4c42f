//! What NCCL EP's own test programs do, and pass with on GPUs, with the host runtime's default settings: the sources of those
//! programs are in no package, so these are of our own.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;
use std::time::Duration;

use common::reference::*;
use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::settings::POLICY_VARIABLE;
use nvte_ep_host::surface::cuda_memory::{cudaFree, cudaMalloc, cudaMemcpy};

const RANKS: usize = 4;

fn case() -> Case {
    let mut case = Case::new(RANKS, 8, 2, &[5, 8, 1, 0], |rank, token, k| ((rank + token * 3 + k * 5) % 8) as i64);
    case.alignment = 4;
    case
}

/// Ends as those programs do: no rank waits for another one, and the device is reset.
fn end(rank: Rank) {
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclCommDestroy(rank.comm) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaDeviceReset() });
    // The device is as new.
    let (mut memory, value, mut back) = (ptr::null_mut(), 7u32, 0u32);
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMalloc(&raw mut memory, 4) });
    // SAFETY: both have four bytes.
    ok(unsafe { cudaMemcpy(memory, (&raw const value).cast(), 4, cudaMemcpyHostToDevice) });
    // SAFETY: as above.
    ok(unsafe { cudaMemcpy((&raw mut back).cast(), memory, 4, cudaMemcpyDeviceToHost) });
    // SAFETY: nobody uses the memory any more.
    ok(unsafe { cudaFree(memory) });
    assert_eq!((back, sticky_text()), (value, String::new()));
    assert!(std::env::var_os(POLICY_VARIABLE).is_none(), "these are the default settings");
}

#[test]
fn a_group_is_destroyed_after_a_stream_synchronize() {
    run_processes("steps_without_barriers", RANKS, 60_000, &[]);
}

#[test]
#[ignore = "run by a_group_is_destroyed_after_a_stream_synchronize"]
fn steps_without_barriers() {
    let rank = join_as_process();
    let case = case();
    for round in 0..10 {
        let config = group_config(case.experts, case.max_tokens, case.capacity, case.row_bytes());
        let group = rank.create_group(&config).unwrap();
        let session = Session { case: &case, rank: &rank, group };
        let handle = TestHandle::new(&rank, group, case.top_k, case.alignment);
        step(&session, &handle);
        // Another rank each time is the last one in its operations.
        if round % RANKS == rank.rank {
            std::thread::sleep(Duration::from_millis(30));
        }
        session.update(&handle);
        rank.sync();
        handle.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    }
    end(rank);
}

#[test]
fn eager_rows_need_not_be_written_to_learn_the_layout() {
    let errors = run_processes("layout_of_eager_rows", RANKS, 60_000, &[]);
    // Rank 3 has no tokens, and what the others may be told is a warning.
    assert!(errors[..3].iter().all(|error| error.contains("rule unwritten-memory")), "{errors:?}");
    assert!(!errors[3].contains("rule unwritten-memory"), "{errors:?}");
}

#[test]
#[ignore = "run by eager_rows_need_not_be_written_to_learn_the_layout"]
fn layout_of_eager_rows() {
    let rank = join_as_process();
    let mut case = case();
    case.eager = true;
    let mut config = group_config(case.experts, case.max_tokens, 0, case.row_bytes());
    config.num_topk = case.top_k as u32;
    let group = rank.create_group(&config).unwrap();
    {
        let handle = TestHandle::new(&rank, group, case.top_k, case.alignment);
        let exact = Case { capacity: expected(&case, rank.rank).rows.len(), ..case.clone() };
        let session = Session { case: &exact, rank: &rank, group };
        session.update(&handle);
        // As cudaMalloc left them.
        let tokens = case.tokens(rank.rank);
        let input = Buffer::<u8>::new(tokens * case.row_bytes(), rank.stream);
        let rows = Buffer::<u8>::new(exact.capacity * case.row_bytes(), rank.stream);
        let some = |buffer: &Buffer<u8>| if buffer.len == 0 { ptr::null_mut() } else { buffer.pointer.cast() };
        let mut input_desc = Desc::new(some(&input), case.datatype, &[tokens, case.hidden]);
        let mut rows_desc = Desc::new(some(&rows), case.datatype, &[exact.capacity, case.hidden]);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input_desc.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows_desc.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, i, o, ptr::null(), c, rank.stream) });
        rank.sync();
        handle.destroy();
    }
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    end(rank);
}
