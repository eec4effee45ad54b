/*
 * Few rows beside many keys, and caches: keys that end before their tensor does, and keys on pages. What is
 * refused; that a problem with a length is the one whose tensors end there; that what lies behind is not looked
 * at; that pages give the bits that the same keys give in order; and that no length and no page number is
 * dangerous.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/bands.h"
#include "../../c_src/core/integers.h"
#include "../../c_src/core/tensors.h"
#include "check.h"
#include "harness.h"

static fa_problem problem_of(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  fa_problem p;
  fa_problem_init(&p);
  p.batch = batch, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.head_dim = head_dim;
  p.num_heads = 4, p.num_kv_heads = 2, p.window_right = 0;
  return p;
}

/* ---- what is refused ------------------------------------------------------------------------------------- */

static void test_refusals(void) {
  fa_problem p = problem_of(3, 1, 7, 8);
  p.lengths_batch = 3;
  const int32_t fine[3] = {0, 7, 5}, long_one[3] = {0, 8, 5}, negative[3] = {0, 7, -1};
  fa_error error;
  CHECK(fa_key_lengths_check(&p, fine, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_key_lengths_check(&p, long_one, &error) == FA_STATUS_INVALID_ARGUMENT, "a key too many passes");
  CHECK_TEXT(error.message, "key_lengths: expected 0 to seqlen_k 7 in batch 1, got 8");
  CHECK(fa_key_lengths_check(&p, negative, &error) == FA_STATUS_INVALID_ARGUMENT, "less than no key passes");
  CHECK_TEXT(error.message, "key_lengths: expected 0 to seqlen_k 7 in batch 2, got -1");
  p.lengths_batch = 2;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "lengths of two of three batches pass");
  p.lengths_batch = p.bands_batch = p.num_bands = 1;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "lengths beside bands pass");
  CHECK_TEXT(error.argument, "key_lengths");
}

/* A call on tensors of the host looks at them. */
static void test_call(void) {
  fa_problem p = problem_of(1, 1, 3, 4);
  p.lengths_batch = 1;
  int32_t length = 4;
  float q[16] = {0}, k[24] = {0}, o[16], lse[4];
  fa_tensors tensors = {.q = fa_tensor_contiguous(&p, FA_TENSOR_Q, q),
                        .k = fa_tensor_contiguous(&p, FA_TENSOR_K, k),
                        .v = fa_tensor_contiguous(&p, FA_TENSOR_V, k),
                        .key_lengths = fa_tensor_contiguous(&p, FA_TENSOR_KEY_LENGTHS, &length),
                        .o = fa_tensor_contiguous(&p, FA_TENSOR_O, o),
                        .lse = fa_tensor_contiguous(&p, FA_TENSOR_LSE, lse)};
  fa_plan plan;
  fa_error error;
  CHECK(!fa_plan_init(&plan, &p, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CPU, 0}, &error), "%s", error.message);
  CHECK(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error) == FA_STATUS_INVALID_ARGUMENT,
        "a key too many passes");
  CHECK_TEXT(error.argument, "key_lengths");
  length = 2;
  CHECK(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fabsf(lse[0] - logf(2)) < 1e-6f, "lse of two keys alike is %g", (double)lse[0]);
}

/* ---- what they mean -----------------------------------------------------------------------------------------
 */

/* Runs what the device takes of both passes; false where that is nothing. */
static bool run_both(const fa_setup *setup, const fa_problem *p, fa_values *x) {
  char why[512];
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    const fa_outcome outcome = run_pass(setup, p, pass, x, why);
    if (outcome == OUTCOME_UNSUPPORTED) return pass > FA_PASS_FORWARD;
    CHECK(outcome == OUTCOME_RAN, "%s", why);
  }
  return true;
}

/* The first rows of a head's tensor of larger problems, as the tensor of smaller ones has them. */
static void copy_rows(const fa_problem *small, fa_values *to, const fa_problem *large, const fa_values *from,
                      fa_tensor_id id) {
  const int64_t width = small->num_kv_heads * small->head_dim;
  for (int64_t b = 0; b < small->batch; b++)
    memcpy(to->data[id] + b * small->seqlen_k * width, from->data[id] + b * large->seqlen_k * width,
           (size_t)(small->seqlen_k * width) * sizeof(double));
}

