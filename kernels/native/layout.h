// What host and kernels agree on. src/backend/engine/native/layout.rs has the same structures; a test compares their
// sizes and offsets.
#pragma once

#include "machine.h"

namespace nvte_ep {

// One symmetric segment a rank, which peers read and write:
//   signals   u32 [kinds][blocks][ranks]; entry r of a block is written by rank r alone, and only ever grows
//   exchange  [2][ranks]: each rank's number of tokens and cleaned expert indices; prepares use the two by turns
//   staged    [blocks][window] rows, and their weights: what this rank sends; peers read
//   summed    [ranks][blocks][window] rows, and their weights: what peers have summed for this rank; peers write
// A block works on a contiguous chunk of the step's tokens, on every rank on the same one, so that only blocks of one
// number wait for each other. It goes through its chunk in groups of a few tokens; the windows hold the newest groups.

enum SignalKind : u32 {
  kPrepared,   // the exchange's part is written: number of prepares
  kStaged,     // the newest group of an even number that the writer's block has staged
  kStagedOdd,  // the same of an odd number: two warps stage by turns
  kPulled,     // groups that the writer's block has read from this rank
  kSummed,     // groups that the writer's block has summed for this rank
  kTaken,      // groups of the writer's own that its block has taken out of `summed`
  kSignalKinds
};

/// What a wait was for, as the host tells it.
enum WaitKind : u32 { kWaitNone, kWaitPrepare, kWaitStaged, kWaitPulled, kWaitSummed, kWaitTaken };

/// Host memory, which the kernels write and the host reads at any time.
struct Status {
  u32 failed;  // WaitKind of the first wait that ended without its signal
  u32 peer;    // the rank that it waited for
  u32 seen;
  u32 wanted;
  u32 abort;  // set by the host: waits end
  u32 overflowed;
  u64 needed;  // rows of a step that needed more than its capacity
  u64 invalid_indices;
};

/// A window of a block: the newest of its groups of tokens.
struct Window {
  u32 group_tokens;  // of a group, at most
  u32 groups;
};

/// A group on this rank. Passed by value.
struct Group {
  u8* const* peers;  // [ranks] segments
  u8* own;           // this rank's segment
  u32* counters;     // [blocks][kCounters], then the grid barrier
  u32* histogram;    // [blocks][experts + ranks + 1]
  Status* status;
  u64 timeout_ns;
  u64 exchange_offset, exchange_stride;  // stride: of a rank in one half
  u64 staged_offset, staged_weights_offset;
  u64 summed_offset, summed_weights_offset;
  u64 row_stride;     // bytes of a row in the windows
  u32 weight_stride;  // floats of a row's weights in the windows
  u32 rank, ranks, blocks;
  u32 experts, local_experts;
  Window staged, summed;
};

enum Counter : u32 { kPrepares, kDispatchGroups, kCombineGroups, kCounters = 8 };

/// What a prepare leaves besides its tables.
struct Meta {
  u32 tokens;       // of this rank
  u32 most_tokens;  // of any rank
  u32 chunk;        // tokens of a block
  u32 limited;      // some rows have no place
  u64 total;        // rows that all slabs need
};

/// The tables of a handle, in the caller's handle memory.
struct Handle {
  Meta* meta;
  i16* experts;      // [max_tokens][top_k] this rank's experts, or -1
  u64* targets;      // [max_tokens][2]: the ranks that this rank's token goes to, a bit each
  u32* slots;        // [max_tokens][ranks][width]: where the token of that rank goes here, in ascending order
  u32* zones;        // [local_experts + 1]: where each expert's slab starts
  u32* counts;       // [local_experts]: rows without padding
  u32* alive;        // [blocks][local_experts]: rows that have a place, where some have none
  u32 top_k, width;  // width: least(top_k, local_experts), up to the next multiple of 4
};

// A slot's entry: the row in its low bits, or kNoRow for a row that has no place; above it the position among the
// token's experts.
constexpr u32 kSlotBits = 25;
constexpr u32 kNoRow = (1u << kSlotBits) - 1;
constexpr u32 kNoSlot = ~0u;
EP_DEVICE constexpr u32 slot_entry(u32 row, u32 position) { return row | position << kSlotBits; }
EP_DEVICE constexpr u32 slot_row(u32 entry) { return entry & kNoRow; }
EP_DEVICE constexpr u32 slot_position(u32 entry) { return entry >> kSlotBits; }
EP_DEVICE constexpr bool has_row(u32 entry) { return entry != kNoSlot && slot_row(entry) != kNoRow; }

struct PrepareArguments {
  Group group;
  Handle handle;
  const void* topk_idx;
  void* token_counts;  // or null
  void* total;         // or null
  u32* header;   // the routing header: its two words, zeros until all is done, the total's two, the number of invalid
                 // indices
  u64 capacity;  // rows of the receive side; all ones: not known yet
  u32 header_words[2];
  u32 tokens, alignment;
  u8 indices_are_64, counts_are_64, total_is_64, drop;
  u8 by_place;  // a row is dropped by its place alone, not by how many tokens came before its own
  u8 unused[3];
};

struct DispatchArguments {
  Group group;
  Handle handle;
  const u8* tokens;
  const u8* scales;      // or null
  const float* weights;  // [tokens][top_k], or null
  u8* recv_tokens;
  u8* recv_scales;
  float* recv_weights;
  u64 rows;       // of the receive side
  u32 row_bytes;  // multiples of 16
  u32 scale_bytes;
  u32 piece_bytes;  // of a row in shared memory
  u32 stages;       // pieces in shared memory that are pulled
  u32 drop;         // all rows are written
  u32 unused;
};

enum RowType : u32 { kBFloat16, kFloat16, kFloat32 };

struct CombineArguments {
  Group group;
  Handle handle;
  const u8* rows;            // [slots]
  const float* row_weights;  // [slots], or null
  u8* result;                // [tokens]
  float* weights;            // [tokens][top_k], or null
  u32 row_bytes;
  u32 piece_bytes;
  u32 peer_stages, own_stages;  // pieces in shared memory: of the part for the other ranks, and of this rank's tokens
  u32 row_type;
  u32 with_weights;  // also where this rank has no tokens, and no address for their weights
};

// ---- launches ----

constexpr u32 kGpuWarp = 32;
constexpr u32 kPrepareThreads = 16 * kGpuWarp;
/// Two warps that stage, one that loads, one that stores, one that clears.
constexpr u32 kDispatchThreads = 5 * kGpuWarp;
/// Warps that sum in each of combine's two lines, and vectors of a piece that each of their threads holds: pieces have
/// at most 16 KiB.
constexpr u32 kSummers = 8, kVectors = 4;
/// Beside them a line has a warp that loads and one that tells.
constexpr u32 kCombineThreads = 2 * (kSummers + 2) * kGpuWarp;

// ---- addresses ----

EP_DEVICE u32* signal_at(u8* segment, const Group& g, u32 kind, u32 block, u32 writer) {
  return reinterpret_cast<u32*>(segment) + (kind * g.blocks + block) * g.ranks + writer;
}
EP_DEVICE u64 exchange_at(const Group& g, u32 half, u32 writer) {
  return g.exchange_offset + (u64(half) * g.ranks + writer) * g.exchange_stride;
}
/// The indices start behind the number of tokens.
constexpr u64 kExchangeHeader = 16;
EP_DEVICE u64 window_row(Window window, u32 block, u32 group, u32 token_in_group) {
  return (u64(block) * window.groups + group % window.groups) * window.group_tokens + token_in_group;
}
EP_DEVICE u64 staged_row(const Group& g, u32 block, u32 group, u32 token_in_group) {
  return window_row(g.staged, block, group, token_in_group);
}
EP_DEVICE u64 summed_row(const Group& g, u32 writer, u32 block, u32 group, u32 token_in_group) {
  return u64(writer) * g.blocks * g.summed.groups * g.summed.group_tokens +
         window_row(g.summed, block, group, token_in_group);
}

// ---- waiting ----

/// Waits until the signal at `from`, of rank `peer`, has come to `wanted`. Gives up after the group's time-out, or if
/// the host or another block did; the step's results are void then, and the status says why. Returns what it saw.
EP_DEVICE u32 wait_for(const Group& g, const u32* from, u32 wanted, u32 peer, u32 kind) {
  const u32 first = load_acquire(from);
  if (static_cast<int>(first - wanted) >= 0) return first;
  const u64 start = nanoseconds();
  for (u32 round = 1;; ++round) {
    const u32 seen = load_acquire(from);
    if (static_cast<int>(seen - wanted) >= 0) return seen;
    pause();
    if (round % 256 != 0) continue;
    if (load_relaxed(&g.status->abort) != 0 || load_relaxed(&g.status->failed) != 0) return wanted;
    if (nanoseconds() - start < g.timeout_ns) continue;
    if (claim(&g.status->failed, kind)) {
      store_release(&g.status->peer, peer);
      store_release(&g.status->seen, seen);
      store_release(&g.status->wanted, wanted);
    }
    return wanted;
  }
}

/// One signal of all ranks, as the lanes of a warp see it. What was seen is not looked at again: peers are often
/// further than a wait asks for.
struct Watcher {
  static constexpr u32 kEach = EP_GPU ? 3 : 1;
  u32 signal, kind;
  u32 seen[kEach];

