/*
 * Template: the backward pass, FlashAttention-2's (Dao 2023, algorithm 2), without atomic additions and with
 * the same bits for any number of threads.
 *
 *     q, o, dout, dq [batch, seqlen_q, num_heads, head_dim]     lse [batch, num_heads, seqlen_q]
 *     k, v, dk, dv [batch, seqlen_k, num_kv_heads, head_dim]    sink, dsink [num_sinks, num_heads]
 *
 * Three phases: delta = rowsum(o * dout) - dlse, drow_sinks, and gradients cleared; the cells; 16-bit gradients
 * rounded, and dsink.
 *
 * Cells. For every pair of a sequence and a key/value head, the blocks of rows and those of columns are dealt
 * out to num_hands hands each. Cell (t, step) multiplies the blocks of columns of hand t with the blocks of
 * rows of hand (t + step) mod num_hands. The cells of one step share no hand, so they may run at the same time
 * and still add to dq, dk and dv directly; a cell waits for the two cells of the step before that held its
 * hands. Tasks are numbered by step, so a cell waits only for lower numbers, which have started: it cannot wait
 * for ever. Dealing out blocks in turn, rather than in stretches, keeps the cells of a causal mask equally
 * large.
 *
 * Parameters: REAL, T(name), EXP_HIGHEST, BLOCK, NR (see kernels.c), and the templates before this one.
 */

#define PREPARE_ROWS 128 /* rows of a task of the first and the last phase */

typedef struct T(backward_scratch) {
  T(operand) * k_transposed, *v_transposed; /* [BLOCK / NR][operands of head_dim][NR] */
  T(operand) * k_panels;                    /* [head_dim / NR][operands of BLOCK][NR] */
  T(operand) * q_rows, *dout_rows;          /* [BLOCK][operands of head_dim] */
  T(operand) * q_panels, *dout_panels;      /* [head_dim / NR][operands of BLOCK][NR] */
  REAL *p, *ds, *addends;                   /* [BLOCK][BLOCK] */
  T(operand) * ds_rows;                     /* [BLOCK][operands of BLOCK] */
  INT *hidden;                              /* [BLOCK][BLOCK]: which scores are -inf */
  INT *kept;                                /* [BLOCK][BLOCK]: which scores are not dropped */
  REAL *dq, *dk, *dv;                       /* [BLOCK][padded head_dim] */
  REAL *buffer;                             /* [2][head_dim] */
  double *cell_sums; /* [num_heads][NUM_HEAD_NUMBERS]: shared, of the cell at hand; see there */
} T(backward_scratch);

static T(backward_scratch) T(lay_out_backward)(fa_arena *arena, const fa_problem *problem) {
  const int64_t padded = fa_round_up(problem->head_dim, NR);
  const int64_t rows = BLOCK * T(operands)(problem->head_dim), panels = T(operands)(BLOCK) * padded;
  T(backward_scratch) s = {0};
  s.k_transposed = fa_take(arena, rows, sizeof(T(operand)));
  s.v_transposed = fa_take(arena, rows, sizeof(T(operand)));
  s.k_panels = fa_take(arena, panels, sizeof(T(operand)));
  s.q_rows = fa_take(arena, rows, sizeof(T(operand)));
  s.dout_rows = fa_take(arena, rows, sizeof(T(operand)));
  s.q_panels = fa_take(arena, panels, sizeof(T(operand)));
  s.dout_panels = fa_take(arena, panels, sizeof(T(operand)));
  s.p = fa_take(arena, BLOCK * BLOCK, sizeof(REAL));
  s.ds = fa_take(arena, BLOCK * BLOCK, sizeof(REAL));
  s.ds_rows = fa_take(arena, PAIRS ? BLOCK * T(operands)(BLOCK) : 0, sizeof(T(operand)));
  s.addends = fa_take(arena, T(has_addends)(problem) ? BLOCK * BLOCK : 0, sizeof(REAL));
  s.hidden = fa_take(arena, BLOCK * BLOCK, sizeof(INT));
  s.kept = fa_take(arena, problem->dropout != 0 ? BLOCK * BLOCK : 0, sizeof(INT));
  s.dq = fa_take(arena, BLOCK * padded, sizeof(REAL));
  s.dk = fa_take(arena, BLOCK * padded, sizeof(REAL));
  s.dv = fa_take(arena, BLOCK * padded, sizeof(REAL));
  s.buffer = fa_take(arena, 2 * problem->head_dim, sizeof(REAL));
  return s;
}

