// Handle memory that is moved, reused, poisoned or left over, and the limit of handles that are kept.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ep/graph.h"
#include "ep/te/te_calls.h"
#include "support/expect_error.h"
#include "support/symm.h"

namespace test {
namespace {

using Bytes = std::vector<std::uint8_t>;

// Handle memory that can move away from where it is, leaving garbage behind.
class MovingMemory {
 public:
  explicit MovingMemory(std::size_t bytes) : memory_(bytes), tensor_(memory_.View({bytes})) {}

  NVTETensor tensor() const { return tensor_.get(); }

  void Move() {
    World::Get().Wait();
    MovingMemory next(memory_.size());
    const Bytes bytes = memory_.Download();
    next.memory_.Upload(bytes);
    memory_.Upload(Bytes(bytes.size(), 0xcb));
    std::swap(memory_, next.memory_);
    std::swap(tensor_, next.tensor_);
    // `next` frees the poisoned memory.
  }

 private:
  DeviceBuffer<std::uint8_t> memory_;
  Tensor tensor_;
};

TEST(Relocation, BeforeEveryCall) {
  GroupShape shape;
  shape.top_k = 4;
  shape.alignment = 16;
  Group group(shape);
  Layer layer(4, 16);
  MovingMemory memory(layer.memory().size());
  const Routing routing = RandomRouting(UnevenRows(40), 4, Experts(group), 6700, 10);
  Step<BFloat16> step(group, layer, routing, 6700);
  const auto move = [&] {
    memory.Move();
    step.UseHandle(memory.tensor());
  };
  step.UseHandle(memory.tensor());
  step.Prepare();
  step.CheckCounts();
  move();
  step.Dispatch();
  step.CheckReceived();
  move();
  step.Combine();
  step.CheckCombined();
  move();
  step.CombineBwd();
  step.CheckCombineBwd();
  move();
  step.DispatchBwd();
  step.CheckDispatchBwd();
  move();
  step.Forward();
}

// Whatever comes first at the new address works, and gives what it gave at the old one.
TEST(Relocation, AnyCallFirst) {
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  for (int first = 0; first < 4; ++first) {
    SCOPED_TRACE("call " + std::to_string(first));
    Layer layer(2, 8);
    MovingMemory memory(layer.memory().size());
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(25), 2, Experts(group), 6710 + first), 6710 + first);
    step.UseHandle(memory.tensor());
    step.ForwardAndBackward();
    for (DeviceBuffer<BFloat16>* output : {&step.recv_tokens, &step.result, &step.grad_expert_out, &step.grad_tokens}) {
      output->Clear();
    }
    step.recv_weights.Clear();
    step.grad_weights.Clear();
    memory.Move();
    step.UseHandle(memory.tensor());
    for (int i = 0; i < 4; ++i) {
      switch ((first + i) % 4) {
        case 0:
          step.Dispatch();
          step.CheckReceived();
          break;
        case 1:
          step.Combine();
          step.CheckCombined();
          break;
        case 2:
          step.CombineBwd();
          step.CheckCombineBwd();
          break;
        default:
          step.DispatchBwd();
          step.CheckDispatchBwd();
          break;
      }
    }
  }
}

