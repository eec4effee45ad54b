/* The CUDA backend: which kernel takes a problem, how its workspace is laid out, and what is launched. Numbers
 * that were found by measuring, not by counting, refer to bench/results/cuda_log.md. */
#include "../c_src/core/backend.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "../c_src/core/arena.h"
#include "../c_src/core/dropout.h"
#include "../c_src/core/integers.h"
#include "../c_src/core/problem.h"
#include "../c_src/core/tensors.h"
#include "decode.h"
#include "kernels.h"
#include "merge.h"
#include "runtime.h"
#include "tensor_map.h"

/* ---- devices ------------------------------------------------------------------------------------- */

static int32_t num_devices(fa_error *error) {
  cudaError_t result;
  const int32_t count = fa_cuda_count_devices(&result);
  if (count > 0) {
    fa_succeed(error);
    return count;
  }
  fa_fail_message(error, FA_STATUS_NO_DEVICE, "device",
                  FA_TEXT("no CUDA device: %s", result ? cudaGetErrorString(result) : "the driver lists none"));
  return 0;
}

static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  const char *operation = "cudaGetDeviceProperties";
  struct cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, index));
  snprintf(info->name, sizeof info->name, "%.127s", properties.name);
  snprintf(info->features, sizeof info->features, "sm_%d%d", properties.major, properties.minor);
  info->num_threads = properties.multiProcessorCount;
  info->memory_bytes = (int64_t)properties.totalGlobalMem;
  return FA_STATUS_OK;
}

static int32_t num_multiprocessors(int32_t index) {
  fa_cuda_facts facts;
  return fa_cuda_facts_of(index, &facts, NULL) ? 1 : facts.num_multiprocessors;
}

/* Whether blocks of threads form clusters there, and a launch may begin before the one before it has ended. */
static bool can_cluster(int32_t index) {
  fa_cuda_facts facts;
  return !fa_cuda_facts_of(index, &facts, NULL) && facts.major >= 9 && !fa_is_disabled("sm90");
}

/* ---- the selector -------------------------------------------------------------------------------- */

/* Kernels for few rows; those for one architecture, which read by tensor maps, with further ones for wide
 * heads; and those for all. */
enum { HOPPER_FEW_ROWS, FEW_ROWS, HOPPER, HOPPER_WIDE, PORTABLE, NUM_FAMILIES };

static const struct {
  const fa_cuda_kernel *forward[NUM_FAMILIES], *backward[NUM_FAMILIES]; /* NULL: no table */
  int32_t num_parts;
  bool scaled;
} kinds[FA_CUDA_NUM_KINDS] = {
    [FA_CUDA_BF16] = {{fa_hopper_decode_bf16, fa_cuda_decode_bf16, fa_hopper_forward_bf16, NULL,
                       fa_cuda_forward_bf16},
                      {NULL, fa_cuda_backward_few_bf16, fa_hopper_backward_bf16, fa_hopper_backward_wide_bf16,
                       fa_cuda_backward_bf16},
                      1,
                      false},
    [FA_CUDA_F16] = {{fa_hopper_decode_f16, fa_cuda_decode_f16, fa_hopper_forward_f16, NULL,
                      fa_cuda_forward_f16},
                     {NULL, fa_cuda_backward_few_f16, fa_hopper_backward_f16, fa_hopper_backward_wide_f16,
                      fa_cuda_backward_f16},
                     1,
                     false},
    [FA_CUDA_F32] = {{NULL, fa_cuda_decode_f32, fa_hopper_forward_f32, NULL, fa_cuda_forward_f32},
                     {NULL, NULL, fa_hopper_backward_f32, NULL, fa_cuda_backward_f32},
                     2,
                     true},
    [FA_CUDA_F32_AS_F16] = {{NULL, fa_cuda_decode_f32_as_f16, fa_hopper_forward_f32_as_f16, NULL,
                             fa_cuda_forward_f32_as_f16},
                            {NULL, NULL, fa_hopper_backward_f32_as_f16, NULL, fa_cuda_backward_f32_as_f16},
                            1,
                            true},
};

/* Of column blocks that are shared out, and of their parts: fewer take less time than what sharing them does.
 */
enum { LEAST_STEPS_SHARED = 12, LEAST_STEPS_A_PART = 4, LEAST_STEPS_A_PART_IN_BANDS = 48 };

/* Query heads of a column block are shared out until there are so many parts for each multiprocessor, or steps
 * become as few as that in a part, or twice and four times as many where a multiprocessor has two and three;
 * where rows and sums of all heads take more than so many bytes, of which little stays in cache. */
enum { HEAD_PARTS_A_SLOT = 3, LEAST_STEPS_A_HEAD_PART = 8, HEADS_IN_CACHE_BYTES = 200 << 20 };

/* Bytes of sums of dq that stay in cache beside what comes and goes, on an H100 and an H200; and for how many
 * times as many heads there are sums where bands may leave most column blocks of a head without steps. */
enum { CACHED_SUM_BYTES = 16 << 20, HEADS_WHERE_HIDDEN = 6 };

/* A box of a tensor map is swizzled by so many rows. */
enum { LEAST_BOX_ROWS = 8 };

static fa_status unsupported(fa_error *error, const char *argument, const char *expected, int64_t got) {
  return fa_fail(error, FA_STATUS_UNSUPPORTED, argument, expected, FA_TEXT("%lld", (long long)got));
}

/* What the kernels' 32-bit positions, counts and grids can hold. */
static fa_status check_sizes(const fa_problem *p, const fa_cuda_kernel *kernel, fa_error *error) {
  const int64_t most_rows = INT64_C(1) << 29, most_blocks = INT32_MAX / 2;
  if (p->seqlen_q > most_rows) return unsupported(error, "seqlen_q", "at most 2^29 on CUDA", p->seqlen_q);
  if (p->seqlen_k > most_rows) return unsupported(error, "seqlen_k", "at most 2^29 on CUDA", p->seqlen_k);
  const struct {
    const char *name;
    int64_t size;
  } counts[] = {{"batch", p->batch},
                {"num_heads", p->num_heads},
                {"num_sinks", p->num_sinks},
                {"num_bands", p->num_bands}};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    if (counts[i].size > most_blocks)
      return unsupported(error, counts[i].name, "below 2^30 on CUDA", counts[i].size);
  if (p->num_pages > INT32_MAX) return unsupported(error, "num_pages", "below 2^31 on CUDA", p->num_pages);
  if (kernel->merge && fa_cuda_packed_rows(p) > most_blocks)
    return unsupported(error, "seqlen_q", "fewer than 2^30 rows of all heads of a KV head on CUDA",
                       fa_cuda_packed_rows(p));
  const int64_t seqlen = p->seqlen_q > p->seqlen_k ? p->seqlen_q : p->seqlen_k;
  const int64_t block = kernel->block_q < kernel->block_k ? kernel->block_q : kernel->block_k;
  const double blocks = (double)p->batch * (double)p->num_heads * (double)fa_divide_up(seqlen, block);
  const double rows =
      (double)p->batch * (double)p->num_heads * (double)fa_round_up(p->seqlen_q, kernel->block_q);
  if (kernel->leaves_notes && rows / 16 > INT32_MAX)
    return unsupported(error, "batch", "fewer than 2^35 rows of heads for one call on CUDA", p->batch);
  if (blocks > (double)most_blocks || (double)p->num_sinks * (double)p->num_heads > (double)most_blocks)
    return unsupported(error, "batch", "less work for one call on CUDA", p->batch);
  return FA_STATUS_OK;
}

/* A merge of the problem's sizes that ends in its o and lse. */
static fa_merge merge_of(const fa_problem *p, const fa_tensors *t) {
  fa_merge merge;
  fa_merge_init(&merge);
  merge.batch = p->batch, merge.seqlen_q = p->seqlen_q;
  merge.num_heads = p->num_heads, merge.head_dim = p->head_dim;
  merge.merged = (fa_part){t->o, t->lse.data, p->dtype};
  return merge;
}

/* That of its rows with their own sinks. */
static fa_merge merge_of_row_sinks(const fa_problem *p, const fa_tensors *t) {
  fa_merge merge = merge_of(p, t);
  merge.num_sinks = p->num_row_sinks, merge.sink_per_row = 1, merge.sink = t->row_sinks.data;
  return merge;
}

static fa_status check_row_sinks(const fa_problem *p, fa_error *error) {
  if (p->num_row_sinks == 0) return FA_STATUS_OK;
  if (p->dlse_batch == 1 && p->batch > 1)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "dlse", "all batches beside row_sinks on CUDA", "1");
  const fa_merge merge = merge_of_row_sinks(p, &(fa_tensors){0});
  return fa_cuda_check_merge(&merge, error);
}

static fa_status check_problem(const fa_plan *plan, int major, fa_error *error) {
  if (plan->pass != FA_PASS_FORWARD && plan->pass != FA_PASS_BACKWARD)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "pass", "forward or backward on CUDA",
                   fa_pass_name(plan->pass));
  if (plan->problem.dtype == FA_DTYPE_F64)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "dtype", "f32, bf16 or f16 on CUDA", "f64");
  if (plan->problem.dropout != 0 && plan->problem.origin.row % 16 != 0)
    return unsupported(error, "origin", "a multiple of 16 rows where there is dropout on CUDA",
                       plan->problem.origin.row);
  if (major < 8)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "device", "compute capability 8.0 or newer",
                   FA_TEXT("%d.x", major));
  return check_row_sinks(&plan->problem, error);
}

/* Whether every row sees every column. */
static bool sees_all(const fa_problem *p) {
  return fa_band_sees_all(fa_problem_band(p), (fa_range){0, p->seqlen_q}, (fa_range){0, p->seqlen_k});
}

/* Whether blocks of one side may differ in what they have to do. */
static bool is_uneven(const fa_problem *p) { return p->num_bands > 0 || p->lengths_batch > 0 || !sees_all(p); }

/* Whether tensor maps can describe contiguous tensors of the problem: rows are multiples of 16 bytes. */
static bool can_map(const fa_problem *p) { return p->head_dim * (int64_t)fa_dtype_bytes(p->dtype) % 16 == 0; }

static const fa_tensor_id of_heads[FA_CUDA_NUM_HEAD_NUMBERS] = {
    [FA_CUDA_ALIBI_SLOPES] = FA_TENSOR_ALIBI_SLOPES,
};

static bool is_there(const fa_problem *p, fa_tensor_id id) {
  return fa_tensor_role_in(p, FA_PASS_FORWARD, id) != FA_ROLE_NONE;
}

static int64_t stride_along(const fa_problem *p, int id, fa_axis axis) {
  const int i = fa_axis_of(id, axis);
  if (i < 0 || !fa_varies_along(p, id, axis)) return 0;
  return fa_axis_at(p, id, i + 1) ? fa_tensor_contiguous(p, id, NULL).strides[i] : 1;
}

/* Whether a bias has a number for each key, which all rows share; or one for each score; or is a mask with a
 * flag for each score. */
static bool has_keys(const fa_problem *p) {
  return is_there(p, FA_TENSOR_BIAS) && stride_along(p, FA_TENSOR_BIAS, FA_AXIS_SEQLEN_Q) == 0;
}
static bool has_cells(const fa_problem *p) {
  return is_there(p, FA_TENSOR_BIAS) && !has_keys(p) && p->bias_dtype != FA_DTYPE_U8;
}
static bool has_flags(const fa_problem *p) {
  return is_there(p, FA_TENSOR_BIAS) && !has_keys(p) && p->bias_dtype == FA_DTYPE_U8;
}

static bool has_slopes(const fa_problem *p) { return is_there(p, FA_TENSOR_ALIBI_SLOPES); }
static bool folds_slopes(const fa_problem *p, const fa_cuda_kernel *kernel) {
  return kernel->folds && has_slopes(p);
}

/* See FA_CUDA_NEEDS_SINGLE_CELLS. A forward does what its backward does. */
static bool has_single_cells(const fa_problem *p) {
  if (!has_cells(p) || p->dtype == FA_DTYPE_F32) return false;
  return p->bias_dtype == FA_DTYPE_F32 || (p->num_bands > 1 && fa_is_sum(p, FA_TENSOR_DBIAS));
}

/* Whether scores have to be what they are, because numbers are added to them: flags hide any. */
static bool adds_numbers(const fa_problem *p) {
  bool adds = is_there(p, FA_TENSOR_BIAS) && p->bias_dtype != FA_DTYPE_U8;
  for (int i = 0; i < FA_CUDA_NUM_HEAD_NUMBERS; i++) adds |= is_there(p, of_heads[i]);
  return adds;
}

/* See FA_CUDA_NEEDS_EXTREMES. The fast tanh errs by 2e-7 of the softcap; a score of 2^26 by 4. */
static bool is_extreme(const fa_problem *p) {
  return !kinds[fa_cuda_kind_of(p)].scaled &&
         (p->softcap > 0x1p12 || (p->softcap == 0 && fabs(p->scale) > 0x1p16));
}

