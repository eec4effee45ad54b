/*
 * flash_attention_truth.h: derivatives of every function, what kernels may say, what is found and in which
 * words, forward against reverse mode, and the memory that it takes.
 */
#include "check.h"

#define TRUTH_FLOAT
#include "flash_attention_truth.h"
#undef float
#undef double
#include "reference.h"

/* `float` in the kernels below. */
using number = truth::real;
TRUTH_DYNAMIC_SHARED(char, bytes);

static void start_again() {
  truth::clear_tape();
  truth::findings().clear();
  truth::options() = truth::settings();
}

static bool near(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * (1 + std::fabs(b));
}

static void expect_nothing(const char *what) {
  CHECK(truth::findings().empty(), "%s: %s", what, truth::findings()[0].text.c_str());
}

/* ---- functions ---- */

/* The derivative on the tape against a central difference of fourth order. */
template <class F>
static void check_function(const char *name, F f, double x) {
  const auto value = [&](double at) { return f(number(at)).value(); };
  const double h = 1e-3,
               slope = (8 * (value(x + h) - value(x - h)) - (value(x + 2 * h) - value(x - 2 * h))) / (12 * h);
  truth::array<> in("x", {x}), out("y", 1);
  out[0] = f(in[0]);
  const double gradient = truth::reverse({{out, {1}}}).of(in)[0];
  CHECK(near(gradient, slope, 1e-8), "d %s / dx at %g: %.12g, differences give %.12g", name, x, gradient,
        slope);
}

