//! Zero copy: rows are written into and read from the peers' windows, with the values of the staged path.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;

use common::reference::*;
use common::*;
use nvte_ep_bindings::*;

/// Where tensors begin in their windows.
const OFFSET: usize = 4096 + 32;

/// A rank with a zero-copy group and windows for received rows and for expert outputs.
struct Zero<'a> {
    case: &'a Case,
    rank: &'a Rank,
    group: ncclEpGroup_t,
    rows: WindowMemory,
    outputs: WindowMemory,
    with_data: bool,
}

impl<'a> Zero<'a> {
    fn new(case: &'a Case, rank: &'a Rank) -> Self {
        let group = group_of(case, rank, true);
        let bytes = OFFSET + case.capacity * case.row_bytes();
        let with_data = rank.rank.is_multiple_of(2);
        Self {
            case,
            rank,
            group,
            rows: WindowMemory::new(rank, bytes),
            outputs: WindowMemory::new(rank, bytes),
            with_data,
        }
    }

    fn session(&self) -> Session<'a> {
        Session { case: self.case, rank: self.rank, group: self.group }
    }

    fn end(self) {
        self.rank.sync();
        self.rows.free();
        self.outputs.free();
        self.rank.destroy_group(self.group);
    }

    fn dispatch(&self, handle: &TestHandle, seed: u64, forward: bool) {
        let (case, rank) = (self.case, self.rank);
        let row_bytes = case.row_bytes();
        let stale = vec![0xA5u8; case.capacity * row_bytes];
        self.rows.set(0, &vec![0x5A; OFFSET]);
        self.rows.set(OFFSET, &stale);
        let mut output_desc = self.rows.desc(OFFSET, case.datatype, &[case.capacity, case.hidden], self.with_data);
        let (there, _) = self.session().send(handle, seed, forward, &mut output_desc, None);
        let mut rows = stale;
        let mut weights = vec![if forward { 0.0 } else { STALE_WEIGHT }; case.capacity];
        for (slot, origin) in live(case, rank.rank).into_iter().enumerate() {
            let row = &mut rows[slot * row_bytes..][..row_bytes];
            let Some(origin) = origin else {
                row.fill(0);
                continue;
            };
            let sent = case.rows(seed + origin.rank as u64, case.tokens(origin.rank));
            row.copy_from_slice(&sent[origin.token * row_bytes..][..row_bytes]);
            if forward {
                weights[slot] = last_weight(case, origin.rank, origin.token, origin.expert as i64);
            }
        }
        assert_eq!(self.rows.get(OFFSET, rows.len()), rows, "received rows of rank {}", rank.rank);
        assert_eq!(self.rows.get(0, OFFSET), [0x5A; OFFSET], "before the tensor");
        assert_eq!(there, weights, "received weights of rank {}", rank.rank);
    }

    /// What combine leaves of a rank's expert outputs: the sum of a token's rows in its first one.
    fn outputs_after(&self, rank: usize, seed: u64) -> Vec<u8> {
        let case = self.case;
        let before = expert_rows(case, rank, seed);
        let mut after = before.clone();
        let live = live(case, rank);
        for (first, origin) in live.iter().enumerate() {
            let Some(origin) = origin else { continue };
            let same = |o: &Option<Origin>| o.is_some_and(|o| (o.rank, o.token) == (origin.rank, origin.token));
            let slots: Vec<usize> = (0..live.len()).filter(|slot| same(&live[*slot])).collect();
            if slots[0] != first || slots.len() == 1 {
                continue;
            }
            for column in 0..case.hidden {
                let at = |slot: usize| slot * case.row_bytes() + column * case.width();
                let sum: f32 = slots.iter().map(|s| case.decode(&before[at(*s)..at(*s) + case.width()])).sum();
                after[at(first)..at(first) + case.width()].copy_from_slice(&case.encode(sum));
            }
        }
        after
    }

    fn combine(&self, handle: &TestHandle, seed: u64, forward: bool) {
        let (case, rank) = (self.case, self.rank);
        let tokens = case.tokens(rank.rank);
        self.outputs.set(OFFSET, &expert_rows(case, rank.rank, seed));
        let mut input_desc = self.outputs.desc(OFFSET, case.datatype, &[case.capacity, case.hidden], self.with_data);
        let (sums, by_token) = self.session().sum(handle, forward, &mut input_desc, &[case.capacity]);
        // What the peers still had to read when this was enqueued must not be hit by it.
        let after = self.outputs.get(OFFSET, case.capacity * case.row_bytes());
        self.outputs.set(OFFSET, &vec![0xFF; after.len()]);
        assert_eq!(after, self.outputs_after(rank.rank, seed), "expert outputs of rank {}", rank.rank);

        let maps: Vec<Vec<Option<Origin>>> = (0..case.ranks).map(|r| live(case, r)).collect();
        let all: Vec<Vec<u8>> = (0..case.ranks).map(|r| expert_rows(case, r, seed)).collect();
        let mut combined = Vec::new();
        for token in 0..tokens {
            for column in 0..case.hidden {
                let mut total = 0f32;
                for (map, rows) in maps.iter().zip(&all) {
                    let mine = |o: &Option<Origin>| o.is_some_and(|o| (o.rank, o.token) == (rank.rank, token));
                    let mut slots = (0..map.len()).filter(|slot| mine(&map[*slot])).peekable();
                    if slots.peek().is_some() {
                        let value = |slot: usize| {
                            let at = slot * case.row_bytes() + column * case.width();
                            case.decode(&rows[at..at + case.width()])
                        };
                        total += case.decode(&case.encode(slots.map(value).sum()));
                    }
                }
                combined.extend(case.encode(total));
            }
        }
        assert_eq!(sums, combined, "combined rows of rank {}", rank.rank);
        if !forward {
            assert_eq!(by_token, weight_gradients(case, rank.rank), "weight gradients of rank {}", rank.rank);
        }
    }

    fn step(&self, handle: &TestHandle) {
        self.session().update(handle);
        self.dispatch(handle, 10, true);
        self.combine(handle, 20, true);
        self.combine(handle, 30, false);
        self.dispatch(handle, 40, false);
    }
}