/* See FA_CUDA_NEEDS_LATE_TERMS. What a number is over the scale, f16's parts have to hold: at most 2^30. */
static bool has_late_terms(const fa_problem *p) {
  return (has_keys(p) || has_slopes(p)) &&
         (p->softcap != 0 || !(fabs(p->scale) >= 0x1p-10 && fabs(p->scale) <= 0x1p10));
}

/* What the problem asks of a kernel beyond plain attention. */
static uint32_t needs_of(const fa_problem *p) {
  uint32_t of_each = 0;
  for (int i = 0; i < FA_CUDA_NUM_HEAD_NUMBERS; i++)
    of_each |= is_there(p, of_heads[i]) ? (uint32_t)FA_CUDA_NEEDS_OF_HEADS << i : 0;
  return of_each | (sees_all(p) ? 0 : FA_CUDA_NEEDS_WINDOW) | (p->softcap == 0 ? 0 : FA_CUDA_NEEDS_SOFTCAP) |
         (p->num_sinks == 0 ? 0 : FA_CUDA_NEEDS_SINKS) | (p->num_bands == 0 ? 0 : FA_CUDA_NEEDS_BANDS) |
         (has_keys(p) ? FA_CUDA_NEEDS_KEYS : 0) | (has_cells(p) ? FA_CUDA_NEEDS_CELLS : 0) |
         (has_flags(p) ? FA_CUDA_NEEDS_FLAGS : 0) | (p->dropout == 0 ? 0 : FA_CUDA_NEEDS_DROPOUT) |
         (has_single_cells(p) ? FA_CUDA_NEEDS_SINGLE_CELLS : 0) |
         (p->lengths_batch == 0 ? 0 : FA_CUDA_NEEDS_LENGTHS) | (p->max_pages == 0 ? 0 : FA_CUDA_NEEDS_PAGES) |
         (is_extreme(p) ? FA_CUDA_NEEDS_EXTREMES : 0) | (has_late_terms(p) ? FA_CUDA_NEEDS_LATE_TERMS : 0) |
         (fa_is_sum(p, FA_TENSOR_DBIAS) || fa_is_sum(p, FA_TENSOR_DALIBI_SLOPES) ? FA_CUDA_NEEDS_SUMS : 0) |
         (has_slopes(p) && p->window_right > 0 && !sees_all(p) ? FA_CUDA_NEEDS_SLOPES_BEHIND : 0) |
         (has_slopes(p) && p->window_right > 0 ? FA_CUDA_NEEDS_COLUMNS_BEHIND : 0) |
         (p->scale < FA_CUDA_LEAST_SCALE ? FA_CUDA_NEEDS_OTHER_SCALES : 0);
}

/* Whether masks may turn out to hide nothing or to be causal, or flags to hide nothing whole. Slices do not
 * ask: what they hide is not what the whole does, whose results theirs are to the bit. */
static bool may_hide_nothing(const fa_plan *plan) {
  const fa_problem *p = &plan->problem;
  return !plan->whole && !(needs_of(p) & FA_CUDA_FORM_NEEDS) && p->num_bands <= 1 &&
         (p->num_bands == 1 || p->lengths_batch > 0 || has_flags(p));
}

/* What stood in the way where kernels fit the head_dim and the device, but none took these needs as well. */
static fa_status no_kernel_takes(uint32_t needs, const fa_plan *plan, fa_error *error) {
  const char *const names[] = {"window",  "softcap",      "num_sinks",   "bands",      "bias",        "bias",
                               "dropout", "bias",         "key_lengths", "page_table", "scale",       "scale",
                               "bias",    "alibi_slopes", "scale",       "bias",       "alibi_slopes"};
  const char *name = NULL;
  for (int i = 0; !name; i++)
    if (needs & (uint32_t)FA_CUDA_NEEDS_OF_HEADS << i)
      name = fa_tensor_name(of_heads[i]);
    else if (i < (int)(sizeof names / sizeof *names) && needs >> i & 1)
      name = names[i];
  return fa_fail(error, FA_STATUS_UNSUPPORTED, name,
                 FA_TEXT("none in the %s on this CUDA device", fa_pass_name(plan->pass)), "some");
}

/* Whether a family has kernels for the problem on a device of that compute capability. */
static bool family_serves(int family, const fa_plan *plan, int capability) {
  const fa_problem *p = &plan->problem;
  return family == PORTABLE || family == FEW_ROWS ||
         (capability == 90 && !fa_is_disabled("sm90") && can_map(p));
}

/* Whether the kernel goes through bands by plans, and takes programs, if any: one that plain problems run only
 * for its parts of column blocks. Those for few rows read bands and what is added as they are. */
static bool is_general(const fa_cuda_kernel *kernel) {
  return kernel->takes & FA_CUDA_NEEDS_BANDS && !kernel->merge;
}

/* The row blocks that see something of a column block, where there are no bands. */
static int64_t num_row_blocks(const fa_problem *p, const fa_cuda_kernel *kernel, int64_t k_block) {
  const int64_t begin = k_block * kernel->block_k, end = fa_min(begin + kernel->block_k, p->seqlen_k);
  const fa_range rows = fa_band_rows(fa_problem_band(p), (fa_range){begin, end});
  return rows.begin < rows.end ? fa_divide_up(rows.end, kernel->block_q) - rows.begin / kernel->block_q : 0;
}

/* How many blocks of threads share the steps of a column block in a backward: where multiprocessors are idle
 * for most of the time that the longest column block takes, as many as give each of them one, with at least a
 * few steps; and where column blocks differ, some for each, so that all end together. What bands show nobody
 * knows here, and a column block may have all steps there are or none: with few blocks a multiprocessor these
 * are shared, too, if what parts cost, about ten steps each, is little beside them. (cuda_log.md, "Hopper,
 * backward".) */
static int64_t num_column_parts(const fa_plan *whole, const fa_cuda_kernel *kernel) {
  const fa_problem *p = &whole->problem;
  const int64_t num_slots = num_multiprocessors(whole->device.index);
  const int64_t num_k_blocks = fa_divide_up(p->seqlen_k, kernel->block_k);
  const int64_t num_heads = p->batch * p->num_kv_heads, num_blocks = num_heads * num_k_blocks;
  const bool has_bands = p->num_bands > 0;
  if (num_blocks == 0 || num_blocks > (has_bands ? 4 : 1) * num_slots) return 1;
  int64_t most = 0, sum = 0;
  for (int64_t i = 0; i < num_k_blocks; i++) {
    const int64_t count = num_row_blocks(p, kernel, i);
    most = fa_max(most, count), sum += count;
  }
  const int64_t num_steps = p->num_heads / p->num_kv_heads * most;
  const int64_t wanted = (is_uneven(p) ? 4 : 1) * num_slots / num_blocks;
  if (has_bands) return fa_max(fa_min(fa_max(wanted, 3), num_steps / LEAST_STEPS_A_PART_IN_BANDS), 1);
  if (num_steps < LEAST_STEPS_SHARED || num_heads * sum * 5 > num_slots * most * 3) return 1;
  return fa_max(fa_min(wanted, num_steps / LEAST_STEPS_A_PART), 1);
}

/* How many blocks of threads share the query heads of a column block, in a plain kernel that can. What they
 * leave costs time, too, so this pays where there are few column blocks: if they are of different lengths or
 * there is more than one for a multiprocessor, and what all heads read and sum does not stay in cache, as each
 * block goes through the heads at its own pace. (cuda_log.md, "Short sequences".) */
static int64_t num_head_parts(const fa_plan *whole, const fa_cuda_kernel *kernel) {
  const fa_problem *p = &whole->problem;
  const int64_t group = p->num_heads / p->num_kv_heads, num_slots = num_multiprocessors(whole->device.index);
  const int64_t num_k_blocks = fa_divide_up(p->seqlen_k, kernel->block_k),
                num_blocks = p->batch * p->num_kv_heads * num_k_blocks;
  const int64_t bytes = p->batch * p->num_heads * p->seqlen_q * p->head_dim * 8; /* q, dout, and dq's sum */
  const bool spills = bytes > HEADS_IN_CACHE_BYTES, waits = num_blocks <= num_slots;
  if (!kernel->splits_heads || num_blocks == 0 || !(is_uneven(p) ? spills || waits : spills && !waits))
    return 1;
  int64_t num_steps = 0, parts = 1; /* of all column blocks of a group */
  for (int64_t i = 0; i < num_k_blocks; i++) num_steps += num_row_blocks(p, kernel, i) * group;
  for (int64_t n = 2; n <= group && parts * num_blocks < HEAD_PARTS_A_SLOT * num_slots; n++) {
    const int64_t least = LEAST_STEPS_A_HEAD_PART << fa_min((n * num_blocks - 1) / num_slots, 2);
    if (group % n == 0 && num_steps >= n * num_k_blocks * least) parts = n;
  }
  return parts;
}

/* Whether column blocks are shared out by steps, or by heads. Where a program does more than hide scores, those
 * of a column block add to sums of its own. */
static bool shares_steps(const fa_cuda_kernel *kernel) {
  return kernel->single_column || (kernel->mapped && is_general(kernel) &&
                                   !(kernel->takes & FA_CUDA_PROGRAM_NEEDS & ~(uint32_t)FA_CUDA_NEEDS_FLAGS));
}
static int64_t num_parts_of(const fa_plan *whole, const fa_cuda_kernel *kernel) {
  return shares_steps(kernel) ? num_column_parts(whole, kernel) : num_head_parts(whole, kernel);
}

/* Whether column blocks had better be shared out, and a kernel follows that does: the next one by heads, or a
 * general one by steps. */
static bool is_left_to_parts(const fa_plan *whole, const fa_cuda_kernel *row) {
  if (whole->pass != FA_PASS_BACKWARD || !row->mapped || is_general(row) || row->single_column ||
      row->takes & FA_CUDA_PROGRAM_NEEDS)
    return false;
  const fa_cuda_kernel *sharing = !row->splits_heads && row[1].splits_heads ? row + 1 : row;
  if (num_head_parts(whole, sharing) > 1) return sharing != row;
  return num_column_parts(whole, row) > 1;
}

/* Whether one column block holds all keys, and every row sees some of them. Slices of the problem have this in
 * common with it. */
static bool is_single_column(const fa_problem *p, const fa_cuda_kernel *kernel) {
  if (p->seqlen_q < 1 || p->seqlen_k < 1 || p->seqlen_k > kernel->block_k || p->num_bands > 0 ||
      p->lengths_batch > 0)
    return false;
  const fa_range rows = fa_band_rows(fa_problem_band(p), (fa_range){0, p->seqlen_k});
  return rows.begin == 0 && rows.end == p->seqlen_q;
}

/* Into how many parts a forward in parts splits keys. */
static int64_t num_key_parts(const fa_plan *whole) {
  return fa_cuda_key_parts(&whole->problem, num_multiprocessors(whole->device.index));
}

/* Whether a forward had better be in parts, and a kernel takes it so. */
static bool is_for_key_parts(const fa_plan *whole, int capability) {
  const fa_problem *p = &whole->problem;
  if (whole->pass != FA_PASS_FORWARD || !family_serves(HOPPER, whole, capability)) return false;
  for (const fa_cuda_kernel *row = kinds[fa_cuda_kind_of(p)].forward[HOPPER]; row->name; row++)
    if (row->in_parts && p->head_dim <= row->bucket && !(needs_of(p) & ~row->takes))
      return num_key_parts(whole) > 1;
  return false;
}

/* How many keys of a column block a tensor map's box brings, all of which lie on one page. */
static int32_t box_rows(const fa_problem *p, const fa_cuda_kernel *kernel) {
  int64_t rows = kernel->block_k;
  while (p->max_pages > 0 && p->page_size % rows != 0) rows /= 2;
  return (int32_t)rows;
}

/* Whether a kernel's blocks have room for the rows, or no larger ones come after it in the table; and whether
 * pages suit its boxes. */
static bool row_fits(const fa_problem *p, const fa_cuda_kernel *row) {
  if (row->most_key_bytes && fa_cuda_key_bytes(p) > (double)row->most_key_bytes) return false;
  if (row->merge && row->mapped && box_rows(p, row) < LEAST_BOX_ROWS) return false;
  if (row->few_rows) return fa_cuda_packed_rows(p) <= row->block_q;
  const bool larger_follow = row[1].bucket == row->bucket && row[1].block_q > row->block_q;
  return !row->merge || fa_cuda_packed_rows(p) <= row->block_q || !larger_follow;
}

/* How many columns a row sees, about. What bands say is not known here: they share the columns out. */
static int64_t columns_seen(const fa_problem *p) {
  const int64_t half = p->seqlen_k / 2, left = fa_min(p->window_left, half),
                right = fa_min(p->window_right, half);
  return (left + right) / fa_max(p->num_bands, 1);
}

/* Whether a problem is as large as a row wants it. */
static bool is_large_enough(const fa_problem *p, const fa_cuda_kernel *row) {
  const int64_t columns = columns_seen(p);
  return columns >= row->least_columns && p->seqlen_q >= row->least_rows &&
         (double)p->batch * p->num_heads * p->seqlen_q * columns >= (double)row->least_scores;
}

