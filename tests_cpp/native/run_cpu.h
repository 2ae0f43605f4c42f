// The CPU's way to run the kernels: every role of every block is a thread, every rank makes its calls one after the
// other.
#pragma once

#include "native/cpu.h"
#include "world.h"

namespace world {

/// Shared memory of a block.
struct Shared {
  u8* memory;
  explicit Shared(u64 bytes) : memory(static_cast<u8*>(std::aligned_alloc(256, aligned(bytes)))) {}
  Shared(const Shared&) = delete;
  ~Shared() { std::free(memory); }
};

/// One rank's call of a kernel.
template <typename Arguments>
void run_call(const Arguments& a) {
  std::vector<std::thread> blocks;
  for (u32 block = 0; block < a.group.blocks; ++block) {
    blocks.emplace_back([&a, block] {
      Shared shared(shared_bytes_of(a));
      begin_block(a, shared.memory);
      std::vector<std::thread> roles;
      for (u32 role = 0; role < roles_of(a); ++role)
        roles.emplace_back([&a, &shared, block, role] { run_role(a, block, role, shared.memory); });
      for (auto& role : roles) role.join();
      end_block(a, block);
    });
  }
  for (auto& block : blocks) block.join();
}

inline void World::prepare(u32 rank, PrepareArguments a) {
  ranks[rank].queue.push_back([a] { run_call(a); });
}
inline void World::dispatch(u32 rank, DispatchArguments a) {
  ranks[rank].queue.push_back([a] { run_call(a); });
}
inline void World::combine(u32 rank, CombineArguments a) {
  ranks[rank].queue.push_back([a] { run_call(a); });
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
