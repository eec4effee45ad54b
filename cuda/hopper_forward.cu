// The forward pass on Hopper: FlashAttention-3's schedule. A block of threads stays on its multiprocessor and
// takes tiles of block_q rows of one head, one after another. A producer warp copies q, k and v to shared
// memory ahead of the consumers, warpgroups of 64 rows each, which keep o and the softmax's state in registers
// and work on the softmax of one column block while the products of the next run, over the ends of tiles too.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper.cuh"
#include "mask.cuh"
#include "operand.cuh"
#include "softmax.cuh"

namespace fa {
namespace hopper {

// A row of the table; none of it changes results by more than rounding. Registers are per thread.
template <int HEAD_DIM, int BLOCK_K, int NUM_CONSUMERS, int Q_STAGES, int CONSUMER_REGISTERS,
          int PRODUCER_REGISTERS, bool HOLDS_Q = false>
struct ForwardShape {
  static constexpr int head_dim = HEAD_DIM, block_k = BLOCK_K, num_consumers = NUM_CONSUMERS,
                       q_stages = Q_STAGES;
  static constexpr int block_q = NUM_CONSUMERS * 64, num_threads = (NUM_CONSUMERS + 1) * WARPGROUP;
  static constexpr int consumer_registers = CONSUMER_REGISTERS, producer_registers = PRODUCER_REGISTERS;
  static constexpr bool holds_q = HOLDS_Q;  // a consumer's rows of it, in registers
};

// Shared memory: the stages of q, of k and of v, then a barrier for each stage being full and one for its being
// empty; and for each stage of v, where that is a tile's last, which tile comes next.
template <class Kind, class Shape>
struct ForwardBuffers {
  static constexpr int Q_STAGES = Shape::q_stages, STAGES = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  // q comes as the caller gave it; consumers split f32 in place.
  using QBoxes = BoxTile<Shape::block_q, Shape::head_dim * sizeof(typename Kind::Io) / 2>;
  static constexpr int Q_BYTES = QBoxes::BYTES;
  static constexpr int K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
  static constexpr int BARRIERS_AT = V_AT + STAGES * K_BYTES, NUM_BARRIERS = 2 * (Q_STAGES + 2 * STAGES);
  static constexpr int NEXT_AT = BARRIERS_AT + NUM_BARRIERS * 8, BYTES = NEXT_AT + STAGES * 24;

  struct Stage {
    uint32_t tile, full, empty;
  };
  uint32_t base;
  __device__ Stage stage(uint32_t tile, int barrier) const {
    return {base + tile, base + BARRIERS_AT + barrier * 16, base + BARRIERS_AT + barrier * 16 + 8};
  }
  __device__ Stage q(int i) const { return stage(i * Q_BYTES, i); }
  __device__ Stage k(int i) const { return stage(K_AT + i * K_BYTES, Q_STAGES + i); }
  __device__ Stage v(int i) const { return stage(V_AT + i * K_BYTES, Q_STAGES + STAGES + i); }
  __device__ uint32_t next_tile(int i) const { return base + NEXT_AT + i * 24; }

  __device__ void init_barriers() const {
    for (int i = 0; i < NUM_BARRIERS; i += 2) {
      barrier_init(base + BARRIERS_AT + i * 8, 1);  // full: the producer's
      // empty: every consuming warp's
      barrier_init(base + BARRIERS_AT + i * 8 + 8, ARRIVALS_OF_WARP * Shape::num_consumers * 4);
    }
    barrier_init_done();
  }
};

struct ForwardTile {
  int head = -1, batch;  // head: negative where there is no further tile
  Range rows, k_blocks;  // at least one: a tile that sees nothing has a block that is masked whole

