/* What ranks need of the library beside the passes: memory of a device, sums of tensors, and links. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "nif.h"

/* ---- memory ------------------------------------------------------------------------------------------------
 */

static ERL_NIF_TERM make_memory(ErlNifEnv *env, fa_memory *memory) {
  ERL_NIF_TERM term = fa_memory_make(env, memory);
  enif_release_resource(memory);
  return term;
}

/* allocate(Device, Bytes): {ok, Reference} */
ERL_NIF_TERM fa_nif_allocate(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_error error;
  ErlNifUInt64 bytes;
  if (!fa_get_device(env, argv[0], &device, &error)) return fa_make_error(env, &error);
  if (!enif_get_uint64(env, argv[1], &bytes)) {
    fa_reject_term(env, &error, "bytes", "a number of bytes", argv[1]);
    return fa_make_error(env, &error);
  }
  fa_memory *memory = fa_memory_new(device, bytes, &error);
  return memory ? enif_make_tuple2(env, fa_atom.ok, make_memory(env, memory)) : fa_make_error(env, &error);
}

/* upload(Device, Data): {ok, Reference} */
ERL_NIF_TERM fa_nif_upload(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_error error;
  fa_data data = {0};
  fa_memory *memory = NULL;
  bool done = fa_get_device(env, argv[0], &device, &error) && fa_get_data(env, argv[1], "data", &data, &error);
  if (done && data.on_device && !data.memory)
    done = fa_reject_term(env, &error, "data", "a binary or a device's memory", argv[1]);
  done = done && (memory = fa_memory_new(device, data.bytes, &error)) &&
         fa_device_copy(device, fa_memory_data(memory), data.data, data.bytes, NULL, &error) == FA_STATUS_OK;
  fa_data_drop(&data);
  ERL_NIF_TERM term = memory ? make_memory(env, memory) : fa_atom.error;
  return done ? enif_make_tuple2(env, fa_atom.ok, term) : fa_make_error(env, &error);
}

/* ---- sums --------------------------------------------------------------------------------------------------
 */

/* Rows of a part, of the first batch, and where they are added: rows [first, last) of the sum. */
typedef struct nif_rows {
  const char *data;
  int64_t batch_bytes, first, last;
} nif_rows;

/* The sum of rows of tensors [batch, seqlen, ...]. */
typedef struct nif_sum {
  ErlNifEnv *env;
  fa_error error;
  fa_device device;
  bool has_own_memory;
  fa_shape shape;   /* of the sum */
  size_t row_bytes; /* of a row, in the parts */
  fa_data *parts;   /* their memory, which is held until all is computed */
  nif_rows *rows;   /* of all parts, one after the other */
  int64_t *edges;   /* where rows of the sum begin to be made of others than those before */
  int num_parts, num_rows, num_edges;
  void *unrounded;      /* sums of more parts than are added at once, or NULL */
  fa_memory *on_device; /* the result, on a device with memory of its own, */
  fa_result binary;     /* or in the host's */
} nif_sum;

static int64_t elements_of(const fa_shape *shape, int first_axis) {
  int64_t count = 1;
  for (int i = first_axis; i < shape->rank; i++) count *= shape->dims[i];
  return count;
}

/* Whether its elements can be counted, those of some of its axes, too, where another has none. */
static bool has_size(const fa_shape *shape) {
  double count = 1;
  bool valid = shape->rank >= 2 && shape->rank <= FA_MAX_RANK;
  for (int i = 0; valid && i < shape->rank; i++) {
    valid = shape->dims[i] >= 0;
    count *= shape->dims[i] > 0 ? (double)shape->dims[i] : 1;
  }
  return valid && count < 0x1p48;
}

static bool reject_parts(nif_sum *call, const char *expected, const char *got) {
  return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts", expected, got);
}

