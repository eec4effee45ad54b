/* fa_run_anywhere runs a plan on tensors wherever they lie. Those that the device cannot use where they are go
 * through its memory and back, slice by slice, while it computes. */
#include <stdlib.h>
#include <string.h>

#include "../core/arena.h"
#include "../core/backend.h"
#include "../core/clock.h"
#include "../core/error.h"
#include "../core/problem.h"
#include "../core/tensors.h"
#include "../core/threads.h"
#include "lane.h"
#include "pack.h"
#include "slices.h"

/* Where a tensor of the pass is. One arena has all of the device's memory that only the call needs. */
typedef struct tensor_place {
  fa_tensor_role role;      /* FA_ROLE_NONE also where the tensor is empty */
  bool copied;              /* whether the tensor is copied over the bus, */
  bool staged;              /* whether it does so through pinned memory, */
  bool packs;               /* and whether as packed rows (host/pack.h), which become f32 again on the device */
  size_t bytes, part_bytes; /* of the whole, and of what this device has of it */
  fa_tensor given, device;  /* the caller's tensor, and the one that slices read or write on the device */
  char *packed;             /* the packed rows on the device */
  void *kept;               /* where the caller wants a tensor that lies on the device as well */
  size_t apart_bytes;       /* the size of the largest slice's results that lie apart in the whole: */
  void *apart;              /* they are computed here and then put in place */
} tensor_place;

typedef struct host_run {
  const fa_plan *plan;  /* of the whole problem on this device, */
  const fa_plan *whole; /* and on the one that the caller planned for */
  fa_extent part;       /* of the problem, that this device computes: all of it, or what others leave */
  const fa_placement *placement;
  fa_measurements *measured;
  fa_heap *heap;
  fa_lane *lane;
  tensor_place tensors[FA_NUM_TENSORS];
  size_t pageable_bytes;
  bool on_devices; /* whether the call reads or writes the caller's memory on a device */
  bool at_once;    /* whether all that is staged fits the ring together (see run_at_once), */
  bool in_ring;    /* and kernels write staged results there */
  bool takes_time; /* whether kernels are timed */
  void *up, *down; /* the streams that copy: the lane's, or the one that computes */
  fa_slices slices;
  fa_plan plans[FA_MAX_SLICES];
  int32_t *own_bands;    /* of every slice, where some need bands of their own; */
  char *bands_on_device; /* the same on the device */
  fa_execution execution;
  void *memory; /* the arena's memory on the device */
} host_run;

static size_t packed_bytes(const fa_problem *p, size_t bytes) {
  return bytes / ((size_t)p->head_dim * sizeof(float)) * fa_packed_bytes(p->head_dim);
}

static bool is_output(const host_run *run, int id) { return run->tensors[id].role == FA_ROLE_OUTPUT; }

/* The extent's region of a tensor with this one's strides. */
static fa_region region_of(const host_run *run, const fa_extent *extent, int id, const fa_tensor *tensor) {
  return fa_region_of(&run->plan->problem, extent, id, tensor);
}

/* ---- where tensors are --------------------------------------------------------------------------------- */

static fa_status check_contiguous(const fa_problem *problem, int id, const fa_tensor *tensor, fa_error *error) {
  return fa_is_contiguous(problem, id, tensor)
             ? FA_STATUS_OK
             : fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id),
                               "expected a contiguous tensor, as it has to be copied");
}

/* Where on the device the caller wants a tensor, or NULL. */
static void *memory_wanted(const fa_placement *placement, int id) {
  return fa_tensor_get(&placement->on_device, id)->data;
}

