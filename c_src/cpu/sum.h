/* The CPU's part of fa_sum_parts. */
#ifndef FA_CPU_SUM_H
#define FA_CPU_SUM_H

#include "../flash_attention.h"

fa_status fa_cpu_sum(const fa_sum *sum, int32_t index, void *stream, fa_error *error);

#endif
