// A program's work on scores in Hopper's kernels, whose producers bring the bias of a visit to shared memory,
// in the stage of k (forward) or of q (backward). A bias whose rows differ and that no tensor map can describe
// is left to the portable kernels, and so is one of f32, for whose tiles there is no room.
#pragma once

#include "hopper.cuh"
#include "scores.cuh"

namespace fa {
namespace hopper {

// ---- the bias of a visit in shared memory -------------------------------------------------------------------

// Numbers of ROWS rows and COLS columns, as boxes of 128 bytes of each row, which lie as those of BoxTile; or
// the one row that all rows share, whose boxes are 1,024 bytes apart, so that they are not swizzled.
template <int ROWS, int COLS>
struct BiasTile {
  static constexpr int BOX_BYTES = ROWS * 128, ROW_BOX_BYTES = 1024;
  static constexpr int BYTES = ROWS * COLS * 2;  // numbers of f32 come as one row alone

  // Where a number of a row lies; that of a shared row.
  template <class T>
  __device__ static uint32_t offset(int row, int column) {
    const int byte = column * int(sizeof(T));
    return byte / 128 * BOX_BYTES + row * 128 + ((byte / 16 ^ row) % 8 << 4) + byte % 16;
  }
  template <class T>
  __device__ static uint32_t offset_in_row(int column) {
    const int byte = column * int(sizeof(T));
    return byte / 128 * ROW_BOX_BYTES + byte % 128;
  }

  // One thread loads the numbers of a visit, whose first row and column these are; so many bytes arrive.
  __device__ static uint32_t bytes(const fa_cuda_program &program) {
    return program.bias_boxes * 128 * (program.bias.stride_row ? ROWS : 1);
  }
  __device__ static void load(uint32_t to, const fa_cuda_program &program, const CUtensorMap &map,
                              uint32_t barrier, int batch, int head, int first, int column) {
    const fa_cuda_cells &bias = program.bias;
    for (int box = 0; box < program.bias_boxes; box++)
      load_box(to + box * (bias.stride_row ? BOX_BYTES : ROW_BOX_BYTES), map, barrier,
               column + box * program.bias_box_columns, bias.stride_row ? first : 0,
               bias.stride_head ? head : 0, bias.stride_batch ? batch : 0);
  }
};

// Two neighbours, the first in an even column. Flags come as their bits, each a byte of the word that has both.
template <class T>
__device__ inline float2 load_shared_two(uint32_t from) {
  if constexpr (sizeof(T) == 4) return load_shared_pair(from);
  if constexpr (sizeof(T) == 2) return unpack(T(), load_shared_word(from));
  const uint32_t word = load_shared_word(from & ~3u), first = 0xff << (from & 2) * 8;
  return {__uint_as_float(word & first), __uint_as_float(word & first << 8)};
}

// What a score becomes of the number that is added to it, which hides it where it is -inf, whatever it is.
template <class T>
__device__ inline float with_number(float score, float factor, float number) {
  if constexpr (is_flag<T>) return __float_as_uint(number) ? score : -INFINITY;
  return with_addend(score * factor, number);
}

// Of a warp's accumulator, whose first element lies at row and column of the tile, what that has for the four
// elements of each block of 8: visit(n, numbers) is called for each. Rows lie along the accumulator's rows, or,
// TRANSPOSED, along its columns.
template <class Tile, class T, bool TRANSPOSED, int NT, class Visit>
__device__ inline void for_each_bias(uint32_t tile, int row, int column, Visit visit) {
  const int lane = threadIdx.x % 32;
  auto at = [&](int r, int c) { return tile + Tile::template offset<T>(row + r, column + c); };
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t words[4];
      // Matrices 0 and 1 are those of block n.
      if constexpr (TRANSPOSED)
        load_matrices<true>(words, at(n * 8 + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
      else
        load_matrices<false>(words, at(lane % 16, n * 8 + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = unpack(T(), words[i * 2]), y = unpack(T(), words[i * 2 + 1]);
        visit(n + i, {x.x, x.y, y.x, y.y});
      }
    }
  } else {
    // Where a lane's flags lie in the words that have them.
    const uint32_t first = 0xff << (TRANSPOSED ? lane / 4 % 4 : lane % 2 * 2) * 8;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (TRANSPOSED)
          words[i] = load_shared_word(at(n * 8 + lane % 4 * 2 + i % 2, lane / 16 * 4 + i / 2 * 8)) & first;
        else if (i % 2 == 0)
          words[i] =
              load_shared_word(at(lane / 4 + i / 2 * 8, n * 8 + lane % 4 / 2 * 4)) & (first | first << 8);
      }
      if constexpr (!TRANSPOSED)
        for (int i = 0; i < 4; i += 2) words[i + 1] = words[i] & first << 8, words[i] &= first;
      visit(n, {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                __uint_as_float(words[3])});
    }
  }
}

// ---- what is added to scores -------------------------------------------------------------------------------

// The same of a row that all rows share: of the lane's columns, which are two where rows lie along the columns.
// There it is read from memory, and so it is where it has no map.
template <class Tile, class T, bool TRANSPOSED, int NT, class Visit>
__device__ inline void for_each_shared_bias(const fa_cuda_arguments &a, const Place &at, uint32_t tile,
                                            Visit visit) {
  const int lane = threadIdx.x % 32;
  const T *row = numbers_of<const T>(a.program.bias, at.batch, at.head);
  auto number = [&](int column) -> float {
    if (column >= a.window.seqlen_k) return 0;
    if constexpr (is_flag<T>)
      return __uint_as_float(row[column].flag);
    else
      return static_cast<float>(row[column]);
  };
  if constexpr (TRANSPOSED) {
    const float x = number(at.column + lane / 4), y = number(at.column + lane / 4 + 8);
#pragma unroll
    for (int n = 0; n < NT; n++) visit(n, {x, x, y, y});
  } else {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int column = n * 8 + lane % 4 * 2;
      float2 two;
      if (a.program.bias_boxes > 0)
        two = load_shared_two<T>(tile + Tile::template offset_in_row<T>(column));
      else
        two = {number(at.column + column), number(at.column + column + 1)};
      visit(n, {two.x, two.y, two.x, two.y});
    }
  }
}

