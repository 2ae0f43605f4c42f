//! `ncclEpCombine` in low-latency mode: every row goes back to its token's rank, which sums them in FP32, in the order of the
//! token's experts, with their weights (expert-major) or as they are (rank-major), and rounds once.

use std::sync::Arc;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::channel::{Channel, PIECE_BYTES};
use crate::check;
use crate::dtype::{self, TokenType};
use crate::ep::desc::{self, Tensor, invalid};
use crate::ep::ll::handle::{Handle, Routing};
use crate::ep::ll::limits;
use crate::ep::ll::slots::Regions;
use crate::ep::ll::staged::{Halves, Kept};
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::tensor_check;

const FUNCTION: &str = "ncclEpCombine";
/// Token, position among its experts, and expert of a row that goes back (i32 each).
const ENTRY_BYTES: usize = 12;
/// Number of a rank's rows in a piece (u32).
const COUNT_BYTES: usize = 4;

struct Combine {
    handle: Arc<Handle>,
    routing: Routing,
    token_type: TokenType,
    row_bytes: usize,
    input: Span,
    output: Span,
    /// Expert-major only.
    weights: Option<Span>,
    what: String,
    sent: Mutex<Option<Sent>>,
}

/// A row that goes back.
#[derive(Clone, Copy)]
struct Entry {
    token: i32,
    /// Which of the token's experts it is of.
    position: i32,
    expert: i32,
}

/// What the first half has read.
struct Sent {
    /// Number of the dispatch that brought the rows.
    number: u64,
    /// For each rank its rows, tokens ascending.
    of_rank: Vec<Vec<Entry>>,
    /// The rows, in the order of the entries.
    rows: Vec<Vec<u8>>,
}

/// Enqueues the operation, or its first half.
///
/// # Safety
///
/// The structures and descriptors are valid, the descriptors of a staged operation until it is completed, and the tensors' memory
/// until the stream has got there.
pub unsafe fn combine(
    handle: &Arc<Handle>,
    inputs: *const ncclEpCombineInputs_t,
    outputs: *const ncclEpCombineOutputs_t,
    config: *const ncclEpCombineConfig_t,
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
    let config = unsafe { desc::read_optional(config, FUNCTION) }?.unwrap_or_default();
    limits::check_forward(config.pass_direction, FUNCTION)?;
    desc::check_combine_recipe(config.quant_recipe, FUNCTION)?;
    for (pointer, name) in [(inputs.scales, "inputs.scales"), (inputs.topk_weights, "inputs.topk_weights")] {
        if !pointer.is_null() {
            return Err(invalid(format!("{FUNCTION}: {name} is given in low-latency mode")));
        }
    }
    handle.mode.refuse_staged(FUNCTION)?;
    shape.check_launch(handle.mode.sms, FUNCTION)?;
    let routing = handle.routing(FUNCTION)?;

    // SAFETY: passed on to the caller.
    let rows = unsafe { Tensor::require(inputs.tokens, &group.comm, FUNCTION, "inputs.tokens") }?;
    // SAFETY: passed on to the caller.
    let result = unsafe { Tensor::require(outputs.tokens, &group.comm, FUNCTION, "outputs.tokens") }?;
    let token_type =
        TokenType::from_nccl(rows.datatype).ok_or_else(|| rows.wrong("must be bfloat16, float16 or float32"))?;
    let regions = Regions::of(&shape);
    let hidden = result.matrix()?.1;
    rows.expect_shape(&[regions.number, regions.rows, hidden])?;
    limits::check_columns(&rows, hidden, limits::COLUMNS_OF_SLOT)?;
    if result.datatype != rows.datatype || result.shape[0] != routing.tokens {
        let text =
            format!("must have the type of inputs.tokens and the {} rows of UpdateHandle's topk_idx", routing.tokens);
        return Err(result.wrong(text));
    }
    for tensor in [&rows, &result] {
        tensor.expect_granule()?;
    }
    let row_bytes = hidden * token_type.size();
    if row_bytes > group.max_token_bytes {
        let text = format!("has rows of {row_bytes} bytes, the group's max_token_bytes is {}", group.max_token_bytes);
        return Err(rows.wrong(text).breaks(Rule::RowLimit));
    }
    if !limits::can_sum(row_bytes) {
        return Err(rows.wrong("has rows of more than 31744 bytes, which the kernels cannot sum"));
    }
    let mut kept =
        vec![Kept::new(inputs.tokens, "inputs.tokens", &rows), Kept::new(outputs.tokens, "outputs.tokens", &result)];
    let weights = if shape.rank_major {
        if !outputs.topk_weights.is_null() {
            let text = "outputs.topk_weights is given with the rank-major layout, whose rows are summed as they are";
            return Err(invalid(format!("{FUNCTION}: {text}")));
        }
        None
    } else {
        // SAFETY: passed on to the caller.
        let weights = unsafe { Tensor::require(outputs.topk_weights, &group.comm, FUNCTION, "outputs.topk_weights") }?;
        weights.expect_float()?;
        weights.expect_shape(&[routing.tokens, shape.top_k])?;
        kept.push(Kept::new(outputs.topk_weights, "outputs.topk_weights", &weights));
        Some(weights.span)
    };
    let what = format!(
        "{FUNCTION}({}, hidden={hidden}, datatype={}, num_topk={})",
        if shape.rank_major { "rank-major" } else { "expert-major" },
        dtype::name(rows.datatype),
        shape.top_k,
    );
    let operation = Arc::new(Combine {
        handle: Arc::clone(handle),
        routing,
        token_type,
        row_bytes,
        input: rows.span,
        output: result.span,
        weights,
        what,
        sent: Mutex::default(),
    });
    let kept = (config.send_only != 0).then_some(kept);
    handle.mode.start(&group.line, stream, handle.address(), |s| &s.combines, operation, kept)
}

