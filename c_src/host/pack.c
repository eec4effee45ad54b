/* Packing by AVX2 and F16C: a first pass over a row finds its scale, a second one rounds. Other processors do
 * not pack. */
#include "pack.h"

#include <string.h>

#include "../core/backend.h"
#include "../core/packed.h"
#include "../core/processors.h"

size_t fa_packed_bytes(int64_t head_dim) { return (size_t)head_dim * 2 + sizeof(float); }

#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_F16C __attribute__((target("avx2,f16c")))

/* Memory that is in no cache comes fast enough only when asked for so far ahead (bench/results/host_log.md). */
enum { AHEAD_BYTES = 1024, FAR_AHEAD_BYTES = 8192 };

enum { LANES = 8, F32_BIAS = 127 };

bool fa_can_pack(int64_t head_dim) {
  return head_dim % LANES == 0 && __builtin_cpu_supports("avx2") && fa_has_f16c() && !fa_is_disabled("avx2");
}

/* Returns the bits of a row's largest finite magnitude. */
WITH_F16C static uint32_t largest_finite(const char *from, int64_t head_dim) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), infinite = _mm256_set1_epi32(0x7f800000);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < head_dim; i += LANES, from += LANES * sizeof(float)) {
    _mm_prefetch(from + AHEAD_BYTES, _MM_HINT_T0);
    _mm_prefetch(from + FAR_AHEAD_BYTES, _MM_HINT_T1);
    const __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)from), magnitude);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, _mm256_cmpgt_epi32(infinite, bits)));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
  return (uint32_t)_mm_cvtsi128_si32(four);
}

static float power_of_two(int exponent) {
  const uint32_t bits = (uint32_t)(exponent + F32_BIAS) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

WITH_F16C void fa_pack(char *to, const char *from, size_t num_rows, int64_t head_dim) {
  for (; num_rows > 0; num_rows--) {
    const int wanted = FA_SCALED_EXPONENT + F32_BIAS - (int)(largest_finite(from, head_dim) >> 23);
    const int exponent = wanted < FA_MOST_EXPONENT ? wanted : FA_MOST_EXPONENT;
    const __m256 scale = _mm256_set1_ps(power_of_two(exponent));
    for (int64_t i = 0; i < head_dim; i += LANES, from += LANES * sizeof(float), to += LANES * 2) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps((const float *)from), scale);
      _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    const float unscale = power_of_two(-exponent);
    memcpy(to, &unscale, sizeof unscale);
    to += sizeof unscale;
  }
}
#else
bool fa_can_pack(int64_t head_dim) {
  (void)head_dim;
  return false;
}

void fa_pack(char *to, const char *from, size_t num_rows, int64_t head_dim) {
  (void)to, (void)from, (void)num_rows, (void)head_dim;
}
#endif
