//! Low-latency mode against a float64 reference: routings, types, layouts, halves, graphs, and every error.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::collections::HashSet;
use std::ptr;
use std::sync::{Barrier, Mutex};

use common::low_latency::*;
use common::reference::{Case, noise, step, with_group};
use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::channel::PIECE_BYTES;

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
        for global_ids in [false, true] {
            check_ll(&LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, global_ids, ..case.clone() });
        }
    }
}

/// Rows of 30 KiB, so that both operations take several pieces, and the ranks different numbers of them.
#[test]
fn operations_in_several_pieces() {
    let case = LlCase::new(2, 4, 1, &[138, 3], |rank, token, _| ((rank + token) % 4) as i64);
    let case = LlCase { datatype: ncclFloat32, hidden: 7680, ..case };
    assert!(case.tokens(0) * case.hidden * 4 > PIECE_BYTES);
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        LlBuffers::new(rank, &case).step(rank, &case, &handle, 5, Staged::default());
        handle.destroy();
    });
}

/// What a child process runs under a seed.
fn shuffled_steps() {
    for layout in [NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR] {
        let case = LlCase::new(2, 4, 2, &[9, 7], |rank, token, k| ((rank + token + 2 * k) % 4) as i64);
        let case = LlCase { layout, ordered: false, ..case };
        check_ll(&case);
        let orders = Mutex::new(HashSet::new());
        with_ll_group(&case, |rank, group| {
            let handle = ll_handle(rank, group, &case);
            let mut buffers = LlBuffers::new(rank, &case);
            for _ in 0..4 {
                buffers.step(rank, &case, &handle, 5, Staged::default());
                orders.lock().unwrap().insert((rank.rank, buffers.received.get()));
            }
            handle.destroy();
        });
        assert!(orders.into_inner().unwrap().len() > 4, "dispatches differ in the order of rows");
    }
}

