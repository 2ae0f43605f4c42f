//! Calls into code that may throw C++ exceptions.

use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};

unsafe extern "C" {
    fn nvte_ep_shim_try_call(
        call: unsafe extern "C-unwind" fn(*mut c_void),
        data: *mut c_void,
        text: *mut *mut c_char,
    ) -> c_int;
}

/// Runs `call`, a plain call through a loaded library's function pointer, and turns a C++ exception that leaves it into
/// [`Error::Foreign`]; `name` names the called function in the message.
///
/// The exception passes through the trampoline below and the caller's closure, both of which own nothing that has a
/// destructor (`F: Copy` guarantees it for what the closure captured), and is caught in `shim/boundary.cc` before it
/// reaches any `catch_unwind`. Unwinding a foreign exception through such `C-unwind` frames is defined by the language.
pub fn catch_foreign<R: Copy, F: Fn() -> R + Copy>(name: &'static str, call: F) -> Result<R> {
    struct Frame<R, F> {
        call: F,
        result: Option<R>,
    }
    unsafe extern "C-unwind" fn trampoline<R: Copy, F: Fn() -> R + Copy>(data: *mut c_void) {
        // SAFETY: `data` is the `Frame` of the enclosing call, which outlives it and is not aliased meanwhile.
        let frame = unsafe { &mut *data.cast::<Frame<R, F>>() };
        frame.result = Some((frame.call)());
    }
    let mut frame = Frame { call, result: None };
    let mut text = std::ptr::null_mut();
    // SAFETY: the trampoline matches the frame's type, and both pointers live across the call.
    let threw = unsafe { nvte_ep_shim_try_call(trampoline::<R, F>, (&raw mut frame).cast(), &raw mut text) };
    match frame.result {
        Some(result) if threw == 0 => Ok(result),
        _ => Err(Error::Foreign { call: name, text: take_text(text) }),
    }
}

fn take_text(text: *mut c_char) -> String {
    if text.is_null() {
        return "an exception without a message".into();
    }
    // SAFETY: the shim returned a NUL-terminated string from malloc.
    let owned = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the shim hands over ownership, and nothing refers to the string any more.
    unsafe { libc::free(text.cast()) };
    owned
}
