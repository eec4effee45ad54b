/*
 * Caches: what is refused, what a full one keeps, that attention over a view of sequences is that over the rows
 * which were appended to them, in one step and in many, before and after forks, and that memory goes when the
 * last who uses it does.
 *
 *   test_cache [cpu|cuda]
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/flash_attention.h"
#include "../../c_src/core/integers.h"
#include "check.h"
#include "devices.h"
#include "random.h"

enum { HEADS = 4, KV_HEADS = 2, MOST_DIM = 8, MOST_ROW = KV_HEADS * MOST_DIM, MOST_ROWS = 400 };

static fa_device device;
static int64_t head_dim; /* 5, or 8, whose rows are multiples of 16 bytes */
static int64_t row_size(void) { return KV_HEADS * head_dim; }

static int64_t page_bytes(void) {
  fa_memory_info info;
  fa_memory_get_info(device, &info, NULL);
  return info.page_bytes;
}

static fa_cache *cache_of(int64_t num_pages, int64_t page_size) {
  const fa_cache_layout layout = {FA_DTYPE_F32, num_pages, page_size, KV_HEADS, head_dim};
  fa_cache *cache;
  fa_error error;
  CHECK(!fa_cache_new(device, &layout, &cache, &error), "%s", error.message);
  return cache;
}

/* ---- what is refused ------------------------------------------------------------------------------------- */

static void refuse(fa_cache_layout layout, const char *message) {
  fa_cache *cache;
  fa_error error;
  CHECK(fa_cache_new(device, &layout, &cache, &error) != FA_STATUS_OK && !cache, "a layout is taken");
  CHECK_TEXT(error.message, message);
}

static void test_refusals(void) {
  refuse((fa_cache_layout){FA_DTYPE_U8, 1, 1, 1, 1}, "type: expected f32, bf16, f16 or f64, got u8");
  refuse((fa_cache_layout){FA_DTYPE_F32, 1, 1, 0, 1}, "num_kv_heads: expected at least 1, got 0");
  refuse((fa_cache_layout){FA_DTYPE_F32, 1, 1, 1, -3}, "head_dim: expected at least 1, got -3");
  refuse((fa_cache_layout){FA_DTYPE_F32, 0, 1, 1, 1}, "num_pages: expected 1 to 2^31 - 1, got 0");
  refuse((fa_cache_layout){FA_DTYPE_F32, INT32_MAX, INT32_MAX, INT64_C(1) << 30, 64},
         "num_pages: more bytes than there are addresses");
  const float row[MOST_ROW] = {0};
  fa_cache *one = cache_of(1, 4), *other = cache_of(1, 4);
  fa_cache_sequence *sequences[2];
  fa_cache_view view;
  fa_error error;
  fa_cache_add_sequence(one, &sequences[0], NULL), fa_cache_add_sequence(other, &sequences[1], NULL);
  CHECK(fa_cache_append(sequences, 2, row, row, 1, &error) == FA_STATUS_INVALID_ARGUMENT, "two caches");
  CHECK_TEXT(error.message, "sequences: expected those of one cache, got of several");
  CHECK(fa_cache_view_begin(sequences, 2, &view, &error) == FA_STATUS_INVALID_ARGUMENT, "a view of two caches");
  CHECK(fa_cache_view_begin(sequences, 0, &view, &error) == FA_STATUS_INVALID_ARGUMENT, "a view of nothing");
  CHECK_TEXT(error.message, "sequences: expected at least one, got none");
  CHECK(fa_cache_append(sequences, 1, row, row, -1, &error) == FA_STATUS_INVALID_ARGUMENT, "rows below 0");
  CHECK(fa_cache_append(sequences, 1, row, row, INT64_MAX, &error) == FA_STATUS_INVALID_ARGUMENT,
        "as many rows as there are numbers");
  CHECK(!fa_cache_append(sequences, 1, row, row, 1, &error), "%s", error.message);
  CHECK(fa_cache_append(sequences, 1, row, row, INT64_MAX, &error) == FA_STATUS_INVALID_ARGUMENT,
        "as many rows as there are numbers, behind one");
  CHECK_TEXT(error.message, "k: expected sequences of at most 2^31 - 1 rows, got more");
  CHECK(fa_cache_length(sequences[0]) == 1, "a refusal changed the length");
  fa_cache_free_sequence(sequences[0]), fa_cache_free_sequence(sequences[1]);
  fa_cache_free(one), fa_cache_free(other);
}

