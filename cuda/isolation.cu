// The small kernels beside passes whose rows do not all see the same: the one in front of a backward looks for
// a suspicion, and those behind a pass, where there is one, make what is NaN again (see isolation.cuh).
#include "decode.cuh"

namespace fa {

constexpr int THREADS = FA_CUDA_SMALL_KERNEL_THREADS, HEAD_DIM = 256;

// Calls visit(batch, head, i) for the rows of a tensor [batch, num_rows, num_heads, head_dim], one a warp.
template <class Visit>
__device__ inline void for_each_row_of(int batch, int num_heads, int num_rows, Visit visit) {
  const int64_t count = int64_t(batch) * num_heads * num_rows;
  for (int64_t i = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / 32; i < count;
       i += gridDim.x * (THREADS / 32))
    visit(int(i / num_rows / num_heads), int(i / num_rows % num_heads), int(i % num_rows));
}

// ---- in front of a backward --------------------------------------------------------------------------------

// Numbers that are not finite are noticed by what depends on them: those of a row in lse or delta, or in q
// where it sees nothing, and those of a column in the o and lse of rows that see it. Columns that none may see
// show in dq, where finish_dq looks at that, and here for other kernels. A number of a key that none may see is
// noticed here, too: added to scores that are hidden by -inf, it may make NaN of them.

// Whether the bias, one of keys or of flags, shows a column to that row: what it hides from one may be hidden
// from all.
template <class Io>
__device__ inline bool bias_shows(const fa_cuda_arguments &a, int batch, int kv_head, int row, int column) {
  const fa_cuda_cells &bias = a.program.bias;
  if (!bias.data) return true;
  bool shows = true;
  const int group = bias.stride_head ? heads_per_kv(a) : 1;
  with_type<Io>(bias.dtype, [&](auto type) {
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
      const float number = static_cast<float>(numbers_of<const decltype(type)>(bias, batch, head, row)[column]);
      shows &= number != -INFINITY;
      if (!(number < INFINITY)) note_suspect(a);
    }
  });
  return shows;
}

// Of 32 columns from one on, a bit for each: whether a band shows it to a row. Those of a band are a range, and
// a warp's lanes ask bands.
__device__ inline uint32_t columns_shown(const fa_cuda_arguments &a, int batch, int first) {
  uint32_t shown = 0;
  for (int number = threadIdx.x % 32; number < num_bands_of(a); number += 32) {
    const fa_band band = band_at(a, batch, number);
    const Range seen = seen_in_band<true>(band, {band.q_begin, band.q_end}),
                own = overlap({seen.begin - first, seen.end - first}, {0, 32});
    if (own.begin < own.end) shown |= ~0u << own.begin & ~0u >> (32 - own.end);
  }
  return __reduce_or_sync(~0u, shown);
}

// Whether a band shows something of the column block of a column, which else nobody reads.
__device__ inline bool is_visited(const fa_cuda_arguments &a, int batch, int column) {
  const Range columns = block_range(column / a.block_k, a.block_k, a.window.seqlen_k);
  bool is_seen = false;
  for (int number = threadIdx.x % 32; number < num_bands_of(a); number += 32) {
    const Range rows = seen_in_band<false>(band_at(a, batch, number), columns);
    is_seen |= rows.begin < rows.end;
  }
  return __any_sync(~0u, is_seen);
}

// A block of threads takes 32 columns, of all heads if the bias, which may hide some, is for all: a warp's
// lanes ask of each, and it looks, in its heads, at those that nobody may see.
template <class Kind>
__global__ void __launch_bounds__(THREADS) look_at_columns(const __grid_constant__ fa_cuda_arguments a) {
  using Io = typename Kind::Io;
  constexpr int WARPS = THREADS / 32;
  let_dependents_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int apart = a.program.bias.stride_head ? a.num_kv_heads : 1, together = a.num_kv_heads / apart;
  const int blocks = (a.window.seqlen_k + 31) / 32, own = blockIdx.x / blocks % apart;
  const int first = blockIdx.x % blocks * 32, column = first + lane, batch = blockIdx.x / blocks / apart;
  uint32_t unseen = 0;
  if (warp < together && is_visited(a, batch, first)) {
    const uint32_t shown = columns_shown(a, batch, first);
    bool is_shown = shown >> lane & 1;
    if (column < a.window.seqlen_k && a.program.bias.data) {
      const int row = is_shown && a.program.bias.stride_row ? first_seen<false>(a, batch, column) : 0;
      is_shown &= bias_shows<Io>(a, batch, own, row, column);
    }
    unseen = __ballot_sync(~0u, column < a.window.seqlen_k && !is_shown);
  }
  const Sequence s = sequence_of(a, batch);
  const int lanes = FA_CUDA_STATISTICS_LANES(a.head_dim), d = lane % lanes * 8;  // that share a column
  float sum = 0;
  auto look = [&](int kv_head, auto is_aligned) {
#pragma unroll 4
    for (int i = lane / lanes; i < 32; i += 32 / lanes) {
      // Some more than once, so that no load waits for a question.
      const int hidden = first + (unseen >> i & 1 ? i : __ffs(unseen) - 1);
      float k[8], v[8];
      load_eight<is_aligned.value>(k, column_of<const Io>(a.k_rows, s, kv_head, hidden) + d, a.head_dim - d);
      load_eight<is_aligned.value>(v, column_of<const Io>(a.v_rows, s, kv_head, hidden) + d, a.head_dim - d);
#pragma unroll
      for (int j = 0; j < 8; j++) sum += (k[j] + v[j]) * 0;
    }
  };
  const bool is_aligned =
      has_aligned_rows<Io>(a.k_rows, a.head_dim) && has_aligned_rows<Io>(a.v_rows, a.head_dim);
#pragma unroll 1
  for (int head = own * together + warp; unseen && head < (own + 1) * together; head += WARPS)
    if (is_aligned)
      look(head, std::true_type());
    else
      look(head, std::false_type());
  if (isnan(sum)) note_suspect(a);
  wait_for_launch_before();  // see launch_beside_plans
}

