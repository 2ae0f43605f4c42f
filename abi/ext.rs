//! Our additions to the interface.

use std::ffi::c_char;

/// Names this library, its version and its ABI, as in "libnvte_ep 0.1.0 (register_layer ABI)". The string is static.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn nvte_ep_ext_version() -> *const c_char {
    crate::core::VERSION.as_ptr()
}