void EveryReplayRefuses(Step<BFloat16>& step, const std::vector<std::string>& parts) {
  EXPECT_TRUE(Throws("nvte_ep_dispatch", parts, [&] { step.Dispatch(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine", parts, [&] { step.Combine(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine_bwd", parts, [&] { step.CombineBwd(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", parts, [&] { step.DispatchBwd(); }));
}

// A place in device memory, freed and given out again.
class Place {
 public:
  explicit Place(std::size_t bytes) : tensor_(Allocate(), kNVTEByte, {bytes}), data_(latest_) {}
  ~Place() { static_cast<void>(cudaFree(data_)); }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  NVTETensor tensor() const { return tensor_.get(); }
  void* data() const { return data_; }

  // Whether it is where it was.
  bool FreeAndAllocate() {
    World::Get().Wait();
    TEST_CUDA(cudaFree(data_));
    // The host runtime holds freed memory back until there is enough of it.
    void* much = nullptr;
    TEST_CUDA(cudaMalloc(&much, 6 * kBytes));
    TEST_CUDA(cudaFree(much));
    void* const before = data_;
    std::vector<void*> others;
    for (data_ = Allocate(); data_ != before && others.size() < 16; data_ = Allocate()) others.push_back(data_);
    for (void* const other : others) TEST_CUDA(cudaFree(other));
    return data_ == before;
  }

 private:
  // Large allocations get places of their own, which come back.
  static constexpr std::size_t kBytes = std::size_t{48} << 20;

  static void* Allocate() {
    TEST_CUDA(cudaMalloc(&latest_, kBytes));
    return latest_;
  }

  inline static void* latest_ = nullptr;
  Tensor tensor_;
  void* data_;
};

// Bytes of a layer that are moved to where another layer's handle memory was, which is freed: what lies there now
// counts. The second layer's kind may be new to the group only then.
void MovedToWhereAnotherWasFreed(bool both_kinds_known, std::size_t rows) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(shape);
  Layer large(4, 1);
  std::optional<Layer> small;
  if (both_kinds_known) small.emplace(2, 1);
  Step<BFloat16> first(group, large, RandomRouting(EvenRows(rows), 4, Experts(group), 6712), 6712);
  Place place(large.memory().size());
  first.UseHandle(place.tensor());
  first.Prepare();
  first.Dispatch();
  const bool same = place.FreeAndAllocate();
  if (!small) small.emplace(2, 1);
  Step<BFloat16> second(group, *small, RandomRouting(EvenRows(11), 2, Experts(group), 6713), 6713);
  second.Prepare();
  // Some ranks may have got the place, and others not.
  if (same) {
    TEST_CUDA(cudaMemcpyAsync(place.data(), small->memory().data(), small->memory().size(), cudaMemcpyDeviceToDevice,
                              World::Get().stream()));
    second.UseHandle(place.tensor());
  }
  second.CombineBwd();
  second.CheckCombineBwd();
  second.Dispatch();
  second.CheckReceived();
  int got = same ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &got, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (got == 0) GTEST_SKIP() << "no rank was given the address again";
}

TEST(Relocation, MovedToWhereAnotherWasFreed) { MovedToWhereAnotherWasFreed(true, 20); }
TEST(Relocation, MovedToWhereAnotherOfAsManyTokensWasFreed) { MovedToWhereAnotherWasFreed(true, 11); }
TEST(Relocation, MovedToWhereTheOnlyKindWasFreed) { MovedToWhereAnotherWasFreed(false, 11); }

// Handle memory as a caching allocator gives it, all of it in one allocation: bytes that are moved to where another
// layer's were, which the driver cannot tell from those, count as what they are, whichever call comes first.
struct TwoSlices {
  TwoSlices(const Layer& kept, const Layer& other)
      : slice((std::max(kept.memory().size(), other.memory().size()) + 255) / 256 * 256),
        memory(2 * slice),
        // As large as the layers' memory is, not as the place.
        first(memory.data(), kNVTEByte, {kept.memory().size()}),
        second(memory.data() + slice, kNVTEByte, {kept.memory().size()}),
        others(memory.data() + slice, kNVTEByte, {other.memory().size()}) {}

  // What is in the first is in the second, and garbage in the first.
  void Move() {
    const cudaStream_t stream = World::Get().stream();
    TEST_CUDA(cudaMemcpyAsync(memory.data() + slice, memory.data(), slice, cudaMemcpyDeviceToDevice, stream));
    TEST_CUDA(cudaMemsetAsync(memory.data(), 0xcb, slice, stream));
  }

  const std::size_t slice;
  DeviceBuffer<std::uint8_t> memory;
  const Tensor first, second, others;
};

template <typename Given>
void MoveWithinOneAllocation(const GroupShape& shape, int calls, std::uint64_t seed, Given&& given) {
  Group group(shape);
  Layer kept(2, 1), other(4, shape.alignment);
  TwoSlices slices(kept, other);
  for (int call = 0; call < calls; ++call) {
    SCOPED_TRACE("call " + std::to_string(call));
    auto step = given(group, kept, 9, seed + call);
    auto gone = given(group, other, 20, seed + 50 + call);
    gone->UseHandle(slices.others.get());
    gone->Forward();
    // Of as many tokens, only a step that is over is told from this one.
    if (gone->rows() == step->rows()) gone->Backward();
    step->UseHandle(slices.first.get());
    step->Prepare();
    slices.Move();
    step->UseHandle(slices.second.get());
    for (int i = 0; i < 4; ++i) {
      switch ((call + i) % 4) {
        case 0:
          step->Dispatch();
          step->CheckReceived();
          break;
        case 1:
          step->Combine();
          step->CheckCombined();
          break;
        case 2:
          step->CombineBwd();
          step->CheckCombineBwd();
          break;
        default:
          step->DispatchBwd();
          step->CheckDispatchBwd();
          break;
      }
    }
  }
}

TEST(Relocation, MovedToWhereAnotherWasInOneAllocation) {
  GroupShape shape;
  shape.top_k = 4;
  shape.alignment = 16;
  MoveWithinOneAllocation(shape, 4, 6714, [](const Group& group, const Layer& layer, int rows, std::uint64_t seed) {
    const Routing routing = RandomRouting(EvenRows(rows), layer.top_k(), Experts(group), seed);
    return std::make_unique<Step<BFloat16>>(group, layer, routing, seed);
  });
}

// With as many tokens as the other had, combine and the gradients do not differ in their arguments from the other's:
// after its last call, the gradient of dispatch, what the memory holds is looked up.
TEST(Relocation, MovedToWhereAnotherOfAsManyTokensWas) {
  GroupShape shape;
  shape.top_k = 4;
  shape.alignment = 16;
  MoveWithinOneAllocation(shape, 4, 6722, [](const Group& group, const Layer& layer, int, std::uint64_t seed) {
    const Routing routing = RandomRouting(EvenRows(9), layer.top_k(), Experts(group), seed);
    return std::make_unique<Step<BFloat16>>(group, layer, routing, seed);
  });
}

// In eager mode each step has a total of its own, which its receive side has to hold.
TEST(Relocation, MovedToWhereAnotherWasInEagerMode) {
  GroupShape shape;
  shape.top_k = 4;
  shape.eager = true;
  MoveWithinOneAllocation(shape, 4, 6718, [](const Group& group, const Layer& layer, int, std::uint64_t seed) {
    // As many tokens for both: only the totals differ.
    return EagerStep(group, layer, RandomRouting(EvenRows(9), layer.top_k(), Experts(group), seed), seed);
  });
}

// Bytes that come to where a graph prepared, which is gone: once a call has seen them, they can be captured, with other
// tokens or for another layer than the graph's.
TEST(Relocation, CapturedWhereAGraphPreparedBefore) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(shape);
  Layer former(2, 1), larger(4, 1);
  DeviceBuffer<std::uint8_t> memory(larger.memory().size());
  const Tensor formers(memory.data(), kNVTEByte, {former.memory().size()});
  const Tensor place(memory.data(), kNVTEByte, {memory.size()});
  const auto routing = [&](int rows, int top_k, std::uint64_t seed) {
    return RandomRouting(EvenRows(rows), top_k, Experts(group), seed);
  };
  Step<BFloat16> before(group, former, routing(10, 2, 6724), 6724);
  before.UseHandle(formers.get());
  before.ForwardAndBackward();
  UploadInputs(before);
  Graph([&] { EnqueueAll(before); }).Launch();
  for (const int rows : {20, 10}) {
    for (const int top_k : {2, 4}) {
      SCOPED_TRACE(std::to_string(rows) + " tokens, top_k " + std::to_string(top_k));
      Layer layer(top_k, 1);
      Step<BFloat16> step(group, layer, routing(rows, top_k, 6725), 6725);
      step.Prepare();
      CopyOnDevice(memory.data(), layer.memory().data(), layer.memory().size());
      step.UseHandle(top_k == 2 ? formers.get() : place.get());
      step.Combine();
      step.CheckCombined();
      ClearOutputs(step);
      const Graph combines([&] { step.combine_args().Call(); });
      combines.Launch();
      step.CheckCombined();
    }
  }
}

// The same with nothing else than the indices' type.
TEST(Relocation, CapturedWhereAGraphPreparedOtherIndices) {
  Group group{GroupShape()};
  Layer former(2, 1), layer(2, 1);
  const Routing routing = RandomRouting(EvenRows(10), 2, Experts(group), 6726);
  Step<BFloat16> before(group, former, routing, 6726);
  before.ForwardAndBackward();
  UploadInputs(before);
  Graph([&] { EnqueueAll(before); }).Launch();
  Step<BFloat16, std::int32_t> step(group, layer, routing, 6727);
  step.Prepare();
  CopyOnDevice(former.memory().data(), layer.memory().data(), layer.memory().size());
  step.UseHandle(former.handle());
  step.Dispatch();
  step.CheckReceived();
  step.recv_tokens.Clear();
  step.recv_weights.Clear();
  const Graph dispatches([&] { step.dispatch_args().Call(); });
  dispatches.Launch();
  step.CheckReceived();
}

// A wrong call at the new place is refused, and the right one after it works: after a step that is over, after one of
// other token counts, and both.
TEST(Relocation, ARefusedCallFirstWhereAnotherWas) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(shape);
  Layer kept(2, 1), other(4, 1);
  TwoSlices slices(kept, other);
  for (const auto& [rows, over] : {std::pair(9, true), std::pair(20, false), std::pair(20, true)}) {
    SCOPED_TRACE(std::to_string(rows) + (over ? " rows, over" : " rows"));
    Step<BFloat16> step(group, kept, RandomRouting(EvenRows(9), 2, Experts(group), 6730), 6730);
    Step<BFloat16> gone(group, other, RandomRouting(EvenRows(rows), 4, Experts(group), 6731), 6731);
    gone.UseHandle(slices.others.get());
    gone.Forward();
    if (over) gone.Backward();
    step.UseHandle(slices.first.get());
    step.Prepare();
    slices.Move();
    step.UseHandle(slices.second.get());
    DispatchArgs wrong = step.dispatch_args();
    const Tensor short_tokens(step.tokens.data(), kNVTEBFloat16, {5, step.hidden()});
    wrong.tokens = short_tokens.get();
    EXPECT_TRUE(
        Throws("nvte_ep_dispatch", {"tokens", "as many rows as the prepared topk_idx, 9"}, [&] { wrong.Call(); }));
    step.Dispatch();
    step.CheckReceived();
    step.Combine();
    step.CheckCombined();
    step.Backward();
  }
}

// A step that is over is used once more, as a recomputation does; it is still over.
TEST(Relocation, MovedToWhereAnotherWasUsedOnceMore) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(shape);
  Layer kept(2, 1), other(4, 1);
  TwoSlices slices(kept, other);
  Step<BFloat16> step(group, kept, RandomRouting(EvenRows(9), 2, Experts(group), 6732), 6732);
  Step<BFloat16> gone(group, other, RandomRouting(EvenRows(9), 4, Experts(group), 6733), 6733);
  gone.UseHandle(slices.others.get());
  gone.ForwardAndBackward();
  gone.Dispatch();
  gone.CheckReceived();
  step.UseHandle(slices.first.get());
  step.Prepare();
  slices.Move();
  step.UseHandle(slices.second.get());
  step.CombineBwd();
  step.CheckCombineBwd();
  step.Combine();
  step.CheckCombined();
  step.DispatchBwd();
  step.CheckDispatchBwd();
}

// In eager mode, with one kind of layer, as many tokens, and only the totals different: the receive side has to hold
// those of what is here now.
TEST(Relocation, TotalsInEagerMode) {
  GroupShape shape;
  shape.eager = true;
  Group group(shape);
  Layer layer(2, 1);
  TwoSlices slices(layer, layer);
  const auto to_rank = [&](int target, std::uint64_t seed) {
    return EagerStep(group, layer, ToRank(target, EvenRows(9), group.local_experts()), seed);
  };
  const auto gone = to_rank(1, 6734), step = to_rank(0, 6735);
  gone->UseHandle(slices.others.get());
  gone->Forward();
  gone->Backward();
  step->UseHandle(slices.first.get());
  step->Prepare();
  slices.Move();
  step->UseHandle(slices.second.get());
  if (World::Get().rank() == 0) {
    const std::string total = std::to_string(18 * World::Get().size());
    DispatchArgs wrong = step->dispatch_args();
    const Tensor two_rows(step->recv_tokens.data(), kNVTEBFloat16, {2, step->hidden()});
    wrong.recv_tokens = two_rows.get();
    EXPECT_TRUE(Throws("nvte_ep_dispatch", {"recv_tokens", "at least the rows", total}, [&] { wrong.Call(); }));
  }
  step->Dispatch();
  step->CheckReceived();
  step->Combine();
  step->CheckCombined();
}

TEST(Relocation, PoisonedMemoryIsNotPrepared) {
  Group group{GroupShape()};
  const std::size_t bytes = Register(2, 1).bytes;
  // All at once: an address that had been prepared before would be known.
  std::vector<Bytes> poisons;
  std::vector<DeviceBuffer<std::uint8_t>> memories;
  for (const int poison : {0x00, 0xff, 0xcb, 0x01}) {
    poisons.emplace_back(bytes, static_cast<std::uint8_t>(poison));
    memories.emplace_back(poisons.back());
  }
  Layer layer(2, 1);
  for (std::size_t i = 0; i < memories.size(); ++i) {
    SCOPED_TRACE("poison " + std::to_string(poisons[i][0]));
    const Tensor mem = memories[i].View({bytes});
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 6720), 6720);
    step.UseHandle(mem.get());
    EveryReplayRefuses(step, {"handle_mem", "nvte_ep_prepare"});
    EXPECT_TRUE(SameBits(memories[i].Download(), poisons[i], 1)) << "handle memory";
    step.ForwardAndBackward();
  }
}

