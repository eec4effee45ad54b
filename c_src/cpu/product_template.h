/*
 * Template: the one matrix product that every pass is made of.
 *
 * Parameters: REAL, T(name), INT, LANES, MR, NV, NR, WIDE, STRIP, BLOCK (see kernels.c); T(vec) of
 * vector_template.h.
 *
 *     c[rows, columns]  =  factor * a[rows, depth] . b[depth, columns]           STORE
 *     c[rows, columns] +=           a[rows, depth] . b[depth, columns]           ADD
 *     c[r, columns]     =  factors[r] * c[r, columns] + a[r, depth] . b[...]     RESCALE
 *
 * depth counts operands (vector_template.h). Operand (r, p) of a lies at a[r * a_row + p * a_column] and is
 * broadcast. b lies in panels of NR columns: operand (p, x) at b[(x / NR) * panel + p * NR + x % NR]. Rows are
 * rounded up to MR and columns to NR: a, b and c must be that large. A tile of c, MR rows of NV vectors, or a
 * wide one, stays in registers for the whole depth.
 *
 * What is not finite: an element of a that is 0 because a row does not see a column must not meet a NaN or an
 * infinity of b, whose product with 0 is NaN. Where b holds such a number, T(product_of_seen) leaves those
 * elements out. It is slow, and needed for few tiles: those that have both.
 *
 * What is tiny: instructions that multiply pairs take subnormal numbers as 0. T(product_of_seen) does not, and
 * serves wherever a or b holds such a number, too. Both give the same bits where the others of T(all_normal)
 * meet: these are multiples of 2^-63, so that sums of their products are multiples of 2^-126.
 */

#if !defined(PRODUCT_TARGETS)
#define PRODUCT_TARGETS
typedef enum product_target { STORE, ADD, RESCALE } product_target;
#endif

_Static_assert(STRIP % MR == 0 && STRIP % NR == 0 && BLOCK % MR == 0 && BLOCK % NR == 0, "whole tiles");

/* What becomes of a row of a tile of c, whose sums are there. */
INLINE void T(finish_product)(REAL *c, const T(vec) sum[NV], product_target target, REAL factor, REAL of_row) {
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    T(vec) *c_v = (T(vec) *)(c + v * LANES);
    *c_v = target == STORE ? factor * sum[v] : target == ADD ? *c_v + sum[v] : of_row * *c_v + sum[v];
  }
}

#if TILES

/* Rows of 16 operands of a, from row r and operand p on, in `to`: transposed where rows lie together, and 0
 * from depth on. */
INLINE void T(copy_tile)(T(operand) * to, const T(operand) * a, int64_t a_row, int64_t a_column, int64_t r,
                         int64_t p, int64_t depth) {
  const int64_t count = fa_min(depth - p, TILE);
  a += r * a_row + p * a_column;
  if (a_column == 1) {
    const __mmask16 there = (__mmask16)((1 << count) - 1);
    for (int i = 0; i < TILE; i++)
      _mm512_store_si512(to + i * TILE, _mm512_maskz_loadu_epi32(there, a + i * a_row));
  } else {
    T(vec) m[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      m[i] = i < count ? (T(vec))_mm512_loadu_si512(a + i * a_column) : (T(vec)){0};
    T(transpose)(m);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(T(vec) *)(to + i * TILE) = m[i];
  }
}

/* By tiles: two of a's rows and two of b's columns, or one of a's. */
static __attribute__((noinline)) void T(product)(int64_t rows, int64_t columns, int64_t depth,
                                                 const T(operand) * a, int64_t a_row, int64_t a_column,
                                                 const T(operand) * b, int64_t panel, REAL *c, int64_t c_row,
                                                 product_target target, REAL factor, const REAL *factors) {
  _Static_assert(NR == 2 * TILE && MR == TILE && LANES == TILE, "two tiles of b make a panel");
  _Alignas(64) T(operand) copies[BLOCK * BLOCK / 2], tail[TILE * NR];
  _Alignas(64) REAL sums[2 * TILE * NR];
  const int64_t whole = depth / TILE * TILE;
  /* What is copied of a: where its rows lie together, BLOCK by BLOCK / 2 operands at most, everything, or what
   * is no whole tile; a row of tiles after the other. */
  const bool copies_all = a_column != 1;
  const int64_t copied = copies_all ? 0 : whole, num_copied = fa_divide_up(depth - copied, TILE);
  for (int64_t r = 0; r < rows; r += TILE)
    for (int64_t p = copied; p < depth; p += TILE)
      T(copy_tile)(copies + (r * num_copied + p - copied) * TILE, a, a_row, a_column, r, p, depth);
  for (int64_t x = 0; x < columns; x += NR, b += panel) {
    const T(operand) *last = b + whole * NR;
    if (whole < depth) {
      memset(tail, 0, sizeof tail);
      memcpy(tail, last, (size_t)((depth - whole) * NR) * sizeof *b);
      last = tail;
    }
    for (int64_t r = 0; r < rows; r += 2 * TILE) {
      const bool both = r + TILE < rows;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t p = 0; p < depth; p += TILE) {
        const bool is_copy = p >= copied;
        const T(operand) *upper = is_copy ? copies + (r * num_copied + p - copied) * TILE : a + r * a_row + p;
        const T(operand) *lower = upper + TILE * (is_copy ? num_copied * TILE : a_row);
        const T(operand) *right = p == whole ? last : b + p * NR;
        const int64_t step = is_copy ? TILE : a_row;
        TILE_LOAD(6, right, NR);
        TILE_LOAD(7, right + TILE, NR);
        TILE_LOAD(4, upper, step);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        if (!both) continue;
        TILE_LOAD(5, lower, step);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
      }
      TILE_STORE(0, sums, NR);
      TILE_STORE(1, sums + TILE, NR);
      TILE_STORE(2, sums + TILE * NR, NR);
      TILE_STORE(3, sums + TILE * NR + TILE, NR);
      for (int64_t i = 0; i < (both ? 2 * TILE : TILE); i++) {
        const REAL of_row = target == RESCALE ? factors[r + i] : 0;
        T(finish_product)(c + (r + i) * c_row + x, (const T(vec) *)sums + i * NV, target, factor, of_row);
      }
    }
  }
}

