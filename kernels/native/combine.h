// combine, and the gradient of dispatch: every rank sums the rows of each token that its experts made, in the order of
// the experts, rounds, and writes the sum into a window of the token's rank; which sums what came from all ranks, in
// their order.
//
// A block has two lines of work, which run side by side: its part for all other ranks' tokens, and its own tokens from
// what all ranks did for them. A line has three roles: a warp that loads rows into shared memory, in the order in which
// they are summed; a team of warps that sums; and a warp that moves weights and tells the peers.
#pragma once

#include "layout.h"

namespace nvte_ep {

/// What the summing team does with a stage and those that follow: where their rows are added, and what comes after.
struct Work {
  u8* to;     // of the sum, once it is complete
  u32 bytes;  // of the sum
  u16 rows;   // stages that hold rows; none: one stage without a row
  u8 add, end;
};
enum WorkAdd : u8 { kToSum, kToPart };
enum WorkEnd : u8 { kGoesOn, kEndsPart, kEndsSum, kEndsPartAndSum, kEndsGroup, kEndsCall };

/// Shared memory of a line. `stages`: its pieces.
struct Line {
  static constexpr u32 kTold = 4;
  u8* stage;        // [stages][piece_bytes]
  Barrier* full;    // [stages]
  Barrier* empty;   // [stages]
  Barrier* summed;  // [kTold]: a group is summed
  Barrier* told;    // [kTold]: and told
  Plan plan;
  Work* work;  // [stages]
  u32 stages;

  EP_BOTH static u64 size(const CombineArguments& a, u32 stages) {
    return stages * (u64(a.piece_bytes) + 2 * sizeof(Barrier) + sizeof(Work)) + 2 * kTold * sizeof(Barrier) +
           Plan::size(a.group, a.group.summed, a.handle);
  }
  EP_DEVICE static Line at(u8* memory, const CombineArguments& a, u32 stages) {
    Line s;
    s.stages = stages;
    s.stage = memory, memory += stages * a.piece_bytes;
    s.full = reinterpret_cast<Barrier*>(memory), memory += stages * sizeof(Barrier);
    s.empty = reinterpret_cast<Barrier*>(memory), memory += stages * sizeof(Barrier);
    s.summed = reinterpret_cast<Barrier*>(memory), memory += kTold * sizeof(Barrier);
    s.told = reinterpret_cast<Barrier*>(memory), memory += kTold * sizeof(Barrier);
    s.plan = Plan::at(memory, a.group, a.group.summed, a.handle),
    memory += Plan::size(a.group, a.group.summed, a.handle);
    s.work = reinterpret_cast<Work*>(memory);
    return s;
  }
  /// One thread. `warps`: those of the summing team.
  EP_DEVICE void initialize(u32 warps) const {
    for (u32 i = 0; i < stages; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], warps);
    for (u32 i = 0; i < kTold; ++i) barrier_init(&summed[i], warps), barrier_init(&told[i], 1);
    plan.initialize();
  }
};

struct CombineShared {
  Line for_peers, own;

  EP_BOTH static u64 size(const CombineArguments& a) {
    return Line::size(a, a.peer_stages) + Line::size(a, a.own_stages);
  }
  EP_DEVICE static CombineShared at(u8* memory, const CombineArguments& a) {
    return {Line::at(memory, a, a.peer_stages), Line::at(memory + Line::size(a, a.peer_stages), a, a.own_stages)};
  }
  EP_DEVICE void initialize(Team team, u32 warps) const {
    if (team.thread != 0) return;
    for_peers.initialize(warps), own.initialize(warps);
    barriers_ready();
  }
};

/// The loader's end of the stages.
struct Loader {
  const CombineArguments& a;
  const Line& s;
  Warp warp;
  Cursor cursor{s.stages}, ends{Line::kTold};

