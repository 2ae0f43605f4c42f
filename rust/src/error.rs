//! The one error type.

use nvte_ep_core::backend::report_failure;
use nvte_ep_core::error::{Error as Cause, code_of};
use nvte_ep_core::ffi::status::NVTEEpStatus;
use std::fmt;

/// What a call returns.
pub type Result<T> = std::result::Result<T, Error>;

/// What kind of failure it is; the kinds of the C interface's `NVTEEpStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument breaks a rule.
    InvalidArgument,
    /// Another call has to come first, or came already.
    WrongOrder,
    /// The machine lacks what the call needs.
    NotSupported,
    /// Another rank refused, differs, or is gone.
    Peer,
    /// A wait reached its limit.
    TimeOut,
    /// Memory of the device or the host ran out.
    OutOfMemory,
    /// A library below (CUDA, NCCL, NCCL EP) reported an error.
    Library,
    /// A defect of nvte-ep.
    Internal,
}

/// Why a call failed. Nothing was queued, unless [`Error::kind`] is `Library`.
///
/// Functions and arguments have their names of the C interface (`nvte_ep_dispatch`, `recv_tokens`), as in `docs/errors.md`,
/// which explains every text by its code.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/alone.rs"));
/// # fn main() -> nvte_ep::Result<()> {
/// # let alone = Alone::new();
/// use nvte_ep::{Communicator, ErrorKind, Group, UniqueId};
///
/// let comm = Communicator::new(UniqueId::new()?, 0, 1)?;
/// let error = Group::builder(comm).num_experts(4).max_tokens_per_rank(8).build().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// assert_eq!(error.function(), "nvte_ep_initialize");
/// assert_eq!(error.argument(), Some("group_config.max_recv_tokens_per_rank"));
/// assert_eq!(error.code(), Some(151));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Report>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Report {
    function: &'static str,
    cause: Cause,
    text: String,
    code: Option<u16>,
}

impl Error {
    #[cold]
    pub(crate) fn new(function: &'static str, cause: Cause) -> Self {
        let mut text = format!("{function}: {cause}");
        let code = code_of(&text);
        if let Some(code) = code {
            text.push_str(&format!(" [NVTE-EP-{code}]"));
        }
        Self(Box::new(Report { function, cause, text, code }))
    }

    /// What kind of failure it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match NVTEEpStatus::from(&self.0.cause) {
            NVTEEpStatus::NVTE_EP_INVALID_ARGUMENT => ErrorKind::InvalidArgument,
            NVTEEpStatus::NVTE_EP_WRONG_ORDER => ErrorKind::WrongOrder,
            NVTEEpStatus::NVTE_EP_NOT_SUPPORTED => ErrorKind::NotSupported,
            NVTEEpStatus::NVTE_EP_PEER => ErrorKind::Peer,
            NVTEEpStatus::NVTE_EP_TIME_OUT => ErrorKind::TimeOut,
            NVTEEpStatus::NVTE_EP_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
            NVTEEpStatus::NVTE_EP_LIBRARY => ErrorKind::Library,
            NVTEEpStatus::NVTE_EP_SUCCESS | NVTEEpStatus::NVTE_EP_INTERNAL => ErrorKind::Internal,
        }
    }

    /// The C function that the call corresponds to.
    #[must_use]
    pub fn function(&self) -> &'static str {
        self.0.function
    }

    /// The argument that breaks a rule, if it is one.
    #[must_use]
    pub fn argument(&self) -> Option<&str> {
        match &self.0.cause {
            Cause::Argument { argument, .. } => Some(argument),
            _ => None,
        }
    }

    /// The number of the entry of `docs/errors.md`: 151 of `[NVTE-EP-151]`.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        self.0.code
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

/// The text, so that `fn main() -> nvte_ep::Result<()>` prints it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl std::error::Error for Error {}

/// Runs the body of the call that corresponds to the C function `function`.
#[inline]
pub(crate) fn call<R>(function: &'static str, body: impl FnOnce() -> std::result::Result<R, Cause>) -> Result<R> {
    let _range = nvte_ep_core::sys::nvtx::range(function);
    body().map_err(|cause| failed(function, cause))
}

#[cold]
fn failed(function: &'static str, cause: Cause) -> Error {
    // The ranks that wait for this one's call are told why it does not come.
    report_failure(function, &cause);
    Error::new(function, cause)
}
