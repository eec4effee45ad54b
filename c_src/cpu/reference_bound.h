/*
 * FA_PASS_BOUND, a part of reference.c: how far rounding may take each element of a result from its exact
 * value, whichever device computed it. A running error analysis (Higham 2002, section 3.3): what every
 * operation can add is carried through to the result, to first order; in e(dx) alone to the second, as a row
 * that sees one column has dp = delta, and slope is 0 where the softcap is reached. It is carried in two ways,
 * and the lesser is the bound:
 *
 *   - the sum of all sizes, which no order and no luck exceeds;
 *   - the sum of their squares. A rounding lies anywhere in +-size, so that its variance is size^2 / 3 at most;
 *     the sum of independent ones is beyond 6 sqrt(sum / 3) once in 500 million times.
 *
 * u is the unit roundoff of the arithmetic (f32's for 16-bit types), w that of the tensors' type. An error r(x)
 * is one rounding of size x, `+` adds errors, a factor scales them. dot(x, y) is the error of a dot product,
 * sum(t) of a sum of terms t, in any order. With p, s, dp, delta and ds as in flash_attention.h, m the row's
 * largest score, and slope the derivative of a score by the product that it is made of:
 *
 *     e(s)     = slope scale dot(q, k) + r(8 u (|product| + |capped| + softcap))
 *                + r(8 u (|added| + |s|))                        of what is added to capped, if anything is
 *     x(s, m)  = e(s) + r(2 u (|s| + |m|) + 4 u)                      of exp(s - m), relative to it
 *     e(lse)   = Sum_j p x(s, m) + sum(p) + r(2 u (|lse| + |m|) + 8 u)
 *     e(o)     = Sum_j p (x(s, m) (v - o) + r(w v)) + own(o)
 *     own(o)   = sum(p v) + sum(p) o + r(w o)
 *     e(delta) = Sum_j p (x(s, m) (dp - dot) + r(w dp)) + Sum_c own(o) dout + dot(o, dout)
 *                + r(u delta)                                    where there is a dlse
 *     e(dp)    = dot(dout, v) + r(u (|dp| + |delta|))
 *     e(ds)    = p ((dp - delta) x(s, lse) + e(dp))
 *     e(slope) = 2 / softcap (slope scale dot(q, k) + r(8 u (slope |product| + |capped| + softcap))) + r(4 u)
 *     e(dx)    = slope e(ds) + (p (dp - delta) + e(ds) + p e(delta)) e(slope)
 *                + r((w + 4 u) dx)                               of dx = slope ds
 *     e(dq)    = scale (Sum_j e(dx) k + e(lse) Sum_j (dx k) + e(delta) Sum_j (p slope k) + sum(dx k))
 *                + r((w + 4 u) dq)
 *     e(dk)    = scale (Sum_i (e(dx) + e(lse) dx + e(delta) p slope) q + sum(dx q)) + r((w + 4 u) dk)
 *     e(dv)    = Sum_i (x(s, lse) + e(lse) + r(w)) p dout + sum(p dout) + r((w + 4 u) dv)
 *     e(dsink) = Sum_bi p_sink ((x(sink, lse) + e(lse)) delta + e(delta)) + sum(p_sink delta) + r(2 w dsink)
 *     e(dbias) = Sum (e(ds) + e(lse) ds + e(delta) p + r(4 u ds)) + sum(ds) + r(2 w dbias)
 *     e(dslope) = Sum_i (Sum_j distance (e(ds) + r(4 u ds)) + e(lse) Sum_j (distance ds)
 *                + e(delta) Sum_j (distance p)) + sum(distance ds) + r(2 w dslope), and so on for every input
 * of scores that all columns share
 *
 * Operands of products err, too, where a device scales f32 by the largest number near it and takes it apart
 * into two parts of f16, or rounds it to one: a number x of q, k, v or dout by a(x) = t times the largest one
 * of its head, t = 2^-39, and at FA_PRECISION_DEFAULT, where w is 2^-11, by 2^-11 x beside that. So dot(q, k)
 * has r(a(q) |k| + a(k) |q|) for each product, dot(dout, v) likewise, own(o) r(p a(v)) for each column, e(dq)
 * r(dx a(k)), e(dk) r(dx a(q)) and e(dv) r(p a(dout)). Nothing else allows for that where a row sees one
 * column, as then o is v.
 *
 * What q and dout err by is the same in all columns, whose p have one sign. So e(lse) has
 * r(scale a(q) Sum_j (p slope k)) for each c, and e(delta), beside which stand the dp, r(a(dout) o). dq has
 * scale^2 a(q[c]) Sum_j (dx slope k[c] k) from each c: of the part of dx that is alike in all columns,
 * p Sum_j dx / Sum_j p, that is scale^2 Sum_j dx / Sum_j p a(q[c]) sqrt(S[c] S) at most, S = Sum_j (p slope
 * k^2) (Cauchy and Schwarz). Without a dlse and sinks dx has no sum.
 *
 * With dropout, v stands for keep v and dp for keep dp, and each of them, and o, has one more rounding, r(2 u).
 *
 * An error that is the same for all of a row multiplies a sum that has signs: that of lse moves every p alike,
 * that of delta every dp, and what moves all p leaves o where it is. r(w v), r(w dp) and r(w ds) are there for
 * kernels that round p and ds to 16 bits before they multiply. `least` is added wherever a number may fall
 * below the smallest one that is kept whole. For f32 that is 2^-39: tensor cores have p as 2^14 p in two parts
 * of f16, whose smallest number is 2^-24, and ds likewise beside the largest one near it.
 */

