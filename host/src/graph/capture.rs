//! Captures that are going on: which streams take part, and what they forbid.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use super::nodes::{Action, Node};
use crate::device::Device;
use crate::fault::{Fault, Outcome};
use crate::queue::{Stream, StreamKind};
use crate::rule::Rule;

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
        self.lanes
            .iter()
            .any(|lane| lane.stream.kind() == StreamKind::Blocking && std::ptr::eq(lane.stream.device(), device))
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
        if stream.kind() != StreamKind::Legacy {
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

/// Whether any stream of the process is captured.
fn active() -> bool {
    LIVE.load(Ordering::SeqCst) != 0
}

/// Begins the capture of a stream.
pub fn begin(stream: &Arc<Stream>, mode: u32) -> Outcome<()> {
    let mode = Mode::from_number(mode)?;
    if stream.kind() == StreamKind::Legacy {
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

/// Ends the capture of the stream that it began on; gives what was recorded, and the device of each of its streams.
pub(super) fn end(stream: &Arc<Stream>) -> Outcome<(Vec<Node>, Vec<&'static Device>)> {
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
    Ok((capture.nodes, devices))
}

/// Capture status of a stream, and the capture's id.
pub fn status(stream: &Arc<Stream>) -> Outcome<(cudaStreamCaptureStatus, u64)> {
    let registry = REGISTRY.lock();
    let implicit = stream.kind() == StreamKind::Legacy
        && registry.captures.iter().any(|capture| capture.has_blocking(stream.device()));
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
    if stream.kind() == StreamKind::Legacy {
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
