/* Which scores dropout drops: the formula of flash_attention.h, which stands here and nowhere else; plain C
 * that nvcc compiles too. */
#ifndef FA_CORE_DROPOUT_H
#define FA_CORE_DROPOUT_H

#include "mask.h"

/* Rates are counted in 2^-16. */
enum { FA_DROPOUT_ONE = 1 << 16, FA_PHILOX_MULTIPLIER = (int)0xD256D193u, FA_PHILOX_WEYL = (int)0x9E3779B9u };

/* Two words of Philox2x32 (Salmon et al. 2011), and on their way its counter. */
typedef struct fa_words {
  uint32_t x[2];
} fa_words;

FA_MASK_FUNCTION fa_words fa_philox_round(fa_words counter, uint32_t key) {
  const uint64_t product = (uint64_t)counter.x[0] * (uint32_t)FA_PHILOX_MULTIPLIER;
  const fa_words next = {{(uint32_t)(product >> 32) ^ key ^ counter.x[1], (uint32_t)product}};
  return next;
}

FA_MASK_FUNCTION fa_words fa_philox(fa_words counter, uint32_t key, int num_rounds) {
  for (int i = 0; i < num_rounds; i++, key += (uint32_t)FA_PHILOX_WEYL) counter = fa_philox_round(counter, key);
  return counter;
}

/* Heads, rows and columns have words of their own, of as many rounds as leave room. A row's and a column's then
 * need two more, as they differ by chance and not by a count. Draws are as independent as these words are
 * wherever their rows and columns make no cycle: all of a row, all of a column, and any three. */
enum { FA_DROPOUT_WORD_ROUNDS = 10 };

/* What the scores of a head are dropped by. */
typedef struct fa_dropout {
  fa_words seed, head;
  uint32_t threshold; /* of 2^16: those below are dropped */
} fa_dropout;

/* batch and head are those of the whole problem. */
FA_MASK_FUNCTION fa_dropout fa_dropout_of(const uint32_t *seed, uint32_t threshold, uint32_t batch,
                                          uint32_t head) {
  const fa_words place = {{batch, head}}, words = {{seed[0], seed[1]}};
  const fa_words once = fa_philox(place, seed[0], FA_DROPOUT_WORD_ROUNDS);
  const fa_dropout dropout = {words, fa_philox(once, seed[1], FA_DROPOUT_WORD_ROUNDS), threshold};
  return dropout;
}

/* Rows, and columns likewise, come in pairs 8 apart: pair number n is n + n / 8 * 8 and 8 more. */
FA_MASK_FUNCTION uint32_t fa_dropout_pair(int64_t position) {
  return (uint32_t)(position >> 4 << 3 | (position & 7));
}

/* The words of a pair of the head's rows, counted in the whole problem, and of a pair of any head's columns. */
FA_MASK_FUNCTION fa_words fa_dropout_row(fa_dropout dropout, uint32_t pair) {
  const fa_words place = {{pair, dropout.head.x[1]}};
  return fa_philox(place, dropout.head.x[0], FA_DROPOUT_WORD_ROUNDS);
}
FA_MASK_FUNCTION fa_words fa_dropout_column(fa_dropout dropout, uint32_t pair) {
  const fa_words place = {{pair, dropout.seed.x[1]}};
  return fa_philox(place, dropout.seed.x[0], FA_DROPOUT_WORD_ROUNDS);
}

/* The words of a pair of rows and a pair of columns: one for each column, whose low half is the first row's.
 * The two rounds are written out, as nvcc would keep a loop, and a draw wait for the one before. */
FA_MASK_FUNCTION fa_words fa_dropout_draw(fa_words row, fa_words column) {
  const fa_words both = {{row.x[0] ^ column.x[0], row.x[1] ^ column.x[1]}};
  return fa_philox_round(fa_philox_round(both, 0), (uint32_t)FA_PHILOX_WEYL);
}
FA_MASK_FUNCTION fa_words fa_dropout_words(fa_dropout dropout, uint32_t row_pair, uint32_t column_pair) {
  return fa_dropout_draw(fa_dropout_row(dropout, row_pair), fa_dropout_column(dropout, column_pair));
}

/* Whether a score stays. row is that of the whole problem. */
FA_MASK_FUNCTION bool fa_dropout_keeps(fa_dropout dropout, int64_t row, int64_t column) {
  const fa_words words = fa_dropout_words(dropout, fa_dropout_pair(row), fa_dropout_pair(column));
  return (words.x[column >> 3 & 1] >> (row >> 3 & 1) * 16 & 0xffff) >= dropout.threshold;
}

#endif
