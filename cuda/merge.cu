// Parts of attention merged, and the gradients of that. The kernels' argument is fa_merge itself. They move
// each number once and compute little, so that they take what memory takes: a row of a head is read eight
// numbers a lane.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "merge.h"

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

__device__ inline int bytes_of(fa_dtype dtype) { return dtype == FA_DTYPE_F32 ? 4 : 2; }

// A row of a head.
struct Row {
  int batch, row, head;
};

__device__ inline char *row_of(const fa_part &part, const Row &r) {
  return static_cast<char *>(part.o.data) +
         (r.batch * part.o.stride_batch + r.row * part.o.stride_row + r.head * part.o.stride_head) *
             bytes_of(part.dtype);
}

__device__ inline float &lse_of(const fa_merge &m, const fa_part &part, const Row &r) {
  return static_cast<float *>(part.lse)[(int64_t(r.batch) * m.num_heads + r.head) * m.seqlen_q + r.row];
}

template <class Word>
__device__ inline void copy_some(Word *to, const Word *from, int wanted) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < wanted) to[i] = from[i];
}

// Numbers d to d + 7 of a row, of which `wanted` are there; the others become 0.
template <bool HAS_F32>
__device__ inline Eight<HAS_F32> load(const fa_part &part, const Row &r, int d, int wanted) {
  Eight<HAS_F32> eight = {};
  const bool is_f32 = HAS_F32 && part.dtype == FA_DTYPE_F32;
  const char *from = row_of(part, r) + d * bytes_of(part.dtype);
  if (wanted >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    eight.words[0] = __ldcs(reinterpret_cast<const uint4 *>(from));
    if constexpr (HAS_F32)
      if (is_f32) eight.words[1] = __ldcs(reinterpret_cast<const uint4 *>(from) + 1);
  } else if (is_f32) {
    copy_some(reinterpret_cast<float *>(eight.words), reinterpret_cast<const float *>(from), wanted);
  } else {
    copy_some(reinterpret_cast<uint16_t *>(eight.words), reinterpret_cast<const uint16_t *>(from), wanted);
  }
  return eight;
}

__device__ inline void store(const fa_part &part, const Row &r, int d, int wanted, const float (&x)[8]) {
  uint4 words[2];
  const bool is_f32 = part.dtype == FA_DTYPE_F32;
  if (part.dtype == FA_DTYPE_BF16)
    from_floats<__nv_bfloat16>(words, x);
  else if (part.dtype == FA_DTYPE_F16)
    from_floats<__half>(words, x);
  else
    from_floats<float>(words, x);
  char *to = row_of(part, r) + d * bytes_of(part.dtype);
  if (wanted >= 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    reinterpret_cast<uint4 *>(to)[0] = words[0];
    if (is_f32) reinterpret_cast<uint4 *>(to)[1] = words[1];
  } else if (is_f32) {
    copy_some(reinterpret_cast<float *>(to), reinterpret_cast<const float *>(words), wanted);
  } else {
    copy_some(reinterpret_cast<uint16_t *>(to), reinterpret_cast<const uint16_t *>(words), wanted);
  }
}

// The first sink of the row's head; the others follow num_heads apart.
__device__ inline int64_t first_sink(const fa_merge &m, const Row &r) {
  return (m.sink_per_row ? (int64_t(r.batch) * m.seqlen_q + r.row) * m.num_sinks : 0) * m.num_heads + r.head;
}

// The n-th row of this block's tile, whose heads of a row follow one another; false where it is not there.
__device__ inline bool row_at(const fa_merge &m, const fa_cuda_merge_tiles &tiles, int n, Row &r) {
  const int head_tile = blockIdx.x % tiles.num_head_tiles, row_tile = blockIdx.x / tiles.num_head_tiles;
  r.batch = row_tile / tiles.num_row_tiles;
  r.row = (row_tile % tiles.num_row_tiles << tiles.log_rows) + (n >> tiles.log_heads);
  r.head = (head_tile << tiles.log_heads) + (n & ((1 << tiles.log_heads) - 1));
  return r.row < m.seqlen_q && r.head < m.num_heads;
}

