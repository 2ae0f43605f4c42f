//! A reference that lists every row in the plainest way, and steps compared against it.

use std::ptr;

use half::{bf16, f16};
use nvte_ep_bindings::*;

use super::*;

#[derive(Clone)]
pub struct Case {
    pub ranks: usize,
    pub experts: usize,
    pub top_k: usize,
    pub alignment: usize,
    pub datatype: ncclDataType_t,
    pub wide_indices: bool,
    pub hidden: usize,
    pub max_tokens: usize,
    pub capacity: usize,
    pub drop: bool,
    pub eager: bool,
    /// Indices by rank, `top_k` to a row.
    pub topk: Vec<Vec<i64>>,
}

impl Case {
    pub fn new(
        ranks: usize,
        experts: usize,
        top_k: usize,
        tokens: &[usize],
        pick: impl Fn(usize, usize, usize) -> i64,
    ) -> Self {
        let max_tokens = tokens.iter().copied().max().unwrap_or(0).max(4);
        let topk = (0..ranks)
            .map(|rank| (0..tokens[rank] * top_k).map(|i| pick(rank, i / top_k, i % top_k)).collect())
            .collect();
        Self {
            ranks,
            experts,
            top_k,
            alignment: 1,
            datatype: ncclBfloat16,
            wide_indices: true,
            hidden: 16,
            max_tokens,
            capacity: ranks * max_tokens * top_k + 128 * experts / ranks,
            drop: false,
            eager: false,
            topk,
        }
    }

    pub fn tokens(&self, rank: usize) -> usize {
        self.topk[rank].len() / self.top_k
    }

    pub fn local(&self) -> usize {
        self.experts / self.ranks
    }

    pub fn width(&self) -> usize {
        if self.datatype == ncclFloat32 { 4 } else { 2 }
    }

    pub fn row_bytes(&self) -> usize {
        self.hidden * self.width()
    }

    pub fn encode(&self, value: f32) -> Vec<u8> {
        match self.datatype {
            ncclFloat32 => value.to_ne_bytes().to_vec(),
            ncclFloat16 => f16::from_f32(value).to_ne_bytes().to_vec(),
            _ => bf16::from_f32(value).to_ne_bytes().to_vec(),
        }
    }

    pub fn decode(&self, bytes: &[u8]) -> f32 {
        match self.datatype {
            ncclFloat32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
            ncclFloat16 => f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
            _ => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
        }
    }

    /// `rows` rows whose bits depend on `seed`, the row and the column.
    pub fn rows(&self, seed: u64, rows: usize) -> Vec<u8> {
        (0..rows * self.hidden).flat_map(|i| self.encode(noise(seed, i as u64))).collect()
    }
}

/// Values of mixed sign and magnitude.
pub fn noise(seed: u64, index: u64) -> f32 {
    let mut x = (seed << 32 | index).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    ((x & 0xffff) as f32 / 65536.0 - 0.5) * [0.25f32, 1.0, 8.0, 100.0][(x >> 20) as usize % 4]
}

/// A row of a receive buffer: where it came from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Origin {
    pub rank: usize,
    pub token: usize,
    pub expert: usize,
}

/// The receive buffer of a rank: `None` for padding.
pub struct Expected {
    pub rows: Vec<Option<Origin>>,
    pub padded: Vec<i64>,
    pub bases: Vec<i64>,
}

pub fn expected(case: &Case, rank: usize) -> Expected {
    let (mut rows, mut padded, mut bases) = (Vec::new(), Vec::new(), Vec::new());
    for expert in rank * case.local()..(rank + 1) * case.local() {
        let start = rows.len();
        bases.push(start as i64);
        for source in 0..case.ranks {
            for token in 0..case.tokens(source) {
                if case.topk[source][token * case.top_k..][..case.top_k].contains(&(expert as i64)) {
                    rows.push(Some(Origin { rank: source, token, expert }));
                }
            }
        }
        while case.alignment > 1 && (rows.len() - start) % case.alignment != 0 {
            rows.push(None);
        }
        padded.push((rows.len() - start) as i64);
    }
    Expected { rows, padded, bases }
}

pub fn weight(rank: usize, position: usize) -> f32 {
    noise(77 + rank as u64, position as u64)
}

/// Combine as the specification words it: FP32 over a rank's experts, rounded, then FP32 over ranks, rounded.
pub fn combined(case: &Case, rank: usize, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut output = Vec::new();
    let maps: Vec<Expected> = (0..case.ranks).map(|r| expected(case, r)).collect();
    for token in 0..case.tokens(rank) {
        let slots: Vec<Vec<usize>> = maps
            .iter()
            .map(|map| {
                (0..map.rows.len())
                    .filter(|slot| map.rows[*slot].is_some_and(|o| o.rank == rank && o.token == token))
                    .collect()
            })
            .collect();
        for column in 0..case.hidden {
            let mut total = 0f32;
            for (destination, slots) in slots.iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
                let mut partial = 0f32;
                for slot in slots {
                    let at = slot * case.row_bytes() + column * case.width();
                    partial += case.decode(&inputs[destination][at..at + case.width()]);
                }
                total += case.decode(&case.encode(partial));
            }
            output.extend(case.encode(total));
        }
    }
    output
}

