// What acts on single scores by their places: what is added to them (a bias, distances times slopes), which of
// them are dropped, and the gradients by what was added. Kernels that take a program use it; in the others,
// which plain problems run, nothing of it is there. Rows lie along the rows of accumulators, and in those that
// are called transposed along their columns.
#pragma once

#include <type_traits>

#include "../c_src/core/dropout.h"
#include "schedule.cuh"
#include "terms.cuh"
#include "tile.cuh"

namespace fa {

// Where the first element of an accumulator lies. Row and column are counted from the sequence's first ones.
struct Place {
  int batch, head, row, column;
};

// ---- tensors of cells --------------------------------------------------------------------------------------

// The first number of a head, and that of a row.
template <class T>
__device__ inline T *numbers_of(const fa_cuda_cells &cells, int batch, int head, int row = 0) {
  return static_cast<T *>(cells.data) + batch * cells.stride_batch + head * cells.stride_head +
         row * cells.stride_row;
}

// What a mask of u8 adds to a score.
struct Shown {
  uint8_t flag = 1;
  __device__ explicit operator float() const { return flag ? 0 : -INFINITY; }
};

template <class T>
constexpr bool is_flag = std::is_same<T, Shown>::value;

// Calls visit with a number of the type.
template <class Io, class Visit>
__device__ inline void with_type(fa_dtype dtype, Visit visit) {
  if (dtype == FA_DTYPE_U8)
    visit(Shown());
  else if (dtype == FA_DTYPE_F32 || sizeof(Io) == sizeof(float))
    visit(float());
  else
    visit(Io());
}

// Two neighbouring numbers of a row from an even column on, `wanted` of which are there; the others add
// nothing. They are kept as memory has them until they are wanted: to make floats of them when they are loaded
// would be to wait for each pair alone. IN_PAIRS: a pair lies at a multiple of its size, and is there or not as
// a whole.
template <class T, bool IN_PAIRS>
struct Pair {
  using Number = T;
  using Word =
      std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  __device__ static uint2 load(const T *from, int wanted) {
    const T nothing = T();
    const Word *at = reinterpret_cast<const Word *>(from), &otherwise = reinterpret_cast<const Word &>(nothing);
    return {wanted > 0 ? at[0] : otherwise, wanted > 1 ? at[1] : otherwise};
  }
  __device__ static float number(uint2 pair, int i) {
    const Word word = i ? pair.y : pair.x;
    return static_cast<float>(reinterpret_cast<const T &>(word));
  }
};
template <class T>
struct Pair<T, true> {
  using Number = T;
  using Word =
      std::conditional_t<sizeof(T) == 1, uint16_t, std::conditional_t<sizeof(T) == 2, uint32_t, uint2>>;
  __device__ static uint2 load(const T *from, int wanted) {
    const Neighbours<T, 2> nothing = {T(), T()};
    const Word word =
        wanted > 0 ? *reinterpret_cast<const Word *>(from) : reinterpret_cast<const Word &>(nothing);
    if constexpr (sizeof(T) == 4)
      return word;
    else
      return {word, 0};
  }
  __device__ static float number(uint2 pair, int i) {
    return static_cast<float>(reinterpret_cast<const Neighbours<T, 2> &>(pair).x[i]);
  }
};

// Calls visit with the type of the pairs that a tensor has.
template <class Io, class Visit>
__device__ inline void with_pairs(const fa_cuda_cells &cells, Visit visit) {
  with_type<Io>(cells.dtype, [&](auto number) {
    using T = decltype(number);
    cells.in_pairs ? visit(Pair<T, true>()) : visit(Pair<T, false>());
  });
}

template <class T>
__device__ inline void store_two(T *to, float x, float y, int wanted, bool in_pairs) {
  if (in_pairs && wanted >= 2) {
    Neighbours<T, 2> two;
    store_number(&two.x[0], x), store_number(&two.x[1], y);
    *reinterpret_cast<Neighbours<T, 2> *>(to) = two;
  } else {
    if (wanted > 0) store_number(to, x);
    if (wanted > 1) store_number(to + 1, y);
  }
}

// Adds to a number: of f32, whoever else adds to it; of other types, to one that this thread alone has.
__device__ inline void add_number(float *to, float x) { atomicAdd(to, x); }
template <class T>
__device__ inline void add_number(T *to, float x) {
  store_number(to, static_cast<float>(*to) + x);
}

// The first of a block's rows of flags; a row's kinds in all blocks, and, in a backward, a block's of all keys:
// counted from those of all heads.
__device__ inline int64_t row_of_flags(const fa_cuda_flags &flags, int batch, int head, int block) {
  return batch * flags.stride_batch + head * flags.stride_head + int64_t(block) * flags.num_rows;
}
__device__ inline int64_t kinds_of_flags(const fa_cuda_flags &flags, int batch, int head, int row) {
  return row_of_flags(flags, batch, head, 0) / FA_CUDA_FLAG_ROWS +
         int64_t(row / FA_CUDA_FLAG_ROWS) * flags.num_blocks;
}
__device__ inline int64_t shown_of_flags(const fa_cuda_flags &flags, int batch, int head, int block) {
  return row_of_flags(flags, batch, head, block) / FA_CUDA_SHOWN_ROWS;
}

// Whether a bias of keys hides some block of keys whole.
__device__ inline bool hides_blocks_of_keys(const fa_cuda_arguments &a) {
  return a.program.keys.hides && *a.program.keys.hides == a.call;
}
// The same of a backward's column blocks, which are several heads': so all of these have to share the keys.
__device__ inline bool hides_column_blocks(const fa_cuda_arguments &a) {
  return a.program.keys.stride_head == 0 && hides_blocks_of_keys(a);
}
// Of which blocks it shows something.
struct ShownKeys {
  const uint32_t *bits;  // NULL: of all
  uint32_t row;          // the bit of the first block

