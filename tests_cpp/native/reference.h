// What a step has to give, computed plainly from all ranks' indices.
#pragma once

#include <map>

#include "world.h"

namespace world {

struct Reference {
  Shape shape;
  std::vector<std::vector<i64>> indices;  // [rank][token * top_k + k], as given
  std::vector<std::vector<int>> cleaned;
  std::vector<u64> invalid;
  struct Slot {
    u32 source, token, position;
    bool alive;
  };
  // [rank]: counts as prepare writes them, total, what lies in every row that was given out, and each slot by (source,
  // token).
  std::vector<std::vector<i64>> counts;
  std::vector<u64> totals;
  std::vector<std::map<u64, Slot>> rows;
  std::vector<std::map<std::pair<u32, u32>, std::vector<u64>>> slots;

  Reference(const Shape& s, std::vector<std::vector<i64>> given) : shape(s), indices(std::move(given)) {
    cleaned.resize(s.ranks), invalid.resize(s.ranks);
    for (u32 r = 0; r < s.ranks; ++r) {
      for (size_t i = 0; i < indices[r].size(); ++i) {
        const i64 index = indices[r][i];
        bool kept = index >= 0 && index < s.experts;
        invalid[r] += index >= s.experts;
        for (size_t j = i / s.top_k * s.top_k; j < i; ++j) kept = kept && indices[r][j] != index;
        cleaned[r].push_back(kept ? static_cast<int>(index) : -1);
      }
    }
    counts.resize(s.ranks), totals.resize(s.ranks), rows.resize(s.ranks), slots.resize(s.ranks);
    for (u32 d = 0; d < s.ranks; ++d) {
      std::map<std::pair<u32, u32>, u64> unique;
      for (u32 source = 0; source < s.ranks; ++source) {
        for (size_t i = 0; i < cleaned[source].size(); ++i) {
          const int e = cleaned[source][i];
          if (e >= 0 && e / s.local() == d) unique.emplace(std::pair(source, i / s.top_k), unique.size());
        }
      }
      u64 zone = 0;
      for (u32 e = d * s.local(); e < (d + 1) * s.local(); ++e) {
        u64 row = zone;
        for (u32 source = 0; source < s.ranks; ++source) {
          for (size_t i = 0; i < cleaned[source].size(); ++i) {
            if (cleaned[source][i] != static_cast<int>(e)) continue;
            const u32 token = static_cast<u32>(i / s.top_k);
            const bool alive = row < s.capacity && (s.by_place || unique.at({source, token}) < s.capacity);
            rows[d][row] = {source, token, static_cast<u32>(i % s.top_k), alive};
            slots[d][{source, token}].push_back(row);
            ++row;
          }
        }
        const u64 padded = (row - zone + s.alignment - 1) / s.alignment * s.alignment;
        const u64 begin = s.drop ? std::min(zone, s.capacity) : zone,
                  end = s.drop ? std::min(zone + padded, s.capacity) : zone + padded;
        counts[d].push_back(static_cast<i64>(end - begin));
        zone += padded;
      }
      totals[d] = zone;
    }
  }
};

/// Elements of rows as floats, rounded as the row type is.
inline float rounded(RowType type, float value) {
  switch (type) {
    case kBFloat16: {
      u32 bits;
      std::memcpy(&bits, &value, 4);
      bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case kFloat16:
      return static_cast<float>(static_cast<_Float16>(value));
    default:
      return value;
  }
}
inline u32 element_bytes(RowType type) { return type == kFloat32 ? 4 : 2; }
inline void encode(RowType type, float value, u8* to) {
  if (type == kFloat32) {
    std::memcpy(to, &value, 4);
  } else if (type == kBFloat16) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    const u16 half = static_cast<u16>(bits >> 16);
    std::memcpy(to, &half, 2);
  } else {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(to, &half, 2);
  }
}
inline float decode(RowType type, const u8* from) {
  if (type == kFloat32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  u16 half;
  std::memcpy(&half, from, 2);
  if (type == kBFloat16) {
    const u32 bits = u32(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  _Float16 value;
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}

}  // namespace world
