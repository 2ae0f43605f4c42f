//! NCCL EP's low-latency mode, expert-major layout.
//!
//! A call in two halves, send and receive, makes NCCL EP keep pointers to the tensors' descriptors from the first to the second:
//! these are [`Held`], in memory of their own, by whoever waits for the second half.

use super::caller::Caller;
use super::candidate::{explain_refusal, find_library};
use super::desc::{EpStruct, LlDescriptor, bind_optional};
use crate::backend::communicator::Communicator;
use crate::config::LlConfig;
use crate::dtype::DType;
use crate::env::Env;
use crate::error::Result;
use crate::memory::ll_buffer_bytes;
use crate::ops::{LlCombine, LlDispatch, scales_of};
use crate::preflight::{self, RankLocation};
use crate::sys::cuda::{DeviceFacts, Stream};
use crate::sys::nccl::CommFacts;
use crate::sys::nccl_ep::{NcclEp, checked};
use crate::sys::{Base, NcclEpLibrary, SetCaller};
use crate::tensor::TensorView;
use nvte_ep_bindings as b;
use std::ffi::c_ulong;

/// What a group is created from, on this rank.
pub(in crate::backend) struct Machine {
    pub(in crate::backend) base: &'static Base,
    pub(in crate::backend) env: Env,
    pub(in crate::backend) device: i32,
    pub(in crate::backend) facts: DeviceFacts,
    pub(in crate::backend) comm: Communicator,
    pub(in crate::backend) comm_facts: CommFacts,
    /// NCCL's version.
    pub(in crate::backend) nccl: i32,
}

