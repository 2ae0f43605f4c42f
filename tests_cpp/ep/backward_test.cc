// The gradient calls on their own and in training order.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"

namespace test {
namespace {

// Neither gradient call needs a forward dispatch or combine before it, only a prepare.
TEST(Backward, CombineBwdAlone) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(45), 2, Experts(group), 1000, 10), 1000);
  step.Prepare();
  step.CombineBwd();
  step.CheckCombineBwd();
}

TEST(Backward, DispatchBwdAlone) {
  GroupShape shape;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(2, 16);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(45), 2, Experts(group), 1010, 10), 1010);
  step.Prepare();
  step.DispatchBwd();
  step.CheckDispatchBwd();
}

TEST(Backward, ZeroTokensInEachCall) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  for (const std::vector<int>& rows : {EvenRows(0), UnevenRows(6)}) {
    Step<BFloat16> combine(group, layer, RandomRouting(rows, 2, Experts(group), 1020), 1020);
    combine.Prepare();
    combine.CombineBwd();
    combine.CheckCombineBwd();
    Step<BFloat16> dispatch(group, layer, RandomRouting(rows, 2, Experts(group), 1021), 1021);
    dispatch.Prepare();
    dispatch.DispatchBwd();
    dispatch.CheckDispatchBwd();
  }
}

// Every weight gradient arrives at its own (token, k), whatever the order of the experts in the token's row.
TEST(Backward, WeightGradientsFollowTheColumns) {
  GroupShape shape;
  shape.top_k = 8;
  Group group(shape);
  Layer layer(8, 1);
  const int experts = Experts(group);
  const Routing falling =
      MakeRouting(EvenRows(16), 8, [=](int rank, int row, int k) { return (2 * experts + rank + row - k) % experts; });
  Step<BFloat16> step(group, layer, falling, 1030);
  step.Prepare();
  step.DispatchBwd();
  step.CheckDispatchBwd();
}

TEST(Backward, LayersForwardThenBackwardInReverse) {
  GroupShape shape;
  shape.top_k = 8;
  shape.alignment = 16;
  Group group(shape);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<Step<BFloat16>>> steps;
  const int top_k[] = {2, 8, 1};
  const std::size_t alignment[] = {1, 16, 4};
  for (int i = 0; i < 3; ++i) {
    layers.push_back(std::make_unique<Layer>(top_k[i], alignment[i]));
    steps.push_back(std::make_unique<Step<BFloat16>>(
        group, *layers[i], RandomRouting(UnevenRows(20 + 9 * i), top_k[i], Experts(group), 1040 + i), 1040 + i));
  }
  for (int i = 0; i < 3; ++i) {
    SCOPED_TRACE("layer " + std::to_string(i));
    steps[i]->Forward();
  }
  for (int i = 2; i >= 0; --i) {
    SCOPED_TRACE("layer " + std::to_string(i));
    steps[i]->Backward();
  }
}

}  // namespace
}  // namespace test
