/*
 * What a row does not see does not reach it, NaN and infinities included, in any output: numbers that are not
 * finite are put into every input, and each device must spread them exactly as far as the f64 oracle does,
 * which visits visible columns alone.
 *
 *   test_isolation [cpu | cuda]
 */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "devices.h"
#include "harness.h"
#include "random.h"

static const fa_setup oracle = {.device = {FA_DEVICE_REFERENCE, 0}};
static const uint64_t seed = 17;

static const double bads[] = {NAN, INFINITY, -INFINITY};

typedef struct sizes {
  int64_t batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, window_left, window_right;
  int64_t num_sinks;
  double softcap;
  int64_t num_bands;
  unsigned has;
} sizes;

enum {
  WITH_BIAS = 1,
  WITH_ALIBI = 2,
  WITH_DROPOUT = 4,
  WITH_KEY_LENGTHS = 8,
  WITH_CELLS = 16,
  WITH_CONSTANTS = 32
};

#define ANY FA_UNBOUNDED

/* Several tiles of every kernel, met at odd places; rows that see nothing, and columns that nobody sees. */
static const sizes table[] = {
    {1, 9, 9, 1, 1, 1, ANY, 0, 0, 0, 0, 0},
    {2, 70, 70, 2, 1, 7, ANY, 0, 0, 0, 0, 0},
    {1, 150, 150, 2, 2, 16, ANY, 0, 0, 0, 0, 0},
    {1, 131, 203, 2, 1, 24, ANY, 0, 1, 0, 0, 0},
    {1, 203, 131, 2, 1, 40, ANY, 0, 2, 0, 0, 0},
    {2, 61, 300, 1, 1, 32, 17, 0, 0, 0, 0, 0},
    {1, 140, 140, 2, 2, 64, 20, 11, 0, 4, 0, 0},
    {1, 90, 290, 1, 1, 64, 33, 40, 0, 0, 0, 0},
    {1, 77, 81, 4, 2, 72, 0, 0, 0, 0, 0, 0},
    {1, 150, 90, 1, 1, 80, 30, 5, 1, 0, 0, 0},
    {1, 170, 170, 1, 1, 96, 40, 0, 0, 0, 0, 0},
    {1, 139, 139, 2, 1, 128, ANY, 0, 0, 0, 0, 0},
    {1, 133, 270, 1, 1, 128, 64, 9, 0, 0, 0, 0},
    {1, 100, 130, 1, 1, 192, ANY, 3, 0, 0, 0, 0},
    {1, 71, 140, 1, 1, 256, 50, 0, 1, 0, 0, 0},
    {1, 65, 65, 2, 2, 64, ANY, ANY, 0, 0, 0, 0},
    {2, 190, 210, 2, 1, 64, ANY, 0, 1, 0, 5, 0},
    {1, 170, 140, 1, 1, 128, ANY, ANY, 0, 0, 4, 0},
    /* Keys in one column block or in parts; every row sees every column; few rows. */
    {2, 230, 60, 2, 1, 64, ANY, 0, 0, 0, 0, 0},
    {1, 70, 900, 1, 1, 128, ANY, 0, 0, 0, 0, 0},
    {1, 140, 150, 2, 1, 72, ANY, ANY, 0, 0, 0, 0},
    {2, 3, 400, 4, 2, 64, ANY, 0, 1, 0, 0, 0},
    {1, 5, 300, 2, 2, 128, 90, 0, 0, 3, 0, 0},
    {1, 9, 170, 2, 1, 256, ANY, 0, 0, 0, 0, 0},
    /* So many keys of one head that more parts share them than merge in a cluster. */
    {1, 2, 8300, 2, 1, 64, ANY, 0, 0, 0, 0, 0},
    /* Programs, lengths. */
    {2, 110, 150, 2, 1, 64, ANY, 0, 0, 0, 0, WITH_KEY_LENGTHS},
    {2, 3, 700, 4, 2, 128, ANY, 0, 0, 0, 0, WITH_KEY_LENGTHS},
    {1, 140, 140, 2, 1, 64, ANY, 0, 0, 0, 0, WITH_BIAS},
    {1, 150, 140, 2, 2, 128, ANY, ANY, 0, 0, 0, WITH_BIAS},
    {1, 140, 130, 4, 2, 64, ANY, 0, 1, 0, 0, WITH_BIAS | WITH_ALIBI},
    {1, 130, 150, 1, 1, 128, ANY, 0, 0, 7, 0, WITH_BIAS},
    {1, 130, 150, 2, 1, 128, ANY, ANY, 0, 0, 0, WITH_BIAS | WITH_CELLS},
    {1, 140, 130, 2, 2, 64, ANY, ANY, 1, 0, 0, WITH_BIAS | WITH_CELLS},
    {1, 135, 140, 2, 1, 128, ANY, 0, 0, 0, 0, WITH_ALIBI},
    {1, 135, 140, 2, 1, 128, ANY, 0, 0, 0, 0, WITH_ALIBI | WITH_CONSTANTS},
    {1, 140, 130, 2, 1, 64, ANY, ANY, 1, 0, 0, WITH_ALIBI | WITH_CONSTANTS},
    {1, 140, 140, 2, 1, 64, ANY, 0, 0, 0, 3, WITH_DROPOUT},
    {1, 90, 140, 2, 1, 128, 50, 0, 1, 6, 0, WITH_BIAS | WITH_ALIBI | WITH_DROPOUT},
    {1, 90, 100, 2, 1, 200, ANY, 0, 0, 0, 0, WITH_BIAS | WITH_CELLS | WITH_ALIBI},
    /* Few rows that something is added to, or that bands show what they see. */
    {1, 3, 700, 4, 2, 64, ANY, 0, 0, 0, 3, 0},
    {2, 2, 500, 4, 2, 128, ANY, 0, 1, 0, 0, WITH_BIAS},
    {1, 3, 500, 4, 2, 64, ANY, ANY, 0, 0, 0, WITH_BIAS | WITH_CELLS},
    {2, 2, 600, 4, 2, 128, ANY, 0, 0, 0, 0, WITH_KEY_LENGTHS | WITH_ALIBI},
    {2, 3, 400, 2, 1, 256, ANY, 0, 0, 5, 0, WITH_KEY_LENGTHS | WITH_BIAS},
};

