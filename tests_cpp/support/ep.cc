#include "support/ep.h"

#include <cstdlib>
#include <exception>

namespace test {

int MaxSms() {
  const char* text = std::getenv("NVTE_EP_TEST_MAX_SMS");
  return text == nullptr ? 0 : std::atoi(text);
}

bool OnNativeEngine() {
  static const bool native = [] {
    NVTEEpExtMemoryUsage usage = {};
    usage.struct_size = sizeof usage;
    try {
      nvte_ep_ext_memory_usage(&usage);
    } catch (const std::exception&) {
      const Group group{GroupShape()};
      nvte_ep_ext_memory_usage(&usage);
    }
    return usage.engine == 2;
  }();
  return native;
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
  if (eager) config.max_recv_tokens_per_rank = 0;
  if (drop_capacity > 0) config.max_recv_tokens_per_rank = drop_capacity;
  config.hidden_dim = hidden;
  config.max_token_dtype = dtype;
  config.zero_copy = zero_copy ? 1 : 0;
  Complete(config, MaxSms(), allow_handle_mem_reloc, extras());
  return config;
}

Group::Group(const NVTEEpGroupConfig& config, ncclComm_t comm, const Extras& extras, const Options::Pairs& options)
    : config_(config), extras_(extras) {
  Initialize(comm, config, extras, options);
}

Group::Group(const NVTEEpGroupConfig& config, const Options& options) : config_(config) {
  nvte_ep_ext_initialize(World::Get().comm(), &config, options.raw());
}

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
  nvte_ep_dispatch(handle, topk_idx, tokens, tokens_win, topk_weights, topk_weights_win, recv_tokens, recv_tokens_win,
                   recv_topk_weights, recv_topk_weights_win, stream);
}

void CombineArgs::Call(cudaStream_t stream) const {
  nvte_ep_combine(handle, expert_out, expert_out_win, result, stream);
}

void DispatchBwdArgs::Call(cudaStream_t stream) const {
  nvte_ep_dispatch_bwd(handle, grad, grad_win, g_recv_topk_weights, g_recv_topk_weights_win, grad_tokens,
                       grad_topk_weights, stream);
}

void CombineBwdArgs::Call(cudaStream_t stream) const {
  nvte_ep_combine_bwd(handle, grad, grad_win, grad_expert_out, grad_expert_out_win, stream);
}

}  // namespace test
