/*
 * A device against the oracle: the case table and a random sweep.
 *
 *   --device cpu|cuda|reference   --dtype f32|f64|bf16|f16   --quick   --sweep N   --seed S   --verbose
 *   --name TEXT (of the table, the cases whose name holds it)
 *   --grow N (the sweep alone, of lengths N times as long, and more heads, each case in one mode: for a GPU)
 *   --pages (of the sweep, the forwards of few rows by keys on pages alone)
 *
 * tolerance.h says how near it must come. Reruns, and runs with other numbers of threads, must agree bitwise;
 * on CUDA, where only a deterministic backward promises that, every case also runs deterministically. On the
 * CPU every case runs with each of the processor's instruction sets, or with those that FLASH_ATTENTION_DISABLE
 * leaves.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "harness.h"
#include "tolerance.h"

static struct {
  fa_device device;
  int dtype; /* -1: all */
  bool quick, verbose, pages;
  int64_t sweep, growth;
  uint64_t seed;
  const char *name;
} options = {.dtype = -1, .sweep = -1, .growth = 1, .seed = 1, .name = ""};

#define MORE_THREADS 7

static const fa_device_kind kinds[] = {FA_DEVICE_CPU, FA_DEVICE_CUDA, FA_DEVICE_REFERENCE};

/* The largest error, in tolerances, that any case had. */
static double worst[FA_NUM_FLOATS][FA_NUM_TENSORS];
static bool is_compared[FA_NUM_TENSORS];

/* ---- instruction sets --------------------------------------------------------------------------------- */

/* What FLASH_ATTENTION_DISABLE, read whenever a pass is planned, holds by turns. The oracle takes most of the
 * time: whatever it has computed is compared with the kernels of every instruction set. */
static const char *const disabled[] = {"", "amx", "amx,avx512bf16", "avx512", "avx512,avx2"};
static int num_isas = 1;

static void find_isas(void) {
  if (options.device.kind == FA_DEVICE_CPU && !getenv("FLASH_ATTENTION_DISABLE"))
    num_isas = sizeof disabled / sizeof *disabled;
}

static const char *kernel_of(const fa_problem *problem) {
  fa_plan plan;
  return fa_plan_init(&plan, problem, FA_PASS_FORWARD, options.device, NULL) ? "" : plan.kernel;
}

/* Whether the problem has another kernel then than the one before, which it replaces. */
static bool use_isa(int isa, const fa_problem *problem, const char **kernel) {
  const char *before = *kernel;
  if (num_isas > 1) setenv("FLASH_ATTENTION_DISABLE", disabled[isa], 1);
  *kernel = kernel_of(problem);
  return !before || strcmp(before, *kernel) != 0;
}

/* ---- one case ---------------------------------------------------------------------------------------- */

static char case_text[256];

static void describe(const fa_case *c, const char *kernel) {
  char problem[200];
  fa_problem_format(&c->problem, problem, sizeof problem);
  snprintf(case_text, sizeof case_text, "%s (%s, fill %d, layout %d, %s)", c->name, problem, c->fill, c->layout,
           kernel);
}

static void compare(const fa_case *c, fa_pass pass, const fa_values *values, const fa_tolerance *tolerance) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (fa_tensor_role_in(&c->problem, pass, id) != FA_ROLE_OUTPUT) continue;
    const double share = tolerance_share(tolerance, &c->problem, id, values);
    double *record = &worst[c->problem.dtype][id];
    if (options.verbose && share > *record)
      printf("%s: %s: %.2f tolerances, naive error %.3g\n", case_text, fa_tensor_name(id), share,
             tolerance->naive[id]);
    *record = fmax(*record, share);
    is_compared[id] = true;
    CHECK(share <= 1, "%s: %s: the error is %.3g of what is allowed, naive error %.3g", case_text,
          fa_tensor_name(id), share, tolerance->naive[id]);
  }
}

