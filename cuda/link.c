/* Links between GPUs by NCCL, which is loaded when the first one is made: this library runs without it. And
 * sums of what comes over them. NCCL's own names and numbers are those of its header nccl.h; the functions that
 * are used here have had them since NCCL 2.14. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "../c_src/core/clock.h"
#include "kernels.h"
#include "runtime.h"

/* ---- NCCL --------------------------------------------------------------------------------------------------
 */

enum { SUCCESS = 0, IN_PROGRESS = 7 }; /* ncclResult_t */
enum { INT8 = 0 };                     /* ncclDataType_t */
typedef struct ncclComm ncclComm;
typedef struct unique_id {
  char internal[FA_LINK_ID_BYTES];
} unique_id;

/* The first fields of ncclConfig_t; later ones are at their defaults where size says that they are not there.
 */
typedef struct comm_config {
  size_t size;
  unsigned magic, version;
  int blocking, undefined;
} comm_config;

static struct {
  void *library;
  int (*get_unique_id)(unique_id *id);
  int (*init)(ncclComm **comm, int num_ranks, unique_id id, int rank, comm_config *config);
  int (*get_async_error)(ncclComm *comm, int *state);
  int (*abort)(ncclComm *comm);
  int (*send)(const void *data, size_t count, int type, int rank, ncclComm *comm, cudaStream_t stream);
  int (*receive)(void *data, size_t count, int type, int rank, ncclComm *comm, cudaStream_t stream);
  int (*group_start)(void);
  int (*group_end)(void);
  const char *(*get_error_string)(int result);
} nccl;

static void load_nccl(void) {
  static const char *const names[] = {
      "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclCommAbort",     "ncclSend",
      "ncclRecv",        "ncclGroupStart",         "ncclGroupEnd",          "ncclGetErrorString"};
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!library) return;
  void *functions[9];
  for (int i = 0; i < 9; i++)
    if (!(functions[i] = dlsym(library, names[i]))) return;
  *(void **)&nccl.get_unique_id = functions[0];
  *(void **)&nccl.init = functions[1];
  *(void **)&nccl.get_async_error = functions[2];
  *(void **)&nccl.abort = functions[3];
  *(void **)&nccl.send = functions[4];
  *(void **)&nccl.receive = functions[5];
  *(void **)&nccl.group_start = functions[6];
  *(void **)&nccl.group_end = functions[7];
  *(void **)&nccl.get_error_string = functions[8];
  nccl.library = library;
}

static fa_status find_nccl(fa_error *error) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load_nccl);
  return nccl.library ? FA_STATUS_OK
                      : fa_fail(error, FA_STATUS_UNSUPPORTED, "transport", "libnccl.so.2, of 2.14 or later",
                                "none that can be loaded");
}

static fa_status check_nccl(int result, const char *operation, fa_error *error) {
  if (result == SUCCESS || result == IN_PROGRESS) return FA_STATUS_OK;
  return fa_fail_message(error, FA_STATUS_DEVICE_ERROR, "device",
                         FA_TEXT("%s: %s", operation, nccl.get_error_string(result)));
}

/* ---- links --------------------------------------------------------------------------------------------------
 * Calls of NCCL do not block, so that each can be given up: while one is under way the link is asked for its
 * state, under the mutex, as an abort takes the communicator away. */

struct fa_exchange {
  cudaEvent_t done;
};

typedef struct nccl_link {
  fa_link link;
  int32_t index;
  pthread_mutex_t mutex;
  ncclComm *comm; /* NULL once it is aborted */
  cudaStream_t stream;
} nccl_link;

static fa_status aborted(fa_error *error) {
  return fa_fail_message(error, FA_STATUS_DEVICE_ERROR, "device", "the link between the ranks was ended");
}

/* What the communicator is at: SUCCESS, IN_PROGRESS, or what failed. */
static fa_status ask(nccl_link *link, int *state, const char *operation, fa_error *error) {
  pthread_mutex_lock(&link->mutex);
  fa_status status = link->comm ? FA_STATUS_OK : aborted(error);
  if (!status) status = check_nccl(nccl.get_async_error(link->comm, state), operation, error);
  pthread_mutex_unlock(&link->mutex);
  return status ? status : check_nccl(*state, operation, error);
}

