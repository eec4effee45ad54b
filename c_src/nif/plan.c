/* What a pass would do, from shapes alone: plan(Pass, Shapes, Options, Device). */
#include "nif.h"
#include "terms.h"

static bool get_shapes(ErlNifEnv *env, ERL_NIF_TERM term, fa_shape shapes[FA_NUM_TENSORS],
                       const fa_shape *given[FA_NUM_TENSORS], fa_error *error) {
  if (!enif_is_map(env, term)) return fa_reject_term(env, error, "shapes", "a map", term);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    ERL_NIF_TERM shape;
    if (!enif_get_map_value(env, term, fa_atom.tensors[id], &shape)) continue;
    if (!fa_get_shape(env, shape, fa_tensor_name(id), &shapes[id], error)) return false;
    given[id] = &shapes[id];
  }
  return true;
}

/* {ok, #{Name => {Type, Dims}}, WorkspaceBytes, Kernel}, of the tensors that the pass writes. */
static ERL_NIF_TERM make_plan(ErlNifEnv *env, const fa_plan *plan) {
  fa_map outputs = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (fa_tensor_role_in(&plan->problem, plan->pass, id) != FA_ROLE_OUTPUT) continue;
    fa_shape shape = fa_tensor_shape(&plan->problem, id);
    fa_map_put(&outputs, fa_atom.tensors[id], fa_make_shape(env, &shape));
  }
  return enif_make_tuple4(env, fa_atom.ok, fa_make_map(env, &outputs),
                          enif_make_uint64(env, plan->workspace_bytes), fa_make_text(env, plan->kernel));
}

ERL_NIF_TERM fa_nif_plan(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  int pass;
  fa_device device;
  fa_problem problem;
  fa_plan plan;
  fa_shape shapes[FA_NUM_TENSORS] = {0};
  const fa_shape *given[FA_NUM_TENSORS] = {NULL};
  fa_error error;
  fa_problem_init(&problem);
  bool planned = fa_get_choice(env, argv[0], fa_atom.passes, FA_NUM_PASSES, "pass", &pass, &error) &&
                 get_shapes(env, argv[1], shapes, given, &error) &&
                 fa_get_options(env, argv[2], &problem, &error) &&
                 fa_get_device(env, argv[3], &device, &error) &&
                 fa_problem_set_shapes(&problem, pass, given, &error) == FA_STATUS_OK &&
                 fa_plan_init(&plan, &problem, pass, device, &error) == FA_STATUS_OK;
  return planned ? make_plan(env, &plan) : fa_make_error(env, &error);
}
