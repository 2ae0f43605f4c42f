//! The error boundary: the one place that turns an error or a panic into a C++ exception or a status, with the error's code.

use super::status::NVTEEpStatus;
use crate::error::{Error, Result, with_code};
use std::any::Any;
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

unsafe extern "C" {
    fn nvte_ep_shim_error_new(text: *const c_char, length: usize) -> *mut c_void;
}

unsafe extern "C-unwind" {
    fn nvte_ep_shim_error_throw(error: *mut c_void) -> !;
    fn nvte_ep_shim_error_throw_text(text: *const c_char, length: usize) -> !;
}

/// Runs the body of the exported function `name`. An error, or a panic, leaves as a `std::runtime_error` whose text is
/// `name: error`. The exception starts in C++ with nothing of Rust's left to destroy, so the calling function has to be
/// `extern "C-unwind"` and own nothing with a destructor.
pub fn guard<R>(name: &'static str, body: impl FnOnce() -> Result<R>) -> R {
    match attempt(name, body) {
        Ok(value) => value,
        Err((_, text)) => throw(text),
    }
}

/// Throws the text, after it is dropped here.
#[cold]
fn throw(text: String) -> ! {
    // What of it there is room for where there is no memory for an exception that has all of it.
    let mut start = [0; 1024];
    let length = (0..=start.len().min(text.len())).rfind(|length| text.is_char_boundary(*length)).unwrap_or(0);
    start[..length].copy_from_slice(&text.as_bytes()[..length]);
    // SAFETY: the shim copies the text.
    let exception = unsafe { nvte_ep_shim_error_new(text.as_ptr().cast(), text.len()) };
    drop(text);
    if exception.is_null() {
        // SAFETY: the bytes are this frame's, and the shim copies them before it throws; nothing of Rust's is left to destroy.
        unsafe { nvte_ep_shim_error_throw_text(start.as_ptr().cast(), length) }
    }
    // SAFETY: made just now, and thrown once; nothing of Rust's is left to destroy.
    unsafe { nvte_ep_shim_error_throw(exception) }
}

/// Runs the body of the exported function `name`. An error, or a panic, is returned as its kind and its text.
pub(super) fn attempt<R>(
    name: &'static str,
    body: impl FnOnce() -> Result<R>,
) -> std::result::Result<R, (NVTEEpStatus, String)> {
    match catch_unwind(AssertUnwindSafe(|| {
        let _range = crate::sys::nvtx::range(name);
        let _call = tracing::trace_span!(target: "nvte_ep", "call", name).entered();
        crate::reserve::require(name)?;
        body()
    })) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            // The ranks that wait for this one's call are told why it does not come.
            if name.starts_with("nvte_ep_") {
                without_panic(|| crate::backend::report_failure(name, &error));
            }
            Err(failure(name, &error))
        }
        Err(payload) => {
            let error = Error::Internal(panic_text(payload.as_ref()));
            // To drop it may panic again.
            std::mem::forget(payload);
            Err(failure(name, &error))
        }
    }
}

/// What is done besides, which must not change what the call reports: a subscriber of the program's may panic.
fn without_panic<R>(body: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(body)).map_err(std::mem::forget).ok()
}

#[cold]
fn failure(name: &str, error: &Error) -> (NVTEEpStatus, String) {
    let text = without_panic(|| with_code(format!("{name}: {error}"))).unwrap_or_else(|| name.to_owned());
    // No warning: it reaches the caller, who may expect it.
    without_panic(|| tracing::info!(target: "nvte_ep", "thrown: {text}"));
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

    /// A subscriber of a Rust program's that fails at what it is told.
    struct Panics {
        at: tracing::Level,
    }

    impl tracing::Subscriber for Panics {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            assert!(*span.metadata().level() != self.at, "the subscriber fails at a span");
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            assert!(*event.metadata().level() != self.at, "the subscriber fails at an event");
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn a_subscriber_that_panics_changes_no_exception() {
        tracing::subscriber::with_default(Panics { at: tracing::Level::INFO }, || {
            assert!(text(1).starts_with("nvte_ep_test: tokens must be 2D, got 1D"), "{}", text(1));
            assert_eq!(text(2), "nvte_ep_test: internal error (please report it): number 2 [NVTE-EP-719]");
            assert_eq!(call(0), Ok(42));
        });
        tracing::subscriber::with_default(Panics { at: tracing::Level::TRACE }, || {
            let start = "nvte_ep_test: internal error (please report it): the subscriber fails at a span";
            assert!(text(0).starts_with(start), "{}", text(0));
        });
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
        assert!(text(1).starts_with("nvte_ep_test: tokens must be 2D, got 1D"), "{}", text(1));
        assert_eq!(text(2), "nvte_ep_test: internal error (please report it): number 2 [NVTE-EP-719]");
        assert_eq!(call(0), Ok(42), "the next valid call works");
    }
}
