//! `ncclEpDispatch`: token rows travel to the ranks of their experts.

use std::ops::Range;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::caller;
use crate::channel::{Channel, PIECE_BYTES};
use crate::check;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, SymmetricAddress, Tensor, invalid};
use crate::ep::group::Layout;
use crate::ep::handle::{Arrivals, Handle, MAX_TOP_K};
use crate::ep::routing_header::RoutingHeader;
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::tensor_check;

const FUNCTION: &str = "ncclEpDispatch";
/// An expert (i32) and its weight (f32).
const ROUTE_BYTES: usize = 8;

/// Rows of one kind that travel: the tokens, or the scales of quantised tokens.
struct Lane {
    row_bytes: usize,
    input: Span,
    output: Span,
    /// With zero copy, where the output is on every rank.
    symmetric: Option<SymmetricAddress>,
}

struct Dispatch {
    handle: Arc<Handle>,
    /// Own tokens.
    tokens: usize,
    lanes: Vec<Lane>,
    /// FWD only.
    weights: Option<Weights>,
    what: String,
}

/// The routing weights of a forward pass.
struct Weights {
    own: Span,
    received: Span,
    /// Flat layout: the experts that the received weights belong to.
    experts: Option<Span>,
    /// Whether these experts are numbered over the group rather than the rank.
    global_ids: bool,
    /// Bytes of an index in handle memory.
    width: usize,
}

/// What a token tensor of either direction must fulfil; gives rows and bytes of a row.
pub fn check_tokens(tensor: &Tensor) -> Outcome<(usize, usize, TokenType)> {
    let (rows, _) = tensor.matrix()?;
    let Some(token_type) = TokenType::from_nccl(tensor.datatype) else {
        return Err(tensor.wrong("must be bfloat16, float16 or float32"));
    };
    let row_bytes = tensor.row_bytes()?;
    tensor.expect_granule()?;
    Ok((rows, row_bytes, token_type))
}

/// The two tensors of a lane: rows of the same type and width, in this order.
pub type Pair = (Tensor, Tensor);

/// What quantised tokens and their scales must fulfil; the bytes are moved as they are.
pub fn check_quantised(tokens: &Pair, scales: &Pair, config: &ncclEpDispatchConfig_t) -> Outcome<()> {
    if config.round_scales != 0 {
        let text = format!("{FUNCTION}: round_scales is {}, quant_recipe FWD needs 0", config.round_scales);
        return Err(invalid(text));
    }
    let ((sent, received), (sent_scales, received_scales)) = (tokens, scales);
    if !matches!(
        sent.datatype,
        ncclFloat32 | ncclFloat16 | ncclBfloat16 | ncclFloat8e4m3 | ncclFloat8e5m2 | dtype::FLOAT4X2
    ) {
        return Err(sent.wrong("must be float32, float16, bfloat16, float8_e4m3, float8_e5m2 or float4_e2m1x2"));
    }
    if !matches!(
        sent_scales.datatype,
        ncclFloat32 | ncclFloat16 | ncclBfloat16 | ncclFloat8e4m3 | ncclFloat8e5m2 | ncclUint8
    ) {
        return Err(sent_scales.wrong("must be float32, float16, bfloat16, float8_e4m3, float8_e5m2 or uint8"));
    }
    for tensor in [sent, sent_scales, received, received_scales] {
        tensor.row_bytes()?;
        tensor.expect_granule()?;
    }
    for (source, scales) in [(sent, sent_scales), (received, received_scales)] {
        if scales.shape[0] != source.shape[0] {
            return Err(scales.wrong(format!("must have as many rows as the tokens, {}", source.shape[0])));
        }
    }
    if received.window.is_some() != received_scales.window.is_some() {
        let text = "must be in a window if and only if outputs.tokens is";
        return Err(received_scales.wrong(text).breaks(Rule::WindowMissing));
    }
    Ok(())
}

/// Fails unless rows arrive with the type and width that they were sent with.
pub fn check_pair((sent, received): &Pair, sent_name: &str) -> Outcome<()> {
    let (_, columns) = received.matrix()?;
    if received.datatype != sent.datatype || columns != sent.shape[1] {
        return Err(received.wrong(format!("must have the type and width of {sent_name}, {}", sent.describe())));
    }
    Ok(())
}

