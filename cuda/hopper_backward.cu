// The backward pass on Hopper. A block of threads stays on its multiprocessor and takes column blocks in turn:
// block_k columns of one key/value head, with all row blocks that see them in every query head of the group.
// Scores and dp are computed transposed, [block_k, block_q], 64 columns a consumer warpgroup, so that p and ds
// are operands of dv and dk in the registers that hold them; ds goes through shared memory only for dq, which
// sums over all columns. A producer warp copies row blocks ahead of the consumers, another warp adds their dq
// to its sum in memory (see backward.cuh), and two writers turn that sum into dq.
//
// One step takes a row block, in the terms of flash_attention.h, with ^T for transposed:
//   s^T = k q^T   dp^T = v dout^T   p^T = exp(s^T - lse)   ds^T = p^T * (dp^T - delta)
//   dv += p^T dout   dk += ds^T q   dq += ds k
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// The common buffers, two stages of ds, dq as memory has it, and for each writer a piece of dq's sum and the
// same piece of dq.
template <class Kind, class Shape, bool GENERAL>
struct BackwardBuffers : CommonBuffers<Kind, Shape, GENERAL> {
  using Common = CommonBuffers<Kind, Shape, GENERAL>;
  using Dq = DqShare<Shape>;
  using DsTile = BoxTile<Shape::block_q, Shape::block_k>;
  using PieceTile = BoxTile<32, 64>;
  static constexpr int PIECE_BYTES = 2 * PieceTile::BYTES;
  static constexpr int DQ_AT = Common::STAGES * DsTile::BYTES, SUM_AT = DQ_AT + Common::DQ_BYTES;
  static constexpr int PIECE_AT = SUM_AT + Shape::num_writers * PIECE_BYTES;
  static constexpr int BYTES = Common::OWN_AT + PIECE_AT + Shape::num_writers * PieceTile::BYTES;

  __device__ uint32_t ds(int stage) const { return this->own(stage * DsTile::BYTES); }
  __device__ uint32_t dq(int = 0) const { return this->own(DQ_AT); }
  __device__ uint32_t sum(int writer) const { return this->own(SUM_AT + writer * PIECE_BYTES); }
  __device__ uint32_t piece(int writer) const { return this->own(PIECE_AT + writer * PieceTile::BYTES); }
};

