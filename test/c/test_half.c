/* The 16-bit types against their definition and, where the compiler has f16, against the compiler. */
#include <math.h>

#include "../../c_src/cpu/half.h"
#include "check.h"

typedef struct half_type {
  const char *name;
  int mantissa_bits, bias;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
} half_type;

static const half_type types[] = {{"f16", 10, 15, fa_f16_to_f32, fa_f32_to_f16},
                                  {"bf16", 7, 127, fa_bf16_to_f32, fa_f32_to_bf16}};

/* What the bits of a finite or infinite value say, infinity being where the next power of two would be. */
static double value_of(const half_type *type, uint16_t bits) {
  int exponent = (bits & 0x7fff) >> type->mantissa_bits, mantissa = bits & ((1 << type->mantissa_bits) - 1);
  int implicit = exponent ? 1 << type->mantissa_bits : 0;
  double magnitude = ldexp(mantissa + implicit, (exponent ? exponent : 1) - type->bias - type->mantissa_bits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

static uint16_t infinity_of(const half_type *type) {
  return (uint16_t)((2 * type->bias + 1) << type->mantissa_bits);
}

static void test_widen(const half_type *type) {
  long wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    float value = type->widen((uint16_t)bits);
    uint16_t magnitude = bits & 0x7fff, infinity = infinity_of(type);
    bool right = (signbit(value) != 0) == (bits >= 0x8000);
    if (magnitude > infinity) {
      right = isnan(value);
    } else if (magnitude == infinity) {
      right = right && isinf(value);
    } else {
      right = right && value == value_of(type, (uint16_t)bits);
    }
    wrong += !right;
  }
  CHECK(wrong == 0, "%s to f32: %ld of 65536 patterns are wrong", type->name, wrong);
}

static void test_round_trip(const half_type *type) {
  long wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    uint16_t back = type->narrow(type->widen((uint16_t)bits));
    bool nan = (bits & 0x7fff) > infinity_of(type);
    wrong += nan ? (back & 0x7fff) <= infinity_of(type) : back != bits;
  }
  CHECK(wrong == 0, "%s to f32 and back: %ld of 65536 patterns changed", type->name, wrong);
}

/* Between each two neighbours: the middle goes to the even one, and the f32 beside it to the nearer one. */
static void test_ties(const half_type *type) {
  long wrong = 0;
  for (uint16_t below = 0; below < infinity_of(type); below++) {
    uint16_t above = below + 1, even = below % 2 ? above : below;
    float middle = (float)((value_of(type, below) + value_of(type, above)) / 2);
    wrong += type->narrow(middle) != even || type->narrow(-middle) != (even | 0x8000);
    wrong += type->narrow(nextafterf(middle, 0)) != below;
    wrong += type->narrow(nextafterf(middle, INFINITY)) != above;
  }
  CHECK(wrong == 0, "f32 to %s: %ld values beside a tie are wrong", type->name, wrong);
}

static void test_extremes(const half_type *type) {
  uint16_t infinity = infinity_of(type);
  CHECK(type->narrow(INFINITY) == infinity, "%s of infinity", type->name);
  CHECK(type->narrow(-INFINITY) == (infinity | 0x8000), "%s of -infinity", type->name);
  CHECK(type->narrow(3.4028235e38f) == infinity, "%s of the largest f32", type->name);
  CHECK(type->narrow(-0.0f) == 0x8000, "%s of -0", type->name);
  CHECK(type->narrow(0x1p-149f) == 0, "%s of the smallest f32", type->name);
  /* A NaN whose payload lies wholly in the bits that are cut. */
  CHECK((type->narrow(fa_f32_from_bits(0x7f800001)) & 0x7fff) > infinity, "%s of a NaN", type->name);
  CHECK((type->narrow(fa_f32_from_bits(0xffffffff)) & 0x7fff) > infinity, "%s of a NaN", type->name);
}

/* Every upper half of an f32, with lower halves around those where rounding turns. */
static void test_against_compiler(void) {
#ifdef __FLT16_MAX__
  static const uint16_t lower[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000,
                                   0x3001, 0x7fff, 0x8000, 0x8001, 0x9000, 0xa5a5, 0xefff, 0xf000, 0xffff};
  long wrong = 0;
  for (uint32_t upper = 0; upper < 0x10000; upper++)
    for (size_t i = 0; i < sizeof lower / sizeof *lower; i++) {
      float value = fa_f32_from_bits(upper << 16 | lower[i]);
      _Float16 expected = (_Float16)value;
      uint16_t bits;
      memcpy(&bits, &expected, sizeof bits);
      wrong += isnan(value) ? (fa_f32_to_f16(value) & 0x7fff) <= 0x7c00 : fa_f32_to_f16(value) != bits;
    }
  CHECK(wrong == 0, "f32 to f16: %ld values differ from the compiler's", wrong);
#else
  printf("skipped: the compiler has no _Float16\n");
  num_skipped++;
#endif
}

int main(void) {
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    test_widen(&types[i]);
    test_round_trip(&types[i]);
    test_ties(&types[i]);
    test_extremes(&types[i]);
  }
  test_against_compiler();
  return report();
}
