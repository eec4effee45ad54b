/* One pass of attention on terms: run(Pass, Tensors, Options, Device). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nif.h"
#include "terms.h"

typedef struct call {
  ErlNifEnv *env;
  fa_error error;

  int pass;
  fa_problem problem;
  fa_plan plan;
  fa_tensors tensors;
  const fa_shape *given[FA_NUM_TENSORS]; /* into shapes; NULL where there was no such tensor */
  fa_shape shapes[FA_NUM_TENSORS];
  ErlNifBinary inputs[FA_NUM_TENSORS];

  void *copies;                         /* of inputs that are not aligned */
  ErlNifBinary outputs[FA_NUM_TENSORS]; /* data is NULL where not allocated */
} call;

static bool read_tensors(call *call, ERL_NIF_TERM term) {
  ErlNifMapIterator iterator;
  if (!enif_map_iterator_create(call->env, term, &iterator, ERL_NIF_MAP_ITERATOR_FIRST))
    return fa_reject_term(call->env, &call->error, "tensors", "a map", term);
  bool read = true;
  ERL_NIF_TERM name, tensor;
  for (; read && enif_map_iterator_get_pair(call->env, &iterator, &name, &tensor);
       enif_map_iterator_next(call->env, &iterator)) {
    int id = fa_atom_index(name, fa_atom.tensors, FA_NUM_TENSORS);
    if (id < 0) {
      read = fa_reject_term(call->env, &call->error, "tensors", "the name of a tensor", name);
    } else {
      call->given[id] = &call->shapes[id];
      read = fa_get_tensor(call->env, tensor, fa_tensor_name(id), &call->inputs[id], &call->shapes[id],
                           &call->error);
    }
  }
  enif_map_iterator_destroy(call->env, &iterator);
  return read;
}

static bool plan(call *call, ERL_NIF_TERM pass, ERL_NIF_TERM tensors, ERL_NIF_TERM options, ERL_NIF_TERM term) {
  fa_device device;
  fa_problem_init(&call->problem);
  return fa_get_choice(call->env, pass, fa_atom.passes, FA_NUM_PASSES, "pass", &call->pass, &call->error) &&
         read_tensors(call, tensors) && fa_get_options(call->env, options, &call->problem, &call->error) &&
         fa_get_device(call->env, term, &device, &call->error) &&
         fa_problem_set_shapes(&call->problem, call->pass, call->given, &call->error) == FA_STATUS_OK &&
         fa_plan_init(&call->plan, &call->problem, call->pass, device, &call->error) == FA_STATUS_OK;
}

static bool reject_memory(call *call, const char *argument, size_t bytes) {
  char expected[64];
  snprintf(expected, sizeof expected, "%zu bytes of memory", bytes);
  return fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, argument, expected, "none");
}

static size_t round_up(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* A sub-binary may begin anywhere; kernels read elements at their own alignment. */
static bool is_aligned(const call *call, int id) {
  return (uintptr_t)call->inputs[id].data % fa_dtype_bytes(call->shapes[id].dtype) == 0;
}

static bool bind_inputs(call *call) {
  size_t bytes = 0, used = 0;
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (call->given[id] && !is_aligned(call, id)) bytes += round_up(call->inputs[id].size);
  if (bytes) call->copies = aligned_alloc(64, bytes);
  if (bytes && !call->copies) return reject_memory(call, "tensors", bytes);

  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!call->given[id]) continue;
    void *data = call->inputs[id].data;
    if (!is_aligned(call, id)) {
      data = memcpy((char *)call->copies + used, data, call->inputs[id].size);
      used += round_up(call->inputs[id].size);
    }
    *fa_tensor_at(&call->tensors, id) = fa_tensor_contiguous(&call->problem, id, data);
  }
  return true;
}

static bool is_output(const call *call, int id) {
  return fa_tensor_role_in(&call->problem, call->pass, id) == FA_ROLE_OUTPUT;
}

static bool allocate_outputs(call *call) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_output(call, id)) continue;
    size_t bytes = (size_t)fa_tensor_shape(&call->problem, id).size_bytes;
    if (!enif_alloc_binary(bytes, &call->outputs[id])) {
      call->outputs[id].data = NULL;
      return reject_memory(call, fa_tensor_name(id), bytes);
    }
    *fa_tensor_at(&call->tensors, id) = fa_tensor_contiguous(&call->problem, id, call->outputs[id].data);
  }
  return true;
}

/* {ok, #{Name => Tensor}}; the binaries become the terms' own. */
static ERL_NIF_TERM make_results(call *call) {
  fa_map results = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (!is_output(call, id)) continue;
    fa_shape shape = fa_tensor_shape(&call->problem, id);
    ERL_NIF_TERM data = enif_make_binary(call->env, &call->outputs[id]);
    call->outputs[id].data = NULL;
    fa_map_put(&results, fa_atom.tensors[id], fa_make_tensor(call->env, data, &shape));
  }
  return enif_make_tuple2(call->env, fa_atom.ok, fa_make_map(call->env, &results));
}

static void release(call *call) {
  free(call->copies);
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (call->outputs[id].data) enif_release_binary(&call->outputs[id]);
}

ERL_NIF_TERM fa_nif_run(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  call call = {.env = env};
  bool done = plan(&call, argv[0], argv[1], argv[2], argv[3]) && bind_inputs(&call) &&
              allocate_outputs(&call) &&
              fa_run_on_host(&call.plan, &call.tensors, NULL, &call.error) == FA_STATUS_OK;
  ERL_NIF_TERM result = done ? make_results(&call) : fa_make_error(env, &call.error);
  release(&call);
  return result;
}
