/* register_xla(Library) gives the custom calls to the XLA that EXLA has loaded. */
#include <dlfcn.h>
#include <stdio.h>

#include "nif.h"
#include "terms.h"

/* Finds what handlers are registered through in the XLA runtime of a library, or NULL where it is not loaded.
 * The library outlives dlclose: whoever loaded it keeps it. */
static const void *find_api(const char *library) {
  void *runtime = dlopen(library, RTLD_NOLOAD | RTLD_NOW);
  if (!runtime) return NULL;
  const void *(*get_api)(void) = (const void *(*)(void))dlsym(runtime, "XLA_FFI_GetApi");
  dlclose(runtime);
  return get_api ? get_api() : NULL;
}

ERL_NIF_TERM fa_nif_register_xla(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_error error;
  ErlNifBinary name;
  char library[1024];
  if (!enif_inspect_binary(env, argv[0], &name) || name.size >= sizeof library) {
    fa_reject_term(env, &error, "library", "the name of a library", argv[0]);
    return fa_make_error(env, &error);
  }
  snprintf(library, sizeof library, "%.*s", (int)name.size, (const char *)name.data);
  const void *api = find_api(library);
  if (!api) {
    fa_reject(&error, FA_STATUS_UNSUPPORTED, "library", "an XLA runtime that is loaded", library);
    return fa_make_error(env, &error);
  }
  return fa_xla_register(api, &error) ? fa_make_error(env, &error) : fa_atom.ok;
}
