//! The communication window of the register_layer ABI.

#![allow(non_camel_case_types, reason = "C names")]

use super::view::Windows;
use crate::tensor::Window;

/// A window handle, the type of NCCL's header.
pub type ncclWindow_t = *mut nvte_ep_bindings::ncclWindow_vidmem;

/// Where a payload lies in symmetric memory. With window NULL the tensor's data pointer is used.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTECommWindow {
    /// The window, from ncclCommWindowRegister on the group's communicator, or NULL.
    pub window: ncclWindow_t,
    /// Offset of the payload from the window's start, in bytes; a multiple of 16.
    pub offset: u64,
}

const _: () = assert!(size_of::<NVTECommWindow>() == 16);

impl NVTECommWindow {
    /// Where it says that the data lie.
    #[must_use]
    pub fn parse(self) -> Windows {
        let Self { window, offset } = self;
        Windows { data: at(window, offset), scales: None }
    }
}

/// The place at `offset` in `window`; none for NULL.
pub(super) fn at(window: ncclWindow_t, offset: u64) -> Option<Window> {
    Window::new(window.expose_provenance(), offset)
}
