// Bytes from the device's memory or pinned memory to the device's.
#include "copy.h"
#include "ptx.cuh"

namespace fa {

template <class Some>
__device__ inline void copy_bytes(const fa_byte_copy &copy) {
  const int64_t count = copy.bytes / sizeof(Some), step = int64_t(gridDim.x) * FA_CUDA_COPY_THREADS;
  for (int64_t i = int64_t(blockIdx.x) * FA_CUDA_COPY_THREADS + threadIdx.x; i < count; i += step)
    static_cast<Some *>(copy.to)[i] = static_cast<const Some *>(copy.from)[i];
}

// [bytes] -> [bytes] of each copy: byte by byte where they do not begin and end at multiples of 16.
__global__ void __launch_bounds__(FA_CUDA_COPY_THREADS) copy_all(const __grid_constant__ fa_cuda_copies a) {
  const fa_byte_copy &copy = a.at[blockIdx.y];
  if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from) | copy.bytes) % 16)
    copy_bytes<uint8_t>(copy);
  else
    copy_bytes<uint4>(copy);
}

}  // namespace fa

const void *const fa_cuda_copy_kernel = fa::address_of_kernel(fa::copy_all);
