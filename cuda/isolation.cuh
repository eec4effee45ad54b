// What a row does not see does not reach it, NaN and infinities included. Tensor cores multiply whole blocks: a
// cell that is not visible has weight 0 there, and 0 times what is not finite is NaN. Where that may have
// happened, what is NaN is made again by one warp, cell by cell, from those alone that are visible, until it is
// NaN again: at the end of a tile; when the warp has taken its last tile, of whose rows it has left notes; or
// by a small kernel behind one that has noted a suspicion. That is for tensors that hold garbage, and as slow
// as it is plain.
//
//     o[i] = sum over j of keep * exp(s - lse) * v[j] / sum over j and sinks of exp(s - lse)
//     dq[i] = scale * sum over j of ds * k[j]     dk[j] = scale * sum over i of ds * q[i]
//     dv[j] = sum over i of keep * p * dout[i]    p = exp(s - lse), ds = p * (keep * dp - delta) * slope
#pragma once

#include "operand.cuh"
#include "scores.cuh"

namespace fa {

// A number that is NaN if a lane's elements of an accumulator have one: multiply-adds of two at a time find it.
// If they overflow, NaN is suspected where there is none, which is slow but not wrong.
template <int MT, int NT>
__device__ inline float sum_of_products(const float (&acc)[MT][NT][4]) {
  float sums[4] = {};
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float &sum = sums[n % 2 * 2 + half];
        sum = fmaf(acc[m][n][half * 2], acc[m][n][half * 2 + 1], sum);
      }
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}
__device__ inline void note_suspect(const fa_cuda_arguments &a) { *a.suspect = a.call; }
// By a warp: notes that its results have a NaN.
template <int MT, int NT>
__device__ inline void note_nan(const fa_cuda_arguments &a, const float (&results)[MT][NT][4]) {
  if (a.suspect && __any_sync(~0u, isnan(sum_of_products(results)))) note_suspect(a);
}

// ---- a cell ------------------------------------------------------------------------------------------------

