// prepare: exchange of the expert indices, and from them the slots of every row that arrives here.
//
// Every rank writes its cleaned indices into every rank's segment and signals; from then on each computes for itself. A
// slab holds its rows by source rank, then token. All counts come from histograms of the blocks' chunks, so the order
// is fixed and no atomic operation decides about a place.
#pragma once

#include "layout.h"

namespace nvte_ep {

/// Shared memory of prepare, in words. `parts`: sub-chunks of a chunk that are counted on their own.
struct PrepareShared {
  u32* parts;    // [ranks][parts][local_experts], counts and then next slots
  u32* unique;   // [ranks][parts], the same for tokens that come here at all
  u32* sums;     // [columns] of all blocks
  u32* before;   // [columns] of the blocks before this one
  u32* zones;    // [local_experts + 1]
  u32* counts;   // [local_experts]
  u32* alive;    // [local_experts]
  u32* tokens;   // [ranks]
  u32* invalid;  // [1]
  u32* scratch;  // [warps][64]
  u32 num_parts, columns;

  EP_BOTH static u32 columns_of(const Group& g) { return g.experts + g.ranks + 1; }
  EP_BOTH static u32 parts_of(const Group& g, u32 warps) {
    return most(1u, least(divide_up(4 * warps, g.ranks), 16384u / g.experts));
  }
  EP_BOTH static u64 size(const Group& g, u32 warps) {
    const u32 words = parts_of(g, warps) * (g.experts + g.ranks) + 2 * columns_of(g) + 3 * g.local_experts + 1 +
                      g.ranks + 1 + warps * 64;
    return u64(words) * 4;
  }
  EP_DEVICE static PrepareShared at(u8* memory, const Group& g, u32 warps) {
    PrepareShared s;
    s.num_parts = parts_of(g, warps);
    s.columns = columns_of(g);
    u32* next = reinterpret_cast<u32*>(memory);
    s.parts = next, next += s.num_parts * g.experts;
    s.unique = next, next += s.num_parts * g.ranks;
    s.sums = next, next += s.columns;
    s.before = next, next += s.columns;
    s.zones = next, next += g.local_experts + 1;
    s.counts = next, next += g.local_experts;
    s.alive = next, next += g.local_experts;
    s.tokens = next, next += g.ranks;
    s.invalid = next, next += 1;
    s.scratch = next;
    return s;
  }
};

/// This block's share of the cleaning: every index becomes the expert, or -1 if it is negative, no expert, or named
/// before by the same token. Returns how many were no expert.
///
/// `kRow`: indices that a thread reads at once; where a token has no more, no index is read twice.
template <typename Index, u32 kRow>
EP_DEVICE u32 clean_indices(const PrepareArguments& a, u32 block, Team team) {
  const Group& g = a.group;
  const u32 top_k = a.handle.top_k;
  u32 invalid = 0;
  const u32 share = divide_up(a.tokens, g.blocks * 8) * 8;
  const u32 end = least(a.tokens, (block + 1) * share);
  for (u32 token = block * share + team.thread; token < end; token += team.threads) {
    const Index* row = static_cast<const Index*>(a.topk_idx) + u64(token) * top_k;
    i16* out = a.handle.experts + u64(token) * top_k;
    u64 targets[2] = {};
    for (u32 first = 0; first < top_k; first += kRow) {
      Index indices[kRow];
      EP_UNROLL
      for (u32 k = 0; k < kRow; ++k) indices[k] = first + k < top_k ? row[first + k] : -1;
      EP_UNROLL
      for (u32 k = 0; k < kRow; ++k) {
        const Index index = indices[k];
        bool kept = index >= 0 && index < static_cast<Index>(g.experts);
        invalid += index >= static_cast<Index>(g.experts);
        for (u32 earlier = 0; earlier < first; ++earlier) kept = kept && row[earlier] != index;
        EP_UNROLL
        for (u32 earlier = 0; earlier < k; ++earlier) kept = kept && indices[earlier] != index;
        if (first + k < top_k) out[first + k] = kept ? static_cast<i16>(index) : i16(-1);
        if (!kept) continue;
        const u32 target = static_cast<u32>(index) / g.local_experts;
        targets[target / 64] |= u64(1) << target % 64;
      }
    }
    a.handle.targets[2 * u64(token)] = targets[0], a.handle.targets[2 * u64(token) + 1] = targets[1];
  }
  return invalid;
}

/// Writes this block's share of the cleaned indices to every rank.
EP_DEVICE void send_indices(const PrepareArguments& a, u32 block, u32 half, Team team) {
  const Group& g = a.group;
  const u32 top_k = a.handle.top_k;
  const u32 share = divide_up(a.tokens, g.blocks * 8) * 8;  // 8 tokens' indices are whole vectors
  const u32 begin = least(a.tokens, block * share), end = least(a.tokens, (block + 1) * share);
  const u32 first = begin * top_k / 8, vectors = divide_up((end - begin) * top_k, 8u);
  const Vec* from = reinterpret_cast<const Vec*>(a.handle.experts) + first;
  for (u32 i = team.thread; i < vectors * g.ranks; i += team.threads) {
    // Ranks start with their neighbour, so that they do not all write to one at a time.
    const u32 peer = (g.rank + 1 + i / vectors) % g.ranks, vector = i % vectors;
    u8* to = g.peers[peer] + exchange_at(g, half, g.rank);
    reinterpret_cast<Vec*>(to + kExchangeHeader)[first + vector] = from[vector];
  }
  if (block == 0) {
    for (u32 peer = team.thread; peer < g.ranks; peer += team.threads) {
      *reinterpret_cast<u32*>(g.peers[peer] + exchange_at(g, half, g.rank)) = a.tokens;
    }
  }
}

template <typename Count>
EP_DEVICE void write_counts(const PrepareArguments& a, const PrepareShared& s, Team team) {
  for (u32 e = team.thread; e < a.group.local_experts; e += team.threads) {
    u64 begin = s.zones[e], end = s.zones[e + 1];
    if (a.drop) begin = least(begin, a.capacity), end = least(end, a.capacity);
    static_cast<Count*>(a.token_counts)[e] = static_cast<Count>(end - begin);
  }
}

/// `warps` is the number of the team's warps, of which `warp_index` is this thread's.
EP_DEVICE void prepare_block(const PrepareArguments& a, u32 block, Team team, Warp warp, u32 warp_index, u32 warps,
                             u8* memory) {
  const Group& g = a.group;
  const Handle& h = a.handle;
  const PrepareShared s = PrepareShared::at(memory, g, warps);
  const u32 top_k = h.top_k, local = g.local_experts, parts = s.num_parts;
  u32* own_counters = g.counters + block * kCounters;
  const u32 turn = own_counters[kPrepares] + 1, half = turn % 2;

  // Until the end there is no routing, and none if a wait was in vain.
  if (block == 0 && team.thread == 0) a.header[0] = a.header[1] = 0;
  for (u32 i = team.thread; i < parts * g.experts; i += team.threads) s.parts[i] = 0;
  for (u32 i = team.thread; i < parts * g.ranks; i += team.threads) s.unique[i] = 0;
  for (u32 i = team.thread; i < 2 * s.columns; i += team.threads) s.sums[i] = 0;  // `before` too
  for (u32 i = team.thread; i < local; i += team.threads) s.alive[i] = 0;
  if (team.thread == 0) *s.invalid = 0;
  team.sync();
  const u32 invalid = a.indices_are_64 ? clean_indices<i64, 8>(a, block, team) : clean_indices<int, 8>(a, block, team);
  if (invalid != 0) add_shared(s.invalid, invalid);
  team.sync();
  send_indices(a, block, half, team);
  team.sync();
  for (u32 peer = team.thread; peer < g.ranks; peer += team.threads) {
    store_release(signal_at(g.peers[peer], g, kPrepared, block, g.rank), turn);
  }

  // Which tokens belong to a block depends on the rank that has most of them, so every block waits for all parts.
  for (u32 i = team.thread; i < g.blocks * g.ranks; i += team.threads) {
    wait_for(g, signal_at(g.own, g, kPrepared, i / g.ranks, i % g.ranks), turn, i % g.ranks, kWaitPrepare);
  }
  team.sync();
  for (u32 rank = team.thread; rank < g.ranks; rank += team.threads) {
    s.tokens[rank] = *reinterpret_cast<const u32*>(g.own + exchange_at(g, half, rank));
  }
  team.sync();
  u32 most_tokens = 0;
  for (u32 rank = 0; rank < g.ranks; ++rank) most_tokens = most(most_tokens, s.tokens[rank]);
  const u32 chunk = divide_up(most_tokens, g.blocks), part = divide_up(chunk, parts);
  const u32 chunk_begin = least(most_tokens, block * chunk), chunk_end = least(most_tokens, chunk_begin + chunk);
  const u32 first_expert = g.rank * local;

  // A task is one source's part of the chunk.
  for (u32 i = team.thread; i < g.ranks * (chunk_end - chunk_begin); i += team.threads) {
    const u32 source = i % g.ranks, in_chunk = i / g.ranks, token = chunk_begin + in_chunk;
    if (token >= s.tokens[source]) continue;
    const u32 task = source * parts + in_chunk / part;
    const i16* experts =
        reinterpret_cast<const i16*>(g.own + exchange_at(g, half, source) + kExchangeHeader) + u64(token) * top_k;
    u32 found = 0;
    for (u32 first = 0; first < top_k; first += 8) {
      u32 local_experts[8];
      EP_UNROLL
      for (u32 k = 0; k < 8; ++k)
        local_experts[k] = first + k < top_k ? static_cast<u32>(int(experts[first + k])) - first_expert : ~0u;
      EP_UNROLL
      for (u32 k = 0; k < 8; ++k) {
        if (local_experts[k] >= local) continue;
        add_shared(&s.parts[task * local + local_experts[k]], 1);
        found = 1;
      }
    }
    if (found != 0) add_shared(&s.unique[task], 1);
  }
  team.sync();

  u32* row = g.histogram + u64(block) * s.columns;
  for (u32 column = team.thread; column < s.columns; column += team.threads) {
    u32 sum = 0;
    if (column < g.experts) {
      const u32 source = column / local, expert = column % local;
      for (u32 p = 0; p < parts; ++p) sum += s.parts[(source * parts + p) * local + expert];
    } else if (column < g.experts + g.ranks) {
      for (u32 p = 0; p < parts; ++p) sum += s.unique[(column - g.experts) * parts + p];
    } else {
      sum = *s.invalid;
    }
    row[column] = sum;
  }
  team.sync();
  u32* grid = g.counters + g.blocks * kCounters;
  if (team.thread == 0) {
    add_release_device(grid, 1);
    wait_for(g, grid, turn * g.blocks, g.rank, kWaitPrepare);
    own_counters[kPrepares] = turn;
  }
  team.sync();

  for (u32 base = team.thread; base < g.blocks * s.columns; base += 4 * team.threads) {
    u32 counts[4];
    EP_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      const u32 i = base + j * team.threads;
      counts[j] = i < g.blocks * s.columns ? load_shared_by_all(&g.histogram[i]) : 0;
    }
    EP_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      const u32 i = base + j * team.threads, from = i / s.columns, column = i % s.columns;
      if (counts[j] == 0) continue;
      add_shared(&s.sums[column], counts[j]);
      if (from < block) add_shared(&s.before[column], counts[j]);
    }
  }
  team.sync();
  for (u32 e = team.thread; e < local; e += team.threads) {
    u32 count = 0;
    for (u32 source = 0; source < g.ranks; ++source) count += s.sums[source * local + e];
    s.counts[e] = count;
  }
  team.sync();
  // Slabs lie one behind the other, each padded to the alignment.
  if (warp_index == 0) {
    u32 next = 0;
    for (u32 base = 0; base < local; base += kWarp) {
      const u32 e = base + warp.lane;
      const u32 padded = e < local ? divide_up(s.counts[e], a.alignment) * a.alignment : 0;
      u32 all;
      const u32 zone = next + warp.sum_before(padded, &all);
      if (e < local) s.zones[e] = zone;
      next += all;
    }
    if (warp.lane == 0) s.zones[local] = next;
  }
  team.sync();
  const u64 total = s.zones[local];
  const bool limited = total > a.capacity;

  for (u32 column = team.thread; column < g.experts; column += team.threads) {
    const u32 source = column / local, expert = column % local;
    u32 next = s.zones[expert] + s.before[column];
    for (u32 earlier = 0; earlier < source; ++earlier) next += s.sums[earlier * local + expert];
    for (u32 p = 0; p < parts; ++p) {
      u32* place = &s.parts[(source * parts + p) * local + expert];
      const u32 count = *place;
      *place = next;
      next += count;
    }
  }
  for (u32 source = team.thread; source < g.ranks; source += team.threads) {
    u32 next = s.before[g.experts + source];
    for (u32 earlier = 0; earlier < source; ++earlier) next += s.sums[g.experts + earlier];
    for (u32 p = 0; p < parts; ++p) {
      const u32 count = s.unique[source * parts + p];
      s.unique[source * parts + p] = next;
      next += count;
    }
  }
  team.sync();

  // As many tasks at once in a warp as there is room for all of a token's experts.
  u32 lanes = kWarp;
  while (lanes / 2 >= top_k) lanes /= 2;
  const u32 teams = kWarp / lanes, lane = warp.lane % lanes;
  u32* scratch = s.scratch + warp_index * 64 + warp.lane / lanes * lanes;
  for (u32 first = warp_index * teams; first < g.ranks * parts; first += warps * teams) {
    const u32 task = first + warp.lane / lanes, source = least(task / parts, g.ranks - 1);
    const u32 begin = chunk_begin + task % parts * part;
    const u32 end = task < g.ranks * parts ? least(chunk_end, begin + part) : begin;
    const i16* experts = reinterpret_cast<const i16*>(g.own + exchange_at(g, half, source) + kExchangeHeader);
    u32* next = s.parts + task * local;
    u32 unique = begin < end ? s.unique[task] : 0;
    for (u32 token = begin; token < begin + part; ++token) {
      const u64 pair = u64(token) * g.ranks + source;
      const auto has_place = [&](u32 slot) { return slot < a.capacity && (a.by_place != 0 || unique < a.capacity); };
      for (u32 k = lane; k < top_k; k += lanes) {
        u32 slot = kNoRow;
        if (token < end && token < s.tokens[source]) {
          const u32 expert = static_cast<u32>(static_cast<int>(experts[u64(token) * top_k + k])) - first_expert;
          if (expert < local) {
            slot = next[expert]++;
            if (limited && has_place(slot)) add_shared(&s.alive[expert], 1);
          }
        }
        scratch[k] = slot;
      }
      warp.sync();
      u32 found = 0;
      for (u32 k = 0; k < top_k; ++k) found += scratch[k] != kNoRow;
      if (token < end) {
        for (u32 k = lane; k < top_k; k += lanes) {
          const u32 slot = scratch[k];
          if (slot == kNoRow) continue;
          u32 place = 0;
          for (u32 other = 0; other < top_k; ++other) place += scratch[other] < slot;
          h.slots[pair * h.width + place] = slot_entry(has_place(slot) ? slot : kNoRow, k);
        }
        for (u32 place = found + lane; place < h.width; place += lanes) h.slots[pair * h.width + place] = kNoSlot;
      }
      unique += found != 0;
      warp.sync();
    }
  }

  if (limited) {
    team.sync();
    for (u32 e = team.thread; e < local; e += team.threads) h.alive[block * local + e] = s.alive[e];
  }
  if (block != 0) return;
  for (u32 e = team.thread; e < local; e += team.threads) h.zones[e] = s.zones[e], h.counts[e] = s.counts[e];
  if (a.token_counts != nullptr) {
    if (a.counts_are_64) {
      write_counts<i64>(a, s, team);
    } else {
      write_counts<int>(a, s, team);
    }
  }
  if (team.thread != 0) return;
  h.zones[local] = s.zones[local];
  *h.meta = Meta{a.tokens, most_tokens, chunk, limited, total};
  if (a.total != nullptr) {
    if (a.total_is_64) {
      *static_cast<i64*>(a.total) = static_cast<i64>(total);
    } else {
      *static_cast<int*>(a.total) = static_cast<int>(total);
    }
  }
  const u32 all_invalid = s.sums[g.experts + g.ranks];
  if (load_relaxed(&g.status->failed) == 0 && load_relaxed(&g.status->abort) == 0) {
    a.header[0] = a.header_words[0], a.header[1] = a.header_words[1];
  }
  a.header[2] = static_cast<u32>(total), a.header[3] = static_cast<u32>(total >> 32);
  a.header[4] = all_invalid;
  if (all_invalid != 0) add_system(&g.status->invalid_indices, all_invalid);
  if (limited && !a.drop) {
    g.status->needed = total;
    store_release(&g.status->overflowed, 1);
  }
}

}  // namespace nvte_ep
