//! The NCCL EP driver: high-throughput mode, expert-major layout; and low-latency mode, in `low_latency`.

mod caller;
mod candidate;
mod desc;
pub(in crate::backend) mod low_latency;
mod topk_idx;

pub(super) use candidate::{Candidate, Fit};

use super::{HeaderOut, Machine};
use crate::config::{GroupConfig, LayerConfig, Overflow, RecvCapacity, Transfer};
use crate::dtype::DType;
use crate::env::RuntimeKind;
use crate::error::{Error, Result};
use crate::memory::GroupMemory;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use crate::sys::cuda::Stream;
use crate::sys::nccl_ep::{NcclEp, checked};
use crate::sys::{Base, NcclEpLibrary, SetCaller};
use crate::tensor::TensorView;
use caller::Caller;
use desc::{Descriptor, EpStruct, bind_optional};
use nvte_ep_bindings as b;
use std::mem::ManuallyDrop;
use topk_idx::IndexCopier;

/// NCCL EP's group. Handle memory is NCCL EP's part and, behind it, the copy of the indices that NCCL EP gets to see.
#[derive(Debug)]
pub(in crate::backend) struct Group {
    raw: b::ncclEpGroup_t,
    base: &'static Base,
    ep: &'static NcclEp,
    library: &'static NcclEpLibrary,
    set_caller: Option<SetCaller>,
    config: GroupConfig,
    /// NVLink domains of its ranks.
    domains: u32,
    /// Dropped by [`Group::destroy`] alone, and only where CUDA may still be called.
    index_copier: ManuallyDrop<IndexCopier>,
}

// SAFETY: NCCL EP has no thread affinity; it asks for one thread at a time, which the backend's lock gives.
unsafe impl Send for Group {}

