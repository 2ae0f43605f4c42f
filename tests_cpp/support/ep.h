// Owners of the library's objects, and one training step with its checks.

#ifndef NVTE_EP_TESTS_SUPPORT_EP_H_
#define NVTE_EP_TESTS_SUPPORT_EP_H_

#include <gtest/gtest.h>
#include <transformer_engine/ep.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "support/device.h"
#include "support/number.h"
#include "support/options.h"
#include "support/reference.h"
#include "support/tensor.h"
#include "support/world.h"

namespace test {

// Whether groups of this run have the native engine, and not NCCL EP. Collective where there is no group yet.
bool OnNativeEngine();

// Most SMs a rank may use, from NVTE_EP_TEST_MAX_SMS; 0 = the library's choice. Ranks that share a GPU need a cap.
int MaxSms();

// A group configuration whose receive buffers hold every routing of layers up to top_k and alignment.
struct GroupShape {
  int experts_per_rank = 4;
  int max_tokens = 64;
  int hidden = 256;
  int top_k = 2;
  int alignment = 1;
  NVTEDType dtype = kNVTEFloat32;
  // Only where the ABI has it.
  int allow_handle_mem_reloc = 0;
  // No fixed receive capacity; for layers of up to top_k.
  bool eager = false;
  // More than 0: so many rows are received, and what exceeds them is dropped.
  int drop_capacity = 0;
  bool zero_copy = false;

  NVTEEpGroupConfig Config() const;
  Extras extras() const { return {eager ? top_k : 0, drop_capacity > 0}; }
};

// The same without a fixed receive capacity.
inline GroupShape Eager(GroupShape shape) {
  shape.eager = true;
  return shape;
}

// The same with `capacity` rows beyond which rows are dropped.
inline GroupShape Dropping(GroupShape shape, int capacity) {
  shape.drop_capacity = capacity;
  return shape;
}

// The EP group of this process, over the world's communicator unless another is given.
class Group {
 public:
  explicit Group(const NVTEEpGroupConfig& config) : Group(config, World::Get().comm()) {}
  Group(const NVTEEpGroupConfig& config, ncclComm_t comm, const Extras& extras = {},
        const Options::Pairs& options = {});
  Group(const NVTEEpGroupConfig& config, const Options& options);
  explicit Group(const GroupShape& shape, const Options::Pairs& options = {})
      : Group(shape.Config(), World::Get().comm(), shape.extras(), options) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Shuts down if that has not been done; an error there fails the test.
  ~Group();

  void Shutdown();
  const NVTEEpGroupConfig& config() const { return config_; }
  int local_experts() const { return config_.num_experts / config_.ep_size; }
  // Rows that arrive at a rank before others are dropped.
  std::size_t drop_capacity() const { return DropCapacity(config_, extras_); }

 private:
  NVTEEpGroupConfig config_;
  Extras extras_;
  bool up_ = true;
};

// A layer and its handle memory.
class Layer {
 public:
  Layer(int top_k, std::size_t alignment);

  Handle handle() const { return HandleOver(mem_); }
  // The same layer with other memory.
  Handle HandleOver(const Tensor& mem) const { return MakeHandle(id_, mem.get()); }
  const DeviceBuffer<std::uint8_t>& memory() const { return memory_; }
  // 0 where layers have no ids.
  std::uint64_t id() const { return id_; }
  int top_k() const { return top_k_; }
  std::size_t alignment() const { return alignment_; }

