//! Device and pinned memory: host allocations that are tracked, so that a pointer's kind and bounds are known.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use nvte_ep_bindings::{
    cudaErrorHostMemoryAlreadyRegistered, cudaErrorIllegalAddress, cudaErrorInvalidValue, cudaErrorMemoryAllocation,
};
use parking_lot::Mutex;

use crate::fault::{Fault, Outcome};
use crate::machine;
use crate::rule::Rule;
use crate::sys::{self, FileId, Mapping};

/// Every second byte of fresh device memory; see `Allocation::poison`.
pub const POISON: u8 = 0xCB;
/// Bytes after which the content of fresh memory repeats.
const PATTERN_BYTES: usize = 16;

/// Kind of a tracked allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cudaMalloc`, `cudaMallocAsync`, `cuMemAlloc`.
    Device,
    /// `ncclMemAlloc`: device memory in a file that peers can map, page-aligned as windows require.
    Nccl,
    /// `cudaMallocHost`, `cudaHostAlloc`.
    Pinned,
    /// The caller's memory, under `cudaHostRegister`.
    Registered,
    /// `cudaMallocAsync` of a captured stream: device memory that belongs to the graph.
    Graph,
}

impl Kind {
    fn alignment(self) -> usize {
        match self {
            Kind::Device | Kind::Graph => 256,
            Kind::Nccl | Kind::Pinned => 4096,
            Kind::Registered => 1,
        }
    }

    /// Whether the memory counts as being on the device.
    pub fn on_device(self) -> bool {
        !matches!(self, Kind::Pinned | Kind::Registered)
    }

    /// Whether `cudaFree` and its like may return the memory.
    pub fn is_freed_by_callers(self) -> bool {
        matches!(self, Kind::Device | Kind::Nccl)
    }
}

/// A tracked allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// First address.
    pub base: usize,
    /// Bytes the caller asked for.
    pub bytes: usize,
    /// Who allocated it.
    pub kind: Kind,
    /// Device ordinal on which it was made.
    pub device: i32,
    /// Tells it from any other allocation of the process, at whatever address.
    pub id: u64,
}

impl Allocation {
    /// What the memory holds before anybody writes it: large negative numbers in every type, which differ between
    /// allocations, so that no value that a program writes is taken for unwritten.
    fn poison(&self) -> [u8; PATTERN_BYTES] {
        // The id, spread over all bits (the finaliser of SplitMix64).
        let mut bits = self.id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        let mut pattern = [POISON; PATTERN_BYTES];
        for (there, byte) in pattern.iter_mut().step_by(2).zip(bits.to_le_bytes()) {
            *there = byte;
        }
        pattern
    }

    /// Fills the memory with its poison.
    ///
    /// # Safety
    ///
    /// The memory is writable, and nobody uses it.
    unsafe fn fill_with_poison(&self) {
        let pattern = self.poison().repeat(4096 / PATTERN_BYTES);
        for start in (0..self.bytes).step_by(pattern.len()) {
            let bytes = pattern.len().min(self.bytes - start);
            let target = (self.base + start) as *mut u8;
            // SAFETY: inside the allocation, which is the caller's to give.
            unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), target, bytes) };
        }
    }

    /// Whether `bytes`, read at `address` inside the allocation, are what it held when it was made.
    pub fn is_unwritten(&self, address: usize, bytes: &[u8]) -> bool {
        let pattern = self.poison();
        let start = address - self.base;
        bytes.iter().enumerate().all(|(index, byte)| *byte == pattern[(start + index) % PATTERN_BYTES])
    }
}

/// Fills an allocation that starts at `base`, and that nobody uses, with its poison again.
pub fn poison_again(base: usize) {
    if let Some(allocation) = find(base).filter(|allocation| allocation.base == base) {
        // SAFETY: tracked memory is writable; whoever owns it says that nobody uses it.
        unsafe { allocation.fill_with_poison() };
    }
}

/// Ids are never given out twice; 0 is nobody's.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory that peers can map.
struct Shared {
    fd: OwnedFd,
    _map: Mapping,
}

