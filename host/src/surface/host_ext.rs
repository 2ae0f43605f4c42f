//! Functions that only the host runtime has.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::size_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvte_ep_bindings::{cudaErrorInvalidValue, cudaSuccess};

use crate::caller::{self, Caller};
use crate::check;
use crate::device;
use crate::domains;
use crate::inject::{self, Missing};
use crate::rule::Rule;
use crate::stats::COUNTERS;
use crate::{comm, memory, settings, stream};

/// What the host runtime has done in this process, for leak checks and tests.
#[repr(C)]
#[allow(non_camel_case_types, reason = "name of the C interface")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct nvte_ep_host_stats {
    /// Set by the caller to the size of this structure; only that many bytes are written.
    pub struct_size: usize,
    /// EP groups created.
    pub groups_created: u64,
    /// EP groups destroyed.
    pub groups_destroyed: u64,
    /// EP handles created.
    pub handles_created: u64,
    /// EP handles destroyed.
    pub handles_destroyed: u64,
    /// `ncclEpUpdateHandle` operations enqueued.
    pub updates: u64,
    /// `ncclEpDispatch` operations enqueued.
    pub dispatches: u64,
    /// `ncclEpCombine` operations enqueued.
    pub combines: u64,
    /// Communicators created.
    pub comms_created: u64,
    /// Communicators destroyed.
    pub comms_destroyed: u64,
    /// Bytes of device memory allocated now.
    pub device_bytes_live: u64,
    /// Allocations of device memory live now.
    pub device_allocations_live: u64,
    /// Windows registered now.
    pub windows_live: u64,
    /// Streams created and not destroyed.
    pub streams_live: u64,
    /// NCCL collectives that callers enqueued on communicators.
    pub collectives: u64,
}

/// Fills `out` and returns 0; 1 if `out` is null or its `struct_size` too small for any counter.
///
/// # Safety
///
/// `out` is null or points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_stats(out: *mut nvte_ep_host_stats) -> c_int {
    if out.is_null() {
        return cudaErrorInvalidValue as c_int;
    }
    // SAFETY: not null, and struct_size comes first in every version.
    let size = unsafe { out.cast::<usize>().read() };
    if size < size_of::<usize>() + size_of::<u64>() {
        return cudaErrorInvalidValue as c_int;
    }
    let (device_bytes_live, device_allocations_live) = memory::device_usage();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let stats = nvte_ep_host_stats {
        struct_size: size,
        groups_created: load(&COUNTERS.groups_created),
        groups_destroyed: load(&COUNTERS.groups_destroyed),
        handles_created: load(&COUNTERS.handles_created),
        handles_destroyed: load(&COUNTERS.handles_destroyed),
        updates: load(&COUNTERS.updates),
        dispatches: load(&COUNTERS.dispatches),
        combines: load(&COUNTERS.combines),
        comms_created: load(&COUNTERS.comms_created),
        comms_destroyed: load(&COUNTERS.comms_destroyed),
        device_bytes_live,
        device_allocations_live,
        windows_live: comm::live_windows(),
        streams_live: stream::live_count(),
        collectives: load(&COUNTERS.collectives),
    };
    let bytes = size.min(size_of::<nvte_ep_host_stats>());
    // SAFETY: the caller vouches for struct_size writable bytes.
    unsafe { std::ptr::copy_nonoverlapping((&raw const stats).cast::<u8>(), out.cast::<u8>(), bytes) };
    cudaSuccess as c_int
}

/// Text of the sticky error of the calling thread's device, or "".
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_last_error() -> *const c_char {
    device::selected().sticky().map_or(c"", |sticky| sticky.text.as_c_str()).as_ptr()
}

/// Whether NCCL EP would find a compiler for its kernels: 1, or 0 where `NVTE_EP_HOST_FAULT` hides it from this rank.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_compiler() -> c_int {
    c_int::from(!inject::is_missing(Missing::Nvcc))
}

/// The number of the simulated machine on which `rank` of `ranks` is, as `NVTE_EP_HOST_DOMAINS` says; -1 where it is unset, and
/// all are on this one.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_machine(rank: c_int, ranks: c_int) -> c_int {
    let (Ok(rank), Ok(ranks)) = (usize::try_from(rank), usize::try_from(ranks)) else { return -1 };
    if rank >= ranks {
        return -1;
    }
    domains::machine(rank, ranks).map_or(-1, |machine| machine as c_int)
}

/// How often a rule of the contract was broken in this process. `rule` is the rule's name in reports; null counts all rules. If no
/// rule has the name, the result is `UINT64_MAX`.
///
/// # Safety
///
/// `rule` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_check_reports(rule: *const c_char) -> u64 {
    if rule.is_null() {
        return Rule::ALL.iter().map(|rule| rule.reports()).sum();
    }
    // SAFETY: not null, and a string by the caller's word.
    let name = unsafe { CStr::from_ptr(rule) };
    let found = Rule::ALL.iter().find(|rule| rule.name().as_bytes() == name.to_bytes());
    found.map_or(u64::MAX, |rule| rule.reports())
}

/// Text of the last report of a broken rule in this process, or ""; valid until the next call on this thread.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_check_last() -> *const c_char {
    thread_local! {
        static TEXT: RefCell<CString> = RefCell::default();
    }
    let fresh = CString::new(check::last_report().replace('\0', "?")).unwrap_or_default();
    // A thread that is ending has no place for the text any more.
    let stored = TEXT.try_with(|text| text.replace(fresh));
    stored.and_then(|_| TEXT.try_with(|text| text.borrow().as_ptr())).unwrap_or(c"".as_ptr())
}

/// Says whether the devices of this process can use pageable memory: 1, as on machines whose kernel shares its page tables with GPUs, or
/// 0, the default. With 1, tensors may be in any memory, such as a framework's tensors on the CPU; all other rules of the
/// contract checker stay. Call it before the first group.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_set_pageable_memory(on: c_int) {
    settings::set_pageable_memory(on != 0);
}

/// Says which function the calling thread calls NCCL EP for. Reports of the contract checker then name that function and its
/// arguments, also for work that is queued in this time. `names` is `FUNCTION NAME=OWN NAME=OWN ...`: for each argument NCCL EP's
/// name and the caller's; null ends it. A function whose name ends in `_bwd` computes gradients.
///
/// # Safety
///
/// `names` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_set_caller(names: *const c_char) {
    // SAFETY: not null, and a string by the caller's word.
    let text = (!names.is_null()).then(|| unsafe { CStr::from_ptr(names) }.to_string_lossy());
    caller::replace(text.and_then(|text| Caller::parse(&text)).map(Arc::new));
}

/// Version of the host runtime.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvte_ep_host_version() -> *const c_char {
    const VERSION: &str = concat!("nvte-ep-host ", env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
