// The backward of few rows, which takes as long as reading k and v and writing dk and dv does. The rows of all
// query heads of a key/value head share a tile, as in the forward of few rows (decode.cu), and the columns are
// split into parts, one block of threads each, as many as keep the memory busy. Within a block each warp takes
// tiles of columns in turn, with copies of its own under way and no barrier: nothing of dk and dv is anybody
// else's. dq, which sums over all columns, stays in registers; in the end a block's warps add theirs, and a
// second kernel adds those of the parts, always in the same order.
//
//     q, o, dout, dq [batch, seqlen_q, num_heads, head_dim]
//     k, v, dk, dv [batch, seqlen_k, num_kv_heads, head_dim]
//
// A tile, in the terms of flash_attention.h, with ^T for transposed:
//   s^T = k q^T   dp^T = v dout^T   p^T = exp(s^T - lse)   ds^T = p^T * (dp^T - delta)
//   dv = p^T dout   dk = ds^T q   dq += ds k
//
// Compiled once for every kind of 16 bits: -DFA_KIND=bf16 and so on.
#include "decode.cuh"

namespace fa {
namespace decode {

// A row of the table. All rows are ROW_TILES * 16; dk and dv of a tile are made COLUMNS_AT_ONCE of head_dim at
// a time, as dq takes a warp's registers. A warp has STAGES tiles of k and v.
template <int HEAD_DIM, int ROW_TILES, int COLUMNS_AT_ONCE, int STAGES, int BLOCKS_PER_SM>
struct FewRowsShape {
  static constexpr int head_dim = HEAD_DIM, row_tiles = ROW_TILES, block_q = ROW_TILES * 16, stages = STAGES;
  static constexpr int tile_columns = 16, columns_at_once = COLUMNS_AT_ONCE;
  static constexpr int num_warps = 4, num_threads = num_warps * 32, blocks_per_sm = BLOCKS_PER_SM;
};

// Shared memory: q and dout; the rows' shift and delta; and the warps' stages of k and v, where ds^T takes the
// place of a tile of v that is done with. In the end sums of dq take the place of all.
template <class Shape>
struct FewRowsLayout {
  using QTile = Tile<Shape::block_q, Shape::head_dim>;
  using KTile = Tile<Shape::tile_columns, Shape::head_dim>;
  // A row of a tile is 64 bytes at least.
  static constexpr int DS_COLUMNS = Shape::row_tiles == 1 ? 32 : Shape::block_q;
  using DsTile = Tile<Shape::tile_columns, DS_COLUMNS>;
  static_assert(DsTile::BYTES <= KTile::BYTES, "it takes the place of v");
  static constexpr int ROW_BYTES = Shape::block_q * 4, STAGE_BYTES = 2 * KTile::BYTES;
  static constexpr int DOUT_AT = QTile::BYTES, ROWS_AT = DOUT_AT + QTile::BYTES;
  static constexpr int STAGES_AT = ROWS_AT + 2 * ROW_BYTES;
  static constexpr int BYTES = STAGES_AT + Shape::num_warps * Shape::stages * STAGE_BYTES;
  // Rows of sums lie so that those of an accumulator's lanes fill the banks.
  static constexpr int SUM_STRIDE = Shape::head_dim + 8, SUM_BYTES = Shape::block_q * SUM_STRIDE * 4;
  static_assert(Shape::num_warps * SUM_BYTES <= BYTES, "sums take the place of all");
  static_assert(Shape::blocks_per_sm * (BYTES + 1024) <= 228 * 1024, "blocks share a multiprocessor");

