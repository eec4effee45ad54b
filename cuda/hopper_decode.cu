// The forward of few rows on Hopper, of 16-bit types: what decode.cu does, but a product takes 64 packed rows
// at once, so that up to 64 cost what one does, and keys come by tensor map, from pages as from anywhere. Two
// warps copy tiles of k and of v ahead of the warpgroup that computes; a part takes tiles that lie num_parts
// apart. Up to 16 rows stand in the tile of q four times, and each of the four warps takes a quarter of the
// columns: one with all of them would have a tile's scores last when keys come fast or something is added.
//
//     q, o [batch, seqlen_q, num_heads, head_dim]     k, v [batch, seqlen_k, num_kv_heads, head_dim]
//                                                  or      [num_pages, page_size, num_kv_heads, head_dim]
//
// Compiled once for every kind of 16 bits: -DFA_KIND=bf16 and so on.
#include "decode.cuh"
#include "hopper.cuh"

namespace fa {
namespace hopper {

using decode::SeenColumns;
using decode::Unit;

// A row of the table; none of it changes results by more than rounding.
template <int HEAD_DIM, int BLOCK_Q, int BLOCK_K, int STAGES, int BLOCKS_PER_SM, int MOST_KEY_BYTES = 0>
struct DecodeShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, block_k = BLOCK_K, stages = STAGES;
  // A stream has the block_q rows, and some of the columns of each tile.
  static constexpr int num_streams = 64 / block_q, stream_columns = block_k / num_streams;
  static constexpr int num_threads = WARPGROUP + 64, blocks_per_sm = BLOCKS_PER_SM;
  static_assert(num_streams == 1 || (num_streams == 4 && stream_columns == 16), "a warp's rows, a step of p");
  static constexpr int most_key_bytes = MOST_KEY_BYTES;
};

// Shared memory: q, the stages of k and of v, and for each of these a barrier for being full and one for being
// empty. In the end the rows' maxima and sums take the place of q, and sums of o what follows.
template <class Shape>
struct DecodeBuffers {
  static constexpr int ROWS = Shape::num_streams * Shape::block_q;
  struct QTile : BoxTile<ROWS, Shape::head_dim> {
    static constexpr int CHUNKS = Shape::head_dim / 8;
  };
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  static constexpr int STAGES = Shape::stages, K_AT = QTile::BYTES, V_AT = K_AT + STAGES * KTile::BYTES;
  static constexpr int BARRIERS_AT = V_AT + STAGES * KTile::BYTES, NUM_BARRIERS = 4 * STAGES;
  static constexpr int BYTES = BARRIERS_AT + NUM_BARRIERS * 8;
  static_assert(Shape::blocks_per_sm * (BYTES + 1024) <= 228 * 1024, "blocks share a multiprocessor");

  static constexpr int STATES_BYTES = Shape::block_q * sizeof(float2);
  static constexpr int SUMS_AT =
      (Shape::num_streams + (Shape::num_streams > 1)) * STATES_BYTES;  // the block's, too
  // Rows of sums lie so that those of an accumulator's lanes fill the banks.
  static constexpr int SUM_STRIDE = Shape::head_dim + 8;
  static_assert(SUMS_AT + ROWS * SUM_STRIDE * 4 <= BARRIERS_AT, "sums take the place of tiles");

  struct Stage {
    uint32_t tile, full, empty;
  };
  uint32_t base;
  __device__ Stage stage(uint32_t tile, int barrier) const {
    return {base + tile, base + BARRIERS_AT + barrier * 16, base + BARRIERS_AT + barrier * 16 + 8};
  }
  __device__ Stage k(int i) const { return stage(K_AT + i * KTile::BYTES, i); }
  __device__ Stage v(int i) const { return stage(V_AT + i * KTile::BYTES, STAGES + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < NUM_BARRIERS; i += 2) {
      barrier_init(base + BARRIERS_AT + i * 8, 1);                         // full: the producer's
      barrier_init(base + BARRIERS_AT + i * 8 + 8, ARRIVALS_OF_WARP * 4);  // empty: every consuming warp's
    }
    barrier_init_done();
  }

