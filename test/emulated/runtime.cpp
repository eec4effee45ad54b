// The CUDA runtime of an emulated GPU. Everything is done when it is asked for, so that streams are in order
// and events have come.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include "calls.h"
#include "cudaTypedefs.h"
#include "threads.h"

using namespace emulated;

struct CUctx_st {
  int device;
};
struct CUstream_st {
  int device;
};
struct CUevent_st {
  double seconds;
};

namespace {

constexpr size_t PAGE = 4096, TOTAL_BYTES = size_t(8) << 30;
constexpr int MOST_DEVICES = 16;
constexpr uint8_t CANARY = 0xa5;

CUctx_st contexts[MOST_DEVICES];
thread_local CUctx_st *context;  // the device that is current
thread_local cudaError_t last_error;

cudaError_t result(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

int current_device() { return context ? context->device : 0; }

// ---- calls ---------------------------------------------------------------------------------------------

constexpr int MOST_NAMES = 64;
struct {
  const char *name;
  int count;
} calls[MOST_NAMES];
pthread_mutex_t calls_mutex = PTHREAD_MUTEX_INITIALIZER;

// What needs a device wakes the one up that is current: the first, where none was set.
bool is_awake[MOST_DEVICES];
bool needs_device(const char *name) {
  for (const char *other :
       {"cudaGetLastError", "cudaGetDeviceCount", "cudaGetDevice", "cudaGetDeviceProperties",
        "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion", "cuCtxGetCurrent", "cuCtxSetCurrent",
        "cuTensorMapEncodeTiled"})
    if (!strcmp(name, other)) return false;
  return true;
}

void called(const char *name) {
  if (strcmp(name, "cudaSetDevice") && needs_device(name)) is_awake[current_device()] = true;
  pthread_mutex_lock(&calls_mutex);
  int i = 0;
  while (calls[i].name && strcmp(calls[i].name, name)) i++;
  calls[i].name = name, calls[i].count++;
  pthread_mutex_unlock(&calls_mutex);
}

// ---- memory --------------------------------------------------------------------------------------------

// It ends where a page ends that nobody may touch, but for what is missing to a multiple of 256 bytes, where
// canaries are.
struct Allocation {
  uint8_t *memory, *mapping;
  size_t bytes, rounded, mapped;
  int device;
  bool is_pinned;
  Allocation *next;
};
Allocation *allocations;
size_t used_bytes;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

struct Lock {
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
};

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void check_canaries(const Allocation &a) {
  for (size_t i = a.bytes; i < a.rounded; i++)
    if (a.memory[i] != CANARY)
      fail(Site(), "%zu bytes of memory were written behind their end, byte %zu", a.bytes, i);
  for (uint8_t *byte = a.mapping + PAGE; byte < a.memory; byte++)
    if (*byte != CANARY) fail(Site(), "%zu bytes of memory were written before their beginning", a.bytes);
}
void check_all_canaries() {
  Lock lock;
  for (Allocation *a = allocations; a; a = a->next) check_canaries(*a);
}

cudaError_t allocate(void **memory, size_t bytes, bool is_pinned) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  Lock lock;
  if (bytes > TOTAL_BYTES - used_bytes) return result(cudaErrorMemoryAllocation);
  Allocation *a = static_cast<Allocation *>(calloc(1, sizeof *a));
  a->bytes = bytes, a->rounded = round_up(bytes, 256), a->mapped = round_up(a->rounded, PAGE) + 2 * PAGE;
  a->device = current_device(), a->is_pinned = is_pinned;
  a->mapping = static_cast<uint8_t *>(
      mmap(nullptr, a->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (a->mapping == MAP_FAILED || mprotect(a->mapping + PAGE, a->mapped - 2 * PAGE, PROT_READ | PROT_WRITE)) {
    free(a);
    return result(cudaErrorMemoryAllocation);
  }
  a->memory = a->mapping + a->mapped - PAGE - a->rounded;
  memset(a->mapping + PAGE, CANARY, a->mapped - 2 * PAGE);
  memset(a->memory, 0xff, bytes);
  a->next = allocations, allocations = a;
  used_bytes += bytes;
  *memory = a->memory;
  return cudaSuccess;
}

cudaError_t release(void *memory) {
  if (!memory) return cudaSuccess;
  Lock lock;
  for (Allocation **link = &allocations; *link; link = &(*link)->next) {
    Allocation *a = *link;
    if (a->memory != memory) continue;
    check_canaries(*a);
    munmap(a->mapping, a->mapped);
    used_bytes -= a->bytes;
    *link = a->next;
    free(a);
    return cudaSuccess;
  }
  return result(cudaErrorInvalidValue);
}

// ---- kernels -------------------------------------------------------------------------------------------

struct {
  const void *kernel;
  int most_shared;
} attributes[4096];
int num_attributes;

int &most_shared_of(const void *kernel) {
  Lock lock;
  int i = 0;
  while (i < num_attributes && attributes[i].kernel != kernel) i++;
  if (i == num_attributes) attributes[num_attributes++] = {kernel, 48 << 10};
  return attributes[i].most_shared;
}

cudaError_t launch_kernel(const void *kernel, dim3 grid, dim3 block, dim3 cluster, void **arguments,
                          size_t shared_bytes) {
  const size_t num_threads = size_t(block.x) * block.y * block.z;
  if (num_threads == 0 || num_threads > MOST_THREADS || !grid.x || !grid.y || !grid.z || grid.y > 65535 ||
      grid.z > 65535 || shared_bytes > size_t(most_shared_of(kernel)) || grid.x % cluster.x ||
      cluster.x * cluster.y * cluster.z > MOST_CLUSTER || cluster.y != 1 || cluster.z != 1)
    return result(cudaErrorInvalidConfiguration);
  run(kernel, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {cluster.x, cluster.y, cluster.z},
      shared_bytes, arguments);
  check_all_canaries();
  return cudaSuccess;
}

// ---- the driver's functions ----------------------------------------------------------------------------

CUresult get_context(CUcontext *got) {
  called("cuCtxGetCurrent");
  *got = context;
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext wanted) {
  called("cuCtxSetCurrent");
  context = wanted;
  return CUDA_SUCCESS;
}

}  // namespace

namespace emulated {
// Made by what emulates Hopper, where that is linked.
CUresult encode_tensor_map(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
    __attribute__((weak));

int num_calls(const char *name) {
  int count = 0;
  for (const auto &call : calls)
    if (call.name && (!name || !strcmp(call.name, name))) count += call.count;
  return count;
}
void forget_calls() {
  for (auto &call : calls) call.count = 0;
}
bool is_device_awake(int index) { return is_awake[index]; }
void print_calls() {
  for (const auto &call : calls)
    if (call.count) printf("  %3d %s\n", call.count, call.name);
}
}  // namespace emulated

namespace {
CUresult encode_counted(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory,
                        const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                        const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  called("cuTensorMapEncodeTiled");
  return encode_tensor_map(map, type, rank, memory, dims, strides, box, steps, interleave, swizzle, promotion,
                           fill);
}
}  // namespace

// ---- errors and devices --------------------------------------------------------------------------------

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: return "cudaErrorInvalidValue";
  }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() {
  called(__func__);

  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaGetDeviceCount(int *count) {
  called(__func__);

  *count = device().num_devices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  called(__func__);

  if (index < 0 || index >= device().num_devices || index >= MOST_DEVICES)
    return result(cudaErrorInvalidDevice);
  contexts[index].device = index;
  is_awake[index] = true;
  context = &contexts[index];
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *index) {
  called(__func__);

  *index = current_device();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int index) {
  called(__func__);

  if (index < 0 || index >= device().num_devices) return result(cudaErrorInvalidDevice);
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "emulated GPU");
  properties->totalGlobalMem = TOTAL_BYTES;
  properties->major = device().major, properties->minor = device().minor;
  properties->multiProcessorCount = device().num_multiprocessors;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index) {
  called(__func__);

  if (index < 0 || index >= device().num_devices) return result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = device().num_multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = device().major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device().minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(device().shared_bytes); break;
    default: return result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  called(__func__);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  called(__func__);

  *function = nullptr;
  if (!strcmp(name, "cuCtxGetCurrent")) *function = reinterpret_cast<void *>(get_context);
  if (!strcmp(name, "cuCtxSetCurrent")) *function = reinterpret_cast<void *>(set_context);
  if (!strcmp(name, "cuTensorMapEncodeTiled")) *function = reinterpret_cast<void *>(encode_counted);
  *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- memory --------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  called(__func__);
  return allocate(memory, bytes, false);
}
cudaError_t cudaFree(void *memory) {
  called(__func__);
  return release(memory);
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
  called(__func__);
  return allocate(memory, bytes, true);
}
cudaError_t cudaFreeHost(void *memory) {
  called(__func__);
  return release(memory);
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  called(__func__);

  Lock lock;
  *total_bytes = TOTAL_BYTES, *free_bytes = TOTAL_BYTES - used_bytes;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *got, const void *memory) {
  called(__func__);

  const uint8_t *byte = static_cast<const uint8_t *>(memory);
  Lock lock;
  *got = {cudaMemoryTypeUnregistered, -1};
  for (Allocation *a = allocations; a; a = a->next)
    if (byte >= a->memory && byte < a->memory + a->bytes)
      *got = {a->is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice, a->device};
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  called(__func__);

  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  called(__func__);

  for (size_t row = 0; row < height; row++)
    memmove(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch,
            width);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t) {
  called(__func__);

  memset(memory, value, bytes);
  return cudaSuccess;
}

// ---- streams and events --------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  called(__func__);

  *stream = static_cast<cudaStream_t>(calloc(1, sizeof **stream));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  called(__func__);

  free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  called(__func__);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  called(__func__);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  called(__func__);

  *event = static_cast<cudaEvent_t>(calloc(1, sizeof **event));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  called(__func__);

  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  called(__func__);

  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->seconds = double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  called(__func__);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  called(__func__);

  *milliseconds = float((end->seconds - begin->seconds) * 1e3);
  return cudaSuccess;
}

// ---- launches ------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
  called(__func__);

  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > device().shared_bytes) return result(cudaErrorInvalidValue);
  most_shared_of(kernel) = value;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *num_blocks, const void *, int, size_t) {
  called(__func__);

  *num_blocks = device().blocks_a_multiprocessor;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t) {
  called(__func__);

  return launch_kernel(kernel, grid, block, dim3(), arguments, shared_bytes);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  called(__func__);

  dim3 cluster;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      const auto &size = config->attrs[i].val.clusterDim;
      cluster = dim3(size.x, size.y, size.z);
    }
  return launch_kernel(kernel, config->gridDim, config->blockDim, cluster, arguments, config->dynamicSmemBytes);
}