/// What received weights and experts are before a dispatch.
pub const STALE_WEIGHT: f32 = -7.0;
pub const STALE_EXPERT: i64 = -99;

/// A rank of a group, for one case: calls that are compared with the reference.
pub struct Session<'a> {
    pub case: &'a Case,
    pub rank: &'a Rank,
    pub group: ncclEpGroup_t,
}

impl Session<'_> {
    pub fn update(&self, handle: &TestHandle) {
        let (case, rank) = (self.case, self.rank);
        let tokens = case.tokens(rank.rank);
        let (datatype, bytes): (_, Vec<u8>) = if case.wide_indices {
            (ncclInt64, case.topk[rank.rank].iter().flat_map(|e| e.to_ne_bytes()).collect())
        } else {
            (ncclInt32, case.topk[rank.rank].iter().flat_map(|e| (*e as i32).to_ne_bytes()).collect())
        };
        let indices = Buffer::of(&bytes, rank.stream);
        let data = if tokens == 0 { ptr::null_mut() } else { indices.pointer.cast() };
        let mut topk = Desc::new(data, datatype, &[tokens, case.top_k]);
        let counters = Buffer::<u8>::new(case.local() * 8, rank.stream);
        let offsets = Buffer::<u8>::new(case.local() * 8, rank.stream);
        let total = Buffer::<u8>::new(8, rank.stream);
        let mut counters_desc = Desc::of(&counters, datatype, &[case.local()]);
        let mut offsets_desc = Desc::of(&offsets, datatype, &[case.local()]);
        let mut total_desc = Desc::of(&total, datatype, &[1]);
        let info = ep_struct!(ncclEpLayoutInfo_t {
            expert_counters: counters_desc.ptr(),
            expert_offsets: offsets_desc.ptr(),
            recv_total_counter: total_desc.ptr(),
        });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), &raw const info, rank.stream) });
        let read = |buffer: &Buffer<u8>, count: usize| -> Vec<i64> {
            let bytes = buffer.get();
            if case.wide_indices {
                bytes.chunks(8).take(count).map(|b| i64::from_ne_bytes(b.try_into().unwrap())).collect()
            } else {
                bytes.chunks(4).take(count).map(|b| i64::from(i32::from_ne_bytes(b.try_into().unwrap()))).collect()
            }
        };
        let map = expected(case, rank.rank);
        let capacity = case.capacity as i64;
        let bases: Vec<i64> = map.bases.iter().map(|b| (*b).min(capacity)).collect();
        let padded: Vec<i64> =
            map.bases.iter().zip(&map.padded).map(|(b, p)| (b + p).min(capacity) - (*b).min(capacity)).collect();
        assert_eq!(read(&counters, case.local()), padded);
        assert_eq!(read(&offsets, case.local()), bases);
        assert_eq!(read(&total, 1), [map.rows.len() as i64]);
    }

    /// Dispatches rows of `seed` into `rows`; gives the received weights. In the flat layout `ids` says which numbers experts have,
    /// and the received experts come too.
    pub fn send(
        &self,
        handle: &TestHandle,
        seed: u64,
        forward: bool,
        rows: &mut Desc,
        ids: Option<ncclEpExpertIdKind_t>,
    ) -> (Vec<f32>, Vec<i64>) {
        let (case, rank) = (self.case, self.rank);
        let (tokens, top_k, capacity) = (case.tokens(rank.rank), case.top_k, case.capacity);
        let shape = if ids.is_some() { vec![capacity, top_k] } else { vec![capacity] };
        let input = Buffer::of(&case.rows(seed + rank.rank as u64, tokens), rank.stream);
        let own: Vec<f32> = (0..tokens * top_k).map(|i| weight(rank.rank, i)).collect();
        let own = Buffer::of(&own, rank.stream);
        let there = Buffer::of(&vec![STALE_WEIGHT; shape.iter().product()], rank.stream);
        let experts = Buffer::of(&vec![STALE_EXPERT; capacity * top_k], rank.stream);
        let some = |buffer: *mut u8| if tokens == 0 { ptr::null_mut() } else { buffer.cast() };
        let mut input_desc = Desc::new(some(input.pointer), case.datatype, &[tokens, case.hidden]);
        let mut own_desc = Desc::new(some(own.pointer.cast()), ncclFloat32, &[tokens, top_k]);
        let mut there_desc = Desc::of(&there, ncclFloat32, &shape);
        let mut experts_desc = Desc::of(&experts, ncclInt64, &[capacity, top_k]);
        let given = |pointer: *mut ncclEpTensor_t, is_given: bool| if is_given { pointer } else { ptr::null_mut() };
        let inputs = ep_struct!(ncclEpDispatchInputs_t {
            tokens: input_desc.ptr(),
            topk_weights: given(own_desc.ptr(), forward)
        });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t {
            tokens: rows.ptr(),
            topk_weights: given(there_desc.ptr(), forward),
            topk_idx: given(experts_desc.ptr(), forward && ids.is_some()),
        });
        let info = ids.map(|kind| ep_struct!(ncclEpLayoutInfo_t { recv_topk_idx_kind: kind }));
        let info = info.as_ref().map_or(ptr::null(), ptr::from_ref);
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: direction(forward) });
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, inputs, outputs, info, config, rank.stream) });
        (there.get(), experts.get())
    }

    /// Combines `rows`, of which each has `weights` weights; gives the sums of the own tokens and the weights' gradients.
    pub fn sum(&self, handle: &TestHandle, forward: bool, rows: &mut Desc, weights: &[usize]) -> (Vec<u8>, Vec<f32>) {
        let (case, rank) = (self.case, self.rank);
        let tokens = case.tokens(rank.rank);
        let output = Buffer::<u8>::new(tokens * case.row_bytes(), rank.stream);
        let by_row: Vec<f32> = (0..weights.iter().product()).map(|index| gradient(rank.rank, index)).collect();
        let by_row = Buffer::of(&by_row, rank.stream);
        let by_token = Buffer::<f32>::new(tokens * case.top_k, rank.stream);
        let some = |buffer: *mut u8| if tokens == 0 { ptr::null_mut() } else { buffer.cast() };
        let mut output_desc = Desc::new(some(output.pointer), case.datatype, &[tokens, case.hidden]);
        let mut by_row_desc = Desc::of(&by_row, ncclFloat32, weights);
        let mut by_token_desc = Desc::new(some(by_token.pointer.cast()), ncclFloat32, &[tokens, case.top_k]);
        let given = |pointer: *mut ncclEpTensor_t| if forward { ptr::null_mut() } else { pointer };
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr(), topk_weights: given(by_row_desc.ptr()) });
        let outputs =
            ep_struct!(ncclEpCombineOutputs_t { tokens: output_desc.ptr(), topk_weights: given(by_token_desc.ptr()) });
        let config = ep_struct!(ncclEpCombineConfig_t { pass_direction: direction(forward) });
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpCombine(handle.handle, inputs, outputs, config, rank.stream) });
        (output.get(), by_token.get())
    }

    /// Dispatches rows of `seed` and compares the whole receive buffer.
    pub fn dispatch(&self, handle: &TestHandle, seed: u64, forward: bool) {
        let (case, rank) = (self.case, self.rank);
        let stale = vec![0xA5u8; case.capacity * case.row_bytes()];
        let output = Buffer::of(&stale, rank.stream);
        let mut output_desc = Desc::of(&output, case.datatype, &[case.capacity, case.hidden]);
        let (there, _) = self.send(handle, seed, forward, &mut output_desc, None);
        let sources: Vec<Vec<u8>> = (0..case.ranks).map(|r| case.rows(seed + r as u64, case.tokens(r))).collect();
        let mut rows = stale;
        let mut weights = vec![STALE_WEIGHT; case.capacity];
        let map = expected(case, rank.rank);
        let written = if case.drop { case.capacity } else { map.rows.len() };
        rows[..written * case.row_bytes()].fill(0);
        if forward {
            weights[..written].fill(0.0);
        }
        let survivors = survivors(case, rank.rank);
        for (slot, origin) in map.rows.iter().enumerate().take(case.capacity) {
            let Some(origin) = origin.filter(|o| survivors.contains(&(o.rank, o.token))) else { continue };
            let row = &sources[origin.rank][origin.token * case.row_bytes()..][..case.row_bytes()];
            rows[slot * case.row_bytes()..][..case.row_bytes()].copy_from_slice(row);
            if forward {
                weights[slot] = last_weight(case, origin.rank, origin.token, origin.expert as i64);
            }
        }
        assert_eq!(output.get(), rows, "received rows of rank {}", rank.rank);
        assert_eq!(there, weights, "received weights of rank {}", rank.rank);
    }

    pub fn combine(&self, handle: &TestHandle, seed: u64, forward: bool) {
        let (case, rank) = (self.case, self.rank);
        let input = Buffer::of(&expert_rows(case, rank.rank, seed), rank.stream);
        let mut input_desc = Desc::of(&input, case.datatype, &[case.capacity, case.hidden]);
        let (sums, by_token) = self.sum(handle, forward, &mut input_desc, &[case.capacity]);
        let sources: Vec<Vec<u8>> = (0..case.ranks).map(|r| expert_rows(case, r, seed)).collect();
        assert_eq!(sums, combined(case, rank.rank, &sources), "combined rows of rank {}", rank.rank);
        if !forward {
            assert_eq!(by_token, weight_gradients(case, rank.rank), "weight gradients of rank {}", rank.rank);
        }
    }
}

