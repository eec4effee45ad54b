/* The CPU backend: chooses an instruction set's kernels, and runs their tasks on threads. */
#include "../core/backend.h"

#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core/error.h"
#include "kernels.h"

#if defined(__x86_64__)
/* FLASH_ATTENTION_DISABLE lists instruction sets not to be used, "avx512,avx2": for tests, and for comparing.
 */
static bool disabled(const char *isa) {
  const char *list = getenv("FLASH_ATTENTION_DISABLE");
  size_t length = strlen(isa);
  while (list && *list) {
    size_t item = strcspn(list, ",");
    if (item == length && strncmp(list, isa, length) == 0) return true;
    list += item + (list[item] == ',');
  }
  return false;
}
#endif

/* The best instruction set that this processor has. */
static const fa_cpu_kernels *kernels_here(const char **isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && !disabled("avx512")) {
    *isa = "avx512";
    return &fa_cpu_kernels_avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && !disabled("avx2")) {
    *isa = "avx2";
    return &fa_cpu_kernels_avx2;
  }
#endif
  *isa = "plain";
  return &fa_cpu_kernels_plain;
}

/* Threads of one call: FLASH_ATTENTION_NUM_THREADS, or what OpenMP would take (OMP_NUM_THREADS, the cores). */
static int32_t default_threads(void) {
  const char *text = getenv("FLASH_ATTENTION_NUM_THREADS");
  long threads = text ? strtol(text, NULL, 10) : 0;
  return threads > 0 && threads < 4096 ? (int32_t)threads : omp_get_max_threads();
}

static int32_t num_devices(fa_error *error) {
  fa_succeed(error);
  return 1;
}

static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  (void)index;
  const char *isa;
  kernels_here(&isa);
  snprintf(info->features, sizeof info->features, "%s", isa);
  snprintf(info->name, sizeof info->name, "CPU");
  FILE *cpuinfo = fopen("/proc/cpuinfo", "r");
  char line[256];
  while (cpuinfo && fgets(line, sizeof line, cpuinfo))
    if (sscanf(line, "model name : %127[^\n]", info->name) == 1) break;
  if (cpuinfo) fclose(cpuinfo);
  info->num_threads = default_threads();
  info->memory_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  return fa_succeed(error);
}

static size_t round_up_64(size_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t most_tasks(const fa_cpu_kernel *kernel, const fa_problem *problem) {
  int64_t most = 1;
  for (int i = 0; i < FA_CPU_MAX_PHASES && kernel->phases[i].run_task; i++) {
    int64_t tasks = kernel->phases[i].num_tasks(problem);
    if (tasks > most) most = tasks;
  }
  return most;
}

static fa_status plan_cpu(fa_plan *plan, fa_error *error) {
  const char *isa;
  const fa_cpu_kernels *kernels = kernels_here(&isa);
  bool f64 = plan->problem.dtype == FA_DTYPE_F64;
  if (plan->pass == FA_PASS_TANGENT && !f64)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "q", "type f64 for the tangent pass",
                   fa_dtype_name(plan->problem.dtype));
  const fa_cpu_kernel *kernel = plan->pass == FA_PASS_TANGENT ? &kernels->tangent_f64
                                : plan->pass == FA_PASS_FORWARD
                                    ? (f64 ? &kernels->forward_f64 : &kernels->forward_f32)
                                    : (f64 ? &kernels->backward_f64 : &kernels->backward_f32);
  int64_t tasks = most_tasks(kernel, &plan->problem);
  int32_t threads = default_threads();
  plan->kernel = kernel->name;
  plan->config = kernel;
  plan->num_threads = tasks < threads ? (int32_t)tasks : threads;
  plan->workspace_bytes = (kernel->shared_bytes ? round_up_64(kernel->shared_bytes(&plan->problem)) : 0) +
                          round_up_64(kernel->scratch_bytes(&plan->problem)) * (size_t)plan->num_threads;
  return FA_STATUS_OK;
}

/* Calls that are running now: they share the processor's threads instead of each taking all of them. */
static atomic_int num_calls;

static fa_status run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                     fa_error *error) {
  (void)error;
  const fa_cpu_kernel *kernel = plan->config;
  const fa_problem *problem = &plan->problem;
  fa_cpu_job job = {problem, tensors, execution->workspace};
  size_t shared_bytes = kernel->shared_bytes ? round_up_64(kernel->shared_bytes(problem)) : 0;
  size_t scratch_bytes = round_up_64(kernel->scratch_bytes(problem));
  char *scratch = (char *)execution->workspace + shared_bytes;

  int calls = atomic_fetch_add(&num_calls, 1) + 1;
  int threads = plan->num_threads / calls;
  if (execution->num_threads > 0 && execution->num_threads < threads) threads = execution->num_threads;
  if (threads < 1) threads = 1;

  for (int i = 0; i < FA_CPU_MAX_PHASES && kernel->phases[i].run_task; i++) {
    int64_t num_tasks = kernel->phases[i].num_tasks(problem);
    _Atomic int64_t next_task = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && num_tasks > 1)
    {
      void *mine = scratch + scratch_bytes * (size_t)omp_get_thread_num();
      for (int64_t task; (task = atomic_fetch_add(&next_task, 1)) < num_tasks;)
        kernel->phases[i].run_task(&job, task, mine);
    }
  }
  atomic_fetch_sub(&num_calls, 1);
  return FA_STATUS_OK;
}

const fa_backend fa_cpu_backend = {.kind = FA_DEVICE_CPU,
                                   .num_devices = num_devices,
                                   .device_info = device_info,
                                   .plan = plan_cpu,
                                   .run = run};
