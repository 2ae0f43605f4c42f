// Payloads in symmetric memory, named by window and offset: in staged groups, where they change nothing but the place,
// and in zero-copy groups, whose results have to be the staged ones bit by bit. Every check is against the reference of
// staged groups.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"
#include "ep/scaled_step.h"
#include "support/ep.h"
#include "support/host_stats.h"
#include "support/symm.h"

namespace test {
namespace {

GroupShape ZeroCopy(GroupShape shape = {}) {
  shape.zero_copy = true;
  return shape;
}

template <typename T>
void RunPlaced(const Group& group, const Layer& layer, const Routing& routing, std::uint64_t seed, unsigned payloads,
               bool with_address, std::size_t lead = 16) {
  Step<T> step(group, layer, routing, seed);
  PlacedStep<T>(step, payloads, with_address, lead).ForwardAndBackward();
}

// Memory that the program itself registers with NCCL.
class OwnWindow {
 public:
  OwnWindow(std::size_t bytes, ncclComm_t comm) : comm_(comm), bytes_((bytes + 4095) / 4096 * 4096) {
    TEST_NCCL(ncclMemAlloc(&data_, bytes_));
    TEST_NCCL(ncclCommWindowRegister(comm_, data_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC));
  }
  ~OwnWindow() {
    static_cast<void>(ncclCommWindowDeregister(comm_, window_));
    static_cast<void>(ncclMemFree(data_));
  }
  OwnWindow(const OwnWindow&) = delete;
  OwnWindow& operator=(const OwnWindow&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t bytes() const { return bytes_; }
  NVTECommWindow At(std::uint64_t offset) const { return MakeWindow(window_, offset); }

 private:
  ncclComm_t comm_;
  std::size_t bytes_;
  void* data_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

TEST(Windows, EveryPayloadOfAStagedGroup) {
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  Layer layer(2, 8);
  const Routing routing = RandomRouting(UnevenRows(40), 2, Experts(group), 5000);
  RunPlaced<BFloat16>(group, layer, routing, 5000, kAllPayloads, false);
  RunPlaced<BFloat16>(group, layer, routing, 5001, kAllPayloads, true);
}

TEST(Windows, ZeroCopyEqualsStaged) {
  GroupShape shape;
  shape.alignment = 16;
  shape.top_k = 4;
  Group group(ZeroCopy(shape));
  for (const int top_k : {1, 2, 4}) {
    for (const std::size_t alignment : {0, 16}) {
      if (!EveryShapeIsCheap() && top_k == 1) continue;
      SCOPED_TRACE("top_k " + std::to_string(top_k) + " alignment " + std::to_string(alignment));
      Layer layer(top_k, alignment);
      const std::uint64_t seed = 5010 + top_k + alignment;
      const Routing routing = RandomRouting(UnevenRows(64), top_k, Experts(group), seed, 10);
      RunPlaced<BFloat16>(group, layer, routing, seed, kExchanged, true);
    }
  }
}

TEST(Windows, ZeroCopyInEveryTokenType) {
  Group group(ZeroCopy());
  Layer layer(2, 0);
  RunPlaced<float>(group, layer, RandomRouting(EvenRows(33), 2, Experts(group), 5030), 5030, kExchanged, false);
  RunPlaced<BFloat16>(group, layer, RandomRouting(UnevenRows(17), 2, Experts(group), 5031), 5031, kExchanged, false);
  if (EveryShapeIsCheap()) {
    RunPlaced<Float16>(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), 5032), 5032, kExchanged, true);
  }
}

// Windows beside plain memory in the same calls, in any mixture that a zero-copy group takes.
TEST(Windows, MixedWithPlainMemory) {
  Group group(ZeroCopy());
  Layer layer(2, 4);
  const Routing routing = RandomRouting(UnevenRows(30), 2, Experts(group), 5040);
  for (const unsigned more : {0u, 1u * kTokens, 1u * kWeights, 1u * kRecvWeights, kGrad | kSlotGradWeights, 511u}) {
    SCOPED_TRACE(more);
    RunPlaced<float>(group, layer, routing, 5040 + more, kExchanged | more, more % 2 == 0);
  }
}

// Everything of everybody for the experts of one rank, and nothing at all.
TEST(Windows, SkewedAndEmptySteps) {
  Group group(ZeroCopy());
  Layer layer(2, 1);
  const int local = group.local_experts();
  const auto to = [&](int target) {
    return MakeRouting(EvenRows(64), 2, [=](int, int row, int k) { return target * local + (row + k) % local; });
  };
  RunPlaced<float>(group, layer, to(0), 5050, kExchanged, true);
  RunPlaced<float>(group, layer, to(Ranks() - 1), 5051, kExchanged, true);
  RunPlaced<float>(group, layer, RoundRobin(EvenRows(0), 2, Experts(group)), 5052, kExchanged, true);
  RunPlaced<float>(group, layer, MakeRouting(EvenRows(9), 2, [](int, int, int) { return -1; }), 5053, kExchanged, true);
}

// Zero-copy combine of NCCL EP sums a token's rows on a rank into the first of them, in the caller's tensor. Nothing
// else of its input changes; with the native engine nothing at all.
TEST(Windows, CombineSumsDuplicatesInPlace) {
  GroupShape shape;
  shape.top_k = 4;
  Group group(ZeroCopy(shape));
  Layer layer(4, 4);
  Step<float> step(group, layer, RandomRouting(EvenRows(40), 4, Experts(group), 5060), 5060);
  PlacedStep<float> placed(step, kExchanged, true, 16);
  step.Prepare();
  placed.Combine();
  step.CheckCombined();
  std::vector<float> expected = step.ExpertOutput();
  std::map<std::pair<int, int>, std::vector<std::size_t>> rows_of_token;
  for (std::size_t s = 0; s < step.slots().size(); ++s) {
    const Slot& slot = step.slots()[s];
    if (!slot.padding()) rows_of_token[{slot.rank, slot.row}].push_back(s);
  }
  std::size_t duplicates = 0;
  for (const auto& [token, rows] : rows_of_token) {
    duplicates += rows.size() - 1;
    if (rows.size() < 2 || OnNativeEngine()) continue;
    for (std::size_t column = 0; column < step.hidden(); ++column) {
      float sum = 0.0f;
      for (const std::size_t row : rows) sum += expected[row * step.hidden() + column];
      expected[rows.front() * step.hidden() + column] = sum;
    }
  }
  ASSERT_GT(duplicates, 0u);
  EXPECT_TRUE(SameBits(step.expert_out.Download(), expected, step.hidden()));
}

// Dropping groups take zero-copy too. There a row is dropped exactly if its place is behind the capacity; what is left
// of sums is exact, and dropped rows have zero gradients.
TEST(Windows, DroppedRows) {
  constexpr std::int64_t kCapacity = 64;
  Group group(Dropping(ZeroCopy(), kCapacity));
  Layer layer(2, 16);
  const int rank = World::Get().rank(), local = group.local_experts();
  const Routing routing = MakeRouting(EvenRows(64), 2, [=](int, int row, int k) { return (row + k) % local; });
  const Reference all(routing, Experts(group), 16);
  Step<float> step(group, layer, routing, 5070);
  PlacedStep<float> placed(step, kExchanged | kSlotGradWeights, true);
  step.Prepare();
  NVTEEpExtRecvTotals totals = {};
  totals.struct_size = sizeof totals;
  nvte_ep_ext_recv_totals(HandleMemory(layer.handle()), &totals, World::Get().stream());
  ASSERT_EQ(static_cast<std::int64_t>(totals.needed), all.Total(rank));
  EXPECT_EQ(totals.received, std::min<std::uint64_t>(totals.needed, kCapacity));
  EXPECT_EQ(totals.dropped, totals.needed - totals.received);
  ASSERT_EQ(all.Total(0), Ranks() * 128);

  placed.Dispatch();
  const std::vector<float> received = step.recv_tokens.Download();
  for (std::size_t s = 0; s < totals.received; ++s) {
    const Slot& slot = all.Slots(rank)[s];
    for (std::size_t column = 0; column < step.hidden(); ++column) {
      const float value = slot.padding() ? 0.0f : TokenValue(5070, slot.rank, slot.row, static_cast<int>(column));
      ASSERT_EQ(received[s * step.hidden() + column], value) << "row " << s << " column " << column;
    }
  }

  // Small whole numbers, whose sums are exact in any order.
  const auto output = [&](int destination, const Slot& slot, int column) {
    return static_cast<float>(1 + destination + 2 * slot.local_expert + slot.row + column % 5);
  };
  const auto kept = [&](int destination, const Slot& slot) {
    return all.SlotIndex(destination, slot.local_expert, slot.rank, slot.row) < kCapacity;
  };
  std::vector<float> rows(step.recv_rows() * step.hidden()), gradients(step.recv_rows());
  for (std::size_t s = 0; s < totals.received; ++s) {
    const Slot& slot = all.Slots(rank)[s];
    if (slot.padding()) continue;
    for (std::size_t column = 0; column < step.hidden(); ++column) {
      rows[s * step.hidden() + column] = output(rank, slot, static_cast<int>(column));
    }
    gradients[s] = output(rank, slot, 0);
  }
  const auto check = [&](const DeviceBuffer<float>& sums, const char* name) {
    std::vector<float> expected(step.rows() * step.hidden());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto value = [&](int destination, const Slot& slot, int column) {
        return kept(destination, slot) ? output(destination, slot, column) : 0.0f;
      };
      expected[i] = all.Combined(rank, static_cast<int>(i / step.hidden()), static_cast<int>(i % step.hidden()), value,
                                 &Rounded<float>);
    }
    EXPECT_TRUE(SameBits(sums.Download(), expected, step.hidden())) << name;
  };
  placed.CombineValues(rows);
  check(step.result, "result");
  placed.DispatchBwdValues(rows, gradients);
  check(step.grad_tokens, "grad_tokens");
  std::vector<float> expected;
  for (std::size_t row = 0; row < step.rows(); ++row) {
    for (int k = 0; k < 2; ++k) {
      const auto value = [&](int destination, const Slot& slot) {
        return kept(destination, slot) ? output(destination, slot, 0) : 0.0f;
      };
      expected.push_back(all.WeightGradient(rank, static_cast<int>(row), k, value));
    }
  }
  EXPECT_TRUE(SameBits(step.grad_weights.Download(), expected, 2)) << "grad_topk_weights";
}

// Windows that the program registered itself work as those of the library do.
TEST(Windows, RegisteredByTheProgram) {
  Group group(ZeroCopy());
  Layer layer(2, 8);
  Step<float> step(group, layer, RandomRouting(UnevenRows(30), 2, Experts(group), 5080), 5080);
  const std::size_t offset = 4096 + 48;
  {
    OwnWindow memory(offset + step.recv_tokens.bytes(), World::Get().comm());
    const Tensor recv(memory.data() + offset, kNVTEFloat32, {step.recv_rows(), step.hidden()});
    CopyOnDevice(memory.data() + offset, step.recv_tokens.data(), step.recv_tokens.bytes());
    DispatchArgs args = step.dispatch_args();
    args.recv_tokens = recv.get();
    args.recv_tokens_win = memory.At(offset);
    step.Prepare();
    args.Call();
    CopyOnDevice(step.recv_tokens.data(), memory.data() + offset, step.recv_tokens.bytes());
    World::Get().Wait();
  }
  const std::size_t used = step.slots().size();
  std::vector<float> weights = step.recv_weights.Download();
  std::fill(weights.begin() + used, weights.end(), 0.0f);
  for (std::size_t s = 0; s < used; ++s) {
    const Slot& slot = step.slots()[s];
    EXPECT_EQ(weights[s], slot.padding() ? 0.0f : WeightValue(5080, slot.rank, slot.row, slot.k)) << s;
  }
  const std::vector<float> received = step.recv_tokens.Download();
  for (std::size_t s = 0; s < used; ++s) {
    const Slot& slot = step.slots()[s];
    for (std::size_t column = 0; column < step.hidden(); ++column) {
      const float value = slot.padding() ? 0.0f : TokenValue(5080, slot.rank, slot.row, static_cast<int>(column));
      ASSERT_EQ(received[s * step.hidden() + column], value) << "row " << s << " column " << column;
    }
  }
}

// MXFP8 rows and their scales, each in symmetric memory.
TEST(Windows, ScaledRows) {
  GroupShape shape;
  shape.hidden = 512;
  shape.alignment = 16;
  shape.dtype = kNVTEBFloat16;
  for (const bool zero_copy : {false, true}) {
    SCOPED_TRACE(zero_copy ? "zero-copy" : "staged");
    shape.zero_copy = zero_copy;
    Group group(shape);
    Layer layer(2, 16);
    ScaledStep scaled(group, layer, RandomRouting(UnevenRows(40), 2, Experts(group), 5090), 5090, 512);
    const std::size_t rows = scaled.step.recv_rows(), scales_at = rows * 512 + 16;
    SymmBuffer memory(scales_at + rows * 16);
    CopyOnDevice(memory.data(), scaled.recv_tokens.data(), scaled.recv_tokens.bytes());
    CopyOnDevice(memory.data() + scales_at, scaled.recv_scales.data(), scaled.recv_scales.bytes());
    const Tensor recv =
        Mxfp8(memory.data(), kNVTEFloat8E4M3, {rows, 512}, memory.data() + scales_at, kNVTEFloat8E8M0, {rows, 16});
    DispatchArgs args = scaled.dispatch_args();
    args.recv_tokens = recv.get();
    args.recv_tokens_win = memory.At(0);
    SetScaleWindow(args.recv_tokens_win, memory.window(), memory.offset() + scales_at);
    scaled.step.Prepare();
    args.Call();
    CopyOnDevice(scaled.recv_tokens.data(), memory.data(), scaled.recv_tokens.bytes());
    CopyOnDevice(scaled.recv_scales.data(), memory.data() + scales_at, scaled.recv_scales.bytes());
    std::vector<float> weights = scaled.step.recv_weights.Download();
    const std::vector<float> tail = Unwritten<float>(rows - scaled.step.slots().size());
    std::copy(tail.begin(), tail.end(), weights.begin() + scaled.step.slots().size());
    scaled.step.recv_weights.Upload(weights);
    scaled.Check();
  }
}

// A window of more than 4 GiB, used behind that mark. It takes as much memory on every rank, so on the host runtime it
// has to be asked for.
TEST(Windows, BeyondFourGigabytes) {
  if (EveryShapeIsCheap() && std::getenv("NVTE_EP_TEST_LARGE_WINDOWS") == nullptr) {
    GTEST_SKIP() << "set NVTE_EP_TEST_LARGE_WINDOWS=1";
  }
  Group group(ZeroCopy());
  Layer layer(2, 4);
  const std::size_t lead = (std::size_t{4} << 30) + 16;
  RunPlaced<float>(group, layer, RandomRouting(EvenRows(20), 2, Experts(group), 5100), 5100, kExchanged, true, lead);
}

// ---- refusals ----

class WindowErrors : public ErrorTest {};

TEST_F(WindowErrors, OffsetsOffTheCopyUnit) {
  SymmBuffer memory(4096 + capacity() * kHidden * 2);
  for (const std::uint64_t offset : {2, 8, 4088}) {
    const std::string got = "got " + std::to_string(memory.offset() + offset);
    DispatchArgs dispatch = step().dispatch_args();
    dispatch.recv_tokens_win = memory.At(offset);
    Refuses("nvte_ep_dispatch", {"recv_tokens_win.offset", "16", got}, [&] { dispatch.Call(); });
    CombineArgs combine = step().combine_args();
    combine.expert_out_win = memory.At(offset);
    Refuses("nvte_ep_combine", {"expert_out_win.offset", "16", got}, [&] { combine.Call(); });
  }
}

// A data pointer that is not where the window says, in every call that takes one.
TEST_F(WindowErrors, WindowAndDataPointerDisagree) {
  SymmBuffer memory(capacity() * kHidden * 2);
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<void*>(memory.data()));
  const auto parts = [&](const char* name) {
    return std::vector<std::string>{name, "must lie where its window says", address};
  };
  DispatchArgs dispatch = step().dispatch_args();
  dispatch.tokens_win = memory.At(0);
  Refuses("nvte_ep_dispatch", parts("tokens"), [&] { dispatch.Call(); });
  dispatch = step().dispatch_args();
  dispatch.topk_weights_win = memory.At(0);
  Refuses("nvte_ep_dispatch", parts("topk_weights"), [&] { dispatch.Call(); });
  dispatch = step().dispatch_args();
  dispatch.recv_tokens_win = memory.At(0);
  Refuses("nvte_ep_dispatch", parts("recv_tokens"), [&] { dispatch.Call(); });
  dispatch = step().dispatch_args();
  dispatch.recv_topk_weights_win = memory.At(0);
  Refuses("nvte_ep_dispatch", parts("recv_topk_weights"), [&] { dispatch.Call(); });
  CombineArgs combine = step().combine_args();
  combine.expert_out_win = memory.At(0);
  Refuses("nvte_ep_combine", parts("expert_out"), [&] { combine.Call(); });
  DispatchBwdArgs dispatch_bwd = step().dispatch_bwd_args();
  dispatch_bwd.grad_win = memory.At(0);
  Refuses("nvte_ep_dispatch_bwd", parts("grad"), [&] { dispatch_bwd.Call(); });
  dispatch_bwd = step().dispatch_bwd_args();
  dispatch_bwd.g_recv_topk_weights_win = memory.At(0);
  Refuses("nvte_ep_dispatch_bwd", parts("g_recv_topk_weights"), [&] { dispatch_bwd.Call(); });
  CombineBwdArgs combine_bwd = step().combine_bwd_args();
  combine_bwd.grad_win = memory.At(0);
  Refuses("nvte_ep_combine_bwd", parts("grad"), [&] { combine_bwd.Call(); });
  combine_bwd = step().combine_bwd_args();
  combine_bwd.grad_expert_out_win = memory.At(0);
  Refuses("nvte_ep_combine_bwd", parts("grad_expert_out"), [&] { combine_bwd.Call(); });
}

