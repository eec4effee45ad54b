/* Memory as terms: references to a device's memory, and binaries in pinned memory. */
#include "memory.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#ifdef __linux__
#include <sys/uio.h>
#include <unistd.h>
#endif

#include "nif.h"

/* Memory of a device. The term counts as one user, each call that works on it as another; the last one to leave
 * gives it back. */
struct fa_memory {
  fa_device device;
  void *data;
  size_t bytes;
  atomic_int num_users;
  atomic_bool released;
};

typedef struct pinned_memory {
  fa_device device;
  void *data;
} pinned_memory;

static ErlNifResourceType *memory_type, *pinned_type;

bool fa_memory_acquire(fa_memory *memory) {
  int num_users = atomic_load(&memory->num_users);
  while (num_users > 0)
    if (atomic_compare_exchange_weak(&memory->num_users, &num_users, num_users + 1)) return true;
  return false;
}

void fa_memory_drop(fa_memory *memory) {
  if (atomic_fetch_sub(&memory->num_users, 1) == 1) fa_device_free(memory->device, memory->data, NULL);
}

static bool release(fa_memory *memory) {
  const bool held = !atomic_exchange(&memory->released, true);
  if (held) fa_memory_drop(memory);
  return held;
}

/* Destructors may run on any scheduler; giving memory back waits for nothing. */
static void memory_collected(ErlNifEnv *env, void *memory) {
  (void)env;
  release(memory);
}

static void pinned_collected(ErlNifEnv *env, void *memory) {
  (void)env;
  const pinned_memory *pinned = memory;
  if (pinned->data) fa_host_free(pinned->device, pinned->data, NULL);
}

ErlNifResourceType *fa_open_type(ErlNifEnv *env, const char *name, ErlNifResourceDtor *collected) {
  char own[64];
  snprintf(own, sizeof own, "%s of %p", name, (void *)&memory_type);
  return enif_open_resource_type(env, NULL, own, collected, ERL_NIF_RT_CREATE | ERL_NIF_RT_TAKEOVER, NULL);
}

/* After a hot upgrade two versions of this library can be loaded, each with its own pools and its own layout of
 * what is in them. So the types bear the address of this one: memory is given back by the version that
 * allocated it, and a reference to it is none to the other. A module that is loaded again with the same library
 * takes its types over. */
bool fa_memory_open_types(ErlNifEnv *env) {
  memory_type = fa_open_type(env, "device_memory", memory_collected);
  pinned_type = fa_open_type(env, "pinned_memory", pinned_collected);
  return memory_type && pinned_type;
}

/* ---- results -----------------------------------------------------------------------------------------------
 */

fa_memory *fa_memory_new(fa_device device, size_t bytes, fa_error *error) {
  void *data;
  if (fa_device_alloc(device, bytes, &data, error)) return NULL;
  fa_memory *memory = enif_alloc_resource(memory_type, sizeof *memory);
  memory->device = device;
  memory->data = data;
  memory->bytes = bytes;
  atomic_init(&memory->num_users, 1);
  atomic_init(&memory->released, false);
  return memory;
}

void *fa_memory_data(const fa_memory *memory) { return memory->data; }

ERL_NIF_TERM fa_memory_make(ErlNifEnv *env, fa_memory *memory) { return enif_make_resource(env, memory); }

bool fa_result_new(fa_device device, size_t bytes, fa_result *result) {
  const size_t least_pinned = 64 << 10; /* a smaller one costs little to copy once more */
  *result = (fa_result){0};
  void *data;
  if (bytes >= least_pinned && fa_host_alloc(device, bytes, &data, NULL) == FA_STATUS_OK) {
    pinned_memory *pinned = enif_alloc_resource(pinned_type, sizeof *pinned);
    *pinned = (pinned_memory){device, data};
    result->pinned = pinned;
    result->binary.data = data;
    result->binary.size = bytes;
    return true;
  }
  if (enif_alloc_binary(bytes, &result->binary)) return true;
  result->binary.data = NULL;
  return false;
}

ERL_NIF_TERM fa_result_make(ErlNifEnv *env, fa_result *result) {
  ERL_NIF_TERM term =
      result->pinned ? enif_make_resource_binary(env, result->pinned, result->binary.data, result->binary.size)
                     : enif_make_binary(env, &result->binary);
  if (result->pinned) enif_release_resource(result->pinned);
  *result = (fa_result){0};
  return term;
}

void fa_result_drop(fa_result *result) {
  if (result->pinned)
    enif_release_resource(result->pinned);
  else if (result->binary.data)
    enif_release_binary(&result->binary);
  *result = (fa_result){0};
}

/* ---- inputs ------------------------------------------------------------------------------------------------
 */

static bool get_reference(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data,
                          fa_error *error) {
  fa_memory *memory;
  if (!enif_get_resource(env, term, memory_type, (void **)&memory)) return false;
  if (!fa_memory_acquire(memory)) {
    fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, "memory that is held", "memory that was released");
    return true;
  }
  *data = (fa_data){.data = memory->data, .bytes = memory->bytes, .memory = memory, .on_device = true};
  return true;
}

