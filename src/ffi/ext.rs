//! C structures and objects of our additions to the interface.

use super::versioned::Versioned;
use crate::backend::{MemoryUsage, RecvTotals, Stats};
use crate::error::{Error, Result};
use crate::options::Options;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::sync::OnceLock;

/// Options of a group, made by nvte_ep_ext_options_create.
#[repr(C)]
#[derive(Debug)]
pub struct NVTEEpExtOptions {
    _private: [u8; 0],
}

/// What a step's routing needs of this rank's receive buffers, in rows with their padding.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpExtRecvTotals {
    /// Size of this structure as its user knows it; set it before the call.
    pub struct_size: usize,
    /// Rows that arrive, before any are dropped.
    pub needed: u64,
    /// Rows of the receive buffers that are in use. In a staged group that drops, some of these may be zeroes, in the
    /// place of rows that are dropped by their token (docs/options.md).
    pub received: u64,
    /// Rows that are dropped, needed - received; 0 unless the group drops.
    pub dropped: u64,
    /// Indices of this rank's topk_idx that are num_experts or more: they name no expert, and route nowhere.
    pub not_experts: u64,
}

/// Device memory that a group takes on this rank, in bytes if not stated otherwise. docs/memory.md has the formulas.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpExtMemoryUsage {
    /// Size of this structure as its user knows it; set it before the call.
    pub struct_size: usize,
    /// The engine's buffers for rows, weights and scales; for NCCL EP computed from the configuration.
    pub staging: u64,
    /// The engine's memory for the exchange of the routing; for NCCL EP computed.
    pub routing_map: u64,
    /// Scratch memory of the engine's kernels; for NCCL EP computed.
    pub workspace: u64,
    /// The library's own scratch.
    pub library: u64,
    /// Segments of the symmetric pool.
    pub symm_reserved: u64,
    /// All of the above: what the group has allocated.
    pub total: u64,
    /// Handle memory of all layers that were prepared, which callers allocate; as large as the reported sizes.
    pub handle_memory: u64,
    /// Number of these layers.
    pub handles: u64,
    /// Bytes of the pool that are handed out.
    pub symm_in_use: u64,
    /// Most bytes of the pool that were ever handed out at a time.
    pub symm_peak: u64,
    /// Number of live allocations of the pool.
    pub symm_allocations: u64,
    /// Number of segments of the pool, each one registration.
    pub symm_segments: u64,
    /// Number of live registrations of nvte_ep_ext_window_register.
    pub registered: u64,
    /// The engine that moves the rows, as the option backend chose it: 1 is NCCL EP, 2 the native engine.
    pub engine: u64,
}

/// What a group has done on this rank since it was initialized. Calls are those that queued their work; a call that a graph
/// captures counts once, however often the graph is launched. Bytes are those of this rank's rows in them, one for each token,
/// without scales.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NVTEEpExtStats {
    /// Size of this structure as its user knows it; set it before the call.
    pub struct_size: usize,
    /// Calls of nvte_ep_prepare, also as part of nvte_ep_prepare_and_dispatch.
    pub prepares: u64,
    /// Calls of nvte_ep_dispatch, also as part of nvte_ep_prepare_and_dispatch.
    pub dispatches: u64,
    /// Calls of nvte_ep_combine.
    pub combines: u64,
    /// Calls of nvte_ep_combine_bwd.
    pub combine_bwds: u64,
    /// Calls of nvte_ep_dispatch_bwd.
    pub dispatch_bwds: u64,
    /// Bytes of the indices that were prepared.
    pub prepare_bytes: u64,
    /// Bytes of the tokens that were dispatched.
    pub dispatch_bytes: u64,
    /// Bytes of the results that were combined.
    pub combine_bytes: u64,
    /// Bytes of the gradients that nvte_ep_combine_bwd was given.
    pub combine_bwd_bytes: u64,
    /// Bytes of the gradients that nvte_ep_dispatch_bwd gave.
    pub dispatch_bwd_bytes: u64,
    /// Handles that were opened over handle memory.
    pub handles_opened: u64,
    /// Handles that were closed, because the table was full or another layer uses their memory. A call that needs one opens it again.
    pub handles_closed: u64,
    /// Rows that were dropped, in the steps that nvte_ep_ext_recv_totals was asked about.
    pub dropped_rows: u64,
    /// Indices that were num_experts or more, of the steps that have run so far.
    pub not_experts: u64,
    /// Calls that threw while no other thread was in a call of the group.
    pub errors: u64,
    /// The engine that moves the rows: 1 is NCCL EP, 2 the native engine.
    pub engine: u64,
    /// Handles that are open now.
    pub handles_bound: u64,
    /// Handles that were opened over a routing that was prepared before: their handle had been given up, or the memory is new to
    /// the group.
    pub handles_rebuilt: u64,
    /// Version of NCCL, as ncclGetVersion has it: major * 10000 + minor * 100 + patch.
    pub nccl_version: u64,
    /// The file that NCCL was loaded from; the text stays. NULL where the loader does not tell.
    pub nccl_path: *const c_char,
    /// Version of NCCL EP, as ncclEpGetVersion has it; 0 with the native engine, which has no library.
    pub nccl_ep_version: u64,
    /// The file that NCCL EP was loaded from; the text stays. NULL with the native engine, or where the loader does not tell.
    pub nccl_ep_path: *const c_char,
}

