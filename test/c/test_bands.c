/*
 * Bands: what is refused, against cells that are counted one by one; what they mean to the kernels, beside
 * problems without bands; and that nothing they may hold is dangerous.
 */
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/bands.h"
#include "../../c_src/core/integers.h"
#include "check.h"
#include "harness.h"
#include "random.h"

static fa_problem problem_of(int64_t seqlen_q, int64_t seqlen_k, int64_t num_bands) {
  fa_problem p;
  fa_problem_init(&p);
  p.batch = p.num_heads = p.num_kv_heads = p.bands_batch = 1;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.num_bands = num_bands, p.head_dim = 16;
  return p;
}

/* ---- what is refused ------------------------------------------------------------------------------------- */

static bool shows(const int32_t *band, int64_t i, int64_t j) {
  const int64_t diagonal = i - band[1] + band[3];
  return i >= band[0] && i < band[1] && j >= band[2] && j < band[3] && j >= diagonal - band[4] &&
         j <= diagonal + band[5];
}

/* Whether some cell lies in two of the bands. */
static bool overlap(const fa_problem *p, const int32_t *words) {
  for (int64_t i = 0; i < p->seqlen_q; i++)
    for (int64_t j = 0; j < p->seqlen_k; j++) {
      int count = 0;
      for (int64_t n = 0; n < p->num_bands; n++) count += shows(words + 6 * n, i, j);
      if (count > 1) return true;
    }
  return false;
}

static void random_band(fa_random *random, const fa_problem *p, int32_t *band) {
  for (int i = 0; i < 4; i++) {
    const int64_t seqlen = i < 2 ? p->seqlen_q : p->seqlen_k;
    band[i] = (int32_t)i % 2 ? random_integer(random, fa_max(band[i - 1] - 1, 0), seqlen)
                             : random_integer(random, 0, seqlen / 2);
  }
  for (int i = 4; i < 6; i++)
    band[i] = random_integer(random, 0, 1) ? (int32_t)random_integer(random, -3, 8) : INT32_MAX;
}

/* Few bands in little space, so that about as many sets share cells as do not. */
static void test_overlaps(void) {
  fa_random random = random_stream(5, 0);
  int num_overlapping = 0;
  for (int round = 0; round < 20000; round++) {
    const fa_problem p =
        problem_of(random_integer(&random, 2, 9), random_integer(&random, 2, 9), random_integer(&random, 2, 4));
    int32_t words[6 * 4];
    for (int64_t n = 0; n < p.num_bands; n++) random_band(&random, &p, words + 6 * n);
    const bool expected = overlap(&p, words), found = fa_bands_check(&p, words, NULL) != FA_STATUS_OK;
    num_overlapping += expected;
    CHECK(found == expected, "round %d: cells are %sshared", round, expected ? "" : "not ");
  }
  CHECK(num_overlapping > 2000 && num_overlapping < 18000, "%d of 20000 share cells", num_overlapping);
}

/* The same of many bands: a grid of triangles and what is left beside them, one of which is then moved. */
static void test_many_bands(void) {
  enum { SIDE = 50, LENGTH = 7, COUNT = 2 * SIDE * SIDE };
  const fa_problem p = problem_of(SIDE * LENGTH, SIDE * LENGTH, COUNT);
  int32_t(*bands)[6] = malloc(COUNT * sizeof *bands);
  for (int n = 0; n < COUNT; n++) {
    const int32_t row = n / 2 / SIDE * LENGTH, column = n / 2 % SIDE * LENGTH;
    const int32_t lower[6] = {row, row + LENGTH, column, column + LENGTH, INT32_MAX, 0};
    const int32_t upper[6] = {row, row + LENGTH, column, column + LENGTH, -1, INT32_MAX};
    memcpy(bands[n], n % 2 ? upper : lower, sizeof lower);
  }
  fa_error error;
  CHECK(fa_bands_check(&p, bands, &error) == FA_STATUS_OK, "%s", error.message);
  bands[3333][4] = 0; /* its diagonal too */
  CHECK(fa_bands_check(&p, bands, &error) == FA_STATUS_INVALID_ARGUMENT, "a shared diagonal passes");
  CHECK_TEXT(error.message, "bands: expected bands that share no cell, got band 3332 and band 3333");
  free(bands);
}

