/* Reporting errors: fa_fail and its neighbours are the one way in which the library fails. */
#ifndef FA_CORE_ERROR_H
#define FA_CORE_ERROR_H

#include "../flash_attention.h"

/* fa_fail, which the public header declares, with a message of its own instead of "expected …, got …". */
fa_status fa_fail_message(fa_error *error, fa_status status, const char *argument, const char *message);

/* Sets error to FA_STATUS_OK and returns it. */
fa_status fa_succeed(fa_error *error);

/* A formatted string that lives as long as the enclosing block, for the arguments of fa_fail. */
#define FA_TEXT(...) fa_text((char[160]){0}, 160, __VA_ARGS__)
__attribute__((format(printf, 3, 4))) const char *fa_text(char *text, size_t text_bytes, const char *format,
                                                          ...);

#endif
