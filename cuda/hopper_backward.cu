// The backward pass on Hopper. A block of threads takes block_k columns of one key/value head and walks over
// the row blocks that see them, in every query head of the group. Scores and dp are computed transposed,
// [block_k, block_q], 64 columns a consumer warpgroup, so that p and ds feed dv and dk from the registers they
// are in; only for dq, which sums over all columns, ds goes through shared memory. A producer warp copies row
// blocks ahead of the consumers, another adds their dq to its sum in memory (see backward.cuh).
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "backward.cuh"
#include "hopper.cuh"

namespace fa {
namespace hopper {

// A row of the table; none of it changes results by more than rounding. The consumers' warps come first.
template <int HEAD_DIM, int BLOCK_Q>
struct BackwardShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, num_consumers = 2, block_k = num_consumers * 64;
  static constexpr int num_warps = num_consumers * 4, dq_warps = block_q / 16;  // see DqShare
  static constexpr int num_threads = (num_consumers + 1) * WARPGROUP;
  static constexpr int consumer_registers = 240, other_registers = 24;
};

// Shared memory: k, v; the stages of q and those of dout, with shift and delta; two stages of ds; dq as it is
// in memory; barriers.
template <class Shape>
struct BackwardBuffers {
  static constexpr int STAGES = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  using DsTile = BoxTile<Shape::block_q, Shape::block_k>;
  static constexpr int ROW_BYTES = Shape::block_q * 4, DQ_BYTES = Shape::block_q * Shape::head_dim * 4;
  static constexpr int V_AT = KTile::BYTES, Q_AT = V_AT + KTile::BYTES, DOUT_AT = Q_AT + STAGES * QTile::BYTES;
  static constexpr int DS_AT = DOUT_AT + STAGES * QTile::BYTES, DQ_AT = DS_AT + STAGES * DsTile::BYTES;
  static constexpr int SHIFT_AT = DQ_AT + DQ_BYTES, DELTA_AT = SHIFT_AT + STAGES * ROW_BYTES;
  static constexpr int BARRIERS_AT = DELTA_AT + STAGES * ROW_BYTES, NUM_BARRIERS = 2 + 4 * STAGES;
  static constexpr int TICKET_AT = BARRIERS_AT + NUM_BARRIERS * 8, BYTES = TICKET_AT + 8;

  uint32_t base;
  __device__ uint32_t k() const { return base; }
  __device__ uint32_t v() const { return base + V_AT; }
  __device__ uint32_t q(int stage) const { return base + Q_AT + stage * QTile::BYTES; }
  __device__ uint32_t dout(int stage) const { return base + DOUT_AT + stage * QTile::BYTES; }
  __device__ uint32_t ds(int stage) const { return base + DS_AT + stage * DsTile::BYTES; }
  __device__ uint32_t dq() const { return base + DQ_AT; }
  __device__ uint32_t shift(int stage) const { return base + SHIFT_AT + stage * ROW_BYTES; }
  __device__ uint32_t delta(int stage) const { return base + DELTA_AT + stage * ROW_BYTES; }
  __device__ uint32_t barrier(int i) const { return base + BARRIERS_AT + i * 8; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(2 + STAGES + stage); }
  __device__ uint32_t dout_full(int stage) const { return barrier(2 + 2 * STAGES + stage); }
  __device__ uint32_t dout_empty(int stage) const { return barrier(2 + 3 * STAGES + stage); }

