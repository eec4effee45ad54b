/* Terms to values and back; see terms.h. */
#include "terms.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

fa_atoms fa_atom;

void fa_atoms_init(ErlNifEnv *env) {
  fa_atom.ok = enif_make_atom(env, "ok");
  fa_atom.error = enif_make_atom(env, "error");
  fa_atom.infinity = enif_make_atom(env, "infinity");
  fa_atom.sequences = enif_make_atom(env, "sequences");
  fa_atom.results = enif_make_atom(env, "results");
  fa_atom.keep = enif_make_atom(env, "keep");
  fa_atom.measure = enif_make_atom(env, "measure");
  for (int i = 0; i < 2; i++) {
    fa_atom.booleans[i] = enif_make_atom(env, i ? "true" : "false");
    fa_atom.places[i] = enif_make_atom(env, i ? "device" : "host");
  }
  for (int i = 0; i < FA_NUM_PASSES; i++) fa_atom.passes[i] = enif_make_atom(env, fa_pass_name(i));
  for (int i = 0; i < FA_NUM_TENSORS; i++) fa_atom.tensors[i] = enif_make_atom(env, fa_tensor_name(i));
  for (int i = 0; i < FA_NUM_DEVICE_KINDS; i++)
    fa_atom.device_kinds[i] = enif_make_atom(env, fa_device_kind_name(i));
  for (int i = 0; i < FA_NUM_DTYPES; i++) {
    const char *name = fa_dtype_name(i);
    fa_atom.type_classes[i] = enif_make_atom_len(env, name, strcspn(name, "0123456789"));
  }
}

int fa_atom_index(ERL_NIF_TERM term, const ERL_NIF_TERM *atoms, int count) {
  for (int i = 0; i < count; i++)
    if (enif_is_identical(term, atoms[i])) return i;
  return -1;
}

bool fa_reject(fa_error *error, fa_status status, const char *argument, const char *expected, const char *got) {
  fa_fail(error, status, argument, expected, got);
  return false;
}

bool fa_reject_term(ErlNifEnv *env, fa_error *error, const char *argument, const char *expected,
                    ERL_NIF_TERM got) {
  char text[sizeof error->got] = "";
  ErlNifBinary binary;
  if (enif_inspect_binary(env, got, &binary)) /* printing would run through all of it */
    snprintf(text, sizeof text, "a binary of %zu bytes", binary.size);
  else
    enif_snprintf(text, sizeof text, "%T", got);
  return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, expected, text);
}

bool fa_get_choice(ErlNifEnv *env, ERL_NIF_TERM term, const ERL_NIF_TERM *atoms, int count,
                   const char *argument, int *index, fa_error *error) {
  *index = fa_atom_index(term, atoms, count);
  if (*index >= 0) return true;
  char expected[sizeof error->expected];
  size_t used = (size_t)snprintf(expected, sizeof expected, "one of");
  for (int i = 0; i < count && used < sizeof expected; i++)
    used += (size_t)enif_snprintf(expected + used, sizeof expected - used, "%s %T", i ? "," : "", atoms[i]);
  return fa_reject_term(env, error, argument, expected, term);
}

bool fa_get_device(ErlNifEnv *env, ERL_NIF_TERM term, fa_device *device, fa_error *error) {
  int arity, kind, index;
  const ERL_NIF_TERM *parts;
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 2 || !enif_get_int(env, parts[1], &index))
    return fa_reject_term(env, error, "device", "{kind, index}", term);
  if (!fa_get_choice(env, parts[0], fa_atom.device_kinds, FA_NUM_DEVICE_KINDS, "device", &kind, error))
    return false;
  *device = (fa_device){.kind = kind, .index = index};
  return true;
}

static bool get_option(ErlNifEnv *env, ERL_NIF_TERM term, fa_problem *problem, fa_error *error) {
  int arity;
  const ERL_NIF_TERM *parts;
  char name[256], choice[256];
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 2 ||
      !enif_get_atom(env, parts[0], name, sizeof name, ERL_NIF_LATIN1))
    return fa_reject_term(env, error, "options", "{name, value}", term);
  const fa_option *option = fa_option_find(name);
  if (!option) return fa_reject_term(env, error, "options", "the name of an option", parts[0]);

  ErlNifSInt64 integer;
  double real;
  if (enif_get_int64(env, parts[1], &integer))
    return fa_option_set_number(problem, option, (double)integer, error) == FA_STATUS_OK;
  if (enif_get_double(env, parts[1], &real))
    return fa_option_set_number(problem, option, real, error) == FA_STATUS_OK;
  if (option->kind == FA_OPTION_LENGTH && enif_is_identical(parts[1], fa_atom.infinity))
    return fa_option_set_number(problem, option, INFINITY, error) == FA_STATUS_OK;
  if (enif_get_atom(env, parts[1], choice, sizeof choice, ERL_NIF_LATIN1))
    return fa_option_set_choice(problem, option, choice, error) == FA_STATUS_OK;
  const char *expected = enif_is_number(env, parts[1]) ? "a number of 64 bits" : "a number or an atom";
  return fa_reject_term(env, error, option->name, expected, parts[1]);
}

