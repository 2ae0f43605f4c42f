// The group's life: initialize, shutdown, and other users of the same communicator and stream.

#include <dirent.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"
#include "support/symm.h"

namespace test {
namespace {

void RunStep(const Group& group, std::uint64_t seed) {
  Layer layer(2, 1);
  Step<BFloat16>(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), seed), seed).ForwardAndBackward();
}

TEST(Lifecycle, AgainWithAnotherConfiguration) {
  {
    Group group{GroupShape()};
    RunStep(group, 3000);
  }
  GroupShape other;
  other.experts_per_rank = 8;
  other.max_tokens = 32;
  other.hidden = 128;
  other.dtype = kNVTEBFloat16;
  {
    Group group(other);
    RunStep(group, 3001);
  }
  Group group{GroupShape()};
  RunStep(group, 3002);
}

TEST(Lifecycle, ShutdownTwice) {
  Group group{GroupShape()};
  RunStep(group, 3010);
  group.Shutdown();
  EXPECT_NO_THROW(nvte_ep_shutdown());
  EXPECT_NO_THROW(nvte_ep_shutdown());
}

TEST(Lifecycle, InitializeTwice) {
  Group group{GroupShape()};
  EXPECT_TRUE(
      Throws("nvte_ep_initialize", {"nvte_ep_shutdown"}, [&] { Initialize(World::Get().comm(), group.config()); }));
  RunStep(group, 3020);
}

TEST(Lifecycle, EveryCallButShutdownThrowsAfterShutdown) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 3030), 3030);
  step.Forward();
  group.Shutdown();
  const std::vector<std::string> remedy = {"nvte_ep_initialize"};
  EXPECT_TRUE(Throws("nvte_ep_prepare", remedy, [&] { step.Prepare(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch", remedy, [&] { step.Dispatch(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine", remedy, [&] { step.Combine(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", remedy, [&] { step.CombineBwd(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", remedy, [&] { step.DispatchBwd(); }));
  EXPECT_TRUE(Throws(kLayerFunction, remedy, [] { Register(2, 0); }));
  EXPECT_NO_THROW(nvte_ep_shutdown());
}

// The caller's collectives on the same communicator and stream, between all calls.
TEST(Lifecycle, CallersAllReduceBetweenTheCalls) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  cudaStream_t stream = World::Get().stream();
  DeviceBuffer<float> sums(std::vector<float>(6, 0.0f));
  int reductions = 0;
  const auto all_reduce = [&] {
    float* element = sums.data() + reductions++;
    const std::vector<float> mine(1, static_cast<float>(World::Get().rank() + reductions));
    TEST_CUDA(cudaMemcpyAsync(element, mine.data(), sizeof(float), cudaMemcpyHostToDevice, stream));
    World::Get().Wait();
    TEST_NCCL(ncclAllReduce(element, element, 1, ncclFloat32, ncclSum, World::Get().comm(), stream));
  };
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(40), 2, Experts(group), 3050), 3050);
  all_reduce();
  step.Prepare();
  all_reduce();
  step.Dispatch();
  all_reduce();
  step.Combine();
  all_reduce();
  step.CombineBwd();
  all_reduce();
  step.DispatchBwd();
  all_reduce();
  step.CheckCounts();
  step.CheckReceived();
  step.CheckCombined();
  step.CheckCombineBwd();
  step.CheckDispatchBwd();
  const std::vector<float> total = sums.Download();
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(total[i], static_cast<float>(Ranks() * (i + 1) + Ranks() * (Ranks() - 1) / 2)) << "all-reduce " << i;
  }
}

TEST(Lifecycle, WorkIsOrderedOnTheCallersStream) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  constexpr std::uint64_t kSeed = 3060;
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(33), 2, Experts(group), kSeed), kSeed);
  // Everything is enqueued before anything is awaited: combine reads what dispatch received.
  step.Prepare();
  step.Dispatch();
  TEST_CUDA(cudaMemcpyAsync(step.expert_out.data(), step.recv_tokens.data(), step.recv_tokens.bytes(),
                            cudaMemcpyDeviceToDevice, World::Get().stream()));
  step.combine_args().Call();
  step.CheckSum(step.result, "result",
                [](int, const Slot& slot, int column) { return TokenValue(kSeed, slot.rank, slot.row, column); });
}

