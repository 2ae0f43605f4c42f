//! The EP group of each device and its layers. One lock a device around one `Option`: what one device does never blocks
//! another, nothing can be read outside the lock, and a failed initialize leaves nothing behind.

mod agreement;
mod fork;
mod in_flight;
mod nccl_ep;
mod residency;
mod symm;
mod topk_idx;
mod watch;

pub use nccl_ep::Communicator;

use crate::config::{
    Dialect, GroupConfig, GroupRequest, LayerConfig, Overflow, RecvCapacity, Relocation, SlabAlignment,
};
use crate::dtype::DType;
use crate::env::{Env, RuntimeKind};
use crate::error::{Error, Result};
use crate::handle_cache::{Captured, Entry, HandleCache, HandleKey, Lookup};
use crate::memory::GroupMemory;
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Payloads, Prepare, Prepared, scales_of};
use crate::options::Options;
use crate::patience::Patience;
use crate::preflight::{self, GroupVariables, Place};
use crate::progress::{Call, Progress, Step};
use crate::stamp::{COUNTERS_END, NOT_EXPERTS_OFFSET, STAMP_BYTES, Stamp, TOTAL_OFFSET};
use crate::symm_pool::{self, PoolStatistics};
use crate::sys::cuda::{Stream, StreamState};
use crate::sys::nccl::CommFacts;
use crate::sys::{self, Base, NcclEpLibrary};
use crate::tensor::{Shape, TensorView, Window};
use agreement::{Kind, Meeting, Statement};
use nvte_ep_bindings as b;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use residency::{Fit, Residency};
use rustc_hash::FxHashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use symm::Symm;
use topk_idx::IndexCopier;
use watch::Watch;

/// The place of one device's group. Slots are made at the first initialize of a device and never removed, so a call finds
/// its own without a lock.
struct Slot {
    device: i32,
    group: Mutex<Option<Live>>,
    next: OnceLock<Box<Slot>>,
}

/// A group and the watch over its calls.
struct Live {
    watch: Watch,
    backend: Backend,
}

/// Nothing is torn down at process exit: the libraries below may be gone by then.
static FIRST_SLOT: OnceLock<Box<Slot>> = OnceLock::new();

impl Slot {
    fn all() -> impl Iterator<Item = &'static Self> {
        std::iter::successors(FIRST_SLOT.get(), |slot| slot.next.get()).map(Box::as_ref)
    }

    /// The slot of `device`, made if there is none.
    fn of(device: i32) -> &'static Self {
        let mut place = &FIRST_SLOT;
        loop {
            let new = || Box::new(Self { device, group: Mutex::new(None), next: OnceLock::new() });
            let slot = place.get_or_init(new);
            if slot.device == device {
                return slot;
            }
            place = &slot.next;
        }
    }
}

/// A layer's routing: which it is, and the memory that holds it.
#[derive(Debug, Clone, Copy)]
pub struct HandleRef {
    /// The registered id, or the memory's address.
    pub key: HandleKey,
    /// The caller's handle memory.
    pub mem: TensorView,
}

/// What a prepare says of its layer.
#[derive(Debug, Clone, Copy)]
pub enum LayerClaim {
    /// The layer is registered; the alignment is repeated and has to be the registered one.
    Registered(SlabAlignment),
    /// All of it.
    Given(LayerConfig),
}

/// A layer, resolved. Its handle memory is a stamp of [`STAMP_BYTES`], NCCL EP's part, and the copy of the indices.
#[derive(Debug, Clone, Copy)]
struct Layer {
    config: LayerConfig,
    /// Bytes that NCCL EP needs.
    nccl_bytes: usize,
    /// Bytes of the indices of as many tokens as a rank may have.
    index_bytes: usize,
}

impl Layer {
    const fn index_offset(&self) -> usize {
        STAMP_BYTES + self.nccl_bytes.next_multiple_of(256)
    }

    const fn mem_bytes(&self) -> usize {
        self.index_offset() + self.index_bytes
    }
}

/// Group, layers and handles of one device.
struct Backend {
    base: &'static Base,
    env: Env,
    config: GroupConfig,
    group: nccl_ep::Group,
    /// Dropped by [`Backend::destroy`] alone, and only where CUDA may still be called.
    index_copier: ManuallyDrop<IndexCopier>,
    meeting: Meeting,
    symm: Symm,
    layers: FxHashMap<u64, Layer>,
    /// All kinds of layers that there have been, registered or not.
    kinds: Vec<Layer>,
    handles: HandleCache<nccl_ep::Handle>,
    /// Tells this group's stamps from those of another time.
    epoch: u64,
    residency: Residency,
    /// Handle memory that goes by its address -> which allocation it was at its last call, where that matters
    /// ([`Backend::may_mislead`]): the bytes of other handle memory may be moved to where some was freed.
    allocations: FxHashMap<u64, u64>,
    /// The stream of the last call, which is one of the group's device.
    stream: Option<Stream>,
}

/// What a step's routing needs of a rank's receive buffers, in rows with their padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvTotals {
    /// Rows that arrive.
    pub needed: u64,
    /// Rows of those that the buffers take.
    pub received: u64,
    /// Rows of those that are dropped.
    pub dropped: u64,
    /// This rank's indices that were no expert, and routed nowhere.
    pub not_experts: u64,
}

/// Device memory of a group, of this rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUsage {
    /// NCCL EP's buffers.
    pub group: GroupMemory,
    /// The library's own.
    pub library: u64,
    /// Handle memory, which callers allocate, of all open handles.
    pub handles: u64,
    /// How many handles are open.
    pub open_handles: u64,
    /// The symmetric pool.
    pub symmetric: PoolStatistics,
}

/// The numbers that must be equal on all ranks, by name.
fn agreed(config: &GroupConfig, options: &Options, nccl: i32) -> Vec<(String, u64)> {
    let version = |part: &str| part.parse::<u64>().expect("Cargo's versions are numbers");
    let recv_capacity = match config.recv_capacity {
        RecvCapacity::Eager => 0,
        RecvCapacity::Fixed(rows) => rows.into(),
    };
    let fields = [
        ("num_experts", config.num_experts.into()),
        ("max_tokens_per_rank", config.max_tokens_per_rank.into()),
        ("max_recv_tokens_per_rank", recv_capacity),
        ("hidden_dim", config.hidden_dim.into()),
        (config.dialect.sm_field, config.max_num_sms.unwrap_or(0).into()),
        ("max_token_dtype", config.max_token_dtype as u64),
        ("zero_copy", config.transfer as u64),
    ];
    // Fields in one ABI and options in the other.
    let by_dialect = [
        (config.dialect.num_topk.to_owned(), config.num_topk.unwrap_or(0).into()),
        (config.dialect.overflow.to_owned(), config.overflow as u64),
    ];
    let ours = version(env!("CARGO_PKG_VERSION_MAJOR")) << 32
        | version(env!("CARGO_PKG_VERSION_MINOR")) << 16
        | version(env!("CARGO_PKG_VERSION_PATCH"));
    let versions = [("NCCL version".to_owned(), nccl as u64), ("nvte-ep version".to_owned(), ours)];
    // Those that have become fields of the configuration are compared as such.
    let options = [
        ("dispatch_sms", options.dispatch_sms.unwrap_or(0).into()),
        ("combine_sms", options.combine_sms.unwrap_or(0).into()),
        ("preprocess_sms", options.preprocess_sms.unwrap_or(0).into()),
        ("backend", options.backend as u64),
        ("deterministic", options.deterministic.map_or(2, u64::from)),
        ("symm_segment_bytes", options.symm_segment_bytes),
    ];
    let options = options.into_iter().map(|(name, value)| (format!("option {name}"), value));
    let fields = fields.into_iter().map(|(name, value)| (format!("group_config.{name}"), value));
    let variables = preflight::agreed_variables();
    fields.chain(by_dialect).chain(options).chain(versions).chain(variables).collect()
}

