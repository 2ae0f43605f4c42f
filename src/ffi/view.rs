//! From an NVTETensor to a [`TensorView`].

use super::types::{
    NVTE_BLOCK_SCALING_1D, NVTE_DELAYED_TENSOR_SCALING, NVTE_MXFP8_1D_SCALING, NVTEBasicTensor, NVTEDType,
    NVTEScalingMode, NVTEShape, NVTETensor,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{MAX_DIMS, Scales, Shape, TensorView, Window};

/// One array of a tensor, where its maker keeps it.
#[derive(Debug, Clone, Copy)]
pub struct ArrayRef<'a> {
    /// Address of the first element.
    pub data: u64,
    /// Data type, as callers gave it.
    pub dtype: NVTEDType,
    /// Sizes, as callers gave them.
    pub shape: &'a NVTEShape,
}

impl<'a> From<&'a NVTEBasicTensor> for ArrayRef<'a> {
    fn from(basic: &'a NVTEBasicTensor) -> Self {
        Self { data: basic.data_ptr.expose_provenance() as u64, dtype: basic.dtype, shape: &basic.shape }
    }
}

/// What an NVTETensor holds, as far as expert parallelism reads it.
#[derive(Debug, Clone, Copy)]
pub struct TensorParts<'a> {
    /// Its row-wise data.
    pub data: ArrayRef<'a>,
    /// The inverse scales of its row-wise data.
    pub scale_inv: ArrayRef<'a>,
    /// How it is scaled.
    pub scaling_mode: NVTEScalingMode,
}

/// Whoever made the tensors that callers pass, opened for the reads of one call. It may hold a lock of that library:
/// nothing else is called before it is dropped.
pub trait TensorReader {
    /// What `look` makes of the parts of `tensor`; none for the null tensor.
    ///
    /// # Errors
    /// A value that is no live tensor.
    fn read<L: Look>(&self, tensor: NVTETensor, look: L) -> Result<Option<L::Seen>>;
}

/// A look at a tensor's parts. No closure, since those cannot ask to be inlined, which this is all about: a view is large.
pub trait Look {
    /// What it makes of them.
    type Seen;
    /// Looks.
    fn look(self, parts: &TensorParts<'_>) -> Self::Seen;
}

/// The view of an argument.
struct View {
    name: &'static str,
    windows: Windows,
}

impl Look for View {
    type Seen = Result<TensorView>;

