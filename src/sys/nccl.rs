//! NCCL: what the library needs, and what a program needs to make a communicator.

use super::fn_table;
use crate::error::{Error, Result};
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_char, c_int, c_void};

fn_table! {
    /// NCCL's functions.
    pub struct Nccl, abi "C";
    required {
        ncclGetVersion: fn(*mut c_int) -> b::ncclResult_t;
        ncclGetUniqueId: fn(*mut b::ncclUniqueId) -> b::ncclResult_t;
        ncclCommInitRank: fn(*mut b::ncclComm_t, c_int, b::ncclUniqueId, c_int) -> b::ncclResult_t;
        ncclCommDestroy: fn(b::ncclComm_t) -> b::ncclResult_t;
        ncclCommCount: fn(b::ncclComm_t, *mut c_int) -> b::ncclResult_t;
        ncclCommUserRank: fn(b::ncclComm_t, *mut c_int) -> b::ncclResult_t;
        ncclCommCuDevice: fn(b::ncclComm_t, *mut c_int) -> b::ncclResult_t;
        ncclAllGather: fn(*const c_void, *mut c_void, usize, b::ncclDataType_t, b::ncclComm_t, b::cudaStream_t) -> b::ncclResult_t;
        ncclGetErrorString: fn(b::ncclResult_t) -> *const c_char;
    }
    optional {
        ncclMemAlloc: fn(*mut *mut c_void, usize) -> b::ncclResult_t;
        ncclMemFree: fn(*mut c_void) -> b::ncclResult_t;
        ncclCommWindowRegister: fn(b::ncclComm_t, *mut c_void, usize, *mut b::ncclWindow_t, c_int) -> b::ncclResult_t;
        ncclCommWindowDeregister: fn(b::ncclComm_t, b::ncclWindow_t) -> b::ncclResult_t;
        ncclWinGetUserPtr: fn(b::ncclComm_t, b::ncclWindow_t, *mut *mut c_void) -> b::ncclResult_t;
        ncclGetPeerDevicePointer: fn(b::ncclWindow_t, usize, c_int, *mut *mut c_void) -> b::ncclResult_t;
        ncclCommQueryProperties: fn(b::ncclComm_t, *mut b::ncclCommProperties_t) -> b::ncclResult_t;
        ncclGetLastError: fn(b::ncclComm_t) -> *const c_char;
    }
}

impl Nccl {
    /// `Ok` for `ncclSuccess` (and `ncclInProgress`, which a non-blocking communicator returns), else
    /// [`Error::Library`] with NCCL's text for the code and its last message.
    ///
    /// # Errors
    /// Every other code.
    #[inline]
    pub fn check(&self, call: &'static str, code: b::ncclResult_t) -> Result<()> {
        match code {
            b::ncclSuccess | b::ncclInProgress => Ok(()),
            _ => Err(self.error(call, code)),
        }
    }

    #[cold]
    fn error(&self, call: &'static str, code: b::ncclResult_t) -> Error {
        // SAFETY: takes any code, returns a static string.
        let mut text = text(unsafe { (self.ncclGetErrorString)(code) });
        if let Some(last_error) = self.ncclGetLastError {
            // SAFETY: NCCL documents the communicator argument as unused and accepts null.
            let last = self::text(unsafe { last_error(std::ptr::null_mut()) });
            if !last.is_empty() {
                text = format!("{text} ({})", last.trim());
            }
        }
        Error::Library { call, code: i64::from(code), text }
    }

    /// Symmetric memory of `bytes` bytes on the current device; its address.
    ///
    /// # Errors
    /// NCCL's, or an NCCL without the function.
    pub(crate) fn mem_alloc(&self, bytes: u64) -> Result<u64> {
        let alloc = present(self.ncclMemAlloc, "ncclMemAlloc")?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is live.
        self.check("ncclMemAlloc", unsafe { alloc(&raw mut memory, bytes as usize) })?;
        Ok(memory.expose_provenance() as u64)
    }

    /// Frees what [`Nccl::mem_alloc`] gave.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// Nothing uses the memory any more, and no window is over it.
    pub(crate) unsafe fn mem_free(&self, address: u64) -> Result<()> {
        let free = present(self.ncclMemFree, "ncclMemFree")?;
        // SAFETY: passed on.
        self.check("ncclMemFree", unsafe { free(pointer(address)) })
    }

    /// Registers memory as a symmetric window; collective, and without a limit of its own.
    ///
    /// # Errors
    /// NCCL's; an NCCL without the function; no window, on a machine without symmetric memory.
    ///
    /// # Safety
    /// The communicator is live; the memory is fit for a window and stays until that is gone.
    pub(crate) unsafe fn window_register(&self, comm: b::ncclComm_t, address: u64, bytes: u64) -> Result<usize> {
        let register = present(self.ncclCommWindowRegister, "ncclCommWindowRegister")?;
        let mut window = std::ptr::null_mut();
        let flags = b::NCCL_WIN_COLL_SYMMETRIC as c_int;
        // SAFETY: `window` is live; the caller vouches for communicator and memory.
        let code = unsafe { register(comm, pointer(address), bytes as usize, &raw mut window, flags) };
        self.check("ncclCommWindowRegister", code)?;
        // NCCL leaves NULL where this machine has no symmetric memory.
        if window.is_null() {
            return Err(Error::Preflight {
                problem: "ncclCommWindowRegister made no window".into(),
                remedy: "the ranks' devices have to reach each other's memory (NVLink or PCIe peer access, \
                         NCCL_WIN_ENABLE not 0)"
                    .into(),
            });
        }
        Ok(window.expose_provenance())
    }