/// Creates the EP group of the calling thread's current device over `comm`. Collective.
///
/// # Errors
/// A bad request, an unfit machine, ranks that disagree (then every rank gets the same text), or what NCCL EP reports.
///
/// # Safety
/// `comm` is null, or a live communicator that outlives [`shutdown`].
pub unsafe fn initialize(comm: Communicator, request: GroupRequest, options: &Options) -> Result<()> {
    crate::log::start();
    fork::require_parent()?;
    let config = GroupConfig::try_from(options.apply(request)?)?;
    if comm.0 == 0 {
        let required = format!("must be an ncclComm_t over the group's {} ranks", config.ep_size);
        return Err(Error::argument("ep_comm", required, "NULL"));
    }
    let mut env = Env::from_process()?;
    env.timeout = options.timeout.unwrap_or(env.timeout);
    env.shutdown_timeout = options.shutdown_timeout.unwrap_or(env.shutdown_timeout);
    let base = sys::base(&env)?;
    let device = base.cuda.current_device()?;
    // SAFETY: the caller vouches for `comm`.
    let comm_facts = unsafe { base.nccl.comm_facts(comm.as_raw()) }?;
    preflight::communicator(&comm_facts, config.ep_size, device)?;
    // Held over the whole creation: a second initialize, or a shutdown, of this device waits for its outcome.
    let mut group = Slot::of(device).group.lock();
    if group.is_some() {
        return Err(Error::AlreadyInitialized { device });
    }
    // SAFETY: as above, and the communicator's device is current.
    *group = Some(unsafe { Backend::create(base, env, device, comm, comm_facts, config, options) }?);
    fork::mark_parent();
    tracing::info!(target: "nvte_ep", device, ?config, rank = comm_facts.rank, "EP group created");
    Ok(())
}

/// The EP group of the calling thread's current device.
///
/// # Errors
/// [`Error::NotInitialized`].
pub fn current_group() -> Result<EpGroup> {
    fork::require_parent()?;
    // Without any slot there was no initialize, and perhaps there is no CUDA either.
    let Some(base) = FIRST_SLOT.get().and_then(|_| sys::loaded_base()) else {
        return Err(Error::NotInitialized { device: None, initialized: Vec::new() });
    };
    let device = base.cuda.current_device()?;
    match Slot::all().find(|slot| slot.device == device) {
        Some(slot) => Ok(EpGroup(slot)),
        None => Err(no_group_on(device)),
    }
}

#[cold]
fn no_group_on(device: i32) -> Error {
    // A slot that is locked is at work, so it has a group.
    let has_group = |slot: &&Slot| slot.group.try_lock().is_none_or(|group| group.is_some());
    let mut initialized: Vec<i32> = Slot::all().filter(has_group).map(|slot| slot.device).collect();
    initialized.sort_unstable();
    Error::NotInitialized { device: Some(device), initialized }
}

/// Tells the ranks that wait for this one that its call `name` failed with `error`, if the current device has a group.
pub(crate) fn tell_failure(name: &str, error: &Error) {
    let Ok(group) = current_group() else { return };
    // A slot at work has another thread's call in it.
    let Some(group) = group.0.group.try_lock() else { return };
    if let Some(live) = group.as_ref() {
        live.watch.failed(name, error);
    }
}

/// Ends every EP group of this process: waits for queued work and for the other ranks (both bounded), then destroys
/// handles and group. The communicators stay the callers'. Without a group nothing happens.
///
/// # Errors
/// [`Error::Teardown`] with all that failed; the groups are gone all the same.
pub fn shutdown() -> Result<()> {
    if fork::is_child() {
        return Ok(());
    }
    let slots: Vec<&Slot> = Slot::all().collect();
    // The lock is kept until all is destroyed: who comes next finds the device free, not half torn down.
    let end = |slot: &Slot| {
        let mut group = slot.group.lock();
        group.take().map_or(Vec::new(), |live| live.destroy(slot.device))
    };
    let failures: Vec<String> = match slots.as_slice() {
        [one] => end(one),
        // Ranks of one process wait for each other, so each device gets a thread.
        many => std::thread::scope(|scope| {
            let threads: Vec<_> = many
                .iter()
                .map(|slot| std::thread::Builder::new().spawn_scoped(scope, move || end(slot)).map_err(|_| end(slot)))
                .collect();
            let joined = threads.into_iter().flat_map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| vec!["a panic during tear-down".into()]),
                // No thread could be started, so this one was ended at once, on this thread.
                Err(failures) => failures,
            });
            joined.collect()
        }),
    };
    if failures.is_empty() { Ok(()) } else { Err(Error::Teardown(failures)) }
}

