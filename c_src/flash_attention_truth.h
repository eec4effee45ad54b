/*
 * flash_attention_truth.h: the derivative of a kernel, from the kernel itself.
 *
 * Whoever writes a forward and a backward kernel by hand can run both here, on the CPU, as they stand. The
 * numbers of the forward remember how they came about, so that the exact gradient of *that algorithm* is there
 * to hold the backward against. What a GPU would pass over in silence is named: memory that nobody wrote,
 * races, barriers that some threads do not reach, accesses out of bounds. C++17, one file, nothing to link, no
 * GPU.
 *
 *     #define TRUTH_FLOAT                        // float means truth::real from here on
 *     #include "flash_attention_truth.h"
 *     #include "my_kernels.cu"                   // __global__ void scale(x, y, a, n)
 *
 *     int main() {
 *       truth::array<> x("x", {1, 2, 3}), y("y", 3);
 *       truth::launch(scale, 1, 32, 0, x, y, 2.0, 3);               // kernel<<<1, 32, 0>>>(x, y, 2.0, 3)
 *       truth::gradients all = truth::reverse({{y, {1, 0, 0}}});    // d(loss)/d(y)
 *       std::vector<double> dx = all.of(x);                         // d(loss)/d(x): 2 0 0
 *       return truth::report();                                     // 0 where nothing is found
 *     }
 *
 *     c++ -std=c++17 -O1 -ftrivial-auto-var-init=pattern -fsanitize=bounds program.cpp
 *
 * Neither of the two last flags is needed. With the first, which GCC has from 12 on and Clang from 8 on,
 * variables that nobody initialised are recognised; with the second, indices into arrays of known size. Clang
 * then needs -fno-sanitize-link-runtime, too.
 *
 * Numbers. truth::real has the size of a float and is the name of a number on a tape: 32 bytes for every
 * operation that is computed, and none for copies, loads and stores. So vectors (float2, float4, uint4), shared
 * memory of char[] and offsets in bytes work as on a GPU. Values and derivatives are doubles;
 * truth::options().arithmetic rounds every value to f32 instead. Loops, branches on data, updates in place and
 * atomics are simply recorded. half, __half and __nv_bfloat16 are rounded to, and the derivative of rounding is
 * 1; each takes four bytes here, so that two of them are not a word. A gradient that a kernel stores in them is
 * as far from the exact one as they round: truth::options().round_halves = false rounds none of them, so that
 * what is left is what the kernel does. The bits of a number cannot be looked at: __float_as_int gives its
 * name, which is enough to carry it through atomicCAS. Conversions to bool, int and double are explicit and end
 * the derivative.
 *
 * Gradients. truth::reverse goes over the tape once and gives d(loss)/d(every number); `of(array)` gives those
 * of what the array was filled with. truth::forward gives the derivative of every number along one direction.
 * truth::clear_tape() forgets all numbers; arrays must be filled again afterwards.
 *
 * Kernels. truth::launch(kernel, grid, block, shared_bytes, arguments...) runs the blocks one after another,
 * and the threads of a block as fibers that change at barriers, votes and shuffles. truth::call(function,
 * arguments...) runs a plain C or C++ function in the same way, as one thread. Threads of different blocks
 * cannot wait for each other. Inline PTX, tensor cores, asynchronous copies and volatile numbers are not there;
 * variables that are __device__ are, but nobody watches them. There is no `kernel<<<...>>>`: keep kernels in a
 * file of their own, or what a host compiler does not understand within #ifdef __CUDACC__. Shared memory whose
 * size the launch gives needs a definition, once, outside of functions:
 *
 *     TRUTH_DYNAMIC_SHARED(float, tile);         // for `extern __shared__ float tile[];`
 *
 * Findings. Each names the array and the index, the thread and the block. Accesses are seen where numbers of
 * this header are read and written; integers are not watched. A race is an access to a number that another
 * thread wrote, or a write of one that another read, without a barrier between the two, unless both are atomic.
 * __syncwarp orders the threads of a warp; shuffles and votes order nothing. Blocks are ordered by nothing but
 * atomics on integers. Of each kind of finding about each array the first is told, and how many more there
 * were.
 *
 * Command line. TRUTH_MAIN(forward, backward) or TRUTH_MAIN(forward) makes a program of kernels; see the end of
 * this file, and `mix flash_attention.truth`, which writes such programs.
 *
 * From C, and from any language that calls C. TRUTH_EXPORT(forward, backward) makes a shared library of kernels
 * instead, whose functions are declared first in this file, which C may include, too.
 *
 * One thread of the host at a time may use this header.
 */
#ifndef FLASH_ATTENTION_TRUTH_H
#define FLASH_ATTENTION_TRUTH_H

#include <stddef.h>

/* ---------------------------------------------------------------------------------------------------
 * C: what a shared library exports that is made of a C++ file with TRUTH_EXPORT(kernel, ...) in it:
 *
 *     c++ -std=c++17 -O1 -shared -fPIC -fvisibility=hidden -o libkernels.so kernels.cpp
 *
 *     truth_array("x", x, 3);                                          // double x[3]
 *     truth_array("y", NULL, 3);
 *     truth_launch("scale grid=1 block=32 args=x,y,2,3");              // scale<<<1, 32>>>(x, y, 2, 3)
 *     truth_values("y", y, 3);
 *     truth_seed("y", dy, 3);                                          // d(loss)/d(y)
 *     truth_gradient("x", dx, 3);                                      // d(loss)/d(x)
 *     truth_direction("x", direction, 3);
 *     truth_tangent("y", along, 3);                                    // d(y) along the direction
 *     puts(truth_findings());
 *
 * The status that a function returns is 0, or 2 where the call is wrong, and truth_error() says why;
 * truth_launch also returns 1, where something has been found since truth_clear. A library has one set of
 * arrays and one tape, and the thread that loads it must make all calls. Two libraries can be in one program
 * only where dlopen loads them, with RTLD_LOCAL.
 * ------------------------------------------------------------------------------------------------- */

#define TRUTH_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* An array of count elements, of the type that the kernel has which takes it first; a launch that takes it as
 * another is refused. The values are copied; NULL is for an output, which nobody has written. Replaces an array
 * of the same name. */
TRUTH_API int truth_array(const char *name, const double *values, size_t count);

/* Runs a kernel: "NAME grid=X,Y,Z block=X,Y,Z shared=BYTES args=..." with names of arrays for pointers and
 * numbers for the rest. What is left out is 1, and 0 for shared. */
TRUTH_API int truth_launch(const char *line);

/* What is in the array of count elements now; NaN where nobody wrote. */
TRUTH_API int truth_values(const char *name, double *values, size_t count);

/* d(loss)/d(what is in the output now); 0 for arrays without a call. Another call replaces it. To be called
 * after the forward's launches and before those that change the output, and again after each new run of them,
 * whose numbers are others. */
TRUTH_API int truth_seed(const char *output, const double *gradient, size_t count);

/* d(loss)/d(what the input was filled with). */
TRUTH_API int truth_gradient(const char *input, double *gradient, size_t count);

/* The direction of what the input was filled with; 0 for arrays without a call. Another call replaces it. To be
 * called after a launch that takes the input, and again where the input has been filled anew. */
TRUTH_API int truth_direction(const char *input, const double *direction, size_t count);

/* The derivative of what is in the output now, along the direction. */
TRUTH_API int truth_tangent(const char *output, double *tangent, size_t count);

/* An option of the command line: "--f32", "--early-return" or "--unrounded-halves". */
TRUTH_API int truth_option(const char *option);

/* Forgets arrays, numbers, seeds, directions, findings and options. */
TRUTH_API int truth_clear(void);

/* Everything found since truth_clear, in lines of text; empty where nothing was. Valid until the next call. */
TRUTH_API const char *truth_findings(void);

/* Why the last call that returned 2 did. Valid until the next that does. */
TRUTH_API const char *truth_error(void);

#ifdef __cplusplus
}

#include <algorithm>
#include <array>
#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#if defined(__linux__)
#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#endif

namespace truth {

struct settings {
  enum { f64, f32 } arithmetic = f64; /* what every computed value is rounded to */
  bool round_halves = true;           /* whether half and bf16 round their values */
  bool allow_early_return = false;    /* whether threads may leave a kernel before barriers of others */
  FILE *out = stdout;                 /* where report() prints */
};

inline settings &options() {
  static settings all;
  return all;
}

/* ---------------------------------------------------------------------------------------------------
 * The tape: every number that was computed, with its derivatives by the at most two that it was made of.
 * ------------------------------------------------------------------------------------------------- */

using name = uint32_t; /* a place on the tape */

constexpr name zero = 0;                /* memory set to 0 bytes holds the number 0, as on a GPU */
constexpr name unwritten = 0xfefefefeu; /* what -ftrivial-auto-var-init=pattern fills variables with */

struct node {
  double value, by[2];
  name from[2];
};

struct tape {
  std::vector<node> nodes{node{0, {0, 0}, {zero, zero}}};
  struct { /* of constants, which kernels take from literals again and again */
    double value;
    name where;
  } recent[256] = {};

  name push(double value, double by_a, name a, double by_b = 0, name b = zero) {
    if (nodes.size() >= unwritten >> 1) {
      std::fprintf(stderr, "truth: the tape is full: choose a smaller case\n");
      std::abort();
    }
    nodes.push_back({options().arithmetic == settings::f32 ? float(value) : value, {by_a, by_b}, {a, b}});
    return name(nodes.size() - 1);
  }

  name constant(double value) {
    if (value == 0 && !std::signbit(value)) return zero;
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    auto &slot = recent[bits * 0x9e3779b97f4a7c15u >> 56];
    if (slot.where == zero || std::memcmp(&slot.value, &value, sizeof value))
      slot = {value, push(value, 0, zero)};
    return slot.where;
  }
};

inline tape &the_tape() {
  static tape tape;
  return tape;
}

inline void clear_tape() { the_tape() = tape(); }

/* Bytes that the tape takes now, and those of one operation. */
inline size_t tape_bytes() { return the_tape().nodes.size() * sizeof(node); }
constexpr size_t bytes_per_operation = sizeof(node);

/* What watches memory; below. Plain words may be integers, whose writes into shared memory nobody sees. */
enum class place { variable, memory, nowhere };
place note_read(const void *address, size_t words, bool atomic = false, bool plain = false);
place note_write(const void *address, size_t words, bool atomic = false);
void note_unwritten_variable();

class real {
 public:
  real() = default; /* as of a float: nothing is initialised */
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  real(T value) : where(the_tape().constant(double(value))) {}
  real(const real &other) : where(other.load().where_) {}
  real &operator=(const real &other) { return store(other.load()); }

  static real at(name where) {
    real x;
    x.where = where;
    return x;
  }

  /* The number's place on the tape, as something that computes with it reads it. */
  name use() const {
    loaded read = load();
    if (read.where_ >= the_tape().nodes.size()) {
      note_unwritten_variable();
      return not_a_number();
    }
    return read.where_;
  }

  /* What an array that is filled with x has. */
  static double nearest(double x) { return options().arithmetic == settings::f32 ? float(x) : x; }

  double value() const { return the_tape().nodes[use()].value; }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  explicit operator T() const {
    return T(value());
  }

 private:
  name where;

  struct loaded {
    name where_;
  };

  static name not_a_number() { return the_tape().constant(std::numeric_limits<double>::quiet_NaN()); }

