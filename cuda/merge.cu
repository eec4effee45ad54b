// Parts of attention merged, and the gradients of that. The kernels' argument is fa_merge itself. Each number
// moves once and little is computed of it, so that they take what memory takes: where all o lie alike, which
// the launch knows (fa_cuda_merge_tiles), a row's place is found once for all of them.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "merge.h"
#include "ptx.cuh"

namespace fa {
namespace {

constexpr int THREADS = FA_CUDA_MERGE_THREADS, SINK_THREADS = FA_CUDA_MERGE_SINK_THREADS;

// Eight numbers as they lie in memory: 16 bytes of a 16-bit type, and with HAS_F32 perhaps 32 of f32.
template <bool HAS_F32>
struct Eight {
  uint4 words[HAS_F32 ? 2 : 1];
};

template <class Io>
__device__ inline void to_floats(float (&x)[8], const uint4 *words) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = static_cast<float>(reinterpret_cast<const Io *>(words)[i]);
}

template <bool HAS_F32>
__device__ inline void to_floats(float (&x)[8], const Eight<HAS_F32> &eight, fa_dtype dtype) {
  if (HAS_F32 && dtype == FA_DTYPE_F32)
    to_floats<float>(x, eight.words);
  else if (dtype == FA_DTYPE_BF16)
    to_floats<__nv_bfloat16>(x, eight.words);
  else
    to_floats<__half>(x, eight.words);
}

template <class Io>
__device__ inline void from_floats(uint4 *words, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) reinterpret_cast<Io *>(words)[i] = static_cast<Io>(x[i]);
}

__device__ inline int log_bytes(fa_dtype dtype) { return dtype == FA_DTYPE_F32 ? 2 : 1; }

// A row of a head, and where its o begins, in eights of elements, where all lie alike.
struct Row {
  int batch, row, head;
  bool is_there;
  uint32_t offset;
};

__device__ inline int64_t offset_in(const fa_tensor &tensor, const Row &r) {
  return r.batch * tensor.stride_batch + r.row * tensor.stride_row + r.head * tensor.stride_head;
}

// The n-th row of this block's tile, whose heads of a row follow one another.
__device__ inline Row row_at(const fa_merge &m, const fa_cuda_merge_tiles &tiles, int n) {
  const unsigned head_tile = blockIdx.x % unsigned(tiles.num_head_tiles);
  const unsigned row_tile = blockIdx.x / unsigned(tiles.num_head_tiles);
  Row r;
  r.batch = blockIdx.y;
  r.row = (row_tile << tiles.log_rows) + (n >> tiles.log_heads);
  r.head = (head_tile << tiles.log_heads) + (n & ((1 << tiles.log_heads) - 1));
  r.is_there = r.row < int(m.seqlen_q) && r.head < int(m.num_heads);
  r.offset = r.batch * tiles.stride_batch + r.row * tiles.stride_row + r.head * tiles.stride_head;
  return r;
}

// Where number d of a row is. ALIKE: all o have the strides of merged's, and begin at multiples of eight
// numbers.
template <bool ALIKE>
__device__ inline char *address_of(const fa_part &part, const Row &r, int d) {
  char *data = static_cast<char *>(part.o.data);
  return ALIKE ? data + uint64_t(r.offset + d / 8) * (8u << log_bytes(part.dtype))
               : data + ((offset_in(part.o, r) + d) << log_bytes(part.dtype));
}

// Below 2^30, as that of a sink is.
__device__ inline uint32_t lse_index(const fa_merge &m, const Row &r) {
  return (r.batch * uint32_t(m.num_heads) + r.head) * uint32_t(m.seqlen_q) + r.row;
}

__device__ inline float &lse_of(const fa_merge &m, const fa_part &part, const Row &r) {
  return static_cast<float *>(part.lse)[lse_index(m, r)];
}

template <class Word>
__device__ inline void copy_some(Word *to, const Word *from, int wanted) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < wanted) to[i] = from[i];
}

__device__ inline bool is_whole(const void *at, int wanted) {
  return wanted >= 8 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
}

