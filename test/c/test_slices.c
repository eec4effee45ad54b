/*
 * Slices have the bits of the whole. Whatever the host path cuts, by batches, heads, rows and among devices,
 * and wherever tensors lie, each slice is computed as the whole is: by the same kernel, with keys in as many
 * parts, scaled and added in the same groups. On the CPU, whose tensors the host path leaves where they are,
 * the same slices are run here.
 *
 *   EMULATED_SM=90 test_slices [cpu|cuda]
 *   test_slices cuda SWEEP SEED GROWTH   random problems alone, so many, of lengths GROWTH times as long
 */
#include <stdlib.h>

#include "../../c_src/core/backend.h"
#include "../../c_src/core/problem.h"
#include "../../c_src/core/tensors.h"
#include "../../c_src/host/slices.h"
#include "check.h"
#include "devices.h"
#include "harness.h"

/* ---- problems ----------------------------------------------------------------------------------------------
 */

#define ANY FA_UNBOUNDED

static const int64_t row_unit = 384, few_rows = 64;

enum { LENGTHS = 1, PAGES = 2, BANDS = 4, ALIBI = 8, BIAS = 16, DROPOUT = 32, SINKS = 64, ROW_SINKS = 128 };
enum { DLSE = 256, SOFTCAP = 512, ANY_ORDER = 1024, ORDERED = 2048, FORWARD = 4096 };

typedef struct sizes {
  int64_t batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, window_left, window_right;
  unsigned has;
} sizes;

/* FORWARD: only forwards are cut by rows, in multiples of 384; and the CPU, whose calls nobody cuts, sums long
 * keys, and many rows of few keys, of the backward in an order that hangs on the number of heads. What few rows
 * have of keys that end somewhere is in as many parts as there are multiprocessors for; so is whether there are
 * few. ORDERED: f32 d128 adds to dq in order where there are enough column blocks, asked for or not. The last
 * three, few keys and few rows, are shared out on GPUs of 9 multiprocessors or more (EMULATED_MULTIPROCESSORS).
 */
static const sizes table[] = {
    {3, 70, 90, 4, 2, 16, ANY, ANY, 0},
    {1, 130, 110, 6, 3, 40, ANY, 0, SINKS},
    {2, 61, 140, 3, 3, 64, 30, 5, SOFTCAP | SINKS | ANY_ORDER},
    {2, 45, 45, 4, 1, 72, ANY, 0, DLSE},
    {5, 40, 33, 2, 1, 136, 9, 3, 0},
    {1, 500, 537, 2, 1, 24, ANY, 0, FORWARD},
    {1, 450, 450, 1, 1, 40, 100, 7, SINKS | ROW_SINKS | FORWARD},
    {2, 400, 431, 1, 1, 8, ANY, ANY, FORWARD},
    {2, 460, 491, 1, 1, 8, ANY, ANY, FORWARD},
    {1, 400, 2100, 1, 1, 24, ANY, ANY, FORWARD},
    {1, 410, 431, 1, 1, 16, 60, ANY, DROPOUT | FORWARD},
    {1, 464, 485, 1, 1, 16, 60, ANY, DROPOUT | FORWARD},
    {1, 470, 480, 1, 1, 16, 90, 40, BANDS | FORWARD},
    {3, 90, 80, 4, 2, 32, ANY, 0, BANDS},
    {3, 50, 60, 4, 2, 24, ANY, 0, ALIBI | BIAS | DROPOUT},
    {2, 40, 50, 3, 3, 24, 20, ANY, BIAS | ANY_ORDER},
    {6, 1, 1500, 4, 2, 64, ANY, 0, LENGTHS | FORWARD},
    {1, 3, 700, 12, 3, 40, 400, 0, LENGTHS | SINKS},
    {4, 7, 150, 6, 3, 64, ANY, ANY, LENGTHS},
    {1, 66, 4099, 4, 4, 8, ANY, 0, LENGTHS | FORWARD},
    {5, 2, 120, 4, 1, 16, ANY, 0, PAGES | LENGTHS},
    {6, 2, 3100, 12, 3, 24, ANY, 0, FORWARD},
    {4, 9, 150, 2, 2, 112, ANY, ANY, ORDERED | ANY_ORDER},
    {2, 900, 50, 4, 2, 72, ANY, ANY, 0},
    {2, 901, 40, 2, 2, 24, ANY, 871, SINKS},
    {3, 2, 4100, 1, 1, 40, ANY, 0, FORWARD},
};