fn check(case: &Case) {
    run_ranks(case.ranks, |rank| {
        let zero = Zero::new(case, rank);
        let handle = TestHandle::new(rank, zero.group, case.top_k, case.alignment);
        zero.step(&handle);
        handle.destroy();
        zero.end();
    });
}

#[test]
fn steps_through_windows() {
    for (top_k, alignment, datatype) in
        [(1, 1, ncclFloat16), (2, 8, ncclBfloat16), (5, 16, ncclFloat16), (8, 128, ncclFloat32), (8, 1, ncclBfloat16)]
    {
        let mut case =
            Case::new(4, 16, top_k, &[9, 3, 16, 1], |rank, token, k| ((rank + token * 7 + k * 3) % 16) as i64);
        case.alignment = alignment;
        case.datatype = datatype;
        case.wide_indices = top_k == 2;
        check(&case);
    }
}

#[test]
fn random_routings() {
    for seed in 0..12u64 {
        let draw = |index: u64, below: usize| (noise(500 + seed, index).abs() * 4096.0) as usize % below;
        let ranks = [1, 2, 3, 4][draw(0, 4)];
        let experts = ranks * [4, 8][draw(12, 2)];
        let top_k = 1 + draw(1, 6);
        let tokens: Vec<usize> = (0..ranks).map(|rank| draw(2 + rank as u64, 12)).collect();
        let mut case = Case::new(ranks, experts, top_k, &tokens, |rank, token, k| {
            draw(1000 + (rank * 100 + token * 10 + k) as u64, experts + 2) as i64 - 2
        });
        case.alignment = [0, 2, 4, 16][draw(9, 4)];
        case.datatype = [ncclBfloat16, ncclFloat16, ncclFloat32][draw(10, 3)];
        check(&case);
    }
}

#[test]
fn dropping_keeps_exactly_the_rows_inside_the_capacity() {
    let mut case = Case::new(2, 4, 2, &[6, 6], |_, token, k| ((token % 2) + 2 * k) as i64);
    // Rank 0 has experts 0 and 1 with 6 tokens each.
    for (capacity, alignment) in [(10, 8), (8, 4), (6, 1), (7, 4)] {
        case.capacity = capacity;
        case.alignment = alignment;
        case.drop = true;
        check(&case);
    }
    // Tokens with two rows on a rank, of which one or both are dropped.
    let mut case = Case::new(2, 4, 3, &[5, 4], |rank, token, k| ((rank + token + k) % 4) as i64);
    case.drop = true;
    for capacity in [5, 6, 9, 11] {
        case.capacity = capacity;
        check(&case);
    }
}

