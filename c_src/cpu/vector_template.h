/*
 * Template: vectors of REAL, and the functions that attention needs of them.
 *
 * Parameters: REAL, T(name), INT (the integer as wide as REAL), VECTOR_BYTES, IS_F32, IS_COMPLEX; see
 * kernels.c.
 */

#if !IS_COMPLEX

typedef REAL T(vec) __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef INT T(mask) __attribute__((vector_size(VECTOR_BYTES), may_alias));

INLINE T(vec) T(splat)(REAL x) { return x - (T(vec)){0}; }

INLINE T(vec) T(select)(T(mask) mask, T(vec) yes, T(vec) no) {
  return (T(vec))((mask & (T(mask))yes) | (~mask & (T(mask))no));
}

/* Where one of the two is a NaN, the result is b. */
#if IS_F32 && VECTOR_BYTES == 64
INLINE T(vec) T(max)(T(vec) a, T(vec) b) { return (T(vec))_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE T(vec) T(max)(T(vec) a, T(vec) b) { return T(select)(a > b, a, b); }
#endif
INLINE T(vec) T(min)(T(vec) a, T(vec) b) { return T(select)(a < b, a, b); }

#if IS_F32
/* 2^52 and 1023 play the same part for double. Adding ROUNDER leaves the nearest integer, plus the exponent's
 * bias, in the low bits; those bits, shifted to the exponent's place, are 2^n. */
#define ROUNDER    (0x1.8p23f + 127)
#define SHIFT      23
#define LN2        0x1.62e43p-1f
#define LN2_HIGH   0x1.62e4p-1f /* few enough bits that n * LN2_HIGH is exact */
#define LN2_LOW    0x1.7f7d1cp-20f
#define EXP_LOWEST -87.336f /* below it exp would be subnormal */
#else
#define ROUNDER    (0x1.8p52 + 1023)
#define SHIFT      52
#define LN2_HIGH   0x1.62e42fefp-1
#define LN2_LOW    0x1.473de6af278edp-34
#define EXP_LOWEST -708.39
#endif

/* (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, for exp(r) - 1: float by the polynomial of least relative error
 * (3e-9), double by Taylor's. */
INLINE T(vec) T(exp_beyond)(T(vec) r) {
#if IS_F32
  static const REAL terms[] = {0x1.6a2434p-10f, 0x1.1239e2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f};
#else
  static const REAL terms[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                               1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                               1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5};
#endif
  T(vec) sum = T(splat)(terms[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof terms / sizeof *terms; i++) sum = sum * r + terms[i];
  return sum;
}

INLINE T(vec) T(expm1_reduced)(T(vec) r) { return T(exp_beyond)(r) * (r * r) + r; }

/* x - n * ln(2) for an integer n. */
INLINE T(vec) T(reduce)(T(vec) x, T(vec) n) {
#if IS_F32 && defined(__FMA__)
  return x - n * LN2; /* rounded once, and off by n * 2e-9: rounding a score does twenty times that to it */
#else
  return (x - n * LN2_HIGH) - n * LN2_LOW;
#endif
}

/* x = n * ln(2) + r; returns 2^n. */
INLINE T(vec) T(split_exponent)(T(vec) x, T(vec) * r) {
  T(vec) rounded = x * (REAL)1.44269504088896340736 + ROUNDER;
  T(vec) n = rounded - ROUNDER;
  *r = T(reduce)(x, n);
  return (T(vec))((T(mask))rounded << SHIFT);
}

/* exp(x) to about one unit in the last place, float's of -30 to two and of -60 to four, 0 where it would be
 * subnormal; x must not exceed EXP_HIGHEST, at which it is infinite. */
INLINE T(vec) T(exp)(T(vec) x) {
#if IS_F32 && VECTOR_BYTES == 64
  const __m512 n = _mm512_roundscale_ps((__m512)x * 1.44269504088896340736f, _MM_FROUND_TO_NEAREST_INT);
  const T(vec) r = T(reduce)(x, (T(vec))n);
  const __m512 y = (__m512)((T(exp_beyond)(r) * r + 1) * r + 1);
  return (T(vec))_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(EXP_LOWEST), _CMP_NLT_UQ),
                                        y, n);
#else
  T(vec) r, power = T(split_exponent)(x, &r);
  T(vec) y = T(expm1_reduced)(r) * power + power;
  return (T(vec))((T(mask))y & ~(x < EXP_LOWEST));
#endif
}

