/* What every caller of the CUDA runtime in this folder needs: its errors as ours, and a current device. */
#ifndef FA_CUDA_RUNTIME_H
#define FA_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#include "../c_src/core/backend.h"
#include "../c_src/core/error.h"

/* Memory, streams and events, for the backend's table. */
extern const fa_memory_ops fa_cuda_memory;

/* The backend's merge; and whether its kernels can count what is merged, which plans that end in one ask, too.
 */
fa_status fa_cuda_merge(const fa_merge *merge, bool is_backward, int32_t index, const fa_execution *execution,
                        fa_error *error);
fa_status fa_cuda_check_merge(const fa_merge *merge, fa_error *error);

/* Links by NCCL, and sums. */
extern const fa_link_ops fa_cuda_link;
fa_status fa_cuda_sum(const fa_sum *sum, int32_t index, void *stream, fa_error *error);

static inline fa_status check(cudaError_t result, const char *operation, fa_error *error) {
  if (result == cudaSuccess) return FA_STATUS_OK;
  cudaGetLastError(); /* or the next call would report it again */
  fa_status status = result == cudaErrorMemoryAllocation ? FA_STATUS_OUT_OF_MEMORY : FA_STATUS_DEVICE_ERROR;
  return fa_fail_message(
      error, status, "device",
      FA_TEXT("%s: %s (%s)", operation, cudaGetErrorString(result), cudaGetErrorName(result)));
}

#define CHECK(call)                                   \
  do {                                                \
    fa_status status = check(call, operation, error); \
    if (status) return status;                        \
  } while (0)

/* Makes a device current for the duration of calls into the runtime. Afterwards the thread has the context that
 * it had before, or none. Costs nothing within such a scope of the same device. */
fa_status enter_device(fa_scope *scope, int32_t index, fa_error *error);
void leave_device(const fa_scope *scope);

/* What a device is: asked for once a process. Looking does not wake it up. */
typedef struct fa_cuda_facts {
  int32_t major, minor, shared_bytes, num_multiprocessors; /* shared_bytes: the most that a block may have */
} fa_cuda_facts;

fa_status fa_cuda_facts_of(int32_t index, fa_cuda_facts *facts, fa_error *error);

/* Whether that was noted of a kernel on a device. */
struct fa_cuda_kernel;
bool fa_cuda_is_ready(const struct fa_cuda_kernel *kernel, int32_t index);
void fa_cuda_note_ready(const struct fa_cuda_kernel *kernel, int32_t index);

/* Launches a kernel on the current device; none of its blocks is fine. */
cudaError_t fa_cuda_launch(const void *kernel, dim3 num_blocks, int32_t num_threads, int32_t shared_bytes,
                           void **arguments, cudaStream_t stream);
/* From compute capability 9.0 on: the kernel begins before the one in front of it has ended, and waits for that
 * by itself. */
cudaError_t fa_cuda_launch_early(const void *kernel, dim3 num_blocks, int32_t num_threads, int32_t shared_bytes,
                                 void **arguments, cudaStream_t stream);

/* The number of devices; 0, and the runtime's error, where it finds none. */
int32_t fa_cuda_count_devices(cudaError_t *result);

#endif
