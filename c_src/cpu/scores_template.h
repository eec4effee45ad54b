/*
 * Template: the one way from the product of q and k to a score and on to a probability, and back to the
 * gradient of the product. Every pass goes through here, so whatever acts on scores is added here. A tile says
 * where the scores are: which sequence, head, rows and columns.
 *
 * Parameters: REAL, T(name), INT, LANES, LOWEST, EXP_HIGHEST, STRIP, BLOCK (see kernels.c); T(vec), T(mask) and
 * the functions of vector_template.h.
 */

/* ---- what a score is ------------------------------------------------------------------------------- */

#if IS_F32 /* once for all types */

/* The tensors that have one number for each head, with which all of its scores are made, and the number that
 * stands for them where there are none. */
enum { ALIBI_SLOPE, NUM_HEAD_NUMBERS };
static const struct head_number {
  fa_tensor_id id;
  int neutral;
} head_numbers[NUM_HEAD_NUMBERS] = {
    [ALIBI_SLOPE] = {FA_TENSOR_ALIBI_SLOPES, 0},
};

static bool has_head_number(const fa_problem *problem, int number) {
  return fa_tensor_role_in(problem, FA_PASS_FORWARD, head_numbers[number].id) == FA_ROLE_INPUT;
}

#endif

/* What the scores of a head are made with, in REAL. */
typedef struct T(score_terms) {
  REAL scale, softcap; /* softcap 0: none */
  REAL of_head[NUM_HEAD_NUMBERS];
} T(score_terms);

static T(score_terms) T(scoring_of)(const fa_cpu_job *job, const fa_tile *tile) {
  const fa_cell cell = {.batch = tile->sequence->batch, .head = tile->head};
  T(score_terms) scoring = {.scale = (REAL)job->problem->scale, .softcap = (REAL)job->problem->softcap};
  for (int n = 0; n < NUM_HEAD_NUMBERS; n++)
    scoring.of_head[n] = has_head_number(job->problem, n) ? T(number_at)(job, head_numbers[n].id, &cell)
                                                          : (REAL)head_numbers[n].neutral;
  return scoring;
}

/* Whether scores are the scaled products themselves. */
static bool T(is_plain)(const fa_problem *problem) { return problem->softcap == 0; }

/* Scores, and their derivatives by the products of q and k and by the numbers of their head. */
typedef struct T(scores) {
  T(vec) s, slope, by[NUM_HEAD_NUMBERS];
} T(scores);

/* The scores of scaled products, before anything is added. Whoever calls it for many asks is_plain once and
 * passes a constant. */
INLINE T(scores) T(score)(T(score_terms) scoring, bool plain, T(vec) product) {
  T(scores) x = {.s = product, .slope = T(splat)(scoring.scale)};
  if (!plain && scoring.softcap != 0) {
    T(vec) t = T(tanh)(x.s / scoring.softcap);
    x.s = scoring.softcap * t;
    x.slope *= 1 - t * t;
  }
  return x;
}

/* ---- what is added to scores ----------------------------------------------------------------------- */

/* Whether anything is added to scores after the softcap. */
static bool T(has_addends)(const fa_problem *problem) {
  return problem->alibi_batch > 0 || problem->bias_heads > 0;
}

/* Where a tile's numbers begin in a tensor that rows may share, and how far apart rows' are. */
typedef struct T(numbers) {
  int64_t first, stride;
} T(numbers);

static T(numbers) T(numbers_of)(const fa_problem *problem, int id, const fa_tile *tile) {
  const fa_cell cell = {tile->sequence->batch, tile->head, tile->rows.begin, tile->columns.begin, 0};
  return (T(numbers)){fa_element_of(problem, id, &cell),
                      fa_varies_along(problem, id, FA_AXIS_SEQLEN_Q) ? problem->seqlen_k : 0};
}

/* Where the bias of a tile, or its gradient, lies. row_bytes 0: it has one row, or there is none. */
typedef struct T(bias_place) {
  uintptr_t data;
  int64_t row_bytes, element_bytes;
} T(bias_place);

