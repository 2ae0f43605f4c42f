// nvte_ep_prepare's optional outputs, layers of different configuration side by side, and nvte_ep_prepare_and_dispatch.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/scaled_step.h"
#include "ep/te/te_calls.h"

namespace test {
namespace {

// Three layers that agree in nothing: forward interleaved call by call, backward in reverse.
TEST(TeLayers, TopKAndAlignmentOfTheirOwn) {
  GroupShape shape;
  shape.top_k = 8;
  shape.alignment = 128;
  Group group(shape);
  const int top_k[] = {2, 4, 8};
  const std::size_t alignment[] = {0, 128, 16};
  std::vector<std::unique_ptr<Layer>> layers;
  for (int i = 0; i < 3; ++i) layers.push_back(std::make_unique<Layer>(top_k[i], alignment[i]));
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Step<BFloat16>>> steps;
    for (int i = 0; i < 3; ++i) {
      const int seed = 6000 + 10 * round + i;
      steps.push_back(std::make_unique<Step<BFloat16>>(
          group, *layers[i], RandomRouting(UnevenRows(15 + 16 * i), top_k[i], Experts(group), seed, 5), seed));
    }
    for (auto& step : steps) step->Prepare();
    for (auto& step : steps) step->Dispatch();
    for (auto& step : steps) step->Combine();
    for (int i = 2; i >= 0; --i) {
      steps[i]->CombineBwd();
      steps[i]->DispatchBwd();
    }
    for (int i = 0; i < 3; ++i) {
      SCOPED_TRACE("round " + std::to_string(round) + " layer " + std::to_string(i));
      steps[i]->CheckCounts();
      steps[i]->CheckReceived();
      steps[i]->CheckCombined();
      steps[i]->CheckCombineBwd();
      steps[i]->CheckDispatchBwd();
    }
  }
}

// Memory of cudaMallocHost.
class PinnedTotal {
 public:
  PinnedTotal() {
    void* data = nullptr;
    TEST_CUDA(cudaMallocHost(&data, sizeof(std::int64_t)));
    value_ = static_cast<std::int64_t*>(data);
    *value_ = -1;
  }
  ~PinnedTotal() { static_cast<void>(cudaFreeHost(value_)); }
  PinnedTotal(const PinnedTotal&) = delete;
  PinnedTotal& operator=(const PinnedTotal&) = delete;

  std::int64_t* data() const { return value_; }

 private:
  std::int64_t* value_ = nullptr;
};

class TeCounts : public testing::Test {
 protected:
  // A step whose prepare gets the given outputs; the rest of the step has to work with them.
  template <typename Count>
  static void RunWith(bool with_counts, bool with_total, std::uint64_t seed) {
    GroupShape shape;
    shape.alignment = 8;
    Group group(shape);
    Layer layer(2, 8);
    Step<BFloat16, std::int64_t, Count> step(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), seed),
                                             seed);
    PrepareArgs args = step.prepare_args();
    if (!with_counts) args.token_counts = nullptr;
    if (!with_total) args.total = nullptr;
    args.Call();
    const int rank = World::Get().rank();
    const std::vector<std::int64_t>& padded = step.reference().Counts(rank);
    const std::vector<Count> counts =
        with_counts ? std::vector<Count>(padded.begin(), padded.end()) : Unwritten<Count>(padded.size());
    const std::vector<Count> total =
        with_total ? std::vector<Count>(1, static_cast<Count>(step.reference().Total(rank))) : Unwritten<Count>(1);
    EXPECT_TRUE(SameBits(step.counts.Download(), counts, 1)) << "counts";
    EXPECT_TRUE(SameBits(step.total.Download(), total, 1)) << "total";
    EXPECT_TRUE(step.counts.GuardIntact() && step.total.GuardIntact());
    step.Dispatch();
    step.CheckReceived();
    step.Combine();
    step.CheckCombined();
    step.Backward();
  }
};

TEST_F(TeCounts, Int32) {
  RunWith<std::int32_t>(true, true, 6100);
  RunWith<std::int32_t>(true, false, 6101);
  RunWith<std::int32_t>(false, true, 6102);
  RunWith<std::int32_t>(false, false, 6103);
}

TEST_F(TeCounts, Int64) {
  RunWith<std::int64_t>(true, true, 6110);
  RunWith<std::int64_t>(true, false, 6111);
  RunWith<std::int64_t>(false, true, 6112);
}

TEST_F(TeCounts, TotalInPinnedHostMemory) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  PinnedTotal pinned;
  const Tensor total(pinned.data(), kNVTEInt64, {1});
  for (const bool with_counts : {true, false}) {
    for (const int most : {20, 5, 0, 60}) {
      Step<BFloat16, std::int64_t, std::int64_t> step(
          group, layer, RandomRouting(most == 0 ? EvenRows(0) : UnevenRows(most), 2, Experts(group), 6120 + most),
          6120 + most);
      PrepareArgs args = step.prepare_args();
      args.total = total.get();
      if (!with_counts) args.token_counts = nullptr;
      *pinned.data() = -1;
      args.Call();
      World::Get().Wait();
      EXPECT_EQ(*pinned.data(), step.reference().Total(World::Get().rank())) << most << " tokens";
      step.Dispatch();
      step.CheckReceived();
    }
  }
}

