// Steps captured into a CUDA graph and replayed.

#include "ep/graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {
namespace {

// Streams that end with their test.
class SideStream {
 public:
  SideStream() { TEST_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~SideStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Elements of cudaMallocHost.
template <typename T>
class Pinned {
 public:
  explicit Pinned(std::size_t count) : count_(count) {
    void* data = nullptr;
    TEST_CUDA(cudaMallocHost(&data, count * sizeof(T)));
    data_ = static_cast<T*>(data);
    Fill(-1);
  }
  ~Pinned() { static_cast<void>(cudaFreeHost(data_)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  void Fill(T value) { std::fill(data_, data_ + count_, value); }
  T* data() const { return data_; }
  std::vector<T> values() const { return std::vector<T>(data_, data_ + count_); }

 private:
  std::size_t count_;
  T* data_ = nullptr;
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
    UploadInputs(step);
    return Graph([&] { EnqueueAll(step); });
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
    CheckAll(step);
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
    CheckAll(step);
  }
}

// A handle that is prepared by a graph and by calls in turn, with other token counts: each backward pass goes by what
// the memory holds, and one of the other count is refused.
TEST_F(Graphs, PreparedByGraphAndByCallsInTurn) {
  const auto routing = [&](int rows, std::uint64_t seed) {
    return RandomRouting(EvenRows(rows), 2, Experts(group_), seed);
  };
  Step<BFloat16> captured(group_, layer_, routing(10, 8115), 8115), eager(group_, layer_, routing(20, 8116), 8116);
  captured.ForwardAndBackward();
  eager.ForwardAndBackward();
  const Graph graph([&] { captured.prepare_args().Call(); });
  // The capture has prepared nothing.
  eager.CombineBwd();
  eager.CheckCombineBwd();
  const auto refused = [](Step<BFloat16>& step, const char* count) {
    EXPECT_TRUE(Throws("nvte_ep_combine_bwd", {"grad", "as the prepared topk_idx", count}, [&] { step.CombineBwd(); }));
  };
  refused(captured, "20");
  graph.Launch();
  captured.CombineBwd();
  captured.CheckCombineBwd();
  refused(eager, "10");
  eager.Prepare();
  eager.CombineBwd();
  eager.CheckCombineBwd();
  refused(captured, "20");
}

// What is captured goes by the prepare that comes last: of a call, though an earlier graph prepared another number of
// tokens.
TEST_F(Graphs, CapturedAfterACallPreparedAnew) {
  const auto routing = [&](int rows, std::uint64_t seed) {
    return RandomRouting(EvenRows(rows), 2, Experts(group_), seed);
  };
  Step<BFloat16> eight(group_, layer_, routing(8, 8117), 8117), four(group_, layer_, routing(4, 8118), 8118);
  eight.ForwardAndBackward();
  four.ForwardAndBackward();
  const Graph prepares([&] { eight.prepare_args().Call(); });
  prepares.Launch();
  four.Prepare();
  four.recv_tokens.Clear();
  const Graph dispatches([&] { four.dispatch_args().Call(); });
  dispatches.Launch();
  four.CheckReceived();
}

TEST_F(Graphs, ManyCapturesOfOneStep) {
  Step<BFloat16> step(group_, layer_, SomeRouting(group_, 8120), 8120);
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE("capture " + std::to_string(i));
    const Graph graph = Capture(step);
    ClearOutputs(step);
    graph.Launch();
    CheckAll(step);
  }
}

// Any routing of as many tokens at a replay: another one, everything for one rank, and each rank in turn without a
// single expert.
TEST_F(Graphs, OtherRoutingAtReplay) {
  const std::vector<int> rows = UnevenRows(24);
  const auto routing = [&](std::uint64_t seed) { return RandomRouting(rows, 2, Experts(group_), seed, 10); };
  Step<BFloat16> step(group_, layer_, routing(8130), 8130);
  const Graph graph = Capture(step);
  std::vector<Routing> others = {routing(8131), routing(8132)};
  for (int target = 0; target < Ranks(); ++target) {
    const int local = group_.local_experts();
    others.push_back(MakeRouting(rows, 2, [=](int, int row, int k) { return target * local + (row + k) % local; }));
  }
  for (int empty = 0; empty < Ranks(); ++empty) {
    const Routing full = routing(8133);
    others.push_back(MakeRouting(
        rows, 2, [&](int rank, int row, int k) -> std::int64_t { return rank == empty ? -1 : full.at(rank, row, k); }));
  }
  others.push_back(MakeRouting(rows, 2, [](int, int, int) { return -1; }));
  for (std::size_t i = 0; i < others.size(); ++i) {
    SCOPED_TRACE("routing " + std::to_string(i));
    ReplayAs(step, graph, others[i], 8134 + i);
  }
}

// Counts, and where the ABI has it the total, are of this replay, wherever they lie.
TEST_F(Graphs, CountsOfEveryReplay) {
  const std::vector<int> rows = EvenRows(20);
  const auto routing = [&](std::uint64_t seed) { return RandomRouting(rows, 2, Experts(group_), seed); };
  Step<BFloat16> step(group_, layer_, routing(8140), 8140);
  step.ForwardAndBackward();
  const int local = group_.local_experts();
  Pinned<std::int32_t> counts(local), total(1);
  const Tensor counts_t(counts.data(), kNVTEInt32, {static_cast<std::size_t>(local)});
  const Tensor total_t(total.data(), kNVTEInt32, {1});
  const Graph on_device([&] { step.Prepare(); });
  const Graph pinned([&] {
    MakePrepareArgs(layer_.handle(), step.topk_idx_t.get(), counts_t.get(), total_t.get(), 2, layer_.alignment())
        .Call();
  });
  for (std::uint64_t seed = 8141; seed < 8151; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    step.Renew(routing(seed), seed);
    step.counts.Clear();
    step.total.Clear();
    on_device.Launch();
    step.CheckCounts();
    counts.Fill(-1);
    total.Fill(-1);
    pinned.Launch();
    const std::vector<std::int64_t>& expected = step.reference().Counts(World::Get().rank());
    EXPECT_EQ(counts.values(), std::vector<std::int32_t>(expected.begin(), expected.end()));
    if (kReportsTotal) {
      EXPECT_EQ(total.values()[0], step.reference().Total(World::Get().rank()));
    }
  }
}

// Warmed up on one stream, captured on a second, launched on a third, and nobody waits in between.
TEST_F(Graphs, ThreeStreamsWithoutAWait) {
  SideStream streams[3];
  Step<BFloat16> step(group_, layer_, SomeRouting(group_, 8150), 8150);
  UploadInputs(step);
  EnqueueAll(step, streams[0].get());
  const Graph graph([&] { EnqueueAll(step, streams[1].get()); }, streams[1].get());
  cudaEvent_t warm = nullptr;
  TEST_CUDA(cudaEventCreateWithFlags(&warm, cudaEventDisableTiming));
  TEST_CUDA(cudaEventRecord(warm, streams[0].get()));
  TEST_CUDA(cudaStreamWaitEvent(streams[2].get(), warm, 0));
  for (int replay = 0; replay < 5; ++replay) graph.Enqueue(streams[2].get());
  World::Get().Wait(streams[2].get());
  CheckAll(step);
  ClearOutputs(step);
  World::Get().Wait();
  graph.Enqueue(streams[2].get());
  World::Get().Wait(streams[2].get());
  CheckAll(step);
  TEST_CUDA(cudaEventDestroy(warm));
}

TEST_F(Graphs, CyclesOfCaptureReplayAndDestroy) {
  Step<BFloat16> step(group_, layer_, RandomRouting(EvenRows(3), 2, Experts(group_), 8160), 8160);
  step.ForwardAndBackward();
  UploadInputs(step);
  const auto cycle = [&] {
    const Graph graph([&] { EnqueueAll(step); });
    for (int replay = 0; replay < 10; ++replay) graph.Enqueue();
    World::Get().Wait();
  };
  cycle();
  const std::optional<HostStats> before = ReadHostStats();
  const int cycles = EveryShapeIsCheap() ? 30 : 100;
  for (int i = 0; i < cycles; ++i) cycle();
  ClearOutputs(step);
  Graph([&] { EnqueueAll(step); }).Launch();
  CheckAll(step);
  const std::optional<HostStats> after = ReadHostStats();
  if (!before || !after) return;
  EXPECT_EQ(after->device_allocations_live, before->device_allocations_live);
  EXPECT_EQ(after->handles_created, before->handles_created);
}

// The first call of all on a layer, inside a capture of each mode: it either works, or is refused with words and leaves
// the capture whole. On the host runtime it works.
TEST(GraphsFromTheStart, FirstUseInEveryCaptureMode) {
  if (!EveryShapeIsCheap() && std::getenv("NVTE_EP_TEST_FIRST_USE_IN_CAPTURE") == nullptr) {
    GTEST_SKIP() << "NCCL EP compiles and loads its kernels at their first use, and aborts where it cannot: set "
                    "NVTE_EP_TEST_FIRST_USE_IN_CAPTURE=1 and run this test alone";
  }
  const std::pair<cudaStreamCaptureMode, int> modes[] = {
      {cudaStreamCaptureModeGlobal, 384}, {cudaStreamCaptureModeThreadLocal, 640}, {cudaStreamCaptureModeRelaxed, 896}};
  for (const auto& [mode, hidden] : modes) {
    SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)));
    GroupShape shape;
    // Kernels of its own.
    shape.hidden = hidden;
    shape.alignment = 8;
    Group group(shape);
    Layer layer(2, 8);
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 8170), 8170);
    UploadInputs(step);
    World::Get().Wait();
    std::unique_ptr<Graph> graph;
    std::string refused;
    cudaStream_t stream = World::Get().stream();
    try {
      graph = std::make_unique<Graph>(
          [&] {
            try {
              EnqueueAll(step);
            } catch (const std::exception& error) {
              refused = error.what();
            }
          },
          stream, mode);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the capture did not survive: " << error.what() << " (" << refused << ")";
    }
    if (refused.empty()) {
      ASSERT_NE(graph, nullptr);
      for (int replay = 0; replay < 3; ++replay) {
        ClearOutputs(step);
        graph->Launch();
        CheckAll(step);
      }
    } else {
      EXPECT_FALSE(EveryShapeIsCheap()) << refused;
      EXPECT_NE(refused.find("before the capture"), std::string::npos) << refused;
    }
    step.ForwardAndBackward();
  }
}

