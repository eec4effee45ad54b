/*
 * A sequence is what one batch of a problem holds. It alone knows how many rows of q and columns of k there
 * are, where their lse and delta lie, and what the rows see: whoever computes asks the functions here. A plan,
 * which is made before there are tensors, reckons with the problem's seqlen_q and seqlen_k, the most that a
 * sequence can have.
 *
 *     rows are those of q, o, dout, dq and lse; columns are the rows of k, v, dk and dv
 */
#ifndef FA_CPU_SEQUENCE_H
#define FA_CPU_SEQUENCE_H

#include "../core/dropout.h"
#include "../core/integers.h"
#include "../core/problem.h"

typedef struct fa_sequence {
  int64_t batch;
  int64_t seqlen_q, seqlen_k;
  int64_t first_stat, stats_a_head; /* where lse and delta of head 0 begin, and how many a head has */
  int64_t num_bands;                /* of what the rows see; at least 1 */
  const int32_t *band_words;        /* [num_bands, 6], or NULL where the rows see the whole */
  fa_band whole;
  const int32_t *pages; /* [max_pages], where keys lie on pages, or NULL */
  int64_t page_size, num_pages;
} fa_sequence;

static inline fa_sequence fa_sequence_of(const fa_problem *problem, const fa_tensors *tensors, int64_t batch) {
  const bool has_bands = problem->num_bands > 0;
  const int32_t *lengths = tensors->key_lengths.data;
  const fa_band whole = fa_problem_band(problem);
  const int64_t first_band = problem->bands_batch > 1 ? batch * problem->num_bands : 0;
  return (fa_sequence){.batch = batch,
                       .pages = problem->max_pages > 0
                                    ? (const int32_t *)tensors->page_table.data + batch * problem->max_pages
                                    : NULL,
                       .page_size = problem->page_size,
                       .num_pages = problem->num_pages,
                       .seqlen_q = problem->seqlen_q,
                       .seqlen_k = problem->seqlen_k,
                       .first_stat = batch * problem->num_heads * problem->seqlen_q,
                       .stats_a_head = problem->seqlen_q,
                       .num_bands = has_bands ? problem->num_bands : 1,
                       .band_words = has_bands ? (const int32_t *)tensors->bands.data + 6 * first_band : NULL,
                       .whole = problem->lengths_batch > 0
                                    ? fa_band_to_length(whole, lengths[problem->lengths_batch > 1 ? batch : 0])
                                    : whole};
}

/* Where a key lies in k or v on pages, in pages and rows of one; a page that is not there is negative. */
typedef struct fa_page_row {
  int64_t page, row;
} fa_page_row;

static inline fa_page_row fa_page_row_of(const int32_t *pages, int64_t page_size, int64_t num_pages,
                                         int64_t key) {
  const int64_t page = pages[key / page_size];
  return (fa_page_row){page < num_pages ? page : -1, key % page_size};
}

/* Where the lse and the delta of a head's row 0 lie; those of its other rows follow. */
static inline int64_t fa_first_stat(const fa_sequence *sequence, int64_t head) {
  return sequence->first_stat + head * sequence->stats_a_head;
}

/* The cells that rows see are those of the bands, no cell in two of them. */
static inline fa_band fa_band_at(const fa_sequence *sequence, int64_t i) {
  return sequence->band_words ? fa_band_within(sequence->whole, sequence->band_words + 6 * i) : sequence->whole;
}

static inline fa_range fa_overlap(fa_range a, fa_range b) {
  return (fa_range){fa_max(a.begin, b.begin), fa_min(a.end, b.end)};
}

/* The least part of a range that holds another, and begins and ends where units of the range do. */
static inline fa_range fa_in_units(fa_range range, fa_range part, int64_t unit) {
  part = fa_overlap(range, part);
  if (part.begin >= part.end) return (fa_range){range.begin, range.begin};
  const int64_t begin = range.begin + (part.begin - range.begin) / unit * unit;
  return (fa_range){begin, fa_min(begin + fa_round_up(part.end - begin, unit), range.end)};
}

/* What there is of the rows in the band. */
static inline fa_range fa_rows_in_band(const fa_band *band, fa_range rows) {
  return fa_overlap(rows, (fa_range){band->q_begin, band->q_end});
}

/* The columns that some of the rows see in the band. Empty where end <= begin. */
static inline fa_range fa_columns_in_band(const fa_band *band, fa_range rows) {
  rows = fa_rows_in_band(band, rows);
  return rows.begin < rows.end ? fa_band_columns(*band, rows) : (fa_range){0, 0};
}

/* The rows that see some of the columns in the band. Empty where end <= begin. */
static inline fa_range fa_rows_that_see(const fa_band *band, fa_range columns) {
  columns = fa_overlap(columns, (fa_range){band->k_begin, band->k_end});
  return columns.begin < columns.end ? fa_band_rows(*band, columns) : (fa_range){0, 0};
}

/* Whether the row sees any of these columns, and the first band in which it does. */
static inline bool fa_sees_any(const fa_sequence *sequence, int64_t row, fa_range columns, fa_band *band) {
  for (int64_t i = 0; i < sequence->num_bands; i++) {
    *band = fa_band_at(sequence, i);
    fa_range seen = fa_overlap(fa_columns_in_band(band, (fa_range){row, row + 1}), columns);
    if (seen.begin < seen.end) return true;
  }
  return false;
}

