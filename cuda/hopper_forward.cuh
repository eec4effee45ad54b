// What the warps of Hopper's forward kernels share: the shape of a block of threads, its tiles and visits, and
// its shared memory; and those warps that do not compute: the producer, which copies, the scout, which finds
// what there is to do where there are bands, and who stores what rows that see nothing get.
#pragma once

#include "hopper_beside.cuh"
#include "hopper_cells.cuh"

namespace fa {
namespace hopper {

// What a kernel has code for, or does.
// FORMS: takes scores of any form; without that code those with bands or slopes are 1 to 3 % faster, but at 64
// where exponentials follow 1 to 2 % slower.
// HOLDS_Q: a consumer's rows of q are in its registers.
// FOLLOWS: exponentials are made against the last reference, and once more where that turns out to be too low.
// At 64 it is no gain where problems are short, so that there are rows with it and without.
// WAITS_LATE: o's product is waited for behind the exponentials that are made beside it, not before: 1 or 2 %
// in some kernels, and a loss of 1 to 8 % in others. IN_PARTS: a tile is a part of the column blocks of its
// rows, whose o and lse are to be merged with others'. FINDS_RUNS: column blocks that all of a consumer's rows
// see whole are a loop of their own, which asks nothing about them: 2 to 5 % at 128, where exponentials follow.
// MENDS_AT_END, MENDS_BEHIND: who makes again what is NaN beside hidden cells, see Mending. CAUSAL: for masks
// that turn out to be causal. BESIDE: of f32, k and v may be copied beside the kernel: then consumers are told
// exponents, which is up to 5 % slower in some kernels. ONE_BLOCK: for problems with one column block.
enum ForwardTraits {
  FORMS = 1,
  HOLDS_Q = 2,
  FOLLOWS = 4,
  WAITS_LATE = 8,
  IN_PARTS = 16,
  FINDS_RUNS = 32,
  MENDS_AT_END = 64,
  MENDS_BEHIND = 128,
  CAUSAL = 256,
  BESIDE = 512,
  ONE_BLOCK = 1024
};

// Who makes again what is NaN beside hidden cells, see isolation.cuh: a kernel behind this one, which takes
// 2 us, as f32's does; or the warp that wrote it, at its own end or, without a word, at the end of the tile.
// What is fastest differs by up to 6 %: a call that stands among their loops, or behind them, is in ptxas' way.
enum Mending { BEHIND, IN_PLACE, AT_END };

// A row of the table; none of it changes results by more than rounding. Registers are per thread.
template <int HEAD_DIM, int BLOCK_K, int NUM_CONSUMERS, int Q_STAGES, int CONSUMER_REGISTERS,
          int PRODUCER_REGISTERS, int TRAITS, int PROGRAM = NO_PROGRAM>
struct ForwardShape {
  using AsCausal = ForwardShape<HEAD_DIM, BLOCK_K, NUM_CONSUMERS, Q_STAGES, CONSUMER_REGISTERS,
                                PRODUCER_REGISTERS, TRAITS | CAUSAL, PROGRAM>;
  static constexpr bool holds_q = TRAITS & HOLDS_Q, waits_late = TRAITS & WAITS_LATE,
                        in_parts = TRAITS & IN_PARTS, finds_runs = TRAITS & FINDS_RUNS,
                        is_causal = TRAITS & CAUSAL, beside = TRAITS & BESIDE, one_block = TRAITS & ONE_BLOCK;
  static constexpr Mending mending = FA_KIND_SCALED || TRAITS & MENDS_BEHIND ? BEHIND
                                     : TRAITS & MENDS_AT_END                 ? AT_END
                                                                             : IN_PLACE;
  static constexpr int head_dim = HEAD_DIM, block_k = BLOCK_K, num_consumers = NUM_CONSUMERS,
                       q_stages = Q_STAGES;
  static constexpr int block_q = NUM_CONSUMERS * 64, num_threads = (NUM_CONSUMERS + 1) * WARPGROUP;
  static constexpr int consumer_registers = CONSUMER_REGISTERS, producer_registers = PRODUCER_REGISTERS;
  static constexpr bool follows = TRAITS & FOLLOWS || (PROGRAM == CELLS && !FA_KIND_SCALED);
  // What may act on scores; then GENERAL, but for what is folded. And what of it changes those that are shown.
  static constexpr int whole_program = PROGRAM, program = acting_program(PROGRAM);
  // Whether a consumer works out once a tile which columns all of its rows see whole. It has its price in
  // registers: f32 is 1 to 2 % slower with it at 128, where others are 1 % faster.
  static constexpr bool knows_whole = HEAD_DIM != 128 || sizeof(typename kinds::FA_KIND::Io) == 2;
  static constexpr bool folds = folds_terms(PROGRAM);
  static constexpr Forms forms = !(TRAITS & FORMS) ? USUAL_FORM : folds ? NO_SOFTCAP : ANY_FORM;
  static constexpr bool has_slopes = PROGRAM & SLOPES, has_keys = PROGRAM & KEYS, has_cells = PROGRAM & CELLS,
                        drops = PROGRAM & DROPOUT, has_flags = PROGRAM & FLAGS,
                        tiles_cells = hopper::tiles_cells(PROGRAM), folds_slopes = folds && has_slopes;
  // Whether a tile without bands leaves out the column blocks that keys hide at its ends.
  static constexpr bool trims_keys = folds && has_keys;
  // Whether consumers are told how many visits follow that all rows see whole, and ask nothing about these.
  // With keys at 64 and with flags that is 2 to 15 % slower, and where problems at 64 are short up to 4 %; and
  // of f32's two parts at 256 ptxas would keep more of o in memory.
  static constexpr bool has_runs = PROGRAM          ? folds && !has_slopes && HEAD_DIM >= 128
                                   : FA_KIND_SCALED ? !(FA_KIND_PARTS == 2 && HEAD_DIM == 256)
                                                    : HEAD_DIM >= 128 || follows;
  static_assert(!finds_runs || !PROGRAM || (folds && !has_slopes), "runs leave nothing to do with scores");
  // Whether a bias is read from memory while the products run that it is added to, where registers suffice.
  static constexpr bool reads_ahead = PROGRAM == CELLS && !tiles_cells;
};

// Of the registers that a block of threads begins with, the same number for each thread, more than the row says
// go to the producer and the scout, if two consumers can spare them.
template <class Shape, bool GENERAL>
struct ForwardRegisters {
  static constexpr int SPARED = GENERAL && Shape::num_consumers == 2 ? 8 : 0;
  static constexpr int CONSUMER = Shape::consumer_registers - SPARED;
  static constexpr int PRODUCER = Shape::producer_registers + SPARED * Shape::num_consumers;
  static constexpr int EACH = 65536 / Shape::num_threads / 8 * 8;
  static_assert(CONSUMER * Shape::num_consumers + PRODUCER <= EACH * (Shape::num_consumers + 1),
                "no more than there are, or a consumer waits for them for ever");
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
  __device__ void hear(uint32_t from, uint32_t lanes = ~0u) {
    for_each_word([&](int i, int &word) { word = uniform(load_shared_word(from + i * 4), lanes); });
  }
};

// Those of a tile's rows that a consumer has, whose first one this is.
__device__ inline Range rows_of_consumer(Range rows, int first) { return {first, min(first + 64, rows.end)}; }

// The distance of the origin where there are no bands. That of the whole band gives other instructions.
__device__ inline int plain_distance(const fa_cuda_arguments &a) {
  return a.window.seqlen_k - a.window.seqlen_q;
}

// The column block of a tile that is visited after `i` others, where there are no bands. With slopes the first
// is that beside the tile's last row, and those behind it follow the others: so scores fall, and references
// stay.
template <class Shape>
__device__ inline int block_at(const fa_cuda_arguments &a, const ForwardTile &tile, int i) {
  const Blocks &blocks = tile.k_blocks;
  if constexpr (Shape::folds_slopes) {
    const int beside = (plain_distance(a) + tile.rows.end - 1) / Shape::block_k;
    i += blocks.last - max(blocks.last - blocks.count + 1, min(blocks.last, beside));
    if (i >= blocks.count) i -= blocks.count;
  }
  return blocks.at(i);
}

// The part that a column block is of.
__device__ inline int part_of_block(const fa_cuda_arguments &a, int block) {
  return int((int64_t(block + 1) * a.num_column_parts - 1) / a.num_k_blocks);
}
// Those of the blocks that lie in a range.
__device__ inline Blocks blocks_within(const Blocks &blocks, Range range) {
  const int first = max(blocks.at(blocks.count - 1), range.begin), last = min(blocks.last, range.end - 1);
  return {last, max(last - first + 1, 0)};
}

// The tile that is begun as the index-th, where there are no bands. It takes as long as a product to find: the
// producer does, ahead, and tells the consumers. trims: whether keys hide some of their blocks.
template <class Shape>
__device__ inline ForwardTile tile_of(const fa_cuda_arguments &a, uint32_t index, bool trims) {
  ForwardTile tile;
  RowBlock block;
  const uint32_t num_parts = Shape::in_parts ? a.num_column_parts : 1;
  if (!persistent_row_block_of(a, index / num_parts, block)) return tile;
  const Sequence sequence = sequence_of<Shape>(a, block.batch);
  tile.head = block.head, tile.batch = block.batch;
  tile.rows = row_range<Shape>(sequence, block.q_block);
  tile.k_blocks = k_blocks_of<Shape>(sequence, tile.rows);
  Range part = {0, 1};
  if constexpr (Shape::in_parts) {
    part = blocks_of_part(a, index % num_parts);
    tile.k_blocks = blocks_within(tile.k_blocks, part);
  }
  if constexpr (Shape::trims_keys) {
    static_assert(Shape::block_k == FA_CUDA_KEYS_BLOCK, "a column block is a block of keys");
    tile.k_blocks = ShownKeys(a.program.keys, tile.batch, tile.head, trims).within(tile.k_blocks);
  }
  if (tile.k_blocks.count == 0) tile.k_blocks = {part.begin, 1};
  return tile;
}

// The number of the next tile: taken late, as a block of threads that is free sooner may take it, but not
// without time for the answer.
__device__ inline uint32_t next_index(const fa_cuda_arguments &a, uint32_t index) {
  return a.tickets ? gridDim.x + atomicAdd(a.tickets, 1) : index + gridDim.x;
}

// ---- visits, where there are bands -------------------------------------------------------------------------

// The scout goes through a tile's visits and tells the producer and the consumers what they need of each, in
// shared memory: flags, for each consumer whether its rows see any of the columns and whether they see all of
// them, and the kinds of the keys, or, with runs, how many visits follow that are seen whole; those of the
// next visit, which are wanted as soon as it comes, and whether there is one; where its columns begin; for
// programs, how distances go in the band; where rows do not see all, the band itself; and of a tile's first
// visit the tile.
struct ToldVisit {
  static constexpr int COLUMN_AT = 4, BAND_AT = 8, DISTANCE_AT = 32, TILE_AT = 36,
                       BYTES = TILE_AT + ForwardTile::WORDS * 4;
  static constexpr int NEXT = 16;  // the next visit's flags stand so many bits further on
  static constexpr uint32_t LAST = 1;
  static constexpr int KINDS_AT = 8;
  static constexpr uint32_t SEEN = (1 << KINDS_AT) - 1;
  __device__ static uint32_t kinds(uint32_t flags) { return flags >> KINDS_AT & SEEN; }
  // In the place of kinds where there are runs.
  __device__ static uint32_t run_of(int count) { return min(count, int(SEEN)) << KINDS_AT; }
  __device__ static int run(uint32_t flags) { return kinds(flags); }
  // Beside kinds of keys: whether a mask with a flag a score hides some of what a consumer's rows would see.
  __device__ static constexpr uint32_t hides(int consumer) { return 32 << (KINDS_AT + consumer); }
  // In the place of kinds where slopes are folded: whether all columns lie behind a consumer's rows.
  __device__ static constexpr uint32_t behind(int consumer) { return 1 << (KINDS_AT + consumer); }
  __device__ static constexpr uint32_t sees_any(int consumer) { return 2 << consumer * 2; }
  __device__ static constexpr uint32_t sees_all(int consumer) { return 4 << consumer * 2; }
  __device__ static constexpr uint32_t any_sees_any() { return sees_any(0) | sees_any(1) | sees_any(2); }
  // Whether each of the tile's rows sees some of the columns.
  static constexpr uint32_t ALL_SEE_SOME = 1 << 7;

