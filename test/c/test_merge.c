/*
 * Parts: merges and their gradients against the header's formulas in double, of 0 to 17 parts in any mixture of
 * types, with rows that parts leave empty, NaN and sinks of both layouts; the gradients against central
 * differences; and the contract that the backward of a part with the merged o and lse gives the part's
 * gradients. Sums of gradients, bit for bit.
 *
 *   --device cuda   on the GPU; without one it says that it is skipped
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "harness.h"
#include "random.h"

enum { MAX_PARTS = 17 };

static fa_device device = {FA_DEVICE_CPU, 0};

static void must(fa_status status, const fa_error *error) {
  if (status == FA_STATUS_OK) return;
  printf("FAILED: %s\n", error->message);
  exit(1);
}

/* ---- numbers: doubles here, a type's elements on the device ------------------------------------------------
 */

typedef struct numbers {
  fa_dtype dtype;
  int64_t count;
  double *x;
  void *memory;
} numbers;

static numbers numbers_new(fa_dtype dtype, int64_t count) {
  numbers n = {dtype, count, calloc((size_t)count + 1, sizeof(double)), NULL};
  fa_error error;
  must(fa_device_alloc(device, (size_t)count * fa_dtype_bytes(dtype), &n.memory, &error), &error);
  return n;
}

static void numbers_free(numbers *n) {
  free(n->x);
  fa_device_free(device, n->memory, NULL);
  *n = (numbers){0};
}

/* Rounds x to the type; the device gets it. */
static void upload(numbers *n) {
  const size_t bytes = fa_dtype_bytes(n->dtype);
  unsigned char *elements = malloc((size_t)n->count * bytes + 1);
  fa_error error;
  for (int64_t i = 0; i < n->count; i++) {
    set_element(n->dtype, elements + (size_t)i * bytes, n->x[i]);
    n->x[i] = get_element(n->dtype, elements + (size_t)i * bytes);
  }
  must(fa_device_copy(device, n->memory, elements, (size_t)n->count * bytes, NULL, &error), &error);
  free(elements);
}

static void download(numbers *n) {
  const size_t bytes = fa_dtype_bytes(n->dtype);
  unsigned char *elements = malloc((size_t)n->count * bytes + 1);
  fa_error error;
  must(fa_device_copy(device, elements, n->memory, (size_t)n->count * bytes, NULL, &error), &error);
  for (int64_t i = 0; i < n->count; i++) n->x[i] = get_element(n->dtype, elements + (size_t)i * bytes);
  free(elements);
}

static void poison(numbers *n) {
  for (int64_t i = 0; i < n->count; i++) n->x[i] = NAN;
  upload(n);
}

/* ---- a merge and everything that it reads and writes --------------------------------------------------------
 */

typedef struct part_numbers {
  numbers o, lse;
  bool heads_first; /* o lies as [batch, num_heads, seqlen_q, head_dim] */
} part_numbers;

typedef struct merge_case {
  int64_t batch, seqlen_q, num_heads, head_dim, num_sinks;
  int num_parts;
  bool sink_per_row, has_dlse;
  fa_dtype stat;
  part_numbers parts[MAX_PARTS], dparts[MAX_PARTS], merged, dmerged;
  numbers sink, dsink;
} merge_case;

static int64_t num_rows(const merge_case *c) { return c->batch * c->seqlen_q * c->num_heads; }

static part_numbers part_new(const merge_case *c, fa_dtype dtype, bool heads_first) {
  return (part_numbers){numbers_new(dtype, num_rows(c) * c->head_dim), numbers_new(c->stat, num_rows(c)),
                        heads_first};
}

static void part_free(part_numbers *part) {
  numbers_free(&part->o);
  numbers_free(&part->lse);
}

static int64_t sink_count(const merge_case *c) {
  return c->num_sinks * c->num_heads * (c->sink_per_row ? c->batch * c->seqlen_q : 1);
}

static merge_case case_new(merge_case c, fa_random *random, const fa_dtype *dtypes, int num_dtypes) {
#define ANY dtypes[random_integer(random, 0, num_dtypes - 1)]
  for (int p = 0; p < c.num_parts; p++) {
    const fa_dtype dtype = ANY;
    c.parts[p] = part_new(&c, dtype, random_integer(random, 0, 1));
    c.dparts[p] = part_new(&c, dtype, random_integer(random, 0, 1));
  }
  c.merged = part_new(&c, ANY, random_integer(random, 0, 1));
  c.dmerged = part_new(&c, ANY, random_integer(random, 0, 1));
  c.sink = numbers_new(FA_DTYPE_F32, sink_count(&c));
  c.dsink = numbers_new(FA_DTYPE_F32, sink_count(&c));
  return c;
#undef ANY
}

static void case_free(merge_case *c) {
  for (int p = 0; p < c->num_parts; p++) part_free(&c->parts[p]), part_free(&c->dparts[p]);
  part_free(&c->merged);
  part_free(&c->dmerged);
  numbers_free(&c->sink);
  numbers_free(&c->dsink);
}

static fa_part part_of(const merge_case *c, const part_numbers *from) {
  const int64_t d = c->head_dim, inner = from->heads_first ? c->seqlen_q : c->num_heads;
  fa_part part = {.o.data = from->o.memory, .lse = from->lse.memory, .dtype = from->o.dtype};
  part.o.stride_batch = c->seqlen_q * c->num_heads * d;
  part.o.stride_row = from->heads_first ? d : inner * d;
  part.o.stride_head = from->heads_first ? inner * d : d;
  return part;
}

