/*
 * What only a GPU can be asked: tensors of more than 2^31 elements, a million rows, passes that repeat
 * bitwise, whose memory is what, which stream waits for which, memory that runs out, and an error that the
 * device does not recover from. test_attention has the case table for it.
 *
 *   --quick   only what a sanitizer can follow
 *   --masks   only what hides keys, and what a backward makes beside itself: an emulated GPU can follow
 *
 * What is too large for the reference is checked in slices. A few rows of a head are a problem of their own,
 * with the keys that they see; so are the gradients of a few keys, with the rows that see them and the o and
 * lse of those. Tolerances are those of test_attention: twice the error of naive attention in the same type.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "../../c_src/core/tensors.h"
#include "check.h"
#include "harness.h"
#include "random.h"

static const fa_device cuda = {FA_DEVICE_CUDA, 0}, cpu = {FA_DEVICE_CPU, 0},
                       reference = {FA_DEVICE_REFERENCE, 0};
static const fa_dtype dtypes[] = {FA_DTYPE_BF16, FA_DTYPE_F16, FA_DTYPE_F32};
#define NUM_DTYPES (sizeof dtypes / sizeof *dtypes)

static void must(fa_status status, const fa_error *error) {
  if (status == FA_STATUS_OK) return;
  printf("FAILED: %s\n", error->message);
  exit(1);
}

static fa_problem problem_of(fa_dtype dtype, int64_t batch, int64_t seqlen, int64_t num_heads,
                             int64_t head_dim) {
  fa_problem problem;
  fa_problem_init(&problem);
  problem.dtype = dtype;
  problem.batch = batch, problem.seqlen_q = problem.seqlen_k = seqlen;
  problem.num_heads = problem.num_kv_heads = num_heads, problem.head_dim = head_dim;
  problem.window_right = 0;
  return problem;
}

/* The plan of a pass on the GPU, where there must be one. */
static fa_plan plan_of(const fa_problem *problem, fa_pass pass) {
  fa_plan plan;
  fa_error error;
  must(fa_plan_init(&plan, problem, pass, cuda, &error), &error);
  return plan;
}

static size_t size_of(const fa_problem *problem, int id) {
  return (size_t)fa_tensor_shape(problem, id).size_bytes;
}

static bool is_used(const fa_problem *problem, int id) {
  return fa_tensor_role_in(problem, FA_PASS_FORWARD, id) || fa_tensor_role_in(problem, FA_PASS_BACKWARD, id);
}

static bool is_output(const fa_problem *problem, int id) {
  return fa_tensor_role_in(problem, FA_PASS_FORWARD, id) == FA_ROLE_OUTPUT ||
         fa_tensor_role_in(problem, FA_PASS_BACKWARD, id) == FA_ROLE_OUTPUT;
}

/* ---- tensors in the host's memory, contiguous --------------------------------------------------------- */

typedef struct host {
  fa_problem problem;
  unsigned char *data[FA_NUM_TENSORS];
} host;

/* All 0. */
static host host_new(const fa_problem *problem) {
  host host = {.problem = *problem};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_used(problem, id)) continue;
    host.data[id] = calloc(size_of(problem, id) + 1, 1);
    if (!host.data[id]) must(FA_STATUS_OUT_OF_MEMORY, &(fa_error){.message = "out of memory"});
  }
  return host;
}

static void host_free(host *host) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(host->data[id]);
}

static double get(const host *host, int id, int64_t index) {
  const fa_dtype dtype = fa_tensor_shape(&host->problem, id).dtype;
  return get_element(dtype, host->data[id] + (size_t)index * fa_dtype_bytes(dtype));
}

static void set(host *host, int id, int64_t index, double value) {
  const fa_dtype dtype = fa_tensor_shape(&host->problem, id).dtype;
  set_element(dtype, host->data[id] + (size_t)index * fa_dtype_bytes(dtype), value);
}

static void set_band(host *host, int64_t number, const int64_t band[6]) {
  for (int word = 0; word < 6; word++) set(host, FA_TENSOR_BANDS, 6 * number + word, (double)band[word]);
}

/* As many sequences as there are bands, one behind the other. */
static void host_fill_bands(host *host) {
  const fa_problem *p = &host->problem;
  for (int64_t n = 0; n < p->bands_batch * p->num_bands; n++) {
    const int64_t i = n % p->num_bands, count = p->num_bands;
    const int64_t band[6] = {p->seqlen_q * i / count,
                             p->seqlen_q * (i + 1) / count,
                             p->seqlen_k * i / count,
                             p->seqlen_k * (i + 1) / count,
                             INT32_MAX,
                             INT32_MAX};
    set_band(host, n, band);
  }
}

static void host_fill(host *host) {
  fa_values values = values_new(&host->problem);
  values_fill(&values, &host->problem, host->problem.dtype, FILL_NORMAL, 1);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_used(&host->problem, id) && !is_output(&host->problem, id))
      for (int64_t i = values_count(&host->problem, id) - 1; i >= 0; i--) set(host, id, i, values.data[id][i]);
  values_free(&values);
}

static void host_copy(host *to, const host *from) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_used(&from->problem, id)) memcpy(to->data[id], from->data[id], size_of(&from->problem, id));
}

/* What a backward reads, in another type. */
static host host_convert(const host *from, fa_dtype dtype) {
  fa_problem problem = from->problem;
  problem.dtype = dtype;
  host to = host_new(&problem);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id) != FA_ROLE_INPUT) continue;
    const fa_dtype old = fa_tensor_shape(&from->problem, id).dtype, new = fa_tensor_shape(&problem, id).dtype;
    const size_t old_bytes = fa_dtype_bytes(old), new_bytes = fa_dtype_bytes(new);
    if (old == new) {
      memcpy(to.data[id], from->data[id], size_of(&problem, id));
      continue;
    }
    for (size_t i = (size_t)values_count(&problem, id); i-- > 0;)
      set_element(new, to.data[id] + i * new_bytes, get_element(old, from->data[id] + i * old_bytes));
  }
  return to;
}

static fa_status host_run(host *host, fa_device device, fa_pass pass, fa_error *error) {
  fa_plan plan;
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&host->problem, id, host->data[id]);
  fa_status status = fa_plan_init(&plan, &host->problem, pass, device, error);
  return status ? status : fa_run_anywhere(&plan, &tensors, NULL, NULL, error);
}

static void host_must_run(host *host, fa_device device, fa_pass pass) {
  fa_error error;
  must(host_run(host, device, pass, &error), &error);
}

/* ---- tensors in the device's memory, too large for the host's ----------------------------------------- */

typedef struct device_memory {
  fa_problem problem;
  fa_tensors tensors;
} device_memory;

/* Repeats what its first chunk is, by copies that double it. */
static void repeat(unsigned char *memory, size_t bytes, size_t chunk) {
  fa_error error;
  for (size_t done = chunk; done < bytes; done *= 2) {
    const size_t next = done < bytes - done ? done : bytes - done;
    must(fa_device_copy(cuda, memory + done, memory, next, NULL, &error), &error);
  }
}

/* Inputs repeat after a prime number of elements: no power of 2, and so no size cut to 32 bits, leads from an
 * element to its equal. Outputs start as NaN. */
enum { PERIOD = 16777259 };

static void device_fill(const device_memory *memory, int id, fa_dtype dtype, bool output) {
  const size_t bytes = size_of(&memory->problem, id), element = fa_dtype_bytes(dtype);
  const size_t chunk = bytes < PERIOD * element ? bytes : PERIOD * element;
  unsigned char *host = malloc(chunk), *to = fa_tensor_at((fa_tensors *)&memory->tensors, id)->data;
  fa_random random = random_stream(2, (uint64_t)id);
  memset(host, 0xff, chunk);
  for (size_t i = 0; !output && i < chunk / element; i++)
    set_element(dtype, host + i * element, random_normal(&random));
  fa_error error;
  must(fa_device_copy(cuda, to, host, chunk, NULL, &error), &error);
  free(host);
  repeat(to, bytes, chunk);
}