/* Whether a kernel that fits is worth its family. */
static bool pays(const fa_plan *plan, const fa_cuda_kernel *row) {
  const int32_t index = plan->device.index;
  if (row->few_rows) return fa_cuda_pays_for_few_rows(&plan->problem, row);
  return !row->merge ||
         fa_cuda_pays_in_parts(&plan->problem, row, num_multiprocessors(index), can_cluster(index));
}

/* The first row of the kind's tables, from a family on, that takes the whole problem and fits the device. */
static fa_status choose_kernel(const fa_plan *plan, int family, const fa_cuda_kernel **chosen,
                               fa_error *error) {
  const fa_plan *whole = fa_plan_whole(plan);
  const fa_problem *problem = &whole->problem;
  fa_cuda_facts device;
  fa_status status = fa_cuda_facts_of(plan->device.index, &device, error);
  if (!status) status = check_problem(plan, device.major, error);
  if (status) return status;
  int32_t largest = 0, left_to_parts = INT32_MAX;
  const uint32_t needs = needs_of(problem);
  uint32_t declined = 0; /* by the row that lacks fewest */
  const int capability = device.major * 10 + device.minor;
  const bool in_parts = is_for_key_parts(whole, capability);
  for (; family < NUM_FAMILIES; family++) {
    if (!family_serves(family, whole, capability) || (family <= FEW_ROWS && in_parts)) continue;
    const fa_cuda_kind kind = fa_cuda_kind_of(problem);
    const fa_cuda_kernel *row =
        plan->pass == FA_PASS_FORWARD ? kinds[kind].forward[family] : kinds[kind].backward[family];
    for (; row && row->name; row++) {
      if (row->bucket > largest && row->shared_bytes <= device.shared_bytes) largest = row->bucket;
      if (problem->head_dim > row->bucket || row->shared_bytes > device.shared_bytes) continue;
      if (row->bucket > left_to_parts) continue;
      if (!row_fits(problem, row) || !is_large_enough(problem, row)) continue;
      if (row->single_column && !is_single_column(problem, row)) continue;
      if (row->in_parts && !in_parts) continue;
      const uint32_t missing = needs & ~row->takes;
      if (missing) {
        if (!declined || __builtin_popcount(missing) < __builtin_popcount(declined)) declined = missing;
        continue;
      }
      if (!pays(whole, row)) break;
      if (is_left_to_parts(whole, row)) {
        left_to_parts = row->bucket;
        continue;
      }
      *chosen = row;
      return check_sizes(&plan->problem, row, error);
    }
  }
  if (declined) return no_kernel_takes(declined, whole, error);
  return unsupported(error, "head_dim", FA_TEXT("at most %d on this CUDA device", largest), problem->head_dim);
}

/* ---- the workspace ------------------------------------------------------------------------------- */

/* Everything that a run needs: the kernels' arguments, the copies to make first, the sums to reduce at the end,
 * and what to fill with 0. */
typedef struct cuda_job {
  fa_cuda_arguments arguments;
  fa_cuda_dlse dlse;
  fa_cuda_splits splits;
  fa_cuda_plans plans;      /* of a kernel that takes bands */
  fa_cuda_key_reading keys; /* of a kernel that reads by maps */
  fa_cuda_reduction of_heads[FA_CUDA_NUM_HEAD_NUMBERS];
  fa_cuda_reductions of_bias;    /* the first alone */
  fa_cuda_reductions of_columns; /* dk and dv of parts of column blocks */
  fa_cuda_gradients gradients;
  bool looks_at_columns; /* of a backward: there may be some that no row sees */
  fa_cuda_maps maps;     /* of a kernel that reads by them */
  fa_cuda_parts parts;   /* of a kernel for few rows */
  int32_t num_multiprocessors;
  bool launches_early;      /* a kernel may be launched before the one in front of it is done */
  int64_t num_flag_tiles;   /* of a mask with a flag a score, each packed by a warp */
  size_t zeroed_bytes;      /* at the workspace's beginning */
  size_t zeroed_bias_bytes; /* of dbias */
  size_t workspace_bytes;
} cuda_job;

static bool is_aligned(const fa_tensor *tensor, int64_t element_bytes) {
  const int64_t strides[] = {tensor->stride_batch, tensor->stride_row, tensor->stride_head};
  bool aligned = (uintptr_t)tensor->data % 16 == 0;
  for (int i = 0; i < 3; i++) aligned = aligned && strides[i] * element_bytes % 16 == 0;
  return aligned;
}

/* The tensor itself as an operand. */
static fa_cuda_operand view(const fa_problem *p, fa_tensor tensor, int64_t seqlen, int64_t num_heads) {
  return (fa_cuda_operand){.data = tensor.data,
                           .stride_batch = tensor.stride_batch,
                           .stride_row = tensor.stride_row,
                           .stride_head = tensor.stride_head,
                           .num_cols = (int32_t)p->head_dim,
                           .aligned = is_aligned(&tensor, (int64_t)fa_dtype_bytes(p->dtype)),
                           .num_heads = (int32_t)num_heads,
                           .num_scales = (int32_t)fa_divide_up(seqlen, FA_CUDA_SCALE_ROWS)};
}

/* The tensor as the tensor cores read it: itself, or a scaled copy in the workspace. */
static fa_cuda_operand operand(const fa_problem *p, const fa_cuda_kernel *kernel, fa_tensor tensor,
                               int64_t seqlen, int64_t num_heads, fa_arena *workspace, cuda_job *job) {
  fa_cuda_splits *splits = &job->splits;
  fa_cuda_operand operand = view(p, tensor, seqlen, num_heads);
  if (!kinds[fa_cuda_kind_of(p)].scaled || kernel->merge) return operand;
  operand.num_cols = (int32_t)fa_divide_up(p->head_dim, 8) * 8;
  operand.aligned = true;
  operand.stride_row = operand.num_cols;
  operand.stride_head = operand.stride_row * seqlen;
  operand.stride_batch = operand.stride_head * num_heads;
  operand.stride_part = operand.stride_batch * p->batch;
  operand.data = fa_take(workspace, splits->num_parts * operand.stride_part, sizeof *operand.data);
  operand.exponents = fa_take(workspace, p->batch * num_heads * operand.num_scales, sizeof *operand.exponents);
  splits->tensors[splits->num_tensors++] = (fa_cuda_split){tensor, operand, (int32_t)seqlen};
  return operand;
}

/* The nearest finite f32, and none that is so small that its reciprocal is not: an infinite factor makes NaN of
 * a product that is 0, and one that is 0 of a score that is -inf. */
static float finite_f32(double x) { return (float)fmin(fmax(x, -FLT_MAX), FLT_MAX); }
static float positive_f32(double x) { return finite_f32(fmax(x, FLT_MIN)); }

static fa_cuda_score score_of(const fa_problem *p) {
  if (p->softcap != 0)
    return (fa_cuda_score){FA_CUDA_SCORE_SOFTCAP, finite_f32(p->scale / p->softcap), positive_f32(p->softcap)};
  return (fa_cuda_score){p->scale < 0 ? FA_CUDA_SCORE_NEGATED : FA_CUDA_SCORE_PLAIN, 0,
                         positive_f32(fabs(p->scale))};
}

/* How many heads' row blocks a persistent forward begins alternately: one head's where row blocks are of one
 * length, and otherwise those of as many heads as leave, with their k and v, some of the cache to rows that
 * come and go. The share is measured (cuda_log.md, "Hopper, forward"). */
static int32_t forward_heads_at_once(const fa_problem *p) {
  const int64_t num_heads = p->batch * p->num_heads, heads_per_kv = p->num_heads / p->num_kv_heads;
  const int64_t head_bytes = p->seqlen_k * p->head_dim * 2 * (int64_t)fa_dtype_bytes(p->dtype) / heads_per_kv;
  int64_t wanted = !is_uneven(p) ? 1 : 18 * 1000 * 1000 / (head_bytes + 1);
  if (wanted < 1) wanted = 1;
  return (int32_t)(wanted < num_heads ? wanted : num_heads);
}

/* Whether column blocks add to dq one after the other: where that is asked for, and where a block of threads
 * has two sums for the same row block, which hinder each other more than an order does. But column blocks that
 * begin together wait for each other, so this pays only where several follow on a multiprocessor (measured:
 * cuda_log.md, "Hopper, backward"). */
static bool adds_in_order(const fa_plan *whole, const fa_cuda_kernel *kernel, int64_t num_k_blocks) {
  const fa_problem *p = &whole->problem;
  const bool has_two_sums =
      kernel->persistent && kernel->bucket == 128 && kinds[fa_cuda_kind_of(p)].num_parts == 2;
  return p->deterministic || (has_two_sums && p->batch * p->num_kv_heads * num_k_blocks >=
                                                  3 * num_multiprocessors(whole->device.index));
}

/* Query heads that share keys, or parts of them: so many groups, of so many heads. */
static int64_t num_groups(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a) {
  return p->batch * p->num_kv_heads * (kernel->splits_heads ? a->num_column_parts : 1);
}
static int64_t heads_a_group(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a) {
  return p->num_heads / p->num_kv_heads / (kernel->splits_heads ? a->num_column_parts : 1);
}

/* How long the column blocks of a backward take where those of so many heads are begun alternately, over the
 * even time, in which they would be done if all multiprocessors ended together: blocks are taken in that order
 * by whoever is free. Times are in steps, and counted in what makes TICKS of the even time. */
enum { BEGIN_STEPS = 3, TICKS = 256, MOST_TICKS = 3 * TICKS };
static int64_t steps_of_column_block(const fa_problem *p, const fa_cuda_kernel *kernel,
                                     const fa_cuda_arguments *a, int64_t k_block) {
  return num_row_blocks(p, kernel, k_block) * heads_a_group(p, kernel, a) + BEGIN_STEPS;
}
static double imbalance(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                        int64_t num_multiprocessors, int64_t heads_at_once, double even) {
  const int64_t num_heads = num_groups(p, kernel, a);
  int64_t free_at[MOST_TICKS + 1] = {num_multiprocessors}, now = 0, last = 0;
  for (int64_t begun = 0; begun < num_heads; begun += heads_at_once)
    for (int64_t i = 0; i < a->num_k_blocks; i++) {
      const int64_t ticks = (int64_t)((double)steps_of_column_block(p, kernel, a, i) * TICKS / even + 0.5);
      for (int64_t left = fa_min(heads_at_once, num_heads - begun); left > 0;) {
        while (now < MOST_TICKS && free_at[now] == 0) now++;
        const int64_t end = fa_min(now + ticks, MOST_TICKS), taken = fa_min(left, free_at[now]);
        if (end == now) return 1; /* blocks too short to tell */
        free_at[now] -= taken, free_at[end] += taken, left -= taken;
        last = fa_max(last, end);
      }
    }
  return (double)last / TICKS;
}

/* Where multiprocessors take few column blocks each, more heads at once than are wanted otherwise, of which the
 * longest blocks come first, may let all end together; twice as many cost 3 %. */
enum { FEW_BLOCKS = 10, MOST_AT_ONCE = 32 };
static int64_t balanced_heads_at_once(const fa_problem *p, const fa_cuda_kernel *kernel,
                                      const fa_cuda_arguments *a, int64_t num_multiprocessors, int64_t wanted) {
  const int64_t num_heads = num_groups(p, kernel, a), num_blocks = num_heads * a->num_k_blocks;
  if (num_blocks <= num_multiprocessors || num_blocks > FEW_BLOCKS * num_multiprocessors) return wanted;
  int64_t sum = 0, best = wanted;
  for (int64_t i = 0; i < a->num_k_blocks; i++) sum += steps_of_column_block(p, kernel, a, i);
  const double even = (double)sum * (double)num_heads / (double)num_multiprocessors;
  double least = imbalance(p, kernel, a, num_multiprocessors, wanted, even), price = 1.03;
  for (int64_t most = 2 * wanted; most <= MOST_AT_ONCE && most < 2 * num_heads; most *= 2, price *= 1.03) {
    const int64_t each = fa_divide_up(num_heads, fa_divide_up(num_heads, most)); /* in each group */
    const double time = price * imbalance(p, kernel, a, num_multiprocessors, each, even);
    if (time < least) best = each, least = time;
  }
  return best;
}

/* How many heads' column blocks the backward begins alternately. Where they add to dq in any order, a few heads
 * do, and with a mask 8 if the cache holds them, because their rows and dq_sum stay there, or as many as make
 * multiprocessors end together. Where they add in order, a column block waits the less, the more heads lie
 * between it and the one before it: without a mask as many as half of the cache holds, in whole rounds of the
 * multiprocessors; with one, which makes column blocks begin at the same rows, at least 16 or 32. The numbers
 * are measured (cuda_log.md, "Hopper, backward"). */
