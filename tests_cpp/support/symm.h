// Symmetric memory of the library, and a step whose payloads lie in it.

#ifndef NVTE_EP_TESTS_SUPPORT_SYMM_H_
#define NVTE_EP_TESTS_SUPPORT_SYMM_H_

#include <nvte_ep_ext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "support/ep.h"

namespace test {

inline NVTECommWindow MakeWindow(ncclWindow_t window, std::uint64_t offset) {
  NVTECommWindow place = {};
  place.window = window;
  place.offset = offset;
  return place;
}

inline void CopyOnDevice(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  TEST_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, World::Get().stream()));
  World::Get().Wait();
}

// The group's memory.
inline NVTEEpExtMemoryUsage Usage() {
  NVTEEpExtMemoryUsage usage = {};
  usage.struct_size = sizeof usage;
  nvte_ep_ext_memory_usage(&usage);
  return usage;
}

// One allocation. Collective, as is the order in which they end.
class SymmBuffer {
 public:
  explicit SymmBuffer(std::size_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    nvte_ep_ext_symm_alloc(bytes, &data, &window_, &offset_);
    data_ = static_cast<std::uint8_t*>(data);
  }
  ~SymmBuffer() {
    if (data_ == nullptr) return;
    try {
      nvte_ep_ext_symm_free(data_);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  SymmBuffer(const SymmBuffer&) = delete;
  SymmBuffer& operator=(const SymmBuffer&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  ncclWindow_t window() const { return window_; }
  std::uint64_t offset() const { return offset_; }
  NVTECommWindow At(std::uint64_t further) const { return MakeWindow(window_, offset_ + further); }
  // The group is gone, and with it the memory.
  void Forget() { data_ = nullptr; }

 private:
  std::size_t bytes_;
  std::uint8_t* data_ = nullptr;
  ncclWindow_t window_ = nullptr;
  std::uint64_t offset_ = 0;
};

enum Payload : unsigned {
  kTokens = 1,
  kWeights = 2,
  kRecvTokens = 4,
  kRecvWeights = 8,
  kExpertOut = 16,
  kSlotGrad = 32,
  kSlotGradWeights = 64,
  kGrad = 128,
  kGradExpertOut = 256,
  kAllPayloads = 511,
  // What zero-copy groups need.
  kExchanged = kRecvTokens | kExpertOut | kSlotGrad | kGradExpertOut,
};

// How a PlacedStep makes its calls, unless it is told otherwise.
struct Plainly {
  template <typename Args>
  void operator()(const Args& args) const {
    args.Call();
  }
};

// A step with some of its payloads in symmetric memory, all in one allocation, at offsets of odd multiples of 16 bytes.
// The step's own buffers keep the inputs and get the outputs, so its checks hold as they are.
template <typename T>
class PlacedStep {
 public:
  // with_address: tensors have their data pointers beside the windows.
  PlacedStep(Step<T>& step, unsigned payloads, bool with_address, std::size_t lead = 0)
      : step_(step), with_address_(with_address), next_(lead) {
    Place(kTokens, payloads, step.tokens, {step.rows(), step.hidden()});
    Place(kWeights, payloads, step.weights, {step.rows(), step.top_k()});
    Place(kRecvTokens, payloads, step.recv_tokens, {step.recv_rows(), step.hidden()});
    Place(kRecvWeights, payloads, step.recv_weights, {step.recv_rows()});
    Place(kExpertOut, payloads, step.expert_out, {step.recv_rows(), step.hidden()});
    Place(kSlotGrad, payloads, step.slot_grad, {step.recv_rows(), step.hidden()});
    Place(kSlotGradWeights, payloads, step.g_recv_weights, {step.recv_rows()});
    Place(kGrad, payloads, step.grad, {step.rows(), step.hidden()});
    Place(kGradExpertOut, payloads, step.grad_expert_out, {step.recv_rows(), step.hidden()});
    memory_ = std::make_unique<SymmBuffer>(std::max<std::size_t>(next_, 16));
    for (Item& item : items_) {
      void* data = with_address_ ? memory_->data() + item.offset : nullptr;
      item.tensor = Tensor(data, item.dtype, item.shape);
    }
  }

  DispatchArgs dispatch_args() {
    DispatchArgs args = step_.dispatch_args();
    Use(kTokens, &args.tokens, &args.tokens_win);
    Use(kWeights, &args.topk_weights, &args.topk_weights_win);
    Use(kRecvTokens, &args.recv_tokens, &args.recv_tokens_win);
    Use(kRecvWeights, &args.recv_topk_weights, &args.recv_topk_weights_win);
    return args;
  }
  CombineArgs combine_args() {
    CombineArgs args = step_.combine_args();
    Use(kExpertOut, &args.expert_out, &args.expert_out_win);
    return args;
  }
  DispatchBwdArgs dispatch_bwd_args() {
    DispatchBwdArgs args = step_.dispatch_bwd_args();
    Use(kSlotGrad, &args.grad, &args.grad_win);
    Use(kSlotGradWeights, &args.g_recv_topk_weights, &args.g_recv_topk_weights_win);
    return args;
  }
  CombineBwdArgs combine_bwd_args() {
    CombineBwdArgs args = step_.combine_bwd_args();
    Use(kGrad, &args.grad, &args.grad_win);
    Use(kGradExpertOut, &args.grad_expert_out, &args.grad_expert_out_win);
    return args;
  }

  // `call` is given the arguments, and makes the call now or has captured it before.
  template <typename Call = Plainly>
  void Dispatch(const Call& call = {}) {
    for (const Payload payload : {kTokens, kWeights, kRecvTokens, kRecvWeights}) In(payload);
    call(dispatch_args());
    for (const Payload payload : {kRecvTokens, kRecvWeights}) Out(payload);
    // Zero-copy kernels clear weights behind the slabs.
    ForgetTail(step_.recv_weights, 1);
  }
  template <typename Call = Plainly>
  void Combine(const Call& call = {}) {
    CombineValues(step_.ExpertOutput(), call);
  }
  template <typename Call = Plainly>
  void CombineValues(const std::vector<T>& values, const Call& call = {}) {
    step_.expert_out.Upload(values);
    In(kExpertOut);
    if (Find(kExpertOut) != nullptr) step_.expert_out.Clear();
    call(combine_args());
    // What combine made of its input.
    Out(kExpertOut);
  }
  template <typename Call = Plainly>
  void DispatchBwd(const Call& call = {}) {
    step_.UploadSlotGradients();
    CallDispatchBwd(call);
  }
  void DispatchBwdValues(const std::vector<T>& rows, const std::vector<float>& weights) {
    step_.slot_grad.Upload(rows);
    step_.g_recv_weights.Upload(weights);
    CallDispatchBwd(Plainly());
  }
  template <typename Call = Plainly>
  void CombineBwd(const Call& call = {}) {
    In(kGrad);
    In(kGradExpertOut);
    call(combine_bwd_args());
    Out(kGradExpertOut);
  }

  void ForwardAndBackward() {
    step_.Prepare();
    step_.CheckCounts();
    Dispatch();
    step_.CheckReceived();
    Combine();
    step_.CheckCombined();
    CombineBwd();
    step_.CheckCombineBwd();
    DispatchBwd();
    step_.CheckDispatchBwd();
  }

 private:
  template <typename Call>
  void CallDispatchBwd(const Call& call) {
    In(kSlotGrad);
    In(kSlotGradWeights);
    call(dispatch_bwd_args());
  }

  struct Item {
    Payload payload;
    void* own;
    std::size_t bytes;
    NVTEDType dtype;
    std::vector<std::size_t> shape;
    std::size_t offset;
    Tensor tensor;
  };

  template <typename U>
  void Place(Payload payload, unsigned payloads, const DeviceBuffer<U>& own, const std::vector<std::size_t>& shape) {
    if ((payloads & payload) == 0) return;
    items_.push_back({payload, own.data(), own.bytes(), DTypeOf<U>(), shape, next_, Tensor()});
    // Ranks have different numbers of tokens, and offsets have to be the same on all of them.
    const std::vector<int>& rows = step_.reference().routing().rows;
    const bool by_token = (payload & (kTokens | kWeights | kGrad)) != 0;
    const std::size_t most = by_token ? *std::max_element(rows.begin(), rows.end()) : step_.recv_rows();
    const std::size_t bytes = most * (shape.size() == 2 ? shape[1] : 1) * sizeof(U);
    next_ += (bytes + 31) / 32 * 32 + 16;
  }
  Item* Find(Payload payload) {
    for (Item& item : items_) {
      if (item.payload == payload) return &item;
    }
    return nullptr;
  }
  void Use(Payload payload, NVTETensor* tensor, NVTECommWindow* window) {
    const Item* item = Find(payload);
    if (item == nullptr) return;
    *tensor = item->tensor.get();
    *window = memory_->At(item->offset);
  }
  void In(Payload payload) {
    const Item* item = Find(payload);
    if (item != nullptr) CopyOnDevice(memory_->data() + item->offset, item->own, item->bytes);
  }
  void Out(Payload payload) {
    const Item* item = Find(payload);
    if (item != nullptr) CopyOnDevice(item->own, memory_->data() + item->offset, item->bytes);
  }
  template <typename U>
  void ForgetTail(DeviceBuffer<U>& buffer, std::size_t width) {
    std::vector<U> values = buffer.Download();
    const std::size_t used = step_.slots().size() * width;
    const std::vector<U> tail = Unwritten<U>(values.size() - used);
    std::copy(tail.begin(), tail.end(), values.begin() + used);
    buffer.Upload(values);
  }

  Step<T>& step_;
  const bool with_address_;
  std::size_t next_;
  std::vector<Item> items_;
  std::unique_ptr<SymmBuffer> memory_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_SYMM_H_
