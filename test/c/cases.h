/*
 * The one case table. Correctness, gradients, sanitizers and benchmarks draw their problems from here, for
 * every device. A row leaves the dtype open: whoever loops over the table also loops over dtypes.
 */
#ifndef FA_TEST_CASES_H
#define FA_TEST_CASES_H

#include "../../c_src/flash_attention.h"

typedef enum fa_fill {
  FILL_NORMAL = 0, /* mean 0, variance 1 */
  FILL_LARGE,      /* the same times 30: a softmax that is all but one-hot */
  FILL_LOGNORMAL,  /* rows of very different size */
} fa_fill;

typedef enum fa_layout {
  LAYOUT_CONTIGUOUS = 0,
  LAYOUT_STRIDED = 1 << 0,  /* heads before rows, and gaps after rows, heads and batches */
  LAYOUT_ALIGNED = 1 << 1,  /* data at 64 bytes, as allocators give it, and gaps of whole 16 bytes; without it
                               data is aligned to its element and to nothing more */
  LAYOUT_REVERSED = 1 << 2, /* beside LAYOUT_STRIDED: the last row first, by a negative stride */
} fa_layout;

enum fa_case_tag {
  CASE_QUICK = 1 << 0,    /* one of the few that run where time is short, such as under sanitizers */
  CASE_TINY = 1 << 1,     /* small enough to differentiate element by element */
  CASE_SPEED = 1 << 2,    /* for benchmarks: far too large for the reference */
  CASE_F32_BIAS = 1 << 3, /* a bias of floats is of f32 whatever the dtype is, not of the dtype */
};

typedef struct fa_case {
  const char *name;
  unsigned tags;
  fa_fill fill;
  fa_layout layout;
  fa_problem problem; /* complete but for dtype, which is f32 */
} fa_case;

/* The table and, through num_cases, its length. */
const fa_case *fa_cases(size_t *num_cases);

/* The case in a type, and its bias, unless it is of u8, in the type that goes with it. */
fa_case fa_case_in(const fa_case *c, fa_dtype dtype);

/* Whether it may have FA_PRECISION_DEFAULT: f32, but not scores of large numbers, which then err by more than a
 * bound of the first order knows. */
bool fa_case_may_be_rounded(const fa_case *c);

/* A case, dtype included, that depends on these numbers alone: awkward, everything combined. It is small;
 * lengths that are growth times as long, and more heads, make a GPU take several tiles a multiprocessor. */
fa_case fa_case_random(uint64_t seed, uint64_t index, int64_t growth);

/* Makes of a case one with its options for a forward of few rows whose keys lie on pages, as many more as there
 * are fewer rows; false where it has no rows or no keys. */
bool fa_case_put_on_pages(fa_case *c, uint64_t seed, uint64_t index);

#endif
