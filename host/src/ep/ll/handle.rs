//! EP handles of low-latency mode: the experts that the caller's tensor names, and handle memory.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::acting;
use crate::ep::desc::{Tensor, invalid};
use crate::ep::group::Group;
use crate::ep::handle::{allocate, free, read_indices};
use crate::ep::ll::arrivals::HandleMemory;
use crate::ep::ll::limits::Shape;
use crate::ep::ll::staged::LowLatency;
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;
use crate::stats;
use crate::tensor_check;

/// What UpdateHandle leaves: where the experts of the tokens are. Dispatch and combine read them there.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The caller's tensor.
    pub span: Span,
    /// Own tokens.
    pub tokens: usize,
    /// Bytes of an index.
    width: usize,
}

/// A handle of an EP group in low-latency mode.
#[derive(Debug)]
pub struct Handle {
    /// Its group.
    pub group: Arc<Group>,
    /// The group's state of this mode.
    pub mode: Arc<LowLatency>,
    /// Where the rows of a dispatch came from.
    pub memory: HandleMemory,
    routing: Mutex<Option<Routing>>,
    owned: Option<usize>,
}

static HANDLES: LazyLock<Mutex<HashMap<usize, Arc<Handle>>>> = LazyLock::new(Mutex::default);

fn shape(group: &Group, layout: ncclEpLayout_t, top_k: i32, function: &str) -> Outcome<Shape> {
    let rank_major = match layout {
        NCCL_EP_LAYOUT_EXPERT_MAJOR => false,
        NCCL_EP_LAYOUT_RANK_MAJOR => true,
        NCCL_EP_LAYOUT_UNSET => return Err(invalid(format!("{function}: the layout is not set"))),
        NCCL_EP_LAYOUT_FLAT => return Err(invalid(format!("{function}: low-latency mode has no flat layout"))),
        other => return Err(invalid(format!("{function}: layout {other} is unknown"))),
    };
    let top_k = usize::try_from(top_k).ok().filter(|top_k| *top_k > 0);
    let top_k = top_k.ok_or_else(|| invalid(format!("{function}: num_topk must be positive")))?;
    Ok(Shape {
        ranks: group.comm.ranks,
        experts: group.experts,
        max_tokens: group.max_tokens,
        max_token_bytes: group.max_token_bytes,
        top_k,
        rank_major,
    })
}

/// `ncclEpHandleMemSize`.
pub fn memory_size(group: &Group, layout: ncclEpLayout_t, top_k: i32) -> Outcome<usize> {
    Ok(shape(group, layout, top_k, "ncclEpHandleMemSize")?.handle_bytes())
}