/* f64 is held against f64, which errs as much: its units are twice the roundoff. What an operand of products
 * errs by: operand times the largest of its head, and rounded times itself. */
struct unit {
  double arithmetic, stored, least, operand, rounded;
};
static const struct unit units[FA_NUM_DTYPES] = {
    [FA_DTYPE_F32] = {0x1p-24, 0x1p-24, 0x1p-39, 0x1p-39, 0},
    [FA_DTYPE_F64] = {0x1p-52, 0x1p-52, 0x1p-1022, 0, 0},
    [FA_DTYPE_BF16] = {0x1p-24, 0x1p-8, 0x1p-126, 0, 0},
    [FA_DTYPE_F16] = {0x1p-24, 0x1p-11, 0x1p-25, 0, 0},
};
static struct unit unit_of(const fa_problem *p) {
  struct unit unit = units[p->dtype];
  if (p->dtype == FA_DTYPE_F32 && p->precision == FA_PRECISION_DEFAULT) unit.stored = unit.rounded = 0x1p-11;
  return unit;
}

/* ---- errors ------------------------------------------------------------------------------------------ */

typedef struct error {
  double most, square;
} error;

static error rounding(double size) { return (error){fabs(size), size * size}; }

static error scaled(error e, double factor) {
  return (error){e.most * fabs(factor), e.square * factor * factor};
}

static void add_error(error *to, error e) { to->most += e.most, to->square += e.square; }

/* Of a product, what is of second order. */
static error product_of_errors(error a, error b) { return (error){a.most * b.most, a.square * b.square / 3}; }

/* Squares of the smallest numbers are lost: they would make the bound of such a result 0. */
static double bound_of(error e) { return e.square < 0x1p-960 ? e.most : fmin(e.most, 6 * sqrt(e.square / 3)); }

/* sum(t) for each term t of a sum of n products, beside one for the sum itself, which is what partial sums are
 * like. A term meets n additions at most, less than half as many factors that rescale an online sum, and four
 * of quotients and scales; a product whose operands are split in two parts of f16 each errs by three times 4 u.
 */
static error error_of_term(int64_t n, double u) {
  const double num_roundings = 1.5 * (double)n + 4;
  return (error){(num_roundings + 12) * u, (num_roundings + 3 * 4 * 4) * u * u};
}

static error error_of_sum(int64_t n, double u) { return (error){0, error_of_term(n, u).square}; }

/* A dot product and its error, dot(x, y). */
typedef struct dot_product {
  double sum;
  error e;
} dot_product;

/* a(x); scaled: that of 0. */
static double error_of_operand(struct unit unit, double scaled, double x) {
  return scaled + unit.rounded * fabs(x);
}

/* of_x, of_y: a(0). */
static dot_product bound_dot(const double *x, const double *y, int64_t length, struct unit unit, double of_x,
                             double of_y) {
  double sum = 0, size = 0, square = 0;
  error e = {0, 0};
  for (int64_t c = 0; c < length; c++) {
    const double term = x[c] * y[c];
    sum += term, size += fabs(term), square += term * term;
    if (of_x > 0 || of_y > 0)
      add_error(&e, rounding(error_of_operand(unit, of_x, x[c]) * fabs(y[c]) +
                             error_of_operand(unit, of_y, y[c]) * fabs(x[c])));
  }
  const error term = error_of_term(length, unit.arithmetic);
  add_error(&e, (error){term.most * size, term.square * (square + sum * sum)});
  return (dot_product){sum, e};
}

