//! The native engine: kernels of our own, within one NVLink domain or on one GPU. `kernels/native/` has the protocol and says
//! how it works; here are its memory and its launches, one a call.

mod kernels;
mod layout;
mod memory;

use super::invalid_indices::InvalidIndices;
use super::{Abort, HeaderOut, Machine};
use crate::config::{GroupConfig, LayerConfig, Overflow, RecvCapacity, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::GroupMemory;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use crate::options::Options;
use crate::preflight::{self, RankLocation};
use crate::sys::cuda::{DeviceFacts, Stream};
use crate::sys::nccl::CommFacts;
use crate::tensor::TensorView;
use kernels::Kernels;
use layout::{CombineArguments, DispatchArguments, GroupLayout, PrepareArguments};
use memory::Memory;
use std::time::Duration;

/// The kernels, loaded.
pub(in crate::backend) struct Candidate(Kernels);

/// Multiprocessors for the group's kernels.
pub(in crate::backend) struct Fit(u32);

/// What `auto` asks before it takes this engine; the rest fails on all engines alike.
///
/// # Errors
/// Why it cannot take the group.
pub(super) fn require_fit(config: &GroupConfig, facts: &DeviceFacts, comm: &CommFacts, nccl: i32) -> Result<()> {
    preflight::device(comm.device, facts)?;
    preflight::nccl_version(nccl)?;
    let domains = comm.links.map_or(0, |links| links.domains);
    require_one_domain((domains > 1).then(|| domains.to_string()))?;
    require_numbered_rows(config)
}

/// `found`: how many domains there are, if not one.
fn require_one_domain(found: Option<String>) -> Result<()> {
    let Some(domains) = found else { return Ok(()) };
    Err(Error::Preflight {
        problem: format!("the native engine works within one NVLink domain, and the communicator has {domains}"),
        remedy: "set the option backend, or NVTE_EP_BACKEND, to nccl_ep".into(),
    })
}

fn require_numbered_rows(config: &GroupConfig) -> Result<()> {
    let rows =
        u64::from(config.ep_size) * u64::from(config.max_tokens_per_rank) * u64::from(layout::most_top_k(config));
    // An entry of the slot table has 25 bits for the row, of which one value is none.
    if rows < (1 << 25) - 1 || config.recv_capacity != RecvCapacity::Eager {
        return Ok(());
    }
    let required =
        "must leave at most 33554430 rows a rank (ep_size * max_tokens_per_rank * num_topk) with the native engine";
    Err(Error::argument("group_config.max_tokens_per_rank", required, rows)
        .with_remedy("lower it, or set the option backend to nccl_ep"))
}

impl Fit {
    /// # Errors
    /// Several NVLink domains, too few multiprocessors, too little memory; the same on every rank.
    pub(in crate::backend) fn of(config: &GroupConfig, options: &Options, places: &[RankLocation]) -> Result<Self> {
        require_one_domain(preflight::domains::beyond_one(places))?;
        let counts = [
            ("option dispatch_sms", options.dispatch_sms),
            ("option combine_sms", options.combine_sms),
            ("option preprocess_sms", options.preprocess_sms),
        ];
        for (name, count) in counts {
            preflight::resident_sms(name, count, places)?;
        }
        // All kernels have the same number of blocks.
        let blocks = match options.dispatch_sms.max(options.combine_sms) {
            Some(count) => count,
            None => preflight::resident_sms(config.dialect.sm_field, config.max_num_sms, places)?,
        };
        let layout = GroupLayout::of(config, blocks);
        preflight::room_for(layout.segment_bytes + layout.own_bytes, places)?;
        Ok(Self(blocks))
    }
}

impl Candidate {
    pub(in crate::backend) fn find(machine: &Machine<'_>) -> Result<Self> {
        preflight::device(machine.device, &machine.facts)?;
        preflight::nccl_version(machine.nccl)?;
        preflight::surroundings(machine.base, &machine.facts, &machine.comm_facts)?;
        require_numbered_rows(&machine.config)?;
        Kernels::load(machine.base, &machine.facts).map(Self)
    }

    pub(in crate::backend) fn location(machine: &Machine<'_>) -> RankLocation {
        preflight::location(machine.base, &machine.facts, &machine.comm_facts, None)
    }

    /// # Safety
    /// The communicator is live, of the machine's NCCL, outlives the group, and its device is current.
    pub(in crate::backend) unsafe fn create(self, machine: &Machine<'_>, Fit(blocks): Fit) -> Result<Group> {
        let layout = GroupLayout::of(&machine.config, blocks);
        // SAFETY: passed on.
        let memory = unsafe { Memory::create(machine, &layout) }?;
        let timeout = machine.env.timeout.map_or(u64::MAX, |limit| {
            // The watchdog comes first: it knows which rank is missing and why.
            u64::try_from((limit + Duration::from_secs(5)).as_nanos()).unwrap_or(u64::MAX)
        });
        let mut group = memory.addresses(&layout);
        (group.rank, group.timeout_ns) = (machine.comm_facts.rank as u32, timeout);
        tracing::info!(target: "nvte_ep", blocks, bytes = layout.segment_bytes, "native engine");
        Ok(Group {
            kernels: self.0,
            memory,
            group,
            layout,
            config: machine.config,
            log: InvalidIndices::new(machine.device),
        })
    }
}

/// The native engine's group.
#[derive(Debug)]
pub(in crate::backend) struct Group {
    kernels: Kernels,
    memory: Memory,
    group: layout::Group,
    layout: GroupLayout,
    config: GroupConfig,
    log: InvalidIndices,
}

/// A layer's tables in one piece of handle memory: nothing that the host has to keep.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Handle {
    tables: layout::Handle,
    /// Rows that slabs are padded to.
    alignment: u32,
}

