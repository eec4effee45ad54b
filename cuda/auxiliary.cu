// The small kernels around the passes: f32 tensors as scaled sums of f16; numbers of keys, masks and words for
// dropout as the passes take them; and gradients that are sums over many rows or heads.
#include "cells.cuh"
#include "split.cuh"
#include "terms.cuh"

namespace fa {

constexpr int THREADS = FA_CUDA_SMALL_KERNEL_THREADS;

// A block of threads is a team, whose rows blockIdx.x says, and blockIdx.y their tensor; numbers past head_dim
// are 0.
template <int LANES>
__global__ void __launch_bounds__(SplitTeam<LANES>::THREADS)
    split_rows(const __grid_constant__ fa_cuda_splits a) {
  const fa_cuda_split &t = a.tensors[blockIdx.y];
  ScaledRows rows;
  let_dependents_start();
  if (!scaled_rows_at(t.to, a.batch, blockIdx.x, rows)) return;  // another tensor has more
  SplitTeam<LANES>().template copy<false>(a, t, rows);
}

// f32 rows of heads from what c_src/host/pack.h made of them: a warp takes one; blockIdx.y and those a grid
// apart are rows of them.
__global__ void __launch_bounds__(THREADS) unpack(const __grid_constant__ fa_cuda_packed a) {
  const int64_t head = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (head >= a.heads_a_row) return;
  for (int64_t row = blockIdx.y; row < a.num_rows; row += gridDim.y) {
    const __half *from =
        reinterpret_cast<const __half *>(a.from + row * a.from_pitch) + head * (a.head_dim + 2);
    float *to = reinterpret_cast<float *>(a.to + row * a.to_pitch) + head * a.head_dim;
    const float unscale = *reinterpret_cast<const float *>(from + a.head_dim);
    for (int d = threadIdx.x % 32; d < a.head_dim; d += 32) to[d] = __half2float(from[d]) * unscale;
  }
}

// ---- a bias that all rows share ---------------------------------------------------------------------------

// Puts down the number of a key as a part of q·k.
__device__ inline void put_term(const fa_cuda_key_reading &a, int64_t key, float number) {
  auto put = [&](auto element) {
    const TermParts<decltype(element)> parts(number * a.per_scale);
    reinterpret_cast<uint4 *>(a.to.terms)[key] =
        make_uint4(pack(element, parts.of[0], parts.of[1]), pack(element, parts.of[2], 0), 0, 0);
  };
  if (a.of_f16)
    put(__half());
  else
    put(__nv_bfloat16());
}

// The terms of one of a head's two blocks, by a warp.
__device__ inline void read_slope(const fa_cuda_key_reading &a, int64_t block, int batch, int head) {
  const float slope = bounded_slope(*numbers_of<const float>(a.bias, batch, head), fabsf(1 / a.per_scale)) *
                      (block % 2 ? -1 : 1);
  for (int key = threadIdx.x % 32; key < FA_CUDA_KEYS_BLOCK; key += 32)
    put_term(a, block * FA_CUDA_KEYS_BLOCK + key, slope * float(key));
}

// The same as with_type, where q's type is not known.
template <class Visit>
__device__ inline void with_any_type(fa_dtype dtype, Visit visit) {
  if (dtype == FA_DTYPE_BF16)
    visit(__nv_bfloat16());
  else
    with_type<__half>(dtype, visit);
}

// What a block of keys has, by a warp; returns whether it shows something.
__device__ inline bool read_block(const fa_cuda_key_reading &a, int64_t block, int batch, int head) {
  const int first = block % a.blocks_a_row * FA_CUDA_KEYS_BLOCK + threadIdx.x % 32;
  bool shows = false, adds = false, hides = false;
  auto read = [&](auto type) {
    const auto *numbers = numbers_of<const decltype(type)>(a.bias, batch, head);
    auto number_at = [&](int key) {
      const float number = static_cast<float>(numbers[key]);
      return a.bounds ? bounded_number(number) : number;
    };
    for (int i = 0; i < FA_CUDA_KEYS_BLOCK; i += 32) {
      const bool is_there = first + i < a.seqlen_k;
      const float addend = is_there ? number_at(first + i) : 0;
      const int64_t key = block * FA_CUDA_KEYS_BLOCK + threadIdx.x % 32 + i;
      if (a.to.addends)
        a.to.addends[key] = is_flag<decltype(type)> && addend == 0 ? INFINITY : addend;
      else
        put_term(a, key, addend);
      shows |= is_there && addend != -INFINITY;
      hides |= addend == -INFINITY;
      adds |= addend != 0 && addend != -INFINITY;
    }
  };
  with_any_type(a.bias.dtype, read);
  shows = __any_sync(~0u, shows), adds = __any_sync(~0u, adds), hides = __any_sync(~0u, hides);
  if (threadIdx.x % 32 == 0) {
    a.to.kinds[block] = shows * FA_CUDA_KEYS_SHOW + adds * FA_CUDA_KEYS_ADD + hides * FA_CUDA_KEYS_HIDE;
    if (!shows && a.to.hides && block % a.blocks_a_row < a.blocks_a_row - 1) *a.to.hides = a.call;
  }
  return shows;
}

// Puts down what the blocks of a block of threads show, a byte of the bits, by all of these.
__device__ inline void put_shown(const fa_cuda_key_reading &a, bool shows) {
  static_assert(THREADS == 256, "a byte");
  __shared__ bool shown[THREADS / 32];
  if (threadIdx.x % 32 == 0) shown[threadIdx.x / 32] = shows;
  __syncthreads();
  const uint32_t bits = __ballot_sync(~0u, threadIdx.x < THREADS / 32 && shown[threadIdx.x % (THREADS / 32)]);
  if (threadIdx.x == 0) reinterpret_cast<uint8_t *>(a.to.shown)[blockIdx.x] = uint8_t(bits);
}

// A warp takes a block of keys.
__global__ void __launch_bounds__(THREADS) read_keys(const __grid_constant__ fa_cuda_key_reading a) {
  let_dependents_start();
  const int64_t block = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  bool shows = false;
  if (block < a.num_blocks) {
    const int row = block / a.blocks_a_row, heads = a.bias.stride_head ? a.num_heads : 1;
    if (a.of_slopes)
      read_slope(a, block, row / heads, row % heads);
    else
      shows = read_block(a, block, row / heads, row % heads);
  }
  if (a.to.shown) put_shown(a, shows);
  wait_for_launch_before();  // see launch_beside_plans
}

// ---- a mask with a flag a score ---------------------------------------------------------------------------

// What a warp packs: so many rows of the problem, and 128 columns, four a lane.
template <int ROWS>
struct FlagsTile {
  static constexpr int COLUMNS = FA_CUDA_MOST_FLAG_COLUMNS;
  int batch, head, row, column;  // its first ones
  bool is_there, is_seen;

