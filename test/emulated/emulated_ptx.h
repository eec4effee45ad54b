// What cuda/ptx.cuh says, done on the CPU.
#pragma once

#include "language.h"

namespace emulated {

// c[16, 8] += a[16, 16] * b[16, 8], as words of 16-bit elements lie in the lanes of a warp.
struct Product {
  float *c;
  uint32_t a[4], b[2];
};
void multiply_f16(Product *const (&lanes)[WARP]);
void multiply_bf16(Product *const (&lanes)[WARP]);
// c[16, 8] += a[16, 8] * b[8, 8] of f32.
void multiply_tf32(Product *const (&lanes)[WARP]);

struct Matrices {
  uint32_t *words, address;
};
void load_matrices(Matrices *const (&lanes)[WARP], bool is_transposed, Site site);
void store_matrices(Matrices *const (&lanes)[WARP], bool is_transposed, Site site);

template <class... Arguments, size_t... I>
inline void call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Arguments> *>(arguments[I])...);
}
template <class... Arguments>
void invoke(const void *kernel, void **arguments) {
  call(reinterpret_cast<void (*)(Arguments...)>(const_cast<void *>(kernel)), arguments,
       std::index_sequence_for<Arguments...>());
}

}  // namespace emulated

#define FA_DYNAMIC_SHARED(alignment, type, name) \
  type *const name = reinterpret_cast<type *>(::emulated::current->block->shared)

namespace fa {

using emulated::Site;

// ---- kernels -------------------------------------------------------------------------------------------

template <class... Arguments>
inline const void *address_of_kernel(void (*kernel)(Arguments...)) {
  return emulated::register_kernel(reinterpret_cast<const void *>(kernel), emulated::invoke<Arguments...>);
}

// Kernels run one after the other.
inline void let_dependents_start() {}
inline void wait_for_launch_before() {}
template <int THREADS>
inline void barrier(int number, Site site = Site()) {
  emulated::barrier_wait(number, THREADS, site);
}
inline void let_others_run(Site site = Site()) { emulated::yield("waits for memory to change", -1, site); }

inline void prefetch_l2(const void *) {}

inline void forget(uint32_t &) {}
inline void forget(float &) {}

inline uint32_t pack_positive(__half, float a, float b) {
  const __half2 pair = __floats2half2_rn(a < 0 ? 0 : a, b < 0 ? 0 : b);
  return reinterpret_cast<const uint32_t &>(pair);
}
inline uint32_t pack_positive(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a < 0 ? 0 : a, b < 0 ? 0 : b);
  return reinterpret_cast<const uint32_t &>(pair);
}

// ---- shared memory -------------------------------------------------------------------------------------

inline uint32_t shared_address(const void *pointer, Site site = Site()) {
  return emulated::shared_address_of(pointer, site);
}

inline void copy_async(uint32_t to, const void *from, int bytes, Site site = Site()) {
  emulated::copy_async(to, from, bytes, 16 - bytes, site);
}
inline void copy_async_commit() { emulated::copy_async_commit(); }
template <int PENDING>
inline void copy_async_wait() {
  emulated::copy_async_wait(PENDING);
}
inline void copy_async_wait_all() { emulated::copy_async_wait(-1); }

inline void store_shared(uint32_t to, uint32_t value, Site site = Site()) {
  emulated::store_shared(to, value, site);
}
inline void store_shared(uint32_t to, uint4 value, Site site = Site()) {
  emulated::store_shared(to, value, site);
}
inline void store_shared(uint32_t to, const float (&x)[4], Site site = Site()) {
  emulated::store_shared(to, make_float4(x[0], x[1], x[2], x[3]), site);
}
inline void store_shared(uint32_t to, float2 x, Site site = Site()) { emulated::store_shared(to, x, site); }
inline float4 load_shared_four(uint32_t from, Site site = Site()) {
  return emulated::load_shared<float4>(from, site);
}
inline uint32_t load_shared_word(uint32_t from, Site site = Site()) {
  return emulated::load_shared<uint32_t>(from, site);
}
inline uint32_t load_shared_half(uint32_t from, Site site = Site()) {
  return emulated::load_shared<uint16_t>(from, site);
}
inline int4 load_shared_words(uint32_t from, Site site = Site()) {
  return emulated::load_shared<int4>(from, site);
}
inline float2 load_shared_pair(uint32_t from, Site site = Site()) {
  return emulated::load_shared<float2>(from, site);
}

template <bool TRANSPOSED>
inline void load_matrices(uint32_t (&r)[4], uint32_t from, Site site = Site()) {
  emulated::Matrices mine = {r, from};
  emulated::meet_in_warp(~0u, "ldmatrix", site, mine, [&](emulated::Matrices *const(&all)[32]) {
    emulated::load_matrices(all, TRANSPOSED, site);
  });
}
template <bool TRANSPOSED>
inline void store_matrices(uint32_t to, const uint32_t (&r)[4], Site site = Site()) {
  uint32_t words[4] = {r[0], r[1], r[2], r[3]};
  emulated::Matrices mine = {words, to};
  emulated::meet_in_warp(~0u, "stmatrix", site, mine, [&](emulated::Matrices *const(&all)[32]) {
    emulated::store_matrices(all, TRANSPOSED, site);
  });
}

// ---- clusters ------------------------------------------------------------------------------------------

inline uint32_t address_in_block(uint32_t address, uint32_t block) {
  return address % emulated::CLUSTER_STEP + (block + 1) * emulated::CLUSTER_STEP;
}
inline float4 load_cluster_four(uint32_t from, Site site = Site()) {
  return emulated::load_shared<float4>(from, site);
}
inline float2 load_cluster_pair(uint32_t from, Site site = Site()) {
  return emulated::load_shared<float2>(from, site);
}
inline void cluster_barrier(Site site = Site()) { emulated::cluster_barrier(site); }

// ---- memory of the device ------------------------------------------------------------------------------

inline void add_four(float *to, const float (&x)[4]) {
  for (int i = 0; i < 4; i++) atomicAdd(to + i, x[i]);
}
inline int load_relaxed(const int32_t *from) { return *const_cast<const volatile int32_t *>(from); }
inline int load_acquire(const int32_t *from) { return *const_cast<const volatile int32_t *>(from); }
inline void add_relaxed(int32_t *to, int x) { atomicAdd(to, x); }
inline void add_release(int32_t *to, int x) { atomicAdd(to, x); }
inline void fence_acquire_release() {}

// ---- numbers -------------------------------------------------------------------------------------------

inline void mma(__half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site = Site()) {
  emulated::Product mine = {c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulated::meet_in_warp(~0u, "mma", site, mine, emulated::multiply_f16);
}
inline void mma(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                Site site = Site()) {
  emulated::Product mine = {c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulated::meet_in_warp(~0u, "mma", site, mine, emulated::multiply_bf16);
}

inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site = Site()) {
  emulated::Product mine = {c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulated::meet_in_warp(~0u, "mma", site, mine, emulated::multiply_tf32);
}

// To the nearest number with 10 bits behind the point; ties go away from 0.
inline uint32_t round_to_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x7fffffff) > 0x7f800000 ? bits : (bits + 0x1000) & ~0x1fffu;
}

// Numbers below the normal ones are 0, as with .ftz.
inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

}  // namespace fa
