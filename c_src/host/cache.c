/* Caches: pages of a device's memory, and the book that says which sequence's they are. */
#include <stdatomic.h>
#include <stdlib.h>

#include "../core/error.h"
#include "memory.h"
#include "pages.h"

struct fa_cache {
  fa_device device;
  fa_cache_layout layout;
  int64_t row_bytes;     /* of k, and of v */
  atomic_long num_users; /* the caller, sequences and views */
  fa_book *book;
  char *k, *v;
};

struct fa_cache_sequence {
  fa_cache *cache;
  fa_sequence_pages pages;
};

/* ---- caches ---------------------------------------------------------------------------------------------- */

static int64_t bytes_of(const fa_cache *cache) {
  return cache->layout.num_pages * cache->layout.page_size * cache->row_bytes;
}

/* row_bytes; false where the cache's bytes are more than an address can say. */
static bool measure(fa_cache *cache) {
  const fa_cache_layout *l = &cache->layout;
  int64_t bytes;
  return !__builtin_mul_overflow(l->num_kv_heads, l->head_dim, &cache->row_bytes) &&
         !__builtin_mul_overflow(cache->row_bytes, (int64_t)fa_dtype_bytes(l->dtype), &cache->row_bytes) &&
         !__builtin_mul_overflow(cache->row_bytes, l->page_size, &bytes) &&
         !__builtin_mul_overflow(bytes, l->num_pages, &bytes) && bytes <= INT64_MAX / 4;
}

static fa_status check_layout(fa_cache *cache, fa_error *error) {
  const fa_cache_layout *l = &cache->layout;
  if ((unsigned)l->dtype >= FA_NUM_FLOATS)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "type", "f32, bf16, f16 or f64", fa_dtype_name(l->dtype));
  if (l->num_kv_heads < 1)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "num_kv_heads", "at least 1",
                   FA_TEXT("%lld", (long long)l->num_kv_heads));
  if (l->head_dim < 1)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "head_dim", "at least 1",
                   FA_TEXT("%lld", (long long)l->head_dim));
  return measure(cache) ? FA_STATUS_OK
                        : fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "num_pages",
                                          "more bytes than there are addresses");
}

static fa_status take_memory(fa_cache *cache, fa_error *error) {
  const size_t bytes = (size_t)bytes_of(cache);
  fa_status status = fa_device_alloc(cache->device, bytes, (void **)&cache->k, error);
  if (!status) status = fa_device_alloc(cache->device, bytes, (void **)&cache->v, error);
  return status;
}

static void give_back(fa_cache *cache) {
  fa_device_free(cache->device, cache->k, NULL);
  fa_device_free(cache->device, cache->v, NULL);
  fa_book_free(cache->book);
  free(cache);
}

fa_status fa_cache_new(fa_device device, const fa_cache_layout *layout, fa_cache **cache, fa_error *error) {
  fa_cache *made = *cache = NULL;
  made = calloc(1, sizeof *made);
  if (!made) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a cache");
  made->device = device, made->layout = *layout;
  atomic_init(&made->num_users, 1);
  fa_status status = check_layout(made, error);
  if (!status) status = fa_book_new(layout->num_pages, layout->page_size, &made->book, error);
  if (!status) status = take_memory(made, error);
  if (status) return give_back(made), status;
  fa_count_page_bytes(device, 2 * bytes_of(made));
  *cache = made;
  return fa_succeed(error);
}

static void leave(fa_cache *cache) {
  if (atomic_fetch_sub(&cache->num_users, 1) > 1) return;
  fa_count_page_bytes(cache->device, -2 * bytes_of(cache));
  give_back(cache);
}

void fa_cache_free(fa_cache *cache) {
  if (cache) leave(cache);
}

fa_device fa_cache_device(const fa_cache *cache) { return cache->device; }

fa_cache_layout fa_cache_get_layout(const fa_cache *cache) { return cache->layout; }

