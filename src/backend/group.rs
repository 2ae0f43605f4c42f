//! The operations of a group, in the order of every call: the group is alive, the stream is its device's, the routing is known,
//! the arguments fit it, their memory is where it has to be, and only then work is queued.

use super::engine::{Engine, Handle, HeaderOut};
use super::live::{Group, HandleRef, Layer, LayerClaim, Live, MemoryUsage, RecvTotals};
use super::prepared::require_no_capture;
use super::registry::EpGroup;
use super::routing::header::{Header, TOTAL_OFFSET};
use super::routing::notes::{Captured, Routing};
use super::stats::{LibraryFacts, Stats};
use super::watchdog::Watchdog;
use crate::config::{GroupConfig, LayerConfig, RecvCapacity};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{GroupMemory, HEADER_BYTES};
use crate::ops::{Arguments, Combine, CombineBwd, Dispatch, DispatchBwd, LayerArguments, Prepare, Prepared, Ranges};
use crate::progress::{Call, Step};
use crate::symm_pool::{self, PoolStatistics};
use crate::sys::cuda::{Stream, StreamState};
use crate::tensor::{Shape, TensorView, Window};
use std::path::PathBuf;

impl EpGroup {
    /// A collective call: refused where the group is at its end.
    #[inline]
    fn watched<T>(&self, body: impl FnOnce(&mut Group, &mut Watchdog) -> Result<T>) -> Result<T> {
        let mut locked = self.lock()?;
        let Live { watchdog, group } = &mut *locked;
        watchdog.require_alive()?;
        body(group, watchdog).map_err(|error| group.engine.explain(error))
    }

    /// Registers a layer; host only. Returns its id, never 0 and never given out twice, and the bytes of handle memory
    /// that it needs.
    ///
    /// # Errors
    /// A layer that does not fit the group, or more layers than `NVTE_EP_HANDLE_CACHE_SIZE`.
    pub fn register_layer(&self, config: LayerConfig) -> Result<(u64, usize)> {
        self.lock()?.group.register_layer(config)
    }

    /// Ends a registration; host only.
    ///
    /// # Errors
    /// An id that is not registered, or what the engine reports.
    pub fn unregister_layer(&self, id: u64) -> Result<()> {
        self.lock()?.group.unregister_layer(id)
    }

    /// Bytes of handle memory that `layer` needs, for handles that go by their address; host only.
    ///
    /// # Errors
    /// A layer that does not fit the group.
    pub fn handle_mem_size(&self, layer: LayerConfig) -> Result<usize> {
        Ok(self.lock()?.group.layer_of(layer)?.mem_bytes())
    }

