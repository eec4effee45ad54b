/* XLA's call frame on one side; the problem, its tensors and a plan on the other. */
#include "handlers.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const XLA_FFI_DataType data_types[FA_NUM_DTYPES] = {
    [FA_DTYPE_F32] = XLA_FFI_DataType_F32,   [FA_DTYPE_F64] = XLA_FFI_DataType_F64,
    [FA_DTYPE_BF16] = XLA_FFI_DataType_BF16, [FA_DTYPE_F16] = XLA_FFI_DataType_F16,
    [FA_DTYPE_S32] = XLA_FFI_DataType_S32,   [FA_DTYPE_U32] = XLA_FFI_DataType_U32,
    [FA_DTYPE_U8] = XLA_FFI_DataType_U8,
};

typedef struct xla_call {
  const XLA_FFI_CallFrame *frame;
  fa_pass pass;
  fa_device device;
  fa_problem problem;
  fa_tensor_id operands[FA_NUM_TENSORS];
  int num_operands;
  const XLA_FFI_Array *shapes[FA_NUM_TENSORS]; /* from attributes; NULL: as the operand has it */
  fa_plan plan;
  fa_tensors tensors;
  fa_execution execution;
  fa_error error;
} xla_call;

static bool reject(xla_call *call, const char *argument, const char *expected, const char *got) {
  fa_fail(&call->error, FA_STATUS_INVALID_ARGUMENT, argument, expected, got);
  return false;
}

/* ---- attributes ------------------------------------------------------------------------------------ */

static bool read_number(const XLA_FFI_Scalar *scalar, double *number) {
  switch (scalar->dtype) {
    case XLA_FFI_DataType_F64: *number = *(const double *)scalar->value; return true;
    case XLA_FFI_DataType_F32: *number = *(const float *)scalar->value; return true;
    case XLA_FFI_DataType_S32: *number = *(const int32_t *)scalar->value; return true;
    case XLA_FFI_DataType_PRED: *number = *(const bool *)scalar->value; return true;
    case XLA_FFI_DataType_S64: {
      const int64_t integer = *(const int64_t *)scalar->value;
      *number = integer == FA_UNBOUNDED ? INFINITY : (double)integer;
      return true;
    }
    default: return false;
  }
}

/* Makes a string of a span, and cuts it where it is too long to be the name of anything. */
static const char *span_text(char text[64], const XLA_FFI_ByteSpan *span) {
  snprintf(text, 64, "%.*s", (int)(span->len < 64 ? span->len : 63), span->ptr);
  return text;
}

static bool read_option(xla_call *call, const char *name, XLA_FFI_AttrType type, const void *value) {
  char choice[64];
  double number;
  const fa_option *option = fa_option_find(name);
  if (!option) return reject(call, name, "the name of an option or of an operand", "an unknown attribute");
  if (type == XLA_FFI_AttrType_STRING)
    return !fa_option_set_choice(&call->problem, option, span_text(choice, value), &call->error);
  if (type == XLA_FFI_AttrType_SCALAR && read_number(value, &number))
    return !fa_option_set_number(&call->problem, option, number, &call->error);
  return reject(call, name, "an f64, f32, i64, i32, i1 or a string", "an attribute of another type");
}

static bool add_operand(xla_call *call, const char *name) {
  const int id = fa_tensor_find(name);
  if (id < 0) return reject(call, "operands", "names of tensors", name);
  for (int i = 0; i < call->num_operands; i++)
    if ((int)call->operands[i] == id) return reject(call, "operands", "every name once", name);
  call->operands[call->num_operands++] = (fa_tensor_id)id;
  return true;
}

/* Reads the attribute operands: "q,k,v,sink". */
static bool read_names(xla_call *call, const XLA_FFI_ByteSpan *names) {
  const char *end = names->ptr + names->len;
  for (const char *at = names->ptr, *next; at <= end; at = next + 1) {
    const char *comma = memchr(at, ',', (size_t)(end - at));
    char name[64];
    next = comma ? comma : end;
    if (!add_operand(call, span_text(name, &(XLA_FFI_ByteSpan){at, (size_t)(next - at)}))) return false;
  }
  return true;
}

