/* Which problems are worth the kernels for few rows, which of these, and into how many parts keys are split. */
#ifndef FA_CUDA_DECODE_H
#define FA_CUDA_DECODE_H

#include <stdbool.h>

#include "kernels.h"

/* Whether a kernel for few rows that takes the problem is worth it: where keys lie on pages, which the other
 * kernels do not find; where they end at lengths, and few rows share those of a key/value head; or where tiles
 * of rows would leave multiprocessors idle. */
bool fa_cuda_pays_in_parts(const fa_problem *problem, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                           bool can_cluster);

/* Into how many parts a forward had better split keys whose tiles of rows leave multiprocessors idle: 1 where
 * none would gain, or where so few rows are left to the kernels for few rows. (cuda_log.md, "Keys in parts".)
 */
int64_t fa_cuda_key_parts(const fa_problem *problem, int64_t num_multiprocessors);

/* How many packed rows, those of all query heads of a key/value head, the problem has. */
int64_t fa_cuda_packed_rows(const fa_problem *problem);

/* What its keys and values have; where they end at lengths, at most. */
double fa_cuda_key_bytes(const fa_problem *problem);

/* Whether a backward of few rows is worth it. */
bool fa_cuda_pays_for_few_rows(const fa_problem *problem, const fa_cuda_kernel *kernel);

/* Into how many parts it splits the columns. */
int32_t fa_cuda_choose_dq_parts(const fa_problem *problem, const fa_cuda_kernel *kernel,
                                int64_t num_multiprocessors);

/* The parts of a canonical problem's keys. can_cluster: whether blocks of threads merge in clusters there. */
fa_cuda_parts fa_cuda_choose_parts(const fa_problem *problem, const fa_cuda_kernel *kernel,
                                   int64_t num_multiprocessors, bool can_cluster);

#endif