/// Adds a row times its weight to the sums: one rounding each, as kernels contract the two operations.
fn add_weighted(
    token_type: TokenType,
    row: &[u8],
    weight: f32,
    wide: &mut [f32],
    scratch: &mut [f32],
    sums: &mut [f32],
) {
    wide.fill(0.0);
    token_type.add(wide, scratch, row);
    for (sum, value) in sums.iter_mut().zip(&*wide) {
        *sum = value.mul_add(weight, *sum);
    }
}

impl Halves for Combine {
    fn function(&self) -> &'static str {
        FUNCTION
    }

    fn send(&self) -> Outcome<()> {
        let shape = &self.handle.memory.shape;
        let regions = Regions::of(shape);
        let arrivals = self.handle.memory.arrivals(regions.number * regions.rows, FUNCTION)?;
        let used = || arrivals.slots.iter().filter_map(|slot| usize::try_from(*slot).ok());
        tensor_check::written(&format!("{FUNCTION}: inputs.tokens"), &self.input, self.row_bytes, used())?;
        let first_expert = self.handle.group.comm.rank * (shape.experts / shape.ranks);
        let mut sent = Sent { number: arrivals.number, of_rank: Vec::new(), rows: Vec::new() };
        for tokens in &arrivals.of_rank {
            let (mut entries, mut rows) = (Vec::new(), Vec::new());
            for index in tokens.clone() {
                let slots = arrivals.slots[index * shape.top_k..][..shape.top_k].iter().enumerate();
                for (position, slot) in slots.filter_map(|(k, slot)| Some((k, usize::try_from(*slot).ok()?))) {
                    // A rank-major row stands for all of the token's experts on this rank.
                    let expert = first_expert + if shape.rank_major { 0 } else { slot / regions.rows };
                    entries.push(Entry {
                        token: arrivals.tokens[index],
                        position: position as i32,
                        expert: expert as i32,
                    });
                    rows.extend(self.input.view(slot * self.row_bytes, self.row_bytes));
                }
            }
            sent.of_rank.push(entries);
            sent.rows.push(rows);
        }
        *self.sent.lock() = Some(sent);
        Ok(())
    }

    fn receive(&self, channel: &mut Channel) -> Outcome<()> {
        let sent = self.sent.lock().take();
        let sent = sent.ok_or_else(|| Fault::nccl(ncclInternalError, format!("{FUNCTION}: nothing was sent")))?;
        let what = format!("{} of the rows of operation {}", self.what, sent.number);
        let (shape, tokens) = (&self.handle.memory.shape, self.routing.tokens);
        let top_k = shape.top_k;
        let experts = self.routing.experts(shape, FUNCTION)?;
        let weights = self.weights(&experts)?;
        let columns = self.row_bytes / self.token_type.size();
        let (mut sums, mut wide, mut scratch) = (vec![0f32; columns], vec![0f32; columns], vec![0f32; columns]);
        let mut row = vec![0u8; self.row_bytes];
        // Each rank may have to return every row of the piece to every rank.
        let piece = (PIECE_BYTES / (shape.ranks * top_k * (self.row_bytes + ENTRY_BYTES))).max(1);
        let mut next = vec![0; shape.ranks];
        let mut first = 0;
        loop {
            self.offer(channel, &what, &sent, &mut next, first + piece)?;
            let offers = (0..shape.ranks).map(|rank| channel.offer(rank)).collect::<Outcome<Vec<_>>>()?;
            let most = offers.iter().map(|offer| offer.args[0] as usize).max().unwrap_or(0);
            let mut rows: Vec<Option<(i32, &[u8])>> = vec![None; piece * top_k];
            for offer in &offers {
                for (entry, row) in self.returned(offer.bytes, channel.rank()) {
                    let place =
                        (entry.token as usize).checked_sub(first).map(|token| token * top_k + entry.position as usize);
                    match place.and_then(|place| rows.get_mut(place)) {
                        Some(there) if (entry.token as usize) < tokens => *there = Some((entry.expert, row)),
                        _ => self.routing_changed(entry.token as usize, entry.expert)?,
                    }
                }
            }
            for token in first.min(tokens)..(first + piece).min(tokens) {
                sums.fill(0.0);
                let rows = &rows[(token - first) * top_k..][..top_k];
                for (k, expert) in self.expected(&experts[token * top_k..][..top_k]).enumerate() {
                    match (expert, rows[k]) {
                        (None, None) => {}
                        (Some(expert), Some((from, row))) if self.is_of(expert, from) => {
                            let weight = weights.get(token * top_k + k).copied().unwrap_or(1.0);
                            add_weighted(self.token_type, row, weight, &mut wide, &mut scratch, &mut sums);
                        }
                        (expert, _) => self.routing_changed(token, expert.unwrap_or(-1))?,
                    }
                }
                self.token_type.store(&sums, &mut row);
                self.output.write(token * self.row_bytes, &row);
            }
            first += piece;
            if first >= most {
                return Ok(());
            }
        }
    }

    fn spans(&self) -> Vec<Span> {
        [self.input, self.output, self.routing.span, self.handle.memory.span].into_iter().chain(self.weights).collect()
    }
}