static fa_problem problem_of(const sizes *of, fa_dtype dtype) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = of->batch, p.seqlen_q = of->seqlen_q, p.seqlen_k = of->seqlen_k;
  p.num_heads = of->num_heads, p.num_kv_heads = of->num_kv_heads, p.head_dim = of->head_dim;
  p.window_left = of->window_left, p.window_right = of->window_right;
  p.num_sinks = of->num_sinks, p.softcap = of->softcap, p.deterministic = 1;
  p.num_bands = of->num_bands, p.bands_batch = of->num_bands ? of->batch : 0;
  if (of->has & WITH_KEY_LENGTHS) p.lengths_batch = p.batch;
  if (of->has & WITH_BIAS) p.bias_batch = p.bias_rows = 1, p.bias_heads = p.num_heads, p.bias_dtype = dtype;
  if (of->has & WITH_CELLS) p.bias_rows = p.seqlen_q;
  if (of->has & WITH_ALIBI) p.alibi_batch = 1;
  if (of->has & WITH_CONSTANTS) p.constant_alibi_slopes = 1;
  if (of->has & WITH_DROPOUT) p.dropout = 0.25, p.num_seed_words = 2;
  return p;
}

/* ---- what is planted ---------------------------------------------------------------------------------- */

static void plant_row(const fa_problem *p, fa_values *x, fa_tensor_id id, int64_t batch, int64_t row,
                      int64_t head, double bad) {
  const fa_tensor strides = fa_tensor_contiguous(p, id, NULL);
  if (id == FA_TENSOR_LSE) {
    x->data[id][(batch * p->num_heads + head) * p->seqlen_q + row] = bad;
    return;
  }
  double *elements =
      x->data[id] + batch * strides.stride_batch + row * strides.stride_row + head * strides.stride_head;
  for (int64_t c = 0; c < p->head_dim; c++) elements[c] = bad;
}

static void plant_element(const fa_problem *p, fa_values *x, fa_tensor_id id, fa_random *random, double bad) {
  x->data[id][random_integer(random, 0, values_count(p, id) - 1)] = bad;
}

/* A whole row at one edge of the sequence or somewhere, and an element anywhere. only_nan: what the header says
 * that CUDA does not look at is left out, infinite numbers. */
static void plant(const fa_problem *p, fa_values *x, fa_tensor_id id, fa_random *random, int kind,
                  bool only_nan) {
  const bool of_keys = id == FA_TENSOR_K || id == FA_TENSOR_V;
  const int64_t rows = of_keys ? p->seqlen_k : p->seqlen_q, heads = of_keys ? p->num_kv_heads : p->num_heads;
  const int64_t places[] = {rows - 1, 0, random_integer(random, 0, rows - 1)};
  const int num_bads = only_nan ? 1 : id == FA_TENSOR_LSE ? 2 : 3; /* an lse of -inf: the row sees nothing */
  plant_row(p, x, id, random_integer(random, 0, p->batch - 1), places[kind % 3],
            random_integer(random, 0, heads - 1), bads[kind % num_bads]);
  plant_element(p, x, id, random, bads[(kind + 1) % num_bads]);
}

/* Whether neither mask nor bias may hide a cell. */
static bool sees_all(const fa_problem *p) {
  return p->window_left == FA_UNBOUNDED && p->window_right == FA_UNBOUNDED && !p->num_bands &&
         !p->lengths_batch && !p->bias_batch;
}

/* ---- what must come out ------------------------------------------------------------------------------- */

/* What an error may be, beside the tensor's largest finite number: this is no test of accuracy. */
static double tolerance_of_type(fa_dtype dtype) {
  return dtype == FA_DTYPE_F64 ? 1e-10 : dtype == FA_DTYPE_F32 ? 1e-4 : dtype == FA_DTYPE_F16 ? 2e-2 : 1e-1;
}