static size_t T(backward_scratch_bytes)(const fa_problem *problem) {
  fa_arena sizes = {0};
  T(lay_out_backward)(&sizes, problem);
  return sizes.used;
}

/* Memory that all tasks share. Gradients of 16-bit types are summed here in f32. */
typedef struct T(backward_shared) {
  REAL *delta;        /* [batch, num_heads, seqlen_q] */
  atomic_int *steps;  /* [pairs][hands]: how many steps a hand of columns has behind it */
  REAL *dq, *dk, *dv; /* as the tensors, contiguous; NULL where REAL is the tensors' own type */
  REAL *dbias;        /* as the tensor; NULL where sums are made in the tensor itself */
  atomic_int *turns;  /* [dbias groups][blocks of columns]: how many cells have added to dbias there */
  double *cell_sums; /* [batch][hands of columns][steps][num_heads][NUM_HEAD_NUMBERS]: their gradients' terms */
} T(backward_shared);

/* Pairs of a sequence and a key/value head. */
static int64_t T(num_pairs)(const fa_problem *problem) { return problem->batch * problem->num_kv_heads; }

/* As many hands as keep some 32 cells of a step for the threads to share, but two blocks in a hand, so that
 * packing k pays. A choice by the problem alone: the order of summation must not depend on the threads. */
static int64_t T(num_hands)(const fa_problem *problem) {
  int64_t blocks = fa_divide_up(fa_max(problem->seqlen_q, problem->seqlen_k), BLOCK);
  return fa_max(fa_min(fa_divide_up(32, T(num_pairs)(problem) + 1), fa_divide_up(blocks, 2)), 1);
}

/* Those of each head in each cell of a sequence. */
static int64_t T(num_cell_sums)(const fa_problem *problem) {
  return T(num_hands)(problem) * T(num_hands)(problem) * problem->num_heads * NUM_HEAD_NUMBERS;
}

static bool T(sums_cells)(const fa_problem *problem) {
  bool is_needed = false;
  for (int n = 0; n < NUM_HEAD_NUMBERS; n++)
    is_needed |= fa_is_sum(problem, fa_tensor_gradient(head_numbers[n].id));
  return is_needed;
}

/* Whether gradients are summed in shared memory, and rounded into the tensors at the end. */
static bool T(sums_apart)(const fa_problem *problem) { return fa_dtype_bytes(problem->dtype) < sizeof(REAL); }

static T(backward_shared) T(lay_out_shared)(fa_arena *arena, const fa_problem *problem) {
  T(backward_shared) s = {0};
  s.delta = fa_take(arena, problem->batch * problem->num_heads * problem->seqlen_q, sizeof(REAL));
  s.steps = fa_take(arena, T(num_pairs)(problem) * T(num_hands)(problem), sizeof(atomic_int));
  if (T(sums_apart)(problem)) {
    int64_t queries = problem->batch * problem->seqlen_q * problem->num_heads * problem->head_dim;
    int64_t keys = problem->batch * problem->seqlen_k * problem->num_kv_heads * problem->head_dim;
    s.dq = fa_take(arena, queries, sizeof(REAL));
    s.dk = fa_take(arena, keys, sizeof(REAL));
    s.dv = fa_take(arena, keys, sizeof(REAL));
  }
  if (fa_is_sum(problem, FA_TENSOR_DBIAS)) {
    if (T(sums_bias_apart)(problem))
      s.dbias = fa_take(arena, fa_num_elements(problem, FA_TENSOR_DBIAS), sizeof(REAL));
    s.turns = fa_take(arena, T(num_turns)(problem), sizeof(atomic_int));
  }
  if (T(sums_cells)(problem))
    s.cell_sums = fa_take(arena, T(num_cell_sums)(problem) * problem->batch, sizeof(double));
  return s;
}

