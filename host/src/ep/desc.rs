//! Reading the caller's structures: the header rule and tensor descriptors, each checked in one place.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of;
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::comm::Comm;
use crate::dtype;
use crate::fault::{Fault, Outcome};
use crate::memory::Span;
use crate::rule::Rule;
use crate::tensor_check;
use crate::windows::Window;

/// `magic` of a descriptor from `ncclEpTensorAlloc`.
const ALLOCATED_MAGIC: u32 = 0xBEEF_BEEF;
/// NCCL EP moves rows in pieces of this size.
pub const ROW_GRANULE: usize = 16;
/// No tensor of this library has more dimensions.
const MAX_DIMENSIONS: u32 = 8;

/// An error for an argument that breaks a rule.
pub fn invalid(text: impl Into<String>) -> Fault {
    Fault::nccl(ncclInvalidArgument, text).breaks(Rule::ArgumentValue)
}

/// The same about a named argument, for what went wrong further down.
fn about(name: &str, fault: Fault) -> Fault {
    Fault { rule: fault.rule, ..invalid(format!("{name}: {}", fault.text)) }
}

/// Whether a pass is the forward one.
pub fn is_forward(direction: ncclEpPassDir_t, function: &str) -> Outcome<bool> {
    match direction {
        NCCL_EP_FWD_PASS => Ok(true),
        NCCL_EP_BWD_PASS => Ok(false),
        other => Err(invalid(format!("{function}: pass_direction {other} is unknown"))),
    }
}

/// Fails for a recipe that combine does not have here.
pub fn check_combine_recipe(recipe: ncclEpCombQuant_t, function: &str) -> Outcome<()> {
    match recipe {
        NCCL_EP_COMB_QUANT_NONE => Ok(()),
        NCCL_EP_COMB_QUANT_NVFP4 => {
            let text =
                format!("{function}: quant_recipe NVFP4 needs compute capability 10.0, the host runtime has 9.0");
            Err(Fault::nccl(ncclInvalidUsage, text))
        }
        other => Err(invalid(format!("{function}: quant_recipe {other} is unknown"))),
    }
}

/// A structure that starts with `size` and `magic`.
///
/// # Safety
///
/// The type must be plain data for which any bytes are a valid value, and start with two 32-bit words.
pub unsafe trait Versioned: Copy {
    /// Smallest size that callers of the first version pass.
    const FIRST_SIZE: usize;
    /// C name.
    const NAME: &'static str;
    /// All fields zero.
    fn defaults() -> Self;
}

macro_rules! versioned {
    ($($t:ty = $size:expr;)*) => {$(
        // SAFETY: a C structure of integers and raw pointers that starts with size and magic (nccl_ep.h).
        unsafe impl Versioned for $t {
            const FIRST_SIZE: usize = $size;
            const NAME: &'static str = stringify!($t);
            fn defaults() -> Self {
                <$t>::default()
            }
        }
    )*};
}
versioned! {
    ncclEpTensorAllocConfig_t = 8;
    ncclEpGroupConfig_t = 96;
    ncclEpLayoutInfo_t = 40;
    ncclEpDispatchInputs_t = 32;
    ncclEpDispatchOutputs_t = 40;
    ncclEpCombineInputs_t = 24;
    ncclEpCombineOutputs_t = 24;
    ncclEpHandleConfig_t = 16;
    ncclEpDispatchConfig_t = 20;
    ncclEpCombineConfig_t = 16;
    ncclEpCompleteConfig_t = 8;
}

/// Reads a structure: shorter ones get zero for what they lack, longer ones are cut.
///
/// # Safety
///
/// `pointer` is null or points to a structure as long as its `size` field says.
pub unsafe fn read_struct<T: Versioned>(pointer: *const T, function: &str) -> Outcome<T> {
    if pointer.is_null() {
        return Err(invalid(format!("{function}: {} is null", T::NAME)));
    }
    // SAFETY: every such structure starts with two words, which the caller has set.
    let [size, magic] = unsafe { pointer.cast::<[u32; 2]>().read_unaligned() };
    let size = size as usize;
    if size < T::FIRST_SIZE {
        let text = format!("{function}: {}.size is {size}, at least {} is needed", T::NAME, T::FIRST_SIZE);
        return Err(invalid(text));
    }
    if magic != EP_STRUCT_MAGIC {
        let text = format!("{function}: {}.magic is {magic:#x}, not {EP_STRUCT_MAGIC:#x}", T::NAME);
        return Err(invalid(text));
    }
    let mut value = T::defaults();
    let bytes = size.min(size_of::<T>());
    // SAFETY: the caller's structure has `size` bytes, and Versioned promises that any bytes are a value.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast::<u8>(), bytes) };
    Ok(value)
}

