// The forward of few rows, which takes as long as reading k and v does. The rows of all query heads of a
// key/value head share a tile; the keys that they see are split into parts, one block of threads each, as many
// as keep the memory busy. Within a block streams of one or a few warps take tiles of keys in turn, each with
// copies of its own under way and no barrier between them. In the end streams merge, then parts: in a cluster
// of blocks where it holds them all, or else in a second kernel that waits behind the first.
//
//     q, o [batch, seqlen_q, num_heads, head_dim]     k, v [batch, seqlen_k, num_kv_heads, head_dim]
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "decode.cuh"

namespace fa {
namespace decode {

// A row of the table; none of it changes results by more than rounding. A stream's warps have ROW_TILES * 16
// rows each and share its tiles of BLOCK_K keys, of which STAGES for each warp are held.
template <int HEAD_DIM, int ROW_TILES, int WARPS_A_STREAM, int BLOCK_K, int STAGES, int BLOCKS_PER_SM>
struct DecodeShape {
  static constexpr int head_dim = HEAD_DIM, row_tiles = ROW_TILES, block_k = BLOCK_K;
  static constexpr int num_warps = 4, num_threads = num_warps * 32, stream_threads = WARPS_A_STREAM * 32;
  static constexpr int num_streams = num_warps / WARPS_A_STREAM, stages = STAGES * WARPS_A_STREAM;
  static constexpr int block_q = ROW_TILES * 16 * WARPS_A_STREAM, blocks_per_sm = BLOCKS_PER_SM;
};

// Shared memory: q, or its fragments, whose place the maxima and sums of streams, and of the block, take in the
// end; then the streams' stages of k and v, whose place their sums of o take. Two blocks of it just fit a
// multiprocessor.
template <class Kind, class Shape>
struct DecodeLayout {
  using QTile = TileOf<Kind, Shape::block_q, Shape::head_dim>;
  using KTile = TileOf<Kind, Shape::block_k, Shape::head_dim>;
  // Whether fragments of q are made. Two parts take twice as long to read: where warps share tiles, longer than
  // to split q again.
  static constexpr bool HAS_FRAGMENTS = Kind::SCALED && (Kind::PARTS == 1 || Shape::num_streams > 1);
  static constexpr int STAGE_BYTES = 2 * KTile::BYTES, STREAM_BYTES = Shape::stages * STAGE_BYTES;
  static constexpr int STAGES_AT = (HAS_FRAGMENTS ? Kind::PARTS : 1) * QTile::BYTES;
  static constexpr int STAGES_BYTES = Shape::num_streams * STREAM_BYTES;
  static constexpr int STATES_BYTES = Shape::block_q * sizeof(float2);
  static_assert((Shape::num_streams + 1) * STATES_BYTES <= QTile::BYTES, "they take the place of q");

  // A stream's sum of o; rows lie so that those of an accumulator's lanes fill the banks.
  static constexpr int SUM_STRIDE = Shape::head_dim + 8, SUM_BYTES = Shape::block_q * SUM_STRIDE * 4;
  static constexpr int SUMS_BYTES = Shape::num_streams * SUM_BYTES;  // these take the place of tiles
  static constexpr int BYTES = STAGES_AT + (STAGES_BYTES > SUMS_BYTES ? STAGES_BYTES : SUMS_BYTES);
  static_assert(Shape::blocks_per_sm * (BYTES + 1024) <= 228 * 1024, "blocks share a multiprocessor");

  uint32_t base;
  __device__ uint32_t stage(int stream, int i) const {
    return base + STAGES_AT + stream * STREAM_BYTES + i * STAGE_BYTES;
  }
  __device__ uint32_t sum(int stream, int row, int column) const {
    return base + STAGES_AT + stream * SUM_BYTES + (row * SUM_STRIDE + column) * 4;
  }
  // Of the block: num_streams.
  __device__ uint32_t state(int stream, int row) const { return base + stream * STATES_BYTES + row * 8; }
};

// ---- the pipeline of a stream -----------------------------------------------------------------------------

template <class Kind, class Shape>
struct Stream {
  using Layout = DecodeLayout<Kind, Shape>;
  using Io = typename Kind::Io;
  static constexpr int MT = Shape::row_tiles, NT = Shape::block_k / 8, DT = Shape::head_dim / 8;

  int index, member;  // of the block's streams, and this warp of the stream's
  float o[MT][DT][4] = {};
  OnlineSoftmax<Kind, MT> softmax;

  __device__ Stream()
      : index(uniform_warp() * 32 / Shape::stream_threads),
        member(uniform_warp() % (Shape::stream_threads / 32)) {}

