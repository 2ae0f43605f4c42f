//! What the library that this is compiled into does about a lack of memory. It is not in the core, so that Rust programs over
//! the core have their own allocator.

use std::ffi::c_char;

#[global_allocator]
static MEMORY: nvte_ep_core::reserve::Reserve = nvte_ep_core::reserve::Reserve;

unsafe extern "C" {
    static nvte_ep_shim_keeps_thread_exits: c_char;
}

/// Brings `shim/thread_exit.cc` into the library.
#[used]
static THREAD_EXITS: &c_char = {
    // SAFETY: only its address is taken.
    unsafe { &nvte_ep_shim_keeps_thread_exits }
};