static void device_release(device_memory *memory) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    fa_device_free(cuda, fa_tensor_at(&memory->tensors, id)->data, NULL);
}

/* False where the device's memory does not hold them. */
static bool device_place(device_memory *memory, const fa_problem *problem, fa_error *error) {
  *memory = (device_memory){.problem = *problem};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_used(problem, id)) continue;
    void *data;
    if (fa_device_alloc(cuda, size_of(problem, id), &data, error)) {
      device_release(memory);
      return false;
    }
    *fa_tensor_at(&memory->tensors, id) = fa_tensor_contiguous(problem, id, data);
    device_fill(memory, id, fa_tensor_shape(problem, id).dtype, is_output(problem, id));
  }
  return true;
}

static fa_status device_run(const device_memory *memory, fa_pass pass, fa_error *error) {
  fa_plan plan;
  fa_execution execution = {0};
  fa_status status = fa_plan_init(&plan, &memory->problem, pass, cuda, error);
  if (!status) status = fa_device_alloc(cuda, plan.workspace_bytes, &execution.workspace, error);
  if (status) return status;
  execution.workspace_bytes = plan.workspace_bytes;
  status = fa_run(&plan, &memory->tensors, &execution, error);
  if (!status) status = fa_device_synchronize(cuda, NULL, error);
  fa_device_free(cuda, execution.workspace, NULL);
  return status;
}

/* ---- slices ------------------------------------------------------------------------------------------- */

typedef struct position {
  int64_t batch, head, first; /* first row, or first key */
} position;

enum { SLICE = 4 }; /* rows or keys */

static int axis_of_either(int id, fa_axis axis, fa_axis other) {
  return fa_axis_of(id, axis) >= 0 ? fa_axis_of(id, axis) : fa_axis_of(id, other);
}

/* Rows from first on of a head of the tensor become the slice's tensor of one batch and head. */
static void fetch(host *slice, const device_memory *memory, int id, position at, int64_t first) {
  const fa_shape shape = fa_tensor_shape(&slice->problem, id);
  const fa_tensor tensor = fa_tensor_strides(&memory->problem, id, fa_tensor_get(&memory->tensors, id));
  const int row_axis = axis_of_either(id, FA_AXIS_SEQLEN_Q, FA_AXIS_SEQLEN_K);
  const int head_axis = axis_of_either(id, FA_AXIS_NUM_HEADS, FA_AXIS_NUM_KV_HEADS), last = shape.rank - 1;
  const int64_t rows = shape.dims[row_axis], row_elements = row_axis == last ? 1 : shape.dims[last];
  const int64_t stride = row_axis == last ? 1 : tensor.strides[row_axis];
  const int64_t begin = at.batch * tensor.strides[0] + at.head * tensor.strides[head_axis];
  const size_t element = fa_dtype_bytes(shape.dtype);
  const int64_t at_once = stride == row_elements ? rows : 1;
  fa_error error;
  for (int64_t row = 0; row < rows; row += at_once)
    must(fa_device_copy(cuda, slice->data[id] + (size_t)(row * row_elements) * element,
                        (char *)tensor.data + (size_t)(begin + (first + row) * stride) * element,
                        (size_t)(at_once * row_elements) * element, NULL, &error),
         &error);
}

static double largest_error(const host *x, const host *exact, int id) {
  double worst = 0;
  for (int64_t i = values_count(&x->problem, id) - 1; i >= 0; i--) {
    const double error = fabs(get(x, id, i) - get(exact, id, i));
    worst = isnan(error) ? INFINITY : fmax(worst, error);
  }
  return worst;
}

static double largest(const host *x, int id) {
  double worst = 0;
  for (int64_t i = values_count(&x->problem, id) - 1; i >= 0; i--) worst = fmax(worst, fabs(get(x, id, i)));
  return worst;
}

/* Beside twice the naive error a few roundings, and one of an exponent: a probability is exp(s - lse). */
static void compare(const host *got, const host *naive, const host *exact, fa_tensor_id id, position at) {
  char text[200];
  fa_problem_format(&got->problem, text, sizeof text);
  const double error = largest_error(got, exact, id), naive_error = largest_error(naive, exact, id);
  const bool is_lse = id == FA_TENSOR_LSE;
  const double roundings = 4 + (is_lse ? 0 : largest(exact, FA_TENSOR_LSE));
  const double tiny = 0x1p-24 * roundings * fmax(is_lse, largest(exact, id));
  CHECK(error <= 2 * naive_error + tiny,
        "%s from %lld of head %lld, batch %lld (%s): error %.3g, naive %.3g, of %.3g", fa_tensor_name(id),
        (long long)at.first, (long long)at.head, (long long)at.batch, text, error, naive_error,
        largest(exact, id));
}

/* o, lse and dq of a few rows of a head. */
static void check_rows(const device_memory *memory, position at) {
  fa_problem problem = problem_of(memory->problem.dtype, 1, SLICE, 1, memory->problem.head_dim);
  problem.seqlen_k = at.first + SLICE;
  host got = host_new(&problem);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const bool keys = id == FA_TENSOR_K || id == FA_TENSOR_V;
    if (got.data[id] && id != FA_TENSOR_DK && id != FA_TENSOR_DV)
      fetch(&got, memory, id, at, keys ? 0 : at.first);
  }
  host exact = host_convert(&got, FA_DTYPE_F64), naive = host_convert(&got, problem.dtype);
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    host_must_run(&exact, reference, pass);
    host_must_run(&naive, reference, pass);
  }
  compare(&got, &naive, &exact, FA_TENSOR_O, at);
  compare(&got, &naive, &exact, FA_TENSOR_LSE, at);
  compare(&got, &naive, &exact, FA_TENSOR_DQ, at);
  host_free(&got);
  host_free(&exact);
  host_free(&naive);
}

/* dk and dv of a few keys of a head, from o and lse as the forward left them. */
static void check_keys(const device_memory *memory, position at) {
  fa_problem problem =
      problem_of(memory->problem.dtype, 1, memory->problem.seqlen_q - at.first, 1, memory->problem.head_dim);
  problem.seqlen_k = SLICE;
  problem.window_right = problem.seqlen_q - problem.seqlen_k;
  host got = host_new(&problem);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (got.data[id] && id != FA_TENSOR_DQ) fetch(&got, memory, id, at, at.first);
  host exact = host_convert(&got, FA_DTYPE_F64), naive = host_convert(&got, problem.dtype);
  host_must_run(&exact, reference, FA_PASS_BACKWARD);
  host_must_run(&naive, reference, FA_PASS_BACKWARD);
  compare(&got, &naive, &exact, FA_TENSOR_DK, at);
  compare(&got, &naive, &exact, FA_TENSOR_DV, at);
  host_free(&got);
  host_free(&exact);
  host_free(&naive);
}

/* Forward and backward, and the first, middle and last rows and keys of the first, a middle and the last head.
 */
static void check_large(const fa_problem *problem) {
  device_memory memory;
  fa_error error;
  char text[200];
  fa_problem_format(problem, text, sizeof text);
  bool placed = device_place(&memory, problem, &error);
  fa_status status = placed ? device_run(&memory, FA_PASS_FORWARD, &error) : FA_STATUS_OUT_OF_MEMORY;
  if (!status) status = device_run(&memory, FA_PASS_BACKWARD, &error);
  if (status == FA_STATUS_OUT_OF_MEMORY) {
    printf("skipped: %s: %s\n", text, error.message);
    num_skipped++;
  } else {
    CHECK(status == FA_STATUS_OK, "%s: %s", text, error.message);
  }
  const int64_t firsts[] = {0, problem->seqlen_q / 2 - 1, problem->seqlen_q - SLICE};
  const int64_t heads = problem->batch * problem->num_heads;
  const int64_t sampled[] = {0, heads / 2, heads - 1};
  for (int i = 0; status == FA_STATUS_OK && i < (heads > 1 ? 3 : 1); i++)
    for (int j = 0; j < 3; j++) {
      const position at = {sampled[i] / problem->num_heads, sampled[i] % problem->num_heads, firsts[j]};
      check_rows(&memory, at);
      check_keys(&memory, at);
    }
  if (placed) device_release(&memory);
}

