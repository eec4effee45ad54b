/* Memory as terms: a device's, and the pinned memory of the host. */
#ifndef FA_NIF_MEMORY_H
#define FA_NIF_MEMORY_H

#include "terms.h"

/* Resource types belong to one load of the library, so each load opens its own. */
ErlNifResourceType *fa_open_type(ErlNifEnv *env, const char *name, ErlNifResourceDtor *collected);
bool fa_memory_open_types(ErlNifEnv *env);
bool fa_link_open_types(ErlNifEnv *env);

/* Memory of a device, a resource. Its term is a reference. */
typedef struct fa_memory fa_memory;

fa_memory *fa_memory_new(fa_device device, size_t bytes, fa_error *error);
void *fa_memory_data(const fa_memory *memory);
ERL_NIF_TERM fa_memory_make(ErlNifEnv *env, fa_memory *memory);

/* acquire adds a user, unless the memory was released already: it then returns false. drop removes a user. */
bool fa_memory_acquire(fa_memory *memory);
void fa_memory_drop(fa_memory *memory);

/* A binary that a device writes, in pinned memory where there is some. */
typedef struct fa_result {
  ErlNifBinary binary; /* data is NULL where there is none */
  void *pinned;        /* the resource that holds it, or NULL */
} fa_result;

bool fa_result_new(fa_device device, size_t bytes, fa_result *result);
ERL_NIF_TERM fa_result_make(ErlNifEnv *env, fa_result *result);
void fa_result_drop(fa_result *result);

/* A tensor's first element: a binary, a reference to a device's memory, or {Address, Bytes, Owner}. */
typedef struct fa_data {
  void *data;
  size_t bytes;
  fa_memory *memory; /* of a reference, which has this as a user */
  bool on_device;    /* data is an address whose place must be found out before it is used */
  bool is_foreign;   /* the address came from the caller, and others may be at work there */
} fa_data;

bool fa_get_data(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_error *error);
void fa_data_drop(fa_data *data);

/* Copies the bytes at an address of the host that a caller gave. Returns false where the address cannot be
 * read, which would otherwise crash the VM. */
bool fa_data_read(void *to, const fa_data *data);

/* Reads {Data, {class, bits}, {dims…}}. A binary lives as long as env. */
bool fa_get_tensor(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_shape *shape,
                   fa_error *error);

#endif