  /* What a copy reads. Copying a variable that nobody wrote is no use of it; memory that nobody wrote was found
   * fault with, and is not a number from here on. */
  loaded load() const {
    switch (note_read(this, 1)) {
      case place::variable: return {where};
      case place::memory: return {where < the_tape().nodes.size() ? where : not_a_number()};
      default: return {not_a_number()};
    }
  }

  real &store(loaded read) {
    const place to = note_write(this, 1);
    if (to == place::memory && read.where_ >= the_tape().nodes.size()) {
      note_unwritten_variable();
      read.where_ = not_a_number();
    }
    if (to != place::nowhere) where = read.where_;
    return *this;
  }
};
static_assert(sizeof(real) == 4 && std::is_trivially_default_constructible_v<real>, "numbers lie as floats do");

/* ---------------------------------------------------------------------------------------------------
 * Arithmetic: each operation is pushed with its derivatives. x and y are the operands' values, z the result.
 * ------------------------------------------------------------------------------------------------- */

inline double value_at(name where) { return the_tape().nodes[where].value; }

#define TRUTH_UNARY(function, result, derivative)           \
  inline real function(const real &a) {                     \
    const name where = a.use();                             \
    const double x = value_at(where), z = result;           \
    (void)x;                                                \
    return real::at(the_tape().push(z, derivative, where)); \
  }

#define TRUTH_BINARY(function, result, by_x, by_y)                      \
  inline real function(const real &a, const real &b) {                  \
    const name first = a.use(), second = b.use();                       \
    const double x = value_at(first), y = value_at(second), z = result; \
    (void)y;                                                            \
    return real::at(the_tape().push(z, by_x, first, by_y, second));     \
  }

TRUTH_BINARY(operator+, x + y, 1, 1)
TRUTH_BINARY(operator-, x - y, 1, -1)
TRUTH_BINARY(operator*, x *y, y, x)
TRUTH_BINARY(operator/, x / y, 1 / y, -z / y)
TRUTH_UNARY(operator-, -x, -1)
inline real operator+(const real &a) { return a; }

inline real &operator+=(real &a, const real &b) { return a = a + b; }
inline real &operator-=(real &a, const real &b) { return a = a - b; }
inline real &operator*=(real &a, const real &b) { return a = a * b; }
inline real &operator/=(real &a, const real &b) { return a = a / b; }
inline real &operator++(real &a) { return a = a + 1; }
inline real &operator--(real &a) { return a = a - 1; }
inline real operator++(real &a, int) {
  real before = a;
  a = a + 1;
  return before;
}

#define TRUTH_COMPARISON(operator) inline bool operator(const real &a, const real &b)
TRUTH_COMPARISON(operator<) { return a.value() < b.value(); }
TRUTH_COMPARISON(operator>) { return a.value() > b.value(); }
TRUTH_COMPARISON(operator<=) { return a.value() <= b.value(); }
TRUTH_COMPARISON(operator>=) { return a.value() >= b.value(); }
TRUTH_COMPARISON(operator==) { return a.value() == b.value(); }
TRUTH_COMPARISON(operator!=) { return a.value() != b.value(); }
inline bool operator!(const real &a) { return a.value() == 0; }
#undef TRUTH_COMPARISON

TRUTH_UNARY(exp, std::exp(x), z)
TRUTH_UNARY(exp2, std::exp2(x), z *M_LN2)
TRUTH_UNARY(exp10, std::pow(10.0, x), z *M_LN10)
TRUTH_UNARY(expm1, std::expm1(x), z + 1)
TRUTH_UNARY(log, std::log(x), 1 / x)
TRUTH_UNARY(log2, std::log2(x), 1 / (x * M_LN2))
TRUTH_UNARY(log10, std::log10(x), 1 / (x * M_LN10))
TRUTH_UNARY(log1p, std::log1p(x), 1 / (1 + x))
TRUTH_UNARY(sqrt, std::sqrt(x), 0.5 / z)
TRUTH_UNARY(rsqrt, 1 / std::sqrt(x), -0.5 * z / x)
TRUTH_UNARY(cbrt, std::cbrt(x), z / (3 * x))
TRUTH_UNARY(sin, std::sin(x), std::cos(x))
TRUTH_UNARY(cos, std::cos(x), -std::sin(x))
TRUTH_UNARY(tan, std::tan(x), 1 + z * z)
TRUTH_UNARY(atan, std::atan(x), 1 / (1 + x * x))
TRUTH_UNARY(asin, std::asin(x), 1 / std::sqrt(1 - x * x))
TRUTH_UNARY(acos, std::acos(x), -1 / std::sqrt(1 - x * x))
TRUTH_UNARY(sinh, std::sinh(x), std::cosh(x))
TRUTH_UNARY(cosh, std::cosh(x), std::sinh(x))
TRUTH_UNARY(tanh, std::tanh(x), 1 - z * z)
TRUTH_UNARY(erf, std::erf(x), M_2_SQRTPI *std::exp(-x *x))
TRUTH_UNARY(erfc, std::erfc(x), -M_2_SQRTPI *std::exp(-x *x))
TRUTH_UNARY(fabs, std::fabs(x), x < 0 ? -1 : 1)
TRUTH_UNARY(saturate, std::fmin(std::fmax(x, 0), 1), x > 0 && x < 1 ? 1 : 0)
TRUTH_UNARY(reciprocal, 1 / x, -z *z)
TRUTH_UNARY(floor, std::floor(x), 0)
TRUTH_UNARY(ceil, std::ceil(x), 0)
TRUTH_UNARY(trunc, std::trunc(x), 0)
TRUTH_UNARY(round, std::round(x), 0)
TRUTH_UNARY(rint, std::nearbyint(x), 0)

TRUTH_BINARY(fmax, std::fmax(x, y), z == x ? 1 : 0, z == x ? 0 : 1)
TRUTH_BINARY(fmin, std::fmin(x, y), z == x ? 1 : 0, z == x ? 0 : 1)
TRUTH_BINARY(pow, std::pow(x, y), y == 0 ? 0 : y * std::pow(x, y - 1), x > 0 ? z * std::log(x) : 0)
TRUTH_BINARY(atan2, std::atan2(x, y), y / (x * x + y * y), -x / (x * x + y * y))
TRUTH_BINARY(hypot, std::hypot(x, y), x / z, y / z)
TRUTH_BINARY(fmod, std::fmod(x, y), 1, -std::trunc(x / y))
TRUTH_BINARY(copysign, std::copysign(x, y), std::signbit(x) == std::signbit(y) ? 1 : -1, 0)
#undef TRUTH_UNARY
#undef TRUTH_BINARY

inline real fma(const real &a, const real &b, const real &c) { return a * b + c; }
inline real max(const real &a, const real &b) { return fmax(a, b); }
inline real min(const real &a, const real &b) { return fmin(a, b); }
inline real abs(const real &a) { return fabs(a); }
inline bool isnan(const real &a) { return std::isnan(a.value()); }
inline bool isinf(const real &a) { return std::isinf(a.value()); }
inline bool isfinite(const real &a) { return std::isfinite(a.value()); }
inline bool signbit(const real &a) { return std::signbit(a.value()); }

/* The tape's value is replaced by a rounded one, and the derivative is that of the identity. */
inline real replace_value(const real &a, double value) { return real::at(the_tape().push(value, 1, a.use())); }

}  // namespace truth

/* CUDA's vectors of sizes. */
struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

