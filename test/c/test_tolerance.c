/*
 * The tolerance itself: what is right keeps to its bound without the help of a naive run, and small mistakes do
 * not pass. Mistakes are planted into the CPU's results through the problem or the tensors that it is given.
 *
 *   test_tolerance [TYPE...]        of these types alone
 */
#include "tolerance.h"

#include <math.h>

#include "check.h"

static const fa_setup cpu = {.device = {FA_DEVICE_CPU, 0}, .num_threads = 1};

static bool is_asked[FA_NUM_FLOATS];

/* The largest share that any output has; 0 where everything is exact. */
static double worst_share(const fa_tolerance *tolerance, const fa_problem *problem, const fa_values *x) {
  double worst = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(problem, id)) worst = fmax(worst, tolerance_share(tolerance, problem, id, x));
  return worst;
}

/* ---- the bound ---------------------------------------------------------------------------------------- */

/* The bound alone has to do. The naive run of a 16-bit type keeps s and dp in that type, which
 * no device does and the bound does not allow for. */
static void check_bound(const fa_case *c, uint64_t seed) {
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_REFERENCE};
  fa_values inputs = values_new(&c->problem);
  values_fill(&inputs, &c->problem, c->problem.dtype, c->fill, seed);
  fa_tolerance tolerance = tolerance_without_naive(c, &inputs);
  for (size_t i = 0; i < 2; i++) {
    if (kinds[i] == FA_DEVICE_REFERENCE && c->problem.dtype > FA_DTYPE_F64) continue;
    const fa_setup setup = {.device = {kinds[i], 0}, .num_threads = 1};
    fa_values x = values_copy(&c->problem, &inputs);
    must_run(&setup, &c->problem, FA_PASS_FORWARD, &x);
    must_run(&setup, &c->problem, FA_PASS_BACKWARD, &x);
    for (int id = 0; id < FA_NUM_TENSORS; id++) {
      if (!is_output(&c->problem, id)) continue;
      const double share = tolerance_share(&tolerance, &c->problem, id, &x);
      CHECK(share <= 1, "%s, %s, seed %llu: %s of %s errs by %.3g of its bound", c->name,
            fa_dtype_name(c->problem.dtype), (unsigned long long)seed, fa_tensor_name(id),
            fa_device_kind_name(kinds[i]), share);
    }
    values_free(&x);
  }
  tolerance_free(&tolerance);
  values_free(&inputs);
}

static void test_bounds(void) {
  size_t num_cases;
  const fa_case *cases = fa_cases(&num_cases);
  for (size_t i = 0; i < num_cases; i++)
    for (int dtype = 0; dtype < FA_NUM_FLOATS && cases[i].tags & CASE_QUICK; dtype++) {
      if (!is_asked[dtype]) continue;
      fa_case c = cases[i];
      c.problem.dtype = (fa_dtype)dtype;
      check_bound(&c, 1);
    }
  /* Few numbers, over which luck is spread widest. */
  for (uint64_t seed = 0; seed < 200; seed++) {
    fa_case c = {.name = "small"};
    fa_problem_init(&c.problem);
    c.problem.dtype = (fa_dtype)(seed % FA_NUM_FLOATS);
    if (!is_asked[c.problem.dtype]) continue;
    c.problem.batch = 1, c.problem.num_heads = c.problem.num_kv_heads = 1;
    c.problem.seqlen_q = 1 + (int64_t)seed % 3, c.problem.seqlen_k = 1 + (int64_t)seed % 7;
    c.problem.head_dim = 1 + (int64_t)seed % 11, c.problem.num_sinks = (int64_t)seed % 2;
    check_bound(&c, seed);
  }
}

/* One row sees n columns alike, so that p is 1 / n and ds is 0, and its o may be wrong by a rounding. delta
 * errs by as much, every ds by 1 / n of it, all in one direction, and dalibi_slopes by the mean distance times
 * that. */
