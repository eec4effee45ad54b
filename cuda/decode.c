/* The model of what few rows cost, by which keys are split into parts. Its constants are the H200's; of other
 * GPUs it is their ratios that matter. */
#include "decode.h"

#include <math.h>

#include "../c_src/core/integers.h"
#include "../c_src/core/problem.h"

/* FEW_ROWS: for which a tile of the ordinary kernels is mostly empty; FEWEST_ROWS: that one product takes
 * without maps; MOST_TOGETHER: multiprocessors of a group, on an H100 and an H200. */
enum {
  FEW_ROWS = 64,
  FEWEST_ROWS = 16,
  MOST_CLUSTERED = 16,
  MOST_TOGETHER = 18,
  MOST_PARTS = 512,
  TILE_ROWS = 128
};

int64_t fa_cuda_packed_rows(const fa_problem *p) { return p->seqlen_q * (p->num_heads / p->num_kv_heads); }

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

/* What all blocks together read, and those of clusters of more than 8; and how long one takes to begin and to
 * end that computes as the ordinary kernels do or reads by maps. Others have 2 us more. */
static const double MEMORY_BYTES_A_US = 4.3e6, LARGE_CLUSTERS_BYTES_A_US = 2.9e6;
static const double ORDINARY_BEGIN = 1.5;

/* What a choice of parts is judged by. */
typedef struct costs {
  double num_units, num_keys, key_bytes; /* keys that the rows of a unit see at most */
  double bytes_a_us;                     /* of one block alone */
  double begin;                          /* what a block takes to begin and to end */
} costs;

/* Microseconds. All blocks together read so many bytes in one, a block alone what its products allow. */
static double estimate(const costs *c, double num_parts, double num_slots, double merge,
                       double all_bytes_a_us) {
  const double num_blocks = c->num_units * num_parts, at_once = fmin(num_blocks, num_slots);
  const double bytes_a_us = fmin(all_bytes_a_us / at_once, c->bytes_a_us);
  const double bytes = ceil(c->num_keys / num_parts) * c->key_bytes;
  return ceil(num_blocks / num_slots) * (bytes / bytes_a_us + c->begin) + merge;
}

/* The keys that a row block sees at most, or where there are several that a row may. */
static int64_t num_keys_of(const fa_problem *p, int64_t num_q_blocks) {
  const fa_range columns = fa_band_columns(fa_problem_band(p), (fa_range){0, p->seqlen_q});
  return num_q_blocks > 1 ? p->seqlen_k : fa_max(columns.end - columns.begin, 0);
}

static double bytes_a_key(const fa_problem *p) {
  return 2.0 * (double)p->head_dim * (double)fa_dtype_bytes(p->dtype);
}

double fa_cuda_key_bytes(const fa_problem *p) {
  return (double)p->batch * (double)p->seqlen_k * (double)p->num_kv_heads * bytes_a_key(p);
}

/* Whether k and v had better leave the second cache first: what others have left there to be written then need
 * not make room for them. Of many times what the cache holds they would leave too soon. */
static const double CACHE_BYTES = 50e6;
static bool leaves_first(const fa_problem *p) { return fa_cuda_key_bytes(p) <= 4.5 * CACHE_BYTES; }

/* Whether the copies of a kernel with maps suit the keys. Rows of k and v that begin anywhere in a line of the
 * cache come into boxes at half the rate, which is slower than all else where they are not in the cache. */
static bool suits(const fa_problem *p, const fa_cuda_kernel *kernel) {
  enum { LINE_BYTES = 128 };
  const int64_t row_bytes = p->head_dim * (int64_t)fa_dtype_bytes(p->dtype);
  const bool straddles = row_bytes % LINE_BYTES != 0 && LINE_BYTES % row_bytes != 0;
  return !(kernel->mapped && kernel->bucket <= 128 && straddles && fa_cuda_packed_rows(p) <= FEWEST_ROWS &&
           fa_cuda_key_bytes(p) > CACHE_BYTES);
}

/* Whether something is added to each score. */
static bool adds(const fa_problem *p) { return p->bias_batch > 0 || p->alibi_batch > 0; }

/* What one block of threads alone reads in a microsecond: less where rows that share a tile have products of
 * their own, for each of which f32 is split anew, or where something is added to each score, mostly by a single
 * warp. */
static double bytes_a_us(const fa_problem *p, const fa_cuda_kernel *kernel) {
  const bool spreads = kernel->block_q <= FEWEST_ROWS;
  if (kernel->mapped && adds(p) && !spreads) return kernel->bucket <= 64 ? 15e3 : 27e3;
  if (kernel->mapped && adds(p)) return kernel->bucket <= 64 ? 24e3 : 34e3;
  if (kernel->mapped) return kernel->bucket <= 64 ? 38e3 : 48e3;
  const bool splits = fa_cuda_kind_of(p) == FA_CUDA_F32;
  if (spreads) return splits && kernel->bucket <= 64 ? 28e3 : 45e3;
  return splits && kernel->bucket > 64 ? 7.5e3 : 12.5e3;
}

