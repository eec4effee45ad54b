/* The heaps, and the public functions that allocate, free, locate and copy memory. */
#include "memory.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core/error.h"
#include "../core/integers.h"

/* ---- heaps ------------------------------------------------------------------------------------------- */

enum { MAX_BACKENDS = 4 };
static const size_t most_staging_bytes = (size_t)512 << 20;

pthread_mutex_t fa_heaps_mutex = PTHREAD_MUTEX_INITIALIZER;

/* That mutex guards these variables. Heaps, once in the list, are never freed. */
static fa_heap *heaps;
static fa_pinned pinned[MAX_BACKENDS];
static size_t pinned_limit; /* 0: the default */

static fa_status device_alloc(const void *context, size_t bytes, void **memory, fa_error *error) {
  const fa_heap *heap = context;
  return heap->backend->memory->alloc(heap->index, bytes, memory, error);
}

static void device_free(const void *context, void *memory) {
  const fa_heap *heap = context;
  heap->backend->memory->free(heap->index, memory);
}

static fa_status host_alloc(const void *context, size_t bytes, void **memory, fa_error *error) {
  const fa_pinned *from = context;
  return from->backend->memory->host_alloc(from->index, bytes, memory, error);
}

static void host_free(const void *context, void *memory) {
  const fa_pinned *from = context;
  from->backend->memory->host_free(from->index, memory);
}

static size_t default_pinned_limit(void) {
  const size_t most = (size_t)4 << 30;
  const size_t quarter = (size_t)sysconf(_SC_PHYS_PAGES) / 4 * (size_t)sysconf(_SC_PAGESIZE);
  return quarter < most ? quarter : most;
}

static fa_pinned *find_pinned(const fa_backend *backend, int32_t index) {
  fa_pinned *found = pinned;
  while (found->backend && found->backend != backend) found++;
  if (!found->backend) {
    const fa_source source = {host_alloc, host_free, found};
    fa_pool_init(&found->callers, source, pinned_limit ? pinned_limit : default_pinned_limit(), SIZE_MAX);
    fa_pool_init(&found->staging, source, most_staging_bytes, SIZE_MAX);
    found->backend = backend, found->index = index;
  }
  return found;
}

static fa_heap *known_heap(const fa_backend *backend, int32_t index) {
  fa_heap *heap = heaps;
  while (heap && (heap->backend != backend || heap->index != index)) heap = heap->next;
  return heap;
}

static fa_heap *new_heap(const fa_backend *backend, int32_t index, size_t total_bytes) {
  fa_heap *heap = calloc(1, sizeof *heap);
  if (!heap) return NULL;
  *heap = (fa_heap){.backend = backend, .index = index, .pinned = find_pinned(backend, index), .next = heaps};
  pthread_mutex_init(&heap->mutex, NULL);
  const char *cache = getenv("FLASH_ATTENTION_CACHE");
  const size_t idle_limit = cache && strcmp(cache, "0") == 0 ? 0 : total_bytes / 8;
  fa_pool_init(&heap->pool, (fa_source){device_alloc, device_free, heap}, SIZE_MAX, idle_limit);
  return heaps = heap;
}

/* The heap of a device that was used before, or NULL. */
static fa_heap *used_heap(const fa_backend *backend, int32_t index) {
  pthread_mutex_lock(&fa_heaps_mutex);
  fa_heap *heap = known_heap(backend, index);
  pthread_mutex_unlock(&fa_heaps_mutex);
  return heap;
}

fa_status fa_heap_of(const fa_backend *backend, int32_t index, fa_heap **heap, fa_error *error) {
  *heap = used_heap(backend, index);
  if (*heap) return FA_STATUS_OK;
  size_t free_bytes, total_bytes; /* asked for without the mutex, as the device may have to wake up first */
  fa_status status = backend->memory->available(index, &free_bytes, &total_bytes, error);
  if (status) return status;
  pthread_mutex_lock(&fa_heaps_mutex);
  *heap = known_heap(backend, index);
  if (!*heap) *heap = new_heap(backend, index, total_bytes);
  pthread_mutex_unlock(&fa_heaps_mutex);
  return *heap ? FA_STATUS_OK : fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a heap");
}

/* After a fork the child has neither the memory that its parent took from devices nor the threads that held
 * locks. */