/* A cache of which `length` keys are there, garbage behind them, beside tensors that end there. */
static void test_length(const fa_setup *setup, fa_dtype dtype, int64_t seqlen_q, int64_t length,
                        double garbage) {
  fa_problem cache = problem_of(2, seqlen_q, 333, 40), exact = problem_of(2, seqlen_q, length, 40);
  cache.dtype = exact.dtype = dtype, cache.deterministic = exact.deterministic = 1, cache.lengths_batch = 1;
  fa_values x = values_new(&cache), y = values_new(&exact);
  values_fill(&x, &cache, dtype, FILL_NORMAL, 3);
  values_fill(&y, &exact, dtype, FILL_NORMAL, 3);
  x.data[FA_TENSOR_KEY_LENGTHS][0] = (double)length;
  copy_rows(&exact, &y, &cache, &x, FA_TENSOR_K);
  copy_rows(&exact, &y, &cache, &x, FA_TENSOR_V);
  const int64_t width = cache.num_kv_heads * cache.head_dim;
  for (int64_t b = 0; b < 2; b++)
    for (int64_t i = (b * 333 + length) * width; i < (b + 1) * 333 * width; i++)
      x.data[FA_TENSOR_K][i] = x.data[FA_TENSOR_V][i] = garbage;
  if (run_both(setup, &cache, &x) && run_both(setup, &exact, &y)) {
    const double bits = dtype == FA_DTYPE_BF16 ? 0x1p-7 : dtype == FA_DTYPE_F16 ? 0x1p-10 : 0x1p-20;
    CHECK(values_error(&exact, FA_TENSOR_O, &x, &y) <= 4 * bits, "%d rows, length %d: o differs by %g",
          (int)seqlen_q, (int)length, values_error(&exact, FA_TENSOR_O, &x, &y));
    CHECK(values_error(&exact, FA_TENSOR_LSE, &x, &y) <= 0x1p-17, "%d rows, length %d: lse differs by %g",
          (int)seqlen_q, (int)length, values_error(&exact, FA_TENSOR_LSE, &x, &y));
  } else {
    num_skipped++;
  }
  values_free(&x);
  values_free(&y);
}

/* ---- few rows without lengths --------------------------------------------------------------------------- */

/* One head of a few rows, and many keys: its only tile leaves most of any GPU idle. */
static fa_problem few_rows(fa_dtype dtype, int64_t seqlen_q, uint64_t seed) {
  fa_problem p = problem_of(1, seqlen_q, 8209, 40);
  p.num_heads = p.num_kv_heads = 1, p.dtype = dtype, p.deterministic = 1, p.inference = dtype == FA_DTYPE_F32;
  p.window_right = seed % 2 ? 0 : FA_UNBOUNDED, p.num_sinks = (int64_t)(seed % 3);
  p.softcap = seed % 4 == 3 ? 7 : 0;
  if (seed % 5 == 4) p.window_left = 8191;
  return p;
}

static bool has_kernel_for_few_rows(const fa_setup *setup, const fa_problem *p, fa_pass pass) {
  fa_plan plan;
  fa_error error;
  CHECK(!fa_plan_init(&plan, p, pass, setup->device, &error), "%s", error.message);
  return strstr(plan.kernel, "/decode/") != NULL;
}

