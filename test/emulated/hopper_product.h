// Products of a warpgroup (wgmma), as each of its warps sees them: they are noted when they are started and
// computed when the program waits for them. Meanwhile accumulators hold NaN, and nothing that a product reads
// may change.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "hopper_barrier.h"
#include "hopper_layout.h"

namespace emulated {

// An operand: a descriptor, or the four registers of each lane.
struct ProductOperand {
  bool in_registers = false, k_in_row = true;
  uint64_t bits = 0;
  uint32_t first_row = 0, num_rows = 0;
  const uint32_t *registers[32] = {};

  bool operator==(const ProductOperand &other) const {
    return in_registers == other.in_registers && k_in_row == other.k_in_row && bits == other.bits &&
           first_row == other.first_row && num_rows == other.num_rows;
  }
  // Its elements as they lie: eight of a chunk of shared memory, or of a lane, beside one another.
  std::vector<uint16_t> read() const;
  // The same as [16, num_rows]: those of a step of k lie together.
  std::vector<uint16_t> arrange(const std::vector<uint16_t> &x) const;
};

// The registers of a warp that products add to.
struct WarpAccumulator {
  static constexpr uint32_t POISON = 0x7fc0dead;
  uint32_t columns;
  float *lanes[32] = {};
  int num_products = 0;
  std::vector<float> tile;  // [16, columns]

  explicit WarpAccumulator(uint32_t columns) : columns(columns), tile(16 * columns) {}
  float &at(uint32_t lane, uint32_t i) {
    const Cell cell = accumulator_cell(lane, i);
    return tile[cell.row * columns + cell.column];
  }
  // Takes the numbers of a lane, and leaves what nobody may read.
  void take(uint32_t lane, float *c) {
    const uint32_t poison = POISON;
    lanes[lane] = c;
    for (uint32_t i = 0; i < columns / 2; i++) {
      at(lane, i) = c[i];
      memcpy(c + i, &poison, 4);
    }
  }
  void give_back() {
    for (uint32_t lane = 0; lane < 32; lane++)
      for (uint32_t i = 0; i < columns / 2; i++) {
        uint32_t bits;
        memcpy(&bits, lanes[lane] + i, 4);
        if (bits != POISON)
          fail(Site(), "wgmma: lane %u wrote its accumulator before it waited for the product", lane);
        lanes[lane][i] = at(lane, i);
      }
  }
};

// sum[16, columns] = left^T right, or += that, where left is [16, 16] and right is [16, columns].
void multiply_tile(float *sum, const uint16_t *left, const uint16_t *right, uint32_t columns, bool is_f16,
                   bool adds);

struct GroupProduct {
  ProductOperand left, right;
  bool is_f16, adds;
  uint32_t came = 0;  // lanes
  std::shared_ptr<WarpAccumulator> sum;
  std::vector<uint16_t> left_then, right_then;

  void compute() {
    const std::vector<uint16_t> left_now = left.read(), right_now = right.read();
    if (left_now != left_then) fail(Site(), "wgmma: the left operand changed before the program waited");
    if (right_now != right_then) fail(Site(), "wgmma: the right operand changed before the program waited");
    multiply_tile(sum->tile.data(), left.arrange(left_now).data(), right.arrange(right_now).data(),
                  right.num_rows, is_f16, adds);
  }
};

// A warp's products.
struct WarpProducts {
  std::deque<GroupProduct> queue;
  uint64_t first = 0;  // the number of the queue's first
  std::vector<std::shared_ptr<WarpAccumulator>> sums;
  struct Lane {
    uint64_t started = 0;
    std::vector<uint64_t> groups;  // how many had been started when each was closed
    bool fenced = false;
  } lanes[32];

  // By a lane; the last one's registers and shared memory are those that the product may read from now on.
  void start(uint32_t lane, float *c, const ProductOperand &left, const ProductOperand &right, bool is_f16,
             bool adds) {
    Lane &mine = lanes[lane];
    if (!mine.fenced) fail(Site(), "wgmma without wgmma.fence since the program waited for products");
    if (right.num_rows % 8 || right.num_rows < 8 || right.num_rows > 256)
      fail(Site(), "wgmma of %u columns", right.num_rows);
    const uint64_t index = mine.started++ - first;
    if (index == queue.size()) {
      queue.emplace_back();
      GroupProduct &product = queue.back();
      product.left = left, product.right = right, product.is_f16 = is_f16, product.adds = adds;
      for (auto &sum : sums)
        if (sum->lanes[lane] == c && sum->columns == right.num_rows) product.sum = sum;
      if (!product.sum) sums.push_back(product.sum = std::make_shared<WarpAccumulator>(right.num_rows));
      product.sum->num_products++;
    }
    GroupProduct &product = queue[index];
    if (!(product.left == left && product.right == right) || product.is_f16 != is_f16 || product.adds != adds)
      fail(Site(), "wgmma: the lanes of a warp differ");
    if (left.in_registers) product.left.registers[lane] = left.registers[0];
    WarpAccumulator &sum = *product.sum;
    if (!sum.lanes[lane]) sum.take(lane, c);
    if (sum.lanes[lane] != c) fail(Site(), "wgmma: the lanes of a warp differ in their accumulators");
    if (++product.came == 32) {
      product.left_then = product.left.read();
      product.right_then = product.right.read();
    }
  }
  void fence(uint32_t lane) { lanes[lane].fenced = true; }
  void commit(uint32_t lane) { lanes[lane].groups.push_back(lanes[lane].started); }

  // By a lane: at most `pending` groups may still run.
  void wait(uint32_t lane, size_t pending, Site site) {
    lanes[lane].fenced = false;
    Lane *mine = lanes + lane;
    meet_in_warp(~0u, "wgmma.wait_group", site, mine, [&](Lane **const *) { finish_groups(pending); });
  }
  // The same of all lanes.
  void finish_groups(size_t pending) {
    for (const Lane &other : lanes)
      if (other.started != lanes[0].started || other.groups != lanes[0].groups)
        fail(Site(), "wgmma: the lanes of a warp wait for different products");
    std::vector<uint64_t> &groups = lanes[0].groups;
    const size_t count = groups.size() > pending ? groups.size() - pending : 0;
    if (count > 0) finish_products(groups[count - 1]);
    for (Lane &other : lanes)
      other.groups.erase(other.groups.begin(), other.groups.begin() + std::ptrdiff_t(count));
  }
  void finish() const {
    if (!queue.empty()) fail(Site(), "a warp ends before %zu products are done", queue.size());
  }

 private:
  void finish_products(uint64_t end) {
    for (; first < end; first++) {
      GroupProduct &product = queue.front();
      product.compute();
      if (--product.sum->num_products == 0) {
        product.sum->give_back();
        sums.erase(std::find(sums.begin(), sums.end(), product.sum));
      }
      queue.pop_front();
    }
  }
};

}  // namespace emulated
