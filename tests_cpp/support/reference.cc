#include "support/reference.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace test {

Routing MakeRouting(const std::vector<int>& rows, int top_k, const std::function<std::int64_t(int, int, int)>& pick) {
  Routing routing;
  routing.top_k = top_k;
  routing.rows = rows;
  routing.expert.resize(rows.size());
  for (int rank = 0; rank < routing.ranks(); ++rank) {
    for (int row = 0; row < rows[rank]; ++row) {
      for (int k = 0; k < top_k; ++k) routing.expert[rank].push_back(pick(rank, row, k));
    }
  }
  return routing;
}

Routing RandomRouting(const std::vector<int>& rows, int top_k, int experts, std::uint64_t seed, int masked_percent) {
  Routing routing;
  routing.top_k = top_k;
  routing.rows = rows;
  routing.expert.resize(rows.size());
  std::vector<std::int64_t> deck(experts);
  for (int rank = 0; rank < routing.ranks(); ++rank) {
    std::mt19937_64 random(Mix(seed, rank));
    for (int row = 0; row < rows[rank]; ++row) {
      std::iota(deck.begin(), deck.end(), 0);
      for (int k = 0; k < top_k; ++k) {
        std::swap(deck[k], deck[k + random() % (experts - k)]);
        const bool masked = static_cast<int>(random() % 100) < masked_percent;
        routing.expert[rank].push_back(masked ? -1 : deck[k]);
      }
    }
  }
  return routing;
}

std::uint64_t Mix(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t state = 0x2545f4914f6cdd1dull;
  for (const std::uint64_t word : {a, b, c, d}) {
    state = (state ^ word) * 0xd6e8feb86659fd93ull;
    state ^= state >> 32;
    state *= 0xd6e8feb86659fd93ull;
    state ^= state >> 29;
  }
  return state;
}

float TokenValue(std::uint64_t seed, int rank, int row, int column) {
  // Integers from -128 to 128: 8 significant bits.
  return static_cast<float>(static_cast<int>(Mix(seed, rank, row, column) % 257) - 128);
}

float WeightValue(std::uint64_t seed, int rank, int row, int k) {
  // Odd multiples of 1/64 below 2: never zero, which would look like padding.
  return static_cast<float>(2 * (Mix(seed ^ 0x77, rank, row, k) % 64) + 1) / 64.0f;
}

Reference::Reference(Routing routing, int experts, std::size_t alignment, std::size_t capacity, Drops drops)
    : routing_(std::move(routing)), local_experts_(experts / routing_.ranks()) {
  const int ranks = routing_.ranks();
  counts_.resize(ranks);
  slots_.resize(ranks);
  slot_of_.resize(ranks);
  for (int destination = 0; destination < ranks; ++destination) {
    for (const int rows : routing_.rows) {
      slot_of_[destination].emplace_back(static_cast<std::size_t>(rows) * local_experts_, -1);
    }
    std::vector<Slot>& slots = slots_[destination];
    for (int local = 0; local < local_experts_; ++local) {
      const std::int64_t expert = static_cast<std::int64_t>(destination) * local_experts_ + local;
      const std::size_t base = slots.size();
      for (int rank = 0; rank < ranks; ++rank) {
        for (int row = 0; row < routing_.rows[rank]; ++row) {
          for (int k = 0; k < routing_.top_k; ++k) {
            if (routing_.at(rank, row, k) != expert) continue;
            slot_of_[destination][rank][static_cast<std::size_t>(row) * local_experts_ + local] =
                static_cast<std::int64_t>(slots.size());
            slots.push_back({local, rank, row, k});
            break;
          }
        }
      }
      while (alignment > 1 && (slots.size() - base) % alignment != 0) slots.push_back({local, -1, -1, -1});
      counts_[destination].push_back(static_cast<std::int64_t>(slots.size() - base));
    }
    totals_.push_back(static_cast<std::int64_t>(slots.size()));
    if (capacity != std::numeric_limits<std::size_t>::max()) Drop(destination, capacity, drops);
  }
}

void Reference::Drop(int destination, std::size_t capacity, Drops drops) {
  std::vector<Slot>& slots = slots_[destination];
  std::size_t distinct = 0;
  for (int rank = 0; rank < routing_.ranks(); ++rank) {
    for (int row = 0; row < routing_.rows[rank]; ++row) {
      std::int64_t* const mine = &slot_of_[destination][rank][static_cast<std::size_t>(row) * local_experts_];
      bool arrives = false;
      for (int local = 0; local < local_experts_; ++local) {
        if (mine[local] < 0) continue;
        arrives = true;
        const bool no_place = static_cast<std::size_t>(mine[local]) >= capacity;
        if ((distinct < capacity || drops == Drops::kRows) && !no_place) continue;
        if (!no_place) slots[mine[local]] = {local, -1, -1, -1};
        mine[local] = -1;
      }
      if (arrives) ++distinct;
    }
  }
  slots.resize(capacity);
  std::int64_t room = static_cast<std::int64_t>(capacity);
  for (std::int64_t& count : counts_[destination]) {
    count = std::min(count, room);
    room -= count;
  }
}

std::int64_t Reference::SlotIndex(int destination, int local_expert, int rank, int row) const {
  return slot_of_[destination][rank][static_cast<std::size_t>(row) * local_experts_ + local_expert];
}

float Reference::Combined(int rank, int row, int column, const SlotValue& value, float (*round)(float)) const {
  float sum = 0.0f;
  for (int destination = 0; destination < routing_.ranks(); ++destination) {
    float partial = 0.0f;
    bool any = false;
    for (int local = 0; local < local_experts_; ++local) {
      const std::int64_t index = SlotIndex(destination, local, rank, row);
      if (index < 0) continue;
      any = true;
      partial += value(destination, slots_[destination][index], column);
    }
    if (any) sum += round(partial);
  }
  return round(sum);
}

float Reference::WeightGradient(int rank, int row, int k,
                                const std::function<float(int destination, const Slot&)>& value) const {
  const std::int64_t expert = routing_.at(rank, row, k);
  if (expert < 0) return 0.0f;
  const int destination = static_cast<int>(expert / local_experts_);
  const std::int64_t index = SlotIndex(destination, static_cast<int>(expert % local_experts_), rank, row);
  return index < 0 ? 0.0f : value(destination, slots_[destination][index]);
}

}  // namespace test