/* Sequences and views keep the cache's memory, a released sequence does not keep its pages. */
static void test_memory(void) {
  const int64_t before = page_bytes(), bytes = 2 * 3 * 4 * row_size() * (int64_t)sizeof(float);
  const float rows[12 * MOST_ROW] = {0};
  fa_cache *cache = cache_of(3, 4);
  fa_cache_sequence *sequence, *empty;
  fa_cache_view view;
  fa_cache_add_sequence(cache, &sequence, NULL), fa_cache_add_sequence(cache, &empty, NULL);
  CHECK(page_bytes() - before == bytes, "%d bytes are counted", (int)(page_bytes() - before));
  CHECK(!fa_cache_append(&sequence, 1, rows, rows, 12, NULL), "a full cache");
  CHECK(fa_cache_num_free_pages(cache) == 0, "a full cache has free pages");
  CHECK(fa_cache_append(&empty, 1, rows, rows, 1, NULL) == FA_STATUS_OUT_OF_MEMORY, "one more row");
  CHECK(!fa_cache_view_begin(&sequence, 1, &view, NULL), "a view");
  CHECK(fa_cache_release(sequence) && fa_cache_num_free_pages(cache) == 0,
        "pages that are read were given back");
  CHECK(fa_cache_length(sequence) == -1 && !fa_cache_release(sequence), "a released sequence");
  fa_cache_free(cache);
  fa_cache_free_sequence(sequence);
  CHECK(page_bytes() - before == bytes, "memory that is read was given back");
  fa_cache_view_end(&view);
  CHECK(fa_cache_num_free_pages(fa_cache_of(empty)) == 3, "pages are lost");
  fa_cache_free_sequence(empty);
  CHECK(page_bytes() == before, "%d bytes are lost", (int)(page_bytes() - before));
}

/* ---- attention over views -------------------------------------------------------------------------------- */

/* A sequence, and the rows that it should hold. */
typedef struct known {
  fa_cache_sequence *sequence; /* NULL: none */
  int64_t length;
  float k[MOST_ROWS * MOST_ROW], v[MOST_ROWS * MOST_ROW];
} known;

static void draw(fa_random *random, float *x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] = (float)random_normal(random);
}

static void attend(const fa_problem *p, fa_tensors *t, float *o) {
  fa_plan plan;
  fa_error error;
  float lse[HEADS * 8];
  t->o = fa_tensor_contiguous(p, FA_TENSOR_O, o), t->lse = fa_tensor_contiguous(p, FA_TENSOR_LSE, lse);
  CHECK(!fa_plan_init(&plan, p, FA_PASS_FORWARD, device, &error) &&
            !fa_run_anywhere(&plan, t, NULL, NULL, &error),
        "%s", error.message);
}

static fa_problem problem_of(int64_t batch, int64_t seqlen_q, int64_t seqlen_k) {
  fa_problem p;
  fa_problem_init(&p);
  p.batch = batch, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.head_dim = head_dim;
  p.num_heads = HEADS, p.num_kv_heads = KV_HEADS, p.window_right = 0;
  return p;
}

/* o of one row of q over the rows that a sequence should hold. */
static void expect(const known *x, float *q, float *o) {
  const fa_problem p = problem_of(1, 1, x->length);
  fa_tensors t = {.q = fa_tensor_contiguous(&p, FA_TENSOR_Q, q),
                  .k = fa_tensor_contiguous(&p, FA_TENSOR_K, (void *)x->k),
                  .v = fa_tensor_contiguous(&p, FA_TENSOR_V, (void *)x->v)};
  attend(&p, &t, o);
}