/// Limits of the kernels that NCCL EP would hit later, in a way that cannot be reported.
pub fn check_limits(handle: &Handle, function: &str) -> Outcome<()> {
    if !handle.group.experts.is_multiple_of(4) {
        return Err(invalid(format!("{function}: num_experts {} is not a multiple of 4", handle.group.experts)));
    }
    if handle.top_k > MAX_TOP_K && !handle.group.duplicates && handle.layout == Layout::ExpertMajor {
        return Err(invalid(format!("{function}: num_topk {} is larger than {MAX_TOP_K}", handle.top_k)));
    }
    Ok(())
}

/// Enqueues the operation.
///
/// # Safety
///
/// The structures and descriptors are valid, and the tensors' memory until the stream has got there.
pub unsafe fn dispatch(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpDispatchInputs_t,
    outputs: *const ncclEpDispatchOutputs_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpDispatchConfig_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    let handle = Handle::resolve(handle, FUNCTION)?;
    let group = Arc::clone(&handle.group);
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
    let forward = desc::is_forward(config.pass_direction, FUNCTION)?;
    let quantised = match config.quant_recipe {
        NCCL_EP_DISP_QUANT_NONE => false,
        NCCL_EP_DISP_QUANT_FWD => true,
        other => return Err(invalid(format!("{FUNCTION}: quant_recipe {other} is not one of HT mode"))),
    };
    if !quantised && (!inputs.scales.is_null() || !outputs.scales.is_null()) {
        return Err(invalid(format!("{FUNCTION}: scales are given without a quant_recipe")));
    }
    let flat = handle.layout == Layout::Flat;
    let gives_experts = flat && forward;
    if !outputs.topk_idx.is_null() && !gives_experts {
        let text = if flat { "in the backward pass" } else { "with the expert-major layout" };
        return Err(invalid(format!("{FUNCTION}: outputs.topk_idx is given {text}")));
    }
    let global_ids = match info.recv_topk_idx_kind {
        NCCL_EP_EXPERT_ID_AUTO | NCCL_EP_EXPERT_ID_LOCAL => false,
        NCCL_EP_EXPERT_ID_GLOBAL => true,
        other => return Err(invalid(format!("{FUNCTION}: layout_info.recv_topk_idx_kind {other} is unknown"))),
    };
    check_limits(&handle, FUNCTION)?;

    let require = |pointer: *mut ncclEpTensor_t, name: &str| {
        // SAFETY: passed on to the caller.
        unsafe { Tensor::require(pointer, &group.comm, FUNCTION, name) }
    };
    let tokens = (require(inputs.tokens, "inputs.tokens")?, require(outputs.tokens, "outputs.tokens")?);
    let mut pairs = vec![];
    if quantised {
        let scales = (require(inputs.scales, "inputs.scales")?, require(outputs.scales, "outputs.scales")?);
        check_quantised(&tokens, &scales, &config)?;
        check_pair(&scales, "inputs.scales")?;
        pairs.push(scales);
    } else {
        check_tokens(&tokens.0)?;
        check_tokens(&tokens.1)?;
    }
    check_pair(&tokens, "inputs.tokens")?;
    pairs.insert(0, tokens);
    let (tokens, received) = &pairs[0];
    let (rows, received_rows) = (tokens.shape[0], received.shape[0]);
    let lanes = pairs
        .iter()
        .map(|(sent, received)| {
            let symmetric = if group.zero_copy { Some(received.expect_window(&group.comm)?) } else { None };
            Ok(Lane { row_bytes: sent.row_bytes()?, input: sent.span, output: received.span, symmetric })
        })
        .collect::<Outcome<Vec<_>>>()?;
    let row_bytes: usize = lanes.iter().map(|lane| lane.row_bytes).sum();
    if row_bytes > group.max_token_bytes {
        let scales = if quantised { ", scales included" } else { "" };
        let limit = group.max_token_bytes;
        let text = format!("has rows of {row_bytes} bytes{scales}, the group's max_token_bytes is {limit}");
        return Err(tokens.wrong(text).breaks(Rule::RowLimit));
    }
    tokens.expect_most_rows(group.max_tokens)?;
    let (needed, limit) = if group.eager {
        if graph::is_capturing(stream) {
            let text = format!("{FUNCTION}: eager mode reads counts back, which a captured stream cannot");
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::CaptureUnsafe));
        }
        // As NCCL EP does: the counts are read back before the receive buffer is judged.
        stream.synchronize()?;
        group.line.wait();
        stream.device().check()?;
        (Arrivals::read(&handle, FUNCTION)?.total(), "the received total")
    } else {
        (group.capacity, "max_recv_tokens_per_rank")
    };
    if received_rows < needed {
        return Err(received.wrong(format!("must have at least {limit} = {needed} rows")));
    }
    let weights = if forward {
        let own = require(inputs.topk_weights, "inputs.topk_weights")?;
        let there = require(outputs.topk_weights, "outputs.topk_weights")?;
        own.expect_float()?;
        there.expect_float()?;
        if own.matrix()? != (rows, handle.top_k) {
            return Err(own.wrong(format!("must be [{rows}, {}]", handle.top_k)));
        }
        let elements = if flat { there.matrix()?.0 } else { there.vector()? };
        if elements < needed || (flat && there.shape[1] != handle.top_k) {
            let columns = if flat { format!(" x {}", handle.top_k) } else { String::new() };
            return Err(there.wrong(format!("must have at least {limit} = {needed}{columns} elements")));
        }
        if there.is_empty() != received.is_empty() {
            return Err(there.wrong(format!("must be empty if and only if outputs.tokens {:?} is", received.shape)));
        }
        let experts = if flat {
            let experts = require(outputs.topk_idx, "outputs.topk_idx")?;
            let (rows, columns) = experts.matrix()?;
            if experts.datatype != ncclInt64 || rows < needed || columns != handle.top_k {
                let text = format!("must be int64 of at least {limit} = {needed} x {}", handle.top_k);
                return Err(experts.wrong(text));
            }
            Some(experts.span)
        } else {
            None
        };
        let width = handle.prepared.lock().index_width;
        Some(Weights { own: own.span, received: there.span, experts, global_ids, width })
    } else {
        if !inputs.topk_weights.is_null() || !outputs.topk_weights.is_null() {
            return Err(invalid(format!("{FUNCTION}: topk_weights are given in the backward pass")));
        }
        None
    };
    let prepared = handle.tokens_or(rows);
    if rows != prepared {
        return Err(tokens.wrong(format!("must have the {prepared} rows of UpdateHandle's topk_idx")));
    }
    let scales = pairs.get(1).map_or_else(String::new, |(scales, _)| {
        format!(", scales={} x {}", scales.shape[1], dtype::name(scales.datatype))
    });
    let places: String = lanes.iter().flat_map(|lane| &lane.symmetric).map(|place| format!(", {place}")).collect();
    let what = format!(
        "{FUNCTION}(pass={}, hidden={}, datatype={}, num_topk={}{scales}{places})",
        if forward { "FWD" } else { "BWD" },
        tokens.shape[1],
        dtype::name(tokens.datatype),
        handle.top_k,
    );
    let dispatch = Dispatch { handle: Arc::clone(&handle), tokens: rows, lanes, weights, what };
    group.line.enqueue(stream, |s| &s.dispatches, &dispatch.spans(), move |channel| dispatch.run(channel))?;
    Ok(())
}

