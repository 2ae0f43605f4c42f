//! Stream capture and graphs.
//!
//! While a stream is captured, what would be enqueued on it is recorded as a node: an action that enqueues the same work
//! when the graph is launched, with the arguments that it was given. A node knows the nodes that it follows, by the order
//! of its stream and by events; a launch turns these into points of the streams that replay the graph.
//!
//! Which calls are refused while a capture is going on, with which code, and whether that ends the capture, was read off
//! an H200 with the 580.159 driver (CUDA 13.0).

mod capture;
mod memory_nodes;
mod nodes;
mod replay;

pub use self::capture::{
    Mark, Mode, abandon, begin, captured_event, exchange_thread_mode, is_capturing, join, mark, record,
    refuse_device_wait, refuse_on_captured, refuse_outside_event, refuse_stream_wait, refuse_unsafe, status,
};
pub use self::memory_nodes::{allocate_memory, free_memory};
pub use self::nodes::{Action, Enqueue, GraphMemory, MemoryNode, memory_at};
pub use self::replay::{destroy_exec, destroy_graph, end, instantiate, launch, live_counts, replay, update_exec};
