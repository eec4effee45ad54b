/*
 * Heaps, transfers and slices, on the fake GPU: whatever lies where, results are those of the reference bit for
 * bit, bytes are counted, faults leave nothing behind, and memory is given back.
 */
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../c_src/core/problem.h"
#include "../../c_src/core/tensors.h"
#include "../../c_src/host/lane.h"
#include "../../c_src/host/pack.h"
#include "../../c_src/host/slices.h"
#include "../../c_src/core/processors.h"
#include "../../c_src/core/threads.h"
#include "../../c_src/cpu/half.h"
#include "check.h"
#include "fake_gpu.h"
#include "harness.h"
#include "random.h"

static const fa_device cpu = {FA_DEVICE_CPU, 0}, reference = {FA_DEVICE_REFERENCE, 0};
static const fa_slicing finest = {1, 1, 1, 1, 1, 0};

static fa_heap *heap_of(int32_t index) {
  fa_heap *heap;
  if (fa_heap_of(&fake_gpu, index, &heap, NULL)) exit(2);
  return heap;
}

/* Nothing is held but what is at hand for the next call. */
static void check_nothing_is_used(const char *when) {
  for (int i = 0; i < FAKE_DEVICES; i++) {
    size_t used, idle, limit;
    fa_pool_sizes(&heap_of(i)->pool, &used, &idle, &limit);
    CHECK(used == 0, "%s: %zu bytes of device %d are still used", when, used, i);
    fa_pool_sizes(&heap_of(i)->pinned->staging, &used, &idle, &limit);
    CHECK(used == 0, "%s: %zu pinned bytes are still used for staging", when, used);
    fa_pool_sizes(&heap_of(i)->pinned->callers, &used, &idle, &limit);
    CHECK(used == 0, "%s: %zu pinned bytes are still used", when, used);
  }
}

static void trim(void) {
  for (int i = 0; i < FAKE_DEVICES; i++) fa_heap_trim(heap_of(i));
}

/* ---- a problem, its tensors in several places, and its right results ------------------------------------ */

/* A KEPT tensor is in ordinary memory and stays on the device too; a COPIED one is twice on the device. */
typedef enum tensor_home { PAGEABLE, PINNED, ON_DEVICE, ON_OTHER_DEVICE, KEPT, COPIED, NUM_WHERES } tensor_home;

typedef struct setting {
  fa_problem problem;
  fa_pass pass;
  void *host[FA_NUM_TENSORS]; /* inputs, and the outputs that are right */
  tensor_home where[FA_NUM_TENSORS];
  void *given[FA_NUM_TENSORS];       /* as where says */
  void *on_device[FA_NUM_TENSORS];   /* of KEPT and COPIED */
  bool of_one_batch[FA_NUM_TENSORS]; /* the first one is there, and all others are it */
} setting;

static size_t size_of(const setting *s, int id) { return (size_t)fa_tensor_shape(&s->problem, id).size_bytes; }

static size_t placed_size(const setting *s, int id) {
  return size_of(s, id) / (size_t)(s->of_one_batch[id] ? s->problem.batch : 1);
}

static fa_tensor_role role_of(const setting *s, int id) { return fa_tensor_role_in(&s->problem, s->pass, id); }

static void take(fa_pool *pool, size_t bytes, void **memory) {
  if (fa_pool_take(pool, bytes ? bytes : 1, memory, NULL)) exit(2);
}

static void place_tensor(setting *s, int id) {
  const size_t bytes = placed_size(s, id);
  void **given = &s->given[id];
  switch (s->where[id]) {
    case PINNED: take(&heap_of(0)->pinned->callers, bytes, given); break;
    case COPIED: take(&heap_of(0)->pool, bytes, &s->on_device[id]); /* fall through */
    case ON_DEVICE: take(&heap_of(0)->pool, bytes, given); break;
    case ON_OTHER_DEVICE: take(&heap_of(1)->pool, bytes, given); break;
    case KEPT: take(&heap_of(0)->pool, bytes, &s->on_device[id]); /* fall through */
    default: *given = malloc(bytes + 1);
  }
  memset(*given, 0xff, bytes);
  if (role_of(s, id) == FA_ROLE_INPUT) memcpy(*given, s->host[id], bytes);
}

static void remove_tensor(setting *s, int id) {
  switch (s->where[id]) {
    case PINNED: fa_pool_give(&heap_of(0)->pinned->callers, s->given[id]); break;
    case COPIED: fa_pool_give(&heap_of(0)->pool, s->on_device[id]); /* fall through */
    case ON_DEVICE: fa_pool_give(&heap_of(0)->pool, s->given[id]); break;
    case ON_OTHER_DEVICE: fa_pool_give(&heap_of(1)->pool, s->given[id]); break;
    case KEPT: fa_pool_give(&heap_of(0)->pool, s->on_device[id]); /* fall through */
    default: free(s->given[id]);
  }
  s->on_device[id] = NULL;
}

static void run_reference(setting *s, fa_pass pass) {
  fa_plan plan;
  fa_tensors tensors = {0};
  fa_error error;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&s->problem, id, s->host[id]);
  if (fa_plan_init(&plan, &s->problem, pass, reference, &error) ||
      fa_run_anywhere(&plan, &tensors, NULL, NULL, &error)) {
    printf("FAILED: %s\n", error.message);
    exit(1);
  }
}

/* A number that f16 holds, so that results are the same where kernels' operands are packed. */
static double random_number(fa_random *random) { return round(random_normal(random) * 64) / 64; }

/* Lengths that a cache may have; page numbers of which some are none. */
static double random_place(const fa_problem *problem, int id, fa_random *random) {
  return (double)(id == FA_TENSOR_KEY_LENGTHS ? random_integer(random, 0, problem->seqlen_k)
                                              : random_integer(random, -1, problem->num_pages));
}

/* Bands that share no cell, as each has rows of its own: some columns, and how far its rows see. */
static void fill_bands(const fa_problem *problem, int32_t *band, fa_random *random) {
  for (int64_t batch = 0; batch < problem->bands_batch; batch++)
    for (int64_t n = 0, row = 0; n < problem->num_bands; n++, band += 6) {
      const int64_t column = random_integer(random, 0, problem->seqlen_k);
      band[0] = (int32_t)row, row = random_integer(random, row, problem->seqlen_q);
      band[1] = (int32_t)row, band[2] = (int32_t)column;
      band[3] = (int32_t)random_integer(random, column, problem->seqlen_k);
      band[4] = random_integer(random, 0, 1) ? INT32_MAX : (int32_t)random_integer(random, -2, 20);
      band[5] = random_integer(random, 0, 1) ? INT32_MAX : (int32_t)random_integer(random, -2, 20);
    }
}

static setting setting_new(const fa_problem *problem, fa_pass pass, fa_random *random) {
  setting s = {.problem = *problem, .pass = pass};
  for (int id = 0; id < FA_TENSOR_TANGENT_Q; id++) {
    const fa_dtype dtype = fa_tensor_shape(problem, id).dtype;
    s.host[id] = calloc(1, size_of(&s, id) + 64);
    for (size_t i = 0; i < size_of(&s, id) / fa_dtype_bytes(dtype); i++)
      set_element(dtype, (unsigned char *)s.host[id] + i * fa_dtype_bytes(dtype),
                  dtype == FA_DTYPE_S32 ? random_place(problem, id, random) : random_number(random));
  }
  fill_bands(problem, s.host[FA_TENSOR_BANDS], random);
  run_reference(&s, FA_PASS_FORWARD);
  if (pass == FA_PASS_BACKWARD) run_reference(&s, pass);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    s.where[id] = (tensor_home)random_integer(random, 0, NUM_WHERES - 1);
  return s;
}

static void setting_place(setting *s) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(s, id)) place_tensor(s, id);
}

static void setting_remove(setting *s) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(s, id)) remove_tensor(s, id);
}

static void setting_free(setting *s) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(s->host[id]);
}

static fa_plan fake_plan(const setting *s) {
  fa_plan plan;
  if (fa_plan_init(&plan, &s->problem, s->pass, reference, NULL)) exit(2);
  plan.backend = &fake_gpu;
  plan.device = (fa_device){FA_DEVICE_CUDA, 0};
  return plan;
}

