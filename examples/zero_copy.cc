// A zero-copy group: peers write rows straight into this rank's receive buffer, which lies in symmetric memory, and
// read the experts' output there.
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
  config.zero_copy = true;
  nvte_ep::Group group(comm, config);
  const nvte_ep::Layer layer(group, {static_cast<int>(p.K), 0});
  const Device<std::uint8_t> memory(layer.handle_bytes());
  const nvte_ep::Handle handle(layer, memory.data());

  // Every rank asks for the same bytes, once, when it sets up.
  const nvte_ep::SymmetricMemory received(group, p.C * p.H * sizeof(float));
  const Device<std::int64_t> experts(p.experts());
  const Device<float> tokens(p.rows()), sums(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in(tokens.data(), {p.T, p.H}), out(sums.data(), {p.T, p.H});
  const nvte_ep::Tensor recv(static_cast<float*>(received.data()), {p.C, p.H});

  handle.prepare({topk_idx, counts}, stream);
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = in;
  dispatch.recv_tokens = {recv, received.window()};
  handle.dispatch(dispatch, stream);
  handle.combine({{recv, received.window()}, out}, stream);
  stream.wait();
  return wrong(sums.get(), p.rows(), 2);
}

}  // namespace

int main() { return run(step); }