/* Beyond 2^31 elements through the batch, and beyond 2^32 in one. */
static void test_elements(void) {
  const fa_problem problems[] = {problem_of(FA_DTYPE_F16, 3, 977, 5779, 128),
                                 problem_of(FA_DTYPE_BF16, 1, 4099, 8209, 128)};
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) check_large(&problems[i]);
}

static void test_million_rows(void) {
  const fa_problem problems[] = {problem_of(FA_DTYPE_BF16, 1, 1048576, 1, 64),
                                 problem_of(FA_DTYPE_F32, 1, 1048576, 1, 64)};
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) check_large(&problems[i]);
}

/* ---- repeats ------------------------------------------------------------------------------------------ */

static int num_fast, num_fast_that_differ;

/* Whether another run of the pass, into again, leaves the same bits; *differs is an output that does not. */
static bool repeats(const host *host, struct host *again, fa_pass pass, int *differs) {
  bool same = true;
  again->problem = host->problem;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&host->problem, pass, id) == FA_ROLE_OUTPUT)
      memset(again->data[id], 0xff, size_of(&host->problem, id));
  host_must_run(again, cuda, pass);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&host->problem, pass, id) == FA_ROLE_OUTPUT &&
        memcmp(again->data[id], host->data[id], size_of(&host->problem, id)) != 0)
      same = false, *differs = id;
  return same;
}

/* Forwards and deterministic backwards must leave the same bits; how many fast ones, of a few, do not is only
 * told. */
static void check_repeats(const fa_problem *problem, int num_reruns) {
  char text[200];
  fa_problem_format(problem, text, sizeof text);
  host host = host_new(problem);
  host_fill(&host);
  host_must_run(&host, cuda, FA_PASS_FORWARD);
  struct host again = host_convert(&host, problem->dtype);
  for (int rerun = 0, differs = 0; rerun < num_reruns; rerun += 10)
    CHECK(repeats(&host, &again, FA_PASS_FORWARD, &differs), "%s: %s differs in a forward's rerun", text,
          fa_tensor_name(differs));
  for (host.problem.deterministic = 0; host.problem.deterministic <= 1; host.problem.deterministic++) {
    host_must_run(&host, cuda, FA_PASS_BACKWARD);
    const int reruns = host.problem.deterministic || num_reruns < 4 ? num_reruns : 4;
    for (int rerun = 0, differs = 0; rerun < reruns; rerun++) {
      const bool same = repeats(&host, &again, FA_PASS_BACKWARD, &differs);
      if (host.problem.deterministic) {
        CHECK(same, "%s: %s differs in a deterministic rerun", text, fa_tensor_name(differs));
      } else {
        num_fast++;
        num_fast_that_differ += !same;
      }
    }
  }
  host_free(&again);
  host_free(&host);
}

static void test_repeats_of_table(void) {
  size_t num_cases;
  const fa_case *cases = fa_cases(&num_cases);
  for (size_t i = 0; i < num_cases; i++)
    for (size_t j = 0; cases[i].tags & CASE_QUICK && j < NUM_DTYPES; j++) {
      fa_problem problem = cases[i].problem;
      fa_plan plan;
      problem.dtype = dtypes[j];
      if (fa_plan_init(&plan, &problem, FA_PASS_BACKWARD, cuda, NULL) == FA_STATUS_UNSUPPORTED)
        num_skipped++;
      else
        check_repeats(&problem, 1);
    }
}

/* Many of each kernel that Hopper has of its own, where the order of additions is the hardest to keep. */
static void test_repeats_often(void) {
  static const struct {
    fa_dtype dtype;
    int64_t head_dim;
    int num_reruns;
  } kernels[] = {{FA_DTYPE_BF16, 64, 1000},
                 {FA_DTYPE_BF16, 128, 1000},
                 {FA_DTYPE_BF16, 256, 200},
                 {FA_DTYPE_F32, 64, 200},
                 {FA_DTYPE_F32, 128, 200}};
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
    fa_problem problem = problem_of(kernels[i].dtype, 2, 1027, 16, kernels[i].head_dim);
    problem.window_right = 0;
    check_repeats(&problem, kernels[i].num_reruns);
  }
}

/* At head_dim 64 more blocks wait for their turn at dq than a GPU runs at once. */
static void test_repeats_of_long(void) {
  static const struct { int64_t seqlen, head_dim; } sizes[] = {{65537, 64}, {4099, 128}, {2051, 256}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (size_t j = 0; j < NUM_DTYPES; j++)
      for (int causal = 0; causal <= 1; causal++) {
        fa_problem problem = problem_of(dtypes[j], 1, sizes[i].seqlen, 2, sizes[i].head_dim);
        problem.num_kv_heads = 1;
        problem.num_sinks = 2;
        problem.window_right = causal ? 0 : FA_UNBOUNDED;
        check_repeats(&problem, 4);
      }
  printf("of %d reruns of fast backwards %d differ\n", num_fast, num_fast_that_differ);
}

/* ---- bands ---------------------------------------------------------------------------------------------- */

static void check_near(const host *x, const host *y, int id, double most) {
  double largest = 0;
  for (int64_t i = values_count(&x->problem, id) - 1; i >= 0; i--) {
    const double difference = fabs(get(x, id, i) - get(y, id, i));
    if (!(difference <= largest)) largest = difference; /* a NaN too */
  }
  CHECK(largest <= most, "%s of packed sequences is %.3g from that of a batch", fa_tensor_name(id), largest);
}

/* More row blocks and column blocks than the plan kernel has room for in shared memory, with sequences that
 * straddle them: the same numbers lie in a batch that has a sequence each. */
static void test_long_plan(void) {
  enum { COUNT = 601, SEQLEN = 509 };
  fa_problem packed = problem_of(FA_DTYPE_F32, 1, COUNT * SEQLEN, 1, 8),
             batch = problem_of(FA_DTYPE_F32, COUNT, SEQLEN, 1, 8);
  packed.bands_batch = 1, packed.num_bands = COUNT;
  host x = host_new(&packed), y = host_new(&batch);
  host_fill(&x);
  host_fill_bands(&x);
  const fa_tensor_id inputs[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    memcpy(y.data[inputs[i]], x.data[inputs[i]], size_of(&batch, inputs[i]));
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    fa_plan plan;
    if (fa_plan_init(&plan, &packed, pass, cuda, NULL) == FA_STATUS_UNSUPPORTED) {
      num_skipped++;
      continue;
    }
    host_must_run(&x, cuda, pass);
    host_must_run(&y, cuda, pass);
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (fa_tensor_role_in(&packed, pass, id) == FA_ROLE_OUTPUT) check_near(&x, &y, id, 2e-5);
  }
  host_free(&x);
  host_free(&y);
}

/* ---- places, and whose turn it is ----------------------------------------------------------------------- */

static void test_places(void) {
  fa_error error;
  void *device, *pinned, *host = malloc(1000);
  must(fa_device_alloc(cuda, 1000, &device, &error), &error);
  must(fa_host_alloc(cuda, 1000, &pinned, &error), &error);
  CHECK(fa_memory_locate(cuda, device, 1000) == FA_PLACE_DEVICE, "the device's memory");
  CHECK(fa_memory_locate(cuda, pinned, 1000) == FA_PLACE_PINNED, "pinned memory");
  CHECK(fa_memory_locate(cuda, (char *)pinned + 13, 7) == FA_PLACE_PINNED, "a part of pinned memory");
  CHECK(fa_memory_locate(cuda, host, 1000) == FA_PLACE_HOST, "ordinary memory");
  CHECK(fa_memory_locate(cuda, pinned, (size_t)1 << 40) == FA_PLACE_HOST, "more than pinned memory");
  CHECK(fa_memory_locate(cuda, (void *)64, 1000) == FA_PLACE_HOST, "nobody's memory");
  CHECK(fa_device_free(cuda, host, &error) == FA_STATUS_INVALID_ARGUMENT,
        "what was not allocated is not freed");
  fa_device_free(cuda, device, NULL);
  fa_host_free(cuda, pinned, NULL);
  free(host);
}

/* The driver's own functions, for a stream of somebody else's. */
static struct {
  int (*new_stream)(void **stream, unsigned flags);
  int (*copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
  int (*call_host)(void *stream, void (*function)(void *), void *argument);
} driver;

static bool find_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return false;
  *(void **)&driver.new_stream = dlsym(library, "cuStreamCreate");
  *(void **)&driver.copy = dlsym(library, "cuMemcpyDtoDAsync_v2");
  *(void **)&driver.call_host = dlsym(library, "cuLaunchHostFunc");
  return driver.new_stream && driver.copy && driver.call_host;
}

/* As host_run, on tensors in the device's memory; outputs end up in that of the host. */
static void run_on_device(host *host, fa_pass pass) {
  fa_error error;
  fa_plan plan;
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!fa_tensor_role_in(&host->problem, pass, id)) continue;
    void *memory;
    must(fa_device_alloc(cuda, size_of(&host->problem, id), &memory, &error), &error);
    must(fa_device_copy(cuda, memory, host->data[id], size_of(&host->problem, id), NULL, &error), &error);
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&host->problem, id, memory);
  }
  must(fa_plan_init(&plan, &host->problem, pass, cuda, &error), &error);
  must(fa_run_anywhere(&plan, &tensors, NULL, NULL, &error), &error);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    void *memory = fa_tensor_at(&tensors, id)->data;
    if (!memory) continue;
    must(fa_device_copy(cuda, host->data[id], memory, size_of(&host->problem, id), NULL, &error), &error);
    fa_device_free(cuda, memory, NULL);
  }
}

