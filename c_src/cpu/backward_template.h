/*
 * Template: the backward pass, FlashAttention-2's (Dao 2023, algorithm 2), without atomic additions and with
 * the same bits for any number of threads.
 *
 *     q, o, dout, dq [batch, seqlen_q, num_heads, head_dim]     lse [batch, num_heads, seqlen_q]
 *     k, v, dk, dv [batch, seqlen_k, num_kv_heads, head_dim]    sink, dsink [num_sinks, num_heads]
 *
 * Three phases: delta = rowsum(o * dout) - dlse, drow_sinks, and dq cleared; dq, dk and dv; dq of lanes summed,
 * dk and dv of spans, dq of 16-bit types rounded, and dsink.
 *
 * A task of the second phase has some blocks of columns of a pair of a sequence and a key/value head. It packs
 * these once, goes through the blocks of rows that see them, downwards, and writes their dk and dv. What it
 * adds to dq it adds behind all earlier columns of its pair, so that sums have the same bits for any number of
 * threads: tasks follow each other down the rows. A task that is ahead keeps what it is to add, and goes on,
 * until it has no more room. Of few pairs columns are dealt out to lanes, each with a dq of its own; these are
 * summed at the end. Where columns are few, too, rows are cut into spans, of which each has tasks for all
 * columns, and a dk and dv of its own. Tasks are numbered by columns first, so one waits only for lower
 * numbers, which have started: it cannot wait for ever.
 *
 * Parameters: REAL, T(name), EXP_HIGHEST, BLOCK, NR (see kernels.c), and the templates before this one.
 */

#define PREPARE_ROWS 128 /* rows of a task of the first and the last phase */
#define MOST_BLOCKS  4   /* of columns, of a task of the second */
#define HALF_STRIP   (STRIP / 2)
#define MOST_KEPT    8          /* tiles of dq of a task that is ahead */
#define MANY_LANES   8          /* of all pairs */
#define LANES_BYTES  (16 << 20) /* of dq of all lanes */
#define MANY_TASKS   16         /* of all pairs: where there are fewer, rows have spans */
#define MOST_SPANS   8          /* of a pair */
#define LEAST_PLACES 8          /* of a span: it packs all columns anew */

_Static_assert(HALF_STRIP % MR == 0, "whole tiles of products");

/* A band, by its number, and the blocks of rows that see some columns in it. */
typedef struct T(seen_band) {
  int32_t band, first, end;
} T(seen_band);

/* A block of columns, packed, and what is summed of it. */
typedef struct T(column_block) {
  fa_range columns;
  int64_t num_bands;
  T(seen_band) * bands;                     /* [num_bands of all]: those in which the columns are seen */
  T(operand) * k_transposed, *v_transposed; /* [BLOCK / NR][operands of head_dim][NR] */
  T(operand) * k_panels;                    /* [head_dim / NR][operands of BLOCK][NR] */
  bool normal;                              /* see T(pack_columns) */
  REAL *dk, *dv;                            /* [BLOCK][padded head_dim] */
  REAL *bias_sums;                          /* [T(num_bias_rows)][BLOCK] */
  double *head_sums;                        /* [num_heads][NUM_HEAD_NUMBERS]: shared */
} T(column_block);

/* Some rows of a head, packed. */
typedef struct T(row_block) {
  int64_t head; /* -1: there are none */
  fa_range rows;
  T(operand) * q_rows, *dout_rows;     /* [BLOCK][operands of head_dim] */
  T(operand) * q_panels, *dout_panels; /* [head_dim / NR][operands of BLOCK][NR] */
  bool normal;
} T(row_block);

/* What a tile adds to dq, and when. */
typedef struct T(kept_tile) {
  REAL *dq; /* [BLOCK][padded head_dim] */
  int64_t head, place;
  fa_range rows;
} T(kept_tile);

typedef struct T(backward_scratch) {
  T(column_block) blocks[MOST_BLOCKS];
  T(row_block) rows;
  REAL *p, *ds, *addends;             /* [BLOCK][BLOCK] */
  T(operand) * ds_rows;               /* [BLOCK][operands of BLOCK] */
  INT *hidden;                        /* [BLOCK][BLOCK]: which scores are -inf */
  INT *kept;                          /* [BLOCK][BLOCK]: which scores are not dropped */
  T(kept_tile) kept_tiles[MOST_KEPT]; /* a ring, in the order of their places: */
  int first_kept, num_kept;           /* so many from the first on */
  REAL *buffer;                       /* [2][head_dim] */
} T(backward_scratch);

/* Pairs of a sequence and a key/value head. */
static int64_t T(num_pairs)(const fa_problem *problem) { return problem->batch * problem->num_kv_heads; }

static int64_t T(num_row_blocks)(const fa_problem *problem) {
  return fa_max(fa_divide_up(problem->seqlen_q, BLOCK), 1);
}

static int64_t T(num_column_blocks)(const fa_problem *problem) {
  return fa_divide_up(problem->seqlen_k, BLOCK);
}

/* How many blocks of columns a lane has, in whole tasks. Tasks of one lane that are under way at a time hold
 * each other up, where rows see most columns; what lanes cost is memory, and a sum, which would be much beside
 * what a mask leaves. A choice by the problem alone, as sums depend on it. */
