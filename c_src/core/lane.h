/* What one call needs of a device to copy and compute at once: three streams, their events, and a ring of
 * pinned memory through which pageable memory is copied. Lanes are kept for later calls. */
#ifndef FA_CORE_LANE_H
#define FA_CORE_LANE_H

#include "memory.h"

enum { FA_MAX_SLICES = 8, FA_RING_SLOTS = 4 };

/* A piece of a copy of pageable memory that is under way. */
typedef struct fa_slot {
  char *memory;
  void *event; /* the bus is done with it */
  bool busy, download;
  fa_rows host; /* of a download: where it goes, from byte begin on */
  size_t row_bytes, begin, bytes;
} fa_slot;

typedef struct fa_lane {
  fa_heap *heap;
  void *up, *compute, *down; /* streams */
  void *ready, *finished;    /* events: the caller's stream may be read, everything is there */
  struct {
    void *uploaded, *begun, *done;
  } slices[FA_MAX_SLICES];
  fa_slot ring[FA_RING_SLOTS];
  size_t slot_bytes; /* 0: no ring could be had, pageable memory is copied as it is */
  unsigned next_slot;
  struct fa_lane *next;
} fa_lane;

/* A lane with a ring for so many pageable bytes (0: none). */
fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error);

/* Waits for whatever the lane still does. */
void fa_lane_give(fa_lane *lane);

/* Enqueues a copy of num_rows rows on the stream up or down. Through the ring where staged; then it is complete
 * for the host after fa_lane_flush. */
fa_status fa_lane_upload(fa_lane *lane, fa_rows device, fa_rows host, size_t row_bytes, size_t num_rows,
                         bool staged, fa_error *error);
fa_status fa_lane_download(fa_lane *lane, fa_rows host, fa_rows device, size_t row_bytes, size_t num_rows,
                           bool staged, fa_error *error);
fa_status fa_lane_flush(fa_lane *lane, fa_error *error);

#endif
