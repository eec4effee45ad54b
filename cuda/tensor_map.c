/* Tensor maps: what the bulk copy engine of Hopper (TMA) reads an operand by. */
#include "tensor_map.h"

#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>
#include <stdatomic.h>
#include <string.h>

/* The driver's function, found through the runtime: the library does not link to the driver. */
static PFN_cuTensorMapEncodeTiled_v12000 encoder(void) {
  static _Atomic(void *) found;
  void *function = atomic_load(&found);
  if (!function) {
    enum cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &result) ||
        result != cudaDriverEntryPointSuccess)
      function = NULL;
    cudaGetLastError();
    atomic_store(&found, function);
  }
  return (PFN_cuTensorMapEncodeTiled_v12000)function;
}

static CUtensorMapDataType type_of(fa_dtype dtype) {
  switch (dtype) {
    case FA_DTYPE_BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case FA_DTYPE_F16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

/* What a map is made of. A map says nothing else, so that one may serve again. */
typedef struct {
  const void *data;
  cuuint64_t dims[4], strides[3];
  cuuint32_t box_rows, dtype;
} map_key;

/* The maps that a thread made last, as calls of a program use the same memory again and again: a backward has
 * up to eight, each of which is a call of the driver. A key has the places of a set, which are filled in turn,
 * so that maps of one call seldom displace each other. */
enum { NUM_SETS = 16, SET_PLACES = 4 };
static _Thread_local struct {
  struct {
    map_key key;
    CUtensorMap map;
  } at[SET_PLACES];
  unsigned next;
} kept[NUM_SETS];

static size_t set_of(const map_key *key) {
  uint64_t hash = (uintptr_t)key->data / 16 + key->dims[1] + key->box_rows;
  hash *= UINT64_C(0x9e3779b97f4a7c15);
  return (size_t)(hash >> 32) % NUM_SETS;
}

static bool make(CUtensorMap *map, const map_key *key) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  const cuuint32_t bytes = (cuuint32_t)fa_dtype_bytes((fa_dtype)key->dtype);
  const cuuint32_t box[] = {128 / bytes, key->box_rows, 1, 1}, steps[] = {1, 1, 1, 1};
  return encode &&
         encode(map, type_of((fa_dtype)key->dtype), 4, (void *)key->data, key->dims, key->strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool fa_cuda_tensor_map_init(CUtensorMap *map, const fa_cuda_operand *operand, fa_dtype dtype, int64_t seqlen,
                             int64_t batch, int32_t box_rows) {
  if (!operand->aligned || seqlen == 0 || batch == 0) return false;
  const cuuint64_t bytes = fa_dtype_bytes(dtype);
  map_key key;
  memset(&key, 0, sizeof key); /* keys are compared whole */
  key.data = operand->data;
  key.dims[0] = (cuuint64_t)operand->num_cols, key.dims[1] = (cuuint64_t)seqlen;
  key.dims[2] = (cuuint64_t)operand->num_heads, key.dims[3] = (cuuint64_t)batch;
  key.strides[0] = (cuuint64_t)operand->stride_row * bytes;
  key.strides[1] = (cuuint64_t)operand->stride_head * bytes;
  key.strides[2] = (cuuint64_t)operand->stride_batch * bytes;
  key.box_rows = (cuuint32_t)box_rows, key.dtype = (cuuint32_t)dtype;
  const size_t set = set_of(&key);
  for (int i = 0; i < SET_PLACES; i++)
    if (memcmp(&kept[set].at[i].key, &key, sizeof key) == 0) {
      *map = kept[set].at[i].map;
      return true;
    }
  if (!make(map, &key)) return false;
  const unsigned place = kept[set].next++ % SET_PLACES;
  kept[set].at[place].key = key, kept[set].at[place].map = *map;
  return true;
}
