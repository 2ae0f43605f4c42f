//! C structures of the register_layer ABI, passed by value.

use super::types::{NVTEDType, NVTETensor};
use super::view::{TensorReader, Windows, required};
use crate::backend::{HandleKey, HandleRef};
use crate::config::{Dialect, GroupRequest, LayerConfig};
use crate::error::{Error, Result};
use std::ffi::c_int;

/// What a group is. All ranks pass the same values.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpGroupConfig {
    /// Number of ranks of the group; the communicator's size.
    pub ep_size: c_int,
    /// Number of experts over all ranks; a multiple of ep_size and of 4, at most 256 a rank.
    pub num_experts: c_int,
    /// Most tokens a rank dispatches in one step. A step may have fewer, another number on each rank, and none.
    pub max_tokens_per_rank: c_int,
    /// Rows of a rank's receive buffers (C), over all its local experts and with their padding; at least
    /// max_tokens_per_rank, rounded up to a multiple of 4. No routing needs more than
    /// ep_size * max_tokens_per_rank * top_k + (num_experts / ep_size) * (alignment - 1). A step that needs more than C rows
    /// is a fatal error of the device: the next synchronization reports it, and the process has to end; with the option
    /// "overflow" = "drop" the rows beyond are dropped. With the option "eager" = "on" it is 0, and the caller sizes the buffers
    /// of each step by nvte_ep_ext_recv_totals.
    pub max_recv_tokens_per_rank: c_int,
    /// Elements of a token row, at most; in max_token_dtype a multiple of 16 bytes.
    pub hidden_dim: c_int,
    /// Streaming multiprocessors that communication may use; 0 = automatic.
    pub max_num_sms: c_int,
    /// What happens when a registered layer comes with another handle memory than before: 0 = an error, 1 = the handle is
    /// quietly rebuilt over the new memory.
    pub allow_handle_mem_reloc: c_int,
    /// Widest data type of a token; sizes the staging buffers. 0 = BFloat16.
    pub max_token_dtype: NVTEDType,
    /// 0 = payloads go through staging buffers; 1 = dispatch output and combine input lie in windows (docs/memory.md).
    pub zero_copy: c_int,
}

/// What a layer is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpLayerConfig {
    /// Reserved; the group determines it, and any value is accepted.
    pub num_local_experts: c_int,
    /// Experts per token, 1 to 64; over NCCL EP at most 32.
    pub top_k: c_int,
    /// Each expert's received rows are padded to a multiple of this many; a power of two, 0 or 1 = no padding.
    pub dispatch_output_per_expert_alignment: usize,
}

/// A registered layer and the device memory that holds its routing.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpHandle {
    /// From nvte_ep_register_layer; never 0.
    pub id: u64,
    /// Byte tensor of at least the size that nvte_ep_register_layer reported, on a 256-byte boundary; it need not be cleared.
    pub mem: NVTETensor,
}

const _: () = {
    assert!(size_of::<NVTEEpGroupConfig>() == 36 && align_of::<NVTEEpGroupConfig>() == 4);
    assert!(size_of::<NVTEEpLayerConfig>() == 16 && size_of::<NVTEEpHandle>() == 16);
};

impl NVTEEpGroupConfig {
    /// The request that the C argument `group_config` points to.
    ///
    /// # Errors
    /// NULL.
    ///
    /// # Safety
    /// `pointer` is null or points to a configuration.
    pub unsafe fn read(pointer: *const Self) -> Result<GroupRequest> {
        if pointer.is_null() {
            return Err(Error::argument("group_config", "must not be NULL", "NULL"));
        }
        // SAFETY: not null, and the caller vouches for it.
        Ok(unsafe { pointer.read() }.into())
    }
}

impl From<NVTEEpGroupConfig> for GroupRequest {
    fn from(config: NVTEEpGroupConfig) -> Self {
        let NVTEEpGroupConfig {
            ep_size,
            num_experts,
            max_tokens_per_rank,
            max_recv_tokens_per_rank,
            hidden_dim,
            max_num_sms,
            allow_handle_mem_reloc,
            max_token_dtype,
            zero_copy,
        } = config;
        Self {
            ep_size,
            num_experts,
            max_tokens_per_rank,
            max_recv_tokens_per_rank,
            hidden_dim,
            max_num_sms,
            allow_handle_mem_reloc,
            max_token_dtype,
            zero_copy,
            num_topk: 0,
            drop_on_overflow: 0,
            dialect: Dialect::REGISTER_LAYER,
        }
    }
}

impl TryFrom<NVTEEpLayerConfig> for LayerConfig {
    type Error = Error;

    fn try_from(config: NVTEEpLayerConfig) -> Result<Self> {
        let NVTEEpLayerConfig { num_local_experts: _, top_k, dispatch_output_per_expert_alignment } = config;
        Self::parse("layer_config", top_k, dispatch_output_per_expert_alignment)
    }
}

impl NVTEEpHandle {
    /// The handle with its memory read.
    ///
    /// # Errors
    /// A null or stale memory tensor.
    #[inline]
    pub fn parse(self, reader: &impl TensorReader) -> Result<HandleRef> {
        let Self { id, mem } = self;
        Ok(HandleRef { key: HandleKey::Registered(id), mem: required(reader, "handle.mem", mem, Windows::default())? })
    }
}
