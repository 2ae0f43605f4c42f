//! Memory of the crate cudarc. Its events order the calls' streams with all other streams that use the memory.

use crate::dtype::Element;
use crate::memory::{DeviceSlice, DeviceSliceMut, Lent};
use crate::stream::Stream;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

fn unordered<'a>() -> Lent<'a> {
    Lent { is_unordered: true, ..Lent::at(0) }
}

macro_rules! device_slice {
    ($($Type:ty),*) => { $(
        // SAFETY: cudarc waits for other streams' use before, and records this one when `record` is dropped.
        unsafe impl<T: Element> DeviceSlice for $Type {
            type Element = T;

            fn len(&self) -> usize {
                cudarc::driver::DeviceSlice::len(self)
            }

            fn lend<'a>(&'a self, stream: &Stream<'a>) -> Lent<'a> {
                let Some(stream) = stream.tracked else { return unordered() };
                let (address, record) = self.device_ptr(stream);
                Lent { record: Some(record), ..Lent::at(address) }
            }
        }
    )* };
}

macro_rules! device_slice_mut {
    ($($Type:ty),*) => { $(
        // SAFETY: as above.
        unsafe impl<T: Element> DeviceSliceMut for $Type {
            fn lend_mut<'a>(&'a mut self, stream: &Stream<'a>) -> Lent<'a> {
                let Some(stream) = stream.tracked else { return unordered() };
                let (address, record) = self.device_ptr_mut(stream);
                Lent { record: Some(record), ..Lent::at(address) }
            }
        }
    )* };
}

device_slice!(CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T>);
device_slice_mut!(CudaSlice<T>, CudaViewMut<'_, T>);
