// The backward pass of f32 on Hopper: operands are scaled sums of f16 parts (see kinds.cuh), and every step's
// products go into a fresh accumulator and from there, by ordinary additions, into dk and dv. Column blocks,
// transposed scores and the warps around the consumers are those of hopper_backward.cu. Unlike there, consumers
// never wait for each other: each multiplies its own 64 columns' ds with their k, transposed too, and sends
// this share of dq on its own. ds, which only its consumer reads, lies where that share is written afterwards.
//
// In the terms of flash_attention.h, of one step (a row block) and a consumer's columns:
//   s^T = k q^T   dp^T = v dout^T   p^T = exp(s^T - lse)   ds^T = p^T * (dp^T - delta)
//   dv += p^T dout   dk += ds^T q   dq^T += k^T ds^T
//
// Compiled once for every scaled kind: -DFA_KIND=f32 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// A row of the table; none of it changes results by more than rounding. The consumers' warps come first.
// Registers are per thread: together they are what the block has, 168 for each.
template <int HEAD_DIM, int BLOCK_Q>
struct BackwardShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, num_consumers = 2, block_k = num_consumers * 64;
  static constexpr int num_warps = num_consumers * 4, num_threads = (num_consumers + 1) * WARPGROUP;
  static constexpr int consumer_registers = 240, other_registers = 24;
};

// Shared memory: k, v; two stages of q and dout, with shift and delta; ds and then dq of each consumer; a word
// for each of their warps; exponents of what is full; barriers; two numbers of column blocks.
template <class Kind_, class Shape_>
struct BackwardBuffers {
  using Kind = Kind_;
  using Shape = Shape_;
  static constexpr int STAGES = 2, DQ_SHARES = Shape::num_consumers, WRITERS = 0;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  using DsTile = BoxTile<Shape::block_q, 64>;
  static constexpr int Q_BYTES = Kind::PARTS * QTile::BYTES, K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int ROW_BYTES = Shape::block_q * 4, DQ_BYTES = Shape::block_q * Shape::head_dim * 4;
  static constexpr int V_AT = K_BYTES, Q_AT = V_AT + K_BYTES, DOUT_AT = Q_AT + STAGES * Q_BYTES;
  static constexpr int DQ_AT = DOUT_AT + STAGES * Q_BYTES, SHIFT_AT = DQ_AT + DQ_SHARES * DQ_BYTES;
  static constexpr int DELTA_AT = SHIFT_AT + STAGES * ROW_BYTES, WORDS_AT = DELTA_AT + STAGES * ROW_BYTES;
  static constexpr int EXPONENTS_AT = WORDS_AT + Shape::num_warps * 4;
  static constexpr int BARRIERS_AT = EXPONENTS_AT + DQ_SENT * STAGES * 4;
  static constexpr int BLOCKS_AT = BARRIERS_AT + NUM_BARRIER_KINDS * STAGES * 8, BYTES = BLOCKS_AT + STAGES * 4;
  static_assert(Kind::PARTS * DsTile::BYTES <= DQ_BYTES, "ds lies where dq is written");

  uint32_t base;
  __device__ uint32_t k() const { return base; }
  __device__ uint32_t v() const { return base + V_AT; }
  __device__ uint32_t q(int stage) const { return base + Q_AT + stage * Q_BYTES; }
  __device__ uint32_t dout(int stage) const { return base + DOUT_AT + stage * Q_BYTES; }
  __device__ uint32_t dq(int consumer) const { return base + DQ_AT + consumer * DQ_BYTES; }
  __device__ uint32_t shift(int stage) const { return base + SHIFT_AT + stage * ROW_BYTES; }
  __device__ uint32_t delta(int stage) const { return base + DELTA_AT + stage * ROW_BYTES; }
  __device__ uint32_t words(int consumer) const { return base + WORDS_AT + consumer * 16; }
  __device__ uint32_t exponent(int full, int stage = 0) const {
    return base + EXPONENTS_AT + (full * STAGES + stage) * 4;
  }
  __device__ uint32_t block(int stage) const { return base + BLOCKS_AT + stage * 4; }
  __device__ uint32_t barrier(int kind, int stage = 0) const {
    return base + BARRIERS_AT + (kind * STAGES + stage) * 8;
  }