static size_t T(backward_shared_bytes)(const fa_problem *problem) {
  fa_arena sizes = {0};
  T(lay_out_shared)(&sizes, problem);
  return sizes.used;
}

/* Where the rows of a gradient are summed: in the tensor itself, or in shared memory. */
typedef struct T(sum_rows) {
  REAL *data;
  int64_t stride;
} T(sum_rows);

static T(sum_rows) T(sum_rows_of)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums,
                                  const fa_sequence *sequence, int64_t head) {
  fa_tensor tensor = *fa_tensor_get(job->tensors, id);
  if (sums) tensor = fa_tensor_contiguous(job->problem, id, sums);
  return (T(sum_rows)){(REAL *)T(first_row)(&tensor, sizeof(REAL), sequence, head), tensor.stride_row};
}

/* Adds from [rows, padded columns] to the rows of a gradient. */
static void T(add_rows)(T(sum_rows) to, fa_range rows, int64_t columns, const REAL *from) {
  for (int64_t r = rows.begin; r < rows.end; r++, from += fa_round_up(columns, NR)) {
    REAL *row = to.data + r * to.stride;
    for (int64_t x = 0; x < columns; x++) row[x] += from[x];
  }
}

/* ---- the first phase ------------------------------------------------------------------------------ */

/* Some rows of one head of dq or, in the tasks after those, of dk and dv. */
typedef struct T(task_rows) {
  bool of_queries;
  fa_sequence sequence;
  int64_t head;
  fa_range rows;
} T(task_rows);

static int64_t T(num_query_chunks)(const fa_problem *problem) {
  return fa_divide_up(problem->seqlen_q, PREPARE_ROWS) * problem->batch * problem->num_heads;
}

static int64_t T(num_chunks)(const fa_problem *problem) {
  return T(num_query_chunks)(problem) + fa_divide_up(problem->seqlen_k, PREPARE_ROWS) * T(num_pairs)(problem);
}

static T(task_rows) T(chunk_of)(const fa_cpu_job *job, int64_t task) {
  const fa_problem *problem = job->problem;
  int64_t num_query_chunks = T(num_query_chunks)(problem);
  bool of_queries = task < num_query_chunks;
  if (!of_queries) task -= num_query_chunks;
  int64_t heads = of_queries ? problem->num_heads : problem->num_kv_heads;
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, task / heads % problem->batch);
  int64_t begin = task / heads / problem->batch * PREPARE_ROWS;
  int64_t end = fa_min(begin + PREPARE_ROWS, of_queries ? sequence.seqlen_q : sequence.seqlen_k);
  return (T(task_rows)){of_queries, sequence, task % heads, {begin, end}};
}

static void T(clear_rows)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, const T(task_rows) * chunk) {
  T(sum_rows) to = T(sum_rows_of)(job, id, sums, &chunk->sequence, chunk->head);
  for (int64_t r = chunk->rows.begin; r < chunk->rows.end; r++)
    memset(to.data + r * to.stride, 0, (size_t)job->problem->head_dim * sizeof(REAL));
}

/* exp(sink - lse), the share of a sink */
static REAL T(share_of)(REAL sink, REAL lse) {
  return sink == -INFINITY ? 0 : T(first)(T(exp)(T(min)(T(splat)(EXP_HIGHEST), T(splat)(sink - lse))));
}

