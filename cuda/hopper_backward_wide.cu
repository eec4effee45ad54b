// The backward pass on Hopper for wide heads, whose dk and dv take most of the registers of two warpgroups.
// What hopper_backward.cu does in every consumer is divided by kind here, so that each of the five products of
// a step is made once and reads as little shared memory as it can, and none waits for another warpgroup's
// arithmetic: one warpgroup has s, p and dv, one dp, ds and dk, and a third has dq. They hand each other p and
// ds through shared memory, and are steps apart from each other at will. The rest is as there.
//
//   scores:  s^T = k q^T     p^T = exp(s^T - lse)           dv += p^T dout
//   ds:      dp^T = v dout^T   ds^T = p^T * (dp^T - delta)    dk += ds^T q
//   dq:      dq += ds k
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// The warpgroups, in order, and the registers of their threads: together 512, what the block has.
enum { DQ_GROUP, SCORES_GROUP, DS_GROUP, PRODUCER_GROUP, NUM_GROUPS };

template <int HEAD_DIM>
struct WideShape {
  static constexpr int head_dim = HEAD_DIM, block_q = 64, block_k = 64;
  static constexpr int num_warps = 4, dq_warps = 4;  // see DqShare: those that have dq, which come first
  static constexpr int dq_columns = 64;              // of a product
  static constexpr int num_threads = NUM_GROUPS * WARPGROUP;
  static constexpr int dq_registers = 72, main_registers = 192, producer_registers = 56;
};

// More barriers in shared memory: the scores' warps have written p, and those of ds have read it; it is the
// turn of dq, and it has been added.
enum { P_FULL = NUM_BARRIER_KINDS, P_EMPTY, DQ_TURN, DQ_ADDED, NUM_WIDE_BARRIER_KINDS };

// Shared memory: k, v; two stages of q and dout, with shift and delta, and of ds; p in f32, each thread's own;
// barriers; two numbers of column blocks.
template <class Kind_, class Shape_>
struct WideBuffers {
  using Kind = Kind_;
  using Shape = Shape_;
  static constexpr int STAGES = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  using DsTile = BoxTile<Shape::block_q, Shape::block_k>;
  static constexpr int ROW_BYTES = Shape::block_q * 4, P_BYTES = Shape::block_q * Shape::block_k * 4;
  static constexpr int V_AT = KTile::BYTES, Q_AT = V_AT + KTile::BYTES, DOUT_AT = Q_AT + STAGES * QTile::BYTES;
  static constexpr int DS_AT = DOUT_AT + STAGES * QTile::BYTES, P_AT = DS_AT + STAGES * DsTile::BYTES;
  static constexpr int SHIFT_AT = P_AT + P_BYTES, DELTA_AT = SHIFT_AT + STAGES * ROW_BYTES;
  static constexpr int BARRIERS_AT = DELTA_AT + STAGES * ROW_BYTES;
  static constexpr int BLOCKS_AT = BARRIERS_AT + NUM_WIDE_BARRIER_KINDS * STAGES * 8;
  static constexpr int BYTES = BLOCKS_AT + STAGES * 4;

  uint32_t base;
  __device__ uint32_t k() const { return base; }
  __device__ uint32_t v() const { return base + V_AT; }
  __device__ uint32_t q(int stage) const { return base + Q_AT + stage * QTile::BYTES; }
  __device__ uint32_t dout(int stage) const { return base + DOUT_AT + stage * QTile::BYTES; }
  __device__ uint32_t ds(int stage) const { return base + DS_AT + stage * DsTile::BYTES; }
  __device__ uint32_t p() const { return base + P_AT + threadIdx.x % WARPGROUP * 16; }
  __device__ uint32_t shift(int stage) const { return base + SHIFT_AT + stage * ROW_BYTES; }
  __device__ uint32_t delta(int stage) const { return base + DELTA_AT + stage * ROW_BYTES; }
  __device__ uint32_t block(int stage) const { return base + BLOCKS_AT + stage * 4; }
  __device__ uint32_t barrier(int kind, int stage = 0) const {
    return base + BARRIERS_AT + (kind * STAGES + stage) * 8;
  }

