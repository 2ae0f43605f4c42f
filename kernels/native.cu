// The kernels of the native engine: each a few roles over the shared protocol.
//
// kernels/native.ptx is generated from this: cargo run -p nvte-ep-codegen -- kernels --nvrtc "$(qa/nvrtc.sh)"

#include "native/combine.h"
#include "native/dispatch.h"
#include "native/prepare.h"

using namespace nvte_ep;

extern __shared__ __align__(128) u8 memory[];

extern "C" __global__ void __launch_bounds__(kPrepareThreads, 1) nvte_ep_native_prepare(const __grid_constant__ PrepareArguments a) {
  prepare_block(a, blockIdx.x, Team{threadIdx.x, blockDim.x, 0}, Warp::own(), threadIdx.x / kWarp, blockDim.x / kWarp, memory);
}

namespace {
__device__ void run_dispatch(const DispatchArguments& a, u32 block) {
  const DispatchShared s = DispatchShared::at(memory, a);
  s.initialize(a, Team{threadIdx.x, blockDim.x, 0});
  __syncthreads();
  const u32 role = threadIdx.x / kWarp;
  switch (role) {
    case 0:
    case 1: stage_rows(a, s, block, role, Warp::own()); break;
    case 2: load_staged(a, s, block, Warp::own()); break;
    case 3: store_slots(a, s, block, Warp::own()); break;
    default: clear_padding(a, s, block, Warp::own());
  }
  __syncthreads();
  if (threadIdx.x == 0) finish_dispatch(a, block);
}
}  // namespace

extern "C" __global__ void __launch_bounds__(kDispatchThreads, 1) nvte_ep_native_dispatch(const __grid_constant__ DispatchArguments a) {
  run_dispatch(a, blockIdx.x);
}

namespace {
template <u32 type, bool own>
__device__ void run_line(const CombineArguments& a, const Line& s, u32 block, u32 thread) {
  const u32 warp = thread / kWarp;
  if (warp == kSummers) {
    load_rows<own>(a, s, block, Warp::own());
  } else if (warp == kSummers + 1) {
    tell_peers<own>(a, s, block, Warp::own());
  } else {
    sum_rows<type, kVectors, own>(a, s, Team{thread, kSummers * kWarp, 0}, Warp::own());
  }
}

template <u32 type>
__device__ void run_combine(const CombineArguments& a, u32 block) {
  const CombineShared s = CombineShared::at(memory, a);
  s.initialize(Team{threadIdx.x, blockDim.x, 0}, kSummers);
  __syncthreads();
  if (threadIdx.x < kCombineThreads / 2) {
    if (a.group.ranks > 1) run_line<type, false>(a, s.for_peers, block, threadIdx.x);
  } else {
    run_line<type, true>(a, s.own, block, threadIdx.x - kCombineThreads / 2);
  }
  __syncthreads();
  if (threadIdx.x == 0) finish_combine(a, block);
}
}  // namespace

extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) nvte_ep_native_combine_bf16(const __grid_constant__ CombineArguments a) {
  run_combine<kBFloat16>(a, blockIdx.x);
}
extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) nvte_ep_native_combine_f16(const __grid_constant__ CombineArguments a) {
  run_combine<kFloat16>(a, blockIdx.x);
}
extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) nvte_ep_native_combine_f32(const __grid_constant__ CombineArguments a) {
  run_combine<kFloat32>(a, blockIdx.x);
}
