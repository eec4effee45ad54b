// The backward pass on Hopper. A block of threads stays on its multiprocessor and takes column blocks, one
// after another: block_k columns of one key/value head, and all row blocks that see them, in every query head
// of the group. Scores and dp are computed transposed, [block_k, block_q], 64 columns a consumer warpgroup, so
// that p and ds feed dv and dk from the registers they are in; only for dq, which sums over all columns, ds
// goes through shared memory. A producer warp copies row blocks ahead of the consumers, another adds their dq
// to its sum in memory (see backward.cuh), and two make dq of that.
//
// In the terms of flash_attention.h, of one step (a row block) and transposed where it says ^T:
//   s^T = k q^T   dp^T = v dout^T   p^T = exp(s^T - lse)   ds^T = p^T * (dp^T - delta)
//   dv += p^T dout   dk += ds^T q   dq += ds k
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// A row of the table; none of it changes results by more than rounding. The consumers' warps come first.
// Registers are per thread: together they are what the block has, 168 for each.
template <int HEAD_DIM, int BLOCK_Q>
struct BackwardShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, num_consumers = 2, block_k = num_consumers * 64;
  static constexpr int num_warps = num_consumers * 4, dq_warps = block_q / 16;  // see DqShare
  static constexpr int num_threads = (num_consumers + 1) * WARPGROUP;
  static constexpr int consumer_registers = 240, other_registers = 24;
};

// Shared memory: k, v; two stages of q and dout, with shift and delta, and of ds; dq as it is in memory; of
// each writer, a part of dq's sum and what becomes of it; barriers; two numbers of column blocks.
template <class Kind_, class Shape_>
struct BackwardBuffers {
  using Kind = Kind_;
  using Shape = Shape_;
  static constexpr int STAGES = 2, DQ_SHARES = 1, WRITERS = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  using DsTile = BoxTile<Shape::block_q, Shape::block_k>;
  using PartTile = BoxTile<32, 64>;
  static constexpr int ROW_BYTES = Shape::block_q * 4, DQ_BYTES = Shape::block_q * Shape::head_dim * 4;
  static constexpr int PART_BYTES = 2 * PartTile::BYTES;
  static constexpr int V_AT = KTile::BYTES, Q_AT = V_AT + KTile::BYTES, DOUT_AT = Q_AT + STAGES * QTile::BYTES;
  static constexpr int DS_AT = DOUT_AT + STAGES * QTile::BYTES, DQ_AT = DS_AT + STAGES * DsTile::BYTES;
  static constexpr int SUM_AT = DQ_AT + DQ_BYTES, PART_AT = SUM_AT + WRITERS * PART_BYTES;
  static constexpr int SHIFT_AT = PART_AT + WRITERS * PartTile::BYTES, DELTA_AT = SHIFT_AT + STAGES * ROW_BYTES;
  static constexpr int BARRIERS_AT = DELTA_AT + STAGES * ROW_BYTES;
  static constexpr int BLOCKS_AT = BARRIERS_AT + NUM_BARRIER_KINDS * STAGES * 8, BYTES = BLOCKS_AT + STAGES * 4;

  uint32_t base;
  __device__ uint32_t k() const { return base; }
  __device__ uint32_t v() const { return base + V_AT; }
  __device__ uint32_t q(int stage) const { return base + Q_AT + stage * QTile::BYTES; }
  __device__ uint32_t dout(int stage) const { return base + DOUT_AT + stage * QTile::BYTES; }
  __device__ uint32_t ds(int stage) const { return base + DS_AT + stage * DsTile::BYTES; }
  __device__ uint32_t dq(int = 0) const { return base + DQ_AT; }
  __device__ uint32_t sum(int writer) const { return base + SUM_AT + writer * PART_BYTES; }
  __device__ uint32_t part(int writer) const { return base + PART_AT + writer * PartTile::BYTES; }
  __device__ uint32_t shift(int stage) const { return base + SHIFT_AT + stage * ROW_BYTES; }
  __device__ uint32_t delta(int stage) const { return base + DELTA_AT + stage * ROW_BYTES; }
  __device__ uint32_t block(int stage) const { return base + BLOCKS_AT + stage * 4; }
  __device__ uint32_t barrier(int kind, int stage = 0) const {
    return base + BARRIERS_AT + (kind * STAGES + stage) * 8;
  }

