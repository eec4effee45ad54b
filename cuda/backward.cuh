// What the backward kernels share: dq summed in memory, and the small kernels before and after the main one.
#pragma once

#include "isolation.cuh"

namespace fa {

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

// ---- dq in memory: four elements of an accumulator block in each lane ------------------------------

template <class Shape>
using DqShare = Share<Shape::block_q, Shape::head_dim, Shape::num_warps, Shape::dq_warps>;

// Where the dq of the row block at a position is summed. Only kernels that write dq themselves sum fewer row
// blocks at a time than there are (FEW_SUMS).
template <class Shape, bool FEW_SUMS = false>
__device__ inline float *dq_sum_of(const fa_cuda_arguments &a, int position) {
  const int64_t sum = FEW_SUMS ? position % a.num_sums : position;
  return a.dq_sum + sum * (Shape::block_q * Shape::head_dim);
}

// Where the four elements that this lane has of block [m, n] lie in a row block's sum: such that a warp's
// instruction touches consecutive memory.
template <class Share>
__device__ inline int dq_offset(int m, int n) {
  const int block = (threadIdx.x / 32 * Share::MT + m) * Share::NT + n;
  return (block * 32 + threadIdx.x % 32) * 4;
}

// A row block's dq_order counts the column blocks that have added to its sum. When column blocks add in order,
// each has a place: one thread waits until the count has reached it, and one counts on when all additions have
// been made. A reader of the sum waits for the last count in the same way. RELAXED: the caller has a fence of
// its own, between the count that it saw and what that allows, or between the additions and their count.
template <bool RELAXED = false>
__device__ inline int look_at_count(const int32_t *dq_order) {
  return RELAXED ? load_relaxed(dq_order) : load_acquire(dq_order);
}
__device__ inline void wait_for_count(const int32_t *dq_order, int count) {
  while (look_at_count(dq_order) < count) let_others_run();
}
template <bool RELAXED = false>
__device__ inline void count_on(int32_t *dq_order) {
  if (RELAXED)
    add_relaxed(dq_order, 1);
  else
    add_release(dq_order, 1);
}
__device__ inline void fence_counts() { fence_acquire_release(); }

// How many times a row block's dq is added to.
template <class Shape, bool GENERAL>
__device__ inline int num_additions(const fa_cuda_arguments &a, const RowBlock &mine) {
  if (GENERAL) return plan_at<true>(a, mine.batch, mine.q_block).num_visits;
  const Sequence sequence = sequence_of(a, mine.batch);
  return k_blocks_of<Shape>(sequence, row_range<Shape>(sequence, mine.q_block)).count;
}

// With bands: tells who writes dq that the row block at a position has all of it, by who knows that; or, with a
// negative number, that there is nothing of it.
__device__ inline void report_end(const fa_cuda_arguments &a, int position, bool is_unseen = false) {
  fence_counts();
  add_release(a.ended + atomicAdd(a.tickets + 2, 1), is_unseen ? -1 - position : 1 + position);
}
// Whether no column block visits a row block, as its plan says.
__device__ inline bool is_unvisited(const fa_cuda_arguments &a, int batch, int q_block) {
  return plan_at<true>(a, batch, q_block).num_visits == 0;
}
// Reports a row block that has got a sum, and to which nobody will add.
__device__ inline void report_if_unseen(const fa_cuda_arguments &a, const RowBlock &block) {
  if (is_unvisited(a, block.batch, block.q_block)) report_end(a, position_of(a, block), true);
}
// The same of all that have one from the beginning, by the writers of all blocks of threads.
template <int NUM_WRITERS>
__device__ inline void report_unseen(const fa_cuda_arguments &a, int writer) {
  const int num_blocks = min(a.num_sums, a.batch * a.num_heads * a.num_q_blocks);
  for (int first = blockIdx.x * NUM_WRITERS + writer; first * 32 < num_blocks;
       first += gridDim.x * NUM_WRITERS) {
    const int position = first * 32 + threadIdx.x % 32;
    if (position < num_blocks) report_if_unseen(a, row_block_at(a, position));
  }
}

// ---- the work of a column block ------------------------------------------------------------------------

// A step as whoever computes it sees it: which cells of these rows are visible.
struct Visit {
  fa_band band;
  int head;
  Range rows;
};

// A column block and its steps, each a row block of a query head, one head after the other: of all heads that
// share the keys, or of a part of these.
template <class Shape, bool GENERAL>
struct ColumnWork {
  using Step = fa::Step;
  ColumnBlock block;
  int part;
  Range columns;
  Blocks q_blocks;
  Step first;
  int num_steps;

  // Into how many parts the query heads that share keys are shared out.
  __device__ static int num_parts(const fa_cuda_arguments &a) {
    return Shape::splits_heads ? a.num_column_parts : 1;
  }
  __device__ static int count(const fa_cuda_arguments &a) {
    return a.batch * a.num_kv_heads * num_parts(a) * a.num_k_blocks;
  }