  // rows and columns: how many tiles there are.
  __device__ FlagsTile(const fa_cuda_arguments &a, uint32_t rows, uint32_t columns) {
    const fa_cuda_cells &bias = a.program.bias;
    const uint32_t heads = bias.stride_head ? a.num_heads : 1;
    uint32_t tile = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    column = tile % columns * COLUMNS, tile /= columns;
    row = tile % rows * ROWS, tile /= rows;
    head = tile % heads, batch = tile / heads;
    is_seen = is_there = batch < (bias.stride_batch ? a.batch : 1);
    if (!is_seen || a.bands) return;
    const Range seen = seen_in_band<true>(whole_band(a), {row, min(row + ROWS, a.window.seqlen_q)});
    is_seen = max(seen.begin, column) < min(seen.end, column + COLUMNS);
  }

  // The flags of the lane's columns in 32 rows from the i-th on, a bit a row; of those that are not there 0.
  __device__ void load(uint32_t (&columns)[4], const fa_cuda_arguments &a, int i) const {
    const fa_cuda_cells &bias = a.program.bias;
    const int own = column + threadIdx.x % 32 * 4, first = row + i;
    const uint8_t *from = numbers_of<const uint8_t>(bias, batch, head, first) + own;
    uint32_t fours[32] = {};  // of each row, a byte a column
    if (bias.in_fours && column + COLUMNS <= a.window.seqlen_k && first + 32 <= a.window.seqlen_q) {
#pragma unroll
      for (int n = 0; n < 32; n++, from += bias.stride_row)
        fours[n] = __ldcs(reinterpret_cast<const uint32_t *>(from));
    } else {
#pragma unroll
      for (int n = 0; n < 32; n++, from += bias.stride_row)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (first + n < a.window.seqlen_q && own + j < a.window.seqlen_k)
            fours[n] |= uint32_t(from[j]) << j * 8;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) columns[j] = 0;
#pragma unroll
    for (int n = 0; n < 32; n += 8) {
      uint32_t eight = 0;  // of eight rows, in the column's byte
#pragma unroll
      for (int k = 0; k < 8; k++) {
        // Of a byte that is not 0 the highest bit is set, or becomes so.
        const uint32_t four = fours[n + k], set = (((four & 0x7f7f7f7f) + 0x7f7f7f7f) | four) & 0x80808080;
        eight = eight >> 1 | set;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) columns[j] |= (eight >> j * 8 & 0xff) << n;
    }
  }
};

// Turns round the bits of a warp's lanes, 32 by 32.
__device__ inline uint32_t transposed_bits(uint32_t x) {
  const int lane = threadIdx.x % 32;
  uint32_t low = 0x0000ffff;  // the bits whose numbers lack this one
#pragma unroll
  for (int step = 16; step > 0; step /= 2, low ^= low << step) {
    const uint32_t other = __shfl_xor_sync(~0u, x, step), kept = lane & step ? ~low : low;
    const int left = lane & step ? 32 - step : step;
    x = (x & kept) | ((other << left | other >> (32 - left)) & ~kept);
  }
  return x;
}

// Puts down an accumulator's row of 128 columns, which are those of one block, two or four; words: as for one.
__device__ inline void put_flags(const fa_cuda_flags &flags, int batch, int head, int row, int column,
                                 uint4 words) {
  const int64_t to = row_of_flags(flags, batch, head, column / flags.columns) + row;
  if (flags.columns == FA_CUDA_MOST_FLAG_COLUMNS) {
    static_cast<uint4 *>(flags.words)[to] = words;
  } else if (flags.columns == FA_CUDA_MOST_FLAG_COLUMNS / 4) {
    uint32_t *const quarters = static_cast<uint32_t *>(flags.words) + to;
    auto byte = [](uint32_t x, int i) { return x >> i * 8 & 0xff; };
#pragma unroll
    for (int i = 0; i < 4; i++)
      quarters[i * flags.num_rows] =
          byte(words.x, i) | byte(words.y, i) << 8 | byte(words.z, i) << 16 | byte(words.w, i) << 24;
  } else {
    uint2 *const halves = static_cast<uint2 *>(flags.words) + to;
    auto lower = [](uint32_t x, uint32_t y) { return (x & 0xffff) | y << 16; };
    auto upper = [](uint32_t x, uint32_t y) { return x >> 16 | (y & 0xffff0000); };
    halves[0] = make_uint2(lower(words.x, words.y), lower(words.z, words.w));
    halves[flags.num_rows] = make_uint2(upper(words.x, words.y), upper(words.z, words.w));
  }
}

// Of a forward: a lane has what its row sees of all columns.
__global__ void __launch_bounds__(THREADS) pack_flags(const __grid_constant__ fa_cuda_arguments a) {
  constexpr uint32_t EVEN = 0x55555555;  // the first four columns of each eight
  using Tile = FlagsTile<FA_CUDA_FLAG_ROWS>;
  let_dependents_start();
  const fa_cuda_flags &flags = a.program.flags;
  const Tile tile(a, flags.num_rows / FA_CUDA_FLAG_ROWS, flags.num_blocks * flags.columns / Tile::COLUMNS);
  const int lane = threadIdx.x % 32;
  if (tile.is_seen) {
    uint32_t some = 0, all = ~0u;
#pragma unroll 1
    for (int first = 0; first < FA_CUDA_FLAG_ROWS; first += 32) {
      uint32_t x[4];  // of a column of each lane
      tile.load(x, a, first);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = transposed_bits(x[j]);
      const uint4 words = make_uint4((x[0] & EVEN) | (x[1] & EVEN) << 1, (x[2] & EVEN) | (x[3] & EVEN) << 1,
                                     (x[0] >> 1 & EVEN) | (x[1] & ~EVEN), (x[2] >> 1 & EVEN) | (x[3] & ~EVEN));
      const int row = tile.row + first + lane;
      put_flags(flags, tile.batch, tile.head, row, tile.column, words);
      some |= words.x | words.y | words.z | words.w;
      if (row < a.window.seqlen_q) all &= words.x & words.y & words.z & words.w;
    }
    some = __reduce_or_sync(~0u, some), all = __reduce_and_sync(~0u, all);
    uint8_t *const kinds = flags.kinds + kinds_of_flags(flags, tile.batch, tile.head, tile.row);
    const int i = lane * flags.columns;
    if (i < Tile::COLUMNS) {
      const uint32_t own = ~0u >> (32 - flags.columns / 4) << i / 4;
      kinds[(tile.column + i) / flags.columns] =
          (some & own ? FA_CUDA_KEYS_SHOW : 0) + (~all & own ? FA_CUDA_KEYS_HIDE : 0);
      if (a.answer && !(some & own) && tile.row < a.window.seqlen_q && tile.column + i < a.window.seqlen_k)
        a.answer->hides = a.call;
    }
  }
  wait_for_launch_before();
}

// Of a backward: a lane has what its columns see of all rows.
__global__ void __launch_bounds__(THREADS) pack_transposed_flags(const __grid_constant__ fa_cuda_arguments a) {
  using Tile = FlagsTile<FA_CUDA_MOST_FLAG_COLUMNS>;
  let_dependents_start();
  const fa_cuda_flags &flags = a.program.flags;
  const Tile tile(a, flags.num_blocks * flags.columns / FA_CUDA_MOST_FLAG_COLUMNS,
                  flags.num_rows / Tile::COLUMNS);
  uint32_t some = 0;
  if (tile.is_seen) {
    uint32_t words[4][4] = {};  // of each column
#pragma unroll 1
    for (int first = 0; first < FA_CUDA_MOST_FLAG_COLUMNS; first += 32) {
      uint32_t x[4];
      tile.load(x, a, first);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          // Two bits of each byte follow one another in the highest byte.
          const uint32_t two = x[j] >> i * 2 & 0x03030303;
          words[j][i] |= two * 0x01041040 >> 24 << first / 4;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      some |= words[j][0] | words[j][1] | words[j][2] | words[j][3];
      put_flags(flags, tile.batch, tile.head, tile.column + threadIdx.x % 32 * 4 + j, tile.row,
                make_uint4(words[j][0], words[j][1], words[j][2], words[j][3]));
    }
  }
  some = __reduce_or_sync(~0u, some);
  // A byte of the row block, and three of the rest: whoever counts reads more than those of column blocks.
  constexpr int PARTS = FA_CUDA_MOST_FLAG_COLUMNS / FA_CUDA_SHOWN_ROWS;
  const int i = threadIdx.x % 32 / PARTS * flags.columns, part = threadIdx.x % PARTS;
  const bool shows = (some & ~0u >> (32 - flags.columns / 4) << i / 4) != 0;
  if (tile.is_there && i < Tile::COLUMNS)
    flags.kinds[shown_of_flags(flags, tile.batch, tile.head, (tile.row + i) / flags.columns) +
                (part * flags.num_rows + tile.column) / Tile::COLUMNS] = part == 0 && shows;
  if (a.answer && tile.is_seen && i < Tile::COLUMNS && tile.row + i < a.window.seqlen_q && !shows)
    a.answer->hides = a.call;
  wait_for_launch_before();
}

// ---- words for dropout ------------------------------------------------------------------------------------

// A thread takes a pair of columns or, behind these, of a head's rows, which come in 16 at a time.
__global__ void __launch_bounds__(THREADS) draw_words(const __grid_constant__ fa_cuda_arguments a) {
  let_dependents_start();
  const fa_cuda_program &program = a.program;
  const int64_t num_columns = program.num_column_words / 2, pair = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (pair < num_columns) {
    const fa_words words = fa_dropout_column(dropout_of(program, 0, 0), pair);
    reinterpret_cast<uint2 *>(program.column_words)[pair] = make_uint2(words.x[0], words.x[1]);
  } else if (const int64_t own = pair - num_columns; own < program.num_row_words / 2) {
    const PaddedRow first = padded_row_at(a, own / 8 * 16);
    const fa_words words = fa_dropout_row(dropout_of(program, first.batch, first.head),
                                          fa_dropout_pair(program.first_row + first.row) + own % 8);
    reinterpret_cast<uint2 *>(program.row_words)[own] = make_uint2(words.x[0], words.x[1]);
  }
  wait_for_launch_before();
}

// ---- sums over rows, heads and batches ---------------------------------------------------------------------

// The sum of term(i) for i below count, by all threads of a block, in f64 and always in the same order; thread
// 0 gets it.
template <class Term>
__device__ inline double block_sum(int64_t count, Term term) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += THREADS) sum += term(i);
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