  __device__ static int uniform_warp() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
  __device__ int first_row() const { return member * MT * 16; }
  // Its warps wait for each other.
  __device__ void sync() const {
    if (Shape::stream_threads == 32)
      __syncwarp();
    else
      barrier<Shape::stream_threads>(index + 1);
  }

  // Of keys on pages, what this lane knows of the tile that is to be copied next: where its key lies.
  struct Places {
    int64_t k = -1, v = -1;
  };
  __device__ Places find(const KeyRows<Io> &k, const KeyRows<Io> &v, int first, int end) const {
    const int key = first + int(threadIdx.x) % 32;
    if (!k.pages || int(threadIdx.x) % 32 >= Shape::block_k || key >= end) return {};
    const int page = __ldg(k.pages + uint32_t(key) / uint32_t(k.page_size));
    const int row = uint32_t(key) % uint32_t(k.page_size);
    return {k.place(page, row), v.place(page, row)};
  }

  // Starts the copy of keys from `first` on; those from `end` on become 0. place: of keys on pages.
  __device__ void load(uint32_t stage, const fa_cuda_operand &operand, const KeyRows<Io> &keys, int first,
                       int end, int64_t place) const {
    const TileCopy<Io, typename Layout::KTile, Shape::stream_threads> copy = {
        int(threadIdx.x) % Shape::stream_threads, operand.num_cols};
    auto row_at = [&](int row) -> const Io * {
      const bool is_within = first + row < end;
      if (!keys.pages) return is_within ? keys.at(first + row) : nullptr;
      const int64_t at = __shfl_sync(~0u, place, row);
      return at >= 0 && is_within ? keys.data + at : nullptr;
    };
    const bool is_whole = first + Shape::block_k <= end;
    // What lies on one page is copied as keys without pages are.
    const int64_t of_first = keys.pages ? __shfl_sync(~0u, place, 0) : 0;
    if (!operand.aligned)
      copy.finish(stage, row_at);
    else if (is_whole && !keys.pages)
      copy.start(stage, keys.at(first), keys.stride_row);
    else if (is_whole && of_first >= 0 && keys.holds_tiles(Shape::block_k, first))
      copy.start(stage, keys.data + of_first, keys.stride_row);
    else
      copy.start(stage, row_at, keys.data);
  }

  // The products of q, which 16-bit kinds keep in registers, and what follows from them.
  struct Queries {
    RegisterOperand<1, MT, Kind::SCALED ? 1 : Shape::head_dim / 16> fragments;
    uint32_t tile;
  };
  __device__ Queries queries(uint32_t tile) const {
    Queries q;
    q.tile = tile;
    if constexpr (!Kind::SCALED) {
      const TileOperand<typename Layout::QTile, true, true> from(tile, first_row());
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int k = 0; k < Shape::head_dim / 16; k++) from.read(q.fragments.fragments[0][m][k], 0, m, k);
    }
    return q;
  }

  __device__ void multiply_scores(float (&scores)[MT][NT][4], const Queries &q, uint32_t k_tile) const {
    using KTile = typename Layout::KTile;
    if constexpr (Kind::SCALED) {
      multiply_wide_scores<Kind, Layout::HAS_FRAGMENTS, MT, NT, typename Layout::QTile, KTile>(
          scores, q.tile, first_row(), k_tile);
    } else {
      using Keys = TileOperand<KTile, false, true>;
      constexpr int KT = Shape::head_dim / 16, LATER = MT == 1 ? KT / 2 : 0;
      const Keys keys(k_tile, 0);
      set_zero<MT, NT>(scores);
      multiply<Kind, KT - LATER, NT>(scores, q.fragments, keys);
      if constexpr (LATER > 0) {  // two short sums do not wait for each other
        using Queries16 = decltype(q.fragments);
        float others[MT][NT][4];
        set_zero<MT, NT>(others);
        multiply<Kind, LATER, NT>(others, StepsFrom<KT - LATER, Queries16>{q.fragments},
                                  StepsFrom<KT - LATER, Keys>{keys});
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) scores[0][n][i] += others[0][n][i];
      }
    }
  }

  __device__ void add_values(const float (&p)[MT][NT][4], uint32_t v_tile) {
    using KTile = typename Layout::KTile;
    if constexpr (Kind::SCALED) {
      multiply_wide_values<Kind, KTile, MT, NT, DT>(o, p, v_tile);
    } else {
      RegisterOperand<1, MT, NT / 2> weights;
#pragma unroll
      for (int m = 0; m < MT; m++) {
        uint32_t(&to)[1][NT / 2][4] = reinterpret_cast<uint32_t(&)[1][NT / 2][4]>(weights.fragments[0][m]);
        convert<Kind>(to, reinterpret_cast<const float(&)[1][NT][4]>(p[m]));
      }
      multiply<Kind, NT / 2, DT>(o, weights, TileOperand<KTile, false, false>(v_tile, 0));
    }
  }

