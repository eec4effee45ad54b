// What passes of few rows are made of: copies of single rows of k and v by one warp, products of f32
// numbers on tensor cores without a scaled copy of them, and the merge of parts.
//
// Code that nobody has run of late comes from memory as k and v do, a line of 8 instructions after the other. A
// loop that ends after few turns is better short than unrolled, and a division better a product.
#pragma once

#include "isolation.cuh"
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

  // Rows stride_row apart, all of which are there; `from`: the first. Where nothing of a chunk is there,
  // nothing is read.
  __device__ void start(uint32_t tile, const Io *from, int64_t stride_row) const {
    const Io *mine = from + row(0) * stride_row;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      copy_async(tile + offset(pass), mine + chunk(pass) * IN_CHUNK, wanted(pass) * sizeof(Io));
      if (pass % PASSES_A_ROW == PASSES_A_ROW - 1) mine += (ROWS_APART ? ROWS_APART : 1) * stride_row;
    }
  }
  // Row r comes from row_at(r), or is 0 where that is NULL; `nowhere`: what may be read there, but is not.
  template <class RowAt>
  __device__ void start(uint32_t tile, RowAt row_at, const Io *nowhere) const {
#pragma unroll 2
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

// The sequence of a batch whose keys may end before the tensor does. PROGRAMS, here and in what follows:
// whether there may be bands, or a program that adds to scores. A single band is the sequence's; of several,
// whose columns lie between the first and the last of any of them, all rows ask which they see.
__device__ inline bool has_several_bands(const fa_cuda_arguments &a) { return a.bands && a.num_bands > 1; }
template <bool PROGRAMS>
__device__ inline Sequence cached_sequence(const fa_cuda_arguments &a, const fa_cuda_cache &cache, int batch) {
  Sequence sequence = sequence_of(a, batch);
  if (cache.key_lengths)
    sequence.band = fa_band_to_length(sequence.band, cache.key_lengths[cache.lengths_batch > 1 ? batch : 0]);
  if constexpr (PROGRAMS)
    if (a.bands && a.num_bands == 1) sequence.band = band_at(a, batch, 0);
  return sequence;
}

// The columns that any of the rows sees. Rows may lie outside of the sequence's band where PROGRAMS.
template <bool PROGRAMS>
__device__ inline Range columns_of_rows(const Sequence &sequence, Range rows) {
  return PROGRAMS ? seen_in_band<true>(sequence.band, rows) : visible_columns(sequence, rows);
}

// Where the keys of a key/value head lie: a page is what a batch is of tensors without pages. A page that is
// not there has none.
template <class Io>
struct KeyRows {
  const Io *data;
  int64_t stride_row, stride_page;
  const int32_t *pages;
  int num_pages, page_size;

  __device__ KeyRows(const fa_cuda_operand &operand, const fa_cuda_cache &cache, const Sequence &s, int kv_head)
      : data(reinterpret_cast<const Io *>(operand.data) + kv_head * operand.stride_head +
             s.first_column * operand.stride_row),
        stride_row(operand.stride_row),
        stride_page(operand.stride_batch),
        pages(nullptr),
        num_pages(cache.num_pages),
        page_size(cache.page_size) {
    if (cache.page_table)
      pages = cache.page_table + int64_t(s.batch) * cache.max_pages;
    else
      data += s.batch * operand.stride_batch;
  }
  __device__ const Io *at(int key) const { return data + key * stride_row; }

  // Whether a tile of so many keys, which begins with this one, lies on one page.
  __device__ bool holds_tiles(int num_keys, int first) const {
    return page_size % num_keys == 0 && first % num_keys == 0;
  }

  // Where a key of a page lies in elements from data on; negative where its page is not there.
  __device__ int64_t place(int page, int row) const {
    return uint32_t(page) < uint32_t(num_pages) ? page * stride_page + row * stride_row : -1;
  }
  // Where a key lies; NULL where its page is not there.
  __device__ const Io *row(int key) const {
    if (!pages) return at(key);
    const int64_t at =
        place(__ldg(pages + uint32_t(key) / uint32_t(page_size)), uint32_t(key) % uint32_t(page_size));
    return at < 0 ? nullptr : data + at;
  }
};

// ---- units --------------------------------------------------------------------------------------------------

// The packed rows of a unit: row r is row r / group of the sequence, in head r % group of the key/value head's.
struct Unit {
  int index, batch, kv_head, first, num_rows, group;
  uint32_t reciprocal;  // of group: 2^32 / group, rounded down

  __device__ Unit(int index, int batch, int kv_head, int first, int num_rows, int group)
      : index(index),
        batch(batch),
        kv_head(kv_head),
        first(first),
        num_rows(num_rows),
        group(group),
        reciprocal(UINT32_MAX / group) {}

  // (first + r) / group: the product falls short of it by 1 at most.
  __device__ int row(int r) const {
    const int quotient = __umulhi(first + r, reciprocal);
    return quotient + (first + r - quotient * group >= group);
  }
  __device__ int head(int r) const { return kv_head * group + first + r - row(r) * group; }
};

template <int BLOCK_Q>
__device__ inline Unit unit_at(const fa_cuda_arguments &a, int index) {
  const int group = heads_per_kv(a), batch_head = index / a.num_q_blocks;
  const int first = index % a.num_q_blocks * BLOCK_Q;
  return {index,
          batch_head / a.num_kv_heads,
          batch_head % a.num_kv_heads,
          first,
          min(BLOCK_Q, a.window.seqlen_q * group - first),
          group};
}

// The columns that some row of a unit sees, and those that all of them do.
struct SeenColumns {
  Range any, all;
};
template <bool PROGRAMS>
__device__ inline SeenColumns seen_by(const fa_cuda_arguments &a, const Sequence &sequence, const Unit &unit) {
  const Range rows = {unit.row(0), unit.row(unit.num_rows - 1) + 1};
  if constexpr (PROGRAMS)
    if (has_several_bands(a)) {
      Range any = {INT32_MAX, 0};
      for_each_band(a, unit.batch, [&](const fa_band &band) {
        const Range seen = seen_in_band<true>(band, rows);
        if (seen.begin < seen.end) any = {min(any.begin, seen.begin), max(any.end, seen.end)};
      });
      return {any.begin < any.end ? any : Range{0, 0}, {0, 0}};
    }
  const Range first = columns_of_rows<PROGRAMS>(sequence, {rows.begin, rows.begin + 1}),
              last = columns_of_rows<PROGRAMS>(sequence, {rows.end - 1, rows.end});
  return {columns_of_rows<PROGRAMS>(sequence, rows), overlap(first, last)};
}

// Starts the copy of a unit's rows of q or dout; where these lie anywhere, it is done on return. A tile has
// them once, or again every REPEATED rows.
template <class Io, int REPEATED = 0, class Copy>
__device__ inline void copy_rows(const Copy &copy, uint32_t tile, const fa_cuda_operand &operand,
                                 const Sequence &sequence, const Unit &unit) {
  auto row_at = [&](int r) {
    if constexpr (REPEATED > 0) r %= REPEATED;
    return r < unit.num_rows ? rows_of<Io>(operand, sequence, unit.head(r)) + unit.row(r) * operand.stride_row
                             : nullptr;
  };
  if (operand.aligned)
    copy.start(tile, row_at, reinterpret_cast<const Io *>(operand.data));
  else
    copy.finish(tile, row_at);
}

// Calls visit with each of the lane's rows of an accumulator, the first of which is the unit's first_row, and
// its packed row; behind the last there is that again, but for eights of rows of which none is there.
template <int MT, class Visit>
__device__ inline void for_each_packed_row(const Unit &unit, int first_row, Visit visit) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int first = first_row + m * 16 + half * 8;
      if (first < unit.num_rows) visit(m, half, min(first + int(threadIdx.x) % 32 / 4, unit.num_rows - 1));
    }
}

