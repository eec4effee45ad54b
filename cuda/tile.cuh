// Tile primitives: shared-memory tiles of 16-bit elements, asynchronous copies, fragments and products on
// tensor cores. Nothing here knows of attention.
#pragma once

#include "kinds.cuh"
#include "ptx.cuh"

namespace fa {

// ---- tiles in shared memory ------------------------------------------------------------------------

// A tile [ROWS, COLS] lies in chunks of 8 elements (16 bytes). Chunks are permuted within a row so that 8 rows
// of one chunk column, which is what one 8x8 matrix of ldmatrix reads, lie in 8 different groups of banks.
template <int ROWS_, int COLS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  static constexpr int CHUNKS = COLS / 8, ROW_BYTES = COLS * 2, BYTES = ROWS * ROW_BYTES;
  static_assert(CHUNKS % 4 == 0, "a row fills half of the banks, or all of them a whole number of times");

  __device__ static int swizzle(int row) { return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3; }
  __device__ static uint32_t offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ swizzle(row)) << 4);
  }
};

// Starts the copy of a tile whose row 0 lies at `from`; rows from num_rows on and columns from num_cols on
// become 0. Where `from` and stride_row are not multiples of 16 bytes (aligned), the copy is done on return.
template <class T, int THREADS>
__device__ inline void load_tile(uint32_t tile, const uint16_t *from, int64_t stride_row, int num_rows,
                                 int num_cols, bool aligned) {
  constexpr int ROWS_AT_ONCE = THREADS / T::CHUNKS, PASSES = T::ROWS / ROWS_AT_ONCE;
  static_assert(THREADS % T::CHUNKS == 0 && T::ROWS % ROWS_AT_ONCE == 0, "every thread copies equally much");
  const int chunk = threadIdx.x % T::CHUNKS, first = threadIdx.x / T::CHUNKS;
  const int wanted = min(max(num_cols - chunk * 8, 0), 8);
  const uint16_t *chunk_from = wanted > 0 ? from + first * stride_row + chunk * 8 : from;
  if (aligned && num_rows >= T::ROWS) {
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
      copy_async(tile + T::offset(first + pass * ROWS_AT_ONCE, chunk),
                 chunk_from + pass * ROWS_AT_ONCE * stride_row, 2 * wanted);
  } else if (aligned) {
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      const int row = first + pass * ROWS_AT_ONCE;
      const bool inside = row < num_rows;
      copy_async(tile + T::offset(row, chunk), inside ? chunk_from + pass * ROWS_AT_ONCE * stride_row : from,
                 inside ? 2 * wanted : 0);
    }
  } else {
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      const int row = first + pass * ROWS_AT_ONCE;
      uint32_t e[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        e[i] = row < num_rows && i < wanted ? chunk_from[pass * ROWS_AT_ONCE * stride_row + i] : 0;
      store_shared(tile + T::offset(row, chunk),
                   make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16));
    }
  }
}

// Makes the rows of a tile 0 that lie before `begin` or from `end` on; `thread` of THREADS calls this.
template <class T, int THREADS>
__device__ inline void clear_rows(uint32_t tile, int begin, int end, int thread) {
  constexpr int CHUNKS = T::COLS / 8;
#pragma unroll 1
  for (int i = thread; i < T::ROWS * CHUNKS; i += THREADS)
    if (i / CHUNKS < begin || i / CHUNKS >= end)
      store_shared(tile + T::offset(i / CHUNKS, i % CHUNKS), make_uint4(0, 0, 0, 0));
}

// ---- operands of a product -------------------------------------------------------------------------

// One operand of a product is read from a tile as fragments of 16 by 16. Its two axes are `own` (the rows of a
// left operand, the columns of a right one) and k, along which the product sums. It is the LEFT or the right
// operand, and its tile is [own, k] (K_IN_ROW) or [k, own].
template <class T, bool LEFT, bool K_IN_ROW>
struct TileOperand {
  uint32_t base, column;

