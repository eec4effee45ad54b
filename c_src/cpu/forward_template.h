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
 * row keeps several threads busy; a task takes them of several heads that share k and v, side by side in its
 * strips. Where they are fewer still, k and v are read where they lie (direct_template.h), and not packed, and
 * a task may have several heads of these. What a row gets depends neither on the rows and heads of its task nor
 * on the threads.
 *
 * Parameters: REAL, T(name), LOG, STRIP, BLOCK, LANES, NR (see kernels.c), and the templates before this one.
 */

#define MOST_ROWS  (16 * STRIP)
#define LEAST_ROWS (2 * STRIP)
#define FEW_ROWS   16          /* of q, beside which columns are split */
#define PART       (4 * BLOCK) /* columns */

typedef struct T(forward_scratch) {
  int64_t num_rows;    /* of a task's heads, in whole strips, or whole vectors where products are direct */
  T(operand) * q;      /* [num_rows / NR][operands of head_dim][NR] */
  T(operand) * q_head; /* [FEW_ROWS / NR][operands of head_dim][NR]: of one head, where a task has several */
  T(operand) * k;      /* [BLOCK][operands of head_dim] */
  T(operand) * v;      /* [head_dim / NR][operands of BLOCK][NR] */
  REAL *scores;        /* [BLOCK][STRIP] */
  REAL *addends;       /* [STRIP][BLOCK]: what is added to scores */
  INT *hidden;         /* [BLOCK][STRIP]: which scores are -inf */
  INT *kept;           /* [BLOCK][STRIP]: which scores are not dropped */
  REAL *o;             /* [num_rows][padded head_dim] */
  REAL *m, *l;         /* [num_rows]: the largest score so far, and the sum of exp(score - m) */
  REAL *decay;         /* [STRIP] */
  REAL *buffer;        /* [head_dim] */
  /* In place of q, k and v where products are direct: */
  REAL *q_rows; /* [num_rows][padded head_dim] */
  REAL *sums;   /* [num_rows][padded head_dim]: of a block */
  REAL *copies; /* [HELD][padded head_dim] */
} T(forward_scratch);

/* Into how many parts the columns are split; whether they are hangs on nothing that slices of a problem change.
 */
static int64_t T(forward_num_parts)(const fa_problem *problem) {
  return problem->seqlen_q <= FEW_ROWS ? fa_max(fa_divide_up(problem->seqlen_k, PART), 1) : 1;
}

/* Whether products are direct. */
static bool T(is_direct)(const fa_problem *problem) { return DIRECT && fa_cpu_is_direct(problem); }

/* The heads of a task: some of those that share a head of k and v, or all those of several such heads. */
typedef struct T(task_heads) {
  int64_t sharing, kv_heads;
} T(task_heads);

/* Tasks of the same rows and columns. */
static int64_t T(head_tasks)(const fa_problem *problem, T(task_heads) heads) {
  const int64_t group = problem->num_heads / problem->num_kv_heads;
  return fa_divide_up(problem->num_kv_heads, heads.kv_heads) * fa_divide_up(group, heads.sharing);
}

/* How many heads these are: fewer where each thread would not have two tasks. Rows of several heads of k and v
 * lie side by side in memory, mostly, and their softmax takes no longer than that of one. */
