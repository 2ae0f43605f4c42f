// Threads and streams around one group.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ep/graph.h"
#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"
#include "support/host_stats.h"
#include "support/lanes.h"

namespace test {
namespace {

GroupShape Small() {
  GroupShape shape;
  shape.max_tokens = 8;
  shape.alignment = 8;
  return shape;
}

// Runs `body(i)` in `count` threads on this rank's device; what one throws is a failure.
void InThreads(int count, const std::function<void(int)>& body) {
  int device = 0;
  TEST_CUDA(cudaGetDevice(&device));
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        TEST_CUDA(cudaSetDevice(device));
        body(i);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < count; ++i) EXPECT_EQ(errors[i], "") << "thread " << i;
}

// Lets threads in one after the other, and tells which of them is in.
class Turn {
 public:
  explicit Turn(int threads) : threads_(threads) {}
  // Waits for the turn of thread `i`, makes the call, and passes the turn on.
  void Take(int i, const std::function<void()>& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    moved_.wait(lock, [&] { return next_ == i; });
    lock.unlock();
    busy_ = true;
    try {
      call();
    } catch (...) {
      Pass();
      throw;
    }
    Pass();
  }
  // Whether a thread is in its call.
  bool Busy() const { return busy_; }
  // Whether it is the turn of thread `i`.
  bool Next(int i) const { return next_ == i; }

 private:
  void Pass() {
    busy_ = false;
    const std::lock_guard<std::mutex> lock(mutex_);
    next_ = (next_ + 1) % threads_;
    moved_.notify_all();
  }

  const int threads_;
  std::atomic<int> next_{0};
  std::atomic<bool> busy_{false};
  std::mutex mutex_;
  std::condition_variable moved_;
};

// Four threads of a rank, each with a layer of its own, take turns call by call: all ranks make the same calls in the
// same order, and each comes from another thread than the one before. A thread that has had its turn makes calls that
// need no order, beside the call of the next one.
TEST(Threads, TakeTurnsOnOneGroup) {
  constexpr int kThreads = 4;
  Group group(Small());
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<Step<BFloat16>>> steps;
  for (int i = 0; i < kThreads; ++i) {
    layers.push_back(std::make_unique<Layer>(2, std::size_t{1} << i));
    steps.push_back(std::make_unique<Step<BFloat16>>(
        group, *layers[i], RandomRouting(UnevenRows(4 + i), 2, Experts(group), 9300 + i), 9300 + i));
    UploadInputs(*steps[i]);
  }
  World::Get().Wait();
  Turn turn(kThreads);
  const int rounds = EveryShapeIsCheap() ? 20 : 200;
  std::vector<int> overlaps(kThreads);
  InThreads(kThreads, [&](int i) {
    PrepareArgs wrong = steps[i]->prepare_args();
    wrong.topk_idx = nullptr;
    const auto take = [&](const std::function<void()>& call) {
      turn.Take(i, call);
      // Not for ever: behind the last call nobody comes.
      bool overlapped = false;
      for (int tries = 0; tries < 100 && !overlapped && !turn.Next(i); ++tries) {
        overlapped = turn.Busy();
        const testing::AssertionResult refused = Throws("nvte_ep_prepare", {"topk_idx", "null"}, [&] { wrong.Call(); });
        if (!refused) throw std::runtime_error(refused.message());
        overlaps[i] += overlapped;
      }
    };
    for (int round = 0; round < rounds; ++round) {
      take([&] { steps[i]->prepare_args().Call(); });
      take([&] { steps[i]->dispatch_args().Call(); });
      take([&] { steps[i]->combine_args().Call(); });
      take([&] { steps[i]->combine_bwd_args().Call(); });
      take([&] { steps[i]->dispatch_bwd_args().Call(); });
    }
  });
  // Told, not asked for: with fewer cores than threads it is the scheduler that decides.
  std::printf("calls beside another thread's: %d\n", std::accumulate(overlaps.begin(), overlaps.end(), 0));
  for (int i = 0; i < kThreads; ++i) {
    SCOPED_TRACE("thread " + std::to_string(i));
    CheckAll(*steps[i]);
  }
}

// Registrations, questions and refused calls need no order among ranks, and may come from any thread at any time, while
// another one runs steps.
TEST(Threads, LocalCallsBesideSteps) {
  Group group(Small());
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(8), 2, Experts(group), 9310), 9310);
  UploadInputs(step);
  World::Get().Wait();
  constexpr int kOthers = 3;
  std::atomic<bool> done{false};
  std::atomic<int> calls{0};
  std::mutex mutex;
  std::set<std::uint64_t> ids;
  std::size_t registered = 0;
  const std::size_t bytes = Register(2, 8).bytes;
  InThreads(kOthers + 1, [&](int i) {
    if (i == kOthers) {
      const int steps = EveryShapeIsCheap() ? 30 : 300;
      for (int n = 0; n < steps; ++n) EnqueueAll(step);
      done = true;
      return;
    }
    for (int n = 0; n < 200 || !done; ++n) {
      if (n < 200) {
        const RegisteredLayer other = Register(1 + n % 4, std::size_t{1} << n % 5);
        const std::lock_guard<std::mutex> lock(mutex);
        if (other.id != 0) ids.insert(other.id);
        ++registered;
      }
      NVTEEpExtMemoryUsage usage = {};
      usage.struct_size = sizeof usage;
      nvte_ep_ext_memory_usage(&usage);
      if (usage.workspace == 0) throw std::runtime_error("no workspace");
      PrepareArgs wrong = step.prepare_args();
      wrong.topk_idx = nullptr;
      const testing::AssertionResult refused = Throws("nvte_ep_prepare", {"topk_idx", "null"}, [&] { wrong.Call(); });
      if (!refused) throw std::runtime_error(refused.message());
      ++calls;
    }
  });
  EXPECT_GE(calls, 200 * kOthers);
  EXPECT_EQ(registered, 200u * kOthers);
  if (layer.id() != 0) {
    EXPECT_EQ(ids.size(), registered) << "every registration has an id of its own";
    EXPECT_EQ(ids.count(layer.id()), 0u);
  }
  EXPECT_EQ(Register(2, 8).bytes, bytes);
  CheckAll(step);
}

