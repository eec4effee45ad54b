/*
 * Template: products of few rows with rows of k or v where these lie. Packing them, as T(product) wants it,
 * takes longer than such products do, and its tiles are wider than there are rows.
 *
 *     k, v [columns of a block][head_dim]      width: head_dim in whole NR
 *     q [count][width]                         rows of one or several heads, zeros past head_dim
 *     st [BLOCK of columns][STRIP of rows]     scores, then probabilities
 *
 * What a row gets does not depend on the rows beside it.
 *
 * Parameters: REAL, T(name), INT, LANES, NR, STRIP (see kernels.c), and the templates before this one.
 */

#if !defined(HELD)
#define HELD 16 /* rows of k or v that are read at a time */
#if defined(__AVX512F__)
#define SUMS 16 /* vectors that stay in registers */
#else
#define SUMS 8
#endif
#endif

/* Some rows of k or v, which can be read in whole vectors of `width`. */
typedef struct T(held_rows) {
  const REAL *row[HELD];
  int64_t count;
} T(held_rows);

/* Rows that will be read next, which are asked for meanwhile, one after the other; row_bytes 0: they are not.
 */
typedef struct T(next_rows) {
  T(rows) from;
  fa_range range;
  int64_t row_bytes;
} T(next_rows);

INLINE void T(ask_for)(const T(next_rows) * next, int64_t n) {
  if (next->range.begin + n < next->range.end)
    T(ask_for_row)(next->from, next->range.begin + n, next->row_bytes);
}

/* Those behind the rows from `begin` on that are held of a block, or others after the block. */
INLINE T(next_rows) T(rows_after)(T(rows) from, fa_range block, int64_t begin, T(next_rows) after) {
  if (begin + HELD >= block.end) return after;
  return (T(next_rows)){from, {begin + HELD, block.end}, after.row_bytes};
}

/* The rows are read where they lie if they are of REAL and whole vectors, and by four rows of q at most. Else
 * they are read from copies [HELD][width], which hold zeros past head_dim: rows that are a power of two apart
 * would leave the cache before others of q come. */
INLINE T(held_rows)
    T(hold_rows)(T(rows) from, fa_range block, int64_t begin, int64_t d, int64_t count, REAL *copies) {
  const int64_t width = fa_round_up(d, NR);
  T(held_rows) held;
  held.count = fa_min(block.end - begin, HELD);
  for (int64_t n = 0; n < held.count; n++) {
    REAL *copy = copies + n * width;
    held.row[n] = T(load_row)(from, begin + n, d, copy);
    if (held.row[n] != copy && (width != d || count > 4))
      held.row[n] = memcpy(copy, held.row[n], (size_t)d * sizeof *copy);
  }
  for (int64_t n = held.count; n < HELD; n++) held.row[n] = held.row[0];
  return held;
}

