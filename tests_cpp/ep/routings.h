// Token counts, routings and steps that several tests use.

#ifndef NVTE_EP_TESTS_EP_ROUTINGS_H_
#define NVTE_EP_TESTS_EP_ROUTINGS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "support/ep.h"

namespace test {

inline int Ranks() { return World::Get().size(); }

inline int Experts(const Group& group) { return group.config().num_experts; }

// The same number of tokens on every rank.
inline std::vector<int> EvenRows(int rows) { return std::vector<int>(Ranks(), rows); }

// Another number of tokens on every rank, the most on rank 1; zero on rank 2.
inline std::vector<int> UnevenRows(int most) {
  std::vector<int> rows = {7, most, 0, 1};
  rows.resize(Ranks(), most / 2);
  return rows;
}

// Every token goes to two experts of rank `target`, which has four or more.
inline Routing ToRank(int target, const std::vector<int>& rows, int local_experts) {
  return MakeRouting(rows, 2, [=](int, int row, int k) { return target * local_experts + (row + k) % 4; });
}

// A step whose receive side has the rows that the step takes, or one, as it is in eager mode.
inline std::unique_ptr<Step<BFloat16>> EagerStep(const Group& group, const Layer& layer, const Routing& routing,
                                                 std::uint64_t seed) {
  const Reference reference(routing, group.config().num_experts, layer.alignment());
  const std::size_t rows = std::max<std::size_t>(reference.Total(World::Get().rank()), 1);
  return std::make_unique<Step<BFloat16>>(group, layer, routing, seed, rows);
}

// Token `row` goes to the experts behind expert row + rank, round and round.
inline Routing RoundRobin(const std::vector<int>& rows, int top_k, int experts) {
  return MakeRouting(rows, top_k, [=](int rank, int row, int k) { return (row + rank + k) % experts; });
}

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_ROUTINGS_H_
