// Low-latency groups: dispatch, combine and their halves against a reference in float64, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/graph.h"
#include "ep/low_latency.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"

namespace test {
namespace {

// Of 32 multiprocessors, which four ranks of one GPU have each, 16 warps are left for an expert.
constexpr int kExperts = 64;
// All 32 warps.
constexpr int kFewExperts = 32;

TEST(LowLatency, StepsOfAnyTopK) {
  for (const auto& [experts, most] : {std::pair(kExperts, 8), std::pair(kFewExperts, 22)}) {
    const LlGroup group(LlGroup::Config(experts, most));
    const LlHandle handle;
    for (const int top_k : {1, most}) {
      SCOPED_TRACE("top_k " + std::to_string(top_k));
      LlStep<BFloat16>(group, RandomRouting(UnevenRows(16), top_k, experts, 9100 + top_k, 10), 9100 + top_k)
          .Run(handle);
    }
    LlStep<BFloat16>(group, RandomRouting(EvenRows(0), most, experts, 9101), 9101).Run(handle);
  }
}

TEST(LowLatency, OtherTypesAndIndices) {
  const LlGroup group(LlGroup::Config(kExperts, 4, 512, kNVTEFloat32));
  const LlHandle handle;
  LlStep<float, std::int32_t>(group, RandomRouting(UnevenRows(9), 4, kExperts, 9110), 9110).Run(handle);
  LlStep<Float16>(group, RandomRouting(UnevenRows(5), 4, kExperts, 9111), 9111).Run(handle);
}

// Only what the indices say counts in combine, not where they are.
TEST(LowLatency, CombineTakesACopyOfTheIndices) {
  const LlGroup group(LlGroup::Config(kExperts, 4));
  const LlHandle handle;
  LlStep<BFloat16> step(group, RandomRouting(UnevenRows(9), 4, kExperts, 9115), 9115);
  step.Dispatch(handle);
  step.RunExperts();
  const DeviceBuffer<std::int64_t> copy(step.topk_idx.Download());
  const Tensor topk_idx = copy.View({step.rows, step.top_k});
  nvte_ep_ext_ll_combine(handle.get(), topk_idx.get(), step.topk_weights_t.get(), step.expert_out_t.get(),
                         step.result_t.get(), 0, World::Get().stream());
  step.CheckResult();
}

TEST(LowLatency, ManyExperts) {
  // Of 32 multiprocessors, 4 warps are left for an expert.
  const LlGroup group(LlGroup::Config(256, 3, 512, kNVTEBFloat16, 4));
  const LlHandle handle;
  LlStep<BFloat16>(group, RandomRouting(EvenRows(4), 3, 256, 9120), 9120).Run(handle);
}

// Each token of each rank has a place in the slab.
TEST(LowLatency, AllToOneExpert) {
  const LlGroup group(LlGroup::Config(kExperts, 1));
  const LlHandle handle;
  const int last = kExperts - 1;
  LlStep<BFloat16>(group, MakeRouting(EvenRows(16), 1, [=](int, int, int) { return last; }), 9130).Run(handle);
}

TEST(LowLatency, HalvesAndWholeCallsOverSeveralHandles) {
  const LlGroup group(LlGroup::Config(kExperts, 8));
  const LlHandle handles[3];
  const cudaStream_t stream = World::Get().stream();
  std::vector<std::unique_ptr<LlStep<BFloat16>>> steps;
  for (int i = 0; i < 3; ++i) {
    steps.push_back(std::make_unique<LlStep<BFloat16>>(
        group, RandomRouting(UnevenRows(12 + i), 2 + 3 * i, kExperts, 9140 + i), 9140 + i));
  }
  for (int round = 0; round < 2; ++round) {
    steps[0]->Dispatch(handles[0], 1);
    nvte_ep_ext_ll_complete(handles[0].get(), stream);
    steps[1]->Dispatch(handles[1]);
    steps[2]->Dispatch(handles[2], 1);
    nvte_ep_ext_ll_complete(handles[2].get(), stream);
    for (auto& step : steps) step->RunExperts();
    steps[1]->Combine(handles[1], 1);
    nvte_ep_ext_ll_complete(handles[1].get(), stream);
    steps[0]->Combine(handles[0]);
    steps[2]->Combine(handles[2], 1);
    nvte_ep_ext_ll_complete(handles[2].get(), stream);
    for (int i = 0; i < 3; ++i) {
      steps[i]->CheckResult();
      steps[i]->Renew(RandomRouting(UnevenRows(12 + i), 2 + 3 * i, kExperts, 9150 + i), 9150 + i);
    }
  }
}

TEST(LowLatency, InTurnWithTheOtherGroup) {
  GroupShape shape;
  shape.dtype = kNVTEBFloat16;
  const LlGroup first(LlGroup::Config(kExperts, 4));
  const LlHandle handle;
  {
    Group other(shape);
    Layer layer(2, 1);
    for (int round = 0; round < 2; ++round) {
      LlStep<BFloat16>(first, RandomRouting(UnevenRows(8), 4, kExperts, 9160 + round), 9160 + round).Run(handle);
      Step<BFloat16>(other, layer, RandomRouting(UnevenRows(20), 2, Experts(other), 9170 + round), 9170 + round)
          .ForwardAndBackward();
    }
  }
  // The end of one is not the end of the other.
  LlStep<BFloat16>(first, RandomRouting(UnevenRows(8), 4, kExperts, 9165), 9165).Run(handle);
}

TEST(LowLatency, GraphsReadTheIndicesAgain) {
  const LlGroup group(LlGroup::Config(kExperts, 8));
  const LlHandle whole, halves;
  const auto routing = [](std::uint64_t seed) { return RandomRouting(UnevenRows(10), 8, kExperts, seed); };
  LlStep<BFloat16> a(group, routing(9180), 9180), b(group, routing(9181), 9181);
  // Once before the capture, as GPUs compile their kernels at the first call.
  a.Run(whole);
  const Graph graph([&] {
    a.Dispatch(whole);
    a.CombineReceived(whole);
    b.Dispatch(halves, 1);
    nvte_ep_ext_ll_complete(halves.get(), World::Get().stream());
    b.CombineReceived(halves);
  });
  for (std::uint64_t seed : {9182, 9184}) {
    a.Renew(routing(seed), seed);
    b.Renew(routing(seed + 1), seed + 1);
    graph.Launch();
    a.CheckResult(/*with_factors=*/false);
    b.CheckResult(/*with_factors=*/false);
    // Others in between.
    LlStep<BFloat16>(group, routing(seed + 100), seed + 100).Run(whole);
  }
}

// The value of an e4m3 byte.
float E4M3(std::uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float magnitude =
      exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}

Tensor WithScales(NVTEScalingMode mode, const NVTEBasicTensor& data, const NVTEBasicTensor& scales) {
  Tensor tensor = Tensor::Adopt(nvte_create_tensor(mode));
  nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseData, &data, sizeof data);
  nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseScaleInv, &scales, sizeof scales);
  return tensor;
}

