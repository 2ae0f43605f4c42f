// NCCL EP's own C API, without us: one table of cases, forward and backward, in the high-throughput mode. Compiled with
// the real CUDA, NCCL and NCCL EP headers, the same binary runs on a GPU and on the host runtime, and what it prints
// must be the same, byte for byte.
//
//   mpirun -n 2 nccl_ep_conformance [--expect FILE] [--groups FIRST:LAST] [--sms N]
//   nccl_ep_conformance --list RANKS
//
// A line holds the parameters of a case and for each output a digest over all ranks (README.md says of what). Every
// output is also compared with a reference that every rank computes by itself; a difference goes to stderr.

#include <nccl_ep.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/cases.h"
#include "conformance/memory.h"
#include "support/number.h"
#include "support/reference.h"
#include "support/world.h"

namespace conformance {
namespace {

using test::BFloat16;
using test::Float16;
using test::Mix;
using test::Reference;
using test::Slot;
using test::World;

// ---- values ----

float Load(const std::uint8_t* element, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, element, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return dtype == DType::kFloat16 ? test::Widen(Float16{bits}) : test::Widen(BFloat16{bits});
}

void Store(float value, std::uint8_t* element, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::memcpy(element, &value, sizeof value);
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kFloat16 ? test::Narrow<Float16>(value).bits : test::Narrow<BFloat16>(value).bits;
  std::memcpy(element, &bits, sizeof bits);
}

// Between -4 and 4 with 24 significant bits, so that sums round; some negative zeros, which sums lose, and some values
// that are subnormal in float16.
float Value(std::uint64_t bits) {
  if (bits % 16 == 0) return -0.0f;
  const float value = (static_cast<float>(bits >> 40) - 8388608.0f) / 2097152.0f;
  return bits % 16 == 1 ? value / 1048576.0f : value;
}

ncclDataType_t TypeOf(DType dtype) {
  return dtype == DType::kFloat32 ? ncclFloat32 : dtype == DType::kFloat16 ? ncclFloat16 : ncclBfloat16;
}

template <typename T>
Bytes AsBytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

Bytes Integers(const std::vector<std::int64_t>& values, bool wide) {
  return wide ? AsBytes(values) : AsBytes(std::vector<std::int32_t>(values.begin(), values.end()));
}

// ---- digests ----

// FNV-1a of 64 bits.
std::uint64_t Digest(const std::uint8_t* bytes, std::size_t count) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (std::size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return hash;
}

enum Field {
  kCounts,
  kOffsets,
  kTotal,
  kTokens,
  kScales,
  kWeights,
  kRest,
  kResult,
  kSlotGrad,
  kSlotGradRest,
  kTokenGrad,
  kWeightGrad,
  kFields
};
constexpr const char* kFieldNames[kFields] = {"counts",    "offsets",        "total",      "tokens",
                                              "scales",    "weights",        "rest",       "result",
                                              "slot_grad", "slot_grad_rest", "token_grad", "weight_grad"};

// One output of a case on this rank: what came, and what should have come.
struct Output {
  Field field;
  // Bytes of a row, for messages.
  std::size_t row_bytes;
  Bytes got;
  Bytes expected;
};

// ---- one case ----

constexpr std::size_t kScaleBlock = 32;

// What a case is about, computed without the library, from what all ranks know.
class Model {
 public:
  Model(const Group& group, const Case& one)
      : group_(group),
        case_(one),
        rank_(World::Get().rank()),
        reference_(one.routing, group.experts(), group.alignment,
                   group.mode == Mode::kDrop ? group.capacity : std::numeric_limits<std::size_t>::max(),
                   group.writes_duplicates() ? Reference::Drops::kRows : Reference::Drops::kTokensAndRows) {
    for (int rank = 0; rank < group.ranks; ++rank) {
      const std::size_t rows = one.routing.rows[rank];
      tokens_.push_back(Rows(1, rank, rows, one.mxfp8 ? hidden() : row_bytes(), !one.mxfp8));
      scales_.push_back(one.mxfp8 ? Rows(2, rank, rows, scale_bytes(), false) : Bytes());
      grads_.push_back(Rows(3, rank, rows, row_bytes(), true));
      weights_.push_back({});
      for (std::size_t i = 0; i < rows * top_k(); ++i) {
        weights_[rank].push_back(Value(Mix(case_.seed + 4, rank, i) | 2));
      }
    }
  }

