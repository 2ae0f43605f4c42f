// One MoE step written against TransformerEngine's own headers and nothing of ours: the source of a program that uses
// TransformerEngine, and the same binary whichever library serves it.
//
//   mpirun -n 2 test_te_source [NAME]
//
// NAME is what nvte_ep_ext_version has to start with, "none" if no library in the process may have that function.

#include <dlfcn.h>
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "support/number.h"
#include "support/reference.h"
#include "support/world.h"

namespace {

using test::BFloat16;
using test::Slot;
using test::World;
using transformer_engine::DType;
using transformer_engine::TensorWrapper;

constexpr int kTopK = 2;
constexpr int kLocalExperts = 4;
constexpr int kMaxTokens = 32;
constexpr int kHidden = 512;
constexpr std::size_t kAlignment = 16;
constexpr std::uint64_t kSeed = 7;

int failures = 0;

void Check(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::fprintf(stderr, "[rank %d] wrong: %s\n", World::Get().rank(), what.c_str());
}

template <typename T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Device memory of `count` elements, every byte 0xff until it is written.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) {
    void* data = nullptr;
    TEST_CUDA(cudaMalloc(&data, count * sizeof(T) + 256));
    data_ = static_cast<T*>(data);
    TEST_CUDA(cudaMemsetAsync(data_, 0xff, count * sizeof(T) + 256, World::Get().stream()));
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) { Set(values); }
  ~Array() { static_cast<void>(cudaFree(data_)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return data_; }
  void Set(const std::vector<T>& values) {
    TEST_CUDA(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice,
                              World::Get().stream()));
    World::Get().Wait();
  }
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    TEST_CUDA(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, World::Get().stream()));
    World::Get().Wait();
    return values;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

// What an expert does to a value: a factor of its own, and the token's weight for it.
float Factor(int expert) { return 1.0f + 0.25f * static_cast<float>(expert % 5); }

float Round(float value) { return test::Rounded<BFloat16>(value); }

float Token(int rank, int row, int column) { return test::TokenValue(kSeed, rank, row, column); }
float Weight(int rank, int row, int k) { return test::WeightValue(kSeed, rank, row, k); }
float Gradient(int rank, int row, int column) { return test::TokenValue(kSeed + 1, rank, row, column); }
std::uint8_t Byte(int what, int rank, int row, int column) {
  return static_cast<std::uint8_t>(test::Mix(kSeed + 2 + what, rank, row, column));
}

float Output(int expert, float token, float weight) { return Round(Factor(expert) * token * weight); }
float TokenGradient(int expert, float gradient, float weight) { return Round(Factor(expert) * weight * gradient); }

class Step {
 public:
  Step()
      : rank_(World::Get().rank()),
        ranks_(World::Get().size()),
        experts_(ranks_ * kLocalExperts),
        capacity_(ranks_ * kMaxTokens * kTopK + kLocalExperts * (kAlignment - 1)),
        reference_(Routing(), experts_, kAlignment),
        rows_(reference_.routing().rows[rank_]),
        slots_(reference_.Slots(rank_)) {}

  void Run() {
    NVTEEpGroupConfig group = NVTE_EP_GROUP_CONFIG_INIT;
    group.ep_size = ranks_;
    group.num_experts = experts_;
    group.max_tokens_per_rank = kMaxTokens;
    group.max_recv_tokens_per_rank = static_cast<int>(capacity_);
    group.hidden_dim = kHidden;
    group.max_token_dtype = kNVTEBFloat16;
    const char* sms = std::getenv("NVTE_EP_TEST_MAX_SMS");
    if (sms != nullptr) group.num_comm_sms = std::atoi(sms);
    nvte_ep_initialize(World::Get().comm(), &group);
    Train();
    DispatchMxfp8();
    nvte_ep_shutdown();
  }

 private:
  test::Routing Routing() const {
    std::vector<int> rows;
    for (int rank = 0; rank < ranks_; ++rank) rows.push_back(kMaxTokens - 5 * rank);
    return test::RandomRouting(rows, kTopK, experts_, kSeed, 10);
  }

  int Global(const Slot& slot) const { return rank_ * kLocalExperts + slot.local_expert; }