  uint32_t at;
  __device__ void tell_flags(uint32_t flags) const { store_shared(at, flags); }
  __device__ void tell_column(int column) const { store_shared(at + COLUMN_AT, uint32_t(column)); }
  __device__ void tell_band(const fa_band &band) const {
    const int words[6] = {band.q_begin, band.q_end, band.k_begin, band.k_end, band.left, band.right};
#pragma unroll
    for (int i = 0; i < 6; i++) store_shared(at + BAND_AT + i * 4, uint32_t(words[i]));
  }
  // See distance_of_origin.
  __device__ void tell_distance(const fa_band &band) const {
    store_shared(at + DISTANCE_AT, uint32_t(distance_of_origin(band)));
  }
  __device__ int distance() const { return load_shared_word(at + DISTANCE_AT); }
  __device__ uint32_t tile() const { return at + TILE_AT; }
  __device__ uint32_t flags() const { return uniform(load_shared_word(at)); }
  __device__ int column() const { return uniform(load_shared_word(at + COLUMN_AT)); }
  __device__ fa_band band() const {
    int words[6];
#pragma unroll
    for (int i = 0; i < 6; i++) words[i] = uniform(load_shared_word(at + BAND_AT + i * 4));
    return {words[0], words[1], words[2], words[3], words[4], words[5]};
  }
};

// Tells a tile's visits. Most of them are seen by all rows: that is quickly found out, and then nobody looks at
// the band. The scout, a single thread, has some two thousand cycles for a visit, and spends about ten on an
// instruction.
template <class Shape>
struct Teller {
  const KindsOfKeys keys;
  const KindsOfFlags kinds_of_flags;
  Range whole = {0, 0};  // the columns that all rows of the tile see in a band
  int number = -1;       // of that band
  uint32_t all = 0;      // the flags of a visit that is seen by all consumers that have rows
  uint32_t flags;        // of the visit that is told next
  int run = 0;           // so many visits from that on are known to be seen whole

