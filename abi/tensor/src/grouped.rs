//! Grouped tensors: tensors of one dtype and scaling mode in one array. Expert parallelism takes none; they are kept and
//! given back, for programs that are compiled against TransformerEngine's headers and bind all of their functions.

use crate::store::{self, Array, Object, checked_scaling_mode};
use crate::value::Value;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::types::{
    NVTE_DELAYED_TENSOR_SCALING, NVTEDType, NVTEGroupedTensor, NVTEGroupedTensorParam, NVTEScalingMode, NVTEShape,
    kNVTEFloat32, kNVTEGroupedColumnwiseData, kNVTEGroupedFirstDims, kNVTEGroupedRowwiseData,
    kNVTEGroupedWithGEMMSwizzledScales, kNVTEInt64, kNVTENumGroupedTensorParams,
};
use std::ffi::c_void;

/// Number of parameters that are arrays: all before the flag.
const ARRAYS: usize = kNVTEGroupedWithGEMMSwizzledScales as usize;

/// One grouped tensor.
#[derive(Debug, Clone)]
pub(crate) struct GroupedTensor {
    scaling_mode: NVTEScalingMode,
    num_tensors: usize,
    logical_shape: NVTEShape,
    arrays: [Array; ARRAYS],
    swizzled_scales: bool,
}

impl GroupedTensor {
    fn new(scaling_mode: NVTEScalingMode, num_tensors: usize, logical_shape: NVTEShape) -> Result<Self> {
        if num_tensors == 0 {
            return Err(Error::argument("num_tensors", "must be at least 1", num_tensors));
        }
        if logical_shape.ndim != 2 {
            return Err(Error::argument("logical_shape.ndim", "must be 2", logical_shape.ndim));
        }
        Ok(Self {
            scaling_mode: checked_scaling_mode(scaling_mode)?,
            num_tensors,
            logical_shape,
            arrays: ARRAYS_OF_NONE,
            swizzled_scales: false,
        })
    }

    fn value(&self, param: Param) -> Value {
        match param {
            Param::Array(index) => Value::Array(self.arrays[index]),
            Param::SwizzledScales => Value::Flag(self.swizzled_scales),
        }
    }

    fn set(&mut self, param: Param, value: Value) -> Result<()> {
        match (param, value) {
            (Param::Array(index), Value::Array(array)) => self.arrays[index] = array.checked()?,
            (Param::SwizzledScales, Value::Flag(flag)) => self.swizzled_scales = flag,
            _ => unreachable!("a value is read by its kind"),
        }
        Ok(())
    }

    fn dtype(&self) -> NVTEDType {
        let [rowwise, columnwise] =
            [kNVTEGroupedRowwiseData, kNVTEGroupedColumnwiseData].map(|param| &self.arrays[param as usize]);
        if rowwise.is_blank() && !columnwise.is_blank() { columnwise.dtype } else { rowwise.dtype }
    }
}

/// What the arrays are before they are set: empty, of float32, and those of dimensions and offsets of int64.
const ARRAYS_OF_NONE: [Array; ARRAYS] = {
    let mut arrays = [Array::BLANK; ARRAYS];
    let mut index = kNVTEGroupedFirstDims as usize;
    while index < ARRAYS {
        arrays[index].dtype = kNVTEInt64;
        index += 1;
    }
    arrays
};

/// A parameter by its C number.
#[derive(Clone, Copy)]
enum Param {
    Array(usize),
    SwizzledScales,
}

impl Param {
    fn parse(param: NVTEGroupedTensorParam) -> Result<Self> {
        match usize::try_from(param) {
            Ok(index) if index < ARRAYS => Ok(Self::Array(index)),
            _ if param == kNVTEGroupedWithGEMMSwizzledScales => Ok(Self::SwizzledScales),
            _ => {
                let required = format!("must be an NVTEGroupedTensorParam, 0 to {}", kNVTENumGroupedTensorParams - 1);
                Err(Error::argument("param", required, param))
            }
        }
    }

    /// Its value in a grouped tensor that nothing was put into.
    const fn unset(self) -> Value {
        match self {
            Self::Array(index) => Value::Array(ARRAYS_OF_NONE[index]),
            Self::SwizzledScales => Value::Flag(false),
        }
    }
}

