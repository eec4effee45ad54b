// Instructions of a warp on matrices: how 16-bit elements lie in the lanes is said by the PTX ISA, for
// mma.m16n8k16 and ldmatrix.
#include "emulated_ptx.h"

namespace emulated {

float halves[1 << 16];

namespace {

float half_to_float(uint32_t bits) {
  const int exponent = bits >> 10 & 31;
  const float mantissa = float(bits & 1023) / 1024;
  float x = exponent == 0 ? ldexpf(mantissa, -14) : ldexpf(1 + mantissa, exponent - 15);
  if (exponent == 31) x = mantissa == 0 ? INFINITY : NAN;
  return bits >> 15 ? -x : x;
}

struct Halves {
  Halves() {
    for (uint32_t bits = 0; bits < 1 << 16; bits++) halves[bits] = half_to_float(bits);
  }
} fill_halves;

#if defined(__x86_64__) && !defined(__clang__)
#define FOR_EACH_ISA __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_ISA
#endif

using Eight = float __attribute__((vector_size(32)));

// Rows of words, of which each is two neighbours along the axis that the product sums.
struct Operands {
  uint32_t a[16][8], b[8][8];
  Eight c[16];
};

template <class ToFloat>
inline __attribute__((always_inline)) void multiply_all(Operands &of, ToFloat to_float) {
  Eight b[16];
  for (int n = 0; n < 8; n++)
    for (int k = 0; k < 8; k++) {
      b[2 * k][n] = to_float(of.b[n][k] & 0xffff);
      b[2 * k + 1][n] = to_float(of.b[n][k] >> 16);
    }
  for (int m = 0; m < 16; m++) {
    Eight sum = {};
    for (int k = 0; k < 8; k++)
      sum += to_float(of.a[m][k] & 0xffff) * b[2 * k] + to_float(of.a[m][k] >> 16) * b[2 * k + 1];
    of.c[m] += sum;
  }
}
FOR_EACH_ISA void multiply_operands_f16(Operands &of) {
  multiply_all(of, [](uint32_t bits) { return halves[bits]; });
}
FOR_EACH_ISA void multiply_operands_bf16(Operands &of) {
  multiply_all(of, [](uint32_t bits) { return float_of(bits << 16); });
}

// Lane l has of a: rows l / 4 and that + 8, columns 2 * (l % 4) and the next, in words 0 and 1, and eight
// columns further in words 2 and 3; of b: rows 2 * (l % 4) and the next, and eight further, in column l / 4; of
// c as of a.
void multiply(Product *const (&lanes)[WARP], void (*multiply_operands)(Operands &)) {
  Operands of;
  for (int lane = 0; lane < WARP; lane++) {
    const Product &own = *lanes[lane];
    const int group = lane / 4, pair = lane % 4;
    of.a[group][pair] = own.a[0], of.a[group + 8][pair] = own.a[1];
    of.a[group][pair + 4] = own.a[2], of.a[group + 8][pair + 4] = own.a[3];
    of.b[group][pair] = own.b[0], of.b[group][pair + 4] = own.b[1];
    memcpy(reinterpret_cast<float *>(&of.c[group]) + 2 * pair, own.c, 8);
    memcpy(reinterpret_cast<float *>(&of.c[group + 8]) + 2 * pair, own.c + 2, 8);
  }
  multiply_operands(of);
  for (int lane = 0; lane < WARP; lane++) {
    const int group = lane / 4, pair = lane % 4;
    memcpy(lanes[lane]->c, reinterpret_cast<float *>(&of.c[group]) + 2 * pair, 8);
    memcpy(lanes[lane]->c + 2, reinterpret_cast<float *>(&of.c[group + 8]) + 2 * pair, 8);
  }
}

// Lane l has of a: rows l / 4 and that + 8, column l % 4, in words 0 and 1, and four columns further in words 2
// and 3; of b: rows l % 4 and four further, in column l / 4; of c as above.
inline void multiply_wide(Product *const (&lanes)[WARP]) {
  float a[16][8], b[8][8];
  for (int lane = 0; lane < WARP; lane++) {
    const Product &of = *lanes[lane];
    const auto number = [](uint32_t bits) { return float_of(bits & ~0x1fffu); };
    for (int i = 0; i < 4; i++) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = number(of.a[i]);
    for (int i = 0; i < 2; i++) b[lane % 4 + i * 4][lane / 4] = number(of.b[i]);
  }
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++) {
      float sum = 0;
      for (int k = 0; k < 8; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      lanes[lane]->c[i] += sum;
    }
}

// Calls visit(word, where) for each word of the four matrices: lane 8 * i + r points to row r of matrix i.
template <class Visit>
inline void for_each_word(Matrices *const (&lanes)[WARP], bool is_transposed, Site site, Visit visit) {
  for (int i = 0; i < 4; i++) {
    uint16_t *rows[8];
    for (int r = 0; r < 8; r++)
      rows[r] = reinterpret_cast<uint16_t *>(shared_at(lanes[i * 8 + r]->address, 16, 16, site));
    for (int lane = 0; lane < WARP; lane++) {
      const int own = lane / 4, pair = lane % 4 * 2;
      if (is_transposed)
        visit(lanes[lane]->words[i], rows[pair][own], rows[pair + 1][own]);
      else
        visit(lanes[lane]->words[i], rows[own][pair], rows[own][pair + 1]);
    }
  }
}

}  // namespace

void multiply_f16(Product *const (&lanes)[WARP]) { multiply(lanes, multiply_operands_f16); }
void multiply_bf16(Product *const (&lanes)[WARP]) { multiply(lanes, multiply_operands_bf16); }

void multiply_tf32(Product *const (&lanes)[WARP]) { multiply_wide(lanes); }

void load_matrices(Matrices *const (&lanes)[WARP], bool is_transposed, Site site) {
  for_each_word(lanes, is_transposed, site,
                [](uint32_t &word, uint16_t &low, uint16_t &high) { word = low | uint32_t(high) << 16; });
}
void store_matrices(Matrices *const (&lanes)[WARP], bool is_transposed, Site site) {
  for_each_word(lanes, is_transposed, site, [](uint32_t &word, uint16_t &low, uint16_t &high) {
    low = uint16_t(word), high = uint16_t(word >> 16);
  });
}

}  // namespace emulated
