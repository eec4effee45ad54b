/* fa_run_anywhere: a plan runs on tensors wherever they lie. Those that the device cannot use where they are
 * go through its memory and back, slice by slice, while it computes. */
#include <string.h>

#include "../core/backend.h"
#include "../core/clock.h"
#include "../core/error.h"
#include "lane.h"
#include "pack.h"
#include "../core/problem.h"
#include "../core/tensors.h"
#include "slices.h"

/* Where a tensor of the pass is. */
typedef struct tensor_place {
  fa_tensor_role role; /* FA_ROLE_NONE also of an empty one */
  bool copied, staged; /* over the bus; through pinned memory */
  bool packs;          /* as host/pack.h does, into the lane's ring and then to packed, on the device */
  size_t bytes;
  fa_tensor host, device;
  char *packed;
  void *kept; /* where a tensor of the device's memory is wanted as well */
} tensor_place;

typedef struct host_run {
  const fa_plan *plan;
  const fa_placement *placement;
  fa_measurements *measured;
  fa_heap *heap;
  fa_lane *lane;
  tensor_place tensors[FA_NUM_TENSORS];
  size_t pageable_bytes;
  bool on_devices; /* some tensor is on a device already, or the caller's memory there takes one */
  fa_slices slices;
  fa_plan plans[FA_MAX_SLICES];
  fa_execution execution;
  size_t lse_bytes; /* of a slice of some rows, whose lse is computed apart */
  char *memory;     /* the workspace, that lse, then every tensor that is on the device only during the call */
} host_run;

static size_t round_up(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

static size_t packed_bytes(const fa_problem *p, size_t bytes) {
  return bytes / ((size_t)p->head_dim * sizeof(float)) * fa_packed_bytes(p->head_dim);
}

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

static fa_status check_contiguous(const fa_problem *problem, int id, const fa_tensor *tensor, fa_error *error) {
  return is_contiguous(problem, id, tensor)
             ? FA_STATUS_OK
             : fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id),
                               "expected a contiguous tensor, as it has to be copied");
}

/* The device's memory in which the caller wants a tensor, or NULL. */
static void *memory_wanted(const fa_placement *placement, int id) {
  return fa_tensor_at((fa_tensors *)&placement->on_device, id)->data;
}

static fa_status find_tensor(host_run *run, const fa_tensors *given, int id, fa_error *error) {
  const fa_problem *problem = &run->plan->problem;
  tensor_place *t = &run->tensors[id];
  t->bytes = (size_t)fa_tensor_shape(problem, id).size_bytes;
  t->role = t->bytes ? fa_tensor_role_in(problem, run->plan->pass, id) : FA_ROLE_NONE;
  if (t->role == FA_ROLE_NONE) return FA_STATUS_OK;
  t->host = *fa_tensor_get(given, id);
  if (!t->host.data) return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), "a pointer", "NULL");
  const fa_place place =
      run->heap->backend->memory->locate(run->heap->index, t->host.data, bytes_spanned(problem, id, &t->host));
  run->on_devices |= place == FA_PLACE_DEVICE || place == FA_PLACE_OTHER_DEVICE;
  void *wanted = memory_wanted(run->placement, id);
  run->on_devices |= wanted != NULL;
  if (place == FA_PLACE_DEVICE) {
    t->device = t->host;
    t->kept = wanted == t->host.data ? NULL : wanted;
    return t->kept ? check_contiguous(problem, id, &t->host, error) : FA_STATUS_OK;
  }
  fa_status status = check_contiguous(problem, id, &t->host, error);
  if (status) return status;
  t->copied = true;
  t->staged = place == FA_PLACE_HOST;
  if (t->staged) run->pageable_bytes += t->bytes;
  t->device = fa_tensor_contiguous(problem, id, wanted);
  *(is_output(run, id) ? &run->measured->bytes_from_device : &run->measured->bytes_to_device) +=
      (int64_t)t->bytes;
  return FA_STATUS_OK;
}

static fa_status find_tensors(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) status = find_tensor(run, given, id, error);
  return status;
}

/* ---- slices -------------------------------------------------------------------------------------------- */

static fa_status plan_slice(host_run *run, int number, fa_error *error) {
  const fa_problem *whole = &run->plan->problem;
  const fa_extent *own = &run->slices.at[number].own;
  fa_plan *plan = &run->plans[number];
  *plan = *run->plan;
  plan->problem = fa_problem_of(whole, own);
  if (fa_is_of_rows(whole, own)) {
    const size_t lse_bytes = (size_t)fa_tensor_shape(&plan->problem, FA_TENSOR_LSE).size_bytes;
    if (lse_bytes > run->lse_bytes) run->lse_bytes = lse_bytes;
  }
  fa_status status = ((const fa_backend *)plan->backend)->plan(plan, error);
  if (plan->workspace_bytes > run->execution.workspace_bytes)
    run->execution.workspace_bytes = plan->workspace_bytes;
  return status;
}

