//! What goes with the functions that return a status. Neither of these can fail.

use nvte_ep_core::ffi::status::{self, NVTEEpStatus};
use std::ffi::{c_char, c_int};

/// The text of the calling thread's latest nvte_ep_try_... call that failed: what the function without try throws. Empty where
/// none has failed. It stays until the thread's next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn nvte_ep_last_error() -> *const c_char {
    status::last_error()
}

/// What a status means, in a few words; static. A number that is no NVTEEpStatus is said to be none.
#[unsafe(no_mangle)]
pub extern "C" fn nvte_ep_status_string(status: c_int) -> *const c_char {
    NVTEEpStatus::text(status).as_ptr()
}