static bool read_attribute(xla_call *call, XLA_FFI_AttrType type, const XLA_FFI_ByteSpan *span,
                           const void *value) {
  char name[64];
  span_text(name, span);
  if (strcmp(name, "operands") == 0)
    return type == XLA_FFI_AttrType_STRING ? read_names(call, value)
                                           : reject(call, name, "a string", "an attribute of another type");
  const int id = fa_tensor_find(name);
  if (id < 0) return read_option(call, name, type, value);
  call->shapes[id] = value;
  return (type == XLA_FFI_AttrType_ARRAY && call->shapes[id]->dtype == XLA_FFI_DataType_S64) ||
         reject(call, name, "a shape, an array of i64", "an attribute of another type");
}

static bool read_attributes(xla_call *call) {
  const XLA_FFI_Attrs *attrs = &call->frame->attrs;
  fa_problem_init(&call->problem);
  for (int64_t i = 0; i < attrs->size; i++)
    if (!read_attribute(call, attrs->types[i], attrs->names[i], attrs->attrs[i])) return false;
  return true;
}

bool fa_xla_read_shape(const XLA_FFI_Buffer *buffer, const XLA_FFI_Array *array, const char *name,
                       fa_shape *shape, fa_error *error) {
  int dtype = 0;
  while (dtype < FA_NUM_DTYPES && data_types[dtype] != buffer->dtype) dtype++;
  if (dtype == FA_NUM_DTYPES) {
    char got[32];
    snprintf(got, sizeof got, "XLA's type %d", (int)buffer->dtype);
    fa_fail(error, FA_STATUS_INVALID_ARGUMENT, name, "a type of the library's", got);
    return false;
  }
  const int64_t *dims = array ? array->data : buffer->dims;
  *shape = (fa_shape){.dtype = (fa_dtype)dtype, .rank = (int32_t)(array ? (int64_t)array->size : buffer->rank)};
  for (int i = 0; i < shape->rank && i < FA_MAX_RANK; i++) shape->dims[i] = dims[i];
  shape->size_bytes = (int64_t)fa_dtype_bytes(shape->dtype);
  for (int i = 0; i < buffer->rank; i++) shape->size_bytes *= buffer->dims[i];
  return true;
}

/* ---- operands -------------------------------------------------------------------------------------- */

/* Reads the operand's own shape, or the one that an attribute gives it. The library says whether it fits the
 * problem, the number of bytes included. */
static bool read_shape(xla_call *call, fa_tensor_id id, const XLA_FFI_Buffer *buffer, fa_shape *shape) {
  return fa_xla_read_shape(buffer, call->shapes[id], fa_tensor_name(id), shape, &call->error);
}

static bool reject_count(xla_call *call, const char *what, int64_t count, const char *bound, int64_t wanted) {
  char expected[64], got[32];
  snprintf(expected, sizeof expected, "%s%lld", bound, (long long)wanted);
  snprintf(got, sizeof got, "%lld", (long long)count);
  return reject(call, what, expected, got);
}

/* Takes the problem's sizes, and where its tensors lie, from the operands. */
static bool read_operands(xla_call *call) {
  const XLA_FFI_Args *args = &call->frame->args;
  fa_shape shapes[FA_NUM_TENSORS];
  const fa_shape *given[FA_NUM_TENSORS] = {0};
  if (call->num_operands == 0) return reject(call, "operands", "their names, as \"q,k,v\"", "none");
  if (args->size != call->num_operands)
    return reject_count(call, "operands", args->size, "as many as there are names, ", call->num_operands);
  for (int64_t i = 0; i < args->size; i++) {
    const fa_tensor_id id = call->operands[i];
    if (!read_shape(call, id, args->args[i], &shapes[id])) return false;
    given[id] = &shapes[id];
  }
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (call->shapes[id] && !given[id])
      return reject(call, fa_tensor_name(id), "an operand of that name", "a shape alone");
  if (fa_problem_set_shapes(&call->problem, call->pass, given, &call->error)) return false;
  for (int64_t i = 0; i < args->size; i++) {
    const fa_tensor_id id = call->operands[i];
    *fa_tensor_at(&call->tensors, id) =
        fa_tensor_contiguous(&call->problem, id, ((const XLA_FFI_Buffer *)args->args[i])->data);
  }
  return true;
}

/* ---- results --------------------------------------------------------------------------------------- */

static bool is_empty(const XLA_FFI_Buffer *buffer) {
  for (int64_t i = 0; i < buffer->rank; i++)
    if (buffer->dims[i] == 0) return true;
  return false;
}