static T(bias_place) T(bias_of)(const fa_cpu_job *job, fa_tensor_id id, const fa_tile *tile) {
  const fa_problem *problem = job->problem;
  if (problem->bias_heads == 0) return (T(bias_place)){0};
  const T(numbers) at = T(numbers_of)(problem, id, tile);
  const int64_t bytes = (int64_t)fa_dtype_bytes(problem->bias_dtype);
  const uintptr_t data = (uintptr_t)fa_tensor_get(job->tensors, id)->data;
  return (T(bias_place)){data + (uintptr_t)(at.first * bytes), at.stride * bytes, bytes};
}

/* addends [rows][BLOCK] of a tile of one head become those of its bias. */
static void T(find_bias)(const fa_cpu_job *job, const fa_tile *tile, REAL *addends) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  const T(numbers) at = T(numbers_of)(job->problem, FA_TENSOR_BIAS, tile);
  for (int64_t i = 0; i < num_rows; i++) {
    if (i == 0 || at.stride) T(load_numbers)
    (job, FA_TENSOR_BIAS, job->problem->bias_dtype, at.first + i * at.stride, num_columns, addends + i * BLOCK);
    else memcpy(addends + i * BLOCK, addends, (size_t)num_columns * sizeof *addends);
  }
}

/* Asks for the line of memory that holds so much of a bias. A bias of all scores comes from memory that is far
 * away, at every tile: it is asked for line by line during the exponentials of the tile before. */
INLINE void T(look_ahead)(const T(bias_place) * at, int64_t row, int64_t column) {
  if (at->row_bytes)
    __builtin_prefetch((const void *)(at->data + (uintptr_t)(row * at->row_bytes + column * at->element_bytes)),
                       0, 2);
}

/* What is added to the scores of a tile, row by row. data NULL: it hides all of them. */
typedef struct T(addends) {
  const REAL *data;
  int64_t stride;
} T(addends);

/* Whether some addend is not -inf. Mostly it is the first that is looked at. */
static bool T(shows_any)(const fa_tile *tile, T(addends) addends) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  for (int64_t i = 0; i < num_rows; i++)
    for (int64_t j = 0; j < num_columns; j++)
      if (addends.data[i * addends.stride + j] != -INFINITY) return true;
  return false;
}

/* How far the first columns of a tile lie before the column beside a row of it, counted from its first. */
INLINE T(vec) T(distances)(const fa_tile *tile, int64_t row) {
  const int64_t beside = tile->rows.begin + row + tile->band->k_end - tile->band->q_end;
  return T(splat)((REAL)(beside - tile->columns.begin)) - T(from_integers)(T(lanes)());
}

/* Subtracts slope times distance from addends [rows][BLOCK] of a tile of one head. */
static void T(add_distances)(const fa_tile *tile, REAL slope, REAL *addends) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  for (int64_t i = 0; i < num_rows; i++) {
    const T(vec) distances = T(distances)(tile, i);
    for (int64_t j = 0; j < num_columns; j += LANES)
      *(T(vec) *)(addends + i * BLOCK + j) -= slope * T(absolute)(distances - (REAL)j);
  }
}

/* Whether vectors of a tensor that is bias or its gradient, of that type, are those of a tile, where it lies.
 */
static bool T(is_in_vectors)(const fa_problem *problem, int id, fa_dtype dtype, const fa_tile *tile) {
  const int64_t num_rows = tile->rows.end - tile->rows.begin,
                num_columns = tile->columns.end - tile->columns.begin;
  return dtype < FA_NUM_FLOATS && fa_dtype_bytes(dtype) == sizeof(REAL) && num_rows % LANES == 0 &&
         num_columns % LANES == 0 && fa_varies_along(problem, id, FA_AXIS_SEQLEN_Q) && !tile->rows_a_head;
}

/* What is added to the scores of a tile: where the bias lies, if that is all and can be read there, or else in
 * scratch [rows][BLOCK]. */
