/*
 * The algorithm of this project's portable forward (c_src/cpu/forward.h, cuda/forward.cu), of bf16: a block
 * takes ROWS rows of q, and the columns that they see in blocks of BLOCK. Scores are in powers of two and lie
 * transposed, st[BLOCK][ROWS]; sinks join the sum at the end. A thread has one row in every step but the loads.
 *
 *     q, o [num_heads, seqlen, HEAD_DIM]    k, v [num_kv_heads, seqlen, HEAD_DIM]
 *     lse [num_heads, seqlen]               sink [num_heads], or null
 *     grid (ceil(seqlen / ROWS), num_heads), block ROWS
 */

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

template <int HEAD_DIM, int ROWS, int BLOCK>
__global__ void portable_forward(const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v,
                                 const float *sink, __nv_bfloat16 *o, float *lse, int num_kv_heads, int seqlen,
                                 int window_left, float scale, float softcap) {
  const float log2e = 1.44269504088896340736f;
  __shared__ __nv_bfloat16 k_block[BLOCK][HEAD_DIM], v_block[BLOCK][HEAD_DIM];
  __shared__ float st[BLOCK][ROWS];
  const int thread = threadIdx.x, head = blockIdx.y, row = blockIdx.x * ROWS + thread;
  const int kv_head = head * num_kv_heads / gridDim.y;
  const bool is_there = row < seqlen;

  float q_row[HEAD_DIM], acc[HEAD_DIM], m = -INFINITY, l = 0.f;
  for (int p = 0; p < HEAD_DIM; p++) {
    q_row[p] = is_there ? __bfloat162float(q[(head * seqlen + row) * HEAD_DIM + p]) : 0.f;
    acc[p] = 0.f;
  }

  // The columns that any row of this block sees.
  const int end = min((int)(blockIdx.x + 1) * ROWS, seqlen),
            begin = max((int)blockIdx.x * ROWS - window_left, 0);
  for (int first = begin / BLOCK * BLOCK; first < end; first += BLOCK) {
    for (int i = thread; i < BLOCK * HEAD_DIM; i += ROWS) {
      const int column = first + i / HEAD_DIM, p = i % HEAD_DIM;
      const size_t there = (size_t)(kv_head * seqlen + column) * HEAD_DIM + p;
      k_block[i / HEAD_DIM][p] = column < seqlen ? k[there] : __float2bfloat16(0.f);
      v_block[i / HEAD_DIM][p] = column < seqlen ? v[there] : __float2bfloat16(0.f);
    }
    __syncthreads();

    float largest = m;
    for (int j = 0; j < BLOCK; j++) {
      float s = 0.f;
      for (int p = 0; p < HEAD_DIM; p++) s = fmaf(q_row[p], __bfloat162float(k_block[j][p]), s);
      s *= scale;
      if (softcap != 0.f) s = softcap * tanhf(s / softcap);
      const int column = first + j;
      st[j][thread] = column <= row && column >= row - window_left && is_there ? s * log2e : -INFINITY;
      largest = fmaxf(largest, st[j][thread]);
    }
    const float origin = largest == -INFINITY ? 0.f : largest, decay = exp2f(m - origin);
    l *= decay;
    for (int p = 0; p < HEAD_DIM; p++) acc[p] *= decay;
    for (int j = 0; j < BLOCK; j++) {
      const float p_j = exp2f(st[j][thread] - origin);
      l += p_j;
      const float rounded = __bfloat162float(__float2bfloat16(p_j));
      for (int p = 0; p < HEAD_DIM; p++) acc[p] += rounded * __bfloat162float(v_block[j][p]);
    }
    m = largest;
    __syncthreads();
  }

  if (!is_there) return;
  if (sink) {
    const float in_twos = sink[head] * log2e, largest = fmaxf(m, in_twos), decay = exp2f(m - largest);
    for (int p = 0; p < HEAD_DIM; p++) acc[p] *= decay;
    l = l * decay + exp2f(in_twos - largest);
    m = largest;
  }
  for (int p = 0; p < HEAD_DIM; p++) o[(head * seqlen + row) * HEAD_DIM + p] = __float2bfloat16(acc[p] / l);
  lse[head * seqlen + row] = (m + log2f(l)) / log2e;
}