    /// Exchanges the routing of one step and fills the layer's handle; collective, queued on `stream`.
    ///
    /// # Errors
    /// A broken rule, before anything is enqueued, or what NCCL EP reports.
    pub fn prepare(&self, handle: &HandleRef, claim: LayerClaim, call: &mut Prepare, stream: Stream) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            let layer = group.claimed_layer(handle, claim)?;
            let prepared = call.check(&group.config, &layer.config)?;
            group.resolve_windows(call)?.require_disjoint(&handle.mem, layer.mem_bytes(), call)?;
            group.prepare(watchdog, handle, &layer, call, prepared, (stream, state))
        })
    }

    /// [`EpGroup::prepare`] and [`EpGroup::dispatch`] of `call`, both checked before either is queued (in eager mode all but the
    /// rows of the receive side, which the step itself tells).
    ///
    /// # Errors
    /// As theirs.
    pub fn prepare_and_dispatch(
        &self,
        handle: &HandleRef,
        claim: LayerClaim,
        prepare: &mut Prepare,
        call: &mut Dispatch,
        stream: Stream,
    ) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            let layer = group.claimed_layer(handle, claim)?;
            let mut prepared = prepare.check(&group.config, &layer.config)?;
            group.resolve_windows(prepare)?;
            group.find_scales(call);
            let is_eager = group.config.recv_capacity == RecvCapacity::Eager;
            let given = is_eager.then_some(*call);
            call.check(&group.config, &layer.config, prepared)?;
            group.resolve_windows(call)?;
            Ranges::new::<Prepare>(&handle.mem, layer.mem_bytes()).with(prepare).with(call).require_disjoint()?;
            group.prepare(watchdog, handle, &layer, prepare, prepared, (stream, state))?;
            if let Some(given) = given {
                // Only now is the total known that the receive side has to hold.
                prepared = group.with_total(handle, prepared, (stream, state))?;
                *call = given;
                call.check(&group.config, &layer.config, prepared)?;
                group.resolve_windows(call)?;
            }
            let (step, bytes) = (call.step(&layer.config), own_bytes(call));
            let run = |engine: &Engine, open: &Handle| engine.dispatch(open, call, stream);
            group.queue(watchdog, handle, (&layer, prepared), (step, bytes), (stream, state), run)
        })
    }

    /// One operation over a prepared layer: its rules, then its handle, then the call. The checks leave `call` as the engine gets
    /// it: cut to the rows that count, and by address where no peer reaches.
    fn run_prepared<C: LayerArguments>(
        &self,
        handle: &HandleRef,
        call: &mut C,
        stream: Stream,
        check: impl Fn(&mut C, &GroupConfig, &LayerConfig, Prepared) -> Result<()>,
        run: impl FnOnce(&Engine, &Handle, &C) -> Result<()>,
    ) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            let (mut layer, mut prepared) = group.routing_of(C::CALL, handle, (stream, state))?;
            if group.config.recv_capacity == RecvCapacity::Eager {
                prepared = group.with_total(handle, prepared, (stream, state))?;
            }
            group.find_scales(call);
            if let Err(refused) = check(call, &group.config, &layer.config, prepared) {
                let found = group.revalidate(handle, (&layer, prepared), (stream, state));
                (layer, prepared) = found.ok_or(refused)?;
                // What the first check cut stays cut: to the group's capacity, which is the same for all memory.
                check(call, &group.config, &layer.config, prepared)?;
            }
            group.resolve_windows(call)?.require_disjoint(&handle.mem, layer.mem_bytes(), call)?;
            let (step, bytes) = (call.step(&layer.config), own_bytes(call));
            let run = |engine: &Engine, open: &Handle| run(engine, open, call);
            group.queue(watchdog, handle, (&layer, prepared), (step, bytes), (stream, state), run)
        })
    }

    /// Sends each token's row to the ranks of its experts.
    ///
    /// # Errors
    /// As [`EpGroup::prepare`]; or the layer was not prepared.
    pub fn dispatch(&self, handle: &HandleRef, call: &mut Dispatch, stream: Stream) -> Result<()> {
        let run = |engine: &Engine, handle: &Handle, call: &Dispatch| engine.dispatch(handle, call, stream);
        self.run_prepared(handle, call, stream, Dispatch::check, run)
    }

    /// Sums each token's rows back on its own rank; unweighted.
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    pub fn combine(&self, handle: &HandleRef, call: &mut Combine, stream: Stream) -> Result<()> {
        let run = |engine: &Engine, handle: &Handle, call: &Combine| engine.combine(handle, call, stream);
        self.run_prepared(handle, call, stream, |c, g, _, p| c.check(g, p), run)
    }

    /// Gradient of [`EpGroup::dispatch`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    pub fn dispatch_bwd(&self, handle: &HandleRef, call: &mut DispatchBwd, stream: Stream) -> Result<()> {
        let run = |engine: &Engine, handle: &Handle, call: &DispatchBwd| engine.dispatch_bwd(handle, call, stream);
        self.run_prepared(handle, call, stream, DispatchBwd::check, run)
    }

    /// Gradient of [`EpGroup::combine`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    pub fn combine_bwd(&self, handle: &HandleRef, call: &mut CombineBwd, stream: Stream) -> Result<()> {
        let run = |engine: &Engine, handle: &Handle, call: &CombineBwd| engine.combine_bwd(handle, call, stream);
        self.run_prepared(handle, call, stream, |c, g, _, p| c.check(g, p), run)
    }
}

impl EpGroup {
    /// What the last prepare over the handle memory `mem` found: waits for all that is queued on `stream`.
    ///
    /// # Errors
    /// Memory that was not prepared; a stream that captures; or an error of the queued work.
    pub fn recv_totals(&self, mem: &TensorView, stream: Stream) -> Result<RecvTotals> {
        self.watched(|group, _| group.recv_totals(mem, stream))
    }