/* x(s, origin) where s errs by e; exp overflows where it says nothing, and no p is over 1. */
static error error_of_exponential(double p, double s, error e, double origin, double u) {
  if (p == 0) return (error){0, 0};
  add_error(&e, rounding(2 * u * (fabs(s) + fabs(origin)) + 4 * u));
  return (error){fmin(expm1(e.most), 1 / p), fmin(e.square, 1 / (p * p))};
}

/* ---- workspace --------------------------------------------------------------------------------------- */

typedef struct bound_scratch {
  scratch_f64 exact;
  double *slope, *p, *keep;         /* [seqlen_k] */
  double (*by)[NUM_SCORE_INPUTS];   /* [seqlen_k]: of scores */
  double *sum_p_slope_k, *squares;  /* [head_dim]; squares: Sum_j p slope k^2 */
  error *o, *own_o, *dq;            /* [head_dim] */
  dot_product *dp;                  /* [seqlen_k]: before it is multiplied with keep */
  error *s, *e_slope, *dk, *dv;     /* [seqlen_k], [seqlen_k, head_dim] */
  error *sums[FA_NUM_TENSORS];      /* as exact.sums */
  double of_q, of_k, of_v, of_dout; /* a(0) of the head's */
} bound_scratch;

static bound_scratch lay_out_bound(fa_arena *arena, const fa_problem *p) {
  const int64_t d = p->head_dim;
  bound_scratch x = {.exact = lay_out_f64(arena, p)};
  x.slope = fa_take(arena, p->seqlen_k, sizeof(double));
  x.by = fa_take(arena, p->seqlen_k, sizeof *x.by);
  x.p = fa_take(arena, p->seqlen_k, sizeof(double));
  x.keep = fa_take(arena, p->seqlen_k, sizeof(double));
  x.sum_p_slope_k = fa_take(arena, d, sizeof(double));
  x.squares = fa_take(arena, d, sizeof(double));
  x.o = fa_take(arena, d, sizeof(error));
  x.own_o = fa_take(arena, d, sizeof(error));
  x.dq = fa_take(arena, d, sizeof(error));
  x.dp = fa_take(arena, p->seqlen_k, sizeof *x.dp);
  x.s = fa_take(arena, p->seqlen_k, sizeof(error));
  x.e_slope = fa_take(arena, p->seqlen_k, sizeof(error));
  x.dk = fa_take(arena, p->seqlen_k * d, sizeof(error));
  x.dv = fa_take(arena, p->seqlen_k * d, sizeof(error));
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    x.sums[id] = fa_take(arena, fa_is_sum(p, id) ? fa_num_elements(p, id) : 0, sizeof(error));
  return x;
}

static size_t workspace_bytes_bound(const fa_problem *p) {
  fa_arena sizes = {0};
  lay_out_bound(&sizes, p);
  return sizes.used;
}

static void clear_errors(error *e, int64_t count) {
  for (int64_t i = 0; i < count; i++) e[i] = (error){0, 0};
}

/* ---- a row ------------------------------------------------------------------------------------------- */

typedef struct bound_row {
  const fa_problem *problem; /* in f64 */
  struct unit unit;
  place_f64 at;
  int64_t num_columns; /* that it sees */
  double maximum, lse, dlse, sum_dx;
  error e_lse;
  double sum_ds[NUM_SCORE_INPUTS], sum_p[NUM_SCORE_INPUTS]; /* times what scores change by, over columns */
} bound_row;

static bool is_seen(const bound_scratch *x, int64_t column) { return x->exact.s[column] != -INFINITY; }

/* e(slope), of slope = 1 - (capped / softcap)^2: what the product errs by, e_product in units of capped, and
 * its own roundings reach capped by way of the slope. */
static error error_of_slope(error e_product, const struct score_f64 *score, double softcap, double u) {
  error e = e_product;
  add_error(&e, rounding(8 * u * (score->slope * fabs(score->product) + fabs(score->capped) + softcap)));
  e = scaled(e, 2 / softcap);
  add_error(&e, rounding(4 * u));
  return e;
}

