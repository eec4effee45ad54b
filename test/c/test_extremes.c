/*
 * Numbers at the edge of what types hold, on the CPU, in the reference and on the GPU: finite inputs never give
 * NaN, whatever scale, softcap and sinks are, and lse carries the rounding error that flash_attention.h admits,
 * and no more.
 *
 *   test_extremes [cpu | reference | cuda]
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "devices.h"
#include "harness.h"

static const fa_setup oracle = {.device = {FA_DEVICE_REFERENCE, 0}};

/* How tensors lie: a GPU has kernels that take only what is aligned, and those for all. */
static fa_layout layout;
static fa_setup setup_of(fa_device device) { return (fa_setup){device, layout, 2}; }

/* ---- options and sinks -------------------------------------------------------------------------------- */

/* steep: scores are so far apart that an error of their rounding decides everything; only NaN is looked for. */
static const struct extreme {
  double scale, softcap;
  double sinks[2]; /* NaN: no sinks */
  bool steep;
} extremes[] = {
    {.softcap = 1e-300, .sinks = {NAN}},
    {.softcap = 1e-45, .sinks = {NAN}},
    {.softcap = 1e-40, .sinks = {NAN}},
    {.softcap = FLT_MIN, .sinks = {NAN}},
    {.softcap = 1e-30, .sinks = {NAN}},
    {.softcap = 1e30, .sinks = {NAN}},
    {.scale = 1e-300, .sinks = {NAN}},
    {.scale = -1e-40, .sinks = {NAN}},
    {.scale = 1e-30, .softcap = 1e-30, .sinks = {NAN}},
    {.scale = 1e30, .softcap = 1e-38, .sinks = {NAN}, .steep = true},
    {.scale = 1e30, .softcap = 1e30, .sinks = {NAN}, .steep = true},
    {.scale = 1e30, .sinks = {NAN}, .steep = true},
    {.scale = -1e30, .sinks = {FLT_MAX, 1}, .steep = true},
    {.sinks = {FLT_MAX, FLT_MAX}},
    {.sinks = {FLT_MAX, -FLT_MAX}},
    {.sinks = {-FLT_MAX, -FLT_MAX}},
    {.sinks = {1e-45, -1e-45}},
    {.sinks = {-INFINITY, 0.5}},
    {.sinks = {-INFINITY, -INFINITY}},
    {.sinks = {-INFINITY, FLT_MAX}, .softcap = 1e-300},
};

static void check_numbers(const fa_problem *p, fa_tensor_id id, const fa_values *got, const fa_values *expected,
                          bool steep, const char *device) {
  char text[200];
  double size = 1, worst = 0;
  long nans = 0;
  fa_problem_format(p, text, sizeof text);
  for (int64_t i = 0; i < values_count(p, id); i++)
    if (isfinite(expected->data[id][i])) size = fmax(size, fabs(expected->data[id][i]));
  for (int64_t i = 0; i < values_count(p, id); i++) {
    const double x = got->data[id][i], y = expected->data[id][i];
    nans += isnan(x);
    worst = x == y ? worst : fmax(worst, fabs(x - y));
  }
  CHECK(nans == 0, "%s, %s: %ld NaN in %s", text, device, nans, fa_tensor_name(id));
  const double allowed = p->dtype == FA_DTYPE_F64 ? 1e-6 : p->dtype == FA_DTYPE_F32 ? 1e-4 : 0x1p-6;
  CHECK(steep || worst <= allowed * size, "%s, %s: error %g in %s of size %g", text, device, worst,
        fa_tensor_name(id), size);
}

/* Causal with more queries than keys: the first rows see the sinks alone. Or few rows. */
static fa_problem problem_of(const struct extreme *e, fa_dtype dtype, int64_t seqlen_q) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = 1, p.seqlen_q = seqlen_q, p.seqlen_k = 61, p.num_heads = 2, p.num_kv_heads = 1;
  p.head_dim = layout & LAYOUT_ALIGNED ? 24 : 20, p.window_right = 0;
  p.scale = e->scale, p.softcap = e->softcap, p.num_sinks = isnan(e->sinks[0]) ? 0 : 2;
  return p;
}