// How many bytes a number of a tensor has, and where the first one of a row lies.
__device__ inline int bytes_of_number(const fa_cuda_cells &cells) {
  return cells.dtype == FA_DTYPE_U8 ? 1 : cells.dtype == FA_DTYPE_F32 ? 4 : 2;
}
__device__ inline const uint8_t *bytes_of_row(const fa_cuda_cells &cells, int batch, int head, int row) {
  const int64_t at = batch * cells.stride_batch + head * cells.stride_head + row * cells.stride_row;
  return static_cast<const uint8_t *>(cells.data) + at * bytes_of_number(cells);
}

// Has what a bias adds to a tile of so many columns, the first of which is there, brought to the cache long
// before it is wanted, by a warp: whoever adds it would wait for memory.
template <int NUM_COLUMNS>
__device__ inline void prefetch_bias(const fa_cuda_arguments &a, const Unit &unit, int first) {
  constexpr int SECTOR = 32;
  const fa_cuda_cells &bias = a.program.bias;
  if (!bias.data) return;
  const int bytes = bytes_of_number(bias), end = min(NUM_COLUMNS, a.window.seqlen_k - first) * bytes;
#pragma unroll 1
  for (int r = threadIdx.x % 32; r < unit.num_rows; r += 32) {
    const uint8_t *from = bytes_of_row(bias, unit.batch, unit.head(r), unit.row(r)) + int64_t(first) * bytes;
#pragma unroll 1
    for (int at = 0; at < end; at += SECTOR) prefetch_l2(from + at);
    prefetch_l2(from + end - 1);
  }
}