static int32_t backward_heads_at_once(const fa_problem *p, const fa_cuda_kernel *kernel,
                                      const fa_cuda_arguments *a, int64_t num_multiprocessors) {
  const int64_t num_heads = num_groups(p, kernel, a);
  const int64_t head_bytes = p->seqlen_q * heads_a_group(p, kernel, a) * p->head_dim * 8;
  const int64_t cached = (INT64_C(24) << 20) / (head_bytes + 1);
  int64_t wanted = 4;
  if (!a->in_order) {
    wanted = !is_uneven(p) ? 3 : cached >= 8 ? 8 : 4;
    if (kernel->persistent && is_uneven(p) && p->num_bands == 0 && p->lengths_batch == 0)
      wanted = balanced_heads_at_once(p, kernel, a, num_multiprocessors, wanted);
  } else if (kernel->persistent && is_uneven(p)) {
    wanted = kernel->bucket == 64 ? 32 : 16;
    if (kernel->bucket == 64 && cached * 2 / 3 > wanted) wanted = cached * 2 / 3;
  } else if (cached > wanted && a->num_k_blocks > 0) {
    const int64_t rounds = (cached * a->num_k_blocks + num_multiprocessors / 2) / num_multiprocessors;
    const int64_t whole = (rounds > 0 ? rounds : 1) * num_multiprocessors / a->num_k_blocks;
    if (whole > wanted) wanted = whole;
  }
  return (int32_t)(wanted < num_heads ? wanted : num_heads);
}

/* Whether short blocks are begun late, see num_early: where a multiprocessor has few of them, as many heads
 * then end together. A forward of very few is over before that pays for what finding them takes, 2 us; and a
 * backward's dq of all heads is summed at a time then, as the last part of some sums comes late. Where batches
 * have bands of their own they have no plans in common. */
enum { LATE_BLOCKS_FROM = 10, LATE_BLOCKS_TO = 20 };
static bool has_late_blocks(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                            bool backward, int64_t num_multiprocessors) {
  const int64_t num_blocks =
      p->batch * (backward ? p->num_kv_heads * a->num_k_blocks : p->num_heads * a->num_q_blocks);
  return is_general(kernel) && kernel->persistent && !a->in_order && a->num_column_parts == 1 &&
         p->num_bands > 1 && p->bands_batch == 1 && num_blocks <= LATE_BLOCKS_TO * num_multiprocessors &&
         (backward || num_blocks >= LATE_BLOCKS_FROM * num_multiprocessors);
}

/* How many heads' dq is summed at a time. Where main makes dq of the sums, as many are as stay in cache, but at
 * least those that are begun alternately and twice as many again, so that no column block waits for a sum, and
 * all that the multiprocessors have in work where a head has few column blocks, or bands leave it few. */
static int64_t heads_summed(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                            int64_t num_multiprocessors) {
  const int64_t num_heads = p->batch * p->num_heads;
  if (kernel->single_column) return 0;
  if (kernel->finish_dq || a->num_k_blocks == 0 || has_late_blocks(p, kernel, a, true, num_multiprocessors))
    return num_heads;
  const int64_t head_bytes = (int64_t)a->padded_rows * kernel->bucket * 4,
                cached = CACHED_SUM_BYTES / (head_bytes + 1);
  const int64_t begun = 3 * a->heads_at_once,
                in_work = (p->num_bands > 0 || p->lengths_batch > 0 ? HEADS_WHERE_HIDDEN : 1) *
                          fa_divide_up(num_multiprocessors, a->num_k_blocks);
  const int64_t wanted = fa_max(cached, fa_max(begun, in_work) * heads_a_group(p, kernel, a));
  return wanted < num_heads ? wanted : num_heads;
}

/* See heads_together: all heads of a group where column blocks, which are not shared out, differ in length and
 * rows are seen by few of them, which are then at the same rows at any time, so that rows stay in cache. Where
 * many are, their sums hinder each other. A program keeps what it knows of a head. */
enum { ROWS_OF_SHORT_BAND = 2048 };
static int32_t backward_heads_together(const fa_problem *p, const fa_cuda_arguments *a) {
  const int64_t group = p->num_heads / p->num_kv_heads;
  const bool has_short_bands = p->num_bands * ROWS_OF_SHORT_BAND >= p->seqlen_q;
  const bool is_shared_out = a->num_column_parts > 1;
  return has_short_bands && is_uneven(p) && !is_shared_out && !a->program.is_there ? (int32_t)group : 1;
}

/* Takes the plans of one side's blocks; where these are to be ordered, with room for as many more meanwhile. */
static fa_cuda_block_plan *take_plans(fa_arena *workspace, fa_cuda_plans *plans, int64_t num_blocks,
                                      bool of_rows, const fa_cuda_kernel *kernel, fa_cuda_plan_order order) {
  fa_cuda_plan_side *side = &plans->sides[plans->num_sides++];
  *side = (fa_cuda_plan_side){.num_blocks = (int32_t)num_blocks,
                              .size = of_rows ? kernel->block_q : kernel->block_k,
                              .other_size = of_rows ? kernel->block_k : kernel->block_q,
                              .of_rows = of_rows,
                              .order = order};
  const int64_t copies = order == FA_CUDA_BY_NUMBER ? 1 : 2;
  side->plans = fa_take(workspace, plans->bands_batch * num_blocks * copies, sizeof *side->plans);
  return side->plans;
}

/* ---- programs: what acts on scores ---------------------------------------------------------------------- */

/* A tensor of the table, whose role in the pass it is to be there, as the kernels read and write it. */
static fa_cuda_cells cells_of(const fa_problem *p, int id, const fa_tensors *t) {
  const fa_shape shape = fa_tensor_shape(p, (fa_tensor_id)id);
  void *data = fa_tensor_get(t, id)->data;
  const int64_t columns = shape.dims[shape.rank - 1];
  const size_t bytes = fa_dtype_bytes(shape.dtype);
  return (fa_cuda_cells){.data = data,
                         .dtype = shape.dtype,
                         .in_pairs = columns % 2 == 0 && (uintptr_t)data % (2 * bytes) == 0,
                         .in_fours = columns % 4 == 0 && (uintptr_t)data % (4 * bytes) == 0,
                         .stride_batch = stride_along(p, id, FA_AXIS_BATCH),
                         .stride_head = stride_along(p, id, FA_AXIS_NUM_HEADS),
                         .stride_row = stride_along(p, id, FA_AXIS_SEQLEN_Q)};
}

/* f32 sums [batches, num_heads, num_rows, num_columns], of which kernels see those of a single batch or head as
 * everybody's. */
static fa_cuda_cells take_sums(fa_arena *workspace, fa_cuda_reduction *reduction) {
  const fa_cuda_reduction *r = reduction;
  const int64_t head = (int64_t)r->num_rows * r->num_columns, batch = head * r->num_heads;
  float *sums = fa_take(workspace, r->batch * batch, sizeof *sums);
  reduction->from = sums;
  return (fa_cuda_cells){.data = sums,
                         .dtype = FA_DTYPE_F32,
                         .stride_batch = r->batch > 1 ? batch : 0,
                         .stride_head = r->num_heads > 1 ? head : 0,
                         .stride_row = r->num_columns,
                         .in_fours = r->num_columns % 4 == 0};
}

/* Where main leaves the gradient by the bias: in its place where no scores share numbers, or, as f32 of scores
 * that may, where these come in any order; otherwise in sums, of each head and batch where their order counts.
 */
static void lay_out_bias_gradient(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_tensors *t,
                                  fa_arena *workspace, cuda_job *job) {
  fa_cuda_program *program = &job->arguments.program;
  const fa_cuda_cells dbias = job->gradients.dbias = cells_of(p, FA_TENSOR_DBIAS, t);
  const bool is_shared =
      (p->batch > 1 && dbias.stride_batch == 0) || (p->num_heads > 1 && dbias.stride_head == 0);
  const bool is_of_rows = dbias.stride_row == 0,
             adds_here = !is_shared || (dbias.dtype == FA_DTYPE_F32 && !p->deterministic);
  if (!is_of_rows && adds_here) {
    program->dbias = dbias;
    program->dbias_step = is_shared || p->num_bands > 1 ? FA_CUDA_CELLS_ADD : FA_CUDA_CELLS_STORE;
    const bool writes_all = !is_uneven(p) && program->dbias_step == FA_CUDA_CELLS_STORE && p->batch > 0;
    job->zeroed_bias_bytes = writes_all ? 0 : (size_t)fa_tensor_shape(p, FA_TENSOR_DBIAS).size_bytes;
    return;
  }
  const bool is_apart = is_of_rows || p->deterministic;
  job->of_bias.each[0] = (fa_cuda_reduction){.to = dbias,
                                             .num_parts = 1,
                                             .batch = (int32_t)(is_apart ? p->batch : p->bias_batch),
                                             .num_heads = (int32_t)(is_apart ? p->num_heads : p->bias_heads),
                                             .num_rows = is_of_rows ? kernel->row_warps : (int32_t)p->seqlen_q,
                                             .num_columns = (int32_t)p->seqlen_k};
  program->dbias = take_sums(workspace, &job->of_bias.each[0]);
  program->dbias_step = is_of_rows ? FA_CUDA_CELLS_ADD_ROWS : FA_CUDA_CELLS_ADD;
}

/* Of gradients that are one number for all scores of a head, each warp of each column block has sums. */
static void lay_out_head_gradients(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_tensors *t,
                                   fa_arena *workspace, cuda_job *job) {
  fa_cuda_program *program = &job->arguments.program;
  program->num_head_slots = job->arguments.num_k_blocks * (kernel->num_threads / 32);
  for (int i = 0; i < FA_CUDA_NUM_HEAD_NUMBERS; i++) {
    const int gradient = fa_tensor_gradient(of_heads[i]);
    if (!fa_is_sum(p, gradient)) continue;
    job->gradients.of_heads[i] = cells_of(p, gradient, t);
    job->of_heads[i] = (fa_cuda_reduction){.to = job->gradients.of_heads[i],
                                           .num_parts = 1,
                                           .batch = (int32_t)p->batch,
                                           .num_heads = (int32_t)p->num_heads,
                                           .num_rows = program->num_head_slots,
                                           .num_columns = 1};
    program->head_sums[i] = take_sums(workspace, &job->of_heads[i]).data;
  }
}

/* See fa_cuda_program. Where heads share it as well, or batches have masks of their own, which are begun in an
 * order of their own, it is no matter. */
static bool has_bias_of_batches(const fa_problem *p) {
  return has_cells(p) && p->batch > 1 && p->bias_batch == 1 && p->bias_heads > 1 && p->bands_batch <= 1 &&
         p->lengths_batch == 0;
}

/* Gradients' sums are to begin at 0. */
static void lay_out_program(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *t,
                            fa_arena *workspace, cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  if (!(needs_of(p) & FA_CUDA_PROGRAM_NEEDS)) return;
  /* A p that is due 1 / kept has to be a number of its type: at the highest rate 2^16 would be none of f16. */
  const double kept = p->dtype == FA_DTYPE_F16 ? fmax(1 - p->dropout, 1 / 65504.0) : 1 - p->dropout;
  a->program = (fa_cuda_program){.is_there = true,
                                 .factor = 1,
                                 .dropout_seed = t->dropout_seed.data,
                                 .dropout_threshold = (uint32_t)(p->dropout * FA_DROPOUT_ONE),
                                 .kept_factor = (float)(1 / kept),
                                 .kept_exponent = (float)-log2(2 * kept),
                                 .first_batch = (int32_t)p->origin.batch,
                                 .first_head = (int32_t)p->origin.head,
                                 .first_row = p->origin.row};
  if (kernel->halves) a->delta_factor = (float)(2 * kept);
  for (int i = 0; i < FA_CUDA_NUM_HEAD_NUMBERS; i++)
    if (is_there(p, of_heads[i])) a->program.of_heads[i] = cells_of(p, of_heads[i], t);
  if (adds_numbers(p) && !kinds[fa_cuda_kind_of(p)].scaled && !kernel->folds)
    a->program.factor = a->score.factor, a->score.factor = 1;
  if (is_there(p, FA_TENSOR_BIAS)) a->program.bias = cells_of(p, FA_TENSOR_BIAS, t);
  if (has_bias_of_batches(p)) {
    a->program.has_bias_of_batches = true;
    a->heads_at_once = (int32_t)(fa_divide_up(a->heads_at_once, p->batch) * p->batch);
  }
  if (plan->pass != FA_PASS_BACKWARD) return;
  if (fa_is_sum(p, FA_TENSOR_DBIAS)) lay_out_bias_gradient(p, kernel, t, workspace, job);
  lay_out_head_gradients(p, kernel, t, workspace, job);
}

