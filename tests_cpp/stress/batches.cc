#include "stress/batches.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ep/graph.h"
#include "support/host_stats.h"
#include "support/symm.h"

namespace test {
namespace {

enum Act : int { kDispatch, kCombine, kCombineBwd, kDispatchBwd, kActs };

cudaStreamCaptureMode DrawMode(Dice& dice) {
  return dice.OneOf<cudaStreamCaptureMode>({cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeThreadLocal,
                                            cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed});
}

template <typename T, typename Index = std::int64_t, typename Count = std::int32_t>
class StepBatch : public Batch {
 public:
  StepBatch(const Group& group, MovableLayer& layer, const Given& given, std::uint64_t seed, std::size_t recv_rows,
            std::size_t hidden, bool may_differentiate)
      : group_(group),
        layer_(layer),
        step_(group, layer.layer, given.routing, seed, recv_rows, hidden),
        // In eager mode the receive buffers are as long as the first routing asks for.
        fixed_(group.config().max_recv_tokens_per_rank > 0),
        may_differentiate_(may_differentiate) {
    step_.UseHandle(layer.handle());
    Name(step_, given);
  }

  void UseHandle(const Handle& handle) override { step_.UseHandle(handle); }
  bool HoldsMemory() const override { return graph_ != nullptr; }

  void Act(Dice& dice, Lanes& lanes) override {
    if (!prepared_) {
      Prepare(dice, lanes);
      prepared_ = true;
      return;
    }
    const int form = dice.Between(0, 99);
    if (form < 8) return lanes.Call(dice, [&](cudaStream_t stream) { step_.CheckTotals(stream); });
    if (fixed_ && form < 14) return Interrupt(dice, lanes);
    if (fixed_ && form < 22) return Another(dice, lanes);
    if (fixed_ && graph_ == nullptr && form < 40) return Capture(dice, lanes);
    if (graph_ != nullptr && form < 70) return Replay(dice, lanes, dice.Percent(70));
    if (graph_ != nullptr && form < 75) {
      World::Get().Wait();
      graph_.reset();
      return;
    }
    One(dice, lanes);
  }

  void Finish() override {
    CheckPending();
    World::Get().Wait();
    graph_.reset();
    if (!step_.topk_idx.GuardIntact() || !step_.tokens.GuardIntact() || !step_.weights.GuardIntact()) {
      Fail("wrote behind an input");
    }
  }

 private:
  const std::vector<int>& Rows() const { return step_.reference().routing().rows; }

  // Prepares by a call, which may dispatch too.
  void Prepare(Dice& dice, Lanes& lanes) {
    layer_.Used(Rows());
    combinable_ = false;
    if (dice.Percent(30)) {
      const bool with_weights = dice.Percent(75);
      const DispatchArgs args = Dispatching(with_weights);
      lanes.Call(dice, [&](cudaStream_t stream) { CallPrepareAndDispatch(step_.prepare_args(), args, stream); });
      pending_[kDispatch] = true;
      combinable_ = with_weights;
    } else {
      lanes.Call(dice, [&](cudaStream_t stream) { step_.prepare_args().Call(stream); });
    }
    step_.CheckCounts();
  }

  // Another routing and other tokens, of as many, in the same memory.
  void Renew(Dice& dice) {
    const Routing& before = step_.reference().routing();
    const Given given =
        DrawRouting(dice, before.rows, before.top_k, group_.config().num_experts, group_.local_experts());
    step_.Renew(given.routing, dice.Number() % 1000000);
    Name(step_, given);
  }
  void Another(Dice& dice, Lanes& lanes) {
    CheckPending();
    Renew(dice);
    Prepare(dice, lanes);
  }

  // A step of its own, with other token counts, over the same handle memory.
  void Interrupt(Dice& dice, Lanes& lanes) {
    CheckPending();
    const std::vector<int> rows = DrawRows(dice, 0, group_.config().max_tokens_per_rank);
    const Given given =
        DrawRouting(dice, rows, layer_.layer.top_k(), group_.config().num_experts, group_.local_experts());
    Step<T, Index, Count> other(group_, layer_.layer, given.routing, dice.Number() % 1000000, step_.recv_rows(),
                                step_.hidden());
    other.UseHandle(layer_.handle());
    layer_.Used(rows);
    Name(other, given);
    lanes.Call(dice, [&](cudaStream_t stream) { other.prepare_args().Call(stream); });
    lanes.Call(dice, [&](cudaStream_t stream) { other.dispatch_args().Call(stream); });
    other.CheckCounts();
    other.CheckReceived();
    if (graph_ != nullptr && dice.Percent(70)) return Replay(dice, lanes, /*anew=*/true);
    Prepare(dice, lanes);
  }

