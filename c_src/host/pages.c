/* The book of a cache's pages. One mutex guards a book and its sequences; it is held while numbers change,
 * never while rows are copied. A page belongs to the sequences that hold it. One of several writes to a page of
 * its own; one alone writes behind its last row, where no fork of it and no reader looks. */
#include "pages.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../core/error.h"
#include "../core/integers.h"

struct fa_book {
  pthread_mutex_t mutex;
  pthread_cond_t appended; /* some append has ended */
  int64_t page_size;
  int32_t num_pages, num_free;
  int32_t *free;             /* [num_free], the next one to be taken last */
  int32_t *owners, *readers; /* [num_pages] sequences that hold a page, and readings under way */
  int32_t *rows;             /* [num_pages] of a page, that sequences have had */
};

/* ---- books ----------------------------------------------------------------------------------------------- */

fa_status fa_book_new(int64_t num_pages, int64_t page_size, fa_book **book, fa_error *error) {
  *book = NULL;
  if (num_pages < 1 || num_pages > INT32_MAX)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "num_pages", "1 to 2^31 - 1",
                   FA_TEXT("%lld", (long long)num_pages));
  if (page_size < 1 || page_size > INT32_MAX)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "page_size", "1 to 2^31 - 1",
                   FA_TEXT("%lld", (long long)page_size));
  fa_book *made = calloc(1, sizeof *made);
  int32_t *numbers = calloc((size_t)num_pages, 4 * sizeof *numbers);
  if (!made || !numbers) {
    free(made), free(numbers);
    return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "num_pages", "no memory for the book of pages");
  }
  *made = (fa_book){.page_size = page_size,
                    .num_pages = (int32_t)num_pages,
                    .num_free = (int32_t)num_pages,
                    .free = numbers,
                    .owners = numbers + num_pages,
                    .readers = numbers + 2 * num_pages,
                    .rows = numbers + 3 * num_pages};
  for (int32_t i = 0; i < made->num_pages; i++) made->free[i] = made->num_pages - 1 - i;
  pthread_mutex_init(&made->mutex, NULL);
  pthread_cond_init(&made->appended, NULL);
  *book = made;
  return fa_succeed(error);
}

void fa_book_free(fa_book *book) {
  if (!book) return;
  pthread_mutex_destroy(&book->mutex);
  pthread_cond_destroy(&book->appended);
  free(book->free);
  free(book);
}

int64_t fa_book_num_free(fa_book *book) {
  pthread_mutex_lock(&book->mutex);
  const int64_t num_free = book->num_free;
  pthread_mutex_unlock(&book->mutex);
  return num_free;
}

static int32_t take_page(fa_book *book) {
  const int32_t page = book->free[--book->num_free];
  book->owners[page] = 1, book->rows[page] = 0;
  return page;
}

static void free_if_unused(fa_book *book, int32_t page) {
  if (book->owners[page] == 0 && book->readers[page] == 0) book->free[book->num_free++] = page;
}

static void disown(fa_book *book, int32_t page) {
  book->owners[page]--;
  free_if_unused(book, page);
}

/* ---- sequences ------------------------------------------------------------------------------------------- */

static fa_status fail_released(fa_error *error) {
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "sequence", "one that is held", "one that was released");
}

static fa_status fail_memory(fa_error *error) {
  return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "sequence", "no memory for a list of pages");
}

int64_t fa_sequence_length(fa_book *book, const fa_sequence_pages *sequence) {
  pthread_mutex_lock(&book->mutex);
  const int64_t length = sequence->is_released ? -1 : sequence->length;
  pthread_mutex_unlock(&book->mutex);
  return length;
}

static bool reserve(fa_sequence_pages *sequence, int64_t num_pages) {
  if (num_pages <= sequence->capacity) return true;
  const int64_t capacity = fa_min(fa_max(num_pages, 2 * (int64_t)sequence->capacity), INT32_MAX);
  int32_t *pages = realloc(sequence->pages, (size_t)capacity * sizeof *pages);
  if (!pages) return false;
  sequence->pages = pages, sequence->capacity = (int32_t)capacity;
  return true;
}

static fa_status fork_sequence(fa_book *book, const fa_sequence_pages *from, fa_sequence_pages *to,
                               fa_error *error) {
  if (from->is_released) return fail_released(error);
  if (!reserve(to, from->num_pages)) return fail_memory(error);
  to->length = from->length, to->num_pages = from->num_pages;
  for (int32_t i = 0; i < from->num_pages; i++) {
    to->pages[i] = from->pages[i];
    book->owners[to->pages[i]]++;
  }
  return fa_succeed(error);
}

