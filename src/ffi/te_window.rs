//! The communication window of TransformerEngine's ABI since 2.19; 32 bytes, so by value it goes on the stack.

use super::comm_window::{at, ncclWindow_t};
use super::view::Windows;

/// Where a payload lies in symmetric memory. With a window NULL the tensor's pointer is used.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTECommWindow {
    /// The window, from ncclCommWindowRegister on the group's communicator, or NULL.
    pub window: ncclWindow_t,
    /// Offset of the payload from the window's start, in bytes; a multiple of 16.
    pub offset: u64,
    /// The window of a block-scaled payload's inverse scales, or NULL.
    pub scale_window: ncclWindow_t,
    /// Offset of the inverse scales, in bytes; a multiple of 16.
    pub scale_offset: u64,
}

const _: () = assert!(size_of::<NVTECommWindow>() == 32);

impl NVTECommWindow {
    /// Where it says that data and scales lie.
    #[must_use]
    pub fn parse(self) -> Windows {
        let Self { window, offset, scale_window, scale_offset } = self;
        Windows { data: at(window, offset), scales: at(scale_window, scale_offset) }
    }
}