/// Reads a structure that may be left out.
///
/// # Safety
///
/// As [`read_struct`].
pub unsafe fn read_optional<T: Versioned>(pointer: *const T, function: &str) -> Outcome<Option<T>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on to the caller.
    unsafe { read_struct(pointer, function) }.map(Some)
}

/// A tensor argument, copied out of its descriptor at the call.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// For messages: function and argument.
    pub name: String,
    /// Element type.
    pub datatype: ncclDataType_t,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The memory; empty for an empty tensor.
    pub span: Span,
    /// Whether `data` was given, rather than only a window.
    pub has_data: bool,
    /// The window and the offset in it, where the descriptor names one.
    pub window: Option<(usize, u64)>,
}

/// Where a tensor lies on every rank.
#[derive(Clone, Debug)]
pub struct SymmetricAddress {
    window: Arc<Window>,
    offset: usize,
    number: u64,
}

impl SymmetricAddress {
    /// The memory of a rank from the tensor's start to the window's end.
    pub fn on(&self, rank: usize) -> Outcome<Span> {
        self.window.check_registered()?;
        self.window.part(rank, self.offset)
    }
}

impl std::fmt::Display for SymmetricAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "window {} + {}", self.number, self.offset)
    }
}

/// Descriptors from `ncclEpTensorAlloc`: address, and address of the sizes it was made with.
static ALLOCATED: LazyLock<Mutex<HashMap<usize, Allocated>>> = LazyLock::new(Mutex::default);

struct Allocated {
    descriptor: Box<ncclEpTensor_t>,
    sizes: Box<[usize]>,
}

// SAFETY: the boxes own plain data; the raw pointers inside are the caller's and are not followed here.
unsafe impl Send for Allocated {}

/// `ncclEpTensorAlloc`: a descriptor without memory.
///
/// # Safety
///
/// `sizes` is null or holds `dimensions` values.
pub unsafe fn allocate(dimensions: u32, datatype: ncclDataType_t, sizes: *const usize) -> Outcome<*mut ncclEpTensor_t> {
    if sizes.is_null() || dimensions == 0 || dimensions > MAX_DIMENSIONS {
        return Err(invalid(format!("ncclEpTensorAlloc: {dimensions} dimensions at {sizes:p}")));
    }
    // SAFETY: the caller vouches for the array.
    let mut sizes: Box<[usize]> = unsafe { std::slice::from_raw_parts(sizes, dimensions as usize) }.into();
    let mut descriptor = Box::new(ncclEpTensor_t {
        size: size_of::<ncclEpTensor_t>() as u32,
        magic: ALLOCATED_MAGIC,
        ndim: dimensions,
        datatype,
        sizes: sizes.as_mut_ptr(),
        ..Default::default()
    });
    let pointer = &raw mut *descriptor;
    ALLOCATED.lock().insert(pointer as usize, Allocated { descriptor, sizes });
    Ok(pointer)
}

/// `ncclEpTensorDestroy`.
pub fn free(tensor: *mut ncclEpTensor_t) -> Outcome<()> {
    if tensor.is_null() {
        return Ok(());
    }
    let mut allocated = ALLOCATED.lock();
    match allocated.get(&(tensor as usize)) {
        None => Err(invalid(format!("ncclEpTensorDestroy: {tensor:p} did not come from ncclEpTensorAlloc"))),
        Some(entry) if entry.descriptor.sizes.cast_const() != entry.sizes.as_ptr() => {
            Err(invalid("ncclEpTensorDestroy: the descriptor's sizes pointer was overwritten"))
        }
        Some(_) => {
            allocated.remove(&(tensor as usize));
            Ok(())
        }
    }
}