// Whether bands show a row a column, and the bias does, if there is one.
__device__ inline bool sees_something(const fa_cuda_arguments &a, int batch, int head, int row) {
  const fa_cuda_cells &bias = a.program.bias;
  if (!bias.data) return first_seen<true>(a, batch, row) >= 0;
  bool sees = false;
  auto look = [&](auto type) {
    const auto *numbers = numbers_of<const decltype(type)>(bias, batch, head, row);
    for (int number = 0; !sees && number < num_bands_of(a); number++) {
      const Range seen = seen_in_band<true>(band_at(a, batch, number), {row, row + 1});
      for (int column = seen.begin; !sees && column < seen.end; column++)
        sees = static_cast<float>(numbers[column]) != -INFINITY;
    }
  };
  with_any_type(bias.dtype, look);
  return sees;
}

// dsink = -sum over batch and rows of exp(sink - lse) * delta; of a row that sees nothing o is 0, whatever it
// and dout hold.
__global__ void __launch_bounds__(THREADS)
    sink_gradient(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse) {
  const int head = blockIdx.x % a.num_heads;
  const float sink = a.sink[blockIdx.x];
  const double sum = block_sum(int64_t(a.batch) * a.padded_rows, [&](int64_t i) -> float {
    const int batch = i / a.padded_rows, row = i % a.padded_rows;
    const Sequence sequence = sequence_of(a, batch);
    if (row >= sequence.num_rows()) return 0;
    const float *lse = lse_at(a, sequence, head, row);
    float delta = delta_of(a, {batch, head, row});
    if (isnan(delta) && !sees_something(a, batch, head, row)) delta = -dlse_at(a, dlse, lse, batch);
    return *lse == -INFINITY || delta == 0 ? 0 : expf(sink - *lse) * delta;
  });
  if (threadIdx.x == 0) a.dsink[blockIdx.x] = static_cast<float>(-sum);
}

