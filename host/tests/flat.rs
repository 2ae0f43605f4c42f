//! The flat layout: values of update, dispatch and combine against a list of the tokens that each rank receives.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;

use common::reference::*;
use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::channel::PIECE_BYTES;

/// What a rank receives: (source rank, source token), those beyond the capacity included.
fn arriving(case: &Case, rank: usize) -> Vec<(usize, usize)> {
    survivors(&Case { capacity: usize::MAX, ..case.clone() }, rank)
}

/// The distinct local experts of a token on a rank, ascending.
fn experts_on(case: &Case, rank: usize, (source, token): (usize, usize)) -> Vec<i64> {
    let mine = rank * case.local()..(rank + 1) * case.local();
    let row = &case.topk[source][token * case.top_k..][..case.top_k];
    let mut experts: Vec<i64> = row.iter().copied().filter(|e| *e >= 0 && mine.contains(&(*e as usize))).collect();
    experts.sort_unstable();
    experts.dedup();
    experts
}

struct Flat<'a> {
    session: &'a Session<'a>,
    handle: TestHandle,
    /// Where received rows and combine's input lie with zero copy.
    window: Option<WindowMemory>,
    global_ids: bool,
}

impl Flat<'_> {
    fn update(&self) {
        let (case, rank) = (self.session.case, self.session.rank);
        let tokens = case.tokens(rank.rank);
        let indices = Buffer::of(&case.topk[rank.rank], rank.stream);
        let data = if tokens == 0 { ptr::null_mut() } else { indices.pointer.cast() };
        let mut topk = Desc::new(data, ncclInt64, &[tokens, case.top_k]);
        let counters = Buffer::of(&vec![-1i32; case.local()], rank.stream);
        let total = Buffer::of(&[-1i32], rank.stream);
        let offsets = Buffer::of(&vec![-7i32; case.local()], rank.stream);
        let mut counters_desc = Desc::of(&counters, ncclInt32, &[case.local()]);
        let mut offsets_desc = Desc::of(&offsets, ncclInt32, &[case.local()]);
        let mut total_desc = Desc::of(&total, ncclInt32, &[1]);
        let info = ep_struct!(ncclEpLayoutInfo_t {
            expert_counters: counters_desc.ptr(),
            expert_offsets: offsets_desc.ptr(),
            recv_total_counter: total_desc.ptr(),
        });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(self.handle.handle, topk.ptr(), &raw const info, rank.stream) });
        let kept = survivors(case, rank.rank);
        let first = rank.rank * case.local();
        let expected: Vec<i32> = (first..first + case.local())
            .map(|e| kept.iter().filter(|t| experts_on(case, rank.rank, **t).contains(&(e as i64))).count() as i32)
            .collect();
        assert_eq!(counters.get(), expected);
        assert_eq!(total.get(), [arriving(case, rank.rank).len() as i32]);
        assert_eq!(offsets.get(), vec![-7; case.local()], "offsets are expert-major's");
    }

    fn rows_desc(&self, buffer: &Buffer<u8>) -> Desc {
        let shape = [self.session.case.capacity, self.session.case.hidden];
        match &self.window {
            Some(window) => window.desc(0, self.session.case.datatype, &shape, false),
            None => Desc::of(buffer, self.session.case.datatype, &shape),
        }
    }

    fn get_rows(&self, buffer: &Buffer<u8>) -> Vec<u8> {
        match &self.window {
            Some(window) => window.get(0, self.session.case.capacity * self.session.case.row_bytes()),
            None => buffer.get(),
        }
    }

    fn set_rows(&self, rows: &[u8]) -> Buffer<u8> {
        if let Some(window) = &self.window {
            window.set(0, rows);
        }
        Buffer::of(rows, self.session.rank.stream)
    }

    fn dispatch(&self, seed: u64, forward: bool) {
        let (case, rank) = (self.session.case, self.session.rank);
        let (top_k, capacity) = (case.top_k, case.capacity);
        let stale = vec![0xA5u8; capacity * case.row_bytes()];
        let output = self.set_rows(&stale);
        let kind = if self.global_ids { NCCL_EP_EXPERT_ID_GLOBAL } else { NCCL_EP_EXPERT_ID_AUTO };
        let (there, experts) = self.session.send(&self.handle, seed, forward, &mut self.rows_desc(&output), Some(kind));
        let (mut rows, mut weights, mut ids) =
            (stale, vec![STALE_WEIGHT; capacity * top_k], vec![STALE_EXPERT; capacity * top_k]);
        let sources: Vec<Vec<u8>> = (0..case.ranks).map(|r| case.rows(seed + r as u64, case.tokens(r))).collect();
        let base = if self.global_ids { 0 } else { (rank.rank * case.local()) as i64 };
        for (row, (source, token)) in survivors(case, rank.rank).into_iter().enumerate() {
            rows[row * case.row_bytes()..][..case.row_bytes()]
                .copy_from_slice(&sources[source][token * case.row_bytes()..][..case.row_bytes()]);
            if !forward {
                continue;
            }
            weights[row * top_k..][..top_k].fill(0.0);
            ids[row * top_k..][..top_k].fill(-1);
            for (k, expert) in experts_on(case, rank.rank, (source, token)).into_iter().enumerate() {
                weights[row * top_k + k] = last_weight(case, source, token, expert);
                ids[row * top_k + k] = expert - base;
            }
        }
        assert_eq!(self.get_rows(&output), rows, "received rows of rank {}", rank.rank);
        assert_eq!(there, weights, "received weights of rank {}", rank.rank);
        assert_eq!(experts, ids, "received experts of rank {}", rank.rank);
    }

    fn combine(&self, seed: u64, forward: bool) {
        let (case, rank) = (self.session.case, self.session.rank);
        let (tokens, top_k, capacity) = (case.tokens(rank.rank), case.top_k, case.capacity);
        let filled = |r: usize| case.rows(seed + r as u64, capacity);
        let input = self.set_rows(&filled(rank.rank));
        let (output, by_token) =
            self.session.sum(&self.handle, forward, &mut self.rows_desc(&input), &[capacity, top_k]);
        // A token's row on each rank that kept it.
        let kept: Vec<_> = (0..case.ranks).map(|r| survivors(case, r)).collect();
        let rows_of = |token: usize| -> Vec<Option<usize>> {
            kept.iter().map(|kept| kept.iter().position(|there| *there == (rank.rank, token))).collect()
        };
        let sources: Vec<Vec<u8>> = (0..case.ranks).map(filled).collect();
        let mut sums = Vec::new();
        let mut gradients = Vec::new();
        for token in 0..tokens {
            let rows = rows_of(token);
            for column in 0..case.hidden {
                let mut sum = 0f32;
                for (source, row) in sources.iter().zip(&rows) {
                    let Some(row) = row else { continue };
                    let at = row * case.row_bytes() + column * case.width();
                    sum += case.decode(&source[at..at + case.width()]);
                }
                sums.extend(case.encode(sum));
            }
            for expert in &case.topk[rank.rank][token * top_k..][..top_k] {
                let owner = usize::try_from(*expert).ok().map(|expert| expert / case.local());
                let place = owner.and_then(|owner| Some((owner, rows[owner]?)));
                gradients.push(place.map_or(0.0, |(owner, row)| {
                    let experts = experts_on(case, owner, (rank.rank, token));
                    gradient(owner, row * top_k + experts.iter().position(|e| e == expert).unwrap())
                }));
            }
        }
        assert_eq!(output, sums, "combined rows of rank {}", rank.rank);
        if !forward {
            assert_eq!(by_token, gradients, "weight gradients of rank {}", rank.rank);
        }
    }
}

