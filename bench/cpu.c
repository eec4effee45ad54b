/*
 * Speed and memory of the CPU backend, side by side in one run with the processor's own limit and with plain
 * attention, whose matrix products are OpenBLAS's and which stores the whole seqlen x seqlen matrix.
 *
 *   bench_cpu [--quick] [--threads N]
 *   bench_cpu --memory SEQLEN [--threads N]     one row of the memory table, which the first form asks for
 *   bench_cpu --options [--threads N]           what masks and other options cost, beside the problem without
 *   bench_cpu --types                           16-bit types beside f32, on one thread
 *   bench_cpu --calls                           the steps of a small call, which bench/calls.exs makes from
 * Elixir
 *
 * GFLOP/s, the median of several runs. The forward counts 4 * batch * heads * seqlen^2 * head_dim operations,
 * half of it under a causal mask, the backward 2.5 times that. "peak" is the most that fused multiply-adds on
 * registers reached, on as many threads, in turn with our runs. Plain attention has its runs after those,
 * computes the products of a causal mask's hidden half too, and keeps p for its backward, which so has four
 * products where ours has five; its threads should sleep while the others work (bench.mk sees to that).
 */
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "../c_src/flash_attention.h"

#ifdef HAVE_OPENBLAS
#include <cblas.h>
void openblas_set_num_threads(int num_threads);

/* The vectors of libmvec, which math.h only declares where all of the program may reorder its sums. */
#pragma omp declare simd notinbranch
float expf(float x);
#endif

static double seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* OpenMP's and OpenBLAS's threads spin for a while when their work is done; what comes next must not share with
 * them. */
static void settle(void) { nanosleep(&(struct timespec){.tv_nsec = 200 * 1000 * 1000}, NULL); }

static int compare_doubles(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return values[count / 2];
}

static double largest(const double *values, int count) {
  double most = 0;
  for (int i = 0; i < count; i++) most = values[i] > most ? values[i] : most;
  return most;
}

/* ---- the processor's limit ------------------------------------------------------------------------- */

#define PEAK_ROUNDS 4000000L

/* Twelve independent chains of multiply-adds, enough to hide their latency; returns operations. */
#define DEFINE_PEAK(name, target, bytes)                                                           \
  target static double name(void) {                                                                \
    typedef float vec __attribute__((vector_size(bytes)));                                         \
    vec a0 = {1}, a1 = {2}, a2 = {3}, a3 = {4}, a4 = {5}, a5 = {6}, a6 = {7}, a7 = {8};            \
    vec a8 = {9}, a9 = {10}, a10 = {11}, a11 = {12}, b = 0.999f + (vec){0}, c = 0.001f + (vec){0}; \
    for (long i = 0; i < PEAK_ROUNDS; i++) {                                                       \
      a0 = a0 * b + c, a1 = a1 * b + c, a2 = a2 * b + c, a3 = a3 * b + c;                          \
      a4 = a4 * b + c, a5 = a5 * b + c, a6 = a6 * b + c, a7 = a7 * b + c;                          \
      a8 = a8 * b + c, a9 = a9 * b + c, a10 = a10 * b + c, a11 = a11 * b + c;                      \
    }                                                                                              \
    volatile float sink = (a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11)[0];        \
    (void)sink;                                                                                    \
    return 12.0 * 2 * (bytes / 4) * PEAK_ROUNDS;                                                   \
  }

DEFINE_PEAK(peak_plain, , 16)
#if defined(__x86_64__)
DEFINE_PEAK(peak_avx2, __attribute__((target("avx2,fma"))), 32)
DEFINE_PEAK(peak_avx512, __attribute__((target("avx512f"))), 64)
#endif

static double peak_gflops(int threads) {
  double (*peak)(void) = peak_plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    peak = peak_avx512;
  else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    peak = peak_avx2;
#endif
  double operations = 0, start = seconds();
#pragma omp parallel num_threads(threads) reduction(+ : operations)
  operations += peak();
  return operations / (seconds() - start) / 1e9;
}