/// Access to the EP group of one device.
pub struct EpGroup(&'static Slot);

impl EpGroup {
    #[inline]
    fn lock(&self) -> Result<MappedMutexGuard<'static, Live>> {
        MutexGuard::try_map(self.0.group.lock(), Option::as_mut)
            .map_err(|_| Error::NotInitialized { device: Some(self.0.device), initialized: Vec::new() })
    }

    /// A collective call: refused where the group is at its end.
    #[inline]
    fn watched<T>(&self, body: impl FnOnce(&mut Backend, &mut Watch) -> Result<T>) -> Result<T> {
        let mut locked = self.lock()?;
        let Live { watch, backend } = &mut *locked;
        watch.require_alive()?;
        body(backend, watch).map_err(|error| backend.explain(error))
    }

    /// Registers a layer; host only. Returns its id, never 0 and never given out twice, and the bytes of handle memory
    /// that it needs.
    ///
    /// # Errors
    /// A layer that does not fit the group, or more layers than `NVTE_EP_HANDLE_CACHE_SIZE`.
    pub fn register_layer(&self, config: LayerConfig) -> Result<(u64, usize)> {
        self.lock()?.backend.register_layer(config)
    }

    /// Bytes of handle memory that `layer` needs, for handles that go by their address; host only.
    ///
    /// # Errors
    /// A layer that does not fit the group.
    pub fn handle_mem_size(&self, layer: LayerConfig) -> Result<usize> {
        Ok(self.lock()?.backend.layer_of(layer)?.mem_bytes())
    }

    /// Exchanges the routing of one step and fills the layer's handle; collective, queued on `stream`.
    ///
    /// # Errors
    /// A broken rule, before anything is enqueued, or what NCCL EP reports.
    ///
    /// # Safety
    /// The tensors are device memory of the described extent, live until the queued work is done; `stream` is a stream
    /// of the group's device; every rank makes the same calls in the same order.
    pub unsafe fn prepare(&self, handle: &HandleRef, claim: LayerClaim, call: &Prepare, stream: Stream) -> Result<()> {
        self.watched(|backend, watch| {
            // SAFETY: passed on.
            let state = unsafe { backend.enter(stream) }?;
            let layer = backend.claimed_layer(handle, claim)?;
            let prepared = call.check(&backend.config, &layer.config)?;
            backend.check_prepare_memory(call)?;
            // SAFETY: passed on.
            unsafe { backend.prepare(watch, handle, &layer, call, prepared, (stream, state)) }
        })
    }

    /// [`EpGroup::prepare`] and [`EpGroup::dispatch`] of `call`, both checked before either is queued (in eager mode all but the
    /// rows of the receive side, which the step itself tells).
    ///
    /// # Errors
    /// As theirs.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn prepare_and_dispatch(
        &self,
        handle: &HandleRef,
        claim: LayerClaim,
        prepare: &Prepare,
        call: &mut Dispatch,
        stream: Stream,
    ) -> Result<()> {
        self.watched(|backend, watch| {
            // SAFETY: passed on.
            let state = unsafe { backend.enter(stream) }?;
            let layer = backend.claimed_layer(handle, claim)?;
            let mut prepared = prepare.check(&backend.config, &layer.config)?;
            backend.check_prepare_memory(prepare)?;
            backend.find_scales(call);
            let is_eager = backend.config.recv_capacity == RecvCapacity::Eager;
            let given = is_eager.then_some(*call);
            call.check(&backend.config, &layer.config, prepared)?;
            backend.settle_memory(call)?;
            // SAFETY: passed on.
            unsafe { backend.prepare(watch, handle, &layer, prepare, prepared, (stream, state)) }?;
            if let Some(given) = given {
                // Only now is the total known that the receive side has to hold.
                // SAFETY: passed on.
                prepared = unsafe { backend.with_total(handle, prepared, (stream, state)) }?;
                *call = given;
                call.check(&backend.config, &layer.config, prepared)?;
                backend.settle_memory(call)?;
            }
            let step = call.step(&layer.config);
            let (group, entry) = backend.handle(handle, &layer, Some(prepared))?;
            // SAFETY: passed on.
            let queue = || unsafe { group.dispatch(&entry.handle, call, stream) };
            // SAFETY: passed on.
            unsafe { watch.queue(step, stream, state, queue) }
        })
    }

    /// One operation over a prepared layer: its rules, then its handle, then the call. The checks leave `call` as NCCL EP gets
    /// it: cut to the rows that count, and by address where no peer reaches.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    unsafe fn replay<C: Payloads>(
        &self,
        handle: &HandleRef,
        call: &mut C,
        stream: Stream,
        check: impl Fn(&mut C, &GroupConfig, &LayerConfig, Prepared) -> Result<()>,
        run: impl FnOnce(&nccl_ep::Group, &nccl_ep::Handle, &C) -> Result<()>,
    ) -> Result<()> {
        self.watched(|backend, watch| {
            // SAFETY: passed on.
            let state = unsafe { backend.enter(stream) }?;
            // SAFETY: passed on.
            let (mut layer, mut prepared) = unsafe { backend.prepared_layer(handle, (stream, state)) }?;
            if backend.config.recv_capacity == RecvCapacity::Eager {
                // SAFETY: passed on.
                prepared = unsafe { backend.with_total(handle, prepared, (stream, state)) }?;
            }
            backend.find_scales(call);
            if let Err(refused) = check(call, &backend.config, &layer.config, prepared) {
                // SAFETY: passed on.
                let found = unsafe { backend.look_again(handle, (&layer, prepared), (stream, state)) };
                (layer, prepared) = found.ok_or(refused)?;
                // What the first check cut stays cut: to the group's capacity, which is the same for all memory.
                check(call, &backend.config, &layer.config, prepared)?;
            }
            backend.settle_memory(call)?;
            let step = call.step(&layer.config);
            let (group, entry) = backend.handle(handle, &layer, Some(prepared))?;
            // SAFETY: passed on.
            unsafe { watch.queue(step, stream, state, || run(group, &entry.handle, call)) }?;
            entry.spent |= C::CALL == Call::DispatchBwd;
            Ok(())
        })
    }

    /// Sends each token's row to the ranks of its experts.
    ///
    /// # Errors
    /// As [`EpGroup::prepare`]; or the layer was not prepared.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn dispatch(&self, handle: &HandleRef, call: &mut Dispatch, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: &Dispatch| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.dispatch(handle, call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, call, stream, Dispatch::check, run) }
    }

    /// Sums each token's rows back on its own rank; unweighted.
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn combine(&self, handle: &HandleRef, call: &mut Combine, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: &Combine| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.combine(handle, call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, call, stream, |c, g, _, p| c.check(g, p), run) }
    }

    /// Gradient of [`EpGroup::dispatch`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn dispatch_bwd(&self, handle: &HandleRef, call: &mut DispatchBwd, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: &DispatchBwd| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.dispatch_bwd(handle, call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, call, stream, DispatchBwd::check, run) }
    }

    /// Gradient of [`EpGroup::combine`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn combine_bwd(&self, handle: &HandleRef, call: &mut CombineBwd, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: &CombineBwd| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.combine_bwd(handle, call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, call, stream, |c, g, _, p| c.check(g, p), run) }
    }
}

