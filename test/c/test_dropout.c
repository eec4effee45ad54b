/*
 * Which scores dropout drops: Philox2x32 against its authors' known answers, the shares of 10^8 bits and of
 * what bits of neighbours agree, and a problem against its slices, which must drop what the whole drops.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../c_src/core/dropout.h"
#include "check.h"
#include "harness.h"

/* ---- the generator ------------------------------------------------------------------------------------ */

/* Of Random123's kat_vectors. */
static void test_known_answers(void) {
  static const struct {
    int num_rounds;
    uint32_t counter[2], key, expected[2];
  } answers[] = {
      {7, {0, 0}, 0, {0x257a3673, 0xcd26be2a}},
      {7, {~0u, ~0u}, ~0u, {0xab302c4d, 0x3dc9d239}},
      {7, {0x243f6a88, 0x85a308d3}, 0x13198a2e, {0xbedbbe6b, 0xe4c770b3}},
      {10, {0, 0}, 0, {0xff1dae59, 0x6cd10df2}},
      {10, {~0u, ~0u}, ~0u, {0x2c3f628b, 0xab4fd7ad}},
      {10, {0x243f6a88, 0x85a308d3}, 0x13198a2e, {0xdd7ce038, 0xf62a4c12}},
  };
  for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
    const fa_words counter = {{answers[i].counter[0], answers[i].counter[1]}};
    const fa_words words = fa_philox(counter, answers[i].key, answers[i].num_rounds);
    CHECK(memcmp(words.x, answers[i].expected, sizeof words.x) == 0, "answer %zu: %08x %08x", i, words.x[0],
          words.x[1]);
  }
}

/* ---- statistics --------------------------------------------------------------------------------------- */

enum { BATCHES = 4, HEADS = 6, ROWS = 2048, COLUMNS = 2048 }; /* 10^8 scores */

/* How many standard deviations count lies from what a share of total gives. */
static double deviations(double count, double total, double share) {
  return (count - total * share) / sqrt(total * share * (1 - share));
}

/* The scores of a head that stay, a bit each: [ROWS, COLUMNS / 64]. */
static void find_bits(fa_dropout dropout, uint64_t *bits) {
  memset(bits, 0, ROWS * (COLUMNS / 64) * sizeof *bits);
  for (uint32_t r = 0; r < ROWS / 2; r++)
    for (uint32_t c = 0; c < COLUMNS / 2; c++) {
      const fa_words words = fa_dropout_words(dropout, r, c);
      for (int n = 0; n < 4; n++) {
        const uint32_t row = r / 8 * 16 + r % 8 + 8 * (n & 1u), column = c / 8 * 16 + c % 8 + 8 * (n >> 1u);
        const uint64_t stays = (words.x[n >> 1] >> 16 * (n & 1) & 0xffff) >= dropout.threshold;
        bits[row * (COLUMNS / 64) + column / 64] |= stays << column % 64;
      }
    }
}

static double count_bits(const uint64_t *bits, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; i++) sum += __builtin_popcountll(bits[i]);
  return (double)sum;
}

/* How many scores stay together with the one that is so many rows and columns further on. */
static double count_pairs(const uint64_t *bits, int64_t rows, int64_t columns) {
  int64_t sum = 0;
  for (int64_t row = 0; row + rows < ROWS; row++)
    for (int64_t word = 0; word < COLUMNS / 64 - 1; word++) {
      const uint64_t *one = bits + row * (COLUMNS / 64) + word, *other = one + rows * (COLUMNS / 64);
      const uint64_t moved = columns ? other[0] >> columns | other[1] << (64 - columns) : other[0];
      sum += __builtin_popcountll(one[0] & moved);
    }
  return (double)sum;
}

/* How many rectangles, none of which share a score, have an odd number of corners that stay. A draw follows
 * from words of its row and its column, so these are what might not come by chance. rows and columns, a power
 * of 2 below 64, are between corners. */
