/*
 * The book of a cache's pages: what it refuses; a fork that is made in the middle of an append; random appends,
 * forks, releases and readings, one beginning before another has ended, after which every row of every sequence
 * is what was written to it and no page is lost; and the same by several threads at once on the same sequences.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/integers.h"
#include "../../c_src/host/pages.h"
#include "check.h"
#include "random.h"

/* ---- a cache of numbers ---------------------------------------------------------------------------------- */

/* A row's number tells which sequence wrote it, and which of its rows it is. */
static int64_t number_of(int64_t writer, int64_t row) { return writer << 32 | row; }

enum { MOST_FORKS = 64 };

/* Rows from begins[i] on were written by writers[i]: the first one's are those before the first fork. */
typedef struct tracked {
  fa_sequence_pages pages;
  int num_writers;
  int64_t writers[MOST_FORKS], begins[MOST_FORKS];
} tracked;

typedef struct cache {
  fa_book *book;
  int64_t num_pages, page_size, *rows; /* [num_pages, page_size] */
} cache;

static cache cache_new(int64_t num_pages, int64_t page_size) {
  cache made = {.num_pages = num_pages, .page_size = page_size};
  if (fa_book_new(num_pages, page_size, &made.book, NULL)) exit(2);
  made.rows = calloc((size_t)(num_pages * page_size), sizeof *made.rows);
  return made;
}

static void cache_free(cache *c) {
  fa_book_free(c->book);
  free(c->rows);
}

static tracked *tracked_new(int64_t writer) {
  tracked *made = calloc(1, sizeof *made);
  made->num_writers = 1, made->writers[0] = writer;
  return made;
}

static int64_t expected_at(const tracked *t, int64_t row) {
  int i = t->num_writers - 1;
  while (t->begins[i] > row) i--;
  return number_of(t->writers[i], row);
}

/* What an append that has begun writes, as whoever has a cache does. */
static void write_rows(const cache *c, const fa_append *append, int64_t writer) {
  const int64_t from = append->copy_from * c->page_size, to = append->copy_to * c->page_size;
  for (int32_t i = 0; i < append->num_copied_rows; i++) c->rows[to + i] = c->rows[from + i];
  for (int64_t row = append->first_row; row < append->first_row + append->num_rows; row++)
    c->rows[fa_append_page(c->book, append, row) * c->page_size + row % c->page_size] = number_of(writer, row);
}

static bool holds(const cache *c, const fa_reading *reading, int64_t batch, const tracked *t) {
  const int32_t *pages = reading->table + batch * reading->max_pages;
  for (int64_t row = 0; row < reading->lengths[batch]; row++) {
    const int64_t page = pages[row / c->page_size];
    if (page < 0 || page >= c->num_pages) return false;
    if (c->rows[page * c->page_size + row % c->page_size] != expected_at(t, row)) return false;
  }
  return true;
}

/* A fork of another's rows is a writer of its own from their end on. */
static bool fork_tracked(fa_book *book, const tracked *from, tracked *to, int64_t writer) {
  memcpy(to->writers, from->writers, sizeof to->writers);
  memcpy(to->begins, from->begins, sizeof to->begins);
  if (fa_sequence_fork(book, &from->pages, &to->pages, NULL)) return false;
  to->num_writers = from->num_writers + 1;
  to->writers[to->num_writers - 1] = writer;
  to->begins[to->num_writers - 1] = fa_sequence_length(book, &to->pages);
  return true;
}

/* ---- what is refused ------------------------------------------------------------------------------------- */

