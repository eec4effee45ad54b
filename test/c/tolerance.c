#include "tolerance.h"

#include <math.h>

const fa_tensor_id outputs[NUM_OUTPUTS] = {FA_TENSOR_O,  FA_TENSOR_LSE, FA_TENSOR_DQ,
                                           FA_TENSOR_DK, FA_TENSOR_DV,  FA_TENSOR_DSINK};

fa_values run_reference(const fa_case *c, fa_dtype dtype, fa_dtype round_to, uint64_t seed, int64_t first) {
  fa_problem problem = c->problem;
  problem.dtype = dtype;
  const fa_setup setup = {.device = {FA_DEVICE_REFERENCE, 0}};
  fa_values values = values_new(&problem);
  values_fill(&values, &problem, round_to, c->fill, seed);
  values_rotate(&values, &problem, first);
  must_run(&setup, &problem, FA_PASS_FORWARD, &values);
  must_run(&setup, &problem, FA_PASS_BACKWARD, &values);
  values_rotate(&values, &problem, problem.head_dim - first);
  return values;
}

void raise_naive_errors(const fa_case *c, uint64_t seed, int64_t first, double errors[FA_NUM_TENSORS]) {
  const bool f64 = c->problem.dtype == FA_DTYPE_F64;
  const fa_dtype dtype = f64 ? FA_DTYPE_F32 : c->problem.dtype;
  fa_values naive = run_reference(c, dtype, dtype, seed, first);
  fa_values exact = run_reference(c, FA_DTYPE_F64, dtype, seed, 0);
  for (size_t i = 0; i < NUM_OUTPUTS; i++) {
    const double error = values_error(&c->problem, outputs[i], &naive, &exact) * (f64 ? 1.5 * 0x1p-29 : 1);
    errors[outputs[i]] = fmax(errors[outputs[i]], error);
  }
  values_free(&naive);
  values_free(&exact);
}

/* The largest of a few errors says little about how large errors are: a tensor of fewer elements than this is
 * measured by more runs, so many elements in all, of other data and of the same data summed in another order.
 * Where rows are not alike, the errors of every tensor stand in the few rows where scores are near each other,
 * or that are large. */
enum { ENOUGH_ERRORS = 64, ERRORS_OF_UNEVEN = 8 };

double tolerance_of(const fa_case *c, fa_tensor_id id, uint64_t seed, double error, double tiny,
                    double errors[FA_NUM_TENSORS]) {
  int64_t count = values_count(&c->problem, id);
  if (c->fill != FILL_NORMAL && count > ERRORS_OF_UNEVEN) count = ERRORS_OF_UNEVEN;
  for (int64_t draw = 1; error > 2 * errors[id] + tiny && draw * count < ENOUGH_ERRORS; draw++) {
    raise_naive_errors(c, seed, draw % c->problem.head_dim, errors);
    raise_naive_errors(c, seed + (uint64_t)draw, 0, errors);
  }
  return 2 * errors[id] + tiny;
}