// Values of 3 bits, and the largest of them in each 128: then the scales are powers of two, and nothing is lost.
float ExactValue(std::uint64_t seed, int rank, int row, int column) {
  if (column % 128 == 5) return 7.0f;
  return float(int(Mix(seed, rank, row, column) % 15) - 7);
}

TEST(LowLatency, RowsAreQuantizedOnTheWay) {
  const std::size_t hidden = 512;
  const LlGroup group(LlGroup::Config(kExperts, 8, int(hidden)));
  const LlHandle handle;
  LlStep<BFloat16> step(group, RandomRouting(UnevenRows(9), 8, kExperts, 9190), 9190, hidden);
  std::vector<BFloat16> tokens;
  for (std::size_t row = 0; row < step.rows; ++row) {
    for (std::size_t column = 0; column < hidden; ++column) {
      tokens.push_back(Narrow<BFloat16>(ExactValue(step.seed, step.rank, int(row), int(column))));
    }
  }
  step.tokens.Upload(tokens);
  const std::size_t slots = step.local * step.slab;
  DeviceBuffer<std::uint8_t> values(slots * hidden);
  DeviceBuffer<float> scales(slots * hidden / 128);
  const Tensor recv = WithScales(NVTE_BLOCK_SCALING_1D,
                                 MakeBasicTensor(values.data(), kNVTEFloat8E4M3, {step.local, step.slab, hidden}),
                                 MakeBasicTensor(scales.data(), kNVTEFloat32, {step.local, step.slab, hidden / 128}));
  nvte_ep_ext_ll_dispatch(handle.get(), step.topk_idx_t.get(), step.tokens_t.get(), recv.get(), step.counts_t.get(), 0,
                          World::Get().stream());
  const std::vector<std::int32_t> counts = step.counts.Download();
  const std::vector<std::uint8_t> found = values.Download();
  const std::vector<float> found_scales = scales.Download();
  std::vector<BFloat16> out(slots * hidden);
  for (std::size_t e = 0; e < step.local; ++e) {
    std::vector<std::vector<float>> expected, actual;
    for (int source = 0; source < step.routing.ranks(); ++source) {
      for (int row = 0; row < step.routing.rows[source]; ++row) {
        for (int k = 0; k < step.routing.top_k; ++k) {
          if (step.routing.at(source, row, k) != std::int64_t(step.rank * step.local + e)) continue;
          std::vector<float> sent(hidden);
          for (std::size_t column = 0; column < hidden; ++column) {
            sent[column] = ExactValue(step.seed, source, row, int(column));
          }
          expected.push_back(std::move(sent));
        }
      }
    }
    ASSERT_EQ(counts[e], std::int32_t(expected.size()));
    for (std::size_t row = 0; row < expected.size(); ++row) {
      std::vector<float> got(hidden);
      for (std::size_t column = 0; column < hidden; ++column) {
        const std::size_t at = (e * step.slab + row) * hidden + column;
        EXPECT_EQ(found_scales[at / 128], 7.0f / 448.0f);
        got[column] = E4M3(found[at]) * found_scales[at / 128];
        out[at] = Narrow<BFloat16>(got[column]);
      }
      actual.push_back(std::move(got));
    }
    std::sort(expected.begin(), expected.end());
    std::sort(actual.begin(), actual.end());
    EXPECT_EQ(actual, expected) << "local expert " << e;
  }
  // The experts' output is bfloat16 again.
  step.expert_out.Upload(out);
  step.Combine(handle);
  World::Get().Wait();
}

