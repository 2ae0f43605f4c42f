/* float16 as host code of EP programs uses it, for machines without CUDA. SPDX-License-Identifier: Apache-2.0 */

#ifndef NVTE_EP_HOST_CUDA_FP16_H_
#define NVTE_EP_HOST_CUDA_FP16_H_

#include <stdint.h>
#include <string.h>

/** The bits of a float16. */
typedef struct __half_raw {
  unsigned short x;
} __half_raw;

/** The bits of the float16 nearest to a float, of two the even one; NaN stays NaN. */
static inline unsigned short nvte_ep_host_fp16_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;
    return (unsigned short)half;
  }
  if (magnitude >= 0x477ff000u) {
    half = 0x7c00u; /* 65520 and more round to infinity. */
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude > 0x33000000u) {
    /* A denormal: a multiple of 2^-24. */
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t digits = (magnitude & 0x7fffffu) | 0x800000u;
    half = digits >> shift;
    const uint32_t rest = digits & ((1u << shift) - 1u);
    const uint32_t middle = 1u << (shift - 1u);
    if (rest > middle || (rest == middle && (half & 1u))) half++;
  } else {
    half = 0; /* 2^-25 and less round to zero. */
  }
  return (unsigned short)(sign | half);
}

/** The value of a float16. */
static inline float nvte_ep_host_fp16_value(unsigned short bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t digits = bits & 0x3ffu;
  float value;
  uint32_t wide;
  if (exponent == 0) {
    value = (float)digits / 16777216.0f;
    memcpy(&wide, &value, sizeof wide);
    wide |= sign;
  } else {
    wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | digits << 13;
  }
  memcpy(&value, &wide, sizeof value);
  return value;
}

#ifdef __cplusplus

/** A float16. */
struct __half {
  unsigned short __x;

  __half() = default;
  __half(float value) : __x(nvte_ep_host_fp16_bits(value)) {}
  __half(double value) : __half(float(value)) {}
  __half(int value) : __half(float(value)) {}
  __half(const __half_raw &raw) : __x(raw.x) {}
  operator float() const { return nvte_ep_host_fp16_value(__x); }
};

#else

typedef struct __half {
  unsigned short __x;
} __half;

#endif

typedef __half half;

static inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  value.__x = bits;
  return value;
}
static inline unsigned short __half_as_ushort(__half value) { return value.__x; }
static inline __half __float2half(float value) { return __ushort_as_half(nvte_ep_host_fp16_bits(value)); }
static inline __half __float2half_rn(float value) { return __float2half(value); }
static inline float __half2float(__half value) { return nvte_ep_host_fp16_value(value.__x); }

#endif /* NVTE_EP_HOST_CUDA_FP16_H_ */
