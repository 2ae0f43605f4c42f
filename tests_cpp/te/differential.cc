// Feeds two libraries of TransformerEngine's ABI the same random steps and compares every output bit by bit. On a GPU
// these are TransformerEngine's own library and ours.
//
//   mpirun -n 2 te_differential --a PATH --b PATH [--cases N] [--seed S] [--shapes N] [--unordered] [--separate-a]

#include <dlfcn.h>
#include <transformer_engine/ep.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/device.h"
#include "support/number.h"
#include "support/reference.h"
#include "support/world.h"

namespace test {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Shape = std::vector<std::size_t>;

// ---- a library and its group ----

class Library {
 public:
  // The library in `path`, all to itself: nothing of it is visible to the other one.
  Library(const char* side, const std::string& path) : side_(side), comm_(World::Get().MakeComm(World::Get().size())) {
    // Lazily: TransformerEngine's library refers to functions of newer cuBLAS libraries than may be installed, which
    // expert parallelism never calls.
    file_ = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (file_ == nullptr) throw std::runtime_error(dlerror());
    Find(initialize, "nvte_ep_initialize");
    Find(shutdown, "nvte_ep_shutdown");
    Find(handle_mem_size, "nvte_ep_handle_mem_size");
    Find(prepare, "nvte_ep_prepare");
    Find(dispatch, "nvte_ep_dispatch");
    Find(combine, "nvte_ep_combine");
    Find(dispatch_bwd, "nvte_ep_dispatch_bwd");
    Find(combine_bwd, "nvte_ep_combine_bwd");
    Find(create_tensor, "nvte_create_tensor");
    Find(destroy_tensor, "nvte_destroy_tensor");
    Find(set_tensor_param, "nvte_set_tensor_param_v2");
    Find(make_shape, "nvte_make_shape");
    prepare_and_dispatch = Look(prepare_and_dispatch, "nvte_ep_prepare_and_dispatch");
  }
  ~Library() { static_cast<void>(ncclCommDestroy(comm_)); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const char* side() const { return side_; }
  ncclComm_t comm() const { return comm_; }
  // What it calls itself, where it has a name.
  std::string Name() const {
    const char* (*version)() = nullptr;
    version = Look(version, "nvte_ep_ext_version");
    return version == nullptr ? "a library without nvte_ep_ext_version" : version();
  }

  decltype(&nvte_ep_initialize) initialize = nullptr;
  decltype(&nvte_ep_shutdown) shutdown = nullptr;
  decltype(&nvte_ep_handle_mem_size) handle_mem_size = nullptr;
  decltype(&nvte_ep_prepare) prepare = nullptr;
  decltype(&nvte_ep_dispatch) dispatch = nullptr;
  decltype(&nvte_ep_combine) combine = nullptr;
  decltype(&nvte_ep_dispatch_bwd) dispatch_bwd = nullptr;
  decltype(&nvte_ep_combine_bwd) combine_bwd = nullptr;
  decltype(&nvte_ep_prepare_and_dispatch) prepare_and_dispatch = nullptr;
  decltype(&nvte_create_tensor) create_tensor = nullptr;
  decltype(&nvte_destroy_tensor) destroy_tensor = nullptr;
  decltype(&nvte_set_tensor_param_v2) set_tensor_param = nullptr;
  decltype(&nvte_make_shape) make_shape = nullptr;

 private:
  template <typename Function>
  Function* Look(Function*, const char* name) const {
    return reinterpret_cast<Function*>(dlsym(file_, name));
  }
  template <typename Function>
  void Find(Function*& function, const char* name) const {
    function = Look(function, name);
    if (function == nullptr) throw std::runtime_error(std::string("library ") + side_ + " has no " + name);
  }

  const char* side_;
  ncclComm_t comm_;
  void* file_ = nullptr;
};

// A tensor of one library.
class LibraryTensor {
 public:
  LibraryTensor(const Library& library, void* data, NVTEDType dtype, const Shape& shape)
      : LibraryTensor(library, NVTE_DELAYED_TENSOR_SCALING) {
    Set(kNVTERowwiseData, data, dtype, shape);
  }
  // MXFP8: e4m3 values and their scales.
  LibraryTensor(const Library& library, void* data, void* scales, std::size_t rows, std::size_t hidden)
      : LibraryTensor(library, NVTE_MXFP8_1D_SCALING) {
    Set(kNVTERowwiseData, data, kNVTEFloat8E4M3, {rows, hidden});
    Set(kNVTERowwiseScaleInv, scales, kNVTEFloat8E8M0, {rows, hidden / 32});
  }
  ~LibraryTensor() { library_.destroy_tensor(tensor_); }
  LibraryTensor(const LibraryTensor&) = delete;
  LibraryTensor& operator=(const LibraryTensor&) = delete;