/* On one device, or on those that are listed. */
static fa_status setting_run_on(setting *s, const fa_device *devices, int32_t num_devices, void *stream,
                                fa_measurements *measured, fa_error *error) {
  fa_tensors tensors = {0};
  fa_placement placement = {.stream = stream};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!role_of(s, id)) continue;
    fa_tensor *tensor = fa_tensor_at(&tensors, id);
    *tensor = fa_tensor_contiguous(&s->problem, id, s->given[id]);
    if (!fa_is_strided(id)) tensor->stride_head = 12345; /* is ignored */
    if (s->of_one_batch[id]) tensor->stride_batch = 0;
    fa_tensor_at(&placement.on_device, id)->data = s->on_device[id];
  }
  const fa_plan plan = fake_plan(s);
  return num_devices ? fa_run_on_devices(&plan, devices, num_devices, &tensors, measured, error)
                     : fa_run_anywhere(&plan, &tensors, &placement, measured, error);
}

static fa_status setting_run(setting *s, void *stream, fa_measurements *measured, fa_error *error) {
  return setting_run_on(s, NULL, 0, stream, measured, error);
}

static bool is_right(const setting *s, int id) {
  const size_t bytes = placed_size(s, id);
  const bool right = memcmp(s->given[id], s->host[id], bytes) == 0;
  return right && (!s->on_device[id] || memcmp(s->on_device[id], s->host[id], bytes) == 0);
}

static int64_t bytes_packed_away(const setting *s) {
  const int operands[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  int64_t bytes = 0;
  for (int i = 0; i < 4; i++) {
    const int id = operands[i];
    const bool is_pageable = s->where[id] == PAGEABLE || s->where[id] == KEPT;
    if (role_of(s, id) != FA_ROLE_INPUT || !is_pageable) continue;
    const size_t rows = size_of(s, id) / ((size_t)s->problem.head_dim * sizeof(float));
    bytes += (int64_t)(size_of(s, id) - rows * fa_packed_bytes(s->problem.head_dim));
  }
  return bytes;
}

static void check_run(setting *s) {
  const long num_unpacked = fake_get_state().num_unpacked;
  char text[200];
  fa_measurements measured;
  fa_error error;
  int64_t bytes[3] = {0};
  fa_problem_format(&s->problem, text, sizeof text);
  static int num_calls; /* of which every other one is not measured */
  const bool measures = num_calls++ % 2 == 0;
  const fa_status status = setting_run(s, NULL, measures ? &measured : NULL, &error);
  CHECK(status == FA_STATUS_OK, "%s: %s", text, error.message);
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) {
    if (!role_of(s, id)) continue;
    CHECK(is_right(s, id), "%s: %s is wrong where it lies at %d", text, fa_tensor_name(id), s->where[id]);
    if (s->where[id] != ON_DEVICE && s->where[id] != COPIED) bytes[role_of(s, id)] += (int64_t)size_of(s, id);
  }
  if (!measures) return;
  if (fake_get_state().num_unpacked > num_unpacked) bytes[FA_ROLE_INPUT] -= bytes_packed_away(s);
  CHECK(measured.bytes_to_device == bytes[FA_ROLE_INPUT] && measured.bytes_from_device == bytes[FA_ROLE_OUTPUT],
        "%s: %lld bytes up, %lld down", text, (long long)measured.bytes_to_device,
        (long long)measured.bytes_from_device);
  CHECK(measured.kernel_seconds >= 1, "%s: kernels took no time", text);
}

/* Keys that end somewhere, or lie on pages, which the backward does not take. */
static void add_cache(fa_problem *problem, fa_pass pass, fa_random *random) {
  if (random_integer(random, 0, 3) == 0)
    problem->lengths_batch = random_integer(random, 0, 1) ? 1 : problem->batch;
  if (pass != FA_PASS_FORWARD || random_integer(random, 0, 2)) return;
  problem->page_size = random_integer(random, 1, 5), problem->max_pages = random_integer(random, 1, 4);
  problem->num_pages = random_integer(random, 0, 9);
  problem->seqlen_k = problem->page_size * problem->max_pages;
}

static fa_problem random_problem(fa_pass pass, fa_random *random) {
  fa_problem problem;
  fa_problem_init(&problem);
  problem.dtype = random_integer(random, 0, 1) ? FA_DTYPE_F32 : FA_DTYPE_BF16;
  problem.batch = random_integer(random, 0, 5);
  problem.seqlen_q = random_integer(random, 1, 40), problem.seqlen_k = random_integer(random, 0, 40);
  problem.num_kv_heads = random_integer(random, 1, 9);
  problem.num_heads = problem.num_kv_heads * random_integer(random, 1, 3);
  problem.head_dim = random_integer(random, 1, 20);
  if (random_integer(random, 0, 1)) problem.precision = FA_PRECISION_DEFAULT, problem.head_dim = 8;
  problem.num_sinks = random_integer(random, 0, 3) ? 0 : random_integer(random, 1, 2);
  if (random_integer(random, 0, 1)) problem.window_right = random_integer(random, 0, 3) * 3;
  if (random_integer(random, 0, 1)) problem.window_left = random_integer(random, 0, 12);
  if (random_integer(random, 0, 3) == 0) problem.alibi_batch = random_integer(random, 0, 1) ? 1 : problem.batch;
  if (random_integer(random, 0, 3) == 0) {
    problem.bias_batch = random_integer(random, 0, 1) ? 1 : problem.batch;
    problem.bias_heads = random_integer(random, 0, 1) ? 1 : problem.num_heads;
    problem.bias_rows = random_integer(random, 0, 1) ? 1 : problem.seqlen_q;
    if (random_integer(random, 0, 1)) problem.bias_dtype = FA_DTYPE_U8;
  }
  add_cache(&problem, pass, random);
  if (problem.lengths_batch == 0 && problem.max_pages == 0 && random_integer(random, 0, 2) == 0) {
    problem.bands_batch = random_integer(random, 0, 1) || problem.batch == 0 ? 1 : problem.batch;
    problem.num_bands = random_integer(random, 1, 4);
  }
  return problem;
}

/* ---- what is tested ---------------------------------------------------------------------------------------
 */

static fa_range columns_of(const fa_problem *problem, int64_t row) {
  return fa_band_columns(fa_problem_band(problem), (fa_range){row, row + 1});
}

static bool same_range(fa_range a, fa_range b) {
  const bool empty_a = a.end <= a.begin, empty_b = b.end <= b.begin;
  return empty_a || empty_b ? empty_a == empty_b : a.begin == b.begin && a.end == b.end;
}

/* Whether the problem's rows see what they see where it lies in the whole, each row the first time. */
static bool lies_in(const fa_problem *problem, const fa_problem *whole, char *is_covered) {
  const fa_origin *o = &problem->origin;
  bool right = problem->num_heads * whole->num_kv_heads == problem->num_kv_heads * whole->num_heads;
  for (int64_t batch = o->batch; batch < o->batch + problem->batch; batch++)
    for (int64_t head = o->head; head < o->head + problem->num_heads; head++)
      for (int64_t row = 0; row < problem->seqlen_q; row++) {
        const int64_t there = o->row + row;
        right = right && batch < whole->batch && head < whole->num_heads && there < whole->seqlen_q;
        if (!right) return false;
        char *covered = &is_covered[(batch * whole->num_heads + head) * whole->seqlen_q + there];
        right = !*covered && (whole->num_bands > 0 || /* which are data */
                              same_range(columns_of(problem, row), columns_of(whole, there)));
        *covered = 1;
      }
  return right;
}

/* The problems of the last runs are the whole, cut. */
static void check_origins(const fa_problem *problem, long num_runs) {
  const fake_state state = fake_get_state();
  fa_problem whole = *problem;
  fa_problem_canonicalise(&whole);
  const size_t num_rows = (size_t)(whole.batch * whole.num_heads * whole.seqlen_q);
  char *is_covered = calloc(1, num_rows + 1), text[200];
  fa_problem_format(&whole, text, sizeof text);
  for (long run = state.num_runs - num_runs; run < state.num_runs; run++)
    CHECK(lies_in(&state.problems[run % FAKE_PROBLEMS], &whole, is_covered), "%s: slice %ld of %ld", text,
          run - state.num_runs + num_runs, num_runs);
  CHECK(memchr(is_covered, 0, num_rows) == NULL, "%s: rows are missing", text);
  free(is_covered);
}