static T(task_heads) T(forward_task_heads)(const fa_problem *problem, int32_t of_threads) {
  const int64_t group = problem->num_heads / problem->num_kv_heads, tasks = 2 * of_threads;
  const int64_t others = problem->batch * T(forward_num_parts)(problem);
  T(task_heads) heads = {1, 1};
  if (problem->seqlen_q > FEW_ROWS) return heads;
  heads.sharing = fa_min(group, FA_CPU_MOST_HEADS);
  while (heads.sharing > 1 && T(head_tasks)(problem, heads) * others < tasks) heads.sharing /= 2;
  if (!T(is_direct)(problem) || heads.sharing < group) return heads;
  for (T(task_heads) more = {group, 2}; more.kv_heads <= problem->num_kv_heads; more.kv_heads *= 2) {
    if (more.kv_heads * group * problem->seqlen_q > FEW_ROWS) break;
    if (T(head_tasks)(problem, more) * others < tasks) break;
    heads = more;
  }
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
  const T(task_heads) task_heads = T(forward_task_heads)(problem, of_threads);
  const int64_t heads = task_heads.kv_heads * task_heads.sharing;
  const bool direct = T(is_direct)(problem);
  const int64_t rows = fa_min(T(forward_task_rows)(problem, of_threads), problem->seqlen_q);
  s.num_rows = fa_round_up(rows * heads, direct ? LANES : STRIP);
  s.q = fa_take(arena, direct ? 0 : s.num_rows * depth, sizeof *s.q);
  s.q_head = fa_take(arena, !direct && heads > 1 ? fa_round_up(FEW_ROWS, NR) * depth : 0, sizeof *s.q_head);
  s.k = fa_take(arena, direct ? 0 : BLOCK * depth, sizeof *s.k);
  s.v = fa_take(arena, direct ? 0 : T(operands)(BLOCK) * padded, sizeof *s.v);
  s.scores = fa_take(arena, BLOCK * STRIP, sizeof(REAL));
  s.addends = fa_take(arena, T(has_addends)(problem) ? STRIP * BLOCK : 0, sizeof(REAL));
  s.hidden = fa_take(arena, BLOCK * STRIP, sizeof(INT));
  s.kept = fa_take(arena, problem->dropout != 0 ? BLOCK * STRIP : 0, sizeof(INT));
  s.o = fa_take(arena, s.num_rows * padded, sizeof(REAL));
  s.m = fa_take(arena, s.num_rows, sizeof(REAL));
  s.l = fa_take(arena, s.num_rows, sizeof(REAL));
  s.decay = fa_take(arena, STRIP, sizeof(REAL));
  s.buffer = fa_take(arena, d, sizeof(REAL));
  s.q_rows = fa_take(arena, direct ? s.num_rows * padded : 0, sizeof(REAL));
  s.sums = fa_take(arena, direct ? s.num_rows * padded : 0, sizeof(REAL));
  s.copies = fa_take(arena, direct ? HELD * padded : 0, sizeof(REAL));
  return s;
}

static size_t T(forward_scratch_bytes)(const fa_problem *problem, int32_t of_threads) {
  fa_arena sizes = {0};
  T(lay_out_forward)(&sizes, problem, of_threads);
  return sizes.used;
}