// ---- behind a pass -----------------------------------------------------------------------------------------

// Whether that pass has noted a suspicion.
__device__ inline bool is_suspect(const fa_cuda_arguments &a) {
  wait_for_launch_before();
  return *a.suspect == a.call;
}

template <class Kind>
__global__ void __launch_bounds__(THREADS) mend_forward(const __grid_constant__ fa_cuda_arguments a) {
  if (!is_suspect(a)) return;
  for_each_row_of(a.batch, a.num_heads, a.window.seqlen_q, [&](int batch, int head, int row) {
    mend_rows<Kind, typename Kind::Io, HEAD_DIM, true>(
        a, {batch, batch, head, {row, row + 1}, {0, sequence_of(a, batch).num_columns()}});
  });
}

// The same of few rows in parts that another kernel has merged.
template <class Kind>
__global__ void __launch_bounds__(THREADS)
    mend_few(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_cache cache) {
  if (!is_suspect(a)) return;
  for_each_row_of(a.batch, a.num_heads, a.window.seqlen_q, [&](int batch, int head, int row) {
    const int group = heads_per_kv(a);
    const decode::Unit all = {0, batch, head / group, 0, a.window.seqlen_q * group, group};
    decode::mend_row<Kind, HEAD_DIM, true>(a, cache, all, row * group + head % group);
  });
}

template <class Io>
__device__ inline void mend_dq(const fa_cuda_arguments &a, Place at) {
  const Sequence s = sequence_of(a, at.batch);
  Io *to = row_of<Io>(a.dq, s, at.head, at.row);
  if (!row_has_nan(to, a.head_dim)) return;
  RowSum<HEAD_DIM> dq(a.head_dim);
  for_each_band(a, at.batch, [&](const fa_band &band) {
    CellGradient cell;
    for_each_there(
        seen_in_band<true>(band, {at.row, at.row + 1}),
        [&](int column) {
          at.column = column;
          return gradient_of_cell<Io>(a, band, at, cell);
        },
        [&](int column, int lane) {
          dq.add(__shfl_sync(~0u, cell.of_product, lane),
                 column_of<const Io>(a.k_rows, s, kv_head_of(a, at.head), column));
        },
        [&] { return dq.is_lost(); });
  });
  dq.store(to, a.scale);
}

template <class Io>
__device__ inline void mend_dk_and_dv(const fa_cuda_arguments &a, const fa_cuda_gradients &g, int batch,
                                      int kv_head, int column) {
  const Sequence s = sequence_of(a, batch);
  Io *to_dk = column_of<Io>(g.dk, s, kv_head, column), *to_dv = column_of<Io>(g.dv, s, kv_head, column);
  if (!row_has_nan(to_dk, a.head_dim) && !row_has_nan(to_dv, a.head_dim)) return;
  RowSum<HEAD_DIM> dk(a.head_dim), dv(a.head_dim);
  for (int head = kv_head * heads_per_kv(a); head < (kv_head + 1) * heads_per_kv(a); head++)
    for_each_band(a, batch, [&](const fa_band &band) {
      CellGradient cell;
      for_each_there(
          seen_in_band<false>(band, {column, column + 1}),
          [&](int row) {
            return gradient_of_cell<Io>(a, band, {batch, head, row, column}, cell);
          },
          [&](int row, int lane) {
            dk.add(__shfl_sync(~0u, cell.of_product, lane), row_of<const Io>(a.q_rows, s, head, row));
            dv.add(__shfl_sync(~0u, cell.p, lane), row_of<const Io>(a.dout_rows, s, head, row));
          },
          [&] { return dk.is_lost() && dv.is_lost(); });
    });
  dk.store(to_dk, a.scale);
  dv.store(to_dv, 1);
}

