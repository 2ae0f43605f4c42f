// MXFP8 rows: bytes and the scale of each 32 of them move together. What the experts give back is bfloat16 or wider.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

// The byte at `column` of a token's row, and of its scales.
std::uint8_t value(std::size_t rank, std::size_t token, std::size_t column) {
  return static_cast<std::uint8_t>((rank * 64 + token * 8 + column) % 120);
}

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
  config.max_token_dtype = kNVTEBFloat16;  // a row of bytes with its scales has to fit
  nvte_ep::Group group(comm, config);
  const nvte_ep::Layer layer(group, {static_cast<int>(p.K), 0});
  const Device<std::uint8_t> memory(layer.handle_bytes());
  const nvte_ep::Handle handle(layer, memory.data());

  const std::size_t S = p.H / 32;  // scales of a row
  std::vector<std::uint8_t> bytes(p.T * p.H), exponents(p.T * S);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(p.rank, i / p.H, i % p.H);
  for (std::size_t i = 0; i < exponents.size(); ++i) exponents[i] = value(p.rank, i / S, i % S);
  const Device<std::uint8_t> rows(bytes), scales(exponents), received(p.C * p.H), received_scales(p.C * S);
  const Device<std::int64_t> experts(p.experts());
  const Device<std::int32_t> slabs(p.L);
  const nvte_ep::Tensor topk_idx(experts.data(), {p.T, p.K}), counts(slabs.data(), {p.L});
  const nvte_ep::Tensor in = nvte_ep::Tensor::mxfp8(rows.data(), scales.data(), p.T, p.H);
  const nvte_ep::Tensor recv = nvte_ep::Tensor::mxfp8(received.data(), received_scales.data(), p.C, p.H);

  handle.prepare({topk_idx, counts}, stream);
  nvte_ep::Dispatch dispatch;
  dispatch.topk_idx = topk_idx;
  dispatch.tokens = in;
  dispatch.recv_tokens = recv;
  handle.dispatch(dispatch, stream);
  stream.wait();

  // A slab's rows come by source rank and then by source row.
  const std::vector<std::uint8_t> got = received.get(), got_scales = received_scales.get();
  int count = 0;
  std::size_t row = 0;
  for (std::size_t local = 0; local < p.L; ++local) {
    for (std::size_t rank = 0; rank < p.ranks; ++rank) {
      for (std::size_t token = 0; token < p.T; ++token) {
        for (std::size_t k = 0; k < p.K; ++k) {
          if (p.expert(rank, token, k) != p.rank * p.L + local) continue;
          for (std::size_t i = 0; i < p.H; ++i) count += got[row * p.H + i] != value(rank, token, i);
          for (std::size_t i = 0; i < S; ++i) count += got_scales[row * S + i] != value(rank, token, i);
          ++row;
        }
      }
    }
  }
  return count + (row == 0);
}

}  // namespace

int main() { return run(step); }
