//! `ncclEpCombine`: expert outputs travel back and are summed.
//!
//! Two levels, as NCCL EP does it within one load/store domain: the expert's rank sums a token's rows over its local
//! experts in FP32 and rounds to the token type; the token's rank sums those partial rows over ranks in FP32 and rounds.
//! Over several domains there is a level between: the sum over each domain's ranks is rounded to the token type, and those
//! are summed in FP32 from the own domain downwards, the last one after the first.
//! With zero copy the first sum is written over the token's first row in the caller's window, where the peers read it.

use std::ops::Range;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::caller;
use crate::channel::{Channel, Offer, PIECE_BYTES};
use crate::check;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, SymmetricAddress, Tensor, invalid};
use crate::ep::dispatch::{check_limits, check_tokens};
use crate::ep::group::Layout;
use crate::ep::handle::{Arrivals, Handle};
use crate::ep::routing_header::RoutingHeader;
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::tensor_check;

const FUNCTION: &str = "ncclEpCombine";
/// Most rows of a token on a rank where duplicates are summed in place.
const MAX_DUPLICATES: usize = 8;
/// An expert (i32) and its gradient (f32).
const PAIR_BYTES: usize = 8;
/// First position (i32) and number (i32) of the tokens of one rank.
const BLOCK_BYTES: usize = 8;

struct Combine {
    handle: Arc<Handle>,
    /// Own tokens.
    tokens: usize,
    token_type: TokenType,
    row_bytes: usize,
    input: Span,
    input_rows: usize,
    /// With zero copy, where the input is on every rank.
    symmetric: Option<SymmetricAddress>,
    output: Span,
    /// BWD: gradients by row, gradients by token, index width.
    weights: Option<(Span, Span, usize)>,
    what: String,
}

/// Enqueues the operation.
///
/// # Safety
///
/// The structures and descriptors are valid, and the tensors' memory until the stream has got there.
pub unsafe fn combine(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpCombineInputs_t,
    outputs: *const ncclEpCombineOutputs_t,
    config: *const ncclEpCombineConfig_t,
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
    let config = unsafe { desc::read_optional(config, FUNCTION) }?.unwrap_or_default();
    let forward = desc::is_forward(config.pass_direction, FUNCTION)?;
    desc::check_combine_recipe(config.quant_recipe, FUNCTION)?;
    if !inputs.scales.is_null() {
        return Err(invalid(format!("{FUNCTION}: inputs.scales is given without a quant_recipe")));
    }
    check_limits(&handle, FUNCTION)?;

    // SAFETY: passed on to the caller.
    let rows = unsafe { Tensor::require(inputs.tokens, &group.comm, FUNCTION, "inputs.tokens") }?;
    // SAFETY: passed on to the caller.
    let result = unsafe { Tensor::require(outputs.tokens, &group.comm, FUNCTION, "outputs.tokens") }?;
    let (input_rows, row_bytes, token_type) = check_tokens(&rows)?;
    let (tokens, result_bytes, result_type) = check_tokens(&result)?;
    if !rows.shape[1].is_multiple_of(8) {
        return Err(rows.wrong("must have a multiple of 8 columns"));
    }
    if row_bytes > group.max_token_bytes {
        let text = format!("has rows of {row_bytes} bytes, the group's max_token_bytes is {}", group.max_token_bytes);
        return Err(rows.wrong(text).breaks(Rule::RowLimit));
    }
    if (result_bytes, result_type) != (row_bytes, token_type) {
        let text = format!("must have the type and width of inputs.tokens, {}", rows.describe());
        return Err(result.wrong(text));
    }
    result.expect_most_rows(group.max_tokens)?;
    let weights = if forward {
        if !inputs.topk_weights.is_null() {
            return Err(invalid(format!("{FUNCTION}: inputs.topk_weights is given in the forward pass")));
        }
        None
    } else {
        // SAFETY: passed on to the caller.
        let by_row = unsafe { Tensor::require(inputs.topk_weights, &group.comm, FUNCTION, "inputs.topk_weights") }?;
        // SAFETY: passed on to the caller.
        let by_token = unsafe { Tensor::require(outputs.topk_weights, &group.comm, FUNCTION, "outputs.topk_weights") }?;
        by_row.expect_float()?;
        by_token.expect_float()?;
        if handle.layout == Layout::Flat {
            if by_row.matrix()? != (input_rows, handle.top_k) {
                return Err(by_row.wrong(format!("must be [{input_rows}, {}]", handle.top_k)));
            }
        } else if by_row.vector()? != input_rows {
            return Err(by_row.wrong(format!("must have the {input_rows} rows of inputs.tokens")));
        }
        if !group.eager && input_rows > group.capacity {
            let text = format!("has more than max_recv_tokens_per_rank = {} rows", group.capacity);
            return Err(rows.wrong(text).breaks(Rule::RowLimit));
        }
        if by_token.matrix()? != (tokens, handle.top_k) {
            return Err(by_token.wrong(format!("must be [{tokens}, {}]", handle.top_k)));
        }
        Some((by_row.span, by_token.span))
    };
    let prepared = handle.tokens_or(tokens);
    if tokens != prepared {
        return Err(result.wrong(format!("must have the {prepared} rows of UpdateHandle's topk_idx")));
    }
    let symmetric = if group.zero_copy { Some(rows.expect_window(&group.comm)?) } else { None };
    let width = handle.prepared.lock().index_width;
    let what = format!(
        "{FUNCTION}(pass={}, hidden={}, datatype={}, num_topk={}{})",
        if forward { "FWD" } else { "BWD" },
        rows.shape[1],
        dtype::name(rows.datatype),
        handle.top_k,
        symmetric.as_ref().map_or_else(String::new, |place| format!(", {place}")),
    );
    let combine = Combine {
        handle: Arc::clone(&handle),
        tokens,
        token_type,
        row_bytes,
        input: rows.span,
        input_rows,
        symmetric,
        output: result.span,
        weights: weights.map(|(by_row, by_token)| (by_row, by_token, width)),
        what,
    };
    group.line.enqueue(stream, |s| &s.combines, &combine.spans(), move |channel| combine.run(channel))?;
    Ok(())
}

