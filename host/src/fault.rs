//! What goes wrong inside the host runtime, and how it crosses the C boundary.

use std::any::Any;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use nvte_ep_bindings::{cudaError_t, cudaErrorUnknown, ncclInternalError, ncclResult_t, ncclUnhandledCudaError};

use crate::rule::Rule;

/// An error with the code that each of the two interfaces reports for it.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Code for CUDA callers.
    pub cuda: cudaError_t,
    /// Code for NCCL callers.
    pub nccl: ncclResult_t,
    /// What happened, for `cudaGetErrorString`, `ncclGetLastError` and stderr.
    pub text: String,
    /// The rule of the contract that is broken, if one is.
    pub rule: Option<Rule>,
    /// Whether the text says so already ([`crate::check::annotate`]).
    pub annotated: bool,
}

/// Result of everything below the C surface.
pub type Outcome<T> = Result<T, Fault>;

impl Fault {
    /// A CUDA error; NCCL callers see it as an unhandled CUDA error.
    pub fn cuda(code: cudaError_t, text: impl Into<String>) -> Self {
        Self::both(code, ncclUnhandledCudaError, text)
    }

    /// An NCCL error; if it reaches a stream it becomes `cudaErrorUnknown`.
    pub fn nccl(code: ncclResult_t, text: impl Into<String>) -> Self {
        Self::both(cudaErrorUnknown, code, text)
    }

    /// An error that means something to both interfaces.
    pub fn both(cuda: cudaError_t, nccl: ncclResult_t, text: impl Into<String>) -> Self {
        Self { cuda, nccl, text: text.into(), rule: None, annotated: false }
    }

    /// Names the rule of the contract that the error is a breach of.
    pub fn breaks(mut self, rule: Rule) -> Self {
        self.rule = Some(rule);
        self
    }
}

/// Prints a line for the user; a closed stderr is no reason to fail.
pub fn report(line: &str) {
    // In one piece: several ranks may share the stream.
    let _ = std::io::stderr().write_all(format!("nvte_ep_host: {line}\n").as_bytes());
}

/// Runs `work` and turns a panic into a [`Fault`], so that none crosses the C boundary.
pub fn contain<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(from_panic(&*panic)))
}

fn from_panic(panic: &(dyn Any + Send)) -> Fault {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "unknown panic".to_owned());
    Fault::both(cudaErrorUnknown, ncclInternalError, format!("internal error of the host runtime: {text}"))
}
