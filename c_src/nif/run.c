/* One pass of attention on terms: execute(Pass, Tensors, Options, Device, Placement). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "nif.h"

typedef struct nif_call {
  ErlNifEnv *env;
  fa_error error;

  int pass;
  fa_device devices[FA_MAX_DEVICES];
  int32_t num_devices;
  fa_problem problem;
  fa_plan plan;
  fa_tensors tensors;
  fa_placement placement;
  fa_measurements measured;
  bool results_on_device, keep, measures_nothing;

  const fa_shape *given[FA_NUM_TENSORS]; /* into shapes; NULL where there was no such tensor */
  fa_shape shapes[FA_NUM_TENSORS];
  ERL_NIF_TERM terms[FA_NUM_TENSORS]; /* as given */
  fa_data inputs[FA_NUM_TENSORS];
  fa_cache_view view;           /* where keys are those of a cache's sequences */
  void *copies[FA_NUM_TENSORS]; /* of inputs that cannot be read where they lie */

  /* What the call makes: outputs in the host's memory, and, of outputs that stay on the device and of tensors
   * that are kept there, that memory. */
  fa_result outputs[FA_NUM_TENSORS];
  fa_memory *on_device[FA_NUM_TENSORS];
} nif_call;

/* ---- reading ------------------------------------------------------------------------------------------- */

/* Sequences of a cache in place of k, v and what says where these lie. */
static bool read_sequences(nif_call *call, ERL_NIF_TERM sequences) {
  for (int i = 0; i < 4; i++) {
    const fa_tensor_id id = fa_view_tensors[i];
    if (call->given[id])
      return fa_reject_term(call->env, &call->error, fa_tensor_name(id), "none beside sequences of a cache",
                            call->terms[id]);
  }
  if (!fa_get_cache_view(call->env, sequences, &call->view, call->inputs, call->shapes, &call->error))
    return false;
  for (int i = 0; i < 4; i++) {
    call->given[fa_view_tensors[i]] = &call->shapes[fa_view_tensors[i]];
    call->terms[fa_view_tensors[i]] = sequences;
  }
  return true;
}

static bool read_tensors(nif_call *call, ERL_NIF_TERM term) {
  ErlNifMapIterator iterator;
  if (!enif_map_iterator_create(call->env, term, &iterator, ERL_NIF_MAP_ITERATOR_FIRST))
    return fa_reject_term(call->env, &call->error, "tensors", "a map", term);
  bool read = true;
  ERL_NIF_TERM name, tensor, sequences;
  const bool has_sequences = enif_get_map_value(call->env, term, fa_atom.sequences, &sequences);
  for (; read && enif_map_iterator_get_pair(call->env, &iterator, &name, &tensor);
       enif_map_iterator_next(call->env, &iterator)) {
    if (enif_is_identical(name, fa_atom.sequences)) continue;
    int id = fa_atom_index(name, fa_atom.tensors, FA_NUM_TENSORS);
    if (id < 0) {
      read = fa_reject_term(call->env, &call->error, "tensors", "the name of a tensor", name);
    } else {
      call->given[id] = &call->shapes[id];
      call->terms[id] = tensor;
      read = fa_get_tensor(call->env, tensor, fa_tensor_name(id), &call->inputs[id], &call->shapes[id],
                           &call->error);
    }
  }
  enif_map_iterator_destroy(call->env, &iterator);
  return read && (!has_sequences || read_sequences(call, sequences));
}

static bool read_choice(nif_call *call, ERL_NIF_TERM placement, ERL_NIF_TERM key, const char *name,
                        ERL_NIF_TERM first, ERL_NIF_TERM second, bool *is_second) {
  ERL_NIF_TERM value;
  const ERL_NIF_TERM choices[] = {first, second};
  int chosen = 0;
  bool read = !enif_get_map_value(call->env, placement, key, &value) ||
              fa_get_choice(call->env, value, choices, 2, name, &chosen, &call->error);
  *is_second = chosen == 1;
  return read;
}

/* #{results => host | device, keep => false | true, measure => true | false}, each optional. */
static bool read_placement(nif_call *call, ERL_NIF_TERM placement) {
  const ERL_NIF_TERM no = fa_atom.booleans[false], yes = fa_atom.booleans[true];
  const ERL_NIF_TERM *places = fa_atom.places;
  if (!enif_is_map(call->env, placement))
    return fa_reject_term(call->env, &call->error, "placement", "a map", placement);
  return read_choice(call, placement, fa_atom.results, "results", places[0], places[1],
                     &call->results_on_device) &&
         read_choice(call, placement, fa_atom.keep, "keep", no, yes, &call->keep) &&
         read_choice(call, placement, fa_atom.measure, "measure", yes, no, &call->measures_nothing);
}