impl EpGroup {
    /// What the last prepare over the handle memory `mem` found: waits for all that is queued on `stream`.
    ///
    /// # Errors
    /// Memory that was not prepared; a stream that captures; or an error of the queued work.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn recv_totals(&self, mem: &TensorView, stream: Stream) -> Result<RecvTotals> {
        // SAFETY: passed on.
        self.watched(|backend, _| unsafe { backend.recv_totals(mem, stream) })
    }

    /// Hands out `bytes` bytes of symmetric memory, at the same offset of the same window on every rank; collective, and
    /// behind all queued work of all ranks.
    ///
    /// # Errors
    /// No bytes or no memory; ranks that disagree or do not come (then on every rank).
    pub fn symm_alloc(&self, bytes: u64) -> Result<symm_pool::Place> {
        self.watched(|backend, watch| {
            watch.progress().enter(Step::of(Call::SymmAlloc));
            // SAFETY: the communicator outlives the group, by initialize's contract.
            unsafe { backend.symm.alloc(&backend.meeting, bytes) }
        })
    }

    /// Takes back what [`EpGroup::symm_alloc`] handed out; host only, in one order on all ranks.
    ///
    /// # Errors
    /// An address that it did not hand out, or that was given back already.
    pub fn symm_free(&self, address: u64) -> Result<()> {
        self.lock()?.backend.symm.free(address)
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
        self.watched(|backend, watch| {
            watch.progress().enter(Step::of(Call::WindowRegister));
            // SAFETY: passed on; the communicator outlives the group, by initialize's contract.
            unsafe { backend.symm.window_register(&backend.meeting, &mut backend.residency, address, bytes) }
        })
    }

    /// Ends what [`EpGroup::window_register`] began; collective, and behind all queued work of all ranks.
    ///
    /// # Errors
    /// An address that is not registered; ranks that do not come.
    pub fn window_deregister(&self, address: u64) -> Result<()> {
        self.watched(|backend, watch| {
            watch.progress().enter(Step::of(Call::WindowDeregister));
            // SAFETY: the communicator outlives the group, by initialize's contract.
            unsafe { backend.symm.window_deregister(&backend.meeting, address) }
        })
    }

    /// What lies at `address`, if that is in symmetric memory that this group handed out or registered.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn symmetric_place(&self, address: u64) -> Result<Option<symm_pool::Place>> {
        Ok(self.lock()?.backend.symm.place_of(address))
    }

    /// Device memory of the group; host only.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        let mut locked = self.lock()?;
        let backend = &mut locked.backend;
        let open: Vec<LayerConfig> = backend.handles.layers().collect();
        let mut handles = 0;
        for layer in &open {
            handles += backend.layer_of(*layer)?.mem_bytes() as u64;
        }
        Ok(MemoryUsage {
            group: GroupMemory::of(&backend.config),
            library: backend.meeting.bytes(),
            handles,
            open_handles: open.len() as u64,
            symmetric: backend.symm.statistics(),
        })
    }
}

impl Backend {
    /// # Safety
    /// `comm` is live, outlives the backend, and its device, `device`, is current.
    unsafe fn create(
        base: &'static Base,
        env: Env,
        device: i32,
        comm: Communicator,
        comm_facts: CommFacts,
        config: GroupConfig,
        options: &Options,
    ) -> Result<Live> {
        let facts = base.cuda.device_facts(device)?;
        let nccl = base.nccl.version()?;
        let ready = || -> Result<(&'static NcclEpLibrary, IndexCopier)> {
            preflight::device(device, &facts)?;
            preflight::nccl_version(nccl)?;
            preflight::surroundings(base, &facts, &comm_facts)?;
            let library = sys::nccl_ep(base, &env)?;
            preflight::separate_sms(&config, options, library)?;
            match base.runtime {
                RuntimeKind::Cuda => preflight::jit(base, library, nccl)?.export(),
                RuntimeKind::Host => preflight::host_compiler(library)?,
            }
            tracing::info!(target: "nvte_ep", path = ?library.path, version = library.functions.version()?, "NCCL EP");
            Ok((library, IndexCopier::load(&base.cuda, device)?))
        };
        // A rank that cannot go on says so to all of them, rather than leave them waiting for it.
        let ready = ready();
        let place = preflight::place(base, &facts, &comm_facts, ready.as_ref().ok().map(|(library, _)| *library));
        let (names, equal): (Vec<_>, Vec<_>) = agreed(&config, options, nccl).into_iter().unzip();
        let mut own = place.words();
        own.push(random());
        let own = Statement { equal, own, refusal: ready.as_ref().err().map(Error::to_string) };
        let mut meeting = Meeting::new(base, comm, comm_facts)?;
        // SAFETY: the caller vouches for `comm`.
        let statements =
            unsafe { meeting.exchange(Kind::Statement, &own, env.timeout, "all ranks to call nvte_ep_initialize") };
        let statements = match statements {
            Ok(statements) => statements,
            Err(error) => {
                if matches!(error, Error::TimeOut { .. }) {
                    // What was given up on may still use its memory, and freeing any waits for it.
                    std::mem::forget(ready);
                } else {
                    meeting.close_after_failure();
                }
                return Err(error);
            }
        };
        let (keys, places): (Vec<u64>, Vec<Place>) = statements
            .iter()
            .map(|statement| {
                let (key, place) = statement.own.split_last().expect("as many numbers as were asked for");
                (*key, Place::from_words(place))
            })
            .unzip();
        let agreed = agreement::compare(&names, &statements)
            .and_then(|()| preflight::fit(&config, options, &places))
            .and_then(|sms| {
                // All ranks come here or none does: what was compared is the same on all of them.
                let (own, key) = (comm_facts.rank as usize, keys[0]);
                let here = places.iter().map(|there| there.host == place.host).collect();
                let progress = Progress::join(key, own, here);
                // SAFETY: the caller vouches for `comm`.
                let confirmed = unsafe { meeting.confirm(env.timeout, "all ranks to go on with nvte_ep_initialize") };
                Progress::close_door(key);
                confirmed.map(|()| (sms, progress))
            });
        let (library, index_copier, sms, progress) = match (ready, agreed) {
            (Ok((library, index_copier)), Ok((sms, progress))) => (library, index_copier, sms, progress),
            (ready, Err(error @ Error::TimeOut { .. })) => {
                std::mem::forget(ready);
                return Err(error);
            }
            (ready, agreed) => {
                meeting.close_after_failure();
                // A rank's own error reads the same on all ranks.
                return Err(agreed.err().or(ready.err()).expect("one of them failed"));
            }
        };
        if base.runtime == RuntimeKind::Cuda {
            preflight::widen_local_kernels(&places, place);
            preflight::keep_slot_order();
        }
        let variables = GroupVariables::set(options, sms);
        // SAFETY: the caller vouches for `comm` and the current device.
        let group = unsafe { nccl_ep::Group::create(base, library, comm, &config, sms.dispatch.max(sms.combine)) };
        drop(variables);
        let group = match group {
            Ok(group) => group,
            Err(error) => {
                meeting.close_after_failure();
                // InvalidUsage is all that a refused NCCL version comes back as; the library's reason goes to stderr.
                let refused = matches!(&error, Error::Library { code, .. } if *code == i64::from(b::ncclInvalidUsage));
                return Err(match library.version_gate(nccl).filter(|_| refused) {
                    Some(problem) => Error::Preflight { problem: error.to_string(), remedy: problem },
                    None => error,
                });
            }
        };
        let handles =
            HandleCache::new(config.relocation, env.handle_cache_size.limit(config.dialect.default_handle_limit));
        let watch = Watch::start(base, device, progress, env.timeout, env.shutdown_timeout);
        meeting.watch(watch.share());
        static EPOCH: AtomicU64 = AtomicU64::new(0);
        let backend = Self {
            symm: Symm::new(base, comm, device, options.symm_segment_bytes, env.timeout),
            base,
            env,
            config,
            group,
            index_copier: ManuallyDrop::new(index_copier),
            meeting,
            layers: FxHashMap::default(),
            kinds: Vec::new(),
            handles,
            epoch: EPOCH.fetch_add(1, Ordering::Relaxed),
            residency: Residency::new(device),
            allocations: FxHashMap::default(),
            stream: None,
        };
        Ok(Live { watch, backend })
    }

