// The backward pass. One block of threads takes block_k columns of one key/value head, keeps their dk and dv in
// registers, and walks over the row blocks that see them, in every query head of the group. dq is summed in
// memory, in f32 and in the order of the accumulators (finish_dq puts it in place): by additions in any order,
// or, for bitwise repeatable results, one column block after the other.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#define FA_TAKES_EXTREMES 1
#include "backward.cuh"

namespace fa {

// A row of the table. Warps share out the scores [block_q, block_k] as score_warps along q times the rest along
// k; dk and dv [block_k, head_dim] as dkv_warps along k times the rest; dq [block_q, head_dim] as dq_warps
// along q times the rest. With two stages, the next row block comes while one is worked on.
template <int HEAD_DIM, int BLOCK_Q, int BLOCK_K, int NUM_WARPS, int BLOCKS_PER_SM, int STAGES, int SCORE_WARPS,
          int DKV_WARPS, int DQ_WARPS>
struct BackwardShape {
  static constexpr bool folds_slopes = false, splits_heads = false, skips_hidden_steps = false,
                        skips_hidden_keys = false, is_causal = false;
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, block_k = BLOCK_K, num_warps = NUM_WARPS;
  static constexpr int blocks_per_sm = BLOCKS_PER_SM;
  static constexpr int stages = STAGES, score_warps = SCORE_WARPS, dkv_warps = DKV_WARPS, dq_warps = DQ_WARPS;
};

template <class Kind, class Shape>
struct BackwardLayout {
  using QTile = Tile<Shape::block_q, Shape::head_dim>;
  using KTile = Tile<Shape::block_k, Shape::head_dim>;
  using PTile = Tile<Shape::block_q, Shape::block_k>;
  using Scores = Share<Shape::block_q, Shape::block_k, Shape::num_warps, Shape::score_warps>;
  using Dkv = Share<Shape::block_k, Shape::head_dim, Shape::num_warps, Shape::dkv_warps>;
  using Dq = DqShare<Shape>;
  static constexpr int THREADS = Shape::num_warps * 32;
  // Shared memory: k, v; of each stage q, dout, shift, delta; p, ds; a word for each warp.
  static constexpr int Q_BYTES = Kind::PARTS * QTile::BYTES, K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int P_BYTES = Kind::PARTS * PTile::BYTES, ROW_BYTES = Shape::block_q * 4;
  static constexpr int STAGE_BYTES = 2 * Q_BYTES + 2 * ROW_BYTES;
  static constexpr int STAGES_AT = 2 * K_BYTES, P_AT = STAGES_AT + Shape::stages * STAGE_BYTES;
  static constexpr int WORDS_AT = P_AT + 2 * P_BYTES, SHARED_BYTES = WORDS_AT + Shape::num_warps * 4;
};

// ---- the main kernel -------------------------------------------------------------------------------

// Writes this warp's accumulator, whose first element is [row, column], as elements to a tile in shared memory
// (its parts in turn). column is a multiple of the accumulator's width.
template <class Kind, class T, int MT, int NT>
__device__ inline void store_tile(uint32_t tile, int row, int column, const Accumulator<MT, NT> &acc,
                                  float scale) {
  const int lane = threadIdx.x % 32;
  const uint32_t to = tile + (row + lane / 4) * T::ROW_BYTES + lane % 4 * 4;
  const uint32_t chunk = (column / 8 ^ T::swizzle(lane / 4)) << 4;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        uint32_t parts[Kind::PARTS];
        float a = acc[m][n][half * 2], b = acc[m][n][half * 2 + 1];
        if constexpr (Kind::SCALED) a *= scale, b *= scale;
        split<Kind>(parts, a, b);
#pragma unroll
        for (int part = 0; part < Kind::PARTS; part++)
          store_shared(to + part * T::BYTES + (m * 16 + half * 8) * T::ROW_BYTES + (chunk ^ n << 4),
                       parts[part]);
      }
}

