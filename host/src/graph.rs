//! Stream capture and graphs.
//!
//! While a stream is captured, what would be enqueued on it is recorded as a node: an action that enqueues the same work
//! when the graph is launched, with the arguments that it was given. A node knows the nodes that it follows, by the order
//! of its stream and by events; a launch turns these into points of the streams that replay the graph.
//!
//! Which calls are refused while a capture is going on, with which code, and whether that ends the capture, was read off
//! an H200 with the 580.159 driver (CUDA 13.0).

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::thread::ThreadId;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::channel::Breaker;
use crate::check::{self, Rule};
use crate::device::Device;
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Span};
use crate::stream::{Kind, Point, Run, Stream};

/// Which other calls a capture forbids, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Unsafe calls of every thread.
    Global,
    /// Unsafe calls of the thread that began the capture.
    ThreadLocal,
    /// None.
    Relaxed,
}

impl Mode {
    /// The mode with this number in CUDA.
    pub fn from_number(mode: u32) -> Outcome<Self> {
        match mode {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            other => Err(Fault::cuda(cudaErrorInvalidValue, format!("capture mode {other} is unknown"))),
        }
    }

    /// Its number in CUDA.
    pub fn number(self) -> u32 {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}

/// Enqueues a node's work on a stream, behind points of others.
type Enqueue = Arc<dyn Fn(&Arc<Stream>, Vec<Point>) -> Outcome<Point> + Send + Sync>;

/// What a node does when its graph is launched.
pub struct Action {
    /// Enqueues the work.
    pub enqueue: Enqueue,
    /// Callers' memory that the work uses.
    pub spans: Vec<Span>,
    /// What tells peers that a collective will never come.
    pub breaker: Option<Breaker>,
    /// Memory that the node allocates or frees.
    pub memory: Option<MemoryNode>,
}

/// Memory of a graph: it has its address from the capture on, and belongs to callers while it is allocated.
#[derive(Debug)]
pub struct GraphMemory {
    span: Span,
    /// In the order of the calls, not of the streams.
    is_allocated: AtomicBool,
}

/// What a node does to a graph's memory.
#[derive(Clone, Debug)]
pub struct MemoryNode {
    memory: Arc<GraphMemory>,
    allocates: bool,
}

static GRAPH_MEMORY: LazyLock<Mutex<HashMap<usize, Weak<GraphMemory>>>> = LazyLock::new(Mutex::default);

impl Drop for GraphMemory {
    fn drop(&mut self) {
        GRAPH_MEMORY.lock().remove(&self.span.address());
        if let Ok(allocation) = memory::forget(self.span.address(), |kind| kind == memory::Kind::Graph) {
            memory::release(allocation);
        }
    }
}

/// A graph's memory that starts at `address`.
pub fn memory_at(address: usize) -> Option<Arc<GraphMemory>> {
    GRAPH_MEMORY.lock().get(&address).and_then(Weak::upgrade)
}

/// Allocates in the order of a captured stream: a node of the graph, whose launches allocate the memory. Nothing if the
/// stream is not captured.
pub fn allocate_memory(bytes: usize, stream: &Arc<Stream>) -> Outcome<Option<usize>> {
    if !is_capturing(stream) {
        return Ok(None);
    }
    let base = memory::allocate(bytes, memory::Kind::Graph, stream.device().ordinal)?;
    if base.is_null() {
        return Ok(Some(0));
    }
    // SAFETY: the memory was just allocated with this size, and lives as long as what holds the span.
    let span = unsafe { Span::new(base, bytes) }?;
    let memory = Arc::new(GraphMemory { span, is_allocated: AtomicBool::new(true) });
    GRAPH_MEMORY.lock().insert(span.address(), Arc::downgrade(&memory));
    record(stream, || memory_node(&memory, true))?;
    Ok(Some(span.address()))
}

/// Frees a graph's memory in stream order: in a capture as a node.
pub fn free_memory(memory: &Arc<GraphMemory>, stream: &Arc<Stream>) -> Outcome<()> {
    if !memory.is_allocated.load(Ordering::SeqCst) {
        let text = format!("{:#x} belongs to a graph and is not allocated now", memory.span.address());
        return Err(Fault::cuda(cudaErrorInvalidValue, text));
    }
    if !record(stream, || memory_node(memory, false))? {
        stream.push(Vec::new(), poison(memory))?;
    }
    memory.is_allocated.store(false, Ordering::SeqCst);
    Ok(())
}

fn memory_node(memory: &Arc<GraphMemory>, allocates: bool) -> Action {
    let run = poison(memory);
    Action {
        enqueue: Arc::new(move |stream, after| stream.push(after, Arc::clone(&run))),
        spans: Vec::new(),
        breaker: None,
        memory: Some(MemoryNode { memory: Arc::clone(memory), allocates }),
    }
}

/// Makes reads of what is not written, or freed, seen.
fn poison(memory: &Arc<GraphMemory>) -> Run {
    let memory = Arc::clone(memory);
    Arc::new(move |_: Option<&Fault>| {
        memory::poison_again(memory.span.address());
        Ok(())
    })
}

struct Node {
    lane: usize,
    after: Vec<usize>,
    action: Action,
}

/// A stream that takes part in a capture, and the nodes that its next one follows.
struct Lane {
    stream: Arc<Stream>,
    tail: Vec<usize>,
}

struct Capture {
    id: u64,
    mode: Mode,
    thread: ThreadId,
    /// Why the capture can no longer end well.
    invalid: Option<String>,
    nodes: Vec<Node>,
    /// The stream that the capture began on comes first.
    lanes: Vec<Lane>,
}

#[derive(Default)]
struct Registry {
    captures: Vec<Capture>,
    begun: u64,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);
/// Captures that are going on, so that everyone else pays for one load only.
static LIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD_MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
    /// Which replay of a graph this thread enqueues.
    static REPLAY: Cell<u64> = const { Cell::new(0) };
}