static fa_values inputs_of(const struct extreme *e, const fa_problem *p, fa_dtype round_to) {
  fa_values x = values_new(p);
  values_fill(&x, p, round_to, FILL_NORMAL, 3);
  for (int64_t i = 0; i < values_count(p, FA_TENSOR_SINK); i++)
    x.data[FA_TENSOR_SINK][i] = (float)e->sinks[i / p->num_heads];
  return x;
}

static void test_extreme(const struct extreme *e, fa_dtype dtype, int64_t seqlen_q, fa_device device) {
  const fa_setup setup = setup_of(device);
  const fa_problem p = problem_of(e, dtype, seqlen_q), exact = problem_of(e, FA_DTYPE_F64, seqlen_q);
  fa_error error;
  const fa_status refused = fa_problem_validate(&p, &error);
  if (refused) {
    CHECK(error.argument[0] && error.expected[0], "a refusal without a reason: %s", error.message);
    return;
  }
  fa_values got = inputs_of(e, &p, dtype), expected = inputs_of(e, &p, dtype);
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    must_run(&setup, &p, pass, &got);
    must_run(&oracle, &exact, pass, &expected);
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (fa_tensor_role_in(&p, pass, id) == FA_ROLE_OUTPUT)
        check_numbers(&p, id, &got, &expected, e->steep, fa_device_kind_name(device.kind));
  }
  values_free(&got);
  values_free(&expected);
}

/* ---- lse where logits are large and tie ------------------------------------------------------------------ */

/* One query and 64 equal keys, of that logit: every p is 1/64, and the sum of dv is dout. */
static double error_of_ties(fa_device device, double logit, double *lse) {
  const fa_setup setup = setup_of(device);
  fa_problem p;
  fa_problem_init(&p);
  p.batch = 1, p.seqlen_q = 1, p.seqlen_k = 64, p.num_heads = 1, p.num_kv_heads = 1, p.head_dim = 3,
  p.scale = 1;
  fa_values x = values_new(&p);
  x.data[FA_TENSOR_Q][0] = (float)logit;
  for (int64_t j = 0; j < p.seqlen_k; j++) x.data[FA_TENSOR_K][j * p.head_dim] = 1;
  x.data[FA_TENSOR_DOUT][0] = 1;
  must_run(&setup, &p, FA_PASS_FORWARD, &x);
  must_run(&setup, &p, FA_PASS_BACKWARD, &x);
  double sum = 0;
  for (int64_t j = 0; j < p.seqlen_k; j++) sum += x.data[FA_TENSOR_DV][j * p.head_dim];
  *lse = x.data[FA_TENSOR_LSE][0];
  values_free(&x);
  return fabs(sum - 1);
}

/* The bound is the one beside lse in flash_attention.h; exp itself adds a unit or two in the last place. */
static void test_ties(fa_device device) {
  for (double logit = 77; logit < 2e6; logit *= 1.37)
    for (int sign = -1; sign <= 1; sign += 2) {
      double lse;
      const double error = error_of_ties(device, sign * logit, &lse);
      const double bound = expm1(fabs(lse) * 0x1p-24) + 4 * 0x1p-24;
      CHECK(error <= bound, "%s: dv of equal keys at a logit of %g errs by %.3g, more than %.3g",
            fa_device_kind_name(device.kind), sign * logit, error, bound);
    }
}

/* ---- subnormal inputs ------------------------------------------------------------------------------------ */

/* Multiples of unit, which bf16 holds whatever power of two it is. */
static void fill_with_multiples(double *x, int64_t count, double unit, uint32_t state) {
  for (int64_t i = 0; i < count; i++) {
    state = state * 1664525 + 1013904223;
    x[i] = ((double)(state >> 28) - 7.5) * 2 * unit;
  }
}

/* q and v are subnormal, k and dout so large that scores and dp are of ordinary size: instructions that take
 * subnormal numbers as 0 give results that err by as much as they are. o and dk are subnormal, too, and rounded
 * as such. */