  template <class Visits>
  __device__ Teller(const fa_cuda_program &program, int batch, int head, Visits &visits)
      : keys(program.keys, batch, head), kinds_of_flags(program.flags, batch, head, visits.own.begin) {
#pragma unroll
    for (int consumer = 0; consumer < Shape::num_consumers; consumer++)
      if (visits.own.begin + consumer * 64 < visits.own.end)
        all |= ToldVisit::sees_any(consumer) | ToldVisit::sees_all(consumer) | ToldVisit::ALL_SEE_SOME;
    flags = next_flags(visits);
  }

  // Tells the visit and goes on to the next; true where there is none: of a tile that sees nothing too, which
  // thus has one visit that nobody takes.
  template <class Visits>
  __device__ bool tell(Visits &visits, const ToldVisit &to) {
    int column = 0;
    if (!visits.done()) {
      column = visits.begin;
      if ((flags & ToldVisit::SEEN) != all) to.tell_band(visits.band);
      if (Shape::has_slopes) to.tell_distance(visits.band);
      visits.advance();
    }
    const uint32_t next = next_flags(visits);
    const bool last = visits.done();
    if constexpr (Shape::has_runs) {
      run = run > 1 ? run - 1 : !last && next == all ? run_from(visits) : 0;
      flags |= ToldVisit::run_of(run);
    }
    to.tell_column(column);
    to.tell_flags(flags | next << ToldVisit::NEXT | (last ? ToldVisit::LAST : 0));
    flags = next;
    return last;
  }

