// The backward pass on Hopper for wide heads, whose dk and dv take most of the registers of two warpgroups.
// Here the warpgroups divide what every consumer of hopper_backward.cu does, so that each of a step's five
// products is made once, reads little shared memory, and waits for no other warpgroup's arithmetic: one
// computes s, p and dv, one dp, ds and dk, and a third dq. p and ds pass through shared memory, which lets the
// warpgroups run steps apart. The rest is the same as there.
//
//   scores:  s^T = k q^T     p^T = exp(s^T - lse)           dv += p^T dout
//   ds:      dp^T = v dout^T   ds^T = p^T * (dp^T - delta)    dk += ds^T q
//   dq:      dq += ds k
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "hopper_backward.cuh"

namespace fa {
namespace hopper {

// The warpgroups, in order. The registers of their threads add up to 512, which is what the block has.
enum { DQ_GROUP, SCORES_GROUP, DS_GROUP, PRODUCER_GROUP, NUM_GROUPS };

template <int HEAD_DIM, int TRAITS>
struct WideShape {
  static constexpr int head_dim = HEAD_DIM, block_q = 64, block_k = 64;
  static constexpr int program = NO_PROGRAM, whole_program = NO_PROGRAM;
  static constexpr bool skips_hidden_steps = false, skips_hidden_keys = false, is_causal = false;
  static constexpr Forms forms = TRAITS & FORMS ? ANY_FORM : USUAL_FORM;
  static constexpr bool sums = true, has_cells = false, tiles_cells = false, has_flags = false, drops = false,
                        folds = false, folds_slopes = false, tells_work = false, single_column = false,
                        leaves_by_map = false, splits_heads = false, none_behind = false;
  static constexpr int num_warps = 4, dq_warps = 4;  // of DQ_GROUP, which comes first (see DqShare)
  static constexpr int dq_columns = 64;              // of one product
  static constexpr int num_writers = 0, num_leavers = 0, most_steps_prefetched = 0;
  static constexpr int sum_shares = HEAD_DIM > 192 ? 2 : 1;  // of dk's and dv's columns, a product each
  static constexpr int num_threads = NUM_GROUPS * WARPGROUP, num_finders = 2, steps_found = 8;
  static constexpr int dq_registers = 72, main_registers = 192, producer_registers = 56;
};

// More barriers in shared memory. They say that SCORES_GROUP has written p and that DS_GROUP has read it, that
// dq's place in the order has come, and that dq has been added.
enum { P_FULL = NUM_BARRIER_KINDS, P_EMPTY, DQ_PLACE, DQ_ADDED, NUM_WIDE_BARRIER_KINDS };

// The common buffers, two stages of ds, and p in f32, where each thread reads what it wrote.
template <class Kind, class Shape, bool GENERAL>
struct WideBuffers : CommonBuffers<Kind, Shape, GENERAL, NUM_WIDE_BARRIER_KINDS> {
  using Common = CommonBuffers<Kind, Shape, GENERAL, NUM_WIDE_BARRIER_KINDS>;
  using Dq = DqShare<Shape>;
  using DsTile = BoxTile<Shape::block_q, Shape::block_k>;
  static constexpr int P_AT = Common::STAGES * DsTile::BYTES;
  static constexpr int BYTES = Common::OWN_AT + P_AT + Shape::block_q * Shape::block_k * 4;

  __device__ uint32_t ds(int stage) const { return this->own(stage * DsTile::BYTES); }
  __device__ uint32_t p(int n) const {
    return this->own(P_AT + (n * WARPGROUP + threadIdx.x % WARPGROUP) * 16);
  }

