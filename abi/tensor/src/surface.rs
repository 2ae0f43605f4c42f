//! The exported functions. Each throws `std::runtime_error` for a tensor that is not alive and for what its text names.

use crate::store::{self, Array, Param, ParamKind, Tensor};
use crate::value::require_pointer;
use nvte_ep_core::dtype::DType;
use nvte_ep_core::env::Env;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::types::{
    NVTEBasicTensor, NVTEDType, NVTEScalingMode, NVTEShape, NVTETensor, NVTETensorParam, cudaStream_t,
};
use nvte_ep_core::sys;
use nvte_ep_core::sys::cuda::Stream;
use std::ffi::c_void;

/// Creates a tensor without data. Destroy it with nvte_destroy_tensor.
///
/// scaling_mode: an NVTEScalingMode.
/// Throws for an unknown scaling mode.
pub(crate) fn nvte_create_tensor(scaling_mode: NVTEScalingMode) -> Result<NVTETensor> {
    Ok(store::create(scaling_mode, 1)?[0])
}

/// Creates N tensors without data and writes them to tensors; all or none.
///
/// # Safety
/// tensors points to room for N values.
pub(crate) unsafe fn nvte_create_tensors(
    scaling_mode: NVTEScalingMode,
    tensors: *mut NVTETensor,
    N: usize,
) -> Result<()> {
    require_pointer("tensors", tensors, N)?;
    let created = store::create(scaling_mode, N)?;
    // SAFETY: the caller's array has room for N values.
    unsafe { std::ptr::copy_nonoverlapping(created.as_ptr(), tensors, N) };
    Ok(())
}

/// Destroys a tensor; its data stays the caller's. The null tensor is accepted.
///
/// Throws for a tensor that is not alive.
pub(crate) fn nvte_destroy_tensor(tensor: NVTETensor) -> Result<()> {
    store::destroy(&[tensor])
}

/// Destroys N tensors; null tensors are accepted. Throws, and destroys none, if one of them is not alive.
///
/// # Safety
/// tensors points to N values.
pub(crate) unsafe fn nvte_destroy_tensors(tensors: *mut NVTETensor, N: usize) -> Result<()> {
    require_pointer("tensors", tensors, N)?;
    if N == 0 {
        return Ok(());
    }
    // SAFETY: the caller's array holds N values.
    store::destroy(unsafe { std::slice::from_raw_parts(tensors, N) })
}

/// Sets a parameter of a tensor.
///
/// buf, size_in_bytes: the value: an NVTEBasicTensor for data, scales and maxima; one byte for
/// kNVTEWithGEMMSwizzledScales and kNVTERowScaledNVFP4; an int for kNVTENVFP4E4M3Max. The size may be larger.
/// Throws for the null tensor, an unknown parameter, a NULL or short buffer, more than 15 dimensions, an unknown dtype.
///
/// # Safety
/// buf points to size_in_bytes readable bytes.
pub(crate) unsafe fn nvte_set_tensor_param_v2(
    tensor: NVTETensor,
    param: NVTETensorParam,
    buf: *const c_void,
    size_in_bytes: usize,
) -> Result<()> {
    let kind = ParamKind::parse(param)?;
    // SAFETY: the caller vouches for the buffer.
    let value = unsafe { kind.of(&Tensor::NULL).read(buf, size_in_bytes) }?;
    store::change(tensor, |tensor| kind.set(tensor, value))
}

/// Gets a parameter of a tensor; of the null tensor the defaults.
///
/// buf, size_in_bytes: room for the value (see nvte_set_tensor_param_v2). With buf NULL nothing is written but size_written.
/// size_written: receives the value's size in bytes; may be NULL.
/// Throws for an unknown parameter and a short buffer.
///
/// # Safety
/// buf is NULL or points to size_in_bytes writable bytes; size_written is NULL or points to a size_t.
pub(crate) unsafe fn nvte_get_tensor_param_v2(
    tensor: NVTETensor,
    param: NVTETensorParam,
    buf: *mut c_void,
    size_in_bytes: usize,
    size_written: *mut usize,
) -> Result<()> {
    let kind = ParamKind::parse(param)?;
    let value = store::read_or_default(tensor, |tensor| kind.of(tensor))?;
    // SAFETY: the caller vouches for the buffer and the pointer.
    unsafe { value.give(buf, size_in_bytes, size_written) }
}

