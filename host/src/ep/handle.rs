//! EP handles: the small object over handle memory, and typed access to that memory.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::acting;
use crate::ep::desc::{Tensor, invalid};
use crate::ep::group::{Group, Layout, layout_of};
use crate::ep::memory_layout::{MemoryLayout, TokenRows};
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::{self, Span};
use crate::rule::Rule;
use crate::stats;

/// Largest top-k of the local-permute kernels.
pub const MAX_TOP_K: usize = 32;
/// Most local experts of the local-permute kernels.
const MAX_LOCAL_EXPERTS: usize = 256;
/// Most local experts where duplicates are written, and of the flat layout.
const MAX_DUPLICATE_EXPERTS: usize = 1024;
/// Most receive rows there: a row has 22 bits in a packed slot.
const MAX_DUPLICATE_ROWS: usize = 1 << 22;

/// What UpdateHandle leaves on the object; all other routing state is in handle memory.
#[derive(Clone, Copy, Debug)]
pub struct Prepared {
    /// Own tokens; unset on an object that saw no UpdateHandle.
    pub tokens: Option<usize>,
    /// Bytes of an index; an object that saw no UpdateHandle reads its memory as int64.
    pub index_width: usize,
}

/// A handle of an EP group.
#[derive(Debug)]
pub struct Handle {
    /// Its group.
    pub group: Arc<Group>,
    /// Experts per token.
    pub top_k: usize,
    /// How its receive buffers are laid out.
    pub layout: Layout,
    /// Zone padding in rows.
    pub alignment: usize,
    /// The routing state.
    pub memory: HandleMemory,
    /// State of the object itself.
    pub prepared: Mutex<Prepared>,
    owned: Option<usize>,
}

static HANDLES: LazyLock<Mutex<HashMap<usize, Arc<Handle>>>> = LazyLock::new(Mutex::default);

impl Handle {
    /// `ncclEpHandleMemSize`.
    pub fn memory_size(group: &Group, layout: ncclEpLayout_t, top_k: i32) -> Outcome<usize> {
        let layout = layout_of(layout, "ncclEpHandleMemSize")?;
        match usize::try_from(top_k) {
            Ok(top_k) if top_k > 0 => Ok(group.memory_layout(top_k, layout).total),
            _ => Err(invalid(format!("ncclEpHandleMemSize: num_topk is {top_k}"))),
        }
    }