// One of many threads that initialize gets the group, the others are told; likewise shutdown.
TEST(Threads, ShutdownFromSeveral) {
  {
    Group group(Small());
    Layer layer(2, 8);
    Step<BFloat16>(group, layer, RandomRouting(EvenRows(3), 2, Experts(group), 9320), 9320).ForwardAndBackward();
    InThreads(4, [](int) { nvte_ep_shutdown(); });
    group.Shutdown();
  }
  Group group(Small());
  Layer layer(2, 8);
  Step<BFloat16>(group, layer, RandomRouting(EvenRows(3), 2, Experts(group), 9321), 9321).ForwardAndBackward();
}

// Streams and events that end with their test.
struct Streams {
  Streams() {
    for (int i = 0; i < 2; ++i) {
      TEST_CUDA(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
      TEST_CUDA(cudaEventCreateWithFlags(&event[i], cudaEventDisableTiming));
    }
  }
  ~Streams() {
    for (int i = 0; i < 2; ++i) {
      static_cast<void>(cudaEventDestroy(event[i]));
      static_cast<void>(cudaStreamDestroy(stream[i]));
    }
  }
  // Work queued on `to` from now on comes after all that is queued on `from`.
  void Order(int from, int to) {
    TEST_CUDA(cudaEventRecord(event[from], stream[from]));
    TEST_CUDA(cudaStreamWaitEvent(stream[to], event[from], 0));
  }
  cudaStream_t stream[2] = {};
  cudaEvent_t event[2] = {};
};

// A compute stream that fills fresh outputs with NaN, as frameworks do in their deterministic modes, and the calls on a
// stream of their own, ordered by events alone.
TEST(Streams, OutputsFilledOnTheComputeStream) {
  constexpr int kCompute = 0, kComm = 1;
  Group group(Small());
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(8), 2, Experts(group), 9400), 9400);
  UploadInputs(step);
  World::Get().Wait();
  Streams streams;
  const int iterations = EveryShapeIsCheap() ? 40 : 200;
  for (int i = 0; i < iterations; ++i) {
    const auto fill = [&](auto& buffer) {
      if (buffer.bytes() == 0) return;
      TEST_CUDA(cudaMemsetAsync(buffer.data(), kUnwritten, buffer.bytes(), streams.stream[kCompute]));
    };
    fill(step.recv_tokens);
    fill(step.recv_weights);
    fill(step.result);
    fill(step.grad_expert_out);
    fill(step.grad_tokens);
    fill(step.grad_weights);
    streams.Order(kCompute, kComm);
    EnqueueAll(step, streams.stream[kComm]);
    streams.Order(kComm, kCompute);
    if (i % 10 != 9) continue;
    SCOPED_TRACE("iteration " + std::to_string(i));
    World::Get().Wait(streams.stream[kCompute]);
    CheckAll(step);
  }
}

// What test_stress relies on: a fill on the world's stream stands between two calls, and a copy there sees what a call
// wrote, on whatever streams the calls are and however late those.
TEST(Streams, LanesOrderCallsAndTheWorldsStream) {
  Dice dice(9405);
  Lanes lanes;
  DeviceBuffer<std::uint8_t> written(64), seen(64);
  const auto late = [](cudaStream_t stream) {
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    TEST_CUDA(cudaLaunchHostFunc(stream, sleep, nullptr));
  };
  const auto fill = [&](int value, cudaStream_t stream) {
    late(stream);
    TEST_CUDA(cudaMemsetAsync(written.data(), value, written.bytes(), stream));
  };
  for (std::uint8_t i = 0; i < 60; ++i) {
    SCOPED_TRACE(+i);
    lanes.Call(dice, [&](cudaStream_t stream) { fill(100 + i, stream); });
    EXPECT_EQ(written.Download(), std::vector<std::uint8_t>(written.size(), 100 + i));
    lanes.Call(dice, [&](cudaStream_t stream) { late(stream); });
    fill(i, World::Get().stream());
    lanes.Call(dice, [&](cudaStream_t stream) {
      TEST_CUDA(cudaMemcpyAsync(seen.data(), written.data(), seen.bytes(), cudaMemcpyDeviceToDevice, stream));
    });
    EXPECT_EQ(seen.Download(), std::vector<std::uint8_t>(seen.size(), i));
  }
}