  void Capture(Dice& dice, Lanes& lanes) {
    layer_.Used(Rows());
    CheckPending();
    in_graph_ = {};
    prepare_in_graph_ = dice.Percent(60);
    bool any = prepare_in_graph_;
    for (int act = 0; act < kActs; ++act) {
      in_graph_[act] = dice.Percent(60) && (act != kDispatchBwd || may_differentiate_);
      any = any || in_graph_[act];
    }
    if (!any) in_graph_[kDispatch] = true;
    weights_in_graph_ = dice.Percent(75);
    // The graph prepares, or is launched after another prepare: its combine needs a forward dispatch of its own.
    if (in_graph_[kCombine]) in_graph_[kDispatch] = weights_in_graph_ = true;
    combinable_ = false;
    fused_in_graph_ = dice.Percent(40);
    // The first use of a shape compiles kernels, which a capture does not take.
    UploadInputs(step_);
    ClearOutputs(step_);
    lanes.Call(dice, [&](cudaStream_t stream) { CallAsInGraph(stream); });
    CheckOfGraph();
    const cudaStreamCaptureMode mode = DrawMode(dice);
    lanes.Call(dice, [&](cudaStream_t stream) {
      graph_ = std::make_unique<Graph>([&] { CallAsInGraph(stream); }, stream, mode);
    });
  }

  void CallAsInGraph(cudaStream_t stream) {
    DispatchArgs dispatch = step_.dispatch_args();
    if (!weights_in_graph_) dispatch.topk_weights = dispatch.recv_topk_weights = nullptr;
    const bool fused = fused_in_graph_ && prepare_in_graph_ && in_graph_[kDispatch];
    if (fused) {
      CallPrepareAndDispatch(step_.prepare_args(), dispatch, stream);
    } else {
      if (prepare_in_graph_) step_.prepare_args().Call(stream);
      if (in_graph_[kDispatch]) dispatch.Call(stream);
    }
    if (in_graph_[kCombine]) step_.combine_args().Call(stream);
    if (in_graph_[kCombineBwd]) step_.combine_bwd_args().Call(stream);
    if (in_graph_[kDispatchBwd]) step_.dispatch_bwd_args().Call(stream);
  }

  // Launches the graph: with the inputs of before, or `anew` with other ones, which a call prepares if the graph does
  // not.
  void Replay(Dice& dice, Lanes& lanes, bool anew) {
    layer_.Used(Rows());
    CheckPending();
    combinable_ = false;
    if (anew) Renew(dice);
    if (anew && !prepare_in_graph_) {
      lanes.Call(dice, [&](cudaStream_t stream) { step_.prepare_args().Call(stream); });
      step_.CheckCounts();
    }
    UploadInputs(step_);
    ClearOutputs(step_);
    for (int launches = dice.Between(1, 3); launches > 0; --launches) {
      lanes.Call(dice, [&](cudaStream_t stream) { graph_->Enqueue(stream); });
      ++TheFigures().replays;
    }
    CheckOfGraph();
  }

  void CheckOfGraph() {
    if (prepare_in_graph_) step_.CheckCounts();
    with_weights_ = weights_in_graph_;
    for (int act = 0; act < kActs; ++act) {
      if (in_graph_[act]) Check(act);
    }
  }

  DispatchArgs Dispatching(bool with_weights) {
    step_.recv_tokens.Clear();
    step_.recv_weights.Clear();
    DispatchArgs args = step_.dispatch_args();
    with_weights_ = with_weights;
    if (!with_weights) args.topk_weights = args.recv_topk_weights = nullptr;
    return args;
  }

  void Dispatch(Dice& dice, Lanes& lanes, bool with_weights) {
    const DispatchArgs args = Dispatching(with_weights);
    lanes.Call(dice, [&](cudaStream_t stream) { args.Call(stream); });
    combinable_ = combinable_ || with_weights;
  }