/* ---- what is timed --------------------------------------------------------------------------------- */

typedef struct workload {
  fa_problem problem;
  fa_tensors tensors;
  fa_plan plans[2]; /* forward, backward */
  fa_execution executions[2];
  float *p, *ds; /* plain attention: [seqlen_q, seqlen_k] of every (batch, head) */
} workload;

static void *allocate(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) {
    fprintf(stderr, "bench: out of memory (%zu bytes)\n", bytes);
    exit(1);
  }
  return memory;
}

static float normal(uint64_t *state) {
  double sum = 0;
  for (int i = 0; i < 12; i++) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    sum += (double)(*state >> 11) * 0x1p-53;
  }
  return (float)(sum - 6);
}

/* The tensor's own bytes of random f32 values, rounded to the type. */
static fa_tensor random_tensor(const fa_problem *problem, fa_tensor_id id, uint64_t *state) {
  size_t bytes = (size_t)fa_tensor_shape(problem, id).size_bytes;
  size_t element = fa_dtype_bytes(fa_tensor_shape(problem, id).dtype);
  char *data = allocate(bytes);
  for (size_t i = 0; i < bytes / element; i++) {
    float value = normal(state);
    double wide = value;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (element == 1) data[i] = value > -1; /* a mask that hides one score of six */
    if (element == 8) memcpy(data + i * 8, &wide, 8);
    if (element == 4) memcpy(data + i * 4, &value, 4);
    if (element == 2) { /* bf16 by cutting; f16 from the same exponent range, near enough to normal */
      uint16_t half = problem->dtype == FA_DTYPE_BF16
                          ? (uint16_t)(bits >> 16)
                          : (uint16_t)((bits >> 16 & 0x8000) | 0x3000 | (bits >> 13 & 0xbff));
      memcpy(data + i * 2, &half, 2);
    }
  }
  return fa_tensor_contiguous(problem, id, data);
}

/* bands: those of the problem, or NULL where it has none. */
static workload prepare(const fa_problem *problem, const int32_t *bands) {
  workload w = {.problem = *problem};
  uint64_t state = 1;
  for (int pass = 0; pass < 2; pass++) {
    fa_error error;
    if (fa_plan_init(&w.plans[pass], problem, (fa_pass)pass, (fa_device){FA_DEVICE_CPU, 0}, &error)) {
      fprintf(stderr, "bench: %s\n", error.message);
      exit(1);
    }
    w.executions[pass].workspace_bytes = w.plans[pass].workspace_bytes;
    w.executions[pass].workspace = allocate(w.plans[pass].workspace_bytes);
    for (int id = 0; id < FA_NUM_TENSORS; id++)
      if (fa_tensor_role_in(problem, (fa_pass)pass, id) != FA_ROLE_NONE && !fa_tensor_at(&w.tensors, id)->data)
        *fa_tensor_at(&w.tensors, id) = random_tensor(problem, id, &state);
  }
  if (bands) memcpy(w.tensors.bands.data, bands, (size_t)fa_tensor_shape(problem, FA_TENSOR_BANDS).size_bytes);
  return w;
}

static void release(workload *w) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) free(fa_tensor_at(&w->tensors, id)->data);
  for (int pass = 0; pass < 2; pass++) free(w->executions[pass].workspace);
  free(w->p);
  free(w->ds);
}

static double time_flash(workload *w, int pass, int threads) {
  w->executions[pass].num_threads = threads;
  double start = seconds();
  if (fa_run(&w->plans[pass], &w->tensors, &w->executions[pass], NULL)) exit(1);
  return seconds() - start;
}

