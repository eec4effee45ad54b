/* Tensor maps: what the bulk copy engine of Hopper (TMA) reads an operand by. */
#include "tensor_map.h"

#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>
#include <stdatomic.h>

/* The driver's function, found through the runtime: the library does not link to the driver. */
static PFN_cuTensorMapEncodeTiled_v12000 encoder(void) {
  static _Atomic(void *) found;
  void *function = atomic_load(&found);
  if (!function) {
    enum cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &result) ||
        result != cudaDriverEntryPointSuccess)
      function = NULL;
    cudaGetLastError();
    atomic_store(&found, function);
  }
  return (PFN_cuTensorMapEncodeTiled_v12000)function;
}

static CUtensorMapDataType type_of(fa_dtype dtype) {
  switch (dtype) {
    case FA_DTYPE_BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case FA_DTYPE_F16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case FA_DTYPE_U8: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

/* How much is brought from memory for a row of a box: 128 bytes, which is what it has, come faster than 256 do,
 * but where rows are no multiple of that, what follows is another head's, which somebody reads soon.
 * (cuda_log.md, "Few rows on Hopper".) */
static CUtensorMapL2promotion promotion_of(int64_t row_bytes) {
  return row_bytes % 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
}

bool fa_cuda_tensor_map_init(CUtensorMap *map, const fa_cuda_operand *operand, fa_dtype dtype, int64_t seqlen,
                             int64_t batch, int32_t box_rows) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  const bool is_empty = seqlen == 0 || batch == 0;
  if (!encode || !operand->aligned || is_empty) return false;
  const cuuint64_t bytes = fa_dtype_bytes(dtype);
  const cuuint64_t dims[] = {(cuuint64_t)operand->num_cols, (cuuint64_t)seqlen, (cuuint64_t)operand->num_heads,
                             (cuuint64_t)batch};
  const cuuint64_t strides[] = {(cuuint64_t)operand->stride_row * bytes,
                                (cuuint64_t)operand->stride_head * bytes,
                                (cuuint64_t)operand->stride_batch * bytes};
  const cuuint32_t box[] = {(cuuint32_t)(128 / bytes), (cuuint32_t)box_rows, 1, 1}, steps[] = {1, 1, 1, 1};
  return encode(map, type_of(dtype), 4, (void *)operand->data, dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                promotion_of((int64_t)(operand->num_cols * bytes)),
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
