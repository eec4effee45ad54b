/* The CPU backend: chooses an instruction set's kernels, and runs their tasks on threads. */
#include "../core/backend.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "../core/arena.h"
#include "../core/error.h"
#include "../core/integers.h"
#include "../core/processors.h"
#include "../core/threads.h"
#include "kernels.h"
#include "sum.h"

#if defined(__x86_64__)
static bool has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && fa_has_f16c() &&
         !fa_is_disabled("avx2");
}

static bool has_avx512(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && !fa_is_disabled("avx512");
}

/* Additions to avx512, and switched off with it. Intel's processors take twice as long for a product of pairs
 * as for one of f32 (cpu_log.md). */
static bool has_avx512bf16(void) {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel") &&
         !fa_is_disabled("avx512bf16");
}

/* Whether the processor multiplies tiles, and Linux lets this process, which has to ask. Tests emulate it. */
static bool may_use_tiles(void) {
#if defined(FA_EMULATED_TILES)
  return true;
#elif defined(__linux__)
  enum { BF16 = 1 << 22, TILES = 1 << 24 }; /* of edx */
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & BF16 && d & TILES &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
static bool has_amx(void) {
  static atomic_int known; /* 0: not yet; 1: no; 2: yes */
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16") || fa_is_disabled("amx")) return false;
  if (!atomic_load(&known)) atomic_store(&known, may_use_tiles() ? 2 : 1);
  return atomic_load(&known) == 2;
}
#endif

/* The best instruction set that this processor has, with additions: names, kernels, and those that multiply
 * pairs of bf16, or NULL. */
typedef struct cpu_isa {
  const char *names;
  const fa_cpu_kernels *kernels;
  const fa_cpu_pair_kernels *pairs;
} cpu_isa;

static cpu_isa isa_here(void) {
#if defined(__x86_64__)
  if (has_amx()) return (cpu_isa){"avx512 amx", &fa_cpu_kernels_avx512, &fa_cpu_kernels_amx};
  if (has_avx512bf16())
    return (cpu_isa){"avx512 avx512bf16", &fa_cpu_kernels_avx512, &fa_cpu_kernels_avx512bf16};
  if (has_avx512()) return (cpu_isa){"avx512", &fa_cpu_kernels_avx512, NULL};
  if (has_avx2()) return (cpu_isa){"avx2", &fa_cpu_kernels_avx2, NULL};
#endif
  return (cpu_isa){"plain", &fa_cpu_kernels_plain, NULL};
}

static const fa_cpu_kernel *kernel_for(fa_pass pass, const fa_problem *problem) {
  const cpu_isa isa = isa_here();
  const fa_dtype dtype = problem->dtype;
  const bool is_forward = pass == FA_PASS_FORWARD, is_direct = is_forward && fa_cpu_is_direct(problem);
  if (pass == FA_PASS_TANGENT) return &isa.kernels->tangent_f64;
  if (is_direct) return dtype == FA_DTYPE_F64 ? &isa.kernels->decode_f64 : &isa.kernels->decode_f32;
  if (dtype == FA_DTYPE_F64) return is_forward ? &isa.kernels->forward_f64 : &isa.kernels->backward_f64;
  if (dtype == FA_DTYPE_BF16 && isa.pairs)
    return is_forward ? &isa.pairs->forward_bf16 : &isa.pairs->backward_bf16;
  return is_forward ? &isa.kernels->forward_f32 : &isa.kernels->backward_f32;
}

/* FLASH_ATTENTION_NUM_THREADS, or 0 where it is not set to a number. */
static int32_t threads_wanted(void) {
  const char *text = getenv("FLASH_ATTENTION_NUM_THREADS");
  char *end = NULL;
  const long threads = text ? strtol(text, &end, 10) : 0;
  return end && !*end && threads > 0 && threads < 1024 ? (int32_t)threads : 0;
}

/* Threads that a call of this size keeps busy for longer than it takes to wake them up. Few rows wait for k and
 * v. */
static int32_t useful_threads(const fa_problem *problem) {
  const double numbers = (double)problem->batch * (double)problem->seqlen_k * (double)problem->head_dim;
  const double products = 4.0 * numbers * (double)problem->num_heads * (double)problem->seqlen_q,
               bytes = 2.0 * numbers * (double)problem->num_kv_heads * (double)fa_dtype_bytes(problem->dtype);
  const double useful = products / 2e6 > bytes / 1e6 ? products / 2e6 : bytes / 1e6;
  int32_t processors = fa_num_processors();
  return useful < 1 ? 1 : useful < processors ? (int32_t)useful : processors;
}

static int32_t num_devices(fa_error *error) {
  fa_succeed(error);
  return 1;
}

static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  (void)index;
  snprintf(info->features, sizeof info->features, "%s", isa_here().names);
  snprintf(info->name, sizeof info->name, "CPU");
  FILE *cpuinfo = fopen("/proc/cpuinfo", "r");
  char line[256];
  while (cpuinfo && fgets(line, sizeof line, cpuinfo))
    if (sscanf(line, "model name : %127[^\n]", info->name) == 1) break;
  if (cpuinfo) fclose(cpuinfo);
  info->num_threads = threads_wanted() ? threads_wanted() : fa_num_processors();
  info->memory_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  return fa_succeed(error);
}

