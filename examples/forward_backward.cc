// A step forward and backward. Every code is checked, and all that is made is released.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

int step(const Place& place) {
  const Problem p(place);
  const Communicator comm(place);
  const Stream stream;
  // What a model has: the router's choices, tokens, gradients, and memory for what comes back.
  const Device<std::int64_t> experts(p.experts());
  const Device<std::int32_t> slabs(p.L);
  const Device<float> weights(p.weights()), rows(p.rows()), received(p.C * p.H), received_weights(p.C), sums(p.T * p.H);
  const Device<float> gradients(p.rows(1)), row_gradients(p.C * p.H), token_gradients(p.T * p.H),
      weight_gradients(p.T * p.K);
  // [step]
  nvte_ep::GroupConfig config;
  config.ep_size = place.size;  // ranks, each with E / ep_size experts
  config.num_experts = int(p.E);
  config.max_tokens_per_rank = int(p.T);
  config.max_recv_tokens_per_rank = int(p.C);  // C = ep_size * T * K rows hold any routing
  config.hidden_dim = int(p.H);
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep::Group group(comm, config);  // comm: an ncclComm_t
  const nvte_ep::Layer layer(group, {int(p.K)});
  const Device<std::uint8_t> memory(layer.handle_bytes());
  const nvte_ep::Handle handle(layer, memory.data());

  // Views of device memory: a pointer and a shape.
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), topk_weights(weights.data(), {p.T, p.K});
  const nvte_ep::Tensor tokens(rows.data(), {p.T, p.H}), result(sums.data(), {p.T, p.H}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor recv_tokens(received.data(), {p.C, p.H}), recv_weights(received_weights.data(), {p.C});
  handle.prepare({topk_idx, counts}, stream);
  handle.dispatch({topk_idx, tokens, topk_weights, recv_tokens, recv_weights}, stream);
  // Here the experts work, each on its slab of recv_tokens, counts[e] rows long, and multiply by recv_weights.
  handle.combine({recv_tokens, result}, stream);

  const nvte_ep::Tensor grad_result(gradients.data(), {p.T, p.H}), grad_rows(row_gradients.data(), {p.C, p.H});
  const nvte_ep::Tensor grad_tokens(token_gradients.data(), {p.T, p.H}),
      grad_weights(weight_gradients.data(), {p.T, p.K});
  handle.combine_bwd({grad_result, grad_rows}, stream);
  // Here the experts' gradients; these experts pass rows through, and the weights' gradients are the weights.
  handle.dispatch_bwd({grad_rows, recv_weights, grad_tokens, grad_weights}, stream);
  stream.wait();
  // [step]

  const int count = wrong(sums.get(), p.rows(), 2) + wrong(token_gradients.get(), p.rows(1), 2) +
                    wrong(weight_gradients.get(), p.weights(), 1);
  group.shutdown();
  return count;
}

}  // namespace

int main() { return run(step); }
