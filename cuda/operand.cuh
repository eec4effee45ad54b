// Reading tensors: blocks of an fa_cuda_operand, and plain rows.
#pragma once

#include "schedule.cuh"
#include "tile.cuh"

namespace fa {

// A sequence's rows of a head of q or dout, and its columns of a head of k or v.
template <class Io = uint16_t>
__device__ inline const Io *rows_of(const fa_cuda_operand &operand, const Sequence &s, int head) {
  return reinterpret_cast<const Io *>(operand.data) + s.batch * operand.stride_batch +
         head * operand.stride_head + s.first_row * operand.stride_row;
}
__device__ inline const uint16_t *columns_of(const fa_cuda_operand &operand, const Sequence &s, int kv_head) {
  return operand.data + s.batch * operand.stride_batch + kv_head * operand.stride_head +
         s.first_column * operand.stride_row;
}

// Starts the copy of the tile (its parts one after another) whose first row is `row` of these rows; those from
// num_rows on become 0.
template <class Kind, class T, int THREADS>
__device__ inline void load_operand(uint32_t tile, const fa_cuda_operand &operand, const uint16_t *rows,
                                    int row, int num_rows) {
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_tile<T, THREADS>(tile + part * T::BYTES, rows + part * operand.stride_part + row * operand.stride_row,
                          operand.stride_row, num_rows - row, operand.num_cols, operand.aligned);
}

// Where the power of two lies by which a row is scaled.
__device__ inline int32_t *exponent_at(const fa_cuda_operand &operand, int batch, int head, int row) {
  return operand.exponents + (int64_t(batch) * operand.num_heads + head) * operand.num_scales +
         row / FA_CUDA_SCALE_ROWS;
}

// The power of two by which the rows of a block are scaled. BESIDE: the copy may be made beside the kernel, so
// that what lies near it may have been read before.
template <class Kind, bool BESIDE = false>
__device__ inline int exponent_of(const fa_cuda_operand &operand, int batch, int head, int row) {
  if constexpr (!Kind::SCALED) return 0;
  const int32_t *exponent = exponent_at(operand, batch, head, row);
  return BESIDE ? load_relaxed(exponent) : *exponent;
}

// A row of a tensor's head; a sequence's row in q, o, dout or dq; and its column in k, v, dk or dv.
template <class Io>
__device__ inline Io *tensor_row(const fa_tensor &tensor, int batch, int head, int row) {
  return static_cast<Io *>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head +
         row * tensor.stride_row;
}
template <class Io>
__device__ inline Io *row_of(const fa_tensor &tensor, const Sequence &s, int head, int row) {
  return tensor_row<Io>(tensor, s.batch, head, s.first_row + row);
}
template <class Io>
__device__ inline Io *column_of(const fa_tensor &tensor, const Sequence &s, int kv_head, int column) {
  return tensor_row<Io>(tensor, s.batch, kv_head, s.first_column + column);
}

// Whether all rows of a tensor begin and end at multiples of 16 bytes.
template <class Io>
__device__ inline bool has_aligned_rows(const fa_tensor &tensor, int head_dim) {
  const int64_t numbers = tensor.stride_batch | tensor.stride_head | tensor.stride_row | head_dim;
  return (reinterpret_cast<uintptr_t>(tensor.data) | numbers * sizeof(Io)) % 16 == 0;
}

// Eight consecutive numbers of a row, 0 from `wanted` on. ALIGNED: they begin at a multiple of 16 bytes, and
// all or none are wanted, so that several loads can be under way.
template <bool ALIGNED = false, class Io>
__device__ inline void load_eight(float (&x)[8], const Io *from, int wanted) {
  Io numbers[8];
  if (ALIGNED || (wanted >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0)) {
    constexpr int VECTORS = sizeof numbers / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      reinterpret_cast<uint4 *>(numbers)[i] =
          ALIGNED && wanted <= 0 ? make_uint4(0, 0, 0, 0) : reinterpret_cast<const uint4 *>(from)[i];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = static_cast<float>(numbers[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < wanted ? static_cast<float>(from[i]) : 0;
  }
}

}  // namespace fa