static double count_odd_rectangles(const uint64_t *bits, int64_t rows, int64_t columns) {
  uint64_t first_corners = 0;
  int64_t sum = 0;
  for (int i = 0; i < 64; i++) first_corners |= (uint64_t)(i / columns % 2 == 0) << i;
  for (int64_t row = 0; row < ROWS; row++)
    for (int64_t word = 0; word < COLUMNS / 64 && row / rows % 2 == 0; word++) {
      const uint64_t *one = bits + row * (COLUMNS / 64) + word, sides = *one ^ one[rows * (COLUMNS / 64)];
      sum += __builtin_popcountll((sides ^ sides >> columns) & first_corners);
    }
  return (double)sum;
}

/* Keeps the farthest that anything lies from what chance gives: of some hundred numbers, 5 is once in 10^4. */
static void look_at(double *worst, double count, double total, double share) {
  *worst = fmax(*worst, fabs(deviations(count, total, share)));
}

static void test_statistics(double rate) {
  static const int64_t steps[][2] = {{0, 1}, {1, 0}, {1, 1}, {0, 8}, {8, 0}, {8, 8}, {0, 16}, {16, 0}, {3, 7}};
  const uint32_t threshold = (uint32_t)round(rate * FA_DROPOUT_ONE), seed[2] = {20, 26};
  static const int64_t sides[][2] = {{1, 1}, {1, 8}, {8, 1}, {8, 8}, {16, 16}, {512, 2}, {4, 32}};
  const double stays = 1 - threshold / 65536.0, odd = (1 - pow(1 - 2 * stays, 4)) / 2;
  const int64_t words = ROWS * (COLUMNS / 64);
  uint64_t *bits = malloc(2 * (size_t)words * sizeof *bits), *first = bits + words;
  double all = 0, of_head = 0, of_pairs = 0, of_heads = 0, of_lines = 0, of_rectangles = 0;
  double rectangles[sizeof sides / sizeof *sides] = {0};
  if (!bits) exit(2);
  for (uint32_t place = 0; place < BATCHES * HEADS; place++) {
    find_bits(fa_dropout_of(seed, threshold, place / HEADS, place % HEADS), bits);
    const double count = count_bits(bits, words);
    all += count;
    look_at(&of_head, count, (double)ROWS * COLUMNS, stays);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
      look_at(&of_pairs, count_pairs(bits, steps[i][0], steps[i][1]),
              (double)(ROWS - steps[i][0]) * (COLUMNS - 64), stays * stays);
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
      rectangles[i] += count_odd_rectangles(bits, sides[i][0], sides[i][1]);
    for (int64_t row = 0; row < ROWS; row++)
      look_at(&of_lines, count_bits(bits + row * (COLUMNS / 64), COLUMNS / 64), COLUMNS, stays);
    if (place == 0) {
      memcpy(first, bits, (size_t)words * sizeof *bits);
      continue;
    }
    for (int64_t i = 0; i < words; i++) bits[i] &= first[i];
    look_at(&of_heads, count_bits(bits, words), (double)ROWS * COLUMNS, stays * stays);
  }
  for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
    look_at(&of_rectangles, rectangles[i], BATCHES * HEADS * ROWS * (COLUMNS / 4.0), odd);
  const double whole = fabs(deviations(all, (double)BATCHES * HEADS * ROWS * COLUMNS, stays));
  CHECK(whole < 4, "rate %g: the share of all lies %.1f deviations off", rate, whole);
  CHECK(of_head < 4.5, "rate %g: that of a head %.1f", rate, of_head);
  CHECK(of_lines < 6, "rate %g: that of a row %.1f", rate, of_lines); /* of 49152 rows */
  CHECK(of_pairs < 5, "rate %g: that of pairs of scores %.1f", rate, of_pairs);
  CHECK(of_heads < 4.5, "rate %g: that of pairs of heads %.1f", rate, of_heads);
  CHECK(of_rectangles < 4, "rate %g: that of odd rectangles %.1f", rate, of_rectangles);
  free(bits);
}

