//! `ncclEpCombine`: expert outputs travel back and are summed.
//!
//! Two levels, as NCCL EP does it within one load/store domain: the expert's rank sums a token's rows over its local
//! experts in FP32 and rounds to the token type; the token's rank sums those partial rows over ranks in FP32 and rounds.

use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::channel::Channel;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, Tensor, invalid};
use crate::ep::dispatch::{check_limits, check_tokens};
use crate::ep::handle::{Arrivals, Handle};
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::stats;
use crate::stream::Stream;

const FUNCTION: &str = "ncclEpCombine";

struct Combine {
    handle: Arc<Handle>,
    /// Own tokens.
    tokens: usize,
    token_type: TokenType,
    row_bytes: usize,
    input: Span,
    input_rows: usize,
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
    // SAFETY: passed on to the caller.
    let inputs = unsafe { desc::read_struct(inputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let outputs = unsafe { desc::read_struct(outputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let config = unsafe { desc::read_optional(config, FUNCTION) }?.unwrap_or_default();
    let forward = match config.pass_direction {
        NCCL_EP_FWD_PASS => true,
        NCCL_EP_BWD_PASS => false,
        other => return Err(invalid(format!("{FUNCTION}: pass_direction {other} is unknown"))),
    };
    match config.quant_recipe {
        NCCL_EP_COMB_QUANT_NONE => {}
        NCCL_EP_COMB_QUANT_NVFP4 => {
            let text =
                format!("{FUNCTION}: quant_recipe NVFP4 needs compute capability 10.0, the host runtime has 9.0");
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        other => return Err(invalid(format!("{FUNCTION}: quant_recipe {other} is unknown"))),
    }
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
        return Err(rows.wrong(text));
    }
    if (result_bytes, result_type) != (row_bytes, token_type) {
        let text = format!("must have the type and width of inputs.tokens, {}", rows.describe());
        return Err(result.wrong(text));
    }
    if tokens > group.max_tokens {
        return Err(result.wrong(format!("has more than max_dispatch_tokens_per_rank = {} rows", group.max_tokens)));
    }
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
        if by_row.vector()? != input_rows {
            return Err(by_row.wrong(format!("must have the {input_rows} rows of inputs.tokens")));
        }
        if !group.eager && input_rows > group.capacity {
            return Err(rows.wrong(format!("has more than max_recv_tokens_per_rank = {} rows", group.capacity)));
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
    let width = handle.prepared.lock().index_width;
    let what = format!(
        "{FUNCTION}(pass={}, hidden={}, datatype={}, num_topk={})",
        if forward { "FWD" } else { "BWD" },
        rows.shape[1],
        dtype::name(rows.datatype),
        handle.top_k,
    );
    let combine = Combine {
        handle: Arc::clone(&handle),
        tokens,
        token_type,
        row_bytes,
        input: rows.span,
        input_rows,
        output: result.span,
        weights: weights.map(|(by_row, by_token)| (by_row, by_token, width)),
        what,
    };
    group.line.enqueue(stream, move |channel| combine.run(channel))?;
    stats::count(|s| &s.combines);
    Ok(())
}

impl Combine {
    fn run(&self, channel: &mut Channel) -> Outcome<()> {
        let (received, bytes) = self.stage(channel)?;
        channel.exchange(&self.what, [received as u64, 0, 0, 0], bytes)?;

        let handle = &self.handle;
        let (ranks, top_k) = (channel.ranks(), handle.top_k);
        let memory = &handle.memory;
        let source_map = memory.read_i32(memory.layout.source_map, self.tokens * ranks);
        let offers = (0..ranks).map(|rank| channel.offer(rank)).collect::<Outcome<Vec<_>>>()?;
        let received: Vec<usize> = offers.iter().map(|offer| offer.args[0] as usize).collect();
        for (index, position) in source_map.iter().enumerate() {
            let (token, rank) = (index / ranks, index % ranks);
            if *position < -1 || (*position >= 0 && *position as usize >= received[rank]) {
                let text = format!(
                    "{}: handle_mem expects row {position} of rank {rank} for token {token}, which received {} tokens: \
                     the routing of another UpdateHandle",
                    self.what, received[rank]
                );
                return Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text));
            }
        }

        let columns = self.row_bytes / self.token_type.size();
        let mut sums = vec![0f32; columns];
        let mut scratch = vec![0f32; columns];
        let mut row = vec![0u8; self.row_bytes];
        for token in 0..self.tokens {
            sums.fill(0.0);
            for (offer, position) in offers.iter().zip(&source_map[token * ranks..][..ranks]) {
                if let Ok(position) = usize::try_from(*position) {
                    let partial = &offer.bytes[position * self.row_bytes..][..self.row_bytes];
                    self.token_type.add(&mut sums, &mut scratch, partial);
                }
            }
            self.token_type.store(&sums, &mut row);
            self.output.write(token * self.row_bytes, &row);
        }

        if let Some((_, by_token, width)) = &self.weights {
            let experts = memory.read_topk(self.tokens * top_k, *width, handle.group.experts);
            let local_experts = handle.group.experts / ranks;
            let mut gradients = Vec::with_capacity(experts.len() * 4);
            for (index, expert) in experts.iter().enumerate() {
                let gradient = usize::try_from(*expert).ok().and_then(|expert| {
                    let rank = expert / local_experts;
                    let position = usize::try_from(source_map[index / top_k * ranks + rank]).ok()?;
                    let pairs = offers[rank].bytes[received[rank] * self.row_bytes..].as_chunks::<8>().0;
                    let wanted = (expert as i32).to_ne_bytes();
                    let pair = pairs[position * top_k..][..top_k].iter().find(|pair| pair[..4] == wanted)?;
                    Some([pair[4], pair[5], pair[6], pair[7]])
                });
                gradients.extend(gradient.unwrap_or_default());
            }
            by_token.write(0, &gradients);
        }
        Ok(())
    }

    /// Offers a partial row for each received token, and behind them in BWD `top_k` pairs (expert, gradient) a token.
    fn stage(&self, channel: &mut Channel) -> Outcome<(usize, usize)> {
        let top_k = self.handle.top_k;
        let arrivals = Arrivals::read(&self.handle, FUNCTION)?;
        if let Some(beyond) = arrivals.slots.iter().find(|slot| i64::from(**slot) >= self.input_rows as i64) {
            let text =
                format!("{}: inputs.tokens has {} rows, but the routing uses row {beyond}", self.what, self.input_rows);
            return Err(Fault::both(cudaErrorIllegalAddress, ncclInvalidArgument, text));
        }
        let first_expert = channel.rank() * arrivals.counts.len();
        let rows = arrivals.received * self.row_bytes;
        let bytes = rows + if self.weights.is_some() { arrivals.received * top_k * 8 } else { 0 };
        let staged = channel.stage(bytes)?;
        let (partials, pairs) = staged.split_at_mut(rows);

        let columns = self.row_bytes / self.token_type.size();
        let mut sums = vec![0f32; columns];
        let mut scratch = vec![0f32; columns];
        for (partial, slots) in partials.chunks_exact_mut(self.row_bytes).zip(arrivals.slots.chunks_exact(top_k)) {
            sums.fill(0.0);
            for slot in slots.iter().filter_map(|slot| usize::try_from(*slot).ok()) {
                let row = self.input.view(slot * self.row_bytes, self.row_bytes);
                self.token_type.add(&mut sums, &mut scratch, row);
            }
            self.token_type.store(&sums, partial);
        }
        if let Some((by_row, _, _)) = &self.weights {
            for (pair, slot) in pairs.as_chunks_mut::<8>().0.iter_mut().zip(&arrivals.slots) {
                let (expert, gradient) = match usize::try_from(*slot) {
                    Ok(row) => ((first_expert + arrivals.expert_of(*slot)) as i32, by_row.view(row * 4, 4)),
                    Err(_) => (-1, &[0; 4][..]),
                };
                pair[..4].copy_from_slice(&expert.to_ne_bytes());
                pair[4..].copy_from_slice(gradient);
            }
        }
        Ok((arrivals.received, bytes))
    }
}