  __device__ ShownKeys(const fa_cuda_keys &keys, int batch, int head, bool hides)
      : bits(hides ? keys.shown : nullptr), row(batch * keys.stride_batch + head * keys.stride_head) {}
  __device__ bool has(int block) const { return !bits || bits[(row + block) / 32] >> (row + block) % 32 & 1; }

  // Calls visit(block, word) for each word of bits that has some of a range's: these, the first one's being
  // that of the block; it may be one before the range.
  template <class Visit>
  __device__ void for_each_word(Range blocks, Visit visit) const {
    const uint32_t begin = row + blocks.begin, end = row + blocks.end;
    for (uint32_t at = begin & ~31u; at < end; at += 32) {
      uint32_t word = bits[at / 32];
      if (at < begin) word &= ~0u << (begin - at);
      if (at + 32 > end) word &= ~0u >> (at + 32 - end);
      visit(int(at - row), word);
    }
  }
  __device__ int operator()(Range blocks) const {
    if (!bits) return blocks.end - blocks.begin;
    int count = 0;
    for_each_word(blocks, [&](int, uint32_t word) { count += __popc(word); });
    return count;
  }
  // Those of the blocks from the first to the last that shows something: what padding leaves.
  __device__ Blocks within(Blocks blocks) const {
    if (!bits) return blocks;
    int first = INT32_MAX, last = -1;
    for_each_word({blocks.at(blocks.count - 1), blocks.last + 1}, [&](int block, uint32_t word) {
      if (word) first = min(first, block + __ffs(word) - 1), last = block + 31 - __clz(word);
    });
    return {max(last, 0), last < 0 ? 0 : last - first + 1};
  }
};

// ---- what is added to scores -------------------------------------------------------------------------------

// Of column 0 from the place beside row 0, in a band.
__device__ inline int distance_of_origin(const fa_band &band) { return band.k_end - band.q_end; }

// Distances of a row's cells from the column beside it, in a band.
struct Distances {
  float from_first;  // of an accumulator's columns

