//! Layers, and the memory that holds a routing.

use crate::call::{Dispatch, Prepare};
use crate::dtype::{Index, Token};
use crate::error::{Result, call};
use crate::group::Group;
use crate::memory::{DeviceSlice, Uses};
use crate::prepared::Prepared;
use crate::stream::Stream;
use nvte_ep_core::backend::{HandleKey, HandleRef, LayerClaim};
use nvte_ep_core::config::LayerConfig as Config;
use nvte_ep_core::dtype::DType;
use nvte_ep_core::error::Error;
use nvte_ep_core::sys::Base;
use nvte_ep_core::tensor::{Shape, TensorView};

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Experts per token, 1 to 64; over NCCL EP at most 32.
    pub top_k: u32,
    /// Each expert's received rows are padded to a multiple of this many; a power of two, 0 or 1 = no padding.
    pub alignment: usize,
}

impl LayerConfig {
    fn check(self) -> std::result::Result<Config, Error> {
        let top_k = i32::try_from(self.top_k).unwrap_or(i32::MAX);
        Config::parse("layer_config", top_k, self.alignment)
    }
}

/// A layer of a group.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'g> {
    group: &'g Group,
    config: Config,
    handle_bytes: usize,
}

impl<'g> Layer<'g> {
    pub(crate) fn new(group: &'g Group, config: LayerConfig) -> Result<Self> {
        group.call("nvte_ep_register_layer", |ep| {
            let config = config.check()?;
            Ok(Self { group, config, handle_bytes: ep.handle_mem_size(config)? })
        })
    }

    /// Device memory that a handle of the layer needs.
    #[must_use]
    pub const fn handle_bytes(&self) -> usize {
        self.handle_bytes
    }

    /// Allocates the memory of a handle, freed when that is dropped, which waits for the device. Each micro-batch that is
    /// in flight has a handle of its own.
    ///
    /// # Errors
    /// No memory, or more handles than `NVTE_EP_HANDLE_CACHE_SIZE`.
    pub fn handle(&self) -> Result<HandleMemory<'g>> {
        let memory = self.group.call("nvte_ep_register_layer", |_| DeviceMemory::new(self.handle_bytes))?;
        // SAFETY: the memory is the handle's own, and freeing it waits for the device.
        let mut handle = unsafe { self.handle_at(memory.address) }?;
        handle.memory = Some(memory);
        Ok(handle)
    }

    /// A handle over [`Layer::handle_bytes`] bytes of the caller's, on a 256-byte boundary.
    ///
    /// # Errors
    /// More handles than `NVTE_EP_HANDLE_CACHE_SIZE`.
    ///
    /// # Safety
    /// The memory is the group's device's, and is used for nothing else until the handle is dropped and all work is done
    /// that was queued with it.
    pub unsafe fn handle_at(&self, address: u64) -> Result<HandleMemory<'g>> {
        let (id, _) = self.group.call("nvte_ep_register_layer", |ep| ep.register_layer(self.config))?;
        let mem = TensorView {
            name: "handle.mem",
            dtype: DType::Byte,
            shape: Shape::vector(self.handle_bytes),
            data: address,
            window: None,
            scales: None,
        };
        let handle = HandleRef { key: HandleKey::Registered(id), mem };
        Ok(HandleMemory { group: self.group, id, config: self.config, handle, memory: None })
    }
}

/// Device memory of the library's own.
#[derive(Debug)]
struct DeviceMemory {
    base: &'static Base,
    address: u64,
}

