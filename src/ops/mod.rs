//! The per-step operations: their arguments by name (`args`), and every rule about them: of an operation (`rules`), of one
//! tensor (`rows`), of scaled ones (`mxfp8`), of memory that two of them share (`overlap`). The operations of
//! low-latency groups are in `low_latency`. A new rule has its text in docs/errors.md and a case in `tests`.
#![forbid(unsafe_code)]

mod args;
mod low_latency;
mod mxfp8;
mod overlap;
mod rows;
mod rules;
#[cfg(test)]
mod tests;

pub(crate) use args::{Arguments, LayerArguments};
pub use args::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare, Prepared};
pub(crate) use low_latency::ll_step;
pub use low_latency::{LlCombine, LlDispatch, LlDispatched};
pub(crate) use mxfp8::scales_of;
pub(crate) use overlap::{Extents, Ranges};