static int64_t T(lane_blocks)(const fa_problem *problem) {
  const int64_t blocks = fa_max(T(num_column_blocks)(problem), 1);
  const int64_t dq_bytes = fa_num_elements(problem, FA_TENSOR_DQ) * (int64_t)sizeof(REAL);
  const bool sees_most =
      problem->num_bands <= 1 && problem->window_left + problem->window_right >= problem->seqlen_k / 2;
  const int64_t wanted =
      sees_most ? fa_min(MANY_LANES / fa_max(T(num_pairs)(problem), 1), LANES_BYTES / fa_max(dq_bytes, 1)) : 1;
  return fa_round_up(fa_divide_up(blocks, fa_max(wanted, 1)), MOST_BLOCKS);
}

static int64_t T(num_lanes)(const fa_problem *problem) {
  return fa_divide_up(fa_max(T(num_column_blocks)(problem), 1), T(lane_blocks)(problem));
}

/* How many blocks of rows a span has: all of them where there are tasks enough, or where sums of dbias are made
 * by columns. A choice by the problem alone, as sums depend on it; and by nothing but whether there are few
 * tasks that slices of it change. */
static int64_t T(span_blocks)(const fa_problem *problem) {
  const int64_t blocks = T(num_row_blocks)(problem);
  const int64_t places = blocks * (problem->num_heads / problem->num_kv_heads);
  if (T(num_pairs)(problem) * T(num_column_blocks)(problem) >= MANY_TASKS || T(num_bias_rows)(problem) > 0)
    return blocks;
  return fa_divide_up(blocks, fa_max(fa_min(MOST_SPANS, places / LEAST_PLACES), 1));
}

static int64_t T(num_spans)(const fa_problem *problem) {
  return fa_divide_up(T(num_row_blocks)(problem), T(span_blocks)(problem));
}

/* Blocks of columns of a task. The more they are, the seldomer rows of q and dout are packed; but they should
 * stay in cache, and each thread is to have several tasks. Gradients do not depend on it. */
static int64_t T(task_blocks)(const fa_problem *problem, int32_t of_threads) {
  int64_t blocks = problem->head_dim <= 128 ? MOST_BLOCKS : MOST_BLOCKS / 2;
  while (blocks > 1 &&
         fa_divide_up(T(num_column_blocks)(problem), blocks) * T(num_pairs)(problem) * T(num_spans)(problem) <
             4 * of_threads)
    blocks /= 2;
  return blocks;
}

/* Tasks of a pair's span: lane by lane in turn. Some may have no columns. */
static int64_t T(span_tasks)(const fa_problem *problem, int32_t of_threads) {
  return T(num_lanes)(problem) * (T(lane_blocks)(problem) / T(task_blocks)(problem, of_threads));
}

static int64_t T(num_column_tasks)(const fa_problem *problem, int32_t of_threads) {
  return T(num_spans)(problem) * T(num_pairs)(problem) * T(span_tasks)(problem, of_threads);
}

static T(column_block) T(lay_out_columns)(fa_arena *arena, const fa_problem *problem) {
  const int64_t padded = fa_round_up(problem->head_dim, NR);
  const int64_t rows = BLOCK * T(operands)(problem->head_dim), panels = T(operands)(BLOCK) * padded;
  T(column_block) b = {0};
  b.k_transposed = fa_take(arena, rows, sizeof(T(operand)));
  b.v_transposed = fa_take(arena, rows, sizeof(T(operand)));
  b.k_panels = fa_take(arena, panels, sizeof(T(operand)));
  b.dk = fa_take(arena, BLOCK * padded, sizeof(REAL));
  b.dv = fa_take(arena, BLOCK * padded, sizeof(REAL));
  b.bias_sums = fa_take(arena, T(num_bias_rows)(problem) * BLOCK, sizeof(REAL));
  b.bands = fa_take(arena, fa_max(problem->num_bands, 1), sizeof *b.bands);
  return b;
}

static T(backward_scratch) T(lay_out_backward)(fa_arena *arena, const fa_problem *problem, int32_t of_threads) {
  const int64_t padded = fa_round_up(problem->head_dim, NR);
  const int64_t rows = BLOCK * T(operands)(problem->head_dim), panels = T(operands)(BLOCK) * padded;
  T(backward_scratch) s = {.rows = {.head = -1}};
  for (int64_t i = 0; i < T(task_blocks)(problem, of_threads); i++)
    s.blocks[i] = T(lay_out_columns)(arena, problem);
  s.rows.q_rows = fa_take(arena, rows, sizeof(T(operand)));
  s.rows.dout_rows = fa_take(arena, rows, sizeof(T(operand)));
  s.rows.q_panels = fa_take(arena, panels, sizeof(T(operand)));
  s.rows.dout_panels = fa_take(arena, panels, sizeof(T(operand)));
  s.p = fa_take(arena, BLOCK * BLOCK, sizeof(REAL));
  s.ds = fa_take(arena, BLOCK * BLOCK, sizeof(REAL));
  s.ds_rows = fa_take(arena, PAIRS ? BLOCK * T(operands)(BLOCK) : 0, sizeof(T(operand)));
  s.addends = fa_take(arena, T(has_addends)(problem) ? BLOCK * BLOCK : 0, sizeof(REAL));
  s.hidden = fa_take(arena, BLOCK * BLOCK, sizeof(INT));
  s.kept = fa_take(arena, problem->dropout != 0 ? BLOCK * BLOCK : 0, sizeof(INT));
  for (int i = 0; i < MOST_KEPT; i++) s.kept_tiles[i].dq = fa_take(arena, BLOCK * padded, sizeof(REAL));
  s.buffer = fa_take(arena, 2 * problem->head_dim, sizeof(REAL));
  return s;
}