fn direction(forward: bool) -> ncclEpPassDir_t {
    if forward { NCCL_EP_FWD_PASS } else { NCCL_EP_BWD_PASS }
}

/// The gradient that a rank gives for the weight with this index among its rows'.
pub fn gradient(rank: usize, index: usize) -> f32 {
    noise(1000 + rank as u64, index as u64)
}

/// The weight that a token gives an expert: of duplicates the last one counts.
pub fn last_weight(case: &Case, rank: usize, token: usize, expert: i64) -> f32 {
    let positions = token * case.top_k..(token + 1) * case.top_k;
    weight(rank, positions.rev().find(|p| case.topk[rank][*p] == expert).unwrap())
}

/// The rows of a rank that are delivered: those below the capacity.
pub fn live(case: &Case, rank: usize) -> Vec<Option<Origin>> {
    expected(case, rank).rows.into_iter().take(case.capacity).collect()
}

/// Expert outputs of a rank. Padding and stale rows hold NaN: reading one shows.
pub fn expert_rows(case: &Case, rank: usize, seed: u64) -> Vec<u8> {
    let mut rows = case.rows(seed + rank as u64, case.capacity);
    let live = live(case, rank);
    for slot in (0..case.capacity).filter(|slot| live.get(*slot).is_none_or(Option::is_none)) {
        for element in rows[slot * case.row_bytes()..][..case.row_bytes()].chunks_mut(case.width()) {
            element.copy_from_slice(&case.encode(f32::NAN));
        }
    }
    rows
}