/* Of a second kernel that merges parts, which are f32 rows of o: it begins, reads them one after the other,
 * and each is written before that. */
static double merge_time(const fa_problem *p, double num_parts) {
  const double rows = (double)(p->batch * p->seqlen_q * p->num_heads);
  return 3.8 + 0.02 * num_parts + rows * num_parts * 8 * (double)p->head_dim / MEMORY_BYTES_A_US;
}

/* How many blocks of clusters of so many begin together. A cluster lies in one of the groups of multiprocessors
 * that a GPU is made of, and what these have beyond whole clusters is left over; blocks that can share a
 * multiprocessor do so where there is no other. Those of few rows at 128, to which nothing is added, read so
 * fast that they take twice as long then, as if they had begun one after the other. */
static int64_t num_clustered(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                             int64_t size) {
  if (num_multiprocessors < MOST_TOGETHER) return num_multiprocessors;
  const int64_t in_whole_groups = num_multiprocessors / MOST_TOGETHER * (MOST_TOGETHER / size * size);
  const int64_t all = in_whole_groups + num_multiprocessors % MOST_TOGETHER / size * size;
  const bool shares = kernel->block_q > FEWEST_ROWS || kernel->bucket <= 64 || adds(p);
  return fa_min(all * (shares ? kernel->blocks_per_sm : 1), num_multiprocessors);
}

/* The parts that take the least time, and that time. */
static fa_cuda_parts best_parts(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                                bool can_cluster, double *least) {
  const int64_t num_q_blocks = fa_divide_up(fa_cuda_packed_rows(p), kernel->block_q);
  const int64_t units = p->batch * p->num_kv_heads * num_q_blocks;
  const int64_t num_keys = num_keys_of(p, num_q_blocks);
  const int64_t num_slots = num_multiprocessors * kernel->blocks_per_sm;
  const costs c = {(double)units, (double)num_keys, bytes_a_key(p), bytes_a_us(p, kernel),
                   kernel->mapped ? ORDINARY_BEGIN : ORDINARY_BEGIN + 2};
  const int64_t most = fa_min(fa_divide_up(num_keys, kernel->block_k), MOST_PARTS);
  fa_cuda_parts best = {.num_parts = 1};
  *least = estimate(&c, 1, (double)num_slots, 0, MEMORY_BYTES_A_US);
  /* Clusters of more than 8 blocks begin late and read slowly. */
  for (int64_t parts = 2; can_cluster && parts <= fa_min(most, MOST_CLUSTERED); parts *= 2) {
    const bool is_large = parts > 8;
    const double time =
        estimate(&c, (double)parts, (double)num_clustered(p, kernel, num_multiprocessors, parts),
                 is_large ? 0.6 + 2.2 * fmax(kernel->bucket, 128) / 128 : 1,
                 is_large ? LARGE_CLUSTERS_BYTES_A_US : MEMORY_BYTES_A_US);
    if (time < *least) *least = time, best = (fa_cuda_parts){.num_parts = (int32_t)parts, .in_cluster = 1};
  }
  /* An eighth of the slots, twice as many, ... up to all four times: what few keys take is mostly the merge of
   * their parts. */
  for (int64_t eighths = 1; eighths <= 32; eighths += fa_min(eighths, 8)) {
    const int64_t parts = fa_min(eighths * num_slots / (8 * fa_max(units, 1)), most);
    if (parts < 2) continue;
    const double time =
        estimate(&c, (double)parts, (double)num_slots, merge_time(p, (double)parts), MEMORY_BYTES_A_US);
    if (time < *least) *least = time, best = (fa_cuda_parts){.num_parts = (int32_t)parts};
  }
  return best;
}

fa_cuda_parts fa_cuda_choose_parts(const fa_problem *p, const fa_cuda_kernel *kernel,
                                   int64_t num_multiprocessors, bool can_cluster) {
  double least;
  fa_cuda_parts parts = best_parts(p, kernel, num_multiprocessors, can_cluster, &least);
  parts.leaves_first = leaves_first(p);
  return parts;
}

/* Where one column block of the ordinary kernels has all keys, and heads share none, those are as fast unless
 * there is little to multiply (measured: cuda_log.md, "A backward of few rows"). */
