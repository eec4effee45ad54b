/*
 * Attention as the formulas of flash_attention.h read, one row at a time. reference.c includes this once for
 * each type of arithmetic:
 *
 *   real       double or float: the type of every product, sum and statistic
 *   NAMED(x)   x with a suffix of its own
 *
 * lse has the type real whatever the tensors' type. stored() rounds what unfused attention would keep in a
 * tensor of its own (s, p, dp, ds) to the tensors' type. Sums run in the order of their index.
 */

/* Where the workspace is cut. */
typedef struct NAMED(scratch) {
  real *k, *v, *dk, *dv;   /* [seqlen_k, head_dim] */
  real *q, *o, *dout, *dq; /* [head_dim] */
  real *s;                 /* [seqlen_k] */
  real *dsink;             /* [num_sinks, num_heads] */
} NAMED(scratch);

/* Cuts the workspace (which may be NULL to measure it) and returns how many bytes it has. */
static size_t NAMED(cut)(NAMED(scratch) * scratch, const fa_problem *p, void *workspace) {
  const int64_t rows = p->seqlen_k * p->head_dim, sinks = p->num_sinks * p->num_heads;
  const struct {
    real **part;
    int64_t length;
  } parts[] = {
      {&scratch->k, rows},           {&scratch->v, rows},         {&scratch->dk, rows},
      {&scratch->dv, rows},          {&scratch->q, p->head_dim},  {&scratch->o, p->head_dim},
      {&scratch->dout, p->head_dim}, {&scratch->dq, p->head_dim}, {&scratch->s, p->seqlen_k},
      {&scratch->dsink, sinks},
  };
  size_t used = 0;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    *parts[i].part = workspace ? (real *)workspace + used : NULL;
    used += (size_t)parts[i].length;
  }
  return used * sizeof(real);
}

static real NAMED(dot)(const real *x, const real *y, int64_t length) {
  real sum = 0;
  for (int64_t c = 0; c < length; c++) sum += x[c] * y[c];
  return sum;
}

/* y += factor * x */
static void NAMED(add_scaled)(real *y, real factor, const real *x, int64_t length) {
  for (int64_t c = 0; c < length; c++) y[c] += factor * x[c];
}

static void NAMED(fill_zero)(real *x, int64_t length) {
  for (int64_t c = 0; c < length; c++) x[c] = 0;
}

/* to [head_dim]: one row of one head of a tensor */
static void NAMED(load)(real *to, const fa_problem *p, const fa_tensor *x, int64_t b, int64_t row,
                        int64_t head) {
  const int64_t begin = b * x->stride_batch + row * x->stride_row + head * x->stride_head;
  for (int64_t c = 0; c < p->head_dim; c++) to[c] = (real)element(p->dtype, x->data, begin + c);
}

/* The row of the tensor becomes factor * from [head_dim]. */
static void NAMED(save)(const fa_tensor *x, const fa_problem *p, int64_t b, int64_t row, int64_t head,
                        real factor, const real *from) {
  const int64_t begin = b * x->stride_batch + row * x->stride_row + head * x->stride_head;
  for (int64_t c = 0; c < p->head_dim; c++) set_element(p->dtype, x->data, begin + c, factor * from[c]);
}

/* k, v [seqlen_k, head_dim] of one batch and key/value head */
static void NAMED(load_keys)(NAMED(scratch) * x, const fa_problem *p, const fa_tensors *t, int64_t b,
                             int64_t kv) {
  for (int64_t j = 0; j < p->seqlen_k; j++) {
    NAMED(load)(x->k + j * p->head_dim, p, &t->k, b, j, kv);
    NAMED(load)(x->v + j * p->head_dim, p, &t->v, b, j, kv);
  }
}

/* s[i,j] of q[i] and k[j], both [head_dim] */
static real NAMED(score)(const fa_problem *p, const real *q, const real *k) {
  real s = stored(p->dtype, (real)p->scale * NAMED(dot)(q, k, p->head_dim));
  if (p->softcap == 0) return s;
  const real softcap = (real)p->softcap;
  return stored(p->dtype, softcap * tanh(s / softcap));
}

/* d(s)/d(scaled dot product), from s itself: tanh' = 1 - tanh^2 */
static real NAMED(score_slope)(const fa_problem *p, real s) {
  if (p->softcap == 0) return 1;
  const real tanh_value = s / (real)p->softcap;
  return 1 - tanh_value * tanh_value;
}

