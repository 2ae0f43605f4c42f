// dispatch, and the gradient of combine: every rank stages its rows in a window of its segment, and every rank pulls
// each row that it needs once and writes it to all its slots.
//
// A block has roles that run side by side, a warp each: two stage by turns, one loads what comes here into shared
// memory, one stores that into its slots, and one clears the padding.
#pragma once

#include "layout.h"

namespace nvte_ep {

/// A piece of a row on its way through shared memory.
struct Piece {
  u32 offset, bytes;  // within the row; no bytes: no piece
  u32 last;           // of its row: scales and weights came too
  u32 pulled;         // no piece: what peers are told that was pulled
  u32 ends;           // no piece: the last of the call
};

/// Shared memory of dispatch.
struct DispatchShared {
  static constexpr u32 kStageWarps = 2, kEach = 3,
                       kStagers = kStageWarps * kEach;  // pieces in shared memory that are staged
  static constexpr u32 kZeroBytes = 2048;
  u8* stager;            // [kStagers][stage_bytes]
  u8* stage;             // [stages][stage_bytes]: piece, then scales, then weights
  u8* zeros;             // [kZeroBytes]
  Barrier* stager_full;  // [kStagers]
  Barrier* full;         // [stages]
  Barrier* empty;        // [stages]
  Plan plan;
  Piece* pieces;  // [stages]
  u32* slots;     // [stages][width]

  EP_BOTH static u32 stager_bytes(const DispatchArguments& a) { return a.piece_bytes + a.scale_bytes; }
  EP_BOTH static u32 stage_bytes(const DispatchArguments& a) {
    return a.piece_bytes + a.scale_bytes + a.group.weight_stride * 4;
  }
  EP_BOTH static u64 size(const DispatchArguments& a) {
    return kStagers * (u64(stager_bytes(a)) + sizeof(Barrier)) + kZeroBytes +
           Plan::size(a.group, a.group.staged, a.handle) +
           a.stages * (u64(stage_bytes(a)) + 2 * sizeof(Barrier) + sizeof(Piece) + a.handle.width * 4);
  }
  EP_DEVICE static DispatchShared at(u8* memory, const DispatchArguments& a) {
    DispatchShared s;
    s.stager = memory, memory += kStagers * stager_bytes(a);
    s.stage = memory, memory += a.stages * stage_bytes(a);
    s.zeros = memory, memory += kZeroBytes;
    s.stager_full = reinterpret_cast<Barrier*>(memory), memory += kStagers * sizeof(Barrier);
    s.full = reinterpret_cast<Barrier*>(memory), memory += a.stages * sizeof(Barrier);
    s.empty = reinterpret_cast<Barrier*>(memory), memory += a.stages * sizeof(Barrier);
    s.plan = Plan::at(memory, a.group, a.group.staged, a.handle),
    memory += Plan::size(a.group, a.group.staged, a.handle);
    s.slots = reinterpret_cast<u32*>(memory), memory += a.stages * a.handle.width * 4;
    s.pieces = reinterpret_cast<Piece*>(memory);
    return s;
  }
  /// Before the roles start; the team has a barrier behind it.
  EP_DEVICE void initialize(const DispatchArguments& a, Team team) const {
    for (u32 i = team.thread; i < kZeroBytes / 16; i += team.threads) reinterpret_cast<Vec*>(zeros)[i] = Vec{};
    if (team.thread == 0) {
      for (u32 i = 0; i < kStagers; ++i) barrier_init(&stager_full[i], 1);
      for (u32 i = 0; i < a.stages; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], 1);
      plan.initialize();
      barriers_ready();
    }
    fence_bulk();
  }
};