    /// Hands out `bytes` bytes of symmetric memory, at the same offset of the same window on every rank; collective, and
    /// behind all queued work of all ranks.
    ///
    /// # Errors
    /// No bytes or no memory; ranks that disagree or do not come (then on every rank).
    pub fn symm_alloc(&self, bytes: u64) -> Result<symm_pool::SymmetricAddress> {
        self.watched(|group, watchdog| {
            watchdog.progress().enter(Step::of(Call::SymmAlloc));
            // SAFETY: the communicator outlives the group, by initialize's contract.
            unsafe { group.symm.alloc(&group.rendezvous, bytes) }
        })
    }

    /// Takes back what [`EpGroup::symm_alloc`] handed out; host only, in one order on all ranks.
    ///
    /// # Errors
    /// An address that it did not hand out, or that was given back already.
    pub fn symm_free(&self, address: u64) -> Result<()> {
        self.lock()?.group.symm.free(address)
    }

    /// Registers a caller's memory as a window; collective, and behind all queued work of all ranks.
    ///
    /// # Errors
    /// Memory that is no window's; ranks that disagree or do not come (then on every rank).
    ///
    /// # Safety
    /// The memory has `bytes` bytes, is NCCL's or of the driver's virtual memory functions, and stays until it is
    /// deregistered or the group has ended.
    pub unsafe fn window_register(&self, address: u64, bytes: u64) -> Result<Window> {
        self.watched(|group, watchdog| {
            watchdog.progress().enter(Step::of(Call::WindowRegister));
            // SAFETY: passed on; the communicator outlives the group, by initialize's contract.
            unsafe { group.symm.window_register(&group.rendezvous, &mut group.residency, address, bytes) }
        })
    }

    /// Ends what [`EpGroup::window_register`] began; collective, and behind all queued work of all ranks.
    ///
    /// # Errors
    /// An address that is not registered; ranks that do not come.
    pub fn window_deregister(&self, address: u64) -> Result<()> {
        self.watched(|group, watchdog| {
            watchdog.progress().enter(Step::of(Call::WindowDeregister));
            // SAFETY: the communicator outlives the group, by initialize's contract.
            unsafe { group.symm.window_deregister(&group.rendezvous, address) }
        })
    }

    /// What lies at `address`, if that is in symmetric memory that this group handed out or registered.
    ///
    /// # Errors
    /// There is no group.
    pub fn symmetric_place(&self, address: u64) -> Result<Option<symm_pool::SymmetricAddress>> {
        Ok(self.lock()?.group.symm.place_of(address))
    }

    /// What the group has done so far; host only.
    ///
    /// # Errors
    /// There is no group; a library that does not tell its version.
    pub fn stats(&self) -> Result<Stats> {
        let group = &self.lock()?.group;
        let (engine, base) = (&group.engine, group.base);
        let facts = |path: Option<&'static PathBuf>, version: i32| LibraryFacts {
            path: path.map(PathBuf::as_path),
            version: version.unsigned_abs(),
        };
        let nccl_ep = engine.library().map(|library| Ok(facts(library.path.as_ref(), library.functions.version()?)));
        Ok(Stats {
            invalid_indices: engine.invalid_indices(),
            handles_bound: group.handles.layers().count() as u64,
            backend: engine.kind(),
            nccl: facts(base.nccl_path.as_ref(), base.nccl.version()?),
            nccl_ep: nccl_ep.transpose()?,
            ..group.stats
        })
    }

    /// Device memory of the group; host only.
    ///
    /// # Errors
    /// There is no group.
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        let mut locked = self.lock()?;
        let group = &mut locked.group;
        let open: Vec<LayerConfig> = group.handles.layers().collect();
        let mut handle_memory = 0;
        for layer in &open {
            handle_memory += group.layer_of(*layer)?.mem_bytes() as u64;
        }
        let GroupMemory { staging, routing_map, workspace } = group.engine.memory();
        let PoolStatistics { reserved, in_use, peak, allocations, segments, registered } = group.symm.statistics();
        Ok(MemoryUsage {
            staging,
            routing_map,
            workspace,
            library: group.rendezvous.bytes(),
            symm_reserved: reserved,
            handle_memory,
            handles: open.len() as u64,
            symm_in_use: in_use,
            symm_peak: peak,
            symm_allocations: allocations,
            symm_segments: segments,
            registered,
            backend: group.engine.kind(),
        })
    }
}

/// Bytes of the rows of this rank's tokens in a call over a prepared layer: its second tensor, as its check left it.
#[inline]
fn own_bytes(call: &mut impl Arguments) -> u64 {
    let [_, own, ..] = call.tensors();
    own.map_or(0, |rows| rows.byte_len())
}