static T(addends) T(find_addends)(const fa_cpu_job *job, const fa_tile *tile, REAL *scratch) {
  const fa_problem *problem = job->problem;
  const bool has_bias = problem->bias_heads > 0, has_slopes = problem->alibi_batch > 0;
  const int64_t num_rows = tile->rows.end - tile->rows.begin;
  T(addends) addends = {scratch, BLOCK};
  fa_tile part; /* of a head */
  if (has_bias && !has_slopes && T(is_in_vectors)(problem, FA_TENSOR_BIAS, problem->bias_dtype, tile)) {
    const T(numbers) at = T(numbers_of)(problem, FA_TENSOR_BIAS, tile);
    addends = (T(addends)){(const REAL *)job->tensors->bias.data + at.first, at.stride};
  } else if (has_bias) {
    for (int64_t i = 0; i < num_rows; i += part.rows.end - part.rows.begin) {
      part = fa_tile_of_head(tile, i);
      T(find_bias)(job, &part, scratch + i * BLOCK);
    }
  } else {
    memset(scratch, 0, (size_t)(num_rows * BLOCK) * sizeof *scratch);
  }
  if (!T(shows_any)(tile, addends)) return (T(addends)){0};
  for (int64_t i = 0; has_slopes && i < num_rows; i += part.rows.end - part.rows.begin) {
    part = fa_tile_of_head(tile, i);
    T(add_distances)(&part, T(scoring_of)(job, &part).of_head[ALIBI_SLOPE], scratch + i * BLOCK);
  }
  return addends;
}

/* A score with what is added to it, which hides it where it is -inf, whatever it is. */
INLINE T(vec) T(with_addend)(T(vec) s, T(vec) addend) { return T(hide_where)(s + addend, addend); }

/* ---- what is dropped --------------------------------------------------------------------------------- */

#if IS_F32 /* once for all types */

/* The draws of a pair's words with those of count pairs of the other kind. */
INLINE void fa_dropout_line(fa_words own, const uint32_t *const *others, int count, uint32_t *restrict words,
                            uint32_t *restrict second_words) {
  enum { AT_ONCE = 8 };
  for (int x = 0; x < count; x += AT_ONCE) {
    uint32_t a[AT_ONCE], b[AT_ONCE];
    for (int v = 0; v < AT_ONCE; v++) {
      const fa_words other = {{others[0][x + v], others[1][x + v]}}, drawn = fa_dropout_draw(own, other);
      a[v] = drawn.x[0], b[v] = drawn.x[1];
    }
    memcpy(words + x, a, sizeof a);
    memcpy(second_words + x, b, sizeof b);
  }
}

#endif

/* A line of flags of a tile from words, of which every 8 are those of 16 scores, the two halves' one after the
 * other.
 */
INLINE void T(keep_line)(const uint32_t *words, const uint32_t *next_words, int count, uint32_t shift,
                         uint32_t next_shift, uint32_t threshold, INT *restrict line) {
  for (int x = 0; x < count; x += 8) {
    for (int v = 0; v < 8; v++) line[2 * x + v] = -(INT)((words[x + v] >> shift & 0xffff) >= threshold);
    for (int v = 0; v < 8; v++)
      line[2 * x + 8 + v] = -(INT)((next_words[x + v] >> next_shift & 0xffff) >= threshold);
  }
}

/* kept [across][stride]: ~0 where a score stays, 0 where it is dropped, for ranges of positions in the whole
 * problem. What lies along a line is rows, or else columns. Two lines that are 8 apart share their words, as do
 * two scores of a line: bit 3 of the column chooses the word, and that of the row its half. */
