//! Symmetric memory: at the same place of the same window on every rank.

use crate::dtype::Element;
use crate::error::Result;
use crate::group::Group;
use crate::memory::{DeviceSlice, DeviceSliceMut, Lent};
use crate::stream::Stream;
use nvte_ep_core::error::Error;
use nvte_ep_core::tensor::Window;
use std::marker::PhantomData;

/// Memory of the group's symmetric pool, given back when this is dropped.
#[derive(Debug)]
pub struct SymmetricSlice<'g, T> {
    group: &'g Group,
    address: u64,
    window: Window,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// Memory of the caller's that is registered as a window, until [`RegisteredSlice::deregister`] or the group's end.
#[derive(Debug)]
pub struct RegisteredSlice<'g, T> {
    group: &'g Group,
    address: u64,
    window: Window,
    len: usize,
    element: PhantomData<fn() -> T>,
}

fn bytes_of<T>(len: usize) -> std::result::Result<u64, Error> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| Error::argument("len", "must fit memory", len))
}

impl<'g, T: Element> SymmetricSlice<'g, T> {
    pub(crate) fn new(group: &'g Group, len: usize) -> Result<Self> {
        group.call("nvte_ep_ext_symm_alloc", |ep| {
            let place = ep.symm_alloc(bytes_of::<T>(len)?)?;
            Ok(Self { group, address: place.address, window: place.window, len, element: PhantomData })
        })
    }
}

impl<T> Drop for SymmetricSlice<'_, T> {
    fn drop(&mut self) {
        // It refuses only what it did not hand out.
        let _ = self.group.group.symm_free(self.address);
    }
}

impl<'g, T: Element> RegisteredSlice<'g, T> {
    /// # Safety
    /// As [`Group::register`].
    pub(crate) unsafe fn new(group: &'g Group, address: u64, len: usize) -> Result<Self> {
        group.call("nvte_ep_ext_window_register", |ep| {
            // SAFETY: passed on.
            let window = unsafe { ep.window_register(address, bytes_of::<T>(len)?) }?;
            Ok(Self { group, address, window, len, element: PhantomData })
        })
    }

    /// Ends the registration. Collective.
    ///
    /// # Errors
    /// Ranks that do not come.
    pub fn deregister(self) -> Result<()> {
        self.group.call("nvte_ep_ext_window_deregister", |ep| ep.window_deregister(self.address))
    }
}

macro_rules! in_window {
    ($($Type:ident),*) => { $(
        impl<T> $Type<'_, T> {
            /// Its address on this rank.
            #[must_use]
            pub const fn address(&self) -> u64 {
                self.address
            }
        }

        // SAFETY: the group keeps the memory, or the caller vouched for it; queued work of peers is ordered by their calls.
        unsafe impl<T: Element> DeviceSlice for $Type<'_, T> {
            type Element = T;

            fn len(&self) -> usize {
                self.len
            }

            fn lend<'a>(&'a self, _: &Stream<'a>) -> Lent<'a> {
                Lent::in_window(self.address, self.window)
            }
        }

        // SAFETY: as above.
        unsafe impl<T: Element> DeviceSliceMut for $Type<'_, T> {
            fn lend_mut<'a>(&'a mut self, _: &Stream<'a>) -> Lent<'a> {
                Lent::in_window(self.address, self.window)
            }
        }
    )* };
}

in_window!(SymmetricSlice, RegisteredSlice);