/* Without rest at first: what is under way takes some hundred microseconds unless a rank is late. */
static void rest(int turn) {
  if (turn < 1000)
    sched_yield();
  else
    usleep(turn < 2000 ? 20 : 200);
}

static fa_status settle(nccl_link *link, const char *operation, int64_t timeout_ms, fa_error *error) {
  const int64_t begin = fa_nanoseconds();
  int state = IN_PROGRESS;
  for (int turn = 0;; turn++) {
    fa_status status = ask(link, &state, operation, error);
    if (status || state == SUCCESS) return status;
    if (timeout_ms >= 0 && fa_nanoseconds() - begin > timeout_ms * 1000000)
      return fa_fail_message(
          error, FA_STATUS_DEVICE_ERROR, "device",
          FA_TEXT("%s: not all ranks came within %lld ms", operation, (long long)timeout_ms));
    rest(turn);
  }
}

static fa_status make_id(unsigned char *id, fa_error *error) {
  fa_status status = find_nccl(error);
  return status ? status : check_nccl(nccl.get_unique_id((unique_id *)id), "ncclGetUniqueId", error);
}

static void abort_link(fa_link *base) {
  nccl_link *link = (nccl_link *)base;
  fa_scope scope;
  pthread_mutex_lock(&link->mutex);
  ncclComm *comm = link->comm;
  link->comm = NULL;
  if (comm && !enter_device(&scope, link->index, NULL)) {
    nccl.abort(comm);
    leave_device(&scope);
  }
  pthread_mutex_unlock(&link->mutex);
  if (link->stream) fa_cuda_memory.synchronize(link->index, link->stream, NULL);
}

static void free_link(fa_link *base) {
  nccl_link *link = (nccl_link *)base;
  abort_link(base);
  if (link->stream) fa_cuda_memory.stream_free(link->index, link->stream);
  pthread_mutex_destroy(&link->mutex);
  free(link);
}

static fa_status connect(nccl_link *link, const unsigned char *id, int32_t num_ranks, int32_t rank,
                         int64_t timeout_ms, fa_error *error) {
  comm_config config = {.size = sizeof config, .magic = 0xcafebeef, .version = 21400, .undefined = INT32_MIN};
  fa_scope scope;
  fa_status status = fa_cuda_memory.stream_new(link->index, (void **)&link->stream, error);
  if (!status) status = enter_device(&scope, link->index, error);
  if (status) return status;
  status = check_nccl(nccl.init(&link->comm, num_ranks, *(const unique_id *)id, rank, &config),
                      "ncclCommInitRankConfig", error);
  if (!status) status = settle(link, "ncclCommInitRankConfig", timeout_ms, error);
  leave_device(&scope);
  return status;
}

static fa_status new_link(int32_t index, const unsigned char *id, int32_t num_ranks, int32_t rank,
                          int64_t timeout_ms, fa_link **link, fa_error *error) {
  fa_status status = find_nccl(error);
  if (status) return status;
  nccl_link *new = calloc(1, sizeof *new);
  if (!new) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for a link");
  new->link.ops = &fa_cuda_link;
  new->index = index;
  pthread_mutex_init(&new->mutex, NULL);
  status = connect(new, id, num_ranks, rank, timeout_ms, error);
  if (status)
    free_link(&new->link);
  else
    *link = &new->link;
  return status;
}

/* ---- exchanges ----------------------------------------------------------------------------------------------
 */

static fa_status enqueue(nccl_link *link, const fa_transfer *transfers, int32_t num_transfers,
                         fa_error *error) {
  fa_status status = check_nccl(nccl.group_start(), "ncclGroupStart", error);
  if (status) return status;
  for (const fa_transfer *t = transfers; !status && t < transfers + num_transfers; t++)
    status = t->is_received
                 ? check_nccl(nccl.receive(t->memory, t->bytes, INT8, t->rank, link->comm, link->stream),
                              "ncclRecv", error)
                 : check_nccl(nccl.send(t->memory, t->bytes, INT8, t->rank, link->comm, link->stream),
                              "ncclSend", error);
  const fa_status ended = check_nccl(nccl.group_end(), "ncclGroupEnd", status ? NULL : error);
  return status ? status : ended;
}