TEST(LowLatency, Mxfp8RowsPassAsTheyAre) {
  const std::size_t hidden = 512, blocks = hidden / 32;
  const LlGroup group(LlGroup::Config(kExperts, 4, int(hidden)));
  const LlHandle handle;
  LlStep<BFloat16> step(group, RandomRouting(UnevenRows(9), 4, kExperts, 9200), 9200, hidden);
  const auto byte = [&](int rank, int row, std::size_t i) { return std::uint8_t(Mix(step.seed, rank, row, i) % 120); };
  const auto row_of = [&](int rank, int row) {
    std::vector<std::uint8_t> bytes(hidden + blocks);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte(rank, row, i);
    return bytes;
  };
  std::vector<std::uint8_t> own, own_scales;
  for (std::size_t row = 0; row < step.rows; ++row) {
    const std::vector<std::uint8_t> bytes = row_of(step.rank, int(row));
    own.insert(own.end(), bytes.begin(), bytes.begin() + hidden);
    own_scales.insert(own_scales.end(), bytes.begin() + hidden, bytes.end());
  }
  const std::size_t slots = step.local * step.slab;
  DeviceBuffer<std::uint8_t> values(own), scales(own_scales), recv_values(slots * hidden), recv_scales(slots * blocks);
  const Tensor tokens =
      WithScales(NVTE_MXFP8_1D_SCALING, MakeBasicTensor(values.data(), kNVTEFloat8E4M3, {step.rows, hidden}),
                 MakeBasicTensor(scales.data(), kNVTEFloat8E8M0, {step.rows, blocks}));
  const Tensor recv = WithScales(NVTE_MXFP8_1D_SCALING,
                                 MakeBasicTensor(recv_values.data(), kNVTEFloat8E4M3, {step.local, step.slab, hidden}),
                                 MakeBasicTensor(recv_scales.data(), kNVTEFloat8E8M0, {step.local, step.slab, blocks}));
  nvte_ep_ext_ll_dispatch(handle.get(), step.topk_idx_t.get(), tokens.get(), recv.get(), step.counts_t.get(), 0,
                          World::Get().stream());
  const std::vector<std::uint8_t> found = recv_values.Download(), found_scales = recv_scales.Download();
  for (std::size_t e = 0; e < step.local; ++e) {
    std::vector<std::vector<std::uint8_t>> expected, actual;
    for (int source = 0; source < step.routing.ranks(); ++source) {
      for (int row = 0; row < step.routing.rows[source]; ++row) {
        for (int k = 0; k < step.routing.top_k; ++k) {
          if (step.routing.at(source, row, k) == std::int64_t(step.rank * step.local + e)) {
            expected.push_back(row_of(source, row));
          }
        }
      }
    }
    for (std::size_t row = 0; row < expected.size(); ++row) {
      const std::size_t slot = e * step.slab + row;
      std::vector<std::uint8_t> bytes(found.begin() + slot * hidden, found.begin() + (slot + 1) * hidden);
      bytes.insert(bytes.end(), found_scales.begin() + slot * blocks, found_scales.begin() + (slot + 1) * blocks);
      actual.push_back(std::move(bytes));
    }
    std::sort(expected.begin(), expected.end());
    std::sort(actual.begin(), actual.end());
    EXPECT_EQ(actual, expected) << "local expert " << e;
  }
}

