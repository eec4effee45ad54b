/* Caches and their sequences as terms, and views of sequences for a forward. */
#ifndef FA_NIF_CACHE_H
#define FA_NIF_CACHE_H

#include "memory.h"

bool fa_cache_open_types(ErlNifEnv *env);

/* Begins a view of a list of sequences. Its tensors' data and shapes are as fa_get_tensor gives them: k, v,
 * key_lengths and page_table. */
bool fa_get_cache_view(ErlNifEnv *env, ERL_NIF_TERM sequences, fa_cache_view *view,
                       fa_data inputs[FA_NUM_TENSORS], fa_shape shapes[FA_NUM_TENSORS], fa_error *error);

/* The tensors that a view brings. */
extern const fa_tensor_id fa_view_tensors[4];

#endif
