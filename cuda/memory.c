/* Memory, streams and events of CUDA devices: the operations that c_src/core's heaps and transfers use. */
#include <sched.h>
#include <time.h>

#include "../c_src/core/clock.h"
#include "../c_src/core/integers.h"
#include "copy.h"
#include "kernels.h"
#include "runtime.h"

#define ON_DEVICE(index, operation, call)                   \
  do {                                                      \
    fa_scope scope;                                         \
    fa_status entered = enter_device(&scope, index, error); \
    if (entered) return entered;                            \
    const cudaError_t result = call;                        \
    leave_device(&scope);                                   \
    return check(result, operation, error);                 \
  } while (0)

/* For what cannot fail in a way that matters. */
#define DROP_ON_DEVICE(index, call)               \
  do {                                            \
    fa_scope scope;                               \
    if (enter_device(&scope, index, NULL)) break; \
    if (call) cudaGetLastError();                 \
    leave_device(&scope);                         \
  } while (0)

static fa_status enter(int32_t index, fa_scope *scope, fa_error *error) {
  return enter_device(scope, index, error);
}

static fa_status available(int32_t index, size_t *free_bytes, size_t *total_bytes, fa_error *error) {
  *free_bytes = *total_bytes = 0;
  ON_DEVICE(index, "cudaMemGetInfo", cudaMemGetInfo(free_bytes, total_bytes));
}

static fa_status allocate(int32_t index, size_t bytes, void **memory, fa_error *error) {
  fa_scope scope;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = check(cudaMalloc(memory, bytes), "cudaMalloc", error);
  leave_device(&scope);
  if (status != FA_STATUS_OUT_OF_MEMORY) return status;
  size_t free_bytes, total_bytes;
  available(index, &free_bytes, &total_bytes, NULL); /* zeros where it does not know either */
  return fa_fail(error, status, "device", FA_TEXT("%zu bytes of the GPU's memory", bytes),
                 FA_TEXT("%zu free of %zu", free_bytes, total_bytes));
}

/* Errors of work that was under way would surface here, too; the call that waits for that work reports them. */
static void release(int32_t index, void *memory) { DROP_ON_DEVICE(index, cudaFree(memory)); }

static fa_status host_allocate(int32_t index, size_t bytes, void **memory, fa_error *error) {
  fa_scope scope;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = check(cudaHostAlloc(memory, bytes, cudaHostAllocPortable), "cudaHostAlloc", error);
  leave_device(&scope);
  if (status != FA_STATUS_OUT_OF_MEMORY) return status;
  return fa_fail(error, status, "device", FA_TEXT("%zu bytes of pinned memory", bytes), "none");
}

static void host_release(int32_t index, void *memory) { DROP_ON_DEVICE(index, cudaFreeHost(memory)); }

static fa_place place_of(int32_t index, const void *memory) {
  struct cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
    cudaGetLastError();
    return FA_PLACE_HOST;
  }
  switch (attributes.type) {
    case cudaMemoryTypeHost:
    case cudaMemoryTypeManaged: return FA_PLACE_PINNED;
    case cudaMemoryTypeDevice: return attributes.device == index ? FA_PLACE_DEVICE : FA_PLACE_OTHER_DEVICE;
    default: return FA_PLACE_HOST;
  }
}

/* Of the first and the last byte: a range that is not all of one kind counts as pageable memory, which every
 * kind can be copied as. */
static fa_place locate(int32_t index, const void *memory, size_t bytes) {
  fa_scope scope;
  if (enter_device(&scope, index, NULL)) return FA_PLACE_HOST;
  const fa_place first = place_of(index, memory);
  const bool is_one =
      bytes < 2 || first == FA_PLACE_HOST || place_of(index, (const char *)memory + bytes - 1) == first;
  leave_device(&scope);
  return is_one ? first : FA_PLACE_HOST;
}

