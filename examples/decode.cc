// Serving: prefill in the high-throughput group, then decode steps of few tokens in the low-latency group beside it, as
// one graph that is replayed with each step's own tokens and experts.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

// A prompt's tokens, by the calls of the other examples; the experts pass rows through.
int prefill(const Problem& p, const Communicator& comm, const Stream& stream) {
  nvte_ep::GroupConfig config;
  config.ep_size = static_cast<int>(p.ranks);
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
  const Device<float> rows(p.rows()), received(p.C * p.H), sums(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), tokens(rows.data(), {p.T, p.H}),
      counts(slabs.data(), {p.L});
  const nvte_ep::Tensor recv_tokens(received.data(), {p.C, p.H}), result(sums.data(), {p.T, p.H});
  handle.prepare({topk_idx, counts}, stream);
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = tokens;
  dispatch.recv_tokens = recv_tokens;
  handle.dispatch(dispatch, stream);
  handle.combine({recv_tokens, result}, stream);
  stream.wait();
  return wrong(sums.get(), p.rows(), 2);
}

int step(const Place& place) {
  const Problem p(place);
  const Communicator comm(place);
  const Stream stream;
  nvte_ep::LowLatencyConfig config;
  config.ep_size = place.size;
  config.num_experts = static_cast<int>(p.E);
  config.max_tokens_per_rank = static_cast<int>(p.T);
  config.hidden_dim = static_cast<int>(p.H);
  config.num_topk = static_cast<int>(p.K);
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep::LowLatencyGroup group(comm, config);
  const Device<std::uint8_t> memory(group.handle_bytes());
  const nvte_ep::LowLatencyHandle handle(group, memory.data());

  int count = prefill(p, comm, stream);

  // Each local expert has a slab with a row for every token of every rank.
  const std::size_t S = p.ranks * p.T;
  Device<std::int64_t> experts(p.experts());
  const Device<float> weights(p.weights());
  Device<float> rows(p.rows());
  const Device<float> slabs(p.L * S * p.H), sums(p.T * p.H);
  const Device<std::int32_t> slab_counts(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), topk_weights(weights.data(), {p.T, p.K});
  const nvte_ep::Tensor tokens(rows.data(), {p.T, p.H}), result(sums.data(), {p.T, p.H});
  const nvte_ep::Tensor recv_tokens(slabs.data(), {p.L, S, p.H}), counts(slab_counts.data(), {p.L});
  const auto decode = [&] {
    handle.send_dispatch({topk_idx, tokens, recv_tokens, counts}, stream);
    // Here work that needs no expert, such as a shared one, hides the way of the rows.
    handle.complete(stream);
    // Here the experts work, each on the first counts[e] rows of its slab; these pass rows through.
    handle.combine({topk_idx, topk_weights, recv_tokens, result}, stream);
  };
  // The weights of a token are 0.25 and 0.5.
  const auto check = [&](std::size_t seed) {
    stream.wait();
    count += wrong(sums.get(), p.rows(seed), 0.75f);
  };
  decode();
  check(0);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  decode();
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));
  for (std::size_t token = 1; token <= 3; ++token) {
    std::vector<std::int64_t> routed = p.experts();
    for (std::int64_t& expert : routed) {
      expert = (expert + static_cast<std::int64_t>(token)) % static_cast<std::int64_t>(p.E);
    }
    experts.set(routed);
    rows.set(p.rows(token));
    check_cuda(cudaGraphLaunch(replay, stream));
    check(token);
  }
  check_cuda(cudaGraphExecDestroy(replay));
  check_cuda(cudaGraphDestroy(graph));
  return count;
}

}  // namespace

int main() { return run(step); }
