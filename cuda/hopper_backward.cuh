// What Hopper's backward kernels share: the work of a column block, the warps that copy row blocks, send dq and
// write it, and what consumers do with scores in registers. Buffers: a kernel's shared memory, with its Kind,
// its Shape, DQ_SHARES, in how many sums over columns a step's dq comes, and WRITERS, how many warps make dq of
// its sum: 0 where a kernel of its own does.
#pragma once

#include "backward.cuh"
#include "hopper.cuh"

namespace fa {
namespace hopper {

// Barriers in shared memory, two of a kind where there are two buffers. Completed by one thread or its bulk
// copies:
enum {
  BLOCK_FULL,
  K_FULL,
  V_FULL,
  Q_FULL,
  DOUT_FULL,
  DQ_SENT,
  SUM_FULL,
  // by every consumer warp:
  K_EMPTY,
  V_EMPTY,
  Q_EMPTY,
  DOUT_EMPTY,
  DS_FULL,
  DS_EMPTY,
  // by those and the warps that send dq:
  BLOCK_EMPTY,
  NUM_BARRIER_KINDS,
};
// And one in hardware, for each share of dq: its consumers have written it for the warp that sends it.
enum { DQ_WRITTEN = 1 };

// By a warp: arrives when all of its lanes are here.
__device__ inline void arrive_once(uint32_t barrier) {
  __syncwarp();
  barrier_arrive_warp(barrier);
}

// A column block's work.
struct Work {
  BlockIndex block;
  Range columns, q_blocks;
  Step first;
  int num_steps;
};
template <class Shape>
__device__ inline bool work_of(const fa_cuda_arguments &a, int index, Work &work) {
  if (index >= a.batch * a.num_kv_heads * a.num_k_blocks) return false;
  const int group = a.num_heads / a.num_kv_heads;
  work.block = block_of(a, index, a.num_k_blocks);
  work.columns = block_range(work.block.k_block, Shape::block_k, a.window.seqlen_k);
  work.q_blocks = blocks_of(visible_rows(a.window, work.columns), Shape::block_q);
  work.first = {work.block.kv_head * group, work.q_blocks.end - 1};
  work.num_steps = (work.q_blocks.end - work.q_blocks.begin) * group;
  return true;
}

// The column block that the producer hands to the other warps; false where there is none. next_work, by a warp:
// it is done with this one.
template <class Buffers>
__device__ inline bool current_work(const fa_cuda_arguments &a, const Buffers &buffers, uint32_t count,
                                    Work &work) {
  barrier_wait(buffers.barrier(BLOCK_FULL, count % 2), count / 2 % 2);
  return work_of<typename Buffers::Shape>(a, load_shared_word(buffers.block(count % 2)), work);
}
template <class Buffers>
__device__ inline void next_work(const Buffers &buffers, uint32_t &count) {
  arrive_once(buffers.barrier(BLOCK_EMPTY, count % 2));
  count++;
}
// The same, by one thread that stands for its warp.
template <class Buffers>
__device__ inline void next_work_alone(const Buffers &buffers, uint32_t &count) {
  barrier_arrive(buffers.barrier(BLOCK_EMPTY, count % 2));
  count++;
}

// ---- the producer: one thread ----------------------------------------------------------------------

// Starts the copy of k or v; and, when the ring's stage is empty, of q with shift or dout with delta. Of SCALED
// kinds, a word says by which power of two the rows are scaled.
template <class Buffers>
__device__ inline void load_columns(const fa_cuda_arguments &a, const Buffers &buffers, const Work &work,
                                    uint32_t to, const CUtensorMap &map, int full,
                                    const fa_cuda_operand &operand) {
  using Kind = typename Buffers::Kind;
  using KTile = typename Buffers::KTile;
  if constexpr (Kind::SCALED)
    store_shared(buffers.exponent(full, 0),
                 exponent_of<Kind>(operand, work.block.batch, work.block.kv_head, work.columns.begin));
  barrier_expect(buffers.barrier(full), Kind::PARTS * KTile::BYTES);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_boxes<KTile>(to + part * KTile::BYTES, map, buffers.barrier(full), work.columns.begin,
                      work.block.kv_head, work.block.batch + part * a.batch);
}
template <class Buffers>
__device__ inline void load_rows(const fa_cuda_arguments &a, const Buffers &buffers, const Work &work,
                                 Step step, const Ring<Buffers::STAGES> &ring, uint32_t to,
                                 const CUtensorMap &map, uint32_t statistic_to, const float *statistic,
                                 int full, int empty, const fa_cuda_operand &operand) {
  using Kind = typename Buffers::Kind;
  using QTile = typename Buffers::QTile;
  constexpr int BLOCK_Q = Buffers::Shape::block_q;
  const uint32_t barrier = buffers.barrier(full, ring.stage);
  const int exponent = exponent_of<Kind>(operand, work.block.batch, step.head, step.q_block * BLOCK_Q);
  barrier_wait(buffers.barrier(empty, ring.stage), ring.phase ^ 1);
  if constexpr (Kind::SCALED) store_shared(buffers.exponent(full, ring.stage), exponent);
  barrier_expect(barrier, Kind::PARTS * QTile::BYTES + Buffers::ROW_BYTES);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_boxes<QTile>(to + part * QTile::BYTES, map, barrier, step.q_block * BLOCK_Q, step.head,
                      work.block.batch + part * a.batch);
  load_bulk(statistic_to, statistic + position_of(a, work.block.batch, step) * BLOCK_Q, Buffers::ROW_BYTES,
            barrier);
}

// Takes the next column block that nobody has taken and hands it to the others; false where there is none. Who
// waits for the turn of a lower one thus waits for one that runs or is done.
template <class Buffers>
__device__ inline bool take_work(const fa_cuda_arguments &a, const Buffers &buffers,
                                 const Ring<Buffers::STAGES> &blocks, uint32_t k_phase, Work &work) {
  barrier_wait(buffers.barrier(V_EMPTY), k_phase ^ 1);  // not before the last step: another may be idle
  const int index = atomicAdd(a.tickets, 1);
  barrier_wait(buffers.barrier(BLOCK_EMPTY, blocks.stage), blocks.phase ^ 1);
  store_shared(buffers.block(blocks.stage), uint32_t(index));
  barrier_arrive(buffers.barrier(BLOCK_FULL, blocks.stage));
  return work_of<typename Buffers::Shape>(a, index, work);
}

template <class Buffers>
__device__ inline void produce(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers) {
  Ring<Buffers::STAGES> blocks, ring;
  uint32_t k_phase = 0;
  Work work;
  for (bool more = true; more; blocks.advance()) {
    more = take_work(a, buffers, blocks, k_phase, work);
    if (!more || work.num_steps == 0) continue;
    Step step = work.first;
    for (int i = 0; i < work.num_steps; i++, step = next_step(step, work.q_blocks)) {
      const int stage = ring.stage;
      if (i == 0) {
        barrier_wait(buffers.barrier(K_EMPTY), k_phase ^ 1);
        load_columns(a, buffers, work, buffers.k(), maps.k, K_FULL, a.k);
      }
      load_rows(a, buffers, work, step, ring, buffers.q(stage), maps.q, buffers.shift(stage), a.shift, Q_FULL,
                Q_EMPTY, a.q);
      if (i == 0) load_columns(a, buffers, work, buffers.v(), maps.v, V_FULL, a.v);
      load_rows(a, buffers, work, step, ring, buffers.dout(stage), maps.dout, buffers.delta(stage), a.delta,
                DOUT_FULL, DOUT_EMPTY, a.dout);
      ring.advance();
    }
    k_phase ^= 1;
  }
}

// ---- dq to memory: one warp for each share -----------------------------------------------------------

template <class Buffers>
__device__ inline void send_dq(const fa_cuda_arguments &a, const Buffers &buffers, int share = 0) {
  using Shape = typename Buffers::Shape;
  constexpr int SHARES = Buffers::DQ_SHARES, THREADS = Shape::num_consumers / SHARES * WARPGROUP + 32;
  const int lane = threadIdx.x % 32;
  Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    const int num_q_blocks = work.q_blocks.end - work.q_blocks.begin;
    // Not step by step: a look at memory takes as long as a third of a step.
    for (int i = lane; i < work.num_steps; i += 32) {
      const int position = position_of(
          a, work.block.batch, {work.first.head + i / num_q_blocks, work.first.q_block - i % num_q_blocks});
      if (position >= a.num_sums) wait_for_turn(a.dq_turns + position, 1);
    }
    __syncwarp();
    if (lane == 0) fence_async_global();
    Step step = work.first;
    int32_t *added = nullptr;
    for (int i = 0; i < work.num_steps; i++, step = next_step(step, work.q_blocks)) {
      const int position = position_of(a, work.block.batch, step);
      const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
      int32_t *turns = a.dq_turns + position;
      float *sum = dq_sum_of<Shape>(a, position);
      if (lane == 0 && a.deterministic)
        wait_for_turn(turns, 1 + turn_of(a.window, rows, work.block.k_block, Shape::block_k) * SHARES + share);
      named_barrier_wait(DQ_WRITTEN + share, THREADS);
      if (lane != 0) continue;
      add_bulk(sum, buffers.dq(share), Buffers::DQ_BYTES);
      bulk_commit();
      bulk_wait_read<0>();
      barrier_arrive(buffers.barrier(DQ_SENT, share));
      if (a.deterministic) {
        bulk_wait_done<0>();
        pass_turn(turns);
      } else if (Buffers::WRITERS > 0) {  // of the addition before, which has long been made
        bulk_wait_done<1>();
        if (added) pass_turn(added);
        added = turns;
      }
    }
    if (lane == 0) bulk_wait_done<0>();
    if (added) pass_turn(added);
  }
}

// ---- dq from its sum: two warps, the writers ---------------------------------------------------------

// Takes the next row block that nobody has taken, and writes its dq when all column blocks have added to it;
// its sum becomes that of the row block num_sums further on. So dq_sum stays in cache, and column blocks seldom
// wait for it. Part by part: of what one consumer has of dq, 64 rows by 64 columns, one half.
template <class Kind, class Buffers>
__device__ inline void write_dq(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                                int writer) {
  using Shape = typename Buffers::Shape;
  using Dq = DqShare<Shape>;
  using Tile = typename Buffers::PartTile;
  static_assert(Dq::WARP_ROWS == 16 && Dq::WARP_COLUMNS == 64 && Tile::ROWS == 32, "a part is two warps'");
  const int lane = threadIdx.x % 32, group = a.num_heads / a.num_kv_heads;
  const int num_positions = a.batch * a.num_heads * a.num_q_blocks;
  const uint32_t from = buffers.sum(writer), tile = buffers.part(writer);
  const uint32_t full = buffers.barrier(SUM_FULL, writer);
  uint32_t phase = 0;
  for (;;) {
    const int index = uniform(lane == 0 ? atomicAdd(a.tickets + 1, 1) : 0);
    if (index >= num_positions) break;
    const BlockIndex block = block_of(a, index, a.num_q_blocks * group);
    const Step step = {block.kv_head * group + block.k_block % group,
                       a.num_q_blocks - 1 - block.k_block / group};
    const int position = position_of(a, block.batch, step);
    const bool sums_again = position + a.num_sums < num_positions;
    const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
    const Range k_blocks = blocks_of(visible_columns(a.window, rows), Shape::block_k);
    float *sum = dq_sum_of<Shape>(a, position);
    if (lane == 0) {
      wait_for_turn(a.dq_turns + position, 1 + k_blocks.end - k_blocks.begin);
      fence_async_global();
    }
    for (int part = 0; part < 2 * Shape::num_consumers; part++, phase ^= 1, sum += Buffers::PART_BYTES / 4) {
      if (lane == 0) {
        bulk_wait_read<0>();
        barrier_expect(full, Buffers::PART_BYTES);
        load_bulk(from, sum, Buffers::PART_BYTES, full);
      }
      __syncwarp();
      barrier_wait(full, phase);
#pragma unroll 2
      for (int i = 0; i < 8; i++) {  // of 16 rows and columns
        const uint32_t first = from + (i * 64 + lane) * 16, second = first + 32 * 16;
        const float4 x = load_shared_four(first), y = load_shared_four(second);
        store_shared(first, make_uint4(0, 0, 0, 0));
        store_shared(second, make_uint4(0, 0, 0, 0));
        put_rows<typename Kind::Element, Tile, 2>(
            tile, i / 4 * 16, {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}}, {a.scale, a.scale}, i % 4 * 2);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        const int row = rows.begin + (Dq::ACROSS == 1 ? part : part % 2) * 32;
        for (int i = 0; i < 32; i += 16)
          store_boxes<Tile>(maps.out, tile, i, row + i, step.head, block.batch,
                            Dq::ACROSS == 1 ? 0 : part / 2 * 64);
        if (sums_again) store_bulk(sum, from, Buffers::PART_BYTES);
        bulk_commit();
      }
    }
    if (lane == 0 && sums_again) {
      bulk_wait_done<0>();
      pass_turn(a.dq_turns + position + a.num_sums);
    }
  }
  if (lane == 0) bulk_wait_read<0>();
}

