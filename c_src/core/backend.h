/* What a backend is. core/backends.c is the only file that knows which there are. */
#ifndef FA_CORE_BACKEND_H
#define FA_CORE_BACKEND_H

#include "../flash_attention.h"

/* Rows of bytes that begin pitch bytes apart. */
typedef struct fa_rows {
  char *data;
  size_t pitch;
} fa_rows;

/* Memory, streams and events of devices whose memory is not the host's: what host/memory.c and host/anywhere.c
 * are made of. Streams and events are the backend's own handles. Everything may be called from any thread. */
typedef struct fa_memory_ops {
  /* Aligned to 256 bytes or more; both may wait for the device. */
  fa_status (*alloc)(int32_t index, size_t bytes, void **memory, fa_error *error);
  void (*free)(int32_t index, void *memory);
  /* Zeros after an error. */
  fa_status (*available)(int32_t index, size_t *free_bytes, size_t *total_bytes, fa_error *error);

  /* Page-locked memory of the host, for every device of the backend. The index is that of one in use: no other
   * device may have to wake up for it. */
  fa_status (*host_alloc)(int32_t index, size_t bytes, void **memory, fa_error *error);
  void (*host_free)(int32_t index, void *memory);

  fa_place (*locate)(int32_t index, const void *memory, size_t bytes);

  fa_status (*stream_new)(int32_t index, void **stream, fa_error *error);
  void (*stream_free)(int32_t index, void *stream);
  /* An event that keeps the time costs the bus more. */
  fa_status (*event_new)(int32_t index, bool timed, void **event, fa_error *error);
  void (*event_free)(int32_t index, void *event);

  /* Enqueues a copy of num_rows rows that begin pitch bytes apart, either way or within the device. */
  fa_status (*copy)(int32_t index, fa_rows to, fa_rows from, size_t row_bytes, size_t num_rows, void *stream,
                    fa_error *error);
  fa_status (*record)(int32_t index, void *event, void *stream, fa_error *error);
  fa_status (*stream_wait)(int32_t index, void *stream, void *event, fa_error *error);
  fa_status (*event_wait)(int32_t index, void *event, fa_error *error); /* lets others have the processor */
  fa_status (*elapsed)(int32_t index, void *begin, void *end, double *seconds, fa_error *error);
  fa_status (*synchronize)(int32_t index, void *stream, fa_error *error);
} fa_memory_ops;

/* What fa_link_new and the like do. A link begins with a pointer to these. */
typedef struct fa_link_ops {
  fa_status (*make_id)(unsigned char *id, fa_error *error);
  fa_status (*new_link)(int32_t index, const unsigned char *id, int32_t num_ranks, int32_t rank,
                        int64_t timeout_ms, fa_link **link, fa_error *error);
  fa_status (*begin)(fa_link *link, const fa_transfer *transfers, int32_t num_transfers, fa_exchange **exchange,
                     fa_error *error);
  fa_status (*await)(fa_link *link, fa_exchange *exchange, fa_error *error);
  void (*abort)(fa_link *link);
  void (*free)(fa_link *link);
} fa_link_ops;

struct fa_link {
  const fa_link_ops *ops;
};

typedef struct fa_backend {
  fa_device_kind kind;

  /* How many devices there are; 0 with the reason in error where there are none. */
  int32_t (*num_devices)(fa_error *error);
  fa_status (*device_info)(int32_t index, fa_device_info *info, fa_error *error);

  /* The selector. plan holds a valid, canonical problem, the pass and an existing device; the backend fills
   * in kernel, workspace_bytes, num_threads and config, or says why it does not take the problem. */
  fa_status (*plan)(fa_plan *plan, fa_error *error);

  /* Runs what the selector chose. Pointers and the workspace's size have been checked. */
  fa_status (*run)(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                   fa_error *error);

  /* Enqueues the way back of host/pack.h: f32 rows of heads, heads_a_row of them in each row. NULL where
   * kernels do not round f32 to f16 at FA_PRECISION_DEFAULT. */
  fa_status (*unpack)(int32_t index, fa_rows to, fa_rows from, int64_t heads_a_row, int64_t num_rows,
                      int64_t head_dim, void *stream, fa_error *error);

  /* fa_merge_forward, or fa_merge_backward, of what has been checked and is not empty. NULL where there is
   * none. */
  fa_status (*merge)(const fa_merge *merge, bool is_backward, int32_t index, const fa_execution *execution,
                     fa_error *error);

  /* fa_sum, of at least one element. NULL where there is none. */
  fa_status (*sum)(int32_t index, fa_sum_step step, void *sum, void *part, fa_dtype dtype, int64_t count,
                   void *stream, fa_error *error);

  /* NULL where the device's memory is the host's. */
  const fa_memory_ops *memory;

  /* NULL where no links connect devices. */
  const fa_link_ops *link;
} fa_backend;

/* Whether FLASH_ATTENTION_DISABLE lists a feature: "avx512,avx2,sm90". For tests, and for comparing. */
bool fa_is_disabled(const char *feature);

/* The backend of that kind, or NULL where it was not built. */
const fa_backend *fa_backend_of(fa_device_kind kind);

/* How the backend runs a plan that holds a canonical problem, the pass, the device and the backend. No
 * workspace where there is nothing to compute, and an error where no memory could hold it. */
fa_status fa_backend_plan(fa_plan *plan, fa_error *error);

/* The backend of a device that is there. */
fa_status fa_backend_find(fa_device device, const fa_backend **backend, fa_error *error);

#endif
