/* C++17 over nvte-ep's C interface, of either ABI: what owns something is a class, arguments have names, and nothing costs more
   than the same calls in C. Errors are the C functions' std::runtime_error. SPDX-License-Identifier: Apache-2.0 */

#ifndef NVTE_EP_NVTE_EP_HPP_
#define NVTE_EP_NVTE_EP_HPP_

#include <nvte_ep_ext.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#if __cplusplus >= 202002L && __has_include(<span>)
#include <span>
#endif

/** 1 with the headers of the register_layer ABI, 0 with those of TransformerEngine's. */
#ifdef NVTE_EP_TRANSFORMER_ENGINE_EP_H_
#define NVTE_EP_HPP_REGISTER_LAYER 1
#else
#define NVTE_EP_HPP_REGISTER_LAYER 0
#endif

namespace nvte_ep {

/** The data type of a C++ type. For a 16-bit float's class: template <> struct nvte_ep::DTypeOf<__nv_bfloat16> {...}. */
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr NVTEDType value = kNVTEByte;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr NVTEDType value = kNVTEInt32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr NVTEDType value = kNVTEInt64;
};
template <>
struct DTypeOf<float> {
  static constexpr NVTEDType value = kNVTEFloat32;
};

using Sizes = std::initializer_list<std::size_t>;

/** A view of device memory with type and shape. It owns the view and not the memory; moved from or by default it is null. */
class Tensor {
 public:
  Tensor() = default;
  /** Memory of any kind: a CUDA pointer, a torch tensor's data_ptr(). */
  Tensor(const void* data, NVTEDType dtype, Sizes sizes) : Tensor(NVTE_DELAYED_TENSOR_SCALING) {
    set(kNVTERowwiseData, data, dtype, sizes);
  }
  template <typename T>
  Tensor(T* data, Sizes sizes) : Tensor(data, DTypeOf<std::remove_cv_t<T>>::value, sizes) {}
#if __cplusplus >= 202002L && __has_include(<span>)
  template <typename T, std::size_t N>
  explicit Tensor(std::span<T, N> values) : Tensor(values.data(), {values.size()}) {}
  /** Throws where the sizes are more than the span holds. */
  template <typename T, std::size_t N>
  Tensor(std::span<T, N> values, Sizes sizes) : Tensor(values.data(), sizes) {
    if (nvte_tensor_numel(tensor_) > values.size()) throw std::invalid_argument("nvte_ep::Tensor: the span is shorter");
  }
#endif
  /** MXFP8 rows, with a scale for each 32 values: [rows, hidden] and [rows, hidden / 32]. */
  static Tensor mxfp8(const void* data, const void* scales, std::size_t rows, std::size_t hidden,
                      NVTEDType dtype = kNVTEFloat8E4M3) {
    Tensor made(NVTE_MXFP8_1D_SCALING);
    made.set(kNVTERowwiseData, data, dtype, {rows, hidden});
    made.set(kNVTERowwiseScaleInv, scales, kNVTEFloat8E8M0, {rows, hidden / 32});
    return made;
  }

  /** Rows of float8_e4m3 with a float32 scale for each 128 values, in slabs: [slabs, rows, hidden] and [slabs, rows, hidden / 128].
      As recv_tokens of a low-latency dispatch they ask for rows that are quantized on the way. */
  static Tensor quantized(const void* data, const void* scales, std::size_t slabs, std::size_t rows, std::size_t hidden) {
    Tensor made(NVTE_BLOCK_SCALING_1D);
    made.set(kNVTERowwiseData, data, kNVTEFloat8E4M3, {slabs, rows, hidden});
    made.set(kNVTERowwiseScaleInv, scales, kNVTEFloat32, {slabs, rows, hidden / 128});
    return made;
  }