// What a program adds to a warp's scores of any tile, from the unit's row first_row on. What is the same for
// all tiles is found once, as the single warp that often has all rows takes long for each instruction. A hidden
// score need not be finite: whoever writes o looks for NaN.
template <class Io, int MT, int NT>
struct Addends {
  const fa_cuda_arguments &a;
  const int num_rows;  // of the unit from first_row on
  const uint8_t *bias[MT][2] = {};
  float slope[MT][2];
  int beside[MT][2];  // the column of which the distance is 0

  __device__ Addends(const fa_cuda_arguments &a, const Sequence &sequence, const Unit &unit, int first_row)
      : a(a), num_rows(unit.num_rows - first_row) {
    if (!a.program.is_there) return;
    for_each_packed_row<MT>(unit, first_row, [&](int m, int half, int r) {
      const Place at = {unit.batch, unit.head(r), 0, 0};
      const int row = unit.row(r);
      slope[m][half] = number_of_head(a.program, FA_CUDA_ALIBI_SLOPES, at, 0);
      beside[m][half] = row + distance_of_origin(sequence.band);
      if (a.program.bias.data) bias[m][half] = bytes_of_row(a.program.bias, at.batch, at.head, row);
    });
  }

  // Adds them to what finish_scores has made of the columns from `first` on.
  __device__ void add(Accumulator<MT, NT> &scores, int first) const {
    if (!a.program.is_there) return;
    const int own = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (m * 16 + half * 8 >= num_rows) continue;
        float factor = a.program.factor;
        auto add_to_each = [&](auto addend) {
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float &score = scores[m][n][half * 2 + i];
              score = fmaf(score, factor, addend(n, i));
            }
          factor = 1;
        };
        if (a.program.of_heads[FA_CUDA_ALIBI_SLOPES].data) {
          const float distance = float(beside[m][half] - own);
          add_to_each([&](int n, int i) { return -slope[m][half] * fabsf(distance - float(n * 8 + i)); });
        }
        if (a.program.bias.data)
          with_pairs<Io>(a.program.bias, [&](auto pair) {
            using Pair = decltype(pair);
            uint2 pairs[NT];
            load_pairs<Pair>(pairs, reinterpret_cast<const typename Pair::Number *>(bias[m][half]) + own,
                             a.window.seqlen_k - own);
            add_to_each([&](int n, int i) { return Pair::number(pairs[n], i); });
          });
      }
  }
};
template <int MT, int NT>
struct NoAddends {
  __device__ NoAddends(const fa_cuda_arguments &, const Sequence &, const Unit &, int) {}
  __device__ void add(Accumulator<MT, NT> &, int) const {}
};
template <bool PROGRAMS, class Io, int MT, int NT>
using AddendsOf = std::conditional_t<PROGRAMS, Addends<Io, MT, NT>, NoAddends<MT, NT>>;