int64_t fa_cache_num_free_pages(fa_cache *cache) { return fa_book_num_free(cache->book); }

/* ---- sequences ------------------------------------------------------------------------------------------- */

fa_status fa_cache_add_sequence(fa_cache *cache, fa_cache_sequence **sequence, fa_error *error) {
  *sequence = calloc(1, sizeof **sequence);
  if (!*sequence) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a sequence");
  atomic_fetch_add(&cache->num_users, 1);
  (*sequence)->cache = cache;
  return fa_succeed(error);
}

fa_status fa_cache_fork(const fa_cache_sequence *sequence, fa_cache_sequence **fork, fa_error *error) {
  fa_status status = fa_cache_add_sequence(sequence->cache, fork, error);
  if (status) return status;
  status = fa_sequence_fork(sequence->cache->book, &sequence->pages, &(*fork)->pages, error);
  if (status) fa_cache_free_sequence(*fork), *fork = NULL;
  return status;
}

bool fa_cache_release(fa_cache_sequence *sequence) {
  return fa_sequence_release(sequence->cache->book, &sequence->pages);
}

void fa_cache_free_sequence(fa_cache_sequence *sequence) {
  if (!sequence) return;
  fa_cache_release(sequence);
  leave(sequence->cache);
  free(sequence);
}

fa_cache *fa_cache_of(const fa_cache_sequence *sequence) { return sequence->cache; }

int64_t fa_cache_length(const fa_cache_sequence *sequence) {
  return fa_sequence_length(sequence->cache->book, &sequence->pages);
}

static fa_status check_sequences(fa_cache_sequence *const *sequences, int64_t count, fa_error *error) {
  if (count < 1) return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "sequences", "at least one", "none");
  for (int64_t i = 1; i < count; i++)
    if (sequences[i]->cache != sequences[0]->cache)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "sequences", "those of one cache", "of several");
  return FA_STATUS_OK;
}

/* ---- appends --------------------------------------------------------------------------------------------- */

/* Copies of rows, of k and of v alike, under construction. */
typedef struct copying {
  const fa_cache *cache;
  fa_byte_copy *copies;
  int64_t count;
} copying;

/* Rows that are to be copied, and where they lie. */
typedef struct source {
  const char *k, *v;
  fa_place place_of_k, place_of_v;
} source;

static source source_at(source from, int64_t bytes) {
  from.k += bytes, from.v += bytes;
  return from;
}

static void copy_rows(copying *c, int64_t to_page, int64_t to_row, source from, int64_t num_rows) {
  const size_t bytes = (size_t)(num_rows * c->cache->row_bytes);
  const int64_t at = (to_page * c->cache->layout.page_size + to_row) * c->cache->row_bytes;
  c->copies[c->count++] = (fa_byte_copy){c->cache->k + at, from.k, bytes, from.place_of_k};
  c->copies[c->count++] = (fa_byte_copy){c->cache->v + at, from.v, bytes, from.place_of_v};
}

/* First the rows that the new ones' first page shares with others, then the new ones, page by page. */
static void copy_sequence(copying *c, const fa_append *append, source new) {
  const fa_cache *cache = c->cache;
  const int64_t page_size = cache->layout.page_size, end = append->first_row + append->num_rows;
  const source pages = {cache->k, cache->v, FA_PLACE_DEVICE, FA_PLACE_DEVICE};
  if (append->num_copied_rows > 0)
    copy_rows(c, append->copy_to, 0, source_at(pages, append->copy_from * page_size * cache->row_bytes),
              append->num_copied_rows);
  for (int64_t row = append->first_row, next; row < end; row = next) {
    next = (row / page_size + 1) * page_size < end ? (row / page_size + 1) * page_size : end;
    const int64_t at = (row - append->first_row) * cache->row_bytes;
    copy_rows(c, fa_append_page(cache->book, append, row), row % page_size, source_at(new, at), next - row);
  }
}