static fa_status find_tensor(host_run *run, const fa_tensors *given, int id, fa_error *error) {
  const fa_problem *problem = &run->plan->problem;
  tensor_place *t = &run->tensors[id];
  t->role = fa_tensor_role_in(problem, run->plan->pass, id);
  if (t->role == FA_ROLE_NONE) return FA_STATUS_OK;
  t->bytes = (size_t)fa_tensor_shape(problem, id).size_bytes;
  if (t->bytes == 0) return t->role = FA_ROLE_NONE, FA_STATUS_OK;
  t->given = *fa_tensor_get(given, id);
  if (!t->given.data)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), "a pointer", "NULL");
  const fa_place place = fa_heap_locate(run->heap, t->given.data, fa_bytes_spanned(problem, id, &t->given));
  run->on_devices |= place == FA_PLACE_DEVICE || place == FA_PLACE_OTHER_DEVICE;
  void *wanted = memory_wanted(run->placement, id);
  run->on_devices |= wanted != NULL;
  if (place == FA_PLACE_DEVICE) {
    t->device = t->given;
    t->kept = wanted == t->given.data ? NULL : wanted;
    return t->kept ? check_contiguous(problem, id, &t->given, error) : FA_STATUS_OK;
  }
  fa_status status = check_contiguous(problem, id, &t->given, error);
  if (!status && t->role == FA_ROLE_INPUT && place != FA_PLACE_OTHER_DEVICE)
    status = fa_tensor_check(problem, id, t->given.data, error);
  if (status) return status;
  t->copied = true;
  t->staged = place == FA_PLACE_HOST;
  t->device = fa_tensor_contiguous(problem, id, wanted);
  const fa_region region = region_of(run, &run->part, id, &t->device);
  t->part_bytes = region.num_rows * region.row_bytes;
  if (t->staged) run->pageable_bytes += t->part_bytes;
  *(is_output(run, id) ? &run->measured->bytes_from_device : &run->measured->bytes_to_device) +=
      (int64_t)t->part_bytes;
  return FA_STATUS_OK;
}

static fa_status find_tensors(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) status = find_tensor(run, given, id, error);
  return status;
}

/* ---- slices -------------------------------------------------------------------------------------------- */

/* Whether a slice's results have gaps in the whole that its own problem does not have. */
static bool computes_apart(const host_run *run, const fa_extent *own, int id) {
  return is_output(run, id) && fa_lies_apart(&run->plan->problem, own, id);
}

/* Whether the only slice is what the caller planned. */
static bool is_planned(const host_run *run) { return run->slices.count == 1 && run->whole == run->plan; }

/* Whether some tensor crosses the bus. */
static bool copies(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (run->tensors[id].role && run->tensors[id].copied) return true;
  return false;
}

static fa_status plan_slice(host_run *run, int number, fa_error *error) {
  const fa_problem *whole = &run->plan->problem;
  const fa_extent *own = &run->slices.at[number].own;
  fa_plan *plan = &run->plans[number];
  *plan = *run->plan;
  if (is_planned(run)) {
    /* Binaries are cut where they are large: what is one piece gives the bits of a slice, too. */
    if (copies(run)) plan->whole = run->whole;
    run->execution.workspace_bytes = plan->workspace_bytes;
    return FA_STATUS_OK;
  }
  plan->whole = run->whole;
  plan->problem = fa_problem_of(whole, own);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const size_t bytes = (size_t)fa_tensor_shape(&plan->problem, id).size_bytes;
    if (computes_apart(run, own, id) && bytes > run->tensors[id].apart_bytes)
      run->tensors[id].apart_bytes = bytes;
  }
  fa_status status = fa_backend_plan(plan, error);
  if (plan->workspace_bytes > run->execution.workspace_bytes)
    run->execution.workspace_bytes = plan->workspace_bytes;
  return status;
}

/* A slice's own bands. */
static size_t own_bands_bytes(const host_run *run) {
  return (size_t)run->plan->problem.num_bands * 6 * sizeof *run->own_bands;
}
static bool has_own_bands(const host_run *run, int number) {
  return fa_needs_own_bands(&run->plan->problem, &run->slices.at[number].own);
}
static fa_copy copy_of_own_bands(const host_run *run, int number) {
  const size_t bytes = own_bands_bytes(run), at = (size_t)number * bytes;
  return (fa_copy){.device = {run->bands_on_device + at, bytes},
                   .host = {(char *)run->own_bands + at, bytes},
                   .row_bytes = bytes,
                   .num_rows = 1,
                   .slice = number};
}

static fa_status cut_bands(host_run *run, fa_error *error) {
  const fa_problem *p = &run->plan->problem;
  const int32_t *bands = run->tensors[FA_TENSOR_BANDS].given.data;
  for (int i = 0; i < run->slices.count; i++) {
    if (!has_own_bands(run, i)) continue;
    if (!run->own_bands) run->own_bands = malloc((size_t)run->slices.count * own_bands_bytes(run));
    if (!run->own_bands) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for bands");
    const int64_t batch = p->bands_batch > 1 ? run->slices.at[i].own.first_batch : 0;
    fa_cut_bands(p, &run->slices.at[i].own, bands + batch * p->num_bands * 6,
                 run->own_bands + (size_t)i * own_bands_bytes(run) / sizeof *run->own_bands);
  }
  return FA_STATUS_OK;
}