static inline bool fa_sees_nothing(const fa_sequence *sequence, int64_t row) {
  fa_band band;
  return !fa_sees_any(sequence, row, (fa_range){0, sequence->seqlen_k}, &band);
}

/* What a head's scores are dropped by; rows are counted from the origin's on. */
static inline fa_dropout fa_dropout_in(const fa_problem *problem, const fa_tensors *tensors,
                                       const fa_sequence *sequence, int64_t head) {
  const uint32_t threshold = (uint32_t)(problem->dropout * FA_DROPOUT_ONE);
  return fa_dropout_of(tensors->dropout_seed.data, threshold,
                       (uint32_t)(problem->origin.batch + sequence->batch),
                       (uint32_t)(problem->origin.head + head));
}

/* ---- blocks ---------------------------------------------------------------------------------------- */

/* The blocks of rows or of columns that a loop visits, in its order. */
typedef struct fa_blocks {
  int64_t count;
  int64_t first;     /* block's number */
  int64_t size, end; /* of a block, and where the last one ends */
} fa_blocks;

static inline fa_range fa_block_at(fa_blocks blocks, int64_t i) {
  int64_t begin = (blocks.first + i) * blocks.size;
  return (fa_range){begin, fa_min(begin + blocks.size, blocks.end)};
}

/* The blocks that share something with the range. */
static inline fa_blocks fa_blocks_that_meet(fa_range range, int64_t size, int64_t end) {
  int64_t first = range.begin / size,
          count = range.end > range.begin ? fa_divide_up(range.end, size) - first : 0;
  return (fa_blocks){count, first, size, end};
}

/* All blocks of columns. */
static inline fa_blocks fa_blocks_of_columns(const fa_sequence *sequence, int64_t size) {
  return fa_blocks_that_meet((fa_range){0, sequence->seqlen_k}, size, sequence->seqlen_k);
}

/* The blocks of columns that these rows see something of in a band. */
static inline fa_blocks fa_blocks_seen_by(const fa_sequence *sequence, const fa_band *band, fa_range rows,
                                          int64_t size) {
  return fa_blocks_that_meet(fa_columns_in_band(band, rows), size, sequence->seqlen_k);
}

/* The blocks of rows that see something of these columns in a band. */
static inline fa_blocks fa_blocks_that_see(const fa_sequence *sequence, const fa_band *band, fa_range columns,
                                           int64_t size) {
  return fa_blocks_that_meet(fa_rows_that_see(band, columns), size, sequence->seqlen_q);
}

/* ---- tiles ----------------------------------------------------------------------------------------- */

/* The place of a tile of scores: some rows of one head of a sequence, by some columns, and the band in which
 * they see each other. A tile that has cells of several bands is computed once for each. Where rows_a_head is
 * not 0, rows are counted through heads from that one on, each of which has so many. */
typedef struct fa_tile {
  const fa_sequence *sequence;
  const fa_band *band;
  int64_t head;
  fa_range rows, columns;
  int64_t rows_a_head;
} fa_tile;

/* The row of a head that the tile's i-th one is. */
static inline int64_t fa_tile_row(const fa_tile *tile, int64_t i) {
  const int64_t row = tile->rows.begin + i;
  return tile->rows_a_head ? row % tile->rows_a_head : row;
}

/* The part of a tile from its i-th row on whose rows are of one head. */
static inline fa_tile fa_tile_of_head(const fa_tile *tile, int64_t i) {
  fa_tile part = *tile;
  if (!tile->rows_a_head) return part;
  const int64_t row = tile->rows.begin + i, first = row % tile->rows_a_head;
  part.head += row / tile->rows_a_head;
  part.rows = (fa_range){first, fa_min(first + tile->rows.end - row, tile->rows_a_head)};
  part.rows_a_head = 0;
  return part;
}

/* Rows of a head, among which are all of the tile's. */
static inline fa_range fa_tile_rows(const fa_tile *tile) {
  return tile->rows_a_head ? (fa_range){0, tile->rows_a_head} : tile->rows;
}

/* Whether any row of the tile sees any column of it, and whether every one sees all of them. */
static inline bool fa_tile_sees_any(const fa_tile *tile) {
  fa_range seen = fa_overlap(fa_columns_in_band(tile->band, fa_tile_rows(tile)), tile->columns);
  return seen.begin < seen.end;
}

static inline bool fa_tile_sees_all(const fa_tile *tile) {
  const fa_range rows = fa_tile_rows(tile);
  return rows.begin >= tile->band->q_begin && rows.end <= tile->band->q_end &&
         tile->columns.begin >= tile->band->k_begin && fa_band_sees_all(*tile->band, rows, tile->columns);
}

/* The columns of the tile that one of its rows sees, counted from the tile's first. Empty where end <= begin.
 */
static inline fa_range fa_tile_columns(const fa_tile *tile, int64_t row) {
  fa_range seen = fa_columns_in_band(tile->band, (fa_range){row, row + 1});
  int64_t first = tile->columns.begin, count = tile->columns.end - first;
  return (fa_range){fa_min(fa_max(seen.begin - first, 0), count), fa_min(fa_max(seen.end - first, 0), count)};
}

#endif
