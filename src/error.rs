//! The one error type. Its `Display`, behind the name of the called function, is the text of the C++ exception.

mod code;

pub use code::{code_of, with_code};

use std::fmt;

/// What a call returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed: what was required, what was found and what to change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// An argument breaks a rule. `argument` is its name in the C signature (or `struct.field`).
    Argument {
        /// The argument's C name.
        argument: String,
        /// The rule: "must be ...".
        required: String,
        /// What the caller passed.
        found: String,
        /// What to change, where that is not plain from the rule.
        remedy: Option<String>,
    },
    /// The call needs a group on the calling thread's current device, and there is none.
    NotInitialized {
        /// The current device; none when no CUDA was loaded yet.
        device: Option<i32>,
        /// Devices of this process that were initialized.
        initialized: Vec<i32>,
        /// Whether the current device had one.
        was_ended: bool,
    },
    /// `nvte_ep_initialize` for a device that has a group already.
    AlreadyInitialized {
        /// The device.
        device: i32,
    },
    /// The call cannot be done in the present state; the text says what has to come first.
    State(String),
    /// Something below us is missing or unfit, found before it could abort the process.
    Preflight {
        /// What was looked at and found.
        problem: String,
        /// What to change.
        remedy: String,
    },
    /// A shared library or one of its symbols could not be loaded.
    Load {
        /// Which library.
        library: &'static str,
        /// Every place tried and the loader's answer, one a line.
        tried: Vec<String>,
        /// What to change.
        remedy: String,
    },
    /// A call into CUDA, NCCL or NCCL EP returned an error code.
    Library {
        /// The called function.
        call: &'static str,
        /// Its return code.
        code: i64,
        /// The library's own text for the code, and its last message where it keeps one.
        text: String,
    },
    /// A library threw a C++ exception.
    Foreign {
        /// The called function.
        call: &'static str,
        /// The exception's `what()`.
        text: String,
    },
    /// Ranks disagree, or one of them refused; every rank reports the same.
    Disagreement(String),
    /// A wait ended without the awaited.
    TimeOut {
        /// What was waited for.
        waited_for: String,
        /// For how long.
        milliseconds: u64,
        /// What to look at.
        remedy: String,
    },
    /// The process has no memory left.
    OutOfMemory {
        /// What it was needed for.
        what: String,
        /// How many bytes that takes.
        bytes: usize,
    },
    /// Tear-down went on to its end, but these steps failed.
    Teardown(Vec<String>),
    /// This build has no expert parallelism in it.
    NotBuilt,
    /// A defect of ours: a panic caught at the boundary.
    Internal(String),
}

impl Error {
    /// An argument error without a remedy of its own.
    #[cold]
    pub fn argument(argument: impl Into<String>, required: impl Into<String>, found: impl fmt::Display) -> Self {
        let found = in_one_line(&found.to_string());
        Self::Argument { argument: argument.into(), required: required.into(), found, remedy: None }
    }

    /// The same error with the remedy `text`, for argument errors.
    #[cold]
    #[must_use]
    pub fn with_remedy(mut self, text: impl Into<String>) -> Self {
        if let Self::Argument { remedy, .. } = &mut self {
            *remedy = Some(text.into());
        }
        self
    }
}

/// What callers and variables hold may be any text; in a message it stays what it is said to be.
fn in_one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument { argument, required, found, remedy } => {
                write!(f, "{argument} {required}, got {found}")?;
                remedy.as_ref().map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
            }
            Self::NotInitialized { device: Some(device), initialized, .. } if !initialized.is_empty() => write!(
                f,
                "there is no EP group on device {device}, the calling thread's current device, but on {initialized:?}: \
                 set the current device to the group's before the call"
            ),
            Self::NotInitialized { was_ended: true, .. } => {
                f.write_str("there is no EP group: nvte_ep_shutdown ended it; call nvte_ep_initialize for another")
            }
            Self::NotInitialized { .. } => f.write_str("there is no EP group: call nvte_ep_initialize first"),
            Self::AlreadyInitialized { device } => {
                write!(f, "device {device} has an EP group already: call nvte_ep_shutdown before initializing again")
            }
            Self::State(text) | Self::Disagreement(text) => f.write_str(text),
            Self::Preflight { problem, remedy } => write!(f, "{problem}; {remedy}"),
            Self::Load { library, tried, remedy } => {
                write!(f, "{library} could not be loaded; {remedy}. Tried:")?;
                tried.iter().try_for_each(|line| write!(f, "\n  {line}"))
            }
            Self::Library { call, code, text } => write!(f, "{call} returned {code}: {text}"),
            Self::Foreign { call, text } => write!(f, "{call} threw: {text}"),
            Self::TimeOut { waited_for, milliseconds, remedy } => {
                write!(f, "waited {milliseconds} ms for {waited_for}; {remedy}")
            }
            Self::OutOfMemory { what, bytes } => write!(
                f,
                "the process is out of memory: {what} may take {bytes} bytes; free memory, or raise the process's limit \
                 (ulimit -v, the container's), and make the call again"
            ),
            Self::Teardown(failures) => write!(f, "the group is gone, but: {}", failures.join("; ")),
            Self::NotBuilt => f.write_str(
                "this is the stub library, which is for linking only; put the folder of the full libnvte_ep.so.1 before \
                 this one's in LD_LIBRARY_PATH, or its file in this one's place",
            ),
            Self::Internal(text) => write!(f, "internal error (please report it): {text}"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_stays_in_its_line() {
        let text =
            Error::argument("key", "must be one of a, b", "\"a\nnvte_ep: all is well\u{1b}[0m\u{7f}\"").to_string();
        assert_eq!(text, r#"key must be one of a, b, got "a\nnvte_ep: all is well\u{1b}[0m\u{7f}""#);
        assert_eq!(Error::argument("path", "must exist", "/d\u{f6}").to_string(), "path must exist, got /d\u{f6}");
    }
}