// How what is added to a visit's scores goes by their places: the head's slope, and the distance of column 0
// from the place beside row 0, in the visit's band.
struct Distance {
  float slope = 0;
  int of_origin = 0;
};

// A visit's products with what is added to them. tile: its bias, where the accumulator's first element lies at
// row and column.
template <class Io, class Tile, bool TRANSPOSED, int NT>
__device__ inline void add_to_visit(float (&scores)[NT][4], const fa_cuda_arguments &a,
                                    const Distance &distance, const Place &at, uint32_t tile, int row,
                                    int column) {
  const fa_cuda_program &program = a.program;
  const int lane = threadIdx.x % 32;
  float factor = program.factor;
  if (program.of_heads[FA_CUDA_ALIBI_SLOPES].data) {
    const int own_row = TRANSPOSED ? lane % 4 * 2 : lane / 4, own_column = TRANSPOSED ? lane / 4 : lane % 4 * 2;
    const float first = float(distance.of_origin + at.row + own_row - at.column - own_column);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int further = TRANSPOSED ? n * 8 + i % 2 - i / 2 * 8 : i / 2 * 8 - n * 8 - i % 2;
        scores[n][i] = fmaf(scores[n][i], factor, -distance.slope * fabsf(first + float(further)));
      }
    factor = 1;
  }
  if (!program.bias.data) return;
  with_type<Io>(program.bias.dtype, [&](auto type) {
    using T = decltype(type);
    auto add = [&](int n, const float(&numbers)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = with_number<T>(scores[n][i], factor, numbers[i]);
    };
    if (!program.bias.stride_row)
      for_each_shared_bias<Tile, T, TRANSPOSED, NT>(a, at, tile, add);
    else if constexpr (sizeof(T) <= 2)
      for_each_bias<Tile, T, TRANSPOSED, NT>(tile, row, column, add);
  });
}

// ---- the backward, transposed ------------------------------------------------------------------------------

// Scores become probabilities, of which those that are dropped are 0 and the others due the program's
// kept_factor, as an operand; the probabilities themselves take the scores' place, negative where they are
// dropped. There is no softcap.
template <class Kind, int NT>
__device__ inline void make_transposed_p_by_program(float (&scores)[1][NT][4],
                                                    uint32_t (&operand)[Kind::PARTS][NT / 2][4],
                                                    const fa_cuda_arguments &a, const fa_dropout &dropout,
                                                    const Place &at, uint32_t shift) {
  const fa_cuda_program &program = a.program;
  if (program.dropout_threshold == 0) return make_transposed_p<Kind>(scores, operand, a.score, shift);
  const float unit = exponent_of_unit<Kind>(a.score);
  const int own_row = threadIdx.x % 4 * 2;
  const uint32_t row_pair = fa_dropout_pair(program.first_row + at.row) + own_row;
  const uint32_t column_pair = fa_dropout_pair(at.column) + threadIdx.x % 32 / 4;
  fa_words words[2];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_shift = load_shared_pair(shift + (n * 8 + own_row) * 4);
    float p[4];
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (n % 2 == 0) words[i] = fa_dropout_words(dropout, row_pair + n * 4 + i, column_pair);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float weight = exponential<Kind>(scores[0][n][i], unit, i % 2 ? row_shift.y : row_shift.x);
      const bool it_stays = stays(words[i % 2].x[i / 2], n % 2, dropout);
      p[i] = it_stays ? weight : 0;
      scores[0][n][i] = it_stays ? weight : -weight;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) convert_pair<Kind>(operand, n, half, p[half * 2], p[half * 2 + 1], 1);
  }
}

