// What only the register_layer ABI has: ids, registration, and the policy for moved handle memory.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <set>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"

namespace test {
namespace {

std::string Text(std::size_t value) { return std::to_string(value); }

void RunStep(const Group& group, std::uint64_t seed) {
  Layer layer(2, 1);
  Step<BFloat16>(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), seed), seed).ForwardAndBackward();
}

class RegisteredErrors : public ErrorTest {};

TEST_F(RegisteredErrors, IdZero) {
  NVTEEpHandle handle = rig().layer.handle();
  handle.id = 0;
  EveryCallRefuses(handle, {"handle.id", "got 0"});
}

TEST_F(RegisteredErrors, UnknownId) {
  NVTEEpHandle handle = rig().layer.handle();
  handle.id += 1000;
  EveryCallRefuses(handle, {"handle.id", std::to_string(handle.id)});
}

TEST_F(RegisteredErrors, AnotherAlignmentThanRegistered) {
  PrepareArgs args = step().prepare_args();
  for (const std::size_t alignment : {0, 1, 2, 8}) {
    args.alignment = alignment;
    const std::string found = alignment < 2 ? "0 or 1 (no padding)" : Text(alignment);
    Refuses("nvte_ep_prepare", {"dispatch_output_per_expert_alignment", "4, got " + found}, [&] { args.Call(); });
  }
  args.alignment = 3;
  Refuses("nvte_ep_prepare", {"dispatch_output_per_expert_alignment", "power of two", "got 3"}, [&] { args.Call(); });
}

TEST_F(RegisteredErrors, LeavesTheSizeAlone) {
  NVTEEpLayerConfig config = {};
  std::size_t bytes = 12345;
  Refuses("nvte_ep_register_layer", {"top_k", "got 0"}, [&] { nvte_ep_register_layer(config, &bytes); });
  config.top_k = 2;
  config.dispatch_output_per_expert_alignment = 3;
  Refuses("nvte_ep_register_layer", {"power of two", "got 3"}, [&] { nvte_ep_register_layer(config, &bytes); });
  EXPECT_EQ(bytes, 12345u) << "written by a refused call";
}

TEST_F(RegisteredErrors, NullSize) {
  NVTEEpLayerConfig config = {};
  config.top_k = 2;
  Refuses("nvte_ep_register_layer", {"handle_mem_size", "null"}, [&] { nvte_ep_register_layer(config, nullptr); });
}

class RegisteredGroupErrors : public GroupConfigTest {};

TEST_F(RegisteredGroupErrors, NoEagerMode) {
  Refuses([](NVTEEpGroupConfig& config) { config.max_recv_tokens_per_rank = 0; },
          {"max_recv_tokens_per_rank", "got 0"});
}

TEST_F(RegisteredGroupErrors, Flags) {
  Refuses([](NVTEEpGroupConfig& config) { config.zero_copy = 2; }, {"zero_copy", "2"});
  Refuses([](NVTEEpGroupConfig& config) { config.zero_copy = -1; }, {"zero_copy", "-1"});
  Refuses([](NVTEEpGroupConfig& config) { config.allow_handle_mem_reloc = 2; }, {"allow_handle_mem_reloc", "2"});
}

TEST(Registered, IdsAreDistinctAndNotZero) {
  Group group{GroupShape()};
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 50; ++i) {
    NVTEEpLayerConfig config = {};
    // Reserved: the group determines it, and any value is taken.
    config.num_local_experts = i - 1;
    config.top_k = 1 + i % 4;
    config.dispatch_output_per_expert_alignment = std::size_t{1} << (i % 8);
    std::size_t bytes = 0;
    const std::uint64_t id = nvte_ep_register_layer(config, &bytes);
    EXPECT_NE(id, 0u);
    EXPECT_GT(bytes, 0u);
    EXPECT_TRUE(ids.insert(id).second) << "id " << id << " twice";
  }
}