static fa_merge merge_of(const merge_case *c) {
  fa_merge m;
  fa_merge_init(&m);
  m.batch = c->batch, m.seqlen_q = c->seqlen_q, m.num_heads = c->num_heads, m.head_dim = c->head_dim;
  m.num_parts = c->num_parts, m.num_sinks = c->num_sinks, m.sink_per_row = c->sink_per_row;
  for (int p = 0; p < c->num_parts; p++) {
    m.parts[p] = part_of(c, &c->parts[p]);
    m.dparts[p] = part_of(c, &c->dparts[p]);
  }
  m.merged = part_of(c, &c->merged);
  m.dmerged = part_of(c, &c->dmerged);
  if (!c->has_dlse) m.dmerged.lse = NULL;
  m.sink = c->sink.memory, m.dsink = c->dsink.memory;
  return m;
}

static void run(const fa_merge *m, bool is_backward, int num_threads) {
  fa_error error;
  fa_execution execution = {.workspace_bytes = fa_merge_workspace_bytes(m), .num_threads = num_threads};
  must(fa_device_alloc(device, execution.workspace_bytes, &execution.workspace, &error), &error);
  must((is_backward ? fa_merge_backward : fa_merge_forward)(m, device, &execution, &error), &error);
  must(fa_device_synchronize(device, NULL, &error), &error);
  fa_device_free(device, execution.workspace, NULL);
}

/* ---- where things are ---------------------------------------------------------------------------------------
 */

typedef struct row_of {
  int64_t b, i, h;
} row_of;

static row_of row_at(const merge_case *c, int64_t r) {
  return (row_of){r / c->num_heads / c->seqlen_q, r / c->num_heads % c->seqlen_q, r % c->num_heads};
}

static double *o_at(const merge_case *c, const part_numbers *part, row_of r) {
  const int64_t at = part->heads_first ? (r.b * c->num_heads + r.h) * c->seqlen_q + r.i
                                       : (r.b * c->seqlen_q + r.i) * c->num_heads + r.h;
  return part->o.x + at * c->head_dim;
}

static double *lse_at(const merge_case *c, const part_numbers *part, row_of r) {
  return part->lse.x + (r.b * c->num_heads + r.h) * c->seqlen_q + r.i;
}

static int64_t sink_at(const merge_case *c, row_of r, int64_t t) {
  const int64_t first = c->sink_per_row ? (r.b * c->seqlen_q + r.i) * c->num_sinks : 0;
  return (first + t) * c->num_heads + r.h;
}

static double unit_of(fa_dtype dtype) {
  return dtype == FA_DTYPE_F64   ? 0x1p-53
         : dtype == FA_DTYPE_F32 ? 0x1p-24
         : dtype == FA_DTYPE_F16 ? 0x1p-11
                                 : 0x1p-8;
}

/* Below this results may be subnormal, or 0 for it. */
static double tiny_of(fa_dtype dtype) {
  return dtype == FA_DTYPE_F16 ? 0x1p-24 : dtype == FA_DTYPE_F64 ? 1e-300 : 1e-37;
}

/* ---- the formulas, and how far rounding may take what comes out
 * ---------------------------------------------- */

/* In long double, as weights made with a rounded lse err by its rounding. */
static long double exact_lse(const merge_case *c, row_of r) {
  double largest = -INFINITY;
  long double sum = 0;
  for (int p = 0; p < c->num_parts; p++) largest = fmax(largest, *lse_at(c, &c->parts[p], r));
  for (int64_t t = 0; t < c->num_sinks; t++) largest = fmax(largest, c->sink.x[sink_at(c, r, t)]);
  if (largest == -INFINITY) return largest;
  for (int p = 0; p < c->num_parts; p++) sum += expl((long double)*lse_at(c, &c->parts[p], r) - largest);
  for (int64_t t = 0; t < c->num_sinks; t++) sum += expl((long double)c->sink.x[sink_at(c, r, t)] - largest);
  return largest + logl(sum);
}

static double weight_of(const merge_case *c, int p, row_of r, long double lse) {
  const double own = *lse_at(c, &c->parts[p], r);
  return own == -INFINITY ? 0 : (double)expl(own - lse);
}

static double dot(const merge_case *c, const part_numbers *o, row_of r, bool of_magnitudes) {
  const double *x = o_at(c, o, r), *y = o_at(c, &c->dmerged, r);
  double sum = 0;
  for (int64_t d = 0; d < c->head_dim; d++) sum += of_magnitudes ? fabs(x[d] * y[d]) : x[d] * y[d];
  return sum;
}

static bool is_near(double got, double expected, double allowed) {
  return got == expected || fabs(got - expected) <= allowed;
}

/* A weight is the exponential of a difference, whose rounding takes it by at most its unit, as x exp(-x) < 1.
 */