static int64_t T(forward_num_tasks)(const fa_problem *problem, int32_t of_threads) {
  return fa_divide_up(problem->seqlen_q, T(forward_task_rows)(problem, of_threads)) * problem->batch *
         T(head_tasks)(problem, T(forward_task_heads)(problem, of_threads)) * T(forward_num_parts)(problem);
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

/* k and v of a task. */
typedef struct T(keys) {
  T(rows) k[FEW_ROWS], v[FEW_ROWS];
  int64_t num_heads;                    /* of k and v */
  int64_t first;                        /* column of those that are packed */
  int64_t end;                          /* of the columns that a task reads */
  bool q_is_normal;                     /* T(all_normal) */
  bool q_and_k_are_normal, v_is_normal; /* and of the block at hand */
} T(keys);

/* Scores of a tile, without what is added to them. */
static void T(multiply_with_k)(const fa_problem *problem, const fa_tile *tile, const T(keys) * keys,
                               int64_t first, T(forward_scratch) s) {
  const int64_t d = problem->head_dim, depth = T(operands)(d), num_rows = tile->rows.end - tile->rows.begin;
  const REAL scale = (REAL)problem->scale;
#if DIRECT
  if (T(is_direct)(problem)) {
    T(dots)
    (keys->k, keys->num_heads, tile->columns, (T(place)){keys->v[0], tile->columns}, d,
     s.q_rows + first * fa_round_up(d, NR), num_rows / keys->num_heads, scale, s.scores, s.copies);
    return;
  }
#endif
  T(product_where_seen)
  (tile->columns.end - tile->columns.begin, num_rows, depth, s.k + (tile->columns.begin - keys->first) * depth,
   NULL, keys->q_and_k_are_normal, depth, 1, s.q + first * depth, depth * NR, s.scores, STRIP, STORE, scale,
   NULL);
}

/* Their probabilities, with v, into the sums of its rows. */
static void T(multiply_with_v)(const fa_problem *problem, const fa_tile *tile, const T(keys) * keys,
                               const INT *hidden, int64_t first, T(forward_scratch) s) {
  const int64_t d = problem->head_dim, padded = fa_round_up(d, NR);
  REAL *o = s.o + first * padded;
#if DIRECT
  if (T(is_direct)(problem)) {
    const T(place) next_keys = {keys->k[0], {tile->columns.end, keys->end}};
    T(add_direct)
    (keys->v, keys->num_heads, tile->columns, next_keys, d, s.scores, hidden,
     (tile->rows.end - tile->rows.begin) / keys->num_heads, s.decay, o, s.sums, s.copies);
    return;
  }
#endif
  T(product_in_tile)
  (tile, false, d, (const T(operand) *)s.scores, hidden, keys->v_is_normal, 1, STRIP,
   s.v + T(operands)(tile->columns.begin - keys->first) * NR, T(operands)(BLOCK) * NR, o, padded, RESCALE, 0,
   s.decay);
}

/* Takes one tile into the sums o, m and l of its rows, of which the task's first-th is the first. next is the
 * one that is likely to follow. */
static void T(forward_tile)(const fa_cpu_job *job, const fa_tile *tile, const fa_tile *next,
                            const T(keys) * keys, int64_t first, T(forward_scratch) s) {
  const fa_problem *problem = job->problem;
  give_way(2 * problem->head_dim * (tile->rows.end - tile->rows.begin) *
           (tile->columns.end - tile->columns.begin));
  T(addends) addends = {0};
  if (T(has_addends)(problem)) addends = T(find_addends)(job, tile, s.addends);
  if (T(has_addends)(problem) && !addends.data) return;
  T(multiply_with_k)(problem, tile, keys, first, s);
  T(make_scores)(job, tile, s.scores, addends);
  bool hides = !keys->v_is_normal && T(find_hidden)(tile, s.scores, s.hidden);
  T(soften_scores)(job, tile, next, s.scores, s.m + first, s.l + first, s.decay);
  if (problem->dropout != 0) T(drop)(job, tile, s.scores, s.kept);
  T(multiply_with_v)(problem, tile, keys, hides ? s.hidden : NULL, first, s);
}

/* Takes one block of columns into the sums of a task's rows, strip by strip, or, where a strip's rows see
 * different columns, by as few rows as there may be. Each has the columns that it sees. */
static void T(forward_columns)(const fa_cpu_job *job, const fa_tile *rows_by_columns, const T(keys) * keys,
                               T(forward_scratch) s) {
  fa_tile tile = *rows_by_columns;
  const fa_range rows = tile.rows, columns = tile.columns,
                 seeing = fa_rows_in_band(tile.band, fa_tile_rows(&tile)),
                 part = tile.rows_a_head ? rows : fa_in_units(rows, seeing, WHOLE);
  const bool is_direct = T(is_direct)(job->problem);
  for (int64_t begin = part.begin; begin < part.end; begin = tile.rows.end) {
    tile.rows = (fa_range){begin, fa_min(begin + STRIP, part.end)};
    tile.columns = columns;
    if (!is_direct && !tile.rows_a_head && !fa_tile_sees_all(&tile))
      tile.rows.end = fa_min(begin + WHOLE, part.end);
    tile.columns = T(seen_of)(columns, fa_columns_in_band(tile.band, fa_tile_rows(&tile)));
    const bool is_last = tile.rows.end == part.end;
    fa_tile next = tile;
    next.rows.begin = is_last ? part.begin : tile.rows.end;
    if (is_last) next.columns.begin += BLOCK;
    if (fa_tile_sees_any(&tile)) T(forward_tile)(job, &tile, &next, keys, begin - rows.begin, s);
  }
}

/* The rows of q of a task, those of several heads side by side. */
static void T(copy_q)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                      T(forward_scratch) s) {
  const int64_t d = job->problem->head_dim, padded = fa_round_up(d, NR);
  REAL *to = s.q_rows;
  for (int64_t head = heads.begin; head < heads.end; head++) {
    const T(rows) q = T(rows_of)(job, FA_TENSOR_Q, sequence, head);
    for (int64_t row = rows.begin; row < rows.end; row++, to += padded) {
      memcpy(to, T(load_row)(q, row, d, s.buffer), (size_t)d * sizeof *to);
      memset(to + d, 0, (size_t)(padded - d) * sizeof *to);
    }
  }
}