  /// One lane: waits until the next stage is free.
  EP_DEVICE Barrier* begin() const {
    barrier_wait(&s.empty[cursor.stage], cursor.parity ^ 1);
    return &s.full[cursor.stage];
  }
  /// Work that needs no row.
  EP_DEVICE void add(const Work& work) {
    if (warp.lane == 0) {
      Barrier* full = begin();
      s.work[cursor.stage] = work;
      barrier_arrive(full);
    }
    cursor.advance();
  }
  /// One row of the work that it is, or that began before.
  EP_DEVICE void load(const u8* from, u32 bytes, bool once, const Work* work) {
    if (warp.lane == 0) {
      Barrier* full = begin();
      if (work != nullptr) s.work[cursor.stage] = *work;
      barrier_arrive_expect(full, bytes);
      u8* to = s.stage + cursor.stage * a.piece_bytes;
      if (once) {
        bulk_load_once(to, from, bytes, full);
      } else {
        bulk_load(to, from, bytes, full);
      }
    }
    cursor.advance();
  }
  EP_DEVICE void end_group() {
    if (warp.lane == 0) barrier_wait(&s.told[ends.stage], ends.parity ^ 1);
    ends.advance();
    add(Work{nullptr, 0, 0, kToSum, kEndsGroup});
  }
  /// The rows of `slots` that `live` names, of `work`.
  EP_DEVICE void load_slots(const u32* slots, u64 live, u32 offset, u32 bytes, const Work* work) {
    while (live != 0) {
      const u32 j = first_bit(live);
      live &= live - 1;
      load(a.rows + u64(slot_row(slots[j])) * a.row_bytes + offset, bytes, true, work);
      work = nullptr;
    }
  }
};

/// Which of the entries have a row, a bit each.
EP_DEVICE u64 live_slots(const u32* slots, u32 width, Warp warp) {
  u64 live = 0;
  for (u32 base = 0; base < width; base += kWarp) {
    live |= warp.ballot(base + warp.lane < width && has_row(slots[base + warp.lane])) << base;
  }
  return live;
}

/// One group's sums for the other ranks.
EP_DEVICE void load_group_for_peers(Loader& loader, const Chunk& chunk, u32 block, u32 group) {
  const CombineArguments& a = loader.a;
  const Group& g = a.group;
  const u32 number = chunk.base + group, width = a.handle.width;
  const u32 tokens = chunk.group_begin(group + 1) - chunk.group_begin(group);
  const u32* slots = loader.s.plan.slots(group);
  for (u32 in_group = 0; in_group < tokens; ++in_group) {
    const u64 row = g.summed_offset + summed_row(g, g.rank, block, number, in_group) * g.row_stride;
    for (u32 source = 0; source < g.ranks; ++source, slots += width) {
      if (source == g.rank || slots[0] == kNoSlot) continue;
      u8* to = g.peers[source] + row;
      const u64 live = live_slots(slots, width, loader.warp);
      const u16 rows = static_cast<u16>(bits_of(live));  // none: all were dropped, and the sum is zero
      for (u32 offset = 0; offset < a.row_bytes; offset += a.piece_bytes) {
        const u32 bytes = least(a.piece_bytes, a.row_bytes - offset);
        const Work work{to + offset, bytes, rows, kToSum, kEndsSum};
        if (rows == 0) loader.add(work);
        loader.load_slots(slots, live, offset, bytes, &work);
      }
    }
  }
  loader.end_group();
}

EP_DEVICE u16 ranks_before(const u64* ranks, u32 rank) {
  if (rank >= 64) return static_cast<u16>(bits_of(ranks[0]) + bits_of(ranks[1] & ((u64(1) << (rank - 64)) - 1)));
  return static_cast<u16>(bits_of(ranks[0] & ((u64(1) << rank) - 1)));
}

