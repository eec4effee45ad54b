/*
 * The tolerance is what the type can do: max |x - oracle| <= 2 * max |naive - oracle| + tiny, where naive is
 * unfused attention in the same type.
 */
#ifndef FA_TEST_TOLERANCE_H
#define FA_TEST_TOLERANCE_H

#include "harness.h"

/* What forward and backward write. */
enum { NUM_OUTPUTS = 6 };
extern const fa_tensor_id outputs[NUM_OUTPUTS];

/* Forward and backward of inputs that tensors of type round_to hold, in arithmetic of dtype. Sums over head_dim
 * begin at column first; that changes their rounding and nothing else. */
fa_values run_reference(const fa_case *c, fa_dtype dtype, fa_dtype round_to, uint64_t seed, int64_t first);

/* The error of naive attention in the problem's type, tensor by tensor, where that is more than errors says.
 * f64 has no better arithmetic to be measured by: its error is that of f32 by the ratio of their units, and
 * half as much again for the oracle's own. */
void raise_naive_errors(const fa_case *c, uint64_t seed, int64_t first, double errors[FA_NUM_TENSORS]);

/* What an error of that tensor may be. tiny: values_tiny. errors: what raise_naive_errors found with that seed;
 * it is raised further where error is larger and the tensor small. */
double tolerance_of(const fa_case *c, fa_tensor_id id, uint64_t seed, double error, double tiny,
                    double errors[FA_NUM_TENSORS]);

#endif
