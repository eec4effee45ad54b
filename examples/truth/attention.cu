/*
 * Causal attention as its formulas stand, forward and backward; each thread computes a row of q.
 *
 *     q, k, v, o, dout, dq, dk, dv [num_heads, seqlen, head_dim]    lse [num_heads, seqlen]
 *     grid (ceil(seqlen / block), num_heads)
 */

__device__ float dot(const float *x, const float *y, int head_dim) {
  float sum = 0.f;
  for (int p = 0; p < head_dim; p++) sum += x[p] * y[p];
  return sum;
}

__global__ void attention_forward(const float *__restrict__ q, const float *__restrict__ k,
                                  const float *__restrict__ v, float *__restrict__ o, float *__restrict__ lse,
                                  int seqlen, int head_dim, float scale) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y;
  if (row >= seqlen) return;
  const size_t first = (size_t)head * seqlen * head_dim, here = first + (size_t)row * head_dim;

  float largest = -INFINITY;
  for (int j = 0; j <= row; j++)
    largest = fmaxf(largest, scale * dot(q + here, k + first + j * head_dim, head_dim));

  float sum = 0.f;
  for (int p = 0; p < head_dim; p++) o[here + p] = 0.f;
  for (int j = 0; j <= row; j++) {
    const float p_ij = expf(scale * dot(q + here, k + first + j * head_dim, head_dim) - largest);
    sum += p_ij;
    for (int p = 0; p < head_dim; p++) o[here + p] += p_ij * v[first + j * head_dim + p];
  }
  for (int p = 0; p < head_dim; p++) o[here + p] /= sum;
  lse[head * seqlen + row] = largest + logf(sum);
}

/* dk and dv must hold zeros. */
__global__ void attention_backward(const float *q, const float *k, const float *v, const float *o,
                                   const float *lse, const float *dout, float *dq, float *dk, float *dv,
                                   int seqlen, int head_dim, float scale) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y;
  if (row >= seqlen) return;
  const size_t first = (size_t)head * seqlen * head_dim, here = first + (size_t)row * head_dim;
  const float delta = dot(o + here, dout + here, head_dim);

  for (int p = 0; p < head_dim; p++) dq[here + p] = 0.f;
  for (int j = 0; j <= row; j++) {
    const size_t there = first + (size_t)j * head_dim;
    const float p_ij = expf(scale * dot(q + here, k + there, head_dim) - lse[head * seqlen + row]);
    const float ds = p_ij * (dot(dout + here, v + there, head_dim) - delta);
    for (int p = 0; p < head_dim; p++) {
      dq[here + p] += scale * ds * k[there + p];
      atomicAdd(&dk[there + p], scale * ds * q[here + p]);
      atomicAdd(&dv[there + p], p_ij * dout[here + p]);
    }
  }
}