static void test_ranges(void) {
  fa_problem p = problem_of(5, 7, 2);
  int32_t words[12] = {0, 5, 0, 7, INT32_MAX, INT32_MAX, 9, 9, -4, 100, 0, 0}; /* the second one has no cells */
  fa_error error;
  CHECK(fa_bands_check(&p, words, &error) == FA_STATUS_OK, "%s", error.message);
  words[3] = 8;
  CHECK(fa_bands_check(&p, words, &error) == FA_STATUS_INVALID_ARGUMENT, "a column too many passes");
  CHECK_TEXT(error.message, "bands: expected k_end from 0 to seqlen_k 7 in band 0, got 8");
  p.batch = p.bands_batch = 2, p.num_bands = 1;
  words[3] = 7, words[6] = -1, words[7] = 2, words[8] = 0, words[9] = 7;
  CHECK(fa_bands_check(&p, words, &error) == FA_STATUS_INVALID_ARGUMENT, "a row before the first passes");
  CHECK_TEXT(error.message, "bands: expected q_begin from 0 to seqlen_q 5 in band 0 of batch 1, got -1");
  p.num_bands = 0;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "bands without a band pass");
  CHECK_TEXT(error.argument, "bands");
}

/* A call on tensors of the host looks at the bands. */
static void test_call(void) {
  const fa_problem p = problem_of(3, 3, 2);
  int32_t words[12] = {0, 3, 0, 3, INT32_MAX, 0, 1, 2, 1, 2, 0, 0};
  float q[48] = {0}, o[48], lse[3];
  fa_tensors tensors = {.q = fa_tensor_contiguous(&p, FA_TENSOR_Q, q),
                        .k = fa_tensor_contiguous(&p, FA_TENSOR_K, q),
                        .v = fa_tensor_contiguous(&p, FA_TENSOR_V, q),
                        .bands = fa_tensor_contiguous(&p, FA_TENSOR_BANDS, words),
                        .o = fa_tensor_contiguous(&p, FA_TENSOR_O, o),
                        .lse = fa_tensor_contiguous(&p, FA_TENSOR_LSE, lse)};
  fa_plan plan;
  fa_error error;
  CHECK(!fa_plan_init(&plan, &p, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CPU, 0}, &error), "%s", error.message);
  CHECK(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error) == FA_STATUS_INVALID_ARGUMENT,
        "a shared cell passes");
  CHECK_TEXT(error.argument, "bands");
  words[7] = 1; /* no rows */
  CHECK(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error) == FA_STATUS_OK, "%s", error.message);
}

/* ---- what they mean -----------------------------------------------------------------------------------------
 */

static void run_both(const fa_setup *setup, const fa_problem *p, fa_values *x) {
  must_run(setup, p, FA_PASS_FORWARD, x);
  must_run(setup, p, FA_PASS_BACKWARD, x);
}

static void compare(const fa_problem *p, const char *what, const fa_values *x, const fa_values *y) {
  const fa_tensor_id outputs[] = {FA_TENSOR_O, FA_TENSOR_LSE, FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
    CHECK(values_equal(p, outputs[i], x, y), "%s: other bits of %s", what, fa_tensor_name(outputs[i]));
}

/* The one band of all rows and columns is what a problem without bands is: the same bits. */
static void test_whole(const fa_setup *setup, fa_dtype dtype) {
  fa_problem plain = problem_of(301, 287, 0);
  plain.bands_batch = 0, plain.dtype = dtype, plain.window_right = 0, plain.deterministic = 1;
  fa_problem banded = plain;
  banded.bands_batch = banded.num_bands = 1;
  fa_values x = values_new(&plain), y = values_new(&banded);
  values_fill(&x, &plain, dtype, FILL_NORMAL, 3);
  values_fill(&y, &banded, dtype, FILL_NORMAL, 3);
  const double whole[6] = {0, 301, 0, 287, INT32_MAX, INT32_MAX};
  memcpy(y.data[FA_TENSOR_BANDS], whole, sizeof whole);
  run_both(setup, &plain, &x);
  run_both(setup, &banded, &y);
  compare(&plain, "one band", &x, &y);
  values_free(&x);
  values_free(&y);
}

/* ---- whatever they hold -------------------------------------------------------------------------------------
 */

static fa_problem random_problem(fa_random *random, fa_dtype dtype) {
  static const int64_t head_dims[] = {8, 16, 40, 64, 128};
  fa_problem p = problem_of(random_integer(random, 1, 300), random_integer(random, 1, 300),
                            random_integer(random, 1, random_integer(random, 1, 40)));
  p.dtype = dtype, p.head_dim = head_dims[random_integer(random, 0, 4)];
  p.batch = random_integer(random, 1, 2), p.bands_batch = random_integer(random, 0, 1) ? p.batch : 1;
  p.num_kv_heads = random_integer(random, 1, 2), p.num_heads = p.num_kv_heads * random_integer(random, 1, 2);
  p.num_sinks = random_integer(random, 0, 2), p.softcap = random_integer(random, 0, 1) ? 20 : 0;
  if (random_integer(random, 0, 1)) p.window_right = random_integer(random, 0, 20);
  if (random_integer(random, 0, 1)) p.window_left = random_integer(random, 0, 200);
  p.deterministic = (int32_t)random_integer(random, 0, 1);
  return p;
}

static int32_t random_word(fa_random *random) {
  static const int32_t extremes[] = {INT32_MIN, INT32_MIN / 2, -1, 0, 1, INT32_MAX / 2, INT32_MAX};
  const int64_t kind = random_integer(random, 0, 3);
  return kind == 0   ? extremes[random_integer(random, 0, 6)]
         : kind == 1 ? (int32_t)random_bits(random)
                     : (int32_t)random_integer(random, -100, 400);
}

/* Both passes; false where the device does not take them. */
static bool run_round(const fa_setup *setup, const fa_problem *p, fa_values *x) {
  char why[512];
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    const fa_outcome outcome = run_pass(setup, p, pass, x, why);
    if (outcome == OUTCOME_UNSUPPORTED) return false;
    CHECK(outcome == OUTCOME_RAN, "%s", why);
  }
  return true;
}