#[test]
fn handle_memory_works_after_a_move() {
    let mut case = Case::new(2, 8, 3, &[5, 8], |rank, token, k| ((rank + 2 * token + 3 * k) % 8) as i64);
    case.alignment = 4;
    run_ranks(2, |rank| {
        let zero = Zero::new(&case, rank);
        let old = TestHandle::new(rank, zero.group, case.top_k, case.alignment);
        zero.session().update(&old);
        let bytes = old.memory.get();
        old.memory.set(&vec![0xEE; bytes.len()]);
        old.destroy();
        let new = TestHandle::over(Buffer::of(&bytes, rank.stream), zero.group, case.top_k, case.alignment);
        zero.combine(&new, 2, false);
        zero.dispatch(&new, 4, true);
        new.destroy();
        zero.end();
    });
}

fn process_case() -> Case {
    let mut case = Case::new(4, 16, 4, &[40, 0, 64, 7], |rank, token, k| ((rank * 3 + token * 5 + k * 3) % 16) as i64);
    case.alignment = 8;
    case.hidden = 64;
    case.capacity = 448;
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
    let zero = Zero::new(&case, &rank);
    let handle = TestHandle::new(&rank, zero.group, case.top_k, case.alignment);
    for _ in 0..3 {
        zero.step(&handle);
    }
    handle.destroy();
    // A rank may free its windows while slower peers are still at work.
    zero.end();
    rank.leave();
}

#[test]
fn a_graph_goes_through_windows() {
    let case = Case::new(2, 8, 3, &[6, 4], |rank, token, k| ((rank + token + k) % 8) as i64);
    run_ranks(2, |rank| {
        let zero = Zero::new(&case, rank);
        let handle = TestHandle::new(rank, zero.group, case.top_k, 1);
        zero.session().update(&handle);
        let tokens = case.tokens(rank.rank);
        let bytes = case.capacity * case.row_bytes();
        let input = Buffer::<u8>::new(tokens * case.row_bytes(), rank.stream);
        let result = Buffer::<u8>::new(tokens * case.row_bytes(), rank.stream);
        let mut input_desc = Desc::of(&input, case.datatype, &[tokens, case.hidden]);
        let mut rows_desc = zero.rows.desc(OFFSET, case.datatype, &[case.capacity, case.hidden], false);
        let mut result_desc = Desc::of(&result, case.datatype, &[tokens, case.hidden]);
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        // SAFETY: what is captured lives until the graph is destroyed.
        ok(unsafe { cudaStreamBeginCapture(rank.stream, 1) });
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input_desc.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows_desc.ptr() });
        let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, i, o, ptr::null(), c, rank.stream) });
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows_desc.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result_desc.ptr() });
        let (i, o) = (&raw const inputs, &raw const outputs);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpCombine(handle.handle, i, o, ptr::null(), rank.stream) });
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaStreamEndCapture(rank.stream, &raw mut graph) });
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 0) });
        for seed in 0..10 {
            input.set(&case.rows(seed + rank.rank as u64, tokens));
            zero.rows.set(OFFSET, &vec![0xA5; bytes]);
            // SAFETY: the memory of the graph is ours.
            ok(unsafe { cudaGraphLaunch(exec, rank.stream) });
            let received: Vec<Vec<u8>> = (0..2)
                .map(|r| {
                    let mut rows = vec![0; bytes];
                    for (slot, origin) in live(&case, r).into_iter().enumerate() {
                        let origin = origin.unwrap();
                        let sent = case.rows(seed + origin.rank as u64, case.tokens(origin.rank));
                        let row = &sent[origin.token * case.row_bytes()..][..case.row_bytes()];
                        rows[slot * case.row_bytes()..][..case.row_bytes()].copy_from_slice(row);
                    }
                    rows
                })
                .collect();
            assert_eq!(result.get(), combined(&case, rank.rank, &received));
        }
        rank.sync();
        // SAFETY: no preconditions.
        ok(unsafe { cudaGraphExecDestroy(exec) });
        // SAFETY: no preconditions.
        ok(unsafe { cudaGraphDestroy(graph) });
        handle.destroy();
        zero.end();
    });
}