/// Stages this rank's rows, group by group, as far as the peers have made room: one warp the groups of even numbers,
/// one the others.
EP_DEVICE void stage_rows(const DispatchArguments& a, const DispatchShared& s, u32 block, u32 odd, Warp warp) {
  constexpr u32 kEach = DispatchShared::kEach;
  const Group& g = a.group;
  const Meta& meta = *a.handle.meta;
  const Chunk chunk = Chunk::of(g, g.staged, meta, block, kDispatchGroups);
  const u32 top_k = a.handle.top_k, stager_bytes = DispatchShared::stager_bytes(a);
  const u32 pieces = divide_up(a.row_bytes, a.piece_bytes);
  const u64 own_bit = u64(1) << g.rank % 64;
  u8* stager = s.stager + odd * kEach * stager_bytes;
  Barrier* full = s.stager_full + odd * kEach;
  Watcher pulled(kPulled, kWaitPulled, chunk.base - g.staged.groups);
  u32 uses = 0;  // parity of each stager's next use
  for (u32 group = (chunk.base + odd) % 2; group < chunk.groups; group += 2) {
    const u32 number = chunk.base + group;
    const u32 begin = chunk.group_begin(group), end = least(meta.tokens, chunk.group_begin(group + 1));
    pulled.wait(g, warp, block, number + 1 - g.staged.groups);
    // As many pieces at once as there is room for: first all loads, then the stores.
    const u32 last = most(begin, end) * pieces;
    for (u32 first = begin * pieces; first < last; first += kEach) {
      const u32 count = least(last - first, kEach);
      u32 leaving = 0;
      for (u32 i = 0; i < count; ++i) {
        // Rows that stay are read in place.
        const u64* targets = a.handle.targets + u64((first + i) / pieces) * 2;
        const bool away = (targets[g.rank / 64] & ~own_bit) != 0 || targets[1 - g.rank / 64] != 0;
        leaving |= static_cast<u32>(away) << i;
      }
      if (warp.lane == 0) {
        for (u32 i = 0; i < count; ++i) {
          if ((leaving >> i & 1) == 0) continue;
          const u32 token = (first + i) / pieces, offset = (first + i) % pieces * a.piece_bytes;
          const u32 bytes = least(a.piece_bytes, a.row_bytes - offset);
          const u32 scales = offset + bytes == a.row_bytes ? a.scale_bytes : 0;
          barrier_arrive_expect(&full[i], bytes + scales);
          bulk_load(stager + i * stager_bytes, a.tokens + u64(token) * a.row_bytes + offset, bytes, &full[i]);
          if (scales != 0)
            bulk_load(stager + i * stager_bytes + bytes, a.scales + u64(token) * scales, scales, &full[i]);
        }
        for (u32 i = 0; i < count; ++i) {
          if ((leaving >> i & 1) == 0) continue;
          const u32 token = (first + i) / pieces, offset = (first + i) % pieces * a.piece_bytes;
          const u32 bytes = least(a.piece_bytes, a.row_bytes - offset);
          const u32 scales = offset + bytes == a.row_bytes ? a.scale_bytes : 0;
          barrier_wait(&full[i], uses >> i & 1);
          u8* to = g.own + g.staged_offset + staged_row(g, block, number, token - begin) * g.row_stride;
          bulk_store(to + offset, stager + i * stager_bytes, bytes + scales);
        }
        bulk_commit();
        bulk_wait_read<0>();
      }
      uses ^= leaving;
    }
    if (a.weights != nullptr && begin < end) {
      float* to = reinterpret_cast<float*>(g.own + g.staged_weights_offset);
      for (u32 i = warp.lane; i < (end - begin) * top_k; i += kWarp) {
        to[staged_row(g, block, number, i / top_k) * g.weight_stride + i % top_k] = a.weights[u64(begin) * top_k + i];
      }
    }
    if (warp.lane == 0) bulk_wait<0>();
    signal_all(g, warp, kStaged + number % 2, block, number + 1);
  }
}

