// TransformerEngine's ABI: a program of its users, which compiles with its headers or with ours (include/nvte_ep/te)
// and runs with libtransformer_engine.so, its or ours.
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

#include "common.h"

namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Sizes = std::vector<std::size_t>;

int step(const Place& place) {
  const Problem p(place);
  const Communicator comm(place);
  const Stream stream;
  NVTEEpGroupConfig config = NVTE_EP_GROUP_CONFIG_INIT;
  config.ep_size = place.size;
  config.num_experts = static_cast<int>(p.E);
  config.max_tokens_per_rank = static_cast<int>(p.T);
  config.max_recv_tokens_per_rank = static_cast<int>(p.C);
  config.hidden_dim = static_cast<int>(p.H);
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep_initialize(static_cast<ncclComm_t>(comm), &config);
  NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
  layer.top_k = static_cast<int>(p.K);
  const std::size_t bytes = nvte_ep_handle_mem_size(&layer);

  const Device<std::uint8_t> memory(bytes);
  const Device<std::int64_t> experts(p.experts()), slabs(p.L), rows(1);
  const Device<float> weights(p.weights()), tokens(p.rows()), received(p.C * p.H), received_weights(p.C),
      sums(p.T * p.H);
  const TensorWrapper handle_mem(memory.data(), Sizes{bytes}, DType::kByte);
  const TensorWrapper topk_idx(experts.data(), Sizes{p.T, p.K}, DType::kInt64);
  const TensorWrapper counts(slabs.data(), Sizes{p.L}, DType::kInt64), total(rows.data(), Sizes{1}, DType::kInt64);
  const TensorWrapper in(tokens.data(), Sizes{p.T, p.H}, DType::kFloat32);
  const TensorWrapper topk_weights(weights.data(), Sizes{p.T, p.K}, DType::kFloat32);
  const TensorWrapper recv(received.data(), Sizes{p.C, p.H}, DType::kFloat32);
  const TensorWrapper recv_weights(received_weights.data(), Sizes{p.C}, DType::kFloat32);
  const TensorWrapper out(sums.data(), Sizes{p.T, p.H}, DType::kFloat32);

  const NVTECommWindow none = {};
  nvte_ep_prepare_and_dispatch(handle_mem.data(), topk_idx.data(), in.data(), none, topk_weights.data(), none,
                               recv.data(), none, recv_weights.data(), none, counts.data(), total.data(), &layer,
                               stream);
  nvte_ep_combine(handle_mem.data(), recv.data(), none, out.data(), stream);
  stream.wait();
  const int count = wrong(sums.get(), p.rows(), 2) + (rows.get()[0] != static_cast<std::int64_t>(p.T * p.K));
  nvte_ep_shutdown();
  return count;
}

}  // namespace

int main() { return run(step); }