// What of a reduction's sums belongs to one of its numbers: those from first on, `batches` by `heads` by `rows`
// of them in each part.
struct Summands {
  int64_t first;
  int batches, heads, rows;

  __device__ int64_t count(const fa_cuda_reduction &a) const {
    return int64_t(a.num_parts) * batches * heads * rows;
  }
  __device__ float at(const fa_cuda_reduction &a, int part, int batch, int head, int row) const {
    return a.from[first + (((int64_t(part) * a.batch + batch) * a.num_heads + head) * a.num_rows + row) *
                              a.num_columns];
  }
  __device__ float at(const fa_cuda_reduction &a, int64_t i) const {
    return at(a, i / rows / heads / batches, i / rows / heads % batches, i / rows % heads, i % rows);
  }
};

// Of the number of a batch, head, row and column, which are 0 along the axes that the sum is over.
__device__ inline Summands summands_of(const fa_cuda_reduction &a, int batch, int head, int row, int column) {
  return {((int64_t(batch) * a.num_heads + head) * a.num_rows + row) * a.num_columns + column,
          a.to.stride_batch ? 1 : a.batch, a.to.stride_head ? 1 : a.num_heads,
          a.to.stride_row ? 1 : a.num_rows};
}

// A block of threads for each head of each batch that the numbers, which are f32, vary along.
__global__ void __launch_bounds__(THREADS) reduce_heads(const __grid_constant__ fa_cuda_reduction a) {
  const int heads = a.to.stride_head ? a.num_heads : 1, batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const Summands summands = summands_of(a, batch, head, 0, 0);
  const double sum = block_sum(summands.count(a), [&](int64_t i) { return summands.at(a, i); });
  if (threadIdx.x == 0) *numbers_of<float>(a.to, batch, head) = static_cast<float>(sum);
}

