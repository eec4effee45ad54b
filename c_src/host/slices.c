/* Where a call is cut: policy first, then what a cut makes of problems and tensors. Measurements behind the
 * policy are in bench/results/host_log.md. */
#include "slices.h"

#include <string.h>

#include "../core/integers.h"
#include "../core/problem.h"
#include "../core/tensors.h"

/* ---- what can be cut ------------------------------------------------------------------------------------- */

static const fa_axis head_axes[] = {FA_AXIS_NUM_HEADS, FA_AXIS_NUM_KV_HEADS};

static bool varies_with_heads(const fa_problem *problem, int id) {
  return fa_varies_along(problem, id, head_axes[0]) || fa_varies_along(problem, id, head_axes[1]);
}

static bool varies_with_rows(const fa_problem *problem, int id) {
  return fa_varies_along(problem, id, FA_AXIS_SEQLEN_Q);
}

/* Whether a part of the tensor along an axis, of one batch, has gaps, though nobody chooses its strides. */
static bool comes_apart(const fa_problem *problem, int id, fa_axis axis) {
  if (fa_is_strided(id) || !fa_varies_along(problem, id, axis)) return false;
  const fa_shape shape = fa_tensor_shape(problem, id);
  bool has_gaps = false;
  for (int i = 0; fa_axis_at(problem, id, i) != axis; i++)
    has_gaps |= fa_axis_at(problem, id, i) != FA_AXIS_BATCH && shape.dims[i] > 1;
  return has_gaps;
}

static bool comes_apart_by_heads(const fa_problem *problem, int id) {
  return comes_apart(problem, id, head_axes[0]) || comes_apart(problem, id, head_axes[1]);
}

/* With rows of q go the last keys, which they do not see. */
static bool comes_apart_by_rows(const fa_problem *problem, int id) {
  return comes_apart(problem, id, FA_AXIS_SEQLEN_Q) || comes_apart(problem, id, FA_AXIS_SEQLEN_K);
}

/* What is cut, along what it can be, and how much of what it moves is in pageable memory. */
typedef struct cutting {
  const fa_problem *problem;
  int64_t bytes_moved, pageable_bytes;
  bool batches, heads, rows, can_cut_bands;
} cutting;

/* An output that does not vary along an axis is a sum over it, which slices cannot share. Results of rows that
 * come apart are computed elsewhere and put in place; that is not done for anything else. Some heads of pages
 * lie in rows and in pages, which are two distances where a region has one. */
static void find_cuts(cutting *c, fa_pass pass) {
  const fa_problem *p = c->problem;
  c->batches = c->rows = true;
  c->heads = p->max_pages == 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const fa_tensor_role role = fa_tensor_role_in(p, pass, id);
    if (role == FA_ROLE_NONE) continue;
    const bool is_output = role == FA_ROLE_OUTPUT;
    c->batches &= !is_output || fa_varies_along(p, id, FA_AXIS_BATCH);
    c->heads &= (!is_output || varies_with_heads(p, id)) && !comes_apart_by_heads(p, id);
    c->rows &= is_output ? varies_with_rows(p, id) : !comes_apart_by_rows(p, id);
  }
}

/* ---- policy ---------------------------------------------------------------------------------------------- */

enum {
  EQUAL_SLICES = 8, /* eight, not four: half a slice less at each end is what nothing hides */
  LAST_PARTS = 4    /* of the last heads' rows: of halves the last results begin to go down too late */
};

fa_slicing fa_host_slicing = {
    .least_bytes = 4 << 20,         /* 75 us of the bus, which pauses 6 us after each copy */
    .least_rows = 1 << 15,          /* the first and the last slice are halved down to 1 << 14 */
    .least_row_bytes = 256,         /* 54 GB/s; rows of 128 bytes: 50 */
    .least_staged_row_bytes = 4096, /* copied at 46 GB/s as the whole; of 2048: 30 */
    .row_unit = 384,                /* a multiple of all kernels' tiles of rows */
    .few_rows = 64};                /* as CUDA's kernels have them; the CPU's have 16 */

