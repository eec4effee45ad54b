/* Arithmetic of sizes. Plain C that nvcc compiles too. */
#ifndef FA_CORE_INTEGERS_H
#define FA_CORE_INTEGERS_H

#include <stdint.h>

static inline int64_t fa_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fa_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* a / b and x / multiple, rounded up; a and x are not negative, b and multiple are positive. */
static inline int64_t fa_divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t fa_round_up(int64_t x, int64_t multiple) { return fa_divide_up(x, multiple) * multiple; }

#endif
