//! Values of update, dispatch and combine against a reference that lists every row in the plainest way.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;

use common::reference::*;
use common::*;
use half::bf16;
use nvte_ep_bindings::*;
use nvte_ep_host::channel::PIECE_BYTES;

#[test]
fn top_k_and_alignment() {
    for top_k in [1, 2, 8] {
        for alignment in [0, 1, 2, 8, 16, 128] {
            let mut case = Case::new(4, 16, top_k, &[9, 3, 16, 1], |rank, token, k| {
                // Distinct experts in a row, uneven between ranks.
                ((rank + token * 7 + k * 3) % 16) as i64
            });
            case.alignment = alignment;
            check(&case);
        }
    }
}

#[test]
fn token_types_and_index_types() {
    for datatype in [ncclBfloat16, ncclFloat16, ncclFloat32] {
        for wide_indices in [false, true] {
            let mut case = Case::new(2, 8, 4, &[13, 7], |rank, token, k| ((rank + token + k * 3) % 8) as i64);
            case.datatype = datatype;
            case.wide_indices = wide_indices;
            case.hidden = 136;
            check(&case);
        }
    }
}

#[test]
fn random_routings() {
    for seed in 0..24u64 {
        let draw = |index: u64, below: usize| (noise(900 + seed, index).abs() * 4096.0) as usize % below;
        let ranks = [1, 2, 3, 4][draw(0, 4)];
        let experts = ranks * 4;
        let top_k = 1 + draw(1, 5);
        let tokens: Vec<usize> = (0..ranks).map(|rank| draw(2 + rank as u64, 12)).collect();
        let mut case = Case::new(ranks, experts, top_k, &tokens, |rank, token, k| {
            // Duplicates and negative indices included.
            draw(1000 + (rank * 100 + token * 10 + k) as u64, experts + 2) as i64 - 2
        });
        case.alignment = [0, 2, 4, 16][draw(9, 4)];
        case.datatype = [ncclBfloat16, ncclFloat16, ncclFloat32][draw(10, 3)];
        case.wide_indices = draw(11, 2) == 0;
        check(&case);
    }
}

#[test]
fn zero_tokens_on_some_ranks_and_on_all() {
    check(&Case::new(4, 8, 2, &[0, 5, 0, 2], spread(8)));
    check(&Case::new(2, 4, 2, &[0, 0], spread(4)));
}

#[test]
fn experts_without_tokens_between_others() {
    let mut case = Case::new(2, 16, 1, &[6, 6], |rank, token, _| [0, 3, 7, 9, 14, 3][(rank + token) % 6]);
    case.alignment = 8;
    check(&case);
}

#[test]
fn negative_indices_and_duplicates() {
    let mut case = Case::new(2, 4, 4, &[6, 6], |rank, token, k| {
        [[-1, -1, -1, -1], [2, 2, 2, 2], [0, -5, 0, 3], [3, 1, 3, 1], [-1, 0, 1, -1], [1, 2, 3, 0]][(rank + token) % 6]
            [k]
    });
    case.alignment = 2;
    check(&case);
}

#[test]
fn one_rank_alone() {
    check(&Case::new(1, 4, 2, &[11], |_, token, k| ((token + k) % 4) as i64));
}

#[test]
fn many_ranks() {
    let mut case = Case::new(8, 8, 3, &[3, 1, 4, 1, 5, 0, 2, 6], |rank, token, k| ((rank + token + 3 * k) % 8) as i64);
    case.alignment = 4;
    check(&case);
}

/// Rows of 32 KiB, so that every operation takes several pieces, and the ranks different numbers of them.
#[test]
fn operations_in_several_pieces() {
    let mut case = Case::new(2, 4, 2, &[150, 3], |rank, token, k| ((rank + token % 2 + 2 * k) % 4) as i64);
    case.datatype = ncclFloat32;
    case.hidden = 8192;
    case.capacity = 160;
    assert!(case.tokens(0) * case.row_bytes() > PIECE_BYTES);
    with_group(&case, |session| {
        let handle = TestHandle::new(session.rank, session.group, case.top_k, case.alignment);
        session.update(&handle);
        session.dispatch(&handle, 10, true);
        session.combine(&handle, 20, false);
        handle.destroy();
    });
}