static void test_subnormal(fa_device device, int64_t head_dim) {
  const fa_setup setup = setup_of(device);
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = FA_DTYPE_BF16, p.batch = 1, p.seqlen_q = 133, p.seqlen_k = 71, p.num_heads = 2, p.num_kv_heads = 1;
  p.head_dim = head_dim, p.scale = 1;
  fa_problem exact = p;
  exact.dtype = FA_DTYPE_F64;
  fa_values got = values_new(&p), expected = values_new(&p);
  static const struct {
    fa_tensor_id id;
    double unit;
  } inputs[] = {
      {FA_TENSOR_Q, 0x1p-133}, {FA_TENSOR_K, 0x1p122}, {FA_TENSOR_V, 0x1p-132}, {FA_TENSOR_DOUT, 0x1p121}};
  for (uint32_t i = 0; i < 4; i++) {
    const int64_t count = values_count(&p, inputs[i].id);
    fill_with_multiples(got.data[inputs[i].id], count, inputs[i].unit, i);
    fill_with_multiples(expected.data[inputs[i].id], count, inputs[i].unit, i);
  }
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    must_run(&setup, &p, pass, &got);
    must_run(&oracle, &exact, pass, &expected);
    for (int id = 0; id < FA_NUM_TENSORS; id++) {
      if (fa_tensor_role_in(&p, pass, id) != FA_ROLE_OUTPUT) continue;
      double size = 0;
      for (int64_t i = 0; i < values_count(&p, id); i++) size = fmax(size, fabs(expected.data[id][i]));
      const double error = values_error(&p, id, &got, &expected);
      CHECK(size > 0 && error <= 0.1 * size + 0x1p-133, "%s, head_dim %d: %s errs by %g of %g",
            fa_device_kind_name(device.kind), (int)head_dim, fa_tensor_name(id), error, size);
    }
  }
  values_free(&got);
  values_free(&expected);
}

/* ---- masks of large numbers ------------------------------------------------------------------------------ */

/* What o is where a row that sees large numbers alone weighs keys by their scores, as if there were none. */
static fa_values weighed_by_scores(const fa_problem *exact, const fa_values *inputs) {
  fa_values values = values_copy(exact, inputs);
  const int64_t half = values_count(exact, FA_TENSOR_BIAS) / 2;
  memset(values.data[FA_TENSOR_BIAS] + half, 0, (size_t)half * sizeof(double));
  must_run(&oracle, exact, FA_PASS_FORWARD, &values);
  return values;
}

/* A bias of the largest f32, negative, hides keys as -inf does, but for rows that see no others: these weigh
 * all of them alike. */
static void test_large_mask(fa_device device, fa_dtype dtype, int64_t head_dim, int64_t bias_rows) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = 2, p.seqlen_q = 70, p.seqlen_k = 300, p.num_heads = 2, p.num_kv_heads = 1;
  p.head_dim = head_dim, p.bias_dtype = FA_DTYPE_F32, p.bias_batch = 2, p.bias_heads = 1,
  p.bias_rows = bias_rows;
  fa_problem exact = p;
  exact.dtype = FA_DTYPE_F64;
  const fa_setup setup = setup_of(device);
  fa_values got = values_new(&p), expected = values_new(&p);
  values_fill(&got, &p, dtype, FILL_NORMAL, 5);
  values_fill(&expected, &p, dtype, FILL_NORMAL, 5);
  for (int64_t i = 0; i < values_count(&p, FA_TENSOR_BIAS); i++)
    if (i >= p.bias_rows * p.seqlen_k || i % p.seqlen_k >= 150)
      got.data[FA_TENSOR_BIAS][i] = expected.data[FA_TENSOR_BIAS][i] = -FLT_MAX;
  must_run(&setup, &p, FA_PASS_FORWARD, &got);
  must_run(&oracle, &exact, FA_PASS_FORWARD, &expected);
  /* flash_attention.h lets numbers of keys count as less on CUDA. */
  const bool may_count_less = layout & LAYOUT_ALIGNED && dtype != FA_DTYPE_F32 && bias_rows == 1;
  fa_values by_scores = weighed_by_scores(&exact, &expected);
  const bool count_less = may_count_less && values_error(&p, FA_TENSOR_O, &got, &by_scores) <
                                                values_error(&p, FA_TENSOR_O, &got, &expected);
  check_numbers(&p, FA_TENSOR_O, &got, count_less ? &by_scores : &expected, false,
                fa_device_kind_name(device.kind));
  values_free(&by_scores);
  /* A batch that is all padding has no part in a loss. */
  fa_values *both[] = {&got, &expected};
  for (int i = 0; i < 2; i++) {
    const int64_t half = values_count(&p, FA_TENSOR_DOUT) / 2;
    memset(both[i]->data[FA_TENSOR_DOUT] + half, 0, (size_t)half * sizeof(double));
  }
  must_run(&setup, &p, FA_PASS_BACKWARD, &got);
  must_run(&oracle, &exact, FA_PASS_BACKWARD, &expected);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&p, FA_PASS_BACKWARD, id) == FA_ROLE_OUTPUT)
      check_numbers(&p, id, &got, &expected, false, fa_device_kind_name(device.kind));
  values_free(&got);
  values_free(&expected);
}

