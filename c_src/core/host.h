/* When a call on a device is cut into slices. */
#ifndef FA_CORE_HOST_H
#define FA_CORE_HOST_H

#include <stdint.h>

/* A slice must move so many bytes and compute so many rows of heads, or handing it over costs more than it
 * saves and the device is not full. Rows of a slice of heads lie apart: the bus wants them to be of some
 * length. Variables, so that tests can cut small problems. */
typedef struct fa_slicing {
  int64_t least_bytes, least_rows, least_row_bytes;
} fa_slicing;

extern fa_slicing fa_host_slicing;

#endif