/* A bias that all rows share, or slopes, are made what kernels that read by maps take. */
static void lay_out_keys(const fa_problem *p, const fa_cuda_kernel *kernel, fa_arena *workspace,
                         cuda_job *job) {
  fa_cuda_program *program = &job->arguments.program;
  const bool of_slopes = folds_slopes(p, kernel);
  if (!kernel->mapped || kernel->merge || !(has_keys(p) || of_slopes)) return;
  const fa_cuda_cells *from = of_slopes ? &program->of_heads[FA_CUDA_ALIBI_SLOPES] : &program->bias;
  const int64_t a_row = of_slopes ? 2 : fa_divide_up(p->seqlen_k, FA_CUDA_KEYS_BLOCK) + 1;
  const int64_t heads = from->stride_head ? p->num_heads : 1,
                rows = heads * (from->stride_batch ? p->batch : 1);
  fa_cuda_keys keys = {.stride_head = from->stride_head ? a_row : 0,
                       .stride_batch = from->stride_batch ? heads * a_row : 0};
  const int64_t num_keys = rows * a_row * FA_CUDA_KEYS_BLOCK;
  if (kernel->folds)
    keys.terms = fa_take(workspace, num_keys * FA_CUDA_TERM_WORDS, sizeof *keys.terms);
  else
    keys.addends = fa_take(workspace, num_keys, sizeof *keys.addends);
  if (!of_slopes) keys.kinds = fa_take(workspace, rows * a_row, sizeof *keys.kinds);
  if (!of_slopes && kernel->skips_hidden_keys) {
    keys.shown = fa_take(workspace, fa_divide_up(rows * a_row, 32), sizeof *keys.shown);
    keys.hides = fa_take(workspace, 1, sizeof *keys.hides);
  }
  program->keys = keys;
  job->keys = (fa_cuda_key_reading){.bias = *from,
                                    .of_slopes = of_slopes,
                                    .to = keys,
                                    .per_scale = (float)(1 / p->scale),
                                    .of_f16 = p->dtype == FA_DTYPE_F16,
                                    .bounds = !kinds[fa_cuda_kind_of(p)].scaled,
                                    .seqlen_k = (int32_t)p->seqlen_k,
                                    .num_heads = (int32_t)p->num_heads,
                                    .blocks_a_row = (int32_t)a_row,
                                    .num_blocks = rows * a_row};
}

/* A mask with a flag a score becomes bits of the rows that an accumulator has. */
static void lay_out_flags(const fa_plan *plan, const fa_cuda_kernel *kernel, fa_arena *workspace,
                          cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  const fa_cuda_cells *bias = &a->program.bias;
  if (!kernel->mapped || kernel->merge || !has_flags(p)) return;
  const bool backward = plan->pass == FA_PASS_BACKWARD;
  const int64_t num_rows = backward ? (int64_t)a->num_k_blocks * kernel->block_k : a->padded_rows,
                columns = backward ? kernel->block_q : kernel->block_k,
                num_tiles = fa_divide_up(backward ? p->seqlen_q : p->seqlen_k, FA_CUDA_MOST_FLAG_COLUMNS),
                num_blocks = num_tiles * (FA_CUDA_MOST_FLAG_COLUMNS / columns);
  const int64_t head = num_blocks * num_rows, heads = bias->stride_head ? p->num_heads : 1,
                maps = (bias->stride_batch ? p->batch : 1) * heads, rows = maps * head;
  fa_cuda_flags *flags = &a->program.flags;
  *flags = (fa_cuda_flags){.stride_batch = bias->stride_batch ? heads * head : 0,
                           .stride_head = bias->stride_head ? head : 0,
                           .num_rows = (int32_t)num_rows,
                           .num_blocks = (int32_t)num_blocks,
                           .columns = (int32_t)columns};
  flags->words = fa_take(workspace, rows, (size_t)columns / 8);
  flags->kinds =
      fa_take(workspace, rows / (backward ? FA_CUDA_SHOWN_ROWS : FA_CUDA_FLAG_ROWS), sizeof *flags->kinds);
  job->num_flag_tiles =
      maps * num_tiles * (num_rows / (backward ? FA_CUDA_MOST_FLAG_COLUMNS : FA_CUDA_FLAG_ROWS));
}

/* Words for dropout. A forward's rows are few enough a tile for it to make theirs. */
static void lay_out_words(const fa_plan *plan, fa_arena *workspace, fa_cuda_arguments *a) {
  const fa_problem *p = &plan->problem;
  fa_cuda_program *program = &a->program;
  if (program->dropout_threshold == 0) return;
  const int64_t num_columns = (fa_divide_up(p->seqlen_k, FA_CUDA_KEYS_BLOCK) + 1) * FA_CUDA_KEYS_BLOCK,
                num_rows = plan->pass == FA_PASS_BACKWARD ? p->batch * p->num_heads * a->padded_rows : 0;
  program->num_column_words = num_columns, program->num_row_words = num_rows;
  program->column_words = fa_take(workspace, num_columns, sizeof *program->column_words);
  if (num_rows > 0) program->row_words = fa_take(workspace, num_rows, sizeof *program->row_words);
}

/* Parts of column blocks leave dk and dv as f32, which are to be summed. */
static fa_tensor take_column_parts(const fa_problem *p, const fa_tensor *gradient, int64_t num_parts,
                                   fa_arena *workspace, fa_cuda_reduction *reduction) {
  const int64_t head = p->seqlen_k * p->head_dim, batch = head * p->num_kv_heads;
  float *sums = fa_take(workspace, num_parts * p->batch * batch, sizeof *sums);
  *reduction = (fa_cuda_reduction){.to = {.data = gradient->data,
                                          .dtype = p->dtype,
                                          .in_fours = is_aligned(gradient, (int64_t)fa_dtype_bytes(p->dtype)),
                                          .stride_batch = gradient->stride_batch,
                                          .stride_head = gradient->stride_head,
                                          .stride_row = gradient->stride_row},
                                   .from = sums,
                                   .num_parts = (int32_t)num_parts,
                                   .batch = (int32_t)p->batch,
                                   .num_heads = (int32_t)p->num_kv_heads,
                                   .num_rows = (int32_t)p->seqlen_k,
                                   .num_columns = (int32_t)p->head_dim};
  return (fa_tensor){.data = sums, .stride_batch = batch, .stride_row = p->head_dim, .stride_head = head};
}

static void lay_out_column_parts(const fa_plan *plan, const fa_tensors *t, fa_arena *workspace, cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  if (plan->pass != FA_PASS_BACKWARD || a->num_column_parts == 1) return;
  a->dk = take_column_parts(p, &t->dk, a->num_column_parts, workspace, &job->of_columns.each[0]);
  a->dv = take_column_parts(p, &t->dv, a->num_column_parts, workspace, &job->of_columns.each[1]);
}

/* Parts of keys leave o as f32, and lse, which are to be merged, with the sinks. */
static void lay_out_key_parts(const fa_plan *plan, const fa_cuda_kernel *kernel, fa_arena *workspace,
                              cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  if (!kernel->in_parts) return;
  a->num_column_parts = (int32_t)num_key_parts(fa_plan_whole(plan));
  a->num_sinks = 0;
  const int64_t row = p->num_heads * p->head_dim, num_rows = a->num_column_parts * p->batch * p->seqlen_q;
  a->o = (fa_tensor){.stride_batch = p->seqlen_q * row, .stride_row = row, .stride_head = p->head_dim};
  a->o.data = fa_take(workspace, num_rows * row, sizeof(float));
  a->lse = fa_take(workspace, num_rows * p->num_heads, sizeof *a->lse);
}

/* Parts of the columns leave dq of a backward of few rows as f32, and sinks read delta. All rows are one block,
 * of none, too, so that dk and dv are written. */
static void lay_out_dq_parts(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *t,
                             fa_arena *workspace, cuda_job *job) {
  const fa_problem *p = &plan->problem;
  const fa_plan *whole = fa_plan_whole(plan);
  fa_cuda_arguments *a = &job->arguments;
  job->parts.cache.key_lengths = p->lengths_batch ? t->key_lengths.data : NULL;
  job->parts.cache.lengths_batch = (int32_t)p->lengths_batch;
  a->num_q_blocks = 1;
  a->num_dq_parts = fa_cuda_choose_dq_parts(&whole->problem, kernel, num_multiprocessors(whole->device.index));
  const int64_t num_rows = (int64_t)a->batch * a->num_kv_heads * a->num_dq_parts * kernel->block_q;
  a->dq_sum = fa_take(workspace, a->num_dq_parts > 1 ? num_rows * kernel->bucket : 0, sizeof *a->dq_sum);
  a->delta =
      fa_take(workspace, p->num_sinks > 0 ? p->batch * p->num_heads * a->padded_rows : 0, sizeof *a->delta);
}

/* Whether heads that are begun alternately have the same plans, so that blocks that see nothing come last in
 * all of them. Where batches have plans of their own, a forward lets those be of one batch, if they are fewer
 * than it has: with more, long row blocks of several batches had better come first. */
static void group_by_plans(const fa_problem *p, fa_cuda_arguments *a, bool backward) {
  if (backward && (a->in_order || a->num_column_parts > 1)) return;
  if (a->bands_batch > 1) {
    if (a->program.has_bias_of_batches) return;
    if (backward ? p->num_kv_heads % a->heads_at_once != 0 : a->heads_at_once >= p->num_heads) return;
    while (!backward && p->num_heads % a->heads_at_once != 0) a->heads_at_once--;
  }
  a->skips_unseen = a->tickets;
}

static void lay_out_bands(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *t,
                          fa_arena *workspace, cuda_job *job) {
  const fa_problem *p = &plan->problem;
  const bool backward = plan->pass == FA_PASS_BACKWARD;
  fa_cuda_arguments *a = &job->arguments;
  fa_cuda_plans *plans = &job->plans;
  if (!is_general(kernel)) return;
  a->bands = plans->bands = p->num_bands > 0 ? t->bands.data : NULL;
  a->bands_batch = plans->bands_batch = p->num_bands > 0 ? (int32_t)p->bands_batch : 1;
  a->num_bands = plans->num_bands = (int32_t)fa_max(p->num_bands, 1);
  if (p->lengths_batch > 0) {
    plans->key_lengths = t->key_lengths.data;
    a->bands = plans->bands = fa_take(workspace, 6 * p->lengths_batch, sizeof *plans->bands);
    a->bands_batch = plans->bands_batch = (int32_t)p->lengths_batch;
  }
  plans->window = a->window;
  plans->tickets = backward ? NULL : a->tickets;
  a->row_plans = take_plans(workspace, plans, a->num_q_blocks, true, kernel,
                            backward ? FA_CUDA_BY_NUMBER : FA_CUDA_BY_VISITS);
  if (backward)
    a->column_plans = take_plans(workspace, plans, a->num_k_blocks, false, kernel,
                                 a->in_order ? FA_CUDA_BY_NUMBER : FA_CUDA_BY_BAND);
  if (!has_late_blocks(p, kernel, a, backward, job->num_multiprocessors)) {
    group_by_plans(p, a, backward);
    return;
  }
  fa_cuda_plan_side *side = &plans->sides[plans->num_sides - 1];
  a->num_early = side->num_early = fa_take(workspace, 1, sizeof *side->num_early);
  side->late_visits =
      (float)job->num_multiprocessors / (float)(p->batch * (backward ? p->num_kv_heads : p->num_heads));
}

/* So many groups of threads a block of the kernel that merges parts has, one of which takes four columns a
 * thread. */
static int32_t merging_groups(const fa_cuda_kernel *kernel) {
  return FA_CUDA_PARTS_THREADS * 4 / kernel->bucket;
}

/* Whether a kernel merges parts behind main, and writes o in its place. */
static bool merges_behind(const fa_cuda_kernel *kernel, const fa_cuda_parts *parts) {
  return kernel->merge && parts->num_parts > 1 && !parts->in_cluster;
}

/* Whether main itself makes again what is NaN beside hidden cells: where it is main that writes o. */
static bool main_mends(const fa_cuda_kernel *kernel, const cuda_job *job) {
  return kernel->main_that_mends && job->arguments.suspect && !merges_behind(kernel, &job->parts);
}
static const void *main_of(const fa_cuda_kernel *kernel, const cuda_job *job) {
  return main_mends(kernel, job) ? kernel->main_that_mends : kernel->main;
}

/* What a kernel for few rows is told beside its arguments. Its row blocks are of packed rows. */
static void lay_out_parts(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *t,
                          fa_arena *workspace, cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  if (!kernel->merge) return;
  a->bands = p->num_bands > 0 ? t->bands.data : NULL;
  a->bands_batch = (int32_t)p->bands_batch, a->num_bands = (int32_t)p->num_bands;
  a->num_q_blocks = (int32_t)fa_divide_up(fa_cuda_packed_rows(p), kernel->block_q);
  const fa_plan *whole = fa_plan_whole(plan);
  job->parts = fa_cuda_choose_parts(&whole->problem, kernel, num_multiprocessors(whole->device.index),
                                    job->launches_early);
  job->parts.cache = (fa_cuda_cache){.key_lengths = p->lengths_batch ? t->key_lengths.data : NULL,
                                     .page_table = p->max_pages ? t->page_table.data : NULL,
                                     .lengths_batch = (int32_t)p->lengths_batch,
                                     .max_pages = (int32_t)p->max_pages,
                                     .num_pages = (int32_t)p->num_pages,
                                     .page_size = (int32_t)p->page_size,
                                     .box_rows = box_rows(p, kernel)};
  job->parts.rows_a_unit = (int32_t)fa_min(fa_cuda_packed_rows(p), kernel->block_q);
  if (!merges_behind(kernel, &job->parts)) return;
  job->parts.groups_a_row = 1;
  while (job->parts.groups_a_row < fa_min(job->parts.num_parts, merging_groups(kernel)))
    job->parts.groups_a_row *= 2;
  const int64_t num_states =
      p->batch * p->num_kv_heads * a->num_q_blocks * job->parts.num_parts * job->parts.rows_a_unit;
  job->parts.o = fa_take(workspace, num_states * kernel->bucket, sizeof *job->parts.o);
  job->parts.states = fa_take(workspace, num_states, 2 * sizeof(float));
}