  __device__ void init_barriers() const {
    for (int i = 0; i < NUM_BARRIERS; i++) {
      const bool full = i < 2 || (i - 2) / STAGES % 2 == 0;
      barrier_init(barrier(i), full ? 1 : Shape::num_warps);  // the producer; every consuming warp
    }
    barrier_init_done();
  }
};

// Named barriers: ds is written; dq is written; dq is sent.
enum { DS_WRITTEN = 1, DQ_WRITTEN, DQ_SENT };

// What one block of threads does.
struct Work {
  int k_block, kv_head, batch;
  Range columns, q_blocks;
  Step first;
  int end_head;  // the first head's number where there is nothing to do
};
template <class Shape>
__device__ inline Work work_of(const fa_cuda_arguments &a, const BlockIndex &index) {
  const int group = a.num_heads / a.num_kv_heads;
  const Range columns = block_range(index.k_block, Shape::block_k, a.window.seqlen_k);
  const Range q_blocks = blocks_of(visible_rows(a.window, columns), Shape::block_q);
  const Step first = {index.kv_head * group, q_blocks.begin};
  return {index.k_block,
          index.kv_head,
          index.batch,
          columns,
          q_blocks,
          first,
          first.head + (q_blocks.begin < q_blocks.end ? group : 0)};
}

// ---- the producer: one thread ----------------------------------------------------------------------

template <class Shape>
__device__ inline void produce(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                               const BackwardBuffers<Shape> &buffers, const Work &work) {
  using Buffers = BackwardBuffers<Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  Ring<Buffers::STAGES> ring;
  auto load_keys = [&](uint32_t to, const CUtensorMap &map, uint32_t full) {
    barrier_expect(full, KTile::BYTES);
    load_boxes<KTile>(to, map, full, work.columns.begin, work.kv_head, work.batch);
  };
  for (Step step = work.first; step.head < work.end_head; step = next_step(step, work.q_blocks)) {
    const bool first = step.head == work.first.head && step.q_block == work.first.q_block;
    auto load_rows = [&](uint32_t to, const CUtensorMap &map, uint32_t statistic_to, const float *statistic,
                         uint32_t full, uint32_t empty) {
      barrier_wait(empty, ring.phase ^ 1);
      barrier_expect(full, QTile::BYTES + Buffers::ROW_BYTES);
      load_boxes<QTile>(to, map, full, step.q_block * Shape::block_q, step.head, work.batch);
      load_bulk(statistic_to, statistic + position_of(a, work.batch, step) * Shape::block_q, Buffers::ROW_BYTES,
                full);
    };
    const int stage = ring.stage;
    if (first) load_keys(buffers.k(), maps.k, buffers.k_full());
    load_rows(buffers.q(stage), maps.q, buffers.shift(stage), a.shift, buffers.q_full(stage),
              buffers.q_empty(stage));
    if (first) load_keys(buffers.v(), maps.v, buffers.v_full());
    load_rows(buffers.dout(stage), maps.dout, buffers.delta(stage), a.delta, buffers.dout_full(stage),
              buffers.dout_empty(stage));
    ring.advance();
  }
}

// ---- dq to memory: one warp --------------------------------------------------------------------------

template <class Shape>
__device__ inline void send_dq(const fa_cuda_arguments &a, const BackwardBuffers<Shape> &buffers,
                               const Work &work) {
  constexpr int THREADS = Shape::num_consumers * WARPGROUP + 32;
  for (Step step = work.first; step.head < work.end_head; step = next_step(step, work.q_blocks)) {
    named_barrier_wait(DQ_WRITTEN, THREADS);
    if (threadIdx.x % 32 == 0) {
      const int64_t position = position_of(a, work.batch, step);
      const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
      if (a.deterministic)
        wait_for_turn(a.dq_turns + position, turn_of(a.window, rows, work.k_block, Shape::block_k));
      add_bulk(a.dq_sum + position * (Shape::block_q * Shape::head_dim), buffers.dq(),
               BackwardBuffers<Shape>::DQ_BYTES);
      bulk_commit();
      if (a.deterministic) {
        bulk_wait_done<0>();
        pass_turn(a.dq_turns + position);
      } else {
        bulk_wait_read<0>();
      }
    }
    __syncwarp();
    named_barrier_arrive(DQ_SENT, THREADS);
  }
  if (threadIdx.x % 32 == 0) bulk_wait_done<0>();
}

// ---- the consumers -----------------------------------------------------------------------------------

// An accumulator as the left operand of a product along its columns: two column blocks a step of k.
template <class Kind, int KT>
__device__ inline void convert(uint32_t (&operand)[KT][4], const float (&acc)[1][2 * KT][4]) {
#pragma unroll
  for (int n = 0; n < 2 * KT; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      operand[n / 2][n % 2 * 2 + half] =
          pack(typename Kind::Element(), acc[0][n][half * 2], acc[0][n][half * 2 + 1]);
}

// Writes such an operand, whose first element is [row, column], to a tile, transposed.
template <class T, int KT>
__device__ inline void store_transposed(uint32_t tile, int row, int column, const uint32_t (&operand)[KT][4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = tile + T::offset(column + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < KT; k++) store_matrices_transposed(to + k * 16 * 128, operand[k]);
}

// Scores become p, as an operand. In their place, what is to be multiplied with dp - delta: p times the
// derivative of the softcap.
template <class Kind, bool SOFTCAP, int NT>
__device__ inline void probabilities(float (&scores)[1][NT][4], uint32_t (&p)[NT / 2][4],
                                     const fa_cuda_score &score, uint32_t shift) {
  const float unit = exponent_of_unit<Kind>(score), per_cap = per_softcap<Kind>(score);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_shift = load_shared_pair(shift + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float *x = scores[0][n] + half * 2;
      const float p0 = exponential<Kind>(x[0], unit, row_shift.x),
                  p1 = exponential<Kind>(x[1], unit, row_shift.y);
      p[n / 2][n % 2 * 2 + half] = pack(typename Kind::Element(), p0, p1);
      x[0] = SOFTCAP ? p0 * softcap_slope(x[0], per_cap) : p0;
      x[1] = SOFTCAP ? p1 * softcap_slope(x[1], per_cap) : p1;
    }
  }
}

// dp becomes ds.
template <int NT>
__device__ inline void finish_ds(float (&ds)[1][NT][4], const float (&p)[1][NT][4], uint32_t delta) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = load_shared_pair(delta + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) ds[0][n][i] = p[0][n][i] * (ds[0][n][i] - (i % 2 ? row_delta.y : row_delta.x));
  }
}