template <class Io>
__device__ inline float dot(const Io *x, const Io *y, int count) {
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

// The score of a cell that the band shows, in natural units and as exact as SCALED kinds are, from its product
// of unscaled operands; slope: of the softcap.
struct CellScore {
  float score, slope;
};
template <class Io>
__device__ inline CellScore score_of_cell(const fa_cuda_arguments &a, const fa_band &band, const Place &at,
                                          float product, bool bounded) {
  using Kind = kinds::f32;
  CellScore cell = {0, 1};
  if (a.score.form == FA_CUDA_SCORE_SOFTCAP) {
    cell.score = finish_score<Kind, FA_CUDA_SCORE_SOFTCAP>(product, a.score, 1);
    cell.slope = softcap_slope(cell.score, per_softcap<Kind>(a.score));
  } else if (a.score.form == FA_CUDA_SCORE_NEGATED) {
    cell.score = finish_score<Kind, FA_CUDA_SCORE_NEGATED>(product, a.score, 1);
  } else {
    cell.score = finish_score<Kind, FA_CUDA_SCORE_PLAIN>(product, a.score, 1);
  }
  const fa_cuda_program &program = a.program;
  if (!program.is_there) return cell;
  cell.score *= program.factor;
  const float slope = number_of_head(program, FA_CUDA_ALIBI_SLOPES, at, 0);
  if (program.of_heads[FA_CUDA_ALIBI_SLOPES].data)
    cell.score = fmaf(-slope, Distances(band, at.row, at.column).at(0), cell.score);
  if (program.bias.data)
    with_type<Io>(program.bias.dtype, [&](auto type) {
      const auto *numbers = numbers_of<const decltype(type)>(program.bias, at.batch, at.head, at.row);
      const float number = static_cast<float>(numbers[at.column]);
      cell.score = with_addend(cell.score, bounded ? bounded_number(number) : number);
    });
  return cell;
}

// What dropout multiplies what follows from a visible score with; what is dropped is 0, whatever it was.
__device__ inline float keep_of_cell(const fa_cuda_arguments &a, const Place &at) {
  const fa_cuda_program &program = a.program;
  if (!program.is_there || program.dropout_threshold == 0) return 1;
  const fa_dropout dropout = dropout_of(program, at.batch, at.head);
  return fa_dropout_keeps(dropout, program.first_row + at.row, at.column) ? program.kept_factor : 0;
}

__device__ inline float kept(float x, float keep) { return keep == 0 ? 0 : x * keep; }

// What the backward has of a cell, where that is there for its row.
struct CellGradient {
  float p, of_score, of_product;  // p: with what dropout makes of it
};
template <class Io>
__device__ inline bool gradient_of_cell(const fa_cuda_arguments &a, const fa_band &band, const Place &at,
                                        CellGradient &cell) {
  const Sequence s = sequence_of(a, at.batch);
  const int kv_head = kv_head_of(a, at.head);
  const float lse = *lse_at(a, s, at.head, at.row);
  if (lse == -INFINITY) return false;
  const CellScore it = score_of_cell<Io>(a, band, at,
                                         dot(row_of<const Io>(a.q_rows, s, at.head, at.row),
                                             column_of<const Io>(a.k_rows, s, kv_head, at.column), a.head_dim),
                                         is_bounded<Io>(a, lse));
  if (it.score == -INFINITY) return false;
  const float p = expf(it.score - lse), keep = keep_of_cell(a, at);
  const float dp = dot(row_of<const Io>(a.dout_rows, s, at.head, at.row),
                       column_of<const Io>(a.v_rows, s, kv_head, at.column), a.head_dim);
  const float delta = delta_of(a, {at.batch, at.head, at.row});
  const float of_score = ds_of(p, kept(dp, keep), delta);
  cell = {kept(p, keep), of_score, of_score * it.slope};
  return true;
}

// ---- a row of a result -------------------------------------------------------------------------------------

// A sum of rows of up to HEAD_DIM numbers: each of the warp's lanes has every 32nd.
template <int HEAD_DIM>
struct RowSum {
  static constexpr int COUNT = (HEAD_DIM + 31) / 32;
  const int head_dim;
  float x[COUNT] = {};

  __device__ explicit RowSum(int head_dim) : head_dim(head_dim) {}
  template <class Visit>
  __device__ void for_each(Visit visit) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int d = i * 32 + threadIdx.x % 32;
      if (d < head_dim) visit(d, x[i]);
    }
  }
  template <class Io>
  __device__ void add(float weight, const Io *row) {
    for_each([&](int d, float &sum) { sum = fmaf(weight, static_cast<float>(row[d]), sum); });
  }
  template <class Io>
  __device__ void store(Io *to, float scale) {
    for_each([&](int d, float &sum) { store_number(to + d, sum * scale); });
  }
  // Nothing that is added changes it any more.
  __device__ bool is_lost() {
    bool lost = true;
    for_each([&](int, float &sum) { lost &= isnan(sum); });
    return __all_sync(~0u, lost);
  }
};

template <class Io>
__device__ inline bool row_has_nan(const Io *row, int head_dim) {
  bool found = false;
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) found |= isnan(static_cast<float>(row[d]));
  return __any_sync(~0u, found);
}

// What lanes vote on is the same for a whole warp to ptxas, too. A vote or a shuffle where lanes might have
// parted makes it keep for each lane what a kernel that calls this holds for the warp.
__device__ inline bool all_say(bool it_is_so) { return __all_sync(~0u, it_is_so); }

