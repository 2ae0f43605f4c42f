//! Graphs, and their replay.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use super::capture::{self, refuse_on_captured, refuse_unsafe};
use super::nodes::{MemoryNode, Node};
use crate::check;
use crate::device::Device;
use crate::fault::{Fault, Outcome};
use crate::queue::{Point, Run, Stream, StreamKind};

thread_local! {
    /// Which replay of a graph this thread enqueues.
    static REPLAY: Cell<u64> = const { Cell::new(0) };
}

/// Which replay of a graph the calling thread enqueues; 0 for none.
pub fn replay() -> u64 {
    REPLAY.get()
}

/// Ends the capture of the stream that it began on, and gives the graph's handle.
pub fn end(stream: &Arc<Stream>) -> Outcome<usize> {
    let (nodes, devices) = capture::end(stream)?;
    let graph = Arc::new(Graph { nodes, devices });
    let handle = Arc::as_ptr(&graph) as usize;
    GRAPHS.lock().insert(handle, graph);
    Ok(handle)
}

/// Recorded work, without streams of its own.
struct Graph {
    nodes: Vec<Node>,
    /// Device of each lane.
    devices: Vec<&'static Device>,
}

impl Graph {
    fn memory_nodes(&self) -> impl Iterator<Item = &MemoryNode> {
        self.nodes.iter().filter_map(|node| node.action.memory.as_ref())
    }

    /// Why `new` cannot take this one's place in an executable.
    fn difference(&self, new: &Self) -> Option<(cudaGraphExecUpdateResult, String)> {
        if [self, new].iter().any(|graph| graph.memory_nodes().next().is_some()) {
            let text = "a graph that allocates or frees memory cannot be updated: instantiate the new one";
            return Some((cudaGraphExecUpdateErrorNotSupported, text.to_owned()));
        }
        let (old_nodes, new_nodes) = (self.nodes.len(), new.nodes.len());
        if old_nodes != new_nodes {
            let text = format!("the executable graph has {old_nodes} nodes, the new graph {new_nodes}");
            return Some((cudaGraphExecUpdateErrorTopologyChanged, text));
        }
        let same_devices = self.devices.len() == new.devices.len()
            && self.devices.iter().zip(&new.devices).all(|(old, new)| std::ptr::eq(*old, *new));
        let differs = |(old, new): &(&Node, &Node)| old.lane != new.lane || old.after != new.after;
        let node = self.nodes.iter().zip(&new.nodes).position(|pair| differs(&pair));
        if let Some(node) = node {
            let text = format!("node {node} of the new graph depends on others than that of the executable graph");
            return Some((cudaGraphExecUpdateErrorTopologyChanged, text));
        }
        if !same_devices {
            let text = "the new graph uses other devices than the executable graph";
            return Some((cudaGraphExecUpdateErrorTopologyChanged, text.to_owned()));
        }
        let is_collective = |node: &Node| node.action.breaker.is_some();
        let changed = self.nodes.iter().zip(&new.nodes).position(|(old, new)| is_collective(old) != is_collective(new));
        changed.map(|node| {
            let text = format!("node {node} is a collective operation in one of the two graphs only");
            (cudaGraphExecUpdateErrorNodeTypeChanged, text)
        })
    }
}

/// A graph that can be launched.
struct Exec {
    /// Whether a launch takes back what the last one left allocated.
    auto_free: bool,
    graph: Mutex<Arc<Graph>>,
    /// Streams that replay what was captured on other streams than the first.
    branches: Vec<Arc<Stream>>,
    last: Mutex<Option<Point>>,
    launches: AtomicU64,
}

static GRAPHS: LazyLock<Mutex<HashMap<usize, Arc<Graph>>>> = LazyLock::new(Mutex::default);
static EXECS: LazyLock<Mutex<HashMap<usize, Arc<Exec>>>> = LazyLock::new(Mutex::default);

impl Drop for Exec {
    fn drop(&mut self) {
        for branch in &self.branches {
            branch.close();
        }
    }
}

/// Graphs, and executable graphs, that callers have not destroyed.
pub fn live_counts() -> (usize, usize) {
    (GRAPHS.lock().len(), EXECS.lock().len())
}

/// Destroys a graph; executables made from it stay.
pub fn destroy_graph(handle: usize) -> Outcome<()> {
    let found = GRAPHS.lock().remove(&handle);
    found.map(drop).ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, format!("{handle:#x} is not a live graph")))
}

/// Instantiation flag: a launch takes back what the last one left allocated.
const AUTO_FREE: u64 = 1;
/// Instantiation flag without a meaning here: priorities of nodes.
const NODE_PRIORITY: u64 = 8;

