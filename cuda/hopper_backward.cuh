// What Hopper's backward kernels share: the shape of a block of threads and its shared memory, the work of a
// column block, the warps that copy row blocks, send dq and write it, and what consumers do with scores in
// registers.
#pragma once

#include "backward.cuh"
#include "hopper_beside.cuh"
#include "hopper_cells.cuh"

namespace fa {
namespace hopper {

// Barriers in shared memory, two of each kind. One thread or its bulk copies complete those of the first line,
// all consumer warps those of the second, and BLOCK_EMPTY takes the warps that send dq as well, and, as
// DS_EMPTY, those that leave the gradient by a bias.
enum { BLOCK_FULL, K_FULL, V_FULL, Q_FULL, DOUT_FULL, DQ_SENT, SUM_FULL, STEPS_FULL };
enum { K_EMPTY = STEPS_FULL + 1, V_EMPTY, Q_EMPTY, DOUT_EMPTY, DS_FULL, DS_EMPTY };
enum { BLOCK_EMPTY = DS_EMPTY + 1, NUM_BARRIER_KINDS };
// Hardware barriers. One for each share of dq: its consumers arrive when the warp that sends it may read it.
// And one for each consumer, whose warps meet there.
enum { DQ_WRITTEN = 1, CONSUMER_MEETS = DQ_WRITTEN + 2 };

// Two sides are loaded: k with q and shift, and v with dout and delta. The barriers of a kind for the second
// side follow that for the first.
enum { K_SIDE, V_SIDE, NUM_SIDES };

// ---- shape and shared memory ---------------------------------------------------------------------------

// What a kernel has code for, or does. Code that others never run costs them 2 to 10 %: it is where ptxas ends
// a block of instructions that it orders. (But at head_dim 64 some are faster with it.)
// FORMS: takes scores of other forms, a softcap only without a program. SUMS: gives the gradients by what a
// program adds. FROM_SHIFT: scores begin at the shift. SINGLE_COLUMN: for problems whose keys are one column
// block that every row sees. A step's dq is all that its rows have, and is written by the warp that would send
// it. ASKS_EARLY: whether ds may be stored is asked between the exponentials and the wait for dp, which ptxas
// would else move to before them. LEAVES_BY_MAP: dk and dv go through shared memory to their maps. These two
// are 1 to 5 % in some kernels, and a loss in others, and so is PLACES_LANES, see RowNumbers. SPLITS_HEADS:
// blocks of threads may share the query heads of a column block. NONE_BEHIND: for slopes where no row sees a
// column behind its place. VOTES: warps vote on the conditions of the consumers' loops, which makes these the
// same for a whole warp to ptxas: 1 to 7 % in some kernels, and in others a loss of as much. COMPUTES_HIDDEN:
// what keys or flags hide whole is computed like the rest. CAUSAL: for masks that turn out to be causal.
enum BackwardTraits {
  FORMS = 1,
  SUMS = 2,
  FROM_SHIFT = 4,
  SINGLE_COLUMN = 8,
  ASKS_EARLY = 16,
  LEAVES_BY_MAP = 32,
  SPLITS_HEADS = 64,
  PLACES_LANES = 128,
  NONE_BEHIND = 256,
  VOTES = 512,
  COMPUTES_HIDDEN = 1024,
  CAUSAL = 2048
};

// A row of the table; it changes results by rounding alone. The consumers' warps come first, then the
// producer's, one warp to send each share of dq (a sum over some of the columns), and the writers, which turn
// the sum in memory into dq; without writers finish_dq does. Registers are a thread's: on average the block has
// 168 for each.
// PROGRAM: what may act on scores; then GENERAL.
template <int HEAD_DIM, int BLOCK_Q, int DQ_SHARES, int NUM_WRITERS, int TRAITS, int PROGRAM = NO_PROGRAM>
struct BackwardShape {
  using AsCausal = BackwardShape<HEAD_DIM, BLOCK_Q, DQ_SHARES, NUM_WRITERS, TRAITS | CAUSAL, PROGRAM>;
  static constexpr bool single_column = TRAITS & SINGLE_COLUMN;
  static constexpr bool leaves_by_map = TRAITS & LEAVES_BY_MAP, splits_heads = TRAITS & SPLITS_HEADS;
  // k and v are brought to the cache while those of the column block before are in use, where so many steps or
  // fewer are too short a time to bring them. At 128 it makes no difference to others, or costs them 1 %.
  static constexpr int most_steps_prefetched = !leaves_by_map || single_column ? 0
                                               : HEAD_DIM == 64                ? INT32_MAX
                                                                               : 2;
  static constexpr bool votes = TRAITS & VOTES, none_behind = TRAITS & NONE_BEHIND, sums = TRAITS & SUMS,
                        asks_early = TRAITS & ASKS_EARLY, places_lanes = TRAITS & PLACES_LANES,
                        is_causal = TRAITS & CAUSAL;
  static constexpr Forms forms = !(TRAITS & FORMS) ? USUAL_FORM : PROGRAM ? NO_SOFTCAP : ANY_FORM;
  static constexpr Beginning beginning = !(TRAITS & FROM_SHIFT) ? AT_ZERO
                                         : forms == USUAL_FORM  ? AT_SHIFT
                                                                : AT_SHIFT_IF_FINITE;
  static constexpr bool from_shift = beginning != AT_ZERO, has_slopes = PROGRAM & SLOPES,
                        has_keys = PROGRAM & KEYS, has_cells = PROGRAM & CELLS, drops = PROGRAM & DROPOUT,
                        has_flags = PROGRAM & FLAGS, tiles_cells = hopper::tiles_cells(PROGRAM);
  static constexpr bool folds = folds_terms(PROGRAM), folds_slopes = folds && has_slopes,
                        adds_late = !folds && PROGRAM & ~(DROPOUT | FLAGS);
  // Whether consumers are told what they need of a column block, where there are bands, or find it by
  // themselves. At 128 it makes no difference to most of them, and the producer has less time.
  static constexpr bool tells_work = HEAD_DIM == 64 || PROGRAM == DROPOUT;
  // Whether steps that flags hide whole are left out. Then consumers are told how many are left.
  static constexpr bool skips_hidden_steps = PROGRAM == FLAGS && !(TRAITS & COMPUTES_HIDDEN);
  // Whether column blocks are that keys hide whole.
  static constexpr bool skips_hidden_keys = has_keys && !(TRAITS & COMPUTES_HIDDEN);
  static constexpr int whole_program = PROGRAM, program = acting_program(PROGRAM);
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, num_consumers = 2, block_k = num_consumers * 64;
  static constexpr int num_warps = num_consumers * 4, dq_warps = block_q / 16;  // see DqShare
  static constexpr int dq_shares = DQ_SHARES, num_writers = NUM_WRITERS;
  static constexpr int num_leavers = sums && tiles_cells ? 2 : 0;  // see leave_cells
  static constexpr int num_threads = (num_consumers + 1) * WARPGROUP, num_finders = 1;
  // At a time, by one of num_finders: see load_told_sides. What else is in shared memory leaves no room for
  // more.
  static constexpr int steps_found = has_cells ? 8 : folds || (has_flags && HEAD_DIM == 64) ? 16 : 32;
  static constexpr int consumer_registers = 240, other_registers = 24;
  // Whether consumers work out the addresses of each step anew. Kept from step to step, as ptxas would have
  // them, they spill where registers are scarce; at 64 that is 1 to 9 % of the time in most kernels, but 4 %
  // more where keys are added to and nothing else is.
  static constexpr bool forgets_addresses = HEAD_DIM > 64 || (PROGRAM == KEYS && !FA_KIND_SCALED);
  // Whether a consumer waits for the other's ds before it needs that. One that may be a whole step ahead ends
  // up there, and does at any time what the other does. Where steps are short it pays.
  static constexpr bool keeps_pace = head_dim == 64 && block_q == 128;
};

// ---- the work ------------------------------------------------------------------------------------------

// Columns of a warpgroup's transposed product: its part of a column block.
constexpr int PART = 64;

// The only column block of a key/value head, or a part of its steps.
template <class Shape>
struct SingleColumnWork : ColumnWork<Shape, false> {
  static constexpr bool may_be_hidden = false;
  __device__ static int count(const fa_cuda_arguments &a) {
    return a.batch * a.num_kv_heads * a.num_column_parts;
  }
  __device__ void find(const fa_cuda_arguments &a, int index) {
    const ColumnBlock block = column_block_of(a, index, a.num_column_parts, 1);
    this->find_block(a, {block.batch, block.kv_head, 0});
    this->part = block.k_block;
    const Range steps = steps_of_part(a, this->part, this->num_steps);
    this->first = this->step_after(a, steps.begin);
    this->num_steps = steps.end - steps.begin;
  }
};

// What a folded slope makes of a step: of all shifts' due, and itself, negative where columns lie behind, both
// in units of exponents; and whether they do, see lie_behind, and for each part of the columns whether some of
// them lie behind a row that sees them, and others may not.
struct StepSlope {
  float due = 0, slope = 0;
  uint32_t flags = 0;
};

// The rows of a step: their head, the first one, counted from the sequence's, and the row block's position. Of
// slopes also whether columns lie behind them, and, without bands, what consumers are to be told.
struct StepRows {
  int head, row, position;
  bool behind = false;
  StepSlope slope = {};
};

// What consumers are told of a step in shared memory: a word of flags, for each part of its columns whether all
// rows see them, and what StepSlope has; and of slopes what is due, and the slope.
template <class Shape>
struct ToldStep {
  static constexpr int PARTS = Shape::block_k / PART, CROSSED_AT = PARTS + 1, SLOPE_AT = 24, FLAGS_AT = 44;
  static constexpr uint32_t ALL = (1 << PARTS) - 1, BEHIND = 1 << PARTS;
  using Due = std::conditional_t<Shape::folds_slopes, ShiftDue, NoShiftDue>;

