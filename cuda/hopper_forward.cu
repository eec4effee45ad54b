// The forward pass on Hopper: FlashAttention-3's schedule. A block of threads stays on its multiprocessor and
// takes tiles of block_q rows of one head, one after another. A producer warp copies q, k and v to shared
// memory ahead of the consumers, warpgroups of 64 rows each, which keep o and the softmax's state in registers
// and work on the softmax of one column block while the products of the next run, over the ends of tiles too.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper.cuh"
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

// Rows of a head that the consumers of a block of threads work on together.
struct ForwardTile {
  int head = -1, batch;  // head: negative where there is no further tile
  Range rows;
  Blocks k_blocks;  // at least one: a tile that sees nothing has a block that is masked whole

  // As it is told through shared memory.
  static constexpr int WORDS = 6;
  template <class Visit>
  __device__ void for_each_word(Visit visit) {
    visit(0, head), visit(1, batch), visit(2, rows.begin), visit(3, rows.end);
    visit(4, k_blocks.last), visit(5, k_blocks.count);
  }
  __device__ void tell(uint32_t to) {
    for_each_word([&](int i, int word) { store_shared(to + i * 4, uint32_t(word)); });
  }
  __device__ void hear(uint32_t from) {
    for_each_word([&](int i, int &word) { word = uniform(load_shared_word(from + i * 4)); });
  }
};

