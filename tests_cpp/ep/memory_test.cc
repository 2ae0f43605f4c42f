// Where the memory of tensors lies: what the device cannot reach, or what ends before the tensor does, is refused by
// name.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "support/host_stats.h"

namespace test {
namespace {

// Page-locked host memory.
class PageLocked {
 public:
  explicit PageLocked(std::size_t bytes) { TEST_CUDA(cudaMallocHost(&data_, bytes)); }
  ~PageLocked() { static_cast<void>(cudaFreeHost(data_)); }
  PageLocked(const PageLocked&) = delete;
  PageLocked& operator=(const PageLocked&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct Argument {
  const char* function;
  const char* name;
  NVTEDType dtype;
  std::vector<std::size_t> shape;
  std::size_t bytes;
  // Makes the call with another tensor in its place.
  std::function<void(NVTETensor)> call;
};

class MemoryErrors : public ErrorTest {
 protected:
  // Every tensor of the five calls whose memory is read or written.
  static std::vector<Argument> Arguments() {
    const std::size_t rows = step().rows(), hidden = step().hidden(), recv = step().recv_rows();
    const NVTEDType row = kNVTEBFloat16, weight = kNVTEFloat32;
    return {
        {"nvte_ep_prepare",
         "topk_idx",
         kNVTEInt64,
         {rows, kTopK},
         rows * kTopK * 8,
         [](NVTETensor t) {
           PrepareArgs args = step().prepare_args();
           args.topk_idx = t;
           args.Call();
         }},
        {"nvte_ep_dispatch",
         "tokens",
         row,
         {rows, hidden},
         rows * hidden * 2,
         [](NVTETensor t) {
           DispatchArgs args = step().dispatch_args();
           args.tokens = t;
           args.Call();
         }},
        {"nvte_ep_dispatch",
         "topk_weights",
         weight,
         {rows, kTopK},
         rows * kTopK * 4,
         [](NVTETensor t) {
           DispatchArgs args = step().dispatch_args();
           args.topk_weights = t;
           args.Call();
         }},
        {"nvte_ep_dispatch",
         "recv_tokens",
         row,
         {recv, hidden},
         recv * hidden * 2,
         [](NVTETensor t) {
           DispatchArgs args = step().dispatch_args();
           args.recv_tokens = t;
           args.Call();
         }},
        {"nvte_ep_dispatch",
         "recv_topk_weights",
         weight,
         {recv},
         recv * 4,
         [](NVTETensor t) {
           DispatchArgs args = step().dispatch_args();
           args.recv_topk_weights = t;
           args.Call();
         }},
        {"nvte_ep_combine",
         "expert_out",
         row,
         {recv, hidden},
         recv * hidden * 2,
         [](NVTETensor t) {
           CombineArgs args = step().combine_args();
           args.expert_out = t;
           args.Call();
         }},
        {"nvte_ep_combine",
         "result",
         row,
         {rows, hidden},
         rows * hidden * 2,
         [](NVTETensor t) {
           CombineArgs args = step().combine_args();
           args.result = t;
           args.Call();
         }},
        {"nvte_ep_combine_bwd",
         "grad",
         row,
         {rows, hidden},
         rows * hidden * 2,
         [](NVTETensor t) {
           CombineBwdArgs args = step().combine_bwd_args();
           args.grad = t;
           args.Call();
         }},
        {"nvte_ep_combine_bwd",
         "grad_expert_out",
         row,
         {recv, hidden},
         recv * hidden * 2,
         [](NVTETensor t) {
           CombineBwdArgs args = step().combine_bwd_args();
           args.grad_expert_out = t;
           args.Call();
         }},
        {"nvte_ep_dispatch_bwd",
         "grad",
         row,
         {recv, hidden},
         recv * hidden * 2,
         [](NVTETensor t) {
           DispatchBwdArgs args = step().dispatch_bwd_args();
           args.grad = t;
           args.Call();
         }},
        {"nvte_ep_dispatch_bwd",
         "g_recv_topk_weights",
         weight,
         {recv},
         recv * 4,
         [](NVTETensor t) {
           DispatchBwdArgs args = step().dispatch_bwd_args();
           args.g_recv_topk_weights = t;
           args.Call();
         }},
        {"nvte_ep_dispatch_bwd",
         "grad_tokens",
         row,
         {rows, hidden},
         rows * hidden * 2,
         [](NVTETensor t) {
           DispatchBwdArgs args = step().dispatch_bwd_args();
           args.grad_tokens = t;
           args.Call();
         }},
        {"nvte_ep_dispatch_bwd",
         "grad_topk_weights",
         weight,
         {rows, kTopK},
         rows * kTopK * 4,
         [](NVTETensor t) {
           DispatchBwdArgs args = step().dispatch_bwd_args();
           args.grad_topk_weights = t;
           args.Call();
         }},
    };
  }
};

TEST_F(MemoryErrors, PageableHostMemory) {
  for (const Argument& argument : Arguments()) {
    std::vector<std::uint8_t> memory(argument.bytes + 256);
    auto* const aligned =
        reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 255) & ~255ull);
    const Tensor tensor(aligned, argument.dtype, argument.shape);
    Refuses(argument.function, {std::string(argument.name) + " must lie in memory of the group's device", "pageable"},
            [&] { argument.call(tensor.get()); });
  }
}

// A place where a longer allocation was found fit before is not asked about again, and a GPU's driver gives freed
// addresses out at once; the host runtime holds them back.
constexpr char kAddressesComeBack[] = "the driver may place the allocation where a longer one was";

TEST_F(MemoryErrors, AllocationsThatEndEarly) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << kAddressesComeBack;
  for (const Argument& argument : Arguments()) {
    void* memory = nullptr;
    const std::size_t bytes = argument.bytes / 2;
    TEST_CUDA(cudaMalloc(&memory, bytes));
    const Tensor tensor(memory, argument.dtype, argument.shape);
    Refuses(argument.function,
            {std::string(argument.name) + " must have the memory of its " + std::to_string(argument.bytes) + " bytes",
             "where an allocation ends after"},
            [&] { argument.call(tensor.get()); });
    TEST_CUDA(cudaFree(memory));
  }
}

TEST_F(MemoryErrors, HandleMemoryThatIsNotTheDevices) {
  const std::size_t bytes = rig().layer.memory().size();
  const PageLocked pinned(bytes);
  EveryCallRefuses(rig().layer.HandleOver(Tensor(pinned.data(), kNVTEByte, {bytes})),
                   {std::string(kHandleMem) + " must lie in memory of the group's device", "page-locked host memory"});
  // An address that is nobody's: reading it would end the process.
  EveryCallRefuses(rig().layer.HandleOver(Tensor(reinterpret_cast<void*>(0x10000), kNVTEByte, {bytes})),
                   {std::string(kHandleMem) + " must lie in memory of the group's device", "0x10000", "does not know"});
}

TEST_F(MemoryErrors, HandleMemoryThatEndsEarly) {
  if (!EveryShapeIsCheap()) GTEST_SKIP() << kAddressesComeBack;
  const std::size_t bytes = rig().layer.memory().size();
  void* memory = nullptr;
  TEST_CUDA(cudaMalloc(&memory, bytes / 2));
  EveryCallRefuses(rig().layer.HandleOver(Tensor(memory, kNVTEByte, {bytes})),
                   // Where layers have no ids, memory that is new is asked first what it holds.
                   {kHandleMem, "must have the memory of its|was not prepared",
                    "where an allocation ends after|call nvte_ep_prepare first"});
  TEST_CUDA(cudaFree(memory));
}

// An address that was fit once is not taken for fit when something else lies there.
TEST_F(MemoryErrors, AnAllocationThatTookTheAddressOfALargerOne) {
  const std::size_t rows = step().rows(), hidden = step().hidden();
  DispatchArgs args = step().dispatch_args();
  std::vector<std::uint8_t> pageable(rows * hidden * 2 + 256);
  auto* const aligned =
      reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(pageable.data()) + 255) & ~255ull);
  const Tensor tensor(aligned, kNVTEBFloat16, {rows, hidden});
  args.tokens = tensor.get();
  TEST_CUDA(cudaHostRegister(aligned, rows * hidden * 2, 0));
  args.Call();
  World::Get().Wait();
  TEST_CUDA(cudaHostUnregister(aligned));
  // What was found fit is remembered; only a longer tensor at the same place is asked about again.
  const Tensor longer(aligned, kNVTEBFloat16, {rows, 2 * hidden});
  args.tokens = longer.get();
  Refuses("nvte_ep_dispatch", {"tokens"}, [&] { args.Call(); });
}