/* On CUDA they run on the kernel that they run on with a length, and give its bits, every time. */
static void test_few_rows(const fa_setup *setup, fa_dtype dtype, int64_t seqlen_q, uint64_t seed) {
  const fa_problem p = few_rows(dtype, seqlen_q, seed);
  fa_problem with_length = p;
  with_length.lengths_batch = 1;
  CHECK(has_kernel_for_few_rows(setup, &p, FA_PASS_FORWARD), "%d rows", (int)seqlen_q);
  CHECK(!has_kernel_for_few_rows(setup, &p, FA_PASS_BACKWARD), "%d rows", (int)seqlen_q);
  fa_values x = values_new(&p), again = values_new(&p), y = values_new(&with_length);
  values_fill(&x, &p, dtype, FILL_NORMAL, seed);
  values_fill(&again, &p, dtype, FILL_NORMAL, seed);
  values_fill(&y, &with_length, dtype, FILL_NORMAL, seed);
  y.data[FA_TENSOR_KEY_LENGTHS][0] = (double)p.seqlen_k;
  must_run(setup, &p, FA_PASS_FORWARD, &x);
  must_run(setup, &p, FA_PASS_FORWARD, &again);
  must_run(setup, &with_length, FA_PASS_FORWARD, &y);
  for (fa_tensor_id id = FA_TENSOR_O; id <= FA_TENSOR_LSE; id += FA_TENSOR_LSE - FA_TENSOR_O) {
    CHECK(values_equal(&p, id, &x, &again), "%s, %d rows: another %s", fa_dtype_name(dtype), (int)seqlen_q,
          fa_tensor_name(id));
    CHECK(values_equal(&p, id, &x, &y), "%s, %d rows: another %s than with a length", fa_dtype_name(dtype),
          (int)seqlen_q, fa_tensor_name(id));
  }
  values_free(&x);
  values_free(&again);
  values_free(&y);
}

/* What stays with the ordinary kernels: few keys, tiles that take more than a third of any GPU, f32 that a
 * backward may follow, and what kernels for few rows do not take. */
static void test_few_rows_are_declined(const fa_setup *setup) {
  const fa_problem p = few_rows(FA_DTYPE_BF16, 1, 0);
  fa_problem few_keys = p, many_tiles = p, single = p, many_bands = p, distances = p, dropout = p, many_rows;
  few_keys.seqlen_k = 128;
  many_tiles.num_heads = many_tiles.num_kv_heads = 1 << 16;
  single.dtype = FA_DTYPE_F32, many_rows = single;
  many_rows.inference = 1, many_rows.seqlen_q = 65;
  many_bands.num_bands = 9, many_bands.bands_batch = 1;
  distances.num_bands = 2, distances.bands_batch = distances.alibi_batch = 1;
  dropout.num_seed_words = 2, dropout.dropout = 0.25;
  const fa_problem *const declined[] = {&few_keys,   &many_tiles, &single, &many_rows,
                                        &many_bands, &distances,  &dropout};
  for (size_t i = 0; i < sizeof declined / sizeof *declined; i++)
    CHECK(!has_kernel_for_few_rows(setup, declined[i], FA_PASS_FORWARD), "problem %d", (int)i);
}

/* Kernels of their own take a few bands, and what is added to scores; plain problems do not get these. */
static void test_few_rows_with_programs(const fa_setup *setup) {
  const fa_problem p = few_rows(FA_DTYPE_BF16, 2, 0);
  fa_problem bands = p, distances = p, bias = p, mask = p;
  bands.num_bands = 8, bands.bands_batch = 1;
  distances.num_bands = distances.bands_batch = distances.alibi_batch = 1;
  bias.bias_batch = bias.bias_heads = 1, bias.bias_rows = 2;
  mask.bias_batch = mask.bias_heads = mask.bias_rows = 1, mask.bias_dtype = FA_DTYPE_U8;
  const fa_problem *const problems[] = {&p, &bands, &distances, &bias, &mask};
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
    fa_plan plan;
    fa_error error;
    CHECK(!fa_plan_init(&plan, problems[i], FA_PASS_FORWARD, setup->device, &error), "%s", error.message);
    CHECK(strstr(plan.kernel, "/decode/") && (strstr(plan.kernel, "/program") != NULL) == (i > 0),
          "problem %d: %s", (int)i, plan.kernel);
  }
}