/* Of all elements' norm. */
static double relative_error(const host *x, const host *expected, int id) {
  double error = 0, norm = 0;
  for (int64_t i = values_count(&expected->problem, id) - 1; i >= 0; i--) {
    const double wanted = get(expected, id, i), difference = get(x, id, i) - wanted;
    error += difference * difference, norm += wanted * wanted;
  }
  return sqrt(error / norm);
}

/* f32 at FA_PRECISION_DEFAULT, rounded before it crosses the bus or after: the same forward to the bit, as the
 * rows of a head do not differ by more than f16's exponents, and gradients of a dout that was rounded. */
static void test_rounded_on_the_way(void) {
  fa_problem problem = problem_of(FA_DTYPE_F32, 2, 2053, 16, 72);
  problem.num_kv_heads = 4, problem.window_right = 0;
  problem.precision = FA_PRECISION_DEFAULT, problem.deterministic = 1;
  host here = host_new(&problem), there = host_new(&problem);
  host_fill(&here);
  for (int id = FA_TENSOR_Q; id <= FA_TENSOR_V; id++)
    for (int64_t i = values_count(&problem, id) - 1; i >= 0; i--)
      set(&here, id, i, ldexp(get(&here, id, i), (int)(i / problem.head_dim % 7) - 4));
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (here.data[id]) memcpy(there.data[id], here.data[id], size_of(&problem, id));
  for (int pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
    host_must_run(&here, cuda, (fa_pass)pass);
    run_on_device(&there, (fa_pass)pass);
  }
  for (int id = FA_TENSOR_O; id <= FA_TENSOR_LSE; id++)
    CHECK(memcmp(here.data[id], there.data[id], size_of(&problem, id)) == 0,
          "%s of ordinary memory differs from that of the device's", fa_tensor_name(id));
  const int gradients[] = {FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV};
  for (int i = 0; i < 3; i++) {
    const double error = relative_error(&here, &there, gradients[i]);
    CHECK(error < 1e-3, "%s of ordinary memory differs by %g", fa_tensor_name(gradients[i]), error);
  }
  host_free(&here);
  host_free(&there);
}

static void take_a_while(void *unused) {
  (void)unused;
  nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
}

/* A stream writes q, later; the call must read it then. The stream is one of the caller's or the default one.
 */
static void check_order(void *stream) {
  fa_error error;
  const fa_problem problem = problem_of(FA_DTYPE_F32, 1, 67, 2, 24);
  const size_t bytes = size_of(&problem, FA_TENSOR_Q);
  host host = host_new(&problem);
  void *early, *q;
  host_fill(&host);
  host_must_run(&host, cuda, FA_PASS_FORWARD);
  unsigned char *o = malloc(bytes);
  must(fa_device_alloc(cuda, bytes, &early, &error), &error);
  must(fa_device_alloc(cuda, bytes, &q, &error), &error);
  must(fa_device_copy(cuda, early, host.data[FA_TENSOR_Q], bytes, NULL, &error), &error);
  must(fa_device_copy(cuda, q, host.data[FA_TENSOR_K], bytes, NULL, &error), &error);

  fa_plan plan;
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&problem, id, host.data[id]);
  tensors.q.data = q;
  tensors.o.data = o;
  must(fa_plan_init(&plan, &problem, FA_PASS_FORWARD, cuda, &error), &error);
  driver.call_host(stream, take_a_while, NULL);
  driver.copy((uintptr_t)q, (uintptr_t)early, bytes, stream);
  must(fa_run_anywhere(&plan, &tensors, &(fa_placement){.stream = stream}, NULL, &error), &error);
  CHECK(memcmp(o, host.data[FA_TENSOR_O], bytes) == 0, "the call did not wait for the caller's stream");
  fa_device_free(cuda, early, NULL);
  fa_device_free(cuda, q, NULL);
  free(o);
  host_free(&host);
}

static void test_order(void) {
  void *stream;
  const unsigned independent_of_default = 1;
  if (!find_driver() || driver.new_stream(&stream, independent_of_default)) {
    printf("skipped: the order of streams, without the driver's library\n");
    num_skipped++;
    return;
  }
  check_order(stream);
  check_order(NULL);
}

/* ---- errors ------------------------------------------------------------------------------------------- */

static bool works(void) {
  fa_problem problem = problem_of(FA_DTYPE_F16, 1, 67, 1, 24);
  fa_error error;
  host host = host_new(&problem);
  host_fill(&host);
  const bool worked = host_run(&host, cuda, FA_PASS_FORWARD, &error) == FA_STATUS_OK;
  host_free(&host);
  return worked;
}

static void test_out_of_memory(void) {
  fa_error error;
  fa_device_info info;
  void *memory;
  must(fa_device_get_info(cuda, &info, &error), &error);
  fa_status status = fa_device_alloc(cuda, (size_t)info.memory_bytes * 2, &memory, &error);
  CHECK(status == FA_STATUS_OUT_OF_MEMORY && !memory, "%s: %s", fa_status_name(status), error.message);
  char expected[96];
  snprintf(expected, sizeof expected, "device: expected %zu bytes of the GPU's memory, got ",
           (size_t)info.memory_bytes * 2);
  CHECK(strstr(error.message, expected) && strstr(error.message, " free of "), "%s", error.message);
  CHECK(works(), "the call after a failed allocation");

  /* No host tensor is looked at before the device has memory for it. */
  host host = {.problem = problem_of(FA_DTYPE_BF16, 1, 1 << 20, 1 << 14, 128)};
  for (int id = 0; id < FA_NUM_TENSORS; id++) host.data[id] = (unsigned char *)64;
  status = host_run(&host, cuda, FA_PASS_FORWARD, &error);
  CHECK(status == FA_STATUS_OUT_OF_MEMORY, "%s: %s", fa_status_name(status), error.message);
  CHECK(works(), "the call after one that found no memory");
}

