// Groups without a fixed receive capacity (eager mode), and groups that drop what exceeds theirs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"

namespace test {
namespace {

// ---- eager mode ----

// A step as a framework runs it in eager mode: prepare, ask for the totals, which is the step's one wait, and only then
// allocate `extra` rows more than arrive.
template <typename T>
void RunEager(const Group& group, const Layer& layer, const Routing& routing, std::uint64_t seed,
              std::size_t extra = 0) {
  const int rank = World::Get().rank();
  const Reference reference(routing, Experts(group), layer.alignment());
  DeviceBuffer<std::int64_t> topk_idx(routing.expert[rank]);
  DeviceBuffer<std::int64_t> counts(group.local_experts()), total(1);
  const Tensor counts_t = counts.View({counts.size()}), total_t = total.View({1});
  {
    const Tensor topk_idx_t =
        topk_idx.View({static_cast<std::size_t>(routing.rows[rank]), static_cast<std::size_t>(layer.top_k())});
    MakePrepareArgs(layer.handle(), topk_idx_t.get(), counts_t.get(), total_t.get(), layer.top_k(), layer.alignment())
        .Call();
  }
  NVTEEpExtRecvTotals totals = {};
  totals.struct_size = sizeof totals;
  nvte_ep_ext_recv_totals(HandleMemory(layer.handle()), &totals, World::Get().stream());
  const auto rows = static_cast<std::int64_t>(totals.needed);
  ASSERT_EQ(rows, reference.Total(rank));
  ASSERT_EQ(totals.received, totals.needed);
  Step<T, std::int64_t, std::int64_t> step(group, layer, routing, seed, rows + extra);
  step.ForwardAndBackward();
}

TEST(Eager, BuffersOfTheStepsTotal) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(Eager(shape));
  Layer plain(4, 0), narrow(2, 0);
  const int totals[] = {64, 14, 17, 40, 12};
  for (int i = 0; i < 5; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    RunEager<BFloat16>(group, plain, RandomRouting(UnevenRows(totals[i]), 4, Experts(group), 6500 + i, 5), 6500 + i);
    RunEager<BFloat16>(group, narrow, RandomRouting(EvenRows(totals[i]), 2, Experts(group), 6510 + i), 6510 + i);
  }
}

TEST(Eager, PaddedSlabs) {
  GroupShape shape;
  shape.top_k = 2;
  Group group(Eager(shape));
  for (const std::size_t alignment : {2, 16}) {
    Layer layer(2, alignment);
    RunEager<BFloat16>(group, layer, RandomRouting(UnevenRows(50), 2, Experts(group), 6520), 6520);
  }
}

// Padding may take more rows than ep_size * max_tokens_per_rank * num_topk. All works, with NCCL EP but the gradient of
// dispatch, whose kernels would write beyond their staging rows, so it is refused.
TEST(EagerPadding, BeyondTheTokens) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 1024);
  const Routing routing = RandomRouting(EvenRows(60), 2, Experts(group), 6525);
  const Reference reference(routing, Experts(group), 1024);
  const std::int64_t total = reference.Total(World::Get().rank());
  ASSERT_GT(total, Ranks() * 64 * 2);
  Step<BFloat16> step(group, layer, routing, 6525, total);
  step.Prepare();
  step.CheckCounts();
  step.Dispatch();
  step.CheckReceived();
  step.Combine();
  step.CheckCombined();
  step.CombineBwd();
  step.CheckCombineBwd();
  if (OnNativeEngine()) {
    step.DispatchBwd();
    step.CheckDispatchBwd();
    return;
  }
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd",
                     {"grad must have at most ep_size * max_tokens_per_rank * num_topk rows", "larger num_topk"},
                     [&] { step.DispatchBwd(); }));
}

