// Who works on what: the sequences of a batch, their blocks of rows and columns, and how a number (blockIdx, a
// ticket, an index into a padded array) becomes one of these. Nothing else knows where a sequence begins and
// ends.
#pragma once

#include "../c_src/core/mask.h"
#include "kernels.h"

namespace fa {

using Range = fa_range;

// ---- a sequence ----------------------------------------------------------------------------------------

// One sequence of the batch: what its rows see, and where they lie. Rows and columns are counted from the
// sequence's first one, which is row first_row of q, o, dout, dq and column first_column of k, v, dk, dv.
struct Sequence {
  fa_band band;
  int batch, first_row, first_column;

  __device__ int num_rows() const { return band.q_end; }
  __device__ int num_columns() const { return band.k_end; }
};

__device__ inline Sequence sequence_of(const fa_cuda_arguments &a, int batch) {
  return {{0, a.window.seqlen_q, 0, a.window.seqlen_k, a.window.left, a.window.right}, batch, 0, 0};
}

// The same of a plain shape, which may be for masks that turn out to be causal.
template <class Shape>
__device__ inline Sequence sequence_of(const fa_cuda_arguments &a, int batch) {
  Sequence sequence = sequence_of(a, batch);
  if constexpr (Shape::is_causal) sequence.band.right = 0;
  return sequence;
}

// The columns that any of the rows sees; and the rows that see any of the columns.
__device__ inline Range visible_columns(const Sequence &s, Range rows) { return fa_band_columns(s.band, rows); }
__device__ inline Range visible_rows(const Sequence &s, Range columns) { return fa_band_rows(s.band, columns); }

// Where the lse of a head's row lies.
__device__ inline float *lse_at(const fa_cuda_arguments &a, const Sequence &s, int head, int row) {
  return a.lse + (int64_t(s.batch) * a.num_heads + head) * a.window.seqlen_q + s.first_row + row;
}

// The gradient by the lse at an address, one of a batch's.
__device__ inline float dlse_at(const fa_cuda_arguments &a, const fa_cuda_dlse &dlse, const float *lse,
                                int batch) {
  return dlse.data ? dlse.data[lse - a.lse - batch * dlse.batch_repeats] : 0;
}

// ---- blocks ----------------------------------------------------------------------------------------------

// The blocks of rows or columns that a kernel visits, from the last to the first: with a causal mask, those
// that need element tests come first. The blocks are contiguous today.
struct Blocks {
  int last, count;

