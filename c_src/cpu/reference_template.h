/*
 * Template: attention as the formulas of flash_attention.h read, one row at a time. Sums run in the order of
 * their index.
 *
 * Parameters: REAL, the type of every product, sum and statistic, and T(name), name with the type's suffix. lse
 * has the type REAL whatever the tensors' type; stored() of reference.c rounds what unfused attention would
 * keep in a tensor of its own (s, p, dp, ds) to the tensors' type.
 */

/* Where the workspace's parts are. */
typedef struct T(scratch) {
  REAL *k, *v, *dk, *dv;      /* [seqlen_k, head_dim] */
  REAL *q, *o, *dout, *dq;    /* [head_dim] */
  REAL *s;                    /* [seqlen_k] */
  REAL *sums[FA_NUM_TENSORS]; /* of gradients without head_dim: as the tensor; NULL of the others */
} T(scratch);

static T(scratch) T(lay_out)(fa_arena *arena, const fa_problem *p) {
  const int64_t keys = p->seqlen_k * p->head_dim;
  T(scratch) x;
  x.k = fa_take(arena, keys, sizeof(REAL));
  x.v = fa_take(arena, keys, sizeof(REAL));
  x.dk = fa_take(arena, keys, sizeof(REAL));
  x.dv = fa_take(arena, keys, sizeof(REAL));
  x.q = fa_take(arena, p->head_dim, sizeof(REAL));
  x.o = fa_take(arena, p->head_dim, sizeof(REAL));
  x.dout = fa_take(arena, p->head_dim, sizeof(REAL));
  x.dq = fa_take(arena, p->head_dim, sizeof(REAL));
  x.s = fa_take(arena, p->seqlen_k, sizeof(REAL));
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    x.sums[id] = fa_is_sum(p, id) ? fa_take(arena, fa_num_elements(p, id), sizeof(REAL)) : NULL;
  return x;
}

static size_t T(workspace_bytes)(const fa_problem *p) {
  fa_arena sizes = {0};
  T(lay_out)(&sizes, p);
  return sizes.used;
}

static REAL T(dot)(const REAL *x, const REAL *y, int64_t length) {
  REAL sum = 0;
  for (int64_t c = 0; c < length; c++) sum += x[c] * y[c];
  return sum;
}

/* y += factor * x */
static void T(add_scaled)(REAL *y, REAL factor, const REAL *x, int64_t length) {
  for (int64_t c = 0; c < length; c++) y[c] += factor * x[c];
}

static void T(fill_zero)(REAL *x, int64_t length) {
  for (int64_t c = 0; c < length; c++) x[c] = 0;
}

/* to [head_dim]: one row of one head of a batch, or of a page */
static void T(load_from)(REAL *to, const fa_problem *p, const fa_tensor *x, int64_t batch, int64_t row,
                         int64_t head) {
  const int64_t begin = batch * x->stride_batch + row * x->stride_row + head * x->stride_head;
  for (int64_t c = 0; c < p->head_dim; c++) to[c] = (REAL)element(p->dtype, x->data, begin + c);
}

static void T(load)(REAL *to, const fa_problem *p, const fa_tensor *x, const fa_sequence *sequence, int64_t row,
                    int64_t head) {
  T(load_from)(to, p, x, sequence->batch, row, head);
}

static void T(load_key)(REAL *to, const fa_problem *p, const fa_tensor *x, const fa_sequence *sequence,
                        int64_t key, int64_t head) {
  if (!sequence->pages) {
    T(load)(to, p, x, sequence, key, head);
    return;
  }
  const fa_page_row at = fa_page_row_of(sequence->pages, sequence->page_size, sequence->num_pages, key);
  if (at.page >= 0) T(load_from)(to, p, x, at.page, at.row, head);
  for (int64_t c = 0; at.page < 0 && c < p->head_dim; c++) to[c] = 0;
}

/* The row of the tensor becomes factor * from [head_dim]. */
static void T(save)(const fa_tensor *x, const fa_problem *p, const fa_sequence *sequence, int64_t row,
                    int64_t head, REAL factor, const REAL *from) {
  const int64_t begin = sequence->batch * x->stride_batch + row * x->stride_row + head * x->stride_head;
  for (int64_t c = 0; c < p->head_dim; c++) set_element(p->dtype, x->data, begin + c, factor * from[c]);
}

