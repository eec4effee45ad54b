/* Caches as terms: a cache and a sequence are references, whose memory and pages go when they are collected. */
#include "cache.h"

#include <stdio.h>
#include <stdlib.h>

#include "nif.h"

typedef struct nif_cache {
  fa_cache *cache;
} nif_cache;

typedef struct nif_sequence {
  fa_cache_sequence *sequence;
} nif_sequence;

static ErlNifResourceType *cache_type, *sequence_type;

/* Destructors may run on any scheduler; giving pages and memory back waits for no copies and no driver. */
static void cache_collected(ErlNifEnv *env, void *cache) {
  (void)env;
  fa_cache_free(((nif_cache *)cache)->cache);
}

static void sequence_collected(ErlNifEnv *env, void *sequence) {
  (void)env;
  fa_cache_free_sequence(((nif_sequence *)sequence)->sequence);
}

bool fa_cache_open_types(ErlNifEnv *env) {
  cache_type = fa_open_type(env, "cache", cache_collected);
  sequence_type = fa_open_type(env, "cache_sequence", sequence_collected);
  return cache_type && sequence_type;
}

static ERL_NIF_TERM make_cache(ErlNifEnv *env, fa_cache *cache) {
  nif_cache *resource = enif_alloc_resource(cache_type, sizeof *resource);
  resource->cache = cache;
  ERL_NIF_TERM term = enif_make_resource(env, resource);
  enif_release_resource(resource);
  return enif_make_tuple2(env, fa_atom.ok, term);
}

static ERL_NIF_TERM make_sequence(ErlNifEnv *env, fa_cache_sequence *sequence) {
  nif_sequence *resource = enif_alloc_resource(sequence_type, sizeof *resource);
  resource->sequence = sequence;
  ERL_NIF_TERM term = enif_make_resource(env, resource);
  enif_release_resource(resource);
  return enif_make_tuple2(env, fa_atom.ok, term);
}

static bool get_cache(ErlNifEnv *env, ERL_NIF_TERM term, fa_cache **cache, fa_error *error) {
  nif_cache *resource;
  if (!enif_get_resource(env, term, cache_type, (void **)&resource))
    return fa_reject_term(env, error, "cache", "a reference to a cache", term);
  *cache = resource->cache;
  return true;
}

static bool get_sequence(ErlNifEnv *env, ERL_NIF_TERM term, fa_cache_sequence **sequence, fa_error *error) {
  nif_sequence *resource;
  if (!enif_get_resource(env, term, sequence_type, (void **)&resource))
    return fa_reject_term(env, error, "sequence", "a reference to a sequence of a cache", term);
  *sequence = resource->sequence;
  return true;
}

/* An array of the list's sequences, which the caller frees. They live as long as the list's terms. */
static bool get_sequences(ErlNifEnv *env, ERL_NIF_TERM list, fa_cache_sequence ***sequences, unsigned *count,
                          fa_error *error) {
  ERL_NIF_TERM head, tail = list;
  *sequences = NULL;
  if (!enif_get_list_length(env, list, count))
    return fa_reject_term(env, error, "sequences", "a list of sequences", list);
  *sequences = malloc((*count + 1) * sizeof **sequences);
  if (!*sequences) return fa_reject(error, FA_STATUS_OUT_OF_MEMORY, "sequences", "room for a list", "none");
  bool done = true;
  for (unsigned i = 0; done && enif_get_list_cell(env, tail, &head, &tail); i++)
    done = get_sequence(env, head, &(*sequences)[i], error);
  return done;
}

/* ---- caches and sequences
 * ------------------------------------------------------------------------------------
 */

static bool get_layout(ErlNifEnv *env, ERL_NIF_TERM type, ERL_NIF_TERM dims, fa_cache_layout *layout,
                       fa_error *error) {
  int arity;
  const ERL_NIF_TERM *parts;
  int64_t *const sizes[] = {&layout->num_pages, &layout->page_size, &layout->num_kv_heads, &layout->head_dim};
  if (!fa_get_type(env, type, "type", &layout->dtype, error)) return false;
  bool read = enif_get_tuple(env, dims, &arity, &parts) && arity == 4;
  for (int i = 0; read && i < 4; i++) {
    ErlNifSInt64 size;
    read = enif_get_int64(env, parts[i], &size);
    *sizes[i] = size;
  }
  return read || fa_reject_term(env, error, "shape", "{num_pages, page_size, num_kv_heads, head_dim}", dims);
}

/* cache_new(Device, Type, {NumPages, PageSize, NumKvHeads, HeadDim}): {ok, Cache} */
ERL_NIF_TERM fa_nif_cache_new(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_cache_layout layout;
  fa_cache *cache = NULL;
  fa_error error;
  const bool done = fa_get_device(env, argv[0], &device, &error) &&
                    get_layout(env, argv[1], argv[2], &layout, &error) &&
                    fa_cache_new(device, &layout, &cache, &error) == FA_STATUS_OK;
  return done ? make_cache(env, cache) : fa_make_error(env, &error);
}

