/* Each device has a heap of its memory, and the devices of a backend share pinned memory of the host's. */
#ifndef FA_HOST_MEMORY_H
#define FA_HOST_MEMORY_H

#include "../core/backend.h"
#include "pool.h"

/* Pinned memory has two pools: callers take from one, up to the limit that they set, and calls take the rings
 * for copies of pageable memory from the other, and give them back. */
typedef struct fa_pinned {
  const fa_backend *backend;
  int32_t index; /* the device that was used first, for which the memory is allocated */
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

/* Finds or makes the device's heap, which is never freed. The backend must have memory operations. */
fa_status fa_heap_of(const fa_backend *backend, int32_t index, fa_heap **heap, fa_error *error);

/* Where memory lies, seen from the heap's device, which is not asked about what these pools gave. */
fa_place fa_heap_locate(fa_heap *heap, const void *memory, size_t bytes);

/* Returns memory that nobody uses to the driver and the system. */
void fa_heap_trim(fa_heap *heap);

/* A call's workspace on a device whose memory is the host's. Small ones are kept for later calls: the system
 * may take memory back as soon as it is freed, and touching it anew costs a small call more than its kernels.
 */
fa_status fa_workspace_take(fa_device device, size_t bytes, void **workspace, fa_error *error);
void fa_workspace_give(fa_device device, size_t bytes, void *workspace);

/* A device is the calling thread's from one to the other, so that functions called meanwhile find it there;
 * where its memory is the host's, nothing is to be found. */
typedef struct fa_stay {
  const fa_heap *heap;
  fa_scope scope;
} fa_stay;
fa_status fa_stay_begin(fa_device device, fa_stay *stay, fa_error *error);
void fa_stay_end(const fa_stay *stay);

/* Copies as fa_device_copy makes them, waited for once. No bytes are both written and read. */
fa_status fa_copy_bytes(fa_device device, const fa_byte_copy *copies, int64_t count, void *stream,
                        fa_error *error);

/* What caches hold of a device's memory; and adds to that, or takes away. */
int64_t fa_page_bytes(fa_device device);
void fa_count_page_bytes(fa_device device, int64_t bytes);

#endif
