/*
 * Template: the one matrix product that every pass is made of.
 *
 * Parameters: REAL, T(name), LANES, MR, NV, NR, STRIP, BLOCK (see kernels.c); T(vec) of vector_template.h.
 *
 *     c[rows, columns]  =  factor * a[rows, depth] . b[depth, columns]           STORE
 *     c[rows, columns] +=           a[rows, depth] . b[depth, columns]           ADD
 *     c[r, columns]     =  factors[r] * c[r, columns] + a[r, depth] . b[...]     RESCALE
 *
 * Element (r, p) of a lies at a[r * a_row + p * a_column] and is broadcast. b lies in panels of NR columns:
 * element (p, x) at b[(x / NR) * panel + p * NR + x % NR]. Rows are rounded up to MR and columns to NR: a, b
 * and c must be that large. A tile of c, MR rows of NV vectors, stays in registers for the whole depth.
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