// The same for a window that the library did not make: NCCL tells where it lies.
TEST_F(WindowErrors, ProgramsWindowAndDataPointerDisagree) {
  OwnWindow memory(capacity() * kHidden * 2, World::Get().comm());
  CombineArgs combine = step().combine_args();
  combine.expert_out_win = memory.At(0);
  Refuses("nvte_ep_combine", {"expert_out", "must lie where its window says"}, [&] { combine.Call(); });
  World::Get().Wait();
}

TEST_F(WindowErrors, AllocationsThatEndBeforeTheTensor) {
  const std::size_t bytes = capacity() * kHidden * 2;
  SymmBuffer small(bytes - 256), other(4096);
  const Tensor none(nullptr, kNVTEBFloat16, {capacity(), kHidden});
  DispatchArgs dispatch = step().dispatch_args();
  dispatch.recv_tokens = none.get();
  dispatch.recv_tokens_win = small.At(0);
  Refuses("nvte_ep_dispatch",
          {"recv_tokens_win.offset", "room for the tensor's " + std::to_string(bytes) + " bytes",
           std::to_string(bytes - 256)},
          [&] { dispatch.Call(); });
  // Behind everything that is handed out.
  dispatch.recv_tokens_win = other.At(1 << 20);
  Refuses("nvte_ep_dispatch", {"recv_tokens_win.offset", "must lie in an allocation"}, [&] { dispatch.Call(); });
}