/* Whether a single row sees all keys up to its last one. */
static bool sees_from_first(const fa_problem *p) {
  return p->num_bands == 0 && p->window_left + 1 >= p->seqlen_k && p->window_right >= 0;
}

/* Whether a kernel may read what a row does not see: masks hide cells, and so does -inf in a bias. Of a single
 * row no kernel reads what lies behind its last key, and those for few rows read nothing that it does not see,
 * but for those that take bands, which leave gaps, and read what is added in pairs. In their backward all rows
 * see the same. */
static bool hides_cells(const fa_problem *p, const fa_cuda_kernel *kernel, bool backward) {
  if (is_there(p, FA_TENSOR_BIAS)) return true;
  if (kernel->few_rows) return false;
  const bool reads_seen = kernel->merge && !(kernel->takes & FA_CUDA_NEEDS_BANDS);
  return is_uneven(p) && (backward || p->seqlen_q > 1 || !(reads_seen || sees_from_first(p)));
}

/* Whether there may be columns that no row sees. */
static bool leaves_columns(const fa_problem *p) {
  const fa_range seen = fa_band_columns(fa_problem_band(p), (fa_range){0, p->seqlen_q});
  return p->num_bands > 0 || p->lengths_batch > 0 || is_there(p, FA_TENSOR_BIAS) || seen.begin > 0 ||
         seen.end < p->seqlen_k;
}

/* Calls have numbers; 0 is that of none. */
static int32_t number_of_call(void) {
  static atomic_int last;
  return atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
}

/* The column blocks of a backward, or their parts. */
static int64_t num_column_blocks(const fa_cuda_arguments *a) {
  return (int64_t)a->batch * a->num_kv_heads * a->num_k_blocks * a->num_column_parts;
}

/* Whether something can run beside main, and read rows as their tensors have them if these are aligned. */
static bool can_run_beside(const fa_problem *p, const fa_cuda_kernel *kernel, const cuda_job *job) {
  return kernel->beside && job->launches_early && p->head_dim % 8 == 0;
}

/* Whether f32 can be copied beside main, as SplitTeam does, and had better be: where rows see so few columns
 * that copies are a part of the time. They take a third of the multiprocessors as long as main's loads come
 * late, by up to 5 % of long problems (measured: cuda_log.md, "Copies of f32 beside main"). */
enum { MOST_SEEN_BESIDE = 1 << 17 }; /* numbers of k */
static bool can_copy_beside(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                            const cuda_job *job) {
  const int64_t bytes = (int64_t)fa_dtype_bytes(p->dtype);
  return can_run_beside(p, kernel, job) && columns_seen(p) * kernel->bucket <= MOST_SEEN_BESIDE &&
         is_aligned(&a->q_rows, bytes) && is_aligned(&a->k_rows, bytes) && is_aligned(&a->v_rows, bytes);
}

/* Of f32 at 128, where multiprocessors wait for what they load, there is no gain with several bands or dropout.
 */
static bool loses_beside(const fa_problem *p, const fa_cuda_kernel *kernel) {
  return kernel->bucket > 64 && (p->num_bands > 1 || p->dropout != 0);
}

/* Whether a backward's statistics are made beside main, by the first of its multiprocessors, one of so many:
 * where each takes several column blocks, so that these need not be there from the beginning, and a row block
 * is in so few of them that statistics are a part of the time. The heads that share keys are waited for
 * together: a small part of all has to do for those that are begun at first, and with several bands it is no
 * gain (measured: cuda_log.md, "What stands in front of a pass, and behind it"). */
enum { ONE_OF = 3, BLOCKS_BESIDE = 2, MOST_BESIDE = 32, PART_AT_FIRST = 8 };
static bool has_statistics_beside(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                                  const cuda_job *job) {
  const int64_t bytes = (int64_t)fa_dtype_bytes(p->dtype), group = p->num_heads / p->num_kv_heads;
  const bool can_wait =
      group == 1 || (p->num_bands <= 1 && PART_AT_FIRST * a->heads_at_once * group <= p->batch * p->num_heads);
  const bool is_f32 = kinds[fa_cuda_kind_of(p)].scaled;
  if (is_f32 && (!can_copy_beside(p, kernel, a, job) || loses_beside(p, kernel))) return false;
  return can_run_beside(p, kernel, job) && can_wait && is_aligned(&a->o, bytes) &&
         is_aligned(&a->dout_rows, bytes) && (p->num_bands > 1 || a->num_k_blocks <= MOST_BESIDE) &&
         num_column_blocks(a) >= BLOCKS_BESIDE * (int64_t)job->num_multiprocessors;
}

/* Whether a forward's copies of f32, which are those of k and v, are made beside main: where multiprocessors
 * have several row blocks each, and not many heads share keys. */
enum { ROW_BLOCKS_BESIDE = 4, MOST_HEADS_BESIDE = 2 };
static bool has_columns_beside(const fa_problem *p, const fa_cuda_kernel *kernel, const fa_cuda_arguments *a,
                               const cuda_job *job) {
  return can_copy_beside(p, kernel, a, job) && p->num_heads <= MOST_HEADS_BESIDE * p->num_kv_heads &&
         (int64_t)a->batch * a->num_heads * a->num_q_blocks >=
             ROW_BLOCKS_BESIDE * (int64_t)job->num_multiprocessors;
}

/* A forward takes row blocks by ticket where they differ in length, or multiprocessors begin at different
 * times, or where each has more than so many: over these they do not run alike. To make the tickets 0 takes 2
 * us. */
enum { EVEN_BLOCKS_BY_TICKET = 8 };

/* The one place that knows the workspace: called with NULL to size it, and again to run. */
static cuda_job lay_out(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *t, void *base) {
  const fa_problem *p = &plan->problem;
  const bool backward = plan->pass == FA_PASS_BACKWARD;
  const int64_t rows = p->batch * p->num_heads;
  cuda_job job = {.num_multiprocessors = num_multiprocessors(plan->device.index),
                  .launches_early = can_cluster(plan->device.index)};
  fa_arena workspace = {base, 0};
  fa_cuda_arguments *a = &job.arguments;
  a->window = (fa_cuda_window){(int32_t)p->seqlen_q, (int32_t)p->seqlen_k, (int32_t)p->window_left,
                               (int32_t)p->window_right};
  a->score = score_of(p);
  a->scale = (float)p->scale;
  a->delta_factor = 1;
  a->batch = (int32_t)p->batch;
  a->num_heads = (int32_t)p->num_heads;
  a->num_kv_heads = (int32_t)p->num_kv_heads;
  a->head_dim = (int32_t)p->head_dim;
  a->num_sinks = (int32_t)p->num_sinks;
  a->num_q_blocks = (int32_t)fa_divide_up(p->seqlen_q, kernel->block_q);
  a->num_k_blocks = (int32_t)fa_divide_up(p->seqlen_k, kernel->block_k);
  a->in_order = backward && adds_in_order(fa_plan_whole(plan), kernel, a->num_k_blocks);
  a->num_column_parts = backward ? (int32_t)num_parts_of(fa_plan_whole(plan), kernel) : 1;
  a->padded_rows = a->num_q_blocks * kernel->block_q;
  a->o = t->o, a->dq = t->dq, a->dk = t->dk, a->dv = t->dv;
  job.gradients.dk = t->dk, job.gradients.dv = t->dv;
  a->q_rows = t->q, a->k_rows = t->k, a->v_rows = t->v, a->dout_rows = t->dout;
  a->lse = t->lse.data, a->sink = t->sink.data, a->dsink = t->dsink.data;
  if (p->dlse_batch > 0) job.dlse.data = t->dlse.data;
  if (p->dlse_batch == 1) job.dlse.batch_repeats = p->num_heads * p->seqlen_q;
  a->heads_at_once =
      backward ? backward_heads_at_once(p, kernel, a, job.num_multiprocessors) : forward_heads_at_once(p);

  /* First what is to be filled with 0: the sums of a backward's program, and what counts and is counted where
   * its kernel of statistics does not see to that; and the tickets of a forward, unless the plan kernel does.
   */
  lay_out_program(plan, kernel, t, &workspace, &job);
  const bool runs_beside =
      backward ? has_statistics_beside(p, kernel, a, &job) : has_columns_beside(p, kernel, a, &job);
  if (runs_beside && kinds[fa_cuda_kind_of(p)].scaled)
    a->columns_done = fa_take(&workspace, p->batch * p->num_kv_heads * FA_CUDA_DONE_GROUPS(p->seqlen_k) + 1,
                              sizeof *a->columns_done);
  job.zeroed_bytes = workspace.used;
  if (!backward && kernel->persistent &&
      (runs_beside ||
       rows * a->num_q_blocks > (is_uneven(p) ? 1 : EVEN_BLOCKS_BY_TICKET) * job.num_multiprocessors))
    a->tickets = fa_take(&workspace, FA_CUDA_NUM_TICKETS, sizeof *a->tickets);
  if (backward || !is_general(kernel)) job.zeroed_bytes = workspace.used;
  if (kernel->few_rows) {
    lay_out_dq_parts(plan, kernel, t, &workspace, &job);
  } else if (backward) {
    a->tickets = fa_take(&workspace, FA_CUDA_NUM_TICKETS, sizeof *a->tickets);
    a->dq_order = fa_take(&workspace, rows * a->num_q_blocks, sizeof *a->dq_order);
    if (is_general(kernel) && !kernel->finish_dq)
      a->ended = fa_take(&workspace, rows * a->num_q_blocks, sizeof *a->ended);
    if (runs_beside) {
      a->rows_done = fa_take(&workspace, rows * FA_CUDA_DONE_GROUPS(a->padded_rows) + 1, sizeof *a->rows_done);
      job.zeroed_bytes = workspace.used;
    }
    a->num_sums = (int32_t)(heads_summed(p, kernel, a, job.num_multiprocessors) * a->num_q_blocks);
    a->dq_sum = fa_take(&workspace, (int64_t)a->num_sums * kernel->block_q * kernel->bucket, sizeof *a->dq_sum);
    a->shift = fa_take(&workspace, rows * a->padded_rows, sizeof *a->shift);
    if (folds_slopes(p, kernel))
      a->shift_behind = fa_take(&workspace, rows * a->padded_rows, sizeof *a->shift_behind);
    a->delta = fa_take(&workspace, rows * a->padded_rows, sizeof *a->delta);
  }
  if (hides_cells(p, kernel, backward)) {
    a->suspect = fa_take(&workspace, 1, sizeof *a->suspect);
    if (kernel->leaves_notes) a->notes = fa_take(&workspace, rows * a->padded_rows / 16, sizeof *a->notes);
  }
  if (kernel->asks && may_hide_nothing(plan) && a->num_column_parts == 1)
    a->answer = fa_take(&workspace, 1, sizeof *a->answer);
  job.looks_at_columns = backward && leaves_columns(p) && !kernel->finish_dq;
  lay_out_keys(p, kernel, &workspace, &job);
  lay_out_flags(plan, kernel, &workspace, &job);
  lay_out_words(plan, &workspace, a);
  lay_out_bands(plan, kernel, t, &workspace, &job);
  lay_out_column_parts(plan, t, &workspace, &job);
  if (backward) a->heads_together = backward_heads_together(p, a), a->block_k = kernel->block_k;
  lay_out_key_parts(plan, kernel, &workspace, &job);
  job.splits = (fa_cuda_splits){
      .num_parts = kinds[fa_cuda_kind_of(p)].num_parts, .batch = a->batch, .head_dim = a->head_dim};
  a->q = kernel->mapped && !backward ? view(p, t->q, p->seqlen_q, p->num_heads)
                                     : operand(p, kernel, t->q, p->seqlen_q, p->num_heads, &workspace, &job);
  a->k = operand(p, kernel, t->k, p->seqlen_k, p->num_kv_heads, &workspace, &job);
  a->v = operand(p, kernel, t->v, p->seqlen_k, p->num_kv_heads, &workspace, &job);
  if (backward) a->dout = operand(p, kernel, t->dout, p->seqlen_q, p->num_heads, &workspace, &job);
  lay_out_parts(plan, kernel, t, &workspace, &job);
  job.workspace_bytes = workspace.used;
  return job;
}