/// What a rank offers of one piece: blocks by source rank, then a row for each of their tokens, then pairs.
struct Partials<'a> {
    first_position: i64,
    count: usize,
    rows: &'a [u8],
    pairs: &'a [[u8; PAIR_BYTES]],
}

/// The ranks of each domain, in the order in which `rank` sums them: its own, those before it, then those behind from the last.
fn domains_from(rank: usize, ranks: usize, size: usize) -> Vec<Range<usize>> {
    let (own, count) = (rank / size, ranks / size);
    (0..count).map(|back| (own + count - back) % count).map(|domain| domain * size..(domain + 1) * size).collect()
}

impl Combine {
    fn run(&self, channel: &mut Channel) -> Outcome<()> {
        let arrivals = Arrivals::read(&self.handle, FUNCTION)?;
        self.check(&arrivals)?;
        let mut header = RoutingHeader::read(&self.handle.memory);
        let sound = header.combine(FUNCTION, caller::is_forward(self.weights.is_none()));
        header.write(&self.handle.memory);
        sound?;
        let what = header.name(&self.what);
        let (ranks, group) = (channel.ranks(), &self.handle.group);
        let memory = &self.handle.memory;
        let source_map = memory.read_i32(memory.layout.source_map, self.tokens * ranks);
        let token_map = memory.read_i32(memory.layout.token_map, ranks * group.max_tokens);
        let windows = match &self.symmetric {
            Some(symmetric) => (0..ranks).map(|rank| symmetric.on(rank)).collect::<Outcome<Vec<_>>>()?,
            None => Vec::new(),
        };
        let columns = self.row_bytes / self.token_type.size();
        let (mut sums, mut totals, mut scratch) = (vec![0f32; columns], vec![0f32; columns], vec![0f32; columns]);
        let mut row = vec![0u8; self.row_bytes];
        let domains = domains_from(channel.rank(), ranks, group.domain);
        // Each rank may have to return every token of the piece to every rank.
        let piece = (PIECE_BYTES / (ranks * (self.head_bytes() + self.pair_bytes()))).max(1);
        let mut first = 0;
        loop {
            let range = first..(first + piece).min(group.max_tokens);
            self.offer(channel, &what, &arrivals, &token_map, range.clone())?;
            let offers = (0..ranks).map(|rank| channel.offer(rank)).collect::<Outcome<Vec<_>>>()?;
            let most = offers.iter().map(|offer| offer.args[1] as usize).max().unwrap_or(0);
            let partials: Vec<_> = offers.iter().map(|offer| self.partials(offer, channel.rank(), ranks)).collect();
            for token in range.start..range.end.min(self.tokens) {
                totals.fill(0.0);
                for domain in &domains {
                    sums.fill(0.0);
                    for rank in domain.clone() {
                        let (partials, position) = (&partials[rank], source_map[token * ranks + rank]);
                        if position == -1 {
                            continue;
                        }
                        let index = i64::from(position) - partials.first_position;
                        let index = usize::try_from(index).ok().filter(|index| *index < partials.count);
                        let index = index.ok_or_else(|| self.stray(token, rank, position, offers[rank].args[0]))?;
                        let partial = if windows.is_empty() {
                            &partials.rows[index * self.row_bytes..][..self.row_bytes]
                        } else {
                            self.in_window(&windows, rank, partials.rows.as_chunks::<4>().0[index])?
                        };
                        self.token_type.add(&mut sums, &mut scratch, partial);
                    }
                    if domains.len() == 1 {
                        std::mem::swap(&mut sums, &mut totals);
                    } else {
                        self.token_type.store(&sums, &mut row);
                        self.token_type.add(&mut totals, &mut scratch, &row);
                    }
                }
                self.token_type.store(&totals, &mut row);
                self.output.write(token * self.row_bytes, &row);
            }
            self.return_gradients(range.start..range.end.min(self.tokens), &source_map, &partials);
            first += piece;
            if first >= most {
                break;
            }
        }
        if self.symmetric.is_some() {
            // The peers' next work on their windows waits until all have read them.
            channel.exchange(&format!("{}: rows read", self.what), [0; 4], 0)?;
        }
        Ok(())
    }