 private:
  // Of the visit or, where all of its keys or scores are hidden, of the next one that sees some: goes on to
  // that.
  template <class Visits>
  __device__ uint32_t next_flags(Visits &visits) {
    uint32_t kinds = 0;
    if constexpr (Shape::has_keys)
      for (; !visits.done(); visits.advance()) {
        kinds = keys.of<Shape::block_k>(visits.begin);
        if (kinds & FA_CUDA_KEYS_SHOW) break;
      }
    if constexpr (Shape::has_flags)
      for (; !visits.done(); visits.advance())
        if (const uint32_t left = masked(flags_of(visits), visits.begin))
          return left | kinds << ToldVisit::KINDS_AT;
    if (visits.done()) return 0;
    if constexpr (Shape::folds_slopes)
#pragma unroll
      for (int consumer = 0; consumer < Shape::num_consumers; consumer++)
        if (lie_behind(distance_of_origin(visits.band),
                       rows_of_consumer(visits.own, visits.own.begin + consumer * 64), visits.begin))
          kinds |= 1 << consumer;
    return flags_of(visits) | (Shape::has_runs ? 0 : kinds << ToldVisit::KINDS_AT);
  }
  // What a mask leaves of the flags of a visit: those of consumers to which it shows something. The others are
  // told that it hides, as they may take the visit all the same.
  __device__ uint32_t masked(uint32_t flags, int column) const {
    uint32_t left = 0, hides = 0;
#pragma unroll
    for (int consumer = 0; consumer < Shape::num_consumers; consumer++) {
      const uint32_t own = flags & (ToldVisit::sees_any(consumer) | ToldVisit::sees_all(consumer)),
                     kinds = own ? kinds_of_flags.of(column / Shape::block_k, consumer) : 0;
      if (kinds & FA_CUDA_KEYS_SHOW) left |= own;
      if (kinds & FA_CUDA_KEYS_HIDE) hides |= ToldVisit::hides(consumer);
    }
    return left ? left | hides | (flags & ToldVisit::ALL_SEE_SOME) : 0;
  }
  // How many visits, this one and those behind it, see whole columns of which some keys are shown.
  template <class Visits>
  __device__ int run_from(const Visits &visits) const {
    const int count = (visits.begin - max(whole.begin, visits.last_begin)) / Shape::block_k + 1;
    if (!Shape::has_keys || !keys.of_blocks) return count;
    int shown = 1;
    while (shown < count && keys.of<Shape::block_k>(visits.begin - shown * Shape::block_k) & FA_CUDA_KEYS_SHOW)
      shown++;
    return shown;
  }
  template <class Visits>
  __device__ uint32_t flags_of(const Visits &visits) {
    const fa_band &band = visits.band;
    const Range &rows = visits.own;
    if (visits.number != number) {
      number = visits.number;
      whole = {max(band.k_begin, fa_band_columns(band, {rows.end - 1, rows.end}).begin),
               fa_band_columns(band, {rows.begin, rows.begin + 1}).end};
      if (rows.begin < band.q_begin || rows.end > band.q_end) whole.end = 0;
    }
    const Range columns = {visits.begin, visits.begin + Shape::block_k};
    if (columns.begin >= whole.begin && columns.end <= whole.end) return all;
    // The last row sees no columns before `whole`, the first one none behind it.
    uint32_t some = columns.begin < whole.end && columns.end > whole.begin ? ToldVisit::ALL_SEE_SOME : 0;
#pragma unroll 1
    for (int consumer = 0; consumer < Shape::num_consumers; consumer++) {
      const Range own = rows_of_consumer(rows, rows.begin + consumer * 64);
      const Range seen = overlap(seen_in_band<true>(band, own), columns);
      if (seen.begin >= seen.end) continue;
      some |= ToldVisit::sees_any(consumer);
      if (own.begin >= band.q_begin && own.end <= band.q_end && columns.begin >= band.k_begin &&
          fa_band_sees_all(band, own, columns))
        some |= ToldVisit::sees_all(consumer);
    }
    return some;
  }
};

// Shared memory: the stages of q, of k and of v, whose tile is one for all where q leaves no more room, then a
// barrier for each stage being full and one for its being empty, and the exponents of k and v; without bands,
// for each stage of v, where that is a tile's last, which tile comes next; with bands visits, with a barrier
// for each being told and one for its being read, a box of 0, and the order of batches. Of visits there are
// twice as many as stages: that of a stage of k may still be read when the next comes there.
template <class Kind, class Shape, bool GENERAL>
struct ForwardBuffers {
  static constexpr int Q_STAGES = Shape::q_stages, STAGES = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  // q comes as the caller gave it; consumers split f32 in place.
  using QBoxes = BoxTile<Shape::block_q, Shape::head_dim * sizeof(typename Kind::Io) / 2>;
  static constexpr int Q_BYTES = QBoxes::BYTES, K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int V_TILES = Q_STAGES * Q_BYTES + 2 * STAGES * K_BYTES < 227 << 10 ? STAGES : 1;
  static constexpr int K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
  // Of programs, what is added in a visit, which comes and goes with its stage of k.
  using BiasTile = hopper::BiasTile<Shape::block_q, Shape::block_k>;
  // Or flags, in the same place.
  static constexpr int FLAGS_BYTES = Shape::has_flags ? BYTES_OF_FLAGS<Shape::block_q, Shape::block_k> : 0;
  static constexpr int BIAS_AT = V_AT + V_TILES * K_BYTES,
                       BIAS_BYTES = Shape::tiles_cells ? BiasTile::BYTES : FLAGS_BYTES;
  static constexpr int KEYS_AT = BIAS_AT + STAGES * BIAS_BYTES,
                       KEY_BYTES = Shape::folds ? HalvesOperand::ROW_BYTES : 4,
                       KEYS_BYTES = Shape::has_keys || Shape::folds ? Shape::block_k * KEY_BYTES : 0;
  // Of dropout, the words of a visit's columns, which come with its k, and are read behind its exponentials.
  static constexpr int WORDS_AT = KEYS_AT + STAGES * KEYS_BYTES,
                       WORDS_BYTES = Shape::drops ? Shape::block_k * 4 : 0;
  // Of folded terms the left operand, of slopes with either sign, and what keys have in common.
  static constexpr int LEFT_AT = WORDS_AT + 2 * STAGES * WORDS_BYTES, LEFT_HALF = 64 * HalvesOperand::ROW_BYTES;
  static constexpr int NUM_LEFTS = Shape::folds_slopes ? 2 : 1,
                       ZEROS_AT = LEFT_AT + (Shape::folds ? (NUM_LEFTS + 1) * LEFT_HALF : 0);
  static constexpr int BARRIERS_AT = ZEROS_AT + (Shape::folds ? KEYS_BYTES : 0),
                       NUM_BARRIERS = 2 * (Q_STAGES + 2 * STAGES);
  static constexpr bool LEAVES_NOTES = Shape::mending == AT_END;
  static constexpr int NUM_VISITS = 2 * STAGES, TOLD_AT = BARRIERS_AT + NUM_BARRIERS * 8,
                       NEXT_AT = TOLD_AT + GENERAL * NUM_VISITS * 16,
                       VISITS_AT = NEXT_AT + !GENERAL * STAGES * ForwardTile::WORDS * 4,
                       ORDER_AT = VISITS_AT + GENERAL * NUM_VISITS * ToldVisit::BYTES, MOST_ORDERED = 32,
                       EXPONENTS_AT = ORDER_AT + GENERAL * MOST_ORDERED * 4,
                       NOTED_AT = EXPONENTS_AT + Shape::beside * STAGES * 8,
                       ZERO_BOX_AT = (NOTED_AT + LEAVES_NOTES * 4 + 127) / 128 * 128;
  // Whether o of rows that see nothing is stored from there, without a tile: where there is room.
  static constexpr bool HAS_ZEROS =
      GENERAL && !Kind::SCALED && !Shape::in_parts && ZERO_BOX_AT + ZERO_BOX_BYTES <= 227 << 10;
  static constexpr int BYTES = ZERO_BOX_AT + HAS_ZEROS * ZERO_BOX_BYTES;

