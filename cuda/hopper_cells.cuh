// A program's work on scores in Hopper's kernels. A bias that all rows share, a number a key, comes from the
// keys kernel. Kernels that have nothing else to add fold it: they make it a part of the product q·k, and
// others do so with slopes. In the rest it comes as f32, and with slopes makes terms of columns, which cost an
// addition each. A bias with a number for each score comes in tiles, in the stage of k (forward) or of q
// (backward), which only some kernels have room for; one that no tensor map can describe is left to the
// portable kernels, and so is one of f32 beside 16-bit types. Those of scaled kinds have no room for tiles, and
// take so long for a visit that consumers read its numbers from memory. A mask with a flag for each score comes
// in the same stages, as bits.
#pragma once

#include "hopper.cuh"
#include "scores.cuh"
#include "terms.cuh"

namespace fa {
namespace hopper {

// What of a program a kernel takes, as a sum: slopes, a bias with a number a key, one with a number a score,
// dropout, a mask with a flag a score. What one of them wants of registers and of the cache of instructions the
// others would miss.
enum Program { NO_PROGRAM = 0, SLOPES = 1, KEYS = 2, CELLS = 4, DROPOUT = 8, FLAGS = 16, WHOLE_PROGRAM = 31 };
constexpr uint32_t needs_of_program(int program) {
  return (program & SLOPES ? FA_CUDA_NEEDS_SLOPES : 0) | (program & KEYS ? FA_CUDA_NEEDS_KEYS : 0) |
         (program & CELLS ? FA_CUDA_NEEDS_CELLS : 0) | (program & DROPOUT ? FA_CUDA_NEEDS_DROPOUT : 0) |
         (program & FLAGS ? FA_CUDA_NEEDS_FLAGS : 0);
}

// What of a program changes scores that are shown. Flags alone hide scores as bands do, and leave the rest of a
// kernel as it is without a program.
constexpr int acting_program(int program) { return program == FLAGS ? NO_PROGRAM : program; }

// Whether a bias with a number a score comes in tiles.
constexpr bool tiles_cells(int program) { return !FA_KIND_SCALED && program & CELLS; }

// Whether a kernel makes numbers a key, or slopes, parts of q·k: terms. Beside other things that act on scores
// they come late, and of scaled kinds, whose products are to be multiplied first.
constexpr bool folds_terms(int program) { return !FA_KIND_SCALED && (program == KEYS || program == SLOPES); }

// The needs that a kernel takes with that much of a program. sums: of a backward, whether it gives the
// gradients by what is added; goes_through_visits: of a forward, which asks of each whether slopes make its
// scores rise.
constexpr uint32_t takes_of_program(int program, bool sums = true, bool goes_through_visits = true) {
  if (program == NO_PROGRAM) return 0;
  return needs_of_program(program) | FA_CUDA_NEEDS_COLUMNS_BEHIND |
         (folds_terms(program) ? 0 : FA_CUDA_NEEDS_LATE_TERMS) | (sums ? FA_CUDA_NEEDS_SUMS : 0) |
         (goes_through_visits ? FA_CUDA_NEEDS_SLOPES_BEHIND : 0);
}

// The needs beside a program that a kernel takes.
constexpr uint32_t takes_of_forms(bool general, Forms forms) {
  const uint32_t declined = forms == USUAL_FORM   ? FA_CUDA_FORM_NEEDS
                            : forms == NO_SOFTCAP ? FA_CUDA_NEEDS_SOFTCAP
                                                  : 0;
  return (general ? FA_CUDA_MASK_NEEDS : FA_CUDA_PLAIN_NEEDS) & ~declined;
}

// ---- the bias of a visit in shared memory -------------------------------------------------------------------

// Numbers of 16 bits of ROWS rows and COLS columns, as boxes of 128 bytes of each row, which lie as those of
// BoxTile.
template <int ROWS, int COLS>
struct BiasTile {
  static constexpr int BOX_BYTES = ROWS * 128, BYTES = ROWS * COLS * 2;

  // Of eight columns from one on.
  __device__ static uint32_t offset(int row, int column) {
    return column / 64 * BOX_BYTES + row * 128 + ((column / 8 ^ row) % 8 << 4);
  }

