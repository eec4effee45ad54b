/* Types of the driver's functions that cuda/ looks up by name. */
#ifndef FA_EMULATED_CUDA_TYPEDEFS_H
#define FA_EMULATED_CUDA_TYPEDEFS_H

#include "cuda.h"

typedef CUresult (*PFN_cuCtxGetCurrent_v4000)(CUcontext *context);
typedef CUresult (*PFN_cuCtxSetCurrent_v4000)(CUcontext context);
typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

#endif
