#include "lane.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "threads.h"

/* ---- lanes ------------------------------------------------------------------------------------------- */

static void free_lane(fa_lane *lane) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const int32_t index = lane->heap->index;
  void *streams[] = {lane->up, lane->compute, lane->down};
  for (int i = 0; i < 3; i++)
    if (streams[i]) memory->stream_free(index, streams[i]);
  if (lane->ready) memory->event_free(index, lane->ready);
  if (lane->finished) memory->event_free(index, lane->finished);
  for (int i = 0; i < FA_MAX_SLICES; i++) {
    void *events[] = {lane->slices[i].uploaded, lane->slices[i].begun, lane->slices[i].done};
    for (int j = 0; j < 3; j++)
      if (events[j]) memory->event_free(index, events[j]);
  }
  for (int i = 0; i < FA_COPY_THREADS; i++)
    for (int j = 0; j < FA_SLOTS_A_THREAD; j++)
      if (lane->slots[i][j].event) memory->event_free(index, lane->slots[i][j].event);
  free(lane);
}

static fa_status fill_lane(fa_lane *lane, fa_error *error) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const int32_t index = lane->heap->index;
  fa_status status = memory->stream_new(index, &lane->up, error);
  if (!status) status = memory->stream_new(index, &lane->compute, error);
  if (!status) status = memory->stream_new(index, &lane->down, error);
  if (!status) status = memory->event_new(index, &lane->ready, error);
  if (!status) status = memory->event_new(index, &lane->finished, error);
  for (int i = 0; !status && i < FA_MAX_SLICES; i++) {
    status = memory->event_new(index, &lane->slices[i].uploaded, error);
    if (!status) status = memory->event_new(index, &lane->slices[i].begun, error);
    if (!status) status = memory->event_new(index, &lane->slices[i].done, error);
  }
  for (int i = 0; !status && i < FA_COPY_THREADS * FA_SLOTS_A_THREAD; i++)
    status = memory->event_new(index, &lane->slots[i / FA_SLOTS_A_THREAD][i % FA_SLOTS_A_THREAD].event, error);
  return status;
}

static fa_status new_lane(fa_heap *heap, fa_lane **lane, fa_error *error) {
  *lane = calloc(1, sizeof **lane);
  if (!*lane) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a call's streams");
  (*lane)->heap = heap;
  fa_status status = fill_lane(*lane, error);
  if (status) free_lane(*lane);
  return status;
}

static void give_ring(fa_lane *lane) {
  if (lane->ring) fa_pool_give(&lane->heap->pinned->staging, lane->ring);
  lane->ring = NULL;
  lane->slot_bytes = 0;
}

/* Small slots let the bus begin early, large ones cost less to hand over: a part of what is to be copied. */
static void take_ring(fa_lane *lane, size_t pageable_bytes) {
  const size_t least = (size_t)64 << 10, most = (size_t)1 << 20;
  const int num_slots = FA_COPY_THREADS * FA_SLOTS_A_THREAD;
  void *memory;
  size_t bytes = least;
  while (bytes < most && bytes * FA_COPY_THREADS * 2 < pageable_bytes) bytes *= 2;
  if (!pageable_bytes ||
      fa_pool_take(&lane->heap->pinned->staging, bytes * (size_t)num_slots, &memory, NULL) != FA_STATUS_OK)
    return;
  lane->ring = memory;
  lane->slot_bytes = bytes;
  for (int i = 0; i < num_slots; i++) {
    fa_slot *slot = &lane->slots[i / FA_SLOTS_A_THREAD][i % FA_SLOTS_A_THREAD];
    slot->memory = lane->ring + bytes * (size_t)i;
    slot->busy = false;
  }
}

fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error) {
  pthread_mutex_lock(&heap->mutex);
  *lane = heap->idle_lanes;
  if (*lane) heap->idle_lanes = (*lane)->next;
  pthread_mutex_unlock(&heap->mutex);
  fa_status status = *lane ? FA_STATUS_OK : new_lane(heap, lane, error);
  if (!status) take_ring(*lane, pageable_bytes);
  return status;
}

void fa_lane_give(fa_lane *lane) {
  fa_heap *heap = lane->heap;
  void *streams[] = {lane->up, lane->compute, lane->down};
  for (int i = 0; i < 3; i++) heap->backend->memory->synchronize(heap->index, streams[i], NULL);
  give_ring(lane);
  pthread_mutex_lock(&heap->mutex);
  lane->next = heap->idle_lanes;
  heap->idle_lanes = lane;
  pthread_mutex_unlock(&heap->mutex);
}

/* ---- copies through the slots ------------------------------------------------------------------------ */

/* The processor's part: between the slot and rows of pageable memory. */
static void copy_slot(const fa_slot *slot) {
  const fa_copy *copy = slot->copy;
  for (size_t done = 0; done < slot->bytes;) {
    const size_t at = slot->begin + done, column = at % copy->row_bytes;
    const size_t left = copy->row_bytes - column, bytes = left < slot->bytes - done ? left : slot->bytes - done;
    char *host = copy->host.data + at / copy->row_bytes * copy->host.pitch + column;
    char *here = slot->memory + done;
    memcpy(slot->download ? host : here, slot->download ? here : host, bytes);
    done += bytes;
  }
}