TEST(LowLatency, MemoryUsage) {
  const LlGroup group(LlGroup::Config(kExperts, 8));
  NVTEEpExtLLMemoryUsage usage = {};
  usage.struct_size = sizeof usage;
  nvte_ep_ext_ll_memory_usage(&usage);
  // docs/memory.md: rows of 1024 bytes, 32 more to dispatch and 16 more to combine.
  const std::uint64_t ranks = Ranks(), tokens = 16,
                      bytes = 2 * std::max((ranks + 1) * tokens * 1056, (64 + 8) * tokens * 1040) + 2 * 256;
  const std::uint64_t piece = 2 << 20;
  EXPECT_EQ(usage.buffers, (bytes + piece - 1) / piece * piece);
  EXPECT_EQ(usage.workspace, 32u << 20);
  EXPECT_EQ(usage.total, usage.buffers + usage.workspace + usage.library);
  EXPECT_EQ(usage.handles, 0u);
  const LlHandle handle;
  const auto whole = [](std::uint64_t part) { return (part + 255) / 256 * 256; };
  EXPECT_EQ(handle.memory.size(), whole(4 * ranks * (1 + 9 * tokens)) + whole(8 * kExperts));
  LlStep<BFloat16>(group, RandomRouting(EvenRows(3), 2, kExperts, 9210), 9210).Run(handle);
  nvte_ep_ext_ll_memory_usage(&usage);
  EXPECT_EQ(usage.handles, 1u);
  EXPECT_EQ(usage.handle_memory, handle.memory.size());
}

// One group for all refusals, and a whole step after each.
class LowLatencyErrors : public testing::Test {
 protected:
  void SetUp() override {
    group_ = std::make_unique<LlGroup>(LlGroup::Config(kExperts, 8));
    handle_ = std::make_unique<LlHandle>();
    step_ = std::make_unique<LlStep<BFloat16>>(*group_, RandomRouting(EvenRows(5), 4, kExperts, 9300), 9300);
  }
  void TearDown() override {
    if (step_) step_->Run(*handle_);
    step_.reset();
    handle_.reset();
    group_.reset();
  }