static void check_forward(const merge_case *c, const char *what) {
  const double unit = unit_of(c->stat), count = c->num_parts + (double)c->num_sinks + 16;
  const double out_unit = unit_of(c->merged.o.dtype), tiny = tiny_of(c->merged.o.dtype);
  long wrong = 0;
  for (int64_t x = 0; x < num_rows(c); x++) {
    const row_of r = row_at(c, x);
    const long double lse = exact_lse(c, r);
    const double got_lse = *lse_at(c, &c->merged, r);
    wrong += !is_near(got_lse, (double)lse, unit * (2 * fabs((double)lse) + 2 * count));
    for (int64_t d = 0; d < c->head_dim; d++) {
      double expected = 0, allowed = 0;
      for (int p = 0; p < c->num_parts; p++) {
        const double weight = weight_of(c, p, r, lse);
        if (*lse_at(c, &c->parts[p], r) == -INFINITY) continue;
        expected += weight * o_at(c, &c->parts[p], r)[d];
        allowed += unit * (count * weight + 1) * fabs(o_at(c, &c->parts[p], r)[d]);
      }
      wrong +=
          !is_near(o_at(c, &c->merged, r)[d], expected, allowed + out_unit * (fabs(expected) + allowed) + tiny);
    }
  }
  CHECK(wrong == 0, "%s: %ld numbers of o and lse are wrong", what, wrong);
}

static void check_backward(const merge_case *c, const char *what) {
  const double unit = unit_of(c->stat);
  double *sum = calloc((size_t)sink_count(c) + 1, sizeof *sum);
  double *sum_allowed = calloc((size_t)sink_count(c) + 1, sizeof *sum_allowed);
  long wrong = 0;
  for (int64_t x = 0; x < num_rows(c); x++) {
    const row_of r = row_at(c, x);
    const double lse = *lse_at(c, &c->merged, r), dlse = c->has_dlse ? *lse_at(c, &c->dmerged, r) : 0;
    const bool has_nothing = lse == -INFINITY;
    const double delta = has_nothing ? 0 : dot(c, &c->merged, r, false) - dlse;
    const double length = (double)c->head_dim + 4;
    const double delta_error = has_nothing ? 0 : unit * length * (dot(c, &c->merged, r, true) + fabs(dlse));
    for (int p = 0; p < c->num_parts; p++) {
      const bool is_empty = has_nothing || *lse_at(c, &c->parts[p], r) == -INFINITY;
      const double weight = is_empty ? 0 : weight_of(c, p, r, lse);
      const double own = is_empty ? 0 : dot(c, &c->parts[p], r, false) - delta;
      const double own_error = is_empty ? 0 : delta_error + unit * length * dot(c, &c->parts[p], r, true);
      wrong += !is_near(*lse_at(c, &c->dparts[p], r), weight * own,
                        weight * own_error + unit * (16 * weight + 1) * (fabs(own) + own_error) + 1e-37);
      const fa_dtype dtype = c->dparts[p].o.dtype;
      for (int64_t d = 0; d < c->head_dim; d++) {
        const double dout = is_empty ? 0 : o_at(c, &c->dmerged, r)[d], expected = weight * dout;
        const double allowed = unit * (16 * weight + 1) * fabs(dout) + 2 * unit_of(dtype) * fabs(expected);
        wrong += !is_near(o_at(c, &c->dparts[p], r)[d], expected, allowed + tiny_of(dtype));
      }
    }
    for (int64_t t = 0; t < c->num_sinks && !has_nothing; t++) {
      const double sink = c->sink.x[sink_at(c, r, t)], weight = sink == -INFINITY ? 0 : exp(sink - lse);
      sum[sink_at(c, r, t)] -= weight * delta;
      sum_allowed[sink_at(c, r, t)] += weight * delta_error + unit * (16 * weight + 1) * fabs(delta) + 1e-37;
    }
  }
  for (int64_t i = 0; i < sink_count(c); i++)
    wrong += !is_near(c->dsink.x[i], sum[i], sum_allowed[i] + 0x1p-23 * fabs(sum[i]));
  CHECK(wrong == 0, "%s: %ld gradients are wrong", what, wrong);
  free(sum);
  free(sum_allowed);
}

/* ---- drawing
 * ------------------------------------------------------------------------------------------------- */

static void draw(numbers *n, fa_random *random, double size) {
  for (int64_t i = 0; i < n->count; i++) n->x[i] = size * random_normal(random);
}

/* Some rows of a part are empty, and hold NaN; some of all parts are. */
static void draw_parts(merge_case *c, fa_random *random, double spread) {
  for (int p = 0; p < c->num_parts; p++) {
    draw(&c->parts[p].o, random, 1);
    draw(&c->parts[p].lse, random, spread);
  }
  for (int64_t x = 0; x < num_rows(c); x++) {
    const row_of r = row_at(c, x);
    const bool all = random_integer(random, 0, 9) == 0;
    for (int p = 0; p < c->num_parts; p++) {
      if (!all && random_integer(random, 0, 5) != 0) continue;
      *lse_at(c, &c->parts[p], r) = -INFINITY;
      for (int64_t d = 0; d < c->head_dim; d++) o_at(c, &c->parts[p], r)[d] = NAN;
    }
  }
  draw(&c->sink, random, spread); /* as large as the parts': a small one would hide in rounding */
  for (int64_t i = 0; i < c->sink.count; i++)
    if (random_integer(random, 0, 7) == 0) c->sink.x[i] = -INFINITY;
  for (int p = 0; p < c->num_parts; p++) upload(&c->parts[p].o), upload(&c->parts[p].lse);
  upload(&c->sink);
}