/* Whether some score of the row is not -inf. buffer [2][head_dim]. */
static bool T(has_score)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, int64_t row,
                         REAL *buffer) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, kv_head = head / (problem->num_heads / problem->num_kv_heads);
  const T(rows) k = T(rows_of)(job, FA_TENSOR_K, sequence, kv_head);
  const REAL *q_row = T(load_row)(T(rows_of)(job, FA_TENSOR_Q, sequence, head), row, d, buffer);
  fa_band band;
  for (int64_t j = 0; j < sequence->seqlen_k; j++) {
    if (!fa_sees_any(sequence, row, (fa_range){j, j + 1}, &band)) continue;
    const fa_cell at = {.batch = sequence->batch, .head = head, .row = row, .column = j};
    const REAL bias = problem->bias_heads > 0 ? T(number_at)(job, FA_TENSOR_BIAS, &at) : 0;
    if (bias == -INFINITY) continue;
    const fa_tile tile = {sequence, &band, head, {row, row + 1}, {j, j + 1}};
    const T(score_terms) terms = T(scoring_of)(job, &tile);
    const REAL *k_row = T(load_row)(k, j, d, buffer + d);
    REAL product = 0;
    for (int64_t p = 0; p < d; p++) product += q_row[p] * k_row[p];
    const REAL slope = terms.of_head[ALIBI_SLOPE] * (REAL)fa_band_distance(band, row, j);
    if (T(first)(T(score)(terms, false, T(splat)(product * terms.scale)).s) + bias - slope != -INFINITY)
      return true;
  }
  return false;
}

/* Whether the row sees nothing. Scores are looked at where that matters: where its o and dout, of which one is
 * 0 then, do not tell. */
static bool T(sees_nothing)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, int64_t row,
                            REAL delta, REAL *buffer) {
  return fa_sees_nothing(sequence, row) ||
         (!isfinite(delta) && !T(has_score)(job, sequence, head, row, buffer));
}

/* Whether a row's o, dout and lse say nothing of sinks: it sees nothing, so that its o is 0 whatever they are;
 * its lse is theirs, if a loss depends on that. */
static bool T(leaves_sinks)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, int64_t row,
                            REAL delta, REAL *buffer) {
  return job->problem->dlse_batch == 0 && T(sees_nothing)(job, sequence, head, row, delta, buffer);
}

/* drow_sinks[b,i,t,h] = -exp(row_sinks[b,i,t,h] - lse[i]) * delta[i] */
static void T(find_drow_sinks)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, int64_t row,
                               REAL delta, REAL *buffer) {
  const fa_problem *problem = job->problem;
  const bool is_left = problem->num_row_sinks > 0 && T(leaves_sinks)(job, sequence, head, row, delta, buffer);
  const REAL lse = ((const REAL *)job->tensors->lse.data)[fa_first_stat(sequence, head) + row];
  fa_cell at = {.batch = sequence->batch, .head = head, .row = row};
  for (; at.number < problem->num_row_sinks; at.number++) {
    const REAL sink = T(number_at)(job, FA_TENSOR_ROW_SINKS, &at);
    ((float *)job->tensors->drow_sinks.data)[fa_element_of(problem, FA_TENSOR_DROW_SINKS, &at)] =
        is_left ? 0 : (float)-(T(share_of)(sink, lse) * delta);
  }
}

/* delta [rows] = rowsum(o * dout) - dlse */
static void T(find_delta)(const fa_cpu_job *job, const T(task_rows) * chunk, T(backward_scratch) s,
                          REAL *delta) {
  T(rows) o = T(rows_of)(job, FA_TENSOR_O, &chunk->sequence, chunk->head);
  T(rows) dout = T(rows_of)(job, FA_TENSOR_DOUT, &chunk->sequence, chunk->head);
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim, batch = chunk->sequence.batch;
  for (int64_t r = chunk->rows.begin; r < chunk->rows.end; r++) {
    const REAL *o_row = T(load_row)(o, r, d, s.buffer), *dout_row = T(load_row)(dout, r, d, s.buffer + d);
    REAL sum = 0;
    for (int64_t p = 0; p < d; p++) sum += o_row[p] * dout_row[p];
    if (problem->dlse_batch > 0) {
      if (T(sees_nothing)(job, &chunk->sequence, chunk->head, r, sum, s.buffer))
        sum = 0; /* its o is 0, and its lse that of the sinks */
      sum -= T(number_at)(job, FA_TENSOR_DLSE, &(fa_cell){.batch = batch, .head = chunk->head, .row = r});
    }
    delta[fa_first_stat(&chunk->sequence, chunk->head) + r] = sum;
    T(find_drow_sinks)(job, &chunk->sequence, chunk->head, r, sum, s.buffer);
  }
}

static int64_t T(num_prepare_tasks)(const fa_problem *problem) {
  return T(num_chunks)(problem) + T(num_bias_chunks)(problem);
}