/* k, v [seqlen_k, head_dim] of one key/value head */
static void T(load_keys)(T(scratch) * x, const fa_problem *p, const fa_tensors *t, const fa_sequence *sequence,
                         int64_t kv) {
  for (int64_t j = 0; j < sequence->seqlen_k; j++) {
    T(load_key)(x->k + j * p->head_dim, p, &t->k, sequence, j, kv);
    T(load_key)(x->v + j * p->head_dim, p, &t->v, sequence, j, kv);
  }
}

/* ---- from products to scores and probabilities, and back ----------------------------------------------- */

/* The place of a row's scores, and where the numbers are that belong to scores. */
typedef struct T(place) {
  const fa_sequence *sequence;
  const fa_tensors *tensors;
  int64_t head, row;
  bool has_input[NUM_SCORE_INPUTS];
} T(place);

static T(place) T(place_of)(const fa_problem *p, const fa_tensors *t, const fa_sequence *sequence, int64_t head,
                            int64_t row) {
  T(place) at = {.sequence = sequence, .tensors = t, .head = head, .row = row};
  for (int n = 0; n < NUM_SCORE_INPUTS; n++) at.has_input[n] = has_score_input(p, n);
  return at;
}

static int64_t T(element_of)(const fa_problem *p, int id, const T(place) * at, int64_t column, int64_t number) {
  return fa_element_of(p, id, &(fa_cell){at->sequence->batch, at->head, at->row, column, number});
}

/* What a tensor without head_dim holds for a place. */
static REAL T(number_at)(const fa_problem *p, int id, const T(place) * at, int64_t column, int64_t number) {
  return (REAL)element(fa_tensor_dtype(p, id), fa_tensor_get(at->tensors, id)->data,
                       T(element_of)(p, id, at, column, number));
}

/* Of the sinks of all rows, then of the row's own. */
static REAL T(sink)(const fa_problem *p, const T(place) * at, int64_t t) {
  return t < p->num_sinks ? T(number_at)(p, FA_TENSOR_SINK, at, 0, t)
                          : T(number_at)(p, FA_TENSOR_ROW_SINKS, at, 0, t - p->num_sinks);
}

/* A score, and what it is made of. */
typedef struct T(score) {
  bool is_seen;
  REAL product, capped;      /* scale * q.k, and that after the softcap */
  REAL slope;                /* the derivative of s by product */
  REAL added;                /* sum of the sizes of what is added after that */
  REAL s;                    /* -inf where it is not seen */
  REAL by[NUM_SCORE_INPUTS]; /* its derivative by the number of each of score_inputs */
} T(score);

/* What one of score_inputs holds for a score: a bias of u8 hides where it is 0. */
static REAL T(input)(const fa_problem *p, int input, const T(place) * at, int64_t column) {
  const fa_tensor_id id = score_inputs[input];
  const REAL number = T(number_at)(p, id, at, column, 0);
  return fa_tensor_dtype(p, id) != FA_DTYPE_U8 ? number : number != 0 ? 0 : -INFINITY;
}

/* Adds to a score, after the softcap, a number of one of score_inputs, if the problem has it, times factor. */
static void T(add)(const fa_problem *p, const T(place) * at, int64_t column, T(score) * x, int input,
                   REAL factor) {
  if (!at->has_input[input]) return;
  const REAL addend = T(input)(p, input, at, column) * factor;
  x->s = addend == -INFINITY ? addend : stored(p->dtype, x->s + addend);
  x->added += fabs(addend);
  x->by[input] = factor;
}

/* s[i,j] of q[i] and k[j], both [head_dim] */
static T(score)
    T(score_of)(const fa_problem *p, const T(place) * at, int64_t column, const REAL *q, const REAL *k) {
  fa_band band;
  T(score) x = {.s = -INFINITY};
  if (!fa_sees_any(at->sequence, at->row, (fa_range){column, column + 1}, &band)) return x;
  x.product = x.capped = stored(p->dtype, (REAL)p->scale * T(dot)(q, k, p->head_dim));
  x.slope = 1;
  if (p->softcap != 0) {
    x.capped = stored(p->dtype, (REAL)p->softcap * tanh(x.product / (REAL)p->softcap));
    const REAL tanh_value = x.capped / (REAL)p->softcap;
    x.slope = 1 - tanh_value * tanh_value;
  }
  x.s = x.capped;
  T(add)(p, at, column, &x, BIAS, 1);
  T(add)(p, at, column, &x, ALIBI_SLOPES, -(REAL)fa_band_distance(band, at->row, column));
  x.is_seen = x.s != -INFINITY;
  return x;
}