__device__ inline void release(uint32_t empty_barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty_barrier);
}

template <class Kind, class Shape>
__device__ inline void consume(const fa_cuda_arguments &a, const BackwardBuffers<Shape> &buffers,
                               const Work &work, int consumer) {
  using Buffers = BackwardBuffers<Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = DqShare<Shape>;
  using Element = typename Kind::Element;
  using Io = typename Kind::Io;
  constexpr int NT = Shape::block_q / 8, DT = Shape::head_dim / 8;
  constexpr int Q_STEPS = Shape::block_q / 16, K_STEPS = Shape::block_k / 16, D_STEPS = Shape::head_dim / 16;
  constexpr int CONSUMERS = Shape::num_consumers * WARPGROUP;
  static_assert(Dq::MT == 1, "one product of a warpgroup");

  const int first_column = work.columns.begin + consumer * 64, warp_row = threadIdx.x / 32 % 4 * 16;
  const BoxOperand<KTile, true> k(buffers.k(), consumer * 64), v(buffers.v(), consumer * 64);
  float dk[1][DT][4], dv[1][DT][4], scores[1][NT][4], ds[1][NT][4];
  uint32_t p_operand[Q_STEPS][4], ds_operand[Q_STEPS][4];
  set_zero<1, DT>(dk);
  set_zero<1, DT>(dv);

  Ring<Buffers::STAGES> ring;
  auto start_scores = [&] {
    barrier_wait(buffers.q_full(ring.stage), ring.phase);
    multiply<Element, D_STEPS>(scores[0], k, BoxOperand<QTile, true>(buffers.q(ring.stage)), false);
  };
  auto start_dp = [&] {
    barrier_wait(buffers.dout_full(ring.stage), ring.phase);
    multiply<Element, D_STEPS>(ds[0], v, BoxOperand<QTile, true>(buffers.dout(ring.stage)), false);
  };
  // Finds the scores there, and dp running; leaves the same of the next step. (More across the loop's end, and
  // ptxas gives up running products in the background.)
  auto do_step = [&](Step step, auto is_last) {
    const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
    const int stage = ring.stage;
    finish_scores<Kind, 1, NT>(scores, a.score);
    if (!is_fully_visible(a.window, rows, first_column, 64))
      mask_transposed_scores<1, NT>(scores, a.window, rows.begin, first_column + warp_row);
    if (a.score.form == FA_CUDA_SCORE_SOFTCAP)
      probabilities<Kind, true>(scores, p_operand, a.score, buffers.shift(stage));
    else
      probabilities<Kind, false>(scores, p_operand, a.score, buffers.shift(stage));
    wgmma_wait<0>(ds[0]);
    multiply<Element, Q_STEPS>(dv[0], p_operand, BoxOperand<QTile, false>(buffers.dout(stage)), true);
    finish_ds(ds, scores, buffers.delta(stage));
    convert<Kind>(ds_operand, ds);
    multiply<Element, Q_STEPS>(dk[0], ds_operand, BoxOperand<QTile, false>(buffers.q(stage)), true);
    wgmma_wait<1>(dv[0], p_operand);
    release(buffers.dout_empty(stage));
    store_transposed<DsTile>(buffers.ds(stage), consumer * 64 + warp_row, 0, ds_operand);
    fence_async();
    named_barrier_wait(DS_WRITTEN, CONSUMERS);

    float dq[1][Dq::NT][4];
    multiply<Element, K_STEPS>(
        dq[0], BoxOperand<DsTile, true>(buffers.ds(stage), Dq::ACROSS == 1 ? consumer * 64 : 0),
        BoxOperand<KTile, false>(buffers.k(), Dq::ACROSS == 1 ? 0 : consumer * 64), false);
    ring.advance();
    if constexpr (!decltype(is_last)::value) {
      start_scores();
      wgmma_wait<1>(dk[0], dq[0], ds_operand);
    } else {
      wgmma_wait<0>(dk[0], dq[0], ds_operand);
    }
    release(buffers.q_empty(stage));
    if (step.head != work.first.head || step.q_block != work.first.q_block)
      named_barrier_wait(DQ_SENT, CONSUMERS + 32);  // the last step's
#pragma unroll
    for (int n = 0; n < Dq::NT; n++) store_shared(buffers.dq() + dq_offset<Dq>(0, n) * 4, dq[0][n]);
    fence_async();
    named_barrier_arrive(DQ_WRITTEN, CONSUMERS + 32);
    if constexpr (!decltype(is_last)::value) {
      start_dp();
      wgmma_wait<1>(scores[0]);
    }
  };

  if (work.first.head < work.end_head) {
    barrier_wait(buffers.k_full(), 0);
    start_scores();
    barrier_wait(buffers.v_full(), 0);
    start_dp();
    wgmma_wait<1>(scores[0]);
    Step step = work.first;
    for (Step next; (next = next_step(step, work.q_blocks)).head < work.end_head; step = next)
      do_step(step, std::false_type());
    do_step(step, std::true_type());
  }

  const int column = first_column + warp_row;
  store_accumulator<Io, 1, DT>(row_of<Io>(a.dk, work.batch, work.kv_head, column), a.dk.stride_row,
                               work.columns.end - column, a.head_dim, dk, a.scale);
  store_accumulator<Io, 1, DT>(row_of<Io>(a.dv, work.batch, work.kv_head, column), a.dv.stride_row,
                               work.columns.end - column, a.head_dim, dv, 1);
}