  __device__ void init_barriers() const {
    for (int kind = 0; kind < NUM_BARRIER_KINDS; kind++)
      for (int stage = 0; stage < STAGES; stage++)
        barrier_init(
            barrier(kind, stage),
            kind < K_EMPTY ? 1 : ARRIVALS_OF_WARP * (Shape::num_warps + (kind == BLOCK_EMPTY) * DQ_SHARES));
    barrier_init_done();
  }
};

// In hardware, beside DQ_WRITTEN of each share: the warps of a consumer meet.
constexpr int CONSUMER_MEETS = DQ_WRITTEN + 2;

// The exponent by which a consumer scales its ds.
template <int NT>
__device__ inline int exponent_of_largest(const float (&ds)[1][NT][4], uint32_t words, int consumer) {
  float largest = 0;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(ds[0][n][i]));
  const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) store_shared(words + threadIdx.x / 32 % 4 * 4, bits);
  named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);
  const float4 all = load_shared_four(words);
  return scaling_exponent(__float_as_uint(fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w))));
}

// dq^T [head_dim, block_q] of a consumer: 64 rows a product, 16 of them a warp. In memory, as it comes from
// registers.
template <class Shape>
struct DqTransposed {
  static constexpr int MT = Shape::head_dim / 64, NT = Shape::block_q / 8;

  __device__ static int warp() { return threadIdx.x / 32 % 4; }
  // Of product m's column block n in this lane.
  __device__ static int offset(int m, int n) {
    return ((warp() * MT + m) * NT + n) * 128 + threadIdx.x % 32 * 4;
  }
};

