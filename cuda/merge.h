/* What the kernels that merge parts and the host code that launches them share. Plain C, compiled by nvcc too.
 */
#ifndef FA_CUDA_MERGE_H
#define FA_CUDA_MERGE_H

#include "../c_src/flash_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* num_lanes threads share a row of a head, eight numbers each at a time, and have so many rows, fewer where a
 * part is of f32: of the gradients in pairs. A block takes FA_CUDA_MERGE_ROWS. */
enum {
  FA_CUDA_MERGE_THREADS = 64,
  FA_CUDA_MERGE_GROUP = 4,
  FA_CUDA_MERGE_F32_GROUP = 2,
  FA_CUDA_MERGE_PAIR = 2,
  FA_CUDA_MERGE_SINK_THREADS = 1024
};
#define FA_CUDA_MERGE_ROWS(num_lanes, group) (FA_CUDA_MERGE_THREADS / (num_lanes) * (group))

/* Blocks' tiles: 2^log_rows rows, whose lse lie together, of 2^log_heads heads, whose o do. The strides of all
 * o in eights of elements, where they lie alike. A block's y is its batch. */
typedef struct fa_cuda_merge_tiles {
  int32_t log_rows, log_heads, num_row_tiles, num_head_tiles;
  uint32_t stride_batch, stride_row, stride_head;
} fa_cuda_merge_tiles;

/* Where all o lie alike, with the strides of merged's and so that eight numbers can be moved at once, [1] are
 * taken, and else [0]; of forward, [..][1] where a part is of f32. */
typedef struct fa_cuda_merge_kernel {
  int32_t num_lanes;
  const void *forward[2][2]; /* fa_merge, fa_cuda_merge_tiles; shared memory: a float a row and part */
  const void *backward[2];   /* fa_merge, fa_cuda_merge_tiles, float *delta */
} fa_cuda_merge_kernel;

extern const fa_cuda_merge_kernel fa_cuda_merge_kernels[]; /* of 4, 8, 16, 32 lanes */
extern const void *const fa_cuda_merge_sink_kernel; /* fa_merge, const float *delta; a block a sink and head */

#ifdef __cplusplus
}
#endif

#endif
