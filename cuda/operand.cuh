// Reading tensors: blocks of an fa_cuda_operand, and plain rows.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace fa {

template <class Io = uint16_t>
__device__ inline const Io *head_of(const fa_cuda_operand &operand, int batch, int head) {
  return reinterpret_cast<const Io *>(operand.data) + batch * operand.stride_batch + head * operand.stride_head;
}

// Starts the copy of the tile (its parts one after another) whose first row is `row` of the head; rows from
// num_rows on become 0.
template <class Kind, class T, int THREADS>
__device__ inline void load_operand(uint32_t tile, const fa_cuda_operand &operand, const uint16_t *head,
                                    int row, int num_rows) {
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_tile<T, THREADS>(tile + part * T::BYTES, head + part * operand.stride_part + row * operand.stride_row,
                          operand.stride_row, num_rows - row, operand.num_cols, operand.aligned);
}

// The power of two by which the rows of a block are scaled.
template <class Kind>
__device__ inline int exponent_of(const fa_cuda_operand &operand, int batch, int head, int row) {
  if constexpr (!Kind::SCALED) return 0;
  return operand
      .exponents[(int64_t(batch) * operand.num_heads + head) * operand.num_groups + row / FA_CUDA_GROUP];
}

template <class Io>
__device__ inline Io *row_of(const fa_tensor &tensor, int batch, int head, int row) {
  return static_cast<Io *>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head +
         row * tensor.stride_row;
}

// Eight consecutive numbers of a row, 0 from `wanted` on.
template <class Io>
__device__ inline void load_eight(float (&x)[8], const Io *from, int wanted) {
  Io numbers[8];
  if (wanted >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    constexpr int VECTORS = sizeof numbers / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      reinterpret_cast<uint4 *>(numbers)[i] = reinterpret_cast<const uint4 *>(from)[i];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = static_cast<float>(numbers[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < wanted ? static_cast<float>(from[i]) : 0;
  }
}

}  // namespace fa
