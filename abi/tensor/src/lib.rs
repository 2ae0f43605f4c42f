//! The NVTETensor C interface: small descriptions of arrays that callers pass to the nvte_ep_* functions.
//!
//! `surface`, `grouped` and `quantization` say what the functions do, `store` holds the objects; `exports` and `twins` are
//! generated from the former. A library that links this crate exports them.

pub mod exports;
mod grouped;
mod quantization;
mod store;
#[allow(non_snake_case, reason = "C parameter names become the header")]
mod surface;
pub mod twins;
mod value;

use nvte_ep_core::error::Result;
use nvte_ep_core::ffi::types::NVTETensor;
use nvte_ep_core::ffi::view::{Look, TensorParts, TensorReader};
use store::{Param, Reading, Tensor};

/// Reads the tensors that this library made. While it lives none is made, changed or destroyed, and a thread has one at a
/// time.
pub struct OwnTensors(Reading);

impl OwnTensors {
    /// For the reads of one call.
    #[inline]
    #[must_use]
    pub fn open() -> Self {
        Self(store::reading())
    }

    /// The reads are over.
    #[inline]
    pub fn close(self) {}
}

impl TensorReader for OwnTensors {
    #[inline(always)]
    fn read<L: Look>(&self, tensor: NVTETensor, look: L) -> Result<Option<L::Seen>> {
        let Some(tensor) = self.0.get::<Tensor>(tensor)? else { return Ok(None) };
        Ok(Some(look.look(&TensorParts {
            data: tensor.array_ref(Param::RowwiseData).into(),
            scale_inv: tensor.array_ref(Param::RowwiseScaleInv).into(),
            scaling_mode: tensor.scaling_mode(),
        })))
    }
}
