// Numbers that are added to scores as a part of the product that they come from: three 16-bit elements hold one
// as exactly as f32 does, and their product with factors gives it back. Beside q's and k's own elements that is
// one step more along head_dim, and costs nothing where exponentials are made. Scores are then in units of q·k.
#pragma once

#include <type_traits>

#include "kinds.cuh"

namespace fa {

// What each of the elements counts. Those of f16 reach beyond its exponents.
template <class Element>
__device__ inline float term_factor(int part) {
  if (std::is_same<Element, __half>::value) return part == 0 ? 0x1p15f : part == 1 ? 0x1p4f : 0x1p-7f;
  return 1;
}

// A number up to 2^30 as elements, each of them as a number.
template <class Element>
struct TermParts {
  float of[3];

  __device__ explicit TermParts(float x) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const float factor = term_factor<Element>(i);
      of[i] = unpack(Element(), pack(Element(), x * (1 / factor), 0)).x;
      x = isfinite(x) ? fmaf(-of[i], factor, x) : 0;
    }
  }
};

// A head's slope, where its products with distances are terms: no larger than f16's parts can hold them, over a
// scale of that size.
__device__ inline float bounded_slope(float slope, float scale) {
  const float most = 0x1p23f * scale;
  return isfinite(slope) ? fminf(fmaxf(slope, -most), most) : slope;
}

// The number whose parts are the first three elements of these words.
template <class Element>
__device__ inline float number_of_parts(uint2 words) {
  const float2 x = unpack(Element(), words.x), y = unpack(Element(), words.y);
  return fmaf(x.x, term_factor<Element>(0), fmaf(x.y, term_factor<Element>(1), y.x * term_factor<Element>(2)));
}

}  // namespace fa
