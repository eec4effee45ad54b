#include "lane.h"

#include <sched.h>
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
  if (lane->last) memory->event_free(index, lane->last);
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
  if (!status) status = memory->event_new(index, false, &lane->ready, error);
  if (!status) status = memory->event_new(index, false, &lane->last, error);
  if (!status) status = memory->event_new(index, false, &lane->finished, error);
  for (int i = 0; !status && i < FA_MAX_SLICES; i++) {
    status = memory->event_new(index, false, &lane->slices[i].uploaded, error);
    if (!status) status = memory->event_new(index, true, &lane->slices[i].begun, error);
    if (!status) status = memory->event_new(index, true, &lane->slices[i].done, error);
  }
  for (int i = 0; !status && i < FA_RING_SLOTS; i++)
    status = memory->event_new(index, false, &lane->ring[i].event, error);
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

/* The slots share one block of memory. */
static void give_ring(fa_lane *lane) {
  if (lane->slot_bytes) fa_pool_give(&lane->heap->pinned->staging, lane->ring[0].memory);
  lane->slot_bytes = 0;
}

enum { MOST_SLOT_BYTES = 4 << 20 };

/* Small slots let the bus begin early; large ones keep it busy, as it pauses for some microseconds after each.
 */
static void take_ring(fa_lane *lane, size_t pageable_bytes) {
  const size_t least = (size_t)64 << 10;
  size_t bytes = least;
  lane->pageable_bytes = pageable_bytes;
  lane->staged_bytes = 0;
  while (bytes < MOST_SLOT_BYTES && bytes * 8 < pageable_bytes) bytes *= 2;
  void *memory;
  if (!pageable_bytes || fa_pool_take(&lane->heap->pinned->staging, bytes * FA_RING_SLOTS, &memory, NULL))
    return;
  lane->slot_bytes = bytes;
  for (size_t i = 0; i < FA_RING_SLOTS; i++) {
    lane->ring[i].memory = (char *)memory + bytes * i;
    lane->ring[i].busy = false;
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

/* ---- copies through the ring ----------------------------------------------------------------------- */

/* The threads stay awake from slice to slice, and from a forward to its backward: the bus reads at half the
 * rate what a processor has written that has gone to sleep since. */
enum {
  COPY_THREADS = 12,
  PART_BYTES = 128 << 10, /* of a piece, at least, for a thread */
  EARLY_BYTES = 16 << 20, /* what is copied first, and waited for */
  CACHE_BYTES = 2 << 20,  /* of a processor's own; half of it is what was read */
  AWAKE_MICROSECONDS = 1000
};

/* Copies that several threads work on, piece by piece. */
typedef struct staged_copies {
  fa_lane *lane;
  const fa_copy *copies;
  int num_copies;
  bool download, is_early;
  size_t piece_bytes;
  long num_pieces;
  int num_parts; /* of each piece */
  atomic_bool failed;
  fa_error errors[COPY_THREADS]; /* of each thread */
} staged_copies;

/* How many bytes of a copy a piece has: whole rows, or a part of the only one. */
static size_t piece_bytes(const staged_copies *staged, const fa_copy *copy) {
  const size_t most = staged->piece_bytes;
  if (copy->num_rows == 1) return most;
  return most < copy->row_bytes ? copy->row_bytes : most / copy->row_bytes * copy->row_bytes;
}

static long pieces_of(const staged_copies *staged, const fa_copy *copy) {
  const size_t bytes = piece_bytes(staged, copy);
  return (long)((copy->row_bytes * copy->num_rows + bytes - 1) / bytes);
}

static fa_slot *slot_of(const staged_copies *staged, long piece) {
  return &staged->lane->ring[(staged->lane->first_slot + piece) % FA_RING_SLOTS];
}

/* Whether nothing that is copied next makes room in the caches of the processors that copy it: from there the
 * bus reads at half its rate. */
static bool stays_in_caches(const staged_copies *staged, long piece) {
  const fa_lane *lane = staged->lane;
  const size_t after = (size_t)(staged->num_pieces - 1 - piece) * staged->piece_bytes;
  return lane->slot_bytes == MOST_SLOT_BYTES &&
         (staged->is_early ||
          lane->pageable_bytes - lane->staged_bytes + after < COPY_THREADS * CACHE_BYTES / 2);
}

static void describe_piece(const staged_copies *staged, long piece, fa_slot *slot) {
  const fa_copy *copy = staged->copies;
  const long number = piece;
  for (; piece >= pieces_of(staged, copy); copy++) piece -= pieces_of(staged, copy);
  const size_t most = piece_bytes(staged, copy), begin = (size_t)piece * most;
  const size_t left = copy->row_bytes * copy->num_rows - begin;
  slot->download = staged->download;
  slot->copy = copy;
  slot->begin = begin;
  slot->bytes = left < most ? left : most;
  slot->push_out = !slot->download && stays_in_caches(staged, number);
}

/* The bus's part. */
static fa_status send_piece(fa_lane *lane, long piece, fa_slot *slot, fa_error *error) {
  const fa_memory_ops *memory = lane->heap->backend->memory;
  const fa_copy *copy = slot->copy;
  const size_t width = slot->bytes < copy->row_bytes ? slot->bytes : copy->row_bytes;
  const size_t row = slot->begin / copy->row_bytes, column = slot->begin % copy->row_bytes;
  const fa_rows here = {slot->memory, width};
  const fa_rows there = {copy->device.data + row * copy->device.pitch + column, copy->device.pitch};
  void *stream = slot->download ? lane->down : lane->up;
  fa_status status = memory->copy(lane->heap->index, slot->download ? here : there,
                                  slot->download ? there : here, width, slot->bytes / width, stream, error);
  if (!status) status = memory->record(lane->heap->index, slot->event, stream, error);
  if (status) return status;
  slot->busy = true;
  atomic_store(&slot->sent, piece);
  return FA_STATUS_OK;
}

static fa_status wait_for_bus(fa_lane *lane, fa_slot *slot, fa_error *error) {
  if (!slot->busy) return FA_STATUS_OK;
  slot->busy = false;
  return lane->heap->backend->memory->event_wait(lane->heap->index, slot->event, error);
}

/* Pushes what was written out of the processor's own cache. */
static void push_out(const char *memory, size_t bytes) {
#if defined(__x86_64__)
  for (size_t i = 0; i < bytes; i += 64) __asm__ volatile("cldemote %0" : : "m"(memory[i]));
#else
  (void)memory, (void)bytes;
#endif
}

/* The processor's part: between the slot and rows of pageable memory, from byte begin of the piece on. */
static void copy_part(const fa_slot *slot, size_t begin, size_t end) {
  const fa_copy *copy = slot->copy;
  const char *written = slot->memory + begin;
  const size_t bytes_written = end - begin;
  while (begin < end) {
    const size_t at = slot->begin + begin, column = at % copy->row_bytes;
    const size_t left = copy->row_bytes - column, bytes = left < end - begin ? left : end - begin;
    char *host = copy->host.data + at / copy->row_bytes * copy->host.pitch + column;
    char *here = slot->memory + begin;
    memcpy(slot->download ? host : here, slot->download ? here : host, bytes);
    begin += bytes;
  }
  if (slot->push_out) push_out(written, bytes_written);
}

static bool await(staged_copies *staged, atomic_long *number, long wanted) {
  while (atomic_load(number) != wanted) {
    if (atomic_load(&staged->failed)) return false;
    sched_yield();
  }
  return true;
}

/* Up: the slot is free when the bus is done with the piece before in it. Down: when it is done with this one.
 */
static fa_status open_piece(staged_copies *staged, long piece, fa_slot *slot, fa_error *error) {
  if (!await(staged, &slot->sent, staged->download ? piece : piece - FA_RING_SLOTS)) return FA_STATUS_OK;
  fa_status status = wait_for_bus(staged->lane, slot, error);
  if (status) return status;
  if (!staged->download) describe_piece(staged, piece, slot);
  atomic_store(&slot->parts_left, staged->num_parts);
  atomic_store(&slot->open, piece);
  return FA_STATUS_OK;
}

/* Up: the piece is the bus's. Down: the slot is, for the next piece in it. */
static fa_status close_piece(staged_copies *staged, long piece, fa_slot *slot, fa_error *error) {
  if (!staged->download) return send_piece(staged->lane, piece, slot, error);
  if (piece + FA_RING_SLOTS >= staged->num_pieces) return FA_STATUS_OK;
  describe_piece(staged, piece + FA_RING_SLOTS, slot);
  return send_piece(staged->lane, piece + FA_RING_SLOTS, slot, error);
}

/* Tasks start in order, so that whoever waits for a piece waits for threads that are at work. */
static fa_status copy_one(staged_copies *staged, int64_t task, fa_error *error) {
  const long piece = (long)(task / staged->num_parts);
  const size_t part = (size_t)(task % staged->num_parts), parts = (size_t)staged->num_parts;
  fa_slot *slot = slot_of(staged, piece);
  fa_status status = part == 0 ? open_piece(staged, piece, slot, error) : FA_STATUS_OK;
  if (status || !await(staged, &slot->open, piece)) return status;
  copy_part(slot, slot->bytes * part / parts, slot->bytes * (part + 1) / parts);
  return atomic_fetch_sub(&slot->parts_left, 1) == 1 ? close_piece(staged, piece, slot, error) : FA_STATUS_OK;
}

static void copy_task(void *context, int64_t task, int worker) {
  staged_copies *staged = context;
  if (!atomic_load(&staged->failed) && copy_one(staged, task, &staged->errors[worker]))
    atomic_store(&staged->failed, true);
}

/* As if pieces before the first had been sent; down, the bus begins with the first ones, and threads when the
 * first of them is there, which may take a kernel's time. */
static fa_status prepare_ring(staged_copies *staged, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (long piece = 0; !status && piece < FA_RING_SLOTS; piece++) {
    fa_slot *slot = slot_of(staged, piece);
    atomic_store(&slot->sent, piece - FA_RING_SLOTS);
    atomic_store(&slot->open, piece - FA_RING_SLOTS);
    if (!staged->download || piece >= staged->num_pieces) continue;
    status = wait_for_bus(staged->lane, slot, error);
    describe_piece(staged, piece, slot);
    if (!status) status = send_piece(staged->lane, piece, slot, error);
  }
  if (!status && staged->download && staged->num_pieces > 0)
    status = wait_for_bus(staged->lane, slot_of(staged, 0), error);
  return status;
}

static fa_status copy_staged(staged_copies *staged, fa_error *error) {
  fa_lane *lane = staged->lane;
  for (int i = 0; i < staged->num_copies; i++)
    lane->staged_bytes += staged->copies[i].row_bytes * staged->copies[i].num_rows;
  /* The first slice is waited for: the bus begins with half a slot. */
  staged->is_early = lane->staged_bytes <= EARLY_BYTES && lane->slot_bytes == MOST_SLOT_BYTES;
  staged->piece_bytes = staged->is_early ? lane->slot_bytes / 2 : lane->slot_bytes;
  for (int i = 0; i < staged->num_copies; i++) staged->num_pieces += pieces_of(staged, &staged->copies[i]);
  const size_t num_parts = staged->piece_bytes / PART_BYTES;
  staged->num_parts = num_parts > 1 ? (int)num_parts : 1;
  fa_status status = prepare_ring(staged, error);
  if (status) return status;
  const int processors = fa_num_processors();
  fa_parallel_for(processors < COPY_THREADS ? processors : COPY_THREADS, AWAKE_MICROSECONDS,
                  (int64_t)staged->num_pieces * staged->num_parts, copy_task, staged);
  lane->first_slot = (int)((lane->first_slot + staged->num_pieces) % FA_RING_SLOTS);
  for (int i = 0; i < COPY_THREADS; i++)
    if (staged->errors[i].status) {
      if (error) *error = staged->errors[i];
      return staged->errors[i].status;
    }
  return FA_STATUS_OK;
}

static bool fits_ring(const fa_lane *lane, const fa_copy *copy) {
  return lane->slot_bytes && (copy->num_rows == 1 || copy->row_bytes <= lane->slot_bytes);
}

fa_status fa_lane_copy(fa_lane *lane, const fa_copy *copies, int num_copies, bool download, bool staged,
                       fa_error *error) {
  bool fit = staged;
  for (int i = 0; i < num_copies; i++) fit = fit && fits_ring(lane, &copies[i]);
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