/* The same, packed. Whether they are T(all_normal). */
static bool T(pack_q)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                      T(forward_scratch) s) {
  const int64_t d = job->problem->head_dim, depth = T(operands)(d), num_rows = rows.end - rows.begin;
  const int64_t count = (heads.end - heads.begin) * num_rows, size = fa_round_up(count, NR) * depth;
  const bool several = count > num_rows;
  if (several) memset(s.q, 0, (size_t)size * sizeof *s.q);
  for (int64_t head = heads.begin, x = 0; head < heads.end; head++) {
    T(pack_transposed)
    (T(rows_of)(job, FA_TENSOR_Q, sequence, head), rows, d, several ? s.q_head : s.q, s.buffer);
    for (int64_t row = 0; several && row < num_rows; row++, x++) {
      const T(operand) *from = s.q_head + row / NR * depth * NR + row % NR;
      T(operand) *to = s.q + x / NR * depth * NR + x % NR;
      for (int64_t p = 0; p < depth; p++) to[p * NR] = from[p * NR];
    }
  }
  return !PAIRS || T(all_normal)(s.q, size);
}

/* The sums of a task's rows over all tiles in its part of the columns, block by block. */
static void T(forward_sums)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                            fa_range part, T(forward_scratch) s) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  const int64_t group = problem->num_heads / problem->num_kv_heads, kv_head = heads.begin / group;
  const bool direct = T(is_direct)(problem);
  T(keys)
  keys = {.num_heads = (heads.end - 1) / group - kv_head + 1, .end = fa_min(part.end, sequence->seqlen_k)};
  for (int64_t n = 0; n < keys.num_heads; n++)
    keys.k[n] = T(rows_of)(job, FA_TENSOR_K, sequence, kv_head + n),
    keys.v[n] = T(rows_of)(job, FA_TENSOR_V, sequence, kv_head + n);
  fa_tile tile = {.sequence = sequence, .head = heads.begin, .rows = rows};
  if (heads.end - heads.begin > 1) {
    tile.rows_a_head = rows.end;
    tile.rows.end *= heads.end - heads.begin;
  }
  if (direct)
    T(copy_q)(job, sequence, heads, rows, s);
  else
    keys.q_is_normal = T(pack_q)(job, sequence, heads, rows, s);
  if (direct) memset(s.copies, 0, (size_t)(HELD * padded) * sizeof *s.copies);
  memset(s.o, 0, (size_t)(s.num_rows * padded) * sizeof *s.o);
  for (int64_t i = 0; i < s.num_rows; i++) s.m[i] = -INFINITY, s.l[i] = 0;

  for (int64_t b = 0; b < sequence->num_bands; b++) {
    fa_band band = fa_band_at(sequence, b);
    fa_blocks blocks = fa_blocks_seen_by(sequence, &band, rows, BLOCK);
    tile.band = &band;
    for (int64_t i = 0; i < blocks.count; i++) {
      const fa_range block = fa_block_at(blocks, i);
      if (block.begin < part.begin || block.begin >= part.end) continue;
      tile.columns = T(seen_of)(block, fa_columns_in_band(&band, rows));
      keys.first = tile.columns.begin;
      const int64_t num_columns = tile.columns.end - tile.columns.begin;
      if (!direct) {
        T(pack_rows)(keys.k[0], tile.columns, d, s.k);
        T(pack_panels)(keys.v[0], tile.columns, d, s.v, s.buffer);
        keys.q_and_k_are_normal = keys.q_is_normal && (!PAIRS || T(all_normal)(s.k, num_columns * depth));
        keys.v_is_normal = T(panels_normal)(T(operands)(num_columns), d, s.v, T(operands)(BLOCK) * NR);
      }
      T(forward_columns)(job, &tile, &keys, s);
    }
  }
}

