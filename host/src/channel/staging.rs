//! Staging: the memory files in which ranks offer data.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nvte_ep_bindings::{cudaErrorMemoryAllocation, ncclSystemError};

use super::PIECE_BYTES;
use super::control::system;
use crate::fault::{Fault, Outcome};
use crate::sys::{self, Mapping};

/// A rank's own staging file of one parity.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) fd: OwnedFd,
    pub(super) map: Option<Mapping>,
}

impl Staging {
    pub(super) fn new() -> Outcome<Self> {
        let fd = sys::memfd("nvte-ep-staging").map_err(|e| system("cannot create a staging file", &e))?;
        Ok(Self { fd, map: None })
    }

    pub(super) fn capacity(&self) -> usize {
        self.map.as_ref().map_or(0, Mapping::byte_len)
    }

    pub(super) fn grow(&mut self, bytes: usize) -> Outcome<()> {
        if self.capacity() < bytes {
            let target = bytes.max((self.capacity() * 2).min(PIECE_BYTES)).next_multiple_of(64 * 1024);
            let full = |e: &io::Error| {
                let text = format!("cannot reserve {target} bytes of staging: {e}");
                Fault::both(cudaErrorMemoryAllocation, ncclSystemError, text)
            };
            sys::reserve(self.fd.as_fd(), target).map_err(|e| full(&e))?;
            self.map = Some(Mapping::shared(self.fd.as_fd(), target).map_err(|e| full(&e))?);
        }
        Ok(())
    }
}

/// A peer's staging file of one parity.
pub(super) struct PeerStaging {
    pub(super) fd: OwnedFd,
    pub(super) map: Option<Mapping>,
}