namespace truth {

/* ---------------------------------------------------------------------------------------------------
 * Findings
 * ------------------------------------------------------------------------------------------------- */

struct finding {
  std::string kind; /* "race", "divergent barrier", "unwritten", "out of bounds read", "... write", "... index",
                       "wrong" */
  std::string array; /* or the variable, or the barrier's line; may be empty */
  std::string text;  /* a whole sentence: which element, which thread, which block */
  long more;         /* how many of the same kind about the same array followed */
};

inline std::vector<finding> &findings() {
  static std::vector<finding> all;
  return all;
}

inline bool found(const std::string &kind, const std::string &array) {
  for (const finding &f : findings())
    if (f.kind == kind && f.array == array) return true;
  return false;
}

inline void add_finding(const char *kind, const std::string &array, const std::string &text) {
  for (finding &f : findings())
    if (f.kind == kind && f.array == array) {
      f.more++;
      return;
    }
  findings().push_back({kind, array, text, 0});
}

/* Every finding, in lines. */
inline std::string text_of_findings() {
  std::string all;
  for (const finding &f : findings()) {
    all += f.kind + ": " + f.text + "\n";
    if (f.more) all += "  and " + std::to_string(f.more) + " more of these\n";
  }
  return all;
}

/* 0 where nothing was found, as a program may return it, and else 1. */
inline int status_of_findings() { return findings().empty() ? 0 : 1; }

inline int report() {
  std::fputs(text_of_findings().c_str(), options().out);
  return status_of_findings();
}

inline std::string text(const char *format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

inline std::string text(uint3 i) { return text("(%u, %u, %u)", i.x, i.y, i.z); }

/* ---------------------------------------------------------------------------------------------------
 * Threads of the block that runs
 * ------------------------------------------------------------------------------------------------- */

constexpr unsigned warp_size = 32;
constexpr size_t stack_bytes = 256 << 10;

enum class state { ready, at_barrier, at_collective, left };

struct fiber {
  ucontext_t context;
  uint3 index;
  unsigned number; /* linear index in the block */
  state at;
  int line; /* of the barrier or collective that it waits at */
};

/* Something that several threads do together: what each brings, and what each is given. */
struct exchange {
  const char *operation;
  uint32_t mask;    /* lanes of a warp that take part */
  uint64_t brought; /* a predicate, or a number's place on the tape */
  unsigned source;  /* lane whose number is wanted */
  uint64_t given;
};

struct warp {
  uint32_t phase = 0; /* how often its threads were ordered */
  uint32_t arrived = 0;
  exchange of[warp_size];
};

struct access {
  uint32_t block = 0; /* serial number; 0: there was none */
  uint32_t phase = 0, warp_phase = 0;
  uint16_t thread = 0;
  bool atomic = false;
};

/* The accesses to one word that a later one may race with. */
struct cell {
  access write, read, other_read;
  access plain_write, plain_read; /* the last not atomic: atomic ones that follow hide no race with them */
};

struct region {
  std::string name;
  const char *begin, *end; /* what may be accessed */
  const char *low, *high;  /* what can only be meant to be this array */
  size_t element;
  bool shared, numbers;
  std::vector<cell> cells;

  bool has(const void *p) const { return p >= low && p < high; }
};

struct machine {
  std::map<int, region> arrays; /* by number; what the launch watches beside the two kinds of shared memory */
  std::vector<region> dynamic_shared;
  region static_shared = {};
  region *recent = nullptr;
  int next_array = 0;

  char *stacks = nullptr;
  size_t num_stacks = 0;
  std::vector<fiber> fibers;
  std::vector<warp> warps;
  fiber *current = nullptr;
  ucontext_t scheduler;
  std::function<void()> kernel;
  int predicates = 0, predicate_count = 0; /* of __syncthreads_count and its like */

  uint3 grid = {1, 1, 1}, block = {0, 0, 0};
  uint32_t serial = 0, first_serial = 1; /* of this block, and of this launch's first */
  uint32_t phase = 0;
  bool ordered_after_others = false; /* by an atomic on an integer */

  bool is_variable(const void *p) const { return size_t((const char *)p - stacks) < num_stacks * stack_bytes; }

  region *find(const void *p) {
    if (recent && recent->has(p)) return recent;
    for (region &r : dynamic_shared)
      if (r.has(p)) return recent = &r;
    for (auto &[number, r] : arrays)
      if (r.has(p)) return recent = &r;
    return static_shared.has(p) ? &static_shared : nullptr;
  }
};

inline machine &the_machine() {
  static machine machine;
  return machine;
}

inline uint3 index_in(uint32_t number, uint3 size) {
  return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

inline std::string who(uint16_t thread, uint32_t serial) {
  machine &m = the_machine();
  return "thread " + text(m.fibers[thread].index) + " of block " +
         text(index_in(serial - m.first_serial, m.grid));
}

inline std::string who() {
  machine &m = the_machine();
  return m.current ? who(uint16_t(m.current->number), m.serial) : "the host";
}

inline void note_unwritten_variable() {
  add_finding("unwritten", "", who() + " computes with, or stores, a variable that nobody initialised");
}

/* ---------------------------------------------------------------------------------------------------
 * Memory: what is accessed, and by whom before
 * ------------------------------------------------------------------------------------------------- */

#if defined(__linux__)
/* Shared memory of fixed size is thread_local here. The program's own symbol table has its names. */
inline thread_local char shared_marker = 0;

struct symbol {
  std::string name;
  size_t offset, bytes;
};

inline std::vector<symbol> &shared_symbols() {
  static std::vector<symbol> all;
  return all;
}

inline void read_shared_symbols(const char *path) {
  std::ifstream file(path, std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (image.size() < sizeof(ElfW(Ehdr))) return;
  auto *header = (const ElfW(Ehdr) *)image.data();
  auto *sections = (const ElfW(Shdr) *)(image.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    auto *symbols = (const ElfW(Sym) *)(image.data() + sections[i].sh_offset);
    const char *names = image.data() + sections[sections[i].sh_link].sh_offset;
    for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; j++) {
      if ((symbols[j].st_info & 0xf) != STT_TLS) continue;
      char *readable = abi::__cxa_demangle(names + symbols[j].st_name, nullptr, nullptr, nullptr);
      std::string name = readable ? readable : names + symbols[j].st_name;
      std::free(readable);
      const size_t colons = name.rfind("::");
      if (colons != std::string::npos) name.erase(0, colons + 2);
      shared_symbols().push_back({name, symbols[j].st_value, symbols[j].st_size});
    }
  }
}

inline int find_shared_memory(dl_phdr_info *info, size_t, void *) {
  region &r = the_machine().static_shared;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const char *begin = (const char *)info->dlpi_tls_data, *end = begin + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type != PT_TLS || &shared_marker < begin || &shared_marker >= end) continue;
    r = {"shared memory", begin, end, begin, end, sizeof(real), true, true, {}};
    r.cells.resize((end - begin) / 4 + 1);
    read_shared_symbols(info->dlpi_name[0] ? info->dlpi_name : "/proc/self/exe");
    return 1;
  }
  return 0;
}

/* Taking the marker's address makes the memory, which that of a library loaded by dlopen is not before. */
inline void watch_shared_memory() {
  if (!the_machine().static_shared.has(&shared_marker)) dl_iterate_phdr(find_shared_memory, nullptr);
}

inline const symbol *shared_symbol(const region &r, const char *p) {
  if (&r != &the_machine().static_shared) return nullptr;
  const size_t offset = size_t(p - r.begin);
  for (const symbol &s : shared_symbols())
    if (offset >= s.offset && offset < s.offset + s.bytes) return &s;
  return nullptr;
}
#else
struct symbol {
  std::string name;
  size_t offset, bytes;
};
inline void watch_shared_memory() {}
inline const symbol *shared_symbol(const region &, const char *) { return nullptr; }
#endif

inline std::string array_name(const region &r, const char *p) {
  const symbol *s = shared_symbol(r, p);
  return s ? s->name : r.name;
}

inline std::string element_name(const region &r, const char *p) {
  const symbol *s = shared_symbol(r, p);
  const char *begin = s ? r.begin + s->offset : r.begin;
  return text("%s[%td]", array_name(r, p).c_str(), (p - begin) / ptrdiff_t(r.element));
}

/* Whether what happened before, to memory of this kind, is known to be over. */
inline bool is_over(const access &before, bool shared) {
  const machine &m = the_machine();
  if (before.block < m.first_serial) return true;
  if (before.block != m.serial) return shared || m.ordered_after_others;
  const unsigned thread = m.current->number, w = thread / warp_size;
  if (before.thread == thread) return true;
  if (before.thread / warp_size == w) return before.warp_phase < m.warps[w].phase;
  return before.phase < m.phase;
}

inline void check_race(const region &r, const char *p, const access &before, const char *what_before,
                       const char *what, bool atomic) {
  if (is_over(before, r.shared) || (atomic && before.atomic)) return;
  const std::string between =
      before.block == the_machine().serial ? "without a barrier between them" : "and nothing orders blocks";
  add_finding("race", array_name(r, p),
              element_name(r, p) + " is " + what_before + " by " + who(before.thread, before.block) + " and " +
                  what + " by " + who() + ", " + between);
}

inline bool is_unwritten(const region &r, const char *p, const cell &c) {
  if (r.shared) return c.write.block != the_machine().serial;
  return r.numbers && *(const name *)p >= the_tape().nodes.size();
}

inline access this_access(bool atomic) {
  const machine &m = the_machine();
  const unsigned thread = m.current->number;
  return {m.serial, m.phase, m.warps[thread / warp_size].phase, uint16_t(thread), atomic};
}

inline bool is_of_warp(const access &before, const access &now) {
  return before.block == now.block && before.thread / warp_size == now.thread / warp_size;
}

/* The region where all of the words lie; nullptr after a finding. */
inline bool check_bounds(const region &r, const char *p, size_t bytes, const char *kind) {
  if (p >= r.begin && p + bytes <= r.end) return true;
  const char *outside = p < r.begin ? p : std::max(p, r.end);
  add_finding(kind, r.name,
              text("%s is outside of %s, which has %td elements: ", element_name(r, outside).c_str(),
                   r.name.c_str(), (r.end - r.begin) / ptrdiff_t(r.element)) +
                  who());
  return false;
}

inline place note_read(const void *address, size_t words, bool atomic, bool plain) {
  machine &m = the_machine();
  if (!m.current || m.is_variable(address)) return place::variable;
  const char *p = (const char *)address;
  region *r = m.find(p);
  if (!r) return place::variable;
  if (!check_bounds(*r, p, 4 * words, "out of bounds read")) return place::nowhere;
  for (size_t i = 0; i < words; i++, p += 4) {
    cell &c = r->cells[size_t(p - r->begin) / 4];
    check_race(*r, p, c.write, "written", "read", atomic);
    if (atomic) check_race(*r, p, c.plain_write, "written", "read", atomic);
    if (!(plain && r->shared) && is_unwritten(*r, p, c))
      add_finding("unwritten", array_name(*r, p),
                  who() + " reads " + element_name(*r, p) + ", which nobody wrote");
    const access now = this_access(atomic);
    if (!atomic) c.plain_read = now;
    const bool same_warp = is_of_warp(c.read, now), others_warp = is_of_warp(c.other_read, now);
    if (is_over(c.read, r->shared) || (same_warp && c.read.thread == now.thread))
      c.read = now;
    else if (!same_warp || others_warp || is_over(c.other_read, r->shared))
      c.other_read = now; /* of two warps where there are such: what orders one of them leaves the other */
  }
  return place::memory;
}

inline place note_write(const void *address, size_t words, bool atomic) {
  machine &m = the_machine();
  if (!m.current || m.is_variable(address)) return place::variable;
  const char *p = (const char *)address;
  region *r = m.find(p);
  if (!r) return place::variable;
  if (!check_bounds(*r, p, 4 * words, "out of bounds write")) return place::nowhere;
  for (size_t i = 0; i < words; i++, p += 4) {
    cell &c = r->cells[size_t(p - r->begin) / 4];
    check_race(*r, p, c.write, "written", "written", atomic);
    if (atomic) check_race(*r, p, c.plain_write, "written", "written", atomic);
    if (atomic) check_race(*r, p, c.plain_read, "read", "written", atomic);
    check_race(*r, p, c.read, "read", "written", atomic);
    check_race(*r, p, c.other_read, "read", "written", atomic);
    c.write = this_access(atomic);
    if (!atomic) c.plain_write = c.write;
  }
  return place::memory;
}

/* Memory that a launch sizes: a thread_local array of the most that a GPU has. */
constexpr size_t most_shared_bytes = 227 << 10;

struct watch_dynamic_shared {
  watch_dynamic_shared(const char *name, const void *begin, size_t element) {
    const char *p = (const char *)begin;
    the_machine().dynamic_shared.push_back(
        {name, p, p, p, p + most_shared_bytes, element, true, true, std::vector<cell>(most_shared_bytes / 4)});
  }
};

/* What an initialisation that happens at run time starts from. */
template <class T>
T nothing() {
  T zeros;
  std::memset((void *)&zeros, 0, sizeof zeros);
  return zeros;
}

/* Initialised at run time, since GCC 12 calls that initialisation from templates whether there is one or not.
 */
#define TRUTH_DYNAMIC_SHARED(type, name)                                                                   \
  alignas(128) thread_local type name[truth::most_shared_bytes / sizeof(type)] = {truth::nothing<type>()}; \
  static const truth::watch_dynamic_shared truth_watch_##name(#name, name, sizeof(type) < 4 ? 4 : sizeof(type))

/* What kernels are given for a pointer: elements of T (real, half, bf16, or a type of integers), watched, with
 * room on both sides that nobody may touch. The name is for findings. */
template <class T = real>
class array {
 public:
  array(const std::string &name, size_t count) : name_(name), count_(count), names_(is_number ? count : 0) {
    bytes_ = 2 * room + (count * sizeof(T) + 4095) / 4096 * 4096;
    void *memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = (char *)memory;
    machine &m = the_machine();
    number_ = m.next_array++;
    const char *begin = (const char *)data();
    m.arrays[number_] = {name,
                         begin,
                         begin + count * sizeof(T),
                         memory_,
                         memory_ + bytes_,
                         sizeof(T),
                         false,
                         is_number,
                         std::vector<cell>((count * sizeof(T) + 3) / 4)};
    if (is_number) std::memset((void *)data(), 0xfe, count * sizeof(T));
  }

  array(const std::string &name, const std::vector<double> &values) : array(name, values.size()) {
    fill(values);
  }

  array(const std::string &name, std::initializer_list<double> values)
      : array(name, std::vector<double>(values)) {}

  array(array &&other) = delete;
  array(const array &other) = delete;

  ~array() {
    the_machine().recent = nullptr;
    the_machine().arrays.erase(number_);
    munmap(memory_, bytes_);
  }

  /* New numbers: what gradients are taken with respect to. */
  void fill(const std::vector<double> &values) {
    assert(values.size() == count_);
    for (size_t i = 0; i < count_; i++) {
      if constexpr (is_number) {
        names_[i] = the_tape().push(0, 0, zero);
        the_tape().nodes[names_[i]].value = T::nearest(values[i]);
        std::memcpy((void *)(data() + i), &names_[i], sizeof(name));
      } else {
        data()[i] = T(values[i]);
      }
    }
  }

  /* As cudaMemset(array, 0, bytes): zeros that nothing is taken with respect to. */
  void clear() { std::memset((void *)data(), 0, count_ * sizeof(T)); }

  /* The values now; NaN where nobody wrote. */
  std::vector<double> values() const {
    std::vector<double> all(count_);
    for (size_t i = 0; i < count_; i++) all[i] = value(i);
    return all;
  }