template <int COUNT>
__device__ inline Neighbours<float, COUNT> neighbours_at(const float *from) {
  return *reinterpret_cast<const Neighbours<float, COUNT> *>(from);
}

// Adds those of so many rows, which lie a stride apart, and several of which are under way.
template <int COUNT>
__device__ inline void add_rows(double (&sum)[COUNT], const float *from, int count, int64_t stride) {
#pragma unroll 4
  for (int i = 0; i < count; i++, from += stride) {
    const Neighbours<float, COUNT> row = neighbours_at<COUNT>(from);
#pragma unroll
    for (int j = 0; j < COUNT; j++) sum[j] += row.x[j];
  }
}

// Where a row of a reduction's numbers goes.
struct ReducedRow {
  const fa_cuda_cells &to;
  int batch, head, row;

  template <int COUNT, class Number>
  __device__ void store(int column, const Number (&sum)[COUNT]) const {
    auto store_as = [&](auto type) {
      using T = decltype(type);
      Neighbours<T, COUNT> rounded;
#pragma unroll
      for (int i = 0; i < COUNT; i++) store_number(rounded.x + i, static_cast<float>(sum[i]));
      T *at = numbers_of<T>(to, batch, head, row) + column;
      if (COUNT == 1 || to.in_fours)
        *reinterpret_cast<Neighbours<T, COUNT> *>(at) = rounded;
      else
        for (int i = 0; i < COUNT; i++) at[i] = rounded.x[i];
    };
    if (to.dtype == FA_DTYPE_F32)
      store_as(float());
    else if (to.dtype == FA_DTYPE_BF16)
      store_as(__nv_bfloat16());
    else
      store_as(__half());
  }
};