static void check_output(const fa_problem *p, fa_tensor_id id, const fa_values *got, const fa_values *expected,
                         const char *what) {
  char text[200];
  long strayed = 0, missed = 0, wrong = 0;
  double size = 1;
  const int64_t count = values_count(p, id);
  const double *x = got->data[id], *y = expected->data[id];
  fa_problem_format(p, text, sizeof text);
  for (int64_t i = 0; i < count; i++)
    if (isfinite(y[i])) size = fmax(size, fabs(y[i]));
  for (int64_t i = 0; i < count; i++) {
    if (y[i] == -INFINITY && id == FA_TENSOR_LSE)
      wrong += x[i] != y[i];
    else if (!isfinite(y[i]))
      missed += isfinite(x[i]);
    else if (!isfinite(x[i]))
      strayed++;
    else
      wrong += !(fabs(x[i] - y[i]) <= tolerance_of_type(p->dtype) * size);
  }
  CHECK(strayed == 0, "%s, %s: %ld of %lld elements of %s are not finite and should be", text, what, strayed,
        (long long)count, fa_tensor_name(id));
  CHECK(missed == 0, "%s, %s: %ld elements of %s are finite and should not be", text, what, missed,
        fa_tensor_name(id));
  CHECK(wrong == 0, "%s, %s: %ld elements of %s are wrong", text, what, wrong, fa_tensor_name(id));
}

/* One pass on the device and on the oracle, which reads the same inputs; false where the device does not take
 * it. */
static bool check_pass(fa_device device, const fa_problem *p, fa_pass pass, const fa_values *inputs,
                       fa_values *got, fa_values *expected, const char *what) {
  char why[512];
  fa_problem exact = *p;
  exact.dtype = FA_DTYPE_F64;
  if (p->bias_batch && p->bias_dtype == p->dtype) exact.bias_dtype = FA_DTYPE_F64;
  const fa_setup setup = {.device = device, .layout = LAYOUT_ALIGNED, .num_threads = 2};
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(p, pass, id) == FA_ROLE_INPUT) {
      memcpy(got->data[id], inputs->data[id], (size_t)values_count(p, id) * sizeof(double));
      memcpy(expected->data[id], inputs->data[id], (size_t)values_count(p, id) * sizeof(double));
    }
  const fa_outcome outcome = run_pass(&setup, p, pass, got, why);
  if (outcome == OUTCOME_UNSUPPORTED) {
    num_skipped++;
    return false;
  }
  CHECK(outcome == OUTCOME_RAN, "%s: %s", what, why);
  must_run(&oracle, &exact, pass, expected);
  for (int id = 0; id < FA_NUM_TENSORS && outcome == OUTCOME_RAN; id++)
    if (fa_tensor_role_in(p, pass, id) == FA_ROLE_OUTPUT) check_output(p, id, got, expected, what);
  return outcome == OUTCOME_RAN;
}

/* Numbers of the type that the tensor has. */
static void round_values(const fa_problem *p, fa_tensor_id id, fa_values *x) {
  const fa_dtype dtype = fa_tensor_shape(p, id).dtype;
  unsigned char cell[8];
  for (int64_t i = 0; i < values_count(p, id); i++) {
    set_element(dtype, cell, x->data[id][i]);
    x->data[id][i] = get_element(dtype, cell);
  }
}

/* The backward's o and lse become the oracle's, so that both have the same inputs. */
static void take_forward(const fa_problem *p, fa_values *inputs, const fa_values *expected) {
  for (int id = FA_TENSOR_O; id <= FA_TENSOR_LSE; id++) {
    memcpy(inputs->data[id], expected->data[id], (size_t)values_count(p, id) * sizeof(double));
    round_values(p, id, inputs);
  }
}

/* planted: a bit for every tensor, of the inputs in clean. */
static void check_planted(fa_device device, const fa_problem *p, const fa_values *clean, unsigned planted,
                          int kind, const char *what) {
  fa_random random = random_stream(seed, (uint64_t)kind);
  fa_values inputs = values_copy(p, clean), got = values_new(p), expected = values_new(p);
  for (int64_t i = 0; i < values_count(p, FA_TENSOR_BIAS); i++)
    if (random_integer(&random, 0, 3) == 0) inputs.data[FA_TENSOR_BIAS][i] = -INFINITY;
  for (int64_t b = 0; b < p->lengths_batch; b++)
    inputs.data[FA_TENSOR_KEY_LENGTHS][b] = (double)(p->seqlen_k - 20 * b);
  for (int id = FA_TENSOR_Q; id <= FA_TENSOR_V; id++)
    if (planted >> id & 1)
      plant(p, &inputs, id, &random, kind + id,
            device.kind == FA_DEVICE_CUDA && id != FA_TENSOR_V && (id == FA_TENSOR_K || sees_all(p)));
  if (check_pass(device, p, FA_PASS_FORWARD, &inputs, &got, &expected, what)) {
    static const fa_tensor_id saved[] = {FA_TENSOR_O, FA_TENSOR_LSE, FA_TENSOR_DOUT};
    take_forward(p, &inputs, &expected);
    for (size_t i = 0; i < sizeof saved / sizeof *saved; i++)
      if (planted >> saved[i] & 1) plant(p, &inputs, saved[i], &random, kind + (int)i, false);
    check_pass(device, p, FA_PASS_BACKWARD, &inputs, &got, &expected, what);
  }
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_planted(fa_device device) {
  static const fa_tensor_id ids[] = {FA_TENSOR_Q,    FA_TENSOR_K, FA_TENSOR_V,
                                     FA_TENSOR_DOUT, FA_TENSOR_O, FA_TENSOR_LSE};
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t row = 0; row < sizeof table / sizeof *table; row++) {
      const fa_problem p = problem_of(&table[row], (fa_dtype)dtype);
      fa_values clean = values_new(&p);
      values_fill(&clean, &p, p.dtype, FILL_NORMAL, seed);
      for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        check_planted(device, &p, &clean, 1u << ids[i], (int)(row + i), fa_tensor_name(ids[i]));
      check_planted(device, &p, &clean, ~0u, (int)row, "every input");
      values_free(&clean);
    }
}