static void test_refusals(void) {
  fa_error error;
  fa_book *none;
  CHECK(fa_book_new(0, 16, &none, &error) == FA_STATUS_INVALID_ARGUMENT && !none, "a book without pages");
  CHECK_TEXT(error.message, "num_pages: expected 1 to 2^31 - 1, got 0");
  CHECK(fa_book_new(1, 0, &none, &error) == FA_STATUS_INVALID_ARGUMENT && !none, "pages without rows");
  CHECK_TEXT(error.message, "page_size: expected 1 to 2^31 - 1, got 0");

  cache c = cache_new(3, 4);
  fa_sequence_pages a = {0}, b = {0}, fork = {0};
  fa_append appends[2] = {{.sequence = &a}, {.sequence = &b}};
  CHECK(fa_append_begin(c.book, appends, 2, 7, &error) == FA_STATUS_OUT_OF_MEMORY, "four pages of three");
  CHECK_TEXT(error.message, "cache: expected 4 free pages of 4 rows, got 3");
  CHECK(fa_append_begin(c.book, appends, 1, INT64_C(1) << 40, &error) == FA_STATUS_INVALID_ARGUMENT,
        "too many rows");
  CHECK(fa_sequence_length(c.book, &a) == 0 && fa_book_num_free(c.book) == 3, "a refusal took something");
  appends[1].sequence = &a;
  CHECK(fa_append_begin(c.book, appends, 2, 1, &error) == FA_STATUS_INVALID_ARGUMENT, "one sequence twice");
  CHECK_TEXT(error.message, "sequence: expected each one once, got one of them twice");
  CHECK(!fa_append_begin(c.book, appends, 1, 9, &error), "%s", error.message);
  fa_append_end(c.book, appends, 1, true);
  CHECK(fa_book_num_free(c.book) == 0 && fa_sequence_length(c.book, &a) == 9, "three pages");
  const fa_status status = fa_append_begin(c.book, appends, 1, INT64_MAX, &error);
  CHECK(status == FA_STATUS_INVALID_ARGUMENT, "as many rows as there are numbers, behind nine");
  if (!status) fa_append_end(c.book, appends, 1, false); /* or the next append would wait for it */
  CHECK_TEXT(error.message, "k: expected sequences of at most 2^31 - 1 rows, got more");
  CHECK(!fa_append_begin(c.book, appends, 1, 3, &error), "room on the last page: %s", error.message);
  fa_append_end(c.book, appends, 1, false);
  CHECK(!fa_sequence_fork(c.book, &a, &fork, &error), "%s", error.message);
  CHECK(fa_append_begin(c.book, appends, 1, 1, &error) == FA_STATUS_OUT_OF_MEMORY, "no page for a copy");
  CHECK(fa_sequence_release(c.book, &fork) && !fa_sequence_release(c.book, &fork), "a release twice");
  CHECK(fa_append_begin(c.book, &(fa_append){.sequence = &fork}, 1, 1, &error) == FA_STATUS_INVALID_ARGUMENT,
        "an append to what was released");
  CHECK_TEXT(error.message, "sequence: expected one that is held, got one that was released");
  CHECK(fa_sequence_fork(c.book, &fork, &b, &error) == FA_STATUS_INVALID_ARGUMENT, "a fork of it");
  fa_reading reading;
  const fa_sequence_pages *released = &fork;
  CHECK(fa_reading_begin(c.book, &released, 1, &reading, &error) == FA_STATUS_INVALID_ARGUMENT, "its rows");
  CHECK(fa_sequence_length(c.book, &fork) == -1, "its length");
  fa_sequence_release(c.book, &a);
  CHECK(fa_book_num_free(c.book) == 3, "%d pages are free", (int)fa_book_num_free(c.book));
  cache_free(&c);
}

/* ---- a fork in the middle of an append ------------------------------------------------------------------- */

static void append_rows(const cache *c, tracked *t, int64_t num_rows) {
  fa_append append = {.sequence = &t->pages};
  fa_error error;
  CHECK(!fa_append_begin(c->book, &append, 1, num_rows, &error), "%s", error.message);
  write_rows(c, &append, t->writers[t->num_writers - 1]);
  fa_append_end(c->book, &append, 1, true);
}

/* The fork has fewer rows of the last page than the sequence has written there, and is the only one to hold it
 * once the sequence is released. It may append in place only where no reading of the sequence looks at those
 * rows any more. */