  std::size_t hidden() const { return group_.kernels.hidden; }
  std::size_t top_k() const { return group_.kernels.top_k; }
  std::size_t rows() const { return case_.routing.rows[rank_]; }
  // Of rows of the group's type.
  std::size_t row_bytes() const { return hidden() * SizeOf(dtype()); }
  // Of rows that the case dispatches, and their scales.
  std::size_t token_bytes() const { return case_.mxfp8 ? hidden() : row_bytes(); }
  std::size_t scale_bytes() const { return case_.mxfp8 ? hidden() / kScaleBlock : 0; }
  DType dtype() const { return group_.kernels.dtype; }
  std::size_t total() const { return reference_.Total(rank_); }
  // Rows of the slabs that there is room for.
  std::size_t received() const { return group_.mode == Mode::kDrop ? std::min(total(), group_.capacity) : total(); }
  // Rows of receive-side tensors.
  std::size_t capacity() const { return group_.mode == Mode::kEager ? total() : group_.capacity; }

  const Bytes& tokens() const { return tokens_[rank_]; }
  const Bytes& scales() const { return scales_[rank_]; }
  const Bytes& grads() const { return grads_[rank_]; }
  const std::vector<float>& weights() const { return weights_[rank_]; }

  std::vector<std::int64_t> Counts() const { return reference_.Counts(rank_); }
  std::vector<std::int64_t> Offsets() const {
    std::vector<std::int64_t> offsets;
    std::int64_t base = 0;
    for (const std::int64_t count : reference_.Counts(rank_)) {
      offsets.push_back(base);
      base += count;
    }
    return offsets;
  }

  // A receive-side buffer of `row_bytes` a row: fill(slot, row) for every token's row, zeros in padding.
  template <typename Fill>
  Bytes Slabs(std::size_t row_bytes, Fill fill) const {
    Bytes slabs(received() * row_bytes);
    for (std::size_t i = 0; i < received(); ++i) {
      const Slot& slot = reference_.Slots(rank_)[i];
      if (!slot.padding()) fill(slot, &slabs[i * row_bytes]);
    }
    return slabs;
  }
  Bytes ReceivedTokens() const { return Copied(tokens_, token_bytes()); }
  Bytes ReceivedScales() const { return Copied(scales_, scale_bytes()); }
  Bytes ReceivedGrads() const { return Copied(grads_, row_bytes()); }

  // Received weights. Which of a token's weights for the same expert arrives is open: where there are several, `got`,
  // if it is one of them, is taken out of the comparison.
  Bytes ReceivedWeights(Bytes* got) const {
    Bytes expected(received() * 4);
    for (std::size_t i = 0; i < received(); ++i) {
      const Slot& slot = reference_.Slots(rank_)[i];
      if (slot.padding()) continue;
      const float* const of_row = &weights_[slot.rank][slot.row * top_k()];
      std::memcpy(&expected[i * 4], &of_row[slot.k], 4);
      const std::int64_t expert = GlobalExpert(slot.local_expert, rank_);
      int named = 0;
      bool matches = false;
      for (std::size_t k = 0; k < top_k(); ++k) {
        if (case_.routing.at(slot.rank, slot.row, static_cast<int>(k)) != expert) continue;
        ++named;
        matches = matches || std::memcmp(&(*got)[i * 4], &of_row[k], 4) == 0;
      }
      if (named > 1 && matches) {
        std::memset(&(*got)[i * 4], 0, 4);
        std::memset(&expected[i * 4], 0, 4);
      }
    }
    return expected;
  }

  // What the experts, and their gradients, make of the received rows. Combine reads no padding, so that is unwritten.
  Bytes ExpertRows(bool gradient) const {
    Bytes rows(received() * row_bytes(), kUnwritten);
    for (std::size_t i = 0; i < received(); ++i) {
      const Slot& slot = reference_.Slots(rank_)[i];
      if (!slot.padding()) ExpertRow(gradient, rank_, slot, &rows[i * row_bytes()]);
    }
    return rows;
  }
  Bytes SlotWeightGrads() const {
    Bytes grads(received() * 4, kUnwritten);
    for (std::size_t i = 0; i < received(); ++i) {
      const Slot& slot = reference_.Slots(rank_)[i];
      const float value = WeightGrad(rank_, slot);
      if (!slot.padding()) std::memcpy(&grads[i * 4], &value, 4);
    }
    return grads;
  }