 private:
  int top_k_;
  std::size_t alignment_;
  std::uint64_t id_ = 0;
  DeviceBuffer<std::uint8_t> memory_;
  Tensor mem_;
};

// The arguments of the per-step calls, to be changed one by one; those of prepare are in abi.h.

struct DispatchArgs {
  Handle handle;
  NVTETensor topk_idx;
  NVTETensor tokens;
  NVTETensor topk_weights;
  NVTETensor recv_tokens;
  NVTETensor recv_topk_weights;
  NVTECommWindow tokens_win = {};
  NVTECommWindow topk_weights_win = {};
  NVTECommWindow recv_tokens_win = {};
  NVTECommWindow recv_topk_weights_win = {};
  void Call(cudaStream_t stream = World::Get().stream()) const;
};

struct CombineArgs {
  Handle handle;
  NVTETensor expert_out;
  NVTETensor result;
  NVTECommWindow expert_out_win = {};
  void Call(cudaStream_t stream = World::Get().stream()) const;
};

struct DispatchBwdArgs {
  Handle handle;
  NVTETensor grad;
  NVTETensor g_recv_topk_weights;
  NVTETensor grad_tokens;
  NVTETensor grad_topk_weights;
  NVTECommWindow grad_win = {};
  NVTECommWindow g_recv_topk_weights_win = {};
  void Call(cudaStream_t stream = World::Get().stream()) const;
};

struct CombineBwdArgs {
  Handle handle;
  NVTETensor grad;
  NVTETensor grad_expert_out;
  NVTECommWindow grad_win = {};
  NVTECommWindow grad_expert_out_win = {};
  void Call(cudaStream_t stream = World::Get().stream()) const;
};

// Bitwise comparison of a matrix of `width` columns.
template <typename T>
testing::AssertionResult SameBits(const std::vector<T>& actual, const std::vector<T>& expected, std::size_t width) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << actual.size() << " elements instead of " << expected.size();
  }
  if (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(T)) == 0) {
    return testing::AssertionSuccess();
  }
  std::size_t differing = 0, first = 0;
  for (std::size_t i = actual.size(); i-- > 0;) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) continue;
    ++differing;
    first = i;
  }
  testing::AssertionResult failure = testing::AssertionFailure();
  failure << differing << " of " << actual.size() << " elements differ, first at row " << first / width << " column "
          << first % width << ": ";
  if constexpr (std::is_integral_v<T>) {
    failure << +actual[first] << " instead of " << +expected[first];
  } else {
    failure << Widen(actual[first]) << " instead of " << Widen(expected[first]);
  }
  return failure;
}

template <typename T>
std::vector<T> Unwritten(std::size_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memset(static_cast<void*>(values.data()), kUnwritten, count * sizeof(T));
  return values;
}

// One step of this rank: inputs uploaded, outputs marked as not written, and for each call the call itself and the
// check of everything that it has to write or to leave alone.
template <typename T, typename Index = std::int64_t, typename Count = std::int32_t>
class Step {
 public:
  // recv_rows = rows of the receive-side buffers; 0 = the group's max_recv_tokens_per_rank, and no rows in eager mode.
  // hidden = elements of a row; 0 = the group's hidden_dim.
  Step(const Group& group, const Layer& layer, Routing routing, std::uint64_t seed, std::size_t recv_rows = 0,
       std::size_t hidden = 0)
      : rank_(World::Get().rank()),
        seed_(seed),
        hidden_(hidden == 0 ? group.config().hidden_dim : hidden),
        top_k_(layer.top_k()),
        rows_(routing.rows[rank_]),
        recv_rows_(recv_rows == 0 ? group.config().max_recv_tokens_per_rank : recv_rows),
        capacity_(group.drop_capacity()),
        alignment_(layer.alignment()),
        handle_(layer.handle()),
        reference_(std::move(routing), group.config().num_experts, layer.alignment(), group.drop_capacity()),
        topk_idx(TopkValues()),
        counts(group.local_experts()),
        total(1),
        tokens(TokenRows(seed)),
        weights(WeightValues()),
        recv_tokens(recv_rows_ * hidden_),
        recv_weights(recv_rows_),
        expert_out(recv_rows_ * hidden_),
        result(rows_ * hidden_),
        grad(TokenRows(seed ^ kGradientSeed)),
        grad_expert_out(recv_rows_ * hidden_),
        slot_grad(recv_rows_ * hidden_),
        g_recv_weights(recv_rows_),
        grad_tokens(rows_ * hidden_),
        grad_weights(rows_ * top_k_),
        topk_idx_t(topk_idx.View({rows_, top_k_})),
        counts_t(counts.View({counts.size()})),
        total_t(total.View({1})),
        tokens_t(tokens.View({rows_, hidden_})),
        weights_t(weights.View({rows_, top_k_})),
        recv_tokens_t(recv_tokens.View({recv_rows_, hidden_})),
        recv_weights_t(recv_weights.View({recv_rows_})),
        expert_out_t(expert_out.View({recv_rows_, hidden_})),
        result_t(result.View({rows_, hidden_})),
        grad_t(grad.View({rows_, hidden_})),
        grad_expert_out_t(grad_expert_out.View({recv_rows_, hidden_})),
        slot_grad_t(slot_grad.View({recv_rows_, hidden_})),
        g_recv_weights_t(g_recv_weights.View({recv_rows_})),
        grad_tokens_t(grad_tokens.View({rows_, hidden_})),
        grad_weights_t(grad_weights.View({rows_, top_k_})) {}

