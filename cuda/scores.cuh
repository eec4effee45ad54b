// The score's program and its way back: products q·k become scores, invisible scores become -inf, scores become
// probabilities, and dp becomes ds. All kernels take these steps from here; an option that changes a score
// changes this file alone. A place says where the first element of an accumulator lies.
#pragma once

#include "cells.cuh"
#include "schedule.cuh"
#include "tile.cuh"

namespace fa {

constexpr float LOG2_E = 1.44269504088896340736f;

// Whether the kernels of a file take FA_CUDA_NEEDS_EXTREMES. It says so before it includes anything.
#ifdef FA_TAKES_EXTREMES
constexpr bool TAKES_EXTREMES = true;
#else
constexpr bool TAKES_EXTREMES = false;
#endif

// ---- forms of a score, and exponentials ----------------------------------------------------------------

// What scores are in registers. For 16-bit kinds f(q·k): the factor is then part of the one multiply-add before
// exp2. For SCALED kinds, which must be as exact as f32 is, factor * f(q·k): a score minus lse is then exact
// where it matters, near 0, however large both are.

// 2 to the power of (one unit of a score): e.
template <class Kind>
__device__ inline float exponent_of_unit(const fa_cuda_score &score) {
  return Kind::SCALED ? LOG2_E : score.factor * LOG2_E;
}

// What lse is as an argument of exponential. Where it is so large that errors of rounding are exponents above
// 8, it lies above all of them, so that no probability is infinite. It is finite where lse is: a hidden score's
// difference from -inf would be NaN.
template <class Kind>
__device__ inline float row_shift(float lse) {
  if (Kind::SCALED) return lse;
  const float shift = max_nan(lse * LOG2_E, -0x1p127f);
  return fabsf(shift) > 0x1p24f ? fmaf(fabsf(shift), 0x1p-21f, shift) : shift;
}

// exp(score - lse); unit is exponent_of_unit.
template <class Kind>
__device__ inline float exponential(float x, float unit, float shift) {
  return exp2_fast(Kind::SCALED ? (x - shift) * unit : fmaf(x, unit, -shift));
}

// The same, for f32 with what rounding the exponent cuts off: twice as exact, for four more instructions.
template <class Kind>
__device__ inline float exact_exponential(float x, float unit, float shift) {
  if constexpr (Kind::PARTS == 1) return exponential<Kind>(x, unit, shift);
  constexpr float LN_2 = 0.69314718055994530942f;
  const float least = max_nan(x - shift, -200), exponent = least * unit, y = exp2_fast(exponent);
  return fmaf(y, fmaf(least, unit, -exponent) * LN_2, y);
}

// e^x
template <class Kind>
__device__ inline float exp_of(float x) {
  return Kind::SCALED ? expf(x) : exp2_fast(x * LOG2_E);
}

// tanh; for 16-bit kinds to 2e-7 of 1, far below their own rounding, without tanhf's branches. Where a softcap
// may be so large that all are near 0, by its series there.
template <class Kind>
__device__ inline float softcap_tanh(float x) {
  if constexpr (Kind::SCALED) return tanhf(x);
  const float y = 1 - __fdividef(2, 1 + exp2_fast(2 * LOG2_E * x));
  return TAKES_EXTREMES && fabsf(x) < 0.03f ? fmaf(x * x, x * (-1.0f / 3), x) : y;
}

// The derivative of the softcap, from a score; per_cap: from a score to its tanh. An invisible score is -inf.
__device__ inline float softcap_slope(float score, float per_cap) {
  return score == -INFINITY ? 0 : 1 - (score * per_cap) * (score * per_cap);
}
template <class Kind>
__device__ inline float per_softcap(const fa_cuda_score &score) {
  return Kind::SCALED ? 1 / score.factor : 1;
}

// ---- from products to scores -----------------------------------------------------------------------------

// The forms of scores that a kernel takes.
enum Forms { USUAL_FORM, NO_SOFTCAP, ANY_FORM };

// A score with what is thereby known of its form, which ptxas does not know. Where nothing is, it is the score
// itself and no copy, which ptxas would order otherwise.
template <Forms FORMS>
__device__ inline decltype(auto) known_score(const fa_cuda_score &score) {
  if constexpr (FORMS == ANY_FORM) {
    return (score);
  } else {
    fa_cuda_score known = score;
    if (FORMS == USUAL_FORM || score.form != FA_CUDA_SCORE_NEGATED) known.form = FA_CUDA_SCORE_PLAIN;
    return known;
  }
}

// unscale is what to multiply products of scaled operands with, a power of two.
template <class Kind, fa_cuda_score_form FORM>
__device__ inline float finish_score(float x, const fa_cuda_score &score, float unscale) {
  const float outer = Kind::SCALED ? score.factor : 1;
  if (FORM == FA_CUDA_SCORE_SOFTCAP)
    return softcap_tanh<Kind>(score.inner * (Kind::SCALED ? x * unscale : x)) * outer;
  if (FORM == FA_CUDA_SCORE_NEGATED) return x * (-outer * unscale);
  return Kind::SCALED ? x * (outer * unscale) : x;
}

template <class Kind, int MT, int NT>
__device__ inline void finish_scores(Accumulator<MT, NT> &scores, const fa_cuda_score &score, float unscale) {
  if (score.form == FA_CUDA_SCORE_SOFTCAP)
    for_each_element<MT, NT>(
        scores, [&](int, int, float &x) { x = finish_score<Kind, FA_CUDA_SCORE_SOFTCAP>(x, score, unscale); });
  else if (score.form == FA_CUDA_SCORE_NEGATED)
    for_each_element<MT, NT>(
        scores, [&](int, int, float &x) { x = finish_score<Kind, FA_CUDA_SCORE_NEGATED>(x, score, unscale); });
  else if (Kind::SCALED)
    for_each_element<MT, NT>(
        scores, [&](int, int, float &x) { x = finish_score<Kind, FA_CUDA_SCORE_PLAIN>(x, score, unscale); });
}

// Scores that the band does not show become -inf. Groups of columns that all rows see are not tested, nor are
// those from num_columns on, which no row sees and nobody reads. Where there are bands (GENERAL), rows may lie
// outside of theirs, and columns before it.
template <bool GENERAL, int MT, int NT>
__device__ inline void mask_scores(Accumulator<MT, NT> &scores, const fa_band &band, const Place &at,
                                   int num_columns) {
  const int row = at.row, column = at.column;
  if (GENERAL && (row < band.q_begin || row + 16 * MT > band.q_end))
    for_each_element<MT, NT>(scores, [&](int i, int, float &score) {
      if (row + i < band.q_begin || row + i >= band.q_end) score = -INFINITY;
    });
  if (fa_band_columns(band, {row + 16 * MT - 1, row + 16 * MT}).begin > column)
    for_each_element<MT, NT>(scores, [&](int i, int j, float &score) {
      if (column + j < fa_band_columns(band, {row + i, row + i + 1}).begin) score = -INFINITY;
    });
  const int all_see = fa_band_columns(band, {row, row + 1}).end - column;
  if (all_see < NT * 8) {
#pragma unroll
    for (int n = 0; n < NT && (n == 0 || n * 8 < num_columns); n += TILES_A_TEST)
      if (all_see < (n + TILES_A_TEST) * 8)
        for_each_element<MT, NT>(scores, n, min(n + TILES_A_TEST, NT), [&](int i, int j, float &score) {
          if (column + j >= fa_band_columns(band, {row + i, row + i + 1}).end) score = -INFINITY;
        });
  }
}
template <bool GENERAL, int MT, int NT>
__device__ inline void mask_transposed_scores(Accumulator<MT, NT> &scores, const fa_band &band,
                                              const Place &at) {
  for_each_element<MT, NT>(scores, [&](int j, int i, float &score) {
    const Range visible = fa_band_rows(band, {at.column + j, at.column + j + 1});
    if (at.row + i < visible.begin || at.row + i >= visible.end || at.column + j >= band.k_end ||
        (GENERAL && at.column + j < band.k_begin))
      score = -INFINITY;
  });
}

// Whether every one of the rows that are there sees every one of these columns in the band.
template <bool GENERAL>
__device__ inline bool see_all_in_band(const fa_cuda_arguments &a, const fa_band &band, Range rows,
                                       Range columns) {
  if constexpr (GENERAL) rows.end = min(rows.end, a.window.seqlen_q);
  const bool inside =
      !GENERAL || (rows.begin >= band.q_begin && rows.end <= band.q_end && columns.begin >= band.k_begin);
  return inside && fa_band_sees_all(band, rows, columns);
}

// Products of a warp become scores, in place. The warp's accumulator is part of a tile of rows and columns, for
// which one question decides whether elements are tested against the band. TRANSPOSED: rows run along the
// accumulator's columns, and there is no program. None of the warp's rows sees columns from num_columns on.
template <class Kind, bool TRANSPOSED, bool GENERAL, int MT, int NT>
__device__ inline void make_scores_in_band(Accumulator<MT, NT> &scores, const fa_cuda_arguments &a,
                                           const fa_cuda_score &score, const fa_band &band, Range rows,
                                           Range columns, const Place &at, float unscale = 1,
                                           int num_columns = NT * 8) {
  finish_scores<Kind, MT, NT>(scores, score, unscale);
  if constexpr (GENERAL && !TRANSPOSED)
    if (a.program.is_there) add_to_scores<typename Kind::Io>(scores, a, band, at);
  if (see_all_in_band<GENERAL>(a, band, rows, columns)) return;
  if constexpr (TRANSPOSED)
    mask_transposed_scores<GENERAL, MT, NT>(scores, band, at);
  else
    mask_scores<GENERAL, MT, NT>(scores, band, at, num_columns);
}
// The same where there are no bands.
template <class Kind, bool TRANSPOSED, int MT, int NT>
__device__ inline void make_scores(Accumulator<MT, NT> &scores, const fa_cuda_arguments &a,
                                   const fa_cuda_score &score, Range rows, Range columns, const Place &at,
                                   float unscale = 1, int num_columns = NT * 8) {
  make_scores_in_band<Kind, TRANSPOSED, false, MT, NT>(scores, a, score, whole_band(a), rows, columns, at,
                                                       unscale, num_columns);
}

// ---- from scores to probabilities, and from dp to ds -------------------------------------------------------

// The probability of a score, and what dp - delta is multiplied with to make ds: the probability times the
// derivative of the softcap.
struct Probability {
  float p, slope;
};
template <class Kind, bool SOFTCAP>
__device__ inline Probability probability_of(float score, float unit, float shift, float per_cap) {
  const float p = exact_exponential<Kind>(score, unit, shift);
  return {p, SOFTCAP ? p * softcap_slope(score, per_cap) : p};
}

__device__ inline float ds_of(float slope, float dp, float delta) { return slope * (dp - delta); }

// Scores and dp become p and ds, in place. shift, delta: of the accumulator's rows.
template <class Kind, bool SOFTCAP, int MT, int NT>
__device__ inline void make_p_and_ds_of(Accumulator<MT, NT> &p, Accumulator<MT, NT> &ds,
                                        const fa_cuda_score &score, const float *shift, const float *delta) {
  const float unit = exponent_of_unit<Kind>(score), per_cap = per_softcap<Kind>(score);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = m * 16 + half * 8 + threadIdx.x % 32 / 4;
      const float row_shift = shift[row], row_delta = delta[row];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; i++) {
          const Probability it = probability_of<Kind, SOFTCAP>(p[m][n][i], unit, row_shift, per_cap);
          p[m][n][i] = it.p;
          ds[m][n][i] = ds_of(it.slope, ds[m][n][i], row_delta);
        }
    }
}
template <class Kind, int MT, int NT>
__device__ inline void make_p_and_ds(Accumulator<MT, NT> &p, Accumulator<MT, NT> &ds,
                                     const fa_cuda_score &score, const float *shift, const float *delta) {
  if (score.form == FA_CUDA_SCORE_SOFTCAP)
    make_p_and_ds_of<Kind, true, MT, NT>(p, ds, score, shift, delta);
  else
    make_p_and_ds_of<Kind, false, MT, NT>(p, ds, score, shift, delta);
}