static SHARED: LazyLock<Mutex<HashMap<usize, Shared>>> = LazyLock::new(Mutex::default);
static ALLOCATIONS: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());
static FREED: Mutex<Freed> = Mutex::new(Freed { list: VecDeque::new(), bytes: 0 });

/// Most bytes of freed memory that are held back.
const HELD_BACK: usize = 32 << 20;

/// Device memory that was freed lately and is held back from reuse, so that who still uses it is seen.
struct Freed {
    list: VecDeque<Allocation>,
    bytes: usize,
}

impl Freed {
    /// Adds an allocation and gives those that have to make room for it.
    fn add(&mut self, allocation: Allocation) -> Vec<Allocation> {
        self.list.push_back(allocation);
        self.bytes += allocation.bytes;
        let mut old = Vec::new();
        while self.bytes > HELD_BACK
            && let Some(first) = self.list.pop_front()
        {
            self.bytes -= first.bytes;
            old.push(first);
        }
        old
    }
}

/// The allocation that held `address` and was freed lately.
pub fn freed(address: usize) -> Option<Allocation> {
    let freed = FREED.lock();
    freed.list.iter().rev().find(|gone| (gone.base..gone.base + gone.bytes).contains(&address)).copied()
}

fn layout(bytes: usize, kind: Kind) -> Outcome<Layout> {
    Layout::from_size_align(bytes.max(1), kind.alignment())
        .map_err(|_| Fault::cuda(cudaErrorMemoryAllocation, format!("allocation of {bytes} bytes is too large")))
}

/// Allocates `bytes` bytes; device memory comes poisoned. Zero bytes give a null pointer, as in CUDA.
pub fn allocate(bytes: usize, kind: Kind, device: i32) -> Outcome<*mut c_void> {
    if bytes == 0 {
        return Ok(std::ptr::null_mut());
    }
    let (available, _) = machine::memory();
    if available != 0 && bytes > available {
        return Err(Fault::cuda(
            cudaErrorMemoryAllocation,
            format!("out of memory: {bytes} bytes asked for, {available} available to this process"),
        ));
    }
    let base = if kind == Kind::Nccl { allocate_shared(bytes)? } else { allocate_private(bytes, kind)? };
    let address = base.as_ptr() as usize;
    let allocation = Allocation { base: address, bytes, kind, device, id: next_id() };
    if kind.on_device() {
        // SAFETY: the range was just allocated with this size.
        unsafe { allocation.fill_with_poison() };
    } else {
        // SAFETY: as above.
        unsafe { base.write_bytes(0, bytes) };
    }
    ALLOCATIONS.lock().insert(address, allocation);
    Ok(base.as_ptr().cast())
}

fn allocate_private(bytes: usize, kind: Kind) -> Outcome<NonNull<u8>> {
    let layout = layout(bytes, kind)?;
    // SAFETY: the layout has a non-zero size.
    NonNull::new(unsafe { alloc(layout) })
        .ok_or_else(|| Fault::cuda(cudaErrorMemoryAllocation, format!("out of memory: {bytes} bytes asked for")))
}

fn allocate_shared(bytes: usize) -> Outcome<NonNull<u8>> {
    let failed = |error: std::io::Error| {
        let text = format!("out of shared memory: {bytes} bytes asked for: {error}");
        Fault::cuda(cudaErrorMemoryAllocation, text)
    };
    let fd = sys::memfd("nvte-ep-window").map_err(failed)?;
    sys::reserve(fd.as_fd(), bytes).map_err(failed)?;
    let map = Mapping::shared(fd.as_fd(), bytes).map_err(failed)?;
    let base = map.base();
    SHARED.lock().insert(base as usize, Shared { fd, _map: map });
    NonNull::new(base).ok_or_else(|| failed(std::io::Error::other("mapped at address zero")))
}

