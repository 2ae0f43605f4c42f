//! A tensor as the core sees it: data type, shape and where it lies. No C types; addresses are numbers here.
#![forbid(unsafe_code)]

use crate::dtype::DType;
use crate::error::{Error, Result};
use std::fmt;
use std::num::NonZero;

/// Most dimensions a tensor has.
pub const MAX_DIMS: usize = 15;

/// Sizes that are kept: no tensor of expert parallelism has more dimensions.
const KEPT: usize = 3;

/// A tensor's dimensions. Small, since every call copies some; of more than three dimensions only the first sizes are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    sizes: [usize; KEPT],
    /// Product of all sizes; [`TOO_MANY`] if it does not fit.
    numel: usize,
    ndim: usize,
}

/// Elements that no memory holds.
const TOO_MANY: usize = usize::MAX;

impl Shape {
    /// The shape with these sizes; none when there are more than [`MAX_DIMS`].
    #[inline(always)]
    #[must_use]
    pub fn new(sizes: &[usize]) -> Option<Self> {
        // The parts are put together once, behind the match: each in a register on its way to the caller's place.
        let ([first, second, third], numel) = match *sizes {
            [length] => ([length, 0, 0], length),
            [rows, columns] => ([rows, columns, 0], rows.checked_mul(columns).unwrap_or(TOO_MANY)),
            _ => {
                let Self { sizes, numel, .. } = Self::of_any(sizes)?;
                (sizes, numel)
            }
        };
        Some(Self { sizes: [first, second, third], numel, ndim: sizes.len() })
    }

    /// The shape of a vector.
    #[inline]
    #[must_use]
    pub const fn vector(length: usize) -> Self {
        Self { sizes: [length, 0, 0], numel: length, ndim: 1 }
    }

    #[inline(never)]
    fn of_any(sizes: &[usize]) -> Option<Self> {
        if sizes.len() > MAX_DIMS {
            return None;
        }
        let mut kept = [0; KEPT];
        kept.iter_mut().zip(sizes).for_each(|(kept, size)| *kept = *size);
        let empty = sizes.contains(&0).then_some(0);
        let numel = empty.or_else(|| sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size)));
        Some(Self { sizes: kept, numel: numel.unwrap_or(TOO_MANY), ndim: sizes.len() })
    }

    /// Number of dimensions.
    #[inline]
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.ndim
    }

    /// The sizes of a matrix or a vector; of more dimensions the first three.
    #[inline]
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.ndim().min(KEPT)]
    }

    /// Number of dimensions and sizes of a matrix or a vector, whose second size is 0 then; none of others.
    #[inline]
    #[must_use]
    pub fn matrix_or_vector(&self) -> Option<(u32, [usize; 2])> {
        let [first, second, _] = self.sizes;
        matches!(self.ndim, 1 | 2).then_some((self.ndim as u32, [first, second]))
    }

    /// Product of the sizes; none when it does not fit.
    #[inline]
    #[must_use]
    pub fn numel(&self) -> Option<usize> {
        (self.numel != TOO_MANY).then_some(self.numel)
    }

    /// Makes the first size a smaller one; of a matrix or a vector.
    #[inline]
    fn cut_first(&mut self, size: usize) {
        self.sizes[0] = size;
        self.numel = if self.ndim == 1 { size } else { size * self.sizes[1] };
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = f.debug_list();
        list.entries(self.sizes());
        if self.ndim() > KEPT { list.finish_non_exhaustive() } else { list.finish() }
    }
}

/// A place in symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// NCCL's window handle, as its address.
    handle: NonZero<usize>,
    /// Bytes from the window's start.
    pub offset: u64,
}

const _: () = assert!(size_of::<Option<Window>>() == 16, "a call copies many of them");

impl Window {
    /// The place at `offset` in the window with the handle `handle`; none for 0, which is no window.
    #[inline]
    #[must_use]
    pub const fn new(handle: usize, offset: u64) -> Option<Self> {
        match NonZero::new(handle) {
            Some(handle) => Some(Self { handle, offset }),
            None => None,
        }
    }

    /// NCCL's window handle, as its address.
    #[inline]
    #[must_use]
    pub const fn handle(self) -> usize {
        self.handle.get()
    }
}

/// The block scales of a tensor: one row of scales for each row of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scales {
    /// Data type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Shape,
    /// Address of the first element; 0 = none.
    pub data: u64,
    /// Place in symmetric memory, which then counts instead of `data`.
    pub window: Option<Window>,
}

/// A tensor that a caller passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView {
    /// Its argument's C name.
    pub name: &'static str,
    /// Data type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Shape,
    /// Address of the first element; 0 = none.
    pub data: u64,
    /// Its place in symmetric memory, which then counts instead of `data`.
    pub window: Option<Window>,
    /// Its block scales (MXFP8); none for a plain tensor.
    pub scales: Option<Scales>,
}