// Numbers d to d + 7 of a row; those past its end are 0.
template <bool ALIKE, bool HAS_F32>
__device__ inline Eight<HAS_F32> load(const fa_merge &m, const fa_part &part, const Row &r, int d) {
  Eight<HAS_F32> eight = {};
  const bool is_f32 = HAS_F32 && part.dtype == FA_DTYPE_F32;
  const char *from = address_of<ALIKE>(part, r, d);
  if (ALIKE || is_whole(from, m.head_dim - d)) {
    eight.words[0] = reinterpret_cast<const uint4 *>(from)[0];
    if constexpr (HAS_F32)
      if (is_f32) eight.words[1] = reinterpret_cast<const uint4 *>(from)[1];
  } else if (is_f32) {
    copy_some(reinterpret_cast<float *>(eight.words), reinterpret_cast<const float *>(from), m.head_dim - d);
  } else {
    copy_some(reinterpret_cast<uint16_t *>(eight.words), reinterpret_cast<const uint16_t *>(from),
              m.head_dim - d);
  }
  return eight;
}

template <bool ALIKE>
__device__ inline void store(const fa_merge &m, const fa_part &part, const Row &r, int d, const float (&x)[8]) {
  uint4 words[2];
  const bool is_f32 = part.dtype == FA_DTYPE_F32;
  if (part.dtype == FA_DTYPE_BF16)
    from_floats<__nv_bfloat16>(words, x);
  else if (part.dtype == FA_DTYPE_F16)
    from_floats<__half>(words, x);
  else
    from_floats<float>(words, x);
  char *to = address_of<ALIKE>(part, r, d);
  if (ALIKE || is_whole(to, m.head_dim - d)) {
    __stcs(reinterpret_cast<uint4 *>(to), words[0]);
    if (is_f32) __stcs(reinterpret_cast<uint4 *>(to) + 1, words[1]);
  } else if (is_f32) {
    copy_some(reinterpret_cast<float *>(to), reinterpret_cast<const float *>(words), m.head_dim - d);
  } else {
    copy_some(reinterpret_cast<uint16_t *>(to), reinterpret_cast<const uint16_t *>(words), m.head_dim - d);
  }
}

// The first sink of the row's head; the others follow num_heads apart.
__device__ inline uint32_t first_sink(const fa_merge &m, const Row &r) {
  const uint32_t row = m.sink_per_row ? r.batch * uint32_t(m.seqlen_q) + r.row : 0;
  return row * uint32_t(m.num_sinks) * uint32_t(m.num_heads) + r.head;
}