static void test_places_and_slices(void) {
  fa_random random = random_stream(7, 0);
  long num_runs = 0, most_runs = 0;
  for (int i = 0; i < 400; i++) {
    fa_host_slicing = (fa_slicing){.least_bytes = random_integer(&random, 1, 400),
                                   .least_rows = random_integer(&random, 1, 60),
                                   .least_row_bytes = random_integer(&random, 1, 60),
                                   .least_staged_row_bytes = random_integer(&random, 1, 200),
                                   .row_unit = random_integer(&random, 1, 9),
                                   .few_rows = random_integer(&random, 0, 9)};
    const fa_pass pass = i % 2 ? FA_PASS_BACKWARD : FA_PASS_FORWARD;
    const fa_problem problem = random_problem(pass, &random);
    setting s = setting_new(&problem, pass, &random);
    const long before = fake_get_state().num_runs;
    for (int id = 0; id < FA_NUM_TENSORS && i % 4 == 0; id++) s.where[id] = PINNED; /* cut most finely */
    for (int id = 0; id < FA_TENSOR_O && i % 8 == 2; id++) s.where[id] = PAGEABLE;  /* cut by rows */
    setting_place(&s);
    check_run(&s);
    setting_remove(&s);
    setting_free(&s);
    num_runs = fake_get_state().num_runs - before;
    check_origins(&problem, num_runs);
    if (num_runs > most_runs) most_runs = num_runs;
  }
  CHECK(most_runs == FA_MAX_SLICES, "at most %ld slices", most_runs);
  CHECK(!fa_can_pack(8) || fake_get_state().num_unpacked > 100, "%ld unpacked", fake_get_state().num_unpacked);
  CHECK(fake_get_state().num_pageable_copies == 0, "pageable memory was given to the bus");
  check_nothing_is_used("after runs");
}

/* How many of the last runs had some of the rows. */
static long num_row_slices(const fa_problem *whole, long num_runs) {
  const fake_state state = fake_get_state();
  long count = 0;
  for (long run = state.num_runs - num_runs; run < state.num_runs; run++)
    count += state.problems[run % FAKE_PROBLEMS].seqlen_q < whole->seqlen_q;
  return count;
}

/* Rows that are cut take what they have of the bands with them, and of the window within these. */
static void test_cut_bands(void) {
  fa_random random = random_stream(9, 0);
  long num_slices = 0;
  fa_host_slicing = finest;
  for (int i = 0; i < 60; i++) {
    fa_problem problem;
    fa_problem_init(&problem);
    problem.batch = random_integer(&random, 1, 2), problem.num_heads = problem.num_kv_heads = 1;
    problem.seqlen_q = random_integer(&random, 20, 40), problem.seqlen_k = random_integer(&random, 40, 60);
    problem.head_dim = random_integer(&random, 1, 20), problem.num_bands = random_integer(&random, 1, 5);
    problem.bands_batch = random_integer(&random, 0, 1) ? problem.batch : 1;
    if (random_integer(&random, 0, 1)) problem.window_right = random_integer(&random, 0, 9);
    if (random_integer(&random, 0, 1)) problem.window_left = random_integer(&random, 0, 12);
    setting s = setting_new(&problem, FA_PASS_FORWARD, &random);
    for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = PAGEABLE;
    setting_place(&s);
    const long before = fake_get_state().num_runs;
    check_run(&s);
    num_slices += num_row_slices(&problem, fake_get_state().num_runs - before);
    setting_remove(&s);
    setting_free(&s);
  }
  CHECK(num_slices > 100, "%ld slices of rows with bands", num_slices);
}

/* More than the ring holds, in one row and in many; as it is and packed. */
static void test_large(void) {
  fa_random random = random_stream(8, 0);
  fa_host_slicing = finest;
  for (int64_t batch = 1; batch <= 2; batch++) {
    fa_problem problem;
    fa_problem_init(&problem);
    problem.batch = batch, problem.num_heads = problem.num_kv_heads = 8, problem.head_dim = 64;
    problem.seqlen_q = 1999, problem.seqlen_k = 7, problem.window_left = 3;
    if (batch == 2) problem.precision = FA_PRECISION_DEFAULT;
    setting s = setting_new(&problem, FA_PASS_BACKWARD, &random);
    for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = PAGEABLE;
    setting_place(&s);
    for (int i = 0; i < 3; i++) check_run(&s);
    setting_remove(&s);
    setting_free(&s);
  }
  check_nothing_is_used("after large runs");
}

/* A problem that is cut: a backward in ordinary and in pinned memory, at home on the device and kept there, a
 * forward, by rows, in ordinary memory. Packed, where processors can. */
static setting mixed_setting(fa_pass pass, fa_random *random) {
  fa_problem problem;
  fa_problem_init(&problem);
  problem.batch = 3, problem.num_heads = problem.num_kv_heads = 2;
  problem.head_dim = 8, problem.precision = FA_PRECISION_DEFAULT;
  problem.seqlen_q = problem.seqlen_k = 17;
  setting s = setting_new(&problem, pass, random);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    s.where[id] = pass == FA_PASS_FORWARD ? PAGEABLE : (tensor_home)(id % NUM_WHERES);
  return s;
}

/* Views of tensors on the device need not have as much memory as they have elements. */
static void test_broadcast(void) {
  fa_random random = random_stream(13, 0);
  setting s = mixed_setting(FA_PASS_BACKWARD, &random);
  for (int id = FA_TENSOR_K; id <= FA_TENSOR_V; id++) {
    s.where[id] = ON_DEVICE, s.of_one_batch[id] = true;
    const size_t bytes = placed_size(&s, id);
    for (int64_t batch = 1; batch < s.problem.batch; batch++)
      memcpy((char *)s.host[id] + (size_t)batch * bytes, s.host[id], bytes);
  }
  run_reference(&s, FA_PASS_FORWARD);
  run_reference(&s, FA_PASS_BACKWARD);
  setting_place(&s);
  check_run(&s);
  setting_remove(&s);
  setting_free(&s);
  check_nothing_is_used("after views");
}

/* Every operation fails once, in each of the ways. */
static void test_faults(fa_pass pass) {
  fa_random random = random_stream(9, 0);
  fa_host_slicing = finest;
  const fa_status failures[] = {FA_STATUS_OUT_OF_MEMORY, FA_STATUS_DEVICE_ERROR};
  for (int i = 0; i < 2; i++) {
    int num_failed = 0;
    fa_status status = FA_STATUS_OK;
    for (long fail_at = 0; fail_at == 0 || num_failed == fail_at; fail_at++) {
      setting s = mixed_setting(pass, &random);
      setting_place(&s);
      fa_error error;
      fake_settings.fail_at = fail_at, fake_settings.failure = failures[i];
      status = setting_run(&s, NULL, NULL, &error);
      const bool injected = fake_settings.fail_at < 0;
      fake_settings.fail_at = -1;
      /* Memory that runs out is asked for again when what is at hand is given back; a ring can be done without.
       */
      CHECK(status == FA_STATUS_OK || status == failures[i], "fault %ld: %s", fail_at, error.message);
      num_failed += injected;
      check_run(&s);
      setting_remove(&s);
      setting_free(&s);
      check_nothing_is_used("after a fault");
      trim();
    }
    CHECK(num_failed > 50, "only %d operations could fail", num_failed);
    CHECK(status == FA_STATUS_OK, "a run without a fault failed");
  }
}

/* ---- several devices ------------------------------------------------------------------------------------- */

/* A random problem in places that several devices can have it in. */
static setting setting_of_devices(fa_pass pass, fa_random *random) {
  const fa_problem problem = random_problem(pass, random);
  setting s = setting_new(&problem, pass, random);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (s.where[id] == KEPT || s.where[id] == COPIED) s.where[id] = PAGEABLE;
  return s;
}

static void check_right(const setting *s, const char *when) {
  char text[200];
  fa_problem_format(&s->problem, text, sizeof text);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(s, id))
      CHECK(is_right(s, id), "%s, %s: %s is wrong where it lies at %d", text, when, fa_tensor_name(id),
            s->where[id]);
}