static void draw_gradients(merge_case *c, fa_random *random) {
  draw(&c->dmerged.o, random, 1);
  draw(&c->dmerged.lse, random, 1);
  for (int64_t x = 0; x < num_rows(c); x++) /* nobody looks at the dout of a row that has nothing */
    if (*lse_at(c, &c->merged, row_at(c, x)) == -INFINITY) o_at(c, &c->dmerged, row_at(c, x))[0] = INFINITY;
  upload(&c->dmerged.o);
  upload(&c->dmerged.lse);
}

static void poison_gradients(merge_case *c) {
  for (int p = 0; p < c->num_parts; p++) poison(&c->dparts[p].o), poison(&c->dparts[p].lse);
  poison(&c->dsink);
}

static void download_gradients(merge_case *c) {
  for (int p = 0; p < c->num_parts; p++) download(&c->dparts[p].o), download(&c->dparts[p].lse);
  download(&c->dsink);
}

/* ---- the tests
 * ----------------------------------------------------------------------------------------------- */

static merge_case random_case(fa_random *random, int round, const fa_dtype *dtypes, int num_dtypes) {
  merge_case c = {
      .batch = random_integer(random, 1, 3),
      .seqlen_q = random_integer(random, 1, 150),
      .num_heads = random_integer(random, 1, 5),
      .head_dim = round % 7 == 6 ? random_integer(random, 200, 400) : random_integer(random, 1, 140),
      .num_sinks = round % 3 ? random_integer(random, 1, 4) : 0,
      .num_parts = round % 18,
      .sink_per_row = round % 3 == 2,
      .has_dlse = round % 2,
      .stat = dtypes[0] == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32};
  if (round % 4 == 3) c.head_dim = (c.head_dim + 7) / 8 * 8;
  return case_new(c, random, dtypes, num_dtypes);
}

static void test_random(const fa_dtype *dtypes, int num_dtypes) {
  for (int round = 0; round < 54; round++) {
    fa_random random = random_stream(22, (uint64_t)round * 8 + dtypes[0]);
    merge_case c = random_case(&random, round, dtypes, num_dtypes);
    char what[96];
    snprintf(what, sizeof what, "%s, round %d: %d parts, %lld sinks%s, head_dim %lld", fa_dtype_name(dtypes[0]),
             round, c.num_parts, (long long)c.num_sinks, c.sink_per_row ? " a row" : "", (long long)c.head_dim);
    draw_parts(&c, &random, round % 5 == 4 ? 60 : 2);
    const fa_merge m = merge_of(&c);
    poison(&c.merged.o);
    poison(&c.merged.lse);
    run(&m, false, 3);
    download(&c.merged.o);
    download(&c.merged.lse);
    check_forward(&c, what);
    draw_gradients(&c, &random);
    poison_gradients(&c);
    run(&m, true, 3);
    download_gradients(&c);
    check_backward(&c, what);
    case_free(&c);
  }
}

/* What parts merge to may lie where one of them did, and the number of threads changes nothing. */
static void test_in_place(void) {
  const fa_dtype dtypes[] = {FA_DTYPE_BF16, FA_DTYPE_F32};
  for (int round = 0; round < 2; round++) {
    fa_random random = random_stream(23, (uint64_t)round);
    merge_case c = {.batch = 2,
                    .seqlen_q = 300,
                    .num_heads = 3,
                    .head_dim = 72,
                    .num_parts = 3,
                    .num_sinks = 2,
                    .stat = FA_DTYPE_F32};
    c = case_new(c, &random, &dtypes[round], 1);
    draw_parts(&c, &random, 2);
    fa_merge m = merge_of(&c);
    run(&m, false, 3);
    download(&c.merged.o);
    download(&c.merged.lse);
    m.merged = m.parts[1];
    run(&m, false, 1);
    download(&c.parts[1].o);
    download(&c.parts[1].lse);
    long differ = 0;
    for (int64_t x = 0; x < num_rows(&c); x++) {
      const row_of r = row_at(&c, x);
      differ += *lse_at(&c, &c.merged, r) != *lse_at(&c, &c.parts[1], r);
      differ += memcmp(o_at(&c, &c.merged, r), o_at(&c, &c.parts[1], r), 72 * sizeof(double)) != 0;
    }
    CHECK(differ == 0, "%s in place: %ld rows differ", fa_dtype_name(dtypes[round]), differ);
    case_free(&c);
  }
}

/* A NaN among the lse of parts and the sinks is in what they merge to, wherever it stands and whatever stands
 * before and behind it; but o is 0 where no part has anything. */
