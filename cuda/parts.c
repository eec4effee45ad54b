/* What is launched for a merge of parts. */
#include <string.h>

#include "../c_src/core/integers.h"
#include "merge.h"
#include "runtime.h"

/* A row's lanes take eight numbers each, or as often as 32 of them need to. */
static const fa_cuda_merge_kernel *kernel_of(const fa_merge *merge) {
  const fa_cuda_merge_kernel *kernel = fa_cuda_merge_kernels;
  while (kernel->num_lanes < 32 && kernel->num_lanes * 8 < merge->head_dim) kernel++;
  return kernel;
}

/* The least n for which 2^n is at least x, but not more than most. */
static int32_t log_of(int64_t x, int32_t most) {
  int32_t n = 0;
  while (n < most && INT64_C(1) << n < x) n++;
  return n;
}

/* Of so many rows of heads, eight rows, as many as fill a transaction with lse, where there are so many; and
 * else what there is. */
static fa_cuda_merge_tiles tiles_of(const fa_merge *merge, int32_t num_rows) {
  fa_cuda_merge_tiles tiles;
  const int32_t log_tile = log_of(num_rows, 30);
  tiles.log_rows = log_of(merge->seqlen_q, 3);
  tiles.log_heads = log_of(merge->num_heads, log_tile - tiles.log_rows);
  tiles.log_rows = log_tile - tiles.log_heads;
  tiles.num_row_tiles = (int32_t)fa_divide_up(merge->seqlen_q, INT64_C(1) << tiles.log_rows);
  tiles.num_head_tiles = (int32_t)fa_divide_up(merge->num_heads, INT64_C(1) << tiles.log_heads);
  tiles.stride_batch = (uint32_t)(merge->merged.o.stride_batch / 8);
  tiles.stride_row = (uint32_t)(merge->merged.o.stride_row / 8);
  tiles.stride_head = (uint32_t)(merge->merged.o.stride_head / 8);
  return tiles;
}

static bool has_f32(const fa_merge *merge) {
  for (int p = 0; p < merge->num_parts; p++)
    if (merge->parts[p].dtype == FA_DTYPE_F32) return true;
  return false;
}

static bool is_like(const fa_merge *merge, const fa_part *part) {
  return !part->o.data || (memcmp(part->o.strides, merge->merged.o.strides, sizeof part->o.strides) == 0 &&
                           (uintptr_t)part->o.data % 16 == 0);
}

/* Whether all o can be read eight numbers at a time at the same places, 2^32 of which there may be. */
static bool lie_alike(const fa_merge *merge) {
  const int64_t sizes[] = {merge->batch, merge->seqlen_q, merge->num_heads}, *strides = merge->merged.o.strides;
  bool alike = merge->head_dim % 8 == 0 && is_like(merge, &merge->merged) && is_like(merge, &merge->dmerged);
  double span = (double)merge->head_dim;
  for (int i = 0; i < FA_MAX_RANK - 1; i++) {
    alike = alike && strides[i] % 8 == 0 && strides[i] >= 0;
    span += (double)strides[i] * (double)(sizes[i] - 1);
  }
  for (int p = 0; p < merge->num_parts; p++)
    alike = alike && is_like(merge, &merge->parts[p]) && is_like(merge, &merge->dparts[p]);
  return alike && span < 8 * (double)UINT32_MAX;
}

static fa_status enqueue(fa_merge *merge, bool is_backward, bool begins_early, const fa_execution *execution,
                         fa_error *error) {
  const char *operation = "launch of the merge";
  const fa_cuda_merge_kernel *kernel = kernel_of(merge);
  const bool alike = lie_alike(merge), in_f32 = !is_backward && has_f32(merge);
  const int32_t group = in_f32 ? FA_CUDA_MERGE_F32_GROUP : FA_CUDA_MERGE_GROUP;
  const int32_t num_rows = FA_CUDA_MERGE_ROWS(kernel->num_lanes, group);
  fa_cuda_merge_tiles tiles = tiles_of(merge, num_rows);
  const dim3 num_blocks = {(unsigned)(tiles.num_row_tiles * tiles.num_head_tiles), (unsigned)merge->batch, 1};
  if (is_backward && !merge->num_sinks) merge->dsink = NULL;
  void *delta = execution->workspace;
  CHECK((begins_early ? fa_cuda_launch_early : fa_cuda_launch)(
      is_backward ? kernel->backward[alike] : kernel->forward[alike][in_f32], num_blocks, FA_CUDA_MERGE_THREADS,
      is_backward ? 0 : num_rows * merge->num_parts * (int32_t)sizeof(float), (void *[]){merge, &tiles, &delta},
      execution->stream));
  if (!is_backward || !merge->dsink || merge->sink_per_row) return FA_STATUS_OK;
  CHECK(fa_cuda_launch(fa_cuda_merge_sink_kernel, (dim3){(unsigned)(merge->num_sinks * merge->num_heads), 1, 1},
                       FA_CUDA_MERGE_SINK_THREADS, 0, (void *[]){merge, &delta}, execution->stream));
  return FA_STATUS_OK;
}

fa_status fa_cuda_check_merge(const fa_merge *merge, fa_error *error) {
  const double most = 1 << 30;
  if (merge->merged.dtype == FA_DTYPE_F64)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "o", "type f32, bf16 or f16 on CUDA", "f64");
  const double rows = (double)merge->batch * (double)merge->seqlen_q * (double)merge->num_heads;
  const double sinks = (double)merge->num_sinks * (merge->sink_per_row ? rows : (double)merge->num_heads);
  if ((double)merge->head_dim >= most || rows >= most || sinks >= most)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "o",
                   "fewer than 2^30 rows of heads, and sinks of them, on CUDA", "more");
  if (merge->batch > 65535)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "batch", "at most 65535 in a merge on CUDA",
                   FA_TEXT("%lld", (long long)merge->batch));
  return FA_STATUS_OK;
}

fa_status fa_cuda_merge(const fa_merge *merge, bool is_backward, int32_t index, const fa_execution *execution,
                        fa_error *error) {
  fa_merge copy = *merge; /* launches take arguments that are not const */
  fa_cuda_facts facts;
  fa_status status = fa_cuda_check_merge(merge, error);
  if (!status) status = fa_cuda_facts_of(index, &facts, error);
  if (status) return status;
  fa_scope scope;
  status = enter_device(&scope, index, error);
  if (status) return status;
  status = enqueue(&copy, is_backward, facts.major >= 9, execution, error);
  leave_device(&scope);
  return status;
}