/* A weight of 0 that no mask made: the row's lse is infinite. What its dout holds has a right to all that the
 * row sees, 0 times that as well. */
static void test_infinite_lse(fa_device device) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
      const fa_problem p = problem_of(&table[i], (fa_dtype)dtype);
      fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
      values_fill(&inputs, &p, p.dtype, FILL_NORMAL, seed);
      if (check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, "lse and dout")) {
        take_forward(&p, &inputs, &expected);
        plant_row(&p, &inputs, FA_TENSOR_LSE, p.batch - 1, p.seqlen_q - 1, 0, INFINITY);
        plant_row(&p, &inputs, FA_TENSOR_DOUT, p.batch - 1, p.seqlen_q - 1, 0, NAN);
        check_pass(device, &p, FA_PASS_BACKWARD, &inputs, &got, &expected, "lse and dout");
      }
      values_free(&inputs);
      values_free(&got);
      values_free(&expected);
    }
}

/* ---- padding ----------------------------------------------------------------------------------------------
 */

/* A band that leaves out the first and the last columns, or lengths that leave out the last ones: what k and v
 * hold there is garbage. In every family of kernels; and with more tiles than a GPU has multiprocessors, so
 * that one takes several of which all are to be made again. */
static const struct {
  int64_t batch, seqlen_q, seqlen_k, head_dim, window_right;
  unsigned has;
} padded[] = {
    {2, 70, 200, 40, 0, 0},
    {2, 150, 300, 64, ANY, 0},
    {2, 140, 290, 128, 0, 0},
    {2, 90, 270, 192, ANY, 0},
    {2, 70, 190, 256, 0, 0},
    {2, 150, 333, 72, 0, WITH_KEY_LENGTHS},
    {2, 200, 310, 24, ANY, WITH_KEY_LENGTHS},
    {2, 130, 290, 64, 0, WITH_ALIBI},
    {2, 130, 290, 128, ANY, WITH_BIAS},
    {2, 70, 200, 128, 0, WITH_DROPOUT},
    {2, 80, 200, 64, ANY, WITH_BIAS | WITH_ALIBI | WITH_DROPOUT},
    {75, 70, 90, 64, 0, WITH_KEY_LENGTHS},
};

static fa_problem padded_problem(size_t number, fa_dtype dtype) {
  const unsigned has = padded[number].has;
  const sizes of = {padded[number].batch,
                    padded[number].seqlen_q,
                    padded[number].seqlen_k,
                    2,
                    1,
                    padded[number].head_dim,
                    ANY,
                    padded[number].window_right,
                    0,
                    0,
                    has & WITH_KEY_LENGTHS ? 0 : 1,
                    has};
  return problem_of(&of, dtype);
}

static void check_padding(fa_device device, size_t number, fa_dtype dtype, double garbage) {
  const fa_problem p = padded_problem(number, dtype);
  const bool has_lengths = p.lengths_batch > 0;
  fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  for (int64_t b = 0; b < p.batch; b++) {
    const int64_t begin = has_lengths ? 0 : 37 + 20 * b, end = p.seqlen_k - 45 - 30 * (b % 2);
    const double band[] = {0, (double)p.seqlen_q, (double)begin, (double)end, INT32_MAX, INT32_MAX};
    for (int i = 0; i < 6 && !has_lengths; i++) inputs.data[FA_TENSOR_BANDS][b * 6 + i] = band[i];
    if (has_lengths) inputs.data[FA_TENSOR_KEY_LENGTHS][b] = (double)end;
    for (int64_t j = 0; j < p.seqlen_k; j++)
      if (j < begin || j >= end)
        plant_row(&p, &inputs, FA_TENSOR_K, b, j, 0, garbage),
            plant_row(&p, &inputs, FA_TENSOR_V, b, j, 0, garbage);
  }
  check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, "padding");
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_padding(fa_device device) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof padded / sizeof *padded; i++)
      for (int bad = 0; bad < 2; bad++) check_padding(device, i, (fa_dtype)dtype, bads[bad]);
}

/* ---- a single row -------------------------------------------------------------------------------------- */

/* Under a window, or with bands that leave out what lies between them. So many keys that kernels have several
 * tiles of them, and parts; what takes a kernel for few rows, and what does not. */
