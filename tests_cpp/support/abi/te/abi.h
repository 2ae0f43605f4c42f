// TransformerEngine's ABI since 2.19, in the words that the tests of all ABIs share. support/abi/register_layer/abi.h
// is its counterpart; which of them a program includes is a matter of its include path.

#ifndef NVTE_EP_TESTS_SUPPORT_ABI_H_
#define NVTE_EP_TESTS_SUPPORT_ABI_H_

#include <nvte_ep_ext.h>
#include <transformer_engine/ep.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "support/options.h"
#include "support/world.h"

namespace test {

// Names in messages.
inline constexpr char kHandleMem[] = "handle_mem";
inline constexpr char kCounts[] = "recv_tokens_per_expert";
inline constexpr char kNumTopk[] = "group_config.num_topk";
inline constexpr char kOverflow[] = "group_config.drop_on_overflow";
inline constexpr char kSmLimit[] = "num_comm_sms";
inline constexpr char kLayerFunction[] = "nvte_ep_handle_mem_size";

// What names a layer's routing in the per-step calls.
using Handle = NVTETensor;

// What a group is told beyond the fields that all ABIs have; here by fields.
struct Extras {
  // More than 0: eager mode, for layers of up to so many experts per token.
  int eager_top_k = 0;
  bool drop = false;
};

// With options of the group, if any.
inline void Initialize(ncclComm_t comm, const NVTEEpGroupConfig& config, const Extras& = {},
                       const Options::Pairs& options = {}) {
  if (options.empty()) return nvte_ep_initialize(comm, &config);
  nvte_ep_ext_initialize(comm, &config, Options(options).raw());
}

// Sets the fields that only this ABI has. Here moved handle memory is always followed.
inline void Complete(NVTEEpGroupConfig& config, int sm_limit, int, const Extras& extras) {
  config.struct_size = sizeof config;
  config.num_comm_sms = sm_limit;
  config.num_topk = extras.eager_top_k;
  config.drop_on_overflow = extras.drop ? 1 : 0;
}

// Names a place for the inverse scales of a payload.
inline void SetScaleWindow(NVTECommWindow& place, ncclWindow_t window, std::uint64_t offset) {
  place.scale_window = window;
  place.scale_offset = offset;
}
inline constexpr bool kWindowsNameScales = true;

inline void SetSmLimit(NVTEEpGroupConfig& config, int sm_limit) { config.num_comm_sms = sm_limit; }

// Rows that arrive at a rank before others are dropped.
inline std::size_t DropCapacity(const NVTEEpGroupConfig& config, const Extras&) {
  return config.drop_on_overflow != 0 ? static_cast<std::size_t>(config.max_recv_tokens_per_rank)
                                      : std::numeric_limits<std::size_t>::max();
}

inline NVTEEpLayerConfig LayerConfig(int top_k, std::size_t alignment) {
  NVTEEpLayerConfig config = NVTE_EP_LAYER_CONFIG_INIT;
  config.top_k = top_k;
  config.dispatch_output_per_expert_alignment = alignment;
  return config;
}

// Layers have no ids; their handle memory's address tells them apart.
struct RegisteredLayer {
  std::uint64_t id = 0;
  std::size_t bytes = 0;
};

inline RegisteredLayer Register(int top_k, std::size_t alignment) {
  const NVTEEpLayerConfig config = LayerConfig(top_k, alignment);
  return {0, nvte_ep_handle_mem_size(&config)};
}

inline Handle MakeHandle(std::uint64_t, NVTETensor mem) { return mem; }

inline NVTETensor HandleMemory(Handle handle) { return handle; }

struct PrepareArgs {
  Handle handle;
  NVTETensor topk_idx;
  NVTETensor token_counts;
  NVTETensor total;
  int top_k;
  std::size_t alignment;

  void Call(cudaStream_t stream = World::Get().stream()) const {
    const NVTEEpLayerConfig config = LayerConfig(top_k, alignment);
    nvte_ep_prepare(handle, topk_idx, token_counts, total, &config, stream);
  }
};

inline constexpr bool kReportsTotal = true;

// Whether there is nvte_ep_prepare_and_dispatch.
inline constexpr bool kPreparesAndDispatches = true;

inline PrepareArgs MakePrepareArgs(Handle handle, NVTETensor topk_idx, NVTETensor token_counts, NVTETensor total,
                                   int top_k, std::size_t alignment) {
  return {handle, topk_idx, token_counts, total, top_k, alignment};
}

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_ABI_H_
