/*
 * Template: the one matrix product that every pass is made of.
 *
 * Parameters: REAL, T(name), INT, LANES, MR, NV, NR, STRIP, BLOCK (see kernels.c); T(vec) of vector_template.h.
 *
 *     c[rows, columns]  =  factor * a[rows, depth] . b[depth, columns]           STORE
 *     c[rows, columns] +=           a[rows, depth] . b[depth, columns]           ADD
 *     c[r, columns]     =  factors[r] * c[r, columns] + a[r, depth] . b[...]     RESCALE
 *
 * depth counts operands (vector_template.h). Operand (r, p) of a lies at a[r * a_row + p * a_column] and is
 * broadcast. b lies in panels of NR columns: operand (p, x) at b[(x / NR) * panel + p * NR + x % NR]. Rows are
 * rounded up to MR and columns to NR: a, b and c must be that large. A tile of c, MR rows of NV vectors, stays
 * in registers for the whole depth.
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

INLINE void T(product)(int64_t rows, int64_t columns, int64_t depth, const T(operand) * a, int64_t a_row,
                       int64_t a_column, const T(operand) * b, int64_t panel, REAL *c, int64_t c_row,
                       product_target target, REAL factor, const REAL *factors) {
  for (int64_t x = 0; x < columns; x += NR, b += panel) {
    for (int64_t r = 0; r < rows; r += MR) {
      const T(operand) *a_tile = a + r * a_row;
      T(vec) sum[MR][NV] = {0};
      for (int64_t p = 0; p < depth; p++) {
        T(vec) b_p[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) b_p[v] = *(const T(vec) *)(b + p * NR + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
          T(operand) a_ip = a_tile[i * a_row + p * a_column];
#pragma GCC unroll 16
          for (int v = 0; v < NV; v++) sum[i][v] = T(multiply_add)(sum[i][v], a_ip, b_p[v]);
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

/* Whether none of these elements, aligned to a vector, is a NaN or an infinity. */
static bool T(all_normal)(const REAL *x, int64_t count) {
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
      for (int64_t p = 0; p < depth; p++) {
        const T(operand) a_rp = a[r * a_row + p * a_column];
        for (int n = T(PER_OPERAND) - 1; n >= 0; n--) {
          if (hidden && hidden[r * hidden_row + (p * T(PER_OPERAND) + n) * a_column]) continue;
          for (int v = 0; v < NV; v++) {
            const T(vec) b_p = *(const T(vec) *)(b + p * NR + v * LANES);
#if PAIRS
            sum[v] += fa_bf16_to_f32((uint16_t)(a_rp >> 16 * n)) * (n ? T(second_of)(b_p) : T(first_of)(b_p));
#else
            sum[v] += a_rp * b_p;
#endif
          }
        }
      }
      for (int v = 0; v < NV; v++) {
        T(vec) *c_r = (T(vec) *)(c + r * c_row + x + v * LANES);
        *c_r = target == STORE ? factor * sum[v] : target == ADD ? *c_r + sum[v] : factors[r] * *c_r + sum[v];
      }
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