static void check_fork_amid_append(int64_t num_rows, bool is_read) {
  cache c = cache_new(3, 8);
  tracked *source = tracked_new(1), *fork = tracked_new(2);
  fa_append append = {.sequence = &source->pages};
  fa_reading reading;
  const fa_sequence_pages *sequence = &source->pages;
  fa_error error;
  append_rows(&c, source, 3);
  CHECK(!fa_append_begin(c.book, &append, 1, num_rows, &error), "%s", error.message);
  CHECK(fork_tracked(c.book, source, fork, 2) && fa_sequence_length(c.book, &fork->pages) == 3,
        "a fork failed");
  write_rows(&c, &append, 1);
  fa_append_end(c.book, &append, 1, true);
  CHECK(!fa_reading_begin(c.book, &sequence, 1, &reading, &error), "%s", error.message);
  fa_sequence_release(c.book, &source->pages);
  CHECK(holds(&c, &reading, 0, source) && reading.lengths[0] == 3 + num_rows, "the sequence's rows");
  if (!is_read) fa_reading_end(c.book, &reading);
  append_rows(&c, fork, 1);
  CHECK(fa_book_num_free(c.book) == (!is_read       ? 2
                                     : num_rows > 5 ? 0
                                                    : 1),
        "%d pages are free where a page is %s", (int)fa_book_num_free(c.book),
        is_read ? "read" : "the fork's alone");
  if (is_read) {
    CHECK(holds(&c, &reading, 0, source), "a fork wrote over rows that are read");
    fa_reading_end(c.book, &reading);
  }
  sequence = &fork->pages;
  CHECK(!fa_reading_begin(c.book, &sequence, 1, &reading, &error), "%s", error.message);
  CHECK(holds(&c, &reading, 0, fork) && reading.lengths[0] == 4, "the fork's rows");
  fa_reading_end(c.book, &reading);
  fa_sequence_release(c.book, &fork->pages);
  CHECK(fa_book_num_free(c.book) == 3, "%d of 3 pages are free", (int)fa_book_num_free(c.book));
  free(source), free(fork);
  cache_free(&c);
}

/* ---- one operation after another, of which several are under way ------------------------------------------
 */

enum { MOST_SEQUENCES = 12, MOST_UNDER_WAY = 4 };

typedef struct under_way {
  int num_appends; /* 0: a reading */
  fa_append appends[3];
  tracked *sequences[3];
  fa_reading reading;
  bool is_there;
} under_way;

typedef struct play {
  cache c;
  fa_random random;
  tracked *sequences[MOST_SEQUENCES]; /* NULL, or one that is held */
  tracked *all[20000];
  int num_tracked;
  under_way others[MOST_UNDER_WAY];
  long num_full, num_copied;
} play;

static tracked *add(play *p, int slot) {
  tracked *made = p->all[p->num_tracked] = tracked_new(p->num_tracked + 1);
  p->num_tracked++;
  return p->sequences[slot] = made;
}

static bool is_appended(const play *p, const tracked *t) {
  for (int i = 0; i < MOST_UNDER_WAY; i++)
    for (int j = 0; j < p->others[i].num_appends; j++)
      if (p->others[i].is_there && p->others[i].sequences[j] == t) return true;
  return false;
}

/* Of the pages that an append takes, those that a sequence of that length needs at least. */
static int64_t least_pages(const cache *c, int64_t length, int64_t num_rows) {
  return fa_divide_up(length + num_rows, c->page_size) - fa_divide_up(length, c->page_size);
}

static void begin_append(play *p, under_way *u) {
  const int64_t num_rows = random_integer(&p->random, 0, 3 * p->c.page_size);
  const int64_t num_free = fa_book_num_free(p->c.book);
  int64_t least = 0;
  u->num_appends = 0;
  for (int slot = 0; slot < MOST_SEQUENCES && u->num_appends < 3; slot++) {
    tracked *t = p->sequences[slot];
    if (!t || is_appended(p, t) || random_integer(&p->random, 0, 3)) continue;
    least += least_pages(&p->c, fa_sequence_length(p->c.book, &t->pages), num_rows);
    u->sequences[u->num_appends] = t, u->appends[u->num_appends++].sequence = &t->pages;
  }
  if (u->num_appends == 0) return;
  fa_error error;
  const fa_status status = fa_append_begin(p->c.book, u->appends, u->num_appends, num_rows, &error);
  const int64_t taken = num_free - fa_book_num_free(p->c.book);
  if (status) {
    CHECK(status == FA_STATUS_OUT_OF_MEMORY && num_free < least + u->num_appends, "%s", error.message);
    CHECK(taken == 0, "a full cache gave %d pages", (int)taken);
    p->num_full++;
    return;
  }
  u->is_there = true;
  for (int i = 0; i < u->num_appends; i++) {
    p->num_copied += u->appends[i].num_copied_rows > 0;
    least += u->appends[i].num_copied_rows > 0;
  }
  CHECK(taken == least, "%d pages taken where %d are needed", (int)taken, (int)least);
}