  // One thread loads the numbers of a visit, whose first row and column these are; so many bytes arrive.
  __device__ static uint32_t bytes(const fa_cuda_program &program) { return program.bias_boxes * BOX_BYTES; }
  __device__ static void load(uint32_t to, const fa_cuda_program &program, const CUtensorMap &map,
                              uint32_t barrier, int batch, int head, int row, int column) {
    const fa_cuda_cells &bias = program.bias;
    for (int box = 0; box < program.bias_boxes; box++)
      load_box(to + box * BOX_BYTES, map, barrier, column + box * program.bias_box_columns, row,
               bias.stride_head ? head : 0, bias.stride_batch ? batch : 0);
  }
};

// Of a warp's accumulator, whose first element lies at row and column of the tile, multiples of 16, what that
// has for the four elements of each block of 8: visit(n, numbers) is called for each. Rows lie along the
// accumulator's rows, or, TRANSPOSED, along its columns: then the numbers of a block lie eight rows behind
// those of the one before, and swizzled like them.
template <class Tile, class T, bool TRANSPOSED, int NT, class Visit>
__device__ inline void for_each_bias(uint32_t tile, int row, int column, Visit visit) {
  const int lane = threadIdx.x % 32;
  auto at = [&](int r, int c) { return tile + Tile::offset(row + r, column + c); };
  // Where a lane's numbers of block 0 lie in a transposed visit.
  uint32_t first = TRANSPOSED ? at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8) : 0;
  if constexpr (TRANSPOSED) forget(first);  // or ptxas keeps the addresses of all blocks from visit to visit
  constexpr int NEXT = 8 * 128;
#pragma unroll
  for (int n = 0; n < NT; n += 2) {
    uint32_t words[4];
    // Matrices 0 and 1 are those of block n.
    if constexpr (TRANSPOSED)
      load_matrices<true>(words, first + n * NEXT);
    else
      load_matrices<false>(words, at(lane % 16, n * 8 + lane / 16 * 8));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 x = unpack(T(), words[i * 2]), y = unpack(T(), words[i * 2 + 1]);
      visit(n + i, {x.x, x.y, y.x, y.y});
    }
  }
}

// ---- flags of a visit ---------------------------------------------------------------------------------------

template <int ROWS, int COLUMNS>
constexpr int BYTES_OF_FLAGS = COLUMNS / 8 * ROWS;

// One thread loads those of a tile, whose columns are a block; so many bytes arrive.
template <int ROWS, int COLUMNS>
__device__ inline void load_flags(uint32_t to, const fa_cuda_flags &flags, uint32_t barrier, int batch,
                                  int head, int row, int column) {
  const int64_t first = row_of_flags(flags, batch, head, column / COLUMNS) + row;
  load_bulk(to, static_cast<const char *>(flags.words) + first * (COLUMNS / 8), BYTES_OF_FLAGS<ROWS, COLUMNS>,
            barrier);
}

// A lane's flags of its two rows of an accumulator.
template <int NT>
struct LaneFlags {
  uint32_t of_rows[2];

  // tile: in shared memory; row: the accumulator's first.
  __device__ void hear(uint32_t tile, int row) {
    const int lane = threadIdx.x % 4;
    const uint32_t first = tile + (row + threadIdx.x % 32 / 4) * NT, own = first + lane * (NT / 4);
#pragma unroll
    for (int half = 0; half < 2; half++)
      of_rows[half] = NT == 16  ? load_shared_word(own + half * 8 * NT)
                      : NT == 8 ? load_shared_half(own + half * 8 * NT)
                                : load_shared_word(first + half * 8 * NT) >> lane * 8;
  }
  // Bits that ptxas finds beside each other become predicates together. In a backward it had better not find
  // so many: TILES a row, of eight columns each.
  template <int TILES>
  __device__ void hide(float (&scores)[NT][4]) const {
    static_assert(NT == 16 || NT == 8 || NT == 4, "words have so many bits for each row");
#pragma unroll
    for (int first = 0; first < NT; first += TILES)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = first * 2; i < (first + TILES) * 2; i++)
          if (!(of_rows[half] >> i & 1)) scores[i / 2][half * 2 + i % 2] = -INFINITY;
  }
};

// What a tile's rows ask for, of a forward, each FA_CUDA_FLAG_ROWS of them.
struct KindsOfFlags {
  const uint8_t *kinds;  // of the first ones, or NULL
  int num_blocks;