static fa_status enqueue_and_record(nccl_link *link, const fa_transfer *transfers, int32_t num_transfers,
                                    fa_exchange *exchange, fa_error *error) {
  pthread_mutex_lock(&link->mutex);
  fa_status status = link->comm ? enqueue(link, transfers, num_transfers, error) : aborted(error);
  pthread_mutex_unlock(&link->mutex);
  if (!status) status = settle(link, "ncclGroupEnd", -1, error);
  return status ? status : fa_cuda_memory.record(link->index, exchange->done, link->stream, error);
}

static void free_exchange(const nccl_link *link, fa_exchange *exchange) {
  if (exchange->done) fa_cuda_memory.event_free(link->index, exchange->done);
  free(exchange);
}

static fa_status begin(fa_link *base, const fa_transfer *transfers, int32_t num_transfers,
                       fa_exchange **exchange, fa_error *error) {
  nccl_link *link = (nccl_link *)base;
  fa_scope scope;
  fa_exchange *new = calloc(1, sizeof *new);
  if (!new) return fa_fail_message(error, FA_STATUS_OUT_OF_MEMORY, "", "no memory for an exchange");
  fa_status status = fa_cuda_memory.event_new(link->index, false, (void **)&new->done, error);
  if (!status) status = enter_device(&scope, link->index, error);
  if (!status) {
    status = enqueue_and_record(link, transfers, num_transfers, new, error);
    leave_device(&scope);
  }
  if (status)
    free_exchange(link, new);
  else
    *exchange = new;
  return status;
}

/* Whether the event has come, asked of the device. */
static fa_status has_come(const nccl_link *link, cudaEvent_t event, bool *come, fa_error *error) {
  fa_scope scope;
  fa_status status = enter_device(&scope, link->index, error);
  if (status) return status;
  const cudaError_t result = cudaEventQuery(event);
  leave_device(&scope);
  *come = result == cudaSuccess;
  if (result != cudaErrorNotReady) return check(result, "cudaEventQuery", error);
  cudaGetLastError();
  return FA_STATUS_OK;
}

static fa_status await(fa_link *base, fa_exchange *exchange, fa_error *error) {
  nccl_link *link = (nccl_link *)base;
  bool come = false;
  fa_status status = FA_STATUS_OK;
  for (int turn = 0; !status && !come; turn++) {
    int state;
    status = has_come(link, exchange->done, &come, error);
    /* An abort makes the event come, too. */
    if (!status && (come || turn % 16 == 0)) status = ask(link, &state, "an exchange", error);
    if (!status && !come) rest(turn);
  }
  free_exchange(link, exchange);
  return status;
}

const fa_link_ops fa_cuda_link = {make_id, new_link, begin, await, abort_link, free_link};

/* ---- sums --------------------------------------------------------------------------------------------------
 */

static bool are_in_vectors(const fa_sum *sum) {
  uintptr_t bits = (uintptr_t)sum->before | (uintptr_t)sum->total;
  for (int32_t p = 0; p < sum->num_parts; p++) bits |= (uintptr_t)sum->parts[p];
  return bits % 16 == 0;
}

fa_status fa_cuda_sum(const fa_sum *sum, int32_t index, void *stream, fa_error *error) {
  enum { THREADS = 256, MOST_BLOCKS = 4096 };
  const void *kernel = fa_cuda_sum_kernel(sum->dtype, are_in_vectors(sum));
  if (!kernel)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "part", "f32, bf16 or f16", fa_dtype_name(sum->dtype));
  fa_sum copy = *sum; /* launches take arguments that are not const */
  const int64_t turns = (sum->count + 8 * THREADS - 1) / (8 * THREADS);
  fa_scope scope;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = check(fa_cuda_launch(kernel, (dim3){(unsigned)(turns < MOST_BLOCKS ? turns : MOST_BLOCKS), 1, 1},
                                THREADS, 0, (void *[]){&copy}, stream),
                 "summing", error);
  leave_device(&scope);
  return status;
}
