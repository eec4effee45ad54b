/*
 * Layer normalisation over rows of any width, forward and backward. A block computes a row.
 *
 *     x, y, dy, dx [rows, width]    gamma, beta, dgamma, dbeta [width]    mean, rstd [rows]
 *     grid rows, block a multiple of 32 up to 1024
 */

__device__ float sum_over_block(float x) {
  __shared__ float of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffff, x, step);
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();  // every warp's sum is there
  x = 0.f;
  for (int w = 0; w < num_warps; w++) x += of_warp[w];
  __syncthreads();  // before the next sum takes this one's place
  return x;
}

__global__ void layer_norm_forward(const float *x, const float *gamma, const float *beta, float *y, float *mean,
                                   float *rstd, int width, float epsilon) {
  const float *row = x + blockIdx.x * width;
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += row[i];
  const float mu = sum_over_block(sum) / width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) squares += (row[i] - mu) * (row[i] - mu);
  const float r = rsqrtf(sum_over_block(squares) / width + epsilon);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    y[blockIdx.x * width + i] = (row[i] - mu) * r * gamma[i] + beta[i];
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = mu;
    rstd[blockIdx.x] = r;
  }
}

/* dgamma and dbeta must hold zeros. */
__global__ void layer_norm_backward(const float *x, const float *gamma, const float *mean, const float *rstd,
                                    const float *dy, float *dx, float *dgamma, float *dbeta, int width) {
  const size_t first = (size_t)blockIdx.x * width;
  const float mu = mean[blockIdx.x], r = rstd[blockIdx.x];
  float a = 0.f, b = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float normal = (x[first + i] - mu) * r, g = dy[first + i] * gamma[i];
    a += g;
    b += g * normal;
    atomicAdd(&dgamma[i], dy[first + i] * normal);
    atomicAdd(&dbeta[i], dy[first + i]);
  }
  a = sum_over_block(a) / width;
  b = sum_over_block(b) / width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float normal = (x[first + i] - mu) * r;
    dx[first + i] = r * (dy[first + i] * gamma[i] - a - normal * b);
  }
}