/* A number for all keys or for one of them, of a size that some kernels read as less: whatever a forward makes
 * of it, and its backward of that, results are finite. */
static void test_large_number(fa_device device, fa_dtype dtype, int64_t seqlen_q, int64_t head_dim,
                              double number, bool of_all) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = 1, p.seqlen_q = seqlen_q, p.seqlen_k = 304, p.num_heads = 2, p.num_kv_heads = 1;
  p.head_dim = head_dim, p.bias_dtype = FA_DTYPE_F32, p.bias_batch = p.bias_heads = p.bias_rows = 1;
  const fa_setup setup = setup_of(device);
  fa_values x = values_new(&p);
  values_fill(&x, &p, dtype, FILL_NORMAL, 7);
  for (int64_t j = 0; j < p.seqlen_k; j++) x.data[FA_TENSOR_BIAS][j] = of_all || j == 3 ? number : 0;
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    must_run(&setup, &p, pass, &x);
    for (int id = 0; id < FA_NUM_TENSORS; id++) {
      if (fa_tensor_role_in(&p, pass, id) != FA_ROLE_OUTPUT) continue;
      long num_lost = 0;
      for (int64_t i = 0; i < values_count(&p, id); i++) num_lost += !isfinite(x.data[id][i]);
      CHECK(num_lost == 0,
            "%s, %s, head_dim %d, %d rows, a bias of %g for %s: %ld numbers of %s are not finite",
            fa_device_kind_name(device.kind), fa_dtype_name(dtype), (int)head_dim, (int)seqlen_q, number,
            of_all ? "all keys" : "one key", num_lost, fa_tensor_name(id));
    }
  }
  values_free(&x);
}

static void test_large_numbers(fa_device device, fa_dtype dtype) {
  static const double numbers[] = {-3e6, -1.5e6, 1.5e6, 3e6};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
      for (int64_t seqlen_q = 3; seqlen_q <= 70; seqlen_q += 67) {
        test_large_number(device, dtype, seqlen_q, head_dim, numbers[i], true);
        test_large_number(device, dtype, seqlen_q, head_dim, numbers[i], false);
      }
}

static void test_layout(fa_device device) {
  const bool is_cuda = device.kind == FA_DEVICE_CUDA;
  for (size_t e = 0; e < sizeof extremes / sizeof *extremes; e++)
    for (int64_t seqlen_q = 70; seqlen_q > 0; seqlen_q -= 68) {
      test_extreme(&extremes[e], FA_DTYPE_F32, seqlen_q, device);
      test_extreme(&extremes[e], is_cuda ? FA_DTYPE_BF16 : FA_DTYPE_F64, seqlen_q, device);
      if (is_cuda) test_extreme(&extremes[e], FA_DTYPE_F16, seqlen_q, device);
    }
  for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
    for (int64_t rows = 1; rows <= 70; rows += 69) {
      test_large_mask(device, FA_DTYPE_F32, head_dim, rows);
      if (is_cuda) test_large_mask(device, FA_DTYPE_BF16, head_dim, rows);
      if (is_cuda) test_large_mask(device, FA_DTYPE_F16, head_dim, rows);
    }
  /* CUDA has no f64, and in the reference's f16, in which each score is rounded, such numbers are infinite. */
  const fa_dtype lacks = is_cuda ? FA_DTYPE_F64 : FA_DTYPE_F16;
  for (fa_dtype dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    if (dtype != lacks || device.kind == FA_DEVICE_CPU) test_large_numbers(device, dtype);
  test_ties(device);
  test_subnormal(device, 33);
  test_subnormal(device, 64);
}

static void test_device(fa_device device) {
  layout = LAYOUT_CONTIGUOUS;
  test_layout(device);
  layout = LAYOUT_ALIGNED;
  if (device.kind == FA_DEVICE_CUDA) test_layout(device);
}

int main(int argc, char **argv) {
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_REFERENCE, FA_DEVICE_CUDA};
  test_devices(argc, argv, kinds, sizeof kinds / sizeof *kinds, test_device);
  return report();
}