static void check_view(const fa_cache *cache, const known *sequences, int count, fa_random *random) {
  fa_cache_sequence *handles[8];
  float q[8 * HEADS * MOST_DIM], o[8 * HEADS * MOST_DIM], expected[HEADS * MOST_DIM];
  fa_cache_view view;
  fa_error error;
  for (int i = 0; i < count; i++) handles[i] = sequences[i].sequence;
  CHECK(!fa_cache_view_begin(handles, count, &view, &error), "%s", error.message);
  const fa_cache_layout layout = fa_cache_get_layout(cache);
  fa_problem p = problem_of(count, 1, view.max_pages * layout.page_size);
  p.lengths_batch = count;
  p.num_pages = layout.num_pages, p.page_size = layout.page_size, p.max_pages = view.max_pages;
  draw(random, q, count * HEADS * head_dim);
  fa_tensors t = {.q = fa_tensor_contiguous(&p, FA_TENSOR_Q, q),
                  .k = fa_tensor_contiguous(&p, FA_TENSOR_K, (void *)view.k),
                  .v = fa_tensor_contiguous(&p, FA_TENSOR_V, (void *)view.v),
                  .key_lengths = fa_tensor_contiguous(&p, FA_TENSOR_KEY_LENGTHS, (void *)view.key_lengths),
                  .page_table = fa_tensor_contiguous(&p, FA_TENSOR_PAGE_TABLE, (void *)view.page_table)};
  attend(&p, &t, o);
  fa_cache_view_end(&view);
  for (int i = 0; i < count; i++) {
    float furthest = 0;
    expect(&sequences[i], q + i * HEADS * head_dim, expected);
    for (int d = 0; d < HEADS * head_dim; d++)
      furthest = fmaxf(furthest, fabsf(o[i * HEADS * head_dim + d] - expected[d]));
    CHECK(furthest < 1e-5f, "%d rows: o is off by %g", (int)sequences[i].length, (double)furthest);
  }
}

static void append(known *sequences, int count, int64_t num_rows, fa_random *random) {
  fa_cache_sequence *handles[8];
  float *k = malloc((size_t)(count * num_rows + 1) * row_size() * sizeof *k),
        *v = malloc((size_t)(count * num_rows + 1) * row_size() * sizeof *v);
  fa_error error;
  draw(random, k, count * num_rows * row_size()), draw(random, v, count * num_rows * row_size());
  for (int i = 0; i < count; i++) handles[i] = sequences[i].sequence;
  const fa_status status = fa_cache_append(handles, count, k, v, num_rows, &error);
  CHECK(!status || status == FA_STATUS_OUT_OF_MEMORY, "%s", error.message);
  for (int i = 0; !status && i < count; i++) {
    memcpy(sequences[i].k + sequences[i].length * row_size(), k + i * num_rows * row_size(),
           (size_t)num_rows * row_size() * sizeof *k);
    memcpy(sequences[i].v + sequences[i].length * row_size(), v + i * num_rows * row_size(),
           (size_t)num_rows * row_size() * sizeof *v);
    sequences[i].length += num_rows;
  }
  free(k), free(v);
}

static void fork_known(const known *from, known *to) {
  *to = *from;
  CHECK(!fa_cache_fork(from->sequence, &to->sequence, NULL), "a fork");
}

static void test_attention(int64_t num_pages, int64_t page_size) {
  static known sequences[5];
  fa_random random = random_stream((uint64_t)page_size, 9);
  fa_cache *cache = cache_of(num_pages, page_size);
  for (int i = 0; i < 3; i++) {
    sequences[i].length = 0;
    fa_cache_add_sequence(cache, &sequences[i].sequence, NULL);
  }
  append(sequences + 1, 1, 2 * page_size + 1, &random);
  append(sequences + 2, 1, 7, &random);
  for (int step = 0; step < 20; step++) {
    append(sequences, 3, random_integer(&random, 0, 3), &random);
    check_view(cache, sequences, 3, &random);
  }
  fork_known(&sequences[1], &sequences[3]), fork_known(&sequences[2], &sequences[4]);
  for (int step = 0; step < 20; step++) {
    const int first = (int)random_integer(&random, 0, 4);
    append(sequences + first, (int)random_integer(&random, 1, 5 - first),
           random_integer(&random, 0, 2 * page_size), &random);
    check_view(cache, sequences, 5, &random);
  }
  for (int i = 0; i < 5; i++) fa_cache_free_sequence(sequences[i].sequence);
  CHECK(fa_cache_num_free_pages(cache) == num_pages, "pages are lost");
  fa_cache_free(cache);
}

static void test_device(fa_device tested) {
  device = tested;
  head_dim = 5;
  test_refusals();
  for (; head_dim <= MOST_DIM; head_dim += 3) {
    test_memory();
    test_attention(400, 1);
    test_attention(90, 3);
    test_attention(24, 16);
  }
}

int main(int argc, char **argv) {
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_CUDA};
  test_devices(argc, argv, kinds, sizeof kinds / sizeof *kinds, test_device);
  return report();
}
