/* The check of bands: a sweep over the rows that keeps the bands of the current row in the order of their
 * columns. While no two bands share a cell, that order never changes, and two bands that are the first to share
 * one are neighbours in it before they do (Shamos and Hoey 1976). So it is enough to look at neighbours,
 * whenever two become such. */
#include "bands.h"

#include <stdlib.h>

#include "error.h"
#include "mask.h"
#include "problem.h"

/* Rows of a band in which its first and its last column are linear: each stays, or moves by 1 a row. Pieces
 * that meet the current row are nodes of a treap (Seidel and Aragon 1996) ordered by their first columns, and a
 * list. */
typedef struct piece {
  int64_t first_row, last_row;
  int64_t columns_at[2], slope[2]; /* of the first and the last column: column = columns_at + slope * row */
  int64_t band;
  uint32_t priority;
  int64_t child[2], neighbour[2]; /* before and after; -1: none */
} piece;

enum { FIRST, LAST };

static int64_t column_of(const piece *p, int end, int64_t row) {
  return p->columns_at[end] + p->slope[end] * row;
}

/* Rows at which pieces begin, or behind which they end, in order. */
typedef struct event {
  int64_t row, piece;
} event;

static int compare_events(const void *a, const void *b) {
  const event *x = a, *y = b;
  return x->row != y->row ? (x->row > y->row) - (x->row < y->row)
                          : (x->piece > y->piece) - (x->piece < y->piece);
}

/* ---- pieces ---------------------------------------------------------------------------------------------- */

/* Up to three pieces of a band: its columns begin where the band does or at a diagonal, and end likewise. */
static int64_t cut_band(fa_band band, int64_t number, piece *pieces) {
  const int64_t shift = band.k_end - band.q_end;
  const int64_t first = fa_max(band.q_begin, band.k_begin - shift - band.right);
  const int64_t last = fa_min(band.q_end, band.k_end - shift + band.left) - 1;
  if (first > last || band.left + band.right < 0) return 0;
  const int64_t leaves = band.k_begin - shift + band.left; /* from this row on, columns begin at a diagonal */
  const int64_t arrives = band.k_end - 1 - shift - band.right; /* from this row on, they end with the band */
  const int64_t begins[4] = {first, fa_max(first, fa_min(leaves, arrives)),
                             fa_max(first, fa_max(leaves, arrives)), last + 1};
  int64_t count = 0;
  for (int i = 0; i < 3; i++) {
    const int64_t row = begins[i], end = fa_min(begins[i + 1], last + 1);
    if (row >= end) continue;
    const bool moves = row >= leaves, ends = row >= arrives;
    pieces[count++] = (piece){
        .first_row = row,
        .last_row = end - 1,
        .columns_at = {moves ? shift - band.left : band.k_begin, ends ? band.k_end - 1 : shift + band.right},
        .slope = {moves, !ends},
        .band = number};
  }
  return count;
}

/* ---- the order of the pieces that meet a row
 * ------------------------------------------------------------------ */

static int64_t rotated(piece *pieces, int64_t root, int side) {
  const int64_t top = pieces[root].child[side];
  pieces[root].child[side] = pieces[top].child[!side];
  pieces[top].child[!side] = root;
  return top;
}

/* The tree with one more piece; the last piece that was passed to either side is its neighbour there. */
static int64_t with(piece *pieces, int64_t root, int64_t added, int64_t row) {
  if (root < 0) return added;
  const int side = column_of(&pieces[root], FIRST, row) < column_of(&pieces[added], FIRST, row);
  pieces[added].neighbour[!side] = root;
  const int64_t child = pieces[root].child[side] = with(pieces, pieces[root].child[side], added, row);
  return pieces[child].priority > pieces[root].priority ? rotated(pieces, root, side) : root;
}

static int64_t joined(piece *pieces, int64_t before, int64_t after) {
  if (before < 0 || after < 0) return before < 0 ? after : before;
  const int side = pieces[before].priority > pieces[after].priority;
  const int64_t root = side ? before : after;
  pieces[root].child[side] =
      side ? joined(pieces, pieces[before].child[1], after) : joined(pieces, before, pieces[after].child[0]);
  return root;
}

static int64_t without(piece *pieces, int64_t root, int64_t left_out, int64_t row) {
  if (root == left_out) return joined(pieces, pieces[root].child[0], pieces[root].child[1]);
  const int side = column_of(&pieces[root], FIRST, row) < column_of(&pieces[left_out], FIRST, row);
  pieces[root].child[side] = without(pieces, pieces[root].child[side], left_out, row);
  return root;
}

static void link_pieces(piece *pieces, int64_t before, int64_t after) {
  if (before >= 0) pieces[before].neighbour[1] = after;
  if (after >= 0) pieces[after].neighbour[0] = before;
}

/* Whether two neighbours share a cell in the rows that both have. Their distance is linear there, and changes
 * by at most 1 a row: its ends tell. */
static bool share_cells(const piece *pieces, int64_t before, int64_t after) {
  if (before < 0 || after < 0) return false;
  const piece *a = &pieces[before], *b = &pieces[after];
  const int64_t rows[2] = {fa_max(a->first_row, b->first_row), fa_min(a->last_row, b->last_row)};
  if (rows[0] > rows[1]) return false;
  return column_of(a, LAST, rows[0]) >= column_of(b, FIRST, rows[0]) ||
         column_of(a, LAST, rows[1]) >= column_of(b, FIRST, rows[1]);
}