/* Nothing lies in an empty buffer, wherever it is. */
int fa_xla_operand_under(const XLA_FFI_CallFrame *frame, const XLA_FFI_Buffer *result) {
  const XLA_FFI_Args *args = &frame->args;
  for (int64_t i = 0; i < args->size && !is_empty(result); i++) {
    const XLA_FFI_Buffer *operand = args->args[i];
    if (operand->data == result->data && !is_empty(operand)) return (int)i;
  }
  return -1;
}

/* A pass reads its operands until it ends. */
static bool check_own_memory(xla_call *call, const char *name, const XLA_FFI_Buffer *result) {
  const int operand = fa_xla_operand_under(call->frame, result);
  char got[64];
  if (operand < 0) return true;
  snprintf(got, sizeof got, "that of %s", fa_tensor_name(call->operands[operand]));
  return reject(call, name, "memory of its own", got);
}

/* "f32[2, 5, 3]" */
const char *fa_xla_shape_text(char text[128], const fa_shape *shape) {
  int used = snprintf(text, 128, "%s[", fa_dtype_name(shape->dtype));
  for (int i = 0; i < shape->rank && i < FA_MAX_RANK; i++)
    used += snprintf(text + used, 128 - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape->dims[i]);
  snprintf(text + used, 128 - (size_t)used, shape->rank > FA_MAX_RANK ? ", ...]" : "]");
  return text;
}

/* In that shape, or flat. */
bool fa_xla_fits(const fa_shape *shape, const fa_shape *wanted) {
  if (shape->dtype != wanted->dtype || shape->size_bytes != wanted->size_bytes) return false;
  return shape->rank == 1 ||
         (shape->rank == wanted->rank &&
          memcmp(shape->dims, wanted->dims, (size_t)shape->rank * sizeof *shape->dims) == 0);
}

static bool bind_result(xla_call *call, fa_tensor_id id, const XLA_FFI_Buffer *buffer) {
  const fa_shape wanted = fa_tensor_shape(&call->problem, id);
  char expected[128], got[128];
  fa_shape shape;
  if (!buffer) return reject(call, fa_tensor_name(id), fa_xla_shape_text(expected, &wanted), "no such result");
  if (!read_shape(call, id, buffer, &shape)) return false;
  if (!fa_xla_fits(&shape, &wanted))
    return reject(call, fa_tensor_name(id), fa_xla_shape_text(expected, &wanted),
                  fa_xla_shape_text(got, &shape));
  if (!check_own_memory(call, fa_tensor_name(id), buffer)) return false;
  *fa_tensor_at(&call->tensors, id) = fa_tensor_contiguous(&call->problem, id, buffer->data);
  return true;
}

/* Whether the result is the gradient by an operand without elements, as of 0 sinks, which the problem leaves
 * out. A workspace may be empty, too. */
static bool is_empty_gradient(const xla_call *call, int id, const XLA_FFI_Buffer *buffer) {
  if (call->pass != FA_PASS_BACKWARD || !buffer || buffer->dtype == XLA_FFI_DataType_U8 || !is_empty(buffer))
    return false;
  for (int i = 0; i < call->num_operands; i++) {
    const fa_tensor_id operand = call->operands[i];
    if (fa_tensor_gradient(operand) == id)
      return fa_tensor_role_in(&call->problem, call->pass, operand) == FA_ROLE_NONE;
  }
  return false;
}

static bool bind_workspace(xla_call *call, const XLA_FFI_Buffer *buffer) {
  if (buffer->dtype != XLA_FFI_DataType_U8 || buffer->rank != 1)
    return reject(call, "workspace", "u8[n]", "another type or rank");
  call->execution.workspace = buffer->data;
  call->execution.workspace_bytes = (size_t)buffer->dims[0];
  return check_own_memory(call, "workspace", buffer);
}

/* Results are the outputs of the pass, in the order of the tensor table, then the workspace. */
static bool bind_results(xla_call *call) {
  const XLA_FFI_Rets *rets = &call->frame->rets;
  int64_t used = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const XLA_FFI_Buffer *next = used < rets->size ? rets->rets[used] : NULL;
    if (fa_tensor_role_in(&call->problem, call->pass, id) != FA_ROLE_OUTPUT &&
        !is_empty_gradient(call, id, next))
      continue;
    if (!bind_result(call, id, next)) return false;
    used++;
  }
  if (rets->size > used + 1) return reject_count(call, "results", rets->size, "at most ", used + 1);
  return used == rets->size || bind_workspace(call, rets->rets[used]);
}

/* ---- running --------------------------------------------------------------------------------------- */

