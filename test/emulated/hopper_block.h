// What the emulation keeps of a block of threads beside its shared memory: copies and products on their way,
// and registers. It is every block's extension.
#pragma once

#include <vector>

#include "hopper_copy.h"
#include "hopper_product.h"

namespace emulated {

struct HopperBlock {
  RegisterPool registers;
  Loads loads;
  std::vector<Stores> stores;          // of each thread
  std::vector<WarpProducts> products;  // of each warp

  explicit HopperBlock(uint32_t num_threads)
      : registers(num_threads), stores(num_threads), products((num_threads + 31) / 32) {}

  // All threads have run to their end.
  void finish() {
    for (Stores &of_thread : stores) of_thread.finish();
    registers.finish();
    loads.finish();
    for (WarpProducts &of_warp : products) of_warp.finish();
  }
};

inline HopperBlock &hopper_block() { return *static_cast<HopperBlock *>(block().extension); }
inline uint32_t thread_in_block() { return uint32_t(me().number); }

// ---- by the running thread -----------------------------------------------------------------------------

inline Stores &stores_of_thread() { return hopper_block().stores[thread_in_block()]; }
inline WarpProducts &products_of_warp() { return hopper_block().products[thread_in_block() / 32]; }

// Whether all lanes of a warp that wait for this phase of the barrier let others go on first. On the device
// they wait as one, and where one of them arrives elsewhere for all, that they do is relied on. So lanes that
// come before the phase is complete find the same as those that come after.
inline bool is_slow(uint32_t barrier, uint32_t parity) {
  const SharedBarrier now = SharedBarrier::at(barrier);
  const uint64_t phase = (now.num_phases - (now.phase != parity)) & 0xff;
  uint64_t x = uint64_t(launch.number) << 32 | thread_in_block() / 32 << 20 | barrier;
  x = (x ^ phase * UINT64_C(0x9e3779b97f4a7c15) ^ device().seed) * UINT64_C(0xd1342543de82ef95);
  return (x >> 40) % 16 == 0;
}

// Who waits has, now and then, one of the block's copies made.
inline void wait_at_shared_barrier(uint32_t barrier, uint32_t parity, Site site) {
  if (draw() % 64 == 0) hopper_block().loads.advance();
  if (is_slow(barrier, parity)) yield("is slow at mbarrier", barrier, site);
  while (!phase_is_complete(barrier, parity))
    sleep(shared_at(barrier, 8, 1), "waits at mbarrier", barrier, site);
}

inline void change_registers(uint32_t registers, bool more) {
  RegisterPool &pool = hopper_block().registers;
  pool.ask(thread_in_block(), registers, more);
  while (!pool.change(thread_in_block(), registers)) sleep(&pool, "waits for registers", registers);
  wake(&pool);
}

inline ProductOperand left_in_shared(uint64_t bits, bool k_in_row) {
  return ProductOperand{false, k_in_row, bits, thread_in_block() / 32 % 4 * 16, 16, {}};
}
inline ProductOperand left_in_registers(const uint32_t (&registers)[4]) {
  return ProductOperand{true, true, 0, 0, 16, {registers}};
}
inline ProductOperand right_in_shared(uint64_t bits, bool k_in_row, uint32_t columns) {
  return ProductOperand{false, k_in_row, bits, 0, columns, {}};
}
inline void start_product(float *c, const ProductOperand &left, const ProductOperand &right, bool is_f16,
                          bool adds) {
  products_of_warp().start(thread_in_block() % 32, c, left, right, is_f16, adds);
}

}  // namespace emulated
