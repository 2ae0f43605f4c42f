//! Parameters on their way through a caller's buffer.

use crate::store::Array;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::types::NVTEBasicTensor;
use std::ffi::c_void;

/// A parameter's value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Array(Array),
    /// One byte, 0 or 1.
    Flag(bool),
    Byte(u8),
    Int(i32),
    Float(f32),
    /// An object, as callers hold it.
    Handle(usize),
}

impl Value {
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::Array(_) => size_of::<NVTEBasicTensor>(),
            Self::Flag(_) | Self::Byte(_) => size_of::<u8>(),
            Self::Int(_) | Self::Float(_) => size_of::<i32>(),
            Self::Handle(_) => size_of::<usize>(),
        }
    }

    /// The value in a caller's buffer, of the kind that `self` has.
    ///
    /// # Safety
    /// `buf` is null, or has `size` readable bytes. It need not be aligned.
    pub(crate) unsafe fn read(self, buf: *const c_void, size: usize) -> Result<Self> {
        require_pointer("buf", buf, 1)?;
        require_size(size, self.size())?;
        Ok(match self {
            // SAFETY: as many bytes are there.
            Self::Array(_) => Self::Array(unsafe { buf.cast::<NVTEBasicTensor>().read_unaligned() }.into()),
            // SAFETY: as above.
            Self::Flag(_) => Self::Flag(unsafe { buf.cast::<u8>().read() } != 0),
            // SAFETY: as above.
            Self::Byte(_) => Self::Byte(unsafe { buf.cast::<u8>().read() }),
            // SAFETY: as above.
            Self::Int(_) => Self::Int(unsafe { buf.cast::<i32>().read_unaligned() }),
            // SAFETY: as above.
            Self::Float(_) => Self::Float(unsafe { buf.cast::<f32>().read_unaligned() }),
            // SAFETY: as above.
            Self::Handle(_) => Self::Handle(unsafe { buf.cast::<usize>().read_unaligned() }),
        })
    }

    /// Writes the value to `buf` unless that is null, and its size to `size_written` unless that is null.
    ///
    /// # Safety
    /// `buf` is null, or has `size` writable bytes; `size_written` is null or writable.
    pub(crate) unsafe fn give(self, buf: *mut c_void, size: usize, size_written: *mut usize) -> Result<()> {
        if !buf.is_null() {
            require_size(size, self.size())?;
            match self {
                // SAFETY: as many bytes are there.
                Self::Array(array) => unsafe { buf.cast::<NVTEBasicTensor>().write_unaligned(array.into()) },
                // SAFETY: as above.
                Self::Flag(flag) => unsafe { buf.cast::<u8>().write(flag.into()) },
                // SAFETY: as above.
                Self::Byte(byte) => unsafe { buf.cast::<u8>().write(byte) },
                // SAFETY: as above.
                Self::Int(number) => unsafe { buf.cast::<i32>().write_unaligned(number) },
                // SAFETY: as above.
                Self::Float(number) => unsafe { buf.cast::<f32>().write_unaligned(number) },
                // SAFETY: as above.
                Self::Handle(handle) => unsafe { buf.cast::<usize>().write_unaligned(handle) },
            }
        }
        if !size_written.is_null() {
            // SAFETY: the caller vouches for it.
            unsafe { size_written.write(self.size()) };
        }
        Ok(())
    }
}

pub(crate) fn require_pointer<T>(argument: &'static str, pointer: *const T, count: usize) -> Result<()> {
    if count > 0 && pointer.is_null() { Err(Error::argument(argument, "must not be NULL", "NULL")) } else { Ok(()) }
}

fn require_size(found: usize, needed: usize) -> Result<()> {
    if found >= needed {
        return Ok(());
    }
    Err(Error::argument("size_in_bytes", format!("must be at least the parameter's size, {needed}"), found))
}
