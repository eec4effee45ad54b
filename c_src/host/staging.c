/* The ring: which bytes are in which slot, which threads copy them, and when the bus takes them. */
#include "staging.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../core/arena.h"
#include "../core/error.h"
#include "../core/integers.h"
#include "../core/processors.h"
#include "../core/threads.h"
#include "pack.h"

/* The policy. bench/results/host_log.md has the values that were tried, and what they took. */
enum {
  /* Fewer threads do not fill the bus, and more slow each other down where nothing is in the caches. */
  COPY_THREADS = 12,
  /* Packed numbers cross the bus in half the time, so threads that pack must read faster to keep up. */
  PACK_THREADS = 16,
  /* The bus is kept busy while other slots are filled, and twice as many bytes in the ring are no faster. */
  RING_SLOTS = 6,
  /* The bus pauses for some microseconds after each piece, so that small pieces cost bandwidth; but it begins
   * when the first piece is full, so that a small call wants small ones. */
  LEAST_SLOT_BYTES = 64 << 10,
  MOST_SLOT_BYTES = 4 << 20,
  MOST_COPIES = FA_MAX_SLICES * FA_NUM_TENSORS,
  /* A thread's share of a piece has at least so many bytes: twice as many leave some of twelve threads idle. */
  SHARE_BYTES = 128 << 10,
  /* The device has nothing to do until the first bytes of a call are there, so that these come in haste. */
  EARLY_BYTES = 16 << 20,
  /* This is the size of a processor's second-level cache, half of which holds what it read. */
  CACHE_BYTES = 2 << 20,
  /* The calling thread copies so much before others are awake. */
  AT_ONCE_BYTES = 384 << 10,
  /* Threads stay awake from a forward to its backward: the bus reads at half the rate what a processor has
   * written that has gone to sleep since. */
  AWAKE_MICROSECONDS = 1000
};

/* A copy that is cut into pieces. */
typedef struct staged_copy {
  fa_copy copy;
  bool is_early;
  size_t piece_bytes; /* every piece but the last has so many */
  long first_piece;
} staged_copy;

/* A slot holds a piece of a copy: so many bytes from begin on. Several threads fill or empty it, each its
 * share. Pieces are numbered, and each takes the slot of the one RING_SLOTS before it. */
typedef struct ring_slot {
  char *memory;
  void *event; /* tells that the bus is done with the slot */
  bool busy, pushes_out;
  const fa_copy *copy;
  size_t begin, bytes;
  atomic_long last_sent, last_opened; /* the pieces that the bus was given last, and the threads */
  atomic_int shares_left;
} ring_slot;

/* The ring, and the copies that go through it now. */
struct fa_staging {
  fa_heap *heap;
  void *up, *down;
  ring_slot ring[RING_SLOTS];
  size_t slot_bytes; /* 0: there is no ring */
  int first_slot;    /* where the next copies begin: it has been on the bus for longest */
  bool download, is_running;
  staged_copy copies[MOST_COPIES];
  int num_copies;
  long num_pieces;
  int num_shares; /* in each piece */
  fa_parallel parallel;
  atomic_long pieces_left[FA_MAX_SLICES];
  void *sent[FA_MAX_SLICES]; /* events that tell that all of a slice's pieces are there */
  atomic_bool failed, is_sent[FA_MAX_SLICES];
  fa_error errors[PACK_THREADS]; /* one a thread */
};

/* ---- the ring ---------------------------------------------------------------------------------------- */

fa_status fa_staging_new(fa_heap *heap, void *up, void *down, fa_staging **staging, fa_error *error) {
  const fa_memory_ops *memory = heap->backend->memory;
  fa_staging *new = *staging = calloc(1, sizeof **staging);
  if (!new) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a call's copies");
  new->heap = heap, new->up = up, new->down = down;
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < RING_SLOTS; i++)
    status = memory->event_new(heap->index, false, &new->ring[i].event, error);
  for (int i = 0; !status && i < FA_MAX_SLICES; i++)
    status = memory->event_new(heap->index, false, &new->sent[i], error);
  return status;
}

static void free_event(const fa_heap *heap, void *event) {
  if (event) heap->backend->memory->event_free(heap->index, event);
}

void fa_staging_free(fa_staging *staging) {
  for (int i = 0; i < RING_SLOTS; i++) free_event(staging->heap, staging->ring[i].event);
  for (int i = 0; i < FA_MAX_SLICES; i++) free_event(staging->heap, staging->sent[i]);
  free(staging);
}