  Tensor(Tensor&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { nvte_destroy_tensor(tensor_); }

  NVTETensor get() const noexcept { return tensor_; }
  void* data() const { return nvte_tensor_data(tensor_); }
  std::size_t bytes() const { return nvte_tensor_size_bytes(tensor_); }

 private:
  explicit Tensor(NVTEScalingMode mode) : tensor_(nvte_create_tensor(mode)) {}
  void set(NVTETensorParam param, const void* data, NVTEDType dtype, Sizes sizes) {
    NVTEBasicTensor array;
    array.data_ptr = const_cast<void*>(data);
    array.dtype = dtype;
    array.shape = nvte_make_shape(sizes.begin(), sizes.size());
    nvte_set_tensor_param_v2(tensor_, param, &array, sizeof array);
  }

  NVTETensor tensor_ = nullptr;
};

/** A tensor as an argument; null by default. */
struct Argument {
  Argument() = default;
  Argument(const Tensor& tensor) : tensor(tensor.get()) {}  // NOLINT: tensors are arguments
  Argument(NVTETensor tensor) : tensor(tensor) {}           // NOLINT
  NVTETensor tensor = nullptr;
};

/** A tensor that may lie in symmetric memory, as an argument. */
struct Payload {
  Payload() = default;
  Payload(const Tensor& tensor) : tensor(tensor.get()) {}  // NOLINT
  Payload(NVTETensor tensor) : tensor(tensor) {}           // NOLINT
  Payload(const Tensor& tensor, const NVTECommWindow& window) : tensor(tensor.get()), window(window) {}
  NVTETensor tensor = nullptr;
  NVTECommWindow window = {};
};

/** The arguments of the calls of a step, as the C functions name them. */
struct Prepare {
  Argument topk_idx = {};
  /** recv_tokens_per_expert in TransformerEngine's ABI. */
  Argument token_counts = {};
#if !NVTE_EP_HPP_REGISTER_LAYER
  Argument total_recv_tokens_per_rank = {};
#endif
};
struct Dispatch {
  Argument topk_idx = {};
  Payload tokens = {};
  Payload topk_weights = {};
  Payload recv_tokens = {};
  Payload recv_topk_weights = {};
};
struct Combine {
  Payload expert_out = {};
  Argument result = {};
};
struct DispatchBwd {
  Payload grad = {};
  Payload g_recv_topk_weights = {};
  Argument grad_tokens = {};
  Argument grad_topk_weights = {};
};
struct CombineBwd {
  Payload grad = {};
  Payload grad_expert_out = {};
};

/** What a group is made of; the fields of NVTEEpGroupConfig that both ABIs have. */
struct GroupConfig {
  int ep_size = 0;
  int num_experts = 0;
  int max_tokens_per_rank = 0;
  /** Rows of the receive buffers; 0 with Options::eager. */
  int max_recv_tokens_per_rank = 0;
  int hidden_dim = 0;
  NVTEDType max_token_dtype = kNVTEBFloat16;
  /** 0 = automatic. */
  int max_num_sms = 0;
  bool zero_copy = false;
};

/** Options of a group; what is not set is the default. nvte_ep_ext_options_set says what each does. */
class Options {
 public:
  Options() : options_(nvte_ep_ext_options_create()) {}
  Options(Options&& other) noexcept : options_(std::exchange(other.options_, nullptr)) {}
  Options& operator=(Options&& other) noexcept {
    std::swap(options_, other.options_);
    return *this;
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  ~Options() { nvte_ep_ext_options_destroy(options_); }

  Options& drop_on_overflow(bool drop = true) { return set("overflow", drop ? "drop" : "trap"); }
  /** The caller sizes the receive buffers of every step; num_topk is the most experts per token of any layer. */
  Options& eager(int num_topk) { return set("eager", "on").set("num_topk", num_topk); }
  Options& num_topk(int most) { return set("num_topk", most); }
  Options& dispatch_sms(int count) { return set("dispatch_sms", count); }
  Options& combine_sms(int count) { return set("combine_sms", count); }
  Options& preprocess_sms(int count) { return set("preprocess_sms", count); }
  Options& deterministic(bool on = true) { return set("deterministic", on ? "on" : "off"); }
  Options& timeout(std::chrono::milliseconds limit) { return set("timeout_ms", limit.count()); }
  Options& shutdown_timeout(std::chrono::milliseconds limit) { return set("shutdown_timeout_ms", limit.count()); }
  Options& symm_segment_bytes(std::size_t bytes) { return set("symm_segment_bytes", bytes); }
  Options& undocumented_scale(bool on = true) { return set("undocumented_scale", on ? "on" : "off"); }
  Options& set(const char* key, const char* value) {
    nvte_ep_ext_options_set(options_, key, value);
    return *this;
  }

  std::string get(const char* key) const {
    char value[64];
    nvte_ep_ext_options_get(options_, key, value, sizeof value);
    return value;
  }
  const NVTEEpExtOptions* raw() const noexcept { return options_; }

 private:
  template <typename Number>
  Options& set(const char* key, Number value) {
    return set(key, std::to_string(value).c_str());
  }

  NVTEEpExtOptions* options_ = nullptr;
};

/** The EP group of the thread's current device, until this ends. A process that has groups on several devices ends all of them
    with the first, as nvte_ep_shutdown does. */
class Group {
 public:
  /** comm: an ncclComm_t, which outlives this. Collective. */
  Group(void* comm, const GroupConfig& config) : Group(comm, config, nullptr) {}
  Group(void* comm, const GroupConfig& config, const Options& options) : Group(comm, config, options.raw()) {}
  Group(Group&& other) noexcept : is_live_(std::exchange(other.is_live_, false)) {}
  Group& operator=(Group&&) = delete;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  /** Calls shutdown() and ignores its errors; call shutdown() yourself to see them. If an exception leaves the group's scope on
      one rank, this waits for the other ranks: until one of them makes another call, or NVTE_EP_SHUTDOWN_TIMEOUT_MS at most.
      Meanwhile a message on stderr says what was refused. */
  ~Group() {
    try {
      shutdown();
    } catch (const std::exception&) {
    }
  }