  NVTETensor get() const { return tensor_; }

 private:
  LibraryTensor(const Library& library, NVTEScalingMode mode)
      : library_(library), tensor_(library.create_tensor(mode)) {}

  void Set(NVTETensorParam param, void* data, NVTEDType dtype, const Shape& shape) {
    const bool empty = std::find(shape.begin(), shape.end(), 0u) != shape.end();
    NVTEBasicTensor basic;
    basic.data_ptr = empty ? nullptr : data;
    basic.dtype = dtype;
    basic.shape = library_.make_shape(shape.data(), shape.size());
    library_.set_tensor_param(tensor_, param, &basic, sizeof basic);
  }

  const Library& library_;
  NVTETensor tensor_;
};

// ---- cases ----

// What NCCL EP compiles kernels for.
struct Kernels {
  std::size_t hidden;
  NVTEDType dtype;
  int top_k;
};

// What is fixed for a group; TransformerEngine keeps top_k and alignment from the first prepare to shutdown.
struct GroupPlan {
  Kernels kernels;
  int experts_per_rank;
  int max_tokens;
  std::size_t alignment;
  bool drop;
  int capacity;

  int experts() const { return experts_per_rank * World::Get().size(); }

  NVTEEpGroupConfig Config() const {
    const char* sms = std::getenv("NVTE_EP_TEST_MAX_SMS");
    NVTEEpGroupConfig config = {};
    config.struct_size = sizeof config;
    config.ep_size = World::Get().size();
    config.num_experts = experts();
    config.max_tokens_per_rank = max_tokens;
    config.max_recv_tokens_per_rank = capacity;
    config.hidden_dim = static_cast<int>(kernels.hidden);
    config.num_comm_sms = sms == nullptr ? 0 : std::atoi(sms);
    config.max_token_dtype = kernels.dtype;
    config.drop_on_overflow = drop ? 1 : 0;
    return config;
  }
  NVTEEpLayerConfig Layer() const {
    NVTEEpLayerConfig config = {};
    config.struct_size = sizeof config;
    config.top_k = kernels.top_k;
    config.dispatch_output_per_expert_alignment = alignment;
    return config;
  }
};

struct Case {
  std::uint64_t seed;
  Routing routing;
  bool mxfp8;
  bool weights;
  bool wide_indices;
  bool wide_counts;