static size_t T(backward_scratch_bytes)(const fa_problem *problem, int32_t of_threads) {
  fa_arena sizes = {0};
  T(lay_out_backward)(&sizes, problem, of_threads);
  return sizes.used;
}

/* How far a task has come with its columns. */
typedef struct T(progress) {
  atomic_int passed; /* so many of its places, in order; -1: it has not begun; INT_MAX: it has ended */
  int32_t first_row_block, end_row_block; /* those that it comes to lie within these */
} T(progress);

/* Memory that all tasks share. */
typedef struct T(backward_shared) {
  REAL *delta;            /* [batch, num_heads, seqlen_q] */
  T(progress) * progress; /* [spans][pairs][T(span_tasks)] */
  REAL *dq;               /* [lanes] of sums, as the tensor; NULL where they are made in the tensor itself */
  REAL *dk, *dv;          /* [spans] of sums, as the tensor; NULL where there is one span */
  REAL *dbias;            /* as the tensor; NULL where sums are made in the tensor itself */
  double *head_sums;      /* [spans][batch][blocks of columns][num_heads][NUM_HEAD_NUMBERS] */
} T(backward_shared);

/* Those of each block of columns of a sequence. */
static int64_t T(num_head_sums)(const fa_problem *problem) { return problem->num_heads * NUM_HEAD_NUMBERS; }

/* Where those of a span and a batch begin, as an index. */
static int64_t T(first_head_sum)(const fa_problem *problem, int64_t span, int64_t batch) {
  return (span * problem->batch + batch) * T(num_column_blocks)(problem) * T(num_head_sums)(problem);
}

static bool T(sums_heads)(const fa_problem *problem) {
  bool is_needed = false;
  for (int n = 0; n < NUM_HEAD_NUMBERS; n++)
    is_needed |= fa_is_sum(problem, fa_tensor_gradient(head_numbers[n].id));
  return is_needed;
}

/* Whether dq is summed in shared memory, and put into the tensor at the end. */
static bool T(sums_apart)(const fa_problem *problem) {
  return fa_dtype_bytes(problem->dtype) < sizeof(REAL) || T(num_lanes)(problem) > 1;
}

static T(backward_shared) T(lay_out_shared)(fa_arena *arena, const fa_problem *problem, int32_t of_threads) {
  T(backward_shared) s = {0};
  s.delta = fa_take(arena, problem->batch * problem->num_heads * problem->seqlen_q, sizeof(REAL));
  s.progress = fa_take(arena, T(num_column_tasks)(problem, of_threads), sizeof *s.progress);
  if (T(sums_apart)(problem))
    s.dq = fa_take(arena, T(num_lanes)(problem) * fa_num_elements(problem, FA_TENSOR_DQ), sizeof(REAL));
  if (T(num_spans)(problem) > 1) {
    s.dk = fa_take(arena, T(num_spans)(problem) * fa_num_elements(problem, FA_TENSOR_DK), sizeof(REAL));
    s.dv = fa_take(arena, T(num_spans)(problem) * fa_num_elements(problem, FA_TENSOR_DV), sizeof(REAL));
  }
  if (fa_is_sum(problem, FA_TENSOR_DBIAS) && T(sums_bias_apart)(problem))
    s.dbias = fa_take(arena, fa_num_elements(problem, FA_TENSOR_DBIAS), sizeof(REAL));
  if (T(sums_heads)(problem))
    s.head_sums = fa_take(arena, T(first_head_sum)(problem, T(num_spans)(problem), 0), sizeof(double));
  return s;
}

static size_t T(backward_shared_bytes)(const fa_problem *problem, int32_t of_threads) {
  fa_arena sizes = {0};
  T(lay_out_shared)(&sizes, problem, of_threads);
  return sizes.used;
}

/* Where the rows of a part of dq, dk or dv are summed: in the tensor itself, or in shared memory. */
typedef struct T(sum_rows) {
  REAL *data;
  int64_t stride;
} T(sum_rows);

static T(sum_rows) T(sums_of)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, int64_t part,
                              const fa_sequence *sequence, int64_t head) {
  fa_tensor tensor = *fa_tensor_get(job->tensors, id);
  if (sums) tensor = fa_tensor_contiguous(job->problem, id, sums + part * fa_num_elements(job->problem, id));
  return (T(sum_rows)){(REAL *)T(first_row)(&tensor, sizeof(REAL), sequence, head), tensor.stride_row};
}

/* Adds rows of so many columns, a stride apart, to rows of sums. */
static void T(add_rows)(T(sum_rows) to, fa_range rows, int64_t columns, const REAL *from, int64_t stride) {
  for (int64_t r = rows.begin; r < rows.end; r++, from += stride) {
    REAL *row = to.data + r * to.stride;
    for (int64_t x = 0; x < columns; x++) row[x] += from[x];
  }
}

/* Stores them to rows of a tensor. */
static void T(store_rows)(T(rows) to, fa_range rows, int64_t columns, const REAL *from, int64_t stride) {
  for (int64_t r = rows.begin; r < rows.end; r++, from += stride) T(store_row)(to, r, columns, from);
}

/* ---- the first phase ------------------------------------------------------------------------------ */

/* Some rows of one head. */
typedef struct T(task_rows) {
  fa_sequence sequence;
  int64_t head;
  fa_range rows;
} T(task_rows);

static int64_t T(num_chunks)(const fa_problem *problem) {
  return fa_divide_up(problem->seqlen_q, PREPARE_ROWS) * problem->batch * problem->num_heads;
}

