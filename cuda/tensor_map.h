/* Tensor maps: descriptions of tensors in memory, which kernels for Hopper copy boxes by. */
#ifndef FA_CUDA_TENSOR_MAP_H
#define FA_CUDA_TENSOR_MAP_H

#include "kernels.h"

/* The map of an operand as fa_cuda_maps has it: boxes of 128 bytes of a row by box_rows rows. dtype is that of
 * its elements; batch counts the parts of a split tensor too. False where no map can describe it, or the driver
 * is too old to know maps. */
bool fa_cuda_tensor_map_init(CUtensorMap *map, const fa_cuda_operand *operand, fa_dtype dtype, int64_t seqlen,
                             int64_t batch, int32_t box_rows);

#endif
