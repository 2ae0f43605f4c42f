//! The EP group of each device and its layers. One lock a device around one `Option`: what one device does never blocks
//! another, nothing can be read outside the lock, and a failed initialize leaves nothing behind.

mod agreement;
mod nccl_ep;

pub use nccl_ep::Communicator;

use crate::config::{GroupConfig, GroupRequest, LayerConfig};
use crate::dtype::DType;
use crate::env::{Env, RuntimeKind};
use crate::error::{Error, Result};
use crate::handle_cache::{Entry, HandleCache, HandleKey, Lookup};
use crate::ops::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare, Prepared};
use crate::preflight::{self, Place};
use crate::sys::cuda::Stream;
use crate::sys::nccl::CommFacts;
use crate::sys::{self, Base, NcclEpLibrary};
use crate::tensor::TensorView;
use agreement::{Meeting, Statement};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

type Slot = Arc<Mutex<Option<Backend>>>;

/// Slots are made at the first initialize of a device and never removed. Nothing is torn down at process exit: the
/// libraries below may be gone by then.
static REGISTRY: Mutex<BTreeMap<i32, Slot>> = Mutex::new(BTreeMap::new());

/// A layer's registered id and the memory that holds its routing.
#[derive(Debug, Clone, Copy)]
pub struct HandleRef {
    /// From [`EpGroup::register_layer`].
    pub id: u64,
    /// The caller's handle memory.
    pub mem: TensorView,
}

/// A registered layer.
#[derive(Debug, Clone, Copy)]
struct Layer {
    config: LayerConfig,
    mem_bytes: usize,
}

/// Group, layers and handles of one device.
struct Backend {
    base: &'static Base,
    env: Env,
    config: GroupConfig,
    group: nccl_ep::Group,
    meeting: Meeting,
    layers: HashMap<u64, Layer>,
    handles: HandleCache<nccl_ep::Handle>,
}

/// The names behind [`statement`]'s equal numbers.
const AGREED: &[&str] = &[
    "group_config.num_experts",
    "group_config.max_tokens_per_rank",
    "group_config.max_recv_tokens_per_rank",
    "group_config.hidden_dim",
    "group_config.max_num_sms",
    "group_config.max_token_dtype",
    "group_config.zero_copy",
    "NCCL version",
    "nvte-ep version",
];

fn statement(config: &GroupConfig, nccl: i32, place: Place, refusal: Option<String>) -> Statement {
    let version = |part: &str| part.parse::<u64>().expect("Cargo's versions are numbers");
    Statement {
        equal: vec![
            config.num_experts.into(),
            config.max_tokens_per_rank.into(),
            config.recv_capacity.into(),
            config.hidden_dim.into(),
            config.max_num_sms.unwrap_or(0).into(),
            config.max_token_dtype as u64,
            config.transfer as u64,
            nccl as u64,
            version(env!("CARGO_PKG_VERSION_MAJOR")) << 32
                | version(env!("CARGO_PKG_VERSION_MINOR")) << 16
                | version(env!("CARGO_PKG_VERSION_PATCH")),
        ],
        own: vec![place.host, place.device, place.sm_count.into()],
        refusal,
    }
}

/// Creates the EP group of the calling thread's current device over `comm`. Collective.
///
/// # Errors
/// A bad request, an unfit machine, ranks that disagree (then every rank gets the same text), or what NCCL EP reports.
///
/// # Safety
/// `comm` is null, or a live communicator that outlives [`shutdown`].
pub unsafe fn initialize(comm: Communicator, request: GroupRequest) -> Result<()> {
    crate::log::start();
    let config = GroupConfig::try_from(request)?;
    if comm.0 == 0 {
        let required = format!("must be an ncclComm_t over the group's {} ranks", config.ep_size);
        return Err(Error::argument("ep_comm", required, "NULL"));
    }
    let env = Env::from_process()?;
    let base = sys::base(&env)?;
    let device = base.cuda.current_device()?;
    let slot = REGISTRY.lock().entry(device).or_default().clone();
    let mut backend = slot.lock();
    if backend.is_some() {
        return Err(Error::AlreadyInitialized { device });
    }
    // SAFETY: the caller vouches for `comm`.
    let comm_facts = unsafe { base.nccl.comm_facts(comm.as_raw()) }?;
    preflight::communicator(&comm_facts, config.ep_size, device)?;
    // SAFETY: as above, and the communicator's device is current.
    *backend = Some(unsafe { Backend::create(base, env, device, comm, comm_facts, config) }?);
    tracing::info!(target: "nvte_ep", device, ?config, rank = comm_facts.rank, "EP group created");
    Ok(())
}

