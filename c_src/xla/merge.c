/* XLA's call frame on one side; a merge of parts, or its gradients, on the other. */
#include <stdio.h>
#include <string.h>

#include "handlers.h"

typedef struct merge_call {
  const XLA_FFI_CallFrame *frame;
  bool is_backward;
  fa_device device;
  fa_merge merge;
  fa_execution execution;
  const XLA_FFI_Array *o_shape, *sink_shape; /* from attributes; NULL: as the operand has it */
  fa_shape sink;
  int64_t num_results; /* bound so far */
  fa_error error;
} merge_call;

static bool reject(merge_call *call, const char *argument, const char *expected, const char *got) {
  fa_fail(&call->error, FA_STATUS_INVALID_ARGUMENT, argument, expected, got);
  return false;
}

static bool reject_count(merge_call *call, const char *what, const char *expected, int64_t count) {
  char got[32];
  snprintf(got, sizeof got, "%lld", (long long)count);
  return reject(call, what, expected, got);
}

static bool read_attributes(merge_call *call) {
  const XLA_FFI_Attrs *attrs = &call->frame->attrs;
  for (int64_t i = 0; i < attrs->size; i++) {
    const XLA_FFI_ByteSpan *name = attrs->names[i];
    const bool is_o = name->len == 1 && name->ptr[0] == 'o';
    const bool is_sink = name->len == 4 && memcmp(name->ptr, "sink", 4) == 0;
    char text[64];
    snprintf(text, sizeof text, "%.*s", (int)(name->len < 64 ? name->len : 63), name->ptr);
    if (!is_o && !is_sink) return reject(call, text, "o or sink, and their shapes", "an unknown attribute");
    const XLA_FFI_Array *shape = attrs->attrs[i];
    if (attrs->types[i] != XLA_FFI_AttrType_ARRAY || shape->dtype != XLA_FFI_DataType_S64)
      return reject(call, text, "a shape, an array of i64", "an attribute of another type");
    *(is_o ? &call->o_shape : &call->sink_shape) = shape;
  }
  return true;
}

/* ---- operands -------------------------------------------------------------------------------------------- */

static bool read_o(merge_call *call, const XLA_FFI_Buffer *buffer, const char *name, fa_part *part) {
  fa_shape shape;
  if (!fa_xla_read_shape(buffer, call->o_shape, name, &shape, &call->error) ||
      fa_merge_check_o(&call->merge, name, &shape, &call->error))
    return false;
  *part =
      (fa_part){.o = fa_merge_contiguous(&call->merge, buffer->data), .lse = part->lse, .dtype = shape.dtype};
  return true;
}

/* An lse may be flat where the o are. */
static bool read_lse(merge_call *call, const XLA_FFI_Buffer *buffer, const char *name, fa_part *part) {
  const fa_merge *m = &call->merge;
  const int64_t dims[] = {m->batch, m->num_heads, m->seqlen_q};
  const XLA_FFI_Array own = {.dtype = XLA_FFI_DataType_S64, .size = 3, .data = (void *)dims};
  fa_shape shape;
  const bool is_flat = call->o_shape && buffer->rank == 1;
  part->lse = buffer->data;
  return fa_xla_read_shape(buffer, is_flat ? &own : NULL, name, &shape, &call->error) &&
         fa_merge_check_lse(m, name, &shape, &call->error) == FA_STATUS_OK;
}