#[test]
fn rows_of_an_expert_are_shuffled_on_request() {
    let variables = [("NVTE_EP_HOST_LL_SHUFFLE", "7")];
    let output = spawn_rank_with("shuffled", &hex(&unique_id()), 0, 1, 60_000, &variables).wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

#[test]
#[ignore = "run by rows_of_an_expert_are_shuffled_on_request"]
fn shuffled() {
    shuffled_steps();
}

#[test]
fn a_rank_that_ends_between_the_halves_is_named() {
    run_processes("ends_between_the_halves", 2, 60_000, &[1]);
}

#[test]
#[ignore = "run by a_rank_that_ends_between_the_halves_is_named"]
fn ends_between_the_halves() {
    let rank = join_as_process();
    let case = LlCase::new(2, 4, 2, &[3, 2], spread(4));
    let group = rank.create_group(&case.config()).unwrap();
    let handle = ll_handle(&rank, group, &case);
    let mut buffers = LlBuffers::new(&rank, &case);
    buffers.set(&rank, &case, 1);
    buffers.update(&handle, rank.stream);
    nccl_ok(buffers.dispatch(&case, &handle, rank.stream, true));
    rank.sync();
    if rank.rank == 1 {
        // SAFETY: ends this process, which holds nothing that others need.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    nccl_ok(complete(&handle, rank.stream));
    // SAFETY: no preconditions.
    let code = unsafe { cudaStreamSynchronize(rank.stream) };
    let text = describe(code);
    let words = ["ncclEpDispatch(expert-major, ", "the process of rank 1 (pid ", "has ended"];
    assert!(code == cudaErrorLaunchFailure && words.iter().all(|word| text.contains(word)), "{code}: {text}");
    std::mem::forget((handle, buffers));
}

/// Steps over three handles in turn, of which only one at a time is between its halves.
#[test]
fn staged_and_whole_calls_over_several_handles() {
    let cases: Vec<LlCase> = (0..3)
        .map(|i| {
            let case = LlCase::new(2, 8, 1 + i, &[5, 2], move |rank, token, k| ((rank + token * 3 + k + i) % 8) as i64);
            LlCase { max_tokens: 6, ..case }
        })
        .collect();
    // For the largest top-k.
    with_ll_group(&cases[2], |rank, group| {
        let stream = rank.stream;
        let mut sides: Vec<_> =
            cases.iter().map(|case| (ll_handle(rank, group, case), LlBuffers::new(rank, case))).collect();
        for round in 0..6u64 {
            for (case, (handle, buffers)) in cases.iter().zip(&mut sides) {
                buffers.set(rank, case, round);
                buffers.update(handle, stream);
                let staged = (round + case.top_k as u64).is_multiple_of(2);
                nccl_ok(buffers.dispatch(case, handle, stream, staged));
                if staged {
                    nccl_ok(complete(handle, stream));
                }
            }
            // Combined in another order.
            for index in [1, 2, 0] {
                let (case, (handle, buffers)) = (&cases[index], &mut sides[index]);
                buffers.run_experts(rank, case, round);
                let staged = (round + index as u64).is_multiple_of(2);
                nccl_ok(buffers.combine(case, handle, stream, staged));
                if staged {
                    nccl_ok(complete(handle, stream));
                }
                buffers.check_result(rank, case, round);
            }
        }
        for (handle, _) in sides {
            handle.destroy();
        }
    });
}

/// The first half is done on one rank before another one has called.
#[test]
fn a_first_half_needs_no_peer() {
    let case = LlCase::new(2, 4, 2, &[3, 2], spread(4));
    let turns = Barrier::new(2);
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        buffers.set(rank, &case, 1);
        buffers.update(&handle, rank.stream);
        for combine in [false, true] {
            for turn in 0..2 {
                if turn == rank.rank {
                    let start = if combine { LlBuffers::combine } else { LlBuffers::dispatch };
                    nccl_ok(start(&mut buffers, &case, &handle, rank.stream, true));
                    rank.sync();
                }
                turns.wait();
            }
            if !combine {
                // What was sent is on its way: the tokens may change now.
                buffers.tokens.set(&vec![STALE; buffers.tokens.len]);
            }
            nccl_ok(complete(&handle, rank.stream));
            if !combine {
                buffers.run_experts(rank, &case, 1);
            }
        }
        buffers.check_result(rank, &case, 1);
        handle.destroy();
    });
}

#[test]
fn both_modes_on_one_communicator() {
    let high = Case::new(2, 8, 2, &[6, 3], |rank, token, k| ((rank + token * 3 + k) % 8) as i64);
    let low = LlCase::new(2, 8, 3, &[4, 5], spread(8));
    with_group(&high, |session| {
        let rank = session.rank;
        let group = rank.create_group(&low.config()).unwrap();
        let handle = TestHandle::new(rank, session.group, high.top_k, high.alignment);
        let ll = ll_handle(rank, group, &low);
        let mut buffers = LlBuffers::new(rank, &low);
        for round in 0..3u64 {
            step(session, &handle);
            buffers.step(rank, &low, &ll, round, Staged { dispatch: round == 1, combine: round == 2 });
        }
        // A step of the other mode may come between the halves.
        buffers.set(rank, &low, 9);
        nccl_ok(buffers.dispatch(&low, &ll, rank.stream, true));
        step(session, &handle);
        nccl_ok(complete(&ll, rank.stream));
        buffers.run_experts(rank, &low, 9);
        handle.destroy();
        ll.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

/// Ends a capture and makes what was captured launchable.
fn instantiate(rank: &Rank) -> cudaGraphExec_t {
    let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamEndCapture(rank.stream, &raw mut graph) });
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 0) });
    // SAFETY: the executable lives on.
    ok(unsafe { cudaGraphDestroy(graph) });
    exec
}

fn capture(rank: &Rank) {
    // SAFETY: the rank's own stream.
    ok(unsafe { cudaStreamBeginCapture(rank.stream, 1) });
}