  // Those of a part of the columns.
  __device__ static uint32_t heard_flags(uint32_t told, int part) {
    return load_shared_word(told + FLAGS_AT) >> part;
  }
  __device__ static bool see_all(uint32_t flags) { return flags & 1; }
  __device__ static bool are_crossed(uint32_t flags) { return flags >> CROSSED_AT & 1; }
  __device__ static Due heard_due([[maybe_unused]] uint32_t told) {
    if constexpr (Shape::folds_slopes)
      return {load_shared_pair(told + SLOPE_AT).x};
    else
      return {};
  }
  __device__ static float heard_slope(uint32_t told) { return load_shared_pair(told + SLOPE_AT).y; }

  // By one thread, of a step whose slope is all that consumers do not find by themselves.
  __device__ static void tell_slope(const StepSlope &slope, uint32_t to) {
    store_shared(to + SLOPE_AT, __float_as_uint(slope.due));
    store_shared(to + SLOPE_AT + 4, __float_as_uint(slope.slope));
    store_shared(to + FLAGS_AT, slope.flags);
  }

  // Of the rows of a visit and the columns from `first` on.
  __device__ static StepSlope slope_of(const fa_cuda_arguments &a, int batch, const Visit &visit, int first) {
    StepSlope told;
    const int distance = distance_of_origin(visit.band);
    const bool behind = lie_behind(distance, visit.rows, first);
    told.slope = slope_of_head(a, batch, visit.head) * (behind ? -LOG2_E : LOG2_E);
    told.due = told.slope * float(distance + visit.rows.begin - first);
    if (behind) told.flags |= BEHIND;
#pragma unroll 1
    for (int part = 0; part < PARTS && !behind && visit.band.right > 0; part++)
      if (distance + visit.rows.begin < first + (part + 1) * PART - 1) told.flags |= 1 << (CROSSED_AT + part);
    return told;
  }
};

// A column block's work as the warps share it. Without bands every warp finds the steps by itself. With bands
// the producer finds them, and tells the consumers of each, and which of them need not test elements: consumers
// have hardly any time for questions.
template <class Shape, bool GENERAL>
struct Work : std::conditional_t<Shape::single_column, SingleColumnWork<Shape>, ColumnWork<Shape, GENERAL>>,
              ToldStep<Shape> {
  static constexpr bool may_be_part = Shape::single_column || Shape::splits_heads;
  using ConsumerStep = typename ColumnWork<Shape, GENERAL>::Step;
  __device__ ConsumerStep consumers_first() const { return this->first; }
  __device__ ConsumerStep consumers_next(const fa_cuda_arguments &a, ConsumerStep step) const {
    return this->next(a, step);
  }
  __device__ Visit consumers_visit(const fa_cuda_arguments &a, ConsumerStep step, uint32_t) const {
    return this->visit_of(a, step);
  }
  __device__ Visit heard_visit(const Visit &visit) const { return visit; }
  __device__ StepRows rows_of(const fa_cuda_arguments &a, ConsumerStep step) const {
    StepRows rows = {step.head, this->q_block_of(step) * Shape::block_q, this->position_of(a, step)};
    if constexpr (Shape::folds_slopes) {
      rows.slope = this->slope_of(a, this->block.batch, this->visit_of(a, step), this->columns.begin);
      rows.behind = rows.slope.flags & this->BEHIND;
    }
    return rows;
  }
};
template <class Shape>
struct Work<Shape, true> : ColumnWork<Shape, true>, ToldStep<Shape> {
  using ToldStep<Shape>::ALL, ToldStep<Shape>::BEHIND, ToldStep<Shape>::FLAGS_AT;
  static constexpr bool may_be_part = !Shape::program;
  __device__ void find(const fa_cuda_arguments &a, int index) {
    ColumnBlock block = column_block_of(a, index, a.num_k_blocks * a.num_column_parts, 1);
    if constexpr (Shape::has_cells) take_batches_together(a, a.num_kv_heads, block.batch, block.kv_head);
    this->find_block(a, block);
  }
  // What consumers use of it, WORK_BYTES. To find that takes divisions and reads of plans, for which a consumer
  // stands idle.
  __device__ void tell(uint32_t to) const {
    store_shared(to, make_uint4(this->block.batch, this->block.kv_head, this->block.k_block, this->part));
    store_shared(to + 16, make_uint4(this->columns.begin, this->columns.end, this->num_steps, 0));
  }
  __device__ void hear(uint32_t from) {
    const int4 x = load_shared_words(from), y = load_shared_words(from + 16);
    this->block = {x.x, x.y, x.z}, this->part = x.w;
    this->columns = {y.x, y.y}, this->num_steps = y.z;
  }

  struct ConsumerStep {};
  __device__ ConsumerStep consumers_first() const { return {}; }
  __device__ ConsumerStep consumers_next(const fa_cuda_arguments &, ConsumerStep) const { return {}; }
  // This is where tell_step has put what the visit is.
  __device__ uint32_t consumers_visit(const fa_cuda_arguments &, ConsumerStep, uint32_t told) const {
    return told;
  }
  __device__ Visit heard_visit(uint32_t told) const {
    const int4 x = load_shared_words(told), y = load_shared_words(told + 16), z = load_shared_words(told + 32);
    return {{x.x, x.y, x.z, x.w, y.x, y.y}, z.x, {z.y, z.y + Shape::block_q}};
  }
  __device__ static int heard_position(uint32_t told) { return load_shared_word(told + 40); }
  __device__ static StepRows heard_rows(uint32_t told) {
    const int4 z = load_shared_words(told + 32);
    return {z.x, z.y, z.z, (z.w & BEHIND) != 0};
  }
  // Whether a mask shows something of a step, and how many of those from one on it does, by a warp.
  __device__ bool shows(const fa_cuda_arguments &a, const typename ColumnWork<Shape, true>::Step &step) const {
    return ShownByFlags(a, {this->block.batch, step.head, this->q_block_of(step)}).has(this->block.k_block);
  }
  __device__ int count_shown(const fa_cuda_arguments &a, int first) const {
    int count = 0;
#pragma unroll 1
    for (; first < this->num_steps; first += 32) {
      const int i = first + threadIdx.x % 32;
      count += __popc(__ballot_sync(~0u, i < this->num_steps && shows(a, this->step_after(a, i))));
    }
    return count;
  }
  // Where some are left out, how many add to a step's dq before it does, if they add in order.
  static constexpr int PLACE_AT = 24;
  __device__ static int heard_place(uint32_t told) { return load_shared_word(told + PLACE_AT); }

