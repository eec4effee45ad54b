/* What ranks need of the library beside the passes: memory of a device, sums of tensors, and links. */
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

/* The sum of a tensor and of rows of others, [batch, seqlen, ...] each. */
typedef struct nif_sum {
  ErlNifEnv *env;
  fa_error error;
  fa_device device;
  bool has_own_memory;
  fa_shape shape;       /* of the sum */
  int64_t row;          /* elements of a row */
  void *sum;            /* [batch, seqlen, row] f32, or f64 */
  fa_memory *on_device; /* the result, on a device with memory of its own, */
  fa_result binary;     /* or in the host's */
} nif_sum;

static int64_t elements_of(const fa_shape *shape, int first_axis) {
  int64_t count = 1;
  for (int i = first_axis; i < shape->rank; i++) count *= shape->dims[i];
  return count;
}

static size_t sum_bytes_of(fa_dtype dtype) { return dtype == FA_DTYPE_F64 ? sizeof(double) : sizeof(float); }

static bool step(nif_sum *call, fa_sum_step step, int64_t sum_at, void *part, const fa_shape *shape,
                 int64_t part_at, int64_t count) {
  char *sum = (char *)call->sum + (size_t)sum_at * sum_bytes_of(call->shape.dtype);
  char *first = (char *)part + (size_t)part_at * fa_dtype_bytes(shape->dtype);
  return fa_sum(call->device, step, sum, first, shape->dtype, count, NULL, &call->error) == FA_STATUS_OK;
}

/* A tensor that the device can read, with as many axes as are asked for; all but the second are the sum's. */
static bool read_part(nif_sum *call, ERL_NIF_TERM term, fa_data *data, fa_shape *shape) {
  if (!fa_get_tensor(call->env, term, "parts", data, shape, &call->error)) return false;
  const size_t bytes = (size_t)elements_of(shape, 0) * fa_dtype_bytes(shape->dtype);
  if (shape->rank < 2 || shape->rank > FA_MAX_RANK || data->bytes != bytes)
    return fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts", "as many bytes as the shape says",
                     "others");
  const bool lies_there =
      call->has_own_memory ? bytes == 0 || fa_memory_locate(call->device, data->data, bytes) == FA_PLACE_DEVICE
                           : !data->on_device && (uintptr_t)data->data % fa_dtype_bytes(shape->dtype) == 0;
  return lies_there || fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts",
                                 "tensors that lie, aligned, in the device's memory", "one elsewhere");
}

static bool is_like(const fa_shape *part, const fa_shape *sum) {
  bool same = part->rank == sum->rank && part->dtype == sum->dtype && part->dims[0] == sum->dims[0];
  for (int i = 2; same && i < part->rank; i++) same = part->dims[i] == sum->dims[i];
  return same;
}

static bool allocate_sum(nif_sum *call) {
  const size_t count = (size_t)elements_of(&call->shape, 0);
  if (fa_device_alloc(call->device, count * sum_bytes_of(call->shape.dtype), &call->sum, &call->error))
    return false;
  if (call->has_own_memory)
    return (call->on_device =
                fa_memory_new(call->device, count * fa_dtype_bytes(call->shape.dtype), &call->error)) != NULL;
  return fa_result_new(call->device, count * fa_dtype_bytes(call->shape.dtype), &call->binary) ||
         fa_reject(&call->error, FA_STATUS_OUT_OF_MEMORY, "parts", "room for a binary", "none");
}

static bool begin_sum(nif_sum *call, ERL_NIF_TERM term) {
  fa_data data = {0};
  bool done = read_part(call, term, &data, &call->shape) && allocate_sum(call);
  call->row = elements_of(&call->shape, 2);
  done = done && step(call, FA_SUM_BEGIN, 0, data.data, &call->shape, 0, elements_of(&call->shape, 0));
  if (done && call->has_own_memory)
    done = fa_device_synchronize(call->device, NULL, &call->error) == FA_STATUS_OK;
  fa_data_drop(&data);
  return done;
}

/* {From, To, Count}, in rows. */
static bool read_segment(nif_sum *call, ERL_NIF_TERM term, const fa_shape *part, ErlNifSInt64 numbers[3]) {
  int arity;
  const ERL_NIF_TERM *terms;
  bool read = enif_get_tuple(call->env, term, &arity, &terms) && arity == 3;
  for (int i = 0; read && i < 3; i++)
    read = enif_get_int64(call->env, terms[i], &numbers[i]) && numbers[i] >= 0;
  read = read && numbers[0] <= part->dims[1] && numbers[2] <= part->dims[1] - numbers[0] &&
         numbers[1] <= call->shape.dims[1] && numbers[2] <= call->shape.dims[1] - numbers[1];
  return read ||
         fa_reject_term(call->env, &call->error, "segments", "{from, to, count} of rows that are there", term);
}

