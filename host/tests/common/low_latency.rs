//! Steps of low-latency mode, compared with a reference in float64 that knows nothing of slots.

use std::ptr;

use half::{bf16, f16};
use nvte_ep_bindings::*;

use super::reference::noise;
use super::*;

#[derive(Clone)]
pub struct LlCase {
    pub ranks: usize,
    pub experts: usize,
    pub top_k: usize,
    pub datatype: ncclDataType_t,
    pub wide_indices: bool,
    pub hidden: usize,
    pub max_tokens: usize,
    pub layout: ncclEpLayout_t,
    pub recipe: ncclEpDispQuant_t,
    pub round_scales: bool,
    /// Rank-major: whether received experts are numbered over the group.
    pub global_ids: bool,
    /// Whether rows of an expert are in the order of source rank and row.
    pub ordered: bool,
    /// Indices by rank, `top_k` to a row.
    pub topk: Vec<Vec<i64>>,
}

impl LlCase {
    pub fn new(
        ranks: usize,
        experts: usize,
        top_k: usize,
        tokens: &[usize],
        pick: impl Fn(usize, usize, usize) -> i64,
    ) -> Self {
        let topk = (0..ranks)
            .map(|rank| (0..tokens[rank] * top_k).map(|i| pick(rank, i / top_k, i % top_k)).collect())
            .collect();
        Self {
            ranks,
            experts,
            top_k,
            datatype: ncclBfloat16,
            wide_indices: true,
            hidden: 512,
            max_tokens: tokens.iter().copied().max().unwrap_or(0).max(2),
            layout: NCCL_EP_LAYOUT_EXPERT_MAJOR,
            recipe: NCCL_EP_DISP_QUANT_NONE,
            round_scales: false,
            global_ids: false,
            ordered: true,
            topk,
        }
    }

    pub fn tokens(&self, rank: usize) -> usize {
        self.topk[rank].len() / self.top_k
    }

    pub fn local(&self) -> usize {
        self.experts / self.ranks
    }

    /// Number and rows of the slabs of a receive buffer.
    pub fn slabs(&self) -> (usize, usize) {
        if self.layout == NCCL_EP_LAYOUT_RANK_MAJOR {
            (self.ranks, self.max_tokens)
        } else {
            (self.local(), self.ranks * self.max_tokens)
        }
    }

    pub fn width(&self) -> usize {
        if self.datatype == ncclFloat32 { 4 } else { 2 }
    }

    pub fn encode(&self, value: f64) -> Vec<u8> {
        match self.datatype {
            ncclFloat32 => (value as f32).to_ne_bytes().to_vec(),
            ncclFloat16 => f16::from_f64(value).to_ne_bytes().to_vec(),
            _ => bf16::from_f64(value).to_ne_bytes().to_vec(),
        }
    }

    pub fn decode(&self, bytes: &[u8]) -> Vec<f64> {
        match self.datatype {
            ncclFloat32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()).into()).collect(),
            ncclFloat16 => bytes.chunks_exact(2).map(|b| f16::from_ne_bytes([b[0], b[1]]).to_f64()).collect(),
            _ => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes([b[0], b[1]]).to_f64()).collect(),
        }
    }

    /// A token's row.
    pub fn token(&self, seed: u64, rank: usize, token: usize) -> Vec<u8> {
        let first = (rank * 4096 + token) * self.hidden;
        (first..first + self.hidden).flat_map(|i| self.encode(noise(seed, i as u64).into())).collect()
    }

    pub fn weight(&self, seed: u64, rank: usize, token: usize, k: usize) -> f32 {
        (noise(seed + 1, ((rank * 4096 + token) * 64 + k) as u64) / 100.0).abs() + 0.125
    }

    /// What an expert makes of a value.
    pub fn of_expert(&self, expert: usize, value: f64) -> f64 {
        value * (1.0 + (expert % 7) as f64 * 0.25)
    }

    pub fn config(&self) -> ncclEpGroupConfig_t {
        ep_struct!(ncclEpGroupConfig_t {
            version: NCCL_EP_API_VERSION,
            algorithm: NCCL_EP_ALGO_LOW_LATENCY,
            num_experts: self.experts as u32,
            max_dispatch_tokens_per_rank: self.max_tokens as u32,
            // A multiple of 1024 bytes makes all parts of the buffer one of 16.
            max_token_bytes: (self.hidden * 4).next_multiple_of(1024) as u32,
        })
    }
}

