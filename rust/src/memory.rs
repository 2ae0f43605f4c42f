//! Device memory as an argument.

use crate::dtype::{Element, Float8E8M0, Scaled, Token};
use crate::stream::Stream;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::tensor::{Scales, Shape, TensorView, Window};
use std::marker::PhantomData;

/// Device memory that calls read. Implemented for [`RawSlice`], [`SymmetricSlice`](crate::SymmetricSlice),
/// [`RegisteredSlice`](crate::RegisteredSlice) and, with the feature `cudarc`, for `CudaSlice`, `CudaView` and `CudaViewMut`.
///
/// # Safety
/// [`DeviceSlice::lend`] gives memory of [`DeviceSlice::len`] elements that stays until the work is done that is queued while
/// it is lent, and that nobody writes meanwhile.
pub unsafe trait DeviceSlice {
    /// What it holds.
    type Element: Element;

    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lends the memory to a call that queues work on `stream`, behind what was written there.
    fn lend<'a>(&'a self, stream: &Stream<'a>) -> Lent<'a>;
}

/// Device memory that calls write.
///
/// # Safety
/// As [`DeviceSlice`], and nobody else reads the memory meanwhile either.
pub unsafe trait DeviceSliceMut: DeviceSlice {
    /// Lends the memory to a call that queues writes to it on `stream`, behind all other use of it.
    fn lend_mut<'a>(&'a mut self, stream: &Stream<'a>) -> Lent<'a>;
}

/// Memory that is lent to one call, until the call has queued its work.
#[derive(Debug)]
pub struct Lent<'a> {
    pub(crate) address: u64,
    pub(crate) window: Option<Window>,
    /// Whether the stream cannot be ordered behind other use of the memory.
    pub(crate) is_unordered: bool,
    #[cfg(feature = "cudarc")]
    #[allow(dead_code, reason = "dropped once the work is queued, which records the use")]
    pub(crate) record: Option<cudarc::driver::SyncOnDrop<'a>>,
    pub(crate) borrow: PhantomData<&'a ()>,
}

impl Lent<'_> {
    /// Memory at `address` that needs no bookkeeping of its use.
    #[must_use]
    pub fn at(address: u64) -> Self {
        Self {
            address,
            window: None,
            is_unordered: false,
            #[cfg(feature = "cudarc")]
            record: None,
            borrow: PhantomData,
        }
    }

    pub(crate) fn in_window(address: u64, window: Window) -> Self {
        Self { window: Some(window), ..Self::at(address) }
    }
}

/// Device memory at an address.
#[derive(Debug)]
pub struct RawSlice<T> {
    address: u64,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> RawSlice<T> {
    /// `len` elements at `address`.
    ///
    /// # Safety
    /// For as long as this value is used, and until the work is done that was queued with it: the memory is the device's
    /// and has `len` elements, and streams that use it elsewhere are ordered with the calls' streams.
    #[must_use]
    pub const unsafe fn new(address: u64, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }

    /// Its address.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }
}

// SAFETY: the maker of the value vouches for the memory.
unsafe impl<T: Element> DeviceSlice for RawSlice<T> {
    type Element = T;

    fn len(&self) -> usize {
        self.len
    }

    fn lend<'a>(&'a self, _: &Stream<'a>) -> Lent<'a> {
        Lent::at(self.address)
    }
}

// SAFETY: as above.
unsafe impl<T: Element> DeviceSliceMut for RawSlice<T> {
    fn lend_mut<'a>(&'a mut self, _: &Stream<'a>) -> Lent<'a> {
        Lent::at(self.address)
    }
}

type Read<'a, T> = &'a (dyn DeviceSlice<Element = T> + 'a);
type Written<'a, T> = &'a mut (dyn DeviceSliceMut<Element = T> + 'a);

/// Token rows that a call reads: `[rows, hidden]`.
#[derive(Clone, Copy)]
pub struct Rows<'a, T> {
    values: Read<'a, T>,
    hidden: usize,
    scales: Option<Read<'a, Float8E8M0>>,
}

impl<'a, T: Token> Rows<'a, T> {
    /// All of `values`, in rows of `hidden` elements.
    #[must_use]
    pub fn new(values: &'a (impl DeviceSlice<Element = T> + 'a), hidden: usize) -> Self {
        Self { values, hidden, scales: None }
    }

    /// The rows with a scale for each 32 values: MXFP8.
    #[must_use]
    pub fn with_scales(self, scales: &'a (impl DeviceSlice<Element = Float8E8M0> + 'a)) -> Self
    where
        T: Scaled,
    {
        Self { scales: Some(scales), ..self }
    }

