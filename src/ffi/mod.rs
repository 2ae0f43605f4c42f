//! What the ABI crates share: C types, and the boundary between C++ callers and the core.

pub mod comm_window;
mod guard;
pub mod register_layer;
pub mod types;
pub mod view;

pub use guard::guard;
