//! From [`TensorView`] to NCCL EP's descriptors. A [`Descriptor`] owns what the C structure borrows (the sizes); NCCL EP
//! copies both during the call.

use crate::tensor::TensorView;
use nvte_ep_bindings as b;
use std::marker::PhantomData;

/// A C structure of NCCL EP that starts with its size and magic.
///
/// # Safety
/// The type is `repr(C)`, all zero bytes are a valid value of it, and `magic` names its second field's required value.
pub(crate) unsafe trait EpStruct: Sized {
    const MAGIC: u32;

    fn set_header(&mut self, size: u32, magic: u32);

    /// All defaults, with the header filled in.
    #[inline]
    fn with_header() -> Self {
        // SAFETY: the trait's contract.
        let mut value: Self = unsafe { std::mem::zeroed() };
        value.set_header(u32::try_from(size_of::<Self>()).expect("small structures"), Self::MAGIC);
        value
    }
}

macro_rules! ep_struct {
    ($($name:ident: $magic:expr;)*) => {$(
        // SAFETY: bindgen's repr(C) type; integers and nullable pointers only.
        unsafe impl EpStruct for b::$name {
            const MAGIC: u32 = $magic;

            #[inline]
            fn set_header(&mut self, size: u32, magic: u32) {
                (self.size, self.magic) = (size, magic);
            }
        }
    )*};
}

ep_struct! {
    ncclEpTensor_t: b::EP_TENSOR_MAGIC;
    ncclEpGroupConfig_t: b::EP_STRUCT_MAGIC;
    ncclEpHandleConfig_t: b::EP_STRUCT_MAGIC;
    ncclEpLayoutInfo_t: b::EP_STRUCT_MAGIC;
    ncclEpDispatchInputs_t: b::EP_STRUCT_MAGIC;
    ncclEpDispatchOutputs_t: b::EP_STRUCT_MAGIC;
    ncclEpDispatchConfig_t: b::EP_STRUCT_MAGIC;
    ncclEpCombineInputs_t: b::EP_STRUCT_MAGIC;
    ncclEpCombineOutputs_t: b::EP_STRUCT_MAGIC;
    ncclEpCombineConfig_t: b::EP_STRUCT_MAGIC;
    ncclEpCompleteConfig_t: b::EP_STRUCT_MAGIC;
}

/// One tensor for NCCL EP, of at most so many dimensions: high-throughput mode has matrices and vectors.
#[derive(Debug)]
pub(crate) struct Descriptor<const DIMS: usize = 2> {
    raw: b::ncclEpTensor_t,
    sizes: [usize; DIMS],
}

/// A tensor of low-latency mode, where received rows are three-dimensional.
pub(crate) type LlDescriptor = Descriptor<3>;

// SAFETY: addresses of device memory, and of the sizes beside them.
unsafe impl<const DIMS: usize> Send for Descriptor<DIMS> {}

/// A pointer to a descriptor's C structure, valid while the descriptor is borrowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DescriptorPtr<'a> {
    pub(crate) raw: *mut b::ncclEpTensor_t,
    borrowed: PhantomData<&'a ()>,
}

impl Descriptor {
    /// A descriptor of `view`, which the checks of `ops` let through: one or two dimensions, a type that NCCL knows.
    #[inline]
    pub(crate) fn new(view: &TensorView) -> Self {
        let (ndim, sizes) = view.shape.matrix_or_vector().expect("ops admits matrices and vectors");
        let mut raw = b::ncclEpTensor_t::with_header();
        raw.ndim = ndim;
        raw.datatype = view.dtype.nccl().expect("ops admits types that NCCL knows");
        match view.window {
            // NCCL EP takes the address from the window when data is NULL.
            Some(window) => {
                raw.win_hdl = std::ptr::with_exposed_provenance_mut(window.handle());
                raw.win_offset = window.offset;
            }
            None => raw.data = std::ptr::with_exposed_provenance_mut(view.data as usize),
        }
        Self { raw, sizes }
    }