/* The scores, their slopes and errors, and the maximum. */
static void bound_scores(bound_scratch *x, bound_row *row) {
  const fa_problem *p = row->problem;
  const double u = row->unit.arithmetic;
  row->maximum = -INFINITY;
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++)
    row->maximum = fmax(row->maximum, sink_f64(p, &row->at, t));
  row->num_columns = 0;
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++) {
    const double *k = x->exact.k + j * p->head_dim;
    const struct score_f64 score = score_of_f64(p, &row->at, j, x->exact.q, k);
    x->exact.s[j] = score.s;
    if (!is_seen(x, j)) continue;
    x->slope[j] = score.slope;
    memcpy(x->by[j], score.by, sizeof score.by);
    x->keep[j] = keep_f64(p, &row->at, j);
    x->s[j] =
        scaled(bound_dot(x->exact.q, k, p->head_dim, row->unit, x->of_q, x->of_k).e, x->slope[j] * p->scale);
    if (p->softcap != 0) x->e_slope[j] = error_of_slope(x->s[j], &score, p->softcap, u);
    add_error(&x->s[j], rounding(8 * u * (fabs(score.product) + fabs(score.capped) + p->softcap)));
    if (score.added != 0) add_error(&x->s[j], rounding(8 * u * (score.added + fabs(score.s))));
    row->maximum = fmax(row->maximum, score.s);
    row->num_columns++;
  }
}

/* p, o, lse and their errors, of a row that sees something. */
static void bound_forward(bound_scratch *x, bound_row *row) {
  const fa_problem *p = row->problem;
  const struct unit unit = row->unit;
  const int64_t d = p->head_dim;
  const error term = error_of_term(row->num_columns + fa_problem_num_sinks(p), unit.arithmetic);
  double sum = 0;
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++) sum += exp(sink_f64(p, &row->at, t) - row->maximum);
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++)
    if (is_seen(x, j)) sum += exp(x->exact.s[j] - row->maximum);
  row->lse = row->maximum + log(sum);
  row->e_lse = rounding(unit.arithmetic * (2 * (fabs(row->lse) + fabs(row->maximum)) + 8));
  add_error(&row->e_lse, term);
  error e_sinks = {0, 0};
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++) {
    const double s = sink_f64(p, &row->at, t), weight = exp(s - row->lse);
    const error e = error_of_exponential(weight, s, (error){0, 0}, row->maximum, unit.arithmetic);
    add_error(&e_sinks, scaled(e, weight));
  }
  add_error(&row->e_lse, e_sinks);
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++) {
    x->p[j] = is_seen(x, j) ? exp(x->exact.s[j] - row->lse) : 0;
    if (is_seen(x, j)) add_scaled_f64(x->exact.o, x->p[j] * x->keep[j], x->exact.v + j * d, d);
  }
  for (int64_t c = 0; c < d; c++) {
    x->o[c] = scaled(e_sinks, x->exact.o[c]);
    x->own_o[c] = rounding(unit.stored * fabs(x->exact.o[c]) + unit.least);
    add_error(&x->own_o[c], scaled(term, x->exact.o[c])); /* the sum that it is divided by */
    add_error(&x->own_o[c], scaled(error_of_sum(row->num_columns, unit.arithmetic), x->exact.o[c]));
    if (p->dropout != 0) add_error(&x->own_o[c], rounding(2 * unit.arithmetic * x->exact.o[c]));
  }
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++) {
    if (!is_seen(x, j)) continue;
    const double *v = x->exact.v + j * d, weight = x->p[j], keep = x->keep[j];
    add_scaled_f64(x->sum_p_slope_k, weight * x->slope[j], x->exact.k + j * d, d);
    error e_p = error_of_exponential(weight, x->exact.s[j], x->s[j], row->maximum, unit.arithmetic);
    e_p = scaled(e_p, weight);
    add_error(&row->e_lse, e_p);
    const error stored = rounding(unit.stored * weight + unit.least);
    for (int64_t c = 0; c < d; c++) {
      add_error(&x->o[c], scaled(e_p, keep * v[c] - x->exact.o[c]));
      add_error(&x->o[c], scaled(stored, keep * v[c]));
      add_error(&x->own_o[c], scaled(term, keep * weight * v[c]));
    }
    for (int64_t c = 0; c < d && unit.operand > 0; c++)
      add_error(&x->own_o[c], rounding(keep * weight * error_of_operand(unit, x->of_v, v[c])));
  }
  for (int64_t c = 0; c < d; c++) {
    add_error(&x->o[c], x->own_o[c]);
    const double e_q = error_of_operand(unit, x->of_q, x->exact.q[c]);
    add_error(&row->e_lse, rounding(p->scale * e_q * x->sum_p_slope_k[c]));
  }
}

