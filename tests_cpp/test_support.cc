// The tests' own instruments, against values worked out by hand.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/number.h"
#include "support/reference.h"

namespace test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Numbers, BFloat16) {
  EXPECT_EQ(Narrow<BFloat16>(1.0f).bits, 0x3f80);
  EXPECT_EQ(Narrow<BFloat16>(-2.0f).bits, 0xc000);
  EXPECT_EQ(Narrow<BFloat16>(-0.0f).bits, 0x8000);
  EXPECT_EQ(Narrow<BFloat16>(kInfinity).bits, 0x7f80);
  EXPECT_EQ(Narrow<BFloat16>(std::numeric_limits<float>::max()).bits, 0x7f80);
  // 8 significant bits: 257 lies between 256 and 258, 259 between 258 and 260; ties go to the even mantissa.
  EXPECT_EQ(Rounded<BFloat16>(257.0f), 256.0f);
  EXPECT_EQ(Rounded<BFloat16>(259.0f), 260.0f);
  EXPECT_EQ(Rounded<BFloat16>(257.01f), 258.0f);
  EXPECT_TRUE(std::isnan(Rounded<BFloat16>(std::nanf(""))));
  // A NaN whose payload sits in the bits that go.
  EXPECT_TRUE(std::isnan(Rounded<BFloat16>(FloatFromBits(0x7f800001u))));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 value = {static_cast<std::uint16_t>(bits)};
    if (!std::isnan(Widen(value))) {
      ASSERT_EQ(Narrow<BFloat16>(Widen(value)).bits, bits);
    }
  }
}

TEST(Numbers, Float16) {
  EXPECT_EQ(Narrow<Float16>(1.0f).bits, 0x3c00);
  EXPECT_EQ(Narrow<Float16>(-2.0f).bits, 0xc000);
  EXPECT_EQ(Narrow<Float16>(-0.0f).bits, 0x8000);
  EXPECT_EQ(Narrow<Float16>(65504.0f).bits, 0x7bff);
  EXPECT_EQ(Narrow<Float16>(65519.99f).bits, 0x7bff);
  EXPECT_EQ(Narrow<Float16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(Narrow<Float16>(-kInfinity).bits, 0xfc00);
  // 11 significant bits.
  EXPECT_EQ(Rounded<Float16>(2049.0f), 2048.0f);
  EXPECT_EQ(Rounded<Float16>(2051.0f), 2052.0f);
  // The smallest subnormal, half of it (a tie, to zero), and the border to the normal numbers.
  EXPECT_EQ(Narrow<Float16>(std::ldexp(1.0f, -24)).bits, 0x0001);
  EXPECT_EQ(Narrow<Float16>(std::ldexp(1.0f, -25)).bits, 0x0000);
  EXPECT_EQ(Narrow<Float16>(std::ldexp(1.5f, -25)).bits, 0x0001);
  EXPECT_EQ(Narrow<Float16>(std::ldexp(1.0f, -14)).bits, 0x0400);
  EXPECT_EQ(Narrow<Float16>(std::ldexp(2047.0f, -25)).bits, 0x0400);
  EXPECT_TRUE(std::isnan(Rounded<Float16>(std::nanf(""))));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 value = {static_cast<std::uint16_t>(bits)};
    if (!std::isnan(Widen(value))) {
      ASSERT_EQ(Narrow<Float16>(Widen(value)).bits, bits);
    }
  }
}

TEST(Numbers, InputsAreExactInEveryType) {
  for (int i = 0; i < 5000; ++i) {
    for (const float value : {TokenValue(i, i % 7, i % 64, i % 300), TokenValue(i, 1, 2, 3) / 16.0f}) {
      ASSERT_EQ(Rounded<BFloat16>(value), value);
      ASSERT_EQ(Rounded<Float16>(value), value);
    }
    ASSERT_NE(WeightValue(i, 1, i, 0), 0.0f);
  }
}