/// The EP group of the calling thread's current device.
///
/// # Errors
/// [`Error::NotInitialized`].
pub fn current_group() -> Result<EpGroup> {
    let registry = REGISTRY.lock();
    // Without any slot there was no initialize, and perhaps there is no CUDA either.
    let Some(base) = (!registry.is_empty()).then(sys::loaded_base).flatten() else {
        return Err(Error::NotInitialized { device: None, initialized: Vec::new() });
    };
    let device = base.cuda.current_device()?;
    match registry.get(&device) {
        Some(slot) => Ok(EpGroup { device, slot: slot.clone() }),
        None => {
            // A slot that is locked is at work, so it has a group.
            let initialized = |slot: &Slot| slot.try_lock().is_none_or(|backend| backend.is_some());
            let initialized =
                registry.iter().filter(|(_, slot)| initialized(slot)).map(|(device, _)| *device).collect();
            Err(Error::NotInitialized { device: Some(device), initialized })
        }
    }
}

/// Ends every EP group of this process: waits for queued work and for the other ranks (both bounded), then destroys
/// handles and group. The communicators stay the callers'. Without a group nothing happens.
///
/// # Errors
/// [`Error::Teardown`] with all that failed; the groups are gone all the same.
pub fn shutdown() -> Result<()> {
    let slots: Vec<(i32, Slot)> = REGISTRY.lock().iter().map(|(device, slot)| (*device, slot.clone())).collect();
    let end = |(device, slot): &(i32, Slot)| {
        let backend = slot.lock().take();
        backend.map_or(Vec::new(), |backend| backend.destroy(*device))
    };
    let failures: Vec<String> = match slots.as_slice() {
        [one] => end(one),
        // Ranks of one process wait for each other, so each device gets a thread.
        many => std::thread::scope(|scope| {
            let threads: Vec<_> = many.iter().map(|slot| scope.spawn(move || end(slot))).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap_or_else(|_| vec!["a panic during tear-down".into()]))
                .collect()
        }),
    };
    if failures.is_empty() { Ok(()) } else { Err(Error::Teardown(failures)) }
}

/// Access to the EP group of one device.
pub struct EpGroup {
    device: i32,
    slot: Slot,
}

