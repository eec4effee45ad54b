/* Parts: what a merge is checked for before a backend sees it, and where it goes then. */
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "error.h"

void fa_merge_init(fa_merge *merge) {
  memset(merge, 0, sizeof *merge);
  merge->struct_size = sizeof *merge;
}

static fa_dtype stat_dtype(const fa_merge *merge) {
  return merge->merged.dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32;
}

static fa_status check_sizes(const fa_merge *merge, fa_error *error) {
  const struct {
    const char *name;
    int64_t size, least, most;
  } sizes[] = {{"batch", merge->batch, 0, INT64_MAX},         {"seqlen_q", merge->seqlen_q, 0, INT64_MAX},
               {"num_heads", merge->num_heads, 1, INT64_MAX}, {"head_dim", merge->head_dim, 1, INT64_MAX},
               {"num_sinks", merge->num_sinks, 0, INT64_MAX}, {"parts", merge->num_parts, 0, FA_MAX_PARTS}};
  int64_t limit = (INT64_C(1) << 56) / 8; /* every tensor must be addressable in bytes of f64 */
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    if (sizes[i].size < sizes[i].least || sizes[i].size > sizes[i].most)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, sizes[i].name,
                     sizes[i].most == INT64_MAX
                         ? FA_TEXT("at least %lld", (long long)sizes[i].least)
                         : FA_TEXT("%lld to %lld", (long long)sizes[i].least, (long long)sizes[i].most),
                     FA_TEXT("%lld", (long long)sizes[i].size));
    limit /= sizes[i].size ? sizes[i].size : 1;
  }
  return limit > 0 ? FA_STATUS_OK
                   : fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, "parts",
                                     "the product of the sizes of a merge overflows");
}

/* ---- shapes ---------------------------------------------------------------------------------------------- */

/* "f32[2, 5, 3]" */
static const char *shape_text(char text[128], fa_dtype dtype, int rank, const int64_t *dims) {
  int used = snprintf(text, 128, "%s[", fa_dtype_name(dtype));
  for (int i = 0; i < rank && i < FA_MAX_RANK; i++)
    used += snprintf(text + used, 128 - (size_t)used, "%s%lld", i ? ", " : "", (long long)dims[i]);
  snprintf(text + used, 128 - (size_t)used, rank > FA_MAX_RANK ? ", ...]" : "]");
  return text;
}

static fa_status check_shape(const char *name, const fa_shape *shape, fa_dtype dtype, int rank,
                             const int64_t *dims, fa_error *error) {
  int64_t bytes = (int64_t)fa_dtype_bytes(dtype);
  bool agrees = shape->rank == rank && shape->dtype == dtype;
  for (int i = 0; i < rank; i++) {
    agrees = agrees && shape->dims[i] == dims[i];
    bytes *= dims[i];
  }
  if (!agrees)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, name, shape_text((char[128]){0}, dtype, rank, dims),
                   shape_text((char[128]){0}, shape->dtype, shape->rank, shape->dims));
  if (shape->size_bytes >= 0 && shape->size_bytes != bytes)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, name,
                   FA_TEXT("%lld bytes for its shape and type", (long long)bytes),
                   FA_TEXT("%lld", (long long)shape->size_bytes));
  return fa_succeed(error);
}

static fa_status check_dtype(const fa_merge *merge, const char *name, fa_dtype dtype, fa_error *error) {
  const bool is_f64 = merge->merged.dtype == FA_DTYPE_F64;
  if (is_f64 ? dtype == FA_DTYPE_F64 : (unsigned)dtype < FA_NUM_FLOATS && dtype != FA_DTYPE_F64)
    return FA_STATUS_OK;
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, name,
                 is_f64 ? "type f64, as the merged o" : "type f32, bf16 or f16, as the merged o is not f64",
                 fa_dtype_name(dtype));
}

fa_status fa_merge_check_o(const fa_merge *merge, const char *name, const fa_shape *o, fa_error *error) {
  fa_status status = check_dtype(merge, name, o->dtype, error);
  return status ? status
                : check_shape(name, o, o->dtype, 4,
                              (int64_t[]){merge->batch, merge->seqlen_q, merge->num_heads, merge->head_dim},
                              error);
}

fa_status fa_merge_check_lse(const fa_merge *merge, const char *name, const fa_shape *lse, fa_error *error) {
  return check_shape(name, lse, stat_dtype(merge), 3,
                     (int64_t[]){merge->batch, merge->num_heads, merge->seqlen_q}, error);
}

static fa_status set_sink(fa_merge *merge, const fa_shape *sink, fa_error *error) {
  if (sink->rank != 2 && sink->rank != 4)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "sink",
                   "[num_sinks, num_heads] or [batch, seqlen_q, num_sinks, num_heads]",
                   FA_TEXT("rank %d", sink->rank));
  merge->sink_per_row = sink->rank == 4;
  merge->num_sinks = sink->dims[sink->rank - 2];
  fa_status status = check_sizes(merge, error);
  if (status) return status;
  const int64_t dims[] = {merge->batch, merge->seqlen_q, merge->num_sinks, merge->num_heads};
  return check_shape("sink", sink, FA_DTYPE_F32, sink->rank, dims + (4 - sink->rank), error);
}

