// Sums of gradients, in f32, part by part, rounded at the end. The kernels' argument is fa_sum itself.
#include "kernels.h"
#include "kinds.cuh"
#include "ptx.cuh"

namespace fa {

__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widened(__half x) { return __half2float(x); }

__device__ void narrow(float &to, float x) { to = x; }
__device__ void narrow(__nv_bfloat16 &to, float x) { to = __float2bfloat16(x); }
__device__ void narrow(__half &to, float x) { to = __float2half(x); }

// The i-th COUNT elements of all parts, before -> total. What is added first leaves -0 as it is.
template <class Element, int COUNT>
__device__ inline void sum_some(const fa_sum &a, int64_t i) {
  Neighbours<float, COUNT> sum;
#pragma unroll
  for (int j = 0; j < COUNT; j++) sum.x[j] = a.num_parts ? -0.0f : 0.0f;
  if (a.before) sum = static_cast<const Neighbours<float, COUNT> *>(a.before)[i];
#pragma unroll 4
  for (int p = 0; p < a.num_parts; p++) {
    const Neighbours<Element, COUNT> part = static_cast<const Neighbours<Element, COUNT> *>(a.parts[p])[i];
#pragma unroll
    for (int j = 0; j < COUNT; j++) sum.x[j] += widened(part.x[j]);
  }
  if (a.is_unrounded) {
    static_cast<Neighbours<float, COUNT> *>(a.total)[i] = sum;
    return;
  }
  Neighbours<Element, COUNT> rounded;
#pragma unroll
  for (int j = 0; j < COUNT; j++) narrow(rounded.x[j], sum.x[j]);
  static_cast<Neighbours<Element, COUNT> *>(a.total)[i] = rounded;
}

// parts [num_parts, count], before [count] -> total [count]. With COUNT 8 all of them are vectors of eight from
// their beginnings on, but for what is left at the end.
template <class Element, int COUNT>
__global__ void __launch_bounds__(256) sum_parts(const __grid_constant__ fa_sum a) {
  const int64_t num_vectors = a.count / COUNT, first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < num_vectors; i += int64_t(gridDim.x) * blockDim.x) sum_some<Element, COUNT>(a, i);
  const int64_t last = num_vectors * COUNT + first;
  if (last < a.count) sum_some<Element, 1>(a, last);
}

template <class Element>
const void *kernel(bool in_vectors) {
  return address_of_kernel(in_vectors ? sum_parts<Element, 8> : sum_parts<Element, 1>);
}

}  // namespace fa

const void *fa_cuda_sum_kernel(fa_dtype dtype, bool in_vectors) {
  switch (dtype) {
    case FA_DTYPE_F32: return fa::kernel<float>(in_vectors);
    case FA_DTYPE_BF16: return fa::kernel<__nv_bfloat16>(in_vectors);
    case FA_DTYPE_F16: return fa::kernel<__half>(in_vectors);
    default: return nullptr;
  }
}