// Two ranks of two experts, alignment 4. Rank 0: tokens to {0, 3} and {1, none}; rank 1: one token to {0, 1}.
Reference Small() {
  Routing routing;
  routing.top_k = 2;
  routing.rows = {2, 1};
  routing.expert = {{0, 3, 1, -1}, {0, 1}};
  return Reference(routing, 4, 4);
}

TEST(References, SlotsAndCounts) {
  const Reference reference = Small();
  EXPECT_EQ(reference.Counts(0), (std::vector<std::int64_t>{4, 4}));
  EXPECT_EQ(reference.Counts(1), (std::vector<std::int64_t>{0, 4})) << "an expert without tokens has no rows";
  const int source[8][3] = {{0, 0, 0}, {1, 0, 0}, {-1, -1, -1}, {-1, -1, -1},
                            {0, 1, 0}, {1, 0, 1}, {-1, -1, -1}, {-1, -1, -1}};
  ASSERT_EQ(reference.Slots(0).size(), 8u);
  for (int s = 0; s < 8; ++s) {
    EXPECT_EQ(reference.Slots(0)[s].local_expert, s / 4);
    EXPECT_EQ(reference.Slots(0)[s].rank, source[s][0]) << "slot " << s;
    EXPECT_EQ(reference.Slots(0)[s].row, source[s][1]) << "slot " << s;
    EXPECT_EQ(reference.Slots(0)[s].k, source[s][2]) << "slot " << s;
  }
  ASSERT_EQ(reference.Slots(1).size(), 4u);
  EXPECT_EQ(reference.Slots(1)[0].rank, 0);
  EXPECT_EQ(reference.Slots(1)[0].k, 1);
  EXPECT_EQ(reference.SlotIndex(0, 1, 1, 0), 5);
  EXPECT_LT(reference.SlotIndex(1, 0, 0, 0), 0);
}

// Three tokens for both experts of rank 0, which has room for two rows: the third token is gone from both slabs, and
// the second slab has no place.
TEST(References, TwoFiltersDrop) {
  Routing routing;
  routing.top_k = 2;
  routing.rows = {2, 2};
  routing.expert = {{0, 1, 1, 0}, {0, 1, 2, 3}};
  const Reference whole(routing, 4, 1);
  ASSERT_EQ(whole.Counts(0), (std::vector<std::int64_t>{3, 3}));
  const Reference tokens(routing, 4, 1, 2);
  EXPECT_EQ(tokens.Total(0), 6);
  EXPECT_EQ(tokens.Counts(0), (std::vector<std::int64_t>{2, 0}));
  ASSERT_EQ(tokens.Slots(0).size(), 2u);
  EXPECT_EQ(tokens.SlotIndex(0, 0, 0, 1), 1);
  EXPECT_LT(tokens.SlotIndex(0, 1, 0, 0), 0) << "no place";
  EXPECT_LT(tokens.SlotIndex(0, 0, 1, 0), 0) << "the third token";
  const auto one = [](int, const Slot&) { return 1.0f; };
  EXPECT_EQ(tokens.WeightGradient(0, 0, 0, one), 1.0f);
  EXPECT_EQ(tokens.WeightGradient(0, 0, 1, one), 0.0f);

  // Padded to 4, with room for five rows: all three tokens arrive, and the second slab keeps its first row.
  const Reference padded(routing, 4, 4, 5);
  EXPECT_EQ(padded.Total(0), 8);
  EXPECT_EQ(padded.Counts(0), (std::vector<std::int64_t>{4, 1}));
  ASSERT_EQ(padded.Slots(0).size(), 5u);
  EXPECT_EQ(padded.Slots(0)[2].rank, 1);
  EXPECT_TRUE(padded.Slots(0)[3].padding());
  EXPECT_EQ(padded.Slots(0)[4].row, 0);
  EXPECT_LT(padded.SlotIndex(0, 1, 0, 1), 0);

  // Within the capacity: padding up to it.
  const Reference roomy(routing, 4, 1, 9);
  EXPECT_EQ(roomy.Total(1), 2);
  EXPECT_EQ(roomy.Counts(1), (std::vector<std::int64_t>{1, 1}));
  ASSERT_EQ(roomy.Slots(1).size(), 9u);
  EXPECT_TRUE(roomy.Slots(1)[2].padding());
}