  // own_begin, a multiple of the part's length, is where this warp's part of the own axis begins.
  __device__ TileOperand(uint32_t tile, int own_begin) {
    const int lane = threadIdx.x % 32;
    // This lane points ldmatrix at this row of that 8x8 matrix.
    const bool down_first = LEFT == K_IN_ROW;
    const int row = down_first ? lane & 15 : (lane & 7) | (lane >> 4 << 3);
    const int chunk = (down_first ? lane >> 4 : lane >> 3 & 1) + (K_IN_ROW ? 0 : own_begin / 8);
    base = tile + (row + (K_IN_ROW ? own_begin : 0)) * T::ROW_BYTES;
    column = (chunk ^ T::swizzle(row)) << 4;
  }

  __device__ void read(uint32_t (&fragment)[4], int part, int own, int k) const {
    const int row = K_IN_ROW ? own : k, chunk = K_IN_ROW ? k : own;
    load_matrices<!K_IN_ROW>(fragment,
                             base + part * T::BYTES + row * 16 * T::ROW_BYTES + ((chunk * 32) ^ column));
  }
};

// A left operand can lie in registers, too.
template <int PARTS, int OWN, int K>
struct RegisterOperand {
  uint32_t fragments[PARTS][OWN][K][4];

  __device__ void read(uint32_t (&fragment)[4], int part, int own, int k) const {
#pragma unroll
    for (int i = 0; i < 4; i++) fragment[i] = fragments[part][own][k][i];
  }
};

// One warp holds the accumulator of a product [16 * MT, 8 * NT]. Of block [m, n], elements 0 and 1 of lane l
// are those of row l / 4 in columns 2 * (l % 4) and the next, and elements 2 and 3 those of row l / 4 + 8
// there.
template <int MT, int NT>
using Accumulator = float[MT][NT][4];
// Columns are tested and left out by groups of so many tiles of 8.
constexpr int TILES_A_TEST = 4;

// Calls visit(row, column, element) for the elements in columns 8 * begin <= column < 8 * end; row and column
// are counted within the accumulator.
template <int MT, int NT, class Visit>
__device__ inline void for_each_element(Accumulator<MT, NT> &acc, int begin, int end, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = begin; n < end; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          visit(m * 16 + half * 8 + lane / 4, n * 8 + lane % 4 * 2 + i, acc[m][n][half * 2 + i]);
}

template <int MT, int NT, class Visit>
__device__ inline void for_each_element(Accumulator<MT, NT> &acc, Visit visit) {
  for_each_element<MT, NT>(acc, 0, NT, visit);
}

template <int MT, int NT>
__device__ inline void set_zero(Accumulator<MT, NT> &acc) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
}