/// Which halves are apart.
#[derive(Clone, Copy, Default)]
pub struct Staged {
    pub dispatch: bool,
    pub combine: bool,
}

pub fn ll_handle(rank: &Rank, group: ncclEpGroup_t, case: &LlCase) -> TestHandle {
    let memory = handle_memory(rank, group, case.layout, case.top_k);
    TestHandle::with_layout(memory, group, case.layout, case.top_k, 0)
}

/// The memory and descriptors of a rank's steps; both outlive queued work and graphs.
pub struct LlBuffers {
    pub topk: Buffer<u8>,
    pub tokens: Buffer<u8>,
    pub received: Buffer<u8>,
    pub received_scales: Buffer<u8>,
    pub counts: Buffer<i32>,
    pub own_weights: Buffer<f32>,
    pub weights: Buffer<f32>,
    pub received_experts: Buffer<i32>,
    pub expert_out: Buffer<u8>,
    pub result: Buffer<u8>,
    pub topk_desc: Desc,
    pub tokens_desc: Desc,
    pub received_desc: Desc,
    pub scales_desc: Desc,
    pub counts_desc: Desc,
    pub own_weights_desc: Desc,
    pub weights_desc: Desc,
    pub experts_desc: Desc,
    pub expert_out_desc: Desc,
    pub result_desc: Desc,
}

/// A byte that no result has in every place.
pub const STALE: u8 = 0x5a;

impl LlBuffers {
    pub fn new(rank: &Rank, case: &LlCase) -> Self {
        let (n, stream) = (case.tokens(rank.rank), rank.stream);
        let (slabs, rows) = case.slabs();
        let (hidden, k) = (case.hidden, case.top_k);
        let index = if case.wide_indices { 8 } else { 4 };
        let stale = |bytes: usize| Buffer::of(&vec![STALE; bytes], stream);
        let quantised = case.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        let received_width = if quantised { 1 } else { case.width() };
        let received = stale(slabs * rows * hidden * received_width);
        let received_scales = stale(slabs * rows * hidden / 128 * 4);
        let topk = Buffer::<u8>::new(n * k * index, stream);
        let tokens = Buffer::<u8>::new(n * hidden * case.width(), stream);
        let counts = Buffer::of(&vec![-7; slabs], stream);
        let own_weights = Buffer::<f32>::new(n * k, stream);
        let weights = Buffer::of(&vec![-7.0; slabs * rows * k], stream);
        let received_experts = Buffer::of(&vec![-7; slabs * rows * k], stream);
        let expert_out = stale(slabs * rows * hidden * case.width());
        let result = stale(n * hidden * case.width());
        let index_type = if case.wide_indices { ncclInt64 } else { ncclInt32 };
        Self {
            topk_desc: Desc::of(&topk, index_type, &[n, k]),
            tokens_desc: Desc::of(&tokens, case.datatype, &[n, hidden]),
            received_desc: Desc::of(
                &received,
                if quantised { ncclFloat8e4m3 } else { case.datatype },
                &[slabs, rows, hidden],
            ),
            scales_desc: Desc::of(&received_scales, ncclFloat32, &[slabs, rows, hidden / 128]),
            counts_desc: Desc::of(&counts, ncclInt32, &[slabs]),
            own_weights_desc: Desc::of(&own_weights, ncclFloat32, &[n, k]),
            weights_desc: Desc::of(&weights, ncclFloat32, &[slabs, rows, k]),
            experts_desc: Desc::of(&received_experts, ncclInt32, &[slabs, rows, k]),
            expert_out_desc: Desc::of(&expert_out, case.datatype, &[slabs, rows, hidden]),
            result_desc: Desc::of(&result, case.datatype, &[n, hidden]),
            topk,
            tokens,
            received,
            received_scales,
            counts,
            own_weights,
            weights,
            received_experts,
            expert_out,
            result,
        }
    }