/* Of tensors of so many heads and rows. */
static T(task_rows) T(chunk_of)(const fa_cpu_job *job, int64_t task, int64_t heads, int64_t num_rows) {
  const fa_problem *problem = job->problem;
  const int64_t begin = task / heads / problem->batch * PREPARE_ROWS;
  fa_sequence sequence = fa_sequence_of(problem, job->tensors, task / heads % problem->batch);
  return (T(task_rows)){sequence, task % heads, {begin, fa_min(begin + PREPARE_ROWS, num_rows)}};
}

static void T(clear_dq)(const fa_cpu_job *job, REAL *sums, const T(task_rows) * chunk) {
  for (int64_t lane = 0; lane < T(num_lanes)(job->problem); lane++) {
    T(sum_rows) to = T(sums_of)(job, FA_TENSOR_DQ, sums, lane, &chunk->sequence, chunk->head);
    for (int64_t r = chunk->rows.begin; r < chunk->rows.end; r++)
      memset(to.data + r * to.stride, 0, (size_t)job->problem->head_dim * sizeof(REAL));
  }
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
    const fa_tile tile = {sequence, &band, head, {row, row + 1}, {j, j + 1}, 0};
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
    REAL sum = T(dot)(o_row, dout_row, d);
    if (problem->dlse_batch > 0) {
      if (T(sees_nothing)(job, &chunk->sequence, chunk->head, r, sum, s.buffer))
        sum = 0; /* its o is 0, and its lse that of the sinks */
      sum -= T(number_at)(job, FA_TENSOR_DLSE, &(fa_cell){.batch = batch, .head = chunk->head, .row = r});
    }
    delta[fa_first_stat(&chunk->sequence, chunk->head) + r] = sum;
    T(find_drow_sinks)(job, &chunk->sequence, chunk->head, r, sum, s.buffer);
  }
}

/* One more task for what follows tasks of the second phase. */
static int64_t T(num_prepare_tasks)(const fa_problem *problem, int32_t of_threads) {
  (void)of_threads;
  return 1 + T(num_chunks)(problem) + T(num_bias_chunks)(problem);
}

static void T(prepare_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem, job->of_threads);
  if (task == 0) {
    for (int64_t i = 0; i < T(num_column_tasks)(problem, job->of_threads); i++)
      atomic_init(&shared.progress[i].passed, -1);
  } else if (task - 1 < T(num_chunks)(problem)) {
    T(task_rows) chunk = T(chunk_of)(job, task - 1, problem->num_heads, problem->seqlen_q);
    const T(backward_scratch) s = T(lay_out_backward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
    T(clear_dq)(job, shared.dq, &chunk);
    T(find_delta)(job, &chunk, s, shared.delta);
  } else {
    T(clear_bias)(job, shared.dbias, T(bias_chunk)(problem, task - 1 - T(num_chunks)(problem)));
  }
}

/* ---- the second phase ------------------------------------------------------------------------------ */

/* The part of a block from a column on: whole panels. */
static T(column_block) T(from_column)(const fa_problem *problem, T(column_block) block, int64_t column) {
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  block.k_transposed += column * depth, block.v_transposed += column * depth;
  block.k_panels += T(operands)(column) * NR;
  block.dk += column * padded, block.dv += column * padded, block.bias_sums += column;
  return block;
}

/* The part of rows from one on: whole tiles. */
static T(row_block) T(from_row)(const fa_problem *problem, T(row_block) rows, int64_t row) {
  const int64_t depth = T(operands)(problem->head_dim);
  rows.q_rows += row * depth, rows.dout_rows += row * depth;
  rows.q_panels += T(operands)(row) * NR, rows.dout_panels += T(operands)(row) * NR;
  return rows;
}

/* Packs rows of a head, unless these are there already. */
static void T(begin_rows)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t head, fa_range rows,
                          T(row_block) * to, REAL *buffer) {
  if (to->head == head && to->rows.begin == rows.begin && to->rows.end == rows.end) return;
  const int64_t d = job->problem->head_dim, count = (rows.end - rows.begin) * T(operands)(d);
  const T(rows) q = T(rows_of)(job, FA_TENSOR_Q, sequence, head);
  const T(rows) dout = T(rows_of)(job, FA_TENSOR_DOUT, sequence, head);
  T(pack_rows)(q, rows, d, to->q_rows);
  T(pack_rows)(dout, rows, d, to->dout_rows);
  T(pack_panels)(q, rows, d, to->q_panels, buffer);
  T(pack_panels)(dout, rows, d, to->dout_panels, buffer);
  to->head = head, to->rows = rows;
  to->normal = T(all_normal)(to->q_rows, count) && T(all_normal)(to->dout_rows, count);
}

/* What a task of the second phase does, and which tasks come before it. Its places are the blocks of rows and,
 * in each, the heads that share the columns. */
typedef struct T(column_task) {
  int64_t span;         /* of the pair, */
  int64_t number, lane; /* among whose tasks and lanes */
  int64_t kv_head, group_size, num_blocks;
  fa_sequence sequence;
  T(progress) * own;
  T(bias_group) bias_group; /* of pairs that add to the same elements of dbias */
  int64_t first_task;       /* of the lane: those before have ended, */
  int64_t first_pair;       /* and of the group's pairs */
} T(column_task);

static T(progress) * T(progress_of)(const fa_cpu_job *job, const T(backward_shared) * shared, int64_t span,
                                    int64_t pair, int64_t number) {
  return shared->progress +
         (span * T(num_pairs)(job->problem) + pair) * T(span_tasks)(job->problem, job->of_threads) + number;
}

