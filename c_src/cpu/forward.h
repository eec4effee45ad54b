/*
 * Template: the forward pass, FlashAttention-2's (Dao 2023, algorithm 1) with the scores transposed.
 *
 *     q, o [batch, seqlen_q, num_heads, head_dim]   k, v [batch, seqlen_k, num_kv_heads, head_dim]
 *     lse [batch, num_heads, seqlen_q]              sink [num_sinks, num_heads]
 *
 * A task is up to FORWARD_ROWS query rows of one (batch, head). It walks over the blocks of k and v that its
 * rows see; for each block and each strip of rows it computes
 *
 *     st[BLOCK, STRIP]     = scale * k . q^T          rows of q lie along the vectors, so that maxima and
 *     m', p = exp(st - m')                            sums over k need no step across lanes
 *     o[STRIP, head_dim]   = exp(m - m') * o + p^T . v
 *
 * What a row gets depends neither on the rows of its task nor on the threads.
 */

#define FORWARD_ROWS (4 * STRIP)

typedef struct T(forward_scratch) {
  REAL *q;      /* [FORWARD_ROWS / NR][head_dim][NR] */
  REAL *k;      /* [BLOCK][head_dim] */
  REAL *v;      /* [head_dim / NR][BLOCK][NR] */
  REAL *scores; /* [BLOCK][STRIP] */
  REAL *o;      /* [FORWARD_ROWS][padded head_dim] */
  REAL *m, *l;  /* [FORWARD_ROWS]: the largest score so far, and the sum of exp(score - m) */
  REAL *decay;  /* [STRIP] */
  REAL *buffer; /* [head_dim] */
} T(forward_scratch);

static T(forward_scratch) T(forward_carve)(carver *carver, const fa_problem *problem) {
  int64_t d = problem->head_dim, padded = round_up(d, NR), element = sizeof(REAL);
  T(forward_scratch) s;
  s.q = carve(carver, FORWARD_ROWS * d * element);
  s.k = carve(carver, BLOCK * d * element);
  s.v = carve(carver, BLOCK * padded * element);
  s.scores = carve(carver, BLOCK * STRIP * element);
  s.o = carve(carver, FORWARD_ROWS * padded * element);
  s.m = carve(carver, FORWARD_ROWS * element);
  s.l = carve(carver, FORWARD_ROWS * element);
  s.decay = carve(carver, STRIP * element);
  s.buffer = carve(carver, d * element);
  return s;
}

static size_t T(forward_scratch_bytes)(const fa_problem *problem) {
  carver sizes = {0};
  T(forward_carve)(&sizes, problem);
  return sizes.used;
}

/* Fewer rows a task where there would be too few tasks to share out. */
static int64_t T(forward_task_rows)(const fa_problem *problem) {
  int64_t tasks = ceil_div(problem->seqlen_q, FORWARD_ROWS) * problem->batch * problem->num_heads;
  return tasks < 64 ? FORWARD_ROWS / 2 : FORWARD_ROWS;
}

static int64_t T(forward_num_tasks)(const fa_problem *problem) {
  return ceil_div(problem->seqlen_q, T(forward_task_rows)(problem)) * problem->batch * problem->num_heads;
}

/* st = softcap * tanh(st / softcap) */
static void T(cap_scores)(REAL *scores, int64_t count, REAL softcap) {
  for (int64_t i = 0; i < count; i += LANES) {
    T(vec) *s = (T(vec) *)(scores + i);
    *s = softcap * T(tanh)(*s / softcap);
  }
}

/* st[j, i] = -inf where column first_column + j is not visible from row first_row + i */
static void T(mask_scores)(const fa_problem *problem, REAL *scores, int64_t first_row, int64_t num_rows,
                           int64_t first_column, int64_t num_columns) {
  INT begins[STRIP], ends[STRIP];
  for (int64_t i = 0; i < round_up(num_rows, LANES); i++) {
    fa_range columns = fa_visible_columns(problem, first_row + i);
    begins[i] = (INT)(columns.begin < first_column ? 0 : min_of(columns.begin - first_column, BLOCK));
    ends[i] = (INT)(columns.end < first_column ? 0 : min_of(columns.end - first_column, BLOCK));
  }
  for (int64_t i = 0; i < num_rows; i += LANES) {
    T(mask) begin, end;
    memcpy(&begin, begins + i, sizeof begin);
    memcpy(&end, ends + i, sizeof end);
    for (int64_t j = 0; j < num_columns; j++) {
      T(vec) *s = (T(vec) *)(scores + j * STRIP + i);
      *s = T(hide_outside)(*s, (INT)j - (T(mask)){0}, begin, end);
    }
  }
}

