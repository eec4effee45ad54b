// Hopper's own instructions (sm_90a): barriers in shared memory, bulk copies by tensor map (TMA), and products
// of a warpgroup (wgmma). Nothing here knows of attention. Instructions: PTX ISA, mbarrier, cp.async.bulk,
// wgmma.
#pragma once

#include <cuda.h>
#include <type_traits>

#include "tile.cuh"

namespace fa {
namespace hopper {

constexpr int WARPGROUP = 128;  // threads

// ---- synchronisation -------------------------------------------------------------------------------

// A barrier is 8 bytes of shared memory and is named by their address. It completes a phase (0, 1, 0, ...) when
// `arrivals` threads have arrived and the bytes that they announced have come.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// The thread that initialised the barriers calls this before the block's __syncthreads.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
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
// Arrives, and announces bytes that a bulk copy brings.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// `threads` threads arrive or wait at one of the 16 barriers in hardware, of which __syncthreads has number 0.
__device__ inline void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits until the kernel before, if this one has begun beside it, is done and what it wrote can be read.
__device__ inline void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Gives a number that is the same in all threads of a warp, or in the lanes that are here, 0 among them, in a
// form that the compiler knows to be the same, so that it may lie in uniform registers.
__device__ inline uint32_t uniform(uint32_t x, uint32_t lanes = ~0u) { return __shfl_sync(lanes, x, 0); }

// Makes what this thread wrote to shared memory visible to bulk copies and wgmma.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Makes what this thread knows to be in memory visible to its bulk copies from there.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// From here on, all threads of the warpgroup have so many registers, a multiple of 8.
template <int REGISTERS>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

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
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(tile + box * T::BOX_BYTES),
        "l"(&map), "r"(box * BOX_COLS), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

// Brings the same numbers to the cache alone.
template <class T, int BOX_COLS = 64>
__device__ inline void prefetch_boxes(const CUtensorMap &map, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < T::BOXES; box++)
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(box * BOX_COLS), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Starts the copy of 16 rows of a tile, from `tile_row` on, to (column, row, head, batch) of the map, whose
// boxes have 16 rows; what lies outside of the tensor is left out. One thread does this, in its bulk group.
template <class T>
__device__ inline void store_boxes(const CUtensorMap &map, uint32_t tile, int tile_row, int row, int head,
                                   int batch, int column = 0) {
#pragma unroll
  for (int box = 0; box < T::BOXES; box++)
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
        "r"(column + box * 64), "r"(row), "r"(head), "r"(batch), "r"(tile + box * T::BOX_BYTES + tile_row * 128)
        : "memory");
}

// Starts the copy of consecutive bytes to shared memory; both addresses and bytes are multiples of 16.
__device__ inline void load_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Starts to[i] += from[i] for f32 numbers, `from` in shared memory; addresses and bytes are multiples of 16.
__device__ inline void add_bulk(float *to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
// Starts the copy of consecutive bytes from shared memory; the same holds for addresses and bytes.
__device__ inline void store_bulk(float *to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// Closes a group of this thread's copies from shared memory; waits until at most PENDING groups still read
// shared memory (done: until they are made).
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
__device__ inline void bulk_wait_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
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

// wgmma(c[64, N], a, b, add) starts c = a * b, or c += a * b, which runs on behind it, see below. c is laid out
// as one Accumulator of 16 rows in each of the warpgroup's warps; a comes from shared memory or from registers.
#define FA_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define FA_FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define FA_8(n)    FA_FOUR(n), FA_FOUR(n + 1)
#define FA_16(n)   FA_8(n), FA_8(n + 2)
#define FA_32(n)   FA_16(n), FA_16(n + 4)
#define FA_64(n)   FA_32(n), FA_32(n + 8)

#define FA_WGMMA_SHARED(N, TYPE, REGISTERS, CONSTRAINTS, a0, a1, a2, a3, a4)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N     \
               "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" #a0 ", %" #a1 ", p, 1, 1, %" #a3 ", %" #a4 \
               ";\n}"                                                                                    \
               : CONSTRAINTS                                                                             \
               : "l"(a), "l"(b), "r"(int(add)), "n"(!A_K_IN_ROW), "n"(!B_K_IN_ROW))
#define FA_WGMMA_REGISTERS(N, TYPE, REGISTERS, CONSTRAINTS, a0, a1, a2, a3, a4, a5, a6)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N        \
               "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #a4 \
               ", p, 1, 1, %" #a6 ";\n}"                                                                    \
               : CONSTRAINTS                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(!B_K_IN_ROW))
#define FA_UNPACK(...) __VA_ARGS__
// a0 to a6 are the numbers that follow the accumulator's N / 2 registers.
#define FA_WGMMA(N, REGISTERS, CONSTRAINTS, a0, a1, a2, a3, a4, a5, a6)                            \
  template <class Element, bool A_K_IN_ROW, bool B_K_IN_ROW>                                       \
  __device__ inline void wgmma(float(&c)[N / 8][4], uint64_t a, uint64_t b, bool add) {            \
    if constexpr (std::is_same_v<Element, __half>)                                                 \
      FA_WGMMA_SHARED(N, "f16", REGISTERS, FA_UNPACK CONSTRAINTS, a0, a1, a2, a3, a4);             \
    else                                                                                           \
      FA_WGMMA_SHARED(N, "bf16", REGISTERS, FA_UNPACK CONSTRAINTS, a0, a1, a2, a3, a4);            \
  }                                                                                                \
  template <class Element, bool B_K_IN_ROW>                                                        \
  __device__ inline void wgmma(float(&c)[N / 8][4], const uint32_t(&a)[4], uint64_t b, bool add) { \
    if constexpr (std::is_same_v<Element, __half>)                                                 \
      FA_WGMMA_REGISTERS(N, "f16", REGISTERS, FA_UNPACK CONSTRAINTS, a0, a1, a2, a3, a4, a5, a6);  \
    else                                                                                           \
      FA_WGMMA_REGISTERS(N, "bf16", REGISTERS, FA_UNPACK CONSTRAINTS, a0, a1, a2, a3, a4, a5, a6); \
  }

// clang-format off
FA_WGMMA(32, FA_TEN() ", %10, %11, %12, %13, %14, %15", (FA_16(0)), 16, 17, 18, 19, 20, 21, 22)
FA_WGMMA(64, FA_TEN() ", " FA_TEN(1) ", " FA_TEN(2) ", %30, %31", (FA_32(0)), 32, 33, 34, 35, 36, 37, 38)
FA_WGMMA(80, FA_TEN() ", " FA_TEN(1) ", " FA_TEN(2) ", " FA_TEN(3), (FA_32(0), FA_8(8)), 40, 41, 42, 43, 44, 45, 46)
#define FA_SIXTY FA_TEN() ", " FA_TEN(1) ", " FA_TEN(2) ", " FA_TEN(3) ", " FA_TEN(4) ", " FA_TEN(5)
FA_WGMMA(128, FA_SIXTY ", %60, %61, %62, %63", (FA_64(0)), 64, 65, 66, 67, 68, 69, 70)
FA_WGMMA(256, FA_SIXTY ", " FA_TEN(6) ", " FA_TEN(7) ", " FA_TEN(8) ", " FA_TEN(9) ", " FA_TEN(10) ", " FA_TEN(11)
              ", %120, %121, %122, %123, %124, %125, %126, %127",
         (FA_64(0), FA_64(16)), 128, 129, 130, 131, 132, 133, 134)
// clang-format on

// Products run behind the program. wgmma_start comes before the first one that uses registers which this thread
// wrote.
__device__ inline void wgmma_start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// To the compiler, these are registers that may have changed: it keeps what reads them behind this point, and
// their names taken up to it.
template <int NT>
__device__ inline void registers_in_use(float (&c)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
template <int PARTS, int KT>
__device__ inline void registers_in_use(uint32_t (&parts)[PARTS][KT][4]) {
#pragma unroll
  for (int k = 0; k < PARTS * KT; k++) {
    uint32_t(&a)[4] = parts[k / KT][k % KT];
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
  }
}

// To the compiler, these are registers whose old values nobody reads: it need not keep them for a product that
// overwrites them.
template <int NT>
__device__ inline void registers_are_free(float (&c)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) asm volatile("" : "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3]));
}

// To the compiler, this is a number that may have changed: what follows from it is worked out again behind this
// point, and not kept in registers.
__device__ inline void forget(uint32_t &x) { asm volatile("" : "+r"(x)); }

// Waits until at most PENDING groups, the last ones, still run; the registers are those of the groups that are
// done, accumulators and left operands: until here nothing may touch them.
template <int PENDING, class... Registers>
__device__ inline void wgmma_wait(Registers &...registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
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

// Starts c = (add ? c : 0) + left * right over KT steps of k, and commits it as a group. Of two parts the small
// products (high * low, low * high) come first: each addition cuts off what is below the accumulator's last
// bit, and while that is small, so is what is lost. TRANSPOSED: low * high before high * low, so that the
// transposed product comes out the same to the bit.
template <class Kind, int KT, bool TRANSPOSED = false, int NT, class Left, class Right, class Add>
__device__ inline void multiply(float (&c)[NT][4], const Left &left, const Right &right, Add add) {
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
  wgmma_commit();
}

}  // namespace hopper
}  // namespace fa