// The calls of one step on three streams, ordered by events alone.
TEST(Lifecycle, StreamsOrderedByEvents) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(50), 2, Experts(group), 3065), 3065);
  cudaStream_t streams[3];
  cudaEvent_t done[3];
  for (int i = 0; i < 3; ++i) {
    TEST_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    TEST_CUDA(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
  }
  step.expert_out.Upload(step.ExpertOutput());
  for (int round = 0; round < 5; ++round) {
    if (round > 0) TEST_CUDA(cudaStreamWaitEvent(streams[0], done[2], 0));
    step.prepare_args().Call(streams[0]);
    TEST_CUDA(cudaEventRecord(done[0], streams[0]));
    TEST_CUDA(cudaStreamWaitEvent(streams[1], done[0], 0));
    step.dispatch_args().Call(streams[1]);
    TEST_CUDA(cudaEventRecord(done[1], streams[1]));
    TEST_CUDA(cudaStreamWaitEvent(streams[2], done[1], 0));
    step.combine_args().Call(streams[2]);
    TEST_CUDA(cudaEventRecord(done[2], streams[2]));
  }
  World::Get().Wait(streams[2]);
  step.CheckCounts();
  step.CheckReceived();
  step.CheckCombined();
  for (int i = 0; i < 3; ++i) {
    TEST_CUDA(cudaEventDestroy(done[i]));
    TEST_CUDA(cudaStreamDestroy(streams[i]));
  }
}

// A group of one rank is a group: everything stays where it is.
TEST(Lifecycle, GroupOfOneRank) {
  ncclComm_t alone = World::Get().MakeComm(1);
  if (alone != nullptr) {
    NVTEEpGroupConfig config = GroupShape().Config();
    config.ep_size = 1;
    config.num_experts = 4;
    {
      Group group(config, alone);
      Layer layer(2, 4);
      Step<BFloat16>(group, layer, RandomRouting({12}, 2, 4, 3066), 3066).ForwardAndBackward();
    }
    TEST_NCCL(ncclCommDestroy(alone));
  }
}

// The current device belongs to the calling thread; the group is found from any thread that selects its device.
TEST(Lifecycle, StepFromAnotherThread) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(18), 2, Experts(group), 3067), 3067);
  step.expert_out.Upload(step.ExpertOutput());
  int device = 0;
  TEST_CUDA(cudaGetDevice(&device));
  std::string error;
  std::thread([&] {
    try {
      TEST_CUDA(cudaSetDevice(device));
      step.Prepare();
      step.Dispatch();
      step.combine_args().Call();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }).join();
  EXPECT_EQ(error, "");
  step.CheckCounts();
  step.CheckReceived();
  step.CheckCombined();
}

TEST(Lifecycle, SubCommunicatorOfTwoRanks) {
  if (Ranks() < 4) GTEST_SKIP() << "needs 4 ranks";
  ncclComm_t pair = World::Get().MakeComm(2);
  if (pair != nullptr) {
    NVTEEpGroupConfig config = GroupShape().Config();
    config.ep_size = 2;
    config.num_experts = 8;
    {
      Group group(config, pair);
      Layer layer(2, 4);
      Step<BFloat16>(group, layer, RandomRouting({12, 5}, 2, 8, 3070), 3070).ForwardAndBackward();
    }
    TEST_NCCL(ncclCommDestroy(pair));
  }
}

