/* f16 on the CPU: conversions round to nearest, ties to even, as the GPU's do. */
#ifndef FA_EMULATED_CUDA_FP16_H
#define FA_EMULATED_CUDA_FP16_H

#include <cstdint>
#include <cstring>

#include "vector_types.h"

namespace emulated {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

extern float halves[1 << 16]; /* every f16 as f32 */

inline uint16_t half_of(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* from 65520 on */
  if (magnitude < 0x38800000u) /* below 2^-14 multiples of 2^-24 are left, as beside 0.5 */
    return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  return uint16_t(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13));
}

}  // namespace emulated

struct __half {
  uint16_t bits;
  __half() = default;
  __half(float x) : bits(emulated::half_of(x)) {}
  operator float() const { return emulated::halves[bits]; }
};
struct alignas(4) __half2 {
  __half x, y;
};
typedef __half half;
typedef __half2 half2;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline float __low2float(__half2 x) { return float(x.x); }
inline float __high2float(__half2 x) { return float(x.y); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}

#endif