// Products and dp become p and ds, in place, where a program acts on scores: row by row, as what is added comes
// between the softcap and the exponential. Those of p that are dropped are 0, and the others are due the
// program's kept_factor. slot: this warp's number among those that share sums.
template <class Kind, int MT, int NT>
__device__ inline void make_p_and_ds_by_program(Accumulator<MT, NT> &p, Accumulator<MT, NT> &ds,
                                                const fa_cuda_arguments &a, const fa_band &band,
                                                const Place &at, const float *shift, const float *delta,
                                                int row_slot, int head_slot) {
  using Io = typename Kind::Io;
  const fa_cuda_program &program = a.program;
  const float unit = exponent_of_unit<Kind>(a.score), per_cap = per_softcap<Kind>(a.score);
  const bool is_capped = a.score.form == FA_CUDA_SCORE_SOFTCAP;
  uint32_t stays[MT];  // a bit an element
  static_assert(NT * 4 <= 32, "a word holds the bits of 16 rows");
#pragma unroll
  for (int m = 0; m < MT; m++) stays[m] = ~0u;
  if (program.dropout_threshold > 0)
    for_each_draw<MT, NT>(
        program,
        [&](int m) {
          return lanes_row_in_memory(a, {at.batch, at.head, at.row + m * 16});
        },
        ColumnsInMemory(program, at.column),
        [&](int m, int n, int i, bool it_stays) {
          if (!it_stays) stays[m] &= ~(1u << (n * 4 + i));
        });
  finish_scores<Kind, MT, NT>(p, a.score, 1);
  HeadSums head_sums;
  BiasGradient<Io, NT> dbias(a, at);
  for_each_row<MT, NT>(p, [&](int m, int half, int own) {
    const int row = at.row + own;
    float slopes[NT][2], of_scores[NT][2];  // of the softcap; the gradient by the scores
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) slopes[n][i] = is_capped ? softcap_slope(p[m][n][half * 2 + i], per_cap) : 1;
    add_to_row<Io>(p[m], half, a, band, at, row);
    const Range seen =
        row < band.q_begin || row >= band.q_end ? Range{0, 0} : fa_band_columns(band, {row, row + 1});
    const Distances distances(band, row, at.column);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float &score = p[m][n][half * 2 + i], &dp = ds[m][n][half * 2 + i];
        const int own_column = n * 8 + threadIdx.x % 4 * 2 + i, column = at.column + own_column;
        const bool is_seen = column >= seen.begin && column < seen.end && score != -INFINITY;
        const bool it_stays = stays[m] >> (n * 4 + half * 2 + i) & 1;
        const float weight = is_seen ? exact_exponential<Kind>(score, unit, shift[own]) : 0;
        of_scores[n][i] = is_seen ? ds_of(weight, it_stays ? dp * program.kept_factor : 0, delta[own]) : 0;
        score = it_stays ? weight : 0;
        dp = of_scores[n][i] * slopes[n][i];
        head_sums.of[FA_CUDA_ALIBI_SLOPES] -= of_scores[n][i] * distances.at(own_column);
      }
    if (program.dbias.data) dbias.take_row(of_scores, row, seen);
  });
  if (program.dbias.data) dbias.finish(row_slot);
  head_sums.add(a, at.batch, at.head, head_slot);
}