  std::size_t rows() const { return routing.rows[World::Get().rank()]; }
};

std::size_t ElementBytes(NVTEDType dtype) { return dtype == kNVTEFloat32 ? 4 : dtype == kNVTEInt64 ? 8 : 2; }

float FloatAt(const std::uint8_t* element, NVTEDType dtype) {
  if (dtype == kNVTEFloat32) {
    float value;
    std::memcpy(&value, element, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return dtype == kNVTEFloat16 ? Widen(Float16{bits}) : Widen(BFloat16{bits});
}

void Store(float value, std::uint8_t* element, NVTEDType dtype) {
  if (dtype == kNVTEFloat32) {
    std::memcpy(element, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == kNVTEFloat16 ? Narrow<Float16>(value).bits : Narrow<BFloat16>(value).bits;
  std::memcpy(element, &bits, sizeof bits);
}

// A float of 24 significant bits between -4 and 4: sums of them round.
float RandomFloat(std::uint64_t bits) { return (static_cast<float>(bits >> 40) - 8388608.0f) / 2097152.0f; }

Bytes RandomRows(std::uint64_t seed, std::size_t rows, std::size_t hidden, NVTEDType dtype) {
  const std::size_t element = ElementBytes(dtype);
  Bytes bytes(rows * hidden * element);
  for (std::size_t i = 0; i < rows * hidden; ++i) {
    Store(RandomFloat(Mix(seed, World::Get().rank(), i)), &bytes[i * element], dtype);
  }
  return bytes;
}

Bytes RandomBytes(std::uint64_t seed, std::size_t count) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(Mix(seed, World::Get().rank(), i));
  return bytes;
}

template <typename T>
Bytes AsBytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// One output of one library: rows of bytes.
struct Output {
  std::string name;
  // How a value is printed.
  NVTEDType dtype;
  std::size_t row_bytes;
  Bytes bytes;
  // Rows that lie in slabs may come in another order, where the libraries leave that open.
  bool slabs;
};

struct Outputs {
  std::vector<std::int64_t> counts;
  std::vector<Output> all;
};

// The rows of received slabs, which are the first ones of a receive-side buffer.
Bytes Head(const DeviceBuffer<std::uint8_t>& buffer, std::size_t bytes) {
  Bytes all = buffer.Download();
  all.resize(bytes);
  return all;
}

std::vector<std::int64_t> Integers(const Bytes& bytes, bool wide) {
  std::vector<std::int64_t> values(bytes.size() / (wide ? 8 : 4));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (wide) {
      std::memcpy(&values[i], &bytes[i * 8], 8);
    } else {
      std::int32_t value;
      std::memcpy(&value, &bytes[i * 4], 4);
      values[i] = value;
    }
  }
  return values;
}

// One step of one library. What the experts and their gradients compute is a function of the received row and its
// expert, so that it does not depend on the order of rows in a slab.
class CaseRun {
 public:
  CaseRun(const Library& library, const GroupPlan& plan, const Case& which)
      : library_(library), plan_(plan), case_(which) {}

  Outputs Run(bool fused) {
    const std::size_t rows = case_.rows(), hidden = plan_.kernels.hidden, top_k = plan_.kernels.top_k;
    const std::size_t capacity = plan_.capacity, local = plan_.experts_per_rank;
    const NVTEDType dtype = plan_.kernels.dtype;
    const std::size_t row_bytes = hidden * ElementBytes(dtype);
    const std::size_t token_bytes = case_.mxfp8 ? hidden : row_bytes;
    const NVTEEpLayerConfig layer = plan_.Layer();
    const NVTECommWindow none = {};
    cudaStream_t stream = World::Get().stream();

    const Buffer memory(library_.handle_mem_size(&layer));
    const LibraryTensor handle(library_, memory.data(), kNVTEByte, {memory.size()});
    const Buffer topk_idx(Indices());
    const LibraryTensor topk_idx_t(library_, topk_idx.data(), case_.wide_indices ? kNVTEInt64 : kNVTEInt32,
                                   {rows, top_k});
    const NVTEDType count_dtype = case_.wide_counts ? kNVTEInt64 : kNVTEInt32;
    const std::size_t count_bytes = case_.wide_counts ? 8 : 4;
    const Buffer counts(local * count_bytes), total(count_bytes);
    const LibraryTensor counts_t(library_, counts.data(), count_dtype, {local});
    const LibraryTensor total_t(library_, total.data(), count_dtype, {1});

    const Buffer tokens(case_.mxfp8 ? RandomBytes(case_.seed, rows * hidden)
                                    : RandomRows(case_.seed, rows, hidden, dtype));
    const Buffer scales(RandomBytes(case_.seed + 1, rows * hidden / 32));
    const Buffer recv_tokens(capacity * token_bytes), recv_scales(capacity * hidden / 32);
    const LibraryTensor tokens_t = Tokens(tokens, scales, rows);
    const LibraryTensor recv_tokens_t = Tokens(recv_tokens, recv_scales, capacity);
    const Buffer weights(AsBytes(Weights(rows * top_k))), recv_weights(capacity * 4);
    const LibraryTensor weights_t(library_, weights.data(), kNVTEFloat32, {rows, top_k});
    const LibraryTensor recv_weights_t(library_, recv_weights.data(), kNVTEFloat32, {capacity});
    const NVTETensor sent_weights = case_.weights ? weights_t.get() : nullptr;
    const NVTETensor received_weights = case_.weights ? recv_weights_t.get() : nullptr;

    if (fused) {
      library_.prepare_and_dispatch(handle.get(), topk_idx_t.get(), tokens_t.get(), none, sent_weights, none,
                                    recv_tokens_t.get(), none, received_weights, none, counts_t.get(), total_t.get(),
                                    &layer, stream);
    } else {
      library_.prepare(handle.get(), topk_idx_t.get(), counts_t.get(), total_t.get(), &layer, stream);
      library_.dispatch(handle.get(), topk_idx_t.get(), tokens_t.get(), none, sent_weights, none, recv_tokens_t.get(),
                        none, received_weights, none, stream);
    }
    Outputs outputs;
    outputs.counts = Integers(counts.Download(), case_.wide_counts);
    outputs.all.push_back({"recv_tokens_per_expert", count_dtype, count_bytes, counts.Download(), false});
    outputs.all.push_back({"total_recv_tokens_per_rank", count_dtype, count_bytes, total.Download(), false});
    std::size_t received = 0;
    for (const std::int64_t count : outputs.counts) received += count;
    if (received > capacity) throw std::runtime_error("more rows than the capacity are reported as received");
    const Bytes recv = Head(recv_tokens, received * token_bytes);
    outputs.all.push_back({"recv_tokens", case_.mxfp8 ? kNVTEByte : dtype, token_bytes, recv, true});
    if (case_.mxfp8) {
      outputs.all.push_back(
          {"recv_tokens.rowwise_scale_inv", kNVTEByte, hidden / 32, Head(recv_scales, received * hidden / 32), true});
    }
    if (case_.weights) {
      outputs.all.push_back({"recv_topk_weights", kNVTEFloat32, 4, Head(recv_weights, received * 4), true});
    }
    if (fused) return outputs;

    const Buffer expert_out(Derived(recv, outputs.counts, 1));
    const Buffer result(rows * row_bytes);
    const LibraryTensor expert_out_t(library_, expert_out.data(), dtype, {capacity, hidden});
    const LibraryTensor result_t(library_, result.data(), dtype, {rows, hidden});
    library_.combine(handle.get(), expert_out_t.get(), none, result_t.get(), stream);
    outputs.all.push_back({"result", dtype, row_bytes, result.Download(), false});

    const Buffer grad(RandomRows(case_.seed + 2, rows, hidden, dtype));
    const Buffer grad_expert_out(capacity * row_bytes);
    const LibraryTensor grad_t(library_, grad.data(), dtype, {rows, hidden});
    const LibraryTensor grad_expert_out_t(library_, grad_expert_out.data(), dtype, {capacity, hidden});
    library_.combine_bwd(handle.get(), grad_t.get(), none, grad_expert_out_t.get(), none, stream);
    outputs.all.push_back({"grad_expert_out", dtype, row_bytes, Head(grad_expert_out, received * row_bytes), true});

    const Buffer slot_grad(Derived(recv, outputs.counts, 2));
    const Buffer g_recv_weights(AsBytes(SlotWeights(recv, outputs.counts)));
    const Buffer grad_tokens(rows * row_bytes), grad_weights(rows * top_k * 4);
    const LibraryTensor slot_grad_t(library_, slot_grad.data(), dtype, {capacity, hidden});
    const LibraryTensor g_recv_weights_t(library_, g_recv_weights.data(), kNVTEFloat32, {capacity});
    const LibraryTensor grad_tokens_t(library_, grad_tokens.data(), dtype, {rows, hidden});
    const LibraryTensor grad_weights_t(library_, grad_weights.data(), kNVTEFloat32, {rows, top_k});
    library_.dispatch_bwd(handle.get(), slot_grad_t.get(), none, g_recv_weights_t.get(), none, grad_tokens_t.get(),
                          grad_weights_t.get(), stream);
    outputs.all.push_back({"grad_tokens", dtype, row_bytes, grad_tokens.Download(), false});
    outputs.all.push_back({"grad_topk_weights", kNVTEFloat32, top_k * 4, grad_weights.Download(), false});
    return outputs;
  }

 private:
  using Buffer = DeviceBuffer<std::uint8_t>;

  LibraryTensor Tokens(const Buffer& data, const Buffer& scales, std::size_t rows) const {
    if (case_.mxfp8) return LibraryTensor(library_, data.data(), scales.data(), rows, plan_.kernels.hidden);
    return LibraryTensor(library_, data.data(), plan_.kernels.dtype, {rows, plan_.kernels.hidden});
  }

  Bytes Indices() const {
    const std::vector<std::int64_t>& mine = case_.routing.expert[World::Get().rank()];
    if (case_.wide_indices) return AsBytes(mine);
    return AsBytes(std::vector<std::int32_t>(mine.begin(), mine.end()));
  }

  std::vector<float> Weights(std::size_t count) const {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = RandomFloat(Mix(case_.seed + 3, World::Get().rank(), i));
    return values;
  }

  // visit(slot, global expert, bytes of the received row) for all received rows.
  template <typename Visit>
  void ForSlots(const Bytes& recv, const std::vector<std::int64_t>& counts, Visit visit) const {
    const std::size_t width = plan_.kernels.hidden * (case_.mxfp8 ? 1 : ElementBytes(plan_.kernels.dtype));
    std::size_t slot = 0;
    for (std::size_t local = 0; local < counts.size(); ++local) {
      const std::uint64_t expert = World::Get().rank() * counts.size() + local;
      for (std::int64_t i = 0; i < counts[local]; ++i, ++slot) visit(slot, expert, &recv[slot * width]);
    }
  }

  // A receive-side input; rows that are not received hold NaN.
  Bytes Derived(const Bytes& recv, const std::vector<std::int64_t>& counts, std::uint64_t purpose) const {
    const std::size_t hidden = plan_.kernels.hidden, element = ElementBytes(plan_.kernels.dtype);
    Bytes out(plan_.capacity * hidden * element, kUnwritten);
    ForSlots(recv, counts, [&](std::size_t slot, std::uint64_t expert, const std::uint8_t* row) {
      const float factor = RandomFloat(Mix(purpose, expert));
      for (std::size_t column = 0; column < hidden; ++column) {
        const float value = case_.mxfp8 ? static_cast<float>(row[column]) / 64.0f
                                        : FloatAt(row + column * element, plan_.kernels.dtype);
        Store(factor * value, &out[(slot * hidden + column) * element], plan_.kernels.dtype);
      }
    });
    return out;
  }

  std::vector<float> SlotWeights(const Bytes& recv, const std::vector<std::int64_t>& counts) const {
    std::vector<float> out(plan_.capacity, FloatFromBits(0xffffffffu));
    ForSlots(recv, counts, [&](std::size_t slot, std::uint64_t expert, const std::uint8_t* row) {
      std::uint64_t head;
      std::memcpy(&head, row, sizeof head);
      out[slot] = RandomFloat(Mix(head, expert));
    });
    return out;
  }

  const Library& library_;
  const GroupPlan& plan_;
  const Case& case_;
};

// ---- comparison ----

std::string Printed(const Output& output, const Bytes& bytes, std::size_t offset) {
  char text[64];
  if (output.dtype == kNVTEByte) {
    std::snprintf(text, sizeof text, "0x%02x", bytes[offset]);
  } else if (output.dtype == kNVTEInt32 || output.dtype == kNVTEInt64) {
    const Bytes one(bytes.begin() + offset, bytes.begin() + offset + (output.dtype == kNVTEInt64 ? 8 : 4));
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(Integers(one, output.dtype == kNVTEInt64)[0]));
  } else {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bytes[offset], ElementBytes(output.dtype));
    std::snprintf(text, sizeof text, "%.9g (0x%x)", static_cast<double>(FloatAt(&bytes[offset], output.dtype)), bits);
  }
  return text;
}

// The rows of every slab in an order that does not depend on where they were.
Bytes SortedInSlabs(const Output& output, const std::vector<std::int64_t>& counts) {
  Bytes sorted;
  std::size_t row = 0;
  for (const std::int64_t count : counts) {
    std::vector<Bytes> rows;
    for (std::int64_t i = 0; i < count; ++i, ++row) {
      const auto from = output.bytes.begin() + row * output.row_bytes;
      rows.emplace_back(from, from + output.row_bytes);
    }
    std::sort(rows.begin(), rows.end());
    for (const Bytes& bytes : rows) sorted.insert(sorted.end(), bytes.begin(), bytes.end());
  }
  return sorted;
}

// The first difference between what the two libraries put out, in words.
std::optional<std::string> FirstDifference(const Outputs& a, const Outputs& b, bool unordered) {
  for (std::size_t i = 0; i < a.all.size(); ++i) {
    const Output& one = a.all[i];
    const Output& other = b.all[i];
    const bool sort = unordered && one.slabs;
    const Bytes in_a = sort ? SortedInSlabs(one, a.counts) : one.bytes;
    const Bytes in_b = sort ? SortedInSlabs(other, b.counts) : other.bytes;
    const std::size_t end = std::min(in_a.size(), in_b.size());
    const std::size_t at = std::mismatch(in_a.begin(), in_a.begin() + end, in_b.begin()).first - in_a.begin();
    if (at == end && in_a.size() == in_b.size()) continue;
    std::string text = one.name + ", rank " + std::to_string(World::Get().rank());
    if (at == end) {
      return text + ": " + std::to_string(in_a.size()) + " bytes in A, " + std::to_string(in_b.size()) + " in B";
    }
    const std::size_t element = one.dtype == kNVTEByte ? 1 : one.dtype == kNVTEInt32 ? 4 : ElementBytes(one.dtype);
    const std::size_t first = at / element * element;
    text += ", row " + std::to_string(first / one.row_bytes) + (sort ? " of the sorted slabs" : "");
    text += ", column " + std::to_string(first % one.row_bytes / element);
    return text + ": " + Printed(one, in_a, first) + " in A, " + Printed(other, in_b, first) + " in B";
  }
  return std::nullopt;
}

// ---- the program ----

struct Options {
  std::string a, b;
  int cases = 100;
  std::uint64_t seed = 1;
  int shapes = 6;
  bool unordered = false;
  // A's prepare_and_dispatch is not used: TransformerEngine's writes no counts on NCCL EP builds with API 2.
  bool separate_a = false;
};

constexpr int kCasesPerGroup = 10;

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  int Between(int least, int most) { return least + static_cast<int>(random_() % (most - least + 1)); }
  template <typename T>
  T OneOf(const std::vector<T>& values) {
    return values[random_() % values.size()];
  }