  EP_DEVICE Watcher(u32 signal_kind, u32 wait_kind, u32 base) : signal(signal_kind), kind(wait_kind) {
    for (u32 i = 0; i < kEach; ++i) seen[i] = base;
  }
  /// Waits until all ranks' signals have come to `wanted`.
  EP_DEVICE void wait(const Group& g, Warp warp, u32 block, u32 wanted) {
    bool looked = false;
    if (EP_GPU) {
      EP_UNROLL
      for (u32 i = 0; i < kEach; ++i) {
        const u32 peer = warp.lane + i * kWarp;
        if (peer >= g.ranks || static_cast<int>(seen[i] - wanted) >= 0) continue;
        seen[i] = wait_for(g, signal_at(g.own, g, signal, block, peer), wanted, peer, kind);
        looked = true;
      }
    } else {
      for (u32 peer = 0; peer < g.ranks; ++peer)
        wait_for(g, signal_at(g.own, g, signal, block, peer), wanted, peer, kind);
      looked = true;
    }
    if (looked) fence_bulk_global();
    warp.sync();
  }
};

/// The lanes of a warp tell all ranks; what the warp, and threads that it had a barrier with, wrote before is seen by
/// who sees this.
EP_DEVICE void signal_all(const Group& g, Warp warp, u32 signal, u32 block, u32 value) {
  warp.sync();
  for (u32 peer = warp.lane; peer < g.ranks; peer += kWarp) {
    store_release(signal_at(g.peers[peer], g, signal, block, g.rank), value);
  }
}

/// The same for what the warp has read, and does not need any more.
EP_DEVICE void signal_all_loaded(const Group& g, Warp warp, u32 signal, u32 block, u32 value) {
  warp.sync();
  for (u32 peer = warp.lane; peer < g.ranks; peer += kWarp) {
    store_after_loads(signal_at(g.peers[peer], g, signal, block, g.rank), value);
  }
}

// ---- stages and chunks ----

/// Goes round a ring of stages in shared memory; the parity is that of the stage's barrier at its present use.
struct Cursor {
  u32 stages, stage = 0, parity = 0;
  EP_DEVICE void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

/// What a block's roles go by: its chunk, and where the windows stand.
struct Chunk {
  u32 begin, end;  // tokens; of this rank there may be fewer
  u32 group_tokens, groups;
  u32 base;  // groups of earlier calls