// Counts, totals and tokens of a whole step in page-locked host memory, which the device reaches.
TEST_F(MemoryErrors, PageLockedMemoryIsFit) {
  const std::size_t rows = step().rows(), hidden = step().hidden();
  const PageLocked counts(64), tokens(rows * hidden * 2), result(rows * hidden * 2);
  PrepareArgs prepare = step().prepare_args();
  const Tensor counts_t(counts.data(), kNVTEInt32, {static_cast<std::size_t>(rig().group.local_experts())});
  prepare.token_counts = counts_t.get();
  prepare.Call();
  TEST_CUDA(cudaMemcpyAsync(tokens.data(), step().tokens.data(), rows * hidden * 2, cudaMemcpyDeviceToHost,
                            World::Get().stream()));
  const Tensor tokens_t(tokens.data(), kNVTEBFloat16, {rows, hidden});
  DispatchArgs dispatch = step().dispatch_args();
  dispatch.tokens = tokens_t.get();
  dispatch.Call();
  step().CheckReceived();
  const Tensor result_t(result.data(), kNVTEBFloat16, {rows, hidden});
  step().expert_out.Upload(step().ExpertOutput());
  CombineArgs combine = step().combine_args();
  combine.result = result_t.get();
  combine.Call();
  TEST_CUDA(cudaMemcpyAsync(step().result.data(), result.data(), rows * hidden * 2, cudaMemcpyHostToDevice,
                            World::Get().stream()));
  step().CheckCombined();
  World::Get().Wait();
  const auto* const found = static_cast<const std::int32_t*>(counts.data());
  for (int expert = 0; expert < rig().group.local_experts(); ++expert) {
    EXPECT_EQ(found[expert], step().reference().Counts(World::Get().rank())[expert]) << "expert " << expert;
  }
}

}  // namespace
}  // namespace test