template <int LANES>
__device__ inline float sum_lanes(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// A NaN that meets a number may be lost here; the sum of exponentials has it.
template <int LANES>
__device__ inline float largest_of_lanes(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// A sum of exponentials, scaled by the largest so far.
struct Exponentials {
  float largest = -INFINITY, total = 0;

  __device__ void add(float x) {
    if (x == -INFINITY) return;
    const float before = largest;
    largest = fmaxf(largest, x);  // a NaN that is lost here is in the total
    if (before != largest) total *= expf(before - largest);
    total += expf(x - largest);
  }
};

// The shares of a row's parts in the sum of their exponentials and the sinks', and lse, by SLOTS lanes that
// take turns, so that all are on their way at once. The share of a part that has nothing for the row is -1, so
// that nobody looks at its o.
template <int SLOTS>
__device__ inline void softmax_over_parts(const fa_merge &m, const Row &r, int slot, float *shares) {
  const float *sinks = m.sink + first_sink(m, r);
  const int num_parts = m.num_parts, num_sinks = r.is_there ? m.num_sinks : 0, heads = m.num_heads;
  Exponentials sum;
#pragma unroll 1
  for (int i = slot; i < num_parts + num_sinks; i += SLOTS) {
    float x = -INFINITY;
    if (r.is_there) x = i < num_parts ? lse_of(m, m.parts[i], r) : sinks[(i - num_parts) * heads];
    if (i < num_parts) shares[i] = x;
    sum.add(x);
  }
  const float largest = largest_of_lanes<SLOTS>(sum.largest);
  const float total = sum_lanes<SLOTS>(sum.total == 0 ? 0 : sum.total * expf(sum.largest - largest));
  const float unit = __frcp_rn(total);
#pragma unroll 1
  for (int p = slot; p < num_parts; p += SLOTS)
    shares[p] = shares[p] == -INFINITY ? -1 : expf(shares[p] - largest) * unit;
  if (r.is_there && slot == 0) lse_of(m, m.merged, r) = total == 0 ? -INFINITY : largest + logf(total);
}

// What a lane reads of a part: eight numbers of each of its rows.
template <bool ALIKE, int GROUP, bool HAS_F32>
__device__ inline void load_group(const fa_merge &m, const fa_part &part, const Row (&rows)[GROUP], int d,
                                  Eight<HAS_F32> (&eights)[GROUP]) {
#pragma unroll
  for (int n = 0; n < GROUP; n++)
    if (rows[n].is_there) eights[n] = load<ALIKE, HAS_F32>(m, part, rows[n], d);
}

// o += shares * what was read; the shares of a lane's rows are `apart` from each other.
template <class Io, int GROUP, bool HAS_F32>
__device__ inline void add_group(const Eight<HAS_F32> (&eights)[GROUP], const float *shares, int apart,
                                 float (&o)[GROUP][8]) {
#pragma unroll
  for (int n = 0; n < GROUP; n++) {
    const float share = shares[n * apart];
    if (share < 0) continue;  // whatever its o holds
    float x[8];
    to_floats<Io>(x, eights[n].words);
#pragma unroll
    for (int i = 0; i < 8; i++) o[n][i] += share * x[i];
  }
}

template <int GROUP, bool HAS_F32>
__device__ inline void add_group(fa_dtype dtype, const Eight<HAS_F32> (&eights)[GROUP], const float *shares,
                                 int apart, float (&o)[GROUP][8]) {
  if (HAS_F32 && dtype == FA_DTYPE_F32)
    add_group<float>(eights, shares, apart, o);
  else if (dtype == FA_DTYPE_BF16)
    add_group<__nv_bfloat16>(eights, shares, apart, o);
  else
    add_group<__half>(eights, shares, apart, o);
}

// parts' o [batch, seqlen_q, num_heads, head_dim] and lse [batch, num_heads, seqlen_q], sinks -> merged's,
// which may be one of the parts': who writes a number is who read it. A block takes a tile of rows and heads,
// and each warp some of its rows: LANES lanes take one, GROUP of them each. The first part is asked for before
// the shares are made; it is bytes on their way that the speed of memory asks for.
template <int LANES, bool ALIKE, bool HAS_F32>
__global__ void __launch_bounds__(THREADS, HAS_F32 ? 12 : 14)
    merge_rows(const __grid_constant__ fa_merge m, const __grid_constant__ fa_cuda_merge_tiles tiles) {
  constexpr int GROUP = HAS_F32 ? FA_CUDA_MERGE_F32_GROUP : FA_CUDA_MERGE_GROUP;
  constexpr int AT_ONCE = 32 / LANES, ROWS = AT_ONCE * GROUP;  // of a warp
  constexpr int SLOTS = 32 / ROWS;
  FA_DYNAMIC_SHARED(sizeof(float), float, shares_of_block);  // [rows of the block, num_parts]
  let_dependents_start();
  wait_for_launch_before();
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS;
  float *shares = shares_of_block + first * m.num_parts;
  Row rows[GROUP];
  Eight<HAS_F32> eights[GROUP];
#pragma unroll
  for (int n = 0; n < GROUP; n++) {
    rows[n] = row_at(m, tiles, first + n * AT_ONCE + lane / LANES);
  }
  int d = lane % LANES * 8;
  if (m.num_parts > 0 && d < m.head_dim) load_group<ALIKE>(m, m.parts[0], rows, d, eights);
  softmax_over_parts<SLOTS>(m, row_at(m, tiles, first + lane / SLOTS), lane % SLOTS,
                            shares + lane / SLOTS * m.num_parts);
  __syncwarp();
  for (; d < m.head_dim; d += LANES * 8) {
    float o[GROUP][8] = {};
#pragma unroll 1
    for (int p = 0; p < m.num_parts; p++) {
      if (p > 0 || d >= LANES * 8) load_group<ALIKE>(m, m.parts[p], rows, d, eights);
      add_group(m.parts[p].dtype, eights, shares + lane / LANES * m.num_parts + p, AT_ONCE * m.num_parts, o);
    }
#pragma unroll
    for (int n = 0; n < GROUP; n++)
      if (rows[n].is_there) store<ALIKE>(m, m.merged, rows[n], d, o[n]);
  }
}

constexpr int PAIR = FA_CUDA_MERGE_PAIR;  // rows that a lane has a share in at a time, in the gradients

// Rows of one part, and of dout, eight numbers of each.
template <bool ALIKE>
__device__ inline void load_pair(const fa_merge &m, const fa_part &part, const Row (&rows)[PAIR], int d,
                                 float (&x)[PAIR][8]) {
  Eight<true> eights[PAIR];
#pragma unroll
  for (int n = 0; n < PAIR; n++) eights[n] = load<ALIKE, true>(m, part, rows[n], d);
#pragma unroll
  for (int n = 0; n < PAIR; n++) to_floats(x[n], eights[n], part.dtype);
}

// dot(part's o, dout) of rows, the same in all their lanes.
template <int LANES, bool ALIKE>
__device__ inline void dot_with_dout(const fa_merge &m, const fa_part &part, const Row (&rows)[PAIR],
                                     float (&dots)[PAIR]) {
#pragma unroll
  for (int n = 0; n < PAIR; n++) dots[n] = 0;
  for (int d = threadIdx.x % LANES * 8; d < m.head_dim; d += LANES * 8) {
    float x[PAIR][8], y[PAIR][8];
    load_pair<ALIKE>(m, part, rows, d, x);
    load_pair<ALIKE>(m, m.dmerged, rows, d, y);
#pragma unroll
    for (int n = 0; n < PAIR; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) dots[n] += x[n][i] * y[n][i];
  }
#pragma unroll
  for (int n = 0; n < PAIR; n++) dots[n] = sum_lanes<LANES>(dots[n]);
}

// Where there are no parts o is all of an attention's, and 0 of a row that sees nothing, whose dout may hold
// anything: its dot is 0. By whole warps.
template <int LANES, bool ALIKE>
__device__ inline void clear_dots_of_zeros(const fa_merge &m, const Row (&rows)[PAIR], float (&dots)[PAIR]) {
  bool is_nan = false;
#pragma unroll
  for (int n = 0; n < PAIR; n++) is_nan |= isnan(dots[n]);
  if (!__any_sync(~0u, is_nan)) return;
  float numbers[PAIR] = {};  // that are not 0
  for (int d = threadIdx.x % LANES * 8; d < m.head_dim; d += LANES * 8) {
    float x[PAIR][8];
    load_pair<ALIKE>(m, m.merged, rows, d, x);
#pragma unroll
    for (int n = 0; n < PAIR; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) numbers[n] += x[n][i] != 0;
  }
#pragma unroll
  for (int n = 0; n < PAIR; n++)
    if (sum_lanes<LANES>(numbers[n]) == 0) dots[n] = 0;
}

// A negative weight: the part has nothing for the row.
template <int LANES, bool ALIKE>
__device__ inline void store_scaled_dout(const fa_merge &m, const fa_part &to, const Row (&rows)[PAIR],
                                         const float (&weights)[PAIR]) {
  for (int d = threadIdx.x % LANES * 8; d < m.head_dim; d += LANES * 8) {
    float x[PAIR][8];
    load_pair<ALIKE>(m, m.dmerged, rows, d, x);
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
#pragma unroll
      for (int i = 0; i < 8; i++) x[n][i] = weights[n] < 0 ? 0 : weights[n] * x[n][i];
      if (rows[n].is_there) store<ALIKE>(m, to, rows[n], d, x[n]);
    }
  }
}

// A row's dsink where sinks are its own, or its delta for the sum over rows.
template <int LANES>
__device__ inline void sink_backward(const fa_merge &m, const Row &r, float lse, float delta,
                                     float *delta_of_rows) {
  const int lane = threadIdx.x % LANES;
  if (!m.sink_per_row) {
    if (lane == 0) delta_of_rows[lse_index(m, r)] = delta;
    return;
  }
  const uint32_t first = first_sink(m, r);
  for (int t = lane; t < m.num_sinks; t += LANES) {
    const float sink = m.sink[first + t * m.num_heads];
    const bool is_empty = lse == -INFINITY || sink == -INFINITY;
    m.dsink[first + t * m.num_heads] = is_empty ? 0 : -expf(sink - lse) * delta;
  }
}

// The parts, merged, dmerged -> dparts; and dsink [batch, seqlen_q, num_sinks, num_heads] where sinks are a
// row's own, or else delta [batch, num_heads, seqlen_q]. A block takes a tile of rows and heads, LANES lanes
// PAIR rows at a time; all of them take part in sums, and for a row that is not there they read the first one
// and write nothing.
template <int LANES, bool ALIKE>
__global__ void __launch_bounds__(THREADS, 12)
    merge_rows_backward(const __grid_constant__ fa_merge m, const __grid_constant__ fa_cuda_merge_tiles tiles,
                        float *__restrict__ delta_of_rows) {
  constexpr int AT_ONCE = THREADS / LANES;
  let_dependents_start();
  wait_for_launch_before();
#pragma unroll 1
  for (int first = threadIdx.x / LANES; first < FA_CUDA_MERGE_ROWS(LANES, FA_CUDA_MERGE_GROUP);
       first += AT_ONCE * PAIR) {
    Row rows[PAIR];
    float lse[PAIR], delta[PAIR];
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
      rows[n] = row_at(m, tiles, first + n * AT_ONCE);
      if (!rows[n].is_there) rows[n] = {0, 0, 0, false, 0};
      lse[n] = lse_of(m, m.merged, rows[n]);
    }
    dot_with_dout<LANES, ALIKE>(m, m.merged, rows, delta);
    if (m.num_parts == 0) clear_dots_of_zeros<LANES, ALIKE>(m, rows, delta);
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
      if (m.dmerged.lse) delta[n] -= lse_of(m, m.dmerged, rows[n]);
      if (lse[n] == -INFINITY) delta[n] = 0;
    }
#pragma unroll 1
    for (int p = 0; p < m.num_parts; p++) {
      const fa_part &to = m.dparts[p];
      float weights[PAIR], dots[PAIR];
#pragma unroll
      for (int n = 0; n < PAIR; n++) {
        const float part_lse = lse_of(m, m.parts[p], rows[n]);
        weights[n] = lse[n] == -INFINITY || part_lse == -INFINITY ? -1 : expf(part_lse - lse[n]);
      }
      if (to.lse) dot_with_dout<LANES, ALIKE>(m, m.parts[p], rows, dots);
#pragma unroll
      for (int n = 0; n < PAIR; n++)
        if (to.lse && rows[n].is_there && threadIdx.x % LANES == 0)
          lse_of(m, to, rows[n]) = weights[n] < 0 ? 0 : weights[n] * (dots[n] - delta[n]);
      if (to.o.data) store_scaled_dout<LANES, ALIKE>(m, to, rows, weights);
    }
#pragma unroll
    for (int n = 0; n < PAIR; n++)
      if (m.dsink && rows[n].is_there) sink_backward<LANES>(m, rows[n], lse[n], delta[n], delta_of_rows);
  }
}