/* dot: of o and dout. own_o: the part of o's error that has nothing to do with p. */
static error error_of_delta(const bound_scratch *x, const bound_row *row, dot_product dot, double delta) {
  const int64_t d = row->problem->head_dim;
  const double u = row->unit.arithmetic;
  error e = dot.e;
  for (int64_t c = 0; c < d; c++) {
    add_error(&e, scaled(x->own_o[c], x->exact.dout[c]));
    add_error(&e, rounding(error_of_operand(row->unit, x->of_dout, x->exact.dout[c]) * x->exact.o[c]));
  }
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++) {
    if (!is_seen(x, j)) continue;
    const double dp = x->keep[j] * x->dp[j].sum, weight = x->p[j];
    const error e_p = error_of_exponential(weight, x->exact.s[j], x->s[j], row->maximum, u);
    add_error(&e, scaled(e_p, weight * (dp - dot.sum)));
    add_error(&e, rounding((row->unit.stored * weight + row->unit.least) * dp));
  }
  if (row->problem->dlse_batch > 0) add_error(&e, rounding(u * delta));
  return e;
}

/* Adds a term that errs by e to a gradient without head_dim, of which an element has so many terms. */
static void add_to_sum(bound_scratch *x, const bound_row *row, int id, int64_t column, int64_t number,
                       double term, error e, int64_t num_terms) {
  if (!x->exact.sums[id]) return;
  const int64_t i = element_of_f64(row->problem, id, &row->at, column, number);
  add_error(&e, scaled(error_of_term(num_terms, row->unit.arithmetic), term));
  x->exact.sums[id][i] += term;
  add_error(&x->sums[id][i], e);
}

/* How many scores share an element of a tensor. */
static int64_t num_sharing(const fa_problem *p, int id) {
  static const fa_axis axes[] = {FA_AXIS_BATCH, FA_AXIS_NUM_HEADS, FA_AXIS_SEQLEN_Q, FA_AXIS_SEQLEN_K};
  int64_t count = 1;
  for (int i = 0; i < 4; i++) count *= fa_varies_along(p, id, axes[i]) ? 1 : fa_axis_size(p, axes[i]);
  return count;
}

/* What the score's gradient in column j adds to the sums. What errs alike in all columns is added here for
 * those that have an element for each column, and by bound_row_sums for those that have one for all. */
static void bound_sums(bound_scratch *x, bound_row *row, int64_t j, double ds, error e_ds, error e_delta) {
  const fa_problem *p = row->problem;
  const double u = row->unit.arithmetic;
  add_error(&e_ds, rounding(4 * u * ds + row->unit.least * (1 + fabs(ds))));
  for (int n = 0; n < NUM_SCORE_INPUTS; n++) {
    if (!row->at.has_input[n]) continue;
    const int gradient = fa_tensor_gradient(score_inputs[n]);
    const double by = x->by[j][n];
    error e = e_ds;
    if (fa_varies_along(p, gradient, FA_AXIS_SEQLEN_K)) {
      add_error(&e, scaled(row->e_lse, ds));
      add_error(&e, scaled(e_delta, x->p[j]));
    }
    row->sum_ds[n] += ds * by, row->sum_p[n] += x->p[j] * by;
    add_to_sum(x, row, gradient, j, 0, ds * by, scaled(e, by), num_sharing(p, gradient));
  }
}

static void bound_row_sums(bound_scratch *x, const bound_row *row, error e_delta) {
  for (int n = 0; n < NUM_SCORE_INPUTS; n++) {
    if (!row->at.has_input[n]) continue;
    const int gradient = fa_tensor_gradient(score_inputs[n]);
    if (fa_varies_along(row->problem, gradient, FA_AXIS_SEQLEN_K)) continue;
    error e = scaled(row->e_lse, row->sum_ds[n]);
    add_error(&e, scaled(e_delta, row->sum_p[n]));
    add_to_sum(x, row, gradient, 0, 0, 0, e, 1);
  }
}

