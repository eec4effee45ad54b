/*
 * The tolerance: |x - exact| <= 2 * max |naive - exact| + bound, element by element. naive is unfused attention
 * in the same type, which is what the type can do with these data. bound is what rounding may do to that
 * element in any correct program, whatever luck the naive run had: FA_PASS_BOUND, derived in
 * c_src/cpu/reference_bound.h. In f64 the oracle and the naive run are the same, and the bound stands alone.
 */
#ifndef FA_TEST_TOLERANCE_H
#define FA_TEST_TOLERANCE_H

#include "harness.h"

/* Whether the forward or the backward of the problem writes it. */
bool is_output(const fa_problem *problem, int id);

typedef struct fa_tolerance {
  fa_values exact; /* inputs and outputs, from the oracle in f64 */
  fa_values bound;
  double naive[FA_NUM_TENSORS]; /* max |naive - exact| */
} fa_tolerance;

/* Of the case with these inputs, and with those that values_fill draws with that seed. */
fa_tolerance tolerance_of(const fa_case *c, const fa_values *inputs);
fa_tolerance tolerance_new(const fa_case *c, uint64_t seed);

/* With naive errors of 0: the bound alone has to do. */
fa_tolerance tolerance_without_naive(const fa_case *c, const fa_values *inputs);

void tolerance_free(fa_tolerance *tolerance);

/* The same inputs, and in their places what the passes make of them on a device. */
fa_values values_made(const fa_case *c, uint64_t seed, fa_device device);

/* The largest error of that tensor, as a part of what is allowed: what is above 1 is wrong. */
double tolerance_share(const fa_tolerance *tolerance, const fa_problem *problem, fa_tensor_id id,
                       const fa_values *x);

#endif
