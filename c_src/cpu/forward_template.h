/*
 * Template: the forward pass, FlashAttention-2's (Dao 2023, algorithm 1) with the scores transposed.
 *
 *     q, o [batch, seqlen_q, num_heads, head_dim]   k, v [batch, seqlen_k, num_kv_heads, head_dim]
 *     lse [batch, num_heads, seqlen_q]              sink [num_sinks, num_heads]
 *     row_sinks [batch, seqlen_q, num_row_sinks, num_heads]
 *
 * A task is up to MOST_ROWS query rows of one (batch, head). It walks over the blocks of k and v that its
 * rows see; for each block and each strip of rows it computes
 *
 *     st[BLOCK, STRIP]     = scale * k . q^T          rows of q lie along the vectors, so that maxima and
 *     m', p = exp(st - m')                            sums over k need no step across lanes
 *     o[STRIP, head_dim]   = exp(m - m') * o + p^T . v
 *
 * Few rows beside many columns have tasks of PART columns each, whose sums a second phase adds up, so that one
 * row keeps several threads busy; a task takes them of several heads that share k and v, which are packed once
 * for all of these. Products of such heads with k are made together, as one row takes as long as NR. What a row
 * gets depends neither on the rows and heads of its task nor on the threads.
 *
 * Parameters: REAL, T(name), LOG, STRIP, BLOCK, LANES, NR (see kernels.c), and the templates before this one.
 */

#define MOST_ROWS  (16 * STRIP)
#define LEAST_ROWS (2 * STRIP)
#define MOST_HEADS 8           /* of a task of few rows */
#define FEW_ROWS   16          /* of q, beside which columns are split */
#define PART       (8 * BLOCK) /* columns */

typedef struct T(forward_scratch) {
  int64_t num_rows;   /* of a task's heads, in whole strips */
  T(operand) * q;     /* [num_rows / NR][operands of head_dim][NR] */
  T(operand) * k;     /* [BLOCK][operands of head_dim] */
  T(operand) * v;     /* [head_dim / NR][operands of BLOCK][NR] */
  REAL *scores;       /* [BLOCK][STRIP] */
  REAL *addends;      /* [STRIP][BLOCK]: what is added to scores */
  INT *hidden;        /* [BLOCK][STRIP]: which scores are -inf */
  INT *kept;          /* [BLOCK][STRIP]: which scores are not dropped */
  REAL *o;            /* [num_rows][padded head_dim] */
  REAL *m, *l;        /* [num_rows]: the largest score so far, and the sum of exp(score - m) */
  REAL *decay;        /* [STRIP] */
  REAL *buffer;       /* [head_dim] */
  T(operand) * q_all; /* [STRIP / NR][operands of head_dim][NR]: rows of all heads of a task, side by side */
  REAL *products;     /* [BLOCK][STRIP]: theirs with a block of k, or NULL where each head makes its own */
} T(forward_scratch);

/* Into how many parts the columns are split; whether they are hangs on nothing that slices of a problem change.
 */
static int64_t T(forward_num_parts)(const fa_problem *problem) {
  return problem->seqlen_q <= FEW_ROWS ? fa_max(fa_divide_up(problem->seqlen_k, PART), 1) : 1;
}

/* Tasks of the same rows and columns, where so many heads that share k and v are in one. */
static int64_t T(head_tasks)(const fa_problem *problem, int64_t heads) {
  return problem->num_kv_heads * fa_divide_up(problem->num_heads / problem->num_kv_heads, heads);
}

/* How many heads that is: each has a strip of its own among a task's rows. Fewer where there would be too few
 * tasks to share out. */
static int64_t T(forward_task_heads)(const fa_problem *problem) {
  int64_t heads = problem->seqlen_q <= FEW_ROWS ? MOST_HEADS : 1;
  const int64_t others = problem->batch * T(forward_num_parts)(problem);
  while (heads > 1 && T(head_tasks)(problem, heads) * others < 32) heads /= 2;
  return heads;
}

/* Of a head. The more they are, the seldomer k and v are packed; but q and o should stay in cache, and each
 * thread is to have several tasks. */
