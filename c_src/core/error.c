/* Errors are made here, their texts included. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *fa_status_name(fa_status status) {
  switch (status) {
    case FA_STATUS_OK: return "ok";
    case FA_STATUS_INVALID_ARGUMENT: return "invalid_argument";
    case FA_STATUS_UNSUPPORTED: return "unsupported";
    case FA_STATUS_NO_DEVICE: return "no_device";
    case FA_STATUS_OUT_OF_MEMORY: return "out_of_memory";
    case FA_STATUS_DEVICE_ERROR: return "device_error";
  }
  return "unknown";
}

const char *fa_text(char *text, size_t text_bytes, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, text_bytes, format, arguments);
  va_end(arguments);
  return text;
}

/* Empties the texts, and leaves their other bytes: a small call comes here some thirty times (host_log.md). */
fa_status fa_succeed(fa_error *error) {
  if (!error) return FA_STATUS_OK;
  error->argument[0] = error->expected[0] = error->got[0] = error->message[0] = '\0';
  return error->status = FA_STATUS_OK;
}

fa_status fa_fail_message(fa_error *error, fa_status status, const char *argument, const char *message) {
  if (!error) return status;
  memset(error, 0, sizeof *error);
  error->status = status;
  bool named = argument && *argument;
  if (named) snprintf(error->argument, sizeof error->argument, "%s", argument);
  snprintf(error->message, sizeof error->message, "%s%s%s", named ? argument : "",
           named && *message ? ": " : "", message);
  return status;
}

fa_status fa_fail(fa_error *error, fa_status status, const char *argument, const char *expected,
                  const char *got) {
  if (!error) return status;
  char message[sizeof error->message];
  const bool has_expected = expected && *expected, has_got = got && *got;
  snprintf(message, sizeof message, "%s%s%s%s%s", has_expected ? "expected " : "", has_expected ? expected : "",
           has_expected && has_got ? ", " : "", has_got ? "got " : "", has_got ? got : "");
  fa_fail_message(error, status, argument, message);
  snprintf(error->expected, sizeof error->expected, "%s", expected ? expected : "");
  snprintf(error->got, sizeof error->got, "%s", got ? got : "");
  return status;
}