/* What column j adds to dq and the row to dk[j] and dv[j], without scale, and to their errors. */
static void bound_column(bound_scratch *x, bound_row *row, int64_t j, double delta, error e_delta) {
  const fa_problem *p = row->problem;
  const struct unit unit = row->unit;
  const int64_t d = p->head_dim,
                rows_per_column = row->at.sequence->seqlen_q * (p->num_heads / p->num_kv_heads);
  const double *k = x->exact.k + j * d, *q = x->exact.q, *dout = x->exact.dout;
  const double u = unit.arithmetic, weight = x->p[j], slope = x->slope[j];
  const double keep = x->keep[j], dp = keep * x->dp[j].sum, ds = weight * (dp - delta), dx = slope * ds;
  const error in_row = error_of_term(row->num_columns, u), in_column = error_of_term(rows_per_column, u);
  const error e_p = error_of_exponential(weight, x->exact.s[j], x->s[j], row->lse, u);

  error e_ds = scaled(e_p, ds);
  add_error(&e_ds, scaled(x->dp[j].e, weight * keep));
  if (p->dropout != 0) add_error(&e_ds, rounding(2 * u * weight * dp));
  add_error(&e_ds, rounding(weight * u * (fabs(dp) + fabs(delta))));
  error e_dx = scaled(e_ds, slope);
  add_error(&e_dx, rounding(unit.least * (slope * (dp - delta) + 1 + 1 / fabs(p->scale))));
  add_error(&e_dx, rounding((unit.stored + 4 * u) * dx));
  if (p->softcap != 0) {
    error e_any = scaled(e_delta, weight);
    add_error(&e_any, e_ds);
    add_error(&e_dx, scaled(x->e_slope[j], weight * (dp - delta)));
    add_error(&e_dx, product_of_errors(e_any, x->e_slope[j]));
  }
  bound_sums(x, row, j, ds, e_ds, e_delta);
  row->sum_dx += dx;

  error to_dq = e_dx, to_dk = e_dx, to_dv = scaled(e_p, weight);
  add_error(&to_dq, scaled(in_row, dx));
  add_error(&to_dk, scaled(row->e_lse, dx));
  add_error(&to_dk, scaled(e_delta, weight * slope));
  add_error(&to_dk, scaled(in_column, dx));
  add_error(&to_dv, scaled(row->e_lse, weight));
  add_error(&to_dv, rounding(unit.stored * weight + unit.least));
  add_error(&to_dv, scaled(in_column, weight));
  if (p->dropout != 0) add_error(&to_dv, rounding(2 * u * weight));
  to_dv = scaled(to_dv, keep);
  for (int64_t c = 0; c < d; c++) {
    x->exact.dq[c] += dx * k[c];
    x->exact.dk[j * d + c] += dx * q[c];
    x->exact.dv[j * d + c] += keep * weight * dout[c];
    add_error(&x->dq[c], scaled(to_dq, k[c]));
    add_error(&x->dk[j * d + c], scaled(to_dk, q[c]));
    add_error(&x->dv[j * d + c], scaled(to_dv, dout[c]));
  }
  for (int64_t c = 0; c < d && unit.operand > 0; c++) {
    add_error(&x->dq[c], rounding(dx * error_of_operand(unit, x->of_k, k[c])));
    add_error(&x->dk[j * d + c], rounding(dx * error_of_operand(unit, x->of_q, q[c])));
    add_error(&x->dv[j * d + c], rounding(keep * weight * error_of_operand(unit, x->of_dout, dout[c])));
  }
}

/* What q errs by reaches dq by way of all scores alike, as far as the dx have a sum. */
static void add_error_of_q(bound_scratch *x, const bound_row *row) {
  const int64_t d = row->problem->head_dim;
  double of_q = 0, sum_p = 0;
  fill_zero_f64(x->squares, d);
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++) {
    if (!is_seen(x, j)) continue;
    const double *k = x->exact.k + j * d;
    for (int64_t c = 0; c < d; c++) x->squares[c] += x->p[j] * x->slope[j] * k[c] * k[c];
    sum_p += x->p[j];
  }
  if (sum_p == 0) return;
  for (int64_t c = 0; c < d; c++) {
    const double e = error_of_operand(row->unit, x->of_q, x->exact.q[c]);
    of_q += e * e * x->squares[c];
  }
  const double factor = row->problem->scale * row->sum_dx / sum_p;
  for (int64_t c = 0; c < d; c++) add_error(&x->dq[c], rounding(factor * sqrt(of_q * x->squares[c])));
}