/// Sets a parameter that is an NVTEBasicTensor. Deprecated: use nvte_set_tensor_param_v2.
///
/// tensor: pointer to the tensor.
///
/// # Safety
/// Both pointers are NULL, which throws, or point to values.
pub(crate) unsafe fn nvte_set_tensor_param(
    tensor: *mut NVTETensor,
    param_name: NVTETensorParam,
    param: *const NVTEBasicTensor,
) -> Result<()> {
    require_pointer("tensor", tensor, 1)?;
    require_pointer("param", param, 1)?;
    let which = array_param(param_name)?;
    // SAFETY: not NULL, and the caller vouches for what it points to.
    let array = unsafe { param.read() }.into();
    // SAFETY: as above.
    store::change(unsafe { tensor.read() }, |tensor: &mut Tensor| tensor.set_array(which, array))
}

/// Gets a parameter that is an NVTEBasicTensor; of the null tensor an empty one. Deprecated: use nvte_get_tensor_param_v2.
pub(crate) fn nvte_get_tensor_param(tensor: NVTETensor, param_name: NVTETensorParam) -> Result<NVTEBasicTensor> {
    let which = array_param(param_name)?;
    Ok(store::read_or_default(tensor, |tensor| tensor.array(which))?.into())
}

/// Makes a shape of ndim sizes, all 0 where data is NULL. Throws for more than 15.
///
/// # Safety
/// data is NULL or points to ndim values.
pub(crate) unsafe fn nvte_make_shape(data: *const usize, ndim: usize) -> Result<NVTEShape> {
    let mut shape = NVTEShape { data: [0; 15], ndim };
    if ndim > shape.data.len() {
        let required = format!("must be at most {} dimensions", shape.data.len());
        return Err(Error::argument("ndim", required, ndim));
    }
    if !data.is_null() {
        // SAFETY: the caller's array holds ndim values, and the shape has room for them.
        unsafe { std::ptr::copy_nonoverlapping(data, shape.data.as_mut_ptr(), ndim) };
    }
    Ok(shape)
}

/// Shape of the tensor's data: row-wise, or column-wise where only that is set. Throws for the null tensor.
pub(crate) fn nvte_tensor_shape(tensor: NVTETensor) -> Result<NVTEShape> {
    Ok(store::read_live(tensor, Tensor::main)?.shape)
}

/// Shape of the tensor's column-wise data. Throws for the null tensor.
pub(crate) fn nvte_tensor_columnwise_shape(tensor: NVTETensor) -> Result<NVTEShape> {
    Ok(store::read_live(tensor, |tensor: &Tensor| tensor.array(Param::ColumnwiseData))?.shape)
}

/// Number of dimensions; 0 for the null tensor.
pub(crate) fn nvte_tensor_ndims(tensor: NVTETensor) -> Result<usize> {
    Ok(store::read(tensor, Tensor::main)?.map_or(0, |array| array.shape.ndim))
}

/// Size of dimension dim. Throws for the null tensor, and for a dimension that the tensor does not have.
pub(crate) fn nvte_tensor_size(tensor: NVTETensor, dim: usize) -> Result<usize> {
    let shape = store::read_live(tensor, Tensor::main)?.shape;
    let sizes = &shape.data[..shape.ndim];
    sizes
        .get(dim)
        .copied()
        .ok_or_else(|| Error::argument("dim", format!("must be below the number of dimensions, {}", sizes.len()), dim))
}

/// Number of elements; 0 for the null tensor.
pub(crate) fn nvte_tensor_numel(tensor: NVTETensor) -> Result<usize> {
    store::read(tensor, Tensor::main)?.map_or(Ok(0), |array| array.numel())
}

/// Bytes of the data; 0 for the null tensor.
pub(crate) fn nvte_tensor_size_bytes(tensor: NVTETensor) -> Result<usize> {
    store::read(tensor, Tensor::main)?.map_or(Ok(0), |array| size_bytes(&array))
}

/// Bytes of an element. Throws for the null tensor, and for a dtype that is not made of whole bytes.
pub(crate) fn nvte_tensor_element_size(tensor: NVTETensor) -> Result<usize> {
    let array = store::read_live(tensor, Tensor::main)?;
    match array.element_bits() {
        bits if bits % 8 == 0 => Ok(bits / 8),
        bits => {
            let error = Error::argument("tensor", "must have elements of whole bytes", format!("{bits} bits"));
            Err(error.with_remedy("call nvte_tensor_element_size_bits"))
        }
    }
}

