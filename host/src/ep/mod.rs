//! NCCL EP in high-throughput mode with the expert-major and the flat layout.

pub mod combine;
pub mod desc;
pub mod dispatch;
pub mod group;
pub mod handle;
pub mod memory_layout;
pub mod routing;
pub mod routing_header;
pub mod update;