#[test]
fn dropping_beyond_the_capacity() {
    let mut case = Case::new(2, 4, 2, &[6, 6], |_, token, k| ((token % 2) + 2 * k) as i64);
    // Rank 0 has experts 0 and 1 with 6 tokens each, padded to 8 each: 16 rows and 12 distinct tokens.
    for (capacity, alignment) in [(10, 8), (8, 4), (6, 1)] {
        case.capacity = capacity;
        case.alignment = alignment;
        case.drop = true;
        with_group(&case, |session| {
            let handle = TestHandle::new(session.rank, session.group, case.top_k, case.alignment);
            session.update(&handle);
            session.dispatch(&handle, 10, true);
            session.dispatch(&handle, 40, false);
            handle.destroy();
        });
    }
}

#[test]
fn a_handle_is_updated_again_and_again() {
    let cases: Vec<Case> = [[4usize, 2], [0, 7], [7, 7], [1, 0]]
        .iter()
        .map(|tokens| {
            let mut case = Case::new(2, 4, 2, tokens, |rank, token, k| ((rank + token * 3 + k) % 4) as i64);
            case.max_tokens = 7;
            case.capacity = 64;
            case
        })
        .collect();
    with_group(&cases[0], |session| {
        let handle = TestHandle::new(session.rank, session.group, 2, 4);
        for case in &cases {
            let case = Case { alignment: 4, ..case.clone() };
            step(&Session { case: &case, ..*session }, &handle);
        }
        handle.destroy();
    });
}

#[test]
fn two_handles_of_a_group_interleave() {
    let first = Case::new(2, 4, 2, &[4, 4], |rank, token, k| ((rank + token + k) % 4) as i64);
    let mut second = Case::new(2, 4, 1, &[3, 4], |rank, token, _| ((3 * rank + token) % 4) as i64);
    second.alignment = 16;
    second.capacity = first.capacity;
    with_group(&first, |session| {
        let other = Session { case: &second, ..*session };
        let a = TestHandle::new(session.rank, session.group, 2, 1);
        let b = TestHandle::new(session.rank, session.group, 1, 16);
        session.update(&a);
        other.update(&b);
        session.dispatch(&a, 1, true);
        other.dispatch(&b, 2, true);
        other.combine(&b, 3, true);
        session.combine(&a, 4, true);
        session.combine(&a, 5, false);
        other.combine(&b, 6, false);
        other.dispatch(&b, 7, false);
        session.dispatch(&a, 8, false);
        a.destroy();
        b.destroy();
    });
}

#[test]
fn handle_memory_works_after_a_move() {
    let mut case = Case::new(2, 8, 3, &[5, 8], |rank, token, k| ((rank + 2 * token + 3 * k) % 8) as i64);
    case.alignment = 4;
    with_group(&case, |session| {
        let old = TestHandle::new(session.rank, session.group, case.top_k, case.alignment);
        session.update(&old);
        let bytes = old.memory.get();
        old.memory.set(&vec![0xEE; bytes.len()]);
        old.destroy();
        for first_is_dispatch in [true, false] {
            let moved = Buffer::of(&bytes, session.rank.stream);
            let new = TestHandle::over(moved, session.group, case.top_k, case.alignment);
            if first_is_dispatch {
                session.dispatch(&new, 1, true);
            }
            session.combine(&new, 2, true);
            session.combine(&new, 3, false);
            session.dispatch(&new, 4, false);
            new.destroy();
        }
    });
}

/// Sums in which rounding once differs from rounding at both levels.
#[test]
fn combine_rounds_at_both_levels() {
    // Both experts of rank 0 and one of rank 1 contribute: 256 + 1 rounds to 256 in bf16, so 256 + 1 + 1 is 256 by
    // two levels and 258 by one.
    let case = Case { hidden: 8, ..Case::new(2, 4, 3, &[1, 0], |_, _, k| k as i64) };
    with_group(&case, |session| {
        let rank = session.rank;
        let handle = TestHandle::new(rank, session.group, 3, 1);
        session.update(&handle);
        let values: &[f32] = if rank.rank == 0 { &[256.0, 1.0] } else { &[1.0] };
        let mut rows = vec![0u8; case.capacity * case.row_bytes()];
        for (row, value) in rows.chunks_mut(case.row_bytes()).zip(values) {
            row.copy_from_slice(&case.encode(*value).repeat(case.hidden));
        }
        let input = Buffer::of(&rows, rank.stream);
        let tokens = case.tokens(rank.rank);
        let output = Buffer::<u8>::new(tokens * case.row_bytes(), rank.stream);
        let mut input_desc = Desc::of(&input, case.datatype, &[case.capacity, case.hidden]);
        let mut output_desc = Desc::of(&output, case.datatype, &[tokens, case.hidden]);
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: input_desc.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: output_desc.ptr() });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe {
            ncclEpCombine(handle.handle, &raw const inputs, &raw const outputs, ptr::null(), rank.stream)
        });
        assert_eq!(bf16::from_f32(258.0).to_f32(), 258.0, "258 is a bf16, so one rounding would give it");
        assert_eq!(output.get(), case.encode(256.0).repeat(tokens * case.hidden));
        handle.destroy();
    });
}

