/*
 * The oracle against what did not come from the same hand: the definition summed in long double, and central
 * differences of its own forward.
 */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "../../c_src/core/tensors.h"
#include "harness.h"

static const fa_setup reference = {.device = {FA_DEVICE_REFERENCE, 0}};
static const uint64_t seed = 7;

/* ---- the definition, in long double ------------------------------------------------------------------ */

/* [batch, row, head, column] of a tensor with so many rows and heads */
static long double at(const fa_problem *p, const double *x, int64_t rows, int64_t heads, int64_t b, int64_t row,
                      int64_t head, int64_t c) {
  return x[((b * rows + row) * heads + head) * p->head_dim + c];
}

/* band: {q_begin, q_end, k_begin, k_end, left, right} */
static bool visible_in(const fa_problem *p, const double *band, int64_t i, int64_t j) {
  const double ahead = (double)(j - i) - (band[3] - band[1]), unbounded = INT32_MAX;
  const double left = p->window_left == FA_UNBOUNDED ? unbounded : (double)p->window_left;
  const double right = p->window_right == FA_UNBOUNDED ? unbounded : (double)p->window_right;
  return i >= band[0] && i < band[1] && j >= band[2] && j < band[3] && -ahead <= fmin(left, band[4]) &&
         ahead <= fmin(right, band[5]);
}

/* distance: of ALiBi */
static bool visible(const fa_problem *p, const fa_values *x, int64_t b, int64_t i, int64_t j,
                    double *distance) {
  const double length =
      p->lengths_batch ? x->data[FA_TENSOR_KEY_LENGTHS][p->lengths_batch > 1 ? b : 0] : (double)p->seqlen_k;
  const double whole[6] = {0, (double)p->seqlen_q, 0, length, INT32_MAX, INT32_MAX};
  const double *bands =
      p->num_bands == 0 ? whole : x->data[FA_TENSOR_BANDS] + (p->bands_batch > 1 ? b : 0) * p->num_bands * 6;
  for (const double *band = bands; band < bands + 6 * (p->num_bands ? p->num_bands : 1); band += 6) {
    *distance = fabs((double)(i - j) + band[3] - band[1]);
    if (visible_in(p, band, i, j)) return true;
  }
  return false;
}

/* exp(score), 0 where it is not visible: no maximum is subtracted. */
static long double weight(const fa_problem *p, const fa_values *x, int64_t b, int64_t h, int64_t i, int64_t j) {
  double distance;
  if (!visible(p, x, b, i, j, &distance)) return 0;
  const int64_t kv = h / (p->num_heads / p->num_kv_heads);
  long double s = 0;
  for (int64_t c = 0; c < p->head_dim; c++)
    s += at(p, x->data[FA_TENSOR_Q], p->seqlen_q, p->num_heads, b, i, h, c) *
         at(p, x->data[FA_TENSOR_K], p->seqlen_k, p->num_kv_heads, b, j, kv, c);
  s *= p->scale == 0 ? 1 / sqrtl((long double)p->head_dim) : (long double)p->scale;
  if (p->softcap != 0) s = (long double)p->softcap * tanhl(s / (long double)p->softcap);
  if (p->bias_heads) {
    const int64_t row =
        ((p->bias_batch > 1 ? b : 0) * p->bias_heads + (p->bias_heads > 1 ? h : 0)) * p->bias_rows +
        (p->bias_rows > 1 ? i : 0);
    const double bias = x->data[FA_TENSOR_BIAS][row * p->seqlen_k + j];
    if (p->bias_dtype == FA_DTYPE_U8 ? bias == 0 : bias == -INFINITY) return 0;
    s += p->bias_dtype == FA_DTYPE_U8 ? 0 : bias;
  }
  if (p->alibi_batch)
    s -= x->data[FA_TENSOR_ALIBI_SLOPES][(p->alibi_batch > 1 ? b : 0) * p->num_heads + h] * distance;
  return expl(s);
}

/* Philox2x32 by its definition, on words that hold 32 bits. */
static void philox(uint64_t x[2], uint64_t key, int rounds) {
  for (; rounds > 0; rounds--) {
    const uint64_t product = x[0] * 0xD256D193;
    x[0] = product >> 32 ^ key ^ x[1];
    x[1] = product & 0xffffffff;
    key = (key + 0x9E3779B9) & 0xffffffff;
  }
}

