// Layers whose handle memory lies in allocations of its own or in slices of one, and moves.

#ifndef NVTE_EP_TESTS_STRESS_LAYERS_H_
#define NVTE_EP_TESTS_STRESS_LAYERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "stress/stress.h"
#include "support/ep.h"
#include "support/symm.h"

namespace test {

// The handles that a group has opened, as nvte_ep_ext_memory_usage has to tell them.
class HandleBook {
 public:
  // By a registered layer, or by the address alone if `id` is 0. Memory has one handle, and a registered layer has one
  // memory.
  void Opened(std::uint64_t id, const void* memory, std::size_t bytes) {
    if (id != 0) {
      const auto [former, is_new] = places_.emplace(id, memory);
      const auto left = open_.find(former->second);
      if (!is_new && former->second != memory && left != open_.end() && left->second.id == id) open_.erase(left);
      former->second = memory;
    }
    open_[memory] = {id, bytes};
  }
  std::uint64_t handles() const { return open_.size(); }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [memory, open] : open_) sum += open.bytes;
    return sum;
  }

 private:
  struct Open {
    std::uint64_t id;
    std::size_t bytes;
  };
  std::map<const void*, Open> open_;
  std::map<std::uint64_t, const void*> places_;
};

// What a call last prepared at an address.
struct Routed {
  int top_k = 0;
  std::size_t alignment = 0;
  // Tokens of each rank.
  std::vector<int> rows;
  // Whether the gradient of dispatch was called since, with which a step is over.
  bool spent = false;

  // Whether the library takes `other`, if its bytes come to lie here, for this: nothing in the arguments of most calls
  // tells layers of as many tokens apart (docs/drop_in.md).
  bool LooksLike(const Routed& other) const {
    const bool same_layer =
        top_k == other.top_k && std::max<std::size_t>(alignment, 1) == std::max<std::size_t>(other.alignment, 1);
    if (same_layer || spent) return false;
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      if (rows[rank] == other.rows[rank]) return true;
    }
    return false;
  }
};

// One allocation that handle memory is cut from, as a framework's pool does: what was there before stays in it, and
// other handle memory comes to lie there, at the same address or across it.
class Slices {
 public:
  explicit Slices(std::size_t most) : most_((most + 255) / 256 * 256), memory_(most_ * kSlices) {}

  // Room at some address, for memory that holds `routed` if that is not null, or null if there is none.
  std::uint8_t* Take(Dice& dice, std::size_t bytes, const Routed* routed) {
    // Few addresses, so that they come back soon.
    const std::size_t unit = std::max<std::size_t>(most_ / 512 * 256, 256);
    std::vector<std::uint8_t*> found;
    for (std::size_t at = 0; at + bytes <= memory_.size(); at += unit) {
      std::uint8_t* const place = memory_.data() + at;
      const auto apart = [&](const auto& taken) {
        return taken.first + taken.second <= place || place + bytes <= taken.first;
      };
      const auto former = routed_.find(place);
      if (routed != nullptr && former != routed_.end() && former->second.LooksLike(*routed)) continue;
      if (std::all_of(taken_.begin(), taken_.end(), apart)) found.push_back(place);
    }
    if (found.empty()) return nullptr;
    std::uint8_t* const place = dice.OneOf(found);
    taken_[place] = bytes;
    return place;
  }
  void GiveBack(std::uint8_t* place) { taken_.erase(place); }
  // What the library has seen at `place`.
  void Note(std::uint8_t* place, const Routed& routed) { routed_[place] = routed; }
  bool GuardIntact() const { return memory_.GuardIntact(); }

 private:
  static constexpr std::size_t kSlices = 12;

  std::size_t most_;
  DeviceBuffer<std::uint8_t> memory_;
  std::map<std::uint8_t*, std::size_t> taken_;
  std::map<std::uint8_t*, Routed> routed_;
};

// A layer whose handle memory may move.
class MovableLayer {
 public:
  // In `slices`, or in memory of its own if that is null.
  MovableLayer(Dice& dice, int top_k, std::size_t alignment, Slices* slices, HandleBook* book)
      : layer(top_k, alignment), slices_(slices), book_(book) {
    if (slices_ != nullptr) Place(slices_->Take(dice, bytes(), nullptr));
  }
  ~MovableLayer() {
    if (slices_ != nullptr) slices_->GiveBack(place_);
  }
  MovableLayer(const MovableLayer&) = delete;
  MovableLayer& operator=(const MovableLayer&) = delete;

  Handle handle() const { return place_ != nullptr ? layer.HandleOver(tensor_) : layer.handle(); }
  // To other memory. What stays behind is as it was, or garbage.
  void Move(Dice& dice) {
    const bool garbage = dice.Percent(50);
    World::Get().Wait();
    std::uint8_t* const from = address();
    DeviceBuffer<std::uint8_t> own;
    std::uint8_t* to = nullptr;
    if (slices_ != nullptr) {
      to = slices_->Take(dice, bytes(), routed_.rows.empty() ? nullptr : &routed_);
      if (to == nullptr) return;
    } else {
      own = DeviceBuffer<std::uint8_t>(bytes());
      to = own.data();
    }
    CopyOnDevice(to, from, bytes());
    if (garbage || slices_ == nullptr) TEST_CUDA(cudaMemsetAsync(from, 0xcb, bytes(), World::Get().stream()));
    World::Get().Wait();
    if (slices_ != nullptr) slices_->GiveBack(from);
    std::swap(memory_, own);
    Place(to);
  }
  // Notes that a call is made with the handle: over what was prepared for `rows`, and whether it is the last of a step.
  void Used(const std::vector<int>& rows, bool last = false) {
    book_->Opened(layer.id(), address(), bytes());
    routed_ = {layer.top_k(), layer.alignment(), rows, last};
    if (slices_ != nullptr) slices_->Note(place_, routed_);
  }
  void Check() const {
    if (!layer.memory().GuardIntact()) Fail("wrote behind handle memory");
    if (slices_ != nullptr ? !slices_->GuardIntact() : place_ != nullptr && !memory_.GuardIntact()) {
      Fail("wrote behind moved handle memory");
    }
  }

  Layer layer;

 private:
  std::size_t bytes() const { return layer.memory().size(); }
  std::uint8_t* address() const { return place_ != nullptr ? place_ : layer.memory().data(); }
  void Place(std::uint8_t* place) {
    if (place == nullptr) Fail("no slice for a layer");
    place_ = place;
    tensor_ = Tensor(place, kNVTEByte, {bytes()});
  }

  Slices* const slices_;
  HandleBook* const book_;
  // Where the handle memory lies, if not in the layer's own.
  std::uint8_t* place_ = nullptr;
  DeviceBuffer<std::uint8_t> memory_;
  Tensor tensor_;
  Routed routed_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_STRESS_LAYERS_H_
