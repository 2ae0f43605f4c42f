//! Which bytes of which registered segment of symmetric memory are taken. Every rank makes
//! the same calls in the same order and so gets the same offsets; [`SymmPool::history`] shows whether it did.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::tensor::Window;
use std::collections::BTreeMap;

/// Allocations start at multiples of this: what handle memory needs, and more than rows do.
const ALIGNMENT: u64 = 256;

/// Segments are multiples of this, the granularity of device memory that peers can map.
const SEGMENT_ALIGNMENT: u64 = 2 << 20;

/// Memory that is registered as one window.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Region {
    bytes: u64,
    window: usize,
    /// Which registration of the group this was, from 1: the same number on every rank.
    number: u64,
    /// Offset and length of what is free, in a segment of the pool; none for memory that a caller owns.
    free: Option<BTreeMap<u64, u64>>,
    /// Offset and length of what is handed out.
    live: BTreeMap<u64, u64>,
}

/// What [`SymmPool::plan`] finds for a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Room at `offset` of the segment that starts at `base`.
    Fits {
        /// Address of the segment.
        base: u64,
        /// Offset in it.
        offset: u64,
    },
    /// A segment of so many bytes has to be made first.
    Grow {
        /// Its size.
        bytes: u64,
    },
}

/// An address in symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SymmetricAddress {
    /// The address.
    pub address: u64,
    /// Where that is on every rank.
    pub window: Window,
    /// Bytes from there to the end of the allocation.
    pub room: u64,
}

/// What a pool holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Bytes of all segments.
    pub reserved: u64,
    /// Bytes handed out.
    pub in_use: u64,
    /// Most bytes that were ever handed out at a time.
    pub peak: u64,
    /// Number of live allocations.
    pub allocations: u64,
    /// Number of segments.
    pub segments: u64,
    /// Number of callers' pieces of memory that are registered.
    pub registered: u64,
}

/// Segments of the library and registered memory of callers, by address.
#[derive(Debug, Default)]
pub struct SymmPool {
    regions: BTreeMap<u64, Region>,
    /// Addresses of the segments in the order in which they were made, which is the same on every rank.
    order: Vec<u64>,
    smallest_segment: u64,
    history: u64,
    registrations: u64,
    peak: u64,
}

impl SymmPool {
    /// An empty pool whose segments have at least `smallest_segment` bytes.
    #[must_use]
    pub fn new(smallest_segment: u64) -> Self {
        Self { smallest_segment, ..Self::default() }
    }

    /// A digest of everything that was done so far: equal on ranks that did the same.
    #[must_use]
    pub fn history(&self) -> u64 {
        self.history
    }