impl DeviceMemory {
    fn new(bytes: usize) -> std::result::Result<Self, Error> {
        let base = nvte_ep_core::sys::base(&nvte_ep_core::env::Env::from_process()?)?;
        let mut address = 0;
        // SAFETY: `address` is live.
        base.cuda.check("cuMemAlloc", unsafe { (base.cuda.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        Ok(Self { base, address })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: this value allocated it, and the driver waits for work that uses it. There is nobody to tell of errors.
        unsafe { (self.base.cuda.cuMemFree_v2)(self.address) };
    }
}

/// Device memory that holds the routing of one step of a layer.
///
/// [`HandleMemory::prepare`] borrows it until the step's last call. So a handle cannot be prepared again while a step over
/// it is in flight, which would give the step's later calls the wrong routing:
///
/// ```compile_fail,E0499
/// # use nvte_ep::*;
/// # fn f(handle: &mut HandleMemory, experts: &RawSlice<i64>, counts: &mut RawSlice<i32>) -> Result<()> {
/// let first = handle.prepare(Prepare { topk_idx: experts, token_counts: counts, total: None }, Stream::DEFAULT)?;
/// let next = handle.prepare(Prepare { topk_idx: experts, token_counts: counts, total: None }, Stream::DEFAULT)?;
/// first.recv_totals(Stream::DEFAULT)?; // `first` still needs the handle
/// # Ok(())
/// # }
/// ```
///
/// Behind the first step's last call, or with a handle of its own, the next may begin:
///
/// ```
/// # use nvte_ep::*;
/// # fn f(handle: &mut HandleMemory, experts: &RawSlice<i64>, counts: &mut RawSlice<i32>) -> Result<()> {
/// let first = handle.prepare(Prepare { topk_idx: experts, token_counts: counts, total: None }, Stream::DEFAULT)?;
/// first.recv_totals(Stream::DEFAULT)?;
/// let next = handle.prepare(Prepare { topk_idx: experts, token_counts: counts, total: None }, Stream::DEFAULT)?;
/// # Ok(())
/// # }
/// ```
///
/// And no call can be made over a handle that was not prepared:
///
/// ```compile_fail,E0599
/// # use nvte_ep::*;
/// # fn f(handle: &mut HandleMemory, call: Combine<f32>) -> Result<()> {
/// handle.combine(call, Stream::DEFAULT)?; // it is a method of `Prepared`
/// # Ok(())
/// # }
/// ```
///
/// ```
/// # use nvte_ep::*;
/// # fn f(step: &Prepared, call: Combine<f32>) -> Result<()> {
/// step.combine(call, Stream::DEFAULT)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HandleMemory<'g> {
    pub(crate) group: &'g Group,
    id: u64,
    pub(crate) config: Config,
    pub(crate) handle: HandleRef,
    memory: Option<DeviceMemory>,
}

impl<'g> HandleMemory<'g> {
    /// Exchanges the routing of a step with the other ranks, and fills the handle. Collective, queued on `stream`.
    ///
    /// # Errors
    /// A broken rule, before anything is queued, or what the libraries below report.
    pub fn prepare<'h, 's, I: Index, C: Index>(
        &'h mut self,
        call: Prepare<'s, I, C>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<Prepared<'h, 'g>> {
        let stream = stream.into();
        let topk_idx = self.group.call("nvte_ep_prepare", |ep| {
            let mut uses = Uses::new();
            let mut call = call.views(self.config.top_k, &stream, &mut uses)?;
            let claim = LayerClaim::Registered(self.config.alignment);
            ep.prepare(&self.handle, claim, &mut call, stream.raw)?;
            Ok(call.topk_idx)
        })?;
        Ok(Prepared::new(self, topk_idx))
    }

    /// [`HandleMemory::prepare`] and [`Prepared::dispatch`], both checked before either is queued.
    ///
    /// # Errors
    /// As theirs.
    pub fn prepare_and_dispatch<'h, 's, I: Index, C: Index, T: Token>(
        &'h mut self,
        prepare: Prepare<'s, I, C>,
        dispatch: Dispatch<'s, T>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<Prepared<'h, 'g>> {
        let stream = stream.into();
        let topk_idx = self.group.call("nvte_ep_prepare_and_dispatch", |ep| {
            let mut uses = Uses::new();
            let mut more = Uses::new();
            let mut prepare = prepare.views(self.config.top_k, &stream, &mut uses)?;
            let mut dispatch = dispatch.views(prepare.topk_idx, self.config.top_k, &stream, &mut more)?;
            let claim = LayerClaim::Registered(self.config.alignment);
            ep.prepare_and_dispatch(&self.handle, claim, &mut prepare, &mut dispatch, stream.raw)?;
            Ok(prepare.topk_idx)
        })?;
        Ok(Prepared::new(self, topk_idx))
    }

    /// The routing that the memory holds already: that of a graph's prepare, once the graph was launched, or of a
    /// [`Prepared`] that was dropped. `topk_idx` is as it was given to that prepare; its contents are not read.
    ///
    /// Whether a routing is there, the first call finds out.
    ///
    /// # Errors
    /// Indices that are no whole rows.
    pub fn resume<'h, I: Index>(&'h mut self, topk_idx: &dyn DeviceSlice<Element = I>) -> Result<Prepared<'h, 'g>> {
        let view = call("nvte_ep_dispatch", || {
            crate::memory::shape_only("topk_idx", I::DTYPE, topk_idx.len(), self.config.top_k as usize)
        })?;
        Ok(Prepared::new(self, view))
    }
}

impl Drop for HandleMemory<'_> {
    fn drop(&mut self) {
        // The id is known until here.
        let _ = self.group.group.unregister_layer(self.id);
    }
}