  void DispatchRefuses(const std::vector<std::string>& parts, const Tensor& topk_idx, const Tensor& tokens,
                       const Tensor& recv_tokens, const Tensor& counts) {
    EXPECT_TRUE(Throws("nvte_ep_ext_ll_dispatch", parts, [&] {
      nvte_ep_ext_ll_dispatch(handle_->get(), topk_idx.get(), tokens.get(), recv_tokens.get(), counts.get(), 0,
                              World::Get().stream());
    }));
  }

  std::unique_ptr<LlGroup> group_;
  std::unique_ptr<LlHandle> handle_;
  std::unique_ptr<LlStep<BFloat16>> step_;
};

TEST_F(LowLatencyErrors, Tensors) {
  const LlStep<BFloat16>& s = *step_;
  DispatchRefuses({"topk_idx must have 1 to num_topk columns, 8, got 9", "[NVTE-EP-666]"}, s.topk_idx.View({5, 9}),
                  s.tokens_t, s.recv_tokens_t, s.counts_t);
  DispatchRefuses({"topk_idx must have at most max_tokens_per_rank rows, 16, got 17"}, s.topk_idx.View({17, 4}),
                  s.tokens_t, s.recv_tokens_t, s.counts_t);
  DispatchRefuses({"tokens must have a row for each of the 5 rows of topk_idx, got [4, 512]"}, s.topk_idx_t,
                  s.tokens.View({4, 512}), s.recv_tokens_t, s.counts_t);
  DispatchRefuses({"recv_tokens must have shape [local experts, ep_size * max_tokens_per_rank, hidden_dim]"},
                  s.topk_idx_t, s.tokens_t, s.recv_tokens.View({s.local * s.slab, 512}), s.counts_t);
  DispatchRefuses({"counts must have dtype int32, got int64"}, s.topk_idx_t, s.tokens_t, s.recv_tokens_t,
                  s.counts.ViewAs(kNVTEInt64, {s.local}));
  DispatchRefuses({"recv_tokens must not share memory with tokens"}, s.topk_idx_t, s.recv_tokens.View({5, 512}),
                  s.recv_tokens_t, s.counts_t);
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_dispatch", {"send_only must be 0 (the whole operation) or 1", "got 2"},
                     [&] { s.Dispatch(*handle_, 2); }));
  const Tensor small = handle_->memory.View({handle_->memory.size() - 1});
  EXPECT_TRUE(
      Throws("nvte_ep_ext_ll_dispatch", {"handle_mem must have the size of nvte_ep_ext_ll_handle_mem_size"}, [&] {
        nvte_ep_ext_ll_dispatch(small.get(), s.topk_idx_t.get(), s.tokens_t.get(), s.recv_tokens_t.get(),
                                s.counts_t.get(), 0, World::Get().stream());
      }));
  s.Dispatch(*handle_);
  const Tensor weights = s.topk_weights.View({4, 5});
  EXPECT_TRUE(
      Throws("nvte_ep_ext_ll_combine", {"topk_weights must have the shape of topk_idx, [5, 4], got [4, 5]"}, [&] {
        nvte_ep_ext_ll_combine(handle_->get(), s.topk_idx_t.get(), weights.get(), s.expert_out_t.get(),
                               s.result_t.get(), 0, World::Get().stream());
      }));
}

TEST_F(LowLatencyErrors, OneStagedOperationAtATime) {
  const cudaStream_t stream = World::Get().stream();
  const LlHandle other;
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_complete", {"there is nothing to complete"},
                     [&] { nvte_ep_ext_ll_complete(handle_->get(), stream); }));
  step_->Dispatch(*handle_, 1);
  const std::vector<std::string> staged = {"nvte_ep_ext_ll_dispatch", "has not been completed", "[NVTE-EP-679]"};
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_dispatch", staged, [&] { step_->Dispatch(other); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_combine", staged, [&] { step_->Combine(*handle_); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_shutdown", staged, [] { nvte_ep_ext_ll_shutdown(); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_complete", {"handle_mem must be what nvte_ep_ext_ll_dispatch was given"},
                     [&] { nvte_ep_ext_ll_complete(other.get(), stream); }));
  cudaStream_t elsewhere = nullptr;
  TEST_CUDA(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_complete", {"stream must be the stream of nvte_ep_ext_ll_dispatch"},
                     [&] { nvte_ep_ext_ll_complete(handle_->get(), elsewhere); }));
  TEST_CUDA(cudaStreamDestroy(elsewhere));
  nvte_ep_ext_ll_complete(handle_->get(), stream);
  step_->RunExperts();
  step_->Combine(*handle_);
  step_->CheckResult();
}

