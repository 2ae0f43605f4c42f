//! Where the memory of tensors is: NCCL EP's kernels fault, or abort the process, on memory that the device cannot reach or
//! that ends too early. The driver is asked once for each allocation; later calls find the answer here. Freed memory
//! is noticed only if another allocation is at its address now; then the driver is asked again.

use crate::error::{Error, Result};
use crate::sys::cuda::{Cuda, MemoryKind};
use crate::tensor::TensorView;
use std::collections::BTreeMap;

/// So many ranges are remembered; then all are forgotten.
const MOST: usize = 4096;

/// Memory that was found fit, as ranges of addresses.
#[derive(Debug)]
pub(super) struct Residency {
    device: i32,
    /// First address -> the address behind the last, and whether it is page-locked host memory.
    ranges: BTreeMap<u64, (u64, bool)>,
    /// The range of the last tensor: the next one is often there too.
    last: Range,
}

/// One range of addresses.
#[derive(Debug, Clone, Copy)]
struct Range {
    first: u64,
    end: u64,
    page_locked: bool,
}

impl Range {
    const NONE: Self = Self { first: 0, end: 0, page_locked: false };

    #[inline]
    fn holds(self, address: u64, bytes: u64, fit: Fit) -> bool {
        self.first <= address
            && address.checked_add(bytes).is_some_and(|wanted| wanted <= self.end)
            && !(self.page_locked && fit == Fit::OnDevice)
    }
}

/// What a tensor may lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    /// The group's device, or page-locked host memory.
    Reachable,
    /// The group's device.
    OnDevice,
}

impl Residency {
    pub(super) const fn new(device: i32) -> Self {
        Self { device, ranges: BTreeMap::new(), last: Range::NONE }
    }

    /// Checks that `bytes` bytes from the first element of `tensor` are memory that is `fit`.
    ///
    /// # Errors
    /// Memory of another kind or device, or an allocation that ends earlier.
    #[inline]
    pub(super) fn check(&mut self, cuda: &Cuda, tensor: &TensorView, bytes: u64, fit: Fit) -> Result<()> {
        if bytes == 0 || self.last.holds(tensor.data, bytes, fit) {
            return Ok(());
        }
        self.look_up(cuda, tensor, bytes, fit)
    }

    #[inline(never)]
    fn look_up(&mut self, cuda: &Cuda, tensor: &TensorView, bytes: u64, fit: Fit) -> Result<()> {
        match self.known(tensor.data, bytes, fit) {
            Some(range) => self.last = range,
            None => self.ask(cuda, tensor, bytes, fit)?,
        }
        Ok(())
    }

    fn known(&self, address: u64, bytes: u64, fit: Fit) -> Option<Range> {
        let (&first, &(end, page_locked)) = self.ranges.range(..=address).next_back()?;
        Some(Range { first, end, page_locked }).filter(|range| range.holds(address, bytes, fit))
    }

    #[cold]
    fn ask(&mut self, cuda: &Cuda, tensor: &TensorView, bytes: u64, fit: Fit) -> Result<()> {
        let (device, address) = (self.device, tensor.data);
        let refuse = |found: String| {
            let required = match fit {
                Fit::Reachable => {
                    format!("must lie in memory of the group's device, {device}, or in page-locked host memory")
                }
                Fit::OnDevice => format!("must lie in memory of the group's device, {device}"),
            };
            Err(Error::argument(tensor.name, required, found))
        };
        // Memory that was mapped piece by piece (expandable segments) is one range here.
        let mut first = address;
        let mut at = address;
        let (mut page_locked, mut whole) = (false, false);
        let wanted = address.saturating_add(bytes);
        while at < wanted {
            let Some(memory) = cuda.memory_at(at)?.filter(|_| !whole) else {
                if at == address {
                    return refuse(format!("{address:#x}, which CUDA does not know (pageable host memory, or freed)"));
                }
                let required = format!("must have the memory of its {bytes} bytes");
                let found = format!("{address:#x}, where an allocation ends after {}", at - address);
                return Err(Error::argument(tensor.name, required, found));
            };
            match memory.kind {
                MemoryKind::Device(there) if there != device => {
                    return refuse(format!("{address:#x}, memory of device {there}"));
                }
                MemoryKind::PageLocked if fit == Fit::OnDevice => {
                    return refuse(format!("{address:#x}, page-locked host memory"));
                }
                MemoryKind::PageLocked => page_locked = true,
                MemoryKind::Device(_) | MemoryKind::Managed => {}
            }
            whole = memory.whole;
            first = first.min(memory.start);
            // No range makes this stand still.
            at = memory.end.max(at + 1);
        }
        self.remember(first, at, page_locked);
        Ok(())
    }

    fn remember(&mut self, first: u64, end: u64, page_locked: bool) {
        if self.ranges.len() >= MOST {
            self.ranges.clear();
        }
        // What was there before is gone, or part of it.
        self.ranges.retain(|&at, (old, _)| at >= end || *old <= first);
        self.ranges.insert(first, (end, page_locked));
        self.last = Range { first, end, page_locked };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_remembered_and_replaced() {
        let mut memory = Residency::new(0);
        memory.remember(0x1000, 0x2000, false);
        memory.remember(0x3000, 0x4000, true);
        let known = |memory: &Residency, address, bytes, fit| memory.known(address, bytes, fit).is_some();
        assert!(known(&memory, 0x1000, 0x1000, Fit::OnDevice));
        assert!(known(&memory, 0x1fff, 1, Fit::Reachable));
        assert!(!known(&memory, 0x1000, 0x1001, Fit::Reachable), "it ends earlier");
        assert!(!known(&memory, 0x2000, 1, Fit::Reachable) && !known(&memory, 0xfff, 1, Fit::Reachable));
        assert!(known(&memory, 0x3800, 0x800, Fit::Reachable));
        assert!(!known(&memory, 0x3800, 0x800, Fit::OnDevice), "host memory is not the device's");
        assert!(!known(&memory, u64::MAX, 2, Fit::Reachable));

        memory.remember(0x1800, 0x3800, false);
        assert!(!known(&memory, 0x1000, 1, Fit::Reachable), "another allocation lies over a part of it now");
        assert!(!known(&memory, 0x3900, 1, Fit::Reachable));
        assert!(known(&memory, 0x1800, 0x2000, Fit::OnDevice));
        assert_eq!(memory.ranges.len(), 1);
        assert!(memory.last.holds(0x1800, 0x2000, Fit::OnDevice) && !memory.last.holds(0x1000, 1, Fit::Reachable));
    }

    #[test]
    fn no_more_than_so_many_are_remembered() {
        let mut memory = Residency::new(0);
        for i in 0..2 * MOST as u64 {
            memory.remember(i << 12, (i << 12) + 1, false);
        }
        assert!(memory.ranges.len() <= MOST && !memory.ranges.is_empty());
    }
}
