// Tests of the emulation's Hopper parts by plain loops: where swizzles, descriptors and fragments put numbers,
// what barriers count, when copies and products are made, and that misuse is found. No kernel runs here.
#include <cstdio>

#include "hopper_block.h"

// ---- a machine of one block, whose threads are called one after another ------------------------------------

namespace {
alignas(1024) uint8_t memory[64 << 10];
emulated::Block the_block;
emulated::Thread threads[128];
emulated::HopperBlock *extension;
uint32_t drawn;
int failed, passed;
struct Failure {};

void check(bool right, const char *what) {
  right ? passed++ : failed++;
  if (!right) printf("FAILED: %s\n", what);
}

// Whether doing this is found to be wrong.
template <class Do>
bool is_found(Do act) {
  try {
    act();
  } catch (Failure) {
    return true;
  }
  return false;
}
}  // namespace

namespace emulated {
Thread *current = threads;
void fail(Site, const char *, ...) { throw Failure(); }
uint8_t *shared_at(uint32_t address, uint32_t count, uint32_t, Site site) {
  if (address + count > sizeof memory) fail(site, "outside of shared memory");
  return memory + address;
}
void sleep(const void *, const char *, long, Site site) { fail(site, "nobody else could run"); }
void yield(const char *, long, Site) {}
void wake(const void *) {}
void count_progress() {}
bool arrive_in_warp(uint32_t, const char *, Site) { return false; }
void release_warp(uint32_t) {}
uint32_t draw() { return drawn; }
const Device &device() {
  static const Device device = {};
  return device;
}
struct Launch launch;
}  // namespace emulated

using namespace emulated;