// Part of a routing is no routing.
TEST(Relocation, MovedMemoryHasToBeWhole) {
  Group group{GroupShape()};
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 6730), 6730);
  step.Prepare();
  DeviceBuffer<std::uint8_t> memory(layer.memory().Download());
  const Tensor half = memory.View({memory.size() / 2});
  step.UseHandle(half.get());
  EveryReplayRefuses(step, {"handle_mem", std::to_string(memory.size()), std::to_string(memory.size() / 2)});
  const Tensor whole = memory.View({memory.size()});
  step.UseHandle(whole.get());
  step.Backward();
}

// One address serves layers of every configuration in turn, with garbage in between.
TEST(Relocation, ReusedAddress) {
  GroupShape shape;
  shape.top_k = 8;
  shape.alignment = 16;
  Group group(shape);
  DeviceBuffer<std::uint8_t> memory(Register(8, 16).bytes);
  const Tensor mem = memory.View({memory.size()});
  const int top_k[] = {2, 8, 2, 4, 1};
  const std::size_t alignment[] = {0, 16, 8, 1, 16};
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    memory.Upload(Bytes(memory.size(), 0xcb));
    Layer layer(top_k[round], alignment[round]);
    Step<BFloat16> step(group, layer,
                        RandomRouting(UnevenRows(20 + 7 * round), top_k[round], Experts(group), 6740 + round),
                        6740 + round);
    step.UseHandle(mem.get());
    step.ForwardAndBackward();
    EXPECT_TRUE(memory.GuardIntact());
  }
}