static int64_t T(forward_task_rows)(const fa_problem *problem, int32_t of_threads) {
  int64_t rows = problem->head_dim <= 64 ? MOST_ROWS : MOST_ROWS / 2;
  const int64_t heads = problem->batch * problem->num_heads;
  while (rows > LEAST_ROWS && fa_divide_up(problem->seqlen_q, rows) * heads < 4 * of_threads) rows /= 2;
  return rows;
}

static T(forward_scratch) T(lay_out_forward)(fa_arena *arena, const fa_problem *problem, int32_t of_threads) {
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  T(forward_scratch) s;
  s.num_rows = fa_min(T(forward_task_rows)(problem, of_threads), fa_round_up(problem->seqlen_q, STRIP)) *
               T(forward_task_heads)(problem);
  s.q = fa_take(arena, s.num_rows * depth, sizeof *s.q);
  s.k = fa_take(arena, BLOCK * depth, sizeof *s.k);
  s.v = fa_take(arena, T(operands)(BLOCK) * padded, sizeof *s.v);
  s.scores = fa_take(arena, BLOCK * STRIP, sizeof(REAL));
  s.addends = fa_take(arena, T(has_addends)(problem) ? STRIP * BLOCK : 0, sizeof(REAL));
  s.hidden = fa_take(arena, BLOCK * STRIP, sizeof(INT));
  s.kept = fa_take(arena, problem->dropout != 0 ? BLOCK * STRIP : 0, sizeof(INT));
  s.o = fa_take(arena, s.num_rows * padded, sizeof(REAL));
  s.m = fa_take(arena, s.num_rows, sizeof(REAL));
  s.l = fa_take(arena, s.num_rows, sizeof(REAL));
  s.decay = fa_take(arena, STRIP, sizeof(REAL));
  s.buffer = fa_take(arena, d, sizeof(REAL));
  const bool has_heads = T(forward_task_heads)(problem) > 1;
  s.q_all = fa_take(arena, has_heads ? fa_round_up(STRIP, NR) * depth : 0, sizeof *s.q_all);
  s.products = fa_take(arena, has_heads ? BLOCK * STRIP : 0, sizeof(REAL));
  return s;
}

static size_t T(forward_scratch_bytes)(const fa_problem *problem, int32_t of_threads) {
  fa_arena sizes = {0};
  T(lay_out_forward)(&sizes, problem, of_threads);
  return sizes.used;
}

static int64_t T(forward_num_tasks)(const fa_problem *problem, int32_t of_threads) {
  return fa_divide_up(problem->seqlen_q, T(forward_task_rows)(problem, of_threads)) * problem->batch *
         T(head_tasks)(problem, T(forward_task_heads)(problem)) * T(forward_num_parts)(problem);
}

/* A part's sums of a row: o [padded head_dim], m, l. */
static int64_t T(sums_of_row)(const fa_problem *problem) { return fa_round_up(problem->head_dim, NR) + 2; }

/* [batch, num_heads, parts, seqlen_q] sums, where there are several parts. */
static size_t T(forward_shared_bytes)(const fa_problem *problem, int32_t of_threads) {
  (void)of_threads;
  const int64_t parts = T(forward_num_parts)(problem);
  fa_arena sizes = {0};
  if (parts > 1)
    fa_take(&sizes, problem->batch * problem->num_heads * problem->seqlen_q,
            (size_t)(parts * T(sums_of_row)(problem)) * sizeof(REAL));
  return sizes.used;
}

static REAL *T(sums_at)(const fa_cpu_job *job, int64_t pair, int64_t part, int64_t row) {
  const fa_problem *problem = job->problem;
  const int64_t place = (pair * T(forward_num_parts)(problem) + part) * problem->seqlen_q + row;
  return (REAL *)job->shared + place * T(sums_of_row)(problem);
}