  const Reference& reference() const { return reference_; }
  const std::vector<Slot>& slots() const { return reference_.Slots(rank_); }
  std::size_t rows() const { return rows_; }
  std::size_t hidden() const { return hidden_; }
  std::size_t top_k() const { return top_k_; }
  std::size_t recv_rows() const { return recv_rows_; }
  // From now on the calls name the layer through this handle.
  void UseHandle(const Handle& handle) { handle_ = handle; }
  // Another routing, and other values, for as many tokens: where the tensors lie stays, so a graph reads them at its
  // next launch.
  void Renew(Routing routing, std::uint64_t seed) {
    EXPECT_EQ(static_cast<std::size_t>(routing.rows[rank_]), rows_);
    const int experts = reference_.local_experts() * routing.ranks();
    reference_ = Reference(std::move(routing), experts, alignment_, capacity_);
    seed_ = seed;
    topk_idx.Upload(TopkValues());
    tokens.Upload(TokenRows(seed));
    weights.Upload(WeightValues());
    grad.Upload(TokenRows(seed ^ kGradientSeed));
  }

  PrepareArgs prepare_args() const {
    return MakePrepareArgs(handle_, topk_idx_t.get(), counts_t.get(), total_t.get(), static_cast<int>(top_k_),
                           alignment_);
  }
  DispatchArgs dispatch_args() const {
    return {handle_, topk_idx_t.get(), tokens_t.get(), weights_t.get(), recv_tokens_t.get(), recv_weights_t.get()};
  }
  CombineArgs combine_args() const { return {handle_, expert_out_t.get(), result_t.get()}; }
  DispatchBwdArgs dispatch_bwd_args() const {
    return {handle_, slot_grad_t.get(), g_recv_weights_t.get(), grad_tokens_t.get(), grad_weights_t.get()};
  }
  CombineBwdArgs combine_bwd_args() const { return {handle_, grad_t.get(), grad_expert_out_t.get()}; }

  void Prepare() { prepare_args().Call(); }
  void Dispatch() { dispatch_args().Call(); }
  void DispatchWithoutWeights() {
    DispatchArgs args = dispatch_args();
    args.topk_weights = nullptr;
    args.recv_topk_weights = nullptr;
    args.Call();
  }
  // Uploads what the experts computed and combines it.
  void Combine() { CombineValues(ExpertOutput()); }
  void CombineValues(const std::vector<T>& values) {
    expert_out.Upload(values);
    combine_args().Call();
  }
  void UploadSlotGradients() {
    slot_grad.Upload(SlotRows(
        [this](int destination, const Slot& slot, int column) { return SlotGradient(destination, slot, column); }));
    std::vector<float> per_slot = Unwritten<float>(recv_rows_);
    for (std::size_t s = 0; s < slots().size(); ++s) {
      if (!slots()[s].padding()) per_slot[s] = SlotWeightGradient(rank_, slots()[s]);
    }
    g_recv_weights.Upload(per_slot);
  }
  void DispatchBwd() {
    UploadSlotGradients();
    dispatch_bwd_args().Call();
  }
  void CombineBwd() { combine_bwd_args().Call(); }

  void CheckCounts() {
    const std::vector<std::int64_t>& padded = reference_.Counts(rank_);
    const std::vector<Count> expected(padded.begin(), padded.end());
    EXPECT_TRUE(SameBits(counts.Download(), expected, 1)) << kCounts;
    EXPECT_TRUE(counts.GuardIntact()) << "wrote behind " << kCounts;
    CheckTotals();
    if (!kReportsTotal) return;
    const std::vector<Count> expected_total(1, static_cast<Count>(reference_.Total(rank_)));
    EXPECT_TRUE(SameBits(total.Download(), expected_total, 1)) << "total_recv_tokens_per_rank";
    EXPECT_TRUE(total.GuardIntact()) << "wrote behind total_recv_tokens_per_rank";
  }

