#include "tolerance.h"

#include <math.h>

bool is_output(const fa_problem *problem, int id) {
  return fa_tensor_role_in(problem, FA_PASS_BOUND, id) == FA_ROLE_OUTPUT;
}

/* The inputs, and in their places what the passes make of them in dtype. */
static fa_values run_reference(const fa_case *c, const fa_values *inputs, fa_dtype dtype, const fa_pass *passes,
                               size_t num_passes) {
  fa_problem problem = c->problem;
  const fa_setup setup = {.device = {FA_DEVICE_REFERENCE, 0}};
  fa_values values = values_copy(&problem, inputs);
  problem.dtype = dtype;
  if (problem.bias_heads > 0 && problem.bias_dtype == c->problem.dtype) problem.bias_dtype = dtype;
  for (size_t i = 0; i < num_passes; i++) must_run(&setup, &problem, passes[i], &values);
  return values;
}

static const fa_pass both[] = {FA_PASS_FORWARD, FA_PASS_BACKWARD};

fa_tolerance tolerance_without_naive(const fa_case *c, const fa_values *inputs) {
  static const fa_pass bound = FA_PASS_BOUND;
  return (fa_tolerance){.exact = run_reference(c, inputs, FA_DTYPE_F64, both, 2),
                        .bound = run_reference(c, inputs, c->problem.dtype, &bound, 1)};
}

fa_tolerance tolerance_of(const fa_case *c, const fa_values *inputs) {
  fa_tolerance tolerance = tolerance_without_naive(c, inputs);
  if (c->problem.dtype == FA_DTYPE_F64) return tolerance;
  fa_values naive = run_reference(c, inputs, c->problem.dtype, both, 2);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(&c->problem, id))
      tolerance.naive[id] = values_error(&c->problem, id, &naive, &tolerance.exact);
  values_free(&naive);
  return tolerance;
}

static fa_values inputs_of(const fa_case *c, uint64_t seed) {
  fa_values inputs = values_new(&c->problem);
  values_fill(&inputs, &c->problem, c->problem.dtype, c->fill, seed);
  return inputs;
}

fa_tolerance tolerance_new(const fa_case *c, uint64_t seed) {
  fa_values inputs = inputs_of(c, seed);
  fa_tolerance tolerance = tolerance_of(c, &inputs);
  values_free(&inputs);
  return tolerance;
}

fa_values values_made(const fa_case *c, uint64_t seed, fa_device device) {
  const fa_setup setup = {.device = device};
  fa_values values = inputs_of(c, seed);
  for (int i = 0; i < 2; i++) must_run(&setup, &c->problem, both[i], &values);
  return values;
}

void tolerance_free(fa_tolerance *tolerance) {
  values_free(&tolerance->exact);
  values_free(&tolerance->bound);
}

double tolerance_share(const fa_tolerance *tolerance, const fa_problem *problem, fa_tensor_id id,
                       const fa_values *x) {
  double worst = 0;
  for (int64_t i = values_count(problem, id) - 1; i >= 0; i--) {
    const double got = x->data[id][i], exact = tolerance->exact.data[id][i];
    const double allowed = 2 * tolerance->naive[id] + tolerance->bound.data[id][i];
    const double share = got == exact ? 0 : fabs(got - exact) / allowed;
    worst = share <= worst ? worst : isnan(share) ? INFINITY : share;
  }
  return worst;
}
