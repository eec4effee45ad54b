// The forward pass: FlashAttention-2's schedule. One block of threads takes block_q rows of one head, walks
// over the column blocks that these rows see, and keeps o and the softmax's state in registers.
//
// Compiled once for every kind: -DFA_KIND=bf16 and so on.
#define FA_TAKES_EXTREMES 1
#include "isolation.cuh"
#include "softmax.cuh"

namespace fa {

// A row of the table; none of it changes results by more than rounding.
template <int HEAD_DIM, int BLOCK_Q, int BLOCK_K, int NUM_WARPS, int BLOCKS_PER_SM>
struct ForwardShape {
  static constexpr int head_dim = HEAD_DIM, block_q = BLOCK_Q, block_k = BLOCK_K, num_warps = NUM_WARPS;
  static constexpr int blocks_per_sm = BLOCKS_PER_SM;
};

// Each warp has block_q / num_warps rows. K and V have two stages: while one block is worked on, the next
// comes.
template <class Kind, class Shape>
struct ForwardLayout {
  using QTile = Tile<Shape::block_q, Shape::head_dim>;
  using KTile = Tile<Shape::block_k, Shape::head_dim>;
  static constexpr int Q_BYTES = Kind::PARTS * QTile::BYTES, K_BYTES = Kind::PARTS * KTile::BYTES;
  static constexpr int STAGE_BYTES = 2 * K_BYTES, SHARED_BYTES = Q_BYTES + 2 * STAGE_BYTES;
  static constexpr int THREADS = Shape::num_warps * 32;
};

template <class Kind, class Shape, bool GENERAL>
__global__ void __launch_bounds__(Shape::num_warps * 32, Shape::blocks_per_sm)
    forward(const __grid_constant__ fa_cuda_arguments a) {
  using Layout = ForwardLayout<Kind, Shape>;
  using QTile = typename Layout::QTile;
  using KTile = typename Layout::KTile;
  constexpr int PARTS = Kind::PARTS, THREADS = Layout::THREADS;
  constexpr int WARP_ROWS = Shape::block_q / Shape::num_warps;
  constexpr int MT = WARP_ROWS / 16, NT = Shape::block_k / 8, DT = Shape::head_dim / 8;
  constexpr int P_EXPONENT = Kind::SCALED ? SCALED_EXPONENT - MAX_LAG : 0;
  static_assert(FA_CUDA_SCALE_ROWS % Shape::block_q == 0 && FA_CUDA_SCALE_ROWS % Shape::block_k == 0,
                "one scale a block");

  fa_cuda_block_plan plan = {};
  const RowBlock mine = row_block_of<GENERAL>(a, blockIdx.x, plan);
  const int head = mine.head, batch = mine.batch, kv_head = kv_head_of(a, head);
  const Sequence sequence = sequence_of(a, batch);
  const Range rows = row_range<Shape>(sequence, mine.q_block);
  Visits<GENERAL, true, Shape::block_k> visits(a, batch, plan, rows);
  const int warp_row = threadIdx.x / 32 * WARP_ROWS;

  FA_DYNAMIC_SHARED(128, uint8_t, shared);
  const uint32_t q_tile = shared_address(shared), stages = q_tile + Layout::Q_BYTES;
  const uint16_t *q = rows_of(a.q, sequence, head);
  const uint16_t *k = columns_of(a.k, sequence, kv_head);
  const uint16_t *v = columns_of(a.v, sequence, kv_head);
  auto load_k_and_v = [&](int column, uint32_t stage) {
    load_operand<Kind, KTile, THREADS>(stage, a.k, k, column, sequence.num_columns());
    load_operand<Kind, KTile, THREADS>(stage + Layout::K_BYTES, a.v, v, column, sequence.num_columns());
  };

  float o[MT][DT][4];
  set_zero<MT, DT>(o);
  OnlineSoftmax<Kind, MT> softmax;
  const float unit = exponent_of_unit<Kind>(a.score);
  const int exponent_q = exponent_of<Kind>(a.q, batch, head, sequence.first_row + rows.begin);
  fa_words row_words[MT] = {};
  if constexpr (GENERAL)
    for (int m = 0; m < MT && a.program.dropout_threshold > 0; m++)
      row_words[m] = lanes_row(a.program, batch, head, rows.begin + warp_row + m * 16);

  if (!visits.done()) {
    load_operand<Kind, QTile, THREADS>(q_tile, a.q, q, rows.begin, sequence.num_rows());
    load_k_and_v(visits.begin, stages);
  }
  uint32_t stage = 0;
  while (!visits.done()) {
    const int column = visits.begin;
    const fa_band band = visits.band;
    visits.advance();
    copy_async_wait_all();
    __syncthreads();  // this block is there, and the other stage is no longer in use
    const uint32_t k_tile = stages + stage;
    stage ^= Layout::STAGE_BYTES;
    if (!visits.done()) load_k_and_v(visits.begin, stages + stage);
    if constexpr (GENERAL) {
      // Padding and caches hold garbage, which times 0 may be NaN.
      const Range seen = columns_of_band(band, column, Shape::block_k);
      if (seen.begin > 0 || seen.end < Shape::block_k) {
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          clear_rows<KTile, THREADS>(k_tile + Layout::K_BYTES + part * KTile::BYTES, seen.begin, seen.end,
                                     threadIdx.x);
        __syncthreads();
      }
    }

    const int exponent_k = exponent_of<Kind>(a.k, batch, kv_head, sequence.first_column + column);
    const int exponent_v = exponent_of<Kind>(a.v, batch, kv_head, sequence.first_column + column);
    float scores[MT][NT][4];
    set_zero<MT, NT>(scores);
    multiply<Kind, Shape::head_dim / 16, NT>(scores, TileOperand<QTile, true, true>(q_tile, warp_row),
                                             TileOperand<KTile, false, true>(k_tile, 0),
                                             power_of_two(-exponent_q - exponent_k));
    make_scores_in_band<Kind, false, GENERAL, MT, NT>(scores, a, a.score, band, rows,
                                                      {column, column + Shape::block_k},
                                                      {batch, head, rows.begin + warp_row, column});
    if (softmax.update(scores, unit)) softmax.rescale_rows(o);
    if constexpr (GENERAL)
      if (a.program.dropout_threshold > 0)
        drop<MT, NT>(scores, a.program, row_words, ColumnsInMemory(a.program, column));

    // The accumulator of two column blocks is laid out as the left operand of one k fragment.
    RegisterOperand<PARTS, MT, NT / 2> p;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          uint32_t parts[PARTS];
          split<Kind>(parts, scores[m][n][half * 2] * power_of_two(P_EXPONENT),
                      scores[m][n][half * 2 + 1] * power_of_two(P_EXPONENT));
#pragma unroll
          for (int part = 0; part < PARTS; part++) p.fragments[part][m][n / 2][n % 2 * 2 + half] = parts[part];
        }
    multiply<Kind, NT / 2, 4>(o, p, TileOperand<KTile, false, false>(k_tile + Layout::K_BYTES, 0),
                              power_of_two(-P_EXPONENT - exponent_v));
  }

