/* Running a plan on tensors in the host's memory, wherever the device keeps its own. */
#include "host.h"

#include <string.h>

#include "backend.h"
#include "clock.h"
#include "error.h"
#include "lane.h"
#include "pack.h"
#include "problem.h"

/* A part of a problem that is a problem of its own: batches from first_batch on, and, of a single batch, key
 * and value heads from first_head on with the query heads that share them, or, of a forward, rows of q from
 * first_row on. Keys and values come with the first of these. */
typedef struct extent {
  int64_t first_batch, num_batches, first_head, num_heads, first_row, num_rows;
} extent;

/* What is computed at once, with what the processor copies for it: slices may come up together. */
typedef struct slice {
  extent own, staged;
  fa_plan plan;
} slice;

/* Where a tensor of the pass is. */
typedef struct tensor_place {
  fa_tensor_role role; /* FA_ROLE_NONE also of an empty one */
  bool copied, staged; /* over the bus; through pinned memory */
  bool packs;          /* as core/pack.h does, into the lane's ring and then to packed, on the device */
  size_t bytes;
  fa_tensor host, device;
  char *packed;
} tensor_place;

typedef struct host_run {
  const fa_plan *plan;
  fa_transfers *transfers;
  fa_heap *heap;
  fa_lane *lane;
  tensor_place tensors[FA_NUM_TENSORS];
  size_t pageable_bytes;
  bool on_devices; /* some tensor is on a device already, or the caller's memory there takes one */
  slice slices[FA_MAX_SLICES];
  int num_slices;
  fa_execution execution;
  size_t lse_bytes; /* of a slice of some rows, whose lse is computed apart */
  char *memory;     /* the workspace, that lse, then every tensor that is on the device only during the call */
} host_run;

static size_t round_up(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

static size_t packed_bytes(const fa_problem *p, size_t bytes) {
  return bytes / ((size_t)p->head_dim * sizeof(float)) * fa_packed_bytes(p->head_dim);
}

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static bool is_output(const host_run *run, int id) { return run->tensors[id].role == FA_ROLE_OUTPUT; }

/* ---- where tensors are --------------------------------------------------------------------------------- */

/* Tensors of another rank are contiguous as a whole, whatever their strides say. */
static bool is_contiguous(const fa_problem *problem, int id, const fa_tensor *tensor) {
  const fa_tensor wanted = fa_tensor_contiguous(problem, id, NULL);
  return fa_tensor_shape(problem, id).rank != 4 ||
         (tensor->stride_batch == wanted.stride_batch && tensor->stride_row == wanted.stride_row &&
          tensor->stride_head == wanted.stride_head);
}

/* From the first element to the last; rows may lie anywhere between them. */
static size_t bytes_spanned(const fa_problem *problem, int id, const fa_tensor *tensor) {
  const fa_shape shape = fa_tensor_shape(problem, id);
  if (shape.rank != 4) return (size_t)shape.size_bytes;
  const int64_t last = (shape.dims[0] - 1) * tensor->stride_batch + (shape.dims[1] - 1) * tensor->stride_row +
                       (shape.dims[2] - 1) * tensor->stride_head + shape.dims[3];
  return (size_t)last * fa_dtype_bytes(shape.dtype);
}

static fa_status find_tensor(host_run *run, const fa_tensors *given, int id, fa_error *error) {
  const fa_problem *problem = &run->plan->problem;
  tensor_place *t = &run->tensors[id];
  t->bytes = (size_t)fa_tensor_shape(problem, id).size_bytes;
  t->role = t->bytes ? fa_tensor_role_in(problem, run->plan->pass, id) : FA_ROLE_NONE;
  if (t->role == FA_ROLE_NONE) return FA_STATUS_OK;
  t->host = *fa_tensor_at((fa_tensors *)given, id);
  if (!t->host.data) return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), "a pointer", "NULL");
  const fa_place place =
      run->heap->backend->memory->locate(run->heap->index, t->host.data, bytes_spanned(problem, id, &t->host));
  run->on_devices |= place == FA_PLACE_DEVICE || place == FA_PLACE_OTHER_DEVICE;
  if (place == FA_PLACE_DEVICE) {
    t->device = t->host;
    return FA_STATUS_OK;
  }
  if (!is_contiguous(problem, id, &t->host))
    return fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id),
                           "expected a contiguous tensor, as it has to be copied to the device");
  t->copied = true;
  t->staged = place == FA_PLACE_HOST;
  if (t->staged) run->pageable_bytes += t->bytes;
  void *kept = fa_tensor_at(&run->transfers->on_device, id)->data;
  t->device = fa_tensor_contiguous(problem, id, kept);
  run->on_devices |= kept != NULL;
  *(is_output(run, id) ? &run->transfers->bytes_from_device : &run->transfers->bytes_to_device) +=
      (int64_t)t->bytes;
  return FA_STATUS_OK;
}