impl Tensor {
    /// Reads a descriptor; `None` for a null pointer.
    ///
    /// # Safety
    ///
    /// `pointer` is null or points to a descriptor whose sizes and memory are as it says until the operation ends.
    pub unsafe fn read(
        pointer: *const ncclEpTensor_t,
        comm: &Comm,
        function: &str,
        argument: &str,
    ) -> Outcome<Option<Self>> {
        if pointer.is_null() {
            return Ok(None);
        }
        let name = format!("{function}: {argument}");
        // SAFETY: a descriptor starts with size and magic, and the caller vouches for it.
        let [size, magic] = unsafe { pointer.cast::<[u32; 2]>().read() };
        if (size as usize) < size_of::<ncclEpTensor_t>() {
            return Err(invalid(format!("{name}: descriptor size {size}, at least 48 is needed")));
        }
        if magic != EP_TENSOR_MAGIC && magic != ALLOCATED_MAGIC {
            return Err(invalid(format!("{name}: descriptor magic is {magic:#x}, not {EP_TENSOR_MAGIC:#x}")));
        }
        // SAFETY: the size says that a whole descriptor is there.
        let descriptor = unsafe { pointer.read() };
        if magic == ALLOCATED_MAGIC {
            let allocated = ALLOCATED.lock();
            let original = allocated.get(&(pointer as usize)).map(|entry| entry.sizes.as_ptr());
            if original.is_some_and(|sizes| sizes != descriptor.sizes.cast_const()) {
                return Err(invalid(format!("{name}: the descriptor's sizes pointer was overwritten")));
            }
        }
        let dimensions = descriptor.ndim;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS || descriptor.sizes.is_null() {
            return Err(invalid(format!("{name}: {dimensions} dimensions at {:p}", descriptor.sizes)));
        }
        // SAFETY: the caller vouches that sizes holds ndim values.
        let shape = unsafe { std::slice::from_raw_parts(descriptor.sizes, dimensions as usize) }.to_vec();
        let element = dtype::ep_size_of(descriptor.datatype)
            .ok_or_else(|| invalid(format!("{name}: unknown data type {}", descriptor.datatype)))?;
        let bytes = shape
            .iter()
            .try_fold(element, |bytes, dimension| bytes.checked_mul(*dimension))
            .ok_or_else(|| invalid(format!("{name}: shape {shape:?} is too large")))?;
        let data: *mut c_void = if bytes == 0 || !descriptor.data.is_null() {
            descriptor.data
        } else if !descriptor.win_hdl.is_null() {
            comm.windows
                .address(descriptor.win_hdl, descriptor.win_offset, bytes)
                .map_err(|fault| about(&name, fault))?
        } else {
            return Err(invalid(format!("{name}: neither data nor a window is given for shape {shape:?}")));
        };
        if bytes > 0 && !(data as usize).is_multiple_of(element) {
            let text = format!("{name}: {data:p} is not aligned to its element size {element}");
            return Err(invalid(text).breaks(Rule::Alignment));
        }
        // SAFETY: the caller vouches for the memory that the descriptor names.
        let span = unsafe { Span::new(data, bytes) }.map_err(|f| about(&name, f.breaks(Rule::MemoryBounds)))?;
        tensor_check::tensor_memory(&name, &span, comm.device.ordinal)?;
        let has_data = !descriptor.data.is_null();
        let window = (!descriptor.win_hdl.is_null()).then_some((descriptor.win_hdl as usize, descriptor.win_offset));
        Ok(Some(Self { name, datatype: descriptor.datatype, shape, span, has_data, window }))
    }

    /// As [`Tensor::read`], and a null pointer is an error.
    ///
    /// # Safety
    ///
    /// As [`Tensor::read`].
    pub unsafe fn require(
        pointer: *const ncclEpTensor_t,
        comm: &Comm,
        function: &str,
        argument: &str,
    ) -> Outcome<Self> {
        // SAFETY: passed on to the caller.
        unsafe { Self::read(pointer, comm, function, argument) }?
            .ok_or_else(|| invalid(format!("{function}: {argument} is missing")))
    }

