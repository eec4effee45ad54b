// Hopper's barriers in shared memory, which count arrivals and bytes (mbarrier), and the registers that
// warpgroups give and take. What a program may not do with them ends it.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "threads.h"

namespace emulated {

// ---- in shared memory ----------------------------------------------------------------------------------

// The eight bytes of a barrier hold all of its state, as on the device: who writes over them breaks it, and one
// that was not initialised is known by its seal.
struct SharedBarrier {
  uint64_t phase : 1, expected : 12, missing : 12, seal : 7, num_phases : 8;
  int64_t bytes : 24;

  uint64_t right_seal() const {
    const uint64_t words = phase + expected * 3 + missing * 5 + num_phases * 9 + uint64_t(bytes) * 7 + 0x5a;
    return (words ^ words >> 7 ^ words >> 14) & 0x7f;
  }
  static SharedBarrier at(uint32_t address) {
    if (address % 8) fail(Site(), "barrier %u is not aligned", address);
    SharedBarrier barrier;
    static_assert(sizeof barrier == 8, "a barrier is 8 bytes");
    memcpy(&barrier, shared_at(address, 8, 1), 8);
    if (barrier.seal != barrier.right_seal())
      fail(Site(), "barrier %u was not initialised, or is overwritten", address);
    return barrier;
  }
  void put(uint32_t address) {
    const bool is_complete = missing == 0 && bytes == 0;
    if (is_complete) phase ^= 1, num_phases++, missing = expected;
    seal = right_seal();
    uint8_t *there = shared_at(address, 8, 1);
    memcpy(there, this, 8);
    count_progress();
    if (is_complete) wake(there);
  }
};

inline void init_barrier(uint32_t address, int arrivals) {
  if (arrivals < 1 || arrivals > 1024)
    fail(Site(), "barrier %u is initialised for %d arrivals", address, arrivals);
  SharedBarrier barrier = {};
  barrier.expected = barrier.missing = unsigned(arrivals);
  barrier.put(address);
}

// One arrival that announces bytes, or none.
inline void arrive_at_barrier(uint32_t address, int bytes = 0) {
  SharedBarrier barrier = SharedBarrier::at(address);
  if (barrier.missing == 0)
    fail(Site(), "barrier %u: more arrive than the %d expected", address, int(barrier.expected));
  barrier.bytes += bytes;
  barrier.missing--;
  barrier.put(address);
}

// Bytes that were announced have come.
inline void complete_bytes(uint32_t address, int bytes) {
  SharedBarrier barrier = SharedBarrier::at(address);
  if (barrier.bytes < bytes)
    fail(Site(), "barrier %u: %d bytes come and %d are announced", address, bytes, int(barrier.bytes));
  barrier.bytes -= bytes;
  barrier.put(address);
}

// Whether the phase of this parity is complete.
inline bool phase_is_complete(uint32_t address, uint32_t parity) {
  if (parity > 1) fail(Site(), "barrier %u is waited for with parity %u", address, parity);
  return SharedBarrier::at(address).phase != parity;
}

// ---- registers -----------------------------------------------------------------------------------------

// Warpgroups share out the registers that a block begins with, thread by thread here.
struct RegisterPool {
  std::vector<uint32_t> has;
  int64_t free = 0;
  std::map<uint32_t, uint32_t> wanted, came;  // by warpgroup

  explicit RegisterPool(uint32_t num_threads) : has(num_threads, 65536 / num_threads / 8 * 8) {}

  // By a thread, once: all of its warpgroup want the same.
  void ask(uint32_t thread, uint32_t registers, bool more) {
    const uint32_t warpgroup = thread / 128;
    if (registers % 8 || registers < 24 || registers > 256) fail(Site(), "setmaxnreg %u", registers);
    if (came[warpgroup]++ % 128 == 0) wanted[warpgroup] = registers;
    if (wanted[warpgroup] != registers) fail(Site(), "setmaxnreg: the threads of a warpgroup differ");
    if (more ? registers < has[thread] : registers > has[thread])
      fail(Site(), "setmaxnreg from %u to %u", has[thread], registers);
  }
  // False where others have not given enough yet.
  bool change(uint32_t thread, uint32_t registers) {
    const int64_t change = int64_t(registers) - has[thread];
    if (change > free) return false;
    free -= change;
    has[thread] = registers;
    return true;
  }
  void finish() const {
    for (auto [warpgroup, count] : came)
      if (count % 128)
        fail(Site(), "setmaxnreg: %u threads of warpgroup %u took no part", 128 - count % 128, warpgroup);
  }
};

}  // namespace emulated
