// Tokens in MXFP8: e4m3 or e5m2 values with one e8m0 scale for each 32 of a row. Bytes have to arrive as they were
// sent.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/scaled_step.h"
#include "support/host_stats.h"

namespace test {
namespace {

GroupShape Shape(int hidden, int alignment = 1) {
  GroupShape shape;
  shape.hidden = hidden;
  shape.alignment = alignment;
  shape.dtype = kNVTEBFloat16;
  return shape;
}

TEST(Mxfp8, ValuesAndScalesArrive) {
  for (const int hidden : {512, 1024}) {
    Group group(Shape(hidden, 16));
    for (const std::size_t alignment : {0, 16}) {
      SCOPED_TRACE("hidden " + std::to_string(hidden) + " alignment " + std::to_string(alignment));
      Layer layer(2, alignment);
      const Routing routing = RandomRouting(UnevenRows(40), 2, Experts(group), 6900 + alignment, 10);
      ScaledStep(group, layer, routing, 6900 + alignment, hidden).Run();
    }
  }
}

TEST(Mxfp8, E5M2) {
  Group group(Shape(512, 8));
  Layer layer(2, 8);
  ScaledStep(group, layer, RoundRobin(UnevenRows(9), 2, Experts(group)), 6910, 512, 0, kNVTEFloat8E5M2).Run();
}

TEST(Mxfp8, RowsBehindTheCapacityAreLeftAlone) {
  Group group(Shape(512, 16));
  Layer layer(2, 16);
  const std::size_t capacity = group.config().max_recv_tokens_per_rank;
  ScaledStep(group, layer, RandomRouting(EvenRows(64), 2, Experts(group), 6920), 6920, 512, capacity + 19).Run();
}

TEST(Mxfp8, Dropped) {
  Group group(Dropping(Shape(512), 64));
  Layer layer(2, 16);
  const int local = group.local_experts();
  const Routing routing = MakeRouting(EvenRows(64), 2, [=](int, int row, int k) { return (row + k) % local; });
  ScaledStep(group, layer, routing, 6930, 512, 64 + 19).Run();
}

TEST(Mxfp8, Eager) {
  Group group(Eager(Shape(512)));
  Layer layer(2, 8);
  const Routing routing = RandomRouting(UnevenRows(40), 2, Experts(group), 6940);
  const Reference reference(routing, Experts(group), 8);
  ScaledStep(group, layer, routing, 6940, 512, reference.Total(World::Get().rank())).Run();
}

TEST(EagerNothing, Mxfp8) {
  Group group(Eager(Shape(512)));
  Layer layer(2, 8);
  // Rank 0 receives nothing.
  const Routing routing = MakeRouting(
      EvenRows(9), 2, [&](int, int row, int k) { return group.local_experts() + (row + k) % group.local_experts(); });
  const Reference reference(routing, Experts(group), 8);
  ScaledStep(group, layer, routing, 6945, 512, reference.Total(World::Get().rank())).Run();
}

TEST(Mxfp8, WithoutWeights) {
  Group group(Shape(512, 8));
  Layer layer(2, 8);
  ScaledStep scaled(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 6955), 6955, 512);
  scaled.step.Prepare();
  DispatchArgs args = scaled.dispatch_args();
  args.topk_weights = nullptr;
  args.recv_topk_weights = nullptr;
  args.Call();
  scaled.Check(/*with_weights=*/false);
}

// The gradient of combine moves rows as dispatch does.
TEST(Mxfp8, GradientOfCombine) {
  Group group(Shape(512, 16));
  for (const NVTEDType dtype : {kNVTEFloat8E4M3, kNVTEFloat8E5M2}) {
    Layer layer(2, 16);
    ScaledStep scaled(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 6957), 6957, 512, 0, dtype);
    scaled.step.Prepare();
    CombineBwdArgs args = scaled.step.combine_bwd_args();
    args.grad = scaled.tokens_t.get();
    args.grad_expert_out = scaled.recv_tokens_t.get();
    args.Call();
    scaled.Check(/*with_weights=*/false);
  }
}

class Mxfp8Errors : public testing::Test {
 protected:
  static constexpr std::size_t kRows = 16;

  void SetUp() override {
    group_ = std::make_unique<Group>(Shape(1024));
    layer_ = std::make_unique<Layer>(2, 1);
    step_ = std::make_unique<Step<BFloat16>>(*group_, *layer_, RoundRobin(EvenRows(kRows), 2, Experts(*group_)), 6960);
    room_ = DeviceBuffer<std::uint8_t>(capacity() * 1024);
    step_->Prepare();
  }