// Where transposed scores begin: at 0, or at what makes -shift of them, so that nothing is to be read between
// their product and the exponentials; or there unless a tanh comes between, or a scale near 0 would make it
// infinite.
enum Beginning { AT_ZERO, AT_SHIFT, AT_SHIFT_IF_FINITE };
template <Beginning BEGINNING>
__device__ inline bool begin_at_shift(const fa_cuda_score &score) {
  return BEGINNING == AT_SHIFT || (BEGINNING == AT_SHIFT_IF_FINITE && score.form != FA_CUDA_SCORE_SOFTCAP &&
                                   score.factor >= FA_CUDA_LEAST_SCALE);
}

// What a shift is multiplied with where a transposed product begins at it.
template <class Kind>
__device__ inline float per_shift_of(const fa_cuda_score &score) {
  return (score.form == FA_CUDA_SCORE_NEGATED ? 1 : -1) / exponent_of_unit<Kind>(score);
}

// What all shifts of a step are due: nothing, or a number.
struct NoShiftDue {
  __device__ float2 shifts(float2 of_rows) const { return of_rows; }
  __device__ float2 products(float2 of_rows, float per_shift) const {
    return {of_rows.x * per_shift, of_rows.y * per_shift};
  }
};
struct ShiftDue {
  float due;
  __device__ float2 shifts(float2 of_rows) const { return {of_rows.x + due, of_rows.y + due}; }
  __device__ float2 products(float2 of_rows, float per_shift) const {
    const float own = due * per_shift;
    return {fmaf(of_rows.x, per_shift, own), fmaf(of_rows.y, per_shift, own)};
  }
};

