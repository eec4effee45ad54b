/* What is asked of the numbers in the tensors bands and key_lengths, where they can be looked at. */
#ifndef FA_CORE_BANDS_H
#define FA_CORE_BANDS_H

#include "../flash_attention.h"

/* words [bands_batch, num_bands, 6]: whether every band that has cells lies in the problem, and no cell lies in
 * two bands of a batch, in O(n log n) for n bands. The error names the bands by their numbers. */
fa_status fa_bands_check(const fa_problem *problem, const void *words, fa_error *error);

/* lengths [lengths_batch]: whether every one is from 0 to seqlen_k. The error names the batch. */
fa_status fa_key_lengths_check(const fa_problem *problem, const void *lengths, fa_error *error);

#endif