  // Who arrives: mostly the warps of one group or of two; of the last group single threads.
  __device__ static int arrivals(int kind, bool deterministic) {
    switch (kind) {
      case K_EMPTY:
      case Q_EMPTY:
      case DOUT_EMPTY: return ARRIVALS_OF_WARP * 8;
      case BLOCK_EMPTY: return ARRIVALS_OF_WARP * 12 + (deterministic ? 3 : 1);
      case DQ_TURN: return 2;
      default: return kind < K_EMPTY ? 1 : ARRIVALS_OF_WARP * 4;
    }
  }
  __device__ void init_barriers(bool deterministic) const {
    for (int kind = 0; kind < NUM_WIDE_BARRIER_KINDS; kind++)
      for (int stage = 0; stage < STAGES; stage++)
        barrier_init(barrier(kind, stage), arrivals(kind, deterministic));
    barrier_init_done();
  }
};

// ---- the loop of two groups --------------------------------------------------------------------------

// Goes through column blocks: make(), when k or v is there, for the first step, then every step with its row
// block and the first column. In two halves of head_dim, `sum`, times scale, goes to the tensor.
template <class Kind, class Buffers, class Make, class DoStep, int DT>
__device__ inline void consume_blocks(const fa_cuda_arguments &a, const Buffers &buffers, int full, Make make,
                                      DoStep do_step, float (&sum)[2][1][DT][4], const fa_tensor &tensor,
                                      float scale) {
  using Io = typename Kind::Io;
  uint32_t blocks = 0, busy_blocks = 0;
  Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    set_zero<1, DT>(sum[0]);
    set_zero<1, DT>(sum[1]);
    if (work.num_steps > 0) {
      barrier_wait(buffers.barrier(full), busy_blocks % 2);
      make();
      busy_blocks++;
      const int first_column = work.columns.begin;
      int q_block = work.q_blocks.end - 1;
      for (int steps_left = work.num_steps - 1; steps_left > 0; steps_left--) {
        do_step(q_block, first_column, std::false_type());
        q_block = next_step({0, q_block}, work.q_blocks).q_block;
      }
      do_step(q_block, first_column, std::true_type());
    }
    current_work(a, buffers, blocks, work);  // again, and not in registers all the time
    const int column = work.columns.begin + threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++)
      store_accumulator<Io, 1, DT>(
          row_of<Io>(tensor, work.block.batch, work.block.kv_head, column) + half * DT * 8, tensor.stride_row,
          work.columns.end - column, a.head_dim - half * DT * 8, sum[half], scale);
  }
}

// ---- s, p, dv --------------------------------------------------------------------------------------

// Scores become p; what is to be multiplied with dp - delta, p times the derivative of the softcap, goes to
// `to`.
template <class Kind, bool SOFTCAP, int NT>
__device__ inline void probabilities_to(uint32_t to, float (&scores)[1][NT][4], const fa_cuda_score &score,
                                        uint32_t shift) {
  const float unit = exponent_of_unit<Kind>(score), per_cap = per_softcap<Kind>(score);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_shift = load_shared_pair(shift + (n * 8 + threadIdx.x % 4 * 2) * 4);
    float slopes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float &x = scores[0][n][i];
      const float p = exponential<Kind>(x, unit, i % 2 ? row_shift.y : row_shift.x);
      slopes[i] = SOFTCAP ? p * softcap_slope(x, per_cap) : p;
      x = p;
    }
    store_shared(to + n * WARPGROUP * 16, slopes);
  }
}

