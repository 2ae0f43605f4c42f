//! The core of nvte-ep: expert-parallel dispatch and combine, over NCCL EP's high-throughput mode and, for few tokens, its low-latency one.
//!
//! This crate is internal: anything of it may change with any version. Rust programs use the crate `nvte-ep` (`rust/`), and C and
//! C++ programs the libraries of `abi/`; both are thin surfaces over this one.
//! Arrows point one way: surfaces (`abi/*`, `rust`) -> [`ffi`] -> [`backend`] -> [`ops`], [`config`] -> [`sys`].
//!
//! | module | holds |
//! |---|---|
//! | [`error`] | the one error type; its text is the text of the C++ exception |
//! | [`env`](mod@env) | every environment variable; add one here |
//! | [`config`] | validated configuration of groups and layers; add a rule about a group or a layer here |
//! | [`limits`] | what each engine takes of configurations and tensors |
//! | [`options`] | the options of a group, in addition to its configuration; add one here |
//! | [`dtype`], [`tensor`] | data types; a tensor's type, shape and place |
//! | [`ops`] | the per-step operations: arguments by name and their checks; add a rule about an argument in `ops::rules` |
//! | [`backend`] | the EP group of each device: initialize, shutdown, the operations, and the engine that moves the rows; add an engine in `backend::engine` |
//! | [`memory`] | how much device memory a group takes |
//! | `symm_pool` | which bytes of which segment of symmetric memory are taken |
//! | `progress` | which calls each rank has made, for a rank that waits too long |
//! | `preflight` | checks, before a group is made, for what would make the libraries below abort or hang |
//! | [`diagnose`] | the same rules one by one, for `nvte-ep doctor` |
//! | [`reserve`] | the reserve of memory, for when malloc fails |
//! | [`sys`] | the loaded libraries |
//! | [`ffi`] | what the C surfaces share: types, tensors, the error boundary |
//! | `log` | what is written to stderr |
//! | `wait` | waits with a deadline, which also end when they are futile |
//! | `atomic` | atomics as the models of `qa/models` see them |
//!
//! `docs/architecture.md` shows the way of a call, and has the steps of each addition.

#[cfg(panic = "abort")]
compile_error!("nvte-ep needs panic = \"unwind\": its error boundary turns panics into C++ exceptions");

mod atomic;
pub mod backend;
pub mod config;
pub mod diagnose {
    //! What a machine has for expert parallelism, by the rules of `nvte_ep_initialize`, each by itself.
    pub use crate::preflight::host_id;
    pub use crate::preflight::report::{Finding, Level, report};
}
pub mod dtype;
pub mod env;
pub mod error;
pub mod ffi;
pub mod limits;
mod log;
pub mod memory;
pub mod ops;
pub mod options;
mod preflight;
mod progress;
pub mod reserve;
mod symm_pool;
pub mod sys;
pub mod tensor;
mod wait;
