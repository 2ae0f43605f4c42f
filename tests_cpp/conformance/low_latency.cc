// NCCL EP's own C API in low-latency mode, without us: a table of cases over both layouts, the recipes of dispatch,
// whole and staged operations, and graphs that are replayed with other indices. Compiled with the real CUDA, NCCL and
// NCCL EP headers, the same binary runs on a GPU and on the host runtime.
//
//   mpirun -n 2 nccl_ep_low_latency [--sms N]
//
// Every rank computes what it has to receive, with the arithmetic of NCCL EP's kernels, and compares byte for byte. The
// order of rows in a slab is open, so rows are compared as sets. A difference goes to stderr, and the program ends
// with 1.

#include <nccl_ep.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "conformance/memory.h"
#include "support/number.h"
#include "support/reference.h"
#include "support/world.h"

namespace conformance {
namespace {

using test::BFloat16;
using test::Float16;
using test::Mix;
using test::World;

enum class Type { kBFloat16, kFloat16, kFloat32 };
enum class Recipe { kNone, kBytes, kQuantise, kQuantiseRounded };
enum class Calls { kWhole, kStaged, kGraph, kStagedGraph };
enum class Routing { kRandom, kOneExpert, kMasked, kOneRankEmpty };

// What kernels are compiled for, the slow part on a GPU: few of them.
struct Kernels {
  bool rank_major;
  Type type;
  std::size_t hidden;
  std::size_t top_k;
  bool wide_indices;
  Recipe recipe;
};

struct Case {
  Kernels kernels;
  Calls calls;
  Routing routing;
};

constexpr Kernels kPlain = {false, Type::kBFloat16, 512, 2, true, Recipe::kNone};
constexpr Kernels kWide = {false, Type::kFloat32, 512, 8, false, Recipe::kNone};
constexpr Kernels kHalf = {false, Type::kFloat16, 512, 4, true, Recipe::kNone};
constexpr Kernels kBytes = {false, Type::kBFloat16, 512, 2, true, Recipe::kBytes};
constexpr Kernels kQuantised = {false, Type::kBFloat16, 512, 2, true, Recipe::kQuantise};
constexpr Kernels kRounded = {false, Type::kBFloat16, 512, 2, true, Recipe::kQuantiseRounded};
constexpr Kernels kByRank = {true, Type::kBFloat16, 512, 2, true, Recipe::kNone};
constexpr Kernels kByRankQuantised = {true, Type::kBFloat16, 512, 2, true, Recipe::kQuantise};

constexpr Case kCases[] = {
    {kPlain, Calls::kWhole, Routing::kRandom},
    {kPlain, Calls::kWhole, Routing::kOneExpert},
    {kPlain, Calls::kWhole, Routing::kMasked},
    {kPlain, Calls::kWhole, Routing::kOneRankEmpty},
    {kPlain, Calls::kStaged, Routing::kRandom},
    {kPlain, Calls::kStaged, Routing::kOneRankEmpty},
    {kPlain, Calls::kGraph, Routing::kRandom},
    {kPlain, Calls::kStagedGraph, Routing::kMasked},
    {kWide, Calls::kWhole, Routing::kRandom},
    {kWide, Calls::kStaged, Routing::kMasked},
    {kHalf, Calls::kWhole, Routing::kRandom},
    {kHalf, Calls::kGraph, Routing::kOneExpert},
    {kBytes, Calls::kWhole, Routing::kRandom},
    {kBytes, Calls::kStaged, Routing::kMasked},
    {kQuantised, Calls::kWhole, Routing::kRandom},
    {kQuantised, Calls::kStaged, Routing::kMasked},
    {kRounded, Calls::kWhole, Routing::kRandom},
    {kRounded, Calls::kGraph, Routing::kOneExpert},
    {kByRank, Calls::kWhole, Routing::kRandom},
    {kByRank, Calls::kStaged, Routing::kMasked},
    {kByRank, Calls::kGraph, Routing::kOneRankEmpty},
    {kByRank, Calls::kWhole, Routing::kOneExpert},
    {kByRankQuantised, Calls::kWhole, Routing::kRandom},
};

constexpr std::size_t kLocalExperts = 8, kMaxTokens = 24;
// A multiple of 1024 bytes makes every part of NCCL EP's buffer one of 16 bytes.
constexpr std::size_t kMaxTokenBytes = 2048;
// Values that share a scale, where rows come with scales of one byte and where dispatch computes them.
constexpr std::size_t kByteBlock = 32, kBlock = 128;

std::size_t SizeOf(Type type) { return type == Type::kFloat32 ? 4 : 2; }

ncclDataType_t NcclType(Type type) {
  return type == Type::kFloat32 ? ncclFloat32 : type == Type::kFloat16 ? ncclFloat16 : ncclBfloat16;
}

float Load(const std::uint8_t* element, Type type) {
  if (type == Type::kFloat32) {
    float value;
    std::memcpy(&value, element, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, element, 2);
  return type == Type::kFloat16 ? test::Widen(Float16{bits}) : test::Widen(BFloat16{bits});
}

void Store(float value, std::uint8_t* element, Type type) {
  if (type == Type::kFloat32) {
    std::memcpy(element, &value, 4);
    return;
  }
  const std::uint16_t bits =
      type == Type::kFloat16 ? test::Narrow<Float16>(value).bits : test::Narrow<BFloat16>(value).bits;
  std::memcpy(element, &bits, 2);
}

// The value of an e4m3 number, by its definition.
float OfE4m3(std::uint8_t byte) {
  const int exponent = (byte >> 3) & 15, fraction = byte & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(8.0f + static_cast<float>(fraction), exponent - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest e4m3 number, the even one of two, at most 448: searched for, which is slow and plain.
std::uint8_t ToE4m3(float value) {
  const float magnitude = std::min(std::fabs(value), 448.0f);
  std::uint8_t best = 0;
  for (int byte = 1; byte < 0x7f; ++byte) {
    const float now = std::fabs(OfE4m3(static_cast<std::uint8_t>(byte)) - magnitude);
    const float before = std::fabs(OfE4m3(best) - magnitude);
    if (now < before || (now == before && byte % 2 == 0)) best = static_cast<std::uint8_t>(byte);
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

// What a rank has, and what all have to become of it.
class Model {
 public:
  Model(const Case& one, std::uint64_t seed) : one_(one), k_(one.kernels), seed_(seed), ranks_(World::Get().size()) {
    for (int rank = 0; rank < ranks_; ++rank) {
      const bool empty = one.routing == Routing::kOneRankEmpty && rank == ranks_ - 1;
      // The number of tokens is part of a graph, the rest may change between replays.
      rows_.push_back(empty ? 0 : 1 + (static_cast<std::size_t>(rank) * 7 + 11) % kMaxTokens);
      experts_.push_back({});
      for (std::size_t row = 0; row < rows_[rank]; ++row) AddExperts(rank, row);
    }
  }

  int experts() const { return ranks_ * static_cast<int>(kLocalExperts); }
  std::size_t rows(int rank) const { return rows_[rank]; }
  const std::vector<std::int64_t>& experts_of(int rank) const { return experts_[rank]; }
  std::size_t slabs() const { return k_.rank_major ? ranks_ : kLocalExperts; }
  std::size_t slab_rows() const { return k_.rank_major ? kMaxTokens : ranks_ * kMaxTokens; }
  bool bytes() const { return k_.recipe == Recipe::kBytes; }
  bool quantises() const { return k_.recipe == Recipe::kQuantise || k_.recipe == Recipe::kQuantiseRounded; }
  // Bytes of rows as they are sent, as they arrive, of their scales, and as experts return them.
  std::size_t sent_bytes() const { return k_.hidden * (bytes() ? 1 : SizeOf(k_.type)); }
  std::size_t received_bytes() const { return k_.hidden * (bytes() || quantises() ? 1 : SizeOf(k_.type)); }
  std::size_t scale_bytes() const {
    return bytes() ? k_.hidden / kByteBlock : quantises() ? k_.hidden / kBlock * 4 : 0;
  }
  std::size_t result_bytes() const { return k_.hidden * SizeOf(k_.type); }

  float weight(int rank, std::size_t row, std::size_t k) const {
    return 0.125f + static_cast<float>(Mix(seed_ + 1, rank, row, k) % 65536) / 65536.0f;
  }

  Bytes Tokens(int rank) const {
    return ForRows(rank, [&](std::size_t row) { return Token(rank, row); });
  }
  Bytes Scales(int rank) const {
    return ForRows(rank, [&](std::size_t row) { return Scale(rank, row); });
  }
  Bytes Weights(int rank) const {
    Bytes all;
    for (std::size_t i = 0; i < rows_[rank] * k_.top_k; ++i) {
      const float value = weight(rank, i / k_.top_k, i % k_.top_k);
      const auto* const from = reinterpret_cast<const std::uint8_t*>(&value);
      all.insert(all.end(), from, from + 4);
    }
    return all;
  }

  // Each row of a slab: the bytes that arrive, its scales, and with the rank-major layout its experts and weights.
  std::vector<Bytes> Slab(int rank, std::size_t slab) const {
    std::vector<Bytes> all;
    const std::int64_t first = static_cast<std::int64_t>(rank) * kLocalExperts;
    for (int source = 0; source < ranks_; ++source) {
      if (k_.rank_major && source != static_cast<int>(slab)) continue;
      for (std::size_t row = 0; row < rows_[source]; ++row) {
        const std::int64_t* const experts = &experts_[source][row * k_.top_k];
        int times = 0;
        for (std::size_t k = 0; k < k_.top_k; ++k) {
          times += k_.rank_major ? experts[k] >= first && experts[k] < first + std::int64_t(kLocalExperts)
                                 : experts[k] == first + std::int64_t(slab);
        }
        if (times == 0) continue;
        Bytes whole = Arriving(source, row);
        if (k_.rank_major) {
          for (std::size_t k = 0; k < k_.top_k; ++k) {
            const bool own = experts[k] >= first && experts[k] < first + std::int64_t(kLocalExperts);
            Append(&whole, own ? static_cast<std::int32_t>(experts[k] - first) : -1);
          }
          for (std::size_t k = 0; k < k_.top_k; ++k) Append(&whole, weight(source, row, k));
        }
        all.push_back(whole);
      }
    }
    return all;
  }

  // What the experts of a rank make of a row of a slab, from its bytes alone.
  Bytes Expert(int rank, std::size_t slab, const Bytes& whole) const {
    std::vector<float> values(k_.hidden);
    for (std::size_t i = 0; i < k_.hidden; ++i) {
      if (bytes()) {
        values[i] = (static_cast<float>(whole[i]) - 128.0f) / 16.0f;
      } else if (quantises()) {
        float scale;
        std::memcpy(&scale, &whole[received_bytes() + i / kBlock * 4], 4);
        values[i] = OfE4m3(whole[i]) * scale;
      } else {
        values[i] = Load(&whole[i * SizeOf(k_.type)], k_.type);
      }
    }
    std::vector<float> sum(k_.hidden);
    if (!k_.rank_major) {
      for (std::size_t i = 0; i < k_.hidden; ++i) sum[i] = Factor(rank * kLocalExperts + slab) * values[i];
    } else {
      const std::size_t tail = received_bytes() + scale_bytes();
      for (std::size_t k = 0; k < k_.top_k; ++k) {
        std::int32_t expert;
        float weight;
        std::memcpy(&expert, &whole[tail + k * 4], 4);
        std::memcpy(&weight, &whole[tail + (k_.top_k + k) * 4], 4);
        if (expert < 0) continue;
        const float factor = Factor(rank * kLocalExperts + expert) * weight;
        for (std::size_t i = 0; i < k_.hidden; ++i) sum[i] = std::fma(factor, values[i], sum[i]);
      }
    }
    Bytes row(result_bytes());
    for (std::size_t i = 0; i < k_.hidden; ++i) Store(sum[i], &row[i * SizeOf(k_.type)], k_.type);
    return row;
  }

  // The sums of combine: FP32, in the order of a token's experts, each product and sum rounded once, then the sum.
  Bytes Result(int rank) const {
    return ForRows(rank, [&](std::size_t row) {
      const std::int64_t* const experts = &experts_[rank][row * k_.top_k];
      std::vector<float> sum(k_.hidden);
      std::vector<bool> seen(ranks_);
      for (std::size_t k = 0; k < k_.top_k; ++k) {
        if (experts[k] < 0) continue;
        const int destination = static_cast<int>(experts[k] / std::int64_t(kLocalExperts));
        if (k_.rank_major && seen[destination]) continue;
        seen[destination] = true;
        Bytes whole = Arriving(rank, row);
        if (k_.rank_major) {
          const std::int64_t first = static_cast<std::int64_t>(destination) * kLocalExperts;
          for (std::size_t j = 0; j < k_.top_k; ++j) {
            const bool own = experts[j] >= first && experts[j] < first + std::int64_t(kLocalExperts);
            Append(&whole, own ? static_cast<std::int32_t>(experts[j] - first) : -1);
          }
          for (std::size_t j = 0; j < k_.top_k; ++j) Append(&whole, weight(rank, row, j));
        }
        const Bytes back = Expert(destination, experts[k] % std::int64_t(kLocalExperts), whole);
        const float weight_of = k_.rank_major ? 1.0f : weight(rank, row, k);
        for (std::size_t i = 0; i < k_.hidden; ++i) {
          sum[i] = std::fma(Load(&back[i * SizeOf(k_.type)], k_.type), weight_of, sum[i]);
        }
      }
      Bytes result(result_bytes());
      for (std::size_t i = 0; i < k_.hidden; ++i) Store(sum[i], &result[i * SizeOf(k_.type)], k_.type);
      return result;
    });
  }

 private:
  void AddExperts(int rank, std::size_t row) {
    const std::uint64_t start = Mix(seed_, rank, row) % experts();
    for (std::size_t k = 0; k < k_.top_k; ++k) {
      // Distinct in a row.
      std::int64_t expert = static_cast<std::int64_t>((start + k * 5) % experts());
      if (one_.routing == Routing::kOneExpert) expert = k == 0 ? 3 : -1;
      if (one_.routing == Routing::kMasked && Mix(seed_ + 7, rank, row, k) % 3 == 0) expert = -1;
      experts_[rank].push_back(expert);
    }
  }

  template <typename T>
  static void Append(Bytes* bytes, T value) {
    const auto* const from = reinterpret_cast<const std::uint8_t*>(&value);
    bytes->insert(bytes->end(), from, from + sizeof value);
  }

  template <typename Make>
  Bytes ForRows(int rank, Make make) const {
    Bytes all;
    for (std::size_t row = 0; row < rows_[rank]; ++row) {
      const Bytes one = make(row);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  static float Factor(std::size_t expert) { return 0.5f + static_cast<float>(Mix(expert) % 1024) / 1024.0f; }

  // Values of both signs and many magnitudes, blocks of zeros and of numbers below the quantiser's least among them.
  Bytes Token(int rank, std::size_t row) const {
    Bytes token(sent_bytes());
    for (std::size_t i = 0; i < k_.hidden; ++i) {
      const std::uint64_t bits = Mix(seed_ + 2, rank, row, i);
      if (bytes()) {
        token[i] = static_cast<std::uint8_t>(bits >> 32);
        continue;
      }
      const int kind = static_cast<int>(Mix(seed_ + 3, rank, row, i / kBlock) % 8);
      const float size = kind == 0 ? 0.0f : kind == 1 ? 1e-6f : std::ldexp(1.0f, kind * 3 - 12);
      const float value = (static_cast<float>(bits >> 40) - 8388608.0f) / 8388608.0f * size;
      Store(bits % 16 == 0 ? -0.0f : value, &token[i * SizeOf(k_.type)], k_.type);
    }
    return token;
  }

  Bytes Scale(int rank, std::size_t row) const {
    Bytes scales(bytes() ? scale_bytes() : 0);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      scales[i] = static_cast<std::uint8_t>(Mix(seed_ + 4, rank, row, i) >> 16);
    }
    return scales;
  }

  // A token's row and scales as they arrive.
  Bytes Arriving(int rank, std::size_t row) const {
    const Bytes token = Token(rank, row);
    if (!quantises()) {
      Bytes whole = token;
      const Bytes scales = Scale(rank, row);
      whole.insert(whole.end(), scales.begin(), scales.end());
      return whole;
    }
    Bytes whole(k_.hidden), scales;
    for (std::size_t block = 0; block < k_.hidden; block += kBlock) {
      float largest = 1e-4f;
      for (std::size_t i = block; i < block + kBlock; ++i) {
        largest = std::max(largest, std::fabs(Load(&token[i * 2], k_.type)));
      }
      float inverse = largest * (1 / 448.0f), scale = 448.0f / largest;
      if (k_.recipe == Recipe::kQuantiseRounded) {
        int exponent;
        const float fraction = std::frexp(inverse, &exponent);
        inverse = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
        scale = 1.0f / inverse;
      }
      for (std::size_t i = block; i < block + kBlock; ++i) whole[i] = ToE4m3(Load(&token[i * 2], k_.type) * scale);
      Append(&scales, inverse);
    }
    whole.insert(whole.end(), scales.begin(), scales.end());
    return whole;
  }

  Case one_;
  Kernels k_;
  std::uint64_t seed_;
  int ranks_;
  std::vector<std::size_t> rows_;
  std::vector<std::vector<std::int64_t>> experts_;
};

// A case on a handle, with its memory and the descriptors, which live as long as the operations.
class Run {
 public:
  Run(ncclEpGroup_t ep, const Case& one, int number)
      : one_(one),
        k_(one.kernels),
        number_(number),
        rank_(World::Get().rank()),
        layout_(k_.rank_major ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR),
        model_(one, 1000 * number),
        slots_(model_.slabs() * model_.slab_rows()),
        indices_(Place::kDevice, kMaxTokens * k_.top_k * 8),
        tokens_(Place::kDevice, kMaxTokens * model_.sent_bytes()),
        scales_(Place::kDevice, kMaxTokens * model_.scale_bytes()),
        weights_(Place::kDevice, kMaxTokens * k_.top_k * 4),
        received_(Place::kDevice, slots_ * model_.received_bytes()),
        received_scales_(Place::kDevice, slots_ * model_.scale_bytes()),
        received_weights_(Place::kDevice, slots_ * k_.top_k * 4),
        received_experts_(Place::kDevice, slots_ * k_.top_k * 4),
        counts_(Place::kDevice, model_.slabs() * 4),
        expert_rows_(Place::kDevice, slots_ * model_.result_bytes()),
        result_(Place::kDevice, kMaxTokens * model_.result_bytes()) {
    std::size_t bytes = 0;
    TEST_NCCL(ncclEpHandleMemSize(ep, layout_, nullptr, &bytes, static_cast<int>(k_.top_k)));
    handle_memory_ = std::make_unique<Block>(Place::kDevice, bytes);
    Descriptor memory(*handle_memory_, ncclUint8, {bytes});
    TEST_NCCL(ncclEpInitHandle(&handle_, ep, layout_, nullptr, static_cast<int>(k_.top_k), memory.get()));
    const std::size_t rows = model_.rows(rank_), slabs = model_.slabs(), slab_rows = model_.slab_rows();
    const ncclDataType_t bytes_type = ncclFloat8e4m3;
    const ncclDataType_t sent = model_.bytes() ? bytes_type : NcclType(k_.type);
    const ncclDataType_t arriving = model_.quantises() ? bytes_type : sent;
    const ncclDataType_t scale = model_.bytes() ? ncclUint8 : ncclFloat32;
    const std::size_t scales = model_.scale_bytes() / (model_.bytes() ? 1 : 4);
    d_indices_ = Descriptor(indices_, k_.wide_indices ? ncclInt64 : ncclInt32, {rows, k_.top_k});
    d_tokens_ = Descriptor(tokens_, sent, {rows, k_.hidden});
    d_received_ = Descriptor(received_, arriving, {slabs, slab_rows, k_.hidden});
    if (model_.bytes()) d_scales_ = Descriptor(scales_, scale, {rows, scales});
    if (scales > 0) d_received_scales_ = Descriptor(received_scales_, scale, {slabs, slab_rows, scales});
    d_weights_ = Descriptor(weights_, ncclFloat32, {rows, k_.top_k});
    d_received_weights_ = Descriptor(received_weights_, ncclFloat32, {slabs, slab_rows, k_.top_k});
    d_received_experts_ = Descriptor(received_experts_, ncclInt32, {slabs, slab_rows, k_.top_k});
    d_counts_ = Descriptor(counts_, ncclInt32, {slabs});
    d_expert_rows_ = Descriptor(expert_rows_, NcclType(k_.type), {slabs, slab_rows, k_.hidden});
    d_result_ = Descriptor(result_, NcclType(k_.type), {rows, k_.hidden});
    TEST_NCCL(ncclEpUpdateHandle(handle_, d_indices_.get(), nullptr, Stream()));
  }
  ~Run() { static_cast<void>(ncclEpHandleDestroy(handle_)); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // True if everything is as expected.
  bool Check() {
    const bool graph = one_.calls == Calls::kGraph || one_.calls == Calls::kStagedGraph;
    const bool staged = one_.calls == Calls::kStaged || one_.calls == Calls::kStagedGraph;
    // Calls outside a graph first: kernels are compiled at their first use, which no capture allows.
    bool right = Step([&] { Dispatch(staged); }, [&] { Combine(staged); });
    if (!graph) return right;
    cudaGraphExec_t dispatch = Captured([&] { Dispatch(staged); }), combine = Captured([&] { Combine(staged); });
    const auto launch = [&](cudaGraphExec_t exec) { TEST_CUDA(cudaGraphLaunch(exec, Stream())); };
    for (int replay = 1; replay < 4; ++replay) {
      model_ = Model(one_, 1000 * number_ + 100 * replay);
      right = Step([&] { launch(dispatch); }, [&] { launch(combine); }) && right;
    }
    TEST_CUDA(cudaGraphExecDestroy(dispatch));
    TEST_CUDA(cudaGraphExecDestroy(combine));
    return right;
  }

 private:
  cudaStream_t Stream() const { return World::Get().stream(); }

  template <typename Calls>
  cudaGraphExec_t Captured(Calls calls) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    TEST_CUDA(cudaStreamBeginCapture(Stream(), cudaStreamCaptureModeThreadLocal));
    calls();
    TEST_CUDA(cudaStreamEndCapture(Stream(), &graph));
    TEST_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    TEST_CUDA(cudaGraphDestroy(graph));
    return exec;
  }

  template <typename First, typename Second>
  bool Step(First dispatch, Second combine) {
    Bytes indices;
    for (const std::int64_t expert : model_.experts_of(rank_)) {
      const auto* const from = reinterpret_cast<const std::uint8_t*>(&expert);
      indices.insert(indices.end(), from, from + (k_.wide_indices ? 8 : 4));
    }
    indices_.Set(indices);
    tokens_.Set(model_.Tokens(rank_));
    scales_.Set(model_.Scales(rank_));
    weights_.Set(model_.Weights(rank_));
    for (Block* block : {&received_, &received_scales_, &received_weights_, &received_experts_, &counts_, &result_}) {
      block->Clear();
    }
    dispatch();
    bool right = CheckReceived();
    combine();
    const Bytes expected = model_.Result(rank_);
    right = Same("result", 0, result_.Get(expected.size()), expected) && right;
    right = Require(result_.UntouchedBehind(expected.size()), "the result") && right;
    return right;
  }

  void Dispatch(bool staged) {
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    inputs.tokens = d_tokens_.get();
    inputs.scales = d_scales_.get();
    outputs.tokens = d_received_.get();
    outputs.scales = d_received_scales_.get();
    if (k_.rank_major) {
      inputs.topk_weights = d_weights_.get();
      outputs.topk_weights = d_received_weights_.get();
      outputs.topk_idx = d_received_experts_.get();
      info.src_rank_counters = d_counts_.get();
    } else {
      info.expert_counters = d_counts_.get();
    }
    config.send_only = staged ? 1 : 0;
    config.round_scales = k_.recipe == Recipe::kQuantiseRounded ? 1 : 0;
    config.quant_recipe = model_.bytes()       ? NCCL_EP_DISP_QUANT_FWD
                          : model_.quantises() ? NCCL_EP_DISP_QUANT_DS_FP8E3M4
                                               : NCCL_EP_DISP_QUANT_NONE;
    TEST_NCCL(ncclEpDispatch(handle_, &inputs, &outputs, &info, &config, Stream()));
    if (staged) TEST_NCCL(ncclEpComplete(handle_, nullptr, Stream()));
  }

  void Combine(bool staged) {
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    inputs.tokens = d_expert_rows_.get();
    outputs.tokens = d_result_.get();
    if (!k_.rank_major) outputs.topk_weights = d_weights_.get();
    config.send_only = staged ? 1 : 0;
    TEST_NCCL(ncclEpCombine(handle_, &inputs, &outputs, &config, Stream()));
    if (staged) TEST_NCCL(ncclEpComplete(handle_, nullptr, Stream()));
  }

  // Compares each slab as a set of rows, and writes what the experts make of them.
  bool CheckReceived() {
    bool right = true;
    const Bytes counts = counts_.Get(model_.slabs() * 4);
    const Bytes rows = received_.Get(slots_ * model_.received_bytes());
    const Bytes scales = received_scales_.Get(slots_ * model_.scale_bytes());
    const Bytes weights = received_weights_.Get(slots_ * k_.top_k * 4);
    const Bytes experts = received_experts_.Get(slots_ * k_.top_k * 4);
    Bytes expert_rows(slots_ * model_.result_bytes(), kUnwritten);
    for (std::size_t slab = 0; slab < model_.slabs(); ++slab) {
      std::vector<Bytes> expected = model_.Slab(rank_, slab), got;
      std::int32_t count;
      std::memcpy(&count, &counts[slab * 4], 4);
      if (count != static_cast<std::int32_t>(expected.size())) {
        std::fprintf(stderr, "case %d, rank %d, slab %zu: %d rows, expected %zu\n", number_, rank_, slab, count,
                     expected.size());
        return false;
      }
      for (std::int32_t row = 0; row < count; ++row) {
        const std::size_t at = slab * model_.slab_rows() + row;
        Bytes whole;
        const auto add = [&](const Bytes& from, std::size_t bytes) {
          const auto first = from.begin() + static_cast<std::ptrdiff_t>(at * bytes);
          whole.insert(whole.end(), first, first + static_cast<std::ptrdiff_t>(bytes));
        };
        add(rows, model_.received_bytes());
        add(scales, model_.scale_bytes());
        if (k_.rank_major) {
          add(experts, k_.top_k * 4);
          add(weights, k_.top_k * 4);
        }
        const Bytes back = model_.Expert(rank_, slab, whole);
        std::copy(back.begin(), back.end(),
                  expert_rows.begin() + static_cast<std::ptrdiff_t>(at * model_.result_bytes()));
        got.push_back(std::move(whole));
      }
      std::sort(got.begin(), got.end());
      std::sort(expected.begin(), expected.end());
      for (std::size_t row = 0; row < got.size(); ++row) {
        right = Same("slab", slab, got[row], expected[row]) && right;
      }
    }
    expert_rows_.Set(expert_rows);
    return right;
  }

  bool Require(bool right, const char* what) const {
    if (!right) std::fprintf(stderr, "case %d, rank %d: memory behind %s was written\n", number_, rank_, what);
    return right;
  }

  bool Same(const char* what, std::size_t index, const Bytes& got, const Bytes& expected) const {
    if (got == expected) return true;
    const std::size_t end = std::min(got.size(), expected.size());
    std::size_t at = 0, wrong = 0;
    for (std::size_t i = 0; i < end; ++i) {
      if (got[i] == expected[i]) continue;
      if (wrong++ == 0) at = i;
    }
    std::fprintf(stderr, "case %d, rank %d, %s %zu: %zu of %zu bytes differ, first %zu: 0x%02x, expected 0x%02x\n",
                 number_, rank_, what, index, wrong, expected.size(), at, at < end ? got[at] : 0,
                 at < end ? expected[at] : 0);
    return false;
  }

  const Case one_;
  const Kernels k_;
  int number_, rank_;
  ncclEpLayout_t layout_;
  Model model_;
  std::size_t slots_;
  ncclEpHandle_t handle_ = nullptr;
  Block indices_, tokens_, scales_, weights_, received_, received_scales_, received_weights_, received_experts_,
      counts_, expert_rows_, result_;
  std::unique_ptr<Block> handle_memory_;
  Descriptor d_indices_, d_tokens_, d_scales_, d_weights_, d_received_, d_received_scales_, d_received_weights_,
      d_received_experts_, d_counts_, d_expert_rows_, d_result_;
};

ncclEpGroup_t MakeGroup(int sms) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = static_cast<unsigned>(World::Get().size() * kLocalExperts);
  config.max_dispatch_tokens_per_rank = kMaxTokens;
  config.max_token_bytes = kMaxTokenBytes;
  config.max_num_sms = sms;
  ncclEpGroup_t ep = nullptr;
  TEST_NCCL(ncclEpCreateGroup(&ep, World::Get().comm(), &config));
  return ep;
}

bool RunAll(int sms) {
  ncclEpGroup_t ep = MakeGroup(sms);
  int number = 0, wrong = 0;
  for (const Case& one : kCases) {
    const int mine = Run(ep, one, number).Check() ? 0 : 1;
    int anywhere = 0;
    MPI_Allreduce(&mine, &anywhere, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (World::Get().rank() == 0) std::printf("case %d: %s\n", number, anywhere == 0 ? "as expected" : "DIFFERS");
    std::fflush(stdout);
    wrong += anywhere;
    ++number;
  }
  World::Get().Wait();
  MPI_Barrier(MPI_COMM_WORLD);
  TEST_NCCL(ncclEpGroupDestroy(ep));
  return wrong == 0;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  // Ranks that share a GPU need all their SMs at once; the number changes no value.
  int sms = 32;
  if (argc == 3 && std::string(argv[1]) == "--sms") {
    sms = std::atoi(argv[2]);
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: %s [--sms N]\n", argv[0]);
    return 2;
  }
  test::World::Start(&argc, &argv);
  bool right = false;
  try {
    right = conformance::RunAll(sms);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", test::World::Get().rank(), error.what());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return test::World::Stop() && right ? 0 : 1;
}