/* Whatever lengths hold, a run reads and writes its tensors alone, and gives the same again. */
static void test_anything(const fa_setup *setup, fa_dtype dtype) {
  static const int32_t extremes[] = {INT32_MIN, -1, 0, 1, 90, 91, INT32_MAX};
  for (size_t i = 0; i < sizeof extremes / sizeof *extremes; i++) {
    fa_problem p = problem_of(2, 5, 90, 24);
    p.dtype = dtype, p.lengths_batch = 2, p.deterministic = 1;
    fa_values x = values_new(&p), y = values_new(&p);
    values_fill(&x, &p, dtype, FILL_NORMAL, 1);
    values_fill(&y, &p, dtype, FILL_NORMAL, 1);
    x.data[FA_TENSOR_KEY_LENGTHS][0] = y.data[FA_TENSOR_KEY_LENGTHS][0] = extremes[i];
    if (run_both(setup, &p, &x) && run_both(setup, &p, &y))
      CHECK(values_equal(&p, FA_TENSOR_O, &x, &y), "length %d: other bits of o", (int)extremes[i]);
    values_free(&x);
    values_free(&y);
  }
}

/* ---- threads -------------------------------------------------------------------------------------------- */

/* On the CPU tasks are cut for as many threads as a plan has: how many heads each has, and of how many key
 * heads, changes no bit of the results. */
static void test_threads(fa_dtype dtype) {
  static const struct {
    int64_t batch, seqlen_q, num_heads, num_kv_heads, head_dim;
  } cases[] = {{1, 1, 12, 12, 64}, {2, 1, 5, 5, 40},  {1, 2, 7, 7, 128}, {1, 1, 24, 6, 72}, {3, 1, 9, 3, 24},
               {1, 3, 16, 4, 96},  {1, 1, 40, 2, 64}, {1, 9, 12, 2, 32}, {2, 40, 3, 1, 56}};
  static const char *const threads[] = {"2", "3", "7", "16", "65"};
  const fa_setup setup = {.device = {FA_DEVICE_CPU, 0}, .num_threads = 3};
  char *before = set_environment("FLASH_ATTENTION_NUM_THREADS", "1");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    fa_problem p = problem_of(cases[i].batch, cases[i].seqlen_q, 1709, cases[i].head_dim);
    p.dtype = dtype, p.num_heads = cases[i].num_heads, p.num_kv_heads = cases[i].num_kv_heads;
    p.inference = 1, p.num_sinks = (int64_t)i % 2, p.window_left = i % 3 ? FA_UNBOUNDED : 1500;
    if (i % 4 == 3) p.bias_batch = p.bias_rows = 1, p.bias_heads = p.num_heads, p.bias_dtype = FA_DTYPE_F32;
    fa_values x = values_new(&p), y = values_new(&p);
    values_fill(&x, &p, dtype, FILL_NORMAL, i);
    values_fill(&y, &p, dtype, FILL_NORMAL, i);
    setenv("FLASH_ATTENTION_NUM_THREADS", "1", 1);
    must_run(&setup, &p, FA_PASS_FORWARD, &x);
    for (size_t n = 0; n < sizeof threads / sizeof *threads; n++) {
      setenv("FLASH_ATTENTION_NUM_THREADS", threads[n], 1);
      must_run(&setup, &p, FA_PASS_FORWARD, &y);
      CHECK(values_equal(&p, FA_TENSOR_O, &x, &y) && values_equal(&p, FA_TENSOR_LSE, &x, &y),
            "%s, case %d: other bits with %s threads", fa_dtype_name(dtype), (int)i, threads[n]);
    }
    values_free(&x);
    values_free(&y);
  }
  restore_environment("FLASH_ATTENTION_NUM_THREADS", before);
}

/* ---- pages ----------------------------------------------------------------------------------------------- */

static bool same_kernel(const fa_setup *setup, const fa_problem *p, const fa_problem *other) {
  fa_plan x, y;
  CHECK(!fa_plan_init(&x, p, FA_PASS_FORWARD, setup->device, NULL) &&
            !fa_plan_init(&y, other, FA_PASS_FORWARD, setup->device, NULL),
        "plans");
  return strcmp(x.kernel, y.kernel) == 0;
}

/* Every option and every tensor that a forward may have, by the digits of a seed. */
static void add_options(fa_problem *p, uint64_t seed) {
  static const fa_dtype bias_types[] = {FA_DTYPE_F32, FA_DTYPE_U8};
  p->lengths_batch = seed % 3 ? p->batch : 0;
  if (p->lengths_batch == 0 && seed % 2) p->num_bands = 3, p->bands_batch = p->batch;
  p->num_sinks = (int64_t)(seed % 2), p->softcap = seed % 5 ? 0 : 7;
  if (seed % 4 == 0) p->window_left = p->seqlen_k / 2;
  if (seed % 7 == 1) p->alibi_batch = p->batch;
  if (seed % 7 == 2) p->num_seed_words = 2, p->dropout = 0.25;
  if (seed % 7 > 4)
    p->bias_batch = p->bias_rows = 1, p->bias_heads = p->num_heads, p->bias_dtype = bias_types[seed % 7 - 5];
}