static void test_devices(void) {
  const fa_device orders[][FAKE_DEVICES] = {
      {{FA_DEVICE_CUDA, 0}, {FA_DEVICE_CUDA, 1}},
      {{FA_DEVICE_CUDA, 3}, {FA_DEVICE_CUDA, 1}, {FA_DEVICE_CUDA, 2}},
      {{FA_DEVICE_CUDA, 1}},
      {{FA_DEVICE_CUDA, 2}, {FA_DEVICE_CUDA, 0}, {FA_DEVICE_CUDA, 1}, {FA_DEVICE_CUDA, 3}}};
  const int32_t counts[] = {2, 3, 1, 4};
  fa_random random = random_stream(23, 0);
  fa_host_slicing = finest;
  const fake_state before = fake_get_state();
  for (int i = 0; i < 300; i++) {
    setting s = setting_of_devices(i % 2 ? FA_PASS_BACKWARD : FA_PASS_FORWARD, &random);
    fa_error error;
    setting_place(&s);
    const fa_status status = setting_run_on(&s, orders[i % 4], counts[i % 4], NULL, NULL, &error);
    CHECK(status == FA_STATUS_OK, "several devices: %s", error.message);
    if (!status) check_right(&s, "several devices");
    setting_remove(&s);
    setting_free(&s);
  }
  const fake_state after = fake_get_state();
  for (int i = 0; i < FAKE_DEVICES; i++)
    CHECK(after.num_runs_of[i] - before.num_runs_of[i] > 50, "device %d ran %ld kernels", i,
          after.num_runs_of[i] - before.num_runs_of[i]);
  CHECK(after.num_trespasses == 0, "%ld times a device worked on another's", after.num_trespasses);
  check_nothing_is_used("after several devices");
}

/* One of two devices fails, at each of its operations: the call says so, and both give back what they had. */
static void test_device_faults(void) {
  const fa_device devices[] = {{FA_DEVICE_CUDA, 0}, {FA_DEVICE_CUDA, 1}};
  fa_random random = random_stream(24, 0);
  fa_host_slicing = finest;
  for (int32_t failing = 0; failing < 2; failing++) {
    int num_failed = 0;
    for (long fail_at = 0; fail_at == 0 || num_failed == fail_at; fail_at++) {
      setting s = mixed_setting(FA_PASS_BACKWARD, &random);
      for (int id = 0; id < FA_NUM_TENSORS; id++)
        if (s.where[id] == KEPT || s.where[id] == COPIED) s.where[id] = PAGEABLE;
      setting_place(&s);
      fa_error error;
      fake_settings.fail_at = fail_at, fake_settings.failure = FA_STATUS_DEVICE_ERROR;
      fake_settings.fail_device = failing;
      const fa_status status = setting_run_on(&s, devices, 2, NULL, NULL, &error);
      const bool injected = fake_settings.fail_at < 0;
      fake_settings.fail_at = fake_settings.fail_device = -1;
      CHECK(status == FA_STATUS_OK || status == FA_STATUS_DEVICE_ERROR, "fault %ld: %s", fail_at,
            error.message);
      if (status == FA_STATUS_OK) check_right(&s, "with a fault that does not matter");
      num_failed += injected;
      setting_remove(&s);
      setting_free(&s);
      check_nothing_is_used("after a device's fault");
      trim();
    }
    CHECK(num_failed > 30, "only %d operations of device %d could fail", num_failed, failing);
  }
}

static void test_wrong_devices(void) {
  const fa_device mixed[] = {{FA_DEVICE_CUDA, 0}, cpu};
  fa_random random = random_stream(25, 0);
  setting s = setting_of_devices(FA_PASS_FORWARD, &random);
  fa_error error;
  char expected[96];
  setting_place(&s);
  CHECK(setting_run_on(&s, mixed, 2, NULL, NULL, &error) == FA_STATUS_INVALID_ARGUMENT, "devices of two kinds");
  CHECK_TEXT(error.message, "device: expected devices of one kind, got cuda and cpu");
  CHECK(setting_run_on(&s, mixed, FA_MAX_DEVICES + 1, NULL, NULL, &error) == FA_STATUS_INVALID_ARGUMENT,
        "many");
  const fa_device beyond[] = {{FA_DEVICE_CUDA, 0}, {FA_DEVICE_CUDA, FAKE_DEVICES}};
  CHECK(setting_run_on(&s, beyond, 2, NULL, NULL, &error) == FA_STATUS_NO_DEVICE, "a device that is not there");
  snprintf(expected, sizeof expected, "device: expected a cuda device from 0 to %d, got %d", FAKE_DEVICES - 1,
           FAKE_DEVICES);
  CHECK_TEXT(error.message, expected);
  setting_remove(&s);
  setting_free(&s);
}

static void test_out_of_memory(void) {
  fa_random random = random_stream(10, 0);
  setting s = mixed_setting(FA_PASS_BACKWARD, &random);
  fa_error error;
  setting_place(&s);
  check_run(&s);
  trim();
  fake_settings.device_bytes = fake_get_state().device_bytes + 1000;
  CHECK(setting_run(&s, NULL, NULL, &error) == FA_STATUS_OUT_OF_MEMORY, "no memory is no error");
  CHECK(strstr(error.message, "bytes") != NULL, "%s", error.message);
  fake_settings.device_bytes = SIZE_MAX;
  check_run(&s);
  setting_remove(&s);
  setting_free(&s);
}

/* The bus reads pageable memory by itself then. */
static void test_no_pinned_memory(fa_pass pass) {
  fa_random random = random_stream(15, 0);
  fa_host_slicing = finest;
  setting s = mixed_setting(pass, &random);
  trim();
  for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = PAGEABLE;
  fake_settings.pinned_bytes = 0;
  setting_place(&s);
  const long before = fake_get_state().num_pageable_copies;
  check_run(&s);
  CHECK(fake_get_state().num_pageable_copies > before, "there was pinned memory after all");
  fake_settings.pinned_bytes = SIZE_MAX;
  setting_remove(&s);
  setting_free(&s);
}

/* Takes lanes that are idle, so that the next call has to make one. */
static int hold_lanes(fa_heap *heap, fa_lane **lanes, int most) {
  int count = 0;
  while (heap->idle_lanes && count < most)
    if (fa_lane_take(heap, 0, &lanes[count++], NULL)) exit(2);
  return count;
}

/* A call that would pass few bytes through a ring, and gets none: its lane is a new one, or had a ring before.
 * Then another call has that memory now, where nothing may be written. */
static void test_no_ring(bool is_new) {
  enum { MOST_LANES = 64, RESULT_BYTES = 4096 };
  fa_random random = random_stream(19, 0);
  const fa_slicing slicing = fa_host_slicing;
  fa_heap *heap = heap_of(0);
  fa_lane *held[MOST_LANES], *lane = NULL, *other = NULL;
  setting s = mixed_setting(FA_PASS_FORWARD, &random);
  for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = PAGEABLE;
  fa_host_slicing = (fa_slicing){INT64_MAX, INT64_MAX, 1, 1, 1, 0};
  setting_place(&s);
  trim();
  const int num_held = hold_lanes(heap, held, MOST_LANES);
  char *ring = NULL;
  if (!is_new) {
    check_run(&s); /* makes a lane, which has a ring */
    CHECK(!fa_lane_take(heap, 1, &lane, NULL) && (ring = fa_staging_memory(lane->staging)), "no ring");
    fa_lane_give(lane, true);
    CHECK(!fa_lane_take(heap, 0, &lane, NULL) && !fa_staging_memory(lane->staging), "a ring for no bytes");
    CHECK(!fa_lane_take(heap, 1, &other, NULL) && other != lane, "one lane for two calls");
    CHECK(fa_staging_memory(other->staging) == ring, "another ring");
    memset(ring, 7, RESULT_BYTES);
    fa_lane_give(lane, true);
  }
  fake_settings.pinned_bytes = 0;
  if (is_new) {
    CHECK(!fa_lane_take(heap, 1, &lane, NULL) && !fa_staging_memory(lane->staging), "a ring without memory");
    fa_lane_give(lane, true);
  }
  const long before = fake_get_state().num_pageable_copies;
  fake_set_late(lane->compute); /* does what the call does not wait for when it has ended */
  for (int i = 0; i < 2; i++) { /* measured, and not */
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (role_of(&s, id) == FA_ROLE_OUTPUT) memset(s.given[id], 0xff, size_of(&s, id));
    check_run(&s);
    fake_gpu.memory->synchronize(0, lane->compute, NULL);
  }
  fake_set_late(NULL);
  CHECK(fake_get_state().num_pageable_copies > before, "there was a ring after all");
  int64_t num_written = 0;
  for (int i = 0; ring && i < RESULT_BYTES; i++) num_written += ring[i] != 7;
  CHECK(num_written == 0, "%d bytes of another call's ring were written", (int)num_written);
  fake_settings.pinned_bytes = SIZE_MAX;
  if (other) fa_lane_give(other, true);
  for (int i = 0; i < num_held; i++) fa_lane_give(held[i], true);
  check_nothing_is_used("after calls without a ring");
  setting_remove(&s);
  setting_free(&s);
  fa_host_slicing = slicing;
}

