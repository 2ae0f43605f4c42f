//! The communicator of a group.

use nvte_ep_bindings as b;

/// A communicator, borrowed from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Communicator(pub usize);

impl Communicator {
    pub(crate) fn as_raw(self) -> b::ncclComm_t {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}