/// Loads the rows that come to this rank, token by token from all sources: ranks that do so at one time read the same
/// rows.
EP_DEVICE void load_staged(const DispatchArguments& a, const DispatchShared& s, u32 block, Warp warp) {
  const Group& g = a.group;
  const Handle& h = a.handle;
  const Chunk chunk = Chunk::of(g, g.staged, *h.meta, block, kDispatchGroups);
  const u32 width = h.width, stage_bytes = DispatchShared::stage_bytes(a);
  const u32 weight_bytes = a.recv_weights == nullptr ? 0 : g.weight_stride * 4;
  Cursor cursor{a.stages};
  Watcher even(kStaged, kWaitStaged, chunk.base - 1), odd(kStagedOdd, kWaitStaged, chunk.base - 1);
  if (warp.lane == 0) {
    for (u32 group = 0; group < Plan::kGroups; ++group) s.plan.fetch(g, h, chunk, group);
  }
  const auto start_marker = [&](u32 pulled, u32 ends) {
    barrier_wait(&s.empty[cursor.stage], cursor.parity ^ 1);
    if (warp.lane == 0) {
      s.pieces[cursor.stage] = Piece{0, 0, 0, pulled, ends};
      barrier_arrive(&s.full[cursor.stage]);
    }
    cursor.advance();
  };
  for (u32 group = 0; group < chunk.groups; ++group) {
    const u32 number = chunk.base + group, tokens = chunk.group_begin(group + 1) - chunk.group_begin(group);
    s.plan.wait(group);
    (number % 2 == 0 ? even : odd).wait(g, warp, block, number + 1);
    const u32* slots = s.plan.slots(group);
    for (u32 in_group = 0; in_group < tokens; ++in_group) {
      const u64 window = staged_row(g, block, number, in_group), token = chunk.group_begin(group) + in_group;
      for (u32 source = 0; source < g.ranks; ++source, slots += width) {
        if (slots[0] == kNoSlot) continue;
        const u8* segment = g.peers[source];
        const u8* row = segment + g.staged_offset + window * g.row_stride;
        const u8* scales = row + a.row_bytes;
        if (source == g.rank) row = a.tokens + token * a.row_bytes, scales = a.scales + token * a.scale_bytes;
        for (u32 offset = 0; offset < a.row_bytes; offset += a.piece_bytes) {
          const u32 bytes = least(a.piece_bytes, a.row_bytes - offset);
          const bool last = offset + bytes == a.row_bytes;
          barrier_wait(&s.empty[cursor.stage], cursor.parity ^ 1);
          for (u32 j = warp.lane; j < width; j += kWarp) s.slots[cursor.stage * width + j] = slots[j];
          warp.sync();
          if (warp.lane == 0) {
            Barrier* full = &s.full[cursor.stage];
            u8* to = s.stage + cursor.stage * stage_bytes;
            s.pieces[cursor.stage] = Piece{offset, bytes, last, 0, 0};
            barrier_arrive_expect(full, bytes + (last ? a.scale_bytes + weight_bytes : 0));
            bulk_load(to, row + offset, bytes, full);
            if (last && a.scale_bytes != 0) bulk_load(to + a.piece_bytes, scales, a.scale_bytes, full);
            if (last && weight_bytes != 0) {
              bulk_load(to + a.piece_bytes + a.scale_bytes, segment + g.staged_weights_offset + window * weight_bytes,
                        weight_bytes, full);
            }
          }
          cursor.advance();
        }
      }
    }
    start_marker(number + 1, 0);
    warp.sync();
    if (warp.lane == 0) s.plan.fetch(g, h, chunk, group + Plan::kGroups);
  }
  start_marker(0, 1);
}