// Of a window that the library did not make, the memory's end is known: a tensor may not lie over it.
TEST_F(WindowErrors, ProgramsWindowsThatEndBeforeTheTensor) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << "on GPUs memory is mapped in pieces of 2 MiB, one behind the other";
  const std::size_t bytes = capacity() * kHidden * 2;
  OwnWindow memory(bytes, World::Get().comm());
  const Tensor none(nullptr, kNVTEBFloat16, {capacity(), kHidden});
  for (const bool with_pointer : {false, true}) {
    const Tensor behind(memory.data() + 4096, kNVTEBFloat16, {capacity(), kHidden});
    const NVTETensor tensor = with_pointer ? behind.get() : none.get();
    DispatchArgs dispatch = step().dispatch_args();
    dispatch.recv_tokens = tensor;
    dispatch.recv_tokens_win = memory.At(4096);
    Refuses("nvte_ep_dispatch", {"recv_tokens", "must have the memory of its " + std::to_string(bytes) + " bytes"},
            [&] { dispatch.Call(); });
    CombineArgs combine = step().combine_args();
    combine.expert_out = tensor;
    combine.expert_out_win = memory.At(4096);
    Refuses("nvte_ep_combine", {"expert_out", "must have the memory of its " + std::to_string(bytes) + " bytes"},
            [&] { combine.Call(); });
  }
  World::Get().Wait();
}