/* dout and dlse, o and lse where there are such, then the parts. */
static bool read_operands(merge_call *call) {
  const XLA_FFI_Args *args = &call->frame->args;
  const int64_t before = call->is_backward ? 4 : 0, num_parts = (args->size - before) / 2;
  const bool has_sink = args->size % 2 != 0;
  fa_merge *m = &call->merge;
  fa_shape o;
  if (args->size < (call->is_backward ? 4 : 2) || num_parts > FA_MAX_PARTS)
    return reject_count(call, "operands",
                        call->is_backward ? "4, two a part, of which there may be 32, and perhaps a sink"
                                          : "two a part, 1 to 32 of them, and perhaps a sink",
                        args->size);
  const XLA_FFI_Buffer *const *buffers = (const XLA_FFI_Buffer *const *)args->args;
  const XLA_FFI_Buffer *first = buffers[call->is_backward ? 2 : 0];
  if (!fa_xla_read_shape(first, call->o_shape, "o", &o, &call->error)) return false;
  if (has_sink &&
      !fa_xla_read_shape(buffers[args->size - 1], call->sink_shape, "sink", &call->sink, &call->error))
    return false;
  if (call->sink_shape && !has_sink) return reject(call, "sink", "an operand of that name", "a shape alone");
  if (fa_merge_set_shapes(m, &o, has_sink ? &call->sink : NULL, &call->error)) return false;
  if (has_sink) m->sink = buffers[args->size - 1]->data;
  m->merged.dtype = o.dtype; /* of a forward it becomes that of its result */
  if (!call->is_backward && call->frame->rets.size > 0) {
    fa_shape result;
    if (!fa_xla_read_shape(call->frame->rets.rets[0], NULL, "o", &result, &call->error)) return false;
    m->merged.dtype = result.dtype;
  }
  if (call->is_backward &&
      (!read_o(call, buffers[0], "dout", &m->dmerged) || !read_lse(call, buffers[1], "dlse", &m->dmerged) ||
       !read_o(call, buffers[2], "o", &m->merged) || !read_lse(call, buffers[3], "lse", &m->merged)))
    return false;
  for (m->num_parts = 0; m->num_parts < num_parts; m->num_parts++) {
    char names[2][32];
    const XLA_FFI_Buffer *const *pair = buffers + before + 2 * m->num_parts;
    snprintf(names[0], sizeof names[0], "o of part %d", m->num_parts);
    snprintf(names[1], sizeof names[1], "lse of part %d", m->num_parts);
    if (!read_o(call, pair[0], names[0], &m->parts[m->num_parts]) ||
        !read_lse(call, pair[1], names[1], &m->parts[m->num_parts]))
      return false;
  }
  return true;
}

/* ---- results --------------------------------------------------------------------------------------------- */

/* What is merged may replace a part's numbers, o those of an o and lse those of an lse: of each, what a thread
 * reads lies where it then writes. A backward reads what it was given until it ends. */
static bool check_own_memory(merge_call *call, const char *name, const XLA_FFI_Buffer *result) {
  const int operand = fa_xla_operand_under(call->frame, result);
  const bool may_be_part = !call->is_backward && operand < 2 * call->merge.num_parts;
  if (operand < 0 || (may_be_part && operand % 2 == call->num_results - 1)) return true;
  char got[32];
  snprintf(got, sizeof got, "that of operand %d", operand);
  return reject(call, name, call->is_backward ? "memory of its own" : "memory of its own, or a part's", got);
}

/* The next result, of that type and shape, or flat. */
static bool bind_result(merge_call *call, const char *name, const fa_shape *wanted, void **data) {
  const XLA_FFI_Rets *rets = &call->frame->rets;
  char expected[128], got[128];
  fa_xla_shape_text(expected, wanted);
  if (call->num_results >= rets->size) return reject(call, name, expected, "no such result");
  const XLA_FFI_Buffer *buffer = rets->rets[call->num_results++];
  fa_shape shape;
  if (!fa_xla_read_shape(buffer, NULL, name, &shape, &call->error)) return false;
  *data = buffer->data;
  if (!check_own_memory(call, name, buffer)) return false;
  return fa_xla_fits(&shape, wanted) || reject(call, name, expected, fa_xla_shape_text(got, &shape));
}

static fa_shape shape_of(fa_dtype dtype, int32_t rank, const int64_t *dims) {
  fa_shape shape = {.dtype = dtype, .rank = rank, .size_bytes = (int64_t)fa_dtype_bytes(dtype)};
  for (int i = 0; i < rank; i++) shape.size_bytes *= shape.dims[i] = dims[i];
  return shape;
}