  __device__ KindsOfFlags(const fa_cuda_flags &flags, int batch, int head, int row)
      : kinds(flags.kinds), num_blocks(flags.num_blocks) {
    if (kinds) kinds += kinds_of_flags(flags, batch, head, row);
  }
  // Of the i-th rows.
  __device__ uint32_t of(int block, int i) const {
    return kinds ? __ldg(kinds + i * num_blocks + block) : FA_CUDA_KEYS_SHOW;
  }
};

// ---- terms of columns --------------------------------------------------------------------------------------

// A head's addends of keys, or the words of their terms, from a column on. Behind the last key there are some
// for a block more, which nobody sees.
__device__ inline int64_t place_of_key(const fa_cuda_keys &keys, int batch, int head, int column) {
  return (batch * keys.stride_batch + head * keys.stride_head) * FA_CUDA_KEYS_BLOCK + column;
}
__device__ inline const float *addends_of(const fa_cuda_keys &keys, int batch, int head, int column) {
  return keys.addends + place_of_key(keys, batch, head, column);
}
// In a transposed accumulator, whose first column this is, what the lane's two keys add: flags that show add 0.
__device__ inline void read_two_addends(float (&addends)[2], const fa_cuda_keys &keys, int batch, int head,
                                        int column) {
  const float *own = addends_of(keys, batch, head, column) + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) addends[half] = own[half * 8] == INFINITY ? 0 : own[half * 8];
}
__device__ inline const uint32_t *terms_of(const fa_cuda_keys &keys, int batch, int head, int column) {
  return keys.terms + place_of_key(keys, batch, head, column) * FA_CUDA_TERM_WORDS;
}
// Those of slopes, of a block of columns on one side or the other of the rows: see lie_behind.
__device__ inline const uint32_t *terms_of_slope(const fa_cuda_keys &keys, int batch, int head, bool behind) {
  return terms_of(keys, batch, head, behind ? FA_CUDA_KEYS_BLOCK : 0);
}

// What a head's keys ask for, FA_CUDA_KEYS_ADD and so on: of so many from a column on, wherever that is.
struct KindsOfKeys {
  const uint8_t *of_blocks;

  __device__ KindsOfKeys(const fa_cuda_keys &keys, int batch, int head)
      : of_blocks(keys.kinds ? keys.kinds + batch * keys.stride_batch + head * keys.stride_head : nullptr) {}
  template <int COUNT>
  __device__ uint32_t of(int column) const {
    static_assert(COUNT <= FA_CUDA_KEYS_BLOCK, "they lie in two blocks at most");
    if (!of_blocks) return FA_CUDA_KEYS_SHOW;
    const int first = column / FA_CUDA_KEYS_BLOCK, last = (column + COUNT - 1) / FA_CUDA_KEYS_BLOCK;
    uint32_t kinds = of_blocks[first];
    if (last > first) kinds |= of_blocks[last];
    return kinds;
  }
};

// Whether a program has slopes, in a kernel that takes this much of one. They multiply products by the factor.
template <int PROGRAM>
__device__ inline bool has_slopes(const fa_cuda_program &program) {
  return PROGRAM & SLOPES && program.of_heads[FA_CUDA_ALIBI_SLOPES].data;
}

// How what is added to a visit's scores goes by their places: the head's slope, and the distance of column 0
// from the place beside row 0, in the visit's band.
struct Distance {
  float slope = 0;
  int of_origin = 0;
};

// Where so many rows and columns lie apart from the diagonal, on one side of it, a distance times the slope is
// a term of the row and one of the column. Elsewhere distances are to be measured one by one.
struct SlopeTerms {
  bool apart;
  float of_first, of_each;  // of the first row and column; of each row further down, and less of each column

  __device__ SlopeTerms(const Distance &distance, const Place &at, int rows, int columns) {
    const int first = distance.of_origin + at.row - at.column;
    const bool before = first >= columns - 1, after = first + rows - 1 <= 0;
    apart = before || after;
    const float sign = before ? 1 : -1;  // of distances of a row from columns before it
    of_each = apart ? -distance.slope * sign : 0;
    of_first = of_each * float(first);
  }
};

// A visit's products, times factor, with the numbers of their keys.
template <int NT>
__device__ inline void add_addends(float (&scores)[NT][4], float factor, uint32_t addends) {
  forget(addends);  // or ptxas keeps the numbers in registers for hide_keys
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 two = load_shared_pair(addends + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = fmaf(scores[n][i], factor, i % 2 ? two.y : two.x);
  }
}