// The bits of the largest magnitude in an accumulator, finite or not, and of all that threads of the block
// have.
template <int MT, int NT>
__device__ inline uint32_t largest_bits(Accumulator<MT, NT> &acc) {
  uint32_t largest = 0;
  for_each_element<MT, NT>(acc, [&](int, int, float &x) { largest = max(largest, __float_as_uint(fabsf(x))); });
  return largest;
}
// words: one for each warp.
template <int NUM_WARPS>
__device__ inline uint32_t block_max(uint32_t bits, uint32_t *words) {
  bits = __reduce_max_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = bits;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; warp++) bits = max(bits, words[warp]);
  return bits;
}

// One block of threads at its column block.
template <class Kind, class Shape, bool GENERAL>
struct ColumnWorker {
  using Work = ColumnWork<Shape, GENERAL>;
  using Step = typename Work::Step;
  using Layout = BackwardLayout<Kind, Shape>;
  using QTile = typename Layout::QTile;
  using KTile = typename Layout::KTile;
  using PTile = typename Layout::PTile;
  using Scores = typename Layout::Scores;
  using Dkv = typename Layout::Dkv;
  using Dq = typename Layout::Dq;
  using Io = typename Kind::Io;
  static constexpr int THREADS = Layout::THREADS, HEAD_DIM = Shape::head_dim, P_EXPONENT = SCALED_EXPONENT;
  static_assert(FA_CUDA_SCALE_ROWS % Shape::block_q == 0 && FA_CUDA_SCALE_ROWS % Shape::block_k == 0,
                "one scale a block");

  const fa_cuda_arguments &a;
  uint8_t *shared;
  uint32_t k_tile;
  const Work &work;
  const ColumnBlock &block;
  Sequence sequence;
  const Range &columns;
  int exponent_k, exponent_v, exponent_ds;
  float dk[Dkv::MT][Dkv::NT][4], dv[Dkv::MT][Dkv::NT][4];

  __device__ ColumnWorker(const fa_cuda_arguments &a, uint8_t *shared, const Work &work)
      : a(a),
        shared(shared),
        k_tile(shared_address(shared)),
        work(work),
        block(work.block),
        sequence(sequence_of(a, block.batch)),
        columns(work.columns) {
    exponent_k = exponent_of<Kind>(a.k, block.batch, block.kv_head, sequence.first_column + columns.begin);
    exponent_v = exponent_of<Kind>(a.v, block.batch, block.kv_head, sequence.first_column + columns.begin);
    set_zero<Dkv::MT, Dkv::NT>(dk);
    set_zero<Dkv::MT, Dkv::NT>(dv);
  }

  __device__ uint32_t v_tile() const { return k_tile + Layout::K_BYTES; }
  __device__ uint32_t p_tile() const { return k_tile + Layout::P_AT; }
  __device__ uint32_t ds_tile() const { return p_tile() + Layout::P_BYTES; }
  __device__ uint32_t *words() const { return reinterpret_cast<uint32_t *>(shared + Layout::WORDS_AT); }

  __device__ void load_columns() const {
    load_operand<Kind, KTile, THREADS>(k_tile, a.k, fa::columns_of(a.k, sequence, block.kv_head), columns.begin,
                                       sequence.num_columns());
    load_operand<Kind, KTile, THREADS>(v_tile(), a.v, fa::columns_of(a.v, sequence, block.kv_head),
                                       columns.begin, sequence.num_columns());
  }

  __device__ void load_step(const Step &step, uint32_t stage) const {
    const int row = work.q_block_of(step) * Shape::block_q;
    load_operand<Kind, QTile, THREADS>(stage, a.q, fa::rows_of(a.q, sequence, step.head), row,
                                       sequence.num_rows());
    load_operand<Kind, QTile, THREADS>(stage + Layout::Q_BYTES, a.dout,
                                       fa::rows_of(a.dout, sequence, step.head), row, sequence.num_rows());
    if (threadIdx.x < Shape::block_q / 4) {
      const int64_t first = int64_t(work.position_of(a, step)) * Shape::block_q + threadIdx.x * 4;
      const uint32_t to = stage + 2 * Layout::Q_BYTES + threadIdx.x * 16;
      copy_async(to, a.shift + first, 16);
      copy_async(to + Layout::ROW_BYTES, a.delta + first, 16);
    }
  }