template <class Kind, class Shape>
__device__ inline void consume_scores(const fa_cuda_arguments &a, WideBuffers<Kind, Shape> buffers) {
  using Buffers = WideBuffers<Kind, Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  constexpr int HALVES = 2, NT = Shape::block_q / 8, DT = Shape::head_dim / HALVES / 8;
  constexpr int Q_STEPS = Shape::block_q / 16, D_STEPS = Shape::head_dim / 16;

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dv[HALVES][1][DT][4], scores[1][NT][4];
  uint32_t p_operand[1][Q_STEPS][4];

  uint32_t steps = 0;
  auto make_scores = [&] {
    barrier_wait(buffers.barrier(Q_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS>(scores[0], BoxOperand<KTile, true>(buffers.k()),
                            BoxOperand<QTile, true>(buffers.q(steps % 2)), false);
    wgmma_wait<0>(scores[0]);
  };

  // Finds the scores there, and leaves the next step's.
  auto do_step = [&](int q_block, int first_column, auto is_last) {
    constexpr bool IS_LAST = decltype(is_last)::value;
    const Range rows = block_range(q_block, Shape::block_q, a.window.seqlen_q);
    const int stage = steps % 2;
    forget(buffers.base);  // or every address in this step is kept in a register
    finish_scores<Kind, 1, NT>(scores, a.score);
    if (!is_fully_visible(a.window, rows, first_column, Shape::block_k))
      mask_transposed_scores<1, NT>(scores, a.window, rows.begin, first_column + warp_row);
    barrier_wait(buffers.barrier(P_EMPTY), steps % 2 ^ 1);
    if (a.score.form == FA_CUDA_SCORE_SOFTCAP)
      probabilities_to<Kind, true>(buffers.p(), scores, a.score, buffers.shift(stage));
    else
      probabilities_to<Kind, false>(buffers.p(), scores, a.score, buffers.shift(stage));
    arrive_once(buffers.barrier(P_FULL));
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    convert<Kind>(p_operand, scores);
    const uint32_t phase = steps / 2 % 2;
    steps++;
    barrier_wait(buffers.barrier(DOUT_FULL, stage), phase);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      multiply<Kind, Q_STEPS>(dv[half][0], p_operand,
                              BoxOperand<QTile, false>(buffers.dout(stage), half * DT * 8), true);
    if constexpr (!IS_LAST) {
      wgmma_wait<0>(dv[0][0], dv[1][0], p_operand);
      arrive_once(buffers.barrier(DOUT_EMPTY, stage));
      make_scores();
    } else {
      arrive_once(buffers.barrier(K_EMPTY));
      wgmma_wait<0>(dv[0][0], dv[1][0], p_operand);
      arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    }
  };

  consume_blocks<Kind>(a, buffers, K_FULL, make_scores, do_step, dv, a.dv, 1);
}

// ---- dp, ds, dk ------------------------------------------------------------------------------------

// dp becomes ds; p (and the derivative) comes from where probabilities_to put it.
template <int NT>
__device__ inline void finish_ds_from(uint32_t p, float (&ds)[1][NT][4], uint32_t delta) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = load_shared_pair(delta + (n * 8 + threadIdx.x % 4 * 2) * 4);
    const float4 x = load_shared_four(p + n * WARPGROUP * 16);
    float(&to)[4] = ds[0][n];
    to[0] = x.x * (to[0] - row_delta.x), to[1] = x.y * (to[1] - row_delta.y);
    to[2] = x.z * (to[2] - row_delta.x), to[3] = x.w * (to[3] - row_delta.y);
  }
}