  struct Stage {
    uint32_t tile, full, empty;
  };
  uint32_t base;
  __device__ Stage stage(uint32_t tile, int barrier) const {
    return {base + tile, base + BARRIERS_AT + barrier * 16, base + BARRIERS_AT + barrier * 16 + 8};
  }
  __device__ Stage q(int i) const { return stage(i * Q_BYTES, i); }
  __device__ Stage k(int i) const { return stage(K_AT + i * K_BYTES, Q_STAGES + i); }
  __device__ Stage v(int i) const {
    return stage(V_AT + (V_TILES > 1 ? i * K_BYTES : 0), Q_STAGES + STAGES + i);
  }
  __device__ uint32_t bias(int i) const { return base + BIAS_AT + i * BIAS_BYTES; }
  __device__ uint32_t keys(int i) const { return base + KEYS_AT + i * KEYS_BYTES; }
  __device__ HalvesOperand terms(int i) const { return {keys(i), base + ZEROS_AT}; }
  __device__ HalvesOperand left_of_terms(int i) const {
    return {base + LEFT_AT + i * LEFT_HALF, base + LEFT_AT + NUM_LEFTS * LEFT_HALF};
  }
  __device__ uint32_t next_tile(int i) const { return base + NEXT_AT + i * ForwardTile::WORDS * 4; }

  // Of what the ring has at a stage of k, and of a ring of visits.
  __device__ ToldVisit visit(const Ring<STAGES> &at) const { return visit_at(at.phase * STAGES + at.stage); }
  __device__ uint32_t words(const Ring<STAGES> &at) const {
    return base + WORDS_AT + (at.phase * STAGES + at.stage) * WORDS_BYTES;
  }
  __device__ ToldVisit visit(const Ring<NUM_VISITS> &at) const { return visit_at(at.stage); }
  __device__ ToldVisit visit_at(uint32_t i) const { return {base + VISITS_AT + i * ToldVisit::BYTES}; }
  // The barriers of a visit.
  __device__ uint32_t told(uint32_t i) const { return base + TOLD_AT + i * 16; }
  __device__ uint32_t read(uint32_t i) const { return told(i) + 8; }
  // Those of k and of v, of the columns at a stage of k.
  __device__ uint32_t exponents(uint32_t stage) const { return base + EXPONENTS_AT + stage * 8; }
  // Which batch comes at a place of the order.
  __device__ uint32_t batch_at(uint32_t place) const { return base + ORDER_AT + place * 4; }
  // Whether a warp of the block has left a note.
  __device__ uint32_t noted() const { return base + NOTED_AT; }
  __device__ uint32_t zero_box() const { return base + ZERO_BOX_AT; }
  // Sinks leave an lse to rows that see nothing, which consumers work out.
  __device__ static bool leaves_zeros(const fa_cuda_arguments &a) { return HAS_ZEROS && a.num_sinks == 0; }

