// Several devices of one process, each with a group of its own: the ranks are threads. Host runtime only, with
// NVTE_EP_HOST_DEVICES=3.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <nvte_ep_ext.h>
#include <transformer_engine/ep.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/expect_error.h"

namespace test {
namespace {

constexpr std::size_t kRanks = 2, kTokens = 4, kHidden = 8, kExperts = 4;

// A tensor over device memory of the calling thread's device.
struct DeviceTensor {
  void* data = nullptr;
  NVTETensor tensor = nullptr;

  DeviceTensor(NVTEDType dtype, std::size_t element, const std::vector<std::size_t>& shape, const void* host) {
    std::size_t bytes = element;
    for (const std::size_t size : shape) bytes *= size;
    EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess);
    if (host != nullptr) {
      EXPECT_EQ(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    const NVTEBasicTensor basic = {data, dtype, nvte_make_shape(shape.data(), shape.size())};
    tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
    nvte_set_tensor_param_v2(tensor, kNVTERowwiseData, &basic, sizeof basic);
  }
  ~DeviceTensor() {
    nvte_destroy_tensor(tensor);
    cudaFree(data);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
};

NVTEEpLayerConfig LayerOfOne() {
  NVTEEpLayerConfig layer = {};
  layer.struct_size = sizeof layer;
  layer.top_k = 1;
  return layer;
}

float Value(std::size_t rank, std::size_t token) { return static_cast<float>(100 * rank + token); }

std::vector<std::int64_t> Experts(std::size_t rank) {
  std::vector<std::int64_t> experts(kTokens);
  for (std::size_t t = 0; t < kTokens; ++t) experts[t] = static_cast<std::int64_t>((rank + t) % kExperts);
  return experts;
}

std::vector<float> Rows(std::size_t rank) {
  std::vector<float> rows(kTokens * kHidden);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = Value(rank, i / kHidden);
  return rows;
}

// A step of one rank, on a stream of its own of the calling thread's device. Token t of rank r goes to expert (r + t) %
// 4, so every rank receives four rows, and combine gives every token back.
class Step {
 public:
  explicit Step(std::size_t rank) : topk_idx(kNVTEInt64, 8, {kTokens, 1}, Experts(rank).data()), tokens_(rank) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  ~Step() { cudaStreamDestroy(stream); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void Prepare() { nvte_ep_prepare(memory.tensor, topk_idx.tensor, nullptr, nullptr, &layer, stream); }
  void Dispatch(std::size_t rows = kTokens) {
    const DeviceTensor& tokens = rows == kTokens ? tokens_.all : tokens_.fewer;
    nvte_ep_dispatch(memory.tensor, topk_idx.tensor, tokens.tensor, {}, nullptr, {}, recv.tensor, {}, nullptr, {},
                     stream);
  }
  void Combine() { nvte_ep_combine(memory.tensor, recv.tensor, {}, sums.tensor, stream); }
  // Its rows are those that were received, so what combine makes of them.
  void DispatchBwd() {
    nvte_ep_dispatch_bwd(memory.tensor, recv.tensor, {}, nullptr, {}, sums.tensor, nullptr, stream);
  }

  std::vector<float> Received() const { return Download(recv); }
  std::vector<float> Sums() const { return Download(sums); }

  const NVTEEpLayerConfig layer = LayerOfOne();
  const DeviceTensor memory{kNVTEByte, 1, {nvte_ep_handle_mem_size(&layer)}, nullptr};
  const DeviceTensor topk_idx;
  const DeviceTensor recv{kNVTEFloat32, 4, {kRanks * kTokens, kHidden}, nullptr};
  const DeviceTensor sums{kNVTEFloat32, 4, {kTokens, kHidden}, nullptr};
  cudaStream_t stream = nullptr;

 private:
  struct Tokens {
    explicit Tokens(std::size_t rank)
        : all(kNVTEFloat32, 4, {kTokens, kHidden}, Rows(rank).data()),
          fewer(kNVTEFloat32, 4, {kTokens - 1, kHidden}, Rows(rank).data()) {}
    DeviceTensor all, fewer;
  };

  std::vector<float> Download(const DeviceTensor& rows) const {
    std::vector<float> values(kTokens * kHidden);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), rows.data, values.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

  const Tokens tokens_;
};

// What a step gives: experts 2 rank and 2 rank + 1, each with one token of either rank, by source rank; and all tokens
// back.
void Check(std::size_t rank, const std::vector<float>& received, const std::vector<float>& sums) {
  std::size_t row = 0;
  for (std::size_t expert = 2 * rank; expert < 2 * rank + 2; ++expert) {
    for (std::size_t source = 0; source < kRanks; ++source, ++row) {
      const std::size_t token = (expert + kExperts - source) % kExperts;
      EXPECT_EQ(received[row * kHidden], Value(source, token)) << "rank " << rank << ", row " << row;
    }
  }
  for (std::size_t t = 0; t < kTokens; ++t) EXPECT_EQ(sums[t * kHidden + 7], Value(rank, t)) << "rank " << rank;
}

TEST(Devices, EachHasAGroupOfItsOwn) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  ASSERT_GE(devices, 3) << "set NVTE_EP_HOST_DEVICES=3";
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<ncclComm_t> comms(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::vector<float>> received(kRanks), results(kRanks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ASSERT_EQ(cudaSetDevice(static_cast<int>(rank)), cudaSuccess);
        ASSERT_EQ(ncclCommInitRank(&comms[rank], kRanks, id, static_cast<int>(rank)), ncclSuccess);
        NVTEEpGroupConfig config = {};
        config.struct_size = sizeof config;
        config.ep_size = kRanks;
        config.num_experts = kExperts;
        config.max_tokens_per_rank = kTokens;
        config.max_recv_tokens_per_rank = kRanks * kTokens;
        config.hidden_dim = kHidden;
        config.max_token_dtype = kNVTEFloat32;
        nvte_ep_initialize(comms[rank], &config);
        Step step(rank);
        step.Prepare();
        step.Dispatch();
        step.Combine();
        received[rank] = step.Received();
        results[rank] = step.Sums();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(errors[rank], "") << "rank " << rank;
    Check(rank, received[rank], results[rank]);
  }

  // A tensor on another device, and a stream of another device.
  {
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    const std::vector<std::int64_t> experts(kTokens);
    const DeviceTensor elsewhere(kNVTEInt64, 8, {kTokens, 1}, experts.data());
    cudaStream_t foreign = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&foreign, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    const NVTEEpLayerConfig layer = LayerOfOne();
    const DeviceTensor memory(kNVTEByte, 1, {nvte_ep_handle_mem_size(&layer)}, nullptr);
    const DeviceTensor topk_idx(kNVTEInt64, 8, {kTokens, 1}, experts.data());
    EXPECT_TRUE(Throws("nvte_ep_prepare",
                       {"topk_idx must lie in memory of the group's device, 0", "memory of device 1"},
                       [&] { nvte_ep_prepare(memory.tensor, elsewhere.tensor, nullptr, nullptr, &layer, nullptr); }));
    EXPECT_TRUE(Throws("nvte_ep_prepare", {"stream must be a stream of the calling thread's current device"},
                       [&] { nvte_ep_prepare(memory.tensor, topk_idx.tensor, nullptr, nullptr, &layer, foreign); }));
    EXPECT_EQ(cudaStreamDestroy(foreign), cudaSuccess);
  }

  // A thread on a device without a group is told where there are some.
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  const NVTEEpLayerConfig layer = LayerOfOne();
  EXPECT_TRUE(Throws("nvte_ep_handle_mem_size", {"device 2", "[0, 1]"}, [&] { nvte_ep_handle_mem_size(&layer); }));
  // One call ends all of them.
  EXPECT_NO_THROW(nvte_ep_shutdown());
  for (int device = 0; device < 2; ++device) {
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_TRUE(Throws("nvte_ep_handle_mem_size", {"nvte_ep_initialize"}, [&] { nvte_ep_handle_mem_size(&layer); }));
    EXPECT_EQ(ncclCommDestroy(comms[static_cast<std::size_t>(device)]), ncclSuccess);
  }
}

// A thread and a communicator for each rank, on a device of its own, and a group over them. `body(rank)` runs in the
// rank's thread; what one throws is a failure.
class Groups {
 public:
  Groups() : comms_(kRanks) {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    InThreads([&](std::size_t rank) {
      EXPECT_EQ(ncclCommInitRank(&comms_[rank], kRanks, id, static_cast<int>(rank)), ncclSuccess);
      NVTEEpGroupConfig config = {};
      config.struct_size = sizeof config;
      config.ep_size = kRanks;
      config.num_experts = kExperts;
      config.max_tokens_per_rank = kTokens;
      config.max_recv_tokens_per_rank = kRanks * kTokens;
      config.hidden_dim = kHidden;
      config.max_token_dtype = kNVTEFloat32;
      nvte_ep_initialize(comms_[rank], &config);
    });
  }
  ~Groups() {
    EXPECT_NO_THROW(nvte_ep_shutdown());
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(cudaSetDevice(static_cast<int>(rank)), cudaSuccess);
      EXPECT_EQ(ncclCommDestroy(comms_[rank]), ncclSuccess);
    }
  }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  static void InThreads(const std::function<void(std::size_t)>& body) {
    std::vector<std::string> errors(kRanks);
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          ASSERT_EQ(cudaSetDevice(static_cast<int>(rank)), cudaSuccess);
          body(rank);
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank;
  }

 private:
  std::vector<ncclComm_t> comms_;
};

// A rank waits inside a call, for a step in which the other one, of the same process, has yet to take part.
TEST(Devices, ACallThatWaitsKeepsNobodyElseOut) {
  const Groups groups;
  Groups::InThreads([&](std::size_t rank) {
    Step step(rank);
    for (std::size_t late = 0; late < 2 * kRanks; ++late) {
      if (rank == late % kRanks) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      step.Prepare();
      NVTEEpExtRecvTotals totals = {};
      totals.struct_size = sizeof totals;
      nvte_ep_ext_recv_totals(step.memory.tensor, &totals, step.stream);
      EXPECT_EQ(totals.needed, kTokens);
    }
    ASSERT_EQ(cudaStreamSynchronize(step.stream), cudaSuccess);
  });
}

// One thread queues all of one device before it comes to the other: no call waits for what the thread has yet to queue,
// nor does a refusal for long, also where layers of several kinds have the library look into memory.
TEST(Devices, OneThreadDeviceByDevice) {
  const Groups groups;
  std::vector<std::unique_ptr<Step>> steps;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(cudaSetDevice(static_cast<int>(rank)), cudaSuccess);
    NVTEEpLayerConfig other = LayerOfOne();
    other.top_k = 2;
    EXPECT_GT(nvte_ep_handle_mem_size(&other), 0u);
    Step& step = *steps.emplace_back(std::make_unique<Step>(rank));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    step.Prepare();
    step.Dispatch();
    EXPECT_TRUE(Throws("nvte_ep_dispatch", {"tokens", "as many rows as the prepared topk_idx, 4"},
                       [&] { step.Dispatch(kTokens - 1); }));
    step.DispatchBwd();
    step.DispatchBwd();
  }
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(cudaSetDevice(static_cast<int>(rank)), cudaSuccess);
    Check(rank, steps[rank]->Received(), steps[rank]->Sums());
    steps[rank].reset();
  }
}

// Steps of both ranks, and questions from two more threads a device, all at once.
TEST(Devices, ThreadsOfAllDevicesAtOnce) {
  const Groups groups;
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (std::size_t i = 0; i < 2 * kRanks; ++i) {
    others.emplace_back([&, i] {
      ASSERT_EQ(cudaSetDevice(static_cast<int>(i % kRanks)), cudaSuccess);
      const NVTEEpLayerConfig layer = LayerOfOne();
      while (!done) {
        EXPECT_GT(nvte_ep_handle_mem_size(&layer), 0u);
        EXPECT_TRUE(
            Throws("nvte_ep_combine", {"null"}, [] { nvte_ep_combine(nullptr, nullptr, {}, nullptr, nullptr); }));
      }
    });
  }
  Groups::InThreads([&](std::size_t rank) {
    for (int i = 0; i < 50; ++i) {
      Step step(rank);
      step.Prepare();
      step.Dispatch();
      step.Combine();
      Check(rank, step.Received(), step.Sums());
    }
  });
  done = true;
  for (std::thread& other : others) other.join();
}

}  // namespace
}  // namespace test
