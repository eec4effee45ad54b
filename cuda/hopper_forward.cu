// The forward pass on Hopper: FlashAttention-3's schedule. A block of threads stays on its multiprocessor and
// takes tiles of block_q rows of one head, one after another. A producer warp copies q, k and v to shared
// memory ahead of the consumers, warpgroups of 64 rows each, which keep o and the softmax's state in registers
// and work on the softmax of one column block while the products of the next run, over the ends of tiles too.
// Where there are bands, a warp of its own, the scout, finds tiles and what they visit, ahead of the producer.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper_forward.cuh"
#include "isolation.cuh"
#include "softmax.cuh"

namespace fa {
namespace hopper {

// ---- the consumers -----------------------------------------------------------------------------------

// Consumers take turns at starting their products, so that the softmax of one meets the products of another.
template <int NUM_CONSUMERS>
struct Turns {
  int consumer, before;
  __device__ Turns(int consumer)
      : consumer(consumer), before(uniform((threadIdx.x / WARPGROUP + NUM_CONSUMERS - 2) % NUM_CONSUMERS + 1)) {
    if (consumer == NUM_CONSUMERS - 1) pass();  // the first turn is consumer 0's
  }
  // A barrier has the number of who passes the turn, as the next one waits for that. Which one to wait at is
  // known beforehand where there are three: ptxas would work it out of `consumer` at each wait, and these few
  // cycles are 4 % of the speed.
  __device__ void wait() const {
    named_barrier_wait(NUM_CONSUMERS > 2 ? before : 1 + (consumer + 1) % 2, 2 * WARPGROUP);
  }
  __device__ void pass() const { named_barrier_arrive(1 + consumer, 2 * WARPGROUP); }
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
template <class Kind, class Shape, bool GENERAL, Mending MENDING>
struct Consumer {
  using Buffers = ForwardBuffers<Kind, Shape, GENERAL>;
  using Stage = typename Buffers::Stage;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  static constexpr bool SCALED = Kind::SCALED;
  static constexpr bool STORES_ITSELF = SCALED || Shape::in_parts;  // or o goes by way of q's rows
  static constexpr int NT = Shape::block_k / 8, DT = Shape::head_dim / 8;
  static constexpr int QK_STEPS = Shape::head_dim / 16, PV_STEPS = Shape::block_k / 16;
  // In eights of columns, what is multiplied at once where products go to registers of their own: at 256 these
  // do not suffice for all.
  static constexpr int FRESH_DT = DT > 16 ? 8 : DT;
  static constexpr int P_EXPONENT = SCALED ? SCALED_EXPONENT - MAX_LAG : 0;
  static constexpr int SPLIT_BARRIER = 1 + Shape::num_consumers,
                       CLEAR_BARRIER = SPLIT_BARRIER + Shape::num_consumers;
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
  float o[1][DT][4], fresh[1][FRESH_DT][4], scores[1][NT][4];
  uint32_t p[Kind::PARTS][PV_STEPS][4], q_held[1][QK_STEPS][4];
  using Softmax = OnlineSoftmax<Kind, 1, Shape::tiles_cells>;
  Softmax softmax;
  // Of the visit whose product is due: whether v has columns that its band does not have.
  bool lacks_columns = false;
  // Of the tile, without bands: where a column block may begin that all of the consumer's rows see whole.
  int first_whole, last_whole;
  fa_words row_words[1];      // of dropout: those of the lane's rows
  LaneFlags<NT> lane_flags;   // of the visit whose scores are due
  CellsOnTheirWay<NT> cells;  // of the same
  float slope;                // of the tile's head

  __device__ Consumer(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                      int consumer, bool trims)
      : a(a),
        maps(maps),
        buffers(buffers),
        consumer(consumer),
        turns(consumer),
        unit(exponent_of_unit<Kind>(a.score)),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        next_tile(GENERAL ? ForwardTile() : tile_of<Shape>(a, blockIdx.x, trims)) {}

  __device__ void release_stored() {
    if (!stored) return;
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    barrier_arrive_warp(stored);
    stored = 0;
  }

  // When v of the tile's last column block has come.
  __device__ void hear_next_tile() {
    Ring<Buffers::STAGES> next = ring;
    next.advance();
    next_tile.hear(GENERAL ? buffers.visit(next).tile() : buffers.next_tile(ring.stage));
  }

  // Leaves out a column block that only rows of other consumers see. A consumer that waits for all that comes,
  // with rows or without, cannot mistake a phase for the last but one. And all take as many turns: one for each
  // block but a consumer's first.
  __device__ void skip(bool turn) {
    if (turn) turns.wait(), turns.pass();
    leave_columns();
    visited++;
  }
  __device__ void leave_columns() {
    const Stage k = buffers.k(ring.stage), v = buffers.v(ring.stage);
    barrier_wait(k.full, ring.phase);
    barrier_arrive_warp(k.empty);
    barrier_wait(v.full, ring.phase);
    hear_next_tile();  // which holds if this is the tile's last
    barrier_arrive_warp(v.empty);
    ring.advance();
  }

  // The column blocks that the consumer's own rows see, or the tile's last one if they see nothing; none where
  // it has no rows: by how many of the tile's are visited before the first and before the end.
  __device__ Range own_blocks() const {
    const Blocks &all = tile.k_blocks;
    if (row >= tile.rows.end) return {all.count, all.count};
    Blocks own = k_blocks_of<Shape>(sequence_of<Shape>(a, tile.batch), {row, min(row + 64, tile.rows.end)});
    if constexpr (Shape::in_parts || Shape::trims_keys)
      own = blocks_within(own, {all.at(all.count - 1), all.last + 1});
    if (own.count == 0) return {all.count - 1, all.count};
    const int before = all.count - 1 - all.place_of(own.at(0));
    return {before, before + own.count};
  }

  // stage: that of k; behind: whether all of its columns lie behind the consumer's rows, for slopes.
  __device__ void start_scores(const BoxOperand<QTile, true> &q_rows, Stage k, [[maybe_unused]] uint32_t stage,
                               [[maybe_unused]] bool behind) {
    const BoxOperand<KTile, true> columns(k.tile);
    auto fold = [&] {
      if constexpr (Shape::folds)
        multiply_one_more<typename Kind::Element>(scores[0], buffers.left_of_terms(behind),
                                                  buffers.terms(stage));
    };
    if constexpr (Shape::holds_q)
      multiply<Kind, QK_STEPS>(scores[0], q_held, columns, false, fold);
    else
      multiply<Kind, QK_STEPS>(scores[0], q_rows, columns, false, fold);
  }

