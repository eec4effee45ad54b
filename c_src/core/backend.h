/* The interface of a backend. Only core/backends.c knows which backends there are. */
#ifndef FA_CORE_BACKEND_H
#define FA_CORE_BACKEND_H

#include "../flash_attention.h"

/* Rows of bytes that begin pitch bytes apart. */
typedef struct fa_rows {
  char *data;
  size_t pitch;
} fa_rows;

/* Bytes that go to the device's memory. */
typedef struct fa_byte_copy {
  void *to;
  const void *from;
  size_t bytes;
  fa_place place; /* of from, where it is one of several copies */
} fa_byte_copy;

enum { FA_MOST_COPIES = 64 };

/* What a thread had before it entered a device. The words are the backend's. */
typedef struct fa_scope {
  void *before;
  int32_t outer;
  bool is_inner, restores;
} fa_scope;

/* Memory, streams and events of devices that have memory of their own, for host/memory.c and host/anywhere.c.
 * Streams and events are handles of the backend's. Any thread may call any of these. */
typedef struct fa_memory_ops {
  /* A device is the calling thread's from one to the other: the backend's functions, each of which would enter
   * and leave it, find it there. Scopes nest. */
  fa_status (*enter)(int32_t index, fa_scope *scope, fa_error *error);
  void (*leave)(const fa_scope *scope);

  /* Memory is aligned to 256 bytes or more. Both functions may wait for the device. */
  fa_status (*alloc)(int32_t index, size_t bytes, void **memory, fa_error *error);
  void (*free)(int32_t index, void *memory);
  /* Gives zeros after an error. */
  fa_status (*available)(int32_t index, size_t *free_bytes, size_t *total_bytes, fa_error *error);

  /* Page-locked memory of the host, for every device of the backend. The index names a device in use, so that
   * no other device wakes up. */
  fa_status (*host_alloc)(int32_t index, size_t bytes, void **memory, fa_error *error);
  void (*host_free)(int32_t index, void *memory);

  fa_place (*locate)(int32_t index, const void *memory, size_t bytes);

  fa_status (*stream_new)(int32_t index, void **stream, fa_error *error);
  void (*stream_free)(int32_t index, void *stream);
  /* A timed event costs more on the bus. */
  fa_status (*event_new)(int32_t index, bool timed, void **event, fa_error *error);
  void (*event_free)(int32_t index, void *event);

  /* Enqueues a copy of num_rows rows that begin pitch bytes apart, either way or within the device. */
  fa_status (*copy)(int32_t index, fa_rows to, fa_rows from, size_t row_bytes, size_t num_rows, void *stream,
                    fa_error *error);
  /* Enqueues up to FA_MOST_COPIES copies as one piece of work, in any order, from the device's memory or from
   * what host_alloc gave. NULL where there is no such thing. */
  fa_status (*copy_all)(int32_t index, const fa_byte_copy *copies, int64_t count, void *stream,
                        fa_error *error);
  fa_status (*record)(int32_t index, void *event, void *stream, fa_error *error);
  fa_status (*stream_wait)(int32_t index, void *stream, void *event, fa_error *error);
  fa_status (*event_wait)(int32_t index, void *event, fa_error *error); /* yields the processor */
  fa_status (*elapsed)(int32_t index, void *begin, void *end, double *seconds, fa_error *error);
  fa_status (*synchronize)(int32_t index, void *stream, fa_error *error);
} fa_memory_ops;

/* The functions behind fa_link_new and its like. A link begins with a pointer to them. */
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

  /* The number of devices. Where it is 0, error holds the reason. */
  int32_t (*num_devices)(fa_error *error);
  fa_status (*device_info)(int32_t index, fa_device_info *info, fa_error *error);

  /* The selector. plan holds a valid, canonical problem, the pass and an existing device. The backend fills in
   * kernel, workspace_bytes, num_threads and config, or says why it does not take the problem. Whatever decides
   * on results' bits is chosen as for the whole plan, where there is one: a slice's results are the whole's. */
  fa_status (*plan)(fa_plan *plan, fa_error *error);

  /* Runs the kernel that the selector chose. The caller has checked pointers and the workspace's size. */
  fa_status (*run)(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                   fa_error *error);

  /* Enqueues the inverse of host/pack.h's packing: f32 rows of heads, heads_a_row in each. NULL where kernels
   * do not round f32 to f16 at FA_PRECISION_DEFAULT. */
  fa_status (*unpack)(int32_t index, fa_rows to, fa_rows from, int64_t heads_a_row, int64_t num_rows,
                      int64_t head_dim, void *stream, fa_error *error);

  /* Runs fa_merge_forward or fa_merge_backward, whose checked arguments leave work. NULL where it cannot. */
  fa_status (*merge)(const fa_merge *merge, bool is_backward, int32_t index, const fa_execution *execution,
                     fa_error *error);

  /* Runs fa_sum_parts, whose checked argument has at least one element. NULL where the backend cannot. */
  fa_status (*sum)(const fa_sum *sum, int32_t index, void *stream, fa_error *error);

  /* NULL where the device's memory is the host's. */
  const fa_memory_ops *memory;

  /* NULL where no links connect devices. */
  const fa_link_ops *link;
} fa_backend;

/* Whether FLASH_ATTENTION_DISABLE, say "avx512,avx2,sm90", lists the feature. Tests and benchmarks set it. */
bool fa_is_disabled(const char *feature);

/* The backend of that kind, or NULL where the build leaves it out. */
const fa_backend *fa_backend_of(fa_device_kind kind);

/* The plan whose slice this is, or the plan itself. */
static inline const fa_plan *fa_plan_whole(const fa_plan *plan) { return plan->whole ? plan->whole : plan; }

/* Completes a plan that holds a canonical problem, the pass, the device and the backend. An empty problem needs
 * no workspace, and one that no memory could hold is an error. */
fa_status fa_backend_plan(fa_plan *plan, fa_error *error);

/* Finds the backend of a device, or says why there is no such device. */
fa_status fa_backend_find(fa_device device, const fa_backend **backend, fa_error *error);

/* Whether a backend has the device, which is of its kind. */
fa_status fa_backend_check_device(const fa_backend *backend, fa_device device, fa_error *error);

/* Whether the caller's workspace is one of so many bytes. */
fa_status fa_workspace_check(const fa_execution *execution, size_t bytes, fa_error *error);

#endif