static void T(forward_finish)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                              T(forward_scratch) s) {
  int64_t padded = fa_round_up(job->problem->head_dim, NR), i = 0;
  for (int64_t head = heads.begin; head < heads.end; head++)
    for (int64_t row = rows.begin; row < rows.end; row++, i++)
      T(finish_row)(job, sequence, head, row, s.o + i * padded, s.m[i], s.l[i]);
}

static void T(keep_sums)(const fa_cpu_job *job, const fa_sequence *sequence, fa_range heads, fa_range rows,
                         int64_t part, T(forward_scratch) s) {
  int64_t padded = fa_round_up(job->problem->head_dim, NR), i = 0;
  for (int64_t head = heads.begin; head < heads.end; head++)
    for (int64_t row = rows.begin; row < rows.end; row++, i++) {
      REAL *sums = T(sums_at)(job, sequence->batch * job->problem->num_heads + head, part, row);
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

/* How many heads' parts a task joins: it should take longer than waking up a thread for it. */
static int64_t T(join_heads)(const fa_problem *problem) {
  const int64_t sums = T(forward_num_parts)(problem) * problem->seqlen_q * T(sums_of_row)(problem);
  return fa_max((1 << 15) / fa_max(sums, 1), 1);
}

static int64_t T(join_num_tasks)(const fa_problem *problem, int32_t of_threads) {
  (void)of_threads;
  if (T(forward_num_parts)(problem) == 1) return 0;
  return fa_divide_up(problem->batch * problem->num_heads, T(join_heads)(problem));
}

static void T(join_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  T(forward_scratch) s = T(lay_out_forward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  const int64_t begin = task * T(join_heads)(problem),
                end = fa_min(begin + T(join_heads)(problem), problem->batch * problem->num_heads);
  for (int64_t pair = begin; pair < end; pair++) {
    fa_sequence sequence = fa_sequence_of(problem, job->tensors, pair / problem->num_heads);
    for (int64_t row = 0; row < sequence.seqlen_q; row++) T(join_row)(job, &sequence, pair, row, s);
  }
}

static void T(forward_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  const T(task_heads) task_heads = T(forward_task_heads)(problem, job->of_threads);
  const int64_t head_tasks = T(head_tasks)(problem, task_heads);
  const int64_t group = problem->num_heads / problem->num_kv_heads,
                of_group = fa_divide_up(group, task_heads.sharing);
  int64_t task_rows = T(forward_task_rows)(problem, job->of_threads), pairs = problem->batch * head_tasks;
  int64_t parts = T(forward_num_parts)(problem), part = task / pairs % parts, batch = task % pairs / head_tasks;
  const int64_t kv_head = task % head_tasks / of_group * task_heads.kv_heads,
                last_kv_head = fa_min(kv_head + task_heads.kv_heads, problem->num_kv_heads) - 1,
                of_heads = task % of_group * task_heads.sharing;
  const fa_range heads = {kv_head * group + of_heads,
                          last_kv_head * group + fa_min(of_heads + task_heads.sharing, group)};
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, batch);
  T(forward_scratch) s = T(lay_out_forward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  /* The last rows first: under a causal mask they see the most, and the longest tasks should start first. */
  int64_t first = (fa_divide_up(problem->seqlen_q, task_rows) - 1 - task / pairs / parts) * task_rows;
  fa_range rows = {first, fa_min(first + task_rows, sequence.seqlen_q)};
  fa_range columns = {part * PART, part + 1 == parts ? sequence.seqlen_k : (part + 1) * PART};
  if (rows.begin >= rows.end) return;
  T(forward_sums)(job, &sequence, heads, rows, columns, s);
  if (parts == 1)
    T(forward_finish)(job, &sequence, heads, rows, s);
  else
    T(keep_sums)(job, &sequence, heads, rows, part, s);
}