/* keep of flash_attention.h */
static double keep(const fa_problem *p, const fa_values *x, int64_t b, int64_t h, int64_t i, int64_t j) {
  const double threshold = round(p->dropout * 65536);
  if (threshold == 0) return 1;
  uint64_t z[2] = {(uint64_t)b, (uint64_t)h};
  philox(z, (uint64_t)x->data[FA_TENSOR_DROPOUT_SEED][0], 10);
  philox(z, (uint64_t)x->data[FA_TENSOR_DROPOUT_SEED][1], 10);
  uint64_t r[2] = {(uint64_t)(i / 16 * 8 + i % 8), z[1]};
  philox(r, z[0], 10);
  uint64_t c[2] = {(uint64_t)(j / 16 * 8 + j % 8), (uint64_t)x->data[FA_TENSOR_DROPOUT_SEED][1]};
  philox(c, (uint64_t)x->data[FA_TENSOR_DROPOUT_SEED][0], 10);
  uint64_t w[2] = {r[0] ^ c[0], r[1] ^ c[1]};
  philox(w, 0, 2);
  const double bits = (double)(w[j / 8 % 2] >> 16 * (i / 8 % 2) & 0xffff);
  return bits < threshold ? 0 : 1 / (1 - threshold / 65536);
}

/* o and lse of one row, by the formulas as they stand. */
static void define_row(const fa_problem *p, fa_values *x, int64_t b, int64_t h, int64_t i) {
  const int64_t kv = h / (p->num_heads / p->num_kv_heads);
  double *o = x->data[FA_TENSOR_O] + ((b * p->seqlen_q + i) * p->num_heads + h) * p->head_dim;
  long double sum = 0;
  for (int64_t t = 0; t < p->num_sinks; t++) sum += expl(x->data[FA_TENSOR_SINK][t * p->num_heads + h]);
  for (int64_t t = 0; t < p->num_row_sinks; t++)
    sum +=
        expl(x->data[FA_TENSOR_ROW_SINKS][((b * p->seqlen_q + i) * p->num_row_sinks + t) * p->num_heads + h]);
  for (int64_t j = 0; j < p->seqlen_k; j++) sum += weight(p, x, b, h, i, j);
  for (int64_t c = 0; c < p->head_dim; c++) {
    long double element = 0;
    for (int64_t j = 0; j < p->seqlen_k; j++)
      if (weight(p, x, b, h, i, j) != 0)
        element += weight(p, x, b, h, i, j) / sum * keep(p, x, b, h, i, j) *
                   at(p, x->data[FA_TENSOR_V], p->seqlen_k, p->num_kv_heads, b, j, kv, c);
    o[c] = (double)element;
  }
  x->data[FA_TENSOR_LSE][(b * p->num_heads + h) * p->seqlen_q + i] = (double)logl(sum);
}

static void test_definition(const fa_case *c) {
  const fa_problem *p = &c->problem;
  fa_values x = values_new(p), defined = values_new(p);
  values_fill(&x, p, FA_DTYPE_F64, c->fill, seed);
  values_fill(&defined, p, FA_DTYPE_F64, c->fill, seed);
  must_run(&reference, p, FA_PASS_FORWARD, &x);
  for (int64_t b = 0; b < p->batch; b++)
    for (int64_t h = 0; h < p->num_heads; h++)
      for (int64_t i = 0; i < p->seqlen_q; i++) define_row(p, &defined, b, h, i);
  const double o = values_error(p, FA_TENSOR_O, &x, &defined);
  const double lse = values_error(p, FA_TENSOR_LSE, &x, &defined);
  CHECK(o <= 1e-13, "%s: o is %.3g from its definition", c->name, o);
  CHECK(lse <= 1e-13, "%s: lse is %.3g from its definition", c->name, lse);
  values_free(&x);
  values_free(&defined);
}

/* ---- the gradients, by differences -------------------------------------------------------------------- */

/* sum o * dout + sum lse * dlse, the loss whose gradients the backward gives. An lse of -inf stays what it is.
 */
static double loss(const fa_problem *p, fa_values *x) {
  double sum = 0;
  must_run(&reference, p, FA_PASS_FORWARD, x);
  for (int64_t i = values_count(p, FA_TENSOR_O) - 1; i >= 0; i--)
    sum += x->data[FA_TENSOR_O][i] * x->data[FA_TENSOR_DOUT][i];
  const int64_t num_dlse = values_count(p, FA_TENSOR_DLSE);
  for (int64_t i = num_dlse ? values_count(p, FA_TENSOR_LSE) - 1 : -1; i >= 0; i--)
    if (x->data[FA_TENSOR_LSE][i] != -INFINITY)
      sum += x->data[FA_TENSOR_LSE][i] * x->data[FA_TENSOR_DLSE][i % num_dlse];
  return sum;
}

