// Group and layer configurations that have to be refused by name and value. All ranks pass the same.

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "support/host_stats.h"

namespace test {
namespace {

class GroupConfigErrors : public GroupConfigTest {};

TEST_F(GroupConfigErrors, NullCommunicator) {
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"ep_comm", "null"}, [] { Initialize(nullptr, GroupShape().Config()); }));
}

TEST_F(GroupConfigErrors, EpSize) {
  Refuses([](NVTEEpGroupConfig& config) { config.ep_size = 0; }, {"ep_size", "got 0"});
  Refuses([](NVTEEpGroupConfig& config) { config.ep_size = -2; }, {"ep_size", "-2"});
}

TEST_F(GroupConfigErrors, EpSizeOfAnotherCommunicator) {
  for (const int size : {Ranks() * 2, Ranks() + 1, Ranks() / 2}) {
    Refuses(
        [size](NVTEEpGroupConfig& config) {
          config.ep_size = size;
          config.num_experts = 4 * size;
          config.max_recv_tokens_per_rank = 8 * config.max_recv_tokens_per_rank;
        },
        {"ep_size", std::to_string(size), std::to_string(Ranks())});
  }
}

TEST_F(GroupConfigErrors, NumExperts) {
  Refuses([](NVTEEpGroupConfig& config) { config.num_experts = 0; }, {"num_experts", "got 0"});
  Refuses([](NVTEEpGroupConfig& config) { config.num_experts = -8; }, {"num_experts", "-8"});
  const int odd = 4 * Ranks() + 1;
  Refuses([odd](NVTEEpGroupConfig& config) { config.num_experts = odd; }, {"num_experts", std::to_string(odd)});
  if (Ranks() == 2 && !OnNativeEngine()) {
    // NCCL EP takes a multiple of 4 experts.
    Refuses([](NVTEEpGroupConfig& config) { config.num_experts = 6; }, {"num_experts", "4", "6"});
  }
}

TEST_F(GroupConfigErrors, MaxTokensPerRank) {
  Refuses([](NVTEEpGroupConfig& config) { config.max_tokens_per_rank = 0; }, {"max_tokens_per_rank", "got 0"});
  Refuses([](NVTEEpGroupConfig& config) { config.max_tokens_per_rank = -1; }, {"max_tokens_per_rank", "-1"});
}

TEST_F(GroupConfigErrors, MaxRecvTokensPerRank) {
  Refuses([](NVTEEpGroupConfig& config) { config.max_recv_tokens_per_rank = -5; }, {"max_recv_tokens_per_rank", "-5"});
  Refuses([](NVTEEpGroupConfig& config) { config.max_recv_tokens_per_rank = 63; },
          {"max_recv_tokens_per_rank", "64", "63"});
}

TEST_F(GroupConfigErrors, HiddenDim) {
  Refuses([](NVTEEpGroupConfig& config) { config.hidden_dim = 0; }, {"hidden_dim", "got 0"});
  Refuses([](NVTEEpGroupConfig& config) { config.hidden_dim = -256; }, {"hidden_dim", "-256"});
  for (const int hidden : {4, 7, 100}) {
    Refuses(
        [hidden](NVTEEpGroupConfig& config) {
          config.hidden_dim = hidden;
          config.max_token_dtype = kNVTEBFloat16;
        },
        {"hidden_dim", "16", std::to_string(hidden)});
  }
}

TEST_F(GroupConfigErrors, LimitOfSms) {
  Refuses([](NVTEEpGroupConfig& config) { SetSmLimit(config, -1); }, {kSmLimit, "-1"});
  Refuses([](NVTEEpGroupConfig& config) { SetSmLimit(config, 100000); }, {kSmLimit, "100000"});
  // NCCL EP of API 2, and so the host runtime, has barriers for so many blocks of dispatch.
  if (EveryShapeIsCheap() && Ranks() > 1 && !OnNativeEngine()) {
    Refuses([](NVTEEpGroupConfig& config) { SetSmLimit(config, 35); }, {kSmLimit, "at most 34", "got 35"});
  }
}