/// How the name of a tensor's scales ends.
const SCALES: &str = ".rowwise_scale_inv";

/// Every base address and window offset that kernels copy rows from or to (NCCL EP's bulk copies work on 16 bytes).
const ROW_ALIGNMENT: u64 = 16;

impl TensorView {
    #[cold]
    fn refuse(&self, required: impl Into<String>, found: impl fmt::Display) -> Error {
        Error::argument(self.name, required, found)
    }

    /// The sizes of a matrix.
    ///
    /// # Errors
    /// Other numbers of dimensions; `layout` names the two in the message.
    #[inline]
    pub fn matrix(&self, layout: &str) -> Result<(usize, usize)> {
        match *self.shape.sizes() {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(self.wrong_ndim(2, layout)),
        }
    }

    /// The length of a vector.
    ///
    /// # Errors
    /// Other numbers of dimensions; `layout` names the one in the message.
    #[inline]
    pub fn vector(&self, layout: &str) -> Result<usize> {
        match *self.shape.sizes() {
            [length] => Ok(length),
            _ => Err(self.wrong_ndim(1, layout)),
        }
    }

    #[cold]
    fn wrong_ndim(&self, ndim: usize, layout: &str) -> Error {
        self.refuse(format!("must be {ndim}D {layout}"), format!("{}D {:?}", self.shape.ndim(), self.shape))
    }

    /// # Errors
    /// A data type that is not among `accepted`.
    #[inline]
    pub fn require_dtype(&self, accepted: &[DType]) -> Result<()> {
        if accepted.contains(&self.dtype) {
            return Ok(());
        }
        Err(self.wrong_dtype(accepted))
    }

    #[cold]
    fn wrong_dtype(&self, accepted: &[DType]) -> Error {
        let names: Vec<_> = accepted.iter().map(DType::to_string).collect();
        self.refuse(format!("must have dtype {}", names.join(" or ")), self.dtype)
    }

    /// # Errors
    /// A data type other than that of `other`.
    #[inline]
    pub fn require_dtype_of(&self, other: &Self) -> Result<()> {
        if self.dtype == other.dtype {
            return Ok(());
        }
        Err(self.refuse(format!("must have the dtype of {}, {}", other.name, other.dtype), self.dtype))
    }

    /// The C name of a field, "window" or "offset", of the structure that gives this tensor's place in symmetric memory.
    #[must_use]
    pub fn window_field(&self, field: &str) -> String {
        match self.name.strip_suffix(SCALES) {
            Some(tensor) => format!("{tensor}_win.scale_{field}"),
            None => format!("{}_win.{field}", self.name),
        }
    }