    /// Ends what [`Nccl::window_register`] began.
    ///
    /// # Errors
    /// NCCL's, or an NCCL without the function.
    ///
    /// # Safety
    /// The window is live, of this communicator, and no rank's queued work uses it.
    pub(crate) unsafe fn window_deregister(&self, comm: b::ncclComm_t, window: usize) -> Result<()> {
        let deregister = present(self.ncclCommWindowDeregister, "ncclCommWindowDeregister")?;
        // SAFETY: passed on.
        let code = unsafe { deregister(comm, std::ptr::with_exposed_provenance_mut(window)) };
        self.check("ncclCommWindowDeregister", code)
    }

    /// Where the memory of a live window of `rank` begins for kernels of this device; 0 where they do not reach it.
    ///
    /// # Errors
    /// NCCL's, or an NCCL without the function.
    ///
    /// # Safety
    /// The window is live.
    pub(crate) unsafe fn peer_address(&self, window: usize, rank: c_int) -> Result<u64> {
        let peer_of = present(self.ncclGetPeerDevicePointer, "ncclGetPeerDevicePointer")?;
        let mut peer = std::ptr::null_mut();
        // SAFETY: `peer` is live; the caller vouches for the window.
        let code = unsafe { peer_of(std::ptr::with_exposed_provenance_mut(window), 0, rank, &raw mut peer) };
        self.check("ncclGetPeerDevicePointer", code)?;
        Ok(peer.expose_provenance() as u64)
    }

    /// NCCL's version code: major * 10000 + minor * 100 + patch.
    ///
    /// # Errors
    /// NCCL's.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` is a live int.
        self.check("ncclGetVersion", unsafe { (self.ncclGetVersion)(&raw mut version) })?;
        Ok(version)
    }

    /// Size, own rank and CUDA device of a communicator.
    ///
    /// # Errors
    /// NCCL's, for what it recognises as no communicator.
    ///
    /// # Safety
    /// `comm` came from this NCCL and was not destroyed.
    pub unsafe fn comm_facts(&self, comm: b::ncclComm_t) -> Result<CommFacts> {
        let (mut size, mut rank, mut device) = (0, 0, 0);
        // SAFETY: the caller vouches for `comm`, and `size` is a live int.
        self.check("ncclCommCount", unsafe { (self.ncclCommCount)(comm, &raw mut size) })?;
        // SAFETY: as above.
        self.check("ncclCommUserRank", unsafe { (self.ncclCommUserRank)(comm, &raw mut rank) })?;
        // SAFETY: as above.
        self.check("ncclCommCuDevice", unsafe { (self.ncclCommCuDevice)(comm, &raw mut device) })?;
        // SAFETY: as above.
        Ok(CommFacts { size, rank, device, links: unsafe { self.links(comm) } })
    }

    /// How the communicator's ranks reach each other; none where NCCL has no function that tells, or not of this version's
    /// structure.
    ///
    /// # Safety
    /// As [`Nccl::comm_facts`].
    unsafe fn links(&self, comm: b::ncclComm_t) -> Option<Links> {
        let query = self.ncclCommQueryProperties?;
        // SAFETY: numbers and flags, of which zero is a value.
        let mut properties: b::ncclCommProperties_t = unsafe { std::mem::zeroed() };
        properties.size = size_of::<b::ncclCommProperties_t>();
        properties.magic = b::NCCL_API_MAGIC;
        properties.version = b::NCCL_VERSION_CODE;
        // SAFETY: the caller vouches for `comm`; the structure is as long as it says.
        if let Err(error) = self.check("ncclCommQueryProperties", unsafe { query(comm, &raw mut properties) }) {
            tracing::warn!(target: "nvte_ep", "{error}");
            return None;
        }
        Some(Links {
            device_api: properties.deviceApiSupport,
            domains: u32::try_from(properties.nLsaTeams).unwrap_or(0),
            gin: properties.railedGinType,
        })
    }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// A function that every NCCL that passes initialize has.
fn present<F>(function: Option<F>, name: &str) -> Result<F> {
    function.ok_or_else(|| Error::Preflight {
        problem: format!("the NCCL in use has no {name}"),
        remedy: "update it to 2.30.4 or later".into(),
    })
}

/// What a communicator says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommFacts {
    /// Number of ranks.
    pub size: i32,
    /// This rank.
    pub rank: i32,
    /// Its CUDA device.
    pub device: i32,
    /// How its ranks reach each other, where NCCL tells.
    pub links: Option<Links>,
}

impl CommFacts {
    /// Number of NVLink domains; 1 where NCCL does not tell.
    #[must_use]
    pub fn domains(&self) -> u32 {
        self.links.map_or(1, |links| links.domains.max(1))
    }
}

/// How the ranks of a communicator reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Whether kernels may use it: there is symmetric memory.
    pub device_api: bool,
    /// Groups of ranks that load and store each other's memory (NVLink domains).
    pub domains: u32,
    /// How kernels reach the other groups over a network (GIN), `NCCL_GIN_TYPE_...`.
    pub gin: b::ncclGinType_t,
}

/// `"2.30.7"` for 23007.
#[must_use]
pub fn version_text(code: i32) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: NCCL returns NUL-terminated strings that live until the next failing call of this thread at least.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