/* The last step of a row: sinks join the sum, o is divided by it, o and lse are written. */
static void T(finish_row)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, int64_t row,
                          REAL *o, REAL m, REAL l) {
  const fa_problem *problem = job->problem;
  const int64_t num_sinks = fa_problem_num_sinks(problem);
  fa_cell at = {.batch = sequence->batch, .head = head, .row = row};
  if (num_sinks) {
    T(vec) origin = T(max)(T(splat)(m), T(splat)(LOWEST));
    for (at.number = 0; at.number < num_sinks; at.number++) origin = T(max)(T(splat)(T(sink)(job, at)), origin);
    T(vec) decay = T(exp)(m - origin), sum = l * decay;
    for (at.number = 0; at.number < num_sinks; at.number++) sum += T(exp)(T(sink)(job, at) - origin);
    REAL factor = T(first)(decay);
    for (int64_t p = 0; p < problem->head_dim; p++) o[p] *= factor;
    m = T(first)(origin), l = T(first)(sum);
  }
  /* l is 0 only where the row saw nothing: o is 0 then, and lse = -inf. */
  const REAL divisor = l * (1 - (REAL)problem->dropout);
  if (l != 0)
    for (int64_t p = 0; p < problem->head_dim; p++) o[p] /= divisor;
  T(store_row)(T(rows_of)(job, FA_TENSOR_O, sequence, head), row, problem->head_dim, o);
  T(store_lse)(job, fa_first_stat(sequence, head) + row, l != 0 ? m + LOG(l) : -INFINITY);
}

/* Which operands are T(all_normal). */
typedef struct T(normal) {
  bool q_and_k, v;
} T(normal);

/* Scores [columns of a block][STRIP] of the rows of q, which are packed, without what is added to them. */
static void T(multiply_with_k)(const fa_problem *problem, T(forward_scratch) s, const T(operand) * q,
                               int64_t num_rows, int64_t num_columns, T(normal) normal, REAL *to) {
  const int64_t depth = T(operands)(problem->head_dim);
  T(product_where_seen)
  (num_columns, num_rows, depth, s.k, NULL, normal.q_and_k, depth, 1, q, depth * NR, to, STRIP, STORE,
   (REAL)problem->scale, NULL);
}

/* Takes one tile, whose q, k and v are packed, into the sums o, m and l of its rows. */
static void T(forward_tile)(const fa_cpu_job *job, const fa_tile *tile, T(forward_scratch) s,
                            const T(operand) * q, T(normal) normal, REAL *o, REAL *m, REAL *l) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, padded = fa_round_up(d, NR);
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  give_way(2 * d * num_rows * num_columns);
  T(addends) addends = {0};
  if (T(has_addends)(problem)) addends = T(find_addends)(job, tile, s.addends);
  if (T(has_addends)(problem) && !addends.data) return;
  if (!s.products) T(multiply_with_k)(problem, s, q, num_rows, num_columns, normal, s.scores);
  for (int64_t j = 0; s.products && j < num_columns; j++)
    for (int64_t i = 0; i < num_rows; i++) s.scores[j * STRIP + i] = s.products[j * STRIP + i];
  T(make_scores)(job, tile, s.scores, addends);
  bool hides = !normal.v && T(find_hidden)(tile, s.scores, s.hidden);
  T(soften_scores)(job, tile, s.scores, m, l, s.decay);
  if (problem->dropout != 0) T(drop)(job, tile, s.scores, s.kept);
  T(product_where_seen)
  (num_rows, d, T(operands)(num_columns), (const T(operand) *)s.scores, hides ? s.hidden : NULL, normal.v, 1,
   STRIP, s.v, T(operands)(BLOCK) * NR, o, padded, RESCALE, 0, s.decay);
}

/* Takes one block of columns, whose k and v are packed, into the sums of a task's rows, strip by strip. A strip
 * stops at the last column that it sees. */
static void T(forward_columns)(const fa_cpu_job *job, const fa_tile *rows_by_columns, T(normal) normal,
                               T(forward_scratch) s) {
  const int64_t d = job->problem->head_dim, padded = fa_round_up(d, NR);
  fa_tile tile = *rows_by_columns;
  const fa_range rows = tile.rows, columns = tile.columns,
                 part = fa_in_units(rows, fa_rows_in_band(tile.band, rows), WHOLE);
  for (int64_t begin = part.begin; begin < part.end; begin += STRIP) {
    const int64_t x = begin - rows.begin;
    T(forward_scratch) own = s;
    if (own.products) own.products += x;
    tile.rows = (fa_range){begin, fa_min(begin + STRIP, part.end)};
    tile.columns.end = fa_min(columns.end, fa_columns_in_band(tile.band, tile.rows).end);
    if (fa_tile_sees_any(&tile)) T(forward_tile)
    (job, &tile, own, s.q + x * T(operands)(d), normal, s.o + x * padded, s.m + x, s.l + x);
  }
}