static void T(prepare_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem);
  for (int64_t i = 0; task == 0 && i < T(num_pairs)(problem) * T(num_hands)(problem); i++)
    atomic_init(&shared.steps[i], 0);
  for (int64_t i = 0; task == 0 && shared.turns && i < T(num_turns)(problem); i++)
    atomic_init(&shared.turns[i], 0);
  if (task >= T(num_chunks)(problem)) {
    T(clear_bias)(job, shared.dbias, T(bias_chunk)(problem, task - T(num_chunks)(problem)));
    return;
  }
  T(task_rows) chunk = T(chunk_of)(job, task);
  if (chunk.of_queries) {
    T(clear_rows)(job, FA_TENSOR_DQ, shared.dq, &chunk);
    T(find_delta)(job, &chunk, T(lay_out_backward)(&(fa_arena){.base = scratch}, problem), shared.delta);
  } else {
    T(clear_rows)(job, FA_TENSOR_DK, shared.dk, &chunk);
    T(clear_rows)(job, FA_TENSOR_DV, shared.dv, &chunk);
  }
}

/* ---- the cells ------------------------------------------------------------------------------------- */

/* The scratch, but what is packed of columns, and their dk and dv, begin so many columns later: whole panels.
 */
static T(backward_scratch) T(from_column)(const fa_problem *problem, T(backward_scratch) s, int64_t column) {
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  s.k_transposed += column * depth, s.v_transposed += column * depth;
  s.k_panels += T(operands)(column) * NR;
  s.dk += column * padded, s.dv += column * padded;
  return s;
}

/* One tile, whose columns of k and v are packed: adds to dq in memory, and to dk and dv in s. next: which one
 * is likely to follow. */
static void T(backward_tile)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) s,
                             const fa_tile *tile, const fa_tile *next, bool normal_columns) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  const int64_t panel = T(operands)(BLOCK) * NR;
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  int64_t stats = fa_first_stat(tile->sequence, tile->head) + tile->rows.begin;
  const REAL *lse = (const REAL *)job->tensors->lse.data + stats, *delta = shared->delta + stats;
  T(rows) q = T(rows_of)(job, FA_TENSOR_Q, tile->sequence, tile->head);
  T(rows) dout = T(rows_of)(job, FA_TENSOR_DOUT, tile->sequence, tile->head);
  T(sum_rows) dq = T(sum_rows_of)(job, FA_TENSOR_DQ, shared->dq, tile->sequence, tile->head);
  give_way(5 * d * num_rows * num_columns);

  T(addends) addends = {0};
  if (T(has_addends)(problem)) addends = T(find_addends)(job, tile, s.addends);
  if (T(has_addends)(problem) && !addends.data) return;
  T(addends_gradient) gradient = {0};
  if (shared->turns) gradient = T(bias_gradient_of)(job, shared->dbias, tile, s.addends);
  T(pack_rows)(q, tile->rows, d, s.q_rows);
  T(pack_rows)(dout, tile->rows, d, s.dout_rows);
  T(pack_panels)(q, tile->rows, d, s.q_panels, s.buffer);
  T(pack_panels)(dout, tile->rows, d, s.dout_panels, s.buffer);

  /* scale * q . k^T and dp = dout . v^T, then p and ds in their places */
  const bool normal = normal_columns && T(all_normal)(s.q_rows, num_rows * depth) &&
                      T(all_normal)(s.dout_rows, num_rows * depth);
  T(product_where_seen)
  (num_rows, num_columns, depth, s.q_rows, NULL, normal, depth, 1, s.k_transposed, depth * NR, s.p, BLOCK,
   STORE, (REAL)problem->scale, NULL);
  T(product_where_seen)
  (num_rows, num_columns, depth, s.dout_rows, NULL, normal, depth, 1, s.v_transposed, depth * NR, s.ds, BLOCK,
   STORE, 1, NULL);
  double *sums = s.cell_sums ? s.cell_sums + tile->head * NUM_HEAD_NUMBERS : NULL;
  bool hides = T(differentiate_scores)(job, tile, next, lse, delta, s.p, s.ds, s.ds_rows, addends, gradient,
                                       normal ? NULL : s.hidden, s.kept, sums);
  const INT *hidden = hides ? s.hidden : NULL;
  if (shared->turns && !gradient.is_sum) T(add_bias_gradient)(job, shared->dbias, tile, s.addends);

  /* dv += p^T . dout,  dk += ds^T . q,  dq += ds . k */
  const T(operand) *p = (const T(operand) *)s.p, *ds = (const T(operand) *)s.ds;
  const T(operand) *ds_rows = PAIRS ? s.ds_rows : ds;
  T(product_where_seen)
  (num_columns, d, T(operands)(num_rows), p, hidden, normal, 1, BLOCK, s.dout_panels, panel, s.dv, padded, ADD,
   0, NULL);
  T(product_where_seen)
  (num_columns, d, T(operands)(num_rows), ds, hidden, normal, 1, BLOCK, s.q_panels, panel, s.dk, padded, ADD, 0,
   NULL);
  T(product_where_seen)
  (num_rows, d, T(operands)(num_columns), ds_rows, hidden, normal, T(operands)(BLOCK), 1, s.k_panels, panel,
   s.dq, padded, STORE, 1, NULL);
  T(add_rows)(dq, tile->rows, d, s.dq);
}