static const struct {
  int64_t batch, seqlen_k, num_heads, num_kv_heads, head_dim, window_left, num_bands;
  unsigned has;
} single[] = {
    {2, 90, 2, 1, 24, 30, 0, 0},
    {1, 300, 2, 2, 64, 70, 0, 0},
    {2, 700, 4, 2, 64, 100, 0, 0},
    {2, 200, 2, 1, 40, ANY, 2, 0},
    {1, 170, 2, 1, 200, 33, 0, 0},
    {1, 2600, 2, 1, 64, 1300, 0, 0},
    {1, 300, 2, 1, 256, ANY, 2, 0},
    {1, 700, 4, 2, 128, ANY, 3, 0},
    {1, 2600, 2, 1, 64, ANY, 3, 0},
    {2, 500, 4, 2, 128, 200, 0, WITH_KEY_LENGTHS},
    {2, 300, 2, 1, 64, 40, 0, WITH_ALIBI},
    {2, 260, 2, 1, 128, ANY, 2, WITH_BIAS},
    {1, 260, 2, 1, 64, ANY, 2, WITH_DROPOUT},
    {1, 260, 2, 1, 128, 100, 0, WITH_DROPOUT},
};

/* k and v of every column that the row does not see are garbage. */
static long
    num_reached; /* elements that the test itself would spoil, if it took such a column for a hidden one */
static void check_single(fa_device device, size_t number, fa_dtype dtype, double garbage) {
  const sizes of = {single[number].batch,
                    1,
                    single[number].seqlen_k,
                    single[number].num_heads,
                    single[number].num_kv_heads,
                    single[number].head_dim,
                    single[number].window_left,
                    ANY,
                    0,
                    0,
                    single[number].num_bands,
                    single[number].has};
  const fa_problem p = problem_of(&of, dtype);
  fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  const int64_t width = p.seqlen_k / (2 * p.num_bands + 1); /* of a band, and of a gap */
  for (int64_t b = 0; b < p.batch; b++) {
    const int64_t length = p.lengths_batch ? p.seqlen_k - 77 * b : p.seqlen_k;
    if (p.lengths_batch) inputs.data[FA_TENSOR_KEY_LENGTHS][b] = (double)length;
    for (int64_t n = 0; n < p.num_bands; n++) {
      const double band[] = {0,         1,        (double)(width * (2 * n + 1)), (double)(width * (2 * n + 2)),
                             INT32_MAX, INT32_MAX};
      memcpy(inputs.data[FA_TENSOR_BANDS] + (b * p.num_bands + n) * 6, band, sizeof band);
    }
    for (int64_t j = 0; j < p.seqlen_k; j++) {
      const bool is_in_window = j < length && (p.window_left == ANY || length - 1 - j <= p.window_left);
      const bool is_in_band = p.num_bands == 0 || (j / width % 2 == 1 && j / width < 2 * p.num_bands);
      if (is_in_window && is_in_band) continue;
      for (int64_t h = 0; h < p.num_kv_heads; h++)
        plant_row(&p, &inputs, FA_TENSOR_K, b, j, h, garbage),
            plant_row(&p, &inputs, FA_TENSOR_V, b, j, h, garbage);
    }
  }
  if (check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, "a single row")) {
    for (int64_t i = 0; i < values_count(&p, FA_TENSOR_O); i++)
      if (!isfinite(expected.data[FA_TENSOR_O][i]) || !isfinite(expected.data[FA_TENSOR_LSE][0])) num_reached++;
    take_forward(&p, &inputs, &expected);
    check_pass(device, &p, FA_PASS_BACKWARD, &inputs, &got, &expected, "a single row");
  }
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_single(fa_device device) {
  num_reached = 0;
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof single / sizeof *single; i++)
      for (int bad = 0; bad < 2; bad++) check_single(device, i, (fa_dtype)dtype, bads[bad]);
  CHECK(num_reached == 0, "the test's own columns reach %ld numbers", num_reached);
}

/* ---- rows that a bias hides whole ------------------------------------------------------------------------ */

enum { HIDES_BY_U8 = 1, HAS_ROW_SINKS = 2, HAS_DLSE = 4, NUM_HIDINGS = 8 };

/* The first row, the last, and a tile's worth of them. */
static bool is_hidden(const fa_problem *p, int64_t row) {
  return row == 0 || row == p->seqlen_q - 1 || (row >= 20 && row < 90);
}

/* Their dout is garbage, which no gradient has, above all not that of the sinks, which are all that the lse of
 * such a row is made of. */