static fa_status find_tensors(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) status = find_tensor(run, given, id, error);
  return status;
}

/* ---- slices -------------------------------------------------------------------------------------------- */

enum { EQUAL_SLICES = 8, LAST_PARTS = 4 }; /* at most; the first and the last are cut further */

fa_slicing fa_host_slicing = {.least_bytes = 4 << 20,
                              .least_rows = 1 << 15,
                              .least_row_bytes = 256,
                              .least_staged_row_bytes = 4096,
                              .row_unit = 384};

static int64_t bytes_moved(const host_run *run) {
  return run->transfers->bytes_to_device + run->transfers->bytes_from_device;
}

static int64_t num_slices_wanted(const host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const int64_t rows = p->batch * p->num_heads * p->seqlen_q;
  if (fa_tensor_role_in(p, run->plan->pass, FA_TENSOR_DSINK) == FA_ROLE_OUTPUT)
    return 1; /* a sum over batches */
  const int64_t wanted =
      smaller(bytes_moved(run) / fa_host_slicing.least_bytes, rows / fa_host_slicing.least_rows);
  return wanted < 1 ? 1 : smaller(wanted, EQUAL_SLICES);
}

/* Of one head. */
static int64_t head_row_bytes(const fa_problem *p) { return p->head_dim * (int64_t)fa_dtype_bytes(p->dtype); }

static bool is_mostly_staged(const host_run *run) {
  return 2 * (int64_t)run->pageable_bytes > bytes_moved(run);
}

/* Where q is copied by the processor, a forward is cut by its rows, which are as long as in the whole; and by
 * heads as far as rows stay long. */
static bool cuts_rows(const host_run *run) {
  const fa_problem *p = &run->plan->problem;
  return run->plan->pass == FA_PASS_FORWARD && is_mostly_staged(run) && p->seqlen_k >= p->seqlen_q;
}

