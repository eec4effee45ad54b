// The small kernels around the passes: f32 tensors as scaled sums of f16, and the gradient of the sinks.
#include "operand.cuh"
#include "softmax.cuh"

namespace fa {

constexpr int THREADS = FA_CUDA_SMALL_KERNEL_THREADS;

// Raises magnitudes[batch, kv_head] to the largest finite |x| (its bits) of the heads that share a key/value
// head.
__global__ void __launch_bounds__(THREADS) find_magnitude(const __grid_constant__ fa_cuda_split_arguments a) {
  const int share = blockIdx.x % FA_CUDA_MAGNITUDE_BLOCKS,
            batch_kv_head = blockIdx.x / FA_CUDA_MAGNITUDE_BLOCKS;
  const int kv_head = batch_kv_head % a.num_kv_heads, batch = batch_kv_head / a.num_kv_heads;
  const int group = a.num_heads / a.num_kv_heads, warps = FA_CUDA_MAGNITUDE_BLOCKS * (THREADS / 32);
  uint32_t largest = 0;
  for (int64_t i = share * (THREADS / 32) + threadIdx.x / 32; i < int64_t(a.seqlen) * group; i += warps) {
    const float *row = row_of<const float>(a.from, batch, kv_head * group + i % group, i / group);
    for (int d = threadIdx.x % 32; d < a.head_dim; d += 32) {
      const uint32_t bits = __float_as_uint(fabsf(row[d]));
      if (bits < 0x7f800000) largest = max(largest, bits);
    }
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&a.to.magnitudes[batch_kv_head], largest);
}

// Writes the parts of eight numbers of a row; numbers past head_dim are 0.
__global__ void __launch_bounds__(THREADS) split_rows(const __grid_constant__ fa_cuda_split_arguments a) {
  const int chunks = (a.head_dim + 7) / 8;
  int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const int chunk = index % chunks;
  index /= chunks;
  const int head = index % a.num_heads;
  index /= a.num_heads;
  const int row = index % a.seqlen, batch = index / a.seqlen;
  if (batch >= a.batch) return;

  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const float scale = power_of_two(scaling_exponent(a.to.magnitudes[batch * a.num_kv_heads + kv_head]));
  const float *from = row_of<const float>(a.from, batch, head, row) + chunk * 8;
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int d = chunk * 8 + i * 2;
    uint32_t parts[2];
    split<kinds::f32>(parts, d < a.head_dim ? from[i * 2] * scale : 0,
                      d + 1 < a.head_dim ? from[i * 2 + 1] * scale : 0);
    high[i] = parts[0], low[i] = parts[1];
  }
  uint16_t *to = const_cast<uint16_t *>(head_of(a.to, batch, head)) + row * a.to.stride_row + chunk * 8;
  *reinterpret_cast<uint4 *>(to) = make_uint4(high[0], high[1], high[2], high[3]);
  if (a.num_parts == 2)
    *reinterpret_cast<uint4 *>(to + a.to.stride_part) = make_uint4(low[0], low[1], low[2], low[3]);
}

// dsink = -sum over batch and rows of exp(sink - lse) * delta, in f64 and always in the same order.
__global__ void __launch_bounds__(THREADS) sink_gradient(const __grid_constant__ fa_cuda_arguments a) {
  const int head = blockIdx.x % a.num_heads;
  const float sink = a.sink[blockIdx.x];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < int64_t(a.batch) * a.window.seqlen_q; i += THREADS) {
    const int64_t batch_head = i / a.window.seqlen_q * a.num_heads + head;
    const int row = i % a.window.seqlen_q;
    const float lse = a.lse[batch_head * a.window.seqlen_q + row];
    if (lse != -INFINITY) sum += expf(sink - lse) * a.delta[batch_head * a.padded_rows + row];
  }
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) a.dsink[blockIdx.x] = static_cast<float>(-sums[0]);
}

}  // namespace fa

const void *const fa_cuda_magnitude_kernel = (const void *)fa::find_magnitude;
const void *const fa_cuda_split_kernel = (const void *)fa::split_rows;
const void *const fa_cuda_sink_kernel = (const void *)fa::sink_gradient;
