/* Parts of attention on terms: merge(Pass, Tensors, Device, Placement). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "nif.h"

enum { MOST_TENSORS = 2 * FA_MAX_PARTS + 8 };

/* A tensor that the call makes: on the device, and in a binary where results are the host's. */
typedef struct nif_output {
  fa_shape shape;
  fa_memory *on_device; /* of a device with memory of its own */
  fa_result binary;
} nif_output;

typedef struct nif_merge {
  ErlNifEnv *env;
  fa_error error;
  fa_device device;
  bool has_own_memory, results_on_device;
  fa_merge merge;
  int num_inputs, num_outputs;
  fa_data inputs[MOST_TENSORS];
  void *copies[MOST_TENSORS]; /* of inputs, on the device, that cannot be read where they lie */
  nif_output outputs[MOST_TENSORS];
} nif_merge;

/* ---- inputs -------------------------------------------------------------------------------------------- */

static bool reject_memory(nif_merge *call, const char *argument, size_t bytes) {
  char expected[64];
  snprintf(expected, sizeof expected, "%zu bytes of memory", bytes);
  return fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, argument, expected, "none");
}

/* Whether the device reads the memory where it lies. */
static bool lies_well(const nif_merge *call, const fa_data *data, const fa_shape *shape) {
  if (call->has_own_memory)
    return data->bytes == 0 || fa_memory_locate(call->device, data->data, data->bytes) == FA_PLACE_DEVICE;
  return !data->on_device && (uintptr_t)data->data % fa_dtype_bytes(shape->dtype) == 0;
}

/* A copy on the device; addresses that somebody named are read through the system. */
static bool copy_input(nif_merge *call, const char *argument, const fa_data *data, void **copy) {
  void *host = NULL;
  if (data->memory)
    return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, argument, "memory of the device that merges",
                     "another device's");
  if (fa_device_alloc(call->device, data->bytes, copy, &call->error)) return false;
  if (data->on_device && !(host = malloc(data->bytes))) return reject_memory(call, argument, data->bytes);
  bool done = !host || fa_data_read(host, data) ||
              fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, argument, "memory that can be read",
                        "an address of nothing");
  done = done && fa_device_copy(call->device, *copy, host ? host : data->data, data->bytes, NULL,
                                &call->error) == FA_STATUS_OK;
  free(host);
  return done;
}

/* Reads a tensor's term; where it lies on the device comes back. */
static bool read_tensor(nif_merge *call, ERL_NIF_TERM term, const char *argument, fa_shape *shape,
                        void **data) {
  const int i = call->num_inputs++;
  fa_data *input = &call->inputs[i];
  if (!fa_get_tensor(call->env, term, argument, input, shape, &call->error)) return false;
  if (!lies_well(call, input, shape) && !copy_input(call, argument, input, &call->copies[i])) return false;
  *data = call->copies[i] ? call->copies[i] : input->data;
  return true;
}

/* o and lse, of which lse may be nil where the part says so. The first o decides what the sizes are. */
static bool read_part(nif_merge *call, ERL_NIF_TERM o, ERL_NIF_TERM lse, const char *names[2],
                      bool may_lack_lse, const fa_shape *sink, bool is_first, fa_part *part) {
  fa_merge *m = &call->merge;
  fa_shape shape;
  void *data;
  if (!read_tensor(call, o, names[0], &shape, &data)) return false;
  if (is_first && fa_merge_set_shapes(m, &shape, sink, &call->error)) return false;
  if (fa_merge_check_o(m, names[0], &shape, &call->error)) return false;
  part->o = fa_merge_contiguous(m, data);
  part->dtype = shape.dtype;
  if (may_lack_lse && enif_is_identical(lse, enif_make_atom(call->env, "nil"))) return true;
  return read_tensor(call, lse, names[1], &shape, &part->lse) &&
         fa_merge_check_lse(m, names[1], &shape, &call->error) == FA_STATUS_OK;
}

static bool read_parts(nif_merge *call, ERL_NIF_TERM list, const fa_shape *sink, bool sizes_are_known) {
  ERL_NIF_TERM head, tail = list;
  fa_merge *m = &call->merge;
  for (; enif_get_list_cell(call->env, tail, &head, &tail); m->num_parts++) {
    int arity;
    const ERL_NIF_TERM *pair;
    char names[2][32];
    if (m->num_parts == FA_MAX_PARTS)
      return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts", "at most 32 parts", "more");
    if (!enif_get_tuple(call->env, head, &arity, &pair) || arity != 2)
      return fa_reject_term(call->env, &call->error, "parts", "{o, lse}", head);
    snprintf(names[0], sizeof names[0], "o of part %d", m->num_parts);
    snprintf(names[1], sizeof names[1], "lse of part %d", m->num_parts);
    const bool is_first = m->num_parts == 0 && !sizes_are_known;
    if (!read_part(call, pair[0], pair[1], (const char *[]){names[0], names[1]}, false, sink, is_first,
                   &m->parts[m->num_parts]))
      return false;
  }
  return enif_is_empty_list(call->env, tail) ||
         fa_reject_term(call->env, &call->error, "parts", "a list of {o, lse}", list);
}