  // What the handle memory tells of its last prepare.
  void CheckTotals(cudaStream_t stream = World::Get().stream()) const {
    const auto needed = static_cast<std::uint64_t>(reference_.Total(rank_));
    const std::uint64_t received = std::min<std::uint64_t>(needed, capacity_);
    NVTEEpExtRecvTotals totals = {};
    totals.struct_size = sizeof totals;
    nvte_ep_ext_recv_totals(HandleMemory(handle_), &totals, stream);
    EXPECT_EQ(totals.needed, needed);
    EXPECT_EQ(totals.received, received);
    EXPECT_EQ(totals.dropped, needed - received);
    EXPECT_EQ(totals.not_experts, not_experts);
  }

  // Whether `found` holds `expected` on the receiving side. Rows between the slabs and the capacity, which there are
  // where rows may be dropped, are expected to be cleared, as NCCL EP of API 2 does; that of API 3 leaves them
  // untouched.
  template <typename Value>
  testing::AssertionResult HoldsSlots(const std::vector<Value>& found, std::vector<Value> expected,
                                      std::size_t width) const {
    std::size_t row = 0;
    for (const std::int64_t count : reference_.Counts(rank_)) row += count;
    const std::vector<Value> untouched = Unwritten<Value>(width);
    for (; row < slots().size(); ++row) {
      if (std::memcmp(&found[row * width], untouched.data(), width * sizeof(Value)) != 0) continue;
      std::copy(untouched.begin(), untouched.end(), expected.begin() + row * width);
    }
    return SameBits(found, expected, width);
  }

  void CheckReceived(bool with_weights = true) {
    const std::vector<T> expected = SlotRows(
        [this](int, const Slot& slot, int column) { return TokenValue(seed_, slot.rank, slot.row, column); }, true);
    EXPECT_TRUE(HoldsSlots(recv_tokens.Download(), expected, hidden_)) << "recv_tokens";
    EXPECT_TRUE(recv_tokens.GuardIntact()) << "wrote behind recv_tokens";
    std::vector<float> expected_weights = Unwritten<float>(recv_rows_);
    for (std::size_t s = 0; with_weights && s < slots().size(); ++s) {
      const Slot& slot = slots()[s];
      expected_weights[s] = slot.padding() ? 0.0f : WeightValue(seed_, slot.rank, slot.row, slot.k);
    }
    EXPECT_TRUE(HoldsSlots(recv_weights.Download(), expected_weights, 1)) << "recv_topk_weights";
    EXPECT_TRUE(recv_weights.GuardIntact()) << "wrote behind recv_topk_weights";
  }

  void CheckCombined() {
    CheckSum(result, "result",
             [this](int destination, const Slot& slot, int column) { return OutputValue(destination, slot, column); });
  }

  void CheckCombineBwd() {
    const std::vector<T> expected =
        SlotRows([this](int, const Slot& slot,
                        int column) { return TokenValue(seed_ ^ kGradientSeed, slot.rank, slot.row, column); },
                 true);
    EXPECT_TRUE(HoldsSlots(grad_expert_out.Download(), expected, hidden_)) << "grad_expert_out";
    EXPECT_TRUE(grad_expert_out.GuardIntact()) << "wrote behind grad_expert_out";
  }

  void CheckTokenGradients() {
    CheckSum(grad_tokens, "grad_tokens",
             [this](int destination, const Slot& slot, int column) { return SlotGradient(destination, slot, column); });
  }

