// The register_layer ABI, in the words that the tests of all ABIs share. support/abi/te/abi.h is its counterpart; which
// of them a program includes is a matter of its include path.

#ifndef NVTE_EP_TESTS_SUPPORT_ABI_H_
#define NVTE_EP_TESTS_SUPPORT_ABI_H_

#include <nvte_ep_ext.h>
#include <transformer_engine/ep.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "support/options.h"
#include "support/world.h"

namespace test {

// Names in messages.
inline constexpr char kHandleMem[] = "handle.mem";
inline constexpr char kCounts[] = "token_counts";
inline constexpr char kNumTopk[] = "option num_topk";
inline constexpr char kOverflow[] = "option overflow";
inline constexpr char kSmLimit[] = "max_num_sms";
inline constexpr char kLayerFunction[] = "nvte_ep_register_layer";

// What names a layer's routing in the per-step calls.
using Handle = NVTEEpHandle;

// What a group is told beyond the fields that all ABIs have; here through options.
struct Extras {
  // More than 0: eager mode, for layers of up to so many experts per token.
  int eager_top_k = 0;
  bool drop = false;
};

// With options of the group, if any.
inline void Initialize(ncclComm_t comm, const NVTEEpGroupConfig& config, const Extras& extras = {},
                       Options::Pairs options = {}) {
  const std::string top_k = std::to_string(extras.eager_top_k);
  if (extras.drop) options.push_back({"overflow", "drop"});
  if (extras.eager_top_k > 0) {
    options.push_back({"eager", "on"});
    options.push_back({"num_topk", top_k.c_str()});
  }
  if (options.empty()) return nvte_ep_initialize(comm, config);
  nvte_ep_ext_initialize(comm, &config, Options(options).raw());
}

// Sets the fields that only this ABI has.
inline void Complete(NVTEEpGroupConfig& config, int sm_limit, int allow_handle_mem_reloc, const Extras&) {
  config.max_num_sms = sm_limit;
  config.allow_handle_mem_reloc = allow_handle_mem_reloc;
}

// Names a place for the inverse scales of a payload; this ABI's windows have none, and look for them by their address.
inline void SetScaleWindow(NVTECommWindow&, ncclWindow_t, std::uint64_t) {}
inline constexpr bool kWindowsNameScales = false;

inline void SetSmLimit(NVTEEpGroupConfig& config, int sm_limit) { config.max_num_sms = sm_limit; }

// Rows that arrive at a rank before others are dropped.
inline std::size_t DropCapacity(const NVTEEpGroupConfig& config, const Extras& extras) {
  return extras.drop ? static_cast<std::size_t>(config.max_recv_tokens_per_rank)
                     : std::numeric_limits<std::size_t>::max();
}

struct RegisteredLayer {
  std::uint64_t id = 0;
  std::size_t bytes = 0;
};

inline RegisteredLayer Register(int top_k, std::size_t alignment) {
  NVTEEpLayerConfig config = {};
  config.top_k = top_k;
  config.dispatch_output_per_expert_alignment = alignment;
  RegisteredLayer layer;
  layer.id = nvte_ep_register_layer(config, &layer.bytes);
  return layer;
}

inline Handle MakeHandle(std::uint64_t id, NVTETensor mem) {
  NVTEEpHandle handle = {};
  handle.id = id;
  handle.mem = mem;
  return handle;
}

inline NVTETensor HandleMemory(const Handle& handle) { return handle.mem; }

struct PrepareArgs {
  Handle handle;
  NVTETensor topk_idx;
  NVTETensor token_counts;
  std::size_t alignment;

  void Call(cudaStream_t stream = World::Get().stream()) const {
    nvte_ep_prepare(handle, topk_idx, token_counts, alignment, stream);
  }
};

// This ABI has no total.
inline constexpr bool kReportsTotal = false;

// Whether there is nvte_ep_prepare_and_dispatch.
inline constexpr bool kPreparesAndDispatches = false;

inline PrepareArgs MakePrepareArgs(const Handle& handle, NVTETensor topk_idx, NVTETensor token_counts, NVTETensor, int,
                                   std::size_t alignment) {
  return {handle, topk_idx, token_counts, alignment};
}

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_ABI_H_