fn launch(exec: cudaGraphExec_t, rank: &Rank) {
    // SAFETY: what was captured is still there.
    ok(unsafe { cudaGraphLaunch(exec, rank.stream) });
}

#[test]
fn replays_follow_the_indices() {
    for staged in [false, true] {
        let of_round = |round: usize| {
            LlCase::new(2, 8, 2, &[5, 3], move |rank, token, k| {
                ((rank + token * (round + 1) + 3 * k + round) % 8) as i64
            })
        };
        let case = of_round(0);
        with_ll_group(&case, |rank, group| {
            let handle = ll_handle(rank, group, &case);
            let mut buffers = LlBuffers::new(rank, &case);
            buffers.update(&handle, rank.stream);
            capture(rank);
            nccl_ok(buffers.dispatch(&case, &handle, rank.stream, staged));
            if staged {
                nccl_ok(complete(&handle, rank.stream));
            }
            let dispatched = instantiate(rank);
            capture(rank);
            nccl_ok(buffers.combine(&case, &handle, rank.stream, staged));
            if staged {
                nccl_ok(complete(&handle, rank.stream));
            }
            let combined = instantiate(rank);
            for round in 0..4 {
                let case = of_round(round);
                buffers.set(rank, &case, round as u64);
                launch(dispatched, rank);
                buffers.run_experts(rank, &case, round as u64);
                launch(combined, rank);
                buffers.check_result(rank, &case, round as u64);
            }
            for exec in [dispatched, combined] {
                // SAFETY: nothing is queued.
                ok(unsafe { cudaGraphExecDestroy(exec) });
            }
            handle.destroy();
        });
    }
}

/// Runs `work` on a rank alone whose device is lost at the end, with what the error says.
fn loses_the_device(case: &LlCase, words: &str, work: impl Fn(&Rank, &TestHandle, &mut LlBuffers)) {
    let rank = Rank::join(unique_id(), 0, 1, take_devices(1));
    let group = rank.create_group(&case.config()).unwrap();
    let handle = ll_handle(&rank, group, case);
    let mut buffers = LlBuffers::new(&rank, case);
    buffers.set(&rank, case, 1);
    buffers.update(&handle, rank.stream);
    work(&rank, &handle, &mut buffers);
    // SAFETY: no preconditions.
    let code = unsafe { cudaStreamSynchronize(rank.stream) };
    let text = describe(code);
    assert!(code != cudaSuccess && text.contains(words), "{code}: {text}");
    // A group whose device is lost may go, whatever is staged.
    // SAFETY: no preconditions.
    assert_ne!(unsafe { ncclEpGroupDestroy(group) }, ncclSuccess);
    // Nothing can be freed on the device.
    std::mem::forget((handle, buffers));
}

#[test]
fn a_replayed_first_half_blocks_what_follows() {
    let case = LlCase::new(1, 4, 1, &[3], spread(4));
    let words =
        "ncclEpDispatch: ncclEpDispatch with send_only has run, and its ncclEpComplete has not: rule staged-operation";
    loses_the_device(&case, words, |rank, handle, buffers| {
        capture(rank);
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, true));
        let first = instantiate(rank);
        capture(rank);
        nccl_ok(complete(handle, rank.stream));
        let second = instantiate(rank);
        // The halves may be in two graphs.
        for _ in 0..2 {
            launch(first, rank);
            launch(second, rank);
        }
        rank.sync();
        launch(first, rank);
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, false));
    });
    let words = "ncclEpDispatch: ncclEpComplete runs, but no first half has run before it: rule staged-operation";
    loses_the_device(&case, words, |rank, handle, buffers| {
        capture(rank);
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, true));
        let _never_launched = instantiate(rank);
        nccl_ok(complete(handle, rank.stream));
    });
}

#[test]
fn bad_indices_end_the_dispatch() {
    let case = LlCase::new(1, 4, 2, &[3], |_, token, k| if (token, k) == (2, 1) { 4 } else { 0 });
    let words =
        "ncclEpDispatch: topk_idx of ncclEpUpdateHandle: [2, 1] is 4, but there are 4 experts: rule expert-index";
    loses_the_device(&case, words, |rank, handle, buffers| {
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, false));
    });
}