  // The block that is visited after `i` others.
  __device__ int at(int i) const { return last - i; }
  // How many of the blocks lie before this one.
  __device__ int place_of(int block) const { return block - (last - count + 1); }
};

// The blocks of `size` that a range touches.
__device__ inline Blocks blocks_of(Range range, int size) {
  if (range.end <= range.begin) return {0, 0};
  const int end = (range.end + size - 1) / size;
  return {end - 1, end - range.begin / size};
}

__device__ inline Range block_range(int block, int size, int length) {
  return {block * size, min((block + 1) * size, length)};
}

// The rows of a row block, the columns of a column block, and the blocks that these see and are seen by.
template <class Shape>
__device__ inline Range row_range(const Sequence &s, int q_block) {
  return block_range(q_block, Shape::block_q, s.num_rows());
}
template <class Shape>
__device__ inline Range column_range(const Sequence &s, int k_block) {
  return block_range(k_block, Shape::block_k, s.num_columns());
}
template <class Shape>
__device__ inline Blocks k_blocks_of(const Sequence &s, Range rows) {
  return blocks_of(visible_columns(s, rows), Shape::block_k);
}
template <class Shape>
__device__ inline Blocks q_blocks_of(const Sequence &s, Range columns) {
  return blocks_of(visible_rows(s, columns), Shape::block_q);
}

// The column blocks of a part of a forward in parts.
__device__ inline Range blocks_of_part(const fa_cuda_arguments &a, int part) {
  return {int(int64_t(a.num_k_blocks) * part / a.num_column_parts),
          int(int64_t(a.num_k_blocks) * (part + 1) / a.num_column_parts)};
}

// ---- bands and visits ---------------------------------------------------------------------------------------
//
// Where a problem has bands, or a program that acts on its scores, kernels are compiled GENERAL. A block of
// rows then visits, for each band that touches it, the column blocks of which the band shows its rows
// something, and a column block visits row blocks in the same way. A visit computes the cells of its band
// alone, so that a pair of blocks that two bands touch is visited twice and no cell is computed twice. Without
// bands, the whole problem is the one band.

__device__ inline fa_band whole_band(const fa_cuda_arguments &a) {
  return {0, a.window.seqlen_q, 0, a.window.seqlen_k, a.window.left, a.window.right};
}

// A band of the tensor, clamped to the whole, or the whole where there is no tensor.
__device__ inline fa_band band_at(const fa_band &whole, const int32_t *bands, int64_t number) {
  if (!bands) return whole;
  const int32_t *words = bands + 6 * number;
  int32_t six[6];
#pragma unroll
  for (int i = 0; i < 6; i++) six[i] = __ldg(words + i);
  return fa_band_within(whole, six);
}
__device__ inline fa_band band_at(const fa_cuda_arguments &a, int batch, int number) {
  const int64_t first = a.bands_batch > 1 ? int64_t(batch) * a.num_bands : 0;
  return band_at(whole_band(a), a.bands, first + number);
}

__device__ inline Range overlap(Range a, Range b) { return {max(a.begin, b.begin), min(a.end, b.end)}; }

// What a band shows some rows of the columns, and to which rows it shows something of some columns; empty where
// end <= begin. The pairs of blocks that meet are the same from both sides.
template <bool OF_ROWS>
__device__ inline Range seen_in_band(const fa_band &band, Range own) {
  own = overlap(own, OF_ROWS ? Range{band.q_begin, band.q_end} : Range{band.k_begin, band.k_end});
  if (own.begin >= own.end) return {0, 0};
  return OF_ROWS ? fa_band_columns(band, own) : fa_band_rows(band, own);
}

// How many bands a kernel goes through, and the first column that one of them shows a row, or the first row to
// which it shows a column; negative: there is none.
__device__ inline int num_bands_of(const fa_cuda_arguments &a) { return a.bands ? a.num_bands : 1; }
template <bool OF_ROWS>
__device__ inline int first_seen(const fa_cuda_arguments &a, int batch, int i) {
  for (int number = 0; number < num_bands_of(a); number++) {
    const Range seen = seen_in_band<OF_ROWS>(band_at(a, batch, number), {i, i + 1});
    if (seen.begin < seen.end) return seen.begin;
  }
  return -1;
}

// The part of `size` columns from `column` on that a band has, counted from the first. Behind its ends padding
// and caches hold garbage; that other rows alone see a column is no reason to expect any.
__device__ inline Range columns_of_band(const fa_band &band, int column, int size) {
  return {max(band.k_begin - column, 0), min(band.k_end - column, size)};
}

// The plan of a block: of rows or columns; at its rank in the order in which they are begun, or, where that is
// by number, at its number.
template <bool OF_ROWS>
__device__ inline fa_cuda_block_plan plan_at(const fa_cuda_arguments &a, int batch, int rank) {
  const fa_cuda_block_plan *plans = OF_ROWS ? a.row_plans : a.column_plans;
  const int num_blocks = OF_ROWS ? a.num_q_blocks : a.num_k_blocks;
  const int4 four = __ldg(reinterpret_cast<const int4 *>(plans) +
                          (a.bands_batch > 1 ? int64_t(batch) * num_blocks : 0) + rank);
  return {four.x, four.y, four.z, four.w};
}

// Goes through the visits of a block, which has the rows or columns `own`: band by band in the order of their
// numbers, and in each from the last block of the other side, of SIZE, to the first. These lie on the grid that
// begins at row or column 0, or, ANYWHERE, begin with the first row or column that own sees in the band, or
// where a program acts on scores up to 15 before it, or on the grid, too.
// Whoever goes through them finds the same visits in the same order.
template <bool GENERAL, bool OF_ROWS, int SIZE, bool ANYWHERE = false>
struct Visits {
  const fa_cuda_arguments *a;  // no reference, so that one can be assigned to another
  int batch, end_band;
  Range own;
  fa_band band;    // in which this visit sees
  int number;      // of the band
  int begin;       // the first row or column of the block that is visited
  int last_begin;  // and of the one that is visited last in this band

