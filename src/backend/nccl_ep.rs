//! The NCCL EP driver: high-throughput mode, expert-major layout.

use crate::config::{GroupConfig, LayerConfig, Overflow, RecvCapacity, Transfer};
use crate::desc::{Descriptor, EpStruct, bind_optional};
use crate::error::Result;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use crate::sys::cuda::Stream;
use crate::sys::nccl_ep::{NcclEp, checked};
use crate::sys::{Base, NcclEpLibrary};
use crate::tensor::TensorView;
use nvte_ep_bindings as b;

/// A communicator, borrowed from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Communicator(pub usize);

impl Communicator {
    pub(crate) fn as_raw(self) -> b::ncclComm_t {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// NCCL EP's group.
#[derive(Debug)]
pub(crate) struct Group {
    raw: b::ncclEpGroup_t,
    base: &'static Base,
    ep: &'static NcclEp,
}

// SAFETY: NCCL EP has no thread affinity; it asks for one thread at a time, which the backend's lock gives.
unsafe impl Send for Group {}

/// NCCL EP's handle: one layer's routing over one piece of handle memory.
#[derive(Debug)]
pub(crate) struct Handle(b::ncclEpHandle_t);

// SAFETY: as for `Group`.
unsafe impl Send for Handle {}

/// Which of two passes a kernel runs for.
#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

impl Pass {
    const fn raw(self) -> b::ncclEpPassDir_t {
        match self {
            Self::Forward => b::NCCL_EP_FWD_PASS,
            Self::Backward => b::NCCL_EP_BWD_PASS,
        }
    }
}

impl Group {
    /// Creates the group; collective over `comm`. `max_num_sms` is the resolved cap.
    ///
    /// # Safety
    /// `comm` is a live communicator of `base`'s NCCL and outlives the group; the current device is the communicator's.
    pub(crate) unsafe fn create(
        base: &'static Base,
        library: &'static NcclEpLibrary,
        comm: Communicator,
        config: &GroupConfig,
        max_num_sms: u32,
    ) -> Result<Self> {
        let mut raw_config = b::ncclEpGroupConfig_t::with_header();
        raw_config.version = b::NCCL_EP_API_VERSION;
        raw_config.algorithm = b::NCCL_EP_ALGO_HIGH_THROUGHPUT;
        raw_config.num_experts = config.num_experts;
        raw_config.max_dispatch_tokens_per_rank = config.dispatch_limit();
        raw_config.max_recv_tokens_per_rank = match config.recv_capacity {
            RecvCapacity::Fixed(rows) => rows,
            RecvCapacity::Eager => 0,
        };
        raw_config.num_topk = config.num_topk.unwrap_or(0);
        raw_config.max_token_bytes = u32::try_from(config.max_token_bytes()).expect("GroupConfig checked it");
        raw_config.max_num_sms = max_num_sms;
        raw_config.zero_copy = match config.transfer {
            Transfer::Staged => b::NCCL_EP_ZERO_COPY_OFF,
            Transfer::ZeroCopy => b::NCCL_EP_ZERO_COPY_ON,
        };
        raw_config.overflow_policy = match config.overflow {
            Overflow::Trap => b::NCCL_EP_OVERFLOW_TRAP,
            Overflow::Drop => b::NCCL_EP_OVERFLOW_DROP,
        };
        let mut raw = std::ptr::null_mut();
        let (out, comm, raw_config) = (&raw mut raw, comm.as_raw(), &raw const raw_config);
        let create = library.functions.ncclEpCreateGroup;
        // SAFETY: `out` and the configuration live across the call; the caller vouches for `comm`.
        checked(&base.nccl, "ncclEpCreateGroup", || unsafe { create(out, comm, raw_config) })?;
        Ok(Self { raw, base, ep: &library.functions })
    }

    /// Bytes of handle memory that a layer with `top_k` experts per token needs.
    pub(crate) fn handle_mem_size(&self, top_k: u32) -> Result<usize> {
        let mut bytes = 0usize;
        let config = b::ncclEpHandleConfig_t::with_header();
        let (size_of, group, out, config) = (self.ep.ncclEpHandleMemSize, self.raw, &raw mut bytes, &raw const config);
        checked(&self.base.nccl, "ncclEpHandleMemSize", || {
            // SAFETY: the group is live, and `config` and `out` live across the call.
            unsafe { size_of(group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, out, top_k as i32) }
        })?;
        Ok(bytes)
    }

    /// Creates a handle over `memory`, whose contents stay as they are.
    ///
    /// # Safety
    /// `memory` is device memory of the size that [`Group::handle_mem_size`] tells and outlives the handle's use.
    pub(crate) unsafe fn init_handle(&self, layer: &LayerConfig, memory: &TensorView) -> Result<Handle> {
        let mut config = b::ncclEpHandleConfig_t::with_header();
        config.dispatch_output_per_expert_alignment = layer.alignment.tokens() as usize;
        let mut memory = Descriptor::new(memory);
        let mut raw = std::ptr::null_mut();
        let (init, group, out, config, memory) =
            (self.ep.ncclEpInitHandle, self.raw, &raw mut raw, &raw const config, memory.bind().raw);
        let top_k = layer.top_k as i32;
        checked(&self.base.nccl, "ncclEpInitHandle", || {
            // SAFETY: the group is live, the rest lives across the call; the caller vouches for the memory.
            unsafe { init(out, group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, top_k, memory) }
        })?;
        Ok(Handle(raw))
    }

    /// Exchanges the routing, of which `copied` is the address of the int64 copy, and fills the handle and `total`;
    /// collective, queued on `stream`.
    ///
    /// # Safety
    /// The tensors are device memory of the described extent, live until the queued work is done; `stream` is a stream
    /// of the group's device.
    pub(crate) unsafe fn update(
        &self,
        handle: &Handle,
        (prepare, copied): (&Prepare, u64),
        total: &TensorView,
        stream: Stream,
    ) -> Result<()> {
        let mut topk_idx = Descriptor::new(&prepare.topk_idx).with_int64_at(copied);
        let mut counts = prepare.token_counts.as_ref().map(Descriptor::new);
        let mut total = Descriptor::new(total);
        let mut layout = b::ncclEpLayoutInfo_t::with_header();
        layout.expert_counters = bind_optional(&mut counts);
        layout.recv_total_counter = total.bind().raw;
        let (update, handle, topk_idx, layout, stream) =
            (self.ep.ncclEpUpdateHandle, handle.0, topk_idx.bind().raw, &raw const layout, stream.as_raw());
        checked(&self.base.nccl, "ncclEpUpdateHandle", || {
            // SAFETY: handle and descriptors are live; the caller vouches for what they describe.
            unsafe { update(handle, topk_idx, layout, stream) }
        })
    }

    /// Sends rows, and weights if there are any, to their experts' ranks.
    ///
    /// # Safety
    /// As for [`Group::update`].
    pub(crate) unsafe fn dispatch(&self, handle: &Handle, call: &Dispatch, stream: Stream) -> Result<()> {
        let pass = if call.topk_weights.is_some() { Pass::Forward } else { Pass::Backward };
        // SAFETY: passed on.
        unsafe {
            self.run_dispatch(
                handle,
                (&call.tokens, call.topk_weights.as_ref()),
                (&call.recv_tokens, call.recv_topk_weights.as_ref()),
                pass,
                stream,
            )
        }
    }

    /// Gradient of combine: sends each token's gradient to the slots that the token's rows came from.
    ///
    /// # Safety
    /// As for [`Group::update`].
    pub(crate) unsafe fn combine_bwd(&self, handle: &Handle, call: &CombineBwd, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.run_dispatch(handle, (&call.grad, None), (&call.grad_expert_out, None), Pass::Backward, stream) }
    }

    unsafe fn run_dispatch(
        &self,
        handle: &Handle,
        (tokens, weights): (&TensorView, Option<&TensorView>),
        (recv_tokens, recv_weights): (&TensorView, Option<&TensorView>),
        pass: Pass,
        stream: Stream,
    ) -> Result<()> {
        let scales_of = |view: &TensorView| {
            view.scales.as_ref()?;
            view.scale_tensor("scales").as_ref().map(Descriptor::new)
        };
        let (mut scales, mut recv_scales) = (scales_of(tokens), scales_of(recv_tokens));
        let (mut tokens, mut weights) = (Descriptor::new(tokens), weights.map(Descriptor::new));
        let (mut recv_tokens, mut recv_weights) = (Descriptor::new(recv_tokens), recv_weights.map(Descriptor::new));
        let mut inputs = b::ncclEpDispatchInputs_t::with_header();
        (inputs.tokens, inputs.topk_weights) = (tokens.bind().raw, bind_optional(&mut weights));
        inputs.scales = bind_optional(&mut scales);
        let mut outputs = b::ncclEpDispatchOutputs_t::with_header();
        (outputs.tokens, outputs.topk_weights) = (recv_tokens.bind().raw, bind_optional(&mut recv_weights));
        outputs.scales = bind_optional(&mut recv_scales);
        let mut config = b::ncclEpDispatchConfig_t::with_header();
        config.pass_direction = pass.raw();
        config.quant_recipe =
            if inputs.scales.is_null() { b::NCCL_EP_DISP_QUANT_NONE } else { b::NCCL_EP_DISP_QUANT_FWD };
        let (dispatch, handle, stream) = (self.ep.ncclEpDispatch, handle.0, stream.as_raw());
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        checked(&self.base.nccl, "ncclEpDispatch", || {
            // SAFETY: handle and structures are live; the caller vouches for what they describe.
            unsafe { dispatch(handle, inputs, outputs, std::ptr::null(), config, stream) }
        })
    }

    /// Sums each token's rows back on its own rank.
    ///
    /// # Safety
    /// As for [`Group::update`].
    pub(crate) unsafe fn combine(&self, handle: &Handle, call: &Combine, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.run_combine(handle, (&call.expert_out, None), (&call.result, None), Pass::Forward, stream) }
    }