template <class Kind, class Shape>
__device__ inline void consume_ds(const fa_cuda_arguments &a, WideBuffers<Kind, Shape> buffers) {
  using Buffers = WideBuffers<Kind, Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  constexpr int HALVES = 2, NT = Shape::block_q / 8, DT = Shape::head_dim / HALVES / 8;
  constexpr int Q_STEPS = Shape::block_q / 16, D_STEPS = Shape::head_dim / 16;

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[HALVES][1][DT][4], ds[1][NT][4];
  uint32_t ds_operand[1][Q_STEPS][4];

  uint32_t steps = 0;
  auto make_dp = [&] {
    barrier_wait(buffers.barrier(DOUT_FULL, steps % 2), steps / 2 % 2);
    multiply<Kind, D_STEPS>(ds[0], BoxOperand<KTile, true>(buffers.v()),
                            BoxOperand<QTile, true>(buffers.dout(steps % 2)), false);
    wgmma_wait<0>(ds[0]);
  };

  auto do_step = [&](int, int, auto is_last) {
    constexpr bool IS_LAST = decltype(is_last)::value;
    const int stage = steps % 2;
    const uint32_t phase = steps / 2 % 2;
    forget(buffers.base);
    barrier_wait(buffers.barrier(P_FULL), steps % 2);
    finish_ds_from<NT>(buffers.p(), ds, buffers.delta(stage));
    arrive_once(buffers.barrier(P_EMPTY));
    arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    convert<Kind>(ds_operand, ds);
    steps++;
    barrier_wait(buffers.barrier(Q_FULL, stage), phase);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      multiply<Kind, Q_STEPS>(dk[half][0], ds_operand,
                              BoxOperand<QTile, false>(buffers.q(stage), half * DT * 8), true);
    barrier_wait(buffers.barrier(DS_EMPTY, stage), phase ^ 1);
    store_transposed<DsTile>(buffers.ds(stage), warp_row, 0, ds_operand[0]);
    fence_async();
    arrive_once(buffers.barrier(DS_FULL, stage));
    if constexpr (!IS_LAST) {
      wgmma_wait<0>(dk[0][0], dk[1][0], ds_operand);
      arrive_once(buffers.barrier(Q_EMPTY, stage));
      make_dp();
    } else {
      arrive_once(buffers.barrier(V_EMPTY));
      wgmma_wait<0>(dk[0][0], dk[1][0], ds_operand);
      arrive_once(buffers.barrier(Q_EMPTY, stage));
    }
  };

  consume_blocks<Kind>(a, buffers, V_FULL, make_dp, do_step, dk, a.dk, a.scale);
}

// ---- dq --------------------------------------------------------------------------------------------

template <class Kind, class Shape>
__device__ inline void consume_dq(const fa_cuda_arguments &a, WideBuffers<Kind, Shape> buffers) {
  using Buffers = WideBuffers<Kind, Shape>;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = DqShare<Shape>;
  constexpr int NT = Shape::dq_columns / 8, NUM_PIECES = Dq::NT / NT, K_STEPS = Shape::block_k / 16;
  static_assert(Dq::MT == 1 && Dq::ACROSS == 1, "one product of a warpgroup");

  float dq[NT][4];
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  auto start_dq = [&](int piece, uint32_t ds) {
    multiply<Kind, K_STEPS>(dq, BoxOperand<DsTile, true>(ds),
                            BoxOperand<KTile, false>(buffers.k(), piece * Shape::dq_columns), false);
  };
  Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    if (work.num_steps == 0) continue;
    barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
    busy_blocks++;
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, steps++, step = next_step(step, work.q_blocks)) {
      const int stage = steps % 2;
      const int64_t position = position_of(a, work.block.batch, step);
      float *dq_sum = a.dq_sum + position * (Shape::block_q * Shape::head_dim) + dq_offset<Dq>(0, 0);
      barrier_wait(buffers.barrier(DS_FULL, stage), steps / 2 % 2);
      start_dq(0, buffers.ds(stage));
      if (a.deterministic) barrier_wait(buffers.barrier(DQ_TURN), steps % 2);
      for (int piece = 0;;) {
        wgmma_wait<0>(dq);
        if (++piece == NUM_PIECES) arrive_once(buffers.barrier(DS_EMPTY, stage));
#pragma unroll
        for (int n = 0; n < NT; n++) add_four(dq_sum + n * 128, dq[n]);
        if (piece == NUM_PIECES) break;
        dq_sum += NT * 128;
        start_dq(piece, buffers.ds(stage));
      }
      if (a.deterministic) arrive_once(buffers.barrier(DQ_ADDED));
    }
    arrive_once(buffers.barrier(K_EMPTY));
  }
}

// ---- the other warps: one thread each ------------------------------------------------------------------

// Takes column blocks as long as there are some, and copies k and q.
template <class Buffers>
__device__ inline void produce_q(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers) {
  Ring<Buffers::STAGES> blocks, ring;
  uint32_t k_phase = 0;
  Work work;
  for (bool more = true; more; blocks.advance()) {
    more = take_work(a, buffers, blocks, k_phase, work);
    if (!more || work.num_steps == 0) continue;
    barrier_wait(buffers.barrier(K_EMPTY), k_phase ^ 1);
    k_phase ^= 1;
    load_columns(a, buffers, work, buffers.k(), maps.k, K_FULL, a.k);
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, step = next_step(step, work.q_blocks), ring.advance())
      load_rows(a, buffers, work, step, ring, buffers.q(ring.stage), maps.q, buffers.shift(ring.stage), a.shift,
                Q_FULL, Q_EMPTY, a.q);
  }
}