  // The warps of one group or of two arrive, but single threads of the last group.
  __device__ static int arrivals(int kind, bool in_order) {
    switch (kind) {
      case K_EMPTY:
      case Q_EMPTY:
      case DOUT_EMPTY: return ARRIVALS_OF_WARP * 8;
      case BLOCK_EMPTY: return ARRIVALS_OF_WARP * 13 + (in_order ? 2 : 0);
      case DQ_PLACE: return 2;
      default: return kind < K_EMPTY ? 1 : ARRIVALS_OF_WARP * 4;
    }
  }
};

// ---- the loop of two groups --------------------------------------------------------------------------

// Waits for the products that add to a sum.
template <int SHARES, int DT, class Operand>
__device__ inline void wait_for_sums(float (&sum)[SHARES][1][DT][4], Operand &operand) {
  wgmma_wait_group<0>();
#pragma unroll
  for (int share = 0; share < SHARES; share++) registers_in_use(sum[share][0]);
  registers_in_use(operand);
}

// Goes through column blocks: calls make() for the first step when k or v has come, and do_step for every step,
// then writes scale * sum, whose columns are in equal shares, to the tensor.
template <class Kind, class Buffers, class Make, class DoStep, int SHARES, int DT>
__device__ inline void consume_blocks(const fa_cuda_arguments &a, const Buffers &buffers, int full, Make make,
                                      DoStep do_step, float (&sum)[SHARES][1][DT][4], const fa_tensor &tensor,
                                      float scale) {
  uint32_t blocks = 0, busy_blocks = 0;
  typename Buffers::Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
#pragma unroll
    for (int share = 0; share < SHARES; share++) set_zero<1, DT>(sum[share]);
    if (work.num_steps > 0) {
      barrier_wait(buffers.barrier(full), busy_blocks % 2);
      make();
      busy_blocks++;
      typename Buffers::Work::ConsumerStep step = work.consumers_first();
      for (int steps_left = work.num_steps - 1; steps_left > 0; steps_left--) {
        do_step(work, step, std::false_type());
        step = work.consumers_next(a, step);
      }
      do_step(work, step, std::true_type());
    }
    current_work(a, buffers, blocks, work);  // again: it need not stay in registers
#pragma unroll
    for (int share = 0; share < SHARES; share++)
      store_columns<Kind>(a, work, tensor, threadIdx.x / 32 % 4 * 16, share * DT * 8, sum[share], scale);
  }
}

// ---- s, p, dv --------------------------------------------------------------------------------------

template <class Kind, class Shape, bool GENERAL>
__device__ inline void consume_scores(const fa_cuda_arguments &a, WideBuffers<Kind, Shape, GENERAL> buffers) {
  using Buffers = WideBuffers<Kind, Shape, GENERAL>;
  using Work = typename Buffers::Work;
  using Step = typename Work::ConsumerStep;
  using QTile = typename Buffers::QTile;
  constexpr int SHARES = Shape::sum_shares, NT = Shape::block_q / 8, DT = Shape::head_dim / SHARES / 8;
  constexpr int Q_STEPS = Shape::block_q / 16;

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dv[SHARES][1][DT][4], scores[1][NT][4];
  uint32_t p_operand[1][Q_STEPS][4];

  decltype(auto) score = known_score<Shape::forms>(a.score);
  uint32_t steps = 0;
  auto make_products = [&] {
    start_transposed<K_SIDE>(scores, buffers, 0, steps);
    wgmma_wait<0>(scores[0]);
  };

  // A step begins with its scores computed, and ends with those of the next step.
  auto do_step = [&](const Work &work, Step step, auto is_last) {
    constexpr bool IS_LAST = decltype(is_last)::value;
    const auto visit = work.consumers_visit(a, step, buffers.visit(steps));
    const int column = work.columns.begin, stage = steps % 2;
    forget(buffers.base);  // or ptxas keeps every address of this step in a register
    if constexpr (GENERAL)
      make_told_scores<Kind>(scores, score, work, visit, Work::see_all(Work::heard_flags(visit, 0)),
                             column + warp_row);
    else
      make_scores_in_band<Kind, true, false, 1, NT>(
          scores, a, score, visit.band, visit.rows, {column, column + Shape::block_k},
          {work.block.batch, visit.head, visit.rows.begin, column + warp_row});
    barrier_wait(buffers.barrier(P_EMPTY), steps % 2 ^ 1);
    make_transposed_p<Kind>(scores, score, RowNumbers(buffers.shift(stage)), NoShiftDue(),
                            [&](int n, const float(&p)[4], const float(&slopes)[4]) {
                              store_shared(buffers.p(n), slopes);
#pragma unroll
                              for (int i = 0; i < 4; i++) scores[0][n][i] = p[i];
                            });
    arrive_once(buffers.barrier(P_FULL));
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    convert<Kind>(p_operand, scores);
    const uint32_t phase = steps / 2 % 2;
    steps++;
    barrier_wait(buffers.barrier(DOUT_FULL, stage), phase);
#pragma unroll
    for (int share = 0; share < SHARES; share++)
      multiply<Kind, Q_STEPS>(dv[share][0], p_operand,
                              BoxOperand<QTile, false>(buffers.dout(stage), share * DT * 8), true);
    if (IS_LAST) arrive_once(buffers.barrier(K_EMPTY));
    wait_for_sums(dv, p_operand);
    arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    if constexpr (!IS_LAST) make_products();
  };

  consume_blocks<Kind>(a, buffers, K_FULL, make_products, do_step, dv, a.dv, 1);
}

// ---- dp, ds, dk ------------------------------------------------------------------------------------

template <class Kind, class Shape, bool GENERAL>
__device__ inline void consume_ds(const fa_cuda_arguments &a, WideBuffers<Kind, Shape, GENERAL> buffers) {
  using Buffers = WideBuffers<Kind, Shape, GENERAL>;
  using Work = typename Buffers::Work;
  using Step = typename Work::ConsumerStep;
  using QTile = typename Buffers::QTile;
  using DsTile = typename Buffers::DsTile;
  constexpr int SHARES = Shape::sum_shares, NT = Shape::block_q / 8, DT = Shape::head_dim / SHARES / 8;
  constexpr int Q_STEPS = Shape::block_q / 16;

  const int warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[SHARES][1][DT][4], ds[1][NT][4];
  uint32_t ds_operand[1][Q_STEPS][4];

  uint32_t steps = 0;
  auto make_dp = [&] {
    start_transposed<V_SIDE>(ds, buffers, 0, steps);
    wgmma_wait<0>(ds[0]);
  };

  auto slopes_of = [&](int n) { return load_shared_four(buffers.p(n)); };
  auto do_step = [&](const Work &, Step, auto is_last) {
    constexpr bool IS_LAST = decltype(is_last)::value;
    const int stage = steps % 2;
    const uint32_t phase = steps / 2 % 2;
    forget(buffers.base);
    barrier_wait(buffers.barrier(P_FULL), steps % 2);
    make_transposed_ds<Kind>(ds, slopes_of, RowNumbers(buffers.delta(stage)));
    arrive_once(buffers.barrier(P_EMPTY));
    arrive_once(buffers.barrier(DOUT_EMPTY, stage));
    convert<Kind>(ds_operand, ds);
    steps++;
    barrier_wait(buffers.barrier(Q_FULL, stage), phase);
#pragma unroll
    for (int share = 0; share < SHARES; share++)
      multiply<Kind, Q_STEPS>(dk[share][0], ds_operand,
                              BoxOperand<QTile, false>(buffers.q(stage), share * DT * 8), true);
    barrier_wait(buffers.barrier(DS_EMPTY, stage), phase ^ 1);
    store_transposed<DsTile>(buffers.ds(stage), warp_row, 0, ds_operand[0]);
    fence_async();
    arrive_once(buffers.barrier(DS_FULL, stage));
    if (IS_LAST) arrive_once(buffers.barrier(V_EMPTY));
    wait_for_sums(dk, ds_operand);
    arrive_once(buffers.barrier(Q_EMPTY, stage));
    if constexpr (!IS_LAST) make_dp();
  };

  consume_blocks<Kind>(a, buffers, V_FULL, make_dp, do_step, dk, a.dk, a.scale);
}

// ---- dq --------------------------------------------------------------------------------------------

template <class Kind, class Shape, bool GENERAL>
__device__ inline void consume_dq(const fa_cuda_arguments &a, WideBuffers<Kind, Shape, GENERAL> buffers) {
  using Buffers = WideBuffers<Kind, Shape, GENERAL>;
  using Work = typename Buffers::Work;
  using KTile = typename Buffers::KTile;
  using DsTile = typename Buffers::DsTile;
  using Dq = typename Buffers::Dq;
  constexpr int NT = Shape::dq_columns / 8, NUM_PIECES = Dq::NT / NT, K_STEPS = Shape::block_k / 16;
  static_assert(Dq::MT == 1 && Dq::ACROSS == 1, "one product of a warpgroup");

  float dq[NT][4];
  uint32_t blocks = 0, busy_blocks = 0, steps = 0;
  auto start_dq = [&](int piece, uint32_t ds) {
    multiply<Kind, K_STEPS>(dq, BoxOperand<DsTile, true>(ds),
                            BoxOperand<KTile, false>(buffers.k(), piece * Shape::dq_columns), false);
  };
  Work work;
  for (; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    if (work.num_steps == 0) continue;
    barrier_wait(buffers.barrier(K_FULL), busy_blocks % 2);
    busy_blocks++;
    typename Work::Step step = work.first_step(a);
    for (int i = 0; i < work.num_steps; i++, steps++, step = work.next(a, step)) {
      const int stage = steps % 2;
      float *dq_sum = dq_sum_of<Shape>(a, work.position_of(a, step)) + dq_offset<Dq>(0, 0);
      barrier_wait(buffers.barrier(DS_FULL, stage), steps / 2 % 2);
      start_dq(0, buffers.ds(stage));
      if (a.in_order) barrier_wait(buffers.barrier(DQ_PLACE), steps % 2);
      for (int piece = 0;;) {
        wgmma_wait<0>(dq);
        if (++piece == NUM_PIECES) arrive_once(buffers.barrier(DS_EMPTY, stage));
#pragma unroll
        for (int n = 0; n < NT; n++) add_four(dq_sum + n * 128, dq[n]);
        if (piece == NUM_PIECES) break;
        dq_sum += NT * 128;
        start_dq(piece, buffers.ds(stage));
      }
      if (a.in_order) arrive_once(buffers.barrier(DQ_ADDED));
    }
    arrive_once(buffers.barrier(K_EMPTY));
  }
}

// ---- the other warps ------------------------------------------------------------------------------------

// Copies v and dout of the column blocks that the warp which copies k and q takes.
template <class Buffers>
__device__ inline void produce_dout(const fa_cuda_arguments &a, const fa_cuda_maps &maps,
                                    const Buffers &buffers) {
  uint32_t steps = 0, v_phase = 0;
  typename Buffers::Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work(buffers, blocks)) {
    const int index = uniform(load_shared_word(buffers.block(blocks % 2)));
    if (threadIdx.x % 32 == 0) await_statistics<Buffers>(a, index);
    load_sides<V_SIDE, NUM_SIDES>(a, maps, buffers, index, blocks, steps, v_phase);
  }
}

