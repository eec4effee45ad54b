/*
 * Template: the backward pass, FlashAttention-2's (Dao 2023, algorithm 2), without atomic additions and with
 * the same bits for any number of threads.
 *
 *     q, o, dout, dq [batch, seqlen_q, num_heads, head_dim]     k, v, dk, dv [batch, seqlen_k, num_kv_heads,
 * head_dim] lse [batch, num_heads, seqlen_q]                          sink, dsink [num_sinks, num_heads]
 *
 * Three phases: delta = rowsum(o * dout), and gradients cleared; the cells; 16-bit gradients rounded, and
 * dsink.
 *
 * Cells. In every group, that is (batch, key/value head), blocks of q and of k are dealt out to `segments`
 * hands each. Cell (t, step) multiplies the blocks of hand t of k with those of hand (t + step) mod segments of
 * q. The cells of one step share no hand, so they may run at the same time and still add to dq, dk and dv
 * directly; a cell waits for the two cells of the step before that held its hands. Tasks are numbered by step,
 * so a cell waits only for lower numbers, which have started: it cannot wait for ever. Dealing out blocks in
 * turn, rather than in runs, keeps the cells of a causal mask equally large.
 */

#define PREPARE_ROWS 128 /* rows of a task of the first and the last phase */

typedef struct T(backward_scratch) {
  REAL *k_transposed, *v_transposed; /* [BLOCK / NR][head_dim][NR] */
  REAL *k_panels;                    /* [head_dim / NR][BLOCK][NR] */
  REAL *q_rows, *dout_rows;          /* [BLOCK][head_dim] */
  REAL *q_panels, *dout_panels;      /* [head_dim / NR][BLOCK][NR] */
  REAL *p, *ds;                      /* [BLOCK][BLOCK] */
  REAL *dq, *dk, *dv;                /* [BLOCK][padded head_dim] */
  REAL *buffer;                      /* [head_dim] */
} T(backward_scratch);

static T(backward_scratch) T(backward_carve)(carver *carver, const fa_problem *problem) {
  int64_t rows = BLOCK * problem->head_dim * (int64_t)sizeof(REAL);
  int64_t panels = BLOCK * round_up(problem->head_dim, NR) * (int64_t)sizeof(REAL);
  int64_t square = BLOCK * BLOCK * (int64_t)sizeof(REAL);
  T(backward_scratch) s;
  s.k_transposed = carve(carver, rows);
  s.v_transposed = carve(carver, rows);
  s.k_panels = carve(carver, panels);
  s.q_rows = carve(carver, rows);
  s.dout_rows = carve(carver, rows);
  s.q_panels = carve(carver, panels);
  s.dout_panels = carve(carver, panels);
  s.p = carve(carver, square);
  s.ds = carve(carver, square);
  s.dq = carve(carver, panels);
  s.dk = carve(carver, panels);
  s.dv = carve(carver, panels);
  s.buffer = carve(carver, problem->head_dim * (int64_t)sizeof(REAL));
  return s;
}

static size_t T(backward_scratch_bytes)(const fa_problem *problem) {
  carver sizes = {0};
  T(backward_carve)(&sizes, problem);
  return sizes.used;
}

/* Memory that all tasks share. Gradients of 16-bit types are summed here in f32. */
typedef struct T(backward_shared) {
  REAL *delta;        /* [batch, num_heads, seqlen_q] */
  atomic_int *steps;  /* [groups][segments]: how many steps a hand of k has behind it */
  REAL *dq, *dk, *dv; /* as the tensors, contiguous; NULL where REAL is the tensors' own type */
} T(backward_shared);

static int64_t T(num_groups)(const fa_problem *problem) { return problem->batch * problem->num_kv_heads; }

/* As many hands as keep some 32 cells of a step for the threads to share, but two blocks in a hand, so that
 * packing k pays. A choice by the problem alone: the order of summation must not depend on the threads. */
static int64_t T(num_segments)(const fa_problem *problem) {
  int64_t blocks =
      ceil_div(problem->seqlen_q > problem->seqlen_k ? problem->seqlen_q : problem->seqlen_k, BLOCK);
  int64_t wanted = ceil_div(32, T(num_groups)(problem) + 1);
  int64_t segments = min_of(wanted, ceil_div(blocks, 2));
  return segments < 1 ? 1 : segments;
}