  // The sums that come back: over a rank's experts, rounded, and over the ranks, rounded.
  Bytes Combined(bool gradient) const {
    Bytes result(rows() * row_bytes());
    Bytes row(row_bytes());
    std::vector<float> sum(hidden()), partial(hidden());
    const std::size_t element = SizeOf(dtype());
    for (std::size_t token = 0; token < rows(); ++token) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int destination = 0; destination < group_.ranks; ++destination) {
        std::fill(partial.begin(), partial.end(), 0.0f);
        bool any = false;
        for (int local = 0; local < group_.local_experts; ++local) {
          const std::int64_t at = reference_.SlotIndex(destination, local, rank_, static_cast<int>(token));
          if (at < 0) continue;
          any = true;
          ExpertRow(gradient, destination, reference_.Slots(destination)[at], row.data());
          for (std::size_t i = 0; i < hidden(); ++i) partial[i] += Load(&row[i * element], dtype());
        }
        if (!any) continue;
        for (std::size_t i = 0; i < hidden(); ++i) {
          Store(partial[i], &row[i * element], dtype());
          sum[i] += Load(&row[i * element], dtype());
        }
      }
      for (std::size_t i = 0; i < hidden(); ++i) {
        Store(sum[i], &result[token * row_bytes() + i * element], dtype());
      }
    }
    return result;
  }
  Bytes WeightGrads() const {
    std::vector<float> grads;
    for (std::size_t row = 0; row < rows(); ++row) {
      for (std::size_t k = 0; k < top_k(); ++k) {
        // A sum from zero, which turns -0 into 0.
        grads.push_back(0.0f + reference_.WeightGradient(rank_, static_cast<int>(row), static_cast<int>(k),
                                                         [this](int destination, const Slot& slot) {
                                                           return WeightGrad(destination, slot);
                                                         }));
      }
    }
    return AsBytes(grads);
  }

 private:
  std::int64_t GlobalExpert(int local, int rank) const {
    return static_cast<std::int64_t>(rank) * group_.local_experts + local;
  }

  // Rows of a rank that it sends: values of the group's type, or any bytes.
  Bytes Rows(std::uint64_t purpose, int rank, std::size_t rows, std::size_t bytes, bool values) const {
    Bytes all(rows * bytes);
    const std::size_t element = values ? SizeOf(dtype()) : 1;
    for (std::size_t i = 0; i < all.size() / element; ++i) {
      const std::uint64_t bits = Mix(case_.seed + purpose, rank, i);
      if (values) {
        Store(Value(bits), &all[i * element], dtype());
      } else {
        all[i] = static_cast<std::uint8_t>(bits >> 32);
      }
    }
    return all;
  }

  Bytes Copied(const std::vector<Bytes>& sources, std::size_t row_bytes) const {
    return Slabs(row_bytes, [&](const Slot& slot, std::uint8_t* row) {
      std::memcpy(row, &sources[slot.rank][slot.row * row_bytes], row_bytes);
    });
  }

  void ExpertRow(bool gradient, int destination, const Slot& slot, std::uint8_t* row) const {
    const bool bytes = case_.mxfp8 && !gradient;
    const std::size_t element = SizeOf(dtype());
    const std::uint8_t* const from =
        &(gradient ? grads_ : tokens_)[slot.rank][slot.row * (bytes ? hidden() : row_bytes())];
    const std::uint64_t bits = Mix(case_.seed + (gradient ? 5 : 6), GlobalExpert(slot.local_expert, destination));
    const float factor = 0.5f + static_cast<float>(bits % 1024) / 1024.0f;
    for (std::size_t i = 0; i < hidden(); ++i) {
      const float value = bytes ? (static_cast<float>(from[i]) - 128.0f) / 16.0f : Load(from + i * element, dtype());
      Store(factor * value, row + i * element, dtype());
    }
  }

  float WeightGrad(int destination, const Slot& slot) const {
    return Value(Mix(case_.seed + 7, GlobalExpert(slot.local_expert, destination), slot.rank, slot.row));
  }

  const Group& group_;
  const Case& case_;
  int rank_;
  Reference reference_;
  std::vector<Bytes> tokens_, scales_, grads_;
  std::vector<std::vector<float>> weights_;
};

