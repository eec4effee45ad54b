// The backward pass. One block of threads takes block_k columns of one key/value head, keeps their dk and dv in
// registers, and walks over the row blocks that see them, in every query head of the group. dq is summed in
// memory, in f32 and in the order of the accumulators (finish_dq puts it in place): by additions in any order,
// or, for bitwise repeatable results, one column block after the other.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#include "backward.cuh"

namespace fa {

// A row of the table. Warps share out the scores [block_q, block_k] as score_warps along q times the rest along
// k; dk and dv [block_k, head_dim] as dkv_warps along k times the rest; dq [block_q, head_dim] as dq_warps
// along q times the rest. With two stages, the next row block comes while one is worked on.
template <int HEAD_DIM, int BLOCK_Q, int BLOCK_K, int NUM_WARPS, int BLOCKS_PER_SM, int STAGES, int SCORE_WARPS,
          int DKV_WARPS, int DQ_WARPS>
struct BackwardShape {
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

// Scores and dp become p and ds, in place. shift, delta: of the row block's rows.
template <class Kind, class Share, bool SOFTCAP>
__device__ inline void p_and_ds(Accumulator<Share::MT, Share::NT> &p, Accumulator<Share::MT, Share::NT> &ds,
                                const fa_cuda_score &score, const float *shift, const float *delta) {
  const float unit = exponent_of_unit<Kind>(score);
  const float per_cap = per_softcap<Kind>(score);
#pragma unroll
  for (int m = 0; m < Share::MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = Share::row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
      const float row_shift = shift[row], row_delta = delta[row];
#pragma unroll
      for (int n = 0; n < Share::NT; n++)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; i++) {
          const float x = p[m][n][i];
          p[m][n][i] = exact_exponential<Kind>(x, unit, row_shift);
          ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - row_delta);
          if (SOFTCAP) ds[m][n][i] *= softcap_slope(x, per_cap);
        }
    }
}

// The bits of the largest magnitude in an accumulator, and of all that threads of the block have.
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