/* The term of that name, nil where there is none. */
static ERL_NIF_TERM find(nif_merge *call, ERL_NIF_TERM map, const char *name) {
  ERL_NIF_TERM value, nil = enif_make_atom(call->env, "nil");
  return enif_get_map_value(call->env, map, enif_make_atom(call->env, name), &value) ? value : nil;
}

static bool read_merged(nif_merge *call, ERL_NIF_TERM map, const fa_shape *sink) {
  static const char *merged[] = {"o", "lse"}, *gradients[] = {"dout", "dlse"};
  fa_merge *m = &call->merge;
  fa_shape shape;
  fa_data data = {0};
  /* Its type decides that of every lse. */
  ERL_NIF_TERM o = find(call, map, "o");
  const bool known = fa_get_tensor(call->env, o, "o", &data, &shape, &call->error);
  fa_data_drop(&data);
  if (!known) return false;
  m->merged.dtype = shape.dtype;
  return read_part(call, o, find(call, map, "lse"), merged, false, sink, true, &m->merged) &&
         read_part(call, find(call, map, "dout"), find(call, map, "dlse"), gradients, true, sink, false,
                   &m->dmerged);
}

static bool read_sink(nif_merge *call, ERL_NIF_TERM map, fa_shape *shape, bool *is_there) {
  ERL_NIF_TERM sink = find(call, map, "sink");
  void *data;
  *is_there = !enif_is_identical(sink, enif_make_atom(call->env, "nil"));
  if (!*is_there) return true;
  if (!read_tensor(call, sink, "sink", shape, &data)) return false;
  call->merge.sink = data;
  return true;
}

/* ---- outputs ------------------------------------------------------------------------------------------- */

static bool new_output(nif_merge *call, fa_dtype dtype, int rank, const int64_t *dims, void **data) {
  nif_output *output = &call->outputs[call->num_outputs++];
  output->shape = (fa_shape){.dtype = dtype, .rank = rank, .size_bytes = (int64_t)fa_dtype_bytes(dtype)};
  for (int i = 0; i < rank; i++) {
    output->shape.dims[i] = dims[i];
    output->shape.size_bytes *= dims[i];
  }
  const size_t bytes = (size_t)output->shape.size_bytes;
  if (call->has_own_memory) {
    output->on_device = fa_memory_new(call->device, bytes, &call->error);
    if (!output->on_device) return false;
    *data = fa_memory_data(output->on_device);
    if (call->results_on_device) return true;
  }
  if (!fa_result_new(call->device, bytes, &output->binary)) return reject_memory(call, "parts", bytes);
  if (!call->has_own_memory) *data = output->binary.binary.data;
  return true;
}

static bool new_part(nif_merge *call, fa_dtype dtype, fa_part *part) {
  const fa_merge *m = &call->merge;
  void *data;
  part->dtype = dtype;
  if (!new_output(call, dtype, 4, (int64_t[]){m->batch, m->seqlen_q, m->num_heads, m->head_dim}, &data))
    return false;
  part->o = fa_merge_contiguous(m, data);
  return new_output(call, dtype == FA_DTYPE_F64 ? FA_DTYPE_F64 : FA_DTYPE_F32, 3,
                    (int64_t[]){m->batch, m->num_heads, m->seqlen_q}, &part->lse);
}

static bool new_gradients(nif_merge *call) {
  fa_merge *m = &call->merge;
  for (int p = 0; p < m->num_parts; p++)
    if (!new_part(call, m->parts[p].dtype, &m->dparts[p])) return false;
  if (!m->sink) return true;
  const int64_t dims[] = {m->batch, m->seqlen_q, m->num_sinks, m->num_heads};
  const int rank = m->sink_per_row ? 4 : 2;
  void *data;
  if (!new_output(call, FA_DTYPE_F32, rank, dims + (4 - rank), &data)) return false;
  m->dsink = data;
  return true;
}

static bool download(nif_merge *call) {
  for (int i = 0; i < call->num_outputs; i++) {
    const nif_output *output = &call->outputs[i];
    if (output->on_device && !call->results_on_device &&
        fa_device_copy(call->device, output->binary.binary.data, fa_memory_data(output->on_device),
                       (size_t)output->shape.size_bytes, NULL, &call->error))
      return false;
  }
  return true;
}

static ERL_NIF_TERM make_output(nif_merge *call, int i) {
  nif_output *output = &call->outputs[i];
  ERL_NIF_TERM data = call->has_own_memory && call->results_on_device
                          ? fa_memory_make(call->env, output->on_device)
                          : fa_result_make(call->env, &output->binary);
  return fa_make_tensor(call->env, data, &output->shape);
}