static double loss_at(const fa_problem *p, fa_values *x, double *element, double value) {
  const double before = *element;
  *element = value;
  const double result = loss(p, x);
  *element = before;
  return result;
}

/* The central difference of fourth order: its error goes with step^4. */
static double difference(const fa_problem *p, fa_values *x, double *element) {
  const double step = 0x1p-10, at = *element; /* sinks are f32, and hold at + step exactly */
  const double near = loss_at(p, x, element, at + step) - loss_at(p, x, element, at - step);
  const double far = loss_at(p, x, element, at + 2 * step) - loss_at(p, x, element, at - 2 * step);
  return (8 * near - far) / (12 * step);
}

static void test_gradients(const fa_case *c) {
  const fa_problem *p = &c->problem;
  fa_values x = values_new(p);
  values_fill(&x, p, FA_DTYPE_F64, c->fill, seed);
  must_run(&reference, p, FA_PASS_FORWARD, &x);
  must_run(&reference, p, FA_PASS_BACKWARD, &x);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const int gradient = fa_tensor_gradient(id);
    if (fa_tensor_role_in(p, FA_PASS_FORWARD, id) != FA_ROLE_INPUT || gradient < 0 ||
        fa_tensor_role_in(p, FA_PASS_BACKWARD, gradient) != FA_ROLE_OUTPUT)
      continue; /* a bias of u8 has none */
    /* The error of the difference, and 1e-16 / step; what has no columns of head_dim is an f32 besides. */
    const double tolerance = fa_axis_of(gradient, FA_AXIS_HEAD_DIM) < 0 ? 1e-6 : 1e-9;
    double worst = 0;
    for (int64_t j = 0; j < values_count(p, id); j++) {
      const double numeric = difference(p, &x, &x.data[id][j]);
      const double error = fabs(numeric - x.data[gradient][j]) / (1 + fabs(numeric));
      worst = isnan(error) ? INFINITY : fmax(worst, error);
    }
    CHECK(worst <= tolerance, "%s: %s is %.3g from central differences", c->name, fa_tensor_name(gradient),
          worst);
  }
  values_free(&x);
}

/* ---- the naive types: they must err as the type does, neither more nor less ----------------------------- */

static void test_type_error(fa_dtype dtype, double least, double most) {
  static const fa_tensor_id outputs[] = {FA_TENSOR_O, FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV, FA_TENSOR_LSE};
  fa_problem problem;
  fa_problem_init(&problem);
  problem.batch = 1, problem.seqlen_q = 41, problem.seqlen_k = 53, problem.head_dim = 24;
  problem.num_heads = 2, problem.num_kv_heads = 1;
  fa_values naive = values_new(&problem), exact = values_new(&problem);
  for (int f64 = 0; f64 < 2; f64++) {
    fa_values *values = f64 ? &exact : &naive;
    problem.dtype = f64 ? FA_DTYPE_F64 : dtype;
    values_fill(values, &problem, dtype, FILL_NORMAL, seed);
    must_run(&reference, &problem, FA_PASS_FORWARD, values);
    must_run(&reference, &problem, FA_PASS_BACKWARD, values);
  }
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    const double error = values_error(&problem, outputs[i], &naive, &exact);
    CHECK(error >= least && error <= most, "%s: naive %s errs by %.3g, outside %g to %g", fa_dtype_name(dtype),
          fa_tensor_name(outputs[i]), error, least, most);
  }
  values_free(&naive);
  values_free(&exact);
}

static void test_tangent_unsupported(void) {
  fa_problem problem;
  fa_plan plan;
  fa_error error;
  fa_problem_init(&problem);
  problem.num_heads = 1, problem.num_kv_heads = 1, problem.head_dim = 1;
  CHECK(fa_plan_init(&plan, &problem, FA_PASS_TANGENT, reference.device, &error) == FA_STATUS_UNSUPPORTED,
        "the reference plans a tangent");
  CHECK_TEXT(error.message, "pass: expected forward, backward or bound on the reference, got tangent");
}

int main(void) {
  size_t num_cases;
  const fa_case *cases = fa_cases(&num_cases);
  for (size_t i = 0; i < num_cases; i++) {
    if (!(cases[i].tags & CASE_TINY)) continue;
    const fa_case c = fa_case_in(&cases[i], FA_DTYPE_F64);
    test_definition(&c);
    test_gradients(&c);
  }
  test_type_error(FA_DTYPE_F32, 1e-8, 1e-5);
  test_type_error(FA_DTYPE_F16, 1e-4, 1e-2);
  test_type_error(FA_DTYPE_BF16, 1e-3, 1e-1);
  test_tangent_unsupported();
  return report();
}