/* cache_free_pages(Cache): how many there are */
ERL_NIF_TERM fa_nif_cache_free_pages(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_cache *cache = NULL;
  fa_error error;
  if (!get_cache(env, argv[0], &cache, &error)) return fa_make_error(env, &error);
  return enif_make_int64(env, fa_cache_num_free_pages(cache));
}

/* cache_add_sequence(Cache): {ok, Sequence} */
ERL_NIF_TERM fa_nif_cache_add_sequence(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_cache *cache = NULL;
  fa_cache_sequence *sequence = NULL;
  fa_error error;
  const bool done = get_cache(env, argv[0], &cache, &error) &&
                    fa_cache_add_sequence(cache, &sequence, &error) == FA_STATUS_OK;
  return done ? make_sequence(env, sequence) : fa_make_error(env, &error);
}

/* cache_fork(Sequence): {ok, Sequence} */
ERL_NIF_TERM fa_nif_cache_fork(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_cache_sequence *sequence = NULL, *fork = NULL;
  fa_error error;
  const bool done =
      get_sequence(env, argv[0], &sequence, &error) && fa_cache_fork(sequence, &fork, &error) == FA_STATUS_OK;
  return done ? make_sequence(env, fork) : fa_make_error(env, &error);
}

/* cache_length(Sequence): its rows, -1 where it was released */
ERL_NIF_TERM fa_nif_cache_length(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_cache_sequence *sequence = NULL;
  fa_error error;
  if (!get_sequence(env, argv[0], &sequence, &error)) return fa_make_error(env, &error);
  return enif_make_int64(env, fa_cache_length(sequence));
}

/* cache_release(Sequence): whether it was held */
ERL_NIF_TERM fa_nif_cache_release(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_cache_sequence *sequence = NULL;
  fa_error error;
  if (!get_sequence(env, argv[0], &sequence, &error)) return fa_make_error(env, &error);
  return fa_atom.booleans[fa_cache_release(sequence)];
}

/* ---- appends ------------------------------------------------------------------------------------------------
 */

/* New rows of all sequences, k's or v's. */
typedef struct nif_rows {
  fa_data data;
  fa_shape shape;
  void *copy; /* in the host's memory, of what the cache's device cannot read where it lies */
} nif_rows;

static bool check_rows(const nif_rows *rows, const char *argument, const fa_cache_layout *layout,
                       unsigned count, fa_error *error) {
  const fa_shape *shape = &rows->shape;
  char expected[96], got[96];
  if (shape->dtype != layout->dtype) {
    snprintf(expected, sizeof expected, "type %s as the cache's", fa_dtype_name(layout->dtype));
    return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, expected, fa_dtype_name(shape->dtype));
  }
  if (shape->rank == 4 && shape->dims[0] == (int64_t)count && shape->dims[2] == layout->num_kv_heads &&
      shape->dims[3] == layout->head_dim && shape->dims[1] >= 0)
    return true;
  snprintf(expected, sizeof expected, "[%u, rows, %lld, %lld], a batch a sequence", count,
           (long long)layout->num_kv_heads, (long long)layout->head_dim);
  size_t used = (size_t)snprintf(got, sizeof got, "[");
  for (int i = 0; i < shape->rank && i < FA_MAX_RANK && used < sizeof got - 32; i++)
    used += (size_t)snprintf(got + used, sizeof got - used, "%s%lld", i ? ", " : "", (long long)shape->dims[i]);
  snprintf(got + used, sizeof got - used, shape->rank > FA_MAX_RANK ? ", ...]" : "]");
  return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, expected, got);
}

/* Whether there are as many bytes as the shape says; no axis is so long that their product would overflow. */
static bool check_bytes(const nif_rows *rows, const char *argument, fa_error *error) {
  int64_t bytes = (int64_t)fa_dtype_bytes(rows->shape.dtype);
  bool fits = true;
  for (int i = 0; fits && i < rows->shape.rank; i++)
    fits = !__builtin_mul_overflow(bytes, rows->shape.dims[i], &bytes);
  if (fits && bytes == (int64_t)rows->data.bytes) return true;
  char expected[64], got[32];
  snprintf(expected, sizeof expected, fits ? "%lld bytes" : "fewer bytes", (long long)bytes);
  snprintf(got, sizeof got, "%zu", rows->data.bytes);
  return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, expected, got);
}

/* Makes data a pointer that the cache's device copies from. */
static bool place_rows(nif_rows *rows, const char *argument, fa_device device, fa_error *error) {
  fa_data *data = &rows->data;
  if (!data->on_device || data->bytes == 0 ||
      fa_memory_locate(device, data->data, data->bytes) != FA_PLACE_HOST)
    return true;
  if (data->memory)
    return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, "a binary, or memory of the cache's device",
                     "another's");
  rows->copy = malloc(data->bytes);
  if (!rows->copy) return fa_reject(error, FA_STATUS_OUT_OF_MEMORY, argument, "room for a copy", "none");
  if (!fa_data_read(rows->copy, data))
    return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, argument, "memory that can be read",
                     "an address of nothing");
  data->data = rows->copy;
  return true;
}