bool fa_get_options(ErlNifEnv *env, ERL_NIF_TERM term, fa_problem *problem, fa_error *error) {
  ERL_NIF_TERM head, tail = term;
  while (enif_get_list_cell(env, tail, &head, &tail))
    if (!get_option(env, head, problem, error)) return false;
  return enif_is_empty_list(env, tail) || fa_reject_term(env, error, "options", "a proper list", term);
}

bool fa_get_type(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_dtype *dtype, fa_error *error) {
  static const char expected[] = "type f32, f64, bf16 or f16";
  int arity, bits;
  const ERL_NIF_TERM *parts;
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 2 || !enif_is_atom(env, parts[0]) ||
      !enif_get_int(env, parts[1], &bits))
    return fa_reject_term(env, error, argument, expected, term);
  for (int i = 0; i < FA_NUM_DTYPES; i++)
    if (enif_is_identical(parts[0], fa_atom.type_classes[i]) && bits == 8 * (int)fa_dtype_bytes(i)) {
      *dtype = i;
      return true;
    }
  char name[300];
  enif_snprintf(name, sizeof name, "%T%d", parts[0], bits);
  return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, expected, name);
}

static bool get_dims(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_shape *shape,
                     fa_error *error) {
  int rank;
  const ERL_NIF_TERM *dims;
  bool valid = enif_get_tuple(env, term, &rank, &dims);
  if (valid) shape->rank = rank; /* the library says which rank it wants */
  for (int i = 0; valid && i < rank && i < FA_MAX_RANK; i++) {
    ErlNifSInt64 dim;
    valid = enif_get_int64(env, dims[i], &dim);
    shape->dims[i] = dim;
  }
  return valid || fa_reject_term(env, error, argument, "a shape, a tuple of 64-bit integers", term);
}

bool fa_get_type_and_dims(ErlNifEnv *env, const ERL_NIF_TERM parts[2], const char *argument, fa_shape *shape,
                          fa_error *error) {
  return fa_get_type(env, parts[0], argument, &shape->dtype, error) &&
         get_dims(env, parts[1], argument, shape, error);
}

bool fa_get_shape(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_shape *shape, fa_error *error) {
  int arity;
  const ERL_NIF_TERM *parts;
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 2)
    return fa_reject_term(env, error, argument, "{type, shape}", term);
  shape->size_bytes = -1;
  return fa_get_type_and_dims(env, parts, argument, shape, error);
}

ERL_NIF_TERM fa_make_text(ErlNifEnv *env, const char *text) {
  ERL_NIF_TERM term;
  size_t length = strlen(text);
  unsigned char *bytes = enif_make_new_binary(env, length, &term);
  for (size_t i = 0; i < length; i++) bytes[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
  return term;
}

static ERL_NIF_TERM make_type(ErlNifEnv *env, fa_dtype dtype) {
  return enif_make_tuple2(env, fa_atom.type_classes[dtype], enif_make_int(env, 8 * (int)fa_dtype_bytes(dtype)));
}

static ERL_NIF_TERM make_dims(ErlNifEnv *env, const fa_shape *shape) {
  ERL_NIF_TERM dims[FA_MAX_RANK];
  for (int i = 0; i < shape->rank; i++) dims[i] = enif_make_int64(env, shape->dims[i]);
  return enif_make_tuple_from_array(env, dims, (unsigned)shape->rank);
}

ERL_NIF_TERM fa_make_shape(ErlNifEnv *env, const fa_shape *shape) {
  return enif_make_tuple2(env, make_type(env, shape->dtype), make_dims(env, shape));
}

ERL_NIF_TERM fa_make_tensor(ErlNifEnv *env, ERL_NIF_TERM data, const fa_shape *shape) {
  return enif_make_tuple3(env, data, make_type(env, shape->dtype), make_dims(env, shape));
}

ERL_NIF_TERM fa_make_error(ErlNifEnv *env, const fa_error *error) {
  ERL_NIF_TERM reason = enif_make_tuple5(env, enif_make_atom(env, fa_status_name(error->status)),
                                         fa_make_text(env, error->argument), fa_make_text(env, error->expected),
                                         fa_make_text(env, error->got), fa_make_text(env, error->message));
  return enif_make_tuple2(env, fa_atom.error, reason);
}

void fa_map_put(fa_map *map, ERL_NIF_TERM key, ERL_NIF_TERM value) {
  map->keys[map->size] = key;
  map->values[map->size++] = value;
}

ERL_NIF_TERM fa_make_map(ErlNifEnv *env, const fa_map *map) {
  ERL_NIF_TERM term;
  enif_make_map_from_arrays(env, (ERL_NIF_TERM *)map->keys, (ERL_NIF_TERM *)map->values, map->size, &term);
  return term;
}
