/* The handlers of XLA's custom calls, one for each pass and platform. The public header says what they take. */
#ifndef FA_XLA_HANDLERS_H
#define FA_XLA_HANDLERS_H

#include <xla/ffi/api/c_api.h>

XLA_FFI_Error *fa_xla_forward_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_forward_cuda(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_backward_host(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *fa_xla_backward_cuda(XLA_FFI_CallFrame *frame);

#endif