// Scores become -inf of columns that none of the bands shows a row: a bit for each of a lane's.
template <int MT, int NT>
__device__ inline void hide_by_bands(Accumulator<MT, NT> &scores, const fa_cuda_arguments &a, const Unit &unit,
                                     int first_row, int first) {
  static_assert(NT * 2 <= 32, "a word has a bit for each column");
  for_each_packed_row<MT>(unit, first_row, [&](int m, int half, int r) {
    const int row = unit.row(r), own = first + threadIdx.x % 4 * 2;
    uint32_t shown = 0;
    for_each_band(a, unit.batch, [&](const fa_band &band) {
      const Range seen = seen_in_band<true>(band, {row, row + 1});
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = own + n * 8 + i;
          if (column >= seen.begin && column < seen.end) shown |= 1u << (n * 2 + i);
        }
    });
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (!(shown >> (n * 2 + i) & 1)) scores[m][n][half * 2 + i] = -INFINITY;
  });
}

// Of a warp's scores, from its unit's row first_row and the column `first` on, those become -inf that a row
// does not see, and those from column `end` on.
template <bool PROGRAMS, int MT, int NT>
__device__ inline void hide_columns(Accumulator<MT, NT> &scores, const fa_cuda_arguments &a,
                                    const Sequence &sequence, const Unit &unit, int first_row, int first,
                                    int end) {
  if constexpr (PROGRAMS)
    if (has_several_bands(a)) return hide_by_bands<MT, NT>(scores, a, unit, first_row, first);
  for_each_packed_row<MT>(unit, first_row, [&](int m, int half, int r) {
    const int row = unit.row(r);
    const Range visible = columns_of_rows<PROGRAMS>(sequence, {row, row + 1});
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = first + n * 8 + threadIdx.x % 4 * 2 + i;
        if (column < visible.begin || column >= min(visible.end, end)) scores[m][n][half * 2 + i] = -INFINITY;
      }
  });
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