  /** Ends the group: waits for queued work and for the other ranks. */
  void shutdown() {
    if (std::exchange(is_live_, false)) nvte_ep_shutdown();
  }

  NVTEEpExtStats stats() const {
    NVTEEpExtStats stats = {};
    stats.struct_size = sizeof stats;
    nvte_ep_ext_stats(&stats);
    return stats;
  }

  NVTEEpExtMemoryUsage memory_usage() const {
    NVTEEpExtMemoryUsage usage = {};
    usage.struct_size = sizeof usage;
    nvte_ep_ext_memory_usage(&usage);
    return usage;
  }

 private:
  Group(void* comm, const GroupConfig& from, const NVTEEpExtOptions* options) {
    NVTEEpGroupConfig config = {};
    config.ep_size = from.ep_size;
    config.num_experts = from.num_experts;
    config.max_tokens_per_rank = from.max_tokens_per_rank;
    config.max_recv_tokens_per_rank = from.max_recv_tokens_per_rank;
    config.hidden_dim = from.hidden_dim;
    config.max_token_dtype = from.max_token_dtype;
    config.zero_copy = from.zero_copy;
#if NVTE_EP_HPP_REGISTER_LAYER
    config.max_num_sms = from.max_num_sms;
#else
    config.struct_size = sizeof config;
    config.num_comm_sms = from.max_num_sms;
#endif
    nvte_ep_ext_initialize(comm, &config, options);
    is_live_ = true;
  }

  bool is_live_ = false;
};

/** What a layer is made of. */
struct LayerConfig {
  int top_k = 0;
  /** Rows that each expert's slab is padded to; a power of two, 0 = none. */
  std::size_t alignment = 0;
};

/** A layer of the current device's group. */
class Layer {
 public:
  Layer(const Group&, const LayerConfig& config) : config_(config) {
    NVTEEpLayerConfig raw = {};
    raw.top_k = config.top_k;
    raw.dispatch_output_per_expert_alignment = config.alignment;
#if NVTE_EP_HPP_REGISTER_LAYER
    id_ = nvte_ep_register_layer(raw, &handle_bytes_);
#else
    raw.struct_size = sizeof raw;
    handle_bytes_ = nvte_ep_handle_mem_size(&raw);
#endif
  }

  const LayerConfig& config() const noexcept { return config_; }
  /** Device memory that a handle of the layer needs, at a multiple of 256. */
  std::size_t handle_bytes() const noexcept { return handle_bytes_; }
  /** The registered id; 0 in TransformerEngine's ABI, whose handles go by their memory. */
  std::uint64_t id() const noexcept { return id_; }

 private:
  LayerConfig config_;
  std::size_t handle_bytes_ = 0;
  std::uint64_t id_ = 0;
};

/** A layer's routing of one step, in device memory of the caller, and the calls over it. Micro-batches that are in flight at a
    time have a handle each. In the register_layer ABI each also has a registered Layer of its own. */
class Handle {
 public:
  /** memory: layer.handle_bytes() bytes. */
  Handle(const Layer& layer, void* memory)
      : config_(layer.config()), id_(layer.id()), memory_(memory, kNVTEByte, {layer.handle_bytes()}) {}