static void test_nan(fa_dtype stat) {
  enum { PARTS = 3, SINKS = 2, PLACES = PARTS + SINKS };
  const double others[] = {1, 70, -INFINITY};
  for (int place = 0; place < PLACES; place++)
    for (int before = 0; before < 3; before++)
      for (int behind = 0; behind < 3; behind++) {
        fa_random random = random_stream(25, 0);
        merge_case c = {.batch = 1,
                        .seqlen_q = 1,
                        .num_heads = 1,
                        .head_dim = 4,
                        .num_parts = PARTS,
                        .num_sinks = SINKS,
                        .stat = stat};
        c = case_new(c, &random, &stat, 1);
        for (int i = 0; i < PLACES; i++) {
          numbers *n = i < PARTS ? &c.parts[i].lse : &c.sink;
          n->x[i < PARTS ? 0 : i - PARTS] = i == place ? NAN : others[i < place ? before : behind];
          upload(n);
        }
        for (int p = 0; p < PARTS; p++) draw(&c.parts[p].o, &random, 1), upload(&c.parts[p].o);
        const fa_merge m = merge_of(&c);
        run(&m, false, 1);
        download(&c.merged.o);
        download(&c.merged.lse);
        bool has_part = false, is_right = isnan(c.merged.lse.x[0]);
        for (int p = 0; p < PARTS; p++) has_part = has_part || c.parts[p].lse.x[0] != -INFINITY;
        for (int d = 0; d < c.head_dim; d++)
          is_right = is_right && (has_part ? isnan(c.merged.o.x[d]) : c.merged.o.x[d] == 0);
        CHECK(is_right, "%s: a NaN at %d of %d lse and sinks, %g before it and %g behind: lse %g, o %g",
              fa_dtype_name(stat), place, PLACES, others[before], others[behind], c.merged.lse.x[0],
              c.merged.o.x[0]);
        case_free(&c);
      }
}

/* loss = sum(o * dout) + sum(lse * dlse) of a forward */
static double loss_of(merge_case *c, const fa_merge *m) {
  double loss = 0;
  run(m, false, 1);
  download(&c->merged.o);
  download(&c->merged.lse);
  for (int64_t x = 0; x < num_rows(c); x++) {
    const row_of r = row_at(c, x);
    if (*lse_at(c, &c->merged, r) == -INFINITY) continue;
    loss += dot(c, &c->merged, r, false) + *lse_at(c, &c->merged, r) * *lse_at(c, &c->dmerged, r);
  }
  return loss;
}

static double slope_by(merge_case *c, const fa_merge *m, numbers *n, int64_t i, double step) {
  const double x = n->x[i];
  double sides[2];
  for (int side = 0; side < 2; side++) {
    n->x[i] = side ? x - step : x + step;
    upload(n);
    sides[side] = loss_of(c, m);
  }
  n->x[i] = x;
  upload(n);
  return (sides[0] - sides[1]) / (2 * step);
}

/* f64, where steps do not round: each gradient by one number moved. */
static void test_differences(void) {
  const fa_dtype f64 = FA_DTYPE_F64;
  for (int per_row = 0; per_row < 2; per_row++) {
    fa_random random = random_stream(24, (uint64_t)per_row);
    merge_case c = {.batch = 2,
                    .seqlen_q = 3,
                    .num_heads = 2,
                    .head_dim = 3,
                    .num_parts = 3,
                    .num_sinks = 2,
                    .sink_per_row = per_row,
                    .has_dlse = true,
                    .stat = f64};
    c = case_new(c, &random, &f64, 1);
    draw_parts(&c, &random, 2);
    fa_merge m = merge_of(&c);
    run(&m, false, 1);
    download(&c.merged.o);
    download(&c.merged.lse);
    draw_gradients(&c, &random);
    poison_gradients(&c);
    run(&m, true, 1);
    download_gradients(&c);
    const double step = 0x1p-14; /* sinks are f32 */
    for (int p = 0; p < c.num_parts; p++)
      for (int64_t x = 0; x < num_rows(&c); x++) {
        const row_of r = row_at(&c, x);
        if (*lse_at(&c, &c.parts[p], r) == -INFINITY) continue;
        const double by_lse =
            slope_by(&c, &m, &c.parts[p].lse, lse_at(&c, &c.parts[p], r) - c.parts[p].lse.x, step);
        const double by_o = slope_by(&c, &m, &c.parts[p].o, o_at(&c, &c.parts[p], r) - c.parts[p].o.x, step);
        CHECK(is_near(*lse_at(&c, &c.dparts[p], r), by_lse, 1e-6), "dlse of part %d: %g, and by differences %g",
              p, *lse_at(&c, &c.dparts[p], r), by_lse);
        CHECK(is_near(*o_at(&c, &c.dparts[p], r), by_o, 1e-6), "do of part %d: %g, and by differences %g", p,
              *o_at(&c, &c.dparts[p], r), by_o);
      }
    for (int64_t i = 0; i < sink_count(&c); i++) {
      if (c.sink.x[i] == -INFINITY) continue;
      c.sink.x[i] = round(c.sink.x[i] * 64) / 64; /* so that steps are exact */
      upload(&c.sink);
    }
    run(&m, false, 1);
    run(&m, true, 1);
    download(&c.dsink);
    for (int64_t i = 0; i < sink_count(&c); i++) {
      const double expected = c.sink.x[i] == -INFINITY ? 0 : slope_by(&c, &m, &c.sink, i, step);
      CHECK(is_near(c.dsink.x[i], expected, 2e-6), "dsink: %g, and by differences %g", c.dsink.x[i], expected);
    }
    case_free(&c);
  }
}

/* ---- parts of attention itself
 * --------------------------------------------------------------------------------- */

enum { SEQLEN_Q = 45, SEQLEN_K = 61, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 24, SINKS = 2, BATCH = 2 };

static fa_problem attention_problem(fa_dtype dtype, int64_t num_keys, int64_t num_sinks) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = BATCH, p.seqlen_q = SEQLEN_Q, p.seqlen_k = num_keys, p.num_sinks = num_sinks;
  p.num_heads = HEADS, p.num_kv_heads = KV_HEADS, p.head_dim = HEAD_DIM, p.softcap = 5;
  return p;
}