  __device__ uint32_t state(int stream, int row) const { return base + stream * STATES_BYTES + row * 8; }
  __device__ uint32_t sum(int stream, int row, int column) const {
    return base + SUMS_AT + ((stream * Shape::block_q + row) * SUM_STRIDE + column) * 4;
  }
};

// The tiles of a part, on the grid that begins at column 0.
template <class Shape>
struct Share {
  int first, step, count;  // of the first tile's columns; of the next one's further on

  __device__ Share(Range columns, int part, int num_parts) {
    const Blocks tiles = blocks_of(columns, Shape::block_k);
    first = (tiles.last - tiles.count + 1 + part) * Shape::block_k;
    step = num_parts * Shape::block_k;
    count = max(tiles.count - part + num_parts - 1, 0) / num_parts;
  }
  __device__ int column(int i) const { return first + i * step; }
};

// A warp that copies k or v. A tile comes in boxes of cache.box_rows, each of which lies on one page.
template <class Shape>
struct DecodeProducer {
  using Buffers = DecodeBuffers<Shape>;
  using KTile = typename Buffers::KTile;

  const CUtensorMap &map;
  const fa_cuda_cache &cache;
  const Buffers buffers;
  const int batch, kv_head, seqlen_k;
  const Share<Shape> share;
  const int boxes, tiles_at_once;  // so many tiles' boxes a warp has a lane for
  const uint64_t policy;
  // Of this lane's box: its row and its page, which without pages is the batch, in the map.
  struct Place {
    int row, page;
  };

  __device__ DecodeProducer(const fa_cuda_arguments &a, const fa_cuda_parts &d, const CUtensorMap &map,
                            const Buffers &buffers, const Unit &unit, const Share<Shape> &share)
      : map(map),
        cache(d.cache),
        buffers(buffers),
        batch(unit.batch),
        kv_head(unit.kv_head),
        seqlen_k(a.window.seqlen_k),
        share(share),
        boxes(Shape::block_k / d.cache.box_rows),
        tiles_at_once(32 / boxes),
        policy(cache_policy(d.leaves_first)) {}

  // Where this lane's box lies, of those of the tiles from the part's i-th on; nobody asks for those behind the
  // last one. What the table has is looked at when it is wanted.
  __device__ Place find(int i) const {
    const int lane = threadIdx.x % 32, tile = i + lane / boxes;
    const int column = share.column(tile) + lane % boxes * cache.box_rows;
    if (!cache.page_table) return {column, batch};
    if (lane / boxes >= tiles_at_once || tile >= share.count || column >= seqlen_k) return {0, -1};
    const int number = uint32_t(column) / uint32_t(cache.page_size);
    return {column - number * cache.page_size,
            __ldg(cache.page_table + int64_t(batch) * cache.max_pages + number)};
  }

  // Behind the last page, as behind the last batch, there are zeros.
  __device__ Place checked(Place place) const {
    if (cache.page_table && uint32_t(place.page) >= uint32_t(cache.num_pages)) place.page = cache.num_pages;
    return place;
  }

  // The boxes' places are those in the lanes from first_lane on.
  __device__ void load(typename Buffers::Stage to, uint32_t phase, const Place &places, int first_lane) const {
    const bool issues = threadIdx.x % 32 == 0;
    barrier_wait(to.empty, phase ^ 1);
    if (issues) barrier_expect(to.full, KTile::BYTES);
#pragma unroll 1
    for (int box = 0; box < boxes; box++) {
      const int row = __shfl_sync(~0u, places.row, first_lane + box);
      const int page = __shfl_sync(~0u, places.page, first_lane + box);
      if (issues)
#pragma unroll
        for (int i = 0; i < KTile::BOXES; i++)
          load_box(to.tile + i * KTile::BOX_BYTES + box * cache.box_rows * 128, map, to.full, i * 64, row,
                   kv_head, page, policy);
    }
  }