impl Dispatch {
    fn run(&self, channel: &mut Channel) -> Outcome<()> {
        let group = &self.handle.group;
        let arrivals = Arrivals::read(&self.handle, FUNCTION)?;
        self.check_written()?;
        let mut header = RoutingHeader::read(&self.handle.memory);
        header.dispatch(FUNCTION, caller::is_forward(self.weights.is_some()));
        header.write(&self.handle.memory);
        let what = header.name(&self.what);
        let capacity = if group.eager { arrivals.total() } else { group.capacity };
        let weights = if group.zero_copy {
            self.write_to_peers(channel, &what, &arrivals, capacity)?
        } else {
            self.read_from_peers(channel, &what, &arrivals, capacity)?
        };
        for padding in arrivals.padding(capacity) {
            for lane in &self.lanes {
                lane.output.fill(padding.start * lane.row_bytes, padding.len() * lane.row_bytes, 0);
            }
        }
        let Some(given) = &self.weights else { return Ok(()) };
        let mut total = arrivals.received * self.handle.top_k;
        if let Some(there) = &given.experts {
            let first = if given.global_ids { self.first_expert() } else { 0 };
            let experts = (0..total).map(|i| arrivals.expert(i).map_or(-1, |expert| (first + expert) as i64));
            there.write(0, &experts.flat_map(i64::to_ne_bytes).collect::<Vec<u8>>());
        } else {
            // Rows beyond the padded total keep what they held, but for DROP, and for duplicates, which go over them all.
            let all = group.drop || group.duplicates;
            total = if all { capacity } else { capacity.min(arrivals.total()) };
        }
        let bytes: Vec<u8> = weights[..total].iter().flat_map(|weight| weight.to_ne_bytes()).collect();
        given.received.write(0, &bytes);
        Ok(())
    }