    /// `ncclEpInitHandle`; without `tensor` the memory is allocated here.
    pub fn init(
        group: &Arc<Group>,
        layout: ncclEpLayout_t,
        alignment: usize,
        top_k: i32,
        tensor: Option<&Tensor>,
    ) -> Outcome<usize> {
        let function = "ncclEpInitHandle";
        let _use = group.enter(function)?;
        let layout = layout_of(layout, function)?;
        let expert_major = layout == Layout::ExpertMajor;
        if expert_major && alignment > 1 && !alignment.is_power_of_two() {
            let text = format!("{function}: dispatch_output_per_expert_alignment {alignment} is not a power of two");
            return Err(invalid(text));
        }
        let top_k = usize::try_from(top_k).ok().filter(|k| *k > 0).ok_or_else(|| {
            Fault::nccl(ncclInvalidUsage, format!("{function}: num_topk {top_k}; it must be positive in HT mode"))
        })?;
        if group.max_top_k > 0 && top_k > group.max_top_k {
            let text = format!("{function}: num_topk {top_k} is larger than the group's {}", group.max_top_k);
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        if expert_major && group.eager && group.max_top_k == 0 {
            let text = format!("{function}: eager mode with the expert-major layout needs the group's num_topk");
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        let local_experts = group.experts / group.comm.ranks;
        let most = if group.duplicates || !expert_major { MAX_DUPLICATE_EXPERTS } else { MAX_LOCAL_EXPERTS };
        if local_experts > most {
            let text = format!("{function}: {local_experts} experts a rank, at most {most} are possible");
            return Err(invalid(text));
        }
        if expert_major && group.duplicates {
            check_duplicates(group, local_experts, top_k)?;
        }
        let parts = group.memory_layout(top_k, layout);
        let (span, owned) = match tensor {
            Some(tensor) => {
                if tensor.vector()? < parts.total || tensor.datatype != ncclUint8 {
                    return Err(tensor.wrong(format!("must be uint8 of at least [{}]", parts.total)));
                }
                tensor.expect_granule()?;
                (tensor.span, None)
            }
            None => {
                graph::refuse_unsafe("ncclEpInitHandle: an allocation of handle memory")?;
                let base = allocate(group, parts.total)?;
                // SAFETY: the memory was just allocated with this size and lives until the handle is destroyed.
                (unsafe { Span::new(base, parts.total) }?, Some(base as usize))
            }
        };
        let handle = Arc::new(Self {
            group: Arc::clone(group),
            top_k,
            layout,
            // The flat layout has no zones to pad.
            alignment: if expert_major { alignment } else { 1 },
            memory: HandleMemory { span, layout: parts },
            prepared: Mutex::new(Prepared { tokens: None, index_width: 8 }),
            owned,
        });
        let address = Arc::as_ptr(&handle) as usize;
        group.handles.fetch_add(1, Ordering::Relaxed);
        HANDLES.lock().insert(address, handle);
        stats::count(|s| &s.handles_created);
        Ok(address)
    }

    /// The handle that a pointer names.
    pub fn resolve(handle: ncclEpHandle_t, function: &str) -> Outcome<Arc<Handle>> {
        let found = HANDLES.lock().get(&(handle as usize)).cloned();
        let found = found.ok_or_else(|| {
            invalid(format!("{function}: {handle:p} is not a live EP handle")).breaks(Rule::DestroyedObject)
        })?;
        acting::act_as(found.group.comm.rank);
        found.group.check_alive(function)?;
        found.group.check_comm(function)?;
        let name = |fault: Fault| Fault { text: format!("{function}: handle_mem: {}", fault.text), ..fault };
        found.memory.span.check_live().map_err(name)?;
        Ok(found)
    }

    /// `ncclEpHandleDestroy`.
    pub fn destroy(handle: ncclEpHandle_t) -> Outcome<()> {
        if handle.is_null() {
            return Ok(());
        }
        if HANDLES.lock().get(&(handle as usize)).is_some_and(|found| found.owned.is_some()) {
            graph::refuse_unsafe("ncclEpHandleDestroy: freeing handle memory")?;
        }
        let Some(found) = HANDLES.lock().remove(&(handle as usize)) else {
            let text = format!("ncclEpHandleDestroy: {handle:p} is not a live EP handle");
            return Err(invalid(text).breaks(Rule::DestroyedObject));
        };
        found.group.handles.fetch_sub(1, Ordering::Relaxed);
        acting::act_as(found.group.comm.rank);
        let _use = found.group.enter("ncclEpHandleDestroy")?;
        stats::count(|s| &s.handles_destroyed);
        if let Some(base) = found.owned {
            // Queued operations may still use the memory.
            found.group.comm.device.synchronize();
            free(&found.group, base);
        }
        found.group.check_alive("ncclEpHandleDestroy")
    }

    /// Own tokens: those of UpdateHandle, else as many as `rows` of the tensor at hand say.
    pub fn tokens_or(&self, rows: usize) -> usize {
        *self.prepared.lock().tokens.get_or_insert(rows)
    }
}

/// Limits of the kernels that write duplicates.
fn check_duplicates(group: &Group, local_experts: usize, top_k: usize) -> Outcome<()> {
    let function = "ncclEpInitHandle";
    if !local_experts.is_power_of_two() {
        let text = format!("{function}: {local_experts} experts a rank, not a power of two, which zero_copy ON needs");
        return Err(invalid(text));
    }
    if group.capacity > MAX_DUPLICATE_ROWS {
        let rows = group.capacity;
        let text = format!("{function}: {rows} receive rows, at most {MAX_DUPLICATE_ROWS} with zero_copy ON");
        return Err(invalid(text));
    }
    let all = group.comm.ranks * group.max_tokens * top_k;
    if !group.zero_copy && group.capacity < all {
        let text = format!(
            "{function}: NCCL_EP_HT_EM_LOCAL_DUP without zero_copy ON needs max_recv_tokens_per_rank of at least \
             ranks x max_dispatch_tokens_per_rank x num_topk = {all}, got {}",
            group.capacity
        );
        return Err(invalid(text));
    }
    Ok(())
}

/// Allocates handle memory.
pub fn allocate(group: &Group, bytes: usize) -> Outcome<*mut c_void> {
    let Some(allocator) = group.allocator else {
        return memory::allocate(bytes, memory::Kind::Device, group.comm.device.ordinal);
    };
    let mut base = std::ptr::null_mut();
    // SAFETY: the group's creator vouches for its allocation function.
    let code = unsafe { (allocator.alloc)(&raw mut base, bytes, allocator.context as *mut c_void) };
    if code != cudaSuccess || base.is_null() {
        let text = format!("ncclEpInitHandle: alloc_fn gave {base:p} and code {code} for {bytes} bytes");
        return Err(Fault::nccl(ncclUnhandledCudaError, text));
    }
    Ok(base)
}

/// Frees handle memory that [`allocate`] gave.
pub fn free(group: &Group, base: usize) {
    match group.allocator {
        // Its result is ignored, as NCCL EP does.
        // SAFETY: the group's creator vouches for its free function; base came from alloc_fn.
        Some(allocator) => drop(unsafe { (allocator.free)(base as *mut c_void, allocator.context as *mut c_void) }),
        None => {
            if let Ok(allocation) = memory::forget(base, memory::Kind::on_device) {
                memory::release(allocation);
            }
        }
    }
}

/// Handle memory: a caller's bytes that hold the routing of one UpdateHandle and may be copied elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct HandleMemory {
    /// The bytes.
    pub span: Span,
    /// Where each part is.
    pub layout: MemoryLayout,
}

impl HandleMemory {
    /// Writes 32-bit values at a part's offset.
    pub fn write_i32(&self, offset: usize, values: &[i32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.span.write(offset, &bytes);
    }

    /// Writes 64-bit values at a part's offset.
    pub fn write_i64(&self, offset: usize, values: &[i64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.span.write(offset, &bytes);
    }

    /// Reads 32-bit values at a part's offset.
    pub fn read_i32(&self, offset: usize, count: usize) -> Vec<i32> {
        let bytes = self.span.view(offset, count * 4);
        bytes.as_chunks::<4>().0.iter().map(|value| i32::from_ne_bytes(*value)).collect()
    }

    /// Reads 64-bit values at a part's offset.
    pub fn read_i64(&self, offset: usize, count: usize) -> Vec<i64> {
        let bytes = self.span.view(offset, count * 8);
        bytes.as_chunks::<8>().0.iter().map(|value| i64::from_ne_bytes(*value)).collect()
    }

    /// Reads `count` cached indices from number `first`; those outside `[0, experts)` come out as -1.
    pub fn read_topk(&self, first: usize, count: usize, width: usize, experts: usize) -> Vec<i32> {
        let bytes = self.span.view(self.layout.topk + first * width, count * width);
        read_indices(bytes, width).map(|e| if (0..experts as i64).contains(&e) { e as i32 } else { -1 }).collect()
    }
}

/// Indices of either width.
pub fn read_indices(bytes: &[u8], width: usize) -> impl Iterator<Item = i64> {
    bytes.chunks_exact(width).map(move |value| match *value {
        [a, b, c, d] => i64::from(i32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => i64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => -1,
    })
}

/// Rows of each token, `top_k` apiece, from the experts that it has a row of: a zone's rows are in the tokens' order.
fn rows_of(flags: &[u8], bases: &[i64], top_k: usize) -> Option<Vec<i32>> {
    let local_experts = bases.len() - 1;
    let mut next = bases[..local_experts].to_vec();
    let mut slots = Vec::with_capacity(flags.len() / local_experts * top_k);
    for flags in flags.chunks_exact(local_experts) {
        let end = slots.len() + top_k;
        for (flag, next) in flags.iter().zip(&mut next) {
            match *flag {
                0 => continue,
                1 if slots.len() < end => slots.push(i32::try_from(*next).ok()?),
                _ => return None,
            }
            *next += 1;
        }
        slots.resize(end, -1);
    }
    Some(slots)
}

/// Experts of each token, `top_k` apiece.
fn experts_of(flags: &[u8], local_experts: usize, top_k: usize) -> Option<Vec<i32>> {
    let mut experts = Vec::with_capacity(flags.len() / local_experts * top_k);
    for flags in flags.chunks_exact(local_experts) {
        let end = experts.len() + top_k;
        let is_set = |(_, flag): &(usize, &u8)| **flag != 0;
        experts.extend(flags.iter().enumerate().filter(is_set).map(|(expert, _)| expert as i32));
        if experts.len() > end || flags.iter().any(|flag| *flag > 1) {
            return None;
        }
        experts.resize(end, -1);
    }
    Some(experts)
}

/// Checked maps of this rank as a destination, read from handle memory.
#[derive(Debug)]
pub struct Arrivals {
    /// Unique tokens received.
    pub received: usize,
    /// Rows of each received token, `top_k` apiece.
    pub slots: Vec<i32>,
    /// Tokens of each local expert; empty in the flat layout, which has no zones.
    pub counts: Vec<i32>,
    /// First row of each zone, and the padded total.
    pub bases: Vec<i64>,
    /// The flat layout's local experts of each received token, ascending, `top_k` apiece; -1 behind them.
    flat_experts: Vec<i32>,
}

impl Arrivals {
    /// Reads the maps; memory that no UpdateHandle has filled is an error rather than a stray access.
    pub fn read(handle: &Handle, function: &str) -> Outcome<Self> {
        let memory = &handle.memory;
        let (layout, capacity) = (&memory.layout, handle.group.capacity);
        let rows = handle.group.row_limit(handle.alignment);
        let local_experts = handle.group.experts / handle.group.comm.ranks;
        let unprepared = || {
            let text = format!("{function}: handle_mem holds no routing (UpdateHandle never ran over this memory)");
            Fault::both(cudaErrorIllegalAddress, ncclInvalidUsage, text).breaks(Rule::HandleMemory)
        };
        let received = memory.read_i32(layout.recv_count, 1)[0];
        let received = usize::try_from(received).ok().filter(|n| *n <= capacity).ok_or_else(unprepared)?;
        let top_k = handle.top_k;
        if handle.layout == Layout::Flat {
            let TokenRows::Experts(offset) = layout.slots else { return Err(unprepared()) };
            let flags = memory.span.view(offset, received * local_experts);
            let flat_experts = experts_of(flags, local_experts, top_k).ok_or_else(unprepared)?;
            let slots = (0..received * top_k).map(|i| if i % top_k == 0 { (i / top_k) as i32 } else { -1 }).collect();
            return Ok(Self { received, slots, counts: Vec::new(), bases: vec![received as i64], flat_experts });
        }
        let counts = memory.read_i32(layout.counts, local_experts);
        let bases = memory.read_i64(layout.bases, local_experts + 1);
        let slots = match layout.slots {
            TokenRows::Rows(offset) => memory.read_i32(offset, received * handle.top_k),
            TokenRows::Experts(offset) => {
                let flags = memory.span.view(offset, received * local_experts);
                rows_of(flags, &bases, handle.top_k).ok_or_else(unprepared)?
            }
        };
        let sane = slots.iter().all(|slot| (-1..rows as i64).contains(&i64::from(*slot)))
            && counts.iter().zip(bases.windows(2)).all(|(count, zone)| {
                *count >= 0 && zone[0] >= 0 && zone[0].saturating_add(i64::from(*count)) <= zone[1]
            });
        if sane { Ok(Self { received, slots, counts, bases, flat_experts: Vec::new() }) } else { Err(unprepared()) }
    }

    /// The first row of each received token.
    pub fn primaries(&self, top_k: usize) -> Vec<i32> {
        self.slots.chunks_exact(top_k).map(|slots| slots[0]).collect()
    }

    /// The local expert of number `index` among all received tokens' experts, `top_k` apiece; nothing where there is
    /// none, or its row was dropped.
    pub fn expert(&self, index: usize) -> Option<usize> {
        if !self.counts.is_empty() {
            let row = self.slots[index];
            return (row >= 0).then(|| self.bases.partition_point(|base| *base <= i64::from(row)).saturating_sub(1));
        }
        usize::try_from(self.flat_experts[index]).ok()
    }

    /// Rows of all zones, padding included, before any drop.
    pub fn total(&self) -> usize {
        self.bases.last().map_or(0, |rows| *rows as usize)
    }

    /// Padding rows: ranges between the tokens of each zone and its end, within the capacity.
    pub fn padding(&self, capacity: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.counts.iter().zip(self.bases.windows(2)).map(move |(count, zone)| {
            let end = (zone[1] as usize).min(capacity);
            let start = (zone[0] as usize + *count as usize).min(end);
            start..end
        })
    }
}