/// Bits of an element. Throws for the null tensor.
pub(crate) fn nvte_tensor_element_size_bits(tensor: NVTETensor) -> Result<usize> {
    Ok(store::read_live(tensor, Tensor::main)?.element_bits())
}

/// Data type; kNVTEFloat32 for the null tensor.
pub(crate) fn nvte_tensor_type(tensor: NVTETensor) -> Result<NVTEDType> {
    Ok(store::read_or_default(tensor, Tensor::main)?.dtype)
}

/// Address of the row-wise data; NULL for the null tensor.
pub(crate) fn nvte_tensor_data(tensor: NVTETensor) -> Result<*mut c_void> {
    address(tensor, Param::RowwiseData)
}

/// Address of the column-wise data; NULL for the null tensor.
pub(crate) fn nvte_tensor_columnwise_data(tensor: NVTETensor) -> Result<*mut c_void> {
    address(tensor, Param::ColumnwiseData)
}

/// Address of the absolute maximum; NULL for the null tensor.
pub(crate) fn nvte_tensor_amax(tensor: NVTETensor) -> Result<*mut f32> {
    Ok(address(tensor, Param::Amax)?.cast())
}

/// Address of the scale; NULL for the null tensor.
pub(crate) fn nvte_tensor_scale(tensor: NVTETensor) -> Result<*mut f32> {
    Ok(address(tensor, Param::Scale)?.cast())
}

/// Address of the inverse scale of the row-wise data; NULL for the null tensor.
pub(crate) fn nvte_tensor_scale_inv(tensor: NVTETensor) -> Result<*mut f32> {
    Ok(address(tensor, Param::RowwiseScaleInv)?.cast())
}

/// Shape of the inverse scale of the row-wise data. Throws for the null tensor.
pub(crate) fn nvte_tensor_scale_inv_shape(tensor: NVTETensor) -> Result<NVTEShape> {
    Ok(store::read_live(tensor, |tensor: &Tensor| tensor.array(Param::RowwiseScaleInv))?.shape)
}

/// Scaling mode; NVTE_DELAYED_TENSOR_SCALING for the null tensor.
pub(crate) fn nvte_tensor_scaling_mode(tensor: NVTETensor) -> Result<NVTEScalingMode> {
    store::read_or_default(tensor, Tensor::scaling_mode)
}

/// Queues zeroes over the row-wise data, and over the absolute maximum where there is one, on stream. The null tensor
/// is accepted.
///
/// # Safety
/// The tensor's addresses are device memory of its extent, live until the queued work is done; stream is a stream of the
/// current device.
pub(crate) unsafe fn nvte_zero_tensor(tensor: NVTETensor, stream: cudaStream_t) -> Result<()> {
    let Some((data, amax)) =
        store::read(tensor, |tensor: &Tensor| (tensor.array(Param::RowwiseData), tensor.array(Param::Amax)))?
    else {
        return Ok(());
    };
    let cuda = &sys::base(&Env::from_process()?)?.cuda;
    // SAFETY: the caller vouches for the stream.
    let stream = unsafe { Stream::bind(stream.expose_provenance()) };
    for array in [data, amax].into_iter().filter(|array| array.data != 0) {
        let bytes = size_bytes(&array)?;
        // SAFETY: the caller vouches for the memory.
        unsafe { cuda.zero(array.data as u64, bytes, stream) }?;
    }
    Ok(())
}

fn array_param(param: NVTETensorParam) -> Result<Param> {
    match ParamKind::parse(param)? {
        ParamKind::Array(array) => Ok(array),
        _ => Err(Error::argument("param_name", "must be a parameter that is an NVTEBasicTensor", param)
            .with_remedy("use the _v2 function for the others")),
    }
}

fn address(tensor: NVTETensor, param: Param) -> Result<*mut c_void> {
    let data = store::read(tensor, |tensor: &Tensor| tensor.array(param).data)?.unwrap_or(0);
    Ok(std::ptr::with_exposed_provenance_mut(data))
}

fn size_bytes(array: &Array) -> Result<usize> {
    let dtype = DType::from_nvte(array.dtype).expect("checked when it was set");
    let numel = array.numel()?;
    match numel.checked_mul(dtype.bits()) {
        Some(_) => Ok(dtype.bytes(numel)),
        None => Err(Error::argument("tensor", "must have a size that fits memory", format!("{numel} elements"))),
    }
}