/* The scratch of a task's i-th head. */
static T(forward_scratch) T(forward_head)(const fa_problem *problem, T(forward_scratch) s, int64_t i) {
  const int64_t x = i * STRIP;
  s.q += x * T(operands)(problem->head_dim), s.o += x * fa_round_up(problem->head_dim, NR), s.m += x, s.l += x;
  return s;
}

/* Whether rows of so many heads take fewer tiles of products side by side. */
static bool T(are_together)(int64_t num_heads, int64_t num_rows) {
  return num_heads * num_rows <= STRIP &&
         fa_divide_up(num_heads * num_rows, NR) < num_heads * fa_divide_up(num_rows, NR);
}

/* The rows of all heads, which are packed apart, side by side. */
static void T(put_together)(const fa_problem *problem, T(forward_scratch) s, int64_t num_heads,
                            int64_t num_rows) {
  const int64_t depth = T(operands)(problem->head_dim), count = num_heads * num_rows;
  memset(s.q_all, 0, (size_t)(fa_round_up(count, NR) * depth) * sizeof *s.q_all);
  for (int64_t x = 0; x < count; x++) {
    const int64_t row = x % num_rows;
    const T(operand) *from = T(forward_head)(problem, s, x / num_rows).q + row / NR * depth * NR;
    T(operand) *to = s.q_all + x / NR * depth * NR;
    for (int64_t p = 0; p < depth; p++) to[p * NR + x % NR] = from[p * NR + row % NR];
  }
}

/* The sums of a task's rows, of heads that share k and v, over all tiles in its part of the columns, block by
 * block. */
static void T(forward_sums)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                            fa_range part, T(forward_scratch) s) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  int64_t kv_head = heads.begin / (problem->num_heads / problem->num_kv_heads);
  T(rows) k = T(rows_of)(job, FA_TENSOR_K, sequence, kv_head);
  T(rows) v = T(rows_of)(job, FA_TENSOR_V, sequence, kv_head);
  const int64_t num_rows = rows.end - rows.begin, num_heads = heads.end - heads.begin;
  bool normal_q = true;
  for (int64_t head = heads.begin; head < heads.end; head++) {
    const T(forward_scratch) own = T(forward_head)(problem, s, head - heads.begin);
    T(pack_transposed)(T(rows_of)(job, FA_TENSOR_Q, sequence, head), rows, d, own.q, s.buffer);
    if (PAIRS) normal_q = T(all_normal)(own.q, fa_round_up(num_rows, NR) * depth) && normal_q;
  }
  if (T(are_together)(num_heads, num_rows))
    T(put_together)(problem, s, num_heads, num_rows);
  else
    s.products = NULL;
  memset(s.o, 0, (size_t)(s.num_rows * padded) * sizeof *s.o);
  for (int64_t i = 0; i < s.num_rows; i++) s.m[i] = -INFINITY, s.l[i] = 0;

  for (int64_t b = 0; b < sequence->num_bands; b++) {
    fa_band band = fa_band_at(sequence, b);
    fa_blocks blocks = fa_blocks_seen_by(sequence, &band, rows, BLOCK);
    for (int64_t i = 0; i < blocks.count; i++) {
      const fa_range block = fa_block_at(blocks, i);
      if (block.begin < part.begin || block.begin >= part.end) continue;
      fa_range columns = fa_overlap(block, fa_columns_in_band(&band, rows));
      columns.begin -= columns.begin % T(PER_OPERAND); /* the same columns are pairs, whatever rows see */
      const int64_t num_columns = columns.end - columns.begin;
      T(pack_rows)(k, columns, d, s.k);
      T(pack_panels)(v, columns, d, s.v, s.buffer);
      const T(normal) normal = {normal_q && (!PAIRS || T(all_normal)(s.k, num_columns * depth)),
                                T(panels_normal)(T(operands)(num_columns), d, s.v, T(operands)(BLOCK) * NR)};
      if (s.products)
        T(multiply_with_k)(problem, s, s.q_all, num_heads * num_rows, num_columns, normal, s.products);
      for (int64_t head = heads.begin; head < heads.end; head++) {
        T(forward_scratch) own = T(forward_head)(problem, s, head - heads.begin);
        if (own.products) own.products += (head - heads.begin) * num_rows;
        T(forward_columns)(job, &(fa_tile){sequence, &band, head, rows, columns}, normal, own);
      }
    }
  }
}

