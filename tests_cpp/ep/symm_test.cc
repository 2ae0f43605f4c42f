// Symmetric memory for callers: the pool, registration of other memory, and what is refused. The library's memory
// report beside it.

#include "support/symm.h"

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"
#include "support/options.h"

namespace test {
namespace {

// A group whose pool has segments of a few MiB.
class SmallSegments : public Group {
 public:
  explicit SmallSegments(const char* bytes = "4194304")
      : Group(GroupShape().Config(), Options{{"symm_segment_bytes", bytes}}) {}
};

void* Alloc(std::size_t bytes) {
  void* data = nullptr;
  nvte_ep_ext_symm_alloc(bytes, &data, nullptr, nullptr);
  return data;
}

TEST(Symm, SubAllocationsShareSegments) {
  SmallSegments group;
  EXPECT_EQ(Usage().symm_segments, 0u);
  std::vector<std::unique_ptr<SymmBuffer>> buffers;
  for (int i = 0; i < 20; ++i) buffers.push_back(std::make_unique<SymmBuffer>(1000 * i + 1));
  EXPECT_EQ(Usage().symm_segments, 1u) << "20 allocations, one registration";
  EXPECT_EQ(Usage().symm_allocations, 20u);
  for (const auto& buffer : buffers) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 256, 0u);
    EXPECT_EQ(buffer->window(), buffers[0]->window());
    // Any address of the allocation, to its last byte.
    for (const std::size_t further : {std::size_t{0}, buffer->bytes() - 1}) {
      ncclWindow_t window = nullptr;
      std::uint64_t offset = 0;
      nvte_ep_ext_window_of(buffer->data() + further, &window, &offset);
      EXPECT_EQ(window, buffer->window());
      EXPECT_EQ(offset, buffer->offset() + further);
      EXPECT_EQ(nvte_ep_ext_is_symmetric(buffer->data() + further), 1);
    }
  }
  // Growth: what does not fit gets another segment, as large as needed.
  SymmBuffer large((5 << 20) + 1);
  const NVTEEpExtMemoryUsage usage = Usage();
  EXPECT_EQ(usage.symm_segments, 2u);
  EXPECT_EQ(usage.symm_reserved, (4u << 20) + (6u << 20));
  EXPECT_NE(large.window(), buffers[0]->window());
  EXPECT_EQ(usage.total, usage.staging + usage.routing_map + usage.workspace + usage.library + usage.symm_reserved);
  buffers.clear();
  EXPECT_EQ(Usage().symm_in_use, (5u << 20) + 256);
  EXPECT_EQ(Usage().symm_peak, usage.symm_in_use);
}

TEST(Symm, FreedMemoryIsUsedAgain) {
  SmallSegments group;
  void* const first = Alloc(1 << 20);
  void* const second = Alloc(1 << 20);
  EXPECT_EQ(nvte_ep_ext_is_symmetric(first), 1);
  nvte_ep_ext_symm_free(first);
  EXPECT_EQ(nvte_ep_ext_is_symmetric(first), 0);
  EXPECT_EQ(Alloc(1 << 19), first);
  for (int i = 0; i < 100; ++i) {
    void* const other = Alloc(3 << 19);
    nvte_ep_ext_symm_free(other);
  }
  EXPECT_EQ(Usage().symm_segments, 1u) << "no growth without need";
  nvte_ep_ext_symm_free(second);
  nvte_ep_ext_symm_free(nullptr);
}

TEST(Symm, ForeignPointersAndDoubleFrees) {
  SmallSegments group;
  void* const data = Alloc(4096);
  int on_the_stack = 0;
  DeviceBuffer<float> plain(64);
  const std::vector<std::string> parts = {"ptr", "nvte_ep_ext_symm_alloc returned, not freed since"};
  for (void* const pointer : {static_cast<void*>(&on_the_stack), static_cast<void*>(plain.data()),
                              static_cast<void*>(static_cast<char*>(data) + 256)}) {
    EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", parts, [&] { nvte_ep_ext_symm_free(pointer); }));
  }
  for (const void* const pointer : {static_cast<const void*>(&on_the_stack), static_cast<const void*>(plain.data()),
                                    static_cast<const void*>(nullptr)}) {
    EXPECT_EQ(nvte_ep_ext_is_symmetric(pointer), 0);
    EXPECT_TRUE(Throws("nvte_ep_ext_window_of", {"ptr", "nvte_ep_ext_symm_alloc or nvte_ep_ext_window_register"},
                       [&] { nvte_ep_ext_window_of(pointer, nullptr, nullptr); }));
  }
  nvte_ep_ext_symm_free(data);
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", parts, [&] { nvte_ep_ext_symm_free(data); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"bytes", "got 0"}, [] { Alloc(0); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"bytes", "2^50"}, [] { Alloc(SIZE_MAX); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"ptr", "NULL"},
                     [] { nvte_ep_ext_symm_alloc(4096, nullptr, nullptr, nullptr); }));
  nvte_ep_ext_symm_free(Alloc(4096));
}