/* Whether a task has a place behind it, in the order of its own places, or does not come to its rows. */
static bool T(has_passed)(T(progress) * other, int64_t row_block, int64_t place) {
  const int passed = atomic_load_explicit(&other->passed, memory_order_acquire);
  return passed > place ||
         (passed >= 0 && (row_block < other->first_row_block || row_block >= other->end_row_block));
}

static bool T(has_ended)(T(progress) * other) {
  return atomic_load_explicit(&other->passed, memory_order_acquire) == INT_MAX;
}

/* Whether all that the tasks before it add to the rows of a place is there. */
static bool T(is_its_turn)(const fa_problem *problem, T(column_task) * task, int64_t place) {
  const int64_t step = T(num_lanes)(problem);
  for (int64_t i = task->first_task; i < task->number; i += step) {
    T(progress) *other = task->own + (i - task->number);
    if (!T(has_passed)(other, place / task->group_size, place)) return false;
    if (i == task->first_task && T(has_ended)(other)) task->first_task += step;
  }
  return true;
}

/* Adds kept tiles to dq, in order, until it is not the next one's turn; waits for that while there are more
 * than most. Then the task has those places behind it that come before the next one, or before `place`. */
static void T(add_kept)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) * s,
                        T(column_task) * task, int most, int64_t place) {
  const int64_t d = job->problem->head_dim;
  while (s->num_kept > 0) {
    const T(kept_tile) *tile = &s->kept_tiles[s->first_kept];
    if (!T(is_its_turn)(job->problem, task, tile->place)) {
      if (s->num_kept <= most) break;
      sched_yield();
      continue;
    }
    T(add_rows)
    (T(sums_of)(job, FA_TENSOR_DQ, shared->dq, task->lane, &task->sequence, tile->head), tile->rows, d,
     tile->dq, fa_round_up(d, NR));
    s->first_kept = --s->num_kept > 0 ? (s->first_kept + 1) % MOST_KEPT : 0;
  }
  const int64_t passed = s->num_kept > 0 ? s->kept_tiles[s->first_kept].place : place;
  atomic_store_explicit(&task->own->passed, (int)passed, memory_order_release);
}

/* One tile of a task's place: adds to dk and dv of its columns, and to dq when it is its turn. Its rows are
 * some of those that are packed together. */
static void T(backward_tile)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) * s,
                             T(column_task) * task, int64_t place, const fa_tile *tile, fa_range packed,
                             T(column_block) columns) {
  const fa_problem *problem = job->problem;
  const int64_t d = problem->head_dim, depth = T(operands)(d), padded = fa_round_up(d, NR);
  const int64_t panel = T(operands)(BLOCK) * NR;
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  int64_t stats = fa_first_stat(tile->sequence, tile->head) + tile->rows.begin;
  const REAL *lse = (const REAL *)job->tensors->lse.data + stats, *delta = shared->delta + stats;
  const bool sums_bias = fa_is_sum(problem, FA_TENSOR_DBIAS);
  give_way(5 * d * num_rows * num_columns);

  T(addends) addends = {0};
  if (T(has_addends)(problem)) addends = T(find_addends)(job, tile, s->addends);
  if (T(has_addends)(problem) && !addends.data) return;
  T(addends_gradient) gradient = {0};
  if (sums_bias) gradient = T(bias_gradient_of)(job, shared->dbias, tile, columns.bias_sums, s->addends);
  T(begin_rows)(job, tile->sequence, tile->head, packed, &s->rows, s->buffer);
  const T(row_block) rows = T(from_row)(problem, s->rows, tile->rows.begin - packed.begin);

  /* scale * q . k^T and dp = dout . v^T, then p and ds in their places */
  const bool normal = columns.normal && rows.normal;
  T(product_where_seen)
  (num_rows, num_columns, depth, rows.q_rows, NULL, normal, depth, 1, columns.k_transposed, depth * NR, s->p,
   BLOCK, STORE, (REAL)problem->scale, NULL);
  T(product_where_seen)
  (num_rows, num_columns, depth, rows.dout_rows, NULL, normal, depth, 1, columns.v_transposed, depth * NR,
   s->ds, BLOCK, STORE, 1, NULL);
  double *sums = columns.head_sums ? columns.head_sums + tile->head * NUM_HEAD_NUMBERS : NULL;
  fa_tile next = *tile; /* which is likely to follow */
  next.rows.begin += BLOCK;
  bool hides = T(differentiate_scores)(job, tile, &next, lse, delta, s->p, s->ds, s->ds_rows, addends, gradient,
                                       normal ? NULL : s->hidden, s->kept, sums);
  const INT *hidden = hides ? s->hidden : NULL;
  if (sums_bias && !gradient.is_sum) T(add_bias_gradient)(job, shared->dbias, tile, s->addends);

  /* dv += p^T . dout,  dk += ds^T . q,  dq += ds . k */
  const T(operand) *p = (const T(operand) *)s->p, *ds = (const T(operand) *)s->ds;
  const T(operand) *ds_rows = PAIRS ? s->ds_rows : ds;
  T(product_in_tile)
  (tile, true, d, p, hidden, normal, 1, BLOCK, rows.dout_panels, panel, columns.dv, padded, ADD, 0, NULL);
  T(product_in_tile)
  (tile, true, d, ds, hidden, normal, 1, BLOCK, rows.q_panels, panel, columns.dk, padded, ADD, 0, NULL);
  if (s->num_kept == MOST_KEPT) T(add_kept)(job, shared, s, task, MOST_KEPT - 1, place);
  T(kept_tile) *kept = &s->kept_tiles[(s->first_kept + s->num_kept++) % MOST_KEPT];
  kept->head = tile->head, kept->place = place, kept->rows = tile->rows;
  T(product_in_tile)
  (tile, false, d, ds_rows, hidden, normal, T(operands)(BLOCK), 1, columns.k_panels, panel, kept->dq, padded,
   STORE, 1, NULL);
  T(add_kept)(job, shared, s, task, MOST_KEPT, place);
}