static fa_status cut(host_run *run, fa_error *error) {
  const int64_t bytes_moved = run->measured->bytes_to_device + run->measured->bytes_from_device;
  fa_cut(&run->plan->problem, &run->part, run->plan->pass, bytes_moved, (int64_t)run->pageable_bytes,
         run->tensors[FA_TENSOR_BANDS].staged, &run->slices);
  fa_status status = cut_bands(run, error);
  for (int i = 0; !status && i < run->slices.count; i++) status = plan_slice(run, i, error);
  return status;
}

/* ---- one slice after the other, on three streams -------------------------------------------------------- */

/* Whether an earlier slice has brought this one's elements of the tensor. */
static bool is_there(const host_run *run, int number, int id) {
  return fa_is_there_before(&run->plan->problem, &run->part, &run->slices.at[number].own, id);
}

static fa_rows rows_in(const fa_tensor *tensor, const fa_region *region) {
  return (fa_rows){(char *)tensor->data + region->offset, region->pitch};
}

/* The rows of the same region in the packed tensor. */
static fa_rows packed_rows(const host_run *run, int id, const fa_region *region) {
  const fa_problem *p = &run->plan->problem;
  return (fa_rows){run->tensors[id].packed + packed_bytes(p, region->offset), packed_bytes(p, region->pitch)};
}

static fa_copy copy_of(const host_run *run, int id, const fa_region *region) {
  const tensor_place *t = &run->tensors[id];
  const fa_problem *p = &run->plan->problem;
  fa_copy copy = {.device = rows_in(&t->device, region),
                  .host = rows_in(&t->given, region),
                  .row_bytes = region->row_bytes,
                  .num_rows = region->num_rows,
                  .is_padded = !memory_wanted(run->placement, id)};
  if (t->packs) {
    copy.device = packed_rows(run, id, region);
    copy.row_bytes = packed_bytes(p, region->row_bytes);
    copy.packed_dim = p->head_dim;
  }
  return copy;
}

/* Lists the slice's copies of tensors in a role, either those that go through the lane's ring or the others. */
static int list_copies(const host_run *run, int number, fa_tensor_role role, bool through_ring,
                       fa_copy *copies) {
  int num_copies = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    const fa_slice *slice = &run->slices.at[number];
    if (t->role != role || !t->copied || is_there(run, number, id)) continue;
    const fa_extent *extent = t->staged && role == FA_ROLE_INPUT ? &slice->staged : &slice->own;
    if (extent->num_heads == 0) continue;
    const fa_region region = region_of(run, extent, id, &t->given);
    copies[num_copies] = copy_of(run, id, &region);
    copies[num_copies].slice = number;
    num_copies += (t->staged && fa_staging_fits(run->lane->staging, &copies[num_copies])) == through_ring;
  }
  if (role == FA_ROLE_INPUT && has_own_bands(run, number)) {
    copies[num_copies] = copy_of_own_bands(run, number);
    num_copies += fa_staging_fits(run->lane->staging, &copies[num_copies]) == through_ring;
  }
  return num_copies;
}

static fa_status copy_directly(const host_run *run, const fa_copy *copies, int num_copies, bool download,
                               fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  void *stream = download ? run->down : run->up;
  fa_status status = FA_STATUS_OK;
  for (const fa_copy *copy = copies; !status && copy < copies + num_copies; copy++)
    status = memory->copy(run->heap->index, download ? copy->host : copy->device,
                          download ? copy->device : copy->host, copy->row_bytes, copy->num_rows, stream, error);
  return status;
}

/* Begins the uploads of so many slices through the ring. */
static fa_status begin_uploads(host_run *run, int first, int num_slices, fa_error *error) {
  fa_copy copies[FA_MAX_SLICES * FA_NUM_TENSORS];
  int num_copies = 0;
  for (int i = first; i < first + num_slices; i++)
    num_copies += list_copies(run, i, FA_ROLE_INPUT, true, copies + num_copies);
  return num_copies ? fa_staging_begin_uploads(run->lane->staging, copies, num_copies, error) : FA_STATUS_OK;
}

