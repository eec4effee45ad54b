/* How a call on a device is cut into slices, so that one is copied while another is computed. */
#ifndef FA_HOST_SLICES_H
#define FA_HOST_SLICES_H

#include <stdbool.h>

#include "../flash_attention.h"

enum { FA_MAX_SLICES = 12 };

/* A slice must move so many bytes and compute so many rows of heads, or handing it over costs more than it
 * saves and the device is not full. Rows of a slice of heads lie apart: the bus wants them to be of some
 * length, and the processor where it copies them. Slices of rows of q have a multiple of row_unit. Variables,
 * so that tests can cut small problems. */
typedef struct fa_slicing {
  int64_t least_bytes, least_rows, least_row_bytes, least_staged_row_bytes, row_unit;
} fa_slicing;

extern fa_slicing fa_host_slicing;

/* A part of a problem that is a problem of its own: batches from first_batch on, and, of a single batch, key
 * and value heads from first_head on with the query heads that share them, and, of a forward, rows of q from
 * first_row on. Keys and values come with the first of these. */
typedef struct fa_extent {
  int64_t first_batch, num_batches, first_head, num_heads, first_row, num_rows;
} fa_extent;

/* What is computed at once, with what the processor copies for it: slices may come up together. */
typedef struct fa_slice {
  fa_extent own, staged;
} fa_slice;

typedef struct fa_slices {
  fa_slice at[FA_MAX_SLICES];
  int count;
} fa_slices;

/* Of a call that moves so many bytes, some of them from or to pageable memory. */
void fa_cut(const fa_problem *problem, fa_pass pass, int64_t bytes_moved, int64_t pageable_bytes,
            fa_slices *slices);

/* Whether it is some rows of q of its heads. */
bool fa_is_of_rows(const fa_problem *problem, const fa_extent *own);

/* The extent as a problem, canonical, whose origin says where it lies in the whole. */
fa_problem fa_problem_of(const fa_problem *whole, const fa_extent *own);

/* k, v, or their gradients. */
bool fa_is_of_keys(int id);

/* How an extent's part of a tensor lies in all of it, in bytes. */
typedef struct fa_part {
  size_t offset, row_bytes, pitch, num_rows;
} fa_part;

fa_part fa_part_of(const fa_problem *problem, const fa_extent *extent, int id, const fa_tensor *tensor);

#endif