/* A tensor that the device can read; all axes but the second are the sum's. */
static bool read_part(nif_sum *call, ERL_NIF_TERM term, fa_data *data, fa_shape *shape) {
  call->num_parts++;
  if (!fa_get_tensor(call->env, term, "parts", data, shape, &call->error)) return false;
  const fa_shape *sum = &call->shape;
  bool is_like = has_size(shape) && shape->rank == sum->rank && shape->dtype == sum->dtype &&
                 shape->dims[0] == sum->dims[0];
  for (int i = 2; is_like && i < shape->rank; i++) is_like = shape->dims[i] == sum->dims[i];
  if (!is_like) return reject_parts(call, "tensors like the sum", "another");
  const size_t element = fa_dtype_bytes(shape->dtype), bytes = (size_t)elements_of(shape, 0) * element;
  if (data->bytes != bytes) return reject_parts(call, "as many bytes as the shape says", "others");
  const bool lies_there =
      call->has_own_memory ? bytes == 0 || fa_memory_locate(call->device, data->data, bytes) == FA_PLACE_DEVICE
                           : !data->on_device && (uintptr_t)data->data % element == 0;
  return lies_there || reject_parts(call, "tensors that lie, aligned, in the device's memory", "one elsewhere");
}

/* {From, To, Count}, in rows. */
static bool read_segment(nif_sum *call, ERL_NIF_TERM term, const fa_data *part, const fa_shape *shape) {
  int arity;
  const ERL_NIF_TERM *terms;
  ErlNifSInt64 numbers[3];
  const int64_t part_rows = shape->dims[1], sum_rows = call->shape.dims[1];
  bool read = enif_get_tuple(call->env, term, &arity, &terms) && arity == 3;
  for (int i = 0; read && i < 3; i++)
    read = enif_get_int64(call->env, terms[i], &numbers[i]) && numbers[i] >= 0;
  if (!read || numbers[0] > part_rows || numbers[2] > part_rows - numbers[0] || numbers[1] > sum_rows ||
      numbers[2] > sum_rows - numbers[1])
    return fa_reject_term(call->env, &call->error, "segments", "{from, to, count} of rows that are there",
                          term);
  if (numbers[2] == 0) return true;
  call->rows[call->num_rows++] =
      (nif_rows){.data = (const char *)part->data + (size_t)numbers[0] * call->row_bytes,
                 .batch_bytes = part_rows * (int64_t)call->row_bytes,
                 .first = numbers[1],
                 .last = numbers[1] + numbers[2]};
  return true;
}

static bool get_part(nif_sum *call, ERL_NIF_TERM term, const ERL_NIF_TERM **terms, unsigned *num_segments) {
  int arity;
  return (enif_get_tuple(call->env, term, &arity, terms) && arity == 2 &&
          enif_get_list_length(call->env, (*terms)[1], num_segments)) ||
         fa_reject_term(call->env, &call->error, "parts", "{tensor, segments}", term);
}

/* Room for as much as the list can have. */
static bool make_room(nif_sum *call, ERL_NIF_TERM list) {
  unsigned num_parts, count, num_segments = 0;
  const ERL_NIF_TERM *terms;
  ERL_NIF_TERM head;
  if (!enif_get_list_length(call->env, list, &num_parts))
    return fa_reject_term(call->env, &call->error, "parts", "a list", list);
  while (enif_get_list_cell(call->env, list, &head, &list)) {
    if (!get_part(call, head, &terms, &count)) return false;
    num_segments += count;
  }
  call->parts = calloc(num_parts + 1, sizeof *call->parts);
  call->rows = calloc(num_segments + 1, sizeof *call->rows);
  call->edges = calloc(2 * (size_t)num_segments + 2, sizeof *call->edges);
  return (call->parts && call->rows && call->edges) ||
         fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, "parts", "room for a list", "none");
}

/* [{Tensor, [Segment]}] */
static bool read_parts(nif_sum *call, ERL_NIF_TERM list) {
  bool read = make_room(call, list);
  const ERL_NIF_TERM *terms;
  unsigned num_segments;
  ERL_NIF_TERM head;
  while (read && enif_get_list_cell(call->env, list, &head, &list)) {
    fa_shape shape;
    fa_data *part = &call->parts[call->num_parts];
    read = get_part(call, head, &terms, &num_segments) && read_part(call, terms[0], part, &shape);
    ERL_NIF_TERM segment, segments = read ? terms[1] : list;
    while (read && enif_get_list_cell(call->env, segments, &segment, &segments))
      read = read_segment(call, segment, part, &shape);
  }
  return read;
}

