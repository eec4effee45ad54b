/* The model of what few rows cost, by which keys are split into parts. Its constants are the H200's; of other
 * GPUs it is their ratios that matter. */
#include "decode.h"

#include <math.h>

#include "../c_src/core/integers.h"
#include "../c_src/core/problem.h"

/* The rows for which a tile of the ordinary kernels is mostly empty. */
enum { FEW_ROWS = 64, MOST_CLUSTERED = 16, MOST_PARTS = 512, TILE_ROWS = 128 };

int64_t fa_cuda_packed_rows(const fa_problem *p) { return p->seqlen_q * (p->num_heads / p->num_kv_heads); }

static bool reads_cache(const fa_problem *p) { return p->lengths_batch > 0 || p->max_pages > 0; }

static int64_t num_tiles_of(const fa_problem *p) {
  return p->batch * p->num_heads * fa_divide_up(p->seqlen_q, TILE_ROWS);
}

/* Of a forward in parts, whose column blocks have TILE_COLUMNS: as many as give each multiprocessor a tile, if
 * that saves more column blocks than the merge takes time for, and if rows see much the same columns. */
enum { TILE_COLUMNS = 128, LEAST_BLOCKS_SAVED = 12, LEAST_BLOCKS_A_PART = 4 };
int64_t fa_cuda_key_parts(const fa_problem *p, int64_t num_multiprocessors) {
  const int64_t num_tiles = num_tiles_of(p), num_blocks = fa_divide_up(p->seqlen_k, TILE_COLUMNS);
  if (p->seqlen_q * 2 <= TILE_ROWS || num_tiles == 0) return 1;
  const int64_t most = fa_min(num_blocks / LEAST_BLOCKS_A_PART, FA_MAX_PARTS);
  const int64_t parts = fa_min(num_multiprocessors / num_tiles, most);
  if (parts < 2 || num_blocks - fa_divide_up(num_blocks, parts) < LEAST_BLOCKS_SAVED) return 1;
  const fa_band band = fa_problem_band(p);
  const fa_range first = fa_band_columns(band, (fa_range){0, 1}),
                 last = fa_band_columns(band, (fa_range){p->seqlen_q - 1, p->seqlen_q});
  const int64_t seen_by_all = fa_min(first.end, last.end) - fa_max(first.begin, last.begin);
  return seen_by_all * 4 >= p->seqlen_k * 3 ? parts : 1;
}

/* What a choice of parts is judged by. */
typedef struct costs {
  double num_units, num_keys, key_bytes; /* keys that the rows of a unit see at most */
  double bytes_a_us;                     /* of one block alone */
} costs;

/* Microseconds. All blocks together read 4.5 TB/s, one alone what its products allow; it takes 1.5 us to begin
 * and to end. */
static double estimate(const costs *c, double num_parts, double num_slots, double merge, double most) {
  const double num_blocks = c->num_units * num_parts, at_once = fmin(num_blocks, num_slots);
  const double bytes_a_us = fmin(4.5e6 / at_once, fmin(most, c->bytes_a_us));
  const double bytes = ceil(c->num_keys / num_parts) * c->key_bytes;
  return ceil(num_blocks / num_slots) * (bytes / bytes_a_us + 1.5) + merge;
}

/* The keys that a row block sees at most, or where there are several that a row may. */
static int64_t num_keys_of(const fa_problem *p, int64_t num_q_blocks) {
  const fa_range columns = fa_band_columns(fa_problem_band(p), (fa_range){0, p->seqlen_q});
  return num_q_blocks > 1 ? p->seqlen_k : fa_max(columns.end - columns.begin, 0);
}

static double bytes_a_key(const fa_problem *p) {
  return 2.0 * (double)p->head_dim * (double)fa_dtype_bytes(p->dtype);
}

/* What one block of threads alone reads in a microsecond: less where rows that share a tile have products of
 * their own. */
static double bytes_a_us(const fa_cuda_kernel *kernel) {
  return kernel->mapped || kernel->block_q <= 16 ? 45e3 : 12.5e3;
}

/* Of a second kernel that merges parts, which are f32 rows of o: it begins, reads them one after the other,
 * and each is written before that. */
