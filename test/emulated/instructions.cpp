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

// Lane l has of a: rows l / 4 and that + 8, columns 2 * (l % 4) and the next, in words 0 and 1, and eight
// columns further in words 2 and 3; of b: rows 2 * (l % 4) and the next, and eight further, in column l / 4; of
// c as of a.
template <class ToFloat>
inline void multiply(Product *const (&lanes)[WARP], ToFloat to_float) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < WARP; lane++) {
    const Product &of = *lanes[lane];
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; i++) {
      const int shift = 16 * i;
      a[group][pair + i] = to_float(uint16_t(of.a[0] >> shift));
      a[group + 8][pair + i] = to_float(uint16_t(of.a[1] >> shift));
      a[group][pair + 8 + i] = to_float(uint16_t(of.a[2] >> shift));
      a[group + 8][pair + 8 + i] = to_float(uint16_t(of.a[3] >> shift));
      b[pair + i][group] = to_float(uint16_t(of.b[0] >> shift));
      b[pair + 8 + i][group] = to_float(uint16_t(of.b[1] >> shift));
      c[group][pair + i] = of.c[i];
      c[group + 8][pair + i] = of.c[2 + i];
    }
  }
  for (int m = 0; m < 16; m++) {
    float sum[8] = {};
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) sum[n] += a[m][k] * b[k][n];
    for (int n = 0; n < 8; n++) c[m][n] += sum[n];
  }
  for (int lane = 0; lane < WARP; lane++) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; i++) {
      lanes[lane]->c[i] = c[group][pair + i];
      lanes[lane]->c[2 + i] = c[group + 8][pair + i];
    }
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

void multiply_f16(Product *const (&lanes)[WARP]) {
  multiply(lanes, [](uint16_t bits) { return halves[bits]; });
}
void multiply_bf16(Product *const (&lanes)[WARP]) {
  multiply(lanes, [](uint16_t bits) { return float_of(uint32_t(bits) << 16); });
}

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
