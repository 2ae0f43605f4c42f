// A step in a CUDA graph: captured once, then replayed over other tokens and another routing in the same memory.
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

  Device<std::int64_t> experts(p.experts());
  Device<float> tokens(p.rows());
  const Device<float> received(p.C * p.H), sums(p.T * p.H);
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in(tokens.data(), {p.T, p.H}), out(sums.data(), {p.T, p.H});
  const nvte_ep::Tensor recv(received.data(), {p.C, p.H});
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = in;
  dispatch.recv_tokens = recv;
  const auto queue = [&] {
    handle.prepare({topk_idx, counts}, stream);
    handle.dispatch(dispatch, stream);
    handle.combine({recv, out}, stream);
  };

  queue();  // Once without a graph: kernels are compiled at the first step of a shape.
  stream.wait();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  queue();
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));

  int count = 0;
  for (std::size_t round = 1; round <= 3; ++round) {
    std::vector<std::int64_t> routing = p.experts();
    for (std::int64_t& expert : routing) {
      expert = (expert + static_cast<std::int64_t>(round)) % static_cast<std::int64_t>(p.E);
    }
    experts.set(routing);
    tokens.set(p.rows(round));
    check_cuda(cudaGraphLaunch(replay, stream));
    stream.wait();
    count += wrong(sums.get(), p.rows(round), 2);
  }
  check_cuda(cudaGraphExecDestroy(replay));
  check_cuda(cudaGraphDestroy(graph));
  return count;
}

}  // namespace

int main() { return run(step); }