    /// The same tensor as int64 at the address `data`.
    #[inline]
    pub(crate) fn with_int64_at(mut self, data: u64) -> Self {
        (self.raw.datatype, self.raw.win_hdl, self.raw.win_offset) = (b::ncclInt64, std::ptr::null_mut(), 0);
        self.raw.data = std::ptr::with_exposed_provenance_mut(data as usize);
        self
    }
}

impl LlDescriptor {
    /// A descriptor of `view`, by its address: a staged operation's window would be looked up in a copy that is gone by then.
    pub(crate) fn of_address(view: &TensorView) -> Self {
        let kept = view.shape.sizes();
        let mut sizes = [0; 3];
        sizes[..kept.len()].copy_from_slice(kept);
        let mut raw = b::ncclEpTensor_t::with_header();
        raw.ndim = kept.len() as u32;
        raw.datatype = view.dtype.nccl().expect("ops admits types that NCCL knows");
        raw.data = std::ptr::with_exposed_provenance_mut(view.data as usize);
        Self { raw, sizes }
    }
}

impl<const DIMS: usize> Descriptor<DIMS> {
    /// The C structure, pointing at the sizes where they lie now; the borrow keeps both in place.
    #[inline]
    pub(crate) fn bind(&mut self) -> DescriptorPtr<'_> {
        self.raw.sizes = self.sizes.as_mut_ptr();
        DescriptorPtr { raw: &raw mut self.raw, borrowed: PhantomData }
    }
}

/// The pointer of an optional descriptor; null for none.
#[inline]
pub(crate) fn bind_optional<const DIMS: usize>(descriptor: &mut Option<Descriptor<DIMS>>) -> *mut b::ncclEpTensor_t {
    descriptor.as_mut().map_or(std::ptr::null_mut(), |descriptor| descriptor.bind().raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::tensor::Window;
    use crate::tensor::tests::view;

    #[test]
    fn data_and_sizes() {
        let mut descriptor = Descriptor::new(&view("tokens", DType::BFloat16, &[5, 64]));
        let pointer = descriptor.bind();
        // SAFETY: bound just now.
        let raw = unsafe { &*pointer.raw };
        assert_eq!((raw.size, raw.magic, raw.ndim), (48, 0xCAFE_CAFE, 2));
        assert_eq!((raw.datatype, raw.data as usize), (b::ncclBfloat16, 0x1000));
        assert!(raw.win_hdl.is_null());
        // SAFETY: two sizes lie behind the pointer.
        assert_eq!(unsafe { std::slice::from_raw_parts(raw.sizes, 2) }, [5, 64]);
    }

    #[test]
    fn a_window_replaces_data() {
        let mut tensor = view("recv_tokens", DType::Float32, &[7]);
        tensor.window = Window::new(0x40, 4096);
        let mut descriptor = Descriptor::new(&tensor);
        // SAFETY: bound just now.
        let raw = unsafe { &*descriptor.bind().raw };
        assert_eq!((raw.win_hdl as usize, raw.win_offset, raw.data.is_null(), raw.ndim), (0x40, 4096, true, 1));
    }

    #[test]
    fn three_dimensions_go_by_their_address() {
        let mut tensor = view("recv_tokens", DType::Float8E4M3, &[4, 256, 512]);
        tensor.window = Window::new(0x40, 4096);
        let mut descriptor = LlDescriptor::of_address(&tensor);
        // SAFETY: bound just now.
        let raw = unsafe { &*descriptor.bind().raw };
        assert_eq!((raw.ndim, raw.data as usize, raw.win_hdl.is_null()), (3, 0x1000, true));
        // SAFETY: three sizes lie behind the pointer.
        assert_eq!(unsafe { std::slice::from_raw_parts(raw.sizes, 3) }, [4, 256, 512]);
    }

    #[test]
    fn headers() {
        let config = b::ncclEpGroupConfig_t::with_header();
        assert_eq!((config.size, config.magic, config.max_num_sms), (112, 0xC00F_FFEE, 0));
        assert_eq!(b::ncclEpDispatchConfig_t::with_header().size, 24);
    }
}