    /// Bytes from the first element to behind the last.
    ///
    /// # Panics
    /// If they do not fit memory: `ffi::view` admits no such tensor.
    #[inline]
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.dtype.bytes(self.shape.numel().expect("a tensor's size fits memory")) as u64
    }

    /// # Errors
    /// A tensor with elements but neither data nor window, or one off a multiple of `alignment` bytes, a power of two.
    #[inline]
    pub fn require_storage(&self, alignment: u64) -> Result<()> {
        let at = self.window.map_or(self.data, |window| window.offset);
        let is_there = self.window.is_some() || self.data != 0;
        if self.shape.numel() == Some(0) || is_there && at & (alignment - 1) == 0 {
            return Ok(());
        }
        Err(self.unfit_storage(alignment))
    }

    #[cold]
    fn unfit_storage(&self, alignment: u64) -> Error {
        if let Some(window) = self.window {
            let required = format!("must be a multiple of {alignment} bytes");
            return Error::argument(self.window_field("offset"), required, window.offset);
        }
        if self.data == 0 {
            return self.refuse("must have data (only a tensor without elements may have none)", "a NULL data pointer");
        }
        let found = format!("address {:#x}", self.data);
        self.refuse(format!("must start at a multiple of {alignment} bytes"), found)
    }

    /// As [`TensorView::require_storage`] for rows that kernels copy.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn require_row_storage(&self) -> Result<()> {
        self.require_storage(ROW_ALIGNMENT)
    }

    /// As [`TensorView::require_storage`] for single elements.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn require_element_storage(&self) -> Result<()> {
        self.require_storage(self.dtype.bytes(1) as u64)
    }

    /// Cuts the tensor to its first `rows` rows.
    ///
    /// # Panics
    /// If it is no matrix or vector, or has fewer rows: callers check first.
    #[inline]
    pub fn cut_rows(&mut self, rows: usize) {
        let ([have] | [have, _]) = *self.shape.sizes() else { panic!("dimensions were checked before") };
        assert!(have >= rows, "rows were checked before");
        self.shape.cut_first(rows);
    }

    /// Part of a byte tensor.
    ///
    /// # Panics
    /// If it is no byte tensor or has fewer bytes: callers check first.
    #[must_use]
    pub fn bytes(mut self, offset: usize, length: usize) -> Self {
        assert!(self.dtype == DType::Byte, "the dtype was checked before");
        self.cut_rows(offset + length);
        self.shape.cut_first(length);
        self.data += offset as u64;
        self
    }

    /// The tensor's scales as a tensor of their own, named `name`.
    #[must_use]
    pub fn scale_tensor(&self, name: &'static str) -> Option<Self> {
        self.scales.map(|Scales { dtype, shape, data, window }| Self { name, dtype, shape, data, window, scales: None })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn view(name: &'static str, dtype: DType, sizes: &[usize]) -> TensorView {
        TensorView { name, dtype, shape: Shape::new(sizes).unwrap(), data: 0x1000, window: None, scales: None }
    }

    #[test]
    fn shapes() {
        assert_eq!(Shape::new(&[2, 3]).unwrap().numel(), Some(6));
        assert_eq!(Shape::new(&[]).unwrap().numel(), Some(1));
        assert_eq!(Shape::new(&[usize::MAX, 2]).unwrap().numel(), None);
        assert_eq!(Shape::new(&[usize::MAX, 0, 7]).unwrap().numel(), Some(0));
        assert!(Shape::new(&[1; 15]).is_some() && Shape::new(&[1; 16]).is_none());
        assert_eq!(Shape::new(&[2, 3]).unwrap().matrix_or_vector(), Some((2, [2, 3])));
        assert_eq!(Shape::vector(7).matrix_or_vector(), Some((1, [7, 0])));
        let deep = Shape::new(&[2, 3, 4, 5]).unwrap();
        assert_eq!((deep.matrix_or_vector(), Shape::new(&[]).unwrap().matrix_or_vector()), (None, None));
        assert_eq!((deep.numel(), deep.ndim(), format!("{deep:?}")), (Some(120), 4, "[2, 3, 4, ..]".into()));
    }

    #[test]
    fn a_part_of_a_byte_tensor_is_where_it_was() {
        let part = view("handle.mem", DType::Byte, &[4096]).bytes(256, 1024);
        assert_eq!((part.data, part.shape.numel(), part.byte_len()), (0x1100, Some(1024), 1024));
        let last = view("handle.mem", DType::Byte, &[4096]).bytes(3072, 1024);
        assert_eq!((last.data, last.byte_len()), (0x1C00, 1024));
    }

    #[test]
    fn texts_name_argument_rule_and_finding() {
        let recv = view("recv_tokens", DType::Float16, &[4096]);
        assert_eq!(
            recv.matrix("[recv_T, hidden_dim]").unwrap_err().to_string(),
            "recv_tokens must be 2D [recv_T, hidden_dim], got 1D [4096]"
        );
        assert_eq!(recv.vector("[n]").unwrap(), 4096);
        assert_eq!(
            recv.require_dtype_of(&view("tokens", DType::BFloat16, &[1, 1])).unwrap_err().to_string(),
            "recv_tokens must have the dtype of tokens, bfloat16, got float16"
        );
        assert_eq!(
            recv.require_dtype(&[DType::Int32, DType::Int64]).unwrap_err().to_string(),
            "recv_tokens must have dtype int32 or int64, got float16"
        );
    }

    #[test]
    fn storage() {
        let mut tensor = view("tokens", DType::BFloat16, &[2, 8]);
        tensor.require_row_storage().unwrap();
        tensor.data = 0x1008;
        assert_eq!(
            tensor.require_row_storage().unwrap_err().to_string(),
            "tokens must start at a multiple of 16 bytes, got address 0x1008"
        );
        tensor.require_element_storage().unwrap();
        tensor.data = 0;
        assert!(tensor.require_row_storage().unwrap_err().to_string().contains("NULL data pointer"));
        tensor.window = Window::new(1, 4096);
        tensor.require_row_storage().unwrap();
        tensor.window = Window::new(1, 8);
        assert_eq!(
            tensor.require_row_storage().unwrap_err().to_string(),
            "tokens_win.offset must be a multiple of 16 bytes, got 8"
        );
        assert_eq!(view("tokens", DType::Float32, &[3, 5]).byte_len(), 60);
        let scales = view("recv_tokens.rowwise_scale_inv", DType::Float8E8M0, &[2, 8]);
        assert_eq!(scales.window_field("window"), "recv_tokens_win.scale_window");
        let mut empty = view("tokens", DType::BFloat16, &[0, 8]);
        empty.data = 0;
        empty.require_row_storage().unwrap();
    }

    #[test]
    fn cut_to_rows() {
        let mut grad = view("grad", DType::Float32, &[9, 4]);
        grad.cut_rows(5);
        assert_eq!((grad.shape.sizes(), grad.byte_len()), (&[5, 4][..], 80));
    }
}
