//! The checker's rules about the memory of tensors: where it is, and whether somebody has written it.

use nvte_ep_bindings::{cudaErrorInvalidValue, ncclInvalidArgument};

use crate::check;
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Span};
use crate::rule::Rule;
use crate::settings;

/// Fewer unwritten bytes than these may be a value that somebody wrote.
const UNWRITTEN_BYTES: usize = 16;

/// Checks where a tensor's memory is; `name` is its function and argument.
pub fn tensor_memory(name: &str, span: &Span, device: i32) -> Outcome<()> {
    let (address, bytes) = (span.address(), span.byte_len());
    if bytes == 0 {
        return Ok(());
    }
    match memory::find(address) {
        Some(there) if there.kind.on_device() && there.device != device => {
            let text = format!(
                "{name}: {address:#x} is memory of device {}, the communicator is on device {device}",
                there.device
            );
            check::breach(Rule::OtherDevice, text)
        }
        Some(_) => Ok(()),
        None => match memory::freed(address) {
            Some(there) => {
                let text = format!("{name}: {address:#x} is in {} bytes that have been freed", there.bytes);
                Err(Fault::both(cudaErrorInvalidValue, ncclInvalidArgument, text).breaks(Rule::FreedMemory))
            }
            None if settings::pageable_memory() => Ok(()),
            None => {
                let text = format!("{name}: {bytes} bytes at {address:#x} are pageable host memory");
                check::breach(Rule::DeviceMemory, text)
            }
        },
    }
}

/// Checks that rows which an operation reads have been written since their memory was allocated.
///
/// Only rows that hold what their allocation was filled with count, and only where they make up 16 bytes or all that is
/// read.
pub fn written(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) -> Outcome<()> {
    unwritten(name, span, row_bytes, rows).map_or(Ok(()), |found| check::breach(Rule::UnwrittenMemory, found))
}

/// As [`written`], but only a warning.
pub fn should_be_written(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) {
    if let Some(found) = unwritten(name, span, row_bytes, rows) {
        check::warn(Rule::UnwrittenMemory, found);
    }
}

/// What [`written`] finds.
fn unwritten(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) -> Option<String> {
    if row_bytes == 0 || !check::is_on() {
        return None;
    }
    let allocation = memory::find(span.address()).filter(|there| there.kind.on_device())?;
    let (mut first, mut run, mut all) = (None, 0usize, true);
    for row in rows {
        let offset = row * row_bytes;
        if !allocation.is_unwritten(span.address() + offset, span.view(offset, row_bytes)) {
            (first, run, all) = (None, 0, false);
            continue;
        }
        first.get_or_insert(row);
        run += row_bytes;
        if run >= UNWRITTEN_BYTES {
            all = true;
            break;
        }
    }
    first.filter(|_| all).map(|row| format!("{name}: row {row} is read, but nobody has written it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_rows_of_poison_are_unwritten() {
        let memory = memory::allocate(64, memory::Kind::Device, 0).unwrap();
        // SAFETY: the memory has 64 bytes, and only this test knows it.
        let span = unsafe { Span::new(memory, 64) }.unwrap();
        let judged = |row_bytes: usize, rows: &[usize]| {
            let found = written("f: a", &span, row_bytes, rows.iter().copied());
            found.map_err(|fault| fault.text)
        };
        let unwritten = |row: usize| Err(format!("f: a: row {row} is read, but nobody has written it"));
        assert_eq!(judged(16, &[2]), unwritten(2));
        assert_eq!(judged(16, &[]), Ok(()));
        assert_eq!(judged(4, &[7]), unwritten(7));
        span.fill(0, 1, 0);
        span.fill(32, 1, 0);
        assert_eq!(judged(16, &[0, 2]), Ok(()));
        assert_eq!(judged(16, &[0, 1]), unwritten(1));
        // Rows of 4 bytes: 1, 2 and 3 are 12 bytes beside a written one.
        assert_eq!(judged(4, &[0, 1, 2, 3]), Ok(()));
        assert_eq!(judged(4, &[0, 1, 2, 3, 4]), unwritten(1));
        assert_eq!(judged(4, &[8, 9]), Ok(()));
        assert_eq!(judged(4, &[9]), unwritten(9));
        memory::release(memory::forget(memory as usize, memory::Kind::on_device).unwrap());
    }
}