// The tile that is begun as the index-th. It takes as long as a product to find: the producer does, ahead, and
// tells the consumers.
template <class Shape>
__device__ inline ForwardTile tile_of(const fa_cuda_arguments &a, uint32_t index) {
  ForwardTile tile;
  RowBlock block;
  if (!persistent_row_block_of(a, index, block)) return tile;
  const Sequence sequence = sequence_of(a, block.batch);
  tile.head = block.head, tile.batch = block.batch;
  tile.rows = row_range<Shape>(sequence, block.q_block);
  tile.k_blocks = k_blocks_of<Shape>(sequence, tile.rows);
  if (tile.k_blocks.count == 0) tile.k_blocks = {0, 1};
  return tile;
}

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
  static constexpr int NEXT_AT = BARRIERS_AT + NUM_BARRIERS * 8,
                       BYTES = NEXT_AT + STAGES * ForwardTile::WORDS * 4;

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
  __device__ uint32_t next_tile(int i) const { return base + NEXT_AT + i * ForwardTile::WORDS * 4; }

  __device__ void init_barriers() const {
    for (int i = 0; i < NUM_BARRIERS; i += 2) {
      barrier_init(base + BARRIERS_AT + i * 8, 1);  // full: the producer's
      // empty: every consuming warp's
      barrier_init(base + BARRIERS_AT + i * 8 + 8, ARRIVALS_OF_WARP * Shape::num_consumers * 4);
    }
    barrier_init_done();
  }
};

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
    const Sequence sequence = sequence_of(a, tile.batch);
    const int kv_head = kv_head_of(a, tile.head), first_row = sequence.first_row + tile.rows.begin;
    const auto q = buffers.q(q_ring.stage);
    const bool mapped = !Kind::SCALED || a.q.aligned;  // or the consumers fetch q
    if (Buffers::Q_STAGES == 1 && mapped)
      prefetch_boxes<QBoxes, Q_BOX_COLS>(maps.q, first_row, tile.head, tile.batch);
    barrier_wait(q.empty, q_ring.phase ^ 1);
    if (mapped) {
      barrier_expect(q.full, Buffers::Q_BYTES);
      load_boxes<QBoxes, Q_BOX_COLS>(q.tile, maps.q, q.full, first_row, tile.head, tile.batch);
    } else {
      barrier_arrive(q.full);
    }
    ForwardTile next;
    for (int i = 0, left = tile.k_blocks.count - 1; left >= 0; i++, left--, ring.advance()) {
      // The next tile: late, as a block of threads that is free sooner may take it, but not without time for
      // the answer.
      if (left == min(1, tile.k_blocks.count - 1))
        index = a.tickets ? gridDim.x + atomicAdd(a.tickets, 1) : index + gridDim.x;
      const int column = sequence.first_column + tile.k_blocks.at(i) * Shape::block_k;
      auto load = [&](typename Buffers::Stage to, const CUtensorMap &map) {
        barrier_expect(to.full, Buffers::K_BYTES);
#pragma unroll
        for (int part = 0; part < Kind::PARTS; part++)
          load_boxes<KTile>(to.tile + part * KTile::BYTES, map, to.full, column, kv_head,
                            tile.batch + part * a.batch);
      };
      const auto k = buffers.k(ring.stage), v = buffers.v(ring.stage);
      barrier_wait(k.empty, ring.phase ^ 1);
      load(k, maps.k);
      if (left == 0) next = tile_of<Shape>(a, index);
      barrier_wait(v.empty, ring.phase ^ 1);
      if (left == 0) next.tell(buffers.next_tile(ring.stage));
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
  const float *from = rows_of<float>(a.q, sequence_of(a, tile.batch), tile.head) + q_row * a.q.stride_row;
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

// A consumer: a warpgroup, and what its threads hold while they go through tiles.
template <class Kind, class Shape>
struct Consumer {
  using Buffers = ForwardBuffers<Kind, Shape>;
  using Stage = typename Buffers::Stage;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  static constexpr bool SCALED = Kind::SCALED;
  static constexpr int NT = Shape::block_k / 8, DT = Shape::head_dim / 8;
  static constexpr int QK_STEPS = Shape::head_dim / 16, PV_STEPS = Shape::block_k / 16;
  static constexpr int P_EXPONENT = SCALED ? SCALED_EXPONENT - MAX_LAG : 0;
  static constexpr int SPLIT_BARRIER = 1 + Shape::num_consumers;
  static_assert(!SCALED || FA_CUDA_SCALE_ROWS % Shape::block_k == 0, "one scale a block");

  const fa_cuda_arguments &a;
  const fa_cuda_maps &maps;
  const Buffers buffers;
  const int consumer;
  const Turns<Shape::num_consumers> turns;
  const float unit;
  const int warp_row;
  Ring<Buffers::Q_STAGES> q_ring;
  Ring<Buffers::STAGES> ring;
  // The barrier of the rows of q that a tile's o is being stored from, or 0: they are empty after that.
  uint32_t stored = 0;
  ForwardTile tile, next_tile;

  // Of the tile: the consumer's and the warp's first row, and how many column blocks have been visited.
  int row, first_row, kv_head, visited, exponent_q;
  // Where f32 is asked for, a block's product goes into registers of its own and from there, by ordinary
  // additions, into o: over a long sum, what the tensor cores cut off would add up.
  float o[1][DT][4], fresh[1][DT][4], scores[1][NT][4];
  uint32_t p[Kind::PARTS][PV_STEPS][4], q_held[1][QK_STEPS][4];
  OnlineSoftmax<Kind, 1> softmax;

  __device__ Consumer(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                      int consumer)
      : a(a),
        maps(maps),
        buffers(buffers),
        consumer(consumer),
        turns(consumer),
        unit(exponent_of_unit<Kind>(a.score)),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        next_tile(tile_of<Shape>(a, blockIdx.x)) {}

  __device__ float (&product())[DT][4] { return SCALED ? fresh[0] : o[0]; }

  __device__ void release_stored() {
    if (!stored) return;
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    barrier_arrive_warp(stored);
    stored = 0;
  }

  // Leaves out a column block that only rows of other consumers see. A consumer that waits for all that comes,
  // with rows or without, cannot mistake a phase for the last but one. And all take as many turns: one for each
  // block but a consumer's first.
  __device__ void skip(bool turn) {
    if (turn) turns.wait(), turns.pass();
    const Stage k = buffers.k(ring.stage), v = buffers.v(ring.stage);
    barrier_wait(k.full, ring.phase);
    barrier_arrive_warp(k.empty);
    barrier_wait(v.full, ring.phase);
    next_tile.hear(buffers.next_tile(ring.stage));  // which holds if this is the tile's last
    barrier_arrive_warp(v.empty);
    ring.advance(), visited++;
  }

  // The column blocks that the consumer's own rows see, or the tile's last one if they see nothing; none where
  // it has no rows: by how many of the tile's are visited before the first and before the end.
  __device__ Range own_blocks() const {
    const Blocks &all = tile.k_blocks;
    if (row >= tile.rows.end) return {all.count, all.count};
    const Blocks own = k_blocks_of<Shape>(sequence_of(a, tile.batch), {row, min(row + 64, tile.rows.end)});
    if (own.count == 0) return {all.count - 1, all.count};
    const int before = all.count - 1 - all.place_of(own.at(0));
    return {before, before + own.count};
  }

  __device__ void start_scores(const BoxOperand<QTile, true> &q_rows, Stage k) {
    const BoxOperand<KTile, true> columns(k.tile);
    if constexpr (Shape::holds_q)
      multiply<Kind, QK_STEPS>(scores[0], q_held, columns, false);
    else
      multiply<Kind, QK_STEPS>(scores[0], q_rows, columns, false);
  }

  __device__ void start_o(Stage v) {
    multiply<Kind, PV_STEPS>(product(), p, BoxOperand<KTile, false>(v.tile), !SCALED);
  }

  // What to multiply products with; read ahead of them.
  __device__ float unscaling(int exponent, const fa_cuda_operand &operand, int block) const {
    const int column = sequence_of(a, tile.batch).first_column + block * Shape::block_k;
    return power_of_two(-exponent - exponent_of<Kind>(operand, tile.batch, kv_head, column));
  }

  __device__ void finish_o(Stage v, float unscale) {
    wgmma_wait<0>(product(), p);
    barrier_arrive_warp(v.empty);
    if constexpr (SCALED) {
#pragma unroll
      for (int n = 0; n < DT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[0][n][i] = fmaf(unscale, product()[n][i], o[0][n][i]);
    }
  }

  // Products become exponentials; true where o is due a rescale_rows.
  __device__ bool make_exponentials(int block, float unscale, int num_columns = Shape::block_k) {
    const int column = block * Shape::block_k;
    make_scores<Kind, false, 1, NT>(scores, a, {row, row + 64}, {column, column + Shape::block_k},
                                    {tile.batch, tile.head, first_row, column}, unscale, num_columns);
    return softmax.update(scores, unit, num_columns);
  }

  // Makes this warp's rows of q ready, where they are not so as the producer brought them.
  __device__ void prepare_q(Stage q) {
    if constexpr (SCALED) {
      if (!a.q.aligned) fetch_rows<QTile>(a, tile, q.tile, warp_row);
      exponent_q = split_rows<Kind, QTile>(q.tile, warp_row);
      named_barrier_wait(SPLIT_BARRIER + consumer, WARPGROUP);
    }
#pragma unroll
    for (int k = 0; k < QK_STEPS && Shape::holds_q; k++)
      load_matrices<false>(q_held[0][k],
                           q.tile + QTile::offset(warp_row + threadIdx.x % 16, k * 2 + threadIdx.x % 32 / 16));
  }

  // Goes through the consumer's own column blocks: the scores of each are computed beside o's product of the
  // one before, whose exponentials are p. Leaves o's last product due; returns what to multiply that with.
  __device__ float go_through_columns(Stage q, int end) {
    const BoxOperand<QTile, true> q_rows(q.tile, consumer * 64);
    int block = tile.k_blocks.at(visited);
    float of_scores = unscaling(exponent_q, a.k, block), of_o = unscaling(P_EXPONENT, a.v, block);
    barrier_wait(buffers.k(ring.stage).full, ring.phase);
    start_scores(q_rows, buffers.k(ring.stage));
    release_stored();
    wgmma_wait<0>(scores[0]);
    barrier_arrive_warp(buffers.k(ring.stage).empty);
    // In the first column block the warp's rows may see no more than the first columns.
    const Range seen = visible_columns(sequence_of(a, tile.batch), {first_row, first_row + 16});
    make_exponentials(block, of_scores, seen.end - block * Shape::block_k);
    convert<Kind>(p, scores, 1 << P_EXPONENT);
    for (visited++; __any_sync(~0u, visited < end); visited++) {
      Ring<Buffers::STAGES> next = ring;
      next.advance();
      const Stage k = buffers.k(next.stage), v = buffers.v(ring.stage);
      block = tile.k_blocks.at(visited);
      of_scores = unscaling(exponent_q, a.k, block);
      const float of_next_o = unscaling(P_EXPONENT, a.v, block);
      barrier_wait(k.full, next.phase);
      turns.wait();
      start_scores(q_rows, k);
      barrier_wait(v.full, ring.phase);
      start_o(v);
      turns.pass();
      wgmma_wait<1>(scores[0]);
      barrier_arrive_warp(k.empty);
      const bool moved = make_exponentials(block, of_scores);
      finish_o(v, of_o);
      if (moved) softmax.rescale_rows(o);
      convert<Kind>(p, scores, 1 << P_EXPONENT);
      ring = next;
      of_o = of_next_o;
    }
    return of_o;
  }

  // Multiplies the last column block, and writes o and lse of the warp's rows.
  __device__ void finish_tile(Stage q, float of_o) {
    const Sequence sequence = sequence_of(a, tile.batch);
    const Stage v = buffers.v(ring.stage);
    const int num_rows = sequence.num_rows() - first_row;
    barrier_wait(v.full, ring.phase);
    start_o(v);
    next_tile.hear(buffers.next_tile(ring.stage));
    float scale[1][2], lse[1][2];
    softmax.finish(scale, lse, a.score, a.sink + tile.head, a.num_sinks, a.num_heads);
    store_lse<1>(lse_at(a, sequence, tile.head, first_row), lse, num_rows);
    finish_o(v, of_o);
    ring.advance();
    if constexpr (SCALED) {
      using Io = typename Kind::Io;
      store_accumulator<Io, 1, DT>(row_of<Io>(a.o, sequence, tile.head, first_row), a.o.stride_row, num_rows,
                                   a.head_dim, o, scale);
    } else {  // by way of q's rows: nobody else reads those of this warp
      put_rows<typename Kind::Element, QTile>(q.tile, warp_row, o[0], scale[0]);
      fence_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        store_boxes<QTile>(maps.out, q.tile, warp_row, sequence.first_row + first_row, tile.head, tile.batch);
        bulk_commit();
      }
      stored = q.empty;
      if (Buffers::Q_STAGES == 1) release_stored();
    }
  }

  __device__ void consume_tile() {
    const Stage q = buffers.q(q_ring.stage);
    row = tile.rows.begin + consumer * 64, first_row = tile.rows.begin + warp_row;
    kv_head = kv_head_of(a, tile.head);
    visited = 0, exponent_q = 0;
    softmax = OnlineSoftmax<Kind, 1>();
    barrier_wait(q.full, q_ring.phase);
    // To the compiler these differ from thread to thread, and with them all state of the loops; but not where a
    // warp votes.
    const Range own = own_blocks();
    const bool has_rows = __any_sync(~0u, own.begin < own.end);
#pragma unroll 1
    for (bool turn = has_rows; __any_sync(~0u, visited < own.begin); turn = true) skip(turn);
    if (!has_rows) {
      release_stored();
      barrier_arrive_warp(q.empty);
      return;
    }
    prepare_q(q);
    set_zero<1, DT>(o);
    const float of_o = go_through_columns(q, own.end);
    if constexpr (SCALED) barrier_arrive_warp(q.empty);
    finish_tile(q, of_o);
#pragma unroll 1
    while (__any_sync(~0u, visited < tile.k_blocks.count)) skip(true);
  }

  __device__ void consume() {
    for (tile = next_tile; __any_sync(~0u, tile.head >= 0); tile = next_tile, q_ring.advance()) consume_tile();
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
  }
};

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
    Consumer<Kind, Shape>(a, maps, buffers, warpgroup - 1).consume();
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
          .takes = FA_CUDA_PLAIN_NEEDS,
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
