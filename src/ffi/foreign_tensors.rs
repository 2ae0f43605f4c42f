//! The NVTETensor accessors of whichever library in the process made the tensors: TransformerEngine's, or ours.

use super::types::{
    NVTEBasicTensor, NVTEScalingMode, NVTETensor, NVTETensorParam, kNVTERowwiseData, kNVTERowwiseScaleInv,
};
use super::view::{Look, TensorParts, TensorReader};
use crate::error::{Error, Result};
use crate::sys::{catch_foreign, fn_table, keep};
use libloading::os::unix::Library as UnixLibrary;
use once_cell::sync::OnceCell;
use std::ffi::c_void;

fn_table! {
    /// The accessors that reading a tensor takes.
    pub struct TensorAccessors, abi "C-unwind";
    unchecked
    required {
        nvte_get_tensor_param_v2: fn(NVTETensor, NVTETensorParam, *mut c_void, usize, *mut usize);
        nvte_tensor_scaling_mode: fn(NVTETensor) -> NVTEScalingMode;
    }
    optional {}
}

/// Reads tensors through the accessors found in the process.
#[derive(Debug)]
pub struct ForeignTensors(());

impl ForeignTensors {
    /// For the reads of one call; holds nothing.
    #[must_use]
    pub const fn open() -> Self {
        Self(())
    }

    /// The reads are over.
    pub const fn close(self) {}
}

/// The accessors in the process's global scope, or of a TransformerEngine library loaded out of it.
fn accessors() -> Result<&'static TensorAccessors> {
    static ACCESSORS: OnceCell<TensorAccessors> = OnceCell::new();
    ACCESSORS.get_or_try_init(|| {
        let mut tried = Vec::new();
        let name = "libtransformer_engine.so";
        // SAFETY: RTLD_NOLOAD runs nothing; it only finds what is loaded.
        let loaded = unsafe { UnixLibrary::open(Some(name), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
        for library in [Some(UnixLibrary::this()), loaded.ok()].into_iter().flatten() {
            // The library stays: its functions are kept.
            match TensorAccessors::from_library(&keep(library)) {
                Ok(found) => return Ok(found),
                Err(error) => tried.push(error.to_string()),
            }
        }
        Err(Error::Load {
            library: "the NVTETensor interface",
            tried,
            remedy: format!("this library is for processes that have {name}; load that first"),
        })
    })
}

impl TensorAccessors {
    fn array(&self, tensor: NVTETensor, param: NVTETensorParam) -> Result<NVTEBasicTensor> {
        let mut basic = std::mem::MaybeUninit::<NVTEBasicTensor>::zeroed();
        let (get, out, bytes) = (self.nvte_get_tensor_param_v2, basic.as_mut_ptr(), size_of::<NVTEBasicTensor>());
        catch_foreign("nvte_get_tensor_param_v2", || {
            // SAFETY: `out` has room for the parameter, and the accessor takes any tensor value.
            unsafe { get(tensor, param, out.cast(), bytes, std::ptr::null_mut()) }
        })?;
        // SAFETY: zero bytes are a valid value, and the accessor wrote a valid one.
        Ok(unsafe { basic.assume_init() })
    }
}

impl TensorReader for ForeignTensors {
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a tensor is no pointer; its accessors take any value")]
    fn read<L: Look>(&self, tensor: NVTETensor, look: L) -> Result<Option<L::Seen>> {
        if tensor.is_null() {
            return Ok(None);
        }
        let accessors = accessors()?;
        let scaling_mode = accessors.nvte_tensor_scaling_mode;
        let data = accessors.array(tensor, kNVTERowwiseData)?;
        let scale_inv = accessors.array(tensor, kNVTERowwiseScaleInv)?;
        // SAFETY: the accessor takes any tensor value.
        let scaling_mode = catch_foreign("nvte_tensor_scaling_mode", || unsafe { scaling_mode(tensor) })?;
        Ok(Some(look.look(&TensorParts { data: (&data).into(), scale_inv: (&scale_inv).into(), scaling_mode })))
    }
}