TEST_F(WindowErrors, FreedMemory) {
  const Tensor none(nullptr, kNVTEBFloat16, {capacity(), kHidden});
  CombineArgs combine = step().combine_args();
  combine.expert_out = none.get();
  {
    SymmBuffer memory(capacity() * kHidden * 2);
    combine.expert_out_win = memory.At(0);
  }
  Refuses("nvte_ep_combine", {"expert_out_win.offset", "must lie in an allocation"}, [&] { combine.Call(); });
}

// NCCL itself does not check what it is given, so this is for the host runtime, which tells as NCCL should.
TEST_F(WindowErrors, WindowsOfNobody) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << "only on the host runtime";
  const Tensor none(nullptr, kNVTEBFloat16, {capacity(), kHidden});
  CombineArgs combine = step().combine_args();
  combine.expert_out = none.get();
  combine.expert_out_win = MakeWindow(reinterpret_cast<ncclWindow_t>(0x1230), 0);
  Refuses("nvte_ep_combine", {"expert_out_win.window", "of the group's communicator", "0x1230"},
          [&] { combine.Call(); });
}

// A window of another communicator, over which the group's peers cannot find it.
TEST_F(WindowErrors, WindowsOfAnotherCommunicator) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << "only on the host runtime";
  ncclComm_t other = World::Get().MakeComm(Ranks());
  {
    OwnWindow memory(capacity() * kHidden * 2, other);
    const Tensor none(nullptr, kNVTEBFloat16, {capacity(), kHidden});
    CombineArgs combine = step().combine_args();
    combine.expert_out = none.get();
    combine.expert_out_win = memory.At(0);
    Refuses("nvte_ep_combine", {"expert_out_win.window", "of the group's communicator"}, [&] { combine.Call(); });
    World::Get().Wait();
  }
  TEST_NCCL(ncclCommDestroy(other));
}

