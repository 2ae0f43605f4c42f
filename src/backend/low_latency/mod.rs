//! The low-latency group of each device, beside its other group: for steps of few tokens. It has its own kernels, buffers, watchdog
//! and life, and shares with the other what the ranks do together (`joint`, `agreement`) and the communicator.

mod create;
mod current;
mod group;
pub(super) mod live;
mod teardown;

pub use create::ll_initialize;
pub use current::{LlGroup, current_ll_group};
pub use live::LlMemoryUsage;
pub use teardown::ll_shutdown;
