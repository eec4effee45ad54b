// What the forward of few rows is made of: copies of single rows of k and v by one warp, products of f32
// numbers on tensor cores without a scaled copy of them, and the merge of parts.
#pragma once

#include "operand.cuh"
#include "softmax.cuh"

namespace fa {
namespace decode {

// ---- tiles ---------------------------------------------------------------------------------------------

// A tile [ROWS, COLS] of f32 in chunks of 4 numbers (16 bytes). Quarters of a warp read either two rows of four
// chunks or four rows, two apart, of two chunks: both lie in 8 different groups of banks.
template <int ROWS_, int COLS_>
struct WideTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  static constexpr int CHUNKS = COLS / 4, ROW_BYTES = COLS * 4, BYTES = ROWS * ROW_BYTES;

  __device__ static uint32_t offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row & 6) ^ (row & 1) << 2) << 4);
  }
};

template <class Kind, int ROWS, int COLS>
using TileOf = std::conditional_t<Kind::SCALED, WideTile<ROWS, COLS>, Tile<ROWS, COLS>>;

// A tile and the threads that copy it, THREADS of them, of which this is number `thread`: which rows it copies
// a chunk of, and how many numbers of that chunk are there.
template <class Io, class T, int THREADS>
struct TileCopy {
  static constexpr int IN_CHUNK = 16 / sizeof(Io), PASSES = T::ROWS * T::CHUNKS / THREADS;
  static_assert(T::ROWS * T::CHUNKS % THREADS == 0, "every thread copies equally much");
  // Rows that are apart, if a thread has the same chunk of each; else halves of rows.
  static constexpr int ROWS_APART = THREADS / T::CHUNKS, PASSES_A_ROW = ROWS_APART ? 1 : T::CHUNKS / THREADS;
  static_assert(ROWS_APART ? THREADS % T::CHUNKS == 0 : T::CHUNKS % THREADS == 0, "rows are whole");
  const int thread, num_cols;

  __device__ int row(int pass) const {
    return ROWS_APART ? thread / T::CHUNKS + pass * ROWS_APART : pass / PASSES_A_ROW;
  }
  __device__ int chunk(int pass) const {
    return ROWS_APART ? thread % T::CHUNKS : thread + pass % PASSES_A_ROW * THREADS;
  }
  __device__ int wanted(int pass) const { return min(max(num_cols - chunk(pass) * IN_CHUNK, 0), IN_CHUNK); }
  __device__ uint32_t offset(int pass) const { return T::offset(row(pass), chunk(pass)); }

  // Rows stride_row apart, all of which are there; `from`: the first.
  __device__ void start(uint32_t tile, const Io *from, int64_t stride_row) const {
    const Io *mine = from + row(0) * stride_row;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int count = wanted(pass);
      copy_async(tile + offset(pass), count > 0 ? mine + chunk(pass) * IN_CHUNK : from, count * sizeof(Io));
      if (pass % PASSES_A_ROW == PASSES_A_ROW - 1) mine += (ROWS_APART ? ROWS_APART : 1) * stride_row;
    }
  }
  // Row r comes from row_at(r), or is 0 where that is NULL; `nowhere`: what may be read there, but is not.
  template <class RowAt>
  __device__ void start(uint32_t tile, RowAt row_at, const Io *nowhere) const {
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const Io *from = row_at(row(pass));
      const int count = from ? wanted(pass) : 0;
      copy_async(tile + offset(pass), count > 0 ? from + chunk(pass) * IN_CHUNK : nowhere, count * sizeof(Io));
    }
  }
  // The same of rows at any address, and done on return.
  template <class RowAt>
  __device__ void finish(uint32_t tile, RowAt row_at) const {
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      const Io *from = row_at(row(pass));
      const int count = from ? wanted(pass) : 0;
      alignas(16) Io numbers[IN_CHUNK] = {};
#pragma unroll
      for (int i = 0; i < IN_CHUNK; i++)
        if (i < count) numbers[i] = from[chunk(pass) * IN_CHUNK + i];
      store_shared(tile + offset(pass), reinterpret_cast<const uint4 &>(numbers));
    }
  }
};

