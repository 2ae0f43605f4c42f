//! Nodes: what a captured call does when its graph is launched, and the memory that graphs own.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use crate::channel::Breaker;
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Span};
use crate::queue::{Point, Run, Stream};

/// Enqueues a node's work on a stream, behind points of others.
pub type Enqueue = Arc<dyn Fn(&Arc<Stream>, Vec<Point>) -> Outcome<Point> + Send + Sync>;

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
    pub(super) span: Span,
    /// In the order of the calls, not of the streams.
    pub(super) is_allocated: AtomicBool,
}

/// What a node does to a graph's memory.
#[derive(Clone, Debug)]
pub struct MemoryNode {
    pub(super) memory: Arc<GraphMemory>,
    pub(super) allocates: bool,
}

pub(super) static GRAPH_MEMORY: LazyLock<Mutex<HashMap<usize, Weak<GraphMemory>>>> = LazyLock::new(Mutex::default);

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

/// A node that allocates or frees a graph's memory.
pub(super) fn memory_node(memory: &Arc<GraphMemory>, allocates: bool) -> Action {
    let run = poison(memory);
    Action {
        enqueue: Arc::new(move |stream, after| stream.push(after, Arc::clone(&run))),
        spans: Vec::new(),
        breaker: None,
        memory: Some(MemoryNode { memory: Arc::clone(memory), allocates }),
    }
}

/// Makes reads of what is not written, or freed, seen.
pub(super) fn poison(memory: &Arc<GraphMemory>) -> Run {
    let memory = Arc::clone(memory);
    Arc::new(move |_: Option<&Fault>| {
        memory::poison_again(memory.span.address());
        Ok(())
    })
}

/// A recorded call.
pub struct Node {
    pub(super) lane: usize,
    pub(super) after: Vec<usize>,
    pub(super) action: Action,
}
