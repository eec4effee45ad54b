/*
 * The waits between the tasks of the CPU's backward (c_src/cpu/backward_template.h), without threads and
 * without luck. Whoever waits yields the processor, and so does whoever computes, between two tiles. So this
 * program brings its own sched_yield, which goes on with another task: whichever that is, tasks must add to the
 * gradients in their order, and to the same bits.
 */
#include <sched.h>
#include <stdlib.h>
#include <ucontext.h>

#include "../../c_src/core/arena.h"
#include "../../c_src/core/error.h"
#include "../../c_src/cpu/kernels.h"
#include "check.h"
#include "harness.h"
#include "random.h"

/* ---- tasks that take turns --------------------------------------------------------------------------------
 */

/* So often nobody yields while somebody gets on. */
enum { MOST_WORKERS = 5, PATIENCE = 1000000, STACK_BYTES = 1 << 20 };

/* Each has a stack of its own, and takes the next task when it is done with one. */
typedef struct worker {
  ucontext_t context;
  char *stack;
  bool has_ended;
} worker;

static struct {
  const fa_cpu_job *job;
  const fa_cpu_kernel *kernel;
  const fa_cpu_phase *phase;
  int64_t num_tasks, next_task;
  worker workers[MOST_WORKERS];
  ucontext_t beside; /* where all of them began */
  int num_workers, current, slow;
  int num_yields;     /* since a task ended */
  int64_t all_yields; /* of tasks */
  fa_random random;
} work;

/* Whose turn it is now: the slow one's seldom. -1: nobody's. */
static int next_worker(void) {
  int alive[MOST_WORKERS], count = 0;
  for (int i = 0; i < work.num_workers; i++)
    if (!work.workers[i].has_ended) alive[count++] = i;
  if (count == 0) return -1;
  for (;;) {
    const int next = alive[random_integer(&work.random, 0, count - 1)];
    if (next != work.slow || count == 1 || random_integer(&work.random, 0, 29) == 0) return next;
  }
}

int sched_yield(void) {
  if (work.num_workers == 0) return 0;
  work.all_yields++;
  if (work.num_yields++ == PATIENCE) {
    CHECK(false, "%s: all wait for ever", work.kernel->name);
    exit(report());
  }
  const int from = work.current;
  work.current = next_worker();
  if (work.current != from) swapcontext(&work.workers[from].context, &work.workers[work.current].context);
  return 0;
}

static void run_tasks(void) {
  void *scratch =
      aligned_alloc(FA_ARENA_ALIGNMENT, work.kernel->scratch_bytes(work.job->problem, work.job->of_threads));
  while (work.next_task < work.num_tasks) {
    work.phase->run_task(work.job, work.next_task++, scratch);
    work.num_yields = 0;
  }
  free(scratch);
  work.workers[work.current].has_ended = true;
  work.current = next_worker();
  setcontext(work.current < 0 ? &work.beside : &work.workers[work.current].context);
}

static void run_phase(const fa_cpu_phase *phase) {
  work.phase = phase;
  work.num_tasks = phase->num_tasks(work.job->problem, work.job->of_threads);
  work.next_task = work.num_yields = work.current = 0;
  for (int i = 0; i < work.num_workers; i++) {
    worker *w = &work.workers[i];
    getcontext(&w->context);
    w->context.uc_stack.ss_sp = w->stack;
    w->context.uc_stack.ss_size = STACK_BYTES;
    w->has_ended = false;
    makecontext(&w->context, run_tasks, 0);
  }
  swapcontext(&work.beside, &work.workers[0].context);
}

/* ---- a backward ------------------------------------------------------------------------------------------ */

static const fa_tensor_id gradients[] = {FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV, FA_TENSOR_DALIBI_SLOPES,
                                         FA_TENSOR_DBIAS};
enum { NUM_GRADIENTS = sizeof gradients / sizeof *gradients, NUM_SEEDS = 24, MANY_THREADS = 64 };

static void *random_data(const fa_problem *p, fa_tensor_id id) {
  fa_random random = random_stream(5, id);
  const int64_t count = values_count(p, id);
  float *data = malloc((size_t)count * sizeof *data);
  /* exp(slope * distance) is to be finite. */
  const double factor = id == FA_TENSOR_ALIBI_SLOPES ? 0.01 : 1;
  for (int64_t i = 0; i < count; i++) data[i] = (float)(factor * random_normal(&random));
  return data;
}

static void run_backward(const fa_plan *plan, fa_tensors *tensors, int num_workers, int32_t of_threads,
                         uint64_t seed) {
  const fa_cpu_kernel *kernel = plan->config;
  void *shared = aligned_alloc(FA_ARENA_ALIGNMENT, kernel->shared_bytes(&plan->problem, of_threads));
  const fa_cpu_job job = {&plan->problem, tensors, shared, of_threads};
  work.job = &job;
  work.kernel = kernel;
  work.num_workers = num_workers;
  work.random = random_stream(seed, 0);
  work.slow = (int)random_integer(&work.random, 0, num_workers - 1);
  for (int phase = 0; phase < FA_CPU_MAX_PHASES && kernel->phases[phase].run_task; phase++)
    run_phase(&kernel->phases[phase]);
  work.num_workers = 0;
  free(shared);
}