  EP_DEVICE static Chunk of(const Group& g, Window window, const Meta& meta, u32 block, u32 counter) {
    const u32 begin = least(meta.most_tokens, block * meta.chunk);
    // Few tokens make small groups, so that ranks wait less for each other.
    const u32 group_tokens = most(1u, least(window.group_tokens, meta.chunk / 4));
    return {begin, least(meta.most_tokens, begin + meta.chunk), group_tokens, divide_up(meta.chunk, group_tokens),
            g.counters[block * kCounters + counter]};
  }
  EP_DEVICE u32 group_begin(u32 group) const { return least(end, begin + group * group_tokens); }
};

/// The tables of the next groups on their way into shared memory, so that nobody waits for them.
struct Plan {
  static constexpr u32 kGroups = 4;
  u8* memory;     // [kGroups][bytes]: slots of the group's tokens, then their targets
  Barrier* full;  // [kGroups]
  u32 bytes, slot_bytes;

  EP_BOTH static u32 slot_bytes_of(const Group& g, Window window, const Handle& h) {
    return window.group_tokens * g.ranks * h.width * 4;
  }
  EP_BOTH static u32 bytes_of(const Group& g, Window window, const Handle& h) {
    return slot_bytes_of(g, window, h) + window.group_tokens * 16;
  }
  EP_DEVICE static Plan at(u8* memory, const Group& g, Window window, const Handle& h) {
    const u32 bytes = bytes_of(g, window, h);
    return {memory, reinterpret_cast<Barrier*>(memory + kGroups * bytes), bytes, slot_bytes_of(g, window, h)};
  }
  EP_BOTH static u32 size(const Group& g, Window window, const Handle& h) {
    return kGroups * (bytes_of(g, window, h) + static_cast<u32>(sizeof(Barrier)));
  }
  EP_DEVICE void initialize() const {
    for (u32 i = 0; i < kGroups; ++i) barrier_init(&full[i], 1);
  }
  /// One lane.
  EP_DEVICE void fetch(const Group& g, const Handle& h, const Chunk& chunk, u32 group) const {
    if (group >= chunk.groups) return;
    const u32 at = group % kGroups, token = chunk.group_begin(group), tokens = chunk.group_begin(group + 1) - token;
    const u32 slots = tokens * g.ranks * h.width * 4;
    barrier_arrive_expect(&full[at], slots + tokens * 16);
    if (tokens == 0) return;
    bulk_load(memory + at * bytes, h.slots + u64(token) * g.ranks * h.width, slots, &full[at]);
    bulk_load(memory + at * bytes + slot_bytes, h.targets + u64(token) * 2, tokens * 16, &full[at]);
  }
  EP_DEVICE void wait(u32 group) const { barrier_wait(&full[group % kGroups], group / kGroups % 2); }
  EP_DEVICE const u32* slots(u32 group) const { return reinterpret_cast<const u32*>(memory + group % kGroups * bytes); }
  EP_DEVICE const u64* targets(u32 group) const {
    return reinterpret_cast<const u64*>(memory + group % kGroups * bytes + slot_bytes);
  }
};

}  // namespace nvte_ep