INLINE void T(find_kept_along)(fa_dropout dropout, bool along_rows, fa_range across, fa_range along, INT *kept,
                               int64_t stride) {
  enum { MOST = (BLOCK + 32) / 16 * 8 }; /* pairs along a line that begins and ends anywhere */
  const int64_t begin = along.begin / 16 * 16, length = along.end - along.begin;
  const int count = (int)fa_divide_up(along.end - begin, 16) * 8;
  uint32_t words[2][MOST], others[2][MOST];
  INT line[2 * MOST];
  for (int x = 0; x < count; x++) {
    const uint32_t pair = (uint32_t)(begin / 2 + x);
    const fa_words other = along_rows ? fa_dropout_row(dropout, pair) : fa_dropout_column(dropout, pair);
    others[0][x] = other.x[0], others[1][x] = other.x[1];
  }
  for (int64_t group = across.begin / 16; group * 16 < across.end; group++)
    for (int64_t n = 0; n < 8; n++) {
      const uint32_t pair = (uint32_t)(group * 8 + n);
      fa_dropout_line(along_rows ? fa_dropout_column(dropout, pair) : fa_dropout_row(dropout, pair),
                      (const uint32_t *const[]){others[0], others[1]}, count, words[0], words[1]);
      for (int second = 0; second < 2; second++) {
        const int64_t at = group * 16 + second * 8 + n - across.begin;
        if (at < 0 || at >= across.end - across.begin) continue;
        INT *to = begin == along.begin && length == 2 * count ? kept + at * stride : line;
        if (along_rows)
          T(keep_line)(words[second], words[second], count, 0, 16, dropout.threshold, to);
        else
          T(keep_line)(words[0], words[1], count, second * 16u, second * 16u, dropout.threshold, to);
        if (to == line) memcpy(kept + at * stride, line + (along.begin - begin), (size_t)length * sizeof *line);
      }
    }
}

static void T(find_kept)(fa_dropout dropout, bool along_rows, fa_range across, fa_range along, INT *kept,
                         int64_t stride) {
  if (along_rows)
    T(find_kept_along)(dropout, true, across, along, kept, stride);
  else
    T(find_kept_along)(dropout, false, across, along, kept, stride);
}

/* The rows of a tile of one head in the whole problem. */
static fa_range T(whole_rows)(const fa_problem *problem, const fa_tile *tile) {
  return (fa_range){problem->origin.row + tile->rows.begin, problem->origin.row + tile->rows.end};
}

/* ---- what a row sees ------------------------------------------------------------------------------- */

/* Of each row of a tile the columns that it sees: those from begin to end, counted from the tile's first. */
typedef struct T(seen_columns) {
  INT begin[BLOCK], end[BLOCK];
} T(seen_columns);

/* The rows are rounded up to whole vectors. */
static void T(find_seen)(const fa_tile *tile, T(seen_columns) * seen) {
  for (int64_t i = 0; i < fa_round_up(tile->rows.end - tile->rows.begin, LANES); i++) {
    fa_range columns = fa_tile_columns(tile, fa_tile_row(tile, i));
    seen->begin[i] = (INT)columns.begin;
    seen->end[i] = (INT)columns.end;
  }
}

/* Rows or columns whose numbers a product sums at a time: it gives the same bits whatever it leaves out of
 * those that nobody sees, if it leaves out whole ones at the front. */
#if TILES
#define SUMMED_AT_ONCE (T(PER_OPERAND) * TILE)
#else
#define SUMMED_AT_ONCE T(PER_OPERAND)
#endif

/* What there is of a range in another one, with what is summed at once with its first. Empty where end <=
 * begin.
 */
static fa_range T(seen_of)(fa_range range, fa_range seen) {
  const fa_range units = fa_in_units(range, seen, SUMMED_AT_ONCE);
  return (fa_range){units.begin, fa_min(units.end, seen.end)};
}

/* T(product_where_seen) whose a [rows of c, depth] has the rows and columns of a tile, or, turned, its columns
 * and rows. Where rows see different columns it is made by as few of c's rows as products take, each with what
 * it sees of the depth. */
INLINE void T(product_in_tile)(const fa_tile *tile, bool turned, int64_t columns, const T(operand) * a,
                               const INT *hidden, bool all_normal, int64_t a_row, int64_t a_column,
                               const T(operand) * b, int64_t panel, REAL *c, int64_t c_row,
                               product_target target, REAL factor, const REAL *factors) {
  const fa_range rows = turned ? tile->columns : tile->rows, depth = turned ? tile->rows : tile->columns;
  const bool whole = hidden || tile->rows_a_head || fa_tile_sees_all(tile);
  for (int64_t begin = rows.begin, end; begin < rows.end; begin = end) {
    end = whole ? rows.end : fa_min(begin + FEWEST, rows.end);
    const fa_range some = {begin, end};
    fa_range seen = depth;
    if (!whole && !turned) seen = T(seen_of)(depth, fa_columns_in_band(tile->band, some));
    if (!whole && turned) seen = T(seen_of)(depth, fa_rows_that_see(tile->band, some));
    const int64_t first = T(operands)(seen.begin - depth.begin), row = begin - rows.begin;
    T(product_where_seen)
    (end - begin, columns, T(operands)(fa_max(seen.end - seen.begin, 0)), a + row * a_row + first * a_column,
     hidden, all_normal, a_row, a_column, b + first * NR, panel, c + row * c_row, c_row, target, factor,
     target == RESCALE ? factors + row : factors);
  }
}