static void test_rounding_of_a_row(void) {
  static const double roundoff[FA_NUM_FLOATS] = {
      [FA_DTYPE_F32] = 0x1p-24, [FA_DTYPE_F64] = 0x1p-53, [FA_DTYPE_BF16] = 0x1p-8, [FA_DTYPE_F16] = 0x1p-11};
  enum { NUM_COLUMNS = 1024 };
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
    if (!is_asked[dtype]) continue;
    fa_problem p;
    fa_problem_init(&p);
    p.dtype = (fa_dtype)dtype;
    p.batch = p.seqlen_q = p.num_heads = p.num_kv_heads = p.head_dim = p.alibi_batch = 1;
    p.seqlen_k = NUM_COLUMNS;
    fa_values x = values_new(&p);
    for (int i = 0; i < NUM_COLUMNS; i++) x.data[FA_TENSOR_V][i] = 1;
    x.data[FA_TENSOR_DOUT][0] = 1;
    must_run(&(fa_setup){.device = {FA_DEVICE_REFERENCE, 0}}, &p, FA_PASS_BOUND, &x);
    const double error = (NUM_COLUMNS - 1) / 2.0 * roundoff[dtype], bound = x.data[FA_TENSOR_DALIBI_SLOPES][0];
    CHECK(bound >= error, "%s: a rounding of o makes dalibi_slopes wrong by %g, the bound is %g",
          fa_dtype_name(p.dtype), error, bound);
    values_free(&x);
  }
}

/* ---- planted mistakes --------------------------------------------------------------------------------- */

static void wrong_scale(fa_problem *p) { p->scale = 1.01 / sqrt((double)p->head_dim); }
static void dropped_column(fa_problem *p) { p->seqlen_k--; }
static void window_of_one_more(fa_problem *p) { p->window_left++; }

/* dk and dv of columns that are not computed stay 0. */
static void check_mistake(const fa_problem *right, const char *name, void (*mistake)(fa_problem *p),
                          bool without_delta) {
  const fa_case c = {.name = name, .problem = *right};
  fa_tolerance tolerance = tolerance_new(&c, 1);
  fa_problem wrong = *right;
  fa_values x = values_new(right);
  values_fill(&x, right, right->dtype, FILL_NORMAL, 1);
  if (mistake) mistake(&wrong);
  must_run(&cpu, &wrong, FA_PASS_FORWARD, &x);
  if (without_delta) memset(x.data[FA_TENSOR_O], 0, (size_t)values_count(right, FA_TENSOR_O) * sizeof(double));
  must_run(&cpu, &wrong, FA_PASS_BACKWARD, &x);
  if (without_delta)
    memcpy(x.data[FA_TENSOR_O], tolerance.exact.data[FA_TENSOR_O],
           (size_t)values_count(right, FA_TENSOR_O) * sizeof(double));
  const double share = worst_share(&tolerance, right, &x);
  const bool is_right = !mistake && !without_delta;
  CHECK(is_right == (share <= 1), "%s, %s: the error is %.3g of what is allowed", fa_dtype_name(right->dtype),
        name, share);
  values_free(&x);
  tolerance_free(&tolerance);
}

static void test_mistakes(void) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
    if (!is_asked[dtype]) continue;
    fa_problem p;
    fa_problem_init(&p);
    p.dtype = (fa_dtype)dtype;
    p.batch = 1, p.seqlen_q = 53, p.seqlen_k = 61, p.num_heads = 4, p.num_kv_heads = 2, p.head_dim = 24;
    check_mistake(&p, "nothing wrong", NULL, false);
    check_mistake(&p, "a scale wrong by 1 %", wrong_scale, false);
    check_mistake(&p, "a dropped column", dropped_column, false);
    check_mistake(&p, "ds without delta", NULL, true);
    p.window_left = 30, p.window_right = 3;
    check_mistake(&p, "a window of one column more", window_of_one_more, false);
  }
}

int main(int argc, char **argv) {
  int num_asked = 0;
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
    is_asked[dtype] = argc == 1;
    for (int i = 1; i < argc; i++)
      if (strcmp(argv[i], fa_dtype_name((fa_dtype)dtype)) == 0) is_asked[dtype] = true, num_asked++;
  }
  if (num_asked != argc - 1) {
    fprintf(stderr, "usage: test_tolerance [TYPE...]\n");
    return 2;
  }
  test_bounds();
  test_rounding_of_a_row();
  test_mistakes();
  return report();
}