  // The exponent by which ds is scaled: by what is finite of it.
  __device__ int exponent_of_largest(float (&ds)[Scores::MT][Scores::NT][4]) const {
    constexpr uint32_t INFINITE = 0x7f800000;
    uint32_t largest = block_max<Shape::num_warps>(largest_bits<Scores::MT, Scores::NT>(ds), words());
    if (largest >= INFINITE) {
      uint32_t bits = 0;
      for_each_element<Scores::MT, Scores::NT>(ds, [&](int, int, float &x) {
        if (isfinite(x)) bits = max(bits, __float_as_uint(fabsf(x)));
      });
      __syncthreads();  // all have read
      largest = block_max<Shape::num_warps>(bits, words());
    }
    return scaling_exponent(largest);
  }

  // Writes p and ds of a step, whose rows lie at stage_at, to shared memory.
  __device__ void put_p_and_ds(const Step &step, uint32_t stage_at, int exponent_q, int exponent_dout) {
    const uint32_t q_tile = k_tile + stage_at, dout_tile = q_tile + Layout::Q_BYTES;
    const float *shift = reinterpret_cast<const float *>(shared + stage_at + 2 * Layout::Q_BYTES);
    const float *delta = shift + Shape::block_q;
    const Visit visit = work.visit_of(a, step);
    float p[Scores::MT][Scores::NT][4], ds[Scores::MT][Scores::NT][4];
    set_zero<Scores::MT, Scores::NT>(p);
    set_zero<Scores::MT, Scores::NT>(ds);
    multiply<Kind, HEAD_DIM / 16, Scores::NT>(p, TileOperand<QTile, true, true>(q_tile, Scores::row()),
                                              TileOperand<KTile, false, true>(k_tile, Scores::column()),
                                              power_of_two(-exponent_q - exponent_k));
    multiply<Kind, HEAD_DIM / 16, Scores::NT>(ds, TileOperand<QTile, true, true>(dout_tile, Scores::row()),
                                              TileOperand<KTile, false, true>(v_tile(), Scores::column()),
                                              power_of_two(-exponent_dout - exponent_v));
    const Place at = {block.batch, visit.head, visit.rows.begin + Scores::row(),
                      columns.begin + Scores::column()};
    if (GENERAL && a.program.is_there) {
      make_p_and_ds_by_program<Kind, Scores::MT, Scores::NT>(
          p, ds, a, visit.band, at, shift + Scores::row(), delta + Scores::row(),
          threadIdx.x / 32 % Shape::score_warps, block.k_block * Shape::num_warps + threadIdx.x / 32);
    } else {
      make_scores_in_band<Kind, false, GENERAL, Scores::MT, Scores::NT>(
          p, a, a.score, visit.band, visit.rows, {columns.begin, columns.begin + Shape::block_k}, at);
      make_p_and_ds<Kind, Scores::MT, Scores::NT>(p, ds, a.score, shift + Scores::row(), delta + Scores::row());
    }
    exponent_ds = Kind::SCALED ? exponent_of_largest(ds) : 0;
    store_tile<Kind, PTile, Scores::MT, Scores::NT>(p_tile(), Scores::row(), Scores::column(), p,
                                                    power_of_two(P_EXPONENT));
    store_tile<Kind, PTile, Scores::MT, Scores::NT>(ds_tile(), Scores::row(), Scores::column(), ds,
                                                    power_of_two(exponent_ds));
  }

  __device__ void add_to_dk_and_dv(uint32_t stage_at, int exponent_q, int exponent_dout) {
    constexpr int CHUNK = Dkv::NT < 4 ? Dkv::NT : 4;
    const uint32_t q_tile = k_tile + stage_at, dout_tile = q_tile + Layout::Q_BYTES;
    multiply<Kind, Shape::block_q / 16, CHUNK>(dv, TileOperand<PTile, true, false>(p_tile(), Dkv::row()),
                                               TileOperand<QTile, false, false>(dout_tile, Dkv::column()),
                                               power_of_two(-P_EXPONENT - exponent_dout));
    multiply<Kind, Shape::block_q / 16, CHUNK>(dk, TileOperand<PTile, true, false>(ds_tile(), Dkv::row()),
                                               TileOperand<QTile, false, false>(q_tile, Dkv::column()),
                                               power_of_two(-exponent_ds - exponent_q));
  }

