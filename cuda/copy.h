/* Many small copies as one launch. */
#ifndef FA_CUDA_COPY_H
#define FA_CUDA_COPY_H

#include "../c_src/core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel's argument. */
typedef struct fa_cuda_copies {
  fa_byte_copy at[FA_MOST_COPIES];
} fa_cuda_copies;

/* Takes fa_cuda_copies; a block's y is a copy, of which each thread takes 16 bytes at a time. */
enum { FA_CUDA_COPY_THREADS = 256 };
extern const void *const fa_cuda_copy_kernel;

#ifdef __cplusplus
}
#endif

#endif