/* In how many parts the heads of a batch are cut, of so many parts. */
static int64_t num_head_parts(const host_run *run, int64_t parts) {
  const fa_problem *p = &run->plan->problem;
  if (p->num_sinks || parts < 2) return 1;
  const int64_t row_bytes = p->num_kv_heads * head_row_bytes(p);
  if (cuts_rows(run)) parts = smaller(parts, row_bytes / fa_host_slicing.least_staged_row_bytes);
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
static void cut_rows(host_run *run, extent heads, int64_t parts) {
  const fa_problem *p = &run->plan->problem;
  const int64_t rows = rows_a_part(p, p->seqlen_q, parts);
  for (int64_t row = 0; row < p->seqlen_q; row += rows) {
    heads.first_row = row, heads.num_rows = smaller(rows, p->seqlen_q - row);
    run->slices[run->num_slices++].own = heads;
  }
}

static void cut_equally(host_run *run, int64_t wanted) {
  const fa_problem *p = &run->plan->problem;
  const int64_t batches = divide_up(p->batch, wanted), parts = batches > 1 ? 1 : wanted / p->batch;
  const int64_t head_parts = num_head_parts(run, parts), row_parts = cuts_rows(run) ? parts / head_parts : 1;
  const int64_t heads = divide_up(p->num_kv_heads, head_parts);
  for (int64_t batch = 0; batch < p->batch; batch += batches)
    for (int64_t head = 0; head < p->num_kv_heads; head += heads) {
      const extent own = {.first_batch = batch,
                          .num_batches = smaller(batches, p->batch - batch),
                          .first_head = head,
                          .num_heads = smaller(heads, p->num_kv_heads - head)};
      const bool is_last = batch + batches >= p->batch && head + heads >= p->num_kv_heads;
      const bool cuts = cuts_rows(run) && own.num_batches == 1;
      cut_rows(run, own, !cuts ? 1 : is_last ? num_last_parts(p, own.num_heads, row_parts) : row_parts);
    }
}

/* Replaces a slice by its two halves, unless these were too small. */
static bool halve(host_run *run, int number) {
  const fa_problem *p = &run->plan->problem;
  extent first = run->slices[number].own, second = first;
  const int64_t heads = first.num_heads * (p->num_heads / p->num_kv_heads);
  if (run->num_slices == FA_MAX_SLICES ||
      first.num_batches * heads * first.num_rows < fa_host_slicing.least_rows)
    return false;
  if (first.num_batches > 1) {
    first.num_batches /= 2;
    second.first_batch += first.num_batches, second.num_batches -= first.num_batches;
  } else if (cuts_rows(run)) {
    first.num_rows = rows_a_part(p, first.num_rows, 2);
    if (first.num_rows >= second.num_rows) return false;
    second.first_row += first.num_rows, second.num_rows -= first.num_rows;
  } else {
    first.num_heads /= 2;
    if (p->num_sinks || first.num_heads * head_row_bytes(p) < fa_host_slicing.least_row_bytes) return false;
    second.first_head += first.num_heads, second.num_heads -= first.num_heads;
  }
  memmove(&run->slices[number + 1], &run->slices[number], (size_t)(run->num_slices++ - number) * sizeof(slice));
  run->slices[number].own = first, run->slices[number + 1].own = second;
  return true;
}

/* Whether a slice of the same batch comes up with those before it, so that rows are longer. At first no more
 * than three times what has come up, or the device waits; where all waits for what comes up, that does not
 * matter. */
static bool comes_along(const host_run *run, const extent *before, const extent *next) {
  const int64_t all_rows = run->plan->problem.seqlen_q;
  const bool is_soon = is_mostly_staged(run) || before->first_batch > 0 ||
                       before->num_heads + next->num_heads <= 3 * before->first_head;
  return next->first_batch == before->first_batch && before->num_rows == all_rows &&
         next->num_rows == all_rows && is_soon &&
         before->num_heads * head_row_bytes(&run->plan->problem) < fa_host_slicing.least_staged_row_bytes;
}

/* The processor copies short rows that lie apart at half the rate. */
static void stage_together(host_run *run) {
  extent *before = &run->slices[0].staged;
  *before = run->slices[0].own;
  for (slice *slice = run->slices + 1; slice < run->slices + run->num_slices; slice++) {
    slice->staged = slice->own;
    if (comes_along(run, before, &slice->own)) {
      before->num_heads += slice->own.num_heads;
      slice->staged.num_heads = 0;
    } else {
      before = &slice->staged;
    }
  }
}

/* As if there were no other rows, nor keys that these do not see, so that the last row is beside the last key
 * again, or as many keys before it as it sees. */
static void leave_rows(fa_problem *p, const extent *own) {
  const int64_t rows_after = p->seqlen_q - own->first_row - own->num_rows;
  const int64_t seen = smaller(p->window_right, rows_after);
  p->seqlen_q = own->num_rows;
  p->seqlen_k -= rows_after - seen;
  p->window_right -= seen, p->window_left += seen;
  fa_problem_canonicalise(p);
}

/* Some of a batch's, that is. */
static bool is_of_rows(const host_run *run, const slice *slice) {
  return slice->own.num_rows < run->plan->problem.seqlen_q;
}

static fa_status plan_slice(host_run *run, slice *slice, fa_error *error) {
  const fa_problem *p = &run->plan->problem;
  fa_plan *plan = &slice->plan;
  *plan = *run->plan;
  plan->problem.batch = slice->own.num_batches;
  plan->problem.num_kv_heads = slice->own.num_heads;
  plan->problem.num_heads = slice->own.num_heads * (p->num_heads / p->num_kv_heads);
  if (is_of_rows(run, slice)) {
    leave_rows(&plan->problem, &slice->own);
    const size_t lse_bytes = (size_t)fa_tensor_shape(&plan->problem, FA_TENSOR_LSE).size_bytes;
    if (lse_bytes > run->lse_bytes) run->lse_bytes = lse_bytes;
  }
  fa_status status = ((const fa_backend *)plan->backend)->plan(plan, error);
  if (plan->workspace_bytes > run->execution.workspace_bytes)
    run->execution.workspace_bytes = plan->workspace_bytes;
  return status;
}

/* Nothing hides the last slice's kernel and way down, and the first one's way up and kernel: these are smaller.
 * The first one's matter where the way down takes longest, which is not so where the processor copies what
 * comes up. */
static fa_status cut(host_run *run, fa_error *error) {
  const fa_problem *p = &run->plan->problem;
  const int64_t wanted = num_slices_wanted(run);
  if (wanted > 1)
    cut_equally(run, wanted);
  else
    run->slices[run->num_slices++].own =
        (extent){.num_batches = p->batch, .num_heads = p->num_kv_heads, .num_rows = p->seqlen_q};
  for (bool halved = wanted > 1; halved;) {
    halved = halve(run, run->num_slices - 1);
    if (!is_mostly_staged(run)) halved |= halve(run, 0);
  }
  stage_together(run);
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < run->num_slices; i++) status = plan_slice(run, &run->slices[i], error);
  return status;
}