/* ---- forward: rows lie along the vectors ------------------------------------------------------------ */

/* st[BLOCK of columns, STRIP of rows] += addends[STRIP of rows, BLOCK of columns] */
static void T(add_transposed)(const fa_tile *tile, T(addends) addends, REAL *st) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  for (int64_t i = 0; i < num_rows; i += LANES)
    for (int64_t j = 0; j < num_columns; j += LANES) {
      T(vec) square[LANES];
      for (int v = 0; v < LANES; v++) square[v] = T(load)(addends.data + (i + v) * addends.stride + j);
      T(transpose)(square);
      for (int v = 0; v < LANES; v++) {
        T(vec) *s = (T(vec) *)(st + (j + v) * STRIP + i);
        *s = T(with_addend)(*s, square[v]);
      }
    }
}

/* st[BLOCK of columns, STRIP of rows]: scaled products become scores. addends [STRIP, BLOCK]: of find_addends.
 * The column that an odd last one shares an operand with is hidden. */
static void T(make_scores)(const fa_cpu_job *job, const fa_tile *tile, REAL *st, T(addends) addends) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  const T(score_terms) scoring = T(scoring_of)(job, tile);
  for (int64_t j = 0; j < num_columns && !T(is_plain)(job->problem); j++)
    for (int64_t i = 0; i < num_rows; i += LANES) {
      T(vec) *s = (T(vec) *)(st + j * STRIP + i);
      *s = T(score)(scoring, false, *s).s;
    }
  if (T(has_addends)(job->problem)) T(add_transposed)(tile, addends, st);
  for (int64_t x = num_columns * STRIP; x < fa_round_up(num_columns, T(PER_OPERAND)) * STRIP; x++)
    st[x] = -INFINITY;
  if (fa_tile_sees_all(tile)) return;
  T(seen_columns) seen;
  T(find_seen)(tile, &seen);
  for (int64_t i = 0; i < num_rows; i += LANES) {
    T(mask) begin, end;
    memcpy(&begin, seen.begin + i, sizeof begin);
    memcpy(&end, seen.end + i, sizeof end);
    for (int64_t j = 0; j < num_columns; j++) {
      T(vec) *s = (T(vec) *)(st + j * STRIP + i);
      *s = T(hide_outside)(*s, (INT)j - (T(mask)){0}, begin, end);
    }
  }
}

/* hidden [BLOCK, STRIP] becomes other than 0 where a score is -inf. Whether there is such a score. */
static bool T(find_hidden)(const fa_tile *tile, const REAL *st, INT *hidden) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  T(mask) any = {0};
  for (int64_t i = 0; i < num_rows; i += LANES) {
    const T(mask) there = T(lanes)() < (INT)(num_rows - i);
    for (int64_t j = 0; j < fa_round_up(num_columns, T(PER_OPERAND)); j++) {
      const T(mask) hides = *(const T(vec) *)(st + j * STRIP + i) == T(splat)(-INFINITY);
      *(T(mask) *)(hidden + j * STRIP + i) = hides;
      any |= hides & there;
    }
  }
  return T(any_lane)(any);
}

/* The largest of a vector of every row of st [count, STRIP], and of another. Four at a time need not wait for
 * each other. */
INLINE T(vec) T(largest)(const REAL *st, int64_t count, T(vec) other) {
  T(vec) max[4] = {other, other, other, other};
  int64_t j = 0;
  for (; j + 4 <= count; j += 4)
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) max[n] = T(max)(*(const T(vec) *)(st + (j + n) * STRIP), max[n]);
  for (; j < count; j++) max[0] = T(max)(*(const T(vec) *)(st + j * STRIP), max[0]);
  return T(max)(T(max)(max[0], max[1]), T(max)(max[2], max[3]));
}