    /// FNV-1a, which is the same wherever it is compiled: ranks compare what comes out.
    fn note(&mut self, what: &str, numbers: &[u64]) {
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        for byte in what.bytes().chain(numbers) {
            self.history = (self.history ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }

    /// Where `bytes` bytes would go: the smallest hole that holds them, in the oldest segment of such.
    ///
    /// # Errors
    /// No bytes, or more than there can be.
    pub fn plan(&self, bytes: u64) -> Result<Plan> {
        let wanted = size(bytes)?;
        let holes = self.order.iter().enumerate().flat_map(|(age, base)| {
            let free = self.regions.get(base).and_then(|region| region.free.as_ref());
            free.into_iter().flatten().map(move |(offset, length)| (*length, age, *offset, *base))
        });
        let best = holes.filter(|(length, ..)| *length >= wanted).min();
        Ok(match best {
            Some((_, _, offset, base)) => Plan::Fits { base, offset },
            None => Plan::Grow { bytes: wanted.max(self.smallest_segment).next_multiple_of(SEGMENT_ALIGNMENT) },
        })
    }

    /// Adds a segment that was allocated at `base` and registered as `window`.
    pub fn add_segment(&mut self, base: u64, bytes: u64, window: usize) {
        let free = Some(BTreeMap::from([(0, bytes)]));
        self.registrations += 1;
        let region = Region { bytes, window, number: self.registrations, free, live: BTreeMap::new() };
        self.regions.insert(base, region);
        self.order.push(base);
        self.note("segment", &[bytes]);
    }

    /// Hands out `bytes` bytes where [`SymmPool::plan`] found room for them.
    ///
    /// # Errors
    /// As there; or there is no such room any more.
    pub fn take(&mut self, bytes: u64) -> Result<SymmetricAddress> {
        let wanted = size(bytes)?;
        let Plan::Fits { base, offset } = self.plan(bytes)? else {
            return Err(Error::Internal("an allocation without a segment for it".into()));
        };
        let region = self.regions.get_mut(&base).expect("plan found it");
        let free = region.free.as_mut().expect("plan looks at segments");
        let length = free.remove(&offset).expect("plan found it");
        if length > wanted {
            free.insert(offset + wanted, length - wanted);
        }
        region.live.insert(offset, wanted);
        let window = Window::new(region.window, offset).expect("a segment has a window");
        self.note("take", &[bytes]);
        self.peak = self.peak.max(self.statistics().in_use);
        Ok(SymmetricAddress { address: base + offset, window, room: wanted })
    }

    /// Takes back what [`SymmPool::take`] handed out at `address`.
    ///
    /// # Errors
    /// An address that it did not hand out, or that was given back already.
    pub fn give_back(&mut self, address: u64) -> Result<()> {
        let refuse = |found: String| {
            Err(Error::argument(
                "ptr",
                "must be an address that nvte_ep_ext_symm_alloc returned, not freed since",
                found,
            ))
        };
        let Some((base, region)) = self.regions.range_mut(..=address).next_back() else {
            return refuse(format!("{address:#x}"));
        };
        let (base, offset) = (*base, address - base);
        let Some(free) = region.free.as_mut().filter(|_| offset < region.bytes) else {
            return refuse(format!("{address:#x}, which is not in the pool"));
        };
        let Some(mut length) = region.live.remove(&offset) else {
            return refuse(format!("{address:#x}, where no allocation starts"));
        };
        // Neighbouring holes become one.
        let mut start = offset;
        if let Some(after) = free.remove(&(offset + length)) {
            length += after;
        }
        if let Some((before, bytes)) = free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + bytes == offset
        {
            (start, length) = (before, length + bytes);
        }
        free.insert(start, length);
        let age = self.order.iter().position(|segment| *segment == base);
        self.note("give back", &[age.map_or(u64::MAX, |age| age as u64), offset]);
        Ok(())
    }

    /// Adds a caller's memory at `base`, registered as `window`.
    pub fn add_registered(&mut self, base: u64, bytes: u64, window: usize) {
        self.registrations += 1;
        let live = BTreeMap::from([(0, bytes)]);
        let region = Region { bytes, window, number: self.registrations, free: None, live };
        self.regions.insert(base, region);
        self.note("register", &[bytes]);
    }

    /// # Errors
    /// Memory that overlaps what is registered already.
    pub fn check_unregistered(&self, base: u64, bytes: u64) -> Result<()> {
        let end = base.saturating_add(bytes);
        match self.regions.range(..end).next_back() {
            Some((at, region)) if at + region.bytes > base => Err(Error::argument(
                "ptr",
                "must be memory that is not registered yet",
                format!("[{base:#x}, {end:#x}), and [{at:#x}, {:#x}) is registered", at + region.bytes),
            )),
            _ => Ok(()),
        }
    }

    /// The window of a caller's memory that starts at `base`, and which registration it was.
    ///
    /// # Errors
    /// An address where no such memory starts.
    pub fn registered(&self, base: u64) -> Result<(usize, u64)> {
        match self.regions.get(&base) {
            Some(Region { free: None, window, number, .. }) => Ok((*window, *number)),
            _ => {
                let required = "must be an address given to nvte_ep_ext_window_register, not deregistered since";
                Err(Error::argument("ptr", required, format!("{base:#x}")))
            }
        }
    }

    /// Forgets a caller's memory that starts at `base`.
    ///
    /// # Errors
    /// As [`SymmPool::registered`].
    pub fn remove_registered(&mut self, base: u64) -> Result<()> {
        let (_, number) = self.registered(base)?;
        self.regions.remove(&base);
        self.note("deregister", &[number]);
        Ok(())
    }

    /// What lies at `address`, if that is in a live allocation or in registered memory.
    #[must_use]
    pub fn place_of(&self, address: u64) -> Option<SymmetricAddress> {
        let (base, region) = self.regions.range(..=address).next_back()?;
        region.place(address, address - base)
    }

    /// What lies at a window's offset: none for a window that is not of this pool, an error for an offset that is outside
    /// of every live allocation of it.
    ///
    /// # Errors
    /// The found bounds, in words.
    pub fn place_in(&self, window: Window) -> std::result::Result<Option<SymmetricAddress>, String> {
        let Some((base, region)) = self.regions.iter().find(|(_, region)| region.window == window.handle()) else {
            return Ok(None);
        };
        match region.place(base.saturating_add(window.offset), window.offset) {
            Some(place) => Ok(Some(place)),
            None => Err(format!("{}, where the window of {} bytes holds no allocation", window.offset, region.bytes)),
        }
    }

    /// What the pool holds.
    #[must_use]
    pub fn statistics(&self) -> PoolStatistics {
        let mut found = PoolStatistics { peak: self.peak, ..PoolStatistics::default() };
        for region in self.regions.values() {
            if region.free.is_none() {
                found.registered += 1;
                continue;
            }
            found.segments += 1;
            found.reserved += region.bytes;
            found.in_use += region.live.values().sum::<u64>();
            found.allocations += region.live.len() as u64;
        }
        found
    }

    /// All windows with the segment behind each, none where the memory is a caller's; newest segments last.
    pub fn into_regions(self) -> impl Iterator<Item = (usize, Option<u64>)> {
        self.regions.into_iter().map(|(base, region)| (region.window, region.free.map(|_| base)))
    }
}

impl Region {
    fn place(&self, address: u64, offset: u64) -> Option<SymmetricAddress> {
        let (start, bytes) = self.live.range(..=offset).next_back()?;
        let room = (start + bytes).checked_sub(offset).filter(|room| *room > 0)?;
        Some(SymmetricAddress { address, window: Window::new(self.window, offset)?, room })
    }
}

/// `bytes` as a multiple of the alignment.
fn size(bytes: u64) -> Result<u64> {
    if (1..=1 << 50).contains(&bytes) {
        return Ok(bytes.next_multiple_of(ALIGNMENT));
    }
    Err(Error::argument("bytes", "must be 1 to 2^50", bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 4 << 20;

    fn pool() -> SymmPool {
        let mut pool = SymmPool::new(SEGMENT);
        pool.add_segment(0x1000_0000, SEGMENT, 7);
        pool
    }

    #[test]
    fn sub_allocations_of_one_segment() {
        let mut pool = pool();
        let places = [1, 256, 300, 1 << 20].map(|bytes| pool.take(bytes).unwrap());
        let offsets = places.map(|place| place.window.offset);
        assert_eq!(offsets, [0, 256, 512, 1024]);
        for place in places {
            assert_eq!(place.address, 0x1000_0000 + place.window.offset);
            assert_eq!(pool.place_of(place.address), Some(place));
            assert_eq!(pool.place_in(place.window), Ok(Some(place)));
        }
        let inside = pool.place_of(places[3].address + 4096).unwrap();
        assert_eq!((inside.window.offset, inside.room), (1024 + 4096, (1 << 20) - 4096));
        let statistics = pool.statistics();
        assert_eq!((statistics.in_use, statistics.allocations, statistics.segments), (1024 + (1 << 20), 4, 1));
        assert_eq!(pool.plan(SEGMENT).unwrap(), Plan::Grow { bytes: SEGMENT });
        assert_eq!(pool.plan(5 << 30).unwrap(), Plan::Grow { bytes: 5 << 30 });
        assert_eq!(pool.plan((5 << 30) + 1).unwrap(), Plan::Grow { bytes: (5 << 30) + SEGMENT_ALIGNMENT });
    }

    #[test]
    fn holes_are_joined_and_the_smallest_that_fits_is_used() {
        let mut pool = pool();
        let places: Vec<_> = (0..8).map(|_| pool.take(1024).unwrap()).collect();
        for hole in [0, 1, 3] {
            pool.give_back(places[hole].address).unwrap();
        }
        assert_eq!(pool.take(1024).unwrap().address, places[3].address, "rather than a part of the larger hole");
        assert_eq!(pool.take(2048).unwrap().address, places[0].address, "the two holes are one");
        for place in [&places[0], &places[3], &places[2], &places[4], &places[5], &places[6], &places[7]] {
            pool.give_back(place.address).unwrap();
        }
        assert_eq!(pool.statistics().in_use, 0);
        assert_eq!(pool.statistics().peak, 8 * 1024);
        assert_eq!(pool.take(SEGMENT).unwrap().room, SEGMENT, "all of it is one hole again");
    }

    #[test]
    fn what_was_not_handed_out_cannot_be_given_back() {
        let mut pool = pool();
        let place = pool.take(4096).unwrap();
        pool.add_registered(0x2000_0000, 8192, 9);
        for (address, found) in [
            (0x10, "got 0x10"),
            (place.address + 256, "where no allocation starts"),
            (0x1000_0000 + SEGMENT, "which is not in the pool"),
            (0x2000_0000, "which is not in the pool"),
        ] {
            let text = pool.give_back(address).unwrap_err().to_string();
            assert!(text.contains("not freed since, got") && text.contains(found), "{text}");
        }
        pool.give_back(place.address).unwrap();
        assert!(pool.give_back(place.address).unwrap_err().to_string().contains("where no allocation starts"));
        assert_eq!(pool.place_of(place.address), None, "freed");
        assert!(pool.place_in(place.window).unwrap_err().contains("holds no allocation"));
        assert!(pool.take(0).is_err() && pool.plan(u64::MAX).is_err());
    }

    #[test]
    fn registered_memory() {
        let mut pool = pool();
        pool.check_unregistered(0x2000_0000, 8192).unwrap();
        pool.add_registered(0x2000_0000, 8192, 9);
        for (base, bytes) in [(0x2000_0000, 1), (0x1FFF_FFFF, 2), (0x2000_1FFF, 10), (0x1000_0000, 1)] {
            assert!(pool.check_unregistered(base, bytes).is_err(), "{base:#x}");
        }
        pool.check_unregistered(0x2000_2000, 8192).unwrap();
        let place = pool.place_of(0x2000_0100).unwrap();
        assert_eq!((place.window, place.room), (Window::new(9, 0x100).unwrap(), 8192 - 0x100));
        assert_eq!(pool.statistics().registered, 1);
        assert!(pool.remove_registered(0x1000_0000).is_err(), "the pool's own");
        assert_eq!(pool.registered(0x2000_0000).unwrap().0, 9);
        let (_, number) = pool.registered(0x2000_0000).unwrap();
        assert_eq!(number, pool.registrations, "the latest");
        pool.remove_registered(0x2000_0000).unwrap();
        assert!(pool.remove_registered(0x2000_0000).is_err());
        assert_eq!(pool.place_of(0x2000_0100), None);
        assert_eq!(pool.place_in(Window::new(9, 0).unwrap()), Ok(None));
    }

    #[test]
    fn histories_tell_ranks_apart() {
        // The same calls at other addresses, as on another rank.
        let run = |bases: [u64; 2], last: u64| {
            let mut pool = SymmPool::new(SEGMENT);
            pool.add_segment(bases[0], SEGMENT, 1);
            pool.add_segment(bases[1], SEGMENT, 2);
            let first = pool.take(SEGMENT).unwrap();
            let second = pool.take(1024).unwrap();
            pool.give_back(first.address).unwrap();
            assert_eq!(second.window.handle(), 2, "the segments' order decides, not their addresses");
            pool.take(last).unwrap();
            pool.history()
        };
        assert_eq!(run([0x100_0000, 0x900_0000], 64), run([0x900_0000, 0x100_0000], 64));
        assert_ne!(run([0x100_0000, 0x900_0000], 64), run([0x100_0000, 0x900_0000], 65));
    }

    /// Random calls against a plain list of who owns which bytes.
    #[test]
    fn allocations_never_overlap() {
        let mut pool = SymmPool::new(SEGMENT);
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut state = 12345u64;
        let mut next = |limit: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % limit
        };
        let mut base = 0x1000_0000;
        for _ in 0..4000 {
            if next(5) < 3 || live.is_empty() {
                let most = if next(20) == 0 { SEGMENT } else { 9000 };
                let bytes = 1 + next(most);
                if let Plan::Grow { bytes } = pool.plan(bytes).unwrap() {
                    pool.add_segment(base, bytes, base as usize);
                    base += bytes + 4096;
                }
                let place = pool.take(bytes).unwrap();
                let overlaps =
                    |(start, length): &(u64, u64)| place.address < start + length && *start < place.address + bytes;
                assert!(!live.iter().any(overlaps) && place.address.is_multiple_of(ALIGNMENT) && place.room >= bytes);
                live.push((place.address, bytes));
            } else {
                let (address, _) = live.swap_remove(next(live.len() as u64) as usize);
                pool.give_back(address).unwrap();
            }
        }
        assert_eq!(pool.statistics().allocations, live.len() as u64);
        for (address, _) in live {
            pool.give_back(address).unwrap();
        }
        let free: Vec<_> = pool.regions.values().map(|region| region.free.as_ref().unwrap().len()).collect();
        assert!(free.iter().all(|holes| *holes == 1), "every segment is one hole again: {free:?}");
    }
}
