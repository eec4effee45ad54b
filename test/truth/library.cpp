/* A shared library of kernels, for test_library.c: layer normalisation as it is, and a kernel with faults. */
#define TRUTH_FLOAT
#include "flash_attention_truth.h"
#include "layer_norm.cu"

/* Reverses count numbers within a block: without a barrier, and beyond the end where too many are asked for. */
TRUTH_DYNAMIC_SHARED(float, tile);
__global__ void reverse_carelessly(const float *x, float *y, int *order, int count) {
  const int i = threadIdx.x;
  tile[i] = x[i];
  order[i] = count - 1 - i;
  y[i] = tile[count - 1 - i];
}

TRUTH_EXPORT(layer_norm_forward, layer_norm_backward, reverse_carelessly)
