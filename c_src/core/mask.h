/* Visibility: which columns a row sees, and which rows see a column. These formulas stand here and nowhere
 * else; plain C that nvcc compiles too. */
#ifndef FA_CORE_MASK_H
#define FA_CORE_MASK_H

#include <stdbool.h>
#include <stdint.h>

#include "integers.h"

/* The CUDA backend takes only sequences whose positions, and sums of a few of them, fit in 32 bits. */
#ifdef __CUDACC__
#define FA_MASK_FUNCTION static __device__ inline
typedef int32_t fa_position;
FA_MASK_FUNCTION fa_position fa_first(fa_position a, fa_position b) { return min(a, b); }
FA_MASK_FUNCTION fa_position fa_last(fa_position a, fa_position b) { return max(a, b); }
#else
#define FA_MASK_FUNCTION static inline
typedef int64_t fa_position;
FA_MASK_FUNCTION fa_position fa_first(fa_position a, fa_position b) { return fa_min(a, b); }
FA_MASK_FUNCTION fa_position fa_last(fa_position a, fa_position b) { return fa_max(a, b); }
#endif

/* begin <= x < end; empty where end <= begin. */
typedef struct fa_range {
  fa_position begin, end;
} fa_range;

/* Row i of [q_begin, q_end) sees column j of [k_begin, k_end) iff
 *   i - q_end + k_end - left <= j <= i - q_end + k_end + right,
 * so that the band's last row stands beside its last column. A whole problem is the one band
 * {0, seqlen_q, 0, seqlen_k, window_left, window_right}. left and right are bounded: every sum here fits. */
typedef struct fa_band {
  fa_position q_begin, q_end, k_begin, k_end, left, right;
} fa_band;

/* A band of the tensor bands, {q_begin, q_end, k_begin, k_end, left, right}, as far as it lies in the whole
 * problem's band, whose window narrows its own; one that shows nothing to any row is empty. Whatever the words
 * are, nothing outside of the whole is shown, and sums of the result's positions fit. */
FA_MASK_FUNCTION fa_band fa_band_within(fa_band whole, const int32_t *words) {
  const fa_position most = fa_last(whole.q_end, whole.k_end);
  fa_band band = {fa_last(words[0], whole.q_begin),
                  fa_first(words[1], whole.q_end),
                  fa_last(words[2], whole.k_begin),
                  fa_first(words[3], whole.k_end),
                  fa_first(fa_last(words[4], -most), whole.left),
                  fa_first(fa_last(words[5], -most), whole.right)};
  const fa_band none = {0, 0, 0, 0, 0, 0};
  return band.q_begin < band.q_end && band.k_begin < band.k_end && band.left + band.right >= 0 ? band : none;
}

/* The whole problem's band of a batch whose keys end at `length`, whatever that is. */
FA_MASK_FUNCTION fa_band fa_band_to_length(fa_band whole, int32_t length) {
  whole.k_end = fa_last(fa_first(length, whole.k_end), 0);
  return whole;
}

/* In all functions below, rows and columns that are asked about do not begin before the band's. They may lie
 * past its end, as those of a kernel's last tile do: for these the inequality above is continued. */

/* The columns that at least one of these rows sees. */
FA_MASK_FUNCTION fa_range fa_band_columns(fa_band band, fa_range rows) {
  const fa_position diagonal = band.k_end - band.q_end;
  fa_range columns = {fa_last(rows.begin + diagonal - band.left, band.k_begin),
                      fa_first(rows.end + diagonal + band.right, band.k_end)};
  return columns;
}

/* The rows that see at least one of these columns. */
FA_MASK_FUNCTION fa_range fa_band_rows(fa_band band, fa_range columns) {
  const fa_position diagonal = band.q_end - band.k_end;
  fa_range rows = {fa_last(columns.begin + diagonal - band.right, band.q_begin),
                   fa_first(columns.end + diagonal + band.left, band.q_end)};
  return rows;
}

/* How far a cell lies from the column beside its row. */
FA_MASK_FUNCTION fa_position fa_band_distance(fa_band band, fa_position row, fa_position column) {
  const fa_position distance = row + band.k_end - band.q_end - column;
  return distance < 0 ? -distance : distance;
}

/* Whether every one of these rows sees every one of these columns. */
FA_MASK_FUNCTION bool fa_band_sees_all(fa_band band, fa_range rows, fa_range columns) {
  const fa_position diagonal = band.k_end - band.q_end;
  return columns.end <= band.k_end && columns.begin >= rows.end - 1 + diagonal - band.left &&
         columns.end - 1 <= rows.begin + diagonal + band.right;
}

/* The band that shows some of a band's rows the same columns; it ends where the last column that they see does.
 */
FA_MASK_FUNCTION fa_band fa_band_of_rows(fa_band band, fa_range rows) {
  const fa_position k_end = fa_band_columns(band, rows).end;
  const fa_position shift = k_end - rows.end - (band.k_end - band.q_end);
  fa_band part = {rows.begin, rows.end, band.k_begin, k_end, band.left + shift, band.right - shift};
  return part;
}

#endif