// Routing does not outlive its group.
TEST(Relocation, MemoryOfAnEarlierGroup) {
  std::optional<Group> group;
  group.emplace(GroupShape());
  Layer layer(2, 1);
  Step<BFloat16> step(*group, layer, RandomRouting(UnevenRows(9), 2, Experts(*group), 6750), 6750);
  step.Forward();
  group.reset();
  group.emplace(GroupShape());
  EveryReplayRefuses(step, {"handle_mem", "nvte_ep_prepare"});
  step.ForwardAndBackward();
}

// ---- NVTE_EP_HANDLE_CACHE_SIZE ----

// Sets the limit for the groups made meanwhile.
class CacheSize {
 public:
  explicit CacheSize(const char* value) {
    const char* before = std::getenv(kName);
    if (before != nullptr) before_ = before;
    setenv(kName, value, 1);
  }
  ~CacheSize() {
    if (before_) {
      setenv(kName, before_->c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }
  CacheSize(const CacheSize&) = delete;
  CacheSize& operator=(const CacheSize&) = delete;

 private:
  static constexpr char kName[] = "NVTE_EP_HANDLE_CACHE_SIZE";
  std::optional<std::string> before_;
};

// `count` layers in flight, forward in order, backward in reverse; returns the most handles that were alive.
template <typename Index>
std::uint64_t RunInFlight(int count, std::uint64_t seed) {
  GroupShape shape;
  shape.top_k = 4;
  shape.alignment = 16;
  Group group(shape);
  std::uint64_t most = 0;
  const auto look = [&] { most = std::max<std::uint64_t>(most, Usage().handles); };
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<Step<BFloat16, Index>>> steps;
  for (int i = 0; i < count; ++i) {
    const int top_k = 1 << i % 3;
    layers.push_back(std::make_unique<Layer>(top_k, std::size_t{1} << i % 5));
    steps.push_back(std::make_unique<Step<BFloat16, Index>>(
        group, *layers[i], RandomRouting(UnevenRows(12 + 4 * i), top_k, Experts(group), seed + i), seed + i));
  }
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE("forward " + std::to_string(i));
    steps[i]->Forward();
    look();
  }
  for (int i = count; i-- > 0;) {
    SCOPED_TRACE("backward " + std::to_string(i));
    steps[i]->Backward();
    look();
  }
  return most;
}

TEST(HandleCache, MoreHandlesInFlightThanAreKept) {
  const CacheSize size("2");
  const std::uint64_t most = RunInFlight<std::int64_t>(3, 6800);
  EXPECT_EQ(most, 2u);
  RunInFlight<std::int64_t>(7, 6810);
}

TEST(HandleCache, OneHandle) {
  const CacheSize size("1");
  const std::uint64_t most = RunInFlight<std::int64_t>(3, 6820);
  EXPECT_EQ(most, 1u);
}

TEST(HandleCache, NoLimit) {
  const CacheSize size("-1");
  const std::uint64_t most = RunInFlight<std::int64_t>(12, 6830);
  EXPECT_EQ(most, 12u);
}

// NCCL EP reads the indices of memory that it opens again as int64, so those of 32 bits are kept as that.
TEST(HandleCache, MoreHandlesOf32BitIndicesThanTheLimit) {
  const CacheSize size("2");
  RunInFlight<std::int32_t>(3, 6840);
}

// Graphs use the memory, not what the library keeps of it: more layers than are kept, between capture and replay,
// change nothing. Of the two captured layers one was new to the library.
TEST(HandleCache, GraphsOfHandlesThatWereGivenUp) {
  const CacheSize size("2");
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  Layer known(2, 8), fresh(2, 8);
  const auto routing = [&](std::uint64_t seed) { return RandomRouting(UnevenRows(20), 2, Experts(group), seed); };
  Step<BFloat16> a(group, known, routing(6860), 6860), b(group, fresh, routing(6861), 6861);
  a.ForwardAndBackward();
  UploadInputs(a);
  UploadInputs(b);
  World::Get().Wait();
  const Graph graph_a([&] { EnqueueAll(a); }), graph_b([&] { EnqueueAll(b); });
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    for (int i = 0; i < 5; ++i) {
      Layer other(2, std::size_t{1} << i);
      Step<BFloat16>(group, other, routing(6870 + i), 6870 + i).ForwardAndBackward();
    }
    EXPECT_EQ(Usage().handles, 2u);
    for (Step<BFloat16>* step : {&a, &b}) {
      const Graph& graph = step == &a ? graph_a : graph_b;
      const std::uint64_t seed = step == &a ? 6860 : 6861;
      ClearOutputs(*step);
      graph.Launch();
      CheckAll(*step);
      ReplayAs(*step, graph, routing(6880 + round), 6880 + round);
      ReplayAs(*step, graph, routing(seed), seed);
    }
    // Without a graph too: the memory tells what it holds.
    a.recv_tokens.Clear();
    a.recv_weights.Clear();
    a.Dispatch();
    a.CheckReceived();
  }
}

TEST(HandleCache, Zero) {
  {
    const CacheSize size("0");
    EXPECT_TRUE(Throws("nvte_ep_initialize", {"NVTE_EP_HANDLE_CACHE_SIZE", "got 0"},
                       [] { Initialize(World::Get().comm(), GroupShape().Config()); }));
  }
  RunInFlight<std::int64_t>(1, 6850);
}

}  // namespace
}  // namespace test
