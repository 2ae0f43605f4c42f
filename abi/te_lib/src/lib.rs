//! `libtransformer_engine.so`: TransformerEngine's ABI of `nvte_ep_*` since 2.19 and the NVTETensor interface, in place of its library for
//! programs that use only these.

/// What `surface` calls.
mod core {
    use nvte_ep_core::error::Result;
    use nvte_ep_core::ffi::Abi;

    pub(crate) use nvte_ep_core::backend::{
        current_group, current_ll_group, initialize, ll_initialize, ll_shutdown, shutdown,
    };
    pub(crate) use nvte_ep_core::ffi::te::NVTEEpGroupConfig;
    pub(crate) use nvte_ep_tensor::OwnTensors as Tensors;

    pub(crate) const VERSION: &std::ffi::CStr =
        nvte_ep_core::version_text!("libtransformer_engine", "TransformerEngine >= 2.19 ABI");

    pub(crate) fn refuse_other_abi() -> Result<()> {
        Abi::Te.refuse_others()
    }
}

#[path = "../../calls.rs"]
mod calls;
#[path = "../../te/src/exports.rs"]
mod exports;
#[path = "../../ext/src/surface.rs"]
mod ext;
#[path = "../../ext/src/exports.rs"]
mod ext_exports;
#[path = "../../ext/src/twins.rs"]
mod ext_twins;
#[path = "../../memory.rs"]
mod memory;
#[path = "../../status.rs"]
mod status;
#[path = "../../te/src/surface.rs"]
mod surface;
#[path = "../../te/src/twins.rs"]
mod twins;

// Its exported functions belong to this library.
use nvte_ep_tensor as _;