/* Whatever bands hold, a run reads and writes its tensors alone, ends, and gives the same again. */
static void test_anything(const fa_setup *setup, fa_dtype dtype, int64_t num_rounds, uint64_t seed) {
  fa_random random = random_stream(seed, dtype);
  for (int64_t round = 0; round < num_rounds; round++) {
    const fa_problem p = random_problem(&random, dtype);
    fa_values x = values_new(&p), y = values_new(&p);
    values_fill(&x, &p, dtype, FILL_NORMAL, 1);
    values_fill(&y, &p, dtype, FILL_NORMAL, 1);
    for (int64_t i = 0; i < values_count(&p, FA_TENSOR_BANDS); i++)
      x.data[FA_TENSOR_BANDS][i] = y.data[FA_TENSOR_BANDS][i] = random_word(&random);
    if (!run_round(setup, &p, &x) || !run_round(setup, &p, &y)) {
      num_skipped++;
    } else {
      char what[160];
      snprintf(what, sizeof what, "seed %llu, round %lld of %s", (unsigned long long)seed, (long long)round,
               fa_dtype_name(dtype));
      const bool repeats = p.deterministic || setup->device.kind != FA_DEVICE_CUDA;
      const fa_tensor_id last = repeats ? FA_TENSOR_DSINK : FA_TENSOR_LSE;
      for (fa_tensor_id id = FA_TENSOR_O; id <= last; id++)
        if (id != FA_TENSOR_DOUT && values_count(&p, id) > 0)
          CHECK(values_equal(&p, id, &x, &y), "%s: other bits of %s", what, fa_tensor_name(id));
    }
    values_free(&x);
    values_free(&y);
  }
}

/* test_bands [--rounds N [--seed N] [--device cuda]]: with --rounds, bands that hold anything alone, on that
 * device; where the host looks at them first, they would be refused. */
int main(int argc, char **argv) {
  int64_t num_rounds = 0, seed = 11;
  fa_setup setup = {.device = {FA_DEVICE_CPU, 0}, .layout = LAYOUT_ALIGNED, .num_threads = 3};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--rounds") == 0) num_rounds = atoll(argv[i + 1]);
    if (strcmp(argv[i], "--seed") == 0) seed = atoll(argv[i + 1]);
    if (strcmp(argv[i], "--device") == 0 && strcmp(argv[i + 1], "cuda") == 0)
      setup.device.kind = FA_DEVICE_CUDA;
  }
  fa_error error;
  if (fa_num_devices(setup.device.kind, &error) == 0) {
    printf("skipped: %s\n", error.message);
    num_skipped++;
    return report();
  }
  /* A GPU's kernels for bands have tiles of their own, and so round otherwise than those for none. */
  if (num_rounds == 0 && setup.device.kind == FA_DEVICE_CPU) {
    test_overlaps();
    test_many_bands();
    test_ranges();
    test_call();
    for (fa_dtype dtype = 0; dtype < FA_NUM_FLOATS; dtype++) test_whole(&setup, dtype);
  }
  for (fa_dtype dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    test_anything(&setup, dtype, num_rounds > 0 ? num_rounds : 40, (uint64_t)seed);
  return report();
}