// ---- caches ------------------------------------------------------------------------------------------------

// The sequence of a batch whose keys may end before the tensor does.
__device__ inline Sequence cached_sequence(const fa_cuda_arguments &a, const fa_cuda_cache &cache, int batch) {
  Sequence sequence = sequence_of(a, batch);
  if (cache.key_lengths)
    sequence.band = fa_band_to_length(sequence.band, cache.key_lengths[cache.lengths_batch > 1 ? batch : 0]);
  return sequence;
}

// An operand of which a product takes some steps of k alone, from FIRST on.
template <int FIRST, class Operand>
struct StepsFrom {
  const Operand &operand;
  __device__ void read(uint32_t (&fragment)[4], int part, int own, int k) const {
    operand.read(fragment, part, own, FIRST + k);
  }
};

// ---- products of f32 ----------------------------------------------------------------------------------------

// A number as the sum of one or two that have 11 bits.
template <int PARTS>
__device__ inline void split_tf32(uint32_t (&parts)[PARTS][4], int i, float x) {
  parts[0][i] = round_to_tf32(x);
  if constexpr (PARTS == 2) parts[1][i] = round_to_tf32(x - __uint_as_float(parts[0][i]));
}
template <int PARTS>
__device__ inline void split_tf32(uint32_t (&parts)[PARTS][4], float4 x) {
  split_tf32<PARTS>(parts, 0, x.x), split_tf32<PARTS>(parts, 1, x.y);
  split_tf32<PARTS>(parts, 2, x.z), split_tf32<PARTS>(parts, 3, x.w);
}

// fresh += a * b: the large products into fresh[0], the small ones (high * low, low * high) into fresh[1].
template <int PARTS>
__device__ inline void multiply_parts(float (&fresh)[PARTS][4], const uint32_t (&a)[PARTS][4],
                                      const uint32_t (&b)[PARTS][2]) {
  mma_tf32(fresh[0], a[0], b[0][0], b[0][1]);
  if constexpr (PARTS == 2) {
    mma_tf32(fresh[1], a[0], b[1][0], b[1][1]);
    mma_tf32(fresh[1], a[1], b[0][0], b[0][1]);
  }
}

// acc += fresh, by ordinary additions: see multiply in tile.cuh.
template <int PARTS>
__device__ inline void add_fresh(float (&acc)[4], const float (&fresh)[PARTS][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] += PARTS == 2 ? fresh[0][i] + fresh[PARTS - 1][i] : fresh[0][i];
}

// scores[16 * MT, 8 * NT] = q * k^T of tiles of f32, from row q_row of q's on. A sum may run in any order if
// both operands keep to it: the lanes that share a row take four numbers each, of two steps of k.
template <class Kind, int MT, int NT, class QTile, class KTile>
__device__ inline void multiply_wide_scores(float (&scores)[MT][NT][4], uint32_t q_tile, int q_row,
                                            uint32_t k_tile) {
  constexpr int PARTS = Kind::PARTS;
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  float fresh[MT][NT][PARTS][4] = {};
#pragma unroll
  for (int k = 0; k < KTile::COLS / 16; k++) {
    uint32_t q[MT][2][PARTS][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        split_tf32<PARTS>(q[m][half], load_shared_four(q_tile + QTile::offset(q_row + m * 16 + half * 8 + group,
                                                                              k * 4 + lane)));
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint32_t keys[PARTS][4];
      split_tf32<PARTS>(keys, load_shared_four(k_tile + KTile::offset(n * 8 + group, k * 4 + lane)));
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
          uint32_t a[PARTS][4], b[PARTS][2];
#pragma unroll
          for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              b[part][i] = keys[part][step * 2 + i];
#pragma unroll
              for (int half = 0; half < 2; half++) a[part][i * 2 + half] = q[m][half][part][step * 2 + i];
            }
          multiply_parts<PARTS>(fresh[m][n], a, b);
        }
    }
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) scores[m][n][i] = 0;
      add_fresh<PARTS>(scores[m][n], fresh[m][n]);
    }
}