  template <class Visit>
  __device__ void for_each_word(Visit visit) {
    visit(0, head), visit(1, batch), visit(2, rows.begin), visit(3, rows.end);
    visit(4, k_blocks.begin), visit(5, k_blocks.end);
  }
  __device__ void tell(uint32_t to) {
    for_each_word([&](int i, int word) { store_shared(to + i * 4, uint32_t(word)); });
  }
  __device__ void hear(uint32_t from) {
    for_each_word([&](int i, int &word) { word = uniform(load_shared_word(from + i * 4)); });
  }
};

// A tile, by its place in the order in which they are begun: from the last heads to the first, heads_at_once of
// them together, so that their k and v stay in cache, and of those the last row blocks first. With a causal
// mask these have the most to do, and short ones let all end at once; heads that are fewer are not the last.
// It takes as long as a product to find: the producer does, ahead, and tells the consumers.
template <class Shape>
__device__ inline ForwardTile tile_of(const fa_cuda_arguments &a, uint32_t index) {
  ForwardTile tile;
  const uint32_t num_tiles = a.batch * a.num_heads * a.num_q_blocks;
  if (index >= num_tiles) return tile;
  index = num_tiles - 1 - index;
  const int first = index / (a.heads_at_once * a.num_q_blocks) * a.heads_at_once;
  const uint32_t num_heads = min(a.heads_at_once, a.batch * a.num_heads - first);
  index -= first * a.num_q_blocks;
  const uint32_t batch_head = first + index % num_heads;
  tile.head = batch_head % a.num_heads, tile.batch = batch_head / a.num_heads;
  tile.rows = block_range(index / num_heads, Shape::block_q, a.window.seqlen_q);
  tile.k_blocks = blocks_of(visible_columns(a.window, tile.rows), Shape::block_k);
  if (tile.k_blocks.begin == tile.k_blocks.end) tile.k_blocks = {0, 1};
  return tile;
}

// ---- the producer: one thread ------------------------------------------------------------------------

template <class Kind, class Shape>
__device__ inline void produce(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                               const ForwardBuffers<Kind, Shape> &buffers) {
  using Buffers = ForwardBuffers<Kind, Shape>;
  using QBoxes = typename Buffers::QBoxes;
  using KTile = typename Buffers::KTile;
  constexpr int Q_BOX_COLS = 128 / sizeof(typename Kind::Io);
  Ring<Buffers::Q_STAGES> q_ring;
  Ring<Buffers::STAGES> ring;
  uint32_t index = blockIdx.x;
  for (ForwardTile tile = tile_of<Shape>(a, index); tile.head >= 0; q_ring.advance()) {
    const int kv_head = tile.head / (a.num_heads / a.num_kv_heads);
    const auto q = buffers.q(q_ring.stage);
    const bool mapped = !Kind::SCALED || a.q.aligned;  // or the consumers fetch q
    if (Buffers::Q_STAGES == 1 && mapped)
      prefetch_boxes<QBoxes, Q_BOX_COLS>(maps.q, tile.rows.begin, tile.head, tile.batch);
    barrier_wait(q.empty, q_ring.phase ^ 1);
    if (mapped) {
      barrier_expect(q.full, Buffers::Q_BYTES);
      load_boxes<QBoxes, Q_BOX_COLS>(q.tile, maps.q, q.full, tile.rows.begin, tile.head, tile.batch);
    } else {
      barrier_arrive(q.full);
    }
    ForwardTile next;
    for (int block = tile.k_blocks.end - 1; block >= tile.k_blocks.begin; block--, ring.advance()) {
      // The next tile: late, as a block of threads that is free sooner may take it, but not without time for
      // the answer.
      if (block == min(tile.k_blocks.begin + 1, tile.k_blocks.end - 1))
        index = a.tickets ? gridDim.x + atomicAdd(a.tickets, 1) : index + gridDim.x;
      auto load = [&](typename Buffers::Stage to, const CUtensorMap &map) {
        barrier_expect(to.full, Buffers::K_BYTES);
#pragma unroll
        for (int part = 0; part < Kind::PARTS; part++)
          load_boxes<KTile>(to.tile + part * KTile::BYTES, map, to.full, block * Shape::block_k, kv_head,
                            tile.batch + part * a.batch);
      };
      const auto k = buffers.k(ring.stage), v = buffers.v(ring.stage);
      barrier_wait(k.empty, ring.phase ^ 1);
      load(k, maps.k);
      if (block == tile.k_blocks.begin) next = tile_of<Shape>(a, index);
      barrier_wait(v.empty, ring.phase ^ 1);
      if (block == tile.k_blocks.begin) next.tell(buffers.next_tile(ring.stage));
      load(v, maps.v);
    }
    tile = next;
    tile.for_each_word([](int, int &word) { word = uniform(word, 1); });
  }
}

// ---- the consumers -----------------------------------------------------------------------------------

// Consumers take turns at starting their products, so that the softmax of one meets the products of another.
template <int NUM_CONSUMERS>
struct Turns {
  int consumer;
  __device__ Turns(int consumer) : consumer(consumer) {
    if (consumer == NUM_CONSUMERS - 1) pass();  // the first turn is consumer 0's
  }
  __device__ void wait() const { named_barrier_wait(1 + consumer, 2 * WARPGROUP); }
  __device__ void pass() const { named_barrier_arrive(1 + (consumer + 1) % NUM_CONSUMERS, 2 * WARPGROUP); }
};

// Reads this warp's 16 rows of q as load_boxes would have put them, where no tensor map can describe them.
template <class T>
__device__ inline void fetch_rows(const fa_cuda_arguments &a, const ForwardTile &tile, uint32_t to,
                                  int tile_row) {
  const int row = tile_row + threadIdx.x % 16, q_row = tile.rows.begin + row;
  const float *from = head_of<float>(a.q, tile.batch, tile.head) + q_row * a.q.stride_row;
#pragma unroll 1
  for (int eight = threadIdx.x % 32 / 16; eight < T::COLS / 8; eight += 2) {
    float x[8];
    load_eight(x, from + eight * 8, q_row < tile.rows.end ? a.head_dim - eight * 8 : 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
      store_shared(to + T::offset(row, eight * 2 + half), reinterpret_cast<const uint4 *>(x)[half]);
  }
  __syncwarp();
}

// Turns this warp's 16 rows of f32 numbers, tile_row being the first, into the scaled parts of T, in place: in
// both forms a row has the same bytes, its piece of each box. Returns the power of two that they are scaled by.
template <class Kind, class T>
__device__ inline int split_rows(uint32_t tile, int tile_row) {
  constexpr int EIGHTS = T::COLS / 16;  // of a row, for each of the two lanes that share it
  const int row = tile_row + threadIdx.x % 16, first = threadIdx.x % 32 / 16;
  float x[EIGHTS][8];
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      reinterpret_cast<float4 *>(x[i])[half] =
          load_shared_four(tile + T::offset(row, (i * 2 + first) * 2 + half));
    bits = largest_finite(x[i], bits);
  }
  const int exponent = scaling_exponent(__reduce_max_sync(~0u, bits));
  __syncwarp();  // all have read
  const float scale = power_of_two(exponent);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    uint4 parts[Kind::PARTS];
    split_eight<Kind>(parts, x[i], scale);
#pragma unroll
    for (int part = 0; part < Kind::PARTS; part++)
      store_shared(tile + part * T::BYTES + T::offset(row, i * 2 + first), parts[part]);
  }
  fence_async();
  return exponent;
}

template <class Kind, class Shape>
__device__ inline void consume(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                               const ForwardBuffers<Kind, Shape> &buffers, int consumer) {
  using Buffers = ForwardBuffers<Kind, Shape>;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  constexpr bool SCALED = Kind::SCALED;
  constexpr int NT = Shape::block_k / 8, DT = Shape::head_dim / 8;
  constexpr int QK_STEPS = Shape::head_dim / 16, PV_STEPS = Shape::block_k / 16;
  constexpr int P_EXPONENT = SCALED ? SCALED_EXPONENT - MAX_LAG : 0;
  constexpr int SPLIT_BARRIER = 1 + Shape::num_consumers;
  static_assert(!SCALED || FA_CUDA_GROUP % Shape::block_k == 0, "one scale a block");

  const Turns<Shape::num_consumers> turns(consumer);
  const float unit = exponent_of_unit<Kind>(a.score);
  const int warp_row = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  Ring<Buffers::Q_STAGES> q_ring;
  Ring<Buffers::STAGES> ring;
  // The barrier of the rows of q that a tile's o is being stored from, or 0: they are empty after that.
  uint32_t stored = 0;
  auto release_stored = [&] {
    if (!stored) return;
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    barrier_arrive_warp(stored);
    stored = 0;
  };
  ForwardTile next_tile = tile_of<Shape>(a, blockIdx.x);
  for (ForwardTile tile = next_tile; __any_sync(~0u, tile.head >= 0); tile = next_tile, q_ring.advance()) {
    // Where f32 is asked for, a block's product goes into registers of its own and from there, by ordinary
    // additions, into o: over a long sum, what the tensor cores cut off would add up.
    float o[1][DT][4], fresh[1][DT][4], scores[1][NT][4];
    float(&product)[DT][4] = SCALED ? fresh[0] : o[0];
    uint32_t p[Kind::PARTS][PV_STEPS][4], q_held[1][QK_STEPS][4];
    OnlineSoftmax<Kind, 1> softmax;
    const auto q = buffers.q(q_ring.stage);
    const BoxOperand<QTile, true> q_rows(q.tile, consumer * 64);
    const int row = tile.rows.begin + consumer * 64, first_row = tile.rows.begin + warp_row;
    const int kv_head = tile.head / (a.num_heads / a.num_kv_heads);
    int block = tile.k_blocks.end - 1, exponent_q = 0;

    // Leaves out a column block that only rows of other consumers see. Who waits for all that comes, with rows
    // or without, cannot mistake a phase for the last but one. And all take as many turns: one for each block
    // but a consumer's first.
    auto skip = [&](bool turn) {
      if (turn) turns.wait(), turns.pass();
      const auto k = buffers.k(ring.stage), v = buffers.v(ring.stage);
      barrier_wait(k.full, ring.phase);
      barrier_arrive_warp(k.empty);
      barrier_wait(v.full, ring.phase);
      next_tile.hear(buffers.next_tile(ring.stage));  // which holds if this is the tile's last
      barrier_arrive_warp(v.empty);
      ring.advance(), block--;
    };
    barrier_wait(q.full, q_ring.phase);
    // What the consumer's own rows see, or one block if they see nothing. To the compiler that differs from
    // thread to thread, and with it all state of the loops; but not where a warp votes.
    Range own = {tile.k_blocks.begin, tile.k_blocks.begin};
    if (row < tile.rows.end) {
      own = blocks_of(visible_columns(a.window, {row, min(row + 64, tile.rows.end)}), Shape::block_k);
      if (own.begin == own.end) own = {tile.k_blocks.begin, tile.k_blocks.begin + 1};
    }
    const bool has_rows = __any_sync(~0u, own.begin < own.end);
#pragma unroll 1
    for (bool turn = has_rows; __any_sync(~0u, block >= own.end); turn = true) skip(turn);
    if (!has_rows) {
      release_stored();
      barrier_arrive_warp(q.empty);
      continue;
    }

    auto start_scores = [&](typename Buffers::Stage k) {
      const BoxOperand<KTile, true> columns(k.tile);
      if constexpr (Shape::holds_q)
        multiply<Kind, QK_STEPS>(scores[0], q_held, columns, false);
      else
        multiply<Kind, QK_STEPS>(scores[0], q_rows, columns, false);
    };
    auto start_o = [&](typename Buffers::Stage v) {
      multiply<Kind, PV_STEPS>(product, p, BoxOperand<KTile, false>(v.tile), !SCALED);
    };
    // What to multiply products with; read ahead of them.
    auto unscaling = [&](int exponent, const fa_cuda_operand &operand, int block) {
      return power_of_two(-exponent - exponent_of<Kind>(operand, tile.batch, kv_head, block * Shape::block_k));
    };
    auto finish_o = [&](typename Buffers::Stage v, float unscale) {
      wgmma_wait<0>(product, p);
      barrier_arrive_warp(v.empty);
      if constexpr (SCALED) {
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) o[0][n][i] = fmaf(unscale, product[n][i], o[0][n][i]);
      }
    };
    auto exponentials_of = [&](int block, float unscale, int num_columns = Shape::block_k) {
      const int column = block * Shape::block_k;
      finish_scores<Kind, 1, NT>(scores, a.score, unscale);
      if (!is_fully_visible(a.window, {row, row + 64}, column, Shape::block_k))
        mask_scores<1, NT>(scores, a.window, first_row, column, num_columns);
      return softmax.update(scores, unit, num_columns);
    };
    if constexpr (SCALED) {
      if (!a.q.aligned) fetch_rows<QTile>(a, tile, q.tile, warp_row);
      exponent_q = split_rows<Kind, QTile>(q.tile, warp_row);
      named_barrier_wait(SPLIT_BARRIER + consumer, WARPGROUP);
    }
#pragma unroll
    for (int k = 0; k < QK_STEPS && Shape::holds_q; k++)
      load_matrices<false>(q_held[0][k],
                           q.tile + QTile::offset(warp_row + threadIdx.x % 16, k * 2 + threadIdx.x % 32 / 16));
    float of_scores = unscaling(exponent_q, a.k, block), of_o = unscaling(P_EXPONENT, a.v, block);
    set_zero<1, DT>(o);
    barrier_wait(buffers.k(ring.stage).full, ring.phase);
    start_scores(buffers.k(ring.stage));
    release_stored();
    wgmma_wait<0>(scores[0]);
    barrier_arrive_warp(buffers.k(ring.stage).empty);
    // Of this one the warp's rows may see the first columns only.
    exponentials_of(block, of_scores,
                    visible_columns(a.window, {first_row, first_row + 16}).end - block * Shape::block_k);
    convert<Kind>(p, scores, 1 << P_EXPONENT);
    for (block--; __any_sync(~0u, block >= own.begin); block--) {
      Ring<Buffers::STAGES> next = ring;
      next.advance();
      const auto k = buffers.k(next.stage), v = buffers.v(ring.stage);
      of_scores = unscaling(exponent_q, a.k, block);
      const float of_next_o = unscaling(P_EXPONENT, a.v, block);
      barrier_wait(k.full, next.phase);
      turns.wait();
      start_scores(k);
      barrier_wait(v.full, ring.phase);
      start_o(v);
      turns.pass();
      wgmma_wait<1>(scores[0]);
      barrier_arrive_warp(k.empty);
      const bool moved = exponentials_of(block, of_scores);
      finish_o(v, of_o);
      if (moved) softmax.rescale_rows(o);
      convert<Kind>(p, scores, 1 << P_EXPONENT);
      ring = next;
      of_o = of_next_o;
    }
    if constexpr (SCALED) barrier_arrive_warp(q.empty);
    const auto v = buffers.v(ring.stage);
    barrier_wait(v.full, ring.phase);
    start_o(v);
    next_tile.hear(buffers.next_tile(ring.stage));
    float scale[1][2], lse[1][2];
    softmax.finish(scale, lse, a.score, a.sink + tile.head, a.num_sinks, a.num_heads);
    store_lse<1>(a.lse + (int64_t(tile.batch) * a.num_heads + tile.head) * a.window.seqlen_q + first_row, lse,
                 a.window.seqlen_q - first_row);
    finish_o(v, of_o);
    ring.advance();
    if constexpr (SCALED) {
      using Io = typename Kind::Io;
      store_accumulator<Io, 1, DT>(row_of<Io>(a.o, tile.batch, tile.head, first_row), a.o.stride_row,
                                   a.window.seqlen_q - first_row, a.head_dim, o, scale);
    } else {  // by way of q's rows: nobody else reads those of this warp
      put_rows<typename Kind::Element, QTile>(q.tile, warp_row, o[0], scale[0]);
      fence_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        store_boxes<QTile>(maps.out, q.tile, warp_row, first_row, tile.head, tile.batch);
        bulk_commit();
      }
      stored = q.empty;
      if (Buffers::Q_STAGES == 1) release_stored();
    }
#pragma unroll 1
    while (__any_sync(~0u, block >= tile.k_blocks.begin)) skip(true);
  }
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
}

