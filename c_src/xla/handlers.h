/* The handlers of XLA's custom calls, one for each call and platform. The public header says what they take. */
#ifndef FA_XLA_HANDLERS_H
#define FA_XLA_HANDLERS_H

#include <xla/ffi/api/c_api.h>

#include "../flash_attention.h"

XLA_FFI_Error *fa_xla_forward_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_forward_cuda(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_backward_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_backward_cuda(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_merge_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_merge_cuda(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_merge_backward_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_merge_backward_cuda(XLA_FFI_CallFrame *frame);

/* What they share. Whether the frame only asked what the handler was built against. */
bool fa_xla_answer_metadata(const XLA_FFI_CallFrame *frame);

/* The device and the stream that XLA wants the call on. */
XLA_FFI_Error *fa_xla_find_stream(const XLA_FFI_CallFrame *frame, fa_device *device, fa_execution *execution);

/* A buffer's type and shape, or the shape that an attribute gives it instead (array, else NULL). */
bool fa_xla_read_shape(const XLA_FFI_Buffer *buffer, const XLA_FFI_Array *array, const char *name,
                       fa_shape *shape, fa_error *error);

/* XLA's error, "flash_attention_<call>: <message>". */
XLA_FFI_Error *fa_xla_make_error(const XLA_FFI_CallFrame *frame, const char *call, const fa_error *error);

/* The number of the operand that lies where the result does (XLA's output_operand_aliases), or -1. */
int fa_xla_operand_under(const XLA_FFI_CallFrame *frame, const XLA_FFI_Buffer *result);

/* Whether a result has the shape that is wanted, or is flat. */
bool fa_xla_fits(const fa_shape *shape, const fa_shape *wanted);

/* "f32[2, 5, 3]" */
const char *fa_xla_shape_text(char text[128], const fa_shape *shape);

#endif
