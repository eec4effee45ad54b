// How the elements of a problem meet the tensor cores: 16-bit types as they are, f32 as scaled sums of f16.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../c_src/core/packed.h"

// forward.cu and backward.cu are compiled once for every kind, with FA_KIND naming it. For #if: its PARTS,
// SCALED.
#define FA_PARTS_bf16        1
#define FA_PARTS_f16         1
#define FA_PARTS_f32         2
#define FA_PARTS_f32_as_f16  1
#define FA_SCALED_bf16       0
#define FA_SCALED_f16        0
#define FA_SCALED_f32        1
#define FA_SCALED_f32_as_f16 1
#define FA_JOIN_(a, b)       a##b
#define FA_JOIN(a, b)        FA_JOIN_(a, b)
#define FA_KIND_PARTS        FA_JOIN(FA_PARTS_, FA_KIND)
#define FA_KIND_SCALED       FA_JOIN(FA_SCALED_, FA_KIND)
#define FA_QUOTE_(a)         #a
#define FA_QUOTE(a)          FA_QUOTE_(a)

namespace fa {

// COUNT neighbours in memory, which are moved at once where they lie at a multiple of their size, or of 16
// bytes.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Neighbours {
  T x[COUNT];
};

// Io: the type in memory. Element: what is multiplied. PARTS: how many elements stand for one number, whose sum
// it is. SCALED: operands are copies, scaled by a power of two per head; products go through an accumulator of
// their own (see multiply); and p and ds are scaled too.
namespace kinds {
struct bf16 {
  using Io = __nv_bfloat16;
  using Element = __nv_bfloat16;
  static constexpr int PARTS = 1;
  static constexpr bool SCALED = false;
};
struct f16 {
  using Io = __half;
  using Element = __half;
  static constexpr int PARTS = 1;
  static constexpr bool SCALED = false;
};
struct f32 {  // x = high + low
  using Io = float;
  using Element = __half;
  static constexpr int PARTS = 2;
  static constexpr bool SCALED = true;
};
struct f32_as_f16 {  // x rounded to f16's 11 bits
  using Io = float;
  using Element = __half;
  static constexpr int PARTS = 1;
  static constexpr bool SCALED = true;
};
}  // namespace kinds

constexpr int SCALED_EXPONENT = FA_SCALED_EXPONENT;

__device__ inline float power_of_two(int exponent) {
  return __int_as_float((min(max(exponent, -126), 127) + 127) << 23);
}

// The exponent by which to scale numbers whose largest magnitude has these bits.
__device__ inline int scaling_exponent(uint32_t magnitude_bits) {
  return magnitude_bits == 0 ? 0
                             : min(max(SCALED_EXPONENT + 127 - int(magnitude_bits >> 23), -FA_MOST_EXPONENT),
                                   int(FA_MOST_EXPONENT));
}

__device__ inline uint32_t pack(__half, float a, float b) {
  __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<uint32_t &>(pair);
}
__device__ inline uint32_t pack(__nv_bfloat16, float a, float b) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<uint32_t &>(pair);
}

__device__ inline float2 unpack(__half, uint32_t pair) {
  return __half22float2(reinterpret_cast<__half2 &>(pair));
}
__device__ inline float2 unpack(__nv_bfloat16, uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

// Two numbers as packed elements, one word a part.
template <class Kind>
__device__ inline void split(uint32_t (&parts)[Kind::PARTS], float a, float b) {
  using Element = typename Kind::Element;
  parts[0] = pack(Element(), a, b);
  if constexpr (Kind::PARTS == 2) {
    float2 high = __half22float2(reinterpret_cast<__half2 &>(parts[0]));
    parts[1] = pack(Element(), a - high.x, b - high.y);
  }
}

// Eight numbers, scaled; and the largest of `bits` and the magnitudes of the finite ones, as bits.
template <class Kind>
__device__ inline void split_eight(uint4 (&parts)[Kind::PARTS], const float (&x)[8], float scale) {
  uint32_t words[4][Kind::PARTS];
#pragma unroll
  for (int i = 0; i < 4; i++) split<Kind>(words[i], x[i * 2] * scale, x[i * 2 + 1] * scale);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    parts[part] = make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
}
__device__ inline uint32_t largest_finite(const float (&x)[8], uint32_t bits) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (isfinite(x[i])) bits = max(bits, __float_as_uint(fabsf(x[i])));
  return bits;
}

}  // namespace fa
