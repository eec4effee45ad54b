#include "lane.h"

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
  for (int i = 0; i < FA_RING_SLOTS; i++)
    if (lane->ring[i].event) memory->event_free(index, lane->ring[i].event);
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
  for (int i = 0; !status && i < FA_RING_SLOTS; i++)
    status = memory->event_new(index, &lane->ring[i].event, error);
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
  for (int i = 0; i < FA_RING_SLOTS; i++) {
    if (lane->ring[i].memory) fa_pool_give(&lane->heap->pinned->staging, lane->ring[i].memory);
    lane->ring[i].memory = NULL;
    lane->ring[i].busy = false;
  }
}

/* Small slots let the bus begin early, large ones cost less to hand over: a part of what is to be copied. */
static void take_ring(fa_lane *lane, size_t pageable_bytes) {
  const size_t least = (size_t)64 << 10, most = (size_t)4 << 20;
  lane->slot_bytes = least;
  while (lane->slot_bytes < most && lane->slot_bytes * 8 < pageable_bytes) lane->slot_bytes *= 2;
  for (int i = 0; pageable_bytes && i < FA_RING_SLOTS; i++) {
    void *memory;
    if (fa_pool_take(&lane->heap->pinned->staging, lane->slot_bytes, &memory, NULL)) {
      give_ring(lane);
      lane->slot_bytes = 0;
      return;
    }
    lane->ring[i].memory = memory;
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

/* ---- the processor's part: between a slot and rows of pageable memory ---------------------------------- */

enum { TASK_BYTES = 256 << 10, COPY_THREADS = 8 };

static void copy_part(const fa_slot *slot, size_t begin, size_t end) {
  while (begin < end) {
    const size_t at = slot->begin + begin, column = at % slot->row_bytes;
    const size_t left = slot->row_bytes - column, bytes = left < end - begin ? left : end - begin;
    char *host = slot->host.data + at / slot->row_bytes * slot->host.pitch + column;
    if (slot->download)
      memcpy(host, slot->memory + begin, bytes);
    else
      memcpy(slot->memory + begin, host, bytes);
    begin += bytes;
  }
}

static void copy_task(void *context, int64_t task, int worker) {
  (void)worker;
  const fa_slot *slot = context;
  const size_t begin = (size_t)task * TASK_BYTES, end = begin + TASK_BYTES;
  copy_part(slot, begin, end < slot->bytes ? end : slot->bytes);
}

static void copy_slot(fa_slot *slot) {
  const int processors = fa_num_processors();
  fa_parallel_for(processors < COPY_THREADS ? processors : COPY_THREADS,
                  (int64_t)((slot->bytes + TASK_BYTES - 1) / TASK_BYTES), copy_task, slot);
}

/* ---- the bus's part ---------------------------------------------------------------------------------- */

static fa_status finish_slot(fa_lane *lane, fa_slot *slot, fa_error *error) {
  if (!slot->busy) return FA_STATUS_OK;
  slot->busy = false;
  fa_status status = lane->heap->backend->memory->event_wait(lane->heap->index, slot->event, error);
  if (!status && slot->download) copy_slot(slot);
  return status;
}

/* One piece: whole rows, or a part of the only one. */
static fa_status copy_piece(fa_lane *lane, fa_rows device, fa_slot piece, fa_error *error) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  fa_slot *slot = &lane->ring[lane->next_slot++ % FA_RING_SLOTS];
  fa_status status = finish_slot(lane, slot, error);
  if (status) return status;
  piece.memory = slot->memory;
  piece.event = slot->event;
  *slot = piece;
  const size_t row = slot->begin / slot->row_bytes;
  const size_t width = slot->bytes < slot->row_bytes ? slot->bytes : slot->row_bytes;
  const fa_rows there = {device.data + row * device.pitch + slot->begin % slot->row_bytes, device.pitch};
  const fa_rows here = {slot->memory, width};
  void *stream = slot->download ? lane->down : lane->up;
  if (!slot->download) copy_slot(slot);
  status = memory->copy(lane->heap->index, slot->download ? here : there, slot->download ? there : here, width,
                        slot->bytes / width, stream, error);
  return status ? status : memory->record(lane->heap->index, slot->event, stream, error);
}

static fa_status copy_through_ring(fa_lane *lane, fa_rows device, fa_rows host, size_t row_bytes,
                                   size_t num_rows, bool download, fa_error *error) {
  const size_t total = row_bytes * num_rows;
  const size_t most = num_rows == 1 ? lane->slot_bytes : lane->slot_bytes / row_bytes * row_bytes;
  fa_slot piece = {.busy = true, .download = download, .host = host, .row_bytes = row_bytes};
  for (; piece.begin < total; piece.begin += piece.bytes) {
    piece.bytes = total - piece.begin < most ? total - piece.begin : most;
    fa_status status = copy_piece(lane, device, piece, error);
    if (status) return status;
  }
  return FA_STATUS_OK;
}

static bool fits_ring(const fa_lane *lane, size_t row_bytes, size_t num_rows) {
  return num_rows == 1 ? lane->slot_bytes > 0 : row_bytes <= lane->slot_bytes;
}

fa_status fa_lane_upload(fa_lane *lane, fa_rows device, fa_rows host, size_t row_bytes, size_t num_rows,
                         bool staged, fa_error *error) {
  if (staged && fits_ring(lane, row_bytes, num_rows))
    return copy_through_ring(lane, device, host, row_bytes, num_rows, false, error);
  return lane->heap->backend->memory->copy(lane->heap->index, device, host, row_bytes, num_rows, lane->up,
                                           error);
}

fa_status fa_lane_download(fa_lane *lane, fa_rows host, fa_rows device, size_t row_bytes, size_t num_rows,
                           bool staged, fa_error *error) {
  if (staged && fits_ring(lane, row_bytes, num_rows))
    return copy_through_ring(lane, device, host, row_bytes, num_rows, true, error);
  return lane->heap->backend->memory->copy(lane->heap->index, host, device, row_bytes, num_rows, lane->down,
                                           error);
}

fa_status fa_lane_flush(fa_lane *lane, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < FA_RING_SLOTS; i++)
    status = finish_slot(lane, &lane->ring[(lane->next_slot + i) % FA_RING_SLOTS], error);
  return status;
}
