//! NVTX ranges: a profiler sees when a call begins and ends.
//!
//! A profiler names its library in `NVTX_INJECTION64_PATH`. The first call loads it and hands it a function by which it finds a table of
//! slots; the profiler writes its own functions into those that it wants. That is the protocol of NVTX 3's headers, of which the
//! slots of pushed and popped ranges are called here. The crate `nvtx` is the same in C, and needs libclang wherever it is built.
//!
//! Ranges are of NVTX's default domain and bear the C functions' names, as those of TransformerEngine do.

use super::load::keep;
use crate::env::{NVTX_INJECTION, process};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Slots of the modules that NVTX numbers from 1, the unused slot 0 included: core, CUDA, OpenCL, CUDA runtime, core 2,
/// synchronization. A profiler may take a module that is not there for a failure.
const SIZES: [c_uint; 6] = [16, 9, 15, 7, 16, 7];
const CORE: c_uint = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

/// The export tables by their numbers.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

type Slot = AtomicPtr<c_void>;
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;
type ExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(ExportTable) -> c_int;

#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_table: unsafe extern "C" fn(c_uint, *mut *const *const Slot, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: unsafe extern "C" fn(u32),
}

static EXPORTED_CALLBACKS: Callbacks = Callbacks { struct_size: size_of::<Callbacks>(), module_table };
static EXPORTED_VERSION: VersionInfo =
    VersionInfo { struct_size: size_of::<VersionInfo>(), version: 3, reserved: 0, set_injection_version };

/// What begins a range: null where nothing is attached, and [`NOT_ASKED`] before the first call. The one thing that a call looks at.
static PUSH: Slot = AtomicPtr::new(NOT_ASKED);
static POP: Slot = AtomicPtr::new(null_mut());
const NOT_ASKED: *mut c_void = std::ptr::without_provenance_mut(1);

/// A range, until it is dropped.
#[derive(Debug)]
pub struct Range(Option<Pop>);

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(pop) = self.0 {
            // SAFETY: the profiler's, which takes nothing.
            unsafe { pop() };
        }
    }
}

/// Begins the range of a call of the C function `name`, where a profiler is attached.
#[inline]
#[must_use = "the range ends when it is dropped"]
pub fn range(name: &str) -> Range {
    if PUSH.load(Ordering::Acquire).is_null() { Range(None) } else { begin(name) }
}

#[cold]
#[inline(never)]
fn begin(name: &str) -> Range {
    static ATTACH: Once = Once::new();
    ATTACH.call_once(attach);
    let [push, pop] = [&PUSH, &POP].map(|slot| slot.load(Ordering::Acquire));
    // Calls about tensors take no time that a profile should show.
    if push.is_null() || pop.is_null() || !name.starts_with("nvte_ep_") {
        return Range(None);
    }
    let mut text = [0; 64];
    let length = name.len().min(text.len() - 1);
    text[..length].copy_from_slice(&name.as_bytes()[..length]);
    // SAFETY: what a profiler writes into the slot of nvtxRangePushA is of this type.
    let push: Push = unsafe { std::mem::transmute(push) };
    // SAFETY: as above, of nvtxRangePop.
    let pop: Pop = unsafe { std::mem::transmute(pop) };
    // SAFETY: the text ends with a zero.
    unsafe { push(text.as_ptr().cast()) };
    Range(Some(pop))
}

/// Loads the profiler's library, if there is one.
fn attach() {
    PUSH.store(null_mut(), Ordering::Release);
    let Some(path) = process(NVTX_INJECTION.name) else { return };
    let failed = match initialize(&path) {
        Ok(0) => "InitializeInjectionNvtx2 returned 0".to_owned(),
        Ok(_) => return,
        Err(error) => error.to_string(),
    };
    PUSH.store(null_mut(), Ordering::Release);
    crate::log::start();
    tracing::warn!(target: "nvte_ep", "{} has no ranges: {}: {failed}", NVTX_INJECTION.name, path.display());
}

fn initialize(path: &std::ffi::OsStr) -> Result<c_int, libloading::Error> {
    // SAFETY: the user asks for this library's initialisers.
    let library = keep(unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }?);
    // SAFETY: NVTX fixes the prototype.
    let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") }?;
    // SAFETY: the function answers as NVTX's does.
    Ok(unsafe { initialize(export_table) })
}

unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS => (&raw const EXPORTED_CALLBACKS).cast(),
        VERSION_INFO => (&raw const EXPORTED_VERSION).cast(),
        _ => std::ptr::null(),
    }
}

unsafe extern "C" fn set_injection_version(_: u32) {}

/// The slots of a module; those that nobody calls take what a profiler writes, too.
unsafe extern "C" fn module_table(module: c_uint, table: *mut *const *const Slot, size: *mut c_uint) -> c_int {
    let Some(&slots) = SIZES.get((module as usize).wrapping_sub(1)) else { return 0 };
    // A profiler keeps the table: it stays. There is one profiler, which asks once.
    let unused: &'static [Slot] = (0..slots).map(|_| Slot::default()).collect::<Vec<_>>().leak();
    let mut found: Vec<*const Slot> = unused.iter().map(std::ptr::from_ref).collect();
    found[0] = std::ptr::null();
    if module == CORE {
        found[RANGE_PUSH] = &raw const PUSH;
        found[RANGE_POP] = &raw const POP;
    }
    if !size.is_null() {
        // SAFETY: the caller's variable.
        unsafe { size.write(slots) };
    }
    if !table.is_null() {
        // SAFETY: as above.
        unsafe { table.write(found.leak().as_ptr()) };
    }
    1
}
