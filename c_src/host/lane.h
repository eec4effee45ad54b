/* What one call needs of a device to copy and compute at once: three streams, their events, and a ring of
 * pinned memory through which pageable memory is copied. Lanes are kept for later calls. */
#ifndef FA_HOST_LANE_H
#define FA_HOST_LANE_H

#include "staging.h"

typedef struct fa_lane {
  fa_heap *heap;
  void *up, *compute, *down;     /* streams */
  void *ready, *last, *finished; /* events: the caller's stream may be read, all but the last slice's results
                                  * are there, all is */
  struct {
    void *uploaded, *begun, *done;
  } slices[FA_MAX_SLICES];
  fa_staging *staging; /* between pageable memory and the streams up and down */
  struct fa_lane *next;
} fa_lane;

/* A lane with a ring that suits so many pageable bytes (0: none). */
fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error);

/* Waits for whatever the lane still does. */
void fa_lane_give(fa_lane *lane);

#endif