// A visit's products with slopes and addends. Terms of rows are left out: `due` is what all scores of the
// lane's two rows are due beside. addends: the visit's, in shared memory, if it adds any.
template <int NT>
__device__ inline void add_slopes(float (&scores)[NT][4], float (&due)[1][2], float factor,
                                  const Distance &distance, const Place &at, bool adds, uint32_t addends) {
  const int lane = threadIdx.x % 32, own_row = lane / 4, own_column = lane % 4 * 2;
  const SlopeTerms slopes(distance, at, 16, NT * 8);
  if (slopes.apart) {
    due[0][0] = fmaf(slopes.of_each, float(own_row), slopes.of_first);
    due[0][1] = fmaf(slopes.of_each, 8, due[0][0]);
    const float first = -slopes.of_each * float(own_column);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        scores[n][i] = fmaf(scores[n][i], factor, fmaf(-slopes.of_each, float(n * 8 + i % 2), first));
  } else {
    const float first = float(distance.of_origin + at.row + own_row - at.column - own_column);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        scores[n][i] =
            fmaf(scores[n][i], factor, -distance.slope * fabsf(first + float(i / 2 * 8 - n * 8 - i % 2)));
  }
  if (adds) add_addends(scores, 1, addends);
}

// ---- folded terms -------------------------------------------------------------------------------------------
//
// They are one step of k: of the operand that has keys, a row of the first half is the parts of a key's number,
// and comes with the stage of k or of q; of the other operand all rows are the factors of parts. What stands in
// the second halves is 0 on one side, and finite on the other.
//   the key's number, 0 * 5 | anything * 8
//   factors of parts, 0 * 5 | 0 * 8

template <class Element>
__device__ inline uint4 row_of_factors(float sign = 1) {
  return make_uint4(pack(Element(), sign * term_factor<Element>(0), sign * term_factor<Element>(1)),
                    pack(Element(), sign * term_factor<Element>(2), 0), 0, 0);
}

// Of slopes the key's number is the slope times its place in the visit, or the negative of that where all
// columns lie behind the place beside each row. What is then still due to a score is a term of its row, and,
// where it lies behind that place and not all of the visit does, twice its distance times the slope. A forward
// has factors of either sign, for each consumer's own rows, a backward keys' numbers.
__device__ inline bool lie_behind(int distance_of_origin, Range rows, int first_column) {
  return distance_of_origin + rows.end - 1 <= first_column;
}

// Distances of a transposed accumulator's cells: of rows from columns, negative behind. row: the first one's,
// from the place beside column 0.
struct TransposedDistances {
  float first;

  __device__ TransposedDistances(int row, int column) {
    const int lane = threadIdx.x % 32;
    first = float(row + lane % 4 * 2 - column - lane / 4);
  }
  __device__ TransposedDistances(const Distance &distance, const Place &at)
      : TransposedDistances(distance.of_origin + at.row, at.column) {}
  __device__ float at(int n, int i) const { return first + float(n * 8 + i % 2 - i / 2 * 8); }
};

// A score of a visit that the diagonal crosses; distance: of its row from its column, negative behind.
__device__ inline float with_crossing(float score, float slope, float distance) {
  return fmaf(2 * slope, fminf(distance, 0), score);
}

// Finishes the scores of a visit with a head's slope, in units of scores: `due` becomes what all of the lane's
// two rows are due beside. distance: of the warp's first row from the first column; behind: whether all columns
// lie there; sees_behind: whether a row may see such.
template <int NT>
__device__ inline void finish_folded_slopes(float (&scores)[NT][4], float (&due)[1][2], float slope,
                                            int distance, bool behind, bool sees_behind) {
  const int lane = threadIdx.x % 32;
  const float of_each = behind ? slope : -slope, own = float(distance + lane / 4);
  due[0][0] = of_each * own, due[0][1] = of_each * (own + 8);
  if (behind || !sees_behind || distance >= NT * 8 - 1) return;
#pragma unroll
  for (int begin = 0; begin < NT; begin += TILES_A_TEST)
    if (distance < (begin + TILES_A_TEST) * 8 - 1)
#pragma unroll
      for (int n = begin; n < begin + TILES_A_TEST; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float x = own - float(lane % 4 * 2) + float(i / 2 * 8 - n * 8 - i % 2);
          scores[n][i] = with_crossing(scores[n][i], slope, x);
        }
}