#else

/* A tile of mr rows and np panels of c, of which the first number is c; both are constants. */
INLINE void T(make_tile)(int mr, int np, int64_t depth, const T(operand) * a, int64_t a_row, int64_t a_column,
                         const T(operand) * b, int64_t panel, REAL *c, int64_t c_row, product_target target,
                         REAL factor, const REAL *factors) {
  T(vec) sum[MR][2][NV] = {0};
#pragma GCC unroll 2
  for (int64_t p = 0; p < depth; p++) {
    T(vec) b_p[2][NV];
#pragma GCC unroll 2
    for (int n = 0; n < np; n++)
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) b_p[n][v] = *(const T(vec) *)(b + n * panel + p * NR + v * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
      const T(operand) a_ip = a[i * a_row + p * a_column];
#pragma GCC unroll 2
      for (int n = 0; n < np; n++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sum[i][n][v] = T(multiply_add)(sum[i][n][v], a_ip, b_p[n][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; i++) {
    const REAL of_row = target == RESCALE ? factors[i] : 0;
#pragma GCC unroll 2
    for (int n = 0; n < np; n++) T(finish_product)(c + i * c_row + n * NR, sum[i][n], target, factor, of_row);
  }
}

static __attribute__((noinline)) void T(product)(int64_t rows, int64_t columns, int64_t depth,
                                                 const T(operand) * a, int64_t a_row, int64_t a_column,
                                                 const T(operand) * b, int64_t panel, REAL *c, int64_t c_row,
                                                 product_target target, REAL factor, const REAL *factors) {
  int64_t x = 0;
#define TILE_OF(mr, np)                                                                               \
  T(make_tile)                                                                                        \
  (mr, np, depth, a + r * a_row, a_row, a_column, b, panel, c + r * c_row + x, c_row, target, factor, \
   target == RESCALE ? factors + r : factors)
  /* Six rows at a time, and four at the end: two would have too few sums to hide what one takes. */
#define SIXES_OF(np)                                            \
  do {                                                          \
    const int64_t end = fa_round_up(rows, 2);                   \
    int64_t r = 0;                                              \
    for (; end - r > 8 || end - r == 6; r += 6) TILE_OF(6, np); \
    for (; r < end; r += 4) TILE_OF(4, np);                     \
  } while (0)
#if WIDE
  for (; x + NR < columns; x += 2 * NR, b += 2 * panel) SIXES_OF(2);
#endif
  for (; x < columns; x += NR, b += panel)
#if MR == 6
    SIXES_OF(1);
#else
    for (int64_t r = 0; r < rows; r += MR) TILE_OF(MR, 1);
#endif
#undef SIXES_OF
#undef TILE_OF
}

#endif

#if PAIRS

/* Whether all numbers of these operands, aligned to a vector, are 0 or from 2^-56 on, and finite. */
static bool T(all_normal)(const T(operand) * x, int64_t count) {
  __mmask32 others = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    const __mmask16 lanes = (__mmask16)(count - i < LANES ? (1 << (count - i)) - 1 : 0xffff);
    const __m512i size = _mm512_and_si512(_mm512_maskz_loadu_epi32(lanes, x + i), _mm512_set1_epi16(0x7fff));
    const __m512i steps = _mm512_sub_epi16(size, _mm512_set1_epi16((127 - 56) << 7));
    others |= _mm512_cmpge_epu16_mask(steps, _mm512_set1_epi16((255 - (127 - 56)) << 7)) &
              _mm512_test_epi16_mask(size, size);
  }
  return others == 0;
}

#else

/* Whether none of these operands is a NaN or an infinity. */
static bool T(all_normal)(const T(operand) * x, int64_t count) {
  T(vec) nought[4] = {0}; /* a number times 0 is 0, anything else NaN */
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) nought[v] += T(load)(x + i + v * LANES) * 0;
  for (; i < count; i++) nought[0] += x[i] * 0;
  nought[0] += nought[1] + nought[2] + nought[3];
  REAL lanes[LANES];
  memcpy(lanes, nought, sizeof lanes);
  for (int v = 0; v < LANES; v++)
    if (lanes[v] != 0) return false;
  return true;
}

#endif

/* The same of the first rows of every panel, of columns columns in all. */
static bool T(panels_normal)(int64_t rows, int64_t columns, const T(operand) * b, int64_t panel) {
  for (int64_t x = 0; x < columns; x += NR, b += panel)
    if (!T(all_normal)(b, rows * NR)) return false;
  return true;
}

/* T(product) without the numbers of a whose place in hidden, which is laid out as a would be if operands were
 * single numbers, is not 0; hidden NULL: with all. */
static __attribute__((noinline)) void T(product_of_seen)(int64_t rows, int64_t columns, int64_t depth,
                                                         const T(operand) * a, const INT *hidden, int64_t a_row,
                                                         int64_t a_column, const T(operand) * b, int64_t panel,
                                                         REAL *c, int64_t c_row, product_target target,
                                                         REAL factor, const REAL *factors) {
  const int64_t hidden_row = a_column == 1 ? a_row * T(PER_OPERAND) : a_row;
  for (int64_t x = 0; x < columns; x += NR, b += panel) {
    for (int64_t r = 0; r < rows; r++) {
      T(vec) sum[NV] = {0};
      T(vec) parts[2][NV] = {0}; /* with TILES, of a tile: of first numbers, and of second ones */
      for (int64_t p = 0; p < depth; p++) {
        const T(operand) a_rp = a[r * a_row + p * a_column];
        for (int n = T(PER_OPERAND) - 1; n >= 0; n--) {
          if (hidden && hidden[r * hidden_row + (p * T(PER_OPERAND) + n) * a_column]) continue;
          T(vec) *to = TILES ? parts[n] : sum;
          for (int v = 0; v < NV; v++) {
            const T(vec) b_p = *(const T(vec) *)(b + p * NR + v * LANES);
#if PAIRS
            to[v] += fa_bf16_to_f32((uint16_t)(a_rp >> 16 * n)) * (n ? T(second_of)(b_p) : T(first_of)(b_p));
#else
            to[v] += a_rp * b_p;
#endif
          }
        }
#if TILES
        if (p % TILE != TILE - 1 && p != depth - 1) continue;
        for (int v = 0; v < NV; v++) sum[v] += parts[0][v] + parts[1][v];
        memset(parts, 0, sizeof parts);
#endif
      }
      T(finish_product)(c + r * c_row + x, sum, target, factor, target == RESCALE ? factors[r] : 0);
    }
  }
}

/* Either of the two; hidden NULL: everything is seen. all_normal: whether a, but for its zeros, and b are. */
INLINE void T(product_where_seen)(int64_t rows, int64_t columns, int64_t depth, const T(operand) * a,
                                  const INT *hidden, bool all_normal, int64_t a_row, int64_t a_column,
                                  const T(operand) * b, int64_t panel, REAL *c, int64_t c_row,
                                  product_target target, REAL factor, const REAL *factors) {
  if (hidden || (PAIRS && !all_normal)) T(product_of_seen)
  (rows, columns, depth, a, hidden, a_row, a_column, b, panel, c, c_row, target, factor, factors);
  else T(product)(rows, columns, depth, a, a_row, a_column, b, panel, c, c_row, target, factor, factors);
}