#define FUNCTION(f, x) \
  check_function(      \
      #f, [](number a) -> number { return f(a); }, x)

static void test_functions() {
  start_again();
  FUNCTION(expf, 0.3), FUNCTION(__expf, -0.3), FUNCTION(exp2f, 0.3), FUNCTION(exp10f, 0.3),
      FUNCTION(expm1f, 0.3);
  FUNCTION(logf, 0.7), FUNCTION(__logf, 0.7), FUNCTION(log2f, 0.7), FUNCTION(log10f, 0.7),
      FUNCTION(log1pf, 0.7);
  FUNCTION(sqrtf, 0.7), FUNCTION(rsqrtf, 0.7), FUNCTION(cbrtf, 0.7), FUNCTION(sinf, 0.7), FUNCTION(cosf, 0.7);
  FUNCTION(tanf, 0.7), FUNCTION(atanf, 0.7), FUNCTION(asinf, 0.7), FUNCTION(acosf, 0.7), FUNCTION(sinhf, 0.7);
  FUNCTION(coshf, 0.7), FUNCTION(tanhf, 0.7), FUNCTION(erff, 0.7), FUNCTION(erfcf, 0.7), FUNCTION(fabsf, -0.7);
  FUNCTION(__saturatef, 0.7), FUNCTION(__saturatef, 1.7), FUNCTION(__frcp_rn, 0.7), FUNCTION(floorf, 0.7);
  FUNCTION(ceilf, 0.7), FUNCTION(truncf, -0.7), FUNCTION(roundf, 0.7), FUNCTION(rintf, 0.7), FUNCTION(-, 0.7);
  FUNCTION(std::exp, 0.3), FUNCTION(std::sqrt, 0.3), FUNCTION(std::tanh, 0.3), FUNCTION(+, 0.7);
#define BY_BOTH(f, x, y)                                                  \
  check_function(                                                         \
      #f " by the first", [](number a) -> number { return f(a, y); }, x); \
  check_function(                                                         \
      #f " by the second", [](number a) -> number { return f(x, a); }, y)
  BY_BOTH(powf, 0.7, 1.3);
  BY_BOTH(fmaxf, 0.7, 1.3);
  BY_BOTH(fminf, 0.7, 1.3);
  BY_BOTH(atan2f, 0.7, 1.3);
  BY_BOTH(hypotf, 0.7, 1.3);
  BY_BOTH(fmodf, 2.9, 1.3);
  BY_BOTH(__fdividef, 0.7, 1.3);
  BY_BOTH(max, 0.7, 1.3);
  BY_BOTH([](number a, number b) { return fmaf(a, b, a - b) / (b + a * 2.f); }, 0.7, 1.3);
  check_function(
      "copysignf", [](number a) { return copysignf(a, -1.f); }, 0.7);
  check_function(
      "updates in place",
      [](number a) {
        number b = a;
        for (int i = 0; i < 3; i++) b *= a, b += a, b -= 2 * a, b /= a + 3.f;
        return b++ + --b;
      },
      0.7);
  check_function(
      "a branch on data", [](number a) { return a > 0.5f ? a * a : number(0.f); }, 0.7);
  expect_nothing("functions");
}

/* ---- what kernels may say ---- */

__global__ void shuffles(const number *x, number *y) {
  const int i = threadIdx.x;
  const unsigned all = 0xffffffff;
  y[i] = __shfl_sync(all, x[i], 3);
  y[32 + i] = __shfl_up_sync(all, x[i], 2);
  y[64 + i] = __shfl_down_sync(all, x[i], 2, 8);
  y[96 + i] = __shfl_xor_sync(all, x[i], 5, 16);
  y[128 + i] = __shfl_sync(all, i, i + 9, 8) + 0.f;
  if (i < 16) y[160 + i] = __shfl_xor_sync(0xffff, x[i], 1);
}

static void test_shuffles() {
  start_again();
  const numbers values = random_numbers(32, 1);
  truth::array<> x("x", values), y("y", 176);
  truth::launch(shuffles, 1, 32, 0, x, y);
  const numbers got = y.values();
  for (int i = 0; i < 32; i++) {
    CHECK(got[i] == values[3], "__shfl_sync, lane %d", i);
    CHECK(got[32 + i] == values[i < 2 ? i : i - 2], "__shfl_up_sync, lane %d", i);
    CHECK(got[64 + i] == values[i % 8 < 6 ? i + 2 : i], "__shfl_down_sync of eight lanes, lane %d", i);
    CHECK(got[96 + i] == values[i ^ 5], "__shfl_xor_sync of sixteen lanes, lane %d", i);
    CHECK(got[128 + i] == i / 8 * 8 + (i + 9) % 8, "__shfl_sync of an integer, lane %d", i);
    if (i < 16) CHECK(got[160 + i] == values[i ^ 1], "__shfl_xor_sync of half a warp, lane %d", i);
  }
  numbers dy(176, 0);
  dy[40] = 1;
  const numbers dx = truth::reverse({{y, dy}}).of(x);
  CHECK(dx[6] == 1 && std::count(dx.begin(), dx.end(), 0) == 31,
        "the gradient of a shuffle goes to its source");
  expect_nothing("shuffles");
}

__global__ void votes(int *y, int n) {
  const int i = threadIdx.x;
  y[i] = __syncthreads_count(i < n);
  y[64 + i] = __syncthreads_or(i == n) * 2 + __syncthreads_and(i < n);
  y[128 + i] = __any_sync(~0u, i == n) * 2 + __all_sync(~0u, i < 40);
  y[192 + i] = (int)__ballot_sync(~0u, i % 8 == 1);
  __syncwarp();
}

static void test_votes() {
  start_again();
  truth::array<int> y("y", 256);
  truth::launch(votes, 1, 64, 0, y, 37);
  for (int i = 0; i < 64; i++) {
    CHECK(y[i] == 37, "__syncthreads_count: %d", y[i]);
    CHECK(y[64 + i] == 2, "__syncthreads_or and _and: %d", y[64 + i]);
    CHECK(y[128 + i] == (i < 32 ? 1 : 2), "__any_sync and __all_sync: %d", y[128 + i]);
    CHECK(y[192 + i] == 0x02020202, "__ballot_sync: %x", unsigned(y[192 + i]));
  }
  expect_nothing("votes");
}

/* Copies through vectors of numbers and of words, shared memory of bytes, and sums by atomics of two kinds. */
template <class T>
__global__ void moves(const T *x, number *y, number *sum, int *count, int n) {
  extern __shared__ char bytes[];
  number *numbers = reinterpret_cast<number *>(bytes + 16);
  const int i = min(threadIdx.x, 1000);
  if (i < 0) printf("%d %g\n", i, x[0]);
  *(uint4 *)(numbers + 4 * i) = *(const uint4 *)(x + 4 * i);
  __syncthreads();
  const float4 four = *(const float4 *)(numbers + (4 * i + 4) % n);
  const float2 two = make_float2(four.x + four.y, __ldg(&four.z) * four.w);
  *(float2 *)(y + 2 * i) = two;
  atomicAdd(&sum[1], two.x);
  int *bits = (int *)&sum[2], seen = *bits, assumed;
  do {
    assumed = seen;
    seen = atomicCAS(bits, assumed, __float_as_int(__int_as_float(assumed) + two.y));
  } while (seen != assumed);
  __shared__ int4 together;
  if (i == 0) together.x = 0, together.y = 7;
  __syncthreads();
  atomicAdd(&together.x, 1);
  __syncthreads();
  const int4 all = together;
  if (all.x == (int)blockDim.x && all.y == 7) atomicInc((unsigned *)count, 100u);
  atomicMax(count + 1, i);
}

static void test_moves() {
  start_again();
  const int threads = 6, n = 4 * threads;
  const numbers values = random_numbers(n, 2);
  truth::array<> x("x", values), y("y", 2 * threads), sum("sum", {0, 0, 0});
  truth::array<int> count("count", numbers{0, 0});
  truth::launch(moves<number>, 1, threads, 16 + 4 * n, x, y, sum, count, n);
  numbers expected_y(2 * threads), expected_sum(3, 0), dx(n, 0);
  for (int i = 0; i < threads; i++) {
    const double *four = &values[(4 * i + 4) % n];
    expected_y[2 * i] = four[0] + four[1];
    expected_y[2 * i + 1] = four[2] * four[3];
    expected_sum[1] += expected_y[2 * i];
    expected_sum[2] += expected_y[2 * i + 1];
    dx[(4 * i + 4) % n] = dx[(4 * i + 5) % n] = 1;
    dx[(4 * i + 6) % n] = four[3];
    dx[(4 * i + 7) % n] = four[2];
  }
  truth::expect("y", y.values(), expected_y);
  truth::expect("sum", sum.values(), expected_sum);
  truth::expect("dx", truth::reverse({{sum, {0, 1, 1}}}).of(x), dx);
  CHECK(count[0] == threads && count[1] == threads - 1, "atomics on integers");
  expect_nothing("moves");
}

__global__ void halves(const half *x, __nv_bfloat16 *y, half2 *pairs) {
  const int i = threadIdx.x;
  half2 pair = __floats2half2_rn(__half2float(x[i]), 2.f);
  pairs[i] = __hmul2(pair, pair);
  y[i] = __float2bfloat16(__half2float(__hfma(x[i], x[i], __float2half(1.f))));
}

static void test_halves() {
  start_again();
  CHECK(half::nearest(1 + 0x1p-11) == 1 && half::nearest(1 + 0x1.8p-10) == 1 + 0x1p-9, "ties go to even");
  CHECK(half::nearest(65519) == 65504 && half::nearest(65520) == INFINITY, "half's largest");
  CHECK(half::nearest(0x1.4p-24) == 0x1p-24 && half::nearest(0x1p-26) == 0, "half's smallest");
  CHECK(truth::bf16::nearest(1.005) == 1.0078125 && truth::bf16::nearest(3e38) < INFINITY, "bf16");
  truth::array<half> x("x", {1.0009765625, -3, 0.3}), pairs("pairs", 6);
  truth::array<truth::bf16> y("y", 3);
  truth::launch(halves, 1, 3, 0, x, y, (half2 *)pairs.data());
  const numbers rounded = x.values(), square = y.values();
  for (int i = 0; i < 3; i++) {
    CHECK(square[i] == truth::bf16::nearest(half::nearest(rounded[i] * rounded[i] + 1)), "y[%d]", i);
    CHECK(near(truth::reverse({{y, {1, 1, 1}}}).of(x)[i], 2 * rounded[i], 1e-15),
          "the derivative ignores rounding");
  }
  CHECK(pairs.values()[1] == 4, "a pair");
  expect_nothing("halves");
}

/* A plain C function, which updates its argument in place. */
static void soften(number *x, int n) {
  number largest = x[0], sum = 0;
  for (int i = 1; i < n; i++) largest = x[i] > largest ? x[i] : largest;
  for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - largest);
  for (int i = 0; i < n; i++) x[i] /= sum;
}

static void test_plain_code() {
  start_again();
  const numbers values = random_numbers(5, 3), dy = random_numbers(5, 4), direction = random_numbers(5, 5);
  truth::array<> x("x", values);
  truth::call(soften, x, 5);
  const numbers p = x.values(), dx = truth::reverse({{x, dy}}).of(x),
                along = truth::forward({{x, direction}}).of(x);
  double delta = 0, one_way = 0, other_way = 0;
  for (int i = 0; i < 5; i++) delta += p[i] * dy[i];
  for (int i = 0; i < 5; i++) {
    CHECK(near(dx[i], p[i] * (dy[i] - delta), 1e-14), "softmax in place, %d", i);
    one_way += dx[i] * direction[i];
    other_way += dy[i] * along[i];
  }
  CHECK(near(one_way, other_way, 1e-14), "forward and reverse mode: %.17g and %.17g", one_way, other_way);
  expect_nothing("plain code");
}

static void test_arithmetic_of_f32() {
  start_again();
  truth::options().arithmetic = truth::settings::f32;
  truth::array<> x("x", {0.1, 0.2});
  CHECK((x[0] + x[1]).value() == double(0.1f + 0.2f), "a sum");
  CHECK(expf(x[0]).value() == double(float(std::exp(double(0.1f)))), "a function");
}

/* ---- findings ---- */

static void expect_text(size_t i, const char *kind, const char *text) {
  CHECK(truth::findings().size() > i, "expected \"%s: %s\"", kind, text);
  if (truth::findings().size() <= i) return;
  CHECK_TEXT(truth::findings()[i].kind.c_str(), kind);
  CHECK_TEXT(truth::findings()[i].text.c_str(), text);
}

static void expect_only(const char *kind, const char *text, long more) {
  expect_text(0, kind, text);
  CHECK(truth::findings().size() == 1, "%zu findings beside \"%s\"", truth::findings().size() - 1, text);
  CHECK(truth::findings()[0].more == more, "%ld more of \"%s\"", truth::findings()[0].more, text);
}

enum {
  RACE_IN_WARP,
  NO_RACE_IN_WARP,
  RACE_OF_BLOCKS,
  ORDERED_BLOCKS,
  UNWRITTEN_SHARED,
  BEFORE_BEGIN,
  BEHIND_SHARED
};

__global__ void misbehaves(const number *x, number *y, int *turn, int how) {
  __shared__ number row[64];
  extern __shared__ char bytes[];
  number *tile = (number *)bytes;
  const int i = threadIdx.x;
  switch (how) {
    case RACE_IN_WARP:
    case NO_RACE_IN_WARP:
      row[i] = 0.f;
      __syncthreads();
      row[i] = x[i];
      if (how == NO_RACE_IN_WARP) __syncwarp();
      y[i] = row[i / 32 * 32 + (i + 1) % 32];
      break;
    case RACE_OF_BLOCKS: y[0] = x[i]; break;
    case ORDERED_BLOCKS:
      if (i == 0) {
        __threadfence();
        atomicAdd(turn, 1);
        y[0] = x[blockIdx.x];
      }
      break;
    case UNWRITTEN_SHARED:
      if (blockIdx.x == 0) row[i] = x[i];
      __syncthreads();
      y[64 * blockIdx.x + i] = row[i];
      break;
    case BEFORE_BEGIN: y[i] = x[i - 1]; break;
    case BEHIND_SHARED: tile[i] = x[i]; break;
  }
}

static void misbehave(int how, int blocks, int threads) {
  start_again();
  truth::array<> x("x", random_numbers(64, 1)), y("y", 128);
  truth::array<int> turn("turn", numbers{0});
  truth::launch(misbehaves, blocks, threads, 8, x, y, turn, how);
}

static void test_findings() {
  misbehave(RACE_IN_WARP, 1, 64);
  expect_only("race",
              "row[1] is read by thread (0, 0, 0) of block (0, 0, 0) and written by thread (1, 0, 0) of block "
              "(0, 0, 0), without a barrier between them",
              63);
  misbehave(NO_RACE_IN_WARP, 1, 64);
  expect_nothing("a row that warps read after __syncwarp");
  misbehave(RACE_OF_BLOCKS, 2, 1);
  expect_only("race",
              "y[0] is written by thread (0, 0, 0) of block (0, 0, 0) and written by thread (0, 0, 0) of block "
              "(1, 0, 0), and nothing orders blocks",
              0);
  misbehave(ORDERED_BLOCKS, 2, 2);
  expect_nothing("blocks that an atomic orders");
  misbehave(UNWRITTEN_SHARED, 2, 2);
  expect_only("unwritten", "thread (0, 0, 0) of block (1, 0, 0) reads row[0], which nobody wrote", 1);
  misbehave(BEFORE_BEGIN, 1, 3);
  expect_only("out of bounds read",
              "x[-1] is outside of x, which has 64 elements: thread (0, 0, 0) of block (0, 0, 0)", 0);
  misbehave(BEHIND_SHARED, 1, 3);
  expect_only("out of bounds write",
              "bytes[2] is outside of bytes, which has 2 elements: thread (2, 0, 0) of block (0, 0, 0)", 0);
  misbehave(RACE_IN_WARP, 1, 2000);
  expect_only("launch", "2000 threads a block (1 to 1024) and 8 bytes of shared memory (up to 232448)", 0);
  misbehave(RACE_IN_WARP, 0, 32);
  expect_only("launch", "a grid of 0, 1, 1 blocks (at least 1 each)", 0);
}

/* Races that other accesses stand between, and the same with barriers. */
enum {
  ZERO_THEN_ADD,
  ZERO_THEN_ADD_OF_BLOCKS,
  READ_THEN_ADD,
  IN_PLACE_OVER_BLOCKS,
  READ_BEHIND_ANOTHER_WARPS,
  READ_ZERO_AND_ADD_IN_TURN
};

__global__ void races(const number *x, number *y, number *z, int how) {
  __shared__ number row[1];
  const int i = threadIdx.x;
  number seen = 0.f;
  switch (how) {
    case ZERO_THEN_ADD:
      if (i == 0) y[0] = 0.f;
      atomicAdd(&y[0], x[i]);
      break;
    case ZERO_THEN_ADD_OF_BLOCKS:
      if (blockIdx.x == 0 && i == 0) y[0] = 0.f;
      __syncthreads();
      atomicAdd(&y[0], x[i]);
      break;
    case READ_THEN_ADD:
      if (i == 0) z[0] = y[0];
      atomicAdd(&y[0], x[i]);
      break;
    case IN_PLACE_OVER_BLOCKS:
      z[blockIdx.x] = y[0];
      if (blockIdx.x == 1) y[0] = 2.f * y[0];
      break;
    case READ_BEHIND_ANOTHER_WARPS:
      if (i == 0) row[0] = x[0];
      __syncthreads();
      if (i == 0 || i == 40) seen = row[0];
      if (i < 32) {
        /* Thread 1 reads after thread 40, which nothing here orders before the write. */
        __shfl_sync(~0u, seen, 0);
        if (i == 1) seen = row[0];
        __syncwarp();
        if (i == 0) row[0] = 5.f;
      }
      z[i] = seen;
      break;
    case READ_ZERO_AND_ADD_IN_TURN:
      if (i == 0) z[0] = y[0];
      __syncthreads();
      atomicAdd(&y[0], x[i]);
      __syncthreads();
      if (i == 0) y[0] = 0.f;
      __syncthreads();
      atomicAdd(&y[0], x[i]);
      if (i < 32) __syncwarp();
      atomicAdd(&y[0], x[i]);
      break;
  }
}

static void race(int how, int blocks, int threads) {
  start_again();
  truth::array<> x("x", random_numbers(64, 1)), y("y", {3}), z("z", 64);
  truth::launch(races, blocks, threads, 0, x, y, z, how);
}

static void test_races() {
  /* An addition reads and writes, and each of the two races. */
  race(ZERO_THEN_ADD, 1, 64);
  expect_only("race",
              "y[0] is written by thread (0, 0, 0) of block (0, 0, 0) and read by thread (1, 0, 0) of block "
              "(0, 0, 0), without a barrier between them",
              125);
  race(ZERO_THEN_ADD_OF_BLOCKS, 2, 2);
  expect_only("race",
              "y[0] is written by thread (0, 0, 0) of block (0, 0, 0) and read by thread (0, 0, 0) of block "
              "(1, 0, 0), and nothing orders blocks",
              3);
  race(READ_THEN_ADD, 1, 64);
  expect_only("race",
              "y[0] is read by thread (0, 0, 0) of block (0, 0, 0) and written by thread (1, 0, 0) of block "
              "(0, 0, 0), without a barrier between them",
              62);
  race(IN_PLACE_OVER_BLOCKS, 2, 1);
  expect_only("race",
              "y[0] is read by thread (0, 0, 0) of block (0, 0, 0) and written by thread (0, 0, 0) of block "
              "(1, 0, 0), and nothing orders blocks",
              0);
  race(READ_BEHIND_ANOTHER_WARPS, 1, 64);
  expect_only("race",
              "row[0] is read by thread (40, 0, 0) of block (0, 0, 0) and written by thread (0, 0, 0) of block "
              "(0, 0, 0), without a barrier between them",
              0);
  race(READ_ZERO_AND_ADD_IN_TURN, 1, 64);
  expect_nothing("reads, zeros and additions with barriers between them");
}

__global__ void leaves_early(number *y, int n, int delta) {
  if ((int)threadIdx.x >= n) return;
  __syncthreads();
  y[threadIdx.x] = __shfl_down_sync(~0u, 1.f, delta);
}

static void test_early_return() {
  start_again();
  truth::array<> y("y", 8);
  truth::launch(leaves_early, 1, 8, 0, y, 5, 0);
  CHECK(truth::findings().size() == 1 && truth::findings()[0].kind == "divergent barrier",
        "a thread that left");
  start_again();
  truth::options().allow_early_return = true;
  truth::launch(leaves_early, 1, 8, 0, y, 5, 0);
  expect_nothing("threads that may leave");
  truth::launch(leaves_early, 1, 8, 0, y, 5, 1);
  CHECK(truth::findings().size() == 1 && truth::findings()[0].kind == "unwritten",
        "lane 4 shuffles from a lane that has left, and nothing else is found");
}

/* ---- the command line ---- */

__global__ void square(const number *x, number *y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * x[i];
}

__global__ void square_backward(const number *x, const number *dy, number *dx, number factor) {
  dx[threadIdx.x] = factor * x[threadIdx.x] * dy[threadIdx.x];
}

template <class T>
__global__ void square_narrow(const T *x, T *y) {
  const int i = threadIdx.x;
  y[i] = T(number(x[i]) * number(x[i]));
}

template <class T>
__global__ void square_narrow_backward(const T *x, const T *dy, T *dx, number factor) {
  const int i = threadIdx.x;
  dx[i] = T(factor * number(x[i]) * number(dy[i]));
}

__global__ void largest(const number *x, int *where, number *y) {
  where[0] = 0;
  for (int i = 1; i < 3; i++)
    if (x[i] > x[where[0]]) where[0] = i;
  y[0] = x[where[0]];
}

__global__ void largest_backward(const unsigned *where, const number *dy, number *dx) { dx[where[0]] = dy[0]; }

static void check_program(std::vector<std::string> words, int expected_status, const char *expected_text,
                          const std::string &expected_error = "") {
  start_again();
  words.insert(words.begin(), "program");
  std::vector<char *> pointers;
  for (std::string &word : words) pointers.push_back(&word[0]);
  truth::options().out = tmpfile();
  const auto kernels = truth::make_runnables(
      "square, square_backward, square<half>, square_backward<half>, square<bf16>, square_backward<bf16>, "
      "largest, largest_backward",
      square, square_backward, square_narrow<half>, square_narrow_backward<half>, square_narrow<truth::bf16>,
      square_narrow_backward<truth::bf16>, largest, largest_backward);
  std::string error;
  const int status = truth::status_of(
      [&] { return truth::run_command(truth::parse(int(words.size()), pointers.data()), kernels); }, error);
  CHECK_TEXT(error.c_str(), expected_error.c_str());
  CHECK(status == expected_status, "status %d, expected %d", status, expected_status);
  CHECK_TEXT(truth::findings().empty() ? "" : truth::findings()[0].text.c_str(), expected_text);
}

static void test_command(const std::string &directory) {
  const std::string x = directory + "/truth_x.txt", dy = directory + "/truth_dy.f64";
  std::ofstream(x) << "1 2.5 -3";
  truth::write_numbers(dy, {1, 0.5, 2});
  std::vector<std::string> words = {"--array",    "x=" + x,
                                    "--array",    "dy=" + dy,
                                    "--array",    "y=3",
                                    "--array",    "dx=3:0",
                                    "--forward",  "square block=2 args=x,y,3",
                                    "--seed",     "y=dy",
                                    "--gradient", "x=dx",
                                    "--write",    directory,
                                    "--backward", "square_backward block=3 args=x,dy,dx,2"};
  check_program(words, 0, "");
  CHECK(truth::read_numbers(directory + "/y.f64") == (numbers{1, 6.25, 9}), "what --write writes of an output");
  CHECK(truth::read_numbers(directory + "/d_x.f64") == (numbers{2, 2.5, -12}), "and of a gradient");
  words.back() = "square_backward block=3 args=x,dy,dx,3";
  check_program(
      words, 1,
      "gradient of x is wrong, most at 2: expected -12, got -18; the error is 5.00e-01 of the largest, "
      "1.00e-06 allowed");
}

/* Kernels of 16 bits, whose d(loss)/d(y) is rounded as they read it. */
static void test_command_of_halves(const std::string &directory) {
  const std::string x = directory + "/truth_x.txt", dy = directory + "/truth_dy.txt";
  std::ofstream(x) << "0.1 2.3 -3.7";
  std::ofstream(dy) << "0.3 0.7 -1.9";
  for (const std::string type : {"<half>", "<bf16>"}) {
    std::vector<std::string> words = {"--array",    "x=" + x,
                                      "--array",    "dy=" + dy,
                                      "--array",    "y=3",
                                      "--array",    "dx=3",
                                      "--forward",  "square" + type + " block=3 args=x,y",
                                      "--seed",     "y=dy",
                                      "--gradient", "x=dx",
                                      "--backward", "square_backward" + type + " block=3 args=x,dy,dx,2",
                                      "--tolerance"};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), words.begin(), words.end());
      return more;
    };
    /* Half a place of the largest: of dx alone, not of the dy that it is made of. */
    check_program(with({type == "<half>" ? "0.0005" : "0.004"}), 0, "");
    check_program(with({"1e-6", "--unrounded-halves"}), 0, "");
    words[15] = "square_backward" + type + " block=3 args=x,dy,dx,1";
    check_program(with({"1e-6", "--unrounded-halves"}), 1,
                  "gradient of x is wrong, most at 2: expected 14.06, got 7.03; the error is 5.00e-01 of the "
                  "largest, 1.00e-06 allowed");
  }
}