    /// A row of `rank`'s window.
    fn in_window<'a>(&self, windows: &'a [Span], rank: usize, row: [u8; 4]) -> Outcome<&'a [u8]> {
        let start = i32::from_ne_bytes(row) as usize * self.row_bytes;
        if start + self.row_bytes > windows[rank].byte_len() {
            let text = format!("{}: the window of rank {rank} is too small for its rows", self.what);
            return Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidArgument, text).breaks(Rule::WindowBounds));
        }
        Ok(windows[rank].view(start, self.row_bytes))
    }

    /// BWD: writes the gradients of the weights of the own tokens in `range`.
    fn return_gradients(&self, range: Range<usize>, source_map: &[i32], partials: &[Partials<'_>]) {
        let Some((_, by_token, width)) = &self.weights else { return };
        if range.is_empty() {
            return;
        }
        let (top_k, group) = (self.handle.top_k, &self.handle.group);
        let ranks = partials.len();
        let local_experts = group.experts / ranks;
        let experts = self.handle.memory.read_topk(range.start * top_k, range.len() * top_k, *width, group.experts);
        let mut gradients = Vec::with_capacity(experts.len() * 4);
        for (index, expert) in experts.iter().enumerate() {
            let gradient = usize::try_from(*expert).ok().and_then(|expert| {
                let rank = expert / local_experts;
                let position = i64::from(source_map[(range.start + index / top_k) * ranks + rank]);
                let index = usize::try_from(position - partials[rank].first_position).ok()?;
                let wanted = (expert as i32).to_ne_bytes();
                let pairs = partials[rank].pairs.get(index * top_k..)?.get(..top_k)?;
                let pair = pairs.iter().find(|pair| pair[..4] == wanted)?;
                Some(f32::from_ne_bytes([pair[4], pair[5], pair[6], pair[7]]))
            });
            // A sum from zero, which turns -0 into 0 (seen on an H200).
            gradients.extend((0.0 + gradient.unwrap_or_default()).to_ne_bytes());
        }
        by_token.write(range.start * top_k * 4, &gradients);
    }

    /// What a peer offers rank `rank` of a piece.
    fn partials<'a>(&self, offer: &Offer<'a>, rank: usize, ranks: usize) -> Partials<'a> {
        let (blocks, rest) = offer.bytes.split_at(ranks * BLOCK_BYTES);
        let block = |rank: usize| {
            let [a, b, c, d, w, x, y, z] = blocks.as_chunks::<BLOCK_BYTES>().0[rank];
            (i64::from(i32::from_ne_bytes([a, b, c, d])), i32::from_ne_bytes([w, x, y, z]) as usize)
        };
        let before: usize = (0..rank).map(|rank| block(rank).1).sum();
        let all = before + (rank..ranks).map(|rank| block(rank).1).sum::<usize>();
        let (first_position, count) = block(rank);
        let (head, top_k) = (self.head_bytes(), self.handle.top_k);
        let (rows, pairs) = rest.split_at(all * head);
        let pairs = pairs.as_chunks::<PAIR_BYTES>().0;
        let pairs = if self.weights.is_some() { &pairs[before * top_k..][..count * top_k] } else { &[] };
        Partials { first_position, count, rows: &rows[before * head..][..count * head], pairs }
    }

    fn stray(&self, token: usize, rank: usize, position: i32, received: u64) -> Fault {
        let text = format!(
            "{}: handle_mem expects row {position} of rank {rank} for token {token}, which received {received} tokens: \
             the routing of another UpdateHandle",
            self.what
        );
        Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::HandleMemory)
    }

    /// Bytes of a token's row as it is offered: the partial sum, or with zero copy the number of the row that holds it.
    fn head_bytes(&self) -> usize {
        if self.symmetric.is_some() { size_of::<i32>() } else { self.row_bytes }
    }

    /// Bytes of a token's pairs.
    fn pair_bytes(&self) -> usize {
        if self.weights.is_some() { self.handle.top_k * PAIR_BYTES } else { 0 }
    }

    fn check(&self, arrivals: &Arrivals) -> Outcome<()> {
        if let Some(beyond) = arrivals.slots.iter().find(|slot| i64::from(**slot) >= self.input_rows as i64) {
            let text =
                format!("{}: inputs.tokens has {} rows, but the routing uses row {beyond}", self.what, self.input_rows);
            return Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidArgument, text).breaks(Rule::CombineRows));
        }
        let most = |slots: &[i32]| slots.iter().filter(|slot| **slot >= 0).count();
        let most = arrivals.slots.chunks_exact(self.handle.top_k).map(most).max().unwrap_or(0);
        if self.handle.group.duplicates && most > MAX_DUPLICATES {
            let text =
                format!("{}: a token has {most} rows on a rank, at most {MAX_DUPLICATES} can be summed", self.what);
            return Err(Fault::both(cudaErrorLaunchFailure, ncclUnhandledCudaError, text).breaks(Rule::RowLimit));
        }
        let used = || arrivals.slots.iter().filter_map(|slot| usize::try_from(*slot).ok());
        tensor_check::written(&format!("{FUNCTION}: inputs.tokens"), &self.input, self.row_bytes, used())?;
        if let Some((by_row, _, _)) = &self.weights {
            let width = if self.handle.layout == Layout::Flat { self.handle.top_k * 4 } else { 4 };
            tensor_check::written(&format!("{FUNCTION}: inputs.topk_weights"), by_row, width, used())?;
        }
        Ok(())
    }

    /// Offers for each received token whose row number on its rank is in `range` its partial row, or with zero copy the
    /// number of the row that holds it, and behind them in BWD `top_k` pairs (expert, gradient) a token.
    fn offer(
        &self,
        channel: &mut Channel,
        what: &str,
        arrivals: &Arrivals,
        token_map: &[i32],
        range: Range<usize>,
    ) -> Outcome<()> {
        let (ranks, top_k) = (channel.ranks(), self.handle.top_k);
        let blocks = token_map
            .chunks_exact(self.handle.group.max_tokens)
            .enumerate()
            .map(|(source, positions)| {
                let mut there = positions[range.clone()].iter().filter(|position| **position >= 0);
                let first = there.clone().next().map_or(0, |first| *first as usize);
                let count = there.clone().count();
                // UpdateHandle numbers a rank's tokens one after the other.
                let consecutive = there.all({
                    let mut next = first..;
                    move |position| next.next() == Some(*position as usize)
                });
                if consecutive && first + count <= arrivals.received {
                    return Ok(first..first + count);
                }
                let text = format!("{}: handle_mem holds no sound positions of rank {source}'s tokens", self.what);
                Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::HandleMemory))
            })
            .collect::<Outcome<Vec<Range<usize>>>>()?;
        let count: usize = blocks.iter().map(Range::len).sum();
        let (head, rows) = (ranks * BLOCK_BYTES, count * self.head_bytes());
        let bytes = head + rows + count * self.pair_bytes();
        let group = &self.handle.group;
        let first_expert = channel.rank() * (group.experts / ranks);
        let (table, rest) = channel.stage(bytes)?.split_at_mut(head);
        let (first, pairs) = rest.split_at_mut(rows);
        for (there, block) in table.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(&blocks) {
            there[..4].copy_from_slice(&(block.start as i32).to_ne_bytes());
            there[4..].copy_from_slice(&(block.len() as i32).to_ne_bytes());
        }
        let slots_of = || {
            blocks.iter().flat_map(|block| arrivals.slots[block.start * top_k..].chunks_exact(top_k).take(block.len()))
        };

        let columns = self.row_bytes / self.token_type.size();
        let mut sums = vec![0f32; columns];
        let mut scratch = vec![0f32; columns];
        let mut sum_rows = |slots: &[i32], partial: &mut [u8]| {
            sums.fill(0.0);
            for slot in slots.iter().filter_map(|slot| usize::try_from(*slot).ok()) {
                let row = self.input.view(slot * self.row_bytes, self.row_bytes);
                self.token_type.add(&mut sums, &mut scratch, row);
            }
            self.token_type.store(&sums, partial);
        };
        if self.symmetric.is_some() {
            let mut sum = vec![0u8; self.row_bytes];
            for (there, slots) in first.as_chunks_mut::<4>().0.iter_mut().zip(slots_of()) {
                if slots.get(1).is_some_and(|slot| *slot >= 0) {
                    sum_rows(slots, &mut sum);
                    self.input.write(slots[0] as usize * self.row_bytes, &sum);
                }
                *there = slots[0].to_ne_bytes();
            }
        } else {
            for (partial, slots) in first.chunks_exact_mut(self.row_bytes).zip(slots_of()) {
                sum_rows(slots, partial);
            }
        }
        if let Some((by_row, _, _)) = &self.weights {
            let flat = self.handle.layout == Layout::Flat;
            let indices = blocks.iter().flat_map(|block| block.start * top_k..block.end * top_k);
            for (pair, index) in pairs.as_chunks_mut::<PAIR_BYTES>().0.iter_mut().zip(indices) {
                // The flat layout's gradients lie by token and expert, the expert-major one's by row.
                let place = if flat { index } else { usize::try_from(arrivals.slots[index]).unwrap_or(0) };
                let (expert, gradient) = match arrivals.expert(index) {
                    Some(expert) => ((first_expert + expert) as i32, by_row.view(place * 4, 4)),
                    None => (-1, &[0; 4][..]),
                };
                pair[..4].copy_from_slice(&expert.to_ne_bytes());
                pair[4..].copy_from_slice(gradient);
            }
        }
        channel.exchange(what, [arrivals.received as u64, self.tokens as u64, 0, 0], bytes)
    }

    /// The memory that the operation uses.
    fn spans(&self) -> Vec<Span> {
        let weights = self.weights.iter().flat_map(|(by_row, by_token, _)| [*by_row, *by_token]);
        [self.input, self.output, self.handle.memory.span].into_iter().chain(weights).collect()
    }
}
