// Sizes at and beyond the edges of what kernels and formats were made for. NVTE_EP_TEST_LARGE adds those that take
// gigabytes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {
namespace {

bool Large() { return std::getenv("NVTE_EP_TEST_LARGE") != nullptr; }

// Every alignment, with token counts around 0, 1 and a warp.
TEST(Limits, AlignmentsAndFewTokens) {
  GroupShape shape;
  shape.alignment = 128;
  Group group(shape);
  for (const std::size_t alignment : {0, 1, 2, 8, 16, 128}) {
    Layer layer(2, alignment);
    for (const int rows : {0, 1, 31, 32, 33}) {
      SCOPED_TRACE("alignment " + std::to_string(alignment) + ", " + std::to_string(rows) + " tokens");
      const std::uint64_t seed = 9600 + rows;
      Step<BFloat16> step(group, layer, RandomRouting(EvenRows(rows), 2, Experts(group), seed), seed);
      step.Forward();
      if (rows == 1 || rows == 33) step.Backward();
    }
  }
}

// Token limits off the multiples that kernels work in, and beyond compile-time ones.
TEST(Limits, TokensOfARank) {
  struct Case {
    int limit, rows;
  };
  std::vector<Case> cases = {{8191, 8191}, {8193, 8192}, {16384, 300}, {65536, 300}};
  if (Large()) cases.insert(cases.end(), {{8193, 8193}, {16384, 16384}, {65536, 65535}, {65536, 65536}});
  for (const auto& [limit, rows] : cases) {
    SCOPED_TRACE(std::to_string(rows) + " of " + std::to_string(limit) + " tokens");
    GroupShape shape;
    shape.experts_per_rank = 2;
    shape.max_tokens = limit;
    shape.hidden = EveryShapeIsCheap() ? 8 : 256;
    NVTEEpGroupConfig config = shape.Config();
    // Spread evenly: about as many rows arrive as leave.
    config.max_recv_tokens_per_rank = 2 * limit + 64;
    Group group(config);
    Layer layer(2, 1);
    Step<BFloat16> step(group, layer, RoundRobin(EvenRows(rows), 2, Experts(group)), 9620);
    step.Forward();
    step.DispatchBwd();
    step.CheckDispatchBwd();
  }
}

TEST(Limits, HiddenSizes) {
  // On a GPU each costs a compilation.
  const std::vector<int> sizes =
      EveryShapeIsCheap() ? std::vector<int>{4096, 8192, 12288, 16384} : std::vector<int>{7168};
  for (const int hidden : sizes) {
    SCOPED_TRACE("hidden " + std::to_string(hidden));
    GroupShape shape;
    shape.hidden = hidden;
    shape.max_tokens = 4;
    shape.dtype = kNVTEBFloat16;
    Group group(shape);
    Layer layer(2, 1);
    Step<BFloat16> step(group, layer, RoundRobin(EvenRows(3), 2, Experts(group)), 9640);
    step.ForwardAndBackward();
    step.recv_tokens.Clear();
    step.recv_weights.Clear();
    step.DispatchWithoutWeights();
    step.CheckReceived(/*with_weights=*/false);
  }
}

// The widest rows, of the widest type, with one token and with as many as there may be.
TEST(Limits, WidestRows) {
  if (!EveryShapeIsCheap() && !Large()) GTEST_SKIP() << "compiles kernels for a shape of its own: NVTE_EP_TEST_LARGE=1";
  GroupShape shape;
  shape.hidden = 16384;
  shape.max_tokens = 4;
  Group group(shape);
  Layer layer(2, 1);
  for (const int rows : {1, 4}) {
    Step<float>(group, layer, RoundRobin(EvenRows(rows), 2, Experts(group)), 9650).ForwardAndBackward();
  }
}

class SmLimits : public GroupConfigTest {
 protected:
  // The device's multiprocessors.
  static int Sms() {
    int device = 0, count = 0;
    TEST_CUDA(cudaGetDevice(&device));
    TEST_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }
};

TEST_F(SmLimits, FromOneToAll) {
  // NCCL EP 0.1.0 has barriers for no more blocks of dispatch; ranks that share a GPU keep to their part.
  constexpr int kBarriers = 34;
  const bool barriers = !OnNativeEngine();
  const int most = EveryShapeIsCheap() ? (barriers ? kBarriers : 132) : (MaxSms() > 0 ? MaxSms() : 32);
  const auto works_with = [](int sms) {
    SCOPED_TRACE(std::to_string(sms) + " multiprocessors");
    NVTEEpGroupConfig config = GroupShape().Config();
    SetSmLimit(config, sms);
    Group group(config);
    Layer layer(2, 1);
    for (const int rows : {1, 64}) {
      Step<BFloat16>(group, layer, RandomRouting(EvenRows(rows), 2, Experts(group), 9660), 9660).ForwardAndBackward();
    }
  };
  for (const int sms : EveryShapeIsCheap() ? std::vector<int>{1, 2, 16, most} : std::vector<int>{2, most}) {
    works_with(sms);
  }
  const auto refused = [](int sms) {
    Refuses([&](NVTEEpGroupConfig& config) { SetSmLimit(config, sms); }, {kSmLimit, "got " + std::to_string(sms)});
  };
  refused(Sms() + 1);
  if (!barriers) return;
  if (EveryShapeIsCheap()) {
    refused(kBarriers + 1);
    refused(Sms());
    return;
  }
  // NCCL EP of API 3 has as many barriers as blocks: refused with the reason, or right.
  try {
    works_with(kBarriers + 1);
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("it has barriers for no more blocks"), std::string::npos) << error.what();
  }
}

