// The functions of cuda/hopper_ptx.cuh, which says what they do, on the CPU.
#pragma once

#include <cuda.h>
#include <type_traits>

#include "hopper_block.h"
#include "../../cuda/ptx.cuh"

namespace fa {
namespace hopper {

constexpr int WARPGROUP = 128;  // threads

// ---- synchronisation -------------------------------------------------------------------------------

inline void barrier_init(uint32_t barrier, int arrivals) { emulated::init_barrier(barrier, arrivals); }
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) { emulated::arrive_at_barrier(barrier); }
inline void barrier_expect(uint32_t barrier, int bytes) { emulated::arrive_at_barrier(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t phase, emulated::Site site = emulated::Site()) {
  emulated::wait_at_shared_barrier(barrier, phase, site);
}

inline void named_barrier_wait(int id, int threads, emulated::Site site = emulated::Site()) {
  emulated::barrier_wait(id, threads, site);
}
inline void named_barrier_arrive(int id, int threads, emulated::Site site = emulated::Site()) {
  emulated::barrier_arrive(id, threads, site);
}

inline void fence_async() {}
inline void fence_async_global() {}

template <int REGISTERS>
inline void take_registers() {
  emulated::change_registers(REGISTERS, true);
}
template <int REGISTERS>
inline void give_registers() {
  emulated::change_registers(REGISTERS, false);
}

// ---- bulk copies -----------------------------------------------------------------------------------

inline void load_box(uint32_t to, const CUtensorMap &map, uint32_t barrier, int column, int row, int head,
                     int batch) {
  const int32_t begin[] = {column, row, head, batch};
  emulated::hopper_block().loads.start(emulated::copy_of_box(&map, begin, 4, to), barrier);
}
inline uint64_t cache_policy(bool) { return 0; }
inline void load_box(uint32_t to, const CUtensorMap &map, uint32_t barrier, int column, int row, int head,
                     int batch, uint64_t) {
  load_box(to, map, barrier, column, row, head, batch);
}
inline void prefetch_box(const CUtensorMap &, int, int, int, int) {}
inline void store_box(const CUtensorMap &map, uint32_t from, int column, int row, int head, int batch) {
  const int32_t begin[] = {column, row, head, batch};
  emulated::stores_of_thread().start(emulated::copy_of_box(&map, begin, 4, from));
}
inline void load_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  emulated::hopper_block().loads.start(emulated::copy_of_bytes(const_cast<void *>(from), to, bytes), barrier);
}
inline void add_bulk(float *to, uint32_t from, int bytes) {
  emulated::BulkCopy copy = emulated::copy_of_bytes(to, from, bytes);
  copy.reduction = emulated::Reduction::ADD_F32;
  emulated::stores_of_thread().start(std::move(copy));
}
inline void store_bulk(float *to, uint32_t from, int bytes) {
  emulated::stores_of_thread().start(emulated::copy_of_bytes(to, from, bytes));
}
inline void bulk_commit() { emulated::stores_of_thread().commit(); }
template <int PENDING>
inline void bulk_wait_read() {
  emulated::stores_of_thread().wait(PENDING, false);
}
template <int PENDING>
inline void bulk_wait_done() {
  emulated::stores_of_thread().wait(PENDING, true);
}

// ---- products of a warpgroup -----------------------------------------------------------------------

template <class Element, bool A_K_IN_ROW, bool B_K_IN_ROW, int NT>
inline void wgmma(float (&c)[NT][4], uint64_t a, uint64_t b, bool add) {
  emulated::start_product(c[0], emulated::left_in_shared(a, A_K_IN_ROW),
                          emulated::right_in_shared(b, B_K_IN_ROW, NT * 8), std::is_same_v<Element, __half>,
                          add);
}
template <class Element, bool B_K_IN_ROW, int NT>
inline void wgmma(float (&c)[NT][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulated::start_product(c[0], emulated::left_in_registers(a),
                          emulated::right_in_shared(b, B_K_IN_ROW, NT * 8), std::is_same_v<Element, __half>,
                          add);
}
inline void wgmma_start() { emulated::products_of_warp().fence(emulated::thread_in_block() % 32); }
inline void wgmma_commit() { emulated::products_of_warp().commit(emulated::thread_in_block() % 32); }
inline void wait_no_sooner(float) {}
template <int PENDING>
inline void wgmma_wait_group(emulated::Site site = emulated::Site()) {
  emulated::products_of_warp().wait(emulated::thread_in_block() % 32, PENDING, site);
}

template <int NT>
inline void registers_in_use(float (&)[NT][4]) {}
template <int PARTS, int KT>
inline void registers_in_use(uint32_t (&)[PARTS][KT][4]) {}
template <int NT>
inline void registers_are_free(float (&)[NT][4]) {}

}  // namespace hopper
}  // namespace fa
