/* Turns Erlang terms into the library's values, and back. */
#ifndef FA_NIF_TERMS_H
#define FA_NIF_TERMS_H

#include <erl_nif.h>

#include "../flash_attention.h"

/* The atoms that terms may have. Loading the NIF makes them. */
typedef struct fa_atoms {
  ERL_NIF_TERM ok, error, infinity, sequences, results, keep, measure;
  ERL_NIF_TERM booleans[2]; /* false and true */
  ERL_NIF_TERM places[2];   /* host and device */
  ERL_NIF_TERM passes[FA_NUM_PASSES];
  ERL_NIF_TERM tensors[FA_NUM_TENSORS];
  ERL_NIF_TERM device_kinds[FA_NUM_DEVICE_KINDS];
  ERL_NIF_TERM type_classes[FA_NUM_DTYPES]; /* f and bf, of {f, 32} and {bf, 16} */
} fa_atoms;
extern fa_atoms fa_atom;

void fa_atoms_init(ErlNifEnv *env);

/* The position of an atom among count others, or -1. */
int fa_atom_index(ERL_NIF_TERM term, const ERL_NIF_TERM *atoms, int count);

/* These read terms. For an unexpected term they return false, and error names the argument. */
bool fa_get_choice(ErlNifEnv *env, ERL_NIF_TERM term, const ERL_NIF_TERM *atoms, int count,
                   const char *argument, int *index, fa_error *error);
bool fa_get_device(ErlNifEnv *env, ERL_NIF_TERM term, fa_device *device, fa_error *error);
/* A list of {name, number | infinity | choice}. */
bool fa_get_options(ErlNifEnv *env, ERL_NIF_TERM term, fa_problem *problem, fa_error *error);
/* The first reads {class, bits}; the second reads that and {dims…}, two terms. */
bool fa_get_type(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_dtype *dtype, fa_error *error);
bool fa_get_type_and_dims(ErlNifEnv *env, const ERL_NIF_TERM parts[2], const char *argument, fa_shape *shape,
                          fa_error *error);
/* {{class, bits}, {dims…}}. The term does not tell size_bytes, which becomes -1. */
bool fa_get_shape(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_shape *shape, fa_error *error);

/* Fill error in the library's form, "argument: expected …, got …", and return false. */
bool fa_reject(fa_error *error, fa_status status, const char *argument, const char *expected, const char *got);
bool fa_reject_term(ErlNifEnv *env, fa_error *error, const char *argument, const char *expected,
                    ERL_NIF_TERM got);

/* A binary of the text, with '?' for bytes that are not ASCII: a text may quote atoms, and be cut anywhere. */
ERL_NIF_TERM fa_make_text(ErlNifEnv *env, const char *text);
/* {{class, bits}, {dims…}} */
ERL_NIF_TERM fa_make_shape(ErlNifEnv *env, const fa_shape *shape);
ERL_NIF_TERM fa_make_tensor(ErlNifEnv *env, ERL_NIF_TERM data, const fa_shape *shape);
/* {error, {status, argument, expected, got, message}} */
ERL_NIF_TERM fa_make_error(ErlNifEnv *env, const fa_error *error);

/* A map that is being made. */
typedef struct fa_map {
  unsigned size;
  ERL_NIF_TERM keys[FA_NUM_TENSORS], values[FA_NUM_TENSORS];
} fa_map;
void fa_map_put(fa_map *map, ERL_NIF_TERM key, ERL_NIF_TERM value);
ERL_NIF_TERM fa_make_map(ErlNifEnv *env, const fa_map *map);

#endif