#[test]
fn quantised_tokens_and_scales_go_through_windows() {
    let mut case = Case::new(2, 8, 3, &[6, 4], |rank, token, k| ((rank + token + k) % 8) as i64);
    case.alignment = 4;
    run_ranks(2, |rank| {
        let mut config = group_config(8, case.max_tokens, case.capacity, 96);
        config.zero_copy = NCCL_EP_ZERO_COPY_ON;
        let group = rank.create_group(&config).unwrap();
        let handle = TestHandle::new(rank, group, 3, 4);
        Session { case: &case, rank, group }.update(&handle);
        let tokens = case.tokens(rank.rank);
        let (rows, scales) =
            (WindowMemory::new(rank, case.capacity * 64), WindowMemory::new(rank, 256 + case.capacity * 32));
        let sent = |r: usize, width: usize| -> Vec<u8> {
            (0..case.tokens(r) * width).map(|i| (i * 7 + r * 31 + width) as u8 | 1).collect()
        };
        let (token_input, scale_input) =
            (Buffer::of(&sent(rank.rank, 64), rank.stream), Buffer::of(&sent(rank.rank, 32), rank.stream));
        rows.set(0, &vec![0xA5; case.capacity * 64]);
        scales.set(0, &vec![0xA5; 256 + case.capacity * 32]);
        let mut sent_tokens = Desc::of(&token_input, ncclFloat8e4m3, &[tokens, 64]);
        let mut sent_scales = Desc::of(&scale_input, ncclFloat32, &[tokens, 8]);
        let mut got_tokens = rows.desc(0, ncclFloat8e4m3, &[case.capacity, 64], false);
        let mut got_scales = scales.desc(256, ncclFloat32, &[case.capacity, 8], false);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent_tokens.ptr(), scales: sent_scales.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: got_tokens.ptr(), scales: got_scales.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t {
            pass_direction: NCCL_EP_BWD_PASS,
            quant_recipe: NCCL_EP_DISP_QUANT_FWD,
        });
        let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, i, o, ptr::null(), c, rank.stream) });
        let map = expected(&case, rank.rank);
        for (memory, offset, width) in [(&rows, 0, 64), (&scales, 256, 32)] {
            let mut wanted = vec![0xA5; case.capacity * width];
            for (row, origin) in wanted.chunks_mut(width).zip(&map.rows) {
                row.fill(0);
                if let Some(origin) = origin {
                    row.copy_from_slice(&sent(origin.rank, width)[origin.token * width..][..width]);
                }
            }
            assert_eq!(memory.get(offset, wanted.len()), wanted, "width {width} on rank {}", rank.rank);
        }
        rank.sync();
        handle.destroy();
        rows.free();
        scales.free();
        rank.destroy_group(group);
    });
}

#[test]
fn tensors_outside_windows_are_refused() {
    let case = Case::new(1, 4, 1, &[4], |_, token, _| (token % 4) as i64);
    run_ranks(1, |rank| {
        let zero = Zero::new(&case, rank);
        let handle = TestHandle::new(rank, zero.group, 1, 1);
        zero.session().update(&handle);
        let tokens = Buffer::<u8>::new(4 * case.row_bytes(), rank.stream);
        let plain = Buffer::<u8>::new(case.capacity * case.row_bytes(), rank.stream);
        let sizes = [case.capacity, case.hidden];
        let refuse = |rows: &mut Desc, words: &str| {
            let mut tokens_desc = Desc::of(&tokens, case.datatype, &[4, case.hidden]);
            let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: tokens_desc.ptr() });
            let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr() });
            let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
            let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
            // SAFETY: all pointers are ours and valid.
            let code = unsafe { ncclEpDispatch(handle.handle, i, o, ptr::null(), c, rank.stream) };
            assert_eq!(code, ncclInvalidArgument, "{words}");
            assert!(nccl_error().contains(words), "{words:?} is not in {:?}", nccl_error());
            let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
            let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: tokens_desc.ptr() });
            let (i, o) = (&raw const inputs, &raw const outputs);
            // SAFETY: all pointers are ours and valid.
            let code = unsafe { ncclEpCombine(handle.handle, i, o, ptr::null(), rank.stream) };
            assert_eq!(code, ncclInvalidArgument, "{words}");
            assert!(nccl_error().contains(words), "{words:?} is not in {:?}", nccl_error());
        };
        refuse(&mut Desc::of(&plain, case.datatype, &sizes), "must lie in a window");
        refuse(&mut zero.rows.desc(OFFSET + 16, case.datatype, &sizes, false), "of a window of");
        let mut beside = zero.rows.desc(OFFSET, case.datatype, &sizes, true);
        beside.tensor.data = plain.pointer.cast();
        refuse(&mut beside, "but its window offset is");

        // A window of another communicator over the same memory.
        let other = Rank::join(unique_id(), 0, 1, rank_device());
        let mut foreign = ptr::null_mut();
        let base = zero.rows.base.cast();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommWindowRegister(other.comm, base, zero.rows.bytes, &raw mut foreign, 1) });
        let mut rows = zero.rows.desc(OFFSET, case.datatype, &sizes, true);
        rows.tensor.win_hdl = foreign;
        refuse(&mut rows, "is not a window of the group's communicator");
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(other.comm, foreign) });
        other.leave();

        // A window that only this rank knows of.
        let mut local = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommWindowRegister(rank.comm, base, zero.rows.bytes, &raw mut local, 0) });
        rows.tensor.win_hdl = local;
        refuse(&mut rows, "without NCCL_WIN_COLL_SYMMETRIC");
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, local) });
        handle.destroy();
        zero.end();
    });
}

