/* tiled_attention.cu: the forward and its derivative against f64. */
#include "flash_attention_truth.h"
#include "reference.h"

#ifndef KERNELS
#define KERNELS "tiled_attention.cu"
#endif
#define float truth::real
TRUTH_DYNAMIC_SHARED(float, tiles);
#include KERNELS
#undef float

int main() {
  const int num_heads = 2, seqlen = 37, head_dim = 8, rows = 3;
  const double scale = 0.4;
  attention_reference r(num_heads, num_heads, seqlen, head_dim, seqlen, scale, 0, false);
  r.forward();
  r.backward();

  truth::array<> q("q", r.q), k("k", r.k), v("v", r.v), o("o", q.size()), lse("lse", num_heads * seqlen);
  truth::launch(tiled_forward<head_dim, rows>, dim3((seqlen + rows - 1) / rows, num_heads), 32 * rows,
                2 * 32 * head_dim * 4, q, k, v, o, lse, seqlen, scale);
  truth::expect("o", o.values(), r.o);
  truth::expect("lse", lse.values(), r.lse);

  const truth::gradients gradients = truth::reverse({{o, r.dout}});
  truth::expect("truth of q", gradients.of(q), r.dq);
  truth::expect("truth of k", gradients.of(k), r.dk);
  truth::expect("truth of v", gradients.of(v), r.dv);
  return truth::report();
}
