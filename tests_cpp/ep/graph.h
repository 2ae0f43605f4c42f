// Work that is captured into a CUDA graph.

#ifndef NVTE_EP_TESTS_EP_GRAPH_H_
#define NVTE_EP_TESTS_EP_GRAPH_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "support/device.h"
#include "support/ep.h"

namespace test {

// What `calls` queues on a stream, as a graph. `calls` may throw: the capture is ended, and the exception goes on.
class Graph {
 public:
  explicit Graph(const std::function<void()>& calls, cudaStream_t stream = World::Get().stream(),
                 cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    cudaGraph_t graph = nullptr;
    TEST_CUDA(cudaStreamBeginCapture(stream, mode));
    try {
      calls();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph));
      if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
      static_cast<void>(cudaGetLastError());
      throw;
    }
    TEST_CUDA(cudaStreamEndCapture(stream, &graph));
    TEST_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    TEST_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { EXPECT_EQ(cudaGraphExecDestroy(exec_), cudaSuccess); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Queues the graph on `stream`.
  void Enqueue(cudaStream_t stream = World::Get().stream()) const { TEST_CUDA(cudaGraphLaunch(exec_, stream)); }
  void Launch() const {
    Enqueue();
    World::Get().Wait();
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

template <typename Step>
void EnqueueAll(const Step& step, cudaStream_t stream = World::Get().stream()) {
  step.prepare_args().Call(stream);
  step.dispatch_args().Call(stream);
  step.combine_args().Call(stream);
  step.combine_bwd_args().Call(stream);
  step.dispatch_bwd_args().Call(stream);
}

template <typename Step>
void ClearOutputs(Step& step) {
  step.counts.Clear();
  step.total.Clear();
  step.recv_tokens.Clear();
  step.recv_weights.Clear();
  step.result.Clear();
  step.grad_expert_out.Clear();
  step.grad_tokens.Clear();
  step.grad_weights.Clear();
}

template <typename Step>
void CheckAll(Step& step) {
  step.CheckCounts();
  step.CheckReceived();
  step.CheckCombined();
  step.CheckCombineBwd();
  step.CheckDispatchBwd();
}

// What the experts and the loss are to give, in place before anything runs.
template <typename Step>
void UploadInputs(Step& step) {
  step.expert_out.Upload(step.ExpertOutput());
  step.UploadSlotGradients();
}

// Launches a graph of EnqueueAll(step) with another routing and other values for as many tokens.
template <typename Step>
void ReplayAs(Step& step, const Graph& graph, Routing routing, std::uint64_t seed) {
  step.Renew(std::move(routing), seed);
  UploadInputs(step);
  ClearOutputs(step);
  graph.Launch();
  CheckAll(step);
}

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_GRAPH_H_
