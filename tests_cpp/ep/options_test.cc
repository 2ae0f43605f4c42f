// Options: named, with text values, and what they do to a group.

#include "support/options.h"

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>

#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {
namespace {

using Pairs = Options::Pairs;

TEST(OptionsObject, ValuesAreReadBack) {
  Options options;
  const Pairs pairs = {{"overflow", "drop"},
                       {"eager", "on"},
                       {"num_topk", "8"},
                       {"dispatch_sms", "24"},
                       {"combine_sms", "24"},
                       {"preprocess_sms", "16"},
                       {"timeout_ms", "1500"},
                       {"backend", "nccl_ep"},
                       {"shutdown_timeout_ms", "0"},
                       {"deterministic", "off"},
                       {"symm_segment_bytes", "4096"},
                       {"undocumented_scale", "on"}};
  for (const auto& [key, value] : pairs) {
    EXPECT_EQ(options.Get(key), std::string(key) == "backend"              ? "auto"
                                : std::string(key) == "symm_segment_bytes" ? "67108864"
                                : std::string(key) == "undocumented_scale" ? "off"
                                                                           : "default")
        << key;
    options.Set(key, value);
    EXPECT_EQ(options.Get(key), value) << key;
  }
}

TEST(OptionsObject, UnknownKeysAndValuesAreRefusedWithTheValidOnes) {
  Options options;
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"key", "overflow, eager, num_topk", "\"overflo\""},
                     [&] { options.Set("overflo", "drop"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"value", "\"trap\" or \"drop\"", "\"overflow\"", "\"1\""},
                     [&] { options.Set("overflow", "1"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"value", "\"num_topk\"", "\"eight\""},
                     [&] { options.Set("num_topk", "eight"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"key", "\"drop\\nnvte_ep: well\\u{1b}\""},
                     [&] { options.Set("drop\nnvte_ep: well\033", "on"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"value", "\"on\\r\\n\""}, [&] { options.Set("eager", "on\r\n"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"key", "NULL"}, [&] { options.Set(nullptr, "drop"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", {"value", "NULL"}, [&] { options.Set("overflow", nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_get", {"key", "\"\""}, [&] { options.Get(""); }));
  char value[4];
  EXPECT_TRUE(Throws("nvte_ep_ext_options_get", {"value", "at least 8 bytes", "got 4"},
                     [&] { nvte_ep_ext_options_get(options.raw(), "overflow", value, sizeof value); }));
  EXPECT_EQ(options.Get("overflow"), "default");
}

TEST(OptionsObject, DeadObjects) {
  NVTEEpExtOptions* const dead = nvte_ep_ext_options_create();
  nvte_ep_ext_options_destroy(dead);
  const std::vector<std::string> parts = {"options", "nvte_ep_ext_options_create returned, not destroyed since"};
  EXPECT_TRUE(Throws("nvte_ep_ext_options_destroy", parts, [&] { nvte_ep_ext_options_destroy(dead); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", parts, [&] { nvte_ep_ext_options_set(dead, "overflow", "drop"); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", parts, [] { nvte_ep_ext_options_set(nullptr, "overflow", "drop"); }));
  char value[32];
  EXPECT_TRUE(Throws("nvte_ep_ext_options_get", parts,
                     [&] { nvte_ep_ext_options_get(dead, "overflow", value, sizeof value); }));
  const NVTEEpGroupConfig config = GroupShape().Config();
  EXPECT_TRUE(
      Throws("nvte_ep_ext_initialize", parts, [&] { nvte_ep_ext_initialize(World::Get().comm(), &config, dead); }));
  int foreign = 0;
  EXPECT_TRUE(Throws("nvte_ep_ext_options_destroy", parts,
                     [&] { nvte_ep_ext_options_destroy(reinterpret_cast<NVTEEpExtOptions*>(&foreign)); }));
  nvte_ep_ext_options_destroy(nullptr);
}

class GroupOptions : public GroupConfigTest {
 protected:
  static void Refuses(const GroupShape& shape, const Pairs& pairs, const std::vector<std::string>& parts) {
    const NVTEEpGroupConfig config = shape.Config();
    const Options options(pairs);
    EXPECT_TRUE(Throws("nvte_ep_ext_initialize", parts, [&] {
      nvte_ep_ext_initialize(World::Get().comm(), &config, options.raw());
      nvte_ep_shutdown();
    }));
  }
};

TEST_F(GroupOptions, NoneAreTheDefaults) {
  NVTEEpGroupConfig config = GroupShape().Config();
  nvte_ep_ext_initialize(World::Get().comm(), &config, nullptr);
  EXPECT_TRUE(Throws("nvte_ep_ext_initialize", {"nvte_ep_shutdown"},
                     [&] { nvte_ep_ext_initialize(World::Get().comm(), &config, nullptr); }));
  nvte_ep_shutdown();
  EXPECT_TRUE(Throws("nvte_ep_ext_initialize", {"group_config", "NULL"},
                     [] { nvte_ep_ext_initialize(World::Get().comm(), nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_initialize", {"ep_comm", "NULL"},
                     [&] { nvte_ep_ext_initialize(nullptr, &config, nullptr); }));
}

TEST_F(GroupOptions, EagerModeNeedsItsFields) {
  GroupShape shape;
  Refuses(shape, {{"eager", "on"}, {"num_topk", "2"}}, {"max_recv_tokens_per_rank", "must be 0", "eager = on"});
  GroupShape eager = shape;
  eager.eager = true;
  eager.top_k = 0;
  Refuses(eager, {{"eager", "on"}}, {"num_topk", "largest top_k of any layer"});
  Refuses(eager, {{"eager", "off"}}, {"max_recv_tokens_per_rank", "greater than 0"});
  Refuses(eager, {{"eager", "on"}, {"num_topk", "2"}, {"overflow", "drop"}}, {"dropping in eager mode"});
}

TEST_F(GroupOptions, TopKOfLayersIsBounded) {
  Group group(GroupShape().Config(), Options{{"num_topk", "2"}});
  Register(2, 0);
  EXPECT_TRUE(Throws(kLayerFunction, {"top_k", "num_topk, 2", "got 3"}, [] { Register(3, 0); }));
}

TEST_F(GroupOptions, MultiprocessorCounts) {
  Refuses(GroupShape(), {{"dispatch_sms", "1000"}, {"combine_sms", "1000"}}, {"option dispatch_sms", "got 1000"});
  Refuses(GroupShape(), {{"preprocess_sms", "1000"}}, {"option preprocess_sms", "got 1000"});
  // NCCL EP of API 2, and so the host runtime, has one number for both.
  if (EveryShapeIsCheap() && !OnNativeEngine()) {
    Refuses(GroupShape(), {{"dispatch_sms", "8"}, {"combine_sms", "4"}},
            {"option dispatch_sms", "combine_sms, 4", "got 8"});
  }
  Group group(GroupShape().Config(), Options{{"dispatch_sms", "8"}, {"combine_sms", "8"}, {"preprocess_sms", "4"}});
  Layer layer(2, 1);
  Step<float>(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 8300), 8300).ForwardAndBackward();
}

TEST_F(GroupOptions, RanksThatDiffer) {
  const int rank = World::Get().rank();
  const Pairs pairs[] = {{{"preprocess_sms", rank == 1 ? "5" : "4"}},
                         {{"deterministic", rank == 1 ? "off" : "on"}},
                         {{"symm_segment_bytes", rank == 1 ? "5" : "4"}}};
  for (const Pairs& options : pairs) {
    const std::string name = options[0].first;
    Refuses(GroupShape(), options, {"all ranks must pass the same option " + name + ": rank 1 has"});
  }
  Refuses(GroupShape(), {{"num_topk", rank == 1 ? "3" : "2"}}, {std::string("same ") + kNumTopk + ": rank 1 has 3"});
  Refuses(GroupShape(), {{"overflow", rank == 1 ? "drop" : "trap"}},
          {std::string("same ") + kOverflow + ": rank 1 has 1"});
}

// What these change is seen elsewhere, if at all; the steps are right with each. Every expert gets one token: without
// `deterministic` NCCL EP of API 3 has no order among those of one expert.
TEST_F(GroupOptions, StepsAreRightWithEach) {
  for (const Pairs& pairs : {Pairs{{"deterministic", "on"}}, Pairs{{"deterministic", "off"}, {"backend", "nccl_ep"}},
                             Pairs{{"shutdown_timeout_ms", "20000"}, {"timeout_ms", "0"}}}) {
    SCOPED_TRACE(pairs[0].first);
    Group group(GroupShape().Config(), Options(pairs));
    Layer layer(2, 1);
    ASSERT_EQ(Experts(group), 4 * Ranks());
    const Routing routing =
        MakeRouting(EvenRows(2), 2, [](int rank, int row, int k) { return (2 * rank + row) * 2 + (k + rank) % 2; });
    Step<float>(group, layer, routing, 8310).ForwardAndBackward();
  }
}

}  // namespace
}  // namespace test
