// Layers, their handles and the memory behind them, over several steps.

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {
namespace {

// The size depends on the configuration alone, so that a framework can ask once.
TEST(Handles, SameConfigurationSameSize) {
  Group group{GroupShape()};
  EXPECT_EQ(Register(2, 0).bytes, Register(2, 0).bytes);
}

TEST(Handles, LayersOfDifferentTopKAndAlignmentTakeTurns) {
  GroupShape shape;
  shape.top_k = 8;
  shape.alignment = 128;
  Group group(shape);
  Layer narrow(2, 0);
  Layer wide(8, 128);
  for (int turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Step<BFloat16> a(group, narrow, RandomRouting(UnevenRows(10 + turn), 2, Experts(group), 2000 + turn), 2000 + turn);
    Step<BFloat16> b(group, wide, RandomRouting(UnevenRows(30 + turn), 8, Experts(group), 2010 + turn), 2010 + turn);
    a.Prepare();
    b.Prepare();
    a.CheckCounts();
    b.CheckCounts();
    b.Dispatch();
    a.Dispatch();
    a.CheckReceived();
    b.CheckReceived();
    a.Combine();
    b.Combine();
    b.CheckCombined();
    a.CheckCombined();
    b.Backward();
    a.Backward();
  }
}

// Both mean no padding.
TEST(Handles, AlignmentsZeroAndOneAreTheSame) {
  Group group{GroupShape()};
  Layer zero(2, 0);
  Step<BFloat16> step(group, zero, RandomRouting(UnevenRows(9), 2, Experts(group), 2050), 2050);
  PrepareArgs args = step.prepare_args();
  args.alignment = 1;
  args.Call();
  step.CheckCounts();
  step.Dispatch();
  step.CheckReceived();
}

TEST(Handles, StatisticsNameTheLibraries) {
  Group group{GroupShape()};
  NVTEEpExtStats stats = {};
  stats.struct_size = sizeof stats;
  nvte_ep_ext_stats(&stats);
  ASSERT_NE(stats.nccl_path, nullptr);
  EXPECT_TRUE(std::filesystem::exists(stats.nccl_path)) << stats.nccl_path;
  EXPECT_GE(stats.nccl_version, 23000u);
  EXPECT_EQ(stats.nccl_ep_path == nullptr, OnNativeEngine());
  EXPECT_EQ(stats.nccl_ep_version == 0, OnNativeEngine());
  // A program that was compiled before there were handles_bound and what follows.
  NVTEEpExtStats older = {};
  older.struct_size = offsetof(NVTEEpExtStats, handles_bound);
  nvte_ep_ext_stats(&older);
  EXPECT_EQ(older.engine, stats.engine);
  EXPECT_EQ(older.nccl_path, nullptr);
}

// One handle takes every token count in turn: it is made once and rebound at every prepare.
TEST(Handles, LadderOfTokenCountsOnOneHandle) {
  const std::optional<HostStats> before = ReadHostStats();
  Group group{GroupShape()};
  Layer layer(2, 8);
  std::vector<int> ladder = {0, 1, 2, 3, 7, 16, 31, 63, 64};
  std::shuffle(ladder.begin(), ladder.end(), std::mt19937(9));
  for (std::size_t i = 0; i < ladder.size(); ++i) {
    SCOPED_TRACE(std::to_string(ladder[i]) + " tokens");
    // Ranks climb it from different places.
    std::vector<int> rows;
    for (int rank = 0; rank < Ranks(); ++rank) rows.push_back(ladder[(i + rank) % ladder.size()]);
    Step<BFloat16>(group, layer, RandomRouting(rows, 2, Experts(group), 2100 + i), 2100 + i).ForwardAndBackward();
  }
  const std::optional<HostStats> stepped = ReadHostStats();
  group.Shutdown();
  const std::optional<HostStats> after = ReadHostStats();
  // The counters are of NCCL EP's functions.
  if (!before || !stepped || !after || OnNativeEngine()) return;
  EXPECT_EQ(stepped->groups_created - before->groups_created, 1u);
  EXPECT_EQ(stepped->handles_created - before->handles_created, 1u);
  EXPECT_EQ(stepped->handles_destroyed, before->handles_destroyed);
  EXPECT_EQ(stepped->updates - before->updates, ladder.size());
  // dispatch and combine_bwd are dispatches, combine and dispatch_bwd are combines.
  EXPECT_EQ(stepped->dispatches - before->dispatches, 2 * ladder.size());
  EXPECT_EQ(stepped->combines - before->combines, 2 * ladder.size());
  EXPECT_EQ(after->handles_destroyed - before->handles_destroyed, 1u);
  EXPECT_EQ(after->groups_destroyed - before->groups_destroyed, 1u);
}

// A step with fewer tokens must not see rows of the step before.
TEST(Handles, FewerTokensLeaveNoGhosts) {
  GroupShape shape;
  shape.max_tokens = 4;
  Group group(shape);
  Layer layer(1, 1);
  const int experts = Experts(group);
  // First step: every rank covers as many experts as it has tokens.
  Step<BFloat16> full(group, layer,
                      MakeRouting(EvenRows(4), 1, [=](int rank, int row, int) { return (4 * rank + row) % experts; }),
                      2200);
  full.ForwardAndBackward();
  // Second step: one token a rank, all for expert 0.
  Step<BFloat16> sparse(group, layer, MakeRouting(EvenRows(1), 1, [](int, int, int) { return 0; }), 2201);
  sparse.Forward();
  const std::vector<std::int32_t> counts = sparse.counts.Download();
  for (int local = 0; local < group.local_experts(); ++local) {
    EXPECT_EQ(counts[local], World::Get().rank() == 0 && local == 0 ? Ranks() : 0) << "expert " << local;
  }
  sparse.Backward();
  // Third: no token at all.
  Step<BFloat16>(group, layer, RoundRobin(EvenRows(0), 1, experts), 2202).ForwardAndBackward();
}

// Four micro-batches in flight, their calls interleaved at random, alike on every rank.
TEST(Handles, RandomInterleavingsOfFourHandles) {
  GroupShape shape;
  shape.max_tokens = 16;
  Group group(shape);
  std::vector<std::unique_ptr<Layer>> layers;
  for (int i = 0; i < 4; ++i) layers.push_back(std::make_unique<Layer>(2, std::size_t{1} << i));
  std::mt19937 random(23);
  for (int round = 0; round < 6; ++round) {
    std::vector<std::unique_ptr<Step<BFloat16>>> steps;
    for (int i = 0; i < 4; ++i) {
      const int seed = 2300 + 10 * round + i;
      steps.push_back(std::make_unique<Step<BFloat16>>(
          group, *layers[i], RandomRouting(UnevenRows(4 + 3 * i), 2, Experts(group), seed), seed));
    }
    int done[4] = {};
    while (std::count(std::begin(done), std::end(done), 5) < 4) {
      const int i = static_cast<int>(random() % 4);
      switch (done[i]) {
        case 0:
          steps[i]->Prepare();
          break;
        case 1:
          steps[i]->Dispatch();
          break;
        case 2:
          steps[i]->Combine();
          break;
        case 3:
          steps[i]->CombineBwd();
          break;
        case 4:
          steps[i]->DispatchBwd();
          break;
        default:
          continue;
      }
      ++done[i];
    }
    for (int i = 0; i < 4; ++i) {
      SCOPED_TRACE("round " + std::to_string(round) + " handle " + std::to_string(i));
      steps[i]->CheckCounts();
      steps[i]->CheckReceived();
      steps[i]->CheckCombined();
      steps[i]->CheckCombineBwd();
      steps[i]->CheckDispatchBwd();
    }
  }
}

TEST(Handles, MemoryMayBeLargerThanReported) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  DeviceBuffer<std::uint8_t> memory(layer.memory().size() + 4096);
  const Tensor mem = memory.View({memory.size()});
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 2400), 2400);
  step.UseHandle(layer.HandleOver(mem));
  step.ForwardAndBackward();
  EXPECT_TRUE(memory.GuardIntact());
}