/* Whether gradients are summed in shared memory, and rounded into the tensors at the end. */
static bool T(sums_apart)(const fa_problem *problem) { return fa_dtype_bytes(problem->dtype) < sizeof(REAL); }

static T(backward_shared) T(backward_carve_shared)(carver *carver, const fa_problem *problem) {
  T(backward_shared) s = {0};
  s.delta = carve(carver, problem->batch * problem->num_heads * problem->seqlen_q * (int64_t)sizeof(REAL));
  s.steps = carve(carver, T(num_groups)(problem) * T(num_segments)(problem) * (int64_t)sizeof(atomic_int));
  if (T(sums_apart)(problem)) {
    int64_t queries = problem->batch * problem->seqlen_q * problem->num_heads * problem->head_dim;
    int64_t keys = problem->batch * problem->seqlen_k * problem->num_kv_heads * problem->head_dim;
    s.dq = carve(carver, queries * (int64_t)sizeof(REAL));
    s.dk = carve(carver, keys * (int64_t)sizeof(REAL));
    s.dv = carve(carver, keys * (int64_t)sizeof(REAL));
  }
  return s;
}

static size_t T(backward_shared_bytes)(const fa_problem *problem) {
  carver sizes = {0};
  T(backward_carve_shared)(&sizes, problem);
  return sizes.used;
}

/* Where the rows of a gradient are summed: in the tensor itself, or in shared memory. */
typedef struct T(sum_rows) {
  REAL *data;
  int64_t stride;
} T(sum_rows);

static T(sum_rows)
    T(sum_rows_of)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, int64_t batch, int64_t head) {
  fa_tensor tensor = *fa_tensor_at((fa_tensors *)job->tensors, id);
  if (sums) tensor = fa_tensor_contiguous(job->problem, id, sums);
  return (T(sum_rows)){(REAL *)T(first_row)(&tensor, sizeof(REAL), batch, head), tensor.stride_row};
}

/* to[first + r] += from[r] */
static void T(add_rows)(T(sum_rows) to, int64_t first, int64_t count, int64_t columns, const REAL *from) {
  int64_t padded = round_up(columns, NR);
  for (int64_t r = 0; r < count; r++) {
    REAL *row = to.data + (first + r) * to.stride;
    for (int64_t x = 0; x < columns; x++) row[x] += from[r * padded + x];
  }
}

/* ---- the first phase ------------------------------------------------------------------------------ */

/* A run of rows of one (batch, head), of dq or, in the tasks after those, of dk and dv. */
typedef struct T(run) {
  bool of_queries;
  int64_t batch, head, begin, end;
} T(run);

static int64_t T(num_query_runs)(const fa_problem *problem) {
  return ceil_div(problem->seqlen_q, PREPARE_ROWS) * problem->batch * problem->num_heads;
}

static int64_t T(num_runs)(const fa_problem *problem) {
  return T(num_query_runs)(problem) + ceil_div(problem->seqlen_k, PREPARE_ROWS) * T(num_groups)(problem);
}

static T(run) T(run_of)(const fa_problem *problem, int64_t task) {
  int64_t num_query_runs = T(num_query_runs)(problem);
  T(run) run = {.of_queries = task < num_query_runs};
  if (!run.of_queries) task -= num_query_runs;
  int64_t heads = run.of_queries ? problem->num_heads : problem->num_kv_heads;
  int64_t seqlen = run.of_queries ? problem->seqlen_q : problem->seqlen_k;
  run.head = task % heads;
  run.batch = task / heads % problem->batch;
  run.begin = task / heads / problem->batch * PREPARE_ROWS;
  run.end = min_of(run.begin + PREPARE_ROWS, seqlen);
  return run;
}

static void T(clear_rows)(T(sum_rows) rows, T(run) run, int64_t columns) {
  for (int64_t r = run.begin; r < run.end; r++)
    memset(rows.data + r * rows.stride, 0, (size_t)columns * sizeof(REAL));
}

