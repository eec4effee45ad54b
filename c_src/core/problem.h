/* What every backend asks of a problem. */
#ifndef FA_CORE_PROBLEM_H
#define FA_CORE_PROBLEM_H

#include "../flash_attention.h"
#include "mask.h"

/* Replaces every option that has several spellings by one: scale 0 by its default, windows by the smallest
 * that show the same columns, so that sums of positions and windows cannot overflow. */
void fa_problem_canonicalise(fa_problem *problem);

/* What the rows of a problem without bands see, and what bounds each of its bands. The problem must be
 * canonical, or sums of positions and windows overflow. */
static inline fa_band fa_problem_band(const fa_problem *problem) {
  return (fa_band){0, problem->seqlen_q, 0, problem->seqlen_k, problem->window_left, problem->window_right};
}

/* The sinks of a row: those of all rows, then its own. */
static inline int64_t fa_problem_num_sinks(const fa_problem *problem) {
  return problem->num_sinks + problem->num_row_sinks;
}

/* Whether keys lie in a cache, of which batches have as many as lengths or pages say. */
static inline bool fa_problem_reads_cache(const fa_problem *problem) {
  return problem->lengths_batch > 0 || problem->max_pages > 0;
}

/* Whether the forward of few rows may round scores in other ways than a backward does: exp(score - lse) of f32
 * and f64 shows that where scores are huge. */
static inline bool fa_problem_rounds_freely(const fa_problem *problem) {
  const bool is_short = problem->dtype == FA_DTYPE_BF16 || problem->dtype == FA_DTYPE_F16;
  return is_short || problem->inference || fa_problem_reads_cache(problem);
}

/* The type of lse and delta. */
static inline fa_dtype fa_problem_stat_dtype(const fa_problem *problem) {
  return problem->dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32;
}

#endif