// The buffers that NCCL EP would ask for, and end the process over; and the native engine's, which depend on the width
// of rows alone.
TEST_F(GroupConfigErrors, MoreMemoryThanThereIs) {
  if (OnNativeEngine()) {
    GroupShape wide;
    wide.hidden = 1 << 27;
    EXPECT_TRUE(Throws("nvte_ep_initialize",
                       {"bytes of device memory on each rank", "free", "lower hidden_dim, max_tokens_per_rank"},
                       [&] { Group group(wide); }));
    return;
  }
  GroupShape shape = Eager(GroupShape{});
  shape.top_k = 8;
  shape.experts_per_rank = 8;
  shape.max_tokens = 65536;
  shape.hidden = 16 * 7168;
  // Where the configuration has no field for it, eager mode is an option.
  const bool by_option = std::string(kNumTopk) == "option num_topk";
  EXPECT_TRUE(
      Throws(by_option ? "nvte_ep_ext_initialize" : "nvte_ep_initialize",
             {"bytes of device memory", "for scales of received rows", "free; eager mode",
              std::to_string(8 * 65536 * Ranks()) + " rows a rank", "pass an explicit max_recv_tokens_per_rank"},
             [&] { Group group(shape); }));
  shape.eager = false;
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"bytes of device memory", "lower max_recv_tokens_per_rank"},
                     [&] { Group group(shape); }));
}

// A variable of this process for as long as the object lives; null leaves it as it is.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(value == nullptr ? nullptr : name) {
    if (name_ != nullptr) setenv(name_, value, 1);
  }
  ~Variable() {
    if (name_ != nullptr) unsetenv(name_);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

// NCCL EP's own variables: rank 1 alone has them, and every rank hears of it.
TEST_F(GroupConfigErrors, VariablesOfOneRank) {
  if (Ranks() < 2) GTEST_SKIP();
  const auto refuses = [](const char* name, const char* value, const std::vector<std::string>& parts) {
    const Variable variable(name, World::Get().rank() == 1 ? value : nullptr);
    Refuses([](NVTEEpGroupConfig&) {}, parts);
  };
  refuses(
      "NCCL_EP_TOKENS_PER_CHUNK", "128",
      {"all ranks must pass the same NCCL_EP_TOKENS_PER_CHUNK in the environment", "rank 1 has 128, rank 0 has -1"});
  refuses("NCCL_EP_COMM_SMS", "8", {"same NCCL_EP_COMM_SMS in the environment", "rank 1 has 8"});
  refuses("NCCL_EP_DISABLE_GUARD", "on", {"same NCCL_EP_DISABLE_GUARD in the environment: rank 1 has 1, rank 0 has 0"});
  refuses("NCCL_EP_HT_EM_LOCAL_DUP", "1", {"same NCCL_EP_HT_EM_LOCAL_DUP in the environment"});
  refuses("NCCL_EP_COMM_SMS", "100000", {"rank 1 cannot take part: NCCL_EP_COMM_SMS must be at most", "got 100000"});
  refuses("NCCL_EP_SHUFFLE_SMS", "many", {"rank 1 cannot take part: NCCL_EP_SHUFFLE_SMS must be a number", "got many"});
  const Variable nvlink("NCCL_EP_HT_EM_NVLINK_DUP", "1");
  refuses("NCCL_EP_HT_EM_LOCAL_DUP", "1",
          {"rank 1 cannot take part: NCCL_EP_HT_EM_LOCAL_DUP must not be on together with NCCL_EP_HT_EM_NVLINK_DUP"});
}

TEST_F(GroupConfigErrors, MaxTokenDtype) {
  // The last two are types that NCCL has not.
  for (const int dtype : {-1, 11, 99, kNVTEInt16, kNVTEFloat4E2M1}) {
    Refuses([dtype](NVTEEpGroupConfig& config) { config.max_token_dtype = static_cast<NVTEDType>(dtype); },
            {"max_token_dtype", std::to_string(dtype)});
  }
}

class LayerConfigErrors : public ErrorTest {
 protected:
  static void RefusesLayer(int top_k, std::size_t alignment, const std::vector<std::string>& parts) {
    Refuses(kLayerFunction, parts, [&] { Register(top_k, alignment); });
  }
};

TEST_F(LayerConfigErrors, TopK) {
  RefusesLayer(0, 1, {"top_k", "got 0"});
  RefusesLayer(-1, 1, {"top_k", "-1"});
  RefusesLayer(65, 1, {"top_k", "1 to 64", "65"});
  const int experts = Experts(rig().group);
  RefusesLayer(experts + 1, 1, {"top_k", std::to_string(experts), std::to_string(experts + 1)});
}

TEST_F(LayerConfigErrors, Alignment) {
  const std::string name = "dispatch_output_per_expert_alignment";
  for (const std::size_t alignment : {std::size_t{3}, std::size_t{12}, std::size_t{127}, ~std::size_t{0}}) {
    RefusesLayer(2, alignment, {name, "power of two", std::to_string(alignment)});
  }
  // A power of two that NCCL EP's int cannot hold.
  const std::size_t huge = std::size_t{1} << 31;
  RefusesLayer(2, huge, {name, std::to_string(huge)});
}

}  // namespace
}  // namespace test