impl Group {
    /// Bytes of a layer's tables.
    pub(super) fn handle_bytes(&self, layer: &LayerConfig) -> usize {
        GroupLayout::handle(&self.config, layer, self.group.blocks, 0).1
    }

    /// The tables in handle memory at an address.
    pub(super) fn open(&self, layer: &LayerConfig, memory: &TensorView) -> Handle {
        let (tables, _) = GroupLayout::handle(&self.config, layer, self.group.blocks, memory.data);
        Handle { tables, alignment: layer.alignment.tokens() }
    }

    /// What the kernels have found wrong since the last call.
    #[inline]
    fn require_sound(&self) -> Result<()> {
        if self.memory.is_sound() { Ok(()) } else { self.complain() }
    }

    #[cold]
    fn complain(&self) -> Result<()> {
        if let Some(missing) = self.memory.failed_wait() {
            return Err(Error::State(format!(
                "an earlier call of this rank waited too long on the device for {missing}; its results are void, and the group \
                 has to be ended: every rank calls nvte_ep_shutdown, and nvte_ep_initialize on a new communicator"
            )));
        }
        let Some(needed) = self.memory.take_overflow() else { return Ok(()) };
        let RecvCapacity::Fixed(rows) = self.config.recv_capacity else { return Ok(()) };
        Err(Error::State(format!(
            "an earlier step needed {needed} rows on this rank, more than max_recv_tokens_per_rank, {rows}, and the rows beyond were \
             not delivered: raise it, or initialize with overflow = drop; the next step works"
        )))
    }

    /// Exchanges the routing and fills tables, header and counts.
    ///
    /// # Safety
    /// The tensors are device memory of the described extent, live until the queued work is done; `stream` is a stream
    /// of the group's device.
    pub(super) unsafe fn prepare(
        &self,
        handle: &Handle,
        call: &Prepare,
        header: &HeaderOut,
        stream: Stream,
    ) -> Result<()> {
        self.require_sound()?;
        let address = |tensor: &Option<TensorView>| tensor.as_ref().map_or(0, |tensor| tensor.data);
        let is_64 = |tensor: &Option<TensorView>| u8::from(tensor.as_ref().is_some_and(|it| it.dtype == DType::Int64));
        let arguments = PrepareArguments {
            group: self.group,
            handle: handle.tables,
            topk_idx: call.topk_idx.data,
            token_counts: address(&call.token_counts),
            total: address(&call.total),
            header: header.address,
            capacity: match self.config.recv_capacity {
                RecvCapacity::Fixed(rows) => rows.into(),
                RecvCapacity::Eager => u64::MAX,
            },
            header_words: header.words,
            tokens: call.topk_idx.shape.sizes()[0] as u32,
            alignment: handle.alignment.max(1),
            indices_are_64: u8::from(call.topk_idx.dtype == DType::Int64),
            counts_are_64: is_64(&call.token_counts),
            total_is_64: is_64(&call.total),
            drop: u8::from(self.config.overflow == Overflow::Drop),
            // As NCCL EP drops them: it has no buffer for a token's first row there.
            by_place: u8::from(self.config.transfer == Transfer::ZeroCopy),
            unused: [0; 3],
        };
        // SAFETY: passed on.
        unsafe { self.kernels.prepare(&arguments, layout::prepare_shared(&self.group), stream) }
    }

    /// Sends rows, and weights if there are any, to their experts' ranks.
    ///
    /// # Safety
    /// As for [`Group::prepare`].
    pub(super) unsafe fn dispatch(&self, handle: &Handle, call: &Dispatch, stream: Stream) -> Result<()> {
        let weights = (call.topk_weights.as_ref(), call.recv_topk_weights.as_ref());
        // SAFETY: passed on.
        unsafe { self.move_rows(handle, (&call.tokens, &call.recv_tokens), weights, stream) }
    }

