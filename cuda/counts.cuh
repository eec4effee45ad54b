// Counts in memory by which blocks of threads wait for what others write: one thread counts on when that has
// been made, and one waits until the count is high enough.
#pragma once

#include "ptx.cuh"

namespace fa {

// RELAXED: the caller has a fence of its own, between the count that it saw and what that allows, or between
// what was made and its count.
template <bool RELAXED = false>
__device__ inline int look_at_count(const int32_t *count) {
  return RELAXED ? load_relaxed(count) : load_acquire(count);
}
__device__ inline void wait_for_count(const int32_t *count, int wanted) {
  while (look_at_count(count) < wanted) let_others_run();
}
template <bool RELAXED = false>
__device__ inline void count_on(int32_t *count) {
  if (RELAXED)
    add_relaxed(count, 1);
  else
    add_release(count, 1);
}
__device__ inline void fence_counts() { fence_acquire_release(); }

}  // namespace fa
