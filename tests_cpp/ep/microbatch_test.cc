// Several micro-batches in flight over one group, many times over: their handles share the group's buffers.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ep/graph.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {
namespace {

using SmallStep = Step<BFloat16>;

// As often as a GPU does it in a moment; less often on the host runtime.
int Times(int on_a_gpu, int on_the_host) { return EveryShapeIsCheap() ? on_the_host : on_a_gpu; }

GroupShape Small() {
  GroupShape shape;
  shape.max_tokens = 8;
  shape.alignment = 8;
  return shape;
}

// `count` layers and a step of each, with its inputs in place.
struct Batches {
  Batches(const Group& group, int count, std::uint64_t seed) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(std::make_unique<Layer>(2, std::size_t{1} << i % 4));
      steps.push_back(std::make_unique<SmallStep>(
          group, *layers[i],
          RandomRouting(i % 2 == 0 ? UnevenRows(8) : EvenRows(3 + i % 5), 2, Experts(group), seed + i), seed + i));
      UploadInputs(*steps[i]);
    }
  }
  SmallStep& operator[](int i) { return *steps[i]; }
  void Clear() {
    for (auto& step : steps) ClearOutputs(*step);
  }
  void CheckForward() {
    for (std::size_t i = 0; i < steps.size(); ++i) {
      SCOPED_TRACE("micro-batch " + std::to_string(i));
      steps[i]->CheckCounts();
      steps[i]->CheckReceived();
      steps[i]->CheckCombined();
    }
  }

  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<SmallStep>> steps;
};

// A pipeline's order: both forward, and back in reverse, without a wait.
TEST(Microbatches, TwoInTurnWithoutAWait) {
  Group group(Small());
  Batches batches(group, 2, 9000);
  const int repeats = Times(1000, 150);
  for (int i = 0; i < repeats; ++i) {
    if (i == repeats - 1) batches.Clear();
    batches[0].Prepare();
    batches[1].Prepare();
    batches[0].Dispatch();
    batches[1].Dispatch();
    batches[1].combine_args().Call();
    batches[0].combine_args().Call();
  }
  batches.CheckForward();
}

// Any order of the calls of four, again and again over the same handles, values looked at every few rounds.
TEST(Microbatches, RandomOrdersOfFour) {
  Group group(Small());
  Batches batches(group, 4, 9010);
  std::mt19937 random(9011);
  const int rounds = Times(400, 40);
  for (int round = 0; round < rounds; ++round) {
    const bool look = round % 10 == 9;
    if (look) batches.Clear();
    int done[4] = {};
    for (int calls = 0; calls < 20;) {
      const int i = static_cast<int>(random() % 4);
      if (done[i] == 5) continue;
      SmallStep& step = batches[i];
      switch (done[i]++) {
        case 0:
          step.Prepare();
          break;
        case 1:
          step.Dispatch();
          break;
        case 2:
          step.combine_args().Call();
          break;
        case 3:
          step.CombineBwd();
          break;
        default:
          step.dispatch_bwd_args().Call();
          break;
      }
      ++calls;
    }
    if (!look) continue;
    SCOPED_TRACE("round " + std::to_string(round));
    for (auto& step : batches.steps) CheckAll(*step);
  }
}