impl EpGroup {
    fn lock(&self) -> Result<Locked<'_>> {
        let guard = self.slot.lock();
        if guard.is_some() {
            return Ok(Locked(guard));
        }
        Err(Error::NotInitialized { device: Some(self.device), initialized: Vec::new() })
    }

    /// Registers a layer; host only. Returns its id, never 0 and never given out twice, and the bytes of handle memory
    /// that it needs.
    ///
    /// # Errors
    /// A layer that does not fit the group, or more layers than `NVTE_EP_HANDLE_CACHE_SIZE`.
    pub fn register_layer(&self, config: LayerConfig) -> Result<(u64, usize)> {
        self.lock()?.backend().register_layer(config)
    }

    /// Exchanges the routing of one step and fills the layer's handle; collective, queued on `stream`.
    ///
    /// # Errors
    /// A broken rule, before anything is enqueued, or what NCCL EP reports.
    ///
    /// # Safety
    /// The tensors are device memory of the described extent, live until the queued work is done; `stream` is a stream
    /// of the group's device; every rank makes the same calls in the same order.
    pub unsafe fn prepare(&self, handle: &HandleRef, call: &Prepare, stream: Stream) -> Result<()> {
        let mut locked = self.lock()?;
        let backend = locked.backend();
        let layer = backend.layer(handle)?;
        let prepared = call.check(&backend.config, &layer.config)?;
        // SAFETY: passed on.
        let (group, entry) = unsafe { backend.handle(handle, &layer, HandleUse::Prepare) }?;
        // A failed exchange leaves no routing that could be replayed.
        entry.prepared = None;
        // SAFETY: passed on.
        unsafe { group.update(&entry.handle, call, stream) }?;
        entry.prepared = Some(prepared);
        Ok(())
    }

    /// One operation over a prepared layer: its rules, then its handle, then the call.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    unsafe fn replay<C>(
        &self,
        handle: &HandleRef,
        check: impl FnOnce(&GroupConfig, &LayerConfig, Prepared) -> Result<C>,
        run: impl FnOnce(&nccl_ep::Group, &nccl_ep::Handle, C) -> Result<()>,
    ) -> Result<()> {
        let mut locked = self.lock()?;
        let backend = locked.backend();
        let (layer, prepared) = backend.prepared_layer(handle)?;
        let call = check(&backend.config, &layer.config, prepared)?;
        // SAFETY: passed on.
        let (group, entry) = unsafe { backend.handle(handle, &layer, HandleUse::Replay) }?;
        run(group, &entry.handle, call)
    }

    /// Sends each token's row to the ranks of its experts.
    ///
    /// # Errors
    /// As [`EpGroup::prepare`]; or the layer was not prepared.
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn dispatch(&self, handle: &HandleRef, call: &Dispatch, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: Dispatch| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.dispatch(handle, &call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, |g, l, p| call.check(g, l, p), run) }
    }

    /// Sums each token's rows back on its own rank; unweighted.
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn combine(&self, handle: &HandleRef, call: &Combine, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: Combine| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.combine(handle, &call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, |g, _, p| call.check(g, p), run) }
    }

    /// Gradient of [`EpGroup::dispatch`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn dispatch_bwd(&self, handle: &HandleRef, call: &DispatchBwd, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: DispatchBwd| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.dispatch_bwd(handle, &call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, |g, l, p| call.check(g, l, p), run) }
    }

    /// Gradient of [`EpGroup::combine`].
    ///
    /// # Errors
    /// As [`EpGroup::dispatch`].
    ///
    /// # Safety
    /// As [`EpGroup::prepare`].
    pub unsafe fn combine_bwd(&self, handle: &HandleRef, call: &CombineBwd, stream: Stream) -> Result<()> {
        let run = |group: &nccl_ep::Group, handle: &nccl_ep::Handle, call: CombineBwd| {
            // SAFETY: the caller vouches for tensors and stream.
            unsafe { group.combine_bwd(handle, &call, stream) }
        };
        // SAFETY: passed on.
        unsafe { self.replay(handle, |g, _, p| call.check(g, p), run) }
    }
}

/// A locked slot that holds a backend.
struct Locked<'a>(MutexGuard<'a, Option<Backend>>);

impl Locked<'_> {
    fn backend(&mut self) -> &mut Backend {
        self.0.as_mut().expect("EpGroup::lock checked it")
    }
}