  // Puts down a step's rows, a bit for each part whose columns are seen by all of them, and, where somebody
  // looks at it, the band.
  __device__ void tell_step(const fa_cuda_arguments &a, const typename ColumnWork<Shape, true>::Step &step,
                            uint32_t to) const {
    const Visit visit = this->visit_of(a, step);
    const fa_band &band = visit.band;
    const int first = this->columns.begin;
    uint32_t flags = ALL;
    if (!see_all_in_band<true>(a, band, visit.rows, {first, first + Shape::block_k})) {
      flags = 0;
#pragma unroll 1
      for (int column = 0; column < Shape::block_k; column += PART)
        flags |= see_all_in_band<true>(a, band, visit.rows, {first + column, first + column + PART})
                 << column / PART;
    }
    StepSlope slope;
    if constexpr (Shape::folds_slopes)
      slope = this->slope_of(a, this->block.batch, visit, first), flags |= slope.flags;
    if (Shape::program || flags != ALL) {
      store_shared(to, make_uint4(band.q_begin, band.q_end, band.k_begin, band.k_end));
      store_shared(to + 16,
                   make_uint4(band.left, band.right, __float_as_uint(slope.due), __float_as_uint(slope.slope)));
    }
    if constexpr (Shape::skips_hidden_steps)
      if (a.in_order)
        store_shared(to + PLACE_AT,
                     uint32_t(shown_visits<Shape>(a, {this->block.batch, visit.head, this->q_block_of(step)},
                                                  this->block.k_block, step.visits.number)));
    store_shared(to + 32, make_uint4(visit.head, visit.rows.begin, this->position_of(a, step), flags));
  }
};

// ---- shared memory --------------------------------------------------------------------------------------

// Shared memory of every kernel: k and v; two stages of q, dout, shift and delta; for SCALED kinds what ds is
// scaled by, and the exponents of the powers of two that scale k, v, q and dout; barriers; the numbers of two
// column blocks; for GENERAL kernels visits as load_told_sides tells of them. What the kernel's own Buffers add
// begins at OWN_AT.
template <class Kind_, class Shape_, bool GENERAL, int NUM_BARRIERS = NUM_BARRIER_KINDS>
struct CommonBuffers {
  using Kind = Kind_;
  using Shape = Shape_;
  using Work = hopper::Work<Shape, GENERAL>;
  static constexpr bool general = GENERAL;
  static constexpr int STAGES = 2;
  using QTile = BoxTile<Shape::block_q, Shape::head_dim>;
  using KTile = BoxTile<Shape::block_k, Shape::head_dim>;
  static constexpr int Q_BYTES = Kind::PARTS * QTile::BYTES, K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int ROW_BYTES = Shape::block_q * 4, DQ_BYTES = Shape::block_q * Shape::head_dim * 4;
  // Whether dout comes before q but in a column block's first step: its stage is free half a step before. At 64
  // without bands or with dropout, and with what is added to scores, it is no gain.
  static constexpr bool DOUT_FIRST = Shape::num_writers > 0 &&
                                     (!GENERAL || Shape::program == DROPOUT ? Shape::head_dim == 128
                                                                            : !Shape::program);
  // The bias of a step, which comes and goes with its stage of q.
  using BiasTile = hopper::BiasTile<Shape::block_q, Shape::block_k>;
  // Or flags, in the same place.
  static constexpr int FLAGS_BYTES = Shape::has_flags ? BYTES_OF_FLAGS<Shape::block_k, Shape::block_q> : 0;
  static constexpr int BIAS_BYTES = Shape::tiles_cells ? BiasTile::BYTES : FLAGS_BYTES;
  static constexpr int ROWS_AT = NUM_SIDES * K_BYTES, BIAS_AT = ROWS_AT + NUM_SIDES * STAGES * Q_BYTES,
                       STATISTICS_AT = BIAS_AT + STAGES * BIAS_BYTES;
  // Of dropout, the words of a step's rows, which come with its q.
  static constexpr int WORDS_AT = STATISTICS_AT + NUM_SIDES * STAGES * ROW_BYTES,
                       WORDS_BYTES = Shape::drops ? ROW_BYTES : 0;
  // Of each warp of the consumers the largest of its ds.
  static constexpr int MAXIMA_AT = WORDS_AT + STAGES * WORDS_BYTES,
                       MAXIMA_BYTES = Kind::SCALED ? Shape::num_warps * 4 : 0;
  static constexpr int EXPONENTS_AT = MAXIMA_AT + MAXIMA_BYTES;
  static constexpr int BARRIERS_AT = EXPONENTS_AT + DQ_SENT * STAGES * 4;
  static constexpr int BLOCKS_AT = BARRIERS_AT + NUM_BARRIERS * STAGES * 8;
  static constexpr bool TELLS_WORK = GENERAL && Shape::tells_work;
  static constexpr int WORK_AT = BLOCKS_AT + STAGES * 4, WORK_BYTES = TELLS_WORK ? 32 : 0;
  static constexpr int VISITS_AT = WORK_AT + STAGES * WORK_BYTES, VISIT_BYTES = 48;
  // Steps found at a time, for which f32 leaves little room, and those and others before them that still run.
  static constexpr int FOUND = Kind::SCALED ? 8 : Shape::steps_found, VISITS = GENERAL ? 2 * FOUND : STAGES;
  // Whether the warp that sends dq hears of steps, too, and how many of them a column block has: to find them
  // it would need twice its registers, and what it spills is slow, as each of its fences empties the cache.
  // Where terms are folded it is 2 to 7 % slower.
  static constexpr bool TELLS_SENDER =
      GENERAL && (Shape::num_writers > 0 || Shape::skips_hidden_steps) && !Shape::folds;
  // Of folded terms the right operand, and of the left one the zeros, and with each stage of q the numbers.
  static constexpr int NUM_STEPS_AT =
      VISITS_AT + (GENERAL ? Shape::num_finders * VISITS : Shape::folds_slopes * STAGES) * VISIT_BYTES;
  static constexpr int TERMS_AT = NUM_STEPS_AT + TELLS_SENDER * 16,
                       TERMS_BYTES = Shape::folds ? Shape::block_q * HalvesOperand::ROW_BYTES : 0;
  static constexpr int KEYS_AT = TERMS_AT + TERMS_BYTES,
                       KEYS_BYTES = Shape::folds ? Shape::block_k * HalvesOperand::ROW_BYTES : 0,
                       ZEROS_AT = KEYS_AT + STAGES * KEYS_BYTES;
  // A box of 0, for dk and dv of columns that nobody sees, where there is room.
  static constexpr bool HAS_ZEROS = GENERAL && Shape::num_writers > 0 && !Shape::folds;
  static constexpr int ZERO_BOX_AT =
      (ZEROS_AT + (Shape::folds ? PART * HalvesOperand::ROW_BYTES : 0) + 127) / 128 * 128;
  static constexpr int OWN_AT = (ZERO_BOX_AT + HAS_ZEROS * ZERO_BOX_BYTES + 1023) / 1024 * 1024;
  static_assert(WORK_AT % 16 == 0 && VISITS_AT % 16 == 0, "work and visits are read as vectors");

  uint32_t base;
  __device__ uint32_t columns(int side) const { return base + side * K_BYTES; }
  __device__ uint32_t rows(int side, int stage) const {
    return base + ROWS_AT + (side * STAGES + stage) * Q_BYTES;
  }
  __device__ uint32_t bias(int stage) const { return base + BIAS_AT + stage * BIAS_BYTES; }
  __device__ uint32_t statistic(int side, int stage) const {
    return base + STATISTICS_AT + (side * STAGES + stage) * ROW_BYTES;
  }
  __device__ uint32_t k() const { return columns(K_SIDE); }
  __device__ uint32_t q(int stage) const { return rows(K_SIDE, stage); }
  __device__ uint32_t dout(int stage) const { return rows(V_SIDE, stage); }
  __device__ uint32_t shift(int stage) const { return statistic(K_SIDE, stage); }
  __device__ uint32_t delta(int stage) const { return statistic(V_SIDE, stage); }
  __device__ uint32_t words(int stage) const { return base + WORDS_AT + stage * WORDS_BYTES; }
  __device__ uint32_t maxima(int consumer) const { return base + MAXIMA_AT + consumer * 16; }
  __device__ uint32_t exponent(int full, int stage = 0) const {
    return base + EXPONENTS_AT + (full * STAGES + stage) * 4;
  }
  __device__ uint32_t block(int stage) const { return base + BLOCKS_AT + stage * 4; }
  __device__ uint32_t num_steps(int stage) const { return base + NUM_STEPS_AT + stage * 4; }
  __device__ uint32_t work(int stage) const { return base + WORK_AT + stage * WORK_BYTES; }
  __device__ uint32_t visit(uint32_t step, int finder = 0) const {
    return base + VISITS_AT + (finder * VISITS + step % VISITS) * VISIT_BYTES;
  }
  __device__ uint32_t barrier(int kind, int stage = 0) const {
    return base + BARRIERS_AT + (kind * STAGES + stage) * 8;
  }
  __device__ uint32_t own(int at) const { return base + OWN_AT + at; }
  __device__ HalvesOperand terms() const { return {base + TERMS_AT, base + TERMS_AT}; }
  __device__ uint32_t keys(int stage) const { return base + KEYS_AT + stage * KEYS_BYTES; }
  __device__ HalvesOperand left_of_terms(int stage, int first_column) const {
    return {keys(stage) + first_column * HalvesOperand::ROW_BYTES, base + ZEROS_AT};
  }
  __device__ uint32_t zero_box() const { return base + ZERO_BOX_AT; }
  // Whether who copies rows leaves these, and not the consumers.
  __device__ static bool leaves_zeros(const fa_cuda_arguments &a) { return HAS_ZEROS && a.maps_columns; }
  // By all threads.
  __device__ void init_terms() const {
    const int row = threadIdx.x, at = row * HalvesOperand::ROW_BYTES;
    if (row < Shape::block_q) store_shared(base + TERMS_AT + at, row_of_factors<typename Kind::Element>());
    if (row < PART) store_shared(base + ZEROS_AT + at, make_uint4(0, 0, 0, 0));
    fence_async();
  }