/* Runs the pass once more; every output must be bitwise what it was. */
static void check_repeats(const fa_case *c, fa_pass pass, fa_trial *trial, int32_t num_threads) {
  char why[512];
  fa_outcome outcome = trial_run(trial, num_threads, why);
  CHECK(outcome == OUTCOME_RAN, "%s: %s: %s", case_text, fa_pass_name(pass), why);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&c->problem, pass, id) == FA_ROLE_OUTPUT)
      CHECK(trial_repeats(trial, id), "%s: %s: a rerun with %d threads differs", case_text, fa_tensor_name(id),
            num_threads);
}

/* Runs the pass, and again with other numbers of threads where it promises the same bits. */
static fa_outcome run_and_repeat(const fa_case *c, fa_pass pass, fa_values *values) {
  const fa_setup setup = {options.device, c->layout, 1};
  const bool repeats =
      pass == FA_PASS_FORWARD || setup.device.kind != FA_DEVICE_CUDA || c->problem.deterministic;
  char why[512];
  fa_trial *trial;
  fa_outcome outcome = trial_new(&trial, &setup, &c->problem, pass, values, why);
  if (outcome == OUTCOME_UNSUPPORTED) return outcome;
  if (outcome == OUTCOME_RAN) outcome = trial_run(trial, 1, why);
  if (outcome == OUTCOME_RAN && repeats) trial_keep(trial);
  if (outcome == OUTCOME_RAN) outcome = trial_read(trial, values, why);
  CHECK(outcome == OUTCOME_RAN, "%s: %s: %s", case_text, fa_pass_name(pass), why);
  for (int32_t num_threads = 1; outcome == OUTCOME_RAN && repeats && num_threads <= 3; num_threads++)
    check_repeats(c, pass, trial, num_threads);
  /* Plans for more threads cut tasks elsewhere. */
  if (outcome == OUTCOME_RAN && setup.device.kind == FA_DEVICE_CPU) {
    outcome = trial_plan(trial, MORE_THREADS, why);
    CHECK(outcome == OUTCOME_RAN, "%s: %s: %s", case_text, fa_pass_name(pass), why);
    if (outcome == OUTCOME_RAN) check_repeats(c, pass, trial, MORE_THREADS);
  }
  trial_free(trial);
  return outcome;
}

/* Both passes with one instruction set, or the forward where no other follows. The oracle computes first where
 * it is known that there is something to compare. */
static void check_passes(const fa_case *c, fa_values *values, fa_tolerance *tolerance, bool *have_tolerance) {
  const fa_pass last = c->problem.inference ? FA_PASS_FORWARD : FA_PASS_BACKWARD;
  for (fa_pass pass = FA_PASS_FORWARD; pass <= last; pass++) {
    const fa_outcome outcome = run_and_repeat(c, pass, values);
    num_skipped += outcome == OUTCOME_UNSUPPORTED;
    if (outcome != OUTCOME_RAN) break;
    if (!*have_tolerance) *tolerance = tolerance_of(c, values);
    *have_tolerance = true;
    compare(c, pass, values, tolerance);
  }
}

static void check_case(const fa_case *c) {
  fa_values values = values_new(&c->problem);
  fa_tolerance tolerance;
  bool have_tolerance = false;
  values_fill(&values, &c->problem, c->problem.dtype, c->fill, options.seed);
  const char *kernel = NULL;
  for (int isa = 0; isa < num_isas; isa++) {
    if (!use_isa(isa, &c->problem, &kernel)) continue;
    describe(c, kernel);
    check_passes(c, &values, &tolerance, &have_tolerance);
  }
  values_free(&values);
  if (have_tolerance) tolerance_free(&tolerance);
}

/* Few rows have other kernels where no backward follows. */
static void check_inference(fa_case c) {
  const char *before = kernel_of(&c.problem);
  c.problem.inference = 1;
  if (strcmp(before, kernel_of(&c.problem)) != 0) check_case(&c);
}

