/* Which device is current while the CUDA runtime is called. Only contexts change hands: a device that nobody
 * uses gets none. */
#include "runtime.h"

#include <cudaTypedefs.h>
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

fa_status enter_device(device_scope *scope, int32_t index, fa_error *error) {
  scope->previous = current_context();
  fa_status status = check(cudaSetDevice(index), "cudaSetDevice", error);
  if (status) leave_device(scope);
  return status;
}

void leave_device(const device_scope *scope) { set_current_context(scope->previous); }
