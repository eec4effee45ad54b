/* What one call needs of a device to copy and compute at once: three streams, their events, and a ring of
 * pinned memory through which pageable memory is copied. Lanes are kept for later calls. */
#ifndef FA_CORE_LANE_H
#define FA_CORE_LANE_H

#include "memory.h"

enum { FA_MAX_SLICES = 8, FA_COPY_THREADS = 8, FA_SLOTS_A_THREAD = 2 };

/* Rows in the host's memory and on the device, as many and as long here as there. */
typedef struct fa_copy {
  fa_rows device, host;
  size_t row_bytes, num_rows;
} fa_copy;

/* A part of a copy, the bytes from begin on, in pinned memory on its way. */
typedef struct fa_slot {
  char *memory;
  void *event; /* the bus is done with it */
  bool busy, download;
  const fa_copy *copy;
  size_t begin, bytes;
} fa_slot;

typedef struct fa_lane {
  fa_heap *heap;
  void *up, *compute, *down; /* streams */
  void *ready, *finished;    /* events: the caller's stream may be read, everything is there */
  struct {
    void *uploaded, *begun, *done;
  } slices[FA_MAX_SLICES];
  /* Each of the threads that copy has slots of its own, which it takes in turn: one is filled or emptied while
   * the bus has the other. */
  fa_slot slots[FA_COPY_THREADS][FA_SLOTS_A_THREAD];
  int next_slot[FA_COPY_THREADS];
  char *ring;        /* the slots' memory */
  size_t slot_bytes; /* 0: there is none, pageable memory is copied as it is */
  struct fa_lane *next;
} fa_lane;

/* A lane whose slots are of a size that suits so many pageable bytes (0: none). */
fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error);

/* Waits for whatever the lane still does. */
void fa_lane_give(fa_lane *lane);

/* Enqueues copies to the device on the stream up, or from there on the stream down. Staged ones go through the
 * slots, by several threads; what is staged down is there on return. */
fa_status fa_lane_copy(fa_lane *lane, const fa_copy *copies, int num_copies, bool download, bool staged,
                       fa_error *error);

#endif