template <class Kind, class Shape>
__global__ void __launch_bounds__(Shape::num_warps * 32, Shape::blocks_per_sm)
    backward(const __grid_constant__ fa_cuda_arguments a) {
  using Layout = BackwardLayout<Kind, Shape>;
  using QTile = typename Layout::QTile;
  using KTile = typename Layout::KTile;
  using PTile = typename Layout::PTile;
  using Scores = typename Layout::Scores;
  using Dkv = typename Layout::Dkv;
  using Dq = typename Layout::Dq;
  using Io = typename Kind::Io;
  constexpr int THREADS = Layout::THREADS, HEAD_DIM = Shape::head_dim;
  constexpr int P_EXPONENT = SCALED_EXPONENT;
  static_assert(FA_CUDA_GROUP % Shape::block_q == 0 && FA_CUDA_GROUP % Shape::block_k == 0,
                "one scale a block");

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t k_tile = shared_address(shared), v_tile = k_tile + Layout::K_BYTES;
  const uint32_t p_tile = k_tile + Layout::P_AT, ds_tile = p_tile + Layout::P_BYTES;
  uint32_t *words = reinterpret_cast<uint32_t *>(shared + Layout::WORDS_AT);

  // Deterministic: numbers in the order in which blocks of threads really start. Who waits for the turn of a
  // lower one thus waits for one that runs or is done.
  if (a.in_turn) {
    if (threadIdx.x == 0) *words = atomicAdd(a.tickets, 1);
    __syncthreads();
  }
  const BlockIndex index = block_of(a, a.in_turn ? *words : blockIdx.x, a.num_k_blocks);
  __syncthreads();
  const int k_block = index.k_block, kv_head = index.kv_head, batch = index.batch;
  const int group = a.num_heads / a.num_kv_heads;
  const Range columns = block_range(k_block, Shape::block_k, a.window.seqlen_k);
  const Range q_blocks = blocks_of(visible_rows(a.window, columns), Shape::block_q);
  const int exponent_k = exponent_of<Kind>(a.k, batch, kv_head, columns.begin);
  const int exponent_v = exponent_of<Kind>(a.v, batch, kv_head, columns.begin);

  auto load_step = [&](Step step, uint32_t stage) {
    const int row = step.q_block * Shape::block_q;
    load_operand<Kind, QTile, THREADS>(stage, a.q, head_of(a.q, batch, step.head), row, a.window.seqlen_q);
    load_operand<Kind, QTile, THREADS>(stage + Layout::Q_BYTES, a.dout, head_of(a.dout, batch, step.head), row,
                                       a.window.seqlen_q);
    if (threadIdx.x < Shape::block_q / 4) {
      const int64_t first = position_of(a, batch, step) * Shape::block_q + threadIdx.x * 4;
      const uint32_t to = stage + 2 * Layout::Q_BYTES + threadIdx.x * 16;
      copy_async(to, a.shift + first, 16);
      copy_async(to + Layout::ROW_BYTES, a.delta + first, 16);
    }
  };

  float dk[Dkv::MT][Dkv::NT][4], dv[Dkv::MT][Dkv::NT][4];
  set_zero<Dkv::MT, Dkv::NT>(dk);
  set_zero<Dkv::MT, Dkv::NT>(dv);

  const Step first = {kv_head * group, q_blocks.end - 1};
  const int end_head = q_blocks.begin < q_blocks.end ? first.head + group : first.head;
  if (first.head < end_head) {
    load_operand<Kind, KTile, THREADS>(k_tile, a.k, head_of(a.k, batch, kv_head), columns.begin,
                                       a.window.seqlen_k);
    load_operand<Kind, KTile, THREADS>(v_tile, a.v, head_of(a.v, batch, kv_head), columns.begin,
                                       a.window.seqlen_k);
    load_step(first, k_tile + Layout::STAGES_AT);
  }
  uint32_t stage_at = Layout::STAGES_AT;
  int32_t *turns_to_pass = nullptr;
  for (Step step = first, following; step.head < end_head; step = following) {
    const uint32_t q_tile = k_tile + stage_at, dout_tile = q_tile + Layout::Q_BYTES;
    const float *shift = reinterpret_cast<const float *>(shared + stage_at + 2 * Layout::Q_BYTES);
    const float *delta = shift + Shape::block_q;
    following = next_step(step, q_blocks);
    copy_async_wait_all();
    __syncthreads();  // this step's rows are there, and nobody reads the last step's any more
    if constexpr (Shape::stages == 2) {
      stage_at = 2 * Layout::STAGES_AT + Layout::STAGE_BYTES - stage_at;
      if (following.head < end_head) load_step(following, k_tile + stage_at);
    }

    // p and ds
    const Range rows = block_range(step.q_block, Shape::block_q, a.window.seqlen_q);
    const int exponent_q = exponent_of<Kind>(a.q, batch, step.head, rows.begin);
    const int exponent_dout = exponent_of<Kind>(a.dout, batch, step.head, rows.begin);
    float p[Scores::MT][Scores::NT][4], ds[Scores::MT][Scores::NT][4];
    set_zero<Scores::MT, Scores::NT>(p);
    set_zero<Scores::MT, Scores::NT>(ds);
    multiply<Kind, HEAD_DIM / 16, Scores::NT>(p, TileOperand<QTile, true, true>(q_tile, Scores::row()),
                                              TileOperand<KTile, false, true>(k_tile, Scores::column()),
                                              power_of_two(-exponent_q - exponent_k));
    multiply<Kind, HEAD_DIM / 16, Scores::NT>(ds, TileOperand<QTile, true, true>(dout_tile, Scores::row()),
                                              TileOperand<KTile, false, true>(v_tile, Scores::column()),
                                              power_of_two(-exponent_dout - exponent_v));
    finish_scores<Kind, Scores::MT, Scores::NT>(p, a.score);
    if (!is_fully_visible(a.window, rows, columns.begin, Shape::block_k))
      mask_scores<Scores::MT, Scores::NT>(p, a.window, rows.begin + Scores::row(),
                                          columns.begin + Scores::column());
    if (a.score.form == FA_CUDA_SCORE_SOFTCAP)
      p_and_ds<Kind, Scores, true>(p, ds, a.score, shift, delta);
    else
      p_and_ds<Kind, Scores, false>(p, ds, a.score, shift, delta);
    int exponent_ds = 0;
    if constexpr (Kind::SCALED)
      exponent_ds =
          scaling_exponent(block_max<Shape::num_warps>(largest_bits<Scores::MT, Scores::NT>(ds), words));
    store_tile<Kind, PTile, Scores::MT, Scores::NT>(p_tile, Scores::row(), Scores::column(), p,
                                                    power_of_two(P_EXPONENT));
    store_tile<Kind, PTile, Scores::MT, Scores::NT>(ds_tile, Scores::row(), Scores::column(), ds,
                                                    power_of_two(exponent_ds));
    if (a.in_turn) {
      if (turns_to_pass) __threadfence();
      if (threadIdx.x == 0)
        wait_for_turn(a.dq_turns + position_of(a, batch, step),
                      1 + turn_of(a.window, rows, k_block, Shape::block_k));
    }
    __syncthreads();
    // The last step's turn: its additions have long been made.
    if (a.in_turn && turns_to_pass && threadIdx.x == 0) pass_turn(turns_to_pass);

    constexpr int DKV_CHUNK = Dkv::NT < 4 ? Dkv::NT : 4, DQ_CHUNK = Dq::NT < 4 ? Dq::NT : 4;
    multiply<Kind, Shape::block_q / 16, DKV_CHUNK>(dv, TileOperand<PTile, true, false>(p_tile, Dkv::row()),
                                                   TileOperand<QTile, false, false>(dout_tile, Dkv::column()),
                                                   power_of_two(-P_EXPONENT - exponent_dout));
    multiply<Kind, Shape::block_q / 16, DKV_CHUNK>(dk, TileOperand<PTile, true, false>(ds_tile, Dkv::row()),
                                                   TileOperand<QTile, false, false>(q_tile, Dkv::column()),
                                                   power_of_two(-exponent_ds - exponent_q));
    float dq[Dq::MT][Dq::NT][4];
    set_zero<Dq::MT, Dq::NT>(dq);
    multiply<Kind, Shape::block_k / 16, DQ_CHUNK>(dq, TileOperand<PTile, true, true>(ds_tile, Dq::row()),
                                                  TileOperand<KTile, false, false>(k_tile, Dq::column()),
                                                  power_of_two(-exponent_ds - exponent_k));
    if constexpr (Shape::stages == 1) {
      __syncthreads();
      if (following.head < end_head) load_step(following, q_tile);
    }
    float *dq_sum = a.dq_sum + position_of(a, batch, step) * (Shape::block_q * HEAD_DIM);
#pragma unroll
    for (int m = 0; m < Dq::MT; m++)
#pragma unroll
      for (int n = 0; n < Dq::NT; n++) add_four(dq_sum + dq_offset<Dq>(m, n), dq[m][n]);
    turns_to_pass = a.dq_turns + position_of(a, batch, step);
  }
  if (a.in_turn && turns_to_pass) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) pass_turn(turns_to_pass);
  }

  const int column = columns.begin + Dkv::row(), d = Dkv::column();
  store_accumulator<Io, Dkv::MT, Dkv::NT>(row_of<Io>(a.dk, batch, kv_head, column) + d, a.dk.stride_row,
                                          columns.end - column, a.head_dim - d, dk, a.scale);
  store_accumulator<Io, Dkv::MT, Dkv::NT>(row_of<Io>(a.dv, batch, kv_head, column) + d, a.dv.stride_row,
                                          columns.end - column, a.head_dim - d, dv, 1);
}