static bool get_rows(ErlNifEnv *env, ERL_NIF_TERM term, const char *argument, const fa_cache *cache,
                     unsigned count, nif_rows *rows, fa_error *error) {
  const fa_cache_layout layout = fa_cache_get_layout(cache);
  return fa_get_tensor(env, term, argument, &rows->data, &rows->shape, error) &&
         check_rows(rows, argument, &layout, count, error) && check_bytes(rows, argument, error) &&
         place_rows(rows, argument, fa_cache_device(cache), error);
}

static bool check_alike(const nif_rows *k, const nif_rows *v, fa_error *error) {
  char expected[64], got[32];
  if (k->shape.dims[1] == v->shape.dims[1]) return true;
  snprintf(expected, sizeof expected, "%lld rows as in k", (long long)k->shape.dims[1]);
  snprintf(got, sizeof got, "%lld", (long long)v->shape.dims[1]);
  return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, "v", expected, got);
}

static bool append(ErlNifEnv *env, const ERL_NIF_TERM argv[], fa_cache_sequence **sequences, unsigned count,
                   nif_rows *k, nif_rows *v, fa_error *error) {
  if (count == 0) return fa_reject(error, FA_STATUS_INVALID_ARGUMENT, "sequences", "at least one", "none");
  const fa_cache *cache = fa_cache_of(sequences[0]);
  return get_rows(env, argv[1], "k", cache, count, k, error) &&
         get_rows(env, argv[2], "v", cache, count, v, error) && check_alike(k, v, error) &&
         fa_cache_append(sequences, count, k->data.data, v->data.data, k->shape.dims[1], error) == FA_STATUS_OK;
}

static void drop_rows(nif_rows *rows) {
  free(rows->copy);
  fa_data_drop(&rows->data);
}

/* cache_append(Sequences, K, V): ok */
ERL_NIF_TERM fa_nif_cache_append(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  unsigned count;
  fa_cache_sequence **sequences;
  nif_rows k = {0}, v = {0};
  fa_error error;
  const bool done = get_sequences(env, argv[0], &sequences, &count, &error) &&
                    append(env, argv, sequences, count, &k, &v, &error);
  free(sequences);
  drop_rows(&k), drop_rows(&v);
  return done ? fa_atom.ok : fa_make_error(env, &error);
}

/* ---- views --------------------------------------------------------------------------------------------------
 */

const fa_tensor_id fa_view_tensors[4] = {FA_TENSOR_K, FA_TENSOR_V, FA_TENSOR_KEY_LENGTHS, FA_TENSOR_PAGE_TABLE};

static fa_data data_of(const void *data, int64_t bytes, bool on_device) {
  return (fa_data){.data = (void *)data, .bytes = (size_t)bytes, .on_device = on_device};
}

static void describe(const fa_cache_view *view, fa_data inputs[FA_NUM_TENSORS],
                     fa_shape shapes[FA_NUM_TENSORS]) {
  const fa_cache_layout l = fa_cache_get_layout(view->cache);
  const bool on_device = fa_has_own_memory(fa_cache_device(view->cache).kind);
  const int64_t bytes =
      l.num_pages * l.page_size * l.num_kv_heads * l.head_dim * (int64_t)fa_dtype_bytes(l.dtype);
  const int64_t lengths_bytes = view->batch * (int64_t)sizeof(int32_t);
  const int64_t table_bytes = view->max_pages * lengths_bytes;
  shapes[FA_TENSOR_K] = shapes[FA_TENSOR_V] =
      (fa_shape){l.dtype, 4, {l.num_pages, l.page_size, l.num_kv_heads, l.head_dim}, bytes};
  shapes[FA_TENSOR_KEY_LENGTHS] = (fa_shape){FA_DTYPE_S32, 1, {view->batch}, lengths_bytes};
  shapes[FA_TENSOR_PAGE_TABLE] = (fa_shape){FA_DTYPE_S32, 2, {view->batch, view->max_pages}, table_bytes};
  inputs[FA_TENSOR_K] = data_of(view->k, bytes, on_device);
  inputs[FA_TENSOR_V] = data_of(view->v, bytes, on_device);
  inputs[FA_TENSOR_KEY_LENGTHS] = data_of(view->key_lengths, lengths_bytes, false);
  inputs[FA_TENSOR_PAGE_TABLE] = data_of(view->page_table, table_bytes, false);
}

bool fa_get_cache_view(ErlNifEnv *env, ERL_NIF_TERM list, fa_cache_view *view, fa_data inputs[FA_NUM_TENSORS],
                       fa_shape shapes[FA_NUM_TENSORS], fa_error *error) {
  unsigned count;
  fa_cache_sequence **sequences;
  const bool done = get_sequences(env, list, &sequences, &count, error) &&
                    fa_cache_view_begin(sequences, count, view, error) == FA_STATUS_OK;
  free(sequences);
  if (done) describe(view, inputs, shapes);
  return done;
}