    /// Writes a rank's indices, rows and weights.
    pub fn set(&self, rank: &Rank, case: &LlCase, seed: u64) {
        let (own, n) = (rank.rank, case.tokens(rank.rank));
        let indices = case.topk[own].iter();
        let indices: Vec<u8> = if case.wide_indices {
            indices.flat_map(|e| e.to_ne_bytes()).collect()
        } else {
            indices.flat_map(|e| (*e as i32).to_ne_bytes()).collect()
        };
        self.topk.set(&indices);
        self.tokens.set(&(0..n).flat_map(|token| case.token(seed, own, token)).collect::<Vec<u8>>());
        let weights = (0..n * case.top_k).map(|i| case.weight(seed, own, i / case.top_k, i % case.top_k));
        self.own_weights.set(&weights.collect::<Vec<f32>>());
    }

    pub fn update(&mut self, handle: &TestHandle, stream: cudaStream_t) {
        // SAFETY: the descriptor and its memory outlive the group.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, self.topk_desc.ptr(), ptr::null(), stream) });
    }

    pub fn dispatch(&mut self, case: &LlCase, handle: &TestHandle, stream: cudaStream_t, staged: bool) -> u32 {
        let rank_major = case.layout == NCCL_EP_LAYOUT_RANK_MAJOR;
        let mut inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: self.tokens_desc.ptr() });
        let mut outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: self.received_desc.ptr() });
        let mut info = ep_struct!(ncclEpLayoutInfo_t {});
        if case.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 {
            outputs.scales = self.scales_desc.ptr();
        }
        if rank_major {
            inputs.topk_weights = self.own_weights_desc.ptr();
            outputs.topk_weights = self.weights_desc.ptr();
            outputs.topk_idx = self.experts_desc.ptr();
            info.src_rank_counters = self.counts_desc.ptr();
            info.recv_topk_idx_kind = if case.global_ids { NCCL_EP_EXPERT_ID_GLOBAL } else { NCCL_EP_EXPERT_ID_AUTO };
        } else {
            info.expert_counters = self.counts_desc.ptr();
        }
        let config = ep_struct!(ncclEpDispatchConfig_t {
            send_only: staged.into(),
            round_scales: case.round_scales.into(),
            quant_recipe: case.recipe,
        });
        // SAFETY: structures are ours, descriptors and memory outlive the operation.
        unsafe {
            ncclEpDispatch(
                handle.handle,
                &raw const inputs,
                &raw const outputs,
                &raw const info,
                &raw const config,
                stream,
            )
        }
    }

    pub fn combine(&mut self, case: &LlCase, handle: &TestHandle, stream: cudaStream_t, staged: bool) -> u32 {
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: self.expert_out_desc.ptr() });
        let mut outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: self.result_desc.ptr() });
        if case.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR {
            outputs.topk_weights = self.own_weights_desc.ptr();
        }
        let config = ep_struct!(ncclEpCombineConfig_t { send_only: staged.into() });
        // SAFETY: structures are ours, descriptors and memory outlive the operation.
        unsafe { ncclEpCombine(handle.handle, &raw const inputs, &raw const outputs, &raw const config, stream) }
    }

    /// A whole step, compared at each end.
    pub fn step(&mut self, rank: &Rank, case: &LlCase, handle: &TestHandle, seed: u64, staged: Staged) {
        self.set(rank, case, seed);
        self.update(handle, rank.stream);
        nccl_ok(self.dispatch(case, handle, rank.stream, staged.dispatch));
        if staged.dispatch {
            nccl_ok(complete(handle, rank.stream));
        }
        self.run_experts(rank, case, seed);
        nccl_ok(self.combine(case, handle, rank.stream, staged.combine));
        if staged.combine {
            nccl_ok(complete(handle, rank.stream));
        }
        self.check_result(rank, case, seed);
    }

    /// Compares what arrived with the reference, and writes what the experts make of it.
    pub fn run_experts(&self, rank: &Rank, case: &LlCase, seed: u64) {
        rank.sync();
        let (slabs, rows) = case.slabs();
        let (counts, received) = (self.counts.get(), self.received.get());
        let row_bytes = received.len() / (slabs * rows);
        let scales = self.received_scales.get();
        let mut outputs = vec![STALE; slabs * rows * case.hidden * case.width()];
        for (slab, count) in counts.into_iter().enumerate() {
            let expected = arriving(case, rank.rank, slab);
            assert_eq!(count as usize, expected.len(), "rank {} slab {slab}", rank.rank);
            let mut missing = expected.clone();
            for row in 0..rows {
                let at = slab * rows + row;
                let found = &received[at * row_bytes..][..row_bytes];
                if row >= expected.len() {
                    assert_ne!(found, vec![STALE; row_bytes], "rows behind the counts are not what they were");
                    continue;
                }
                let (of_rank, token) = if case.ordered {
                    expected[row]
                } else {
                    let is = |origin: &(usize, usize)| case.token(seed, origin.0, origin.1) == found;
                    let index = missing.iter().position(is).expect("a row of one of the tokens");
                    missing.remove(index)
                };
                let given = case.token(seed, of_rank, token);
                let values = if case.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 {
                    dequantised(case, found, &scales[at * case.hidden / 32..][..case.hidden / 32], &case.decode(&given))
                } else {
                    assert_eq!(found, given, "rank {} slab {slab} row {row}", rank.rank);
                    case.decode(&given)
                };
                let experts: Vec<(usize, f64)> = if case.layout == NCCL_EP_LAYOUT_RANK_MAJOR {
                    self.check_routes(rank, case, seed, at, of_rank, token)
                } else {
                    vec![(rank.rank * case.local() + slab, 1.0)]
                };
                let sum = |value: f64| experts.iter().map(|(e, weight)| case.of_expert(*e, value) * weight).sum();
                let row: Vec<u8> = values.iter().flat_map(|value| case.encode(sum(*value))).collect();
                outputs[at * row.len()..][..row.len()].copy_from_slice(&row);
            }
        }
        self.expert_out.set(&outputs);
    }

    /// Rank-major: the experts and weights beside a received row.
    fn check_routes(
        &self,
        rank: &Rank,
        case: &LlCase,
        seed: u64,
        at: usize,
        of_rank: usize,
        token: usize,
    ) -> Vec<(usize, f64)> {
        let (experts, weights) = (self.received_experts.get(), self.weights.get());
        let first = (rank.rank * case.local()) as i64;
        let mut own = Vec::new();
        for k in 0..case.top_k {
            let expert = case.topk[of_rank][token * case.top_k + k];
            let is_own = (first..first + case.local() as i64).contains(&expert);
            let number = if case.global_ids { expert } else { expert - first };
            assert_eq!(experts[at * case.top_k + k], if is_own { number as i32 } else { -1 });
            assert_eq!(weights[at * case.top_k + k], case.weight(seed, of_rank, token, k));
            if is_own {
                own.push((expert as usize, f64::from(case.weight(seed, of_rank, token, k))));
            }
        }
        own
    }

    /// Compares the results with sums in float64.
    pub fn check_result(&self, rank: &Rank, case: &LlCase, seed: u64) {
        rank.sync();
        let own = rank.rank;
        let result = case.decode(&self.result.get());
        let epsilon = match case.datatype {
            ncclFloat32 => 2f64.powi(-21),
            ncclFloat16 => 2f64.powi(-9),
            _ => 2f64.powi(-6),
        };
        // Quantised rows differ from the tokens by a 16th at most, and by half a step of the smallest numbers.
        let quantised = case.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        for token in 0..case.tokens(own) {
            let given = case.decode(&case.token(seed, own, token));
            let most = given.iter().fold(0f64, |most, value| most.max(value.abs()));
            for (column, value) in given.iter().enumerate() {
                let (mut sum, mut size) = (0.0, 0.0);
                for k in 0..case.top_k {
                    let Ok(expert) = usize::try_from(case.topk[own][token * case.top_k + k]) else { continue };
                    let weight = f64::from(case.weight(seed, own, token, k));
                    sum += case.of_expert(expert, *value) * weight;
                    size += case.of_expert(expert, 1.0) * weight;
                }
                let found = result[token * case.hidden + column];
                let coarse = if quantised { size * (value.abs() / 14.0 + most / 1e5) } else { 0.0 };
                let limit = size * value.abs() * epsilon + coarse + 1e-5 * f64::from(u8::from(quantised)) + 1e-6;
                assert!((found - sum).abs() <= limit, "token {token} column {column}: {found}, expected {sum}");
            }
        }
    }
}