template <class Kind, class Shape>
constexpr fa_cuda_kernel row(const char *name) {
  using Layout = BackwardLayout<Kind, Shape>;
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Layout::THREADS,
          .shared_bytes = Layout::SHARED_BYTES,
          .main = (const void *)backward<Kind, Shape>,
          .statistics = (const void *)statistics<Kind, Shape>,
          .finish_dq = (const void *)finish_dq<Kind, Shape>,
          .finish_threads = Layout::THREADS};
}

}  // namespace fa

#define ROW(rest, ...) \
  fa::row<fa::kinds::FA_KIND, fa::BackwardShape<__VA_ARGS__>>("cuda/sm80/" FA_QUOTE(FA_KIND) rest)

// Rows fill the registers with dk and dv (block_k * head_dim / threads each) and the shared memory with what is
// left; at 64, several blocks a multiprocessor, so that while one waits at a barrier another multiplies. The
// small ones are for multiprocessors with less shared memory: 99 KiB, or 136 for f32 at 256.
const fa_cuda_kernel FA_JOIN(fa_cuda_backward_, FA_KIND)[] = {
// bucket, block_q, block_k, warps, blocks per multiprocessor, stages; warps along q or k: scores, dk and dv, dq
#if FA_KIND_PARTS == 1
    ROW("/d64", 64, 64, 64, 4, 3, 2, 2, 2, 2),
    ROW("/d128", 128, 64, 128, 8, 1, 2, 2, 4, 2),
    ROW("/d256", 256, 64, 64, 8, 1, 2, 4, 2, 2),
    ROW("/d128/small", 128, 64, 64, 8, 1, 1, 4, 2, 2),
    ROW("/d256/small", 256, 32, 32, 4, 1, 1, 2, 2, 2),
#else
    ROW("/d64", 64, 64, 64, 4, 2, 1, 2, 2, 2),
    ROW("/d128", 128, 64, 64, 8, 1, 2, 2, 2, 2),
    ROW("/d256", 256, 32, 64, 8, 1, 1, 2, 2, 2),
    ROW("/d128/small", 128, 32, 32, 4, 1, 1, 2, 2, 2),
    ROW("/d256/small", 256, 32, 32, 4, 1, 1, 2, 2, 2),
#endif
    {},
};