/* A kernel that does not take bands, or what acts on scores, is passed over for the next one, which does. */
static void test_needs(void) {
  for (size_t i = 0; i < NUM_DTYPES; i++)
    for (int64_t head_dim = 40; head_dim <= 256; head_dim += 72) {
      fa_problem problem = problem_of(dtypes[i], 1, 67, 1, head_dim);
      const fa_plan plain = plan_of(&problem, FA_PASS_FORWARD);
      problem.bias_batch = problem.bias_heads = problem.bias_rows = 1;
      const fa_plan biased = plan_of(&problem, FA_PASS_FORWARD);
      CHECK(strcmp(plain.kernel, biased.kernel) != 0, "%s with a bias too", plain.kernel);
      problem.bias_batch = problem.bias_heads = problem.bias_rows = 0;
      problem.bands_batch = 1;
      for (problem.num_bands = 1; problem.num_bands <= 2; problem.num_bands++) {
        const fa_plan banded = plan_of(&problem, FA_PASS_FORWARD);
        const size_t length = strlen(plain.kernel);
        CHECK(strncmp(plain.kernel, banded.kernel, length) == 0 &&
                  strcmp(banded.kernel + length, "/general") == 0,
              "%s without bands, %s with them", plain.kernel, banded.kernel);
      }
    }
}

/* Four scores 8 rows and columns apart share a draw, so a part of a problem begins between two such sets. */
static void test_origins(void) {
  fa_error error;
  fa_plan plan;
  fa_problem problem = problem_of(FA_DTYPE_BF16, 1, 67, 1, 64);
  problem.num_seed_words = 2, problem.dropout = 0.1, problem.origin.row = 48;
  must(fa_plan_init(&plan, &problem, FA_PASS_FORWARD, cuda, &error), &error);
  problem.origin.row = 40;
  CHECK(fa_plan_init(&plan, &problem, FA_PASS_FORWARD, cuda, &error) == FA_STATUS_UNSUPPORTED,
        "rows from 40 on, with dropout");
  CHECK_TEXT(error.message, "origin: expected a multiple of 16 rows where there is dropout on CUDA, got 40");
}

static void refuse(fa_problem problem, const char *message) {
  fa_error error;
  fa_plan plan;
  CHECK(fa_plan_init(&plan, &problem, FA_PASS_FORWARD, cuda, &error) == FA_STATUS_UNSUPPORTED,
        "a plan for \"%s\"", message);
  CHECK_TEXT(error.message, message);
}

/* What a run could not launch, or would count wrong in 32 bits, is refused when it is planned. */
static void test_limits(void) {
  fa_problem p = problem_of(FA_DTYPE_BF16, 65536, 1, 1, 64);
  p.num_row_sinks = 1;
  refuse(p, "batch: expected at most 65535 in a merge on CUDA, got 65536");
  p.batch = 1, p.seqlen_q = 1 << 20, p.num_heads = p.num_kv_heads = 32, p.num_row_sinks = 32;
  refuse(p, "o: expected fewer than 2^30 rows of heads, and sinks of them, on CUDA, got more");
  p.seqlen_q = 1 << 25, p.num_row_sinks = 1;
  refuse(p, "o: expected fewer than 2^30 rows of heads, and sinks of them, on CUDA, got more");
  p = problem_of(FA_DTYPE_BF16, 1, 1, 1, 64);
  p.seqlen_k = 64, p.page_size = 16, p.max_pages = 4, p.num_pages = INT64_C(1) << 31;
  refuse(p, "num_pages: expected below 2^31 on CUDA, got 2147483648");
  p.num_pages = 4, p.seqlen_q = 512, p.num_heads = 1 << 22, p.num_kv_heads = 1;
  refuse(p, "seqlen_q: expected fewer than 2^30 rows of all heads of a KV head on CUDA, got 2147483648");
}

static void test_no_such_device(void) {
  fa_error error;
  fa_plan plan;
  char expected[64];
  const int32_t count = fa_num_devices(FA_DEVICE_CUDA, NULL);
  const fa_problem problem = problem_of(FA_DTYPE_F16, 1, 5, 1, 8);
  snprintf(expected, sizeof expected, "device: expected a cuda device from 0 to %d, got %d", count - 1, count);
  fa_status status = fa_plan_init(&plan, &problem, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CUDA, count}, &error);
  CHECK(status == FA_STATUS_NO_DEVICE, "%s", fa_status_name(status));
  CHECK_TEXT(error.message, expected);
}

/* The process keeps no use of the GPU after this. */
static void test_dead_device(void) {
  fa_error error;
  device_memory memory;
  const fa_problem problem = problem_of(FA_DTYPE_F16, 1, 67, 1, 24);
  if (!device_place(&memory, &problem, &error)) must(error.status, &error);
  memory.tensors.q.data = (void *)64;
  fa_status status = device_run(&memory, FA_PASS_FORWARD, &error);
  CHECK(status == FA_STATUS_DEVICE_ERROR, "%s: %s", fa_status_name(status), error.message);
  CHECK(strstr(error.message, "cudaStreamSynchronize: ") && strstr(error.message, "(cudaErrorIllegalAddress)"),
        "%s", error.message);
  host host = host_new(&problem);
  status = host_run(&host, cuda, FA_PASS_FORWARD, &error);
  CHECK(status == FA_STATUS_DEVICE_ERROR, "%s: %s", fa_status_name(status), error.message);
  status = host_run(&host, (fa_device){FA_DEVICE_CPU, 0}, FA_PASS_FORWARD, &error);
  CHECK(status == FA_STATUS_OK, "the CPU after the GPU's end: %s", error.message);
  host_free(&host);
}

/* Column blocks that leave most of a GPU idle are shared out by general kernels for Hopper; those that fill it
 * are not, nor those that few rows see. A single column block that all rows see has a kernel of its own. */
static void test_few_keys(void) {
  fa_problem few_keys = problem_of(FA_DTYPE_BF16, 1, 4096, 1, 64);
  few_keys.seqlen_k = 100, few_keys.window_right = 3900; /* from row 96 on */
  fa_problem many_blocks = few_keys, few_rows = few_keys, hidden_rows = few_keys, single = few_keys;
  many_blocks.num_heads = many_blocks.num_kv_heads = 1 << 14;
  few_rows.seqlen_q = 200, few_rows.window_right = 50;
  hidden_rows.window_right = 0;
  single.window_right = FA_UNBOUNDED;
  const fa_problem *const problems[] = {&few_keys, &many_blocks, &few_rows, &hidden_rows, &single};
  for (int i = 0; i < (int)(sizeof problems / sizeof *problems); i++) {
    const fa_plan plan = plan_of(problems[i], FA_PASS_BACKWARD);
    if (!strstr(plan.kernel, "sm90")) continue;
    CHECK((strstr(plan.kernel, "/general") != NULL) == (i == 0), "problem %d: %s", i, plan.kernel);
    CHECK((strstr(plan.kernel, "/single") != NULL) == (i == 4), "problem %d: %s", i, plan.kernel);
  }
}

/* On Hopper forwards of up to 64 columns of head_dim go through visits where rows see many keys and there is
 * much to do; backwards do not. */
static void test_long(void) {
  fa_problem is_long = problem_of(FA_DTYPE_BF16, 1, 2048, 64, 64);
  is_long.window_right = FA_UNBOUNDED;
  fa_problem causal = is_long, window = is_long, few_heads = is_long, wide = is_long;
  causal.window_right = 0, window.window_left = 900, few_heads.num_heads = few_heads.num_kv_heads = 63;
  wide.head_dim = 72;
  const fa_problem *const problems[] = {&is_long, &causal, &window, &few_heads, &wide};
  for (int i = 0; i < (int)(sizeof problems / sizeof *problems); i++)
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
      const fa_plan plan = plan_of(problems[i], pass);
      if (!strstr(plan.kernel, "sm90")) continue;
      CHECK((strstr(plan.kernel, "/long/general") != NULL) == (pass == FA_PASS_FORWARD && i == 0),
            "problem %d: %s", i, plan.kernel);
    }
}