  // By all threads: what of terms is the same in all visits.
  __device__ void init_terms() const {
    const int row = threadIdx.x, at = row * HalvesOperand::ROW_BYTES;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    if (row < Shape::block_k) store_shared(base + ZEROS_AT + at, zeros);
    if (row < 64) {
      for (int i = 0; i < NUM_LEFTS; i++)
        store_shared(base + LEFT_AT + i * LEFT_HALF + at, row_of_factors<typename Kind::Element>(1 - 2 * i));
      store_shared(base + LEFT_AT + NUM_LEFTS * LEFT_HALF + at, zeros);
    }
    fence_async();
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < NUM_BARRIERS; i += 2) {
      barrier_init(base + BARRIERS_AT + i * 8, 1);  // full: the producer's
      // empty: every consuming warp's
      barrier_init(base + BARRIERS_AT + i * 8 + 8, ARRIVALS_OF_WARP * Shape::num_consumers * 4);
    }
    for (int i = 0; i < GENERAL * NUM_VISITS; i++) barrier_init(told(i), 1), barrier_init(read(i), 1);
    if (LEAVES_NOTES) store_shared(noted(), uint32_t(0));
    barrier_init_done();
  }
};

// ---- the producer: one thread ------------------------------------------------------------------------

// The exponents of the columns that the producer loads, of kernels that tell them: those of FA_CUDA_SCALE_ROWS
// columns are read once, and their copies waited for, if these are made beside the kernel.
template <bool TELLS>
struct ColumnExponents {
  __device__ explicit ColumnExponents(const fa_cuda_arguments &) {}
  __device__ void find(const fa_cuda_arguments &, int, int, int) const {}
  __device__ void tell(uint32_t) const {}
};
template <>
struct ColumnExponents<true> {
  int k = 0, v = 0, place = -1;
  bool all_there;
  const int32_t *counted = nullptr;  // what has been waited for last
  __device__ explicit ColumnExponents(const fa_cuda_arguments &a) : all_there(!a.columns_done) {}

  __device__ void find(const fa_cuda_arguments &a, int batch, int kv_head, int column) {
    const int own = (batch * a.num_kv_heads + kv_head) * a.k.num_scales + column / FA_CUDA_SCALE_ROWS;
    if (own == place) return;
    place = own;
    if (!all_there) await(a, batch, kv_head, column);
    // What lies near may have been read before it was there.
    k = load_relaxed(a.k.exponents + own), v = load_relaxed(a.v.exponents + own);
  }
  __device__ void tell(uint32_t to) const { store_shared(to, uint32_t(k)), store_shared(to + 4, uint32_t(v)); }

 private:
  __device__ void await(const fa_cuda_arguments &a, int batch, int kv_head, int column) {
    const int32_t *count = count_of_columns(a, batch, kv_head, column);
    if (count == counted) return;
    counted = count;
    all_there = are_all_columns_there(a);
    if (!all_there) wait_for_columns(a, batch, kv_head, column);
    fence_async_global();
  }
};

template <class Kind, class Shape, bool GENERAL>
struct Producer {
  using Buffers = ForwardBuffers<Kind, Shape, GENERAL>;
  using QBoxes = typename Buffers::QBoxes;
  using KTile = typename Buffers::KTile;
  static constexpr int Q_BOX_COLS = 128 / sizeof(typename Kind::Io);

  const fa_cuda_arguments &a;
  const fa_cuda_maps &maps;
  const Buffers buffers;
  const bool trims;  // see tile_of
  ColumnExponents<Shape::beside> exponents = ColumnExponents<Shape::beside>(a);
  Ring<Buffers::Q_STAGES> q_ring;
  Ring<Buffers::STAGES> ring;

  __device__ void load_q(const ForwardTile &tile) const {
    const int first_row = sequence_of(a, tile.batch).first_row + tile.rows.begin;
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
  }

  __device__ void load(typename Buffers::Stage to, const CUtensorMap &map, int column, int kv_head, int batch,
                       int more_bytes = 0) const {
    barrier_expect(to.full, Buffers::K_BYTES + more_bytes);
#pragma unroll
    for (int part = 0; part < Kind::PARTS; part++)
      load_boxes<KTile>(to.tile + part * KTile::BYTES, map, to.full, column, kv_head, batch + part * a.batch);
  }

  // Where v has a single tile, which is empty only when the product with it is done, the next k comes first;
  // and where consumers leave v and the k behind it at once, and need that k sooner.
  static constexpr bool ONE_V = Buffers::V_TILES == 1, K_AHEAD = ONE_V || (!GENERAL && Shape::waits_late);
  static_assert(!K_AHEAD || !Shape::beside, "load_next_k forgets what it has found");