/* keep[i,j] */
static REAL T(keep)(const fa_problem *p, const T(place) * at, int64_t column) {
  if (p->dropout == 0) return 1;
  const fa_dropout dropout = fa_dropout_in(p, at->tensors, at->sequence, at->head);
  return fa_dropout_keeps(dropout, p->origin.row + at->row, column) ? 1 / (1 - (REAL)p->dropout) : 0;
}
/* keep * x: 0 of what is dropped, whatever x is. */
static REAL T(kept)(REAL keep, REAL x) { return keep == 0 ? 0 : keep * x; }

/* ---- forward ------------------------------------------------------------------------------------------- */

/* o [head_dim] and, as the result, lse of one row: q [head_dim] */
static REAL T(forward_row)(T(scratch) * x, const fa_problem *p, const T(place) * at) {
  const int64_t num_columns = at->sequence->seqlen_k, d = p->head_dim;
  REAL maximum = -INFINITY, sum = 0;
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++) maximum = fmax(maximum, T(sink)(p, at, t));
  for (int64_t j = 0; j < num_columns; j++) {
    x->s[j] = T(score_of)(p, at, j, x->q, x->k + j * d).s;
    maximum = fmax(maximum, x->s[j]);
  }
  if (maximum == -INFINITY) maximum = 0; /* nothing to see: sum stays 0, lse becomes log(0) */
  for (int64_t t = 0; t < fa_problem_num_sinks(p); t++) sum += exp(T(sink)(p, at, t) - maximum);
  for (int64_t j = 0; j < num_columns; j++)
    if (x->s[j] != -INFINITY) sum += exp(x->s[j] - maximum);
  T(fill_zero)(x->o, d);
  for (int64_t j = 0; j < num_columns; j++)
    if (x->s[j] != -INFINITY) T(add_scaled)
  (x->o, stored(p->dtype, T(kept)(T(keep)(p, at, j), exp(x->s[j] - maximum) / sum)), x->v + j * d, d);
  return maximum + log(sum);
}

static void T(forward)(const fa_problem *p, const fa_tensors *t, void *workspace) {
  T(scratch) x = T(lay_out)(&(fa_arena){.base = workspace}, p);
  const int64_t heads_per_kv = p->num_heads / p->num_kv_heads;
  for (int64_t b = 0; b < p->batch; b++) {
    const fa_sequence sequence = fa_sequence_of(p, t, b);
    for (int64_t h = 0; h < p->num_heads; h++) {
      if (h % heads_per_kv == 0) T(load_keys)(&x, p, t, &sequence, h / heads_per_kv);
      for (int64_t i = 0; i < sequence.seqlen_q; i++) {
        const T(place) at = T(place_of)(p, t, &sequence, h, i);
        T(load)(x.q, p, &t->q, &sequence, i, h);
        ((REAL *)t->lse.data)[fa_first_stat(&sequence, h) + i] = T(forward_row)(&x, p, &at);
        T(save)(&t->o, p, &sequence, i, h, 1, x.o);
      }
    }
  }
}

/* ---- backward ------------------------------------------------------------------------------------------ */

/* Adds to the gradient by what a tensor without head_dim holds for a place. */
static void T(add_to_sum)(T(scratch) * x, const fa_problem *p, int id, const T(place) * at, int64_t column,
                          int64_t number, REAL value) {
  if (x->sums[id]) x->sums[id][T(element_of)(p, id, at, column, number)] += value;
}

/* dlse of one row; 0 where there is none, and where lse is -inf, which nothing changes. */
static REAL T(dlse)(const fa_problem *p, const T(place) * at, REAL lse) {
  return p->dlse_batch > 0 && lse != -INFINITY ? T(number_at)(p, FA_TENSOR_DLSE, at, 0, 0) : 0;
}

/* dq [head_dim] of one row without its factor scale, and what the row adds to dk, dv [seqlen_k, head_dim]
 * and the sums: q, o, dout [head_dim] */
