/*
 * The CPU kernels of one instruction set: forward and backward written once, in templates, and instantiated
 * here for float, double and, to differentiate the forward, complex double. The Makefile compiles this file
 * once for every instruction set, with FA_ISA its name and FA_ISA_<name> defined.
 *
 * The templates' parameters:
 *   REAL      the arithmetic's type        T(name)   name with the type's suffix
 *   LANES     elements of one vector       MR, NV    a product's tile: MR rows of NV vectors, held in registers
 *   WIDE      1: or, where that many columns are left, six or four rows of twice NV, which load less for each
 *             multiply-add
 *   PAIRS     1: products are those of bf16, by instructions that take two at a time; 0: of REAL
 *   TILES     1: and by instructions that take tiles of them
 *   DIRECT    1: and few rows have products of their own, of REAL (direct_template.h)
 */
#include "kernels.h"

#include <complex.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../core/arena.h"
#include "../core/integers.h"
#include "../core/problem.h"
#include "../core/tensors.h"
#include "../core/threads.h"
#include "half.h"
#include "sequence.h"

#ifndef CMPLX /* clang before 16 has the builtin, and no macro */
#define CMPLX(x, y) __builtin_complex((double)(x), (double)(y))
#endif

/*
 * Sizes, by instruction set. MR rows of NV vectors, with NV more vectors and one factor, fill the registers.
 * STRIP, the rows whose scores are softened at a time, is a multiple of MR and NR; so is BLOCK, the rows of k
 * and v, and in the backward of q, that are held packed. Larger blocks read and write sums less often, until
 * they leave the cache.
 */
#if defined(FA_ISA_avx512) || defined(FA_ISA_avx512bf16) || defined(FA_ISA_amx)
#define VECTOR_BYTES   64
#define MR             (TILES ? 16 : 8)
#define STRIP          64
#define BLOCK          128
#define YIELD_PRODUCTS (PAIRS ? 1 << 23 : 1 << 22)
#elif defined(FA_ISA_avx2)
#define VECTOR_BYTES   32
#define MR             6
#define STRIP          48
#define BLOCK          96
#define YIELD_PRODUCTS (1 << 21)
#elif defined(__aarch64__)
#define VECTOR_BYTES   16
#define MR             8
#define STRIP          48
#define BLOCK          96
#define YIELD_PRODUCTS (1 << 20)
#else
#define VECTOR_BYTES   16
#define MR             4
#define STRIP          48
#define BLOCK          96
#define YIELD_PRODUCTS (1 << 20)
#endif
#if defined(FA_ISA_avx512bf16) || defined(FA_ISA_amx)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#if defined(FA_ISA_amx)
#define TILES 1
#include "tiles.h"
#else
#define TILES 0
#endif
#if defined(FA_ISA_avx512) || defined(FA_ISA_avx512bf16)
#define WIDE 1
#else
#define WIDE 0
#endif
#define DIRECT (!PAIRS && !IS_COMPLEX)
#define NV     2
#define NR     (NV * LANES) /* columns of a tile */
/* So many rows or columns are whole tiles, wherever among them a range begins. */
#define WHOLE ((MR == 6 ? NR % 4 : NR % MR) ? STRIP : NR)
/* The fewest rows that a product takes as fast as many, a part of WHOLE. */
#define FEWEST (TILES || WHOLE % MR ? WHOLE : MR)

#define JOIN_(a, b) a##_##b
#define JOIN(a, b)  JOIN_(a, b)
#define TEXT_(x)    #x
#define TEXT(x)     TEXT_(x)
#define INLINE      static inline __attribute__((always_inline))

/* Between tiles, after YIELD_PRODUCTS, where fa_set_gives_way says so: these take some 70 microseconds. Linux
 * puts a thread that yields behind those that never do, for 100 ms and more in the end; a VM's schedulers yield
 * while they look for work. Yielding too, and as often, keeps them level: they get a processor within 10 ms
 * while every one is computing (of two yields, 16 schedulers: 13, at times 27). Where nobody waits it costs 2
 * microseconds. products: those that the thread is about to make. */
static inline void give_way(int64_t products) {
  static _Thread_local int64_t done;
  if (done >= YIELD_PRODUCTS) {
    done = 0;
    for (int i = 0; i < 4 && atomic_load_explicit(&fa_gives_way, memory_order_relaxed); i++) sched_yield();
  }
  done += products;
}