template <class Kind, class Shape>
__device__ inline void consume(const fa_cuda_arguments &a, BackwardBuffers<Kind, Shape> buffers, int consumer) {
  using Buffers = BackwardBuffers<Kind, Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = DqTransposed<Shape>;
  using Io = typename Kind::Io;
  constexpr int NT = Shape::block_q / 8, DT = Shape::head_dim / 8, CHUNKS = DT / NT;
  constexpr int Q_STEPS = Shape::block_q / 16, D_STEPS = Shape::head_dim / 16;
  constexpr int P_EXPONENT = SCALED_EXPONENT;
  static_assert(FA_CUDA_GROUP % Shape::block_q == 0 && FA_CUDA_GROUP % Shape::block_k == 0,
                "one scale a block");

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[1][DT][4], dv[1][DT][4], scores[1][NT][4], ds[1][NT][4], fresh[Dq::MT][NT][4];
  uint32_t p_operand[Kind::PARTS][Q_STEPS][4], ds_operand[Kind::PARTS][Q_STEPS][4];

  // Counts from which stages and phases follow: column blocks, those with something to do, and steps.
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  auto start_scores = [&] {
    barrier_wait(buffers.barrier(Q_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS, true>(scores[0], BoxOperand<KTile, true>(buffers.k(), consumer * 64),
                                  BoxOperand<QTile, true>(buffers.q(steps % 2)), false);
  };
  auto start_dp = [&] {
    barrier_wait(buffers.barrier(DOUT_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS>(ds[0], BoxOperand<KTile, true>(buffers.v(), consumer * 64),
                            BoxOperand<QTile, true>(buffers.dout(steps % 2)), false);
  };
  // What a step adds to dv, and then to dk, comes in chunks of block_q columns, by turns in the registers of
  // dq's products.
  const Never never = {a.batch < 0};
  auto start_chunk = [&](int i, int stage) {
    float(&product)[NT][4] = fresh[i % Dq::MT];
    const BoxOperand<QTile, false> rows(i < CHUNKS ? buffers.dout(stage) : buffers.q(stage),
                                        i % CHUNKS * Shape::block_q);
    if (i < Dq::MT)
      multiply<Kind, Q_STEPS>(product, p_operand, rows, false);
    else if (i < CHUNKS)
      multiply<Kind, Q_STEPS>(product, p_operand, rows, never);
    else
      multiply<Kind, Q_STEPS>(product, ds_operand, rows, never);
  };
  auto add_chunk = [&](float(&sum)[1][DT][4], int i, float unscale) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float &x = sum[0][i % CHUNKS * NT + n][j];
        x = fmaf(unscale, fresh[i % Dq::MT][n][j], x);
      }
  };
  auto start_dq = [&] {
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
      multiply<Kind, 4>(fresh[m], BoxOperand<KTile, false>(buffers.k() + consumer * 64 * 128, m * 64),
                        BoxOperand<DsTile, true>(buffers.dq(consumer)), false);
  };
  auto finish_dq = [&](float unscale) {
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);  // nobody reads ds any more
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fresh[m][n][i] * unscale;
        store_shared(buffers.dq(consumer) + Dq::offset(m, n) * 4, x);
      }
  };
  auto hand_over_dq = [&] {
    fence_async();
    named_barrier_arrive(DQ_WRITTEN + consumer, WARPGROUP + 32);
  };
  auto exponent = [&](int full, int stage = 0) { return int(load_shared_word(buffers.exponent(full, stage))); };

  // Finds the scores there and dp running, and leaves the same of the next step.
  auto do_step = [&](int q_block, int first_column, bool is_first, auto is_last) {
    constexpr bool IS_LAST = decltype(is_last)::value;
    const Range rows = block_range(q_block, Shape::block_q, a.window.seqlen_q);
    const int stage = steps % 2;
    forget(buffers.base);  // or every address in this step is kept in a register
    finish_scores<Kind, 1, NT>(scores, a.score, power_of_two(-exponent(Q_FULL, stage) - exponent(K_FULL)));
    if (!is_first) hand_over_dq();  // of the step before; now the fence has nothing to wait for
    if (!is_fully_visible(a.window, rows, first_column, 64))
      mask_transposed_scores<1, NT>(scores, a.window, rows.begin, first_column + warp_row);
    if (a.score.form == FA_CUDA_SCORE_SOFTCAP)
      probabilities<Kind, true>(scores, p_operand, a.score, buffers.shift(stage), 1 << P_EXPONENT);
    else
      probabilities<Kind, false>(scores, p_operand, a.score, buffers.shift(stage), 1 << P_EXPONENT);
    wgmma_wait<0>(ds[0]);
#pragma unroll
    for (int i = 0; i < Dq::MT; i++) start_chunk(i, stage);
    const int exponent_dout = exponent(DOUT_FULL, stage);
    finish_ds<Kind>(ds, scores, buffers.delta(stage), power_of_two(-exponent_dout - exponent(V_FULL)));
    if (IS_LAST) arrive_once(buffers.barrier(V_EMPTY));
    const int exponent_ds = exponent_of_largest(ds, buffers.words(consumer), consumer);
    convert<Kind>(ds_operand, ds, power_of_two(exponent_ds));
    barrier_wait(buffers.barrier(DQ_SENT, consumer), (steps + 1) % 2);  // of the step before
#pragma unroll
    for (int part = 0; part < Kind::PARTS; part++)
      store_transposed<DsTile>(buffers.dq(consumer) + part * DsTile::BYTES, warp_row, 0, ds_operand[part]);
    fence_async();
    const float of_dv = power_of_two(-P_EXPONENT - exponent_dout);
    const float of_dk = power_of_two(-exponent_ds - exponent(Q_FULL, stage));
    steps++;
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
      const int left = 2 * CHUNKS - 1 - i;
      wgmma_wait(left < Dq::MT ? left + !IS_LAST : Dq::MT - 1, fresh[i % Dq::MT]);
      if (i == CHUNKS - 1) {
        registers_in_use(p_operand);
        arrive_once(buffers.barrier(DOUT_EMPTY, stage));
      }
      if (i < CHUNKS)
        add_chunk(dv, i, of_dv);
      else
        add_chunk(dk, i, of_dk);
      if (left >= Dq::MT) start_chunk(i + Dq::MT, stage);
      if (left == Dq::MT && !IS_LAST) start_scores();
    }
    registers_in_use(ds_operand);
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);  // all of ds is there
    start_dq();
    if constexpr (!IS_LAST) start_dp();
    wgmma_wait<!IS_LAST>(scores[0]);