// A group of the library with the memory that its cases share.
class GroupRun {
 public:
  GroupRun(const Group& group, int sms)
      : group_(group),
        side_(group.writes_duplicates() ? Place::kWindow : Place::kDevice),
        received_(side_, SlabBytes(RowBytes()), group.window_offset, Room(RowBytes())),
        received_scales_(side_, SlabBytes(ScaleBytes()), group.window_offset, Room(ScaleBytes())),
        received_weights_(Place::kDevice, SlabBytes(4), 0, Room(4)),
        expert_rows_(side_, SlabBytes(RowBytes()), group.window_offset, Room(RowBytes())),
        expert_weights_(Place::kDevice, SlabBytes(4)),
        indices_(Place::kDevice, group.max_tokens * TopK() * 8),
        tokens_(Place::kDevice, group.max_tokens * RowBytes()),
        scales_(Place::kDevice, group.max_tokens * ScaleBytes()),
        weights_(Place::kDevice, group.max_tokens * TopK() * 4),
        result_(Place::kDevice, group.max_tokens * RowBytes()),
        weight_grads_(Place::kDevice, group.max_tokens * TopK() * 4) {
    for (const Place place : {Place::kDevice, Place::kPinned}) {
      counts_.push_back(std::make_unique<Block>(place, group.local_experts * 8));
      offsets_.push_back(std::make_unique<Block>(place, group.local_experts * 8));
      total_.push_back(std::make_unique<Block>(place, 8));
    }
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = group.experts();
    config.max_dispatch_tokens_per_rank = group.max_tokens;
    config.max_recv_tokens_per_rank = group.mode == Mode::kEager ? 0 : static_cast<unsigned>(group.capacity);
    config.max_token_bytes = static_cast<unsigned>(RowBytes());
    config.max_num_sms = sms;
    config.zero_copy = group.zero_copy == ZeroCopy::kOn    ? NCCL_EP_ZERO_COPY_ON
                       : group.zero_copy == ZeroCopy::kOff ? NCCL_EP_ZERO_COPY_OFF
                                                           : NCCL_EP_ZERO_COPY_AUTO;
    config.overflow_policy = group.mode == Mode::kDrop ? NCCL_EP_OVERFLOW_DROP : NCCL_EP_OVERFLOW_AUTO;
    config.num_topk = group.mode == Mode::kEager ? group.kernels.top_k : 0;
    TEST_NCCL(ncclEpCreateGroup(&ep_, World::Get().comm(), &config));
    size_t bytes = 0;
    const ncclEpHandleConfig_t layer = HandleConfig();
    TEST_NCCL(ncclEpHandleMemSize(ep_, NCCL_EP_LAYOUT_EXPERT_MAJOR, &layer, &bytes, group.kernels.top_k));
    handle_bytes_ = bytes;
    handle_memory_ = std::make_unique<Block>(Place::kDevice, bytes);
  }

  // Frees the group, which no rank may use any more. Collective.
  void Close() {
    DropHandle();
    World::Get().Wait();
    MPI_Barrier(MPI_COMM_WORLD);
    TEST_NCCL(ncclEpGroupDestroy(ep_));
    MPI_Barrier(MPI_COMM_WORLD);
  }

  // The outputs of a case; `intact` says whether nothing but these was written.
  std::vector<Output> Run(const Case& one, bool* intact) {
    const Model model(group_, one);
    running_ = one.number;
    intact_ = true;
    std::vector<Output> outputs;
    Update(one, model, &outputs);
    Dispatch(one, model, &outputs);
    Combine(one, model, &outputs);
    DispatchGrads(one, model, &outputs);
    CombineGrads(one, model, &outputs);
    *intact = intact_;
    return outputs;
  }

 private:
  std::size_t TopK() const { return group_.kernels.top_k; }
  std::size_t RowBytes() const { return group_.kernels.hidden * SizeOf(group_.kernels.dtype); }
  std::size_t ScaleBytes() const { return group_.kernels.hidden / kScaleBlock; }
  std::size_t SlabBytes(std::size_t row_bytes) const { return group_.capacity * row_bytes; }
  // Where duplicates are written and rows dropped, padding may go beyond the buffer.
  std::size_t Room(std::size_t row_bytes) const {
    return Block::kRoom + group_.local_experts * group_.alignment * row_bytes;
  }
  cudaStream_t Stream() const { return World::Get().stream(); }

  ncclEpHandleConfig_t HandleConfig() const {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = group_.alignment;
    return config;
  }

