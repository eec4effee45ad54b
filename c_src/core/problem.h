/* What every backend asks of a problem. Plain C that nvcc compiles too. */
#ifndef FA_CORE_PROBLEM_H
#define FA_CORE_PROBLEM_H

#include "../flash_attention.h"

/* begin <= x < end; empty where end <= begin */
typedef struct fa_range {
  int64_t begin, end;
} fa_range;

/* Replaces every option that has several spellings by one: scale 0 by its default, windows by the smallest
 * that show the same columns, so that sums of positions and windows cannot overflow. */
void fa_problem_canonicalise(fa_problem *problem);

/* The columns that a row sees, and the rows that see a column. The problem must be canonical. */
static inline fa_range fa_visible_columns(const fa_problem *problem, int64_t row) {
  int64_t diagonal = row + problem->seqlen_k - problem->seqlen_q;
  int64_t begin = diagonal - problem->window_left, end = diagonal + problem->window_right + 1;
  return (fa_range){begin < 0 ? 0 : begin, end > problem->seqlen_k ? problem->seqlen_k : end};
}

static inline fa_range fa_visible_rows(const fa_problem *problem, int64_t column) {
  int64_t diagonal = column + problem->seqlen_q - problem->seqlen_k;
  int64_t begin = diagonal - problem->window_right, end = diagonal + problem->window_left + 1;
  return (fa_range){begin < 0 ? 0 : begin, end > problem->seqlen_q ? problem->seqlen_q : end};
}

/* The type of lse and delta. */
static inline fa_dtype fa_problem_stat_dtype(const fa_problem *problem) {
  return problem->dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32;
}

#endif