#ifdef HAVE_OPENBLAS
/* What stands between the products is compiled as our kernels are, for each instruction set, and chosen at run
 * time. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_ISA __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define FOR_EACH_ISA
#endif

/* row [n] becomes its softmax; the columns from num_visible on are hidden. */
FOR_EACH_ISA static void soften_row(float *row, int n, int num_visible) {
  float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
  for (int j = 0; j < num_visible; j++) largest = row[j] > largest ? row[j] : largest;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < num_visible; j++) {
    row[j] = expf(row[j] - largest);
    sum += row[j];
  }
  const float factor = 1 / sum;
#pragma omp simd
  for (int j = 0; j < num_visible; j++) row[j] *= factor;
  memset(row + num_visible, 0, (size_t)(n - num_visible) * sizeof *row);
}

/* dp [n] becomes ds = p * (dp - dot(o, dout)): p [n], o and dout [d] */
FOR_EACH_ISA static void differentiate_row(float *dp, const float *p, int n, const float *o, const float *dout,
                                           int d) {
  float delta = 0;
#pragma omp simd reduction(+ : delta)
  for (int x = 0; x < d; x++) delta += o[x] * dout[x];
#pragma omp simd
  for (int j = 0; j < n; j++) dp[j] = p[j] * (dp[j] - delta);
}

/* s = q . k^T, p = softmax(s), o = p . v; and dv = p^T . dout, dp = dout . v^T, dq = ds . k, dk = ds^T . q */
static double time_plain(workload *w, int pass, int threads) {
  const fa_problem *problem = &w->problem;
  int n = (int)problem->seqlen_q, d = (int)problem->head_dim, ld = (int)(problem->num_heads * d);
  bool causal = problem->window_right == 0;
  float scale = 1 / sqrtf((float)d);
  size_t square = (size_t)n * (size_t)n;
  if (!w->p) {
    w->p = allocate(square * sizeof(float) * (size_t)(problem->batch * problem->num_heads));
    w->ds = allocate(square * sizeof(float));
  }
  openblas_set_num_threads(threads);
  double start = seconds();
  for (int64_t pair = 0; pair < problem->batch * problem->num_heads; pair++) {
    int64_t offset = pair / problem->num_heads * n * ld + pair % problem->num_heads * d;
#define AT(name) ((float *)w->tensors.name.data + offset)
    float *p = w->p + square * (size_t)pair, *ds = w->ds;
    if (pass == 0) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, d, scale, AT(q), ld, AT(k), ld, 0, p, n);
#pragma omp parallel for num_threads(threads)
      for (int i = 0; i < n; i++) soften_row(p + (size_t)i * (size_t)n, n, causal ? i + 1 : n);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, d, n, 1, p, n, AT(v), ld, 0, AT(o), ld);
    } else {
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, d, n, 1, p, n, AT(dout), ld, 0, AT(dv), ld);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, d, 1, AT(dout), ld, AT(v), ld, 0, ds, n);
#pragma omp parallel for num_threads(threads)
      for (int i = 0; i < n; i++)
        differentiate_row(ds + (size_t)i * (size_t)n, p + (size_t)i * (size_t)n, n,
                          AT(o) + (size_t)i * (size_t)ld, AT(dout) + (size_t)i * (size_t)ld, d);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, d, n, scale, ds, n, AT(k), ld, 0, AT(dq), ld);
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, d, n, scale, ds, n, AT(q), ld, 0, AT(dk), ld);
    }
#undef AT
  }
  return seconds() - start;
}
#endif

/* ---- the tables ------------------------------------------------------------------------------------ */

static fa_problem square_problem(fa_dtype dtype, int64_t seqlen, int64_t heads, int64_t head_dim, bool causal) {
  fa_problem problem;
  fa_problem_init(&problem);
  problem.dtype = dtype;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = seqlen;
  problem.num_heads = problem.num_kv_heads = heads;
  problem.head_dim = head_dim;
  if (causal) problem.window_right = 0;
  return problem;
}

