//! NCCL EP: high-throughput mode with the expert-major and the flat layout, and low-latency mode in `ll`.

pub mod combine;
pub mod desc;
pub mod dispatch;
pub mod group;
pub mod handle;
pub mod ll;
pub mod memory_layout;
pub mod mode;
pub mod routing;
pub mod routing_header;
pub mod update;
