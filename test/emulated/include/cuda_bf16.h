/* bf16 on the CPU: conversions round to nearest, ties to even, as the GPU's do. */
#ifndef FA_EMULATED_CUDA_BF16_H
#define FA_EMULATED_CUDA_BF16_H

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    const uint32_t all = emulated::bits_of(x);
    bits = (all & 0x7fffffffu) > 0x7f800000u ? 0x7fff : uint16_t((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
  }
  operator float() const { return emulated::float_of(uint32_t(bits) << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {float(x.x), float(x.y)}; }
inline float __low2float(__nv_bfloat162 x) { return float(x.x); }
inline float __high2float(__nv_bfloat162 x) { return float(x.y); }

#endif