// A number that is the gradient by all scores along some axes: term(gradient of a score, distance) of each that
// is visible, by a warp. Scores of these ranges; a lane takes rows.
template <class Io, class Term>
__device__ inline float sum_of_cells(const fa_cuda_arguments &a, Range batches, Range heads, Range rows,
                                     Range columns, Term term) {
  float sum = 0;
  for (int batch = batches.begin; batch < batches.end; batch++)
    for (int head = heads.begin; head < heads.end; head++)
      for (int first = rows.begin; first < rows.end; first += 32) {
        const int row = first + threadIdx.x % 32;
        for (int number = 0; number < num_bands_of(a) && row < rows.end; number++) {
          const fa_band band = band_at(a, batch, number);
          const Range seen = overlap(seen_in_band<true>(band, {row, row + 1}), columns);
          for (int column = seen.begin; column < seen.end && !isnan(sum); column++) {
            CellGradient cell;
            if (gradient_of_cell<Io>(a, band, {batch, head, row, column}, cell))
              sum += term(cell.of_score, float(fa_band_distance(band, row, column)));
          }
        }
        if (__any_sync(~0u, isnan(sum))) return NAN;
      }
  return warp_sum(sum);
}

// All along an axis that the numbers do not vary along, or the one.
__device__ inline Range along(int64_t stride, int i, int count) {
  return stride ? Range{i, i + 1} : Range{0, count};
}

// Mends the numbers of a tensor of cells, or of heads (num_columns 0).
template <class Io, class Term>
__device__ inline void mend_numbers(const fa_cuda_arguments &a, const fa_cuda_cells &to, int num_columns,
                                    Term term) {
  if (!to.data) return;
  const int heads = to.stride_head ? a.num_heads : 1, rows = to.stride_row ? a.window.seqlen_q : 1;
  for_each_row_of(to.stride_batch ? a.batch : 1, heads, rows, [&](int batch, int head, int row) {
    auto mend = [&](auto type) {
      auto *numbers = numbers_of<decltype(type)>(to, batch, head, row);
      for (int i = 0; i < max(num_columns, 1); i++) {
        if (!isnan(static_cast<float>(numbers[i]))) continue;
        const Range columns = num_columns > 0 ? Range{i, i + 1} : Range{0, a.window.seqlen_k};
        const float sum = sum_of_cells<Io>(a, along(to.stride_batch, batch, a.batch),
                                           along(to.stride_head, head, a.num_heads),
                                           along(to.stride_row, row, a.window.seqlen_q), columns, term);
        if (threadIdx.x % 32 == 0) store_number(numbers + i, sum);
      }
    };
    if (to.dtype == FA_DTYPE_F32)
      mend(float());
    else
      mend(Io());
  });
}

template <class Kind>
__global__ void __launch_bounds__(THREADS)
    mend_gradients(const __grid_constant__ fa_cuda_arguments a, const __grid_constant__ fa_cuda_gradients g) {
  using Io = typename Kind::Io;
  if (!is_suspect(a)) return;
  for_each_row_of(a.batch, a.num_heads, a.window.seqlen_q, [&](int batch, int head, int row) {
    mend_dq<Io>(a, {batch, head, row, 0});
  });
  for_each_row_of(a.batch, a.num_kv_heads, a.window.seqlen_k, [&](int batch, int kv_head, int column) {
    mend_dk_and_dv<Io>(a, g, batch, kv_head, column);
  });
  mend_numbers<Io>(a, g.dbias, a.window.seqlen_k, [](float of_score, float) { return of_score; });
  mend_numbers<Io>(a, g.of_heads[FA_CUDA_ALIBI_SLOPES], 0,
                   [](float of_score, float distance) { return -of_score * distance; });
}

}  // namespace fa

#define OF_KINDS(kernel)                                                                                     \
  {                                                                                                          \
    fa::address_of_kernel(fa::kernel<fa::kinds::bf16>), fa::address_of_kernel(fa::kernel<fa::kinds::f16>),   \
        fa::address_of_kernel(fa::kernel<fa::kinds::f32>), fa::address_of_kernel(fa::kernel<fa::kinds::f32>) \
  }
const void *const fa_cuda_look_kernels[FA_CUDA_NUM_KINDS] = OF_KINDS(look_at_columns);
const void *const fa_cuda_mend_forward_kernels[FA_CUDA_NUM_KINDS] = OF_KINDS(mend_forward);
const void *const fa_cuda_mend_few_kernels[FA_CUDA_NUM_KINDS] = OF_KINDS(mend_few);
const void *const fa_cuda_mend_kernels[FA_CUDA_NUM_KINDS] = OF_KINDS(mend_gradients);
