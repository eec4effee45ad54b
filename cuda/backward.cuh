// What the backward kernels share: dq summed in memory, and the small kernels before and after the main one.
#pragma once

#include "counts.cuh"
#include "isolation.cuh"

namespace fa {

// How num_warps warps, `down` of them along the rows, share out a product [rows, columns].
template <int ROWS_, int COLUMNS_, int NUM_WARPS_, int DOWN>
struct Share {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int NUM_WARPS = NUM_WARPS_, ACROSS = NUM_WARPS / DOWN;
  static constexpr int WARP_ROWS = ROWS / DOWN, WARP_COLUMNS = COLUMNS / ACROSS;
  static constexpr int MT = WARP_ROWS / 16, NT = WARP_COLUMNS / 8;
  static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0, "a warp has whole fragments");
  __device__ static int row() { return threadIdx.x / 32 % DOWN * WARP_ROWS; }
  __device__ static int column() { return threadIdx.x / 32 / DOWN * WARP_COLUMNS; }
};

// All that the small kernels know of the main one's shape, so that shapes with the same rows have the same.
template <int HEAD_DIM, int BLOCK_Q, bool FOLDS_SLOPES = false>
struct RowsShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q;
  static constexpr bool folds_slopes = FOLDS_SLOPES;
};
template <class Shape>
using RowsOf = RowsShape<Shape::head_dim, Shape::block_q, Shape::folds_slopes>;

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

// Of a mask with a flag a score: which column blocks it shows a row block something of.
struct ShownByFlags {
  const uint8_t *shown;

  __device__ ShownByFlags(const fa_cuda_arguments &a, const RowBlock &mine)
      : shown(a.program.flags.kinds + shown_of_flags(a.program.flags, mine.batch, mine.head, mine.q_block)) {}
  __device__ bool has(int k_block) const { return __ldg(shown + k_block); }
  // How many of these there are.
  __device__ int operator()(Range k_blocks) const {
    int count = 0;
    for (int first = k_blocks.begin / 4 * 4; first < k_blocks.end; first += 4) {
      uint32_t four = __ldg(reinterpret_cast<const uint32_t *>(shown + first));
      if (first < k_blocks.begin) four &= ~0u << (k_blocks.begin - first) * 8;
      if (first + 4 > k_blocks.end) four &= ~0u >> (first + 4 - k_blocks.end) * 8;
      count += __popc(four);
    }
    return count;
  }
};

template <class Shape>
__device__ inline auto shown_blocks(const fa_cuda_arguments &a, const RowBlock &mine) {
  if constexpr (Shape::skips_hidden_steps) {
    return ShownByFlags(a, mine);
  } else if constexpr (Shape::skips_hidden_keys) {
    static_assert(Shape::block_k == FA_CUDA_KEYS_BLOCK, "a column block is a block of keys");
    return ShownKeys(a.program.keys, mine.batch, 0, hides_column_blocks(a));
  } else {
    return AllBlocks();
  }
}

// How many visits of a row block show something, of those before that of a column block in a band.
template <class Shape>
__device__ inline int shown_visits(const fa_cuda_arguments &a, const RowBlock &mine, int k_block, int number) {
  return place_of_visit<Shape>(a, mine.batch, plan_at<true>(a, mine.batch, mine.q_block),
                               row_range<Shape>(sequence_of(a, mine.batch), mine.q_block), k_block, number,
                               shown_blocks<Shape>(a, mine));
}
// The same where there are no bands.
template <class Shape>
__device__ inline int shown_before(const fa_cuda_arguments &a, const RowBlock &mine, int k_block) {
  const Sequence sequence = sequence_of<Shape>(a, mine.batch);
  const Blocks blocks = k_blocks_of<Shape>(sequence, row_range<Shape>(sequence, mine.q_block));
  const int first = blocks.last - blocks.count + 1;
  return shown_blocks<Shape>(a, mine)({first, min(k_block, blocks.last + 1)});
}