// Of a transposed visit: what is due to scores of columns that lie behind the place beside a row. distance: of
// the warp's first row from its first column.
template <int NT>
__device__ inline void add_behind(float (&scores)[NT][4], float slope, int distance) {
  const TransposedDistances distances(distance, 0);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = with_crossing(scores[n][i], slope, distances.at(n, i));
}

// Adds terms, or their negative, to products that have been made without; numbers: the columns', in shared
// memory.
template <class Element, int NT>
__device__ inline void add_terms(float (&products)[NT][4], uint32_t numbers, bool negative = false) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = n * 8 + threadIdx.x % 4 * 2 + i;
      const int4 four = load_shared_words(numbers + column * HalvesOperand::ROW_BYTES);
      const float size = number_of_parts<Element>(make_uint2(four.x, four.y)), number = negative ? -size : size;
      products[n][i] += number, products[n][2 + i] += number;
    }
}

// ---- terms that are added ----------------------------------------------------------------------------------

// Hides the scores of keys whose number is -inf, whatever they are; those of flags are infinite, and bound
// them.
template <int NT>
__device__ inline void hide_keys(float (&scores)[NT][4], bool are_flags, uint32_t addends) {
  auto for_each = [&](auto hidden) {
    forget(addends);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float2 two = load_shared_pair(addends + (n * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = hidden(scores[n][i], i % 2 ? two.y : two.x);
    }
  };
  if (are_flags)
    for_each([](float score, float bound) { return fminf(score, bound); });
  else
    for_each([](float score, float number) { return number == -INFINITY ? number : score; });
}

// The same, transposed: `addends` are those of the lane's two keys. What is left out are the terms of rows
// behind the first of the lane's; returns that of each further one.
template <int PROGRAM, int NT>
__device__ inline float add_transposed_terms(float (&scores)[NT][4], const fa_cuda_program &program,
                                             const Distance &distance, const Place &at,
                                             const float (&addends)[2]) {
  const int lane = threadIdx.x % 32, own_row = lane % 4 * 2, own_column = lane / 4;
  const float factor = program.factor;
  float terms[2] = {addends[0], addends[1]}, of_each = 0;
  const bool slope_terms = has_slopes<PROGRAM>(program);
  if (slope_terms) {
    const SlopeTerms slopes(distance, at, NT * 8, 16);
    if (!slopes.apart) {
      const TransposedDistances distances(distance, at);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float of_slope = fmaf(-distance.slope, fabsf(distances.at(n, i)), addends[i / 2]);
          scores[n][i] = fmaf(scores[n][i], factor, of_slope);
        }
      return 0;
    }
    of_each = slopes.of_each;
#pragma unroll
    for (int half = 0; half < 2; half++)
      terms[half] += fmaf(of_each, float(own_row - own_column - half * 8), slopes.of_first);
  }
  if (!slope_terms && !(PROGRAM & KEYS && program.keys.addends)) return 0;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = fmaf(scores[n][i], factor, terms[i / 2]);
  return of_each;
}

// Adds what a slope makes of distances to a transposed accumulator's scores, one by one.
template <int NT>
__device__ inline void add_transposed_slopes(float (&scores)[NT][4], const Distance &distance,
                                             const Place &at) {
  const TransposedDistances distances(distance, at);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = fmaf(-distance.slope, fabsf(distances.at(n, i)), scores[n][i]);
}

// ---- a bias with a number for each score -------------------------------------------------------------------

// Adds a visit's bias. factor: that of scores to which nothing has been added, or 1. tile: where the
// accumulator's first element lies at row and column.
template <class Io, class Tile, bool TRANSPOSED, int NT>
__device__ inline void add_cells(float (&scores)[NT][4], const fa_cuda_program &program, float factor,
                                 uint32_t tile, int row, int column) {
  if (program.bias_boxes == 0) return;
  for_each_bias<Tile, Io, TRANSPOSED, NT>(tile, row, column, [&](int n, const float(&numbers)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = with_addend(scores[n][i] * factor, numbers[i]);
  });
}

// Whether there is such a bias of f32, to be read from memory.
__device__ inline bool reads_cells(const fa_cuda_program &program) {
  return program.bias.stride_row && program.bias.dtype == FA_DTYPE_F32;
}

