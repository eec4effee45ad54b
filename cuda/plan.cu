// The kernel before a pass over a problem with bands: what every block of rows or of columns visits, in which
// order blocks are begun, and which late. The bands are data that nobody has checked; all who read them clamp
// them alike. Loops are short, not unrolled: this code runs once, and is seldom in a cache.
#include "ptx.cuh"
#include "schedule.cuh"

namespace fa {

constexpr int NUM_WARPS = FA_CUDA_PLAN_THREADS / 32;
// Blocks are ordered by their visits, exactly up to so many.
constexpr int NUM_KEYS = 1024;
// Blocks whose plans lie in shared memory while they are made, by number.
constexpr int NUM_SHARED = 2048;

// And those among which there may be late ones, by rank.
constexpr int NUM_RANKED = 1024;
struct Ranked {
  int num_visits, first_band;
};

__device__ inline int key_of(int num_visits) { return NUM_KEYS - 1 - min(num_visits, NUM_KEYS - 1); }

// The sum of the numbers of all threads before this one, whose numbers become these sums.
__device__ inline int sum_before(int x) {
  __shared__ int of_warps[NUM_WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  const int before = lane < warp ? of_warps[lane] : 0;
  return __reduce_add_sync(~0u, before) + sum - x;
}

__device__ inline fa_band whole_band(const fa_cuda_plans &a) {
  return {0, a.window.seqlen_q, 0, a.window.seqlen_k, a.window.left, a.window.right};
}

// How many blocks of the other side a block visits in a band.
template <bool OF_ROWS>
__device__ inline int visits_in_band(const fa_cuda_plan_side &side, const fa_band &whole, const fa_band &band,
                                     int block) {
  const Range own = block_range(block, side.size, OF_ROWS ? whole.q_end : whole.k_end);
  return blocks_of(seen_in_band<OF_ROWS>(band, own), side.other_size).count;
}

// Notes the visits of every block in every band. A warp takes a band, and its lanes the blocks that it touches.
// What orders the blocks takes the place of their numbers meanwhile: their visits, or, by bands, those of the
// longest block in any of their bands.
template <bool OF_ROWS>
__device__ inline void count_visits(const fa_cuda_plans &a, const fa_cuda_plan_side &side, const int32_t *bands,
                                    fa_cuda_block_plan *blocks) {
  const fa_band whole = whole_band(a);
#pragma unroll 1
  for (int number = threadIdx.x / 32; number < a.num_bands; number += NUM_WARPS) {
    const fa_band band = band_at(whole, bands, number);
    const Range own = seen_in_band<!OF_ROWS>(band, {0, OF_ROWS ? whole.k_end : whole.q_end});
    const int end = own.begin < own.end ? (own.end + side.size - 1) / side.size : 0;
    const int first = own.begin / side.size + threadIdx.x % 32;
    int most = 0;
#pragma unroll 1
    for (int block = first; block < end; block += 32) {
      const int visits = visits_in_band<OF_ROWS>(side, whole, band, block);
      if (visits == 0) continue;
      atomicMin(&blocks[block].first_band, number);
      atomicMax(&blocks[block].end_band, number + 1);
      atomicAdd(&blocks[block].num_visits, visits);
      if (side.order == FA_CUDA_BY_VISITS) atomicAdd(&blocks[block].block, visits);
      most = max(most, visits);
    }
    most = __reduce_max_sync(~0u, most);
    if (side.order == FA_CUDA_BY_BAND)
#pragma unroll 1
      for (int block = first; block < end; block += 32) atomicMax(&blocks[block].block, most);
  }
}

// Writes the plans in the order of their keys. Those of a key lie by number, but by visits from the last to the
// first: with causal bands, row blocks that have the same columns in common follow one another. firsts: of each
// key, its first rank. Notes the ranks where there is room for them.
__device__ inline void write_in_order(const fa_cuda_plan_side &side, const fa_cuda_block_plan *blocks,
                                      int *firsts, Ranked *ranks, fa_cuda_block_plan *to) {
  firsts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < side.num_blocks; i += FA_CUDA_PLAN_THREADS)
    atomicAdd(firsts + key_of(blocks[i].block), 1);
  __syncthreads();
  const int before = sum_before(firsts[threadIdx.x]);
  firsts[threadIdx.x] = before;
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < side.num_blocks; first += FA_CUDA_PLAN_THREADS) {
    const int i = first + threadIdx.x,
              num_warps = (min(side.num_blocks - first, FA_CUDA_PLAN_THREADS) + 31) / 32;
#pragma unroll 1
    for (int warp = 0; warp < num_warps; warp++) {  // one after the other, for an order that is always the same
      if (threadIdx.x / 32 == warp) {
        const bool there = i < side.num_blocks;
        const int number = side.order == FA_CUDA_BY_VISITS ? side.num_blocks - 1 - i : i;
        fa_cuda_block_plan plan = there ? blocks[number] : fa_cuda_block_plan{};
        const int key = there ? key_of(plan.block) : -1;
        plan.block = number;
        const uint32_t same = __match_any_sync(~0u, key);
        const int earlier = __popc(same & ((1u << threadIdx.x % 32) - 1));
        int rank = there ? firsts[key] + earlier : 0;
        __syncwarp();
        if (there && earlier == 0) firsts[key] += __popc(same);
        if (there) to[rank] = plan;
        if (there && rank < NUM_RANKED) ranks[rank] = {plan.num_visits, plan.first_band};
      }
      __syncthreads();
    }
  }
}