/// Nodes of a capture that an event stands for.
#[derive(Clone, Debug)]
pub struct Mark {
    capture: u64,
    after: Vec<usize>,
}

impl Capture {
    fn lane(&self, stream: &Arc<Stream>) -> Option<usize> {
        self.lanes.iter().position(|lane| Arc::ptr_eq(&lane.stream, stream))
    }

    fn invalidate(&mut self, reason: &str) {
        self.invalid.get_or_insert_with(|| reason.to_owned());
    }

    fn check(&self) -> Outcome<()> {
        match &self.invalid {
            None => Ok(()),
            Some(reason) => {
                let text = format!("the capture was invalidated before: {reason}");
                Err(Fault::cuda(cudaErrorStreamCaptureInvalidated, text))
            }
        }
    }

    fn has_blocking(&self, device: &Device) -> bool {
        self.lanes.iter().any(|lane| lane.stream.kind() == Kind::Blocking && std::ptr::eq(lane.stream.device(), device))
    }

    /// Whether a stream that joined has work that the first stream does not wait for.
    fn has_unjoined_work(&self) -> bool {
        let mut joined: HashSet<usize> = HashSet::new();
        let mut open = self.lanes[0].tail.clone();
        while let Some(node) = open.pop() {
            if joined.insert(node) {
                open.extend(&self.nodes[node].after);
            }
        }
        self.lanes.iter().flat_map(|lane| &lane.tail).any(|node| !joined.contains(node))
    }
}

impl Registry {
    fn position(&self, stream: &Arc<Stream>) -> Option<usize> {
        self.captures.iter().position(|capture| capture.lane(stream).is_some())
    }

    fn remove(&mut self, position: usize) -> Capture {
        LIVE.fetch_sub(1, Ordering::SeqCst);
        self.captures.remove(position)
    }

    /// Invalidates the captures that `hit` picks; if there are any, that is an error.
    fn refuse(&mut self, code: u32, text: &str, hit: impl Fn(&Capture) -> bool) -> Outcome<()> {
        let mut refused = false;
        for capture in self.captures.iter_mut().filter(|capture| hit(capture)) {
            capture.invalidate(text);
            refused = true;
        }
        if refused { Err(Fault::cuda(code, text).breaks(Rule::CaptureUnsafe)) } else { Ok(()) }
    }

    /// Fails where the NULL stream would depend on a blocking stream that is captured.
    fn refuse_implicit(&mut self, stream: &Arc<Stream>, what: &str) -> Outcome<()> {
        if stream.kind() != Kind::Legacy {
            return Ok(());
        }
        let text = format!("{what} on the NULL stream while a blocking stream is captured");
        self.refuse(cudaErrorStreamCaptureImplicit, &text, |capture| capture.has_blocking(stream.device()))
    }

    fn refuse_unsafe(&mut self, what: &str) -> Outcome<()> {
        let own_mode = THREAD_MODE.get();
        if own_mode == Mode::Relaxed {
            return Ok(());
        }
        let thread = std::thread::current().id();
        let text = format!("{what} while a stream is captured");
        self.refuse(cudaErrorStreamCaptureUnsupported, &text, |capture| match capture.mode {
            Mode::Global => own_mode == Mode::Global || capture.thread == thread,
            Mode::ThreadLocal => capture.thread == thread,
            Mode::Relaxed => false,
        })
    }
}

/// Which replay of a graph the calling thread enqueues; 0 for none.
pub fn replay() -> u64 {
    REPLAY.get()
}

/// Whether any stream of the process is captured.
fn active() -> bool {
    LIVE.load(Ordering::SeqCst) != 0
}