static fa_tensors slice_tensors(const host_run *run, int number) {
  const fa_extent *own = &run->slices.at[number].own;
  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (run->tensors[id].role == FA_ROLE_NONE) continue;
    fa_tensor tensor = run->tensors[id].device;
    const fa_region region = region_of(run, own, id, &tensor);
    tensor.data = computes_apart(run, own, id) ? run->tensors[id].apart : rows_in(&tensor, &region).data;
    *fa_tensor_at(&tensors, id) = tensor;
  }
  if (has_own_bands(run, number)) tensors.bands.data = copy_of_own_bands(run, number).device.data;
  return tensors;
}

static fa_status put_in_place(const host_run *run, const fa_extent *own, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    if (!computes_apart(run, own, id)) continue;
    const fa_region region = region_of(run, own, id, &t->device);
    status = run->heap->backend->memory->copy(run->heap->index, rows_in(&t->device, &region),
                                              (fa_rows){t->apart, region.row_bytes}, region.row_bytes,
                                              region.num_rows, run->lane->compute, error);
  }
  return status;
}

static fa_status unpack_slice(const host_run *run, int number, fa_error *error) {
  const int64_t head_dim = run->plan->problem.head_dim;
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++) {
    const tensor_place *t = &run->tensors[id];
    if (!t->packs || is_there(run, number, id)) continue;
    const fa_region region = region_of(run, &run->slices.at[number].own, id, &t->given);
    status = run->heap->backend->unpack(run->heap->index, rows_in(&t->device, &region),
                                        packed_rows(run, id, &region),
                                        (int64_t)(region.row_bytes / sizeof(float)) / head_dim,
                                        (int64_t)region.num_rows, head_dim, run->lane->compute, error);
  }
  return status;
}

/* A stream waits for what another has been given until now. */
static fa_status wait_for_stream(const host_run *run, void *stream, void *other, void *event, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  if (stream == other) return FA_STATUS_OK;
  fa_status status = memory->record(run->heap->index, event, other, error);
  return status ? status : memory->stream_wait(run->heap->index, stream, event, error);
}

/* The stream that computes waits for the slice's inputs. Nothing is recorded where none is copied directly:
 * that event would stand behind what later slices send through the ring. */
static fa_status upload_slice(host_run *run, int number, fa_error *error) {
  fa_lane *lane = run->lane;
  fa_copy copies[FA_NUM_TENSORS];
  const int num_copies = list_copies(run, number, FA_ROLE_INPUT, false, copies);
  fa_status status = copy_directly(run, copies, num_copies, false, error);
  if (!status && num_copies)
    status = wait_for_stream(run, lane->compute, run->up, lane->slices[number].uploaded, error);
  return status ? status : fa_staging_await(lane->staging, number, lane->compute, error);
}

static fa_status start_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  fa_lane *lane = run->lane;
  fa_status status = upload_slice(run, number, error);
  if (!status && run->takes_time)
    status = memory->record(index, lane->slices[number].begun, lane->compute, error);
  if (!status) status = unpack_slice(run, number, error);
  if (status) return status;
  const fa_extent *own = &run->slices.at[number].own;
  const fa_tensors tensors = slice_tensors(run, number);
  status = fa_run(&run->plans[number], &tensors, &run->execution, error);
  if (!status) status = put_in_place(run, own, error);
  if (status || (!run->takes_time && run->down == lane->compute)) return status;
  return memory->record(index, lane->slices[number].done, lane->compute, error);
}

static fa_status fetch_slice(host_run *run, int number, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  fa_staging *staging = run->lane->staging;
  fa_copy direct[FA_NUM_TENSORS], staged[FA_NUM_TENSORS];
  const int num_direct = list_copies(run, number, FA_ROLE_OUTPUT, false, direct);
  const int num_staged = run->in_ring ? 0 : list_copies(run, number, FA_ROLE_OUTPUT, true, staged);
  fa_status status = FA_STATUS_OK;
  if (run->down != run->lane->compute)
    status = memory->stream_wait(run->heap->index, run->down, run->lane->slices[number].done, error);
  if (!status && number > 0 && number == run->slices.count - 1)
    status = memory->record(run->heap->index, run->lane->last, run->down, error);
  if (!status) status = copy_directly(run, direct, num_direct, true, error);
  if (status || !num_staged) return status;
  return run->at_once ? fa_staging_fetch_at_once(staging, staged, num_staged, run->down, error)
                      : fa_staging_download(staging, staged, num_staged, error);
}

/* The call waits for work on the caller's stream that may still use the caller's memory on a device. */
static fa_status wait_for_caller(host_run *run, fa_error *error) {
  const fa_lane *lane = run->lane;
  if (!run->on_devices || run->placement->is_settled) return FA_STATUS_OK;
  fa_status status = wait_for_stream(run, lane->compute, run->placement->stream, lane->ready, error);
  return status || run->up == lane->compute
             ? status
             : run->heap->backend->memory->stream_wait(run->heap->index, run->up, lane->ready, error);
}