static fa_problem problem_of(const sizes *of, fa_dtype dtype, fa_precision precision) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.precision = precision, p.batch = of->batch;
  p.seqlen_q = of->seqlen_q, p.seqlen_k = of->seqlen_k, p.head_dim = of->head_dim;
  p.num_heads = of->num_heads, p.num_kv_heads = of->num_kv_heads;
  p.window_left = of->window_left, p.window_right = of->window_right;
  p.deterministic = !(of->has & ANY_ORDER);
  if (of->has & LENGTHS) p.lengths_batch = p.batch;
  if (of->has & PAGES) p.page_size = 8, p.max_pages = p.seqlen_k / 8, p.num_pages = p.max_pages + 3;
  if (of->has & BANDS) p.num_bands = 4, p.bands_batch = p.batch;
  if (of->has & ALIBI) p.alibi_batch = p.batch;
  if (of->has & BIAS) p.bias_batch = p.batch, p.bias_heads = p.num_heads, p.bias_rows = p.seqlen_q;
  if (of->has & BIAS) p.bias_dtype = dtype;
  if (of->has & DROPOUT) p.dropout = 0.25, p.num_seed_words = 2;
  if (of->has & SINKS) p.num_sinks = 2;
  if (of->has & ROW_SINKS) p.num_row_sinks = 1;
  if (of->has & DLSE) p.dlse_batch = p.batch;
  if (of->has & SOFTCAP) p.softcap = 3;
  return p;
}

/* ---- its tensors -------------------------------------------------------------------------------------------
 */

/* The inputs, and the whole's results, contiguous in the host's memory. */
typedef struct call {
  fa_problem problem;
  fa_plan plan;
  void *memory[FA_NUM_TENSORS];
  bool is_ordered; /* dq has the same bits in every run */
} call;

static fa_tensor_role role_of(const call *c, int id) {
  return fa_tensor_role_in(&c->problem, c->plan.pass, id);
}

static size_t bytes_of(const call *c, int id) { return (size_t)fa_tensor_shape(&c->problem, id).size_bytes; }

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes + 64);
  if (!memory) exit(2);
  return memory;
}

/* A key that is far larger than the others, and that few rows see: f32 kernels scale its neighbours with it. */
static void enlarge_key(const fa_problem *p, fa_values *values) {
  const int64_t width = p->num_kv_heads * p->head_dim, row = p->seqlen_k - 30;
  if (p->dtype != FA_DTYPE_F32 || p->seqlen_q < row_unit || row < 0) return;
  for (int64_t b = 0; b < p->batch; b++)
    for (int64_t i = 0; i < width; i++)
      values->data[FA_TENSOR_K][(b * p->seqlen_k + row) * width + i] *= 0x1p14;
}

/* Inputs as the type has them; the forward's results are the oracle's, so that every device's backward is given
 * sensible ones. */
static bool call_new(call *c, const fa_problem *p, fa_pass pass, fa_device device, bool enlarges) {
  fa_error error;
  *c = (call){.problem = *p};
  if (fa_plan_init(&c->plan, p, pass, device, &error)) return false;
  fa_values values = values_new(p);
  values_fill(&values, p, p->dtype, FILL_LOGNORMAL, 5);
  if (enlarges) enlarge_key(p, &values);
  if (pass == FA_PASS_BACKWARD)
    must_run(&(fa_setup){.device = {FA_DEVICE_REFERENCE, 0}}, p, FA_PASS_FORWARD, &values);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const fa_dtype dtype = fa_tensor_shape(p, id).dtype;
    c->memory[id] = allocate(bytes_of(c, id));
    memset(c->memory[id], 0xff, bytes_of(c, id));
    for (int64_t i = 0; role_of(c, id) == FA_ROLE_INPUT && i < values_count(p, id); i++)
      set_element(dtype, (unsigned char *)c->memory[id] + (size_t)i * fa_dtype_bytes(dtype),
                  values.data[id][i]);
  }
  values_free(&values);
  return true;
}

static void call_free(call *c) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(c->memory[id]);
}

/* Outputs of this run beside those of the whole. */
typedef struct results {
  void *memory[FA_NUM_TENSORS];
  bool is_pinned;
} results;

/* Inputs, too, are in memory of that kind. */
static results results_new(const call *c, bool is_pinned) {
  results r = {.is_pinned = is_pinned};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!role_of(c, id) || bytes_of(c, id) == 0) continue;
    if (!is_pinned)
      r.memory[id] = allocate(bytes_of(c, id));
    else if (fa_host_alloc(c->plan.device, bytes_of(c, id), &r.memory[id], NULL))
      exit(2);
    memcpy(r.memory[id], c->memory[id], bytes_of(c, id));
    if (role_of(c, id) == FA_ROLE_OUTPUT) memset(r.memory[id], 0xff, bytes_of(c, id));
  }
  return r;
}

