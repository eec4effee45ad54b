/* Memory as terms: that of devices, and that of the host which devices read and write fast. */
#ifndef FA_NIF_MEMORY_H
#define FA_NIF_MEMORY_H

#include "terms.h"

/* Types of resources, which belong to this load of the library. */
ErlNifResourceType *fa_open_type(ErlNifEnv *env, const char *name, ErlNifResourceDtor *collected);
bool fa_memory_open_types(ErlNifEnv *env);
bool fa_link_open_types(ErlNifEnv *env);

/* Memory of a device: a resource, whose term is a reference. */
typedef struct fa_memory fa_memory;

fa_memory *fa_memory_new(fa_device device, size_t bytes, fa_error *error);
void *fa_memory_data(const fa_memory *memory);
ERL_NIF_TERM fa_memory_make(ErlNifEnv *env, fa_memory *memory);

/* Adds a user, and is false where the memory was released already; and takes one away. */
bool fa_memory_acquire(fa_memory *memory);
void fa_memory_drop(fa_memory *memory);

/* Room for a binary that a device writes: pinned where that is to be had. */
typedef struct fa_result {
  ErlNifBinary binary; /* data is NULL where there is none */
  void *pinned;        /* the resource that holds it, or NULL */
} fa_result;

bool fa_result_new(fa_device device, size_t bytes, fa_result *result);
ERL_NIF_TERM fa_result_make(ErlNifEnv *env, fa_result *result);
void fa_result_drop(fa_result *result);

/* What a tensor's first element says: a binary, a reference to a device's memory, or {Address, Bytes, Owner}.
 */
typedef struct fa_data {
  void *data;
  size_t bytes;
  fa_memory *memory; /* of a reference; this is one of its users */
  bool on_device;    /* not a binary: an address that is to be looked at before it is used */
} fa_data;

bool fa_get_data(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_error *error);
void fa_data_drop(fa_data *data);

/* Copies what lies at an address of the host's that somebody named. Where nothing can be read there it says so,
 * instead of taking the VM down. */
bool fa_data_read(void *to, const fa_data *data);

/* {Data, {class, bits}, {dims…}}; a binary lives as long as env. */
bool fa_get_tensor(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_shape *shape,
                   fa_error *error);

#endif
