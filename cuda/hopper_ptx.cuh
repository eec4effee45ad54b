// Hopper's own instructions (sm_90a), beside those of ptx.cuh: PTX ISA, mbarrier, cp.async.bulk, wgmma. On the
// CPU test/emulated does what is said here.
#pragma once

#ifdef FA_EMULATED
#include "emulated_hopper_ptx.h"
#else

#include <cuda.h>
#include <type_traits>

#include "ptx.cuh"

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

// ---- bulk copies -----------------------------------------------------------------------------------

// Starts the copy of a box of a tensor map from (column, row, head, batch) on; what lies outside of the tensor
// becomes 0. Its bytes arrive at the barrier.
__device__ inline void load_box(uint32_t to, const CUtensorMap &map, uint32_t barrier, int column, int row,
                                int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// What a copy is to become in the second cache: what it would be without this, or the first to leave it.
__device__ inline uint64_t cache_policy(bool leaves_first) {
  uint64_t policy;
  if (leaves_first)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void load_box(uint32_t to, const CUtensorMap &map, uint32_t barrier, int column, int row,
                                int head, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier), "l"(policy)
      : "memory");
}

// Brings the same numbers to the cache alone.
__device__ inline void prefetch_box(const CUtensorMap &map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
               "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Starts the copy of a box to (column, row, head, batch) of the map, in this thread's bulk group; what lies
// outside of the tensor is left out.
__device__ inline void store_box(const CUtensorMap &map, uint32_t from, int column, int row, int head,
                                 int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
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

// ---- products of a warpgroup -----------------------------------------------------------------------

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
FA_WGMMA(112, FA_TEN() ", " FA_TEN(1) ", " FA_TEN(2) ", " FA_TEN(3) ", " FA_TEN(4) ", %50, %51, %52, %53, %54, %55",
         (FA_32(0), FA_16(8), FA_8(12)), 56, 57, 58, 59, 60, 61, 62)
#define FA_SIXTY FA_TEN() ", " FA_TEN(1) ", " FA_TEN(2) ", " FA_TEN(3) ", " FA_TEN(4) ", " FA_TEN(5)
FA_WGMMA(128, FA_SIXTY ", %60, %61, %62, %63", (FA_64(0)), 64, 65, 66, 67, 68, 69, 70)
FA_WGMMA(192, FA_SIXTY ", " FA_TEN(6) ", " FA_TEN(7) ", " FA_TEN(8) ", %90, %91, %92, %93, %94, %95",
         (FA_64(0), FA_32(16)), 96, 97, 98, 99, 100, 101, 102)
FA_WGMMA(256, FA_SIXTY ", " FA_TEN(6) ", " FA_TEN(7) ", " FA_TEN(8) ", " FA_TEN(9) ", " FA_TEN(10) ", " FA_TEN(11)
              ", %120, %121, %122, %123, %124, %125, %126, %127",
         (FA_64(0), FA_64(16)), 128, 129, 130, 131, 132, 133, 134)
// clang-format on

// Products run behind the program. wgmma_start comes before the first one that uses registers which this thread
// wrote.
__device__ inline void wgmma_start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// ptxas moves a wait for products up to where its block of instructions begins. Behind this it waits when the
// number is there, which is not negative.
__device__ inline void wait_no_sooner(float number) {
  while (__any_sync(~0u, number < 0)) asm volatile("nanosleep.u32 1;" ::: "memory");
}

template <int PENDING>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

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

}  // namespace hopper
}  // namespace fa

#endif
