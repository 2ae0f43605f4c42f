//! `ncclEpUpdateHandle`: exchange of the routing map.

use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::batch;
use crate::channel::Channel;
use crate::check;
use crate::ep::desc::{self, Tensor, invalid};
use crate::ep::group::Layout;
use crate::ep::handle::{Handle, read_indices};
use crate::ep::memory_layout::TokenRows;
use crate::ep::routing::{Routing, Shape, route, route_duplicates};
use crate::ep::routing_header::{self, RoutingHeader};
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::tensor_check;

const FUNCTION: &str = "ncclEpUpdateHandle";

struct Update {
    handle: Arc<Handle>,
    topk: Tensor,
    tokens: usize,
    width: usize,
    counters: Option<Tensor>,
    offsets: Option<Tensor>,
    total: Option<Tensor>,
}

/// Enqueues the operation.
///
/// # Safety
///
/// The descriptors are valid, and their memory until the stream has got there.
pub unsafe fn update(
    handle: ncclEpHandle_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    let handle = Handle::resolve(handle, FUNCTION)?;
    let group = Arc::clone(&handle.group);
    let _use = group.enter(FUNCTION)?;
    batch::refuse(FUNCTION)?;
    // SAFETY: passed on to the caller.
    let info = unsafe { desc::read_optional(layout_info, FUNCTION) }?;
    // SAFETY: passed on to the caller.
    let topk = unsafe { Tensor::require(topk_idx, &group.comm, FUNCTION, "topk_idx") }?;
    let width = topk.index_width()?;
    let (tokens, columns) = topk.matrix()?;
    if columns != handle.top_k {
        return Err(topk.wrong(format!("must have num_topk = {} columns", handle.top_k)));
    }
    topk.expect_most_rows(group.max_tokens)?;
    let info = info.unwrap_or_default();
    let counter = |pointer: *mut ncclEpTensor_t, name: &str, length: usize| -> Outcome<Option<Tensor>> {
        // SAFETY: passed on to the caller.
        let Some(tensor) = (unsafe { Tensor::read(pointer, &group.comm, FUNCTION, name) })? else { return Ok(None) };
        tensor.index_width()?;
        if tensor.vector()? < length {
            return Err(tensor.wrong(format!("must have at least {length} elements")));
        }
        if !tensor.has_data {
            return Err(tensor.wrong("must be given by its data pointer, not by a window"));
        }
        Ok(Some(tensor))
    };
    let local_experts = group.experts / group.comm.ranks;
    let counters = counter(info.expert_counters, "layout_info.expert_counters", local_experts)?;
    let flat = handle.layout == Layout::Flat;
    if let Some(counters) = counters.as_ref().filter(|counters| flat && counters.datatype != ncclInt32) {
        return Err(counters.wrong("must be int32 with the flat layout"));
    }
    // The flat layout has no zones, and NCCL EP does not look at this then.
    let offsets = if flat { None } else { counter(info.expert_offsets, "layout_info.expert_offsets", local_experts)? };
    let total = counter(info.recv_total_counter, "layout_info.recv_total_counter", 1)?;
    let datatypes: Vec<_> = [&counters, &offsets, &total].into_iter().flatten().map(|tensor| tensor.datatype).collect();
    if datatypes.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(
            invalid(format!("{FUNCTION}: the counter tensors must share one data type")).breaks(Rule::TensorShape)
        );
    }
    check::stream_device(stream.device().ordinal, group.comm.device.ordinal)?;
    let mut prepared = handle.prepared.lock();
    let update = Update { handle: Arc::clone(&handle), topk, tokens, width, counters, offsets, total };
    group.line.enqueue(stream, |s| &s.updates, &update.spans(), move |channel| update.run(channel))?;
    prepared.tokens = Some(tokens);
    prepared.index_width = width;
    Ok(())
}

impl Update {
    /// The memory that the operation uses.
    fn spans(&self) -> Vec<Span> {
        let counters = [&self.counters, &self.offsets, &self.total];
        let counters = counters.into_iter().flatten().map(|tensor| tensor.span);
        [self.topk.span, self.handle.memory.span].into_iter().chain(counters).collect()
    }