static bool is_of_keys(int id) {
  return id == FA_TENSOR_K || id == FA_TENSOR_V || id == FA_TENSOR_DK || id == FA_TENSOR_DV;
}

/* How an extent's part of a tensor lies in all of it, in bytes. */
typedef struct part {
  size_t offset, row_bytes, pitch, num_rows;
} part;

static part part_of(const host_run *run, const extent *extent, int id, const fa_tensor *tensor) {
  const fa_problem *problem = &run->plan->problem;
  const fa_shape all = fa_tensor_shape(problem, id);
  if (all.rank == 2)
    return (part){.row_bytes = (size_t)all.size_bytes, .num_rows = 1}; /* sinks are every slice's */
  const bool rows_of_heads = all.rank == 4;                            /* lse: [batch, num_heads, seqlen_q] */
  const bool all_rows = is_of_keys(id) || extent->num_rows == problem->seqlen_q;
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
    if (all_rows) return (part){.offset = offset, .row_bytes = whole, .num_rows = 1};
    return (part){.offset = offset,
                  .row_bytes = (size_t)num_rows * element,
                  .pitch = (size_t)all.dims[2] * element,
                  .num_rows = (size_t)num_heads};
  }
  const size_t offset = (size_t)(extent->first_batch * tensor->stride_batch + first_row * tensor->stride_row +
                                 first_head * tensor->stride_head) *
                        element;
  if (num_heads == all_heads) return (part){.offset = offset, .row_bytes = whole, .num_rows = 1};
  return (part){.offset = offset,
                .row_bytes = (size_t)(num_heads * all.dims[3]) * element,
                .pitch = (size_t)tensor->stride_row * element,
                .num_rows = (size_t)num_rows};
}

/* ---- one slice after the other, on three streams -------------------------------------------------------- */

/* With an earlier slice. */
static bool is_there(const host_run *run, int number, int id) {
  return (id == FA_TENSOR_SINK && number > 0) || (is_of_keys(id) && run->slices[number].own.first_row > 0);
}

/* In the packed tensor on the device. */
static fa_rows packed_rows(const host_run *run, int id, const part *part) {
  const fa_problem *p = &run->plan->problem;
  return (fa_rows){run->tensors[id].packed + packed_bytes(p, part->offset), packed_bytes(p, part->pitch)};
}

static fa_copy copy_of(const host_run *run, int id, const part *part) {
  const tensor_place *t = &run->tensors[id];
  const fa_problem *p = &run->plan->problem;
  fa_copy copy = {.device = {(char *)t->device.data + part->offset, part->pitch},
                  .host = {(char *)t->host.data + part->offset, part->pitch},
                  .row_bytes = part->row_bytes,
                  .num_rows = part->num_rows};
  if (t->packs) {
    copy.device = packed_rows(run, id, part);
    copy.row_bytes = packed_bytes(p, part->row_bytes);
    copy.packed_dim = p->head_dim;
  }
  return copy;
}