// Nothing of it outlives the group: neither registrations nor memory.
TEST(Symm, EndsWithTheGroup) {
  const std::optional<HostStats> before = ReadHostStats();
  void* data = nullptr;
  {
    SmallSegments group;
    data = Alloc(4096);
    Alloc(8 << 20);
    if (before) {
      // Two segments, and the native engine's own.
      EXPECT_EQ(ReadHostStats()->windows_live, before->windows_live + (OnNativeEngine() ? 3 : 2));
    }
    group.Shutdown();
    if (before) {
      EXPECT_EQ(ReadHostStats()->windows_live, before->windows_live);
      EXPECT_EQ(ReadHostStats()->device_bytes_live, before->device_bytes_live);
    }
    const std::vector<std::string> parts = {"nvte_ep_initialize"};
    EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", parts, [&] { nvte_ep_ext_symm_free(data); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", parts, [] { Alloc(4096); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_window_of", parts, [&] { nvte_ep_ext_window_of(data, nullptr, nullptr); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_is_symmetric", parts, [&] { nvte_ep_ext_is_symmetric(data); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_window_register", parts, [&] { nvte_ep_ext_window_register(data, 1, nullptr); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_window_deregister", parts, [&] { nvte_ep_ext_window_deregister(data); }));
    EXPECT_TRUE(Throws("nvte_ep_ext_memory_usage", parts, [] { Usage(); }));
  }
  SmallSegments again;
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", {"ptr", "not freed since"}, [&] { nvte_ep_ext_symm_free(data); }));
  nvte_ep_ext_symm_free(Alloc(4096));
}

// Ranks that ask for other bytes, or did other things before, are told on every rank, and none of it harms the pool.
TEST(Symm, RanksThatDiffer) {
  SmallSegments group;
  const int rank = World::Get().rank();
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"all ranks must pass the same bytes: rank 1 has 8192, rank 0 has 4096"},
                     [&] { Alloc(rank == 1 ? 8192 : 4096); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"rank 1 cannot take part", "bytes", "got 0"},
                     [&] { Alloc(rank == 1 ? 0 : 4096); }));
  // More than there is, on one rank.
  if (EveryShapeIsCheap()) {
    EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", {"rank 0 cannot take part", "ncclMemAlloc"},
                       [] { Alloc(std::size_t{1} << 46); }));
  }
  void* const shared = Alloc(4096);
  if (rank == 0) nvte_ep_ext_symm_free(shared);
  EXPECT_TRUE(
      Throws("nvte_ep_ext_symm_alloc", {"nvte_ep_ext_symm_free", "same order", "rank 1 has"}, [] { Alloc(4096); }));
  if (rank != 0) nvte_ep_ext_symm_free(shared);
  nvte_ep_ext_symm_free(Alloc(4096));
}

