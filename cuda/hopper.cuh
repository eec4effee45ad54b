// Tiles as Hopper's own instructions (sm_90a) take them: barriers in shared memory, bulk copies by tensor map
// (TMA), and products of a warpgroup (wgmma). Nothing here knows of attention.
#pragma once

#include <type_traits>

#include "hopper_ptx.cuh"
#include "tile.cuh"

namespace fa {
namespace hopper {

// ---- synchronisation -------------------------------------------------------------------------------

// A warp calls this, and one of its threads arrives. To compute-sanitizer's racecheck a wait is one for the
// threads that arrived and for no others of their warp: for it all of them do (FA_RACECHECK).
#ifdef FA_RACECHECK
constexpr int ARRIVALS_OF_WARP = 32;
#else
constexpr int ARRIVALS_OF_WARP = 1;
#endif
__device__ inline void barrier_arrive_warp(uint32_t barrier) {
  if (threadIdx.x % 32 < ARRIVALS_OF_WARP) barrier_arrive(barrier);
}

// Gives a number that is the same in all threads of a warp, or in the lanes that are here, 0 among them, in a
// form that the compiler knows to be the same, so that it may lie in uniform registers.
__device__ inline uint32_t uniform(uint32_t x, uint32_t lanes = ~0u) { return __shfl_sync(lanes, x, 0); }

// This is a position in a ring of STAGES buffers, and the phase of the barrier that says it is full. Who fills
// it waits for it to be empty with the opposite phase, because at first it is empty.
template <int STAGES>
struct Ring {
  uint32_t stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// ---- tiles -----------------------------------------------------------------------------------------

// A tile [ROWS, COLS] of 16-bit elements lies as a tensor map's box writes it and wgmma reads it: sub-tiles of
// 64 columns follow one another, have rows of 128 bytes and begin at multiples of 1,024; chunks of 16 bytes are
// swizzled by row % 8.
template <int ROWS_, int COLS_>
struct BoxTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, BOXES = COLS / 64;
  static constexpr int BOX_BYTES = ROWS * 128, BYTES = BOXES * BOX_BYTES;
  static_assert(COLS % 64 == 0 && ROWS % 8 == 0, "boxes are 64 columns wide and swizzled by 8 rows");