  T *data() const { return (T *)(memory_ + room); }
  operator T *() const { return data(); }
  size_t size() const { return count_; }
  const std::string &label() const { return name_; }

  /* Places on the tape: of what it was filled with, and of what is in it now. */
  const std::vector<name> &filled() const { return names_; }
  std::vector<name> now() const {
    std::vector<name> all(count_);
    std::memcpy(all.data(), (const void *)data(), is_number ? count_ * sizeof(name) : 0);
    return all;
  }

 private:
  static constexpr bool is_number = std::is_base_of_v<real, T>;
  static constexpr size_t room = 64 << 20;
  std::string name_;
  size_t count_, bytes_;
  std::vector<name> names_;
  char *memory_;
  int number_;

  double value(size_t i) const {
    if constexpr (!is_number) return double(data()[i]);
    name where;
    std::memcpy(&where, (const void *)(data() + i), sizeof where);
    return where < the_tape().nodes.size() ? value_at(where) : std::numeric_limits<double>::quiet_NaN();
  }
};

/* ---------------------------------------------------------------------------------------------------
 * Running a block: its threads take turns until all of them wait; then what they wait for is given to them.
 * ------------------------------------------------------------------------------------------------- */

inline void enter_fiber() {
  machine &m = the_machine();
  m.kernel();
  m.current->at = state::left;
  swapcontext(&m.current->context, &m.scheduler);
}

inline void wait_as(state at, int line) {
  machine &m = the_machine();
  fiber *self = m.current;
  self->at = at;
  self->line = line;
  swapcontext(&self->context, &m.scheduler);
}

inline void reserve_stacks(size_t count) {
  machine &m = the_machine();
  if (count <= m.num_stacks) return;
  if (m.stacks) munmap(m.stacks, m.num_stacks * stack_bytes);
  void *memory = mmap(nullptr, count * stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  m.stacks = (char *)memory;
  m.num_stacks = count;
  /* A kernel that needs more than a stack should fail where it does, and not in another thread's variables. */
  for (size_t i = 0; i < count; i++) mprotect(m.stacks + i * stack_bytes, 4096, PROT_NONE);
}

inline void start_fiber(fiber &f) {
  machine &m = the_machine();
  f.at = state::ready;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = m.stacks + f.number * stack_bytes;
  f.context.uc_stack.ss_size = stack_bytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, enter_fiber, 0);
}

void set_sizes(dim3 grid, dim3 block); /* the variables that kernels see */
void set_indices(uint3 thread, uint3 block);

/* Runs every thread that is ready until it waits or leaves. False where none was. */
inline bool run_ready_threads() {
  machine &m = the_machine();
  bool any = false;
  for (fiber &f : m.fibers) {
    if (f.at != state::ready) continue;
    any = true;
    m.current = &f;
    set_indices(f.index, m.block);
    swapcontext(&m.scheduler, &f.context);
    m.current = nullptr;
  }
  return any;
}

inline fiber *lane_of(unsigned w, unsigned lane) {
  machine &m = the_machine();
  const size_t number = size_t(w) * warp_size + lane;
  return number < m.fibers.size() ? &m.fibers[number] : nullptr;
}

/* The lanes of the mask that have neither left nor were never there. */
inline uint32_t lanes_there(unsigned w, uint32_t mask) {
  for (unsigned lane = 0; lane < warp_size; lane++) {
    const fiber *f = lane_of(w, lane);
    if (!f || f->at == state::left) mask &= ~(1u << lane);
  }
  return mask;
}

/* Lanes that wait for the same operation. */
inline uint32_t lanes_agreeing(const warp &w, uint32_t group, const exchange &with) {
  uint32_t agreeing = 0;
  for (unsigned lane = 0; lane < warp_size; lane++)
    if ((group & w.arrived) >> lane & 1 && w.of[lane].mask == with.mask &&
        !std::strcmp(w.of[lane].operation, with.operation))
      agreeing |= 1u << lane;
  return agreeing;
}

inline void complete(unsigned number, uint32_t group) {
  warp &w = the_machine().warps[number];
  uint64_t votes = 0;
  for (unsigned lane = 0; lane < warp_size; lane++)
    if (group >> lane & 1 && w.of[lane].brought) votes |= uint64_t(1) << lane;
  for (unsigned lane = 0; lane < warp_size; lane++) {
    if (!(group >> lane & 1)) continue;
    exchange &e = w.of[lane];
    const bool is_shuffle = e.source < warp_size;
    e.given = !is_shuffle ? votes : group >> e.source & 1 ? w.of[e.source].brought : ~uint64_t(0);
    lane_of(number, lane)->at = state::ready;
  }
  const bool orders = !std::strcmp(w.of[__builtin_ctz(group)].operation, "__syncwarp");
  if (orders) w.phase++;
  w.arrived &= ~group;
}

/* True where lanes of a warp could go on. */
inline bool complete_exchanges() {
  machine &m = the_machine();
  bool any = false;
  for (unsigned number = 0; number < m.warps.size(); number++) {
    warp &w = m.warps[number];
    for (unsigned lane = 0; lane < warp_size; lane++) {
      if (!(w.arrived >> lane & 1)) continue;
      const uint32_t group = lanes_there(number, w.of[lane].mask);
      if (lanes_agreeing(w, group, w.of[lane]) != group) continue;
      complete(number, group);
      any = true;
    }
  }
  return any;
}

inline std::string where_is(const fiber &f) {
  machine &m = the_machine();
  const std::string thread = who(uint16_t(f.number), m.serial);
  if (f.at == state::left) return thread + " has left the kernel";
  if (f.at == state::at_barrier) return thread + text(" waits at the barrier of line %d", f.line);
  const exchange &e = m.warps[f.number / warp_size].of[f.number % warp_size];
  return thread + text(" waits at the %s of line %d", e.operation, f.line);
}

inline void note_divergence(const fiber &waiting, const fiber &other) {
  add_finding("divergent barrier", text("line %d", waiting.line),
              where_is(waiting) + ", and " + where_is(other));
}

/* Every thread waits, and some of them for lanes of their warps that will not come: those get what there is. */
inline bool break_exchange() {
  machine &m = the_machine();
  for (unsigned number = 0; number < m.warps.size(); number++) {
    warp &w = m.warps[number];
    if (!w.arrived) continue;
    const unsigned lane = unsigned(__builtin_ctz(w.arrived));
    const uint32_t group = lanes_there(number, w.of[lane].mask);
    const uint32_t came = lanes_agreeing(w, group, w.of[lane]) | 1u << lane;
    const uint32_t missing = group & ~came;
    const fiber *self = lane_of(number, lane);
    if (missing)
      note_divergence(*self, *lane_of(number, unsigned(__builtin_ctz(missing))));
    else
      add_finding("divergent barrier", text("line %d", self->line),
                  where_is(*self) + ", and is not in the mask that it gives");
    complete(number, came);
    return true;
  }
  return false;
}

/* Every thread that is left waits at a barrier of the block. False where all have left. */
inline bool pass_barrier() {
  machine &m = the_machine();
  const fiber *first = nullptr;
  for (const fiber &f : m.fibers)
    if (!first && f.at == state::at_barrier) first = &f;
  if (!first) return false;
  for (const fiber &f : m.fibers) {
    const bool elsewhere = f.at == state::at_barrier && f.line != first->line;
    if (elsewhere || (f.at == state::left && !options().allow_early_return)) {
      note_divergence(*first, f);
      break;
    }
  }
  for (fiber &f : m.fibers)
    if (f.at == state::at_barrier) f.at = state::ready;
  m.phase++;
  for (warp &w : m.warps) w.phase++;
  m.predicate_count = m.predicates;
  m.predicates = 0;
  return true;
}

inline void run_block(uint3 index) {
  machine &m = the_machine();
  m.block = index;
  m.serial++;
  m.phase = 0;
  m.ordered_after_others = false;
  m.warps.assign((m.fibers.size() + warp_size - 1) / warp_size, warp());
  for (fiber &f : m.fibers) start_fiber(f);
  do {
    while (run_ready_threads()) {
    }
  } while (complete_exchanges() || break_exchange() || pass_barrier());
}

inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes) {
  machine &m = the_machine();
  const size_t num_threads = size_t(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z) {
    add_finding("launch", "", text("a grid of %u, %u, %u blocks (at least 1 each)", grid.x, grid.y, grid.z));
    return;
  }
  if (num_threads == 0 || num_threads > 1024 || shared_bytes > most_shared_bytes) {
    add_finding("launch", "",
                text("%zu threads a block (1 to 1024) and %zu bytes of shared memory (up to %zu)", num_threads,
                     shared_bytes, most_shared_bytes));
    return;
  }
  watch_shared_memory();
  reserve_stacks(num_threads);
  for (region &r : m.dynamic_shared) r.end = r.begin + shared_bytes;
  m.fibers.assign(num_threads, fiber());
  for (unsigned i = 0; i < num_threads; i++) {
    m.fibers[i].number = i;
    m.fibers[i].index = index_in(i, block);
  }
  set_sizes(grid, block);
  m.grid = grid;
  m.first_serial = m.serial + 1;
  const uint32_t num_blocks = grid.x * grid.y * grid.z;
  for (uint32_t i = 0; i < num_blocks; i++) run_block(index_in(i, grid));
}

/* ---- what the words of CUDA below are made of ---- */

inline void sync_block(int line) { wait_as(state::at_barrier, line); }

inline int sync_block(int line, bool predicate) {
  the_machine().predicates += predicate;
  sync_block(line);
  return the_machine().predicate_count;
}

/* Waits for the lanes of the mask; source is the lane to shuffle from, or warp_size for a vote. */
inline uint64_t exchange_in_warp(const char *operation, int line, uint32_t mask, uint64_t brought,
                                 unsigned source) {
  machine &m = the_machine();
  if (!m.current) return brought;
  warp &w = m.warps[m.current->number / warp_size];
  const unsigned lane = m.current->number % warp_size;
  w.of[lane] = {operation, mask, brought, source, 0};
  w.arrived |= 1u << lane;
  wait_as(state::at_collective, line);
  return m.warps[m.current->number / warp_size].of[lane].given;
}

inline unsigned this_lane() {
  const machine &m = the_machine();
  return m.current ? m.current->number % warp_size : 0;
}

/* Where each kind of shuffle reads from, within sections of width lanes. */
inline unsigned shuffle_from(int lane, int width) {
  return (this_lane() & ~unsigned(width - 1)) + (unsigned(lane) & unsigned(width - 1));
}
inline unsigned shuffle_up_from(unsigned delta, int width) {
  return (this_lane() & unsigned(width - 1)) < delta ? this_lane() : this_lane() - delta;
}
inline unsigned shuffle_down_from(unsigned delta, int width) {
  return (this_lane() & unsigned(width - 1)) + delta >= unsigned(width) ? this_lane() : this_lane() + delta;
}
inline unsigned shuffle_xor_from(int lane_mask, int width) {
  const unsigned from = this_lane() ^ unsigned(lane_mask);
  return from >= (this_lane() & ~unsigned(width - 1)) + unsigned(width) ? this_lane() : from;
}

template <class T>
T shuffle(const char *operation, int line, uint32_t mask, const T &value, unsigned source) {
  if constexpr (std::is_base_of_v<real, T>) {
    const uint64_t given = exchange_in_warp(operation, line, mask, value.use(), source);
    return T::at(given < the_tape().nodes.size() ? name(given) : unwritten);
  } else {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "what can be shuffled");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange_in_warp(operation, line, mask, bits, source);
    T result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
}