/* The rate is what was asked for to 2^-17. */
static void test_rates(void) {
  fa_problem p;
  fa_plan plan;
  fa_problem_init(&p);
  p.batch = p.seqlen_q = p.seqlen_k = p.num_heads = p.num_kv_heads = p.head_dim = 1, p.num_seed_words = 2;
  for (double rate = 0; rate < 1 - 0x1p-16; rate += 0.0377) {
    p.dropout = rate;
    CHECK(fa_plan_init(&plan, &p, FA_PASS_FORWARD, (fa_device){FA_DEVICE_CPU, 0}, NULL) == FA_STATUS_OK &&
              fabs(plan.problem.dropout - rate) <= 0x1p-17,
          "rate %g becomes %g", rate, plan.problem.dropout);
  }
}

/* ---- slices ------------------------------------------------------------------------------------------- */

/* q of a part, or o and lse, of the whole's one batch. */
static void take_part(const fa_problem *whole, const fa_problem *part, const fa_values *from, fa_values *to,
                      bool back) {
  const fa_origin *at = &part->origin;
  for (int64_t i = 0; i < part->seqlen_q; i++)
    for (int64_t h = 0; h < part->num_heads; h++) {
      const int64_t row = (at->row + i) * whole->num_heads + at->head + h;
      const int64_t d = whole->head_dim, its = i * part->num_heads + h;
      const int64_t stat = (at->head + h) * whole->seqlen_q + at->row + i;
      if (!back) memcpy(to->data[FA_TENSOR_Q] + its * d, from->data[FA_TENSOR_Q] + row * d, (size_t)d * 8);
      if (back) memcpy(to->data[FA_TENSOR_O] + its * d, from->data[FA_TENSOR_O] + row * d, (size_t)d * 8);
      if (back) to->data[FA_TENSOR_LSE][h * part->seqlen_q + i] = from->data[FA_TENSOR_LSE][stat];
    }
}

/* Rows of a head anywhere, which see the whole's keys, give the bits that they give in the whole. */
static void test_part(fa_device_kind kind, int64_t head, int64_t first_row, int64_t num_rows) {
  const fa_setup setup = {.device = {kind, 0}};
  fa_problem whole;
  fa_problem_init(&whole);
  whole.batch = 1, whole.seqlen_q = 230, whole.seqlen_k = 131, whole.head_dim = 8, whole.num_seed_words = 2;
  whole.num_heads = 4, whole.num_kv_heads = 1, whole.dropout = 0.3, whole.origin.batch = 3;
  fa_problem part = whole;
  part.seqlen_q = num_rows, part.num_heads = 2, part.origin = (fa_origin){3, head, first_row};
  fa_values x = values_new(&whole), own = values_new(&part), expected = values_new(&part);
  values_fill(&x, &whole, FA_DTYPE_F32, FILL_NORMAL, 5);
  values_fill(&own, &part, FA_DTYPE_F32, FILL_NORMAL, 5);
  must_run(&setup, &whole, FA_PASS_FORWARD, &x);
  take_part(&whole, &part, &x, &own, false);
  take_part(&whole, &part, &x, &expected, true);
  must_run(&setup, &part, FA_PASS_FORWARD, &own);
  CHECK(values_equal(&part, FA_TENSOR_O, &own, &expected), "%s: o of rows from %lld on, head %lld",
        fa_device_kind_name(kind), (long long)first_row, (long long)head);
  CHECK(values_equal(&part, FA_TENSOR_LSE, &own, &expected), "lse of a part");
  part.origin.row += 16;
  must_run(&setup, &part, FA_PASS_FORWARD, &own);
  CHECK(!values_equal(&part, FA_TENSOR_O, &own, &expected), "o does not depend on where rows lie");
  values_free(&x);
  values_free(&own);
  values_free(&expected);
}

static void test_parts(void) {
  static const fa_device_kind kinds[] = {FA_DEVICE_REFERENCE, FA_DEVICE_CPU};
  static const int64_t parts[][3] = {{0, 0, 230}, {1, 0, 100}, {2, 16, 130}, {1, 37, 190}, {2, 229, 1}};
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
      test_part(kinds[k], parts[i][0], parts[i][1], parts[i][2]);
}

int main(void) {
  test_known_answers();
  test_statistics(0.1);
  test_rates();
  test_parts();
  return report();
}
