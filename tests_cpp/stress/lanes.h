// Streams and threads that random calls are made on.

#ifndef NVTE_EP_TESTS_STRESS_LANES_H_
#define NVTE_EP_TESTS_STRESS_LANES_H_

#include <array>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "stress/stress.h"
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

// Streams and threads for calls. Whatever is taken next is ordered behind what was taken before, by an event.
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

  // Copies and checks use the world's stream.
  void Home() { Switch(0); }
  // Makes a call on some stream, from some thread.
  void Call(Dice& dice, const std::function<void(cudaStream_t)>& call) {
    const int stream = dice.Between(0, 2), thread = dice.Between(0, 4);
    Switch(stream);
    const auto work = [&] { call(streams_[stream]); };
    if (thread < 2) {
      workers_[thread].Run(work);
    } else {
      work();
    }
  }
  void Wait() {
    Home();
    World::Get().Wait();
  }

 private:
  void Switch(int next) {
    if (next == current_) return;
    TEST_CUDA(cudaEventRecord(event_, streams_[current_]));
    TEST_CUDA(cudaStreamWaitEvent(streams_[next], event_, 0));
    current_ = next;
  }

  std::array<cudaStream_t, 3> streams_ = {};
  std::array<Worker, 2> workers_;
  cudaEvent_t event_ = nullptr;
  int current_ = 0;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_STRESS_LANES_H_