  // Takes the tile of keys from `first` on, of which those from `end` on are not there; all_see: the columns
  // that every row sees.
  template <bool PROGRAMS>
  using Addends = AddendsOf<PROGRAMS, Io, MT, NT>;
  template <bool PROGRAMS>
  __device__ void take(uint32_t stage, const fa_cuda_arguments &a, const Sequence &sequence, const Unit &unit,
                       const Queries &q, const Addends<PROGRAMS> &addends, int first, int end, Range all_see) {
    float scores[MT][NT][4];
    multiply_scores(scores, q, stage);
    finish_scores<Kind, MT, NT>(scores, a.score, 1);
    addends.add(scores, first);
    if (first < all_see.begin || first + Shape::block_k > all_see.end)
      hide_columns<PROGRAMS, MT, NT>(scores, a, sequence, unit, first_row(), first, end);
    if (softmax.update(scores, exponent_of_unit<Kind>(a.score))) softmax.rescale_rows(o);
    add_values(scores, stage + Layout::KTile::BYTES);
  }

  // Puts its sums where the block merges them.
  __device__ void put(const Layout &layout) const {
#pragma unroll
    for (int m = 0; m < MT; m++)
      put_sums<Kind>(layout, index, first_row() + m * 16, softmax.max[m], softmax.sum[m], o[m]);
  }
};

// One block of threads for each part of a unit's keys; all parts of a unit are one cluster where d.in_cluster.
template <class Kind, class Shape, bool MENDS, bool PROGRAMS>
__global__ void __launch_bounds__(Shape::num_threads, Shape::blocks_per_sm)
    attend(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_parts d) {
  using Layout = DecodeLayout<Kind, Shape>;
  using Io = typename Kind::Io;
  constexpr int AHEAD = Shape::stages - 1;
  const int part = blockIdx.x % d.num_parts;
  const Unit unit = unit_at<Shape::block_q>(a, blockIdx.x / d.num_parts);
  const Sequence sequence = cached_sequence<PROGRAMS>(a, d.cache, unit.batch);
  const SeenColumns seen = seen_by<PROGRAMS>(a, sequence, unit);
  Range columns = seen.any;
  if (PROGRAMS) columns.begin -= columns.begin % 2;  // what is added is read in pairs
  const int num_tiles = max(columns.end - columns.begin + Shape::block_k - 1, 0) / Shape::block_k;
  const int first_tile = int64_t(num_tiles) * part / d.num_parts;
  const int end_tile = int64_t(num_tiles) * (part + 1) / d.num_parts;

  FA_DYNAMIC_SHARED(128, uint8_t, shared);
  const Layout layout = {shared_address(shared)};
  const TileCopy<Io, typename Layout::QTile, Shape::num_threads> copy = {int(threadIdx.x), a.q.num_cols};
  copy_rows<Io>(copy, layout.base, a.q, sequence, unit);
  copy_async_commit();

  Stream<Kind, Shape> stream;
  const KeyRows<Io> k(a.k, d.cache, sequence, unit.kv_head), v(a.v, d.cache, sequence, unit.kv_head);
  auto first_key = [&](int i) {
    return columns.begin + (first_tile + stream.index + i * Shape::num_streams) * Shape::block_k;
  };
  const int num_mine = (end_tile - first_tile - stream.index + Shape::num_streams - 1) / Shape::num_streams;
  auto places = stream.find(k, v, first_key(0), columns.end);
  auto load = [&](int i) {
    if (i < num_mine) {
      if constexpr (PROGRAMS) prefetch_bias<Shape::block_k>(a, unit, first_key(i));
      const uint32_t stage = layout.stage(stream.index, i % Shape::stages);
      stream.load(stage, a.k, k, first_key(i), columns.end, places.k);
      stream.load(stage + Layout::KTile::BYTES, a.v, v, first_key(i), columns.end, places.v);
      places = stream.find(k, v, first_key(i + 1), columns.end);
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < AHEAD; i++) load(i);
  copy_async_wait<AHEAD>();
  __syncthreads();  // q is there
  if constexpr (Layout::HAS_FRAGMENTS)
    Fragments<Kind, typename Layout::QTile>::template make<Shape::num_threads>(layout.base);
  const auto q = stream.queries(layout.base);
  const typename Stream<Kind, Shape>::template Addends<PROGRAMS> addends(a, sequence, unit, stream.first_row());

#pragma unroll 1
  for (int i = 0; i < num_mine; i++) {
    copy_async_wait<AHEAD - 1>();
    stream.sync();  // this tile is there, and the one before is no longer in use
    load(i + AHEAD);
    stream.template take<PROGRAMS>(layout.stage(stream.index, i % Shape::stages), a, sequence, unit, q, addends,
                                   first_key(i), columns.end, seen.all);
  }
  copy_async_wait_all();
  __syncthreads();  // all tiles are done
  stream.put(layout);
  __syncthreads();

  finish_unit<Kind, Shape, MENDS, PROGRAMS>(a, d, layout, sequence, unit, part);
}

template <class Kind, class Shape, bool PROGRAMS>
constexpr fa_cuda_kernel row(const char *name) {
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Shape::num_threads,
          .shared_bytes = DecodeLayout<Kind, Shape>::BYTES,
          .takes = PROGRAMS ? FA_CUDA_FEW_ROWS_NEEDS : FA_CUDA_CACHE_NEEDS,
          .main = address_of_kernel(attend<Kind, Shape, PROGRAMS, PROGRAMS>),
          .main_that_mends = address_of_kernel(attend<Kind, Shape, true, PROGRAMS>),
          .merge = address_of_kernel(merge_parts<Kind, Shape::head_dim, Shape::block_q>),
          .blocks_per_sm = Shape::blocks_per_sm};
}

}  // namespace decode
}  // namespace fa

