//! Symmetric memory for callers: segments of NCCL's memory, registered on the group's communicator with all ranks, and
//! callers' own memory that they register. `symm_pool` records what is taken; the memory itself is here.

use super::agreement::{self, Kind, RankInfo, Rendezvous};
use super::communicator::Communicator;
use super::residency::{Fit, Residency};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::options::Limit;
use crate::symm_pool::{Plan, PoolStatistics, SymmPool, SymmetricAddress};
use crate::sys::Base;
use crate::tensor::{Shape, TensorView, Window};
use crate::wait::bounded;
use nvte_ep_bindings as b;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The symmetric memory of one group.
#[derive(Debug)]
pub(super) struct Symm {
    base: &'static Base,
    comm: Communicator,
    device: i32,
    limit: Limit,
    pool: SymmPool,
    /// Why a collective call did not come to its end, after which ranks may differ.
    broken: Option<String>,
}

/// What ranks have to have done alike, in a message.
const HISTORY: &str = "calls of nvte_ep_ext_symm_alloc, nvte_ep_ext_symm_free and nvte_ep_ext_window_* in the same order, \
                       as this digest of them shows";

impl Symm {
    pub(super) fn new(base: &'static Base, comm: Communicator, device: i32, segment: u64, limit: Limit) -> Self {
        Self { base, comm, device, limit, pool: SymmPool::new(segment), broken: None }
    }

    /// Meets the other ranks behind all queued work of all devices: every rank has to come with the same numbers and
    /// none may refuse.
    ///
    /// # Safety
    /// The communicator is live.
    unsafe fn agree(
        &self,
        rendezvous: &Rendezvous,
        what: &str,
        number: (&str, u64),
        refusal: Option<&Error>,
    ) -> Result<()> {
        let (base, device) = (self.base, self.device);
        bounded(self.limit, "the work queued on the device", &|| rendezvous.futile(), move || {
            base.cuda.set_current_device(device)?;
            // SAFETY: takes nothing.
            base.cuda.check("cuCtxSynchronize", unsafe { (base.cuda.cuCtxSynchronize)() })
        })?;
        let own = RankInfo {
            equal: vec![number.1, self.pool.history()],
            own: Vec::new(),
            refusal: refusal.map(Error::to_string),
        };
        // SAFETY: passed on.
        let infos = unsafe { rendezvous.exchange(Kind::Symmetric, &own, self.limit, what) }?;
        agreement::compare(&[number.0.to_owned(), HISTORY.to_owned()], &infos)?;
        // A rank that came too late finds what those said that have given up since: they do not come here.
        // SAFETY: passed on.
        unsafe { rendezvous.confirm(self.limit, what) }
    }

    /// Fails once ranks may differ, before anything is begun.
    fn require_unbroken(&self) -> Result<()> {
        match &self.broken {
            Some(broken) => Err(Error::State(format!("{broken}; end the group and make a new communicator"))),
            None => Ok(()),
        }
    }

    /// As [`Symm::agree`]; where the others did not come, no later call can be trusted.
    ///
    /// # Safety
    /// As there.
    unsafe fn settle(
        &mut self,
        rendezvous: &Rendezvous,
        what: &str,
        number: (&str, u64),
        refusal: Option<&Error>,
    ) -> Result<()> {
        // SAFETY: passed on.
        let outcome = unsafe { self.agree(rendezvous, what, number, refusal) };
        if let Err(error @ Error::TimeOut { .. }) = &outcome {
            self.broken = Some(format!("an earlier call did not end: {error}"));
        }
        outcome
    }

    /// Hands out `bytes` bytes at the same offset of the same window on every rank; collective, and behind all queued
    /// work.
    ///
    /// # Safety
    /// The communicator is live.
    pub(super) unsafe fn alloc(&mut self, rendezvous: &Rendezvous, bytes: u64) -> Result<SymmetricAddress> {
        self.require_unbroken()?;
        let what = "all ranks to call nvte_ep_ext_symm_alloc";
        // A rank that cannot go on says so to all of them.
        let plan = self.pool.plan(bytes);
        let segment = match &plan {
            Ok(Plan::Grow { bytes }) => self.base.nccl.mem_alloc(*bytes).map(|base| Some((base, *bytes))),
            Ok(Plan::Fits { .. }) => Ok(None),
            Err(error) => Err(error.clone()),
        };
        // SAFETY: passed on.
        let agreed = unsafe { self.settle(rendezvous, what, ("bytes", bytes), segment.as_ref().err()) };
        let segment = match (segment, agreed) {
            (Ok(segment), Ok(())) => segment,
            (segment, agreed) => {
                if let Ok(Some((base, _))) = segment {
                    self.release(base);
                }
                return Err(agreed.err().or(segment.err()).expect("one of them failed"));
            }
        };
        if let Some((base, size)) = segment {
            // SAFETY: the memory is NCCL's, of this size, and stays until its window is gone.
            match unsafe { self.register(rendezvous, what, base, size) } {
                Ok(window) => self.pool.add_segment(base, size, window),
                Err(error) => {
                    // A registration that was given up on may still use the memory.
                    if self.broken.is_none() {
                        self.release(base);
                    }
                    return Err(error);
                }
            }
            tracing::debug!(target: "nvte_ep", size, "symmetric segment registered");
        }
        self.pool.take(bytes)
    }