/* ---- the passes ---------------------------------------------------------------------------------------- */

static bool run(nif_merge *call, bool is_backward) {
  fa_execution execution = {.workspace_bytes = is_backward ? fa_merge_workspace_bytes(&call->merge) : 0};
  if (fa_device_alloc(call->device, execution.workspace_bytes, &execution.workspace, &call->error))
    return false;
  const fa_status status = (is_backward ? fa_merge_backward : fa_merge_forward)(&call->merge, call->device,
                                                                                &execution, &call->error);
  const bool done = !status && fa_device_synchronize(call->device, NULL, &call->error) == FA_STATUS_OK;
  fa_device_free(call->device, execution.workspace, NULL);
  return done && download(call);
}

/* {ok, #{o => O, lse => Lse}} */
static bool forward(nif_merge *call, ERL_NIF_TERM map, const fa_shape *sink, ERL_NIF_TERM *result) {
  fa_merge *m = &call->merge;
  ERL_NIF_TERM type = find(call, map, "type");
  if (!fa_get_type(call->env, type, "type", &m->merged.dtype, &call->error) ||
      !read_parts(call, find(call, map, "parts"), sink, false))
    return false;
  if (m->num_parts == 0)
    return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts", "at least 1 part", "none");
  if (!new_part(call, m->merged.dtype, &m->merged) || !run(call, false)) return false;
  fa_map results = {0};
  fa_map_put(&results, enif_make_atom(call->env, "o"), make_output(call, 0));
  fa_map_put(&results, enif_make_atom(call->env, "lse"), make_output(call, 1));
  *result = fa_make_map(call->env, &results);
  return true;
}

/* {ok, #{parts => [{Dout, Dlse}], dsink => Dsink | nil}} */
static bool backward(nif_merge *call, ERL_NIF_TERM map, const fa_shape *sink, ERL_NIF_TERM *result) {
  if (!read_merged(call, map, sink) || !read_parts(call, find(call, map, "parts"), NULL, true) ||
      !new_gradients(call) || !run(call, true))
    return false;
  fa_map results = {0};
  ERL_NIF_TERM parts = enif_make_list(call->env, 0), dsink = enif_make_atom(call->env, "nil");
  for (int p = call->merge.num_parts - 1; p >= 0; p--)
    parts = enif_make_list_cell(
        call->env, enif_make_tuple2(call->env, make_output(call, 2 * p), make_output(call, 2 * p + 1)), parts);
  if (sink) dsink = make_output(call, 2 * call->merge.num_parts);
  fa_map_put(&results, enif_make_atom(call->env, "parts"), parts);
  fa_map_put(&results, enif_make_atom(call->env, "dsink"), dsink);
  *result = fa_make_map(call->env, &results);
  return true;
}

static void release(nif_merge *call) {
  for (int i = 0; i < call->num_inputs; i++) {
    if (call->copies[i]) fa_device_free(call->device, call->copies[i], NULL);
    fa_data_drop(&call->inputs[i]);
  }
  for (int i = 0; i < call->num_outputs; i++) {
    fa_result_drop(&call->outputs[i].binary);
    if (call->outputs[i].on_device) enif_release_resource(call->outputs[i].on_device);
  }
}

static bool merge(nif_merge *call, const ERL_NIF_TERM argv[], ERL_NIF_TERM *result) {
  fa_shape shape;
  bool has_sink;
  int pass, place;
  fa_merge_init(&call->merge);
  if (!fa_get_choice(call->env, argv[0], fa_atom.passes, FA_PASS_BACKWARD + 1, "pass", &pass, &call->error))
    return false;
  if (!enif_is_map(call->env, argv[1]))
    return fa_reject_term(call->env, &call->error, "tensors", "a map", argv[1]);
  if (!fa_get_device(call->env, argv[2], &call->device, &call->error) ||
      !fa_get_choice(call->env, argv[3], fa_atom.places, 2, "results", &place, &call->error))
    return false;
  if (fa_num_devices(call->device.kind, &call->error) == 0) return false;
  call->results_on_device = place == 1;
  call->has_own_memory = fa_has_own_memory(call->device.kind);
  return read_sink(call, argv[1], &shape, &has_sink) &&
         (pass == FA_PASS_FORWARD ? forward : backward)(call, argv[1], has_sink ? &shape : NULL, result);
}

ERL_NIF_TERM fa_nif_merge(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_merge *call = calloc(1, sizeof *call); /* too large for a scheduler's stack */
  ERL_NIF_TERM result;
  fa_error error;
  if (!call) {
    fa_reject(&error, FA_STATUS_OUT_OF_MEMORY, "parts", "memory for the call", "none");
    return fa_make_error(env, &error);
  }
  call->env = env;
  const bool done = merge(call, argv, &result);
  if (!done) result = fa_make_error(env, &call->error);
  release(call);
  free(call);
  return done ? enif_make_tuple2(env, fa_atom.ok, result) : result;
}