// Makes acc += scale * left * right, over KT fragments of k; scale unscales the operands of a SCALED kind.
//
// Tensor cores add to their accumulator by cutting off, which leans towards 0 and adds up over a long sum. So
// where f32 is asked for, a product goes into fresh accumulators, the small terms (high * low, low * high)
// apart from the large ones, and from there by ordinary additions into acc: NC column blocks at a time.
template <class Kind, int KT, int NC, int MT, int NT, class Left, class Right>
__device__ inline void multiply(Accumulator<MT, NT> &acc, const Left &left, const Right &right,
                                float scale = 1) {
  using Element = typename Kind::Element;
  static_assert(NT % NC == 0 && NC % 2 == 0, "column blocks come in pairs");
  if constexpr (!Kind::SCALED) {
#pragma unroll
    for (int k = 0; k < KT; k++) {
      uint32_t a[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) left.read(a[m], 0, m, k);
#pragma unroll
      for (int n = 0; n < NT / 2; n++) {
        uint32_t b[4];
        right.read(b, 0, n, k);
#pragma unroll
        for (int m = 0; m < MT; m++) {
          mma(Element(), acc[m][2 * n], a[m], b[0], b[1]);
          mma(Element(), acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  } else {
    constexpr int PARTS = Kind::PARTS;
#pragma unroll
    for (int begin = 0; begin < NT; begin += NC) {
      float fresh[PARTS][MT][NC][4];  // [0] is for high * high, [1] for the small terms
#pragma unroll
      for (int part = 0; part < PARTS; part++) set_zero<MT, NC>(fresh[part]);
#pragma unroll
      for (int k = 0; k < KT; k++) {
        uint32_t a[PARTS][MT][4];
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
          for (int m = 0; m < MT; m++) left.read(a[part][m], part, m, k);
#pragma unroll
        for (int n = 0; n < NC / 2; n++) {
          uint32_t b[PARTS][4];
#pragma unroll
          for (int part = 0; part < PARTS; part++) right.read(b[part], part, begin / 2 + n, k);
#pragma unroll
          for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              mma(Element(), fresh[0][m][2 * n + i], a[0][m], b[0][2 * i], b[0][2 * i + 1]);
              if constexpr (PARTS == 2) {
                mma(Element(), fresh[1][m][2 * n + i], a[0][m], b[1][2 * i], b[1][2 * i + 1]);
                mma(Element(), fresh[1][m][2 * n + i], a[1][m], b[0][2 * i], b[0][2 * i + 1]);
              }
            }
        }
      }
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NC; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float sum = fresh[0][m][n][i];
            if constexpr (PARTS == 2) sum += fresh[1][m][n][i];
            acc[m][begin + n][i] = fmaf(scale, sum, acc[m][begin + n][i]);
          }
    }
  }
}

// Makes two neighbours in a row of an accumulator, from column n * 8 on, elements of the left operand of a
// product along its columns, of which two column blocks are a step of k. Only SCALED kinds have a scale.
template <class Kind, int KT>
__device__ inline void convert_pair(uint32_t (&operand)[Kind::PARTS][KT][4], int n, int half, float x0,
                                    float x1, float scale) {
  uint32_t parts[Kind::PARTS];
  if constexpr (Kind::SCALED) x0 *= scale, x1 *= scale;
  split<Kind>(parts, x0, x1);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++) operand[part][n / 2][n % 2 * 2 + half] = parts[part];
}
template <class Kind, int KT>
__device__ inline void convert(uint32_t (&operand)[Kind::PARTS][KT][4], const float (&acc)[1][2 * KT][4],
                               float scale = 1) {
#pragma unroll
  for (int n = 0; n < 2 * KT; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      convert_pair<Kind>(operand, n, half, acc[0][n][half * 2], acc[0][n][half * 2 + 1], scale);
}

// ---- results -----------------------------------------------------------------------------------------

__device__ inline void store_number(float *to, float x) { *to = x; }
__device__ inline void store_number(__half *to, float x) { *to = __float2half_rn(x); }
__device__ inline void store_number(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

// Transposes words among four neighbouring lanes: word i of lane l goes to word l of lane i.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + step], step);
      (upper ? words[i] : words[i + step]) = got;
    }
  }
}

// Writes 32 columns of a row, of which this lane holds those of an accumulator in four column blocks, in the
// widest pieces that the address allows. Every lane of the warp takes part.
template <class Io>
__device__ inline void store_row(Io *to, const float (&x)[8], bool inside, int num_cols) {
  const int lane = threadIdx.x % 4;
  const bool whole = num_cols >= 32 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
  if constexpr (sizeof(Io) == 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pack(Io(), x[2 * i], x[2 * i + 1]);
    transpose_quad(words);
    if (inside && whole)
      *reinterpret_cast<uint4 *>(to + lane * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if (inside && whole) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<float2 *>(to + i * 8 + lane * 2) = make_float2(x[2 * i], x[2 * i + 1]);
  }
  if (inside && !whole) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int col = i / 2 * 8 + lane * 2 + i % 2;
      if (col < num_cols) store_number(to + col, x[i]);
    }
  }
}

// Writes scale * acc to memory: element [row, col] of the accumulator goes to to[row * stride_row + col], where
// row < num_rows and col < num_cols.
template <class Io, int MT, int NT>
__device__ inline void store_accumulator(Io *to, int64_t stride_row, int num_rows, int num_cols,
                                         const Accumulator<MT, NT> &acc, const float (&scale)[MT][2]) {
  static_assert(NT % 4 == 0, "32 columns at a time");
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = m * 16 + half * 8 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int n = 0; n < NT; n += 4) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = acc[m][n + i / 2][half * 2 + i % 2] * scale[m][half];
        store_row(to + row * stride_row + n * 8, x, row < num_rows, num_cols - n * 8);
      }
    }
}

template <class Io, int MT, int NT>
__device__ inline void store_accumulator(Io *to, int64_t stride_row, int num_rows, int num_cols,
                                         const Accumulator<MT, NT> &acc, float scale) {
  float scales[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) scales[m][0] = scales[m][1] = scale;
  store_accumulator(to, stride_row, num_rows, num_cols, acc, scales);
}

}  // namespace fa