// More experts than 9 bits hold (on four ranks), and tokens for those beyond that number alone.
TEST(Limits, ExpertsBeyondNineBits) {
  GroupShape shape;
  shape.experts_per_rank = 224;
  shape.top_k = EveryShapeIsCheap() ? 16 : 8;
  shape.max_tokens = 8;
  Group group(shape);
  Layer layer(shape.top_k, 1);
  const int experts = Experts(group), above = experts > 512 ? 512 : experts / 2;
  const Routing routing = MakeRouting(EvenRows(8), shape.top_k, [=](int rank, int row, int k) {
    return above + (31 * rank + 7 * row + 3 * k) % (experts - above);
  });
  Step<BFloat16>(group, layer, routing, 9670).ForwardAndBackward();
  // And every rank's last one.
  Layer one(1, 8);
  const Routing last = MakeRouting(EvenRows(8), 1, [](int, int row, int) { return (row % Ranks() + 1) * 224 - 1; });
  Step<BFloat16>(group, one, last, 9671).ForwardAndBackward();
}

// As many experts a token as the engine takes, and one more.
TEST(Limits, ExpertsPerToken) {
  const int most = OnNativeEngine() ? 64 : 32;
  GroupShape shape;
  shape.experts_per_rank = 80 / Ranks() / 4 * 4;
  shape.top_k = most;
  shape.max_tokens = 8;
  Group group(shape);
  Layer layer(most, 1);
  const int experts = Experts(group);
  const Routing routing =
      MakeRouting(EvenRows(8), most, [=](int rank, int row, int k) { return (17 * rank + 5 * row + k) % experts; });
  Step<BFloat16>(group, layer, routing, 9672).ForwardAndBackward();
  try {
    Layer(most + 1, 1);
    ADD_FAILURE() << "a layer of " << most + 1 << " experts per token";
  } catch (const std::runtime_error& error) {
    const std::string rule =
        most == 64 ? "must be 1 to 64 experts per token" : "must be at most 32 experts per token with NCCL EP";
    EXPECT_NE(std::string(error.what()).find(rule), std::string::npos) << error.what();
  }
}

// The batch that profilers begin with: all tokens alike, for the experts of one rank, which gets everything.
TEST(Limits, IdenticalTokens) {
  GroupShape shape;
  shape.experts_per_rank = 8;
  shape.top_k = 8;
  shape.hidden = Large() ? 4096 : 256;
  shape.max_tokens = Large() ? 16384 : 128;
  shape.dtype = kNVTEBFloat16;
  Group group(shape);
  Layer layer(8, 1);
  const Routing routing = MakeRouting(EvenRows(shape.max_tokens), 8, [](int, int, int k) { return k; });
  if (!Large()) {
    Step<BFloat16> step(group, layer, routing, 9680);
    if (World::Get().rank() == 0) {
      ASSERT_EQ(step.slots().size(), static_cast<std::size_t>(group.config().max_recv_tokens_per_rank));
    }
    step.ForwardAndBackward();
    return;
  }
  // Counts and the far end alone: the reference would take as long as the rest of the tests together.
  Step<BFloat16> step(group, layer, routing, 9680);
  step.Prepare();
  step.CheckCounts();
  step.Dispatch();
  World::Get().Wait();
  std::vector<float> weights = step.recv_weights.Download();
  for (std::size_t s = 0; s < step.slots().size(); ++s) {
    const Slot& slot = step.slots()[s];
    ASSERT_EQ(weights[s], WeightValue(9680, slot.rank, slot.row, slot.k)) << "row " << s;
  }
}