/* The stream of downloads, which has waited for the last slice, copies what the caller keeps on the device. */
static fa_status copy_kept(const host_run *run, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (const tensor_place *t = run->tensors; !status && t < run->tensors + FA_NUM_TENSORS; t++)
    if (t->kept)
      status =
          run->heap->backend->memory->copy(run->heap->index, (fa_rows){t->kept, t->bytes},
                                           (fa_rows){t->device.data, t->bytes}, t->bytes, 1, run->down, error);
  return status;
}

/* Whether nothing follows the kernels on the call's only stream. */
static bool ends_with_kernels(const host_run *run) {
  if (!run->at_once) return false;
  for (const tensor_place *t = run->tensors; t < run->tensors + FA_NUM_TENSORS; t++)
    if (t->kept || (t->role == FA_ROLE_OUTPUT && t->copied && !(t->staged && run->in_ring))) return false;
  return true;
}

static fa_status take_times(const host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  fa_status status = memory->event_wait(run->heap->index, run->lane->slices[run->slices.count - 1].done, error);
  for (int i = 0; !status && i < run->slices.count; i++) {
    double seconds = 0;
    status = memory->elapsed(run->heap->index, run->lane->slices[i].begun, run->lane->slices[i].done, &seconds,
                             error);
    run->measured->kernel_seconds += seconds;
  }
  return status;
}

static fa_status finish(host_run *run, fa_error *error) {
  const fa_memory_ops *memory = run->heap->backend->memory;
  const int32_t index = run->heap->index;
  const bool is_over = run->takes_time && ends_with_kernels(run);
  fa_status status = copy_kept(run, error);
  if (!status && !is_over) status = memory->record(index, run->lane->finished, run->down, error);
  if (!status && run->takes_time) status = take_times(run, error);
  /* A long wait ends late. A wait for the results before the last slice's makes that for the last ones short.
   */
  if (!status && run->slices.count > 1) status = memory->event_wait(index, run->lane->last, error);
  return status || is_over ? status : memory->event_wait(index, run->lane->finished, error);
}

static bool has_staged_results(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(run, id) && run->tensors[id].staged) return true;
  return false;
}

/* Each direction of the bus has its stream: a slice's results go down while the next slice's inputs come up. */
static fa_status run_slices(host_run *run, fa_error *error) {
  fa_status status = begin_uploads(run, 0, run->slices.count, error);
  for (int i = 0; !status && i < run->slices.count; i++) {
    status = start_slice(run, i, error);
    if (!status) status = fetch_slice(run, i, error);
  }
  return status ? status : fa_staging_end_uploads(run->lane->staging, error);
}

/* Staged results take the whole ring, and the calling thread until their slice is done, so that the next slice
 * starts before they are fetched. */
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

static fa_status run_in_slices(host_run *run, fa_error *error) {
  fa_status status = (has_staged_results(run) ? run_slices_and_stage_results : run_slices)(run, error);
  return status ? status : finish(run, error);
}

/* The calling thread copies few bytes itself, and one stream takes them up, computes and takes results down: to
 * wake other threads and to have streams wait for each other would take longer than the copies. */
static fa_status run_at_once(host_run *run, fa_error *error) {
  fa_staging *staging = run->lane->staging;
  fa_copy inputs[FA_NUM_TENSORS], results[FA_NUM_TENSORS];
  const int num_inputs = list_copies(run, 0, FA_ROLE_INPUT, true, inputs);
  fa_status status = fa_staging_upload_at_once(staging, inputs, num_inputs, run->up, error);
  if (!status) status = start_slice(run, 0, error);
  if (!status) status = fetch_slice(run, 0, error);
  if (!status) status = finish(run, error);
  if (!status) fa_staging_take_fetched(staging, results, list_copies(run, 0, FA_ROLE_OUTPUT, true, results));
  return status;
}

static fa_status run_all(host_run *run, fa_error *error) {
  fa_status status = wait_for_caller(run, error);
  return status ? status : (run->at_once ? run_at_once : run_in_slices)(run, error);
}

/* ---- the call ------------------------------------------------------------------------------------------ */

static bool needs_room(const tensor_place *t) { return t->copied && !t->device.data; }