    fn register_layer(&mut self, config: LayerConfig) -> Result<(u64, usize)> {
        let limit = self.env.handle_cache_size.limit(self.config.dialect.default_handle_limit);
        if let Some(limit) = limit.filter(|limit| self.layers.len() >= *limit) {
            return Err(Error::State(format!(
                "{limit} layers are registered, as many as NVTE_EP_HANDLE_CACHE_SIZE allows: raise it, or register each \
                 layer once and keep its id (registrations end with nvte_ep_shutdown)"
            )));
        }
        let layer = self.layer_of(config)?;
        let id = next_layer_id();
        self.layers.insert(id, layer);
        tracing::debug!(target: "nvte_ep", id, ?layer, "layer registered");
        Ok((id, layer.mem_bytes()))
    }

    /// A layer that fits the group, and what its handle memory has to hold.
    #[inline]
    fn layer_of(&mut self, config: LayerConfig) -> Result<Layer> {
        match self.kinds.iter().find(|kind| kind.config == config) {
            Some(kind) => Ok(*kind),
            None => self.new_kind(config),
        }
    }

    #[cold]
    fn new_kind(&mut self, config: LayerConfig) -> Result<Layer> {
        config.check_against(&self.config)?;
        let index_bytes = DType::Int64.bytes(self.config.max_tokens_per_rank as usize * config.top_k as usize);
        let layer = Layer { config, nccl_bytes: self.group.handle_mem_size(config.top_k)?, index_bytes };
        self.kinds.push(layer);
        Ok(layer)
    }

    #[inline]
    fn registered_layer(&self, id: u64) -> Result<Layer> {
        self.layers.get(&id).copied().ok_or_else(|| {
            let required = "must be an id that nvte_ep_register_layer returned since the last nvte_ep_initialize";
            Error::argument("handle.id", required, id)
        })
    }

    /// The layer that a prepare claims, over memory that is fit for it.
    fn claimed_layer(&mut self, handle: &HandleRef, claim: LayerClaim) -> Result<Layer> {
        let layer = match (handle.key, claim) {
            (HandleKey::Registered(id), LayerClaim::Registered(alignment)) => {
                let layer = self.registered_layer(id)?;
                if alignment != layer.config.alignment {
                    return Err(Error::argument(
                        "dispatch_output_per_expert_alignment",
                        format!("must equal the registered {}", layer.config.alignment),
                        alignment,
                    )
                    .with_remedy("register another layer for another alignment"));
                }
                layer
            }
            (_, LayerClaim::Given(config)) => self.layer_of(config)?,
            (HandleKey::Address(_), LayerClaim::Registered(_)) => {
                return Err(Error::Internal("an address with a registered layer".into()));
            }
        };
        self.require_memory(&handle.mem, layer.mem_bytes())?;
        Ok(layer)
    }