#pragma unroll
    for (int m = 0; m < Dq::MT; m++) registers_in_use(fresh[m]);
    finish_dq(power_of_two(-exponent_ds - exponent(K_FULL)));
    if constexpr (IS_LAST) {
      hand_over_dq();
      arrive_once(buffers.barrier(K_EMPTY));
    }
  };

  Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    set_zero<1, DT>(dk);
    set_zero<1, DT>(dv);
    if (work.num_steps > 0) {
      barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
      start_scores();
      barrier_wait(buffers.barrier(V_FULL), busy_blocks % 2);
      start_dp();
      wgmma_wait<1>(scores[0]);
      busy_blocks++;
      const int first_column = work.columns.begin + consumer * 64;
      int q_block = work.q_blocks.end - 1;
      for (int steps_left = work.num_steps - 1; steps_left > 0; steps_left--) {
        do_step(q_block, first_column, steps_left == work.num_steps - 1, std::false_type());
        q_block = next_step({0, q_block}, work.q_blocks).q_block;
      }
      do_step(q_block, first_column, work.num_steps == 1, std::true_type());
    }
    current_work(a, buffers, blocks, work);  // again, and not in registers all the time
    const int column = work.columns.begin + consumer * 64 + warp_row;
    store_accumulator<Io, 1, DT>(row_of<Io>(a.dv, work.block.batch, work.block.kv_head, column),
                                 a.dv.stride_row, work.columns.end - column, a.head_dim, dv, 1);
    store_accumulator<Io, 1, DT>(row_of<Io>(a.dk, work.block.batch, work.block.kv_head, column),
                                 a.dk.stride_row, work.columns.end - column, a.head_dim, dk, a.scale);
  }
}

// As many blocks of threads as there are multiprocessors.
template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    backward(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const BackwardBuffers<Kind, Shape> buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers();
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32), share = warp - Shape::num_warps - 1;
  if (warp >= Shape::num_warps) {
    give_registers<Shape::other_registers>();
    if (share >= 0 && share < Shape::num_consumers) send_dq(a, buffers, share);
    if (threadIdx.x == Shape::num_warps * 32) produce(a, maps, buffers);
  } else {
    take_registers<Shape::consumer_registers>();
    consume(a, buffers, warp / 4);
  }
}

// One block of a warpgroup a row block of a head: dq = scale * dq_sum.
template <class Kind, class Shape>
__global__ void __launch_bounds__(WARPGROUP) finish_dq_transposed(const __grid_constant__ fa_cuda_arguments a) {
  using Dq = DqTransposed<Shape>;
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
      const float4 x = *reinterpret_cast<const float4 *>(dq_sum + Dq::offset(m, n));
      dq[m][n][0] = x.x, dq[m][n][1] = x.y, dq[m][n][2] = x.z, dq[m][n][3] = x.w;
    }
  Io *to = row_of<Io>(a.dq, batch, head, rows.begin);
  for_each_element<Dq::MT, Dq::NT>(dq, [&](int i, int row, float &x) {
    const int d = i / 16 * 64 + Dq::warp() * 16 + i % 16;
    if (rows.begin + row < rows.end && d < a.head_dim) to[row * a.dq.stride_row + d] = a.scale * x;
  });
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  return backward_row<BackwardBuffers<Kind, Shape>>(name, (const void *)backward<Kind, Shape>,
                                                    (const void *)finish_dq_transposed<Kind, Shape>, WARPGROUP);
}

}  // namespace hopper
}  // namespace fa

#define ROW(rest, ...)                                                                                       \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>>("cuda/sm90/" FA_QUOTE(FA_KIND) \
                                                                                  rest)

// A consumer's thread needs head_dim registers (dk, dv), 32 for the fresh product, and block_q times 1 (scores,
// dp) and 0.5 a part (p or ds) for its arrays. Shared memory, KiB, of two parts: 160 and 224.
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_, FA_KIND)[] = {
    // bucket, block_q
    ROW("/d64", 64, 64),
    ROW("/d128", 128, 32),
    {},
};