/* Until *value has reached at_least. The waits are short; the processor is offered to whoever works. */
static inline void wait_until(atomic_int *value, int at_least) {
  while (atomic_load_explicit(value, memory_order_acquire) < at_least) sched_yield();
}

#define REAL float
#if PAIRS
#define T(name) name##_bf16
#else
#define T(name) name##_f32
#endif
#define INT         int32_t
#define LOG         logf
#define LOWEST      (-FLT_MAX)
#define EXP_HIGHEST 89 /* exp(it) overflows, but the exponent's bits do not */
#define IS_F32      1
#define IS_COMPLEX  0
#define LANES       ((int)(VECTOR_BYTES / sizeof(REAL)))
#include "vector_template.h"
#include "rows_template.h"
#include "product_template.h"
#include "scores_template.h"
#include "direct_template.h"
#include "forward_template.h"
#include "dbias_template.h"
#include "backward_template.h"
#if !PAIRS
#include "merge_template.h"
#undef REAL
#undef T
#undef INT
#undef LOG
#undef LOWEST
#undef EXP_HIGHEST
#undef IS_F32

#define REAL        double
#define T(name)     name##_f64
#define INT         int64_t
#define LOG         log
#define LOWEST      (-DBL_MAX)
#define EXP_HIGHEST 710
#define IS_F32      0
#include "vector_template.h"
#include "rows_template.h"
#include "product_template.h"
#include "scores_template.h"
#include "direct_template.h"
#include "forward_template.h"
#include "dbias_template.h"
#include "backward_template.h"
#include "merge_template.h"
#undef REAL
#undef T
#undef LOG
#undef IS_COMPLEX
#undef LANES

/* The forward alone: its imaginary part is the derivative of what the forward above computes. */
#define REAL       double complex
#define T(name)    name##_tangent
#define LOG        clog
#define IS_COMPLEX 1
#define LANES      1
#include "vector_template.h"
#include "rows_template.h"
#include "product_template.h"
#include "scores_template.h"
#include "direct_template.h"
#include "forward_template.h"
#endif

/* Tasks that multiply, between tiles_begin and tiles_end. */
#if TILES
#define TILED(task_of)                                                              \
  static void tiled_##task_of(const fa_cpu_job *job, int64_t task, void *scratch) { \
    tiles_begin();                                                                  \
    task_of(job, task, scratch);                                                    \
    tiles_end();                                                                    \
  }
TILED(forward_task_bf16)
TILED(columns_task_bf16)
#define forward_task_bf16 tiled_forward_task_bf16
#define columns_task_bf16 tiled_columns_task_bf16
#endif

#define FORWARD(label, type)                                                            \
  {                                                                                     \
    .name = "cpu/" TEXT(FA_ISA) "/" label, .shared_bytes = forward_shared_bytes_##type, \
    .scratch_bytes = forward_scratch_bytes_##type, .phases = {                          \
      {forward_num_tasks_##type, forward_task_##type},                                  \
      {join_num_tasks_##type, join_task_##type}                                         \
    }                                                                                   \
  }

#define BACKWARD(label, type)                                                            \
  {                                                                                      \
    .name = "cpu/" TEXT(FA_ISA) "/" label, .shared_bytes = backward_shared_bytes_##type, \
    .scratch_bytes = backward_scratch_bytes_##type, .phases = {                          \
      {num_prepare_tasks_##type, prepare_task_##type},                                   \
      {num_column_tasks_##type, columns_task_##type},                                    \
      {num_finish_tasks_##type, finish_task_##type}                                      \
    }                                                                                    \
  }

#if PAIRS
const fa_cpu_pair_kernels JOIN(fa_cpu_kernels, FA_ISA) = {
    .forward_bf16 = FORWARD("bf16", bf16),
    .backward_bf16 = BACKWARD("bf16", bf16),
};
#else
const fa_cpu_kernels JOIN(fa_cpu_kernels, FA_ISA) = {
    .forward_f32 = FORWARD("f32", f32),
    .forward_f64 = FORWARD("f64", f64),
    .decode_f32 = FORWARD("decode/f32", f32),
    .decode_f64 = FORWARD("decode/f64", f64),
    .backward_f32 = BACKWARD("f32", f32),
    .backward_f64 = BACKWARD("f64", f64),
    .tangent_f64 = FORWARD("tangent", tangent),
    .merge_f32 = {merge_task_f32, merge_sink_task_f32},
    .merge_f64 = {merge_task_f64, merge_sink_task_f64},
};
#endif