static bool is_mostly_staged(const cutting *c) { return 2 * c->pageable_bytes > c->bytes_moved; }

/* Rows are as long as in the whole, which is what counts where the processor copies q. Lengths and pages tell
 * positions in the whole, and slopes multiply them, so problems with any of them keep their rows together.
 */
static bool cuts_rows(const cutting *c) {
  return c->rows && (c->problem->num_bands == 0 || c->can_cut_bands) && c->problem->alibi_batch == 0 &&
         c->problem->lengths_batch == 0 && c->problem->max_pages == 0 && is_mostly_staged(c) &&
         c->problem->seqlen_k >= c->problem->seqlen_q;
}

static int64_t num_slices_wanted(const cutting *c) {
  const fa_problem *p = c->problem;
  const int64_t rows = p->batch * p->num_heads * p->seqlen_q;
  if (p->batch > 1 && !c->batches) return 1;
  const int64_t wanted =
      fa_min(c->bytes_moved / fa_host_slicing.least_bytes, rows / fa_host_slicing.least_rows);
  return fa_max(1, fa_min(wanted, EQUAL_SLICES));
}

static int64_t head_row_bytes(const fa_problem *p) { return p->head_dim * (int64_t)fa_dtype_bytes(p->dtype); }

/* How many parts the heads of a batch are divided into where so many are wanted. */
static int64_t num_head_parts(const cutting *c, int64_t parts) {
  const fa_problem *p = c->problem;
  if (!c->heads || parts < 2) return 1;
  const int64_t row_bytes = p->num_kv_heads * head_row_bytes(p);
  if (cuts_rows(c)) parts = fa_min(parts, row_bytes / fa_host_slicing.least_staged_row_bytes);
  if (parts < 2) return 1;
  const int64_t heads_a_part = fa_divide_up(p->num_kv_heads, parts);
  return heads_a_part * head_row_bytes(p) < fa_host_slicing.least_row_bytes
             ? 1
             : fa_divide_up(p->num_kv_heads, heads_a_part);
}

/* So many that a kernel's tiles are full, and are the same as in the whole. */
static int64_t rows_a_part(const fa_problem *p, int64_t num_rows, int64_t parts) {
  return fa_min(fa_round_up(fa_divide_up(num_rows, parts), fa_host_slicing.row_unit), p->seqlen_q);
}

/* How many parts the rows of the last heads are divided into: more than those of other heads. */
static int64_t num_last_parts(const fa_problem *p, int64_t kv_heads, int64_t parts) {
  const int64_t heads = kv_heads * (p->num_heads / p->num_kv_heads);
  const int64_t wanted = fa_min(2 * heads * p->seqlen_q / fa_host_slicing.least_rows, LAST_PARTS);
  return fa_max(wanted, parts);
}

/* Divides the rows of some heads of some batches into slices. */
static void cut_rows(const cutting *c, fa_extent heads, int64_t parts, fa_slices *slices) {
  const fa_problem *p = c->problem;
  const int64_t rows = rows_a_part(p, p->seqlen_q, parts);
  for (int64_t row = 0; row < p->seqlen_q; row += heads.num_rows) {
    const int64_t left = p->seqlen_q - row;
    heads.first_row = row, heads.num_rows = left - rows <= fa_host_slicing.few_rows ? left : rows;
    slices->at[slices->count++].own = heads;
  }
}