#[test]
fn windows_stand_for_data_pointers() {
    let case = Case::new(2, 4, 1, &[4, 4], |rank, token, _| ((rank + token) % 4) as i64);
    with_group(&case, |session| {
        let rank = session.rank;
        let bytes = case.capacity * case.row_bytes();
        let mut memory = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclMemAlloc(&raw mut memory, bytes + 4096) });
        let mut window = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe {
            ncclCommWindowRegister(rank.comm, memory, bytes + 4096, &raw mut window, NCCL_WIN_COLL_SYMMETRIC as i32)
        });
        let handle = TestHandle::new(rank, session.group, 1, 1);
        session.update(&handle);
        let input = Buffer::of(&case.rows(rank.rank as u64, 4), rank.stream);
        let mut input_desc = Desc::of(&input, case.datatype, &[4, case.hidden]);
        let mut output_desc = Desc::new(ptr::null_mut(), case.datatype, &[case.capacity, case.hidden]);
        output_desc.tensor.win_hdl = window;
        output_desc.tensor.win_offset = 256;
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input_desc.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: output_desc.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        let send = || {
            // SAFETY: all pointers are ours and valid.
            unsafe {
                ncclEpDispatch(
                    handle.handle,
                    &raw const inputs,
                    &raw const outputs,
                    ptr::null(),
                    &raw const config,
                    rank.stream,
                )
            }
        };
        nccl_ok(send());
        rank.sync();
        let map = expected(&case, rank.rank);
        // SAFETY: the window's memory is ours and the operation has ended.
        let received = unsafe { std::slice::from_raw_parts(memory.cast::<u8>().wrapping_add(256), bytes) };
        for (slot, origin) in map.rows.iter().enumerate() {
            let origin = origin.unwrap();
            let source = case.rows(origin.rank as u64, 4);
            let row = &source[origin.token * case.row_bytes()..][..case.row_bytes()];
            assert_eq!(&received[slot * case.row_bytes()..][..case.row_bytes()], row);
        }
        output_desc.tensor.win_offset = 8192;
        assert_eq!(send(), ncclInvalidArgument);
        assert!(nccl_error().contains("of a window of"), "{}", nccl_error());
        handle.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, window) });
        // SAFETY: nobody uses the memory any more.
        nccl_ok(unsafe { ncclMemFree(memory) });
    });
}

#[test]
fn configurations_that_differ_name_the_odd_rank() {
    run_ranks(3, |rank| {
        let mut config = group_config(6, 8, 64, 64);
        config.num_topk = if rank.rank == 2 { 3 } else { 2 };
        let (code, text) = rank.create_group(&config).unwrap_err();
        assert_eq!(code, ncclInvalidArgument);
        assert!(text.contains("num_topk differs between ranks: rank 2 has 3, the others have 2"), "{text}");
        // The communicator survives.
        config.num_topk = 2;
        let group = rank.create_group(&config).unwrap();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

#[test]
fn misuse_is_refused_at_the_call() {
    run_ranks(1, |rank| {
        let refuse = |expected: u32, config: ncclEpGroupConfig_t, words: &str| {
            let (code, text) = rank.create_group(&config).unwrap_err();
            assert!(code == expected && text.contains(words), "{code}: {text}");
        };
        let good = group_config(4, 8, 64, 64);
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { algorithm: 2, ..good }, "algorithm 2 is unknown");
        let eager = ncclEpGroupConfig_t { max_recv_tokens_per_rank: 0, ..good };
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { overflow_policy: 2, ..eager }, "eager");
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { zero_copy: 3, ..good }, "zero_copy 3 is unknown");
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { max_token_bytes: 24, ..good }, "multiple of 16");
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { size: 95, ..good }, "at least 96");
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { magic: 1, ..good }, "magic");
        refuse(ncclInvalidArgument, ncclEpGroupConfig_t { num_topk: 5, ..good }, "num_topk 5");

        let group = rank.create_group(&good).unwrap();
        let mut size = 0usize;
        // SAFETY: the result pointer is ours.
        let code = unsafe { ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_RANK_MAJOR, ptr::null(), &raw mut size, 1) };
        assert_eq!(code, ncclInvalidArgument);
        let text = nccl_error();
        assert!(text.contains("high-throughput mode has no rank-major layout"), "{text}");
        let handle = TestHandle::new(rank, group, 2, 1);
        let indices = Buffer::of(&[0i64; 6], rank.stream);
        let mut topk = Desc::of(&indices, ncclInt64, &[2, 3]);
        // SAFETY: all pointers are ours and valid.
        let code = unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) };
        assert!(code == ncclInvalidArgument && nccl_error().contains("num_topk = 2"), "{}", nccl_error());
        topk = Desc::of(&indices, ncclInt64, &[4, 2]);
        // SAFETY: all pointers are ours and valid.
        let code = unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) };
        assert!(code == ncclInvalidArgument && nccl_error().contains("the allocation ends"), "{}", nccl_error());
        // SAFETY: no preconditions.
        assert_eq!(unsafe { ncclEpGetAsyncError(group, ptr::null_mut()) }, ncclInvalidUsage);
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpComplete(handle.handle, ptr::null(), rank.stream) });
        handle.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

