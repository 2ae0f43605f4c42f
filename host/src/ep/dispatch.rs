//! `ncclEpDispatch`: token rows travel to the ranks of their experts.

use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::channel::Channel;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, Tensor, invalid};
use crate::ep::group::unsupported;
use crate::ep::handle::{Arrivals, Handle, MAX_TOP_K};
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::stats;
use crate::stream::Stream;

const FUNCTION: &str = "ncclEpDispatch";
/// NCCL EP moves rows in pieces of this size.
pub const ROW_GRANULE: usize = 16;

struct Dispatch {
    handle: Arc<Handle>,
    /// Own tokens.
    tokens: usize,
    row_bytes: usize,
    input: Span,
    output: Span,
    /// FWD: own weights, received weights, index width.
    weights: Option<(Span, Span, usize)>,
    what: String,
}

/// What a token tensor of either direction must fulfil; gives rows and bytes of a row.
pub fn check_tokens(tensor: &Tensor) -> Outcome<(usize, usize, TokenType)> {
    let (rows, columns) = tensor.matrix()?;
    let Some(token_type) = TokenType::from_nccl(tensor.datatype) else {
        return Err(tensor.wrong("must be bfloat16, float16 or float32"));
    };
    let row_bytes = columns * token_type.size();
    if row_bytes == 0 || !row_bytes.is_multiple_of(ROW_GRANULE) {
        return Err(tensor.wrong(format!("must have rows of a positive multiple of {ROW_GRANULE} bytes")));
    }
    if !tensor.is_empty() && !tensor.span.address().is_multiple_of(ROW_GRANULE) {
        return Err(tensor.wrong(format!("must start at a multiple of {ROW_GRANULE} bytes")));
    }
    Ok((rows, row_bytes, token_type))
}

