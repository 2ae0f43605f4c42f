// A pipeline schedule, one forward, one backward (1F1B): two micro-batches are in flight at a time. Each has a handle
// and memory of its own from its forward to its backward; a handle that is prepared again too early would give the
// first one's gradients the second one's routing.
#include <nvte_ep.hpp>

#include "common.h"

namespace {

constexpr std::size_t kInFlight = 2, kMicroBatches = 4;

// What a micro-batch keeps until its backward.
struct Slot {
  Slot(const nvte_ep::Group& group, const Problem& p)
      : layer(group, {static_cast<int>(p.K), 0}),
        memory(layer.handle_bytes()),
        handle(layer, memory.data()),
        experts(p.experts()),
        tokens(p.T * p.H),
        received(p.C * p.H),
        sums(p.T * p.H),
        gradients(p.T * p.H),
        token_gradients(p.T * p.H),
        slabs(p.L) {}

  nvte_ep::Layer layer;
  Device<std::uint8_t> memory;
  nvte_ep::Handle handle;
  Device<std::int64_t> experts;
  Device<float> tokens, received, sums, gradients, token_gradients;
  Device<std::int32_t> slabs;
};

// The experts of a micro-batch's tokens.
std::vector<std::int64_t> routing(const Problem& p, std::size_t batch) {
  std::vector<std::int64_t> all = p.experts();
  for (std::int64_t& expert : all) {
    expert = (expert + static_cast<std::int64_t>(batch)) % static_cast<std::int64_t>(p.E);
  }
  return all;
}

// Expert e multiplies by e + 1, on the host, since an example has no kernels; its gradient does the same.
void experts(const Problem& p, Slot& slot, const Stream& stream) {
  stream.wait();
  std::vector<float> rows = slot.received.get();
  const std::vector<std::int32_t> counts = slot.slabs.get();
  std::size_t at = 0;
  for (std::size_t local = 0; local < p.L; ++local) {
    for (const std::size_t end = at + static_cast<std::size_t>(counts[local]) * p.H; at < end; ++at) {
      rows[at] *= static_cast<float>(p.rank * p.L + local + 1);
    }
  }
  slot.received.set(rows);
}

// What a token's row, or its gradient, has become.
std::vector<float> expected(const Problem& p, std::vector<float> rows, std::size_t batch) {
  const std::vector<std::int64_t> chosen = routing(p, batch);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float factor = 0;
    for (std::size_t k = 0; k < p.K; ++k) factor += static_cast<float>(chosen[i / p.H * p.K + k] + 1);
    rows[i] *= factor;
  }
  return rows;
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
  config.max_token_dtype = kNVTEFloat32;
  nvte_ep::Group group(comm, config);
  Slot first(group, p), second(group, p);
  // With one slot for all of them, the gradients would be wrong, and no call would say so.
  const auto slot_of = [&](std::size_t batch) -> Slot& { return batch % kInFlight == 0 ? first : second; };
  int count = 0;

  const auto forward = [&](std::size_t batch) {
    Slot& slot = slot_of(batch);
    slot.experts.set(routing(p, batch));
    slot.tokens.set(p.rows(batch));
    const nvte_ep::Tensor topk_idx(slot.experts.data(), {p.T, p.K}), counts(slot.slabs.data(), {p.L});
    const nvte_ep::Tensor in(slot.tokens.data(), {p.T, p.H}), out(slot.sums.data(), {p.T, p.H});
    const nvte_ep::Tensor recv(slot.received.data(), {p.C, p.H});
    slot.handle.prepare({topk_idx, counts}, stream);
    nvte_ep::Dispatch dispatch;
    dispatch.topk_idx = topk_idx;
    dispatch.tokens = in;
    dispatch.recv_tokens = recv;
    slot.handle.dispatch(dispatch, stream);
    experts(p, slot, stream);
    slot.handle.combine({recv, out}, stream);
    stream.wait();
    count += wrong(slot.sums.get(), expected(p, p.rows(batch), batch), 1);
  };
  const auto backward = [&](std::size_t batch) {
    Slot& slot = slot_of(batch);
    slot.gradients.set(p.rows(10 + batch));
    const nvte_ep::Tensor grad(slot.gradients.data(), {p.T, p.H}), rows(slot.received.data(), {p.C, p.H});
    const nvte_ep::Tensor grad_tokens(slot.token_gradients.data(), {p.T, p.H});
    slot.handle.combine_bwd({grad, rows}, stream);
    experts(p, slot, stream);
    nvte_ep::DispatchBwd dispatch_bwd;
    dispatch_bwd.grad = rows;
    dispatch_bwd.grad_tokens = grad_tokens;
    slot.handle.dispatch_bwd(dispatch_bwd, stream);
    stream.wait();
    count += wrong(slot.token_gradients.get(), expected(p, p.rows(10 + batch), batch), 1);
  };

  for (std::size_t batch = 0; batch < kInFlight; ++batch) forward(batch);
  for (std::size_t batch = 0; batch < kMicroBatches; ++batch) {
    backward(batch);
    if (batch + kInFlight < kMicroBatches) forward(batch + kInFlight);
  }
  return count;
}

}  // namespace

int main() { return run(step); }