static double operations(const fa_problem *problem, int pass) {
  double full = 4.0 * (double)(problem->batch * problem->num_heads * problem->seqlen_q * problem->head_dim) *
                (double)problem->seqlen_k;
  return full * (problem->window_right == 0 ? 0.5 : 1) * (pass ? 2.5 : 1);
}

#define REPEATS 5

static void speed_row(const fa_problem *problem, const int *thread_counts, int num_counts) {
  workload w = prepare(problem, NULL);
  for (int pass = 0; pass < 2; pass++) {
    printf("| %s %s s%lld h%lld d%lld %s |", pass ? "backward" : "forward", fa_dtype_name(problem->dtype),
           (long long)problem->seqlen_q, (long long)problem->num_heads, (long long)problem->head_dim,
           problem->window_right == 0 ? "causal" : "full");
    double one_thread = 0;
    for (int i = 0; i < num_counts; i++) {
      int threads = thread_counts[i];
      double flash[REPEATS], peak[REPEATS], gflop = operations(problem, pass) / 1e9;
      settle();
      time_flash(&w, 0, threads); /* o and lse for the backward */
      for (int r = 0; r < REPEATS; r++) {
        peak[r] = peak_gflops(threads);
        settle();
        time_flash(&w, pass, threads); /* wakes the processors up: a virtual one can take milliseconds */
        flash[r] = time_flash(&w, pass, threads);
      }
#ifdef HAVE_OPENBLAS
      double plain[REPEATS];
      bool has_plain = problem->dtype == FA_DTYPE_F32;
      settle();
      if (has_plain) time_plain(&w, 0, threads); /* p for the backward */
      for (int r = 0; has_plain && r < REPEATS; r++) {
        time_plain(&w, pass, threads); /* warms up, as before our runs */
        plain[r] = time_plain(&w, pass, threads);
      }
#endif
      double rate = gflop / median(flash, REPEATS), limit = largest(peak, REPEATS);
      printf(" %.0f | %.0f %% |", rate, 100 * rate / limit);
#ifdef HAVE_OPENBLAS
      if (has_plain)
        printf(" %.0f |", gflop / median(plain, REPEATS));
      else
        printf(" - |");
#else
      printf(" - |");
#endif
      if (i == 0) one_thread = rate;
      if (i == num_counts - 1) printf(" %.2f |", rate / one_thread);
    }
    printf("\n");
    fflush(stdout);
  }
  release(&w);
}

/* Peak memory of both passes beyond what is resident once inputs and outputs are. Needs a process of its own.
 */
static int memory_row(int64_t seqlen, int threads) {
  fa_problem problem = square_problem(FA_DTYPE_F32, seqlen, 1, 64, false);
  workload w = prepare(&problem, NULL);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    void *data = fa_tensor_at(&w.tensors, (fa_tensor_id)id)->data;
    if (data) memset(data, 0, (size_t)fa_tensor_shape(&problem, (fa_tensor_id)id).size_bytes);
  }
  struct rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  double time[2] = {time_flash(&w, 0, threads), time_flash(&w, 1, threads)};
  getrusage(RUSAGE_SELF, &after);
  printf("| %lld | %.1f | %.1f | %.1f | %.1f | %.1f |\n", (long long)seqlen,
         (double)w.plans[0].workspace_bytes / 0x1p20, (double)w.plans[1].workspace_bytes / 0x1p20,
         (double)(after.ru_maxrss - before.ru_maxrss) / 1024, time[0], time[1]);
  release(&w);
  return 0;
}

/* ---- options beside none ------------------------------------------------------------------------- */

#define TURNS 7

/* A problem with something and the one without it, by turns: the time of one in that of the other, which should
 * be share, at most `most` times; most 0: there is no such mark. */
