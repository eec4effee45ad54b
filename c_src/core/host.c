/* Running a plan on tensors in the host's memory, wherever the device keeps its own. */
#include "host.h"

#include <string.h>

#include "backend.h"
#include "clock.h"
#include "error.h"
#include "lane.h"

/* A part of a problem that is a problem of its own: batches from first_batch on, and, of a single batch, key
 * and value heads from first_head on with the query heads that share them. */
typedef struct extent {
  int64_t first_batch, num_batches, first_head, num_heads;
} extent;

/* What is computed at once, with what the processor copies for it: halves of a slice may come up together. */
typedef struct slice {
  extent own, staged;
  fa_plan plan;
} slice;

/* Where a tensor of the pass is. */
typedef struct tensor_place {
  fa_tensor_role role; /* FA_ROLE_NONE also of an empty one */
  bool copied, staged; /* over the bus; through pinned memory */
  size_t bytes;
  fa_tensor host, device;
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
  char *memory; /* the workspace, then every tensor that is on the device only during the call */
} host_run;

static size_t round_up(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

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

enum { EQUAL_SLICES = 8 }; /* at most; the first and the last are cut further */

fa_slicing fa_host_slicing = {.least_bytes = 4 << 20, .least_rows = 1 << 15, .least_row_bytes = 256};

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

/* In how many parts the heads of a batch are cut. Rows lie apart then: the bus does not mind, but the processor
 * does where it copies pageable memory. Where that is most of what moves, it gets fewer and longer ones. */
static int64_t num_head_parts(const host_run *run, int64_t wanted) {
  const fa_problem *p = &run->plan->problem;
  const int64_t most = (is_mostly_staged(run) ? smaller(wanted, EQUAL_SLICES / 2) : wanted) / p->batch;
  if (p->num_sinks || most < 2) return 1;
  const int64_t heads_a_part = divide_up(p->num_kv_heads, most);
  return heads_a_part * head_row_bytes(p) < fa_host_slicing.least_row_bytes
             ? 1
             : divide_up(p->num_kv_heads, heads_a_part);
}

static void add_slice(host_run *run, extent extent) {
  run->slices[run->num_slices++] = (slice){.own = extent, .staged = extent};
}

static void cut_equally(host_run *run, int64_t wanted) {
  const fa_problem *p = &run->plan->problem;
  const int64_t head_parts = num_head_parts(run, wanted);
  const int64_t batches = head_parts > 1 ? 1 : divide_up(p->batch, wanted);
  const int64_t heads = divide_up(p->num_kv_heads, head_parts);
  for (int64_t batch = 0; batch < p->batch; batch += batches)
    for (int64_t head = 0; head < p->num_kv_heads; head += heads)
      add_slice(run, (extent){.first_batch = batch,
                              .num_batches = smaller(batches, p->batch - batch),
                              .first_head = head,
                              .num_heads = smaller(heads, p->num_kv_heads - head)});
}

/* Replaces a slice by its two halves, unless these were too small. */
static bool halve(host_run *run, int number) {
  const fa_problem *p = &run->plan->problem;
  slice first = run->slices[number], second = first;
  const int64_t heads = first.own.num_heads * (p->num_heads / p->num_kv_heads);
  if (run->num_slices == FA_MAX_SLICES ||
      first.own.num_batches * heads * p->seqlen_q < fa_host_slicing.least_rows)
    return false;
  const bool by_batch = first.own.num_batches > 1;
  if (by_batch) {
    first.own.num_batches /= 2;
    second.own.first_batch += first.own.num_batches, second.own.num_batches -= first.own.num_batches;
  } else {
    first.own.num_heads /= 2;
    if (p->num_sinks || first.own.num_heads * head_row_bytes(p) < fa_host_slicing.least_row_bytes) return false;
    second.own.first_head += first.own.num_heads, second.own.num_heads -= first.own.num_heads;
  }
  const bool together = !by_batch && is_mostly_staged(run);
  first.staged = together ? first.staged : first.own;
  second.staged = together ? (extent){0} : second.own;
  memmove(&run->slices[number + 1], &run->slices[number], (size_t)(run->num_slices++ - number) * sizeof(slice));
  run->slices[number] = first, run->slices[number + 1] = second;
  return true;
}

static fa_status plan_slice(host_run *run, slice *slice, fa_error *error) {
  const fa_problem *p = &run->plan->problem;
  fa_plan *plan = &slice->plan;
  *plan = *run->plan;
  plan->problem.batch = slice->own.num_batches;
  plan->problem.num_kv_heads = slice->own.num_heads;
  plan->problem.num_heads = slice->own.num_heads * (p->num_heads / p->num_kv_heads);
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
  if (wanted == 1) add_slice(run, (extent){.num_batches = p->batch, .num_heads = p->num_kv_heads});
  if (wanted > 1) cut_equally(run, wanted);
  for (bool halved = wanted > 1; halved;) {
    halved = halve(run, run->num_slices - 1);
    if (!is_mostly_staged(run)) halved |= halve(run, 0);
  }
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < run->num_slices; i++) status = plan_slice(run, &run->slices[i], error);
  return status;
}

