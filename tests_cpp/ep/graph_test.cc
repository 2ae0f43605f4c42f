// Steps captured into a CUDA graph and replayed.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"

namespace test {
namespace {

// What `calls` queues on the test's stream, as a graph.
class Graph {
 public:
  explicit Graph(const std::function<void()>& calls) {
    cudaStream_t stream = World::Get().stream();
    cudaGraph_t graph = nullptr;
    TEST_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    calls();
    TEST_CUDA(cudaStreamEndCapture(stream, &graph));
    TEST_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    TEST_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { EXPECT_EQ(cudaGraphExecDestroy(exec_), cudaSuccess); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void Launch() const {
    TEST_CUDA(cudaGraphLaunch(exec_, World::Get().stream()));
    World::Get().Wait();
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

class Graphs : public testing::Test {
 protected:
  Graphs() : group_(GroupShape()), layer_(2, 8) {}

  static Routing SomeRouting(const Group& group, std::uint64_t seed) {
    return RandomRouting(EvenRows(24), 2, Experts(group), seed);
  }

  // A whole step as a graph; the first uses of all kernels are behind it.
  template <typename Step>
  static Graph Capture(Step& step) {
    step.ForwardAndBackward();
    step.expert_out.Upload(step.ExpertOutput());
    step.UploadSlotGradients();
    return Graph([&] {
      step.Prepare();
      step.dispatch_args().Call();
      step.combine_args().Call();
      step.combine_bwd_args().Call();
      step.dispatch_bwd_args().Call();
    });
  }

  template <typename Step>
  static void ClearOutputs(Step& step) {
    step.counts.Clear();
    step.total.Clear();
    step.recv_tokens.Clear();
    step.recv_weights.Clear();
    step.result.Clear();
    step.grad_expert_out.Clear();
    step.grad_tokens.Clear();
    step.grad_weights.Clear();
  }

  template <typename Step>
  static void Check(Step& step) {
    step.CheckCounts();
    step.CheckReceived();
    step.CheckCombined();
    step.CheckCombineBwd();
    step.CheckDispatchBwd();
  }

  Group group_;
  Layer layer_;
};

// A replay routes anew: steps of other routings over the same handle memory, in between, leave no trace.
TEST_F(Graphs, EveryCallReplayed) {
  Step<BFloat16> step(group_, layer_, SomeRouting(group_, 8100), 8100);
  const Graph graph = Capture(step);
  for (int replay = 0; replay < 3; ++replay) {
    SCOPED_TRACE("replay " + std::to_string(replay));
    ClearOutputs(step);
    graph.Launch();
    Check(step);
    Step<BFloat16>(group_, layer_, SomeRouting(group_, 8101 + replay), 8101 + replay).ForwardAndBackward();
  }
}

// The indices are read at every replay, and what is counted starts from zero at every replay.
TEST_F(Graphs, OtherIndicesAtReplay) {
  Step<BFloat16, std::int32_t> step(group_, layer_, SomeRouting(group_, 8110), 8110);
  const std::vector<std::int32_t> first = step.topk_idx.Download();
  const Graph graph = Capture(step);
  const auto beyond = static_cast<std::int32_t>(Experts(group_));
  for (const std::int32_t nowhere : {-1, beyond, beyond + 3}) {
    SCOPED_TRACE("every index " + std::to_string(nowhere));
    step.topk_idx.Upload(std::vector<std::int32_t>(first.size(), nowhere));
    ClearOutputs(step);
    graph.Launch();
    EXPECT_EQ(step.counts.Download(), std::vector<std::int32_t>(group_.local_experts(), 0));
    EXPECT_TRUE(SameBits(step.result.Download(), std::vector<BFloat16>(step.rows() * step.hidden()), step.hidden()));
    EXPECT_TRUE(SameBits(step.grad_weights.Download(), std::vector<float>(first.size()), 2));
    NVTEEpExtRecvTotals totals = {};
    totals.struct_size = sizeof totals;
    nvte_ep_ext_recv_totals(HandleMemory(layer_.handle()), &totals, World::Get().stream());
    EXPECT_EQ(totals.needed, 0u);
    EXPECT_EQ(totals.not_experts, nowhere < 0 ? 0u : first.size());
    step.topk_idx.Upload(first);
    ClearOutputs(step);
    graph.Launch();
    Check(step);
  }
}

TEST_F(Graphs, ManyCapturesOfOneStep) {
  Step<BFloat16> step(group_, layer_, SomeRouting(group_, 8120), 8120);
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE("capture " + std::to_string(i));
    const Graph graph = Capture(step);
    ClearOutputs(step);
    graph.Launch();
    Check(step);
  }
}

}  // namespace
}  // namespace test