    /// Checks that the rows which travel have been written; tokens without an expert may stay unwritten.
    fn check_written(&self) -> Outcome<()> {
        let (memory, ranks) = (&self.handle.memory, self.handle.group.comm.ranks);
        let source_map = memory.read_i32(memory.layout.source_map, self.tokens * ranks);
        let sent = || {
            let tokens = source_map.chunks_exact(ranks).enumerate();
            tokens.filter(|(_, positions)| positions.iter().any(|position| *position >= 0)).map(|(token, _)| token)
        };
        for (lane, name) in self.lanes.iter().zip(["inputs.tokens", "inputs.scales"]) {
            self.judge_rows(&format!("{FUNCTION}: {name}"), &lane.input, lane.row_bytes, sent())?;
        }
        let Some(Weights { own, .. }) = &self.weights else { return Ok(()) };
        self.judge_rows(&format!("{FUNCTION}: inputs.topk_weights"), own, self.handle.top_k * 4, sent())
    }

    /// In eager mode programs dispatch whatever a buffer holds to learn what they receive, which harms nothing.
    fn judge_rows(&self, name: &str, span: &Span, row_bytes: usize, rows: impl Iterator<Item = usize>) -> Outcome<()> {
        if self.handle.group.eager {
            tensor_check::should_be_written(name, span, row_bytes, rows);
            return Ok(());
        }
        tensor_check::written(name, span, row_bytes, rows)
    }

    /// Staged: every rank offers its rows, some tokens at a time, and takes those that it receives. Gives the weights by
    /// row.
    fn read_from_peers(
        &self,
        channel: &mut Channel,
        what: &str,
        arrivals: &Arrivals,
        capacity: usize,
    ) -> Outcome<Vec<f32>> {
        let group = &self.handle.group;
        if group.drop && !group.duplicates && self.handle.layout == Layout::ExpertMajor {
            for lane in &self.lanes {
                lane.output.fill(0, capacity * lane.row_bytes, 0);
            }
        }
        let top_k = self.handle.top_k;
        let mut weights = self.no_weights(arrivals, capacity);
        let piece = (PIECE_BYTES / (self.row_bytes() + self.route_bytes())).max(1);
        let mut first = 0;
        loop {
            self.stage_rows(channel, what, first..first + piece)?;
            let offers = (0..channel.ranks()).map(|rank| channel.offer(rank)).collect::<Outcome<Vec<_>>>()?;
            let most = offers.iter().map(|offer| offer.args[0] as usize).max().unwrap_or(0);
            let is_last = first + piece >= most;
            // What the routing expects beyond the tokens that came is an error, so the last piece looks for all of it.
            let range = first..if is_last { group.max_tokens.max(first) } else { first + piece };
            for (rank, offer) in offers.iter().enumerate() {
                let tokens = offer.args[0] as usize;
                let offered = tokens.clamp(first, first + piece) - first;
                let mut rest = offer.bytes;
                let mut rows_of = Vec::with_capacity(self.lanes.len());
                for lane in &self.lanes {
                    let (rows, behind) = rest.split_at(offered * lane.row_bytes);
                    rows_of.push(rows);
                    rest = behind;
                }
                let routes = rest.as_chunks::<ROUTE_BYTES>().0;
                for (token, position) in self.arriving_from(rank, tokens, range.clone(), arrivals)? {
                    let slots = &arrivals.slots[position * top_k..][..top_k];
                    for (lane, rows) in self.lanes.iter().zip(&rows_of) {
                        let row = &rows[(token - first) * lane.row_bytes..][..lane.row_bytes];
                        for slot in slots.iter().filter_map(|slot| usize::try_from(*slot).ok()) {
                            lane.output.write(slot * lane.row_bytes, row);
                        }
                    }
                    if self.weights.is_some() {
                        let route = &routes[(token - first) * top_k..][..top_k];
                        self.scatter_weights(route, position, arrivals, &mut weights);
                    }
                }
            }
            if is_last {
                return Ok(weights);
            }
            first += piece;
        }
    }