namespace {

void begin_block() {
  delete extension;
  the_block.extension = extension = new HopperBlock(128);
  for (int i = 0; i < 128; i++) threads[i].number = i, threads[i].block = &the_block;
  for (size_t i = 0; i < sizeof memory; i++) memory[i] = uint8_t(i * 37 % 251);
  drawn = 1;  // nothing is early
}

// ---- where numbers lie
// ---------------------------------------------------------------------------------------

// The permutations as PTX ISA draws them: chunk c of row r, rows of `span` bytes.
void test_swizzles() {
  for (uint32_t r = 0; r < 16; r++)
    for (uint32_t c = 0; c < 8; c++)
      check(swizzled(r * 128 + c * 16, 128) == r * 128 + (c ^ r % 8) * 16, "swizzle 128");
  for (uint32_t r = 0; r < 16; r++)
    for (uint32_t c = 0; c < 4; c++)
      check(swizzled(r * 64 + c * 16, 64) == r * 64 + (c ^ r / 2 % 4) * 16, "swizzle 64");
  for (uint32_t r = 0; r < 16; r++)
    for (uint32_t c = 0; c < 2; c++)
      check(swizzled(r * 32 + c * 16, 32) == r * 32 + (c ^ r / 4 % 2) * 16, "swizzle 32");
  for (uint32_t address = 0; address < 2048; address += 16)
    check(swizzled(address, 16) == address, "no swizzle");
}

uint64_t descriptor(uint32_t start, uint32_t leading, uint32_t stride, uint64_t mode) {
  return uint64_t(start / 16) | uint64_t(leading / 16) << 16 | uint64_t(stride / 16) << 32 | mode << 62;
}

// Element [own, k] of a tile [rows, 128] in boxes of 64 columns, as cuda/hopper.cuh lays it, is found with k
// along the rows and down them.
void test_descriptors() {
  const uint32_t rows = 96, box = rows * 128;
  auto lies = [&](uint32_t row, uint32_t column) {
    return column / 64 * box + row * 128 + ((column / 8 ^ row) % 8 << 4) + column % 8 * 2;
  };
  for (uint32_t own = 0; own < rows; own++)
    for (uint32_t k = 0; k < 128; k++) {
      const Descriptor in_row(descriptor(k / 64 * box + k % 64 / 16 * 32, 16, 1024, 1));
      check(in_row.known && in_row.span == 128 && in_row.address_of(true, own, k % 16) == lies(own, k),
            "K in a row");
    }
  for (uint32_t own = 0; own < 128; own++)
    for (uint32_t k = 0; k < rows; k++) {
      const Descriptor down(descriptor(k / 16 * 16 * 128, box, 1024, 1));
      check(down.address_of(false, own, k % 16) == lies(k, own), "K down the rows");
    }
  const Descriptor plain(descriptor(256, 512, 128, 0)), base(descriptor(0, 0, 0, 1) | UINT64_C(1) << 49);
  check(plain.span == 16 && plain.address_of(true, 9, 11) == 256 + 128 + 16 + 512 + 6, "without a swizzle");
  check(plain.address_of(false, 9, 11) == 256 + 128 + 2 + 512 + 48, "without a swizzle, down the rows");
  check(!base.known, "a base offset is not emulated");
}

void test_fragments() {
  int seen[16][64] = {};
  for (uint32_t lane = 0; lane < 32; lane++)
    for (uint32_t i = 0; i < 32; i++) {
      const Cell cell = accumulator_cell(lane, i);
      seen[cell.row][cell.column]++;
    }
  for (auto &row : seen)
    for (int count : row) check(count == 1, "every cell of an accumulator is one lane's");
  check(accumulator_cell(5, 7).row == 9 && accumulator_cell(5, 7).column == 11, "an accumulator's cell");
  check(operand_cell(5, 3).row == 9 && operand_cell(5, 3).column == 3, "an operand's second register");
  check(operand_cell(5, 4).row == 1 && operand_cell(5, 4).column == 10, "an operand's third register");
}

void test_numbers() {
  check(number_of_bf16(0x3f80) == 1 && number_of_bf16(0xc040) == -3, "bf16");
  check(number_of_f16(0x3c00) == 1 && number_of_f16(0xc200) == -3 && number_of_f16(0x0001) == 0x1p-24f, "f16");
  check(number_of_f16(0x7bff) == 65504 && number_of_f16(0xfc00) == -__builtin_inff(), "large f16");
  check(number_of_f16(0x7e00) != number_of_f16(0x7e00), "f16's NaN");
}

// ---- barriers
// ------------------------------------------------------------------------------------------------

void test_barriers() {
  begin_block();
  init_barrier(64, 2);
  check(phase_is_complete(64, 1) && !phase_is_complete(64, 0), "at first the phase before is complete");
  arrive_at_barrier(64);
  arrive_at_barrier(64, 96);
  check(!phase_is_complete(64, 0), "bytes are missing");
  complete_bytes(64, 64);
  complete_bytes(64, 32);
  check(phase_is_complete(64, 0) && !phase_is_complete(64, 1), "the first phase");
  arrive_at_barrier(64), arrive_at_barrier(64);
  check(phase_is_complete(64, 1) && !phase_is_complete(64, 0), "the second phase");
  arrive_at_barrier(64, 16), arrive_at_barrier(64);
  check(is_found([] { arrive_at_barrier(64); }), "one arrival too many");
  check(is_found([] { complete_bytes(64, 32); }), "bytes that nobody announced");
  check(is_found([] { arrive_at_barrier(72); }), "no barrier");
  check(is_found([] { init_barrier(64, 0); }), "nobody arrives");
  memory[64] ^= 0xff, memory[71] ^= 0xff;
  check(is_found([] { phase_is_complete(64, 0); }), "a barrier that is overwritten");
}

void test_registers() {
  RegisterPool pool(384);
  auto ask_all = [&](uint32_t begin, uint32_t registers, bool more) {
    bool all = true;
    for (uint32_t thread = begin; thread < begin + 128; thread++)
      pool.ask(thread, registers, more), all = pool.change(thread, registers) && all;
    return all;
  };
  check(!ask_all(128, 240, true), "there are no registers yet");
  check(ask_all(0, 24, false), "giving needs nobody");
  for (uint32_t thread = 128; thread < 256; thread++)
    check(pool.change(thread, 240), "then there are enough for one");
  check(ask_all(256, 240, true), "and for another");
  check(is_found([&] { pool.ask(0, 240, false); }), "giving is no taking");
  check(is_found([&] { pool.ask(1, 25, true); }), "no multiple of 8");
  RegisterPool other(256);
  other.ask(0, 24, false);
  check(is_found([&] { other.ask(1, 32, false); }), "threads differ");
  check(is_found([&] { other.finish(); }), "threads took no part");
}

// ---- copies
// --------------------------------------------------------------------------------------------------

// A tensor {cols, rows, heads, batch} of numbers that know their place.
struct Tensor {
  static constexpr int COLS = 72, ROWS = 21, HEADS = 3, BATCH = 2;
  alignas(16) uint16_t numbers[BATCH][ROWS][HEADS][COLS];
  TensorMap map;

