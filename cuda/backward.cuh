// What the backward kernels share: who takes which column block, dq summed in memory, and the small kernels
// before and after the main one.
#pragma once

#include "mask.cuh"
#include "operand.cuh"
#include "softmax.cuh"

namespace fa {

// ---- the order of work ---------------------------------------------------------------------------

// Which column block of which head, of all of them in the order in which they are begun: those of a few heads
// in turn, the first column blocks first, because with a causal mask they have the most to do. Or the same of
// other blocks, head_blocks of each key/value head.
struct BlockIndex {
  int k_block, kv_head, batch;
};
__device__ inline BlockIndex block_of(const fa_cuda_arguments &a, int index, int head_blocks) {
  const int first = index / (a.heads_at_once * head_blocks) * a.heads_at_once;
  const int num_heads = min(a.heads_at_once, a.batch * a.num_kv_heads - first);
  index -= first * head_blocks;
  const int batch_head = first + index % num_heads, block = index / num_heads;
  return {block, batch_head % a.num_kv_heads, batch_head / a.num_kv_heads};
}

// A step of a column block is one row block of one head of its group; (heads, then row blocks).
struct Step {
  int head, q_block;
};
__device__ inline Step next_step(Step step, Range q_blocks) {
  return step.q_block > q_blocks.begin ? Step{step.head, step.q_block - 1}
                                       : Step{step.head + 1, q_blocks.end - 1};
}
// The one that comes so many after a head's first.
__device__ inline Step step_after(Step first, int count, Range q_blocks) {
  const int num_q_blocks = q_blocks.end - q_blocks.begin;
  return {first.head + count / num_q_blocks, first.q_block - count % num_q_blocks};
}
// The row block's place among all of them.
__device__ inline int64_t position_of(const fa_cuda_arguments &a, int batch, Step step) {
  return (int64_t(batch) * a.num_heads + step.head) * a.num_q_blocks + step.q_block;
}
// How many column blocks add to a row block's dq before this one does.
__device__ inline int turn_of(const fa_cuda_window &w, Range rows, int k_block, int block_k) {
  return k_block - blocks_of(visible_columns(w, rows), block_k).begin;
}

// How num_warps warps, `down` of them along the rows, share out a product [rows, columns].
template <int ROWS, int COLUMNS, int NUM_WARPS_, int DOWN>
struct Share {
  static constexpr int NUM_WARPS = NUM_WARPS_, ACROSS = NUM_WARPS / DOWN;
  static constexpr int WARP_ROWS = ROWS / DOWN, WARP_COLUMNS = COLUMNS / ACROSS;
  static constexpr int MT = WARP_ROWS / 16, NT = WARP_COLUMNS / 8;
  static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0, "a warp has whole fragments");
  __device__ static int row() { return threadIdx.x / 32 % DOWN * WARP_ROWS; }
  __device__ static int column() { return threadIdx.x / 32 / DOWN * WARP_COLUMNS; }
};

// The derivative of the softcap, from a score; per_cap: from a score to its tanh. An invisible score is -inf.
__device__ inline float softcap_slope(float score, float per_cap) {
  return score == -INFINITY ? 0 : 1 - (score * per_cap) * (score * per_cap);
}
template <class Kind>
__device__ inline float per_softcap(const fa_cuda_score &score) {
  return Kind::SCALED ? 1 / score.factor : 1;
}

// ---- dq in memory: four elements of an accumulator block in each lane ------------------------------

template <class Shape>
using DqShare = Share<Shape::block_q, Shape::head_dim, Shape::num_warps, Shape::dq_warps>;

// A row block's sum.
template <class Shape>
__device__ inline float *dq_sum_of(const fa_cuda_arguments &a, int position) {
  return a.dq_sum + int64_t(position % a.num_sums) * (Shape::block_q * Shape::head_dim);
}

// Where element i of block [m, n] of this lane lies in a row block's part of dq_sum: such that a warp's
// instruction touches consecutive memory.
template <class Share>
__device__ inline int dq_offset(int m, int n) {
  const int block = (threadIdx.x / 32 * Share::MT + m) * Share::NT + n;
  return (block * 32 + threadIdx.x % 32) * 4;
}

__device__ inline void add_four(float *to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) atomicAdd(to + i, x[i]);
#endif
}