  // Says where 8 columns of a row lie.
  __device__ static uint32_t offset(int row, int chunk) {
    return chunk / 8 * BOX_BYTES + row * 128 + ((chunk ^ row) % 8 << 4);
  }
};

// Starts the copy of a tile from (column 0, row, head, batch) of the map, whose boxes have T::ROWS rows of
// BOX_COLS numbers: 128 bytes; what lies outside of the tensor becomes 0. T::BYTES arrive at the barrier.
template <class T, int BOX_COLS = 64>
__device__ inline void load_boxes(uint32_t tile, const CUtensorMap &map, uint32_t barrier, int row, int head,
                                  int batch) {
#pragma unroll
  for (int box = 0; box < T::BOXES; box++)
    load_box(tile + box * T::BOX_BYTES, map, barrier, box * BOX_COLS, row, head, batch);
}

// Brings the same numbers to the cache alone.
template <class T, int BOX_COLS = 64>
__device__ inline void prefetch_boxes(const CUtensorMap &map, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < T::BOXES; box++) prefetch_box(map, box * BOX_COLS, row, head, batch);
}

// A box of 0, as maps of results have them: what is stored where nobody sees anything. All threads of a block,
// at least a chunk's each, make it.
constexpr int ZERO_BOX_ROWS = 16, ZERO_BOX_BYTES = ZERO_BOX_ROWS * 128;
__device__ inline void init_zero_box(uint32_t box) {
  if (threadIdx.x * 16 < ZERO_BOX_BYTES) store_shared(box + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
  fence_async();
}

// Starts the copy of 16 rows of a tile, from `tile_row` on, to (column, row, head, batch) of the map, whose
// boxes have 16 rows; what lies outside of the tensor is left out. One thread does this, in its bulk group.
template <class T>
__device__ inline void store_boxes(const CUtensorMap &map, uint32_t tile, int tile_row, int row, int head,
                                   int batch, int column = 0) {
#pragma unroll
  for (int box = 0; box < T::BOXES; box++)
    store_box(map, tile + box * T::BOX_BYTES + tile_row * 128, column + box * 64, row, head, batch);
}

// Writes a warp's accumulator [16, NT * 8], times scale of each half, as elements to rows of a tile.
template <class Element, class T, int NT>
__device__ inline void put_rows(uint32_t tile, int tile_row, const float (&acc)[NT][4], const float (&scale)[2],
                                int chunk = 0) {
  const int lane = threadIdx.x % 32, row = tile_row + lane % 16;
#pragma unroll
  for (int n = 0; n < NT; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = pack(Element(), acc[n + i / 2][i % 2 * 2] * scale[i % 2],
                      acc[n + i / 2][i % 2 * 2 + 1] * scale[i % 2]);
    store_matrices<false>(tile + T::offset(row, chunk + n + lane / 16), words);
  }
}

// ---- products of a warpgroup -----------------------------------------------------------------------

// An operand of a product lies in a BoxTile. Its axes are `own` (rows of a left operand, columns of a right
// one) and k, along which the product sums. The tile is [own, k] (K_IN_ROW) or [k, own].
template <class T, bool K_IN_ROW_>
struct BoxOperand {
  static constexpr bool K_IN_ROW = K_IN_ROW_;
  // A descriptor counts in units of 16 bytes. Its low word holds the start and, at bit 16, the distance from
  // one 64 columns to the next; its high word the distance from one 8 rows to the next, and the 128-byte
  // swizzle.
  static constexpr uint32_t NEXT_BOX = K_IN_ROW ? 1 : T::BOX_BYTES / 16, HIGH = 1024 / 16 | 1u << 30;
  uint32_t low;

  // own_begin is a multiple of 8.
  __device__ BoxOperand(uint32_t tile, int own_begin = 0)
      : low((tile + (K_IN_ROW ? own_begin * 128 : own_begin / 64 * T::BOX_BYTES + own_begin % 64 * 2)) >> 4 |
            NEXT_BOX << 16) {}

  // Describes 16 elements of k; the parts of a split tensor are tiles that follow one another.
  __device__ uint64_t descriptor(int part, int k) const {
    const uint32_t offset = part * T::BYTES + (K_IN_ROW ? k / 4 * T::BOX_BYTES + k % 4 * 32 : k * 16 * 128);
    return uint64_t(HIGH) << 32 | (low + offset / 16);
  }
};

// An operand of a single step of k, whose halves lie apart: of each, 8 elements of a row are 16 bytes, and rows
// follow one another.
struct HalvesOperand {
  static constexpr uint32_t ROW_BYTES = 16, HIGH = 8 * ROW_BYTES / 16;
  uint32_t low;

  // second: where the half of k from 8 on begins, not before the first.
  __device__ HalvesOperand(uint32_t first, uint32_t second) : low(first >> 4 | (second - first) >> 4 << 16) {}
  __device__ uint64_t descriptor() const { return uint64_t(HIGH) << 32 | low; }
};

// Waits until at most PENDING groups, the last ones, still run; the registers are those of the groups that are
// done, accumulators and left operands: until here nothing may touch them.
template <int PENDING, class... Registers>
__device__ inline void wgmma_wait(Registers &...registers) {
  wgmma_wait_group<PENDING>();
  (registers_in_use(registers), ...);
}

// This is the same with a number that is known where loops are unrolled.
template <class... Registers>
__device__ inline void wgmma_wait(int pending, Registers &...registers) {
  if (pending == 0) wgmma_wait<0>(registers...);
  if (pending == 1) wgmma_wait<1>(registers...);
  if (pending == 2) wgmma_wait<2>(registers...);
}

// This is a condition that never holds, as nobody but us knows: ptxas gives a product that overwrites its
// accumulator other registers where that saves waiting, and runs out of them; one that may add keeps those that
// it has.
struct Never {
  bool never;
  __device__ operator bool() const { return never; }
};

struct NothingMore {
  __device__ void operator()() const {}
};

// Starts c = (add ? c : 0) + left * right over KT steps of k, then what `more` starts, and commits that as a
// group. Of two parts the small products (high * low, low * high) come first: each addition cuts off what is
// below the accumulator's last bit, and while that is small, so is what is lost. TRANSPOSED: low * high before
// high * low, so that the transposed product comes out the same to the bit.
template <class Kind, int KT, bool TRANSPOSED = false, int NT, class Left, class Right, class Add,
          class More = NothingMore>
__device__ inline void multiply(float (&c)[NT][4], const Left &left, const Right &right, Add add,
                                More more = More()) {
  using Element = typename Kind::Element;
  auto step = [&](int left_part, int right_part, int k, bool add) {
    if constexpr (std::is_class_v<Left>)
      wgmma<Element, Left::K_IN_ROW, Right::K_IN_ROW>(c, left.descriptor(left_part, k),
                                                      right.descriptor(right_part, k), add);
    else
      wgmma<Element, Right::K_IN_ROW>(c, left[left_part][k], right.descriptor(right_part, k), add);
  };
  if constexpr (!std::is_same_v<Add, Never>)
    if (!add) registers_are_free(c);
  wgmma_start();
  if constexpr (Kind::PARTS == 2) {
#pragma unroll
    for (int k = 0; k < KT; k++) {
      step(TRANSPOSED, !TRANSPOSED, k, add || k > 0);
      step(!TRANSPOSED, TRANSPOSED, k, true);
    }
  }
#pragma unroll
  for (int k = 0; k < KT; k++) step(0, 0, k, add || k > 0 || Kind::PARTS == 2);
  more();
  wgmma_commit();
}

// Starts c += left * right over one more step, within a group that multiply() commits.
template <class Element, int NT>
__device__ inline void multiply_one_more(float (&c)[NT][4], const HalvesOperand &left,
                                         const HalvesOperand &right) {
  wgmma<Element, true, true>(c, left.descriptor(), right.descriptor(), true);
}

}  // namespace hopper
}  // namespace fa
