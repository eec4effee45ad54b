/* The book of a cache's pages: which sequence holds which of them, and who still reads them. It has numbers
 * alone; the memory is the caller's, who copies what the book says. Any number of threads may use a book and
 * its sequences at once. */
#ifndef FA_HOST_PAGES_H
#define FA_HOST_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "../flash_attention.h"

typedef struct fa_book fa_book;

/* A sequence: row i is row i % page_size of page pages[i / page_size]. It begins as {0}, without rows, and is
 * the book's to read and write. */
typedef struct fa_sequence_pages {
  int64_t length;
  int32_t *pages; /* [num_pages] */
  int32_t num_pages, capacity;
  bool is_appended, is_released;
} fa_sequence_pages;

/* What an append does to one sequence, between its begin and its end. */
typedef struct fa_append {
  fa_sequence_pages *sequence; /* the caller says which */
  int64_t first_row, num_rows; /* the new ones */
  int32_t copy_from, copy_to;  /* the new rows begin on a page that others hold too: its first */
  int32_t num_copied_rows;     /* so many rows are copied to a new page before; 0: there is none */
  int32_t first_page, num_pages;
  int32_t *pages; /* [num_pages] new ones, the sequence's from first_page on */
} fa_append;

/* Sequences as a forward reads them. */
typedef struct fa_reading {
  int64_t batch, max_pages;
  int32_t *lengths; /* [batch] */
  int32_t *table;   /* [batch, max_pages], -1 where there is no page; max_pages is at least 1 */
} fa_reading;

fa_status fa_book_new(int64_t num_pages, int64_t page_size, fa_book **book, fa_error *error);
void fa_book_free(fa_book *book);

/* Pages that nobody holds or reads. */
int64_t fa_book_num_free(fa_book *book);

/* The rows of a sequence, -1 where it was released. */
int64_t fa_sequence_length(fa_book *book, const fa_sequence_pages *sequence);

/* `to`, which is {0}, becomes a sequence of the same rows on the same pages. */
fa_status fa_sequence_fork(fa_book *book, const fa_sequence_pages *from, fa_sequence_pages *to,
                           fa_error *error);

/* The sequence gives up its pages, those of an append that is under way when that ends. False: it had done so
 * before. */
bool fa_sequence_release(fa_book *book, fa_sequence_pages *sequence);

/* Takes pages for num_rows more rows of each of count different sequences, waiting until nobody appends to any
 * of them. Where they do not suffice for all it fails, and nothing has changed. What it takes is the sequences'
 * own when the append ends, and free again where it was not done. */
fa_status fa_append_begin(fa_book *book, fa_append *appends, int64_t count, int64_t num_rows, fa_error *error);
void fa_append_end(fa_book *book, fa_append *appends, int64_t count, bool is_done);

/* The page that a new row is written to. */
int32_t fa_append_page(const fa_book *book, const fa_append *append, int64_t row);

/* The sequences' rows stay where they are, whatever happens to the sequences, until the reading ends. */
fa_status fa_reading_begin(fa_book *book, const fa_sequence_pages *const *sequences, int64_t count,
                           fa_reading *reading, fa_error *error);
void fa_reading_end(fa_book *book, fa_reading *reading);

#endif
