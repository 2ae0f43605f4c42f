// Tensors that lie in symmetric memory and are named by window and offset.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ep/rig.h"
#include "ep/routings.h"
#include "support/ep.h"

namespace test {
namespace {

constexpr std::size_t kOffset = 4096;

// Memory of NCCL, registered on the world's communicator. Collective.
class WindowMemory {
 public:
  explicit WindowMemory(std::size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    TEST_NCCL(ncclMemAlloc(&data_, bytes_));
    TEST_NCCL(ncclCommWindowRegister(World::Get().comm(), data_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC));
    TEST_CUDA(cudaMemsetAsync(data_, kUnwritten, bytes_, World::Get().stream()));
  }
  ~WindowMemory() {
    static_cast<void>(ncclCommWindowDeregister(World::Get().comm(), window_));
    static_cast<void>(ncclMemFree(data_));
  }
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  NVTECommWindow At(std::uint64_t offset) const {
    NVTECommWindow window = {};
    window.window = window_;
    window.offset = offset;
    return window;
  }

  // Copies between this memory, from kOffset on, and a buffer of the same size.
  template <typename T>
  void CopyFrom(const DeviceBuffer<T>& from) {
    Copy(static_cast<unsigned char*>(data_) + kOffset, from.data(), from.bytes());
  }
  template <typename T>
  void CopyTo(const DeviceBuffer<T>& to) const {
    Copy(to.data(), static_cast<const unsigned char*>(data_) + kOffset, to.bytes());
  }

 private:
  static void Copy(void* to, const void* from, std::size_t bytes) {
    TEST_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, World::Get().stream()));
    World::Get().Wait();
  }

  std::size_t bytes_;
  void* data_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

// With staging, windows are allowed and change nothing but the place. The tensors keep their own addresses: where both
// are given the window counts.
TEST(Windows, PayloadsInWindowsOfAStagedGroup) {
  GroupShape shape;
  shape.alignment = 8;
  Group group(shape);
  Layer layer(2, 8);
  Step<BFloat16> step(group, layer, RandomRouting(UnevenRows(40), 2, Experts(group), 5000), 5000);
  const NVTECommWindow none = {};
  cudaStream_t stream = World::Get().stream();
  const DispatchArgs dispatch = step.dispatch_args();
  const CombineArgs combine = step.combine_args();
  const CombineBwdArgs combine_bwd = step.combine_bwd_args();
  {
    WindowMemory recv(kOffset + step.recv_tokens.bytes());
    step.Prepare();
    nvte_ep_dispatch(dispatch.handle, dispatch.topk_idx, dispatch.tokens, none, dispatch.topk_weights, none,
                     dispatch.recv_tokens, recv.At(kOffset), dispatch.recv_topk_weights, none, stream);
    World::Get().Wait();
    EXPECT_TRUE(SameBits(step.recv_tokens.Download(), Unwritten<BFloat16>(step.recv_rows() * step.hidden()), 1))
        << "written although the window counts";
    recv.CopyTo(step.recv_tokens);
    step.CheckReceived();

    step.expert_out.Upload(step.ExpertOutput());
    recv.CopyFrom(step.expert_out);
    step.expert_out.Clear();
    nvte_ep_combine(combine.handle, combine.expert_out, recv.At(kOffset), combine.result, stream);
    step.CheckCombined();

    nvte_ep_combine_bwd(combine_bwd.handle, combine_bwd.grad, none, combine_bwd.grad_expert_out, recv.At(kOffset),
                        stream);
    World::Get().Wait();
    // Rows beyond the last slab still hold what combine's input left there.
    recv.CopyTo(step.grad_expert_out);
    std::vector<BFloat16> received = step.grad_expert_out.Download();
    const std::vector<BFloat16> tail = Unwritten<BFloat16>((step.recv_rows() - step.slots().size()) * step.hidden());
    std::copy(tail.begin(), tail.end(), received.begin() + step.slots().size() * step.hidden());
    step.grad_expert_out.Upload(received);
    step.CheckCombineBwd();
    World::Get().Wait();
  }
  step.ForwardAndBackward();
}

class WindowErrors : public ErrorTest {};

TEST_F(WindowErrors, OffsetsOffTheCopyUnit) {
  WindowMemory memory(kOffset + capacity() * kHidden * 2);
  const NVTECommWindow none = {};
  cudaStream_t stream = World::Get().stream();
  const DispatchArgs dispatch = step().dispatch_args();
  const CombineArgs combine = step().combine_args();
  for (const std::uint64_t offset : {2, 8, 4088}) {
    const std::string got = "got " + std::to_string(offset);
    Refuses("nvte_ep_dispatch", {"recv_tokens_win.offset", "16", got}, [&] {
      nvte_ep_dispatch(dispatch.handle, dispatch.topk_idx, dispatch.tokens, none, dispatch.topk_weights, none,
                       dispatch.recv_tokens, memory.At(offset), dispatch.recv_topk_weights, none, stream);
    });
    Refuses("nvte_ep_combine", {"expert_out_win.offset", "16", got},
            [&] { nvte_ep_combine(combine.handle, combine.expert_out, memory.At(offset), combine.result, stream); });
  }
  World::Get().Wait();
}

}  // namespace
}  // namespace test
