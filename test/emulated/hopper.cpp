// What the emulation of Hopper adds to the machine: every block's extension, copies when a block stands idle,
// and the driver's function that makes tensor maps.
#include <cuda.h>
#include <cstring>

#include "hopper_block.h"

namespace emulated {

uint32_t draw() {
  static long of_launch = -1;
  static uint64_t state;
  if (of_launch != launch.number) {
    of_launch = launch.number;
    state = device().seed * UINT64_C(0x9e3779b97f4a7c15) +
            uint64_t(launch.number) * UINT64_C(0xd1342543de82ef95) + 1;
  }
  state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
  return uint32_t(state >> 33);
}

namespace {

HopperBlock &extension_of(const Block &block) { return *static_cast<HopperBlock *>(block.extension); }

void begin(Block &block) { block.extension = new HopperBlock(uint32_t(block.num_threads)); }

// As if by one of its threads: copies are made in the running thread's block.
template <class Do>
void as_thread_of(Block &block, Do act) {
  Thread *const before = current;
  current = block.threads;
  act();
  current = before;
}

bool make_a_copy(Block &block) {
  Loads &loads = extension_of(block).loads;
  if (loads.waiting.empty()) return false;
  as_thread_of(block, [&] { loads.advance(); });
  return true;
}

void end(Block &block) {
  as_thread_of(block, [&] { extension_of(block).finish(); });
  delete &extension_of(block);
}

const bool is_set_up = [] {
  when_block_begins = begin, when_block_ended = end, when_idle = make_a_copy;
  return true;
}();

}  // namespace

// What the driver's cuTensorMapEncodeTiled does, which refuses what the device could not copy.
CUresult encode_tensor_map(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *data,
                           const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap map = {};
  map.seal = TensorMap::SEAL;
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: map.element_bytes = 1; break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: map.element_bytes = 2; break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: map.element_bytes = 4; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  static constexpr uint8_t SPANS[] = {16, 32, 64, 128};
  if (swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_INVALID_VALUE;
  map.span = SPANS[swizzle];
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return CUDA_ERROR_INVALID_VALUE;
  if (rank < 1 || rank > 5 || !data || reinterpret_cast<uintptr_t>(data) % 16 ||
      reinterpret_cast<uintptr_t>(to) % 64)
    return CUDA_ERROR_INVALID_VALUE;
  map.rank = uint8_t(rank), map.data = static_cast<uint8_t *>(data);
  for (cuuint32_t axis = 0; axis < rank; axis++) {
    if (dims[axis] < 1 || dims[axis] > UINT64_C(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[axis] < 1 || box[axis] > 256 || steps[axis] < 1 || steps[axis] > 8) return CUDA_ERROR_INVALID_VALUE;
    if (axis > 0 && (strides[axis - 1] % 16 || strides[axis - 1] >= UINT64_C(1) << 40))
      return CUDA_ERROR_INVALID_VALUE;
    map.dims[axis] = dims[axis], map.box[axis] = uint16_t(box[axis]), map.steps[axis] = uint8_t(steps[axis]);
    if (axis > 0) map.strides[axis - 1] = strides[axis - 1];
  }
  if (map.row_bytes() % 16 || (map.span > 16 && map.row_bytes() > map.span)) return CUDA_ERROR_INVALID_VALUE;
  *to = CUtensorMap();
  memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace emulated