static int by_number(const void *a, const void *b) {
  const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

static void find_edges(nif_sum *call) {
  int count = 2;
  call->edges[0] = 0, call->edges[1] = call->shape.dims[1];
  for (int i = 0; i < call->num_rows; i++) {
    call->edges[count++] = call->rows[i].first;
    call->edges[count++] = call->rows[i].last;
  }
  qsort(call->edges, (size_t)count, sizeof *call->edges, by_number);
  for (int i = 0; i < count; i++)
    if (i == 0 || call->edges[i] != call->edges[i - 1]) call->edges[call->num_edges++] = call->edges[i];
}

/* Adds what has been collected, so that there is room for more. */
static bool keep_unrounded(nif_sum *call, fa_sum *sum) {
  const size_t bytes = (size_t)elements_of(&call->shape, 1) * sizeof(double);
  if (!call->unrounded && fa_device_alloc(call->device, bytes, &call->unrounded, &call->error)) return false;
  fa_sum some = *sum;
  some.is_unrounded = 1, some.total = call->unrounded;
  sum->before = call->unrounded, sum->num_parts = 0;
  return fa_sum_parts(&some, call->device, NULL, &call->error) == FA_STATUS_OK;
}

/* Rows [first, last) of one batch, which are made of the same parts. */
static bool sum_rows(nif_sum *call, char *result, int64_t batch, int64_t first, int64_t last) {
  fa_sum sum = {.dtype = call->shape.dtype, .count = (last - first) * elements_of(&call->shape, 2)};
  sum.total = result + (size_t)(batch * call->shape.dims[1] + first) * call->row_bytes;
  bool done = true;
  for (const nif_rows *rows = call->rows; done && rows < call->rows + call->num_rows; rows++) {
    if (rows->first >= last || rows->last <= first) continue;
    if (sum.num_parts == FA_MAX_SUMMANDS) done = keep_unrounded(call, &sum);
    sum.parts[sum.num_parts++] =
        rows->data + batch * rows->batch_bytes + (first - rows->first) * (int64_t)call->row_bytes;
  }
  return done && fa_sum_parts(&sum, call->device, NULL, &call->error) == FA_STATUS_OK;
}

static bool sum_all(nif_sum *call) {
  char *result = call->has_own_memory ? fa_memory_data(call->on_device) : (char *)call->binary.binary.data;
  /* Of nothing there may be so many batches that no one could visit them. */
  const int64_t num_batches = elements_of(&call->shape, 0) > 0 ? call->shape.dims[0] : 0;
  bool done = true;
  find_edges(call);
  for (int64_t batch = 0; done && batch < num_batches; batch++)
    for (int i = 1; done && i < call->num_edges; i++)
      done = sum_rows(call, result, batch, call->edges[i - 1], call->edges[i]);
  /* The device must be done with the parts, after an error too. */
  return fa_device_synchronize(call->device, NULL, done ? &call->error : NULL) == FA_STATUS_OK && done;
}

static bool read_sum(nif_sum *call, ERL_NIF_TERM term) {
  if (!fa_get_shape(call->env, term, "sum", &call->shape, &call->error)) return false;
  call->has_own_memory = fa_has_own_memory(call->device.kind);
  if (!has_size(&call->shape))
    return fa_reject_term(call->env, &call->error, "sum", "a type and a shape of 2 to 4 axes", term);
  call->row_bytes = (size_t)elements_of(&call->shape, 2) * fa_dtype_bytes(call->shape.dtype);
  return true;
}

static bool allocate_sum(nif_sum *call) {
  const size_t bytes = (size_t)call->shape.dims[0] * (size_t)call->shape.dims[1] * call->row_bytes;
  if (call->has_own_memory) return (call->on_device = fa_memory_new(call->device, bytes, &call->error)) != NULL;
  return fa_result_new(call->device, bytes, &call->binary) ||
         fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, "sum", "room for a binary", "none");
}

static ERL_NIF_TERM make_sum(nif_sum *call) {
  ERL_NIF_TERM data = call->has_own_memory ? fa_memory_make(call->env, call->on_device)
                                           : fa_result_make(call->env, &call->binary);
  return enif_make_tuple2(call->env, fa_atom.ok, fa_make_tensor(call->env, data, &call->shape));
}

static void drop_sum(nif_sum *call) {
  for (int i = 0; i < call->num_parts; i++) fa_data_drop(&call->parts[i]);
  free(call->parts);
  free(call->rows);
  free(call->edges);
  if (call->unrounded) fa_device_free(call->device, call->unrounded, NULL);
  if (call->on_device) enif_release_resource(call->on_device);
  fa_result_drop(&call->binary);
}

