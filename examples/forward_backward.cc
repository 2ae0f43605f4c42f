// A step forward and backward. Every code is checked, and all that is made is released.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

int step(const Place& place) {
  const Problem p(place);
  const Communicator comm(place);
  const Stream stream;
  nvte_ep::GroupConfig config;
  config.ep_size = place.size;
  config.num_experts = static_cast<int>(p.E);
  config.max_tokens_per_rank = static_cast<int>(p.T);
  config.max_recv_tokens_per_rank = static_cast<int>(p.C);
  config.hidden_dim = static_cast<int>(p.H);
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep::Group group(comm, config);
  const nvte_ep::Layer layer(group, {static_cast<int>(p.K), 0});
  const Device<std::uint8_t> memory(layer.handle_bytes());
  const nvte_ep::Handle handle(layer, memory.data());

  const Device<std::int64_t> experts(p.experts());
  const Device<float> weights(p.weights()), tokens(p.rows()), received(p.C * p.H), received_weights(p.C),
      sums(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in(tokens.data(), {p.T, p.H}), topk_weights(weights.data(), {p.T, p.K});
  const nvte_ep::Tensor recv(received.data(), {p.C, p.H}), recv_weights(received_weights.data(), {p.C});
  const nvte_ep::Tensor out(sums.data(), {p.T, p.H});

  handle.prepare({topk_idx, counts}, stream);
  handle.dispatch({topk_idx, in, topk_weights, recv, recv_weights}, stream);
  // Here the experts work, each on its slab of recv, counts[e] rows long.
  handle.combine({recv, out}, stream);

  // The gradient of the result goes to all rows of a token, and back through dispatch.
  const Device<float> gradients(p.rows(1)), row_gradients(p.C * p.H), token_gradients(p.T * p.H),
      weight_gradients(p.T * p.K);
  const nvte_ep::Tensor grad(gradients.data(), {p.T, p.H}), grad_rows(row_gradients.data(), {p.C, p.H});
  const nvte_ep::Tensor grad_tokens(token_gradients.data(), {p.T, p.H}),
      grad_weights(weight_gradients.data(), {p.T, p.K});
  handle.combine_bwd({grad, grad_rows}, stream);
  // The gradient of the received weights is what the experts make; here the weights themselves.
  handle.dispatch_bwd({grad_rows, recv_weights, grad_tokens, grad_weights}, stream);
  stream.wait();

  const int count = wrong(sums.get(), p.rows(), 2) + wrong(token_gradients.get(), p.rows(1), 2) +
                    wrong(weight_gradients.get(), p.weights(), 1);
  group.shutdown();
  return count;
}

}  // namespace

int main() { return run(step); }