// Two micro-batches on two streams, each call ordered behind the other stream's last one.
TEST(Streams, TwoMicrobatchesOrderedByEvents) {
  Group group(Small());
  Layer layers[2] = {Layer(2, 8), Layer(2, 1)};
  std::vector<std::unique_ptr<Step<BFloat16>>> steps;
  for (int i = 0; i < 2; ++i) {
    steps.push_back(std::make_unique<Step<BFloat16>>(
        group, layers[i], RandomRouting(UnevenRows(6 + i), 2, Experts(group), 9410 + i), 9410 + i));
    UploadInputs(*steps[i]);
  }
  World::Get().Wait();
  Streams streams;
  for (int round = 0; round < 10; ++round) {
    for (int call = 0; call < 5; ++call) {
      for (int i = 0; i < 2; ++i) {
        cudaStream_t stream = streams.stream[i];
        streams.Order(1 - i, i);
        if (call == 0) steps[i]->prepare_args().Call(stream);
        if (call == 1) steps[i]->dispatch_args().Call(stream);
        if (call == 2) steps[i]->combine_args().Call(stream);
        if (call == 3) steps[i]->combine_bwd_args().Call(stream);
        if (call == 4) steps[i]->dispatch_bwd_args().Call(stream);
      }
    }
  }
  for (int i = 0; i < 2; ++i) World::Get().Wait(streams.stream[i]);
  for (auto& step : steps) CheckAll(*step);
}

// Without events the operations of two handles may overlap on the device, which the group's shared buffers do not
// allow. The library does not order streams; the host runtime reports it, at the call.
TEST(Streams, UnorderedOnesAreTold) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << "a GPU does not notice";
  Group group(Small());
  Layer first(2, 8), second(2, 8);
  Step<BFloat16> a(group, first, RandomRouting(EvenRows(5), 2, Experts(group), 9420), 9420);
  Step<BFloat16> b(group, second, RandomRouting(EvenRows(5), 2, Experts(group), 9421), 9421);
  UploadInputs(a);
  UploadInputs(b);
  a.Prepare();
  b.Prepare();
  World::Get().Wait();
  Streams streams;
  b.dispatch_args().Call(streams.stream[0]);
  // Of a kernel launch the library gets a number alone; the text is on stderr.
  const char* const what = OnNativeEngine() ? "cuLaunchKernel" : "stream-order";
  EXPECT_TRUE(Throws("nvte_ep_combine", {what}, [&] { a.combine_args().Call(streams.stream[1]); }));
  World::Get().Wait(streams.stream[0]);
  b.CheckReceived();
  // Ordered, it works.
  streams.Order(0, 1);
  a.combine_args().Call(streams.stream[1]);
  World::Get().Wait(streams.stream[1]);
  a.CheckCombined();
}

// A collective of the program's on a stream and a communicator of its own, queued before the dispatch on one half of
// the ranks and behind it on the other.
TEST(Streams, CollectiveInAnotherOrder) {
  if (!EveryShapeIsCheap() && MaxSms() != 0) {
    GTEST_SKIP() << "ranks that share a GPU have no multiprocessors for both at once";
  }
  ncclComm_t other = World::Get().MakeComm(Ranks());
  {
    Group group(Small());
    Layer layer(2, 8);
    Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(8), 2, Experts(group), 9430), 9430);
    UploadInputs(step);
    const int rank = World::Get().rank();
    DeviceBuffer<std::int32_t> mine(std::vector<std::int32_t>(64, rank + 1)), all(64 * Ranks());
    World::Get().Wait();
    Streams streams;
    const auto gather = [&] {
      TEST_NCCL(ncclAllGather(mine.data(), all.data(), 64, ncclInt32, other, streams.stream[0]));
    };
    for (int round = 0; round < 10; ++round) {
      if (rank % 2 == 0) gather();
      EnqueueAll(step, streams.stream[1]);
      if (rank % 2 != 0) gather();
    }
    World::Get().Wait(streams.stream[0]);
    World::Get().Wait(streams.stream[1]);
    CheckAll(step);
    const std::vector<std::int32_t> gathered = all.Download();
    for (std::size_t i = 0; i < gathered.size(); ++i) ASSERT_EQ(gathered[i], static_cast<std::int32_t>(i / 64 + 1));
  }
  TEST_NCCL(ncclCommDestroy(other));
}

}  // namespace
}  // namespace test