// SAFETY: repr(C), integers and pointers that may be null, the size first.
unsafe impl Versioned for NVTEEpExtStats {
    const BASE_SIZE: usize = 136;
}

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpExtRecvTotals {
    const BASE_SIZE: usize = 40;
}

// SAFETY: repr(C), integers, the size first.
unsafe impl Versioned for NVTEEpExtMemoryUsage {
    const BASE_SIZE: usize = 112;
}

const _: () = {
    assert!(size_of::<NVTEEpExtRecvTotals>() == 40);
    assert!(size_of::<NVTEEpExtMemoryUsage>() == 120);
    assert!(size_of::<NVTEEpExtStats>() == 184);
};

impl Default for NVTEEpExtRecvTotals {
    fn default() -> Self {
        Self { struct_size: size_of::<Self>(), needed: 0, received: 0, dropped: 0, not_experts: 0 }
    }
}

impl Default for NVTEEpExtMemoryUsage {
    fn default() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            staging: 0,
            routing_map: 0,
            workspace: 0,
            library: 0,
            symm_reserved: 0,
            total: 0,
            handle_memory: 0,
            handles: 0,
            symm_in_use: 0,
            symm_peak: 0,
            symm_allocations: 0,
            symm_segments: 0,
            registered: 0,
            engine: 0,
        }
    }
}

impl From<RecvTotals> for NVTEEpExtRecvTotals {
    fn from(totals: RecvTotals) -> Self {
        let RecvTotals { needed, received, dropped, invalid_indices, .. } = totals;
        Self { struct_size: size_of::<Self>(), needed, received, dropped, not_experts: invalid_indices }
    }
}

/// Paths as C has them: libraries stay loaded, so there is one of each.
static NCCL: OnceLock<CString> = OnceLock::new();
static NCCL_EP: OnceLock<CString> = OnceLock::new();

fn path_text(kept: &'static OnceLock<CString>, path: Option<&Path>) -> *const c_char {
    let Some(path) = path else { return std::ptr::null() };
    let text = || CString::new(path.as_os_str().as_encoded_bytes()).expect("a path has no zero byte");
    kept.get_or_init(text).as_ptr()
}

impl From<Stats> for NVTEEpExtStats {
    fn from(stats: Stats) -> Self {
        let Stats { prepare, dispatch, combine, combine_bwd, dispatch_bwd, handles_opened, handles_closed, .. } = stats;
        let Stats { dropped_rows, invalid_indices, errors, backend, handles_bound, handles_rebuilt, .. } = stats;
        let Stats { nccl, nccl_ep, .. } = stats;
        Self {
            struct_size: size_of::<Self>(),
            prepares: prepare.count,
            dispatches: dispatch.count,
            combines: combine.count,
            combine_bwds: combine_bwd.count,
            dispatch_bwds: dispatch_bwd.count,
            prepare_bytes: prepare.bytes,
            dispatch_bytes: dispatch.bytes,
            combine_bytes: combine.bytes,
            combine_bwd_bytes: combine_bwd.bytes,
            dispatch_bwd_bytes: dispatch_bwd.bytes,
            handles_opened,
            handles_closed,
            dropped_rows,
            not_experts: invalid_indices,
            errors,
            engine: backend as u64,
            handles_bound,
            handles_rebuilt,
            nccl_version: nccl.version.into(),
            nccl_path: path_text(&NCCL, nccl.path),
            nccl_ep_version: nccl_ep.map_or(0, |library| library.version.into()),
            nccl_ep_path: path_text(&NCCL_EP, nccl_ep.and_then(|library| library.path)),
        }
    }
}

impl From<MemoryUsage> for NVTEEpExtMemoryUsage {
    fn from(usage: MemoryUsage) -> Self {
        Self {
            struct_size: size_of::<Self>(),
            staging: usage.staging,
            routing_map: usage.routing_map,
            workspace: usage.workspace,
            library: usage.library,
            symm_reserved: usage.symm_reserved,
            total: usage.total(),
            handle_memory: usage.handle_memory,
            handles: usage.handles,
            symm_in_use: usage.symm_in_use,
            symm_peak: usage.symm_peak,
            symm_allocations: usage.symm_allocations,
            symm_segments: usage.symm_segments,
            registered: usage.registered,
            engine: usage.backend as u64,
        }
    }
}

/// Live objects by their number, which is what callers hold as a pointer: nothing is ever read through it.
static OBJECTS: Mutex<(usize, BTreeMap<usize, Options>)> = Mutex::new((0, BTreeMap::new()));

