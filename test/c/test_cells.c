/*
 * The waits between the cells of the CPU's backward (c_src/cpu/backward_template.h), without threads and
 * without luck. Whoever waits yields the processor, so this program brings its own sched_yield, which runs the
 * tasks that nobody has started yet. Whichever cell starts first must let those that it needs run before it,
 * and so add to the gradients in their order: to the same bits.
 */
#include <sched.h>
#include <stdlib.h>

#include "../../c_src/core/arena.h"
#include "../../c_src/cpu/kernels.h"
#include "check.h"
#include "harness.h"
#include "random.h"

/* ---- tasks that run while another waits -------------------------------------------------------------------
 */

/* A cell that computes yields too, four times a tile: one that has yielded more often than this waits. */
enum { PATIENCE = 10000 };

static struct {
  const fa_cpu_job *job;
  const fa_cpu_kernel *kernel;
  const fa_cpu_phase *phase;
  int64_t num_tasks, current; /* the task that is running now, */
  int num_yields;             /* and how often it has yielded */
  bool started[64];
} work;

static void run_task(int64_t task) {
  const int64_t interrupted = work.current;
  const size_t bytes = work.kernel->scratch_bytes(work.job->problem);
  void *scratch = aligned_alloc(FA_ARENA_ALIGNMENT, bytes);
  work.started[task] = true;
  work.current = task;
  work.num_yields = 0;
  work.phase->run_task(work.job, task, scratch);
  work.current = interrupted;
  work.num_yields = 0;
  free(scratch);
}

/* Where the running task waits: the first that has not started, of those before it, as threads take them in
 * order. */
int sched_yield(void) {
  if (work.num_yields++ < PATIENCE) return 0;
  for (int64_t task = 0; task < work.current; task++)
    if (!work.started[task]) {
      run_task(task);
      return 0;
    }
  CHECK(false, "%s: cell %lld waits for ever", work.kernel->name, (long long)work.current);
  exit(report());
}

/* All tasks of a phase in order, after the one that starts first. */
static void run_phase(const fa_cpu_phase *phase, int64_t first) {
  work.phase = phase;
  work.num_tasks = phase->num_tasks(work.job->problem);
  memset(work.started, 0, sizeof work.started);
  if (work.num_tasks > (int64_t)sizeof work.started) abort();
  if (first < work.num_tasks) run_task(first);
  for (int64_t task = 0; task < work.num_tasks; task++)
    if (!work.started[task]) run_task(task);
}

/* ---- a backward ------------------------------------------------------------------------------------------ */

static const fa_tensor_id gradients[] = {FA_TENSOR_DQ, FA_TENSOR_DK, FA_TENSOR_DV};

static void *random_data(const fa_problem *p, fa_tensor_id id) {
  fa_random random = random_stream(5, id);
  const int64_t count = values_count(p, id);
  float *data = malloc((size_t)count * sizeof *data);
  for (int64_t i = 0; i < count; i++) data[i] = (float)random_normal(&random);
  return data;
}

/* Phase 1 has the cells. */
static void run_backward(const fa_plan *plan, fa_tensors *tensors, int64_t first_cell) {
  const fa_cpu_kernel *kernel = plan->config;
  void *shared = aligned_alloc(FA_ARENA_ALIGNMENT, kernel->shared_bytes(&plan->problem));
  const fa_cpu_job job = {&plan->problem, tensors, shared};
  work.job = &job;
  work.kernel = kernel;
  for (int phase = 0; phase < FA_CPU_MAX_PHASES && kernel->phases[phase].run_task; phase++)
    run_phase(&kernel->phases[phase], phase == 1 ? first_cell : 0);
  free(shared);
}

static void test_first_cell(const fa_plan *plan, fa_tensors *tensors, const fa_tensors *expected,
                            int64_t cell) {
  run_backward(plan, tensors, cell);
  for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++) {
    const size_t bytes = (size_t)fa_tensor_shape(&plan->problem, gradients[i]).size_bytes;
    const void *got = fa_tensor_at(tensors, gradients[i])->data;
    CHECK(memcmp(got, fa_tensor_at((fa_tensors *)expected, gradients[i])->data, bytes) == 0,
          "%s: %s differs where cell %lld starts first", plan->kernel, fa_tensor_name(gradients[i]),
          (long long)cell);
  }
}

int main(void) {
  fa_problem problem;
  fa_plan plan;
  fa_tensors tensors = {0}, expected;
  fa_problem_init(&problem);
  problem.batch = 1, problem.num_heads = problem.num_kv_heads = 2, problem.head_dim = 5;
  problem.seqlen_q = 701, problem.seqlen_k = 690; /* five blocks or more: three hands or more */
  if (fa_plan_init(&plan, &problem, FA_PASS_BACKWARD, (fa_device){FA_DEVICE_CPU, 0}, NULL)) abort();
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id) != FA_ROLE_NONE)
      *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&problem, id, random_data(&problem, id));
  expected = tensors;
  for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++)
    fa_tensor_at(&expected, gradients[i])->data = random_data(&problem, gradients[i]);

  run_backward(&plan, &expected, 0);
  const int64_t num_cells = ((const fa_cpu_kernel *)plan.config)->phases[1].num_tasks(&plan.problem);
  CHECK(num_cells >= 2 * 3 * 3, "%s: only %lld cells", plan.kernel, (long long)num_cells);
  for (int64_t cell = 0; cell < num_cells; cell++) test_first_cell(&plan, &tensors, &expected, cell);
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(fa_tensor_at(&tensors, id)->data);
  for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++)
    free(fa_tensor_at(&expected, gradients[i])->data);
  return report();
}
