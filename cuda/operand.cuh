// Reading blocks of an fa_cuda_operand.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace fa {

__device__ inline const uint16_t *head_of(const fa_cuda_operand &operand, int batch, int head) {
  return operand.data + batch * operand.stride_batch + head * operand.stride_head;
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

template <class Io>
__device__ inline Io *row_of(const fa_tensor &tensor, int batch, int head, int row) {
  return static_cast<Io *>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head +
         row * tensor.stride_row;
}

}  // namespace fa