template <int LANES>
__device__ inline float sum_lanes(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

__device__ inline float larger(float x, float y) {
  return y <= x ? x : y;
}  // of a NaN and a number the NaN, or y

// The shares of a row's parts in the sum of their exponentials and the sinks', and lse. The share of a part
// that has nothing for the row is -1, so that nobody looks at its o.
__device__ inline void softmax_over_parts(const fa_merge &m, const Row &r, float *shares) {
  const float *sink = m.sink + first_sink(m, r);
  float largest = -INFINITY, total = 0;
#pragma unroll 4
  for (int p = 0; p < m.num_parts; p++) {
    shares[p] = lse_of(m, m.parts[p], r);
    largest = larger(largest, shares[p]);
  }
  for (int t = 0; t < m.num_sinks; t++) largest = larger(largest, sink[t * m.num_heads]);
  for (int p = 0; p < m.num_parts; p++) {
    shares[p] = shares[p] == -INFINITY ? -1 : expf(shares[p] - largest);
    if (!(shares[p] < 0)) total += shares[p];
  }
  for (int t = 0; t < m.num_sinks && largest != -INFINITY; t++) total += expf(sink[t * m.num_heads] - largest);
  for (int p = 0; p < m.num_parts; p++)
    if (!(shares[p] < 0)) shares[p] /= total;
  lse_of(m, m.merged, r) = largest == -INFINITY ? -INFINITY : largest + logf(total);
}

// What a lane reads of a part: eight numbers of each of its GROUP rows.
template <int GROUP, bool HAS_F32>
__device__ inline void load_group(const fa_merge &m, const fa_part &part, const Row (&rows)[GROUP],
                                  const bool (&is_there)[GROUP], int d, Eight<HAS_F32> (&eights)[GROUP]) {
#pragma unroll
  for (int n = 0; n < GROUP; n++)
    if (is_there[n]) eights[n] = load<HAS_F32>(part, rows[n], d, m.head_dim - d);
}

// parts' o [batch, seqlen_q, num_heads, head_dim] and lse [batch, num_heads, seqlen_q], sinks -> merged's,
// which may be one of the parts': who writes a number is who read it. A block takes a tile of rows and heads,
// and each warp some of its rows: LANES lanes take one, GROUP of them each. The first part is asked for before
// a lane a row makes the shares; it is bytes on their way that the speed of memory asks for.
template <int LANES, bool HAS_F32>
__global__ void __launch_bounds__(THREADS, HAS_F32 ? 2 : 3)
    merge_rows(const __grid_constant__ fa_merge m, const __grid_constant__ fa_cuda_merge_tiles tiles) {
  constexpr int AT_ONCE = 32 / LANES, GROUP = FA_CUDA_MERGE_GROUP, ROWS = AT_ONCE * GROUP;  // of a warp
  extern __shared__ float shares_of_block[];  // [rows of the block, num_parts]
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS;
  float *shares = shares_of_block + first * m.num_parts;
  Row rows[GROUP];
  bool is_there[GROUP];
  Eight<HAS_F32> eights[GROUP];
#pragma unroll
  for (int n = 0; n < GROUP; n++) is_there[n] = row_at(m, tiles, first + n * AT_ONCE + lane / LANES, rows[n]);
  int d = lane % LANES * 8;
  if (m.num_parts > 0 && d < m.head_dim) load_group(m, m.parts[0], rows, is_there, d, eights);
  for (int n = lane; n < ROWS; n += 32) {
    Row r;
    if (row_at(m, tiles, first + n, r)) softmax_over_parts(m, r, shares + n * m.num_parts);
  }
  __syncwarp();
  for (; d < m.head_dim; d += LANES * 8) {
    float o[GROUP][8] = {};
    for (int p = 0; p < m.num_parts; p++) {
      if (p > 0 || d >= LANES * 8) load_group(m, m.parts[p], rows, is_there, d, eights);
#pragma unroll
      for (int n = 0; n < GROUP; n++) {
        const float share = is_there[n] ? shares[(n * AT_ONCE + lane / LANES) * m.num_parts + p] : -1;
        if (share < 0) continue;  // whatever its o holds
        float x[8];
        to_floats(x, eights[n], m.parts[p].dtype);
#pragma unroll
        for (int i = 0; i < 8; i++) o[n][i] += share * x[i];
      }
    }
#pragma unroll
    for (int n = 0; n < GROUP; n++)
      if (is_there[n]) store(m.merged, rows[n], d, m.head_dim - d, o[n]);
  }
}

constexpr int PAIR = FA_CUDA_MERGE_PAIR;  // rows that a lane has a share in at a time, in the gradients

__device__ inline void load_pair(float (&x)[PAIR][8], const fa_merge &m, const fa_part &part,
                                 const Row (&rows)[PAIR], int d) {
  Eight<true> eights[PAIR];
#pragma unroll
  for (int n = 0; n < PAIR; n++) eights[n] = load<true>(part, rows[n], d, m.head_dim - d);
#pragma unroll
  for (int n = 0; n < PAIR; n++) to_floats(x[n], eights[n], part.dtype);
}

// dot(part's o, dout) of rows, the same in all their lanes.
template <int LANES>
__device__ inline void dot_with_dout(float (&dots)[PAIR], const fa_merge &m, const fa_part &part,
                                     const Row (&rows)[PAIR]) {
#pragma unroll
  for (int n = 0; n < PAIR; n++) dots[n] = 0;
  for (int d = threadIdx.x % LANES * 8; d < m.head_dim; d += LANES * 8) {
    float x[PAIR][8], y[PAIR][8];
    load_pair(x, m, part, rows, d);
    load_pair(y, m, m.dmerged, rows, d);
#pragma unroll
    for (int n = 0; n < PAIR; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) dots[n] += x[n][i] * y[n][i];
  }
#pragma unroll
  for (int n = 0; n < PAIR; n++) dots[n] = sum_lanes<LANES>(dots[n]);
}

// A negative weight: the part has nothing for the row.
template <int LANES>
__device__ inline void store_scaled_dout(const fa_merge &m, const fa_part &to, const Row (&rows)[PAIR],
                                         const bool (&is_there)[PAIR], const float (&weights)[PAIR]) {
  for (int d = threadIdx.x % LANES * 8; d < m.head_dim; d += LANES * 8) {
    float x[PAIR][8];
    load_pair(x, m, m.dmerged, rows, d);
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
#pragma unroll
      for (int i = 0; i < 8; i++) x[n][i] = weights[n] < 0 ? 0 : weights[n] * x[n][i];
      if (is_there[n]) store(to, rows[n], d, m.head_dim - d, x[n]);
    }
  }
}