#define NAME(rest) "cuda/decode/" FA_QUOTE(FA_KIND) rest
#define KERNEL(programs, ...) \
  fa::decode::row<fa::kinds::FA_KIND, fa::decode::DecodeShape<__VA_ARGS__>, programs>
#define ROW(rest, ...)         KERNEL(false, __VA_ARGS__)(NAME(rest))
#define PROGRAM_ROW(rest, ...) KERNEL(true, __VA_ARGS__)(NAME(rest "/program"))

// Of a bucket, the rows of the table that take fewer rows come first; programs have those for 16 alone. What is
// under way at a time is 64 KiB a block, where two share a multiprocessor, and twice as much where one is
// alone. The small ones are for multiprocessors with less shared memory, 99 or 163 KiB, where keys on pages
// have no other kernels; f32 at 256 has none that 99 KiB hold.
const fa_cuda_kernel FA_JOIN(fa_cuda_decode_, FA_KIND)[] = {
//                  bucket, row tiles, warps a stream, block_k, stages, blocks per multiprocessor
#if !FA_KIND_SCALED
    ROW("/d64/r16", 64, 1, 1, 32, 3, 2),
    ROW("/d64/r64", 64, 2, 2, 32, 3, 2),
    ROW("/d128/r16", 128, 1, 1, 16, 3, 2),
    ROW("/d128/r64", 128, 2, 2, 16, 3, 2),
    ROW("/d256/r16", 256, 1, 1, 16, 3, 1),
    ROW("/d256/r64", 256, 1, 4, 16, 3, 1),
    PROGRAM_ROW("/d64/r16", 64, 1, 1, 32, 3, 2),
    PROGRAM_ROW("/d128/r16", 128, 1, 1, 16, 3, 2),
    PROGRAM_ROW("/d256/r16", 256, 1, 1, 16, 3, 1),
    PROGRAM_ROW("/d128/small", 128, 1, 1, 16, 2, 1),
    PROGRAM_ROW("/d256/small", 256, 1, 2, 16, 1, 1),
#else
    ROW("/d64/r16", 64, 1, 1, 16, 3, 2),
    ROW("/d64/r64", 64, 2, 2, 16, 2, 2),
    ROW("/d128/r16", 128, 1, 1, 16, 3, 1),
    ROW("/d128/r64", 128, 1, 4, 16, 2, 1),
    ROW("/d256/r16", 256, 1, 1, 8, 2, 1),
    ROW("/d256/r64", 256, 1, 4, 8, 2, 1),
    PROGRAM_ROW("/d64/r16", 64, 1, 1, 16, 3, 2),
    PROGRAM_ROW("/d128/r16", 128, 1, 1, 16, 3, 1),
    PROGRAM_ROW("/d256/r16", 256, 1, 1, 8, 2, 1),
    PROGRAM_ROW("/d64/small", 64, 1, 1, 16, 2, 1),
    PROGRAM_ROW("/d128/small", 128, 1, 1, 8, 2, 1),
#endif
    {},
};