  // The number of arrivals that complete a barrier.
  static constexpr int NUM_KINDS = NUM_BARRIERS;
  __device__ static int arrivals(int kind, bool) {
    if (kind < K_EMPTY) return 1;
    return ARRIVALS_OF_WARP * (Shape::num_warps + (kind == BLOCK_EMPTY ? Shape::dq_shares : 0) +
                               (kind == BLOCK_EMPTY || kind == DS_EMPTY ? Shape::num_leavers : 0));
  }
};

// All threads of a block call it first, and nothing before it that reads what another kernel wrote. Where there
// is a single column block, load_rows alone does, and where statistics are made beside, await_statistics.
template <class Buffers>
__device__ inline Buffers set_up_buffers(const fa_cuda_arguments &a) {
  if constexpr (Buffers::general) let_dependents_start();  // as multiprocessors become free
  FA_DYNAMIC_SHARED(1024, uint8_t, shared);
  const Buffers buffers = {shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int kind = 0; kind < Buffers::NUM_KINDS; kind++)
      for (int stage = 0; stage < Buffers::STAGES; stage++)
        barrier_init(buffers.barrier(kind, stage), Buffers::arrivals(kind, a.in_order));
    barrier_init_done();
  }
  if constexpr (Buffers::Shape::folds) buffers.init_terms();
  if constexpr (Buffers::HAS_ZEROS) init_zero_box(buffers.zero_box());
  __syncthreads();
  if (!Buffers::Shape::single_column && !a.rows_done) wait_for_launch_before();
  return buffers;
}

// ---- column blocks from warp to warp -----------------------------------------------------------------------

// A warp calls it, and arrives when all of its lanes have come.
__device__ inline void arrive_once(uint32_t barrier) {
  __syncwarp();
  barrier_arrive_warp(barrier);
}

// Finds the column block of that number; returns false where there is none. If keys hide it, which who takes it
// finds out for all, the number is the complement of its own, and there is nothing to do.
template <class Work>
__device__ inline bool find_work(const fa_cuda_arguments &a, int index, Work &work) {
  const bool is_hidden = Work::may_be_hidden && index < 0;
  if (is_hidden) index = ~index;
  if (index >= Work::count(a)) return false;
  work.find(a, index);
  if (is_hidden) work.hide();
  return true;
}
template <class Work>
__device__ inline int number_to_hand_on(const fa_cuda_arguments &a, int index) {
  if constexpr (Work::may_be_hidden) {
    Work work;
    if (hides_column_blocks(a) && find_work(a, index, work) && work.num_steps > 0 &&
        !ShownKeys(a.program.keys, work.block.batch, 0, true).has(work.block.k_block))
      return ~index;
  }
  return index;
}

// Finds the column block that the producer hands to the other warps; returns false where there is none. A warp,
// or one thread in its place, calls next_work when it has finished with the block.
template <class Buffers>
__device__ inline bool current_work(const fa_cuda_arguments &a, const Buffers &buffers, uint32_t count,
                                    typename Buffers::Work &work) {
  barrier_wait(buffers.barrier(BLOCK_FULL, count % 2), count / 2 % 2);
  return find_work(a, load_shared_word(buffers.block(count % 2)), work);
}
// The same for consumers, who may be told what they need of it.
template <class Buffers>
__device__ inline bool consumers_work(const fa_cuda_arguments &a, const Buffers &buffers, uint32_t count,
                                      typename Buffers::Work &work) {
  if constexpr (Buffers::TELLS_WORK) {
    barrier_wait(buffers.barrier(BLOCK_FULL, count % 2), count / 2 % 2);
    if (int(load_shared_word(buffers.block(count % 2))) >= Buffers::Work::count(a)) return false;
    work.hear(buffers.work(count % 2));
    return true;
  } else {
    return current_work(a, buffers, count, work);
  }
}
template <bool ALONE = false, class Buffers>
__device__ inline void next_work(const Buffers &buffers, uint32_t &count) {
  const uint32_t barrier = buffers.barrier(BLOCK_EMPTY, count % 2);
  ALONE ? barrier_arrive(barrier) : arrive_once(barrier);
  count++;
}

// ---- the producer: a warp, or one for each side -----------------------------------------------------------

// load_columns waits until nobody reads k or v and starts the copy of these; load_rows waits for an empty stage
// and starts that of q or dout. A warp calls them, and one of its threads copies.
template <class Buffers>
__device__ inline void load_columns(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                    const Buffers &buffers, const typename Buffers::Work &work,
                                    uint32_t k_phase, int side) {
  using Kind = typename Buffers::Kind;
  using KTile = typename Buffers::KTile;
  const ColumnBlock &block = work.block;
  const int column = sequence_of(a, block.batch).first_column + work.columns.begin;
  const uint32_t barrier = buffers.barrier(K_FULL + side);
  barrier_wait(buffers.barrier(K_EMPTY + side), k_phase ^ 1);
  if (threadIdx.x % 32 != 0) return;
  if constexpr (Kind::SCALED)
    store_shared(buffers.exponent(K_FULL + side),
                 exponent_of<Kind, true>(side == K_SIDE ? a.k : a.v, block.batch, block.kv_head, column));
  barrier_expect(barrier, Buffers::K_BYTES);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_boxes<KTile>(buffers.columns(side) + part * KTile::BYTES, side == K_SIDE ? maps.k : maps.v, barrier,
                      column, block.kv_head, block.batch + part * a.batch);
}

template <class Buffers>
__device__ inline void load_rows(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                                 const StepRows &rows, int batch, int column, uint32_t step, int side) {
  using Kind = typename Buffers::Kind;
  using QTile = typename Buffers::QTile;
  const int stage = step % Buffers::STAGES;
  const int row = sequence_of(a, batch).first_row + rows.row;
  const uint32_t barrier = buffers.barrier(Q_FULL + side, stage);
  const int exponent = exponent_of<Kind, true>(side == K_SIDE ? a.q : a.dout, batch, rows.head, row);
  barrier_wait(buffers.barrier(Q_EMPTY + side, stage), step / Buffers::STAGES % 2 ^ 1);
  if (threadIdx.x % 32 != 0) return;
  if constexpr (Kind::SCALED) store_shared(buffers.exponent(Q_FULL + side, stage), exponent);
  int bias_bytes = 0;
  if constexpr (Buffers::Shape::tiles_cells)
    if (side == K_SIDE) bias_bytes = Buffers::BiasTile::bytes(a.program);
  const int keys_bytes = side == K_SIDE ? Buffers::KEYS_BYTES : 0;
  const int words_bytes = side == K_SIDE && a.program.row_words ? Buffers::WORDS_BYTES : 0;
  const int flags_bytes = side == K_SIDE && a.program.flags.words ? Buffers::FLAGS_BYTES : 0;
  if constexpr (!Buffers::general && Buffers::Shape::folds_slopes)
    if (side == K_SIDE) Buffers::Work::tell_slope(rows.slope, buffers.visit(step));
  barrier_expect(barrier,
                 Buffers::Q_BYTES + Buffers::ROW_BYTES + bias_bytes + keys_bytes + words_bytes + flags_bytes);
  if (keys_bytes > 0)
    load_bulk(buffers.keys(stage),
              Buffers::Shape::folds_slopes ? terms_of_slope(a.program.keys, batch, rows.head, rows.behind)
                                           : terms_of(a.program.keys, batch, rows.head, column),
              keys_bytes, barrier);
  if constexpr (Buffers::Shape::tiles_cells)
    if (bias_bytes > 0)
      Buffers::BiasTile::load(buffers.bias(stage), a.program, maps.bias, barrier, batch, rows.head, row,
                              column);
  if (flags_bytes > 0)
    load_flags<Buffers::Shape::block_k, Buffers::Shape::block_q>(buffers.bias(stage), a.program.flags, barrier,
                                                                 batch, rows.head, column, rows.row);
#pragma unroll
  for (int part = 0; part < Kind::PARTS; part++)
    load_boxes<QTile>(buffers.rows(side, stage) + part * QTile::BYTES, side == K_SIDE ? maps.q : maps.dout,
                      barrier, row, rows.head, batch + part * a.batch);
  if constexpr (Buffers::Shape::single_column) wait_for_launch_before();  // for shift and delta
  load_bulk(buffers.statistic(side, stage),
            (side != K_SIDE                                ? a.delta
             : Buffers::Shape::folds_slopes && rows.behind ? a.shift_behind
                                                           : a.shift) +
                int64_t(rows.position) * Buffers::Shape::block_q,
            Buffers::ROW_BYTES, barrier);
  if (words_bytes > 0)
    load_bulk(buffers.words(stage), a.program.row_words + int64_t(rows.position) * Buffers::Shape::block_q,
              words_bytes, barrier);
}

// Brings a column block's k and v to the cache.
template <class Buffers>
__device__ inline void prefetch_columns(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                        const typename Buffers::Work &work) {
  const ColumnBlock &block = work.block;
  const int column = sequence_of(a, block.batch).first_column + work.columns.begin;
  for (int part = 0; part < Buffers::Kind::PARTS; part++) {
    prefetch_boxes<typename Buffers::KTile>(maps.k, column, block.kv_head, block.batch + part * a.batch);
    prefetch_boxes<typename Buffers::KTile>(maps.v, column, block.kv_head, block.batch + part * a.batch);
  }
}

// Copies the sides from BEGIN to END of the column block of that number. steps: how many have been copied
// before.
template <int BEGIN, int END, class Buffers>
__device__ inline void load_plain_sides(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                        const Buffers &buffers, int index, uint32_t &steps, uint32_t &k_phase) {
  typename Buffers::Work work;
  if (!find_work(a, index, work)) return;
  constexpr int PREFETCHED = Buffers::Shape::most_steps_prefetched;
  if constexpr (BEGIN == K_SIDE && PREFETCHED > 0)
    if (threadIdx.x % 32 == 0 && steps > 0 && work.num_steps > 0 && work.num_steps <= PREFETCHED)
      prefetch_columns<Buffers>(a, maps, work);
  typename Buffers::Work::Step step = work.first_step(a);
  for (int i = 0; i < work.num_steps; i++, steps++, step = work.next(a, step)) {
    const StepRows rows = work.rows_of(a, step);
    if (Buffers::DOUT_FIRST && i > 0) {
#pragma unroll
      for (int side = END - 1; side >= BEGIN; side--)
        load_rows(a, maps, buffers, rows, work.block.batch, work.columns.begin, steps, side);
      continue;
    }
#pragma unroll
    for (int side = BEGIN; side < END; side++) {
      if (i == 0) load_columns(a, maps, buffers, work, k_phase, side);
      load_rows(a, maps, buffers, rows, work.block.batch, work.columns.begin, steps, side);
    }
  }
  if (work.num_steps > 0) k_phase ^= 1;
}

// Writes 0 to the dk and dv of a column block that nobody sees, a lane to each box, and waits for nothing.
template <class Buffers>
__device__ inline void leave_zeros(const fa_cuda_maps &maps, const Buffers &buffers, const ColumnBlock &block) {
  using Shape = typename Buffers::Shape;
  constexpr int ROWS = Shape::block_k / ZERO_BOX_ROWS, BOXES = ROWS * (Shape::head_dim / 64);
  static_assert(2 * BOXES <= 32 && Shape::head_dim % 64 == 0, "a warp has a lane for each");
  const int lane = threadIdx.x % 32, box = lane % BOXES;
  if (lane < 2 * BOXES)
    store_box(lane < BOXES ? maps.dk : maps.dv, buffers.zero_box(), box / ROWS * 64,
              block.k_block * Shape::block_k + box % ROWS * ZERO_BOX_ROWS, block.kv_head, block.batch);
  bulk_commit();
}

// Moves the tickets behind a column block that nobody sees on to the next heads, where others of its heads see
// no more: writers leave their zeros.
template <class Buffers>
__device__ inline void skip_unseen(const fa_cuda_arguments &a, int index) {
  if (a.skips_unseen && Buffers::leaves_zeros(a) && threadIdx.x % 32 == 0)
    atomicMax(a.tickets, next_column_heads(a, index));
}

// By one thread: tells the warp that sends dq how many steps the `count`-th column block has, when the first of
// these have been told; negative: there is no such block. And consumers, where steps may be left out.
template <class Buffers>
__device__ inline void tell_num_steps(const Buffers &buffers, uint32_t count, int num_steps) {
  store_shared(buffers.num_steps(count % 2), uint32_t(num_steps));
  barrier_arrive(buffers.barrier(STEPS_FULL, count % 2));
}
template <class Buffers>
__device__ inline int hear_num_steps(const Buffers &buffers, uint32_t count) {
  barrier_wait(buffers.barrier(STEPS_FULL, count % 2), count / 2 % 2);
  return load_shared_word(buffers.num_steps(count % 2));
}

// Tells of the next steps of a column block, up to `count`, and returns how many these are: a lane of each, or,
// where those that are hidden whole are left out, of one that is shown. steps: the number of the first one;
// before: how many have been told of the column block; seen: how many of its steps have been looked at.
template <class Buffers>
__device__ inline int tell_steps(const fa_cuda_arguments &a, const Buffers &buffers,
                                 const typename Buffers::Work &work, uint32_t steps, int finder, int before,
                                 int count, int &seen) {
  const int lane = threadIdx.x % 32;
  int told = 0;
  if constexpr (Buffers::Shape::skips_hidden_steps) {
#pragma unroll 1
    while (told < count && seen < work.num_steps) {
      const bool is_there = seen + lane < work.num_steps;
      const typename Buffers::Work::Step step = work.step_after(a, is_there ? seen + lane : 0);
      const bool shows = is_there && work.shows(a, step);
      const uint32_t shown = __ballot_sync(~0u, shows);
      const int place = told + __popc(shown & ((1u << lane) - 1));
      if (shows && place < count) work.tell_step(a, step, buffers.visit(steps + place, finder));
      told += __popc(shown);
      seen += told <= count ? 32 : __ffs(__ballot_sync(~0u, shows && place == count)) - 1;
    }
  } else {
    if (lane < count) work.tell_step(a, work.step_after(a, before + lane), buffers.visit(steps + lane, finder));
    told = count;
  }
  __syncwarp();
  return min(told, count);
}

// The same with bands. Each lane finds one of the next steps and tells of it: one at a time would take longer
// than consumers can wait. The column block is found again for every FOUND steps, as registers do not hold it
// meanwhile.
template <int BEGIN, int END, class Buffers>
__device__ inline void load_told_sides(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                       const Buffers &buffers, int index, uint32_t count, uint32_t &steps,
                                       uint32_t &k_phase) {
  using Work = typename Buffers::Work;
  constexpr int FINDER = BEGIN == K_SIDE ? 0 : 1;
  const int lane = threadIdx.x % 32;
  int num_steps = 0, seen = 0;
#pragma unroll 1
  for (int first = 0; first == 0 || first < num_steps; first += Buffers::FOUND) {
    int batch, column;
    {
      Work work;
      if (!find_work(a, index, work)) return;
      if (first == 0) num_steps = uniform(work.num_steps);
      batch = uniform(work.block.batch), column = uniform(work.columns.begin);
      if (first == 0 && num_steps > 0 && BEGIN == K_SIDE && lane == 0) prefetch_columns<Buffers>(a, maps, work);
      const int told =
          tell_steps(a, buffers, work, steps, FINDER, first, min(num_steps - first, Buffers::FOUND), seen);
      if (first == 0) {
        if constexpr (Buffers::Shape::skips_hidden_steps) num_steps = told + work.count_shown(a, seen);
        if (Buffers::TELLS_SENDER && lane == 0) tell_num_steps(buffers, count, num_steps);
        if (num_steps == 0) {
          if (work.num_steps == 0 && !work.is_hidden)
            skip_unseen<Buffers>(a, index);
          else if (Buffers::leaves_zeros(a))  // a mask hides it
            leave_zeros(maps, buffers, work.block);
          return;
        }
        const StepRows rows = Work::heard_rows(buffers.visit(steps, FINDER));
#pragma unroll
        for (int side = BEGIN; side < END; side++) {
          load_columns(a, maps, buffers, work, k_phase, side);
          load_rows(a, maps, buffers, rows, batch, column, steps, side);
        }
        k_phase ^= 1, steps++;
      }
    }
    const int num_found = min(num_steps - first, Buffers::FOUND);
#pragma unroll 1
    for (int turn = first == 0; turn < num_found; turn++, steps++) {
      const StepRows rows = Work::heard_rows(buffers.visit(steps, FINDER));
#pragma unroll
      for (int side = BEGIN; side < END; side++)
        load_rows(a, maps, buffers, rows, batch, column, steps,
                  Buffers::DOUT_FIRST ? END - 1 - (side - BEGIN) : side);
    }
  }
}

template <int BEGIN, int END, class Buffers>
__device__ inline void load_sides(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                                  int index, uint32_t count, uint32_t &steps, uint32_t &k_phase) {
  if constexpr (Buffers::general)
    load_told_sides<BEGIN, END>(a, maps, buffers, index, count, steps, k_phase);
  else
    load_plain_sides<BEGIN, END>(a, maps, buffers, index, steps, k_phase);
}

// By one thread: waits for the statistics of the rows that see the index-th column block, where they are made
// beside, and for copies, before this thread loads them. All are soon there.
template <class Buffers>
__device__ inline void await_statistics(const fa_cuda_arguments &a, int index) {
  if (Buffers::Shape::single_column || !a.rows_done) return;
  typename Buffers::Work work;
  bool are_due = look_at_count(count_of_all_rows(a)) < a.batch * a.num_heads * a.num_q_blocks;
  if constexpr (Buffers::Kind::SCALED) are_due |= !are_all_columns_there(a);
  if (are_due && find_work(a, index, work) && work.num_steps > 0) {
    const Range rows = work.rows(a);
    const int group = heads_per_kv(a);
    for (int head = work.block.kv_head * group; head < (work.block.kv_head + 1) * group; head++)
      wait_for_rows<typename Buffers::Shape>(a, work.block.batch, head, rows);
    if constexpr (Buffers::Kind::SCALED)
      wait_for_columns(a, work.block.batch, work.block.kv_head, work.columns.begin);
  }
  fence_async_global();
}

// Takes the next free column block and hands it to the other warps; returns false where there is none. Blocks
// are taken by number, so one that waits for a lower number waits for a block that runs or has finished. A
// block is taken only at the last step, as another multiprocessor may be idle; but with bands, where column
// blocks may be short, when the last step's rows are on their way, so that k and v are ahead, too. Where there
// is a single column block, nobody waits for another, and the `count`-th is known.
template <class Buffers>
__device__ inline bool take_work(const fa_cuda_arguments &a, const Buffers &buffers, uint32_t count,
                                 uint32_t steps, uint32_t k_phase, int &index) {
  constexpr bool KNOWN = Buffers::Shape::single_column;
  auto hand_over = [&] {
    store_shared(buffers.block(count % 2), uint32_t(index));
    barrier_arrive(buffers.barrier(BLOCK_FULL, count % 2));
  };
  if (threadIdx.x % 32 == 0) {
    if constexpr (!Buffers::general && !KNOWN) {
      if constexpr (Buffers::Shape::leaves_by_map)  // which holds v longer
        barrier_wait(buffers.barrier(DOUT_EMPTY, steps % 2), steps / 2 % 2 ^ 1);
      else
        barrier_wait(buffers.barrier(V_EMPTY), k_phase ^ 1);
    }
    index = KNOWN ? blockIdx.x + count * gridDim.x : atomicAdd(a.tickets, 1);
    if constexpr (Buffers::general)
      if (a.num_early) index = column_block_in_phases(a, index);
    index = number_to_hand_on<typename Buffers::Work>(a, index);
    await_statistics<Buffers>(a, index);
    barrier_wait(buffers.barrier(BLOCK_EMPTY, count % 2), count / 2 % 2 ^ 1);
    if constexpr (!Buffers::TELLS_WORK) hand_over();
  }
  index = uniform(index);
  if constexpr (Buffers::TELLS_WORK) {
    typename Buffers::Work work;
    const bool is_there = find_work(a, index, work);
    if (threadIdx.x % 32 == 0) {
      if (is_there) work.tell(buffers.work(count % 2));
      hand_over();
    }
  }
  const bool is_there = index < Buffers::Work::count(a);
  if (Buffers::TELLS_SENDER && !is_there && threadIdx.x % 32 == 0) tell_num_steps(buffers, count, -1);
  return is_there;
}

// Takes column blocks until none is left, and copies the sides up to END.
template <int END, class Buffers>
__device__ inline void produce(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers) {
  uint32_t steps = 0, k_phase = 0;
  int index = 0;
  for (uint32_t count = 0; take_work(a, buffers, count, steps, k_phase, index); count++)
    load_sides<K_SIDE, END>(a, maps, buffers, index, count, steps, k_phase);
  // Main ends behind its statistics, so that what waits for it waits for both.
  if (!Buffers::Shape::single_column && a.rows_done) wait_for_launch_before();
  if (Buffers::HAS_ZEROS) bulk_wait_read<0>();
}

// ---- dq to memory: one warp for each share -----------------------------------------------------------
//
// What consumers have stored is this warp's to see behind the barrier that it meets them at, and here it is
// made visible to bulk copies: consumers would stand at that fence for a tenth of a step.

// By a warp: waits for the report of the index-th row block that has all of its dq, and returns that, and
// whether that is 0 because nobody sees it.
__device__ inline RowBlock reported_row_block(const fa_cuda_arguments &a, int index, bool &is_unseen) {
  int report = 0;
  if (threadIdx.x % 32 == 0)
    while ((report = look_at_count(a.ended + index)) == 0) let_others_run();
  report = uniform(report);
  is_unseen = report < 0;
  return row_block_at(a, abs(report) - 1);
}

// Where there is a single column block, consumers put dq into its buffer as elements, a QTile.
template <class Buffers>
__device__ inline void send_whole_dq(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                     const Buffers &buffers) {
  using Shape = typename Buffers::Shape;
  const int row = threadIdx.x % 32 * 16;  // of the row block: a lane for every 16 rows
  typename Buffers::Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    typename Buffers::Work::Step step = work.first_step(a);
    for (int i = 0; i < work.num_steps; i++, step = work.next(a, step)) {
      named_barrier_wait(DQ_WRITTEN, Shape::num_consumers * WARPGROUP + 32);
      fence_async();
      if (row < Shape::block_q) {
        const Sequence sequence = sequence_of(a, work.block.batch);
        store_boxes<typename Buffers::QTile>(maps.out, buffers.dq(), row,
                                             sequence.first_row + work.q_block_of(step) * Shape::block_q + row,
                                             step.head, work.block.batch);
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
      if (row == 0) barrier_arrive(buffers.barrier(DQ_SENT));
    }
  }
}

// Whether column blocks are left out that keys hide: a warp asks once.
template <class Buffers>
__device__ inline bool leaves_blocks_out(const fa_cuda_arguments &a) {
  return Buffers::Work::may_be_hidden && all_say(hides_column_blocks(a));
}

// Adds dq of the next steps, up to a warp's, to their sums: a lane has the position of one, and place_of() the
// place of its addition in the order. Reading a count from memory is slow, and so is a fence after additions.
// So each lane reads the count for one step ahead of time, and reads it again only after the previous step,
// whose fence it shares; where the order is free, eight steps share a fence, or all.
template <class Buffers, class PlaceOf>
__device__ inline __attribute__((always_inline)) void send_steps(const fa_cuda_arguments &a,
                                                                 const Buffers &buffers, int share,
                                                                 bool in_order, int num_steps, int position,
                                                                 bool hides_keys, PlaceOf place_of) {
  using Shape = typename Buffers::Shape;
  constexpr int SHARES = Shape::dq_shares, THREADS = Shape::num_consumers / SHARES * WARPGROUP + 32;
  constexpr bool REPORTS = Buffers::general && Shape::num_writers > 0;
  const int lane = threadIdx.x % 32, uncounted = in_order ? 0 : Shape::num_writers > 0 ? 7 : 31;
  float *sum = dq_sum_of<Shape, (Shape::num_writers > 0)>(a, position);
  int32_t *order = a.dq_order + position;
  int place = 1, now = look_at_count(order);
  if (in_order) place += place_of() * SHARES + share;
  // With bands, the count before this lane's addition: the last addition's is that of all. It takes long to
  // come, and is looked at when the lanes behind this one count.
  const int last_count =
      REPORTS ? num_additions<Shape, Buffers::general>(a, row_block_at(a, position), hides_keys) : 0;
  int count = 0;
  fence_async_global();
#pragma unroll 1
  for (int step = 0; step < num_steps; step++) {
    if (lane == step && now < place) {
      wait_for_count(order, place);
      fence_async_global();
    }
    named_barrier_wait(DQ_WRITTEN + share, THREADS);
    if (lane == step) {
      fence_async();
      add_bulk(sum, buffers.dq(share), Buffers::DQ_BYTES);
      bulk_commit();
      bulk_wait_read<0>();
      barrier_arrive(buffers.barrier(DQ_SENT, share));
    }
    __syncwarp();
    if (in_order) {
      if (lane == step + 1 && now < place) now = look_at_count<true>(order);
      __syncwarp();
    }
    if ((step & uncounted) == uncounted || step == num_steps - 1) {
      if (REPORTS && count == last_count) report_end(a, position);
      count = 0;
      bulk_wait_done<0>();
      fence_counts();
      fence_async_global();  // for the count read above; after the addition it would wait
      if ((step & ~uncounted) <= lane && lane <= step) {
        if constexpr (REPORTS)
          count = in_order ? (count_on<true>(order), place) : atomicAdd(order, 1);
        else
          count_on<true>(order);
      }
    }
  }
  if (REPORTS && count == last_count) report_end(a, position);
}

template <class Buffers>
__device__ inline void send_dq(const fa_cuda_arguments &a, const Buffers &buffers, int share) {
  const int lane = threadIdx.x % 32;
  const bool hides_keys = Buffers::general && leaves_blocks_out<Buffers>(a);
  typename Buffers::Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    for (int first = 0; first < work.num_steps; first += 32) {
      const int num_steps = min(work.num_steps - first, 32);
      const typename Buffers::Work::Step here = work.step_after(a, first + min(lane, num_steps - 1));
      send_steps(a, buffers, share, a.in_order, num_steps, work.position_of(a, here), hides_keys,
                 [&] { return work.place_of(a, here); });
    }
  }
}

