/* What the library finds and takes, for Elixir to loop over: kinds, devices and options. */
#include <math.h>

#include "nif.h"
#include "terms.h"

static ERL_NIF_TERM make_memory(ErlNifEnv *env, fa_device device) {
  fa_memory_info info;
  fa_memory_get_info(device, &info, NULL);
  fa_map map = {0};
  fa_map_put(&map, enif_make_atom(env, "used_bytes"), enif_make_int64(env, info.used_bytes));
  fa_map_put(&map, enif_make_atom(env, "cached_bytes"), enif_make_int64(env, info.cached_bytes));
  fa_map_put(&map, enif_make_atom(env, "free_bytes"), enif_make_int64(env, info.free_bytes));
  fa_map_put(&map, enif_make_atom(env, "pinned_used_bytes"), enif_make_int64(env, info.pinned_used_bytes));
  fa_map_put(&map, enif_make_atom(env, "pinned_cached_bytes"), enif_make_int64(env, info.pinned_cached_bytes));
  fa_map_put(&map, enif_make_atom(env, "pinned_limit_bytes"), enif_make_int64(env, info.pinned_limit_bytes));
  fa_map_put(&map, enif_make_atom(env, "page_bytes"), enif_make_int64(env, info.page_bytes));
  return fa_make_map(env, &map);
}

static ERL_NIF_TERM make_device(ErlNifEnv *env, fa_device device) {
  fa_device_info info;
  fa_device_get_info(device, &info, NULL);
  fa_map map = {0};
  fa_map_put(&map, enif_make_atom(env, "kind"), fa_atom.device_kinds[device.kind]);
  fa_map_put(&map, enif_make_atom(env, "index"), enif_make_int(env, device.index));
  fa_map_put(&map, enif_make_atom(env, "name"), fa_make_text(env, info.name));
  fa_map_put(&map, enif_make_atom(env, "features"), fa_make_text(env, info.features));
  fa_map_put(&map, enif_make_atom(env, "num_threads"), enif_make_int(env, info.num_threads));
  fa_map_put(&map, enif_make_atom(env, "memory_bytes"), enif_make_int64(env, info.memory_bytes));
  fa_map_put(&map, enif_make_atom(env, "memory"), make_memory(env, device));
  return fa_make_map(env, &map);
}

static ERL_NIF_TERM make_kind(ErlNifEnv *env, fa_device_kind kind) {
  fa_map map = {0};
  fa_map_put(&map, enif_make_atom(env, "kind"), fa_atom.device_kinds[kind]);
  fa_map_put(&map, enif_make_atom(env, "has_own_memory"), fa_atom.booleans[fa_has_own_memory(kind)]);
  return fa_make_map(env, &map);
}

/* #{version => Text, kinds => [#{kind, has_own_memory}], devices => [Device], missing => #{Kind => Why}} */
ERL_NIF_TERM fa_nif_backend_info(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc, (void)argv;
  ERL_NIF_TERM devices = enif_make_list(env, 0), kinds = devices;
  fa_map missing = {0}, map = {0};
  for (int kind = 0; kind < FA_NUM_DEVICE_KINDS; kind++) {
    fa_error why;
    kinds = enif_make_list_cell(env, make_kind(env, kind), kinds);
    int num_devices = fa_num_devices(kind, &why);
    if (num_devices == 0) fa_map_put(&missing, fa_atom.device_kinds[kind], fa_make_text(env, why.message));
    for (int i = 0; i < num_devices; i++) {
      fa_device device = {.kind = kind, .index = i};
      devices = enif_make_list_cell(env, make_device(env, device), devices);
    }
  }
  enif_make_reverse_list(env, devices, &devices);
  enif_make_reverse_list(env, kinds, &kinds);
  fa_map_put(&map, enif_make_atom(env, "kinds"), kinds);
  fa_map_put(&map, enif_make_atom(env, "version"), fa_make_text(env, FA_VERSION));
  fa_map_put(&map, enif_make_atom(env, "devices"), devices);
  fa_map_put(&map, enif_make_atom(env, "missing"), fa_make_map(env, &missing));
  return fa_make_map(env, &map);
}

static ERL_NIF_TERM make_option(ErlNifEnv *env, const fa_option *option) {
  static const char *const kinds[] = {"real", "length", "choice"};
  ERL_NIF_TERM choices = enif_make_list(env, 0);
  for (int i = 0; option->choices && option->choices[i]; i++)
    choices = enif_make_list_cell(env, enif_make_atom(env, option->choices[i]), choices);
  enif_make_reverse_list(env, choices, &choices);
  fa_map map = {0};
  fa_map_put(&map, enif_make_atom(env, "name"), enif_make_atom(env, option->name));
  fa_map_put(&map, enif_make_atom(env, "kind"), enif_make_atom(env, kinds[option->kind]));
  fa_map_put(&map, enif_make_atom(env, "minimum"), enif_make_double(env, option->minimum));
  fa_map_put(&map, enif_make_atom(env, "maximum"), enif_make_double(env, option->maximum));
  fa_map_put(&map, enif_make_atom(env, "default"),
             isinf(option->default_value) ? fa_atom.infinity : enif_make_double(env, option->default_value));
  fa_map_put(&map, enif_make_atom(env, "choices"), choices);
  fa_map_put(&map, enif_make_atom(env, "doc"), fa_make_text(env, option->doc));
  return fa_make_map(env, &map);
}

/* The option table, a map a row. */
ERL_NIF_TERM fa_nif_options(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc, (void)argv;
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  ERL_NIF_TERM list = enif_make_list(env, 0);
  for (size_t i = num_options; i-- > 0;) list = enif_make_list_cell(env, make_option(env, &options[i]), list);
  return list;
}
