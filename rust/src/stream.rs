//! Streams.

use nvte_ep_core::sys::cuda::Stream as Raw;
use std::ffi::c_void;
use std::marker::PhantomData;

/// A CUDA stream of the group's device, on which calls queue their work.
#[derive(Debug, Clone, Copy)]
pub struct Stream<'s> {
    pub(crate) raw: Raw,
    #[cfg(feature = "cudarc")]
    pub(crate) tracked: Option<&'s cudarc::driver::CudaStream>,
    borrow: PhantomData<&'s ()>,
}

impl Stream<'static> {
    /// The legacy default stream of the current device.
    // SAFETY: it always lives; calls hold what they lend until the work is done.
    pub const DEFAULT: Self = Self::of(unsafe { Raw::bind(0) });

    const fn of(raw: Raw) -> Self {
        Self {
            raw,
            #[cfg(feature = "cudarc")]
            tracked: None,
            borrow: PhantomData,
        }
    }

    /// A `cudaStream_t` or `CUstream`. Memory of cudarc wants cudarc's streams.
    ///
    /// # Safety
    /// The stream lives as long as it is used.
    #[must_use]
    pub unsafe fn from_raw(stream: *mut c_void) -> Self {
        // SAFETY: the caller promises that it lives; calls hold what they lend until the work is done.
        Self::of(unsafe { Raw::bind(stream.expose_provenance()) })
    }
}

#[cfg(feature = "cudarc")]
impl<'s> From<&'s cudarc::driver::CudaStream> for Stream<'s> {
    fn from(stream: &'s cudarc::driver::CudaStream) -> Self {
        // SAFETY: it is borrowed; calls hold what they lend until the work is done.
        let raw = unsafe { Raw::bind(stream.cu_stream().expose_provenance()) };
        Self { raw, tracked: Some(stream), borrow: PhantomData }
    }
}

#[cfg(feature = "cudarc")]
impl<'s> From<&'s std::sync::Arc<cudarc::driver::CudaStream>> for Stream<'s> {
    fn from(stream: &'s std::sync::Arc<cudarc::driver::CudaStream>) -> Self {
        stream.as_ref().into()
    }
}
