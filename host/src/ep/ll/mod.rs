//! NCCL EP in low-latency mode: few tokens a rank, exact shapes, and operations in two halves.

pub mod arrivals;
pub mod combine;
pub mod dispatch;
pub mod handle;
pub mod limits;
pub mod quantise;
pub mod slots;
pub mod staged;
