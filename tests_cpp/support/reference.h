// What dispatch and combine have to do, computed on the host from the routing of all ranks. It shares nothing with the
// library: every rank can compute every other rank's inputs, because they are closed forms of (seed, rank, row,
// column).

#ifndef NVTE_EP_TESTS_SUPPORT_REFERENCE_H_
#define NVTE_EP_TESTS_SUPPORT_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace test {

// The routing of all ranks in one step.
struct Routing {
  int top_k = 0;
  // rows[rank] = number of tokens; expert[rank][row * top_k + k] = global expert, or negative for none.
  std::vector<int> rows;
  std::vector<std::vector<std::int64_t>> expert;

  int ranks() const { return static_cast<int>(rows.size()); }
  std::int64_t at(int rank, int row, int k) const { return expert[rank][static_cast<std::size_t>(row) * top_k + k]; }
};

// A routing whose entries are pick(rank, row, k).
Routing MakeRouting(const std::vector<int>& rows, int top_k, const std::function<std::int64_t(int, int, int)>& pick);

// top_k distinct random experts for every token; each entry is masked (-1) with a probability of masked_percent.
Routing RandomRouting(const std::vector<int>& rows, int top_k, int experts, std::uint64_t seed, int masked_percent = 0);

// A well-mixed 64-bit function of its arguments.
std::uint64_t Mix(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0);

// Closed forms of the inputs; each is exact in bf16, f16 and f32.
float TokenValue(std::uint64_t seed, int rank, int row, int column);
float WeightValue(std::uint64_t seed, int rank, int row, int k);

// One row of a receive buffer.
struct Slot {
  int local_expert = -1;
  int rank = -1;  // source; negative in a padding row
  int row = -1;
  int k = -1;  // the column of the token's routing that named this expert

  bool padding() const { return rank < 0; }
};

class Reference {
 public:
  // What becomes of rows beyond the capacity. By tokens and rows: a rank takes its first `capacity` distinct tokens, in
  // the order of their sources, and of these the rows below `capacity`. By rows: the rows below `capacity`. Places stay
  // as if nothing were dropped; a place whose token is gone is padding, and so are all rows up to the capacity.
  enum class Drops { kTokensAndRows, kRows };

  // capacity = rows that a rank receives at most.
  Reference(Routing routing, int experts, std::size_t alignment,
            std::size_t capacity = std::numeric_limits<std::size_t>::max(), Drops drops = Drops::kTokensAndRows);

  const Routing& routing() const { return routing_; }
  int local_experts() const { return local_experts_; }

  // Padded rows of every local expert of `rank`, without dropped ones.
  const std::vector<std::int64_t>& Counts(int rank) const { return counts_[rank]; }
  // Padded rows of all local experts of `rank`, dropped ones included.
  std::int64_t Total(int rank) const { return totals_[rank]; }
  // The receive buffer of `rank`, padding included.
  const std::vector<Slot>& Slots(int rank) const { return slots_[rank]; }

  // Value of one element of a row of expert output (or of gradient): a function of the slot and the column. It must
  // return values that the token type holds.
  using SlotValue = std::function<float(int destination, const Slot& slot, int column)>;

  // One element of a combined row: for every destination rank in turn the FP32 sum over its experts, rounded by
  // `round`, and then the FP32 sum over the ranks, rounded.
  float Combined(int rank, int row, int column, const SlotValue& value, float (*round)(float)) const;

  // grad_topk_weights[row, k] of `rank`: the gradient of the slot that this entry of the routing made; 0 if none.
  float WeightGradient(int rank, int row, int k, const std::function<float(int destination, const Slot&)>& value) const;

  // The index in Slots(destination) of the token's row for a local expert; negative if there is none.
  std::int64_t SlotIndex(int destination, int local_expert, int rank, int row) const;

 private:
  void Drop(int destination, std::size_t capacity, Drops drops);

  Routing routing_;
  int local_experts_;
  std::vector<std::vector<std::int64_t>> counts_;
  std::vector<std::int64_t> totals_;
  std::vector<std::vector<Slot>> slots_;
  // slot_of_[destination][rank][row * local_experts + local expert]
  std::vector<std::vector<std::vector<std::int64_t>>> slot_of_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_REFERENCE_H_