  // A receive-side buffer of one value a (slot, column).
  template <typename T, typename Value>
  std::vector<T> Slots(std::size_t width, T padding, Value value) const {
    std::vector<T> rows(capacity_ * width);
    std::memset(static_cast<void*>(rows.data()), 0xff, rows.size() * sizeof(T));
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      for (std::size_t column = 0; column < width; ++column) {
        rows[s * width + column] = slots_[s].padding() ? padding : value(slots_[s], static_cast<int>(column));
      }
    }
    return rows;
  }

  // A source-side buffer of one value a (row, column).
  template <typename T, typename Value>
  std::vector<T> Rows(std::size_t width, Value value) const {
    std::vector<T> rows(rows_ * width);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = value(static_cast<int>(i / width), static_cast<int>(i % width));
    }
    return rows;
  }

  static BFloat16 Narrow(float value) { return test::Narrow<BFloat16>(value); }

  // Forward and backward through y = sum over k of weight * expert(token).
  void Train() {
    cudaStream_t stream = World::Get().stream();
    const NVTECommWindow none = {};
    NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
    layer.top_k = kTopK;
    layer.dispatch_output_per_expert_alignment = kAlignment;
    const std::size_t bytes = nvte_ep_handle_mem_size(&layer);
    const std::size_t rows = rows_, hidden = kHidden, top_k = kTopK, local = kLocalExperts;

    Array<std::uint8_t> memory(bytes);
    Array<std::int64_t> experts(reference_.routing().expert[rank_]), counts(local), total(1);
    Array<BFloat16> tokens(
        Rows<BFloat16>(hidden, [&](int row, int column) { return Narrow(Token(rank_, row, column)); }));
    Array<float> weights(Rows<float>(top_k, [&](int row, int k) { return Weight(rank_, row, k); }));
    Array<BFloat16> recv(capacity_ * hidden), result(rows * hidden);
    Array<float> recv_weights(capacity_);

    TensorWrapper memory_t(memory.data(), std::vector<size_t>{bytes}, DType::kByte);
    TensorWrapper experts_t(experts.data(), std::vector<size_t>{rows, top_k}, DType::kInt64);
    TensorWrapper counts_t(counts.data(), std::vector<size_t>{local}, DType::kInt64);
    TensorWrapper total_t(total.data(), std::vector<size_t>{1}, DType::kInt64);
    TensorWrapper tokens_t(tokens.data(), std::vector<size_t>{rows, hidden}, DType::kBFloat16);
    TensorWrapper weights_t(weights.data(), std::vector<size_t>{rows, top_k}, DType::kFloat32);
    TensorWrapper recv_t(recv.data(), std::vector<size_t>{capacity_, hidden}, DType::kBFloat16);
    TensorWrapper recv_weights_t(recv_weights.data(), std::vector<size_t>{capacity_}, DType::kFloat32);
    TensorWrapper result_t(result.data(), std::vector<size_t>{rows, hidden}, DType::kBFloat16);

    nvte_ep_prepare(memory_t.data(), experts_t.data(), counts_t.data(), total_t.data(), &layer, stream);
    nvte_ep_dispatch(memory_t.data(), experts_t.data(), tokens_t.data(), none, weights_t.data(), none, recv_t.data(),
                     none, recv_weights_t.data(), none, stream);
    Check(Same(counts.Get(), reference_.Counts(rank_)), "counts");
    Check(Same(total.Get(), std::vector<std::int64_t>(1, reference_.Total(rank_))), "total");
    const std::vector<BFloat16> got = recv.Get();
    const std::vector<float> got_weights = recv_weights.Get();
    Check(Same(got, Slots<BFloat16>(
                        hidden, Narrow(0.0f),
                        [](const Slot& slot, int column) { return Narrow(Token(slot.rank, slot.row, column)); })),
          "received rows");
    Check(Same(got_weights,
               Slots<float>(1, 0.0f, [](const Slot& slot, int) { return Weight(slot.rank, slot.row, slot.k); })),
          "received weights");

    // The experts, on what was received.
    std::size_t slot_of = 0;
    const auto received = [&](int column) { return test::Widen(got[slot_of * hidden + column]); };
    std::vector<BFloat16> out(capacity_ * hidden);
    for (slot_of = 0; slot_of < slots_.size(); ++slot_of) {
      if (slots_[slot_of].padding()) continue;
      for (int column = 0; column < kHidden; ++column) {
        out[slot_of * hidden + column] =
            Narrow(Output(Global(slots_[slot_of]), received(column), got_weights[slot_of]));
      }
    }
    recv.Set(out);
    nvte_ep_combine(memory_t.data(), recv_t.data(), none, result_t.data(), stream);
    Check(Same(result.Get(), Rows<BFloat16>(hidden,
                                            [&](int row, int column) {
                                              return Narrow(reference_.Combined(
                                                  rank_, row, column,
                                                  [](int destination, const Slot& slot, int at) {
                                                    return Output(destination * kLocalExperts + slot.local_expert,
                                                                  Token(slot.rank, slot.row, at),
                                                                  Weight(slot.rank, slot.row, slot.k));
                                                  },
                                                  &Round));
                                            })),
          "result");

    // Backward: the gradient of the result, at every slot; through the experts; and back.
    Array<BFloat16> grad(
        Rows<BFloat16>(hidden, [&](int row, int column) { return Narrow(Gradient(rank_, row, column)); }));
    Array<BFloat16> grad_slots(capacity_ * hidden), grad_tokens(rows * hidden);
    Array<float> grad_recv_weights(capacity_), grad_weights(rows * top_k);
    TensorWrapper grad_t(grad.data(), std::vector<size_t>{rows, hidden}, DType::kBFloat16);
    TensorWrapper grad_slots_t(grad_slots.data(), std::vector<size_t>{capacity_, hidden}, DType::kBFloat16);
    TensorWrapper grad_tokens_t(grad_tokens.data(), std::vector<size_t>{rows, hidden}, DType::kBFloat16);
    TensorWrapper grad_recv_weights_t(grad_recv_weights.data(), std::vector<size_t>{capacity_}, DType::kFloat32);
    TensorWrapper grad_weights_t(grad_weights.data(), std::vector<size_t>{rows, top_k}, DType::kFloat32);
    nvte_ep_combine_bwd(memory_t.data(), grad_t.data(), none, grad_slots_t.data(), none, stream);
    const std::vector<BFloat16> at_slots = grad_slots.Get();
    Check(Same(at_slots, Slots<BFloat16>(hidden, Narrow(0.0f),
                                         [](const Slot& slot, int column) {
                                           return Narrow(Gradient(slot.rank, slot.row, column));
                                         })),
          "gradient of the expert output");
    std::vector<BFloat16> through(capacity_ * hidden);
    std::vector<float> of_weights(capacity_);
    for (slot_of = 0; slot_of < slots_.size(); ++slot_of) {
      const Slot& slot = slots_[slot_of];
      if (slot.padding()) continue;
      for (int column = 0; column < kHidden; ++column) {
        const float gradient = test::Widen(at_slots[slot_of * hidden + column]);
        through[slot_of * hidden + column] = Narrow(TokenGradient(Global(slot), gradient, got_weights[slot_of]));
        of_weights[slot_of] += Factor(Global(slot)) * received(column) * gradient;
      }
    }
    grad_slots.Set(through);
    grad_recv_weights.Set(of_weights);
    nvte_ep_dispatch_bwd(memory_t.data(), grad_slots_t.data(), none, grad_recv_weights_t.data(), none,
                         grad_tokens_t.data(), grad_weights_t.data(), stream);
    Check(Same(grad_tokens.Get(), Rows<BFloat16>(hidden,
                                                 [&](int row, int column) {
                                                   return Narrow(reference_.Combined(
                                                       rank_, row, column,
                                                       [](int destination, const Slot& slot, int at) {
                                                         return TokenGradient(
                                                             destination * kLocalExperts + slot.local_expert,
                                                             Gradient(slot.rank, slot.row, at),
                                                             Weight(slot.rank, slot.row, slot.k));
                                                       },
                                                       &Round));
                                                 })),
          "gradient of the tokens");
    Check(Same(grad_weights.Get(),
               Rows<float>(top_k,
                           [&](int row, int k) {
                             return reference_.WeightGradient(rank_, row, k, [](int destination, const Slot& slot) {
                               const int expert = destination * kLocalExperts + slot.local_expert;
                               float sum = 0.0f;
                               for (int column = 0; column < kHidden; ++column) {
                                 sum += Factor(expert) * Token(slot.rank, slot.row, column) *
                                        Gradient(slot.rank, slot.row, column);
                               }
                               return sum;
                             });
                           })),
          "gradient of the weights");
  }

  // A dispatch of MXFP8 rows with their scales.
  void DispatchMxfp8() {
    cudaStream_t stream = World::Get().stream();
    const NVTECommWindow none = {};
    NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
    layer.top_k = kTopK;
    layer.dispatch_output_per_expert_alignment = kAlignment;
    const std::size_t bytes = nvte_ep_handle_mem_size(&layer);
    const std::size_t rows = rows_, hidden = kHidden, scales = kHidden / 32, top_k = kTopK;

    Array<std::uint8_t> memory(bytes);
    Array<std::int64_t> experts(reference_.routing().expert[rank_]);
    Array<std::uint8_t> tokens(
        Rows<std::uint8_t>(hidden, [&](int row, int column) { return Byte(0, rank_, row, column); }));
    Array<std::uint8_t> token_scales(
        Rows<std::uint8_t>(scales, [&](int row, int column) { return Byte(1, rank_, row, column); }));
    Array<float> weights(Rows<float>(top_k, [&](int row, int k) { return Weight(rank_, row, k); }));
    Array<std::uint8_t> recv(capacity_ * hidden), recv_scales(capacity_ * scales);
    Array<float> recv_weights(capacity_);

    TensorWrapper memory_t(memory.data(), std::vector<size_t>{bytes}, DType::kByte);
    TensorWrapper experts_t(experts.data(), std::vector<size_t>{rows, top_k}, DType::kInt64);
    TensorWrapper weights_t(weights.data(), std::vector<size_t>{rows, top_k}, DType::kFloat32);
    TensorWrapper recv_weights_t(recv_weights.data(), std::vector<size_t>{capacity_}, DType::kFloat32);
    TensorWrapper tokens_t(NVTE_MXFP8_1D_SCALING), recv_t(NVTE_MXFP8_1D_SCALING);
    tokens_t.set_rowwise_data(tokens.data(), DType::kFloat8E4M3, std::vector<size_t>{rows, hidden});
    tokens_t.set_rowwise_scale_inv(token_scales.data(), DType::kFloat8E8M0, std::vector<size_t>{rows, scales});
    recv_t.set_rowwise_data(recv.data(), DType::kFloat8E4M3, std::vector<size_t>{capacity_, hidden});
    recv_t.set_rowwise_scale_inv(recv_scales.data(), DType::kFloat8E8M0, std::vector<size_t>{capacity_, scales});

    nvte_ep_prepare(memory_t.data(), experts_t.data(), nullptr, nullptr, &layer, stream);
    nvte_ep_dispatch(memory_t.data(), experts_t.data(), tokens_t.data(), none, weights_t.data(), none, recv_t.data(),
                     none, recv_weights_t.data(), none, stream);
    const auto sent = [](int what) {
      return [what](const Slot& slot, int column) { return Byte(what, slot.rank, slot.row, column); };
    };
    Check(Same(recv.Get(), Slots<std::uint8_t>(hidden, 0, sent(0))), "received MXFP8 rows");
    Check(Same(recv_scales.Get(), Slots<std::uint8_t>(scales, 0, sent(1))), "received MXFP8 scales");
  }

  const int rank_;
  const int ranks_;
  const int experts_;
  const std::size_t capacity_;
  const test::Reference reference_;
  const std::size_t rows_;
  const std::vector<Slot>& slots_;
};

