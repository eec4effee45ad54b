/* How f32 numbers become scaled f16, wherever that is done: by kernels and, on the way to them, by the
 * processor. Plain C that nvcc compiles too. */
#ifndef FA_CORE_PACKED_H
#define FA_CORE_PACKED_H

enum {
  /* Scaled numbers have their largest in [2^14, 2^15): far from f16's largest number, and with the low part of
   * all but the smallest numbers still normal. */
  FA_SCALED_EXPONENT = 14,
  /* Of the power of two that scales. Zeros, and rows that f32 has few bits for, want a larger one. */
  FA_MOST_EXPONENT = 100,
};

#endif
