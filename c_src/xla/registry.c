/* The handlers that there are, and how XLA learns of them. FA_XLA is defined where XLA's header was found. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "../flash_attention.h"

#ifdef FA_XLA
#include "handlers.h"

static const struct {
  const char *target, *platform;
  XLA_FFI_Handler *handler;
} rows[] = {
    {"flash_attention_forward", "Host", fa_xla_forward_host},
    {"flash_attention_forward", "CUDA", fa_xla_forward_cuda},
    {"flash_attention_backward", "Host", fa_xla_backward_host},
    {"flash_attention_backward", "CUDA", fa_xla_backward_cuda},
    {"flash_attention_merge", "Host", fa_xla_merge_host},
    {"flash_attention_merge", "CUDA", fa_xla_merge_cuda},
    {"flash_attention_merge_backward", "Host", fa_xla_merge_backward_host},
    {"flash_attention_merge_backward", "CUDA", fa_xla_merge_backward_cuda},
};
enum { NUM_ROWS = sizeof rows / sizeof *rows };

void *fa_xla_handler(const char *target, const char *platform) {
  for (int i = 0; i < NUM_ROWS; i++)
    if (strcmp(rows[i].target, target) == 0 && strcmp(rows[i].platform, platform) == 0)
      return (void *)rows[i].handler;
  return NULL;
}

#if XLA_FFI_API_MINOR < 4 /* the same place and the same message, under an older name */
#define XLA_FFI_Error_GetDetails                  XLA_FFI_Error_GetMessage
#define XLA_FFI_Error_GetDetails_Args             XLA_FFI_Error_GetMessage_Args
#define XLA_FFI_Error_GetDetails_Args_STRUCT_SIZE XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE
#endif

/* Takes XLA's error, and what it says, into ours. */
static fa_status refuse(const XLA_FFI_Api *api, XLA_FFI_Error *refusal, fa_error *error) {
  XLA_FFI_Error_GetDetails_Args message = {.struct_size = XLA_FFI_Error_GetDetails_Args_STRUCT_SIZE,
                                           .error = refusal};
  api->XLA_FFI_Error_GetDetails(&message);
  fa_fail(error, FA_STATUS_UNSUPPORTED, "api", "an XLA runtime that takes the handlers", message.message);
  api->XLA_FFI_Error_Destroy(
      &(XLA_FFI_Error_Destroy_Args){.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = refusal});
  return FA_STATUS_UNSUPPORTED;
}

static XLA_FFI_ByteSpan span(const char *text) { return (XLA_FFI_ByteSpan){text, strlen(text)}; }

fa_status fa_xla_register(const void *xla_api, fa_error *error) {
  const XLA_FFI_Api *api = xla_api;
  if (!api) return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "api", "what XLA_FFI_GetApi() returns", "NULL");
  if (api->api_version.major_version != XLA_FFI_API_MAJOR ||
      api->struct_size < offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void *)) {
    char expected[64], got[64];
    snprintf(expected, sizeof expected, "XLA's FFI %d.%d", XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
    snprintf(got, sizeof got, "%d.%d", api->api_version.major_version, api->api_version.minor_version);
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "api", expected, got);
  }
  for (int i = 0; i < NUM_ROWS; i++) {
    /* What follows execute stays 0: a later XLA has further handlers there, before the traits, which the
     * handlers also tell when asked. */
    struct {
      XLA_FFI_Handler_Register_Args args;
      void *later[4];
    } row = {.args = {.struct_size = XLA_FFI_Handler_Register_Args_STRUCT_SIZE,
                      .name = span(rows[i].target),
                      .platform = span(rows[i].platform),
                      .bundle.execute = rows[i].handler}};
    XLA_FFI_Error *refusal = api->XLA_FFI_Handler_Register(&row.args);
    if (refusal) return refuse(api, refusal, error);
  }
  if (error) memset(error, 0, sizeof *error);
  return FA_STATUS_OK;
}

#else

void *fa_xla_handler(const char *target, const char *platform) {
  (void)target, (void)platform;
  return NULL;
}

fa_status fa_xla_register(const void *api, fa_error *error) {
  (void)api;
  return fa_fail(error, FA_STATUS_UNSUPPORTED, "api",
                 "a build with xla/ffi/api/c_api.h, which comes with EXLA (XLA_FFI_INCLUDE)", "one without it");
}

#endif