// The same of steps that are told.
template <bool IN_ORDER, class Buffers>
__device__ inline void send_told_dq(const fa_cuda_arguments &a, const Buffers &buffers, int share) {
  using Work = typename Buffers::Work;
  const int lane = threadIdx.x % 32;
  const bool hides_keys = leaves_blocks_out<Buffers>(a);
  uint32_t steps = 0;
  for (uint32_t blocks = 0;; next_work(buffers, blocks)) {
    int steps_left = uniform(hear_num_steps(buffers, blocks));
    if (steps_left < 0) return;
#pragma unroll 1
    while (steps_left > 0) {
      // Of steps that consumers have come to before they left dq of the one before these.
      const int num_steps = min(steps_left, Buffers::FOUND), own = min(lane, num_steps - 1);
      const uint32_t told = buffers.visit(steps + own);
      const int position = Work::heard_position(told);
      auto place_of = [&] {
        if (Buffers::Shape::skips_hidden_steps) return Work::heard_place(told);
        Work work;
        find_work(a, load_shared_word(buffers.block(blocks % 2)), work);
        return work.place_of(a, work.step_after(a, work.num_steps - steps_left + own));
      };
      send_steps(a, buffers, share, IN_ORDER, num_steps, position, hides_keys, place_of);
      steps += num_steps, steps_left -= num_steps;
    }
  }
}

