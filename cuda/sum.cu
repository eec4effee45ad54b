// Sums of gradients, part by part, in f32, and their rounding at the end.
#include "kernels.h"
#include "ptx.cuh"

namespace fa {

__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widened(__half x) { return __half2float(x); }

__device__ void narrow(float &to, float x) { to = x; }
__device__ void narrow(__nv_bfloat16 &to, float x) { to = __float2bfloat16(x); }
__device__ void narrow(__half &to, float x) { to = __float2half(x); }

constexpr int AT_ONCE = 8;

template <class Element>
struct alignas(16) Eight {
  Element x[AT_ONCE];
};

template <class Element>
__device__ void one_step(fa_sum_step step, float &sum, Element &part) {
  if (step == FA_SUM_ROUND)
    narrow(part, sum);
  else
    sum = step == FA_SUM_ADD ? sum + widened(part) : widened(part);
}

// sum [count], part [count]. Both are vectors of eight from their beginnings on, but for what is left at the
// end.
template <class Element>
__global__ void __launch_bounds__(256) sum_parts(const __grid_constant__ fa_cuda_sum_arguments a) {
  Element *part = static_cast<Element *>(a.part);
  const int64_t num_vectors = a.count / AT_ONCE, first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < num_vectors; i += int64_t(gridDim.x) * blockDim.x) {
    Eight<float> &sums = reinterpret_cast<Eight<float> *>(a.sum)[i];
    Eight<Element> &parts = reinterpret_cast<Eight<Element> *>(part)[i];
    Eight<float> s;
    Eight<Element> p;
    if (a.step != FA_SUM_BEGIN) s = sums;
    if (a.step != FA_SUM_ROUND) p = parts;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) one_step(a.step, s.x[j], p.x[j]);
    if (a.step == FA_SUM_ROUND)
      parts = p;
    else
      sums = s;
  }
  const int64_t last = num_vectors * AT_ONCE + first;
  if (last < a.count) one_step(a.step, a.sum[last], part[last]);
}

// The same where something begins between vectors.
template <class Element>
__global__ void __launch_bounds__(256) sum_elements(const __grid_constant__ fa_cuda_sum_arguments a) {
  Element *part = static_cast<Element *>(a.part);
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count;
       i += int64_t(gridDim.x) * blockDim.x)
    one_step(a.step, a.sum[i], part[i]);
}

template <class Element>
const void *kernel(bool in_vectors) {
  return address_of_kernel(in_vectors ? sum_parts<Element> : sum_elements<Element>);
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