/* The slice's copies of tensors in that role: those that go through the lane's ring, or the others. */
static int list_copies(const host_run *run, int number, fa_tensor_role role, bool through_ring,
                       fa_copy *copies) {
  int num_copies = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    const slice *slice = &run->slices[number];
    if (t->role != role || !t->copied || is_there(run, number, id)) continue;
    const extent *extent = t->staged && role == FA_ROLE_INPUT ? &slice->staged : &slice->own;
    if (extent->num_heads == 0) continue;
    const part part = part_of(run, extent, id, &t->host);
    copies[num_copies] = copy_of(run, id, &part);
    copies[num_copies].slice = number;
    num_copies += (t->staged && fa_staging_fits(run->lane->staging, &copies[num_copies])) == through_ring;
  }
  return num_copies;
}

static fa_status copy_one(const host_run *run, const fa_copy *copy, bool download, fa_error *error) {
  return run->heap->backend->memory->copy(run->heap->index, download ? copy->host : copy->device,
                                          download ? copy->device : copy->host, copy->row_bytes, copy->num_rows,
                                          download ? run->lane->down : run->lane->up, error);
}

static fa_status copy_directly(host_run *run, int number, fa_tensor_role role, int *num_copies,
                               fa_error *error) {
  fa_copy copies[FA_NUM_TENSORS];
  *num_copies = list_copies(run, number, role, false, copies);
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < *num_copies; i++)
    status = copy_one(run, &copies[i], role == FA_ROLE_OUTPUT, error);
  return status;
}

/* What goes through the ring, of slices from first on. */
static fa_status begin_uploads(host_run *run, int first, int num_slices, fa_error *error) {
  fa_copy copies[FA_MAX_SLICES * FA_NUM_TENSORS];
  int num_copies = 0;
  for (int i = first; i < first + num_slices; i++)
    num_copies += list_copies(run, i, FA_ROLE_INPUT, true, copies + num_copies);
  return num_copies ? fa_staging_begin_uploads(run->lane->staging, copies, num_copies, error) : FA_STATUS_OK;
}

/* That of rows lies apart in the whole. */
static char *slice_lse(const host_run *run) { return run->memory + round_up(run->execution.workspace_bytes); }

static fa_tensors slice_tensors(const host_run *run, const slice *slice) {
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (run->tensors[id].role == FA_ROLE_NONE) continue;
    fa_tensor tensor = run->tensors[id].device;
    tensor.data = (char *)tensor.data + part_of(run, &slice->own, id, &tensor).offset;
    *fa_tensor_at(&tensors, id) = tensor;
  }
  if (is_of_rows(run, slice)) tensors.lse.data = slice_lse(run);
  return tensors;
}

static fa_status put_lse(const host_run *run, const slice *slice, fa_error *error) {
  const fa_tensor *lse = &run->tensors[FA_TENSOR_LSE].device;
  const part part = part_of(run, &slice->own, FA_TENSOR_LSE, lse);
  return run->heap->backend->memory->copy(
      run->heap->index, (fa_rows){(char *)lse->data + part.offset, part.pitch},
      (fa_rows){slice_lse(run), part.row_bytes}, part.row_bytes, part.num_rows, run->lane->compute, error);
}

static fa_status unpack_slice(const host_run *run, int number, fa_error *error) {
  const int64_t head_dim = run->plan->problem.head_dim;
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    if (!t->packs || is_there(run, number, id)) continue;
    const part part = part_of(run, &run->slices[number].own, id, &t->host);
    status = run->heap->backend->memory->unpack(
        run->heap->index, (fa_rows){(char *)t->device.data + part.offset, part.pitch},
        packed_rows(run, id, &part), (int64_t)(part.row_bytes / sizeof(float)) / head_dim,
        (int64_t)part.num_rows, head_dim, run->lane->compute, error);
  }
  return status;
}

/* The computing stream waits for the slice's inputs. Behind those that go directly may be later slices' that go
 * through the ring: so an event only where there are any. */
