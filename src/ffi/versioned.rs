//! C structures that begin with their own size, so that later versions can append fields.

use crate::error::{Error, Result};

/// A structure whose first field is `size_t struct_size`.
///
/// # Safety
/// The type is `repr(C)`, starts with a `usize`, and all zero bytes are a valid value of it.
pub unsafe trait Versioned: Copy {
    /// Size of the first published layout; what a `struct_size` of 0 means.
    const BASE_SIZE: usize;
}

/// Reads what `pointer` points to: as many bytes as its `struct_size` says, at most what we know, zero beyond.
///
/// # Errors
/// A null pointer, or a size below the first layout's; `argument` names the C argument.
///
/// # Safety
/// `pointer` is null, or points to `struct_size` readable bytes, and to [`Versioned::BASE_SIZE`] where that is 0.
pub unsafe fn read_versioned<T: Versioned>(argument: &str, pointer: *const T) -> Result<T> {
    if pointer.is_null() {
        return Err(Error::argument(argument, "must not be NULL", "NULL"));
    }
    // SAFETY: not null, and the caller vouches for the first field.
    let bytes = match unsafe { pointer.cast::<usize>().read_unaligned() } {
        0 => T::BASE_SIZE,
        size if size >= T::BASE_SIZE => size.min(size_of::<T>()),
        size => {
            let required = format!("must be 0 or at least {}", T::BASE_SIZE);
            return Err(Error::argument(format!("{argument}->struct_size"), required, size)
                .with_remedy("initialize the structure with its NVTE_EP_..._CONFIG_INIT"));
        }
    };
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the caller vouches for `bytes` readable bytes, and `value` has room for them.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), bytes) };
    // SAFETY: zero bytes are a valid value, and the copied ones are the caller's value.
    Ok(unsafe { value.assume_init() })
}

/// Writes `value` to a caller's structure: as many bytes as its `struct_size` says, at most what we know; the size stays.
///
/// # Errors
/// A null pointer, or a size below the first layout's; `argument` names the C argument.
///
/// # Safety
/// `pointer` is null, or points to as many writable bytes as its `struct_size` says.
pub unsafe fn write_versioned<T: Versioned>(argument: &str, pointer: *mut T, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::argument(argument, "must not be NULL", "NULL"));
    }
    // SAFETY: not null, and the caller vouches for the first field.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if size < T::BASE_SIZE {
        let required = format!("must be at least {}", T::BASE_SIZE);
        return Err(Error::argument(format!("{argument}->struct_size"), required, size)
            .with_remedy("set it to the structure's sizeof before the call"));
    }
    let bytes = size.min(size_of::<T>());
    // SAFETY: the caller vouches for `size` writable bytes, and `value` has as many as are copied.
    unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), pointer.cast::<u8>(), bytes) };
    // SAFETY: not null, and the size is the first field.
    unsafe { pointer.cast::<usize>().write_unaligned(size) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Config {
        struct_size: usize,
        first: u64,
        later: u64,
    }

    // SAFETY: repr(C), integers, the size first.
    unsafe impl Versioned for Config {
        const BASE_SIZE: usize = 16;
    }

    fn read(struct_size: usize) -> Result<Config> {
        // Room behind the structure, for a caller whose version is newer than ours.
        let caller = [Config { struct_size, first: 1, later: 2 }, Config { struct_size: 99, first: 99, later: 99 }];
        // SAFETY: as many bytes as the sizes below say are there.
        unsafe { read_versioned("config", caller.as_ptr()) }
    }

    #[test]
    fn sizes() {
        for (struct_size, later) in [(0, 0), (16, 0), (24, 2), (24 + 8, 2), (24 + 24, 2)] {
            assert_eq!(read(struct_size).unwrap(), Config { struct_size, first: 1, later }, "{struct_size}");
        }
        for struct_size in [1, 8, 15] {
            let text = read(struct_size).unwrap_err().to_string();
            assert!(
                text.starts_with(&format!("config->struct_size must be 0 or at least 16, got {struct_size};")),
                "{text}"
            );
        }
        let mut callers = [Config { struct_size: 16, first: 9, later: 9 }; 2];
        let value = Config { struct_size: 24, first: 1, later: 2 };
        for (size, expected) in [(16, (1, 9)), (24, (1, 2)), (40, (1, 2))] {
            callers[0] = Config { struct_size: size, first: 9, later: 9 };
            // SAFETY: as many bytes as the sizes say are there.
            unsafe { write_versioned("usage", callers.as_mut_ptr(), value) }.unwrap();
            assert_eq!((callers[0].first, callers[0].later), expected);
            assert_eq!((callers[0].struct_size, callers[1].first), (size, 9), "nothing else is written");
        }
        callers[0].struct_size = 0;
        // SAFETY: as above.
        let text = unsafe { write_versioned("usage", callers.as_mut_ptr(), value) }.unwrap_err().to_string();
        assert!(text.starts_with("usage->struct_size must be at least 16, got 0; set it"), "{text}");
        // SAFETY: null is refused.
        let text = unsafe { read_versioned::<Config>("config", std::ptr::null()) }.unwrap_err().to_string();
        assert_eq!(text, "config must not be NULL, got NULL");
    }
}
