// Low-latency groups, and one step of this rank in one: inputs uploaded, experts on the host, and the checks of all
// outputs.

#ifndef NVTE_EP_TESTS_EP_LOW_LATENCY_H_
#define NVTE_EP_TESTS_EP_LOW_LATENCY_H_

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ep/routings.h"
#include "support/device.h"
#include "support/ep.h"
#include "support/number.h"
#include "support/options.h"
#include "support/reference.h"
#include "support/tensor.h"

namespace test {

// The low-latency group of this process.
class LlGroup {
 public:
  static NVTEEpExtLLConfig Config(int experts, int top_k, int hidden = 512, NVTEDType dtype = kNVTEBFloat16,
                                  int max_tokens = 16) {
    NVTEEpExtLLConfig config = {};
    config.struct_size = sizeof config;
    config.ep_size = Ranks();
    config.num_experts = experts;
    config.max_tokens_per_rank = max_tokens;
    config.hidden_dim = hidden;
    config.num_topk = top_k;
    config.max_num_sms = MaxSms();
    config.max_token_dtype = dtype;
    return config;
  }

  explicit LlGroup(const NVTEEpExtLLConfig& config, const Options::Pairs& options = {}) : config_(config) {
    nvte_ep_ext_ll_initialize(World::Get().comm(), &config, Options(options).raw());
  }
  ~LlGroup() { EXPECT_NO_THROW(nvte_ep_ext_ll_shutdown()); }
  LlGroup(const LlGroup&) = delete;
  LlGroup& operator=(const LlGroup&) = delete;

  int experts() const { return config_.num_experts; }
  std::size_t local_experts() const { return config_.num_experts / config_.ep_size; }
  std::size_t slab_rows() const { return std::size_t(config_.ep_size) * config_.max_tokens_per_rank; }

 private:
  NVTEEpExtLLConfig config_;
};

// A handle: its memory.
struct LlHandle {
  LlHandle() : memory(nvte_ep_ext_ll_handle_mem_size()), tensor(memory.View({memory.size()})) {}
  NVTETensor get() const { return tensor.get(); }

  DeviceBuffer<std::uint8_t> memory;
  Tensor tensor;
};

// What an expert does to an element: a factor of few bits.
inline float ExpertFactor(std::int64_t expert) { return 1.0f + 0.25f * static_cast<float>(expert % 4); }

template <typename T, typename Index = std::int64_t>
class LlStep {
 public:
  LlStep(const LlGroup& group, Routing of_all, std::uint64_t seed, std::size_t hidden = 512)
      : routing(std::move(of_all)),
        seed(seed),
        rank(World::Get().rank()),
        rows(routing.rows[rank]),
        top_k(routing.top_k),
        width(hidden),
        local(group.local_experts()),
        slab(group.slab_rows()),
        topk_idx(rows * top_k),
        topk_weights(rows * top_k),
        tokens(rows * width),
        recv_tokens(local * slab * width),
        counts(local),
        expert_out(local * slab * width),
        result(rows * width),
        topk_idx_t(topk_idx.View({rows, top_k})),
        topk_weights_t(topk_weights.View({rows, top_k})),
        tokens_t(tokens.View({rows, width})),
        recv_tokens_t(recv_tokens.View({local, slab, width})),
        counts_t(counts.View({local})),
        expert_out_t(expert_out.View({local, slab, width})),
        result_t(result.View({rows, width})) {
    UploadInputs();
  }

  // Other experts and values, for as many tokens, in the same memory.
  void Renew(Routing other, std::uint64_t other_seed) {
    routing = std::move(other);
    seed = other_seed;
    UploadInputs();
    recv_tokens.Clear();
    counts.Clear();
    result.Clear();
  }

  void Dispatch(const LlHandle& handle, int send_only = 0, cudaStream_t stream = World::Get().stream()) const {
    nvte_ep_ext_ll_dispatch(handle.get(), topk_idx_t.get(), tokens_t.get(), recv_tokens_t.get(), counts_t.get(),
                            send_only, stream);
  }
  void Combine(const LlHandle& handle, int send_only = 0, cudaStream_t stream = World::Get().stream()) const {
    nvte_ep_ext_ll_combine(handle.get(), topk_idx_t.get(), topk_weights_t.get(), expert_out_t.get(), result_t.get(),
                           send_only, stream);
  }
  // The rows as they came are the experts' output.
  void CombineReceived(const LlHandle& handle) const {
    nvte_ep_ext_ll_combine(handle.get(), topk_idx_t.get(), topk_weights_t.get(), recv_tokens_t.get(), result_t.get(), 0,
                           World::Get().stream());
  }