fa_status fa_sequence_fork(fa_book *book, const fa_sequence_pages *from, fa_sequence_pages *to,
                           fa_error *error) {
  pthread_mutex_lock(&book->mutex);
  const fa_status status = fork_sequence(book, from, to, error);
  pthread_mutex_unlock(&book->mutex);
  return status;
}

static void give_up_pages(fa_book *book, fa_sequence_pages *sequence) {
  for (int32_t i = 0; i < sequence->num_pages; i++) disown(book, sequence->pages[i]);
  free(sequence->pages);
  *sequence = (fa_sequence_pages){.is_released = true};
}

bool fa_sequence_release(fa_book *book, fa_sequence_pages *sequence) {
  pthread_mutex_lock(&book->mutex);
  const bool is_held = !sequence->is_released;
  sequence->is_released = true;
  if (is_held && !sequence->is_appended) give_up_pages(book, sequence);
  pthread_mutex_unlock(&book->mutex);
  return is_held;
}

/* ---- appends --------------------------------------------------------------------------------------------- */

static bool is_any_appended(const fa_append *appends, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (appends[i].sequence->is_appended) return true;
  return false;
}

/* Marks the sequences as appended to; false, with none marked, where one was released or is there twice. */
static bool mark(fa_append *appends, int64_t count, fa_error *error) {
  for (int64_t i = 0; i < count; i++) {
    fa_sequence_pages *sequence = appends[i].sequence;
    if (!sequence->is_released && !sequence->is_appended) {
      sequence->is_appended = true;
      continue;
    }
    if (sequence->is_released)
      fail_released(error);
    else
      fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "sequence", "each one once", "one of them twice");
    while (i-- > 0) appends[i].sequence->is_appended = false;
    return false;
  }
  return true;
}

/* Whether somebody else holds the sequence's last page, or may read more of its rows there than it has itself:
 * those of a sequence that it was forked from in the middle of an append, which has left the page since. */
static bool shares_last_page(const fa_book *book, const fa_sequence_pages *sequence, int64_t rest) {
  const int32_t page = sequence->pages[sequence->num_pages - 1];
  return book->owners[page] > 1 || (book->readers[page] > 0 && book->rows[page] > rest);
}

/* How many pages the new rows of a sequence take. */
static int64_t size_append(const fa_book *book, int64_t num_rows, fa_append *append) {
  const fa_sequence_pages *sequence = append->sequence;
  const int64_t rest = sequence->length % book->page_size; /* rows on the last page, where it has room */
  append->first_row = sequence->length, append->num_rows = num_rows;
  append->first_page = sequence->num_pages;
  append->num_copied_rows = 0;
  if (num_rows > 0 && rest > 0 && shares_last_page(book, sequence, rest)) {
    append->first_page--;
    append->copy_from = sequence->pages[append->first_page];
    append->num_copied_rows = (int32_t)rest;
  }
  return fa_divide_up(sequence->length + num_rows, book->page_size) - append->first_page;
}

static fa_status fail_full(const fa_book *book, int64_t num_wanted, fa_error *error) {
  return fa_fail(error, FA_STATUS_OUT_OF_MEMORY, "cache",
                 FA_TEXT("%lld free pages of %lld rows", (long long)num_wanted, (long long)book->page_size),
                 FA_TEXT("%d", (int)book->num_free));
}

/* Whether all that the appends need is there: room in lists, and pages, of which none is taken yet. */
static fa_status prepare(fa_book *book, fa_append *appends, int64_t count, int64_t num_rows, fa_error *error) {
  int64_t num_wanted = 0;
  for (int64_t i = 0; i < count; i++) {
    if (num_rows > INT32_MAX - appends[i].sequence->length)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "k", "sequences of at most 2^31 - 1 rows", "more");
    const int64_t num_pages = size_append(book, num_rows, &appends[i]);
    num_wanted += num_pages;
    if (num_wanted > book->num_pages) return fail_full(book, num_wanted, error);
    appends[i].pages = malloc((size_t)fa_max(num_pages, 1) * sizeof *appends[i].pages);
    if (!appends[i].pages || !reserve(appends[i].sequence, appends[i].first_page + num_pages))
      return fail_memory(error);
    appends[i].num_pages = (int32_t)num_pages;
  }
  return num_wanted > book->num_free ? fail_full(book, num_wanted, error) : fa_succeed(error);
}

static void finish(fa_book *book, fa_append *append) {
  append->sequence->is_appended = false;
  free(append->pages);
  append->pages = NULL;
  if (append->sequence->is_released) give_up_pages(book, append->sequence);
}

static void take_pages(fa_book *book, fa_append *append) {
  for (int32_t i = 0; i < append->num_pages; i++) append->pages[i] = take_page(book);
  if (append->num_copied_rows > 0) append->copy_to = append->pages[0];
}

