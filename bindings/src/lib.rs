//! Types and prototypes of the CUDA driver, the CUDA runtime, NCCL and NCCL EP.
//!
//! `generated.rs` is bindgen's output over the headers of the PyPI wheels that `qa/wheels.sh` pins; it is committed so
//! that a build needs neither libclang nor the wheels. `cargo run -p nvte-ep-codegen -- bindings` rewrites it and
//! `--check` compares. C enums are plain integers, so a value that a newer library returns is data, not undefined behaviour.
//! The prototypes are never linked: they give the loader's function tables something to be type-checked against.

#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "generated from C headers"
)]
mod generated;
pub use generated::*;

/// `magic` of every NCCL EP configuration and in/out structure (nccl_ep.h, `NCCL_EP_MAGIC`).
pub const EP_STRUCT_MAGIC: u32 = 0xC00F_FFEE;
/// `magic` of a tensor descriptor that its caller built (nccl_ep.h, static tensor initialiser).
pub const EP_TENSOR_MAGIC: u32 = 0xCAFE_CAFE;
