// Here is the online softmax of the forward.
#pragma once

#include "scores.cuh"

namespace fa {

// These give the largest and the sum over the four lanes that share a row of an accumulator.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Each row has a reference maximum, in units of the scores, and the sum of exponentials against it, of which
// this lane has a share. For kinds whose probabilities are scaled, convert() and the like scale them later.
//
// The reference need not be the true maximum: as long as no score is more than 2^MAX_LAG above it, nothing
// overflows and the quotient at the end is the same. So it is moved, and o with it, only when some row needs
// it, which after the first few blocks is seldom.
constexpr int MAX_LAG = 5;
// What a lane may add up of a block's exponentials, and so the most that one of them can be; f16 holds more.
constexpr float MOST_ADDED = 1024;

// What all scores of a lane's rows are due beside what they are: nothing.
struct NothingDue {};

// LARGE: scores may be so large that a reference's product with their unit is rounded by exponents that matter,
// as masks of large numbers make them. Such a row's are compared with the reference first.
template <class Kind, int MT, bool LARGE = TAKES_EXTREMES && !Kind::SCALED>
struct OnlineSoftmax {
  float max[MT][2], sum[MT][2];
  float rescale[MT][2];  // o is to be multiplied with it after an update that moved the reference

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      max[m][0] = max[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0;
    }
  }

  // Turns a block of scores into exponentials; none of the rows sees columns from num_columns on. The result is
  // true where the reference has moved: then o is due a rescale_rows.
  // due: float[MT][2], or NothingDue.
  template <int NT, class Due = NothingDue>
  __device__ bool update(Accumulator<MT, NT> &scores, float unit, int num_columns = NT * 8,
                         const Due &due = NothingDue()) {
    constexpr bool SOME_DUE = !std::is_same<Due, NothingDue>::value;
    // Visits scores of columns that some row sees, by groups.
    auto for_each_visible = [&](auto visit) {
#pragma unroll
      for (int begin = 0; begin < NT && (begin == 0 || begin * 8 < num_columns); begin += TILES_A_TEST)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = begin; n < begin + TILES_A_TEST && n < NT; n++)
#pragma unroll
              for (int i = 0; i < 2; i++) visit(m, half, scores[m][n][half * 2 + i]);
    };
    float largest[MT][2], shift[MT][2];
    bool lags = false, large = false;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) largest[m][half] = scores[m][0][half * 2];
    for_each_visible([&](int m, int half, float &x) { largest[m][half] = fmaxf(largest[m][half], x); });
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if constexpr (SOME_DUE) largest[m][half] += due[m][half];
        lags |= (largest[m][half] - max[m][half]) * unit > MAX_LAG;  // -inf and -inf make it false
      }
    lags = __any_sync(~0u, lags);
    if (lags) {
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) move_reference(m, half, row_max(largest[m][half]), unit);
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float reference = max[m][half] == -INFINITY ? 0 : max[m][half];  // -inf - -inf would be NaN
        shift[m][half] = Kind::SCALED ? reference : reference * unit;
        if constexpr (SOME_DUE) shift[m][half] = less_due(shift[m][half], due[m][half], unit);
        large |= is_large(shift[m][half]);
      }
    if (LARGE && __builtin_expect(__any_sync(~0u, large), 0)) {
      for_each_visible([&](int m, int half, float &x) {
        if (is_large(shift[m][half])) x -= max[m][half];
      });
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          if (is_large(shift[m][half])) {
            shift[m][half] = 0;
            if constexpr (SOME_DUE) shift[m][half] = less_due(0, due[m][half], unit);
          }
    }
    for_each_visible([&](int m, int half, float &x) {
      x = exponential<Kind>(x, unit, shift[m][half]);
      sum[m][half] += x;
    });
#pragma unroll
    for (int begin = TILES_A_TEST; begin < NT; begin += TILES_A_TEST)
      if (begin * 8 >= num_columns)
        for_each_element<MT, NT>(scores, begin, min(begin + TILES_A_TEST, NT),
                                 [](int, int, float &x) { x = 0; });
#pragma unroll
    for (int m = 0; m < MT; m++)  // the compiler would add them up later, when the exponentials are done
