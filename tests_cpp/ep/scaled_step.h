// A step whose dispatch moves MXFP8 tokens.

#ifndef NVTE_EP_TESTS_EP_SCALED_STEP_H_
#define NVTE_EP_TESTS_EP_SCALED_STEP_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"

namespace test {

using Bytes = std::vector<std::uint8_t>;

inline constexpr std::uint64_t kData = 1, kScale = 2;

// One byte of a token's row: data or scale, told apart by `what`.
inline std::uint8_t ByteOf(std::uint64_t seed, std::uint64_t what, int rank, int row, std::size_t column) {
  return static_cast<std::uint8_t>(Mix(seed * 4 + what, rank, row, column));
}

inline Tensor Mxfp8(std::uint8_t* data, NVTEDType dtype, const std::vector<std::size_t>& shape, std::uint8_t* scales,
                    NVTEDType scale_dtype, const std::vector<std::size_t>& scale_shape) {
  return Tensor::Scaled(MakeBasicTensor(data, dtype, shape), MakeBasicTensor(scales, scale_dtype, scale_shape));
}

// The dispatch of one step with MXFP8 tokens; everything else is a Step's.
class ScaledStep {
 public:
  ScaledStep(const Group& group, const Layer& layer, const Routing& routing, std::uint64_t seed, std::size_t hidden,
             std::size_t recv_rows = 0, NVTEDType dtype = kNVTEFloat8E4M3)
      : step(group, layer, routing, seed, recv_rows),
        seed_(seed),
        hidden_(hidden),
        rows_(step.rows()),
        recv_rows_(step.recv_rows()),
        tokens(SourceRows(kData, hidden)),
        scales(SourceRows(kScale, hidden / 32)),
        recv_tokens(recv_rows_ * hidden),
        recv_scales(recv_rows_ * hidden / 32),
        tokens_t(Mxfp8(tokens.data(), dtype, {rows_, hidden}, scales.data(), kNVTEFloat8E8M0, {rows_, hidden / 32})),
        recv_tokens_t(Mxfp8(recv_rows_ == 0 ? nullptr : recv_tokens.data(), dtype, {recv_rows_, hidden},
                            recv_rows_ == 0 ? nullptr : recv_scales.data(), kNVTEFloat8E8M0,
                            {recv_rows_, hidden / 32})) {}

  DispatchArgs dispatch_args() const {
    DispatchArgs args = step.dispatch_args();
    args.tokens = tokens_t.get();
    args.recv_tokens = recv_tokens_t.get();
    return args;
  }

  std::uint64_t seed() const { return seed_; }

  void Check(bool with_weights = true) {
    EXPECT_TRUE(step.HoldsSlots(recv_tokens.Download(), SlotRows(kData, hidden_), hidden_)) << "values";
    EXPECT_TRUE(step.HoldsSlots(recv_scales.Download(), SlotRows(kScale, hidden_ / 32), hidden_ / 32)) << "scales";
    EXPECT_TRUE(recv_tokens.GuardIntact() && recv_scales.GuardIntact());
    std::vector<float> weights = Unwritten<float>(recv_rows_);
    for (std::size_t s = 0; with_weights && s < step.slots().size(); ++s) {
      const Slot& slot = step.slots()[s];
      weights[s] = slot.padding() ? 0.0f : WeightValue(seed_, slot.rank, slot.row, slot.k);
    }
    EXPECT_TRUE(step.HoldsSlots(step.recv_weights.Download(), weights, 1)) << "weights";
  }

  void Run() {
    step.Prepare();
    step.CheckCounts();
    dispatch_args().Call();
    Check();
    // What follows is in BFloat16.
    step.Combine();
    step.CheckCombined();
    step.Backward();
  }

  Step<BFloat16> step;

 private:
  Bytes SourceRows(std::uint64_t what, std::size_t width) const {
    Bytes bytes(rows_ * width);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = ByteOf(seed_, what, World::Get().rank(), static_cast<int>(i / width), i % width);
    }
    return bytes;
  }
  Bytes SlotRows(std::uint64_t what, std::size_t width) const {
    Bytes bytes = Unwritten<std::uint8_t>(recv_rows_ * width);
    for (std::size_t s = 0; s < step.slots().size(); ++s) {
      const Slot& slot = step.slots()[s];
      for (std::size_t column = 0; column < width; ++column) {
        bytes[s * width + column] = slot.padding() ? 0 : ByteOf(seed_, what, slot.rank, slot.row, column);
      }
    }
    return bytes;
  }

  const std::uint64_t seed_;
  const std::size_t hidden_;
  const std::size_t rows_;
  const std::size_t recv_rows_;

 public:
  DeviceBuffer<std::uint8_t> tokens, scales, recv_tokens, recv_scales;
  Tensor tokens_t, recv_tokens_t;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_EP_SCALED_STEP_H_