/* f32 that is rounded on its way into products has kernels of its own. */
static void check_rounded(fa_case c) {
  if (!fa_case_may_be_rounded(&c)) return;
  c.problem.precision = FA_PRECISION_DEFAULT;
  check_case(&c);
}

/* A GPU has kernels for aligned tensors and others for all, and a deterministic mode of both. */
static void check_modes(fa_case c) {
  check_case(&c);
  check_inference(c);
  if (options.device.kind != FA_DEVICE_CUDA) return;
  check_rounded(c);
  fa_case aligned = c;
  aligned.layout |= LAYOUT_ALIGNED;
  check_case(&aligned);
  check_inference(aligned);
  if (c.problem.deterministic) return;
  c.problem.deterministic = aligned.problem.deterministic = 1;
  check_case(&c);
  check_case(&aligned);
}

/* Where the oracle takes seconds. */
static void check_one_mode(fa_case c, int64_t index) {
  if (index % 4 > 0) c.layout |= LAYOUT_ALIGNED;
  check_case(&c);
  check_inference(c);
}

/* What lies on pages that no batch has. */
static void spoil_other_pages(const fa_problem *p, fa_values *values) {
  const int64_t count = p->page_size * p->num_kv_heads * p->head_dim;
  bool *is_named = calloc((size_t)p->num_pages, sizeof *is_named);
  if (!is_named) exit(2);
  for (int64_t i = 0; i < p->batch * p->max_pages; i++) {
    const double page = values->data[FA_TENSOR_PAGE_TABLE][i];
    if (page >= 0 && page < (double)p->num_pages) is_named[(int64_t)page] = true;
  }
  for (int64_t i = 0; i < p->num_pages * count; i++)
    if (!is_named[i / count]) values->data[FA_TENSOR_K][i] = values->data[FA_TENSOR_V][i] = NAN;
  free(is_named);
}

/* Keys on pages give what they give in order. */
static void check_pages(const fa_case *c) {
  fa_case in_order = *c;
  in_order.problem = problem_in_order(&c->problem);
  fa_values values = values_new(&c->problem);
  values_fill(&values, &c->problem, c->problem.dtype, c->fill, options.seed);
  fa_values inputs = values_in_order(&c->problem, &values);
  fa_tolerance tolerance = tolerance_of(&in_order, &inputs);
  spoil_other_pages(&c->problem, &values);
  const char *kernel = NULL;
  for (int isa = 0; isa < num_isas; isa++) {
    if (!use_isa(isa, &c->problem, &kernel)) continue;
    describe(c, kernel);
    const fa_outcome outcome = run_and_repeat(c, FA_PASS_FORWARD, &values);
    num_skipped += outcome == OUTCOME_UNSUPPORTED;
    if (outcome == OUTCOME_RAN) compare(c, FA_PASS_FORWARD, &values, &tolerance);
  }
  values_free(&values);
  values_free(&inputs);
  tolerance_free(&tolerance);
}

static void test_table(void) {
  size_t num_cases;
  const fa_case *cases = fa_cases(&num_cases);
  for (size_t i = 0; i < num_cases; i++) {
    if (cases[i].tags & CASE_SPEED || (options.quick && !(cases[i].tags & CASE_QUICK))) continue;
    if (!strstr(cases[i].name, options.name)) continue;
    for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
      if (options.dtype >= 0 && options.dtype != dtype) continue;
      check_modes(fa_case_in(&cases[i], (fa_dtype)dtype));
    }
  }
}

static void test_sweep(void) {
  for (int64_t i = 0; i < options.sweep; i++) {
    fa_case c = fa_case_random(options.seed, (uint64_t)i, options.growth);
    if (options.dtype >= 0 && options.dtype != (int)c.problem.dtype) continue;
    if (!options.pages) {
      if (options.growth == 1)
        check_modes(c);
      else
        check_one_mode(c, i);
    }
    if (!fa_case_put_on_pages(&c, options.seed, (uint64_t)i)) continue;
    if (i % 4 > 0) c.layout |= LAYOUT_ALIGNED;
    check_pages(&c);
  }
}

