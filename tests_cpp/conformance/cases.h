// The table of cases of nccl_ep_conformance: the same on every machine, for a number of ranks.

#ifndef NVTE_EP_TESTS_CONFORMANCE_CASES_H_
#define NVTE_EP_TESTS_CONFORMANCE_CASES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/reference.h"

namespace conformance {

enum class DType { kBFloat16, kFloat16, kFloat32 };
enum class Mode { kFixed, kEager, kDrop };
enum class ZeroCopy { kAuto, kOff, kOn };
enum class Memory { kDevice, kPinned };
// How the case comes by its handle: the group's last one, InitHandle over own memory, InitHandle with the library's, or
// CreateHandle.
enum class HandleFrom { kLast, kInitOwn, kInitLibrary, kCreate };

// What NCCL EP compiles kernels for: the first use of each costs seconds on a GPU, so there are few.
struct Kernels {
  std::size_t hidden;
  DType dtype;
  int top_k;
  // Rounded up to 64 it is part of the kernels too: a group draws from here up to the next multiple of 64.
  int least_max_tokens;
};

struct Case {
  int number;
  test::Routing routing;
  std::string routing_name;
  int masked_percent;
  int duplicate_percent;
  std::uint64_t seed;
  // Quantised rows with their scales (NCCL_EP_DISP_QUANT_FWD), in place of rows of the group's type.
  bool mxfp8;
  // Without weights, rows are dispatched and their gradients combined by the passes that carry none.
  bool weights;
  bool wide_indices;
  bool wide_counters;
  Memory counters;
  // Which of expert_counters, expert_offsets and recv_total_counter are given.
  bool counts, offsets, total;
  HandleFrom handle;
  // With zero copy: tensors name their window only, not the address.
  bool window_only;
};

struct Group {
  int number;
  int ranks;
  Kernels kernels;
  int local_experts;
  int max_tokens;
  std::size_t alignment;
  Mode mode;
  ZeroCopy zero_copy;
  // Rows of a rank's receive buffer. In eager mode: those that the largest routing needs.
  std::size_t capacity;
  // Where tensors begin in their windows.
  std::size_t window_offset;
  std::vector<Case> cases;

  int experts() const { return ranks * local_experts; }
  // Rows are written as duplicates of one, not permuted out of staging.
  bool writes_duplicates() const { return zero_copy == ZeroCopy::kOn; }
};

std::size_t SizeOf(DType dtype);

std::vector<Group> MakeTable(int ranks);

// The parameters of a case, as its line in the record begins.
std::string Describe(const Group& group, const Case& one);

}  // namespace conformance

#endif  // NVTE_EP_TESTS_CONFORMANCE_CASES_H_
