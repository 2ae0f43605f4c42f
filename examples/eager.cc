// Eager mode: the receive buffers have as many rows as the step needs. That takes one wait for the device a step.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

int step(const Place& place) {
  const Problem p(place);
  const Communicator comm(place);
  const Stream stream;
  nvte_ep::Options options;
  options.eager(static_cast<int>(p.K));
  nvte_ep::GroupConfig config;
  config.ep_size = place.size;
  config.num_experts = static_cast<int>(p.E);
  config.max_tokens_per_rank = static_cast<int>(p.T);
  config.max_recv_tokens_per_rank = 0;
  config.hidden_dim = static_cast<int>(p.H);
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep::Group group(comm, config, options);
  const nvte_ep::Layer layer(group, {static_cast<int>(p.K), 0});
  const Device<std::uint8_t> memory(layer.handle_bytes());
  const nvte_ep::Handle handle(layer, memory.data());

  const Device<std::int64_t> experts(p.experts());
  const Device<float> tokens(p.rows()), sums(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in(tokens.data(), {p.T, p.H}), out(sums.data(), {p.T, p.H});

  handle.prepare({topk_idx, counts}, stream);
  const std::size_t rows = handle.recv_totals(stream).needed;  // waits
  const Device<float> received(rows * p.H);
  const nvte_ep::Tensor recv(received.data(), {rows, p.H});
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = in;
  dispatch.recv_tokens = recv;
  handle.dispatch(dispatch, stream);
  handle.combine({recv, out}, stream);
  stream.wait();
  // Every rank's tokens are spread evenly here.
  return wrong(sums.get(), p.rows(), 2) + (rows != p.T * p.K);
}

}  // namespace

int main() { return run(step); }