/* Whether one device alone would cut the call. */
static bool is_cut_as_a_whole(const host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const fa_extent all = fa_whole_extent(p);
  int64_t bytes_moved = 0, pageable_bytes = 0;
  fa_slices slices;
  for (const tensor_place *t = run->tensors; t < run->tensors + FA_NUM_TENSORS; t++) {
    if (t->copied) bytes_moved += (int64_t)t->bytes;
    if (t->staged) pageable_bytes += (int64_t)t->bytes;
  }
  fa_cut(p, &all, run->plan->pass, bytes_moved, pageable_bytes, run->tensors[FA_TENSOR_BANDS].staged, &slices);
  return slices.count > 1;
}

/* Packing pays where a call moves enough to be cut, and needs a ring whose slots hold rows. Several devices
 * pack where one would: a dout that is rounded gives other gradients. */
static bool can_pack(const host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const fa_copy rows = {.row_bytes = (size_t)(p->num_heads * p->head_dim) * sizeof(float), .num_rows = 2};
  return p->dtype == FA_DTYPE_F32 && p->precision == FA_PRECISION_DEFAULT && run->heap->backend->unpack &&
         fa_can_pack(p->head_dim) && fa_staging_fits(run->lane->staging, &rows) && is_cut_as_a_whole(run);
}

/* Packs the operands of matrix products, which kernels round to f16. delta, too, is computed from the dout that
 * was rounded. */
static void choose_packed(host_run *run) {
  const fa_problem *p = &run->plan->problem;
  const int operands[] = {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_DOUT};
  if (!can_pack(run)) return;
  for (int i = 0; i < 4; i++) {
    tensor_place *t = &run->tensors[operands[i]];
    t->packs = t->role == FA_ROLE_INPUT && t->staged;
    if (t->packs) run->measured->bytes_to_device -= (int64_t)(t->part_bytes - packed_bytes(p, t->part_bytes));
  }
}

/* Kernels that wrote more would wait for the bus, which a copy engine does not keep them from. */
enum { MOST_BYTES_IN_PLACE = 512 << 10 };

static bool fits_at_once(const host_run *run, fa_tensor_role role) {
  fa_copy copies[FA_NUM_TENSORS];
  return fa_staging_fits_at_once(run->lane->staging, copies, list_copies(run, 0, role, true, copies));
}

/* Whether kernels had better write results to the host's memory by themselves: little, which a copy behind them
 * would only bring there later. A backward may add to its results, which are read for that. */
static bool writes_in_place(const host_run *run) {
  return run->at_once && is_planned(run) && run->plan->pass == FA_PASS_FORWARD;
}

static bool is_written_in_place(const host_run *run, int id) {
  const tensor_place *t = &run->tensors[id];
  return is_output(run, id) && t->copied && !t->staged && !memory_wanted(run->placement, id) &&
         t->bytes <= MOST_BYTES_IN_PLACE && (uintptr_t)t->given.data % FA_ARENA_ALIGNMENT == 0 &&
         fa_pool_holds(&run->heap->pinned->callers, t->given.data, t->bytes);
}

/* Whether the ring is such memory for staged results: it has room for all of them, none of which stays on the
 * device as well. */
static bool has_results_for_ring(const host_run *run) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_output(run, id) && run->tensors[id].staged && memory_wanted(run->placement, id)) return false;
  return has_staged_results(run);
}

static void choose_places(host_run *run) {
  if (!writes_in_place(run)) return;
  fa_arena ring = {.base = fa_staging_memory(run->lane->staging)};
  run->in_ring = ring.base && has_results_for_ring(run);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    tensor_place *t = &run->tensors[id];
    if (is_written_in_place(run, id)) t->device = t->given, t->copied = false;
    if (is_output(run, id) && t->staged && run->in_ring) t->device.data = fa_take(&ring, (int64_t)t->bytes, 1);
  }
}

static void choose_streams(host_run *run) {
  fa_lane *lane = run->lane;
  run->execution.stream = lane->compute;
  run->at_once =
      run->slices.count == 1 && fits_at_once(run, FA_ROLE_INPUT) && fits_at_once(run, FA_ROLE_OUTPUT);
  run->up = run->at_once ? lane->compute : lane->up;
  run->down = run->at_once ? lane->compute : lane->down;
}

/* Takes the device's memory that only the call needs. What goes the same way lies together, so that it can go
 * as one copy. */