/* The bus's part: whole rows, or a part of the only one. */
static fa_status send_slot(fa_lane *lane, fa_slot *slot, fa_error *error) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const fa_copy *copy = slot->copy;
  const size_t width = slot->bytes < copy->row_bytes ? slot->bytes : copy->row_bytes;
  const fa_rows here = {slot->memory, width};
  const fa_rows there = {
      copy->device.data + slot->begin / copy->row_bytes * copy->device.pitch + slot->begin % copy->row_bytes,
      copy->device.pitch};
  void *stream = slot->download ? lane->down : lane->up;
  fa_status status = memory->copy(lane->heap->index, slot->download ? here : there,
                                  slot->download ? there : here, width, slot->bytes / width, stream, error);
  if (!status) status = memory->record(lane->heap->index, slot->event, stream, error);
  slot->busy = status == FA_STATUS_OK;
  return status;
}

/* Waits until the slot may be used again, and takes out of it what came down. */
static fa_status finish_slot(fa_lane *lane, fa_slot *slot, fa_error *error) {
  if (!slot->busy) return FA_STATUS_OK;
  slot->busy = false;
  fa_status status = lane->heap->backend->memory->event_wait(lane->heap->index, slot->event, error);
  if (!status && slot->download) copy_slot(slot);
  return status;
}

/* Copies that several threads take parts of. */
typedef struct staged_copies {
  fa_lane *lane;
  const fa_copy *copies;
  int num_copies;
  bool download;
  atomic_bool failed;
  fa_error errors[FA_COPY_THREADS]; /* of each thread; all but one may be fine */
} staged_copies;

/* How many bytes of a copy a slot takes. */
static size_t part_bytes(const fa_lane *lane, const fa_copy *copy) {
  return copy->num_rows == 1 ? lane->slot_bytes : lane->slot_bytes / copy->row_bytes * copy->row_bytes;
}

static int64_t num_parts(const fa_lane *lane, const fa_copy *copy) {
  const size_t bytes = part_bytes(lane, copy);
  return (int64_t)((copy->row_bytes * copy->num_rows + bytes - 1) / bytes);
}

static fa_status copy_part(staged_copies *staged, int64_t part, int worker, fa_error *error) {
  fa_lane *lane = staged->lane;
  const fa_copy *copy = staged->copies;
  for (; part >= num_parts(lane, copy); copy++) part -= num_parts(lane, copy);
  fa_slot *slot = &lane->slots[worker][lane->next_slot[worker]++ % FA_SLOTS_A_THREAD];
  fa_status status = finish_slot(lane, slot, error);
  if (status) return status;
  const size_t most = part_bytes(lane, copy), left = copy->row_bytes * copy->num_rows - (size_t)part * most;
  slot->download = staged->download;
  slot->copy = copy;
  slot->begin = (size_t)part * most;
  slot->bytes = left < most ? left : most;
  if (!slot->download) copy_slot(slot);
  return send_slot(lane, slot, error);
}

static void copy_task(void *context, int64_t part, int worker) {
  staged_copies *staged = context;
  if (atomic_load(&staged->failed)) return;
  if (copy_part(staged, part, worker, &staged->errors[worker])) atomic_store(&staged->failed, true);
}

static fa_status finish_slots(fa_lane *lane, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < FA_COPY_THREADS * FA_SLOTS_A_THREAD; i++)
    status = finish_slot(lane, &lane->slots[i / FA_SLOTS_A_THREAD][i % FA_SLOTS_A_THREAD], error);
  return status;
}

static fa_status copy_staged(staged_copies *staged, fa_error *error) {
  int64_t parts = 0;
  for (int i = 0; i < staged->num_copies; i++) parts += num_parts(staged->lane, &staged->copies[i]);
  const int processors = fa_num_processors();
  fa_parallel_for(processors < FA_COPY_THREADS ? processors : FA_COPY_THREADS, parts, copy_task, staged);
  for (int i = 0; i < FA_COPY_THREADS; i++)
    if (staged->errors[i].status) {
      if (error) *error = staged->errors[i];
      return staged->errors[i].status;
    }
  /* What is on its way up may stay there: who wants its slot waits. What comes down has to be taken out. */
  return staged->download ? finish_slots(staged->lane, error) : FA_STATUS_OK;
}

static bool fits_slots(const fa_lane *lane, const fa_copy *copy) {
  return lane->slot_bytes && (copy->num_rows == 1 || copy->row_bytes <= lane->slot_bytes);
}

fa_status fa_lane_copy(fa_lane *lane, const fa_copy *copies, int num_copies, bool download, bool staged,
                       fa_error *error) {
  bool fit = staged;
  for (int i = 0; i < num_copies; i++) fit = fit && fits_slots(lane, &copies[i]);
  if (fit) {
    staged_copies job = {.lane = lane, .copies = copies, .num_copies = num_copies, .download = download};
    return copy_staged(&job, error);
  }
  const fa_memory_ops *memory = lane->heap->backend->memory;
  fa_status status = FA_STATUS_OK;
  for (const fa_copy *copy = copies; !status && copy < copies + num_copies; copy++)
    status = memory->copy(lane->heap->index, download ? copy->host : copy->device,
                          download ? copy->device : copy->host, copy->row_bytes, copy->num_rows,
                          download ? lane->down : lane->up, error);
  return status;
}