  void DropHandle() {
    if (handle_ == nullptr) return;
    World::Get().Wait();
    TEST_NCCL(ncclEpHandleDestroy(handle_));
    handle_ = nullptr;
  }

  // With zero copy, peers write into this rank's windows and read from them: nobody fills them before all are done with
  // the last operation, and nobody starts the next one before all have filled theirs.
  void Meet() const {
    World::Get().Wait();
    if (group_.writes_duplicates()) MPI_Barrier(MPI_COMM_WORLD);
  }

  void Require(bool right, const char* what) {
    if (right) return;
    intact_ = false;
    std::fprintf(stderr, "case %d, rank %d: memory behind %s was written\n", running_, World::Get().rank(), what);
  }

  void Update(const Case& one, const Model& model, std::vector<Output>* outputs) {
    const int place = one.counters == Memory::kPinned ? 1 : 0;
    const std::size_t local = group_.local_experts, width = one.wide_counters ? 8 : 4;
    const ncclDataType_t type = one.wide_counters ? ncclInt64 : ncclInt32;
    indices_.Set(Integers(one.routing.expert[World::Get().rank()], one.wide_indices));
    Descriptor indices(indices_, one.wide_indices ? ncclInt64 : ncclInt32, {model.rows(), TopK()});
    Descriptor counts, offsets, total;
    if (one.counts) counts = Descriptor(*counts_[place], type, {local});
    if (one.offsets) offsets = Descriptor(*offsets_[place], type, {local});
    if (one.total) total = Descriptor(*total_[place], type, {1});
    for (const auto* blocks : {&counts_, &offsets_, &total_}) (*blocks)[place]->Clear();
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    info.expert_counters = counts.get();
    info.expert_offsets = offsets.get();
    info.recv_total_counter = total.get();

    const ncclEpHandleConfig_t config = HandleConfig();
    if (one.handle != HandleFrom::kLast || handle_ == nullptr) {
      DropHandle();
      if (one.handle == HandleFrom::kCreate) {
        TEST_NCCL(
            ncclEpCreateHandle(&handle_, ep_, NCCL_EP_LAYOUT_EXPERT_MAJOR, indices.get(), &info, &config, Stream()));
      } else {
        handle_memory_->Clear();
        Descriptor memory;
        if (one.handle != HandleFrom::kInitLibrary) memory = Descriptor(*handle_memory_, ncclUint8, {handle_bytes_});
        TEST_NCCL(
            ncclEpInitHandle(&handle_, ep_, NCCL_EP_LAYOUT_EXPERT_MAJOR, &config, group_.kernels.top_k, memory.get()));
      }
    }
    if (one.handle != HandleFrom::kCreate) {
      TEST_NCCL(ncclEpUpdateHandle(handle_, indices.get(), &info, Stream()));
    }
    World::Get().Wait();

    const auto add = [&](bool given, Field field, const Block& block, const std::vector<std::int64_t>& values) {
      Require(block.UntouchedBehind(given ? values.size() * width : 0), kFieldNames[field]);
      if (!given) return;
      outputs->push_back({field, width, block.Get(values.size() * width), Integers(values, one.wide_counters)});
    };
    add(one.counts, kCounts, *counts_[place], model.Counts());
    add(one.offsets, kOffsets, *offsets_[place], model.Offsets());
    add(one.total, kTotal, *total_[place], {static_cast<std::int64_t>(model.total())});
  }

  // What came in the slabs of a receive-side buffer, and adds what lies behind them to `rest`, where that is defined.
  Bytes Split(const Block& block, const Model& model, std::size_t row_bytes, const char* name, Output* rest) {
    const std::size_t slabs = model.received() * row_bytes, all = model.capacity() * row_bytes;
    if (!group_.writes_duplicates() || group_.mode != Mode::kDrop) Require(block.UntouchedBehind(all), name);
    Bytes bytes = block.Get(all);
    if (!group_.writes_duplicates()) {
      rest->got.insert(rest->got.end(), bytes.begin() + static_cast<std::ptrdiff_t>(slabs), bytes.end());
      rest->expected.resize(rest->got.size(), group_.mode == Mode::kDrop ? 0 : kUnwritten);
    }
    bytes.resize(slabs);
    return bytes;
  }