/* Enqueues a copy in so many pieces that it takes a while. */
static void copy_slowly(char *to, char *from, size_t bytes, void *stream) {
  for (size_t at = 0; at < bytes; at += 40) {
    const size_t some = bytes - at < 40 ? bytes - at : 40;
    fake_gpu.memory->copy(0, (fa_rows){to + at, some}, (fa_rows){from + at, some}, some, 1, stream, NULL);
  }
}

/* q is written by work that the caller's stream does first. */
static void test_order(void) {
  fa_random random = random_stream(11, 0);
  fa_host_slicing = finest;
  const fa_memory_ops *memory = fake_gpu.memory;
  void *stream;
  if (memory->stream_new(0, &stream, NULL)) exit(2);
  for (int i = 0; i < 50; i++) {
    setting s = mixed_setting(FA_PASS_BACKWARD, &random);
    s.where[FA_TENSOR_Q] = i % 2 ? ON_DEVICE : ON_OTHER_DEVICE;
    setting_place(&s);
    const size_t bytes = size_of(&s, FA_TENSOR_Q);
    char *q = s.given[FA_TENSOR_Q], *early;
    take(&heap_of(0)->pool, bytes, (void **)&early);
    memcpy(early, q, bytes);
    memset(q, 0xff, bytes);
    copy_slowly(q, early, bytes, i % 3 ? stream : NULL);
    fa_error error;
    const fa_status status = setting_run(&s, i % 3 ? stream : NULL, NULL, &error);
    CHECK(status == FA_STATUS_OK, "%s", error.message);
    CHECK(is_right(&s, FA_TENSOR_DQ) && is_right(&s, FA_TENSOR_DK),
          "the call did not wait for the caller's stream");
    fa_pool_give(&heap_of(0)->pool, early);
    setting_remove(&s);
    setting_free(&s);
  }
  memory->stream_free(0, stream);
}

/* Every tensor lies on the device, so that nothing but the caller's stream holds the kernels up; and that does
 * its work last. */
static void test_order_on_device(fa_pass pass) {
  fa_random random = random_stream(18, 0);
  fa_error error;
  void *stream;
  if (fake_gpu.memory->stream_new(0, &stream, NULL)) exit(2);
  setting s = mixed_setting(pass, &random);
  for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = ON_DEVICE;
  setting_place(&s);
  const size_t bytes = size_of(&s, FA_TENSOR_Q);
  char *q = s.given[FA_TENSOR_Q], *early;
  take(&heap_of(0)->pool, bytes, (void **)&early);
  memcpy(early, q, bytes);
  memset(q, 0xff, bytes);
  fake_set_late(stream);
  copy_slowly(q, early, bytes, stream);
  const fa_status status = setting_run(&s, stream, NULL, &error);
  CHECK(status == FA_STATUS_OK, "%s", error.message);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(&s, id) == FA_ROLE_OUTPUT)
      CHECK(is_right(&s, id), "%s: kernels did not wait for the caller's stream", fa_tensor_name(id));
  fake_gpu.memory->synchronize(0, stream, NULL);
  fake_set_late(NULL);
  fa_pool_give(&heap_of(0)->pool, early);
  setting_remove(&s);
  setting_free(&s);
  fake_gpu.memory->stream_free(0, stream);
}

/* Memory in which a tensor is to end up is still written by the caller's stream. */
static void test_order_of_kept(void) {
  fa_random random = random_stream(12, 0);
  void *stream;
  char *late;
  if (fake_gpu.memory->stream_new(0, &stream, NULL)) exit(2);
  setting s = mixed_setting(FA_PASS_BACKWARD, &random);
  const size_t bytes = size_of(&s, FA_TENSOR_K), half = 32 << 20; /* what keeps the stream busy for long */
  for (int id = 0; id < FA_NUM_TENSORS; id++) s.where[id] = KEPT;
  setting_place(&s);
  take(&heap_of(0)->pool, 2 * half, (void **)&late);
  memset(late, 0xff, 2 * half);
  fake_gpu.memory->copy(0, (fa_rows){late, half}, (fa_rows){late + half, half}, half, 1, stream, NULL);
  for (int i = 0; i < 20; i++) {
    copy_slowly(s.on_device[FA_TENSOR_K], late, bytes, stream);
    copy_slowly(s.on_device[FA_TENSOR_DK], late, bytes, stream);
  }
  fa_error error;
  const fa_status status = setting_run(&s, stream, NULL, &error);
  CHECK(status == FA_STATUS_OK, "%s", error.message);
  fake_gpu.memory->synchronize(0, stream, NULL);
  CHECK(is_right(&s, FA_TENSOR_K) && is_right(&s, FA_TENSOR_DK), "the caller's stream wrote what was kept");
  fa_pool_give(&heap_of(0)->pool, late);
  setting_remove(&s);
  setting_free(&s);
  fake_gpu.memory->stream_free(0, stream);
}

static void *call_often(void *seed) {
  fa_random random = random_stream((uint64_t)(uintptr_t)seed, 1);
  setting s = mixed_setting(FA_PASS_BACKWARD, &random);
  for (int i = 0; i < 30; i++) {
    setting_place(&s);
    fa_error error;
    const fa_status status = setting_run(&s, NULL, NULL, &error);
    bool right = status == FA_STATUS_OK;
    for (int id = 0; id < FA_NUM_TENSORS; id++) right = right && (!role_of(&s, id) || is_right(&s, id));
    if (!right) return "wrong";
    setting_remove(&s);
  }
  setting_free(&s);
  return NULL;
}

static void test_many_callers(void) {
  enum { CALLERS = 16 };
  pthread_t threads[CALLERS];
  fa_host_slicing = finest;
  for (uintptr_t i = 0; i < CALLERS; i++)
    if (pthread_create(&threads[i], NULL, call_often, (void *)i)) exit(2);
  for (int i = 0; i < CALLERS; i++) {
    void *wrong;
    pthread_join(threads[i], &wrong);
    CHECK(!wrong, "caller %d got wrong results", i);
  }
  check_nothing_is_used("after many callers");
  CHECK(fake_get_state().num_streams <= 3 * (CALLERS + FAKE_DEVICES - 1), "%ld streams",
        fake_get_state().num_streams);
}

/* ---- the pool by itself ------------------------------------------------------------------------------------
 */

static void test_pool(void) {
  trim();
  fa_pool *pool = &heap_of(0)->pinned->callers;
  const size_t limit = pool->limit, mib = 1 << 20;
  fa_error error;
  char *a, *b, *c;
  fa_pool_set_limit(pool, 4 * mib);
  take(pool, 2 * mib, (void **)&a);
  take(pool, 2 * mib, (void **)&b);
  CHECK(fa_pool_take(pool, 1, (void **)&c, &error) == FA_STATUS_OUT_OF_MEMORY, "beyond the limit");
  CHECK_TEXT(error.message, "device: expected 1 bytes of memory, got 0 left of a limit of 4194304");
  CHECK(fa_pool_give(pool, a) && !fa_pool_give(pool, a) && !fa_pool_give(pool, &error), "given once");
  take(pool, 2 * mib - 100, (void **)&c);
  CHECK(c == a, "an idle block of about the size is used again");
  fa_pool_give(pool, c);
  take(pool, mib, (void **)&c); /* half of it would be wasted */
  CHECK(fake_get_state().pinned_bytes == 3 * mib, "an idle block makes room for another size");
  fa_pool_give(pool, b);
  fa_pool_give(pool, c);
  fa_pool_trim(pool, 2 * mib);
  CHECK(fake_get_state().pinned_bytes == mib, "what was given first is trimmed first");
  take(pool, 3 * mib, (void **)&a);
  fa_pool_set_limit(pool, mib);
  CHECK(fake_get_state().pinned_bytes == 3 * mib, "a lower limit takes what is idle");
  fa_pool_give(pool, a);
  CHECK(fa_pool_take(pool, 2 * mib, (void **)&b, NULL) == FA_STATUS_OUT_OF_MEMORY, "a lower limit holds");
  CHECK(fa_pool_take(pool, SIZE_MAX, (void **)&b, NULL) == FA_STATUS_OUT_OF_MEMORY,
        "any size can be asked for");
  fa_pool_set_limit(pool, limit);
  fa_pool_trim(pool, 0);
  CHECK(fake_get_state().pinned_bytes == 0, "all is trimmed");

  /* Blocks are rounded up, but not where only what was asked for is there. */
  fake_settings.pinned_bytes = mib + 1;
  take(pool, mib + 1, (void **)&a);
  CHECK(pool->used_bytes == mib + 1 && fake_get_state().pinned_bytes == mib + 1, "the last byte was not had");
  CHECK(fa_pool_take(pool, 77, (void **)&b, &error) == FA_STATUS_OUT_OF_MEMORY, "more than there is");
  CHECK_TEXT(error.message, "device: expected 77 bytes, got fewer");
  fake_settings.pinned_bytes = SIZE_MAX;
  fa_pool_give(pool, a);
  fa_pool_trim(pool, 0);
  CHECK(pool->used_bytes == 0 && pool->idle_bytes == 0, "%zu used, %zu idle", pool->used_bytes,
        pool->idle_bytes);
}

