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

/// A grouped tensor: tensors of one dtype and scaling mode, and possibly different shapes, in one array. An opaque value that
/// nvte_create_grouped_tensor returns; NULL is the null grouped tensor.
pub type NVTEGroupedTensor = *mut c_void;

/// Which parameter of a grouped tensor nvte_set_grouped_tensor_param and nvte_get_grouped_tensor_param mean.
pub type NVTEGroupedTensorParam = c_int;
/// Row-wise data: an NVTEBasicTensor.
pub const kNVTEGroupedRowwiseData: NVTEGroupedTensorParam = 0;
/// Column-wise data: an NVTEBasicTensor.
pub const kNVTEGroupedColumnwiseData: NVTEGroupedTensorParam = 1;
/// Scales: an NVTEBasicTensor.
pub const kNVTEGroupedScale: NVTEGroupedTensorParam = 2;
/// Absolute maxima: an NVTEBasicTensor.
pub const kNVTEGroupedAmax: NVTEGroupedTensorParam = 3;
/// Inverse scales of the row-wise data: an NVTEBasicTensor.
pub const kNVTEGroupedRowwiseScaleInv: NVTEGroupedTensorParam = 4;
/// Inverse scales of the column-wise data: an NVTEBasicTensor.
pub const kNVTEGroupedColumnwiseScaleInv: NVTEGroupedTensorParam = 5;
/// Absolute maxima of the column-wise data: an NVTEBasicTensor.
pub const kNVTEGroupedColumnwiseAmax: NVTEGroupedTensorParam = 6;
/// Size of each tensor's first dimension, in device memory: an NVTEBasicTensor of int64.
pub const kNVTEGroupedFirstDims: NVTEGroupedTensorParam = 7;
/// Size of each tensor's last dimension, in device memory: an NVTEBasicTensor of int64.
pub const kNVTEGroupedLastDims: NVTEGroupedTensorParam = 8;
/// Offset of each tensor in the data, in device memory: an NVTEBasicTensor of int64.
pub const kNVTEGroupedTensorOffsets: NVTEGroupedTensorParam = 9;
/// Whether the scales are swizzled for matrix products: one byte.
pub const kNVTEGroupedWithGEMMSwizzledScales: NVTEGroupedTensorParam = 10;
/// Number of parameters of grouped tensors.
pub const kNVTENumGroupedTensorParams: NVTEGroupedTensorParam = 11;

/// How a tensor is to be quantized: an opaque value that nvte_create_quantization_config returns.
pub type NVTEQuantizationConfig = *mut c_void;

/// Which attribute nvte_set_quantization_config_attribute and nvte_get_quantization_config_attribute mean.
pub type NVTEQuantizationConfigAttribute = c_int;
/// Whether scales are powers of two: one byte.
pub const kNVTEQuantizationConfigForcePow2Scales: NVTEQuantizationConfigAttribute = 0;
/// What is added to absolute maxima: a float.
pub const kNVTEQuantizationConfigAmaxEpsilon: NVTEQuantizationConfigAttribute = 1;
/// A tensor whose one element says whether there is anything to do: an NVTETensor.
pub const kNVTEQuantizationConfigNoopTensor: NVTEQuantizationConfigAttribute = 2;
/// Deprecated: an int.
pub const kNVTEQuantizationConfigFloat8BlockScaleTensorFormat: NVTEQuantizationConfigAttribute = 3;
/// Seed and offset of random numbers: an NVTETensor of two elements.
pub const kNVTEQuantizationConfigRNGState: NVTEQuantizationConfigAttribute = 4;
/// Whether NVFP4 scales are of two-dimensional blocks: one byte.
pub const kNVTEQuantizationConfigNVFP42DQuantization: NVTEQuantizationConfigAttribute = 5;
/// Whether values are rounded at random: one byte.
pub const kNVTEQuantizationConfigStochasticRounding: NVTEQuantizationConfigAttribute = 6;
/// Whether arithmetic may be less exact: one byte.
pub const kNVTEQuantizationConfigUseFastMath: NVTEQuantizationConfigAttribute = 7;
/// How NVFP4 chooses between scales for 4 and for 6: an NVTENVFP44Over6Mode as one byte.
pub const kNVTEQuantizationConfigNVFP44Over6Mode: NVTEQuantizationConfigAttribute = 8;
/// Whether that choice may be computed less exactly: one byte.
pub const kNVTEQuantizationConfigNVFP44Over6ErrUseFastMath: NVTEQuantizationConfigAttribute = 9;
/// Whether MXFP8 scales are of two-dimensional blocks: one byte.
pub const kNVTEQuantizationConfigMXFP82DQuantization: NVTEQuantizationConfigAttribute = 10;
/// Number of attributes.
pub const kNVTEQuantizationConfigNumAttributes: NVTEQuantizationConfigAttribute = 11;

/// How NVFP4 chooses between scales for 4 and for 6.
pub type NVTENVFP44Over6Mode = c_int;
/// It does not choose.
pub const kNVTENVFP44Over6Disabled: NVTENVFP44Over6Mode = 0;
/// By the smaller mean absolute error.
pub const kNVTENVFP44Over6MinMAE: NVTENVFP44Over6Mode = 1;
/// By the smaller mean squared error.
pub const kNVTENVFP44Over6MinMSE: NVTENVFP44Over6Mode = 2;

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