// The consumers' work is one function with lambdas: members of a struct gave the same instructions in an order
// that was 3 % slower.
template <class Kind, class Shape, bool GENERAL>
__device__ inline __attribute__((always_inline)) void consume_blocks(
    const fa_cuda_arguments &a, const fa_cuda_maps &maps, BackwardBuffers<Kind, Shape, GENERAL> buffers,
    int consumer) {
  using Buffers = BackwardBuffers<Kind, Shape, GENERAL>;
  using Work = typename Buffers::Work;
  using Step = typename Work::ConsumerStep;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = typename Buffers::Dq;
  using Rows = RowNumbers<Shape::places_lanes>;
  constexpr int NT = Shape::block_q / 8, DT = Shape::head_dim / 8;
  constexpr int Q_STEPS = Shape::block_q / 16, K_STEPS = Shape::block_k / 16;
  static_assert(Dq::MT == 1, "one product of a warpgroup");
  // Whether ds is stored before dv is waited for: at head_dim 64 too many registers would be in use.
  constexpr bool HURRIES_DS =
      Shape::head_dim == 128 && (GENERAL ? Shape::program == DROPOUT : !Shape::none_behind);
  // Whether hidden scores begin at -inf, which is seen to while other products run: not where what is added
  // comes later, and beside slopes and dropout it is no gain.
  constexpr bool HIDES_EARLY =
      GENERAL && Shape::beginning == AT_SHIFT && (!Shape::program || (Shape::folds && Shape::has_keys));
  constexpr float PER_DV = Shape::drops ? 2 : 1;  // see make_transposed_p_by_program

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[1][DT][4], dv[1][DT][4], scores[1][NT][4], ds[1][NT][4], dq[1][Dq::NT][4];
  uint32_t p_operand[1][Q_STEPS][4], ds_operand[1][Q_STEPS][4];

  // Stages and phases follow from these counts: of column blocks, of those that have steps, and of steps.
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  // Told that there is no softcap the kernel of slopes spills less; that of keys at 64 would be 2 % slower.
  constexpr Forms KNOWN = Shape::forms == NO_SOFTCAP && !Shape::folds_slopes ? ANY_FORM : Shape::forms;
  fa_cuda_score known = KNOWN == ANY_FORM ? a.score : fa_cuda_score(known_score<KNOWN>(a.score));
  if constexpr (Shape::program) known.factor *= a.program.factor;  // with all that multiplies a product
  const fa_cuda_score &score = Shape::program || KNOWN != ANY_FORM ? known : a.score;  // see known_score
  float per_shift = GENERAL && Shape::from_shift ? per_shift_of<Kind>(score) : 0;
  if constexpr (GENERAL) forget(per_shift);     // or ptxas divides in every step
  [[maybe_unused]] fa_words column_words = {};  // of dropout: those of the lane's keys
  // Of the steps' head, where there is a program.
  HeadSums head_sums;
  [[maybe_unused]] ColumnSums column_sums;
  [[maybe_unused]] const bool adds_rows =
      Shape::sums && Shape::has_keys && a.program.dbias_step == FA_CUDA_CELLS_ADD_ROWS;
  [[maybe_unused]] float slope = 0, addends[2] = {0, 0};  // these of the lane's keys
  int program_head = -1;
  // Hides what a mask with a flag a score does in the step whose rows are in the current stage.
  auto hide_by_flags = [&] {
    if constexpr (Shape::has_flags) {
      if (Shape::program && !a.program.flags.words) return;
      LaneFlags<NT> flags;
      flags.hear(buffers.bias(steps % 2), consumer * PART + warp_row);
      flags.template hide<1>(scores[0]);
    }
  };
  auto start_scores = [&](const Work &work) {
    start_transposed<K_SIDE, Shape::beginning>(
        scores, buffers, consumer * 64, steps, score, per_shift,
        [&] {
          if constexpr (Shape::folds)
            multiply_one_more<typename Kind::Element>(
                scores[0], buffers.left_of_terms(steps % 2, consumer * PART), buffers.terms());
        },
        [&] {
          if constexpr (HIDES_EARLY) {
            const uint32_t told = buffers.visit(steps);
            const int column = work.columns.begin + consumer * 64;
            if (!Work::see_all(Work::heard_flags(told, consumer)))
              hide_told(scores, work, told, column + warp_row);
          }
        });
  };
  auto start_dp = [&] { start_transposed<V_SIDE>(ds, buffers, consumer * 64, steps); };
  // Of all rows, hence of both consumers.
  auto wait_for_ds = [&](uint32_t step) { barrier_wait(buffers.barrier(DS_FULL, step % 2), step / 2 % 2); };
  auto start_dq = [&](uint32_t step) {
    multiply<Kind, K_STEPS>(
        dq[0], BoxOperand<DsTile, true>(buffers.ds(step % 2), Dq::ACROSS == 1 ? consumer * 64 : 0),
        BoxOperand<KTile, false>(buffers.k(), Dq::ACROSS == 1 ? 0 : consumer * Dq::WARP_COLUMNS), false);
  };
  auto slopes_of = [&](int n) { return four_of(scores[0][n]); };
  auto finish_dq = [&](uint32_t step) {
    arrive_once(buffers.barrier(DS_EMPTY, step % 2));
    barrier_wait(buffers.barrier(DQ_SENT), (step + 1) % 2);  // the previous one
    if constexpr (Shape::single_column) {
      put_rows<typename Kind::Element, QTile>(buffers.dq(), Dq::row(), dq[0], {a.scale, a.scale},
                                              Dq::column() / 8);
    } else {
#pragma unroll
      for (int n = 0; n < Dq::NT; n++) store_shared(buffers.dq() + dq_offset<Dq>(0, n) * 4, dq[0][n]);
    }
    named_barrier_arrive(DQ_WRITTEN, Shape::num_consumers * WARPGROUP + 32);
  };

  // Adds the sums of the warp's columns to those of a head in memory, and begins anew.
  [[maybe_unused]] auto leave_columns = [&](const Work &work, int head) {
    column_sums.leave(a, {work.block.batch, head, 0, work.columns.begin + consumer * 64 + warp_row});
    column_sums = ColumnSums();
  };
  // Adds what the steps of a head gave to its sums.
  auto leave_head = [&](const Work &work) {
    if (Shape::sums && program_head >= 0) {
      head_sums.add(a, work.block.batch, program_head,
                    work.block.k_block * (Shape::num_threads / 32) + threadIdx.x / 32);
      if (!Shape::folds && adds_rows) leave_columns(work, program_head);
    }
    head_sums = HeadSums();
  };

  [[maybe_unused]] auto enter_head = [&](const Work &work, const Place &at) {
    leave_head(work);
    program_head = at.head;
    if constexpr (Shape::has_slopes) slope = number_of_head(a.program, FA_CUDA_ALIBI_SLOPES, at, 0);
    if (Shape::has_keys && a.program.keys.addends)
      read_two_addends(addends, a.program.keys, at.batch, at.head, at.column);
  };

  // Whether the step's columns are seen by all of its rows, where somebody tells; heard while products run.
  [[maybe_unused]] bool see_all = false, crossed = false;
  [[maybe_unused]] typename Work::Due due = {};
  auto hear = [&] {
    if constexpr (GENERAL) {
      const uint32_t flags = Work::heard_flags(buffers.visit(steps), consumer);
      see_all = Work::see_all(flags);
      if constexpr (Shape::folds_slopes) crossed = Work::are_crossed(flags);
      if constexpr (!Shape::from_shift) due = Work::heard_due(buffers.visit(steps));
    } else if constexpr (Shape::folds_slopes) {
      crossed = Work::are_crossed(Work::heard_flags(buffers.visit(steps), consumer));
      if constexpr (!Shape::from_shift) due = Work::heard_due(buffers.visit(steps));
    }
  };

  // Writes scale * a sum, dv or dk, by way of the warp's rows of v, when v is no longer read.
  auto leave = [&](const CUtensorMap &map, const float(&sum)[1][DT][4], float scale, const Work &work) {
    const int row = consumer * 64 + warp_row;
    put_rows<typename Kind::Element, KTile, DT>(buffers.columns(V_SIDE), row, sum[0], {scale, scale});
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      store_boxes<KTile>(map, buffers.columns(V_SIDE), row, work.columns.begin + row, work.block.kv_head,
                         work.block.batch);
      bulk_commit();
    }
  };

  // A step begins with its scores computed and its dp running, and ends with those of the next step. dq lags a
  // step behind, so that consumers need not wait for each other's ds: one multiplies while the other finishes
  // its scores. (With more products running across the loop's end, ptxas runs none in the background.) The only
  // step of a column block counts as its last and multiplies its dq twice: an instance of its own would make
  // ptxas spill numbers of the loop.
  auto do_step = [&](const Work &work, Step step, auto is_first, auto is_last, bool alone = false)
      __attribute__((always_inline)) {
    constexpr bool IS_FIRST = decltype(is_first)::value, IS_LAST = decltype(is_last)::value;
    const auto visit = work.consumers_visit(a, step, buffers.visit(steps));
    const int first_column = work.columns.begin + consumer * 64;
    const int stage = steps % 2;
    if (Shape::forgets_addresses) forget(buffers.base);
    [[maybe_unused]] float of_each = 0;
    [[maybe_unused]] auto add_crossing = [&](const Visit &seen) {
      if constexpr (Shape::folds_slopes)
        add_behind(scores[0], Work::heard_slope(buffers.visit(steps)) / exponent_of_unit<Kind>(score),
                   distance_of_origin(seen.band) + seen.rows.begin - (first_column + warp_row));
    };
    if constexpr (Shape::adds_late) {
      ProgramStep it(work, visit, slope, first_column + warp_row);
      if (it.at.head != program_head) enter_head(work, it.at), it.distance.slope = slope;
      // As finish_scores does, where there may be a softcap.
      if (Shape::forms != USUAL_FORM && a.score.form == FA_CUDA_SCORE_NEGATED)
        for_each_element<1, NT>(scores, [](int, int, float &x) { x = -x; });
      of_each = add_transposed_terms<Shape::program>(scores[0], a.program, it.distance, it.at, addends);
      if constexpr (Shape::has_cells)
        add_cells<typename Kind::Io, typename Buffers::BiasTile, true>(
            scores[0], a.program, has_slopes<Shape::program>(a.program) ? 1 : a.program.factor,
            buffers.bias(stage), 0, consumer * 64 + warp_row);
      if (!see_all) mask_transposed_scores<true, 1, NT>(scores, it.band, it.at);
    } else if constexpr (GENERAL) {
      make_told_scores<Kind>(scores, score, work, visit, HIDES_EARLY || see_all, first_column + warp_row);
      if (Shape::folds_slopes && crossed) add_crossing(work.heard_visit(visit));
    } else {
      const Range columns = {first_column, first_column + 64};
      const Place at = {work.block.batch, visit.head, visit.rows.begin, first_column + warp_row};
      if constexpr (Shape::folds_slopes && !Shape::none_behind) {
        finish_scores<Kind, 1, NT>(scores, score, 1);
        const bool hides = !see_all_in_band<false>(a, visit.band, visit.rows, columns);
        if (hides || crossed) {  // both are rare, and one branch costs less than two
          if (hides) mask_transposed_scores<false, 1, NT>(scores, visit.band, at);
          if (crossed) add_crossing(visit);
        }
      } else {
        make_scores_in_band<Kind, true, false, 1, NT>(scores, a, score, visit.band, visit.rows, columns, at);
      }
    }
    hide_by_flags();
    if constexpr (Shape::adds_late || Shape::drops)
      make_transposed_p_by_program<Kind, Shape::drops>(
          scores, p_operand, a, {SharedWords(buffers.words(stage)), column_words}, Rows(buffers.shift(stage)),
          of_each, begin_at_shift<Shape::beginning>(score));
    else
      make_transposed_p<Kind, Shape::beginning>(scores, p_operand, score, Rows(buffers.shift(stage)), 1, due);
    if constexpr (Shape::keeps_pace && !IS_FIRST)
      if (!alone) wait_for_ds(steps - 1);
    auto wait_to_store = [&] { barrier_wait(buffers.barrier(DS_EMPTY, stage), steps / 2 % 2 ^ 1); };
    if (Shape::asks_early) wait_to_store();
    wgmma_wait<0>(ds[0]);
    if (IS_LAST && !Shape::leaves_by_map) arrive_once(buffers.barrier(V_EMPTY));
    multiply<Kind, Q_STEPS>(dv[0], p_operand, BoxOperand<QTile, false>(buffers.dout(stage)), true);
    if constexpr (Shape::program && !Shape::folds)
      make_transposed_ds_by_program<Kind, Shape::drops>(ds, scores, Rows(buffers.delta(stage)));
    else
      make_transposed_ds<Kind>(ds, slopes_of, Rows(buffers.delta(stage)));
    if constexpr (Shape::sums && (Shape::has_slopes || Shape::has_keys))
      if (adds_rows || a.program.head_sums[FA_CUDA_ALIBI_SLOPES]) {
        const ProgramStep it(work, visit, slope, first_column + warp_row);  // heard again, not kept
        if (Shape::folds_slopes && it.at.head != program_head) leave_head(work), program_head = it.at.head;
        take_gradients<Shape::program>(ds, a, it.at, it.distance, head_sums);
        if (adds_rows) {
          column_sums.add(ds);
          // Where terms are folded there are no registers that would hold them until the head's last step.
          if (Shape::folds) leave_columns(work, it.at.head);
        }
      }
    convert<Kind>(ds_operand, ds);
    multiply<Kind, Q_STEPS>(dk[0], ds_operand, BoxOperand<QTile, false>(buffers.q(stage)), true);
    auto finish_dv = [&] {
      wgmma_wait<1>(dv[0], p_operand);
      arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    };
    if (!HURRIES_DS) finish_dv();
    if (!Shape::asks_early) wait_to_store();
    store_transposed<DsTile>(buffers.ds(stage), consumer * 64 + warp_row, 0, ds_operand[0]);
    fence_async();
    arrive_once(buffers.barrier(DS_FULL, stage));
    if (HURRIES_DS) finish_dv();

    if constexpr (!IS_FIRST) {
      if (!Shape::keeps_pace || alone) wait_for_ds(steps - !alone);
      start_dq(steps - !alone);
    }
    steps++;
    if constexpr (!IS_LAST) start_scores(work);
    Work found;
    if (IS_LAST && Shape::leaves_by_map && a.maps_columns) {
      consumers_work(a, buffers, blocks, found);  // again, so that no register holds it meanwhile
      // Behind this nobody reads the consumer's part of v any more.
      named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);
      leave(maps.dv, dv, PER_DV, found);
    }
    wgmma_wait<!IS_LAST>(dk[0], dq[0], ds_operand);
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    if (!IS_FIRST && !alone) finish_dq(steps - 2);
    if constexpr (!IS_LAST) {
      start_dp();
      hear();
      wgmma_wait<1>(scores[0]);
    } else {
      wait_for_ds(steps - 1);
      start_dq(steps - 1);
      if (Shape::leaves_by_map && a.maps_columns) {
        if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
        __syncwarp();
        leave(maps.dk, dk, a.scale, found);
      }
      wgmma_wait<0>(dq[0]);
      arrive_once(buffers.barrier(K_EMPTY));
      finish_dq(steps - 1);
    }
  };

  auto agreed = [](bool it_is_so) { return Shape::votes ? all_say(it_is_so) : it_is_so; };
  Work work;
  for (; agreed(consumers_work(a, buffers, blocks, work)); next_work(buffers, blocks)) {
    program_head = -1;
    if (Shape::drops && a.program.dropout_threshold > 0)
      column_words = lanes_column(a.program, work.columns.begin + consumer * 64 + warp_row);
    set_zero<1, DT>(dk);
    set_zero<1, DT>(dv);
    if constexpr (Shape::skips_hidden_steps) work.num_steps = uniform(hear_num_steps(buffers, blocks));
    if (agreed(work.num_steps > 0)) {
      barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
      start_scores(work);
      barrier_wait(buffers.barrier(V_FULL), busy_blocks % 2);
      start_dp();
      hear();
      wgmma_wait<1>(scores[0]);
      busy_blocks++;
      Step step = work.consumers_first();
      int steps_left = work.num_steps - 1;
      const bool alone = agreed(steps_left == 0);
      if (!alone) {
        do_step(work, step, std::true_type(), std::false_type());
        for (;;) {
          step = work.consumers_next(a, step);
          if (agreed(--steps_left == 0)) break;
          do_step(work, step, std::false_type(), std::false_type());
        }
      }
      do_step(work, step, std::false_type(), std::true_type(), alone);
      if constexpr (Shape::program && Shape::sums && (!Shape::folds || Shape::folds_slopes)) leave_head(work);
      if (Shape::leaves_by_map) {
        if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
        arrive_once(buffers.barrier(V_EMPTY));
      }
    }
    if (work.num_steps == 0 ? !Buffers::leaves_zeros(a) : !Shape::leaves_by_map || !a.maps_columns)
      store_dk_and_dv(a, buffers, blocks, work, consumer * 64 + warp_row, dk, dv, PER_DV);
  }
}