/* Small slots let the bus begin early; large ones keep it busy, as it pauses after each. All of them lie in one
 * block of memory. */
void fa_staging_take_ring(fa_staging *staging, size_t num_bytes) {
  size_t bytes = LEAST_SLOT_BYTES;
  while (bytes < MOST_SLOT_BYTES && bytes * 8 < num_bytes) bytes *= 2;
  void *memory;
  if (!num_bytes || fa_pool_take(&staging->heap->pinned->staging, bytes * RING_SLOTS, &memory, NULL)) return;
  staging->slot_bytes = bytes;
  for (size_t i = 0; i < RING_SLOTS; i++) {
    staging->ring[i].memory = (char *)memory + bytes * i;
    staging->ring[i].busy = false;
  }
}

void fa_staging_give_ring(fa_staging *staging) {
  if (staging->slot_bytes) fa_pool_give(&staging->heap->pinned->staging, staging->ring[0].memory);
  staging->slot_bytes = 0;
}

bool fa_staging_fits(const fa_staging *staging, const fa_copy *copy) {
  return staging->slot_bytes && (copy->num_rows == 1 || copy->row_bytes <= staging->slot_bytes);
}

/* ---- copies ------------------------------------------------------------------------------------------ */

/* A packed row is never divided between threads or pieces, and any other byte may be. */
static size_t grain_of(const fa_copy *copy) { return copy->packed_dim ? fa_packed_bytes(copy->packed_dim) : 1; }

static size_t bytes_of(const fa_copy *copy) { return copy->row_bytes * copy->num_rows; }

static ring_slot *slot_of(fa_staging *staging, long piece) {
  return &staging->ring[(staging->first_slot + piece) % RING_SLOTS];
}

/* Whether the piece is still in the processors' caches when the bus reads it, which halves the bus's rate: too
 * little is copied after it to displace it, or the bus reads it at once. */
static bool stays_in_caches(const fa_staging *staging, const staged_copy *copy, long piece) {
  const size_t after = (size_t)(staging->num_pieces - 1 - piece) * staging->slot_bytes;
  return staging->slot_bytes == MOST_SLOT_BYTES && (copy->is_early || after < COPY_THREADS * CACHE_BYTES / 2);
}

static void describe_piece(fa_staging *staging, long piece, ring_slot *slot) {
  const staged_copy *copy = staging->copies;
  while (copy + 1 < staging->copies + staging->num_copies && copy[1].first_piece <= piece) copy++;
  const size_t begin = (size_t)(piece - copy->first_piece) * copy->piece_bytes;
  const size_t left = bytes_of(&copy->copy) - begin;
  slot->copy = &copy->copy;
  slot->begin = begin;
  slot->bytes = left < copy->piece_bytes ? left : copy->piece_bytes;
  slot->pushes_out = !staging->download && stays_in_caches(staging, copy, piece);
}

/* Enqueues the piece between its slot and the device. */
static fa_status send_piece(fa_staging *staging, long piece, ring_slot *slot, fa_error *error) {
  const fa_memory_ops *memory = staging->heap->backend->memory;
  const int32_t index = staging->heap->index;
  const fa_copy *copy = slot->copy;
  const size_t width = slot->bytes < copy->row_bytes ? slot->bytes : copy->row_bytes;
  const size_t row = slot->begin / copy->row_bytes, column = slot->begin % copy->row_bytes;
  const fa_rows here = {slot->memory, width};
  const fa_rows there = {copy->device.data + row * copy->device.pitch + column, copy->device.pitch};
  void *stream = staging->download ? staging->down : staging->up;
  fa_status status = memory->copy(index, staging->download ? here : there, staging->download ? there : here,
                                  width, slot->bytes / width, stream, error);
  if (!status) status = memory->record(index, slot->event, stream, error);
  if (status) return status;
  slot->busy = true;
  atomic_store(&slot->last_sent, piece);
  return FA_STATUS_OK;
}

static fa_status wait_for_bus(const fa_staging *staging, ring_slot *slot, fa_error *error) {
  if (!slot->busy) return FA_STATUS_OK;
  slot->busy = false;
  return staging->heap->backend->memory->event_wait(staging->heap->index, slot->event, error);
}

/* Pushes what was written out of the processor's own cache, into the one that all share. */
static void push_out(const char *memory, size_t bytes) {
#if defined(__x86_64__)
  for (size_t i = 0; i < bytes; i += 64) __asm__ volatile("cldemote %0" : : "m"(memory[i]));
#else
  (void)memory, (void)bytes;
#endif
}