static fa_status cut(host_run *run, fa_error *error) {
  const int64_t bytes_moved = run->measured->bytes_to_device + run->measured->bytes_from_device;
  fa_cut(&run->plan->problem, run->plan->pass, bytes_moved, (int64_t)run->pageable_bytes, &run->slices);
  fa_status status = FA_STATUS_OK;
  for (int i = 0; !status && i < run->slices.count; i++) status = plan_slice(run, i, error);
  return status;
}

/* The extent's part of a tensor that lies like this one. */
static fa_part part_of(const host_run *run, const fa_extent *extent, int id, const fa_tensor *tensor) {
  return fa_part_of(&run->plan->problem, extent, id, tensor);
}

/* ---- one slice after the other, on three streams -------------------------------------------------------- */

/* With an earlier slice. */
static bool is_there(const host_run *run, int number, int id) {
  return (id == FA_TENSOR_SINK && number > 0) ||
         (fa_is_of_keys(id) && run->slices.at[number].own.first_row > 0);
}

/* In the packed tensor on the device. */
static fa_rows packed_rows(const host_run *run, int id, const fa_part *part) {
  const fa_problem *p = &run->plan->problem;
  return (fa_rows){run->tensors[id].packed + packed_bytes(p, part->offset), packed_bytes(p, part->pitch)};
}

static fa_copy copy_of(const host_run *run, int id, const fa_part *part) {
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
    const fa_slice *slice = &run->slices.at[number];
    if (t->role != role || !t->copied || is_there(run, number, id)) continue;
    const fa_extent *extent = t->staged && role == FA_ROLE_INPUT ? &slice->staged : &slice->own;
    if (extent->num_heads == 0) continue;
    const fa_part part = part_of(run, extent, id, &t->host);
    copies[num_copies] = copy_of(run, id, &part);
    copies[num_copies].slice = number;
    num_copies += (t->staged && fa_staging_fits(run->lane->staging, &copies[num_copies])) == through_ring;
  }
  return num_copies;
}

static fa_status copy_directly(const host_run *run, const fa_copy *copies, int num_copies, bool download,
                               fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  void *stream = download ? run->lane->down : run->lane->up;
  fa_status status = FA_STATUS_OK;
  for (const fa_copy *copy = copies; !status && copy < copies + num_copies; copy++)
    status = memory->copy(run->heap->index, download ? copy->host : copy->device,
                          download ? copy->device : copy->host, copy->row_bytes, copy->num_rows, stream, error);
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

static fa_tensors slice_tensors(const host_run *run, const fa_extent *own) {
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (run->tensors[id].role == FA_ROLE_NONE) continue;
    fa_tensor tensor = run->tensors[id].device;
    tensor.data = (char *)tensor.data + part_of(run, own, id, &tensor).offset;
    *fa_tensor_at(&tensors, id) = tensor;
  }
  if (fa_is_of_rows(&run->plan->problem, own)) tensors.lse.data = slice_lse(run);
  return tensors;
}

static fa_status put_lse(const host_run *run, const fa_extent *own, fa_error *error) {
  const fa_tensor *lse = &run->tensors[FA_TENSOR_LSE].device;
  const fa_part part = part_of(run, own, FA_TENSOR_LSE, lse);
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
    const fa_part part = part_of(run, &run->slices.at[number].own, id, &t->host);
    status = run->heap->backend->unpack(
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
  fa_copy copies[FA_NUM_TENSORS];
  const int num_copies = list_copies(run, number, FA_ROLE_INPUT, false, copies);
  fa_status status = copy_directly(run, copies, num_copies, false, error);
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
  const fa_extent *own = &run->slices.at[number].own;
  const fa_tensors tensors = slice_tensors(run, own);
  status = fa_run(&run->plans[number], &tensors, &run->execution, error);
  if (!status && fa_is_of_rows(&run->plan->problem, own)) status = put_lse(run, own, error);
  return status ? status : memory->record(index, lane->slices[number].done, lane->compute, error);
}

static fa_status fetch_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  fa_copy direct[FA_NUM_TENSORS], staged[FA_NUM_TENSORS];
  const int num_direct = list_copies(run, number, FA_ROLE_OUTPUT, false, direct);
  const int num_staged = list_copies(run, number, FA_ROLE_OUTPUT, true, staged);
  fa_status status =
      memory->stream_wait(run->heap->index, run->lane->down, run->lane->slices[number].done, error);
  if (!status && number > 0 && number == run->slices.count - 1)
    status = memory->record(run->heap->index, run->lane->last, run->lane->down, error);
  if (!status) status = copy_directly(run, direct, num_direct, true, error);
  return status || !num_staged ? status : fa_staging_download(run->lane->staging, staged, num_staged, error);
}

/* The caller's memory on a device belongs to work of the caller's stream. */
static fa_status wait_for_caller(host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  if (!run->on_devices) return FA_STATUS_OK;
  fa_status status = memory->record(index, lane->ready, run->placement->stream, error);
  if (!status) status = memory->stream_wait(index, lane->up, lane->ready, error);
  return status ? status : memory->stream_wait(index, lane->compute, lane->ready, error);
}