  // Checks the received rows and gives the experts' output.
  void RunExperts() {
    const std::vector<std::int32_t> found = counts.Download();
    const std::vector<T> received = recv_tokens.Download();
    std::vector<T> out(local * slab * width);
    for (std::size_t e = 0; e < local; ++e) {
      const std::int64_t expert = static_cast<std::int64_t>(rank * local + e);
      std::vector<std::vector<float>> expected = RowsOf(expert);
      ASSERT_EQ(found[e], static_cast<std::int32_t>(expected.size())) << "expert " << expert;
      std::vector<std::vector<float>> actual;
      for (std::size_t row = 0; row < expected.size(); ++row) {
        const std::size_t first = (e * slab + row) * width;
        std::vector<float> values(width);
        for (std::size_t column = 0; column < width; ++column) {
          values[column] = Widen(received[first + column]);
          out[first + column] = Narrow<T>(values[column] * ExpertFactor(expert));
        }
        actual.push_back(std::move(values));
      }
      // The order of an expert's rows is no promise.
      std::sort(expected.begin(), expected.end());
      std::sort(actual.begin(), actual.end());
      EXPECT_EQ(actual, expected) << "expert " << expert;
    }
    EXPECT_TRUE(recv_tokens.GuardIntact());
    EXPECT_TRUE(counts.GuardIntact());
    expert_out.Upload(out);
  }

  // Compares with a sum in float64, within one rounding of the type and those of the float32 sum.
  void CheckResult(bool with_factors = true) const {
    const std::vector<T> found = result.Download();
    const double rounding = std::is_same_v<T, float> ? 0.0 : std::is_same_v<T, Float16> ? 0x1p-11 : 0x1p-8;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t column = 0; column < width; ++column) {
        const float token = TokenValue(seed, rank, int(row), int(column));
        double sum = 0, magnitude = 0;
        for (std::size_t k = 0; k < top_k; ++k) {
          const std::int64_t expert = routing.at(rank, int(row), int(k));
          if (expert < 0) continue;
          const float out = Rounded<T>(with_factors ? token * ExpertFactor(expert) : token);
          const double term = double(WeightValue(seed, rank, int(row), int(k))) * out;
          sum += term;
          magnitude += std::abs(term);
        }
        const double error = std::abs(Widen(found[row * width + column]) - sum);
        ASSERT_LE(error, rounding * std::abs(sum) + 0x1p-21 * magnitude)
            << "row " << row << " column " << column << ": " << Widen(found[row * width + column]) << ", not " << sum;
      }
    }
    EXPECT_TRUE(result.GuardIntact());
  }

  void Run(const LlHandle& handle) {
    Dispatch(handle);
    RunExperts();
    Combine(handle);
    CheckResult();
  }

  // The rows that all ranks send to `expert`.
  std::vector<std::vector<float>> RowsOf(std::int64_t expert) const {
    std::vector<std::vector<float>> all;
    for (int source = 0; source < routing.ranks(); ++source) {
      for (int row = 0; row < routing.rows[source]; ++row) {
        for (int k = 0; k < routing.top_k; ++k) {
          if (routing.at(source, row, k) != expert) continue;
          std::vector<float> values(width);
          for (std::size_t column = 0; column < width; ++column) {
            values[column] = Rounded<T>(TokenValue(seed, source, row, int(column)));
          }
          all.push_back(std::move(values));
        }
      }
    }
    return all;
  }

  Routing routing;
  std::uint64_t seed;
  int rank;
  std::size_t rows, top_k, width, local, slab;
  DeviceBuffer<Index> topk_idx;
  DeviceBuffer<float> topk_weights;
  DeviceBuffer<T> tokens, recv_tokens;
  DeviceBuffer<std::int32_t> counts;
  DeviceBuffer<T> expert_out, result;
  Tensor topk_idx_t, topk_weights_t, tokens_t, recv_tokens_t, counts_t, expert_out_t, result_t;

 private:
  void UploadInputs() {
    std::vector<Index> experts;
    std::vector<float> weights;
    std::vector<T> values;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t k = 0; k < top_k; ++k) {
        experts.push_back(static_cast<Index>(routing.at(rank, int(row), int(k))));
        weights.push_back(WeightValue(seed, rank, int(row), int(k)));
      }
      for (std::size_t column = 0; column < width; ++column) {
        values.push_back(Narrow<T>(TokenValue(seed, rank, int(row), int(column))));
      }
    }
    topk_idx.Upload(experts);
    topk_weights.Upload(weights);
    tokens.Upload(values);
  }
};

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_LOW_LATENCY_H_