static fa_status copy_all_here(const fa_cache *cache, const fa_append *appends, int64_t count, const char *k,
                               const char *v, fa_error *error) {
  int64_t most = 0; /* a sequence's rows begin within a page, and its first page may be copied */
  for (int64_t i = 0; i < count; i++) most += 2 * (appends[i].num_pages + 2);
  copying c = {cache, malloc((size_t)most * sizeof *c.copies), 0};
  if (!c.copies) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "k", "no memory for a list of copies");
  const int64_t bytes = appends[0].num_rows * cache->row_bytes; /* of each */
  const source new = {k, v, fa_memory_locate(cache->device, k, (size_t)(count * bytes)),
                      fa_memory_locate(cache->device, v, (size_t)(count * bytes))};
  for (int64_t i = 0; i < count; i++) copy_sequence(&c, &appends[i], source_at(new, i * bytes));
  const fa_status status = fa_copy_bytes(cache->device, c.copies, c.count, NULL, error);
  free(c.copies);
  return status;
}

static fa_status copy_all(const fa_cache *cache, const fa_append *appends, int64_t count, const char *k,
                          const char *v, fa_error *error) {
  fa_stay stay;
  fa_status status = fa_stay_begin(cache->device, &stay, error);
  if (status) return status;
  status = copy_all_here(cache, appends, count, k, v, error);
  fa_stay_end(&stay);
  return status;
}

fa_status fa_cache_append(fa_cache_sequence *const *sequences, int64_t count, const void *k, const void *v,
                          int64_t num_rows, fa_error *error) {
  fa_status status = check_sequences(sequences, count, error);
  if (status) return status;
  if (num_rows < 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "num_rows", "at least 0",
                   FA_TEXT("%lld", (long long)num_rows));
  const fa_cache *cache = sequences[0]->cache;
  fa_append *appends = calloc((size_t)count, sizeof *appends);
  if (!appends) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "sequences", "no memory for a list");
  for (int64_t i = 0; i < count; i++) appends[i].sequence = &sequences[i]->pages;
  status = fa_append_begin(cache->book, appends, count, num_rows, error);
  if (!status) {
    status = copy_all(cache, appends, count, k, v, error);
    fa_append_end(cache->book, appends, count, !status);
  }
  free(appends);
  return status;
}

/* ---- views ----------------------------------------------------------------------------------------------- */

static fa_status begin_reading(fa_cache_sequence *const *sequences, int64_t count, fa_reading *reading,
                               fa_error *error) {
  const fa_sequence_pages **pages = malloc((size_t)count * sizeof *pages);
  if (!pages) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "sequences", "no memory for a list");
  for (int64_t i = 0; i < count; i++) pages[i] = &sequences[i]->pages;
  const fa_status status = fa_reading_begin(sequences[0]->cache->book, pages, count, reading, error);
  free(pages);
  return status;
}

fa_status fa_cache_view_begin(fa_cache_sequence *const *sequences, int64_t count, fa_cache_view *view,
                              fa_error *error) {
  fa_reading reading;
  *view = (fa_cache_view){0};
  fa_status status = check_sequences(sequences, count, error);
  if (!status) status = begin_reading(sequences, count, &reading, error);
  if (status) return status;
  fa_cache *cache = sequences[0]->cache;
  atomic_fetch_add(&cache->num_users, 1);
  *view = (fa_cache_view){.cache = cache,
                          .k = cache->k,
                          .v = cache->v,
                          .batch = reading.batch,
                          .max_pages = reading.max_pages,
                          .key_lengths = reading.lengths,
                          .page_table = reading.table};
  return FA_STATUS_OK;
}

void fa_cache_view_end(fa_cache_view *view) {
  if (!view->cache) return;
  fa_reading reading = {view->batch, view->max_pages, (int32_t *)view->key_lengths,
                        (int32_t *)view->page_table};
  fa_reading_end(view->cache->book, &reading);
  leave(view->cache);
  *view = (fa_cache_view){0};
}
