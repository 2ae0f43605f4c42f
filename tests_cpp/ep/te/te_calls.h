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
inline void PrepareAndDispatch(const PrepareArgs& prepare, const DispatchArgs& dispatch,
                               cudaStream_t stream = World::Get().stream()) {
  const NVTEEpLayerConfig config = LayerConfig(prepare.top_k, prepare.alignment);
  nvte_ep_prepare_and_dispatch(prepare.handle, prepare.topk_idx, dispatch.tokens, dispatch.tokens_win,
                               dispatch.topk_weights, dispatch.topk_weights_win, dispatch.recv_tokens,
                               dispatch.recv_tokens_win, dispatch.recv_topk_weights, dispatch.recv_topk_weights_win,
                               prepare.token_counts, prepare.total, &config, stream);
}

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_TE_TE_CALLS_H_