// A number as the sum of one or two that have 11 bits. Of two the first is rounded by hand, as cvt spends most
// of its instructions on what is not finite, and of the rest a product reads no more bits. A NaN that becomes 0
// by the addition is one in the rest.
template <int PARTS>
__device__ inline void split_tf32(uint32_t (&parts)[PARTS][4], int i, float x) {
  if constexpr (PARTS == 1) {
    parts[0][i] = round_to_tf32(x);
  } else {
    parts[0][i] = (__float_as_uint(x) + 0x1000) & 0xffffe000;
    parts[1][i] = __float_as_uint(x - __uint_as_float(parts[0][i]));
  }
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

// q of f32 as products of all tiles of keys read it: split once, part after part, and each lane's fragment of a
// step of eight columns together. Two steps, in which a lane has four columns of two rows, are those of 16 rows
// from first_row on and the k-th 16 columns.
template <class Kind, class QTile>
struct Fragments {
  static constexpr int PARTS = Kind::PARTS, TWICE_A_ROW = QTile::COLS / 16;
  using Two = uint32_t[2][PARTS][4];

  __device__ static uint32_t at(uint32_t q_tile, int part, int first_row, int k, int step) {
    return q_tile + part * QTile::BYTES + first_row * (QTile::COLS * 4) +
           ((k * 2 + step) * 32 + threadIdx.x % 32) * 16;
  }
  // What the lane has of q as it was copied, and the fragments of that.
  struct Rows {
    float4 half[2];
  };
  __device__ static Rows rows_of(uint32_t q_tile, int first_row, int k) {
    const int row = first_row + threadIdx.x % 32 / 4, chunk = k * 4 + threadIdx.x % 4;
    return {{load_shared_four(q_tile + QTile::offset(row, chunk)),
             load_shared_four(q_tile + QTile::offset(row + 8, chunk))}};
  }
  __device__ static void split(Two &a, const Rows &rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t parts[PARTS][4];
      split_tf32<PARTS>(parts, rows.half[half]);
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[i / 2][part][i % 2 * 2 + half] = parts[part][i];
    }
  }

  // Puts all of them where q is and, if there is a second part, behind it, by all threads of a block.
  template <int THREADS>
  __device__ static void make(uint32_t q_tile) {
    constexpr int WARPS = THREADS / 32, OWN = QTile::ROWS / 16 * TWICE_A_ROW / WARPS;
    static_assert(QTile::ROWS / 16 * TWICE_A_ROW % WARPS == 0, "every warp has equally many");
    auto first_row = [](int i) { return (threadIdx.x / 32 + i * WARPS) / TWICE_A_ROW * 16; };
    auto k = [](int i) { return (threadIdx.x / 32 + i * WARPS) % TWICE_A_ROW; };
    Rows own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) own[i] = rows_of(q_tile, first_row(i), k(i));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      Two a;
      split(a, own[i]);
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const uint32_t(&x)[4] = a[step][part];
          store_shared(at(q_tile, part, first_row(i), k(i), step), make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
    __syncthreads();
  }

  // Those of two steps: MADE before, or here from q as it was copied.
  template <bool MADE>
  __device__ static void read(Two &a, uint32_t q_tile, int first_row, int k) {
    if constexpr (MADE) {
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const float4 x = load_shared_four(at(q_tile, part, first_row, k, step));
          uint32_t(&own)[4] = a[step][part];
          own[0] = __float_as_uint(x.x), own[1] = __float_as_uint(x.y);
          own[2] = __float_as_uint(x.z), own[3] = __float_as_uint(x.w);
        }
    } else {
      split(a, rows_of(q_tile, first_row, k));
    }
  }
};

// scores[16 * MT, 8 * NT] = q * k^T of tiles of f32, from row q_row of q's on. A sum may run in any order if
// both operands keep to it: the lanes that share a row take four numbers each, of two steps of k. MADE: whether
// the tile of q holds its fragments.
template <class Kind, bool MADE, int MT, int NT, class QTile, class KTile>
__device__ inline void multiply_wide_scores(float (&scores)[MT][NT][4], uint32_t q_tile, int q_row,
                                            uint32_t k_tile) {
  constexpr int PARTS = Kind::PARTS;
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  float fresh[MT][NT][PARTS][4] = {};
#pragma unroll
  for (int k = 0; k < KTile::COLS / 16; k++) {
    uint32_t q[MT][2][PARTS][4];
#pragma unroll
    for (int m = 0; m < MT; m++) Fragments<Kind, QTile>::template read<MADE>(q[m], q_tile, q_row + m * 16, k);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint32_t keys[PARTS][4];
      split_tf32<PARTS>(keys, load_shared_four(k_tile + KTile::offset(n * 8 + group, k * 4 + lane)));
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
          uint32_t b[PARTS][2];
#pragma unroll
          for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < 2; i++) b[part][i] = keys[part][step * 2 + i];
          multiply_parts<PARTS>(fresh[m][n], q[m][step], b);
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

// What to multiply a part's sums with for a reference that is no smaller; where it sees nothing, -inf - -inf
// may stand for 0.
__device__ inline float weight_of(float max, float sum, float reference, float unit) {
  return max != -INFINITY || sum != 0 ? exp2_fast((max - reference) * unit) : 0;
}

// Their sum, always in the order of the parts, of which AT_ONCE are read together. state_of(part) gives max and
// sum, o_of(part) the columns. Parts begin, begin + step, ...; unit: exponent_of_unit.
template <int AT_ONCE = 8, class StateOf, class OOf>
__device__ inline Part merge(int begin, int num_parts, int step, float unit, StateOf state_of, OOf o_of) {
  Part merged;
#pragma unroll 1
  for (int first = begin; first < num_parts; first += AT_ONCE * step) {
    Part parts[AT_ONCE];
    float max = merged.max;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i * step >= num_parts) continue;
      const float2 state = state_of(first + i * step);
      parts[i] = {state.x, state.y, o_of(first + i * step)};
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) max = fmaxf(max, parts[i].max);
    const float before = weight_of(merged.max, merged.sum, max, unit);
    merged = {max,
              merged.sum * before,
              {merged.o.x * before, merged.o.y * before, merged.o.z * before, merged.o.w * before}};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const Part &part = parts[i];
      const float weight = weight_of(part.max, part.sum, max, unit);
      merged.sum = fmaf(weight, part.sum, merged.sum);
      merged.o.x = fmaf(weight, part.o.x, merged.o.x), merged.o.y = fmaf(weight, part.o.y, merged.o.y);
      merged.o.z = fmaf(weight, part.o.z, merged.o.z), merged.o.w = fmaf(weight, part.o.w, merged.o.w);
    }
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
#pragma unroll 1
  for (int t = 0; t < a.num_sinks; t++) lse = fmaxf(lse, a.sink[int64_t(t) * a.num_heads + head]);
  if (lse == -INFINITY) return {sum, lse + sum};  // nothing is seen: 0, or the NaN that a score was
  const float rescale = expf(own - lse);
  float total = sum * rescale;
