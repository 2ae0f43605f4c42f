// Every nvte_ep_* function but shutdown, called with arguments that are right in themselves.

#ifndef NVTE_EP_TESTS_SUPPORT_EP_CALLS_H_
#define NVTE_EP_TESTS_SUPPORT_EP_CALLS_H_

#include <transformer_engine/ep.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "support/tensor.h"

namespace test {

// The arguments of a step of 4 tokens for a layer that nobody has registered. The calls have to be refused before they
// look at the memory, which is the host's.
class EpCalls {
 public:
  struct Call {
    std::string name;
    std::function<void()> run;
  };

  EpCalls() {
    layer_.top_k = 2;
    handle_.id = 1;
    handle_.mem = mem_.get();
    config_.ep_size = 1;
    config_.num_experts = 4;
    config_.max_tokens_per_rank = 4;
    config_.max_recv_tokens_per_rank = 8;
    config_.hidden_dim = 64;
  }

  const NVTEEpGroupConfig& config() const { return config_; }

  // The six that need a group.
  std::vector<Call> NeedingGroup() {
    return {
        {"nvte_ep_register_layer", [this] { nvte_ep_register_layer(layer_, &bytes_); }},
        {"nvte_ep_prepare", [this] { nvte_ep_prepare(handle_, topk_idx_.get(), counts_.get(), 0, nullptr); }},
        {"nvte_ep_dispatch",
         [this] {
           nvte_ep_dispatch(handle_, topk_idx_.get(), tokens_.get(), no_window_, weights_.get(), no_window_,
                            recv_tokens_.get(), no_window_, recv_weights_.get(), no_window_, nullptr);
         }},
        {"nvte_ep_combine",
         [this] { nvte_ep_combine(handle_, recv_tokens_.get(), no_window_, tokens_.get(), nullptr); }},
        {"nvte_ep_dispatch_bwd",
         [this] {
           nvte_ep_dispatch_bwd(handle_, recv_tokens_.get(), no_window_, recv_weights_.get(), no_window_, tokens_.get(),
                                weights_.get(), nullptr);
         }},
        {"nvte_ep_combine_bwd",
         [this] { nvte_ep_combine_bwd(handle_, tokens_.get(), no_window_, recv_tokens_.get(), no_window_, nullptr); }},
    };
  }

  // The same with null tensors and an all-zero handle.
  std::vector<Call> NeedingGroupWithNulls() {
    return {
        {"nvte_ep_register_layer", [] { nvte_ep_register_layer({}, nullptr); }},
        {"nvte_ep_prepare", [] { nvte_ep_prepare({}, nullptr, nullptr, 0, nullptr); }},
        {"nvte_ep_dispatch",
         [] { nvte_ep_dispatch({}, nullptr, nullptr, {}, nullptr, {}, nullptr, {}, nullptr, {}, nullptr); }},
        {"nvte_ep_combine", [] { nvte_ep_combine({}, nullptr, {}, nullptr, nullptr); }},
        {"nvte_ep_dispatch_bwd", [] { nvte_ep_dispatch_bwd({}, nullptr, {}, nullptr, {}, nullptr, nullptr, nullptr); }},
        {"nvte_ep_combine_bwd", [] { nvte_ep_combine_bwd({}, nullptr, {}, nullptr, {}, nullptr); }},
    };
  }

 private:
  alignas(256) unsigned char memory_[4096] = {};
  std::size_t bytes_ = 0;
  NVTEEpGroupConfig config_ = {};
  NVTEEpLayerConfig layer_ = {};
  NVTECommWindow no_window_ = {};
  Tensor mem_{memory_, kNVTEByte, {sizeof memory_}};
  Tensor topk_idx_{memory_, kNVTEInt64, {4, 2}};
  Tensor counts_{memory_, kNVTEInt32, {4}};
  Tensor tokens_{memory_, kNVTEBFloat16, {4, 64}};
  Tensor weights_{memory_, kNVTEFloat32, {4, 2}};
  Tensor recv_tokens_{memory_, kNVTEBFloat16, {8, 64}};
  Tensor recv_weights_{memory_, kNVTEFloat32, {8}};
  NVTEEpHandle handle_ = {};
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_EP_CALLS_H_