#[test]
fn indices_that_change_before_combine_are_a_report() {
    let case = LlCase::new(1, 4, 1, &[3], |_, token, _| token as i64);
    for changed in [[0i64, 2, 2], [0, -1, 2]] {
        let words = "num_topk=1): topk_idx of token 1 is not what the dispatch before it read (expert";
        loses_the_device(&case, words, |rank, handle, buffers| {
            nccl_ok(buffers.dispatch(&case, handle, rank.stream, false));
            buffers.run_experts(rank, &case, 1);
            buffers.topk.set(&changed.map(i64::to_ne_bytes).concat());
            nccl_ok(buffers.combine(&case, handle, rank.stream, false));
        });
    }
}

#[test]
fn rows_behind_the_counts_are_unwritten() {
    let case = LlCase::new(1, 4, 1, &[3], |_, token, _| token as i64);
    let words = "ncclEpDispatch: inputs.tokens: row 1 is read, but nobody has written it: rule unwritten-memory";
    loses_the_device(&case, words, |rank, handle, buffers| {
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, false));
        // Each expert has one row: the second is behind its count.
        buffers.tokens_desc.tensor.data = buffers.received.pointer.cast();
        nccl_ok(buffers.dispatch(&case, handle, rank.stream, false));
    });
}

/// Rows and scales of any type arrive byte for byte, beside each other.
#[test]
fn quantised_rows_are_moved_as_bytes() {
    let case = LlCase::new(2, 8, 2, &[5, 3], spread(8));
    with_ll_group(&case, |rank, group| {
        let (stream, n) = (rank.stream, case.tokens(rank.rank));
        let (slabs, rows) = case.slabs();
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        buffers.set(rank, &case, 2);
        buffers.update(&handle, stream);
        let bytes = |of_rank: usize, token: usize, width: usize, salt: usize| -> Vec<u8> {
            (0..width).map(|i| (of_rank * 101 + token * 37 + i * 7 + salt) as u8).collect()
        };
        let all = |width: usize, salt: usize| {
            (0..n).flat_map(|token| bytes(rank.rank, token, width, salt)).collect::<Vec<u8>>()
        };
        let (tokens, scales) = (Buffer::of(&all(224, 0), stream), Buffer::of(&all(32, 9), stream));
        let mut sent = Desc::of(&tokens, ncclFloat8e5m2, &[n, 224]);
        let mut sent_scales = Desc::of(&scales, ncclUint8, &[n, 32]);
        let received_scales = Buffer::of(&vec![STALE; slabs * rows * 32], stream);
        let mut received = Desc::of(&buffers.received, ncclFloat8e5m2, &[slabs, rows, 224]);
        let mut there = Desc::of(&received_scales, ncclUint8, &[slabs, rows, 32]);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent.ptr(), scales: sent_scales.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: received.ptr(), scales: there.ptr() });
        let info = ep_struct!(ncclEpLayoutInfo_t { expert_counters: buffers.counts_desc.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { quant_recipe: NCCL_EP_DISP_QUANT_FWD });
        let (i, o, l, c) = (&raw const inputs, &raw const outputs, &raw const info, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, i, o, l, c, stream) });
        rank.sync();
        let (rows_found, scales_found) = (buffers.received.get(), received_scales.get());
        for (slab, count) in buffers.counts.get().into_iter().enumerate() {
            let expected = arriving(&case, rank.rank, slab);
            assert_eq!(count as usize, expected.len());
            for (row, (of_rank, token)) in expected.into_iter().enumerate() {
                let at = slab * rows + row;
                assert_eq!(rows_found[at * 224..][..224], bytes(of_rank, token, 224, 0));
                assert_eq!(scales_found[at * 32..][..32], bytes(of_rank, token, 32, 9));
            }
        }
        handle.destroy();
    });
}
