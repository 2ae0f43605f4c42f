//! Memory that a captured stream allocates and frees.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nvte_ep_bindings::cudaErrorInvalidValue;

use super::capture::{is_capturing, record};
use super::nodes::{GRAPH_MEMORY, GraphMemory, memory_node, poison};
use crate::fault::{Fault, Outcome};
use crate::memory::{self, Span};
use crate::queue::Stream;

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