    /// Gradient of combine: sends each token's gradient to the rows that the token was summed from.
    ///
    /// # Safety
    /// As for [`Group::prepare`].
    pub(super) unsafe fn combine_bwd(&self, handle: &Handle, call: &CombineBwd, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.move_rows(handle, (&call.grad, &call.grad_expert_out), (None, None), stream) }
    }

    unsafe fn move_rows(
        &self,
        handle: &Handle,
        (tokens, received): (&TensorView, &TensorView),
        (weights, recv_weights): (Option<&TensorView>, Option<&TensorView>),
        stream: Stream,
    ) -> Result<()> {
        self.require_sound()?;
        let row_bytes = row_bytes(received);
        let scales =
            |tensor: &TensorView| tensor.scale_tensor("scales").map_or((0, 0), |it| (it.data, self::row_bytes(&it)));
        let ((scales, scale_bytes), (recv_scales, _)) = (scales(tokens), scales(received));
        let stages = layout::dispatch_stages(&self.group, handle.tables.width, row_bytes, scale_bytes);
        let arguments = DispatchArguments {
            group: self.group,
            handle: handle.tables,
            tokens: tokens.data,
            scales,
            weights: weights.map_or(0, |it| it.data),
            recv_tokens: received.data,
            recv_scales,
            recv_weights: recv_weights.map_or(0, |it| it.data),
            rows: received.shape.sizes()[0] as u64,
            row_bytes,
            scale_bytes,
            piece_bytes: stages.piece_bytes,
            stages: stages.stages[0],
            drop: u32::from(self.config.overflow == Overflow::Drop),
            unused: 0,
        };
        // SAFETY: passed on.
        unsafe { self.kernels.dispatch(&arguments, stages.shared_bytes, stream) }
    }

    /// Sums each token's rows back on its own rank.
    ///
    /// # Safety
    /// As for [`Group::prepare`].
    pub(super) unsafe fn combine(&self, handle: &Handle, call: &Combine, stream: Stream) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.sum_rows(handle, (&call.expert_out, &call.result), (None, None), stream) }
    }

    /// Gradient of dispatch: sums the rows' gradients and gathers the weights' gradients.
    ///
    /// # Safety
    /// As for [`Group::prepare`].
    pub(super) unsafe fn dispatch_bwd(&self, handle: &Handle, call: &DispatchBwd, stream: Stream) -> Result<()> {
        let weights = (call.g_recv_topk_weights.as_ref(), call.grad_topk_weights.as_ref());
        // SAFETY: passed on.
        unsafe { self.sum_rows(handle, (&call.grad, &call.grad_tokens), weights, stream) }
    }

    unsafe fn sum_rows(
        &self,
        handle: &Handle,
        (rows, result): (&TensorView, &TensorView),
        (row_weights, weights): (Option<&TensorView>, Option<&TensorView>),
        stream: Stream,
    ) -> Result<()> {
        self.require_sound()?;
        let row_bytes = row_bytes(result);
        let row_type = layout::ROW_TYPES.iter().position(|dtype| *dtype == result.dtype);
        let row_type = row_type.expect("ops admits no other rows");
        let stages = layout::combine_stages(&self.group, handle.tables.width, row_bytes);
        let arguments = CombineArguments {
            group: self.group,
            handle: handle.tables,
            rows: rows.data,
            row_weights: row_weights.map_or(0, |it| it.data),
            result: result.data,
            weights: weights.map_or(0, |it| it.data),
            row_bytes,
            piece_bytes: stages.piece_bytes,
            peer_stages: stages.stages[0],
            own_stages: stages.stages[1],
            row_type: row_type as u32,
            with_weights: u32::from(weights.is_some()),
        };
        // SAFETY: passed on.
        unsafe { self.kernels.combine(&arguments, stages.shared_bytes, stream) }
    }

    /// See [`super::Engine::abort`].
    pub(super) fn abort(&self) -> Abort {
        self.memory.abort()
    }

    /// See [`super::Engine::invalid_indices`].
    pub(super) fn invalid_indices(&self) -> u64 {
        self.memory.invalid_indices()
    }

    /// See [`super::Engine::report`].
    #[inline]
    pub(super) fn report(&mut self) {
        self.log.report(self.memory.invalid_indices());
    }

    /// What the group holds.
    pub(super) fn memory(&self) -> GroupMemory {
        let windows = self.layout.segment_bytes - self.group.staged_offset;
        GroupMemory { staging: windows, routing_map: self.group.staged_offset, workspace: self.layout.own_bytes }
    }

    /// Frees all of it: queued work is done, and every rank has stopped using its segment.
    pub(super) fn destroy(mut self) -> Result<()> {
        self.log.report_last(self.memory.invalid_indices());
        let Self { kernels, memory, .. } = self;
        let freed = memory.destroy();
        kernels.unload().and(freed)
    }
}

fn row_bytes(tensor: &TensorView) -> u32 {
    let columns = tensor.shape.sizes().last().copied().unwrap_or(0);
    tensor.dtype.bytes(columns) as u32
}