#pragma unroll
      for (int half = 0; half < 2; half++) forget(sum[m][half]);
    return lags;
  }

  // What exponential takes off where a score is due something.
  __device__ static float less_due(float shift, float due, float unit) {
    return Kind::SCALED ? shift - due : fmaf(-due, unit, shift);
  }
  __device__ static bool is_large(float shift) { return fabsf(shift) > 0x1p24f; }

  // The same against the references as they are, without a look for the largest score, which its exponential
  // gives away: false where one is too large, or the first that a row sees. Then nothing has changed but the
  // scores, which are lost.
  template <int NT, class Due = NothingDue>
  __device__ bool follow(Accumulator<MT, NT> &scores, float unit, const Due &due = NothingDue()) {
    float shift[MT][2], added[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // With this one whatever is seen has an infinite exponential.
        shift[m][half] = max[m][half] == -INFINITY ? -1e30f : max[m][half] * unit;
        if constexpr (!std::is_same<Due, NothingDue>::value)
          shift[m][half] = less_due(shift[m][half], due[m][half], unit);
        added[m][half] = 0;
      }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[m][n][i] = exponential<Kind>(scores[m][n][i], unit, shift[m][i / 2]);
          added[m][i / 2] += scores[m][n][i];
        }
    bool follows = true;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        forget(added[m][half]);
        follows &= !(added[m][half] > MOST_ADDED);
        if (LARGE) follows &= !(is_large(shift[m][half]) && max[m][half] > -INFINITY);
      }
    if (__builtin_expect(!__all_sync(~0u, follows), 0)) return false;
#pragma unroll
    for (int m = 0; m < MT; m++) sum[m][0] += added[m][0], sum[m][1] += added[m][1];
    return true;
  }

  __device__ void move_reference(int m, int half, float largest, float unit) {
    largest = fmaxf(largest, max[m][half]);
    rescale[m][half] = largest == -INFINITY ? 1 : exp2_fast((max[m][half] - largest) * unit);
    max[m][half] = largest;
    sum[m][half] *= rescale[m][half];
  }

  template <int DT>
  __device__ void rescale_rows(Accumulator<MT, DT> &o) const {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) o[m][n][half * 2 + i] *= rescale[m][half];
  }

  // Ends the sums, with the sinks of a head in them, and gives what to multiply o with and the rows' lse.
  __device__ void finish(float (&scale)[MT][2], float (&lse)[MT][2], const fa_cuda_score &score,
                         const float *sink, int num_sinks, int sink_stride) {
    float own[MT][2], rescale[MT][2], total[MT][2];
    auto for_each_row = [](auto visit) {
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) visit(m, half);
    };
    for_each_row([&](int m, int half) {
      total[m][half] = row_sum(sum[m][half]);
      lse[m][half] = own[m][half] = Kind::SCALED ? max[m][half] : max[m][half] * score.factor;
    });
#pragma unroll 1
    for (int t = 0; t < num_sinks; t++)
      for_each_row(
          [&](int m, int half) { lse[m][half] = fmaxf(lse[m][half], sink[int64_t(t) * sink_stride]); });
    for_each_row([&](int m, int half) {
      if (lse[m][half] == -INFINITY) lse[m][half] = 0;  // the sum is 0, or the NaN that a score was
      rescale[m][half] = exp_of<Kind>(own[m][half] - lse[m][half]);
      total[m][half] *= rescale[m][half];
    });
#pragma unroll 1
    for (int t = 0; t < num_sinks; t++)
      for_each_row([&](int m, int half) {
        total[m][half] += exp_of<Kind>(sink[int64_t(t) * sink_stride] - lse[m][half]);
      });
    for_each_row([&](int m, int half) {
      const float sum_all = total[m][half];  // 0 where nothing is seen, whose logarithm is -inf
      if constexpr (Kind::SCALED) {
        scale[m][half] = sum_all == 0 ? 0 : rescale[m][half] / sum_all;
        lse[m][half] += logf(sum_all);
      } else {
        scale[m][half] = sum_all == 0 ? 0 : __fdividef(rescale[m][half], sum_all);
        lse[m][half] += __logf(sum_all);
      }
    });
  }
};

// Writes the lse of an accumulator's rows, of which num_rows are there.
template <int MT>
__device__ inline void store_lse(float *to, const float (&lse)[MT][2], int num_rows) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = m * 16 + half * 8 + threadIdx.x % 32 / 4;
      if (threadIdx.x % 4 == 0 && row < num_rows) to[row] = lse[m][half];
    }
}

}  // namespace fa