  // Pages are looked up long before they are wanted. before(column): what else is to be done for a tile.
  template <class StageAt, class Before>
  __device__ void produce(StageAt stage_at, Before before) const {
    Place next = find(0), places;
    Ring<Shape::stages> ring;
    int at = tiles_at_once;
#pragma unroll 1
    for (int i = 0; i < share.count; i++, at++, ring.advance()) {
      if (at == tiles_at_once) at = 0, places = checked(next), next = find(i + tiles_at_once);
      before(share.column(i));
      load(stage_at(ring.stage), ring.phase, places, at * boxes);
    }
  }
};

// The warpgroup that computes, each warp 16 rows, or all of these and some of the columns.
template <class Kind, class Shape, bool PROGRAMS>
struct DecodeConsumer {
  using Buffers = DecodeBuffers<Shape>;
  using Stage = typename Buffers::Stage;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  static constexpr int NT = Shape::block_k / 8, OWN_NT = Shape::stream_columns / 8, DT = Shape::head_dim / 8;
  static constexpr bool SPREADS = Shape::num_streams > 1;
  static constexpr int QK_STEPS = Shape::head_dim / 16, PV_STEPS = Shape::block_k / 16;
  static constexpr int BARRIER = 1;

  const fa_cuda_arguments &a;
  const Buffers buffers;
  const Sequence &sequence;
  const Unit &unit;
  const Share<Shape> &share;
  const SeenColumns &seen;
  const int stream, first_row;
  const bool has_rows;  // a warp without some only takes part in products
  const decode::AddendsOf<PROGRAMS, typename Kind::Io, 1, OWN_NT> addends;

  float o[1][DT][4] = {}, scores[1][NT][4];
  uint32_t p[1][PV_STEPS][4] = {};
  OnlineSoftmax<Kind, 1> softmax;

  __device__ DecodeConsumer(const fa_cuda_arguments &a, const Buffers &buffers, const Sequence &sequence,
                            const Unit &unit, const Share<Shape> &share, const SeenColumns &seen)
      : a(a),
        buffers(buffers),
        sequence(sequence),
        unit(unit),
        share(share),
        seen(seen),
        stream(SPREADS ? uniform(threadIdx.x / 32) : 0),
        first_row(SPREADS ? 0 : uniform(threadIdx.x / 32) * 16),
        has_rows(first_row < unit.num_rows),
        addends(a, sequence, unit, first_row) {}

  __device__ void load_queries() const {
    using Io = typename Kind::Io;
    const decode::TileCopy<Io, QTile, WARPGROUP> copy = {int(threadIdx.x), a.q.num_cols};
    decode::copy_rows<Io, SPREADS ? Shape::block_q : 0>(copy, buffers.base, a.q, sequence, unit);
    copy_async_wait_all();
    fence_async();
    named_barrier_wait(BARRIER, WARPGROUP);
  }

  // In a cluster, addresses of shared memory have the number of their block on top, for which descriptors of
  // operands have no room.
  __device__ static uint32_t in_block(uint32_t address) { return address & 0xffffff; }

  __device__ void start_scores(const Ring<Shape::stages> &at) {
    const Stage k = buffers.k(at.stage);
    barrier_wait(k.full, at.phase);
    multiply<Kind, QK_STEPS>(scores[0], BoxOperand<QTile, true>(in_block(buffers.base)),
                             BoxOperand<KTile, true>(in_block(k.tile)), false);
  }

  __device__ void start_o(const Ring<Shape::stages> &at, int column) {
    const Stage v = buffers.v(at.stage);
    barrier_wait(v.full, at.phase);
    if (column < seen.any.begin || column + Shape::block_k > min(seen.any.end, a.window.seqlen_k))
      clear_values(v.tile, seen.any.begin - column, seen.any.end - column);
    multiply<Kind, PV_STEPS>(o[0], p, BoxOperand<KTile, false>(in_block(v.tile)), true);
  }