/* Copies bytes of one row from column on, or into packed rows. here points into the slot. */
static void copy_row(const fa_copy *copy, bool download, char *here, char *row, size_t column, size_t bytes) {
  const size_t grain = grain_of(copy);
  if (copy->packed_dim)
    fa_pack(here, row + column / grain * (size_t)copy->packed_dim * sizeof(float), bytes / grain,
            copy->packed_dim);
  else
    memcpy(download ? row + column : here, download ? here : row + column, bytes);
}

/* Copies the piece's bytes from begin to end between the slot and rows of pageable memory. */
static void copy_share(const ring_slot *slot, bool download, size_t begin, size_t end) {
  const fa_copy *copy = slot->copy;
  for (size_t done = begin; done < end;) {
    const size_t at = slot->begin + done, column = at % copy->row_bytes;
    const size_t left = copy->row_bytes - column, bytes = left < end - done ? left : end - done;
    char *row = copy->host.data + at / copy->row_bytes * copy->host.pitch;
    copy_row(copy, download, slot->memory + done, row, column, bytes);
    done += bytes;
  }
  if (slot->pushes_out) push_out(slot->memory + begin, end - begin);
}

/* The byte of a piece where a share begins and the share before it ends. */
static size_t share_begin(const fa_staging *staging, const ring_slot *slot, size_t share) {
  const size_t grain = grain_of(slot->copy);
  return slot->bytes / grain * share / (size_t)staging->num_shares * grain;
}

static bool await(fa_staging *staging, atomic_long *number, long wanted) {
  while (atomic_load(number) != wanted) {
    if (atomic_load(&staging->failed)) return false;
    sched_yield();
  }
  return true;
}

/* Lets threads work on the piece. They fill its slot once the bus is done with the piece that was in it, or
 * empty it once the bus is done with this one. */
static fa_status open_piece(fa_staging *staging, long piece, ring_slot *slot, fa_error *error) {
  if (!await(staging, &slot->last_sent, staging->download ? piece : piece - RING_SLOTS)) return FA_STATUS_OK;
  fa_status status = wait_for_bus(staging, slot, error);
  if (status) return status;
  if (!staging->download) describe_piece(staging, piece, slot);
  atomic_store(&slot->shares_left, staging->num_shares);
  atomic_store(&slot->last_opened, piece);
  return FA_STATUS_OK;
}

/* Gives a filled piece to the bus, and records the slice's event behind its last one. */
static fa_status send_up_in_scope(fa_staging *staging, long piece, ring_slot *slot, fa_error *error) {
  const int slice = slot->copy->slice; /* read now, as a sent slot may soon hold another piece */
  fa_status status = send_piece(staging, piece, slot, error);
  if (status || atomic_fetch_sub(&staging->pieces_left[slice], 1) > 1) return status;
  status =
      staging->heap->backend->memory->record(staging->heap->index, staging->sent[slice], staging->up, error);
  if (!status) atomic_store(&staging->is_sent[slice], true);
  return status;
}

static fa_status send_up(fa_staging *staging, long piece, ring_slot *slot, fa_error *error) {
  const fa_memory_ops *memory = staging->heap->backend->memory;
  fa_scope scope;
  fa_status status = memory->enter(staging->heap->index, &scope, error);
  if (status) return status;
  status = send_up_in_scope(staging, piece, slot, error);
  memory->leave(&scope);
  return status;
}

/* Threads are done with the piece: a filled slot goes to the bus, an emptied one too if another piece needs it.
 */
static fa_status close_piece(fa_staging *staging, long piece, ring_slot *slot, fa_error *error) {
  if (!staging->download) return send_up(staging, piece, slot, error);
  if (piece + RING_SLOTS >= staging->num_pieces) return FA_STATUS_OK;
  describe_piece(staging, piece + RING_SLOTS, slot);
  return send_piece(staging, piece + RING_SLOTS, slot, error);
}

/* Tasks start in order, so that whoever waits for a piece waits for threads that are at work. */
static fa_status copy_one(fa_staging *staging, int64_t task, fa_error *error) {
  const long piece = (long)(task / staging->num_shares);
  const size_t share = (size_t)(task % staging->num_shares);
  ring_slot *slot = slot_of(staging, piece);
  fa_status status = share == 0 ? open_piece(staging, piece, slot, error) : FA_STATUS_OK;
  if (status || !await(staging, &slot->last_opened, piece)) return status;
  copy_share(slot, staging->download, share_begin(staging, slot, share), share_begin(staging, slot, share + 1));
  return atomic_fetch_sub(&slot->shares_left, 1) == 1 ? close_piece(staging, piece, slot, error) : FA_STATUS_OK;
}