// Lanes for a row, each for COUNT neighbours of it, and of a block of threads so many groups of such lanes for
// other rows, or, where each number is a long sum, for shares of that. Rows are those of each batch, head and
// row that the numbers vary along.
template <int COUNT>
__global__ void __launch_bounds__(THREADS, 4) reduce_cells(const __grid_constant__ fa_cuda_reductions all) {
  const fa_cuda_reduction &a = all.each[blockIdx.z];
  constexpr int AT_ONCE = 4;
  __shared__ double shares[THREADS][COUNT];
  const int heads = a.to.stride_head ? a.num_heads : 1, rows = a.to.stride_row ? a.num_rows : 1;
  const int64_t num_rows = int64_t(a.to.stride_batch ? a.batch : 1) * heads * rows;
  const int64_t head_size = int64_t(a.num_rows) * a.num_columns, batch_size = a.num_heads * head_size;
  int lanes = FA_CUDA_REDUCE_LANES;
  while (lanes / 2 * COUNT >= a.num_columns) lanes /= 2;
  const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int first_column = blockIdx.x * lanes * COUNT, next_columns = gridDim.x * lanes * COUNT;
  const Summands any = summands_of(a, 0, 0, 0, 0);
  const int64_t count = any.count(a), blocks = count / any.rows;  // blocks of rows that follow one another
  const bool is_long = blocks >= groups && count >= 32;
  const int rows_at_once = is_long ? 1 : groups;
  for (int64_t i = int64_t(blockIdx.y) * rows_at_once + (is_long ? 0 : group); i < num_rows;
       i += int64_t(gridDim.y) * rows_at_once) {
    const ReducedRow reduced = {a.to, int(i / rows / heads), int(i / rows % heads), int(i % rows)};
    const float *from = a.from + summands_of(a, reduced.batch, reduced.head, reduced.row, 0).first;
    if (count == 1) {  // nothing is added
      for (int first = first_column + lane * COUNT; first < a.num_columns; first += AT_ONCE * next_columns) {
        Neighbours<float, COUNT> numbers[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
          if (first + n * next_columns < a.num_columns)
            numbers[n] = neighbours_at<COUNT>(from + first + n * next_columns);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
          if (first + n * next_columns < a.num_columns) reduced.store(first + n * next_columns, numbers[n].x);
      }
      continue;
    }
    // All threads of a block that share sums have as many turns.
    for (int first = first_column; first < a.num_columns; first += next_columns) {
      const int column = first + lane * COUNT;
      double sum[COUNT] = {};
      if (column >= a.num_columns) {
        if (!is_long) break;
      } else if (!is_long && count == a.num_parts) {
        add_rows(sum, from + column, a.num_parts, a.batch * batch_size);
      } else {
        for (int64_t j = is_long ? group : 0; j < blocks; j += is_long ? groups : 1) {
          const int64_t whole = j / any.heads, part = whole / any.batches, batch = whole % any.batches;
          add_rows(sum, from + column + (part * a.batch + batch) * batch_size + j % any.heads * head_size,
                   any.rows, a.num_columns);
        }
      }
      if (is_long) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < COUNT; n++) shares[threadIdx.x][n] = sum[n];
        __syncthreads();
        if (group > 0 || column >= a.num_columns) continue;
        for (int other = 1; other < groups; other++)
#pragma unroll
          for (int n = 0; n < COUNT; n++) sum[n] += shares[other * lanes + lane][n];
      }
      reduced.store(column, sum);
    }
  }
}

}  // namespace fa

const void *const fa_cuda_split_kernels[] = {fa::address_of_kernel(fa::split_rows<8>),
                                             fa::address_of_kernel(fa::split_rows<16>),
                                             fa::address_of_kernel(fa::split_rows<32>)};
const void *const fa_cuda_keys_kernel = fa::address_of_kernel(fa::read_keys);
const void *const fa_cuda_words_kernel = fa::address_of_kernel(fa::draw_words);
const void *const fa_cuda_flags_kernels[] = {fa::address_of_kernel(fa::pack_flags),
                                             fa::address_of_kernel(fa::pack_transposed_flags)};
const void *const fa_cuda_unpack_kernel = fa::address_of_kernel(fa::unpack);
const void *const fa_cuda_sink_kernel = fa::address_of_kernel(fa::sink_gradient);
const void *const fa_cuda_reduce_heads_kernel = fa::address_of_kernel(fa::reduce_heads);
const void *const fa_cuda_reduce_cells_kernels[] = {fa::address_of_kernel(fa::reduce_cells<1>),
                                                    fa::address_of_kernel(fa::reduce_cells<4>)};
