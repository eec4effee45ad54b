// What takes most of the emulation's time: its products' operands, and their arithmetic.
#include <array>

#include "hopper_product.h"

namespace emulated {

namespace {

const std::array<float, 1 << 16> numbers_of_f16 = [] {
  std::array<float, 1 << 16> numbers;
  for (uint32_t bits = 0; bits < numbers.size(); bits++) numbers[bits] = number_of_f16(uint16_t(bits));
  return numbers;
}();

void convert(float *to, const uint16_t *from, uint32_t count, bool is_f16) {
  if (is_f16)
    for (uint32_t i = 0; i < count; i++) to[i] = numbers_of_f16[from[i]];
  else
    for (uint32_t i = 0; i < count; i++) to[i] = number_of_bf16(from[i]);
}

}  // namespace

// Eight elements lie together: of k, or of the other axis.
std::vector<uint16_t> ProductOperand::read() const {
  std::vector<uint16_t> x(num_rows * 16);
  uint16_t *to = x.data();
  if (in_registers) {
    for (uint32_t lane = 0; lane < 32; lane++) memcpy(to + lane * 8, registers[lane], 16);
    return x;
  }
  const Descriptor descriptor(bits);
  if (!descriptor.known)
    fail(Site(), "wgmma: a descriptor has bits that are not emulated: %#llx", (long long)bits);
  for (uint32_t row = 0; row < num_rows; row += k_in_row ? 1 : 8)
    for (uint32_t k = 0; k < 16; k += k_in_row ? 8 : 1, to += 8)
      memcpy(to, shared_at(descriptor.address_of(k_in_row, first_row + row, k), 16, 16), 16);
  return x;
}

std::vector<uint16_t> ProductOperand::arrange(const std::vector<uint16_t> &x) const {
  std::vector<uint16_t> arranged(num_rows * 16);
  uint16_t *to = arranged.data();
  if (in_registers) {
    for (uint32_t i = 0; i < x.size(); i++) {
      const Cell cell = operand_cell(i / 8, i % 8);
      to[cell.column * num_rows + cell.row] = x[i];
    }
    return arranged;
  }
  for (uint32_t k = 0; k < 16; k++, to += num_rows)
    if (k_in_row)
      for (uint32_t row = 0; row < num_rows; row++) to[row] = x[row * 16 + k];
    else
      for (uint32_t row = 0; row < num_rows; row += 8) memcpy(to + row, &x[row * 16 + k * 8], 16);
  return arranged;
}

// Built for what most processors have, too; nobody needs the same bits everywhere.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=x86-64-v3", "default")))
#endif
void multiply_tile(float *sum, const uint16_t *left, const uint16_t *right, uint32_t columns, bool is_f16, bool adds) {
  static float a[16][16], b[16 * 256], products[256];
  convert(a[0], left, 256, is_f16);
  convert(b, right, 16 * columns, is_f16);
  for (uint32_t row = 0; row < 16; row++) {
    for (uint32_t n = 0; n < columns; n++) products[n] = 0;
    for (uint32_t k = 0; k < 16; k++) {
      const float x = a[k][row], *y = b + k * columns;
      for (uint32_t n = 0; n < columns; n++) products[n] += x * y[n];
    }
    for (uint32_t n = 0; n < columns; n++)
      sum[row * columns + n] = adds ? sum[row * columns + n] + products[n] : products[n];
  }
}

}  // namespace emulated