/* Packs a block of columns of k and v. Whether the operands that a product which may leave out hidden ones
 * reads of it are normal; with PAIRS, all of them. */
static bool T(pack_columns)(const fa_cpu_job *job, const fa_sequence *sequence, int64_t kv_head,
                            const T(column_block) * to, REAL *buffer) {
  const int64_t d = job->problem->head_dim, depth = T(operands)(d);
  const fa_range columns = to->columns;
  const int64_t num_columns = columns.end - columns.begin;
  T(rows) k = T(rows_of)(job, FA_TENSOR_K, sequence, kv_head);
  T(rows) v = T(rows_of)(job, FA_TENSOR_V, sequence, kv_head);
  T(pack_transposed)(k, columns, d, to->k_transposed, buffer);
  T(pack_transposed)(v, columns, d, to->v_transposed, buffer);
  T(pack_panels)(k, columns, d, to->k_panels, buffer);
  return T(panels_normal)(T(operands)(num_columns), d, to->k_panels, T(operands)(BLOCK) * NR) &&
         (!PAIRS || T(all_normal)(to->v_transposed, fa_round_up(num_columns, NR) * depth));
}

/* The bands of a sequence in which some rows of a span see some columns, in order; returns how many. span:
 * blocks of rows. */
static int64_t T(find_bands)(const fa_sequence *sequence, fa_range columns, fa_range span,
                             T(seen_band) * bands) {
  int64_t count = 0;
  for (int64_t b = 0; b < sequence->num_bands; b++) {
    const fa_band band = fa_band_at(sequence, b);
    const fa_blocks blocks = fa_blocks_that_see(sequence, &band, columns, BLOCK);
    const fa_range seen = fa_overlap((fa_range){blocks.first, blocks.first + blocks.count}, span);
    if (seen.begin < seen.end)
      bands[count++] = (T(seen_band)){(int32_t)b, (int32_t)seen.begin, (int32_t)seen.end};
  }
  return count;
}

/* Packs a block of columns, if anybody sees it, and sets to 0 what is summed of it. */
static void T(begin_columns)(const fa_cpu_job *job, const T(backward_shared) * shared,
                             const T(column_task) * task, T(column_block) * block, REAL *buffer) {
  const fa_problem *problem = job->problem;
  const size_t gradient_bytes = (size_t)(BLOCK * fa_round_up(problem->head_dim, NR)) * sizeof(REAL);
  memset(block->dk, 0, gradient_bytes);
  memset(block->dv, 0, gradient_bytes);
  memset(block->bias_sums, 0, (size_t)(T(num_bias_rows)(problem) * BLOCK) * sizeof(REAL));
  if (shared->head_sums) {
    block->head_sums = shared->head_sums + T(first_head_sum)(problem, task->span, task->sequence.batch) +
                       block->columns.begin / BLOCK * T(num_head_sums)(problem);
    memset(block->head_sums + task->kv_head * task->group_size * NUM_HEAD_NUMBERS, 0,
           (size_t)(task->group_size * NUM_HEAD_NUMBERS) * sizeof *block->head_sums);
  }
  if (block->num_bands > 0) block->normal = T(pack_columns)(job, &task->sequence, task->kv_head, block, buffer);
}

/* Finds what the task is to do, tells the others, and packs its columns. */
static T(column_task) T(begin_task)(const fa_cpu_job *job, const T(backward_shared) * shared,
                                    int64_t task_number, T(backward_scratch) * s) {
  const fa_problem *problem = job->problem;
  const int64_t num_pairs = T(num_pairs)(problem), num_lanes = T(num_lanes)(problem);
  const int64_t num_in_turn = num_pairs * T(num_spans)(problem), span_blocks = T(span_blocks)(problem);
  const int64_t pair = task_number % num_pairs;
  /* The last span first: under a causal mask it has the most to do. */
  const int64_t span = T(num_spans)(problem) - 1 - task_number % num_in_turn / num_pairs;
  const int64_t number = task_number / num_in_turn;
  T(column_task)
  task = {.span = span,
          .number = number,
          .lane = number % num_lanes,
          .first_task = number % num_lanes,
          .kv_head = pair % problem->num_kv_heads,
          .group_size = problem->num_heads / problem->num_kv_heads,
          .sequence = fa_sequence_of(problem, job->tensors, pair / problem->num_kv_heads),
          .own = T(progress_of)(job, shared, span, pair, number),
          .bias_group = T(bias_group_of)(problem, pair)};
  const fa_blocks blocks = fa_blocks_of_columns(&task.sequence, BLOCK);
  const int64_t most = T(task_blocks)(problem, job->of_threads);
  const int64_t first = task.lane * T(lane_blocks)(problem) + number / num_lanes * most;
  int32_t first_row_block = INT32_MAX, end_row_block = 0;
  for (; task.num_blocks < most && first + task.num_blocks < blocks.count; task.num_blocks++) {
    T(column_block) *block = &s->blocks[task.num_blocks];
    block->columns = fa_block_at(blocks, first + task.num_blocks);
    block->num_bands = T(find_bands)(&task.sequence, block->columns,
                                     (fa_range){span * span_blocks, (span + 1) * span_blocks}, block->bands);
    for (int64_t i = 0; i < block->num_bands; i++) {
      first_row_block = (int32_t)fa_min(block->bands[i].first, first_row_block);
      end_row_block = (int32_t)fa_max(block->bands[i].end, end_row_block);
    }
  }
  task.own->first_row_block = first_row_block, task.own->end_row_block = end_row_block;
  atomic_store_explicit(&task.own->passed, 0, memory_order_release);
  for (int64_t i = 0; i < task.num_blocks; i++) T(begin_columns)(job, shared, &task, &s->blocks[i], s->buffer);
  return task;
}