static void T(prepare_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim;
  T(backward_shared) shared = T(backward_carve_shared)(&(carver){.base = job->shared}, problem);
  T(run) run = T(run_of)(problem, task);
  if (task == 0)
    for (int64_t i = 0; i < T(num_groups)(problem) * T(num_segments)(problem); i++)
      atomic_init(&shared.steps[i], 0);
  if (!run.of_queries) {
    T(clear_rows)(T(sum_rows_of)(job, FA_TENSOR_DK, shared.dk, run.batch, run.head), run, d);
    T(clear_rows)(T(sum_rows_of)(job, FA_TENSOR_DV, shared.dv, run.batch, run.head), run, d);
    return;
  }
  T(clear_rows)(T(sum_rows_of)(job, FA_TENSOR_DQ, shared.dq, run.batch, run.head), run, d);
  T(backward_scratch) s = T(backward_carve)(&(carver){.base = scratch}, problem);
  T(rows) o = T(rows_of)(job, FA_TENSOR_O, run.batch, run.head);
  T(rows) dout = T(rows_of)(job, FA_TENSOR_DOUT, run.batch, run.head);
  for (int64_t r = run.begin; r < run.end; r++) {
    const REAL *o_row = T(load_row)(o, r, d, s.q_rows), *dout_row = T(load_row)(dout, r, d, s.dout_rows);
    REAL sum = 0;
    for (int64_t p = 0; p < d; p++) sum += o_row[p] * dout_row[p];
    shared.delta[T(stat_index)(problem, run.batch, run.head, r)] = sum;
  }
}

/* ---- the cells ------------------------------------------------------------------------------------- */

/* s and dp become p and ds, both [BLOCK][BLOCK]:  p = exp(s - lse),  ds = scale * p * (dp - delta) */
INLINE void T(differentiate_scores)(const fa_problem *problem, const REAL *lse, const REAL *delta,
                                    int64_t first_row, int64_t num_rows, int64_t first_column,
                                    int64_t num_columns, REAL *p, REAL *ds, bool masked, bool capped) {
  REAL scale = (REAL)problem->scale, softcap = (REAL)problem->softcap;
  T(mask) lanes;
  for (int v = 0; v < LANES; v++) lanes[v] = v;
  for (int64_t i = 0; i < num_rows; i++) {
    /* A row that sees nothing has lse = -inf, and exp(-inf - -inf) would be NaN. */
    REAL origin = lse[i] < LOWEST ? 0 : lse[i];
    fa_range visible = fa_visible_columns(problem, first_row + i);
    INT begin = (INT)(visible.begin < first_column ? 0 : min_of(visible.begin - first_column, BLOCK));
    INT end = (INT)(visible.end < first_column ? 0 : min_of(visible.end - first_column, BLOCK));
    for (int64_t j = 0; j < num_columns; j += LANES) {
      T(vec) *p_ij = (T(vec) *)(p + i * BLOCK + j), *ds_ij = (T(vec) *)(ds + i * BLOCK + j);
      T(vec) s = *p_ij, slope = T(splat)(scale);
      if (capped) {
        T(vec) t = T(tanh)(s / softcap);
        s = softcap * t;
        slope *= 1 - t * t;
      }
      /* s exceeds lse by rounding only, unless lse is not this problem's: inf then, as exp has it. */
      *p_ij = T(exp)(T(min)(T(splat)(EXP_HIGHEST), s - origin));
      *ds_ij = *p_ij * (*ds_ij - delta[i]) * slope;
      if (masked) {
        T(mask) index = lanes + (INT)j, inside = (index >= begin) & (index < end);
        *p_ij = T(select)(inside, *p_ij, T(splat)(0));
        *ds_ij = T(select)(inside, *ds_ij, T(splat)(0));
      }
    }
  }
}

