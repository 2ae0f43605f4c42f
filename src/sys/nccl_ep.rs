//! NCCL EP. Its functions may throw C++ exceptions through `extern "C"`, so every call goes through [`catch_foreign`].

use super::{catch_foreign, fn_table};
use crate::error::{Error, Result};
use nvte_ep_bindings as b;
use std::ffi::c_int;

fn_table! {
    /// NCCL EP's functions, as far as the two modes need them.
    pub struct NcclEp, abi "C-unwind";
    required {
        ncclEpGetVersion: fn(*mut c_int) -> b::ncclResult_t;
        ncclEpCreateGroup: fn(*mut b::ncclEpGroup_t, b::ncclComm_t, *const b::ncclEpGroupConfig_t) -> b::ncclResult_t;
        ncclEpGroupDestroy: fn(b::ncclEpGroup_t) -> b::ncclResult_t;
        ncclEpHandleMemSize: fn(b::ncclEpGroup_t, b::ncclEpLayout_t, *const b::ncclEpHandleConfig_t, *mut usize, c_int) -> b::ncclResult_t;
        ncclEpInitHandle: fn(*mut b::ncclEpHandle_t, b::ncclEpGroup_t, b::ncclEpLayout_t, *const b::ncclEpHandleConfig_t, c_int, *const b::ncclEpTensor_t) -> b::ncclResult_t;
        ncclEpUpdateHandle: fn(b::ncclEpHandle_t, *const b::ncclEpTensor_t, *const b::ncclEpLayoutInfo_t, b::cudaStream_t) -> b::ncclResult_t;
        ncclEpHandleDestroy: fn(b::ncclEpHandle_t) -> b::ncclResult_t;
        ncclEpDispatch: fn(b::ncclEpHandle_t, *const b::ncclEpDispatchInputs_t, *const b::ncclEpDispatchOutputs_t, *const b::ncclEpLayoutInfo_t, *const b::ncclEpDispatchConfig_t, b::cudaStream_t) -> b::ncclResult_t;
        ncclEpCombine: fn(b::ncclEpHandle_t, *const b::ncclEpCombineInputs_t, *const b::ncclEpCombineOutputs_t, *const b::ncclEpCombineConfig_t, b::cudaStream_t) -> b::ncclResult_t;
        ncclEpComplete: fn(b::ncclEpHandle_t, *const b::ncclEpCompleteConfig_t, b::cudaStream_t) -> b::ncclResult_t;
    }
    optional {}
}

/// Runs one call that returns `ncclResult_t`, catching what it throws, and checks the code.
pub(crate) fn checked<F>(nccl: &super::nccl::Nccl, name: &'static str, call: F) -> Result<()>
where
    F: Fn() -> b::ncclResult_t + Copy,
{
    nccl.check(name, catch_foreign(name, call)?)
}

impl NcclEp {
    /// The version code that the library reports: major * 10000 + minor * 100 + patch.
    ///
    /// # Errors
    /// The library's.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        let (function, out) = (self.ncclEpGetVersion, &raw mut version);
        // SAFETY: `out` points to a live int.
        let code = catch_foreign("ncclEpGetVersion", || unsafe { function(out) })?;
        if code == b::ncclSuccess {
            return Ok(version);
        }
        Err(Error::Library { call: "ncclEpGetVersion", code: i64::from(code), text: String::new() })
    }
}