  std::size_t capacity() const { return group_->config().max_recv_tokens_per_rank; }
  std::uint8_t* room() const { return room_.data(); }
  // Well-formed tensors of a hidden size.
  Tensor Tokens(std::size_t hidden) const {
    return Mxfp8(room(), kNVTEFloat8E4M3, {kRows, hidden}, room(), kNVTEFloat8E8M0, {kRows, hidden / 32});
  }
  Tensor RecvTokens(std::size_t hidden) const {
    return Mxfp8(room(), kNVTEFloat8E4M3, {capacity(), hidden}, room(), kNVTEFloat8E8M0, {capacity(), hidden / 32});
  }
  Tensor TokensWithScales(std::uint8_t* data, NVTEDType dtype, const std::vector<std::size_t>& shape) const {
    return Mxfp8(room(), kNVTEFloat8E4M3, {kRows, 512}, data, dtype, shape);
  }
  Tensor RecvTokensWithScales(std::uint8_t* data, NVTEDType dtype, const std::vector<std::size_t>& shape) const {
    return Mxfp8(room(), kNVTEFloat8E4M3, {capacity(), 512}, data, dtype, shape);
  }
  void Refuses(const Tensor& tokens, const Tensor& recv_tokens, const std::vector<std::string>& parts) const {
    DispatchArgs args = step_->dispatch_args();
    args.tokens = tokens.get();
    args.recv_tokens = recv_tokens.get();
    EXPECT_TRUE(Throws("nvte_ep_dispatch", parts, [&] { args.Call(); }));
  }
  // The group works after every refusal.
  void TearDown() override {
    if (!step_) return;
    step_->ForwardAndBackward();
    ScaledStep(*group_, *layer_, RoundRobin(EvenRows(3), 2, Experts(*group_)), 6961, 512).Run();
    step_.reset();
    layer_.reset();
    group_.reset();
  }

  std::unique_ptr<Group> group_;
  std::unique_ptr<Layer> layer_;
  std::unique_ptr<Step<BFloat16>> step_;
  DeviceBuffer<std::uint8_t> room_;
};

TEST_F(Mxfp8Errors, WidthsWhoseScaleRowsCannotBeCopied) {
  Refuses(Tokens(544), RecvTokens(544), {"tokens", "512", "544", "17 scales"});
  Refuses(Tokens(256), RecvTokens(256), {"tokens", "512", "256", "8 scales"});
}

// Rows of 68, 72 and 76 scales, which some formats pad to the next multiple of 16 bytes.
TEST(Mxfp8, WidthsBetweenThePaddedOnes) {
  Group group(Shape(2560));
  Layer layer(2, 1);
  for (const int hidden : {2176, 2304, 2432}) {
    ScaledStep scaled(group, layer, RoundRobin(EvenRows(5), 2, Experts(group)), 6965, hidden);
    scaled.step.Prepare();
    EXPECT_TRUE(Throws("nvte_ep_dispatch", {"tokens", "512", std::to_string(hidden), std::to_string(hidden / 32)},
                       [&] { scaled.dispatch_args().Call(); }));
  }
  if (EveryShapeIsCheap()) {
    ScaledStep(group, layer, RoundRobin(EvenRows(5), 2, Experts(group)), 6966, 2560).Run();
  }
}

TEST_F(Mxfp8Errors, PaddedScales) {
  const Tensor recv = RecvTokens(512);
  Refuses(TokensWithScales(room(), kNVTEFloat8E8M0, {128, 16}), recv,
          {"tokens.rowwise_scale_inv", "[16, 16]", "[128, 16]"});
  Refuses(TokensWithScales(room(), kNVTEFloat8E8M0, {kRows, 20}), recv,
          {"tokens.rowwise_scale_inv", "[16, 16]", "[16, 20]"});
  Refuses(TokensWithScales(room(), kNVTEFloat8E8M0, {kRows * 16}), recv,
          {"tokens.rowwise_scale_inv", "2D", "1D [256]"});
  Refuses(Tokens(512), RecvTokensWithScales(room(), kNVTEFloat8E8M0, {capacity(), 20}),
          {"recv_tokens.rowwise_scale_inv", "20]"});
  Refuses(Tokens(512), RecvTokensWithScales(room(), kNVTEFloat8E8M0, {capacity() - 1, 16}),
          {"recv_tokens.rowwise_scale_inv", std::to_string(capacity()), std::to_string(capacity() - 1)});
}

TEST_F(Mxfp8Errors, MissingScales) {
  Refuses(TokensWithScales(nullptr, kNVTEFloat8E8M0, {kRows, 16}), RecvTokens(512),
          {"tokens.rowwise_scale_inv", "null"});
  Refuses(Tokens(512), RecvTokensWithScales(nullptr, kNVTEFloat8E8M0, {capacity(), 16}),
          {"recv_tokens.rowwise_scale_inv", "null"});
  // Scales that were never set have no type either.
  Refuses(TokensWithScales(nullptr, kNVTEFloat32, {0}), RecvTokens(512), {"tokens.rowwise_scale_inv"});
}