template <class Kind, class Shape, bool GENERAL>
struct BackwardConsumer {
  using Buffers = BackwardBuffers<Kind, Shape, GENERAL>;
  using AsCausal = BackwardConsumer<Kind, typename Shape::AsCausal, GENERAL>;
  const fa_cuda_arguments &a;
  const fa_cuda_maps &maps;
  Buffers buffers;
  const int consumer;

  __device__ BackwardConsumer(const fa_cuda_arguments &a, const fa_cuda_maps &maps, const Buffers &buffers,
                              int consumer)
      : a(a), maps(maps), buffers(buffers), consumer(consumer) {}
  __device__ void consume() { consume_blocks<Kind, Shape, GENERAL>(a, maps, buffers, consumer); }
};

// Plain shapes that are a part of another kernel; the first has a row, too.
constexpr int PLAIN_128 = FROM_SHIFT | LEAVES_BY_MAP | SPLITS_HEADS | PLACES_LANES;
using Bare128 = BackwardShape<128, 64, 1, 2, PLAIN_128>;
using BareFlags128 =
    BackwardShape<128, 64, 1, 2, ASKS_EARLY | LEAVES_BY_MAP | PLACES_LANES | VOTES | COMPUTES_HIDDEN, FLAGS>;

}  // namespace hopper
}  // namespace fa