static void beside_row(const char *name, const fa_problem *with, const int32_t *bands,
                       const fa_problem *without, double share, double most, int threads) {
  workload w[2] = {prepare(with, bands), prepare(without, NULL)};
  double ratios[2], times[2][2];
  for (int i = 0; i < 2; i++) time_flash(&w[i], 0, threads); /* o and lse for the backward */
  for (int pass = 0; pass < 2; pass++) {
    double measured[2][TURNS], ratio[TURNS];
    for (int turn = 0; turn < TURNS; turn++) {
      for (int i = 0; i < 2; i++) {
        measured[i][turn] = time_flash(&w[i], pass, threads);
      }
      ratio[turn] = measured[0][turn] / measured[1][turn];
    }
    ratios[pass] = median(ratio, TURNS);
    for (int i = 0; i < 2; i++) times[i][pass] = 1000 * median(measured[i], TURNS);
  }
  printf("| %s | %.1f / %.1f | %.1f / %.1f | %.3f | %.3f / %.3f | %.2f / %.2f |", name, times[0][0],
         times[0][1], times[1][0], times[1][1], share, ratios[0], ratios[1], ratios[0] / share,
         ratios[1] / share);
  if (most == 0)
    printf(" - |\n");
  else
    printf(" %s |\n", ratios[0] <= most * share && ratios[1] <= most * share ? "met" : "MISSED");
  fflush(stdout);
  for (int i = 0; i < 2; i++) release(&w[i]);
}

#define MAX_BANDS 10000

static int32_t words[6 * MAX_BANDS];

static int64_t add_band(int64_t n, int64_t q_begin, int64_t q_end, int64_t k_begin, int64_t k_end,
                        int64_t right) {
  const int64_t band[6] = {q_begin, q_end, k_begin, k_end, INT32_MAX, right};
  for (int i = 0; i < 6; i++) words[6 * n + i] = (int32_t)band[i];
  return n + 1;
}

/* Cells that the bands show: of rows and columns that none share. */
static double area(int64_t num_bands, bool causal) {
  double cells = 0;
  for (int64_t n = 0; n < num_bands; n++) {
    const int32_t *band = words + 6 * n;
    for (int64_t i = band[0]; i < band[1]; i++) {
      const int64_t last = i - band[1] + band[3] + (causal ? 0 : (int64_t)band[5]);
      cells += (double)((last < band[3] - 1 ? last : band[3] - 1) - band[2] + 1);
    }
  }
  return cells;
}

static double full_area(const fa_problem *p) {
  const double n = (double)p->seqlen_q;
  return (double)p->bands_batch * (p->window_right == 0 ? n * (n + 1) / 2 : n * n);
}

static void mask_row(const char *name, fa_problem with, int64_t num_bands, double most, int threads) {
  fa_problem without = with;
  with.bands_batch = with.num_bands == 1 && with.batch > 1 ? with.batch : 1;
  with.num_bands = num_bands / with.bands_batch;
  double share = area(num_bands, with.window_right == 0) / full_area(&with);
  without.bands_batch = without.num_bands = 0;
  beside_row(name, &with, words, &without, share, most, threads);
}

/* A number from 1 to most. */
static int64_t draw(uint64_t *state, int64_t most) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return 1 + (int64_t)(*state >> 33) % most;
}