/* Kernels for Hopper without code for other forms of scores leave these to others, which plain problems do not
 * get. */
static void test_forms(void) {
  fa_problem plain = problem_of(FA_DTYPE_BF16, 1, 2048, 64, 128);
  plain.scale = 2e-30;
  fa_problem negative = plain, near_zero = plain, capped = plain;
  negative.scale = -1, near_zero.scale = 1e-31, capped.softcap = 30;
  const fa_problem *const problems[] = {&plain, &negative, &near_zero, &capped};
  for (int i = 0; i < (int)(sizeof problems / sizeof *problems); i++)
    for (int bands = 0; bands < 2; bands++)
      for (int pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
        fa_problem problem = *problems[i];
        problem.num_bands = bands, problem.bands_batch = bands;
        const fa_plan plan = plan_of(&problem, (fa_pass)pass);
        if (strstr(plan.kernel, "sm90"))
          CHECK((strstr(plan.kernel, "/forms") != NULL) == (i > 0), "problem %d, %d bands: %s", i, bands,
                plan.kernel);
      }
}

/* On Hopper a backward of up to 64 columns has a kernel whose blocks share the query heads of a column block:
 * for few key heads, where a window makes column blocks differ, but not with bands. Where steps are shared,
 * too, the head dimension's own kernel does it. */
static void test_shared_heads(void) {
  fa_problem few = problem_of(FA_DTYPE_BF16, 1, 1024, 16, 64);
  few.num_kv_heads = 1;
  fa_problem window = few, full = few, many = few, bands = few,
             steps = problem_of(FA_DTYPE_BF16, 1, 2048, 16, 64);
  window.window_left = 900, full.window_right = FA_UNBOUNDED, many.num_kv_heads = 16;
  bands.num_bands = bands.bands_batch = 1, steps.num_kv_heads = 8;
  const fa_problem *const problems[] = {&few, &window, &full, &many, &bands, &steps};
  for (int i = 0; i < (int)(sizeof problems / sizeof *problems); i++) {
    const fa_plan plan = plan_of(problems[i], FA_PASS_BACKWARD);
    if (!strstr(plan.kernel, "sm90")) continue;
    CHECK(strstr(plan.kernel, "/d64"), "problem %d: %s", i, plan.kernel);
    CHECK((strstr(plan.kernel, "/d64/forms") != NULL) == (i < 2), "problem %d: %s", i, plan.kernel);
  }
}

/* On Hopper a backward with slopes that nobody differentiates by has a kernel of its own where no row sees
 * columns behind its place. */
static void test_causal_slopes(void) {
  fa_problem causal = problem_of(FA_DTYPE_BF16, 1, 1024, 16, 128);
  causal.alibi_batch = 1, causal.constant_alibi_slopes = 1;
  fa_problem window = causal, ahead = causal, full = causal, differentiated = causal, bands = causal;
  window.window_left = 300, ahead.window_right = 1, full.window_right = FA_UNBOUNDED;
  differentiated.constant_alibi_slopes = 0, bands.num_bands = bands.bands_batch = 1;
  const fa_problem *const problems[] = {&causal, &window, &ahead, &full, &differentiated, &bands};
  for (int i = 0; i < (int)(sizeof problems / sizeof *problems); i++) {
    const fa_plan plan = plan_of(problems[i], FA_PASS_BACKWARD);
    if (strstr(plan.kernel, "sm90"))
      CHECK((strstr(plan.kernel, "/slopes/causal") != NULL) == (i < 2), "problem %d: %s", i, plan.kernel);
  }
}

/* More row and column blocks than twice the multiprocessors of any GPU that we know, each of few of the other
 * side: statistics are made while the backward runs, and f32 is copied while either pass does, again and again;
 * of heads that share keys, where those that are begun at first are few of all. An emulated GPU has few
 * multiprocessors. */
static void test_beside(void) {
  enum { BANDS = 4, CAUSAL = 8, SHARED_KEYS = 16 };
  const int variants[] = {CAUSAL, BANDS, BANDS | CAUSAL, SHARED_KEYS};
  const struct {
    fa_dtype dtype;
    fa_precision precision;
    double most; /* relative error */
  } types[] = {{FA_DTYPE_BF16, FA_PRECISION_HIGHEST, 0.01},
               {FA_DTYPE_F16, FA_PRECISION_HIGHEST, 0.01},
               {FA_DTYPE_F32, FA_PRECISION_HIGHEST, 5e-6},
               {FA_DTYPE_F32, FA_PRECISION_DEFAULT, 0.003}};
  const bool emulated = getenv("EMULATED_SM");
  for (int i = 0; i < 24; i++) {
    const int variant = variants[i / 6], type = i % 6 < 4 ? i % 2 : i % 6 - 2;
    const bool is_long = variant == (BANDS | CAUSAL), shares = variant & SHARED_KEYS, is_f32 = type >= 2,
               is_wide = is_f32 ? (type + i / 6) % 2 : i % 6 / 2;
    const int64_t heads = emulated  ? (shares   ? 48
                                       : is_f32 ? 8
                                                : 4)
                          : is_long ? 90
                          : is_f32  ? 270
                          : shares  ? 100
                                    : 200;
    const int64_t seqlen = is_long ? 700 : 200; /* of which not all rows are counted together, or all */
    fa_problem problem = problem_of(types[type].dtype, 1, seqlen, heads, is_wide ? 72 : 64);
    problem.precision = types[type].precision;
    if (shares) problem.num_kv_heads /= 2, problem.seqlen_k = 700;
    if (variant & BANDS) problem.num_bands = 3, problem.bands_batch = 1;
    if (!(variant & CAUSAL)) problem.window_right = FA_UNBOUNDED;
    host x = host_new(&problem), y = host_new(&problem);
    host_fill(&x);
    if (variant & BANDS) host_fill_bands(&x);
    host_must_run(&x, cpu, FA_PASS_FORWARD);
    host_copy(&y, &x);
    host_must_run(&y, cpu, FA_PASS_BACKWARD);
    device_memory memory; /* not in slices */
    fa_error error;
    if (!device_place(&memory, &problem, &error)) must(FA_STATUS_OUT_OF_MEMORY, &error);
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id) == FA_ROLE_INPUT)
        must(fa_device_copy(cuda, fa_tensor_at(&memory.tensors, id)->data, x.data[id], size_of(&problem, id),
                            NULL, &error),
             &error);
    for (int again = 0; again < 4; again++) {
      const fa_pass pass = is_f32 && again % 2 == 0 ? FA_PASS_FORWARD : FA_PASS_BACKWARD;
      must(device_run(&memory, pass, &error), &error);
      for (int id = 0; id < FA_NUM_TENSORS; id++) {
        if (fa_tensor_role_in(&problem, pass, id) != FA_ROLE_OUTPUT || id == FA_TENSOR_LSE) continue;
        must(fa_device_copy(cuda, x.data[id], fa_tensor_at(&memory.tensors, id)->data, size_of(&problem, id),
                            NULL, &error),
             &error);
        CHECK(relative_error(&x, &y, id) < types[type].most, "%d, %s: %.3g from the CPU's", i,
              fa_tensor_name(id), relative_error(&x, &y, id));
      }
    }
    device_release(&memory);
    host_free(&x);
    host_free(&y);
  }
}

/* Batches that end early, of so many heads that few of each are begun together: row blocks that see nothing,
 * and in the backward column blocks that nobody sees, are left out, and written all the same. */
