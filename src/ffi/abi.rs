//! Which of the ABIs a library has. They share symbol names with different signatures, so a process may have one only.

use crate::error::{Error, Result};
use crate::sys::provider_of;
use std::ffi::CStr;

/// One of the ABIs, told by a function that no other has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abi {
    /// Layers are registered; configurations go by value.
    RegisterLayer,
    /// TransformerEngine's since 2.19.
    Te,
}

impl Abi {
    const fn name(self) -> &'static str {
        match self {
            Self::RegisterLayer => "register_layer",
            Self::Te => "TransformerEngine >= 2.19",
        }
    }

    const fn mark(self) -> &'static CStr {
        match self {
            Self::RegisterLayer => c"nvte_ep_register_layer",
            Self::Te => c"nvte_ep_handle_mem_size",
        }
    }

    /// # Errors
    /// A library with another ABI is in the process's global scope, where its functions and ours take each other's calls.
    pub fn refuse_others(self) -> Result<()> {
        for other in [Self::RegisterLayer, Self::Te] {
            if let Some(file) = provider_of(other.mark()).filter(|_| other != self) {
                return Err(Error::State(format!(
                    "this library has the {} ABI, and {} with the {} ABI is loaded too: both define nvte_ep_* with \
                     different arguments; link or preload one of them only",
                    self.name(),
                    file.display(),
                    other.name()
                )));
            }
        }
        Ok(())
    }
}

/// The text of `nvte_ep_ext_version`: a library's name, its version and what it is.
#[macro_export]
macro_rules! version_text {
    ($library:literal, $what:literal) => {
        match ::std::ffi::CStr::from_bytes_with_nul(
            concat!($library, " ", env!("CARGO_PKG_VERSION"), " (", $what, ")\0").as_bytes(),
        ) {
            Ok(text) => text,
            Err(_) => unreachable!(),
        }
    };
}