  // The column block of that number in the order in which they are begun.
  __device__ void find(const fa_cuda_arguments &a, int index) {
    find_block(a, column_block_of(a, index, a.num_k_blocks, num_parts(a)));
  }
  __device__ void find_block(const fa_cuda_arguments &a, const ColumnBlock &found) {
    const int parts = num_parts(a), num_heads = a.num_heads / (a.num_kv_heads * parts);
    block = found, part = 0;
    first = {block.kv_head * num_heads, 0};
    if (parts > 1) part = block.kv_head % parts, block.kv_head /= parts;
    const Sequence sequence = sequence_of(a, block.batch);
    columns = column_range<Shape>(sequence, block.k_block);
    q_blocks = q_blocks_of<Shape>(sequence, columns);
    num_steps = q_blocks.count * num_heads;
  }

  __device__ Step first_step(const fa_cuda_arguments &) const { return first; }
  __device__ Step next(const fa_cuda_arguments &, const Step &step) const { return next_step(step, q_blocks); }
  // The step that comes after `count` others.
  __device__ Step step_after(const fa_cuda_arguments &, int count) const {
    return fa::step_after(first, count, q_blocks);
  }

  __device__ int q_block_of(const Step &step) const { return q_blocks.at(step.i); }
  __device__ int position_of(const fa_cuda_arguments &a, const Step &step) const {
    return fa::position_of(a, {block.batch, step.head, q_block_of(step)});
  }
  __device__ Visit visit_of(const fa_cuda_arguments &a, const Step &step) const {
    const Sequence sequence = sequence_of(a, block.batch);
    return {sequence.band, step.head, row_range<Shape>(sequence, q_block_of(step))};
  }
  // How many steps add to the row block's dq before this one does, where they add in order.
  __device__ int place_of(const fa_cuda_arguments &a, const Step &step) const {
    const Sequence sequence = sequence_of(a, block.batch);
    return k_blocks_of<Shape>(sequence, row_range<Shape>(sequence, q_block_of(step))).place_of(block.k_block);
  }
};

// The steps, of `count`, that a part of a column block has.
__device__ inline Range steps_of_part(const fa_cuda_arguments &a, int part, int count) {
  const int each = count / a.num_column_parts, more = count % a.num_column_parts;
  const int begin = each * part + min(part, more);
  return {begin, begin + each + (part < more)};
}

// The same where the problem has bands: a step is a visit in a query head, and heads_together heads make all
// visits before others do, which may be another part's. The columns' own plan says how many there are; the work
// may be a part of them. Parts follow one another in the order in which they are begun, so that those which add
// to a row block's dq before others are begun before these.
template <class Shape>
struct ColumnWork<Shape, true> {
  struct Step {
    int head;
    Visits<true, false, Shape::block_q> visits;
  };
  ColumnBlock block;
  Range columns;
  fa_cuda_block_plan plan;
  int part, steps_before, num_steps;

  __device__ static int count(const fa_cuda_arguments &a) {
    return a.batch * a.num_kv_heads * a.num_k_blocks * a.num_column_parts;
  }

  __device__ void find(const fa_cuda_arguments &a, int index) {
    block = column_block_of(a, index, a.num_k_blocks * a.num_column_parts, 1);
    part = block.k_block % a.num_column_parts;
    plan = plan_at<false>(a, block.batch, block.k_block / a.num_column_parts);
    block.k_block = plan.block;
    columns = column_range<Shape>(sequence_of(a, block.batch), block.k_block);
    const Range steps = steps_of_part(a, part, plan.num_visits * heads_per_kv(a));
    steps_before = steps.begin;
    num_steps = steps.end - steps.begin;
  }

  __device__ Step first_step(const fa_cuda_arguments &a) const {
    return steps_before > 0 ? step_after(a, 0) : first_of(a, block.kv_head * heads_per_kv(a));
  }
  __device__ Step next(const fa_cuda_arguments &a, Step step) const {
    if (++step.head % a.heads_together != 0) return step;
    step.head -= a.heads_together;
    step.visits.advance();
    return step.visits.done() ? first_of(a, step.head + a.heads_together) : step;
  }
  __device__ Step step_after(const fa_cuda_arguments &a, int count) const {
    count += steps_before;
    int head = block.kv_head * heads_per_kv(a);
    if (a.heads_together > 1) head += count % a.heads_together, count /= a.heads_together;
    Step step = first_of(a, head + count / plan.num_visits * a.heads_together);
    step.visits.skip(count % plan.num_visits);
    return step;
  }

  __device__ int q_block_of(const Step &step) const { return step.visits.block(); }
  __device__ int position_of(const fa_cuda_arguments &a, const Step &step) const {
    return fa::position_of(a, {block.batch, step.head, q_block_of(step)});
  }
  __device__ Visit visit_of(const fa_cuda_arguments &a, const Step &step) const {
    return {step.visits.band, step.head, row_range<Shape>(sequence_of(a, block.batch), q_block_of(step))};
  }
  // A row block's visits are ordered by column block and band.
  __device__ int place_of(const fa_cuda_arguments &a, const Step &step) const {
    const int q_block = q_block_of(step);
    return place_of_visit<Shape>(a, block.batch, plan_at<true>(a, block.batch, q_block),
                                 row_range<Shape>(sequence_of(a, block.batch), q_block), block.k_block,
                                 step.visits.number);
  }