/* One block of q of one head with the packed block of k: adds to dq in memory, and to dk and dv in s. */
static void T(backward_blocks)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) s,
                               int64_t batch, int64_t head, int64_t row, int64_t column, int64_t num_columns) {
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim, padded = round_up(d, NR), panel = BLOCK * NR;
  int64_t num_rows = min_of(BLOCK, problem->seqlen_q - row);
  fa_range first = fa_visible_columns(problem, row), last = fa_visible_columns(problem, row + num_rows - 1);
  bool masked = last.begin > column || first.end < column + num_columns;
  int64_t stats = T(stat_index)(problem, batch, head, row);
  const REAL *lse = (const REAL *)job->tensors->lse.data + stats, *delta = shared->delta + stats;
  T(rows) q = T(rows_of)(job, FA_TENSOR_Q, batch, head), dout = T(rows_of)(job, FA_TENSOR_DOUT, batch, head);
  give_way();

  T(pack_rows)(q, row, num_rows, d, s.q_rows);
  T(pack_rows)(dout, row, num_rows, d, s.dout_rows);
  T(pack_panels)(q, row, num_rows, d, s.q_panels, s.buffer);
  T(pack_panels)(dout, row, num_rows, d, s.dout_panels, s.buffer);

  /* s = scale * q . k^T and dp = dout . v^T, then p and ds in their places */
  T(product)
  (num_rows, num_columns, d, s.q_rows, d, 1, s.k_transposed, d * NR, s.p, BLOCK, STORE, (REAL)problem->scale,
   NULL);
  T(product)(num_rows, num_columns, d, s.dout_rows, d, 1, s.v_transposed, d * NR, s.ds, BLOCK, STORE, 1, NULL);
#define DIFFERENTIATE(masked, capped) \
  T(differentiate_scores)(problem, lse, delta, row, num_rows, column, num_columns, s.p, s.ds, masked, capped)
  if (problem->softcap != 0)
    DIFFERENTIATE(true, true);
  else if (masked)
    DIFFERENTIATE(true, false);
  else
    DIFFERENTIATE(false, false);
#undef DIFFERENTIATE

  /* dv += p^T . dout,  dk += ds^T . q,  dq += ds . k */
  T(product)(num_columns, d, num_rows, s.p, 1, BLOCK, s.dout_panels, panel, s.dv, padded, ADD, 0, NULL);
  T(product)(num_columns, d, num_rows, s.ds, 1, BLOCK, s.q_panels, panel, s.dk, padded, ADD, 0, NULL);
  T(product)(num_rows, d, num_columns, s.ds, BLOCK, 1, s.k_panels, panel, s.dq, padded, STORE, 1, NULL);
  T(add_rows)(T(sum_rows_of)(job, FA_TENSOR_DQ, shared->dq, batch, head), row, num_rows, d, s.dq);
}

/* One block of k of one group with the blocks of q, of every head of the group, of one hand. */
static void T(backward_column)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) s,
                               int64_t batch, int64_t kv_head, int64_t column, int64_t hand, int64_t segments) {
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim, heads = problem->num_heads / problem->num_kv_heads;
  int64_t num_columns = min_of(BLOCK, problem->seqlen_k - column);
  int64_t begin = fa_visible_rows(problem, column).begin;
  int64_t end = fa_visible_rows(problem, column + num_columns - 1).end;
  /* The hand's first block that reaches begin: blocks hand, hand + segments, ... */
  int64_t first = begin / BLOCK;
  first += ((hand - first) % segments + segments) % segments;
  if (first * BLOCK >= end) return;

  T(rows) k = T(rows_of)(job, FA_TENSOR_K, batch, kv_head), v = T(rows_of)(job, FA_TENSOR_V, batch, kv_head);
  size_t gradient_bytes = (size_t)(BLOCK * round_up(d, NR)) * sizeof(REAL);
  T(pack_transposed)(k, column, num_columns, d, s.k_transposed, s.buffer);
  T(pack_transposed)(v, column, num_columns, d, s.v_transposed, s.buffer);
  T(pack_panels)(k, column, num_columns, d, s.k_panels, s.buffer);
  memset(s.dk, 0, gradient_bytes);
  memset(s.dv, 0, gradient_bytes);
  for (int64_t head = kv_head * heads; head < (kv_head + 1) * heads; head++)
    for (int64_t row = first * BLOCK; row < end; row += segments * BLOCK)
      T(backward_blocks)(job, shared, s, batch, head, row, column, num_columns);
  T(add_rows)(T(sum_rows_of)(job, FA_TENSOR_DK, shared->dk, batch, kv_head), column, num_columns, d, s.dk);
  T(add_rows)(T(sum_rows_of)(job, FA_TENSOR_DV, shared->dv, batch, kv_head), column, num_columns, d, s.dv);
}