/* ---- what is not finite ------------------------------------------------------------------------------- */

/* Where the bad number goes: batch 0, this row, key/value head 0 (query head 0), this column. */
enum { BAD_ROW = 40, BAD_COLUMN = 3 };

static int64_t row_begin(const fa_problem *p, fa_tensor_id id, int64_t batch, int64_t row, int64_t head) {
  fa_tensor strides = fa_tensor_contiguous(p, id, NULL);
  return batch * strides.stride_batch + row * strides.stride_row + head * strides.stride_head;
}

/* Whether query row i of head h, in batch 0, sees the bad number. Causal, seqlen_q = seqlen_k. */
static bool sees(const fa_problem *p, fa_tensor_id id, int64_t i, int64_t h) {
  if (id == FA_TENSOR_Q) return h == 0 && i == BAD_ROW;
  return h / (p->num_heads / p->num_kv_heads) == 0 && i >= BAD_ROW;
}

static bool all_finite(const double *row, int64_t head_dim) {
  for (int64_t c = 0; c < head_dim; c++)
    if (!isfinite(row[c])) return false;
  return true;
}

/* o after one bad number in q, k or v: what the definition makes NaN or infinite is so in every row that sees
 * it, an infinite score among others included. No score of another row changes; what a masked column of v holds
 * is test_isolation's. */
static void check_spread(const fa_problem *p, fa_tensor_id id, double bad, const fa_values *clean,
                         const fa_values *dirty, const fa_values *defined) {
  long missed = 0, strayed = 0;
  for (int64_t b = 0; b < p->batch; b++)
    for (int64_t i = 0; i < p->seqlen_q; i++)
      for (int64_t h = 0; h < p->num_heads; h++) {
        const int64_t begin = row_begin(p, FA_TENSOR_O, b, i, h);
        const double *before = clean->data[FA_TENSOR_O] + begin, *after = dirty->data[FA_TENSOR_O] + begin;
        const bool seen = b == 0 && sees(p, id, i, h);
        const bool same_head = b == 0 && h / (p->num_heads / p->num_kv_heads) == 0;
        if (seen && !all_finite(defined->data[FA_TENSOR_O] + begin, p->head_dim))
          missed += all_finite(after, p->head_dim);
        if (!seen && !(same_head && id == FA_TENSOR_V))
          strayed += memcmp(before, after, (size_t)p->head_dim * sizeof *after) != 0;
      }
  CHECK(missed == 0, "%s: %g in %s did not reach %ld rows of o that see it", case_text, bad, fa_tensor_name(id),
        missed);
  CHECK(strayed == 0, "%s: %g in %s changed %ld rows of o that do not see it", case_text, bad,
        fa_tensor_name(id), strayed);
}

/* A batch that holds nothing bad must come out as if the other did not either. */
static void check_other_batch(const fa_problem *p, fa_tensor_id id, double bad, const fa_values *clean,
                              const fa_values *dirty) {
  static const fa_tensor_id gradients[] = {FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV};
  for (size_t i = 0; i < 3; i++) {
    const int64_t half = values_count(p, gradients[i]) / 2;
    CHECK(memcmp(clean->data[gradients[i]] + half, dirty->data[gradients[i]] + half,
                 (size_t)half * sizeof(double)) == 0,
          "%s: %g in batch 0 of %s changed %s of batch 1", case_text, bad, fa_tensor_name(id),
          fa_tensor_name(gradients[i]));
  }
}

/* The oracle's forward of the same inputs. */
static fa_values define_o(const fa_problem *p, const fa_values *inputs) {
  const fa_setup reference = {.device = {FA_DEVICE_REFERENCE, 0}};
  fa_problem exact = *p;
  exact.dtype = FA_DTYPE_F64;
  fa_values defined = values_new(&exact);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(p, FA_PASS_FORWARD, id) == FA_ROLE_INPUT)
      memcpy(defined.data[id], inputs->data[id], (size_t)values_count(p, id) * sizeof(double));
  must_run(&reference, &exact, FA_PASS_FORWARD, &defined);
  return defined;
}

