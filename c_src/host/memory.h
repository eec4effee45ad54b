/* Memory of devices and for them: a heap a device, and pinned memory for all devices of a backend. */
#ifndef FA_HOST_MEMORY_H
#define FA_HOST_MEMORY_H

#include "../core/backend.h"
#include "pool.h"

/* Pinned memory is one cache for callers, under the limit that they set, and one for copies of pageable memory,
 * which every call gives back. */
typedef struct fa_pinned {
  const fa_backend *backend;
  int32_t index; /* the device that was used first */
  fa_pool callers, staging;
} fa_pinned;

typedef struct fa_heap {
  const fa_backend *backend;
  int32_t index;
  fa_pool pool;
  fa_pinned *pinned;
  pthread_mutex_t mutex;
  struct fa_lane *idle_lanes; /* see lane.h; guarded by mutex */
  struct fa_heap *next;
} fa_heap;

/* Guards the list of heaps. It is here for a test that forks while it is held. */
extern pthread_mutex_t fa_heaps_mutex;

/* The device's heap, which lives as long as the process. The backend has memory operations. */
fa_status fa_heap_of(const fa_backend *backend, int32_t index, fa_heap **heap, fa_error *error);

/* Returns what is at hand to the driver and the system. */
void fa_heap_trim(fa_heap *heap);

#endif