/* On CUDA only kernels for few rows find pages, and these know no dropout, and no distances of several bands.
 */
static bool is_declined(const fa_setup *setup, const fa_problem *p) {
  return setup->device.kind == FA_DEVICE_CUDA && (p->dropout != 0 || (p->num_bands > 1 && p->alibi_batch > 0));
}

/* What lies on pages gives the bits that it gives in order to the same kernel. */
static void test_pages(const fa_setup *setup, fa_dtype dtype, int64_t page_size, int64_t max_pages,
                       int64_t seqlen_q, int64_t head_dim, uint64_t seed) {
  fa_problem p = problem_of(3, seqlen_q, page_size * max_pages, head_dim);
  p.dtype = dtype, p.page_size = page_size, p.max_pages = max_pages, p.num_pages = max_pages * 2 + 1;
  add_options(&p, seed);
  const fa_problem plain = problem_in_order(&p);
  fa_values x = values_new(&p);
  values_fill(&x, &p, dtype, FILL_NORMAL, seed);
  fa_values y = values_in_order(&p, &x);
  char why[512];
  const fa_outcome outcome = run_pass(setup, &p, FA_PASS_FORWARD, &x, why);
  if (is_declined(setup, &p)) {
    CHECK(outcome == OUTCOME_UNSUPPORTED, "pages of %d: what no kernel takes passes", (int)page_size);
    CHECK(strstr(why, "dropout:") || strstr(why, "page_table:"), "pages of %d: %s", (int)page_size, why);
    values_free(&x);
    values_free(&y);
    return;
  }
  CHECK(outcome == OUTCOME_RAN, "pages of %d: %s", (int)page_size, why);
  must_run(setup, &plain, FA_PASS_FORWARD, &y);
  const double bits = dtype == FA_DTYPE_BF16 ? 0x1p-7 : dtype == FA_DTYPE_F16 ? 0x1p-10 : 0x1p-20;
  const bool equal = values_equal(&plain, FA_TENSOR_O, &x, &y) && values_equal(&plain, FA_TENSOR_LSE, &x, &y);
  CHECK(same_kernel(setup, &p, &plain) ? equal
                                       : values_error(&plain, FA_TENSOR_O, &x, &y) <= 4 * bits &&
                                             values_error(&plain, FA_TENSOR_LSE, &x, &y) <= 0x1p-17,
        "%s, %d pages of %d, %d rows, head_dim %d: o is off by %g, lse by %g", fa_dtype_name(dtype),
        (int)max_pages, (int)page_size, (int)seqlen_q, (int)head_dim, values_error(&plain, FA_TENSOR_O, &x, &y),
        values_error(&plain, FA_TENSOR_LSE, &x, &y));
  values_free(&x);
  values_free(&y);
}

static void test_page_sizes(const fa_setup *setup, fa_dtype dtype) {
  static const int64_t sizes[] = {1, 2, 3, 5, 16, 17, 64, 100};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (int64_t max_pages = 1; max_pages * sizes[i] < 700; max_pages = max_pages * 6 + 1) {
      test_pages(setup, dtype, sizes[i], max_pages, 1, 40, i * 7 + (uint64_t)max_pages);
      test_pages(setup, dtype, sizes[i], max_pages, 3 + (int64_t)i * 9, i % 2 ? 64 : 21,
                 i * 5 + (uint64_t)max_pages);
    }
}

/* Wide heads, of which a GPU's blocks hold the fewest keys. On CUDA f32 at 256 is left to those that have more
 * than 99 KiB of shared memory. Tensors are aligned, so that what is planned runs: kernels that replace it need
 * not be the same with pages and without. */