/* Packs a block of columns of k and v, and clears its dk and dv. Whether the operands that a product which may
 * leave out hidden ones reads of it are normal; with PAIRS, all of them. */
static bool T(begin_columns)(const fa_cpu_job *job, T(backward_scratch) s, const fa_sequence *sequence,
                             int64_t kv_head, fa_range columns) {
  int64_t d = job->problem->head_dim;
  size_t gradient_bytes = (size_t)(BLOCK * fa_round_up(d, NR)) * sizeof(REAL);
  T(rows) k = T(rows_of)(job, FA_TENSOR_K, sequence, kv_head);
  T(rows) v = T(rows_of)(job, FA_TENSOR_V, sequence, kv_head);
  T(pack_transposed)(k, columns, d, s.k_transposed, s.buffer);
  T(pack_transposed)(v, columns, d, s.v_transposed, s.buffer);
  T(pack_panels)(k, columns, d, s.k_panels, s.buffer);
  memset(s.dk, 0, gradient_bytes);
  memset(s.dv, 0, gradient_bytes);
  const int64_t num_columns = columns.end - columns.begin, depth = T(operands)(d);
  return T(panels_normal)(T(operands)(num_columns), d, s.k_panels, T(operands)(BLOCK) * NR) &&
         (!PAIRS || T(all_normal)(s.v_transposed, fa_round_up(num_columns, NR) * depth));
}

/* One block of columns, with one hand's blocks of rows of every head that shares the columns. */
static void T(backward_columns)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) s,
                                const fa_sequence *sequence, int64_t kv_head, fa_range columns, int64_t hand) {
  const fa_problem *problem = job->problem;
  int64_t d = problem->head_dim, heads_per_kv = problem->num_heads / problem->num_kv_heads;
  bool is_begun = false, normal = true;
  for (int64_t b = 0; b < sequence->num_bands; b++) {
    fa_band band = fa_band_at(sequence, b);
    fa_blocks blocks =
        fa_blocks_in_hand(fa_blocks_that_see(sequence, &band, columns, BLOCK), hand, T(num_hands)(problem));
    if (blocks.count > 0 && !is_begun) normal = T(begin_columns)(job, s, sequence, kv_head, columns);
    is_begun |= blocks.count > 0;
    for (int64_t head = kv_head * heads_per_kv; head < (kv_head + 1) * heads_per_kv; head++)
      for (int64_t i = 0; i < blocks.count; i++) {
        const bool is_last = i + 1 == blocks.count;
        const fa_range rows = fa_rows_in_band(&band, fa_block_at(blocks, i));
        const fa_tile tile = {sequence, &band, head, rows,
                              fa_in_units(columns, fa_columns_in_band(&band, rows), WHOLE)};
        fa_tile next = tile;
        next.rows = fa_block_at(blocks, is_last ? 0 : i + 1);
        if (is_last) next.columns.begin += T(num_hands)(problem) * BLOCK;
        if (fa_tile_sees_any(&tile)) T(backward_tile)
        (job, shared, T(from_column)(problem, s, tile.columns.begin - columns.begin), &tile, &next, normal);
      }
  }
  if (!is_begun) return;
  T(add_rows)(T(sum_rows_of)(job, FA_TENSOR_DK, shared->dk, sequence, kv_head), columns, d, s.dk);
  T(add_rows)(T(sum_rows_of)(job, FA_TENSOR_DV, shared->dv, sequence, kv_head), columns, d, s.dv);
}

