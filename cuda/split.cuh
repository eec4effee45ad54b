// f32 tensors as scaled sums of f16, which teams of threads make.
#pragma once

#include "operand.cuh"

namespace fa {

// A team copies FA_CUDA_SCALE_ROWS rows of a head at a time. LANES share a row, eight numbers each; a thread
// has parts of four rows, so that as many loads are under way.
template <int LANES>
struct SplitTeam {
  static constexpr int ROWS_AT_ONCE = FA_CUDA_SPLIT_ROWS, PASSES = FA_CUDA_SCALE_ROWS / ROWS_AT_ONCE,
                       THREADS = LANES * ROWS_AT_ONCE;
  using Numbers = float[PASSES][8];

  const int number = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
  int turn = 0;

  __device__ int row(int pass) const { return thread / LANES + pass * ROWS_AT_ONCE; }
  __device__ int column() const { return thread % LANES * 8; }
  __device__ void meet() const { barrier<THREADS>(1 + number); }

  // ALIGNED: see load_eight. Rows that are not there are 0.
  template <bool ALIGNED>
  __device__ void load(Numbers &x, const fa_cuda_split &t, const ScaledRows &rows, int head_dim) const {
    const float *from =
        tensor_row<const float>(t.from, rows.batch, rows.head, rows.first_row + row(0)) + column();
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++, from += ROWS_AT_ONCE * t.from.stride_row)
      load_eight<ALIGNED>(x[pass], from, rows.first_row + row(pass) < t.seqlen ? head_dim - column() : 0);
  }

  // Writes the scale and the parts of what the team has loaded. Stores other than those that are the first to
  // leave the cache take four times as long.
  __device__ void put(const Numbers &x, const fa_cuda_split &t, const ScaledRows &rows, int num_parts) {
    const fa_cuda_operand &to = t.to;
    const int exponent = scaling_exponent(largest(x));
    const float scale = power_of_two(exponent);
    if (thread == 0) *exponent_at(to, rows.batch, rows.head, rows.first_row) = exponent;
    if (column() >= to.num_cols) return;
    uint16_t *first = const_cast<uint16_t *>(to.data) + rows.batch * to.stride_batch +
                      rows.head * to.stride_head + (rows.first_row + row(0)) * to.stride_row + column();
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++, first += ROWS_AT_ONCE * to.stride_row) {
      if (rows.first_row + row(pass) >= t.seqlen) break;
      uint4 parts[2];
      split_eight<kinds::f32>(parts, x[pass], scale);
#pragma unroll
      for (int part = 0; part < 2; part++)
        if (part < num_parts) __stcs(reinterpret_cast<uint4 *>(first + part * to.stride_part), parts[part]);
    }
  }

  template <bool ALIGNED>
  __device__ void copy(const fa_cuda_splits &a, const fa_cuda_split &t, const ScaledRows &rows) {
    Numbers x;
    load<ALIGNED>(x, t, rows, a.head_dim);
    put(x, t, rows, a.num_parts);
  }

 private:
  // The largest finite magnitude of all that the team has, as bits. Those of a turn may still be read in the
  // next one.
  __device__ uint32_t largest(const Numbers &x) {
    __shared__ uint32_t maxima[2][32];  // of each warp of the block
    uint32_t bits = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) bits = largest_finite(x[pass], bits);
    bits = __reduce_max_sync(~0u, bits);
    turn ^= 1;
    if (threadIdx.x % 32 == 0) maxima[turn][threadIdx.x / 32] = bits;
    meet();
    return __reduce_max_sync(~0u, maxima[turn][number * LANES + threadIdx.x % LANES]);
  }
};

}  // namespace fa