static void test_wide_pages(fa_device device, fa_dtype dtype) {
  const fa_setup setup = {.device = device, .layout = LAYOUT_ALIGNED, .num_threads = 3};
  const int64_t widest = dtype == FA_DTYPE_BF16 || dtype == FA_DTYPE_F16 ? 256 : 128;
  for (int64_t head_dim = 64; head_dim <= widest; head_dim *= 2)
    for (uint64_t seed = 0; seed < 8; seed++)
      test_pages(&setup, dtype, 16, 20, seed % 2 ? 25 : 3, head_dim, seed);
}

/* Rows that see the last keys alone weigh them by the same distances however many there are before, more than
 * f32 counts among them. All lie on one page. */
static void test_far_keys(const fa_setup *setup, fa_dtype dtype) {
  const int64_t page_size = 4096, max_pages[] = {1, (1 << 12) + 1};
  fa_values x[2];
  for (int i = 0; i < 2; i++) {
    fa_problem p = problem_of(1, 3, page_size * max_pages[i], 24);
    p.dtype = dtype, p.page_size = page_size, p.max_pages = max_pages[i], p.num_pages = 1;
    p.window_left = 50, p.alibi_batch = 1;
    x[i] = values_new(&p);
    values_fill(&x[i], &p, dtype, FILL_NORMAL, 1);
    memset(x[i].data[FA_TENSOR_PAGE_TABLE], 0, (size_t)p.max_pages * sizeof(double));
    for (int64_t h = 0; h < p.num_heads; h++) x[i].data[FA_TENSOR_ALIBI_SLOPES][h] = 0.25;
    must_run(setup, &p, FA_PASS_FORWARD, &x[i]);
  }
  const fa_problem p = problem_of(1, 3, page_size, 24);
  const double bits = dtype == FA_DTYPE_BF16 ? 0x1p-7 : dtype == FA_DTYPE_F16 ? 0x1p-10 : 0x1p-20;
  CHECK(values_error(&p, FA_TENSOR_O, &x[0], &x[1]) <= 4 * bits &&
            values_error(&p, FA_TENSOR_LSE, &x[0], &x[1]) <= 0x1p-17,
        "%s: behind 2^24 keys o is off by %g, lse by %g", fa_dtype_name(dtype),
        values_error(&p, FA_TENSOR_O, &x[0], &x[1]), values_error(&p, FA_TENSOR_LSE, &x[0], &x[1]));
  values_free(&x[0]);
  values_free(&x[1]);
}

static void test_page_refusals(void) {
  fa_problem p = problem_of(2, 1, 12, 8);
  p.page_size = 4, p.max_pages = 3, p.num_pages = 5;
  fa_error error;
  fa_plan plan;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(
      fa_plan_init(&plan, &p, FA_PASS_BACKWARD, (fa_device){FA_DEVICE_CPU, 0}, &error) == FA_STATUS_UNSUPPORTED,
      "a backward by pages passes");
  CHECK_TEXT(error.argument, "page_table");
  p.seqlen_k = 11;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "a page that is not whole passes");
  CHECK_TEXT(error.message, "seqlen_k: expected max_pages * page_size, got 11");
  p.max_pages = 0;
  CHECK(fa_problem_validate(&p, &error) == FA_STATUS_INVALID_ARGUMENT, "pages without a table pass");
  CHECK_TEXT(error.argument, "page_table");
}

