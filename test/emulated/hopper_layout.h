// How Hopper lays numbers in shared memory and in registers: swizzles, the descriptors of a product's operands,
// the fragments of a warp. Pure functions of addresses, from PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions" and "Tensor Swizzling Modes"; test_hopper.cpp holds them against plain loops.
#pragma once

#include <cstdint>

namespace emulated {

// Bulk copies by tensor map and products permute chunks of 16 bytes within rows of `span` bytes, 128, 64 or 32,
// by the address bits from the seventh on. A span of 16 permutes nothing.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  return address ^ (((address >> 7) & (span / 16 - 1)) << 4);
}

// An operand of a product in shared memory, as its 64-bit descriptor says: addresses and distances in units of
// 16 bytes in fields of 14 bits, and in the topmost two bits which swizzle.
struct Descriptor {
  uint32_t start, leading, stride, span;
  bool known;  // whether all its other bits are as the emulation expects them

  explicit Descriptor(uint64_t bits)
      : start(field(bits, 0)), leading(field(bits, 16)), stride(field(bits, 32)) {
    static constexpr uint32_t SPANS[] = {16, 128, 64, 32};
    span = SPANS[bits >> 62];
    const uint64_t other = UINT64_C(3) << 14 | UINT64_C(3) << 30 | UINT64_C(0xffff) << 46;
    known = (bits & other & ~(UINT64_C(3) << 62)) == 0;
  }

  // Where the 16-bit element [own, k] lies, own being the row of a left operand or the column of a right one.
  // With k in a row, 8 rows of own follow one another and the next 8 are a stride away. Otherwise a row holds
  // span / 2 elements of own, the next of them are a leading distance away, and the next 8 of k are a stride
  // away. Without a swizzle, rows are 16 bytes.
  uint32_t address_of(bool k_in_row, uint32_t own, uint32_t k) const {
    const uint32_t a_row = span / 2;  // elements
    uint32_t offset;
    if (span == 16)
      offset = k_in_row ? own % 8 * 16 + own / 8 * stride + k % 8 * 2 + k / 8 * leading
                        : own % 8 * 2 + own / 8 * stride + k % 8 * 16 + k / 8 * leading;
    else if (k_in_row)
      offset = own % 8 * span + own / 8 * stride + k * 2;
    else
      offset = own % a_row * 2 + own / a_row * leading + k % 8 * span + k / 8 * stride;
    return swizzled(start + offset, span);
  }

 private:
  static uint32_t field(uint64_t bits, int at) { return uint32_t(bits >> at & 0x3fff) << 4; }
};

// Where element i of lane's registers lies in a warp's 16 rows of an accumulator: column block i / 4.
struct Cell {
  uint32_t row, column;
};
inline Cell accumulator_cell(uint32_t lane, uint32_t i) {
  return {lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}
// And in the 16 by 16 of a left operand in four registers, of two elements each.
inline Cell operand_cell(uint32_t lane, uint32_t i) {
  return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

// bf16 is the upper half of an f32.
inline float number_of_bf16(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float x;
  __builtin_memcpy(&x, &word, 4);
  return x;
}
inline float number_of_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  uint32_t word;
  if (exponent == 0) {
    const float x = float(fraction) * 0x1p-24f;
    return sign ? -x : x;
  }
  word = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float x;
  __builtin_memcpy(&x, &word, 4);
  return x;
}

}  // namespace emulated