/* A device, or a list of several. */
static bool read_devices(nif_call *call, ERL_NIF_TERM term) {
  unsigned count;
  if (!enif_get_list_length(call->env, term, &count)) {
    call->num_devices = 1;
    return fa_get_device(call->env, term, &call->devices[0], &call->error);
  }
  if (count < 1 || count > FA_MAX_DEVICES)
    return fa_reject_term(call->env, &call->error, "device", "a list of 1 to 64 devices", term);
  ERL_NIF_TERM head;
  bool read = true;
  while (read && enif_get_list_cell(call->env, term, &head, &term))
    read = fa_get_device(call->env, head, &call->devices[call->num_devices++], &call->error);
  return read;
}

static bool check_placement(nif_call *call) {
  if (call->num_devices == 1 || !(call->results_on_device || call->keep)) return true;
  return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "device", "one where something stays on it",
                   "several");
}

static bool plan(nif_call *call, const ERL_NIF_TERM argv[]) {
  fa_problem_init(&call->problem);
  return fa_get_choice(call->env, argv[0], fa_atom.passes, FA_NUM_PASSES, "pass", &call->pass, &call->error) &&
         read_tensors(call, argv[1]) && fa_get_options(call->env, argv[2], &call->problem, &call->error) &&
         read_devices(call, argv[3]) && read_placement(call, argv[4]) && check_placement(call) &&
         fa_problem_set_shapes(&call->problem, call->pass, call->given, &call->error) == FA_STATUS_OK &&
         fa_plan_init(&call->plan, &call->problem, call->pass, call->devices[0], &call->error) == FA_STATUS_OK;
}

/* ---- inputs -------------------------------------------------------------------------------------------- */

static bool reject_memory(nif_call *call, const char *argument, size_t bytes) {
  char expected[64];
  snprintf(expected, sizeof expected, "%zu bytes of memory", bytes);
  return fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, argument, expected, "none");
}

/* An address that the device does not know is one of the host's, or of nobody's. */
static bool is_host_address(const nif_call *call, int id) {
  const fa_data *data = &call->inputs[id];
  return data->on_device && data->bytes != 0 &&
         fa_memory_locate(call->plan.device, data->data, data->bytes) == FA_PLACE_HOST;
}

static bool reject_address(nif_call *call, int id) {
  const fa_data *data = &call->inputs[id];
  const fa_device device = call->plan.device;
  char expected[128], got[64];
  snprintf(expected, sizeof expected, "a binary, or memory that %s %d can read",
           fa_device_kind_name(device.kind), device.index);
  snprintf(got, sizeof got, "%zu bytes at %p", data->bytes, data->data);
  return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), expected, got);
}

/* A sub-binary may begin anywhere; kernels read elements at their own alignment. */
static bool is_aligned(const nif_call *call, int id) {
  return call->inputs[id].bytes == 0 ||
         (uintptr_t)call->inputs[id].data % fa_dtype_bytes(call->shapes[id].dtype) == 0;
}

static bool is_copied(const nif_call *call, int id) {
  return is_host_address(call, id) || !is_aligned(call, id);
}

static bool copy_input(nif_call *call, int id) {
  fa_data *input = &call->inputs[id];
  if (input->memory) return reject_address(call, id);
  if (input->on_device && !is_host_address(call, id))
    return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), "an aligned address",
                     "one between elements");
  void *copy = call->copies[id] = malloc(input->bytes);
  if (!copy) return reject_memory(call, fa_tensor_name(id), input->bytes);
  if (!input->on_device)
    memcpy(copy, input->data, input->bytes);
  else if (!fa_data_read(copy, input))
    return reject_address(call, id);
  input->data = copy;
  input->on_device = false;
  return true;
}

static bool bind_inputs(nif_call *call) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!call->given[id]) continue;
    if (is_copied(call, id) && !copy_input(call, id)) return false;
    *fa_tensor_at(&call->tensors, id) = fa_tensor_contiguous(&call->problem, id, call->inputs[id].data);
  }
  return true;
}

/* ---- outputs, and what is kept ------------------------------------------------------------------------- */

static bool is_output(const nif_call *call, int id) {
  return fa_tensor_role_in(&call->problem, call->pass, id) == FA_ROLE_OUTPUT;
}

/* Whether the backward will want it, of what the forward reads or writes. */
static bool is_kept(const nif_call *call, int id) {
  return call->keep && fa_tensor_role_in(&call->problem, FA_PASS_FORWARD, id) != FA_ROLE_NONE &&
         fa_tensor_role_in(&call->problem, FA_PASS_BACKWARD, id) == FA_ROLE_INPUT;
}

static size_t bytes_of(const nif_call *call, int id) {
  return (size_t)fa_tensor_shape(&call->problem, id).size_bytes;
}

static bool allocate_on_device(nif_call *call, int id) {
  call->on_device[id] = fa_memory_new(call->plan.device, bytes_of(call, id), &call->error);
  return call->on_device[id] != NULL;
}

