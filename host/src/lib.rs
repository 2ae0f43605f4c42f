//! The host runtime: a drop-in for the parts of the CUDA driver, the CUDA runtime, NCCL and NCCL EP that expert-parallel
//! programs use, working on host memory without a GPU.
//!
//! Arrows between its modules point downward in this table only (`tests/architecture.rs` of the core checks it):
//!
//! | module | what |
//! | --- | --- |
//! | [`surface`] | the exported C functions, one file an interface |
//! | [`ep`] | EP groups, handles, routing, dispatch and combine |
//! | [`collectives`], [`comm`], [`windows`], [`batch`], [`mod@line`] | communicators, their work and their memory; what a group of calls holds back; operations one behind the other |
//! | [`copy`], [`kernels`], [`native`], [`stream`], [`event`] | copies and fills, the kernels that can be launched, those of the native engine among them, streams and events of callers |
//! | [`graph`] | stream capture, graphs and their replay |
//! | [`queue`], [`order`], [`channel`] | queues with worker threads; what a queue comes behind; how ranks meet and exchange data through shared memory |
//! | [`device`], [`tensor_check`], [`memory`], [`dtype`] | devices and their sticky errors; the checker's rules about memory; tracked memory; element types |
//! | [`check`], [`inject`], [`errors`], [`stats`] | the contract checker; faults that a test asks for; names of errors; counters |
//! | [`acting`], [`caller`], [`fault`], [`rule`], [`settings`], [`domains`], [`float`], [`machine`], [`sys`] | who acts, and for whom; errors; the contract's rules; the environment; simulated machines; the floating-point environment; the machine |
//!
//! Ranks are processes of one machine, or threads of one process with a device each
//! (see [`settings::DEVICES_VARIABLE`]).
//!
//! Of duplicate experts in a row of `topk_idx` the last one's weight counts.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

pub mod acting;
pub mod batch;
pub mod caller;
pub mod channel;
pub mod check;
pub mod collectives;
pub mod comm;
pub mod copy;
pub mod device;
pub mod domains;
pub mod dtype;
pub mod ep;
pub mod errors;
pub mod event;
pub mod fault;
pub mod float;
pub mod graph;
pub mod inject;
pub mod kernels;
pub mod line;
pub mod machine;
pub mod memory;
pub mod native;
pub mod order;
pub mod queue;
pub mod rule;
pub mod settings;
pub mod stats;
pub mod stream;
pub mod surface;
pub mod sys;
pub mod tensor_check;
pub mod windows;