static int64_t T(num_cells)(const fa_problem *problem) {
  if (problem->seqlen_q == 0 || problem->seqlen_k == 0) return 0; /* nor has the first phase a task then */
  return T(num_pairs)(problem) * T(num_hands)(problem) * T(num_hands)(problem);
}

static void T(cell_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  int64_t num_hands = T(num_hands)(problem), num_pairs = T(num_pairs)(problem);
  int64_t step = task / (num_pairs * num_hands), pair = task / num_hands % num_pairs, t = task % num_hands;
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem);
  T(backward_scratch) s = T(lay_out_backward)(&(fa_arena){.base = scratch}, problem);
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, pair / problem->num_kv_heads);
  fa_blocks blocks = fa_blocks_in_hand(fa_blocks_of_columns(&sequence, BLOCK), t, num_hands);

  if (shared.cell_sums) {
    s.cell_sums = shared.cell_sums + T(num_cell_sums)(problem) * sequence.batch +
                  (t * num_hands + step) * problem->num_heads * NUM_HEAD_NUMBERS;
    const int64_t count = problem->num_heads / problem->num_kv_heads * NUM_HEAD_NUMBERS;
    memset(s.cell_sums + pair % problem->num_kv_heads * count, 0, (size_t)count * sizeof *s.cell_sums);
  }

  /* The hand of rows was with hand t + 1 of columns in the step before. */
  atomic_int *steps = shared.steps + pair * num_hands;
  wait_until(&steps[t], (int)step);
  wait_until(&steps[(t + 1) % num_hands], (int)step);
  const T(bias_group) group = T(bias_group_of)(problem, pair);
  const int64_t turn = step * group.size + group.number;
  for (int64_t i = 0; i < blocks.count; i++) {
    const fa_range columns = fa_block_at(blocks, i);
    atomic_int *turns = shared.turns ? shared.turns + T(turns_of)(problem, group.group, columns) : NULL;
    if (turns) wait_until(turns, (int)turn);
    T(backward_columns)
    (job, &shared, s, &sequence, pair % problem->num_kv_heads, columns, (t + step) % num_hands);
    if (turns) atomic_store_explicit(turns, (int)turn + 1, memory_order_release);
  }
  atomic_store_explicit(&steps[t], (int)step + 1, memory_order_release);
}

/* ---- the last phase -------------------------------------------------------------------------------- */

/* The gradients that are sums over whole sequences of a head: those by the head's numbers, and dsink. */
enum { T(NUM_HEAD_SUMS) = NUM_HEAD_NUMBERS + 1 };

static fa_tensor_id T(head_sum_at)(int number) {
  return number < NUM_HEAD_NUMBERS ? (fa_tensor_id)fa_tensor_gradient(head_numbers[number].id)
                                   : FA_TENSOR_DSINK;
}

/* dsink[t,h] = -sum_{b,i} exp(sink[t,h] - lse[i]) * delta[i]: sum with the terms of a sequence. */
static double T(add_sink_terms)(const fa_cpu_job *job, const T(backward_shared) * shared,
                                const fa_sequence *sequence, const fa_cell *cell, double sum, REAL *buffer) {
  const int64_t stats = fa_first_stat(sequence, cell->head);
  const REAL *lse = (const REAL *)job->tensors->lse.data + stats, *delta = shared->delta + stats;
  const REAL sink = T(number_at)(job, FA_TENSOR_SINK, cell);
  for (int64_t i = 0; i < sequence->seqlen_q; i++)
    if (!T(leaves_sinks)(job, sequence, cell->head, i, delta[i], buffer))
      sum -= (double)(T(share_of)(sink, lse[i]) * delta[i]);
  return sum;
}

