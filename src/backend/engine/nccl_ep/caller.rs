//! For the host runtime's reports: which function and arguments of ours a call of NCCL EP serves.

use crate::sys::SetCaller;
use crate::tensor::TensorView;
use std::io::Write as _;

/// What a call of NCCL EP serves, said while this lives.
pub(super) struct Caller(Option<SetCaller>);

/// Room for the names of any call, so that telling them allocates nothing.
const BYTES: usize = 512;

/// `FUNCTION THEIRS=OWN ...`, without the zero at the end.
fn write_names(mut text: &mut [u8], function: &str, arguments: &[(&str, Option<&TensorView>)]) {
    let mut write = |parts: &[&str]| {
        let written = parts.iter().try_for_each(|part| text.write_all(part.as_bytes()));
        debug_assert!(written.is_ok(), "{function}: the names take more room");
    };
    write(&[function]);
    for (theirs, own) in arguments {
        let Some(own) = own else { continue };
        write(&[" ", theirs, "=", own.name]);
        if let Some(payload) = theirs.strip_suffix("tokens").filter(|_| own.scales.is_some()) {
            write(&[" ", payload, "scales=", own.name, ".scale_inv"]);
        }
    }
}

#[cold]
fn say(set: SetCaller, function: &str, arguments: &[(&str, Option<&TensorView>)]) {
    let mut text = [0; BYTES];
    write_names(&mut text[..BYTES - 1], function, arguments);
    // SAFETY: a string that ends with a zero, which the function copies.
    unsafe { set(text.as_ptr().cast()) };
}

impl Caller {
    /// `arguments` gives NCCL EP's names with our tensors. It is not asked without the host runtime's `set`: then there is nobody to
    /// tell.
    #[inline]
    pub(super) fn tell<'a, const N: usize>(
        set: Option<SetCaller>,
        function: &str,
        arguments: impl FnOnce() -> [(&'static str, Option<&'a TensorView>); N],
    ) -> Self {
        if let Some(set) = set {
            say(set, function, &arguments());
        }
        Self(set)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(set) = self.0 {
            // SAFETY: null is allowed.
            unsafe { set(std::ptr::null()) };
        }
    }
}