/* How an extent's part of a tensor lies in all of it, in bytes. */
typedef struct part {
  size_t offset, row_bytes, pitch, num_rows;
} part;

static part part_of(const host_run *run, const extent *extent, int id, const fa_tensor *tensor) {
  const fa_shape all = fa_tensor_shape(&run->plan->problem, id);
  if (all.rank == 2)
    return (part){.row_bytes = (size_t)all.size_bytes, .num_rows = 1}; /* sinks are every slice's */
  const bool rows_of_heads = all.rank == 4;                            /* lse: [batch, num_heads, seqlen_q] */
  const int64_t all_heads = all.dims[rows_of_heads ? 2 : 1],
                share = all_heads / run->plan->problem.num_kv_heads;
  const int64_t first_head = extent->first_head * share, num_heads = extent->num_heads * share;
  const size_t element = fa_dtype_bytes(all.dtype);
  const size_t whole = (size_t)(all.size_bytes / (all.dims[0] * all_heads) * extent->num_batches * num_heads);
  if (!rows_of_heads)
    return (part){.offset = (size_t)((extent->first_batch * all_heads + first_head) * all.dims[2]) * element,
                  .row_bytes = whole,
                  .num_rows = 1};
  const size_t offset =
      (size_t)(extent->first_batch * tensor->stride_batch + first_head * tensor->stride_head) * element;
  if (num_heads == all_heads) return (part){.offset = offset, .row_bytes = whole, .num_rows = 1};
  return (part){.offset = offset,
                .row_bytes = (size_t)(num_heads * all.dims[3]) * element,
                .pitch = (size_t)tensor->stride_row * element,
                .num_rows = (size_t)all.dims[1]};
}

/* ---- one slice after the other, on three streams -------------------------------------------------------- */

/* The slice's copies of tensors in that role, of pinned or of pageable memory. */
static int list_copies(const host_run *run, int number, fa_tensor_role role, bool staged, fa_copy *copies) {
  int num_copies = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    const bool once = id == FA_TENSOR_SINK && number > 0;
    if (t->role != role || !t->copied || t->staged != staged || once) continue;
    const slice *slice = &run->slices[number];
    const extent *extent = staged && role == FA_ROLE_INPUT ? &slice->staged : &slice->own;
    if (extent->num_heads == 0) continue;
    const part part = part_of(run, extent, id, &t->host);
    copies[num_copies++] = (fa_copy){.device = {(char *)t->device.data + part.offset, part.pitch},
                                     .host = {(char *)t->host.data + part.offset, part.pitch},
                                     .row_bytes = part.row_bytes,
                                     .num_rows = part.num_rows};
  }
  return num_copies;
}