// Finds late blocks among the ranks, by a warp: as few of the last ones as give every multiprocessor something
// to do until the block before them is done, or a fourth of the longest. By bands they begin where another band
// does, since rows of a band that is cut in two would go to memory and come back. There are none where they
// would be a large part of all, or as long as others.
constexpr int LEAST_PARTS_OF_LATE = 3;
__device__ inline int find_late(const fa_cuda_plan_side &side, const Ranked *ranks) {
  const int lane = threadIdx.x % 32;
  int all = 0, most = 0, late = 0;
#pragma unroll 1
  for (int i = lane; i < side.num_blocks; i += 32) {
    all += ranks[i].num_visits;
    most = max(most, ranks[i].num_visits);
  }
  all = __reduce_add_sync(~0u, all);
  most = __reduce_max_sync(~0u, most);
#pragma unroll 1
  for (int end = side.num_blocks; end > 1; end -= 32) {
    const int i = end - 1 - lane;
    int from_here = i >= 0 ? ranks[i].num_visits : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int behind = __shfl_up_sync(~0u, from_here, step);
      if (lane >= step) from_here += behind;
    }
    from_here += late;
    bool may_begin = false;
    if (i > 0) {
      const Ranked before = ranks[i - 1];
      may_begin = from_here >= side.late_visits * float(max(before.num_visits, most / 4)) &&
                  (side.order == FA_CUDA_BY_VISITS || ranks[i].first_band != before.first_band);
    }
    const uint32_t found = __ballot_sync(~0u, may_begin);
    late = __shfl_sync(~0u, from_here, found ? __ffs(found) - 1 : 31);
    if (!found) continue;
    const int first = end - __ffs(found), count = side.num_blocks - first;
    return late <= all / LEAST_PARTS_OF_LATE && late * 4.0f <= most * 3.0f * count ? first : side.num_blocks;
  }
  return side.num_blocks;
}

// Says what the only band of a batch is, as where an answer is asked for there is one: all that the window
// shows, or what that shows under a causal mask.
__device__ inline void answer(const fa_cuda_plans &a, const int32_t *bands) {
  const fa_band whole = whole_band(a), band = band_at(whole, bands, 0);
  const bool spans = band.q_begin == 0 && band.q_end == whole.q_end && band.k_begin == 0 &&
                     band.k_end == whole.k_end && band.left == whole.left;
  if (!spans || band.right != whole.right) a.answer->hides = a.call;
  if (!spans || band.right != 0) a.answer->is_not_causal = a.call;
}

__global__ void __launch_bounds__(FA_CUDA_PLAN_THREADS) plan(const __grid_constant__ fa_cuda_plans a) {
  __shared__ fa_cuda_block_plan shared[NUM_SHARED];
  __shared__ int firsts[NUM_KEYS];
  __shared__ Ranked ranks[NUM_RANKED];
  static_assert(NUM_KEYS == FA_CUDA_PLAN_THREADS, "a thread a key");
  let_dependents_start();
  const fa_cuda_plan_side &side = a.sides[blockIdx.y];
  const int32_t *bands = a.bands ? a.bands + int64_t(blockIdx.x) * a.num_bands * 6 : nullptr;
  fa_cuda_block_plan *to = side.plans + int64_t(blockIdx.x) * side.num_blocks;
  if (a.answer && blockIdx.y == 0 && threadIdx.x == 0) answer(a, bands);
  if (a.tickets && blockIdx.x == 0 && threadIdx.x < FA_CUDA_NUM_TICKETS) a.tickets[threadIdx.x] = 0;
  // Where they do not fit, they are made behind the plans that are to be.
  fa_cuda_block_plan *blocks = side.num_blocks <= NUM_SHARED     ? shared
                               : side.order == FA_CUDA_BY_NUMBER ? to
                                                                 : to + int64_t(gridDim.x) * side.num_blocks;
#pragma unroll 1
  for (int i = threadIdx.x; i < side.num_blocks; i += FA_CUDA_PLAN_THREADS) blocks[i] = {0, a.num_bands, 0, 0};
  __syncthreads();
  if (side.of_rows)
    count_visits<true>(a, side, bands, blocks);
  else
    count_visits<false>(a, side, bands, blocks);
  __syncthreads();
  if (side.order != FA_CUDA_BY_NUMBER)
    write_in_order(side, blocks, firsts, ranks, to);
  else
#pragma unroll 1
    for (int i = threadIdx.x; i < side.num_blocks; i += FA_CUDA_PLAN_THREADS)
      to[i] = {i, blocks[i].first_band, blocks[i].end_band, blocks[i].num_visits};
  if (side.num_early && threadIdx.x < 32) {
    const int num_early = side.num_blocks <= NUM_RANKED ? find_late(side, ranks) : side.num_blocks;
    if (threadIdx.x == 0) *side.num_early = num_early;
  }
}

// Key lengths as bands, one each.
__global__ void __launch_bounds__(FA_CUDA_SMALL_KERNEL_THREADS)
    write_bands(const __grid_constant__ fa_cuda_plans a) {
  const int batch = blockIdx.x * FA_CUDA_SMALL_KERNEL_THREADS + threadIdx.x;
  if (batch >= a.bands_batch) return;
  const int32_t words[6] = {0,         a.window.seqlen_q, 0, min(a.key_lengths[batch], a.window.seqlen_k),
                            INT32_MAX, INT32_MAX};
  for (int i = 0; i < 6; i++) const_cast<int32_t *>(a.bands)[int64_t(batch) * 6 + i] = words[i];
}

}  // namespace fa

const void *const fa_cuda_lengths_kernel = fa::address_of_kernel(fa::write_bands);
const void *const fa_cuda_plan_kernel = fa::address_of_kernel(fa::plan);
