// Token counts and routings that several tests use.

#ifndef NVTE_EP_TESTS_EP_ROUTINGS_H_
#define NVTE_EP_TESTS_EP_ROUTINGS_H_

#include <cstdint>
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

// Token `row` goes to the experts behind expert row + rank, round and round.
inline Routing RoundRobin(const std::vector<int>& rows, int top_k, int experts) {
  return MakeRouting(rows, top_k, [=](int rank, int row, int k) { return (row + rank + k) % experts; });
}

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_ROUTINGS_H_