/* The online softmax: scores become exp(score - m), as operands [operands of BLOCK, STRIP] in the place of the
 * scores, unless some are yet to be dropped; m and l, the largest score so far and the sum of exp(score - m),
 * take the tile in; decay is what earlier sums are worth now. next is the tile that follows. */
static void T(soften_scores)(const fa_cpu_job *job, const fa_tile *tile, const fa_tile *next, REAL *st, REAL *m,
                             REAL *l, REAL *decay) {
  const bool drops = job->problem->dropout != 0;
  const T(bias_place) ahead = T(bias_of)(job, FA_TENSOR_BIAS, next);
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  for (int64_t i = 0; i < num_rows; i += LANES) {
    const T(vec) old_max = *(T(vec) *)(m + i), max = T(largest)(st + i, num_columns, old_max);
    /* A row that has seen nothing keeps m = -inf; 0 in its place lets exp(-inf - 0) be 0 and not NaN. */
    T(vec) origin = T(max)(max, T(splat)(LOWEST));
    T(vec) kept = T(exp)(old_max - origin), sum = kept * *(T(vec) *)(l + i);
    for (int64_t j = 0; j < num_columns; j += T(PER_OPERAND)) {
      T(vec) p[T(PER_OPERAND)];
#pragma GCC unroll 2
      for (int n = 0; n < T(PER_OPERAND); n++) {
        T(vec) *s = (T(vec) *)(st + (j + n) * STRIP + i);
        p[n] = T(exp)(*s - origin);
        sum += p[n];
        if (drops) *s = p[n];
        T(look_ahead)(&ahead, i + (j + n) % LANES, (j + n) / LANES * LANES);
      }
      if (!drops) *(T(vec) *)(st + j / T(PER_OPERAND) * STRIP + i) = T(operand_of)(p);
    }
    *(T(vec) *)(m + i) = max;
    *(T(vec) *)(l + i) = sum;
    *(T(vec) *)(decay + i) = kept;
  }
}

/* Probabilities become 0 where they are dropped, and operands. kept [BLOCK, STRIP] is scratch. The factor that
 * the others gain is left to the end of the row. */
static void T(drop)(const fa_cpu_job *job, const fa_tile *tile, REAL *pt, INT *kept) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  fa_tile part; /* of a head */
  for (int64_t i = 0; i < num_rows; i += part.rows.end - part.rows.begin) {
    part = fa_tile_of_head(tile, i);
    const fa_dropout dropout = fa_dropout_in(job->problem, job->tensors, tile->sequence, part.head);
    T(find_kept)(dropout, true, tile->columns, T(whole_rows)(job->problem, &part), kept + i, STRIP);
  }
  for (int64_t j = 0; j < num_columns; j += T(PER_OPERAND))
    for (int64_t i = 0; i < num_rows; i += LANES) {
      T(vec) p[T(PER_OPERAND)];
      for (int n = 0; n < T(PER_OPERAND); n++) {
        const int64_t x = (j + n) * STRIP + i;
        p[n] = T(select)(*(const T(mask) *)(kept + x), *(const T(vec) *)(pt + x), T(splat)(0));
      }
      *(T(vec) *)(pt + j / T(PER_OPERAND) * STRIP + i) = T(operand_of)(p);
    }
}

/* ---- backward: columns lie along the vectors ---------------------------------------------------------- */

#if !IS_COMPLEX

/* Where the gradient by a tile's addends goes, row by row, or is added. data NULL: nobody wants it. */
typedef struct T(addends_gradient) {
  REAL *data;
  int64_t stride;
  bool is_sum;
} T(addends_gradient);

#if PAIRS

/* Rows i and i + 1 of p and ds [BLOCK, BLOCK], or the first alone where it is the tile's last, become operands
 * along a column, in the place of row i / 2, which was taken before. Those of ds along a row go to ds_rows
 * [BLOCK, operands of BLOCK]; they meet k, which has zeros past an odd last column, where ds may be anything.
 */