static void forget_heaps(void) {
  pthread_mutex_init(&fa_heaps_mutex, NULL);
  heaps = NULL;
  memset(pinned, 0, sizeof pinned);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_heaps); }

/* ---- the public functions ---------------------------------------------------------------------------- */

/* *heap is NULL where the device's memory is the host's. Only a device without a heap makes this ask its
 * driver, so that giving memory back waits for no driver. */
static fa_status find_heap(fa_device device, fa_heap **heap, fa_error *error) {
  const fa_backend *backend = fa_backend_of(device.kind);
  *heap = used_heap(backend, device.index);
  if (*heap) return FA_STATUS_OK;
  fa_status status = fa_backend_find(device, &backend, error);
  return status || !backend->memory ? status : fa_heap_of(backend, device.index, heap, error);
}

#define FIND_HEAP(heap)                                 \
  fa_heap *heap;                                        \
  do {                                                  \
    fa_status status = find_heap(device, &heap, error); \
    if (status) return status;                          \
  } while (0)

fa_status fa_device_alloc(fa_device device, size_t bytes, void **memory, fa_error *error) {
  *memory = NULL;
  if (bytes == 0) return fa_succeed(error);
  FIND_HEAP(heap);
  if (heap) return fa_pool_take(&heap->pool, bytes, memory, error);
  if (posix_memalign(memory, 64, bytes))
    return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "device", FA_TEXT("no memory for %zu bytes", bytes));
  return fa_succeed(error);
}

static fa_status give(fa_pool *pool, void *memory, fa_error *error) {
  if (!memory || fa_pool_give(pool, memory)) return fa_succeed(error);
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "memory", "what was allocated and not yet freed",
                 FA_TEXT("%p", memory));
}

fa_status fa_device_free(fa_device device, void *memory, fa_error *error) {
  FIND_HEAP(heap);
  if (heap) return give(&heap->pool, memory, error);
  free(memory);
  return fa_succeed(error);
}

static fa_status no_pinned_memory(fa_error *error) {
  return fa_fail_message(error, FA_STATUS_UNSUPPORTED, "device", "its memory is the host's");
}

fa_status fa_host_alloc(fa_device device, size_t bytes, void **memory, fa_error *error) {
  *memory = NULL;
  FIND_HEAP(heap);
  if (!heap) return no_pinned_memory(error);
  return bytes ? fa_pool_take(&heap->pinned->callers, bytes, memory, error) : fa_succeed(error);
}

fa_status fa_host_free(fa_device device, void *memory, fa_error *error) {
  FIND_HEAP(heap);
  return heap ? give(&heap->pinned->callers, memory, error) : no_pinned_memory(error);
}

void fa_set_pinned_limit(size_t bytes) {
  const size_t limit = bytes ? bytes : 1; /* 0 stands for the default */
  pthread_mutex_lock(&fa_heaps_mutex);
  pinned_limit = limit;
  fa_pinned *end = pinned;
  while (end < pinned + MAX_BACKENDS && end->backend) end++;
  pthread_mutex_unlock(&fa_heaps_mutex);
  for (fa_pinned *each = pinned; each < end; each++) fa_pool_set_limit(&each->callers, limit);
}

enum { NUM_KEPT = 16, KEPT_BYTES = 512 << 10 }; /* workspaces that nobody uses, and the size of each */
static _Atomic(void *) kept[NUM_KEPT];

fa_status fa_workspace_take(fa_device device, size_t bytes, void **workspace, fa_error *error) {
  *workspace = NULL;
  if (bytes == 0 || bytes > KEPT_BYTES) return fa_device_alloc(device, bytes, workspace, error);
  for (int i = 0; i < NUM_KEPT && !*workspace; i++) *workspace = atomic_exchange(&kept[i], NULL);
  return *workspace ? FA_STATUS_OK : fa_device_alloc(device, KEPT_BYTES, workspace, error);
}

void fa_workspace_give(fa_device device, size_t bytes, void *workspace) {
  for (int i = 0; i < NUM_KEPT && bytes <= KEPT_BYTES && workspace; i++) {
    void *none = NULL;
    if (atomic_compare_exchange_strong(&kept[i], &none, workspace)) workspace = NULL;
  }
  fa_device_free(device, workspace, NULL);
}