static void test_seed(const char *name, const fa_plan *plan, fa_tensors *tensors, const fa_tensors *expected,
                      uint64_t seed) {
  /* Tasks that are cut for fewer threads have more columns each. */
  run_backward(plan, tensors, 2 + (int)(seed % (MOST_WORKERS - 1)), 1 + (int32_t)(seed % 3), seed);
  for (int i = 0; i < NUM_GRADIENTS; i++) {
    if (fa_tensor_role_in(&plan->problem, FA_PASS_BACKWARD, gradients[i]) == FA_ROLE_NONE) continue;
    const size_t bytes = (size_t)fa_tensor_shape(&plan->problem, gradients[i]).size_bytes;
    const void *got = fa_tensor_at(tensors, gradients[i])->data;
    CHECK(bytes > 0 && memcmp(got, fa_tensor_at((fa_tensors *)expected, gradients[i])->data, bytes) == 0,
          "%s, %s: %s differs with seed %d", plan->kernel, name, fa_tensor_name(gradients[i]), (int)seed);
  }
}

static void test_problem(const char *name, const fa_problem *given) {
  fa_plan plan;
  fa_tensors tensors = {0}, expected;
  if (fa_plan_init(&plan, given, FA_PASS_BACKWARD, (fa_device){FA_DEVICE_CPU, 0}, NULL)) abort();
  const fa_problem problem = plan.problem;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id) != FA_ROLE_NONE)
      *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&problem, id, random_data(&problem, id));
  if (problem.num_bands > 0) {
    /* Rows that see columns far from theirs, and two bands in one block. */
    const int32_t bands[][6] = {{0, 50, 0, 490, 490, 490},   {50, 200, 0, 180, 490, 490},
                                {50, 120, 200, 490, 9, 9},   {200, 400, 280, 400, 490, 0},
                                {400, 501, 0, 140, 80, 490}, {410, 490, 150, 490, 490, 490}};
    if (problem.num_bands != (int64_t)(sizeof bands / sizeof *bands)) abort();
    memcpy(tensors.bands.data, bands, sizeof bands);
  }
  expected = tensors;
  for (int i = 0; i < NUM_GRADIENTS; i++)
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, gradients[i]) != FA_ROLE_NONE)
      fa_tensor_at(&expected, gradients[i])->data = random_data(&problem, gradients[i]);

  /* One after the other nobody waits, and whoever computes yields only if it is asked to. */
  for (int gives_way = 0; gives_way < 2; gives_way++) {
    fa_set_gives_way(gives_way);
    work.all_yields = 0;
    run_backward(&plan, &expected, 1, MANY_THREADS, 0);
    CHECK((work.all_yields > 0) == gives_way, "%s, %s: %lld yields where %d was asked for", plan.kernel, name,
          (long long)work.all_yields, gives_way);
  }
  const fa_cpu_phase *phase = &((const fa_cpu_kernel *)plan.config)->phases[1];
  const int64_t most = phase->num_tasks(&problem, MANY_THREADS), least = phase->num_tasks(&problem, 1);
  CHECK(least >= 4 && most >= 2 * least, "%s, %s: only %lld to %lld tasks", plan.kernel, name, (long long)least,
        (long long)most);
  for (uint64_t seed = 1; seed <= NUM_SEEDS; seed++) test_seed(name, &plan, &tensors, &expected, seed);
  for (int i = 0; i < NUM_GRADIENTS; i++) free(fa_tensor_at(&expected, gradients[i])->data);
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(fa_tensor_at(&tensors, id)->data);
}

int main(void) {
  for (int i = 0; i < MOST_WORKERS; i++) work.workers[i].stack = malloc(STACK_BYTES);
  fa_problem plain;
  fa_problem_init(&plain);
  /* A tile is so many products that a task yields behind each. */
  plain.batch = 1, plain.num_heads = plain.num_kv_heads = 2, plain.head_dim = 60;
  plain.seqlen_q = 501, plain.seqlen_k = 490;
  test_problem("plain", &plain);

  fa_problem causal = plain;
  causal.window_right = 0;
  test_problem("causal", &causal);

  fa_problem lanes = plain; /* of four blocks of columns or more */
  lanes.num_heads = 4, lanes.seqlen_q = 290, lanes.seqlen_k = 1100;
  test_problem("lanes", &lanes);

  fa_problem spans = plain; /* few columns, and rows enough for four spans or more */
  spans.num_kv_heads = 1, spans.seqlen_q = 2010, spans.seqlen_k = 250, spans.alibi_batch = 1;
  test_problem("spans", &spans);
  spans.batch = 2, spans.bias_dtype = FA_DTYPE_F32, spans.bias_batch = spans.bias_heads = 1;
  spans.bias_rows = spans.seqlen_q;
  test_problem("spans, bias", &spans);

  fa_problem bands = plain;
  bands.num_heads = 4, bands.bands_batch = 1, bands.num_bands = 6;
  test_problem("bands", &bands);

  fa_problem bias = plain;
  bias.batch = 2, bias.num_heads = 4, bias.bias_dtype = FA_DTYPE_F32, bias.alibi_batch = 1;
  for (int shared = 0; shared < 8; shared++) {
    bias.bias_batch = shared & 1 ? 1 : bias.batch;
    bias.bias_heads = shared & 2 ? 1 : bias.num_heads;
    bias.bias_rows = shared & 4 ? 1 : bias.seqlen_q;
    test_problem(FA_TEXT("bias, whose shared axes are %d", shared), &bias);
  }
  for (int i = 0; i < MOST_WORKERS; i++) free(work.workers[i].stack);
  return report();
}
