/*
 * Template: the one matrix product that every pass is made of.
 *
 * Parameters: REAL, T(name), INT, LANES, MR, NV, NR, STRIP, BLOCK (see kernels.c); T(vec) of vector_template.h.
 *
 *     c[rows, columns]  =  factor * a[rows, depth] . b[depth, columns]           STORE
 *     c[rows, columns] +=           a[rows, depth] . b[depth, columns]           ADD
 *     c[r, columns]     =  factors[r] * c[r, columns] + a[r, depth] . b[...]     RESCALE
 *
 * Element (r, p) of a lies at a[r * a_row + p * a_column] and is broadcast. b lies in panels of NR columns:
 * element (p, x) at b[(x / NR) * panel + p * NR + x % NR]. Rows are rounded up to MR and columns to NR: a, b
 * and c must be that large. A tile of c, MR rows of NV vectors, stays in registers for the whole depth.
 *
 * What is not finite: an element of a that is 0 because a row does not see a column must not meet a NaN or an
 * infinity of b, whose product with 0 is NaN. Where b holds such a number, T(product_of_seen) leaves those
 * elements out. It is slow, and needed for few tiles: those that have both.
 */

#if !defined(PRODUCT_TARGETS)
#define PRODUCT_TARGETS
typedef enum product_target { STORE, ADD, RESCALE } product_target;
#endif

_Static_assert(STRIP % MR == 0 && STRIP % NR == 0 && BLOCK % MR == 0 && BLOCK % NR == 0, "whole tiles");

INLINE void T(product)(int64_t rows, int64_t columns, int64_t depth, const REAL *a, int64_t a_row,
                       int64_t a_column, const REAL *b, int64_t panel, REAL *c, int64_t c_row,
                       product_target target, REAL factor, const REAL *factors) {
  for (int64_t x = 0; x < columns; x += NR, b += panel) {
    for (int64_t r = 0; r < rows; r += MR) {
      const REAL *a_tile = a + r * a_row;
      T(vec) sum[MR][NV] = {0};
      for (int64_t p = 0; p < depth; p++) {
        T(vec) b_p[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) b_p[v] = *(const T(vec) *)(b + p * NR + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
          REAL a_ip = a_tile[i * a_row + p * a_column];
#pragma GCC unroll 16
          for (int v = 0; v < NV; v++) sum[i][v] += a_ip * b_p[v];
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        T(vec) *c_i = (T(vec) *)(c + (r + i) * c_row + x);
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
          if (target == STORE)
            c_i[v] = factor * sum[i][v];
          else if (target == ADD)
            c_i[v] += sum[i][v];
          else
            c_i[v] = factors[r + i] * c_i[v] + sum[i][v];
        }
      }
    }
  }
}

/* Whether none of these elements, aligned to a vector, is a NaN or an infinity. */
static bool T(all_finite)(const REAL *x, int64_t count) {
  T(vec) nought[4] = {0}; /* a number times 0 is 0, anything else NaN */
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) nought[v] += *(const T(vec) *)(x + i + v * LANES) * 0;
  for (; i < count; i++) nought[0] += x[i] * 0;
  nought[0] += nought[1] + nought[2] + nought[3];
  REAL lanes[LANES];
  memcpy(lanes, nought, sizeof lanes);
  for (int v = 0; v < LANES; v++)
    if (lanes[v] != 0) return false;
  return true;
}

/* Whether the first rows of every panel, of columns columns in all, are finite. */
static bool T(panels_finite)(int64_t rows, int64_t columns, const REAL *b, int64_t panel) {
  for (int64_t x = 0; x < columns; x += NR, b += panel)
    if (!T(all_finite)(b, rows * NR)) return false;
  return true;
}

/* T(product) without the elements of a whose place in hidden, which is laid out as a is, is not 0. Where b is
 * finite and those elements of a are 0, the bits are those of T(product). */
static __attribute__((noinline)) void T(product_of_seen)(int64_t rows, int64_t columns, int64_t depth,
                                                         const REAL *a, const INT *hidden, int64_t a_row,
                                                         int64_t a_column, const REAL *b, int64_t panel,
                                                         REAL *c, int64_t c_row, product_target target,
                                                         REAL factor, const REAL *factors) {
  for (int64_t x = 0; x < columns; x += NR, b += panel) {
    for (int64_t r = 0; r < rows; r++) {
      T(vec) sum[NV] = {0};
      for (int64_t p = 0; p < depth; p++) {
        if (hidden[r * a_row + p * a_column]) continue;
        REAL a_rp = a[r * a_row + p * a_column];
        for (int v = 0; v < NV; v++) sum[v] += a_rp * *(const T(vec) *)(b + p * NR + v * LANES);
      }
      for (int v = 0; v < NV; v++) {
        T(vec) *c_r = (T(vec) *)(c + r * c_row + x + v * LANES);
        *c_r = target == STORE ? factor * sum[v] : target == ADD ? *c_r + sum[v] : factors[r] * *c_r + sum[v];
      }
    }
  }
}

/* Either of the two; hidden NULL: everything is seen. */
INLINE void T(product_where_seen)(int64_t rows, int64_t columns, int64_t depth, const REAL *a,
                                  const INT *hidden, int64_t a_row, int64_t a_column, const REAL *b,
                                  int64_t panel, REAL *c, int64_t c_row, product_target target, REAL factor,
                                  const REAL *factors) {
  if (hidden) T(product_of_seen)
  (rows, columns, depth, a, hidden, a_row, a_column, b, panel, c, c_row, target, factor, factors);
  else T(product)(rows, columns, depth, a, a_row, a_column, b, panel, c, c_row, target, factor, factors);
}