template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    backward(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  using Buffers = BackwardBuffers<Shape>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Buffers buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers();
  __syncthreads();
  const Work work = work_of<Shape>(a, block_index(a, reinterpret_cast<int *>(shared + Buffers::TICKET_AT)));
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= Shape::num_warps) {
    give_registers<Shape::other_registers>();
    if (warp == Shape::num_warps + 1) send_dq<Shape>(a, buffers, work);
    if (threadIdx.x == Shape::num_warps * 32) produce<Shape>(a, maps, buffers, work);
  } else {
    take_registers<Shape::consumer_registers>();
    consume<Kind, Shape>(a, buffers, work, warp / 4);
  }
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Shape::num_threads,
          .shared_bytes = BackwardBuffers<Shape>::BYTES,
          .mapped = true,
          .main = (const void *)backward<Kind, Shape>,
          .statistics = (const void *)statistics<Kind, Shape>,
          .finish_dq = (const void *)finish_dq<Kind, Shape>,
          .finish_threads = Shape::num_warps * 32};
}

}  // namespace hopper
}  // namespace fa

#define ROW(rest, ...)                                                                                       \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>>("cuda/sm90/" FA_QUOTE(FA_KIND) \
                                                                                  rest)

// Registers a consumer's thread needs for its arrays: head_dim (dk, dv) + 1.25 * block_q (scores, dp and p).
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_, FA_KIND)[] = {
    // bucket, block_q
    ROW("/d64", 64, 128),
    ROW("/d128", 128, 64),
    {},
};