void FiveMilliseconds(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

// Two operations of one direction in a row, while the ranks take turns in being late: the second may not overwrite what
// a peer still reads of the first.
TEST(Microbatches, SameDirectionTwiceWithALateRank) {
  Group group(Small());
  Batches batches(group, 2, 9020);
  batches[0].Prepare();
  batches[1].Prepare();
  const int repeats = Times(2000, 120);
  for (int i = 0; i < repeats; ++i) {
    const bool look = i % (repeats / 4) == repeats / 4 - 1;
    if (look) {
      for (auto& step : batches.steps) {
        step->recv_tokens.Clear();
        step->recv_weights.Clear();
        step->result.Clear();
      }
    }
    const auto late = [&](int where) {
      if (i % 20 < 4 && i % 4 == where && World::Get().rank() == i / 20 % Ranks()) {
        TEST_CUDA(cudaLaunchHostFunc(World::Get().stream(), FiveMilliseconds, nullptr));
      }
    };
    late(0);
    batches[0].Dispatch();
    late(1);
    batches[1].Dispatch();
    late(2);
    batches[0].combine_args().Call();
    late(3);
    batches[1].combine_args().Call();
    if (look) {
      SCOPED_TRACE("repeat " + std::to_string(i));
      batches.CheckForward();
    }
  }
}

// A batch split so that one part has a token and the other none.
TEST(Microbatches, OneTokenAndNone) {
  Group group(Small());
  Layer first(2, 8), second(2, 8);
  for (const int with_the_token : {0, 1}) {
    std::vector<int> one(Ranks(), 0), none(Ranks(), 0);
    (with_the_token == 0 ? one : none) = EvenRows(1);
    SmallStep a(group, first, RandomRouting(one, 2, Experts(group), 9030), 9030);
    SmallStep b(group, second, RandomRouting(none, 2, Experts(group), 9031), 9031);
    UploadInputs(a);
    UploadInputs(b);
    a.Prepare();
    b.Prepare();
    a.Dispatch();
    b.Dispatch();
    a.combine_args().Call();
    b.combine_args().Call();
    b.CombineBwd();
    a.CombineBwd();
    b.dispatch_bwd_args().Call();
    a.dispatch_bwd_args().Call();
    CheckAll(a);
    CheckAll(b);
  }
  // Of two ranks one has the token, the others nothing at all.
  std::vector<int> alone(Ranks(), 0);
  alone.back() = 1;
  SmallStep(group, first, RandomRouting(alone, 2, Experts(group), 9032), 9032).ForwardAndBackward();
}

// The mistake of pipeline schedules: the next micro-batch is prepared in the handle of one that is not combined yet.
TEST(Microbatches, PreparedAgainBeforeCombine) {
  Group group(Small());
  Layer layer(2, 8);
  SmallStep first(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), 9035), 9035);
  SmallStep next(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), 9036), 9036);
  first.Prepare();
  first.Dispatch();
  next.Prepare();
  next.Prepare();
  EXPECT_TRUE(Throws("nvte_ep_combine", {"was prepared again after nvte_ep_dispatch", "a handle of its own"},
                     [&] { first.Combine(); }));
  // The next one is as good as ever.
  next.Dispatch();
  next.CheckReceived();
  next.Combine();
  next.CheckCombined();
  next.Backward();
}

// Gradients go by the last prepare, whatever the forward pass went by: the library cannot tell a mistake from a
// recomputation.
TEST(Microbatches, PreparedAgainBeforeTheGradients) {
  Group group(Small());
  Layer layer(2, 8);
  SmallStep first(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), 9038), 9038);
  SmallStep next(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), 9039), 9039);
  first.Forward();
  next.Prepare();
  next.Backward();
  // Between the two gradients, too.
  first.Forward();
  first.CombineBwd();
  next.Prepare();
  next.DispatchBwd();
  next.CheckDispatchBwd();
}

// What a framework does that computes a forward step again: all of it, or the routing alone.
TEST(Microbatches, RecomputedSteps) {
  Group group(Small());
  Layer layer(2, 8);
  SmallStep step(group, layer, RandomRouting(EvenRows(6), 2, Experts(group), 9037), 9037);
  step.Forward();
  step.Prepare();
  step.Dispatch();
  step.CheckReceived();
  step.Backward();
  step.Prepare();
  step.Dispatch();
  step.Prepare();
  step.Dispatch();
  step.CheckReceived();
  step.Combine();
  step.CheckCombined();
  step.Combine();
  step.CheckCombined();
  step.Prepare();
  step.Backward();
  step.Dispatch();
  step.Prepare();
  step.DispatchBwd();
  step.CheckDispatchBwd();
}