// delta, merged's lse [batch, num_heads, seqlen_q] -> dsink [num_sinks, num_heads], a block each, in f64 and
// always in the same order.
__global__ void __launch_bounds__(SINK_THREADS)
    merge_sink_gradient(const __grid_constant__ fa_merge m, const float *__restrict__ delta) {
  const int head = blockIdx.x % m.num_heads;
  const float sink = m.sink[blockIdx.x];
  double sum = 0;
  for (int batch = 0; batch < m.batch; batch++) {
    const int64_t first = (int64_t(batch) * m.num_heads + head) * m.seqlen_q;
    const float *lse = static_cast<const float *>(m.merged.lse) + first;
#pragma unroll 4
    for (int i = threadIdx.x; i < m.seqlen_q; i += SINK_THREADS)
      if (lse[i] != -INFINITY && sink != -INFINITY) sum += expf(sink - lse[i]) * delta[first + i];
  }
  __shared__ double sums[SINK_THREADS];
  sums[threadIdx.x] = sum;
  for (int half = SINK_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) m.dsink[blockIdx.x] = static_cast<float>(-sums[0]);
}

}  // namespace
}  // namespace fa

#define MERGE_FORWARD(lanes, alike)                               \
  {                                                               \
    fa::address_of_kernel(fa::merge_rows<lanes, alike, false>),   \
        fa::address_of_kernel(fa::merge_rows<lanes, alike, true>) \
  }
#define MERGE_KERNEL(lanes)                                             \
  {                                                                     \
    lanes, {MERGE_FORWARD(lanes, false), MERGE_FORWARD(lanes, true)}, { \
      fa::address_of_kernel(fa::merge_rows_backward<lanes, false>),     \
          fa::address_of_kernel(fa::merge_rows_backward<lanes, true>)   \
    }                                                                   \
  }
const fa_cuda_merge_kernel fa_cuda_merge_kernels[] = {MERGE_KERNEL(4), MERGE_KERNEL(8), MERGE_KERNEL(16),
                                                      MERGE_KERNEL(32)};
const void *const fa_cuda_merge_sink_kernel = fa::address_of_kernel(fa::merge_sink_gradient);