static void results_free(const call *c, results *r) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (r->is_pinned && r->memory[id])
      fa_host_free(c->plan.device, r->memory[id], NULL);
    else if (!r->is_pinned)
      free(r->memory[id]);
  }
}

static fa_tensors tensors_at(const call *c, void *const *memory) {
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(c, id)) *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&c->problem, id, memory[id]);
  return tensors;
}

/* The first byte in which they differ, or how many there are. */
static size_t first_difference(const unsigned char *a, const unsigned char *b, size_t count) {
  if (memcmp(a, b, count) == 0) return count;
  size_t at = 0;
  while (a[at] == b[at]) at++;
  return at;
}

static void check_results(const call *c, const results *r, const char *how) {
  char text[200];
  fa_problem_format(&c->problem, text, sizeof text);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (role_of(c, id) != FA_ROLE_OUTPUT || (id == FA_TENSOR_DQ && !c->is_ordered)) continue;
    const unsigned char *own = r->memory[id], *whole = c->memory[id];
    const size_t at = first_difference(own, whole, bytes_of(c, id));
    CHECK(at == bytes_of(c, id), "%s, %s, %s: %s has other bits, in byte %zu %02x and not %02x", text,
          c->plan.kernel, how, fa_tensor_name(id), at, own[at], whole[at]);
  }
}

/* ---- cuts --------------------------------------------------------------------------------------------------
 */

static fa_slicing never(void) { return (fa_slicing){INT64_MAX, INT64_MAX, 1, 1, row_unit, few_rows}; }

/* So that about so many slices are wanted. */
static fa_slicing about(const fa_problem *p, int64_t num_slices) {
  const int64_t rows = p->batch * p->num_heads * p->seqlen_q / num_slices;
  return (fa_slicing){1, rows ? rows : 1, 1, 1, row_unit, few_rows};
}

/* The host path's slices of a call of the host's memory, and which kinds of cuts these have. */
static long num_cuts_of[3];
enum { BY_BATCHES, BY_HEADS, BY_ROWS };

static fa_slices slices_of(const call *c, bool is_pinned) {
  fa_slices slices;
  int64_t bytes = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(c, id)) bytes += (int64_t)bytes_of(c, id);
  const fa_extent all = fa_whole_extent(&c->plan.problem);
  fa_cut(&c->plan.problem, &all, c->plan.pass, bytes, is_pinned ? 0 : bytes, true, &slices);
  for (int i = 0; i < slices.count; i++) {
    const fa_extent *own = &slices.at[i].own;
    num_cuts_of[BY_BATCHES] += own->num_batches < all.num_batches;
    num_cuts_of[BY_HEADS] += own->num_heads < all.num_heads;
    num_cuts_of[BY_ROWS] += own->num_rows < all.num_rows;
  }
  return slices;
}

/* ---- devices with memory of their own
 * ------------------------------------------------------------------------ */

static void run_anywhere(const call *c, results *r, int32_t num_devices, const char *how) {
  fa_error error;
  fa_device devices[FA_MAX_DEVICES];
  const fa_tensors tensors = tensors_at(c, r->memory);
  for (int32_t i = 0; i < num_devices; i++) devices[i] = (fa_device){c->plan.device.kind, i};
  const fa_status status = num_devices
                               ? fa_run_on_devices(&c->plan, devices, num_devices, &tensors, NULL, &error)
                               : fa_run_anywhere(&c->plan, &tensors, NULL, NULL, &error);
  CHECK(status == FA_STATUS_OK, "%s: %s", how, error.message);
}

static void run_whole(call *c) {
  results r = results_new(c, false);
  fa_host_slicing = never();
  run_anywhere(c, &r, 0, "the whole");
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(c, id) == FA_ROLE_OUTPUT) memcpy(c->memory[id], r.memory[id], bytes_of(c, id));
  results_free(c, &r);
}

static void check_cut(const call *c, int64_t num_slices, bool is_pinned, int32_t num_devices) {
  char how[80];
  snprintf(how, sizeof how, "%d slices, %d devices, %s", (int)num_slices, (int)num_devices,
           is_pinned ? "pinned" : "pageable");
  fa_host_slicing = num_slices > 1 ? about(&c->problem, num_slices) : never();
  slices_of(c, is_pinned);
  results r = results_new(c, is_pinned);
  run_anywhere(c, &r, num_devices, how);
  check_results(c, &r, how);
  results_free(c, &r);
}