/// One group of this rank's tokens: what all ranks summed for it, this one's experts' rows among them.
EP_DEVICE void load_own_group(Loader& loader, const Chunk& chunk, u32 block, u32 group) {
  const CombineArguments& a = loader.a;
  const Group& g = a.group;
  const u32 number = chunk.base + group, width = a.handle.width;
  const u32 begin = chunk.group_begin(group), end = least(a.handle.meta->tokens, chunk.group_begin(group + 1));
  for (u32 token = begin; token < end; ++token) {
    const u32* slots = loader.s.plan.slots(group) + ((token - begin) * g.ranks + g.rank) * width;
    const u64* targets = loader.s.plan.targets(group) + (token - begin) * 2;
    u64 from[2] = {targets[0], targets[1]};
    // A rank sums for itself here, if any of its rows has a place. Like the others' parts, its own is rounded before it
    // is added.
    const u64 own = live_slots(slots, width, loader.warp);
    if (own == 0) from[g.rank / 64] &= ~(u64(1) << g.rank % 64);
    const u16 own_rows = static_cast<u16>(bits_of(own)), ranks = static_cast<u16>(bits_of(from[0]) + bits_of(from[1]));
    // A part of several rows is summed on its own, between the ranks before and after this one.
    const bool has_part = own_rows > 1;
    const u16 before = has_part ? ranks_before(from, g.rank) : ranks;
    const u16 after = has_part ? static_cast<u16>(ranks - before - 1) : u16(0);
    for (u32 offset = 0; offset < a.row_bytes; offset += a.piece_bytes) {
      const u32 bytes = least(a.piece_bytes, a.row_bytes - offset);
      u8* to = a.result + u64(token) * a.row_bytes + offset;
      if (ranks == 0) loader.add(Work{to, bytes, 0, kToSum, kEndsSum});
      Work work{to, bytes, before, kToSum, has_part ? kGoesOn : kEndsSum};
      bool begins = true;
      u64 left[2] = {from[0], from[1]};
      while ((left[0] | left[1]) != 0) {
        const u32 word = left[0] != 0 ? 0 : 1, rank = first_bit(left[word]) + 64 * word;
        left[word] &= left[word] - 1;
        if (rank == g.rank && has_part) {
          const Work part{to, bytes, own_rows, kToPart, after == 0 ? kEndsPartAndSum : kEndsPart};
          loader.load_slots(slots, own, offset, bytes, &part);
          work.rows = after, work.end = kEndsSum;
          begins = true;
        } else if (rank == g.rank) {
          loader.load_slots(slots, own, offset, bytes, begins ? &work : nullptr);
          begins = false;
        } else {
          const u8* row = g.own + g.summed_offset + summed_row(g, rank, block, number, token - begin) * g.row_stride;
          loader.load(row + offset, bytes, false, begins ? &work : nullptr);
          begins = false;
        }
      }
    }
  }
  loader.end_group();
}

/// The loader of either line.
template <bool own>
EP_DEVICE void load_rows(const CombineArguments& a, const Line& s, u32 block, Warp warp) {
  const Group& g = a.group;
  const Chunk chunk = Chunk::of(g, g.summed, *a.handle.meta, block, kCombineGroups);
  Loader loader{a, s, warp};
  if (warp.lane == 0) {
    for (u32 group = 0; group < Plan::kGroups; ++group) s.plan.fetch(g, a.handle, chunk, group);
  }
  Watcher watcher =
      own ? Watcher(kSummed, kWaitSummed, chunk.base) : Watcher(kTaken, kWaitTaken, chunk.base - g.summed.groups);
  for (u32 group = 0; group < chunk.groups; ++group) {
    s.plan.wait(group);
    if (g.ranks > 1) watcher.wait(g, warp, block, chunk.base + group + 1 - (own ? 0 : g.summed.groups));
    if (own) {
      load_own_group(loader, chunk, block, group);
    } else {
      load_group_for_peers(loader, chunk, block, group);
    }
    warp.sync();
    if (warp.lane == 0) s.plan.fetch(g, a.handle, chunk, group + Plan::kGroups);
  }
  loader.add(Work{nullptr, 0, 0, kToSum, kEndsCall});
}

/// Weights of the rows that this rank has of the others' tokens, into the windows of their ranks.
EP_DEVICE void send_weights(const CombineArguments& a, const Chunk& chunk, u32 block, u32 group, Warp warp) {
  const Group& g = a.group;
  const u32 number = chunk.base + group, width = a.handle.width, first = chunk.group_begin(group);
  const u32 entries = (chunk.group_begin(group + 1) - first) * g.ranks * width;
  const u32* slots = a.handle.slots + u64(first) * g.ranks * width;
  for (u32 i = warp.lane; i < entries; i += kWarp) {
    const u32 entry = slots[i], source = i / width % g.ranks;
    if (entry == kNoSlot || source == g.rank) continue;
    float* to = reinterpret_cast<float*>(g.peers[source] + g.summed_weights_offset) +
                summed_row(g, g.rank, block, number, i / width / g.ranks) * g.weight_stride;
    to[slot_position(entry)] = has_row(entry) ? a.row_weights[slot_row(entry)] : 0;
  }
}

