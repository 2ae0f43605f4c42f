//! Groups.

use crate::communicator::Communicator;
use crate::dtype::{DType, Element, Token};
use crate::error::{Error as PublicError, Result, call};
use crate::layer::{Layer, LayerConfig};
use crate::symmetric::{RegisteredSlice, SymmetricSlice};
use nvte_ep_core::backend::{self, EngineKind as Backend, EpGroup, MemoryUsage, Stats};
use nvte_ep_core::config::{Dialect, GroupRequest};
use nvte_ep_core::error::Error;
use nvte_ep_core::options::{EngineChoice, Options};
use std::fmt::Display;
use std::time::Duration;

/// What a group is asked to be. What is not set is the library's default.
#[derive(Debug)]
#[must_use = "a group begins with build()"]
pub struct GroupBuilder {
    comm: Communicator,
    fields: [(&'static str, u32); 5],
    max_token_dtype: DType,
    zero_copy: bool,
    options: Options,
    /// The first option that was refused.
    refused: Option<Error>,
}

/// Places in [`GroupBuilder::fields`].
const NUM_EXPERTS: usize = 0;
const MAX_TOKENS: usize = 1;
const MAX_RECV_TOKENS: usize = 2;
const HIDDEN_DIM: usize = 3;
const MAX_NUM_SMS: usize = 4;

impl GroupBuilder {
    fn field(mut self, index: usize, value: u32) -> Self {
        self.fields[index].1 = value;
        self
    }

    fn option(mut self, name: &'static str, value: impl Display) -> Self {
        if let Err(error) = self.options.set(name, &value.to_string()) {
            self.refused.get_or_insert(error);
        }
        self
    }

    /// Number of experts over all ranks; a multiple of the number of ranks and of 4.
    pub fn num_experts(self, count: u32) -> Self {
        self.field(NUM_EXPERTS, count)
    }

    /// Most tokens that a rank dispatches in one step.
    pub fn max_tokens_per_rank(self, count: u32) -> Self {
        self.field(MAX_TOKENS, count)
    }

    /// Rows of a rank's receive buffers (C), over all its experts and with their padding. No routing needs more than
    /// `ranks * max_tokens_per_rank * top_k + experts of a rank * (alignment - 1)`. Not set in eager groups.
    pub fn max_recv_tokens_per_rank(self, rows: u32) -> Self {
        self.field(MAX_RECV_TOKENS, rows)
    }

    /// Elements of a token row, at most.
    pub fn hidden_dim(self, elements: u32) -> Self {
        self.field(HIDDEN_DIM, elements)
    }

    /// Streaming multiprocessors that communication may use. Default: automatic.
    pub fn max_num_sms(self, count: u32) -> Self {
        self.field(MAX_NUM_SMS, count)
    }

    /// The widest type of a token that is used. Default: bfloat16.
    pub fn max_token_dtype<T: Token>(mut self) -> Self {
        self.max_token_dtype = T::DTYPE;
        self
    }

    /// Received rows and the rows to combine lie in symmetric memory ([`Group::symmetric`]), where peers write and read them.
    pub fn zero_copy(mut self, on: bool) -> Self {
        self.zero_copy = on;
        self
    }

    /// The caller sizes the receive buffers of each step by [`Prepared::recv_totals`](crate::Prepared::recv_totals).
    /// `num_topk` is the largest top_k of any layer.
    pub fn eager(self, num_topk: u32) -> Self {
        self.option("eager", "on").num_topk(num_topk)
    }

    /// Rows beyond `max_recv_tokens_per_rank` are dropped. Default: they are a fatal error of the device.
    pub fn drop_on_overflow(self, on: bool) -> Self {
        self.option("overflow", if on { "drop" } else { "trap" })
    }

    /// The largest top_k of any layer.
    pub fn num_topk(self, count: u32) -> Self {
        self.option("num_topk", count)
    }

    /// Multiprocessors of dispatch and its gradient.
    pub fn dispatch_sms(self, count: u32) -> Self {
        self.option("dispatch_sms", count)
    }

    /// Multiprocessors of combine and its gradient.
    pub fn combine_sms(self, count: u32) -> Self {
        self.option("combine_sms", count)
    }

    /// Multiprocessors of prepare's kernels.
    pub fn preprocess_sms(self, count: u32) -> Self {
        self.option("preprocess_sms", count)
    }

    /// Whether rows of a slab come by source rank and row in every run.
    pub fn deterministic(self, on: bool) -> Self {
        self.option("deterministic", if on { "on" } else { "off" })
    }

    /// What moves the rows. Default: what `NVTE_EP_BACKEND` says, or else what fits the machine.
    pub fn backend(self, backend: Backend) -> Self {
        self.option("backend", EngineChoice::from(backend).name())
    }

    /// How long `build` and the calls about symmetric memory wait for other ranks; none = for ever.
    pub fn timeout(mut self, limit: Option<Duration>) -> Self {
        self.options.timeout = Some(limit);
        self
    }

    /// How long the group's end waits; none = for ever.
    pub fn shutdown_timeout(mut self, limit: Option<Duration>) -> Self {
        self.options.shutdown_timeout = Some(limit);
        self
    }

    /// Smallest piece of symmetric memory that is registered at a time.
    pub fn symm_segment_bytes(self, bytes: u64) -> Self {
        self.option("symm_segment_bytes", bytes)
    }

    /// Whether there may be more NVLink domains, or more ranks in each of several, than NCCL EP documents.
    pub fn undocumented_scale(self, on: bool) -> Self {
        self.option("undocumented_scale", if on { "on" } else { "off" })
    }

    /// Begins the group, on the thread's current device, which is the communicator's. Collective: every rank builds the same.
    ///
    /// # Errors
    /// A rule that a value breaks, an unfit machine, ranks that disagree or do not come.
    pub fn build(self) -> Result<Group> {
        let Self { comm, fields, max_token_dtype, zero_copy, options, refused } = self;
        let built = call("nvte_ep_initialize", || {
            refused.map_or(Ok(()), Err)?;
            let int = |(name, value): (&str, u32)| {
                let refuse = |_| Error::argument(format!("group_config.{name}"), "must be below 2^31", value);
                i32::try_from(value).map_err(refuse)
            };
            let ep_size =
                i32::try_from(comm.ranks).map_err(|_| Error::argument("ranks", "must be below 2^31", comm.ranks))?;
            let request = GroupRequest {
                ep_size,
                num_experts: int(fields[NUM_EXPERTS])?,
                max_tokens_per_rank: int(fields[MAX_TOKENS])?,
                max_recv_tokens_per_rank: int(fields[MAX_RECV_TOKENS])?,
                hidden_dim: int(fields[HIDDEN_DIM])?,
                max_num_sms: int(fields[MAX_NUM_SMS])?,
                max_token_dtype: max_token_dtype.nvte(),
                zero_copy: zero_copy.into(),
                // A handle owns its memory.
                allow_handle_mem_reloc: 0,
                num_topk: 0,
                drop_on_overflow: 0,
                dialect: Dialect::REGISTER_LAYER,
            };
            // SAFETY: the communicator is live, and kept until the group has ended.
            unsafe { backend::initialize(comm.raw, request, &options) }?;
            backend::current_group()
        });
        match built {
            Ok(group) => Ok(Group { group, comm: Some(comm) }),
            Err(error) => {
                // What gave up on other ranks may still use it.
                comm.leave();
                Err(error)
            }
        }
    }
}

/// The EP group of one device, over the ranks of a communicator. It ends with [`Group::shutdown`], or when it is dropped.
///
/// Calls are made by threads whose current device is the group's. All ranks make the same calls in the same order.
///
/// What belongs to the group borrows it, so nothing of it can be used after its end:
///
/// ```compile_fail,E0505
/// # fn f(group: nvte_ep::Group) -> nvte_ep::Result<()> {
/// let layer = group.layer(nvte_ep::LayerConfig { top_k: 2, alignment: 1 })?;
/// let handle = layer.handle()?;
/// group.shutdown()?; // cannot move out of `group` because it is borrowed
/// drop(handle);
/// # Ok(())
/// # }
/// ```
///
/// ```
/// # fn f(group: nvte_ep::Group) -> nvte_ep::Result<()> {
/// # let layer = group.layer(nvte_ep::LayerConfig { top_k: 2, alignment: 1 })?;
/// # let handle = layer.handle()?;
/// drop(handle); // first what belongs to it
/// group.shutdown()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Group {
    pub(crate) group: EpGroup,
    /// Taken at the end.
    comm: Option<Communicator>,
}

impl Group {
    /// Begins to describe a group over `comm`, which ends with it.
    pub fn builder(comm: Communicator) -> GroupBuilder {
        GroupBuilder {
            comm,
            fields: [
                ("num_experts", 0),
                ("max_tokens_per_rank", 0),
                ("max_recv_tokens_per_rank", 0),
                ("hidden_dim", 0),
                ("max_num_sms", 0),
            ],
            max_token_dtype: DType::BFloat16,
            zero_copy: false,
            options: Options::default(),
            refused: None,
        }
    }

