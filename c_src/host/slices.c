#include "slices.h"

#include <string.h>

#include "../core/problem.h"

/* What is cut, and how much of what it moves is in pageable memory. */
typedef struct cutting {
  const fa_problem *problem;
  fa_pass pass;
  int64_t bytes_moved, pageable_bytes;
} cutting;

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- how a problem is cut -------------------------------------------------------------------------------- */

enum { EQUAL_SLICES = 8, LAST_PARTS = 4 }; /* at most; the first and the last are cut further */

fa_slicing fa_host_slicing = {.least_bytes = 4 << 20,
                              .least_rows = 1 << 15,
                              .least_row_bytes = 256,
                              .least_staged_row_bytes = 4096,
                              .row_unit = 384};

static int64_t num_slices_wanted(const cutting *cutting) {
  const fa_problem *p = cutting->problem;
  const int64_t rows = p->batch * p->num_heads * p->seqlen_q;
  if (fa_tensor_role_in(p, cutting->pass, FA_TENSOR_DSINK) == FA_ROLE_OUTPUT) return 1; /* a sum over batches */
  const int64_t wanted =
      smaller(cutting->bytes_moved / fa_host_slicing.least_bytes, rows / fa_host_slicing.least_rows);
  return wanted < 1 ? 1 : smaller(wanted, EQUAL_SLICES);
}

/* Of one head. */
static int64_t head_row_bytes(const fa_problem *p) { return p->head_dim * (int64_t)fa_dtype_bytes(p->dtype); }

static bool is_mostly_staged(const cutting *cutting) {
  return 2 * cutting->pageable_bytes > cutting->bytes_moved;
}

/* Where q is copied by the processor, a forward is cut by its rows, which are as long as in the whole; and by
 * heads as far as rows stay long. */
static bool cuts_rows(const cutting *cutting) {
  const fa_problem *p = cutting->problem;
  return cutting->pass == FA_PASS_FORWARD && is_mostly_staged(cutting) && p->seqlen_k >= p->seqlen_q;
}

/* In how many parts the heads of a batch are cut, of so many parts. */
static int64_t num_head_parts(const cutting *cutting, int64_t parts) {
  const fa_problem *p = cutting->problem;
  if (p->num_sinks || parts < 2) return 1;
  const int64_t row_bytes = p->num_kv_heads * head_row_bytes(p);
  if (cuts_rows(cutting)) parts = smaller(parts, row_bytes / fa_host_slicing.least_staged_row_bytes);
  if (parts < 2) return 1;
  const int64_t heads_a_part = divide_up(p->num_kv_heads, parts);
  return heads_a_part * head_row_bytes(p) < fa_host_slicing.least_row_bytes
             ? 1
             : divide_up(p->num_kv_heads, heads_a_part);
}

/* So many that tiles of kernels are full, and the same as in the whole. */
static int64_t rows_a_part(const fa_problem *p, int64_t num_rows, int64_t parts) {
  const int64_t unit = fa_host_slicing.row_unit;
  return smaller(divide_up(divide_up(num_rows, parts), unit) * unit, p->seqlen_q);
}

/* Of the last heads' rows, so many heads of a batch. */
static int64_t num_last_parts(const fa_problem *p, int64_t kv_heads, int64_t parts) {
  const int64_t heads = kv_heads * (p->num_heads / p->num_kv_heads);
  const int64_t wanted = smaller(2 * heads * p->seqlen_q / fa_host_slicing.least_rows, LAST_PARTS);
  return wanted > parts ? wanted : parts;
}

/* Some heads of some batches. */
static void cut_rows(const cutting *cutting, fa_extent heads, int64_t parts, fa_slices *slices) {
  const fa_problem *p = cutting->problem;
  const int64_t rows = rows_a_part(p, p->seqlen_q, parts);
  for (int64_t row = 0; row < p->seqlen_q; row += rows) {
    heads.first_row = row, heads.num_rows = smaller(rows, p->seqlen_q - row);
    slices->at[slices->count++].own = heads;
  }
}