/// The weights of this rank's tokens, from the windows and from its own rows.
EP_DEVICE void take_weights(const CombineArguments& a, const Chunk& chunk, u32 block, u32 group, Warp warp) {
  const Group& g = a.group;
  const Handle& h = a.handle;
  const u32 number = chunk.base + group, begin = chunk.group_begin(group);
  const u32 end = least(h.meta->tokens, chunk.group_begin(group + 1));
  for (u32 i = warp.lane; begin < end && i < (end - begin) * h.top_k; i += kWarp) {
    const u32 token = begin + i / h.top_k, k = i % h.top_k;
    const int expert = h.experts[u64(token) * h.top_k + k];
    float weight = 0;
    if (expert >= 0) {
      const u32 from = static_cast<u32>(expert) / g.local_experts;
      if (from != g.rank) {
        weight = load_shared_by_all(reinterpret_cast<const float*>(g.own + g.summed_weights_offset) +
                                    summed_row(g, from, block, number, token - begin) * g.weight_stride + k);
      } else {
        const u32* slots = h.slots + (u64(token) * g.ranks + g.rank) * h.width;
        for (u32 j = 0; j < h.width; ++j) {
          if (has_row(slots[j]) && slot_position(slots[j]) == k) weight = a.row_weights[slot_row(slots[j])];
        }
      }
    }
    a.weights[u64(token) * h.top_k + k] = weight;
  }
}

/// Moves the weights of either line and tells the peers of every group, once all of it is done.
template <bool own>
EP_DEVICE void tell_peers(const CombineArguments& a, const Line& s, u32 block, Warp warp) {
  const Group& g = a.group;
  const Chunk chunk = Chunk::of(g, g.summed, *a.handle.meta, block, kCombineGroups);
  Cursor cursor{Line::kTold};
  Watcher watcher =
      own ? Watcher(kSummed, kWaitSummed, chunk.base) : Watcher(kTaken, kWaitTaken, chunk.base - g.summed.groups);
  for (u32 group = 0; group < chunk.groups; ++group) {
    if (a.with_weights != 0) {
      if (g.ranks > 1) watcher.wait(g, warp, block, chunk.base + group + 1 - (own ? 0 : g.summed.groups));
      if (own) {
        take_weights(a, chunk, block, group, warp);
      } else {
        send_weights(a, chunk, block, group, warp);
      }
    }
    barrier_wait(&s.summed[cursor.stage], cursor.parity);
    if (own) {
      signal_all_loaded(g, warp, kTaken, block, chunk.base + group + 1);
    } else {
      signal_all(g, warp, kSummed, block, chunk.base + group + 1);
    }
    warp.sync();
    if (warp.lane == 0) barrier_arrive(&s.told[cursor.stage]);
    cursor.advance();
  }
}

template <u32 type>
struct Row;

template <>
struct Row<kBFloat16> {
  static constexpr u32 kFloats = 8;
  EP_DEVICE static void add(float* sums, const Vec& vec) {
    for (u32 i = 0; i < 4; ++i) {
      sums[2 * i] += from_bf16(vec.word[i] & 0xffff);
      sums[2 * i + 1] += float_of_bits(vec.word[i] & 0xffff0000u);
    }
  }
  EP_DEVICE static Vec round(const float* sums) {
    Vec vec;
    for (u32 i = 0; i < 4; ++i) vec.word[i] = to_bf16x2(sums[2 * i], sums[2 * i + 1]);
    return vec;
  }
};
template <>
struct Row<kFloat16> {
  static constexpr u32 kFloats = 8;
  EP_DEVICE static void add(float* sums, const Vec& vec) {
    for (u32 i = 0; i < 4; ++i) {
      sums[2 * i] += from_f16(vec.word[i] & 0xffff);
      sums[2 * i + 1] += from_f16(vec.word[i] >> 16);
    }
  }
  EP_DEVICE static Vec round(const float* sums) {
    Vec vec;
    for (u32 i = 0; i < 4; ++i) vec.word[i] = to_f16x2(sums[2 * i], sums[2 * i + 1]);
    return vec;
  }
};
template <>
struct Row<kFloat32> {
  static constexpr u32 kFloats = 4;
  EP_DEVICE static void add(float* sums, const Vec& vec) {
    for (u32 i = 0; i < 4; ++i) sums[i] += float_of_bits(vec.word[i]);
  }
  EP_DEVICE static Vec round(const float* sums) {
    Vec vec;
    for (u32 i = 0; i < 4; ++i) vec.word[i] = bits_of_float(sums[i]);
    return vec;
  }
};