INLINE void T(pair_rows)(int64_t i, int64_t num_rows, int64_t num_columns, REAL *p, REAL *ds,
                         T(operand) * ds_rows) {
  uint16_t *rows[2] = {(uint16_t *)(ds_rows + i * T(operands)(BLOCK)),
                       (uint16_t *)(ds_rows + (i + 1) * T(operands)(BLOCK))};
  const bool is_pair = i + 1 < num_rows;
  for (int64_t j = 0; j < num_columns; j += LANES) {
    const int64_t first = i * BLOCK + j, second = first + BLOCK, to = i / 2 * BLOCK + j;
    const T(vec) p_j[2] = {*(T(vec) *)(p + first), is_pair ? *(T(vec) *)(p + second) : T(splat)(0)};
    const T(vec) ds_j[2] = {*(T(vec) *)(ds + first), is_pair ? *(T(vec) *)(ds + second) : T(splat)(0)};
    *(T(vec) *)(p + to) = T(operand_of)(p_j);
    *(T(vec) *)(ds + to) = T(operand_of)(ds_j);
    _mm256_storeu_si256((__m256i *)(rows[0] + j), (__m256i)_mm512_cvtneps_pbh((__m512)ds_j[0]));
    if (is_pair) _mm256_storeu_si256((__m256i *)(rows[1] + j), (__m256i)_mm512_cvtneps_pbh((__m512)ds_j[1]));
  }
  for (int n = 0; n <= is_pair && num_columns % 2; n++) rows[n][num_columns] = 0;
}

#endif

/* p and ds [BLOCK, BLOCK] hold the scaled products of q and k, and dp = dout . v; they become
 *     p = exp(score - lse),   ds = slope * p * (dp - delta),
 * the gradient of the product of q and k; the addends' own gradient is p * (dp - delta). With dropout, p and dp
 * are multiplied with keep, which is factor where kept [BLOCK, BLOCK] is not 0, before they meet dout and
 * delta. Where masked, all are 0 where the score is -inf, whatever lse, delta and dp are, and hidden [BLOCK,
 * BLOCK], if not NULL, becomes other than 0 there. sums [NUM_HEAD_NUMBERS], if not NULL, take in the gradients
 * by the head's numbers. With PAIRS, p, ds and ds_rows are those of T(pair_rows) in the end. Whether a score is
 * -inf anywhere. */