  __device__ void load_k(const ForwardTile &tile, int kv_head, int column) {
    const auto k = buffers.k(ring.stage);
    exponents.find(a, tile.batch, kv_head, column);
    barrier_wait(k.empty, ring.phase ^ 1);
    exponents.tell(buffers.exponents(ring.stage));
    const bool adds_keys = Shape::folds || (Shape::has_keys && a.program.keys.kinds);
    int more_bytes = adds_keys ? Buffers::KEYS_BYTES : 0;
    if constexpr (Shape::tiles_cells) more_bytes += Buffers::BiasTile::bytes(a.program);
    const int words_bytes = a.program.column_words ? Buffers::WORDS_BYTES : 0;
    more_bytes += words_bytes;
    const int flags_bytes = a.program.flags.words ? Buffers::FLAGS_BYTES : 0;
    more_bytes += flags_bytes;
    load(k, maps.k, column, kv_head, tile.batch, more_bytes);
    if (adds_keys) {
      const void *numbers;
      if constexpr (Shape::folds_slopes)
        numbers = terms_of_slope(a.program.keys, tile.batch, tile.head, false);
      else if constexpr (Shape::folds)
        numbers = terms_of(a.program.keys, tile.batch, tile.head, column);
      else
        numbers = addends_of(a.program.keys, tile.batch, tile.head, column);
      load_bulk(buffers.keys(ring.stage), numbers, Buffers::KEYS_BYTES, k.full);
    }
    if (words_bytes > 0) load_bulk(buffers.words(ring), a.program.column_words + column, words_bytes, k.full);
    if (flags_bytes > 0)
      load_flags<Shape::block_q, Shape::block_k>(buffers.bias(ring.stage), a.program.flags, k.full, tile.batch,
                                                 tile.head, tile.rows.begin, column);
    if constexpr (Shape::tiles_cells)
      Buffers::BiasTile::load(buffers.bias(ring.stage), a.program, maps.bias, k.full, tile.batch, tile.head,
                              tile.rows.begin, column);
  }

  __device__ void load_next_k(const ForwardTile &tile, int kv_head, int column) const {
    Producer next = *this;
    next.ring.advance();
    next.load_k(tile, kv_head, column);
  }
  // v: the ring's stage of it.
  __device__ void wait_for_empty(const typename Buffers::Stage &v) const {
    // Of the stage that had the tile last: at first that has a phase that nobody waits for.
    const uint32_t other = ring.stage ^ 1;
    if constexpr (ONE_V)
      barrier_wait(buffers.v(other).empty, ring.phase ^ other);
    else
      barrier_wait(v.empty, ring.phase ^ 1);
  }

  // Goes through the tile's column blocks; before the last one's v it finds the next tile, and tells it.
  __device__ void go_through_columns(const ForwardTile &tile, uint32_t &index, ForwardTile &next) {
    const int first_column = sequence_of(a, tile.batch).first_column, kv_head = kv_head_of(a, tile.head);
    for (int i = 0, left = tile.k_blocks.count - 1; left >= 0; i++, left--, ring.advance()) {
      if (left == min(1, tile.k_blocks.count - 1)) index = next_index(a, index);
      const int column = first_column + block_at<Shape>(a, tile, i) * Shape::block_k;
      const auto v = buffers.v(ring.stage);
      if (!K_AHEAD || i == 0) load_k(tile, kv_head, column);
      if (K_AHEAD && left > 0)
        load_next_k(tile, kv_head, first_column + block_at<Shape>(a, tile, i + 1) * Shape::block_k);
      if (left == 0) next = tile_of<Shape>(a, index, trims);
      wait_for_empty(v);
      if (left == 0) next.tell(buffers.next_tile(ring.stage));
      load(v, maps.v, column, kv_head, tile.batch);
    }
  }

  // Goes through the visits that the scout tells of, and hands these on with their columns: when v is full, the
  // next tile's first one has been told, too.
  __device__ void go_through_visits() {
    Ring<Buffers::NUM_VISITS> visits;
    ForwardTile tile;
    for (uint32_t count = 0;; q_ring.advance()) {
      barrier_wait(buffers.told(visits.stage), visits.phase);
      tile.hear(buffers.visit(visits).tile(), 1);
      if (tile.head < 0) return;
      load_q(tile);
      const int kv_head = kv_head_of(a, tile.head);
      for (bool last = false, has_k = false; !last; ring.advance(), count++) {
        barrier_wait(buffers.told(visits.stage), visits.phase);
        const uint32_t visit = buffers.visit(visits).at;
        const int column = load_shared_word(visit + ToldVisit::COLUMN_AT);
        last = load_shared_word(visit) & ToldVisit::LAST;
        visits.advance();
        if (!K_AHEAD || !has_k) load_k(tile, kv_head, column);
        if (last || K_AHEAD) barrier_wait(buffers.told(visits.stage), visits.phase);
        if (K_AHEAD && !last) {
          load_next_k(tile, kv_head, load_shared_word(buffers.visit(visits).at + ToldVisit::COLUMN_AT));
          has_k = true;
        }
        const auto v = buffers.v(ring.stage);
        wait_for_empty(v);
        // Whoever had v at this stage before has read its visit.
        if (count >= Buffers::STAGES)
          barrier_arrive(buffers.read((ring.phase ^ 1) * Buffers::STAGES + ring.stage));
        load(v, maps.v, column, kv_head, tile.batch);
      }
    }
  }