/// Stores what was loaded into its slots; a lane has a slot.
EP_DEVICE void store_slots(const DispatchArguments& a, const DispatchShared& s, u32 block, Warp warp) {
  // Pieces whose stores may still read their stage.
  constexpr u32 kStoring = 2;
  const Group& g = a.group;
  const u32 width = a.handle.width, stage_bytes = DispatchShared::stage_bytes(a);
  Cursor cursor{a.stages}, done{a.stages};
  for (u32 stored = 0;; ++stored) {
    barrier_wait(&s.full[cursor.stage], cursor.parity);
    const Piece piece = s.pieces[cursor.stage];
    if (piece.bytes != 0) {
      const u8* from = s.stage + cursor.stage * stage_bytes;
      const float* weights = reinterpret_cast<const float*>(from + a.piece_bytes + a.scale_bytes);
      for (u32 j = warp.lane; j < width; j += kWarp) {
        const u32 entry = s.slots[cursor.stage * width + j];
        const u64 row = slot_row(entry);
        if (!has_row(entry) || row >= a.rows) continue;
        bulk_store_once(a.recv_tokens + row * a.row_bytes + piece.offset, from, piece.bytes);
        if (piece.last == 0) continue;
        if (a.scale_bytes != 0) bulk_store(a.recv_scales + row * a.scale_bytes, from + a.piece_bytes, a.scale_bytes);
        if (a.recv_weights != nullptr) a.recv_weights[row] = weights[slot_position(entry)];
      }
    } else if (piece.ends == 0) {
      // All loads of the group are complete.
      signal_all_loaded(g, warp, kPulled, block, piece.pulled);
    }
    bulk_commit();
    if (piece.ends != 0) break;
    if (stored >= kStoring) {
      bulk_wait_read<kStoring>();
      warp.sync();
      if (warp.lane == 0) barrier_arrive(&s.empty[done.stage]);
      done.advance();
    }
    cursor.advance();
  }
  bulk_wait<0>();
}

/// Clears rows [begin, end) of the receive side.
EP_DEVICE void clear_rows(const DispatchArguments& a, const DispatchShared& s, u64 begin, u64 end, Warp warp) {
  for (u64 row = begin + warp.lane; row < end; row += kWarp) {
    for (u32 offset = 0; offset < a.row_bytes; offset += DispatchShared::kZeroBytes) {
      bulk_store(a.recv_tokens + row * a.row_bytes + offset, s.zeros,
                 least(DispatchShared::kZeroBytes, a.row_bytes - offset));
    }
    for (u32 offset = 0; offset < a.scale_bytes; offset += DispatchShared::kZeroBytes) {
      bulk_store(a.recv_scales + row * a.scale_bytes + offset, s.zeros,
                 least(DispatchShared::kZeroBytes, a.scale_bytes - offset));
    }
    bulk_commit();
    if (a.recv_weights != nullptr) a.recv_weights[row] = 0;
  }
}

/// Clears the padding, and where rows are dropped all that nothing was written to. The blocks share the slabs.
EP_DEVICE void clear_padding(const DispatchArguments& a, const DispatchShared& s, u32 block, Warp warp) {
  const Group& g = a.group;
  const Handle& h = a.handle;
  const bool limited = h.meta->limited != 0;
  const u64 total = h.zones[g.local_experts];
  for (u32 e = 0; e < g.local_experts; ++e) {
    u64 begin = h.zones[e], end = h.zones[e + 1];
    u64 alive = h.counts[e];
    if (limited) {
      alive = 0;
      for (u32 from = 0; from < g.blocks; ++from) alive += h.alive[from * g.local_experts + e];
    }
    end = least(end, a.rows);
    begin = least(begin + alive, end);
    // Every block takes a share of every slab's padding.
    const u64 share = divide_up(end - begin, u64(g.blocks));
    const u64 from = least(end, begin + ((block + e) % g.blocks) * share);
    clear_rows(a, s, from, least(end, from + share), warp);
  }
  if (a.drop && total < a.rows) {
    const u64 share = divide_up(a.rows - total, u64(g.blocks)), from = least(a.rows, total + block * share);
    clear_rows(a, s, from, least(a.rows, from + share), warp);
  }
  bulk_wait<0>();
}

/// When all roles are done; one thread.
EP_DEVICE void finish_dispatch(const DispatchArguments& a, u32 block) {
  const Group& g = a.group;
  g.counters[block * kCounters + kDispatchGroups] +=
      Chunk::of(g, g.staged, *a.handle.meta, block, kDispatchGroups).groups;
}

}  // namespace nvte_ep