/* Keys [begin, end) of [BATCH, SEQLEN_K, KV_HEADS * HEAD_DIM], from the whole to a part or back. */
static void move_keys(double *whole, double *part, int64_t begin, int64_t end, bool back) {
  const int64_t row = KV_HEADS * HEAD_DIM;
  for (int64_t b = 0; b < BATCH; b++)
    for (int64_t i = 0; i < (end - begin) * row; i++) {
      double *x = &whole[(b * SEQLEN_K + begin) * row + i], *y = &part[b * (end - begin) * row + i];
      if (back)
        *x = *y;
      else
        *y = *x;
    }
}

static double largest_difference(const double *x, const double *y, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; i++)
    if (x[i] != y[i] && !(fabs(x[i] - y[i]) <= largest)) largest = fabs(x[i] - y[i]);
  return largest;
}

static void take(numbers *n, const double *from) {
  memcpy(n->x, from, (size_t)n->count * sizeof *from);
  upload(n);
}

static void give(numbers *n, double *to) {
  download(n);
  memcpy(to, n->x, (size_t)n->count * sizeof *to);
}

/* Causal attention with large sinks, in parts: forward of each, the merge with the sinks, and the backward of
 * each with what was merged, against the whole. */
static void test_attention_in_parts(fa_dtype dtype, double allowed) {
  const fa_setup setup = {.device = device, .num_threads = 2};
  const int64_t ends[] = {0, 20, 21, 50, SEQLEN_K};
  const int num_parts = 4;
  fa_problem whole = attention_problem(dtype, SEQLEN_K, SINKS);
  whole.window_right = 0;
  fa_values x = values_new(&whole), got = values_new(&whole);
  values_fill(&x, &whole, dtype, FILL_NORMAL, 9);
  for (int i = 0; i < SINKS * HEADS; i++) x.data[FA_TENSOR_SINK][i] = 3 + 0.5 * i;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    memcpy(got.data[id], x.data[id], (size_t)values_count(&whole, id) * sizeof(double));
  must_run(&setup, &whole, FA_PASS_FORWARD, &x);
  must_run(&setup, &whole, FA_PASS_BACKWARD, &x);

  merge_case c = {.batch = BATCH,
                  .seqlen_q = SEQLEN_Q,
                  .num_heads = HEADS,
                  .head_dim = HEAD_DIM,
                  .num_parts = num_parts,
                  .num_sinks = SINKS,
                  .stat = dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32};
  fa_random random = random_stream(1, 1);
  c = case_new(c, &random, &dtype, 1);
  c.merged.heads_first = c.dmerged.heads_first = false;
  fa_problem problems[4];
  fa_values values[4];
  for (int p = 0; p < num_parts; p++) {
    const int64_t begin = ends[p], end = ends[p + 1];
    problems[p] = attention_problem(dtype, end - begin, 0);
    problems[p].window_right =
        SEQLEN_K - end; /* row i sees columns up to i + SEQLEN_K - SEQLEN_Q of the whole */
    values[p] = values_new(&problems[p]);
    values_fill(&values[p], &problems[p], dtype, FILL_NORMAL, 1);
    memcpy(values[p].data[FA_TENSOR_Q], x.data[FA_TENSOR_Q],
           (size_t)values_count(&whole, FA_TENSOR_Q) * sizeof(double));
    move_keys(x.data[FA_TENSOR_K], values[p].data[FA_TENSOR_K], begin, end, false);
    move_keys(x.data[FA_TENSOR_V], values[p].data[FA_TENSOR_V], begin, end, false);
    must_run(&setup, &problems[p], FA_PASS_FORWARD, &values[p]);
    c.parts[p].heads_first = false;
    take(&c.parts[p].o, values[p].data[FA_TENSOR_O]);
    take(&c.parts[p].lse, values[p].data[FA_TENSOR_LSE]);
  }
  take(&c.sink, x.data[FA_TENSOR_SINK]);
  take(&c.dmerged.o, x.data[FA_TENSOR_DOUT]);
  fa_merge m = merge_of(&c);
  run(&m, false, 2);
  m.num_parts = 0; /* the parts' own backwards make their gradients; what is left is that of the sinks */
  run(&m, true, 2);
  give(&c.merged.o, got.data[FA_TENSOR_O]);
  give(&c.merged.lse, got.data[FA_TENSOR_LSE]);
  give(&c.dsink, got.data[FA_TENSOR_DSINK]);
  memset(got.data[FA_TENSOR_DQ], 0, (size_t)values_count(&whole, FA_TENSOR_DQ) * sizeof(double));
  for (int p = 0; p < num_parts; p++) {
    const fa_tensor_id shared[] = {FA_TENSOR_DOUT, FA_TENSOR_O, FA_TENSOR_LSE};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
      const double *from = (shared[i] == FA_TENSOR_DOUT ? x : got).data[shared[i]];
      memcpy(values[p].data[shared[i]], from, (size_t)values_count(&whole, shared[i]) * sizeof(double));
    }
    must_run(&setup, &problems[p], FA_PASS_BACKWARD, &values[p]);
    for (int64_t i = 0; i < values_count(&whole, FA_TENSOR_DQ); i++)
      got.data[FA_TENSOR_DQ][i] += values[p].data[FA_TENSOR_DQ][i];
    move_keys(got.data[FA_TENSOR_DK], values[p].data[FA_TENSOR_DK], ends[p], ends[p + 1], true);
    move_keys(got.data[FA_TENSOR_DV], values[p].data[FA_TENSOR_DV], ends[p], ends[p + 1], true);
    values_free(&values[p]);
  }
  const fa_tensor_id outputs[] = {FA_TENSOR_O,  FA_TENSOR_LSE, FA_TENSOR_DQ,
                                  FA_TENSOR_DK, FA_TENSOR_DV,  FA_TENSOR_DSINK};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    const fa_tensor_id id = outputs[i];
    const int64_t count = values_count(&whole, id);
    const double error = largest_difference(got.data[id], x.data[id], count);
    double largest = 0;
    for (int64_t j = 0; j < count; j++) largest = fmax(largest, fabs(x.data[id][j]));
    const double own =
        id == FA_TENSOR_DSINK && dtype == FA_DTYPE_F64 ? 0x1p-23 : allowed; /* f32 whatever dtype is */
    CHECK(error <= own * largest, "%s in parts: %s errs by %.3g beside %.3g", fa_dtype_name(dtype),
          fa_tensor_name(id), error, largest);
  }
  case_free(&c);
  values_free(&x);
  values_free(&got);
}