/// The summing team's side. `kVectors`: vectors of a piece that a thread holds.
template <u32 type, u32 kVectors>
struct Summer {
  using Elements = Row<type>;
  static constexpr u32 kFloats = Elements::kFloats;
  const CombineArguments& a;
  const Line& s;
  Team team;
  Warp warp;
  Cursor cursor{s.stages};

  /// The first of the rows has come.
  EP_DEVICE void add_rows(float (&sums)[kVectors][kFloats], u32 rows, u32 vectors) {
    for (;;) {
      const Vec* from = reinterpret_cast<const Vec*>(s.stage + cursor.stage * a.piece_bytes) + team.thread;
      // All loads before the first sum: one takes as long as several.
      Vec row[kVectors];
      EP_UNROLL
      for (u32 i = 0; i < kVectors; ++i) {
        row[i] = load_vec(from + i * team.threads, i * team.threads + team.thread < vectors);
      }
      EP_UNROLL
      for (u32 i = 0; i < kVectors; ++i) Elements::add(sums[i], row[i]);
      free();
      if (--rows == 0) return;
      barrier_wait(&s.full[cursor.stage], cursor.parity);
    }
  }
  EP_DEVICE void free() {
    warp.sync();
    if (warp.lane == 0) barrier_arrive(&s.empty[cursor.stage]);
    cursor.advance();
  }
};

template <u32 type, u32 kVectors, bool own>
EP_DEVICE void sum_rows(const CombineArguments& a, const Line& s, Team team, Warp warp) {
  using Elements = Row<type>;
  constexpr u32 kFloats = Elements::kFloats;
  float part[kVectors][kFloats] = {}, sum[kVectors][kFloats] = {};
  Summer<type, kVectors> summer{a, s, team, warp};
  Cursor ends{Line::kTold};
  for (;;) {
    const u32 stage = summer.cursor.stage;
    barrier_wait(&s.full[stage], summer.cursor.parity);
    const Work work = s.work[stage];
    const u32 vectors = work.bytes / 16;
    if (work.rows == 0) {
      summer.free();
    } else if (!own || work.add == kToSum) {
      summer.add_rows(sum, work.rows, vectors);
    } else {
      summer.add_rows(part, work.rows, vectors);
    }
    if (work.end == kGoesOn) continue;
    if (work.end == kEndsCall) return;
    if (work.end == kEndsGroup) {
      // This warp's stores come before its arrival.
      if (warp.lane == 0) barrier_arrive(&s.summed[ends.stage]);
      ends.advance();
      continue;
    }
    if (own && work.end != kEndsSum) {
      EP_UNROLL
      for (u32 i = 0; i < kVectors; ++i) {
        Elements::add(sum[i], Elements::round(part[i]));
        for (u32 j = 0; j < kFloats; ++j) part[i][j] = 0;
      }
    }
    if (own && work.end == kEndsPart) continue;
    Vec* to = reinterpret_cast<Vec*>(work.to) + team.thread;
    EP_UNROLL
    for (u32 i = 0; i < kVectors; ++i) {
      if (i * team.threads + team.thread < vectors) {
        const Vec rounded = Elements::round(sum[i]);
        if (own) {
          store_once(to + i * team.threads, rounded);
        } else {
          store_kept(to + i * team.threads, rounded);
        }
      }
      for (u32 j = 0; j < kFloats; ++j) sum[i][j] = 0;
    }
  }
}

EP_DEVICE void finish_combine(const CombineArguments& a, u32 block) {
  const Group& g = a.group;
  g.counters[block * kCounters + kCombineGroups] +=
      Chunk::of(g, g.summed, *a.handle.meta, block, kCombineGroups).groups;
}

}  // namespace nvte_ep