// Numbers of the accumulator's rows in shared memory, of which a lane has two in each column block. The lane's
// place is a part of the address that all of them have, or, unless IS_PLACED, of each: with the one or the
// other ptxas needs fewer instructions.
template <bool IS_PLACED = false>
struct RowNumbers {
  const uint32_t from;
  __device__ explicit RowNumbers(uint32_t rows) : from(IS_PLACED ? rows + threadIdx.x % 4 * 8 : rows) {}
  __device__ float2 operator[](int n) const {
    return load_shared_pair(IS_PLACED ? from + n * 32 : from + (n * 8 + threadIdx.x % 4 * 2) * 4);
  }
};

// What a transposed product begins at; shift: in shared memory, of the accumulator's rows.
template <Beginning BEGINNING, int NT, class Due = NoShiftDue>
__device__ inline void set_to_shift(float (&product)[1][NT][4], const fa_cuda_score &score, float per_shift,
                                    uint32_t shift, const Due &due = Due()) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 of_rows = due.products(RowNumbers(shift)[n], per_shift);
#pragma unroll
    for (int i = 0; i < 4; i++)
      product[0][n][i] = begin_at_shift<BEGINNING>(score) ? (i % 2 ? of_rows.y : of_rows.x) : 0;
  }
}

// Transposed scores become probabilities: take(n, p, slopes) gets them column block by column block of the
// accumulator.
template <class Kind, Beginning BEGINNING = AT_ZERO, int NT, bool IS_PLACED, class Due, class Take>
__device__ inline void make_transposed_p(const float (&scores)[1][NT][4], const fa_cuda_score &score,
                                         RowNumbers<IS_PLACED> shift, const Due &due, Take take) {
  const float unit = exponent_of_unit<Kind>(score);
  const bool is_capped = score.form == FA_CUDA_SCORE_SOFTCAP;
  const float per_cap = BEGINNING != AT_ZERO && !is_capped ? 0 : per_softcap<Kind>(score);
  auto take_all = [&](auto softcap) {
    constexpr bool SOFTCAP = decltype(softcap)::value, SHIFTED = BEGINNING != AT_ZERO && !SOFTCAP;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float2 row_shift = {0, 0};
      if (!SHIFTED) row_shift = due.shifts(shift[n]);
      float p[4], slopes[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Probability it =
            probability_of<Kind, SOFTCAP>(scores[0][n][i], unit, i % 2 ? row_shift.y : row_shift.x, per_cap);
        p[i] = it.p, slopes[i] = it.slope;
      }
      take(n, p, slopes);
    }
  };
  if (BEGINNING == AT_ZERO ? is_capped : !begin_at_shift<BEGINNING>(score))
    take_all(std::true_type());
  else
    take_all(std::false_type());
}
// The same: p becomes an operand times scale; the slopes take the scores' place.
template <class Kind, Beginning BEGINNING = AT_ZERO, int NT, bool IS_PLACED, class Due = NoShiftDue>
__device__ inline void make_transposed_p(float (&scores)[1][NT][4], uint32_t (&operand)[Kind::PARTS][NT / 2][4],
                                         const fa_cuda_score &score, RowNumbers<IS_PLACED> shift,
                                         float scale = 1, const Due &due = Due()) {
  make_transposed_p<Kind, BEGINNING>(
      scores, score, shift, due, [&](int n, const float(&p)[4], const float(&slopes)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++)
          convert_pair<Kind>(operand, n, half, p[half * 2], p[half * 2 + 1], scale);
#pragma unroll
        for (int i = 0; i < 4; i++) scores[0][n][i] = slopes[i];
      });
}

// Transposed dp, to be multiplied with unscale where operands are SCALED, becomes ds; slopes_of(n): what
// make_transposed_p gave of a column block of the accumulator.
template <class Kind, int NT, bool IS_PLACED, class SlopesOf>
__device__ inline void make_transposed_ds(float (&ds)[1][NT][4], SlopesOf slopes_of,
                                          RowNumbers<IS_PLACED> delta, float unscale = 1) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = delta[n];
    const float4 four = slopes_of(n);
    const float slopes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float dp = Kind::SCALED ? ds[0][n][i] * unscale : ds[0][n][i];
      ds[0][n][i] = ds_of(slopes[i], dp, i % 2 ? row_delta.y : row_delta.x);
    }
  }
}

}  // namespace fa
