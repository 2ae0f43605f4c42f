//! The EP group of each device.
//!
//! | module | holds |
//! |---|---|
//! | `registry` | which device has which group |
//! | `create`, `teardown` | the beginning and end of a group, by all ranks together; `joint` and `agreement` are their rendezvous |
//! | `group` | the operations; `layers`, `prepared` and `placement` are their steps |
//! | `low_latency` | the other group that a device may have |
//! | `routing` | what handle memory holds |
//! | `engine` | the engines, which move the rows: NCCL EP, native |
//! | `symm`, `residency` | symmetric memory; where the memory of tensors is |
//! | `watchdog`, `in_flight`, `fork` | calls that do not end, and processes that may not call |

mod agreement;
mod communicator;
mod create;
mod engine;
mod fork;
mod group;
mod in_flight;
mod joint;
mod layers;
mod live;
mod low_latency;
mod placement;
mod prepared;
mod registry;
mod residency;
mod routing;
mod stats;
mod symm;
mod teardown;
mod watchdog;

pub use crate::symm_pool::SymmetricAddress;
pub use communicator::Communicator;
pub use create::initialize;
pub use engine::EngineKind;
pub use live::{HandleRef, LayerClaim, MemoryUsage, RecvTotals};
pub use low_latency::{LlGroup, LlMemoryUsage, current_ll_group, ll_initialize, ll_shutdown};
pub use registry::{EpGroup, current_group, report_failure};
pub use routing::notes::HandleKey;
pub use stats::{CallStats, LibraryFacts, Stats};
pub use teardown::shutdown;