  uint32_t base;
  __device__ uint32_t q() const { return base; }
  __device__ uint32_t dout() const { return base + DOUT_AT; }
  __device__ uint32_t shift() const { return base + ROWS_AT; }
  __device__ uint32_t delta() const { return base + ROWS_AT + ROW_BYTES; }
  __device__ uint32_t stage(int warp, int i) const {
    return base + STAGES_AT + (warp * Shape::stages + i % Shape::stages) * STAGE_BYTES;
  }
  __device__ uint32_t sum(int warp, int row, int column) const {
    return base + warp * SUM_BYTES + (row * SUM_STRIDE + column) * 4;
  }
};

// Puts down shift and delta of a unit's rows, by all threads; of rows that are not there those which make p and
// ds 0. writes_delta: for sinks, in the workspace, too.
template <class Kind, class Shape>
__device__ inline void put_statistics(const FewRowsLayout<Shape> &layout, const fa_cuda_arguments &a,
                                      const fa_cuda_dlse &dlse, const Sequence &sequence, const Unit &unit,
                                      bool writes_delta) {
  using Io = typename Kind::Io;
  constexpr int LANES = Shape::num_threads / Shape::block_q;
  const int r = threadIdx.x / LANES;
  float shift = INFINITY, delta = 0;
  if (r < unit.num_rows) {
    const int row = unit.row(r), head = unit.head(r);
    const Io *o = row_of<const Io>(a.o, sequence, head, row);
    const Io *dout = row_of<const Io>(a.dout_rows, sequence, head, row);
    for (int d = threadIdx.x % LANES * 8; d < a.head_dim; d += LANES * 8) {
      float x[8], y[8];
      load_eight(x, o + d, a.head_dim - d);
      load_eight(y, dout + d, a.head_dim - d);
#pragma unroll
      for (int i = 0; i < 8; i++) delta = fmaf(x[i], y[i], delta);
    }
    const float *lse = lse_at(a, sequence, head, row);
    if (threadIdx.x % LANES == 0) delta -= dlse_at(a, dlse, lse, unit.batch);
    if (*lse != -INFINITY) shift = row_shift<Kind>(*lse);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
  if (threadIdx.x % LANES > 0) return;
  if (writes_delta && r < unit.num_rows)
    a.delta[padded_index_of(a, {unit.batch, unit.head(r), unit.row(r)})] = delta;
  store_shared(layout.shift() + r * 4, __float_as_uint(shift));
  store_shared(layout.delta() + r * 4, __float_as_uint(delta));
}

// A warp at its tiles of columns.
template <class Kind, class Shape>
struct ColumnStream {
  using Layout = FewRowsLayout<Shape>;
  using QTile = typename Layout::QTile;
  using KTile = typename Layout::KTile;
  using DsTile = typename Layout::DsTile;
  using Io = typename Kind::Io;
  static constexpr int DT = Shape::head_dim / 8, KT = Shape::head_dim / 16, RT = Shape::row_tiles;

  const fa_cuda_arguments &a;
  const Layout layout;
  const Unit unit;
  const Sequence sequence;
  const int warp = threadIdx.x / 32;
  float dq[RT][DT][4] = {};

  __device__ ColumnStream(const fa_cuda_arguments &a, const Layout &layout, const Unit &unit,
                          const Sequence &sequence)
      : a(a), layout(layout), unit(unit), sequence(sequence) {}

  // Starts the copy of a tile of k or v; columns that are not there become 0.
  __device__ void load(uint32_t tile, const fa_cuda_operand &operand, int first) const {
    const TileCopy<Io, KTile, 32> copy = {int(threadIdx.x) % 32, operand.num_cols};
    const Io *columns = reinterpret_cast<const Io *>(columns_of(operand, sequence, unit.kv_head));
    auto column_at = [&](int i) -> const Io * {
      return first + i < sequence.num_columns() ? columns + (first + i) * operand.stride_row : nullptr;
    };
    if (!operand.aligned)
      copy.finish(tile, column_at);
    else if (first + KTile::ROWS <= sequence.num_columns())
      copy.start(tile, columns + first * operand.stride_row, operand.stride_row);
    else
      copy.start(tile, column_at, columns);
  }
  __device__ void load(int i, int first) const {
    const uint32_t stage = layout.stage(warp, i);
    load(stage, a.k, first);
    load(stage + KTile::BYTES, a.v, first);
  }

  // p^T or ds^T of a tile, as operands of products along all rows.
  using Weights = RegisterOperand<1, 1, RT>;

  // Writes scale * weights * rows, of the columns from `first` on, to dk or dv.
  __device__ void store(const fa_tensor &to, int first, const Weights &weights, uint32_t rows,
                        float scale) const {
    constexpr int NT = Shape::columns_at_once / 8;
    Io *from_first = column_of<Io>(to, sequence, unit.kv_head, first);
#pragma unroll
    for (int d = 0; d < Shape::head_dim; d += NT * 8) {
      float sum[1][NT][4];
      set_zero<1, NT>(sum);
      multiply<Kind, RT, NT>(sum, weights, TileOperand<QTile, false, false>(rows, d));
      store_accumulator<Io, 1, NT>(from_first + d, to.stride_row, sequence.num_columns() - first,
                                   a.head_dim - d, sum, scale);
    }
  }

  // Makes p^T and ds^T of 16 rows, number t of the unit's.
  __device__ void make_weights(Weights &p, Weights &of_scores, uint32_t k_tile, uint32_t v_tile, int t,
                               int first) const {
    float scores[1][2][4], ds[1][2][4];
    set_zero<1, 2>(scores);
    set_zero<1, 2>(ds);
    multiply<Kind, KT, 2>(scores, TileOperand<KTile, true, true>(k_tile, 0),
                          TileOperand<QTile, false, true>(layout.q(), t * 16));
    multiply<Kind, KT, 2>(ds, TileOperand<KTile, true, true>(v_tile, 0),
                          TileOperand<QTile, false, true>(layout.dout(), t * 16));
    finish_scores<Kind, 1, 2>(scores, a.score, 1);
    auto hide = [&](float(&x)[1][2][4], float hidden) {
      if (first + KTile::ROWS > sequence.num_columns())
        for_each_element<1, 2>(x, [&](int column, int, float &element) {
          if (first + column >= sequence.num_columns()) element = hidden;
        });
    };
    hide(scores, -INFINITY);
    using Fragment = uint32_t[1][1][4];
    make_transposed_p<Kind>(scores, reinterpret_cast<Fragment &>(p.fragments[0][0][t]), a.score,
                            RowNumbers<>(layout.shift() + t * 64));
    make_transposed_ds<Kind>(
        ds,
        [&](int n) { return make_float4(scores[0][n][0], scores[0][n][1], scores[0][n][2], scores[0][n][3]); },
        RowNumbers<>(layout.delta() + t * 64));
    hide(ds, 0);  // where delta is not finite it is not 0
    convert<Kind>(reinterpret_cast<Fragment &>(of_scores.fragments[0][0][t]), ds);
  }

  // Puts ds^T where it can be read with rows and columns the other way round, as an operand of dq.
  __device__ void put_turned(uint32_t tile, const Weights &ds) const {
    const uint32_t to = tile + threadIdx.x % 4 * 4;
#pragma unroll
    for (int t = 0; t < RT; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_shared(to + DsTile::offset(threadIdx.x % 32 / 4 + i % 2 * 8, t * 2 + i / 2),
                     ds.fragments[0][0][t][i]);
  }

  // Takes the tile of columns from `first` on, which is there.
  __device__ void take(int i, int first) {
    const uint32_t k_tile = layout.stage(warp, i), v_tile = k_tile + KTile::BYTES;
    Weights p, ds;
#pragma unroll
    for (int t = 0; t < RT; t++) make_weights(p, ds, k_tile, v_tile, t, first);
    __syncwarp();  // v is done with
    put_turned(v_tile, ds);
    store(a.dv, first, p, layout.dout(), 1);
    store(a.dk, first, ds, layout.q(), a.scale);
    __syncwarp();
    multiply<Kind, 1, DT>(dq, TileOperand<DsTile, true, false>(v_tile, 0),
                          TileOperand<KTile, false, false>(k_tile, 0));
  }

  // By all threads of the block: what no row sees of dk or dv is 0.
  __device__ void clear(const fa_tensor &to, Range columns) const {
    constexpr int LANES = 16;
    const bool in_eights = has_aligned_rows<Io>(to, a.head_dim);
    for (int column = columns.begin + threadIdx.x / LANES; column < columns.end;
         column += Shape::num_threads / LANES) {
      Io *row = column_of<Io>(to, sequence, unit.kv_head, column);
      if (in_eights)
        for (int d = threadIdx.x % LANES * 8; d < a.head_dim; d += LANES * 8)
          *reinterpret_cast<uint4 *>(row + d) = make_uint4(0, 0, 0, 0);
      else
        for (int d = threadIdx.x % LANES; d < a.head_dim; d += LANES) store_number(row + d, 0);
    }
  }

  // Puts its sum of dq where the block adds them.
  __device__ void put() const {
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < DT; n++)
          store_shared(layout.sum(warp, m * 16 + half * 8 + threadIdx.x % 32 / 4, n * 8 + threadIdx.x % 4 * 2),
                       make_float2(dq[m][n][half * 2], dq[m][n][half * 2 + 1]));
  }
};

__device__ inline float4 sum_of(const float4 &x, const float4 &y) {
  return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// Writes four columns of a packed row of dq from their sum.
template <class Io>
__device__ inline void write_dq(const fa_cuda_arguments &a, const Unit &unit, int r, int column,
                                const float4 &sum) {
  Io *to = row_of<Io>(a.dq, sequence_of(a, unit.batch), unit.head(r), unit.row(r)) + column;
  const float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (column + i < a.head_dim) store_number(to + i, x[i] * a.scale);
}

// Where four columns of a packed row are in a part's sums [num_units, num_dq_parts, block_q, head_dim].
template <class Shape>
__device__ inline float4 *dq_part_at(const fa_cuda_arguments &a, const Unit &unit, int part, int r,
                                     int column) {
  const int64_t row = (int64_t(unit.index) * a.num_dq_parts + part) * Shape::block_q + r;
  return reinterpret_cast<float4 *>(a.dq_sum + row * Shape::head_dim + column);
}

// One block of threads for each part of a unit's columns.
template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, Shape::blocks_per_sm)
    backward_few(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse,
                 const __grid_constant__ fa_cuda_cache cache) {
  using Layout = FewRowsLayout<Shape>;
  using Io = typename Kind::Io;
  constexpr int AHEAD = Shape::stages - 1, COLUMNS = Shape::tile_columns;
  const int part = blockIdx.x % a.num_dq_parts;
  const Unit unit = unit_at<Shape::block_q>(a, blockIdx.x / a.num_dq_parts);
  const Sequence sequence = cached_sequence<false>(a, cache, unit.batch);
  auto begin_of_part = [&](int part, int count) { return int(int64_t(count) * part / a.num_dq_parts); };
  const int num_tiles = (sequence.num_columns() + COLUMNS - 1) / COLUMNS;
  const int first_tile = begin_of_part(part, num_tiles), end_tile = begin_of_part(part + 1, num_tiles);

  FA_DYNAMIC_SHARED(128, uint8_t, shared);
  const Layout layout = {shared_address(shared)};
  const TileCopy<Io, typename Layout::QTile, Shape::num_threads> copy = {int(threadIdx.x), a.q.num_cols};
  copy_rows<Io>(copy, layout.q(), a.q, sequence, unit);
  copy_rows<Io>(copy, layout.dout(), a.dout, sequence, unit);
  copy_async_commit();

  ColumnStream<Kind, Shape> stream(a, layout, unit, sequence);
  auto first_column = [&](int i) { return (first_tile + stream.warp + i * Shape::num_warps) * COLUMNS; };
  const int num_mine = (end_tile - first_tile - stream.warp + Shape::num_warps - 1) / Shape::num_warps;
  auto load = [&](int i) {
    if (i < num_mine) stream.load(i, first_column(i));
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < AHEAD; i++) load(i);
  put_statistics<Kind>(layout, a, dlse, sequence, unit, a.num_sinks > 0 && part == 0);
  copy_async_wait<AHEAD>();
  __syncthreads();  // q, dout and the statistics are there

#pragma unroll 1
  for (int i = 0; i < num_mine; i++) {
    copy_async_wait<AHEAD - 1>();
    __syncwarp();  // this tile is there, and the one before is no longer in use
    load(i + AHEAD);
    stream.take(i, first_column(i));
  }
  const int num_seen = sequence.num_columns(), num_hidden = a.window.seqlen_k - num_seen;
  if (num_hidden > 0) {
    const Range hidden = {num_seen + begin_of_part(part, num_hidden),
                          num_seen + begin_of_part(part + 1, num_hidden)};
    stream.clear(a.dk, hidden);
    stream.clear(a.dv, hidden);
  }
  copy_async_wait_all();
  __syncthreads();  // all tiles are done
  stream.put();
  let_dependents_start();
  __syncthreads();
  for_each_four<Shape>(unit.num_rows, 0, 1, [&](int r, int column) {
    float4 sum = load_shared_four(layout.sum(0, r, column));
#pragma unroll
    for (int warp = 1; warp < Shape::num_warps; warp++)
      sum = sum_of(sum, load_shared_four(layout.sum(warp, r, column)));
    if (a.num_dq_parts == 1)
      write_dq<Io>(a, unit, r, column, sum);
    else
      *dq_part_at<Shape>(a, unit, part, r, column) = sum;
  });
}

// Adds the parts of a packed row, one a block of threads, of which groups take parts in turn.
constexpr int ADDING_THREADS = 128;
template <class Kind, class Shape>
__global__ void __launch_bounds__(ADDING_THREADS) add_dq_parts(const __grid_constant__ fa_cuda_arguments a) {
  constexpr int FOURS = Shape::head_dim / 4, GROUPS = ADDING_THREADS / FOURS;
  wait_for_launch_before();
  const int num_rows = a.window.seqlen_q * heads_per_kv(a), r = blockIdx.x % num_rows;
  const Unit unit = unit_at<Shape::block_q>(a, blockIdx.x / num_rows);
  const int group = threadIdx.x / FOURS, column = threadIdx.x % FOURS * 4;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 8
  for (int part = group; part < a.num_dq_parts; part += GROUPS)
    sum = sum_of(sum, *dq_part_at<Shape>(a, unit, part, r, column));
  __shared__ float4 sums[GROUPS][FOURS];
  sums[group][threadIdx.x % FOURS] = sum;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int other = 1; other < GROUPS; other++) sum = sum_of(sum, sums[other][threadIdx.x]);
  write_dq<typename Kind::Io>(a, unit, r, column, sum);
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel few_row(const char *name) {
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::tile_columns,
          .num_threads = Shape::num_threads,
          .shared_bytes = FewRowsLayout<Shape>::BYTES,
          .takes = FA_CUDA_FORM_NEEDS | FA_CUDA_NEEDS_SINKS | FA_CUDA_NEEDS_LENGTHS,
          .few_rows = true,
          .main = address_of_kernel(backward_few<Kind, Shape>),
          .finish_dq = address_of_kernel(add_dq_parts<Kind, Shape>),
          .finish_threads = ADDING_THREADS,
          .blocks_per_sm = Shape::blocks_per_sm};
}

}  // namespace decode
}  // namespace fa

#define NAME(rest) "cuda/few/" FA_QUOTE(FA_KIND) rest
#define ROW(rest, ...) \
  fa::decode::few_row<fa::kinds::FA_KIND, fa::decode::FewRowsShape<__VA_ARGS__>>(NAME(rest))

// Of a bucket, those for fewer rows come first. The small ones are for multiprocessors with 99 KiB of shared
// memory.
// clang-format off
const fa_cuda_kernel FA_JOIN(fa_cuda_backward_few_, FA_KIND)[] = {
    // bucket, row tiles, columns at once, stages, blocks per multiprocessor
    ROW("/d64/r16", 64, 1, 64, 3, 3),
    ROW("/d64/r32", 64, 2, 64, 3, 3),
    ROW("/d64/r64", 64, 4, 32, 4, 2),
    ROW("/d128/r16", 128, 1, 128, 3, 2),
    ROW("/d128/r16/small", 128, 1, 128, 2, 2),
    ROW("/d128/r32", 128, 2, 64, 3, 2),
    ROW("/d128/r32/small", 128, 2, 64, 2, 2),
    {},
};
// clang-format on