  __device__ void produce() {
    if constexpr (GENERAL) return go_through_visits();
    uint32_t index = blockIdx.x;
    ForwardTile next;
    for (ForwardTile tile = tile_of<Shape>(a, index, trims); tile.head >= 0; q_ring.advance()) {
      load_q(tile);
      go_through_columns(tile, index, next);
      tile = next;
      tile.for_each_word([](int, int &word) { word = uniform(word, 1); });
    }
  }
};

// ---- the scout: a warp, where there are bands --------------------------------------------------------------
//
// One of its threads goes through visits. To find a tile takes reads of a ticket, a plan and a band, one after
// the other, as long as one or two visits.

template <class Kind, class Shape>
struct Scout {
  using Buffers = ForwardBuffers<Kind, Shape, true>;

  const fa_cuda_arguments &a;
  const Buffers buffers;
  Ring<Buffers::NUM_VISITS> ring;

  // Whether batches have an order of their own: where their bands differ, and one look is enough.
  __device__ bool orders_batches() const { return a.bands_batch > 1 && a.batch <= Buffers::MOST_ORDERED; }

  // By the warp: puts the batches in order, that with the longest row block last, as it is begun first.
  __device__ void order_batches() const {
    if (!orders_batches()) return;
    const int batch = threadIdx.x % 32;
    const int visits = batch < a.batch ? plan_at<true>(a, batch, 0).num_visits : -1;
    int place = a.batch - 32;  // those that are not there come before all others
    for (int other = 0; other < 32; other++) {
      const int theirs = __shfl_sync(~0u, visits, other);
      place += theirs < visits || (theirs == visits && other < batch);
    }
    if (batch < a.batch) store_shared(buffers.batch_at(place), uint32_t(batch));
    __syncwarp();
  }

  __device__ ToldVisit next_told() const {
    barrier_wait(buffers.read(ring.stage), ring.phase ^ 1);
    return buffers.visit(ring);
  }
  __device__ void tell_visits(ForwardTile &tile, const fa_cuda_block_plan &plan) {
    Visits<true, true, Shape::block_k, !Kind::SCALED> visits(a, tile.batch, plan, tile.rows);
    Teller<Shape> teller(a.program, tile.batch, tile.head, visits);
    for (bool first = true, last = false; !last; ring.advance(), first = false) {
      const ToldVisit to = next_told();
      if (first) tile.tell(to.tile());
      last = teller.tell(visits, to);
      barrier_arrive(buffers.told(ring.stage));
    }
  }

  // By one thread. The visit behind the last tile's is that of no tile.
  __device__ void tell_tiles() {
    ForwardTile tile;
    RowBlock block;
    for (uint32_t index = blockIdx.x; row_block_in_phases(a, index, block); index = next_index(a, index)) {
      if (orders_batches()) block.batch = load_shared_word(buffers.batch_at(block.batch));
      if constexpr (Shape::has_cells) take_batches_together(a, a.num_heads, block.batch, block.head);
      const fa_cuda_block_plan plan = planned_row_block(a, block);
      if (plan.num_visits == 0 && buffers.leaves_zeros(a)) {
        if (a.skips_unseen) atomicMax(a.tickets, int(next_heads(a, index) - gridDim.x));
        continue;
      }
      tile.head = block.head, tile.batch = block.batch;
      tile.rows = row_range<Shape>(sequence_of(a, block.batch), block.q_block);
      tell_visits(tile, plan);
    }
    ForwardTile().tell(next_told().tile());
    barrier_arrive(buffers.told(ring.stage));
  }

  __device__ void scout() {
    order_batches();
    if (threadIdx.x % 32 == 0) tell_tiles();
  }
};

// Stores o and lse of the rows that see nothing, by a warp, beside all other work: as much as memory takes.
template <class Shape, class Buffers>
__device__ inline void leave_zeros(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                   const Buffers &buffers) {
  const int lane = threadIdx.x % 32, num_blocks = a.batch * a.num_heads * a.num_q_blocks;
  for (int first = blockIdx.x; first < num_blocks; first += gridDim.x * 32) {
    // Each lane looks at one row block's plan; those that are empty are everybody's.
    const int own = first + lane * gridDim.x;
    RowBlock block = {};
    bool is_empty = false;
    if (own < num_blocks) {
      block = row_block_at(a, own);
      is_empty = planned_row_block(a, block).num_visits == 0;
    }
    for (uint32_t left = __ballot_sync(~0u, is_empty); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1, head = __shfl_sync(~0u, block.head, from);
      const Sequence sequence = sequence_of(a, __shfl_sync(~0u, block.batch, from));
      const Range rows = row_range<Shape>(sequence, __shfl_sync(~0u, block.q_block, from));
      const int row = rows.begin + lane * ZERO_BOX_ROWS;
#pragma unroll 1
      for (int d = 0; d < Shape::head_dim && row < rows.end; d += 64)
        store_box(maps.out, buffers.zero_box(), d, sequence.first_row + row, head, sequence.batch);
      for (int i = rows.begin + lane; i < rows.end; i += 32) *lse_at(a, sequence, head, i) = -INFINITY;
    }
  }
  bulk_commit();
  bulk_wait_read<0>();
}

}  // namespace hopper
}  // namespace fa
