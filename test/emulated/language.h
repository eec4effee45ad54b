// CUDA C++ for a compiler of C++: what nvcc knows without an #include. Included before every .cu file.
#pragma once

#define FA_EMULATED
#define __CUDACC__

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime_api.h"  // before the macros, whose names it has
#include "threads.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local  // each block has a thread of the system
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (::emulated::current->index)
#define blockIdx  (::emulated::current->block->index)
#define blockDim  (::emulated::launch.block)
#define gridDim   (::emulated::launch.grid)

// ---- arithmetic ----------------------------------------------------------------------------------------

using std::isfinite;
using std::isinf;
using std::isnan;

#define FA_EMULATED_MIN_MAX(type)                           \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
FA_EMULATED_MIN_MAX(int)
FA_EMULATED_MIN_MAX(unsigned)
FA_EMULATED_MIN_MAX(long)
FA_EMULATED_MIN_MAX(unsigned long)
FA_EMULATED_MIN_MAX(long long)
FA_EMULATED_MIN_MAX(unsigned long long)
#undef FA_EMULATED_MIN_MAX
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __float_as_int(float x) { return int(emulated::bits_of(x)); }
inline unsigned __float_as_uint(float x) { return emulated::bits_of(x); }
inline float __int_as_float(int x) { return emulated::float_of(uint32_t(x)); }
inline float __uint_as_float(unsigned x) { return emulated::float_of(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __logf(float x) { return logf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }

// ---- memory --------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T *from) {
  return *from;
}
template <class T>
inline T __ldcs(const T *from) {
  return *from;
}
template <class T>
inline T __ldcg(const T *from) {
  return *from;
}
template <class T>
inline void __stcs(T *to, T x) {
  *to = x;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulated::yield("sleeps"); }

namespace emulated {

// No other thread runs meanwhile.
template <class T, class Function>
inline T change(T *at, Function function) {
  const T before = *at;
  *at = function(before);
  count_progress();
  return before;
}

}  // namespace emulated

template <class T>
inline T atomicAdd(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return T(now + x); });
}
template <class T>
inline T atomicMin(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return x < now ? x : now; });
}
template <class T>
inline T atomicMax(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return now < x ? x : now; });
}
template <class T>
inline T atomicOr(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return now | x; });
}
template <class T>
inline T atomicAnd(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return now & x; });
}
template <class T>
inline T atomicExch(T *at, std::common_type_t<T> x) {
  return emulated::change(at, [=](T) { return x; });
}
template <class T>
inline T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> x) {
  return emulated::change(at, [=](T now) { return now == expected ? x : now; });
}

// ---- barriers, and what the lanes of a warp tell each other -------------------------------------------

inline void __syncthreads(emulated::Site site = emulated::Site()) { emulated::barrier_wait(0, 0, site); }
inline int __syncthreads_or(int x, emulated::Site site = emulated::Site()) {
  return emulated::any_in_block(x != 0, site);
}

inline void __syncwarp(unsigned mask = ~0u, emulated::Site site = emulated::Site()) {
  int nothing = 0;
  emulated::meet_in_warp(mask, "__syncwarp", site, nothing, [](int *const(&)[32]) {});
}

namespace emulated {

// Every lane says something and hears what function(all, lane) makes of all of it.
template <class Result, class Said, class Function>
inline Result ask_warp(uint32_t mask, const char *what, Site site, const Said &said, Function function) {
  struct Exchange {
    Said said;
    Result heard;
  } mine = {said, Result()};
  meet_in_warp(mask, what, site, mine, [&](Exchange *const(&all)[WARP]) {
    for (int lane = 0; lane < WARP; lane++)
      if (all[lane]) all[lane]->heard = function(all, lane);
  });
  return mine.heard;
}

template <class T>
struct Shuffled {
  T x;
  int source;  // a lane
};
template <class T>
inline T shuffle(uint32_t mask, T x, int source, Site site) {
  const Shuffled<T> said = {x, source};
  return ask_warp<T>(mask, "__shfl_sync", site, said, [&](auto &all, int lane) {
    const int from = all[lane]->said.source;
    if (!all[from]) fail(site, "lane %d asks lane %d, which is not in the mask %08x", lane, from, mask);
    return all[from]->said.x;
  });
}

template <class T, class Function>
inline T reduce(uint32_t mask, T x, Site site, Function function) {
  struct Exchange {
    T said, heard;
  } mine = {x, x};
  meet_in_warp(mask, "__reduce_sync", site, mine, [&](Exchange *const(&all)[WARP]) {
    bool any = false;
    T sum = T();
    for (int lane = 0; lane < WARP; lane++)
      if (all[lane]) sum = any ? function(sum, all[lane]->said) : all[lane]->said, any = true;
    for (int lane = 0; lane < WARP; lane++)
      if (all[lane]) all[lane]->heard = sum;
  });
  return mine.heard;
}

inline uint32_t ballot(uint32_t mask, bool x, Site site) {
  return reduce<uint32_t>(mask, uint32_t(x) << lane(), site, [](uint32_t a, uint32_t b) { return a | b; });
}

}  // namespace emulated

template <class T>
inline T __shfl_sync(unsigned mask, T x, int source, int width = 32, emulated::Site site = emulated::Site()) {
  const int lane = emulated::lane(), first = lane / width * width;
  return emulated::shuffle(mask, x, first + source % width, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int other, int width = 32,
                         emulated::Site site = emulated::Site()) {
  const int lane = emulated::lane(), source = lane ^ other;
  return emulated::shuffle(mask, x, source / width <= lane / width ? source : lane, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32,
                        emulated::Site site = emulated::Site()) {
  const int lane = emulated::lane(), source = lane - int(by);
  return emulated::shuffle(mask, x, source >= lane / width * width ? source : lane, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32,
                          emulated::Site site = emulated::Site()) {
  const int lane = emulated::lane(), source = lane + int(by);
  return emulated::shuffle(mask, x, source < (lane / width + 1) * width ? source : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, bool x, emulated::Site site = emulated::Site()) {
  return emulated::ballot(mask, x, site);
}
inline int __any_sync(unsigned mask, bool x, emulated::Site site = emulated::Site()) {
  return emulated::ballot(mask, x, site) != 0;
}
inline int __all_sync(unsigned mask, bool x, emulated::Site site = emulated::Site()) {
  return emulated::ballot(mask, !x, site) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T x, emulated::Site site = emulated::Site()) {
  return emulated::ask_warp<unsigned>(mask, "__match_any_sync", site, x, [](auto &all, int lane) {
    unsigned same = 0;
    for (int i = 0; i < 32; i++)
      if (all[i] && all[i]->said == all[lane]->said) same |= 1u << i;
    return same;
  });
}
template <class T>
inline T __reduce_add_sync(unsigned mask, T x, emulated::Site site = emulated::Site()) {
  return emulated::reduce(mask, x, site, [](T a, T b) { return T(a + b); });
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T x, emulated::Site site = emulated::Site()) {
  return emulated::reduce(mask, x, site, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T x, emulated::Site site = emulated::Site()) {
  return emulated::reduce(mask, x, site, [](T a, T b) { return a < b ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x, emulated::Site site = emulated::Site()) {
  return emulated::reduce(mask, x, site, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned x, emulated::Site site = emulated::Site()) {
  return emulated::reduce(mask, x, site, [](unsigned a, unsigned b) { return a & b; });
}