#pragma unroll 1
  for (int t = 0; t < a.num_sinks; t++) total += expf(a.sink[int64_t(t) * a.num_heads + head] - lse);
  return {rescale / total, lse + logf(total)};
}

// ---- results ----------------------------------------------------------------------------------------------

// Puts what a warp has of 16 rows where finish_unit finds it: their references, sums of exponentials, of which
// each lane has a share, and of o.
template <class Kind, class Layout, int DT>
__device__ inline void put_sums(const Layout &layout, int stream, int first_row, const float (&max)[2],
                                const float (&sum)[2], const float (&o)[DT][4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + half * 8 + threadIdx.x % 32 / 4;
    const float whole_sum = row_sum(sum[half]);
    if (lane == 0) store_shared(layout.state(stream, row), make_float2(max[half], whole_sum));
    if constexpr (Kind::SCALED) {
#pragma unroll
      for (int j = 0; j < DT / 4; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float four[4] = {o[j * 4][half * 2 + i], o[j * 4 + 1][half * 2 + i], o[j * 4 + 2][half * 2 + i],
                                 o[j * 4 + 3][half * 2 + i]};
          store_shared(layout.sum(stream, row, j * 32 + lane * 8 + i * 4), four);
        }
    } else {
#pragma unroll
      for (int n = 0; n < DT; n++)
        store_shared(layout.sum(stream, row, n * 8 + lane * 2),
                     make_float2(o[n][half * 2], o[n][half * 2 + 1]));
    }
  }
}