/* The task of the i-th pair of a task's group that has the same columns. */
static T(progress) * T(group_task)(const fa_cpu_job *job, const T(backward_shared) * shared,
                                   const T(column_task) * task, int64_t i) {
  return T(progress_of)(job, shared, task->span, task->bias_group.first + i * task->bias_group.step,
                        task->number);
}

/* Waits for those that add to the same elements of dbias before the task. */
static void T(wait_to_add_bias)(const fa_cpu_job *job, const T(backward_shared) * shared, T(column_task) * task,
                                int64_t row_block) {
  const int64_t last_place = (row_block + 1) * task->group_size - 1;
  for (int64_t i = task->first_pair; i < task->bias_group.number; i++) {
    T(progress) *other = T(group_task)(job, shared, task, i);
    while (!T(has_passed)(other, row_block, last_place)) sched_yield();
    if (i == task->first_pair && T(has_ended)(other)) task->first_pair++;
  }
}

/* All tiles of a block of rows of one head with a block of columns. Where rows see different ones of these, a
 * tile is half a strip of rows, with the columns that they see. */
static void T(backward_rows)(const fa_cpu_job *job, const T(backward_shared) * shared, T(backward_scratch) * s,
                             T(column_task) * task, int64_t place, const T(column_block) * block) {
  const fa_sequence *sequence = &task->sequence;
  const int64_t row_block = place / task->group_size,
                head = task->kv_head * task->group_size + place % task->group_size;
  const fa_range all_rows = {row_block * BLOCK, fa_min((row_block + 1) * BLOCK, sequence->seqlen_q)};
  for (int64_t i = 0; i < block->num_bands; i++) {
    if (row_block < block->bands[i].first || row_block >= block->bands[i].end) continue;
    const fa_band band = fa_band_at(sequence, block->bands[i].band);
    const fa_range rows = fa_rows_in_band(&band, all_rows);
    fa_tile tile = {sequence, &band, head, rows, fa_overlap(block->columns, fa_columns_in_band(&band, rows)),
                    0};
    const int64_t step = fa_tile_sees_all(&tile) ? BLOCK : HALF_STRIP;
    for (int64_t begin = rows.begin; begin < rows.end; begin += step) {
      tile.rows = (fa_range){begin, fa_min(begin + step, rows.end)};
      tile.columns = fa_in_units(block->columns, fa_columns_in_band(&band, tile.rows), WHOLE);
      if (fa_tile_sees_any(&tile)) T(backward_tile)
      (job, shared, s, task, place, &tile, rows,
       T(from_column)(job->problem, *block, tile.columns.begin - block->columns.begin));
    }
  }
}

/* Adds what all rows share of dbias, behind the pairs before. */
static void T(add_bias_sums)(const fa_cpu_job *job, const T(backward_shared) * shared,
                             const T(column_task) * task, const T(column_block) * block) {
  const fa_problem *problem = job->problem;
  const int64_t num_rows = T(num_bias_rows)(problem);
  for (int64_t i = 0; num_rows > 0 && i < task->bias_group.number; i++)
    wait_until(&T(group_task)(job, shared, task, i)->passed, INT_MAX);
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t head = task->kv_head * task->group_size + i;
    const fa_tile tile = {&task->sequence, NULL, head, {0, 1}, block->columns, 0};
    T(add_bias_gradient)(job, shared->dbias, &tile, block->bias_sums + i * BLOCK);
  }
}

/* Stores dk or dv of a block, or the span's part of it. */
static void T(store_columns)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, const T(column_task) * task,
                             fa_range columns, const REAL *from) {
  const int64_t d = job->problem->head_dim, padded = fa_round_up(d, NR);
  if (!sums) {
    T(store_rows)(T(rows_of)(job, id, &task->sequence, task->kv_head), columns, d, from, padded);
    return;
  }
  const T(sum_rows) to = T(sums_of)(job, id, sums, task->span, &task->sequence, task->kv_head);
  for (int64_t r = columns.begin; r < columns.end; r++, from += padded)
    memcpy(to.data + r * to.stride, from, (size_t)d * sizeof(REAL));
}