    fn run(&self, channel: &mut Channel) -> Outcome<()> {
        let group = &self.handle.group;
        let top_k = self.handle.top_k;
        tensor_check::written(&self.topk.name, &self.topk.span, top_k * self.width, 0..self.tokens)?;
        let given = self.topk.span.view(0, self.tokens * top_k * self.width);
        let staged = channel.stage(self.tokens * top_k * 4)?;
        let targets = staged.as_chunks_mut::<4>().0;
        for (position, (there, index)) in targets.iter_mut().zip(read_indices(given, self.width)).enumerate() {
            if index >= group.experts as i64 {
                let text = format!(
                    "{FUNCTION}: topk_idx[{}, {}] is {index}, but there are {} experts",
                    position / top_k,
                    position % top_k,
                    group.experts
                );
                return Err(Fault::both(cudaErrorAssert, ncclInvalidArgument, text).breaks(Rule::ExpertIndex));
            }
            *there = (index.max(-1) as i32).to_ne_bytes();
        }
        self.handle.memory.span.write(self.handle.memory.layout.topk, given);

        // Where rows are written to the peers' windows, the zones of all ranks have to be known to each.
        let zones = if group.duplicates { format!(", alignment={}", self.handle.alignment) } else { String::new() };
        let what = format!("{FUNCTION}(num_topk={top_k}{zones})");
        channel.exchange(&what, [self.tokens as u64, 0, 0, 0], self.tokens * top_k * 4)?;
        let indices = (0..channel.ranks())
            .map(|rank| {
                let rows = channel.offer(rank)?.bytes.as_chunks::<4>().0;
                Ok(rows.iter().map(|value| i32::from_ne_bytes(*value)).collect())
            })
            .collect::<Outcome<Vec<Vec<i32>>>>()?;
        let number = channel.operation();
        let flat = self.handle.layout == Layout::Flat;
        let shape = Shape {
            ranks: channel.ranks(),
            rank: channel.rank(),
            experts: group.experts,
            max_tokens: group.max_tokens,
            top_k,
            capacity: group.capacity,
            rows: if flat { i32::MAX as usize } else { group.row_limit(self.handle.alignment) },
            alignment: self.handle.alignment,
            drop: group.drop,
        };
        let route = if group.duplicates && !flat { route_duplicates } else { route };
        let routing = route(&shape, &indices).map_err(|overflow| {
            let text = format!(
                "{FUNCTION}: receive buffer overflow on rank {}: {} rows ({} distinct tokens) are needed, \
                 max_recv_tokens_per_rank is {}",
                overflow.rank,
                if flat { overflow.tokens } else { overflow.rows },
                overflow.tokens,
                shape.capacity
            );
            Fault::both(cudaErrorLaunchFailure, ncclUnhandledCudaError, text).breaks(Rule::ReceiveOverflow)
        })?;
        self.keep(&routing);
        let mut header = RoutingHeader::read(&self.handle.memory);
        header.update(number, routing_header::digest(top_k, &indices));
        header.write(&self.handle.memory);
        self.publish(&routing, &shape);
        Ok(())
    }

    /// Stores the maps in handle memory.
    fn keep(&self, routing: &Routing) {
        let memory = &self.handle.memory;
        let layout = &memory.layout;
        memory.write_i32(layout.recv_count, &[routing.received as i32]);
        memory.write_i32(layout.source_map, &routing.source_map);
        if self.handle.layout == Layout::ExpertMajor {
            memory.write_i32(layout.counts, &routing.counts);
            memory.write_i64(layout.bases, &routing.bases);
        }
        match layout.slots {
            TokenRows::Rows(offset) => memory.write_i32(offset, &routing.slots),
            TokenRows::Experts(offset) => memory.span.write(offset, &self.experts(routing)),
        }
        memory.write_i32(layout.token_map, &routing.token_map);
    }

    /// For each received token, which local experts it has a row of.
    fn experts(&self, routing: &Routing) -> Vec<u8> {
        let local_experts = routing.counts.len();
        let mut flags = vec![0u8; routing.received * local_experts];
        let tokens = routing.slots.chunks_exact(self.handle.top_k);
        for (flags, slots) in flags.chunks_exact_mut(local_experts).zip(tokens) {
            for slot in slots.iter().filter(|slot| **slot >= 0) {
                flags[routing.bases.partition_point(|base| *base <= i64::from(*slot)) - 1] = 1;
            }
        }
        flags
    }

    /// Writes the caller's counters.
    fn publish(&self, routing: &Routing, shape: &Shape) {
        let write = |tensor: &Option<Tensor>, values: &mut dyn Iterator<Item = i64>| {
            let Some(tensor) = tensor else { return };
            let bytes: Vec<u8> = match tensor.datatype {
                ncclInt32 => values.flat_map(|value| (value as i32).to_ne_bytes()).collect(),
                _ => values.flat_map(i64::to_ne_bytes).collect(),
            };
            tensor.span.write(0, &bytes);
        };
        if self.handle.layout == Layout::Flat {
            let local_experts = shape.local_experts();
            let flags = self.experts(routing);
            let count = |expert| flags.iter().skip(expert).step_by(local_experts).map(|flag| i64::from(*flag)).sum();
            write(&self.counters, &mut (0..local_experts).map(count));
            write(&self.total, &mut std::iter::once(routing.arriving as i64));
            return;
        }
        let zones = || (0..shape.local_experts()).map(|expert| routing.published(expert, shape.rows));
        write(&self.counters, &mut zones().map(|(count, _)| count));
        write(&self.offsets, &mut zones().map(|(_, base)| base));
        write(&self.total, &mut std::iter::once(routing.total()));
    }
}