/* Online softmax: st becomes p; m and l take the block in; decay is what earlier sums are worth now. */
static void T(soften_scores)(REAL *scores, int64_t num_rows, int64_t num_columns, REAL *m, REAL *l,
                             REAL *decay) {
  for (int64_t i = 0; i < num_rows; i += LANES) {
    T(vec) old_max = *(T(vec) *)(m + i), max = old_max;
    for (int64_t j = 0; j < num_columns; j++) max = T(max)(*(T(vec) *)(scores + j * STRIP + i), max);
    /* A row that has seen nothing keeps m = -inf; 0 in its place lets exp(-inf - 0) be 0 and not NaN. */
    T(vec) origin = T(max)(max, T(splat)(LOWEST));
    T(vec) kept = T(exp)(old_max - origin), sum = kept * *(T(vec) *)(l + i);
    for (int64_t j = 0; j < num_columns; j++) {
      T(vec) *s = (T(vec) *)(scores + j * STRIP + i);
      *s = T(exp)(*s - origin);
      sum += *s;
    }
    *(T(vec) *)(m + i) = max;
    *(T(vec) *)(l + i) = sum;
    *(T(vec) *)(decay + i) = kept;
  }
}

/* The last step of a row: sinks join the sum, o is divided by it, o and lse are written. */
static void T(forward_finish_row)(const fa_cpu_job *job, int64_t batch, int64_t head, int64_t row, REAL *o,
                                  REAL m, REAL l) {
  const fa_problem *problem = job->problem;
  if (problem->num_sinks) {
    T(vec) origin = T(max)(T(splat)(m), T(splat)(LOWEST));
    for (int64_t t = 0; t < problem->num_sinks; t++)
      origin = T(max)(T(splat)(T(load_sink)(job, t, head)), origin);
    T(vec) decay = T(exp)(m - origin), sum = l * decay;
    for (int64_t t = 0; t < problem->num_sinks; t++) sum += T(exp)(T(load_sink)(job, t, head) - origin);
    REAL factor = T(first)(decay);
    for (int64_t p = 0; p < problem->head_dim; p++) o[p] *= factor;
    m = T(first)(origin), l = T(first)(sum);
  }
  /* l is 0 only where the row saw nothing: o is 0 then, and lse = -inf. */
  if (l != 0)
    for (int64_t p = 0; p < problem->head_dim; p++) o[p] /= l;
  T(store_row)(T(rows_of)(job, FA_TENSOR_O, batch, head), row, problem->head_dim, o);
  T(store_lse)(job, T(stat_index)(problem, batch, head, row), l != 0 ? m + LOG(l) : -INFINITY);
}

static void T(forward_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim, padded = round_up(d, NR), task_rows = T(forward_task_rows)(problem);
  int64_t num_heads = problem->num_heads, group = num_heads / problem->num_kv_heads;

  /* The last rows first: under a causal mask they see the most, and the longest tasks should start first. */
  int64_t num_blocks = ceil_div(problem->seqlen_q, task_rows), pairs = problem->batch * num_heads;
  int64_t first_row = (num_blocks - 1 - task / pairs) * task_rows;
  int64_t batch = task % pairs / num_heads, head = task % num_heads;
  int64_t num_rows = min_of(task_rows, problem->seqlen_q - first_row);

  T(forward_scratch) s = T(forward_carve)(&(carver){.base = scratch}, problem);
  T(rows)
  k = T(rows_of)(job, FA_TENSOR_K, batch, head / group), v = T(rows_of)(job, FA_TENSOR_V, batch, head / group);
  T(pack_transposed)(T(rows_of)(job, FA_TENSOR_Q, batch, head), first_row, num_rows, d, s.q, s.buffer);
  memset(s.o, 0, (size_t)(FORWARD_ROWS * padded) * sizeof *s.o);
  for (int64_t i = 0; i < FORWARD_ROWS; i++) s.m[i] = -INFINITY, s.l[i] = 0;

  int64_t begin = fa_visible_columns(problem, first_row).begin;
  int64_t end = fa_visible_columns(problem, first_row + num_rows - 1).end;
  for (int64_t column = begin / BLOCK * BLOCK; column < end; column += BLOCK) {
    int64_t num_columns = min_of(BLOCK, problem->seqlen_k - column);
    give_way();
    T(pack_rows)(k, column, num_columns, d, s.k);
    T(pack_panels)(v, column, num_columns, d, s.v, s.buffer);
    for (int64_t strip = 0; strip < num_rows; strip += STRIP) {
      int64_t rows = min_of(STRIP, num_rows - strip);
      fa_range first = fa_visible_columns(problem, first_row + strip);
      fa_range last = fa_visible_columns(problem, first_row + strip + rows - 1);
      if (first.begin >= column + num_columns || last.end <= column) continue;
      REAL *o = s.o + strip * padded, *m = s.m + strip, *l = s.l + strip;
      T(product)
      (num_columns, rows, d, s.k, d, 1, s.q + strip * d, d * NR, s.scores, STRIP, STORE, (REAL)problem->scale,
       NULL);
      if (problem->softcap != 0) T(cap_scores)(s.scores, num_columns * STRIP, (REAL)problem->softcap);
      if (last.begin > column || first.end < column + num_columns)
        T(mask_scores)(problem, s.scores, first_row + strip, rows, column, num_columns);
      T(soften_scores)(s.scores, rows, num_columns, m, l, s.decay);
      T(product)(rows, d, num_columns, s.scores, 1, STRIP, s.v, BLOCK * NR, o, padded, RESCALE, 0, s.decay);
    }
  }
  for (int64_t i = 0; i < num_rows; i++)
    T(forward_finish_row)(job, batch, head, first_row + i, s.o + i * padded, s.m[i], s.l[i]);
}
