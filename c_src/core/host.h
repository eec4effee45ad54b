/* When a call on a device is cut into slices. */
#ifndef FA_CORE_HOST_H
#define FA_CORE_HOST_H

#include <stdint.h>

/* A slice must move so many bytes and compute so many rows of heads, or handing it over costs more than it
 * saves and the device is not full. Rows of a slice of heads lie apart: the bus wants them to be of some
 * length, and the processor where it copies them. Slices of rows of q have a multiple of row_unit. Variables,
 * so that tests can cut small problems. */
typedef struct fa_slicing {
  int64_t least_bytes, least_rows, least_row_bytes, least_staged_row_bytes, row_unit;
} fa_slicing;

extern fa_slicing fa_host_slicing;

#endif
