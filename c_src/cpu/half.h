/*
 * The 16-bit types: f16 (IEEE binary16) and bf16 (the upper half of an f32) to f32 and back.
 *
 * To f32 is exact. From f32 rounds to nearest, ties to even: denormals are kept, what is too large becomes
 * infinity, and a NaN stays a NaN. Needs no instruction set, and no branches, so that the compiler vectorises
 * a loop over any of these.
 */
#ifndef FA_CPU_HALF_H
#define FA_CPU_HALF_H

#include <stdint.h>
#include <string.h>

static inline float fa_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t fa_f32_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float fa_bf16_to_f32(uint16_t half) { return fa_f32_from_bits((uint32_t)half << 16); }

static inline uint16_t fa_f32_to_bf16(float value) {
  uint32_t bits = fa_f32_to_bits(value);
  uint32_t nan = bits >> 16 | 0x40; /* quiet, so that cutting the payload leaves a NaN */
  /* Just under half a unit, and the rest where the unit is odd. A carry runs into the exponent, as it should.
   */
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float fa_f16_to_f32(uint16_t half) {
  const uint32_t rebias = (uint32_t)(127 - 15) << 23;
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
  uint32_t normal = (magnitude << 13) + rebias;
  uint32_t special = normal + rebias;                                       /* inf and NaN: exponent 255 */
  uint32_t denormal = fa_f32_to_bits((float)(int32_t)magnitude * 0x1p-24f); /* exact, and zero too */
  uint32_t bits = magnitude < 0x0400 ? denormal : magnitude < 0x7c00 ? normal : special;
  return fa_f32_from_bits(sign | bits);
}

static inline uint16_t fa_f32_to_f16(float value) {
  const uint32_t rebias = (uint32_t)(127 - 15) << 23;
  uint32_t bits = fa_f32_to_bits(value);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - rebias + 0x0fff + (magnitude >> 13 & 1)) >> 13;
  /* Beside 0.5 a unit is 2^-24, the smallest f16: the addition itself rounds, and leaves the f16's bits. */
  uint32_t denormal = fa_f32_to_bits(fa_f32_from_bits(magnitude) + 0.5f) - fa_f32_to_bits(0.5f);
  uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x03ff);
  uint32_t half = magnitude < 0x38800000    ? denormal /* 2^-14 */
                  : magnitude < 0x477ff000  ? normal   /* 65520, halfway from the largest f16 to the next */
                  : magnitude <= 0x7f800000 ? 0x7c00
                                            : nan;
  return (uint16_t)(sign | half);
}

#endif