    pub(crate) fn view(&self, name: &'static str, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<TensorView> {
        let mut view = uses.matrix(name, T::DTYPE, self.values.lend(stream), self.values.len(), self.hidden)?;
        if let Some(scales) = self.scales {
            let (lent, len) = (scales.lend(stream), scales.len());
            view.scales = Some(uses.scales(name, lent, len, self.hidden)?);
        }
        Ok(view)
    }
}

/// Token rows that a call writes: `[rows, hidden]`.
pub struct RowsMut<'a, T> {
    values: Written<'a, T>,
    hidden: usize,
    scales: Option<Written<'a, Float8E8M0>>,
}

impl<'a, T: Token> RowsMut<'a, T> {
    /// All of `values`, in rows of `hidden` elements.
    #[must_use]
    pub fn new(values: &'a mut (impl DeviceSliceMut<Element = T> + 'a), hidden: usize) -> Self {
        Self { values, hidden, scales: None }
    }

    /// The rows with a scale for each 32 values: MXFP8.
    #[must_use]
    pub fn with_scales(self, scales: &'a mut (impl DeviceSliceMut<Element = Float8E8M0> + 'a)) -> Self
    where
        T: Scaled,
    {
        Self { scales: Some(scales), ..self }
    }

    pub(crate) fn view(self, name: &'static str, stream: &Stream<'a>, uses: &mut Uses<'a>) -> Result<TensorView> {
        let len = self.values.len();
        let mut view = uses.matrix(name, T::DTYPE, self.values.lend_mut(stream), len, self.hidden)?;
        if let Some(scales) = self.scales {
            let len = scales.len();
            view.scales = Some(uses.scales(name, scales.lend_mut(stream), len, self.hidden)?);
        }
        Ok(view)
    }
}

impl<T> std::fmt::Debug for Rows<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("hidden", &self.hidden).finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for RowsMut<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RowsMut").field("hidden", &self.hidden).finish_non_exhaustive()
    }
}

/// Most arguments of one call, scales counted.
const MOST: usize = 10;

/// What one call has been lent. It is dropped once the call's work is queued.
pub(crate) struct Uses<'a> {
    lent: [Option<Lent<'a>>; MOST],
    count: usize,
}

impl<'a> Uses<'a> {
    pub(crate) fn new() -> Self {
        Self { lent: [const { None }; MOST], count: 0 }
    }

    fn keep(&mut self, name: &'static str, lent: Lent<'a>) -> Result<(u64, Option<Window>)> {
        if lent.is_unordered {
            let required = "must be a stream of cudarc";
            return Err(Error::argument("stream", required, "another one")
                .with_remedy(format!("{name} is memory of cudarc, which orders its use by its own streams")));
        }
        let place = (lent.address, lent.window);
        self.lent[self.count] = Some(lent);
        self.count += 1;
        Ok(place)
    }

    /// A vector of all elements.
    pub(crate) fn vector<T: Element>(&mut self, name: &'static str, lent: Lent<'a>, len: usize) -> Result<TensorView> {
        let (data, window) = self.keep(name, lent)?;
        Ok(TensorView { name, dtype: T::DTYPE, shape: Shape::vector(len), data, window, scales: None })
    }

    /// All elements in rows of `columns`.
    pub(crate) fn matrix(
        &mut self,
        name: &'static str,
        dtype: nvte_ep_core::dtype::DType,
        lent: Lent<'a>,
        len: usize,
        columns: usize,
    ) -> Result<TensorView> {
        let (data, window) = self.keep(name, lent)?;
        let shape = in_rows(name, len, columns)?;
        Ok(TensorView { name, dtype, shape, data, window, scales: None })
    }

    fn scales(&mut self, name: &'static str, lent: Lent<'a>, len: usize, hidden: usize) -> Result<Scales> {
        let (data, window) = self.keep(name, lent)?;
        // A width that is no multiple of the block is refused with the rows.
        let shape = in_rows(name, len, (hidden / 32).max(1))?;
        Ok(Scales { dtype: Float8E8M0::DTYPE, shape, data, window })
    }
}

#[inline]
fn in_rows(name: &'static str, len: usize, columns: usize) -> Result<Shape> {
    if columns == 0 {
        return Err(Error::argument(name, "must have rows of one element or more", columns));
    }
    if !len.is_multiple_of(columns) {
        return Err(Error::argument(name, format!("must hold whole rows of {columns} elements"), len));
    }
    Ok(Shape::new(&[len / columns, columns]).expect("two dimensions"))
}

/// A tensor whose memory is not used.
pub(crate) fn shape_only(
    name: &'static str,
    dtype: nvte_ep_core::dtype::DType,
    len: usize,
    columns: usize,
) -> Result<TensorView> {
    Ok(TensorView { name, dtype, shape: in_rows(name, len, columns)?, data: 0, window: None, scales: None })
}