/* o [head_dim] and, as the result, lse of one row: q [head_dim], sink [num_sinks, num_heads] */
static real NAMED(forward_row)(NAMED(scratch) * x, const fa_problem *p, const float *sink, int64_t i,
                               int64_t h) {
  const fa_range columns = fa_visible_columns(p, i);
  real maximum = -INFINITY, sum = 0;
  for (int64_t t = 0; t < p->num_sinks; t++) maximum = fmax(maximum, (real)sink[t * p->num_heads + h]);
  for (int64_t j = columns.begin; j < columns.end; j++) {
    x->s[j] = NAMED(score)(p, x->q, x->k + j * p->head_dim);
    maximum = fmax(maximum, x->s[j]);
  }
  if (maximum == -INFINITY) maximum = 0; /* nothing to see: sum stays 0, lse becomes log(0) */
  for (int64_t t = 0; t < p->num_sinks; t++) sum += exp((real)sink[t * p->num_heads + h] - maximum);
  for (int64_t j = columns.begin; j < columns.end; j++) sum += exp(x->s[j] - maximum);
  NAMED(fill_zero)(x->o, p->head_dim);
  for (int64_t j = columns.begin; j < columns.end; j++) {
    const real weight = stored(p->dtype, exp(x->s[j] - maximum) / sum);
    NAMED(add_scaled)(x->o, weight, x->v + j * p->head_dim, p->head_dim);
  }
  return maximum + log(sum);
}

static void NAMED(forward)(const fa_problem *p, const fa_tensors *t, void *workspace) {
  NAMED(scratch) x;
  NAMED(cut)(&x, p, workspace);
  const int64_t group = p->num_heads / p->num_kv_heads;
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      if (h % group == 0) NAMED(load_keys)(&x, p, t, b, h / group);
      for (int64_t i = 0; i < p->seqlen_q; i++) {
        NAMED(load)(x.q, p, &t->q, b, i, h);
        const real lse = NAMED(forward_row)(&x, p, t->sink.data, i, h);
        ((real *)t->lse.data)[(b * p->num_heads + h) * p->seqlen_q + i] = lse;
        NAMED(save)(&t->o, p, b, i, h, 1, x.o);
      }
    }
  }
}

/* dq [head_dim] of one row without its factor scale, and what the row adds to dk, dv [seqlen_k, head_dim]
 * and dsink [num_sinks, num_heads]: q, o, dout [head_dim] */
static void NAMED(backward_row)(NAMED(scratch) * x, const fa_problem *p, const float *sink, real lse, int64_t i,
                                int64_t h) {
  const int64_t d = p->head_dim;
  const fa_range columns = fa_visible_columns(p, i);
  NAMED(fill_zero)(x->dq, d);
  if (columns.begin >= columns.end) return;
  const real delta = NAMED(dot)(x->o, x->dout, d);
  for (int64_t t = 0; t < p->num_sinks; t++)
    x->dsink[t * p->num_heads + h] -= exp((real)sink[t * p->num_heads + h] - lse) * delta;
  for (int64_t j = columns.begin; j < columns.end; j++) {
    const real *k = x->k + j * d, *v = x->v + j * d;
    const real s = NAMED(score)(p, x->q, k);
    const real weight = stored(p->dtype, exp(s - lse));
    const real dweight = stored(p->dtype, NAMED(dot)(x->dout, v, d));
    const real ds = stored(p->dtype, weight * (dweight - delta) * NAMED(score_slope)(p, s));
    NAMED(add_scaled)(x->dv + j * d, weight, x->dout, d);
    NAMED(add_scaled)(x->dq, ds, k, d);
    NAMED(add_scaled)(x->dk + j * d, ds, x->q, d);
  }
}

static void NAMED(backward)(const fa_problem *p, const fa_tensors *t, void *workspace) {
  NAMED(scratch) x;
  NAMED(cut)(&x, p, workspace);
  const int64_t group = p->num_heads / p->num_kv_heads, num_sinks = p->num_sinks * p->num_heads;
  const real scale = (real)p->scale;
  NAMED(fill_zero)(x.dsink, num_sinks);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t kv = 0; kv < p->num_kv_heads; kv++) {
      NAMED(load_keys)(&x, p, t, b, kv);
      NAMED(fill_zero)(x.dk, p->seqlen_k * p->head_dim);
      NAMED(fill_zero)(x.dv, p->seqlen_k * p->head_dim);
      for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        for (int64_t i = 0; i < p->seqlen_q; i++) {
          const real lse = ((const real *)t->lse.data)[(b * p->num_heads + h) * p->seqlen_q + i];
          NAMED(load)(x.q, p, &t->q, b, i, h);
          NAMED(load)(x.o, p, &t->o, b, i, h);
          NAMED(load)(x.dout, p, &t->dout, b, i, h);
          NAMED(backward_row)(&x, p, t->sink.data, lse, i, h);
          NAMED(save)(&t->dq, p, b, i, h, scale, x.dq);
        }
      }
      for (int64_t j = 0; j < p->seqlen_k; j++) {
        NAMED(save)(&t->dk, p, b, j, kv, scale, x.dk + j * p->head_dim);
        NAMED(save)(&t->dv, p, b, j, kv, 1, x.dv + j * p->head_dim);
      }
    }
  }
  for (int64_t i = 0; i < num_sinks; i++) ((float *)t->dsink.data)[i] = (float)x.dsink[i];
}