impl Combine {
    /// The weights as they are now; none with the rank-major layout.
    fn weights(&self, experts: &[i32]) -> Outcome<Vec<f32>> {
        let Some(weights) = &self.weights else { return Ok(Vec::new()) };
        let used = experts.iter().enumerate().filter(|(_, expert)| **expert >= 0).map(|(index, _)| index);
        tensor_check::written(&format!("{FUNCTION}: outputs.topk_weights"), weights, 4, used)?;
        let bytes = weights.view(0, experts.len() * 4).as_chunks::<4>().0;
        Ok(bytes.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
    }

    /// For each of a token's experts, the one whose row comes back in its place: with the rank-major layout the first on a rank
    /// stands for the others there.
    fn expected(&self, experts: &[i32]) -> impl Iterator<Item = Option<i32>> {
        let shape = &self.handle.memory.shape;
        let local = (shape.experts / shape.ranks) as i32;
        let rank_major = shape.rank_major;
        experts.iter().enumerate().map(move |(k, expert)| {
            let same_rank = |before: &&i32| **before >= 0 && *before / local == expert / local;
            let is_expected = *expert >= 0 && !(rank_major && experts[..k].iter().any(|before| same_rank(&before)));
            is_expected.then_some(*expert)
        })
    }

    /// Whether a row that came from expert `from` is one of `expert`.
    fn is_of(&self, expert: i32, from: i32) -> bool {
        let shape = &self.handle.memory.shape;
        let local = (shape.experts / shape.ranks) as i32;
        if shape.rank_major { expert / local == from / local } else { expert == from }
    }

    /// Offers each rank those of its rows that are of tokens before `end` and come next.
    fn offer(&self, channel: &mut Channel, what: &str, sent: &Sent, next: &mut [usize], end: usize) -> Outcome<()> {
        let ranges: Vec<_> = sent
            .of_rank
            .iter()
            .zip(next)
            .map(|(entries, next)| {
                let first = *next;
                *next += entries[first..].iter().take_while(|entry| (entry.token as usize) < end).count();
                first..*next
            })
            .collect();
        let all: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let head = ranges.len() * COUNT_BYTES;
        let bytes = head + all * (ENTRY_BYTES + self.row_bytes);
        let (counts, rest) = channel.stage(bytes)?.split_at_mut(head);
        for (there, range) in counts.as_chunks_mut::<COUNT_BYTES>().0.iter_mut().zip(&ranges) {
            *there = (range.len() as u32).to_ne_bytes();
        }
        let (there, mut rows) = rest.split_at_mut(all * ENTRY_BYTES);
        let entries = sent.of_rank.iter().zip(&ranges).flat_map(|(entries, range)| &entries[range.clone()]);
        for (there, Entry { token, position, expert }) in there.as_chunks_mut::<ENTRY_BYTES>().0.iter_mut().zip(entries)
        {
            there.copy_from_slice([*token, *position, *expert].map(i32::to_ne_bytes).as_flattened());
        }
        for (own, range) in sent.rows.iter().zip(&ranges) {
            let own = &own[range.start * self.row_bytes..range.end * self.row_bytes];
            let (there, behind) = rows.split_at_mut(own.len());
            there.copy_from_slice(own);
            rows = behind;
        }
        channel.exchange(what, [self.routing.tokens as u64, 0, 0, 0], bytes)
    }

    /// What a peer gives back to `rank` in a piece.
    fn returned<'a>(&self, bytes: &'a [u8], rank: usize) -> impl Iterator<Item = (Entry, &'a [u8])> {
        let (counts, rest) = bytes.split_at(self.handle.memory.shape.ranks * COUNT_BYTES);
        let counts: Vec<usize> =
            counts.as_chunks::<COUNT_BYTES>().0.iter().map(|count| u32::from_ne_bytes(*count) as usize).collect();
        let (all, before): (usize, usize) = (counts.iter().sum(), counts[..rank].iter().sum());
        let (entries, rows) = rest.split_at(all * ENTRY_BYTES);
        let entries = &entries.as_chunks::<ENTRY_BYTES>().0[before..][..counts[rank]];
        let rows = rows.chunks_exact(self.row_bytes).skip(before);
        entries.iter().zip(rows).map(|(entry, row)| {
            let [token, position, expert] =
                [0, 4, 8].map(|at| i32::from_ne_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]));
            (Entry { token, position, expert }, row)
        })
    }

    fn routing_changed(&self, token: usize, expert: i32) -> Outcome<()> {
        let text = format!(
            "{}: topk_idx of token {token} is not what the dispatch before it read (expert {expert}): keep it until combine is done",
            self.what
        );
        check::breach(Rule::RoutingChanged, text)
    }
}