static void mask_rows(int threads) {
  for (int causal = 0; causal < 2; causal++) {
    char name[64];
    fa_problem padded = square_problem(FA_DTYPE_F32, 4096, 1, 64, causal);
    uint64_t state = 5;
    padded.batch = 8, padded.num_bands = 1;
    for (int64_t b = 0; b < padded.batch; b++) {
      const int64_t length = draw(&state, padded.seqlen_q);
      add_band(b, 0, length, 0, length, INT32_MAX);
    }
    snprintf(name, sizeof name, "a padded batch, 8 x 4096, %s", causal ? "causal" : "full");
    mask_row(name, padded, padded.batch, 1.1, threads);

    const fa_problem packed = square_problem(FA_DTYPE_F32, 8192, 2, 64, causal);
    int64_t n = 0, at = 0;
    while (at < packed.seqlen_q) {
      int64_t end = at + 100 + draw(&state, 900);
      if (end > packed.seqlen_q - 100) end = packed.seqlen_q;
      n = add_band(n, at, end, at, end, INT32_MAX);
      at = end;
    }
    snprintf(name, sizeof name, "%d packed sequences in 8192, %s", (int)n, causal ? "causal" : "full");
    mask_row(name, packed, n, 1.1, threads);

    mask_row(causal ? "one band, causal within" : "one band, full", packed,
             add_band(0, 0, 8192, 0, 8192, INT32_MAX), 1.02, threads);
  }
  const fa_problem large = square_problem(FA_DTYPE_F32, 8192, 2, 64, false);
  int64_t n = 0;
  for (int64_t at = 0; at < 8192; at += 1024) n = add_band(n, at, at + 1024, 0, at + 1024, INT32_MAX);
  mask_row("block causal, 8 blocks of 1024", large, n, 1.1, threads);
  n = add_band(0, 0, 8192, 0, 3000, INT32_MAX);
  mask_row("a prefix of 3000 in 8192", large, add_band(n, 3000, 8192, 3000, 8192, 0), 1.1, threads);
  for (n = 0; n < MAX_BANDS;) n = add_band(n, 2 * n, 2 * n + 2, 2 * n, 2 * n + 2, INT32_MAX);
  fa_problem many = square_problem(FA_DTYPE_F32, 2 * MAX_BANDS, 1, 64, true), window = many;
  many.bands_batch = 1, many.num_bands = n, window.window_left = 1;
  beside_row("10,000 packed sequences of 2, causal, beside a window of 2", &many, words, &window, 0.75, 0,
             threads);
}

/* What acts on scores. */
static void score_rows(int64_t head_dim, int threads) {
  const fa_problem plain = square_problem(FA_DTYPE_F32, 2048, 4, head_dim, false);
  const int64_t s = plain.seqlen_q, h = plain.num_heads;
  const struct {
    const char *name;
    int64_t heads, rows;
    fa_dtype dtype;
    int32_t constant;
  } biases[] = {{"a bias of all scores", h, s, FA_DTYPE_F32, 0},
                {"the same without its gradient", h, s, FA_DTYPE_F32, 1},
                {"a bias of keys", 1, 1, FA_DTYPE_F32, 0},
                {"a mask of u8, all heads'", 1, s, FA_DTYPE_U8, 0}};
  char name[96];
  for (size_t i = 0; i < sizeof biases / sizeof *biases; i++) {
    fa_problem with = plain;
    with.bias_batch = 1, with.bias_heads = biases[i].heads, with.bias_rows = biases[i].rows;
    with.bias_dtype = biases[i].dtype, with.constant_bias = biases[i].constant;
    snprintf(name, sizeof name, "%s, 2048, head_dim %d", biases[i].name, (int)head_dim);
    beside_row(name, &with, NULL, &plain, 1, 1.1, threads);
  }
  fa_problem slopes = plain, dropout = plain;
  slopes.alibi_batch = 1, dropout.dropout = 0.1, dropout.num_seed_words = 2;
  snprintf(name, sizeof name, "ALiBi, 2048, head_dim %d", (int)head_dim);
  beside_row(name, &slopes, NULL, &plain, 1, 0, threads);
  snprintf(name, sizeof name, "dropout, 2048, head_dim %d", (int)head_dim);
  beside_row(name, &dropout, NULL, &plain, 1, 1.4, threads);
}

static int option_rows(int threads) {
  fa_device_info info;
  fa_device_get_info((fa_device){FA_DEVICE_CPU, 0}, &info, NULL);
  printf(
      "# What masks and what acts on scores cost on the CPU\n\n"
      "%s, kernels %s, %d threads, f32, of masks head_dim 64. Milliseconds forward / backward, with and "
      "without by "
      "turns; "
      "the share is that\nof the visible cells; the ratios are medians of %d turns.\n\n"
      "| case | with | without | share | time, of that without | over the share | mark |\n"
      "|---|---|---|---|---|---|---|\n",
      info.name, info.features, threads, TURNS);
  mask_rows(threads);
  score_rows(64, threads);
  score_rows(128, threads);
  return 0;
}