  void Dispatch(const Case& one, const Model& model, std::vector<Output>* outputs) {
    Meet();
    tokens_.Set(model.tokens());
    scales_.Set(model.scales());
    weights_.Set(AsBytes(model.weights()));
    received_.Clear();
    received_scales_.Clear();
    received_weights_.Clear();
    Meet();
    const ncclDataType_t type = one.mxfp8 ? ncclFloat8e4m3 : TypeOf(model.dtype());
    Descriptor tokens(tokens_, type, {model.rows(), model.hidden()});
    Descriptor received(received_, type, {model.capacity(), model.hidden()}, one.window_only);
    Descriptor scales, received_scales, weights, received_weights;
    if (one.mxfp8) {
      scales = Descriptor(scales_, ncclUint8, {model.rows(), model.scale_bytes()});
      received_scales =
          Descriptor(received_scales_, ncclUint8, {model.capacity(), model.scale_bytes()}, one.window_only);
    }
    if (one.weights) {
      weights = Descriptor(weights_, ncclFloat32, {model.rows(), TopK()});
      received_weights = Descriptor(received_weights_, ncclFloat32, {model.capacity()});
    }
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = tokens.get();
    inputs.topk_weights = weights.get();
    inputs.scales = scales.get();
    ncclEpDispatchOutputs_t results = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    results.tokens = received.get();
    results.topk_weights = received_weights.get();
    results.scales = received_scales.get();
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.pass_direction = one.weights ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS;
    config.quant_recipe = one.mxfp8 ? NCCL_EP_DISP_QUANT_FWD : NCCL_EP_DISP_QUANT_NONE;
    TEST_NCCL(ncclEpDispatch(handle_, &inputs, &results, nullptr, &config, Stream()));
    World::Get().Wait();

    Output rest = {kRest, 1, {}, {}};
    outputs->push_back({kTokens, model.token_bytes(), Split(received_, model, model.token_bytes(), "tokens", &rest),
                        model.ReceivedTokens()});
    if (one.mxfp8) {
      outputs->push_back({kScales, model.scale_bytes(),
                          Split(received_scales_, model, model.scale_bytes(), "scales", &rest),
                          model.ReceivedScales()});
    } else {
      Require(received_scales_.UntouchedBehind(0), "no scales");
    }
    if (one.weights) {
      Bytes got = Split(received_weights_, model, 4, "weights", &rest);
      Bytes expected = model.ReceivedWeights(&got);
      outputs->push_back({kWeights, 4, std::move(got), std::move(expected)});
    } else {
      Require(received_weights_.UntouchedBehind(0), "no weights");
    }
    if (!group_.writes_duplicates()) outputs->push_back(std::move(rest));
  }

  void Combine(const Case& one, const Model& model, std::vector<Output>* outputs) {
    Meet();
    expert_rows_.Set(model.ExpertRows(false));
    result_.Clear();
    Meet();
    RunCombine(one, model, false);
    AddSums(kResult, model, false, outputs);
  }

  void DispatchGrads(const Case& one, const Model& model, std::vector<Output>* outputs) {
    Meet();
    tokens_.Set(model.grads());
    received_.Clear();
    Meet();
    Descriptor grads(tokens_, TypeOf(model.dtype()), {model.rows(), model.hidden()});
    Descriptor received(received_, TypeOf(model.dtype()), {model.capacity(), model.hidden()}, one.window_only);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = grads.get();
    ncclEpDispatchOutputs_t results = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    results.tokens = received.get();
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.pass_direction = NCCL_EP_BWD_PASS;
    TEST_NCCL(ncclEpDispatch(handle_, &inputs, &results, nullptr, &config, Stream()));
    World::Get().Wait();
    Output rest = {kSlotGradRest, 1, {}, {}};
    outputs->push_back({kSlotGrad, model.row_bytes(), Split(received_, model, model.row_bytes(), "slot_grad", &rest),
                        model.ReceivedGrads()});
    if (!group_.writes_duplicates()) outputs->push_back(std::move(rest));
  }

  void CombineGrads(const Case& one, const Model& model, std::vector<Output>* outputs) {
    Meet();
    expert_rows_.Set(model.ExpertRows(true));
    expert_weights_.Set(model.SlotWeightGrads());
    result_.Clear();
    weight_grads_.Clear();
    Meet();
    RunCombine(one, model, one.weights);
    AddSums(kTokenGrad, model, true, outputs);
    const std::size_t bytes = one.weights ? model.rows() * TopK() * 4 : 0;
    Require(weight_grads_.UntouchedBehind(bytes), "weight_grad");
    if (one.weights) outputs->push_back({kWeightGrad, TopK() * 4, weight_grads_.Get(bytes), model.WeightGrads()});
  }