static double merge_time(const fa_problem *p, double num_parts) {
  const double rows = (double)(p->batch * p->seqlen_q * p->num_heads);
  return 2.3 + 0.08 * num_parts + rows * num_parts * 8 * (double)p->head_dim / 4.5e6;
}

/* The parts that take the least time, and that time. */
static fa_cuda_parts best_parts(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                                bool can_cluster, double *least) {
  const int64_t num_q_blocks = fa_divide_up(fa_cuda_packed_rows(p), kernel->block_q);
  const int64_t units = p->batch * p->num_kv_heads * num_q_blocks;
  const int64_t num_keys = num_keys_of(p, num_q_blocks);
  const int64_t num_slots = num_multiprocessors * kernel->blocks_per_sm;
  const costs c = {(double)units, (double)num_keys, bytes_a_key(p), bytes_a_us(kernel)};
  const int64_t most = fa_min(fa_divide_up(num_keys, kernel->block_k), MOST_PARTS);
  fa_cuda_parts best = {.num_parts = 1};
  *least = estimate(&c, 1, (double)num_slots, 0, INFINITY);
  /* Clusters of more than 8 blocks begin late and read slowly; those that would share multiprocessors do not
   * begin together. */
  for (int64_t parts = 2; can_cluster && parts <= fa_min(most, MOST_CLUSTERED); parts *= 2) {
    const double time = estimate(&c, (double)parts, (double)num_multiprocessors, parts > 8 ? 2.5 : 1,
                                 parts > 8 ? 22e3 : INFINITY);
    if (time < *least) *least = time, best = (fa_cuda_parts){.num_parts = (int32_t)parts, .in_cluster = 1};
  }
  /* Half of the slots, which are a block for each multiprocessor where two share one, up to all four times. */
  for (int64_t halves = 1; halves <= 8; halves += halves > 1 ? 2 : 1) {
    const int64_t parts = fa_min(halves * num_slots / (2 * fa_max(units, 1)), most);
    if (parts < 2) continue;
    const double time = estimate(&c, (double)parts, (double)num_slots, merge_time(p, (double)parts), INFINITY);
    if (time < *least) *least = time, best = (fa_cuda_parts){.num_parts = (int32_t)parts};
  }
  return best;
}

fa_cuda_parts fa_cuda_choose_parts(const fa_problem *p, const fa_cuda_kernel *kernel,
                                   int64_t num_multiprocessors, bool can_cluster) {
  double least;
  return best_parts(p, kernel, num_multiprocessors, can_cluster, &least);
}

/* Tiles of rows that take a third of the multiprocessors are as fast as all of these are on smaller tiles,
 * whose products are slower. */
static bool pays_beside_cache(const fa_problem *p, int64_t num_multiprocessors) {
  return p->max_pages > 0 || fa_cuda_packed_rows(p) <= FEW_ROWS ||
         (num_tiles_of(p) * 3 <= num_multiprocessors && p->seqlen_k >= 4096);
}

/* What the ordinary kernels were measured at stays theirs, but where the model says that they take longer and
 * heads share keys, which a kernel with maps reads once for few rows; or where their tiles leave two
 * multiprocessors of three idle and they take half as long again. A tile of one row reads 60 GB/s, one of 128
 * rows less. The products of f32 here are not those of its backward, which must round scores as the forward
 * did. */
static bool pays_for_plain(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                           bool can_cluster) {
  const int64_t num_tiles = num_tiles_of(p);
  const bool few = kernel->mapped && p->num_heads > p->num_kv_heads && fa_cuda_packed_rows(p) <= FEW_ROWS;
  if (p->dtype == FA_DTYPE_F32 || (!few && num_tiles * 3 > num_multiprocessors)) return false;
  const costs ordinary = {(double)num_tiles, (double)num_keys_of(p, fa_divide_up(p->seqlen_q, TILE_ROWS)),
                          bytes_a_key(p), 60e3};
  double least;
  best_parts(p, kernel, num_multiprocessors, can_cluster, &least);
  return least * (few ? 1 : 1.5) <= estimate(&ordinary, 1, (double)num_multiprocessors, 0, INFINITY);
}

bool fa_cuda_pays_in_parts(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                           bool can_cluster) {
  return reads_cache(p) ? pays_beside_cache(p, num_multiprocessors)
                        : pays_for_plain(p, kernel, num_multiprocessors, can_cluster);
}