  void CheckDispatchBwd() {
    CheckTokenGradients();
    std::vector<float> expected;
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t k = 0; k < top_k_; ++k) {
        expected.push_back(reference_.WeightGradient(
            rank_, static_cast<int>(row), static_cast<int>(k),
            [this](int destination, const Slot& slot) { return SlotWeightGradient(destination, slot); }));
      }
    }
    EXPECT_TRUE(SameBits(grad_weights.Download(), expected, top_k_)) << "grad_topk_weights";
    EXPECT_TRUE(grad_weights.GuardIntact()) << "wrote behind grad_topk_weights";
  }

  void Forward() {
    Prepare();
    CheckCounts();
    Dispatch();
    CheckReceived();
    Combine();
    CheckCombined();
  }

  void Backward() {
    CombineBwd();
    CheckCombineBwd();
    DispatchBwd();
    CheckDispatchBwd();
  }

  void ForwardAndBackward() {
    Forward();
    Backward();
  }

  // What the experts compute from the received rows, for this rank's slots. Padding rows hold NaN: nobody may read
  // them.
  std::vector<T> ExpertOutput() const {
    return SlotRows(
        [this](int destination, const Slot& slot, int column) { return OutputValue(destination, slot, column); });
  }

  // Checks `buffer` [rows, hidden] against the two-level sum of `value` over each token's slots.
  void CheckSum(const DeviceBuffer<T>& buffer, const char* name, const Reference::SlotValue& value) const {
    std::vector<T> expected(rows_ * hidden_);
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t column = 0; column < hidden_; ++column) {
        expected[row * hidden_ + column] =
            Narrow<T>(reference_.Combined(rank_, static_cast<int>(row), static_cast<int>(column), value, &Rounded<T>));
      }
    }
    EXPECT_TRUE(SameBits(buffer.Download(), expected, hidden_)) << name;
    EXPECT_TRUE(buffer.GuardIntact()) << "wrote behind " << name;
  }

 private:
  static constexpr std::uint64_t kGradientSeed = 0x9000;

  // One expert's output: the token scaled by a factor of the expert, so that a mixed-up expert shows and sums round.
  float OutputValue(int destination, const Slot& slot, int column) const {
    const int expert = destination * reference_.local_experts() + slot.local_expert;
    const float factor = 0.75f + 0.25f * static_cast<float>(expert % 7);
    return Rounded<T>(factor * TokenValue(seed_, slot.rank, slot.row, column));
  }

  float SlotGradient(int destination, const Slot& slot, int column) const {
    const int expert = destination * reference_.local_experts() + slot.local_expert;
    return TokenValue(seed_ + 31 + expert, slot.rank, slot.row, column) / 16.0f;
  }

  float SlotWeightGradient(int destination, const Slot& slot) const {
    const int expert = destination * reference_.local_experts() + slot.local_expert;
    // Any FP32 value has to arrive unchanged.
    return 1.0f / static_cast<float>(3 + expert + 7 * slot.row + 1009 * slot.rank);
  }

  std::vector<T> SlotRows(const Reference::SlotValue& value, bool zero_padding = false) const {
    std::vector<T> values = Unwritten<T>(recv_rows_ * hidden_);
    for (std::size_t s = 0; s < slots().size(); ++s) {
      const Slot& slot = slots()[s];
      if (slot.padding() && !zero_padding) continue;
      for (std::size_t column = 0; column < hidden_; ++column) {
        values[s * hidden_ + column] = Narrow<T>(slot.padding() ? 0.0f : value(rank_, slot, static_cast<int>(column)));
      }
    }
    return values;
  }

  std::vector<Index> TopkValues() const {
    const std::vector<std::int64_t>& mine = reference_.routing().expert[rank_];
    return std::vector<Index>(mine.begin(), mine.end());
  }

  std::vector<T> TokenRows(std::uint64_t seed) const {
    std::vector<T> values(rows_ * hidden_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = Narrow<T>(TokenValue(seed, rank_, static_cast<int>(i / hidden_), static_cast<int>(i % hidden_)));
    }
    return values;
  }

  std::vector<float> WeightValues() const {
    std::vector<float> values(rows_ * top_k_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = WeightValue(seed_, rank_, static_cast<int>(i / top_k_), static_cast<int>(i % top_k_));
    }
    return values;
  }

  const int rank_;
  std::uint64_t seed_;
  const std::size_t hidden_;
  const std::size_t top_k_;
  const std::size_t rows_;
  const std::size_t recv_rows_;
  const std::size_t capacity_;
  const std::size_t alignment_;
  Handle handle_;
  Reference reference_;

 public:
  // How many of the indices are beyond the experts.
  std::uint64_t not_experts = 0;
  DeviceBuffer<Index> topk_idx;
  DeviceBuffer<Count> counts;
  DeviceBuffer<Count> total;
  DeviceBuffer<T> tokens;
  DeviceBuffer<float> weights;
  DeviceBuffer<T> recv_tokens;
  DeviceBuffer<float> recv_weights;
  DeviceBuffer<T> expert_out;
  DeviceBuffer<T> result;
  DeviceBuffer<T> grad;
  DeviceBuffer<T> grad_expert_out;
  DeviceBuffer<T> slot_grad;
  DeviceBuffer<float> g_recv_weights;
  DeviceBuffer<T> grad_tokens;
  DeviceBuffer<float> grad_weights;
  Tensor topk_idx_t, counts_t, total_t, tokens_t, weights_t, recv_tokens_t, recv_weights_t, expert_out_t, result_t,
      grad_t, grad_expert_out_t, slot_grad_t, g_recv_weights_t, grad_tokens_t, grad_weights_t;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_EP_H_
