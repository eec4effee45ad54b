/* What the instruction sets' kernels offer the CPU backend. A pass is a few phases, a phase is a number of
 * tasks that threads take in order. Tasks of a phase may run at the same time; phases follow one another. */
#ifndef FA_CPU_KERNELS_H
#define FA_CPU_KERNELS_H

#include "../core/problem.h"

typedef struct fa_cpu_job {
  const fa_problem *problem; /* canonical */
  const fa_tensors *tensors;
  void *shared;       /* memory of the whole call */
  int32_t of_threads; /* how many may share it: so many that tasks are cut for them */
} fa_cpu_job;

typedef struct fa_cpu_phase {
  int64_t (*num_tasks)(const fa_problem *problem, int32_t of_threads);
  void (*run_task)(const fa_cpu_job *job, int64_t task, void *scratch);
} fa_cpu_phase;

#define FA_CPU_MAX_PHASES 3

enum { FA_CPU_MOST_HEADS = 8 /* that share k and v, of a task of few rows */ };

/* Whether the forward reads k and v where they lie: where so few rows share them that packing takes longer than
 * products do (cpu_log.md). It hangs on nothing that slices of a problem change. */
static inline bool fa_cpu_is_direct(const fa_problem *problem) {
  const int64_t group = problem->num_heads / problem->num_kv_heads;
  const int64_t rows = problem->seqlen_q * (group < FA_CPU_MOST_HEADS ? group : FA_CPU_MOST_HEADS);
  const int64_t most = problem->head_dim > 64 ? 12 : problem->head_dim > 32 ? 8 : 4;
  return fa_problem_rounds_freely(problem) && rows <= most;
}

typedef struct fa_cpu_kernel {
  const char *name;                                                       /* "cpu/avx2/f32" */
  size_t (*shared_bytes)(const fa_problem *problem, int32_t of_threads);  /* NULL: none */
  size_t (*scratch_bytes)(const fa_problem *problem, int32_t of_threads); /* of each thread */
  fa_cpu_phase phases[FA_CPU_MAX_PHASES];                                 /* run_task NULL: no further phase */
} fa_cpu_kernel;

/* A merge of parts, in tasks of some rows of a head; and the gradient of sinks that are all rows', in tasks of
 * a head, which follow. */
typedef struct fa_merge_job {
  const fa_merge *merge;
  bool is_backward;
  void *delta; /* [batch, num_heads, seqlen_q], f32 or f64 as lse, between the two */
} fa_merge_job;

typedef struct fa_merge_kernel {
  void (*rows)(const fa_merge_job *job, int64_t task, void *scratch); /* scratch: two rows of f32 or f64 */
  void (*sinks)(const fa_merge_job *job, int64_t head, void *scratch);
} fa_merge_kernel;

enum { FA_MERGE_ROWS = 64 };

/* The kernels of one instruction set. bf16 and f16 are converted to f32 on their way in and out, bf16 only
 * where the instruction set does not multiply pairs of it, or where products are direct. */
typedef struct fa_cpu_kernels {
  fa_cpu_kernel forward_f32, forward_f64, backward_f32, backward_f64, tangent_f64;
  fa_cpu_kernel decode_f32, decode_f64; /* the same forwards, where fa_cpu_is_direct: with other bits */
  fa_merge_kernel merge_f32, merge_f64;
} fa_cpu_kernels;

extern const fa_cpu_kernels fa_cpu_kernels_plain;
#if defined(__x86_64__)
extern const fa_cpu_kernels fa_cpu_kernels_avx2, fa_cpu_kernels_avx512;

/* Those of an instruction set that multiplies pairs of bf16. Whatever else there is to do, others' kernels do.
 */
typedef struct fa_cpu_pair_kernels {
  fa_cpu_kernel forward_bf16, backward_bf16;
} fa_cpu_pair_kernels;

extern const fa_cpu_pair_kernels fa_cpu_kernels_avx512bf16, fa_cpu_kernels_amx;
#endif

#endif