// In eager mode the host reads every step's total, so a capture is refused by all calls, and is whole afterwards.
TEST(GraphsFromTheStart, EagerModeIsRefused) {
  Group group(Eager(GroupShape()));
  Layer layer(2, 8);
  const Routing routing = RandomRouting(UnevenRows(20), 2, Experts(group), 8180);
  const Reference reference(routing, Experts(group), 8);
  Step<BFloat16> step(group, layer, routing, 8180, reference.Total(World::Get().rank()));
  step.ForwardAndBackward();
  UploadInputs(step);
  const std::vector<std::string> parts = {"captures a graph", "eager mode", "max_recv_tokens_per_rank > 0"};
  const Graph empty([&] {
    EXPECT_TRUE(Throws("nvte_ep_prepare", parts, [&] { step.Prepare(); }));
    EXPECT_TRUE(Throws("nvte_ep_dispatch", parts, [&] { step.Dispatch(); }));
    EXPECT_TRUE(Throws("nvte_ep_combine", parts, [&] { step.combine_args().Call(); }));
    EXPECT_TRUE(Throws("nvte_ep_combine_bwd", parts, [&] { step.CombineBwd(); }));
    EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", parts, [&] { step.dispatch_bwd_args().Call(); }));
  });
  empty.Launch();
  step.ForwardAndBackward();
}

