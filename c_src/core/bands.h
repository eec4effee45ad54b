/* What is asked of the numbers in the tensor bands, where they can be looked at. */
#ifndef FA_CORE_BANDS_H
#define FA_CORE_BANDS_H

#include "../flash_attention.h"

/* words [bands_batch, num_bands, 6]: whether every band that has cells lies in the problem, and no cell lies in
 * two bands of a batch, in O(n log n) for n bands. The error names the bands by their numbers. */
fa_status fa_bands_check(const fa_problem *problem, const void *words, fa_error *error);

#endif