/* num_k columns of num_q rows of st, scaled; both are constants. */
INLINE void T(make_dots)(int num_k, int num_q, const REAL *const *k, const REAL *q, int64_t width, REAL scale,
                         REAL *st) {
  T(vec) sum[SUMS] = {0};
  for (int64_t p = 0; p < width; p += LANES) {
    T(vec) q_p[SUMS];
#pragma GCC unroll 16
    for (int x = 0; x < num_q; x++) q_p[x] = T(load)(q + x * width + p);
#pragma GCC unroll 16
    for (int n = 0; n < num_k; n++) {
      const T(vec) k_p = T(load)(k[n] + p);
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

/* The same of all rows of k that are held, while rows of next are asked for, unless it is NULL. Functions that
 * are called, as pointers of several would not stay in registers. */
#define DOTS_OF(name, num_k, num_q)                                                                   \
  static __attribute__((noinline)) void T(name)(const T(held_rows) * k, const T(next_rows) * next,    \
                                                const REAL *q, int64_t width, REAL scale, REAL *st) { \
    for (int64_t n = 0; n < k->count; n += num_k) {                                                   \
      for (int64_t i = n; i < n + num_k && next; i++) T(ask_for)(next, i);                            \
      T(make_dots)(num_k, num_q, k->row + n, q, width, scale, st + n * STRIP);                        \
    }                                                                                                 \
  }
DOTS_OF(four_dots, SUMS / 4, 4)
DOTS_OF(two_dots, SUMS / 2, 2)
DOTS_OF(one_dot, 8, 1)
#undef DOTS_OF

/* Scaled products of `count` rows of q with the rows of k that a block has. */
static void T(dots)(T(rows) from, fa_range block, T(next_rows) after, int64_t d, const REAL *q, int64_t count,
                    REAL scale, REAL *st, REAL *copies) {
  const int64_t width = fa_round_up(d, NR);
  for (int64_t j = block.begin; j < block.end; j += HELD, st += HELD * STRIP) {
    const T(held_rows) k = T(hold_rows)(from, block, j, d, count, copies);
    const T(next_rows) next = T(rows_after)(from, block, j, after);
    const T(next_rows) *asked = next.row_bytes ? &next : NULL;
    for (int64_t n = 0; n < k.count && count % LANES; n++)
      T(store)(st + n * STRIP + count / LANES * LANES, T(splat)(0)); /* what fills the last vector */
    int64_t x = 0;
    for (; x + 4 <= count; x += 4) T(four_dots)(&k, x ? NULL : asked, q + x * width, width, scale, st + x);
    for (; x + 2 <= count; x += 2) T(two_dots)(&k, x ? NULL : asked, q + x * width, width, scale, st + x);
    for (; x < count; x++) T(one_dot)(&k, x ? NULL : asked, q + x * width, width, scale, st + x);
  }
}

/* sums [num_p][num_v vectors of width] += p . v, the rows of v that are held; num_p and num_v are constants.
 * Rows of next are asked for, unless it is NULL. */
INLINE void T(add_products)(int num_p, int num_v, const T(held_rows) * v, const T(next_rows) * next,
                            int64_t column, int64_t width, const REAL *pt, REAL *sums) {
  T(vec) sum[SUMS];
#pragma GCC unroll 16
  for (int x = 0; x < num_p; x++)
#pragma GCC unroll 16
    for (int i = 0; i < num_v; i++) sum[x * num_v + i] = T(load)(sums + x * width + column + i * LANES);
  for (int64_t n = 0; n < v->count; n++) {
    if (next) T(ask_for)(next, n);
    const REAL *v_row = v->row[n] + column;
    T(vec) v_n[SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < num_v; i++) v_n[i] = T(load)(v_row + i * LANES);
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
#define PRODUCTS_OF(name, num_p, num_v)                                                              \
  static __attribute__((noinline)) void T(name)(const T(held_rows) * v, const T(next_rows) * next,   \
                                                int64_t width, const REAL *pt, REAL *sums) {         \
    int64_t c = 0;                                                                                   \
    for (; c + num_v * LANES <= width; c += num_v * LANES, next = NULL)                              \
      T(add_products)(num_p, num_v, v, next, c, width, pt, sums);                                    \
    for (; c < width; c += NR, next = NULL) T(add_products)(num_p, NV, v, next, c, width, pt, sums); \
  }
PRODUCTS_OF(add_four_products, 4, SUMS / 4)
PRODUCTS_OF(add_two_products, 2, 4)
PRODUCTS_OF(add_one_product, 1, 4)
#undef PRODUCTS_OF

/* The same of one row, without the columns that it does not see: what v holds there may be other than finite.
 */
static void T(add_products_of_seen)(const T(held_rows) * v, int64_t width, const REAL *pt, const INT *hidden,
                                    REAL *sums) {
  for (int64_t n = 0; n < v->count; n++)
    for (int64_t p = 0; p < width && !hidden[n * STRIP]; p += LANES)
      T(store)(sums + p, T(load)(sums + p) + pt[n * STRIP] * T(load)(v->row[n] + p));
}

/* o [count][width] = decay * o + p . v with the rows of v that a block has; hidden NULL: all are seen. sums is
 * scratch, as large as o. */
static void T(add_direct)(T(rows) from, fa_range block, T(next_rows) after, int64_t d, const REAL *pt,
                          const INT *hidden, int64_t count, const REAL *decay, REAL *o, REAL *sums,
                          REAL *copies) {
  const int64_t width = fa_round_up(d, NR);
  memset(sums, 0, (size_t)(count * width) * sizeof *sums);
  for (int64_t j = block.begin; j < block.end; j += HELD, pt += HELD * STRIP) {
    const T(held_rows) v = T(hold_rows)(from, block, j, d, count, copies);
    const T(next_rows) next = T(rows_after)(from, block, j, after);
    const T(next_rows) *asked = next.row_bytes ? &next : NULL;
    bool all_finite = true;
    for (int64_t n = 0; hidden && n < v.count; n++) all_finite = all_finite && T(all_finite)(v.row[n], width);
    for (int64_t x = 0; !all_finite && x < count; x++) T(add_products_of_seen)
    (&v, width, pt + x, hidden + (j - block.begin) * STRIP + x, sums + x * width);
    int64_t x = all_finite ? 0 : count;
#define ADD(name) T(name)(&v, x ? NULL : asked, width, pt + x, sums + x * width)
    for (; x + 4 <= count; x += 4) ADD(add_four_products);
    for (; x + 2 <= count; x += 2) ADD(add_two_products);
    for (; x < count; x++) ADD(add_one_product);
#undef ADD
  }
  for (int64_t x = 0; x < count; x++)
    for (int64_t p = 0; p < width; p += LANES) {
      REAL *to = o + x * width + p;
      T(store)(to, decay[x] * T(load)(to) + T(load)(sums + x * width + p));
    }
}
