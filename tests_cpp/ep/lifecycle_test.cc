// The group's life: initialize, shutdown, and other users of the same communicator and stream.

#include <gtest/gtest.h>

#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

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
  EXPECT_EQ(after->groups_created - before->groups_created, 10u);
  EXPECT_EQ(after->groups_destroyed - before->groups_destroyed, 10u);
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

}  // namespace
}  // namespace test
