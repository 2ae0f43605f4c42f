//! Communicators.

use crate::error::{Result, call};
use nvte_ep_bindings as b;
use nvte_ep_core::backend::Communicator as Raw;
use nvte_ep_core::env::Env;
use nvte_ep_core::error::Error;
use nvte_ep_core::sys::{self, Base};
use std::ffi::{c_int, c_void};

/// Bytes of a unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

fn base() -> std::result::Result<&'static Base, Error> {
    sys::base(&Env::from_process()?)
}

/// Names a communicator before it is made: rank 0 makes one and brings it to the other ranks, by a file, a socket, MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UNIQUE_ID_BYTES]);

impl UniqueId {
    /// A new one.
    ///
    /// # Errors
    /// CUDA or NCCL is not found, or what NCCL reports.
    pub fn new() -> Result<Self> {
        call("ncclGetUniqueId", || {
            let nccl = &base()?.nccl;
            let mut id = b::ncclUniqueId { internal: [0; UNIQUE_ID_BYTES] };
            // SAFETY: `id` is live.
            nccl.check("ncclGetUniqueId", unsafe { (nccl.ncclGetUniqueId)(&raw mut id) })?;
            Ok(Self(id.internal.map(|byte| byte as u8)))
        })
    }

    /// The id that another rank's [`UniqueId::as_bytes`] gave.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; UNIQUE_ID_BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes, for the other ranks.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.0
    }
}

/// An NCCL communicator over the ranks of a group.
#[derive(Debug)]
pub struct Communicator {
    pub(crate) raw: Raw,
    pub(crate) ranks: usize,
    /// NCCL, where the communicator is ours to destroy.
    owner: Option<&'static Base>,
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `ranks`, on the current device. Collective.
    ///
    /// # Errors
    /// CUDA or NCCL is not found, or what NCCL reports.
    pub fn new(id: UniqueId, rank: usize, ranks: usize) -> Result<Self> {
        call("ncclCommInitRank", || {
            let base = base()?;
            let number = |argument, value: usize| {
                c_int::try_from(value).map_err(|_| Error::argument(argument, "must be below 2^31", value))
            };
            let (rank, size) = (number("rank", rank)?, number("ranks", ranks)?);
            let id = b::ncclUniqueId { internal: id.0.map(|byte| byte as _) };
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` is live, and NCCL checks the numbers.
            let code = unsafe { (base.nccl.ncclCommInitRank)(&raw mut raw, size, id, rank) };
            base.nccl.check("ncclCommInitRank", code)?;
            Ok(Self { raw: Raw(raw.expose_provenance()), ranks, owner: Some(base) })
        })
    }

    /// The `ncclComm_t` of another library, which keeps it.
    ///
    /// # Safety
    /// The communicator is live until the group over it has ended, and has `ranks` ranks.
    #[must_use]
    pub unsafe fn from_raw(comm: *mut c_void, ranks: usize) -> Self {
        Self { raw: Raw(comm.expose_provenance()), ranks, owner: None }
    }

    /// Destroys it, where [`Communicator::new`] made it. Dropping it does the same without telling of errors.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn destroy(mut self) -> Result<()> {
        call("ncclCommDestroy", || self.end())
    }

    fn end(&mut self) -> std::result::Result<(), Error> {
        let Some(base) = self.owner.take() else { return Ok(()) };
        // SAFETY: this value made the communicator, and it ends here.
        let code = unsafe { (base.nccl.ncclCommDestroy)(std::ptr::with_exposed_provenance_mut(self.raw.0)) };
        base.nccl.check("ncclCommDestroy", code)
    }

    /// Leaves the communicator to the process's end.
    pub(crate) fn leave(mut self) {
        self.owner = None;
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // There is nobody to tell.
        let _ = self.end();
    }
}