static bool add_segment(nif_sum *call, const ErlNifSInt64 numbers[3], void *part, const fa_shape *shape) {
  bool done = true;
  for (int64_t batch = 0; done && batch < shape->dims[0]; batch++)
    done = step(call, FA_SUM_ADD, (batch * call->shape.dims[1] + numbers[1]) * call->row, part, shape,
                (batch * shape->dims[1] + numbers[0]) * call->row, numbers[2] * call->row);
  return done;
}

/* {Tensor, [Segment]} */
static bool add_part(nif_sum *call, ERL_NIF_TERM term) {
  int arity;
  const ERL_NIF_TERM *terms;
  fa_data data = {0};
  fa_shape shape;
  if (!enif_get_tuple(call->env, term, &arity, &terms) || arity != 2)
    return fa_reject_term(call->env, &call->error, "parts", "{tensor, segments}", term);
  bool done = read_part(call, terms[0], &data, &shape);
  if (done && !is_like(&shape, &call->shape))
    done = fa_reject(&call->error, FA_STATUS_INVALID_ARGUMENT, "parts", "tensors like the first", "another");
  ERL_NIF_TERM head, tail = terms[1];
  ErlNifSInt64 numbers[3];
  while (done && enif_get_list_cell(call->env, tail, &head, &tail))
    done = read_segment(call, head, &shape, numbers) && add_segment(call, numbers, data.data, &shape);
  /* The part may be given back once it has been read. */
  if (call->has_own_memory && fa_device_synchronize(call->device, NULL, done ? &call->error : NULL))
    done = false;
  fa_data_drop(&data);
  return done;
}

static bool round_sum(nif_sum *call) {
  void *result = call->has_own_memory ? fa_memory_data(call->on_device) : call->binary.binary.data;
  return step(call, FA_SUM_ROUND, 0, result, &call->shape, 0, elements_of(&call->shape, 0)) &&
         fa_device_synchronize(call->device, NULL, &call->error) == FA_STATUS_OK;
}

static ERL_NIF_TERM make_sum(nif_sum *call) {
  ERL_NIF_TERM data = call->has_own_memory ? fa_memory_make(call->env, call->on_device)
                                           : fa_result_make(call->env, &call->binary);
  return enif_make_tuple2(call->env, fa_atom.ok, fa_make_tensor(call->env, data, &call->shape));
}

/* sum(Tensor, [{Tensor, [{From, To, Count}]}], Device): {ok, Tensor} */
ERL_NIF_TERM fa_nif_sum(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
  (void)argc;
  nif_sum call = {.env = env};
  bool done = fa_get_device(env, argv[2], &call.device, &call.error);
  call.has_own_memory = done && fa_has_own_memory(call.device.kind);
  done = done && begin_sum(&call, argv[0]);
  ERL_NIF_TERM head, tail = argv[1];
  while (done && enif_get_list_cell(env, tail, &head, &tail)) done = add_part(&call, head);
  done = done && round_sum(&call);
  ERL_NIF_TERM result = done ? make_sum(&call) : fa_make_error(env, &call.error);
  if (call.sum) fa_device_free(call.device, call.sum, NULL);
  if (call.on_device) enif_release_resource(call.on_device);
  fa_result_drop(&call.binary);
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
  fa_exchange *exchange; /* NULL once it was awaited */
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
  if (exchange->exchange) {
    fa_error error;
    fa_link_abort(exchange->link->link);
    fa_link_await(exchange->link->link, exchange->exchange, &error);
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
  enif_keep_resource(link);
  fa_transfer *transfers = calloc(count + 1, sizeof *transfers);
  bool done = (exchange->memories && transfers) ||
              fa_reject(&error, FA_STATUS_OUT_OF_MEMORY, "transfers", "room for a list", "none");
  done = done && read_transfers(env, argv[1], exchange, transfers, &error) &&
         fa_link_begin(link->link, transfers, (int32_t)count, &exchange->exchange, &error) == FA_STATUS_OK;
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
  if (!enif_get_resource(env, argv[0], exchange_type, (void **)&exchange) || !exchange->exchange) {
    fa_reject_term(env, &error, "exchange", "one that was not awaited before", argv[0]);
    return fa_make_error(env, &error);
  }
  fa_exchange *awaited = exchange->exchange;
  exchange->exchange = NULL;
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
