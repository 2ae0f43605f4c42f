// prepare, dispatch and combine against the reference.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/host_stats.h"

namespace test {
namespace {

class TopK : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Forward, TopK, testing::Values(1, 2, 8), testing::PrintToStringParamName());

// Every alignment on one group: layers of different alignment live side by side.
TEST_P(TopK, EveryAlignment) {
  GroupShape shape;
  shape.top_k = GetParam();
  shape.alignment = 128;
  Group group(shape);
  std::uint64_t seed = 100;
  for (const std::size_t alignment : {0, 1, 2, 8, 16, 128}) {
    SCOPED_TRACE("alignment " + std::to_string(alignment));
    Layer layer(GetParam(), alignment);
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(64), GetParam(), Experts(group), seed), seed);
    step.ForwardAndBackward();
    ++seed;
  }
}

// Only every other expert gets tokens: an expert without tokens has no rows at all, padded or not, and the slab behind
// it moves up.
TEST(Forward, EmptyExpertsBetweenOthers) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  const int pairs = Experts(group) / 2;
  for (const int parity : {0, 1}) {
    Routing routing =
        MakeRouting(EvenRows(13), 2, [=](int rank, int row, int k) { return 2 * ((row + rank + k) % pairs) + parity; });
    Step<BFloat16> step(group, layer, routing, 200 + parity);
    for (int local = 0; local < group.local_experts(); ++local) {
      ASSERT_EQ(step.reference().Counts(World::Get().rank())[local] == 0, local % 2 != parity);
    }
    step.ForwardAndBackward();
  }
}

template <typename T>
class TokenType : public testing::Test {};

using TokenTypes = testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(TokenType, TokenTypes);

TYPED_TEST(TokenType, ForwardAndBackward) {
  GroupShape shape;
  shape.alignment = 8;
  shape.dtype = DTypeOf<TypeParam>();
  Group group(shape);
  Layer layer(2, 8);
  Step<TypeParam> step(group, layer, RandomRouting(UnevenRows(33), 2, Experts(group), 300), 300);
  step.ForwardAndBackward();
}

TEST(Forward, UnsetTokenTypeIsBFloat16) {
  GroupShape shape;
  shape.dtype = 0;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RoundRobin(EvenRows(9), 2, Experts(group)), 310);
  step.ForwardAndBackward();
}

TEST(Forward, IndicesOf32And64BitsAndBothCounterTypes) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  const Routing routing = RandomRouting(UnevenRows(20), 2, Experts(group), 400, 10);
  Step<BFloat16, std::int64_t, std::int32_t>(group, layer, routing, 401).ForwardAndBackward();
  Step<BFloat16, std::int64_t, std::int64_t>(group, layer, routing, 402).ForwardAndBackward();
  Step<BFloat16, std::int32_t, std::int32_t>(group, layer, routing, 403).ForwardAndBackward();
  Step<BFloat16, std::int32_t, std::int64_t>(group, layer, routing, 404).ForwardAndBackward();
}

// Negative entries go nowhere: partly masked tokens lose a contribution, fully masked ones come back as zeros.
TEST(Forward, MaskedEntries) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  const int experts = Experts(group);
  const Routing routing = MakeRouting(EvenRows(24), 2, [=](int rank, int row, int k) -> std::int64_t {
    const std::int64_t expert = (row + 3 * rank + k) % experts;
    switch (row % 4) {
      case 0:
        return -1;
      case 1:
        return k == 0 ? -1 : expert;
      case 2:
        return k == 1 ? -7 : expert;
      default:
        return expert;
    }
  });
  Step<BFloat16>(group, layer, routing, 500).ForwardAndBackward();
  Step<BFloat16, std::int32_t>(group, layer, routing, 501).ForwardAndBackward();
}

// What a caller wrote into topk_idx, where `routing` says what it has to mean.
template <typename Index>
void RunIndices(const Group& group, const Layer& layer, const Routing& routing, std::uint64_t seed,
                const std::vector<Index>& given) {
  Step<BFloat16, Index> step(group, layer, routing, seed);
  ASSERT_EQ(step.topk_idx.size(), given.size());
  step.topk_idx.Upload(given);
  step.ForwardAndBackward();
  EXPECT_EQ(step.topk_idx.Download(), given) << "topk_idx is the caller's";
}

// An expert that a token names again gets it once, with the weight of the first mention; the others have no gradient.
TEST(Forward, ExpertNamedAgain) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(shape);
  Layer layer(4, 4);
  const int experts = Experts(group);
  const auto named = [=](int rank, int row, int k) -> std::int64_t {
    const std::int64_t expert = (rank + row) % experts;
    switch (row % 3) {
      case 0:  // a a a a
        return expert;
      case 1:  // a b a b
        return (expert + k % 2) % experts;
      default:  // a masked a b
        return k == 1 ? -1 : (expert + k / 3) % experts;
    }
  };
  const Routing routing = MakeRouting(EvenRows(10), 4, [=](int rank, int row, int k) -> std::int64_t {
    for (int earlier = 0; earlier < k; ++earlier) {
      if (named(rank, row, earlier) == named(rank, row, k)) return -1;
    }
    return named(rank, row, k);
  });
  const int rank = World::Get().rank();
  std::vector<std::int64_t> wide;
  for (int row = 0; row < 10; ++row) {
    for (int k = 0; k < 4; ++k) wide.push_back(named(rank, row, k));
  }
  RunIndices(group, layer, routing, 505, wide);
  RunIndices(group, layer, routing, 506, std::vector<std::int32_t>(wide.begin(), wide.end()));
}