  __device__ void make_dq(Accumulator<Dq::MT, Dq::NT> &dq) const {
    constexpr int CHUNK = Dq::NT < 4 ? Dq::NT : 4;
    set_zero<Dq::MT, Dq::NT>(dq);
    multiply<Kind, Shape::block_k / 16, CHUNK>(dq, TileOperand<PTile, true, true>(ds_tile(), Dq::row()),
                                               TileOperand<KTile, false, false>(k_tile, Dq::column()),
                                               power_of_two(-exponent_ds - exponent_k));
  }
  __device__ void add_dq(int position, Accumulator<Dq::MT, Dq::NT> &dq) const {
    float *sum = dq_sum_of<Shape>(a, position);
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
#pragma unroll
      for (int n = 0; n < Dq::NT; n++) add_four(sum + dq_offset<Dq>(m, n), dq[m][n]);
  }

  __device__ void go_through_rows() {
    Step step = work.first_step(a);
    if (work.num_steps > 0) {
      load_columns();
      load_step(step, k_tile + Layout::STAGES_AT);
    }
    uint32_t stage_at = Layout::STAGES_AT;
    int32_t *to_count = nullptr;  // the dq_order of the step before, in order
    for (int steps_left = work.num_steps; steps_left > 0; steps_left--) {
      const uint32_t here = stage_at;
      forget(k_tile);  // or ptxas keeps addresses in registers across steps
      const Step following = work.next(a, step);
      copy_async_wait_all();
      __syncthreads();  // this step's rows are there, and nobody reads the last step's any more
      if constexpr (Shape::stages == 2) {
        stage_at = 2 * Layout::STAGES_AT + Layout::STAGE_BYTES - stage_at;
        if (steps_left > 1) load_step(following, k_tile + stage_at);
      }
      const int row = sequence.first_row + work.q_block_of(step) * Shape::block_q;
      const int exponent_q = exponent_of<Kind>(a.q, block.batch, step.head, row);
      const int exponent_dout = exponent_of<Kind>(a.dout, block.batch, step.head, row);
      put_p_and_ds(step, here, exponent_q, exponent_dout);
      if (a.in_order) {
        if (to_count) __threadfence();
        if (GENERAL && to_count) {  // already now, for this step may be of the same row block in another band
          __syncthreads();
          if (threadIdx.x == 0) count_on(to_count);
          to_count = nullptr;
        }
        if (threadIdx.x == 0)
          wait_for_count(a.dq_order + work.position_of(a, step), 1 + work.place_of(a, step));
      }
      __syncthreads();
      // The additions of the step before have long been made.
      if (a.in_order && to_count && threadIdx.x == 0) count_on(to_count);

      add_to_dk_and_dv(here, exponent_q, exponent_dout);
      float dq[Dq::MT][Dq::NT][4];
      make_dq(dq);
      if constexpr (Shape::stages == 1) {
        __syncthreads();
        if (steps_left > 1) load_step(following, k_tile + here);
      }
      add_dq(work.position_of(a, step), dq);
      to_count = a.dq_order + work.position_of(a, step);
      step = following;
    }
    if (a.in_order && to_count) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) count_on(to_count);
    }
  }

  __device__ void store() const {
    const int column = columns.begin + Dkv::row(), d = Dkv::column();
    store_accumulator<Io, Dkv::MT, Dkv::NT>(column_of<Io>(a.dk, sequence, block.kv_head, column) + d,
                                            a.dk.stride_row, columns.end - column, a.head_dim - d, dk, a.scale);
    store_accumulator<Io, Dkv::MT, Dkv::NT>(column_of<Io>(a.dv, sequence, block.kv_head, column) + d,
                                            a.dv.stride_row, columns.end - column, a.head_dim - d, dv,
                                            GENERAL && a.program.is_there ? a.program.kept_factor : 1);
  }
};