/// Limits of the kernels that NCCL EP would hit later, in a way that cannot be reported.
pub fn check_limits(handle: &Handle, function: &str) -> Outcome<()> {
    if !handle.group.experts.is_multiple_of(4) {
        return Err(invalid(format!("{function}: num_experts {} is not a multiple of 4", handle.group.experts)));
    }
    if handle.top_k > MAX_TOP_K {
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
    // SAFETY: passed on to the caller.
    let inputs = unsafe { desc::read_struct(inputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let outputs = unsafe { desc::read_struct(outputs, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let _ = unsafe { desc::read_optional(layout_info, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let config = unsafe { desc::read_optional(config, FUNCTION) }?.unwrap_or_default();
    let forward = match config.pass_direction {
        NCCL_EP_FWD_PASS => true,
        NCCL_EP_BWD_PASS => false,
        other => return Err(invalid(format!("{FUNCTION}: pass_direction {other} is unknown"))),
    };
    match config.quant_recipe {
        NCCL_EP_DISP_QUANT_NONE => {}
        NCCL_EP_DISP_QUANT_FWD => return Err(unsupported(format!("{FUNCTION}: quant_recipe FWD"))),
        other => return Err(invalid(format!("{FUNCTION}: quant_recipe {other} is not one of HT mode"))),
    }
    if !inputs.scales.is_null() || !outputs.scales.is_null() {
        return Err(invalid(format!("{FUNCTION}: scales are given without a quant_recipe")));
    }
    if !outputs.topk_idx.is_null() {
        return Err(invalid(format!("{FUNCTION}: outputs.topk_idx is given with the expert-major layout")));
    }
    check_limits(&handle, FUNCTION)?;

    // SAFETY: passed on to the caller.
    let tokens = unsafe { Tensor::require(inputs.tokens, &group.comm, FUNCTION, "inputs.tokens") }?;
    // SAFETY: passed on to the caller.
    let received = unsafe { Tensor::require(outputs.tokens, &group.comm, FUNCTION, "outputs.tokens") }?;
    let (rows, row_bytes, _) = check_tokens(&tokens)?;
    if row_bytes > group.max_token_bytes {
        let text = format!("has rows of {row_bytes} bytes, the group's max_token_bytes is {}", group.max_token_bytes);
        return Err(tokens.wrong(text));
    }
    if rows > group.max_tokens {
        return Err(tokens.wrong(format!("has more than max_dispatch_tokens_per_rank = {} rows", group.max_tokens)));
    }
    let (received_rows, _, _) = check_tokens(&received)?;
    if received.datatype != tokens.datatype || received.shape[1] != tokens.shape[1] {
        let text = format!("must have the type and width of inputs.tokens, {}", tokens.describe());
        return Err(received.wrong(text));
    }
    let (needed, limit) = if group.eager {
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
        // SAFETY: passed on to the caller.
        let own = unsafe { Tensor::require(inputs.topk_weights, &group.comm, FUNCTION, "inputs.topk_weights") }?;
        // SAFETY: passed on to the caller.
        let there = unsafe { Tensor::require(outputs.topk_weights, &group.comm, FUNCTION, "outputs.topk_weights") }?;
        own.expect_float()?;
        there.expect_float()?;
        if own.matrix()? != (rows, handle.top_k) {
            return Err(own.wrong(format!("must be [{rows}, {}]", handle.top_k)));
        }
        if there.vector()? < needed {
            return Err(there.wrong(format!("must have at least {limit} = {needed} elements")));
        }
        if there.is_empty() != received.is_empty() {
            return Err(there.wrong(format!("must be empty if and only if outputs.tokens {:?} is", received.shape)));
        }
        Some((own.span, there.span))
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
    let width = handle.prepared.lock().index_width;
    let what = format!(
        "{FUNCTION}(pass={}, hidden={}, datatype={}, num_topk={})",
        if forward { "FWD" } else { "BWD" },
        tokens.shape[1],
        dtype::name(tokens.datatype),
        handle.top_k,
    );
    let dispatch = Dispatch {
        handle: Arc::clone(&handle),
        tokens: rows,
        row_bytes,
        input: tokens.span,
        output: received.span,
        weights: weights.map(|(own, there)| (own, there, width)),
        what,
    };
    group.line.enqueue(stream, move |channel| dispatch.run(channel))?;
    stats::count(|s| &s.dispatches);
    Ok(())
}

impl Dispatch {
    fn run(&self, channel: &mut Channel) -> Outcome<()> {
        let bytes = self.stage(channel)?;
        channel.exchange(&self.what, [self.tokens as u64, 0, 0, 0], bytes)?;

        let group = &self.handle.group;
        let top_k = self.handle.top_k;
        let memory = &self.handle.memory;
        let arrivals = Arrivals::read(&self.handle, FUNCTION)?;
        let capacity = if group.eager { arrivals.total() } else { group.capacity };
        let token_map = memory.read_i32(memory.layout.token_map, channel.ranks() * group.max_tokens);
        if group.drop {
            self.output.fill(0, capacity * self.row_bytes, 0);
        }
        let first_expert = channel.rank() * arrivals.counts.len();
        let mut weights = vec![0f32; capacity];
        for rank in 0..channel.ranks() {
            let offer = channel.offer(rank)?;
            let tokens = offer.args[0] as usize;
            let (rows, routes) = offer.bytes.split_at(tokens * self.row_bytes);
            let positions = &token_map[rank * group.max_tokens..][..group.max_tokens];
            for (token, position) in positions.iter().enumerate() {
                let Ok(position) = usize::try_from(*position) else { continue };
                if token >= tokens || position >= arrivals.received {
                    return Err(self.stray(rank, tokens, token));
                }
                let slots = &arrivals.slots[position * top_k..][..top_k];
                let row = &rows[token * self.row_bytes..][..self.row_bytes];
                for slot in slots.iter().filter_map(|slot| usize::try_from(*slot).ok()) {
                    self.output.write(slot * self.row_bytes, row);
                }
                if self.weights.is_some() {
                    let route = &routes.as_chunks::<8>().0[token * top_k..][..top_k];
                    scatter_weights(route, slots, &arrivals, first_expert, &mut weights);
                }
            }
        }
        for padding in arrivals.padding(capacity) {
            self.output.fill(padding.start * self.row_bytes, padding.len() * self.row_bytes, 0);
        }
        if let Some((_, there, _)) = &self.weights {
            // Rows beyond the padded total keep what they held, except that DROP clears the whole buffer.
            let total = if group.drop { capacity } else { capacity.min(arrivals.total()) };
            let bytes: Vec<u8> = weights[..total].iter().flat_map(|weight| weight.to_ne_bytes()).collect();
            there.write(0, &bytes);
        }
        Ok(())
    }

    /// Offers the own rows, and behind them in FWD `top_k` pairs (expert, weight) a token.
    fn stage(&self, channel: &mut Channel) -> Outcome<usize> {
        let top_k = self.handle.top_k;
        let rows = self.tokens * self.row_bytes;
        let bytes = rows + if self.weights.is_some() { self.tokens * top_k * 8 } else { 0 };
        let staged = channel.stage(bytes)?;
        let (tokens, routes) = staged.split_at_mut(rows);
        self.input.read(0, tokens);
        if let Some((own, _, width)) = &self.weights {
            let count = self.tokens * top_k;
            let experts = self.handle.memory.read_topk(count, *width, self.handle.group.experts);
            let weights = own.view(0, count * 4).as_chunks::<4>().0;
            for ((pair, expert), weight) in routes.as_chunks_mut::<8>().0.iter_mut().zip(experts).zip(weights) {
                pair[..4].copy_from_slice(&expert.to_ne_bytes());
                pair[4..].copy_from_slice(weight);
            }
        }
        Ok(bytes)
    }

    fn stray(&self, rank: usize, tokens: usize, token: usize) -> Fault {
        let text = format!(
            "{}: handle_mem expects token {token} of rank {rank}, which dispatched {tokens} tokens: \
             the routing of another UpdateHandle",
            self.what
        );
        Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text)
    }
}

/// Puts a token's weights into the rows that it occupies; of duplicate experts the last weight counts.
fn scatter_weights(route: &[[u8; 8]], slots: &[i32], arrivals: &Arrivals, first_expert: usize, weights: &mut [f32]) {
    for [a, b, c, d, w, x, y, z] in route {
        let expert = i64::from(i32::from_ne_bytes([*a, *b, *c, *d])) - first_expert as i64;
        let Ok(expert) = usize::try_from(expert) else { continue };
        if expert >= arrivals.counts.len() {
            continue;
        }
        let zone = arrivals.bases[expert]..arrivals.bases[expert + 1];
        if let Some(slot) = slots.iter().find(|slot| zone.contains(&i64::from(**slot))) {
            weights[*slot as usize] = f32::from_ne_bytes([*w, *x, *y, *z]);
        }
    }
}
