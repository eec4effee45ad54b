/*
 * FlashAttention's forward (Dao 2023), causal, in tiles of 32 columns that lie in shared memory. A warp
 * computes a row of q: each lane the score of one column, then, from lane 0 on, one element of o each.
 *
 *     q, k, v, o [num_heads, seqlen, HEAD_DIM]    lse [num_heads, seqlen]    HEAD_DIM: 4, 8, 16 or 32
 *     grid (ceil(seqlen / ROWS), num_heads), block 32 * ROWS, shared 2 * 32 * HEAD_DIM numbers
 */

template <int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(32 * ROWS)
    tiled_forward(const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
                  float *__restrict__ o, float *__restrict__ lse, int seqlen, float scale) {
  extern __shared__ __align__(16) float tiles[];
  float *k_tile = tiles, *v_tile = tiles + 32 * HEAD_DIM;
  __shared__ float q_tile[ROWS][HEAD_DIM];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * ROWS + warp;
  const size_t first = (size_t)blockIdx.y * seqlen * HEAD_DIM;
  if (lane < HEAD_DIM) q_tile[warp][lane] = row < seqlen ? q[first + row * HEAD_DIM + lane] : 0.f;

  float m = -INFINITY, l = 0.f, acc = 0.f;
  const int last_row = min(seqlen, (int)(blockIdx.x + 1) * ROWS) - 1;
  for (int begin = 0; begin <= last_row; begin += 32) {
    for (int i = threadIdx.x * 4; i < 32 * HEAD_DIM; i += blockDim.x * 4) {
      const bool is_there = begin + i / HEAD_DIM < seqlen;
      const size_t there = first + (size_t)begin * HEAD_DIM + i;
      const float4 nothing = make_float4(0.f, 0.f, 0.f, 0.f);
      *(float4 *)(k_tile + i) = is_there ? *(const float4 *)(k + there) : nothing;
      *(float4 *)(v_tile + i) = is_there ? *(const float4 *)(v + there) : nothing;
    }
    __syncthreads();  // the tile is there

    float s = 0.f;
    for (int p = 0; p < HEAD_DIM; p++) s += q_tile[warp][p] * k_tile[lane * HEAD_DIM + p];
    s = begin + lane <= row ? s * scale : -INFINITY;

    float new_m = s;
    for (int step = 16; step > 0; step /= 2) new_m = fmaxf(new_m, __shfl_xor_sync(0xffffffff, new_m, step));
    new_m = fmaxf(new_m, m);
    const float origin = new_m == -INFINITY ? 0.f : new_m, p = __expf(s - origin), decay = __expf(m - origin);
    float sum = p;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);

    acc *= decay;
    for (int j = 0; j < 32; j++) {
      const float p_j = __shfl_sync(0xffffffff, p, j);
      if (lane < HEAD_DIM) acc += p_j * v_tile[j * HEAD_DIM + lane];
    }
    l = l * decay + sum;
    m = new_m;
    __syncthreads();  // before the next tile takes this one's place
  }

  if (row >= seqlen) return;
  if (lane < HEAD_DIM) o[first + row * HEAD_DIM + lane] = acc / l;
  if (lane == 0) lse[blockIdx.y * seqlen + row] = m + __logf(l);
}