    /// Zero copy: every rank writes a row once into the window of each rank that receives it, and the receiver fans the
    /// duplicates out. Gives the weights by row.
    fn write_to_peers(
        &self,
        channel: &mut Channel,
        what: &str,
        arrivals: &Arrivals,
        capacity: usize,
    ) -> Outcome<Vec<f32>> {
        let primaries = arrivals.primaries(self.handle.top_k);
        let head = size_of_val(&*primaries);
        let bytes = head + self.tokens * self.route_bytes();
        let (first_rows, routes) = channel.stage(bytes)?.split_at_mut(head);
        for (there, row) in first_rows.as_chunks_mut::<4>().0.iter_mut().zip(&primaries) {
            *there = row.to_ne_bytes();
        }
        self.stage_routes(routes, 0..self.tokens);
        channel.exchange(what, [self.tokens as u64, arrivals.received as u64, 0, 0], bytes)?;

        let ranks = channel.ranks();
        let memory = &self.handle.memory;
        let source_map = memory.read_i32(memory.layout.source_map, self.tokens * ranks);
        for rank in 0..ranks {
            let offer = channel.offer(rank)?;
            let first_rows = offer.bytes[..offer.args[1] as usize * 4].as_chunks::<4>().0;
            for lane in &self.lanes {
                let Some(symmetric) = &lane.symmetric else { continue };
                let there = symmetric.on(rank)?;
                for token in 0..self.tokens {
                    let Ok(position) = usize::try_from(source_map[token * ranks + rank]) else { continue };
                    let row = first_rows.get(position).map(|row| i32::from_ne_bytes(*row) as usize * lane.row_bytes);
                    match row {
                        Some(row) if row + lane.row_bytes <= there.byte_len() => {
                            there.write(row, lane.input.view(token * lane.row_bytes, lane.row_bytes));
                        }
                        _ => return Err(self.out_of_reach(rank, token)),
                    }
                }
            }
        }
        let top_k = self.handle.top_k;
        let mut weights = self.no_weights(arrivals, capacity);
        for rank in 0..ranks {
            let offer = channel.offer(rank)?;
            let routes = offer.bytes[offer.args[1] as usize * 4..].as_chunks::<ROUTE_BYTES>().0;
            let all = 0..self.handle.group.max_tokens;
            // Fails where the tokens that peers sent are not those that the routing expects.
            let arriving = self.arriving_from(rank, offer.args[0] as usize, all, arrivals)?;
            for (token, position) in arriving.into_iter().filter(|_| self.weights.is_some()) {
                let route = &routes[token * top_k..][..top_k];
                self.scatter_weights(route, position, arrivals, &mut weights);
            }
        }
        channel.exchange(&format!("{}: rows written", self.what), [0; 4], 0)?;
        for slots in arrivals.slots.chunks_exact(top_k) {
            let mut slots = slots.iter().filter_map(|slot| usize::try_from(*slot).ok());
            let Some(first) = slots.next() else { continue };
            for slot in slots {
                for lane in &self.lanes {
                    lane.output.write(slot * lane.row_bytes, lane.output.view(first * lane.row_bytes, lane.row_bytes));
                }
            }
        }
        Ok(weights)
    }

    /// Those of a rank's tokens in `range` that this rank receives, with their positions among all received ones.
    fn arriving_from(
        &self,
        rank: usize,
        tokens: usize,
        range: Range<usize>,
        arrivals: &Arrivals,
    ) -> Outcome<Vec<(usize, usize)>> {
        let memory = &self.handle.memory;
        let most = self.handle.group.max_tokens;
        let range = range.start.min(most)..range.end.min(most);
        let positions = memory.read_i32(memory.layout.token_map + (rank * most + range.start) * 4, range.len());
        let arriving =
            range.zip(&positions).filter_map(|(token, position)| Some((token, usize::try_from(*position).ok()?)));
        arriving
            .map(|(token, position)| {
                let known = token < tokens && position < arrivals.received;
                if known { Ok((token, position)) } else { Err(self.stray(rank, tokens, token)) }
            })
            .collect()
    }