/* Independent of the default stream. */
static fa_status stream_new(int32_t index, void **stream, fa_error *error) {
  ON_DEVICE(index, "cudaStreamCreate",
            cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}

static void stream_free(int32_t index, void *stream) { DROP_ON_DEVICE(index, cudaStreamDestroy(stream)); }

static fa_status event_new(int32_t index, bool timed, void **event, fa_error *error) {
  const unsigned flags = timed ? cudaEventDefault : cudaEventDisableTiming;
  ON_DEVICE(index, "cudaEventCreate", cudaEventCreateWithFlags((cudaEvent_t *)event, flags));
}

static void event_free(int32_t index, void *event) { DROP_ON_DEVICE(index, cudaEventDestroy(event)); }

static fa_status copy(int32_t index, fa_rows to, fa_rows from, size_t row_bytes, size_t num_rows, void *stream,
                      fa_error *error) {
  if (num_rows == 1)
    ON_DEVICE(index, "cudaMemcpyAsync",
              cudaMemcpyAsync(to.data, from.data, row_bytes, cudaMemcpyDefault, stream));
  ON_DEVICE(index, "cudaMemcpy2DAsync",
            cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, row_bytes, num_rows, cudaMemcpyDefault,
                              stream));
}

/* Several blocks take turns at a long copy. */
static fa_status copy_all(int32_t index, const fa_byte_copy *copies, int64_t count, void *stream,
                          fa_error *error) {
  enum { BLOCK_BYTES = FA_CUDA_COPY_THREADS * 16, MOST_BLOCKS = 32 };
  fa_cuda_copies all = {0};
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) all.at[i] = copies[i], most = fa_max(most, (int64_t)copies[i].bytes);
  const dim3 blocks = {(unsigned)fa_min(fa_divide_up(most, BLOCK_BYTES), MOST_BLOCKS), (unsigned)count, 1};
  ON_DEVICE(index, "copying rows",
            fa_cuda_launch(fa_cuda_copy_kernel, blocks, FA_CUDA_COPY_THREADS, 0, (void *[]){&all}, stream));
}

static fa_status record(int32_t index, void *event, void *stream, fa_error *error) {
  ON_DEVICE(index, "cudaEventRecord", cudaEventRecord(event, stream));
}

static fa_status stream_wait(int32_t index, void *stream, void *event, fa_error *error) {
  ON_DEVICE(index, "cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event, 0));
}

/* Polls, at first without rest, then with more and more: cudaEventSynchronize would wake up 0.1 to 0.4 ms late,
 * and events that it can sleep on keep the bus from work. */
static cudaError_t poll(void *event) {
  const int64_t begin = fa_nanoseconds();
  cudaError_t result;
  while ((result = cudaEventQuery(event)) == cudaErrorNotReady) {
    const int64_t waited = (fa_nanoseconds() - begin) / 1000, rest = waited / 128;
    if (waited < 200)
      sched_yield();
    else
      nanosleep(&(struct timespec){.tv_nsec = 1000 * (rest < 20 ? 20 : rest > 1000 ? 1000 : rest)}, NULL);
    cudaGetLastError();
  }
  return result;
}

static fa_status event_wait(int32_t index, void *event, fa_error *error) {
  ON_DEVICE(index, "cudaEventQuery", poll(event));
}

static fa_status elapsed(int32_t index, void *begin, void *end, double *seconds, fa_error *error) {
  fa_scope scope;
  float milliseconds = 0;
  fa_status status = enter_device(&scope, index, error);
  if (status) return status;
  status = check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime", error);
  leave_device(&scope);
  *seconds = milliseconds / 1e3;
  return status;
}

static fa_status synchronize(int32_t index, void *stream, fa_error *error) {
  ON_DEVICE(index, "cudaStreamSynchronize", cudaStreamSynchronize(stream));
}

const fa_memory_ops fa_cuda_memory = {.enter = enter,
                                      .leave = leave_device,
                                      .alloc = allocate,
                                      .free = release,
                                      .available = available,
                                      .host_alloc = host_allocate,
                                      .host_free = host_release,
                                      .locate = locate,
                                      .stream_new = stream_new,
                                      .stream_free = stream_free,
                                      .event_new = event_new,
                                      .event_free = event_free,
                                      .copy = copy,
                                      .copy_all = copy_all,
                                      .record = record,
                                      .stream_wait = stream_wait,
                                      .event_wait = event_wait,
                                      .elapsed = elapsed,
                                      .synchronize = synchronize};