// o[16 * MT, COLS] += p * v of a tile of f32, p [16 * MT, 8 * NT] as an accumulator has it. Element i of half h
// of o's column block 4 * j + b is that of row 8 * h + lane / 4, column 32 * j + 8 * (lane % 4) + 4 * i + b.
template <class Kind, class VTile, int MT, int NT, int DT>
__device__ inline void multiply_wide_values(float (&o)[MT][DT][4], const float (&p)[MT][NT][4],
                                            uint32_t v_tile) {
  constexpr int PARTS = Kind::PARTS;
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  uint32_t weights[MT][NT][PARTS][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
      split_tf32<PARTS>(weights[m][n], make_float4(p[m][n][0], p[m][n][2], p[m][n][1], p[m][n][3]));
#pragma unroll
  for (int j = 0; j < DT / 4; j++) {
    float fresh[MT][4][PARTS][4] = {};
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint32_t values[2][PARTS][4];
#pragma unroll
      for (int i = 0; i < 2; i++)
        split_tf32<PARTS>(values[i],
                          load_shared_four(v_tile + VTile::offset(n * 8 + lane * 2 + i, j * 8 + group)));
#pragma unroll
      for (int column = 0; column < 4; column++) {
        uint32_t b[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
          for (int i = 0; i < 2; i++) b[part][i] = values[i][part][column];
#pragma unroll
        for (int m = 0; m < MT; m++) multiply_parts<PARTS>(fresh[m][column], weights[m][n], b);
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int column = 0; column < 4; column++) add_fresh<PARTS>(o[m][j * 4 + column], fresh[m][column]);
  }
}

// ---- parts ------------------------------------------------------------------------------------------------

// What part of the keys gives one row: the reference maximum in units of the scores, the sum of exponentials
// against it, and some columns of the sum of values that are weighted with these.
struct Part {
  float max = -INFINITY, sum = 0;
  float4 o = {0, 0, 0, 0};
};

// Their sum, always in the order of the parts. state_of(part) gives max and sum, o_of(part) the columns. Parts
// begin, begin + step, ...; unit: exponent_of_unit.
template <class StateOf, class OOf>
__device__ inline Part merge(int begin, int num_parts, int step, float unit, StateOf state_of, OOf o_of) {
  Part merged;
#pragma unroll 4
  for (int part = begin; part < num_parts; part += step) merged.max = fmaxf(merged.max, state_of(part).x);
#pragma unroll 4
  for (int part = begin; part < num_parts; part += step) {
    const float2 state = state_of(part);
    const float4 o = o_of(part);
    const bool sees = state.x != -INFINITY || state.y != 0;  // where not, -inf - -inf may stand for 0
    const float weight = sees ? exp2_fast((state.x - merged.max) * unit) : 0;
    merged.sum = fmaf(weight, state.y, merged.sum);
    merged.o.x = fmaf(weight, o.x, merged.o.x), merged.o.y = fmaf(weight, o.y, merged.o.y);
    merged.o.z = fmaf(weight, o.z, merged.o.z), merged.o.w = fmaf(weight, o.w, merged.o.w);
  }
  return merged;
}

// The last step of a row: sinks join the sum, once; what to multiply o with, and lse.
struct Finish {
  float scale, lse;
};
template <class Kind>
__device__ inline Finish finish_of(const fa_cuda_arguments &a, int head, float max, float sum) {
  const float own = Kind::SCALED ? max : max * a.score.factor;
  float lse = own;
  for (int t = 0; t < a.num_sinks; t++) lse = fmaxf(lse, a.sink[int64_t(t) * a.num_heads + head]);
  if (lse == -INFINITY) return {sum, lse + sum};  // nothing is seen: 0, or the NaN that a score was
  const float rescale = expf(own - lse);
  float total = sum * rescale;
  for (int t = 0; t < a.num_sinks; t++) total += expf(a.sink[int64_t(t) * a.num_heads + head] - lse);
  return {rescale / total, lse + logf(total)};
}

}  // namespace decode
}  // namespace fa