static void cut_equally(const cutting *c, int64_t wanted, fa_slices *slices) {
  const fa_problem *p = c->problem;
  const int64_t batches = fa_divide_up(p->batch, wanted), parts = batches > 1 ? 1 : wanted / p->batch;
  const int64_t head_parts = num_head_parts(c, parts), row_parts = cuts_rows(c) ? parts / head_parts : 1;
  const int64_t heads = fa_divide_up(p->num_kv_heads, head_parts);
  for (int64_t batch = 0; batch < p->batch; batch += batches)
    for (int64_t head = 0; head < p->num_kv_heads; head += heads) {
      const fa_extent own = {.first_batch = batch,
                             .num_batches = fa_min(batches, p->batch - batch),
                             .first_head = head,
                             .num_heads = fa_min(heads, p->num_kv_heads - head)};
      const bool is_last = batch + batches >= p->batch && head + heads >= p->num_kv_heads;
      int64_t num_parts = own.num_batches == 1 ? row_parts : 1;
      if (cuts_rows(c) && own.num_batches == 1 && is_last)
        num_parts = num_last_parts(p, own.num_heads, row_parts);
      cut_rows(c, own, num_parts, slices);
    }
}

/* Replaces a slice by its two halves, unless these were too small. */
static bool halve(const cutting *c, int number, fa_slices *slices) {
  const fa_problem *p = c->problem;
  fa_extent first = slices->at[number].own, second = first;
  const int64_t heads = first.num_heads * (p->num_heads / p->num_kv_heads);
  if (slices->count == FA_MAX_SLICES || first.num_batches * heads * first.num_rows < fa_host_slicing.least_rows)
    return false;
  if (first.num_batches > 1) {
    first.num_batches /= 2;
    second.first_batch += first.num_batches, second.num_batches -= first.num_batches;
  } else if (cuts_rows(c)) {
    first.num_rows = rows_a_part(p, first.num_rows, 2);
    if (second.num_rows - first.num_rows <= fa_host_slicing.few_rows) return false;
    second.first_row += first.num_rows, second.num_rows -= first.num_rows;
  } else {
    first.num_heads /= 2;
    if (!c->heads || first.num_heads * head_row_bytes(p) < fa_host_slicing.least_row_bytes) return false;
    second.first_head += first.num_heads, second.num_heads -= first.num_heads;
  }
  memmove(&slices->at[number + 1], &slices->at[number], (size_t)(slices->count++ - number) * sizeof(fa_slice));
  slices->at[number].own = first, slices->at[number + 1].own = second;
  return true;
}

/* Whether a slice of the same batch comes up with those before it, so that rows are longer. At first no more
 * than three times what has come up may, or the device waits; where all wait for what comes up, that does not
 * matter. */
static bool comes_along(const cutting *c, const fa_extent *before, const fa_extent *next) {
  const int64_t all_rows = c->problem->seqlen_q;
  const bool is_soon = is_mostly_staged(c) || before->first_batch > 0 ||
                       before->num_heads + next->num_heads <= 3 * before->first_head;
  return next->first_batch == before->first_batch && before->num_rows == all_rows &&
         next->num_rows == all_rows && is_soon &&
         before->num_heads * head_row_bytes(c->problem) < fa_host_slicing.least_staged_row_bytes;
}

/* The processor copies short rows that lie apart at half the rate. */
static void stage_together(const cutting *c, fa_slices *slices) {
  fa_extent *before = &slices->at[0].staged;
  *before = slices->at[0].own;
  for (fa_slice *slice = slices->at + 1; slice < slices->at + slices->count; slice++) {
    slice->staged = slice->own;
    if (comes_along(c, before, &slice->own)) {
      before->num_heads += slice->own.num_heads;
      slice->staged.num_heads = 0;
    } else {
      before = &slice->staged;
    }
  }
}

/* Nothing hides the last slice's kernel and way down, nor the first one's way up and kernel: these slices are
 * smaller. The first one's matter where the way down takes longest, which is not so where the processor copies
 * what comes up. */
static void cut_problem(const fa_problem *problem, fa_pass pass, int64_t bytes_moved, int64_t pageable_bytes,
                        bool can_cut_bands, fa_slices *slices) {
  cutting c = {.problem = problem,
               .bytes_moved = bytes_moved,
               .pageable_bytes = pageable_bytes,
               .can_cut_bands = can_cut_bands};
  find_cuts(&c, pass);
  slices->count = 0;
  const int64_t wanted = num_slices_wanted(&c);
  if (wanted > 1)
    cut_equally(&c, wanted, slices);
  else
    slices->at[slices->count++].own = fa_whole_extent(problem);
  for (bool halved = wanted > 1; halved;) {
    halved = halve(&c, slices->count - 1, slices);
    if (!is_mostly_staged(&c)) halved |= halve(&c, 0, slices);
  }
  stage_together(&c, slices);
}