// Adds that to an accumulator; rows and columns that are not there have none.
template <int NT>
__device__ inline void add_cells_from_memory(float (&scores)[NT][4], const fa_cuda_arguments &a,
                                             const Place &at) {
  auto add = [&](auto pair) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      add_bias_of<decltype(pair)>(scores, half, a, at, at.row + half * 8 + threadIdx.x % 32 / 4);
  };
  a.program.bias.in_pairs ? add(Pair<float, true>()) : add(Pair<float, false>());
}
// The same in two steps: what a visit adds is on its way meanwhile.
template <int NT>
struct CellsOnTheirWay {
  uint2 pairs[2][NT];

  __device__ void load(const fa_cuda_arguments &a, const Place &at) {
    const fa_cuda_cells &bias = a.program.bias;
    const int own_row = at.row + threadIdx.x % 32 / 4, first = at.column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = own_row + half * 8, wanted = row < a.window.seqlen_q ? a.window.seqlen_k - first : 0;
      const float *from = numbers_of<const float>(bias, at.batch, at.head, row) + first;
      if (bias.in_pairs)
        load_pairs<Pair<float, true>>(pairs[half], from, wanted);
      else
        load_pairs<Pair<float, false>>(pairs[half], from, wanted);
    }
  }
  __device__ void add(float (&scores)[NT][4]) const {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        scores[n][i] = with_addend(scores[n][i], Pair<float, true>::number(pairs[i / 2][n], i % 2));
  }
};

// The same of a transposed accumulator.
template <int NT>
__device__ inline void add_transposed_cells(float (&scores)[NT][4], const fa_cuda_arguments &a,
                                            const Place &at) {
  const fa_cuda_cells &bias = a.program.bias;
  const int row = at.row + threadIdx.x % 4 * 2, column = at.column + threadIdx.x % 32 / 4;
  const float *from = numbers_of<const float>(bias, at.batch, at.head, row) + column;
  constexpr int AT_ONCE = 4;  // on their way from memory, in eights of rows
#pragma unroll
  for (int begin = 0; begin < NT; begin += AT_ONCE) {
    float numbers[AT_ONCE][4];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++, from += 8 * bias.stride_row)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool is_there =
            row + (begin + n) * 8 + i % 2 < a.window.seqlen_q && column + i / 2 * 8 < a.window.seqlen_k;
        numbers[n][i] = is_there ? from[i % 2 * bias.stride_row + i / 2 * 8] : 0;
      }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[begin + n][i] = with_addend(scores[begin + n][i], numbers[n][i]);
  }
}

// ---- words for dropout -------------------------------------------------------------------------------------

// Words of columns, or of a transposed accumulator's rows, in shared memory.
struct SharedWords {
  uint32_t from;
  __device__ explicit SharedWords(uint32_t words) : from(words + TwoPairs::offset() * 4) {}
  __device__ TwoPairs operator()(int n) const { return TwoPairs(load_shared_words(from + n * 32)); }
};

// ---- the backward, transposed ------------------------------------------------------------------------------

// The draws of pairs of a transposed accumulator's rows, of its n-th eight and the next, with the lane's pair
// of columns. They are made where they are used: while products run before that they would be put between
// these.
struct TransposedDraws {
  SharedWords rows;
  fa_words column;
  __device__ void operator()(fa_words (&draws)[2], int n) const {
    const TwoPairs own = rows(n);
#pragma unroll
    for (int i = 0; i < 2; i++) draws[i] = fa_dropout_draw(own.of[i], column);
  }
};

// Scores become probabilities, with half of all that those are due which dropout leaves, and take the scores'
// place, negative where they are dropped; and an operand, in which these are 0. of_each: what
// add_transposed_terms has left out, for each further row. There is no softcap.
template <class Kind, bool DROPS, int NT, bool IS_PLACED>
__device__ inline void make_transposed_p_by_program(float (&scores)[1][NT][4],
                                                    uint32_t (&operand)[Kind::PARTS][NT / 2][4],
                                                    const fa_cuda_arguments &a, const TransposedDraws &draw,
                                                    RowNumbers<IS_PLACED> shift, float of_each,
                                                    bool began_at_shift) {
  const fa_cuda_program &program = a.program;
  const float unit = exponent_of_unit<Kind>(a.score), per_row = -of_each * unit;
  [[maybe_unused]] fa_words draws[2];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float2 row_shift = {0, 0};
    if (!began_at_shift) row_shift = shift[n];
    if (DROPS) row_shift.x -= program.kept_exponent, row_shift.y -= program.kept_exponent;
    if (DROPS && n % 2 == 0) draw(draws, n);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float own_shift = fmaf(per_row, float(n * 8 + i % 2), i % 2 ? row_shift.y : row_shift.x);
      const float p = exponential<Kind>(scores[0][n][i], unit, own_shift);
      scores[0][n][i] = DROPS && !stays(draws[i % 2].x[i / 2], n % 2, program) ? -p : p;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float x = scores[0][n][half * 2], y = scores[0][n][half * 2 + 1];
      if constexpr (DROPS)
        operand[0][n / 2][n % 2 * 2 + half] = pack_positive(typename Kind::Element(), x, y);
      else
        convert_pair<Kind>(operand, n, half, x, y, 1);
    }
  }
}