/// The loaded library.
pub(in crate::backend) struct Candidate(&'static NcclEpLibrary);

impl Candidate {
    /// # Errors
    /// What this machine lacks.
    pub(in crate::backend) fn find(machine: &Machine) -> Result<Self> {
        let Machine { base, env, device, facts, comm_facts, nccl, .. } = machine;
        find_library(base, env, (*device, facts), comm_facts, *nccl, |_| Ok(())).map(Self)
    }

    /// What this rank tells the others of itself; also where it has found no library.
    pub(in crate::backend) fn location(machine: &Machine) -> RankLocation {
        preflight::location(machine.base, &machine.facts, &machine.comm_facts, None)
    }

    /// Creates the group on `sms` multiprocessors; collective over the communicator.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// The communicator is live, of the machine's NCCL, outlives the group, and its device is current.
    pub(in crate::backend) unsafe fn create(self, machine: &Machine, config: &LlConfig, sms: u32) -> Result<Group> {
        let Self(library) = self;
        let mut raw_config = b::ncclEpGroupConfig_t::with_header();
        raw_config.version = b::NCCL_EP_API_VERSION;
        raw_config.algorithm = b::NCCL_EP_ALGO_LOW_LATENCY;
        raw_config.num_experts = config.num_experts;
        raw_config.max_dispatch_tokens_per_rank = config.max_tokens_per_rank;
        raw_config.max_token_bytes = u32::try_from(config.max_token_bytes()).expect("LlConfig checked it");
        raw_config.rdma_buffer_size = ll_buffer_bytes(config) as c_ulong;
        raw_config.max_num_sms = sms;
        raw_config.num_topk = config.num_topk;
        raw_config.zero_copy = b::NCCL_EP_ZERO_COPY_OFF;
        let mut raw = std::ptr::null_mut();
        let (out, comm, raw_config) = (&raw mut raw, machine.comm.as_raw(), &raw const raw_config);
        let create = library.functions.ncclEpCreateGroup;
        // SAFETY: `out` and the configuration live across the call; the caller vouches for the communicator.
        checked(&machine.base.nccl, "ncclEpCreateGroup", || unsafe { create(out, comm, raw_config) })
            .map_err(|error| explain_refusal(error, library, machine.nccl))?;
        let (ep, set_caller) = (&library.functions, library.host_set_caller);
        Ok(Group { raw, base: machine.base, ep, set_caller, config: *config })
    }
}

/// NCCL EP's group.
#[derive(Debug)]
pub(in crate::backend) struct Group {
    raw: b::ncclEpGroup_t,
    base: &'static Base,
    ep: &'static NcclEp,
    set_caller: Option<SetCaller>,
    config: LlConfig,
}

// SAFETY: NCCL EP has no thread affinity; it asks for one thread at a time, which the backend's lock gives.
unsafe impl Send for Group {}

/// NCCL EP's handle over one piece of handle memory, and the indices that it goes by.
#[derive(Debug)]
pub(in crate::backend) struct Handle {
    raw: b::ncclEpHandle_t,
    /// Address of the indices, their number of rows and data type, as NCCL EP was told last.
    bound: Option<(u64, usize, DType)>,
}

// SAFETY: as for `Group`.
unsafe impl Send for Handle {}

/// The descriptors of a staged operation, where NCCL EP finds them until the receive half is queued.
#[derive(Debug)]
#[expect(dead_code, reason = "it is read through NCCL EP's pointers, and ends them by its end")]
pub(in crate::backend) struct Held(Box<Call>);

/// A call's descriptors; once they are bound, they stay where they are.
#[derive(Debug)]
struct Call {
    tokens: LlDescriptor,
    scales: Option<LlDescriptor>,
    out: LlDescriptor,
    out_scales: Option<LlDescriptor>,
    /// Of dispatch the counts, of combine the weights.
    beside: LlDescriptor,
}

impl Call {
    fn of(tokens: &TensorView, out: &TensorView, beside: &TensorView) -> Self {
        let scales = |view| scales_of(view).as_ref().map(LlDescriptor::of_address);
        Self {
            tokens: LlDescriptor::of_address(tokens),
            scales: scales(tokens),
            out: LlDescriptor::of_address(out),
            out_scales: scales(out),
            beside: LlDescriptor::of_address(beside),
        }
    }
}

impl Group {
    /// Bytes of handle memory for `top_k` experts a token; no fewer for more.
    pub(in crate::backend) fn handle_bytes(&self, top_k: u32) -> Result<usize> {
        let mut bytes = 0usize;
        let config = b::ncclEpHandleConfig_t::with_header();
        let (size_of, group, out, config) = (self.ep.ncclEpHandleMemSize, self.raw, &raw mut bytes, &raw const config);
        checked(&self.base.nccl, "ncclEpHandleMemSize", || {
            // SAFETY: the group is live, and `config` and `out` live across the call.
            unsafe { size_of(group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, out, top_k as i32) }
        })?;
        Ok(bytes)
    }

    /// Creates a handle over `memory`, whose contents stay as they are. It is no collective call, as the buffers have their size.
    ///
    /// # Safety
    /// `memory` is device memory of [`Group::handle_bytes`] and outlives the handle's use.
    pub(in crate::backend) unsafe fn open(&self, top_k: u32, memory: &TensorView) -> Result<Handle> {
        let config = b::ncclEpHandleConfig_t::with_header();
        let mut memory = LlDescriptor::of_address(memory);
        let mut raw = std::ptr::null_mut();
        let (init, group, out, config, memory) =
            (self.ep.ncclEpInitHandle, self.raw, &raw mut raw, &raw const config, memory.bind().raw);
        checked(&self.base.nccl, "ncclEpInitHandle", || {
            // SAFETY: the group is live, the rest lives across the call; the caller vouches for the memory.
            unsafe { init(out, group, b::NCCL_EP_LAYOUT_EXPERT_MAJOR, config, top_k as i32, memory) }
        })?;
        Ok(Handle { raw, bound: None })
    }

    /// Tells NCCL EP where the indices are, if it was not told before: it notes them, and queues nothing.
    fn bind_indices(&self, handle: &mut Handle, topk_idx: &TensorView, stream: Stream) -> Result<()> {
        let wanted = (topk_idx.data, topk_idx.shape.sizes()[0], topk_idx.dtype);
        if handle.bound == Some(wanted) {
            return Ok(());
        }
        handle.bound = None;
        let mut topk_idx = LlDescriptor::of_address(topk_idx);
        let (update, raw, topk_idx, stream) =
            (self.ep.ncclEpUpdateHandle, handle.raw, topk_idx.bind().raw, stream.as_raw());
        checked(&self.base.nccl, "ncclEpUpdateHandle", || {
            // SAFETY: handle and descriptor are live; `Stream::bind` vouches for what it describes.
            unsafe { update(raw, topk_idx, std::ptr::null(), stream) }
        })?;
        handle.bound = Some(wanted);
        Ok(())
    }

    /// Sends rows to their experts' ranks; with `send_only` the first half of it.
    pub(in crate::backend) fn dispatch(
        &self,
        handle: &mut Handle,
        call: &LlDispatch,
        send_only: bool,
        stream: Stream,
    ) -> Result<Held> {
        let names = || {
            [
                ("topk_idx", Some(&call.topk_idx)),
                ("inputs.tokens", Some(&call.tokens)),
                ("outputs.tokens", Some(&call.recv_tokens)),
                ("layout_info.expert_counters", Some(&call.counts)),
            ]
        };
        let _caller = Caller::tell(self.set_caller, "nvte_ep_ext_ll_dispatch", names);
        self.bind_indices(handle, &call.topk_idx, stream)?;
        let mut held = Box::new(Call::of(&call.tokens, &call.recv_tokens, &call.counts));
        let mut inputs = b::ncclEpDispatchInputs_t::with_header();
        (inputs.tokens, inputs.scales) = (held.tokens.bind().raw, bind_optional(&mut held.scales));
        let mut outputs = b::ncclEpDispatchOutputs_t::with_header();
        (outputs.tokens, outputs.scales) = (held.out.bind().raw, bind_optional(&mut held.out_scales));
        let mut layout = b::ncclEpLayoutInfo_t::with_header();
        layout.expert_counters = held.beside.bind().raw;
        let mut config = b::ncclEpDispatchConfig_t::with_header();
        config.send_only = send_only.into();
        config.quant_recipe = match (&held.scales, &held.out_scales) {
            (None, None) => b::NCCL_EP_DISP_QUANT_NONE,
            // By its name e3m4, by what it does e4m3.
            (None, Some(_)) => b::NCCL_EP_DISP_QUANT_DS_FP8E3M4,
            (Some(_), _) => b::NCCL_EP_DISP_QUANT_FWD,
        };
        let (dispatch, raw, stream) = (self.ep.ncclEpDispatch, handle.raw, stream.as_raw());
        let (inputs, outputs, layout, config) =
            (&raw const inputs, &raw const outputs, &raw const layout, &raw const config);
        checked(&self.base.nccl, "ncclEpDispatch", || {
            // SAFETY: handle and structures are live, and the descriptors are held; `Stream::bind` vouches for what they
            // describe.
            unsafe { dispatch(raw, inputs, outputs, layout, config, stream) }
        })?;
        Ok(Held(held))
    }

    /// Sums each token's rows, weighted, back on its own rank; with `send_only` the first half of it.
    pub(in crate::backend) fn combine(
        &self,
        handle: &mut Handle,
        call: &LlCombine,
        send_only: bool,
        stream: Stream,
    ) -> Result<Held> {
        let names = || {
            [
                ("topk_idx", Some(&call.topk_idx)),
                ("inputs.tokens", Some(&call.expert_out)),
                ("outputs.tokens", Some(&call.result)),
                ("outputs.topk_weights", Some(&call.topk_weights)),
            ]
        };
        let _caller = Caller::tell(self.set_caller, "nvte_ep_ext_ll_combine", names);
        self.bind_indices(handle, &call.topk_idx, stream)?;
        let mut held = Box::new(Call::of(&call.expert_out, &call.result, &call.topk_weights));
        let mut inputs = b::ncclEpCombineInputs_t::with_header();
        inputs.tokens = held.tokens.bind().raw;
        let mut outputs = b::ncclEpCombineOutputs_t::with_header();
        // In this mode the weights of the sum go in here.
        (outputs.tokens, outputs.topk_weights) = (held.out.bind().raw, held.beside.bind().raw);
        let mut config = b::ncclEpCombineConfig_t::with_header();
        config.send_only = send_only.into();
        let (combine, raw, stream) = (self.ep.ncclEpCombine, handle.raw, stream.as_raw());
        let (inputs, outputs, config) = (&raw const inputs, &raw const outputs, &raw const config);
        checked(&self.base.nccl, "ncclEpCombine", || {
            // SAFETY: as in dispatch.
            unsafe { combine(raw, inputs, outputs, config, stream) }
        })?;
        Ok(Held(held))
    }

    /// The receive half of the operation whose send half was queued on `stream`; its descriptors are still held.
    pub(in crate::backend) fn complete(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let _caller = Caller::tell(self.set_caller, "nvte_ep_ext_ll_complete", || []);
        let config = b::ncclEpCompleteConfig_t::with_header();
        let (complete, raw, config, stream) = (self.ep.ncclEpComplete, handle.raw, &raw const config, stream.as_raw());
        // SAFETY: handle and configuration are live.
        checked(&self.base.nccl, "ncclEpComplete", || unsafe { complete(raw, config, stream) })
    }

    /// Destroys a handle.
    pub(in crate::backend) fn close(&self, handle: Handle) -> Result<()> {
        let (destroy, raw) = (self.ep.ncclEpHandleDestroy, handle.raw);
        // SAFETY: the handle is live, of this group, and consumed here.
        checked(&self.base.nccl, "ncclEpHandleDestroy", || unsafe { destroy(raw) })
    }

    /// What the group was created from.
    pub(in crate::backend) const fn config(&self) -> &LlConfig {
        &self.config
    }

    /// Destroys the group; collective. Its handles are gone and its work is done on every rank.
    pub(in crate::backend) fn destroy(self) -> Result<()> {
        let (destroy, raw) = (self.ep.ncclEpGroupDestroy, self.raw);
        // SAFETY: the group is live and consumed here.
        checked(&self.base.nccl, "ncclEpGroupDestroy", || unsafe { destroy(raw) })
    }
}
