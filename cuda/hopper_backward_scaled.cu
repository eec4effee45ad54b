// The backward pass of f32 on Hopper: operands are scaled sums of f16 parts (see kinds.cuh), and every step's
// products go into a fresh accumulator, which ordinary additions add to dk and dv. Column blocks, transposed
// scores and the warps around the consumers are those of hopper_backward.cu. Here consumers never wait for each
// other: each multiplies the ds of its own 64 columns with their k, transposed too, and sends this share of dq
// by itself. Only its consumer reads ds, which shares its place with that share of dq.
//
// One step takes a row block and a consumer's columns, in the terms of flash_attention.h:
//   s^T = k q^T   dp^T = v dout^T   p^T = exp(s^T - lse)   ds^T = p^T * (dp^T - delta)
//   dv += p^T dout   dk += ds^T q   dq^T += k^T ds^T
//
// Compiled once for every scaled kind: -DFA_KIND=f32 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// A consumer's dq^T [head_dim, block_q]: a product gives 64 rows, 16 to a warp. (dq_offset counts the warps of
// all consumers, whose shares follow one another.)
template <int COLUMNS_, int ROWS_>
struct DqTransposed {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, MT = COLUMNS / 64, NT = ROWS / 8, NUM_WARPS = 4;
};
template <int COLUMNS, int ROWS, class Io>
__device__ inline void store_dq(DqTransposed<COLUMNS, ROWS>, Io *to, int64_t stride_row, int num_rows,
                                int num_cols, float (&dq)[COLUMNS / 64][ROWS / 8][4], float scale) {
  for_each_element<COLUMNS / 64, ROWS / 8>(dq, [&](int i, int row, float &x) {
    const int d = i / 16 * 64 + threadIdx.x / 32 * 16 + i % 16;
    if (row < num_rows && d < num_cols) to[row * stride_row + d] = scale * x;
  });
}

// The common buffers, and the ds and then the dq of each consumer.
template <class Kind, class Shape, bool GENERAL>
struct BackwardBuffers : CommonBuffers<Kind, Shape, GENERAL> {
  using Common = CommonBuffers<Kind, Shape, GENERAL>;
  using Dq = DqTransposed<Shape::head_dim, Shape::block_q>;
  using DsTile = BoxTile<Shape::block_q, 64>;
  static constexpr int BYTES = Common::OWN_AT + Shape::dq_shares * Common::DQ_BYTES;
  static_assert(Kind::PARTS * DsTile::BYTES <= Common::DQ_BYTES, "ds lies where dq is written");

  __device__ uint32_t dq(int consumer) const { return this->own(consumer * Common::DQ_BYTES); }
};

// A hardware barrier after DQ_WRITTEN of each share, where the warps of a consumer meet.

// The exponent by which a consumer scales its ds: by what is finite of it.
template <int NT>
__device__ inline int exponent_of_largest(const float (&ds)[1][NT][4], uint32_t maxima, int consumer) {
  auto largest_of = [&](auto magnitude) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) largest = fmaxf(largest, magnitude(ds[0][n][i]));
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (threadIdx.x % 32 == 0) store_shared(maxima + threadIdx.x / 32 % 4 * 4, bits);
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);
    const float4 all = load_shared_four(maxima);
    return fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
  };
  float largest = largest_of([](float x) { return fabsf(x); });
  if (__builtin_expect(largest == INFINITY, 0)) {
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);  // all have read
    largest = largest_of([](float x) { return isfinite(x) ? fabsf(x) : 0; });
  }
  return scaling_exponent(__float_as_uint(largest));
}

template <class Kind, class Shape, bool GENERAL>
struct BackwardConsumer {
  using Buffers = BackwardBuffers<Kind, Shape, GENERAL>;
  using Work = typename Buffers::Work;
  using Step = typename Work::ConsumerStep;
  using QTile = typename Buffers::QTile;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = typename Buffers::Dq;
  static constexpr int NT = Shape::block_q / 8, DT = Shape::head_dim / 8, CHUNKS = DT / NT;
  static constexpr int Q_STEPS = Shape::block_q / 16, P_EXPONENT = SCALED_EXPONENT;
  static_assert(FA_CUDA_SCALE_ROWS % Shape::block_q == 0 && FA_CUDA_SCALE_ROWS % Shape::block_k == 0,
                "one scale a block");