/// What a handle is asked for.
#[derive(Clone, Copy, PartialEq)]
enum HandleUse {
    /// A new routing.
    Prepare,
    /// The routing in the memory.
    Replay,
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
    ) -> Result<Self> {
        let facts = base.cuda.device_facts(device)?;
        let nccl = base.nccl.version()?;
        let place = Place {
            host: preflight::host_id(),
            // On the host runtime nothing has to be resident together, so no two ranks count as sharing.
            device: match base.runtime {
                RuntimeKind::Cuda => (facts.pci.0 as u64) << 32 | (facts.pci.1 as u64) << 16 | facts.pci.2 as u64,
                RuntimeKind::Host => comm_facts.rank as u64,
            },
            sm_count: facts.sm_count as u32,
        };
        let ready = || -> Result<&'static NcclEpLibrary> {
            preflight::device(device, &facts)?;
            preflight::nccl_version(nccl)?;
            let library = sys::nccl_ep(base, &env)?;
            if base.runtime == RuntimeKind::Cuda {
                preflight::jit(base, library, nccl)?.export(facts.sm_count as u32);
            }
            tracing::info!(target: "nvte_ep", path = ?library.path, version = library.functions.version()?, "NCCL EP");
            Ok(library)
        };
        // A rank that cannot go on says so to all of them, rather than leave them waiting for it.
        let ready = ready();
        let own = statement(&config, nccl, place, ready.as_ref().err().map(Error::to_string));
        let meeting = Meeting::new(base, comm, comm_facts)?;
        // SAFETY: the caller vouches for `comm`.
        let statements = unsafe { meeting.exchange(&own, env.timeout) }?;
        let agreed = agreement::compare(AGREED, &statements).and_then(|()| {
            let places = statements.iter().map(|statement| match *statement.own.as_slice() {
                [host, device, sm_count] => Place { host, device, sm_count: sm_count as u32 },
                _ => unreachable!("three numbers were asked for"),
            });
            preflight::sm_cap(config.max_num_sms, &places.collect::<Vec<_>>())
        });
        let (library, max_num_sms) = match (ready, agreed) {
            (Ok(library), Ok(max_num_sms)) => (library, max_num_sms),
            (ready, agreed) => {
                meeting.close()?;
                // A rank's own error reads the same on all ranks.
                return Err(agreed.err().or(ready.err()).expect("one of them failed"));
            }
        };
        // SAFETY: the caller vouches for `comm` and the current device.
        let group = match unsafe { nccl_ep::Group::create(base, library, comm, &config, max_num_sms) } {
            Ok(group) => group,
            Err(error) => {
                meeting.close()?;
                return Err(error);
            }
        };
        let handles = HandleCache::new(config.relocation);
        Ok(Self { base, env, config, group, meeting, layers: HashMap::new(), handles })
    }

    fn register_layer(&mut self, config: LayerConfig) -> Result<(u64, usize)> {
        config.check_against(&self.config)?;
        if let Some(limit) = self.env.handle_cache_size.filter(|limit| self.layers.len() >= *limit) {
            return Err(Error::State(format!(
                "{limit} layers are registered, as many as NVTE_EP_HANDLE_CACHE_SIZE allows: raise it, or register each \
                 layer once and keep its id (registrations end with nvte_ep_shutdown)"
            )));
        }
        let mem_bytes = self.group.handle_mem_size(config.top_k)?;
        let id = next_layer_id();
        self.layers.insert(id, Layer { config, mem_bytes });
        tracing::debug!(target: "nvte_ep", id, ?config, mem_bytes, "layer registered");
        Ok((id, mem_bytes))
    }

    /// The layer of `handle`, whose memory is fit for it.
    fn layer(&self, handle: &HandleRef) -> Result<Layer> {
        let Some(layer) = self.layers.get(&handle.id) else {
            let required = "must be an id that nvte_ep_register_layer returned since the last nvte_ep_initialize";
            return Err(Error::argument("handle.id", required, handle.id));
        };
        let mem = &handle.mem;
        let bytes = mem.vector("[bytes]")?;
        mem.require_dtype(&[DType::Byte])?;
        if bytes < layer.mem_bytes {
            let required = format!("must have the registered size, {} bytes", layer.mem_bytes);
            return Err(Error::argument(mem.name, required, bytes));
        }
        mem.require_storage(256)?;
        Ok(*layer)
    }

    /// As [`Backend::layer`], with what its last prepare left.
    fn prepared_layer(&mut self, handle: &HandleRef) -> Result<(Layer, Prepared)> {
        let layer = self.layer(handle)?;
        match self.handles.get_mut(HandleKey::Registered(handle.id)).and_then(|entry| entry.prepared) {
            Some(prepared) => Ok((layer, prepared)),
            None => Err(Error::State(format!("layer {} was not prepared: call nvte_ep_prepare first", handle.id))),
        }
    }

    /// The handle of `handle`, built or rebuilt where needed.
    ///
    /// # Safety
    /// The handle memory is device memory of the registered size and outlives the handle's use.
    unsafe fn handle(
        &mut self,
        handle: &HandleRef,
        layer: &Layer,
        use_: HandleUse,
    ) -> Result<(&nccl_ep::Group, &mut Entry<nccl_ep::Handle>)> {
        let key = HandleKey::Registered(handle.id);
        let lookup = self.handles.lookup(key, handle.mem.data)?;
        if lookup != Lookup::Ready {
            let moved_int32 = |entry: &mut Entry<_>| entry.prepared.is_some_and(|p| p.index_dtype == DType::Int32);
            if use_ == HandleUse::Replay && self.handles.get_mut(key).is_some_and(moved_int32) {
                // NCCL EP re-opens memory as if its indices were int64 (nccl_ep 0.1.0).
                return Err(Error::argument(
                    "handle.mem",
                    "must stay in place after an int32 prepare",
                    "another address",
                )
                .with_remedy("prepare again over the new memory, or pass int64 topk_idx"));
            }
            // SAFETY: the caller vouches for the memory, whose size `layer` checked.
            let built = unsafe { self.group.init_handle(&layer.config, &handle.mem.first_rows(layer.mem_bytes)) }?;
            tracing::debug!(target: "nvte_ep", id = handle.id, moved = lookup == Lookup::Moved, "handle created");
            if let Some(old) = self.handles.insert(key, handle.mem.data, built) {
                // Work queued through the old handle holds no reference to the host object.
                self.group.destroy_handle(old)?;
            }
        }
        Ok((&self.group, self.handles.get_mut(key).expect("ready or inserted")))
    }

    /// Tears down in order and returns what failed.
    fn destroy(self, device: i32) -> Vec<String> {
        let limit = self.env.shutdown_timeout;
        let quiet = bounded(limit, "the work queued on the device", move || {
            self.base.cuda.set_current_device(device)?;
            // SAFETY: takes nothing.
            self.base.cuda.check("cuCtxSynchronize", unsafe { (self.base.cuda.cuCtxSynchronize)() })
        });
        let mut failures: Vec<String> = Vec::new();
        // Peers may still read this rank's windows until they come here too.
        let met = quiet.and_then(|()| {
            self.base.cuda.set_current_device(device)?;
            // SAFETY: the communicator outlives shutdown, by initialize's contract.
            unsafe { self.meeting.barrier(limit) }
        });
        if let Err(error) = met {
            // Freeing would wait for the same stuck work, or pull memory from under a peer: the group's memory stays
            // until the process ends.
            let text = format!("{error}; the group's device memory is left to the process's end");
            tracing::warn!(target: "nvte_ep", device, "{text}");
            return vec![text];
        }
        let Self { group, meeting, handles, .. } = self;
        let handles = handles.into_handles().map(|handle| group.destroy_handle(handle)).collect::<Vec<_>>();
        for result in handles.into_iter().chain([group.destroy(), meeting.close()]) {
            if let Err(error) = result {
                tracing::warn!(target: "nvte_ep", device, "{error}");
                failures.push(error.to_string());
            }
        }
        tracing::info!(target: "nvte_ep", device, "EP group destroyed");
        failures
    }
}

/// Ids are unique over the life of the process, so that an id kept across shutdown is recognised as unknown.
fn next_layer_id() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Runs `work`, which may never return, for `limit` at most; on a time-out its thread is left behind.
fn bounded(limit: Option<Duration>, what: &str, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let Some(limit) = limit else { return work() };
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(limit).unwrap_or_else(|_| {
        Err(Error::TimeOut {
            waited_for: what.into(),
            milliseconds: limit.as_millis() as u64,
            remedy: "a rank died or left the sequence of calls; end this process too".into(),
        })
    })
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
    fn a_wait_is_bounded() {
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let limit = Some(Duration::from_millis(20));
        let error = bounded(limit, "a test", move || {
            let _ = blocked.recv();
            Ok(())
        })
        .unwrap_err();
        assert!(matches!(error, Error::TimeOut { milliseconds: 20, .. }), "{error}");
        drop(release);
        bounded(limit, "a test", || Ok(())).unwrap();
        bounded(None, "a test", || Ok(())).unwrap();
    }
}