/// Descriptor number in this process, and the file behind it, of an `ncclMemAlloc` allocation that starts at `base`.
pub fn shared_file(base: usize) -> Option<(u32, FileId)> {
    let shared = SHARED.lock();
    let fd = &shared.get(&base)?.fd;
    Some((fd.as_raw_fd() as u32, FileId::of(fd.as_fd()).ok()?))
}

/// Stops tracking the allocation that starts at `address`; the caller then owns the memory and calls [`release`].
pub fn forget(address: usize, accept: impl Fn(Kind) -> bool) -> Outcome<Allocation> {
    let mut allocations = ALLOCATIONS.lock();
    match allocations.get(&address) {
        Some(allocation) if accept(allocation.kind) => {
            let allocation = *allocation;
            allocations.remove(&address);
            Ok(allocation)
        }
        Some(allocation) => Err(Fault::cuda(
            cudaErrorInvalidValue,
            format!("{address:#x} is {:?} memory and belongs to another free function", allocation.kind),
        )),
        None => Err(Fault::cuda(cudaErrorInvalidValue, format!("{address:#x} is not the start of a live allocation"))),
    }
}

/// Stops tracking what callers have allocated on a device; as [`forget`] for each.
pub fn forget_all_of(device: i32) -> Vec<Allocation> {
    let mut allocations = ALLOCATIONS.lock();
    let is_theirs = |there: &Allocation| there.device == device && there.kind != Kind::Graph;
    let theirs: Vec<Allocation> = allocations.values().filter(|there| is_theirs(there)).copied().collect();
    allocations.retain(|_, there| !is_theirs(there));
    theirs
}

/// Returns the memory of an allocation obtained from [`forget`].
pub fn release(allocation: Allocation) {
    match allocation.kind {
        Kind::Device | Kind::Graph => FREED.lock().add(allocation).into_iter().for_each(give_back),
        // Of these the mapping and its file go at once.
        Kind::Nccl => drop(SHARED.lock().remove(&allocation.base)),
        Kind::Pinned => give_back(allocation),
        // The caller's own.
        Kind::Registered => {}
    }
}

fn give_back(allocation: Allocation) {
    if let Ok(layout) = layout(allocation.bytes, allocation.kind) {
        // SAFETY: base and layout are those of `allocate`, and `forget` handed out this allocation only once.
        unsafe { dealloc(allocation.base as *mut u8, layout) };
    }
}

/// `cudaHostRegister`: tracks the caller's memory as pinned.
pub fn register(address: usize, bytes: usize, device: i32) -> Outcome<()> {
    if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
        return Err(Fault::cuda(cudaErrorInvalidValue, format!("{bytes} bytes at {address:#x} cannot be registered")));
    }
    let mut allocations = ALLOCATIONS.lock();
    let before = allocations.range(..address + bytes).next_back();
    if before.is_some_and(|(_, there)| there.base + there.bytes > address) {
        let text = format!("a part of {bytes} bytes at {address:#x} is registered, or was allocated by CUDA or NCCL");
        return Err(Fault::cuda(cudaErrorHostMemoryAlreadyRegistered, text));
    }
    let allocation = Allocation { base: address, bytes, kind: Kind::Registered, device, id: next_id() };
    allocations.insert(address, allocation);
    Ok(())
}

/// The allocation that holds `address`, if a tracked one does.
pub fn find(address: usize) -> Option<Allocation> {
    let allocations = ALLOCATIONS.lock();
    let (_, allocation) = allocations.range(..=address).next_back()?;
    (address < allocation.base + allocation.bytes).then_some(*allocation)
}

/// Bytes and number of live device allocations.
pub fn device_usage() -> (u64, u64) {
    let allocations = ALLOCATIONS.lock();
    let on_device = allocations.values().filter(|a| a.kind.on_device());
    on_device.fold((0, 0), |(bytes, count), a| (bytes + a.bytes as u64, count + 1))
}

/// A caller's memory range, named by an operation and used later by a stream's worker.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    address: usize,
    bytes: usize,
    /// Whether it is inside memory that this library allocated.
    tracked: bool,
}