/// Begins the capture of a stream.
pub fn begin(stream: &Arc<Stream>, mode: u32) -> Outcome<()> {
    let mode = Mode::from_number(mode)?;
    if stream.kind() == Kind::Legacy {
        return Err(Fault::cuda(cudaErrorStreamCaptureUnsupported, "the NULL stream cannot be captured"));
    }
    let mut registry = REGISTRY.lock();
    if registry.position(stream).is_some() {
        return Err(Fault::cuda(cudaErrorIllegalState, "the stream is captured already"));
    }
    registry.begun += 1;
    let id = registry.begun;
    registry.captures.push(Capture {
        id,
        mode,
        thread: std::thread::current().id(),
        invalid: None,
        nodes: Vec::new(),
        lanes: vec![Lane { stream: Arc::clone(stream), tail: Vec::new() }],
    });
    LIVE.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Ends the capture of the stream that it began on, and gives the graph's handle.
pub fn end(stream: &Arc<Stream>) -> Outcome<usize> {
    let mut registry = REGISTRY.lock();
    let position =
        registry.position(stream).ok_or_else(|| Fault::cuda(cudaErrorIllegalState, "the stream is not captured"))?;
    let capture = &mut registry.captures[position];
    if capture.lane(stream) != Some(0) {
        let text = "the capture is ended on a stream that it did not begin on";
        capture.invalidate(text);
        return Err(Fault::cuda(cudaErrorStreamCaptureUnmatched, text));
    }
    let capture = registry.remove(position);
    drop(registry);
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        let text = "the capture is ended by another thread than began it, and its mode is not relaxed";
        return Err(Fault::cuda(cudaErrorStreamCaptureWrongThread, text));
    }
    capture.check()?;
    if capture.has_unjoined_work() {
        let text = "a stream that joined the capture has work that the first stream does not wait for";
        return Err(Fault::cuda(cudaErrorStreamCaptureUnjoined, text));
    }
    let devices = capture.lanes.iter().map(|lane| lane.stream.device()).collect();
    let graph = Arc::new(Graph { nodes: capture.nodes, devices });
    let handle = Arc::as_ptr(&graph) as usize;
    GRAPHS.lock().insert(handle, graph);
    Ok(handle)
}

/// Capture status of a stream, and the capture's id.
pub fn status(stream: &Arc<Stream>) -> Outcome<(cudaStreamCaptureStatus, u64)> {
    let registry = REGISTRY.lock();
    let implicit =
        stream.kind() == Kind::Legacy && registry.captures.iter().any(|capture| capture.has_blocking(stream.device()));
    if implicit {
        let text = "a question about the NULL stream while a blocking stream is captured";
        return Err(Fault::cuda(cudaErrorStreamCaptureImplicit, text));
    }
    Ok(match registry.position(stream).map(|position| &registry.captures[position]) {
        None => (cudaStreamCaptureStatusNone, 0),
        Some(capture) if capture.invalid.is_none() => (cudaStreamCaptureStatusActive, capture.id),
        Some(capture) => (cudaStreamCaptureStatusInvalidated, capture.id),
    })
}

/// Whether a stream is captured, be the capture valid or not.
pub fn is_capturing(stream: &Arc<Stream>) -> bool {
    active() && REGISTRY.lock().position(stream).is_some()
}

/// Sets the mode in which captures bind the calling thread; gives the old one.
pub fn exchange_thread_mode(mode: Mode) -> Mode {
    THREAD_MODE.replace(mode)
}

/// Records work of a captured stream; `false` if the stream is not captured and the work has to be enqueued.
pub fn record(stream: &Arc<Stream>, action: impl FnOnce() -> Action) -> Outcome<bool> {
    if !active() {
        return Ok(false);
    }
    let mut registry = REGISTRY.lock();
    registry.refuse_implicit(stream, "work")?;
    let Some(position) = registry.position(stream) else { return Ok(false) };
    let capture = &mut registry.captures[position];
    capture.check()?;
    let Some(lane) = capture.lane(stream) else { return Ok(false) };
    let after = std::mem::replace(&mut capture.lanes[lane].tail, vec![capture.nodes.len()]);
    capture.nodes.push(Node { lane, after, action: action() });
    Ok(true)
}

/// Fails for what a captured stream cannot do, which invalidates the capture.
pub fn refuse_on_captured(stream: &Arc<Stream>, what: &str) -> Outcome<()> {
    if !active() {
        return Ok(());
    }
    let mut registry = REGISTRY.lock();
    registry.refuse_implicit(stream, what)?;
    let text = format!("{what} while the stream is captured");
    registry.refuse(cudaErrorStreamCaptureUnsupported, &text, |capture| capture.lane(stream).is_some())
}

/// Fails for calls that a capture of this thread, or a global one of any thread, forbids.
pub fn refuse_unsafe(what: &str) -> Outcome<()> {
    if active() { REGISTRY.lock().refuse_unsafe(what) } else { Ok(()) }
}