static void cut_equally(const cutting *cutting, int64_t wanted, fa_slices *slices) {
  const fa_problem *p = cutting->problem;
  const int64_t batches = divide_up(p->batch, wanted), parts = batches > 1 ? 1 : wanted / p->batch;
  const int64_t head_parts = num_head_parts(cutting, parts),
                row_parts = cuts_rows(cutting) ? parts / head_parts : 1;
  const int64_t heads = divide_up(p->num_kv_heads, head_parts);
  for (int64_t batch = 0; batch < p->batch; batch += batches)
    for (int64_t head = 0; head < p->num_kv_heads; head += heads) {
      const fa_extent own = {.first_batch = batch,
                             .num_batches = smaller(batches, p->batch - batch),
                             .first_head = head,
                             .num_heads = smaller(heads, p->num_kv_heads - head)};
      const bool is_last = batch + batches >= p->batch && head + heads >= p->num_kv_heads;
      int64_t num_parts = own.num_batches == 1 ? row_parts : 1;
      if (cuts_rows(cutting) && own.num_batches == 1 && is_last)
        num_parts = num_last_parts(p, own.num_heads, row_parts);
      cut_rows(cutting, own, num_parts, slices);
    }
}

/* Replaces a slice by its two halves, unless these were too small. */
static bool halve(const cutting *cutting, int number, fa_slices *slices) {
  const fa_problem *p = cutting->problem;
  fa_extent first = slices->at[number].own, second = first;
  const int64_t heads = first.num_heads * (p->num_heads / p->num_kv_heads);
  if (slices->count == FA_MAX_SLICES || first.num_batches * heads * first.num_rows < fa_host_slicing.least_rows)
    return false;
  if (first.num_batches > 1) {
    first.num_batches /= 2;
    second.first_batch += first.num_batches, second.num_batches -= first.num_batches;
  } else if (cuts_rows(cutting)) {
    first.num_rows = rows_a_part(p, first.num_rows, 2);
    if (first.num_rows >= second.num_rows) return false;
    second.first_row += first.num_rows, second.num_rows -= first.num_rows;
  } else {
    first.num_heads /= 2;
    if (p->num_sinks || first.num_heads * head_row_bytes(p) < fa_host_slicing.least_row_bytes) return false;
    second.first_head += first.num_heads, second.num_heads -= first.num_heads;
  }
  memmove(&slices->at[number + 1], &slices->at[number], (size_t)(slices->count++ - number) * sizeof(fa_slice));
  slices->at[number].own = first, slices->at[number + 1].own = second;
  return true;
}

/* Whether a slice of the same batch comes up with those before it, so that rows are longer. At first no more
 * than three times what has come up, or the device waits; where all waits for what comes up, that does not
 * matter. */
static bool comes_along(const cutting *cutting, const fa_extent *before, const fa_extent *next) {
  const int64_t all_rows = cutting->problem->seqlen_q;
  const bool is_soon = is_mostly_staged(cutting) || before->first_batch > 0 ||
                       before->num_heads + next->num_heads <= 3 * before->first_head;
  return next->first_batch == before->first_batch && before->num_rows == all_rows &&
         next->num_rows == all_rows && is_soon &&
         before->num_heads * head_row_bytes(cutting->problem) < fa_host_slicing.least_staged_row_bytes;
}

/* The processor copies short rows that lie apart at half the rate. */
static void stage_together(const cutting *cutting, fa_slices *slices) {
  fa_extent *before = &slices->at[0].staged;
  *before = slices->at[0].own;
  for (fa_slice *slice = slices->at + 1; slice < slices->at + slices->count; slice++) {
    slice->staged = slice->own;
    if (comes_along(cutting, before, &slice->own)) {
      before->num_heads += slice->own.num_heads;
      slice->staged.num_heads = 0;
    } else {
      before = &slice->staged;
    }
  }
}

/* Nothing hides the last slice's kernel and way down, and the first one's way up and kernel: these are smaller.
 * The first one's matter where the way down takes longest, which is not so where the processor copies what
 * comes up. */