/* A number in memory becomes another in one step; gives what was there before. */
template <class T, class F>
T update_atomically(T *address, F &&become) {
  const place read = note_read(address, 1, true), written = note_write(address, 1, true);
  if (read == place::nowhere || written == place::nowhere) return T(NAN);
  name before;
  std::memcpy(&before, (const void *)address, sizeof before);
  const T old = before < the_tape().nodes.size() ? T::at(before) : T(NAN);
  const name after = become(old).use();
  std::memcpy((void *)address, &after, sizeof after);
  return old;
}

/* The same for an integer, or for a number's bits under an integer's name. */
template <class T, class F>
T update_integer(T *address, F &&become) {
  machine &m = the_machine();
  const region *r = m.current ? m.find(address) : nullptr;
  if (r && r->numbers) {
    const place read = note_read(address, 1, true, true), written = note_write(address, 1, true);
    if (read == place::nowhere || written == place::nowhere) return T(0);
  } else {
    m.ordered_after_others = true;
  }
  const T old = *address;
  *address = T(become(old));
  return old;
}

/* ---------------------------------------------------------------------------------------------------
 * Launches
 * ------------------------------------------------------------------------------------------------- */

template <class R, class... P, class... A>
void launch(R (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A &&...arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
  const std::tuple<std::decay_t<P>...> values{static_cast<P>(arguments)...};
  the_machine().kernel = [kernel, &values] { std::apply(kernel, values); };
  run_grid(grid, block, shared_bytes);
}

/* A plain function, as one thread. What it returns is dropped. */
template <class R, class... P, class... A>
void call(R (*function)(P...), A &&...arguments) {
  launch(function, 1, 1, 0, std::forward<A>(arguments)...);
}

/* ---------------------------------------------------------------------------------------------------
 * Derivatives
 * ------------------------------------------------------------------------------------------------- */

/* Of every number on the tape: d(loss)/d(number), or the number's derivative along a direction. */
class derivatives {
 public:
  std::vector<double> by_name;

  std::vector<double> of(const std::vector<name> &names) const {
    std::vector<double> all(names.size());
    for (size_t i = 0; i < names.size(); i++) all[i] = names[i] < by_name.size() ? by_name[names[i]] : 0;
    return all;
  }
};

/* of(array): d(loss)/d(what the array was filled with). */
struct gradients : derivatives {
  using derivatives::of;
  template <class T>
  std::vector<double> of(const array<T> &inputs) const {
    return of(inputs.filled());
  }
};

/* of(array): the derivative of what is in the array now. */
struct tangents : derivatives {
  using derivatives::of;
  template <class T>
  std::vector<double> of(const array<T> &outputs) const {
    return of(outputs.now());
  }
};

/* An array's numbers beside as many others: outputs and d(loss)/d(outputs), or inputs and a direction. */
struct beside {
  std::vector<name> now, filled;
  std::vector<double> values;
  template <class T>
  beside(const array<T> &numbers, const std::vector<double> &values)
      : now(numbers.now()), filled(numbers.filled()), values(values) {
    assert(values.size() == numbers.size());
  }
};

/* Backwards over the tape: d(loss)/d(output) for some outputs gives it for everything. */
inline gradients reverse(const std::vector<beside> &outputs) {
  const std::vector<node> &nodes = the_tape().nodes;
  gradients all;
  all.by_name.assign(nodes.size(), 0);
  for (const beside &output : outputs)
    for (size_t i = 0; i < output.now.size(); i++)
      if (output.now[i] < nodes.size()) all.by_name[output.now[i]] += output.values[i];
  for (size_t i = nodes.size(); i-- > 1;) {
    const double so_far = all.by_name[i];
    if (so_far == 0) continue; /* 0 times an infinite derivative: nothing depends on it */
    for (int side = 0; side < 2; side++)
      if (nodes[i].by[side] != 0) all.by_name[nodes[i].from[side]] += nodes[i].by[side] * so_far;
  }
  return all;
}

/* Forwards over the tape: one direction of some inputs gives the derivative of everything along it. */
inline tangents forward(const std::vector<beside> &inputs) {
  const std::vector<node> &nodes = the_tape().nodes;
  tangents all;
  all.by_name.assign(nodes.size(), 0);
  for (const beside &input : inputs)
    for (size_t i = 0; i < input.filled.size(); i++) all.by_name[input.filled[i]] += input.values[i];
  for (size_t i = 1; i < nodes.size(); i++)
    for (int side = 0; side < 2; side++) {
      const double along = all.by_name[nodes[i].from[side]];
      if (along != 0 && nodes[i].by[side] != 0) all.by_name[i] += nodes[i].by[side] * along;
    }
  return all;
}

/* The largest difference of two vectors, and what it is relative to. */
struct comparison {
  size_t worst;         /* index; where nothing is finite, the first such */
  double got, expected; /* there */
  double error, size;   /* |got - expected| there, and the largest |expected| */

  /* NaN is never within. */
  bool within(double relative) const { return error <= relative * size; }
};

inline comparison compare(const std::vector<double> &got, const std::vector<double> &expected) {
  assert(got.size() == expected.size());
  comparison c = {0, NAN, NAN, -1, 0};
  for (size_t i = 0; i < got.size(); i++) {
    double error = got[i] == expected[i] ? 0 : std::fabs(got[i] - expected[i]);
    if (std::isnan(error)) error = INFINITY;
    if (std::isfinite(expected[i])) c.size = std::fmax(c.size, std::fabs(expected[i]));
    if (error > c.error) c = {i, got[i], expected[i], error, c.size};
  }
  return c;
}

/* A finding ("wrong") where the largest difference is more than that part of the largest expected number. */
inline bool expect(const std::string &what, const std::vector<double> &got, const std::vector<double> &expected,
                   double tolerance = 1e-9) {
  const comparison c = compare(got, expected);
  if (c.within(tolerance)) return true;
  add_finding(
      "wrong", what,
      text("%s is wrong, most at %zu: expected %.9g, got %.9g; the error is %.2e of the largest, %.2e allowed",
           what.c_str(), c.worst, c.expected, c.got, c.error / c.size, tolerance));
  return false;
}

/* ---------------------------------------------------------------------------------------------------
 * half and bf16: numbers that are rounded whenever they are made
 * ------------------------------------------------------------------------------------------------- */

/* The nearest number with that many bits behind the first one, ties to even. */
inline double round_to_bits(double x, int bits, int least_exponent, double largest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1, std::max(std::ilogb(x), least_exponent) - bits);
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

template <int bits, int least_exponent>
class narrow : public real {
 public:
  narrow() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  narrow(T x) : real(nearest(double(x))) {}
  narrow(const real &x) : real(rounded(x)) {}

  static narrow at(name where) {
    narrow x;
    static_cast<real &>(x) = real::at(where);
    return x;
  }

  static double nearest(double x) {
    const double largest = std::ldexp(2 - std::ldexp(1, -bits), 1 - least_exponent);
    return options().round_halves ? round_to_bits(x, bits, least_exponent, largest) : x;
  }

  friend narrow operator+(const narrow &a, const narrow &b) { return real(a) + real(b); }
  friend narrow operator-(const narrow &a, const narrow &b) { return real(a) - real(b); }
  friend narrow operator*(const narrow &a, const narrow &b) { return real(a) * real(b); }
  friend narrow operator/(const narrow &a, const narrow &b) { return real(a) / real(b); }
  friend narrow operator-(const narrow &a) { return -real(a); }
  narrow &operator+=(const narrow &b) { return *this = *this + b; }
  narrow &operator-=(const narrow &b) { return *this = *this - b; }
  narrow &operator*=(const narrow &b) { return *this = *this * b; }

 private:
  static real rounded(const real &x) { return replace_value(x, nearest(x.value())); }
};

using half = narrow<10, -14>;
using bf16 = narrow<7, -126>;
static_assert(std::is_trivially_default_constructible_v<half>, "shared memory holds them");

}  // namespace truth

using half = truth::half;
using __half = truth::half;
using __nv_bfloat16 = truth::bf16;
using nv_bfloat16 = truth::bf16;

/* ---------------------------------------------------------------------------------------------------
 * The words of CUDA
 * ------------------------------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __noinline__
#define __inline__ inline
#ifndef __restrict__
#define __restrict__ __restrict
#endif
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
/* Also says `extern` and no `static`, as shared memory of unknown size needs; a kernel's is the thread's that
 * runs all fibers. */
#define __shared__ thread_local

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

inline void truth::set_sizes(dim3 grid, dim3 block) {
  gridDim = grid;
  blockDim = block;
}

inline void truth::set_indices(uint3 thread, uint3 block) {
  threadIdx = thread;
  blockIdx = block;
}

/* ---- vectors: numbers in memory at once, and words ---- */

#define TRUTH_VECTORS(type, element, alignment2, alignment4)                           \
  struct alignas(alignment2) type##2 {                                                 \
    element x, y;                                                                      \
  };                                                                                   \
  struct type##3 {                                                                     \
    element x, y, z;                                                                   \
  };                                                                                   \
  struct alignas(alignment4) type##4 {                                                 \
    element x, y, z, w;                                                                \
  };                                                                                   \
  inline type##2 make_##type##2(element x, element y) { return {x, y}; }               \
  inline type##3 make_##type##3(element x, element y, element z) { return {x, y, z}; } \
  inline type##4 make_##type##4(element x, element y, element z, element w) { return {x, y, z, w}; }
TRUTH_VECTORS(float, truth::real, 8, 16)
TRUTH_VECTORS(double, truth::real, 8, 16)
#undef TRUTH_VECTORS

/* Words move numbers, too: *(uint4 *)to = *(const uint4 *)from. Reading and writing them is an access. */
namespace truth {
template <class T>
void move_words(T *to, const T *from) {
  unsigned words[sizeof(T) / 4] = {};
  if (note_read(from, sizeof(T) / 4, false, true) != place::nowhere)
    std::memcpy(words, (const void *)from, sizeof words);
  if (note_write(to, sizeof(T) / 4) != place::nowhere) std::memcpy((void *)to, words, sizeof words);
}
}  // namespace truth

#define TRUTH_WORDS(type, word)                                         \
  struct alignas(8) type##2 {                                           \
    word x, y;                                                          \
    type##2() = default;                                                \
    type##2(word x, word y) : x(x), y(y) {}                             \
    type##2(const type##2 & other) { truth::move_words(this, &other); } \
    type##2 &operator=(const type##2 & other) {                         \
      truth::move_words(this, &other);                                  \
      return *this;                                                     \
    }                                                                   \
  };                                                                    \
  struct alignas(16) type##4 {                                          \
    word x, y, z, w;                                                    \
    type##4() = default;                                                \
    type##4(word x, word y, word z, word w) : x(x), y(y), z(z), w(w) {} \
    type##4(const type##4 & other) { truth::move_words(this, &other); } \
    type##4 &operator=(const type##4 & other) {                         \
      truth::move_words(this, &other);                                  \
      return *this;                                                     \
    }                                                                   \
  };                                                                    \
  inline type##2 make_##type##2(word x, word y) { return {x, y}; }      \
  inline type##4 make_##type##4(word x, word y, word z, word w) { return {x, y, z, w}; }
TRUTH_WORDS(int, int)
TRUTH_WORDS(uint, unsigned)
#undef TRUTH_WORDS

/* ---- barriers, votes and shuffles; the line that calls them is known ---- */