TEST_F(LowLatencyErrors, CombineNeedsItsDispatch) {
  const LlHandle unused;
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_combine", {"nothing was dispatched over the handle_mem", "[NVTE-EP-678]"},
                     [&] { step_->Combine(unused); }));
  step_->Dispatch(*handle_);
  const LlStep<BFloat16> longer(*group_, RandomRouting(EvenRows(6), 4, kExperts, 9301), 9301);
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_combine",
                     {"topk_idx must be what nvte_ep_ext_ll_dispatch was given, [5, 4] of int64, got [6, 4] of int64"},
                     [&] { longer.Combine(*handle_); }));
}

TEST_F(LowLatencyErrors, HalvesThatAreNotInOneGraph) {
  const cudaStream_t stream = World::Get().stream();
  step_->Run(*handle_);
  const Graph graph([&] {
    step_->Dispatch(*handle_, 1);
    nvte_ep_ext_ll_complete(handle_->get(), stream);
  });
  graph.Launch();
  step_->Dispatch(*handle_, 1);
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_complete", {"was not captured and this call is captured", "into one graph"},
                     [&] { const Graph half([&] { nvte_ep_ext_ll_complete(handle_->get(), stream); }); }));
  nvte_ep_ext_ll_complete(handle_->get(), stream);
}

TEST(LowLatencyConfig, IsRefused) {
  const auto refuses = [](const std::function<void(NVTEEpExtLLConfig&)>& change, const std::vector<std::string>& parts,
                          const Options::Pairs& options = {}) {
    NVTEEpExtLLConfig config = LlGroup::Config(kExperts, 8);
    change(config);
    EXPECT_TRUE(Throws("nvte_ep_ext_ll_initialize", parts, [&] {
      nvte_ep_ext_ll_initialize(World::Get().comm(), &config, Options(options).raw());
      nvte_ep_ext_ll_shutdown();
    }));
  };
  refuses([](auto& config) { config.hidden_dim = 384; },
          {"config->hidden_dim", "multiple of 512 elements", "768 bytes"});
  refuses([](auto& config) { config.num_topk = 32; }, {"config->num_topk must be at most 31"});
  refuses([](auto& config) { config.num_experts = kExperts + 1, config.ep_size = 2; }, {"config->num_experts|ep_comm"});
  refuses([](auto& config) { config.struct_size = 8; }, {"config->struct_size must be 0 or at least 40, got 8"});
  refuses([](auto& config) { config.max_num_sms = 4; },
          {"must give a rank at least 5 multiprocessors for 64 experts, got 4", "[NVTE-EP-662]"});
  refuses([](auto& config) { config.max_num_sms = 8; }, {"config->num_topk must be at most 3 with 64 experts"});
  refuses([](auto&) {}, {"option backend must be nccl_ep or auto", "native engine has no low-latency mode"},
          {{"backend", "native"}});
  refuses([](auto&) {}, {"option overflow must not be set for a low-latency group"}, {{"overflow", "drop"}});
  if (Ranks() > 1) {
    refuses([](auto& config) { config.num_topk = World::Get().rank() == 1 ? 4 : 8; },
            {"all ranks must pass the same config->num_topk: rank 1 has 4, rank 0 has 8"});
  }
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_handle_mem_size",
                     {"there is no low-latency group on the current device", "[NVTE-EP-651]"},
                     [] { nvte_ep_ext_ll_handle_mem_size(); }));
  const LlGroup group(LlGroup::Config(kExperts, 8));
  refuses([](auto&) {}, {"has a low-latency group already: call nvte_ep_ext_ll_shutdown"});
}

}  // namespace
}  // namespace test
