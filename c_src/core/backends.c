/* The backends, which no other file names, and what of them is switched off. */
#include "backend.h"

#include <stdlib.h>
#include <string.h>

extern const fa_backend fa_cpu_backend;
extern const fa_backend fa_reference_backend;
#ifdef FA_CUDA
extern const fa_backend fa_cuda_backend;
#define CUDA_BACKEND &fa_cuda_backend
#else
#define CUDA_BACKEND NULL
#endif

static const struct {
  const char *name;
  const fa_backend *backend; /* NULL where it was not built */
} kinds[FA_NUM_DEVICE_KINDS] = {
    [FA_DEVICE_CPU] = {"cpu", &fa_cpu_backend},
    [FA_DEVICE_CUDA] = {"cuda", CUDA_BACKEND},
    [FA_DEVICE_REFERENCE] = {"reference", &fa_reference_backend},
};

static bool is_kind(fa_device_kind kind) { return (unsigned)kind < FA_NUM_DEVICE_KINDS; }

const char *fa_device_kind_name(fa_device_kind kind) { return is_kind(kind) ? kinds[kind].name : "unknown"; }

const fa_backend *fa_backend_of(fa_device_kind kind) { return is_kind(kind) ? kinds[kind].backend : NULL; }

bool fa_has_own_memory(fa_device_kind kind) {
  const fa_backend *backend = fa_backend_of(kind);
  return backend && backend->memory;
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