template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    forward(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const ForwardBuffers<Kind, Shape> buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers();
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  if (warpgroup == 0) {
    give_registers<Shape::producer_registers>();
    if (threadIdx.x == 0) produce(a, maps, buffers);
  } else {
    take_registers<Shape::consumer_registers>();
    consume(a, maps, buffers, warpgroup - 1);
  }
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Shape::num_threads,
          .shared_bytes = ForwardBuffers<Kind, Shape>::BYTES,
          .mapped = true,
          .persistent = true,
          .main = (const void *)forward<Kind, Shape>};
}

}  // namespace hopper
}  // namespace fa

#define ROW(rest, ...)                                                                                      \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::ForwardShape<__VA_ARGS__>>("cuda/sm90/" FA_QUOTE(FA_KIND) \
                                                                                 rest)

// Registers a consumer's thread needs for its arrays: (block_k * 1.5 + head_dim) / 2, and block_k + head_dim of
// f32 in two parts. Three consumers at 64, which use each column block for 192 rows; at 256, and of f32, column
// blocks are what fits beside q. At 128 there is room for q too, head_dim / 4: of what the products read from
// shared memory, a fifth.
const fa_cuda_kernel FA_JOIN(fa_hopper_forward_, FA_KIND)[] = {
// bucket, block_k, consumers, stages of q, their registers, the producer's, whether they hold q
#if FA_KIND_SCALED
    ROW("/d64", 64, 128, 2, 2, 240, 24),
    ROW("/d128", 128, 64, 2, 1, 240, 24),
#else
    ROW("/d64", 64, 128, 3, 2, 160, 32),
    ROW("/d128", 128, 128, 2, 2, 240, 24, true),
    ROW("/d256", 256, 80, 2, 1, 240, 24),
#endif
    {},
};