/* ---- types beside f32 ------------------------------------------------------------------------------ */

static double processor_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* One problem in every type, by turns: rates of the medians, and medians of the ratios of turns. */
static void types_row(int64_t seqlen, int64_t head_dim, bool causal) {
  enum { NUM_TYPES = 3 };
  static const fa_dtype dtypes[NUM_TYPES] = {FA_DTYPE_F32, FA_DTYPE_BF16, FA_DTYPE_F16};
  workload w[NUM_TYPES];
  for (int t = 0; t < NUM_TYPES; t++) {
    const fa_problem problem = square_problem(dtypes[t], seqlen,
                                              seqlen < 1024   ? 8
                                              : seqlen < 4096 ? 2
                                                              : 1,
                                              head_dim, causal);
    w[t] = prepare(&problem, NULL);
    time_flash(&w[t], 0, 1); /* o and lse for the backward */
  }
  for (int pass = 0; pass < 2; pass++) {
    double measured[NUM_TYPES][TURNS], ratio[NUM_TYPES][TURNS];
    for (int turn = 0; turn < TURNS; turn++)
      for (int t = 0; t < NUM_TYPES; t++) {
        const double start = processor_seconds();
        time_flash(&w[t], pass, 1);
        measured[t][turn] = processor_seconds() - start;
        ratio[t][turn] = measured[0][turn] / measured[t][turn];
      }
    printf("| %s s%lld d%lld %s |", pass ? "backward" : "forward", (long long)seqlen, (long long)head_dim,
           causal ? "causal" : "full");
    for (int t = 0; t < NUM_TYPES; t++)
      printf(" %.0f |", operations(&w[t].problem, pass) / 1e9 / median(measured[t], TURNS));
    for (int t = 1; t < NUM_TYPES; t++) printf(" %.2f |", median(ratio[t], TURNS));
    printf("\n");
    fflush(stdout);
  }
  for (int t = 0; t < NUM_TYPES; t++) release(&w[t]);
}

static int type_rows(void) {
  fa_device_info info;
  fa_device_get_info((fa_device){FA_DEVICE_CPU, 0}, &info, NULL);
  printf(
      "# 16-bit types beside f32 on the CPU\n\n%s, kernels %s, 1 thread. GFLOP/s by processor time, by turns; "
      "medians of %d.\n\n"
      "| case | f32 | bf16 | f16 | bf16, of f32 | f16, of f32 |\n|---|---|---|---|---|---|\n",
      info.name, info.features, TURNS);
  for (int64_t head_dim = 64; head_dim <= 128; head_dim *= 2)
    for (int causal = 0; causal < 2; causal++)
      for (int64_t seqlen = 512; seqlen <= 4096; seqlen *= 2) types_row(seqlen, head_dim, causal);
  return 0;
}

/* ---- a small call ---------------------------------------------------------------------------------- */

static int call_rows(void) {
  enum { NUM_STEPS = 3, CALLS = 4000 };
  static const char *const names[NUM_STEPS] = {"`fa_plan_init`", "`fa_run`", "`fa_run_anywhere`"};
  static double measured[NUM_STEPS][CALLS];
  const fa_problem problem = square_problem(FA_DTYPE_F32, 16, 2, 16, true);
  workload w = prepare(&problem, NULL);
  for (int i = 0; i < CALLS; i++) {
    const double begin = seconds();
    if (fa_plan_init(&w.plans[0], &problem, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CPU, 0}, NULL)) return 1;
    measured[0][i] = seconds() - begin;
    measured[1][i] = time_flash(&w, 0, 0);
    const double last = seconds();
    if (fa_run_anywhere(&w.plans[0], &w.tensors, NULL, NULL, NULL)) return 1;
    measured[2][i] = seconds() - last;
  }
  printf("| step | median, us | least, us |\n|---|---|---|\n");
  for (int s = 0; s < NUM_STEPS; s++) {
    const double middle = median(measured[s], CALLS);
    printf("| %s | %.1f | %.1f |\n", names[s], 1e6 * middle, 1e6 * measured[s][0]);
  }
  release(&w);
  return 0;
}