static void begin_reading(play *p, under_way *u) {
  const fa_sequence_pages *sequences[3];
  int count = 0;
  for (int slot = 0; slot < MOST_SEQUENCES && count < 3; slot++)
    if (p->sequences[slot] && random_integer(&p->random, 0, 3) == 0) {
      u->sequences[count] = p->sequences[slot];
      sequences[count++] = &p->sequences[slot]->pages;
    }
  u->num_appends = 0;
  u->is_there = !fa_reading_begin(p->c.book, sequences, count, &u->reading, NULL);
  CHECK(u->is_there, "a reading did not begin");
}

static void end(play *p, under_way *u) {
  if (!u->is_there) return;
  u->is_there = false;
  if (u->num_appends == 0) {
    for (int64_t b = 0; b < u->reading.batch; b++)
      CHECK(holds(&p->c, &u->reading, b, u->sequences[b]), "rows that are read have changed");
    fa_reading_end(p->c.book, &u->reading);
    return;
  }
  for (int i = 0; i < u->num_appends; i++)
    write_rows(&p->c, &u->appends[i], u->sequences[i]->writers[u->sequences[i]->num_writers - 1]);
  fa_append_end(p->c.book, u->appends, u->num_appends, random_integer(&p->random, 0, 5) != 0);
}

static void fork_or_release(play *p, int slot) {
  const int from = (int)random_integer(&p->random, 0, MOST_SEQUENCES - 1);
  tracked *t = p->sequences[slot];
  if (t) {
    CHECK(fa_sequence_release(p->c.book, &t->pages), "a sequence was released");
    p->sequences[slot] = NULL;
  } else if (p->sequences[from] && p->sequences[from]->num_writers < MOST_FORKS) {
    tracked *made = add(p, slot);
    CHECK(fork_tracked(p->c.book, p->sequences[from], made, p->num_tracked), "a fork failed");
  } else {
    add(p, slot);
  }
}

static void step(play *p) {
  under_way *u = &p->others[random_integer(&p->random, 0, MOST_UNDER_WAY - 1)];
  switch (random_integer(&p->random, 0, 5)) {
    case 0:
    case 1: end(p, u), begin_append(p, u); break;
    case 2: end(p, u), begin_reading(p, u); break;
    case 3: end(p, u); break;
    default: fork_or_release(p, (int)random_integer(&p->random, 0, MOST_SEQUENCES - 1));
  }
}

static void test_random(int64_t num_pages, int64_t page_size, uint64_t seed) {
  static play p;
  p = (play){.c = cache_new(num_pages, page_size), .random = random_stream(seed, 3)};
  for (int i = 0; i < 10000; i++) step(&p);
  for (int i = 0; i < MOST_UNDER_WAY; i++) end(&p, &p.others[i]);
  for (int slot = 0; slot < MOST_SEQUENCES; slot++)
    if (p.sequences[slot]) fa_sequence_release(p.c.book, &p.sequences[slot]->pages);
  CHECK(fa_book_num_free(p.c.book) == num_pages, "%d of %d pages are free", (int)fa_book_num_free(p.c.book),
        (int)num_pages);
  CHECK(p.num_full > 20, "the cache was full %ld times", p.num_full);
  CHECK(page_size == 1 || p.num_copied > 100, "%ld pages were copied", p.num_copied);
  for (int i = 0; i < p.num_tracked; i++) free(p.all[i]);
  cache_free(&p.c);
}

/* ---- threads --------------------------------------------------------------------------------------------- */

enum { NUM_THREADS = 4, NUM_SLOTS = 6, STEPS = 4000 };

/* Sequences that all threads use. One that is released stays where it is to the end, as others may still ask.
 */
typedef struct crowd {
  cache c;
  pthread_mutex_t mutex; /* guards the slots, the counts and what sequences are known to hold */
  tracked *slots[NUM_SLOTS], *all[NUM_SLOTS + NUM_THREADS * STEPS];
  int num_tracked;
  long num_read, num_wrong;
} crowd;