  // One of the calls that follow prepare.
  void One(Dice& dice, Lanes& lanes) {
    const int act = dice.Between(0, kActs - 1);
    const bool with_weights = !dice.Percent(25), check_now = dice.Percent(40);
    if (act == kDispatchBwd && !may_differentiate_) return;
    layer_.Used(Rows(), act == kDispatchBwd);
    if (pending_[act]) Check(act);
    switch (act) {
      case kDispatch:
        Dispatch(dice, lanes, with_weights);
        break;
      case kCombine:
        // Rows are combined by the routing that dispatched them.
        if (!combinable_) {
          if (pending_[kDispatch]) Check(kDispatch);
          Dispatch(dice, lanes, true);
          pending_[kDispatch] = true;
        }
        step_.result.Clear();
        step_.expert_out.Upload(step_.ExpertOutput());
        lanes.Call(dice, [&](cudaStream_t stream) { step_.combine_args().Call(stream); });
        break;
      case kCombineBwd:
        step_.grad_expert_out.Clear();
        lanes.Call(dice, [&](cudaStream_t stream) { step_.combine_bwd_args().Call(stream); });
        break;
      default:
        step_.grad_tokens.Clear();
        step_.grad_weights.Clear();
        step_.UploadSlotGradients();
        lanes.Call(dice, [&](cudaStream_t stream) { step_.dispatch_bwd_args().Call(stream); });
        break;
    }
    pending_[act] = true;
    if (check_now) Check(act);
  }

  void CheckPending() {
    for (int act = 0; act < kActs; ++act) {
      if (pending_[act]) Check(act);
    }
  }
  void Check(int act) {
    pending_[act] = false;
    switch (act) {
      case kDispatch:
        step_.CheckReceived(with_weights_);
        break;
      case kCombine:
        step_.CheckCombined();
        break;
      case kCombineBwd:
        step_.CheckCombineBwd();
        break;
      default:
        step_.CheckDispatchBwd();
        break;
    }
  }

  const Group& group_;
  MovableLayer& layer_;
  Step<T, Index, Count> step_;
  const bool fixed_;
  const bool may_differentiate_;
  bool prepared_ = false;
  bool with_weights_ = true;
  std::array<bool, kActs> pending_ = {};
  std::unique_ptr<Graph> graph_;
  std::array<bool, kActs> in_graph_ = {};
  // Whether the latest routing has dispatched forward by a call, so that a combine by a call has rows of it.
  bool combinable_ = false;
  bool prepare_in_graph_ = false, weights_in_graph_ = false, fused_in_graph_ = false;
};

// The same with payloads in symmetric memory, on the world's stream; a graph holds one call.
template <typename T>
class PlacedBatch : public Batch {
 public:
  PlacedBatch(const Group& group, MovableLayer& layer, const Given& given, std::uint64_t seed, std::size_t hidden,
              unsigned payloads, bool with_address)
      : group_(group),
        layer_(layer),
        step_(group, layer.layer, given.routing, seed, 0, hidden),
        placed_(step_, payloads, with_address, 16) {
    step_.UseHandle(layer.handle());
    Name(step_, given);
  }

  void UseHandle(const Handle& handle) override { step_.UseHandle(handle); }
  bool HoldsMemory() const override {
    return std::any_of(graphs_.begin(), graphs_.end(), [](const auto& graph) { return graph != nullptr; });
  }

  void Act(Dice& dice, Lanes&) override {
    layer_.Used(step_.reference().routing().rows);
    if (!prepared_ || dice.Percent(15)) return Prepare(dice);
    const int act = dice.Between(0, kActs - 1);
    std::unique_ptr<Graph>& graph = graphs_[act];
    if (graph != nullptr && dice.Percent(20)) graph.reset();
    switch (act) {
      case kDispatch:
        Dispatch(dice);
        break;
      case kCombine:
        // Rows are combined by the routing that dispatched them.
        if (!combinable_) Dispatch(dice);
        step_.result.Clear();
        placed_.Combine([&](const CombineArgs& args) { Make(dice, graph, args); });
        step_.CheckCombined();
        break;
      case kCombineBwd:
        step_.grad_expert_out.Clear();
        placed_.CombineBwd([&](const CombineBwdArgs& args) { Make(dice, graph, args); });
        step_.CheckCombineBwd();
        break;
      default:
        step_.grad_tokens.Clear();
        step_.grad_weights.Clear();
        placed_.DispatchBwd([&](const DispatchBwdArgs& args) { Make(dice, graph, args); });
        step_.CheckDispatchBwd();
        break;
    }
  }

  void Finish() override {
    World::Get().Wait();
    graphs_ = {};
  }

 private:
  // With a routing that is new, from the second time on.
  void Prepare(Dice& dice) {
    if (prepared_) {
      const Routing& before = step_.reference().routing();
      const Given given =
          DrawRouting(dice, before.rows, before.top_k, group_.config().num_experts, group_.local_experts());
      step_.Renew(given.routing, dice.Number() % 1000000);
      Name(step_, given);
    }
    prepared_ = true;
    combinable_ = dice.Percent(40);
    if (combinable_) {
      step_.recv_tokens.Clear();
      step_.recv_weights.Clear();
      placed_.Dispatch(
          [&](const DispatchArgs& args) { CallPrepareAndDispatch(step_.prepare_args(), args, World::Get().stream()); });
      step_.CheckReceived();
    } else {
      step_.Prepare();
    }
    step_.CheckCounts();
  }

