// Chance that all ranks share.

#ifndef NVTE_EP_TESTS_SUPPORT_DICE_H_
#define NVTE_EP_TESTS_SUPPORT_DICE_H_

#include <cstdint>
#include <random>
#include <vector>

namespace test {

// The same throws on every rank.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}

  int Between(int least, int most) { return least + static_cast<int>(random_() % (most - least + 1)); }
  bool Percent(int chance) { return Between(0, 99) < chance; }
  template <typename T>
  const T& OneOf(const std::vector<T>& values) {
    return values[random_() % values.size()];
  }
  std::uint64_t Number() { return random_(); }

 private:
  std::mt19937_64 random_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_DICE_H_