// One row less than arrives, on every rank.
TEST(Eager, FewerRowsThanTheTotal) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 8);
  const Routing routing = RandomRouting(EvenRows(40), 2, Experts(group), 6528);
  const Reference reference(routing, Experts(group), 8);
  const std::int64_t total = reference.Total(World::Get().rank());
  Step<BFloat16> step(group, layer, routing, 6528, total - 1);
  step.Prepare();
  step.CheckCounts();
  const std::string required = "rows that this rank receives in this step, " + std::to_string(total);
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"recv_tokens must have at least the " + required}, [&] { step.Dispatch(); }));
  // The calls alone: a step's uploads would not fit either.
  EXPECT_TRUE(Throws("nvte_ep_combine", {"expert_out must have at least the " + required},
                     [&] { step.combine_args().Call(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"must have at least the " + required}, [&] { step.CombineBwd(); }));
  EXPECT_TRUE(
      Throws("nvte_ep_dispatch_bwd", {"must have at least the " + required}, [&] { step.dispatch_bwd_args().Call(); }));
  RunEager<BFloat16>(group, layer, routing, 6529);
}

TEST(Eager, MoreRowsThanTheTotal) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 8);
  RunEager<BFloat16>(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 6530), 6530, 5);
}

// Every rank in turn gets no row; its receive-side tensors have no rows and no address.
TEST(EagerNothing, RanksThatReceiveNothing) {
  GroupShape shape;
  Group group(Eager(shape));
  const int local = group.local_experts();
  for (const std::size_t alignment : {0, 16}) {
    Layer layer(2, alignment);
    for (int without = 0; without < Ranks(); ++without) {
      SCOPED_TRACE("nothing for rank " + std::to_string(without) + ", alignment " + std::to_string(alignment));
      const Routing routing = MakeRouting(EvenRows(13), 2, [=](int rank, int row, int k) {
        const int target = (without + 1 + (rank + row) % (Ranks() - 1)) % Ranks();
        return target * local + (row + k) % local;
      });
      ASSERT_EQ(Reference(routing, Experts(group), alignment).Total(without), 0);
      RunEager<BFloat16>(group, layer, routing, 6540 + without);
    }
  }
}

// The same rank sends nothing either, and finally nobody sends anything.
TEST(EagerNothing, RanksThatDoNothing) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 8);
  const int local = group.local_experts();
  std::vector<int> rows = EvenRows(11);
  rows.back() = 0;
  const Routing routing =
      MakeRouting(rows, 2, [=](int, int row, int k) { return row % std::max(1, Ranks() - 1) * local + k; });
  RunEager<BFloat16>(group, layer, routing, 6550);
  RunEager<BFloat16>(group, layer, RoundRobin(EvenRows(0), 2, Experts(group)), 6551);
  RunEager<BFloat16>(group, layer, MakeRouting(EvenRows(5), 2, [](int, int, int) { return -1; }), 6552);
  RunEager<BFloat16>(group, layer, RandomRouting(EvenRows(64), 2, Experts(group), 6553), 6553);
}

TEST(EagerNothing, WithoutWeights) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 0);
  // Rank 0 receives nothing.
  const Routing routing = MakeRouting(
      EvenRows(9), 2, [&](int, int row, int k) { return group.local_experts() + (row + k) % group.local_experts(); });
  const Reference reference(routing, Experts(group), 0);
  Step<BFloat16> step(group, layer, routing, 6560, reference.Total(World::Get().rank()));
  step.Prepare();
  step.DispatchWithoutWeights();
  step.CheckReceived(/*with_weights=*/false);
  step.UploadSlotGradients();
  DispatchBwdArgs args = step.dispatch_bwd_args();
  args.g_recv_topk_weights = nullptr;
  args.grad_topk_weights = nullptr;
  args.Call();
  step.CheckTokenGradients();
}

// Layers may not have more experts per token than the group was told.
TEST(Eager, TopKBeyondTheGroups) {
  GroupShape shape;
  Group group(Eager(shape));
  EXPECT_TRUE(Throws(kLayerFunction, {"top_k", "num_topk, 2", "got 3"}, [] { Register(3, 0); }));
  Layer layer(2, 0);
  RunEager<BFloat16>(group, layer, RandomRouting(EvenRows(6), 2, Experts(group), 6570), 6570);
}

// ---- overflow ----

struct Overflowing {
  int top_k;
  std::size_t alignment;
  // The capacity is this part of what the fullest rank needs, less `less` rows.
  int divisor;
  int less;
};