/* Tells the runtime what the handler was built against, and that its calls may be recorded. */
bool fa_xla_answer_metadata(const XLA_FFI_CallFrame *frame) {
  /* XLA has renamed the type that this begins with, so the frame is read as the extension itself. */
  const XLA_FFI_Metadata_Extension *extension = (const void *)frame->extension_start;
  if (!extension || extension->extension_base.type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = extension->metadata;
  metadata->api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  return true;
}

/* The device and the stream that XLA wants the call on. */
XLA_FFI_Error *fa_xla_find_stream(const XLA_FFI_CallFrame *frame, fa_device *device, fa_execution *execution) {
  const XLA_FFI_Api *api = frame->api;
  XLA_FFI_DeviceOrdinal_Get_Args ordinal = {.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE,
                                            .ctx = frame->ctx};
  XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  XLA_FFI_Error *error = api->XLA_FFI_DeviceOrdinal_Get(&ordinal);
  if (!error) error = api->XLA_FFI_Stream_Get(&stream);
  device->index = ordinal.device_ordinal;
  execution->stream = stream.stream;
  return error;
}

/* On a GPU the workspace is one of the results. In the host's memory the call takes its own, as a compiled
 * program may run on any thread; like a GPU it runs on the operands' numbers as they are. */
static bool run(xla_call *call) {
  const bool brings_workspace = !fa_has_own_memory(call->device.kind);
  fa_execution *execution = &call->execution;
  if (brings_workspace) {
    execution->workspace_bytes = call->plan.workspace_bytes;
    if (fa_device_alloc(call->device, execution->workspace_bytes, &execution->workspace, &call->error))
      return false;
  }
  const fa_status status = fa_run(&call->plan, &call->tensors, execution, &call->error);
  if (brings_workspace) fa_device_free(call->device, execution->workspace, NULL);
  return status == FA_STATUS_OK;
}

static XLA_FFI_Error_Code error_code(fa_status status) {
  switch (status) {
    case FA_STATUS_OK: return XLA_FFI_Error_Code_OK;
    case FA_STATUS_INVALID_ARGUMENT: return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case FA_STATUS_UNSUPPORTED: return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case FA_STATUS_NO_DEVICE: return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case FA_STATUS_OUT_OF_MEMORY: return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case FA_STATUS_DEVICE_ERROR: return XLA_FFI_Error_Code_INTERNAL;
  }
  return XLA_FFI_Error_Code_UNKNOWN;
}

XLA_FFI_Error *fa_xla_make_error(const XLA_FFI_CallFrame *frame, const char *call, const fa_error *error) {
  char message[512];
  snprintf(message, sizeof message, "flash_attention_%s: %s", call, error->message);
  return frame->api->XLA_FFI_Error_Create(
      &(XLA_FFI_Error_Create_Args){.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                   .message = message,
                                   .errc = error_code(error->status)});
}

static XLA_FFI_Error *handle(const XLA_FFI_CallFrame *frame, fa_pass pass, fa_device_kind kind) {
  if (fa_xla_answer_metadata(frame)) return NULL;
  xla_call call = {.frame = frame, .pass = pass, .device.kind = kind};
  XLA_FFI_Error *error =
      fa_has_own_memory(kind) ? fa_xla_find_stream(frame, &call.device, &call.execution) : NULL;
  if (error) return error;
  /* Results that no plan is for have no right shape, as dk beside pages, which are of the forward alone. */
  bool done = read_attributes(&call) && read_operands(&call) &&
              fa_plan_init(&call.plan, &call.problem, pass, call.device, &call.error) == FA_STATUS_OK &&
              bind_results(&call) && run(&call);
  return done ? NULL : fa_xla_make_error(frame, fa_pass_name(pass), &call.error);
}

XLA_FFI_Error *fa_xla_forward_host(XLA_FFI_CallFrame *frame) {
  return handle(frame, FA_PASS_FORWARD, FA_DEVICE_CPU);
}

XLA_FFI_Error *fa_xla_forward_cuda(XLA_FFI_CallFrame *frame) {
  return handle(frame, FA_PASS_FORWARD, FA_DEVICE_CUDA);
}

XLA_FFI_Error *fa_xla_backward_host(XLA_FFI_CallFrame *frame) {
  return handle(frame, FA_PASS_BACKWARD, FA_DEVICE_CPU);
}

XLA_FFI_Error *fa_xla_backward_cuda(XLA_FFI_CallFrame *frame) {
  return handle(frame, FA_PASS_BACKWARD, FA_DEVICE_CUDA);
}