  // Sets to 0 the rows of v that nobody sees, before `begin` and from `end` on: caches hold garbage there.
  __device__ void clear_values(uint32_t tile, int begin, int end) const {
    clear_rows<KTile, WARPGROUP>(tile, begin, end, threadIdx.x);
    fence_async();
    named_barrier_wait(BARRIER, WARPGROUP);
  }

  // The warp's products, from `column` on, become exponentials; true where o is due a rescale_rows.
  __device__ bool make_exponentials(float (&own)[1][OWN_NT][4], int column) {
    finish_scores<Kind, 1, OWN_NT>(own, a.score, 1);
    addends.add(own, column);
    if (column < seen.all.begin || column + Shape::stream_columns > seen.all.end)
      decode::hide_columns<PROGRAMS, 1, OWN_NT>(own, a, sequence, unit, first_row, column, seen.any.end);
    return softmax.update(own, exponent_of_unit<Kind>(a.score));
  }

  // Makes p of a tile's products. before_p: what must come first, as o's product of the tile before reads p.
  template <class BeforeP>
  __device__ void make_p(int column, BeforeP before_p) {
    if constexpr (SPREADS) {
      float own[1][OWN_NT][4];
      uint32_t step[1][1][4];
#pragma unroll
      for (int n = 0; n < OWN_NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          // By a number that is not uniform: of branches ptxas would have products wait for each other.
          own[0][n][i] = scores[0][n][i];
#pragma unroll
          for (int other = 1; other < Shape::num_streams; other++)
            own[0][n][i] = int(threadIdx.x / 32) == other ? scores[0][other * OWN_NT + n][i] : own[0][n][i];
        }
      const bool moved = make_exponentials(own, column + stream * Shape::stream_columns);
      before_p(moved);
      convert<Kind>(step, own);
#pragma unroll
      for (int k = 0; k < PV_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[0][k][i] = k == stream ? step[0][0][i] : 0;
    } else {
      const bool moved = has_rows && make_exponentials(scores, column);
      before_p(moved);
      if (has_rows) convert<Kind>(p, scores);
    }
  }

  // The scores of a tile are computed beside o's product of the one before, whose exponentials are p.
  __device__ void consume() {
    load_queries();
    if (share.count == 0) return;
    Ring<Shape::stages> ring;
    start_scores(ring);
    wgmma_wait<0>(scores[0]);
    barrier_arrive_warp(buffers.k(ring.stage).empty);
    make_p(share.column(0), [](bool) {});
#pragma unroll 1
    for (int i = 1; i < share.count; i++) {
      Ring<Shape::stages> next = ring;
      next.advance();
      start_scores(next);
      start_o(ring, share.column(i - 1));
      wgmma_wait<1>(scores[0]);
      barrier_arrive_warp(buffers.k(next.stage).empty);
      make_p(share.column(i), [&](bool moved) {
        wgmma_wait<0>(o[0], p);
        barrier_arrive_warp(buffers.v(ring.stage).empty);
        if (moved) softmax.rescale_rows(o);
      });
      ring = next;
    }
    start_o(ring, share.column(share.count - 1));
    wgmma_wait<0>(o[0], p);
  }

  __device__ void put() const {
    if (has_rows) decode::put_sums<Kind>(buffers, stream, first_row, softmax.max[0], softmax.sum[0], o[0]);
  }
};

// One block of threads for each part of a unit's keys; all parts of a unit are one cluster where d.in_cluster.
template <class Kind, class Shape, bool MENDS, bool PROGRAMS>
__global__ void __launch_bounds__(Shape::num_threads, Shape::blocks_per_sm)
    attend(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_parts d,
           const __grid_constant__ fa_cuda_maps maps) {
  using Buffers = DecodeBuffers<Shape>;
  FA_DYNAMIC_SHARED(1024, uint8_t, shared);
  const Buffers buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers();
  __syncthreads();
  const int part = blockIdx.x % d.num_parts;
  const Unit unit = decode::unit_at<Shape::block_q>(a, blockIdx.x / d.num_parts);
  const Sequence sequence = decode::cached_sequence<PROGRAMS>(a, d.cache, unit.batch);
  const SeenColumns seen = decode::seen_by<PROGRAMS>(a, sequence, unit);
  const Share<Shape> share(seen.any, part, d.num_parts);
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 4) {
    DecodeProducer<Shape>(a, d, maps.k, buffers, unit, share)
        .produce([&](int i) { return buffers.k(i); },
                 [&](int column) {
                   if constexpr (PROGRAMS) decode::prefetch_bias<Shape::block_k>(a, unit, column);
                 });
  } else if (warp == 5) {
    DecodeProducer<Shape>(a, d, maps.v, buffers, unit, share)
        .produce([&](int i) { return buffers.v(i); }, [](int) {});
  } else {
    using Consumer = DecodeConsumer<Kind, Shape, PROGRAMS>;
    Consumer consumer(a, buffers, sequence, unit, share, seen);
    consumer.consume();
    named_barrier_wait(Consumer::BARRIER, WARPGROUP);  // nobody reads tiles any more
    consumer.put();
  }
  __syncthreads();
  decode::finish_unit<Kind, Shape, MENDS, PROGRAMS>(a, d, buffers, sequence, unit, part);
}

template <class Kind, class Shape, bool PROGRAMS>
constexpr fa_cuda_kernel row(const char *name) {
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Shape::num_threads,
          .shared_bytes = DecodeBuffers<Shape>::BYTES,
          .takes = PROGRAMS ? FA_CUDA_FEW_ROWS_NEEDS : FA_CUDA_CACHE_NEEDS,
          .mapped = true,
          .main = address_of_kernel(attend<Kind, Shape, PROGRAMS, PROGRAMS>),
          .main_that_mends = address_of_kernel(attend<Kind, Shape, true, PROGRAMS>),
          .merge = address_of_kernel(decode::merge_parts<Kind, Shape::head_dim, Shape::block_q>),
          .blocks_per_sm = Shape::blocks_per_sm,
          .most_key_bytes = Shape::most_key_bytes};
}

}  // namespace hopper
}  // namespace fa