inline void __syncthreads(int line = __builtin_LINE()) { truth::sync_block(line); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return truth::sync_block(line, predicate != 0);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return truth::sync_block(line, predicate != 0) > 0;
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return truth::sync_block(line, predicate == 0) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  truth::exchange_in_warp("__syncwarp", line, mask, 1, truth::warp_size);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return unsigned(truth::exchange_in_warp("__ballot_sync", line, mask, predicate != 0, truth::warp_size));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return truth::exchange_in_warp("__any_sync", line, mask, predicate != 0, truth::warp_size) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return truth::exchange_in_warp("__all_sync", line, mask, predicate == 0, truth::warp_size) == 0;
}
inline unsigned __activemask() { return truth::lanes_there(truth::the_machine().current->number / 32, ~0u); }

#define TRUTH_SHUFFLE(function, parameter, from)                                                              \
  template <class T>                                                                                          \
  auto function(unsigned mask, const T &value, parameter lane, int width = 32, int line = __builtin_LINE()) { \
    using number = std::conditional_t<std::is_floating_point_v<T>, truth::real, T>;                           \
    return truth::shuffle<number>(#function, line, mask, value, truth::from(lane, width));                    \
  }
TRUTH_SHUFFLE(__shfl_sync, int, shuffle_from)
TRUTH_SHUFFLE(__shfl_up_sync, unsigned, shuffle_up_from)
TRUTH_SHUFFLE(__shfl_down_sync, unsigned, shuffle_down_from)
TRUTH_SHUFFLE(__shfl_xor_sync, int, shuffle_xor_from)
#undef TRUTH_SHUFFLE

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
#define __trap() std::abort()

/* ---- atomics ---- */

namespace truth {
template <class T>
using if_number = std::enable_if_t<std::is_base_of_v<real, T>, T>;
template <class T>
using if_integer = std::enable_if_t<std::is_integral_v<T>, T>;
template <class T>
struct itself {
  using type = T;
};
template <class T>
using same = typename itself<T>::type; /* converted to, not deduced from */
}  // namespace truth

#define TRUTH_ATOMIC(function, result)                                           \
  template <class T>                                                             \
  truth::if_integer<T> function(T *address, truth::same<T> value) {              \
    return truth::update_integer(address, [value](T old) { return T(result); }); \
  }
#define TRUTH_ATOMIC_NUMBER(function, result)                                               \
  TRUTH_ATOMIC(function, result)                                                            \
  template <class T>                                                                        \
  truth::if_number<T> function(T *address, const truth::same<T> &value) {                   \
    return truth::update_atomically(address, [&value](const T &old) { return T(result); }); \
  }
TRUTH_ATOMIC_NUMBER(atomicAdd, old + value)
TRUTH_ATOMIC_NUMBER(atomicMax, old < value ? value : old)
TRUTH_ATOMIC_NUMBER(atomicMin, value < old ? value : old)
TRUTH_ATOMIC_NUMBER(atomicExch, ((void)old, value))
TRUTH_ATOMIC(atomicSub, old - value)
TRUTH_ATOMIC(atomicAnd, old &value)
TRUTH_ATOMIC(atomicOr, old | value)
TRUTH_ATOMIC(atomicXor, old ^ value)
TRUTH_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
TRUTH_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef TRUTH_ATOMIC
#undef TRUTH_ATOMIC_NUMBER

template <class T>
truth::if_integer<T> atomicCAS(T *address, truth::same<T> expected, truth::same<T> value) {
  return truth::update_integer(address, [=](T old) { return old == expected ? value : old; });
}

/* ---- functions ---- */

namespace truth {
#define TRUTH_ALIAS_1(alias, function) \
  inline real alias(const real &a) { return function(a); }
#define TRUTH_ALIAS_2(alias, function) \
  inline real alias(const real &a, const real &b) { return function(a, b); }
#define TRUTH_WITH_F(function) TRUTH_ALIAS_1(function##f, function)

/* clang-format takes a list of macros for one declaration. */
/* clang-format off */
TRUTH_WITH_F(exp) TRUTH_WITH_F(exp2) TRUTH_WITH_F(exp10) TRUTH_WITH_F(expm1) TRUTH_WITH_F(log)
TRUTH_WITH_F(log2) TRUTH_WITH_F(log10) TRUTH_WITH_F(log1p) TRUTH_WITH_F(sqrt) TRUTH_WITH_F(rsqrt)
TRUTH_WITH_F(cbrt) TRUTH_WITH_F(sin) TRUTH_WITH_F(cos) TRUTH_WITH_F(tan) TRUTH_WITH_F(atan) TRUTH_WITH_F(asin)
TRUTH_WITH_F(acos) TRUTH_WITH_F(sinh) TRUTH_WITH_F(cosh) TRUTH_WITH_F(tanh) TRUTH_WITH_F(erf) TRUTH_WITH_F(erfc)
TRUTH_WITH_F(floor) TRUTH_WITH_F(ceil) TRUTH_WITH_F(trunc) TRUTH_WITH_F(round) TRUTH_WITH_F(rint)
TRUTH_ALIAS_1(fabsf, fabs) TRUTH_ALIAS_1(nearbyintf, rint) TRUTH_ALIAS_1(__expf, exp)
TRUTH_ALIAS_1(__exp10f, exp10) TRUTH_ALIAS_1(__logf, log) TRUTH_ALIAS_1(__log2f, log2)
TRUTH_ALIAS_1(__log10f, log10) TRUTH_ALIAS_1(__sinf, sin) TRUTH_ALIAS_1(__cosf, cos) TRUTH_ALIAS_1(__tanf, tan)
TRUTH_ALIAS_1(__saturatef, saturate) TRUTH_ALIAS_1(__frcp_rn, reciprocal) TRUTH_ALIAS_1(__fsqrt_rn, sqrt)
TRUTH_ALIAS_1(__frsqrt_rn, rsqrt)
TRUTH_ALIAS_2(fmaxf, fmax) TRUTH_ALIAS_2(fminf, fmin) TRUTH_ALIAS_2(powf, pow) TRUTH_ALIAS_2(__powf, pow)
TRUTH_ALIAS_2(atan2f, atan2) TRUTH_ALIAS_2(hypotf, hypot) TRUTH_ALIAS_2(fmodf, fmod)
TRUTH_ALIAS_2(copysignf, copysign) TRUTH_ALIAS_2(__fdividef, operator/) TRUTH_ALIAS_2(fdividef, operator/)
TRUTH_ALIAS_2(__fadd_rn, operator+) TRUTH_ALIAS_2(__fsub_rn, operator-) TRUTH_ALIAS_2(__fmul_rn, operator*)
TRUTH_ALIAS_2(__fdiv_rn, operator/)
inline real fmaf(const real &a, const real &b, const real &c) { return fma(a, b, c); }
/* clang-format on */
inline real __fmaf_rn(const real &a, const real &b, const real &c) { return fma(a, b, c); }
inline void sincosf(const real &a, real *s, real *c) {
  *s = sin(a);
  *c = cos(a);
}
inline int __float2int_rn(const real &a) { return int(std::nearbyint(a.value())); }
inline int __float2int_rz(const real &a) { return int(a.value()); }
inline int __float2int_rd(const real &a) { return int(std::floor(a.value())); }
inline int __float2int_ru(const real &a) { return int(std::ceil(a.value())); }
#undef TRUTH_ALIAS_1
#undef TRUTH_ALIAS_2
#undef TRUTH_WITH_F
}  // namespace truth

/* A host's compiler has none of these, so that literals and integers need them as well. */
using truth::__fadd_rn, truth::__fsub_rn, truth::__fmul_rn, truth::__fdiv_rn, truth::__fmaf_rn;
using truth::__fdividef, truth::__frcp_rn, truth::__fsqrt_rn, truth::__frsqrt_rn, truth::__saturatef;
using truth::fdividef, truth::rsqrt, truth::rsqrtf;
inline truth::real __int2float_rn(int a) { return a; }
inline truth::real __uint2float_rn(unsigned a) { return a; }

namespace std {
using truth::abs, truth::exp, truth::exp2, truth::expm1, truth::fabs, truth::fma, truth::fmax, truth::fmin;
using truth::cos, truth::erf, truth::sin, truth::sqrt, truth::tanh, truth::floor, truth::ceil, truth::round;
using truth::isfinite, truth::isinf, truth::isnan, truth::log, truth::log1p, truth::log2, truth::pow;

template <>
struct numeric_limits<truth::real> : numeric_limits<float> {
  static truth::real infinity() { return INFINITY; }
  static truth::real lowest() { return -FLT_MAX; }
  static truth::real max() { return FLT_MAX; }
  static truth::real min() { return FLT_MIN; }
  static truth::real epsilon() { return FLT_EPSILON; }
  static truth::real quiet_NaN() { return NAN; }
};
}  // namespace std

#define TRUTH_MAX_MIN(type)                                 \
  inline type max(type a, type b) { return a < b ? b : a; } \
  inline type min(type a, type b) { return b < a ? b : a; }
TRUTH_MAX_MIN(int)
TRUTH_MAX_MIN(unsigned)
TRUTH_MAX_MIN(long)
TRUTH_MAX_MIN(unsigned long)
TRUTH_MAX_MIN(long long)
TRUTH_MAX_MIN(unsigned long long)
TRUTH_MAX_MIN(float)
TRUTH_MAX_MIN(double)
#undef TRUTH_MAX_MIN
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }

namespace truth {
template <class T>
const T &printable(const T &value) {
  return value;
}
inline double printable(const real &value) { return value.value(); }
}  // namespace truth

/* printf of anything and numbers among it. */
template <class... T, class = std::enable_if_t<(std::is_base_of_v<truth::real, T> || ...)>>
int printf(const char *format, const T &...values) {
  return std::printf(format, truth::printable(values)...);
}

template <class T>
T __ldg(const T *address) {
  return *address;
}
template <class T>
T __ldcg(const T *address) {
  return *address;
}
template <class T>
T __ldcs(const T *address) {
  return *address;
}
template <class T>
void __stcs(T *address, truth::same<T> value) {
  *address = value;
}
template <class T>
void __stcg(T *address, truth::same<T> value) {
  *address = value;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }
inline int __mul24(int a, int b) { return a * b; }

/* A number's name, which is not its bits; good for carrying it through atomicCAS. */
inline int __float_as_int(const truth::real &a) { return int(a.use()); }
inline unsigned __float_as_uint(const truth::real &a) { return a.use(); }
inline truth::real __int_as_float(int where) { return truth::real::at(truth::name(where)); }
inline truth::real __uint_as_float(unsigned where) { return truth::real::at(where); }

/* ---- half and bf16 ---- */