static void move(fa_extent *extent, const fa_extent *part) {
  extent->first_batch += part->first_batch;
  extent->first_head += part->first_head;
}

void fa_cut(const fa_problem *problem, const fa_extent *part, fa_pass pass, int64_t bytes_moved,
            int64_t pageable_bytes, bool can_cut_bands, fa_slices *slices) {
  const fa_problem own = fa_problem_of(problem, part);
  cut_problem(&own, pass, bytes_moved, pageable_bytes, can_cut_bands, slices);
  for (fa_slice *slice = slices->at; slice < slices->at + slices->count; slice++)
    move(&slice->own, part), move(&slice->staged, part);
}

/* ---- devices --------------------------------------------------------------------------------------------- */

int32_t fa_split(const fa_problem *problem, fa_pass pass, int32_t num_devices, fa_extent *parts) {
  cutting c = {.problem = problem};
  find_cuts(&c, pass);
  const bool cuts_heads = problem->batch == 1 && c.heads, cuts_batches = problem->batch > 1 && c.batches;
  const int64_t most = cuts_heads ? problem->num_kv_heads : cuts_batches ? problem->batch : 1;
  const int64_t count = fa_min(num_devices, most);
  for (int64_t i = 0; i < count; i++) {
    fa_extent *part = &parts[i];
    *part = fa_whole_extent(problem);
    int64_t *first = cuts_heads ? &part->first_head : &part->first_batch;
    int64_t *size = cuts_heads ? &part->num_heads : &part->num_batches;
    const int64_t all = *size;
    *first = all * i / count;
    *size = all * (i + 1) / count - *first;
  }
  return (int32_t)count;
}

/* ---- an extent as a problem ------------------------------------------------------------------------------ */

/* Keys that no row of the extent sees are left out, but for those that share a tile with others: f32 kernels
 * scale them together. The problem's last row stands beside its last key, so the window moves by as many keys
 * as are there more, and may end before that key. */
static void leave_rows(fa_problem *p, const fa_extent *own) {
  const int64_t rows_after = p->seqlen_q - own->first_row - own->num_rows;
  const int64_t needed = p->seqlen_k - rows_after + fa_min(p->window_right, rows_after);
  const int64_t seqlen_k = fa_min(fa_round_up(needed, fa_host_slicing.row_unit), p->seqlen_k);
  const int64_t more = seqlen_k - (p->seqlen_k - rows_after); /* than stand beside rows */
  p->seqlen_q = own->num_rows;
  if (p->num_bands > 0) { /* which say it all */
    p->window_left = p->window_right = FA_UNBOUNDED;
    fa_problem_canonicalise(p);
    return;
  }
  p->seqlen_k = seqlen_k;
  p->window_right -= more, p->window_left += more;
  fa_problem_canonicalise(p);
}

fa_extent fa_whole_extent(const fa_problem *problem) {
  return (fa_extent){
      .num_batches = problem->batch, .num_heads = problem->num_kv_heads, .num_rows = problem->seqlen_q};
}

fa_problem fa_problem_of(const fa_problem *whole, const fa_extent *own) {
  const int64_t heads_per_kv = whole->num_heads / whole->num_kv_heads;
  fa_problem problem = *whole;
  problem.batch = own->num_batches;
  problem.num_kv_heads = own->num_heads;
  problem.num_heads = own->num_heads * heads_per_kv;
  problem.origin.batch += own->first_batch;
  problem.origin.head += own->first_head * heads_per_kv;
  problem.origin.row += own->first_row;
  if (own->num_rows < whole->seqlen_q) leave_rows(&problem, own);
  fa_axes_follow(&problem, whole);
  return problem;
}