// Where the order of additions to dq is fixed, one thread waits for each place ahead of the warps that add, and
// another counts after them, because both are slow.
template <class Buffers, class Visit>
__device__ inline void for_each_step(const fa_cuda_arguments &a, const Buffers &buffers, Visit visit) {
  uint32_t steps = 0;
  typename Buffers::Work work;
  for (uint32_t blocks = 0; current_work(a, buffers, blocks, work); next_work<true>(buffers, blocks)) {
    typename Buffers::Work::Step step = work.first_step(a);
    for (int i = 0; i < work.num_steps; i++, steps++, step = work.next(a, step))
      visit(work, step, a.dq_order + work.position_of(a, step), steps % 2);
  }
}
template <class Buffers>
__device__ inline void await_places(const fa_cuda_arguments &a, const Buffers &buffers) {
  using Work = typename Buffers::Work;
  using Step = typename Work::Step;
  for_each_step(a, buffers, [&](const Work &work, const Step &step, int32_t *order, uint32_t phase) {
    wait_for_count(order, 1 + work.place_of(a, step));
    barrier_arrive(buffers.barrier(DQ_PLACE));
    barrier_wait(buffers.barrier(DQ_PLACE), phase);
  });
}
template <class Buffers>
__device__ inline void count_additions(const fa_cuda_arguments &a, const Buffers &buffers) {
  using Work = typename Buffers::Work;
  using Step = typename Work::Step;
  barrier_arrive(buffers.barrier(DQ_PLACE));
  for_each_step(a, buffers, [&](const Work &, const Step &, int32_t *order, uint32_t phase) {
    barrier_wait(buffers.barrier(DQ_ADDED), phase);
    barrier_arrive(buffers.barrier(DQ_PLACE));
    count_on(order);
  });
}