// A shape has a plain kernel, one for a single column block, and a general one that takes every problem.
#define ROW(rest, general, ...)                                                                           \
  fa::hopper::row<                                                                                        \
      fa::hopper::BackwardConsumer<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>, general>>( \
      "cuda/sm90/" FA_QUOTE(FA_KIND) rest)

// Of a general kernel with a plain shape's code for masks that hide nothing, which flags may do score by score,
// or are causal.
#define ROW_THAT_ASKS(rest, bare, ...)                                                                \
  fa::hopper::row_that_asks<                                                                          \
      fa::hopper::BackwardConsumer<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>, true>, \
      fa::hopper::BackwardConsumer<fa::kinds::FA_KIND, fa::hopper::bare, false>>(                     \
      "cuda/sm90/" FA_QUOTE(FA_KIND) rest)
// Of a general kernel for rows that see so many columns.
#define ROW_FROM(rest, least_columns, ...)                                                             \
  fa::hopper::row<                                                                                     \
      fa::hopper::BackwardConsumer<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>, true>>( \
      "cuda/sm90/" FA_QUOTE(FA_KIND) rest, least_columns)

// A consumer's thread needs head_dim registers (dk, dv) and 1.25 * block_q (scores, dp and p) for its arrays.
// The kernels take up to 227 KiB of shared memory, which is all there is.
using namespace fa::hopper;
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_, FA_KIND)[] = {
    // bucket, block_q, dq's shares, writers, traits, program
    ROW("/d64/single", false, 64, 128, 1, 0, SINGLE_COLUMN | LEAVES_BY_MAP | PLACES_LANES),
    ROW("/d64/single/forms", false, 64, 128, 1, 0, SINGLE_COLUMN | FORMS | LEAVES_BY_MAP),
    ROW("/d128/single", false, 128, 64, 1, 0, SINGLE_COLUMN | FROM_SHIFT | ASKS_EARLY | LEAVES_BY_MAP),
    ROW("/d128/single/forms", false, 128, 64, 1, 0, SINGLE_COLUMN | FROM_SHIFT | FORMS | LEAVES_BY_MAP),
    ROW("/d64", false, 64, 128, 1, 2, LEAVES_BY_MAP | PLACES_LANES | VOTES),
    ROW("/d64/forms", false, 64, 128, 1, 2, FORMS | LEAVES_BY_MAP | SPLITS_HEADS | VOTES),
    ROW("/d128", false, 128, 64, 1, 2, PLAIN_128),
    ROW("/d128/forms", false, 128, 64, 1, 2, FROM_SHIFT | FORMS | LEAVES_BY_MAP | SPLITS_HEADS),
    ROW("/d64/general", true, 64, 128, 1, 2, LEAVES_BY_MAP | PLACES_LANES),
    ROW("/d64/general/forms", true, 64, 128, 1, 2, FORMS | LEAVES_BY_MAP | PLACES_LANES),
    ROW_THAT_ASKS("/d128/general", Bare128, 128, 64, 1, 2, FROM_SHIFT | ASKS_EARLY | LEAVES_BY_MAP),
    ROW("/d128/general/forms", true, 128, 64, 1, 2, FROM_SHIFT | FORMS | ASKS_EARLY | LEAVES_BY_MAP),
    ROW("/d64/keys", false, 64, 128, 1, 2, LEAVES_BY_MAP | PLACES_LANES | VOTES, KEYS),
    ROW("/d64/keys/general", true, 64, 128, 1, 2, FORMS | LEAVES_BY_MAP, KEYS),
    ROW("/d64/keys/sums", false, 64, 128, 1, 2, SUMS | LEAVES_BY_MAP | PLACES_LANES | VOTES, KEYS),
    ROW("/d64/slopes", false, 64, 128, 1, 2, LEAVES_BY_MAP | PLACES_LANES | VOTES, SLOPES),
    ROW("/d64/slopes/general", true, 64, 128, 1, 2, FORMS | LEAVES_BY_MAP | PLACES_LANES, SLOPES),
    ROW("/d64/slopes/sums", false, 64, 128, 1, 2, SUMS | ASKS_EARLY | LEAVES_BY_MAP | PLACES_LANES | VOTES,
        SLOPES),
    ROW("/d64/slopes/sums/general", true, 64, 128, 1, 2, SUMS | PLACES_LANES | VOTES, SLOPES),
    ROW("/d64/terms", true, 64, 128, 1, 2, SUMS | LEAVES_BY_MAP | PLACES_LANES | VOTES, SLOPES | KEYS),
    ROW("/d64/flags", true, 64, 128, 1, 2, ASKS_EARLY | LEAVES_BY_MAP | PLACES_LANES, FLAGS),
    ROW("/d64/cells", false, 64, 64, 1, 0, ASKS_EARLY | LEAVES_BY_MAP | VOTES, CELLS),
    ROW("/d64/cells/general", true, 64, 64, 1, 0, ASKS_EARLY | LEAVES_BY_MAP | VOTES, CELLS),
    ROW("/d64/cells/sums", true, 64, 64, 1, 0, SUMS | ASKS_EARLY | LEAVES_BY_MAP, CELLS),
    ROW("/d64/cells/forms", true, 64, 64, 1, 0, FORMS | SUMS, CELLS),
    ROW("/d64/dropout", true, 64, 128, 1, 2, LEAVES_BY_MAP | PLACES_LANES, DROPOUT),
    ROW_FROM("/d64/dropout/keys/long", 2048, 64, 128, 1, 2, SUMS | LEAVES_BY_MAP | PLACES_LANES,
             KEYS | DROPOUT),
    ROW("/d64/dropout/keys", true, 64, 128, 1, 2, SUMS | LEAVES_BY_MAP | PLACES_LANES | COMPUTES_HIDDEN,
        KEYS | DROPOUT),
    ROW("/d64/program", true, 64, 64, 1, 0, FORMS | SUMS, WHOLE_PROGRAM),
    ROW("/d128/keys", false, 128, 64, 1, 2, FROM_SHIFT | SUMS | LEAVES_BY_MAP | SPLITS_HEADS, KEYS),
    ROW("/d128/keys/general", true, 128, 64, 1, 2, FROM_SHIFT | SUMS | ASKS_EARLY | LEAVES_BY_MAP, KEYS),
    ROW("/d128/slopes/causal", false, 128, 64, 1, 2, FROM_SHIFT | LEAVES_BY_MAP | SPLITS_HEADS | NONE_BEHIND,
        SLOPES),
    ROW("/d128/slopes", false, 128, 64, 1, 2, FROM_SHIFT | LEAVES_BY_MAP | PLACES_LANES | VOTES, SLOPES),
    ROW("/d128/slopes/general", true, 128, 64, 1, 2, FROM_SHIFT | FORMS | LEAVES_BY_MAP, SLOPES),
    ROW("/d128/slopes/sums", false, 128, 64, 1, 2, SUMS | ASKS_EARLY | LEAVES_BY_MAP | PLACES_LANES | VOTES,
        SLOPES),
    ROW("/d128/slopes/sums/general", true, 128, 64, 1, 2, FORMS | SUMS | PLACES_LANES | VOTES, SLOPES),
    ROW("/d128/terms", false, 128, 64, 1, 2, FROM_SHIFT | SUMS | LEAVES_BY_MAP | PLACES_LANES, SLOPES | KEYS),
    ROW("/d128/terms/general", true, 128, 64, 1, 2, FROM_SHIFT | FORMS | SUMS | LEAVES_BY_MAP | PLACES_LANES,
        SLOPES | KEYS),
    ROW_THAT_ASKS("/d128/flags", BareFlags128, 128, 64, 1, 2, ASKS_EARLY | LEAVES_BY_MAP | PLACES_LANES, FLAGS),
    ROW("/d128/cells", true, 128, 64, 1, 0, ASKS_EARLY | LEAVES_BY_MAP, CELLS),
    ROW("/d128/cells/sums", true, 128, 64, 1, 0, SUMS | ASKS_EARLY | LEAVES_BY_MAP, CELLS),
    ROW("/d128/cells/forms", true, 128, 64, 1, 0, FORMS | SUMS, CELLS),
    ROW("/d128/dropout", false, 128, 64, 1, 2, FROM_SHIFT | LEAVES_BY_MAP | SPLITS_HEADS | PLACES_LANES,
        DROPOUT),
    ROW("/d128/dropout/general", true, 128, 64, 1, 2, FROM_SHIFT | LEAVES_BY_MAP | VOTES, DROPOUT),
    ROW("/d128/dropout/keys", true, 128, 64, 1, 2, FROM_SHIFT | LEAVES_BY_MAP, KEYS | DROPOUT),
    ROW("/d128/program", true, 128, 64, 1, 0, FORMS | SUMS, WHOLE_PROGRAM),
    {},
};