/* ---- what is refused ----------------------------------------------------------------------------------------
 */

static void test_refused(void) {
  float numbers_of[8] = {0};
  fa_error error;
  fa_execution execution = {0};
  fa_merge m;
  fa_merge_init(&m);
  const fa_shape o = {.dtype = FA_DTYPE_F32, .rank = 4, .dims = {1, 2, 1, 2}, .size_bytes = 16};
  const fa_shape sink = {.dtype = FA_DTYPE_F32, .rank = 2, .dims = {3, 2}, .size_bytes = 24};
  CHECK(fa_merge_set_shapes(&m, &o, &sink, &error) == FA_STATUS_INVALID_ARGUMENT,
        "a sink of other heads passes");
  CHECK_TEXT(error.message, "sink: expected f32[3, 1], got f32[3, 2]");
  CHECK(fa_merge_set_shapes(&m, &sink, NULL, &error) == FA_STATUS_INVALID_ARGUMENT, "an o of rank 2 passes");
  CHECK_TEXT(error.message, "o: expected rank 4, [batch, seqlen_q, num_heads, head_dim], got rank 2");
  CHECK(fa_merge_set_shapes(&m, &o, NULL, &error) == FA_STATUS_OK, "%s", error.message);
  const fa_shape lse = {.dtype = FA_DTYPE_F32, .rank = 3, .dims = {1, 2, 2}, .size_bytes = 16};
  CHECK(fa_merge_check_lse(&m, "lse of part 1", &lse, &error), "an lse of other heads passes");
  CHECK_TEXT(error.message, "lse of part 1: expected f32[1, 1, 2], got f32[1, 2, 2]");
  const fa_shape f64 = {.dtype = FA_DTYPE_F64, .rank = 4, .dims = {1, 2, 1, 2}, .size_bytes = 32};
  CHECK(fa_merge_check_o(&m, "o of part 1", &f64, &error), "f64 passes beside f32");
  CHECK_TEXT(error.message, "o of part 1: expected type f32, bf16 or f16, as the merged o is not f64, got f64");
  CHECK(fa_merge_forward(&m, device, &execution, &error), "NULL passes");
  CHECK_TEXT(error.message, "o: expected a pointer, got NULL");
  m.merged = (fa_part){.o.data = numbers_of, .lse = numbers_of};
  m.num_parts = FA_MAX_PARTS + 1;
  CHECK(fa_merge_forward(&m, device, &execution, &error), "33 parts pass");
  CHECK_TEXT(error.message, "parts: expected 0 to 32, got 33");
  m.num_parts = 1;
  CHECK(fa_merge_forward(&m, device, &execution, &error), "a part without o passes");
  CHECK_TEXT(error.message, "o of part 0: expected a pointer, got NULL");
  m.num_parts = 0, m.num_sinks = 1, m.sink = numbers_of, m.dsink = numbers_of, m.dmerged = m.merged;
  CHECK(fa_merge_backward(&m, device, &execution, &error), "no workspace passes");
  CHECK_TEXT(error.message, "workspace: expected at least 8 bytes, got 0");
  execution.workspace_bytes = 8;
  CHECK(fa_merge_backward(&m, device, &execution, &error), "a workspace that is nowhere passes");
  execution.workspace = (char *)64 + 8;
  CHECK(fa_merge_backward(&m, device, &execution, &error), "a misaligned workspace passes");
  CHECK_TEXT(error.message, "workspace: expected an address aligned to 64 bytes, got 0x48");
  m.seqlen_q = 0, m.num_parts = 0, m.sink = NULL;
  CHECK(fa_merge_backward(&m, device, &execution, &error), "no sink passes where its gradient is wanted");
  CHECK_TEXT(error.message, "sink: expected a pointer, got NULL");
  m.dsink = NULL;
  CHECK(fa_merge_forward(&m, device, &execution, &error) == FA_STATUS_OK, "%s", error.message);
  CHECK(fa_merge_backward(&m, device, &execution, &error) == FA_STATUS_OK, "%s", error.message);
  m.sink = m.dsink = numbers_of;
  if (device.kind != FA_DEVICE_CPU) return;
  for (int log = 0; log <= 40; log += 40) { /* whose 2^40 batches nobody has the time to visit */
    numbers_of[0] = 7, m.batch = INT64_C(1) << log;
    CHECK(fa_merge_backward(&m, device, &execution, &error) == FA_STATUS_OK, "%s", error.message);
    CHECK(numbers_of[0] == 0, "the sum over no rows is %g", numbers_of[0]);
  }
}