// The grid has a block of threads for each multiprocessor.
template <class Buffers>
__global__ void __launch_bounds__(Buffers::Shape::num_threads, 1)
    backward_wide(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_maps maps) {
  using Shape = typename Buffers::Shape;
  const Buffers buffers = set_up_buffers<Buffers>(a);
  const int group = uniform(threadIdx.x / WARPGROUP);
  if (group == PRODUCER_GROUP) {
    give_registers<Shape::producer_registers>();
    const int thread = threadIdx.x % WARPGROUP, warp = uniform(thread / 32);
    if (warp == 0) produce<V_SIDE>(a, maps, buffers);
    if (warp == 1) produce_dout(a, maps, buffers);
    if (thread == 64 && a.in_order) await_places(a, buffers);
    if (thread == 96 && a.in_order) count_additions(a, buffers);
  } else if (group == DQ_GROUP) {
    give_registers<Shape::dq_registers>();
    consume_dq(a, buffers);
  } else if (group == SCORES_GROUP) {
    take_registers<Shape::main_registers>();
    consume_scores(a, buffers);
  } else {
    take_registers<Shape::main_registers>();
    consume_ds(a, buffers);
  }
}

template <bool GENERAL, class Shape>
constexpr auto row_of_shape(const char *name) {
  using Buffers = WideBuffers<kinds::FA_KIND, Shape, GENERAL>;
  return row_of_kernel<Buffers>(name, address_of_kernel(backward_wide<Buffers>));
}

}  // namespace hopper
}  // namespace fa

#define ROW(rest, general, ...) \
  fa::hopper::row_of_shape<general, fa::hopper::WideShape<__VA_ARGS__>>("cuda/sm90/" FA_QUOTE(FA_KIND) rest)

using namespace fa::hopper;
const fa_cuda_kernel FA_JOIN(fa_hopper_backward_wide_, FA_KIND)[] = {
    // bucket, traits
    ROW("/d192", false, 192, 0),
    ROW("/d192/forms", false, 192, FORMS),
    ROW("/d192/general", true, 192, FORMS),
    ROW("/d256", false, 256, 0),
    ROW("/d256/forms", false, 256, FORMS),
    ROW("/d256/general", true, 256, FORMS),
    {},
};