static void lay_out(host_run *run, fa_arena *arena) {
  run->execution.workspace = fa_take(arena, (int64_t)run->execution.workspace_bytes, 1);
  if (run->own_bands)
    run->bands_on_device = fa_take(arena, run->slices.count * (int64_t)own_bands_bytes(run), 1);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    tensor_place *t = &run->tensors[id];
    t->apart = fa_take(arena, (int64_t)t->apart_bytes, 1);
    if (t->packs) t->packed = fa_take(arena, (int64_t)packed_bytes(&run->plan->problem, t->bytes), 1);
  }
  const fa_tensor_role roles[] = {FA_ROLE_INPUT, FA_ROLE_OUTPUT};
  for (int i = 0; i < 2; i++)
    for (int id = 0; id < FA_NUM_TENSORS; id++) {
      tensor_place *t = &run->tensors[id];
      if (t->role == roles[i] && needs_room(t)) t->device.data = fa_take(arena, (int64_t)t->bytes, 1);
    }
}

static fa_status place_all(host_run *run, fa_error *error) {
  fa_arena arena = {0};
  lay_out(run, &arena);
  if (arena.used == 0) return FA_STATUS_OK;
  fa_status status = fa_pool_take(&run->heap->pool, arena.used, &run->memory, error);
  if (status) return status;
  arena = (fa_arena){.base = run->memory};
  lay_out(run, &arena);
  return FA_STATUS_OK;
}

static fa_status run_in_scope(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = find_tensors(run, given, error);
  if (!status) status = cut(run, error);
  if (!status) status = fa_lane_take(run->heap, run->pageable_bytes, &run->lane, error);
  if (!status) {
    choose_packed(run);
    choose_streams(run);
    choose_places(run);
    status = place_all(run, error);
    if (!status) status = run_all(run, error);
    /* After an error, too, the device must be done with the memory below. */
    fa_lane_give(run->lane, status == FA_STATUS_OK);
  }
  if (run->memory) fa_pool_give(&run->heap->pool, run->memory);
  free(run->own_bands);
  return status ? status : fa_succeed(error);
}

static fa_status run_on_device(host_run *run, const fa_tensors *given, fa_error *error) {
  fa_scope scope;
  fa_status status = fa_heap_of(run->plan->backend, run->plan->device.index, &run->heap, error);
  if (!status) status = run->heap->backend->memory->enter(run->heap->index, &scope, error);
  if (status) return status;
  status = run_in_scope(run, given, error);
  run->heap->backend->memory->leave(&scope);
  return status;
}

/* ---- where the device's memory is the host's ----------------------------------------------------------- */

/* Whether the caller wants the tensor's numbers in other memory as well. */
static bool is_wanted_elsewhere(const host_run *run, const fa_tensors *given, int id) {
  const fa_problem *problem = &run->plan->problem;
  const void *wanted = memory_wanted(run->placement, id);
  return wanted && wanted != fa_tensor_get(given, id)->data &&
         fa_tensor_role_in(problem, run->plan->pass, id) != FA_ROLE_NONE &&
         fa_tensor_shape(problem, id).size_bytes > 0;
}

static fa_status check_wanted(const host_run *run, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++)
    if (is_wanted_elsewhere(run, given, id))
      status = check_contiguous(&run->plan->problem, id, fa_tensor_get(given, id), error);
  return status;
}

static fa_status check_inputs(const fa_plan *plan, const fa_tensors *given, fa_error *error) {
  fa_status status = FA_STATUS_OK;
  for (int id = 0; !status && id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&plan->problem, plan->pass, id) == FA_ROLE_INPUT && fa_tensor_get(given, id)->data)
      status = fa_tensor_check(&plan->problem, id, fa_tensor_get(given, id)->data, error);
  return status;
}

static void copy_wanted(const host_run *run, const fa_tensors *given) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (is_wanted_elsewhere(run, given, id))
      memmove(memory_wanted(run->placement, id), fa_tensor_get(given, id)->data,
              (size_t)fa_tensor_shape(&run->plan->problem, id).size_bytes);
}

static fa_status run_in_host_memory(host_run *run, const fa_tensors *given, fa_error *error) {
  const fa_plan *plan = run->plan;
  fa_execution execution = {.workspace_bytes = plan->workspace_bytes};
  fa_status status = check_wanted(run, given, error);
  if (!status) status = check_inputs(plan, given, error);
  if (!status) status = fa_workspace_take(plan->device, plan->workspace_bytes, &execution.workspace, error);
  if (status) return status;
  const int64_t begin = fa_nanoseconds();
  status = fa_run(plan, given, &execution, error);
  run->measured->kernel_seconds = (double)(fa_nanoseconds() - begin) * 1e-9;
  if (!status) copy_wanted(run, given);
  fa_workspace_give(plan->device, plan->workspace_bytes, execution.workspace);
  return status;
}

