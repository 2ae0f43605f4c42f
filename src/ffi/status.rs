//! The error boundary of the functions that return a status and never throw.

use super::guard::attempt;
use crate::error::{Error, Result};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

/// What became of a call: done, or why not. nvte_ep_last_error has the text.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NVTEEpStatus {
    /// The call is done, or queued.
    NVTE_EP_SUCCESS = 0,
    /// An argument breaks a rule.
    NVTE_EP_INVALID_ARGUMENT = 1,
    /// Another call has to come first, or came already.
    NVTE_EP_WRONG_ORDER = 2,
    /// The machine or this build lacks what the call needs.
    NVTE_EP_NOT_SUPPORTED = 3,
    /// Another rank refused, differs, or is gone.
    NVTE_EP_PEER = 4,
    /// A wait ended without the awaited.
    NVTE_EP_TIME_OUT = 5,
    /// Memory of the device or the host ran out.
    NVTE_EP_OUT_OF_MEMORY = 6,
    /// A library below (CUDA, NCCL, NCCL EP) reported an error.
    NVTE_EP_LIBRARY = 7,
    /// A defect of nvte-ep.
    NVTE_EP_INTERNAL = 8,
}
use NVTEEpStatus::*;

impl NVTEEpStatus {
    /// What the number says.
    #[must_use]
    pub const fn text(status: c_int) -> &'static CStr {
        const TEXTS: [&CStr; 9] = [
            c"success",
            c"invalid argument",
            c"wrong order",
            c"not supported here",
            c"another rank failed",
            c"time-out",
            c"out of memory",
            c"error of a library below",
            c"internal error",
        ];
        if status >= 0 && (status as usize) < TEXTS.len() { TEXTS[status as usize] } else { c"not a status" }
    }
}

/// `cudaErrorMemoryAllocation`, and the driver's `CUDA_ERROR_OUT_OF_MEMORY`.
const CUDA_OUT_OF_MEMORY: i64 = 2;

impl From<&Error> for NVTEEpStatus {
    fn from(error: &Error) -> Self {
        match error {
            Error::Argument { .. } => NVTE_EP_INVALID_ARGUMENT,
            Error::NotInitialized { .. } | Error::AlreadyInitialized { .. } | Error::State(_) => NVTE_EP_WRONG_ORDER,
            Error::Preflight { .. } | Error::Load { .. } | Error::NotBuilt => NVTE_EP_NOT_SUPPORTED,
            Error::Disagreement(_) => NVTE_EP_PEER,
            Error::TimeOut { .. } => NVTE_EP_TIME_OUT,
            Error::Library { call, code: CUDA_OUT_OF_MEMORY, .. } if call.starts_with("cu") => NVTE_EP_OUT_OF_MEMORY,
            Error::OutOfMemory { .. } => NVTE_EP_OUT_OF_MEMORY,
            Error::Library { .. } | Error::Foreign { .. } | Error::Teardown(_) => NVTE_EP_LIBRARY,
            Error::Internal(_) => NVTE_EP_INTERNAL,
        }
    }
}

thread_local! {
    /// The text of the thread's latest failed call, with the NUL behind it.
    static LAST: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The text of the thread's latest failed call, NUL-terminated; empty before the first.
#[must_use]
pub fn last_error() -> *const c_char {
    let text = LAST.try_with(|last| {
        let last = last.borrow();
        if last.is_empty() { c"".as_ptr() } else { last.as_ptr().cast() }
    });
    text.unwrap_or(c"".as_ptr())
}

fn keep(mut text: String) {
    text.retain(|c| c != '\0');
    text.push('\0');
    // A thread that ends has no text any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text.into_bytes());
}

/// Runs the body of the exported function `name`; an error, or a panic, is kept as the thread's last one, with the text
/// that the throwing function has.
pub fn of(name: &'static str, body: impl FnOnce() -> Result<()>) -> NVTEEpStatus {
    match attempt(name, body) {
        Ok(()) => NVTE_EP_SUCCESS,
        Err((status, text)) => {
            keep(text);
            status
        }
    }
}

/// As [`of`], for a function that returns a value.
///
/// # Safety
/// `result` is null, which is an error, or writable.
pub unsafe fn with_result<R>(name: &'static str, result: *mut R, body: impl FnOnce() -> Result<R>) -> NVTEEpStatus {
    of(name, || {
        if result.is_null() {
            return Err(Error::argument("result", "must not be NULL", "NULL"));
        }
        let value = body()?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { result.write(value) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: NUL-terminated, and no call of this thread fails meanwhile.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn errors_and_panics_are_statuses_with_their_text() {
        assert_eq!((of("nvte_test", || Ok(())), last().as_str()), (NVTE_EP_SUCCESS, ""));
        let refused = || Err(Error::argument("tokens", "must be 2D", "1\0D"));
        assert_eq!(of("nvte_test", refused), NVTE_EP_INVALID_ARGUMENT);
        assert!(last().starts_with(r"nvte_test: tokens must be 2D, got 1\u{0}D"), "{}", last());
        assert_eq!(of("nvte_test", || panic!("by {}", "chance")), NVTE_EP_INTERNAL);
        assert!(last().starts_with("nvte_test: internal error (please report it): by chance ["), "{}", last());
        assert_eq!(of("nvte_test", || Ok(())), NVTE_EP_SUCCESS);
        assert!(last().contains("by chance"), "success leaves it");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
    }

    #[test]
    fn results_go_where_they_are_asked_for() {
        let mut found = 0;
        // SAFETY: it is writable.
        assert_eq!(unsafe { with_result("nvte_test", &raw mut found, || Ok(7)) }, NVTE_EP_SUCCESS);
        assert_eq!(found, 7);
        // SAFETY: null is an error.
        let status =
            unsafe { with_result("nvte_test", std::ptr::null_mut(), || -> Result<i32> { panic!("not called") }) };
        assert_eq!(status, NVTE_EP_INVALID_ARGUMENT);
        assert!(last().starts_with("nvte_test: result must not be NULL, got NULL"), "{}", last());
    }

    #[test]
    fn kinds() {
        let library = |call, code| Error::Library { call, code, text: String::new() };
        let late = Error::TimeOut { waited_for: String::new(), milliseconds: 1, remedy: String::new() };
        for (error, status) in [
            (Error::NotInitialized { device: None, initialized: Vec::new(), was_ended: false }, NVTE_EP_WRONG_ORDER),
            (Error::NotBuilt, NVTE_EP_NOT_SUPPORTED),
            (Error::Disagreement(String::new()), NVTE_EP_PEER),
            (late, NVTE_EP_TIME_OUT),
            (library("cuMemAlloc", 2), NVTE_EP_OUT_OF_MEMORY),
            (library("cuMemAlloc", 1), NVTE_EP_LIBRARY),
            (Error::OutOfMemory { what: String::new(), bytes: 1 }, NVTE_EP_OUT_OF_MEMORY),
            (library("ncclEpDispatch", 2), NVTE_EP_LIBRARY),
        ] {
            assert_eq!(NVTEEpStatus::from(&error), status, "{error:?}");
        }
        assert_eq!(NVTEEpStatus::text(NVTE_EP_INTERNAL as c_int), c"internal error");
        assert_eq!((NVTEEpStatus::text(-1), NVTEEpStatus::text(9)), (c"not a status", c"not a status"));
    }
}