fn check_flat(case: &Case, zero_copy: bool, global_ids: bool) {
    steps_of(case, 2, zero_copy, global_ids);
}

fn steps_of(case: &Case, steps: usize, zero_copy: bool, global_ids: bool) {
    run_ranks(case.ranks, |rank| {
        let group = group_of(case, rank, zero_copy);
        // In eager mode the receive buffers have just the rows that come.
        let capacity = if case.eager { arriving(case, rank.rank).len().max(1) } else { case.capacity };
        let case = Case { capacity, ..case.clone() };
        let handle = TestHandle::flat(rank, group, case.top_k);
        let window = zero_copy.then(|| WindowMemory::new(rank, case.capacity * case.row_bytes()));
        let session = Session { case: &case, rank, group };
        let flat = Flat { session: &session, handle, window, global_ids };
        for _ in 0..steps {
            flat.update();
            flat.dispatch(10, true);
            flat.combine(30, false);
            flat.combine(20, true);
            flat.dispatch(40, false);
        }
        flat.handle.destroy();
        rank.destroy_group(group);
        flat.window.into_iter().for_each(WindowMemory::free);
    });
}

/// Distinct, duplicate and negative experts.
fn mixed(ranks: usize, experts: usize, top_k: usize, tokens: &[usize]) -> Case {
    let mut case = Case::new(ranks, experts, top_k, tokens, |rank, token, k| {
        ((rank * 7 + token * 5 + k * k * 3 + k) % (experts + 1)) as i64 - 1
    });
    case.capacity = ranks * case.max_tokens;
    case
}

#[test]
fn steps_of_each_type() {
    for datatype in [ncclBfloat16, ncclFloat16, ncclFloat32] {
        let case = Case { datatype, hidden: 24, ..mixed(2, 8, 3, &[13, 7]) };
        check_flat(&case, false, datatype == ncclFloat32);
    }
    check_flat(&mixed(4, 16, 2, &[9, 3, 0, 16]), false, true);
    check_flat(&mixed(1, 4, 4, &[11]), false, false);
    check_flat(&mixed(2, 4, 2, &[0, 0]), false, false);
}

#[test]
fn more_experts_a_token_than_expert_major_takes() {
    check_flat(&Case::new(2, 80, 40, &[4, 6], |_, token, k| ((token + 2 * k) % 80) as i64), false, false);
}