    /// An error about this tensor.
    pub fn wrong(&self, what: impl std::fmt::Display) -> Fault {
        invalid(format!("{} {what}, got {}", self.name, self.describe())).breaks(Rule::TensorShape)
    }

    /// Type and shape, for messages.
    pub fn describe(&self) -> String {
        format!("{} {:?}", dtype::name(self.datatype), self.shape)
    }

    /// Fails unless the dimensions are these.
    pub fn expect_shape(&self, shape: &[usize]) -> Outcome<()> {
        if self.shape == shape { Ok(()) } else { Err(self.wrong(format!("must be {shape:?}"))) }
    }

    /// Fails for more rows than a rank may dispatch.
    pub fn expect_most_rows(&self, most: usize) -> Outcome<()> {
        if self.shape[0] <= most {
            return Ok(());
        }
        let text = format!("has more than max_dispatch_tokens_per_rank = {most} rows");
        Err(self.wrong(text).breaks(Rule::RowLimit))
    }

    /// Whether a dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Fails unless the memory, and the offset in a window, are aligned for the copies of NCCL EP.
    pub fn expect_granule(&self) -> Outcome<()> {
        let offset = self.window.map_or(0, |(_, offset)| offset);
        let granule = ROW_GRANULE as u64;
        let aligned = (self.span.address() as u64).is_multiple_of(granule) && offset.is_multiple_of(granule);
        if !aligned && !self.is_empty() {
            let text = format!("must start at a multiple of {ROW_GRANULE} bytes, in memory and in its window");
            return Err(self.wrong(text).breaks(Rule::Alignment));
        }
        Ok(())
    }

    /// Bytes of a row of a matrix, which must be a positive multiple of 16.
    pub fn row_bytes(&self) -> Outcome<usize> {
        let (_, columns) = self.matrix()?;
        let row_bytes = columns * dtype::ep_size_of(self.datatype).unwrap_or(0);
        if row_bytes == 0 || !row_bytes.is_multiple_of(ROW_GRANULE) {
            return Err(self.wrong(format!("must have rows of a positive multiple of {ROW_GRANULE} bytes")));
        }
        Ok(row_bytes)
    }

    /// The window that holds the tensor, on every rank at the same offset, as zero copy needs it.
    pub fn expect_window(&self, comm: &Comm) -> Outcome<SymmetricAddress> {
        let Some((handle, offset)) = self.window else {
            return Err(self.wrong("must lie in a window, as the group's zero_copy is ON").breaks(Rule::WindowMissing));
        };
        let about = |fault| about(&self.name, fault);
        let window = comm.windows.get(handle).map_err(about)?;
        let number = window.number().ok_or_else(|| {
            self.wrong("lies in a window that was registered without NCCL_WIN_COLL_SYMMETRIC, out of the peers' reach")
                .breaks(Rule::WindowMissing)
        })?;
        let address = comm.windows.address(handle as ncclWindow_t, offset, self.span.byte_len()).map_err(about)?;
        if !self.is_empty() && self.span.address() != address as usize {
            let text = format!("has data at {:#x}, but its window offset is {address:p}", self.span.address());
            return Err(self.wrong(text).breaks(Rule::WindowBounds));
        }
        Ok(SymmetricAddress { window, offset: offset as usize, number })
    }

    /// The two dimensions of a matrix.
    pub fn matrix(&self) -> Outcome<(usize, usize)> {
        match *self.shape {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(self.wrong("must be 2D")),
        }
    }

    /// The length of a vector.
    pub fn vector(&self) -> Outcome<usize> {
        match *self.shape {
            [length] => Ok(length),
            _ => Err(self.wrong("must be 1D")),
        }
    }

    /// Fails unless the elements are FP32.
    pub fn expect_float(&self) -> Outcome<()> {
        if self.datatype == ncclFloat32 { Ok(()) } else { Err(self.wrong("must be float32")) }
    }

    /// Width in bytes of an int32 or int64 tensor.
    pub fn index_width(&self) -> Outcome<usize> {
        match self.datatype {
            ncclInt32 => Ok(4),
            ncclInt64 => Ok(8),
            _ => Err(self.wrong("must be int32 or int64")),
        }
    }
}
