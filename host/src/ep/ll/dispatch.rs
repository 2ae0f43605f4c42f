//! `ncclEpDispatch` in low-latency mode: a token travels once to each rank that has one of its experts, and lies there in a row
//! for each of them (expert-major), or in one (rank-major).

use std::ops::Range;
use std::sync::Arc;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::channel::{Channel, PIECE_BYTES};
use crate::check;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, Tensor, invalid};
use crate::ep::dispatch::{check_pair, check_quantised};
use crate::ep::ll::arrivals::Arrivals;
use crate::ep::ll::handle::{Handle, Routing};
use crate::ep::ll::limits;
use crate::ep::ll::quantise::{self, quantise};
use crate::ep::ll::slots::{Regions, place};
use crate::ep::ll::staged::{Halves, Kept};
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::tensor_check;

const FUNCTION: &str = "ncclEpDispatch";

/// Rows of one kind that travel: the tokens, or their scales.
struct Lane {
    row_bytes: usize,
    /// Nothing for scales that are computed here.
    input: Option<Span>,
    output: Span,
}

/// Rank-major: what tells a receiver of a token's experts.
struct ByToken {
    own_weights: Span,
    weights: Span,
    experts: Span,
    /// Whether experts are numbered over the group rather than the rank.
    global_ids: bool,
}

struct Dispatch {
    handle: Arc<Handle>,
    routing: Routing,
    lanes: Vec<Lane>,
    /// Whether bf16 rows are quantised here, and with scales rounded to powers of two.
    quantise: Option<bool>,
    by_token: Option<ByToken>,
    counts: Option<Span>,
    what: String,
    sent: Mutex<Option<Sent>>,
}

/// What the first half has read.
struct Sent {
    experts: Vec<i32>,
    /// The rows of each lane, then the weights of rank-major tokens.
    lanes: Vec<Vec<u8>>,
}

fn unexpected(pointer: *const ncclEpTensor_t, name: &str, why: &str) -> Outcome<()> {
    if pointer.is_null() { Ok(()) } else { Err(invalid(format!("{FUNCTION}: {name} is given {why}"))) }
}