struct half2 {
  half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using __half2 = half2;
using nv_bfloat162 = __nv_bfloat162;

inline half __float2half(const truth::real &a) { return half(a); }
inline half __float2half_rn(const truth::real &a) { return half(a); }
inline truth::real __half2float(const half &a) { return a; }
inline __nv_bfloat16 __float2bfloat16(const truth::real &a) { return __nv_bfloat16(a); }
inline __nv_bfloat16 __float2bfloat16_rn(const truth::real &a) { return __nv_bfloat16(a); }
inline truth::real __bfloat162float(const __nv_bfloat16 &a) { return a; }

#define TRUTH_PAIR(T, T2, to_pair, from_pair, pair_of, low, high, one)                   \
  inline T2 to_pair(const truth::real &x, const truth::real &y) { return {T(x), T(y)}; } \
  inline T2 pair_of(const T &x, const T &y) { return {x, y}; }                           \
  inline T2 one(const truth::real &x) { return {T(x), T(x)}; }                           \
  inline float2 from_pair(const T2 &a) { return {a.x, a.y}; }                            \
  inline truth::real low(const T2 &a) { return a.x; }                                    \
  inline truth::real high(const T2 &a) { return a.y; }                                   \
  inline T __hadd(const T &a, const T &b) { return a + b; }                              \
  inline T __hsub(const T &a, const T &b) { return a - b; }                              \
  inline T __hmul(const T &a, const T &b) { return a * b; }                              \
  inline T __hdiv(const T &a, const T &b) { return a / b; }                              \
  inline T __hneg(const T &a) { return -a; }                                             \
  inline T __hmax(const T &a, const T &b) { return a < b ? b : a; }                      \
  inline T __hmin(const T &a, const T &b) { return b < a ? b : a; }                      \
  inline T __hfma(const T &a, const T &b, const T &c) { return truth::fma(a, b, c); }    \
  inline T hexp(const T &a) { return truth::exp(a); }                                    \
  inline T2 __hadd2(const T2 &a, const T2 &b) { return {a.x + b.x, a.y + b.y}; }         \
  inline T2 __hsub2(const T2 &a, const T2 &b) { return {a.x - b.x, a.y - b.y}; }         \
  inline T2 __hmul2(const T2 &a, const T2 &b) { return {a.x * b.x, a.y * b.y}; }         \
  inline T2 __hfma2(const T2 &a, const T2 &b, const T2 &c) {                             \
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                               \
  }
TRUTH_PAIR(half, half2, __floats2half2_rn, __half22float2, __halves2half2, __low2float, __high2float,
           __float2half2_rn)
TRUTH_PAIR(__nv_bfloat16, __nv_bfloat162, __floats2bfloat162_rn, __bfloat1622float2, __halves2bfloat162,
           __low2float, __high2float, __float2bfloat162_rn)
#undef TRUTH_PAIR
inline half2 __float22half2_rn(const float2 &a) { return {half(a.x), half(a.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(const float2 &a) {
  return {__nv_bfloat16(a.x), __nv_bfloat16(a.y)};
}

/* ---- indices into arrays of known size, where the compiler checks them (-fsanitize=bounds) ---- */

extern "C" {
struct truth_bounds {
  const char *file;
  uint32_t line, column;
  const struct {
    uint16_t kind, information;
    char name[1];
  } * array, *index;
};

inline __attribute__((used)) void __ubsan_handle_out_of_bounds(const truth_bounds *where, uintptr_t index) {
  truth::add_finding("out of bounds index", truth::text("line %u", where->line),
                     truth::text("index %td of an array of type %s in line %u: ", intptr_t(index),
                                 where->array->name, where->line) +
                         truth::who());
}
inline __attribute__((used)) void __ubsan_handle_out_of_bounds_abort(const truth_bounds *where,
                                                                     uintptr_t index) {
  __ubsan_handle_out_of_bounds(where, index);
}
}

/* ---------------------------------------------------------------------------------------------------
 * Command line: TRUTH_MAIN(kernel, ...) makes a program that runs kernels on numbers from files.
 *
 *     program --array q=q.f32 --array o=1024 --array dq=1024:0 --array dout=dout.f32
 *             --forward  'attention grid=2,4 block=64 shared=4096 args=q,k,v,o,64,0.25'
 *             --backward 'attention_backward grid=8 block=64 args=q,k,v,o,dout,dq,dk,dv,64,0.25'
 *             --seed o=dout --gradient q=dq --gradient k=dk
 *
 *     --array NAME=FILE       numbers: .f64, .f32 (in the machine's byte order), .txt (words)
 *     --array NAME=COUNT      so many numbers that nobody has written; COUNT:0, so many zeros
 *     --forward, --backward   launches, in this order; as often as wanted. A plain function is a launch without
 *                             grid and block
 *     --seed OUTPUT=ARRAY     what the forward wrote to OUTPUT has the gradient that ARRAY holds
 *     --gradient INPUT=ARRAY  ARRAY, from the backward or from a file, must hold INPUT's gradient
 *     --equal OUTPUT=ARRAY    ARRAY, of a file, must hold what the forward wrote to OUTPUT
 *     --tolerance T           how far they may be apart, relative to the largest expected; default 1e-6
 *     --write DIRECTORY       writes OUTPUT.f64 of every --seed and d_INPUT.f64 of every --gradient there; then
 *                             `--gradient INPUT` may compare with nothing
 *     --f32                   rounds every value to f32
 *     --early-return          allows threads to leave before others' barriers
 *     --unrounded-halves      rounds no half and bf16, where gradients are stored in them
 *
 * An array has the type of the kernels that take it, which must all take it as the same.
 *
 * The status is 0 where nothing was found and everything agrees, 1 where not, 2 where the command is wrong.
 * ------------------------------------------------------------------------------------------------- */

namespace truth {

struct command {
  using strings = std::vector<std::string>;
  using pairs = std::vector<std::pair<std::string, std::string>>;
  pairs arrays, seeds, gradients, equals;
  strings forward, backward;
  std::string directory;
  double tolerance = 1e-6;
};

constexpr int refused = 2; /* the status of what cannot be done */

[[noreturn]] inline void refuse(const std::string &why) { throw std::invalid_argument(why); }

/* What the action returns, or `refused` and why in the error. */
template <class F>
int status_of(F &&action, std::string &error) {
  try {
    return action();
  } catch (const std::exception &e) {
    error = e.what();
    return refused;
  }
}

inline command::strings split(const std::string &all, char at) {
  command::strings parts;
  std::stringstream stream(all);
  for (std::string part; std::getline(stream, part, at);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

inline std::pair<std::string, std::string> split_pair(const std::string &all) {
  const size_t at = all.find('=');
  return {all.substr(0, at), at == std::string::npos ? "" : all.substr(at + 1)};
}

inline double number_of(const std::string &word) {
  char *end;
  const double number = std::strtod(word.c_str(), &end);
  if (word.empty() || *end) refuse(word + ": expected a number");
  return number;
}

inline bool ends_in(const std::string &all, const std::string &end) {
  return all.size() >= end.size() && all.compare(all.size() - end.size(), end.size(), end) == 0;
}

template <class T>
std::vector<double> numbers_of_bytes(const std::string &bytes) {
  std::vector<T> numbers(bytes.size() / sizeof(T));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
  return {numbers.begin(), numbers.end()};
}

inline std::vector<double> read_numbers(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path + ": cannot be read");
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (ends_in(path, ".f64")) return numbers_of_bytes<double>(bytes);
  if (ends_in(path, ".f32")) return numbers_of_bytes<float>(bytes);
  if (!ends_in(path, ".txt")) refuse(path + ": expected a name that ends in .f64, .f32 or .txt");
  std::vector<double> numbers;
  std::stringstream words(bytes);
  for (std::string word; words >> word;) numbers.push_back(number_of(word));
  return numbers;
}

inline void write_numbers(const std::string &path, const std::vector<double> &numbers) {
  std::ofstream file(path, std::ios::binary);
  file.write((const char *)numbers.data(), std::streamsize(numbers.size() * sizeof(double)));
  if (!file) refuse(path + ": cannot be written");
}

/* What an array starts as. */
struct specification {
  enum { unwritten, zeros, numbers } start;
  size_t count;
  std::vector<double> values; /* of numbers */
};

inline specification specify(const std::vector<double> &values) {
  return {specification::numbers, values.size(), values};
}

/* COUNT, COUNT:0 or the name of a file. */
inline specification specify(const std::string &what) {
  if (what.find_first_not_of("0123456789:") != std::string::npos) return specify(read_numbers(what));
  if (!ends_in(what, ":0")) return {specification::unwritten, size_t(number_of(what)), {}};
  return {specification::zeros, size_t(number_of(what.substr(0, what.size() - 2))), {}};
}

/* Arrays, made when a kernel first takes them, of the type that it takes. No two have a name, since what one
 * kernel writes to an array another would not see in one of its own. */
class arrays_by_name {
 public:
  /* Replaces what has that name. */
  void add(const std::string &name, specification what) {
    std::apply([&](auto &...of_type) { (of_type.erase(name), ...); }, all);
    specifications[name] = std::move(what);
  }

  size_t count(const std::string &name) const {
    if (!specifications.count(name)) refuse(name + ": expected an array of that name");
    return specifications.at(name).count;
  }

  template <class T>
  array<T> &get(const std::string &name) {
    auto &of_type = std::get<made<T>>(all);
    if (!of_type.count(name)) {
      const char *other = type_of(name);
      if (other) refuse(name + ": expected an array of " + other + ", as before, got one of " + name_of<T>());
      of_type[name] = make<T>(name);
    }
    return *of_type[name];
  }

  /* Something done with the array, whatever its type; of reals where no kernel took it. */
  template <size_t type = 0, class F>
  auto with(const std::string &name, F &&f) {
    if constexpr (type + 1 == std::tuple_size_v<types>) {
      return f(get<real>(name));
    } else {
      auto &of_type = std::get<type>(all);
      return of_type.count(name) ? f(*of_type[name]) : with<type + 1>(name, f);
    }
  }

 private:
  template <class T>
  using made = std::map<std::string, std::unique_ptr<array<T>>>;
  using types = std::tuple<made<half>, made<bf16>, made<int>, made<unsigned>, made<long>, made<long long>,
                           made<unsigned long>, made<unsigned char>, made<real>>;
  static constexpr const char *type_names[] = {"half",          "__nv_bfloat16", "int",
                                               "unsigned",      "long",          "long long",
                                               "unsigned long", "unsigned char", "float"};
  types all;
  std::map<std::string, specification> specifications;

  template <class T, size_t type = 0>
  static const char *name_of() {
    if constexpr (std::is_same_v<std::tuple_element_t<type, types>, made<T>>)
      return type_names[type];
    else
      return name_of<T, type + 1>();
  }

  /* Of which type the array is; nullptr where nothing took it yet. */
  const char *type_of(const std::string &name) const {
    const char *found = nullptr;
    size_t type = 0;
    std::apply(
        [&](auto &...of_type) { ((found = of_type.count(name) ? type_names[type] : found, type++), ...); },
        all);
    return found;
  }

  template <class T>
  std::unique_ptr<array<T>> make(const std::string &name) {
    auto made = std::make_unique<array<T>>(name, count(name));
    const specification &what = specifications[name];
    if (what.start == specification::numbers) made->fill(what.values);
    if (what.start == specification::zeros) made->clear();
    return made;
  }
};

/* A kernel's argument from a word: an array's name where a pointer is wanted, else a number. */
template <class P>
auto argument(arrays_by_name &arrays, const std::string &word) {
  if constexpr (std::is_pointer_v<P>)
    return arrays.get<std::remove_cv_t<std::remove_pointer_t<P>>>(word).data();
  else
    return P(number_of(word));
}

inline dim3 size_of(const std::string &word) {
  const command::strings sizes = split(word, ',');
  unsigned of[3] = {1, 1, 1};
  for (size_t i = 0; i < sizes.size() && i < 3; i++) of[i] = unsigned(number_of(sizes[i]));
  return {of[0], of[1], of[2]};
}

enum class act { take, launch }; /* only make the arrays that a kernel takes, or run it, too */

struct runnable {
  std::string name;
  std::function<void(arrays_by_name &, const std::string &, act)> run;
};

template <class R, class... P, size_t... I>
void run_words(R (*kernel)(P...), arrays_by_name &arrays, dim3 grid, dim3 block, size_t shared,
               const command::strings &words, act act, std::index_sequence<I...>) {
  const auto arguments = std::make_tuple(argument<std::decay_t<P>>(arrays, words[I])...);
  if (act == act::launch) launch(kernel, grid, block, shared, std::get<I>(arguments)...);
}

template <class R, class... P>
runnable make_runnable(const std::string &name, R (*kernel)(P...)) {
  return {name, [=](arrays_by_name &arrays, const std::string &line, act act) {
            std::map<std::string, std::string> is;
            for (const std::string &word : split(line, ' ')) is.insert(split_pair(word));
            const command::strings words = split(is["args"], ',');
            if (words.size() != sizeof...(P))
              refuse(name + text(": expected args= with %zu arguments, got %zu", sizeof...(P), words.size()));
            run_words(kernel, arrays, size_of(is["grid"]), size_of(is["block"]),
                      is["shared"].empty() ? 0 : size_t(number_of(is["shared"])), words, act,
                      std::index_sequence_for<P...>());
          }};
}

/* Names as the preprocessor lists them: commas within <> part no two. */
template <class... K>
std::vector<runnable> make_runnables(const std::string &list, K... kernels) {
  command::strings names(1);
  int depth = 0;
  for (char c : list) {
    depth += (c == '<') - (c == '>');
    if (c == ',' && depth == 0)
      names.emplace_back();
    else if (c != ' ')
      names.back() += c;
  }
  size_t i = 0;
  return {make_runnable(names[i++], kernels)...};
}

/* False where there is no such option. */
inline bool set_option(const std::string &word) {
  if (word == "--f32")
    options().arithmetic = settings::f32;
  else if (word == "--early-return")
    options().allow_early_return = true;
  else if (word == "--unrounded-halves")
    options().round_halves = false;
  else
    return false;
  return true;
}

inline command parse(int count, char **words) {
  command c;
  for (int i = 1; i < count; i++) {
    const std::string word = words[i];
    if (set_option(word)) continue;
    if (i + 1 == count) refuse(word + ": expected a value, or no such option");
    const std::string value = words[++i];
    if (word == "--array")
      c.arrays.push_back(split_pair(value));
    else if (word == "--seed")
      c.seeds.push_back(split_pair(value));
    else if (word == "--gradient")
      c.gradients.push_back(split_pair(value));
    else if (word == "--equal")
      c.equals.push_back(split_pair(value));
    else if (word == "--forward")
      c.forward.push_back(value);
    else if (word == "--backward")
      c.backward.push_back(value);
    else if (word == "--write")
      c.directory = value;
    else if (word == "--tolerance")
      c.tolerance = number_of(value);
    else
      refuse(word + ": no such option");
  }
  for (const auto &[input, array] : c.gradients)
    if (array.empty() && c.directory.empty())
      refuse("--gradient " + input + ": expected an array to compare with, or --write");
  return c;
}

inline void run_line(const std::vector<runnable> &kernels, arrays_by_name &arrays, const std::string &line,
                     act act = act::launch) {
  const std::string name = line.substr(0, line.find(' '));
  for (const runnable &kernel : kernels)
    if (kernel.name == name) return kernel.run(arrays, line, act);
  refuse(name + ": expected the name of a kernel");
}

inline void compare_arrays(const std::string &what, const std::vector<double> &got,
                           const std::vector<double> &expected, double tolerance) {
  if (got.size() != expected.size())
    refuse(what + text(": expected %zu numbers, got %zu", expected.size(), got.size()));
  if (!expect(what, got, expected, tolerance)) return;
  const comparison c = compare(got, expected);
  std::printf("%s agrees: the largest error is %.2e of the largest\n", what.c_str(),
              c.size ? c.error / c.size : 0);
}

inline int run_command(const command &c, const std::vector<runnable> &kernels) {
  arrays_by_name arrays;
  for (const auto &[name, what] : c.arrays) arrays.add(name, specify(what));
  const auto values = [&](const std::string &name) {
    return arrays.with(name, [](auto &a) { return a.values(); });
  };
  /* First all arrays, of the types that kernels take them as: seeds are read before the backward takes them. */
  for (const auto *lines : {&c.forward, &c.backward})
    for (const std::string &line : *lines) run_line(kernels, arrays, line, act::take);
  for (const std::string &line : c.forward) run_line(kernels, arrays, line);
  std::vector<beside> seeds;
  for (const auto &[output, seed] : c.seeds) {
    const std::vector<double> gradient = values(seed);
    if (gradient.size() != values(output).size())
      refuse(seed + ": expected as many numbers as " + output + " has");
    arrays.with(output, [&](auto &a) { seeds.emplace_back(a, gradient); });
    if (!c.directory.empty()) write_numbers(c.directory + "/" + output + ".f64", values(output));
  }
  for (const auto &[output, expected] : c.equals)
    compare_arrays(output, values(output), values(expected), c.tolerance);
  const gradients truth = reverse(seeds);
  const size_t operations = the_tape().nodes.size();
  for (const std::string &line : c.backward) run_line(kernels, arrays, line);
  for (const auto &[input, given] : c.gradients) {
    const std::vector<double> expected = arrays.with(input, [&](auto &a) { return truth.of(a); });
    if (!c.directory.empty()) write_numbers(c.directory + "/d_" + input + ".f64", expected);
    if (!given.empty()) compare_arrays("gradient of " + input, values(given), expected, c.tolerance);
  }
  std::printf("%zu numbers of %zu bytes on the tape of the forward\n", operations, bytes_per_operation);
  return report();
}

inline int run_command(int count, char **words, const std::vector<runnable> &kernels) {
  std::string error;
  const int status = status_of([&] { return run_command(parse(count, words), kernels); }, error);
  if (status == refused) std::fprintf(stderr, "%s\n", error.c_str());
  return status;
}

}  // namespace truth

#define TRUTH_MAIN(...)                                                                        \
  int main(int count, char **words) {                                                          \
    return truth::run_command(count, words, truth::make_runnables(#__VA_ARGS__, __VA_ARGS__)); \
  }

/* ---------------------------------------------------------------------------------------------------
 * Shared library: TRUTH_EXPORT(kernel, ...) defines the functions for C that this file declares first.
 * ------------------------------------------------------------------------------------------------- */

namespace truth {

/* What a library remembers from call to call. */
class session {
 public:
  std::string error;

  session() { the_machine(); } /* which the arrays must not outlive */

  int offer(std::vector<runnable> runnables) {
    kernels = std::move(runnables);
    return 0;
  }

  int add(const char *name, const double *values, size_t count) {
    return status([&] {
      arrays.add(name, values ? specify(std::vector<double>(values, values + count))
                              : specification{specification::unwritten, count, {}});
    });
  }

  int launch(const char *line) {
    const int done = status([&] { run_line(kernels, arrays, line); });
    return done ? done : status_of_findings();
  }

  int values(const char *name, double *values, size_t count) {
    return copy(name, values, count, [](auto &a) { return a.values(); });
  }

  int seed(const char *name, const double *gradient, size_t count) {
    by_seeds = {};
    return keep(seeds, name, gradient, count);
  }

  int gradient(const char *name, double *gradient, size_t count) {
    return copy(name, gradient, count, [&](auto &a) {
      if (by_seeds.by_name.empty()) by_seeds = reverse(all_of(seeds));
      return by_seeds.of(a);
    });
  }

  int direction(const char *name, const double *direction, size_t count) {
    along = {};
    return keep(directions, name, direction, count);
  }

  /* A tape that has grown has numbers whose derivatives are not known yet. */
  int tangent(const char *name, double *tangent, size_t count) {
    return copy(name, tangent, count, [&](auto &a) {
      if (along.by_name.size() != the_tape().nodes.size()) along = forward(all_of(directions));
      return along.of(a);
    });
  }

  int option(const char *word) {
    return status([&] {
      if (!set_option(word)) refuse(std::string(word) + ": no such option");
    });
  }

  int clear() {
    arrays = {};
    seeds.clear();
    directions.clear();
    by_seeds = {};
    along = {};
    findings().clear();
    options() = settings();
    clear_tape();
    return 0;
  }

  const char *text() { return (found = text_of_findings()).c_str(); }

 private:
  using by_array = std::map<std::string, beside>;
  std::vector<runnable> kernels;
  arrays_by_name arrays;
  by_array seeds, directions;
  gradients by_seeds;
  tangents along;
  std::string found;

  template <class F>
  int status(F &&action) {
    return status_of([&] { return action(), 0; }, error);
  }

  static std::vector<beside> all_of(const by_array &kept) {
    std::vector<beside> all;
    for (const auto &[name, numbers] : kept) all.push_back(numbers);
    return all;
  }

  static void check_count(const std::string &name, size_t count, size_t expected) {
    if (count != expected) refuse(name + truth::text(": expected %zu numbers, got %zu", expected, count));
  }

  int keep(by_array &where, const char *name, const double *values, size_t count) {
    return status([&] {
      check_count(name, count, arrays.count(name));
      const std::vector<double> numbers(values, values + count);
      arrays.with(name, [&](auto &a) { where.insert_or_assign(name, beside(a, numbers)); });
    });
  }

  /* Integers have as many values as others, and no derivatives. */
  template <class F>
  int copy(const char *name, double *to, size_t count, F &&numbers_of) {
    return status([&] {
      const std::vector<double> numbers = arrays.with(name, numbers_of);
      check_count(name, count, numbers.size());
      std::copy(numbers.begin(), numbers.end(), to);
    });
  }
};

inline session &the_session() {
  static session session;
  return session;
}

using f64 = double; /* which TRUTH_EXPORT says where TRUTH_FLOAT has made a double a number */

}  // namespace truth

#define TRUTH_EXPORT(...)                                                                               \
  static const int truth_offered =                                                                      \
      truth::the_session().offer(truth::make_runnables(#__VA_ARGS__, __VA_ARGS__));                     \
  extern "C" {                                                                                          \
  int truth_array(const char *name, const truth::f64 *values, size_t count) {                           \
    return truth::the_session().add(name, values, count);                                               \
  }                                                                                                     \
  int truth_launch(const char *line) { return (void)truth_offered, truth::the_session().launch(line); } \
  int truth_values(const char *name, truth::f64 *values, size_t count) {                                \
    return truth::the_session().values(name, values, count);                                            \
  }                                                                                                     \
  int truth_seed(const char *output, const truth::f64 *gradient, size_t count) {                        \
    return truth::the_session().seed(output, gradient, count);                                          \
  }                                                                                                     \
  int truth_gradient(const char *input, truth::f64 *gradient, size_t count) {                           \
    return truth::the_session().gradient(input, gradient, count);                                       \
  }                                                                                                     \
  int truth_direction(const char *input, const truth::f64 *direction, size_t count) {                   \
    return truth::the_session().direction(input, direction, count);                                     \
  }                                                                                                     \
  int truth_tangent(const char *output, truth::f64 *tangent, size_t count) {                            \
    return truth::the_session().tangent(output, tangent, count);                                        \
  }                                                                                                     \
  int truth_option(const char *option) { return truth::the_session().option(option); }                  \
  int truth_clear(void) { return truth::the_session().clear(); }                                        \
  const char *truth_findings(void) { return truth::the_session().text(); }                              \
  const char *truth_error(void) { return truth::the_session().error.c_str(); }                          \
  }

#ifdef TRUTH_FLOAT
#define float truth::real
#define double truth::real
#endif

#endif /* __cplusplus */
#endif
