//! `libnvte_ep.so`: the register_layer ABI of `nvte_ep_*` and the NVTETensor interface, over the core.

/// What `surface` calls. The stub library compiles the same surface over a twin of this module.
mod core {
    pub(crate) use nvte_ep_core::backend::{current_group, initialize, shutdown};

    pub(crate) const VERSION: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
        concat!("libnvte_ep ", env!("CARGO_PKG_VERSION"), " (register_layer ABI)\0").as_bytes(),
    ) {
        Ok(version) => version,
        Err(_) => unreachable!(),
    };
}

mod ext;
mod surface;

// Its exported functions belong to this library.
use nvte_ep_tensor as _;