    /// The layer of `handle` and what its last prepare left: from the registry or the cache, or, for memory that is not
    /// in the cache, from its stamp.
    ///
    /// # Safety
    /// The handle memory is device memory of the described extent; `stream` is a stream of the group's device.
    #[inline]
    unsafe fn prepared_layer(
        &mut self,
        handle: &HandleRef,
        stream: (Stream, StreamState),
    ) -> Result<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let registered = match handle.key {
            HandleKey::Registered(id) => Some(self.registered_layer(id)?),
            HandleKey::Address(_) => None,
        };
        self.require_memory(&handle.mem, registered.map_or(STAMP_BYTES, |layer| layer.mem_bytes()))?;
        let entry = self.handles.get_mut(handle.key);
        let known = entry.as_ref().map(|entry| (entry.layer, entry.memory));
        let spent = entry.is_some_and(|entry| entry.spent);
        let (_, state) = stream;
        let by_graph = self.handles.is_captured(memory);
        // Whether other bytes are here for certain, and whether they may be.
        let (mut other, mut doubted) = (false, false);
        if self.may_mislead(handle.key) {
            doubted = spent;
            if registered.is_none() {
                let id = self.base.cuda.allocation_id(memory)?;
                match self.allocations.get(&memory) {
                    Some(known) => other = *known != id,
                    // Of a time when it did not matter.
                    None => {
                        doubted = true;
                        self.allocations.insert(memory, id);
                    }
                }
            }
        }
        let (config, prepared) = match known {
            // What is captured goes by the prepare that comes last, captured or not.
            _ if by_graph && state == StreamState::Capturing && self.handles.captured(memory).is_some() => {
                let captured = self.handles.captured(memory).filter(|captured| captured.key == handle.key);
                let captured = captured.ok_or_else(|| not_prepared(handle))?;
                (captured.layer, Some(captured.prepared))
            }
            Some((config, at)) if at == memory && by_graph && state == StreamState::Capturing => {
                (config, self.handles.prepared(handle.key, memory))
            }
            // The layer's own memory, as far as this process knows.
            Some((config, at)) if at == memory && !by_graph && !other => {
                (config, self.handles.prepared(handle.key, memory))
            }
            // Registered and never prepared anywhere.
            None if registered.is_some() => return Err(not_prepared(handle)),
            // Memory that is new to the library: moved here, or given up by the cache. Or a graph may have prepared it.
            _ => {
                if let (Some(layer), Some(_)) = (registered, known) {
                    // Refused by the group's policy, if so, before anything is read.
                    self.handles.lookup(handle.key, memory, &layer.config, None)?;
                }
                // SAFETY: passed on.
                let stamp = unsafe { self.read_stamp(memory, stream) }?;
                let (config, prepared) = stamp.read(self.epoch).ok_or_else(|| not_prepared(handle))?;
                self.handles.found_here(handle.key, memory, &config);
                if known.is_some_and(|(_, at)| at == memory) {
                    // Captured calls go by it, where a graph's prepare is not theirs.
                    self.handles.moved_here(handle.key, memory, &config, prepared);
                }
                if other {
                    self.allocations.insert(memory, self.base.cuda.allocation_id(memory)?);
                }
                (config, Some(prepared))
            }
        };
        let prepared = prepared.ok_or_else(|| not_prepared(handle))?;
        let (layer, fits) = match registered {
            Some(layer) if layer.config == config => (layer, Ok(())),
            Some(_) => return Err(not_prepared(handle)),
            None => {
                let layer = self.layer_of(config)?;
                (layer, self.require_memory(&handle.mem, layer.mem_bytes()))
            }
        };
        // Of memory that is too small for what is known, a smaller layer may have taken the place.
        if fits.is_err() || doubted && state == StreamState::Working {
            // SAFETY: passed on.
            let found = unsafe { self.look_again(handle, (&layer, prepared), stream) };
            return found.map_or_else(|| fits.map(|()| (layer, prepared)), Ok);
        }
        Ok((layer, prepared))
    }

    /// Whether what is known of handle memory may pass for what is there now, though other bytes were moved there: layers of
    /// several kinds differ in more than a call's arguments tell, and so do totals.
    #[inline]
    fn may_mislead(&self, key: HandleKey) -> bool {
        self.config.recv_capacity == RecvCapacity::Eager || matches!(key, HandleKey::Address(_)) && self.kinds.len() > 1
    }

    /// What the memory of a call holds, if that is not what is `known` of it and does not fit, or may not: the bytes of other
    /// handle memory may have been moved to where some was, in one allocation of a caching allocator. Nothing if the memory
    /// cannot be read soon: a refusal waits for no other rank. In a capture: what is known besides.
    ///
    /// # Safety
    /// As [`Backend::prepared_layer`].
    #[cold]
    unsafe fn look_again(
        &mut self,
        handle: &HandleRef,
        known: (&Layer, Prepared),
        (stream, state): (Stream, StreamState),
    ) -> Option<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let (config, found) = match state {
            // Nothing can be read. A captured call may go by a graph's prepare or by what a call prepared or found there.
            StreamState::Capturing => {
                let entry = self.handles.get_mut(handle.key).filter(|entry| entry.memory == memory)?;
                (entry.layer, entry.prepared?)
            }
            StreamState::Working if self.config.relocation == Relocation::Refuse => return None,
            // A wait for it would break the captures of streams that it waits for.
            // SAFETY: passed on.
            StreamState::Working if stream.is_legacy() && unsafe { self.base.cuda.is_capturing(stream) }.is_err() => {
                return None;
            }
            StreamState::Working => {
                let soon = Some(Duration::from_secs(1));
                // SAFETY: passed on; the stream does not capture.
                let [first, second, low, high] = unsafe { self.read_words(memory, stream, soon) }.ok()?;
                let (config, prepared) = Stamp([first, second]).read(self.epoch)?;
                let eager = self.config.recv_capacity == RecvCapacity::Eager;
                let recv_total = eager.then_some(u64::from(high) << 32 | u64::from(low));
                (config, Prepared { recv_total, ..prepared })
            }
        };
        let known_prepared = Prepared { recv_total: found.recv_total.and(known.1.recv_total), ..known.1 };
        if (known.0.config, known_prepared) == (config, found) {
            return None;
        }
        let layer = match handle.key {
            HandleKey::Registered(_) if known.0.config == config => *known.0,
            HandleKey::Registered(_) => return None,
            HandleKey::Address(_) => self.layer_of(config).ok()?,
        };
        self.require_memory(&handle.mem, layer.mem_bytes()).ok()?;
        if state == StreamState::Working {
            self.handles.moved_here(handle.key, memory, &config, found);
        }
        Some((layer, found))
    }

    /// # Safety
    /// As [`Backend::prepared_layer`].
    #[inline(never)]
    unsafe fn read_stamp(&self, address: u64, (stream, state): (Stream, StreamState)) -> Result<Stamp> {
        if state == StreamState::Capturing {
            return Err(Error::State(
                "handle memory that is new to the library cannot be looked into while the stream captures a graph: make \
                 this call, or nvte_ep_prepare, once before the capture"
                    .into(),
            ));
        }
        // SAFETY: passed on; the stream does not capture.
        Ok(Stamp(unsafe { self.read_words(address, stream, None) }?))
    }

    /// Reads words of handle memory behind what is queued on `stream`, unless `limit` is over or the group comes to its end
    /// before.
    ///
    /// # Safety
    /// As [`Backend::prepared_layer`]; the stream does not capture.
    unsafe fn read_words<const N: usize>(
        &self,
        address: u64,
        stream: Stream,
        limit: Option<Duration>,
    ) -> Result<[u32; N]> {
        let ended = || self.meeting.ended();
        // SAFETY: passed on.
        unsafe { self.base.cuda.read_words(address, stream, limit, &ended) }
    }

    /// What a call's stream does. Fails if it is not the device's, or if the device has failed: NCCL EP aborts or exits on
    /// a failed device (nccl_ep 0.1.0).
    ///
    /// # Safety
    /// `stream` is a live stream.
    #[inline]
    unsafe fn enter(&mut self, stream: Stream) -> Result<StreamState> {
        if self.stream != Some(stream) && !stream.is_legacy() {
            // SAFETY: passed on.
            if !unsafe { self.base.cuda.is_of_current_context(stream) }? {
                let required = "must be a stream of the calling thread's current device, which is the group's";
                return Err(Error::argument("stream", required, format!("{:#x}, one of another device", stream.0)));
            }
            self.stream = Some(stream);
        }
        // SAFETY: passed on.
        unsafe { self.base.cuda.stream_state(stream) }
    }

    /// An error of queued work, with the reason that this group may have given for it.
    fn explain(&self, error: Error) -> Error {
        let fatal = [b::CUDA_ERROR_LAUNCH_FAILED, b::CUDA_ERROR_ASSERT, b::CUDA_ERROR_ILLEGAL_INSTRUCTION];
        let is_fatal = |call: &str, code: i64| match call.starts_with("cu") {
            true => fatal.iter().any(|fatal| i64::from(*fatal) == code),
            false => code == i64::from(b::ncclUnhandledCudaError),
        };
        match (&error, self.config.recv_capacity, self.config.overflow) {
            (Error::Library { call, code, text }, RecvCapacity::Fixed(rows), Overflow::Trap)
                if is_fatal(call, *code) =>
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

    /// In the ABI whose windows have no place for scales, those of rows that lie in a window are looked up by their
    /// address.
    #[inline]
    fn find_scales(&self, call: &mut impl Payloads) {
        for rows in call.payloads().into_iter().flatten() {
            let (Some(_), Some(scales)) = (rows.window, &mut rows.scales) else { continue };
            if self.config.dialect == Dialect::REGISTER_LAYER {
                scales.window = self.symm.place_of(scales.data).map(|place| place.window);
            }
        }
    }

    /// Checks where a call's tensors lie. Those that peers do not reach go by their addresses from here on: nothing is gained
    /// by a window there, and NCCL EP (0.1.0) does not look at all of them.
    #[inline]
    fn settle_memory(&mut self, call: &mut impl Payloads) -> Result<()> {
        for (index, tensor) in call.payloads().into_iter().enumerate() {
            match tensor {
                Some(tensor) if tensor.window.is_some() || tensor.scales.is_some() => {
                    self.settle(tensor, index == 0)?
                }
                Some(tensor) => self.require_reachable(tensor)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Checks where a tensor with windows or scales lies.
    #[inline(never)]
    fn settle(&mut self, tensor: &mut TensorView, reached_by_peers: bool) -> Result<()> {
        let address = self.symm.check_window(tensor)?;
        let scales = match scales_of(tensor) {
            Some(scales) if scales.window.is_some() => self.symm.check_window(&scales)?,
            Some(scales) => self.require_reachable(&scales).map(|()| None)?,
            None => None,
        };
        if tensor.window.is_none() {
            self.require_reachable(tensor)?;
        }
        if reached_by_peers {
            return Ok(());
        }
        if let Some(address) = address {
            (tensor.data, tensor.window) = (address, None);
        }
        if let (Some(address), Some(kept)) = (scales, &mut tensor.scales) {
            (kept.data, kept.window) = (address, None);
        }
        Ok(())
    }

    /// # Errors
    /// A tensor that the group's device cannot reach, or whose allocation ends before it does.
    #[inline]
    fn require_reachable(&mut self, tensor: &TensorView) -> Result<()> {
        self.residency.check(&self.base.cuda, tensor, tensor.byte_len(), Fit::Reachable)
    }

    fn check_prepare_memory(&mut self, call: &Prepare) -> Result<()> {
        self.require_reachable(&call.topk_idx)?;
        [&call.token_counts, &call.total].into_iter().flatten().try_for_each(|tensor| self.require_reachable(tensor))
    }

    /// Handle memory of at least `bytes` bytes on the group's device.
    #[inline]
    fn require_memory(&mut self, mem: &TensorView, bytes: usize) -> Result<()> {
        require_memory(mem, bytes)?;
        self.residency.check(&self.base.cuda, mem, bytes as u64, Fit::OnDevice)
    }

    /// What the last prepare of `handle` left, with the step's total, which is read back once a prepare: the calling
    /// thread waits for the stream.
    ///
    /// # Safety
    /// As [`Backend::prepared_layer`].
    unsafe fn with_total(
        &mut self,
        handle: &HandleRef,
        prepared: Prepared,
        (stream, state): (Stream, StreamState),
    ) -> Result<Prepared> {
        require_no_capture(state)?;
        if prepared.recv_total.is_some() {
            return Ok(prepared);
        }
        // SAFETY: passed on; the stream does not capture.
        let [low, high] = unsafe { self.read_words(handle.mem.data + TOTAL_OFFSET as u64, stream, None) }?;
        let total = u64::from(high) << 32 | u64::from(low);
        self.handles.note_total(handle.mem.data, total);
        Ok(Prepared { recv_total: Some(total), ..prepared })
    }

    /// # Safety
    /// As [`Backend::prepared_layer`].
    unsafe fn recv_totals(&mut self, mem: &TensorView, stream: Stream) -> Result<RecvTotals> {
        self.require_memory(mem, STAMP_BYTES)?;
        // SAFETY: passed on.
        if unsafe { self.enter(stream) }.map_err(|error| self.explain(error))? == StreamState::Capturing {
            return Err(Error::State(
                "the totals are on the device and cannot be waited for while the stream captures a graph: call it after \
                 the graph was launched"
                    .into(),
            ));
        }
        // SAFETY: passed on; the stream does not capture.
        let words = unsafe { self.read_words(mem.data, stream, None) }.map_err(|error| self.explain(error))?;
        let [first, second, low, high, not_experts] = words;
        if Stamp([first, second]).read(self.epoch).is_none() {
            let name = mem.name;
            return Err(Error::State(format!("{name} holds no routing of this group: call nvte_ep_prepare first")));
        }
        let needed = u64::from(high) << 32 | u64::from(low);
        // The step's other calls need not read it again.
        self.handles.note_total(mem.data, needed);
        let received = match self.config.recv_capacity {
            RecvCapacity::Fixed(rows) => needed.min(rows.into()),
            RecvCapacity::Eager => needed,
        };
        Ok(RecvTotals { needed, received, dropped: needed - received, not_experts: not_experts.into() })
    }

    /// Exchanges the routing, once `prepared` came out of its checks.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    unsafe fn prepare(
        &mut self,
        watch: &mut Watch,
        handle: &HandleRef,
        layer: &Layer,
        call: &Prepare,
        prepared: Prepared,
        (stream, state): (Stream, StreamState),
    ) -> Result<()> {
        if self.config.recv_capacity == RecvCapacity::Eager {
            require_no_capture(state)?;
        }
        self.index_copier.tell();
        let may_mislead = self.may_mislead(handle.key);
        self.handle(handle, layer, None)?;
        // A failed exchange leaves no routing that could be replayed; a captured one has not happened.
        let entry = match state {
            StreamState::Working => self.handles.start_prepare(handle.key),
            StreamState::Capturing => self.handles.get_mut(handle.key),
        };
        let entry = entry.expect("built just now");
        let (memory, total, cuda) = (handle.mem.data, total_of(&handle.mem, call), &self.base.cuda);
        let (copied, not_experts) = (memory + layer.index_offset() as u64, memory + NOT_EXPERTS_OFFSET as u64);
        let step = call.step(&layer.config);
        let experts = self.config.num_experts;
        let Stamp(words) = Stamp::new(&layer.config, prepared, self.epoch);
        let queue = || {
            // Of the total's two words the kernels write as many as its dtype has. The stamp goes too: should the exchange
            // fail, the memory holds no routing, wherever its bytes are moved.
            // SAFETY: the handle memory starts with room for the stamp and its counters.
            unsafe { cuda.zero(memory, COUNTERS_END, stream) }?;
            // SAFETY: the caller vouches for tensors and stream; the handle memory ends with room for the copy.
            unsafe { self.index_copier.copy(&call.topk_idx, copied, not_experts, experts, stream) }?;
            // SAFETY: as above.
            unsafe { self.group.update(&entry.handle, (call, copied), &total, stream) }?;
            if let Some(wanted) = &call.total {
                // SAFETY: the caller vouches for its total, which has the dtype of ours.
                unsafe { cuda.copy(wanted.data, total.data, wanted.dtype.bytes(1), stream) }?;
            }
            // SAFETY: the handle memory starts with room for the stamp.
            unsafe { cuda.write_words(memory, &words, stream) }
        };
        // SAFETY: the caller vouches for the stream.
        unsafe { watch.queue(step, stream, state, queue) }?;
        entry.tokens = Some(prepared.num_tokens);
        if let (HandleKey::Address(memory), true) = (handle.key, may_mislead) {
            self.allocations.insert(memory, cuda.allocation_id(memory)?);
        }
        match state {
            StreamState::Working => entry.prepared = Some(prepared),
            StreamState::Capturing => {
                let captured = Captured { key: handle.key, layer: layer.config, prepared };
                self.handles.note_captured(handle.mem.data, captured);
            }
        }
        Ok(())
    }

    /// The handle of `handle` as a handle of `layer`, built or rebuilt where needed. `replay` is what the memory holds,
    /// none for a prepare.
    #[inline]
    fn handle(
        &mut self,
        handle: &HandleRef,
        layer: &Layer,
        replay: Option<Prepared>,
    ) -> Result<(&nccl_ep::Group, &mut Entry<nccl_ep::Handle>)> {
        let tokens = replay.map(|prepared| prepared.num_tokens);
        let lookup = self.handles.lookup(handle.key, handle.mem.data, &layer.config, tokens)?;
        if lookup != Lookup::Ready {
            self.build_handle(handle, layer, replay, &lookup)?;
        }
        Ok((&self.group, self.handles.get_mut(handle.key).expect("ready or inserted")))
    }

    #[inline(never)]
    fn build_handle(
        &mut self,
        handle: &HandleRef,
        layer: &Layer,
        replay: Option<Prepared>,
        lookup: &Lookup,
    ) -> Result<()> {
        let memory = handle.mem.bytes(STAMP_BYTES, layer.nccl_bytes);
        // SAFETY: the memory is the caller's, of the size that was checked, for as long as the handle is used.
        let built = unsafe { self.group.init_handle(&layer.config, &memory) }?;
        tracing::debug!(target: "nvte_ep", key = ?handle.key, ?lookup, "handle created");
        // Queued work and captured graphs use the memory, not the host objects destroyed here.
        for old in self.handles.insert(handle.key, handle.mem.data, layer.config, replay, built) {
            self.group.destroy_handle(old)?;
        }
        Ok(())
    }
}

impl Live {
    /// Tears down in order and returns what failed.
    fn destroy(self, device: i32) -> Vec<String> {
        let Self { watch, backend } = self;
        let limit = backend.env.shutdown_timeout;
        let base = backend.base;
        let quiet = watch.require_alive().and_then(|()| {
            watch.progress().enter(Step::of(Call::Shutdown));
            let hopeless = || watch.require_alive().err().map(|error| error.to_string());
            bounded(limit, "the work queued on the device", &hopeless, move || {
                base.cuda.set_current_device(device)?;
                // SAFETY: takes nothing.
                base.cuda.check("cuCtxSynchronize", unsafe { (base.cuda.cuCtxSynchronize)() })
            })
        });
        let mut failures: Vec<String> = Vec::new();
        // Peers may still read this rank's windows until they come here too.
        let met = quiet.and_then(|()| {
            base.cuda.set_current_device(device)?;
            // SAFETY: the communicator outlives shutdown, by initialize's contract.
            unsafe { backend.meeting.barrier(limit) }
        });
        if met.as_ref().is_err_and(is_cuda_gone) {
            // Called from a destructor that runs after CUDA's own: the process ends, and the driver has freed everything.
            tracing::info!(target: "nvte_ep", device, "CUDA is gone already; nothing to destroy");
            return Vec::new();
        }
        if let Err(error) = met.map_err(|error| backend.explain(error)) {
            // Freeing would wait for the same stuck work, or pull memory from under a peer: the group's memory stays
            // until the process ends.
            let text = format!("{error}; the group's device memory is left to the process's end");
            tracing::warn!(target: "nvte_ep", device, "{text}");
            watch.progress().give_up(&text);
            watch.abandon();
            return vec![text];
        }
        watch.progress().leave();
        let Backend { group, index_copier, meeting, handles, symm, .. } = backend;
        watch.stop();
        let mut index_copier = ManuallyDrop::into_inner(index_copier);
        index_copier.tell_last();
        drop(index_copier);
        let mut ended = handles.into_handles().map(|handle| group.destroy_handle(handle)).collect::<Vec<_>>();
        ended.push(group.destroy());
        ended.extend(symm.destroy());
        ended.push(meeting.close());
        for result in ended {
            if let Err(error) = result {
                tracing::warn!(target: "nvte_ep", device, "{error}");
                failures.push(error.to_string());
            }
        }
        tracing::info!(target: "nvte_ep", device, "EP group destroyed");
        failures
    }
}

/// The total in the stamp of a handle memory, in the data type of the counts that prepare writes.
fn total_of(mem: &TensorView, call: &Prepare) -> TensorView {
    let dtype = call.total.as_ref().or(call.token_counts.as_ref()).map_or(DType::Int64, |counts| counts.dtype);
    let shape = Shape::vector(1);
    let data = mem.data + TOTAL_OFFSET as u64;
    TensorView { name: "total", dtype, shape, data, window: None, scales: None }
}

/// A call that needs a routing over memory that holds none of this layer.
#[cold]
fn not_prepared(handle: &HandleRef) -> Error {
    let what = match handle.key {
        HandleKey::Registered(id) => format!("the layer of handle.id {id}"),
        HandleKey::Address(address) => format!("the {} at {address:#x}", handle.mem.name),
    };
    let since = "or its memory was prepared for another layer since, or does not hold what was prepared";
    Error::State(format!("{what} was not prepared ({since}): call nvte_ep_prepare first"))
}

/// Eager mode has the host read each step's total, which a graph cannot.
fn require_no_capture(state: StreamState) -> Result<()> {
    if state == StreamState::Working {
        return Ok(());
    }
    Err(Error::State(
        "the stream captures a graph, and in eager mode the host reads every step's total: initialize with \
         max_recv_tokens_per_rank > 0 to capture"
            .into(),
    ))
}

/// A number that no other process makes.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() ^ u64::from(std::process::id())
}

/// Handle memory of at least `bytes` bytes.
#[inline]
fn require_memory(mem: &TensorView, bytes: usize) -> Result<()> {
    let found = mem.vector("[bytes]")?;
    mem.require_dtype(&[DType::Byte])?;
    if found < bytes {
        return Err(Error::argument(mem.name, format!("must have the reported size, {bytes} bytes"), found));
    }
    mem.require_storage(256)
}

/// Whether CUDA has shut down already, as it has in destructors that run after its own.
fn is_cuda_gone(error: &Error) -> bool {
    let gone = i64::from(b::CUDA_ERROR_DEINITIALIZED);
    // NCCL has codes of its own, so only the driver's functions count.
    matches!(error, Error::Library { call, code, .. } if call.starts_with("cu") && *code == gone)
}

/// Ids are unique over the life of the process, so that an id kept across shutdown is recognised as unknown.
fn next_layer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Runs `work`, which may never return, for `limit` at most, or until `hopeless` says why there is no end; its thread is left
/// behind then.
fn bounded<F: FnOnce() -> Result<()> + Send + 'static>(
    limit: Option<Duration>,
    what: &str,
    hopeless: &dyn Fn() -> Option<String>,
    work: F,
) -> Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let work = Arc::new(Mutex::new(Some(work)));
    let run = |work: &Mutex<Option<_>>| {
        let work = work.lock().take();
        work.map_or(Ok(()), |work: F| work())
    };
    let in_thread = work.clone();
    if std::thread::Builder::new().spawn(move || sender.send(run(&in_thread))).is_err() {
        // No thread to be had: then this one waits, without a limit.
        return run(&work);
    }
    let mut patience =
        Patience::new(what, limit, "a rank died or left the sequence of calls; end this process too", hopeless);
    loop {
        match receiver.recv_timeout(patience.slice()) {
            Ok(result) => return result,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::Internal(format!("a panic while waiting for {what}")));
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => patience.check()?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_initialize_there_is_no_group() {
        let text = current_group().err().unwrap().to_string();
        assert_eq!(text, "there is no EP group: call nvte_ep_initialize first");
        shutdown().unwrap();
    }

    #[test]
    fn only_the_driver_can_be_gone() {
        let error = |call| Error::Library { call, code: 4, text: String::new() };
        assert!(is_cuda_gone(&error("cuInit")));
        assert!(!is_cuda_gone(&error("ncclAllGather")), "4 is ncclInvalidArgument");
    }

    #[test]
    fn a_wait_is_bounded() {
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let limit = Some(Duration::from_millis(20));
        let error = bounded(limit, "a test", &|| None, move || {
            let _ = blocked.recv();
            Ok(())
        })
        .unwrap_err();
        assert!(matches!(error, Error::TimeOut { milliseconds: 20.., .. }), "{error}");
        drop(release);
        bounded(limit, "a test", &|| None, || Ok(())).unwrap();
        bounded(None, "a test", &|| None, || Ok(())).unwrap();
    }
}
