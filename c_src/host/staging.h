/* Copies between a device and pageable memory, which the bus reads slowly if at all. Several threads copy
 * through a ring of pinned memory: some of its slots are on the bus while others are filled or emptied. */
#ifndef FA_HOST_STAGING_H
#define FA_HOST_STAGING_H

#include <stdbool.h>

#include "memory.h"
#include "slices.h"

/* The rows of a copy in the host's memory and on the device, where each has row_bytes. */
typedef struct fa_copy {
  fa_rows device, host;
  size_t row_bytes, num_rows;
  int64_t packed_dim; /* 0: rows are copied as they are; else the head_dim of f32 rows that are packed */
  int slice;          /* the slice that needs the copy */
  bool is_padded;     /* whether the device's memory is an arena's, so that nothing else lies behind it */
} fa_copy;

typedef struct fa_staging fa_staging;

/* Its copies are enqueued on the streams up and down. After an error *staging is freed like any other. */
fa_status fa_staging_new(fa_heap *heap, void *up, void *down, fa_staging **staging, fa_error *error);
void fa_staging_free(fa_staging *staging);

/* Takes a ring that suits a call of so many bytes. Without memory for a ring no copy fits it. */
void fa_staging_take_ring(fa_staging *staging, size_t num_bytes);

/* Whether the copy can go through the ring. */
bool fa_staging_fits(const fa_staging *staging, const fa_copy *copy);

/* Begins to copy to the device. The copies are in the order of their slices. */
fa_status fa_staging_begin_uploads(fa_staging *staging, const fa_copy *copies, int num_copies, fa_error *error);

/* Returns when the bus has been given all of the slice's copies, and has the stream wait for them. */
fa_status fa_staging_await(fa_staging *staging, int slice, void *stream, fa_error *error);

/* Returns when the bus has been given the copies of all slices. */
fa_status fa_staging_end_uploads(fa_staging *staging, fa_error *error);

/* Copies from the device, and returns when all is there. No uploads may be under way. */
fa_status fa_staging_download(fa_staging *staging, const fa_copy *copies, int num_copies, fa_error *error);

/* Whether the calling thread alone had better take these copies through the ring, all of them at once. */
bool fa_staging_fits_at_once(const fa_staging *staging, const fa_copy *copies, int num_copies);

/* Enqueues such copies on the stream, to the device or from it. Later ones take the place of earlier ones in
 * the ring, so that the stream must be the same. What was fetched is taken from the ring once it is there. */
fa_status fa_staging_upload_at_once(fa_staging *staging, const fa_copy *copies, int num_copies, void *stream,
                                    fa_error *error);
fa_status fa_staging_fetch_at_once(fa_staging *staging, const fa_copy *copies, int num_copies, void *stream,
                                   fa_error *error);
void fa_staging_take_fetched(fa_staging *staging, const fa_copy *copies, int num_copies);

/* Where in the ring such copies lie, one after the other as parts do in an arena, for who writes what is to be
 * taken without a copy. */
char *fa_staging_memory(const fa_staging *staging);

/* Abandons uploads that an error kept from being ended. */
void fa_staging_stop(fa_staging *staging);

/* Gives the ring back, once the streams are done with it. */
void fa_staging_give_ring(fa_staging *staging);

#endif