  explicit Tensor(uint16_t box_cols, uint16_t box_rows) : map() {
    uint16_t next = 1;
    for (auto &batch : numbers)
      for (auto &row : batch)
        for (auto &head : row)
          for (uint16_t &x : head) x = next++;
    map = {TensorMap::SEAL,
           4,
           2,
           128,
           0,
           reinterpret_cast<uint8_t *>(numbers),
           {COLS, ROWS, HEADS, BATCH},
           {HEADS * COLS * 2, COLS * 2, ROWS * HEADS * COLS * 2},
           {box_cols, box_rows, 1, 1},
           {1, 1, 1, 1}};
  }
  uint16_t at(int column, int row, int head, int batch) const {
    const bool inside = column >= 0 && column < COLS && row >= 0 && row < ROWS && head >= 0 && head < HEADS &&
                        batch >= 0 && batch < BATCH;
    return inside ? numbers[batch][row][head][column] : 0;
  }
};
uint16_t number_at(uint32_t address) {
  uint16_t x;
  memcpy(&x, memory + address, 2);
  return x;
}

void test_loads() {
  const Tensor tensor(64, 8);
  const int32_t places[][4] = {{0, 0, 0, 0}, {64, 16, 2, 1}, {0, 24, 1, 0}, {0, 3, 3, 0}, {-8, -3, 1, 1}};
  for (auto &place : places) {
    begin_block();
    init_barrier(8192, 1);
    arrive_at_barrier(8192, 1024);
    extension->loads.start(copy_of_box(&tensor.map, place, 4, 2048), 8192);
    check(number_at(2048) == uint16_t(2048 * 37 % 251 | 2049 * 37 % 251 << 8), "a load is late");
    wait_at_shared_barrier(8192, 1, Site());
    check(!phase_is_complete(8192, 0), "nobody polled it");
    extension->loads.advance();
    check(phase_is_complete(8192, 0), "its bytes have come");
    for (int row = 0; row < 8; row++)
      for (int column = 0; column < 64; column++)
        check(number_at(2048 + row * 128 + ((column / 8 ^ row) % 8 << 4) + column % 8 * 2) ==
                  tensor.at(place[0] + column, place[1] + row, place[2], place[3]),
              "a loaded number");
  }
  begin_block();
  init_barrier(8192, 1);
  arrive_at_barrier(8192, 32);
  extension->loads.start(copy_of_bytes(const_cast<uint16_t *>(&tensor.numbers[0][0][0][8]), 160, 32), 8192);
  check(is_found([] { extension->finish(); }), "the block ends too early");
  extension->loads.advance();
  for (int i = 0; i < 16; i++)
    check(number_at(160 + i * 2) == tensor.at(8 + i, 0, 0, 0), "a number of a bulk load");
  check(is_found([&] { copy_of_bytes(const_cast<uint16_t *>(&tensor.numbers[0][0][0][1]), 160, 32); }),
        "alignment");
  const int32_t begin[4] = {};
  check(is_found([&] { copy_of_box(&tensor.map, begin, 4, 2048 + 64); }), "a box's alignment");
  check(is_found([&] { copy_of_box(&tensor.map, begin, 3, 2048); }), "a map of other axes");
}

void test_stores() {
  for (bool early : {false, true}) {
    begin_block();
    drawn = early ? 0 : 1;
    Tensor tensor(64, 16);
    Stores &stores = stores_of_thread();
    const int32_t begin[] = {64, 16, 1, 1};
    stores.start(copy_of_box(&tensor.map, begin, 4, 2048));
    stores.commit();
    memory[2048] ^= 1;  // before the wait: a race, which shows where shared memory is read late
    const uint16_t raced = number_at(2048);
    stores.wait(0, false);
    memset(memory + 2048, 0, 16 * 128);
    check(tensor.numbers[1][16][1][64] == Tensor(64, 16).numbers[1][16][1][64], "memory is written late");
    stores.wait(0, true);
    check((tensor.numbers[1][16][1][64] == raced) != early, "shared memory is read late, or early");
    int differ = 0;
    const Tensor untouched(64, 16);
    for (int i = 0; i < int(sizeof tensor.numbers) / 2; i++)
      differ += (&tensor.numbers[0][0][0][0])[i] != (&untouched.numbers[0][0][0][0])[i];
    check(differ == 5 * 8, "what lies outside of the tensor is left out");
  }
  begin_block();
  alignas(16) float sum[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const float more[4] = {10, 20, 30, 40};
  memcpy(memory + 512, more, sizeof more);
  BulkCopy copy = copy_of_bytes(sum + 4, 512, 16);
  copy.reduction = Reduction::ADD_F32;
  Stores &stores = stores_of_thread();
  stores.start(copy), stores.commit();
  stores.start(copy_of_bytes(sum, 512, 16)), stores.commit();
  stores.wait(1, true);
  check(sum[0] == 1 && sum[4] == 15 && sum[7] == 48, "the older group is done");
  check(is_found([&] { stores.finish(); }), "a thread ends too early");
  stores.wait(0, false);
  stores.finish();
  check(sum[0] == 10 && sum[3] == 40 && sum[4] == 15, "the other is done at the end");
}

// ---- products
// ------------------------------------------------------------------------------------------------

constexpr int N = 32;
float sums[32][N / 2];
uint32_t left_registers[32][4];

// bf16 of small whole numbers is exact.
uint16_t bf16_of(int x) {
  const float number = float(x);
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return uint16_t(bits >> 16);
}
int left_number(int row, int k) { return (row * 7 + k * 3) % 11 - 5; }
int right_number(int column, int k) { return (column * 5 + k * 2) % 13 - 6; }
int product_at(int row, int column) {
  int sum = 0;
  for (int k = 0; k < 16; k++) sum += left_number(row, k) * right_number(column, k);
  return sum;
}
void put_number(uint32_t address, int x) {
  const uint16_t bits = bf16_of(x);
  memcpy(memory + address, &bits, 2);
}

// Starts a product of one warp, the second of its warpgroup, lane by lane.
void start(bool in_registers, bool down, bool adds) {
  for (uint32_t lane = 0; lane < 32; lane++) {
    current = threads + 32 + lane;
    products_of_warp().fence(lane);
    start_product(sums[lane],
                  in_registers ? left_in_registers(left_registers[lane])
                               : left_in_shared(descriptor(0, 16, 1024, 1), true),
                  right_in_shared(descriptor(16384, 0, 1024, 1), !down, N), false, adds);
    products_of_warp().commit(lane);
  }
}
void wait(size_t pending) {
  WarpProducts &products = extension->products[1];
  for (auto &lane : products.lanes) lane.fenced = false;
  products.finish_groups(pending);
}
void set_up_product(bool down) {
  begin_block();
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      put_number((16 + row) * 128 + ((k / 8 ^ row) % 8 << 4) + k % 8 * 2, left_number(row, k));
  for (int column = 0; column < N; column++)
    for (int k = 0; k < 16; k++) {
      const int row = down ? k : column, at = down ? column : k;
      put_number(16384 + row * 128 + ((at / 8 ^ row) % 8 << 4) + at % 8 * 2, right_number(column, k));
    }
  for (uint32_t lane = 0; lane < 32; lane++) {
    for (uint32_t i = 0; i < 8; i++) {
      const Cell cell = operand_cell(lane, i);
      uint32_t &word = left_registers[lane][i / 2];
      word = (i % 2 ? word & 0xffff : 0) | uint32_t(bf16_of(left_number(int(cell.row), int(cell.column))))
                                               << i % 2 * 16;
    }
    for (float &x : sums[lane]) x = 1000;
  }
}
bool sums_are(int times, int plus) {
  bool right = true;
  for (uint32_t lane = 0; lane < 32; lane++)
    for (uint32_t i = 0; i < N / 2; i++) {
      const Cell cell = accumulator_cell(lane, i);
      right = right && sums[lane][i] == float(times * product_at(int(cell.row), int(cell.column)) + plus);
    }
  return right;
}

void test_products() {
  for (bool in_registers : {false, true})
    for (bool down : {false, true}) {
      set_up_product(down);
      start(in_registers, down, true);
      start(in_registers, down, true);
      check(sums[0][0] != sums[0][0], "nobody may read an accumulator");
      wait(1);
      check(sums[0][0] != sums[0][0], "another product adds to it");
      wait(0);
      check(sums_are(2, 1000), "two products were added");
      start(in_registers, down, false);
      wait(0);
      check(sums_are(1, 0), "a product that does not add");
    }
  set_up_product(false);
  start(false, false, true);
  sums[3][2] = 0;
  check(is_found([] { wait(0); }), "an accumulator was written");
  set_up_product(false);
  start(false, false, true);
  put_number(16384, 77);
  check(is_found([] { wait(0); }), "a right operand was overwritten");
  set_up_product(false);
  start(true, false, true);
  left_registers[9][1] ^= 1;
  check(is_found([] { wait(0); }), "a left operand in registers was overwritten");
  set_up_product(false);
  current = threads + 32;
  check(is_found([] {
          start_product(sums[0], left_in_registers(left_registers[0]),
                        right_in_shared(descriptor(16384, 0, 1024, 1), true, N), false, true);
        }),
        "no fence came before");
  set_up_product(false);
  start(false, false, true);
  check(is_found([] { extension->finish(); }), "a warp ends before its products");
}

}  // namespace

int main() {
  test_swizzles();
  test_descriptors();
  test_fragments();
  test_numbers();
  test_barriers();
  test_registers();
  test_loads();
  test_stores();
  test_products();
  printf("emulated hopper: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}
