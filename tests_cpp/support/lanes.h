// Streams and threads that random calls are made on.

#ifndef NVTE_EP_TESTS_SUPPORT_LANES_H_
#define NVTE_EP_TESTS_SUPPORT_LANES_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "support/dice.h"
#include "support/world.h"

namespace test {

// A host thread of the program, which makes calls when it is its turn.
class Worker {
 public:
  Worker() {
    int device = 0;
    TEST_CUDA(cudaGetDevice(&device));
    thread_ = std::thread([this, device] { Loop(device); });
  }
  ~Worker() {
    Hand(nullptr, true);
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Has the thread run `work`, and waits for it; what it throws is thrown here.
  void Run(const std::function<void()>& work) {
    Hand(&work, false);
    std::unique_lock<std::mutex> lock(mutex_);
    turn_.wait(lock, [this] { return work_ == nullptr; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void Hand(const std::function<void()>* work, bool end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    end_ = end;
    turn_.notify_all();
  }
  void Loop(int device) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      turn_.wait(lock, [this] { return work_ != nullptr || end_; });
      if (end_) return;
      try {
        TEST_CUDA(cudaSetDevice(device));
        (*work_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      work_ = nullptr;
      turn_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable turn_;
  const std::function<void()>* work_ = nullptr;
  bool end_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// Streams and threads for calls. A call comes behind all that is queued on the world's stream, and what is queued there
// later, such as fills, copies and checks, behind the call: by events alone.
class Lanes {
 public:
  Lanes() {
    streams_[0] = World::Get().stream();
    for (std::size_t i = 1; i < streams_.size(); ++i) {
      TEST_CUDA(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
    }
    TEST_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~Lanes() {
    static_cast<void>(cudaEventDestroy(event_));
    for (std::size_t i = 1; i < streams_.size(); ++i) static_cast<void>(cudaStreamDestroy(streams_[i]));
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Makes a call on some stream, from some thread.
  void Call(Dice& dice, const std::function<void(cudaStream_t)>& call) {
    const int stream = dice.Between(0, 2), thread = dice.Between(0, 4);
    Order(0, stream);
    // Work that is not ordered behind what it needs mostly comes behind it all the same, unless that is late.
    const int late = dice.Between(0, 99), late_stream = dice.OneOf<int>({0, stream});
    if (late < 10 && late % World::Get().size() == World::Get().rank()) {
      TEST_CUDA(cudaLaunchHostFunc(streams_[late_stream], TwoMilliseconds, nullptr));
    }
    const auto work = [&] { call(streams_[stream]); };
    if (thread < 2) {
      workers_[thread].Run(work);
    } else {
      work();
    }
    Order(stream, 0);
  }

 private:
  // What is queued on one stream from now on comes behind all that is queued on the other.
  void Order(int first, int second) {
    if (first == second) return;
    TEST_CUDA(cudaEventRecord(event_, streams_[first]));
    TEST_CUDA(cudaStreamWaitEvent(streams_[second], event_, 0));
  }
  static void TwoMilliseconds(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

  std::array<cudaStream_t, 3> streams_ = {};
  std::array<Worker, 2> workers_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_LANES_H_