/// Rows of a quantised token, and whether values and scales are what the recipe says.
fn dequantised(case: &LlCase, found: &[u8], scales: &[u8], given: &[f64]) -> Vec<f64> {
    let mut values = Vec::new();
    for (block, given) in given.chunks(128).enumerate() {
        let scale = f64::from(f32::from_ne_bytes(scales[block * 4..][..4].try_into().unwrap()));
        let largest = given.iter().fold(1e-4, |most: f64, value| most.max(value.abs())) / 448.0;
        if case.round_scales {
            assert_eq!(scale, 2f64.powi(largest.log2().ceil() as i32));
        } else {
            assert!((scale / largest - 1.0).abs() < 1e-6, "{scale} for {largest}");
        }
        for (byte, given) in found[block * 128..][..128].iter().zip(given) {
            let (exponent, fraction) = (i32::from((byte >> 3) & 15), f64::from(byte & 7));
            let magnitude =
                if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
            let value = scale * if byte & 0x80 == 0 { magnitude } else { -magnitude };
            assert!((value - given).abs() <= given.abs() / 16.0 + scale / 1024.0 * 1.001, "{value} for {given}");
            values.push(value);
        }
    }
    values
}

/// What arrives in a slab of a rank: source rank and row, in order.
pub fn arriving(case: &LlCase, rank: usize, slab: usize) -> Vec<(usize, usize)> {
    let own = (rank * case.local()) as i64;
    let mut arriving = Vec::new();
    for source in 0..case.ranks {
        for token in 0..case.tokens(source) {
            let experts = &case.topk[source][token * case.top_k..][..case.top_k];
            if case.layout == NCCL_EP_LAYOUT_RANK_MAJOR {
                if source == slab && experts.iter().any(|e| (own..own + case.local() as i64).contains(e)) {
                    arriving.push((source, token));
                }
            } else {
                arriving.extend(experts.iter().filter(|e| **e == own + slab as i64).map(|_| (source, token)));
            }
        }
    }
    arriving
}

pub fn complete(handle: &TestHandle, stream: cudaStream_t) -> u32 {
    // SAFETY: the staged operation's descriptors are still there.
    unsafe { ncclEpComplete(handle.handle, ptr::null(), stream) }
}

/// Runs `work` on every rank of a group for the case.
pub fn with_ll_group(case: &LlCase, work: impl Fn(&Rank, ncclEpGroup_t) + Sync) {
    run_ranks(case.ranks, |rank| {
        let group = rank.create_group(&case.config()).unwrap();
        work(rank, group);
        rank.sync();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

/// A step of each kind over one handle.
pub fn check_ll(case: &LlCase) {
    with_ll_group(case, |rank, group| {
        let handle = ll_handle(rank, group, case);
        let mut buffers = LlBuffers::new(rank, case);
        buffers.step(rank, case, &handle, 5, Staged::default());
        buffers.step(rank, case, &handle, 6, Staged { dispatch: true, combine: true });
        handle.destroy();
    });
}
