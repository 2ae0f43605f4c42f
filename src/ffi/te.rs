//! C structures of TransformerEngine's ABI since 2.19. Configurations go by pointer, windows by value.

use super::types::{NVTEDType, NVTETensor};
use super::versioned::{Versioned, read_versioned};
use super::view::{TensorReader, Windows, required};
use crate::backend::{HandleKey, HandleRef};
use crate::config::{Dialect, GroupRequest, LayerConfig};
use crate::error::{Error, Result};
use std::ffi::c_int;

/// What a group is. All ranks pass the same values.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpGroupConfig {
    /// Size of this structure as its user knows it; 0 = without num_topk and drop_on_overflow.
    pub struct_size: usize,
    /// Number of ranks of the group; the communicator's size.
    pub ep_size: c_int,
    /// Number of experts over all ranks; a multiple of ep_size and of 4, at most 256 a rank.
    pub num_experts: c_int,
    /// Most tokens a rank dispatches in one step. A step may have fewer, another number on each rank, and none.
    pub max_tokens_per_rank: c_int,
    /// Rows of a rank's receive buffers (C), over all its local experts and with their padding; at least
    /// max_tokens_per_rank, rounded up to a multiple of 4. No routing needs more than
    /// ep_size * max_tokens_per_rank * top_k + (num_experts / ep_size) * (alignment - 1). Or 0 for eager mode, in which the
    /// caller sizes the buffers of each step by the total that prepare reports.
    pub max_recv_tokens_per_rank: c_int,
    /// Elements of a token row, at most; in max_token_dtype a multiple of 16 bytes.
    pub hidden_dim: c_int,
    /// Streaming multiprocessors that communication may use; 0 = automatic.
    pub num_comm_sms: c_int,
    /// Widest data type of a token; sizes the staging buffers. 0 = BFloat16.
    pub max_token_dtype: NVTEDType,
    /// 0 = payloads go through staging buffers; else dispatch output and combine input lie in windows.
    pub zero_copy: c_int,
    /// Most experts per token of any layer; required in eager mode, 0 = not said.
    pub num_topk: c_int,
    /// 0 = rows beyond max_recv_tokens_per_rank are a fatal error on the device; else they are dropped. Not in eager mode.
    /// Where rows may be dropped, the rows between the slabs and max_recv_tokens_per_rank are cleared by NCCL EP 0.1.0 and
    /// left as they are by TransformerEngine 2.20.2's: read no row behind the slabs.
    pub drop_on_overflow: c_int,
}

/// What a layer is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpLayerConfig {
    /// Size of this structure as its user knows it, or 0.
    pub struct_size: usize,
    /// Experts per token, 1 to 64; over NCCL EP at most 32.
    pub top_k: c_int,
    /// Each expert's received rows are padded to a multiple of this many; a power of two, 0 or 1 = no padding.
    pub dispatch_output_per_expert_alignment: usize,
}

const _: () = {
    assert!(size_of::<NVTEEpGroupConfig>() == 48 && align_of::<NVTEEpGroupConfig>() == 8);
    assert!(size_of::<NVTEEpLayerConfig>() == 24);
};

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpGroupConfig {
    const BASE_SIZE: usize = 40;
}

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpLayerConfig {
    const BASE_SIZE: usize = 24;
}

impl NVTEEpGroupConfig {
    /// The request that the C argument `group_config` points to.
    ///
    /// # Errors
    /// NULL, or a size below the first layout's.
    ///
    /// # Safety
    /// `pointer` is null or points to as many bytes as its `struct_size` says.
    pub unsafe fn read(pointer: *const Self) -> Result<GroupRequest> {
        // SAFETY: passed on.
        Ok(unsafe { read_versioned("group_config", pointer) }?.into())
    }
}

impl From<NVTEEpGroupConfig> for GroupRequest {
    fn from(config: NVTEEpGroupConfig) -> Self {
        let NVTEEpGroupConfig {
            struct_size: _,
            ep_size,
            num_experts,
            max_tokens_per_rank,
            max_recv_tokens_per_rank,
            hidden_dim,
            num_comm_sms,
            max_token_dtype,
            zero_copy,
            num_topk,
            drop_on_overflow,
        } = config;
        Self {
            ep_size,
            num_experts,
            max_tokens_per_rank,
            max_recv_tokens_per_rank,
            hidden_dim,
            max_num_sms: num_comm_sms,
            max_token_dtype,
            zero_copy: i32::from(zero_copy != 0),
            // Handles go by their memory's address, so a new address is a new handle.
            allow_handle_mem_reloc: 1,
            num_topk,
            drop_on_overflow: i32::from(drop_on_overflow != 0),
            dialect: Dialect::TE,
        }
    }
}

impl TryFrom<NVTEEpLayerConfig> for LayerConfig {
    type Error = Error;

    fn try_from(config: NVTEEpLayerConfig) -> Result<Self> {
        let NVTEEpLayerConfig { struct_size: _, top_k, dispatch_output_per_expert_alignment } = config;
        Self::parse("layer_cfg", top_k, dispatch_output_per_expert_alignment)
    }
}

/// The handle that the C argument `handle_mem` is.
///
/// # Errors
/// A null or stale tensor, or one without data.
#[inline]
pub fn parse_handle(reader: &impl TensorReader, handle_mem: NVTETensor) -> Result<HandleRef> {
    let mem = required(reader, "handle_mem", handle_mem, Windows::default())?;
    if mem.data == 0 {
        return Err(Error::argument("handle_mem", "must have data", "a NULL data pointer"));
    }
    Ok(HandleRef { key: HandleKey::Address(mem.data), mem })
}
