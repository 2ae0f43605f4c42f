// The CPU's way to run the kernels: every role of every block is a thread, every rank makes its calls one after the
// other.
#pragma once

#include "world.h"

namespace world {

/// Shared memory of a block.
struct Shared {
  u8* memory;
  explicit Shared(u64 bytes) : memory(static_cast<u8*>(std::aligned_alloc(256, aligned(bytes)))) {}
  Shared(const Shared&) = delete;
  ~Shared() { std::free(memory); }
};

constexpr Team kAlone{0, 1, 0};
constexpr Warp kOneLane{0};

inline void each_block(u32 blocks, const std::function<void(u32)>& body) {
  std::vector<std::thread> threads;
  for (u32 block = 0; block < blocks; ++block) threads.emplace_back(body, block);
  for (auto& thread : threads) thread.join();
}

inline void World::prepare(u32 rank, PrepareArguments a) {
  ranks[rank].queue.push_back([this, a] {
    each_block(shape.blocks, [&](u32 block) {
      Shared shared(prepare_shared());
      prepare_block(a, block, kAlone, kOneLane, 0, 1, shared.memory);
    });
  });
}

inline void World::dispatch(u32 rank, DispatchArguments a) {
  ranks[rank].queue.push_back([this, a] {
    each_block(shape.blocks, [&](u32 block) {
      Shared shared(DispatchShared::size(a));
      const DispatchShared s = DispatchShared::at(shared.memory, a);
      s.initialize(a, kAlone);
      std::thread even([&] { stage_rows(a, s, block, 0, kOneLane); });
      std::thread odd([&] { stage_rows(a, s, block, 1, kOneLane); });
      std::thread clearer([&] { clear_padding(a, s, block, kOneLane); });
      std::thread loader([&] { load_staged(a, s, block, kOneLane); });
      store_slots(a, s, block, kOneLane);
      even.join(), odd.join(), clearer.join(), loader.join();
      finish_dispatch(a, block);
    });
  });
}

template <bool own>
void sum(const CombineArguments& a, const Line& s) {
  constexpr u32 kVectors = 64;  // pieces of the tests have at most 1 KiB
  switch (a.row_type) {
    case kBFloat16:
      return sum_rows<kBFloat16, kVectors, own>(a, s, kAlone, kOneLane);
    case kFloat16:
      return sum_rows<kFloat16, kVectors, own>(a, s, kAlone, kOneLane);
    default:
      return sum_rows<kFloat32, kVectors, own>(a, s, kAlone, kOneLane);
  }
}

inline void World::combine(u32 rank, CombineArguments a) {
  ranks[rank].queue.push_back([this, a] {
    each_block(shape.blocks, [&](u32 block) {
      Shared shared(CombineShared::size(a));
      const CombineShared s = CombineShared::at(shared.memory, a);
      s.initialize(kAlone, 1);
      std::vector<std::thread> roles;
      if (a.group.ranks > 1) {
        roles.emplace_back([&] { load_rows<false>(a, s.for_peers, block, kOneLane); });
        roles.emplace_back([&] { tell_peers<false>(a, s.for_peers, block, kOneLane); });
        roles.emplace_back([&] { sum<false>(a, s.for_peers); });
      }
      roles.emplace_back([&] { load_rows<true>(a, s.own, block, kOneLane); });
      roles.emplace_back([&] { tell_peers<true>(a, s.own, block, kOneLane); });
      sum<true>(a, s.own);
      for (auto& role : roles) role.join();
      finish_combine(a, block);
    });
  });
}

inline void World::run() {
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    threads.emplace_back([&rank] {
      for (auto& call : rank.queue) call();
      rank.queue.clear();
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace world
