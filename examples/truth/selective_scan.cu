/*
 * The selective scan of state space models (Gu and Dao 2023), forward and backward. A thread computes a channel
 * d:
 *
 *     step[t]  = log(1 + exp(delta[t, d]))
 *     h[t, n]  = exp(step[t] * a[d, n]) * h[t - 1, n] + step[t] * b[t, n] * x[t, d]
 *     y[t, d]  = sum_n c[t, n] * h[t, n] + skip[d] * x[t, d]
 *
 *     x, delta, y [seqlen, channels]    a [channels, STATES]    b, c [seqlen, STATES]    skip [channels]
 *     states [seqlen, channels, STATES]: every h, which the backward needs
 */

template <int STATES>
__global__ void scan_forward(const float *x, const float *delta, const float *a, const float *b, const float *c,
                             const float *skip, float *y, float *states, int seqlen, int channels) {
  const int d = blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  float h[STATES] = {};
  for (int t = 0; t < seqlen; t++) {
    const float x_t = x[t * channels + d], step = log1pf(expf(delta[t * channels + d]));
    float sum = skip[d] * x_t;
    for (int n = 0; n < STATES; n++) {
      h[n] = expf(step * a[d * STATES + n]) * h[n] + step * b[t * STATES + n] * x_t;
      sum += c[t * STATES + n] * h[n];
      states[(t * channels + d) * STATES + n] = h[n];
    }
    y[t * channels + d] = sum;
  }
}

/* db and dc must hold zeros. */
template <int STATES>
__global__ void scan_backward(const float *x, const float *delta, const float *a, const float *b,
                              const float *c, const float *skip, const float *states, const float *dy,
                              float *dx, float *ddelta, float *da, float *db, float *dc, float *dskip,
                              int seqlen, int channels) {
  const int d = blockIdx.x * blockDim.x + threadIdx.x;
  if (d >= channels) return;
  float dh[STATES] = {}, da_d[STATES] = {}, dskip_d = 0.f;
  for (int t = seqlen - 1; t >= 0; t--) {
    const int here = t * channels + d;
    const float step = log1pf(expf(delta[here])), dy_t = dy[here];
    float dx_t = skip[d] * dy_t, dstep = 0.f;
    dskip_d += x[here] * dy_t;
    for (int n = 0; n < STATES; n++) {
      const float before = t > 0 ? states[(here - channels) * STATES + n] : 0.f;
      const float decay = expf(step * a[d * STATES + n]), b_n = b[t * STATES + n];
      atomicAdd(&dc[t * STATES + n], dy_t * states[here * STATES + n]);
      dh[n] += dy_t * c[t * STATES + n];
      atomicAdd(&db[t * STATES + n], dh[n] * step * x[here]);
      dx_t += dh[n] * step * b_n;
      dstep += dh[n] * (a[d * STATES + n] * decay * before + b_n * x[here]);
      da_d[n] += dh[n] * step * decay * before;
      dh[n] *= decay;
    }
    dx[here] = dx_t;
    ddelta[here] = dstep / (1.f + expf(-delta[here]));
  }
  for (int n = 0; n < STATES; n++) da[d * STATES + n] = da_d[n];
  dskip[d] = dskip_d;
}
