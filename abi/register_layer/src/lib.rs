//! `libnvte_ep.so`: the register_layer ABI of `nvte_ep_*` and the NVTETensor interface, over the core.

/// What `surface` calls. The stub library compiles the same surface over a twin of this module.
mod core {
    use nvte_ep_core::error::Result;
    use nvte_ep_core::ffi::Abi;

    pub(crate) use nvte_ep_core::backend::{
        current_group, current_ll_group, initialize, ll_initialize, ll_shutdown, shutdown,
    };
    pub(crate) use nvte_ep_core::ffi::register_layer::NVTEEpGroupConfig;
    pub(crate) use nvte_ep_tensor::OwnTensors as Tensors;

    pub(crate) const VERSION: &std::ffi::CStr = nvte_ep_core::version_text!("libnvte_ep", "register_layer ABI");

    pub(crate) fn refuse_other_abi() -> Result<()> {
        Abi::RegisterLayer.refuse_others()
    }
}

#[path = "../../calls.rs"]
mod calls;
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
mod surface;
mod twins;

// Its exported functions belong to this library.
use nvte_ep_tensor as _;