// Goes through a range 32 at a time: a lane asks make(i) whether the i-th is there, and all lanes take(i, lane)
// those that are, which this lane made. Stops where is_lost().
template <class Make, class Take, class IsLost>
__device__ inline void for_each_there(Range range, Make make, Take take, IsLost is_lost) {
#pragma unroll 1
  for (int first = range.begin; all_say(first < range.end) && !is_lost(); first += 32) {
    const int mine = first + int(threadIdx.x) % 32;
    const bool is_there = mine < range.end && make(mine);
#pragma unroll 1
    for (uint32_t left = __ballot_sync(~0u, is_there); left; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      take(first + lane, lane);
    }
  }
}

// Calls visit with each of the bands that the kernel goes through.
template <class Visit>
__device__ inline void for_each_band(const fa_cuda_arguments &a, int batch, Visit visit) {
#pragma unroll 1
  for (int number = 0; all_say(number < num_bands_of(a)); number++) visit(band_at(a, batch, number));
}

// A row of o as it is made again: from those of `columns` that the bands show it. for_bands(visit) calls visit
// with each of these; key_at and value_at say where k and v of a column lie, NULL where they count as 0.
template <class Kind, int HEAD_DIM, class ForBands, class KeyAt, class ValueAt>
struct RowOfO {
  using Io = typename Kind::Io;
  const fa_cuda_arguments &a;
  Place at;
  const Range columns;
  const Io *const q;
  ForBands for_bands;
  KeyAt key_at;
  ValueAt value_at;
  bool bounded = false;  // whether a bias of keys is

  __device__ float score(const fa_band &band, int column) {
    at.column = column;
    const Io *key = key_at(column);
    return score_of_cell<Io>(a, band, at, key ? dot(q, key, a.head_dim) : 0, bounded).score;
  }
  template <class Make, class Take, class IsLost>
  __device__ void for_each_column(Make make, Take take, IsLost is_lost) {
    for_bands([&](const fa_band &band) {
      for_each_there(
          overlap(seen_in_band<true>(band, {at.row, at.row + 1}), columns),
          [&](int column) { return make(score(band, column)); }, take, is_lost);
    });
  }
  template <class Visit>
  __device__ void for_each_sink(Visit visit) const {
    for (int t = 0; t < a.num_sinks; t++) visit(a.sink[int64_t(t) * a.num_heads + at.head]);
  }