int main(int argc, char **argv) {
  bool quick = false, options = false, types = false, calls = false;
  int64_t memory_seqlen = 0;
  int threads = omp_get_max_threads();
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--quick") == 0)
      quick = true;
    else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
      threads = atoi(argv[++i]);
    else if (strcmp(argv[i], "--options") == 0)
      options = true;
    else if (strcmp(argv[i], "--types") == 0)
      types = true;
    else if (strcmp(argv[i], "--calls") == 0)
      calls = true;
    else if (strcmp(argv[i], "--memory") == 0 && i + 1 < argc)
      memory_seqlen = atoll(argv[++i]);
    else
      return fprintf(stderr,
                     "usage: %s [--quick] [--options] [--types] [--calls] [--memory SEQLEN] [--threads N]\n",
                     argv[0]),
             2;
  }
  if (memory_seqlen) return memory_row(memory_seqlen, threads);
  if (options) return option_rows(threads);
  if (types) return type_rows();
  if (calls) return call_rows();
  fa_device_info info;
  fa_device_get_info((fa_device){FA_DEVICE_CPU, 0}, &info, NULL);
  printf("# The CPU backend\n\n%s, kernels %s, 1 and %d threads. GFLOP/s are medians of %d.\n\n", info.name,
         info.features, threads, REPEATS);
  printf(
      "| case | 1 thread | of peak | plain (OpenBLAS) | %d threads | of peak | plain (OpenBLAS) | speed-up |\n"
      "|---|---|---|---|---|---|---|---|\n",
      threads);
  int counts[] = {1, threads};
  static const int64_t dims[] = {64, 128};
  for (int d = 0; d < 2; d++)
    for (int causal = 0; causal < 2; causal++) {
      fa_problem problem = square_problem(FA_DTYPE_F32, 2048, quick ? 2 : 256 / dims[d] * 2, dims[d], causal);
      speed_row(&problem, counts, 2);
    }
  if (!quick) {
    static const int64_t others[][4] = {/* dtype, seqlen, heads, head_dim */
                                        {FA_DTYPE_F32, 512, 8, 64},   {FA_DTYPE_F32, 8192, 2, 64},
                                        {FA_DTYPE_F32, 2048, 2, 256}, {FA_DTYPE_F32, 2048, 1, 64},
                                        {FA_DTYPE_BF16, 2048, 8, 64}, {FA_DTYPE_F16, 2048, 8, 64},
                                        {FA_DTYPE_F64, 2048, 4, 64}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
      fa_problem problem =
          square_problem((fa_dtype)others[i][0], others[i][1], others[i][2], others[i][3], false);
      speed_row(&problem, counts, 2);
    }
  }
  printf(
      "\nMemory, f32, one head, head_dim 64, %d threads: workspaces, and the growth of the process beyond its "
      "inputs and\noutputs over both passes, in MiB; seconds.\n\n",
      threads);
  printf(
      "| seqlen | forward workspace | backward workspace | growth | forward s | backward s |\n"
      "|---|---|---|---|---|---|\n");
  fflush(stdout);
  for (int64_t seqlen = 16384; seqlen <= (quick ? 16384 : 65536); seqlen *= 2) {
    char command[512];
    snprintf(command, sizeof command, "'%s' --memory %lld --threads %d", argv[0], (long long)seqlen, threads);
    if (system(command) != 0) return 1;
  }
  return 0;
}