    fn first_expert(&self) -> usize {
        let group = &self.handle.group;
        group.comm.rank * (group.experts / group.comm.ranks)
    }

    /// The memory that the operation uses.
    fn spans(&self) -> Vec<Span> {
        let lanes = self.lanes.iter().flat_map(|lane| [lane.input, lane.output]);
        let weights =
            self.weights.iter().flat_map(|weights| [weights.own, weights.received].into_iter().chain(weights.experts));
        lanes.chain(weights).chain([self.handle.memory.span]).collect()
    }

    /// Bytes of a token in all lanes.
    fn row_bytes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.row_bytes).sum()
    }

    /// Bytes of a token's routes.
    fn route_bytes(&self) -> usize {
        if self.weights.is_some() { self.handle.top_k * ROUTE_BYTES } else { 0 }
    }

    /// Offers those of the own rows that are in `range`, lane by lane, and behind them their routes.
    fn stage_rows(&self, channel: &mut Channel, what: &str, range: Range<usize>) -> Outcome<()> {
        let range = range.start.min(self.tokens)..range.end.min(self.tokens);
        let rows = range.len() * self.row_bytes();
        let bytes = rows + range.len() * self.route_bytes();
        let (mut rest, routes) = channel.stage(bytes)?.split_at_mut(rows);
        for lane in &self.lanes {
            let (rows, behind) = rest.split_at_mut(range.len() * lane.row_bytes);
            lane.input.read(range.start * lane.row_bytes, rows);
            rest = behind;
        }
        self.stage_routes(routes, range);
        channel.exchange(what, [self.tokens as u64, 0, 0, 0], bytes)
    }

    /// In FWD, `top_k` pairs (expert, weight) for each token of `range`.
    fn stage_routes(&self, routes: &mut [u8], range: Range<usize>) {
        if let Some(Weights { own, width, .. }) = &self.weights {
            let top_k = self.handle.top_k;
            let (first, count) = (range.start * top_k, range.len() * top_k);
            let experts = self.handle.memory.read_topk(first, count, *width, self.handle.group.experts);
            let weights = own.view(first * 4, count * 4).as_chunks::<4>().0;
            for ((pair, expert), weight) in routes.as_chunks_mut::<ROUTE_BYTES>().0.iter_mut().zip(experts).zip(weights)
            {
                pair[..4].copy_from_slice(&expert.to_ne_bytes());
                pair[4..].copy_from_slice(weight);
            }
        }
    }

    fn out_of_reach(&self, rank: usize, token: usize) -> Fault {
        let text = format!(
            "{}: token {token} has no place in the window of rank {rank}: the window is too small, or handle_mem holds \
             the routing of another UpdateHandle",
            self.what
        );
        Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::HandleMemory)
    }

    fn stray(&self, rank: usize, tokens: usize, token: usize) -> Fault {
        let text = format!(
            "{}: handle_mem expects token {token} of rank {rank}, which dispatched {tokens} tokens: \
             the routing of another UpdateHandle",
            self.what
        );
        Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::HandleMemory)
    }

    /// Room for the received weights: by row, in the flat layout by token and expert.
    fn no_weights(&self, arrivals: &Arrivals, capacity: usize) -> Vec<f32> {
        let flat = self.handle.layout == Layout::Flat;
        vec![0f32; if flat { arrivals.received * self.handle.top_k } else { capacity }]
    }

    /// Puts the weights of a received token where they belong; of duplicate experts the last weight counts.
    fn scatter_weights(&self, route: &[[u8; ROUTE_BYTES]], position: usize, arrivals: &Arrivals, weights: &mut [f32]) {
        let first_expert = self.first_expert() as i64;
        let top_k = self.handle.top_k;
        let own = position * top_k..(position + 1) * top_k;
        for [a, b, c, d, w, x, y, z] in route {
            let expert = i64::from(i32::from_ne_bytes([*a, *b, *c, *d])) - first_expert;
            let Ok(expert) = usize::try_from(expert) else { continue };
            if let Some(index) = own.clone().find(|index| arrivals.expert(*index) == Some(expert)) {
                let place = match self.handle.layout {
                    Layout::Flat => index,
                    Layout::ExpertMajor => arrivals.slots[index] as usize,
                };
                weights[place] = f32::from_ne_bytes([*w, *x, *y, *z]);
            }
        }
    }
}