typedef struct worker {
  crowd *all;
  int number;
} worker;

static tracked *slot_of(crowd *w, fa_random *random) {
  pthread_mutex_lock(&w->mutex);
  tracked *t = w->slots[random_integer(random, 0, NUM_SLOTS - 1)];
  pthread_mutex_unlock(&w->mutex);
  return t;
}

static void append_to(crowd *w, tracked *t, fa_random *random) {
  fa_append append = {.sequence = &t->pages};
  if (fa_append_begin(w->c.book, &append, 1, random_integer(random, 0, 9), NULL)) return;
  write_rows(&w->c, &append, t->writers[t->num_writers - 1]);
  fa_append_end(w->c.book, &append, 1, random_integer(random, 0, 7) != 0);
}

static void read_from(crowd *w, tracked *t) {
  fa_reading reading;
  const fa_sequence_pages *sequence = &t->pages;
  if (fa_reading_begin(w->c.book, &sequence, 1, &reading, NULL)) return;
  const bool is_right = holds(&w->c, &reading, 0, t);
  fa_reading_end(w->c.book, &reading);
  pthread_mutex_lock(&w->mutex);
  w->num_read++, w->num_wrong += !is_right;
  pthread_mutex_unlock(&w->mutex);
}

/* A fork of one sequence, or a new one, takes the place of another, which is released. */
static void replace(crowd *w, tracked *from, fa_random *random) {
  pthread_mutex_lock(&w->mutex);
  const int writer = w->num_tracked + 1;
  tracked *made = w->all[w->num_tracked++] = tracked_new(writer);
  pthread_mutex_unlock(&w->mutex);
  if (from->num_writers < MOST_FORKS && random_integer(random, 0, 4))
    fork_tracked(w->c.book, from, made, writer);
  const int slot = (int)random_integer(random, 0, NUM_SLOTS - 1);
  pthread_mutex_lock(&w->mutex);
  tracked *released = w->slots[slot];
  w->slots[slot] = made;
  pthread_mutex_unlock(&w->mutex);
  fa_sequence_release(w->c.book, &released->pages);
}

static void *work(void *argument) {
  const worker *self = argument;
  crowd *w = self->all;
  fa_random random = random_stream(41, (uint64_t)self->number);
  for (int i = 0; i < STEPS; i++) {
    tracked *t = slot_of(w, &random);
    const int64_t kind = random_integer(&random, 0, 6);
    if (kind < 3)
      append_to(w, t, &random);
    else if (kind < 5)
      read_from(w, t);
    else
      replace(w, t, &random);
  }
  return NULL;
}

static void test_threads(void) {
  static crowd w;
  w = (crowd){.c = cache_new(60, 4), .mutex = PTHREAD_MUTEX_INITIALIZER};
  for (int i = 0; i < NUM_SLOTS; i++, w.num_tracked++) w.slots[i] = w.all[i] = tracked_new(i + 1);
  pthread_t threads[NUM_THREADS];
  worker workers[NUM_THREADS];
  for (int i = 0; i < NUM_THREADS; i++) {
    workers[i] = (worker){&w, i};
    if (pthread_create(&threads[i], NULL, work, &workers[i])) exit(2);
  }
  for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
  CHECK(w.num_wrong == 0, "%ld of %ld readings were wrong", w.num_wrong, w.num_read);
  CHECK(w.num_read > 1000, "%ld readings", w.num_read);
  for (int i = 0; i < NUM_SLOTS; i++) fa_sequence_release(w.c.book, &w.slots[i]->pages);
  CHECK(fa_book_num_free(w.c.book) == 60, "%d of 60 pages are free", (int)fa_book_num_free(w.c.book));
  for (int i = 0; i < w.num_tracked; i++) free(w.all[i]);
  cache_free(&w.c);
}

int main(void) {
  test_refusals();
  for (int64_t num_rows = 2; num_rows <= 7; num_rows += 5) { /* on the same page, and beyond it */
    check_fork_amid_append(num_rows, true);
    check_fork_amid_append(num_rows, false);
  }
  test_random(40, 1, 1);
  test_random(30, 3, 2);
  test_random(25, 16, 3);
  test_threads();
  return report();
}