/* A source of addresses: nobody reads what is there. */
static fa_status address_alloc(const void *context, size_t bytes, void **memory, fa_error *error) {
  (void)bytes, (void)error;
  uintptr_t *next = (uintptr_t *)context;
  *memory = (void *)next[0];
  next[0] += next[1];
  return FA_STATUS_OK;
}

static void address_free(const void *context, void *memory) { (void)context, (void)memory; }

static int longest_chain(const fa_pool *pool) {
  int longest = 0;
  for (int i = 0; i < FA_POOL_BUCKETS; i++) {
    int length = 0;
    for (const fa_block *block = pool->used[i]; block; block = block->next) length++;
    if (length > longest) longest = length;
  }
  return longest;
}

/* Blocks as a GPU's allocator hands them out share most bits of their addresses. Finding one among 32,768 takes
 * about as many steps as if they were spread evenly, 8 a bucket. */
static void test_pool_of_many(uintptr_t distance) {
  enum { BLOCKS = 32768 };
  static fa_pool pool;
  uintptr_t addresses[2] = {(uintptr_t)0x7f1200000000, distance};
  void **memory = malloc(BLOCKS * sizeof *memory);
  if (!memory) exit(2);
  fa_pool_init(&pool, (fa_source){address_alloc, address_free, addresses}, SIZE_MAX, SIZE_MAX);
  for (int i = 0; i < BLOCKS; i++) take(&pool, 256 * (size_t)(i % 97 + 1), &memory[i]);
  CHECK(longest_chain(&pool) <= 32, "%d of %d blocks %zu bytes apart are in one bucket", longest_chain(&pool),
        BLOCKS, (size_t)distance);
  bool are_given = true;
  for (int i = 0; i < BLOCKS; i++) are_given = fa_pool_give(&pool, memory[i]) && are_given;
  CHECK(are_given && pool.used_bytes == 0, "%zu bytes are still used", pool.used_bytes);
  const uintptr_t none_new = addresses[0];
  for (int i = 0; i < BLOCKS; i++) take(&pool, 256 * (size_t)(i % 97 + 1), &memory[i]);
  CHECK(addresses[0] == none_new && pool.idle_bytes == 0, "idle blocks of the size were not found");
  for (int i = 0; i < BLOCKS; i++) fa_pool_give(&pool, memory[i]);
  fa_pool_trim(&pool, 256 * 1000);
  CHECK(pool.idle_bytes <= 256 * 1000 && pool.idle_bytes > 256 * 900, "%zu bytes are idle", pool.idle_bytes);
  fa_pool_trim(&pool, 0);
  CHECK(pool.idle_bytes == 0 && !pool.newest && !pool.oldest, "idle blocks are left");
  for (int i = 0; i < FA_POOL_SIZE_CLASSES; i++) CHECK(!pool.idle[i], "idle blocks of class %d are left", i);
  free(memory);
}

typedef struct task_counts {
  int num_threads;
  atomic_int of_task[100];
  atomic_bool is_wrong;
} task_counts;

static void count_task(void *context, int64_t task, int worker) {
  task_counts *counts = context;
  atomic_fetch_add(&counts->of_task[task], 1);
  if (worker < 0 || worker >= counts->num_threads) atomic_store(&counts->is_wrong, true);
}

/* Each task runs once, however much of it the caller does. */
static void test_threads(void) {
  fa_random random = random_stream(16, 0);
  for (int i = 0; i < 1000; i++) {
    task_counts counts = {.num_threads = (int)random_integer(&random, 1, 5)};
    const int num_tasks = (int)random_integer(&random, 0, 100);
    int64_t num_helped = 0;
    fa_parallel parallel;
    fa_parallel_begin(&parallel, counts.num_threads, i % 2, num_tasks, count_task, &counts);
    for (int64_t most = random_integer(&random, 0, 120); num_helped < most; num_helped++)
      if (!fa_parallel_help(&parallel)) break;
    fa_parallel_end(&parallel);
    bool right = num_helped <= num_tasks && !counts.is_wrong;
    for (int task = 0; task < 100; task++) right = right && counts.of_task[task] == (task < num_tasks);
    CHECK(right, "%d tasks of %d threads", num_tasks, counts.num_threads);
  }
}

/* ---- whose threads the pool's are ------------------------------------------------------------------------ */

/* So many threads, each with a task that lasts until all have one: none of them has two. */
typedef struct meeting {
  int num_threads;
  atomic_int num_there;
  atomic_int num_pinned, num_interruptible, num_of_priority; /* of the pool's threads */
} meeting;

static int first_thread_policy(void) { return sched_getscheduler(getpid()); }

static void look_at_thread(meeting *m) {
  cpu_set_t own, wanted;
  sigset_t blocked;
  sched_getaffinity(0, sizeof own, &own);
  fa_get_processors(&wanted);
  if (!CPU_EQUAL(&own, &wanted)) atomic_fetch_add(&m->num_pinned, 1);
  if (sched_getscheduler(0) != first_thread_policy()) atomic_fetch_add(&m->num_of_priority, 1);
  pthread_sigmask(SIG_BLOCK, NULL, &blocked);
  for (int number = 1; number <= SIGRTMAX; number++) {
    const bool is_systems = number == SIGKILL || number == SIGSTOP || (number > 31 && number < SIGRTMIN);
    if (!is_systems && !sigismember(&blocked, number)) atomic_fetch_add(&m->num_interruptible, 1);
  }
}

static void attend(void *context, int64_t task, int worker) {
  (void)task;
  meeting *m = context;
  atomic_fetch_add(&m->num_there, 1);
  while (atomic_load(&m->num_there) < m->num_threads) sched_yield();
  if (worker > 0) look_at_thread(m);
}

static void check_meeting(int num_threads, const char *when) {
  meeting m = {.num_threads = num_threads};
  fa_parallel_for(num_threads, 0, num_threads, attend, &m);
  CHECK(m.num_there == num_threads, "%s: %d threads met", when, m.num_there);
  CHECK(m.num_pinned == 0, "%s: %d threads run where one caller may", when, m.num_pinned);
  CHECK(m.num_of_priority == 0, "%s: %d threads have one caller's priority", when, m.num_of_priority);
  CHECK(m.num_interruptible == 0, "%s: %d signals may reach threads of the library", when, m.num_interruptible);
}

/* Two calls that share two threads: the first has both, until it may end; in the second they meet. */
typedef struct neighbours {
  atomic_int num_first; /* its tasks that have begun */
  atomic_bool may_end;
  meeting second;
} neighbours;

static void last_as_long_as_allowed(void *context, int64_t task, int worker) {
  (void)task, (void)worker;
  neighbours *n = context;
  atomic_fetch_add(&n->num_first, 1);
  while (!atomic_load(&n->may_end)) sched_yield();
}

static void *run_first(void *context) {
  fa_parallel_share(2, 0, 2, last_as_long_as_allowed, context);
  return NULL;
}

static pthread_t begin_first(neighbours *n) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_first, n)) exit(2);
  while (atomic_load(&n->num_first) < 2) sched_yield();
  return thread;
}

static void attend_second(void *context, int64_t task, int worker) {
  neighbours *n = context;
  atomic_store(&n->may_end, true);
  attend(&n->second, task, worker);
}

