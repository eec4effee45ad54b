// f32 copied beside a kernel of Hopper's: a few large blocks of threads, each with all registers of its
// multiprocessor, copy while the kernel computes on the multiprocessors that they leave, and, as they end, on
// these too. The kernel's producers wait for the columns that they are about to load.
#pragma once

#include "counts.cuh"
#include "split.cuh"

namespace fa {
namespace hopper {

// Which count tells of the copies of a column of k and v, and that of all; both count FA_CUDA_SCALE_ROWS
// columns as one.
__device__ inline int32_t *count_of_columns(const fa_cuda_arguments &a, int batch, int kv_head, int column) {
  return a.columns_done + (batch * a.num_kv_heads + kv_head) * FA_CUDA_DONE_GROUPS(a.window.seqlen_k) +
         column / FA_CUDA_DONE_ROWS;
}
__device__ inline int32_t *count_of_all_columns(const fa_cuda_arguments &a) {
  return a.columns_done + a.batch * a.num_kv_heads * FA_CUDA_DONE_GROUPS(a.window.seqlen_k);
}
__device__ inline bool are_all_columns_there(const fa_cuda_arguments &a) {
  return look_at_count(count_of_all_columns(a)) >= a.batch * a.num_kv_heads * a.k.num_scales;
}
// Waits for those that are counted with a column.
__device__ inline void wait_for_columns(const fa_cuda_arguments &a, int batch, int kv_head, int column) {
  constexpr int EACH = FA_CUDA_DONE_ROWS / FA_CUDA_SCALE_ROWS;
  wait_for_count(count_of_columns(a, batch, kv_head, column),
                 min(a.k.num_scales - column / FA_CUDA_DONE_ROWS * EACH, EACH));
}

// By a team: copies columns of k and v, and tells of them. Both are aligned.
template <int LANES>
__device__ inline void copy_columns(SplitTeam<LANES> &team, const fa_cuda_arguments &a,
                                    const fa_cuda_splits &splits, const fa_cuda_split &k,
                                    const fa_cuda_split &v, const ScaledRows &columns) {
  team.template copy<true>(splits, k, columns);
  team.template copy<true>(splits, v, columns);
  team.meet();
  if (team.thread > 0) return;
  fence_counts();
  count_on<true>(count_of_columns(a, columns.batch, columns.head, columns.first_row));
  count_on<true>(count_of_all_columns(a));
}

// The teams of all blocks share the work: their number, and the place of one among them.
template <class Team>
__device__ inline int num_teams() {
  return FA_CUDA_BESIDE_THREADS / Team::THREADS * gridDim.x;
}
template <class Team>
__device__ inline int place_of_team(const Team &team) {
  return team.number * gridDim.x + blockIdx.x;
}

// Whether copies are made beside the kernel, which then begins without a wait for these, and ends behind them.
template <class Shape>
__device__ inline bool has_copies_beside(const fa_cuda_arguments &a) {
  return Shape::beside && a.columns_done;
}

}  // namespace hopper
}  // namespace fa
