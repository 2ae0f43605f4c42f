#include "support/ep.h"

#include <cstdlib>
#include <exception>

namespace test {

namespace {

constexpr NVTECommWindow kNoWindow = {};

}  // namespace

int MaxSms() {
  const char* text = std::getenv("NVTE_EP_TEST_MAX_SMS");
  return text == nullptr ? 0 : std::atoi(text);
}

NVTEEpGroupConfig GroupShape::Config() const {
  const int ranks = World::Get().size();
  NVTEEpGroupConfig config = {};
  config.ep_size = ranks;
  config.num_experts = ranks * experts_per_rank;
  config.max_tokens_per_rank = max_tokens;
  // A token reaches an expert once, and every expert's slab may need alignment - 1 rows of padding.
  config.max_recv_tokens_per_rank =
      ranks * max_tokens * std::min(top_k, experts_per_rank) + experts_per_rank * std::max(alignment - 1, 0);
  config.hidden_dim = hidden;
  config.max_token_dtype = dtype;
  Complete(config, MaxSms(), allow_handle_mem_reloc);
  return config;
}

Group::Group(const NVTEEpGroupConfig& config, ncclComm_t comm) : config_(config) { Initialize(comm, config); }

void Group::Shutdown() {
  up_ = false;
  nvte_ep_shutdown();
}

Group::~Group() {
  if (!up_) return;
  try {
    nvte_ep_shutdown();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

Layer::Layer(int top_k, std::size_t alignment) : top_k_(top_k), alignment_(alignment) {
  const RegisteredLayer layer = Register(top_k, alignment);
  id_ = layer.id;
  memory_ = DeviceBuffer<std::uint8_t>(layer.bytes);
  mem_ = memory_.View({layer.bytes});
}

void DispatchArgs::Call(cudaStream_t stream) const {
  nvte_ep_dispatch(handle, topk_idx, tokens, kNoWindow, topk_weights, kNoWindow, recv_tokens, kNoWindow,
                   recv_topk_weights, kNoWindow, stream);
}

void CombineArgs::Call(cudaStream_t stream) const { nvte_ep_combine(handle, expert_out, kNoWindow, result, stream); }

void DispatchBwdArgs::Call(cudaStream_t stream) const {
  nvte_ep_dispatch_bwd(handle, grad, kNoWindow, g_recv_topk_weights, kNoWindow, grad_tokens, grad_topk_weights, stream);
}

void CombineBwdArgs::Call(cudaStream_t stream) const {
  nvte_ep_combine_bwd(handle, grad, kNoWindow, grad_expert_out, kNoWindow, stream);
}

}  // namespace test