enum { ONE_COLUMN_BLOCK = 128, MOST_ALONE = 1 << 24 };
bool fa_cuda_pays_for_few_rows(const fa_problem *p, const fa_cuda_kernel *kernel) {
  if (p->seqlen_k > ONE_COLUMN_BLOCK || p->num_heads > p->num_kv_heads) return true;
  return kernel->block_q * kernel->bucket * kernel->bucket * p->seqlen_k <= MOST_ALONE;
}

/* What takes the least time, in columns: of the blocks that a multiprocessor takes one after the other each as
 * long as its share and some more; and where there are several parts what adding their dq takes. */
enum { COLUMNS_TO_BEGIN = 256, COLUMNS_TO_ADD = 160, LEAST_COLUMNS_A_PART = 64 };
int32_t fa_cuda_choose_dq_parts(const fa_problem *p, const fa_cuda_kernel *kernel,
                                int64_t num_multiprocessors) {
  const int64_t units = fa_max(p->batch * p->num_kv_heads, 1),
                slots = num_multiprocessors * kernel->blocks_per_sm;
  const int64_t most = fa_min(fa_divide_up(p->seqlen_k, LEAST_COLUMNS_A_PART), fa_divide_up(slots, units));
  int64_t best = 1, least = INT64_MAX;
  for (int64_t parts = 1; parts <= most; parts++) {
    const int64_t each = fa_divide_up(p->seqlen_k, parts) + COLUMNS_TO_BEGIN,
                  time = fa_divide_up(units * parts, slots) * each + (parts > 1 ? COLUMNS_TO_ADD : 0);
    if (time < least) least = time, best = parts;
  }
  return (int32_t)best;
}

/* Whether the ordinary kernels' tiles leave two multiprocessors of three idle. */
static bool leaves_most_idle(const fa_problem *p, int64_t num_multiprocessors) {
  return num_tiles_of(p) * 3 <= num_multiprocessors;
}

/* Tiles of rows that take a third of the multiprocessors are as fast as all of these are on smaller tiles,
 * whose products are slower. */
static bool pays_beside_cache(const fa_problem *p, int64_t num_multiprocessors) {
  return p->max_pages > 0 || fa_cuda_packed_rows(p) <= FEW_ROWS ||
         (leaves_most_idle(p, num_multiprocessors) && p->seqlen_k >= 4096);
}

/* What the ordinary kernels were measured at stays theirs, but where the model says that they take longer and
 * heads share keys, which these read once for few rows; or where their tiles leave two multiprocessors of three
 * idle and they take half as long again. A tile of one row reads 60 GB/s, one of 128 rows less. */
static bool pays_for_plain(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                           bool can_cluster) {
  const bool few = (kernel->mapped || kernel->block_q <= FEWEST_ROWS) && p->num_heads > p->num_kv_heads &&
                   fa_cuda_packed_rows(p) <= FEW_ROWS;
  if (!few && !leaves_most_idle(p, num_multiprocessors)) return false;
  const costs ordinary = {(double)num_tiles_of(p), (double)num_keys_of(p, fa_divide_up(p->seqlen_q, TILE_ROWS)),
                          bytes_a_key(p), 60e3, ORDINARY_BEGIN};
  double least;
  best_parts(p, kernel, num_multiprocessors, can_cluster, &least);
  return least * (few ? 1 : 1.5) <= estimate(&ordinary, 1, (double)num_multiprocessors, 0, MEMORY_BYTES_A_US);
}

/* Of f32 the ordinary kernels split keys anew in a kernel before, and are 1.2 to 30 times slower for few rows.
 * But their products are those of the backward, whose scores must be rounded as the forward's were: so they
 * stay where one may follow. */
static bool pays_for_f32(const fa_problem *p, int64_t num_multiprocessors) {
  const int64_t rows = fa_cuda_packed_rows(p);
  if (!fa_problem_rounds_freely(p) || rows > FEW_ROWS) return false;
  return rows * 2 <= FEW_ROWS || p->num_heads > p->num_kv_heads || leaves_most_idle(p, num_multiprocessors);
}

/* Every row looks at all bands of its batch, and distances are those of one. */
enum { MOST_BANDS = 8 };
static bool has_few_bands(const fa_problem *p) { return p->num_bands <= (p->alibi_batch > 0 ? 1 : MOST_BANDS); }

bool fa_cuda_pays_in_parts(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t num_multiprocessors,
                           bool can_cluster) {
  if (!suits(p, kernel) || !has_few_bands(p)) return false;
  if (fa_problem_reads_cache(p)) return pays_beside_cache(p, num_multiprocessors);
  return p->dtype == FA_DTYPE_F32 ? pays_for_f32(p, num_multiprocessors)
                                  : pays_for_plain(p, kernel, num_multiprocessors, can_cluster);
}