/* tanh(|x|) = e / (e + 2) with e = exp(2|x|) - 1, which keeps its accuracy where x is small. */
INLINE T(vec) T(tanh)(T(vec) x) {
  T(mask) sign = (T(mask))x & (T(mask))T(splat)((REAL)-0.0);
  T(vec) twice = 2 * (T(vec))((T(mask))x ^ sign);
  T(vec) r, clipped = T(min)(T(splat)(80), twice);
  T(vec) power = T(split_exponent)(clipped, &r);
  T(vec) e = T(expm1_reduced)(r) * power + (power - 1);
  return (T(vec))((T(mask))(e / (e + 2)) | sign);
}

/* Vectors that begin anywhere. */
INLINE T(vec) T(load)(const REAL *from) {
  T(vec) x;
  memcpy(&x, from, sizeof x);
  return x;
}
INLINE void T(store)(REAL *to, T(vec) x) { memcpy(to, &x, sizeof x); }

/* x where begin <= lane's index < end holds lane by lane, -inf elsewhere; a lane's index is INT. */
INLINE T(vec) T(hide_outside)(T(vec) x, T(mask) index, T(mask) begin, T(mask) end) {
  return T(select)((index >= begin) & (index < end), x, T(splat)(-INFINITY));
}

/* m [LANES][LANES] becomes its transpose: its rows are shuffled like cards, as often as 2 divides LANES. */
INLINE void T(transpose)(T(vec) * m) {
#ifdef __clang__
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < i; j++) {
      REAL x = m[i][j];
      m[i][j] = m[j][i], m[j][i] = x;
    }
#else
  T(mask) low;
  for (int v = 0; v < LANES; v++) low[v] = v / 2 + v % 2 * LANES;
#pragma GCC unroll 4
  for (int n = 1; n < LANES; n *= 2) {
    T(vec) old[LANES];
    memcpy(old, m, sizeof old);
#pragma GCC unroll 8
    for (int k = 0; k < LANES / 2; k++) {
      m[2 * k] = __builtin_shuffle(old[k], old[k + LANES / 2], low);
      m[2 * k + 1] = __builtin_shuffle(old[k], old[k + LANES / 2], low + LANES / 2);
    }
  }
#endif
}

/* Neighbours' sums of count vectors are half as many, or still one. */
INLINE void T(add_neighbours)(T(vec) * x, int count) {
  T(mask) even;
  for (int v = 0; v < LANES; v++) even[v] = 2 * v;
#pragma GCC unroll 8
  for (int i = 0; i < count; i += 2) {
    const T(vec) a = x[i], b = x[i + 1 < count ? i + 1 : i];
#ifdef __clang__
    for (int v = 0; v < LANES / 2; v++)
      x[i / 2][v] = a[2 * v] + a[2 * v + 1], x[i / 2][v + LANES / 2] = b[2 * v] + b[2 * v + 1];
#else
    x[i / 2] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
  }
}

/* Lane v is the sum of all lanes of x[v], of count vectors, a power of two up to LANES. */
INLINE T(vec) T(add_lanes)(T(vec) * x, int count) {
  _Static_assert(LANES <= 16, "four times two");
  if (LANES > 1) T(add_neighbours)(x, count);
  if (LANES > 2) T(add_neighbours)(x, (count + 1) / 2);
  if (LANES > 4) T(add_neighbours)(x, (count + 3) / 4);
  if (LANES > 8) T(add_neighbours)(x, (count + 7) / 8);
  return x[0];
}

/* x, or -inf where hider is that. */
INLINE T(vec) T(hide_where)(T(vec) x, T(vec) hider) {
  return T(select)(hider == T(splat)(-INFINITY), hider, x);
}

INLINE bool T(any_lane)(T(mask) x) {
  INT any = 0;
  for (int v = 0; v < LANES; v++) any |= x[v];
  return any != 0;
}

/* 0, 1, 2, ... */
INLINE T(mask) T(lanes)(void) {
  T(mask) lanes;
  for (int v = 0; v < LANES; v++) lanes[v] = v;
  return lanes;
}