// What a micro-batch in flight costs is its handle memory, and an address that comes back serves another layer.
TEST(Microbatches, SixtyFourInFlight) {
  GroupShape shape = Small();
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  { Batches warm_up(group, 1, 9040); }
  constexpr int kInFlight = 64;
  std::vector<std::unique_ptr<Layer>> layers;
  for (int i = 0; i < kInFlight; ++i) layers.push_back(std::make_unique<Layer>(i % 2 + 1, std::size_t{1} << i % 4));
  const auto routing = [&](int i) { return RandomRouting(EvenRows(1 + i % 8), i % 2 + 1, Experts(group), 9041 + i); };
  std::vector<std::unique_ptr<SmallStep>> steps;
  for (int i = 0; i < kInFlight; ++i) {
    steps.push_back(std::make_unique<SmallStep>(group, *layers[i], routing(i), 9041 + i));
  }
  const std::optional<HostStats> before = ReadHostStats();
  for (auto& step : steps) step->Prepare();
  for (auto& step : steps) step->Dispatch();
  World::Get().Wait();
  const std::optional<HostStats> after = ReadHostStats();
  if (before && after) {
    EXPECT_EQ(after->device_bytes_live, before->device_bytes_live) << "beyond the handle memory";
  }
  for (int i = kInFlight; i-- > 0;) {
    SCOPED_TRACE("micro-batch " + std::to_string(i));
    steps[i]->CheckCounts();
    steps[i]->CheckReceived();
    if (i % 8 == 0) steps[i]->Backward();
  }
  // All memory is given back; new layers of other sizes get some of the same addresses.
  steps.clear();
  layers.clear();
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE("new layer " + std::to_string(i));
    Layer layer((i + 1) % 2 + 1, std::size_t{1} << (i + 2) % 4);
    SmallStep(group, layer, RandomRouting(EvenRows(5), (i + 1) % 2 + 1, Experts(group), 9110 + i), 9110 + i)
        .ForwardAndBackward();
  }
}

std::size_t ResidentKiB() {
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  unsigned long all = 0, resident = 0;
  const int read = std::fscanf(file, "%lu %lu", &all, &resident);
  std::fclose(file);
  return read == 2 ? resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 1024 : 0;
}

// A framework that allocates handle memory for every step. Neither the host's memory nor the device's grows.
TEST(Microbatches, HandleMemoryOfEveryStep) {
  GroupShape shape = Small();
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 8);
  SmallStep step(group, layer, RandomRouting(EvenRows(4), 2, Experts(group), 9200), 9200);
  UploadInputs(step);
  const auto run = [&](bool check) {
    DeviceBuffer<std::uint8_t> memory(layer.memory().size());
    const Tensor mem = memory.View({memory.size()});
    step.UseHandle(layer.HandleOver(mem));
    if (check) ClearOutputs(step);
    EnqueueAll(step);
    if (check) {
      CheckAll(step);
    } else {
      World::Get().Wait();
    }
  };
  const int steps = std::getenv("NVTE_EP_TEST_LARGE") != nullptr ? 20000 : Times(2000, 200);
  for (int i = 0; i < steps / 4; ++i) run(false);
  const std::size_t resident = ResidentKiB();
  const std::optional<HostStats> before = ReadHostStats();
  for (int i = 0; i < steps; ++i) run(i % (steps / 4) == 0);
  EXPECT_LT(ResidentKiB(), resident + 64 * 1024) << "KiB, after " << steps << " steps";
  const std::optional<HostStats> after = ReadHostStats();
  if (!before || !after) return;
  EXPECT_EQ(after->device_bytes_live, before->device_bytes_live);
  EXPECT_EQ(after->device_allocations_live, before->device_allocations_live);
}

}  // namespace
}  // namespace test