    /// A layer of the group: how tokens are routed in its steps.
    ///
    /// # Errors
    /// A layer that does not fit the group.
    pub fn layer(&self, config: LayerConfig) -> Result<Layer<'_>> {
        Layer::new(self, config)
    }

    /// Symmetric memory of `len` elements, for the rows of zero-copy groups. Collective; so is the order in which ranks drop it.
    ///
    /// # Errors
    /// No memory; ranks that ask for different sizes or do not come.
    pub fn symmetric<T: Element>(&self, len: usize) -> Result<SymmetricSlice<'_, T>> {
        SymmetricSlice::new(self, len)
    }

    /// Registers memory of the caller's as symmetric: `len` elements at `address`. Collective.
    ///
    /// # Errors
    /// Memory that peers cannot map; ranks that differ or do not come.
    ///
    /// # Safety
    /// The memory is of `ncclMemAlloc` or of the driver's virtual memory, has `len` elements, and stays until the
    /// registration or the group has ended; streams that use it elsewhere are ordered with the calls' streams.
    pub unsafe fn register<T: Element>(&self, address: u64, len: usize) -> Result<RegisteredSlice<'_, T>> {
        // SAFETY: passed on.
        unsafe { RegisteredSlice::new(self, address, len) }
    }

    /// What the group has done on this rank so far; waits for nothing.
    ///
    /// # Errors
    /// Another current device.
    pub fn stats(&self) -> Result<Stats> {
        self.call("nvte_ep_ext_stats", EpGroup::stats)
    }

    /// How much device memory the group takes on this rank.
    ///
    /// # Errors
    /// Another current device.
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        self.call("nvte_ep_ext_memory_usage", EpGroup::memory_usage)
    }

    /// Ends the group: waits for queued work and for the other ranks. Collective.
    ///
    /// # Errors
    /// Ranks that do not come in time, or what the libraries below report; the group is gone all the same.
    pub fn shutdown(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(comm) = self.comm.take() else { return Ok(()) };
        match call("nvte_ep_shutdown", || self.group.shutdown()) {
            Ok(()) => comm.destroy(),
            Err(error) => {
                // To destroy it may wait for ranks that are gone.
                comm.leave();
                Err(error)
            }
        }
    }

    /// A call of this thread.
    #[inline]
    pub(crate) fn call<R>(
        &self,
        function: &'static str,
        body: impl FnOnce(&EpGroup) -> std::result::Result<R, Error>,
    ) -> Result<R> {
        call(function, || {
            self.group.require_current()?;
            body(&self.group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The library has logged what failed; who wants to know calls shutdown().
        let _: std::result::Result<(), PublicError> = self.end();
    }
}