// ---- the gradient by a bias of cells: two warps ------------------------------------------------------------
//
// They read ds as it lies there for dq, rounded as it is for all products: consumers, who have it in f32, would
// take twice as long for a step, as they have it column by column.

// Stores four neighbours of a row as they are, or adds them to f32 sums.
template <class Element>
__device__ inline void leave_four(Element *to, float2 packed) {
  *reinterpret_cast<float2 *>(to) = packed;
}
template <class Element>
__device__ inline void leave_four(float *to, float2 packed) {
  const float2 first = unpack(Element(), __float_as_uint(packed.x)),
               second = unpack(Element(), __float_as_uint(packed.y));
  add_four(to, {first.x, first.y, second.x, second.y});
}

// By a warp: leaves ds [block_q, 64] of a step, whose rows begin with `first_row`, half a warp a row.
template <class T, class Tile, class Element>
__device__ inline void leave_box(const fa_cuda_arguments &a, uint32_t box, int batch, int head, int first_row,
                                 int first_column) {
  const fa_cuda_cells &dbias = a.program.dbias;
  const int lane = threadIdx.x % 16, begin = threadIdx.x % 32 / 16, column = first_column + lane * 4;
  if (column >= a.window.seqlen_k) return;
  T *to = numbers_of<T>(dbias, batch, head, first_row + begin) + column;
  const int end = min(Tile::ROWS, a.window.seqlen_q - first_row);
#pragma unroll 4
  for (int row = begin; row < end; row += 2, to += 2 * dbias.stride_row)
    leave_four<Element>(to, load_shared_pair(box + Tile::offset(row, lane / 2) + lane % 2 * 8));
}

template <class Buffers>
__device__ inline void leave_cells(const fa_cuda_arguments &a, const Buffers &buffers, int leaver) {
  using Work = typename Buffers::Work;
  using Tile = typename Buffers::DsTile;
  using Element = typename Buffers::Kind::Element;
  static_assert(Tile::BOXES == Buffers::Shape::num_leavers, "a box each");
  const fa_cuda_cells &dbias = a.program.dbias;
  const bool leaves = dbias.data && a.program.dbias_step != FA_CUDA_CELLS_ADD_ROWS;
  Work work;
  for (uint32_t blocks = 0, steps = 0; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    const int batch = work.block.batch, column = work.columns.begin + leaver * 64;
#pragma unroll 1
    for (const uint32_t end = steps + work.num_steps; steps != end; steps++) {
      const int stage = steps % Buffers::STAGES;
      barrier_wait(buffers.barrier(DS_FULL, stage), steps / Buffers::STAGES % 2);
      const StepRows rows = Work::heard_rows(buffers.visit(steps));
      const uint32_t box = buffers.ds(stage) + leaver * Tile::BOX_BYTES;
      if (leaves && dbias.dtype == FA_DTYPE_F32)
        leave_box<float, Tile, Element>(a, box, batch, rows.head, rows.row, column);
      else if (leaves)
        leave_box<Element, Tile, Element>(a, box, batch, rows.head, rows.row, column);
      arrive_once(buffers.barrier(DS_EMPTY, stage));
    }
  }
}

// ---- dq from its sum: two warps, the writers ---------------------------------------------------------

// Leaves zeros of one column block more, if nobody sees it, by a writer; next: its number among all.
template <class Buffers>
__device__ inline void leave_next_zeros(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                        const Buffers &buffers, int &next) {
  const int head = next / a.num_k_blocks, batch = head / a.num_kv_heads;
  const fa_cuda_block_plan plan = plan_at<false>(a, batch, next % a.num_k_blocks);
  if (plan.num_visits == 0) leave_zeros(maps, buffers, {batch, head % a.num_kv_heads, plan.block});
  next += gridDim.x * Buffers::Shape::num_writers;
}