static fa_status upload_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  int num_copies;
  fa_status status = copy_directly(run, number, FA_ROLE_INPUT, &num_copies, error);
  if (!status && num_copies) status = memory->record(index, lane->slices[number].uploaded, lane->up, error);
  if (!status && num_copies)
    status = memory->stream_wait(index, lane->compute, lane->slices[number].uploaded, error);
  return status ? status : fa_staging_await(lane->staging, number, lane->compute, error);
}

static fa_status start_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  fa_status status = upload_slice(run, number, error);
  if (!status) status = memory->record(index, lane->slices[number].begun, lane->compute, error);
  if (!status) status = unpack_slice(run, number, error);
  if (status) return status;
  const fa_tensors tensors = slice_tensors(run, &run->slices[number]);
  status = fa_run(&run->slices[number].plan, &tensors, &run->execution, error);
  if (!status && is_of_rows(run, &run->slices[number])) status = put_lse(run, &run->slices[number], error);
  return status ? status : memory->record(index, lane->slices[number].done, lane->compute, error);
}

static fa_status fetch_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  fa_copy staged[FA_NUM_TENSORS];
  const int num_staged = list_copies(run, number, FA_ROLE_OUTPUT, true, staged);
  fa_status status =
      memory->stream_wait(run->heap->index, run->lane->down, run->lane->slices[number].done, error);
  if (!status && number > 0 && number == run->num_slices - 1)
    status = memory->record(run->heap->index, run->lane->last, run->lane->down, error);
  int num_direct;
  if (!status) status = copy_directly(run, number, FA_ROLE_OUTPUT, &num_direct, error);
  return status || !num_staged ? status : fa_staging_download(run->lane->staging, staged, num_staged, error);
}

/* The caller's memory on a device belongs to work of the caller's stream. */
static fa_status wait_for_caller(host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  if (!run->on_devices) return FA_STATUS_OK;
  fa_status status = memory->record(index, lane->ready, run->transfers->stream, error);
  if (!status) status = memory->stream_wait(index, lane->up, lane->ready, error);
  return status ? status : memory->stream_wait(index, lane->compute, lane->ready, error);
}

static fa_status finish(host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_status status = memory->record(index, run->lane->finished, run->lane->down, error);
  if (!status) status = memory->event_wait(index, run->lane->slices[run->num_slices - 1].done, error);
  for (int i = 0; !status && i < run->num_slices; i++) {
    double seconds = 0;
    status = memory->elapsed(index, run->lane->slices[i].begun, run->lane->slices[i].done, &seconds, error);
    run->transfers->kernel_seconds += seconds;
  }
  /* The longer a wait, the later it ends: so the last one is short. */
  if (!status && run->num_slices > 1) status = memory->event_wait(index, run->lane->last, error);
  return status ? status : memory->event_wait(index, run->lane->finished, error);
}

static bool has_staged_results(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(run, id) && run->tensors[id].staged) return true;
  return false;
}

/* A slice's results go down while the next one's tensors come up: each direction of the bus has its stream. */
static fa_status run_slices(host_run *run, fa_error *error) {
  fa_status status = begin_uploads(run, 0, run->num_slices, error);
  for (int i = 0; !status && i < run->num_slices; i++) {
    status = start_slice(run, i, error);
    if (!status) status = fetch_slice(run, i, error);
  }
  return status ? status : fa_staging_end_uploads(run->lane->staging, error);
}

/* What is staged down has the ring to itself, and keeps the processor until the slice is done: so the next one
 * starts before. */
static fa_status start_alone(host_run *run, int number, fa_error *error) {
  fa_status status = begin_uploads(run, number, 1, error);
  if (!status) status = start_slice(run, number, error);
  return status ? status : fa_staging_end_uploads(run->lane->staging, error);
}

static fa_status run_slices_and_stage_results(host_run *run, fa_error *error) {
  fa_status status = start_alone(run, 0, error);
  for (int i = 0; !status && i < run->num_slices; i++) {
    if (i + 1 < run->num_slices) status = start_alone(run, i + 1, error);
    if (!status) status = fetch_slice(run, i, error);
  }
  return status;
}