/* Sizes come from the shapes of pages and their table. */
static void test_page_shapes(void) {
  fa_problem p;
  fa_error error;
  fa_problem_init(&p);
  const fa_shape q = {FA_DTYPE_BF16, 4, {2, 1, 4, 8}, -1}, k = {FA_DTYPE_BF16, 4, {5, 4, 2, 8}, -1},
                 table = {FA_DTYPE_S32, 2, {2, 3}, -1}, short_table = {FA_DTYPE_S32, 2, {1, 3}, -1};
  const fa_shape *shapes[FA_NUM_TENSORS] = {
      [FA_TENSOR_Q] = &q, [FA_TENSOR_K] = &k, [FA_TENSOR_V] = &k, [FA_TENSOR_PAGE_TABLE] = &table};
  CHECK(!fa_problem_set_shapes(&p, FA_PASS_FORWARD, shapes, &error), "%s", error.message);
  CHECK(p.seqlen_k == 12 && p.page_size == 4 && p.num_pages == 5 && p.max_pages == 3, "sizes of pages");
  CHECK(fa_tensor_shape(&p, FA_TENSOR_K).dims[0] == 5 && !fa_varies_along(&p, FA_TENSOR_K, FA_AXIS_BATCH), "k");
  shapes[FA_TENSOR_PAGE_TABLE] = &short_table;
  CHECK(fa_problem_set_shapes(&p, FA_PASS_FORWARD, shapes, &error) == FA_STATUS_INVALID_ARGUMENT,
        "a table of one batch passes");
  CHECK_TEXT(error.message, "page_table: expected batch 2 as in q, got 1");
  shapes[FA_TENSOR_PAGE_TABLE] = NULL;
  CHECK(fa_problem_set_shapes(&p, FA_PASS_FORWARD, shapes, &error) == FA_STATUS_INVALID_ARGUMENT,
        "pages of another number than batches pass without a table");
}

/* On Hopper few rows beside keys that end at lengths have kernels by how many bytes the keys have, by whether
 * their rows lie within lines of the cache, and by whether 16 rows are enough for those of a key head; more
 * than any has room for are several blocks of the first that has the most. */
static void test_kernels(fa_device device) {
  static const struct {
    int64_t batch, seqlen_q, seqlen_k, num_heads, head_dim;
    const char *kernel;
    int64_t page_size;
  } cases[] = {{1, 1, 8192, 32, 128, "cuda/sm90/decode/bf16/d128/r16", 0},
               {1, 4, 8192, 32, 128, "cuda/sm90/decode/bf16/d128/r16", 0},
               {1, 5, 8192, 32, 128, "cuda/sm90/decode/bf16/d128", 0},
               {1, 1, 3109, 32, 64, "cuda/sm90/decode/bf16/d64/k64/r16", 0},
               {1, 5, 3109, 32, 64, "cuda/sm90/decode/bf16/d64/k64", 0},
               {1, 70, 8192, 8, 64, "cuda/sm90/decode/bf16/d64/k64", 64},
               {16, 1, 8192, 64, 64, "cuda/sm90/decode/bf16/d64/k128", 0},
               {3, 1, 5000, 32, 80, "cuda/sm90/decode/bf16/d128/r16", 0},
               {8, 1, 8192, 64, 80, "cuda/decode/bf16/d128/r16", 0},
               {8, 3, 8192, 64, 80, "cuda/sm90/decode/bf16/d128", 0},
               {8, 1, 8192, 64, 160, "cuda/sm90/decode/bf16/d256", 0}};
  for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
    fa_problem p = problem_of(cases[i].batch, cases[i].seqlen_q, cases[i].seqlen_k, cases[i].head_dim);
    p.dtype = FA_DTYPE_BF16, p.num_heads = cases[i].num_heads, p.num_kv_heads = 8, p.lengths_batch = p.batch;
    if (cases[i].page_size > 0)
      p.page_size = cases[i].page_size, p.max_pages = p.num_pages = p.seqlen_k / p.page_size;
    fa_plan plan;
    fa_error error;
    CHECK(!fa_plan_init(&plan, &p, FA_PASS_FORWARD, device, &error), "%s", error.message);
    if (i == 0 && !strstr(plan.kernel, "sm90")) {
      num_skipped++;
      return;
    }
    CHECK(strcmp(plan.kernel, cases[i].kernel) == 0, "case %d: %s", i, plan.kernel);
  }
}

/* A backward of few rows has kernels by how many rows the heads of a key head have, if all of these see the
 * same keys, and more than a column block of the ordinary kernels holds where there is much to multiply. */
