// From products q·k to probabilities: the score's form, and the online softmax of the forward.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace fa {

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

// f(q·k) of fa_cuda_score, in place.
template <int MT, int NT>
__device__ inline void apply_score_form(Accumulator<MT, NT> &scores, const fa_cuda_score &score) {
  if (score.form == FA_CUDA_SCORE_PLAIN) return;
  const bool softcap = score.form == FA_CUDA_SCORE_SOFTCAP;
  for_each_element<MT, NT>(scores, [&](int, int, float &x) { x = softcap ? tanhf(score.inner * x) : -x; });
}

// The score of products of scaled operands: 2^-exponent times what it was.
__device__ inline fa_cuda_score unscaled_score(fa_cuda_score score, int exponent) {
  const float unscale = power_of_two(-exponent);
  (score.form == FA_CUDA_SCORE_SOFTCAP ? score.inner : score.factor) *= unscale;
  return score;
}

// The largest and the sum over the four lanes that share a row of an accumulator.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The running maximum (in units of the scores) and sum of exponentials (this lane's share) of each row.
// Exponentials are 2^SHIFT times what they were, for kinds whose probabilities are scaled.
template <int MT, int SHIFT>
struct OnlineSoftmax {
  float max[MT][2], sum[MT][2];

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      max[m][0] = max[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0;
    }
  }

  // Turns a block of scores into exponentials against the new maximum and brings o to it.
  template <int NT, int DT>
  __device__ void update(Accumulator<MT, NT> &scores, float factor, Accumulator<MT, DT> &o) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float largest = max[m][half];
        float block = scores[m][0][half * 2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) block = fmaxf(block, scores[m][n][half * 2 + i]);
        largest = fmaxf(largest, row_max(block));
        const float reference = largest == -INFINITY ? 0 : largest;  // no -inf - -inf
        const float rescale = exp2_fast((max[m][half] - reference) * factor);
        const float shift = SHIFT - reference * factor;
        max[m][half] = largest;
        float total = sum[m][half] * rescale;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float &x = scores[m][n][half * 2 + i];
            x = exp2_fast(fmaf(x, factor, shift));
            total += x;
          }
        sum[m][half] = total;
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) o[m][n][half * 2 + i] *= rescale;
      }
  }

  // Ends the sums, with the sinks of a head in them. Returns what to multiply o with, and the row's lse.
  __device__ float2 finish(int m, int half, float factor, const float *sink, int num_sinks, int sink_stride) {
    const float total = row_sum(sum[m][half]);
    const float own = max[m][half] * factor;
    float largest = own;
    for (int t = 0; t < num_sinks; t++) largest = fmaxf(largest, sink[int64_t(t) * sink_stride] * LOG2_E);
    if (largest == -INFINITY) return {0, -INFINITY};
    const float rescale = exp2f(own - largest - SHIFT);
    float sum_all = total * rescale;
    for (int t = 0; t < num_sinks; t++) sum_all += exp2f(sink[int64_t(t) * sink_stride] * LOG2_E - largest);
    return {rescale / sum_all, fmaf(largest, LN_2, logf(sum_all))};
  }
};

}  // namespace fa
