//! What the ABI crates share: C types, and the boundary between C++ callers and the core.

mod abi;
pub mod comm_window;
pub mod ext;
mod foreign_tensors;
mod guard;
pub mod low_latency;
pub mod register_layer;
#[allow(non_camel_case_types, reason = "C names")]
pub mod status;
pub mod te;
pub mod te_window;
pub mod types;
pub mod versioned;
pub mod view;

pub use abi::Abi;
pub use foreign_tensors::ForeignTensors;
pub use guard::guard;