static void test_backward_kernels(fa_device device) {
  static const struct {
    int64_t seqlen_q, seqlen_k, num_heads, head_dim, window_left;
    const char *kernel; /* NULL: not one of these */
  } cases[] = {{16, 8192, 8, 128, FA_UNBOUNDED, "cuda/few/bf16/d128/r16"},
               {8, 8192, 32, 128, FA_UNBOUNDED, "cuda/few/bf16/d128/r32"},
               {9, 8192, 32, 128, FA_UNBOUNDED, NULL},
               {4, 500, 32, 40, FA_UNBOUNDED, "cuda/few/bf16/d64/r16"},
               {16, 500, 32, 64, FA_UNBOUNDED, "cuda/few/bf16/d64/r64"},
               {17, 500, 32, 64, FA_UNBOUNDED, NULL},
               {64, 128, 8, 64, FA_UNBOUNDED, NULL},
               {64, 129, 8, 64, FA_UNBOUNDED, "cuda/few/bf16/d64/r64"},
               {32, 64, 32, 32, FA_UNBOUNDED, NULL},
               {16, 8192, 8, 160, FA_UNBOUNDED, NULL},
               {16, 8192, 8, 128, 100, NULL}};
  for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
    fa_problem p = problem_of(2, cases[i].seqlen_q, cases[i].seqlen_k, cases[i].head_dim);
    p.dtype = FA_DTYPE_BF16, p.num_heads = cases[i].num_heads, p.num_kv_heads = 8;
    p.window_left = cases[i].window_left, p.window_right = FA_UNBOUNDED;
    for (p.lengths_batch = 0; p.lengths_batch <= 2; p.lengths_batch += 2) {
      fa_plan plan;
      fa_error error;
      CHECK(!fa_plan_init(&plan, &p, FA_PASS_BACKWARD, device, &error), "%s", error.message);
      if (cases[i].kernel) /* or a smaller one of that kind */
        CHECK(strncmp(plan.kernel, cases[i].kernel, strlen(cases[i].kernel)) == 0, "case %d: %s", i,
              plan.kernel);
      else
        CHECK(!strstr(plan.kernel, "few"), "case %d: %s", i, plan.kernel);
    }
  }
}

static void test_device(fa_device device) {
  const fa_setup setup = {.device = device, .num_threads = 3};
  for (fa_dtype dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
    if (dtype == FA_DTYPE_F64 && device.kind == FA_DEVICE_CUDA) continue;
    for (int64_t seqlen_q = 1; seqlen_q < 100; seqlen_q = seqlen_q * 5 + 1)
      for (int64_t length = 1; length < 333; length = length * 3 + 16) {
        test_length(&setup, dtype, seqlen_q, length, 1e4);
        test_length(&setup, dtype, seqlen_q, length, NAN);
      }
    test_anything(&setup, dtype);
    if (device.kind == FA_DEVICE_CPU) test_threads(dtype);
    if (device.kind == FA_DEVICE_CUDA)
      for (uint64_t seed = 0; seed < 12; seed++) test_few_rows(&setup, dtype, 1 + (int64_t)seed * 5 % 16, seed);
    test_page_sizes(&setup, dtype);
    test_wide_pages(device, dtype);
    test_far_keys(&setup, dtype);
  }
  if (device.kind == FA_DEVICE_CUDA) {
    test_few_rows_are_declined(&setup);
    test_few_rows_with_programs(&setup);
  }
}

/* On Hopper other kernels take tensors of 16-bit types that are aligned. */
static void test_aligned(fa_device device) {
  const fa_setup setup = {.device = device, .layout = LAYOUT_ALIGNED, .num_threads = 3};
  static const fa_dtype types[] = {FA_DTYPE_BF16, FA_DTYPE_F16};
  for (int i = 0; i < 2; i++) {
    test_anything(&setup, types[i]);
    test_page_sizes(&setup, types[i]);
    test_far_keys(&setup, types[i]);
  }
}

int main(void) {
  test_refusals();
  test_call();
  test_page_refusals();
  test_page_shapes();
  const fa_setup reference = {.device = {FA_DEVICE_REFERENCE, 0}};
  test_page_sizes(&reference, FA_DTYPE_BF16);
  test_device((fa_device){FA_DEVICE_CPU, 0});
  const fa_device cuda = {FA_DEVICE_CUDA, 0};
  if (fa_num_devices(FA_DEVICE_CUDA, NULL) > 0)
    test_device(cuda), test_aligned(cuda), test_kernels(cuda), test_backward_kernels(cuda);
  return report();
}