// A row's dsink where sinks are its own, or its delta for the sum over rows.
template <int LANES>
__device__ inline void sink_backward(const fa_merge &m, const Row &r, float lse, float delta,
                                     float *delta_of_rows) {
  const int lane = threadIdx.x % LANES;
  if (!m.sink_per_row) {
    if (lane == 0) delta_of_rows[(int64_t(r.batch) * m.num_heads + r.head) * m.seqlen_q + r.row] = delta;
    return;
  }
  const int64_t first = first_sink(m, r);
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
template <int LANES>
__global__ void __launch_bounds__(THREADS, 3)
    merge_rows_backward(const __grid_constant__ fa_merge m, const __grid_constant__ fa_cuda_merge_tiles tiles,
                        float *__restrict__ delta_of_rows) {
  constexpr int AT_ONCE = THREADS / LANES;
  for (int first = threadIdx.x / LANES; first < FA_CUDA_MERGE_ROWS(LANES); first += AT_ONCE * PAIR) {
    Row rows[PAIR];
    bool is_there[PAIR];
    float lse[PAIR], delta[PAIR];
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
      is_there[n] = row_at(m, tiles, first + n * AT_ONCE, rows[n]);
      if (!is_there[n]) rows[n] = {0, 0, 0};
      lse[n] = lse_of(m, m.merged, rows[n]);
    }
    dot_with_dout<LANES>(delta, m, m.merged, rows);
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
      if (m.dmerged.lse) delta[n] -= lse_of(m, m.dmerged, rows[n]);
      if (lse[n] == -INFINITY) delta[n] = 0;
    }
    for (int p = 0; p < m.num_parts; p++) {
      const fa_part &to = m.dparts[p];
      float weights[PAIR], dots[PAIR];
#pragma unroll
      for (int n = 0; n < PAIR; n++) {
        const float part_lse = lse_of(m, m.parts[p], rows[n]);
        weights[n] = lse[n] == -INFINITY || part_lse == -INFINITY ? -1 : expf(part_lse - lse[n]);
      }
      if (to.lse) dot_with_dout<LANES>(dots, m, m.parts[p], rows);
#pragma unroll
      for (int n = 0; n < PAIR; n++)
        if (to.lse && is_there[n] && threadIdx.x % LANES == 0)
          lse_of(m, to, rows[n]) = weights[n] < 0 ? 0 : weights[n] * (dots[n] - delta[n]);
      if (to.o.data) store_scaled_dout<LANES>(m, to, rows, is_there, weights);
    }
#pragma unroll
    for (int n = 0; n < PAIR; n++)
      if (m.dsink && is_there[n]) sink_backward<LANES>(m, rows[n], lse[n], delta[n], delta_of_rows);
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

#define MERGE_KERNEL(lanes)                                                                         \
  {                                                                                                 \
    lanes, {(const void *)fa::merge_rows<lanes, false>, (const void *)fa::merge_rows<lanes, true>}, \
        (const void *)fa::merge_rows_backward<lanes>                                                \
  }
const fa_cuda_merge_kernel fa_cuda_merge_kernels[] = {MERGE_KERNEL(4), MERGE_KERNEL(8), MERGE_KERNEL(16),
                                                      MERGE_KERNEL(32)};
const void *const fa_cuda_merge_sink_kernel = (const void *)fa::merge_sink_gradient;