// The library stays inside the memory that it asked for.
TEST(Handles, NothingIsWrittenBehindTheMemory) {
  GroupShape shape;
  shape.top_k = 8;
  shape.alignment = 128;
  Group group(shape);
  for (const int top_k : {1, 2, 8}) {
    Layer layer(top_k, 128);
    Step<BFloat16>(group, layer, RandomRouting(EvenRows(64), top_k, Experts(group), 2410), 2410).ForwardAndBackward();
    EXPECT_TRUE(layer.memory().GuardIntact()) << "top_k " << top_k;
  }
}

TEST(Handles, MovedMemoryIsFollowedWhereAllowed) {
  GroupShape shape;
  shape.alignment = 8;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 8);
  Step<BFloat16>(group, layer, RandomRouting(UnevenRows(12), 2, Experts(group), 2510), 2510).ForwardAndBackward();

  // A step that prepares on the new memory.
  DeviceBuffer<std::uint8_t> second(layer.memory().size());
  const Tensor second_mem = second.View({second.size()});
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(31), 2, Experts(group), 2511), 2511);
  step.UseHandle(layer.HandleOver(second_mem));
  step.Prepare();
  step.CheckCounts();

  // The prepared routing is copied to a third place, as a framework does that rematerialises buffers; the rest of the
  // step runs there.
  DeviceBuffer<std::uint8_t> third(second.Download());
  const Tensor third_mem = third.View({third.size()});
  second.Clear();
  step.UseHandle(layer.HandleOver(third_mem));
  step.Dispatch();
  step.CheckReceived();
  step.Combine();
  step.CheckCombined();
  step.Backward();
  EXPECT_TRUE(second.GuardIntact());
  EXPECT_TRUE(third.GuardIntact());
  // Of the three places one was opened over a routing.
  NVTEEpExtStats stats = {};
  stats.struct_size = sizeof stats;
  nvte_ep_ext_stats(&stats);
  EXPECT_EQ(stats.handles_opened, 3u);
  EXPECT_EQ(stats.handles_opened - stats.handles_closed, stats.handles_bound);
  EXPECT_EQ(stats.handles_rebuilt, 1u);

  // And back to the memory of the beginning.
  Step<BFloat16>(group, layer, RandomRouting(UnevenRows(5), 2, Experts(group), 2512), 2512).ForwardAndBackward();
}