  void Dispatch(Dice& dice) {
    step_.recv_tokens.Clear();
    step_.recv_weights.Clear();
    placed_.Dispatch([&](const DispatchArgs& args) { Make(dice, graphs_[kDispatch], args); });
    step_.CheckReceived();
    combinable_ = true;
  }

  // By the graph, if there is one. Otherwise by a call, and then one more as a graph, from now on.
  template <typename Args>
  void Make(Dice& dice, std::unique_ptr<Graph>& graph, const Args& args) {
    if (graph == nullptr) {
      args.Call();
      if (!dice.Percent(20)) return;
      graph = std::make_unique<Graph>([&] { args.Call(); }, World::Get().stream(), DrawMode(dice));
      return;
    }
    graph->Launch();
    ++TheFigures().replays;
  }

  const Group& group_;
  MovableLayer& layer_;
  Step<T> step_;
  PlacedStep<T> placed_;
  std::array<std::unique_ptr<Graph>, kActs> graphs_;
  // Whether the latest routing has dispatched, so that there are rows of it to combine.
  bool combinable_ = false;
  bool prepared_ = false;
};

}  // namespace

std::unique_ptr<Batch> DrawBatch(Dice& dice, const GroupShape& shape, const Group& group, MovableLayer& layer) {
  const int experts = group.config().num_experts;
  const std::vector<int> rows = DrawRows(dice, 0, shape.max_tokens);
  const Given given = DrawRouting(dice, rows, layer.layer.top_k(), experts, group.local_experts());
  const std::uint64_t seed = dice.Number() % 1000000;
  NVTEDType dtype = dice.OneOf<NVTEDType>({shape.dtype, kNVTEBFloat16, kNVTEFloat16});
  std::size_t hidden = dice.Percent(30) ? static_cast<std::size_t>(shape.hidden) / 2 : shape.hidden;
  if (!EveryShapeIsCheap()) {
    dtype = kNVTEBFloat16;
    hidden = shape.hidden;
  }
  if (shape.zero_copy || (!shape.eager && dice.Percent(12))) {
    const unsigned more =
        dice.OneOf<unsigned>({0u, 1u * kTokens, 1u * kWeights, kGrad | kRecvWeights, 1u * kAllPayloads});
    const unsigned payloads = more | (shape.zero_copy || dice.Percent(50) ? kExchanged : 0u);
    const bool with_address = dice.Percent(50);
    if (dtype == kNVTEFloat32) {
      return std::make_unique<PlacedBatch<float>>(group, layer, given, seed, hidden, payloads, with_address);
    }
    return std::make_unique<PlacedBatch<BFloat16>>(group, layer, given, seed, hidden, payloads, with_address);
  }
  const std::size_t extra = dice.OneOf<int>({0, 0, 1, 64});
  std::size_t recv_rows = group.config().max_recv_tokens_per_rank + extra;
  bool may_differentiate = true;
  if (shape.eager) {
    // As many as the step takes, which every rank knows of itself here.
    const Reference reference(given.routing, experts, layer.layer.alignment());
    recv_rows = reference.Total(World::Get().rank()) + extra;
    // Padding may exceed the staging rows of the gradient of dispatch, which is refused then; for all or for nobody.
    for (int rank = 0; rank < World::Get().size(); ++rank) {
      const std::size_t most = static_cast<std::size_t>(World::Get().size()) * shape.max_tokens * shape.top_k;
      if (reference.Total(rank) + extra > most) may_differentiate = false;
    }
  }
  const int types = dice.Between(0, 3);
  const auto make = [&](auto token) -> std::unique_ptr<Batch> {
    using T = decltype(token);
    const auto with = [&](auto index, auto count) -> std::unique_ptr<Batch> {
      return std::make_unique<StepBatch<T, decltype(index), decltype(count)>>(group, layer, given, seed, recv_rows,
                                                                              hidden, may_differentiate);
    };
    if (types == 0) return with(std::int64_t{}, std::int64_t{});
    if (types == 1) return with(std::int32_t{}, std::int32_t{});
    if (types == 2) return with(std::int32_t{}, std::int64_t{});
    return with(std::int64_t{}, std::int32_t{});
  };
  if (dtype == kNVTEFloat32) return make(float{});
  if (dtype == kNVTEFloat16) return make(Float16{});
  return make(BFloat16{});
}

}  // namespace test