/* Whether slices of ordinary memory are of numbers that are rounded on their way, where the whole's are not:
 * kernels round f32 themselves at FA_PRECISION_DEFAULT, but for the dout that makes delta, and those for few
 * rows scale nothing before. Then the whole is what one device makes of slices. */
static bool is_rounded_before(const call *c) {
  const fa_problem *p = &c->problem;
  return p->dtype == FA_DTYPE_F32 && p->precision == FA_PRECISION_DEFAULT &&
         (c->plan.pass == FA_PASS_BACKWARD || strstr(c->plan.kernel, "decode"));
}

static void check_rounded(call *c, int32_t num_devices) {
  fa_host_slicing = about(&c->problem, 3);
  results one = results_new(c, false), all = results_new(c, false);
  run_anywhere(c, &one, 0, "one device");
  run_anywhere(c, &all, num_devices, "all devices");
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (role_of(c, id) == FA_ROLE_OUTPUT) memcpy(c->memory[id], one.memory[id], bytes_of(c, id));
  check_results(c, &all, "rounded");
  results_free(c, &one);
  results_free(c, &all);
}

static void check_on_devices(call *c) {
  const int32_t num_devices = fa_num_devices(c->plan.device.kind, NULL);
  run_whole(c);
  check_cut(c, 8, true, 0);
  check_cut(c, 1, true, num_devices);
  if (is_rounded_before(c)) {
    check_rounded(c, num_devices);
    return;
  }
  check_cut(c, 2, false, 0);
  check_cut(c, 6, false, num_devices);
}

/* ---- the CPU ------------------------------------------------------------------------------------------------
 */

static void run_plan(const fa_plan *plan, const fa_tensors *tensors) {
  fa_execution execution = {.workspace_bytes = plan->workspace_bytes};
  fa_error error;
  if (fa_device_alloc(plan->device, plan->workspace_bytes, &execution.workspace, NULL)) exit(2);
  CHECK(!fa_run(plan, tensors, &execution, &error), "%s", error.message);
  fa_device_free(plan->device, execution.workspace, NULL);
}

/* Copies the extent's rows to where its own problem's lie, or back. */
static void copy_region(const fa_region *region, char *whole, char *own, bool back) {
  for (size_t i = 0; i < region->num_rows; i++) {
    char *there = whole + region->offset + i * region->pitch, *here = own + i * region->row_bytes;
    memcpy(back ? there : here, back ? here : there, region->row_bytes);
  }
}

static void run_slice(const call *c, const fa_slice *slice, results *r) {
  const fa_extent *own = &slice->own;
  fa_plan plan = c->plan;
  fa_error error;
  plan.whole = &c->plan, plan.problem = fa_problem_of(&c->plan.problem, own);
  CHECK(!fa_backend_plan(&plan, &error), "%s", error.message);
  fa_tensors tensors = tensors_at(c, r->memory);
  void *apart[FA_NUM_TENSORS] = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    fa_tensor *tensor = fa_tensor_at(&tensors, id);
    if (!tensor->data) continue;
    const fa_region region = fa_region_of(&c->plan.problem, own, id, tensor);
    tensor->data = (char *)tensor->data + region.offset;
    if (fa_lies_apart(&c->plan.problem, own, id))
      tensor->data = apart[id] = allocate((size_t)fa_tensor_shape(&plan.problem, id).size_bytes);
  }
  int32_t bands[6 * 8];
  if (fa_needs_own_bands(&c->plan.problem, own)) {
    fa_cut_bands(&c->plan.problem, own, tensors.bands.data, bands);
    tensors.bands.data = bands;
  }
  run_plan(&plan, &tensors);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!apart[id]) continue;
    const fa_tensor tensor = fa_tensor_contiguous(&c->problem, id, NULL);
    const fa_region region = fa_region_of(&c->plan.problem, own, id, &tensor);
    copy_region(&region, r->memory[id], apart[id], true);
    free(apart[id]);
  }
}

static void check_on_cpu(call *c) {
  const fa_tensors tensors = tensors_at(c, c->memory);
  run_plan(&c->plan, &tensors);
  for (int64_t num_slices = 2; num_slices <= 8; num_slices *= 2)
    for (int is_pinned = 0; is_pinned < 2; is_pinned++) {
      fa_host_slicing = about(&c->problem, num_slices);
      const fa_slices slices = slices_of(c, is_pinned);
      results r = results_new(c, false);
      for (int i = 0; i < slices.count; i++) run_slice(c, &slices.at[i], &r);
      check_results(c, &r, is_pinned ? "pinned" : "pageable");
      results_free(c, &r);
    }
}