/* The threads of a call that ends go to one which began when there were none to have; or else the alarm ends
 * this. */
static void test_shared_threads(void) {
  neighbours n = {.second = {.num_threads = 2}};
  const pthread_t first = begin_first(&n);
  alarm(900);
  fa_parallel_share(2, 0, 2, attend_second, &n);
  alarm(0);
  CHECK(n.second.num_there == 2, "%d threads met", n.second.num_there);
  pthread_join(first, NULL);
}

static cpu_set_t one_of(const cpu_set_t *processors) {
  cpu_set_t one;
  int number = 0;
  while (!CPU_ISSET(number, processors)) number++;
  CPU_ZERO(&one);
  CPU_SET(number, &one);
  return one;
}

/* The pool grows while it calls. */
static void *call_pinned(void *unused) {
  cpu_set_t all;
  fa_get_processors(&all);
  const int num_processors = fa_num_processors();
  const cpu_set_t one = one_of(&all);
  sched_setaffinity(0, sizeof one, &one);
  sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){0});
  CHECK(fa_num_processors() == num_processors, "a caller that is pinned counts %d", fa_num_processors());
  check_meeting(13, "called by a pinned thread");
  return unused;
}

static void test_whose_threads(void) {
  pthread_t caller;
  cpu_set_t all;
  if (pthread_create(&caller, NULL, call_pinned, NULL) || pthread_join(caller, NULL)) exit(2);
  check_meeting(13, "after that");
  check_meeting(14, "with one thread more");
  fa_get_processors(&all);
  const cpu_set_t one = one_of(&all);
  sched_setaffinity(getpid(), sizeof one, &one);
  CHECK(fa_num_processors() == 1, "the process may use one processor and counts %d", fa_num_processors());
  check_meeting(14, "in a process on one processor");
  sched_setaffinity(getpid(), sizeof all, &all);
  check_meeting(14, "in a process on all again");
}

static void test_quota(void) {
  const struct {
    const char *text;
    int processors;
  } quotas[] = {{"max 100000\n", INT_MAX},
                {"200000 100000\n", 2},
                {"200001 100000", 3},
                {"1000 100000", 1},
                {"50000\n 100000\n", 1},
                {"-1\n 100000\n", INT_MAX},
                {"0 100000", INT_MAX},
                {"5 0", INT_MAX},
                {" ", INT_MAX},
                {"9223372036854775807 1", INT_MAX}};
  for (size_t i = 0; i < sizeof quotas / sizeof *quotas; i++)
    CHECK(fa_quota_processors(quotas[i].text) == quotas[i].processors, "\"%s\" is worth %d processors",
          quotas[i].text, fa_quota_processors(quotas[i].text));
  const struct {
    const char *line;
    int version;
    const char *path;
  } groups[] = {{"0::/user.slice/a:b\n", 2, "/user.slice/a:b"},
                {"0::/\n", 2, "/"},
                {"4:cpuacct,cpu:/docker/1f\n", 1, "/docker/1f"},
                {"1:cpu:/\n", 1, "/"},
                {"3:cpuset:/\n", 0, ""},
                {"12:name=systemd:/cpu\n", 0, ""},
                {"", 0, ""}};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
    char path[FA_MAX_GROUP_PATH] = "";
    CHECK(fa_read_group(groups[i].line, path) == groups[i].version, "\"%s\" is of another version",
          groups[i].line);
    if (groups[i].version) CHECK_TEXT(path, groups[i].path);
  }
}

/* ---- fork ------------------------------------------------------------------------------------------------ */

/* The thread sanitizer allows a child of a process with threads none of its own. */
#if defined(__SANITIZE_THREAD__)
enum { THREADS_OF_CHILD = 1 };
#else
enum { THREADS_OF_CHILD = 3 };
#endif

typedef struct holder {
  pthread_mutex_t *mutex;
  pthread_barrier_t is_held, may_go;
} holder;

static void *hold(void *context) {
  holder *h = context;
  pthread_mutex_lock(h->mutex);
  pthread_barrier_wait(&h->is_held);
  pthread_barrier_wait(&h->may_go);
  pthread_mutex_unlock(h->mutex);
  return NULL;
}

/* Uses whatever is locked. A child that waits for a thread that it does not have ends by the alarm. */
static void live_on(void) {
  alarm(900);
  task_counts counts = {.num_threads = THREADS_OF_CHILD};
  fa_heap *heap;
  void *memory;
  fa_parallel_for(THREADS_OF_CHILD, 0, 100, count_task, &counts);
  bool right = !fa_heap_of(&fake_gpu, 0, &heap, NULL) && !fa_pool_take(&heap->pool, 100, &memory, NULL) &&
               fa_pool_give(&heap->pool, memory) && !fa_pool_take(&heap->pinned->staging, 100, &memory, NULL) &&
               !counts.is_wrong;
  for (int task = 0; task < 100; task++) right = right && counts.of_task[task] == 1;
  _exit(right ? 0 : 1);
}

static void test_fork(pthread_mutex_t *mutex, const char *name) {
  holder h = {.mutex = mutex};
  pthread_t thread;
  int result;
  pthread_barrier_init(&h.is_held, NULL, 2);
  pthread_barrier_init(&h.may_go, NULL, 2);
  if (pthread_create(&thread, NULL, hold, &h)) exit(2);
  pthread_barrier_wait(&h.is_held);
  const pid_t child = fork();
  if (child == 0) live_on();
  CHECK(child > 0 && waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0,
        "a child of a process that held %s cannot use the library", name);
  pthread_barrier_wait(&h.may_go);
  pthread_join(thread, NULL);
}

/* Calls of a thread that the child does not have take none of its threads. */
static void test_fork_amid_calls(void) {
  neighbours n = {0};
  int result;
  const pthread_t first = begin_first(&n);
  const pid_t child = fork();
  if (child == 0) {
    meeting m = {.num_threads = THREADS_OF_CHILD};
    alarm(900);
    fa_parallel_share(THREADS_OF_CHILD, 0, THREADS_OF_CHILD, attend, &m);
    _exit(0);
  }
  CHECK(child > 0 && waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0,
        "a child counts calls of its parent");
  atomic_store(&n.may_end, true);
  pthread_join(first, NULL);
}

static void test_forks(void) {
  test_fork_amid_calls();
  fa_heap *heap = heap_of(0);
  test_fork(&fa_threads_mutex, "the threads' lock");
  test_fork(&fa_heaps_mutex, "the heaps' lock");
  test_fork(&heap->mutex, "a heap's lock");
  test_fork(&heap->pool.mutex, "a pool's lock");
  test_fork(&heap->pinned->staging.mutex, "the lock of pinned memory");
}

/* What packed numbers become again: nearest in f16's 11 bits, rows of zeros and of infinities and all. */
static void test_pack(void) {
  enum { ROWS = 40, DIM = 24 };
  if (!fa_can_pack(DIM)) {
    printf("# numbers are not packed on this processor\n");
    return;
  }
  fa_random random = random_stream(14, 0);
  float rows[ROWS][DIM];
  char packed[ROWS * (DIM * 2 + 4) + 1], *at = packed;
  for (int row = 0; row < ROWS; row++)
    for (int d = 0; d < DIM; d++)
      rows[row][d] =
          (float)ldexp(random_normal(&random), (int)random_integer(&random, -20, 20) + (row - 20) * 5);
  for (int d = 0; d < DIM; d++) rows[5][d] = 0;
  rows[6][3] = INFINITY, rows[6][4] = -INFINITY, rows[7][20] = NAN;
  packed[sizeof packed - 1] = 77;
  CHECK(fa_packed_bytes(DIM) * ROWS + 1 == sizeof packed, "%zu bytes a row", fa_packed_bytes(DIM));
  fa_pack(packed, (const char *)rows, ROWS, DIM);
  CHECK(packed[sizeof packed - 1] == 77, "more than there is was written");
  for (int row = 0; row < ROWS; row++, at += 4) {
    float largest = 0, unscale;
    memcpy(&unscale, at + DIM * 2, sizeof unscale);
    for (int d = 0; d < DIM; d++)
      if (isfinite(rows[row][d])) largest = fmaxf(largest, fabsf(rows[row][d]));
    for (int d = 0; d < DIM; d++, at += 2) {
      uint16_t half;
      memcpy(&half, at, sizeof half);
      const float x = rows[row][d], got = fa_f16_to_f32(half) * unscale;
      const double bound = fmax(fabs((double)x) * 0x1p-11, largest * 0x1p-38);
      CHECK(isfinite(x) ? fabs((double)got - x) <= bound
            : isnan(x)  ? isnan(got)
                        : got == x,
            "%g became %g in row %d", x, got, row);
    }
  }
}

