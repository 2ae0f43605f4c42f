//! The loaded libraries: one typed table of function pointers each, filled once by dlopen and never unloaded.
//!
//! Nothing is linked at build time, so the library builds and loads on any machine; a missing library or symbol is an
//! [`Error::Load`] at initialize. With `NVTE_EP_RUNTIME=host` all tables come from one
//! library, the host runtime, and everything above is the same code.

pub mod cuda;
mod foreign;
mod load;
pub(crate) mod module;
pub mod nccl;
pub mod nccl_ep;
pub mod nvtx;
pub(crate) mod thread;

pub use foreign::catch_foreign;
pub(crate) use load::{
    NCCL_PREFIXES, ancestors, driver_library, host_library, incomplete, keep, loaded_nccls, nccl_candidates,
    nccl_ep_library, nccl_library, provider_of, site_packages,
};
pub use load::{NcclEpLibrary, SetCaller, file_of, own_directories};

use crate::env::{Env, RuntimeKind};
use crate::error::{Error, Result};
use once_cell::sync::OnceCell;
use std::ffi::c_int;
use std::path::PathBuf;

/// Declares a table of function pointers and its constructor from a loaded library. A symbol after `required` that the
/// library lacks fails the constructor; one after `optional` is `None`. Every signature is type-checked against the
/// prototype that bindgen read from the real header.
///
/// After `unchecked` there is no prototype: qa/L0_abi compares those functions with their header instead.
macro_rules! fn_table {
    (
        $(#[$meta:meta])*
        pub struct $Table:ident, abi $abi:literal;
        required { $( $r:ident : fn($($ra:ty),*) $(-> $rr:ty)?; )* }
        optional { $( $o:ident : fn($($oa:ty),*) $(-> $or:ty)?; )* }
    ) => {
        $crate::sys::fn_table! {
            $(#[$meta])*
            pub struct $Table, abi $abi;
            unchecked
            required { $( $r : fn($($ra),*) $(-> $rr)?; )* }
            optional { $( $o : fn($($oa),*) $(-> $or)?; )* }
        }

        impl $Table {
            // Generic, so that it is type-checked and never compiled to code: the libraries are not linked.
            #[allow(dead_code, clippy::extra_unused_type_parameters, reason = "its type check is its work")]
            fn matches_prototypes<Never>() {
                $( let _: unsafe extern $abi fn($($ra),*) $(-> $rr)? = nvte_ep_bindings::$r; )*
                $( let _: unsafe extern $abi fn($($oa),*) $(-> $or)? = nvte_ep_bindings::$o; )*
            }
        }
    };
    (
        $(#[$meta:meta])*
        pub struct $Table:ident, abi $abi:literal;
        unchecked
        required { $( $r:ident : fn($($ra:ty),*) $(-> $rr:ty)?; )* }
        optional { $( $o:ident : fn($($oa:ty),*) $(-> $or:ty)?; )* }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case, missing_docs, reason = "fields carry the C functions' names")]
        #[derive(Debug, Clone)]
        pub struct $Table {
            $( pub $r: unsafe extern $abi fn($($ra),*) $(-> $rr)?, )*
            $( pub $o: Option<unsafe extern $abi fn($($oa),*) $(-> $or)?>, )*
        }

        impl $Table {
            pub(crate) fn from_library(library: &libloading::Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the symbol is the C function of this name, whose prototype `matches_prototypes` checks.
                    $( $r: unsafe { *library.get(concat!(stringify!($r), "\0").as_bytes())? }, )*
                    // SAFETY: as above.
                    $( $o: unsafe { library.get(concat!(stringify!($o), "\0").as_bytes()) }.ok().map(|symbol| *symbol), )*
                })
            }
        }
    };
}
pub(crate) use fn_table;

/// CUDA and NCCL, the libraries that a caller's program has too.
#[derive(Debug)]
pub struct Base {
    /// Which runtime stands behind the tables.
    pub runtime: RuntimeKind,
    /// The CUDA driver.
    pub cuda: cuda::Cuda,
    /// NCCL.
    pub nccl: nccl::Nccl,
    /// The file NCCL was loaded from, where the loader tells.
    pub nccl_path: Option<PathBuf>,
    /// On the host runtime: the simulated machine of a rank of so many, or -1.
    pub host_machine: Option<unsafe extern "C" fn(c_int, c_int) -> c_int>,
}

static BASE: OnceCell<Base> = OnceCell::new();

/// What [`base`] loaded before, if it did.
pub(crate) fn loaded_base() -> Option<&'static Base> {
    BASE.get()
}

/// CUDA and NCCL of the runtime that `env` asks for, loaded at the first successful call and kept for the process.
///
/// # Errors
/// [`Error::Load`]; or [`Error::State`] when the process already uses the other runtime.
pub fn base(env: &Env) -> Result<&'static Base> {
    let base = BASE.get_or_try_init(|| load::base(env))?;
    if base.runtime == env.runtime {
        return Ok(base);
    }
    Err(Error::State(format!(
        "NVTE_EP_RUNTIME={} asks for another runtime than this process uses already ({}): choose it before the first \
         call and keep it",
        env.runtime.name(),
        base.runtime.name()
    )))
}

/// NCCL EP for the NCCL of `base`, loaded at the first successful call and kept for the process.
///
/// # Errors
/// [`Error::Load`] with every place tried.
pub fn nccl_ep(base: &Base, env: &Env) -> Result<&'static NcclEpLibrary> {
    static NCCL_EP: OnceCell<NcclEpLibrary> = OnceCell::new();
    NCCL_EP.get_or_try_init(|| load::nccl_ep(base, env))
}
