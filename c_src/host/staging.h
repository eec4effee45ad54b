/* Copies between pageable memory, which the bus reads slowly if at all, and a device: by several threads
 * through a ring of pinned memory, whose slots are on the bus while others are filled. */
#ifndef FA_HOST_STAGING_H
#define FA_HOST_STAGING_H

#include <stdbool.h>

#include "memory.h"
#include "slices.h"

/* Rows in the host's memory and on the device, as many here as there, row_bytes long on the device. */
typedef struct fa_copy {
  fa_rows device, host;
  size_t row_bytes, num_rows;
  int64_t packed_dim; /* 0: as long in the host's memory; else that is f32, and packed (pack.h): head_dim */
  int slice;          /* of which it is */
} fa_copy;

typedef struct fa_staging fa_staging;

/* For copies that are enqueued on these streams. */
fa_status fa_staging_new(fa_heap *heap, void *up, void *down, fa_staging **staging, fa_error *error);
void fa_staging_free(fa_staging *staging);

/* A ring that suits so many bytes, of a call; without memory for one nothing fits it. */
void fa_staging_take_ring(fa_staging *staging, size_t num_bytes);

/* Whether the copy can go through the ring. */
bool fa_staging_fits(const fa_staging *staging, const fa_copy *copy);

/* Begins to copy to the device; slices in order. */
fa_status fa_staging_begin_uploads(fa_staging *staging, const fa_copy *copies, int num_copies, fa_error *error);

/* Until the bus has been given all of the slice's; the stream waits until they are there. */
fa_status fa_staging_await(fa_staging *staging, int slice, void *stream, fa_error *error);

/* Until it has been given all slices'. */
fa_status fa_staging_end_uploads(fa_staging *staging, fa_error *error);

/* Copies from the device, while there are no uploads; all is there on return. */
fa_status fa_staging_download(fa_staging *staging, const fa_copy *copies, int num_copies, fa_error *error);

/* Uploads that were not ended, after an error, are left off. */
void fa_staging_stop(fa_staging *staging);

/* When the streams are done with it. */
void fa_staging_give_ring(fa_staging *staging);

#endif