  __device__ Distances(const fa_band &band, int row, int column)
      : from_first(float(row + distance_of_origin(band) - column)) {}
  __device__ float at(int column) const { return fabsf(from_first - float(column)); }
};

// What a tensor has for a head, or what leaves scores alone where there is no such tensor.
__device__ inline float number_of_head(const fa_cuda_program &program, fa_cuda_head_number id, const Place &at,
                                       float otherwise) {
  const fa_cuda_cells &cells = program.of_heads[id];
  return cells.data ? *numbers_of<const float>(cells, at.batch, at.head) : otherwise;
}

// A head's slope where it is folded.
__device__ inline float slope_of_head(const fa_cuda_arguments &a, int batch, int head) {
  return bounded_slope(number_of_head(a.program, FA_CUDA_ALIBI_SLOPES, {batch, head, 0, 0}, 0), a.score.factor);
}

// Beside 16-bit q the keys kernel reads numbers that are finite as at most 2^20: no score comes near, and one
// that is far beyond, as masks are made of, has a rounding error that its exponential would be made of. f32's
// exponents are differences of scores, which are exact. Other kernels read them as they are.
constexpr float MOST_NUMBER = 0x1p20f;
__device__ inline float bounded_number(float number) {
  return isfinite(number) ? fminf(fmaxf(number, -MOST_NUMBER), MOST_NUMBER) : number;
}
template <class Io>
__device__ inline bool bounds_numbers(const fa_cuda_arguments &a) {
  return sizeof(Io) < sizeof(float) && a.program.keys.kinds;
}

// A backward need not read numbers as the forward did: where a row sees no others, or one above all scores, lse
// says what they were read as. Scores are taken to move it by so much at most.
constexpr float MOST_MOVED = 0x1p10f;
template <class Io>
__device__ inline bool is_bounded(const fa_cuda_arguments &a, float lse) {
  return sizeof(Io) < sizeof(float) && a.program.bias.data && !a.program.bias.stride_row &&
         fabsf(lse) <= MOST_NUMBER + MOST_MOVED;
}
// Where lse was made of larger negative numbers than are read now, p would be infinite. It says nothing in any
// case: such an lse has few digits left for scores.
template <class Io>
__device__ inline bool is_lost(const fa_cuda_arguments &a, float lse) {
  return lse == -INFINITY || (bounds_numbers<Io>(a) && lse < -MOST_NUMBER - MOST_MOVED);
}
// Where it was made of a positive number that is read as another now.
template <class Io>
__device__ inline bool is_read_otherwise(const fa_cuda_arguments &a, float lse) {
  return lse >= MOST_NUMBER - MOST_MOVED && lse < INFINITY && bounds_numbers<Io>(a) != is_bounded<Io>(a, lse);
}

// A score with what is added to it, which hides it where it is -inf, whatever it is.
__device__ inline float with_addend(float score, float addend) {
  return addend == -INFINITY ? -INFINITY : score + addend;
}

// Loads a lane's pairs of COUNT column blocks of an accumulator in one row; from, wanted: those of the first.
template <class Pair, int COUNT>
__device__ inline void load_pairs(uint2 (&pairs)[COUNT], const typename Pair::Number *from, int wanted) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) pairs[n] = Pair::load(from + n * 8, wanted - n * 8);
}

// Adds the bias to the scores of one row of an accumulator, those of `half`; rows and columns that are not
// there have none.
template <class Pair, int NT>
__device__ inline void add_bias_of(float (&scores)[NT][4], int half, const fa_cuda_arguments &a,
                                   const Place &at, int row) {
  const fa_cuda_cells &bias = a.program.bias;
  const int first = at.column + threadIdx.x % 4 * 2;
  const int wanted = row < a.window.seqlen_q ? a.window.seqlen_k - first : 0;
  const auto *from = numbers_of<const typename Pair::Number>(bias, at.batch, at.head, row) + first;
  constexpr int AT_ONCE = NT < 8 ? NT : 8;  // on their way from memory
  static_assert(NT % AT_ONCE == 0, "all at once, or whole eights");
#pragma unroll
  for (int begin = 0; begin < NT; begin += AT_ONCE) {
    uint2 pairs[AT_ONCE];
    load_pairs<Pair>(pairs, from + begin * 8, wanted - begin * 8);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float &score = scores[begin + n][half * 2 + i];
        score = with_addend(score, Pair::number(pairs[n], i));
      }
  }
}
template <class Io, int NT>
__device__ inline void add_bias(float (&scores)[NT][4], int half, const fa_cuda_arguments &a, const Place &at,
                                int row) {
  with_pairs<Io>(a.program.bias, [&](auto pair) { add_bias_of<decltype(pair)>(scores, half, a, at, row); });
}

// What finish_scores made of products becomes scores as they are, in one row of an accumulator.
template <class Io, int NT>
__device__ inline void add_to_row(float (&scores)[NT][4], int half, const fa_cuda_arguments &a,
                                  const fa_band &band, const Place &at, int row) {
  const fa_cuda_program &program = a.program;
  const Distances distances(band, row, at.column + threadIdx.x % 4 * 2);
  const float slope = number_of_head(program, FA_CUDA_ALIBI_SLOPES, at, 0);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) scores[n][half * 2 + i] *= program.factor;
  if (program.of_heads[FA_CUDA_ALIBI_SLOPES].data)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        scores[n][half * 2 + i] = fmaf(-slope, distances.at(n * 8 + i), scores[n][half * 2 + i]);
  if (program.bias.data) add_bias<Io>(scores, half, a, at, row);
}