// Deterministic: each row block is added to by one column block after the other. One thread waits for the turn,
// and one passes it on when all additions have been made; so does who only wants to know that they are. RELAXED
// is for who has a fence between the look and what it allows, or between the additions and the pass.
template <bool RELAXED = false>
__device__ inline int look_at_turn(const int32_t *turns) {
  int now;
  if (RELAXED)
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
  else
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
  return now;
}
__device__ inline void wait_for_turn(const int32_t *turns, int turn) {
  while (look_at_turn(turns) < turn) continue;
}
template <bool RELAXED = false>
__device__ inline void pass_turn(int32_t *turns) {
  if (RELAXED)
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
  else
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}
__device__ inline void fence_turns() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Writes what the threads of a row block have of dq.
template <int ROWS, int COLUMNS, int NUM_WARPS, int DOWN, class Io, int MT, int NT>
__device__ inline void store_dq(Share<ROWS, COLUMNS, NUM_WARPS, DOWN> share, Io *to, int64_t stride_row,
                                int num_rows, int num_cols, Accumulator<MT, NT> &dq, float scale) {
  store_accumulator<Io, MT, NT>(to + share.row() * stride_row + share.column(), stride_row,
                                num_rows - share.row(), num_cols - share.column(), dq, scale);
}

// One block a row block of a head: dq = scale * dq_sum.
template <class Kind, class Shape, class Dq = DqShare<Shape>>
__global__ void __launch_bounds__(Dq::NUM_WARPS * 32) finish_dq(const __grid_constant__ fa_cuda_arguments a) {
  using Io = typename Kind::Io;
  const int q_block = blockIdx.x % a.num_q_blocks;
  const int head = blockIdx.x / a.num_q_blocks % a.num_heads, batch = blockIdx.x / a.num_q_blocks / a.num_heads;
  const Range rows = block_range(q_block, Shape::block_q, a.window.seqlen_q);
  const float *dq_sum = a.dq_sum + int64_t(blockIdx.x) * (Shape::block_q * Shape::head_dim);
  float dq[Dq::MT][Dq::NT][4];
#pragma unroll
  for (int m = 0; m < Dq::MT; m++)
#pragma unroll
    for (int n = 0; n < Dq::NT; n++) {
      const float4 x = *reinterpret_cast<const float4 *>(dq_sum + dq_offset<Dq>(m, n));
      dq[m][n][0] = x.x, dq[m][n][1] = x.y, dq[m][n][2] = x.z, dq[m][n][3] = x.w;
    }
  store_dq(Dq(), row_of<Io>(a.dq, batch, head, rows.begin), a.dq.stride_row, rows.end - rows.begin, a.head_dim,
           dq, a.scale);
}

// ---- delta = dot(o, dout) and shift --------------------------------------------------------------

// A lane for every eight columns of a row; every row of the padded arrays is written, and dq_sum set to 0 for
// the first row blocks.
template <class Kind, class Shape>
__global__ void __launch_bounds__(FA_CUDA_SMALL_KERNEL_THREADS)
    statistics(const __grid_constant__ fa_cuda_arguments a) {
  using Io = typename Kind::Io;
  constexpr int LANES = Shape::head_dim / 8;
  const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES, row = index % a.padded_rows;
  const int64_t batch_head = index / a.padded_rows;
  const int head = batch_head % a.num_heads, batch = batch_head / a.num_heads;
  const bool inside = batch < a.batch && row < a.window.seqlen_q;
  float sum = 0;
  if (inside) {
    float o[8], dout[8];
    load_eight(o, row_of<const Io>(a.o, batch, head, row) + lane * 8, a.head_dim - lane * 8);
    load_eight(dout, row_of<const Io>(a.dout_rows, batch, head, row) + lane * 8, a.head_dim - lane * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(o[i], dout[i], sum);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (batch >= a.batch) return;
  const bool summed = index / Shape::block_q < a.num_sums;
  if (summed) {
    float4 *dq_sum = reinterpret_cast<float4 *>(a.dq_sum + index * Shape::head_dim);
    dq_sum[lane] = dq_sum[lane + LANES] = make_float4(0, 0, 0, 0);
  }
  if (lane != 0) return;
  if (summed && index % Shape::block_q == 0) a.dq_turns[index / Shape::block_q] = 1;
  const float lse = inside ? a.lse[batch_head * a.window.seqlen_q + row] : -INFINITY;
  a.delta[index] = sum;
  a.shift[index] = lse == -INFINITY ? INFINITY : row_shift<Kind>(lse);
}

}  // namespace fa