  // first: where SCALED, of the columns that are multiplied at once.
  __device__ void start_o(Stage v, int first = 0) {
    const BoxOperand<KTile, false> columns(v.tile, first * 8);
    if constexpr (SCALED)
      multiply<Kind, PV_STEPS>(fresh[0], p, columns, false);
    else
      multiply<Kind, PV_STEPS>(o[0], p, columns, true);
  }

  // What to multiply products with; read ahead of them, and of columns at a stage of k that is full.
  enum Side { OF_K, OF_V };
  __device__ float unscaling(int exponent, Side side, uint32_t stage, int column) const {
    if constexpr (!SCALED) return 1;
    if constexpr (Shape::beside)
      return power_of_two(-exponent - int(load_shared_word(buffers.exponents(stage) + side * 4)));
    column += sequence_of(a, tile.batch).first_column;
    return power_of_two(-exponent - exponent_of<Kind>(side == OF_K ? a.k : a.v, tile.batch, kv_head, column));
  }

  __device__ void finish_o(Stage v, float unscale) {
    if constexpr (SCALED) {
#pragma unroll
      for (int first = 0; first < DT; first += FRESH_DT) {
        if (first > 0) start_o(v, first);
        wgmma_wait<0>(fresh[0], p);
        if (first + FRESH_DT == DT) barrier_arrive_warp(v.empty);
#pragma unroll
        for (int n = 0; n < FRESH_DT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) o[0][first + n][i] = fmaf(unscale, fresh[0][n][i], o[0][first + n][i]);
      }
    } else {
      wgmma_wait<0>(o[0], p);
      barrier_arrive_warp(v.empty);
    }
  }

  // The same beside exponentials that the softmax has added up.
  __device__ void finish_o_beside(Stage v, float unscale) {
    if constexpr (Shape::waits_late) wait_no_sooner(softmax.sum[0][0] + softmax.sum[0][1]);
    finish_o(v, unscale);
  }

  // Where nothing is known, a copy of a.score: by way of known_score ptxas would order it otherwise.
  __device__ fa_cuda_score form() const {
    return Shape::forms == ANY_FORM ? a.score : fa_cuda_score(known_score<Shape::forms>(a.score));
  }
  __device__ void make_scores_of(int column, float unscale, int num_columns = Shape::block_k) {
    const Place at = {tile.batch, tile.head, first_row, column};
    if constexpr (Shape::knows_whole) {
      finish_scores<Kind, 1, NT>(scores, form(), unscale);
      if (!is_whole(column))
        mask_scores<false, 1, NT>(scores, sequence_of<Shape>(a, tile.batch).band, at, num_columns);
    } else {
      make_scores<Kind, false, 1, NT>(scores, a, form(), {row, row + 64}, {column, column + Shape::block_k}, at,
                                      unscale, num_columns);
    }
    if constexpr (Shape::has_flags) lane_flags.template hide<4>(scores[0]);
  }
  // What scores are due beside the terms of slopes: see lie_behind.
  using Due = std::conditional_t<Shape::has_slopes, float[1][2], NothingDue>;
  // distance: that of the origin.
  __device__ void finish_slopes([[maybe_unused]] int distance, [[maybe_unused]] int column,
                                [[maybe_unused]] bool behind, [[maybe_unused]] Due &due) {
    if constexpr (Shape::folds_slopes)
      finish_folded_slopes(scores[0], due, slope, distance + first_row - column, behind, a.window.right > 0);
  }
  __device__ void hear_flags([[maybe_unused]] const Ring<Buffers::STAGES> &stage) {
    if constexpr (Shape::has_flags) lane_flags.hear(buffers.bias(stage.stage), warp_row);
  }
  __device__ bool is_behind(int column) const {
    return Shape::folds_slopes && lie_behind(plain_distance(a), rows_of_consumer(tile.rows, row), column);
  }
  // Products become exponentials; true where o is due a rescale_rows.
  __device__ bool make_exponentials(int column, bool behind, float unscale, int num_columns = Shape::block_k) {
    make_scores_of(column, unscale, num_columns);
    [[maybe_unused]] Due due;
    finish_slopes(plain_distance(a), column, behind, due);
    return softmax.update(scores, unit, num_columns, due);
  }