// dp becomes ds; p: of make_transposed_p_by_program. delta comes with its delta_factor. |p| + p is twice a p
// that stays, and 0 of another: an addition, where a maximum would go to the units that drawing keeps busy.
template <class Kind, bool DROPS, int NT, bool IS_PLACED>
__device__ inline void make_transposed_ds_by_program(float (&ds)[1][NT][4], const float (&p)[1][NT][4],
                                                     RowNumbers<IS_PLACED> delta) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const float2 row_delta = delta[n];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float own_delta = i % 2 ? row_delta.y : row_delta.x, weight = p[0][n][i];
      ds[0][n][i] = DROPS ? fmaf(fabsf(weight), -own_delta, (fabsf(weight) + weight) * ds[0][n][i])
                          : weight * (ds[0][n][i] - own_delta);
    }
  }
}

// The gradient by numbers that all rows share, of the lane's two columns. Of a cell that is hidden ds is 0, or
// NaN, which shows in dq, too, and is mended with it.
struct ColumnSums {
  float of[2] = {0, 0};

  template <int NT>
  __device__ void add(const float (&ds)[1][NT][4]) {
    float sums[4] = {};  // four chains of additions, none of which waits for another
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i] += ds[0][n][i];
    of[0] += sums[0] + sums[1];
    of[1] += sums[2] + sums[3];
  }

  // Adds them to those in memory; at: of the warp's columns.
  __device__ void leave(const fa_cuda_arguments &a, const Place &at) const {
    float *to = numbers_of<float>(a.program.dbias, at.batch, at.head);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = of[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int column = at.column + half * 8 + threadIdx.x % 32 / 4;
      if (threadIdx.x % 4 == 0 && column < a.window.seqlen_k) atomicAdd(to + column, sum);
    }
  }
};

// Leaves ds of a transposed accumulator as the gradient by a bias of f32 numbers in memory, or adds it there.
template <int NT>
__device__ inline void leave_transposed_cells(const float (&ds)[NT][4], const fa_cuda_arguments &a,
                                              const Place &at) {
  const fa_cuda_cells &dbias = a.program.dbias;
  const int row = at.row + threadIdx.x % 4 * 2, column = at.column + threadIdx.x % 32 / 4;
  float *to = numbers_of<float>(dbias, at.batch, at.head, row) + column;
  auto for_each = [&](auto leave) {
#pragma unroll
    for (int n = 0; n < NT; n++, to += 8 * dbias.stride_row)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (row + n * 8 + i % 2 < a.window.seqlen_q && column + i / 2 * 8 < a.window.seqlen_k)
          leave(to + i % 2 * dbias.stride_row + i / 2 * 8, ds[n][i]);
  };
  if (a.program.dbias_step == FA_CUDA_CELLS_STORE)
    for_each([](float *own, float x) { *own = x; });
  else
    for_each([](float *own, float x) { add_number(own, x); });
}

// The gradient by slopes, of ds: cell by cell, as sums by rows and by columns would cancel where distances are
// small.
template <int PROGRAM, int NT>
__device__ inline void take_gradients(const float (&ds)[1][NT][4], const fa_cuda_arguments &a, const Place &at,
                                      const Distance &distance, HeadSums &head_sums) {
  if (PROGRAM & SLOPES && a.program.head_sums[FA_CUDA_ALIBI_SLOPES]) {
    const TransposedDistances distances(distance, at);
    float sums[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i / 2] = fmaf(ds[0][n][i], fabsf(distances.at(n, i)), sums[i / 2]);
    head_sums.of[FA_CUDA_ALIBI_SLOPES] -= sums[0] + sums[1];
  }
}

}  // namespace hopper
}  // namespace fa