impl Handle {
    /// `ncclEpInitHandle`; without `tensor` the memory is allocated here.
    pub fn init(
        group: &Arc<Group>,
        mode: &Arc<LowLatency>,
        layout: ncclEpLayout_t,
        top_k: i32,
        tensor: Option<&Tensor>,
    ) -> Outcome<usize> {
        let function = "ncclEpInitHandle";
        let _use = group.enter(function)?;
        let shape = shape(group, layout, top_k, function)?;
        if group.max_top_k > 0 && shape.top_k > group.max_top_k {
            let text = format!("{function}: num_topk {top_k} is larger than the group's {}", group.max_top_k);
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        let buffer_bytes = shape.buffer_bytes(function)?;
        let bytes = shape.handle_bytes();
        if let Some(tensor) = tensor {
            if tensor.datatype != ncclUint8 || tensor.vector()? < bytes {
                return Err(tensor.wrong(format!("must be uint8 of at least [{bytes}]")));
            }
            if !tensor.has_data {
                return Err(tensor.wrong("must be given by its data pointer, not by a window"));
            }
            tensor.expect_granule()?;
        }
        mode.fit(&group.line, buffer_bytes, function)?;
        let (span, owned) = match tensor {
            Some(tensor) => (tensor.span, None),
            None => {
                graph::refuse_unsafe("ncclEpInitHandle: an allocation of handle memory")?;
                let base = allocate(group, bytes)?;
                // SAFETY: the memory was just allocated with this size and lives until the handle is destroyed.
                (unsafe { Span::new(base, bytes) }?, Some(base as usize))
            }
        };
        let (group, mode) = (Arc::clone(group), Arc::clone(mode));
        let memory = HandleMemory { span, shape };
        let handle = Arc::new(Self { group, mode, memory, routing: Mutex::default(), owned });
        let address = handle.address();
        handle.group.handles.fetch_add(1, Ordering::Relaxed);
        HANDLES.lock().insert(address, handle);
        stats::count(|s| &s.handles_created);
        Ok(address)
    }

    /// The number that names the handle.
    pub fn address(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }

    /// The handle of this mode that a pointer names, if it is one.
    pub fn resolve(handle: ncclEpHandle_t, function: &str) -> Outcome<Option<Arc<Self>>> {
        let Some(found) = HANDLES.lock().get(&(handle as usize)).cloned() else { return Ok(None) };
        acting::act_as(found.group.comm.rank);
        found.group.check_alive(function)?;
        found.group.check_comm(function)?;
        let name = |fault: Fault| Fault { text: format!("{function}: handle_mem: {}", fault.text), ..fault };
        found.memory.span.check_live().map_err(name)?;
        Ok(Some(found))
    }

    /// `ncclEpHandleDestroy`; `false` if the handle is none of this mode.
    pub fn destroy(handle: ncclEpHandle_t) -> Outcome<bool> {
        let function = "ncclEpHandleDestroy";
        let Some(found) = HANDLES.lock().get(&(handle as usize)).cloned() else { return Ok(false) };
        acting::act_as(found.group.comm.rank);
        let _use = found.group.enter(function)?;
        if found.group.comm.device.sticky().is_none() {
            found.mode.refuse_staged_of(found.address(), function)?;
        }
        if found.owned.is_some() {
            graph::refuse_unsafe("ncclEpHandleDestroy: freeing handle memory")?;
        }
        if HANDLES.lock().remove(&(handle as usize)).is_none() {
            return Ok(false);
        }
        found.group.handles.fetch_sub(1, Ordering::Relaxed);
        stats::count(|s| &s.handles_destroyed);
        if let Some(base) = found.owned {
            // Queued operations may still use the memory.
            found.group.comm.device.synchronize();
            free(&found.group, base);
        }
        found.group.check_alive(function)?;
        Ok(true)
    }

    /// `ncclEpUpdateHandle`: nothing is enqueued.
    ///
    /// # Safety
    ///
    /// The descriptors are valid, and the tensor's memory until the last combine over this routing is done.
    pub unsafe fn update(
        &self,
        topk_idx: *const ncclEpTensor_t,
        layout_info: *const ncclEpLayoutInfo_t,
    ) -> Outcome<()> {
        let (function, group) = ("ncclEpUpdateHandle", &self.group);
        let _use = group.enter(function)?;
        self.mode.refuse_staged(function)?;
        if !layout_info.is_null() {
            return Err(invalid(format!("{function}: layout_info must be null in low-latency mode")));
        }
        // SAFETY: passed on to the caller.
        let topk = unsafe { Tensor::require(topk_idx, &group.comm, function, "topk_idx") }?;
        let width = topk.index_width()?;
        let (tokens, columns) = topk.matrix()?;
        if columns != self.memory.shape.top_k {
            return Err(topk.wrong(format!("must have num_topk = {} columns", self.memory.shape.top_k)));
        }
        topk.expect_most_rows(group.max_tokens)?;
        *self.routing.lock() = Some(Routing { span: topk.span, tokens, width });
        stats::count(|s| &s.updates);
        Ok(())
    }

    /// `ncclEpComplete`.
    ///
    /// # Safety
    ///
    /// The descriptors of the staged operation are still there.
    pub unsafe fn complete(self: &Arc<Self>, stream: &Arc<Stream>) -> Outcome<()> {
        let function = "ncclEpComplete";
        let _use = self.group.enter(function)?;
        // SAFETY: passed on to the caller.
        unsafe { self.mode.complete(&self.group.line, &self.group.comm, self.address(), stream) }
    }

    /// What the last UpdateHandle said.
    pub fn routing(&self, function: &str) -> Outcome<Routing> {
        let routing = self.routing.lock().clone();
        let routing = routing.ok_or_else(|| {
            invalid(format!("{function}: ncclEpUpdateHandle has not been called on this handle"))
                .breaks(Rule::HandleMemory)
        })?;
        let name = |fault: Fault| Fault {
            text: format!("{function}: topk_idx of ncclEpUpdateHandle: {}", fault.text),
            ..fault
        };
        routing.span.check_live().map_err(name)?;
        Ok(routing)
    }
}

impl Routing {
    /// The experts of the tokens as they are now, `top_k` to a token; -1 for none.
    pub fn experts(&self, shape: &Shape, function: &str) -> Outcome<Vec<i32>> {
        self.span.check_live()?;
        let name = format!("{function}: topk_idx of ncclEpUpdateHandle");
        tensor_check::written(&name, &self.span, shape.top_k * self.width, 0..self.tokens)?;
        let given = self.span.view(0, self.tokens * shape.top_k * self.width);
        let indices = read_indices(given, self.width).enumerate();
        indices
            .map(|(position, index)| {
                if index < shape.experts as i64 {
                    return Ok(index.max(-1) as i32);
                }
                let (row, column) = (position / shape.top_k, position % shape.top_k);
                let text = format!("{name}: [{row}, {column}] is {index}, but there are {} experts", shape.experts);
                Err(Fault::both(cudaErrorAssert, ncclInvalidArgument, text).breaks(Rule::ExpertIndex))
            })
            .collect()
    }
}