void PrintTo(const Overflowing& p, std::ostream* out) {
  *out << "top_k " << p.top_k << " alignment " << p.alignment << " capacity 1/" << p.divisor << " - " << p.less;
}

std::string NameOf(const testing::TestParamInfo<Overflowing>& info) {
  const Overflowing& p = info.param;
  return "TopK" + std::to_string(p.top_k) + "Alignment" + std::to_string(p.alignment) + "Part" +
         std::to_string(p.divisor) + "Less" + std::to_string(p.less);
}

class Drop : public testing::TestWithParam<Overflowing> {
 protected:
  // One step whose fullest rank gets more than it takes. The rows behind the capacity are canaries.
  static void Run(const Group& group, const Layer& layer, const Routing& routing, std::uint64_t seed) {
    const int rank = World::Get().rank();
    const std::int64_t capacity = group.config().max_recv_tokens_per_rank;
    Step<BFloat16, std::int64_t, std::int64_t> step(group, layer, routing, seed, capacity + 37);
    ASSERT_EQ(step.slots().size(), static_cast<std::size_t>(capacity));
    step.ForwardAndBackward();
    const std::vector<std::int64_t> counts = step.counts.Download();
    EXPECT_LE(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), capacity);
    const Reference undropped(routing, Experts(group), layer.alignment());
    EXPECT_EQ(step.reference().Total(rank), static_cast<std::int64_t>(undropped.Slots(rank).size()));
  }
};

TEST_P(Drop, EverythingForOneRank) {
  const Overflowing p = GetParam();
  GroupShape shape;
  shape.top_k = p.top_k;
  const int demand = Ranks() * 64 * p.top_k;
  Group group(Dropping(shape, std::max(64, demand / p.divisor - p.less)));
  Layer layer(p.top_k, p.alignment);
  const int local = group.local_experts();
  for (int target = 0; target < 2; ++target) {
    const Routing routing =
        MakeRouting(EvenRows(64), p.top_k, [=](int, int row, int k) { return target * local + (row + k) % local; });
    Run(group, layer, routing, 6600 + target);
  }
  // Every token to the second expert, in the first column.
  Run(group, layer, MakeRouting(EvenRows(64), p.top_k, [=](int, int, int k) { return (1 + k) % local; }), 6602);
}

TEST_P(Drop, SkewedAtRandom) {
  const Overflowing p = GetParam();
  GroupShape shape;
  shape.top_k = p.top_k;
  Group group(Dropping(shape, 64));
  Layer layer(p.top_k, p.alignment);
  const int local = group.local_experts();
  for (int seed = 6610; seed < 6614; ++seed) {
    // Two thirds of the tokens for the first rank, the others for any, some entries masked.
    const Routing routing = MakeRouting(UnevenRows(64), p.top_k, [=](int rank, int row, int k) -> std::int64_t {
      if (Mix(seed, rank, row, k) % 20 == 0) return -1;
      const std::uint64_t dice = Mix(seed, rank, row);
      const int target = dice % 3 == 0 ? static_cast<int>((dice >> 8) % Ranks()) : 0;
      return target * local + (row + k) % local;
    });
    Run(group, layer, routing, seed);
  }
}

// Nothing to drop: nothing but the rows behind the slabs may differ from a step without the policy.
TEST_P(Drop, WithinTheCapacity) {
  const Overflowing p = GetParam();
  GroupShape shape;
  shape.top_k = p.top_k;
  shape.alignment = 16;
  Group group(Dropping(shape, shape.Config().max_recv_tokens_per_rank));
  Layer layer(p.top_k, p.alignment);
  Run(group, layer, RandomRouting(UnevenRows(40), p.top_k, Experts(group), 6620), 6620);
  Run(group, layer, RoundRobin(EvenRows(0), p.top_k, Experts(group)), 6621);
}

INSTANTIATE_TEST_SUITE_P(Overflow, Drop,
                         testing::Values(Overflowing{2, 0, 2, 0}, Overflowing{2, 16, 2, 0}, Overflowing{2, 16, 2, 5},
                                         Overflowing{2, 0, 4, 0}, Overflowing{1, 0, 2, 0}, Overflowing{4, 16, 8, 3}),
                         NameOf);

}  // namespace
}  // namespace test