fn rank_device() -> i32 {
    let mut device = -1;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGetDevice(&raw mut device) });
    device
}

#[test]
fn a_rank_that_does_not_register_is_named() {
    let id = unique_id();
    let waiting = spawn_rank("lonely_window", &id, 0, 2, 600);
    let mut absent = spawn_rank("lonely_window", &id, 1, 2, 600);
    let output = waiting.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
    drop(absent.stdin.take());
    assert!(absent.wait_with_output().unwrap().status.success());
}

#[test]
#[ignore = "run by a_rank_that_does_not_register_is_named"]
fn lonely_window() {
    let rank = join_as_process();
    if rank.rank == 1 {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        std::process::exit(0);
    }
    let (mut base, mut window) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclMemAlloc(&raw mut base, 4096) });
    // SAFETY: the result pointer is ours.
    let code = unsafe { ncclCommWindowRegister(rank.comm, base, 4096, &raw mut window, 1) };
    assert_eq!((code, window.is_null()), (ncclSystemError, true));
    let words = "ncclCommWindowRegister, operation 1: rank 1 did not arrive within 600 ms";
    assert!(nccl_error().contains(words), "{}", nccl_error());
}

#[test]
fn offsets_that_differ_are_both_named() {
    run_processes("different_offsets", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by offsets_that_differ_are_both_named"]
fn different_offsets() {
    let case = Case::new(2, 4, 1, &[4, 4], |_, token, _| (token % 4) as i64);
    let rank = join_as_process();
    let zero = Zero::new(&case, &rank);
    let handle = TestHandle::new(&rank, zero.group, 1, 1);
    zero.session().update(&handle);
    let result = Buffer::<u8>::new(4 * case.row_bytes(), rank.stream);
    zero.rows.set(0, &vec![1; zero.rows.bytes]);
    let mut rows = zero.rows.desc(16 + 16 * rank.rank, case.datatype, &[case.capacity, case.hidden], false);
    let mut result_desc = Desc::of(&result, case.datatype, &[4, case.hidden]);
    let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
    let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result_desc.ptr() });
    let (i, o) = (&raw const inputs, &raw const outputs);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpCombine(handle.handle, i, o, ptr::null(), rank.stream) });
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
    let text = sticky_text();
    assert!(text.contains("window 1 + 16)") && text.contains("window 1 + 32)"), "{text}");
    std::mem::forget((handle, result));
}

#[test]
fn overflow_of_one_rank_traps_on_all() {
    run_processes("overflow", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by overflow_of_one_rank_traps_on_all"]
fn overflow() {
    let rank = join_as_process();
    let mut config = group_config(4, 8, 12, 64);
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    let group = rank.create_group(&config).unwrap();
    let handle = TestHandle::new(&rank, group, 1, 1);
    let indices = Buffer::of(&[3i64; 8], rank.stream);
    let mut topk = Desc::of(&indices, ncclInt64, &[8, 1]);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
    let words = "receive buffer overflow on rank 1: 16 rows (16 distinct tokens) are needed";
    assert!(sticky_text().contains(words), "{}", sticky_text());
    std::mem::forget((handle, indices));
}

#[test]
fn more_than_eight_rows_of_a_token_on_a_rank_trap() {
    for (top_k, trap) in [(8, false), (9, true)] {
        let mut case = Case::new(1, 16, top_k, &[4], |_, token, k| ((token + k) % 16) as i64);
        case.capacity = 64;
        // Ends without leaving the device's error to others: every run has devices of its own.
        let id = unique_id();
        let rank = Rank::join(id, 0, 1, take_devices(1));
        let zero = Zero::new(&case, &rank);
        let handle = TestHandle::new(&rank, zero.group, top_k, 1);
        zero.session().update(&handle);
        zero.dispatch(&handle, 1, true);
        if !trap {
            zero.combine(&handle, 2, true);
            continue;
        }
        let result = Buffer::<u8>::new(4 * case.row_bytes(), rank.stream);
        let mut rows = zero.outputs.desc(OFFSET, case.datatype, &[case.capacity, case.hidden], false);
        let mut result_desc = Desc::of(&result, case.datatype, &[4, case.hidden]);
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result_desc.ptr() });
        let (i, o) = (&raw const inputs, &raw const outputs);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpCombine(handle.handle, i, o, ptr::null(), rank.stream) });
        // SAFETY: no preconditions.
        assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
        assert!(sticky_text().contains("a token has 9 rows on a rank, at most 8"), "{}", sticky_text());
        std::mem::forget((handle, result));
    }
}

