// The mask: which columns a row sees, and which blocks are to be visited and need element tests.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace fa {

struct Range {  // begin <= x < end; empty where end <= begin
  int begin, end;
};

// The columns that any of the rows sees; and the rows that see any of the columns.
__device__ inline Range visible_columns(const fa_cuda_window &w, Range rows) {
  const int diagonal = w.seqlen_k - w.seqlen_q;
  return {max(rows.begin + diagonal - w.left, 0), min(rows.end + diagonal + w.right, w.seqlen_k)};
}
__device__ inline Range visible_rows(const fa_cuda_window &w, Range columns) {
  const int diagonal = w.seqlen_q - w.seqlen_k;
  return {max(columns.begin + diagonal - w.right, 0), min(columns.end + diagonal + w.left, w.seqlen_q)};
}

// The blocks of `size` that a range touches; {0, 0} where it is empty.
__device__ inline Range blocks_of(Range range, int size) {
  if (range.end <= range.begin) return {0, 0};
  return {range.begin / size, (range.end + size - 1) / size};
}

__device__ inline Range block_range(int block, int size, int length) {
  return {block * size, min((block + 1) * size, length)};
}

// Whether every row sees every column of the block, the columns past the end of the sequence included.
__device__ inline bool is_fully_visible(const fa_cuda_window &w, Range rows, int column, int num_columns) {
  const int diagonal = w.seqlen_k - w.seqlen_q;
  return column + num_columns <= w.seqlen_k && column >= rows.end - 1 + diagonal - w.left &&
         column + num_columns - 1 <= rows.begin + diagonal + w.right;
}

// Scores of invisible elements become -inf, but for groups of columns from num_columns on. (row, column) is the
// accumulator's first element. Groups that all rows see are not tested.
template <int MT, int NT>
__device__ inline void mask_scores(Accumulator<MT, NT> &scores, const fa_cuda_window &w, int row, int column,
                                   int num_columns = NT * 8) {
  if (visible_columns(w, {row + 16 * MT - 1, row + 16 * MT}).begin > column)
    for_each_element<MT, NT>(scores, [&](int i, int j, float &score) {
      if (column + j < visible_columns(w, {row + i, row + i + 1}).begin) score = -INFINITY;
    });
  const int all_see = visible_columns(w, {row, row + 1}).end - column;
  if (all_see < NT * 8) {
#pragma unroll
    for (int n = 0; n < NT && (n == 0 || n * 8 < num_columns); n += GROUP_TILES)
      if (all_see < (n + GROUP_TILES) * 8)
        for_each_element<MT, NT>(scores, n, min(n + GROUP_TILES, NT), [&](int i, int j, float &score) {
          if (column + j >= visible_columns(w, {row + i, row + i + 1}).end) score = -INFINITY;
        });
  }
}

// The same of transposed scores: (row, column) is the first element still, but rows run along the accumulator's
// columns.
template <int MT, int NT>
__device__ inline void mask_transposed_scores(Accumulator<MT, NT> &scores, const fa_cuda_window &w, int row,
                                              int column) {
  for_each_element<MT, NT>(scores, [&](int j, int i, float &score) {
    const Range visible = visible_rows(w, {column + j, column + j + 1});
    if (row + i < visible.begin || row + i >= visible.end || column + j >= w.seqlen_k) score = -INFINITY;
  });
}

}  // namespace fa