 private:
  __device__ Step first_of(const fa_cuda_arguments &a, int head) const {
    return {head, {a, block.batch, plan, columns}};
  }
};

// ---- dq from its sum -----------------------------------------------------------------------------------

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
  const RowBlock mine = row_block_at(a, blockIdx.x);
  const Sequence sequence = sequence_of(a, mine.batch);
  const Range rows = row_range<Shape>(sequence, mine.q_block);
  const float *dq_sum = dq_sum_of<Shape>(a, blockIdx.x);
  float dq[Dq::MT][Dq::NT][4];
#pragma unroll
  for (int m = 0; m < Dq::MT; m++)
#pragma unroll
    for (int n = 0; n < Dq::NT; n++) {
      const float4 x = *reinterpret_cast<const float4 *>(dq_sum + dq_offset<Dq>(m, n));
      dq[m][n][0] = x.x, dq[m][n][1] = x.y, dq[m][n][2] = x.z, dq[m][n][3] = x.w;
    }
  store_dq(Dq(), row_of<Io>(a.dq, sequence, mine.head, rows.begin), a.dq.stride_row, rows.end - rows.begin,
           a.head_dim, dq, a.scale);
  note_nan(a, dq);
}

// ---- delta = dot(o, dout) - dlse, and shift ------------------------------------------------------

// A lane for every eight columns of a row, and more where these are no power of two; every row of the padded
// arrays is written, dq_sum set to 0 for the first row blocks, and what counts and is counted where it begins.
// There is a block of threads where there are no rows, too.
template <class Kind, class Shape>
__global__ void __launch_bounds__(FA_CUDA_SMALL_KERNEL_THREADS)
    statistics(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse) {
  using Io = typename Kind::Io;
  constexpr int LANES = FA_CUDA_STATISTICS_LANES(Shape::head_dim), FOURS = Shape::head_dim / 4;
  const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
  let_dependents_start();
  if (blockIdx.x == 0 && threadIdx.x < FA_CUDA_NUM_TICKETS) a.tickets[threadIdx.x] = 0;
  if (a.padded_rows == 0) return;
  const PaddedRow mine = padded_row_at(a, index);
  const Sequence sequence = sequence_of(a, mine.batch);
  const int lane = threadIdx.x % LANES;
  // What no column block visits nobody reads but the sinks. There is much of it where batches have their own
  // bands.
  const bool unseen = a.bands_batch > 1 && a.num_sinks == 0 && mine.batch < a.batch &&
                      is_unvisited(a, mine.batch, mine.row / Shape::block_q);
  const bool inside = mine.batch < a.batch && mine.row < sequence.num_rows() && !unseen;
  float sum = 0;
  if (inside) {
    float o[8], dout[8];
    load_eight(o, row_of<const Io>(a.o, sequence, mine.head, mine.row) + lane * 8, a.head_dim - lane * 8);
    load_eight(dout, row_of<const Io>(a.dout_rows, sequence, mine.head, mine.row) + lane * 8,
               a.head_dim - lane * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(o[i], dout[i], sum);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (mine.batch >= a.batch) return;
  const bool summed = index / Shape::block_q < a.num_sums;
  if (summed) {
    float4 *dq_sum = reinterpret_cast<float4 *>(a.dq_sum + index * Shape::head_dim);
#pragma unroll
    for (int i = lane; i < FOURS; i += LANES) dq_sum[i] = make_float4(0, 0, 0, 0);
  }
  const float *lse_of_row = lse_at(a, sequence, mine.head, mine.row);
  const float lse = inside ? *lse_of_row : -INFINITY;
  if (a.suspect && inside && (lse == -INFINITY || sum == 0)) {  // of a row that sees nothing, q shows nowhere
    float q[8];
    load_eight(q, row_of<const Io>(a.q_rows, sequence, mine.head, mine.row) + lane * 8, a.head_dim - lane * 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!isfinite(q[i])) note_suspect(a);
  }
  if (lane != 0) return;
  if (index % Shape::block_q == 0) {
    a.dq_order[index / Shape::block_q] = summed;
    if (a.ended) a.ended[index / Shape::block_q] = 0;
  }
  if (inside) sum -= dlse_at(a, dlse, lse_of_row, mine.batch);
  if (a.suspect && inside && (!isfinite(sum) || !(lse < INFINITY))) note_suspect(a);
  a.delta[index] = sum;
  const float shift = lse == -INFINITY ? INFINITY : row_shift<Kind>(lse);
  float of_slope = 0;
  if constexpr (Shape::folds_slopes) {
    of_slope = slope_of_head(a, mine.batch, mine.head) * LOG2_E * float(index % Shape::block_q);
    a.shift_behind[index] = shift - of_slope;
  }
  a.shift[index] = shift + of_slope;
}

}  // namespace fa
