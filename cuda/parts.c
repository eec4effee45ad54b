/* What is launched for a merge of parts. */
#include "../c_src/core/integers.h"
#include "merge.h"
#include "runtime.h"

/* A row's lanes take eight numbers each, or as often as 32 of them need to. */
static const fa_cuda_merge_kernel *kernel_of(const fa_merge *merge) {
  const fa_cuda_merge_kernel *kernel = fa_cuda_merge_kernels;
  while (kernel->num_lanes < 32 && kernel->num_lanes * 8 < merge->head_dim) kernel++;
  return kernel;
}

static fa_status launch(const void *kernel, int64_t num_blocks, int32_t num_threads, size_t shared_bytes,
                        void **arguments, const fa_execution *execution, fa_error *error) {
  const char *operation = "launch of the merge";
  if (num_blocks == 0) return FA_STATUS_OK;
  CHECK(cudaLaunchKernel(kernel, (dim3){(unsigned)num_blocks, 1, 1}, (dim3){(unsigned)num_threads, 1, 1},
                         arguments, shared_bytes, execution->stream));
  return FA_STATUS_OK;
}

/* The least n for which 2^n is at least x, but not more than most. */
static int32_t log_of(int64_t x, int32_t most) {
  int32_t n = 0;
  while (n < most && INT64_C(1) << n < x) n++;
  return n;
}

/* Eight rows, as many as fill a transaction with lse, where there are so many; and else what there is. */
static fa_cuda_merge_tiles tiles_of(const fa_merge *merge, int32_t num_lanes) {
  fa_cuda_merge_tiles tiles;
  const int32_t log_tile = log_of(FA_CUDA_MERGE_ROWS(num_lanes), 30);
  tiles.log_rows = log_of(merge->seqlen_q, 3);
  tiles.log_heads = log_of(merge->num_heads, log_tile - tiles.log_rows);
  tiles.log_rows = log_tile - tiles.log_heads;
  tiles.num_row_tiles = (int32_t)fa_divide_up(merge->seqlen_q, INT64_C(1) << tiles.log_rows);
  tiles.num_head_tiles = (int32_t)fa_divide_up(merge->num_heads, INT64_C(1) << tiles.log_heads);
  return tiles;
}

static bool has_f32(const fa_merge *merge) {
  for (int p = 0; p < merge->num_parts; p++)
    if (merge->parts[p].dtype == FA_DTYPE_F32) return true;
  return false;
}

static fa_status enqueue(fa_merge *merge, bool is_backward, const fa_execution *execution, fa_error *error) {
  const int32_t threads = FA_CUDA_MERGE_THREADS;
  const fa_cuda_merge_kernel *kernel = kernel_of(merge);
  fa_cuda_merge_tiles tiles = tiles_of(merge, kernel->num_lanes);
  const int64_t num_blocks = merge->batch * tiles.num_row_tiles * tiles.num_head_tiles;
  const size_t shared_bytes =
      (size_t)(FA_CUDA_MERGE_ROWS(kernel->num_lanes) * merge->num_parts) * sizeof(float);
  if (!is_backward)
    return launch(kernel->forward[has_f32(merge)], num_blocks, threads, shared_bytes, (void *[]){merge, &tiles},
                  execution, error);
  if (!merge->num_sinks) merge->dsink = NULL;
  void *delta = execution->workspace;
  fa_status status =
      launch(kernel->backward, num_blocks, threads, 0, (void *[]){merge, &tiles, &delta}, execution, error);
  if (status || !merge->dsink || merge->sink_per_row) return status;
  return launch(fa_cuda_merge_sink_kernel, merge->num_sinks * merge->num_heads, FA_CUDA_MERGE_SINK_THREADS, 0,
                (void *[]){merge, &delta}, execution, error);
}

fa_status fa_cuda_merge(const fa_merge *merge, bool is_backward, int32_t index, const fa_execution *execution,
                        fa_error *error) {
  const int64_t most = INT64_C(1) << 30;
  if (merge->merged.dtype == FA_DTYPE_F64)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "o", "type f32, bf16 or f16 on CUDA", "f64");
  if (merge->head_dim >= most || merge->num_heads >= most || merge->num_sinks >= most / merge->num_heads ||
      merge->batch * merge->seqlen_q >= most / merge->num_heads)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "o", "fewer than 2^30 rows of heads on CUDA", "more");
  fa_merge copy = *merge; /* cudaLaunchKernel takes arguments that are not const */
  device_scope scope;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = enqueue(&copy, is_backward, execution, error);
  leave_device(&scope);
  return status;
}