#[test]
fn local_experts_must_be_a_power_of_two() {
    run_ranks(1, |rank| {
        let mut config = group_config(12, 8, 64, 64);
        config.zero_copy = NCCL_EP_ZERO_COPY_ON;
        let group = rank.create_group(&config).unwrap();
        let mut handle = ptr::null_mut();
        let layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
        // SAFETY: the result pointer is ours.
        let code = unsafe { ncclEpInitHandle(&raw mut handle, group, layout, ptr::null(), 1, ptr::null()) };
        assert!(code == ncclInvalidArgument && nccl_error().contains("not a power of two"), "{}", nccl_error());
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

/// Both ranks with the same switches of NCCL EP.
fn run_forced(entry: &str, variables: &[(&str, &str)]) {
    let id = hex(&unique_id());
    let ranks: Vec<_> = (0..2).map(|rank| spawn_rank_with(entry, &id, rank, 2, 60_000, variables)).collect();
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}\n{err}");
    }
}

#[test]
fn forced_duplicates_give_staged_values_and_need_room() {
    run_forced("forced", &[("NCCL_EP_HT_EM_LOCAL_DUP", "on")]);
    run_forced("excluded", &[("NCCL_EP_HT_EM_LOCAL_DUP", "1"), ("NCCL_EP_HT_EM_NVLINK_DUP", "true")]);
}

#[test]
#[ignore = "run by forced_duplicates_give_staged_values_and_need_room"]
fn forced() {
    let rank = join_as_process();
    let case = Case::new(2, 8, 3, &[6, 4], |rank, token, k| ((rank + token + k) % 8) as i64);
    let group_of = |capacity: usize| {
        let group = rank.create_group(&group_config(8, case.max_tokens, capacity, case.row_bytes())).unwrap();
        let mut handle = ptr::null_mut();
        let layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
        // SAFETY: the result pointer is ours.
        let code = unsafe { ncclEpInitHandle(&raw mut handle, group, layout, ptr::null(), 3, ptr::null()) };
        (group, code)
    };
    // 2 ranks x 6 tokens x top-3.
    let (_, code) = group_of(35);
    assert_eq!(code, ncclInvalidArgument);
    assert!(nccl_error().contains("num_topk = 36, got 35"), "{}", nccl_error());
    let (group, code) = group_of(36);
    nccl_ok(code);
    let case = Case { capacity: 36, ..case };
    let session = Session { case: &case, rank: &rank, group };
    let handle = TestHandle::new(&rank, group, 3, 1);
    session.update(&handle);
    session.dispatch(&handle, 40, false);
    session.combine(&handle, 20, true);
    session.combine(&handle, 30, false);
    rank.sync();
}

#[test]
#[ignore = "run by forced_duplicates_give_staged_values_and_need_room"]
fn excluded() {
    let rank = join_as_process();
    let (code, text) = rank.create_group(&group_config(8, 8, 64, 64)).unwrap_err();
    assert!(code == ncclInvalidUsage && text.contains("exclude each other"), "{code}: {text}");
}

#[test]
fn memory_of_ncclmemalloc_is_freed_and_counted() {
    run_processes("counted_memory", 1, 60_000, &[]);
}

#[test]
#[ignore = "run by memory_of_ncclmemalloc_is_freed_and_counted"]
fn counted_memory() {
    let rank = join_as_process();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    for round in 0..50 {
        let memory = WindowMemory::new(&rank, 1 << 20);
        assert!(memory.get(0, 16).iter().skip(1).step_by(2).all(|byte| *byte == 0xCB), "round {round}");
        memory.free();
    }
    assert_eq!(files(), before);
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(mappings.matches("nvte-ep-window").count(), 0);
}