  void prepare(const Prepare& call, cudaStream_t stream) const {
#if NVTE_EP_HPP_REGISTER_LAYER
    nvte_ep_prepare(raw(), call.topk_idx.tensor, call.token_counts.tensor, config_.alignment, stream);
#else
    const NVTEEpLayerConfig layer = raw_layer();
    nvte_ep_prepare(raw(), call.topk_idx.tensor, call.token_counts.tensor, call.total_recv_tokens_per_rank.tensor, &layer,
                    stream);
#endif
  }

  void dispatch(const Dispatch& call, cudaStream_t stream) const {
    nvte_ep_dispatch(raw(), call.topk_idx.tensor, call.tokens.tensor, call.tokens.window, call.topk_weights.tensor,
                     call.topk_weights.window, call.recv_tokens.tensor, call.recv_tokens.window,
                     call.recv_topk_weights.tensor, call.recv_topk_weights.window, stream);
  }

  void combine(const Combine& call, cudaStream_t stream) const {
    nvte_ep_combine(raw(), call.expert_out.tensor, call.expert_out.window, call.result.tensor, stream);
  }

  void dispatch_bwd(const DispatchBwd& call, cudaStream_t stream) const {
    nvte_ep_dispatch_bwd(raw(), call.grad.tensor, call.grad.window, call.g_recv_topk_weights.tensor,
                         call.g_recv_topk_weights.window, call.grad_tokens.tensor, call.grad_topk_weights.tensor, stream);
  }

  void combine_bwd(const CombineBwd& call, cudaStream_t stream) const {
    nvte_ep_combine_bwd(raw(), call.grad.tensor, call.grad.window, call.grad_expert_out.tensor,
                        call.grad_expert_out.window, stream);
  }

  /** What the last prepare found; waits for the stream. */
  NVTEEpExtRecvTotals recv_totals(cudaStream_t stream) const {
    NVTEEpExtRecvTotals totals = {};
    totals.struct_size = sizeof totals;
    nvte_ep_ext_recv_totals(memory_.get(), &totals, stream);
    return totals;
  }

#if NVTE_EP_HPP_REGISTER_LAYER
  NVTEEpHandle raw() const noexcept { return {id_, memory_.get()}; }
#else
  NVTETensor raw() const noexcept { return memory_.get(); }
#endif

 private:
#if !NVTE_EP_HPP_REGISTER_LAYER
  NVTEEpLayerConfig raw_layer() const noexcept {
    NVTEEpLayerConfig layer = {};
    layer.struct_size = sizeof layer;
    layer.top_k = config_.top_k;
    layer.dispatch_output_per_expert_alignment = config_.alignment;
    return layer;
  }
#endif

  LayerConfig config_;
  std::uint64_t id_;
  Tensor memory_;
};

/** Symmetric memory of the current device's group, for payloads of zero-copy groups. Making it is collective; so is the order in
    which ranks end it. */
class SymmetricMemory {
 public:
  SymmetricMemory(const Group&, std::size_t bytes) { nvte_ep_ext_symm_alloc(bytes, &data_, &window_, &offset_); }
  SymmetricMemory(SymmetricMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), window_(other.window_), offset_(other.offset_) {}
  SymmetricMemory& operator=(SymmetricMemory&&) = delete;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;
  /** After the group's end there is nothing left to give back. */
  ~SymmetricMemory() {
    try {
      if (data_ != nullptr) nvte_ep_ext_symm_free(data_);
    } catch (const std::exception&) {
    }
  }

  void* data() const noexcept { return data_; }
  /** The window of the bytes from `at` on. */
  NVTECommWindow window(std::size_t at = 0) const noexcept {
    NVTECommWindow window = {};
    window.window = window_;
    window.offset = offset_ + at;
    return window;
  }