/* ---- all of it ----------------------------------------------------------------------------------------------
 */

/* Whether dq is added to in order, asked for or not: by the kernels of f32 for Hopper, where there are three
 * column blocks for each multiprocessor. */
static bool adds_in_order(const call *c) {
  enum { MOST_KEYS_A_BLOCK = 128 };
  fa_device_info info;
  if (!strstr(c->plan.kernel, "sm90/f32/") || fa_device_get_info(c->plan.device, &info, NULL)) return false;
  const int64_t num_blocks = (c->problem.seqlen_k + MOST_KEYS_A_BLOCK - 1) / MOST_KEYS_A_BLOCK;
  return c->problem.batch * c->problem.num_kv_heads * num_blocks >= 3 * info.num_threads;
}

static void test_pass(const fa_problem *p, fa_pass pass, fa_device device, bool enlarges, bool may_be_ordered) {
  const bool is_cpu = device.kind == FA_DEVICE_CPU;
  call c;
  if (!call_new(&c, p, pass, device, enlarges)) {
    num_skipped++;
    return;
  }
  c.is_ordered = is_cpu || p->deterministic || (may_be_ordered && adds_in_order(&c));
  (is_cpu ? check_on_cpu : check_on_devices)(&c);
  call_free(&c);
}

static void test_case(const sizes *of, fa_device device, fa_dtype dtype, fa_precision precision) {
  const fa_problem p = problem_of(of, dtype, precision);
  const fa_pass last = of->has & FORWARD ? FA_PASS_FORWARD : FA_PASS_BACKWARD;
  for (fa_pass pass = FA_PASS_FORWARD; pass <= last; pass++)
    test_pass(&p, pass, device, true, of->has & ORDERED);
}

/* Of random problems on a GPU: the order of the CPU's sums hangs on the number of heads. Where f32 is rounded a
 * key of that size has scores that err by more than exp can take, and what overflows is as the rest of the call
 * lets it be. */
static void test_random(fa_device device, int64_t count, uint64_t seed, int64_t growth) {
  for (int64_t i = 0; i < count; i++) {
    fa_case c = fa_case_random(seed, (uint64_t)i, growth);
    const bool enlarges = c.problem.precision != FA_PRECISION_DEFAULT;
    c.problem.deterministic = 1;
    test_pass(&c.problem, FA_PASS_FORWARD, device, enlarges, false);
    test_pass(&c.problem, FA_PASS_BACKWARD, device, enlarges, false);
    if (fa_case_put_on_pages(&c, seed, (uint64_t)i))
      test_pass(&c.problem, FA_PASS_FORWARD, device, enlarges, false);
  }
}

static void test_device(fa_device device) {
  for (int i = 0; i < 3; i++) num_cuts_of[i] = 0;
  if (device.kind == FA_DEVICE_CUDA) test_random(device, 24, 1, 2);
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    /* Types take turns where they share a template. */
    test_case(&table[i], device, FA_DTYPE_F32, FA_PRECISION_HIGHEST);
    test_case(&table[i], device, i % 2 ? FA_DTYPE_F16 : FA_DTYPE_BF16, FA_PRECISION_HIGHEST);
    if (device.kind == FA_DEVICE_CPU) test_case(&table[i], device, FA_DTYPE_F64, FA_PRECISION_HIGHEST);
    if (device.kind == FA_DEVICE_CUDA && i % 3 == 1)
      test_case(&table[i], device, FA_DTYPE_F32, FA_PRECISION_DEFAULT);
  }
  CHECK(num_cuts_of[BY_BATCHES] > 20 && num_cuts_of[BY_HEADS] > 20 && num_cuts_of[BY_ROWS] > 20,
        "%ld slices of some batches, %ld of some heads, %ld of some rows", num_cuts_of[BY_BATCHES],
        num_cuts_of[BY_HEADS], num_cuts_of[BY_ROWS]);
}

int main(int argc, char **argv) {
  const fa_device cuda = {FA_DEVICE_CUDA, 0};
  static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_CUDA};
  setvbuf(stdout, NULL, _IOLBF, 0);
  setenv("EMULATED_DEVICES", "3", 0);
  if (argc > 4 && fa_num_devices(FA_DEVICE_CUDA, NULL) > 0)
    test_random(cuda, strtoll(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), strtoll(argv[4], NULL, 10));
  else
    test_devices(argc, argv, kinds, sizeof kinds / sizeof *kinds, test_device);
  return report();
}
