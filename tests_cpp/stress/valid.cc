// Random valid calls: layers of every kind side by side, their calls interleaved, repeated, on several streams and from
// several threads, with handle memory that moves; every output against the reference.

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ep/scaled_step.h"
#include "stress/stress.h"
#include "support/host_stats.h"
#include "support/symm.h"

namespace test {
namespace {

// A host thread of the program, which makes calls when it is its turn.
class Worker {
 public:
  Worker() {
    int device = 0;
    TEST_CUDA(cudaGetDevice(&device));
    thread_ = std::thread([this, device] { Loop(device); });
  }
  ~Worker() {
    Hand(nullptr, true);
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Has the thread run `work`, and waits for it; what it throws is thrown here.
  void Run(const std::function<void()>& work) {
    Hand(&work, false);
    std::unique_lock<std::mutex> lock(mutex_);
    turn_.wait(lock, [this] { return work_ == nullptr; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void Hand(const std::function<void()>* work, bool end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    end_ = end;
    turn_.notify_all();
  }
  void Loop(int device) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      turn_.wait(lock, [this] { return work_ != nullptr || end_; });
      if (end_) return;
      try {
        TEST_CUDA(cudaSetDevice(device));
        (*work_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      work_ = nullptr;
      turn_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable turn_;
  const std::function<void()>* work_ = nullptr;
  bool end_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// Streams and threads for calls. Whatever is taken next is ordered behind what was taken before, by an event.
class Lanes {
 public:
  Lanes() {
    streams_[0] = World::Get().stream();
    for (std::size_t i = 1; i < streams_.size(); ++i) {
      TEST_CUDA(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
    }
    TEST_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~Lanes() {
    static_cast<void>(cudaEventDestroy(event_));
    for (std::size_t i = 1; i < streams_.size(); ++i) static_cast<void>(cudaStreamDestroy(streams_[i]));
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Copies and checks use the world's stream.
  void Home() { Switch(0); }
  // Makes a call on some stream, from some thread.
  void Call(Dice& dice, const std::function<void(cudaStream_t)>& call) {
    const int stream = dice.Between(0, 2), thread = dice.Between(0, 4);
    Switch(stream);
    const auto work = [&] { call(streams_[stream]); };
    if (thread < 2) {
      workers_[thread].Run(work);
    } else {
      work();
    }
  }
  void Wait() {
    Home();
    World::Get().Wait();
  }

 private:
  void Switch(int next) {
    if (next == current_) return;
    TEST_CUDA(cudaEventRecord(event_, streams_[current_]));
    TEST_CUDA(cudaStreamWaitEvent(streams_[next], event_, 0));
    current_ = next;
  }

  std::array<cudaStream_t, 3> streams_ = {};
  std::array<Worker, 2> workers_;
  cudaEvent_t event_ = nullptr;
  int current_ = 0;
};

// A layer whose handle memory may move.
class MovableLayer {
 public:
  MovableLayer(int top_k, std::size_t alignment) : layer(top_k, alignment) {}

  Handle handle() const { return moved_ ? layer.HandleOver(tensor_) : layer.handle(); }
  // To fresh memory; garbage stays behind where it was.
  void Move(Lanes& lanes) {
    lanes.Wait();
    const DeviceBuffer<std::uint8_t>& from = moved_ ? memory_ : layer.memory();
    DeviceBuffer<std::uint8_t> to(from.Download());
    TEST_CUDA(cudaMemsetAsync(from.data(), 0xcb, from.size(), World::Get().stream()));
    lanes.Wait();
    Tensor tensor = to.View({to.size()});
    std::swap(memory_, to);
    std::swap(tensor_, tensor);
    moved_ = true;
  }
  void Check() const {
    if (!layer.memory().GuardIntact() || (moved_ && !memory_.GuardIntact())) Fail("wrote behind handle memory");
  }

  Layer layer;

 private:
  bool moved_ = false;
  DeviceBuffer<std::uint8_t> memory_;
  Tensor tensor_;
};

// One microbatch: prepared once, then dispatched, combined and differentiated in any order and number.
class Batch {
 public:
  virtual ~Batch() = default;
  virtual void Act(Dice& dice, Lanes& lanes) = 0;
  virtual void Finish(Lanes& lanes) = 0;
  virtual void UseHandle(const Handle& handle) = 0;

  int acts = 0;
};

enum Act : int { kDispatch, kCombine, kCombineBwd, kDispatchBwd, kActs };

template <typename T, typename Index = std::int64_t, typename Count = std::int32_t>
class StepBatch : public Batch {
 public:
  StepBatch(const Group& group, const MovableLayer& layer, const Given& given, std::uint64_t seed,
            std::size_t recv_rows, std::size_t hidden, bool may_differentiate)
      : step_(group, layer.layer, given.routing, seed, recv_rows, hidden), may_differentiate_(may_differentiate) {
    step_.UseHandle(layer.handle());
    const std::vector<std::int64_t>& named = given.named[World::Get().rank()];
    for (const std::int64_t index : named) step_.not_experts += index >= group.config().num_experts ? 1 : 0;
    step_.topk_idx.Upload(std::vector<Index>(named.begin(), named.end()));
  }

  void UseHandle(const Handle& handle) override { step_.UseHandle(handle); }

  void Act(Dice& dice, Lanes& lanes) override {
    lanes.Home();
    if (!prepared_) {
      lanes.Call(dice, [&](cudaStream_t stream) { step_.prepare_args().Call(stream); });
      prepared_ = true;
      lanes.Home();
      step_.CheckCounts();
      return;
    }
    const int act = dice.Between(0, kActs - 1);
    const bool with_weights = !dice.Percent(25), check_now = dice.Percent(40);
    if (act == kDispatchBwd && !may_differentiate_) return;
    if (pending_[act]) Check(act);
    switch (act) {
      case kDispatch: {
        step_.recv_tokens.Clear();
        step_.recv_weights.Clear();
        DispatchArgs args = step_.dispatch_args();
        with_weights_ = with_weights;
        if (!with_weights) args.topk_weights = args.recv_topk_weights = nullptr;
        lanes.Call(dice, [&](cudaStream_t stream) { args.Call(stream); });
        break;
      }
      case kCombine:
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
    if (!check_now) return;
    lanes.Home();
    Check(act);
  }

  void Finish(Lanes& lanes) override {
    lanes.Home();
    for (int act = 0; act < kActs; ++act) {
      if (pending_[act]) Check(act);
    }
    if (!step_.topk_idx.GuardIntact() || !step_.tokens.GuardIntact() || !step_.weights.GuardIntact()) {
      Fail("wrote behind an input");
    }
  }

 private:
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

  Step<T, Index, Count> step_;
  const bool may_differentiate_;
  bool prepared_ = false;
  bool with_weights_ = true;
  std::array<bool, kActs> pending_ = {};
};

// The same in symmetric memory, on the world's stream.
template <typename T>
class PlacedBatch : public Batch {
 public:
  PlacedBatch(const Group& group, const MovableLayer& layer, const Given& given, std::uint64_t seed, std::size_t hidden,
              unsigned more, bool with_address)
      : step_(group, layer.layer, given.routing, seed, 0, hidden), placed_(step_, kExchanged | more, with_address, 16) {
    step_.UseHandle(layer.handle());
    const std::vector<std::int64_t>& named = given.named[World::Get().rank()];
    for (const std::int64_t index : named) step_.not_experts += index >= group.config().num_experts ? 1 : 0;
    step_.topk_idx.Upload(named);
  }

  void UseHandle(const Handle& handle) override { step_.UseHandle(handle); }

  void Act(Dice& dice, Lanes& lanes) override {
    lanes.Home();
    if (!prepared_) {
      step_.Prepare();
      prepared_ = true;
      step_.CheckCounts();
      return;
    }
    switch (dice.Between(0, kActs - 1)) {
      case kDispatch:
        step_.recv_tokens.Clear();
        step_.recv_weights.Clear();
        placed_.Dispatch();
        step_.CheckReceived();
        break;
      case kCombine:
        step_.result.Clear();
        placed_.Combine();
        step_.CheckCombined();
        break;
      case kCombineBwd:
        step_.grad_expert_out.Clear();
        placed_.CombineBwd();
        step_.CheckCombineBwd();
        break;
      default:
        step_.grad_tokens.Clear();
        step_.grad_weights.Clear();
        placed_.DispatchBwd();
        step_.CheckDispatchBwd();
        break;
    }
  }

  void Finish(Lanes&) override {}

 private:
  Step<T> step_;
  PlacedStep<T> placed_;
  bool prepared_ = false;
};

std::unique_ptr<Batch> DrawBatch(Dice& dice, const GroupShape& shape, const Group& group, const MovableLayer& layer) {
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
  if (shape.zero_copy) {
    const unsigned more =
        dice.OneOf<unsigned>({0u, 1u * kTokens, 1u * kWeights, kGrad | kRecvWeights, 1u * kAllPayloads});
    const bool with_address = dice.Percent(50);
    if (dtype == kNVTEFloat32) {
      return std::make_unique<PlacedBatch<float>>(group, layer, given, seed, hidden, more, with_address);
    }
    return std::make_unique<PlacedBatch<BFloat16>>(group, layer, given, seed, hidden, more, with_address);
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

GroupShape DrawShape(Dice& dice) {
  const bool cheap = EveryShapeIsCheap();
  GroupShape shape;
  shape.experts_per_rank = dice.OneOf<int>({4, 6, 8, 12, 16});
  shape.max_tokens = dice.OneOf<int>({1, 3, 8, dice.Between(1, 64), dice.Between(1, 64)});
  shape.hidden = cheap ? dice.OneOf<int>({64, 128, 128, 256, 320}) : 256;
  shape.top_k = cheap ? dice.OneOf<int>({1, 2, 2, 4, 8, dice.Between(1, 12)}) : 2;
  shape.top_k = std::min(shape.top_k, shape.experts_per_rank * World::Get().size());
  shape.alignment = dice.OneOf<int>({1, 8, 64});
  shape.dtype =
      cheap ? dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEBFloat16, kNVTEBFloat16, kNVTEFloat16}) : kNVTEBFloat16;
  shape.allow_handle_mem_reloc = dice.Between(0, 1);
  // A receive capacity of 4 rows is the least that a group has.
  if (shape.max_tokens == 1) shape.alignment = 8;
  const int form = dice.Between(0, 9);
  shape.eager = form <= 1;
  if (form == 2) shape.drop_capacity = (shape.max_tokens + 3) / 4 * 4 + dice.Between(0, shape.max_tokens);
  if (form == 3 || form == 4) {
    shape.zero_copy = true;
    shape.experts_per_rank = dice.OneOf<int>({4, 8});
    shape.top_k = std::min(shape.top_k, 8);
  }
  return shape;
}

void RunRound(Dice& dice) {
  const GroupShape shape = DrawShape(dice);
  const Group group(shape);
  // Moved memory is always followed in TransformerEngine's ABI, and where the group says so in the other.
  const bool may_move = kReportsTotal || shape.allow_handle_mem_reloc != 0;
  Lanes lanes;
  std::vector<std::unique_ptr<MovableLayer>> layers;
  for (int i = dice.Between(1, 4); i > 0; --i) {
    const int top_k = EveryShapeIsCheap() ? dice.Between(1, shape.top_k) : dice.OneOf<int>({1, shape.top_k});
    const std::vector<std::size_t> alignments = {0, 1, static_cast<std::size_t>(std::min(shape.alignment, 8)),
                                                 static_cast<std::size_t>(shape.alignment)};
    layers.push_back(std::make_unique<MovableLayer>(top_k, dice.OneOf(alignments)));
  }
  std::vector<std::unique_ptr<Batch>> batches(layers.size());
  std::size_t alive = 0;
  for (int left = dice.Between(2, 8); left > 0 || alive > 0;) {
    const std::size_t i = dice.Between(0, static_cast<int>(layers.size()) - 1);
    if (!batches[i]) {
      if (left == 0) continue;
      --left;
      ++alive;
      lanes.Home();
      batches[i] = DrawBatch(dice, shape, group, *layers[i]);
      batches[i]->acts = dice.Between(3, 9);
    }
    if (may_move && dice.Percent(10)) {
      layers[i]->Move(lanes);
      batches[i]->UseHandle(layers[i]->handle());
    }
    batches[i]->Act(dice, lanes);
    if (--batches[i]->acts > 0) continue;
    batches[i]->Finish(lanes);
    batches[i].reset();
    --alive;
    ++TheFigures().steps;
    FailIfWrong();
  }
  lanes.Wait();
  for (const auto& layer : layers) layer->Check();
}

// Rows in MXFP8, two layers side by side.
void RunScaledRound(Dice& dice) {
  GroupShape shape;
  shape.hidden = EveryShapeIsCheap() ? dice.OneOf<int>({512, 1024}) : 512;
  shape.alignment = 16;
  shape.dtype = kNVTEBFloat16;
  shape.max_tokens = dice.Between(1, 48);
  shape.eager = dice.Percent(25);
  const Group group(shape);
  const Layer layers[] = {Layer(2, 16), Layer(dice.Between(1, 2), dice.OneOf<std::size_t>({0, 8}))};
  for (int round = dice.Between(1, 2); round > 0; --round) {
    std::vector<std::unique_ptr<ScaledStep>> steps;
    for (const Layer& layer : layers) {
      const std::vector<int> rows = DrawRows(dice, 0, shape.max_tokens);
      const Routing routing = RandomRouting(rows, layer.top_k(), group.config().num_experts, dice.Number(), 10);
      const Reference reference(routing, group.config().num_experts, layer.alignment());
      const std::size_t recv_rows = shape.eager ? reference.Total(World::Get().rank()) : 0;
      const NVTEDType dtype = dice.OneOf<NVTEDType>({kNVTEFloat8E4M3, kNVTEFloat8E5M2});
      steps.push_back(
          std::make_unique<ScaledStep>(group, layer, routing, dice.Number() % 100000, shape.hidden, recv_rows, dtype));
    }
    for (auto& step : steps) step->step.Prepare();
    for (auto& step : steps) step->dispatch_args().Call();
    for (auto& step : steps) {
      step->step.CheckCounts();
      step->Check();
      step->step.Combine();
      step->step.CheckCombined();
      step->step.CombineBwd();
      step->step.CheckCombineBwd();
      ++TheFigures().steps;
    }
    FailIfWrong();
  }
}

}  // namespace

void RunValid() {
  const double until = Now() + TheSettings().seconds;
  for (std::uint64_t round = 0; TimeIsLeft(until); ++round) {
    Begin("valid", round);
    Dice dice(Mix(TheSettings().seed, 1, round));
    if (dice.Percent(12)) {
      RunScaledRound(dice);
    } else {
      RunRound(dice);
    }
    FailIfWrong();
  }
}

}  // namespace test
