//! For the host runtime's reports: which function and arguments of ours a call of NCCL EP serves.

use crate::sys::SetCaller;
use crate::tensor::TensorView;
use std::ffi::CString;

/// What a call of NCCL EP serves, said while this lives.
pub(super) struct Caller(Option<SetCaller>);

impl Caller {
    /// `arguments` are NCCL EP's names with our tensors. Without the host runtime's `set` there is nobody to tell.
    #[inline]
    pub(super) fn tell(set: Option<SetCaller>, function: &str, arguments: &[(&str, Option<&TensorView>)]) -> Self {
        if let Some(set) = set {
            let mut names = function.to_owned();
            for (theirs, own) in arguments {
                if let Some(own) = own {
                    names.extend([" ", *theirs, "=", own.name]);
                    if own.scales.is_some() {
                        names.extend([" ", &theirs.replace("tokens", "scales"), "=", own.name, ".scale_inv"]);
                    }
                }
            }
            let names = CString::new(names).unwrap_or_default();
            // SAFETY: a string, which the function copies.
            unsafe { set(names.as_ptr()) };
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