static host_run begin_run(const fa_plan *plan, const fa_placement *placement, fa_measurements *measured,
                          bool takes_time) {
  static const fa_placement nowhere;
  *measured = (fa_measurements){0};
  return (host_run){.plan = plan,
                    .whole = plan,
                    .placement = placement ? placement : &nowhere,
                    .measured = measured,
                    .takes_time = takes_time,
                    .part = fa_whole_extent(&plan->problem)};
}

static bool has_own_memory(const fa_plan *plan) { return ((const fa_backend *)plan->backend)->memory != NULL; }

fa_status fa_run_anywhere(const fa_plan *plan, const fa_tensors *tensors, const fa_placement *placement,
                          fa_measurements *measurements, fa_error *error) {
  fa_measurements unread;
  host_run run = begin_run(plan, placement, measurements ? measurements : &unread, measurements != NULL);
  return (has_own_memory(plan) ? run_on_device : run_in_host_memory)(&run, tensors, error);
}

/* ---- several devices ------------------------------------------------------------------------------------- */

typedef struct device_part {
  fa_plan plan;
  const fa_plan *whole;
  fa_extent part;
  const fa_tensors *tensors;
  fa_measurements measured;
  fa_status status;
  fa_error error;
} device_part;

static void run_part(void *context, int64_t task, int worker) {
  (void)worker;
  device_part *part = (device_part *)context + task;
  host_run run = begin_run(&part->plan, NULL, &part->measured, true);
  run.part = part->part, run.whole = part->whole;
  part->status = run_on_device(&run, part->tensors, &part->error);
}

static fa_status check_devices(const fa_plan *plan, const fa_device *devices, int32_t num_devices,
                               fa_error *error) {
  if (num_devices < 1 || num_devices > FA_MAX_DEVICES)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "device", FA_TEXT("1 to %d devices", FA_MAX_DEVICES),
                   FA_TEXT("%d", num_devices));
  fa_status status = FA_STATUS_OK;
  for (int32_t i = 0; !status && i < num_devices; i++)
    status = devices[i].kind == plan->device.kind
                 ? fa_backend_check_device(plan->backend, devices[i], error)
                 : fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "device", "devices of one kind",
                           FA_TEXT("%s and %s", fa_device_kind_name(plan->device.kind),
                                   fa_device_kind_name(devices[i].kind)));
  return status;
}

/* The first error counts; measurements add up, but kernels of several devices run at the same time. */
static fa_status gather(const device_part *parts, int32_t count, fa_measurements *measured, fa_error *error) {
  *measured = (fa_measurements){0};
  for (const device_part *part = parts; part < parts + count; part++) {
    if (part->status) {
      if (error) *error = part->error;
      return part->status;
    }
    measured->bytes_to_device += part->measured.bytes_to_device;
    measured->bytes_from_device += part->measured.bytes_from_device;
    if (part->measured.kernel_seconds > measured->kernel_seconds)
      measured->kernel_seconds = part->measured.kernel_seconds;
  }
  return fa_succeed(error);
}

fa_status fa_run_on_devices(const fa_plan *plan, const fa_device *devices, int32_t num_devices,
                            const fa_tensors *tensors, fa_measurements *measurements, fa_error *error) {
  fa_measurements unread;
  fa_extent extents[FA_MAX_DEVICES];
  fa_status status = check_devices(plan, devices, num_devices, error);
  if (status) return status;
  if (!has_own_memory(plan)) return fa_run_anywhere(plan, tensors, NULL, measurements, error);
  const int32_t count = fa_split(&plan->problem, plan->pass, num_devices, extents);
  device_part *parts = calloc((size_t)count, sizeof *parts);
  if (!parts) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a call's parts");
  for (int32_t i = 0; i < count; i++) {
    parts[i] = (device_part){.plan = *plan, .whole = plan, .part = extents[i], .tensors = tensors};
    parts[i].plan.device = devices[i];
  }
  fa_parallel_for(count, 0, count, run_part, parts);
  status = gather(parts, count, measurements ? measurements : &unread, error);
  free(parts);
  return status;
}