/* sum([{Tensor, [{From, To, Count}]}], {Type, Dims}, Device): {ok, Tensor} */
ERL_NIF_TERM fa_nif_sum(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_sum call = {.env = env};
  const bool done = fa_get_device(env, argv[2], &call.device, &call.error) && read_sum(&call, argv[1]) &&
                    read_parts(&call, argv[0]) && allocate_sum(&call) && sum_all(&call);
  ERL_NIF_TERM result = done ? make_sum(&call) : fa_make_error(env, &call.error);
  drop_sum(&call);
  return result;
}

/* ---- links -------------------------------------------------------------------------------------------------
 * An exchange's memory is held until it has ended. A link is aborted by somebody who holds it, before it is
 * collected: that may wait, and a destructor may not. */

typedef struct nif_link {
  fa_link *link;
} nif_link;

typedef struct nif_exchange {
  nif_link *link;
  _Atomic(fa_exchange *) exchange; /* NULL once somebody awaits it */
  fa_data *memories;
  int num_memories;
} nif_exchange;

static ErlNifResourceType *link_type, *exchange_type;

static void link_collected(ErlNifEnv *env, void *resource) {
  (void)env;
  nif_link *link = resource;
  if (link->link) fa_link_free(link->link);
}

static void drop_memories(nif_exchange *exchange) {
  for (int i = 0; i < exchange->num_memories; i++) fa_data_drop(&exchange->memories[i]);
  free(exchange->memories);
  exchange->memories = NULL;
  exchange->num_memories = 0;
}

/* What was not awaited belongs to a process that is gone: its link ends too, before its memory is given back.
 */
static void exchange_collected(ErlNifEnv *env, void *resource) {
  (void)env;
  nif_exchange *exchange = resource;
  fa_exchange *left = atomic_load(&exchange->exchange);
  if (left) {
    fa_error error;
    fa_link_abort(exchange->link->link);
    fa_link_await(exchange->link->link, left, &error);
  }
  drop_memories(exchange);
  if (exchange->link) enif_release_resource(exchange->link);
}

bool fa_link_open_types(ErlNifEnv *env) {
  link_type = fa_open_type(env, "link", link_collected);
  exchange_type = fa_open_type(env, "exchange", exchange_collected);
  return link_type && exchange_type;
}

static bool get_link(ErlNifEnv *env, ERL_NIF_TERM term, nif_link **link, fa_error *error) {
  return enif_get_resource(env, term, link_type, (void **)link) ||
         fa_reject_term(env, error, "link", "a link", term);
}

/* link_id(Device): {ok, Id} */
ERL_NIF_TERM fa_nif_link_id(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_error error;
  ERL_NIF_TERM id;
  unsigned char *bytes = enif_make_new_binary(env, FA_LINK_ID_BYTES, &id);
  if (!fa_get_device(env, argv[0], &device, &error) || fa_link_make_id(device, bytes, &error))
    return fa_make_error(env, &error);
  return enif_make_tuple2(env, fa_atom.ok, id);
}

/* link_open(Device, Id, NumRanks, Rank, Milliseconds): {ok, Link} */
ERL_NIF_TERM fa_nif_link_open(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  fa_device device;
  fa_error error;
  ErlNifBinary id;
  int num_ranks, rank;
  ErlNifSInt64 timeout_ms;
  fa_link *made;
  if (!fa_get_device(env, argv[0], &device, &error)) return fa_make_error(env, &error);
  if (!enif_inspect_binary(env, argv[1], &id) || id.size != FA_LINK_ID_BYTES ||
      !enif_get_int(env, argv[2], &num_ranks) || !enif_get_int(env, argv[3], &rank) ||
      !enif_get_int64(env, argv[4], &timeout_ms)) {
    fa_reject_term(env, &error, "link", "an id, a number of ranks, a rank and milliseconds", argv[1]);
    return fa_make_error(env, &error);
  }
  if (fa_link_new(device, id.data, num_ranks, rank, timeout_ms, &made, &error))
    return fa_make_error(env, &error);
  nif_link *link = enif_alloc_resource(link_type, sizeof *link);
  link->link = made;
  ERL_NIF_TERM term = enif_make_resource(env, link);
  enif_release_resource(link);
  return enif_make_tuple2(env, fa_atom.ok, term);
}