// How many times a row block's dq is added to. hides_keys: whether keys hide whole column blocks.
template <class Shape, bool GENERAL>
__device__ inline int num_additions(const fa_cuda_arguments &a, const RowBlock &mine, bool hides_keys) {
  if constexpr (!GENERAL) {
    if (hides_keys) return shown_before<Shape>(a, mine, a.num_k_blocks);
    const Sequence sequence = sequence_of<Shape>(a, mine.batch);
    return k_blocks_of<Shape>(sequence, row_range<Shape>(sequence, mine.q_block)).count;
  } else if (Shape::skips_hidden_steps || (Shape::skips_hidden_keys && hides_keys)) {
    return shown_visits<Shape>(a, mine, a.num_k_blocks, 0);
  } else {
    return plan_at<true>(a, mine.batch, mine.q_block).num_visits;
  }
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
template <class Shape>
__device__ inline void report_if_unseen(const fa_cuda_arguments &a, const RowBlock &block, bool hides_keys) {
  if (num_additions<Shape, true>(a, block, hides_keys) == 0) report_end(a, position_of(a, block), true);
}
// The same of all that have one from the beginning, by the writers of all blocks of threads. Where statistics
// are made beside, these have to set it to 0 first, as it is another row block's next.
template <class Shape>
__device__ inline void report_unseen(const fa_cuda_arguments &a, int writer, bool hides_keys) {
  const int num_blocks = min(a.num_sums, a.batch * a.num_heads * a.num_q_blocks);
  for (int first = blockIdx.x * Shape::num_writers + writer; first * 32 < num_blocks;
       first += gridDim.x * Shape::num_writers) {
    const int position = first * 32 + threadIdx.x % 32;
    if (position >= num_blocks) continue;
    if (num_additions<Shape, true>(a, row_block_at(a, position), hides_keys) > 0) continue;
    if (a.rows_done) wait_for_count(a.dq_order + position, 1);
    report_end(a, position, true);
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
  // By keys. Where there are none nothing is, but kernels without bands that leave the question out are slower,
  // by up to 4 %.
  static constexpr bool may_be_hidden = true;
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
    const Sequence sequence = sequence_of<Shape>(a, block.batch);
    columns = column_range<Shape>(sequence, block.k_block);
    q_blocks = q_blocks_of<Shape>(sequence, columns);
    num_steps = q_blocks.count * num_heads;
  }
  __device__ void hide() { num_steps = 0; }
  // The rows that its steps have, and some between these.
  __device__ Range rows(const fa_cuda_arguments &) const {
    return {q_blocks.at(q_blocks.count - 1) * Shape::block_q, (q_blocks.last + 1) * Shape::block_q};
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
    const Sequence sequence = sequence_of<Shape>(a, block.batch);
    return {sequence.band, step.head, row_range<Shape>(sequence, q_block_of(step))};
  }
  // How many steps add to the row block's dq before this one does, where they add in order.
  __device__ int place_of(const fa_cuda_arguments &a, const Step &step) const {
    return shown_before<Shape>(a, {block.batch, step.head, q_block_of(step)}, block.k_block);
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
  static constexpr bool may_be_hidden = Shape::skips_hidden_keys;
  struct Step {
    int head;
    Visits<true, false, Shape::block_q> visits;
  };
  ColumnBlock block;
  Range columns;
  fa_cuda_block_plan plan;
  int part, steps_before, num_steps;
  bool is_hidden = false;  // by keys, with all that bands show of it

  __device__ static int count(const fa_cuda_arguments &a) {
    return a.batch * a.num_kv_heads * a.num_k_blocks * a.num_column_parts;
  }

  __device__ void find(const fa_cuda_arguments &a, int index) {
    find_block(a, column_block_of(a, index, a.num_k_blocks * a.num_column_parts, 1));
  }
  __device__ void find_block(const fa_cuda_arguments &a, const ColumnBlock &found) {
    block = found;
    part = block.k_block % a.num_column_parts;
    plan = plan_at<false>(a, block.batch, block.k_block / a.num_column_parts);
    block.k_block = plan.block;
    columns = column_range<Shape>(sequence_of(a, block.batch), block.k_block);
    const Range steps = steps_of_part(a, part, plan.num_visits * heads_per_kv(a));
    steps_before = steps.begin;
    num_steps = steps.end - steps.begin;
  }
  __device__ void hide() { is_hidden = true, num_steps = 0; }
  __device__ Range rows(const fa_cuda_arguments &a) const {
    Range rows = {INT32_MAX, 0};
    for (int number = plan.first_band; number < plan.end_band; number++) {
      const Range seen = seen_in_band<false>(band_at(a, block.batch, number), columns);
      if (seen.begin < seen.end) rows = {min(rows.begin, seen.begin), max(rows.end, seen.end)};
    }
    return rows;
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
    return shown_visits<Shape>(a, {block.batch, step.head, q_block_of(step)}, block.k_block,
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

// One block a row block of a head: dq = scale * dq_sum, which lies as Dq shares it out.
template <class Kind, class Dq>
__global__ void __launch_bounds__(Dq::NUM_WARPS * 32) finish_dq(const __grid_constant__ fa_cuda_arguments a) {
  using Shape = RowsShape<Dq::COLUMNS, Dq::ROWS>;
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

// LANES share a row, a lane for every eight columns, and more where these are no power of two. Every row of the
// padded arrays is written, and dq_sum set to 0 for the first row blocks.
template <class Kind, class Shape>
struct RowStatistics {
  using Io = typename Kind::Io;
  static constexpr int LANES = FA_CUDA_STATISTICS_LANES(Shape::head_dim);

  const fa_cuda_arguments &a;
  const fa_cuda_dlse &dlse;
  const int lane = threadIdx.x % LANES;

  // Whether somebody reads what is known of a row. What no column block visits nobody reads but the sinks.
  // There is much of it where batches have their own bands.
  __device__ bool is_read(const PaddedRow &mine) const {
    if (mine.batch >= a.batch || mine.row >= sequence_of(a, mine.batch).num_rows()) return false;
    return a.bands_batch <= 1 || a.num_sinks > 0 || !is_unvisited(a, mine.batch, mine.row / Shape::block_q);
  }

  // Where the lane's part of a row of o or dout lies, and what it adds to their product. ALIGNED: see
  // load_eight; then several rows can be under way.
  __device__ const Io *part_of(const fa_tensor &tensor, const PaddedRow &mine) const {
    return row_of<const Io>(tensor, sequence_of(a, mine.batch), mine.head, mine.row) + lane * 8;
  }
  template <bool ALIGNED>
  __device__ float dot(const Io *o_part, const Io *dout_part, int wanted) const {
    float dout[8];
    load_eight<ALIGNED>(dout, dout_part, wanted);
    return dot<ALIGNED>(o_part, dout, wanted);
  }
  template <bool ALIGNED>
  __device__ float dot(const Io *o_part, const float (&dout)[8], int wanted) const {
    float o[8], sum = 0;
    load_eight<ALIGNED>(o, o_part, wanted);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(o[i], dout[i], sum);
    return sum;
  }

  __device__ float lse_of(const PaddedRow &mine, bool is_read) const {
    return is_read ? *lse_at(a, sequence_of(a, mine.batch), mine.head, mine.row) : -INFINITY;
  }
  // Of a row that sees nothing q shows nowhere, so that somebody has to look at it.
  __device__ bool hides_q(bool is_read, float lse, float sum) const {
    return a.suspect && is_read && (lse == -INFINITY || sum == 0);
  }
  __device__ void look_at_q(const PaddedRow &mine, int eight) const {
    float q[8];
    load_eight(q, row_of<const Io>(a.q_rows, sequence_of(a, mine.batch), mine.head, mine.row) + eight * 8,
               a.head_dim - eight * 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!isfinite(q[i])) note_suspect(a);
  }
  // Writes what follows from o·dout, by one lane; index: the row's in the padded arrays.
  __device__ void finish(int64_t index, const PaddedRow &mine, bool is_read, float lse, float sum) const {
    if (is_read)
      sum -= dlse_at(a, dlse, lse_at(a, sequence_of(a, mine.batch), mine.head, mine.row), mine.batch);
    if (a.suspect && is_read && (!isfinite(sum) || !(lse < INFINITY))) note_suspect(a);
    a.delta[index] = sum * a.delta_factor;
    float shift = is_lost<Io>(a, lse) ? INFINITY : row_shift<Kind>(lse);
    if (is_read_otherwise<Io>(a, lse)) note_suspect(a), shift = NAN;  // so that what it gives is made again
    float of_slope = 0;
    if constexpr (Shape::folds_slopes) {
      of_slope = slope_of_head(a, mine.batch, mine.head) * LOG2_E * float(index % Shape::block_q);
      a.shift_behind[index] = shift - of_slope;
    }
    a.shift[index] = shift + of_slope;
  }
};

// The kernel in front of main, a thread for a lane of each row, which also lets what counts and is counted
// begin. There is a block of threads where there are no rows, too.
template <class Kind, class Shape>
__global__ void __launch_bounds__(FA_CUDA_SMALL_KERNEL_THREADS)
    statistics(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse) {
  using Row = RowStatistics<Kind, Shape>;
  const Row row{a, dlse};
  const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / Row::LANES;
  let_dependents_start();
  if (blockIdx.x == 0 && threadIdx.x < FA_CUDA_NUM_TICKETS) a.tickets[threadIdx.x] = 0;
  if (a.padded_rows == 0) return;
  const PaddedRow mine = padded_row_at(a, index);
  const bool is_read = row.is_read(mine);
  float sum = 0;
  if (is_read)
    sum = row.template dot<false>(row.part_of(a.o, mine), row.part_of(a.dout_rows, mine),
                                  a.head_dim - row.lane * 8);
#pragma unroll
  for (int step = Row::LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (mine.batch >= a.batch) return;
  const int64_t position = index / Shape::block_q;
  const bool summed = position < a.num_sums;
  if (summed) {
    float4 *dq_sum = reinterpret_cast<float4 *>(a.dq_sum + index * Shape::head_dim);
#pragma unroll
    for (int i = row.lane; i < Shape::head_dim / 4; i += Row::LANES) dq_sum[i] = make_float4(0, 0, 0, 0);
  }
  const float lse = row.lse_of(mine, is_read);
  if (row.hides_q(is_read, lse, sum)) row.look_at_q(mine, row.lane);
  if (row.lane != 0) return;
  if (index % Shape::block_q == 0) {
    a.dq_order[position] = summed;
    if (a.ended) a.ended[position] = 0;
  }
  row.finish(index, mine, is_read, lse, sum);
}

// Sums each of four numbers over LANES lanes; a lane gets the sum number sum_of_lane().
template <int LANES>
__device__ inline int sum_of_lane() {
  return threadIdx.x / (LANES / 4) % 4;
}
template <int LANES>
__device__ inline float sum_four(const float (&x)[4]) {
  const int own = sum_of_lane<LANES>();
  const bool second = own / 2, odd = own % 2;
  const float two[2] = {(second ? x[2] : x[0]) + __shfl_xor_sync(~0u, second ? x[0] : x[2], LANES / 2),
                        (second ? x[3] : x[1]) + __shfl_xor_sync(~0u, second ? x[1] : x[3], LANES / 2)};
  float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(~0u, odd ? two[0] : two[1], LANES / 4);
#pragma unroll
  for (int step = LANES / 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Which count the statistics of a row block are in, where they are made beside main, and that of all.
template <class Shape>
__device__ inline int32_t *count_of_rows(const fa_cuda_arguments &a, const RowBlock &block) {
  static_assert(FA_CUDA_DONE_ROWS % Shape::block_q == 0, "whole row blocks");
  return a.rows_done + (block.batch * a.num_heads + block.head) * FA_CUDA_DONE_GROUPS(a.padded_rows) +
         block.q_block / (FA_CUDA_DONE_ROWS / Shape::block_q);
}
__device__ inline int32_t *count_of_all_rows(const fa_cuda_arguments &a) {
  return a.rows_done + a.batch * a.num_heads * FA_CUDA_DONE_GROUPS(a.padded_rows);
}
// Waits for those of a head's rows.
template <class Shape>
__device__ inline void wait_for_rows(const fa_cuda_arguments &a, int batch, int head, Range rows) {
  constexpr int BLOCKS = FA_CUDA_DONE_ROWS / Shape::block_q;
  for (int first = rows.begin / FA_CUDA_DONE_ROWS * BLOCKS; first * Shape::block_q < rows.end; first += BLOCKS)
    wait_for_count(count_of_rows<Shape>(a, {batch, head, first}), min(a.num_q_blocks - first, BLOCKS));
}

// By one thread, behind a fence: tells that the statistics of the row block at a position are there, and its
// sum is 0, if it has one.
template <class Shape>
__device__ inline void tell_of_statistics(const fa_cuda_arguments &a, int position) {
  if (position < a.num_sums) count_on<true>(a.dq_order + position);
  count_on<true>(count_of_rows<Shape>(a, row_block_at(a, position)));
  count_on<true>(count_of_all_rows(a));
}

// The same beside main, which fills the multiprocessors that these few large blocks leave, and these too when
// they are done: there main computes while this one waits for memory. All that counts has been set to 0 before,
// and o and dout are aligned. A team makes the statistics of some row blocks, from the first head's on, as main
// begins there too, and tells of them together, as a fence takes as long as a row block; but first of one each,
// for which main waits. A thread has parts of four rows at once, and finishes one.
constexpr int TEAM_THREADS = 128, TEAM_BLOCKS = 4;
template <class Kind, class Shape>
__global__ void __launch_bounds__(FA_CUDA_BESIDE_THREADS, 1)
    statistics_beside(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse) {
  using Row = RowStatistics<Kind, Shape>;
  constexpr int TEAMS = FA_CUDA_BESIDE_THREADS / TEAM_THREADS, ROWS = TEAM_THREADS / Row::LANES;
  static_assert(Shape::block_q % (4 * ROWS) == 0, "four rows of one row block");
  const Row row{a, dlse};
  let_dependents_start();
  const int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS;
  const int num_positions = a.batch * a.num_heads * a.num_q_blocks, num_teams = TEAMS * gridDim.x;
  for (int turn = 0;; turn++) {
    const int count = turn == 0 ? 1 : TEAM_BLOCKS, before = turn == 0 ? 0 : 1 + (turn - 1) * TEAM_BLOCKS;
    const int begin = before * num_teams + (team * gridDim.x + blockIdx.x) * count;
    if (begin >= num_positions) break;
    const int end = min(begin + count, num_positions), end_summed = min(end, a.num_sums);
    if (begin < end_summed) {
      float4 *dq_sum = reinterpret_cast<float4 *>(dq_sum_of<Shape>(a, begin));
#pragma unroll 4
      for (int i = thread; i < (end_summed - begin) * Shape::block_q * Shape::head_dim / 4; i += TEAM_THREADS)
        dq_sum[i] = make_float4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int position = begin; position < end; position++) {
      const RowBlock block = row_block_at(a, position);
      const int first_row = block.q_block * Shape::block_q;
      // Of a row block all rows that the sequence has are read, or none.
      const int num_rows = row.is_read({block.batch, block.head, first_row})
                               ? sequence_of(a, block.batch).num_rows() - first_row
                               : 0;
      int own = thread / Row::LANES;  // the first of the thread's four rows, in the row block
      PaddedRow mine = {block.batch, block.head, first_row + own};
      const typename Row::Io *o = row.part_of(a.o, mine), *dout = row.part_of(a.dout_rows, mine);
#pragma unroll 1
      for (; own < Shape::block_q; own += 4 * ROWS) {
        const int finished = own + sum_of_lane<Row::LANES>() * ROWS;
        const bool is_read = finished < num_rows;
        mine.row = first_row + finished;
        const float lse = row.lse_of(mine, is_read);
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; i++, o += ROWS * a.o.stride_row, dout += ROWS * a.dout_rows.stride_row)
          sums[i] = row.template dot<true>(o, dout, own + i * ROWS < num_rows ? a.head_dim - row.lane * 8 : 0);
        const float sum = sum_four<Row::LANES>(sums);
        if (row.hides_q(is_read, lse, sum))
          for (int i = row.lane % (Row::LANES / 4); i < Row::LANES; i += Row::LANES / 4) row.look_at_q(mine, i);
        if (row.lane % (Row::LANES / 4) == 0)
          row.finish(int64_t(position) * Shape::block_q + finished, mine, is_read, lse, sum);
      }
    }
    barrier<TEAM_THREADS>(1 + team);
    if (begin + thread < end) {
      fence_counts();
      tell_of_statistics<Shape>(a, begin + thread);
    }
  }
}

}  // namespace fa
