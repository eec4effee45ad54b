/*
 * Template: products of few rows with rows of k or v where these lie. Packing them, as T(product) wants it,
 * takes longer than such products do, and its tiles are wider than there are rows.
 *
 *     k, v [num_heads][columns of a block][head_dim]   width: head_dim in whole NR
 *     q [num_heads][count][width]                      those that share a head of k; zeros past head_dim
 *     st [BLOCK of columns][STRIP of rows]             scores, then probabilities, of num_heads * count rows
 *
 * What a row gets does not depend on the rows beside it.
 *
 * Parameters: REAL, T(name), INT, LANES, NR, STRIP (see kernels.c), and the templates before this one.
 */

#if !defined(HELD)
#define HELD    32 /* rows of k or v that are read at a time */
#define ABREAST 8  /* and multiplied, at most */
#if VECTOR_BYTES == 64
#define SUMS 16 /* vectors that stay in registers */
#else
#define SUMS 8
#endif
#endif

#if DIRECT

/* Some rows of k or v. */
typedef struct T(held_rows) {
  const char *row[HELD]; /* up to a multiple of ABREAST */
  fa_dtype dtype;        /* that vectors are made of as they are read */
  int64_t count;
  int64_t asked_bytes; /* of a row; 0: the processor foresees those that are not converted */
} T(held_rows);

/* Whether rows of that type may stay as they are, to be read by vectors; others become REAL before. */
static bool T(can_hold)(fa_dtype dtype) {
  if (dtype == FA_DTYPE_F16) return CONVERTS_F16;
  return IS_F32 ? dtype == FA_DTYPE_F32 || dtype == FA_DTYPE_BF16 : dtype == FA_DTYPE_F64;
}

/* function(dtype, ...), where dtype is a constant. */
#define WITH_TYPE(dtype, function, ...)                            \
  do {                                                             \
    if (IS_F32 && (dtype) == FA_DTYPE_BF16)                        \
      function(FA_DTYPE_BF16, __VA_ARGS__);                        \
    else if (IS_F32 && (dtype) == FA_DTYPE_F16)                    \
      function(FA_DTYPE_F16, __VA_ARGS__);                         \
    else                                                           \
      function(IS_F32 ? FA_DTYPE_F32 : FA_DTYPE_F64, __VA_ARGS__); \
  } while (0)

/* The most rows of k or v that are held, beside so many of q. */
static int64_t T(most_held)(int64_t count) { return count > 4 ? HELD / 2 : HELD; }

/* The first row stands for those that follow the last one. */
INLINE void T(fill_up)(T(held_rows) * held) {
  for (int64_t n = held->count; n % ABREAST; n++) held->row[n] = held->row[0];
}

/* Rows where they lie, the first `most` of a range at most. */
INLINE void T(find_rows)(T(rows) from, fa_range range, int64_t most, T(held_rows) * found) {
  found->dtype = from.dtype;
  found->count = fa_max(fa_min(range.end - range.begin, most), 0);
  T(rows_at)(from, range.begin, found->count, found->row);
  T(fill_up)(found);
}

/* What is found behind rows that are held of a head: the same rows of the next head, or behind the last one
 * those of the first that follow up to the block's end, or others after the block. */
typedef struct T(place) {
  T(rows) from;
  fa_range range;
} T(place);

INLINE T(place) T(place_after)(const T(rows) * from, int64_t head, int64_t num_heads, fa_range rows,
                               int64_t block_end, T(place) after) {
  if (head + 1 < num_heads) return (T(place)){from[head + 1], rows};
  return rows.end < block_end ? (T(place)){from[0], {rows.end, block_end}} : after;
}

/* The rows that were found become such as can be read in whole vectors of `width`. They stay where they lie if
 * they are that, of a type that can be held, and there are up to four rows of q. More of these read copies
 * [HELD / 2][width] of REAL: rows that are a power of two apart would leave the cache before others of q come.
 * Copies hold zeros past head_dim. */