static bool bind_part(merge_call *call, const char *names[2], fa_dtype dtype, fa_part *part) {
  const fa_merge *m = &call->merge;
  const fa_shape of_o = shape_of(dtype, 4, (int64_t[]){m->batch, m->seqlen_q, m->num_heads, m->head_dim});
  const fa_shape of_lse = shape_of(m->merged.dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32, 3,
                                   (int64_t[]){m->batch, m->num_heads, m->seqlen_q});
  void *o;
  if (!bind_result(call, names[0], &of_o, &o) || !bind_result(call, names[1], &of_lse, &part->lse))
    return false;
  part->o = fa_merge_contiguous(m, o);
  part->dtype = dtype;
  return true;
}

static bool bind_gradients(merge_call *call) {
  fa_merge *m = &call->merge;
  for (int p = 0; p < m->num_parts; p++)
    if (!bind_part(call, (const char *[]){"the gradient by o", "the gradient by lse"}, m->parts[p].dtype,
                   &m->dparts[p]))
      return false;
  if (!m->sink) return true;
  void *dsink;
  if (!bind_result(call, "dsink", &call->sink, &dsink)) return false;
  m->dsink = dsink;
  return true;
}

static bool bind_results(merge_call *call) {
  const XLA_FFI_Rets *rets = &call->frame->rets;
  fa_merge *m = &call->merge;
  if (!(call->is_backward ? bind_gradients(call)
                          : bind_part(call, (const char *[]){"o", "lse"}, m->merged.dtype, &m->merged)))
    return false;
  if (rets->size == call->num_results) return true;
  const XLA_FFI_Buffer *workspace = rets->rets[call->num_results];
  if (rets->size > call->num_results + 1 || workspace->dtype != XLA_FFI_DataType_U8 || workspace->rank != 1)
    return reject_count(call, "results", "those of the call, and perhaps a workspace u8[n]", rets->size);
  if (fa_xla_operand_under(call->frame, workspace) >= 0)
    return reject(call, "workspace", "memory of its own", "an operand's");
  call->execution.workspace = workspace->data;
  call->execution.workspace_bytes = (size_t)workspace->dims[0];
  return true;
}

/* ---- running --------------------------------------------------------------------------------------------- */

/* On a GPU the workspace is one of the results; in the host's memory the call takes its own. */
static bool run(merge_call *call) {
  fa_execution *execution = &call->execution;
  void *own = NULL;
  if (call->is_backward && !fa_has_own_memory(call->device.kind)) {
    execution->workspace_bytes = fa_merge_workspace_bytes(&call->merge);
    if (fa_device_alloc(call->device, execution->workspace_bytes, &own, &call->error)) return false;
    execution->workspace = own;
  }
  const fa_status status = (call->is_backward ? fa_merge_backward : fa_merge_forward)(
      &call->merge, call->device, execution, &call->error);
  fa_device_free(call->device, own, NULL);
  return status == FA_STATUS_OK;
}

static XLA_FFI_Error *handle(const XLA_FFI_CallFrame *frame, bool is_backward, fa_device_kind kind) {
  if (fa_xla_answer_metadata(frame)) return NULL;
  merge_call call = {.frame = frame, .is_backward = is_backward, .device.kind = kind};
  XLA_FFI_Error *error =
      fa_has_own_memory(kind) ? fa_xla_find_stream(frame, &call.device, &call.execution) : NULL;
  if (error) return error;
  fa_merge_init(&call.merge);
  const bool done = read_attributes(&call) && read_operands(&call) && bind_results(&call) && run(&call);
  return done ? NULL : fa_xla_make_error(frame, is_backward ? "merge_backward" : "merge", &call.error);
}

XLA_FFI_Error *fa_xla_merge_host(XLA_FFI_CallFrame *frame) { return handle(frame, false, FA_DEVICE_CPU); }
XLA_FFI_Error *fa_xla_merge_cuda(XLA_FFI_CallFrame *frame) { return handle(frame, false, FA_DEVICE_CUDA); }
XLA_FFI_Error *fa_xla_merge_backward_host(XLA_FFI_CallFrame *frame) {
  return handle(frame, true, FA_DEVICE_CPU);
}
XLA_FFI_Error *fa_xla_merge_backward_cuda(XLA_FFI_CallFrame *frame) {
  return handle(frame, true, FA_DEVICE_CUDA);
}