static fa_status begin(fa_book *book, fa_append *appends, int64_t count, int64_t num_rows, fa_error *error) {
  while (is_any_appended(appends, count)) pthread_cond_wait(&book->appended, &book->mutex);
  if (!mark(appends, count, error)) return error ? error->status : FA_STATUS_INVALID_ARGUMENT;
  const fa_status status = prepare(book, appends, count, num_rows, error);
  for (int64_t i = 0; i < count; i++)
    if (status)
      finish(book, &appends[i]);
    else
      take_pages(book, &appends[i]);
  return status;
}

fa_status fa_append_begin(fa_book *book, fa_append *appends, int64_t count, int64_t num_rows, fa_error *error) {
  for (int64_t i = 0; i < count; i++) appends[i] = (fa_append){.sequence = appends[i].sequence};
  pthread_mutex_lock(&book->mutex);
  const fa_status status = begin(book, appends, count, num_rows, error);
  pthread_mutex_unlock(&book->mutex);
  return status;
}

/* The new pages become the sequence's, the first of them in place of the one that it is a copy of. */
static void commit(fa_book *book, const fa_append *append) {
  fa_sequence_pages *sequence = append->sequence;
  if (append->num_copied_rows > 0) disown(book, append->copy_from);
  for (int32_t i = 0; i < append->num_pages; i++) sequence->pages[append->first_page + i] = append->pages[i];
  sequence->num_pages = append->first_page + append->num_pages;
  sequence->length += append->num_rows;
  if (append->num_rows == 0) return;
  for (int64_t page = append->first_row / book->page_size; page < sequence->num_pages; page++)
    book->rows[sequence->pages[page]] =
        (int32_t)fa_min(sequence->length - page * book->page_size, book->page_size);
}

void fa_append_end(fa_book *book, fa_append *appends, int64_t count, bool is_done) {
  pthread_mutex_lock(&book->mutex);
  for (int64_t i = 0; i < count; i++) {
    if (is_done) commit(book, &appends[i]);
    for (int32_t page = 0; !is_done && page < appends[i].num_pages; page++)
      disown(book, appends[i].pages[page]);
    finish(book, &appends[i]);
  }
  pthread_cond_broadcast(&book->appended);
  pthread_mutex_unlock(&book->mutex);
}

int32_t fa_append_page(const fa_book *book, const fa_append *append, int64_t row) {
  const int64_t page = row / book->page_size;
  return page < append->first_page ? append->sequence->pages[page] : append->pages[page - append->first_page];
}

/* ---- readings -------------------------------------------------------------------------------------------- */

static fa_status allocate_reading(fa_reading *reading, fa_error *error) {
  reading->lengths = malloc((size_t)fa_max(reading->batch, 1) * sizeof *reading->lengths);
  reading->table = malloc((size_t)fa_max(reading->batch * reading->max_pages, 1) * sizeof *reading->table);
  return reading->lengths && reading->table ? fa_succeed(error) : fail_memory(error);
}

static fa_status read_sequences(fa_book *book, const fa_sequence_pages *const *sequences, fa_reading *reading,
                                fa_error *error) {
  for (int64_t b = 0; b < reading->batch; b++) {
    if (sequences[b]->is_released) return fail_released(error);
    reading->max_pages = fa_max(reading->max_pages, sequences[b]->num_pages);
  }
  const fa_status status = allocate_reading(reading, error);
  if (status) return status;
  for (int64_t b = 0; b < reading->batch; b++) {
    reading->lengths[b] = (int32_t)sequences[b]->length;
    for (int64_t i = 0; i < reading->max_pages; i++) {
      const int32_t page = i < sequences[b]->num_pages ? sequences[b]->pages[i] : -1;
      reading->table[b * reading->max_pages + i] = page;
      if (page >= 0) book->readers[page]++;
    }
  }
  return FA_STATUS_OK;
}

static void free_reading(fa_reading *reading) {
  free(reading->lengths), free(reading->table);
  *reading = (fa_reading){0};
}

fa_status fa_reading_begin(fa_book *book, const fa_sequence_pages *const *sequences, int64_t count,
                           fa_reading *reading, fa_error *error) {
  *reading = (fa_reading){.batch = count, .max_pages = 1};
  pthread_mutex_lock(&book->mutex);
  const fa_status status = read_sequences(book, sequences, reading, error);
  pthread_mutex_unlock(&book->mutex);
  if (status) free_reading(reading);
  return status;
}

void fa_reading_end(fa_book *book, fa_reading *reading) {
  pthread_mutex_lock(&book->mutex);
  for (int64_t i = 0; i < reading->batch * reading->max_pages; i++)
    if (reading->table[i] >= 0) {
      book->readers[reading->table[i]]--;
      free_if_unused(book, reading->table[i]);
    }
  pthread_mutex_unlock(&book->mutex);
  free_reading(reading);
}