/// Makes a graph launchable.
pub fn instantiate(handle: usize, flags: u64) -> Outcome<usize> {
    refuse_unsafe("the instantiation of a graph")?;
    if flags & !(AUTO_FREE | NODE_PRIORITY) != 0 {
        let text = format!("graph instantiation flags {flags:#x} are not supported by the host runtime");
        return Err(Fault::cuda(cudaErrorInvalidValue, text));
    }
    let graph = GRAPHS.lock().get(&handle).cloned();
    let graph = graph.ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, format!("{handle:#x} is not a live graph")))?;
    let branches = graph.devices.iter().skip(1).map(|device| Stream::create(device, StreamKind::NonBlocking)).collect();
    let is_alive = |exec: &Arc<Exec>| Arc::ptr_eq(&exec.graph.lock(), &graph);
    if graph.memory_nodes().next().is_some() && EXECS.lock().values().any(is_alive) {
        let text = "a graph that allocates or frees memory can have one executable at a time";
        return Err(Fault::cuda(cudaErrorInvalidValue, text));
    }
    let auto_free = flags & AUTO_FREE != 0;
    // What the capture allocated is there for its nodes; callers get it from launches.
    for node in graph.memory_nodes() {
        node.memory.is_allocated.store(false, Ordering::SeqCst);
    }
    let (graph, last) = (Mutex::new(graph), Mutex::new(None));
    let exec = Arc::new(Exec { auto_free, graph, branches, last, launches: AtomicU64::new(0) });
    let handle = Arc::as_ptr(&exec) as usize;
    EXECS.lock().insert(handle, exec);
    Ok(handle)
}

fn unknown_exec(handle: usize) -> Fault {
    Fault::cuda(cudaErrorInvalidValue, format!("{handle:#x} is not a live executable graph"))
}

/// Puts another graph of the same shape in the place of an executable's; gives what hinders it otherwise.
pub fn update_exec(exec: usize, graph: usize) -> Outcome<Result<(), (cudaGraphExecUpdateResult, String)>> {
    refuse_unsafe("the update of an executable graph")?;
    let exec = EXECS.lock().get(&exec).cloned().ok_or_else(|| unknown_exec(exec))?;
    let new = GRAPHS.lock().get(&graph).cloned();
    let new = new.ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, format!("{graph:#x} is not a live graph")))?;
    let mut old = exec.graph.lock();
    Ok(match old.difference(&new) {
        Some(difference) => Err(difference),
        None => {
            *old = new;
            Ok(())
        }
    })
}

/// Destroys an executable graph; launches that are going on finish.
pub fn destroy_exec(handle: usize) -> Outcome<()> {
    refuse_unsafe("the destruction of an executable graph")?;
    let found = EXECS.lock().remove(&handle);
    found.map(drop).ok_or_else(|| unknown_exec(handle))
}

/// Replays a graph behind the work of a stream; later work of the stream waits for all of it.
pub fn launch(handle: usize, stream: &Arc<Stream>) -> Outcome<()> {
    refuse_on_captured(stream, "the launch of a graph")?;
    let exec = EXECS.lock().get(&handle).cloned().ok_or_else(|| unknown_exec(handle))?;
    REPLAY.set(exec.launches.fetch_add(1, Ordering::Relaxed) + 1);
    let done = exec.launch(stream);
    REPLAY.set(0);
    if let Err(fault) = &done {
        // Peers wait for these operations and they will never run.
        for breaker in exec.graph.lock().nodes.iter().filter_map(|node| node.action.breaker.as_ref()) {
            breaker.trip(&fault.text);
        }
    }
    done
}

impl Exec {
    fn launch(&self, stream: &Arc<Stream>) -> Outcome<()> {
        stream.device().check()?;
        let graph = Arc::clone(&self.graph.lock());
        for span in graph.nodes.iter().flat_map(|node| &node.action.spans) {
            if let Err(fault) = span.check_live() {
                // On a GPU the kernels fault; here they must not touch what is somebody else's memory by now.
                let fault = check::annotate(fault);
                stream.device().poison(fault.clone());
                return Err(fault);
            }
        }
        if !self.auto_free
            && let Some(node) =
                graph.memory_nodes().find(|node| node.allocates && node.memory.is_allocated.load(Ordering::SeqCst))
        {
            let text = format!(
                "the graph allocates {:#x}, which its last launch allocated and nobody has freed: free it, or instantiate \
                 with cudaGraphInstantiateFlagAutoFreeOnLaunch",
                node.memory.span.address()
            );
            return Err(Fault::cuda(cudaErrorInvalidValue, text));
        }
        let mut last = self.last.lock();
        let entry = stream.push(last.iter().cloned().collect(), nothing())?;
        let mut points: Vec<Point> = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            let mut after: Vec<Point> = node.after.iter().map(|before| points[*before].clone()).collect();
            if after.is_empty() {
                after.push(entry.clone());
            }
            let target = node.lane.checked_sub(1).map_or(stream, |branch| &self.branches[branch]);
            points.push((node.action.enqueue)(target, after)?);
        }
        *last = Some(stream.push(points, nothing())?);
        for node in graph.memory_nodes() {
            node.memory.is_allocated.store(node.allocates, Ordering::SeqCst);
        }
        Ok(())
    }
}

fn nothing() -> Run {
    Arc::new(|_: Option<&Fault>| Ok(()))
}