INLINE T(vec) T(from_integers)(T(mask) x) { return __builtin_convertvector(x, T(vec)); }
INLINE T(vec) T(absolute)(T(vec) x) { return T(max)(x, -x); }

static double T(sum_of_lanes)(T(vec) x) {
  double sum = 0;
  for (int v = 0; v < LANES; v++) sum += (double)x[v];
  return sum;
}

/* The sum of products: by lanes first, which need not wait for each other. */
static REAL T(dot)(const REAL *a, const REAL *b, int64_t count) {
  T(vec) sums = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += T(load)(a + i) * T(load)(b + i);
  REAL sum = (REAL)T(sum_of_lanes)(sums);
  for (; i < count; i++) sum += a[i] * b[i];
  return sum;
}

#undef ROUNDER
#undef SHIFT
#undef LN2
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_LOWEST

#else /* complex: one lane; order and masks by the real part, functions from the C library */

typedef REAL T(vec);
typedef INT T(mask);

INLINE T(vec) T(splat)(REAL x) { return x; }
INLINE T(vec) T(max)(T(vec) a, T(vec) b) { return creal(a) > creal(b) ? creal(a) : creal(b); }
INLINE T(vec) T(exp)(T(vec) x) { return cexp(x); }
INLINE T(vec) T(tanh)(T(vec) x) { return ctanh(x); }
INLINE void T(transpose)(T(vec) * m) { (void)m; }
INLINE T(vec) T(load)(const REAL *from) { return *from; }
INLINE void T(store)(REAL *to, T(vec) x) { *to = x; }
INLINE T(mask) T(lanes)(void) { return 0; }
INLINE bool T(any_lane)(T(mask) x) { return x != 0; }
INLINE T(vec) T(select)(T(mask) mask, T(vec) yes, T(vec) no) { return mask ? yes : no; }
INLINE T(vec) T(hide_where)(T(vec) x, T(vec) hider) { return creal(hider) == -INFINITY ? -INFINITY : x; }
INLINE T(vec) T(from_integers)(T(mask) x) { return (double)x; }
INLINE T(vec) T(absolute)(T(vec) x) { return T(max)(x, -x); }
INLINE T(vec) T(hide_outside)(T(vec) x, T(mask) index, T(mask) begin, T(mask) end) {
  return index >= begin && index < end ? x : -INFINITY;
}

#endif

INLINE REAL T(first)(T(vec) x) {
  REAL lane;
  memcpy(&lane, &x, sizeof lane);
  return lane;
}

/* ---- what products multiply ------------------------------------------------------------------------ */

/* An operand is what a product takes at a time along the axis that it sums over: one REAL, or with PAIRS two
 * numbers of bf16, the first in the lower half. Where their number is odd, the last operand's second is 0. */
#if PAIRS
typedef uint32_t T(operand) __attribute__((may_alias));
#else
typedef REAL T(operand);
#endif

enum { T(PER_OPERAND) = PAIRS ? 2 : 1 };

/* Operands of so many numbers. */
INLINE int64_t T(operands)(int64_t numbers) { return fa_divide_up(numbers, T(PER_OPERAND)); }

#if PAIRS

/* c + the products of a, the same for all lanes, with b: those of the second numbers, then of the first, each
 * as if by a fused multiply-add in which subnormal numbers, on either side, are 0. */
INLINE T(vec) T(multiply_add)(T(vec) c, T(operand) a, T(vec) b) {
  return (T(vec))_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}

/* Each lane's operand, rounded to nearest, ties to even. */
INLINE T(vec) T(operand_of)(const T(vec) numbers[T(PER_OPERAND)]) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
  const __m512i by_lane = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                           22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (T(vec))_mm512_permutexvar_epi16(by_lane, both);
}

/* The first numbers of pairs, and the second ones. */
INLINE T(vec) T(first_of)(T(vec) pairs) { return (T(vec))((T(mask))pairs << 16); }
INLINE T(vec) T(second_of)(T(vec) pairs) { return (T(vec))((T(mask))pairs & -0x10000); }

#else

INLINE T(vec) T(multiply_add)(T(vec) c, T(operand) a, T(vec) b) { return c + a * b; }
INLINE T(vec) T(operand_of)(const T(vec) numbers[T(PER_OPERAND)]) { return numbers[0]; }

#endif