    /// Registers a caller's memory as a window; collective, and behind all queued work.
    ///
    /// # Safety
    /// The communicator is live; the memory is NCCL's or of the driver's virtual memory functions, and stays until it is
    /// deregistered.
    pub(super) unsafe fn window_register(
        &mut self,
        rendezvous: &Rendezvous,
        residency: &mut Residency,
        address: u64,
        bytes: u64,
    ) -> Result<Window> {
        self.require_unbroken()?;
        let what = "all ranks to call nvte_ep_ext_window_register";
        let unit = u64::from(b::NCCL_WIN_REQUIRED_ALIGNMENT);
        let fit = if bytes == 0 {
            Err(Error::argument("bytes", "must be greater than 0", 0))
        } else if address == 0 || !address.is_multiple_of(unit) {
            Err(Error::argument("ptr", format!("must be a multiple of {unit}, not NULL"), format!("{address:#x}")))
        } else {
            // NCCL fails on one rank alone, with the others waiting, for memory that is not all there, or not the device's.
            let memory = Shape::new(&[bytes as usize]).expect("one dimension");
            let memory = TensorView {
                name: "ptr",
                dtype: DType::Byte,
                shape: memory,
                data: address,
                window: None,
                scales: None,
            };
            let unregistered = self.pool.check_unregistered(address, bytes);
            unregistered
                .and_then(|()| residency.check(&self.base.cuda, &memory, bytes, Fit::OnDevice))
                .and_then(|()| self.require_mappable(address))
        };
        // SAFETY: passed on.
        let agreed = unsafe { self.settle(rendezvous, what, ("bytes", bytes), fit.as_ref().err()) };
        agreed.and(fit)?;
        // SAFETY: the caller vouches for the memory.
        let handle = unsafe { self.register(rendezvous, what, address, bytes) }?;
        self.pool.add_registered(address, bytes, handle);
        Ok(Window::new(handle, 0).expect("register refuses a null window"))
    }

    /// Peers map memory by its handle, which memory of cudaMalloc does not have.
    fn require_mappable(&self, address: u64) -> Result<()> {
        if self.base.cuda.memory_at(address)?.is_none_or(|memory| !memory.whole) {
            return Ok(());
        }
        let required = "must be device memory of ncclMemAlloc or of the driver's virtual memory";
        Err(Error::argument("ptr", required, format!("{address:#x}, memory of cudaMalloc")))
    }

    /// Ends what [`Symm::window_register`] began; collective, and behind all queued work of all ranks, so that no peer
    /// uses the window any more.
    ///
    /// # Safety
    /// The communicator is live.
    pub(super) unsafe fn window_deregister(&mut self, rendezvous: &Rendezvous, address: u64) -> Result<()> {
        self.require_unbroken()?;
        let what = "all ranks to call nvte_ep_ext_window_deregister";
        let window = self.pool.registered(address);
        let number = window.as_ref().map_or(0, |(_, number)| *number);
        // SAFETY: passed on.
        let agreed =
            unsafe { self.settle(rendezvous, what, ("registration, by its number,", number), window.as_ref().err()) };
        let (window, _) = agreed.and(window)?;
        self.pool.remove_registered(address)?;
        self.deregister(window)
    }

    pub(super) fn free(&mut self, address: u64) -> Result<()> {
        self.pool.give_back(address)
    }

    pub(super) fn place_of(&self, address: u64) -> Option<SymmetricAddress> {
        self.pool.place_of(address)
    }

    pub(super) fn statistics(&self) -> PoolStatistics {
        self.pool.statistics()
    }

    /// Frees a segment that nobody uses.
    fn release(&self, base: u64) {
        // SAFETY: our own memory, and no window is over it.
        if let Err(error) = unsafe { self.base.nccl.mem_free(base) } {
            tracing::warn!(target: "nvte_ep", "{error}");
        }
    }