  // Of expert_rows_, and in the backward pass expert_weights_, into result_ and weight_grads_.
  void RunCombine(const Case& one, const Model& model, bool backward) {
    Descriptor rows(expert_rows_, TypeOf(model.dtype()), {model.capacity(), model.hidden()}, one.window_only);
    Descriptor result(result_, TypeOf(model.dtype()), {model.rows(), model.hidden()});
    Descriptor row_weights, weights;
    if (backward) {
      row_weights = Descriptor(expert_weights_, ncclFloat32, {model.capacity()});
      weights = Descriptor(weight_grads_, ncclFloat32, {model.rows(), TopK()});
    }
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    inputs.tokens = rows.get();
    inputs.topk_weights = row_weights.get();
    ncclEpCombineOutputs_t results = NCCL_EP_COMBINE_OUTPUTS_INIT;
    results.tokens = result.get();
    results.topk_weights = weights.get();
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    TEST_NCCL(ncclEpCombine(handle_, &inputs, &results, &config, Stream()));
    World::Get().Wait();
  }

  void AddSums(Field field, const Model& model, bool gradient, std::vector<Output>* outputs) {
    const std::size_t bytes = model.rows() * model.row_bytes();
    Require(result_.UntouchedBehind(bytes), kFieldNames[field]);
    outputs->push_back({field, model.row_bytes(), result_.Get(bytes), model.Combined(gradient)});
  }

  const Group& group_;
  Place side_;
  ncclEpGroup_t ep_ = nullptr;
  ncclEpHandle_t handle_ = nullptr;
  std::size_t handle_bytes_ = 0;
  int running_ = 0;
  bool intact_ = true;
  Block received_, received_scales_, received_weights_, expert_rows_, expert_weights_;
  Block indices_, tokens_, scales_, weights_, result_, weight_grads_;
  std::vector<std::unique_ptr<Block>> counts_, offsets_, total_;
  std::unique_ptr<Block> handle_memory_;
};

// ---- the record ----

// Says on stderr how an output differs from the reference; true if it does not.
bool Same(const Case& one, const Output& output) {
  if (output.got == output.expected) return true;
  const std::size_t end = std::min(output.got.size(), output.expected.size());
  const auto differ =
      std::mismatch(output.got.begin(), output.got.begin() + static_cast<std::ptrdiff_t>(end), output.expected.begin());
  const std::size_t at = differ.first - output.got.begin();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < end; ++i) wrong += output.got[i] == output.expected[i] ? 0 : 1;
  std::fprintf(
      stderr,
      "case %d, rank %d: %s has %zu bytes, expected %zu; %zu differ, first row %zu byte %zu: 0x%02x, expected 0x%02x\n",
      one.number, World::Get().rank(), kFieldNames[output.field], output.got.size(), output.expected.size(), wrong,
      at / output.row_bytes, at % output.row_bytes, at < end ? *differ.first : 0, at < end ? *differ.second : 0);
  return false;
}

// The record's line of a case, on rank 0. Collective.
std::string Line(const Group& group, const Case& one, const std::vector<Output>& outputs) {
  const int ranks = World::Get().size();
  std::uint64_t mine[kFields] = {};
  bool given[kFields] = {};
  for (const Output& output : outputs) {
    given[output.field] = true;
    mine[output.field] = Digest(output.got.data(), output.got.size());
    if (output.field != kTotal) continue;
    mine[kTotal] = 0;
    std::memcpy(&mine[kTotal], output.got.data(), output.got.size());
  }
  std::vector<std::uint64_t> all(static_cast<std::size_t>(ranks) * kFields);
  MPI_Gather(mine, kFields, MPI_UINT64_T, all.data(), kFields, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  if (World::Get().rank() != 0) return "";
  std::string line = Describe(group, one);
  for (int field = 0; field < kFields; ++field) {
    line += std::string(" ") + kFieldNames[field] + "=";
    if (!given[field]) {
      line += "-";
      continue;
    }
    Bytes bytes;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::uint64_t digest = all[rank * kFields + field];
      if (field == kTotal) line += (rank == 0 ? "" : ",") + std::to_string(digest);
      for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<std::uint8_t>(digest >> shift));
    }
    char text[24];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(Digest(bytes.data(), bytes.size())));
    if (field != kTotal) line += text;
  }
  return line;
}