/// Enqueues the operation, or its first half.
///
/// # Safety
///
/// The structures and descriptors are valid, the descriptors of a staged operation until it is completed, and the tensors' memory
/// until the stream has got there.
pub unsafe fn dispatch(
    handle: &Arc<Handle>,
    inputs: *const ncclEpDispatchInputs_t,
    outputs: *const ncclEpDispatchOutputs_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpDispatchConfig_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    let (group, shape) = (&handle.group, handle.memory.shape);
    let _use = group.enter(FUNCTION)?;
    check::stream_device(stream.device().ordinal, group.comm.device.ordinal)?;
    // SAFETY: passed on to the caller.
    let inputs = unsafe { desc::read_struct(inputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let outputs = unsafe { desc::read_struct(outputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let info = unsafe { desc::read_optional(layout_info, FUNCTION) }?.unwrap_or_default();
    // SAFETY: passed on to the caller.
    let config = unsafe { desc::read_optional(config, FUNCTION) }?.unwrap_or_default();
    limits::check_forward(config.pass_direction, FUNCTION)?;
    handle.mode.refuse_staged(FUNCTION)?;
    shape.check_launch(handle.mode.sms, FUNCTION)?;
    if group.zero_copy && !shape.rank_major {
        return Err(invalid(format!("{FUNCTION}: zero_copy ON excludes the expert-major layout in low-latency mode")));
    }
    if group.zero_copy && group.domain < shape.ranks {
        return Err(invalid(format!("{FUNCTION}: zero_copy ON over several NVLink domains in low-latency mode")));
    }
    let routing = handle.routing(FUNCTION)?;

    let require = |pointer: *mut ncclEpTensor_t, name: &str| {
        // SAFETY: passed on to the caller.
        unsafe { Tensor::require(pointer, &group.comm, FUNCTION, name) }
    };
    let tokens = require(inputs.tokens, "inputs.tokens")?;
    let received = require(outputs.tokens, "outputs.tokens")?;
    let (rows, hidden) = tokens.matrix()?;
    tokens.expect_most_rows(shape.max_tokens)?;
    if rows != routing.tokens {
        return Err(tokens.wrong(format!("must have the {} rows of UpdateHandle's topk_idx", routing.tokens)));
    }
    let regions = Regions::of(&shape);
    let (outer, inner) = (regions.number, regions.rows);
    received.expect_shape(&[outer, inner, hidden])?;
    let mut kept = vec![
        Kept::new(inputs.tokens, "inputs.tokens", &tokens),
        Kept::new(outputs.tokens, "outputs.tokens", &received),
    ];
    let mut lanes = Vec::new();
    let mut quantised = None;
    let lane = |input: Option<&Tensor>, output: &Tensor| -> Outcome<Lane> {
        input.map_or(Ok(()), Tensor::expect_granule)?;
        output.expect_granule()?;
        let columns = output.shape[2] * dtype::ep_size_of(output.datatype).unwrap_or(0);
        Ok(Lane { row_bytes: columns, input: input.map(|input| input.span), output: output.span })
    };
    let by_row = |tensor: &Tensor| Tensor { shape: vec![outer * inner, tensor.shape[2]], ..tensor.clone() };
    match config.quant_recipe {
        NCCL_EP_DISP_QUANT_NONE => {
            unexpected(inputs.scales, "inputs.scales", "without a quant_recipe")?;
            unexpected(outputs.scales, "outputs.scales", "without a quant_recipe")?;
            let token_type = TokenType::from_nccl(tokens.datatype)
                .ok_or_else(|| tokens.wrong("must be bfloat16, float16 or float32"))?;
            limits::check_columns(&tokens, hidden, if token_type == TokenType::F32 { 128 } else { 256 })?;
            check_pair(&(tokens.clone(), by_row(&received)), "inputs.tokens")?;
            lanes.push(lane(Some(&tokens), &received)?);
        }
        NCCL_EP_DISP_QUANT_FWD => {
            let scales = require(inputs.scales, "inputs.scales")?;
            let received_scales = require(outputs.scales, "outputs.scales")?;
            received_scales.expect_shape(&[outer, inner, scales.matrix()?.1])?;
            let pairs = ((tokens.clone(), by_row(&received)), (scales.clone(), by_row(&received_scales)));
            check_quantised(&pairs.0, &pairs.1, &config)?;
            check_pair(&pairs.0, "inputs.tokens")?;
            check_pair(&pairs.1, "inputs.scales")?;
            kept.push(Kept::new(inputs.scales, "inputs.scales", &scales));
            kept.push(Kept::new(outputs.scales, "outputs.scales", &received_scales));
            lanes.push(lane(Some(&tokens), &received)?);
            lanes.push(lane(Some(&scales), &received_scales)?);
        }
        NCCL_EP_DISP_QUANT_DS_FP8E3M4 => {
            unexpected(inputs.scales, "inputs.scales", "with the quant_recipe that computes scales")?;
            if tokens.datatype != ncclBfloat16 || hidden == 0 || !hidden.is_multiple_of(512) {
                return Err(tokens.wrong("must be bfloat16 with a positive multiple of 512 columns to be quantised"));
            }
            if group.zero_copy {
                return Err(invalid(format!(
                    "{FUNCTION}: zero_copy ON excludes the quant_recipe that computes scales"
                )));
            }
            let scales = require(outputs.scales, "outputs.scales")?;
            scales.expect_shape(&[outer, inner, hidden / quantise::BLOCK])?;
            scales.expect_float()?;
            if received.datatype != ncclFloat8e4m3 {
                return Err(received.wrong("must be float8_e4m3"));
            }
            kept.push(Kept::new(outputs.scales, "outputs.scales", &scales));
            quantised = Some(config.round_scales != 0);
            lanes.push(lane(Some(&tokens), &received)?);
            lanes.push(lane(None, &scales)?);
        }
        other => return Err(invalid(format!("{FUNCTION}: quant_recipe {other} is unknown"))),
    }
    let row_bytes: usize = lanes.iter().map(|lane| lane.row_bytes).sum();
    if row_bytes > group.max_token_bytes {
        let scales = if lanes.len() > 1 { ", scales included" } else { "" };
        let text = format!("has rows of {row_bytes} bytes{scales}, max_token_bytes is {}", group.max_token_bytes);
        return Err(tokens.wrong(text).breaks(Rule::RowLimit));
    }
    if group.zero_copy {
        received.expect_window(&group.comm)?;
    }

    unexpected(info.expert_offsets, "layout_info.expert_offsets", "in low-latency mode")?;
    unexpected(info.recv_total_counter, "layout_info.recv_total_counter", "in low-latency mode")?;
    let counter = |pointer: *mut ncclEpTensor_t, name: &'static str| -> Outcome<(Tensor, Kept)> {
        let tensor = require(pointer, name)?;
        if tensor.datatype != ncclInt32 {
            return Err(tensor.wrong("must be int32"));
        }
        tensor.expect_shape(&[outer])?;
        if !tensor.has_data {
            return Err(tensor.wrong("must be given by its data pointer, not by a window"));
        }
        let kept = Kept::new(pointer, name, &tensor);
        Ok((tensor, kept))
    };
    let (counts, by_token) = if shape.rank_major {
        unexpected(info.expert_counters, "layout_info.expert_counters", "with the rank-major layout")?;
        let own = require(inputs.topk_weights, "inputs.topk_weights")?;
        let weights = require(outputs.topk_weights, "outputs.topk_weights")?;
        let experts = require(outputs.topk_idx, "outputs.topk_idx")?;
        own.expect_float()?;
        own.expect_shape(&[rows, shape.top_k])?;
        weights.expect_float()?;
        weights.expect_shape(&[outer, inner, shape.top_k])?;
        experts.expect_shape(&[outer, inner, shape.top_k])?;
        if experts.datatype != ncclInt32 {
            return Err(experts.wrong("must be int32"));
        }
        let global_ids = match info.recv_topk_idx_kind {
            NCCL_EP_EXPERT_ID_AUTO | NCCL_EP_EXPERT_ID_LOCAL => false,
            NCCL_EP_EXPERT_ID_GLOBAL => true,
            other => return Err(invalid(format!("{FUNCTION}: layout_info.recv_topk_idx_kind {other} is unknown"))),
        };
        kept.push(Kept::new(inputs.topk_weights, "inputs.topk_weights", &own));
        kept.push(Kept::new(outputs.topk_weights, "outputs.topk_weights", &weights));
        kept.push(Kept::new(outputs.topk_idx, "outputs.topk_idx", &experts));
        let by_token = ByToken { own_weights: own.span, weights: weights.span, experts: experts.span, global_ids };
        let counter = |pointer| counter(pointer, "layout_info.src_rank_counters");
        let given = (!info.src_rank_counters.is_null()).then_some(info.src_rank_counters);
        (given.map(counter).transpose()?, Some(by_token))
    } else {
        unexpected(inputs.topk_weights, "inputs.topk_weights", "with the expert-major layout")?;
        unexpected(outputs.topk_weights, "outputs.topk_weights", "with the expert-major layout")?;
        unexpected(outputs.topk_idx, "outputs.topk_idx", "with the expert-major layout")?;
        unexpected(info.src_rank_counters, "layout_info.src_rank_counters", "with the expert-major layout")?;
        (Some(counter(info.expert_counters, "layout_info.expert_counters")?), None)
    };
    let counts = counts.map(|(tensor, keep)| {
        kept.push(keep);
        tensor.span
    });
    let what = format!(
        "{FUNCTION}({}, hidden={hidden}, datatype={}, num_topk={}, quant_recipe={})",
        if shape.rank_major { "rank-major" } else { "expert-major" },
        dtype::name(tokens.datatype),
        shape.top_k,
        config.quant_recipe,
    );
    let operation = Arc::new(Dispatch {
        handle: Arc::clone(handle),
        routing,
        lanes,
        quantise: quantised,
        by_token,
        counts,
        what,
        sent: Mutex::default(),
    });
    let kept = (config.send_only != 0).then_some(kept);
    handle.mode.start(&group.line, stream, handle.address(), |s| &s.dispatches, operation, kept)
}

impl Halves for Dispatch {
    fn function(&self) -> &'static str {
        FUNCTION
    }

    fn send(&self) -> Outcome<()> {
        let (shape, tokens) = (&self.handle.memory.shape, self.routing.tokens);
        let experts = self.routing.experts(shape, FUNCTION)?;
        let of_token = |token: &usize| experts[token * shape.top_k..][..shape.top_k].iter().any(|expert| *expert >= 0);
        let sent = || (0..tokens).filter(of_token);
        let mut lanes: Vec<Vec<u8>> = self.lanes.iter().map(|lane| vec![0; tokens * lane.row_bytes]).collect();
        if let (Some(round), [values, scales]) = (self.quantise, &mut *lanes) {
            let lane = &self.lanes[0];
            let given = lane.input.as_ref().map_or(&[][..], |input| input.view(0, tokens * lane.row_bytes * 2));
            self.check_written("inputs.tokens", lane.input, lane.row_bytes * 2, sent())?;
            let rows = given.chunks_exact(lane.row_bytes * 2).zip(values.chunks_exact_mut(lane.row_bytes));
            for ((row, values), scales) in rows.zip(scales.chunks_exact_mut(self.lanes[1].row_bytes)) {
                quantise(row, round, values, scales);
            }
        } else {
            for ((lane, rows), name) in self.lanes.iter().zip(&mut lanes).zip(["inputs.tokens", "inputs.scales"]) {
                self.check_written(name, lane.input, lane.row_bytes, sent())?;
                if let Some(input) = lane.input {
                    input.read(0, rows);
                }
            }
        }
        if let Some(by_token) = &self.by_token {
            let row_bytes = shape.top_k * 4;
            self.check_written("inputs.topk_weights", Some(by_token.own_weights), row_bytes, sent())?;
            let mut weights = vec![0; tokens * row_bytes];
            by_token.own_weights.read(0, &mut weights);
            lanes.push(weights);
        }
        *self.sent.lock() = Some(Sent { experts, lanes });
        Ok(())
    }

    fn receive(&self, channel: &mut Channel) -> Outcome<()> {
        let shape = &self.handle.memory.shape;
        let sent = self.sent.lock().take();
        let sent = sent.ok_or_else(|| Fault::nccl(ncclInternalError, format!("{FUNCTION}: nothing was sent")))?;
        let bytes: Vec<u8> = sent.experts.iter().flat_map(|expert| expert.to_ne_bytes()).collect();
        channel.stage(bytes.len())?.copy_from_slice(&bytes);
        channel.exchange(&self.what, [self.routing.tokens as u64, 0, 0, 0], bytes.len())?;
        let experts = (0..shape.ranks)
            .map(|rank| {
                let rows = channel.offer(rank)?.bytes.as_chunks::<4>().0;
                Ok(rows.iter().map(|value| i32::from_ne_bytes(*value)).collect())
            })
            .collect::<Outcome<Vec<Vec<i32>>>>()?;
        let number = channel.operation();
        let (arrivals, used) = place(shape, channel.rank(), number, &experts).map_err(|overflow| {
            let text = format!(
                "{FUNCTION}: expert {} gets {} rows, and its slab has {}: a token names it more than once",
                overflow.expert, overflow.rows, overflow.room
            );
            Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::SlabOverflow)
        })?;
        self.take_rows(channel, &sent.lanes, &experts, &arrivals)?;
        self.finish(&arrivals, &used);
        Ok(())
    }

    fn spans(&self) -> Vec<Span> {
        let lanes = self.lanes.iter().flat_map(|lane| [lane.input, Some(lane.output)]).flatten();
        let by_token = self.by_token.iter().flat_map(|it| [it.own_weights, it.weights, it.experts]);
        lanes.chain(by_token).chain(self.counts).chain([self.routing.span, self.handle.memory.span]).collect()
    }
}

impl Dispatch {
    fn check_written(
        &self,
        name: &str,
        span: Option<Span>,
        row_bytes: usize,
        rows: impl Iterator<Item = usize>,
    ) -> Outcome<()> {
        span.map_or(Ok(()), |span| tensor_check::written(&format!("{FUNCTION}: {name}"), &span, row_bytes, rows))
    }

    /// Bytes of a token's row in each lane that travels.
    fn widths(&self) -> Vec<usize> {
        let weights = self.by_token.as_ref().map(|_| self.handle.memory.shape.top_k * 4);
        self.lanes.iter().map(|lane| lane.row_bytes).chain(weights).collect()
    }

    /// Every rank offers its rows, some tokens at a time, and takes those that it receives.
    fn take_rows(
        &self,
        channel: &mut Channel,
        sent: &[Vec<u8>],
        experts: &[Vec<i32>],
        arrivals: &Arrivals,
    ) -> Outcome<()> {
        let (top_k, widths) = (self.handle.memory.shape.top_k, self.widths());
        let row_bytes: usize = widths.iter().sum();
        let most = experts.iter().map(|experts| experts.len() / top_k).max().unwrap_or(0);
        let piece = (PIECE_BYTES / row_bytes).max(1);
        for first in (0..most).step_by(piece) {
            let own = |tokens: usize| first.min(tokens)..(first + piece).min(tokens);
            let range = own(self.routing.tokens);
            let mut rest = channel.stage(range.len() * row_bytes)?;
            for (rows, width) in sent.iter().zip(&widths) {
                let (there, behind) = rest.split_at_mut(range.len() * width);
                there.copy_from_slice(&rows[range.start * width..range.end * width]);
                rest = behind;
            }
            channel.exchange(&format!("{}: rows", self.what), [0; 4], range.len() * row_bytes)?;
            for (rank, experts) in experts.iter().enumerate() {
                let range = own(experts.len() / top_k);
                let rows = channel.offer(rank)?.bytes;
                for index in arrivals.of_rank[rank].clone() {
                    let token = arrivals.tokens[index] as usize;
                    if range.contains(&token) {
                        let slots = &arrivals.slots[index * top_k..][..top_k];
                        let routes = &experts[token * top_k..][..top_k];
                        self.put(rows, &range, token, slots, routes, &widths);
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes an arrived token to its rows.
    fn put(&self, rows: &[u8], range: &Range<usize>, token: usize, slots: &[i32], experts: &[i32], widths: &[usize]) {
        let mut rest = rows;
        let mut lanes = widths.iter().map(|width| {
            let (lane, behind) = rest.split_at(range.len() * width);
            rest = behind;
            &lane[(token - range.start) * width..][..*width]
        });
        let slots = || slots.iter().filter_map(|slot| usize::try_from(*slot).ok());
        for (lane, row) in self.lanes.iter().zip(&mut lanes) {
            for slot in slots() {
                lane.output.write(slot * lane.row_bytes, row);
            }
        }
        let (Some(by_token), Some(weights), Some(slot)) = (&self.by_token, lanes.next(), slots().next()) else {
            return;
        };
        let shape = &self.handle.memory.shape;
        let local = shape.experts / shape.ranks;
        let mine = self.handle.group.comm.rank * local;
        let experts = experts.iter().map(|expert| {
            let is_mine = usize::try_from(*expert).is_ok_and(|expert| (mine..mine + local).contains(&expert));
            match (is_mine, by_token.global_ids) {
                (false, _) => -1,
                (true, true) => *expert,
                (true, false) => *expert - mine as i32,
            }
        });
        let experts: Vec<u8> = experts.flat_map(i32::to_ne_bytes).collect();
        by_token.experts.write(slot * experts.len(), &experts);
        by_token.weights.write(slot * weights.len(), weights);
    }

    /// Keeps where rows came from, writes the counts, and makes what lies behind them unreadable.
    fn finish(&self, arrivals: &Arrivals, used: &[usize]) {
        self.handle.memory.keep(arrivals);
        if let Some(counts) = self.counts {
            counts.write(0, &used.iter().flat_map(|rows| (*rows as i32).to_ne_bytes()).collect::<Vec<u8>>());
        }
        let shape = &self.handle.memory.shape;
        let rows = Regions::of(shape).rows;
        let by_token = self.by_token.iter().flat_map(|it| [it.weights, it.experts]);
        let by_token = by_token.map(|span| (span, shape.top_k * 4));
        for (output, width) in self.lanes.iter().map(|lane| (lane.output, lane.row_bytes)).chain(by_token) {
            for (region, used) in used.iter().enumerate() {
                output.poison((region * rows + used) * width, (rows - used) * width);
            }
        }
    }
}