static void bound_backward(bound_scratch *x, bound_row *row) {
  const fa_problem *p = row->problem;
  const int64_t d = p->head_dim;
  const double u = row->unit.arithmetic, *dout = x->exact.dout;
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++)
    if (is_seen(x, j)) x->dp[j] = bound_dot(dout, x->exact.v + j * d, d, row->unit, x->of_dout, x->of_v);
  const dot_product dot = bound_dot(x->exact.o, dout, d, row->unit, 0, 0);
  const double delta = dot.sum - row->dlse;
  const error e_delta = error_of_delta(x, row, dot, delta);
  for (int64_t j = 0; j < row->at.sequence->seqlen_k; j++)
    if (is_seen(x, j)) bound_column(x, row, j, delta, e_delta);
  bound_row_sums(x, row, e_delta);
  if (row->unit.operand > 0) add_error_of_q(x, row);
  for (int64_t c = 0; c < d; c++) {
    add_error(&x->dq[c], scaled(row->e_lse, x->exact.dq[c]));
    add_error(&x->dq[c], scaled(e_delta, x->sum_p_slope_k[c]));
  }
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++) {
    const double sink = sink_f64(p, &row->at, t), weight = exp(sink - row->lse);
    error e = error_of_exponential(weight, sink, (error){0, 0}, row->lse, u);
    add_error(&e, row->e_lse);
    e = scaled(e, weight * delta);
    add_error(&e, scaled(e_delta, weight));
    add_error(&e, rounding(0x1p-126 * delta)); /* exp gives 0 where it would be subnormal */
    if (t < p->num_sinks)
      add_to_sum(x, row, FA_TENSOR_DSINK, 0, t, -weight * delta, e, p->batch * p->seqlen_q);
    else
      add_to_sum(x, row, FA_TENSOR_DROW_SINKS, 0, t - p->num_sinks, -weight * delta, e, 1);
  }
}

/* ---- results ----------------------------------------------------------------------------------------- */

/* A gradient's own: that it is a sum of num_terms terms, multiplied with scale and rounded to its type. */
static void add_own_errors(error *e, const double *gradient, const fa_problem *p, double scale,
                           int64_t num_terms) {
  const struct unit unit = units[p->dtype];
  for (int64_t c = 0; c < p->head_dim; c++) {
    add_error(&e[c], scaled(error_of_sum(num_terms, unit.arithmetic), gradient[c]));
    add_error(&e[c],
              rounding((unit.stored + 4 * unit.arithmetic) * fabs(gradient[c]) + unit.least / fabs(scale)));
  }
}

/* The row of the tensor becomes scale times the bounds [head_dim], rounded up; they pass through buffer. */
static void save_bounds(const fa_tensor *to, const fa_problem *p, const fa_sequence *sequence, int64_t row,
                        int64_t head, double scale, const error *e, double *buffer) {
  const struct unit unit = units[p->dtype];
  for (int64_t c = 0; c < p->head_dim; c++)
    buffer[c] = fabs(scale) * bound_of(e[c]) * (1 + 2 * unit.stored) + 2 * unit.least;
  save_f64(to, p, sequence, row, head, 1, buffer);
}

static void save_lse_bound(const fa_problem *p, const fa_tensor *to, int64_t index, double bound) {
  if (p->dtype == FA_DTYPE_F64)
    ((double *)to->data)[index] = bound;
  else
    ((float *)to->data)[index] = (float)bound;
}

/* A sum is rounded to its type once, and what it is held against is, too. */
static void save_sum_bounds(bound_scratch *x, const fa_problem *p, const fa_tensors *t, int id) {
  const fa_dtype dtype = fa_tensor_dtype(p, id);
  const struct unit unit = units[dtype];
  const double least = dtype == FA_DTYPE_F16 ? 2 * unit.least : 0x1p-126;
  for (int64_t i = 0; i < fa_num_elements(p, id); i++) {
    add_error(&x->sums[id][i], rounding(2 * unit.stored * fabs(x->exact.sums[id][i]) + least));
    set_element(dtype, fa_tensor_get(t, id)->data, i, bound_of(x->sums[id][i]) * (1 + 2 * unit.stored) + least);
  }
}

