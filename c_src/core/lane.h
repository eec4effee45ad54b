/* What one call needs of a device to copy and compute at once: three streams, their events, and a ring of
 * pinned memory through which pageable memory is copied. Lanes are kept for later calls. */
#ifndef FA_CORE_LANE_H
#define FA_CORE_LANE_H

#include <stdatomic.h>

#include "memory.h"

enum { FA_MAX_SLICES = 12, FA_RING_SLOTS = 6 };

/* Rows in the host's memory and on the device, as many and as long here as there. */
typedef struct fa_copy {
  fa_rows device, host;
  size_t row_bytes, num_rows;
} fa_copy;

/* A piece of a copy, the bytes from begin on, in pinned memory on its way. Several threads fill or empty it,
 * each a part. Pieces are numbered; every FA_RING_SLOTS-th takes the same slot. */
typedef struct fa_slot {
  char *memory;
  void *event; /* the bus is done with it */
  bool busy, download, push_out;
  const fa_copy *copy;
  size_t begin, bytes;
  atomic_long sent, open; /* the piece that the bus was given last, and that threads may work on */
  atomic_int parts_left;
} fa_slot;

typedef struct fa_lane {
  fa_heap *heap;
  void *up, *compute, *down;     /* streams */
  void *ready, *last, *finished; /* events: the caller's stream may be read, all but the last slice's results
                                  * are there, all is */
  struct {
    void *uploaded, *begun, *done;
  } slices[FA_MAX_SLICES];
  fa_slot ring[FA_RING_SLOTS];
  int first_slot;    /* where the next copies begin: the one that was given to the bus first */
  size_t slot_bytes; /* 0: there is no ring, pageable memory is copied as it is */
  size_t pageable_bytes, staged_bytes; /* that a call has to copy, and that were */
  struct fa_lane *next;
} fa_lane;

/* A lane with a ring that suits so many pageable bytes (0: none). */
fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error);

/* Waits for whatever the lane still does. */
void fa_lane_give(fa_lane *lane);

/* Enqueues copies to the device on the stream up, or from there on the stream down. Staged ones go through the
 * ring, by several threads; what is staged down is there on return. */
fa_status fa_lane_copy(fa_lane *lane, const fa_copy *copies, int num_copies, bool download, bool staged,
                       fa_error *error);

#endif