    /// Gradient of dispatch: sums the rows' gradients and gathers the weights' gradients.
    ///
    /// # Safety
    /// As for [`Group::update`].
    pub(crate) unsafe fn dispatch_bwd(&self, handle: &Handle, call: &DispatchBwd, stream: Stream) -> Result<()> {
        let inputs = (&call.grad, call.g_recv_topk_weights.as_ref());
        let outputs = (&call.grad_tokens, call.grad_topk_weights.as_ref());
        // NCCL EP's backward pass insists on weights; the rows' part of it is the forward pass.
        let pass = if outputs.1.is_some() { Pass::Backward } else { Pass::Forward };
        // SAFETY: passed on.
        unsafe { self.run_combine(handle, inputs, outputs, pass, stream) }
    }

    unsafe fn run_combine(
        &self,
        handle: &Handle,
        (rows, row_weights): (&TensorView, Option<&TensorView>),
        (tokens, weights): (&TensorView, Option<&TensorView>),
        pass: Pass,
        stream: Stream,
    ) -> Result<()> {
        let (mut rows, mut row_weights) = (Descriptor::new(rows), row_weights.map(Descriptor::new));
        let (mut tokens, mut weights) = (Descriptor::new(tokens), weights.map(Descriptor::new));
        let mut inputs = b::ncclEpCombineInputs_t::with_header();
        (inputs.tokens, inputs.topk_weights) = (rows.bind().raw, bind_optional(&mut row_weights));
        let mut outputs = b::ncclEpCombineOutputs_t::with_header();
        (outputs.tokens, outputs.topk_weights) = (tokens.bind().raw, bind_optional(&mut weights));
        let mut config = b::ncclEpCombineConfig_t::with_header();
        config.pass_direction = pass.raw();
        let (combine, handle, stream) = (self.ep.ncclEpCombine, handle.0, stream.as_raw());
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        checked(&self.base.nccl, "ncclEpCombine", || {
            // SAFETY: handle and structures are live; the caller vouches for what they describe.
            unsafe { combine(handle, inputs, outputs, config, stream) }
        })
    }

    /// Destroys a handle.
    pub(crate) fn destroy_handle(&self, handle: Handle) -> Result<()> {
        let (destroy, raw) = (self.ep.ncclEpHandleDestroy, handle.0);
        // SAFETY: the handle is live, of this group, and consumed here.
        checked(&self.base.nccl, "ncclEpHandleDestroy", || unsafe { destroy(raw) })
    }

    /// Destroys the group. Its handles are gone, and every rank has stopped using its windows.
    pub(crate) fn destroy(self) -> Result<()> {
        let (destroy, raw) = (self.ep.ncclEpGroupDestroy, self.raw);
        // SAFETY: the group is live and consumed here.
        checked(&self.base.nccl, "ncclEpGroupDestroy", || unsafe { destroy(raw) })
    }
}
