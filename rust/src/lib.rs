//! Expert parallelism for Rust: tokens of a Mixture-of-Experts layer go to the GPUs that own their experts, and come back.
//!
//! A step of a layer is four calls, two more in training:
//!
//! | call | does |
//! |---|---|
//! | [`HandleMemory::prepare`] | exchanges the router's choices between all ranks; gives the step, [`Prepared`] |
//! | [`Prepared::dispatch`] | sends each token's row to the ranks of its experts |
//! | your experts | work on the received rows, expert after expert |
//! | [`Prepared::combine`] | sums each token's rows back on its own rank |
//! | [`Prepared::combine_bwd`], [`Prepared::dispatch_bwd`] | the gradients of the two |
//!
//! ```
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/alone.rs"));
//! use nvte_ep::*;
//!
//! const T: usize = 4; // tokens of this rank
//! const H: usize = 64; // elements of a token's row
//! const K: usize = 2; // experts per token
//! const E: usize = 4; // experts of all ranks
//! # fn main() -> Result<()> {
//! # let device = Alone::new();
//! let (rank, ranks) = (0, 1);
//! const C: usize = T * K; // rows that this rank can receive: ranks * T * K hold any routing
//!
//! // Rank 0 makes the id and brings it to the others, by a file, a socket or MPI.
//! let comm = Communicator::new(UniqueId::new()?, rank, ranks)?;
//! let group = Group::builder(comm)
//!     .num_experts(E as u32)
//!     .max_tokens_per_rank(T as u32)
//!     .max_recv_tokens_per_rank(C as u32)
//!     .hidden_dim(H as u32)
//!     .max_token_dtype::<f32>()
//!     .build()?;
//! let layer = group.layer(LayerConfig { top_k: K as u32, alignment: 1 })?;
//! let mut handle = layer.handle()?;
//!
//! // Device memory: cudarc's CudaSlice with the feature `cudarc`, or addresses of your own as here.
//! # let (a, b) = (device.filled(&[0i64, 1, 1, 2, 2, 3, 3, 0]), device.filled(&[1f32; T * H]));
//! # let (c, d, e) = (device.zeros::<i32>(E), device.zeros::<f32>(C * H), device.zeros::<f32>(T * H));
//! # let [experts_address, tokens_address, counts_address] = [a.address(), b.address(), c.address()];
//! # let [recv_address, result_address] = [d.address(), e.address()];
//! // SAFETY: the memory is as large, and freed after the work is done.
//! let (experts, tokens) = unsafe {
//!     (RawSlice::<i64>::new(experts_address, T * K), RawSlice::<f32>::new(tokens_address, T * H))
//! };
//! let (mut counts, mut recv, mut result) = unsafe {
//!     (
//!         RawSlice::<i32>::new(counts_address, E / ranks),
//!         RawSlice::<f32>::new(recv_address, C * H),
//!         RawSlice::<f32>::new(result_address, T * H),
//!     )
//! };
//!
//! let stream = Stream::DEFAULT; // or Stream::from_raw, or &cudarc_stream
//! let step = handle.prepare(Prepare { topk_idx: &experts, token_counts: &mut counts, total: None }, stream)?;
//! let (sent, received) = (Rows::new(&tokens, H), RowsMut::new(&mut recv, H));
//! step.dispatch(Dispatch { tokens: sent, recv_tokens: received, weights: None }, stream)?;
//! // Here the experts work, each on its slab of `recv`, counts[e] rows long.
//! let (expert_out, sums) = (Rows::new(&recv, H), RowsMut::new(&mut result, H));
//! step.combine(Combine { expert_out, result: sums }, stream)?;
//! # assert_eq!(e.get(T * H), vec![K as f32; T * H]); // waits for the stream
//!
//! // `step` is not used any more, so the handle is free for the next step.
//! drop(handle);
//! group.shutdown()?; // or drop it, and not know whether it went well
//! # Ok(())
//! # }
//! ```
//!
//! `examples/step.rs` is the same with cudarc, several ranks and gradients; `examples/pipeline.rs` has two micro-batches in
//! flight.
//!
//! # What the compiler checks
//!
//! * What belongs to a [`Group`] borrows it: nothing of it can be used after its end.
//! * A step ([`Prepared`]) borrows its [`HandleMemory`]: the handle cannot be prepared again while the step is in flight.
//! * The calls are methods of the step: none can come before its prepare.
//! * What a call writes is borrowed as such, so it is no other argument of the call:
//!
//! ```compile_fail,E0502
//! # use nvte_ep::*;
//! # fn f(step: &Prepared, mut rows: RawSlice<f32>) -> Result<()> {
//! let (tokens, recv_tokens) = (Rows::new(&rows, 64), RowsMut::new(&mut rows, 64));
//! step.dispatch(Dispatch { tokens, recv_tokens, weights: None }, Stream::DEFAULT)
//! # }
//! ```
//!
//! ```
//! # use nvte_ep::*;
//! # fn f(step: &Prepared, rows: RawSlice<f32>, mut received: RawSlice<f32>) -> Result<()> {
//! let (tokens, recv_tokens) = (Rows::new(&rows, 64), RowsMut::new(&mut received, 64));
//! step.dispatch(Dispatch { tokens, recv_tokens, weights: None }, Stream::DEFAULT)
//! # }
//! ```
//!
//! * Rows that are sent and received have one type, and only 8-bit rows have scales:
//!
//! ```compile_fail,E0277
//! # use nvte_ep::*;
//! # fn f(rows: &RawSlice<f32>, scales: &RawSlice<Float8E8M0>) {
//! Rows::new(rows, 64).with_scales(scales); // f32 is not `Scaled`
//! # }
//! ```
//!
//! ```
//! # use nvte_ep::*;
//! # fn f(rows: &RawSlice<Float8E4M3>, scales: &RawSlice<Float8E8M0>) {
//! Rows::new(rows, 64).with_scales(scales);
//! # }
//! ```
//!
//! All else is an [`Error`] before anything is queued: shapes, sizes, where memory lies, the order of calls. What the device
//! finds later, a later call or synchronization reports.
//!
//! # Patterns
//!
//! | program | does |
//! |---|---|
//! | inference | prepare, dispatch, combine |
//! | training | keeps the [`Prepared`] from the forward to the backward |
//! | activation recomputation | dispatches again before the backward; the step still has the routing |
//! | micro-batches, 1F1B | has a handle for each micro-batch in flight; [`Prepared::finish`] gives it back to a queue |
//! | CUDA graphs | makes the step once, captures it on its stream; after a launch, [`HandleMemory::resume`] takes up its routing |
//! | zero copy | [`GroupBuilder::zero_copy`], and receive buffers of [`Group::symmetric`] |
//! | eager | [`GroupBuilder::eager`], and receive buffers of [`Prepared::recv_totals`] rows |
//! | MXFP8 | [`Rows::with_scales`] and [`RowsMut::with_scales`] |
//! | a group for the process's life | `Box::leak(Box::new(group))`; layers and handles are `'static` then |
//!
//! # Threads, devices, ranks
//!
//! A group is of the device that was current when it was built, and its calls are made by threads that have it current
//! (`CudaContext::bind_to_thread`, `cudaSetDevice`). All ranks make the same calls in the same order, and the calls of a group are
//! on one stream, or on streams that events order: neither is visible to the compiler, and the device does not forgive it. The calls queue work and
//! return; a call allocates nothing. `NVTE_EP_RUNTIME=host` runs the same program without a GPU, on the host runtime, which
//! also checks the contract between ranks: see the guide.
//!
//! # Features
//!
//! * `cudarc`: `CudaSlice`, `CudaView` and `CudaViewMut` are arguments, and `&CudaStream` is a [`Stream`]. cudarc's events order
//!   the calls with all other use of the memory, so programs need no `unsafe`. (In a capture a stream cannot wait for events
//!   of before: a program with graphs calls `CudaContext::disable_event_tracking` first, and orders the use itself.) A feature of
//!   cudarc chooses the CUDA version; without one it is that of nvcc, or else the newest.
//! * `half`: `half::bf16` and `half::f16` are token types. Without it there are [`BFloat16`] and [`Float16`].

mod call;
mod communicator;
#[cfg(feature = "cudarc")]
mod cudarc;
mod dtype;
mod error;
mod group;
mod layer;
mod memory;
mod prepared;
mod stream;
mod symmetric;

pub use call::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare, WeightGrads, Weights};
pub use communicator::{Communicator, UNIQUE_ID_BYTES, UniqueId};
pub use dtype::{BFloat16, DType, Element, Float8E4M3, Float8E5M2, Float8E8M0, Float16, Index, Scaled, Token};
pub use error::{Error, ErrorKind, Result};
pub use group::{Group, GroupBuilder};
pub use layer::{HandleMemory, Layer, LayerConfig};
pub use memory::{DeviceSlice, DeviceSliceMut, Lent, RawSlice, Rows, RowsMut};
#[doc(inline)]
pub use nvte_ep_core::backend::{CallStats, EngineKind as Backend, LibraryFacts, MemoryUsage, RecvTotals, Stats};
pub use prepared::Prepared;
pub use stream::Stream;
pub use symmetric::{RegisteredSlice, SymmetricSlice};
