//! Every other function of the CUDA runtime and NCCL: each exists, so that programs which mention it start, and says that it
//! is not supported. `build.rs` makes them from `not_supported.txt`.

use std::collections::HashSet;
use std::sync::LazyLock;

use nvte_ep_bindings::{cudaErrorNotSupported, ncclInvalidUsage};
use parking_lot::Mutex;

use super::LAST_RUNTIME_ERROR;
use crate::{fault, line};

/// The functions, by name.
pub const NAMES: &str = include_str!("../../not_supported.txt");

/// Says so, once a function; gives the code that its interface has for it.
fn refuse(function: &'static str) -> u32 {
    static SAID: LazyLock<Mutex<HashSet<&'static str>>> = LazyLock::new(Mutex::default);
    let text = format!("{function}: not supported by the host runtime");
    if SAID.lock().insert(function) {
        fault::report(&text);
    }
    if function.starts_with("nccl") || function.starts_with("pnccl") {
        line::set_last_error(&text);
        return ncclInvalidUsage;
    }
    LAST_RUNTIME_ERROR.set(cudaErrorNotSupported);
    cudaErrorNotSupported
}

include!(concat!(env!("OUT_DIR"), "/not_supported.rs"));