template <int MT, int NT, class Visit>
__device__ inline void for_each_row(Accumulator<MT, NT> &acc, Visit visit) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) visit(m, half, m * 16 + half * 8 + threadIdx.x % 32 / 4);
}

template <class Io, int MT, int NT>
__device__ inline void add_to_scores(Accumulator<MT, NT> &scores, const fa_cuda_arguments &a,
                                     const fa_band &band, const Place &at) {
  for_each_row<MT, NT>(
      scores, [&](int m, int half, int row) { add_to_row<Io>(scores[m], half, a, band, at, at.row + row); });
}

// ---- what is dropped ---------------------------------------------------------------------------------------

// A draw takes the words of a pair of rows, 8 apart, and of such a pair of columns. Kernels have those along
// one side of their tiles in registers, and of the other side from memory, where draw_words has put them.

// What a head's scores are dropped by.
__device__ inline fa_dropout dropout_of(const fa_cuda_program &program, int batch, int head) {
  const uint32_t seed[2] = {__ldg(program.dropout_seed), __ldg(program.dropout_seed + 1)};
  return fa_dropout_of(seed, program.dropout_threshold, program.first_batch + batch, program.first_head + head);
}

// The words of the lane's pair of 16 rows of an accumulator, or of 16 columns of a transposed one, which begin
// at a multiple of 16.
__device__ inline fa_words lanes_row(const fa_cuda_program &program, int batch, int head, int first_row) {
  return fa_dropout_row(dropout_of(program, batch, head),
                        fa_dropout_pair(program.first_row + first_row) + threadIdx.x % 32 / 4);
}
__device__ inline fa_words lanes_column(const fa_cuda_program &program, int first_column) {
  return fa_dropout_column(dropout_of(program, 0, 0), fa_dropout_pair(first_column) + threadIdx.x % 32 / 4);
}

// The words of a lane's two pairs across, as they lie in memory: those of 16 rows or columns in a row, 4 bytes
// for each of these.
struct TwoPairs {
  fa_words of[2];
  __device__ explicit TwoPairs(int4 x)
      : of{{{uint32_t(x.x), uint32_t(x.y)}}, {{uint32_t(x.z), uint32_t(x.w)}}} {}
  __device__ static int offset() { return threadIdx.x % 4 * 4; }
};

// Whether the half of a word keeps its score. What lies below the high half does not change its order.
__device__ inline bool stays(uint32_t word, int half, const fa_cuda_program &program) {
  return (half ? word : word << 16) >= program.dropout_threshold << 16;
}

// Calls visit(m, n, i, stays) for the elements of an accumulator, which begins at multiples of 16 rows and
// columns: four elements of a lane, 8 rows and 8 columns apart, come from the same two words. row_of(m) are the
// words of the m-th 16 rows, and columns_of(n) those of the columns from the n-th eight on.
template <int MT, int NT, class RowOf, class ColumnsOf, class Visit>
__device__ inline void for_each_draw(const fa_cuda_program &program, RowOf row_of, ColumnsOf columns_of,
                                     Visit visit) {
  static_assert(NT % 2 == 0, "columns come in pairs 8 apart");
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const fa_words row = row_of(m);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      const TwoPairs columns = columns_of(n);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const fa_words words = fa_dropout_draw(row, columns.of[i]);
#pragma unroll
        for (int second = 0; second < 2; second++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            visit(m, n + second, half * 2 + i, stays(words.x[second], half, program));
      }
    }
  }
}

// Words of columns from memory, of an accumulator's whose first is `column`.
struct ColumnsInMemory {
  const uint32_t *from;
  __device__ ColumnsInMemory(const fa_cuda_program &program, int column)
      : from(program.column_words + column + TwoPairs::offset()) {}
  __device__ TwoPairs operator()(int n) const {
    return TwoPairs(__ldg(reinterpret_cast<const int4 *>(from + n * 8)));
  }
};

// The lane's words of 16 rows, the first of which is `mine`, in a backward.
__device__ inline fa_words lanes_row_in_memory(const fa_cuda_arguments &a, const PaddedRow &mine) {
  const uint32_t *from = a.program.row_words + padded_index_of(a, mine) + threadIdx.x % 32 / 4 * 2;
  const uint2 x = __ldg(reinterpret_cast<const uint2 *>(from));
  return {{x.x, x.y}};
}

