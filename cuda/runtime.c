/* Which device is current while the CUDA runtime is called, and what does not change about devices. Only
 * contexts change hands: a device that nobody uses gets none. */
#include "runtime.h"

#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

/* The driver's function, found through the runtime: the library does not link to the driver. */
static void *driver_function(const char *name, _Atomic(void *) *found) {
  void *function = atomic_load(found);
  if (function) return function;
  enum cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &function, 4000, cudaEnableDefault, &result) ||
      result != cudaDriverEntryPointSuccess)
    function = NULL;
  cudaGetLastError();
  atomic_store(found, function);
  return function;
}

static CUcontext current_context(void) {
  static _Atomic(void *) found;
  const PFN_cuCtxGetCurrent_v4000 get = (PFN_cuCtxGetCurrent_v4000)driver_function("cuCtxGetCurrent", &found);
  CUcontext context = NULL;
  return get && get(&context) == CUDA_SUCCESS ? context : NULL;
}

/* cudaSetDevice would do both, and wake a device up that was current only by default. */
static void set_current_context(CUcontext context) {
  static _Atomic(void *) found;
  const PFN_cuCtxSetCurrent_v4000 set = (PFN_cuCtxSetCurrent_v4000)driver_function("cuCtxSetCurrent", &found);
  if (set) set(context);
}

enum { MOST_KNOWN = FA_MAX_DEVICES };

static bool is_known(int32_t index) { return index >= 0 && index < MOST_KNOWN; }

/* The context that the runtime makes current for a device, once it did; and the device in whose scope a thread
 * is, one more than its index. */
static _Atomic(void *) contexts[MOST_KNOWN];
static _Thread_local int32_t entered;

fa_status enter_device(fa_scope *scope, int32_t index, fa_error *error) {
  *scope = (fa_scope){.outer = entered, .is_inner = entered == index + 1};
  if (scope->is_inner) return FA_STATUS_OK;
  scope->before = current_context();
  if (!scope->before || !is_known(index) || scope->before != atomic_load(&contexts[index])) {
    scope->restores = true;
    fa_status status = check(cudaSetDevice(index), "cudaSetDevice", error);
    if (status) {
      set_current_context(scope->before);
      return status;
    }
    if (is_known(index) && !atomic_load(&contexts[index])) atomic_store(&contexts[index], current_context());
  }
  entered = index + 1;
  return FA_STATUS_OK;
}

void leave_device(const fa_scope *scope) {
  if (scope->is_inner) return;
  entered = scope->outer;
  if (scope->restores) set_current_context(scope->before);
}

/* ---- what does not change ---------------------------------------------------------------------------- */

/* Four numbers that are written before the last of them is: 0 multiprocessors, nobody asked yet. */
static struct { atomic_int major, minor, shared_bytes, num_multiprocessors; } known[MOST_KNOWN];
static atomic_int num_devices;

static fa_status find_facts(int32_t index, fa_cuda_facts *facts, fa_error *error) {
  const char *operation = "cudaDeviceGetAttribute";
  const struct {
    int32_t *value;
    enum cudaDeviceAttr attribute;
  } wanted[] = {{&facts->major, cudaDevAttrComputeCapabilityMajor},
                {&facts->minor, cudaDevAttrComputeCapabilityMinor},
                {&facts->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                {&facts->num_multiprocessors, cudaDevAttrMultiProcessorCount}};
  for (int i = 0; i < 4; i++) CHECK(cudaDeviceGetAttribute(wanted[i].value, wanted[i].attribute, index));
  return FA_STATUS_OK;
}

/* Threads that ask at the same time write the same. */
fa_status fa_cuda_facts_of(int32_t index, fa_cuda_facts *facts, fa_error *error) {
  const int32_t count = is_known(index) ? atomic_load(&known[index].num_multiprocessors) : 0;
  if (count) {
    *facts = (fa_cuda_facts){known[index].major, known[index].minor, known[index].shared_bytes, count};
    return FA_STATUS_OK;
  }
  fa_status status = find_facts(index, facts, error);
  if (status || !is_known(index)) return status;
  known[index].major = facts->major;
  known[index].minor = facts->minor;
  known[index].shared_bytes = facts->shared_bytes;
  atomic_store(&known[index].num_multiprocessors, facts->num_multiprocessors);
  return FA_STATUS_OK;
}

/* Kernels, each at the first free place from its own on, and a bit for each device on which it is ready. A
 * table that is full knows of no more kernels, which are made ready again then. */
enum { NUM_PLACES = 512 };
static struct {
  _Atomic(const void *) kernel;
  _Atomic uint64_t devices;
} ready[NUM_PLACES];

static int place_of(const void *kernel) {
  const uint64_t first = (uint64_t)(uintptr_t)kernel * UINT64_C(0x9e3779b97f4a7c15) >> 55;
  for (int i = 0; i < NUM_PLACES; i++) {
    const int place = (int)((first + (uint64_t)i) % NUM_PLACES);
    const void *there = NULL;
    if (atomic_compare_exchange_strong(&ready[place].kernel, &there, kernel) || there == kernel) return place;
  }
  return -1;
}

bool fa_cuda_is_ready(const struct fa_cuda_kernel *kernel, int32_t index) {
  const int place = is_known(index) ? place_of(kernel) : -1;
  return place >= 0 && atomic_load(&ready[place].devices) >> index & 1;
}

void fa_cuda_note_ready(const struct fa_cuda_kernel *kernel, int32_t index) {
  const int place = is_known(index) ? place_of(kernel) : -1;
  if (place >= 0) atomic_fetch_or(&ready[place].devices, UINT64_C(1) << index);
}

int32_t fa_cuda_count_devices(cudaError_t *result) {
  int count = atomic_load(&num_devices);
  *result = count ? cudaSuccess : cudaGetDeviceCount(&count);
  if (*result) cudaGetLastError();
  if (*result || count < 0) count = 0;
  atomic_store(&num_devices, count);
  return count;
}

/* A child has none of its parent's contexts, and cannot use devices that its parent did: the runtime is to say
 * so.
 */
static void forget_devices(void) {
  entered = 0;
  atomic_store(&num_devices, 0);
  for (int i = 0; i < NUM_PLACES; i++) atomic_store(&ready[i].devices, 0);
  for (int i = 0; i < MOST_KNOWN; i++) {
    atomic_store(&contexts[i], NULL);
    atomic_store(&known[i].num_multiprocessors, 0);
  }
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_devices); }

/* ---- launches -------------------------------------------------------------------------------------------- */

cudaError_t fa_cuda_launch(const void *kernel, dim3 num_blocks, int32_t num_threads, int32_t shared_bytes,
                           void **arguments, cudaStream_t stream) {
  if (num_blocks.x == 0 || num_blocks.y == 0) return cudaSuccess;
  return cudaLaunchKernel(kernel, num_blocks, (dim3){(unsigned)num_threads, 1, 1}, arguments,
                          (size_t)shared_bytes, stream);
}

cudaError_t fa_cuda_launch_early(const void *kernel, dim3 num_blocks, int32_t num_threads, int32_t shared_bytes,
                                 void **arguments, cudaStream_t stream) {
  cudaLaunchAttribute early = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                               .val.programmaticStreamSerializationAllowed = 1};
  const cudaLaunchConfig_t config = {.gridDim = num_blocks,
                                     .blockDim = {(unsigned)num_threads, 1, 1},
                                     .dynamicSmemBytes = (size_t)shared_bytes,
                                     .stream = stream,
                                     .attrs = &early,
                                     .numAttrs = 1};
  if (num_blocks.x == 0 || num_blocks.y == 0) return cudaSuccess;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