impl Span {
    /// Describes `bytes` bytes at `pointer`; a range that leaves the tracked allocation it starts in is an error.
    ///
    /// # Safety
    ///
    /// The range must stay readable and writable, and used by nobody else, until the operation that was given it ends.
    pub unsafe fn new(pointer: *const c_void, bytes: usize) -> Outcome<Self> {
        let address = pointer as usize;
        if bytes == 0 {
            return Ok(Self { address: 0, bytes: 0, tracked: false });
        }
        if pointer.is_null() {
            return Err(Fault::cuda(cudaErrorInvalidValue, "null pointer"));
        }
        let allocation = find(address);
        if let Some(allocation) = allocation {
            let room = allocation.base + allocation.bytes - address;
            if bytes > room {
                let text = format!("{bytes} bytes at {address:#x}, but the allocation ends after {room}");
                return Err(Fault::cuda(cudaErrorInvalidValue, text));
            }
        }
        Ok(Self { address, bytes, tracked: allocation.is_some() })
    }

    /// Fails if the range was in an allocation and no longer is.
    pub fn check_live(&self) -> Outcome<()> {
        let end = self.address + self.bytes;
        if self.tracked && find(self.address).is_none_or(|there| end > there.base + there.bytes) {
            let text = format!("{} bytes at {:#x} are still used, but have been freed", self.bytes, self.address);
            return Err(Fault::cuda(cudaErrorIllegalAddress, text).breaks(Rule::FreedMemory));
        }
        Ok(())
    }

    /// Bytes in the range.
    pub fn byte_len(&self) -> usize {
        self.bytes
    }

    /// First address.
    pub fn address(&self) -> usize {
        self.address
    }

    fn check(&self, offset: usize, bytes: usize) {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at offset {offset} of a range of {}", self.bytes);
    }

    /// Copies out of the range, from `offset`.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        // SAFETY: whoever made the span vouches for the range; `into` is ours, and callers pass staging or heap memory.
        unsafe { std::ptr::copy((self.address + offset) as *const u8, into.as_mut_ptr(), into.len()) };
    }

    /// Copies into the range, at `offset`.
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        // SAFETY: whoever made the span vouches for the range.
        unsafe { std::ptr::copy(from.as_ptr(), (self.address + offset) as *mut u8, from.len()) };
    }

    /// Fills a part of the range with one byte value.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) {
        self.check(offset, bytes);
        // SAFETY: whoever made the span vouches for the range.
        unsafe { std::ptr::write_bytes((self.address + offset) as *mut u8, value, bytes) };
    }

    /// Fills a part of the range with what fresh memory holds, so that nobody takes it for written.
    pub fn poison(&self, offset: usize, bytes: usize) {
        self.check(offset, bytes);
        let start = self.address + offset;
        let pattern: [u8; PATTERN_BYTES] = match find(self.address)
            .filter(|there| self.tracked && there.kind.on_device())
        {
            Some(there) => std::array::from_fn(|index| there.poison()[(start - there.base + index) % PATTERN_BYTES]),
            None => [POISON; PATTERN_BYTES],
        };
        let pattern = pattern.repeat(4096 / PATTERN_BYTES);
        for at in (0..bytes).step_by(pattern.len()) {
            self.write(offset + at, &pattern[..pattern.len().min(bytes - at)]);
        }
    }

    /// Copies another range of the same size into this one; they may overlap.
    pub fn copy_from(&self, source: &Span) {
        assert_eq!(self.bytes, source.bytes, "copy between ranges of different size");
        // SAFETY: whoever made the two spans vouches for the ranges.
        unsafe { std::ptr::copy(source.address as *const u8, self.address as *mut u8, self.bytes) };
    }

    /// A part of the range, to read.
    pub fn view(&self, offset: usize, bytes: usize) -> &[u8] {
        self.check(offset, bytes);
        if bytes == 0 {
            return &[];
        }
        // SAFETY: whoever made the span vouches that the range is readable and not written until the operation ends.
        unsafe { std::slice::from_raw_parts((self.address + offset) as *const u8, bytes) }
    }
}