/* Pinned memory first: the bus is at it while the processor copies what is staged. */
static fa_status copy_slice(host_run *run, int number, fa_tensor_role role, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int staged = 0; !status && staged <= 1; staged++) {
    fa_copy copies[FA_NUM_TENSORS];
    const int num_copies = list_copies(run, number, role, staged, copies);
    if (num_copies) status = fa_lane_copy(run->lane, copies, num_copies, role == FA_ROLE_OUTPUT, staged, error);
  }
  return status;
}

static fa_tensors slice_tensors(const host_run *run, const slice *slice) {
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (run->tensors[id].role == FA_ROLE_NONE) continue;
    fa_tensor tensor = run->tensors[id].device;
    tensor.data = (char *)tensor.data + part_of(run, &slice->own, id, &tensor).offset;
    *fa_tensor_at(&tensors, id) = tensor;
  }
  return tensors;
}

static fa_status start_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  fa_status status = copy_slice(run, number, FA_ROLE_INPUT, error);
  if (!status) status = memory->record(index, lane->slices[number].uploaded, lane->up, error);
  if (!status) status = memory->stream_wait(index, lane->compute, lane->slices[number].uploaded, error);
  if (!status) status = memory->record(index, lane->slices[number].begun, lane->compute, error);
  if (status) return status;
  const fa_tensors tensors = slice_tensors(run, &run->slices[number]);
  status = fa_run(&run->slices[number].plan, &tensors, &run->execution, error);
  return status ? status : memory->record(index, lane->slices[number].done, lane->compute, error);
}

static fa_status fetch_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  fa_status status =
      memory->stream_wait(run->heap->index, run->lane->down, run->lane->slices[number].done, error);
  return status ? status : copy_slice(run, number, FA_ROLE_OUTPUT, error);
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
  return status ? status : memory->event_wait(index, run->lane->finished, error);
}

static bool has_staged_results(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(run, id) && run->tensors[id].staged) return true;
  return false;
}

/* A slice's results go down while the next one's tensors come up: each direction of the bus has its stream.
 * What is staged down keeps the processor until the slice is done, so the next one starts before. */
static fa_status run_slices(host_run *run, fa_error *error) {
  const bool fetch_last = has_staged_results(run);
  fa_status status = wait_for_caller(run, error);
  if (!status) status = start_slice(run, 0, error);
  for (int i = 0; !status && i < run->num_slices; i++) {
    if (!fetch_last) status = fetch_slice(run, i, error);
    if (!status && i + 1 < run->num_slices) status = start_slice(run, i + 1, error);
    if (!status && fetch_last) status = fetch_slice(run, i, error);
  }
  return status ? status : finish(run, error);
}

/* ---- the call ------------------------------------------------------------------------------------------ */

static bool needs_room(const tensor_place *t) { return t->copied && !t->device.data; }

static fa_status place(host_run *run, fa_error *error) {
  size_t bytes = round_up(run->execution.workspace_bytes), used = bytes;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (needs_room(&run->tensors[id])) bytes += round_up(run->tensors[id].bytes);
  if (bytes == 0) return FA_STATUS_OK;
  void *memory;
  fa_status status = fa_pool_take(&run->heap->pool, bytes, &memory, error);
  if (status) return status;
  run->memory = memory;
  run->execution.workspace = memory;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!needs_room(&run->tensors[id])) continue;
    run->tensors[id].device.data = run->memory + used;
    used += round_up(run->tensors[id].bytes);
  }
  return FA_STATUS_OK;
}

static fa_status run_on_device(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = fa_heap_of(run->plan->backend, run->plan->device.index, &run->heap, error);
  if (!status) status = find_tensors(run, given, error);
  if (!status) status = cut(run, error);
  if (!status) status = place(run, error);
  if (!status) status = fa_lane_take(run->heap, run->pageable_bytes, &run->lane, error);
  if (!status) {
    run->execution.stream = run->lane->compute;
    status = run_slices(run, error);
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