/// Creates a grouped tensor without data. Destroy it with nvte_destroy_grouped_tensor.
///
/// scaling_mode: an NVTEScalingMode.
/// num_tensors: number of its tensors, at least 1.
/// logical_shape: two dimensions, of all tensors together.
/// Throws for other values.
pub(crate) fn nvte_create_grouped_tensor(
    scaling_mode: NVTEScalingMode,
    num_tensors: usize,
    logical_shape: NVTEShape,
) -> Result<NVTEGroupedTensor> {
    let grouped = GroupedTensor::new(scaling_mode, num_tensors, logical_shape)?;
    store::create_object(Object::Grouped(Box::new(grouped)))
}

/// Destroys a grouped tensor; its data stays the caller's. NULL is accepted.
///
/// Throws for a grouped tensor that is not alive.
pub(crate) fn nvte_destroy_grouped_tensor(tensor: NVTEGroupedTensor) -> Result<()> {
    store::destroy_object::<GroupedTensor>(tensor)
}

/// Sets a parameter of a grouped tensor.
///
/// buf, size_in_bytes: the value: an NVTEBasicTensor, or one byte for kNVTEGroupedWithGEMMSwizzledScales. The size may be
/// larger.
/// Throws for NULL, an unknown parameter, a NULL or short buffer, more than 15 dimensions, an unknown dtype.
///
/// # Safety
/// buf points to size_in_bytes readable bytes.
pub(crate) unsafe fn nvte_set_grouped_tensor_param(
    tensor: NVTEGroupedTensor,
    param: NVTEGroupedTensorParam,
    buf: *const c_void,
    size_in_bytes: usize,
) -> Result<()> {
    let param = Param::parse(param)?;
    // SAFETY: the caller vouches for the buffer.
    let value = unsafe { param.unset().read(buf, size_in_bytes) }?;
    store::change(tensor, |grouped: &mut GroupedTensor| grouped.set(param, value))
}

/// Gets a parameter of a grouped tensor; of NULL the value of one that nothing was put into.
///
/// buf, size_in_bytes: room for the value (see nvte_set_grouped_tensor_param). With buf NULL nothing is written but
/// size_written.
/// size_written: receives the value's size in bytes; may be NULL.
/// Throws for an unknown parameter and a short buffer.
///
/// # Safety
/// buf is NULL or points to size_in_bytes writable bytes; size_written is NULL or points to a size_t.
pub(crate) unsafe fn nvte_get_grouped_tensor_param(
    tensor: NVTEGroupedTensor,
    param: NVTEGroupedTensorParam,
    buf: *mut c_void,
    size_in_bytes: usize,
    size_written: *mut usize,
) -> Result<()> {
    let param = Param::parse(param)?;
    let found = store::read(tensor, |grouped: &GroupedTensor| grouped.value(param))?;
    // SAFETY: the caller vouches for the buffer and the pointer.
    unsafe { found.unwrap_or(param.unset()).give(buf, size_in_bytes, size_written) }
}

/// Number of tensors of a grouped tensor; 0 for NULL.
pub(crate) fn nvte_grouped_tensor_num_tensors(tensor: NVTEGroupedTensor) -> Result<usize> {
    Ok(store::read(tensor, |grouped: &GroupedTensor| grouped.num_tensors)?.unwrap_or(0))
}

/// Data type of a grouped tensor; kNVTEFloat32 for NULL.
pub(crate) fn nvte_grouped_tensor_type(tensor: NVTEGroupedTensor) -> Result<NVTEDType> {
    Ok(store::read(tensor, GroupedTensor::dtype)?.unwrap_or(kNVTEFloat32))
}

/// Scaling mode of a grouped tensor; NVTE_DELAYED_TENSOR_SCALING for NULL.
pub(crate) fn nvte_grouped_tensor_scaling_mode(tensor: NVTEGroupedTensor) -> Result<NVTEScalingMode> {
    let found = store::read(tensor, |grouped: &GroupedTensor| grouped.scaling_mode)?;
    Ok(found.unwrap_or(NVTE_DELAYED_TENSOR_SCALING))
}

/// Shape of all tensors of a grouped tensor together. Throws for NULL.
pub(crate) fn nvte_get_grouped_tensor_logical_shape(tensor: NVTEGroupedTensor) -> Result<NVTEShape> {
    store::read_live(tensor, |grouped: &GroupedTensor| grouped.logical_shape)
}