template <class Kind, class Shape, bool GENERAL>
__global__ void __launch_bounds__(Shape::num_warps * 32, Shape::blocks_per_sm)
    backward(const __grid_constant__ fa_cuda_arguments a) {
  using Layout = BackwardLayout<Kind, Shape>;
  FA_DYNAMIC_SHARED(128, uint8_t, shared);
  uint32_t *words = reinterpret_cast<uint32_t *>(shared + Layout::WORDS_AT);
  // Deterministic: numbers in the order in which blocks of threads really start. A block that waits for one
  // with a lower number thus waits for one that runs or is done.
  if (a.in_order) {
    if (threadIdx.x == 0) *words = atomicAdd(a.tickets, 1);
    __syncthreads();
  }
  ColumnWork<Shape, GENERAL> work;
  work.find(a, a.in_order ? *words : blockIdx.x);
  __syncthreads();
  ColumnWorker<Kind, Shape, GENERAL> worker(a, shared, work);
  worker.go_through_rows();
  worker.store();
}

template <class Kind, class Shape, bool GENERAL>
constexpr fa_cuda_kernel row(const char *name) {
  using Layout = BackwardLayout<Kind, Shape>;
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Layout::THREADS,
          .shared_bytes = Layout::SHARED_BYTES,
          .takes = GENERAL ? FA_CUDA_ALL_NEEDS : FA_CUDA_PLAIN_NEEDS,
          .row_warps = Shape::score_warps,
          .main = address_of_kernel(backward<Kind, Shape, GENERAL>),
          .statistics = address_of_kernel(statistics<Kind, RowsOf<Shape>>),
          .finish_dq = address_of_kernel(finish_dq<Kind, DqShare<Shape>>),
          .finish_threads = Layout::THREADS};
}

}  // namespace fa

// A shape's plain kernel, and the one that takes whatever there is.
#define ROW_OF(rest, general, ...) \
  fa::row<fa::kinds::FA_KIND, fa::BackwardShape<__VA_ARGS__>, general>("cuda/sm80/" FA_QUOTE(FA_KIND) rest)
#define ROWS(rest, ...) ROW_OF(rest, false, __VA_ARGS__), ROW_OF(rest "/general", true, __VA_ARGS__)

// Rows fill the registers with dk and dv (block_k * head_dim / threads each) and the shared memory with what is
// left; at 64, several blocks a multiprocessor, so that while one waits at a barrier another multiplies. The
// small ones are for multiprocessors with less shared memory: 99 KiB, or 136 for f32 at 256.
const fa_cuda_kernel FA_JOIN(fa_cuda_backward_, FA_KIND)[] = {
// bucket, block_q, block_k, warps, blocks per multiprocessor, stages; warps along q or k: scores, dk and dv, dq
#if FA_KIND_PARTS == 1
    ROWS("/d64", 64, 64, 64, 4, 3, 2, 2, 2, 2),
    ROWS("/d128", 128, 64, 128, 8, 1, 2, 2, 4, 2),
    ROWS("/d256", 256, 64, 64, 8, 1, 2, 4, 2, 2),
    ROWS("/d128/small", 128, 64, 64, 8, 1, 1, 4, 2, 2),
    ROWS("/d256/small", 256, 32, 32, 4, 1, 1, 2, 2, 2),
#else
    ROWS("/d64", 64, 64, 64, 4, 2, 1, 2, 2, 2),
    ROWS("/d128", 128, 64, 64, 8, 1, 2, 2, 2, 2),
    ROWS("/d256", 256, 32, 64, 8, 1, 1, 2, 2, 2),
    ROWS("/d128/small", 128, 32, 32, 4, 1, 1, 2, 2, 2),
    ROWS("/d256/small", 256, 32, 32, 4, 1, 1, 2, 2, 2),
#endif
    {},
};
