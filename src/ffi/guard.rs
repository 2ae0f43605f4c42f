//! The error boundary: the one place that turns an error or a panic into a C++ exception.

use super::status::NVTEEpStatus;
use crate::error::{Error, Result};
use std::any::Any;
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

unsafe extern "C" {
    fn nvte_ep_shim_error_new(text: *const c_char, length: usize) -> *mut c_void;
}

unsafe extern "C-unwind" {
    fn nvte_ep_shim_error_throw(error: *mut c_void) -> !;
}

/// Runs the body of the exported function `name`. An error, or a panic, leaves as a `std::runtime_error` whose text is
/// `name: error`. The exception starts in C++ with nothing of Rust's left to destroy, so the calling function has to be
/// `extern "C-unwind"` and own nothing with a destructor.
pub fn guard<R>(name: &'static str, body: impl FnOnce() -> Result<R>) -> R {
    let exception = match attempt(name, body) {
        Ok(value) => return value,
        Err((_, text)) => {
            // SAFETY: the shim copies the text, which is dropped here.
            unsafe { nvte_ep_shim_error_new(text.as_ptr().cast(), text.len()) }
        }
    };
    // SAFETY: made just now, and thrown once; all of Rust's values above are gone.
    unsafe { nvte_ep_shim_error_throw(exception) }
}

/// Runs the body of the exported function `name`. An error, or a panic, is returned as its kind and its text.
pub(super) fn attempt<R>(
    name: &'static str,
    body: impl FnOnce() -> Result<R>,
) -> std::result::Result<R, (NVTEEpStatus, String)> {
    match catch_unwind(AssertUnwindSafe(|| {
        let _call = tracing::trace_span!(target: "nvte_ep", "call", name).entered();
        body()
    })) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            // The ranks that wait for this one's call are told why it does not come.
            if name.starts_with("nvte_ep_") {
                crate::backend::tell_failure(name, &error);
            }
            Err(failure(name, &error))
        }
        Err(payload) => Err(failure(name, &Error::Internal(panic_text(payload.as_ref())))),
    }
}

#[cold]
fn failure(name: &str, error: &Error) -> (NVTEEpStatus, String) {
    let text = format!("{name}: {error}");
    tracing::error!(target: "nvte_ep", "{text}");
    (error.into(), text)
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::catch_foreign;

    unsafe extern "C-unwind" fn exported(which: i32) -> i32 {
        guard("nvte_ep_test", || match which {
            0 => Ok(42),
            1 => Err(Error::argument("tokens", "must be 2D", "1D")),
            _ => panic!("number {which}"),
        })
    }

    fn call(which: i32) -> Result<i32> {
        // SAFETY: takes any number.
        catch_foreign("exported", || unsafe { exported(which) })
    }

    fn text(which: i32) -> String {
        match call(which) {
            Err(Error::Foreign { text, .. }) => text,
            other => panic!("expected an exception, got {other:?}"),
        }
    }

    #[test]
    fn values_errors_and_panics_cross() {
        assert_eq!(call(0), Ok(42));
        assert_eq!(text(1), "nvte_ep_test: tokens must be 2D, got 1D");
        assert_eq!(text(2), "nvte_ep_test: internal error (please report it): number 2");
        assert_eq!(call(0), Ok(42), "the next valid call works");
    }
}