// What the rows that were not dropped are due, beside what their o is multiplied with.
template <int MT>
__device__ inline void multiply_kept(float (&scale)[MT][2], const fa_cuda_program &program) {
  if (!program.is_there) return;
#pragma unroll
  for (int m = 0; m < MT; m++) scale[m][0] *= program.kept_factor, scale[m][1] *= program.kept_factor;
}

// Probabilities that are dropped become 0. What the others gain is left to the end of the row.
template <int MT, int NT, class ColumnsOf>
__device__ inline void drop(Accumulator<MT, NT> &p, const fa_cuda_program &program, const fa_words (&rows)[MT],
                            ColumnsOf columns_of) {
  for_each_draw<MT, NT>(
      program, [&](int m) { return rows[m]; }, columns_of,
      [&](int m, int n, int i, bool stays) {
        if (!stays) p[m][n][i] = 0;
      });
}

// ---- gradients by what was added ---------------------------------------------------------------------------

// The sum over a warp's lanes, which all get it.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A lane's share of the gradients that are one number for all scores of a head.
struct HeadSums {
  float of[FA_CUDA_NUM_HEAD_NUMBERS] = {};

  // Adds them to this warp's own: a warp's additions follow one another, and so give the same bits every time.
  __device__ void add(const fa_cuda_arguments &a, int batch, int head, int slot) const {
#pragma unroll
    for (int id = 0; id < FA_CUDA_NUM_HEAD_NUMBERS; id++) {
      if (!a.program.head_sums[id]) continue;
      const float sum = warp_sum(of[id]);
      if (threadIdx.x % 32 == 0)
        atomicAdd(
            a.program.head_sums[id] + (int64_t(batch) * a.num_heads + head) * a.program.num_head_slots + slot,
            sum);
    }
  }
};

// The gradient by the bias, of one accumulator: row by row.
template <class Io, int NT>
struct BiasGradient {
  const fa_cuda_arguments &a;
  const Place &at;
  float sums[NT][2];  // over rows, where these share numbers

  __device__ BiasGradient(const fa_cuda_arguments &a, const Place &at) : a(a), at(at) {
#pragma unroll
    for (int n = 0; n < NT; n++) sums[n][0] = sums[n][1] = 0;
  }

  // Stores or adds those of two neighbouring columns that the row sees.
  template <class T>
  __device__ void put_two(T *to, float x, float y, int column, Range seen) const {
    if (a.program.dbias_step == FA_CUDA_CELLS_STORE && column >= seen.begin) {
      store_two(to, x, y, seen.end - column, a.program.dbias.in_pairs);
    } else {
      if (column >= seen.begin && column < seen.end) add_number(to, x);
      if (column + 1 >= seen.begin && column + 1 < seen.end) add_number(to + 1, y);
    }
  }

  // gradient: of the row's scores, 0 where they are not visible; there only those are stored that are seen.
  __device__ void take_row(const float (&gradient)[NT][2], int row, Range seen) {
    const fa_cuda_program &program = a.program;
    const fa_cuda_cells &to = program.dbias;
    if (program.dbias_step == FA_CUDA_CELLS_ADD_ROWS) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) sums[n][i] += gradient[n][i];
      return;
    }
    if (row >= a.window.seqlen_q) return;
    const int first = at.column + threadIdx.x % 4 * 2;
    with_type<Io>(to.dtype, [&](auto type) {
      using T = decltype(type);
      if constexpr (!is_flag<T>) {
        T *numbers = numbers_of<T>(to, at.batch, at.head, row) + first;
#pragma unroll
        for (int n = 0; n < NT; n++) {
          put_two(numbers + n * 8, gradient[n][0], gradient[n][1], first + n * 8, seen);
        }
      }
    });
  }

  // Adds the sums over the accumulator's rows to those of the warp's slot.
  __device__ void finish(int slot) {
    if (a.program.dbias_step != FA_CUDA_CELLS_ADD_ROWS) return;
    float *to = numbers_of<float>(a.program.dbias, at.batch, at.head, slot);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float sum = sums[n][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int column = at.column + n * 8 + threadIdx.x % 4 * 2 + i;
        if (threadIdx.x % 32 < 4 && column < a.window.seqlen_k) atomicAdd(to + column, sum);
      }
  }
};

}  // namespace fa