// A framework's own memory.
TEST(Symm, RegisteredMemory) {
  SmallSegments group;
  void* data = nullptr;
  constexpr std::size_t kBytes = 2 << 20;
  TEST_NCCL(ncclMemAlloc(&data, kBytes));
  ncclWindow_t window = nullptr;
  nvte_ep_ext_window_register(data, kBytes, &window);
  EXPECT_NE(window, nullptr);
  EXPECT_EQ(Usage().registered, 1u);
  ncclWindow_t found = nullptr;
  std::uint64_t offset = 0;
  nvte_ep_ext_window_of(static_cast<char*>(data) + 12345, &found, &offset);
  EXPECT_EQ(found, window);
  EXPECT_EQ(offset, 12345u);
  EXPECT_EQ(nvte_ep_ext_is_symmetric(static_cast<char*>(data) + kBytes), 0);
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", {"ptr", "not in the pool"}, [&] { nvte_ep_ext_symm_free(data); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register", {"ptr", "not registered yet"},
                     [&] { nvte_ep_ext_window_register(data, kBytes, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register", {"ptr", "4096"},
                     [&] { nvte_ep_ext_window_register(static_cast<char*>(data) + 256, 4096, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register", {"ptr", "NULL"},
                     [] { nvte_ep_ext_window_register(nullptr, 4096, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register", {"bytes", "got 0"},
                     [&] { nvte_ep_ext_window_register(data, 0, nullptr); }));
  nvte_ep_ext_window_deregister(data);
  EXPECT_EQ(nvte_ep_ext_is_symmetric(data), 0);
  EXPECT_TRUE(Throws("nvte_ep_ext_window_deregister", {"ptr", "not deregistered since"},
                     [&] { nvte_ep_ext_window_deregister(data); }));
  // What is left registered ends with the group, and the memory stays the program's.
  nvte_ep_ext_window_register(data, kBytes, nullptr);
  group.Shutdown();
  TEST_NCCL(ncclMemFree(data));
}

// What one rank alone gets wrong is refused on all of them, and the next call works.
TEST(Symm, RegisteredByRanksThatDiffer) {
  SmallSegments group;
  constexpr std::size_t kBytes = 2 << 20;
  void *first = nullptr, *second = nullptr;
  TEST_NCCL(ncclMemAlloc(&first, kBytes));
  TEST_NCCL(ncclMemAlloc(&second, kBytes));
  const int rank = World::Get().rank();
  alignas(4096) static char pageable[4096];
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register",
                     {"rank 1 cannot take part", "ptr", "must lie in memory of the group's device"},
                     [&] { nvte_ep_ext_window_register(rank == 1 ? pageable : first, 4096, nullptr); }));
  nvte_ep_ext_window_register(first, kBytes, nullptr);
  nvte_ep_ext_window_register(second, kBytes, nullptr);
  EXPECT_TRUE(Throws("nvte_ep_ext_window_deregister", {"the same registration", "rank 1 has 2, rank 0 has 1"},
                     [&] { nvte_ep_ext_window_deregister(rank == 1 ? second : first); }));
  nvte_ep_ext_window_deregister(second);
  nvte_ep_ext_window_deregister(first);
  group.Shutdown();
  TEST_NCCL(ncclMemFree(first));
  TEST_NCCL(ncclMemFree(second));
}

// Payloads in registered memory, found by their addresses.
TEST(Symm, StepsOverRegisteredMemory) {
  GroupShape shape;
  shape.zero_copy = true;
  Group group(shape);
  Layer layer(2, 8);
  Step<float> step(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 8000), 8000);
  void* data = nullptr;
  const std::size_t bytes = step.expert_out.bytes() + (2 << 20);
  TEST_NCCL(ncclMemAlloc(&data, bytes));
  nvte_ep_ext_window_register(data, bytes / 4096 * 4096, nullptr);
  auto* const at = static_cast<std::uint8_t*>(data) + 4096 + 32;
  step.Prepare();
  step.expert_out.Upload(step.ExpertOutput());
  CopyOnDevice(at, step.expert_out.data(), step.expert_out.bytes());
  const Tensor expert_out(at, kNVTEFloat32, {step.recv_rows(), step.hidden()});
  CombineArgs args = step.combine_args();
  args.expert_out = expert_out.get();
  nvte_ep_ext_window_of(at, &args.expert_out_win.window, &args.expert_out_win.offset);
  args.Call();
  step.CheckCombined();
  nvte_ep_ext_window_deregister(data);
  TEST_NCCL(ncclMemFree(data));
}

TEST(Symm, ManyRoundsLeakNothing) {
  const std::optional<HostStats> before = ReadHostStats();
  {
    SmallSegments group("1");
    for (int round = 0; round < 20; ++round) {
      SymmBuffer a(1 << 16), b(3 << 16), c(17);
      EXPECT_LE(Usage().symm_segments, 1u);
    }
    EXPECT_EQ(Usage().symm_in_use, 0u);
  }
  if (before) {
    EXPECT_EQ(ReadHostStats()->device_allocations_live, before->device_allocations_live);
  }
}

TEST(MemoryUsage, OfAGroupAndItsLayers) {
  for (const bool zero_copy : {false, true}) {
    GroupShape shape;
    shape.hidden = 512;
    shape.dtype = kNVTEBFloat16;
    shape.zero_copy = zero_copy;
    Group group(shape);
    const std::uint64_t ranks = Ranks(), rows = group.config().max_recv_tokens_per_rank, experts = Experts(group);
    const auto part = [](std::uint64_t bytes) { return (bytes + 255) / 256 * 256; };
    // Rows out and in, weights out and in, scales.
    const std::uint64_t staged = zero_copy ? 0 : 2 * part(ranks * 64 * 1024);
    const std::uint64_t staging = staged + 2 * part(rows * experts * 4) + part(rows * 1024);
    NVTEEpExtMemoryUsage usage = Usage();
    if (OnNativeEngine()) {
      // docs/native_engine.md
      const std::uint64_t blocks = MaxSms() > 0 ? MaxSms() : 32, top_k = std::min<std::uint64_t>(64, experts);
      EXPECT_EQ(usage.routing_map, part(6 * blocks * ranks * 4) + 2 * ranks * part(16 + 64 * top_k * 2));
      EXPECT_EQ(usage.workspace,
                part(ranks * 8) + part((blocks * 8 + 1) * 4) + part(blocks * (experts + ranks + 1) * 4));
      // Windows of 12 tokens a block, and of 24 a block and rank, which do not grow with the rows.
      const auto window = [&](std::uint64_t tokens) {
        return part(blocks * tokens * 1024) + part(blocks * tokens * ((top_k + 3) / 4 * 16));
      };
      if (ranks <= 8) {
        EXPECT_EQ(usage.staging, window(12) + window(24 * ranks));
      }
    } else {
      EXPECT_EQ(usage.staging, (staging + (2 << 20) - 1) >> 21 << 21);
      EXPECT_EQ(usage.routing_map, part(ranks * 64 * ((experts + 7) / 8)));
      EXPECT_EQ(usage.workspace, 32u << 20);
    }
    EXPECT_EQ(usage.handles, 0u) << "no layer was prepared";
    Layer first(2, 1), second(1, 1);
    Step<BFloat16>(group, first, RoundRobin(EvenRows(5), 2, Experts(group)), 8100).Prepare();
    Step<BFloat16>(group, second, RoundRobin(EvenRows(5), 1, Experts(group)), 8101).Prepare();
    usage = Usage();
    EXPECT_EQ(usage.handles, 2u);
    EXPECT_EQ(usage.handle_memory, first.memory().size() + second.memory().size());
  }
}

// A caller with an older, shorter structure gets what it knows; a size that cannot be is refused.
TEST(MemoryUsage, StructureSizes) {
  Group group{GroupShape()};
  NVTEEpExtMemoryUsage usage = {};
  EXPECT_TRUE(
      Throws("nvte_ep_ext_memory_usage", {"usage->struct_size", "got 0"}, [&] { nvte_ep_ext_memory_usage(&usage); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_memory_usage", {"usage", "NULL"}, [] { nvte_ep_ext_memory_usage(nullptr); }));
  struct {
    NVTEEpExtMemoryUsage known;
    std::uint64_t later[4];
  } newer = {};
  newer.known.struct_size = sizeof newer;
  newer.later[0] = 77;
  nvte_ep_ext_memory_usage(&newer.known);
  EXPECT_EQ(newer.known.struct_size, sizeof newer);
  EXPECT_EQ(newer.known.workspace, Usage().workspace);
  EXPECT_GT(newer.known.workspace, 0u);
  EXPECT_EQ(newer.later[0], 77u);
}

// Thread-local mode, an enumerator in CUDA's header and a number in the host runtime's.
template <typename Mode>
cudaError_t BeginCapture(cudaError_t (*begin)(cudaStream_t, Mode), cudaStream_t stream) {
  return begin(stream, static_cast<Mode>(1));
}

TEST(RecvTotals, MemoryWithoutARouting) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  NVTEEpExtRecvTotals totals = {};
  totals.struct_size = sizeof totals;
  cudaStream_t stream = World::Get().stream();
  EXPECT_TRUE(Throws("nvte_ep_ext_recv_totals", {"handle_mem", "nvte_ep_prepare"},
                     [&] { nvte_ep_ext_recv_totals(HandleMemory(layer.handle()), &totals, stream); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_recv_totals", {"handle_mem", "null tensor"},
                     [&] { nvte_ep_ext_recv_totals(nullptr, &totals, stream); }));
  Step<float> step(group, layer, RoundRobin(EvenRows(9), 2, Experts(group)), 8200);
  step.Prepare();
  step.CheckCounts();
  EXPECT_TRUE(Throws("nvte_ep_ext_recv_totals", {"totals", "NULL"},
                     [&] { nvte_ep_ext_recv_totals(HandleMemory(layer.handle()), nullptr, stream); }));
  cudaGraph_t graph = nullptr;
  TEST_CUDA(BeginCapture(cudaStreamBeginCapture, stream));
  EXPECT_TRUE(Throws("nvte_ep_ext_recv_totals", {"captures a graph"},
                     [&] { nvte_ep_ext_recv_totals(HandleMemory(layer.handle()), &totals, stream); }));
  TEST_CUDA(cudaStreamEndCapture(stream, &graph));
  TEST_CUDA(cudaGraphDestroy(graph));
  step.ForwardAndBackward();
}

}  // namespace
}  // namespace test
