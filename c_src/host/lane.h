/* A lane is what one call needs to copy and compute at the same time: three streams of a device, their events,
 * and the staging of pageable memory. A later call takes a lane that an earlier one gave back. */
#ifndef FA_HOST_LANE_H
#define FA_HOST_LANE_H

#include "staging.h"

typedef struct fa_lane {
  fa_heap *heap;
  void *up, *compute, *down;     /* streams */
  void *ready, *last, *finished; /* events: the caller's stream has come to the call, the results of all slices
                                  * but the last are there, and all results are */
  struct {
    void *uploaded, *begun, *done; /* events: what is copied directly is there, and kernels begin and end */
  } slices[FA_MAX_SLICES];
  fa_staging *staging; /* copies between pageable memory and the device on the streams up and down */
  struct fa_lane *next;
} fa_lane;

/* Takes a lane whose ring suits so many pageable bytes; it has no ring where they are 0. */
fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error);

/* Gives the lane back, once the work on its streams has ended: is_done says that it has. */
void fa_lane_give(fa_lane *lane, bool is_done);

#endif
