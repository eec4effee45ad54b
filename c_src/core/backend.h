/* What a backend is. core/backends.c is the only file that knows which there are. */
#ifndef FA_CORE_BACKEND_H
#define FA_CORE_BACKEND_H

#include "../flash_attention.h"

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

  /* The device's memory: see fa_device_alloc and its neighbours. All NULL where it is the host's. */
  fa_status (*alloc)(int32_t index, size_t bytes, void **memory, fa_error *error);
  fa_status (*free)(int32_t index, void *memory, fa_error *error);
  fa_status (*copy)(int32_t index, void *to, const void *from, size_t bytes, void *stream, fa_error *error);
  fa_status (*synchronize)(int32_t index, void *stream, fa_error *error);
} fa_backend;

/* The backend of that kind, or NULL where it was not built. */
const fa_backend *fa_backend_of(fa_device_kind kind);

#endif