// Copies v and dout.
template <class Buffers>
__device__ inline void produce_dout(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                    const Buffers &buffers) {
  Ring<Buffers::STAGES> ring;
  uint32_t v_phase = 0;
  Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work_alone(buffers, blocks)) {
    if (work.num_steps == 0) continue;
    barrier_wait(buffers.barrier(V_EMPTY), v_phase ^ 1);
    v_phase ^= 1;
    load_columns(a, buffers, work, buffers.v(), maps.v, V_FULL, a.v);
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, step = next_step(step, work.q_blocks), ring.advance())
      load_rows(a, buffers, work, step, ring, buffers.dout(ring.stage), maps.dout, buffers.delta(ring.stage),
                a.delta, DOUT_FULL, DOUT_EMPTY, a.dout);
  }
}

// Deterministic: waits for the turns of dq ahead of who adds it, and passes them on behind, since both take
// long.
template <class Buffers>
__device__ inline void await_turns(const fa_cuda_arguments &a, const Buffers &buffers) {
  using Shape = typename Buffers::Shape;
  uint32_t steps = 0;
  Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work_alone(buffers, blocks)) {
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, steps++, step = next_step(step, work.q_blocks)) {
      const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
      wait_for_turn(a.dq_turns + position_of(a, work.block.batch, step),
                    1 + turn_of(a.window, rows, work.block.k_block, Shape::block_k));
      barrier_arrive(buffers.barrier(DQ_TURN));
      barrier_wait(buffers.barrier(DQ_TURN), steps % 2);
    }
  }
}
template <class Buffers>
__device__ inline void pass_turns(const fa_cuda_arguments &a, const Buffers &buffers) {
  uint32_t steps = 0;
  Work work;
  barrier_arrive(buffers.barrier(DQ_TURN));
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work_alone(buffers, blocks)) {
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, steps++, step = next_step(step, work.q_blocks)) {
      barrier_wait(buffers.barrier(DQ_ADDED), steps % 2);
      barrier_arrive(buffers.barrier(DQ_TURN));
      pass_turn(a.dq_turns + position_of(a, work.block.batch, step));
    }
  }
}

// As many blocks of threads as there are multiprocessors.
template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    backward_wide(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const WideBuffers<Kind, Shape> buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers(a.deterministic);
  __syncthreads();
  const int group = uniform(threadIdx.x / WARPGROUP);
  if (group == PRODUCER_GROUP) {
    give_registers<Shape::producer_registers>();
    switch (threadIdx.x - PRODUCER_GROUP * WARPGROUP) {
      case 0: produce_q(a, maps, buffers); break;
      case 32: produce_dout(a, maps, buffers); break;
      case 64:
        if (a.deterministic) await_turns(a, buffers);
        break;
      case 96:
        if (a.deterministic) pass_turns(a, buffers);
        break;
    }
  } else if (group == DQ_GROUP) {
    give_registers<Shape::dq_registers>();
    consume_dq<Kind, Shape>(a, buffers);
  } else if (group == SCORES_GROUP) {
    take_registers<Shape::main_registers>();
    consume_scores<Kind, Shape>(a, buffers);
  } else {
    take_registers<Shape::main_registers>();
    consume_ds<Kind, Shape>(a, buffers);
  }
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  return backward_row<WideBuffers<Kind, Shape>>(name, (const void *)backward_wide<Kind, Shape>,
                                                (const void *)finish_dq<Kind, Shape>, Shape::num_warps * 32);
}

}  // namespace hopper
}  // namespace fa

// Shared memory: 225.2 KiB.
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_wide_, FA_KIND)[] = {
    fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::WideShape<256>>("cuda/sm90/" FA_QUOTE(FA_KIND) "/d256"),
    {},
};
