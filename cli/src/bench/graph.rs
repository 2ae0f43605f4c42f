//! CUDA graphs of one call each, which replay it.

use crate::Outcome;
use crate::device::Device;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nvte_ep_bindings as b;
use nvte_ep_core::sys::file_of;
use std::ffi::{c_int, c_ulonglong, c_void};

/// The driver's functions that no other part of this program needs.
#[derive(Debug)]
pub struct Graphs {
    begin: unsafe extern "C" fn(b::CUstream, c_int) -> b::CUresult,
    end: unsafe extern "C" fn(b::CUstream, *mut *mut c_void) -> b::CUresult,
    instantiate: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_ulonglong) -> b::CUresult,
    launch: unsafe extern "C" fn(*mut c_void, b::CUstream) -> b::CUresult,
    destroy: unsafe extern "C" fn(*mut c_void) -> b::CUresult,
    destroy_executable: unsafe extern "C" fn(*mut c_void) -> b::CUresult,
}

/// Captures refuse what is unsafe on this thread alone (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
const THREAD_LOCAL: c_int = 1;

/// A graph that can be launched, until [`Graphs::end`].
#[derive(Debug, Clone, Copy)]
pub struct Graph(*mut c_void);

impl Graphs {
    /// Of the driver that the device was opened with.
    pub fn of(device: &Device) -> Outcome<Self> {
        let file = file_of(device.base.cuda.cuStreamCreate as *const c_void).ok_or("the CUDA driver has no file")?;
        // SAFETY: the library is loaded already.
        let driver = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| error.to_string())?;
        let missing = |error: libloading::Error| format!("{}: {error}", file.display());
        // SAFETY (of all below): the types are those of cuda.h.
        let graphs = Self {
            // SAFETY: as above.
            begin: unsafe { *driver.get(b"cuStreamBeginCapture_v2\0").map_err(missing)? },
            // SAFETY: as above.
            end: unsafe { *driver.get(b"cuStreamEndCapture\0").map_err(missing)? },
            // SAFETY: as above.
            instantiate: unsafe { *driver.get(b"cuGraphInstantiateWithFlags\0").map_err(missing)? },
            // SAFETY: as above.
            launch: unsafe { *driver.get(b"cuGraphLaunch\0").map_err(missing)? },
            // SAFETY: as above.
            destroy: unsafe { *driver.get(b"cuGraphDestroy\0").map_err(missing)? },
            // SAFETY: as above.
            destroy_executable: unsafe { *driver.get(b"cuGraphExecDestroy\0").map_err(missing)? },
        };
        std::mem::forget(driver);
        Ok(graphs)
    }

    /// What `queue` queues on the device's stream, as a graph.
    pub fn capture(&self, device: &Device, queue: impl FnOnce() -> Outcome<()>) -> Outcome<Graph> {
        let cuda = &device.base.cuda;
        // SAFETY: the stream is live.
        cuda.check("cuStreamBeginCapture_v2", unsafe { (self.begin)(device.stream(), THREAD_LOCAL) })?;
        let queued = queue();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream captures, and `graph` is live.
        let ended = cuda.check("cuStreamEndCapture", unsafe { (self.end)(device.stream(), &raw mut graph) });
        queued?;
        ended?;
        // SAFETY: `executable` is live, and the graph was captured just now.
        let code = unsafe { (self.instantiate)(&raw mut executable, graph, 0) };
        cuda.check("cuGraphInstantiateWithFlags", code)?;
        // SAFETY: the executable graph has all that it needs of it.
        cuda.check("cuGraphDestroy", unsafe { (self.destroy)(graph) })?;
        Ok(Graph(executable))
    }

    /// Queues a replay on the device's stream.
    pub fn launch(&self, device: &Device, Graph(graph): Graph) -> Outcome<()> {
        // SAFETY: graph and stream are live.
        Ok(device.base.cuda.check("cuGraphLaunch", unsafe { (self.launch)(graph, device.stream()) })?)
    }

    /// Ends a graph, of which no replay is queued.
    pub fn end(&self, device: &Device, Graph(graph): Graph) -> Outcome<()> {
        // SAFETY: the graph is live and ends here.
        Ok(device.base.cuda.check("cuGraphExecDestroy", unsafe { (self.destroy_executable)(graph) })?)
    }
}