/* Two pieces that share a cell, if any do: true, and which. begins and ends: events of all pieces, in order. */
static bool sweep(piece *pieces, const event *begins, const event *ends, int64_t count, int64_t *one,
                  int64_t *other) {
  int64_t root = -1, next_end = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = begins[i].row, added = begins[i].piece;
    for (; ends[next_end].row < row; next_end++) {
      const piece *ended = &pieces[ends[next_end].piece];
      root = without(pieces, root, ends[next_end].piece, ended->last_row);
      *one = ended->neighbour[0], *other = ended->neighbour[1];
      link_pieces(pieces, *one, *other);
      if (share_cells(pieces, *one, *other)) return true;
    }
    root = with(pieces, root, added, row);
    const int64_t before = pieces[added].neighbour[0], after = pieces[added].neighbour[1];
    link_pieces(pieces, before, added);
    link_pieces(pieces, added, after);
    *one = share_cells(pieces, before, added) ? before : after, *other = added;
    if (share_cells(pieces, before, added) || share_cells(pieces, added, after)) return true;
  }
  return false;
}

/* ---- the check
 * ------------------------------------------------------------------------------------------------- */

static const char *name_of(char text[64], const fa_problem *p, int64_t batch, int64_t number) {
  return p->bands_batch > 1 ? fa_text(text, 64, "band %lld of batch %lld", (long long)number, (long long)batch)
                            : fa_text(text, 64, "band %lld", (long long)number);
}

static fa_status check_range(const fa_problem *p, int64_t batch, int64_t number, const int32_t *words,
                             fa_error *error) {
  static const char *const names[4] = {"q_begin", "q_end", "k_begin", "k_end"};
  if (words[0] >= words[1] || words[2] >= words[3]) return FA_STATUS_OK; /* no cells */
  for (int i = 0; i < 4; i++) {
    const int64_t most = i < 2 ? p->seqlen_q : p->seqlen_k;
    if (words[i] < 0 || words[i] > most)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "bands",
                     FA_TEXT("%s from 0 to %s %lld in %s", names[i], i < 2 ? "seqlen_q" : "seqlen_k",
                             (long long)most, name_of((char[64]){0}, p, batch, number)),
                     FA_TEXT("%d", (int)words[i]));
  }
  return FA_STATUS_OK;
}

/* The pieces of a batch's bands, and their events in order. */
static int64_t cut_bands(const fa_problem *p, const int32_t *words, piece *pieces, event *begins, event *ends) {
  fa_problem canonical = *p;
  fa_problem_canonicalise(&canonical);
  const fa_band whole = fa_problem_band(&canonical);
  int64_t count = 0;
  for (int64_t number = 0; number < p->num_bands; number++)
    count += cut_band(fa_band_within(whole, words + 6 * number), number, pieces + count);
  uint32_t random = 1;
  for (int64_t i = 0; i < count; i++) {
    pieces[i].priority = random = random * 1664525u + 1013904223u; /* Knuth's and Lewis's constants */
    pieces[i].child[0] = pieces[i].child[1] = pieces[i].neighbour[0] = pieces[i].neighbour[1] = -1;
    begins[i] = (event){pieces[i].first_row, i};
    ends[i] = (event){pieces[i].last_row, i};
  }
  qsort(begins, (size_t)count, sizeof *begins, compare_events);
  qsort(ends, (size_t)count, sizeof *ends, compare_events);
  return count;
}

static fa_status check_batch(const fa_problem *p, int64_t batch, const int32_t *words, piece *pieces,
                             event *begins, event *ends, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int64_t number = 0; !status && number < p->num_bands; number++)
    status = check_range(p, batch, number, words + 6 * number, error);
  if (status) return status;
  int64_t one, other;
  if (!sweep(pieces, begins, ends, cut_bands(p, words, pieces, begins, ends), &one, &other))
    return FA_STATUS_OK;
  const int64_t a = pieces[one].band, b = pieces[other].band;
  return fa_fail(
      error, FA_STATUS_INVALID_ARGUMENT, "bands", "bands that share no cell",
      FA_TEXT("%s and band %lld", name_of((char[64]){0}, p, batch, fa_min(a, b)), (long long)fa_max(a, b)));
}

fa_status fa_bands_check(const fa_problem *problem, const void *words, fa_error *error) {
  const size_t most = 3 * (size_t)problem->num_bands;
  piece *pieces = malloc(most * (sizeof(piece) + 2 * sizeof(event)));
  if (!pieces) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "bands", "no memory to check them with");
  event *begins = (event *)(pieces + most), *ends = begins + most;
  fa_status status = FA_STATUS_OK;
  for (int64_t batch = 0; !status && batch < problem->bands_batch; batch++)
    status = check_batch(problem, batch, (const int32_t *)words + 6 * problem->num_bands * batch, pieces,
                         begins, ends, error);
  free(pieces);
  return status;
}

/* ---- key lengths ----------------------------------------------------------------------------------------- */

fa_status fa_key_lengths_check(const fa_problem *problem, const void *lengths, fa_error *error) {
  for (int64_t batch = 0; batch < problem->lengths_batch; batch++) {
    const int32_t length = ((const int32_t *)lengths)[batch];
    if (length < 0 || length > problem->seqlen_k)
      return fa_fail(
          error, FA_STATUS_INVALID_ARGUMENT, "key_lengths",
          FA_TEXT("0 to seqlen_k %lld in batch %lld", (long long)problem->seqlen_k, (long long)batch),
          FA_TEXT("%d", (int)length));
  }
  return FA_STATUS_OK;
}