/* The gradient by a number of a head: sum with the terms of a sequence, cell by cell. */
static double T(add_cell_sums)(const fa_problem *problem, const T(backward_shared) * shared, int number,
                               const fa_sequence *sequence, const fa_cell *cell, double sum) {
  const int64_t count = T(num_cells)(problem) > 0 ? T(num_cell_sums)(problem) : 0;
  const double *terms = shared->cell_sums + count * sequence->batch;
  for (int64_t i = cell->head * NUM_HEAD_NUMBERS + number; i < count;
       i += problem->num_heads * NUM_HEAD_NUMBERS)
    sum += terms[i];
  return sum;
}

static void T(finish_head_sum)(const fa_cpu_job *job, const T(backward_shared) * shared, int number,
                               int64_t element, REAL *buffer) {
  const fa_problem *problem = job->problem;
  const fa_tensor_id id = T(head_sum_at)(number);
  const fa_cell cell = fa_cell_of(problem, id, element);
  const int64_t num_batches = fa_varies_along(problem, id, FA_AXIS_BATCH) ? 1 : problem->batch;
  double sum = 0;
  for (int64_t batch = cell.batch; batch < cell.batch + num_batches; batch++) {
    fa_sequence sequence = fa_sequence_of(problem, job->tensors, batch);
    sum = number < NUM_HEAD_NUMBERS ? T(add_cell_sums)(problem, shared, number, &sequence, &cell, sum)
                                    : T(add_sink_terms)(job, shared, &sequence, &cell, sum, buffer);
  }
  ((float *)fa_tensor_get(job->tensors, id)->data)[element] = (float)sum;
}

static int64_t T(num_head_sum_tasks)(const fa_problem *problem, int number) {
  const fa_tensor_id id = T(head_sum_at)(number);
  return fa_is_sum(problem, id) ? fa_num_elements(problem, id) : 0;
}

static int64_t T(num_finish_tasks)(const fa_problem *problem) {
  int64_t count = T(sums_apart)(problem) ? T(num_chunks)(problem) : 0;
  count += fa_is_sum(problem, FA_TENSOR_DBIAS) && T(sums_bias_apart)(problem) ? T(num_bias_chunks)(problem) : 0;
  for (int number = 0; number < T(NUM_HEAD_SUMS); number++) count += T(num_head_sum_tasks)(problem, number);
  return count;
}

static void T(finish_rows)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, const T(task_rows) * chunk) {
  T(sum_rows) from = T(sum_rows_of)(job, id, sums, &chunk->sequence, chunk->head);
  T(rows) to = T(rows_of)(job, id, &chunk->sequence, chunk->head);
  for (int64_t r = chunk->rows.begin; r < chunk->rows.end; r++)
    T(store_row)(to, r, job->problem->head_dim, from.data + r * from.stride);
}

static void T(finish_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  T(backward_scratch) s = T(lay_out_backward)(&(fa_arena){.base = scratch}, problem);
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem);
  for (int number = 0; number < T(NUM_HEAD_SUMS); number++) {
    const int64_t num_tasks = T(num_head_sum_tasks)(problem, number);
    if (task < num_tasks) {
      T(finish_head_sum)(job, &shared, number, task, s.buffer);
      return;
    }
    task -= num_tasks;
  }
  const int64_t num_chunks = T(sums_apart)(problem) ? T(num_chunks)(problem) : 0;
  if (task >= num_chunks) {
    T(finish_bias)(job, shared.dbias, T(bias_chunk)(problem, task - num_chunks));
    return;
  }
  T(task_rows) chunk = T(chunk_of)(job, task);
  if (chunk.of_queries) {
    T(finish_rows)(job, FA_TENSOR_DQ, shared.dq, &chunk);
  } else {
    T(finish_rows)(job, FA_TENSOR_DK, shared.dk, &chunk);
    T(finish_rows)(job, FA_TENSOR_DV, shared.dv, &chunk);
  }
}