  // At the first visit. The plan is that of the block; without bands nobody reads it.
  __device__ Visits(const fa_cuda_arguments &a, int batch, const fa_cuda_block_plan &plan, Range own)
      : a(&a),
        batch(batch),
        end_band(plan.end_band),
        own(own),
        number(plan.first_band - 1),
        begin(0),
        last_begin(0) {
    if constexpr (GENERAL) {
      skip(1);
    } else {
      number = 0;
      begin = enter(whole_band(a)) - SIZE;
    }
  }
  __device__ bool done() const { return begin < last_begin; }
  __device__ int block() const { return begin / SIZE; }  // on the grid
  __device__ void advance() { skip(1); }

  // Goes on by `count` visits, or to the end.
  __device__ void skip(int count) {
    begin -= count * SIZE;
    if constexpr (GENERAL)
      while (begin < last_begin) {
        const int missing = last_begin - begin;
        if (++number >= end_band) return;
        begin = enter(band_at(*a, batch, number)) - missing;
      }
  }

 private:
  // Programs take the columns of scores at multiples of 16, and flags on the grid.
  __device__ int program_mask() const {
    return !GENERAL || !a->program.is_there ? 0 : a->program.flags.words ? SIZE - 1 : 15;
  }
  // Where the blocks end that own visits in a band.
  __device__ int enter(const fa_band &next) {
    band = next;
    const Range seen = GENERAL   ? seen_in_band<OF_ROWS>(band, own)
                       : OF_ROWS ? fa_band_columns(band, own)
                                 : fa_band_rows(band, own);
    last_begin = ANYWHERE ? seen.begin & ~program_mask() : seen.begin / SIZE * SIZE;
    if (seen.begin >= seen.end) return last_begin;
    return last_begin + (seen.end - last_begin + SIZE - 1) / SIZE * SIZE;
  }
};

// How many visits of a row block come before that of a column block in a band, where they are ordered by column
// blocks, and by bands where these are the same. plan: that of the row block; count(blocks): how many of these,
// which follow one another, are visited at all.
struct AllBlocks {
  __device__ int operator()(Range blocks) const { return blocks.end - blocks.begin; }
};
template <class Shape, class Count = AllBlocks>
__device__ inline int place_of_visit(const fa_cuda_arguments &a, int batch, const fa_cuda_block_plan &plan,
                                     Range rows, int k_block, int number, Count count = Count()) {
  int place = 0;
  for (int n = plan.first_band; n < plan.end_band; n++) {
    const Blocks blocks = blocks_of(seen_in_band<true>(band_at(a, batch, n), rows), Shape::block_k);
    const int before = min(max(blocks.place_of(k_block + (n < number)), 0), blocks.count);
    place += count({blocks.at(blocks.count - 1), blocks.at(blocks.count - 1) + before});
  }
  return place;
}

// ---- from numbers to blocks --------------------------------------------------------------------------------

__device__ inline int heads_per_kv(const fa_cuda_arguments &a) { return a.num_heads / a.num_kv_heads; }
__device__ inline int kv_head_of(const fa_cuda_arguments &a, int head) { return head / heads_per_kv(a); }

// A block of rows of one query head. Its position is its place in arrays [batch, num_heads, num_q_blocks], of
// which 32 bits hold every index.
struct RowBlock {
  int batch, head, q_block;
};
__device__ inline int position_of(const fa_cuda_arguments &a, const RowBlock &block) {
  return (block.batch * a.num_heads + block.head) * a.num_q_blocks + block.q_block;
}
__device__ inline RowBlock row_block_at(const fa_cuda_arguments &a, uint32_t position) {
  const uint32_t batch_head = position / a.num_q_blocks;
  return {int(batch_head / a.num_heads), int(batch_head % a.num_heads), int(position % a.num_q_blocks)};
}

// The forward of one row block per block of threads: those of a head that have the most to do come first. The
// plans say which these are; without bands they are the last ones, if there is a mask.
template <bool GENERAL>
__device__ inline RowBlock row_block_of(const fa_cuda_arguments &a, uint32_t index, fa_cuda_block_plan &plan) {
  RowBlock block = row_block_at(a, index);
  if constexpr (GENERAL)
    plan = plan_at<true>(a, block.batch, block.q_block), block.q_block = plan.block;
  else
    block.q_block = a.num_q_blocks - 1 - block.q_block;
  return block;
}

// The persistent forward: row blocks in the order in which they are begun, from the last heads to the first,
// heads_at_once of them together, so that their k and v stay in cache, and of those the last row blocks first,
// which with a causal mask have the most to do. Short ones at the end let all multiprocessors end at once; the
// group that has fewer heads is the first. False where there are no more blocks. With bands these are places in
// the order of plans, see planned_row_block.
__device__ inline bool persistent_row_block_of(const fa_cuda_arguments &a, uint32_t index, RowBlock &block) {
  const uint32_t num_blocks = a.batch * a.num_heads * a.num_q_blocks;
  if (index >= num_blocks) return false;
  index = num_blocks - 1 - index;
  const int first = index / (a.heads_at_once * a.num_q_blocks) * a.heads_at_once;
  const uint32_t num_heads = min(a.heads_at_once, a.batch * a.num_heads - first);
  index -= first * a.num_q_blocks;
  const uint32_t batch_head = first + index % num_heads;
  block = {int(batch_head / a.num_heads), int(batch_head % a.num_heads), int(index / num_heads)};
  return true;
}

// The place in that order where the next heads begin.
__device__ inline uint32_t next_heads(const fa_cuda_arguments &a, uint32_t index) {
  const uint32_t num_blocks = a.batch * a.num_heads * a.num_q_blocks,
                 together = a.heads_at_once * a.num_q_blocks;
  return num_blocks - (num_blocks - 1 - index) / together * together;
}

// What is begun as the `ticket`-th where some blocks are late, behind all heads' early ones, and in more heads
// alternately, as they read little: the head, and the rank of its block among the plans.
constexpr int LATE_HEADS_AT_ONCE = 16;
struct HeadRank {
  int head, rank;
};
__device__ inline HeadRank begun_in_phases(const fa_cuda_arguments &a, int ticket, int num_heads,
                                           int num_blocks) {
  const int num_early = *a.num_early;
  const bool is_late = ticket >= num_heads * num_early;
  if (is_late) ticket -= num_heads * num_early;
  const int count = is_late ? num_blocks - num_early : num_early;
  const int at_once = is_late ? LATE_HEADS_AT_ONCE : a.heads_at_once;
  const int begun = ticket / (at_once * count) * at_once, heads = min(at_once, num_heads - begun);
  ticket -= begun * count;
  return {begun + ticket % heads, ticket / heads + (is_late ? num_early : 0)};
}

// The same as persistent_row_block_of, where row blocks may be late.
__device__ inline bool row_block_in_phases(const fa_cuda_arguments &a, uint32_t ticket, RowBlock &block) {
  if (!a.num_early) return persistent_row_block_of(a, ticket, block);
  const int num_heads = a.batch * a.num_heads;
  if (ticket >= uint32_t(num_heads * a.num_q_blocks)) return false;
  const HeadRank begun = begun_in_phases(a, ticket, num_heads, a.num_q_blocks);
  const int batch_head = num_heads - 1 - begun.head;
  block = {batch_head / a.num_heads, batch_head % a.num_heads, a.num_q_blocks - 1 - begun.rank};
  return true;
}

// Makes of a place in that order the row block that is begun there: of those of its batch the plans have the
// longest first, as here the last are.
__device__ inline fa_cuda_block_plan planned_row_block(const fa_cuda_arguments &a, RowBlock &block) {
  const fa_cuda_block_plan plan = plan_at<true>(a, block.batch, a.num_q_blocks - 1 - block.q_block);
  block.q_block = plan.block;
  return plan;
}

// The backward: column blocks in the order in which they are begun, those of heads_at_once heads alternately,
// the first column blocks first, because with a causal mask they have the most to do. Or other blocks in the
// same order, of which each head has head_blocks. Heads are those of keys and values, or, where the query heads
// that share one are in `parts`, these.
struct ColumnBlock {
  int batch, kv_head, k_block;
};
__device__ inline ColumnBlock column_block_of(const fa_cuda_arguments &a, int index, int head_blocks,
                                              int parts) {
  const int first = index / (a.heads_at_once * head_blocks) * a.heads_at_once, heads = a.num_kv_heads * parts;
  const int num_heads = min(a.heads_at_once, a.batch * heads - first);
  index -= first * head_blocks;
  const int batch_head = first + index % num_heads;
  return {batch_head / heads, batch_head % heads, index / num_heads};
}

// The index in that order where the next heads begin.
__device__ inline int next_column_heads(const fa_cuda_arguments &a, int index) {
  const int together = a.heads_at_once * a.num_k_blocks;
  return min((index / together + 1) * together, a.batch * a.num_kv_heads * a.num_k_blocks);
}

// The index in that order of the column block that is begun as the `ticket`-th, where some are late; beyond the
// last one it is the ticket itself.
__device__ inline int column_block_in_phases(const fa_cuda_arguments &a, int ticket) {
  const int num_heads = a.batch * a.num_kv_heads;
  if (ticket >= num_heads * a.num_k_blocks) return ticket;
  const HeadRank begun = begun_in_phases(a, ticket, num_heads, a.num_k_blocks);
  const int first = begun.head / a.heads_at_once * a.heads_at_once;
  return first * a.num_k_blocks + begun.rank * min(a.heads_at_once, num_heads - first) + begun.head - first;
}

// The persistent backward's ends of row blocks, in the order in which their column blocks are done.
__device__ inline RowBlock finished_row_block_of(const fa_cuda_arguments &a, int index, int parts) {
  const int group = a.num_heads / (a.num_kv_heads * parts);
  const ColumnBlock block = column_block_of(a, index, a.num_q_blocks * group, parts);
  return {block.batch, block.kv_head * group + block.k_block % group,
          a.num_q_blocks - 1 - block.k_block / group};
}

// Where all batches share a bias: of the heads of every batch one after the other those that lie in a number's
// place if all batches of a head follow one another.
__device__ inline void take_batches_together(const fa_cuda_arguments &a, int num_heads, int &batch, int &head) {
  if (!a.program.has_bias_of_batches) return;
  const int index = batch * num_heads + head;
  batch = index % a.batch, head = index / a.batch;
}

// A row of the backward's padded arrays [batch, num_heads, padded_rows]; batch is a.batch or more past their
// end.
struct PaddedRow {
  int batch, head, row;
};
__device__ inline PaddedRow padded_row_at(const fa_cuda_arguments &a, int64_t index) {
  const int64_t batch_head = index / a.padded_rows;
  return {int(batch_head / a.num_heads), int(batch_head % a.num_heads), int(index % a.padded_rows)};
}
__device__ inline int64_t padded_index_of(const fa_cuda_arguments &a, const PaddedRow &r) {
  return (int64_t(r.batch) * a.num_heads + r.head) * a.padded_rows + r.row;
}
__device__ inline float delta_of(const fa_cuda_arguments &a, const PaddedRow &r) {
  return a.delta[padded_index_of(a, r)] / a.delta_factor;
}

// Rows of an f32 tensor that share a scale, numbered as its exponents [batch, num_heads, num_scales] are. False
// where the tensor has fewer.
struct ScaledRows {
  int batch, head, first_row;
};
__device__ inline bool scaled_rows_at(const fa_cuda_operand &operand, int batch, uint32_t index,
                                      ScaledRows &rows) {
  if (index >= int64_t(batch) * operand.num_heads * operand.num_scales) return false;
  const uint32_t batch_head = index / operand.num_scales;
  rows = {int(batch_head / operand.num_heads), int(batch_head % operand.num_heads),
          int(index % operand.num_scales) * FA_CUDA_SCALE_ROWS};
  return true;
}

// Whether masks of a general kernel's turn out to hide nothing, or to be causal, so that a plain one's code
// serves.
__device__ inline bool hides_nothing(const fa_cuda_arguments &a) {
  return a.answer && a.answer->hides != a.call;
}
__device__ inline bool is_causal(const fa_cuda_arguments &a) {
  return a.answer && a.answer->is_not_causal != a.call;
}

// ---- steps of a column block -------------------------------------------------------------------------------

// The backward of a column block goes through the row blocks that see it, in every query head of its group: one
// head after the other, one row block a step.
struct Step {
  int head, i;  // of the row blocks, the one visited after i others
};
__device__ inline Step next_step(Step step, const Blocks &q_blocks) {
  return step.i + 1 < q_blocks.count ? Step{step.head, step.i + 1} : Step{step.head + 1, 0};
}
// The step that comes `count` steps after a head's first.
__device__ inline Step step_after(Step first, int count, const Blocks &q_blocks) {
  return {first.head + count / q_blocks.count, count % q_blocks.count};
}

}  // namespace fa
