//! The NVTETensor C interface: small descriptions of arrays that callers pass to the nvte_ep_* functions.
//!
//! `surface` holds the exported functions, `store` the tensors. A library that links this crate exports the functions.

mod store;
#[allow(non_snake_case, reason = "C parameter names become the header")]
pub mod surface;

use nvte_ep_core::error::Result;
use nvte_ep_core::ffi::types::NVTETensor;
use nvte_ep_core::ffi::view::{TensorParts, TensorReader};
use store::Param;

/// Reads the tensors that this library made.
#[derive(Debug, Clone, Copy)]
pub struct OwnTensors;

impl TensorReader for OwnTensors {
    fn read<R>(&self, tensor: NVTETensor, look: impl FnOnce(&TensorParts<'_>) -> R) -> Result<Option<R>> {
        store::read(tensor, |tensor| {
            look(&TensorParts {
                data: tensor.array_ref(Param::RowwiseData).into(),
                scale_inv: tensor.array_ref(Param::RowwiseScaleInv).into(),
                scaling_mode: tensor.scaling_mode(),
            })
        })
    }
}