  // The largest score, sinks among them, or NaN if one is.
  __device__ float largest() {
    float largest = -INFINITY;
    for_each_sink([&](float sink) { largest = max_nan(largest, sink); });
    for_each_column([&](float score) { return largest = max_nan(largest, score), false; }, [](int, int) {},
                    [&] { return __any_sync(~0u, isnan(largest)); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = max_nan(largest, __shfl_xor_sync(~0u, largest, step));
    return largest;
  }

  // Writes o; reference: lse, or another number about as large. Returns lse.
  template <class Out>
  __device__ float store(Out *to, float reference) {
    RowSum<HEAD_DIM> sum(a.head_dim);
    float total = 0, weight = 0;
    for_each_column(
        [&](float score) {
          if (score == -INFINITY) return false;
          weight = expf(score - reference);
          total += weight;
          weight = kept(weight, keep_of_cell(a, at));
          return true;
        },
        [&](int column, int lane) {
          const float of_column = __shfl_sync(~0u, weight, lane);
          if (const Io *value = value_at(column)) sum.add(of_column, value);
        },
        [&] { return sum.is_lost(); });
    total = warp_sum(total);
    if (reference != -INFINITY) for_each_sink([&](float sink) { total += expf(sink - reference); });
    sum.store(to, total == 0 ? 0 : __fdividef(1, total));
    return reference + logf(total);
  }

  // By a warp that sees what was written of o and lse: makes both again where o has a NaN that need not be its
  // own. A NaN that is shows in lse; but of SCALED kinds infinite operands, whose parts are NaN, do so too, and
  // hidden keys where a number that was added hides them, which leaves a NaN what it is (adds_up).
  template <class Out>
  __device__ void mend(Out *to, float *lse, bool adds_up) {
    if (!row_has_nan(to, a.head_dim)) return;
    float reference = *lse;
    const bool was_right = all_say(reference < INFINITY);
    if (!was_right && (Kind::SCALED || adds_up)) reference = largest();
    if (!all_say(reference < INFINITY)) return;
    bounded = was_right && bounds_numbers<Io>(a);
    const float lse_again = store(to, reference);
    if (!was_right && threadIdx.x % 32 == 0) *lse = lse_again;
  }
};
template <class Kind, int HEAD_DIM, class ForBands, class KeyAt, class ValueAt>
__device__ inline auto row_of_o(const fa_cuda_arguments &a, const Place &at, Range columns,
                                const typename Kind::Io *q, ForBands for_bands, KeyAt key_at,
                                ValueAt value_at) {
  return RowOfO<Kind, HEAD_DIM, ForBands, KeyAt, ValueAt>{a, at, columns, q, for_bands, key_at, value_at};
}

// Mends those of a tile's rows that have a NaN; columns: what of these may be visible. By one warp, which sees
// what was written of o and lse; batch_out: as these have it. This is called, so that the rest of a kernel is
// compiled as if it were not there; ptxas leaves it so because of the reference.
struct RowsToMend {
  int batch, batch_out, head;
  Range rows, columns;
};
template <class Kind, class Out, int HEAD_DIM, bool FOLDS>
__device__ __noinline__ void mend_rows(const fa_cuda_arguments &a, const RowsToMend &mine) {
  using Io = typename Kind::Io;
  const Sequence s = sequence_of(a, mine.batch), out = sequence_of(a, mine.batch_out);
  const int head = mine.head, kv_head = kv_head_of(a, head);
  for (int row = mine.rows.begin; all_say(row < min(mine.rows.end, s.num_rows())); row++) {
    auto mended = row_of_o<Kind, HEAD_DIM>(
        a, {mine.batch, head, row, 0}, mine.columns, row_of<const Io>(a.q_rows, s, head, row),
        [&](auto visit) { for_each_band(a, mine.batch, visit); },
        [&](int column) { return column_of<const Io>(a.k_rows, s, kv_head, column); },
        [&](int column) { return column_of<const Io>(a.v_rows, s, kv_head, column); });
    mended.mend(row_of<Out>(a.o, out, head, row), lse_at(a, out, head, row), FOLDS && a.program.keys.terms);
  }
}

// ---- notes of rows to mend ----------------------------------------------------------------------------------

// Rows belong to the warp that wrote them: another might find garbage there that is still to be overwritten. So
// a note bears who left it, beside the call, and goes when it is read.
__device__ inline int64_t own_note(const fa_cuda_arguments &a) {
  return int64_t(a.call) << 32 | (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
}
__device__ inline int sixteen_rows_at(const fa_cuda_arguments &a, int batch, int head, int row) {
  return (batch * a.num_heads + head) * (a.padded_rows / 16) + row / 16;
}

// Mends the rows that this warp has left notes of. A function that is called, as mend_rows is.
template <class Kind, class Out, int HEAD_DIM, bool FOLDS>
__device__ __noinline__ void mend_noted_rows(const fa_cuda_arguments &a) {
  const int64_t note = own_note(a);
  const int a_head = a.padded_rows / 16;
  for_each_there(
      {0, a.batch * a.num_heads * a_head},
      [&](int at) {
        const bool is_own = a.notes[at] == note;
        if (is_own) a.notes[at] = 0;
        return is_own;
      },
      [&](int at, int) {
        const int row = at % a_head * 16, batch = at / a_head / a.num_heads;
        const Range columns = {0, sequence_of(a, batch).num_columns()};
        mend_rows<Kind, Out, HEAD_DIM, FOLDS>(
            a, {batch, batch, at / a_head % a.num_heads, {row, row + 16}, columns});
      },
      [] { return false; });
}

}  // namespace fa