static void trim_workspaces(void) {
  for (int i = 0; i < NUM_KEPT; i++) free(atomic_exchange(&kept[i], NULL));
}

/* Of each kind of device, and each of that kind; those beyond the last are counted with it. */
static _Atomic int64_t page_bytes[FA_NUM_DEVICE_KINDS][FA_MAX_DEVICES];

static _Atomic int64_t *page_bytes_of(fa_device device) {
  const bool is_known = (unsigned)device.kind < FA_NUM_DEVICE_KINDS && device.index >= 0;
  return is_known ? &page_bytes[device.kind][fa_min(device.index, FA_MAX_DEVICES - 1)] : NULL;
}

int64_t fa_page_bytes(fa_device device) {
  return page_bytes_of(device) ? atomic_load(page_bytes_of(device)) : 0;
}

void fa_count_page_bytes(fa_device device, int64_t bytes) { atomic_fetch_add(page_bytes_of(device), bytes); }

/* A look at a device's memory must not wake the device up, as that takes some of its memory. */
static fa_status find_used_heap(fa_device device, fa_heap **heap, fa_error *error) {
  const fa_backend *backend = fa_backend_of(device.kind);
  *heap = used_heap(backend, device.index);
  return *heap ? fa_succeed(error) : fa_backend_find(device, &backend, error);
}

fa_status fa_memory_get_info(fa_device device, fa_memory_info *info, fa_error *error) {
  fa_heap *heap;
  memset(info, 0, sizeof *info);
  info->page_bytes = fa_page_bytes(device);
  fa_status status = find_used_heap(device, &heap, error);
  if (status || !heap) return status;
  size_t used, idle, limit, free_bytes, total_bytes, staging_used, staging_idle, unused;
  heap->backend->memory->available(heap->index, &free_bytes, &total_bytes,
                                   NULL); /* sets them to 0 where it fails */
  fa_pool_sizes(&heap->pool, &used, &idle, &unused);
  info->used_bytes = (int64_t)used;
  info->cached_bytes = (int64_t)idle;
  info->free_bytes = (int64_t)free_bytes;
  fa_pool_sizes(&heap->pinned->callers, &used, &idle, &limit);
  fa_pool_sizes(&heap->pinned->staging, &staging_used, &staging_idle, &unused);
  info->pinned_used_bytes = (int64_t)(used + staging_used);
  info->pinned_cached_bytes = (int64_t)(idle + staging_idle);
  info->pinned_limit_bytes = (int64_t)limit;
  return FA_STATUS_OK;
}

void fa_heap_trim(fa_heap *heap) {
  fa_pool_trim(&heap->pool, 0);
  fa_pool_trim(&heap->pinned->callers, 0);
  fa_pool_trim(&heap->pinned->staging, 0);
}

fa_status fa_memory_trim(fa_device device, fa_error *error) {
  fa_heap *heap;
  fa_status status = find_used_heap(device, &heap, error);
  if (!status && heap) fa_heap_trim(heap);
  if (!status && !fa_has_own_memory(device.kind)) trim_workspaces();
  return status;
}

fa_place fa_heap_locate(fa_heap *heap, const void *memory, size_t bytes) {
  if (fa_pool_holds(&heap->pool, memory, bytes)) return FA_PLACE_DEVICE;
  if (fa_pool_holds(&heap->pinned->callers, memory, bytes)) return FA_PLACE_PINNED;
  return heap->backend->memory->locate(heap->index, memory, bytes);
}

fa_place fa_memory_locate(fa_device device, const void *memory, size_t bytes) {
  fa_heap *heap;
  if (find_heap(device, &heap, NULL) || !heap) return FA_PLACE_HOST;
  return fa_heap_locate(heap, memory, bytes);
}

static fa_status copy_one_by_one(const fa_heap *heap, const fa_byte_copy *copies, int64_t count, void *stream,
                                 fa_error *error) {
  const fa_memory_ops *memory = heap->backend->memory;
  fa_status status = FA_STATUS_OK;
  for (int64_t i = 0; !status && i < count; i++)
    if (copies[i].bytes)
      status =
          memory->copy(heap->index, (fa_rows){copies[i].to, copies[i].bytes},
                       (fa_rows){(char *)copies[i].from, copies[i].bytes}, copies[i].bytes, 1, stream, error);
  return status ? status : memory->synchronize(heap->index, stream, error);
}

