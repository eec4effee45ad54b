/* Sums of parts in f32 (f64 of f64): part [count] of any type, sum [count]. */
#include <string.h>

#include "half.h"
#include "sum.h"

/* One step, of elements that SUM's type holds as they are or after being converted. */
#define STEP(ELEMENT, SUM, WIDEN, NARROW)                             \
  do {                                                                \
    ELEMENT *parts = part;                                            \
    SUM *sums = sum;                                                  \
    if (step == FA_SUM_BEGIN)                                         \
      for (int64_t i = 0; i < count; i++) sums[i] = WIDEN(parts[i]);  \
    else if (step == FA_SUM_ADD)                                      \
      for (int64_t i = 0; i < count; i++) sums[i] += WIDEN(parts[i]); \
    else                                                              \
      for (int64_t i = 0; i < count; i++) parts[i] = NARROW(sums[i]); \
  } while (0)

#define AS_IT_IS(x) (x)

fa_status fa_cpu_sum(int32_t index, fa_sum_step step, void *sum, void *part, fa_dtype dtype, int64_t count,
                     void *stream, fa_error *error) {
  (void)index, (void)stream, (void)error;
  switch (dtype) {
    case FA_DTYPE_F64: STEP(double, double, AS_IT_IS, AS_IT_IS); break;
    case FA_DTYPE_F32: STEP(float, float, AS_IT_IS, AS_IT_IS); break;
    case FA_DTYPE_BF16: STEP(uint16_t, float, fa_bf16_to_f32, fa_f32_to_bf16); break;
    default: STEP(uint16_t, float, fa_f16_to_f32, fa_f32_to_f16); break;
  }
  return FA_STATUS_OK;
}
