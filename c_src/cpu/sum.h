/* The CPU's part of fa_sum. */
#ifndef FA_CPU_SUM_H
#define FA_CPU_SUM_H

#include "../flash_attention.h"

fa_status fa_cpu_sum(int32_t index, fa_sum_step step, void *sum, void *part, fa_dtype dtype, int64_t count,
                     void *stream, fa_error *error);

#endif