static void T(columns_task)(const fa_cpu_job *job, int64_t task_number, void *scratch) {
  const fa_problem *problem = job->problem;
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem, job->of_threads);
  T(backward_scratch) s = T(lay_out_backward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  T(column_task) task = T(begin_task)(job, &shared, task_number, &s);
  const int64_t first_place = task.own->first_row_block * task.group_size,
                end_place = task.own->end_row_block * task.group_size;
  for (int64_t place = first_place; place < end_place; place++) {
    if (place % task.group_size == 0 && T(num_bias_rows)(problem) == 0)
      T(wait_to_add_bias)(job, &shared, &task, place / task.group_size);
    for (int64_t b = 0; b < task.num_blocks; b++)
      T(backward_rows)(job, &shared, &s, &task, place, &s.blocks[b]);
    T(add_kept)(job, &shared, &s, &task, MOST_KEPT, place + 1);
  }
  T(add_kept)(job, &shared, &s, &task, 0, end_place);
  for (int64_t b = 0; b < task.num_blocks; b++) {
    const T(column_block) *block = &s.blocks[b];
    T(store_columns)(job, FA_TENSOR_DK, shared.dk, &task, block->columns, block->dk);
    T(store_columns)(job, FA_TENSOR_DV, shared.dv, &task, block->columns, block->dv);
    T(add_bias_sums)(job, &shared, &task, block);
  }
  atomic_store_explicit(&task.own->passed, INT_MAX, memory_order_release);
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

/* The gradient by a number of a head: sum with the terms of a sequence, span by span and column block by column
 * block. */
static double T(add_head_sums)(const fa_problem *problem, const T(backward_shared) * shared, int number,
                               const fa_sequence *sequence, const fa_cell *cell, double sum) {
  const int64_t num_blocks = T(num_column_blocks)(problem), step = T(num_head_sums)(problem);
  for (int64_t span = 0; span < T(num_spans)(problem); span++) {
    const double *terms = shared->head_sums + T(first_head_sum)(problem, span, sequence->batch);
    for (int64_t c = 0; c < num_blocks; c++) sum += terms[c * step + cell->head * NUM_HEAD_NUMBERS + number];
  }
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
    sum = number < NUM_HEAD_NUMBERS ? T(add_head_sums)(problem, shared, number, &sequence, &cell, sum)
                                    : T(add_sink_terms)(job, shared, &sequence, &cell, sum, buffer);
  }
  ((float *)fa_tensor_get(job->tensors, id)->data)[element] = (float)sum;
}

static int64_t T(num_head_sum_tasks)(const fa_problem *problem, int number) {
  const fa_tensor_id id = T(head_sum_at)(number);
  return fa_is_sum(problem, id) ? fa_num_elements(problem, id) : 0;
}

/* Chunks of dk and dv, where spans have parts of them. */
static int64_t T(num_key_chunks)(const fa_problem *problem) {
  if (T(num_spans)(problem) == 1) return 0;
  return fa_divide_up(problem->seqlen_k, PREPARE_ROWS) * T(num_pairs)(problem);
}

static int64_t T(num_finish_tasks)(const fa_problem *problem, int32_t of_threads) {
  (void)of_threads;
  int64_t count = T(sums_apart)(problem) ? T(num_chunks)(problem) : 0;
  count += T(num_key_chunks)(problem);
  count += fa_is_sum(problem, FA_TENSOR_DBIAS) && T(sums_bias_apart)(problem) ? T(num_bias_chunks)(problem) : 0;
  for (int number = 0; number < T(NUM_HEAD_SUMS); number++) count += T(num_head_sum_tasks)(problem, number);
  return count;
}

/* Adds the parts of dq, dk or dv, in order. */
static void T(finish_sums)(const fa_cpu_job *job, fa_tensor_id id, REAL *sums, int64_t num_parts,
                           const T(task_rows) * chunk) {
  const int64_t d = job->problem->head_dim;
  const fa_range rows = chunk->rows;
  const T(sum_rows) all = T(sums_of)(job, id, sums, 0, &chunk->sequence, chunk->head);
  for (int64_t part = 1; part < num_parts; part++) {
    const T(sum_rows) from = T(sums_of)(job, id, sums, part, &chunk->sequence, chunk->head);
    T(add_rows)(all, rows, d, from.data + rows.begin * from.stride, from.stride);
  }
  const T(rows) to = T(rows_of)(job, id, &chunk->sequence, chunk->head);
  T(store_rows)(to, rows, d, all.data + rows.begin * all.stride, all.stride);
}

static void T(finish_task)(const fa_cpu_job *job, int64_t task, void *scratch) {
  const fa_problem *problem = job->problem;
  T(backward_scratch) s = T(lay_out_backward)(&(fa_arena){.base = scratch}, problem, job->of_threads);
  T(backward_shared) shared = T(lay_out_shared)(&(fa_arena){.base = job->shared}, problem, job->of_threads);
  for (int number = 0; number < T(NUM_HEAD_SUMS); number++) {
    const int64_t num_tasks = T(num_head_sum_tasks)(problem, number);
    if (task < num_tasks) {
      T(finish_head_sum)(job, &shared, number, task, s.buffer);
      return;
    }
    task -= num_tasks;
  }
  if (task < T(num_key_chunks)(problem)) {
    const T(task_rows) chunk = T(chunk_of)(job, task, problem->num_kv_heads, problem->seqlen_k);
    T(finish_sums)(job, FA_TENSOR_DK, shared.dk, T(num_spans)(problem), &chunk);
    T(finish_sums)(job, FA_TENSOR_DV, shared.dv, T(num_spans)(problem), &chunk);
    return;
  }
  task -= T(num_key_chunks)(problem);
  const int64_t num_chunks = T(sums_apart)(problem) ? T(num_chunks)(problem) : 0;
  if (task >= num_chunks) {
    T(finish_bias)(job, shared.dbias, T(bias_chunk)(problem, task - num_chunks));
    return;
  }
  const T(task_rows) chunk = T(chunk_of)(job, task, problem->num_heads, problem->seqlen_q);
  T(finish_sums)(job, FA_TENSOR_DQ, shared.dq, T(num_lanes)(problem), &chunk);
}