// dp becomes ds; p: of make_transposed_p_by_program.
template <class Kind, int NT>
__device__ inline void make_transposed_ds_by_program(float (&ds)[1][NT][4], const float (&p)[1][NT][4],
                                                     const fa_cuda_arguments &a, uint32_t delta) {
  auto p_of = [&](int n) { return make_float4(p[0][n][0], p[0][n][1], p[0][n][2], p[0][n][3]); };
  if (a.program.dropout_threshold == 0) return make_transposed_ds<Kind>(ds, p_of, delta);
  const float kept_factor = a.program.kept_factor;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = load_shared_pair(delta + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float own_delta = i % 2 ? row_delta.y : row_delta.x, weight = p[0][n][i];
      ds[0][n][i] = weight * (weight < 0 ? own_delta : fmaf(ds[0][n][i], kept_factor, -own_delta));
    }
  }
}

// Of a cell that is hidden 0, whatever its dp is.
template <int NT>
__device__ inline float shown_ds(const float (&ds)[1][NT][4], const float (&p)[1][NT][4], int n, int i) {
  return p[0][n][i] == 0 ? 0 : ds[0][n][i];
}

__device__ inline void put_four(float *to, const float (&x)[4], bool adds) {
  if (adds)
    add_four(to, x);
  else
    *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
template <class T>
__device__ inline void put_four(T *to, const float (&x)[4], bool) {
  *reinterpret_cast<uint2 *>(to) = make_uint2(pack(T(), x[0], x[1]), pack(T(), x[2], x[3]));
}

// Stores or adds the gradient by a bias that has a number for each cell: four neighbours of a row at a time,
// which are much less work for the cache than four numbers. Cells that are hidden get 0. p: as it was made.
template <class Io, int NT>
__device__ inline void put_cells(const float (&ds)[1][NT][4], const float (&p)[1][NT][4],
                                 const fa_cuda_arguments &a, const Place &at) {
  const fa_cuda_cells &dbias = a.program.dbias;
  const bool adds = a.program.dbias_step == FA_CUDA_CELLS_ADD;
  const int lane = threadIdx.x % 32;
  // Where the lane's four cells begin in a block of 16 rows and 8 columns.
  const int row = at.row + lane / 8 % 2 * 8 + lane % 4 * 2 + lane / 4 % 2, column = at.column + lane / 16 * 4;
  with_type<Io>(dbias.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!is_flag<T>) {
      T *to = numbers_of<T>(dbias, at.batch, at.head, row) + column;
#pragma unroll
      for (int n = 0; n < NT; n += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // Of a column these are rows i, i + 1, i + 8 and i + 9.
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; i++) words[i] = __float_as_uint(shown_ds(ds, p, n + i / 2, half * 2 + i % 2));
          transpose_quad<4>(words);
          const float x[4] = {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                              __uint_as_float(words[3])};
          if (row + n * 8 < a.window.seqlen_q && column + half * 8 < a.window.seqlen_k)
            put_four(to + n * 8 * dbias.stride_row + half * 8, x, adds);
        }
    }
  });
}

// Adds that by a row that all rows share to the sums of the warp's columns.
template <int NT>
__device__ inline void add_row(const float (&ds)[1][NT][4], const float (&p)[1][NT][4],
                               const fa_cuda_arguments &a, const Place &at) {
  float *to = numbers_of<float>(a.program.dbias, at.batch, at.head);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < NT; n++) sum += shown_ds(ds, p, n, half * 2) + shown_ds(ds, p, n, half * 2 + 1);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int column = at.column + half * 8 + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0 && column < a.window.seqlen_k) atomicAdd(to + column, sum);
  }
}

// The gradients by what was added, of ds; p: of make_transposed_p_by_program.
template <class Kind, int NT>
__device__ inline void take_gradients(const float (&ds)[1][NT][4], const float (&p)[1][NT][4],
                                      const fa_cuda_arguments &a, const Place &at, const Distance &distance,
                                      HeadSums &head_sums) {
  const int lane = threadIdx.x % 32;
  if (a.program.head_sums[FA_CUDA_ALIBI_SLOPES]) {
    const float first = float(distance.of_origin + at.row + lane % 4 * 2 - at.column - lane / 4);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum = fmaf(ds[0][n][i], fabsf(first + float(n * 8 + i % 2 - i / 2 * 8)), sum);
    head_sums.of[FA_CUDA_ALIBI_SLOPES] -= sum;
  }
  if (!a.program.dbias.data) return;
  if (a.program.dbias_step == FA_CUDA_CELLS_ADD_ROWS)
    add_row(ds, p, a, at);
  else
    put_cells<typename Kind::Io>(ds, p, a, at);
}

}  // namespace hopper
}  // namespace fa