    #[inline(always)]
    fn look(self, parts: &TensorParts<'_>) -> Self::Seen {
        view(self.name, parts, self.windows)
    }
}

/// The view of an argument whose rows may have a scale for each 128 values too.
struct QuantizedView(&'static str);

impl Look for QuantizedView {
    type Seen = Result<TensorView>;

    fn look(self, parts: &TensorParts<'_>) -> Self::Seen {
        let Self(name) = self;
        if parts.scaling_mode != NVTE_BLOCK_SCALING_1D {
            return view(name, parts, Windows::default());
        }
        let Some((dtype, shape)) = array(&parts.data) else { return Err(malformed(name, "", &parts.data)) };
        let scales = Some(scale_array(name, parts, None)?);
        Ok(TensorView { name, dtype, shape, data: parts.data.data, window: None, scales })
    }
}

/// The view of an argument that may be left out; none for a tensor that nothing was put into.
struct OptionalView(View);

impl Look for OptionalView {
    type Seen = Option<Result<TensorView>>;

    #[inline(always)]
    fn look(self, parts: &TensorParts<'_>) -> Self::Seen {
        let is_there = !is_blank(&parts.data) || self.0.windows.data.is_some();
        if is_there { Some(self.0.look(parts)) } else { None }
    }
}

/// Where an argument's data and scales lie in symmetric memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Windows {
    /// The data's window.
    pub data: Option<Window>,
    /// The scales' window.
    pub scales: Option<Window>,
}

/// The tensor of argument `name`, which may not be null.
///
/// # Errors
/// A null, stale or malformed tensor.
#[inline(always)]
pub fn required(
    reader: &impl TensorReader,
    name: &'static str,
    tensor: NVTETensor,
    windows: Windows,
) -> Result<TensorView> {
    match reader.read(tensor, View { name, windows }) {
        Ok(Some(view)) => view,
        Ok(None) => Err(null(name)),
        Err(error) => Err(for_argument(name, error)),
    }
}

/// As [`required`], and the tensor may have a scale for each 128 values of a row (`NVTE_BLOCK_SCALING_1D`).
///
/// # Errors
/// As there.
pub fn required_quantized(reader: &impl TensorReader, name: &'static str, tensor: NVTETensor) -> Result<TensorView> {
    match reader.read(tensor, QuantizedView(name)) {
        Ok(Some(view)) => view,
        Ok(None) => Err(null(name)),
        Err(error) => Err(for_argument(name, error)),
    }
}

/// The tensor of argument `name`; none for the null tensor and for one that nothing was put into.
///
/// # Errors
/// A stale or malformed tensor.
#[inline(always)]
pub fn optional(
    reader: &impl TensorReader,
    name: &'static str,
    tensor: NVTETensor,
    windows: Windows,
) -> Result<Option<TensorView>> {
    match reader.read(tensor, OptionalView(View { name, windows })) {
        Ok(Some(Some(Ok(view)))) => Ok(Some(view)),
        Ok(Some(Some(Err(error)))) => Err(error),
        Ok(Some(None) | None) => Ok(None),
        Err(error) => Err(for_argument(name, error)),
    }
}

#[cold]
fn null(name: &str) -> Error {
    Error::argument(name, "must be a tensor", "a null tensor")
}

#[cold]
fn for_argument(name: &str, error: Error) -> Error {
    match error {
        Error::Argument { required, found, .. } => Error::argument(name, required, found),
        other => other,
    }
}

/// What a tensor is that was created and never set: no data, one dimension of size 0.
#[inline]
fn is_blank(data: &ArrayRef<'_>) -> bool {
    data.data == 0 && data.shape.ndim <= 1 && data.shape.data[0] == 0
}

#[inline(always)]
fn view(name: &'static str, parts: &TensorParts<'_>, windows: Windows) -> Result<TensorView> {
    let Some((dtype, shape)) = array(&parts.data) else { return Err(malformed(name, "", &parts.data)) };
    let scales = match parts.scaling_mode {
        NVTE_DELAYED_TENSOR_SCALING => None,
        _ => Some(scales(name, parts, windows)?),
    };
    Ok(TensorView { name, dtype, shape, data: parts.data.data, window: windows.data, scales })
}

/// The scales of a tensor that is not unscaled.
#[inline(never)]
fn scales(name: &str, parts: &TensorParts<'_>, windows: Windows) -> Result<Scales> {
    if parts.scaling_mode != NVTE_MXFP8_1D_SCALING {
        let required = "must be unscaled or MXFP8 (NVTE_DELAYED_TENSOR_SCALING or NVTE_MXFP8_1D_SCALING)";
        return Err(Error::argument(name, required, format!("scaling mode {}", parts.scaling_mode)));
    }
    scale_array(name, parts, windows.scales)
}

/// The array of a tensor's scales.
fn scale_array(name: &str, parts: &TensorParts<'_>, window: Option<Window>) -> Result<Scales> {
    let array = &parts.scale_inv;
    let Some((dtype, shape)) = self::array(array) else { return Err(malformed(name, " rowwise_scale_inv", array)) };
    Ok(Scales { dtype, shape, data: array.data, window })
}

/// Type and shape of a well-formed array.
#[inline(always)]
fn array(array: &ArrayRef<'_>) -> Option<(DType, Shape)> {
    let dtype = DType::from_nvte(array.dtype)?;
    let shape = Shape::new(array.shape.data.get(..array.shape.ndim)?)?;
    shape.numel()?.checked_mul(dtype.bits())?;
    Some((dtype, shape))
}

/// What is wrong with an array that [`array`] does not take.
#[cold]
fn malformed(name: &str, part: &str, array: &ArrayRef<'_>) -> Error {
    let ArrayRef { dtype, shape, .. } = *array;
    let refuse = |required: String, found: String| Error::argument(format!("{name}{part}"), required, found);
    if DType::from_nvte(dtype).is_none() {
        return refuse("must have an NVTEDType as its dtype".into(), dtype.to_string());
    }
    match shape.data.get(..shape.ndim).and_then(Shape::new) {
        None => refuse(format!("must have at most {MAX_DIMS} dimensions"), shape.ndim.to_string()),
        Some(sizes) => refuse("must have a size that fits memory".into(), format!("{sizes:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::types::kNVTEBFloat16;

    struct One(Owned);

    struct Owned {
        data: NVTEBasicTensor,
        scale_inv: NVTEBasicTensor,
        scaling_mode: NVTEScalingMode,
    }

    impl TensorReader for One {
        fn read<L: Look>(&self, tensor: NVTETensor, look: L) -> Result<Option<L::Seen>> {
            let Owned { data, scale_inv, scaling_mode } = &self.0;
            match tensor as usize {
                0 => Ok(None),
                1 => Ok(Some(look.look(&TensorParts {
                    data: data.into(),
                    scale_inv: scale_inv.into(),
                    scaling_mode: *scaling_mode,
                }))),
                other => Err(Error::argument("tensor", "must be a live tensor", other)),
            }
        }
    }

    fn tensor(sizes: &[usize], ndim: usize) -> One {
        let mut shape = NVTEShape { data: [0; 15], ndim };
        shape.data[..sizes.len()].copy_from_slice(sizes);
        let data_ptr = std::ptr::without_provenance_mut(0x40);
        let data = NVTEBasicTensor { data_ptr, dtype: kNVTEBFloat16, shape };
        One(Owned { data, scale_inv: data, scaling_mode: 0 })
    }

    fn raw(value: usize) -> NVTETensor {
        std::ptr::without_provenance_mut(value)
    }

    #[test]
    fn parts_become_a_view() {
        let view = required(&tensor(&[3, 8], 2), "tokens", raw(1), Windows::default()).unwrap();
        assert_eq!(
            (view.name, view.dtype, view.shape.sizes(), view.data),
            ("tokens", DType::BFloat16, &[3, 8][..], 0x40)
        );
    }

    #[test]
    fn mxfp8_brings_its_scales() {
        let mut one = tensor(&[3, 512], 2);
        one.0.scaling_mode = 1;
        one.0.scale_inv = tensor(&[3, 16], 2).0.data;
        let window = Window::new(7, 64).unwrap();
        let windows = Windows { data: None, scales: Some(window) };
        let scales = required(&one, "tokens", raw(1), windows).unwrap().scales.unwrap();
        assert_eq!((scales.shape.sizes(), scales.window), (&[3, 16][..], Some(window)));
    }

    #[test]
    fn quantized_rows_bring_their_scales_where_they_may() {
        let mut one = tensor(&[2, 3, 512], 3);
        one.0.scaling_mode = 2;
        one.0.scale_inv = tensor(&[2, 3, 4], 3).0.data;
        let scales = required_quantized(&one, "recv_tokens", raw(1)).unwrap().scales.unwrap();
        assert_eq!(scales.shape.sizes(), &[2, 3, 4][..]);
        let text = required(&one, "tokens", raw(1), Windows::default()).unwrap_err().to_string();
        assert!(text.ends_with("got scaling mode 2"), "{text}");
        assert!(required_quantized(&tensor(&[3], 1), "recv_tokens", raw(1)).unwrap().scales.is_none());
    }

    #[test]
    fn null_and_blank_tensors() {
        let text = required(&tensor(&[3], 1), "tokens", raw(0), Windows::default()).unwrap_err().to_string();
        assert_eq!(text, "tokens must be a tensor, got a null tensor");
        assert_eq!(optional(&tensor(&[3], 1), "topk_weights", raw(0), Windows::default()).unwrap(), None);
        let mut blank = tensor(&[0], 1);
        blank.0.data.data_ptr = std::ptr::null_mut();
        assert_eq!(optional(&blank, "topk_weights", raw(1), Windows::default()).unwrap(), None);
        assert!(optional(&tensor(&[0, 8], 2), "topk_weights", raw(1), Windows::default()).unwrap().is_some());
    }

    #[test]
    fn malformed_tensors_are_refused_under_the_arguments_name() {
        let refused = |one: One, value| required(&one, "grad", raw(value), Windows::default()).unwrap_err().to_string();
        assert_eq!(refused(tensor(&[3], 1), 9), "grad must be a live tensor, got 9");
        assert_eq!(refused(tensor(&[3], 16), 1), "grad must have at most 15 dimensions, got 16");
        assert!(refused(tensor(&[usize::MAX, 2], 2), 1).starts_with("grad must have a size that fits memory"));
        let mut one = tensor(&[3], 1);
        one.0.data.dtype = 11;
        assert_eq!(refused(one, 1), "grad must have an NVTEDType as its dtype, got 11");
        let mut one = tensor(&[3], 1);
        one.0.scaling_mode = 4;
        assert!(refused(one, 1).ends_with("NVTE_MXFP8_1D_SCALING), got scaling mode 4"));
        let mut one = tensor(&[3], 1);
        one.0.scaling_mode = 1;
        one.0.scale_inv.dtype = -1;
        assert_eq!(refused(one, 1), "grad rowwise_scale_inv must have an NVTEDType as its dtype, got -1");
    }
}
