/*
 * Template: parts merged row by row, and the gradients of that. A task is one head of some rows: it reads every
 * part of a row before it writes, so that what parts merge to may replace one of them.
 *
 * Parameters: REAL, T(name), LOG, EXP_HIGHEST; see kernels.c.
 */

/* The rows of one head of o, or of the gradient by it. */
static T(rows) T(part_rows)(const fa_part *part, int64_t batch, int64_t head) {
  const int64_t element_bytes = (int64_t)fa_dtype_bytes(part->dtype);
  const int64_t first = batch * part->o.stride_batch + head * part->o.stride_head;
  return (T(rows)){.data = (char *)part->o.data + first * element_bytes,
                   .stride_bytes = part->o.stride_row * element_bytes,
                   .dtype = part->dtype};
}

/* lse of some rows of a head, or the gradient by it. */
INLINE REAL *T(part_lse)(const fa_merge *merge, const fa_part *part, int64_t batch, int64_t head) {
  return (REAL *)part->lse + (batch * merge->num_heads + head) * merge->seqlen_q;
}

/* exp(x), 0 of -inf. */
INLINE REAL T(weight)(REAL x) { return T(first)(T(exp)(T(min)(T(splat)(EXP_HIGHEST), T(splat)(x)))); }

/* What the sinks of a row stand at, a stride apart. */
static const float *T(row_sinks)(const fa_merge *merge, int64_t batch, int64_t head, int64_t row) {
  const int64_t first = merge->sink_per_row ? (batch * merge->seqlen_q + row) * merge->num_sinks : 0;
  return merge->sink + first * merge->num_heads + head;
}

/* sum [head_dim] += weight * row */
INLINE void T(add_scaled)(REAL *sum, REAL weight, const REAL *row, int64_t count) {
  for (int64_t i = 0; i < count; i++) sum[i] += weight * row[i];
}

/* The largest lse of the row's parts and sinks; -inf where there is nothing. */
static REAL T(largest_lse)(const fa_merge *merge, int64_t batch, int64_t head, int64_t row) {
  REAL largest = -INFINITY;
  for (int p = 0; p < merge->num_parts; p++) {
    const REAL lse = T(part_lse)(merge, &merge->parts[p], batch, head)[row];
    if (!(lse <= largest) && !isnan(largest)) largest = lse; /* a NaN stays */
  }
  for (int64_t t = 0; t < merge->num_sinks; t++) {
    const REAL sink = T(row_sinks)(merge, batch, head, row)[t * merge->num_heads];
    if (!(sink <= largest) && !isnan(largest)) largest = sink;
  }
  return largest;
}

/* One row: weights are shares of the sum of exponentials, and so do not suffer from the rounding of lse. */
static void T(merge_row)(const fa_merge *merge, int64_t batch, int64_t head, int64_t row, REAL *sum,
                         REAL *buffer) {
  const int64_t head_dim = merge->head_dim;
  const REAL largest = T(largest_lse)(merge, batch, head, row);
  const bool has_nothing = largest == -INFINITY;
  bool has_part = false;
  REAL total = 0;
  memset(sum, 0, (size_t)head_dim * sizeof *sum);
  for (int p = 0; !has_nothing && p < merge->num_parts; p++) {
    const REAL lse = T(part_lse)(merge, &merge->parts[p], batch, head)[row];
    if (lse == -INFINITY) continue;
    const REAL weight = T(weight)(lse - largest);
    total += weight;
    has_part = true;
    const T(rows) from = T(part_rows)(&merge->parts[p], batch, head);
    T(add_scaled)(sum, weight, T(load_row)(from, row, head_dim, buffer), head_dim);
  }
  for (int64_t t = 0; !has_nothing && t < merge->num_sinks; t++)
    total += T(weight)(T(row_sinks)(merge, batch, head, row)[t * merge->num_heads] - largest);
  const REAL share = has_part ? 1 / total : 0; /* o is 0 beside sinks alone, whatever they are */
  for (int64_t i = 0; i < head_dim; i++) sum[i] *= share;
  T(store_row)(T(part_rows)(&merge->merged, batch, head), row, head_dim, sum);
  T(part_lse)(merge, &merge->merged, batch, head)[row] = has_nothing ? largest : largest + LOG(total);
}