void fa_cut(const fa_problem *problem, fa_pass pass, int64_t bytes_moved, int64_t pageable_bytes,
            fa_slices *slices) {
  const cutting cut = {problem, pass, bytes_moved, pageable_bytes}, *cutting = &cut;
  slices->count = 0;
  const int64_t wanted = num_slices_wanted(cutting);
  if (wanted > 1)
    cut_equally(cutting, wanted, slices);
  else
    slices->at[slices->count++].own = (fa_extent){
        .num_batches = problem->batch, .num_heads = problem->num_kv_heads, .num_rows = problem->seqlen_q};
  for (bool halved = wanted > 1; halved;) {
    halved = halve(cutting, slices->count - 1, slices);
    if (!is_mostly_staged(cutting)) halved |= halve(cutting, 0, slices);
  }
  stage_together(cutting, slices);
}

/* ---- a slice as a problem, and its parts of tensors --------------------------------------------------- */

/* As if there were no other rows, nor keys that these do not see, so that the last row is beside the last key
 * again, or as many keys before it as it sees. */
static void leave_rows(fa_problem *p, const fa_extent *own) {
  const fa_range rows = {own->first_row, own->first_row + own->num_rows};
  const fa_band band = fa_band_of_rows(fa_problem_band(p), rows);
  p->seqlen_q = own->num_rows, p->seqlen_k = band.k_end;
  p->window_left = band.left, p->window_right = band.right;
  fa_problem_canonicalise(p);
}

bool fa_is_of_rows(const fa_problem *problem, const fa_extent *own) {
  return own->num_rows < problem->seqlen_q;
}

fa_problem fa_problem_of(const fa_problem *whole, const fa_extent *own) {
  fa_problem problem = *whole;
  problem.batch = own->num_batches;
  problem.num_kv_heads = own->num_heads;
  const int64_t heads_per_kv = whole->num_heads / whole->num_kv_heads;
  problem.num_heads = own->num_heads * heads_per_kv;
  problem.origin.batch += own->first_batch;
  problem.origin.head += own->first_head * heads_per_kv;
  problem.origin.row += own->first_row;
  if (fa_is_of_rows(whole, own)) leave_rows(&problem, own);
  return problem;
}

bool fa_is_of_keys(int id) {
  return id == FA_TENSOR_K || id == FA_TENSOR_V || id == FA_TENSOR_DK || id == FA_TENSOR_DV;
}

fa_part fa_part_of(const fa_problem *problem, const fa_extent *extent, int id, const fa_tensor *tensor) {
  const fa_shape all = fa_tensor_shape(problem, id);
  if (all.rank == 2)
    return (fa_part){.row_bytes = (size_t)all.size_bytes, .num_rows = 1}; /* sinks are every slice's */
  const bool rows_of_heads = all.rank == 4; /* lse: [batch, num_heads, seqlen_q] */
  const bool all_rows = fa_is_of_keys(id) || extent->num_rows == problem->seqlen_q;
  const int64_t all_heads = all.dims[rows_of_heads ? 2 : 1], share = all_heads / problem->num_kv_heads;
  const int64_t first_head = extent->first_head * share, num_heads = extent->num_heads * share;
  const int64_t first_row = all_rows ? 0 : extent->first_row;
  const int64_t num_rows = all_rows ? all.dims[rows_of_heads ? 1 : 2] : extent->num_rows;
  const size_t element = fa_dtype_bytes(all.dtype);
  const size_t whole =
      (size_t)(extent->num_batches * num_heads * num_rows * (rows_of_heads ? all.dims[3] : 1)) * element;
  if (!rows_of_heads) {
    const size_t offset =
        (size_t)((extent->first_batch * all_heads + first_head) * all.dims[2] + first_row) * element;
    if (all_rows) return (fa_part){.offset = offset, .row_bytes = whole, .num_rows = 1};
    return (fa_part){.offset = offset,
                     .row_bytes = (size_t)num_rows * element,
                     .pitch = (size_t)all.dims[2] * element,
                     .num_rows = (size_t)num_heads};
  }
  const size_t offset = (size_t)(extent->first_batch * tensor->stride_batch + first_row * tensor->stride_row +
                                 first_head * tensor->stride_head) *
                        element;
  if (num_heads == all_heads) return (fa_part){.offset = offset, .row_bytes = whole, .num_rows = 1};
  return (fa_part){.offset = offset,
                   .row_bytes = (size_t)(num_heads * all.dims[3]) * element,
                   .pitch = (size_t)tensor->stride_row * element,
                   .num_rows = (size_t)num_rows};
}