 private:
  void* data_ = nullptr;
  ncclWindow_t window_ = nullptr;
  std::uint64_t offset_ = 0;
};

/** What a low-latency group is made of; the same on every rank. */
struct LowLatencyConfig {
  int ep_size = 0;
  int num_experts = 0;
  int max_tokens_per_rank = 0;
  int hidden_dim = 0;
  /** Most experts per token. */
  int num_topk = 0;
  /** 0 = all that a rank has. */
  int max_num_sms = 0;
  NVTEDType max_token_dtype = kNVTEBFloat16;
};

/** Arguments of a low-latency dispatch; nvte_ep_ext.h has the shapes. */
struct LowLatencyDispatch {
  Argument topk_idx;
  Argument tokens;
  Argument recv_tokens;
  Argument counts;
};

/** Arguments of a low-latency combine. */
struct LowLatencyCombine {
  Argument topk_idx;
  Argument topk_weights;
  Argument expert_out;
  Argument result;
};

/** The low-latency group of the thread's current device, until this ends; beside a Group or without one. */
class LowLatencyGroup {
 public:
  /** comm: an ncclComm_t, which outlives this. Collective. */
  LowLatencyGroup(void* comm, const LowLatencyConfig& config) : LowLatencyGroup(comm, config, nullptr) {}
  LowLatencyGroup(void* comm, const LowLatencyConfig& config, const Options& options)
      : LowLatencyGroup(comm, config, options.raw()) {}
  LowLatencyGroup(LowLatencyGroup&& other) noexcept : is_live_(std::exchange(other.is_live_, false)) {}
  LowLatencyGroup& operator=(LowLatencyGroup&&) = delete;
  LowLatencyGroup(const LowLatencyGroup&) = delete;
  LowLatencyGroup& operator=(const LowLatencyGroup&) = delete;
  /** As shutdown(), of which errors are lost here. */
  ~LowLatencyGroup() {
    try {
      shutdown();
    } catch (const std::exception&) {
    }
  }

  /** Ends the group: waits for queued work and for the other ranks. Throws while an operation is staged, and the group stays. */
  void shutdown() {
    if (is_live_) nvte_ep_ext_ll_shutdown();
    is_live_ = false;
  }

  /** Device memory that a handle needs, at a multiple of 256. */
  std::size_t handle_bytes() const { return nvte_ep_ext_ll_handle_mem_size(); }

  NVTEEpExtLLMemoryUsage memory_usage() const {
    NVTEEpExtLLMemoryUsage usage = {};
    usage.struct_size = sizeof usage;
    nvte_ep_ext_ll_memory_usage(&usage);
    return usage;
  }

 private:
  LowLatencyGroup(void* comm, const LowLatencyConfig& from, const NVTEEpExtOptions* options) {
    NVTEEpExtLLConfig config = {};
    config.struct_size = sizeof config;
    config.ep_size = from.ep_size;
    config.num_experts = from.num_experts;
    config.max_tokens_per_rank = from.max_tokens_per_rank;
    config.hidden_dim = from.hidden_dim;
    config.num_topk = from.num_topk;
    config.max_num_sms = from.max_num_sms;
    config.max_token_dtype = from.max_token_dtype;
    nvte_ep_ext_ll_initialize(comm, &config, options);
    is_live_ = true;
  }

  bool is_live_ = false;
};

/** Who sent which row in a step of a low-latency group, in device memory of the caller, and the calls over it. */
class LowLatencyHandle {
 public:
  /** memory: group.handle_bytes() bytes. */
  LowLatencyHandle(const LowLatencyGroup& group, void* memory) : memory_(memory, kNVTEByte, {group.handle_bytes()}) {}

  void dispatch(const LowLatencyDispatch& call, cudaStream_t stream) const { dispatch(call, 0, stream); }
  void combine(const LowLatencyCombine& call, cudaStream_t stream) const { combine(call, 0, stream); }
  /** The first half; complete() is the other, on the same stream and before any other call of the group. */
  void send_dispatch(const LowLatencyDispatch& call, cudaStream_t stream) const { dispatch(call, 1, stream); }
  void send_combine(const LowLatencyCombine& call, cudaStream_t stream) const { combine(call, 1, stream); }
  void complete(cudaStream_t stream) const { nvte_ep_ext_ll_complete(memory_.get(), stream); }

 private:
  void dispatch(const LowLatencyDispatch& call, int send_only, cudaStream_t stream) const {
    nvte_ep_ext_ll_dispatch(memory_.get(), call.topk_idx.tensor, call.tokens.tensor, call.recv_tokens.tensor,
                            call.counts.tensor, send_only, stream);
  }
  void combine(const LowLatencyCombine& call, int send_only, cudaStream_t stream) const {
    nvte_ep_ext_ll_combine(memory_.get(), call.topk_idx.tensor, call.topk_weights.tensor, call.expert_out.tensor,
                           call.result.tensor, send_only, stream);
  }

  Tensor memory_;
};

}  // namespace nvte_ep

#endif  // NVTE_EP_NVTE_EP_HPP_