INLINE void T(hold_rows)(T(held_rows) * held, bool has_gaps, int64_t d, int64_t count, REAL *copies) {
  const int64_t width = fa_round_up(d, NR);
  const bool as_is = T(can_hold)(held->dtype) && count <= 4;
  if (as_is && width == d && !has_gaps) return;
  const size_t bytes = (size_t)d * (as_is ? fa_dtype_bytes(held->dtype) : sizeof(REAL));
  for (int64_t n = 0; n < held->count; n++) {
    REAL *copy = copies + n * width;
    const void *row = held->row[n];
    if (as_is && !row) row = memset(copy, 0, bytes);
    if (!as_is) row = T(read_row)(row, held->dtype, d, copy);
    if (row != copy && (width != d || !as_is)) row = memcpy(copy, row, bytes);
    held->row[n] = row;
  }
  T(fill_up)(held);
  if (!as_is) held->dtype = IS_F32 ? FA_DTYPE_F32 : FA_DTYPE_F64;
}

static int64_t T(asked_bytes)(fa_dtype dtype, int64_t d) {
  const int64_t element_bytes = (int64_t)fa_dtype_bytes(dtype);
  return element_bytes < (int64_t)sizeof(REAL) ? d * element_bytes : 0;
}

/* Asks for a row that will be read next, unless it is not there. */
INLINE void T(ask_for)(const T(held_rows) * next, int64_t n) {
  const char *row = n < next->count ? next->row[n] : NULL;
  for (int64_t i = 0; row && i < next->asked_bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* num_k columns of num_q rows of st, scaled; both are constants. */
INLINE void T(make_dots)(int num_k, int num_q, fa_dtype dtype, const char *const *k, const REAL *q,
                         int64_t width, REAL scale, REAL *st) {
  T(vec) sum[SUMS] = {0};
  for (int64_t p = 0; p < width; p += LANES) {
    T(vec) q_p[SUMS];
#pragma GCC unroll 16
    for (int x = 0; x < num_q; x++) q_p[x] = T(load)(q + x * width + p);
#pragma GCC unroll 16
    for (int n = 0; n < num_k; n++) {
      const T(vec) k_p = T(load_typed)(k[n], p, dtype);
#pragma GCC unroll 16
      for (int x = 0; x < num_q; x++) sum[n * num_q + x] += q_p[x] * k_p;
    }
  }
#pragma GCC unroll 16
  for (int first = 0; first < num_k * num_q; first += LANES) {
    REAL sums[LANES];
    const int count = num_k * num_q - first < LANES ? num_k * num_q - first : LANES;
    T(store)(sums, scale * T(add_lanes)(sum + first, count));
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) st[(first + i) / num_q * STRIP + (first + i) % num_q] = sums[i];
  }
}

/* The same of all rows of k that are held, while next are asked for, unless that is NULL. Functions that
 * are called, as pointers of several would not stay in registers. */
#define DOTS_OF(name, num_k, num_q)                                                                          \
  INLINE void T(name##_of)(fa_dtype dtype, const T(held_rows) * k, const T(held_rows) * next, const REAL *q, \
                           int64_t width, REAL scale, REAL *st) {                                            \
    for (int64_t n = 0; n < k->count; n += num_k) {                                                          \
      for (int64_t i = n; i < n + num_k && next; i++) T(ask_for)(next, i);                                   \
      T(make_dots)(num_k, num_q, dtype, k->row + n, q, width, scale, st + n * STRIP);                        \
    }                                                                                                        \
  }                                                                                                          \
  static __attribute__((noinline)) void T(name)(const T(held_rows) * k, const T(held_rows) * next,           \
                                                const REAL *q, int64_t width, REAL scale, REAL *st) {        \
    WITH_TYPE(k->dtype, T(name##_of), k, next, q, width, scale, st);                                         \
  }
DOTS_OF(four_dots, SUMS / 4, 4)
DOTS_OF(two_dots, SUMS / 2, 2)
DOTS_OF(one_dot, ABREAST, 1)
#undef DOTS_OF

/* Scaled products of q with the rows of k that a block has of every head. */
static void T(dots)(const T(rows) * from, int64_t num_heads, fa_range block, T(place) after, int64_t d,
                    const REAL *q, int64_t count, REAL scale, REAL *st, REAL *copies) {
  const int64_t width = fa_round_up(d, NR), num_rows = num_heads * count, most = T(most_held)(count);
  T(held_rows) ring[2];
  ring[0].asked_bytes = ring[1].asked_bytes = T(asked_bytes)(from[0].dtype, d);
  int turn = 0;
  T(find_rows)(from[0], block, most, &ring[turn]);
  for (int64_t j = block.begin; j < block.end; j += most, st += most * STRIP) {
    const fa_range rows = {j, fa_min(j + most, block.end)};
    for (int64_t n = 0; n < rows.end - rows.begin && num_rows % LANES; n++)
      T(store)(st + n * STRIP + num_rows / LANES * LANES, T(splat)(0)); /* what fills the last vector */
    for (int64_t head = 0; head < num_heads; head++) {
      T(held_rows) *k = &ring[turn], *next = &ring[turn ^= 1];
      T(hold_rows)(k, T(has_gaps)(from[0]), d, count, copies);
      const T(place) place = T(place_after)(from, head, num_heads, rows, block.end, after);
      T(find_rows)(place.from, place.range, most, next);
      const int64_t first = head * count, end = first + count;
      int64_t x = first;
#define DOTS(name) T(name)(k, x == first ? next : NULL, q + x * width, width, scale, st + x)
      for (; x + 4 <= end; x += 4) DOTS(four_dots);
      for (; x + 2 <= end; x += 2) DOTS(two_dots);
      for (; x < end; x++) DOTS(one_dot);
#undef DOTS
    }
  }
}

/* sums [num_p][num_v vectors of width] += p . v, the rows of v that are held; num_p and num_v are constants.
 * next are asked for, unless that is NULL. */
INLINE void T(add_products)(int num_p, int num_v, fa_dtype dtype, const T(held_rows) * v,
                            const T(held_rows) * next, int64_t column, int64_t width, const REAL *pt,
                            REAL *sums) {
  T(vec) sum[SUMS];
#pragma GCC unroll 16
  for (int x = 0; x < num_p; x++)
#pragma GCC unroll 16
    for (int i = 0; i < num_v; i++) sum[x * num_v + i] = T(load)(sums + x * width + column + i * LANES);
  for (int64_t n = 0; n < v->count; n++) {
    if (next) T(ask_for)(next, n);
    T(vec) v_n[SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < num_v; i++) v_n[i] = T(load_typed)(v->row[n], column + i * LANES, dtype);
#pragma GCC unroll 16
    for (int x = 0; x < num_p; x++)
#pragma GCC unroll 16
      for (int i = 0; i < num_v; i++) sum[x * num_v + i] += pt[n * STRIP + x] * v_n[i];
  }
#pragma GCC unroll 16
  for (int x = 0; x < num_p; x++)
#pragma GCC unroll 16
    for (int i = 0; i < num_v; i++) T(store)(sums + x * width + column + i * LANES, sum[x * num_v + i]);
}

/* The same of all columns. */
#define PRODUCTS_OF(name, num_p, num_v)                                                                      \
  INLINE void T(name##_of)(fa_dtype dtype, const T(held_rows) * v, const T(held_rows) * next, int64_t width, \
                           const REAL *pt, REAL *sums) {                                                     \
    int64_t c = 0;                                                                                           \
    for (; c + num_v * LANES <= width; c += num_v * LANES, next = NULL)                                      \
      T(add_products)(num_p, num_v, dtype, v, next, c, width, pt, sums);                                     \
    for (; c < width; c += NR, next = NULL) T(add_products)(num_p, NV, dtype, v, next, c, width, pt, sums);  \
  }                                                                                                          \
  static __attribute__((noinline)) void T(name)(const T(held_rows) * v, const T(held_rows) * next,           \
                                                int64_t width, const REAL *pt, REAL *sums) {                 \
    WITH_TYPE(v->dtype, T(name##_of), v, next, width, pt, sums);                                             \
  }
PRODUCTS_OF(add_four_products, 4, SUMS / 4)
PRODUCTS_OF(add_two_products, 2, 4)
PRODUCTS_OF(add_one_product, 1, 4)
#undef PRODUCTS_OF
#undef WITH_TYPE

/* The same of one row, without the columns that it does not see: what v holds there may be other than finite.
 */
static void T(add_products_of_seen)(const T(held_rows) * v, int64_t width, const REAL *pt, const INT *hidden,
                                    REAL *sums) {
  for (int64_t n = 0; n < v->count; n++)
    for (int64_t p = 0; p < width && !hidden[n * STRIP]; p += LANES)
      T(store)(sums + p, T(load)(sums + p) + pt[n * STRIP] * T(load_typed)(v->row[n], p, v->dtype));
}

/* Whether rows that are held have no NaN and no infinity. */
static bool T(held_finite)(const T(held_rows) * held, int64_t width) {
  T(vec) nought = T(splat)(0); /* a number times 0 is 0, anything else NaN */
  for (int64_t n = 0; n < held->count; n++)
    for (int64_t p = 0; p < width; p += LANES) nought += T(load_typed)(held->row[n], p, held->dtype) * 0;
  return !T(any_lane)(nought != T(splat)(0));
}

/* o [num_heads][count][width] = decay * o + p . v with the rows of v that a block has of every head; hidden
 * NULL: all are seen. sums is scratch, as large as o. */
static void T(add_direct)(const T(rows) * from, int64_t num_heads, fa_range block, T(place) after, int64_t d,
                          const REAL *pt, const INT *hidden, int64_t count, const REAL *decay, REAL *o,
                          REAL *sums, REAL *copies) {
  const int64_t width = fa_round_up(d, NR), num_rows = num_heads * count, most = T(most_held)(count);
  T(held_rows) ring[2];
  ring[0].asked_bytes = ring[1].asked_bytes = T(asked_bytes)(from[0].dtype, d);
  int turn = 0;
  T(find_rows)(from[0], block, most, &ring[turn]);
  memset(sums, 0, (size_t)(num_rows * width) * sizeof *sums);
  for (int64_t j = block.begin; j < block.end; j += most, pt += most * STRIP) {
    const fa_range rows = {j, fa_min(j + most, block.end)};
    for (int64_t head = 0; head < num_heads; head++) {
      T(held_rows) *v = &ring[turn], *next = &ring[turn ^= 1];
      T(hold_rows)(v, T(has_gaps)(from[0]), d, count, copies);
      const T(place) place = T(place_after)(from, head, num_heads, rows, block.end, after);
      T(find_rows)(place.from, place.range, most, next);
      const bool all_finite = !hidden || T(held_finite)(v, width);
      const int64_t first = head * count, end = first + count;
      for (int64_t x = first; !all_finite && x < end; x++) T(add_products_of_seen)
      (v, width, pt + x, hidden + (j - block.begin) * STRIP + x, sums + x * width);
      int64_t x = all_finite ? first : end;
#define ADD(name) T(name)(v, x == first ? next : NULL, width, pt + x, sums + x * width)
      for (; x + 4 <= end; x += 4) ADD(add_four_products);
      for (; x + 2 <= end; x += 2) ADD(add_two_products);
      for (; x < end; x++) ADD(add_one_product);
#undef ADD
    }
  }
  for (int64_t x = 0; x < num_rows; x++)
    for (int64_t p = 0; p < width; p += LANES) {
      REAL *to = o + x * width + p;
      T(store)(to, decay[x] * T(load)(to) + T(load)(sums + x * width + p));
    }
}

#endif
