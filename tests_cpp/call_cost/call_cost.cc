// What the library itself costs a call: its time over a CUDA, NCCL and NCCL EP that do nothing, and its heap
// allocations, of which there may be none after the first step of a shape. One program for each ABI:
// call_cost NO_OP_RUNTIME, call_cost_te NO_OP_RUNTIME.
//
// Times are printed, not judged: they are for docs and comparisons on one machine. Allocations are judged.

#include <dlfcn.h>
#include <nvte_ep_status.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>
#include <vector>

#include "abi.h"
#include "support/tensor.h"

namespace {

// Allocations of this thread while it counts.
thread_local std::uint64_t allocations = 0;
thread_local bool counting = false;

using Malloc = void* (*)(std::size_t);
using Calloc = void* (*)(std::size_t, std::size_t);
using Realloc = void* (*)(void*, std::size_t);
using MemAlign = int (*)(void**, std::size_t, std::size_t);

template <typename F>
F Next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);

void* malloc(std::size_t bytes) {
  allocations += counting;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  allocations += counting;
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  allocations += counting;
  return __libc_realloc(memory, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  static const MemAlign next = Next<MemAlign>("posix_memalign");
  allocations += counting;
  return next(memory, alignment, bytes);
}
}

namespace {

using test::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int kCalls = 20000;

// Median of two readings of the clock with nothing between.
std::int64_t clock_cost = 0;
std::int64_t latest_median = 0;

// Median nanoseconds of a call after the first, less those of reading the clock, and allocations of all; prints them.
template <typename Call>
bool Measure(const char* name, Call&& call) {
  call();
  std::vector<std::int64_t> times(kCalls);
  allocations = 0;
  for (int i = 0; i < kCalls; ++i) {
    counting = true;
    const auto start = Clock::now();
    call();
    const auto end = Clock::now();
    counting = false;
    times[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count() - clock_cost;
  }
  std::sort(times.begin(), times.end());
  latest_median = times[kCalls / 2];
  std::printf("%-24s %8lld %8lld %12llu\n", name, static_cast<long long>(times[kCalls / 2]),
              static_cast<long long>(times[kCalls * 99 / 100]), static_cast<unsigned long long>(allocations));
  return allocations == 0;
}

bool Run() {
  constexpr std::size_t kTokens = 4096, kHidden = 7168, kTopK = 8, kExperts = 64, kRows = kTokens * kTopK;
  NVTEEpGroupConfig config = {};
  test::Complete(config, 0, 0, {});
  config.ep_size = 1;
  config.num_experts = kExperts;
  config.max_tokens_per_rank = kTokens;
  config.max_recv_tokens_per_rank = kRows;
  config.hidden_dim = kHidden;
  config.max_token_dtype = kNVTEBFloat16;
  int communicator = 0;
  test::Initialize(reinterpret_cast<ncclComm_t>(&communicator), config);
  const test::RegisteredLayer layer = test::Register(kTopK, 0);

  // Nothing is read or written, so no tensor needs more than addresses of its own, of which there are 4 GiB.
  constexpr std::size_t kAddresses = std::size_t{1} << 32, kEach = std::size_t{1} << 29;
  void* const reserved = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw std::runtime_error("no addresses");
  char* const memory = static_cast<char*>(reserved);
  const auto at = [memory](std::size_t place) { return memory + place * kEach; };
  const Tensor mem(at(0), kNVTEByte, {layer.bytes});
  const Tensor topk_idx(at(1), kNVTEInt64, {kTokens, kTopK}), counts(at(2), kNVTEInt32, {kExperts});
  const Tensor tokens(at(3), kNVTEBFloat16, {kTokens, kHidden}), weights(at(4), kNVTEFloat32, {kTokens, kTopK});
  const Tensor recv(at(5), kNVTEBFloat16, {kRows, kHidden}), recv_weights(at(6), kNVTEFloat32, {kRows});
  const test::Handle handle = test::MakeHandle(layer.id, mem.get());
  const test::PrepareArgs prepare = test::MakePrepareArgs(handle, topk_idx.get(), counts.get(), nullptr, kTopK, 0);
  const NVTECommWindow none = {};
  int stream_object = 0;
  const auto stream = reinterpret_cast<cudaStream_t>(&stream_object);

  int failed = 0;  // statuses of the calls that return one
  std::printf("%-24s %8s %8s %12s\n", "call", "median", "99 %", "allocations");
  bool none_allocates = Measure("(reading the clock)", [] {});
  clock_cost = latest_median;
  none_allocates &= Measure("nvte_ep_prepare", [&] { prepare.Call(stream); });
  none_allocates &= Measure("nvte_ep_dispatch", [&] {
    nvte_ep_dispatch(handle, topk_idx.get(), tokens.get(), none, weights.get(), none, recv.get(), none,
                     recv_weights.get(), none, stream);
  });
  none_allocates &=
      Measure("nvte_ep_combine", [&] { nvte_ep_combine(handle, recv.get(), none, tokens.get(), stream); });
  none_allocates &= Measure("nvte_ep_combine_bwd",
                            [&] { nvte_ep_combine_bwd(handle, tokens.get(), none, recv.get(), none, stream); });
  none_allocates &= Measure("nvte_ep_dispatch_bwd", [&] {
    nvte_ep_dispatch_bwd(handle, recv.get(), none, recv_weights.get(), none, tokens.get(), weights.get(), stream);
  });
  none_allocates &= Measure("nvte_ep_try_dispatch", [&] {
    failed |= nvte_ep_try_dispatch(handle, topk_idx.get(), tokens.get(), none, weights.get(), none, recv.get(), none,
                                   recv_weights.get(), none, stream);
  });
  none_allocates &= Measure("nvte_ep_try_combine",
                            [&] { failed |= nvte_ep_try_combine(handle, recv.get(), none, tokens.get(), stream); });
  none_allocates &= Measure("nvte_ep_try_combine_bwd", [&] {
    failed |= nvte_ep_try_combine_bwd(handle, tokens.get(), none, recv.get(), none, stream);
  });
  none_allocates &= Measure("nvte_ep_try_dispatch_bwd", [&] {
    failed |= nvte_ep_try_dispatch_bwd(handle, recv.get(), none, recv_weights.get(), none, tokens.get(), weights.get(),
                                       stream);
  });
  nvte_ep_shutdown();
  munmap(reserved, kAddresses);
  if (failed != 0) throw std::runtime_error(nvte_ep_last_error());
  return none_allocates;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s NO_OP_RUNTIME\n", argv[0]);
    return 2;
  }
  setenv("NVTE_EP_RUNTIME", "host", 1);
  setenv("NVTE_EP_HOST_LIB", argv[1], 1);
  try {
    if (Run()) return 0;
    std::fprintf(stderr, "a call allocates\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