static fa_status run_all(host_run *run, fa_error *error) {
  fa_status status = wait_for_caller(run, error);
  if (!status) status = (has_staged_results(run) ? run_slices_and_stage_results : run_slices)(run, error);
  return status ? status : finish(run, error);
}

/* ---- the call ------------------------------------------------------------------------------------------ */

static bool needs_room(const tensor_place *t) { return t->copied && !t->device.data; }

/* Where there is enough to move, and a ring whose slots hold rows. */
static bool can_pack(const host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const fa_copy rows = {.row_bytes = (size_t)(p->num_heads * head_row_bytes(p)), .num_rows = 2};
  return p->dtype == FA_DTYPE_F32 && p->precision == FA_PRECISION_DEFAULT && run->num_slices > 1 &&
         fa_staging_fits(run->lane->staging, &rows) && run->heap->backend->memory->unpack &&
         fa_can_pack(p->head_dim);
}

/* The operands of matrix products, which kernels round to f16. Gradients are those of the dout that was
 * rounded. */
static void choose_packed(host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const int operands[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  for (int i = 0; i < 4 && can_pack(run); i++) {
    tensor_place *t = &run->tensors[operands[i]];
    t->packs = t->role == FA_ROLE_INPUT && t->staged;
    if (!t->packs) continue;
    run->transfers->bytes_to_device -= (int64_t)(t->bytes - packed_bytes(p, t->bytes));
  }
}

static fa_status place(host_run *run, fa_error *error) {
  const fa_problem *p = &run->plan->problem;
  size_t bytes = round_up(run->execution.workspace_bytes) + round_up(run->lse_bytes), used = bytes;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    if (needs_room(t)) bytes += round_up(t->bytes);
    if (t->packs) bytes += round_up(packed_bytes(p, t->bytes));
  }
  if (bytes == 0) return FA_STATUS_OK;
  void *memory;
  fa_status status = fa_pool_take(&run->heap->pool, bytes, &memory, error);
  if (status) return status;
  run->memory = memory;
  run->execution.workspace = memory;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    tensor_place *t = &run->tensors[id];
    if (needs_room(t)) {
      t->device.data = run->memory + used;
      used += round_up(t->bytes);
    }
    if (t->packs) {
      t->packed = run->memory + used;
      used += round_up(packed_bytes(p, t->bytes));
    }
  }
  return FA_STATUS_OK;
}

static fa_status run_on_device(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = fa_heap_of(run->plan->backend, run->plan->device.index, &run->heap, error);
  if (!status) status = find_tensors(run, given, error);
  if (!status) status = cut(run, error);
  if (!status) status = fa_lane_take(run->heap, run->pageable_bytes, &run->lane, error);
  if (!status) {
    run->execution.stream = run->lane->compute;
    choose_packed(run);
    status = place(run, error);
    if (!status) status = run_all(run, error);
    fa_lane_give(run->lane); /* after an error, too, the device must be done with the memory below */
  }
  if (run->memory) fa_pool_give(&run->heap->pool, run->memory);
  return status ? status : fa_succeed(error);
}

static fa_status run_on_host(const fa_plan *plan, const fa_tensors *tensors, fa_transfers *transfers,
                             fa_error *error) {
  fa_execution execution = {.workspace_bytes = plan->workspace_bytes};
  fa_status status = fa_device_alloc(plan->device, plan->workspace_bytes, &execution.workspace, error);
  if (status) return status;
  const int64_t begin = fa_nanoseconds();
  status = fa_run(plan, tensors, &execution, error);
  transfers->kernel_seconds = (double)(fa_nanoseconds() - begin) * 1e-9;
  fa_device_free(plan->device, execution.workspace, NULL);
  return status;
}

fa_status fa_run_on_host(const fa_plan *plan, const fa_tensors *tensors, fa_transfers *transfers,
                         fa_error *error) {
  fa_transfers unused = {0};
  if (!transfers) transfers = &unused;
  transfers->bytes_to_device = transfers->bytes_from_device = 0;
  transfers->kernel_seconds = 0;
  if (!((const fa_backend *)plan->backend)->memory) return run_on_host(plan, tensors, transfers, error);
  host_run run = {.plan = plan, .transfers = transfers};
  return run_on_device(&run, tensors, error);
}