static void copy_task(void *context, int64_t task, int worker) {
  fa_staging *staging = context;
  if (!atomic_load(&staging->failed) && copy_one(staging, task, &staging->errors[worker]))
    atomic_store(&staging->failed, true);
}

static size_t bytes_until(const fa_copy *copies, int num_copies, int slice) {
  size_t bytes = 0;
  for (int i = 0; i < num_copies; i++)
    if (copies[i].slice <= slice) bytes += bytes_of(&copies[i]);
  return bytes;
}

/* A piece has whole rows, or grains of the only one. The device waits for early copies, so their pieces fill
 * half a slot and the bus begins sooner. */
static size_t bytes_a_piece(const fa_staging *staging, const staged_copy *copy) {
  const size_t most = copy->is_early ? staging->slot_bytes / 2 : staging->slot_bytes;
  const size_t unit = copy->copy.num_rows == 1 ? grain_of(&copy->copy) : copy->copy.row_bytes;
  return most < unit ? unit : most - most % unit;
}

static void list_pieces(fa_staging *staging, const fa_copy *copies, int num_copies) {
  staging->num_pieces = 0;
  staging->num_copies = num_copies;
  for (int i = 0; i < FA_MAX_SLICES; i++) {
    atomic_store(&staging->pieces_left[i], 0);
    atomic_store(&staging->is_sent[i], true);
  }
  for (int i = 0; i < num_copies; i++) {
    staged_copy *copy = &staging->copies[i];
    copy->copy = copies[i];
    copy->is_early = !staging->download && staging->slot_bytes == MOST_SLOT_BYTES &&
                     bytes_until(copies, num_copies, copies[i].slice) <= EARLY_BYTES;
    copy->piece_bytes = bytes_a_piece(staging, copy);
    copy->first_piece = staging->num_pieces;
    const long num_pieces = (long)((bytes_of(&copies[i]) + copy->piece_bytes - 1) / copy->piece_bytes);
    staging->num_pieces += num_pieces;
    atomic_fetch_add(&staging->pieces_left[copies[i].slice], num_pieces);
    atomic_store(&staging->is_sent[copies[i].slice], false);
  }
}

/* Sets the slots as if the pieces before the first had been sent. A download gives the bus the first pieces,
 * and waits for one of them before threads begin, as that may take as long as a kernel. */
static fa_status prepare_ring(fa_staging *staging, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (long piece = 0; !status && piece < RING_SLOTS; piece++) {
    ring_slot *slot = slot_of(staging, piece);
    atomic_store(&slot->last_sent, piece - RING_SLOTS);
    atomic_store(&slot->last_opened, piece - RING_SLOTS);
    if (!staging->download || piece >= staging->num_pieces) continue;
    status = wait_for_bus(staging, slot, error);
    describe_piece(staging, piece, slot);
    if (!status) status = send_piece(staging, piece, slot, error);
  }
  if (!status && staging->download && staging->num_pieces > 0)
    status = wait_for_bus(staging, slot_of(staging, 0), error);
  return status;
}

static int num_threads(const fa_staging *staging) {
  const int processors = fa_num_processors();
  int wanted = COPY_THREADS;
  for (int i = 0; i < staging->num_copies; i++)
    if (staging->copies[i].copy.packed_dim) wanted = PACK_THREADS;
  return processors < wanted ? processors : wanted;
}

static fa_status begin(fa_staging *staging, const fa_copy *copies, int num_copies, bool download,
                       fa_error *error) {
  staging->download = download;
  list_pieces(staging, copies, num_copies);
  const size_t num_shares = staging->slot_bytes / SHARE_BYTES;
  staging->num_shares = num_shares > 1 ? (int)num_shares : 1;
  atomic_store(&staging->failed, false);
  memset(staging->errors, 0, sizeof staging->errors);
  fa_status status = prepare_ring(staging, error);
  if (status) return status;
  fa_parallel_begin(&staging->parallel, num_threads(staging), AWAKE_MICROSECONDS,
                    (int64_t)staging->num_pieces * staging->num_shares, copy_task, staging);
  staging->is_running = true;
  return FA_STATUS_OK;
}

static fa_status end(fa_staging *staging, fa_error *error) {
  if (!staging->is_running) return FA_STATUS_OK;
  fa_parallel_end(&staging->parallel);
  staging->is_running = false;
  staging->first_slot = (int)((staging->first_slot + staging->num_pieces) % RING_SLOTS);
  for (int i = 0; i < PACK_THREADS; i++)
    if (staging->errors[i].status) {
      if (error) *error = staging->errors[i];
      return staging->errors[i].status;
    }
  return FA_STATUS_OK;
}

