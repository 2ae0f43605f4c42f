//! The floating-point environment: sums here do not depend on the rounding, the flushing of denormals or the traps that the
//! program has set for its own threads, as on a GPU they do not.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

/// `FE_DFL_ENV` of glibc and musl.
const DEFAULT: *const c_void = ptr::without_provenance(usize::MAX);

unsafe extern "C" {
    fn fegetenv(environment: *mut c_void) -> c_int;
    fn fesetenv(environment: *const c_void) -> c_int;
}

/// Gives the calling thread the default environment.
pub fn reset() {
    // SAFETY: the constant of `<fenv.h>`.
    unsafe { fesetenv(DEFAULT) };
}

/// The default environment on the calling thread for as long as this lives, then the old one.
pub struct DefaultEnvironment(MaybeUninit<[u64; 8]>);

impl std::fmt::Debug for DefaultEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DefaultEnvironment")
    }
}

impl DefaultEnvironment {
    /// Keeps the environment of the calling thread.
    pub fn enter() -> Self {
        let mut kept = MaybeUninit::<[u64; 8]>::uninit();
        // SAFETY: a `fenv_t` has 32 bytes at most on the platforms of this library.
        unsafe { fegetenv(kept.as_mut_ptr().cast()) };
        reset();
        Self(kept)
    }
}

impl Drop for DefaultEnvironment {
    fn drop(&mut self) {
        // SAFETY: filled by `fegetenv` on this thread: the value is bound to a scope of one.
        unsafe { fesetenv(self.0.as_ptr().cast()) };
    }
}