class TePrepareErrors : public ErrorTest {
 protected:
  static void Total(const Tensor& tensor, std::vector<std::string> parts) {
    PrepareArgs args = step().prepare_args();
    args.total = tensor.get();
    parts.push_back("total_recv_tokens_per_rank");
    Refuses("nvte_ep_prepare", parts, [&] { args.Call(); });
    Refuses("nvte_ep_prepare_and_dispatch", parts, [&] { PrepareAndDispatch(args, step().dispatch_args()); });
  }
};

TEST_F(TePrepareErrors, Total) {
  Total(Any(kNVTEInt64, {1}), {"int32, got int64"});
  Total(Any(kNVTEFloat32, {1}), {"int32", "got float32"});
  Total(Any(kNVTEInt32, {1, 1}), {"1D", "2D [1, 1]"});
  Total(Any(kNVTEInt32, {0}), {"got 0"});
  Total(Tensor(nullptr, kNVTEInt32, {1}), {"null"});
}

TEST_F(TePrepareErrors, CountsOfAnotherTypeThanTheTotal) {
  PrepareArgs args = step().prepare_args();
  const Tensor counts = Any(kNVTEInt64, {4});
  args.token_counts = counts.get();
  Refuses("nvte_ep_prepare", {"total_recv_tokens_per_rank", "int64, got int32"}, [&] { args.Call(); });
}

TEST_F(TePrepareErrors, LayerConfig) {
  PrepareArgs args = step().prepare_args();
  const std::string alignment = "layer_cfg.dispatch_output_per_expert_alignment";
  const auto both = [&](const std::vector<std::string>& parts) {
    Refuses("nvte_ep_prepare", parts, [&] { args.Call(); });
    Refuses("nvte_ep_prepare_and_dispatch", parts, [&] { PrepareAndDispatch(args, step().dispatch_args()); });
    Refuses("nvte_ep_handle_mem_size", parts, [&] { Register(args.top_k, args.alignment); });
  };
  for (const std::size_t bad : {std::size_t{3}, std::size_t{48}, std::size_t{1} << 31, ~std::size_t{0}}) {
    args.alignment = bad;
    both({alignment, "power of two", std::to_string(bad)});
  }
  args.alignment = kAlignment;
  for (const int bad : {0, -3, 33}) {
    args.top_k = bad;
    both({"layer_cfg.top_k", std::to_string(bad)});
  }
  args.top_k = Experts(rig().group) + 1;
  both({"top_k", std::to_string(args.top_k), std::to_string(Experts(rig().group))});
  // Another top_k than topk_idx has columns.
  args.top_k = 3;
  DeviceBuffer<std::uint8_t> memory(Register(3, kAlignment).bytes);
  const Tensor mem = memory.View({memory.size()});
  args.handle = mem.get();
  Refuses("nvte_ep_prepare", {"topk_idx", "top_k, 3", "[16, 2]"}, [&] { args.Call(); });
}

TEST_F(TePrepareErrors, NullLayerConfig) {
  const PrepareArgs args = step().prepare_args();
  Refuses("nvte_ep_prepare", {"layer_cfg", "null"}, [&] {
    nvte_ep_prepare(args.handle, args.topk_idx, args.token_counts, args.total, nullptr, World::Get().stream());
  });
  Refuses("nvte_ep_handle_mem_size", {"layer_cfg", "null"}, [] { nvte_ep_handle_mem_size(nullptr); });
}

// ---- rows without weights ----

TEST(TeWeights, RowsAloneBothWays) {
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 6200), 6200);
  step.Prepare();
  DispatchArgs dispatch = step.dispatch_args();
  dispatch.topk_weights = nullptr;
  dispatch.recv_topk_weights = nullptr;
  dispatch.topk_idx = nullptr;
  dispatch.Call();
  step.CheckReceived(/*with_weights=*/false);
  step.UploadSlotGradients();
  DispatchBwdArgs backward = step.dispatch_bwd_args();
  backward.g_recv_topk_weights = nullptr;
  backward.grad_topk_weights = nullptr;
  backward.Call();
  step.CheckTokenGradients();
  EXPECT_TRUE(SameBits(step.grad_weights.Download(), Unwritten<float>(step.grad_weights.size()), 2))
      << "grad_topk_weights was not passed";
  // And with the weights after all.
  step.Backward();
}

class TeDispatchErrors : public ErrorTest {};

TEST_F(TeDispatchErrors, WeightsWithoutIndices) {
  DispatchArgs args = step().dispatch_args();
  args.topk_idx = nullptr;
  Refuses("nvte_ep_dispatch", {"topk_idx", "topk_weights", "null"}, [&] { args.Call(); });
}