// Takes the next free row block, and writes its dq when all column blocks have added to it. Its sum then serves
// the row block num_sums further on, so that dq_sum stays in cache and column blocks seldom wait for it. A
// piece is half of the 64 rows and 64 columns that one consumer has of dq.
template <class Buffers>
__device__ inline void write_dq(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                                int writer) {
  using Shape = typename Buffers::Shape;
  using Dq = DqShare<Shape>;
  using Tile = typename Buffers::PieceTile;
  static_assert(Dq::WARP_ROWS == 16 && Dq::WARP_COLUMNS == 64 && Tile::ROWS == 32, "a piece is two warps'");
  const int lane = threadIdx.x % 32;
  const int num_positions = a.batch * a.num_heads * a.num_q_blocks;
  const uint32_t from = buffers.sum(writer), tile = buffers.piece(writer);
  const uint32_t full = buffers.barrier(SUM_FULL, writer);
  const bool hides_keys = leaves_blocks_out<Buffers>(a);
  if constexpr (Buffers::general) report_unseen<Shape>(a, writer, hides_keys);
  // Zeros are left between row blocks, so that other copies do not wait long behind them.
  int next_zeros = blockIdx.x * Shape::num_writers + writer,
      end_zeros = Buffers::leaves_zeros(a) ? a.batch * a.num_kv_heads * a.num_k_blocks : 0;
  for (uint32_t phase = 0;;) {
    if constexpr (Buffers::HAS_ZEROS)
      if (next_zeros < end_zeros) leave_next_zeros(a, maps, buffers, next_zeros);
    const int index = uniform(lane == 0 ? atomicAdd(a.tickets + 1, 1) : 0);
    if (index >= num_positions) break;
    RowBlock mine;
    [[maybe_unused]] bool is_unseen = false;
    if constexpr (Buffers::general)
      mine = reported_row_block(a, index, is_unseen);
    else
      mine = finished_row_block_of(a, index, Buffers::Work::num_parts(a));
    const Sequence sequence = sequence_of(a, mine.batch);
    const Range rows = row_range<Shape>(sequence, mine.q_block);
    const int position = position_of(a, mine);
    const bool sums_again = position + a.num_sums < num_positions;
    float *sum = dq_sum_of<Shape, true>(a, position);
    if (lane == 0) {
      if constexpr (!Buffers::general)
        wait_for_count(a.dq_order + position, 1 + num_additions<Shape, false>(a, mine, hides_keys));
      fence_async_global();
    }
    auto send = [&](int piece) {
      const int row = sequence.first_row + rows.begin + (Dq::ACROSS == 1 ? piece : piece % 2) * 32;
      for (int i = 0; i < 32; i += 16)
        store_boxes<Tile>(maps.out, tile, i, row + i, mine.head, mine.batch,
                          Dq::ACROSS == 1 ? 0 : piece / 2 * 64);
      bulk_commit();
    };
    constexpr int PIECES = 2 * Shape::num_consumers;
    if (is_unseen) {  // its sum has remained 0
      if (lane == 0) bulk_wait_read<0>();
      __syncwarp();
      for (int i = lane; i < Tile::BYTES / 16; i += 32) store_shared(tile + i * 16, make_uint4(0, 0, 0, 0));
      fence_async();
      __syncwarp();
      for (int piece = 0; piece < PIECES && lane == 0; piece++) send(piece);
    }
    for (int piece = 0; piece < PIECES && !is_unseen; piece++, phase ^= 1, sum += Buffers::PIECE_BYTES / 4) {
      if (lane == 0) {
        bulk_wait_read<0>();
        barrier_expect(full, Buffers::PIECE_BYTES);
        load_bulk(from, sum, Buffers::PIECE_BYTES, full);
      }
      __syncwarp();
      barrier_wait(full, phase);
#pragma unroll 2
      for (int i = 0; i < 8; i++) {  // of 16 rows and columns
        const uint32_t first = from + (i * 64 + lane) * 16, second = first + 32 * 16;
        const float4 x = load_shared_four(first), y = load_shared_four(second);
        store_shared(first, make_uint4(0, 0, 0, 0));
        store_shared(second, make_uint4(0, 0, 0, 0));
        put_rows<typename Buffers::Kind::Element, Tile, 2>(
            tile, i / 4 * 16, {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}}, {a.scale, a.scale}, i % 4 * 2);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        if (sums_again) store_bulk(sum, from, Buffers::PIECE_BYTES);
        send(piece);
      }
    }
    if (lane == 0 && sums_again) {
      if (!is_unseen) bulk_wait_done<0>();
      count_on(a.dq_order + position + a.num_sums);
      if constexpr (Buffers::general)
        report_if_unseen<Shape>(a, row_block_at(a, position + a.num_sums), hides_keys);
    }
  }
  if constexpr (Buffers::HAS_ZEROS)
    while (next_zeros < end_zeros) leave_next_zeros(a, maps, buffers, next_zeros);
  bulk_wait_read<0>();
}

// ---- the consumers -----------------------------------------------------------------------------------