static void T(forward_finish)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, fa_range rows,
                              T(forward_scratch) s) {
  int64_t padded = fa_round_up(job->problem->head_dim, NR);
  for (int64_t i = 0; i < rows.end - rows.begin; i++)
    T(finish_row)(job, sequence, head, rows.begin + i, s.o + i * padded, s.m[i], s.l[i]);
}

static void T(keep_sums)(const fa_cpu_job *job, int64_t pair, int64_t part, fa_range rows,
                         T(forward_scratch) s) {
  int64_t padded = fa_round_up(job->problem->head_dim, NR);
  for (int64_t i = 0; i < rows.end - rows.begin; i++) {
    REAL *sums = T(sums_at)(job, pair, part, rows.begin + i);
    memcpy(sums, s.o + i * padded, (size_t)padded * sizeof *sums);
    sums[padded] = s.m[i], sums[padded + 1] = s.l[i];
  }
}

/* The sums of a row over all parts, in their order. Parts that see nothing have l = 0. */
static void T(join_row)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t pair, int64_t row,
                        T(forward_scratch) s) {
  int64_t parts = T(forward_num_parts)(job->problem), padded = fa_round_up(job->problem->head_dim, NR);
  T(vec) m = T(splat)(-INFINITY);
  REAL l = 0;
  for (int64_t part = 0; part < parts; part++) {
    const REAL *sums = T(sums_at)(job, pair, part, row);
    if (sums[padded + 1] != 0) m = T(max)(T(splat)(sums[padded]), m);
  }
  memset(s.o, 0, (size_t)padded * sizeof *s.o);
  for (int64_t part = 0; part < parts; part++) {
    const REAL *sums = T(sums_at)(job, pair, part, row);
    if (sums[padded + 1] == 0) continue;
    REAL weight = T(first)(T(exp)(T(splat)(sums[padded]) - m));
    l += weight * sums[padded + 1];
    for (int64_t p = 0; p < padded; p++) s.o[p] += weight * sums[p];
  }
  T(finish_row)(job, sequence, pair % job->problem->num_heads, row, s.o, T(first)(m), l);
}

static int64_t T(join_num_tasks)(const fa_problem *problem, int32_t of_threads) {
  (void)of_threads;
  return T(forward_num_parts)(problem) > 1 ? problem->batch * problem->num_heads : 0;
}

static void T(join_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, task / problem->num_heads);
  T(forward_scratch) s = T(lay_out_forward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  for (int64_t row = 0; row < sequence.seqlen_q; row++) T(join_row)(job, &sequence, task, row, s);
}

static void T(forward_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  const int64_t task_heads = T(forward_task_heads)(problem), head_tasks = T(head_tasks)(problem, task_heads);
  const int64_t group = problem->num_heads / problem->num_kv_heads,
                of_group = head_tasks / problem->num_kv_heads;
  int64_t task_rows = T(forward_task_rows)(problem, job->of_threads), pairs = problem->batch * head_tasks;
  int64_t parts = T(forward_num_parts)(problem), part = task / pairs % parts, batch = task % pairs / head_tasks;
  const int64_t kv_head = task % head_tasks / of_group, of_heads = task % of_group * task_heads;
  const fa_range heads = {kv_head * group + of_heads, kv_head * group + fa_min(of_heads + task_heads, group)};
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, batch);
  T(forward_scratch) s = T(lay_out_forward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  /* The last rows first: under a causal mask they see the most, and the longest tasks should start first. */
  int64_t first = (fa_divide_up(problem->seqlen_q, task_rows) - 1 - task / pairs / parts) * task_rows;
  fa_range rows = {first, fa_min(first + task_rows, sequence.seqlen_q)};
  fa_range columns = {part * PART, part + 1 == parts ? sequence.seqlen_k : (part + 1) * PART};
  if (rows.begin >= rows.end) return;
  T(forward_sums)(job, &sequence, heads, rows, columns, s);
  for (int64_t head = heads.begin; head < heads.end; head++) {
    const T(forward_scratch) own = T(forward_head)(problem, s, head - heads.begin);
    if (parts == 1)
      T(forward_finish)(job, &sequence, head, rows, own);
    else
      T(keep_sums)(job, batch * problem->num_heads + head, part, rows, own);
  }
}