static void test_refused_commands(const std::string &directory) {
  const std::string x = directory + "/truth_x.txt";
  std::vector<std::string> words = {"--array", "x=" + x, "--array",   "where=1",
                                    "--array", "y=1",    "--array",   "dy=1:0",
                                    "--array", "dx=3:0", "--forward", "largest args=x,where,y",
                                    "--seed",  "y=dy",   "--gradient"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    return more;
  };
  check_program(with({"x"}), 2, "", "--gradient x: expected an array to compare with, or --write");
  check_program(with({"x=dx", "--backward", "largest_backward args=where,dy,dx"}), 2, "",
                "where: expected an array of int, as before, got one of unsigned");
}

/* ---- memory ---- */

static void test_memory() {
  start_again();
  truth::array<> x("x", random_numbers(64, 1)), y("y", 64);
  const size_t before = truth::the_tape().nodes.size();
  truth::launch(square, 1, 32, 0, x, y, 64);
  CHECK(truth::the_tape().nodes.size() - before == 64,
        "a number on the tape for each product, none for copies");
  CHECK(truth::bytes_per_operation == 32, "%zu bytes", truth::bytes_per_operation);
}

int main(int count, char **words) {
  test_functions();
  test_shuffles();
  test_votes();
  test_moves();
  test_halves();
  test_plain_code();
  test_arithmetic_of_f32();
  test_findings();
  test_races();
  test_early_return();
  test_command(count > 1 ? words[1] : ".");
  test_command_of_halves(count > 1 ? words[1] : ".");
  test_refused_commands(count > 1 ? words[1] : ".");
  test_memory();
  return report();
}