/* Behind the last slice, for which the stream that goes down has waited. */
static fa_status copy_kept(const host_run *run, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (const tensor_place *t = run->tensors; !status && t < run->tensors + FA_NUM_TENSORS; t++)
    if (t->kept)
      status = run->heap->backend->memory->copy(run->heap->index, (fa_rows){t->kept, t->bytes},
                                                (fa_rows){t->device.data, t->bytes}, t->bytes, 1,
                                                run->lane->down, error);
  return status;
}

static fa_status finish(host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_status status = copy_kept(run, error);
  if (!status) status = memory->record(index, run->lane->finished, run->lane->down, error);
  if (!status) status = memory->event_wait(index, run->lane->slices[run->slices.count - 1].done, error);
  for (int i = 0; !status && i < run->slices.count; i++) {
    double seconds = 0;
    status = memory->elapsed(index, run->lane->slices[i].begun, run->lane->slices[i].done, &seconds, error);
    run->measured->kernel_seconds += seconds;
  }
  /* The longer a wait, the later it ends: so the last one is short. */
  if (!status && run->slices.count > 1) status = memory->event_wait(index, run->lane->last, error);
  return status ? status : memory->event_wait(index, run->lane->finished, error);
}

static bool has_staged_results(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(run, id) && run->tensors[id].staged) return true;
  return false;
}

/* A slice's results go down while the next one's tensors come up: each direction of the bus has its stream. */
static fa_status run_slices(host_run *run, fa_error *error) {
  fa_status status = begin_uploads(run, 0, run->slices.count, error);
  for (int i = 0; !status && i < run->slices.count; i++) {
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
  for (int i = 0; !status && i < run->slices.count; i++) {
    if (i + 1 < run->slices.count) status = start_alone(run, i + 1, error);
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
  const fa_copy rows = {.row_bytes = (size_t)(p->num_heads * p->head_dim) * sizeof(float), .num_rows = 2};
  return p->dtype == FA_DTYPE_F32 && p->precision == FA_PRECISION_DEFAULT && run->slices.count > 1 &&
         fa_staging_fits(run->lane->staging, &rows) && run->heap->backend->unpack && fa_can_pack(p->head_dim);
}

/* The operands of matrix products, which kernels round to f16. Gradients are those of the dout that was
 * rounded. */
static void choose_packed(host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const int operands[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  if (!can_pack(run)) return;
  for (int i = 0; i < 4; i++) {
    tensor_place *t = &run->tensors[operands[i]];
    t->packs = t->role == FA_ROLE_INPUT && t->staged;
    if (t->packs) run->measured->bytes_to_device -= (int64_t)(t->bytes - packed_bytes(p, t->bytes));
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

/* ---- where the device's memory is the host's ----------------------------------------------------------- */

/* Whether a tensor of the pass has numbers that are wanted in other memory as well. */
static bool is_wanted_elsewhere(const host_run *run, const fa_tensors *given, int id) {
  const fa_problem *problem = &run->plan->problem;
  const void *wanted = memory_wanted(run->placement, id);
  return wanted && wanted != fa_tensor_at((fa_tensors *)given, id)->data &&
         fa_tensor_role_in(problem, run->plan->pass, id) != FA_ROLE_NONE &&
         fa_tensor_shape(problem, id).size_bytes > 0;
}

static fa_status check_wanted(const host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++)
    if (is_wanted_elsewhere(run, given, id))
      status = check_contiguous(&run->plan->problem, id, fa_tensor_at((fa_tensors *)given, id), error);
  return status;
}

static void copy_wanted(const host_run *run, const fa_tensors *given) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_wanted_elsewhere(run, given, id))
      memmove(memory_wanted(run->placement, id), fa_tensor_at((fa_tensors *)given, id)->data,
              (size_t)fa_tensor_shape(&run->plan->problem, id).size_bytes);
}

static fa_status run_in_host_memory(host_run *run, const fa_tensors *given, fa_error *error) {
  const fa_plan *plan = run->plan;
  fa_execution execution = {.workspace_bytes = plan->workspace_bytes};
  fa_status status = check_wanted(run, given, error);
  if (!status) status = fa_device_alloc(plan->device, plan->workspace_bytes, &execution.workspace, error);
  if (status) return status;
  const int64_t begin = fa_nanoseconds();
  status = fa_run(plan, given, &execution, error);
  run->measured->kernel_seconds = (double)(fa_nanoseconds() - begin) * 1e-9;
  if (!status) copy_wanted(run, given);
  fa_device_free(plan->device, execution.workspace, NULL);
  return status;
}

fa_status fa_run_anywhere(const fa_plan *plan, const fa_tensors *tensors, const fa_placement *placement,
                          fa_measurements *measurements, fa_error *error) {
  fa_measurements unread;
  host_run run = {.plan = plan,
                  .placement = placement ? placement : &(fa_placement){0},
                  .measured = measurements ? measurements : &unread};
  *run.measured = (fa_measurements){0};
  const bool has_own_memory = ((const fa_backend *)plan->backend)->memory != NULL;
  return (has_own_memory ? run_on_device : run_in_host_memory)(&run, tensors, error);
}
