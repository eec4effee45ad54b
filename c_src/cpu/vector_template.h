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
INLINE T(vec) T(max)(T(vec) a, T(vec) b) { return T(select)(a > b, a, b); }
INLINE T(vec) T(min)(T(vec) a, T(vec) b) { return T(select)(a < b, a, b); }

#if IS_F32
/* 2^52 and 1023 play the same part for double. Adding ROUNDER leaves the nearest integer, plus the exponent's
 * bias, in the low bits; those bits, shifted to the exponent's place, are 2^n. */
#define ROUNDER    (0x1.8p23f + 127)
#define SHIFT      23
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

/* exp(r) - 1 on |r| <= ln(2)/2: float by the polynomial of least relative error (3e-9), double by Taylor's. */
INLINE T(vec) T(expm1_reduced)(T(vec) r) {
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
  return sum * (r * r) + r;
}

/* x = n * ln(2) + r; returns 2^n. */
INLINE T(vec) T(split_exponent)(T(vec) x, T(vec) * r) {
  T(vec) rounded = x * (REAL)1.44269504088896340736 + ROUNDER;
  T(vec) n = rounded - ROUNDER;
  *r = (x - n * LN2_HIGH) - n * LN2_LOW;
  return (T(vec))((T(mask))rounded << SHIFT);
}

/* exp(x) to about one unit in the last place, 0 where it would be subnormal; x must not exceed EXP_HIGHEST, at
 * which it is infinite. */
INLINE T(vec) T(exp)(T(vec) x) {
  T(vec) r, power = T(split_exponent)(x, &r);
  T(vec) y = T(expm1_reduced)(r) * power + power;
  return (T(vec))((T(mask))y & ~(x < EXP_LOWEST));
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

/* x, or -inf where hider is that. */
INLINE T(vec) T(hide_where)(T(vec) x, T(vec) hider) {
  return T(select)(hider == T(splat)(-INFINITY), hider, x);
}

/* 0, 1, 2, ... */
INLINE T(mask) T(lanes)(void) {
  T(mask) lanes;
  for (int v = 0; v < LANES; v++) lanes[v] = v;
  return lanes;
}

INLINE T(vec) T(from_integers)(T(mask) x) { return __builtin_convertvector(x, T(vec)); }
INLINE T(vec) T(absolute)(T(vec) x) { return T(max)(x, -x); }

#undef ROUNDER
#undef SHIFT
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
INLINE T(mask) T(lanes)(void) { return 0; }
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