  const fa_cuda_arguments &a;
  Buffers buffers;
  const int consumer;
  const int warp_row = threadIdx.x / 32 % 4 * 16;
  const Never never;
  float dk[1][DT][4], dv[1][DT][4], scores[1][NT][4], ds[1][NT][4], fresh[Dq::MT][NT][4];
  uint32_t p_operand[Kind::PARTS][Q_STEPS][4], ds_operand[Kind::PARTS][Q_STEPS][4];
  // Stages and phases follow from these counts: of column blocks, of those that have steps, and of steps.
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  // Of the steps' head, where there is a program: its number, what it adds to the lane's two keys, its slope,
  // and what its steps give.
  int program_head;
  float addends[2], slope = 0;
  HeadSums head_sums;
  fa_words column_words;  // of dropout: those of the lane's two keys

  __device__ BackwardConsumer(const fa_cuda_arguments &a, const fa_cuda_maps &, const Buffers &buffers,
                              int consumer)
      : a(a), buffers(buffers), consumer(consumer), never{a.batch < 0} {}

  __device__ void start_scores() { start_transposed<K_SIDE>(scores, buffers, consumer * 64, steps); }
  __device__ void start_dp() { start_transposed<V_SIDE>(ds, buffers, consumer * 64, steps); }

  // A step adds to dv, and then to dk, in chunks of block_q columns, which take turns in the registers of dq's
  // products.
  __device__ void start_chunk(int i, int stage) {
    float(&product)[NT][4] = fresh[i % Dq::MT];
    const BoxOperand<QTile, false> rows(i < CHUNKS ? buffers.dout(stage) : buffers.q(stage),
                                        i % CHUNKS * Shape::block_q);
    if (i < Dq::MT)
      multiply<Kind, Q_STEPS>(product, p_operand, rows, false);
    else if (i < CHUNKS)
      multiply<Kind, Q_STEPS>(product, p_operand, rows, never);
    else
      multiply<Kind, Q_STEPS>(product, ds_operand, rows, never);
  }
  __device__ void add_chunk(float (&sum)[1][DT][4], int i, float unscale) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float &x = sum[0][i % CHUNKS * NT + n][j];
        x = fmaf(unscale, fresh[i % Dq::MT][n][j], x);
      }
  }
  // Adds all chunks of a step, and starts the next step's scores after the last one.
  template <bool IS_LAST>
  __device__ void add_chunks(int stage, float of_dv, float of_dk) {
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
      const int left = 2 * CHUNKS - 1 - i;
      wgmma_wait(left < Dq::MT ? left + !IS_LAST : Dq::MT - 1, fresh[i % Dq::MT]);
      if (i == CHUNKS - 1) {
        registers_in_use(p_operand);
        arrive_once(buffers.barrier(DOUT_EMPTY, stage));
      }
      if (i < CHUNKS)
        add_chunk(dv, i, of_dv);
      else
        add_chunk(dk, i, of_dk);
      if (left >= Dq::MT) start_chunk(i + Dq::MT, stage);
      if (left == Dq::MT && !IS_LAST) start_scores();
    }
    registers_in_use(ds_operand);
    arrive_once(buffers.barrier(Q_EMPTY, stage));
  }

  __device__ void start_dq() {
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
      multiply<Kind, 4>(fresh[m], BoxOperand<KTile, false>(buffers.k() + consumer * 64 * 128, m * 64),
                        BoxOperand<DsTile, true>(buffers.dq(consumer)), false);
  }
  __device__ void finish_dq(float unscale) {
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);  // nobody reads ds any more
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fresh[m][n][i] * unscale;
        store_shared(buffers.dq(0) + dq_offset<Dq>(m, n) * 4, x);
      }
  }
  __device__ void hand_over_dq() {
    fence_async();
    named_barrier_arrive(DQ_WRITTEN + consumer, WARPGROUP + 32);
  }

  __device__ int exponent(int full, int stage = 0) const {
    return int(load_shared_word(buffers.exponent(full, stage)));
  }

  // Until the dq of the step before has been sent from where ds goes.
  __device__ void wait_to_store() const { barrier_wait(buffers.barrier(DQ_SENT, consumer), (steps + 1) % 2); }
  // Writes ds, scaled by 2^exponent_ds, as an operand, and to shared memory.
  __device__ void put_ds(int exponent_ds) {
    convert<Kind>(ds_operand, ds, power_of_two(exponent_ds));
    if (!Shape::asks_early) wait_to_store();
#pragma unroll
    for (int part = 0; part < Kind::PARTS; part++)
      store_transposed<DsTile>(buffers.dq(consumer) + part * DsTile::BYTES, warp_row, 0, ds_operand[part]);
    fence_async();
  }

  __device__ bool drops() const { return Shape::drops && a.program.dropout_threshold > 0; }

  // As make_transposed_p and make_transposed_ds, with dropout: of what is dropped p's operand is 0, and p
  // stands negative where the scores were. What the others gain is left to dv, and to dp.
  __device__ void make_dropped_p(const fa_cuda_score &score, int stage) {
    const TransposedDraws draw = {SharedWords(buffers.words(stage)), column_words};
    fa_words draws[2];
    make_transposed_p<Kind>(scores, score, RowNumbers(buffers.shift(stage)), NoShiftDue(),
                            [&](int n, const float(&p)[4], const float(&)[4]) {
                              if (n % 2 == 0) draw(draws, n);
                              float left[4];
#pragma unroll
                              for (int i = 0; i < 4; i++) {
                                const bool it_stays = stays(draws[i % 2].x[i / 2], n % 2, a.program);
                                left[i] = it_stays ? p[i] : 0, scores[0][n][i] = it_stays ? p[i] : -p[i];
                              }
#pragma unroll
                              for (int half = 0; half < 2; half++)
                                convert_pair<Kind>(p_operand, n, half, left[half * 2], left[half * 2 + 1],
                                                   1 << P_EXPONENT);
                            });
  }
  __device__ void make_dropped_ds(int stage, float unscale) {
    const RowNumbers delta(buffers.delta(stage));
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float2 row_delta = delta[n];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float p = scores[0][n][i], dp = p < 0 ? 0 : ds[0][n][i] * unscale;
        ds[0][n][i] = ds_of(fabsf(p), dp, i % 2 ? row_delta.y : row_delta.x);
      }
    }
  }

  __device__ bool adds_keys() const {
    return Shape::has_keys && (Shape::program == KEYS || a.program.keys.addends);
  }
  // Adds what the steps of a head gave to the warp's sums.
  __device__ void leave_head(const Work &work) {
    if (!Shape::sums || program_head < 0) return;
    head_sums.add(a, work.block.batch, program_head,
                  work.block.k_block * (Shape::num_threads / 32) + threadIdx.x / 32);
    head_sums = HeadSums();
  }
  __device__ void enter_head(const Work &work, const Place &at) {
    leave_head(work);
    program_head = at.head;
    if constexpr (Shape::has_slopes) slope = number_of_head(a.program, FA_CUDA_ALIBI_SLOPES, at, 0);
    if (adds_keys()) read_two_addends(addends, a.program.keys, at.batch, at.head, at.column);
  }

  // Adds what the program does to the scores of a step, whose columns begin with `column` for the warp.
  __device__ void add_program(const Work &work, uint32_t told, int stage, int column) {
    const StepRows rows = Work::heard_rows(told);
    const Place at = {work.block.batch, rows.head, rows.row, column};
    if (at.head != program_head) enter_head(work, at);
    if (adds_keys())
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[0][n][i] = with_addend(scores[0][n][i], addends[i / 2]);
    if (has_slopes<Shape::program>(a.program))
      add_transposed_slopes(scores[0], ProgramStep(work, told, slope, column).distance, at);
    if constexpr (Shape::has_cells)
      if (reads_cells(a.program)) add_transposed_cells(scores[0], a, at);
    if constexpr (Shape::has_flags)
      if (a.program.flags.words) {
        LaneFlags<NT> flags;
        flags.hear(buffers.bias(stage), consumer * PART + warp_row);
        flags.template hide<1>(scores[0]);
      }
  }

  // Leaves what the step's ds gives by what the program adds.
  __device__ void leave_gradients(const Work &work, uint32_t told, int column) {
    const bool gives_bias = a.program.dbias.data,
               adds_rows = gives_bias && a.program.dbias_step == FA_CUDA_CELLS_ADD_ROWS;
    if (!gives_bias && !a.program.head_sums[FA_CUDA_ALIBI_SLOPES]) return;
    const ProgramStep it(work, told, slope, column);
    take_gradients<Shape::program>(ds, a, it.at, it.distance, head_sums);
    if (adds_rows) {
      ColumnSums sums;
      sums.add(ds);
      sums.leave(a, it.at);
    } else if (gives_bias) {
      leave_transposed_cells(ds[0], a, it.at);
    }
  }

  // A step begins with its scores computed and its dp running, and ends with those of the next step.
  template <bool IS_LAST>
  __device__ void do_step(const Work &work, Step step, bool is_first) {
    const auto visit = work.consumers_visit(a, step, buffers.visit(steps));
    const int first_column = work.columns.begin + consumer * 64, stage = steps % 2;
    decltype(auto) score = known_score<Shape::forms>(a.score);
    if (Shape::forgets_addresses) forget(buffers.base);
    if constexpr (GENERAL)
      make_told_scores<Kind>(scores, score, work, visit, Work::see_all(Work::heard_flags(visit, consumer)),
                             first_column + warp_row,
                             power_of_two(-exponent(Q_FULL, stage) - exponent(K_FULL)));
    else
      make_scores_in_band<Kind, true, false, 1, NT>(
          scores, a, score, visit.band, visit.rows, {first_column, first_column + 64},
          {work.block.batch, visit.head, visit.rows.begin, first_column + warp_row},
          power_of_two(-exponent(Q_FULL, stage) - exponent(K_FULL)));
    if constexpr (Shape::whole_program) add_program(work, visit, stage, first_column + warp_row);
    if (!is_first) hand_over_dq();  // of the previous step, when the fence waits for nothing
    if (drops())
      make_dropped_p(score, stage);
    else
      make_transposed_p<Kind>(scores, p_operand, score, RowNumbers(buffers.shift(stage)), 1 << P_EXPONENT);
    if (Shape::asks_early) wait_to_store();
    wgmma_wait<0>(ds[0]);
#pragma unroll
    for (int i = 0; i < Dq::MT; i++) start_chunk(i, stage);
    const int exponent_dout = exponent(DOUT_FULL, stage);
    const float of_dp = power_of_two(-exponent_dout - exponent(V_FULL)),
                of_kept = drops() ? a.program.kept_factor : 1;
    if (drops())
      make_dropped_ds(stage, of_dp * of_kept);
    else
      make_transposed_ds<Kind>(
          ds, [&](int n) { return four_of(scores[0][n]); }, RowNumbers(buffers.delta(stage)), of_dp);
    if constexpr (Shape::sums) leave_gradients(work, visit, first_column + warp_row);
    if (IS_LAST) arrive_once(buffers.barrier(V_EMPTY));
    const int exponent_ds = exponent_of_largest(ds, buffers.maxima(consumer), consumer);
    put_ds(exponent_ds);
    const float of_dv = power_of_two(-P_EXPONENT - exponent_dout) * of_kept;
    const float of_dk = power_of_two(-exponent_ds - exponent(Q_FULL, stage));
    steps++;
    add_chunks<IS_LAST>(stage, of_dv, of_dk);
    named_barrier_wait(CONSUMER_MEETS + consumer, WARPGROUP);  // all of ds is there
    start_dq();
    if constexpr (!IS_LAST) start_dp();
    wgmma_wait<!IS_LAST>(scores[0]);
#pragma unroll
    for (int m = 0; m < Dq::MT; m++) registers_in_use(fresh[m]);
    finish_dq(power_of_two(-exponent_ds - exponent(K_FULL)));
    if constexpr (IS_LAST) {
      hand_over_dq();
      arrive_once(buffers.barrier(K_EMPTY));
    }
  }

  __device__ void go_through_rows(const Work &work) {
    barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
    start_scores();
    barrier_wait(buffers.barrier(V_FULL), busy_blocks % 2);
    start_dp();
    wgmma_wait<1>(scores[0]);
    busy_blocks++;
    Step step = work.consumers_first();
    for (int steps_left = work.num_steps - 1; steps_left > 0; steps_left--) {
      do_step<false>(work, step, steps_left == work.num_steps - 1);
      step = work.consumers_next(a, step);
    }
    do_step<true>(work, step, work.num_steps == 1);
  }

  __device__ void consume() {
    Work work;
    for (; consumers_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
      set_zero<1, DT>(dk);
      set_zero<1, DT>(dv);
      program_head = -1;
      if (drops()) column_words = lanes_column(a.program, work.columns.begin + consumer * 64 + warp_row);
      if constexpr (Shape::skips_hidden_steps) work.num_steps = uniform(hear_num_steps(buffers, blocks));
      if (work.num_steps > 0) go_through_rows(work);
      if constexpr (Shape::sums) leave_head(work);
      store_dk_and_dv(a, buffers, blocks, work, consumer * 64 + warp_row, dk, dv);
    }
  }
};

}  // namespace hopper
}  // namespace fa