// Writes the transpose of an operand of convert(), whose first element is [row, column], to a tile.
template <class T, int KT>
__device__ inline void store_transposed(uint32_t tile, int row, int column, const uint32_t (&operand)[KT][4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = tile + T::offset(column + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < KT; k++) store_matrices<true>(to + k * 16 * 128, operand[k]);
}

// Hides a warp's scores, whose columns begin with `column`, where the band does. told: where tell_step has put
// the visit.
template <class Work, int NT>
__device__ inline void hide_told(float (&scores)[1][NT][4], const Work &work, uint32_t told, int column) {
  const Visit visit = work.heard_visit(told);
  mask_transposed_scores<true, 1, NT>(scores, visit.band,
                                      {work.block.batch, visit.head, visit.rows.begin, column});
}

// Where a step is, as a program asks: its band, the place of a warp's part, and how distances go.
struct ProgramStep {
  fa_band band;
  Place at;
  Distance distance;

  template <class Work, class Told>
  __device__ ProgramStep(const Work &work, const Told &told, float slope, int column) {
    const Visit heard = work.heard_visit(told);
    band = heard.band;
    at = {work.block.batch, heard.head, heard.rows.begin, column};
    distance = {slope, distance_of_origin(band)};
  }
};

// Turns a warp's products k q^T, whose columns begin with `column`, into scores.
template <class Kind, class Work, int NT>
__device__ inline void make_told_scores(float (&scores)[1][NT][4], const fa_cuda_score &score, const Work &work,
                                        uint32_t told, bool see_all, int column, float unscale = 1) {
  finish_scores<Kind, 1, NT>(scores, score, unscale);
  if (!see_all) hide_told(scores, work, told, column);
}

// Waits for a row block and starts a consumer's transposed product with it: dp = v dout^T, or the scores k q^T,
// which are rounded as the forward's are and may begin at the shift, or at what `begin` makes of that; then
// what `more` starts.
template <int SIDE, Beginning BEGINNING = AT_ZERO, class Buffers, int NT, class More = NothingMore,
          class Begin = NothingMore>
__device__ inline void start_transposed(float (&product)[1][NT][4], const Buffers &buffers, int first_column,
                                        uint32_t step, const fa_cuda_score &score = {}, float per_shift = 0,
                                        More more = More(), Begin begin = Begin()) {
  using Kind = typename Buffers::Kind;
  barrier_wait(buffers.barrier(Q_FULL + SIDE, step % 2), step / 2 % 2);
  constexpr bool FROM_SHIFT = BEGINNING != AT_ZERO;
  if constexpr (FROM_SHIFT)
    set_to_shift<BEGINNING>(product, score, Buffers::general ? per_shift : per_shift_of<Kind>(score),
                            buffers.shift(step % 2), Buffers::Work::heard_due(buffers.visit(step)));
  begin();
  multiply<Kind, Buffers::Shape::head_dim / 16, SIDE == K_SIDE>(
      product[0], BoxOperand<typename Buffers::KTile, true>(buffers.columns(SIDE), first_column),
      BoxOperand<typename Buffers::QTile, true>(buffers.rows(SIDE, step % 2)), FROM_SHIFT, more);
}

__device__ inline float4 four_of(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }

// Writes scale * sum, whose first element is [column, d] of the column block, to dk or dv, or its part of
// these.
template <class Kind, class Work, int DT>
__device__ inline void store_columns(const fa_cuda_arguments &a, const Work &work, const fa_tensor &to,
                                     int column, int d, const float (&sum)[1][DT][4], float scale) {
  using Io = typename Kind::Io;
  Sequence sequence = sequence_of(a, work.block.batch);
  column += work.columns.begin;
  if constexpr (Work::may_be_part)
    if (a.num_column_parts > 1) {
      sequence.batch += work.part * a.batch;
      store_accumulator<float, 1, DT>(column_of<float>(to, sequence, work.block.kv_head, column) + d,
                                      to.stride_row, work.columns.end - column, a.head_dim - d, sum, scale);
      return;
    }
  store_accumulator<Io, 1, DT>(column_of<Io>(to, sequence, work.block.kv_head, column) + d, to.stride_row,
                               work.columns.end - column, a.head_dim - d, sum, scale);
}

// Writes a consumer's dk and dv, whose first element is [column, 0] of the current column block. Finding the
// block again keeps it out of registers meanwhile.
template <class Buffers, int DT>
__device__ inline void store_dk_and_dv(const fa_cuda_arguments &a, const Buffers &buffers, uint32_t blocks,
                                       typename Buffers::Work &work, int column, const float (&dk)[1][DT][4],
                                       const float (&dv)[1][DT][4], float per_dv = 1) {
  using Kind = typename Buffers::Kind;
  consumers_work(a, buffers, blocks, work);
  store_columns<Kind>(a, work, a.dv, column, 0, dv, per_dv);
  store_columns<Kind>(a, work, a.dk, column, 0, dk, a.scale);
}

// ---- statistics and copies of f32 -----------------------------------------------------------------------

// The row blocks of FA_CUDA_SCALE_ROWS rows, by their positions.
template <class Shape>
__device__ inline Range positions_of(const fa_cuda_arguments &a, const ScaledRows &rows) {
  const int first = rows.first_row / Shape::block_q, begin = position_of(a, {rows.batch, rows.head, first});
  return {begin, begin + min(a.num_q_blocks - first, int(FA_CUDA_SCALE_ROWS / Shape::block_q))};
}

// By a team: copies rows of q and dout, makes the statistics of these rows, whose sums become 0, and tells of
// them.
template <class Shape, class Row, class Team>
__device__ inline void prepare_rows(Team &team, const Row &row, const fa_cuda_splits &splits,
                                    const ScaledRows &rows) {
  const fa_cuda_arguments &a = row.a;
  const fa_cuda_split &q = splits.tensors[0], &dout = splits.tensors[3];
  const Range positions = positions_of<Shape>(a, rows);
  float4 *dq_sum = reinterpret_cast<float4 *>(dq_sum_of<Shape>(a, positions.begin));
  const int sum_size = (positions.end - positions.begin) * Shape::block_q * Shape::head_dim;
#pragma unroll 4
  for (int i = team.thread; i < sum_size / 4; i += Team::THREADS) __stcs(dq_sum + i, make_float4(0, 0, 0, 0));
  typename Team::Numbers x;
  team.template load<true>(x, dout, rows, a.head_dim);
  PaddedRow mine = {rows.batch, rows.head, rows.first_row + team.row(0)};
  const typename Row::Io *o = row.part_of(a.o, mine);
  float sums[Team::PASSES];
#pragma unroll
  for (int i = 0; i < Team::PASSES; i++, o += Team::ROWS_AT_ONCE * a.o.stride_row)
    sums[i] = row.template dot<true>(
        o, x[i], rows.first_row + team.row(i) < dout.seqlen ? a.head_dim - team.column() : 0);
  const float sum = sum_four<Row::LANES>(sums);
  team.put(x, dout, rows, splits.num_parts);
  mine.row = rows.first_row + team.row(sum_of_lane<Row::LANES>());
  const bool is_read = row.is_read(mine);
  const float lse = row.lse_of(mine, is_read);
  if (row.hides_q(is_read, lse, sum))
    for (int i = row.lane % (Row::LANES / 4); i < Row::LANES; i += Row::LANES / 4) row.look_at_q(mine, i);
  if (row.lane % (Row::LANES / 4) == 0 && mine.row < a.padded_rows)
    row.finish(padded_index_of(a, mine), mine, is_read, lse, is_read ? sum : 0);
  team.template copy<true>(splits, q, rows);
  team.meet();
  if (const int told = positions.begin + team.thread; told < positions.end) {
    fence_counts();
    tell_of_statistics<Shape>(a, told);
  }
}

// What statistics_beside does, of f32, with the copies of q and dout, and of k and v: of one key/value head
// after the other, as main begins them. All tensors are aligned.
template <class Kind, class Shape>
__global__ void __launch_bounds__(FA_CUDA_BESIDE_THREADS, 1)
    prepare_beside(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_dlse dlse,
                   const __grid_constant__ fa_cuda_splits splits) {
  using Row = RowStatistics<Kind, Shape>;
  using Team = SplitTeam<Row::LANES>;
  const Row row{a, dlse};
  Team team;
  let_dependents_start();
  const int num_columns = a.k.num_scales, num_rows = a.q.num_scales,
            a_head = num_columns + heads_per_kv(a) * num_rows, count = a.batch * a.num_kv_heads * a_head;
#pragma unroll 1
  for (int index = place_of_team(team); index < count; index += num_teams<Team>()) {
    const int batch = index / a_head / a.num_kv_heads, kv_head = index / a_head % a.num_kv_heads,
              place = index % a_head - num_columns;
    if (place < 0)
      copy_columns(team, a, splits, splits.tensors[1], splits.tensors[2],
                   {batch, kv_head, (place + num_columns) * FA_CUDA_SCALE_ROWS});
    else
      prepare_rows<Shape>(
          team, row, splits,
          {batch, kv_head * heads_per_kv(a) + place / num_rows, place % num_rows * FA_CUDA_SCALE_ROWS});
  }
}

// ---- the kernel --------------------------------------------------------------------------------------------

// The grid has a block of threads for each multiprocessor. Kernels differ in the Consumer, a warpgroup's state:
//   using Buffers              is a CommonBuffers with dq(share), from which dq is sent, and, for writers,
//                              sum(writer) and piece(writer)
//   Consumer(a, maps, buffers, i)   is number i of Shape::num_consumers
//   consume()                  goes through all column blocks
template <class Consumer>
__device__ __forceinline__ void run_backward(const fa_cuda_arguments &a, const fa_cuda_maps &maps) {
  using Buffers = typename Consumer::Buffers;
  using Shape = typename Buffers::Shape;
  const Buffers buffers = set_up_buffers<Buffers>(a);
  const int warp = uniform(threadIdx.x / 32), share = warp - Shape::num_warps - 1;
  if (warp < Shape::num_warps) {
    take_registers<Shape::consumer_registers>();
    Consumer(a, maps, buffers, warp / 4).consume();
  } else {
    give_registers<Shape::other_registers>();
    if (warp == Shape::num_warps) produce<NUM_SIDES>(a, maps, buffers);
    if (share >= 0 && share < Shape::dq_shares) {
      if constexpr (Shape::single_column)
        send_whole_dq(a, maps, buffers);
      else if constexpr (Buffers::TELLS_SENDER) {
        const int known = Shape::dq_shares == 1 ? 0 : share;  // ptxas does not know that the only one is 0
        a.in_order ? send_told_dq<true>(a, buffers, known) : send_told_dq<false>(a, buffers, known);
      } else
        send_dq(a, buffers, share);
    }
    if constexpr (Shape::num_leavers > 0)
      if (share >= Shape::dq_shares) leave_cells(a, buffers, share - Shape::dq_shares);
    if constexpr (Shape::num_writers > 0)
      if (share >= Shape::dq_shares) write_dq(a, maps, buffers, share - Shape::dq_shares);
  }
}

template <class Consumer>
__global__ void __launch_bounds__(Consumer::Buffers::Shape::num_threads, 1)
    backward(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  run_backward<Consumer>(a, maps);
}

// Several in one: where masks turn out to hide nothing, or to be causal, what the plain kernel of Bare does,
// but causal ones beside a program. Statistics that are made beside it were launched when that was known.
template <class Consumer, class Bare>
__global__ void __launch_bounds__(Consumer::Buffers::Shape::num_threads, 1)
    backward_that_asks(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  if (!a.rows_done) wait_for_launch_before();
  if (all_say(hides_nothing(a))) return run_backward<Bare>(a, maps);
  if constexpr (!Bare::Buffers::Shape::whole_program)
    if (all_say(is_causal(a))) return run_backward<typename Bare::AsCausal>(a, maps);
  run_backward<Consumer>(a, maps);
}

// ---- the table ---------------------------------------------------------------------------------------------

// A row of kernel `main`, whose shared memory is Buffers.
template <class Buffers>
constexpr fa_cuda_kernel row_of_kernel(const char *name, const void *main) {
  using Kind = typename Buffers::Kind;
  using Shape = typename Buffers::Shape;
  static_assert(Buffers::BYTES <= 227 << 10, "a multiprocessor has no more for a block");
  fa_cuda_kernel row = {.name = name,
                        .bucket = Shape::head_dim,
                        .block_q = Shape::block_q,
                        .block_k = Shape::block_k,
                        .num_threads = Shape::num_threads,
                        .shared_bytes = Buffers::BYTES,
                        .takes = (takes_of_forms(Buffers::general, Shape::forms) |
                                  takes_of_program(Shape::whole_program, Shape::sums)) &
                                 ~(Shape::none_behind ? FA_CUDA_NEEDS_COLUMNS_BEHIND : 0u),
                        .row_warps = 1,
                        .mapped = true,
                        .persistent = true,
                        .begins_early = true,
                        .single_column = Shape::single_column,
                        .splits_heads = Shape::splits_heads,
                        .folds = Shape::folds,
                        .halves = Shape::drops && !Kind::SCALED,
                        .skips_hidden_keys = Shape::skips_hidden_keys,
                        .main = main,
                        .statistics = address_of_kernel(statistics<Kind, RowsOf<Shape>>),
                        .finish_threads = Buffers::Dq::NUM_WARPS * 32};
  if constexpr (Kind::SCALED)
    row.beside = address_of_kernel(prepare_beside<Kind, RowsOf<Shape>>);
  else if constexpr (!Shape::single_column)
    row.beside = address_of_kernel(statistics_beside<Kind, RowsOf<Shape>>);
  if constexpr (Shape::num_writers == 0 && !Shape::single_column)
    row.finish_dq = address_of_kernel(finish_dq<Kind, typename Buffers::Dq>);
  return row;
}
template <class Consumer>
constexpr fa_cuda_kernel row(const char *name, int least_columns = 0) {
  fa_cuda_kernel row = row_of_kernel<typename Consumer::Buffers>(name, address_of_kernel(backward<Consumer>));
  row.least_columns = least_columns;
  return row;
}
template <class Consumer, class Bare>
constexpr fa_cuda_kernel row_that_asks(const char *name) {
  using Buffers = typename Consumer::Buffers;
  using Shape = typename Buffers::Shape;
  using BareShape = typename Bare::Buffers::Shape;
  static_assert(Shape::block_q == BareShape::block_q && Shape::block_k == BareShape::block_k &&
                    Shape::num_threads == BareShape::num_threads && Bare::Buffers::BYTES <= Buffers::BYTES &&
                    std::is_same<RowsOf<Shape>, RowsOf<BareShape>>::value,
                "they share maps, statistics and what is launched");
  fa_cuda_kernel row = row_of_kernel<Buffers>(name, address_of_kernel(backward_that_asks<Consumer, Bare>));
  row.asks = true;
  return row;
}

}  // namespace hopper
}  // namespace fa
