/* A call that finds no idle lane makes one, which then serves later calls for good. */
#include "lane.h"

#include <stdlib.h>

#include "../core/error.h"

static void free_lane(fa_lane *lane) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const int32_t index = lane->heap->index;
  void *streams[] = {lane->up, lane->compute, lane->down};
  for (int i = 0; i < 3; i++)
    if (streams[i]) memory->stream_free(index, streams[i]);
  if (lane->ready) memory->event_free(index, lane->ready);
  if (lane->last) memory->event_free(index, lane->last);
  if (lane->finished) memory->event_free(index, lane->finished);
  for (int i = 0; i < FA_MAX_SLICES; i++) {
    void *events[] = {lane->slices[i].uploaded, lane->slices[i].begun, lane->slices[i].done};
    for (int j = 0; j < 3; j++)
      if (events[j]) memory->event_free(index, events[j]);
  }
  if (lane->staging) fa_staging_free(lane->staging);
  free(lane);
}

static fa_status fill_lane(fa_lane *lane, fa_error *error) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const int32_t index = lane->heap->index;
  fa_status status = memory->stream_new(index, &lane->up, error);
  if (!status) status = memory->stream_new(index, &lane->compute, error);
  if (!status) status = memory->stream_new(index, &lane->down, error);
  if (!status) status = memory->event_new(index, false, &lane->ready, error);
  if (!status) status = memory->event_new(index, false, &lane->last, error);
  if (!status) status = memory->event_new(index, false, &lane->finished, error);
  for (int i = 0; !status && i < FA_MAX_SLICES; i++) {
    status = memory->event_new(index, false, &lane->slices[i].uploaded, error);
    if (!status) status = memory->event_new(index, true, &lane->slices[i].begun, error);
    if (!status) status = memory->event_new(index, true, &lane->slices[i].done, error);
  }
  return status ? status : fa_staging_new(lane->heap, lane->up, lane->down, &lane->staging, error);
}

static fa_status new_lane(fa_heap *heap, fa_lane **lane, fa_error *error) {
  *lane = calloc(1, sizeof **lane);
  if (!*lane) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a call's streams");
  (*lane)->heap = heap;
  fa_status status = fill_lane(*lane, error);
  if (status) free_lane(*lane);
  return status;
}

fa_status fa_lane_take(fa_heap *heap, size_t pageable_bytes, fa_lane **lane, fa_error *error) {
  pthread_mutex_lock(&heap->mutex);
  *lane = heap->idle_lanes;
  if (*lane) heap->idle_lanes = (*lane)->next;
  pthread_mutex_unlock(&heap->mutex);
  fa_status status = *lane ? FA_STATUS_OK : new_lane(heap, lane, error);
  if (!status) fa_staging_take_ring((*lane)->staging, pageable_bytes);
  return status;
}

void fa_lane_give(fa_lane *lane, bool is_done) {
  fa_heap *heap = lane->heap;
  fa_staging_stop(lane->staging);
  void *streams[] = {lane->up, lane->compute, lane->down};
  for (int i = 0; i < 3 && !is_done; i++) heap->backend->memory->synchronize(heap->index, streams[i], NULL);
  fa_staging_give_ring(lane->staging);
  pthread_mutex_lock(&heap->mutex);
  lane->next = heap->idle_lanes;
  heap->idle_lanes = lane;
  pthread_mutex_unlock(&heap->mutex);
}