static fa_status exact_alloc(const void *context, size_t bytes, void **memory, fa_error *error) {
  (void)error;
  *(size_t *)context += bytes;
  *memory = malloc(bytes);
  return FA_STATUS_OK;
}

static void exact_free(const void *context, void *memory) {
  (void)context;
  free(memory);
}

/* Using one device leaves the others asleep. */
static void test_second_device_first(void) {
  fa_heap *heap;
  void *memory;
  if (fa_heap_of(&fake_gpu, 1, &heap, NULL)) exit(2);
  take(&heap->pinned->callers, 100, &memory);
  CHECK(fake_get_state().is_awake[1] && !fake_get_state().is_awake[0], "device 0 was woken up by device 1");
  fa_pool_give(&heap->pinned->callers, memory);
}

/* A device that cannot be asked today has no heap yet, rather than one that knows no size. */
static void test_first_use(void) {
  fa_heap *heap;
  fa_error error;
  fake_settings.fail_at = 0, fake_settings.failure = FA_STATUS_DEVICE_ERROR;
  CHECK(fa_heap_of(&fake_gpu, 0, &heap, &error) == FA_STATUS_DEVICE_ERROR, "a heap of an unknown size");
  CHECK_TEXT(error.argument, "device");
  CHECK(fa_heap_of(&fake_gpu, 0, &heap, &error) == FA_STATUS_OK && heap->pool.idle_limit > 0, "the next time");
}

/* Without a cache, sizes are exact and nothing is used twice. */
static void test_pool_without_cache(void) {
  size_t allocated = 0;
  fa_pool pool;
  void *memory;
  fa_pool_init(&pool, (fa_source){exact_alloc, exact_free, &allocated}, SIZE_MAX, 0);
  for (size_t i = 1; i <= 3; i++) {
    take(&pool, 12345, &memory);
    CHECK(allocated == i * 12345, "%zu bytes for %zu blocks of 12345", allocated, i);
    fa_pool_give(&pool, memory);
    CHECK(pool.idle_bytes == 12345, "a block given back waits for the next call, as giving it may not");
  }
  fa_pool_trim(&pool, 0);
}

/* The public functions on devices that need none of this. */
static void test_host_devices(void) {
  void *memory;
  fa_error error;
  fa_memory_info info;
  CHECK(fa_host_alloc(cpu, 100, &memory, &error) == FA_STATUS_UNSUPPORTED && !memory,
        "pinned memory for a CPU");
  CHECK(fa_memory_get_info(cpu, &info, &error) == FA_STATUS_OK && info.pinned_limit_bytes == 0,
        "a CPU's memory");
  CHECK(fa_memory_trim(cpu, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_memory_locate(cpu, &info, 1) == FA_PLACE_HOST, "a CPU's places");
  CHECK(fa_device_alloc(cpu, 100, &memory, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_device_free(cpu, memory, &error) == FA_STATUS_OK, "%s", error.message);
}

/* What is kept for a later call is there on a CPU, too, whose device memory is the host's. */
static void test_kept_on_cpu(void) {
  fa_random random = random_stream(17, 0);
  setting s = mixed_setting(FA_PASS_FORWARD, &random);
  fa_tensors tensors = {0};
  fa_placement placement = {0};
  fa_plan plan;
  fa_error error;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    s.given[id] = role_of(&s, id) == FA_ROLE_OUTPUT ? calloc(1, size_of(&s, id) + 1) : s.host[id];
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&s.problem, id, s.given[id]);
    fa_tensor_at(&placement.on_device, id)->data = s.on_device[id] = calloc(1, size_of(&s, id) + 1);
  }
  tensors.dout.data = NULL; /* nobody asks for what is no tensor of the pass */
  placement.on_device.v.data = tensors.v.data;
  if (fa_plan_init(&plan, &s.problem, s.pass, reference, NULL)) exit(2);
  const fa_device beyond[] = {reference, {FA_DEVICE_REFERENCE, 1}};
  CHECK(fa_run_on_devices(&plan, beyond, 2, &tensors, NULL, &error) == FA_STATUS_NO_DEVICE, "reference 1");
  CHECK(fa_run_anywhere(&plan, &tensors, &placement, NULL, &error) == FA_STATUS_OK, "%s", error.message);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!role_of(&s, id)) continue;
    const bool is_kept = memcmp(s.on_device[id], s.host[id], size_of(&s, id)) == 0;
    CHECK(is_kept == (id != FA_TENSOR_V) && memcmp(s.given[id], s.host[id], size_of(&s, id)) == 0, "%s",
          fa_tensor_name(id));
  }
  tensors.q.stride_row++;
  CHECK(fa_run_anywhere(&plan, &tensors, &placement, NULL, &error) == FA_STATUS_INVALID_ARGUMENT,
        "a tensor with gaps was copied");
  CHECK_TEXT(error.message, "q: expected a contiguous tensor, as it has to be copied");
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (role_of(&s, id) == FA_ROLE_OUTPUT) free(s.given[id]);
    free(s.on_device[id]);
  }
  setting_free(&s);
}

/* Workspaces of small calls are at hand for the next ones, each for one call at a time. */
static void test_workspaces(void) {
  const fa_device cpu = {FA_DEVICE_CPU, 0};
  enum { MANY = 40, SMALL = 1000, LARGE = 600 << 10 };
  void *taken[MANY], *again, *large;
  CHECK(fa_memory_trim(cpu, NULL) == FA_STATUS_OK, "trimmed");
  CHECK(fa_workspace_take(cpu, 0, &again, NULL) == FA_STATUS_OK && !again, "a workspace of nothing");
  fa_workspace_give(cpu, 0, again);
  for (int i = 0; i < MANY; i++) {
    CHECK(fa_workspace_take(cpu, SMALL, &taken[i], NULL) == FA_STATUS_OK, "workspace %d", i);
    CHECK((uintptr_t)taken[i] % 64 == 0, "workspace %d is not aligned", i);
    memset(taken[i], i, SMALL);
  }
  for (int i = 0; i < MANY; i++)
    for (int j = 0; j < i; j++) CHECK(taken[i] != taken[j], "workspaces %d and %d are one", i, j);
  for (int i = 0; i < MANY; i++) fa_workspace_give(cpu, SMALL, taken[i]);
  CHECK(fa_workspace_take(cpu, 2 * SMALL, &again, NULL) == FA_STATUS_OK && again == taken[0], "none is kept");
  CHECK(fa_workspace_take(cpu, LARGE, &large, NULL) == FA_STATUS_OK, "a large workspace");
  memset(large, 1, LARGE);
  fa_workspace_give(cpu, LARGE, large);
  fa_workspace_give(cpu, 2 * SMALL, again);
  CHECK(fa_memory_trim(cpu, NULL) == FA_STATUS_OK, "trimmed");
}

int main(void) {
  test_second_device_first(); /* before any other */
  test_first_use();
  test_pool();
  test_pool_without_cache();
  for (int bits = 8; bits <= 32; bits++) test_pool_of_many((uintptr_t)1 << bits);
  test_pool_of_many((uintptr_t)20 << 20);
  test_host_devices();
  test_workspaces();
  test_kept_on_cpu();
  test_threads();
  test_shared_threads();
  test_whose_threads();
  test_quota();
  test_forks();
  test_pack();
  test_places_and_slices();
  test_cut_bands();
  test_large();
  test_broadcast();
  test_faults(FA_PASS_FORWARD);
  test_faults(FA_PASS_BACKWARD);
  test_devices();
  test_device_faults();
  test_wrong_devices();
  test_out_of_memory();
  test_no_pinned_memory(FA_PASS_FORWARD);
  test_no_pinned_memory(FA_PASS_BACKWARD);
  test_no_ring(true);
  test_no_ring(false);
  test_order();
  test_order_on_device(FA_PASS_FORWARD);
  test_order_on_device(FA_PASS_BACKWARD);
  test_order_of_kept();
  test_many_callers();
  trim();
  CHECK(fake_get_state().device_bytes == 0 && fake_get_state().pinned_bytes == 0, "memory is left");
  return report();
}
