// Activation recomputation: the received rows are not kept for the backward but dispatched again. The handle keeps the
// routing, so no other prepare is needed; to prepare again with the same routing is right as well.
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
  const Device<float> tokens(p.rows()), sums(p.T * p.H), gradients(p.rows(1)), token_gradients(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in(tokens.data(), {p.T, p.H}), out(sums.data(), {p.T, p.H});
  const nvte_ep::Tensor grad(gradients.data(), {p.T, p.H}), grad_tokens(token_gradients.data(), {p.T, p.H});
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = in;

  std::vector<float> before;
  {
    const Device<float> received(p.C * p.H);  // ends with the forward
    const nvte_ep::Tensor recv(received.data(), {p.C, p.H});
    handle.prepare({topk_idx, counts}, stream);
    dispatch.recv_tokens = recv;
    handle.dispatch(dispatch, stream);
    handle.combine({recv, out}, stream);
    stream.wait();
    before = received.get();
  }

  const Device<float> received(p.C * p.H), row_gradients(p.C * p.H);
  const nvte_ep::Tensor recv(received.data(), {p.C, p.H}), grad_rows(row_gradients.data(), {p.C, p.H});
  dispatch.recv_tokens = recv;
  handle.dispatch(dispatch, stream);  // the experts' inputs once more
  handle.combine_bwd({grad, grad_rows}, stream);
  nvte_ep::DispatchBwd dispatch_bwd;
  dispatch_bwd.grad = grad_rows;
  dispatch_bwd.grad_tokens = grad_tokens;
  handle.dispatch_bwd(dispatch_bwd, stream);
  stream.wait();
  std::vector<float> after = received.get();
  before.resize(p.T * p.K * p.H);  // the rows that this even routing fills
  after.resize(before.size());
  return wrong(after, before, 1) + wrong(sums.get(), p.rows(), 2) + wrong(token_gradients.get(), p.rows(1), 2);
}

}  // namespace

int main() { return run(step); }
