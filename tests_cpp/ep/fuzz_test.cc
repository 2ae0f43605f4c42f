// Random shapes and routings from a seed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "support/ep.h"
#include "support/host_stats.h"

namespace test {
namespace {

// The value of an environment variable on rank 0, the same on every rank.
int SharedSetting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  int value = text == nullptr ? otherwise : std::atoi(text);
  MPI_Bcast(&value, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return value;
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}

  int Between(int least, int most) { return least + static_cast<int>(random_() % (most - least + 1)); }
  template <typename T>
  T OneOf(const std::vector<T>& values) {
    return values[random_() % values.size()];
  }

 private:
  std::mt19937_64 random_;
};

template <typename T>
void RunCase(const Group& group, Dice& dice, std::uint64_t seed, int most_top_k, int most_alignment) {
  const int most = std::min(most_top_k, Experts(group));
  const int top_k = EveryShapeIsCheap() ? dice.Between(1, most) : dice.OneOf<int>({1, std::min(2, most)});
  std::size_t alignment = 0;
  do {
    alignment = dice.OneOf<std::size_t>({0, 1, 2, 4, 8, 16, 32, 64});
  } while (alignment > static_cast<std::size_t>(most_alignment));
  std::vector<int> rows;
  for (int rank = 0; rank < Ranks(); ++rank) {
    rows.push_back(dice.Between(0, 3) == 0 ? 0 : dice.Between(0, group.config().max_tokens_per_rank));
  }
  const int masked = dice.OneOf<int>({0, 0, 10, 50, 95});
  const std::size_t recv_rows = group.config().max_recv_tokens_per_rank + dice.OneOf<int>({0, 0, 1, 64});
  std::string trace = "seed " + std::to_string(seed) + " top_k " + std::to_string(top_k) + " alignment " +
                      std::to_string(alignment) + " masked " + std::to_string(masked) + "% tokens";
  for (const int count : rows) trace += " " + std::to_string(count);
  SCOPED_TRACE(trace);
  Layer layer(top_k, alignment);
  const Routing routing = RandomRouting(rows, top_k, Experts(group), seed, masked);
  if (dice.Between(0, 1) == 0) {
    Step<T, std::int64_t, std::int32_t>(group, layer, routing, seed, recv_rows).ForwardAndBackward();
  } else {
    Step<T, std::int32_t, std::int64_t>(group, layer, routing, seed, recv_rows).ForwardAndBackward();
  }
}

TEST(Fuzz, RandomShapesAndRoutings) {
  const int cases = SharedSetting("NVTE_EP_TEST_FUZZ_CASES", 40);
  const int base = SharedSetting("NVTE_EP_TEST_SEED", 20250);
  constexpr int kCasesPerGroup = 10;
  for (int first = 0; first < cases; first += kCasesPerGroup) {
    Dice dice(Mix(base, first));
    GroupShape shape;
    shape.experts_per_rank = dice.OneOf<int>({4, 6, 8, 12, 16});
    shape.max_tokens = dice.Between(1, 64);
    shape.hidden = EveryShapeIsCheap() ? dice.OneOf<int>({64, 128, 256, 320}) : 256;
    shape.top_k = dice.Between(1, 12);
    shape.alignment = dice.OneOf<int>({1, 8, 64});
    shape.dtype = dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEBFloat16, kNVTEBFloat16, kNVTEFloat16});
    if (!EveryShapeIsCheap()) shape.dtype = kNVTEBFloat16;
    Group group(shape);
    for (int i = first; i < std::min(first + kCasesPerGroup, cases); ++i) {
      SCOPED_TRACE("case " + std::to_string(i));
      const std::uint64_t seed = static_cast<std::uint64_t>(base) + i;
      if (shape.dtype == kNVTEFloat32) {
        RunCase<float>(group, dice, seed, shape.top_k, shape.alignment);
      } else if (shape.dtype == kNVTEFloat16) {
        RunCase<Float16>(group, dice, seed, shape.top_k, shape.alignment);
      } else {
        RunCase<BFloat16>(group, dice, seed, shape.top_k, shape.alignment);
      }
    }
  }
}

}  // namespace
}  // namespace test