static int64_t T(num_cells)(const fa_problem *problem) {
  if (problem->seqlen_q == 0 || problem->seqlen_k == 0) return 0; /* nor has the first phase a task then */
  return T(num_groups)(problem) * T(num_segments)(problem) * T(num_segments)(problem);
}

static void T(cell_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  int64_t segments = T(num_segments)(problem), num_groups = T(num_groups)(problem);
  int64_t step = task / (num_groups * segments), group = task / segments % num_groups, t = task % segments;
  T(backward_shared) shared = T(backward_carve_shared)(&(carver){.base = job->shared}, problem);
  T(backward_scratch) s = T(backward_carve)(&(carver){.base = scratch}, problem);

  /* The hand of q was with hand t + 1 of k in the step before. */
  atomic_int *steps = shared.steps + group * segments;
  wait_until(&steps[t], (int)step);
  wait_until(&steps[(t + 1) % segments], (int)step);
  for (int64_t column = t * BLOCK; column < problem->seqlen_k; column += segments * BLOCK) T(backward_column)
  (job, &shared, s, group / problem->num_kv_heads, group % problem->num_kv_heads, column, (t + step) % segments,
   segments);
  atomic_store_explicit(&steps[t], (int)step + 1, memory_order_release);
}

/* ---- the last phase -------------------------------------------------------------------------------- */

static int64_t T(num_finish_tasks)(const fa_problem *problem) {
  return (problem->num_sinks ? problem->num_heads : 0) + (T(sums_apart)(problem) ? T(num_runs)(problem) : 0);
}

/* dsink[t, head] = -sum_{b,i} exp(sink[t, head] - lse[i]) * delta[i] */
static void T(finish_sinks)(const fa_cpu_job *job, const REAL *delta, int64_t head) {
  const fa_problem *problem = job->problem;
  const REAL *lse = job->tensors->lse.data;
  float *dsink = job->tensors->dsink.data;
  for (int64_t t = 0; t < problem->num_sinks; t++) {
    REAL sink = T(load_sink)(job, t, head);
    double sum = 0;
    for (int64_t batch = 0; batch < problem->batch; batch++)
      for (int64_t i = 0; i < problem->seqlen_q; i++) {
        int64_t row = T(stat_index)(problem, batch, head, i);
        REAL p =
            sink == -INFINITY ? 0 : T(first)(T(exp)(T(min)(T(splat)(EXP_HIGHEST), T(splat)(sink - lse[row]))));
        sum += (double)(p * delta[row]);
      }
    dsink[t * problem->num_heads + head] = (float)-sum;
  }
}

static void T(finish_rows)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, T(run) run) {
  T(sum_rows) from = T(sum_rows_of)(job, id, sums, run.batch, run.head);
  T(rows) to = T(rows_of)(job, id, run.batch, run.head);
  for (int64_t r = run.begin; r < run.end; r++)
    T(store_row)(to, r, job->problem->head_dim, from.data + r * from.stride);
}

static void T(finish_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  (void)scratch;
  const fa_problem *problem = job->problem;
  T(backward_shared) shared = T(backward_carve_shared)(&(carver){.base = job->shared}, problem);
  if (problem->num_sinks && task < problem->num_heads) {
    T(finish_sinks)(job, shared.delta, task);
    return;
  }
  T(run) run = T(run_of)(problem, task - (problem->num_sinks ? problem->num_heads : 0));
  if (run.of_queries) {
    T(finish_rows)(job, FA_TENSOR_DQ, shared.dq, run);
  } else {
    T(finish_rows)(job, FA_TENSOR_DK, shared.dk, run);
    T(finish_rows)(job, FA_TENSOR_DV, shared.dv, run);
  }
}