static void check_hidden(fa_device device, fa_dtype dtype, unsigned has, double garbage) {
  const sizes of = {2, 100, 70, 2, 1, 24, ANY, ANY, 1, 0, 0, WITH_BIAS | WITH_CELLS};
  fa_problem p = problem_of(&of, dtype);
  char what[64];
  if (has & HIDES_BY_U8) p.bias_dtype = FA_DTYPE_U8;
  if (has & HAS_ROW_SINKS) p.num_row_sinks = 2;
  if (has & HAS_DLSE) p.dlse_batch = p.batch;
  snprintf(what, sizeof what, "rows hidden by a bias, dout %g", garbage);
  fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  for (int64_t i = 0; i < values_count(&p, FA_TENSOR_BIAS); i++) {
    double *bias = &inputs.data[FA_TENSOR_BIAS][i];
    if (has & HIDES_BY_U8)
      *bias = !is_hidden(&p, i / p.seqlen_k % p.seqlen_q);
    else if (is_hidden(&p, i / p.seqlen_k % p.seqlen_q))
      *bias = -INFINITY;
  }
  if (check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, what)) {
    take_forward(&p, &inputs, &expected);
    for (int64_t b = 0; b < p.batch; b++)
      for (int64_t row = 0; row < p.seqlen_q; row++)
        for (int64_t h = 0; h < p.num_heads; h++)
          if (is_hidden(&p, row)) plant_row(&p, &inputs, FA_TENSOR_DOUT, b, row, h, garbage);
    check_pass(device, &p, FA_PASS_BACKWARD, &inputs, &got, &expected, what);
    CHECK(isfinite(expected.data[FA_TENSOR_DSINK][0]), "%s: the oracle's dsink is not finite", what);
  }
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_hidden(fa_device device) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (unsigned has = 0; has < NUM_HIDINGS; has++)
      for (int bad = 0; bad < 3; bad++) check_hidden(device, (fa_dtype)dtype, has, bads[bad]);
}

/* ---- what is added to columns that nobody sees ---------------------------------------------------------- */

static void check_backward(fa_device device, const fa_problem *p, fa_values *inputs, const char *what) {
  fa_values got = values_new(p), expected = values_new(p);
  if (check_pass(device, p, FA_PASS_FORWARD, inputs, &got, &expected, what)) {
    take_forward(p, inputs, &expected);
    check_pass(device, p, FA_PASS_BACKWARD, inputs, &got, &expected, what);
  }
  values_free(&got);
  values_free(&expected);
}

/* A mask with a flag a score shows column 5 to row 0 alone, from which the triangle hides it. */
static void check_hidden_column(fa_device device, fa_dtype dtype, int64_t head_dim, fa_tensor_id id) {
  const sizes of = {1, 140, 140, 2, 2, head_dim, ANY, 0, 0, 0, 0, WITH_BIAS | WITH_CELLS};
  fa_problem p = problem_of(&of, dtype);
  p.bias_heads = 1, p.bias_dtype = FA_DTYPE_U8;
  fa_values inputs = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  for (int64_t i = 0; i < values_count(&p, FA_TENSOR_BIAS); i++)
    inputs.data[FA_TENSOR_BIAS][i] = i % p.seqlen_k != 5 || i / p.seqlen_k == 0;
  plant_row(&p, &inputs, id, 0, 5, 0, NAN);
  check_backward(device, &p, &inputs, "a column that flags hide");
  values_free(&inputs);
}

/* The bias of a key before every row's window. */
static void check_unseen_number(fa_device device, fa_dtype dtype, int64_t head_dim, double bad, bool constant) {
  const sizes of = {1, 100, 300, 2, 2, head_dim, 20, 0, 0, 0, 0, WITH_BIAS};
  fa_problem p = problem_of(&of, dtype);
  p.bias_heads = 1, p.constant_bias = constant;
  fa_values inputs = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  inputs.data[FA_TENSOR_BIAS][150] = bad;
  check_backward(device, &p, &inputs, "a number of a key that nobody sees");
  values_free(&inputs);
}

static void test_unseen(fa_device device) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2)
      for (int i = 0; i < 2; i++) {
        check_hidden_column(device, (fa_dtype)dtype, head_dim, i ? FA_TENSOR_V : FA_TENSOR_K);
        check_unseen_number(device, (fa_dtype)dtype, head_dim, NAN, i);
        check_unseen_number(device, (fa_dtype)dtype, head_dim, INFINITY, i);
      }
}

/* ---- what is added is large --------------------------------------------------------------------------------
 */

/* Numbers beyond 2^20, which some kernels of 16-bit types read as that and others as they are, beside v of the
 * last column, which is NaN and hidden from all rows but the last one: what is made again reads them as it was
 * made. All products are 0, so that a row weighs alike what it sees, or sees the one number alone. */