    fn deregister(&self, window: usize) -> Result<()> {
        // SAFETY: the window is live, of this communicator, and no rank's queued work uses it.
        unsafe { self.base.nccl.window_deregister(self.comm.as_raw(), window) }
    }

    /// Registers memory with all ranks; when one of them failed, all do.
    ///
    /// # Safety
    /// The communicator is live; the memory is fit for a window and stays until that is gone.
    unsafe fn register(&mut self, rendezvous: &Rendezvous, what: &str, address: u64, bytes: u64) -> Result<usize> {
        let (base, comm, device) = (self.base, self.comm, self.device);
        let found = Arc::new(AtomicUsize::new(0));
        let out = Arc::clone(&found);
        // NCCL's call waits for the other ranks without a limit of its own.
        let outcome = bounded(self.limit, what, &|| rendezvous.futile(), move || {
            base.cuda.set_current_device(device)?;
            // SAFETY: the caller vouches for communicator and memory.
            let window = unsafe { base.nccl.window_register(comm.as_raw(), address, bytes) }?;
            out.store(window, Ordering::Release);
            Ok(())
        });
        let window = found.load(Ordering::Acquire);
        if let Err(error @ Error::TimeOut { .. }) = &outcome {
            self.broken = Some(format!("an earlier call did not end: {error}"));
            return Err(error.clone());
        }
        // SAFETY: passed on.
        let agreed = unsafe { self.settle(rendezvous, what, ("window size", bytes), outcome.as_ref().err()) };
        if let Err(error) = agreed {
            if window != 0 && self.broken.is_none() {
                self.deregister(window)?;
            }
            return Err(outcome.err().unwrap_or(error));
        }
        outcome.map(|()| window)
    }

    /// Checks a tensor's window, if it has one, against what is known of it; returns the address, where there is one, and
    /// whether the tensor is known to end within the window's memory, as it is not in windows that a program registered.
    ///
    /// # Errors
    /// A window that is not of the communicator or ends before the tensor does, or a data pointer that is elsewhere.
    pub(super) fn check_window(&self, tensor: &TensorView) -> Result<Option<(u64, bool)>> {
        let Some(window) = tensor.window else { return Ok(None) };
        let bytes = tensor.byte_len();
        if bytes == 0 {
            return Ok(None);
        }
        let known = self
            .pool
            .place_in(window)
            .map_err(|found| Error::argument(tensor.window_field("offset"), "must lie in an allocation", found))?;
        let found = match known {
            Some(place) if bytes <= place.room => Some((place.address, true)),
            Some(place) => {
                let required = format!("must leave room for the tensor's {bytes} bytes in its allocation");
                let found = format!("{}, behind which there are {} bytes", window.offset, place.room);
                return Err(Error::argument(tensor.window_field("offset"), required, found));
            }
            None => self.user_pointer(tensor, window)?.map(|address| (address, false)),
        };
        match found {
            Some((address, _)) if tensor.data != 0 && tensor.data != address => Err(Error::argument(
                tensor.name,
                format!("must lie where its window says, at {address:#x}, or have no data pointer"),
                format!("{:#x}", tensor.data),
            )),
            found => Ok(found),
        }
    }

    /// The address of an offset in a window that a caller registered; none if NCCL cannot tell.
    fn user_pointer(&self, tensor: &TensorView, window: Window) -> Result<Option<u64>> {
        let Some(get) = self.base.nccl.ncclWinGetUserPtr else { return Ok(None) };
        let mut base = std::ptr::null_mut();
        let handle = std::ptr::with_exposed_provenance_mut(window.handle());
        // SAFETY: `base` is live, and NCCL looks the window up among the communicator's.
        let code = unsafe { get(self.comm.as_raw(), handle, &raw mut base) };
        if code != b::ncclSuccess || base.is_null() {
            let required = "must be a window of the group's communicator";
            return Err(Error::argument(tensor.window_field("window"), required, format!("{:#x}", window.handle())));
        }
        Ok((base.expose_provenance() as u64).checked_add(window.offset))
    }

    /// Ends all windows and frees the pool; every rank has stopped using them.
    pub(super) fn destroy(mut self) -> Vec<Result<()>> {
        if self.broken.is_some() {
            // Who does not know what its peers have mapped frees nothing.
            return Vec::new();
        }
        let pool = std::mem::take(&mut self.pool);
        let end = |(window, segment): (usize, Option<u64>)| {
            self.deregister(window)?;
            if let Some(base) = segment {
                // SAFETY: our own memory, and its window is gone.
                unsafe { self.base.nccl.mem_free(base) }?;
            }
            Ok(())
        };
        pool.into_regions().map(end).collect()
    }
}