fa_status fa_merge_set_shapes(fa_merge *merge, const fa_shape *o, const fa_shape *sink, fa_error *error) {
  if (o->rank != 4)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "o", "rank 4, [batch, seqlen_q, num_heads, head_dim]",
                   FA_TEXT("rank %d", o->rank));
  merge->batch = o->dims[0], merge->seqlen_q = o->dims[1];
  merge->num_heads = o->dims[2], merge->head_dim = o->dims[3];
  merge->num_sinks = 0, merge->sink_per_row = 0;
  fa_status status = check_sizes(merge, error);
  if (status) return status;
  return sink ? set_sink(merge, sink, error) : fa_succeed(error);
}

fa_tensor fa_merge_contiguous(const fa_merge *merge, void *data) {
  return (fa_tensor){.data = data,
                     .stride_batch = merge->seqlen_q * merge->num_heads * merge->head_dim,
                     .stride_row = merge->num_heads * merge->head_dim,
                     .stride_head = merge->head_dim};
}

static bool is_empty(const fa_merge *merge) { return merge->batch == 0 || merge->seqlen_q == 0; }

/* ---- checks ---------------------------------------------------------------------------------------------- */

static fa_status check_pointer(const char *name, const void *pointer, fa_error *error) {
  return pointer ? FA_STATUS_OK : fa_fail(error, FA_STATUS_INVALID_ARGUMENT, name, "a pointer", "NULL");
}

static fa_status check_part(const fa_merge *merge, const char *o_name, const char *lse_name,
                            const fa_part *part, fa_error *error) {
  fa_status status = check_dtype(merge, o_name, part->dtype, error);
  if (!status) status = check_pointer(o_name, part->o.data, error);
  return status ? status : check_pointer(lse_name, part->lse, error);
}

/* Gradients that are not wanted have neither pointers nor a type. */
static fa_status check_gradient(const fa_merge *merge, const fa_part *gradient, fa_error *error) {
  return gradient->o.data ? check_dtype(merge, "dparts", gradient->dtype, error) : FA_STATUS_OK;
}

static fa_status check(const fa_merge *merge, bool is_backward, fa_error *error) {
  if (merge->struct_size != sizeof *merge)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "merge",
                   FA_TEXT("struct_size %zu (fa_merge_init sets it)", sizeof *merge),
                   FA_TEXT("%zu", merge->struct_size));
  fa_status status = check_sizes(merge, error);
  if (!status && (unsigned)merge->merged.dtype >= FA_NUM_FLOATS)
    status = fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "o", "type f32, f64, bf16 or f16",
                     fa_dtype_name(merge->merged.dtype));
  if (!status && merge->num_sinks && (!is_empty(merge) || merge->dsink))
    status = check_pointer("sink", merge->sink, error);
  if (status || is_empty(merge)) return status;
  status = check_part(merge, "o", "lse", &merge->merged, error);
  for (int p = 0; !status && p < merge->num_parts; p++)
    status =
        check_part(merge, FA_TEXT("o of part %d", p), FA_TEXT("lse of part %d", p), &merge->parts[p], error);
  if (!is_backward) return status;
  if (!status) status = check_dtype(merge, "dout", merge->dmerged.dtype, error);
  if (!status) status = check_pointer("dout", merge->dmerged.o.data, error);
  for (int p = 0; !status && p < merge->num_parts; p++)
    status = check_gradient(merge, &merge->dparts[p], error);
  return status;
}

/* ---- running --------------------------------------------------------------------------------------------- */

size_t fa_merge_workspace_bytes(const fa_merge *merge) {
  const bool sums_rows = merge->num_sinks && !merge->sink_per_row && !is_empty(merge);
  return sums_rows
             ? (size_t)(merge->batch * merge->num_heads * merge->seqlen_q) * fa_dtype_bytes(stat_dtype(merge))
             : 0;
}

static fa_status run(const fa_merge *merge, bool is_backward, fa_device device, const fa_execution *execution,
                     fa_error *error) {
  const fa_backend *backend;
  fa_status status = check(merge, is_backward, error);
  if (!status) status = fa_backend_find(device, &backend, error);
  if (!status && !backend->merge)
    status = fa_fail(error, FA_STATUS_UNSUPPORTED, "device", "one that merges parts",
                     fa_device_kind_name(device.kind));
  if (!status && is_backward && merge->dsink)
    status = fa_workspace_check(execution, fa_merge_workspace_bytes(merge), error);
  /* The sum over no rows is written all the same. */
  if (!status && (!is_empty(merge) || (is_backward && merge->dsink && merge->num_sinks)))
    status = backend->merge(merge, is_backward, device.index, execution, error);
  return status ? status : fa_succeed(error);
}

fa_status fa_merge_forward(const fa_merge *merge, fa_device device, const fa_execution *execution,
                           fa_error *error) {
  return run(merge, false, device, execution, error);
}

fa_status fa_merge_backward(const fa_merge *merge, fa_device device, const fa_execution *execution,
                            fa_error *error) {
  return run(merge, true, device, execution, error);
}