static void check_large_numbers(fa_device device, fa_dtype dtype, int64_t seqlen_q, int64_t head_dim,
                                double number, bool of_all) {
  const sizes of = {1, seqlen_q, 300, 2, 1, head_dim, ANY, 0, 0, 0, 0, WITH_BIAS};
  const fa_setup setup = {.device = device, .layout = LAYOUT_ALIGNED, .num_threads = 2};
  fa_problem p = problem_of(&of, dtype), exact;
  p.bias_dtype = FA_DTYPE_F32, exact = p, exact.dtype = FA_DTYPE_F64;
  char what[64], why[512];
  snprintf(what, sizeof what, "a bias of %g for %s", number, of_all ? "all keys" : "one key");
  fa_values inputs = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  memset(inputs.data[FA_TENSOR_Q], 0, (size_t)values_count(&p, FA_TENSOR_Q) * sizeof(double));
  for (int64_t i = 0; i < values_count(&p, FA_TENSOR_BIAS); i++)
    inputs.data[FA_TENSOR_BIAS][i] = of_all || i % p.seqlen_k == 3 ? number : 0;
  plant_row(&p, &inputs, FA_TENSOR_V, 0, p.seqlen_k - 1, 0, NAN);
  /* Hopper's backward of narrower heads reads numbers as at most 2^20, whoever made lse. */
  const fa_pass last = head_dim > 128 && !of_all ? FA_PASS_BACKWARD : FA_PASS_FORWARD;
  for (fa_pass pass = FA_PASS_FORWARD; pass <= last; pass++) {
    fa_values got = values_copy(&p, &inputs), expected = values_copy(&p, &inputs);
    const fa_outcome outcome = run_pass(&setup, &p, pass, &got, why);
    num_skipped += outcome == OUTCOME_UNSUPPORTED;
    CHECK(outcome != OUTCOME_BROKEN, "%s: %s", what, why);
    must_run(&oracle, &exact, pass, &expected);
    if (outcome == OUTCOME_RAN)
      check_output(&p, pass == FA_PASS_FORWARD ? FA_TENSOR_O : FA_TENSOR_DV, &got, &expected, what);
    if (pass == FA_PASS_FORWARD) take_forward(&p, &inputs, &expected);
    values_free(&got);
    values_free(&expected);
  }
  values_free(&inputs);
}

static void test_large_numbers(fa_device device) {
  static const double numbers[] = {-3e6, -1.5e6, 1.5e6, 3e6};
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
      for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 4) {
        check_large_numbers(device, (fa_dtype)dtype, 70, head_dim, numbers[i], true);
        check_large_numbers(device, (fa_dtype)dtype, 3, head_dim, numbers[i], true);
        if (numbers[i] == 3e6) check_large_numbers(device, (fa_dtype)dtype, 70, head_dim, numbers[i], false);
      }
}

/* ---- rows whose every visible score is -inf ------------------------------------------------------------- */

enum { INFINITE_ROW = 33, COLUMN = 2 };

/* q[INFINITE_ROW] of head 0 is -inf in a column in which every k is positive: the row counts as one that sees
 * nothing. */
static void check_infinite_row(fa_device device, fa_dtype dtype, int64_t num_sinks) {
  const sizes of = {1, 50, 70, 2, 1, 24, 10, 0, num_sinks, 0, 0, 0};
  const fa_problem p = problem_of(&of, dtype);
  const char *what = num_sinks ? "scores of -inf, sinks" : "scores of -inf";
  fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  inputs.data[FA_TENSOR_Q][INFINITE_ROW * 2 * p.head_dim + COLUMN] = -INFINITY;
  for (int64_t j = 0; j < p.seqlen_k; j++) {
    double *k = inputs.data[FA_TENSOR_K] + j * p.head_dim + COLUMN;
    *k = fabs(*k) + 0.5;
  }
  round_values(&p, FA_TENSOR_K, &inputs);
  double lse = -INFINITY, sum = 0;
  for (int64_t t = 0; t < num_sinks; t++) sum += exp(inputs.data[FA_TENSOR_SINK][t * 2]);
  if (num_sinks) lse = log(sum);
  if (check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, what)) {
    const double *o = got.data[FA_TENSOR_O] + INFINITE_ROW * 2 * p.head_dim,
                 *dq = got.data[FA_TENSOR_DQ] + (o - got.data[FA_TENSOR_O]);
    double total = 0;
    for (int64_t c = 0; c < p.head_dim; c++) total += fabs(o[c]);
    CHECK(total == 0, "%s, %s: o is not 0", fa_dtype_name(dtype), what);
    CHECK(got.data[FA_TENSOR_LSE][INFINITE_ROW] == lse ||
              fabs(got.data[FA_TENSOR_LSE][INFINITE_ROW] - lse) < 1e-5,
          "%s, %s: lse is %g, not %g", fa_dtype_name(dtype), what, got.data[FA_TENSOR_LSE][INFINITE_ROW], lse);
    take_forward(&p, &inputs, &expected);
    if (check_pass(device, &p, FA_PASS_BACKWARD, &inputs, &got, &expected, what)) {
      for (int64_t c = 0; c < p.head_dim; c++) total += fabs(dq[c]);
      CHECK(total == 0, "%s, %s: dq is not 0", fa_dtype_name(dtype), what);
      for (int64_t i = 0; i < values_count(&p, FA_TENSOR_DK); i++) total += fabs(got.data[FA_TENSOR_DK][i]);
      CHECK(isfinite(total), "%s, %s: dk is not finite", fa_dtype_name(dtype), what);
    }
  }
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_infinite_rows(fa_device device) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (int64_t num_sinks = 0; num_sinks <= 2; num_sinks += 2)
      check_infinite_row(device, (fa_dtype)dtype, num_sinks);
}

/* ---- rows whose scores are NaN ----------------------------------------------------------------------------
 */

enum { OF_LENGTHS = 1, OF_BANDS = 2, OF_BIAS = 4, OF_SINKS = 8, OF_ROW_SINKS = 16 };

