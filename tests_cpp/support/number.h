// The token data types of the tests, and their conversions: written here, so that they check the library's.

#ifndef NVTE_EP_TESTS_SUPPORT_NUMBER_H_
#define NVTE_EP_TESTS_SUPPORT_NUMBER_H_

#include <cstdint>
#include <cstring>

namespace test {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

inline std::uint32_t FloatBits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float FloatFromBits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest, ties to even. T is float, BFloat16 or Float16.
template <typename T>
T Narrow(float value);

template <>
inline float Narrow<float>(float value) {
  return value;
}

template <>
inline BFloat16 Narrow<BFloat16>(float value) {
  const std::uint32_t bits = FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  const std::uint32_t tie_to_even = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<std::uint16_t>((bits + tie_to_even) >> 16)};
}

template <>
inline Float16 Narrow<Float16>(float value) {
  const std::uint32_t bits = FloatBits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  // 65520 is the midpoint between the largest binary16 and the next power of two.
  if (magnitude >= FloatBits(65520.0f)) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < FloatBits(6.103515625e-05f)) {
    // Subnormal: adding 0.5 leaves a float whose last bit weighs 2^-24, the spacing of binary16's subnormals.
    const float shifted = FloatFromBits(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (FloatBits(shifted) - FloatBits(0.5f)))};
  }
  const std::uint32_t tie_to_even = 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((magnitude + tie_to_even - (112u << 23)) >> 13))};
}

inline float Widen(float value) { return value; }

inline float Widen(BFloat16 value) { return FloatFromBits(static_cast<std::uint32_t>(value.bits) << 16); }

inline float Widen(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return FloatFromBits(sign | FloatBits(magnitude));
  }
  if (exponent == 31) return FloatFromBits(sign | 0x7f800000u | (mantissa << 13));
  return FloatFromBits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// The value that T keeps of `value`.
template <typename T>
float Rounded(float value) {
  return Widen(Narrow<T>(value));
}

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_NUMBER_H_