static void check_bad_number(const fa_case *c, fa_tensor_id id, double bad, fa_values *clean, fa_values *dirty,
                             const fa_values *defined) {
  const fa_problem *p = &c->problem;
  const fa_setup setup = {options.device, c->layout, 2};
  char why[512];
  fa_outcome outcome = OUTCOME_RAN;
  for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD && outcome == OUTCOME_RAN; pass++) {
    outcome = run_pass(&setup, p, pass, clean, why);
    if (outcome == OUTCOME_RAN) outcome = run_pass(&setup, p, pass, dirty, why);
  }
  if (outcome == OUTCOME_UNSUPPORTED) {
    num_skipped++;
    return;
  }
  CHECK(outcome == OUTCOME_RAN, "%s: %g in %s: %s", case_text, bad, fa_tensor_name(id), why);
  if (id != FA_TENSOR_DOUT) check_spread(p, id, bad, clean, dirty, defined);
  check_other_batch(p, id, bad, clean, dirty);
}

static void check_not_finite(fa_dtype dtype, fa_tensor_id id, double bad, fa_layout layout) {
  fa_case c = {.name = "not finite", .layout = layout};
  fa_problem_init(&c.problem);
  fa_problem *p = &c.problem;
  p->dtype = dtype;
  p->batch = 2, p->seqlen_q = 130, p->seqlen_k = 130, p->num_heads = 4, p->num_kv_heads = 2, p->head_dim = 24;
  p->window_right = 0, p->deterministic = 1;
  fa_values clean = values_new(p), dirty = values_new(p);
  values_fill(&clean, p, dtype, FILL_NORMAL, options.seed);
  values_fill(&dirty, p, dtype, FILL_NORMAL, options.seed);
  dirty.data[id][row_begin(p, id, 0, BAD_ROW, 0) + BAD_COLUMN] = bad;
  fa_values defined = define_o(p, &dirty);
  const char *kernel = NULL;
  for (int isa = 0; isa < num_isas; isa++) {
    if (!use_isa(isa, p, &kernel)) continue;
    describe(&c, kernel);
    check_bad_number(&c, id, bad, &clean, &dirty, &defined);
  }
  values_free(&clean);
  values_free(&dirty);
  values_free(&defined);
}