/// Fails for a wait or a question about a stream's work that a capture forbids.
pub fn refuse_stream_wait(stream: &Arc<Stream>, what: &str) -> Outcome<()> {
    refuse_on_captured(stream, what)?;
    refuse_unsafe(what)
}

/// Fails for a wait for all work of a device while one of its streams is captured.
pub fn refuse_device_wait(device: &Device, what: &str) -> Outcome<()> {
    if !active() {
        return Ok(());
    }
    let mut registry = REGISTRY.lock();
    let text = format!("{what} while a stream of the device is captured");
    let captures = |capture: &Capture| capture.lanes.iter().any(|lane| std::ptr::eq(lane.stream.device(), device));
    registry.refuse(cudaErrorStreamCaptureUnsupported, &text, captures)?;
    registry.refuse_unsafe(what)
}

/// What an event recorded on a stream stands for; `None` if the stream is not captured.
pub fn mark(stream: &Arc<Stream>) -> Outcome<Option<Mark>> {
    if !active() {
        return Ok(None);
    }
    let mut registry = REGISTRY.lock();
    registry.refuse_implicit(stream, "an event")?;
    let Some(position) = registry.position(stream) else { return Ok(None) };
    let capture = &registry.captures[position];
    capture.check()?;
    Ok(capture.lane(stream).map(|lane| Mark { capture: capture.id, after: capture.lanes[lane].tail.clone() }))
}

/// Makes a stream wait for an event that was recorded in a capture: it joins the capture.
pub fn join(stream: &Arc<Stream>, mark: &Mark) -> Outcome<()> {
    let mut registry = REGISTRY.lock();
    registry.refuse_implicit(stream, "a wait")?;
    let theirs = registry
        .captures
        .iter()
        .position(|capture| capture.id == mark.capture)
        .ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, "the event was recorded in a capture that has ended"))?;
    if let Some(own) = registry.position(stream).filter(|own| *own != theirs) {
        let text = "a captured stream waits for an event of another capture";
        for position in [own, theirs] {
            registry.captures[position].invalidate(text);
        }
        return Err(Fault::cuda(cudaErrorStreamCaptureMerge, text));
    }
    let capture = &mut registry.captures[theirs];
    capture.check()?;
    if stream.kind() == Kind::Legacy {
        let text = "the NULL stream waits for an event of a capture";
        capture.invalidate(text);
        return Err(Fault::cuda(cudaErrorStreamCaptureImplicit, text));
    }
    let lane = capture.lane(stream).unwrap_or_else(|| {
        capture.lanes.push(Lane { stream: Arc::clone(stream), tail: Vec::new() });
        capture.lanes.len() - 1
    });
    let tail = &mut capture.lanes[lane].tail;
    for node in &mark.after {
        if !tail.contains(node) {
            tail.push(*node);
        }
    }
    Ok(())
}

/// Checks a wait for an event that no capture knows: a captured stream may not wait for what happens outside.
pub fn refuse_outside_event(stream: &Arc<Stream>, recorded: bool) -> Outcome<()> {
    if !active() {
        return Ok(());
    }
    let mut registry = REGISTRY.lock();
    registry.refuse_implicit(stream, "a wait")?;
    let Some(position) = registry.position(stream) else { return Ok(()) };
    let capture = &mut registry.captures[position];
    capture.check()?;
    if recorded {
        let text = "a captured stream waits for an event that was recorded outside the capture";
        capture.invalidate(text);
        return Err(Fault::cuda(cudaErrorStreamCaptureIsolation, text));
    }
    Ok(())
}

/// The error for a question about an event of a capture; `invalidate` says whether that ends the capture.
pub fn captured_event(mark: &Mark, invalidate: bool) -> Fault {
    let mut registry = REGISTRY.lock();
    let text = "the event was last recorded in a capture";
    match registry.captures.iter_mut().find(|capture| capture.id == mark.capture) {
        Some(capture) => {
            if invalidate {
                capture.invalidate(text);
            }
            Fault::cuda(cudaErrorCapturedEvent, text)
        }
        None => Fault::cuda(cudaErrorInvalidValue, text),
    }
}

/// Forgets the capture that began on a stream which is destroyed.
pub fn abandon(stream: &Arc<Stream>) {
    if !active() {
        return;
    }
    let mut registry = REGISTRY.lock();
    let begun_here = registry.captures.iter().position(|capture| capture.lane(stream) == Some(0));
    let abandoned = begun_here.map(|position| registry.remove(position));
    drop(registry);
    drop(abandoned);
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
    let branches = graph.devices.iter().skip(1).map(|device| Stream::create(device, Kind::NonBlocking)).collect();
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
                let fault = check::sign(fault);
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