TEST(Lifecycle, RepeatedGroupsLeakNothing) {
  { Group warm_up{GroupShape()}; }
  const std::optional<HostStats> before = ReadHostStats();
  for (int cycle = 0; cycle < 10; ++cycle) {
    Group group{GroupShape()};
    RunStep(group, 3080 + cycle);
  }
  const std::optional<HostStats> after = ReadHostStats();
  if (!before || !after) GTEST_SKIP() << "the counters are the host runtime's";
  const std::uint64_t nccl_ep_groups = OnNativeEngine() ? 0 : 10;
  EXPECT_EQ(after->groups_created - before->groups_created, nccl_ep_groups);
  EXPECT_EQ(after->groups_destroyed - before->groups_destroyed, nccl_ep_groups);
  EXPECT_EQ(after->handles_created - before->handles_created, after->handles_destroyed - before->handles_destroyed);
  EXPECT_EQ(after->device_bytes_live, before->device_bytes_live);
  EXPECT_EQ(after->device_allocations_live, before->device_allocations_live);
  EXPECT_EQ(after->windows_live, before->windows_live);
  EXPECT_EQ(after->streams_live, before->streams_live);
  EXPECT_EQ(after->comms_created, before->comms_created);
}

// After a first step nothing is allocated any more: the counts of live memory stay.
TEST(Lifecycle, StepsAllocateNoDeviceMemory) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(40), 2, Experts(group), 3090), 3090);
  step.ForwardAndBackward();
  const std::optional<HostStats> before = ReadHostStats();
  for (int i = 0; i < 5; ++i) step.ForwardAndBackward();
  const std::optional<HostStats> after = ReadHostStats();
  if (!before || !after) GTEST_SKIP() << "the counters are the host runtime's";
  EXPECT_EQ(after->device_bytes_live, before->device_bytes_live);
  EXPECT_EQ(after->device_allocations_live, before->device_allocations_live);
  EXPECT_EQ(after->streams_live, before->streams_live);
}

// Another width, and windows where there were none.
TEST(Lifecycle, AgainWithZeroCopy) {
  for (int round = 0; round < 2; ++round) {
    {
      GroupShape shape;
      shape.hidden = EveryShapeIsCheap() ? 512 : 256;
      shape.max_tokens = 16;
      Group group(shape);
      Layer layer(2, 8);
      Step<float>(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 3100), 3100).ForwardAndBackward();
    }
    GroupShape shape;
    shape.hidden = EveryShapeIsCheap() ? 1024 : 256;
    shape.max_tokens = 16;
    shape.zero_copy = true;
    Group group(shape);
    Layer layer(2, 8);
    Step<float> step(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 3101), 3101);
    PlacedStep<float>(step, kExchanged, true, 16).ForwardAndBackward();
  }
}

// A layer, its memory and its id of an earlier group are nothing to a later one, whatever the later one is like.
TEST(Lifecycle, LayersOfAnEarlierGroup) {
  auto group = std::make_unique<Group>(GroupShape());
  Layer layer(2, 1);
  Step<BFloat16> step(*group, layer, RandomRouting(UnevenRows(9), 2, Experts(*group), 3110), 3110);
  step.Forward();
  for (const bool reloc : {false, true}) {
    group.reset();
    GroupShape shape;
    shape.allow_handle_mem_reloc = reloc ? 1 : 0;
    group = std::make_unique<Group>(shape);
    EXPECT_TRUE(
        Throws("nvte_ep_dispatch", {kHandleMem[6] == '_' ? "nvte_ep_prepare" : "handle.id"}, [&] { step.Dispatch(); }));
    // Nor through a layer of the new group over the old memory.
    const Layer fresh(2, 1);
    Step<BFloat16> other(*group, fresh, RandomRouting(UnevenRows(9), 2, Experts(*group), 3111), 3111);
    const Tensor old = layer.memory().View({layer.memory().size()});
    other.UseHandle(fresh.HandleOver(old));
    EXPECT_TRUE(Throws("nvte_ep_dispatch", {"nvte_ep_prepare"}, [&] { other.Dispatch(); }));
    EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", {"nvte_ep_prepare"}, [&] { other.DispatchBwd(); }));
    other.ForwardAndBackward();
  }
}