// What zero-copy groups need is named one by one.
TEST(ZeroCopyErrors, MissingWindowsAreNamed) {
  Group group(ZeroCopy());
  Layer layer(2, 1);
  Step<float> step(group, layer, RandomRouting(EvenRows(12), 2, Experts(group), 5200), 5200);
  step.Prepare();
  const std::string rule = "must be a window, since the group is zero-copy";
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {"recv_tokens_win.window", rule}, [&] { step.dispatch_args().Call(); }));
  EXPECT_TRUE(Throws("nvte_ep_combine", {"expert_out_win.window", rule}, [&] { step.combine_args().Call(); }));
  EXPECT_TRUE(Throws("nvte_ep_dispatch_bwd", {"grad_win.window", rule}, [&] { step.dispatch_bwd_args().Call(); }));
  EXPECT_TRUE(
      Throws("nvte_ep_combine_bwd", {"grad_expert_out_win.window", rule}, [&] { step.combine_bwd_args().Call(); }));
  RunPlaced<float>(group, layer, RandomRouting(EvenRows(12), 2, Experts(group), 5201), 5201, kExchanged, true);
}

TEST(ZeroCopyErrors, ScalesWithoutAWindow) {
  GroupShape shape;
  shape.hidden = 512;
  shape.dtype = kNVTEBFloat16;
  Group group(ZeroCopy(shape));
  Layer layer(2, 1);
  ScaledStep scaled(group, layer, RandomRouting(EvenRows(12), 2, Experts(group), 5210), 5210, 512);
  const std::size_t rows = scaled.step.recv_rows();
  SymmBuffer memory(rows * 512);
  const Tensor recv =
      Mxfp8(memory.data(), kNVTEFloat8E4M3, {rows, 512}, scaled.recv_scales.data(), kNVTEFloat8E8M0, {rows, 16});
  DispatchArgs args = scaled.dispatch_args();
  args.recv_tokens = recv.get();
  args.recv_tokens_win = memory.At(0);
  scaled.step.Prepare();
  const char* name = kWindowsNameScales ? "recv_tokens_win.scale_window" : "recv_tokens.rowwise_scale_inv";
  EXPECT_TRUE(Throws("nvte_ep_dispatch", {name, "window"}, [&] { args.Call(); }));
}

// What NCCL EP's kernels for windows would assert or trap on.
class ZeroCopyLimits : public GroupConfigTest {};

TEST_F(ZeroCopyLimits, ExpertsOfARank) {
  GroupShape shape;
  shape.experts_per_rank = 12;
  if (OnNativeEngine()) {
    Group group(ZeroCopy(shape));
    return;
  }
  Refuses([&](NVTEEpGroupConfig& config) { config = ZeroCopy(shape).Config(); },
          {"group_config.num_experts", "power of two", "got 12 experts a rank"});
}

TEST(ZeroCopyErrors, MoreDuplicatesThanAreSummed) {
  GroupShape shape;
  shape.experts_per_rank = 16;
  shape.top_k = 9;
  Group group(ZeroCopy(shape));
  if (OnNativeEngine()) {
    Register(9, 0);
    return;
  }
  EXPECT_TRUE(Throws(kLayerFunction, {"top_k", "at most 8 experts on one rank", "top_k 9 with 16 experts a rank"},
                     [] { Register(9, 0); }));
  Register(8, 0);
}

}  // namespace
}  // namespace test