#define NAME(rest) "cuda/sm90/decode/" FA_QUOTE(FA_KIND) rest
#define KERNEL(programs, ...) \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::DecodeShape<__VA_ARGS__>, programs>
#define ROW(rest, ...)         KERNEL(false, __VA_ARGS__)(NAME(rest))
#define PROGRAM_ROW(rest, ...) KERNEL(true, __VA_ARGS__)(NAME(rest "/program"))

// Stages are what there is room for: 96 KiB a block where two share a multiprocessor. What few keys take is the
// time of the longest part, whose tiles are better small; many come faster in large ones. Of a bucket, those
// for fewer rows come first.
const fa_cuda_kernel FA_JOIN(fa_hopper_decode_, FA_KIND)[] = {
    // bucket, block_q, block_k, stages, blocks per multiprocessor, most bytes of keys
    ROW("/d64/k64/r16", 64, 16, 64, 6, 2, 32 << 20),
    ROW("/d64/k64", 64, 64, 64, 6, 2, 32 << 20),
    ROW("/d64/k128", 64, 64, 128, 3, 2),
    ROW("/d128/r16", 128, 16, 64, 3, 2),
    ROW("/d128", 128, 64, 64, 3, 2),
    ROW("/d256", 256, 64, 64, 3, 1),
    PROGRAM_ROW("/d64/r16", 64, 16, 64, 6, 2),
    PROGRAM_ROW("/d64", 64, 64, 64, 6, 2),
    PROGRAM_ROW("/d128/r16", 128, 16, 64, 3, 2),
    PROGRAM_ROW("/d128", 128, 64, 64, 3, 2),
    PROGRAM_ROW("/d256/r16", 256, 16, 64, 3, 1),
    PROGRAM_ROW("/d256", 256, 64, 64, 3, 1),
    {},
};