 private:
  std::mt19937_64 random_;
};

std::vector<Kernels> DrawKernels(const Options& options) {
  Dice dice(Mix(options.seed, 0x5a));
  std::vector<Kernels> kernels;
  for (int i = 0; i < options.shapes; ++i) {
    const std::size_t hidden = dice.OneOf<std::size_t>({128, 256, 384, 512, 1024, 2048});
    const NVTEDType dtype = dice.OneOf<NVTEDType>({kNVTEBFloat16, kNVTEBFloat16, kNVTEFloat16, kNVTEFloat32});
    kernels.push_back({hidden, dtype, dice.OneOf<int>({1, 2, 2, 3, 4, 6, 8})});
  }
  return kernels;
}

GroupPlan DrawGroup(Dice& dice, const Kernels& kernels, const Options& options) {
  const int ranks = World::Get().size();
  GroupPlan plan = {};
  plan.kernels = kernels;
  plan.experts_per_rank = dice.OneOf<int>({4, 8, 12});
  // NCCL EP 0.1.0 aborts at other limits on one to three ranks, and TransformerEngine lets them through.
  plan.max_tokens = 4 * dice.Between(1, 24);
  plan.alignment = dice.OneOf<std::size_t>({0, 1, 2, 8, 16, 128});
  const int padding = plan.experts_per_rank * std::max(static_cast<int>(plan.alignment) - 1, 0);
  plan.capacity = ranks * plan.max_tokens * std::min(kernels.top_k, plan.experts_per_rank) + padding;
  // Which rows survive is open where their order is.
  plan.drop = !options.unordered && dice.Between(0, 4) == 0;
  if (plan.drop) plan.capacity = std::max(plan.max_tokens, plan.capacity / dice.OneOf<int>({2, 4}));
  return plan;
}

Case DrawCase(Dice& dice, const GroupPlan& plan, std::uint64_t seed) {
  Case next = {};
  next.seed = seed;
  std::vector<int> rows;
  for (int rank = 0; rank < World::Get().size(); ++rank) {
    rows.push_back(dice.Between(0, 4) == 0 ? 0 : dice.Between(0, plan.max_tokens));
  }
  const int experts = plan.experts(), top_k = plan.kernels.top_k;
  const int masked = dice.OneOf<int>({0, 0, 10, 50, 95});
  if (dice.Between(0, 2) == 0) {
    // Skewed: a window of experts that moves slowly gets everything.
    const int start = dice.Between(0, experts - 1);
    next.routing = MakeRouting(rows, top_k, [=](int rank, int row, int k) -> std::int64_t {
      if (static_cast<int>(Mix(seed, rank, row, k) % 100) < masked) return -1;
      return (start + row / 16 + k) % experts;
    });
  } else {
    next.routing = RandomRouting(rows, top_k, experts, seed, masked);
  }
  next.mxfp8 = plan.kernels.dtype == kNVTEBFloat16 && plan.kernels.hidden % 512 == 0 && dice.Between(0, 2) == 0;
  // Quantised rows belong to the forward pass, which has weights.
  next.weights = dice.Between(0, 7) != 0 || next.mxfp8;
  next.wide_indices = dice.Between(0, 2) != 0;
  next.wide_counts = dice.Between(0, 1) == 0;
  return next;
}

const char* NameOf(NVTEDType dtype) {
  return dtype == kNVTEFloat32 ? "float32" : dtype == kNVTEFloat16 ? "float16" : "bfloat16";
}

std::string Describe(const GroupPlan& plan) {
  return std::to_string(plan.experts()) + " experts, up to " + std::to_string(plan.max_tokens) + " tokens, hidden " +
         std::to_string(plan.kernels.hidden) + " " + NameOf(plan.kernels.dtype) + ", top-k " +
         std::to_string(plan.kernels.top_k) + ", alignment " + std::to_string(plan.alignment) + ", capacity " +
         std::to_string(plan.capacity) + (plan.drop ? " (drop)" : "");
}

std::string Describe(const Case& which) {
  std::string text = which.mxfp8 ? "MXFP8" : "plain";
  text += which.weights ? "" : ", no weights";
  text += which.wide_indices ? ", int64 indices" : ", int32 indices";
  text += which.wide_counts ? ", int64 counts, tokens" : ", int32 counts, tokens";
  for (const int rows : which.routing.rows) text += " " + std::to_string(rows);
  return text;
}

// Whether no rank found a difference; the lowest rank that found one says it.
bool EqualEverywhere(const std::optional<std::string>& difference, const std::string& where) {
  const int mine = difference ? World::Get().rank() : World::Get().size();
  int lowest = mine;
  MPI_Allreduce(&mine, &lowest, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (lowest == World::Get().size()) return true;
  if (lowest == World::Get().rank()) std::fprintf(stderr, "%s%s\n", where.c_str(), difference->c_str());
  return false;
}

// Runs all cases; true if every output of every case was equal on all ranks.
bool RunAll(const Options& options) {
  Library a("A", options.a), b("B", options.b);
  const bool fused = (a.prepare_and_dispatch != nullptr || options.separate_a) && b.prepare_and_dispatch != nullptr;
  const bool talks = World::Get().rank() == 0;
  if (talks) std::printf("A: %s\nB: %s\n", a.Name().c_str(), b.Name().c_str());
  const std::vector<Kernels> kernels = DrawKernels(options);
  for (int first = 0; first < options.cases; first += kCasesPerGroup) {
    Dice dice(Mix(options.seed, first));
    const GroupPlan plan = DrawGroup(dice, kernels[first / kCasesPerGroup % kernels.size()], options);
    const NVTEEpGroupConfig config = plan.Config();
    if (talks) {
      std::printf("from case %d: %s\n", first, Describe(plan).c_str());
      std::fflush(stdout);
    }
    for (const Library* library : {&a, &b}) library->initialize(library->comm(), &config);
    for (int i = first; i < std::min(first + kCasesPerGroup, options.cases); ++i) {
      const Case next = DrawCase(dice, plan, Mix(options.seed, i, 1));
      const std::string where =
          "case " + std::to_string(i) + " (seed " + std::to_string(options.seed) + "; " + Describe(next) + "): ";
      for (const bool both : {false, true}) {
        if (both && !fused) continue;
        Outputs of_a = CaseRun(a, plan, next).Run(both && !options.separate_a);
        const Outputs of_b = CaseRun(b, plan, next).Run(both);
        // Against A's prepare and dispatch: what prepare_and_dispatch puts out is what these two put out.
        if (both && options.separate_a) of_a.all.resize(of_b.all.size());
        const std::optional<std::string> difference = FirstDifference(of_a, of_b, options.unordered);
        if (!EqualEverywhere(difference, where + (both ? "prepare_and_dispatch: " : ""))) return false;
      }
    }
    for (const Library* library : {&a, &b}) library->shutdown();
  }
  if (talks) std::printf("%d cases equal\n", options.cases);
  return true;
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--unordered" || name == "--separate-a") {
      (name == "--unordered" ? options->unordered : options->separate_a) = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const char* value = argv[++i];
    if (name == "--a") {
      options->a = value;
    } else if (name == "--b") {
      options->b = value;
    } else if (name == "--cases") {
      options->cases = std::atoi(value);
    } else if (name == "--seed") {
      options->seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--shapes") {
      options->shapes = std::atoi(value);
    } else {
      return false;
    }
  }
  return !options->a.empty() && !options->b.empty() && options->cases > 0 && options->shapes > 0;
}

}  // namespace
}  // namespace test

int main(int argc, char** argv) {
  test::Options options;
  if (!test::Parse(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: %s --a PATH --b PATH [--cases N] [--seed S] [--shapes N] [--unordered] [--separate-a]\n",
                 argv[0]);
    return 2;
  }
  test::World::Start(&argc, &argv);
  bool equal = false;
  try {
    equal = test::RunAll(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", test::World::Get().rank(), error.what());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  if (!equal) {
    // The groups are up, and nobody needs them.
    std::fflush(stdout);
    MPI_Finalize();
    std::_Exit(1);
  }
  return test::World::Stop() ? 0 : 1;
}