/* {send | receive, Rank, Memory, Offset, Bytes} */
static bool read_transfer(ErlNifEnv *env, ERL_NIF_TERM term, nif_exchange *exchange, fa_transfer *transfer,
                          fa_error *error) {
  int arity, rank;
  const ERL_NIF_TERM *terms;
  ErlNifUInt64 offset, bytes;
  if (!enif_get_tuple(env, term, &arity, &terms) || arity != 5 || !enif_get_int(env, terms[1], &rank) ||
      !enif_get_uint64(env, terms[3], &offset) || !enif_get_uint64(env, terms[4], &bytes))
    return fa_reject_term(env, error, "transfers", "{direction, rank, memory, offset, bytes}", term);
  fa_data *data = &exchange->memories[exchange->num_memories];
  if (!fa_get_data(env, terms[2], "transfers", data, error)) return false;
  exchange->num_memories++;
  if (!data->memory || offset > data->bytes || bytes > data->bytes - offset)
    return fa_reject_term(env, error, "transfers", "bytes of a device's memory", term);
  *transfer = (fa_transfer){.memory = (char *)data->data + offset,
                            .bytes = bytes,
                            .rank = rank,
                            .is_received = enif_is_identical(terms[0], enif_make_atom(env, "receive"))};
  return true;
}

static bool read_transfers(ErlNifEnv *env, ERL_NIF_TERM list, nif_exchange *exchange, fa_transfer *transfers,
                           fa_error *error) {
  bool read = true;
  ERL_NIF_TERM head;
  for (int i = 0; read && enif_get_list_cell(env, list, &head, &list); i++)
    read = read_transfer(env, head, exchange, &transfers[i], error);
  return read;
}

/* link_begin(Link, [Transfer]): {ok, Exchange} */
ERL_NIF_TERM fa_nif_link_begin(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_link *link;
  fa_error error;
  unsigned count;
  if (!get_link(env, argv[0], &link, &error)) return fa_make_error(env, &error);
  if (!enif_get_list_length(env, argv[1], &count)) {
    fa_reject_term(env, &error, "transfers", "a list", argv[1]);
    return fa_make_error(env, &error);
  }
  nif_exchange *exchange = enif_alloc_resource(exchange_type, sizeof *exchange);
  *exchange = (nif_exchange){.link = link, .memories = calloc(count + 1, sizeof(fa_data))};
  fa_exchange *begun = NULL;
  enif_keep_resource(link);
  fa_transfer *transfers = calloc(count + 1, sizeof *transfers);
  bool done = (exchange->memories && transfers) ||
              fa_reject(&error, FA_STATUS_OUT_OF_MEMORY, "transfers", "room for a list", "none");
  const bool is_read = done && read_transfers(env, argv[1], exchange, transfers, &error);
  done = is_read && fa_link_begin(link->link, transfers, (int32_t)count, &begun, &error) == FA_STATUS_OK;
  atomic_store(&exchange->exchange, begun);
  /* Some of it may be under way, in memory that is given back. */
  if (is_read && !done) fa_link_abort(link->link);
  ERL_NIF_TERM term = enif_make_resource(env, exchange);
  enif_release_resource(exchange);
  free(transfers);
  return done ? enif_make_tuple2(env, fa_atom.ok, term) : fa_make_error(env, &error);
}

/* link_await(Exchange): ok */
ERL_NIF_TERM fa_nif_link_await(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_exchange *exchange;
  fa_error error;
  /* Of several processes one gets it. */
  fa_exchange *awaited = NULL;
  if (enif_get_resource(env, argv[0], exchange_type, (void **)&exchange))
    awaited = atomic_exchange(&exchange->exchange, NULL);
  if (!awaited) {
    fa_reject_term(env, &error, "exchange", "one that was not awaited before", argv[0]);
    return fa_make_error(env, &error);
  }
  const fa_status status = fa_link_await(exchange->link->link, awaited, &error);
  /* After an error what others still write may be anywhere in it. */
  if (status) fa_link_abort(exchange->link->link);
  drop_memories(exchange);
  return status ? fa_make_error(env, &error) : fa_atom.ok;
}

/* link_abort(Link): ok */
ERL_NIF_TERM fa_nif_link_abort(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_link *link;
  fa_error error;
  if (!get_link(env, argv[0], &link, &error)) return fa_make_error(env, &error);
  fa_link_abort(link->link);
  return fa_atom.ok;
}