// A call in the legacy stream that is refused, and would look into its memory first, does no harm to the capture of a
// stream that the legacy stream waits for.
TEST(GraphsFromTheStart, ARefusalInTheLegacyStreamKeepsOtherCaptures) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(EvenRows(9), 2, Experts(group), 8140), 8140);
  step.ForwardAndBackward();
  World::Get().Wait();
  DispatchArgs wrong = step.dispatch_args();
  const Tensor short_tokens(step.tokens.data(), kNVTEBFloat16, {5, step.hidden()});
  wrong.tokens = short_tokens.get();
  const auto legacy = reinterpret_cast<cudaStream_t>(1);  // cudaStreamLegacy
  for (const auto mode :
       {cudaStreamCaptureModeRelaxed, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
      for (const cudaStream_t at : {cudaStream_t{}, legacy}) {
        SCOPED_TRACE("mode " + std::to_string(mode) + ", flags " + std::to_string(flags));
        cudaStream_t stream = nullptr;
        TEST_CUDA(cudaStreamCreateWithFlags(&stream, flags));
        TEST_CUDA(cudaStreamBeginCapture(stream, mode));
        EXPECT_TRUE(Throws("nvte_ep_dispatch", {"tokens", "9, got [5"}, [&] { wrong.Call(at); }));
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        if (graph != nullptr) TEST_CUDA(cudaGraphDestroy(graph));
        TEST_CUDA(cudaStreamDestroy(stream));
      }
    }
  }
  step.ForwardAndBackward();
}

// Memory that was moved has to be looked into, which a capture forbids: refused with the remedy, and the capture is
// whole.
TEST(GraphsFromTheStart, MovedMemoryIsRefused) {
  GroupShape shape;
  shape.allow_handle_mem_reloc = 1;
  Group group(shape);
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(20), 2, Experts(group), 8190), 8190);
  step.ForwardAndBackward();
  UploadInputs(step);
  DeviceBuffer<std::uint8_t> moved(layer.memory().Download());
  const Tensor mem = moved.View({moved.size()});
  step.UseHandle(layer.HandleOver(mem));
  const std::vector<std::string> parts = {"captures a graph", "once before the capture"};
  const Graph empty([&] {
    EXPECT_TRUE(Throws("nvte_ep_dispatch", parts, [&] { step.Dispatch(); }));
    EXPECT_TRUE(Throws("nvte_ep_combine", parts, [&] { step.combine_args().Call(); }));
  });
  empty.Launch();
  // The remedy, and then the same capture.
  ClearOutputs(step);
  step.Dispatch();
  const Graph graph([&] {
    step.Dispatch();
    step.combine_args().Call();
  });
  graph.Launch();
  step.CheckReceived();
  step.CheckCombined();
}

}  // namespace
}  // namespace test