static fa_status set_attributes_of(const void *main, int32_t shared_bytes, bool clusters, fa_error *error) {
  const char *operation = "cudaFuncSetAttribute";
  CHECK(cudaFuncSetAttribute(main, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  if (clusters) CHECK(cudaFuncSetAttribute(main, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  return FA_STATUS_OK;
}

/* Makes a kernel ready to run on the device. */
static fa_status set_attributes(const fa_cuda_kernel *kernel, int32_t index, fa_error *error) {
  fa_scope scope;
  fa_cuda_facts device;
  fa_status status = fa_cuda_facts_of(index, &device, error);
  if (!status) status = enter_device(&scope, index, error);
  if (status) return status;
  const void *mains[] = {kernel->main, kernel->main_that_mends};
  for (int i = 0; !status && i < 2; i++)
    if (mains[i])
      status = set_attributes_of(mains[i], kernel->shared_bytes, kernel->merge && device.major >= 9, error);
  leave_device(&scope);
  return status;
}

/* Does so once for each kernel and device, and makes the plan's workspace large enough for it. */
static fa_status prepare(fa_plan *plan, const fa_cuda_kernel *kernel, fa_error *error) {
  const int32_t index = plan->device.index;
  fa_status status = FA_STATUS_OK;
  if (!fa_cuda_is_ready(kernel, index)) {
    status = set_attributes(kernel, index, error);
    if (status) return status;
    fa_cuda_note_ready(kernel, index);
  }
  const size_t bytes = lay_out(plan, kernel, &(fa_tensors){0}, NULL).workspace_bytes;
  if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
  return status;
}

/* The kernel for tensors that no tensor map can describe, which only the run sees, in place of one that needs
 * maps. */
static fa_status choose_fallback(const fa_plan *plan, const fa_cuda_kernel **kernel, fa_error *error) {
  return choose_kernel(plan, (*kernel)->merge ? FEW_ROWS : PORTABLE, kernel, error);
}

static fa_status plan_cuda(fa_plan *plan, fa_error *error) {
  const fa_cuda_kernel *kernel = NULL;
  fa_status status = choose_kernel(plan, 0, &kernel, error);
  plan->workspace_bytes = 0; /* a slice's plan begins as a copy of the whole problem's */
  if (!status) status = prepare(plan, kernel, error);
  for (const fa_cuda_kernel *fallback = kernel; !status && fallback->mapped;) {
    status = choose_fallback(plan, &fallback, error);
    if (!status) status = prepare(plan, fallback, error);
  }
  if (status) return status;
  plan->kernel = kernel->name;
  plan->config = kernel;
  return FA_STATUS_OK;
}

/* ---- running ------------------------------------------------------------------------------------- */

static dim3 blocks(int64_t number) { return (dim3){(unsigned)number, 1, 1}; }

/* One block of threads for each of so many pieces of work, or for each multiprocessor. */
static cudaError_t launch_main(const fa_cuda_kernel *kernel, int64_t number, cuda_job *job,
                               cudaStream_t stream) {
  if (kernel->persistent && number > job->num_multiprocessors) number = job->num_multiprocessors;
  return (kernel->begins_early ? fa_cuda_launch_early : fa_cuda_launch)(
      main_of(kernel, job), blocks(number), kernel->num_threads, kernel->shared_bytes,
      (void *[]){&job->arguments, &job->maps}, stream);
}

/* One that waits for the kernel in front of it by itself, and may begin before that is done. */
static cudaError_t launch_behind(const void *kernel, int64_t num_blocks, int32_t num_threads, void **arguments,
                                 const cuda_job *job, cudaStream_t stream) {
  return (job->launches_early ? fa_cuda_launch_early : fa_cuda_launch)(kernel, blocks(num_blocks), num_threads,
                                                                       0, arguments, stream);
}

/* What runs beside main has one of so many multiprocessors at first. It begins when all in front of it is done.
 */
static cudaError_t launch_beside(const fa_cuda_kernel *kernel, void **arguments, const cuda_job *job,
                                 cudaStream_t stream) {
  return fa_cuda_launch(kernel->beside, blocks(fa_divide_up(job->num_multiprocessors, ONE_OF)),
                        FA_CUDA_BESIDE_THREADS, 0, arguments, stream);
}

static fa_status launch_splits(fa_cuda_splits *splits, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the f32 split";
  int64_t num_scales = 0; /* of the tensor that has most */
  for (int i = 0; i < splits->num_tensors; i++) {
    const fa_cuda_operand *to = &splits->tensors[i].to;
    num_scales = fa_max(num_scales, (int64_t)splits->batch * to->num_heads * to->num_scales);
  }
  const int32_t lanes = FA_CUDA_STATISTICS_LANES(splits->head_dim);
  CHECK(fa_cuda_launch(fa_cuda_split_kernels[lanes / 16],
                       (dim3){(unsigned)num_scales, (unsigned)splits->num_tensors, 1},
                       lanes * FA_CUDA_SPLIT_ROWS, 0, (void *[]){splits}, stream));
  return FA_STATUS_OK;
}

/* Launches a small kernel that main waits for. Beside the plans, where there are any, for which it waits
 * itself: so main waits for all that are in front. */
static cudaError_t launch_beside_plans(const void *kernel, int64_t num_blocks, void *argument,
                                       const cuda_job *job, cudaStream_t stream) {
  const bool early = job->plans.num_sides > 0 && job->launches_early;
  return (early ? fa_cuda_launch_early : fa_cuda_launch)(
      kernel, blocks(num_blocks), FA_CUDA_SMALL_KERNEL_THREADS, 0, (void *[]){argument}, stream);
}

static fa_status launch_keys(cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the reading of keys";
  const int64_t num_blocks = fa_divide_up(job->keys.num_blocks, FA_CUDA_SMALL_KERNEL_THREADS / 32);
  CHECK(launch_beside_plans(fa_cuda_keys_kernel, num_blocks, &job->keys, job, stream));
  return FA_STATUS_OK;
}

static fa_status launch_flags(const fa_plan *plan, cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the packing of flags";
  const int64_t num_blocks = fa_divide_up(job->num_flag_tiles, FA_CUDA_SMALL_KERNEL_THREADS / 32);
  CHECK(launch_beside_plans(fa_cuda_flags_kernels[plan->pass == FA_PASS_BACKWARD], num_blocks, &job->arguments,
                            job, stream));
  return FA_STATUS_OK;
}

static fa_status launch_words(cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the drawing of words";
  const fa_cuda_program *program = &job->arguments.program;
  const int64_t num_pairs = (program->num_row_words + program->num_column_words) / 2;
  CHECK(launch_beside_plans(fa_cuda_words_kernel, fa_divide_up(num_pairs, FA_CUDA_SMALL_KERNEL_THREADS),
                            &job->arguments, job, stream));
  return FA_STATUS_OK;
}

static fa_status launch_plans(fa_cuda_plans *plans, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the plan of bands";
  if (plans->key_lengths)
    CHECK(fa_cuda_launch(fa_cuda_lengths_kernel,
                         blocks(fa_divide_up(plans->bands_batch, FA_CUDA_SMALL_KERNEL_THREADS)),
                         FA_CUDA_SMALL_KERNEL_THREADS, 0, (void *[]){plans}, stream));
  CHECK(fa_cuda_launch(fa_cuda_plan_kernel, (dim3){(unsigned)plans->bands_batch, (unsigned)plans->num_sides, 1},
                       FA_CUDA_PLAN_THREADS, 0, (void *[]){plans}, stream));
  return FA_STATUS_OK;
}

static fa_status launch_look(const fa_plan *plan, cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the look at columns";
  const fa_problem *p = &plan->problem;
  if (!job->looks_at_columns) return FA_STATUS_OK;
  const int64_t heads = job->arguments.program.bias.stride_head ? p->num_kv_heads : 1;
  CHECK(launch_beside_plans(fa_cuda_look_kernels[fa_cuda_kind_of(p)],
                            p->batch * heads * fa_divide_up(p->seqlen_k, 32), &job->arguments, job, stream));
  return FA_STATUS_OK;
}

/* One block of threads a part of a unit, in clusters where these merge; or else the kernel that merges behind
 * it, where it can be under way before the parts are done. */
static fa_status launch_parts(const fa_cuda_kernel *kernel, cuda_job *job, cudaStream_t stream,
                              fa_error *error) {
  const char *operation = "launch of the forward of few rows";
  const fa_cuda_arguments *a = &job->arguments;
  const fa_cuda_parts *parts = &job->parts;
  const int64_t num_units = (int64_t)a->batch * a->num_kv_heads * a->num_q_blocks;
  void *arguments[] = {&job->arguments, &job->parts, &job->maps};
  cudaLaunchAttribute cluster = {.id = cudaLaunchAttributeClusterDimension,
                                 .val.clusterDim = {(unsigned)parts->num_parts, 1, 1}};
  const cudaLaunchConfig_t config = {.gridDim = blocks(num_units * parts->num_parts),
                                     .blockDim = {(unsigned)kernel->num_threads, 1, 1},
                                     .dynamicSmemBytes = (size_t)kernel->shared_bytes,
                                     .stream = stream,
                                     .attrs = &cluster,
                                     .numAttrs = parts->in_cluster ? 1 : 0};
  CHECK(cudaLaunchKernelExC(&config, main_of(kernel, job), arguments));
  if (!merges_behind(kernel, parts)) return FA_STATUS_OK;
  const int64_t rows_a_block = merging_groups(kernel) / parts->groups_a_row;
  operation = "launch of the merge";
  CHECK(launch_behind(kernel->merge, fa_divide_up(num_units * parts->rows_a_unit, rows_a_block),
                      FA_CUDA_PARTS_THREADS, arguments, job, stream));
  return FA_STATUS_OK;
}

static fa_status launch_forward(const fa_cuda_kernel *kernel, cuda_job *job, cudaStream_t stream,
                                fa_error *error) {
  const char *operation = "launch of the forward";
  if (kernel->merge) return launch_parts(kernel, job, stream, error);
  const fa_cuda_arguments *a = &job->arguments;
  if (a->columns_done) CHECK(launch_beside(kernel, (void *[]){&job->arguments, &job->splits}, job, stream));
  CHECK(launch_main(kernel, (int64_t)a->batch * a->num_heads * a->num_q_blocks * a->num_column_parts, job,
                    stream));
  return FA_STATUS_OK;
}

/* From sums to gradients. */
static fa_status launch_reductions(cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of a sum of gradients";
  enum { MOST_BLOCKS_Y = 65535, ENOUGH_BLOCKS = 4096 };
  const int32_t small = FA_CUDA_SMALL_KERNEL_THREADS;
  for (int i = 0; i < FA_CUDA_NUM_HEAD_NUMBERS; i++) {
    fa_cuda_reduction *r = &job->of_heads[i];
    const int64_t batches = r->to.stride_batch ? r->batch : 1, heads = r->to.stride_head ? r->num_heads : 1;
    if (r->to.data)
      CHECK(fa_cuda_launch(fa_cuda_reduce_heads_kernel, blocks(batches * heads), small, 0, (void *[]){r},
                           stream));
  }
  fa_cuda_reductions *const of_cells[] = {&job->of_bias, &job->of_columns};
  for (size_t i = 0; i < sizeof of_cells / sizeof *of_cells; i++) {
    const fa_cuda_reduction *r = of_cells[i]->each;
    const int64_t rows = (r->to.stride_batch ? r->batch : 1) * (int64_t)(r->to.stride_head ? r->num_heads : 1) *
                         (r->to.stride_row ? r->num_rows : 1);
    const bool in_fours = r->num_columns % 4 == 0;
    const int32_t lanes = FA_CUDA_REDUCE_LANES;
    const int64_t blocks_y = fa_min(fa_max(fa_divide_up(rows, small / lanes), 1), MOST_BLOCKS_Y),
                  blocks_x = fa_min(fa_divide_up(r->num_columns, lanes * (in_fours ? 4 : 1)),
                                    fa_divide_up(ENOUGH_BLOCKS, blocks_y));
    const dim3 grid = {(unsigned)blocks_x, (unsigned)blocks_y, of_cells[i]->each[1].to.data ? 2 : 1};
    if (r->to.data)
      CHECK(fa_cuda_launch(fa_cuda_reduce_cells_kernels[in_fours], grid, small, 0, (void *[]){of_cells[i]},
                           stream));
  }
  return FA_STATUS_OK;
}

/* Where there is a suspicion, what is NaN is looked at. */
static fa_status launch_mending(const fa_plan *plan, const fa_cuda_kernel *kernel, cuda_job *job,
                                cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the mending of NaN";
  const fa_cuda_kind kind = fa_cuda_kind_of(&plan->problem);
  const bool backward = plan->pass == FA_PASS_BACKWARD;
  const void *mend = backward        ? fa_cuda_mend_kernels[kind]
                     : kernel->merge ? fa_cuda_mend_few_kernels[kind]
                                     : fa_cuda_mend_forward_kernels[kind];
  void *beside = backward ? (void *)&job->gradients : (void *)&job->parts.cache;
  if (!job->arguments.suspect || main_mends(kernel, job)) return FA_STATUS_OK;
  CHECK(launch_behind(mend, job->num_multiprocessors, FA_CUDA_SMALL_KERNEL_THREADS,
                      (void *[]){&job->arguments, beside}, job, stream));
  return FA_STATUS_OK;
}

static fa_status launch_sink_gradient(cuda_job *job, cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the gradient of sinks";
  fa_cuda_arguments *a = &job->arguments;
  CHECK(fa_cuda_launch(fa_cuda_sink_kernel, blocks((int64_t)a->num_sinks * a->num_heads),
                       FA_CUDA_SMALL_KERNEL_THREADS, 0, (void *[]){a, &job->dlse}, stream));
  return FA_STATUS_OK;
}

/* One block of threads a part of all columns of a key/value head; the kernel that adds up dq may begin before.
 */
static fa_status launch_few_rows(const fa_plan *plan, const fa_cuda_kernel *kernel, cuda_job *job,
                                 cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the backward of few rows";
  fa_cuda_arguments *a = &job->arguments;
  const int64_t num_units = (int64_t)a->batch * a->num_kv_heads;
  CHECK(fa_cuda_launch(kernel->main, blocks(num_units * a->num_dq_parts), kernel->num_threads,
                       kernel->shared_bytes, (void *[]){a, &job->dlse, &job->parts.cache}, stream));
  operation = "launch of the sum of dq";
  if (a->num_dq_parts > 1)
    CHECK(launch_behind(kernel->finish_dq, num_units * fa_cuda_packed_rows(&plan->problem),
                        kernel->finish_threads, (void *[]){a}, job, stream));
  return launch_sink_gradient(job, stream, error);
}

static fa_status launch_backward(const fa_plan *plan, const fa_cuda_kernel *kernel, cuda_job *job,
                                 cudaStream_t stream, fa_error *error) {
  const char *operation = "launch of the backward";
  if (kernel->few_rows) return launch_few_rows(plan, kernel, job, stream, error);
  fa_cuda_arguments *a = &job->arguments;
  const int32_t small = FA_CUDA_SMALL_KERNEL_THREADS;
  const int64_t heads = (int64_t)a->batch * a->num_heads;
  const int32_t lanes = FA_CUDA_STATISTICS_LANES(kernel->bucket);
  const int64_t num_blocks = fa_divide_up(heads * a->padded_rows * lanes, small);
  void *arguments[] = {a, &job->dlse, &job->splits};
  if (a->rows_done)
    CHECK(launch_beside(kernel, arguments, job, stream));
  else
    CHECK(fa_cuda_launch(kernel->statistics, blocks(fa_max(num_blocks, 1)), small, 0, arguments, stream));
  CHECK(launch_main(kernel, num_column_blocks(a), job, stream));
  if (kernel->finish_dq)
    CHECK(fa_cuda_launch(kernel->finish_dq, blocks(heads * a->num_q_blocks), kernel->finish_threads, 0,
                         (void *[]){a}, stream));
  fa_status status = launch_sink_gradient(job, stream, error);
  return status ? status : launch_reductions(job, stream, error);
}

static fa_status enqueue(const fa_plan *plan, const fa_cuda_kernel *kernel, void *workspace, cuda_job *job,
                         cudaStream_t stream, fa_error *error) {
  const char *operation = "cudaMemsetAsync";
  if (job->zeroed_bytes) CHECK(cudaMemsetAsync(workspace, 0, job->zeroed_bytes, stream));
  if (job->zeroed_bias_bytes)
    CHECK(cudaMemsetAsync(job->arguments.program.dbias.data, 0, job->zeroed_bias_bytes, stream));
  fa_status status = job->arguments.columns_done ? FA_STATUS_OK : launch_splits(&job->splits, stream, error);
  if (!status) status = launch_plans(&job->plans, stream, error);
  if (!status) status = launch_keys(job, stream, error);
  if (!status) status = launch_flags(plan, job, stream, error);
  if (!status) status = launch_words(job, stream, error);
  if (!status) status = launch_look(plan, job, stream, error);
  if (status) return status;
  status = plan->pass == FA_PASS_FORWARD ? launch_forward(kernel, job, stream, error)
                                         : launch_backward(plan, kernel, job, stream, error);
  return status ? status : launch_mending(plan, kernel, job, stream, error);
}

/* The map of a bias with a number for each score, for a program's kernel; false where no map can describe it.
 */
static bool map_bias(const fa_problem *p, const fa_cuda_kernel *kernel, bool backward, cuda_job *job) {
  fa_cuda_program *program = &job->arguments.program;
  const fa_cuda_cells *bias = &program->bias;
  const int64_t bytes = (int64_t)fa_dtype_bytes(bias->dtype), row = p->seqlen_k;
  if (!has_cells(p) || kinds[fa_cuda_kind_of(p)].scaled) return true; /* read from memory */
  if (backward && program->dbias.data && !program->dbias.in_fours) return false;
  const fa_cuda_operand cells = {.data = bias->data,
                                 .num_cols = (int32_t)p->seqlen_k,
                                 .num_heads = bias->stride_head ? (int32_t)p->num_heads : 1,
                                 .stride_row = row,
                                 .stride_head = bias->stride_head ? bias->stride_head : row,
                                 .stride_batch = bias->stride_batch ? bias->stride_batch : row,
                                 .aligned = (uintptr_t)bias->data % 16 == 0 && row * bytes % 16 == 0};
  if (!fa_cuda_tensor_map_init(&job->maps.bias, &cells, bias->dtype, p->seqlen_q,
                               bias->stride_batch ? p->batch : 1, kernel->block_q))
    return false;
  program->bias_box_columns = (int32_t)(128 / bytes);
  program->bias_boxes = (int32_t)fa_divide_up(kernel->block_k, program->bias_box_columns);
  return true;
}

/* The maps of a kernel for few rows: of pages, where keys lie on these. */
static bool map_keys(const fa_problem *p, fa_dtype element, cuda_job *job) {
  const fa_cuda_cache *cache = &job->parts.cache;
  const int64_t seqlen = p->max_pages ? p->page_size : p->seqlen_k,
                batch = p->max_pages ? p->num_pages : p->batch;
  const int32_t rows = cache->box_rows;
  return fa_cuda_tensor_map_init(&job->maps.k, &job->arguments.k, element, seqlen, batch, rows) &&
         fa_cuda_tensor_map_init(&job->maps.v, &job->arguments.v, element, seqlen, batch, rows);
}

/* False where a tensor map cannot describe a tensor. */
static bool make_maps(const fa_plan *plan, const fa_cuda_kernel *kernel, const fa_tensors *tensors,
                      cuda_job *job) {
  const fa_problem *p = &plan->problem;
  fa_cuda_arguments *a = &job->arguments;
  fa_cuda_maps *maps = &job->maps;
  const bool scaled = kinds[fa_cuda_kind_of(p)].scaled, backward = plan->pass == FA_PASS_BACKWARD;
  if (!map_bias(p, kernel, backward, job)) return false;
  const fa_dtype element = scaled ? FA_DTYPE_F16 : p->dtype;
  if (kernel->merge) return map_keys(p, element, job);
  const int64_t batches = p->batch * job->splits.num_parts;
  if (!fa_cuda_tensor_map_init(&maps->k, &a->k, element, p->seqlen_k, batches, kernel->block_k) ||
      !fa_cuda_tensor_map_init(&maps->v, &a->v, element, p->seqlen_k, batches, kernel->block_k))
    return false;
  const fa_cuda_operand out = view(p, backward ? tensors->dq : tensors->o, p->seqlen_q, p->num_heads);
  const bool maps_out = backward ? !kernel->finish_dq : !scaled && !kernel->in_parts;
  if (maps_out && !fa_cuda_tensor_map_init(&maps->out, &out, p->dtype, p->seqlen_q, p->batch, 16)) return false;
  if (backward) {
    const fa_cuda_operand dk = view(p, tensors->dk, p->seqlen_k, p->num_kv_heads),
                          dv = view(p, tensors->dv, p->seqlen_k, p->num_kv_heads);
    a->maps_columns = !scaled && a->num_column_parts == 1 &&
                      fa_cuda_tensor_map_init(&maps->dk, &dk, p->dtype, p->seqlen_k, p->batch, 16) &&
                      fa_cuda_tensor_map_init(&maps->dv, &dv, p->dtype, p->seqlen_k, p->batch, 16);
    return fa_cuda_tensor_map_init(&maps->q, &a->q, element, p->seqlen_q, batches, kernel->block_q) &&
           fa_cuda_tensor_map_init(&maps->dout, &a->dout, element, p->seqlen_q, batches, kernel->block_q);
  }
  const bool q_mapped =
      fa_cuda_tensor_map_init(&maps->q, &a->q, p->dtype, p->seqlen_q, p->batch, kernel->block_q);
  if (scaled)
    a->q.aligned = q_mapped; /* the kernel finds q, the only tensor that is no copy, without a map too */
  return scaled || q_mapped;
}

static fa_status merge_key_parts(const fa_plan *plan, const cuda_job *job, const fa_tensors *t,
                                 const fa_execution *execution, fa_error *error) {
  const fa_problem *p = &plan->problem;
  const fa_cuda_arguments *a = &job->arguments;
  fa_merge merge = merge_of(p, t);
  merge.num_sinks = p->num_sinks, merge.sink = t->sink.data;
  merge.num_parts = a->num_column_parts;
  for (int i = 0; i < merge.num_parts; i++) {
    const int64_t first_row = i * p->batch * p->seqlen_q * p->num_heads;
    merge.parts[i] = (fa_part){a->o, a->lse + first_row, FA_DTYPE_F32};
    merge.parts[i].o.data = (float *)a->o.data + first_row * p->head_dim;
  }
  return fa_cuda_merge(&merge, false, plan->device.index, execution, error);
}

static fa_status run_on_device(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                               fa_error *error) {
  const fa_cuda_kernel *kernel = plan->config;
  cuda_job job = lay_out(plan, kernel, tensors, execution->workspace);
  while (kernel->mapped && !make_maps(plan, kernel, tensors, &job)) {
    fa_status status = choose_fallback(plan, &kernel, error);
    if (status) return status;
    job = lay_out(plan, kernel, tensors, execution->workspace);
  }
  job.arguments.call = number_of_call();
  job.plans.answer = job.arguments.answer;
  job.plans.call = job.keys.call = job.arguments.call;
  fa_status status = enqueue(plan, kernel, execution->workspace, &job, execution->stream, error);
  return status || !kernel->in_parts ? status : merge_key_parts(plan, &job, tensors, execution, error);
}

/* Sinks that are rows' own join o and lse when a forward's kernels are done, as a merge of one part; their
 * gradient is that of the merge. So kernels read the sinks of all rows alone. */
static fa_status run_row_sinks(const fa_plan *plan, const fa_tensors *t, const fa_execution *execution,
                               fa_error *error) {
  const fa_problem *p = &plan->problem;
  const bool backward = plan->pass == FA_PASS_BACKWARD;
  if (p->num_row_sinks == 0) return FA_STATUS_OK;
  fa_merge merge = merge_of_row_sinks(p, t);
  merge.parts[0] = merge.merged;
  merge.num_parts = backward ? 0 : 1;
  if (backward) {
    merge.dmerged = (fa_part){t->dout, p->dlse_batch > 0 ? t->dlse.data : NULL, p->dtype};
    merge.dsink = t->drow_sinks.data;
  }
  return fa_cuda_merge(&merge, backward, plan->device.index, execution, error);
}

static fa_status run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                     fa_error *error) {
  fa_scope scope;
  fa_status status = enter_device(&scope, plan->device.index, error);
  if (status) return status;
  status = run_on_device(plan, tensors, execution, error);
  if (!status) status = run_row_sinks(plan, tensors, execution, error);
  leave_device(&scope);
  return status;
}

static fa_status unpack(int32_t index, fa_rows to, fa_rows from, int64_t heads_a_row, int64_t num_rows,
                        int64_t head_dim, void *stream, fa_error *error) {
  enum { HEADS_A_BLOCK = FA_CUDA_SMALL_KERNEL_THREADS / 32, MOST_BLOCKS_Y = 65535 };
  fa_cuda_packed packed = {.to = to.data,
                           .from = from.data,
                           .to_pitch = (int64_t)to.pitch,
                           .from_pitch = (int64_t)from.pitch,
                           .heads_a_row = heads_a_row,
                           .num_rows = num_rows,
                           .head_dim = (int32_t)head_dim};
  const dim3 blocks = {(unsigned)((heads_a_row + HEADS_A_BLOCK - 1) / HEADS_A_BLOCK),
                       (unsigned)(num_rows < MOST_BLOCKS_Y ? num_rows : MOST_BLOCKS_Y), 1};
  fa_scope scope;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = check(fa_cuda_launch(fa_cuda_unpack_kernel, blocks, FA_CUDA_SMALL_KERNEL_THREADS, 0,
                                (void *[]){&packed}, stream),
                 "unpacking f32", error);
  leave_device(&scope);
  return status;
}

const fa_backend fa_cuda_backend = {.kind = FA_DEVICE_CUDA,
                                    .num_devices = num_devices,
                                    .device_info = device_info,
                                    .plan = plan_cuda,
                                    .run = run,
                                    .unpack = unpack,
                                    .merge = fa_cuda_merge,
                                    .sum = fa_cuda_sum,
                                    .memory = &fa_cuda_memory,
                                    .link = &fa_cuda_link};