  __device__ void init_barriers() const {
    for (int kind = 0; kind < NUM_BARRIER_KINDS; kind++)
      for (int stage = 0; stage < STAGES; stage++)
        barrier_init(barrier(kind, stage),
                     kind < K_EMPTY ? 1 : ARRIVALS_OF_WARP * (Shape::num_warps + (kind == BLOCK_EMPTY)));
    barrier_init_done();
  }
};

template <class Kind, class Shape>
__device__ inline void consume(const fa_cuda_arguments &a, BackwardBuffers<Kind, Shape> buffers, int consumer) {
  using Buffers = BackwardBuffers<Kind, Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = DqShare<Shape>;
  using Io = typename Kind::Io;
  constexpr int NT = Shape::block_q / 8, DT = Shape::head_dim / 8;
  constexpr int Q_STEPS = Shape::block_q / 16, K_STEPS = Shape::block_k / 16, D_STEPS = Shape::head_dim / 16;
  static_assert(Dq::MT == 1, "one product of a warpgroup");

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[1][DT][4], dv[1][DT][4], scores[1][NT][4], ds[1][NT][4], dq[1][Dq::NT][4];
  uint32_t p_operand[1][Q_STEPS][4], ds_operand[1][Q_STEPS][4];

  // Counts from which stages and phases follow: column blocks, those with something to do, and steps.
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  auto start_scores = [&] {
    barrier_wait(buffers.barrier(Q_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS>(scores[0], BoxOperand<KTile, true>(buffers.k(), consumer * 64),
                            BoxOperand<QTile, true>(buffers.q(steps % 2)), false);
  };
  auto start_dp = [&] {
    barrier_wait(buffers.barrier(DOUT_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS>(ds[0], BoxOperand<KTile, true>(buffers.v(), consumer * 64),
                            BoxOperand<QTile, true>(buffers.dout(steps % 2)), false);
  };
  auto start_dq = [&](uint32_t step) {
    const int stage = step % 2;
    barrier_wait(buffers.barrier(DS_FULL, stage), step / 2 % 2);
    multiply<Kind, K_STEPS>(dq[0],
                            BoxOperand<DsTile, true>(buffers.ds(stage), Dq::ACROSS == 1 ? consumer * 64 : 0),
                            BoxOperand<KTile, false>(buffers.k(), Dq::ACROSS == 1 ? 0 : consumer * 64), false);
  };
  auto finish_dq = [&](uint32_t step) {
    arrive_once(buffers.barrier(DS_EMPTY, step % 2));
    barrier_wait(buffers.barrier(DQ_SENT), (step + 1) % 2);  // the one before
#pragma unroll
    for (int n = 0; n < Dq::NT; n++) store_shared(buffers.dq() + dq_offset<Dq>(0, n) * 4, dq[0][n]);
    fence_async();
    named_barrier_arrive(DQ_WRITTEN, Shape::num_consumers * WARPGROUP + 32);
  };

  // Finds the scores there and dp running, and leaves the same of the next step. dq is a step behind, so that
  // the consumers need not wait for each other's ds: while one finishes its scores, the other multiplies. (With
  // more running across the loop's end, ptxas gives up running products in the background.) A step that is
  // alone in its column block counts as the last one and multiplies its own dq twice: with an instance of its
  // own for it, ptxas keeps numbers of the loop in memory.
  auto do_step = [&](int q_block, int first_column, auto is_first, auto is_last, bool alone = false) {
    constexpr bool IS_FIRST = decltype(is_first)::value, IS_LAST = decltype(is_last)::value;
    const Range rows = block_range(q_block, Shape::block_q, a.window.seqlen_q);
    const int stage = steps % 2;
    forget(buffers.base);  // or every address in this step is kept in a register
    finish_scores<Kind, 1, NT>(scores, a.score);
    if (!is_fully_visible(a.window, rows, first_column, 64))
      mask_transposed_scores<1, NT>(scores, a.window, rows.begin, first_column + warp_row);
    if (a.score.form == FA_CUDA_SCORE_SOFTCAP)
      probabilities<Kind, true>(scores, p_operand, a.score, buffers.shift(stage));
    else
      probabilities<Kind, false>(scores, p_operand, a.score, buffers.shift(stage));
    wgmma_wait<0>(ds[0]);
    if (IS_LAST) arrive_once(buffers.barrier(V_EMPTY));
    multiply<Kind, Q_STEPS>(dv[0], p_operand, BoxOperand<QTile, false>(buffers.dout(stage)), true);
    finish_ds<Kind>(ds, scores, buffers.delta(stage));
    convert<Kind>(ds_operand, ds);
    multiply<Kind, Q_STEPS>(dk[0], ds_operand, BoxOperand<QTile, false>(buffers.q(stage)), true);
    wgmma_wait<1>(dv[0], p_operand);
    arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    barrier_wait(buffers.barrier(DS_EMPTY, stage), steps / 2 % 2 ^ 1);
    store_transposed<DsTile>(buffers.ds(stage), consumer * 64 + warp_row, 0, ds_operand[0]);
    fence_async();
    arrive_once(buffers.barrier(DS_FULL, stage));

    if constexpr (!IS_FIRST) start_dq(steps - !alone);
    steps++;
    if constexpr (!IS_LAST) start_scores();
    wgmma_wait<!IS_LAST>(dk[0], dq[0], ds_operand);
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    if (!IS_FIRST && !alone) finish_dq(steps - 2);
    if constexpr (!IS_LAST) {
      start_dp();
      wgmma_wait<1>(scores[0]);
    } else {
      start_dq(steps - 1);
      wgmma_wait<0>(dq[0]);
      arrive_once(buffers.barrier(K_EMPTY));
      finish_dq(steps - 1);
    }
  };

  Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    set_zero<1, DT>(dk);
    set_zero<1, DT>(dv);
    if (work.num_steps > 0) {
      using True = std::true_type;
      using False = std::false_type;
      barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
      start_scores();
      barrier_wait(buffers.barrier(V_FULL), busy_blocks % 2);
      start_dp();
      wgmma_wait<1>(scores[0]);
      busy_blocks++;
      const int first_column = work.columns.begin + consumer * 64;
      int q_block = work.q_blocks.end - 1, steps_left = work.num_steps - 1;
      const bool alone = steps_left == 0;
      if (!alone) {
        do_step(q_block, first_column, True(), False());
        for (;;) {
          q_block = next_step({0, q_block}, work.q_blocks).q_block;
          if (--steps_left == 0) break;
          do_step(q_block, first_column, False(), False());
        }
      }
      do_step(q_block, first_column, False(), True(), alone);
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
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= Shape::num_warps) {
    give_registers<Shape::other_registers>();
    if (warp == Shape::num_warps + 1) send_dq(a, buffers);
    if (warp > Shape::num_warps + 1) write_dq<Kind>(a, maps, buffers, warp - Shape::num_warps - 2);
    if (threadIdx.x == Shape::num_warps * 32) produce(a, maps, buffers);
  } else {
    take_registers<Shape::consumer_registers>();
    consume(a, buffers, warp / 4);
  }
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  return backward_row<BackwardBuffers<Kind, Shape>>(name, (const void *)backward<Kind, Shape>);
}

}  // namespace hopper
}  // namespace fa

#define ROW(rest, ...)                                                                                       \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>>("cuda/sm90/" FA_QUOTE(FA_KIND) \
                                                                                  rest)

// A consumer's thread needs head_dim registers (dk, dv) and 1.25 * block_q (scores, dp and p) for its arrays.
// Shared memory, KiB: 216 each.
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_, FA_KIND)[] = {
    // bucket, block_q
    ROW("/d64", 64, 128),
    ROW("/d128", 128, 64),
    {},
};