// Writes four columns of a packed row of o, and lse beside the first; true where what it wrote may have a NaN.
template <class Kind>
__device__ inline bool write(const fa_cuda_arguments &a, const Sequence &sequence, const Unit &unit, int r,
                             int column, const Part &part) {
  using Io = typename Kind::Io;
  const int row = unit.row(r), head = unit.head(r);
  const Finish finish = finish_of<Kind>(a, head, part.max, part.sum);
  if (column == 0) *lse_at(a, sequence, head, row) = finish.lse;
  Io *to = row_of<Io>(a.o, sequence, head, row) + column;
  const float x[4] = {part.o.x, part.o.y, part.o.z, part.o.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (column + i < a.head_dim) store_number(to + i, x[i] * finish.scale);
  return isnan(fmaf(x[0], x[1], x[2] * x[3]));
}

// Mends a packed row that has a NaN, by a warp that sees what was written of it.
template <class Kind, int HEAD_DIM, bool PROGRAMS>
__device__ inline void mend_row(const fa_cuda_arguments &a, const fa_cuda_cache &cache, const Unit &unit,
                                int r) {
  using Io = typename Kind::Io;
  const int row = unit.row(r), head = unit.head(r);
  const Sequence s = cached_sequence<PROGRAMS>(a, cache, unit.batch);
  const KeyRows<Io> k(a.k, cache, s, unit.kv_head), v(a.v, cache, s, unit.kv_head);
  auto mended = row_of_o<Kind, HEAD_DIM>(
      a, {unit.batch, head, row, 0}, {0, s.num_columns()}, row_of<const Io>(a.q_rows, s, head, row),
      [&](auto visit) {
        if (PROGRAMS && has_several_bands(a))
          for_each_band(a, unit.batch, visit);
        else
          visit(s.band);
      },
      [&](int column) { return k.row(column); }, [&](int column) { return v.row(column); });
  mended.mend(row_of<Io>(a.o, s, head, row), lse_at(a, s, head, row), PROGRAMS && a.program.bias.data);
}

// By all threads of a block that have written their share of a unit's packed rows, see for_each_four: mends it,
// where one of them has written a NaN.
template <class Kind, class Shape, bool PROGRAMS>
__device__ inline void mend_share(const fa_cuda_arguments &a, const fa_cuda_cache &cache, const Unit &unit,
                                  int block, int num_blocks, bool has_nan) {
  constexpr int ROWS_AT_ONCE = Shape::num_threads / (Shape::head_dim / 4);
  static_assert(Shape::num_threads % (Shape::head_dim / 4) == 0, "a block's rows are whole");
  if (!__syncthreads_or(has_nan)) return;
  for (int r = threadIdx.x / 32; all_say(r < unit.num_rows); r += Shape::num_threads / 32)
    if (all_say(r / ROWS_AT_ONCE % num_blocks == block))
      mend_row<Kind, Shape::head_dim, PROGRAMS>(a, cache, unit, r);
}

// Visits the block's share of packed rows, four columns at a time: those of `block` of num_blocks.
template <class Shape, class Visit>
__device__ inline void for_each_four(int num_rows, int block, int num_blocks, Visit visit) {
  constexpr int FOURS = Shape::head_dim / 4;
  for (int i = block * Shape::num_threads + threadIdx.x; i < num_rows * FOURS;
       i += num_blocks * Shape::num_threads)
    visit(i / FOURS, i % FOURS * 4);
}

// The end of a block of threads: what its streams have put in shared memory merges there, and with the other
// parts in their cluster, or it is left to merge_parts. MENDS: what is written of o is mended; code for that
// would cost problems that hide nothing up to 6 %.
template <class Kind, class Shape, bool MENDS, bool PROGRAMS, class Layout>
__device__ inline void finish_unit(const fa_cuda_arguments &a, const fa_cuda_parts &d, const Layout &layout,
                                   const Sequence &sequence, const Unit &unit, int part) {
  const float unit_exponent = exponent_of_unit<Kind>(a.score);
  auto merge_streams = [&](int r, int column) {
    return merge(
        0, Shape::num_streams, 1, unit_exponent, [&](int i) { return load_shared_pair(layout.state(i, r)); },
        [&](int i) { return load_shared_four(layout.sum(i, r, column)); });
  };
  bool has_nan = false;
  if (d.num_parts == 1) {
    for_each_four<Shape>(unit.num_rows, 0, 1, [&](int r, int column) {
      has_nan |= write<Kind>(a, sequence, unit, r, column, merge_streams(r, column));
    });
  } else if (!d.in_cluster) {
    let_dependents_start();  // no sooner: blocks that wait beside those that read cost more than they save
    for_each_four<Shape>(unit.num_rows, 0, 1, [&](int r, int column) {
      const Part merged = merge_streams(r, column);
      const int64_t place = (int64_t(unit.index) * d.num_parts + part) * d.rows_a_unit + r;
      if (column == 0) d.states[place] = make_float2(merged.max, merged.sum);
      *reinterpret_cast<float4 *>(d.o + place * Shape::head_dim + column) = merged.o;
    });
    return;
  } else {
    // The block's sums take the place of its first stream's; each is read by who writes it.
    constexpr int STATES = Shape::num_streams > 1 ? Shape::num_streams : 0;
    if constexpr (Shape::num_streams > 1)
      for_each_four<Shape>(unit.num_rows, 0, 1, [&](int r, int column) {
        const Part merged = merge_streams(r, column);
        store_shared(layout.sum(0, r, column), {merged.o.x, merged.o.y, merged.o.z, merged.o.w});
        if (column == 0) store_shared(layout.state(STATES, r), make_float2(merged.max, merged.sum));
      });
    cluster_barrier();
    for_each_four<Shape>(unit.num_rows, part, d.num_parts, [&](int r, int column) {
      const uint32_t state = layout.state(STATES, r), sum = layout.sum(0, r, column);
      has_nan |= write<Kind>(a, sequence, unit, r, column,
                             merge(
                                 0, d.num_parts, 1, unit_exponent,
                                 [&](int i) { return load_cluster_pair(address_in_block(state, i)); },
                                 [&](int i) { return load_cluster_four(address_in_block(sum, i)); }));
    });
    cluster_barrier();  // nobody's memory goes before all have read it
  }
  if (MENDS) mend_share<Kind, Shape, PROGRAMS>(a, d.cache, unit, part, d.num_parts, has_nan);
}

// Merges the parts of packed rows, d.groups_a_row groups of threads those of each, which take parts in turn.
template <class Kind, int HEAD_DIM, int BLOCK_Q>
__global__ void __launch_bounds__(FA_CUDA_PARTS_THREADS)
    merge_parts(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_parts d) {
  constexpr int FOURS = HEAD_DIM / 4, GROUPS = FA_CUDA_PARTS_THREADS / FOURS;
  wait_for_launch_before();
  const int group = threadIdx.x / FOURS, number = (blockIdx.x * GROUPS + group) / d.groups_a_row;
  const int first_group = group / d.groups_a_row * d.groups_a_row, column = threadIdx.x % FOURS * 4;
  const Unit unit = unit_at<BLOCK_Q>(a, number / d.rows_a_unit);
  const int r = number % d.rows_a_unit;
  const bool is_there = unit.batch < a.batch && r < unit.num_rows;
  const int64_t first = int64_t(unit.index) * d.num_parts * d.rows_a_unit + r;
  const float unit_exponent = exponent_of_unit<Kind>(a.score);
  const Part mine = merge<4>(
      group - first_group, is_there ? d.num_parts : 0, d.groups_a_row, unit_exponent,
      [&](int i) { return d.states[first + int64_t(i) * d.rows_a_unit]; },
      [&](int i) {
        return *reinterpret_cast<const float4 *>(d.o + (first + int64_t(i) * d.rows_a_unit) * HEAD_DIM +
                                                 column);
      });
  __shared__ float4 sums[GROUPS][FOURS];
  __shared__ float2 states[GROUPS];
  sums[group][threadIdx.x % FOURS] = mine.o;
  if (column == 0) states[group] = make_float2(mine.max, mine.sum);
  __syncthreads();
  if (group != first_group || !is_there) return;
  const bool has_nan =
      write<Kind>(a, sequence_of(a, unit.batch), unit, r, column,
                  merge<2>(
                      0, d.groups_a_row, 1, unit_exponent, [&](int i) { return states[first_group + i]; },
                      [&](int i) { return sums[first_group + i][threadIdx.x % FOURS]; }));
  // If this were to mend, too, it would take 1 us longer.
  if (a.suspect && has_nan) note_suspect(a);
}

}  // namespace decode
}  // namespace fa