// Buffers of more than 2^31 elements, whose last row alone holds something. Gigabytes on every rank.
TEST(Limits, RowsBeyondTwoToThe31Elements) {
  if (!Large()) GTEST_SKIP() << "set NVTE_EP_TEST_LARGE=1: about 20 GiB a rank";
  constexpr int kHidden = 7168, kCapacity = 320000;
  const int tokens = kCapacity / Ranks();
  NVTEEpGroupConfig config = GroupShape().Config();
  config.max_tokens_per_rank = tokens;
  config.max_recv_tokens_per_rank = kCapacity;
  config.hidden_dim = kHidden;
  config.max_token_dtype = kNVTEBFloat16;
  Group group(config);
  Layer layer(1, 1);
  const int rank = World::Get().rank();
  const auto rows = static_cast<std::size_t>(tokens);
  // Everything for the last expert of the last rank.
  DeviceBuffer<std::int64_t> topk_idx(std::vector<std::int64_t>(rows, Experts(group) - 1));
  DeviceBuffer<std::int32_t> counts(group.local_experts()), total(1);
  DeviceBuffer<BFloat16> sent(rows * kHidden), received(std::size_t{kCapacity} * kHidden), result(rows * kHidden);
  cudaStream_t stream = World::Get().stream();
  TEST_CUDA(cudaMemsetAsync(sent.data(), 0, sent.bytes(), stream));
  std::vector<BFloat16> last(kHidden);
  for (int h = 0; h < kHidden; ++h) last[h] = Narrow<BFloat16>(static_cast<float>(1 + (h + rank) % 100));
  TEST_CUDA(cudaMemcpyAsync(sent.data() + (rows - 1) * kHidden, last.data(), kHidden * sizeof(BFloat16),
                            cudaMemcpyHostToDevice, stream));
  World::Get().Wait();
  const Tensor topk_idx_t = topk_idx.View({rows, 1}), counts_t = counts.View({counts.size()}),
               total_t = total.View({1});
  const Tensor sent_t = sent.View({rows, kHidden}), received_t = received.View({kCapacity, kHidden});
  const Tensor result_t = result.View({rows, kHidden});
  MakePrepareArgs(layer.handle(), topk_idx_t.get(), counts_t.get(), total_t.get(), 1, 1).Call();
  DispatchArgs{layer.handle(), topk_idx_t.get(), sent_t.get(), nullptr, received_t.get(), nullptr}.Call();
  CombineArgs{layer.handle(), received_t.get(), result_t.get()}.Call();
  std::vector<BFloat16> back(2 * kHidden);
  TEST_CUDA(cudaMemcpyAsync(back.data(), result.data() + (rows - 2) * kHidden, back.size() * sizeof(BFloat16),
                            cudaMemcpyDeviceToHost, stream));
  World::Get().Wait();
  std::vector<BFloat16> expected(kHidden);
  expected.insert(expected.end(), last.begin(), last.end());
  EXPECT_TRUE(SameBits(back, expected, kHidden));
  if (rank == Ranks() - 1) {
    // The last row of all came from this rank.
    std::vector<BFloat16> row(kHidden);
    TEST_CUDA(cudaMemcpyAsync(row.data(), received.data() + (std::size_t{kCapacity} - 1) * kHidden,
                              kHidden * sizeof(BFloat16), cudaMemcpyDeviceToHost, stream));
    World::Get().Wait();
    EXPECT_TRUE(SameBits(row, last, kHidden));
  }
}

// A group that the device has no memory for. The host runtime takes any size, so that it has to be told:
// NVTE_EP_HOST_FAULT="call=ncclEpCreateGroup,do=fail,code=1".
class GroupMemoryErrors : public GroupConfigTest {};

TEST_F(GroupMemoryErrors, MoreThanTheDeviceHas) {
  Refuses(
      [](NVTEEpGroupConfig& config) {
        config.max_tokens_per_rank = 1 << 20;
        config.max_recv_tokens_per_rank = 1 << 20;
        // What the native engine holds goes by the width of rows alone.
        config.hidden_dim = OnNativeEngine() ? 1 << 27 : 1 << 20;
      },
      {"bytes|MiB|GiB", "max_recv_tokens_per_rank|max_tokens_per_rank"});
}

}  // namespace
}  // namespace test