/* More bytes are as fast one by one: a driver's call for each of them counts no more. */
static const size_t most_together_bytes = (size_t)256 << 10;

/* Of a copy's bytes in pinned memory. Each begins at a multiple of 16 bytes. */
static size_t room_of(const fa_byte_copy *copy) {
  return copy->place == FA_PLACE_DEVICE ? 0 : (size_t)fa_round_up((int64_t)copy->bytes, 16);
}

/* Whether copies had better be made together, and with how much pinned memory. */
static bool go_together(const fa_heap *heap, const fa_byte_copy *copies, int64_t count, size_t *pinned_bytes) {
  *pinned_bytes = 1;
  if (count < 2 || !heap->backend->memory->copy_all) return false;
  for (int64_t i = 0; i < count && *pinned_bytes <= most_together_bytes; i++) {
    if (copies[i].place == FA_PLACE_OTHER_DEVICE) return false;
    *pinned_bytes += room_of(&copies[i]);
  }
  return *pinned_bytes <= most_together_bytes;
}

/* The driver takes some microseconds for each copy, and for all of them once: what comes from the host's memory
 * goes to pinned memory first, which the device reads by itself. */
static fa_status copy_together(const fa_heap *heap, char *pinned, const fa_byte_copy *copies, int64_t count,
                               void *stream, fa_error *error) {
  const fa_memory_ops *memory = heap->backend->memory;
  fa_status status = FA_STATUS_OK;
  fa_byte_copy some[FA_MOST_COPIES];
  for (int64_t done = 0, next; !status && done < count; done = next) {
    for (next = done; next < count && next - done < FA_MOST_COPIES; next++) {
      fa_byte_copy *copy = &some[next - done];
      *copy = copies[next];
      if (copy->place == FA_PLACE_DEVICE) continue;
      copy->from = memcpy(pinned, copy->from, copy->bytes);
      pinned += room_of(copy);
    }
    status = memory->copy_all(heap->index, some, next - done, stream, error);
  }
  const fa_status waited = memory->synchronize(heap->index, stream, status ? NULL : error);
  return status ? status : waited;
}

static fa_status copy_in_scope(const fa_heap *heap, const fa_byte_copy *copies, int64_t count, void *stream,
                               fa_error *error) {
  size_t bytes;
  void *pinned = NULL;
  if (!go_together(heap, copies, count, &bytes) || fa_pool_take(&heap->pinned->staging, bytes, &pinned, NULL))
    return copy_one_by_one(heap, copies, count, stream, error);
  const fa_status status = copy_together(heap, pinned, copies, count, stream, error);
  fa_pool_give(&heap->pinned->staging, pinned);
  return status;
}

fa_status fa_stay_begin(fa_device device, fa_stay *stay, fa_error *error) {
  FIND_HEAP(heap);
  stay->heap = heap;
  return heap ? heap->backend->memory->enter(heap->index, &stay->scope, error) : FA_STATUS_OK;
}

void fa_stay_end(const fa_stay *stay) {
  if (stay->heap) stay->heap->backend->memory->leave(&stay->scope);
}

fa_status fa_copy_bytes(fa_device device, const fa_byte_copy *copies, int64_t count, void *stream,
                        fa_error *error) {
  fa_stay stay;
  fa_status status = fa_stay_begin(device, &stay, error);
  if (status) return status;
  for (int64_t i = 0; !stay.heap && i < count; i++)
    if (copies[i].bytes) memmove(copies[i].to, copies[i].from, copies[i].bytes);
  if (stay.heap) status = copy_in_scope(stay.heap, copies, count, stream, error);
  fa_stay_end(&stay);
  return status ? status : fa_succeed(error);
}

fa_status fa_device_copy(fa_device device, void *to, const void *from, size_t bytes, void *stream,
                         fa_error *error) {
  return bytes ? fa_copy_bytes(device, &(fa_byte_copy){to, from, bytes, FA_PLACE_HOST}, 1, stream, error)
               : fa_succeed(error);
}

fa_status fa_device_synchronize(fa_device device, void *stream, fa_error *error) {
  FIND_HEAP(heap);
  fa_status status = heap ? heap->backend->memory->synchronize(device.index, stream, error) : FA_STATUS_OK;
  return status ? status : fa_succeed(error);
}