/* One row of the gradients; returns delta. */
static REAL T(merge_row_backward)(const fa_merge *merge, int64_t batch, int64_t head, int64_t row, REAL *dout,
                                  REAL *buffer) {
  const int64_t head_dim = merge->head_dim;
  const REAL lse = T(part_lse)(merge, &merge->merged, batch, head)[row];
  const bool has_nothing = lse == -INFINITY;
  const REAL *dout_row = T(load_row)(T(part_rows)(&merge->dmerged, batch, head), row, head_dim, dout);
  const REAL *o_row = T(load_row)(T(part_rows)(&merge->merged, batch, head), row, head_dim, buffer);
  REAL delta = has_nothing ? 0 : T(dot)(o_row, dout_row, head_dim);
  if (!has_nothing && merge->dmerged.lse) delta -= T(part_lse)(merge, &merge->dmerged, batch, head)[row];
  for (int p = 0; p < merge->num_parts; p++) {
    const fa_part *part = &merge->parts[p], *gradient = &merge->dparts[p];
    const REAL part_lse = T(part_lse)(merge, part, batch, head)[row];
    const bool is_empty = has_nothing || part_lse == -INFINITY;
    const REAL weight = is_empty ? 0 : T(weight)(part_lse - lse);
    if (gradient->lse) {
      const REAL *part_row = T(load_row)(T(part_rows)(part, batch, head), row, head_dim, buffer);
      T(part_lse)
      (merge, gradient, batch, head)[row] =
          is_empty ? 0 : weight * (T(dot)(part_row, dout_row, head_dim) - delta);
    }
    if (!gradient->o.data) continue;
    for (int64_t i = 0; i < head_dim; i++) buffer[i] = is_empty ? 0 : weight * dout_row[i];
    T(store_row)(T(part_rows)(gradient, batch, head), row, head_dim, buffer);
  }
  return delta;
}

/* The sinks' gradient in a row, or none where the sinks are all rows' and a later phase sums it. */
static void T(sink_row_backward)(const fa_merge *merge, int64_t batch, int64_t head, int64_t row, REAL delta) {
  const float *sinks = T(row_sinks)(merge, batch, head, row);
  const REAL lse = T(part_lse)(merge, &merge->merged, batch, head)[row];
  float *to = merge->dsink + (sinks - merge->sink);
  for (int64_t t = 0; t < merge->num_sinks; t++) {
    const REAL sink = sinks[t * merge->num_heads];
    to[t * merge->num_heads] =
        lse == -INFINITY || sink == -INFINITY ? 0 : (float)(-T(weight)(sink - lse) * delta);
  }
}

static void T(merge_task)(const fa_merge_job *job, int64_t task, void *scratch) {
  const fa_merge *merge = job->merge;
  const int64_t head = task % merge->num_heads, batch = task / merge->num_heads % merge->batch;
  const int64_t begin = task / merge->num_heads / merge->batch * FA_MERGE_ROWS;
  const int64_t end = fa_min(begin + FA_MERGE_ROWS, merge->seqlen_q);
  REAL *first = scratch, *second = first + merge->head_dim;
  for (int64_t row = begin; row < end; row++) {
    if (!job->is_backward) {
      T(merge_row)(merge, batch, head, row, first, second);
      continue;
    }
    const REAL delta = T(merge_row_backward)(merge, batch, head, row, first, second);
    if (!merge->dsink || !merge->num_sinks) continue;
    if (merge->sink_per_row)
      T(sink_row_backward)(merge, batch, head, row, delta);
    else
      ((REAL *)job->delta)[(batch * merge->num_heads + head) * merge->seqlen_q + row] = delta;
  }
}

/* dsink [num_sinks, num_heads], in f64 and always in the same order; a task is a head. */
static void T(merge_sink_task)(const fa_merge_job *job, int64_t head, void *scratch) {
  (void)scratch;
  const fa_merge *merge = job->merge;
  for (int64_t t = 0; t < merge->num_sinks; t++) {
    const REAL sink = merge->sink[t * merge->num_heads + head];
    double sum = 0;
    for (int64_t batch = 0; merge->seqlen_q > 0 && batch < merge->batch; batch++) {
      const REAL *lse = T(part_lse)(merge, &merge->merged, batch, head);
      const REAL *delta = (const REAL *)job->delta + (batch * merge->num_heads + head) * merge->seqlen_q;
      for (int64_t row = 0; sink != -INFINITY && row < merge->seqlen_q; row++)
        if (lse[row] != -INFINITY) sum += (double)(T(weight)(sink - lse[row]) * delta[row]);
    }
    merge->dsink[t * merge->num_heads + head] = (float)-sum;
  }
}