static void bound_one_row(bound_scratch *x, const fa_problem *p, const fa_problem *exact, place_f64 at) {
  const fa_tensors *t = at.tensors;
  const int64_t d = p->head_dim, i = at.row, h = at.head;
  bound_row row = {.problem = exact, .unit = unit_of(p), .at = at};
  double *const sums[] = {x->exact.o, x->exact.dq, x->sum_p_slope_k};
  for (int n = 0; n < 3; n++) fill_zero_f64(sums[n], d);
  clear_errors(x->o, d), clear_errors(x->dq, d);
  load_f64(x->exact.q, p, &t->q, at.sequence, i, h);
  load_f64(x->exact.dout, p, &t->dout, at.sequence, i, h);
  bound_scores(x, &row);
  if (row.maximum != -INFINITY) {
    bound_forward(x, &row);
    row.dlse = dlse_f64(p, &row.at, row.lse);
  }
  if (row.num_columns || row.dlse != 0) bound_backward(x, &row);
  add_own_errors(x->dq, x->exact.dq, p, p->scale, row.num_columns);
  save_lse_bound(p, &t->lse, fa_first_stat(at.sequence, h) + i, bound_of(row.e_lse));
  save_bounds(&t->o, p, at.sequence, i, h, 1, x->o, x->exact.o);
  save_bounds(&t->dq, p, at.sequence, i, h, p->scale, x->dq, x->exact.dq);
}

/* a(0) of a tensor's head: of all its rows, as keys that nobody sees are near those that are seen. */
static double error_of_zero(bound_scratch *x, const fa_problem *p, const fa_tensor *tensor,
                            const fa_sequence *sequence, int64_t num_rows, int64_t head) {
  const double operand = units[p->dtype].operand;
  double largest = 0, *const row = x->exact.q;
  for (int64_t i = 0; i < num_rows && operand > 0; i++) {
    load_f64(row, p, tensor, sequence, i, head);
    for (int64_t c = 0; c < p->head_dim; c++) largest = fmax(largest, fabs(row[c]));
  }
  return operand * largest;
}

static void bound(const fa_problem *p, const fa_tensors *t, void *workspace) {
  bound_scratch x = lay_out_bound(&(fa_arena){.base = workspace}, p);
  fa_problem exact = *p;
  exact.dtype = FA_DTYPE_F64;
  const int64_t d = p->head_dim, heads_per_kv = p->num_heads / p->num_kv_heads;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_is_sum(p, id)) {
      fill_zero_f64(x.exact.sums[id], fa_num_elements(p, id));
      clear_errors(x.sums[id], fa_num_elements(p, id));
    }
  for (int64_t b = 0; b < p->batch; b++) {
    const fa_sequence sequence = fa_sequence_of(p, t, b);
    const int64_t num_columns = sequence.seqlen_k;
    for (int64_t kv = 0; kv < p->num_kv_heads; kv++) {
      x.of_k = error_of_zero(&x, p, &t->k, &sequence, p->seqlen_k, kv);
      x.of_v = error_of_zero(&x, p, &t->v, &sequence, p->seqlen_k, kv);
      load_keys_f64(&x.exact, p, t, &sequence, kv);
      fill_zero_f64(x.exact.dk, num_columns * d), clear_errors(x.dk, num_columns * d);
      fill_zero_f64(x.exact.dv, num_columns * d), clear_errors(x.dv, num_columns * d);
      for (int64_t h = kv * heads_per_kv; h < (kv + 1) * heads_per_kv; h++) {
        x.of_q = error_of_zero(&x, p, &t->q, &sequence, sequence.seqlen_q, h);
        x.of_dout = error_of_zero(&x, p, &t->dout, &sequence, sequence.seqlen_q, h);
        for (int64_t i = 0; i < sequence.seqlen_q; i++)
          bound_one_row(&x, p, &exact, place_of_f64(p, t, &sequence, h, i));
      }
      for (int64_t j = 0; j < num_columns; j++) {
        add_own_errors(x.dk + j * d, x.exact.dk + j * d, p, p->scale, sequence.seqlen_q * heads_per_kv);
        add_own_errors(x.dv + j * d, x.exact.dv + j * d, p, 1, sequence.seqlen_q * heads_per_kv);
        save_bounds(&t->dk, p, &sequence, j, kv, p->scale, x.dk + j * d, x.exact.dk + j * d);
        save_bounds(&t->dv, p, &sequence, j, kv, 1, x.dv + j * d, x.exact.dv + j * d);
      }
    }
  }
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_is_sum(p, id)) save_sum_bounds(&x, p, t, id);
}