// The file that a function of this process comes from.
std::string Origin(const char* function) {
  Dl_info info;
  void* const address = dlsym(RTLD_DEFAULT, function);
  if (address == nullptr || dladdr(address, &info) == 0) return "nowhere";
  return info.dli_fname;
}

std::string Server() {
  const auto version = reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "nvte_ep_ext_version"));
  return version == nullptr ? "none" : version();
}

}  // namespace

int main(int argc, char** argv) {
  World::Start(&argc, &argv);
  const std::string server = Server();
  if (World::Get().rank() == 0) {
    std::printf("nvte_ep_ext_version: %s\nnvte_ep_dispatch from %s\nnvte_create_tensor from %s\n", server.c_str(),
                Origin("nvte_ep_dispatch").c_str(), Origin("nvte_create_tensor").c_str());
  }
  if (argc > 1) Check((server + " ").rfind(std::string(argv[1]) + " ", 0) == 0, "served by " + server);
  Check(Origin("nvte_create_tensor").find("libtransformer_engine.so") != std::string::npos, "whose tensors these are");
  try {
    Step().Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", World::Get().rank(), error.what());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  int all = failures;
  MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (World::Get().rank() == 0 && all == 0) std::printf("all outputs exact\n");
  return World::Stop() && all == 0 ? 0 : 1;
}
