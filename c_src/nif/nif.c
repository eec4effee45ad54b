/* Loading, and the table of functions. */
#include "nif.h"

#include "terms.h"

static int load(ErlNifEnv *env, void **priv_data, ERL_NIF_TERM info) {
  (void)priv_data, (void)info;
  fa_atoms_init(env);
  return 0;
}

/* Atoms are the same in every instance and there is no other state: new code loads as the first did, and
 * calls that still run in the old code are not disturbed. */
static int upgrade(ErlNifEnv *env, void **priv_data, void **old_priv_data, ERL_NIF_TERM info) {
  (void)old_priv_data;
  return load(env, priv_data, info);
}

/* run computes; plan and backend_info may have to wake a driver up. None may hold a normal scheduler. */
static ErlNifFunc functions[] = {
    {"run", 4, fa_nif_run, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"plan", 4, fa_nif_plan, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"backend_info", 0, fa_nif_backend_info, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"options", 0, fa_nif_options, 0},
    {"register_xla", 1, fa_nif_register_xla, ERL_NIF_DIRTY_JOB_IO_BOUND},
};

ERL_NIF_INIT(Elixir.FlashAttention.Native, functions, load, NULL, upgrade, NULL)