// Indices that are no expert, of which NCCL EP would make addresses, route nowhere, as negative ones.
TEST(Forward, IndicesBeyondTheExperts) {
  GroupShape shape;
  Group group(shape);
  Layer layer(2, 8);
  const std::int64_t experts = Experts(group);
  const int rows = 40;  // on every rank
  const Routing routing = MakeRouting(EvenRows(rows), 2, [=](int rank, int row, int k) -> std::int64_t {
    return (row + k) % 3 == 0 ? -1 : (rank + row + k) % experts;
  });
  const int rank = World::Get().rank();
  const std::int64_t wide[] = {experts,
                               experts + 1,
                               std::int64_t{1} << 32,
                               (std::int64_t{1} << 32) + 1,
                               std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()};
  const std::int32_t narrow[] = {static_cast<std::int32_t>(experts), std::numeric_limits<std::int32_t>::max(),
                                 std::numeric_limits<std::int32_t>::min()};
  std::vector<std::int64_t> given_wide;
  std::vector<std::int32_t> given_narrow;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < 2; ++k) {
      const std::int64_t expert = routing.at(rank, row, k);
      given_wide.push_back(expert < 0 ? wide[row % 6] : expert);
      given_narrow.push_back(expert < 0 ? narrow[row % 3] : static_cast<std::int32_t>(expert));
    }
  }
  RunIndices(group, layer, routing, 507, given_wide);
  RunIndices(group, layer, routing, 508, given_narrow);
}

TEST(Forward, EverythingMasked) {
  Group group{GroupShape()};
  Layer layer(2, 16);
  const Routing routing = MakeRouting(EvenRows(5), 2, [](int, int, int) { return -1; });
  Step<BFloat16>(group, layer, routing, 510).ForwardAndBackward();
}

TEST(Forward, ZeroTokensOnOneRankInTurn) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  for (int empty = 0; empty < Ranks(); ++empty) {
    SCOPED_TRACE("no tokens on rank " + std::to_string(empty));
    std::vector<int> rows = EvenRows(17);
    rows[empty] = 0;
    Step<BFloat16>(group, layer, RandomRouting(rows, 2, Experts(group), 600 + empty), 600 + empty).ForwardAndBackward();
  }
}

TEST(Forward, TokensOnOneRankOnly) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  std::vector<int> rows = EvenRows(0);
  rows.back() = 64;
  Step<BFloat16>(group, layer, RandomRouting(rows, 2, Experts(group), 610), 610).ForwardAndBackward();
}

TEST(Forward, ZeroTokensEverywhere) {
  Group group{GroupShape()};
  Layer layer(2, 16);
  Step<BFloat16>(group, layer, RoundRobin(EvenRows(0), 2, Experts(group)), 620).ForwardAndBackward();
  Step<BFloat16>(group, layer, RoundRobin(EvenRows(3), 2, Experts(group)), 621).ForwardAndBackward();
}

// All ranks send all tokens to the experts of one rank, which needs the whole receive capacity.
TEST(Forward, AllTokensToOneRank) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  const int local = group.local_experts();
  for (int target = 0; target < Ranks(); ++target) {
    const Routing routing =
        MakeRouting(EvenRows(64), 2, [=](int, int row, int k) { return target * local + (row + k) % local; });
    Step<BFloat16> step(group, layer, routing, 700 + target);
    if (World::Get().rank() == target) {
      ASSERT_EQ(step.slots().size(), static_cast<std::size_t>(group.config().max_recv_tokens_per_rank));
    }
    step.ForwardAndBackward();
  }
}

TEST(Forward, AllTokensToOneExpert) {
  Group group{GroupShape()};
  Layer layer(1, 1);
  const Routing routing = MakeRouting(EvenRows(64), 1, [](int, int, int) { return 2; });
  Step<BFloat16>(group, layer, routing, 710).ForwardAndBackward();
}

// The usual way to weight: the caller multiplies what it received by the weights it received, padding included.
TEST(Forward, WeightedByTheCaller) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  constexpr std::uint64_t kSeed = 800;
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(40), 2, Experts(group), kSeed, 15), kSeed);
  step.Prepare();
  step.Dispatch();
  const std::vector<BFloat16> received = step.recv_tokens.Download();
  const std::vector<float> weights = step.recv_weights.Download();
  std::vector<BFloat16> weighted(received.size());
  std::size_t not_finite = 0;
  for (std::size_t i = 0; i < step.slots().size() * step.hidden(); ++i) {
    const float product = Widen(received[i]) * weights[i / step.hidden()];
    if (!std::isfinite(product)) ++not_finite;
    weighted[i] = Narrow<BFloat16>(product);
  }
  EXPECT_EQ(not_finite, 0u) << "buffers that were all NaN before dispatch";
  step.CombineValues(weighted);
  step.CheckSum(step.result, "result", [](int, const Slot& slot, int column) {
    return Rounded<BFloat16>(TokenValue(kSeed, slot.rank, slot.row, column) *
                             WeightValue(kSeed, slot.rank, slot.row, slot.k));
  });
}