/* The parts of a workspace. */
typedef struct workspace_parts {
  char *shared;         /* what all threads share, */
  char *scratch;        /* and what each has for itself: */
  size_t scratch_bytes; /* so much */
} workspace_parts;

static workspace_parts lay_out(fa_arena *arena, const fa_cpu_kernel *kernel, const fa_problem *problem,
                               int32_t num_threads) {
  workspace_parts parts = {.scratch_bytes = kernel->scratch_bytes(problem, num_threads)};
  parts.shared = fa_take(arena, 1, kernel->shared_bytes ? kernel->shared_bytes(problem, num_threads) : 0);
  parts.scratch = fa_take(arena, num_threads, parts.scratch_bytes);
  return parts;
}

/* Tasks of a phase, which there may not be. */
static int64_t tasks_of(const fa_cpu_kernel *kernel, int phase, const fa_problem *problem, int32_t of_threads) {
  if (phase == FA_CPU_MAX_PHASES || !kernel->phases[phase].run_task) return 0;
  return kernel->phases[phase].num_tasks(problem, of_threads);
}

static int64_t most_tasks(const fa_cpu_kernel *kernel, const fa_problem *problem, int32_t of_threads) {
  int64_t most = 1;
  for (int i = 0; i < FA_CPU_MAX_PHASES; i++) most = fa_max(most, tasks_of(kernel, i, problem, of_threads));
  return most;
}

static fa_status plan_cpu(fa_plan *plan, fa_error *error) {
  if (plan->pass == FA_PASS_BOUND)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "pass", "forward, backward or tangent on the CPU",
                   fa_pass_name(plan->pass));
  if (plan->pass == FA_PASS_TANGENT && plan->problem.dtype != FA_DTYPE_F64)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "q", "type f64 for the tangent pass",
                   fa_dtype_name(plan->problem.dtype));
  const fa_cpu_kernel *kernel = kernel_for(plan->pass, &plan->problem);
  int32_t wanted = threads_wanted(), threads = wanted ? wanted : useful_threads(&plan->problem);
  int64_t tasks = most_tasks(kernel, &plan->problem, threads);
  plan->kernel = kernel->name;
  plan->config = kernel;
  plan->num_threads = tasks < threads ? (int32_t)tasks : threads;
  fa_arena sizes = {0};
  lay_out(&sizes, kernel, &plan->problem, plan->num_threads);
  plan->workspace_bytes = sizes.used;
  return FA_STATUS_OK;
}

/* For so long threads wait awake for a next phase's tasks, which come when this one's last have ended. */
enum { BETWEEN_PHASES_MICROSECONDS = 100 };

/* A phase that is under way. */
typedef struct phase_work {
  const fa_cpu_job *job;
  const fa_cpu_phase *phase;
  workspace_parts parts;
} phase_work;

static void run_task(void *context, int64_t task, int worker) {
  const phase_work *work = context;
  work->phase->run_task(work->job, task, work->parts.scratch + work->parts.scratch_bytes * (size_t)worker);
}