static void T(backward_row)(T(scratch) * x, const fa_problem *p, REAL lse, const T(place) * at) {
  const int64_t d = p->head_dim;
  const REAL dlse = T(dlse)(p, at, lse), delta = T(dot)(x->o, x->dout, d) - dlse;
  bool sees_any = false;
  T(fill_zero)(x->dq, d);
  for (int64_t j = 0; j < at->sequence->seqlen_k; j++) {
    const REAL *k = x->k + j * d, *v = x->v + j * d;
    const T(score) score = T(score_of)(p, at, j, x->q, k);
    if (!score.is_seen) continue;
    const REAL weight = stored(p->dtype, exp(score.s - lse)), keep = T(keep)(p, at, j);
    const REAL dweight = stored(p->dtype, T(kept)(keep, T(dot)(x->dout, v, d)));
    const REAL ds = weight * (dweight - delta);
    const REAL dproduct = stored(p->dtype, ds * score.slope);
    T(add_scaled)(x->dv + j * d, stored(p->dtype, T(kept)(keep, weight)), x->dout, d);
    T(add_scaled)(x->dq, dproduct, k, d);
    T(add_scaled)(x->dk + j * d, dproduct, x->q, d);
    for (int n = 0; n < NUM_SCORE_INPUTS; n++)
      if (at->has_input[n])
        T(add_to_sum)(x, p, fa_tensor_gradient(score_inputs[n]), at, j, 0, ds * score.by[n]);
    sees_any = true;
  }
  /* Of a row that sees nothing o is 0 whatever the sinks are, but lse is theirs. */
  const REAL sink_delta = sees_any ? delta : -dlse;
  for (int64_t t = 0; t < fa_problem_num_sinks(p) && sink_delta != 0; t++) {
    const bool is_own = t >= p->num_sinks;
    T(add_to_sum)
    (x, p, is_own ? FA_TENSOR_DROW_SINKS : FA_TENSOR_DSINK, at, 0, is_own ? t - p->num_sinks : t,
     -exp(T(sink)(p, at, t) - lse) * sink_delta);
  }
}

static void T(backward)(const fa_problem *p, const fa_tensors *t, void *workspace) {
  T(scratch) x = T(lay_out)(&(fa_arena){.base = workspace}, p);
  const int64_t heads_per_kv = p->num_heads / p->num_kv_heads;
  const REAL scale = (REAL)p->scale;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_is_sum(p, id)) T(fill_zero)(x.sums[id], fa_num_elements(p, id));
  for (int64_t b = 0; b < p->batch; b++) {
    const fa_sequence sequence = fa_sequence_of(p, t, b);
    for (int64_t kv = 0; kv < p->num_kv_heads; kv++) {
      T(load_keys)(&x, p, t, &sequence, kv);
      T(fill_zero)(x.dk, sequence.seqlen_k * p->head_dim);
      T(fill_zero)(x.dv, sequence.seqlen_k * p->head_dim);
      for (int64_t h = kv * heads_per_kv; h < (kv + 1) * heads_per_kv; h++) {
        for (int64_t i = 0; i < sequence.seqlen_q; i++) {
          const T(place) at = T(place_of)(p, t, &sequence, h, i);
          const REAL lse = ((const REAL *)t->lse.data)[fa_first_stat(&sequence, h) + i];
          T(load)(x.q, p, &t->q, &sequence, i, h);
          T(load)(x.o, p, &t->o, &sequence, i, h);
          T(load)(x.dout, p, &t->dout, &sequence, i, h);
          T(backward_row)(&x, p, lse, &at);
          T(save)(&t->dq, p, &sequence, i, h, scale, x.dq);
        }
      }
      for (int64_t j = 0; j < sequence.seqlen_k; j++) {
        T(save)(&t->dk, p, &sequence, j, kv, scale, x.dk + j * p->head_dim);
        T(save)(&t->dv, p, &sequence, j, kv, 1, x.dv + j * p->head_dim);
      }
    }
  }
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    for (int64_t i = 0; fa_is_sum(p, id) && i < fa_num_elements(p, id); i++)
      set_element(fa_tensor_dtype(p, id), fa_tensor_get(t, id)->data, i, x.sums[id][i]);
}
