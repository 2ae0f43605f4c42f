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
            network: properties.railedGinType != b::NCCL_GIN_TYPE_NONE,
        })
    }
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

/// How the ranks of a communicator reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Whether kernels may use it: there is symmetric memory.
    pub device_api: bool,
    /// Groups of ranks that load and store each other's memory (NVLink domains).
    pub domains: u32,
    /// Whether kernels reach the other groups over a network (GIN).
    pub network: bool,
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