#[test]
fn zero_copy_into_windows() {
    check_flat(&mixed(3, 12, 3, &[6, 5, 8]), true, false);
}

#[test]
fn dropping_beyond_the_capacity() {
    let mut case =
        Case::new(
            2,
            4,
            2,
            &[9, 9],
            |rank, token, k| {
                if (rank + token) % 5 == 4 && k == 1 { -1 } else { (token % 2 + 2 * k) as i64 }
            },
        );
    case.drop = true;
    case.capacity = 9;
    assert!((0..2).any(|rank| arriving(&case, rank).len() > case.capacity));
    check_flat(&case, false, false);
}

#[test]
fn eager_buffers_have_the_size_that_comes() {
    let mut case = mixed(2, 8, 2, &[5, 8]);
    case.eager = true;
    assert!((0..2).all(|rank| !arriving(&case, rank).is_empty()));
    check_flat(&case, false, false);
}

#[test]
fn in_several_pieces() {
    let mut case = mixed(2, 4, 2, &[150, 3]);
    case.datatype = ncclFloat32;
    case.hidden = 8192;
    case.capacity = 153;
    assert!(case.tokens(0) * case.row_bytes() > PIECE_BYTES);
    steps_of(&case, 1, false, false);
}

#[test]
fn misuse_is_refused_at_the_call() {
    run_ranks(1, |rank| {
        let group = rank.create_group(&group_config(4, 8, 16, 64)).unwrap();
        let handle = TestHandle::flat(rank, group, 2);
        let indices = Buffer::of(&[0i64; 16], rank.stream);
        let counters = Buffer::of(&[0i64; 4], rank.stream);
        let mut topk = Desc::of(&indices, ncclInt64, &[8, 2]);
        let mut wide = Desc::of(&counters, ncclInt64, &[4]);
        let info = ep_struct!(ncclEpLayoutInfo_t { expert_counters: wide.ptr() });
        // SAFETY: all pointers are ours and valid.
        let code = unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), &raw const info, rank.stream) };
        assert_eq!(code, ncclInvalidArgument);
        let text = nccl_error();
        let words =
            "ncclEpUpdateHandle: layout_info.expert_counters must be int32 with the flat layout, got int64 [4]: rule";
        assert!(text.contains(words), "{text}");
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });

        let tokens = Buffer::of(&[1u16; 8 * 32], rank.stream);
        let rows = Buffer::<u16>::new(16 * 32, rank.stream);
        let weights = Buffer::of(&[0f32; 16], rank.stream);
        let there = Buffer::<f32>::new(32, rank.stream);
        let experts = Buffer::<i64>::new(32, rank.stream);
        let mut tokens = Desc::of(&tokens, ncclBfloat16, &[8, 32]);
        let mut rows = Desc::of(&rows, ncclBfloat16, &[16, 32]);
        let mut weights = Desc::of(&weights, ncclFloat32, &[8, 2]);
        let mut good_weights = Desc::of(&there, ncclFloat32, &[16, 2]);
        let mut vector = Desc::of(&there, ncclFloat32, &[16]);
        let mut good_experts = Desc::of(&experts, ncclInt64, &[16, 2]);
        let mut narrow = Desc::of(&experts, ncclInt32, &[16, 2]);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: tokens.ptr(), topk_weights: weights.ptr() });
        let send = |weights: *mut ncclEpTensor_t, experts: *mut ncclEpTensor_t, kind: u32| {
            let outputs =
                ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr(), topk_weights: weights, topk_idx: experts });
            let info = ep_struct!(ncclEpLayoutInfo_t { recv_topk_idx_kind: kind });
            let (handle, stream) = (handle.handle, rank.stream);
            // SAFETY: all pointers are ours and valid.
            let code = unsafe {
                ncclEpDispatch(handle, &raw const inputs, &raw const outputs, &raw const info, ptr::null(), stream)
            };
            (code, if code == 0 { String::new() } else { nccl_error() })
        };
        let mut send = send;
        for (weights, experts, kind, words) in [
            (good_weights.ptr(), ptr::null_mut(), 0, "outputs.topk_idx is missing"),
            (ptr::null_mut(), good_experts.ptr(), 0, "outputs.topk_weights is missing"),
            (vector.ptr(), good_experts.ptr(), 0, "outputs.topk_weights must be 2D, got float32 [16]"),
            (good_weights.ptr(), narrow.ptr(), 0, "outputs.topk_idx must be int64 of at least"),
            (good_weights.ptr(), good_experts.ptr(), 3, "recv_topk_idx_kind 3 is unknown"),
        ] {
            let (code, text) = send(weights, experts, kind);
            assert!(code == ncclInvalidArgument && text.contains(words), "{code}: {text}");
        }
        assert_eq!(send(good_weights.ptr(), good_experts.ptr(), NCCL_EP_EXPERT_ID_LOCAL).0, 0);
        rank.sync();
        handle.destroy();
        rank.destroy_group(group);
    });
}