/* {Address, Bytes, Owner}; the owner is a term that keeps the memory alive. */
static bool get_pointer(ErlNifEnv *env, ERL_NIF_TERM term, fa_data *data) {
  int arity;
  const ERL_NIF_TERM *parts;
  ErlNifUInt64 address, bytes;
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 3 || !enif_get_uint64(env, parts[0], &address) ||
      !enif_get_uint64(env, parts[1], &bytes))
    return false;
  *data = (fa_data){.data = (void *)(uintptr_t)address, .bytes = bytes, .on_device = true, .is_foreign = true};
  return true;
}

bool fa_get_data(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_error *error) {
  ErlNifBinary binary;
  if (enif_inspect_binary(env, term, &binary)) {
    *data = (fa_data){.data = binary.data, .bytes = binary.size};
    return true;
  }
  error->status = FA_STATUS_OK;
  if (get_reference(env, term, argument, data, error)) return error->status == FA_STATUS_OK;
  return get_pointer(env, term, data) || fa_reject_term(env, error, argument, "a binary", term);
}

bool fa_get_tensor(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, fa_data *data, fa_shape *shape,
                   fa_error *error) {
  int arity;
  const ERL_NIF_TERM *parts;
  if (!enif_get_tuple(env, term, &arity, &parts) || arity != 3)
    return fa_reject_term(env, error, argument, "{binary, type, shape}", term);
  if (!fa_get_data(env, parts[0], argument, data, error)) return false;
  shape->size_bytes = (int64_t)data->bytes;
  return fa_get_type_and_dims(env, parts + 1, argument, shape, error);
}

void fa_data_drop(fa_data *data) {
  if (data->memory) fa_memory_drop(data->memory);
  *data = (fa_data){0};
}

bool fa_data_read(void *to, const fa_data *data) {
#ifdef __linux__
  for (size_t done = 0; done < data->bytes;) {
    struct iovec local = {(char *)to + done, data->bytes - done},
                 remote = {(char *)data->data + done, local.iov_len};
    ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    done += (size_t)got;
  }
  return true;
#else
  (void)to;
  return data->bytes == 0;
#endif
}

/* ---- functions of FlashAttention.Native --------------------------------------------------------------------
 */

static ERL_NIF_TERM reject_reference(ErlNifEnv *env, ERL_NIF_TERM term) {
  fa_error error;
  fa_reject_term(env, &error, "memory", "a reference to a device's memory", term);
  return fa_make_error(env, &error);
}

/* memory_info(Reference): {Device, Address, Bytes} */
ERL_NIF_TERM fa_nif_memory_info(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_memory *memory;
  if (!enif_get_resource(env, argv[0], memory_type, (void **)&memory)) return reject_reference(env, argv[0]);
  ERL_NIF_TERM device = enif_make_tuple2(env, fa_atom.device_kinds[memory->device.kind],
                                         enif_make_int(env, memory->device.index));
  return enif_make_tuple3(env, device, enif_make_uint64(env, (uintptr_t)memory->data),
                          enif_make_uint64(env, memory->bytes));
}

/* release(Reference): whether it was held. */
ERL_NIF_TERM fa_nif_release(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_memory *memory;
  if (!enif_get_resource(env, argv[0], memory_type, (void **)&memory)) return reject_reference(env, argv[0]);
  return fa_atom.booleans[release(memory)];
}

static bool download(ErlNifEnv *env, ERL_NIF_TERM term, fa_result *result, fa_error *error) {
  fa_data data = {0};
  *result = (fa_result){0};
  bool done = fa_get_data(env, term, "memory", &data, error);
  if (done && !data.memory)
    done = fa_reject_term(env, error, "memory", "a reference to a device's memory", term);
  if (done && !fa_result_new(data.memory->device, data.bytes, result))
    done = fa_reject(error, FA_STATUS_OUT_OF_MEMORY, "memory", "room for a binary", "none");
  if (done)
    done = fa_device_copy(data.memory->device, result->binary.data, data.data, data.bytes, NULL, error) ==
           FA_STATUS_OK;
  fa_data_drop(&data);
  return done;
}

/* read(Reference): {ok, Binary} */
ERL_NIF_TERM fa_nif_read(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_error error;
  fa_result result;
  if (download(env, argv[0], &result, &error))
    return enif_make_tuple2(env, fa_atom.ok, fa_result_make(env, &result));
  fa_result_drop(&result);
  return fa_make_error(env, &error);
}

/* trim(Device): ok */
ERL_NIF_TERM fa_nif_trim(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_error error;
  if (!fa_get_device(env, argv[0], &device, &error) || fa_memory_trim(device, &error))
    return fa_make_error(env, &error);
  return fa_atom.ok;
}

/* set_pinned_limit(Bytes): ok */
ERL_NIF_TERM fa_nif_set_pinned_limit(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  ErlNifUInt64 bytes;
  fa_error error;
  if (!enif_get_uint64(env, argv[0], &bytes)) {
    fa_reject_term(env, &error, "pinned_limit", "a number of bytes", argv[0]);
    return fa_make_error(env, &error);
  }
  fa_set_pinned_limit(bytes);
  return fa_atom.ok;
}
