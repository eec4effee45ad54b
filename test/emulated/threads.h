// Threads of an emulated GPU: each is a fiber, and one of all runs at a time, until it waits for others. So a
// kernel runs the same way each time, and whatever waits for ever is found. Instructions are written on top of
// this: those of a warp or of a warpgroup as meetings, those that wait for memory with sleep and wake or yield.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector_types.h"

namespace emulated {

constexpr int WARP = 32, MOST_THREADS = 1024, MOST_WARPS = MOST_THREADS / WARP, NUM_BARRIERS = 16;
constexpr int MOST_CLUSTER = 16;

// Where a thread waits, for the report of a deadlock; a default argument gives the caller's.
struct Site {
  const char *file;
  int line;
  Site(const char *file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

// A copy to shared memory that has been started.
struct PendingCopy {
  void *to;
  const void *from;
  int bytes, zeros;
};

struct Block;
struct Warp;

struct Thread {
  uint3 index;
  int number;  // in its block
  Block *block;
  Warp *warp;
  void *stack_pointer;
  void *argument;  // of the instruction that it meets others in
  // What it waits for.
  const char *what;
  long detail;  // the number of a barrier and the like; -1: none
  Site site;
  const void *key;  // that wakes it, where it sleeps
  bool has_ended;
  // cp.async: groups are closed by a copy whose `to` is NULL.
  PendingCopy *copies;
  int num_copies, most_copies;

  int lane() const { return number % WARP; }
};

// Threads that are meeting in an instruction.
struct Meeting {
  uint32_t mask, arrived;
  const char *what;
};

struct Warp {
  int number;
  uint32_t there, ready, polling;  // by lane
  Meeting meetings[WARP];
  int num_meetings;
};

// One of the 16 barriers of a block.
struct Barrier {
  int awaited, arrived;  // awaited: as those say who have arrived
  uint32_t waiting[MOST_WARPS];
};

// A block of threads that is on a multiprocessor.
struct Block {
  uint3 index;
  unsigned cluster_rank, num_in_cluster;
  int num_threads, num_warps, num_left;  // threads that have not ended
  bool is_found;                         // of any_in_block
  uint8_t *shared;                       // dynamic; its beginning has the address SHARED_BEGIN
  uint32_t shared_bytes;
  Thread *threads;  // [num_threads]
  Warp warps[MOST_WARPS];
  Barrier barriers[NUM_BARRIERS];
  int warpgroup_arrived[MOST_WARPS / 4];
  const char *warpgroup_what[MOST_WARPS / 4];
  Block *cluster[MOST_CLUSTER];
  void *extension;  // test/emulated/hopper's, of this block; NULL when the block begins
};

// The thread that runs.
extern Thread *current;
extern struct Launch {
  uint3 grid, block, cluster;
  size_t shared_bytes;
  long number;  // of all launches
} launch;

inline Thread &me() { return *current; }
inline Block &block() { return *current->block; }
inline int lane() { return current->number % WARP; }
inline int warp() { return current->number / WARP; }
inline int warpgroup() { return current->number / 128; }

// Says what is wrong, where, and in which thread, and ends the process.
[[noreturn]] void fail(Site site, const char *format, ...) __attribute__((format(printf, 2, 3)));

// ---- waiting -------------------------------------------------------------------------------------------

// Lets all others run; for loops that look at memory again and again. Where everybody who is left does nothing
// but that, it is a deadlock.
void yield(const char *what, long detail = -1, Site site = Site());

// Waits until some thread of this block calls wake with the key: the address of what it waits for.
void sleep(const void *key, const char *what, long detail = -1, Site site = Site());
void wake(const void *key);

// What an instruction that waits looks like: while (!is_done()) sleep(&x, "...").

// Called when all threads of a block wait; true if that may have woken some. For copies that are made as late
// as can be.
extern bool (*when_idle)(Block &block);
// Called when a block begins and when it has ended.
extern void (*when_block_begins)(Block &block), (*when_block_ended)(Block &block);

// ---- meetings ------------------------------------------------------------------------------------------

// Parts of what follows. True: this thread is the last one and is to call release; false: somebody has.
bool arrive_in_warp(uint32_t mask, const char *what, Site site);
void release_warp(uint32_t mask);
bool arrive_in_warpgroup(const char *what, Site site);
void release_warpgroup();

// The lanes of `mask`, of which this is one, meet. The last to arrive calls function(all), where all[lane]
// points to that lane's argument, or is NULL where the mask has none. Then all go on.
template <class Argument, class Function>
inline void meet_in_warp(uint32_t mask, const char *what, Site site, Argument &mine, Function function) {
  current->argument = &mine;
  if (!arrive_in_warp(mask, what, site)) return;
  Argument *all[WARP];
  Thread *first = current - lane();
  for (int i = 0; i < WARP; i++) all[i] = mask >> i & 1 ? static_cast<Argument *>(first[i].argument) : nullptr;
  function(all);
  release_warp(mask);
}

// The same for the 128 threads of a warpgroup: all[128].
template <class Argument, class Function>
inline void meet_in_warpgroup(const char *what, Site site, Argument &mine, Function function) {
  current->argument = &mine;
  if (!arrive_in_warpgroup(what, site)) return;
  Argument *all[128];
  Thread *first = current - current->number % 128;
  for (int i = 0; i < 128; i++) all[i] = static_cast<Argument *>(first[i].argument);
  function(all);
  release_warpgroup();
}

// ---- barriers ------------------------------------------------------------------------------------------

// bar.sync and bar.arrive. threads: 0 means all that have not ended.
void barrier_wait(int id, int threads, Site site = Site());
void barrier_arrive(int id, int threads, Site site = Site());
// By all threads of a block: whether one says so.
bool any_in_block(bool it_is_so, Site site = Site());

void cluster_barrier(Site site = Site());

// ---- shared memory -------------------------------------------------------------------------------------

// Addresses are those of the block's own dynamic memory, from SHARED_BEGIN on, or of its static memory; and
// from CLUSTER_STEP * (rank + 1) on of that of the cluster's blocks. In a cluster, shared_address_of gives one
// of these for the block itself, as a GPU does: too large for an operand's descriptor.
constexpr uint32_t SHARED_BEGIN = 1024, STATIC_BEGIN = 1 << 20, CLUSTER_STEP = 1 << 24;

uint32_t shared_address_of(const void *pointer, Site site = Site());
// The `bytes` bytes at an address, a multiple of `alignment`; fails where they are not shared memory.
uint8_t *shared_at(uint32_t address, uint32_t bytes, uint32_t alignment, Site site = Site());

template <class T>
inline T load_shared(uint32_t address, Site site = Site()) {
  T x;
  __builtin_memcpy(&x, shared_at(address, sizeof x, sizeof x, site), sizeof x);
  return x;
}
template <class T>
inline void store_shared(uint32_t address, const T &x, Site site = Site()) {
  __builtin_memcpy(shared_at(address, sizeof x, sizeof x, site), &x, sizeof x);
}

// ---- cp.async --------------------------------------------------------------------------------------------

// Copies are made when they are waited for; until then there is garbage.
void copy_async(uint32_t to, const void *from, int bytes, int zeros, Site site = Site());
void copy_async_commit();
// Waits until at most `pending` groups are under way; -1: for all copies.
void copy_async_wait(int pending);

// ---- kernels -----------------------------------------------------------------------------------------------

// Kernels by their address: how to call one with arguments as cudaLaunchKernel gets them.
using Invoke = void (*)(const void *kernel, void **arguments);
const void *register_kernel(const void *kernel, Invoke invoke);

// Runs a kernel to its end, or fails. Every block has num_shared bytes of dynamic shared memory.
void run(const void *kernel, uint3 grid, uint3 block, uint3 cluster, size_t shared_bytes, void **arguments);

// The device's properties, from the environment.
struct Device {
  int major, minor, num_multiprocessors, blocks_a_multiprocessor, num_devices;
  size_t shared_bytes;  // the most of a block
  unsigned seed;        // of the order in which warps and blocks run
};
const Device &device();

// Counts what is done, so that nobody takes a wait for a deadlock while something goes on: atomics call it.
void count_progress();

}  // namespace emulated
