/* bfloat16 as host code of EP programs uses it, for machines without CUDA. SPDX-License-Identifier: Apache-2.0 */

#ifndef NVTE_EP_HOST_CUDA_BF16_H_
#define NVTE_EP_HOST_CUDA_BF16_H_

#include <stdint.h>
#include <string.h>

/** The bits of a bfloat16. */
typedef struct __nv_bfloat16_raw {
  unsigned short x;
} __nv_bfloat16_raw;

/** The bits of the bfloat16 nearest to a float, of two the even one; NaN stays NaN. */
static inline unsigned short nvte_ep_host_bf16_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/** The value of a bfloat16. */
static inline float nvte_ep_host_bf16_value(unsigned short bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

#ifdef __cplusplus

/** A bfloat16. */
struct __nv_bfloat16 {
  unsigned short __x;

  __nv_bfloat16() = default;
  __nv_bfloat16(float value) : __x(nvte_ep_host_bf16_bits(value)) {}
  __nv_bfloat16(double value) : __nv_bfloat16(float(value)) {}
  __nv_bfloat16(int value) : __nv_bfloat16(float(value)) {}
  __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x) {}
  operator float() const { return nvte_ep_host_bf16_value(__x); }
};

#else

typedef struct __nv_bfloat16 {
  unsigned short __x;
} __nv_bfloat16;

#endif

typedef __nv_bfloat16 nv_bfloat16;

static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 value;
  value.__x = bits;
  return value;
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat16 __float2bfloat16(float value) { return __ushort_as_bfloat16(nvte_ep_host_bf16_bits(value)); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __float2bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return nvte_ep_host_bf16_value(value.__x); }

#endif /* NVTE_EP_HOST_CUDA_BF16_H_ */