/// A new object with all defaults.
#[must_use]
pub fn options_create() -> *mut NVTEEpExtOptions {
    let mut objects = OBJECTS.lock();
    objects.0 += 1;
    let number = objects.0;
    objects.1.insert(number, Options::default());
    std::ptr::without_provenance_mut(number)
}

fn dead(options: *const NVTEEpExtOptions) -> Error {
    let required = "must be what nvte_ep_ext_options_create returned, not destroyed since";
    Error::argument("options", required, format!("{options:p}"))
}

/// The options that `options` names; the defaults for NULL.
///
/// # Errors
/// An object that is not live.
pub fn options_read(options: *const NVTEEpExtOptions) -> Result<Options> {
    if options.is_null() {
        return Ok(Options::default());
    }
    OBJECTS.lock().1.get(&options.addr()).copied().ok_or_else(|| dead(options))
}

/// Sets one option of an object.
///
/// # Errors
/// An object that is not live; an unknown key or value.
pub fn options_set(options: *mut NVTEEpExtOptions, key: &str, value: &str) -> Result<()> {
    OBJECTS.lock().1.get_mut(&options.addr()).ok_or_else(|| dead(options))?.set(key, value)
}

/// Ends an object; NULL is nothing.
///
/// # Errors
/// An object that is not live.
pub fn options_destroy(options: *mut NVTEEpExtOptions) -> Result<()> {
    if options.is_null() {
        return Ok(());
    }
    OBJECTS.lock().1.remove(&options.addr()).map(|_| ()).ok_or_else(|| dead(options))
}

/// The text of a C string argument.
///
/// # Errors
/// NULL, or bytes that are no UTF-8.
///
/// # Safety
/// `pointer` is null or a NUL-terminated string.
pub unsafe fn text(argument: &'static str, pointer: *const c_char) -> Result<String> {
    if pointer.is_null() {
        return Err(Error::argument(argument, "must be a string", "NULL"));
    }
    // SAFETY: the caller vouches for the string.
    let text = unsafe { CStr::from_ptr(pointer) };
    let owned = text.to_str().map(str::to_owned);
    owned.map_err(|_| Error::argument(argument, "must be UTF-8", format!("{text:?}")))
}

/// Writes `text` with its NUL into a caller's array of `bytes` bytes.
///
/// # Errors
/// NULL, or too few bytes.
///
/// # Safety
/// `out` is null or has `bytes` writable bytes.
pub unsafe fn put_text(argument: &'static str, out: *mut c_char, bytes: usize, text: &str) -> Result<()> {
    if out.is_null() || bytes <= text.len() {
        let required = format!("must be an array of at least {} bytes", text.len() + 1);
        let found = if out.is_null() { "NULL".to_owned() } else { bytes.to_string() };
        return Err(Error::argument(argument, required, found));
    }
    let text = CString::new(text).map_err(|_| Error::Internal("a value with a NUL in it".into()))?;
    let text = text.as_bytes_with_nul();
    // SAFETY: the caller's array has room for the text and its end.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_numbers_that_end() {
        let (a, b) = (options_create(), options_create());
        assert_ne!(a, b);
        options_set(a, "overflow", "drop").unwrap();
        assert_eq!(options_read(a).unwrap().get("overflow").unwrap(), "drop");
        assert_eq!(options_read(b).unwrap(), Options::default(), "each is its own");
        assert_eq!(options_read(std::ptr::null()).unwrap(), Options::default());
        options_destroy(a).unwrap();
        let dead = "options must be what nvte_ep_ext_options_create returned, not destroyed since, got 0x";
        for text in [options_destroy(a), options_set(a, "overflow", "drop"), options_read(a).map(|_| ())] {
            assert!(text.unwrap_err().to_string().starts_with(dead));
        }
        let text = options_set(std::ptr::null_mut(), "overflow", "drop").unwrap_err().to_string();
        assert!(text.starts_with("options must be what"), "{text}");
        options_destroy(std::ptr::null_mut()).unwrap();
        options_destroy(b).unwrap();
    }

    #[test]
    fn texts_cross() {
        // SAFETY: NULL or a C string.
        let read = |pointer| unsafe { text("key", pointer) };
        assert_eq!(read(c"eager".as_ptr()).unwrap(), "eager");
        assert_eq!(read(std::ptr::null()).unwrap_err().to_string(), "key must be a string, got NULL");
        assert!(read(c"\xff".as_ptr()).unwrap_err().to_string().starts_with("key must be UTF-8"));
        let mut array = [1 as c_char; 4];
        // SAFETY: the array has four bytes.
        unsafe { put_text("value", array.as_mut_ptr(), 4, "off") }.unwrap();
        assert_eq!(array.map(|c| c as u8), *b"off\0");
        // SAFETY: as above.
        let text = unsafe { put_text("value", array.as_mut_ptr(), 4, "trap") }.unwrap_err().to_string();
        assert_eq!(text, "value must be an array of at least 5 bytes, got 4");
    }
}