INLINE bool T(differentiate_tile)(T(score_terms) scoring, const fa_tile *tile, const REAL *lse,
                                  const REAL *delta, REAL *p, REAL *ds, T(operand) * ds_rows,
                                  T(addends) addends, T(addends_gradient) gradient, INT *hidden,
                                  const INT *kept, REAL factor, const T(bias_place) ahead[2], double *sums,
                                  bool plain, bool adds, bool drops, bool masked) {
  int64_t num_rows = tile->rows.end - tile->rows.begin, num_columns = tile->columns.end - tile->columns.begin;
  T(seen_columns) seen;
  if (masked) T(find_seen)(tile, &seen);
  T(mask) any = {0};
  T(vec) by_head[NUM_HEAD_NUMBERS] = {0};
  for (int64_t i = 0; i < num_rows; i++) {
    const T(vec) distances = T(distances)(tile, i);
    for (int64_t j = 0; j < num_columns; j += LANES) {
      T(vec) *p_ij = (T(vec) *)(p + i * BLOCK + j), *ds_ij = (T(vec) *)(ds + i * BLOCK + j);
      T(scores) x = T(score)(scoring, plain, *p_ij);
      if (adds)
        x.s = T(with_addend)(x.s, T(load)(addends.data + i * addends.stride + j)),
        T(look_ahead)(&ahead[0], i, j), T(look_ahead)(&ahead[1], i, j);
      /* s exceeds lse by rounding only, unless lse is not this problem's: inf then, as exp has it. */
      *p_ij = T(exp)(T(min)(T(splat)(EXP_HIGHEST), x.s - lse[i]));
      T(vec) weight = *p_ij, dp = *ds_ij;
      if (drops) {
        const T(mask) stays = *(const T(mask) *)(kept + i * BLOCK + j);
        *p_ij = T(select)(stays, weight * factor, T(splat)(0));
        dp = T(select)(stays, dp * factor, T(splat)(0));
      }
      T(vec) of_score = weight * (dp - delta[i]);
      *ds_ij = of_score * x.slope;
      if (masked) {
        T(mask) index = T(lanes)() + (INT)j;
        T(mask) shown = (index >= seen.begin[i]) & (index < seen.end[i]) & (x.s != T(splat)(-INFINITY));
        *p_ij = T(select)(shown, *p_ij, T(splat)(0));
        *ds_ij = T(select)(shown, *ds_ij, T(splat)(0));
        of_score = T(select)(shown, of_score, T(splat)(0));
        if (hidden) *(T(mask) *)(hidden + i * BLOCK + j) = ~shown;
        any |= ~shown & (index < (INT)num_columns);
      }
      if (adds && gradient.data) {
        REAL *to = gradient.data + i * gradient.stride + j;
        T(vec) sum = of_score;
        if (gradient.is_sum) sum += T(load)(to);
        T(store)(to, sum);
      }
      if ((adds || !plain) && sums) {
        x.by[ALIBI_SLOPE] = -T(absolute)(distances - (REAL)j);
        for (int n = 0; n < NUM_HEAD_NUMBERS; n++) by_head[n] += x.by[n] * of_score;
      }
    }
#if PAIRS
    if (i % 2 || i + 1 == num_rows) T(pair_rows)(i - i % 2, num_rows, num_columns, p, ds, ds_rows);
#endif
  }
  (void)ds_rows;
  for (int n = 0; n < NUM_HEAD_NUMBERS && sums; n++) sums[n] += T(sum_of_lanes)(by_head[n]);
  return T(any_lane)(any);
}

/* The same, choosing how. hidden is NULL where q, k and dout are finite: a score that the mask does not hide is
 * -inf then only by overflow, and p = 0 is all that it takes. next is the tile that follows. Whether hidden
 * shows anything. kept is scratch. */
static bool T(differentiate_scores)(const fa_cpu_job *job, const fa_tile *tile, const fa_tile *next,
                                    const REAL *lse, const REAL *delta, REAL *p, REAL *ds, T(operand) * ds_rows,
                                    T(addends) addends, T(addends_gradient) gradient, INT *hidden, INT *kept,
                                    double *sums) {
  const fa_problem *problem = job->problem;
  const T(score_terms) scoring = T(scoring_of)(job, tile);
  const bool plain = T(is_plain)(problem), adds = T(has_addends)(problem), drops = problem->dropout != 0;
  const REAL factor = 1 / (1 - (REAL)problem->dropout);
  T(bias_place) ahead[2] = {T(bias_of)(job, FA_TENSOR_BIAS, next)};
  fa_tile soon = *tile;
  soon.rows.begin += 4;
  if (fa_is_sum(problem, FA_TENSOR_DBIAS)) ahead[1] = T(bias_of)(job, FA_TENSOR_DBIAS, &soon);
  if (drops) {
    const fa_dropout dropout = fa_dropout_in(problem, job->tensors, tile->sequence, tile->head);
    T(find_kept)(dropout, false, T(whole_rows)(problem, tile), tile->columns, kept, BLOCK);
  }
#define DIFFERENTIATE(plain, adds, drops, masked)                                                          \
  T(differentiate_tile)                                                                                    \
  (scoring, tile, lse, delta, p, ds, ds_rows, addends, gradient, hidden, kept, factor, ahead, sums, plain, \
   adds, drops, masked)
  bool any;
  if (!plain)
    any = DIFFERENTIATE(false, adds, drops, true);
  else if (drops)
    any = DIFFERENTIATE(true, adds, true, true);
  else if (adds)
    any = DIFFERENTIATE(true, true, false, true);
  else if (hidden || !fa_tile_sees_all(tile))
    any = DIFFERENTIATE(true, false, false, true);
  else
    any = DIFFERENTIATE(true, false, false, false);
#undef DIFFERENTIATE
  return hidden && any;
}

#endif