static void test_rows_unseen(void) {
  if (getenv("EMULATED_SM")) {
    printf("skipped: rows that see nothing, of many heads: too many for an emulated GPU\n");
    num_skipped++;
    return;
  }
  const int64_t lengths[] = {400, 1200, 0, 70};
  for (int i = 0; i < 4; i++) {
    fa_problem problem = problem_of(i % 2 ? FA_DTYPE_F16 : FA_DTYPE_BF16, 4, 1200, 64, i & 2 ? 128 : 64);
    problem.num_bands = 1, problem.bands_batch = 4;
    if (i == 3) problem.window_right = FA_UNBOUNDED;
    host x = host_new(&problem), y = host_new(&problem);
    host_fill(&x);
    for (int64_t batch = 0; batch < problem.batch; batch++) {
      const int64_t band[6] = {0, lengths[batch], 0, lengths[batch], INT32_MAX, INT32_MAX};
      set_band(&x, batch, band);
    }
    host_copy(&y, &x);
    run_on_device(&x, FA_PASS_FORWARD);
    host_must_run(&y, cpu, FA_PASS_FORWARD);
    CHECK(relative_error(&x, &y, FA_TENSOR_O) < 0.01, "%d: o is %.3g from the CPU's", i,
          relative_error(&x, &y, FA_TENSOR_O));
    int64_t num_wrong = 0;
    for (int64_t row = values_count(&problem, FA_TENSOR_LSE) - 1; row >= 0; row--) {
      const double own = get(&x, FA_TENSOR_LSE, row), other = get(&y, FA_TENSOR_LSE, row);
      num_wrong += !(own == other || fabs(own - other) < 1e-4 * (1 + fabs(other)));
    }
    CHECK(num_wrong == 0, "%d: lse of %lld rows is not the CPU's", i, (long long)num_wrong);
    for (int id = FA_TENSOR_DQ; id <= FA_TENSOR_DV; id++) memset(x.data[id], 0x3c, size_of(&problem, id));
    run_on_device(&x, FA_PASS_BACKWARD);
    host_must_run(&y, cpu, FA_PASS_BACKWARD);
    for (int id = FA_TENSOR_DQ; id <= FA_TENSOR_DV; id++)
      CHECK(relative_error(&x, &y, id) < 0.01, "%d: %s is %.3g from the CPU's", i, fa_tensor_name(id),
            relative_error(&x, &y, id));
    host_free(&x);
    host_free(&y);
  }
}

/* ---- masks that hide nothing ----------------------------------------------------------------------------- */

/* How a problem is masked: by a band a batch, by lengths, by a mask of keys or of scores. */
enum { BAND_A_BATCH, LENGTHS, MASK_OF_KEYS, MASK_OF_SCORES, NUM_MASKS };

/* Shows each batch as many keys as it says; by bands of as many rows, too; of scores one in seven less, so that
 * no block of them is hidden but for those of keys that are. */
static void fill_mask(host *x, int mask, const int64_t *lengths) {
  const fa_problem *p = &x->problem;
  for (int64_t batch = 0; batch < p->batch; batch++) {
    const int64_t length = lengths[batch], band[6] = {0, length, 0, length, INT32_MAX, INT32_MAX};
    if (mask == BAND_A_BATCH) set_band(x, batch, band);
    if (mask == LENGTHS) set(x, FA_TENSOR_KEY_LENGTHS, batch, (double)length);
    for (int64_t key = 0; mask == MASK_OF_KEYS && key < p->seqlen_k; key++)
      set(x, FA_TENSOR_BIAS, batch * p->seqlen_k + key, key < length);
    for (int64_t i = 0; mask == MASK_OF_SCORES && i < p->seqlen_q * p->seqlen_k; i++)
      set(x, FA_TENSOR_BIAS, batch * p->seqlen_q * p->seqlen_k + i, i % p->seqlen_k < length && i % 7 != batch);
  }
}

static void compare_with_cpu(host *x, fa_pass pass, const char *what) {
  host y = host_new(&x->problem);
  host_copy(&y, x);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&x->problem, pass, id) == FA_ROLE_OUTPUT)
      memset(x->data[id], 0x3c, size_of(&x->problem, id));
  run_on_device(x, pass);
  host_must_run(&y, cpu, pass);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&x->problem, pass, id) == FA_ROLE_OUTPUT && id != FA_TENSOR_LSE)
      CHECK(relative_error(x, &y, id) < 0.01, "%s: %s is %.3g from the CPU's", what, fa_tensor_name(id),
            relative_error(x, &y, id));
  host_free(&y);
}

/* Where a mask shows everything, kernels that ask do what the problem without it does, bit for bit; others, and
 * all where it hides something, what the CPU does. Those of scores ask whether a block is hidden whole. */
static void test_masks_that_hide_nothing(void) {
  const int64_t seqlen = 300;
  for (int i = 0; i < 4 * NUM_MASKS; i++) {
    const int mask = i % NUM_MASKS, wide = i / NUM_MASKS % 2, causal = (mask + wide) % 2;
    const int64_t batch = 1 + i / NUM_MASKS / 2;
    fa_problem bare = problem_of(i % 2 ? FA_DTYPE_BF16 : FA_DTYPE_F16, batch, seqlen, 2, wide ? 128 : 64);
    bare.deterministic = 1;
    if (!causal) bare.window_right = FA_UNBOUNDED;
    fa_problem problem = bare;
    if (mask == BAND_A_BATCH) problem.num_bands = 1, problem.bands_batch = problem.batch;
    if (mask == LENGTHS) problem.lengths_batch = problem.batch;
    if (mask == MASK_OF_KEYS || mask == MASK_OF_SCORES)
      problem.bias_batch = problem.batch, problem.bias_heads = 1, problem.bias_dtype = FA_DTYPE_U8,
      problem.bias_rows = mask == MASK_OF_KEYS ? 1 : seqlen;
    char what[80];
    snprintf(what, sizeof what, "mask %d, head_dim %d, %s", mask, (int)bare.head_dim,
             causal ? "causal" : "full");
    host x = host_new(&problem), y = host_new(&bare);
    host_fill(&y);
    host_copy(&x, &y);
    for (int64_t length = seqlen; length > 0; length -= 163) {
      fill_mask(&x, mask, batch == 1 ? (int64_t[]){length} : (int64_t[]){seqlen, length});
      compare_with_cpu(&x, FA_PASS_FORWARD, what);
      compare_with_cpu(&x, FA_PASS_BACKWARD, what);
    }
    fill_mask(&x, mask, (int64_t[]){seqlen, seqlen});
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
      const bool asks = wide && (mask == BAND_A_BATCH || mask == LENGTHS);
      const char *kernel = plan_of(&problem, pass).kernel;
      if (!strstr(kernel, "sm90")) continue;
      host_copy(&x, &y); /* of a backward o and lse, too */
      run_on_device(&y, pass);
      if (!asks || strstr(plan_of(&bare, pass).kernel, "general")) continue; /* in parts */
      run_on_device(&x, pass);
      for (int id = 0; id < FA_NUM_TENSORS; id++)
        if (fa_tensor_role_in(&bare, pass, id) == FA_ROLE_OUTPUT)
          CHECK(memcmp(x.data[id], y.data[id], size_of(&bare, id)) == 0, "%s: %s", what, fa_tensor_name(id));
    }
    host_free(&x);
    host_free(&y);
  }
}

/* Where the only band of each batch is the causal mask, kernels that ask do what the causal problem does, bit
 * for bit; where it is another, or one batch's is, what the CPU does. A band may begin behind a row's place, or
 * end before it, which no window does. */
