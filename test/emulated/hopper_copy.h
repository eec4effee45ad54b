// Bulk copies between memory and shared memory (TMA). Those to shared memory are made at a random later time,
// when somebody polls a barrier, and in any order; those from shared memory read it at once or as late as the
// program lets them, and write memory as late as it lets them. So what does not wait for them meets garbage.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "hopper_barrier.h"
#include "hopper_map.h"

namespace emulated {

// A number of the schedule's own sequence, which the device's seed and the launch begin.
uint32_t draw();

enum class Reduction { NONE, ADD_F32 };

// A copy of the box of a map, or of consecutive bytes where there is no map.
struct BulkCopy {
  const TensorMap *map;
  int32_t begin[5];
  uint8_t *memory;
  uint32_t shared, bytes, barrier;
  Reduction reduction;
  // To memory: whether the program waited for shared memory to be read; whether it has been, and the numbers.
  bool awaited, is_read;
  std::vector<uint8_t> numbers;
};

inline BulkCopy copy_of_box(const void *map_bytes, const int32_t *begin, int rank, uint32_t shared) {
  const TensorMap *map = static_cast<const TensorMap *>(map_bytes);
  if (map->seal != TensorMap::SEAL) fail(Site(), "a bulk copy by something that is no tensor map");
  if (map->rank != rank) fail(Site(), "a bulk copy of %d axes by a map of %d", rank, map->rank);
  if (shared % 128) fail(Site(), "a box in shared memory begins at %u, no multiple of 128", shared);
  BulkCopy copy = {};
  copy.map = map, copy.shared = shared, copy.bytes = map->box_bytes();
  memcpy(copy.begin, begin, rank * sizeof *begin);
  return copy;
}
inline BulkCopy copy_of_bytes(void *memory, uint32_t shared, int bytes) {
  if (reinterpret_cast<uintptr_t>(memory) % 16 || shared % 16 || bytes % 16 || bytes <= 0)
    fail(Site(), "a bulk copy of %d bytes at %p and %u: no multiples of 16", bytes, memory, shared);
  BulkCopy copy = {};
  copy.memory = static_cast<uint8_t *>(memory), copy.shared = shared, copy.bytes = bytes;
  return copy;
}

// Where byte `offset` of the copy lies in shared memory.
inline uint32_t place_of(const BulkCopy &copy, uint32_t offset) {
  return copy.map ? swizzled(copy.shared + offset, copy.map->span) : copy.shared + offset;
}

inline void make_load(const BulkCopy &copy) {
  shared_at(copy.shared, copy.bytes, 1);
  if (copy.map)
    copy.map->for_each_chunk(copy.begin, [&](uint32_t offset, const uint8_t *from, uint32_t bytes) {
      uint8_t *to = shared_at(place_of(copy, offset), bytes, 1);
      if (from)
        memcpy(to, from, bytes);
      else
        memset(to, 0, bytes);
    });
  else
    memcpy(shared_at(copy.shared, copy.bytes, 1), copy.memory, copy.bytes);
  complete_bytes(copy.barrier, int(copy.bytes));
}

inline void read_store(BulkCopy &copy) {
  if (copy.is_read) return;
  copy.numbers.resize(copy.bytes);
  for (uint32_t offset = 0; offset < copy.bytes; offset += 16)
    memcpy(copy.numbers.data() + offset, shared_at(place_of(copy, offset), 16, 1), 16);
  copy.is_read = true;
}
inline void make_store(BulkCopy &copy) {
  read_store(copy);
  const uint8_t *numbers = copy.numbers.data();
  if (copy.map)
    copy.map->for_each_chunk(copy.begin, [&](uint32_t offset, uint8_t *to, uint32_t bytes) {
      if (to) memcpy(to, numbers + offset, bytes);
    });
  else if (copy.reduction == Reduction::NONE)
    memcpy(copy.memory, numbers, copy.bytes);
  else
    for (uint32_t offset = 0; offset < copy.bytes; offset += 4) {
      float x, y;
      memcpy(&x, copy.memory + offset, 4);
      memcpy(&y, numbers + offset, 4);
      x += y;
      memcpy(copy.memory + offset, &x, 4);
    }
}

// The copies of a block to its shared memory.
struct Loads {
  std::vector<BulkCopy> waiting;

  void start(BulkCopy copy, uint32_t barrier) {
    SharedBarrier::at(barrier);
    copy.barrier = barrier;
    waiting.push_back(std::move(copy));
    if (draw() % 8 == 0) advance();
  }
  // Makes one of those that wait.
  void advance() {
    if (waiting.empty()) return;
    std::swap(waiting[draw() % waiting.size()], waiting.back());
    const BulkCopy copy = std::move(waiting.back());
    waiting.pop_back();
    make_load(copy);
  }
  void finish() const {
    if (!waiting.empty())
      fail(Site(), "the block ends before %zu bulk copies to its shared memory", waiting.size());
  }
};

// The copies of a thread from shared memory: groups, from the oldest, and what belongs to none yet.
struct Stores {
  std::vector<std::vector<BulkCopy>> groups = {{}};

  void start(BulkCopy copy) {
    if (draw() % 4 == 0) read_store(copy);
    groups.back().push_back(std::move(copy));
  }
  void commit() { groups.emplace_back(); }
  // At most `pending` groups may still read shared memory, or, where they are to be done, be there at all.
  void wait(size_t pending, bool done) {
    const size_t most = groups.size() - 1;
    const size_t count = most > pending ? most - pending : 0;
    for (size_t i = 0; i < count; i++)
      for (BulkCopy &copy : groups[i]) {
        copy.awaited = true;
        done ? make_store(copy) : read_store(copy);
      }
    if (done) groups.erase(groups.begin(), groups.begin() + std::ptrdiff_t(count));
  }
  // The thread has ended: its block's shared memory may be another's soon, and by and by the copies are made.
  void finish() {
    for (auto &group : groups)
      for (BulkCopy &copy : group) {
        if (!copy.awaited) fail(Site(), "a thread ends before its bulk copies have read shared memory");
        make_store(copy);
      }
    groups = {{}};
  }
};

}  // namespace emulated
