//! The host runtime: a drop-in for the parts of the CUDA driver, the CUDA runtime, NCCL and NCCL EP that expert-parallel
//! programs use, working on host memory without a GPU.
//!
//! | module | what |
//! | --- | --- |
//! | [`surface`] | the exported C functions, one file an interface |
//! | [`device`] | devices, contexts, attributes, sticky errors |
//! | [`stream`] | streams and events: queues with worker threads |
//! | [`graph`] | stream capture, graphs and their replay |
//! | [`memory`], [`copy`] | tracked device and pinned memory; copies and fills |
//! | [`machine`] | how much memory there is |
//! | [`channel`], [`sys`] | how ranks meet and exchange data through shared memory |
//! | [`mod@line`], [`batch`] | operations one behind the other; what a group of calls holds back |
//! | [`comm`], [`windows`], [`collectives`], [`dtype`] | communicators, their memory and work; element types |
//! | [`ep`] | EP groups, handles, routing, dispatch and combine |
//! | [`fault`], [`errors`], [`stats`] | errors, their names, counters |
//! | [`float`] | the floating-point environment of work |
//! | [`check`], [`order`] | the contract checker: its rules; what a stream comes behind |
//! | [`caller`] | whose function and arguments reports name |
//! | [`settings`] | the environment's numbers |
//! | [`inject`] | faults that a test asks for |
//! | [`kernels`], [`native`] | the kernels that can be launched; those of the native engine |
//!
//! Ranks are processes of one machine, or threads of one process with a device each
//! (see [`settings::DEVICES_VARIABLE`]).
//!
//! Of duplicate experts in a row of `topk_idx` the last one's weight counts.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

pub mod batch;
pub mod caller;
pub mod channel;
pub mod check;
pub mod collectives;
pub mod comm;
pub mod copy;
pub mod device;
pub mod dtype;
pub mod ep;
pub mod errors;
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
pub mod settings;
pub mod stats;
pub mod stream;
pub mod surface;
pub mod sys;
pub mod windows;
