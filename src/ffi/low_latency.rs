//! C structures of low-latency groups.

use super::types::{NVTEDType, NVTETensor};
use super::versioned::{Versioned, read_versioned};
use super::view::{TensorReader, Windows, required, required_quantized};
use crate::backend::LlMemoryUsage;
use crate::config::LlRequest;
use crate::error::{Error, Result};
use crate::ops::{LlCombine, LlDispatch};
use crate::tensor::TensorView;
use std::ffi::c_int;

/// What a low-latency group is. All ranks pass the same values.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpExtLLConfig {
    /// Size of this structure as its user knows it.
    pub struct_size: usize,
    /// Number of ranks of the group; the communicator's size.
    pub ep_size: c_int,
    /// Number of experts over all ranks, 2 to 65535; a multiple of ep_size.
    pub num_experts: c_int,
    /// Most tokens a rank dispatches in one step. A step may have fewer, another number on each rank, and none.
    pub max_tokens_per_rank: c_int,
    /// Elements of a token row, at most: a multiple of 512, and at most 31744 bytes in max_token_dtype.
    pub hidden_dim: c_int,
    /// Most experts per token, 1 to 31. The buffers are sized for it.
    pub num_topk: c_int,
    /// Streaming multiprocessors that communication may use; 0 = all that a rank has, its share where ranks share a device.
    /// At least num_experts / 14.
    pub max_num_sms: c_int,
    /// Widest data type of a token, kNVTEBFloat16, kNVTEFloat16 or kNVTEFloat32; sizes the buffers. 0 = BFloat16.
    pub max_token_dtype: NVTEDType,
}

/// Device memory of this rank that a low-latency group takes, in bytes unless said otherwise. docs/memory.md has the formula.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpExtLLMemoryUsage {
    /// Size of this structure as its user knows it; set it before the call.
    pub struct_size: usize,
    /// Buffers for rows on their way: allocated by nvte_ep_ext_ll_initialize, and never grown.
    pub buffers: u64,
    /// Scratch of NCCL EP's kernels.
    pub workspace: u64,
    /// The library's own scratch.
    pub library: u64,
    /// All of the above.
    pub total: u64,
    /// Handle memory of the open handles, which is the caller's and not in total.
    pub handle_memory: u64,
    /// Number of open handles.
    pub handles: u64,
}

const _: () = {
    assert!(size_of::<NVTEEpExtLLConfig>() == 40 && align_of::<NVTEEpExtLLConfig>() == 8);
    assert!(size_of::<NVTEEpExtLLMemoryUsage>() == 56);
};

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpExtLLConfig {
    const BASE_SIZE: usize = 40;
}

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpExtLLMemoryUsage {
    const BASE_SIZE: usize = 56;
}

impl NVTEEpExtLLConfig {
    /// The request that the C argument `config` points to.
    ///
    /// # Errors
    /// NULL, or a size below the first layout's.
    ///
    /// # Safety
    /// `pointer` is null or points to as many bytes as its `struct_size` says.
    pub unsafe fn read(pointer: *const Self) -> Result<LlRequest> {
        // SAFETY: passed on.
        let Self {
            struct_size: _,
            ep_size,
            num_experts,
            max_tokens_per_rank,
            hidden_dim,
            num_topk,
            max_num_sms,
            max_token_dtype,
        } = unsafe { read_versioned("config", pointer) }?;
        Ok(LlRequest { ep_size, num_experts, max_tokens_per_rank, hidden_dim, num_topk, max_num_sms, max_token_dtype })
    }
}

impl From<LlMemoryUsage> for NVTEEpExtLLMemoryUsage {
    fn from(usage: LlMemoryUsage) -> Self {
        let LlMemoryUsage { buffers, workspace, library, handles, open_handles } = usage;
        Self {
            struct_size: size_of::<Self>(),
            buffers,
            workspace,
            library,
            total: buffers + workspace + library,
            handle_memory: handles,
            handles: open_handles,
        }
    }
}

/// The handle memory that the C argument `handle_mem` is.
///
/// # Errors
/// A null or stale tensor, or one without data.
pub fn ll_handle_of(reader: &impl TensorReader, handle_mem: NVTETensor) -> Result<TensorView> {
    let mem = required(reader, "handle_mem", handle_mem, Windows::default())?;
    if mem.data == 0 {
        return Err(Error::argument("handle_mem", "must have data", "a NULL data pointer"));
    }
    Ok(mem)
}

/// The flag that the C argument `send_only` is.
///
/// # Errors
/// A number other than 0 and 1.
pub fn send_only_of(send_only: c_int) -> Result<bool> {
    match send_only {
        0 => Ok(false),
        1 => Ok(true),
        other => {
            let required = "must be 0 (the whole operation) or 1 (its first half)";
            Err(Error::argument("send_only", required, other))
        }
    }
}

/// # Errors
/// A null, stale or malformed tensor.
pub fn ll_dispatch_of(
    reader: &impl TensorReader,
    topk_idx: NVTETensor,
    tokens: NVTETensor,
    recv_tokens: NVTETensor,
    counts: NVTETensor,
) -> Result<LlDispatch> {
    Ok(LlDispatch {
        topk_idx: required(reader, "topk_idx", topk_idx, Windows::default())?,
        tokens: required(reader, "tokens", tokens, Windows::default())?,
        recv_tokens: required_quantized(reader, "recv_tokens", recv_tokens)?,
        counts: required(reader, "counts", counts, Windows::default())?,
    })
}

/// # Errors
/// A null, stale or malformed tensor.
pub fn ll_combine_of(
    reader: &impl TensorReader,
    topk_idx: NVTETensor,
    topk_weights: NVTETensor,
    expert_out: NVTETensor,
    result: NVTETensor,
) -> Result<LlCombine> {
    Ok(LlCombine {
        topk_idx: required(reader, "topk_idx", topk_idx, Windows::default())?,
        topk_weights: required(reader, "topk_weights", topk_weights, Windows::default())?,
        expert_out: required(reader, "expert_out", expert_out, Windows::default())?,
        result: required(reader, "result", result, Windows::default())?,
    })
}
