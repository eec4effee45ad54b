/* The backend table. */
#include "backend.h"

extern const fa_backend fa_cpu_backend;
extern const fa_backend fa_reference_backend;
#ifdef FA_CUDA
extern const fa_backend fa_cuda_backend;
#endif

const fa_backend *fa_backend_of(fa_device_kind kind) {
  switch (kind) {
    case FA_DEVICE_CPU: return &fa_cpu_backend;
    case FA_DEVICE_REFERENCE: return &fa_reference_backend;
#ifdef FA_CUDA
    case FA_DEVICE_CUDA: return &fa_cuda_backend;
#endif
    default: return NULL;
  }
}