// A communicator that was destroyed. NCCL does not recognise one, so this is for the host runtime.
TEST(Lifecycle, DestroyedCommunicator) {
  if (!ReadHostStats()) GTEST_SKIP() << "NCCL does not recognise a communicator that is gone";
  ncclComm_t gone = World::Get().MakeComm(Ranks());
  TEST_NCCL(ncclCommDestroy(gone));
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"communicator"}, [&] { Initialize(gone, GroupShape().Config()); }));
  Group group{GroupShape()};
  RunStep(group, 3120);
}

// The program's own window is the first thing of all on a communicator, and the group's first step the next.
TEST(Lifecycle, WindowBeforeAnythingElse) {
  ncclComm_t comm = World::Get().MakeComm(Ranks());
  constexpr std::size_t kBytes = 4 << 20;
  void* data = nullptr;
  ncclWindow_t window = nullptr;
  TEST_NCCL(ncclMemAlloc(&data, kBytes));
  TEST_NCCL(ncclCommWindowRegister(comm, data, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC));
  {
    GroupShape shape;
    shape.max_tokens = 16;
    shape.zero_copy = true;
    Group group(shape.Config(), comm);
    Layer layer(2, 8);
    Step<float> step(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 3130), 3130);
    ASSERT_LE(step.recv_tokens.bytes(), kBytes);
    CopyOnDevice(data, step.recv_tokens.data(), step.recv_tokens.bytes());
    DispatchArgs args = step.dispatch_args();
    const Tensor recv(data, kNVTEFloat32, {step.recv_rows(), step.hidden()});
    args.recv_tokens = recv.get();
    args.recv_tokens_win = MakeWindow(window, 0);
    step.Prepare();
    args.Call();
    CopyOnDevice(step.recv_tokens.data(), data, step.recv_tokens.bytes());
    const std::vector<float> received = step.recv_tokens.Download();
    for (std::size_t s = 0; s < step.slots().size(); ++s) {
      const Slot& slot = step.slots()[s];
      for (std::size_t column = 0; column < step.hidden(); ++column) {
        const float value = slot.padding() ? 0.0f : TokenValue(3130, slot.rank, slot.row, static_cast<int>(column));
        ASSERT_EQ(received[s * step.hidden() + column], value) << "row " << s << " column " << column;
      }
    }
  }
  TEST_NCCL(ncclCommWindowDeregister(comm, window));
  TEST_NCCL(ncclMemFree(data));
  TEST_NCCL(ncclCommDestroy(comm));
}

int OpenFiles() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// A framework that makes its group anew each time: no cycle costs more than the ones before, nor keeps a file open.
TEST(Lifecycle, ManyGroupsInTurn) {
  const int cycles = ReadHostStats() ? 100 : 8;
  GroupShape shape;
  shape.max_tokens = 8;
  const auto cycle = [&] { Group group(shape); };
  const auto time = [&](int count) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) cycle();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  time(cycles / 4);
  const int files = OpenFiles();
  const double first = time(cycles / 4);
  time(cycles / 4);
  const double last = time(cycles / 4);
  EXPECT_LE(OpenFiles(), files);
  // Machines are busy; what grows with every cycle would be many times as long.
  EXPECT_LT(last, 10 * first + 1.0);
}

// The library queues no collective of the program's kind on its communicator during steps: ranks of different token
// counts meet in the program's own collectives only.
TEST(Lifecycle, NoCollectivesOfItsOwn) {
  GroupShape shape;
  shape.max_tokens = 129;
  Group group(shape);
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(129), 2, Experts(group), 3140), 3140);
  step.ForwardAndBackward();
  const std::optional<HostStats> before = ReadHostStats();
  for (int i = 0; i < 3; ++i) step.ForwardAndBackward();
  const std::optional<HostStats> after = ReadHostStats();
  if (!before || !after) GTEST_SKIP() << "the counters are the host runtime's";
  EXPECT_EQ(after->collectives, before->collectives);
}

}  // namespace
}  // namespace test