// Dispatch and combine without experts in between: every token comes back once for each expert it went to.
TEST(Forward, RoundTripCountsTheExperts) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  constexpr std::uint64_t kSeed = 810;
  Step<BFloat16> step(group, layer, RoundRobin(EvenRows(21), 2, Experts(group)), kSeed);
  step.Prepare();
  step.Dispatch();
  step.CombineValues(step.recv_tokens.Download());
  const std::vector<BFloat16> result = step.result.Download();
  for (std::size_t i = 0; i < result.size(); ++i) {
    const int row = static_cast<int>(i / step.hidden()), column = static_cast<int>(i % step.hidden());
    ASSERT_EQ(Widen(result[i]), 2 * TokenValue(kSeed, World::Get().rank(), row, column)) << "row " << row;
  }
}

TEST(Forward, WithoutWeights) {
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 820), 820);
  step.Prepare();
  step.DispatchWithoutWeights();
  step.CheckReceived(/*with_weights=*/false);
  step.Combine();
  step.CheckCombined();
}

TEST(Forward, BuffersLargerThanTheCapacity) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  const std::size_t capacity = group.config().max_recv_tokens_per_rank;
  for (const std::size_t rows : {capacity + 1, capacity + 37, 2 * capacity}) {
    SCOPED_TRACE(std::to_string(rows) + " rows");
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(64), 2, Experts(group), rows), rows, rows);
    step.ForwardAndBackward();
  }
}

TEST(Forward, RowsNarrowerThanTheGroups) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  const Routing routing = RandomRouting(UnevenRows(20), 2, Experts(group), 830);
  Step<BFloat16>(group, layer, routing, 830, 0, 128).ForwardAndBackward();
  Step<BFloat16>(group, layer, routing, 831, 0, 256).ForwardAndBackward();
}

TEST(Forward, DispatchTwiceAfterOnePrepare) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(50), 2, Experts(group), 840), 840);
  step.Prepare();
  step.Dispatch();
  const std::vector<BFloat16> first = step.recv_tokens.Download();
  const std::vector<float> first_weights = step.recv_weights.Download();
  step.recv_tokens.Clear();
  step.recv_weights.Clear();
  step.Dispatch();
  EXPECT_TRUE(SameBits(step.recv_tokens.Download(), first, step.hidden()));
  EXPECT_TRUE(SameBits(step.recv_weights.Download(), first_weights, 1));
  step.CheckReceived();
  step.Backward();
}

TEST(Forward, HiddenSizes) {
  const std::vector<int> sizes =
      EveryShapeIsCheap() ? std::vector<int>{8, 24, 104, 2176, 7168} : std::vector<int>{7168};
  for (const int hidden : sizes) {
    SCOPED_TRACE("hidden " + std::to_string(hidden));
    GroupShape shape;
    shape.hidden = hidden;
    shape.max_tokens = 16;
    shape.dtype = kNVTEBFloat16;
    Group group(shape);
    Layer layer(2, 1);
    Step<BFloat16>(group, layer, RoundRobin(UnevenRows(8), 2, Experts(group)), 850).ForwardAndBackward();
  }
}

TEST(Forward, TokenLimits) {
  for (const int limit : {1, 33, 60, 100}) {
    for (const int rows : {limit, limit - 1}) {
      SCOPED_TRACE(std::to_string(rows) + " of " + std::to_string(limit) + " tokens");
      GroupShape shape;
      shape.max_tokens = limit;
      shape.alignment = 2;
      Group group(shape);
      Layer layer(2, 2);
      Step<BFloat16>(group, layer, RoundRobin(EvenRows(rows), 2, Experts(group)), 860).ForwardAndBackward();
    }
  }
}

TEST(Forward, FewestExperts) {
  // NCCL EP takes a multiple of 4 experts.
  GroupShape shape;
  shape.experts_per_rank = std::max(1, 4 / Ranks());
  Group group(shape);
  Layer layer(2, 4);
  Step<BFloat16>(group, layer, RandomRouting(EvenRows(12), 2, Experts(group), 870), 870).ForwardAndBackward();
}

TEST(Forward, ManyExperts) {
  GroupShape shape;
  shape.experts_per_rank = 96;
  shape.top_k = 8;
  Group group(shape);
  Layer layer(8, 1);
  Step<BFloat16>(group, layer, RandomRouting(UnevenRows(64), 8, Experts(group), 880), 880).ForwardAndBackward();
  // Only the last expert of every rank.
  Layer last(1, 1);
  const Routing routing =
      MakeRouting(EvenRows(9), 1, [](int rank, int row, int) { return (rank + row) % Ranks() * 96 + 95; });
  Step<BFloat16>(group, last, routing, 881).ForwardAndBackward();
}

}  // namespace
}  // namespace test