bool fa_needs_own_bands(const fa_problem *problem, const fa_extent *own) {
  return problem->num_bands > 0 && own->num_rows < problem->seqlen_q;
}

void fa_cut_bands(const fa_problem *problem, const fa_extent *own, const int32_t *bands, int32_t *to) {
  memset(to, 0, (size_t)problem->num_bands * 6 * sizeof *to);
  for (int64_t n = 0; n < problem->num_bands; n++, bands += 6, to += 6) {
    const fa_band band = fa_band_within(fa_problem_band(problem), bands);
    const fa_range rows = {fa_max(band.q_begin, own->first_row),
                           fa_min(band.q_end, own->first_row + own->num_rows)};
    if (rows.begin >= rows.end) continue;
    const fa_band part = fa_band_of_rows(band, rows);
    const int64_t words[6] = {part.q_begin - own->first_row,
                              part.q_end - own->first_row,
                              part.k_begin,
                              fa_max(part.k_end, part.k_begin),
                              part.left,
                              part.right};
    for (int i = 0; i < 6; i++) to[i] = (int32_t)fa_max(fa_min(words[i], INT32_MAX), INT32_MIN);
  }
}

/* ---- an extent's regions of tensors ---------------------------------------------------------------------- */

typedef struct place {
  int64_t first, count;
} place;

/* The extent's places along one axis of a tensor. Keys are every extent's. */
static place places_along(const fa_problem *problem, const fa_extent *e, int id, fa_axis axis, int64_t size) {
  const int64_t heads_per_kv = problem->num_heads / problem->num_kv_heads;
  if (!fa_varies_along(problem, id, axis)) return (place){0, size};
  switch (axis) {
    case FA_AXIS_BATCH: return (place){e->first_batch, e->num_batches};
    case FA_AXIS_NUM_HEADS: return (place){e->first_head * heads_per_kv, e->num_heads * heads_per_kv};
    case FA_AXIS_NUM_KV_HEADS: return (place){e->first_head, e->num_heads};
    case FA_AXIS_SEQLEN_Q: return (place){e->first_row, e->num_rows};
    default: return (place){0, size};
  }
}

/* A row reaches from the last axis to the first one outwards of which the extent has only a part. What is
 * further out is the rows' number, as an extent of several batches has all of each. */
fa_region fa_region_of(const fa_problem *problem, const fa_extent *extent, int id, const fa_tensor *tensor) {
  const fa_shape shape = fa_tensor_shape(problem, id);
  const fa_tensor strides = fa_tensor_strides(problem, id, tensor);
  const size_t element = fa_dtype_bytes(shape.dtype);
  fa_region region = {.row_bytes = element, .num_rows = 1};
  bool is_whole = true;
  for (int i = shape.rank - 1; i >= 0; i--) {
    const place at = places_along(problem, extent, id, fa_axis_at(problem, id, i), shape.dims[i]);
    const size_t stride = element * (size_t)(i == shape.rank - 1 ? 1 : strides.strides[i]);
    region.offset += (size_t)at.first * stride;
    if (is_whole) {
      region.row_bytes *= (size_t)at.count;
    } else if (at.count > 1) {
      region.pitch = stride;
      region.num_rows = (size_t)at.count;
    }
    is_whole &= at.count == shape.dims[i];
  }
  return region;
}

bool fa_lies_apart(const fa_problem *problem, const fa_extent *extent, int id) {
  return !fa_is_strided(id) && fa_region_of(problem, extent, id, &(fa_tensor){0}).num_rows > 1;
}

bool fa_is_there_before(const fa_problem *problem, const fa_extent *part, const fa_extent *extent, int id) {
  return (extent->first_batch > part->first_batch && !fa_varies_along(problem, id, FA_AXIS_BATCH)) ||
         (extent->first_head > part->first_head && !varies_with_heads(problem, id)) ||
         (extent->first_row > part->first_row && !varies_with_rows(problem, id));
}