impl Group {
    /// Exchanges the routing, once `prepared` came out of its checks.
    fn prepare(
        &mut self,
        watchdog: &mut Watchdog,
        handle: &HandleRef,
        layer: &Layer,
        call: &Prepare,
        prepared: Prepared,
        (stream, state): (Stream, StreamState),
    ) -> Result<()> {
        if self.config.recv_capacity == RecvCapacity::Eager {
            require_no_capture(state)?;
        }
        self.engine.report();
        let memory = handle.mem.data;
        self.open(handle, layer, None)?;
        // A failed exchange leaves no routing that could be run; a captured one has not happened.
        if state == StreamState::Working {
            self.handles.start_prepare(handle.key, memory);
        }
        let step = call.step(&layer.config);
        let Header(words) = Header::new(&layer.config, prepared, self.epoch);
        let header = HeaderOut { address: memory, words, total: total_of(&handle.mem, call) };
        let open = self.handles.handle(memory).expect("opened just now");
        let queue = || self.engine.prepare(open, call, &header, stream);
        watchdog.queue(step, stream, state, queue)?;
        self.stats.queued(step.call, call.topk_idx.byte_len());
        let routing = Routing { layer: layer.config, prepared };
        match state {
            StreamState::Working => {
                let allocation = self.allocation_of(handle)?;
                self.handles.prepared(memory, routing, allocation);
            }
            StreamState::Capturing => self.handles.captured(memory, Captured { key: handle.key, routing }),
        }
        Ok(())
    }

    /// Queues what a call does over a prepared layer, once it came out of its checks.
    fn queue(
        &mut self,
        watchdog: &mut Watchdog,
        handle: &HandleRef,
        (layer, prepared): (&Layer, Prepared),
        (step, bytes): (Step, u64),
        (stream, state): (Stream, StreamState),
        run: impl FnOnce(&Engine, &Handle) -> Result<()>,
    ) -> Result<()> {
        self.open(handle, layer, Some(prepared))?;
        let open = self.handles.handle(handle.mem.data).expect("opened just now");
        watchdog.queue(step, stream, state, || run(&self.engine, open))?;
        self.handles.used(handle.mem.data, step.call, state == StreamState::Capturing);
        self.stats.queued(step.call, bytes);
        Ok(())
    }

    /// Opens the memory of `handle` for `layer`, where it is not. `prepared` is what it holds, none for a prepare.
    #[inline]
    fn open(&mut self, handle: &HandleRef, layer: &Layer, prepared: Option<Prepared>) -> Result<()> {
        let tokens = prepared.map(|prepared| prepared.num_tokens);
        if self.handles.ready(handle.key, handle.mem.data, &layer.config, tokens) {
            return Ok(());
        }
        self.open_anew(handle, layer, tokens)
    }

    /// Closes the engine's handles that were given up.
    pub(super) fn close_gone(&mut self) -> Result<()> {
        for old in self.handles.take_gone() {
            self.stats.handles_closed += 1;
            self.engine.close(old)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn open_anew(&mut self, handle: &HandleRef, layer: &Layer, tokens: Option<usize>) -> Result<()> {
        self.handles.require_place(handle.key, handle.mem.data)?;
        let memory = handle.mem.bytes(HEADER_BYTES, layer.engine_bytes);
        // SAFETY: the memory is the caller's, of the size that was checked, for as long as the handle is used.
        let opened = unsafe { self.engine.open(&layer.config, &memory) }?;
        tracing::debug!(target: "nvte_ep", memory = handle.mem.data, top_k = layer.config.top_k, "handle created");
        self.handles.put(handle.key, handle.mem.data, layer.config, tokens, opened);
        self.stats.handles_opened += 1;
        self.stats.handles_rebuilt += u64::from(tokens.is_some());
        self.close_gone()
    }
}

/// The total in the header of a handle memory, in the data type of the counts that prepare writes.
fn total_of(mem: &TensorView, call: &Prepare) -> TensorView {
    let dtype = call.total.as_ref().or(call.token_counts.as_ref()).map_or(DType::Int64, |counts| counts.dtype);
    let shape = Shape::vector(1);
    let data = mem.data + TOTAL_OFFSET as u64;
    TensorView { name: "total", dtype, shape, data, window: None, scales: None }
}