  // A visit's products once more, by the warp alone, where exponentials turned out to be too large.
  __device__ void start_again(Stage q, Stage k, [[maybe_unused]] uint32_t numbers,
                              [[maybe_unused]] bool behind) {
    uint32_t lane = threadIdx.x % 32;
    forget(lane);  // or what follows from it is kept in registers from the kernel's beginning on
    set_zero<1, NT>(scores);
#pragma unroll 1
    for (int step = 0; step < QK_STEPS; step++) {
      uint32_t rows[4];
      load_matrices<false>(rows, q.tile + QTile::offset(warp_row + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        uint32_t columns[4];
        load_matrices<false>(columns,
                             k.tile + KTile::offset(n * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
        mma(typename Kind::Element(), scores[0][n], rows, columns[0], columns[1]);
        mma(typename Kind::Element(), scores[0][n + 1], rows, columns[2], columns[3]);
      }
    }
    if constexpr (Shape::folds) add_terms<typename Kind::Element>(scores[0], numbers, behind);
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

  __device__ void find_whole() {
    const fa_band band = sequence_of<Shape>(a, tile.batch).band;
    first_whole = fa_band_columns(band, {row + 63, row + 64}).begin;
    last_whole = fa_band_columns(band, {row, row + 1}).end - Shape::block_k;
  }
  __device__ bool is_whole(int column) const { return column >= first_whole && column <= last_whole; }
  // How many visits, that of a column and those behind it, are such.
  __device__ int run_from(int column, int end) const {
    return is_whole(column) ? min(end - visited, (column - first_whole) / Shape::block_k + 1) : 0;
  }

  // Goes through the consumer's own column blocks: the scores of each are computed beside o's product of the
  // one before, whose exponentials are p. Leaves o's last product due; returns what to multiply that with.
  __device__ float go_through_columns(Stage q, int end) {
    const BoxOperand<QTile, true> q_rows(q.tile, consumer * 64);
    int column = block_at<Shape>(a, tile, visited) * Shape::block_k;
    find_whole();
    barrier_wait(buffers.k(ring.stage).full, ring.phase);
    float of_scores = unscaling(exponent_q, OF_K, ring.stage, column),
          of_o = unscaling(P_EXPONENT, OF_V, ring.stage, column);
    bool behind = is_behind(column);
    start_scores(q_rows, buffers.k(ring.stage), ring.stage, behind);
    hear_flags(ring);
    release_stored();
    wgmma_wait<0>(scores[0]);
    barrier_arrive_warp(buffers.k(ring.stage).empty);
    // In the first column block the warp's rows may see no more than the first columns.
    const Range seen = visible_columns(sequence_of<Shape>(a, tile.batch), {first_row, first_row + 16});
    make_exponentials(column, behind, of_scores, seen.end - column);
    convert<Kind>(p, scores, 1 << P_EXPONENT);
    for (visited++; !Shape::one_block && __any_sync(~0u, visited < end); visited++) {
      Ring<Buffers::STAGES> next = ring;
      next.advance();
      const Stage k = buffers.k(next.stage), v = buffers.v(ring.stage);
      column = block_at<Shape>(a, tile, visited) * Shape::block_k;
      if constexpr (Shape::finds_runs) {
        const int run = run_from(column, end);
        if (__any_sync(~0u, run > 0)) {
          take_run(run, q_rows, q, of_o);
          visited += run - 1;
          continue;
        }
      }
      behind = is_behind(column);
      barrier_wait(k.full, next.phase);
      of_scores = unscaling(exponent_q, OF_K, next.stage, column);
      const float of_next_o = unscaling(P_EXPONENT, OF_V, next.stage, column);
      turns.wait();
      start_scores(q_rows, k, next.stage, behind);
      barrier_wait(v.full, ring.phase);
      start_o(v);
      turns.pass();
      hear_flags(next);
      wgmma_wait<1>(scores[0]);
      if constexpr (Shape::follows) {
        make_scores_of(column, of_scores);
        [[maybe_unused]] Due due;
        finish_slopes(plain_distance(a), column, behind, due);
        const bool follows = softmax.follow(scores, unit, due);
        finish_o_beside(v, of_o);
        if (__builtin_expect(!follows, 0)) {
          start_again(q, k, buffers.keys(next.stage), behind);
          if (make_exponentials(column, behind, of_scores)) softmax.rescale_rows(o);
        }
        barrier_arrive_warp(k.empty);
      } else {
        barrier_arrive_warp(k.empty);
        const bool moved = make_exponentials(column, behind, of_scores);
        finish_o_beside(v, of_o);
        if (moved) softmax.rescale_rows(o);
      }
      convert<Kind>(p, scores, 1 << P_EXPONENT);
      ring = next;
      of_o = of_next_o;
    }
    return of_o;
  }

  // ---- the same where there are bands

  __device__ bool is_mine(uint32_t flags) const {
    return __any_sync(~0u, flags & ToldVisit::sees_any(consumer));
  }
  __device__ bool sees_all(uint32_t flags) const {
    return __any_sync(~0u, flags & ToldVisit::sees_all(consumer));
  }
  __device__ bool each_sees_some(uint32_t flags) const {
    return __any_sync(~0u, flags & (ToldVisit::sees_all(consumer) | ToldVisit::ALL_SEE_SOME));
  }
  __device__ bool is_last(uint32_t flags) const { return __any_sync(~0u, flags & ToldVisit::LAST); }

  // Whether all columns lie behind the consumer's rows. Slopes make scores rise there from visit to visit, so
  // that exponentials against the reference as it is would not do.
  __device__ bool is_told_behind(uint32_t flags) const {
    return Shape::folds_slopes && __any_sync(~0u, flags & ToldVisit::behind(consumer));
  }
  __device__ void finish_slopes(uint32_t flags, [[maybe_unused]] const ToldVisit &visit, Due &due) {
    if constexpr (Shape::folds_slopes)
      finish_slopes(visit.distance(), visit.column(), is_told_behind(flags), due);
  }

  // Whether a consumer that has rows takes visits, too, that only others see: of f32 at 256 ptxas keeps o in
  // memory where there is a second place that finishes products, behind a consumer's own visits.
  static constexpr bool TAKES_ALL = SCALED && Shape::head_dim > 128;
  __device__ bool takes(uint32_t flags) const {
    if constexpr (TAKES_ALL) return __any_sync(~0u, row < tile.rows.end && flags & ToldVisit::any_sees_any());
    return is_mine(flags);
  }

  // The flags of the visit at a stage of k, when that is full.
  __device__ uint32_t next_visit(const Ring<Buffers::STAGES> &at) {
    barrier_wait(buffers.k(at.stage).full, at.phase);
    return buffers.visit(at).flags();
  }

  __device__ float unscaling(int exponent, Side side, uint32_t stage, const ToldVisit &visit) const {
    return unscaling(exponent, side, stage, SCALED && !Shape::beside ? visit.column() : 0);
  }

  // Kernels of a part of a program that dropout is of stand behind those that leave it out, and need not ask.
  __device__ bool drops() const {
    return Shape::drops && (Shape::program != WHOLE_PROGRAM || a.program.dropout_threshold > 0);
  }

  __device__ bool hides(uint32_t flags) const { return __any_sync(~0u, flags & ToldVisit::hides(consumer)); }
  // Reads what a bias or mask has for each score of the visit at a stage of k, which is full.
  __device__ void hear_cells([[maybe_unused]] const Ring<Buffers::STAGES> &stage) {
    hear_flags(stage);
    if constexpr (Shape::reads_ahead)
      cells.load(a, {tile.batch, tile.head, first_row, buffers.visit(stage).column()});
  }
  __device__ void hide_by_flags([[maybe_unused]] uint32_t flags) {
    if constexpr (Shape::has_flags)
      if (hides(flags)) lane_flags.template hide<4>(scores[0]);
  }

  // Adds to a visit's products what the program does; due: see add_slopes.
  __device__ void add_program(uint32_t flags, const ToldVisit &visit, const Ring<Buffers::STAGES> &stage,
                              float (&due)[1][2]) {
    const uint32_t kinds = ToldVisit::kinds(flags), addends = buffers.keys(stage.stage);
    const bool adds = Shape::has_keys && kinds & FA_CUDA_KEYS_ADD;
    const bool slopes = has_slopes<Shape::program>(a.program);
    const float factor = a.program.factor;
    if (slopes)
      add_slopes(scores[0], due, factor, {slope, visit.distance()},
                 {tile.batch, tile.head, first_row, visit.column()}, adds, addends);
    else if (Shape::has_keys && (adds || (factor != 1 && a.program.keys.addends)))
      add_addends(scores[0], factor, addends);
    if (Shape::has_keys && kinds & FA_CUDA_KEYS_HIDE)
      hide_keys(scores[0], a.program.bias.dtype == FA_DTYPE_U8, addends);
    if constexpr (Shape::tiles_cells)
      add_cells<typename Kind::Io, typename Buffers::BiasTile, false>(scores[0], a.program, slopes ? 1 : factor,
                                                                      buffers.bias(stage.stage), warp_row, 0);
    else if (Shape::reads_ahead)
      cells.add(scores[0]);
    else if (Shape::has_cells && reads_cells(a.program))
      add_cells_from_memory(scores[0], a, {tile.batch, tile.head, first_row, visit.column()});
  }

  // Sets columns of v that the band does not have to 0, in the visit whose product is due: garbage times 0 may
  // be NaN. Consumers that share the tile write the same.
  __device__ void clear_lacking() {
    if (__builtin_expect(!__any_sync(~0u, lacks_columns), 1)) return;
    const Stage v = buffers.v(ring.stage);
    const ToldVisit visit = buffers.visit(ring);
    barrier_wait(v.full, ring.phase);
    const Range own = columns_of_band(visit.band(), visit.column(), Shape::block_k);
#pragma unroll
    for (int part = 0; part < Kind::PARTS; part++)
      clear_rows<KTile, WARPGROUP>(v.tile + part * KTile::BYTES, own.begin, own.end, threadIdx.x % WARPGROUP);
    fence_async();
    named_barrier_wait(CLEAR_BARRIER + consumer, WARPGROUP);
  }

  // Products of the visit at a stage of k become exponentials, and that is empty; num_columns_of(band, column)
  // is asked only where rows do not see all.
  template <class NumColumnsOf>
  __device__ bool make_exponentials(uint32_t flags, const Ring<Buffers::STAGES> &stage, float unscale,
                                    NumColumnsOf num_columns_of) {
    const ToldVisit visit = buffers.visit(stage);
    const uint32_t empty = buffers.k(stage.stage).empty;
    int num_columns = Shape::block_k;
    if constexpr (!Shape::program || Shape::folds) barrier_arrive_warp(empty);
    finish_scores<Kind, 1, NT>(scores, form(), unscale);
    [[maybe_unused]] float due[1][2] = {};
    if constexpr (Shape::folds_slopes) finish_slopes(flags, visit, due);
    if constexpr (Shape::program && !Shape::folds) {
      add_program(flags, visit, stage, due);
      barrier_arrive_warp(empty);
    }
    hide_by_flags(flags);
    lacks_columns = false;
    if (!sees_all(flags)) {
      const fa_band band = visit.band();
      const int column = visit.column();
      const Range own = columns_of_band(band, column, Shape::block_k);
      lacks_columns = own.begin > 0 || own.end < Shape::block_k;
      num_columns = num_columns_of(band, column);
      mask_scores<true, 1, NT>(scores, band, {tile.batch, tile.head, first_row, column}, num_columns);
    }
    bool moved;
    if constexpr (Shape::has_slopes)
      moved = softmax.update(scores, unit, num_columns, due);
    else
      moved = softmax.update(scores, unit, num_columns);
    if (drops()) drop<1, NT>(scores, a.program, row_words, SharedWords(buffers.words(stage)));
    return moved;
  }

  // Takes so many visits that all rows see whole, which leaves nothing to ask.
  __device__ void take_run(int run, const BoxOperand<QTile, true> &q_rows, Stage q, float &of_o) {
    if constexpr (GENERAL) clear_lacking();
    lacks_columns = false;
    for (; __any_sync(~0u, run > 0); run--) {
      Ring<Buffers::STAGES> next = ring;
      next.advance();
      const Stage k = buffers.k(next.stage), v = buffers.v(ring.stage);
      barrier_wait(k.full, next.phase);
      turns.wait();
      start_scores(q_rows, k, next.stage, false);
      barrier_wait(v.full, ring.phase);
      start_o(v);
      turns.pass();
      const float of_scores = unscaling(exponent_q, OF_K, next.stage, buffers.visit(next));
      const float of_next_o = unscaling(P_EXPONENT, OF_V, next.stage, buffers.visit(next));
      wgmma_wait<1>(scores[0]);
      if constexpr (Shape::follows) {
        finish_scores<Kind, 1, NT>(scores, form(), of_scores);
        const bool follows = softmax.follow(scores, unit, NothingDue());
        finish_o_beside(v, of_o);
        if (__builtin_expect(!follows, 0)) {
          start_again(q, k, buffers.keys(next.stage), false);
          finish_scores<Kind, 1, NT>(scores, form(), of_scores);
          if (softmax.update(scores, unit, Shape::block_k)) softmax.rescale_rows(o);
        }
        barrier_arrive_warp(k.empty);
      } else {
        barrier_arrive_warp(k.empty);
        finish_scores<Kind, 1, NT>(scores, form(), of_scores);
        const bool moved = softmax.update(scores, unit, Shape::block_k);
        finish_o_beside(v, of_o);
        if (moved) softmax.rescale_rows(o);
      }
      convert<Kind>(p, scores, 1 << P_EXPONENT);
      ring = next;
      of_o = of_next_o;
    }
  }

  // Goes through the tile's visits. Where those of other consumers come between, the product that is due is
  // made first. True where it leaves o's last product due; then of_o is what to multiply that with. What is
  // told of a visit is read while its scores are computed, and the next one's flags with it.
  __device__ inline __attribute__((always_inline)) bool go_through_visits(Stage q, float &of_o) {
    const BoxOperand<QTile, true> q_rows(q.tile, consumer * 64);
    uint32_t told = next_visit(ring), flags = told;
    bool turn = false;     // all take one for each visit but the first
    bool begun = false;    // o is no longer 0
    bool settled = false;  // every row has seen something, so that exponentials may follow
    for (;;) {
#pragma unroll 1
      while (!takes(flags)) {
        release_stored();
        if (turn) turns.wait(), turns.pass();
        turn = true;
        leave_columns();
        if (is_last(told)) return false;
        flags = told = next_visit(ring);
      }
      float of_scores = unscaling(exponent_q, OF_K, ring.stage, buffers.visit(ring));
      of_o = unscaling(P_EXPONENT, OF_V, ring.stage, buffers.visit(ring));
      if (turn) turns.wait();
      start_scores(q_rows, buffers.k(ring.stage), ring.stage, is_told_behind(flags));
      if (turn) turns.pass();
      hear_cells(ring);
      turn = true;
      release_stored();
      wgmma_wait<0>(scores[0]);
      // With a causal band, the warp's rows see no more than the first columns of this block.
      const bool moved = make_exponentials(flags, ring, of_scores, [&](const fa_band &band, int column) {
        return fa_band_columns(band, {first_row, first_row + 16}).end - column;
      });
      if (moved && begun) softmax.rescale_rows(o);
      begun = true;
      if constexpr (Shape::follows) settled |= each_sees_some(flags);
      convert<Kind>(p, scores, 1 << P_EXPONENT);
      for (;;) {
        if (is_last(told)) return true;
        flags = told >> ToldVisit::NEXT;
        if (!TAKES_ALL && !is_mine(flags)) break;
        if (Shape::has_runs && (!Shape::follows || settled) && __any_sync(~0u, ToldVisit::run(told) > 0)) {
          take_run(ToldVisit::run(told), q_rows, q, of_o);
          told = buffers.visit(ring).flags();
          continue;
        }
        Ring<Buffers::STAGES> next = ring;
        next.advance();
        const Stage k = buffers.k(next.stage), v = buffers.v(ring.stage);
        clear_lacking();
        barrier_wait(k.full, next.phase);
        turns.wait();
        start_scores(q_rows, k, next.stage, is_told_behind(flags));
        barrier_wait(v.full, ring.phase);
        start_o(v);
        turns.pass();
        hear_cells(next);
        told = buffers.visit(next).flags();
        of_scores = unscaling(exponent_q, OF_K, next.stage, buffers.visit(next));
        const float of_next_o = unscaling(P_EXPONENT, OF_V, next.stage, buffers.visit(next));
        wgmma_wait<1>(scores[0]);
        if (!Shape::has_runs && Shape::follows && settled && sees_all(flags) && !is_told_behind(flags)) {
          // As make_exponentials has it, less what that asks: a function for both is 3 % slower.
          [[maybe_unused]] Due due;
          auto make_own_scores = [&] {
            finish_scores<Kind, 1, NT>(scores, form(), of_scores);
            finish_slopes(flags, buffers.visit(next), due);
            [[maybe_unused]] float none[1][2];
            if constexpr (Shape::program && !Shape::folds) add_program(flags, buffers.visit(next), next, none);
            hide_by_flags(flags);
          };
          make_own_scores();
          lacks_columns = false;
          const bool follows = softmax.follow(scores, unit, due);
          finish_o_beside(v, of_o);
          if (__builtin_expect(!follows, 0)) {
            start_again(q, k, buffers.keys(next.stage), false);
            make_own_scores();
            if (softmax.update(scores, unit, Shape::block_k, due)) softmax.rescale_rows(o);
          }
          barrier_arrive_warp(k.empty);
          if (drops()) drop<1, NT>(scores, a.program, row_words, SharedWords(buffers.words(next)));
        } else {
          const bool moved = make_exponentials(flags, next, of_scores,
                                               [](const fa_band &, int) { return int(Shape::block_k); });
          finish_o_beside(v, of_o);
          if (moved) softmax.rescale_rows(o);
          if constexpr (Shape::follows) settled |= each_sees_some(flags);
        }
        convert<Kind>(p, scores, 1 << P_EXPONENT);
        ring = next;
        of_o = of_next_o;
      }
      if constexpr (!TAKES_ALL) {
        const Stage v = buffers.v(ring.stage);
        clear_lacking();
        barrier_wait(v.full, ring.phase);
        start_o(v);
        finish_o(v, of_o);
        ring.advance();
        told = next_visit(ring);  // of a visit that other consumers take
      }
    }
  }

  // ---- the end of a tile

  // The tile's sequence as o and lse have it: the batches of a part follow those of the part before.
  __device__ Sequence sequence_out() const {
    Sequence sequence = sequence_of(a, tile.batch);
    if constexpr (Shape::in_parts) sequence.batch += part_of_block(a, tile.k_blocks.last) * a.batch;
    return sequence;
  }

  // What to multiply o with; writes lse of the warp's rows.
  __device__ void finish_softmax(float (&scale)[1][2]) {
    const Sequence sequence = sequence_out();
    float lse[1][2];
    softmax.finish(scale, lse, a.score, a.sink + tile.head, a.num_sinks, a.num_heads);
    if constexpr (Shape::program) multiply_kept<1>(scale, a.program);
    store_lse<1>(lse_at(a, sequence, tile.head, first_row), lse, sequence.num_rows() - first_row);
  }

  // Multiplies the last column block, and writes lse.
  __device__ void finish_columns(float (&scale)[1][2], float of_o) {
    const Stage v = buffers.v(ring.stage);
    if constexpr (GENERAL) clear_lacking();
    barrier_wait(v.full, ring.phase);
    start_o(v);
    hear_next_tile();
    finish_softmax(scale);
    finish_o(v, of_o);
    ring.advance();
  }

  using Out = std::conditional_t<Shape::in_parts, float, typename Kind::Io>;

  // Writes o of the warp's rows.
  __device__ void store_o(Stage q, const float (&scale)[1][2]) {
    const Sequence sequence = sequence_out();
    const bool is_nan = a.suspect && __any_sync(~0u, isnan(sum_of_products(o)));
    if (MENDING == BEHIND && is_nan) note_suspect(a);
    if (MENDING == AT_END && is_nan) note_rows();
    if constexpr (STORES_ITSELF) {
      store_accumulator<Out, 1, DT>(row_of<Out>(a.o, sequence, tile.head, first_row), a.o.stride_row,
                                    sequence.num_rows() - first_row, a.head_dim, o, scale);
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
    if (MENDING == IN_PLACE && __builtin_expect(is_nan, 0)) mend_o();
  }

  // Notes that the warp is to mend its rows when it has taken its last tile.
  __device__ void note_rows() const {
    a.notes[sixteen_rows_at(a, tile.batch, tile.head, first_row)] = own_note(a);
    store_shared(buffers.noted(), uint32_t(1));
  }
  __device__ void mend_noted() const {
    if (!__any_sync(~0u, load_shared_word(buffers.noted()) != 0)) return;
    if (!STORES_ITSELF && threadIdx.x % 32 == 0) bulk_wait_done<0>();
    __syncwarp();
    mend_noted_rows<Kind, Out, Shape::head_dim, Shape::folds>(a);
  }

  // See isolation.cuh.
  __device__ void mend_o() const {
    if (!STORES_ITSELF && threadIdx.x % 32 == 0) bulk_wait_done<0>();
    __syncwarp();
    const Sequence sequence = sequence_out();
    Range columns = {0, sequence.num_columns()};
    if constexpr (Shape::in_parts) {
      const Range part = blocks_of_part(a, part_of_block(a, tile.k_blocks.last));
      columns = {part.begin * Shape::block_k, min(part.end * Shape::block_k, columns.end)};
    }
    mend_rows<Kind, Out, Shape::head_dim, Shape::folds>(
        a, {tile.batch, sequence.batch, tile.head, {first_row, first_row + 16}, columns});
  }

  __device__ void begin_tile(Stage q) {
    row = tile.rows.begin + consumer * 64, first_row = tile.rows.begin + warp_row;
    kv_head = kv_head_of(a, tile.head);
    visited = 0, exponent_q = 0;
    softmax = Softmax();
    if constexpr (Shape::folds_slopes)
      slope = slope_of_head(a, tile.batch, tile.head) / a.score.factor;
    else if constexpr (Shape::has_slopes)
      slope = number_of_head(a.program, FA_CUDA_ALIBI_SLOPES, {tile.batch, tile.head, 0, 0}, 0);
    if (drops()) row_words[0] = lanes_row(a.program, tile.batch, tile.head, first_row);
    barrier_wait(q.full, q_ring.phase);
  }

  __device__ void leave_rows(Stage q) {
    release_stored();
    barrier_arrive_warp(q.empty);
  }

  __device__ void consume_tile() {
    const Stage q = buffers.q(q_ring.stage);
    begin_tile(q);
    // To the compiler these differ from thread to thread, and with them all state of the loops; but not where a
    // warp votes.
    const Range own = own_blocks();
    const bool has_rows = __any_sync(~0u, own.begin < own.end);
#pragma unroll 1
    for (bool turn = has_rows; __any_sync(~0u, visited < own.begin); turn = true) skip(turn);
    if (!has_rows) return leave_rows(q);
    prepare_q(q);
    set_zero<1, DT>(o);
    const float of_o = go_through_columns(q, own.end);
    if constexpr (STORES_ITSELF) barrier_arrive_warp(q.empty);
    float scale[1][2];
    finish_columns(scale, of_o);
    store_o(q, scale);
#pragma unroll 1
    while (__any_sync(~0u, visited < tile.k_blocks.count)) skip(true);
  }

  __device__ inline __attribute__((always_inline)) void consume_tile_with_bands() {
    const Stage q = buffers.q(q_ring.stage);
    begin_tile(q);
    prepare_q(q);
    set_zero<1, DT>(o);
    float of_o, scale[1][2];
    const bool due = go_through_visits(q, of_o);
    release_stored();
    const bool has_rows = __any_sync(~0u, row < tile.rows.end);
    if (!has_rows) return leave_rows(q);
    if constexpr (SCALED) barrier_arrive_warp(q.empty);
    if (due)
      finish_columns(scale, of_o);
    else
      finish_softmax(scale);
    store_o(q, scale);
  }

  __device__ inline __attribute__((always_inline)) void consume() {
    if constexpr (GENERAL) {
      barrier_wait(buffers.told(0), 0);
      next_tile.hear(buffers.visit(ring).tile());
    }
    for (tile = next_tile; __any_sync(~0u, tile.head >= 0); tile = next_tile, q_ring.advance())
      if constexpr (GENERAL)
        consume_tile_with_bands();
      else
        consume_tile();
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    if constexpr (MENDING == AT_END) mend_noted();
  }
};

// ---- copies of f32 ---------------------------------------------------------------------------------------

// Copies k and v beside a forward, in the order in which it begins heads, see persistent_row_block_of, and goes
// through their columns.
template <int LANES>
__global__ void __launch_bounds__(FA_CUDA_BESIDE_THREADS, 1)
    copy_beside(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_splits splits) {
  using Team = SplitTeam<LANES>;
  Team team;
  let_dependents_start();
  const int num_scales = a.k.num_scales, all_heads = a.batch * a.num_kv_heads,
            at_once = max(a.heads_at_once / heads_per_kv(a), 1);
#pragma unroll 1
  for (int left = all_heads * num_scales - 1 - place_of_team(team); left >= 0; left -= num_teams<Team>()) {
    const int first = left / (at_once * num_scales) * at_once, num_heads = min(at_once, all_heads - first),
              place = left - first * num_scales, head = first + place % num_heads;
    copy_columns(team, a, splits, splits.tensors[0], splits.tensors[1],
                 {head / a.num_kv_heads, head % a.num_kv_heads, place / num_heads * FA_CUDA_SCALE_ROWS});
  }
}

// ---- kernels ---------------------------------------------------------------------------------------------

// Where another kernel is in front of it: that of plans or of terms, or the one that splits f32.
template <class Kind, class Shape, bool GENERAL>
constexpr bool begins_early = GENERAL || Kind::SCALED || Shape::folds;

// Barriers and what else warps find in shared memory, by all threads.
template <class Kind, class Shape, bool GENERAL>
__device__ __forceinline__ ForwardBuffers<Kind, Shape, GENERAL> set_up_forward() {
  FA_DYNAMIC_SHARED(1024, uint8_t, shared);
  const ForwardBuffers<Kind, Shape, GENERAL> buffers = {shared_address(shared)};
  if (threadIdx.x == 0) buffers.init_barriers();
  if constexpr (Shape::folds) buffers.init_terms();
  if constexpr (decltype(buffers)::HAS_ZEROS) init_zero_box(buffers.zero_box());
  __syncthreads();
  return buffers;
}

template <class Kind, class Shape, bool GENERAL, Mending MENDING, class Registers>
__device__ __forceinline__ void run_forward(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                            const ForwardBuffers<Kind, Shape, GENERAL> &buffers) {
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const bool trims = !GENERAL && Shape::trims_keys && all_say(hides_blocks_of_keys(a));
  if (warpgroup == 0) {
    give_registers<Registers::PRODUCER>();
    if (threadIdx.x == 0) {
      Producer<Kind, Shape, GENERAL>{a, maps, buffers, trims}.produce();
      if (has_copies_beside<Shape>(a)) wait_for_launch_before();
    }
    if constexpr (GENERAL) {
      if (threadIdx.x / 32 == 1) Scout<Kind, Shape>{a, buffers}.scout();
      if (threadIdx.x / 32 == 2 && buffers.leaves_zeros(a)) leave_zeros<Shape>(a, maps, buffers);
    }
  } else {
    take_registers<Registers::CONSUMER>();
    Consumer<Kind, Shape, GENERAL, MENDING>(a, maps, buffers, warpgroup - 1, trims).consume();
  }
}

template <class Kind, class Shape, bool GENERAL, Mending MENDING>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    forward(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  const auto buffers = set_up_forward<Kind, Shape, GENERAL>();
  if (begins_early<Kind, Shape, GENERAL> && !has_copies_beside<Shape>(a)) wait_for_launch_before();
  run_forward<Kind, Shape, GENERAL, MENDING, ForwardRegisters<Shape, GENERAL>>(a, maps, buffers);
}

// Several in one: where masks turn out to hide nothing, or to be causal, what a plain kernel of shape Bare
// does, but causal ones beside a program. Its warps have the registers of the other's, as ptxas can do nothing
// with more numbers.
template <class Kind, class Shape, class Bare>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    forward_that_asks(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  static_assert(Shape::block_q == Bare::block_q && Shape::block_k == Bare::block_k, "they share maps");
  using Registers = ForwardRegisters<Shape, true>;
  const auto buffers = set_up_forward<Kind, Shape, true>();
  wait_for_launch_before();
  if (all_say(hides_nothing(a)))
    return run_forward<Kind, Bare, false, Bare::mending, Registers>(a, maps,
                                                                    set_up_forward<Kind, Bare, false>());
  using Causal = typename Bare::AsCausal;
  if constexpr (!Bare::whole_program)
    if (all_say(is_causal(a)))
      return run_forward<Kind, Causal, false, Bare::mending, Registers>(a, maps,
                                                                        set_up_forward<Kind, Causal, false>());
  run_forward<Kind, Shape, true, Shape::mending, Registers>(a, maps, buffers);
}

// Plain shapes that are a part of others. The first two, for long and short problems, have rows of their own.
constexpr int LONG_128 = HOLDS_Q | FOLLOWS | WAITS_LATE | FINDS_RUNS, SHORT_128 = FOLLOWS | WAITS_LATE;
using LongBare = ForwardShape<128, 128, 2, 2, 240, 24, LONG_128>;
using ShortBare = ForwardShape<128, 128, 2, 2, 240, 24, SHORT_128>;
using BareFlags = ForwardShape<128, 128, 2, 2, 240, 24, 0, FLAGS>;

template <class Kind, class Shape, bool GENERAL, class Bare = void>
constexpr fa_cuda_kernel row(const char *name, int least_columns = 0, int64_t least_scores = 0) {
  constexpr Mending MENDING = Shape::mending;
  // Of plain problems without a mask, which hide nothing: what mends is 1 % of short ones' time.
  constexpr Mending OF_MAIN = MENDING == AT_END && !GENERAL && !Shape::whole_program ? BEHIND : MENDING;
  fa_cuda_kernel row = {
      .name = name,
      .bucket = Shape::head_dim,
      .block_q = Shape::block_q,
      .block_k = Shape::block_k,
      .num_threads = Shape::num_threads,
      .shared_bytes = ForwardBuffers<Kind, Shape, GENERAL>::BYTES,
      .least_columns = least_columns,
      .least_rows = Shape::one_block ? 2048 : 0,
      .least_scores = least_scores,
      .takes = takes_of_forms(GENERAL, Shape::forms) | takes_of_program(Shape::whole_program, true, GENERAL),
      .mapped = true,
      .persistent = true,
      .begins_early = begins_early<Kind, Shape, GENERAL>,
      .single_column = Shape::one_block,
      .leaves_notes = MENDING == AT_END,
      .folds = Shape::folds,
      .skips_hidden_keys = !GENERAL && Shape::trims_keys,
      .in_parts = Shape::in_parts};
  if constexpr (Shape::beside)
    row.beside = address_of_kernel(copy_beside<FA_CUDA_STATISTICS_LANES(Shape::head_dim)>);
  if constexpr (std::is_void<Bare>::value) {
    row.main = address_of_kernel(forward<Kind, Shape, GENERAL, OF_MAIN>);
    if constexpr (MENDING != BEHIND)
      row.main_that_mends = address_of_kernel(forward<Kind, Shape, GENERAL, MENDING>);
  } else {
    static_assert(GENERAL && MENDING != BEHIND && Bare::mending == IN_PLACE,
                  "both mend, and leave no other notes");
    static_assert(ForwardBuffers<Kind, Bare, false>::BYTES <= ForwardBuffers<Kind, Shape, GENERAL>::BYTES,
                  "room");
    row.asks = true;
    row.main = row.main_that_mends = address_of_kernel(forward_that_asks<Kind, Shape, Bare>);
  }
  return row;
}

}  // namespace hopper
}  // namespace fa

// Kernels for plain problems, and general ones that take bands; some for parts of keys; and some that take
// programs too, whose consumers need registers for what is added.
#define KERNEL(general, ...)    fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::ForwardShape<__VA_ARGS__>, general>
#define NAME(rest)              "cuda/sm90/" FA_QUOTE(FA_KIND) rest
#define ROW(rest, general, ...) KERNEL(general, __VA_ARGS__)(NAME(rest))
// Only for problems that are so long, and take so long, see fa_cuda_kernel. Some kernels that take bands are
// for problems without them, too, for which the kernel of plans before it does not matter then: at 64, and of
// f32's two parts at 256, their loop spills less than that of the other one.
#define ROW_FROM(rest, least_columns, least_scores, general, ...) \
  KERNEL(general, __VA_ARGS__)(NAME(rest), least_columns, least_scores)

// Of a general kernel with a plain shape's code for masks that hide nothing, or are causal.
#define ROW_THAT_ASKS(rest, least_columns, bare, ...)                                                 \
  fa::hopper::row<fa::kinds::FA_KIND, fa::hopper::ForwardShape<__VA_ARGS__>, true, fa::hopper::bare>( \
      NAME(rest), least_columns)

// Registers a consumer's thread needs for its arrays: (block_k * 1.5 + head_dim) / 2, and block_k + head_dim of
// f32 in two parts (at 256 3/4 of head_dim). Three consumers at 64, which use each column block for 192 rows;
// from 192 on, and of f32, column blocks are what fits beside q. At 128 there is room for q too, head_dim / 4:
// of what the products read from shared memory, a fifth; or, where one column block is all, for a third
// consumer, as o comes when scores have gone. That is faster where rows are many (cuda_log.md, "One column
// block").
using namespace fa::hopper;
const fa_cuda_kernel FA_JOIN(fa_hopper_forward_, FA_KIND)[] = {
// bucket, block_k, consumers, stages of q, their registers, the producer's, traits, program
#if FA_KIND_SCALED
    ROW("/d64", false, 64, 128, 2, 2, 240, 24, BESIDE),
    ROW("/d64/forms", false, 64, 128, 2, 2, 240, 24, FORMS | BESIDE),
    ROW("/d64/general", true, 64, 128, 2, 2, 240, 24, FORMS | BESIDE),
    ROW("/d64/terms", true, 64, 128, 2, 2, 240, 24, FORMS, SLOPES | KEYS),
    ROW("/d64/flags", true, 64, 128, 2, 2, 240, 24, FORMS, FLAGS),
    ROW("/d64/cells", true, 64, FA_KIND_PARTS == 2 ? 64 : 128, 2, 2, 240, 24, FORMS, CELLS),
    ROW("/d64/dropout", true, 64, 128, 2, 2, 240, 24, FORMS, KEYS | DROPOUT),
    ROW("/d64/program", true, 64, 128, 2, 2, 240, 24, FORMS, WHOLE_PROGRAM),
    ROW("/d128", false, 128, 64, 2, 1, 240, 24, FORMS),
    ROW("/d128/general", true, 128, 64, 2, 1, 240, 24, FORMS | BESIDE),
    ROW("/d128/terms", true, 128, 64, 2, 1, 240, 24, FORMS, SLOPES | KEYS),
    ROW("/d128/flags", true, 128, 64, 2, 1, 240, 24, FORMS, FLAGS),
    ROW("/d128/cells", true, 128, FA_KIND_PARTS == 2 ? 32 : 64, 2, 1, 240, 24, FORMS, CELLS),
    ROW("/d128/dropout", true, 128, 64, 2, 1, 240, 24, FORMS, KEYS | DROPOUT),
    ROW("/d128/program", true, 128, 64, 2, 1, 240, 24, FORMS, WHOLE_PROGRAM),
#if FA_KIND_PARTS == 2
    ROW_FROM("/d256/long/general", 128, 1 << 22, true, 256, 32, 2, 1, 240, 24, FORMS),
#endif
    ROW("/d256", false, 256, 32, 2, 1, 240, 24, FORMS),
    ROW("/d256/general", true, 256, 32, 2, 1, 240, 24, FORMS),
    ROW("/d256/terms", true, 256, 32, 2, 1, 240, 24, FORMS, SLOPES | KEYS),
    ROW("/d256/program", true, 256, 32, 2, 1, 240, 24, FORMS, WHOLE_PROGRAM),
#else
    ROW("/d64/parts", false, 64, 128, 2, 2, 216, 72, FORMS | IN_PARTS),
    ROW("/d128/parts", false, 128, 128, 2, 2, 240, 24, FORMS | HOLDS_Q | IN_PARTS),
    ROW_FROM("/d64/long/general", 2048, 1 << 28, true, 64, 128, 3, 2, 160, 32, FORMS | FOLLOWS | MENDS_AT_END),
    ROW("/d64", false, 64, 128, 3, 2, 160, 32, MENDS_AT_END),
    ROW("/d64/forms", false, 64, 128, 3, 2, 160, 32, FORMS | MENDS_AT_END),
    ROW_FROM("/d64/long/general", 1024, 0, true, 64, 128, 3, 2, 160, 32, FORMS | FOLLOWS | MENDS_AT_END),
    ROW("/d64/general", true, 64, 128, 3, 2, 160, 32, MENDS_AT_END),
    ROW("/d64/general/forms", true, 64, 128, 3, 2, 160, 32, FORMS | MENDS_AT_END),
    ROW("/d64/keys", false, 64, 128, 3, 2, 160, 32, FOLLOWS | MENDS_BEHIND, KEYS),
    ROW("/d64/keys/general", true, 64, 128, 3, 2, 160, 32, FORMS | FOLLOWS | MENDS_AT_END, KEYS),
    ROW("/d64/slopes", false, 64, 128, 3, 2, 160, 32, FOLLOWS | MENDS_BEHIND, SLOPES),
    ROW("/d64/slopes/general", true, 64, 128, 3, 2, 160, 32, FORMS | FOLLOWS | MENDS_AT_END, SLOPES),
    ROW("/d64/terms", true, 64, 128, 3, 2, 160, 32, FORMS | MENDS_AT_END, SLOPES | KEYS),
    ROW("/d64/flags", true, 64, 128, 3, 2, 160, 32, FOLLOWS | MENDS_AT_END, FLAGS),
    ROW("/d64/cells", true, 64, 128, 2, 2, 216, 72, FORMS | HOLDS_Q, CELLS),
    ROW("/d64/dropout", true, 64, 128, 2, 2, 232, 40, FORMS | HOLDS_Q | WAITS_LATE, KEYS | DROPOUT),
    ROW("/d64/program", true, 64, 128, 2, 2, 216, 72, FORMS | MENDS_AT_END, WHOLE_PROGRAM),
    ROW("/d128/single", false, 128, 128, 3, 2, 160, 32, ONE_BLOCK | MENDS_BEHIND),
    ROW_FROM("/d128/long", 1024, 0, false, 128, 128, 2, 2, 240, 24, LONG_128),
    ROW("/d128", false, 128, 128, 2, 2, 232, 40, SHORT_128),
    ROW("/d128/forms", false, 128, 128, 2, 2, 240, 24, FORMS | FOLLOWS | MENDS_AT_END),
    ROW_THAT_ASKS("/d128/long/general", 1024, LongBare, 128, 128, 2, 2, 240, 24,
                  HOLDS_Q | FOLLOWS | WAITS_LATE),
    ROW_THAT_ASKS("/d128/general", 0, ShortBare, 128, 128, 2, 2, 240, 24, FOLLOWS | MENDS_AT_END),
    ROW("/d128/general/forms", true, 128, 128, 2, 2, 240, 24, FORMS | FOLLOWS),
    ROW("/d128/keys", false, 128, 128, 2, 2, 240, 24,
        HOLDS_Q | FOLLOWS | WAITS_LATE | FINDS_RUNS | MENDS_BEHIND, KEYS),
    ROW("/d128/keys/general", true, 128, 128, 2, 2, 240, 24, FORMS | HOLDS_Q | FOLLOWS, KEYS),
    ROW("/d128/slopes", false, 128, 128, 2, 2, 240, 24, HOLDS_Q | FOLLOWS | WAITS_LATE | MENDS_BEHIND, SLOPES),
    ROW("/d128/slopes/general", true, 128, 128, 2, 2, 240, 24, FORMS | HOLDS_Q | FOLLOWS | MENDS_AT_END,
        SLOPES),
    ROW("/d128/terms", true, 128, 128, 2, 2, 240, 24, FORMS, SLOPES | KEYS),
    ROW_THAT_ASKS("/d128/flags", 0, BareFlags, 128, 128, 2, 2, 240, 24, FOLLOWS | MENDS_AT_END, FLAGS),
    ROW("/d128/cells", true, 128, 128, 2, 1, 240, 24, FORMS | MENDS_AT_END, CELLS),
    ROW("/d128/dropout", true, 128, 128, 2, 2, 240, 24, HOLDS_Q | FOLLOWS | MENDS_AT_END, KEYS | DROPOUT),
    ROW("/d128/program", true, 128, 128, 2, 1, 240, 24, FORMS, WHOLE_PROGRAM),
    ROW("/d192", false, 192, 112, 2, 1, 240, 24, 0),
    ROW("/d192/forms", false, 192, 112, 2, 1, 240, 24, FORMS),
    ROW("/d192/general", true, 192, 112, 2, 1, 240, 24, FORMS),
    ROW("/d256", false, 256, 80, 2, 1, 240, 24, FORMS | WAITS_LATE),
    ROW("/d256/general", true, 256, 80, 2, 1, 240, 24, FORMS),
    ROW("/d256/program", true, 256, 64, 2, 1, 240, 24, FORMS, WHOLE_PROGRAM),
#endif
    {},
};
