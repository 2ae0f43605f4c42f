//! C types of the NVTETensor interface, which every ABI shares. Layouts and values are TransformerEngine's.

#![allow(non_upper_case_globals, non_camel_case_types, reason = "C names")]

use std::ffi::{c_int, c_void};

/// A tensor: an opaque value that nvte_create_tensor returns. It is no pointer; never dereference it. NULL is the null tensor.
pub type NVTETensor = *mut c_void;

/// A CUDA stream, the type of the CUDA headers.
pub type cudaStream_t = *mut nvte_ep_bindings::CUstream_st;

/// Data type of a tensor.
pub type NVTEDType = c_int;
/// 8-bit unsigned integer.
pub const kNVTEByte: NVTEDType = 0;
/// 16-bit integer.
pub const kNVTEInt16: NVTEDType = 1;
/// 32-bit integer.
pub const kNVTEInt32: NVTEDType = 2;
/// 64-bit integer.
pub const kNVTEInt64: NVTEDType = 3;
/// 32-bit float.
pub const kNVTEFloat32: NVTEDType = 4;
/// 16-bit float (IEEE 754 binary16).
pub const kNVTEFloat16: NVTEDType = 5;
/// 16-bit bfloat.
pub const kNVTEBFloat16: NVTEDType = 6;
/// 8-bit float, 4 exponent and 3 mantissa bits.
pub const kNVTEFloat8E4M3: NVTEDType = 7;
/// 8-bit float, 5 exponent and 2 mantissa bits.
pub const kNVTEFloat8E5M2: NVTEDType = 8;
/// 8-bit power-of-two scale.
pub const kNVTEFloat8E8M0: NVTEDType = 9;
/// 4-bit float, 2 exponent bits and 1 mantissa bit.
pub const kNVTEFloat4E2M1: NVTEDType = 10;
/// Number of data types.
pub const kNVTENumTypes: NVTEDType = 11;

/// How a tensor's values are scaled.
pub type NVTEScalingMode = c_int;
/// One scale a tensor, or none.
pub const NVTE_DELAYED_TENSOR_SCALING: NVTEScalingMode = 0;
/// One e8m0 scale for each 32 values of a row (MXFP8).
pub const NVTE_MXFP8_1D_SCALING: NVTEScalingMode = 1;
/// One scale for each 128 values of a row.
pub const NVTE_BLOCK_SCALING_1D: NVTEScalingMode = 2;
/// One scale for each block of 128 x 128 values.
pub const NVTE_BLOCK_SCALING_2D: NVTEScalingMode = 3;
/// One e4m3 scale for each 16 values of a row (NVFP4).
pub const NVTE_NVFP4_1D_SCALING: NVTEScalingMode = 4;
/// No scaling mode.
pub const NVTE_INVALID_SCALING: NVTEScalingMode = 100;

/// Which parameter of a tensor nvte_set_tensor_param_v2 and nvte_get_tensor_param_v2 mean.
pub type NVTETensorParam = c_int;
/// Row-wise data: an NVTEBasicTensor.
pub const kNVTERowwiseData: NVTETensorParam = 0;
/// Column-wise data: an NVTEBasicTensor.
pub const kNVTEColumnwiseData: NVTETensorParam = 1;
/// Scale: an NVTEBasicTensor.
pub const kNVTEScale: NVTETensorParam = 2;
/// Absolute maximum: an NVTEBasicTensor.
pub const kNVTEAmax: NVTETensorParam = 3;
/// Inverse scale of the row-wise data: an NVTEBasicTensor.
pub const kNVTERowwiseScaleInv: NVTETensorParam = 4;
/// Inverse scale of the column-wise data: an NVTEBasicTensor.
pub const kNVTEColumnwiseScaleInv: NVTETensorParam = 5;
/// Absolute maximum of the column-wise data: an NVTEBasicTensor.
pub const kNVTEColumnwiseAmax: NVTETensorParam = 6;
/// Whether the scales are swizzled for matrix products: one byte.
pub const kNVTEWithGEMMSwizzledScales: NVTETensorParam = 7;
/// Whether NVFP4 data has row scales: one byte.
pub const kNVTERowScaledNVFP4: NVTETensorParam = 8;
/// Maximum of the NVFP4 e4m3 scales: an int.
pub const kNVTENVFP4E4M3Max: NVTETensorParam = 9;
/// Number of parameters.
pub const kNVTENumTensorParams: NVTETensorParam = 10;

/// A tensor's dimensions.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEShape {
    /// The sizes; the first ndim count.
    pub data: [usize; 15],
    /// Number of dimensions, 15 at most.
    pub ndim: usize,
}

/// A typed array: address, data type and shape. It owns nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEBasicTensor {
    /// Address, in device memory for tensors that kernels use.
    pub data_ptr: *mut c_void,
    /// Data type.
    pub dtype: NVTEDType,
    /// Dimensions.
    pub shape: NVTEShape,
}

const _: () = {
    assert!(size_of::<NVTEShape>() == 128 && std::mem::offset_of!(NVTEShape, ndim) == 120);
    assert!(size_of::<NVTEBasicTensor>() == 144);
    assert!(std::mem::offset_of!(NVTEBasicTensor, dtype) == 8 && std::mem::offset_of!(NVTEBasicTensor, shape) == 16);
};
