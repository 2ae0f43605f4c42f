// The GPU's way to run the kernels: every rank is a stream.
#pragma once

#include "native.cu"
#include "world.h"

namespace world {

// All ranks in one launch, for a profiler, which runs launches one by one.
template <typename Arguments>
struct Together {
  Arguments of_rank[8];
};
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_together(const __grid_constant__ Together<DispatchArguments> all) {
  run_dispatch(all.of_rank[blockIdx.y], blockIdx.x);
}
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_together(const __grid_constant__ Together<CombineArguments> all) {
  run_combine<kBFloat16>(all.of_rank[blockIdx.y], blockIdx.x);
}
__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_together(const __grid_constant__ Together<PrepareArguments> all) {
  prepare_block(all.of_rank[blockIdx.y], blockIdx.x, Team{threadIdx.x, blockDim.x, 0}, Warp::own(), threadIdx.x / kWarp,
                blockDim.x / kWarp, memory);
}

template <typename Arguments>
void launch_together(void (*kernel)(Together<Arguments>), const std::vector<Arguments>& a, u32 blocks, u32 threads,
                     u64 shared, cudaStream_t stream) {
  Together<Arguments> all;
  for (size_t i = 0; i < a.size(); ++i) all.of_rank[i] = a[i];
  WORLD_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  kernel<<<dim3(blocks, static_cast<u32>(a.size())), threads, shared, stream>>>(all);
  WORLD_CHECK(cudaGetLastError());
}

template <typename Arguments>
void launch(void (*kernel)(Arguments), const Arguments& a, u32 blocks, u32 threads, u64 shared, cudaStream_t stream) {
  WORLD_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  kernel<<<blocks, threads, shared, stream>>>(a);
  WORLD_CHECK(cudaGetLastError());
}

inline void World::prepare(u32 rank, PrepareArguments a) {
  ranks[rank].queue.push_back([=, this, &r = ranks[rank]] {
    launch(nvte_ep_native_prepare, a, shape.blocks, kPrepareThreads, prepare_shared(), r.stream);
  });
}
inline void World::dispatch(u32 rank, DispatchArguments a) {
  ranks[rank].queue.push_back([=, this, &r = ranks[rank]] {
    launch(nvte_ep_native_dispatch, a, shape.blocks, kDispatchThreads, DispatchShared::size(a), r.stream);
  });
}
inline void World::combine(u32 rank, CombineArguments a) {
  auto* kernel = a.row_type == kBFloat16  ? nvte_ep_native_combine_bf16
                 : a.row_type == kFloat16 ? nvte_ep_native_combine_f16
                                          : nvte_ep_native_combine_f32;
  ranks[rank].queue.push_back([=, this, &r = ranks[rank]] {
    launch(kernel, a, shape.blocks, kCombineThreads, CombineShared::size(a), r.stream);
  });
}

/// How ranks are made late: by a kernel of a random time before each call, and the last rank by the host.
struct Delays {
  u32 microseconds = 0, milliseconds = 0;
  std::minstd_rand random{1};
};
inline Delays delays;

__global__ void spin(u64 time_ns) {
  const u64 start = nanoseconds();
  while (nanoseconds() - start < time_ns) {
  }
}

inline void World::run() {
  // By turns, since a full queue of launches would keep one rank's from the others.
  for (size_t call = 0; call < ranks[0].queue.size(); ++call) {
    for (Rank& rank : ranks) {
      if (delays.microseconds != 0) {
        spin<<<1, 1, 0, rank.stream>>>(u64(delays.random() % delays.microseconds) * 1000);
        WORLD_CHECK(cudaGetLastError());
      }
      if (&rank == &ranks.back()) std::this_thread::sleep_for(std::chrono::milliseconds(delays.milliseconds));
      rank.queue[call]();
    }
  }
  for (Rank& rank : ranks) {
    rank.queue.clear();
    WORLD_CHECK(cudaStreamSynchronize(rank.stream));
  }
}

}  // namespace world