/* Every family of kernels: the plain ones, also with more tiles than multiprocessors, those that go through
 * bands, those of programs, and those for few rows, with keys in one part and in several. */
static const struct {
  int64_t batch, seqlen_q, seqlen_k, head_dim, window_left, window_right;
  unsigned has;
} nan_table[] = {
    {2, 70, 90, 24, ANY, ANY, 0},
    {2, 140, 130, 64, ANY, 0, 0},
    {75, 70, 70, 64, ANY, 0, 0},
    {2, 80, 70, 128, ANY, 0, OF_SINKS},
    {2, 50, 60, 200, 20, 3, 0},
    {2, 90, 80, 40, ANY, 0, OF_BANDS},
    {2, 70, 70, 128, ANY, ANY, OF_BANDS | OF_SINKS},
    {2, 60, 90, 256, 30, 0, OF_BANDS},
    {2, 70, 60, 64, ANY, 0, OF_BIAS},
    {2, 40, 60, 128, ANY, ANY, OF_BIAS | OF_SINKS},
    {2, 3, 90, 64, ANY, 0, OF_LENGTHS},
    {2, 3, 2100, 64, ANY, 0, OF_LENGTHS},
    {2, 3, 700, 64, ANY, 0, OF_BANDS},
    {2, 2, 600, 128, ANY, 0, OF_LENGTHS | OF_BIAS},
    {2, 2, 700, 128, ANY, ANY, OF_LENGTHS | OF_SINKS},
    {2, 90, 70, 64, ANY, 0, OF_LENGTHS},
    {2, 40, 40, 24, ANY, 0, OF_ROW_SINKS},
};

/* The last row of every batch and head is NaN, or column 5: o and lse are in the rows that see either, and
 * nowhere else. */
static long num_nan_rows;
static void check_nan_rows(fa_device device, fa_dtype dtype, size_t number, fa_tensor_id id) {
  const unsigned has = nan_table[number].has;
  const sizes of = {nan_table[number].batch,
                    nan_table[number].seqlen_q,
                    nan_table[number].seqlen_k,
                    2,
                    1,
                    nan_table[number].head_dim,
                    nan_table[number].window_left,
                    nan_table[number].window_right,
                    has & OF_SINKS ? 2 : 0,
                    0,
                    has & OF_BANDS ? 3 : 0,
                    0};
  fa_problem p = problem_of(&of, dtype);
  if (has & OF_LENGTHS) p.lengths_batch = p.batch;
  if (has & OF_BIAS) p.bias_batch = p.bias_rows = 1, p.bias_heads = 2, p.bias_dtype = FA_DTYPE_F32;
  if (has & OF_ROW_SINKS) p.num_row_sinks = 1;
  fa_values inputs = values_new(&p), got = values_new(&p), expected = values_new(&p);
  values_fill(&inputs, &p, dtype, FILL_NORMAL, seed);
  for (int64_t b = 0; b < p.lengths_batch; b++)
    inputs.data[FA_TENSOR_KEY_LENGTHS][b] = (double)(p.seqlen_k - b);
  for (int64_t b = 0; b < p.batch; b++)
    for (int64_t h = 0; h < (id == FA_TENSOR_Q ? p.num_heads : p.num_kv_heads); h++)
      plant_row(&p, &inputs, id, b, id == FA_TENSOR_Q ? p.seqlen_q - 1 : 5, h, NAN);
  if (check_pass(device, &p, FA_PASS_FORWARD, &inputs, &got, &expected, "rows of NaN")) {
    long num_wrong = 0;
    for (int64_t i = 0; i < values_count(&p, FA_TENSOR_LSE); i++) {
      num_nan_rows += isnan(expected.data[FA_TENSOR_LSE][i]);
      num_wrong += !isnan(got.data[FA_TENSOR_LSE][i]) != !isnan(expected.data[FA_TENSOR_LSE][i]);
    }
    char text[200];
    fa_problem_format(&p, text, sizeof text);
    CHECK(num_wrong == 0, "%s: %s of NaN: %ld lse are not as they should be", text, fa_tensor_name(id),
          num_wrong);
  }
  values_free(&inputs);
  values_free(&got);
  values_free(&expected);
}

static void test_nan_rows(fa_device device) {
  num_nan_rows = 0;
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof nan_table / sizeof *nan_table; i++) {
      check_nan_rows(device, (fa_dtype)dtype, i, FA_TENSOR_Q);
      check_nan_rows(device, (fa_dtype)dtype, i, FA_TENSOR_K);
    }
  CHECK(num_nan_rows > 1000, "%ld rows are NaN", num_nan_rows);
}

static void test_device(fa_device device) {
  test_nan_rows(device);
  test_padding(device);
  test_unseen(device);
  test_single(device);
  test_hidden(device);
  test_large_numbers(device);
  test_planted(device);
  test_infinite_lse(device);
  test_infinite_rows(device);
}

int main(int argc, char **argv) {
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_CUDA};
  setvbuf(stdout, NULL, _IOLBF, 0);
  test_devices(argc, argv, kinds, sizeof kinds / sizeof *kinds, test_device);
  return report();
}
