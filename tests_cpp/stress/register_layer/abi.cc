// What only the register_layer ABI has, and can get wrong.

#include <string>
#include <vector>

#include "stress/stress.h"

namespace test {

void CallPrepareAndDispatch(const PrepareArgs& prepare, const DispatchArgs& dispatch, cudaStream_t stream) {
  prepare.Call(stream);
  dispatch.Call(stream);
}

Refusal DrawAbiRefusal(Dice& dice, const PrepareArgs& prepare, const DispatchArgs&, int) {
  if (dice.Percent(30)) {
    return {"nvte_ep_register_layer", "handle_mem_size", "no place for the size", [] {
              NVTEEpLayerConfig config = {};
              config.top_k = 2;
              nvte_ep_register_layer(config, nullptr);
            }};
  }
  PrepareArgs args = prepare;
  // 1 and 0 are the same.
  args.alignment = dice.OneOf<std::size_t>({args.alignment < 2 ? 2 : args.alignment * 2, 3, 48, ~std::size_t{0}});
  return {"nvte_ep_prepare", "dispatch_output_per_expert_alignment", "alignment " + std::to_string(args.alignment),
          [args] { args.Call(); }};
}

std::vector<ConfigChange> AbiConfigChanges() {
  using Config = NVTEEpGroupConfig;
  std::vector<ConfigChange> changes;
  for (const int flag : {2, -1, 1 << 30}) {
    changes.push_back(
        {"zero_copy", "zero_copy = " + std::to_string(flag), [flag](Config& config) { config.zero_copy = flag; }});
    changes.push_back({"allow_handle_mem_reloc", "allow_handle_mem_reloc = " + std::to_string(flag),
                       [flag](Config& config) { config.allow_handle_mem_reloc = flag; }});
  }
  changes.push_back({"max_recv_tokens_per_rank", "max_recv_tokens_per_rank = 0",
                     [](Config& config) { config.max_recv_tokens_per_rank = 0; }});
  return changes;
}

}  // namespace test