static bool allocate_output(nif_call *call, int id) {
  fa_tensor *tensor = fa_tensor_at(&call->tensors, id);
  /* Only the backward asks for a result that nobody differentiates by: lse. */
  const bool stays = call->results_on_device || (fa_tensor_gradient(id) < 0 && is_kept(call, id));
  if (stays && fa_has_own_memory(call->plan.device.kind)) {
    if (!allocate_on_device(call, id)) return false;
    *tensor = fa_tensor_contiguous(&call->problem, id, fa_memory_data(call->on_device[id]));
    return true;
  }
  if (!fa_result_new(call->plan.device, bytes_of(call, id), &call->outputs[id]))
    return reject_memory(call, fa_tensor_name(id), bytes_of(call, id));
  *tensor = fa_tensor_contiguous(&call->problem, id, call->outputs[id].binary.data);
  return true;
}

static bool allocate_kept(nif_call *call, int id) {
  if (!fa_has_own_memory(call->plan.device.kind) || call->on_device[id] || call->inputs[id].on_device)
    return true;
  if (!allocate_on_device(call, id)) return false;
  fa_tensor_at(&call->placement.on_device, id)->data = fa_memory_data(call->on_device[id]);
  return true;
}

static bool allocate(nif_call *call) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (is_output(call, id) && !allocate_output(call, id)) return false;
    if (is_kept(call, id) && !allocate_kept(call, id)) return false;
  }
  return true;
}

/* ---- results ------------------------------------------------------------------------------------------- */

static ERL_NIF_TERM make_tensor_on_device(nif_call *call, int id) {
  const fa_shape shape = fa_tensor_shape(&call->problem, id);
  return fa_make_tensor(call->env, fa_memory_make(call->env, call->on_device[id]), &shape);
}

static ERL_NIF_TERM make_output(nif_call *call, int id) {
  const fa_shape shape = fa_tensor_shape(&call->problem, id);
  if (!call->outputs[id].binary.data) return make_tensor_on_device(call, id);
  return fa_make_tensor(call->env, fa_result_make(call->env, &call->outputs[id]), &shape);
}

static ERL_NIF_TERM make_measurements(const nif_call *call) {
  ErlNifEnv *env = call->env;
  fa_map map = {0};
  if (call->measures_nothing) return fa_make_map(env, &map);
  fa_map_put(&map, enif_make_atom(env, "bytes_to_device"),
             enif_make_int64(env, call->measured.bytes_to_device));
  fa_map_put(&map, enif_make_atom(env, "bytes_from_device"),
             enif_make_int64(env, call->measured.bytes_from_device));
  fa_map_put(&map, enif_make_atom(env, "kernel_seconds"), enif_make_double(env, call->measured.kernel_seconds));
  return fa_make_map(env, &map);
}

/* {ok, #{Name => Tensor}, Kept, Measurements}; what was allocated becomes the terms' own. */
static ERL_NIF_TERM make_results(nif_call *call) {
  fa_map results = {0}, kept = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    ERL_NIF_TERM term = call->terms[id];
    if (is_output(call, id)) {
      term = make_output(call, id);
      fa_map_put(&results, fa_atom.tensors[id], term);
    }
    if (!is_kept(call, id)) continue;
    if (call->on_device[id]) term = make_tensor_on_device(call, id);
    fa_map_put(&kept, fa_atom.tensors[id], term);
  }
  return enif_make_tuple4(call->env, fa_atom.ok, fa_make_map(call->env, &results),
                          fa_make_map(call->env, &kept), make_measurements(call));
}

static void release(nif_call *call) {
  fa_cache_view_end(&call->view);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    free(call->copies[id]);
    fa_data_drop(&call->inputs[id]);
    fa_result_drop(&call->outputs[id]);
    if (call->on_device[id]) enif_release_resource(call->on_device[id]);
  }
}

/* Calls end when their work does, so that only memory of others can be some stream's. */
static bool is_settled(const nif_call *call) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (call->inputs[id].is_foreign) return false;
  return true;
}

static bool run(nif_call *call) {
  fa_measurements *measured = call->measures_nothing ? NULL : &call->measured;
  call->placement.is_settled = is_settled(call);
  const fa_status status =
      call->num_devices > 1
          ? fa_run_on_devices(&call->plan, call->devices, call->num_devices, &call->tensors, measured,
                              &call->error)
          : fa_run_anywhere(&call->plan, &call->tensors, &call->placement, measured, &call->error);
  return status == FA_STATUS_OK;
}

ERL_NIF_TERM fa_nif_execute(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_call call = {.env = env};
  const bool done = plan(&call, argv) && bind_inputs(&call) && allocate(&call) && run(&call);
  ERL_NIF_TERM result = done ? make_results(&call) : fa_make_error(env, &call.error);
  release(&call);
  return result;
}
