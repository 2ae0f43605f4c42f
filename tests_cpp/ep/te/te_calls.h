// What only TransformerEngine's ABI has, for the tests of it.

#ifndef NVTE_EP_TESTS_EP_TE_TE_CALLS_H_
#define NVTE_EP_TESTS_EP_TE_TE_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"

namespace test {

// nvte_ep_prepare_and_dispatch with the arguments of both.
inline void PrepareAndDispatch(const PrepareArgs& prepare, const DispatchArgs& dispatch) {
  const NVTECommWindow none = {};
  const NVTEEpLayerConfig config = LayerConfig(prepare.top_k, prepare.alignment);
  nvte_ep_prepare_and_dispatch(prepare.handle, prepare.topk_idx, dispatch.tokens, none, dispatch.topk_weights, none,
                               dispatch.recv_tokens, none, dispatch.recv_topk_weights, none, prepare.token_counts,
                               prepare.total, &config, World::Get().stream());
}

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_TE_TE_CALLS_H_
