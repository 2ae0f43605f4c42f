// What the error tests share: one group and layer for a whole suite, and a valid step after every refused call.

#ifndef NVTE_EP_TESTS_EP_RIG_H_
#define NVTE_EP_TESTS_EP_RIG_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/expect_error.h"

namespace test {

class ErrorTest : public testing::Test {
 protected:
  static constexpr int kTopK = 2;
  static constexpr std::size_t kAlignment = 4;
  static constexpr std::size_t kHidden = 256;
  static constexpr std::size_t kMaxTokens = 64;

  struct Rig {
    Rig()
        : group(Shape()),
          layer(kTopK, kAlignment),
          step(group, layer, RandomRouting(EvenRows(16), kTopK, Experts(group), 1), 1),
          scratch(kMaxTokens * 64 * 1024) {}

    static GroupShape Shape() {
      GroupShape shape;
      shape.top_k = kTopK;
      shape.alignment = kAlignment;
      shape.dtype = kNVTEBFloat16;
      return shape;
    }

    Group group;
    Layer layer;
    Step<BFloat16> step;
    // Room behind every tensor that only has the wrong shape.
    DeviceBuffer<std::uint8_t> scratch;
    std::uint64_t steps = 1;
  };

  static void SetUpTestSuite() { rig_ = new Rig; }
  static void TearDownTestSuite() {
    delete rig_;
    rig_ = nullptr;
  }

  // Before every test the layer holds the routing of `step`.
  void SetUp() override {
    ASSERT_NE(rig_, nullptr) << "the suite's group could not be made";
    step().Prepare();
  }

  static Rig& rig() { return *rig_; }
  static Step<BFloat16>& step() { return rig_->step; }
  static std::size_t capacity() { return rig_->group.config().max_recv_tokens_per_rank; }

  // A tensor of any type and shape over device memory, `offset` bytes from a 256-byte boundary.
  static Tensor Any(NVTEDType dtype, const std::vector<std::size_t>& shape, std::size_t offset = 0) {
    return Tensor(rig_->scratch.data() + offset, dtype, shape);
  }

  static void EveryCallRefuses(const Handle& handle, const std::vector<std::string>& parts) {
    PrepareArgs prepare = step().prepare_args();
    prepare.handle = handle;
    Refuses("nvte_ep_prepare", parts, [&] { prepare.Call(); });
    DispatchArgs dispatch = step().dispatch_args();
    dispatch.handle = handle;
    Refuses("nvte_ep_dispatch", parts, [&] { dispatch.Call(); });
    CombineArgs combine = step().combine_args();
    combine.handle = handle;
    Refuses("nvte_ep_combine", parts, [&] { combine.Call(); });
    CombineBwdArgs combine_bwd = step().combine_bwd_args();
    combine_bwd.handle = handle;
    Refuses("nvte_ep_combine_bwd", parts, [&] { combine_bwd.Call(); });
    DispatchBwdArgs dispatch_bwd = step().dispatch_bwd_args();
    dispatch_bwd.handle = handle;
    Refuses("nvte_ep_dispatch_bwd", parts, [&] { dispatch_bwd.Call(); });
  }

  // The call is refused as Throws says, and a whole valid step works on the same layer afterwards.
  template <typename Call>
  static void Refuses(const std::string& function, const std::vector<std::string>& parts, Call&& call) {
    EXPECT_TRUE(Throws(function, parts, call));
    const std::uint64_t seed = ++rig_->steps;
    Step<BFloat16>(rig_->group, rig_->layer, RandomRouting(EvenRows(3), kTopK, Experts(rig_->group), seed), seed)
        .ForwardAndBackward();
    step().Prepare();
  }

 private:
  inline static Rig* rig_ = nullptr;
};

// Group configurations that have to be refused; after each test one that is right has to work.
class GroupConfigTest : public testing::Test {
 protected:
  // The changed configuration is refused, and the right one then makes a group that works.
  static void Refuses(const std::function<void(NVTEEpGroupConfig&)>& change, const std::vector<std::string>& parts) {
    NVTEEpGroupConfig config = GroupShape().Config();
    change(config);
    EXPECT_TRUE(Throws("nvte_ep_initialize", parts, [&] {
      Initialize(World::Get().comm(), config);
      // Not refused: undo it, or the checks that follow fail for another reason.
      nvte_ep_shutdown();
    }));
  }

  static void StillWorks() {
    Group group{GroupShape()};
    Layer layer(2, 1);
    Step<BFloat16>(group, layer, RandomRouting(EvenRows(3), 2, Experts(group), 4000), 4000).ForwardAndBackward();
  }

  void TearDown() override { StillWorks(); }
};

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_RIG_H_