static void test_bands_that_are_causal(void) {
  const int32_t most = INT32_MAX,
                windows[][2] = {{most, 0}, {most, 45}, {70, 0}, {40, 100}, {3, most}, {most, -2}, {-5, 90}};
  const int64_t seqlens[][2] = {{300, 300}, {130, 395}, {290, 170}};
  for (int i = 0; i < (int)(sizeof windows / sizeof *windows) * 3 * 3; i++) {
    const int32_t *window = windows[i / 9];
    const int64_t *seqlen = seqlens[i / 3 % 3];
    const bool within = i % 3 == 1;        /* the problem's own window is causal */
    const bool differ = i % 3 == 2;        /* the batches' bands do */
    if (within && window[0] < 0) continue; /* which would show nothing */
    fa_problem problem = problem_of(i % 2 ? FA_DTYPE_BF16 : FA_DTYPE_F16, 2, seqlen[0], 2, i % 7 ? 128 : 64);
    problem.seqlen_k = seqlen[1], problem.deterministic = 1;
    if (!within) problem.window_right = FA_UNBOUNDED;
    fa_problem bare = problem;
    bare.window_right = 0, problem.num_bands = 1, problem.bands_batch = 2;
    const bool is_causal = window[0] == most && (window[1] == 0 || (within && window[1] > 0));
    char what[80];
    snprintf(what, sizeof what, "band %d, %d of %d x %d%s", window[0], window[1], (int)seqlen[0],
             (int)seqlen[1],
             within   ? ", causal"
             : differ ? ", then another"
                      : "");
    host x = host_new(&problem), y = host_new(&bare);
    host_fill(&y);
    host_copy(&x, &y);
    for (int64_t batch = 0; batch < 2; batch++) {
      const int32_t less = batch && differ;
      const int64_t band[6] = {0, seqlen[0], 0, seqlen[1], window[0] - less, window[1] - less};
      set_band(&x, batch, band);
    }
    compare_with_cpu(&x, FA_PASS_FORWARD, what);
    compare_with_cpu(&x, FA_PASS_BACKWARD, what);
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
      const char *kernel = plan_of(&problem, pass).kernel;
      run_on_device(&y, pass); /* a backward reads o and lse */
      if (!is_causal || differ || !strstr(kernel, "sm90") || problem.head_dim != 128 ||
          strstr(plan_of(&bare, pass).kernel, "general"))
        continue;
      for (int id = 0; id < FA_NUM_TENSORS; id++)
        if (fa_tensor_role_in(&bare, pass, id) == FA_ROLE_OUTPUT)
          CHECK(memcmp(x.data[id], y.data[id], size_of(&bare, id)) == 0, "%s: %s", what, fa_tensor_name(id));
    }
    host_free(&x);
    host_free(&y);
  }
}

/* ---- keys that are hidden block by block ----------------------------------------------------------------- */

/* Which keys of a row are shown: blocks of 128 of them are hidden whole on the right, on the left, within, all
 * of them in one batch; and some keys of a block, but no block. */
enum { RIGHT, LEFT, WITHIN, ALL_OF_A_BATCH, NO_BLOCK, NUM_PATTERNS };
static bool is_key_shown(int pattern, int64_t batch, int64_t key) {
  switch (pattern) {
    case RIGHT: return key < (batch ? 150 : 390);
    case LEFT: return key >= (batch ? 131 : 384);
    case WITHIN: return key < 100 || (key >= 300 && key < 310) || (key >= 515 && batch);
    case ALL_OF_A_BATCH: return batch == 1 && key % 3;
    default: return key % 7 != 2 * batch;
  }
}

/* What kernels leave out where a mask, or a bias of -inf, hides blocks of keys: each of these, in either pass,
 * in order or not, beside bands, dropout, slopes and what some heads have for themselves. */
static void test_hidden_keys(void) {
  enum {
    WITH_GRADIENT = 1,
    IN_BANDS = 2,
    OF_HEADS = 4,
    SLOPED = 8,
    IN_ORDER = 16,
    CAUSAL = 32,
    DROPPED = 64,
    WINDOWED = 128,
    LONG = 256 /* where dropout at 64 leaves blocks out, too */
  };
  const int variants[] = {CAUSAL,
                          0,
                          WITH_GRADIENT | CAUSAL | IN_ORDER,
                          IN_BANDS,
                          IN_BANDS | IN_ORDER | WITH_GRADIENT,
                          WITH_GRADIENT | OF_HEADS,
                          SLOPED | IN_ORDER | CAUSAL,
                          IN_ORDER,
                          DROPPED | CAUSAL,
                          DROPPED | IN_ORDER | IN_BANDS,
                          CAUSAL | WINDOWED | IN_ORDER,
                          DROPPED | LONG};
  const int num_variants = sizeof variants / sizeof *variants;
  for (int i = 0; i < NUM_PATTERNS * num_variants * 2; i++) {
    const int pattern = i % NUM_PATTERNS, variant = variants[i / NUM_PATTERNS % num_variants],
              wide = i / NUM_PATTERNS / num_variants;
    if (variant & LONG && wide) continue;
    fa_problem problem = problem_of(dtypes[(i + wide) % NUM_DTYPES], 2, 530, 2, wide ? 128 : 64);
    problem.seqlen_q = variant & CAUSAL ? 530 : 210;
    problem.num_kv_heads = variant & OF_HEADS ? 2 : 1;
    if (!(variant & CAUSAL)) problem.window_right = FA_UNBOUNDED;
    if (variant & WINDOWED) problem.window_left = 140;
    if (variant & LONG) problem.seqlen_q = 1030, problem.seqlen_k = 2070;
    problem.deterministic = (variant & IN_ORDER) != 0;
    problem.bias_batch = 2, problem.bias_heads = variant & OF_HEADS ? 2 : 1, problem.bias_rows = 1;
    problem.bias_dtype = variant & WITH_GRADIENT ? problem.dtype : FA_DTYPE_U8;
    problem.constant_bias = !(variant & WITH_GRADIENT);
    if (variant & IN_BANDS) problem.num_bands = 2, problem.bands_batch = 1;
    if (variant & SLOPED) problem.alibi_batch = 1, problem.constant_alibi_slopes = 1;
    if (variant & DROPPED) problem.num_seed_words = 2, problem.dropout = 0.2;
    char what[80];
    snprintf(what, sizeof what, "pattern %d, variant %d, %s, head_dim %d", pattern, variant,
             fa_dtype_name(problem.dtype), (int)problem.head_dim);
    host x = host_new(&problem);
    host_fill(&x);
    for (int64_t at = 0; at < values_count(&problem, FA_TENSOR_BIAS); at++) {
      const bool shown =
          is_key_shown(pattern, at / problem.seqlen_k / problem.bias_heads, at % problem.seqlen_k);
      set(&x, FA_TENSOR_BIAS, at, !shown && variant & WITH_GRADIENT ? -INFINITY : shown);
    }
    if (variant & IN_BANDS) {
      const int64_t bands[2][6] = {{0, 90, 0, 280, INT32_MAX, INT32_MAX},
                                   {90, 210, 140, 530, INT32_MAX, INT32_MAX}};
      for (int64_t band = 0; band < 2; band++) set_band(&x, band, bands[band]);
    }
    const char *kernel = plan_of(&problem, FA_PASS_BACKWARD).kernel;
    if (variant & LONG && problem.dtype != FA_DTYPE_F32 && strstr(kernel, "sm90"))
      CHECK(strstr(kernel, "/long"), "%s: %s", what, kernel);
    compare_with_cpu(&x, FA_PASS_FORWARD, what);
    compare_with_cpu(&x, FA_PASS_BACKWARD, what);
    host_free(&x);
  }
}

int main(int argc, char **argv) {
  const bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  fa_error error;
  if (fa_num_devices(FA_DEVICE_CUDA, &error) == 0) {
    printf("skipped: %s\n", error.message);
    num_skipped++;
    return report();
  }
  if (argc > 1 && strcmp(argv[1], "--masks") == 0) {
    test_beside();
    test_masks_that_hide_nothing();
    test_bands_that_are_causal();
    test_hidden_keys();
    return report();
  }
  test_no_such_device();
  test_needs();
  test_origins();
  test_limits();
  test_long_plan();
  test_few_keys();
  test_long();
  test_forms();
  test_shared_heads();
  test_causal_slopes();
  test_beside();
  test_rows_unseen();
  test_masks_that_hide_nothing();
  test_bands_that_are_causal();
  test_hidden_keys();
  test_places();
  test_order();
  test_repeats_of_table();
  if (!quick) {
    test_repeats_often();
    test_repeats_of_long();
    test_rounded_on_the_way();
    test_out_of_memory();
    test_elements();
    test_million_rows();
    test_dead_device();
  }
  return report();
}
