// What one rank alone gets wrong: it is told before anything is communicated, so that it can call again, rightly, while
// its peers wait for it. (A rank that does not call again is named by whoever waits: that is for the run time below.)

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ep/rig.h"

namespace test {
namespace {

class OneRank : public ErrorTest {
 protected:
  static bool Wrong() { return World::Get().rank() == Ranks() - 1; }

  // On the last rank the call is refused; then every rank makes it as it should be.
  template <typename Args>
  static void RefusedThere(const std::string& function, const std::vector<std::string>& parts, const Args& wrong,
                           const Args& right) {
    if (Wrong()) {
      EXPECT_TRUE(Throws(function, parts, [&] { wrong.Call(); }));
    }
    right.Call();
  }
};

TEST_F(OneRank, EveryCallIsMadeAgain) {
  Step<BFloat16> next(rig().group, rig().layer, RandomRouting(UnevenRows(20), kTopK, Experts(rig().group), 9500), 9500);
  next.expert_out.Upload(next.ExpertOutput());
  next.UploadSlotGradients();

  PrepareArgs prepare = next.prepare_args();
  const Tensor many = Any(kNVTEInt64, {kMaxTokens + 1, kTopK});
  prepare.topk_idx = many.get();
  RefusedThere("nvte_ep_prepare", {"topk_idx", "max_tokens_per_rank", "64, got 65"}, prepare, next.prepare_args());
  next.CheckCounts();

  DispatchArgs dispatch = next.dispatch_args();
  const Tensor row_more = Any(kNVTEBFloat16, {next.rows() + 1, kHidden});
  dispatch.tokens = row_more.get();
  RefusedThere("nvte_ep_dispatch", {"tokens", "got [" + std::to_string(next.rows() + 1)}, dispatch,
               next.dispatch_args());
  next.CheckReceived();

  // As where a rank without tokens for its experts passes on the type that it dispatched.
  CombineArgs combine = next.combine_args();
  const Tensor e4m3 = Any(kNVTEFloat8E4M3, {capacity(), kHidden});
  combine.expert_out = e4m3.get();
  RefusedThere("nvte_ep_combine", {"expert_out", "e4m3"}, combine, next.combine_args());
  next.CheckCombined();

  CombineBwdArgs combine_bwd = next.combine_bwd_args();
  combine_bwd.grad = nullptr;
  RefusedThere("nvte_ep_combine_bwd", {"grad", "null"}, combine_bwd, next.combine_bwd_args());
  next.CheckCombineBwd();

  DispatchBwdArgs dispatch_bwd = next.dispatch_bwd_args();
  const Tensor narrow = Any(kNVTEBFloat16, {capacity(), 128});
  dispatch_bwd.grad = narrow.get();
  RefusedThere("nvte_ep_dispatch_bwd", {"grad", "128"}, dispatch_bwd, next.dispatch_bwd_args());
  next.CheckDispatchBwd();
}

// A warm-up with more tokens than the group takes, on one rank, before its first real step.
TEST_F(OneRank, WarmUpBeyondTheLimit) {
  Group* const group = &rig().group;
  for (const std::size_t rows : {kMaxTokens + 1, 2 * kMaxTokens}) {
    if (Wrong()) {
      PrepareArgs args = step().prepare_args();
      const Tensor tensor = Any(kNVTEInt64, {rows, kTopK});
      args.topk_idx = tensor.get();
      EXPECT_TRUE(
          Throws("nvte_ep_prepare", {"max_tokens_per_rank", "64, got " + std::to_string(rows)}, [&] { args.Call(); }));
    }
    Step<BFloat16>(*group, rig().layer, RandomRouting(EvenRows(kMaxTokens), kTopK, Experts(*group), rows), rows)
        .ForwardAndBackward();
  }
}

}  // namespace
}  // namespace test