static fa_status run_cpu(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                         fa_error *error) {
  (void)error;
  const fa_cpu_kernel *kernel = plan->config;
  phase_work work = {
      .parts = lay_out(&(fa_arena){.base = execution->workspace}, kernel, &plan->problem, plan->num_threads)};
  fa_cpu_job job = {&plan->problem, tensors, work.parts.shared, plan->num_threads};
  work.job = &job;

  int threads = plan->num_threads;
  if (execution->num_threads > 0 && execution->num_threads < threads) threads = execution->num_threads;
  int64_t tasks = tasks_of(kernel, 0, &plan->problem, plan->num_threads);
  for (int i = 0; i < FA_CPU_MAX_PHASES && kernel->phases[i].run_task; i++) {
    const int64_t next_tasks = tasks_of(kernel, i + 1, &plan->problem, plan->num_threads);
    work.phase = &kernel->phases[i];
    fa_parallel_share(threads, next_tasks > 1 ? BETWEEN_PHASES_MICROSECONDS : 0, tasks, run_task, &work);
    tasks = next_tasks;
  }
  return FA_STATUS_OK;
}

/* ---- parts ------------------------------------------------------------------------------------------- */

typedef struct merge_work {
  const fa_merge_job *job;
  void (*run_task)(const fa_merge_job *job, int64_t task, void *scratch);
  char *scratch;
  size_t scratch_bytes;
} merge_work;

static void run_merge_task(void *context, int64_t task, int worker) {
  const merge_work *work = context;
  work->run_task(work->job, task, work->scratch + work->scratch_bytes * (size_t)worker);
}

/* Threads that a merge keeps busy for longer than it takes to wake them up. */
static int32_t merge_threads(const fa_merge *merge, const fa_execution *execution) {
  const double rows = (double)merge->batch * (double)merge->num_heads * (double)merge->seqlen_q;
  const double useful = rows * (double)(merge->head_dim + 16) * (merge->num_parts + 1) / 4e5;
  const int32_t most = threads_wanted() ? threads_wanted() : fa_num_processors();
  const int32_t allowed = execution->num_threads > 0 ? (int32_t)fa_min(execution->num_threads, most) : most;
  return useful < 1 ? 1 : useful < allowed ? (int32_t)useful : allowed;
}

static fa_status merge_cpu(const fa_merge *merge, bool is_backward, int32_t index,
                           const fa_execution *execution, fa_error *error) {
  (void)index;
  const fa_cpu_kernels *kernels = isa_here().kernels;
  const bool is_f64 = merge->merged.dtype == FA_DTYPE_F64;
  const fa_merge_kernel *kernel = is_f64 ? &kernels->merge_f64 : &kernels->merge_f32;
  const fa_merge_job job = {merge, is_backward, execution->workspace};
  const int32_t threads = merge_threads(merge, execution);
  merge_work work = {&job, kernel->rows, NULL,
                     (size_t)fa_round_up(2 * merge->head_dim * (is_f64 ? 8 : 4), FA_ARENA_ALIGNMENT)};
  work.scratch = malloc(work.scratch_bytes * (size_t)threads);
  if (!work.scratch)
    return fa_fail(error, FA_STATUS_OUT_OF_MEMORY, "parts",
                   FA_TEXT("%zu bytes of memory", work.scratch_bytes * (size_t)threads), "none");
  const int64_t chunks = fa_divide_up(merge->seqlen_q, FA_MERGE_ROWS);
  fa_parallel_share(threads, 0, chunks * merge->batch * merge->num_heads, run_merge_task, &work);
  work.run_task = kernel->sinks;
  if (is_backward && merge->dsink && merge->num_sinks && !merge->sink_per_row)
    fa_parallel_share(threads, 0, merge->num_heads, run_merge_task, &work);
  free(work.scratch);
  return FA_STATUS_OK;
}

const fa_backend fa_cpu_backend = {.kind = FA_DEVICE_CPU,
                                   .num_devices = num_devices,
                                   .device_info = device_info,
                                   .plan = plan_cpu,
                                   .run = run_cpu,
                                   .merge = merge_cpu,
                                   .sum = fa_cpu_sum};
