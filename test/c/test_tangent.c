/*
 * FA_PASS_TANGENT of the CPU, the derivative of the forward algorithm itself, in f64: against the oracle's
 * backward, through the identity <o_tangent, dout> + <lse_tangent, dlse> = <dq, tangent_q> + ..., and against
 * central differences of the CPU's forward along the same direction. Of the table of cases, and of random ones.
 *
 *   test_tangent [SWEEP SEED]   (random ones alone, so many)
 */
#include <math.h>
#include <stdlib.h>

#include "../../c_src/core/tensors.h"
#include "check.h"
#include "harness.h"

static const fa_setup reference = {.device = {FA_DEVICE_REFERENCE, 0}};
static const uint64_t seed = 11;

/* Whether the problem has the tensor, and its gradient is known. */
static bool is_differentiated(const fa_problem *p, int id) {
  return fa_tensor_role_in(p, FA_PASS_FORWARD, id) == FA_ROLE_INPUT && fa_tensor_gradient(id) >= 0;
}

/* <x, y>, where y may be of one batch for all, or of none; adds |x| |y| to size */
static double inner(const fa_problem *p, const fa_values *x, fa_tensor_id a, fa_tensor_id b, double *size) {
  const int64_t count = values_count(p, b);
  double sum = 0;
  for (int64_t i = count ? values_count(p, a) - 1 : -1; i >= 0; i--) {
    sum += x->data[a][i] * x->data[b][i % count];
    *size += fabs(x->data[a][i] * x->data[b][i % count]);
  }
  return sum;
}

/* tangent: the inputs, and what the tangent pass has made of them */
static void test_identity(const fa_case *c, const fa_values *tangent) {
  const fa_problem *p = &c->problem;
  fa_values x = values_copy(p, tangent);
  must_run(&reference, p, FA_PASS_FORWARD, &x);
  must_run(&reference, p, FA_PASS_BACKWARD, &x);
  double size = 0, sums_size = 0, gradients = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_differentiated(p, id)) continue;
    const int gradient = fa_tensor_gradient(id);
    gradients += inner(p, &x, gradient, fa_tensor_tangent(id), fa_is_sum(p, gradient) ? &sums_size : &size);
  }
  const double along = inner(p, tangent, FA_TENSOR_O_TANGENT, FA_TENSOR_DOUT, &size) +
                       inner(p, tangent, FA_TENSOR_LSE_TANGENT, FA_TENSOR_DLSE, &size);
  /* Sums are f32, whatever the arithmetic. */
  const double tolerance = 1e-13 * size + 0x1p-24 * sums_size;
  CHECK(fabs(along - gradients) <= tolerance, "%s: the tangents are %.3g from the gradients, of size %.3g",
        c->name, along - gradients, size);
  CHECK(values_error(p, FA_TENSOR_O, tangent, &x) <= 1e-10, "%s: o of the tangent pass", c->name);
  CHECK(values_error(p, FA_TENSOR_LSE, tangent, &x) <= 1e-10, "%s: lse of the tangent pass", c->name);
  values_free(&x);
}

/* o and lse at the point that lies step times the tangents away. */
static fa_values forward_at(const fa_case *c, const fa_setup *setup, const fa_values *inputs, double step) {
  fa_values x = values_copy(&c->problem, inputs);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    for (int64_t j = values_count(&c->problem, id) - 1; is_differentiated(&c->problem, id) && j >= 0; j--)
      x.data[id][j] += step * x.data[fa_tensor_tangent(id)][j];
  must_run(setup, &c->problem, FA_PASS_FORWARD, &x);
  return x;
}

/* The central difference of fourth order. A row that sees nothing keeps its lse of -inf: tangent 0. */
static void test_differences(const fa_case *c, const fa_setup *setup, const fa_values *tangent) {
  static const struct {
    fa_tensor_id output, tangent;
  } pairs[] = {{FA_TENSOR_O, FA_TENSOR_O_TANGENT}, {FA_TENSOR_LSE, FA_TENSOR_LSE_TANGENT}};
  const double step = 0x1p-12;
  fa_values near[2] = {forward_at(c, setup, tangent, -step), forward_at(c, setup, tangent, step)};
  fa_values far[2] = {forward_at(c, setup, tangent, -2 * step), forward_at(c, setup, tangent, 2 * step)};
  for (size_t i = 0; i < 2; i++) {
    const fa_tensor_id id = pairs[i].output;
    double worst = 0;
    for (int64_t j = values_count(&c->problem, id) - 1; j >= 0; j--) {
      const double numeric =
          isinf(near[0].data[id][j])
              ? 0
              : (8 * (near[1].data[id][j] - near[0].data[id][j]) - (far[1].data[id][j] - far[0].data[id][j])) /
                    (12 * step);
      const double error = fabs(tangent->data[pairs[i].tangent][j] - numeric) / (1 + fabs(numeric));
      worst = isnan(error) ? INFINITY : fmax(worst, error);
    }
    CHECK(worst <= 1e-8, "%s: %s is %.3g from central differences", c->name, fa_tensor_name(pairs[i].tangent),
          worst);
  }
  for (int i = 0; i < 2; i++) {
    values_free(&near[i]);
    values_free(&far[i]);
  }
}

static void test_case(const fa_case *c) {
  const fa_setup setup = {{FA_DEVICE_CPU, 0}, c->layout, 2};
  char why[512];
  fa_values x = values_new(&c->problem);
  values_fill(&x, &c->problem, FA_DTYPE_F64, c->fill, seed);
  values_fill_tangents(&x, &c->problem, FA_DTYPE_F64, c->fill, seed);
  const fa_outcome outcome = run_pass(&setup, &c->problem, FA_PASS_TANGENT, &x, why);
  CHECK(outcome == OUTCOME_RAN, "%s: %s", c->name, why);
  if (outcome == OUTCOME_RAN) {
    test_identity(c, &x);
    /* Large scores make the softmax too steep for any step that f64 could take. */
    if (c->fill == FILL_NORMAL) test_differences(c, &setup, &x);
  }
  values_free(&x);
}

static void test_in_f64(const fa_case *of) {
  fa_case c = fa_case_in(of, FA_DTYPE_F64);
  c.problem.constant_bias = c.problem.constant_alibi_slopes = 0; /* every gradient is asked for */
  test_case(&c);
}

static void test_table(void) {
  size_t num_cases;
  const fa_case *cases = fa_cases(&num_cases);
  for (size_t i = 0; i < num_cases; i++)
    if (!(cases[i].tags & CASE_SPEED)) test_in_f64(&cases[i]);
}

static void test_sweep(int64_t count, uint64_t sweep_seed) {
  for (int64_t i = 0; i < count; i++) {
    const fa_case c = fa_case_random(sweep_seed, (uint64_t)i, 1);
    test_in_f64(&c);
  }
}

int main(int argc, char **argv) {
  if (argc > 2) {
    test_sweep(strtoll(argv[1], NULL, 10), strtoull(argv[2], NULL, 10));
  } else {
    test_table();
    test_sweep(60, 1);
  }
  return report();
}
