//! What host and kernels agree on: the structures of `kernels/native/layout.h`, which says what their fields are, and how a
//! group's segment and a layer's handle memory are laid out. `tests/native_layout.rs` has a C++ compiler compare the structures.
#![allow(missing_docs, reason = "kernels/native/layout.h documents the fields")]

use crate::config::{GroupConfig, LayerConfig};
use crate::dtype::DType;
use crate::limits::NATIVE;

pub const SIGNAL_KINDS: u64 = 6;
pub const COUNTERS: u64 = 8;
pub const EXCHANGE_HEADER: u64 = 16;
pub const META_BYTES: u64 = 64;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Status {
    pub failed: u32,
    pub peer: u32,
    pub seen: u32,
    pub wanted: u32,
    pub abort: u32,
    pub overflowed: u32,
    pub needed: u64,
    pub invalid_indices: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub group_tokens: u32,
    pub groups: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Group {
    pub peers: u64,
    pub own: u64,
    pub counters: u64,
    pub histogram: u64,
    pub status: u64,
    pub timeout_ns: u64,
    pub exchange_offset: u64,
    pub exchange_stride: u64,
    pub staged_offset: u64,
    pub staged_weights_offset: u64,
    pub summed_offset: u64,
    pub summed_weights_offset: u64,
    pub row_stride: u64,
    pub weight_stride: u32,
    pub rank: u32,
    pub ranks: u32,
    pub blocks: u32,
    pub experts: u32,
    pub local_experts: u32,
    pub staged: Window,
    pub summed: Window,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    pub meta: u64,
    pub experts: u64,
    pub targets: u64,
    pub slots: u64,
    pub zones: u64,
    pub counts: u64,
    pub alive: u64,
    pub top_k: u32,
    pub width: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PrepareArguments {
    pub group: Group,
    pub handle: Handle,
    pub topk_idx: u64,
    pub token_counts: u64,
    pub total: u64,
    pub header: u64,
    pub capacity: u64,
    pub header_words: [u32; 2],
    pub tokens: u32,
    pub alignment: u32,
    pub indices_are_64: u8,
    pub counts_are_64: u8,
    pub total_is_64: u8,
    pub drop: u8,
    pub by_place: u8,
    pub unused: [u8; 3],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DispatchArguments {
    pub group: Group,
    pub handle: Handle,
    pub tokens: u64,
    pub scales: u64,
    pub weights: u64,
    pub recv_tokens: u64,
    pub recv_scales: u64,
    pub recv_weights: u64,
    pub rows: u64,
    pub row_bytes: u32,
    pub scale_bytes: u32,
    pub piece_bytes: u32,
    pub stages: u32,
    pub drop: u32,
    pub unused: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CombineArguments {
    pub group: Group,
    pub handle: Handle,
    pub rows: u64,
    pub row_weights: u64,
    pub result: u64,
    pub weights: u64,
    pub row_bytes: u32,
    pub piece_bytes: u32,
    pub peer_stages: u32,
    pub own_stages: u32,
    pub row_type: u32,
    pub with_weights: u32,
}

/// What a kernel waited for in vain, by `Status::failed` (`WaitKind` in layout.h).
pub const WAITS: [(u32, &str); 5] = [
    (1, "the indices of prepare"),
    (2, "staged rows of dispatch"),
    (3, "room for staged rows of dispatch"),
    (4, "sums of combine"),
    (5, "room for sums of combine"),
];

/// Row types of combine (`RowType` in layout.h).
pub const ROW_TYPES: [DType; 3] = [DType::BFloat16, DType::Float16, DType::Float32];

/// A place that grows part by part; parts start at multiples of 256.
#[derive(Debug, Clone, Copy, Default)]
struct Parts(u64);

impl Parts {
    const fn take(&mut self, bytes: u64) -> u64 {
        let start = self.0;
        self.0 += bytes.next_multiple_of(256);
        start
    }
}

/// Most rows of a token's experts that the group's layers may have.
pub fn most_top_k(config: &GroupConfig) -> u32 {
    config.num_topk.unwrap_or(NATIVE.top_k.min(config.num_experts))
}

/// Tokens are exchanged in units of 8, whose indices are whole 16-byte vectors.
fn padded_tokens(config: &GroupConfig) -> u64 {
    u64::from(config.max_tokens_per_rank).next_multiple_of(8)
}

/// How a group's memory is laid out.
#[derive(Debug, Clone, Copy)]
pub struct GroupLayout {
    /// The group for the kernels, without addresses, rank and time-out.
    pub group: Group,
    /// Bytes of the segment that every rank has in symmetric memory.
    pub segment_bytes: u64,
    /// Bytes of this rank's own memory: addresses of the segments, counters, histogram; and where the latter two start.
    pub own_bytes: u64,
    pub counters_offset: u64,
    pub histogram_offset: u64,
}

impl GroupLayout {
    /// `blocks`: multiprocessors that the group's kernels take.
    pub fn of(config: &GroupConfig, blocks: u32) -> Self {
        let (ranks, blocks_64) = (u64::from(config.ep_size), u64::from(blocks));
        // What is in a window is in the L2 cache on its way. Small groups cost time, since every group is told and waited for.
        let width = most_top_k(config).min(config.local_experts()).next_multiple_of(4);
        let fitting = |most: u32, groups| {
            let fits =
                |tokens: &u32| plan_bytes(ranks, Window { group_tokens: *tokens, groups }, width) <= MOST_PLAN_BYTES;
            Window { group_tokens: (2..=most).rev().find(fits).unwrap_or(1), groups }
        };
        let staged = fitting(3, 4);
        let summed = fitting(
            match config.ep_size {
                0..=8 => 8,
                9..=16 => 4,
                _ => 1,
            },
            3,
        );
        let rows = |window: Window| blocks_64 * u64::from(window.group_tokens * window.groups);
        let row_stride = config.max_token_bytes() as u64;
        let weight_stride = most_top_k(config).next_multiple_of(4);
        let mut segment = Parts::default();
        segment.take(SIGNAL_KINDS * blocks_64 * ranks * 4);
        let exchange_stride =
            (EXCHANGE_HEADER + padded_tokens(config) * u64::from(most_top_k(config)) * 2).next_multiple_of(256);
        let exchange_offset = segment.take(exchange_stride * 2 * ranks);
        let staged_offset = segment.take(rows(staged) * row_stride);
        let staged_weights_offset = segment.take(rows(staged) * u64::from(weight_stride) * 4);
        let summed_offset = segment.take(ranks * rows(summed) * row_stride);
        let summed_weights_offset = segment.take(ranks * rows(summed) * u64::from(weight_stride) * 4);
        let mut own = Parts::default();
        own.take(ranks * 8);
        let counters_offset = own.take((blocks_64 * COUNTERS + 1) * 4);
        let histogram_offset = own.take(blocks_64 * (u64::from(config.num_experts) + ranks + 1) * 4);
        let group = Group {
            peers: 0,
            own: 0,
            counters: 0,
            histogram: 0,
            status: 0,
            timeout_ns: 0,
            exchange_offset,
            exchange_stride,
            staged_offset,
            staged_weights_offset,
            summed_offset,
            summed_weights_offset,
            row_stride,
            weight_stride,
            rank: 0,
            ranks: config.ep_size,
            blocks,
            experts: config.num_experts,
            local_experts: config.local_experts(),
            staged,
            summed,
        };
        Self { group, segment_bytes: segment.0, own_bytes: own.0, counters_offset, histogram_offset }
    }

    /// The tables of a layer in handle memory at `address`, and how many bytes they take.
    pub fn handle(config: &GroupConfig, layer: &LayerConfig, blocks: u32, address: u64) -> (Handle, usize) {
        let (local, top_k) = (config.local_experts(), layer.top_k);
        let width = top_k.min(local).next_multiple_of(4);
        let (tokens, ranks) = (padded_tokens(config), u64::from(config.ep_size));
        let mut parts = Parts::default();
        let mut take = |bytes: u64| address + parts.take(bytes);
        let handle = Handle {
            meta: take(META_BYTES),
            experts: take(tokens * u64::from(top_k) * 2),
            targets: take(tokens * 16),
            slots: take(tokens * ranks * u64::from(width) * 4),
            zones: take(u64::from(local + 1) * 4),
            counts: take(u64::from(local) * 4),
            alive: take(u64::from(blocks) * u64::from(local) * 4),
            top_k,
            width,
        };
        (handle, parts.0 as usize)
    }
}

/// Bytes of shared memory that a block can have on SM 90 and later.
pub const SHARED_BYTES: u64 = 227 * 1024;

/// Threads of prepare's blocks.
pub const PREPARE_THREADS: u32 = 512;
pub const DISPATCH_THREADS: u32 = 160;
pub const COMBINE_THREADS: u32 = 640;

/// What a launch needs beside its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stages {
    pub piece_bytes: u32,
    /// Of dispatch; of combine, the part for the other ranks and the own part.
    pub stages: [u32; 2],
    pub shared_bytes: u32,
}

/// Most bytes of a row that are in shared memory at once: several pieces have to be under way.
const PIECE_BYTES: u32 = 14336;
/// What the tables of the next groups may take of it, so that pieces have room; one token's are always there.
const MOST_PLAN_BYTES: u64 = 24 * 1024;
/// More pieces than that bring no more speed.
const MAX_STAGES: u64 = 32;
pub const BARRIER_BYTES: u64 = 8;
pub const PLAN_GROUPS: u64 = 4;
pub const STAGERS: u64 = 6;
pub const PIECE_STRUCT_BYTES: u64 = 20;
pub const WORK_BYTES: u64 = 16;

fn piece(row_bytes: u32) -> u32 {
    row_bytes.div_ceil(row_bytes.div_ceil(PIECE_BYTES)).next_multiple_of(16)
}

/// `Plan::size` in layout.h.
fn plan_bytes(ranks: u64, window: Window, width: u32) -> u64 {
    let tokens = u64::from(window.group_tokens);
    PLAN_GROUPS * (tokens * ranks * u64::from(width) * 4 + tokens * 16 + BARRIER_BYTES)
}

/// Shared memory of prepare: `PrepareShared` in prepare.h.
pub fn prepare_shared(group: &Group) -> u32 {
    let warps = PREPARE_THREADS / 32;
    let parts = (4 * warps).div_ceil(group.ranks).min(16384 / group.experts).max(1);
    let columns = group.experts + group.ranks + 1;
    4 * (parts * (group.experts + group.ranks)
        + 2 * columns
        + 3 * group.local_experts
        + 1
        + group.ranks
        + 1
        + warps * 64)
}

/// `DispatchShared` in dispatch.h.
pub fn dispatch_stages(group: &Group, width: u32, row_bytes: u32, scale_bytes: u32) -> Stages {
    const ZERO_BYTES: u64 = 2048;
    let piece_bytes = piece(row_bytes);
    let stager = u64::from(piece_bytes + scale_bytes);
    let fixed = STAGERS * (stager + BARRIER_BYTES) + ZERO_BYTES + plan_bytes(group.ranks.into(), group.staged, width);
    let each =
        stager + u64::from(group.weight_stride * 4) + 2 * BARRIER_BYTES + PIECE_STRUCT_BYTES + u64::from(width * 4);
    let stages = ((SHARED_BYTES - fixed) / each).min(MAX_STAGES);
    Stages { piece_bytes, stages: [stages as u32, 0], shared_bytes: (fixed + stages * each) as u32 }
}

/// `CombineShared` in combine.h.
pub fn combine_stages(group: &Group, width: u32, row_bytes: u32) -> Stages {
    let piece_bytes = piece(row_bytes);
    let fixed = 2 * (8 * BARRIER_BYTES + plan_bytes(group.ranks.into(), group.summed, width));
    let each = u64::from(piece_bytes) + 2 * BARRIER_BYTES + WORK_BYTES;
    let stages = ((SHARED_BYTES - fixed) / each).min(2 * MAX_STAGES);
    let peers = if group.ranks > 1 { stages.div_ceil(2) } else { 1 };
    Stages {
        piece_bytes,
        stages: [peers as u32, (stages - peers) as u32],
        shared_bytes: (fixed + stages * each) as u32,
    }
}