static void test_not_finite(void) {
  static const fa_tensor_id ids[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  static const double bads[] = {NAN, INFINITY, -INFINITY};
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
      for (size_t j = 0; j < sizeof bads / sizeof *bads; j++)
        if (options.dtype < 0 || options.dtype == dtype) {
          check_not_finite((fa_dtype)dtype, ids[i], bads[j], LAYOUT_CONTIGUOUS);
          check_not_finite((fa_dtype)dtype, ids[i], bads[j], LAYOUT_ALIGNED);
        }
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static size_t workspace_at(int64_t seqlen, fa_dtype dtype, fa_pass pass) {
  fa_problem problem;
  fa_plan plan;
  fa_error error;
  fa_problem_init(&problem);
  problem.dtype = dtype;
  problem.batch = 1, problem.num_heads = 1, problem.num_kv_heads = 1, problem.head_dim = 64;
  problem.seqlen_q = seqlen, problem.seqlen_k = seqlen;
  fa_status status = fa_plan_init(&plan, &problem, pass, options.device, &error);
  if (status == FA_STATUS_UNSUPPORTED) return 0;
  CHECK(status == FA_STATUS_OK, "%s", error.message);
  return plan.workspace_bytes;
}

/* O(seqlen): twice the length needs at most twice the workspace, and 65,536 fit into 200 MiB. */
static void test_workspace(void) {
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++)
    for (fa_pass pass = FA_PASS_FORWARD; pass <= FA_PASS_BACKWARD; pass++) {
      const size_t half = workspace_at(32768, (fa_dtype)dtype, pass);
      const size_t full = workspace_at(65536, (fa_dtype)dtype, pass);
      CHECK(full <= 2 * half + 65536, "%s %s: workspace grows from %zu to %zu bytes", fa_dtype_name(dtype),
            fa_pass_name(pass), half, full);
      CHECK(full < (size_t)200 << 20, "%s %s: %zu bytes of workspace at seqlen 65536", fa_dtype_name(dtype),
            fa_pass_name(pass), full);
    }
}

/* The memory that each set plans with, and that what stands here switches off everything that there is. */
static void test_isas(void) {
  fa_problem problem;
  fa_problem_init(&problem);
  problem.batch = problem.seqlen_q = problem.seqlen_k = problem.num_heads = problem.num_kv_heads = 1;
  problem.head_dim = 1;
  const char *kernel = NULL;
  for (int isa = 0; isa < num_isas; isa++) {
    use_isa(isa, &problem, &kernel);
    test_workspace();
  }
  CHECK(num_isas == 1 || strncmp(kernel, "cpu/plain/", 10) == 0, "the plain kernel has not run");
}

/* ---- main --------------------------------------------------------------------------------------------- */

static void print_worst(void) {
  printf("largest error, in tolerances:");
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_compared[id]) printf(" %8s", fa_tensor_name(id));
  for (int dtype = 0; dtype < FA_NUM_FLOATS; dtype++) {
    if (options.dtype >= 0 && options.dtype != dtype) continue;
    printf("\n%29s", fa_dtype_name(dtype));
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (is_compared[id]) printf(" %8.2f", worst[dtype][id]);
  }
  printf("\n");
}

/* The index of the name that matches, or an end with what would have. */
static int choice(const char *option, const char *text, const char *(*name)(int), int count) {
  for (int i = 0; i < count; i++)
    if (strcmp(text, name(i)) == 0) return i;
  fprintf(stderr, "%s: unknown value %s\n", option, text);
  exit(2);
}

static const char *kind_name(int i) { return fa_device_kind_name(kinds[i]); }
static const char *dtype_name(int i) { return fa_dtype_name((fa_dtype)i); }

static void parse(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    const char *option = argv[i];
    if (strcmp(option, "--quick") == 0) {
      options.quick = true;
    } else if (strcmp(option, "--verbose") == 0) {
      options.verbose = true;
    } else if (strcmp(option, "--pages") == 0) {
      options.pages = true;
    } else if (i + 1 == argc) {
      fprintf(stderr, "%s: unknown option, or its value is missing\n", option);
      exit(2);
    } else if (strcmp(option, "--device") == 0) {
      options.device.kind = kinds[choice(option, argv[++i], kind_name, sizeof kinds / sizeof *kinds)];
    } else if (strcmp(option, "--dtype") == 0) {
      options.dtype = choice(option, argv[++i], dtype_name, FA_NUM_FLOATS);
    } else if (strcmp(option, "--sweep") == 0) {
      options.sweep = strtoll(argv[++i], NULL, 10);
    } else if (strcmp(option, "--grow") == 0) {
      options.growth = strtoll(argv[++i], NULL, 10);
    } else if (strcmp(option, "--name") == 0) {
      options.name = argv[++i];
    } else if (strcmp(option, "--seed") == 0) {
      options.seed = strtoull(argv[++i], NULL, 10);
    } else {
      fprintf(stderr, "%s: unknown option\n", option);
      exit(2);
    }
  }
  if (options.sweep < 0) options.sweep = options.growth > 1 ? 24 : options.quick ? 50 : 500;
}

int main(int argc, char **argv) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  parse(argc, argv);
  fa_error error;
  if (fa_num_devices(options.device.kind, &error) == 0) {
    printf("skipped: %s\n", error.message);
    num_skipped++;
    return report();
  }
  find_isas();
  if (options.growth == 1 && !options.pages) {
    test_table();
    test_not_finite();
    test_isas();
  }
  test_sweep();
  print_worst();
  return report();
}