TEST(Registered, MovedMemoryIsRefusedByDefault) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  const std::vector<int> rows = UnevenRows(12);
  Step<BFloat16> step(group, layer, RandomRouting(rows, 2, Experts(group), 2500), 2500);
  step.Forward();

  DeviceBuffer<std::uint8_t> elsewhere(layer.memory().Download());
  const Tensor mem = elsewhere.View({elsewhere.size()});
  Step<BFloat16> moved(group, layer, RandomRouting(rows, 2, Experts(group), 2500), 2500);
  moved.UseHandle(layer.HandleOver(mem));
  EXPECT_TRUE(Throws("nvte_ep_prepare", {"handle.mem", "allow_handle_mem_reloc"}, [&] { moved.Prepare(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"handle.mem", "allow_handle_mem_reloc"}, [&] { moved.Dispatch(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine", {"handle.mem", "allow_handle_mem_reloc"}, [&] { moved.Combine(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"handle.mem", "allow_handle_mem_reloc"}, [&] { moved.CombineBwd(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", {"handle.mem", "allow_handle_mem_reloc"}, [&] { moved.DispatchBwd(); }));

  // The layer still works where it was, with the routing it had.
  step.Backward();
  Step<BFloat16>(group, layer, RandomRouting(rows, 2, Experts(group), 2501), 2501).ForwardAndBackward();
}

// Two layers over one memory: it holds the routing of the last prepare, and the other layer's calls are refused instead
// of using that.
TEST(Registered, MemoryBelongsToTheLayerThatPreparedItLast) {
  Group group{GroupShape()};
  Layer first(2, 1), second(2, 1);
  Step<BFloat16> mine(group, first, RandomRouting(UnevenRows(12), 2, Experts(group), 2520), 2520);
  Step<BFloat16> other(group, second, RandomRouting(UnevenRows(20), 2, Experts(group), 2521), 2521);
  const Tensor shared = first.memory().View({first.memory().size()});
  other.UseHandle(second.HandleOver(shared));
  mine.Forward();
  other.Forward();
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"handle.id " + std::to_string(first.id()), "another layer"},
                     [&] { mine.Dispatch(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"nvte_ep_prepare"}, [&] { mine.CombineBwd(); }));
  other.Backward();
  mine.ForwardAndBackward();
  EXPECT_TRUE(Throws("nvte_ep_combine", {"handle.id " + std::to_string(second.id())}, [&] { other.Combine(); }));
}

// Ids end with their group: the next group does not know them, whatever memory comes with them.
TEST(Registered, IdsOfAnEarlierGroupAreUnknown) {
  Group first{GroupShape()};
  Layer layer(2, 1);
  Step<BFloat16> step(first, layer, RandomRouting(UnevenRows(9), 2, Experts(first), 3040), 3040);
  step.Forward();
  first.Shutdown();
  Group second{GroupShape()};
  EXPECT_TRUE(Throws("nvte_ep_prepare", {"handle.id", std::to_string(layer.id())}, [&] { step.Prepare(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"handle.id", std::to_string(layer.id())}, [&] { step.Dispatch(); }));
  RunStep(second, 3041);
}

// Other layers go on, in the same memory too, and there is room for another.
TEST(Registered, RegistrationsEndBeforeTheGroup) {
  setenv("NVTE_EP_HANDLE_CACHE_SIZE", "2", 1);
  Group group{GroupShape()};
  unsetenv("NVTE_EP_HANDLE_CACHE_SIZE");
  const Layer first(2, 1), second(2, 1);
  Step<BFloat16> step(group, first, RandomRouting(UnevenRows(9), 2, Experts(group), 3050), 3050);
  step.ForwardAndBackward();
  step.Prepare();
  nvte_ep_ext_unregister_layer(first.id());
  EXPECT_TRUE(Throws("nvte_ep_ext_unregister_layer", {"id", std::to_string(first.id())},
                     [&] { nvte_ep_ext_unregister_layer(first.id()); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_unregister_layer", {"id", "got 0"}, [] { nvte_ep_ext_unregister_layer(0); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"handle.id", std::to_string(first.id())}, [&] { step.Dispatch(); }));
  Step<BFloat16>(group, second, RandomRouting(UnevenRows(9), 2, Experts(group), 3051), 3051).ForwardAndBackward();
  const Layer third(2, 1);
  EXPECT_NE(third.id(), first.id());
  Step<BFloat16>(group, third, RandomRouting(UnevenRows(9), 2, Experts(group), 3052), 3052).ForwardAndBackward();
}

TEST(Registered, LayerLimitOfTheEnvironment) {
  setenv("NVTE_EP_HANDLE_CACHE_SIZE", "3", 1);
  {
    Group group{GroupShape()};
    unsetenv("NVTE_EP_HANDLE_CACHE_SIZE");
    const Layer first(2, 1), second(2, 1), third(2, 1);
    NVTEEpLayerConfig config = {};
    config.top_k = 2;
    std::size_t bytes = 0;
    EXPECT_TRUE(Throws("nvte_ep_register_layer", {"NVTE_EP_HANDLE_CACHE_SIZE", "3"},
                       [&] { nvte_ep_register_layer(config, &bytes); }));
    Step<BFloat16>(group, third, RandomRouting(UnevenRows(9), 2, Experts(group), 3100), 3100).ForwardAndBackward();
  }
  setenv("NVTE_EP_HANDLE_CACHE_SIZE", "0", 1);
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"NVTE_EP_HANDLE_CACHE_SIZE", "0"},
                     [&] { Initialize(World::Get().comm(), GroupShape().Config()); }));
  unsetenv("NVTE_EP_HANDLE_CACHE_SIZE");
  Group group{GroupShape()};
  RunStep(group, 3101);
}

}  // namespace
}  // namespace test
