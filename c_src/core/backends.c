/* The backend table, and what of the backends is switched off. */
#include "backend.h"

#include <stdlib.h>
#include <string.h>

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

bool fa_is_disabled(const char *feature) {
  const char *list = getenv("FLASH_ATTENTION_DISABLE");
  const size_t length = strlen(feature);
  while (list && *list) {
    const size_t item = strcspn(list, ",");
    if (item == length && strncmp(list, feature, length) == 0) return true;
    list += item + (list[item] == ',');
  }
  return false;
}