// ---- prepare_and_dispatch ----

template <typename Count>
void FusedGivesWhatTwoCallsGive(bool with_weights, std::uint64_t seed) {
  GroupShape shape;
  shape.top_k = 4;
  shape.alignment = 16;
  Group group(shape);
  Layer one(4, 16), other(4, 16);
  const Routing routing = RandomRouting(UnevenRows(50), 4, Experts(group), seed, 10);
  Step<BFloat16, std::int64_t, Count> two_calls(group, one, routing, seed);
  Step<BFloat16, std::int64_t, Count> fused(group, other, routing, seed);
  two_calls.Prepare();
  DispatchArgs args = fused.dispatch_args();
  if (with_weights) {
    two_calls.Dispatch();
  } else {
    two_calls.DispatchWithoutWeights();
    args.topk_weights = nullptr;
    args.recv_topk_weights = nullptr;
  }
  PrepareAndDispatch(fused.prepare_args(), args);
  EXPECT_TRUE(SameBits(fused.counts.Download(), two_calls.counts.Download(), 1)) << "counts";
  EXPECT_TRUE(SameBits(fused.total.Download(), two_calls.total.Download(), 1)) << "total";
  EXPECT_TRUE(SameBits(fused.recv_tokens.Download(), two_calls.recv_tokens.Download(), fused.hidden())) << "rows";
  EXPECT_TRUE(SameBits(fused.recv_weights.Download(), two_calls.recv_weights.Download(), 1)) << "weights";
  fused.CheckCounts();
  fused.CheckReceived(with_weights);
  fused.Combine();
  fused.CheckCombined();
  fused.Backward();
}

TEST(TePrepareAndDispatch, GivesWhatTwoCallsGive) {
  FusedGivesWhatTwoCallsGive<std::int32_t>(true, 6300);
  FusedGivesWhatTwoCallsGive<std::int64_t>(true, 6301);
  FusedGivesWhatTwoCallsGive<std::int64_t>(false, 6302);
}

TEST(TePrepareAndDispatch, WithoutCountsOrTotal) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  for (const bool with_counts : {true, false}) {
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 6310), 6310);
    PrepareArgs args = step.prepare_args();
    (with_counts ? args.total : args.token_counts) = nullptr;
    PrepareAndDispatch(args, step.dispatch_args());
    step.CheckReceived();
    step.Combine();
    step.CheckCombined();
    step.Backward();
  }
}

// A wrong argument of either half is refused before anything is queued: the routing of before is still there.
TEST(TePrepareAndDispatch, RefusedAsAWhole) {
  Group group{GroupShape()};
  Layer layer(2, 8);
  Step<BFloat16> before(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 6320), 6320);
  Step<BFloat16> refused(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 6321), 6321);
  before.Prepare();
  DispatchArgs dispatch = refused.dispatch_args();
  const Tensor narrow = refused.tokens.View({refused.rows() + 1, refused.hidden()});
  dispatch.tokens = narrow.get();
  EXPECT_TRUE(Throws("nvte_ep_prepare_and_dispatch", {"tokens", std::to_string(refused.rows() + 1)},
                     [&] { PrepareAndDispatch(refused.prepare_args(), dispatch); }));
  PrepareArgs prepare = refused.prepare_args();
  prepare.topk_idx = nullptr;
  EXPECT_TRUE(Throws("nvte_ep_prepare_and_dispatch", {"topk_idx", "null"},
                     [&] { PrepareAndDispatch(prepare, refused.dispatch_args()); }));
  before.Dispatch();
  before.CheckReceived();
  before.Combine();
  before.CheckCombined();
  EXPECT_TRUE(SameBits(refused.counts.Download(), Unwritten<std::int32_t>(refused.counts.size()), 1));
}

// A caller that knows its total from elsewhere.
TEST(TePrepareAndDispatch, InEagerMode) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 8);
  const Routing routing = RandomRouting(UnevenRows(30), 2, Experts(group), 6527);
  const Reference reference(routing, Experts(group), 8);
  Step<BFloat16> step(group, layer, routing, 6527, reference.Total(World::Get().rank()));
  PrepareAndDispatch(step.prepare_args(), step.dispatch_args());
  step.CheckCounts();
  step.CheckReceived();
  step.Combine();
  step.CheckCombined();
  step.Backward();
}

TEST(TePrepareAndDispatch, Mxfp8) {
  GroupShape shape;
  shape.hidden = 512;
  shape.alignment = 8;
  shape.dtype = kNVTEBFloat16;
  Group group(shape);
  Layer layer(2, 8);
  ScaledStep scaled(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 6950), 6950, 512);
  PrepareAndDispatch(scaled.step.prepare_args(), scaled.dispatch_args());
  scaled.step.CheckCounts();
  scaled.Check();
}

}  // namespace
}  // namespace test