fa_status fa_staging_begin_uploads(fa_staging *staging, const fa_copy *copies, int num_copies,
                                   fa_error *error) {
  return begin(staging, copies, num_copies, false, error);
}

fa_status fa_staging_await(fa_staging *staging, int slice, void *stream, fa_error *error) {
  if (!staging->is_running) return FA_STATUS_OK;
  while (!atomic_load(&staging->is_sent[slice])) {
    if (atomic_load(&staging->failed)) return end(staging, error);
    if (!fa_parallel_help(&staging->parallel)) sched_yield();
  }
  return staging->heap->backend->memory->stream_wait(staging->heap->index, stream, staging->sent[slice], error);
}

fa_status fa_staging_end_uploads(fa_staging *staging, fa_error *error) { return end(staging, error); }

fa_status fa_staging_download(fa_staging *staging, const fa_copy *copies, int num_copies, fa_error *error) {
  fa_status status = begin(staging, copies, num_copies, true, error);
  return status ? status : end(staging, error);
}

/* ---- few bytes, all of them in the ring at once ------------------------------------------------------- */

/* Copies lie in the ring as parts do in an arena. */
static size_t room_of(const fa_copy *copy) {
  return (size_t)fa_round_up((int64_t)bytes_of(copy), FA_ARENA_ALIGNMENT);
}

bool fa_staging_fits_at_once(const fa_staging *staging, const fa_copy *copies, int num_copies) {
  const size_t ring_bytes = staging->slot_bytes * RING_SLOTS;
  size_t bytes = 0;
  for (int i = 0; i < num_copies; i++) bytes += room_of(&copies[i]);
  return bytes <= (ring_bytes < AT_ONCE_BYTES ? ring_bytes : AT_ONCE_BYTES);
}

/* Whether two copies lie on the device as they do in the ring. */
static bool lie_together(const fa_copy *copy, const fa_copy *next) {
  return copy->is_padded && next->is_padded && copy->num_rows == 1 && next->num_rows == 1 &&
         copy->device.data + room_of(copy) == next->device.data;
}

static fa_status send_at_once(fa_staging *staging, const fa_copy *copies, int num_copies, bool download,
                              void *stream, fa_error *error) {
  const fa_heap *heap = staging->heap;
  char *memory = staging->ring[0].memory;
  fa_status status = FA_STATUS_OK;
  for (const fa_copy *copy = copies, *next; !status && copy < copies + num_copies; copy = next) {
    size_t width = copy->row_bytes, room = room_of(copy);
    for (next = copy + 1; next < copies + num_copies && lie_together(next - 1, next); next++) {
      width = room + bytes_of(next);
      room += room_of(next);
    }
    const fa_rows here = {memory, width}, there = copy->device;
    status = heap->backend->memory->copy(heap->index, download ? here : there, download ? there : here, width,
                                         copy->num_rows, stream, error);
    memory += room;
  }
  return status;
}

/* Copies between the ring and the host's own memory. */
static void copy_at_once(const fa_staging *staging, const fa_copy *copies, int num_copies, bool download) {
  char *memory = staging->ring[0].memory;
  for (const fa_copy *copy = copies; copy < copies + num_copies; copy++) {
    const ring_slot slot = {.memory = memory, .copy = copy};
    copy_share(&slot, download, 0, bytes_of(copy));
    memory += room_of(copy);
  }
}

fa_status fa_staging_upload_at_once(fa_staging *staging, const fa_copy *copies, int num_copies, void *stream,
                                    fa_error *error) {
  copy_at_once(staging, copies, num_copies, false);
  return send_at_once(staging, copies, num_copies, false, stream, error);
}

fa_status fa_staging_fetch_at_once(fa_staging *staging, const fa_copy *copies, int num_copies, void *stream,
                                   fa_error *error) {
  return send_at_once(staging, copies, num_copies, true, stream, error);
}

void fa_staging_take_fetched(fa_staging *staging, const fa_copy *copies, int num_copies) {
  copy_at_once(staging, copies, num_copies, true);
}

char *fa_staging_memory(const fa_staging *staging) {
  return staging->slot_bytes ? staging->ring[0].memory : NULL;
}

void fa_staging_stop(fa_staging *staging) {
  atomic_store(&staging->failed, true);
  end(staging, NULL);
}