// The type that TransformerEngine's wrapper gives scales unless it is told.
TEST_F(Mxfp8Errors, ScalesOfFloats) {
  Refuses(TokensWithScales(room(), kNVTEFloat32, {kRows, 16}), RecvTokens(512),
          {"tokens.rowwise_scale_inv", "e8m0", "got float32"});
  Refuses(Tokens(512), RecvTokensWithScales(room(), kNVTEFloat32, {capacity(), 16}),
          {"recv_tokens.rowwise_scale_inv", "e8m0", "got float32"});
}

TEST_F(Mxfp8Errors, OneSideUnscaled) {
  Refuses(Tokens(512), Tensor(room(), kNVTEFloat8E4M3, {capacity(), 512}), {"recv_tokens", "MXFP8", "unscaled"});
  Refuses(Tensor(room(), kNVTEBFloat16, {kRows, 512}), RecvTokens(512), {"recv_tokens"});
  Refuses(Tensor(room(), kNVTEFloat8E4M3, {kRows, 512}), RecvTokens(512), {"tokens", "e4m3"});
  Refuses(Tokens(512), RecvTokens(1024), {"recv_tokens", "512", "1024"});
}

TEST_F(Mxfp8Errors, OtherTypesAndScalings) {
  Refuses(Mxfp8(room(), kNVTEBFloat16, {kRows, 512}, room(), kNVTEFloat8E8M0, {kRows, 16}), RecvTokens(512),
          {"tokens", "e4m3", "got bfloat16"});
  Refuses(Mxfp8(room() + 8, kNVTEFloat8E4M3, {kRows, 512}, room(), kNVTEFloat8E8M0, {kRows, 16}), RecvTokens(512),
          {"tokens", "16"});
  Refuses(TokensWithScales(room() + 8, kNVTEFloat8E8M0, {kRows, 16}), RecvTokens(512),
          {"tokens.rowwise_scale_inv", "16"});
}

// Two 8-bit types, of which each is the other's garbage.
TEST_F(Mxfp8Errors, AnotherTypeOnEachSide) {
  Refuses(Mxfp8(room(), kNVTEFloat8E4M3, {kRows, 512}, room(), kNVTEFloat8E8M0, {kRows, 16}),
          Mxfp8(room(), kNVTEFloat8E5M2, {capacity(), 512}, room(), kNVTEFloat8E8M0, {capacity(), 16}),
          {"recv_tokens", "e4m3, got", "e5m2"});
}

// Scales as a transposed tensor.
TEST_F(Mxfp8Errors, ScalesByColumns) {
  Refuses(TokensWithScales(room(), kNVTEFloat8E8M0, {16, kRows - 1}), RecvTokens(512), {"tokens.rowwise_scale_inv"});
  Refuses(Tokens(512), RecvTokensWithScales(room(), kNVTEFloat8E8M0, {16, capacity()}),
          {"recv_tokens.rowwise_scale_inv", "[16, " + std::to_string(capacity()) + "]"});
}

// Scaled rows are moved, not summed.
TEST_F(Mxfp8Errors, SumsAndGradients) {
  const Tensor recv = RecvTokens(512), tokens = Tokens(512);
  CombineArgs combine = step_->combine_args();
  combine.expert_out = recv.get();
  EXPECT_TRUE(Throws("nvte_ep_combine", {"expert_out", "unscaled", "MXFP8"}, [&] { combine.Call(); }));
  combine = step_->combine_args();
  combine.result = tokens.get();
  EXPECT_TRUE(Throws("nvte_ep_combine", {"result", "unscaled", "MXFP8"}, [&] { combine.Call(); }));
  CombineBwdArgs combine_bwd = step_->combine_bwd_args();
  combine_bwd.grad = tokens.get();
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"grad_expert_out", "512"}, [&] { combine_bwd.Call(); }));
  DispatchBwdArgs dispatch_bwd = step_->dispatch_bwd_args();
  dispatch_bwd.grad = recv.get();
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", {"grad", "unscaled", "MXFP8"}, [&] { dispatch_bwd.Call(); }));
}

// Staging rows have to hold a row and its scales.
TEST(Mxfp8, TokenTypeTooNarrowForScales) {
  GroupShape shape = Shape(512);
  shape.dtype = kNVTEFloat8E4M3;
  Group group(shape);
  Layer layer(2, 1);
  ScaledStep scaled(group, layer, RoundRobin(EvenRows(5), 2, Experts(group)), 6970, 512);
  scaled.step.Prepare();
  EXPECT_TRUE(
      Throws("nvte_ep_dispatch", {"tokens", "512", "528", "max_token_dtype"}, [&] { scaled.dispatch_args().Call(); }));
}

}  // namespace
}  // namespace test
