/* Sums of parts [count] of any type, in f32 (f64 of f64). */
#include <string.h>

#include "half.h"
#include "sum.h"

enum { AT_ONCE = 1024 }; /* elements whose sum stays in the cache while all parts are added to it */

/* What is added first leaves -0 as it is. */
static double empty_sum(const fa_sum *sum) { return sum->num_parts ? -0.0 : 0.0; }

/* Of elements that the type of sums holds as they are or after being converted. */
#define SUM_PARTS(ELEMENT, SUM, WIDEN, NARROW)                                          \
  do {                                                                                  \
    SUM sums[AT_ONCE];                                                                  \
    for (int64_t first = 0; first < sum->count; first += AT_ONCE) {                     \
      const int64_t left = sum->count - first, count = left < AT_ONCE ? left : AT_ONCE; \
      if (sum->before)                                                                  \
        memcpy(sums, (const SUM *)sum->before + first, (size_t)count * sizeof(SUM));    \
      else                                                                              \
        for (int64_t i = 0; i < count; i++) sums[i] = (SUM)empty_sum(sum);              \
      for (int32_t p = 0; p < sum->num_parts; p++) {                                    \
        const ELEMENT *part = (const ELEMENT *)sum->parts[p] + first;                   \
        for (int64_t i = 0; i < count; i++) sums[i] += WIDEN(part[i]);                  \
      }                                                                                 \
      if (sum->is_unrounded) {                                                          \
        memcpy((SUM *)sum->total + first, sums, (size_t)count * sizeof(SUM));           \
      } else {                                                                          \
        ELEMENT *total = (ELEMENT *)sum->total + first;                                 \
        for (int64_t i = 0; i < count; i++) total[i] = NARROW(sums[i]);                 \
      }                                                                                 \
    }                                                                                   \
  } while (0)

#define AS_IT_IS(x) (x)

fa_status fa_cpu_sum(const fa_sum *sum, int32_t index, void *stream, fa_error *error) {
  (void)index, (void)stream, (void)error;
  switch (sum->dtype) {
    case FA_DTYPE_F64: SUM_PARTS(double, double, AS_IT_IS, AS_IT_IS); break;
    case FA_DTYPE_F32: SUM_PARTS(float, float, AS_IT_IS, AS_IT_IS); break;
    case FA_DTYPE_BF16: SUM_PARTS(uint16_t, float, fa_bf16_to_f32, fa_f32_to_bf16); break;
    default: SUM_PARTS(uint16_t, float, fa_f16_to_f32, fa_f32_to_f16); break;
  }
  return FA_STATUS_OK;
}
