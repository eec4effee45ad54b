// The arithmetic of the emulation's products, which takes most of its time.
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