  float scale[MT][2], lse[MT][2];
  softmax.finish(scale, lse, a.score, a.sink + head, a.num_sinks, a.num_heads);
  if constexpr (GENERAL) multiply_kept<MT>(scale, a.program);
  const int row = rows.begin + warp_row;
  store_lse<MT>(lse_at(a, sequence, head, row), lse, rows.end - row);
  using Io = typename Kind::Io;
  store_accumulator<Io, MT, DT>(row_of<Io>(a.o, sequence, head, row), a.o.stride_row, rows.end - row,
                                a.head_dim, o, scale);
  note_nan(a, o);
}

template <class Kind, class Shape, bool GENERAL>
constexpr fa_cuda_kernel row(const char *name) {
  using Layout = ForwardLayout<Kind, Shape>;
  return {.name = name,
          .bucket = Shape::head_dim,
          .block_q = Shape::block_q,
          .block_k = Shape::block_k,
          .num_threads = Layout::THREADS,
          .shared_bytes = Layout::SHARED_BYTES,
          .takes = GENERAL ? FA_CUDA_ALL_NEEDS : FA_CUDA_PLAIN_NEEDS,
          .main = address_of_kernel(forward<Kind, Shape, GENERAL>)};
}

}  // namespace fa

// A kernel for plain problems, and one that takes whatever there is.
#define KERNEL(general, name, ...) fa::row<fa::kinds::FA_KIND, fa::ForwardShape<__VA_ARGS__>, general>(name)
#define ROW(rest, ...)                                             \
  KERNEL(false, "cuda/sm80/" FA_QUOTE(FA_KIND) rest, __VA_ARGS__), \
      KERNEL(true, "cuda/sm80/" FA_QUOTE(FA_KIND) rest "/general", __VA_ARGS__)

// Rows per warp (block_q / num_warps) decide how often a fragment of K and V that was read is used: 32 keep the
// tensor cores busier than shared memory, where the registers (o: rows * head_dim / 32 a thread) allow it; with
// f32's three products per pair of fragments, 16 do. The small ones are for multiprocessors with 99 KiB.
const fa_cuda_kernel FA_JOIN(fa_cuda_forward_, FA_KIND)[] = {
#if FA_KIND_PARTS == 1
    //                bucket, block_q, block_k, warps, blocks per multiprocessor
    ROW("/d64", 64, 128, 64, 4, 3),
    ROW("/d128", 128, 128, 64, 4, 2),
    ROW("/d256", 256, 128, 64, 8, 1),
    ROW("/d256/small", 256, 64, 32, 4, 1),
#else
    ROW("/d64", 64, 128, 64, 8, 1),
    ROW("/d128", 128, 128, 64, 8, 1),
    ROW("/d256", 256, 64, 32, 4, 1),
    ROW("/d128/small", 128, 64, 32, 4, 2),
    ROW("/d256/small", 256, 32, 16, 2, 1),
#endif
    {},
};