struct Options {
  int list = 0;
  std::string expect;
  int first = 0;
  int last = 1000000;
  // Ranks that share a GPU need all their SMs at once; the number changes no value.
  int sms = 16;
};

std::optional<std::vector<std::string>> ReadLines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// The lines of a record and, on rank 0, their comparison with those of a file.
class Record {
 public:
  explicit Record(const std::string& expect) : compares_(!expect.empty()) {
    if (!compares_) return;
    const auto lines = ReadLines(expect);
    if (!lines) throw std::runtime_error("--expect: cannot read " + expect);
    expected_ = *lines;
  }

  void Add(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
    const std::string* const want = next_ < expected_.size() ? &expected_[next_] : nullptr;
    ++next_;
    if (!compares_ || (want != nullptr && *want == line)) return;
    ++different_;
    std::fprintf(stderr, "the record differs in line %zu:\n  here:     %s\n  expected: %s\n", next_, line.c_str(),
                 want == nullptr ? "no more lines" : want->c_str());
  }

  // Whether every line was the expected one and none is left.
  bool Equal() const {
    if (!compares_) return true;
    if (next_ < expected_.size()) {
      std::fprintf(stderr, "the record has %zu lines, expected were %zu\n", next_, expected_.size());
    }
    return different_ == 0 && next_ >= expected_.size();
  }

 private:
  bool compares_;
  std::vector<std::string> expected_;
  std::size_t next_ = 0;
  int different_ = 0;
};

bool RunAll(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const bool talks = World::Get().rank() == 0;
  Record record(talks ? options.expect : "");
  const std::vector<Group> groups = MakeTable(World::Get().size());
  int cases = 0, wrong = 0;
  if (talks) {
    int nccl = 0, ep = 0;
    TEST_NCCL(ncclGetVersion(&nccl));
    TEST_NCCL(ncclEpGetVersion(&ep));
    std::fprintf(stderr, "NCCL %d, NCCL EP %d, %zu groups\n", nccl, ep, groups.size());
  }
  for (const Group& group : groups) {
    if (group.number < options.first || group.number > options.last) continue;
    const Clock::time_point start = Clock::now();
    GroupRun run(group, options.sms);
    for (const Case& one : group.cases) {
      bool same = true;
      const std::vector<Output> outputs = run.Run(one, &same);
      for (const Output& output : outputs) same = Same(one, output) && same;
      const int mine = same ? 0 : 1;
      int anywhere = 0;
      MPI_Allreduce(&mine, &anywhere, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
      wrong += anywhere;
      ++cases;
      const std::string line = Line(group, one, outputs);
      if (talks) record.Add(line);
    }
    run.Close();
    if (!talks) continue;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::fprintf(stderr, "group %d: %.2f s\n", group.number, seconds);
  }
  if (talks) std::fprintf(stderr, "%d cases, %d differ from the reference\n", cases, wrong);
  int equal = record.Equal() ? 1 : 0;
  MPI_Bcast(&equal, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return equal != 0 && wrong == 0 && cases > 0;
}

void List(int ranks) {
  for (const Group& group : MakeTable(ranks)) {
    for (const Case& one : group.cases) std::printf("%s\n", Describe(group, one).c_str());
  }
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--expect") {
      options->expect = value;
    } else if (name == "--groups") {
      if (std::sscanf(value.c_str(), "%d:%d", &options->first, &options->last) != 2) return false;
    } else if (name == "--sms") {
      options->sms = std::atoi(value.c_str());
    } else if (name == "--list") {
      options->list = std::atoi(value.c_str());
      if (options->list <= 0) return false;
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && options->sms > 0;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  conformance::Options options;
  if (!conformance::Parse(argc, argv, &options)) {
    std::fprintf(stderr, "usage: %s [--expect FILE] [--groups FIRST:LAST] [--sms N] | --list RANKS\n", argv[0]);
    return 2;
  }
  if (options.list > 0) {
    conformance::List(options.list);
    return 0;
  }
  test::World::Start(&argc, &argv);
  bool right = false;
  try {
    right = conformance::RunAll(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", test::World::Get().rank(), error.what());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return test::World::Stop() && right ? 0 : 1;
}