// Three tokens for rank 0, which has room for two rows. The third has the first row, and goes where tokens are counted.
TEST(References, DropsByRowsOnly) {
  Routing routing;
  routing.top_k = 1;
  routing.rows = {3, 0};
  routing.expert = {{1, 1, 0}, {}};
  const Reference by_tokens(routing, 4, 1, 2);
  EXPECT_TRUE(by_tokens.Slots(0)[0].padding());
  EXPECT_LT(by_tokens.SlotIndex(0, 0, 0, 2), 0);
  const Reference by_rows(routing, 4, 1, 2, Reference::Drops::kRows);
  ASSERT_EQ(by_rows.Slots(0).size(), 2u);
  EXPECT_EQ(by_rows.Slots(0)[0].row, 2);
  EXPECT_EQ(by_rows.Slots(0)[1].row, 0);
  EXPECT_EQ(by_rows.Counts(0), (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(by_rows.Total(0), 3);
  EXPECT_LT(by_rows.SlotIndex(0, 1, 0, 1), 0) << "no place";
}

TEST(References, SumsRoundOncePerRankAndOnceMore) {
  // One token for both experts of both ranks. Between 256 and 512 bf16 holds even numbers only.
  Routing routing;
  routing.top_k = 4;
  routing.rows = {1, 0};
  routing.expert = {{3, 2, 1, 0}, {}};
  const Reference reference(routing, 4, 1);
  const auto value = [](int destination, const Slot& slot, int) {
    if (destination == 0) return slot.local_expert == 0 ? 256.0f : 2.0f;  // 258 stays
    return slot.local_expert == 0 ? 1.0f : 0.0f;
  };
  EXPECT_EQ(reference.Combined(0, 0, 0, value, &Rounded<BFloat16>), 260.0f) << "259 without the rounding at the end";
  EXPECT_EQ(reference.Combined(0, 0, 0, value, &Rounded<float>), 259.0f);
  const auto smaller = [](int destination, const Slot& slot, int) {
    if (destination == 0) return slot.local_expert == 0 ? 256.0f : 1.0f;  // 257 rounds to 256
    return slot.local_expert == 0 ? 1.0f : 0.0f;
  };
  EXPECT_EQ(reference.Combined(0, 0, 0, smaller, &Rounded<BFloat16>), 256.0f) << "258 without the rounding between";
  EXPECT_EQ(reference.Combined(0, 0, 0, smaller, &Rounded<float>), 258.0f);
}

TEST(References, WeightGradients) {
  const Reference reference = Small();
  const auto value = [](int destination, const Slot& slot) {
    return static_cast<float>(100 * destination + 10 * slot.local_expert + slot.row);
  };
  EXPECT_EQ(reference.WeightGradient(0, 0, 0, value), 0.0f);
  EXPECT_EQ(reference.WeightGradient(0, 0, 1, value), 110.0f);
  EXPECT_EQ(reference.WeightGradient(0, 1, 0, value), 11.0f);
  EXPECT_EQ(reference.WeightGradient(0, 1, 1, value), 0.0f) << "masked";
  EXPECT_EQ(reference.WeightGradient(1, 0, 1, value), 10.0f);
}

TEST(References, RandomRoutingIsDistinctAndMasked) {
  const Routing routing = RandomRouting({50, 0, 64}, 4, 8, 3, 50);
  int masked = 0;
  for (int rank = 0; rank < 3; ++rank) {
    for (int row = 0; row < routing.rows[rank]; ++row) {
      for (int k = 0; k < 4; ++k) {
        const std::int64_t expert = routing.at(rank, row, k);
        ASSERT_GE(expert, -1);
        ASSERT_LT(expert, 8);
        masked += expert < 0;
        for (int other = 0; other < k; ++other) ASSERT_TRUE(expert < 0 || expert != routing.at(rank, row, other));
      }
    }
  }
  EXPECT_GT(masked, 114 * 4 / 4);
  EXPECT_LT(masked, 114 * 4 * 3 / 4);
}

}  // namespace
}  // namespace test
