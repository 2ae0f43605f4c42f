//! `libnvte_ep_stub.so`: what is installed as `libnvte_ep.so.1` where NCCL EP is off, so that frameworks link
//! unconditionally. The surface is the primary library's own source file over a core that answers `NotBuilt`; shutdown
//! is a no-op, and the NVTETensor interface works.

/// The twin of the primary library's module of this name.
mod core {
    use nvte_ep_core::backend::{Communicator, EpGroup, LlGroup};
    use nvte_ep_core::config::{GroupRequest, LlRequest};
    use nvte_ep_core::error::{Error, Result};
    use nvte_ep_core::options::Options;

    pub(crate) use nvte_ep_core::ffi::register_layer::NVTEEpGroupConfig;
    pub(crate) use nvte_ep_tensor::OwnTensors as Tensors;

    pub(crate) const VERSION: &std::ffi::CStr =
        nvte_ep_core::version_text!("libnvte_ep", "stub of the register_layer ABI, without expert parallelism");

    pub(crate) fn refuse_other_abi() -> Result<()> {
        Err(Error::NotBuilt)
    }

    /// # Safety
    /// None needed: nothing is touched. Unsafe as its twin is.
    pub(crate) unsafe fn initialize(_comm: Communicator, _request: GroupRequest, _options: &Options) -> Result<()> {
        Err(Error::NotBuilt)
    }

    pub(crate) fn current_group() -> Result<EpGroup> {
        Err(Error::NotBuilt)
    }

    /// # Safety
    /// None needed: nothing is touched. Unsafe as its twin is.
    pub(crate) unsafe fn ll_initialize(_comm: Communicator, _request: LlRequest, _options: &Options) -> Result<()> {
        Err(Error::NotBuilt)
    }

    pub(crate) fn current_ll_group() -> Result<LlGroup> {
        Err(Error::NotBuilt)
    }

    #[expect(clippy::unnecessary_wraps, reason = "the twin's signature")]
    pub(crate) fn ll_shutdown() -> Result<()> {
        Ok(())
    }

    #[expect(clippy::unnecessary_wraps, reason = "the twin's signature")]
    pub(crate) fn shutdown() -> Result<()> {
        Ok(())
    }
}

#[path = "../../abi/calls.rs"]
mod calls;
#[path = "../../abi/register_layer/src/exports.rs"]
mod exports;
#[path = "../../abi/ext/src/surface.rs"]
mod ext;
#[path = "../../abi/ext/src/exports.rs"]
mod ext_exports;
#[path = "../../abi/ext/src/twins.rs"]
mod ext_twins;
#[path = "../../abi/memory.rs"]
mod memory;
#[path = "../../abi/status.rs"]
mod status;
#[path = "../../abi/register_layer/src/surface.rs"]
mod surface;
#[path = "../../abi/register_layer/src/twins.rs"]
mod twins;

// Its exported functions belong to this library.
use nvte_ep_tensor as _;