/// The gradients of a rank's weights, from those that [`gradient`] gives for the rows.
pub fn weight_gradients(case: &Case, rank: usize) -> Vec<f32> {
    let maps: Vec<Vec<Option<Origin>>> = (0..case.ranks).map(|r| live(case, r)).collect();
    (0..case.tokens(rank) * case.top_k)
        .map(|position| {
            let expert = case.topk[rank][position];
            let owner = expert.max(0) as usize / case.local();
            let is_it = |o: &Option<Origin>| {
                o.is_some_and(|o| (o.rank, o.token, o.expert as i64) == (rank, position / case.top_k, expert))
            };
            maps[owner].iter().position(is_it).map_or(0.0, |slot| gradient(owner, slot))
        })
        .collect()
}

/// Tokens that a rank keeps: with DROP those among its first `capacity` distinct ones.
pub fn survivors(case: &Case, rank: usize) -> Vec<(usize, usize)> {
    let mine = rank * case.local()..(rank + 1) * case.local();
    let mut kept = Vec::new();
    for source in 0..case.ranks {
        for token in 0..case.tokens(source) {
            let row = &case.topk[source][token * case.top_k..][..case.top_k];
            if row.iter().any(|e| *e >= 0 && mine.contains(&(*e as usize))) {
                kept.push((source, token));
            }
        }
    }
    kept.truncate(case.capacity);
    kept
}

/// A group as the case asks for.
pub fn group_of(case: &Case, rank: &Rank, zero_copy: bool) -> ncclEpGroup_t {
    let mut config = group_config(case.experts, case.max_tokens, case.capacity, case.row_bytes());
    if case.eager {
        config.max_recv_tokens_per_rank = 0;
        config.num_topk = case.top_k as u32;
    }
    if case.drop {
        config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    }
    if zero_copy {
        config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    }
    rank.create_group(&config).unwrap()
}

pub fn with_group(case: &Case, work: impl Fn(&Session) + Sync) {
    run_ranks(case.ranks, |rank| {
        let group = group_of(case, rank, false);
        work(&Session { case, rank, group });
        rank.destroy_group(group);
    });
}

/// A whole step, forward and backward.
pub fn step(session: &Session, handle: &TestHandle) {
    session.update(handle);
    session.dispatch(handle, 10, true);
    session.combine(handle, 20, true);
    session.combine(handle, 30, false);
    session.dispatch(handle, 40, false);
}

pub fn check(case: &Case) {
    with_group(case, |session| {
        let handle = TestHandle::new(session.rank, session.group, case.top_k, case.alignment);
        step(session, &handle);
        handle.destroy();
    });
}

pub fn spread(experts: usize) -> impl Fn(usize, usize, usize) -> i64 {
    move |rank, token, k| ((rank * 5 + token * 3 + k * k + k) % experts) as i64
}