/* ---- sums of gradients --------------------------------------------------------------------------------------
 */

static const void *from_element(const numbers *n, int64_t first) {
  return (const char *)n->memory + (size_t)first * fa_dtype_bytes(n->dtype);
}

/* Each step is rounded to f32, or f64, as the call does it. */
static double sum_of(const numbers *parts, int num_parts, const numbers *before, int64_t i) {
  const bool is_f64 = num_parts > 0 && parts->dtype == FA_DTYPE_F64;
  double sum = before ? before->x[i] : 0;
  for (int p = 0; p < num_parts; p++) sum = is_f64 ? sum + parts[p].x[i] : (float)(sum + parts[p].x[i]);
  return sum;
}

/* Parts that begin at their element `first`, with what comes before them or without, rounded or not. */
static void check_sum(fa_random *random, fa_dtype dtype, int num_parts, int64_t count, int64_t first,
                      bool continues, bool is_unrounded) {
  const fa_dtype wide = dtype == FA_DTYPE_F64 ? dtype : FA_DTYPE_F32;
  numbers parts[FA_MAX_SUMMANDS], before = numbers_new(wide, count + first);
  numbers total = numbers_new(is_unrounded ? wide : dtype, count + first);
  fa_sum sum = {.dtype = dtype, .num_parts = num_parts, .is_unrounded = is_unrounded, .count = count};
  fa_error error;
  for (int p = 0; p < num_parts; p++) {
    parts[p] = numbers_new(dtype, count + first);
    draw(&parts[p], random, 1 + p % 3);
    upload(&parts[p]);
    sum.parts[p] = from_element(&parts[p], first);
  }
  draw(&before, random, 2);
  upload(&before);
  poison(&total);
  if (continues) sum.before = from_element(&before, first);
  sum.total = (char *)total.memory + (size_t)first * fa_dtype_bytes(total.dtype);
  must(fa_sum_parts(&sum, device, NULL, &error), &error);
  must(fa_device_synchronize(device, NULL, &error), &error);
  download(&total);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < count + first; i++) {
    unsigned char element[8];
    set_element(total.dtype, element, sum_of(parts, num_parts, continues ? &before : NULL, i));
    const double x = total.x[i];
    num_wrong += i < first ? !isnan(x) : x != get_element(total.dtype, element);
  }
  CHECK(num_wrong == 0, "%s: %d parts of %lld from %lld: %lld numbers differ", fa_dtype_name(dtype), num_parts,
        (long long)count, (long long)first, (long long)num_wrong);
  for (int p = 0; p < num_parts; p++) numbers_free(&parts[p]);
  numbers_free(&before);
  numbers_free(&total);
}

static void test_sums(const fa_dtype *dtypes, int num_dtypes) {
  fa_random random = {5};
  const int numbers_of_parts[] = {0, 1, 2, 5, FA_MAX_SUMMANDS};
  const int64_t counts[] = {1, 7, 8, 1029, 20011};
  for (int type = 0; type < num_dtypes; type++)
    for (int i = 0; i < 5; i++)
      for (int n = 0; n < 5; n++)
        for (int flags = 0; flags < 4; flags++)
          check_sum(&random, dtypes[type], numbers_of_parts[i], counts[n], (n + flags) % 2, flags & 1,
                    flags & 2);
  fa_sum sum = {.dtype = FA_DTYPE_F32, .num_parts = FA_MAX_SUMMANDS + 1};
  fa_error error;
  CHECK(fa_sum_parts(&sum, device, NULL, &error) == FA_STATUS_INVALID_ARGUMENT, "129 parts pass");
  CHECK_TEXT(error.message, "parts: expected 0 to 128, got 129");
}

int main(int argc, char **argv) {
  const fa_dtype floats[] = {FA_DTYPE_F32, FA_DTYPE_BF16, FA_DTYPE_F16}, f64[] = {FA_DTYPE_F64};
  if (argc == 3 && strcmp(argv[1], "--device") == 0 && strcmp(argv[2], "cuda") == 0) {
    fa_error error;
    device.kind = FA_DEVICE_CUDA;
    if (fa_num_devices(FA_DEVICE_CUDA, &error) == 0) return printf("skipped: %s\n", error.message), 0;
  }
  test_random(floats, 3);
  for (int i = 0; i < 3; i++) test_random(floats + i, 1);
  test_in_place();
  test_nan(FA_DTYPE_F32);
  if (device.kind == FA_DEVICE_CPU) {
    test_random(f64, 1);
    test_nan(FA_DTYPE_F64);
    test_differences();
    test_attention_in_parts(FA_DTYPE_F64, 1e-13);
  }
  test_attention_in_parts(FA_DTYPE_F32, 1e-5);
  test_attention_in_parts(FA_DTYPE_BF16, 0.03);
  test_refused();
  test_sums(floats, 3);
  if (device.kind == FA_DEVICE_CPU) test_sums(f64, 1);
  return report();
}
