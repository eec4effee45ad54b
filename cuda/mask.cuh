// The mask: which columns a row sees, and which blocks are to be visited and need element tests.
#pragma once

#include "../c_src/core/mask.h"
#include "kernels.h"
#include "tile.cuh"

namespace fa {

using Range = fa_range;

// The columns that any of the rows sees; and the rows that see any of the columns.
__device__ inline fa_band band_of(const fa_cuda_window &w) {
  return {0, w.seqlen_q, 0, w.seqlen_k, w.left, w.right};
}
__device__ inline Range visible_columns(const fa_cuda_window &w, Range rows) {
  return fa_band_columns(band_of(w), rows);
}
__device__ inline Range visible_rows(const fa_cuda_window &w, Range columns) {
  return fa_band_rows(band_of(w), columns);
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
  return fa_band_sees_all(band_of(w), rows, {column, column + num_columns});
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
