/* How the NIF is loaded, and the table of its functions. */
#include "nif.h"

#include "cache.h"
#include "memory.h"

static int load(ErlNifEnv *env, void **priv_data, ERL_NIF_TERM info) {
  (void)priv_data, (void)info;
  fa_set_gives_way(1);
  fa_atoms_init(env);
  return fa_memory_open_types(env) && fa_link_open_types(env) && fa_cache_open_types(env) ? 0 : 1;
}

/* Atoms are the same in every instance, and new code takes over the old one's memory: it loads as the first
 * did, and calls that still run in the old code are not disturbed. */
static int upgrade(ErlNifEnv *env, void **priv_data, void **old_priv_data, ERL_NIF_TERM info) {
  (void)old_priv_data;
  return load(env, priv_data, info);
}

/* execute computes, and what asks a driver may have to wait for it. Neither may hold a normal scheduler. */
static ErlNifFunc functions[] = {
    {"execute", 5, fa_nif_execute, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"merge", 4, fa_nif_merge, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"plan", 4, fa_nif_plan, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"backend_info", 0, fa_nif_backend_info, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"options", 0, fa_nif_options, 0},
    {"memory_info", 1, fa_nif_memory_info, 0},
    {"release", 1, fa_nif_release, 0},
    {"read", 1, fa_nif_read, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"trim", 1, fa_nif_trim, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"set_pinned_limit", 1, fa_nif_set_pinned_limit, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"allocate", 2, fa_nif_allocate, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"upload", 2, fa_nif_upload, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"sum", 3, fa_nif_sum, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"link_id", 1, fa_nif_link_id, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"link_open", 5, fa_nif_link_open, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"link_begin", 2, fa_nif_link_begin, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"link_await", 1, fa_nif_link_await, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"link_abort", 1, fa_nif_link_abort, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"cache_new", 3, fa_nif_cache_new, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"cache_free_pages", 1, fa_nif_cache_free_pages, 0},
    {"cache_add_sequence", 1, fa_nif_cache_add_sequence, 0},
    {"cache_fork", 1, fa_nif_cache_fork, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"cache_length", 1, fa_nif_cache_length, 0},
    {"cache_append", 3, fa_nif_cache_append, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"cache_release", 1, fa_nif_cache_release, 0},
    {"register_xla", 1, fa_nif_register_xla, ERL_NIF_DIRTY_JOB_IO_BOUND},
};

ERL_NIF_INIT(Elixir.FlashAttention.Native, functions, load, NULL, upgrade, NULL)