// A microbatch's routing is put aside while another uses the layer's memory, and brought back for its backward.
TEST(Handles, BytesThatComeBackAreFollowedWhereAllowed) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16> first(group, layer, RandomRouting(EvenRows(12), 2, Experts(group), 2515), 2515);
  Step<BFloat16> second(group, layer, RandomRouting(EvenRows(31), 2, Experts(group), 2516), 2516);
  first.Forward();
  const std::vector<std::uint8_t> aside = layer.memory().Download();
  second.Forward();
  second.Backward();
  TEST_CUDA(cudaMemcpyAsync(layer.memory().data(), aside.data(), aside.size(), cudaMemcpyHostToDevice,
                            World::Get().stream()));
  first.Backward();
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"grad", "as many rows as the prepared"}, [&] { second.CombineBwd(); }));
}

// The same in eager mode with as many tokens, where the totals differ.
TEST(Handles, BytesThatComeBackInEagerMode) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  shape.eager = true;
  Group group(shape);
  Layer layer(2, 1);
  const auto to_rank = [&](int target, std::uint64_t seed) {
    return EagerStep(group, layer, ToRank(target, EvenRows(9), group.local_experts()), seed);
  };
  const auto first = to_rank(0, 2517), second = to_rank(Ranks() - 1, 2518);
  first->Forward();
  const std::vector<std::uint8_t> aside = layer.memory().Download();
  second->Forward();
  second->Backward();
  TEST_CUDA(cudaMemcpyAsync(layer.memory().data(), aside.data(), aside.size(), cudaMemcpyHostToDevice,
                            World::Get().stream()));
  if (World::Get().rank() == 0) {
    CombineBwdArgs wrong = first->combine_bwd_args();
    const Tensor two_rows(first->grad_expert_out.data(), kNVTEBFloat16, {2, first->hidden()});
    wrong.grad_expert_out = two_rows.get();
    EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"grad_expert_out", "at least the rows", std::to_string(18 * Ranks())},
                       [&] { wrong.Call(); }));
  }
  first->Backward();
}

// Memory that does not hold what was prepared is told from memory that its bytes were moved to.
TEST(Handles, FreshMemoryIsNotPrepared) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(12), 2, Experts(group), 2525), 2525);
  step.Forward();
  for (const int byte : {0x00, 0xCB, 0xFF}) {
    DeviceBuffer<std::uint8_t> fresh(std::vector<std::uint8_t>(layer.memory().size(), static_cast<std::uint8_t>(byte)));
    const Tensor mem = fresh.View({fresh.size()});
    step.UseHandle(layer.HandleOver(mem));
    EXPECT_TRUE(Throws("nvte_ep_dispatch", {"was not prepared", "layers must not share handle memory"},
                       [&] { step.Dispatch(); }));
    EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", {"was not prepared"}, [&] { step.DispatchBwd(); }));
  }
  step.UseHandle(layer.handle());
  step.Backward();
}

// NCCL EP reads the indices of memory that it opens again as int64, so those of 32 bits are kept as that.
TEST(Handles, MovedMemoryOf32BitIndices) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16, std::int32_t> step(group, layer, RandomRouting(UnevenRows(12), 2, Experts(group), 2530), 2530);
  step.Prepare();
  DeviceBuffer<std::uint8_t> elsewhere(layer.memory().Download());
  const Tensor mem = elsewhere.View({elsewhere.size()});
  step.UseHandle(layer.HandleOver(mem));
  TEST_CUDA(cudaMemset(layer.memory().data(), kUnwritten, layer.memory().size()));
  step.Dispatch();
  step.CheckReceived();
  step.Combine();
  step.CheckCombined();
  step.Backward();
}

}  // namespace
}  // namespace test