#[test]
fn eager_mode_takes_a_buffer_of_the_received_size() {
    let mut case = Case::new(2, 4, 2, &[5, 3], |rank, token, k| ((rank + token * 3 + k) % 4) as i64);
    case.alignment = 8;
    case.eager = true;
    with_group(&case, |session| {
        let handle = TestHandle::new(session.rank, session.group, case.top_k, case.alignment);
        let exact = Case { capacity: expected(&case, session.rank.rank).rows.len(), ..case.clone() };
        session.update(&handle);
        // Both ranks receive as many rows, so that a row too few is refused on both before anyone waits.
        let short = Case { capacity: exact.capacity - 1, ..case.clone() };
        let rows = Buffer::<u8>::new(short.capacity * short.row_bytes(), session.rank.stream);
        let tokens = case.tokens(session.rank.rank);
        let input = Buffer::<u8>::new(tokens * case.row_bytes(), session.rank.stream);
        let mut rows_desc = Desc::of(&rows, case.datatype, &[short.capacity, case.hidden]);
        let mut input_desc = Desc::of(&input, case.datatype, &[tokens, case.hidden]);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input_desc.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows_desc.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        // SAFETY: all pointers are ours and valid.
        let code = unsafe {
            ncclEpDispatch(
                handle.handle,
                &raw const inputs,
                &raw const outputs,
                ptr::null(),
                &raw const config,
                session.rank.stream,
            )
        };
        assert_eq!(code, ncclInvalidArgument);
        let session = Session { case: &exact, ..*session };
        session.dispatch(&handle, 10, true);
        session.dispatch(&handle, 40, false);
        handle.destroy();
    });
    let mut full = case.clone();
    full.capacity = expected(&case, 0).rows.len().max(expected(&case, 1).rows.len());
    check(&full);
    let mut empty = Case::new(2, 4, 1, &[3, 0], |_, _, _| 1);
    empty.eager = true;
    with_group(&empty, |session| {
        let handle = TestHandle::new(session.rank, session.group, 1, 1);
        let exact = Case { capacity: expected(&empty, session.rank.rank).rows.len(), ..empty.clone() };
        let session = Session { case: &exact, ..*session };
        session.update(&handle);
        session.dispatch(&handle, 1, true);
        handle.destroy();
    });
}

fn process_case() -> Case {
    let mut case = Case::new(4, 16, 2, &[40, 0, 64, 7], |rank, token, k| ((rank * 3 + token * 5 + k * 7) % 16) as i64);
    case.alignment = 8;
    case.hidden = 512;
    case.capacity = 256;
    case
}

#[test]
fn ranks_as_processes() {
    run_processes("process_rank", 4, 60_000, &[]);
}

#[test]
#[ignore = "run by ranks_as_processes"]
fn process_rank() {
    let case = process_case();
    let rank = join_as_process();
    let config = group_config(case.experts, case.max_tokens, case.capacity, case.row_bytes());
    let group = rank.create_group(&config).unwrap();
    let session = Session { case: &case, rank: &rank, group };
    let handle = TestHandle::new(&rank, group, case.top_k, case.alignment);
    step(&session, &handle);
    // A rank may leave at once: slower peers still read what it offered.
    handle.destroy();
    rank.destroy_group(group);
    rank.leave();
}