// ---- the consumers -----------------------------------------------------------------------------------

// Two neighbours in a row of an accumulator, from column n * 8 on, as elements of the left operand of a product
// along its columns: two column blocks a step of k. scale: of SCALED kinds.
template <class Kind, int KT>
__device__ inline void convert_pair(uint32_t (&operand)[Kind::PARTS][KT][4], int n, int half, float x0,
                                    float x1, float scale) {
  uint32_t parts[Kind::PARTS];
  if constexpr (Kind::SCALED) x0 *= scale, x1 *= scale;
  split<Kind>(parts, x0, x1);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++) operand[part][n / 2][n % 2 * 2 + half] = parts[part];
}
template <class Kind, int KT>
__device__ inline void convert(uint32_t (&operand)[Kind::PARTS][KT][4], const float (&acc)[1][2 * KT][4],
                               float scale = 1) {
#pragma unroll
  for (int n = 0; n < 2 * KT; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      convert_pair<Kind>(operand, n, half, acc[0][n][half * 2], acc[0][n][half * 2 + 1], scale);
}

// Writes such an operand, whose first element is [row, column], to a tile, transposed.
template <class T, int KT>
__device__ inline void store_transposed(uint32_t tile, int row, int column, const uint32_t (&operand)[KT][4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = tile + T::offset(column + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < KT; k++) store_matrices<true>(to + k * 16 * 128, operand[k]);
}

// Scores become p, as an operand times scale. In their place, what is to be multiplied with dp - delta: p times
// the derivative of the softcap.
template <class Kind, bool SOFTCAP, int NT>
__device__ inline void probabilities(float (&scores)[1][NT][4], uint32_t (&p)[Kind::PARTS][NT / 2][4],
                                     const fa_cuda_score &score, uint32_t shift, float scale = 1) {
  const float unit = exponent_of_unit<Kind>(score), per_cap = per_softcap<Kind>(score);
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_shift = load_shared_pair(shift + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float *x = scores[0][n] + half * 2;
      const float p0 = exact_exponential<Kind>(x[0], unit, row_shift.x),
                  p1 = exact_exponential<Kind>(x[1], unit, row_shift.y);
      convert_pair<Kind>(p, n, half, p0, p1, scale);
      x[0] = SOFTCAP ? p0 * softcap_slope(x[0], per_cap) : p0;
      x[1] = SOFTCAP ? p1 * softcap_slope(x[1], per_cap) : p1;
    }
  }
}

// dp, to be multiplied with unscale where operands are SCALED, becomes ds.
template <class Kind, int NT>
__device__ inline void finish_ds(float (&ds)[1][NT][4], const float (&p)[1][NT][4], uint32_t delta,
                                 float unscale = 1) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = load_shared_pair(delta + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float dp = Kind::SCALED ? ds[0][n][i] * unscale : ds[0][n][i];
      ds[0][n][i] = p[0][n][i] * (dp - (i % 2 ? row_delta.y : row_delta.x));
    }
  }
}

// ---- the table -----------------------------------------------------------------------------------------

template <class Buffers>
constexpr fa_cuda_kernel backward_row(const char *name, const void *main, const void *finish_dq = nullptr,
                                      int32_t finish_threads = 0) {
  using Shape = typename Buffers::Shape;
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Shape::num_threads,
          .shared_bytes = Buffers::BYTES,
          .mapped = true,
          .persistent = true,
          .main = main,
          .statistics = (const void *)statistics<typename Buffers::Kind, Shape>,
          .finish_dq = finish_dq,
          .finish_threads = finish_threads};
}

}  // namespace hopper
}  // namespace fa
