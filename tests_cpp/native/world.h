// Ranks of one process over the native engine's kernels: on a CPU, where a block's roles are threads, or on one GPU,
// where a rank is a stream. And what a step has to give, computed plainly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/combine.h"
#include "native/dispatch.h"
#include "native/prepare.h"

namespace world {

using namespace nvte_ep;

struct Shape {
  u32 ranks = 2, blocks = 2, experts = 8, max_tokens = 16, top_k = 2;
  u32 row_bytes = 64, scale_bytes = 0;
  RowType type = kBFloat16;
  u32 alignment = 1;
  u64 capacity = ~0ull;
  bool drop = false, by_place = false;
  Window staged{4, 3}, summed{4, 3};
  u32 piece_bytes = 16384, stages = 4, peer_stages = 4, own_stages = 4;
  u32 local() const { return experts / ranks; }
  u32 width() const { return (std::min(top_k, local()) + 3) / 4 * 4; }
};

inline u64 aligned(u64 bytes) { return (bytes + 255) / 256 * 256; }

#if EP_GPU
#define WORLD_CHECK(call)                                                                                          \
  do {                                                                                                             \
    const auto code_ = (call);                                                                                     \
    if (code_ != cudaSuccess) {                                                                                    \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code_)), std::exit(1); \
    }                                                                                                              \
  } while (0)
inline u8* allocate(u64 bytes) {
  void* memory;
  WORLD_CHECK(cudaMalloc(&memory, bytes + 256));
  WORLD_CHECK(cudaMemset(memory, 0xcb, bytes));
  return static_cast<u8*>(memory);
}
inline void release(void* memory) { WORLD_CHECK(cudaFree(memory)); }
inline void copy(void* to, const void* from, u64 bytes) { WORLD_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
inline void clear(void* to, u64 bytes) { WORLD_CHECK(cudaMemset(to, 0, bytes)); }
inline u8* allocate_status() {
  void* memory;
  WORLD_CHECK(cudaMallocHost(&memory, sizeof(Status)));
  std::memset(memory, 0, sizeof(Status));
  return static_cast<u8*>(memory);
}
#else
inline u8* allocate(u64 bytes) {
  u8* memory = static_cast<u8*>(std::aligned_alloc(256, aligned(bytes + 256)));
  std::memset(memory, 0xcb, bytes);
  return memory;
}
inline void release(void* memory) { std::free(memory); }
inline void copy(void* to, const void* from, u64 bytes) { std::memcpy(to, from, bytes); }
inline void clear(void* to, u64 bytes) { std::memset(to, 0, bytes); }
inline u8* allocate_status() {
  u8* memory = allocate(sizeof(Status));
  std::memset(memory, 0, sizeof(Status));
  return memory;
}
#endif

template <typename T>
T* upload(const std::vector<T>& values) {
  T* memory = reinterpret_cast<T*>(allocate(values.size() * sizeof(T) + 1));
  if (!values.empty()) copy(memory, values.data(), values.size() * sizeof(T));
  return memory;
}
template <typename T>
std::vector<T> download(const void* from, u64 count) {
  std::vector<T> values(count);
  if (count > 0) copy(values.data(), from, count * sizeof(T));
  return values;
}

/// A rank: its segment, a handle, and the order of its calls.
struct Rank {
  Group group{};
  Handle handle{};
  u32* header = nullptr;
  std::vector<std::function<void()>> queue;
#if EP_GPU
  cudaStream_t stream{};
#endif
};

struct World {
  Shape shape;
  std::vector<Rank> ranks;
  std::vector<u8*> memory;
  u64 segment_bytes = 0;

  u8* own(u64 bytes) { return memory.emplace_back(allocate(bytes)); }

  explicit World(const Shape& s, u64 timeout_ns = 20'000'000'000ull) : shape(s), ranks(s.ranks) {
    const u32 padded = (s.max_tokens + 7) / 8 * 8;
    Group g{};
    g.timeout_ns = timeout_ns;
    g.ranks = s.ranks, g.blocks = s.blocks, g.experts = s.experts, g.local_experts = s.local();
    g.staged = s.staged, g.summed = s.summed;
    g.row_stride = s.row_bytes + s.scale_bytes;
    g.weight_stride = (s.top_k + 3) / 4 * 4;
    const u64 window = u64(s.blocks) * s.staged.groups * s.staged.group_tokens;
    const u64 summed = u64(s.blocks) * s.summed.groups * s.summed.group_tokens * s.ranks;
    u64 next = aligned(u64(kSignalKinds) * s.blocks * s.ranks * 4);
    g.exchange_offset = next;
    g.exchange_stride = aligned(kExchangeHeader + u64(padded) * s.top_k * 2);
    next += g.exchange_stride * 2 * s.ranks;
    g.staged_offset = next, next += aligned(window * g.row_stride);
    g.staged_weights_offset = next, next += aligned(window * g.weight_stride * 4);
    g.summed_offset = next, next += aligned(summed * g.row_stride);
    g.summed_weights_offset = next, next += aligned(summed * g.weight_stride * 4);
    segment_bytes = next;
    std::vector<u8*> segments;
    for (u32 r = 0; r < s.ranks; ++r) {
      segments.push_back(own(segment_bytes));
      clear(segments[r], segment_bytes);
    }
    for (u32 r = 0; r < s.ranks; ++r) {
      Rank& rank = ranks[r];
      rank.group = g;
      rank.group.rank = r;
      rank.group.own = segments[r];
      u8** peers = upload(segments);
      memory.push_back(reinterpret_cast<u8*>(peers));
      rank.group.peers = peers;
      const u64 counters = (u64(s.blocks) * kCounters + 1) * 4;
      rank.group.counters = reinterpret_cast<u32*>(own(counters));
      clear(rank.group.counters, counters);
      rank.group.histogram = reinterpret_cast<u32*>(own(u64(s.blocks) * (s.experts + s.ranks + 1) * 4));
      rank.group.status = reinterpret_cast<Status*>(allocate_status());
      rank.header = reinterpret_cast<u32*>(own(64));
      const u64 pairs = u64(s.max_tokens) * s.ranks;
      Handle& h = rank.handle;
      h.meta = reinterpret_cast<Meta*>(own(sizeof(Meta)));
      h.experts = reinterpret_cast<i16*>(own(u64(padded) * s.top_k * 2));
      h.targets = reinterpret_cast<u64*>(own(u64(padded) * 16));
      h.slots = reinterpret_cast<u32*>(own(pairs * s.width() * 4));
      h.zones = reinterpret_cast<u32*>(own((s.local() + 1) * 4));
      h.counts = reinterpret_cast<u32*>(own(s.local() * 4));
      h.alive = reinterpret_cast<u32*>(own(u64(s.blocks) * s.local() * 4));
      h.top_k = s.top_k, h.width = s.width();
#if EP_GPU
      WORLD_CHECK(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
#endif
    }
  }
  World(const World&) = delete;
  ~World() {
    for (u8* block : memory) release(block);
  }

  u64 prepare_shared() const { return PrepareShared::size(ranks[0].group, EP_GPU ? kPrepareThreads / kGpuWarp : 1); }

  void prepare(u32 rank, PrepareArguments a);
  void dispatch(u32 rank, DispatchArguments a);
  void combine(u32 rank, CombineArguments a);
  /// Runs what is queued on all ranks.
  void run();
};

}  // namespace world