/// NCCL EP's handle: one layer's routing over one piece of handle memory.
#[derive(Debug)]
pub(in crate::backend) struct Handle {
    raw: b::ncclEpHandle_t,
    /// Address of the copy of the indices.
    indices: u64,
}

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
    /// The communicator is live, of the machine's NCCL, outlives the group, and its device is current.
    unsafe fn create(
        machine: &Machine<'_>,
        library: &'static NcclEpLibrary,
        index_copier: IndexCopier,
        max_num_sms: u32,
    ) -> Result<Self> {
        let Machine { base, comm, config, comm_facts, .. } = machine;
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
        let index_copier = ManuallyDrop::new(index_copier);
        let (ep, set_caller) = (&library.functions, library.host_set_caller);
        Ok(Self { raw, base, ep, library, set_caller, config: *config, domains: comm_facts.domains(), index_copier })
    }

    /// Bytes of the copied indices of as many tokens as a rank may have.
    const fn index_bytes(&self, layer: &LayerConfig) -> usize {
        DType::Int64.bytes(self.config.max_tokens_per_rank as usize * layer.top_k as usize)
    }

    /// Bytes of a layer's handle memory: NCCL EP's, and the copy of the indices.
    pub(super) fn handle_bytes(&self, layer: &LayerConfig) -> Result<usize> {
        let mut bytes = 0usize;
        let top_k = layer.top_k as i32;
        let config = b::ncclEpHandleConfig_t::with_header();
        let (size_of, group, out, config) = (self.ep.ncclEpHandleMemSize, self.raw, &raw mut bytes, &raw const config);
        checked(&self.base.nccl, "ncclEpHandleMemSize", || {
            // SAFETY: the group is live, and `config` and `out` live across the call.
            unsafe { size_of(group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, out, top_k) }
        })?;
        Ok(bytes.next_multiple_of(256) + self.index_bytes(layer))
    }

    /// Creates a handle over `memory`, whose contents stay as they are.
    ///
    /// # Safety
    /// `memory` is device memory of [`Group::handle_bytes`] and outlives the handle's use.
    pub(super) unsafe fn open(&self, layer: &LayerConfig, memory: &TensorView) -> Result<Handle> {
        let nccl_bytes = memory.byte_len() as usize - self.index_bytes(layer);
        let indices = memory.data + nccl_bytes as u64;
        let mut config = b::ncclEpHandleConfig_t::with_header();
        config.dispatch_output_per_expert_alignment = layer.alignment.tokens() as usize;
        let mut memory = Descriptor::new(&memory.bytes(0, nccl_bytes));
        let mut raw = std::ptr::null_mut();
        let (init, group, out, config, memory) =
            (self.ep.ncclEpInitHandle, self.raw, &raw mut raw, &raw const config, memory.bind().raw);
        let top_k = layer.top_k as i32;
        checked(&self.base.nccl, "ncclEpInitHandle", || {
            // SAFETY: the group is live, the rest lives across the call; the caller vouches for the memory.
            unsafe { init(out, group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, top_k, memory) }
        })?;
        Ok(Handle { raw, indices })
    }

    /// Words of the header that hold the count of indices that are no expert.
    pub(super) const COUNTS: usize = topk_idx::BLOCKS;

    /// Exchanges the routing and fills the handle memory and its header.
    pub(super) fn prepare(&self, handle: &Handle, call: &Prepare, header: &HeaderOut, stream: Stream) -> Result<()> {
        let cuda = &self.base.cuda;
        // SAFETY: `Stream::bind` vouches for the tensors; the handle memory starts with room for the header and ends with room
        // for the copy.
        unsafe { self.index_copier.copy(&call.topk_idx, handle.indices, header, self.config.num_experts, stream) }?;
        self.update(handle, call, &header.total, stream).inspect_err(|_| {
            // The memory holds no routing, wherever its bytes are moved. The exchange's error says more than one of this.
            // SAFETY: the handle memory starts with room for the header.
            drop(unsafe { cuda.zero(header.address, size_of_val(&header.words), stream) });
        })?;
        if let Some(wanted) = &call.total {
            // SAFETY: the caller vouches for its total, which has the dtype of ours.
            unsafe { cuda.copy(wanted.data, header.total.data, wanted.dtype.bytes(1), stream) }?;
        }
        Ok(())
    }

    /// Exchanges the routing of the copied indices and fills NCCL EP's part and `total`.
    fn update(&self, handle: &Handle, prepare: &Prepare, total: &TensorView, stream: Stream) -> Result<()> {
        let names = || {
            [
                ("topk_idx", Some(&prepare.topk_idx)),
                ("layout_info.expert_counters", prepare.token_counts.as_ref()),
                ("layout_info.recv_total_counter", prepare.total.as_ref()),
            ]
        };
        let _caller = Caller::tell(self.set_caller, "nvte_ep_prepare", names);
        let mut topk_idx = Descriptor::new(&prepare.topk_idx).with_int64_at(handle.indices);
        let mut counts = prepare.token_counts.as_ref().map(Descriptor::new);
        let mut total = Descriptor::new(total);
        let mut layout = b::ncclEpLayoutInfo_t::with_header();
        layout.expert_counters = bind_optional(&mut counts);
        layout.recv_total_counter = total.bind().raw;
        let (update, handle, topk_idx, layout, stream) =
            (self.ep.ncclEpUpdateHandle, handle.raw, topk_idx.bind().raw, &raw const layout, stream.as_raw());
        checked(&self.base.nccl, "ncclEpUpdateHandle", || {
            // SAFETY: handle and descriptors are live; `Stream::bind` vouches for what they describe.
            unsafe { update(handle, topk_idx, layout, stream) }
        })
    }

    /// Sends rows, and weights if there are any, to their experts' ranks.
    pub(super) fn dispatch(&self, handle: &Handle, call: &Dispatch, stream: Stream) -> Result<()> {
        let pass = if call.topk_weights.is_some() { Pass::Forward } else { Pass::Backward };
        self.run_dispatch(
            "nvte_ep_dispatch",
            handle,
            (&call.tokens, call.topk_weights.as_ref()),
            (&call.recv_tokens, call.recv_topk_weights.as_ref()),
            pass,
            stream,
        )
    }

    /// Gradient of combine: sends each token's gradient to the slots that the token's rows came from.
    pub(super) fn combine_bwd(&self, handle: &Handle, call: &CombineBwd, stream: Stream) -> Result<()> {
        self.run_dispatch(
            "nvte_ep_combine_bwd",
            handle,
            (&call.grad, None),
            (&call.grad_expert_out, None),
            Pass::Backward,
            stream,
        )
    }

    fn run_dispatch(
        &self,
        function: &str,
        handle: &Handle,
        (tokens, weights): (&TensorView, Option<&TensorView>),
        (recv_tokens, recv_weights): (&TensorView, Option<&TensorView>),
        pass: Pass,
        stream: Stream,
    ) -> Result<()> {
        let names = || {
            [
                ("inputs.tokens", Some(tokens)),
                ("inputs.topk_weights", weights),
                ("outputs.tokens", Some(recv_tokens)),
                ("outputs.topk_weights", recv_weights),
            ]
        };
        let _caller = Caller::tell(self.set_caller, function, names);
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
        let (dispatch, handle, stream) = (self.ep.ncclEpDispatch, handle.raw, stream.as_raw());
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        checked(&self.base.nccl, "ncclEpDispatch", || {
            // SAFETY: handle and structures are live; `Stream::bind` vouches for what they describe.
            unsafe { dispatch(handle, inputs, outputs, std::ptr::null(), config, stream) }
        })
    }

    /// Sums each token's rows back on its own rank.
    pub(super) fn combine(&self, handle: &Handle, call: &Combine, stream: Stream) -> Result<()> {
        self.run_combine(
            "nvte_ep_combine",
            handle,
            (&call.expert_out, None),
            (&call.result, None),
            Pass::Forward,
            stream,
        )
    }

    /// Gradient of dispatch: sums the rows' gradients and gathers the weights' gradients.
    pub(super) fn dispatch_bwd(&self, handle: &Handle, call: &DispatchBwd, stream: Stream) -> Result<()> {
        let inputs = (&call.grad, call.g_recv_topk_weights.as_ref());
        let outputs = (&call.grad_tokens, call.grad_topk_weights.as_ref());
        // NCCL EP's backward pass insists on weights; the rows' part of it is the forward pass.
        let pass = if outputs.1.is_some() { Pass::Backward } else { Pass::Forward };
        self.run_combine("nvte_ep_dispatch_bwd", handle, inputs, outputs, pass, stream)
    }

    fn run_combine(
        &self,
        function: &str,
        handle: &Handle,
        (rows, row_weights): (&TensorView, Option<&TensorView>),
        (tokens, weights): (&TensorView, Option<&TensorView>),
        pass: Pass,
        stream: Stream,
    ) -> Result<()> {
        let names = || {
            [
                ("inputs.tokens", Some(rows)),
                ("inputs.topk_weights", row_weights),
                ("outputs.tokens", Some(tokens)),
                ("outputs.topk_weights", weights),
            ]
        };
        let _caller = Caller::tell(self.set_caller, function, names);
        let (mut rows, mut row_weights) = (Descriptor::new(rows), row_weights.map(Descriptor::new));
        let (mut tokens, mut weights) = (Descriptor::new(tokens), weights.map(Descriptor::new));
        let mut inputs = b::ncclEpCombineInputs_t::with_header();
        (inputs.tokens, inputs.topk_weights) = (rows.bind().raw, bind_optional(&mut row_weights));
        let mut outputs = b::ncclEpCombineOutputs_t::with_header();
        (outputs.tokens, outputs.topk_weights) = (tokens.bind().raw, bind_optional(&mut weights));
        let mut config = b::ncclEpCombineConfig_t::with_header();
        config.pass_direction = pass.raw();
        let (combine, handle, stream) = (self.ep.ncclEpCombine, handle.raw, stream.as_raw());
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        checked(&self.base.nccl, "ncclEpCombine", || {
            // SAFETY: handle and structures are live; `Stream::bind` vouches for what they describe.
            unsafe { combine(handle, inputs, outputs, config, stream) }
        })
    }

    /// Destroys a handle.
    pub(super) fn close(&self, handle: Handle) -> Result<()> {
        let (destroy, raw) = (self.ep.ncclEpHandleDestroy, handle.raw);
        // SAFETY: the handle is live, of this group, and consumed here.
        checked(&self.base.nccl, "ncclEpHandleDestroy", || unsafe { destroy(raw) })
    }

    /// See [`super::Engine::library`].
    pub(super) const fn library(&self) -> &'static NcclEpLibrary {
        self.library
    }

    /// See [`super::Engine::invalid_indices`].
    pub(super) fn invalid_indices(&self) -> u64 {
        self.index_copier.found()
    }

    /// See [`super::Engine::report`].
    #[inline]
    pub(super) fn report(&mut self) {
        self.index_copier.report();
    }

    /// What NCCL EP holds, which it does not tell.
    pub(super) fn memory(&self) -> GroupMemory {
        GroupMemory::of(&self.config, self.domains)
    }

    /// An error of queued work, with the reason that this group may have given for it.
    pub(super) fn explain(&self, error: Error) -> Error {
        let fatal = [b::CUDA_ERROR_LAUNCH_FAILED, b::CUDA_ERROR_ASSERT, b::CUDA_ERROR_ILLEGAL_INSTRUCTION];
        let is_fatal = |call: &str, code: i64| match call.starts_with("cu") {
            true => fatal.iter().any(|fatal| i64::from(*fatal) == code),
            false => code == i64::from(b::ncclUnhandledCudaError),
        };
        // A GPU gives no reason for a trap. The host runtime does, and most are others: a rank that is missing, memory that
        // nobody wrote.
        let may_be_overflow = |text: &str| self.base.runtime == RuntimeKind::Cuda || text.contains("overflow");
        match (&error, self.config.recv_capacity, self.config.overflow) {
            (Error::Library { call, code, text }, RecvCapacity::Fixed(rows), Overflow::Trap)
                if is_fatal(call, *code) && may_be_overflow(text) =>
            {
                let text = format!(
                    "{text}; if a step needed more rows than max_recv_tokens_per_rank, {rows}: raise it, or initialize with \
                     overflow = drop; the process has to end"
                );
                Error::Library { call, code: *code, text }
            }
            _ => error,
        }
    }

    /// Destroys the group. Its handles are gone, its work is done, and every rank has stopped using its windows.
    pub(super) fn destroy(self) -> Result<()> {
        let mut index_copier = ManuallyDrop::into_inner(self.index_copier);
        index_copier.report_last();
        drop(index_copier);
        let (destroy, raw) = (self.ep.ncclEpGroupDestroy, self.raw);
        // SAFETY: the group is live and consumed here.
        checked(&self.base.nccl, "ncclEpGroupDestroy", || unsafe { destroy(raw) })
    }
}