// A shape has a plain kernel, and general ones: one takes a bias of keys whose gradient nobody wants, one
// leaves out what flags hide, and one takes any program.
#define ROW(rest, general, ...)                                                                           \
  fa::hopper::row<                                                                                        \
      fa::hopper::BackwardConsumer<fa::kinds::FA_KIND, fa::hopper::BackwardShape<__VA_ARGS__>, general>>( \
      "cuda/sm90/" FA_QUOTE(FA_KIND) rest)

// A consumer's thread needs head_dim registers (dk, dv), 32 for the fresh product, and block_q times 1 (scores,
// dp) and 0.5 a part (p or ds) for its arrays. Two parts take 162 and 225 KiB of shared memory.
using namespace fa::hopper;
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_, FA_KIND)[] = {
    // bucket, block_q, dq's shares, writers, traits, program
    ROW("/d64", false, 64, 64, 2, 0, ASKS_EARLY),
    ROW("/d64/forms", false, 64, 64, 2, 0, FORMS),
    ROW("/d128", false, 128, 32, 2, 0, 0),
    ROW("/d128/forms", false, 128, 32, 2, 0, FORMS),
    ROW("/d64/general", true, 64, 64, 2, 0, FORMS | ASKS_EARLY),
    ROW("/d64/keys", true, 64, 64, 2, 0, FORMS | ASKS_EARLY, KEYS),
    ROW("/d64/flags", true, 64, 64, 2, 0, FORMS, FLAGS),
    ROW("/d64/program", true, 64, 64, 2, 0, FORMS | SUMS, WHOLE_PROGRAM),
    ROW("/d128/general", true, 128, 32, 2, 0, FORMS),
    ROW("/d128/keys", true, 128, 32, 2, 0, FORMS, KEYS),
    ROW("/d128/flags", true, 128, 32, 2, 0, FORMS, FLAGS),
    ROW("/d128/program", true, 128, 32, 2, 0, FORMS | SUMS, WHOLE_PROGRAM),
    {},
};
