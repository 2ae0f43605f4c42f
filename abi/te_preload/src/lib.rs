//! `libnvte_ep_preload.so`: TransformerEngine's ABI of `nvte_ep_*` since 2.19, to be preloaded into a process that has its library.
//! Tensors are read through that library's own accessors.

/// What `surface` calls.
mod core {
    use nvte_ep_core::error::Result;
    use nvte_ep_core::ffi::Abi;

    pub(crate) use nvte_ep_core::backend::{
        current_group, current_ll_group, initialize, ll_initialize, ll_shutdown, shutdown,
    };
    pub(crate) use nvte_ep_core::ffi::ForeignTensors as Tensors;
    pub(crate) use nvte_ep_core::ffi::te::NVTEEpGroupConfig;

    pub(crate) const VERSION: &std::ffi::CStr =
        nvte_ep_core::version_text!("libnvte_ep_preload", "TransformerEngine >= 2.19 ABI, preload");

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
