/* How a call on a device is cut into slices, so that one is copied while another is computed.
 *
 * A slice is what is computed at once. An extent is a range of batches, heads and rows; a region is where an
 * extent's elements lie in a tensor. Parts are what heads, or rows of q, are divided into. */
#ifndef FA_HOST_SLICES_H
#define FA_HOST_SLICES_H

#include <stdbool.h>

#include "../flash_attention.h"

enum { FA_MAX_SLICES = 12 };

/* How small slices may be; variables, so that tests can cut small problems. */
typedef struct fa_slicing {
  int64_t least_bytes;     /* that a slice moves: handing it over costs more than less of them would save */
  int64_t least_rows;      /* of heads, that a slice computes: fewer leave processors of the device idle */
  int64_t least_row_bytes; /* of rows that lie apart, for the bus */
  int64_t least_staged_row_bytes; /* of such rows, for the processor that copies them */
  int64_t row_unit;               /* slices of rows of q have a multiple of it, as tiles of kernels have */
  int64_t
      few_rows; /* of q, for which kernels sum in another order: slices have more, unless the whole has not */
} fa_slicing;

extern fa_slicing fa_host_slicing;

/* A part of a problem that is a problem of its own: batches from first_batch on, and, of a single batch, key
 * and value heads from first_head on with the query heads that share them, and rows of q from first_row on with
 * the keys that they see. */
typedef struct fa_extent {
  int64_t first_batch, num_batches, first_head, num_heads, first_row, num_rows;
} fa_extent;

typedef struct fa_slice {
  fa_extent own;    /* what it computes */
  fa_extent staged; /* what the processor copies for it, which may be later slices' as well; or no heads */
} fa_slice;

/* In the order of batches, heads and rows; together they are the part. */
typedef struct fa_slices {
  fa_slice at[FA_MAX_SLICES];
  int count;
} fa_slices;

/* Splits a problem among so many devices: batches, or the heads of a single one, as extents have them; not what
 * an output sums over. Returns how many have a part. */
int32_t fa_split(const fa_problem *problem, fa_pass pass, int32_t num_devices, fa_extent *parts);

/* Cuts a part of a call, that moves so many bytes, some of them from or to pageable memory. With bands rows are
 * cut only where fa_cut_bands can be asked for theirs. */
void fa_cut(const fa_problem *problem, const fa_extent *part, fa_pass pass, int64_t bytes_moved,
            int64_t pageable_bytes, bool can_cut_bands, fa_slices *slices);

/* Whether the extent's problem needs bands of its own, those that its rows have of a batch's bands
 * [num_bands, 6], with the window within them; writes them. */
bool fa_needs_own_bands(const fa_problem *problem, const fa_extent *own);
void fa_cut_bands(const fa_problem *problem, const fa_extent *own, const int32_t *bands, int32_t *to);

/* The extent as a problem, canonical, whose origin says where it lies in the whole. */
fa_problem fa_problem_of(const fa_problem *whole, const fa_extent *own);

/* Where an extent's elements lie in a tensor: rows of bytes that begin pitch bytes apart. */
typedef struct fa_region {
  size_t offset, row_bytes, pitch, num_rows;
} fa_region;

fa_region fa_region_of(const fa_problem *problem, const fa_extent *extent, int id, const fa_tensor *tensor);

/* Whether the extent's region of a tensor whose strides nobody chooses has gaps, so that the extent's problem
 * cannot take it where it lies. */
bool fa_lies_apart(const fa_problem *problem, const fa_extent *extent, int id);

/* Whether slices of the part before this extent's have had all of its elements of a tensor already, as where
 * the tensor does not vary from one batch, head or row to the next. */
bool fa_is_there_before(const fa_problem *problem, const fa_extent *part, const fa_extent *extent, int id);

/* The whole problem as an extent. */
fa_extent fa_whole_extent(const fa_problem *problem);

#endif
