// What only TransformerEngine's ABI has, and can get wrong.

#include <string>
#include <vector>

#include "ep/te/te_calls.h"
#include "stress/stress.h"

namespace test {

void CallPrepareAndDispatch(const PrepareArgs& prepare, const DispatchArgs& dispatch, cudaStream_t stream) {
  PrepareAndDispatch(prepare, dispatch, stream);
}

Refusal DrawAbiRefusal(Dice& dice, const PrepareArgs& prepare, const DispatchArgs& dispatch, int experts) {
  PrepareArgs args = prepare;
  std::string names, what;
  switch (dice.Between(0, 4)) {
    case 0:
      args.alignment = dice.OneOf<std::size_t>({3, 48, std::size_t{1} << 31, ~std::size_t{0}});
      names = "dispatch_output_per_expert_alignment";
      what = "alignment " + std::to_string(args.alignment);
      break;
    case 1:
      args.top_k = dice.OneOf<int>({0, -3, 33, experts + 1, -2147483647});
      names = "top_k";
      what = "top_k " + std::to_string(args.top_k);
      break;
    case 2: {
      const std::size_t size = dice.OneOf<std::size_t>({1, 8, 23});
      return {"nvte_ep_prepare", "struct_size", "struct_size " + std::to_string(size), [args, size] {
                NVTEEpLayerConfig config = LayerConfig(args.top_k, args.alignment);
                config.struct_size = size;
                nvte_ep_prepare(args.handle, args.topk_idx, args.token_counts, args.total, &config,
                                World::Get().stream());
              }};
    }
    case 3:
      return {"nvte_ep_prepare", "layer_cfg", "no layer_cfg", [args] {
                nvte_ep_prepare(args.handle, args.topk_idx, args.token_counts, args.total, nullptr,
                                World::Get().stream());
              }};
    default: {
      DispatchArgs half = dispatch;
      half.tokens = nullptr;
      return {"nvte_ep_prepare_and_dispatch", "tokens", "no tokens for the second half",
              [args, half] { PrepareAndDispatch(args, half); }};
    }
  }
  if (dice.Percent(50)) {
    return {"nvte_ep_prepare_and_dispatch", names, what, [args, dispatch] { PrepareAndDispatch(args, dispatch); }};
  }
  return {"nvte_ep_prepare", names, what, [args] { args.Call(); }};
}

std::vector<ConfigChange> AbiConfigChanges() {
  using Config = NVTEEpGroupConfig;
  std::vector<ConfigChange> changes;
  // Whatever else is wrong, the size is looked at first.
  for (const std::size_t size : {1, 8, 39}) {
    changes.push_back({"struct_size", "struct_size = " + std::to_string(size),
                       [size](Config& config) { config.struct_size = size; }});
  }
  for (const int top_k : {-1, -2147483647}) {
    changes.push_back(
        {"num_topk", "num_topk = " + std::to_string(top_k), [top_k](Config& config) { config.num_topk = top_k; }});
  }
  changes.push_back({"num_topk", "eager mode without num_topk", [](Config& config) {
                       config.max_recv_tokens_per_rank = 0;
                       config.num_topk = 0;
                     }});
  return changes;
}

}  // namespace test
