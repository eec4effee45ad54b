/* attention.cu: the forward against f64, and the backward against the derivative of that forward. */
#include "flash_attention_truth.h"
#include "reference.h"

#ifndef KERNELS
#define KERNELS "attention.cu"
#endif
#define float truth::real
#include KERNELS
#undef float

int main() {
  const int num_heads = 2, seqlen = 13, head_dim = 5, block = 8;
  const double scale = 0.4;
  attention_reference r(num_heads, num_heads, seqlen, head_dim, seqlen, scale, 0, false);
  r.forward();
  r.backward();

  truth::array<> q("q", r.q), k("k", r.k), v("v", r.v), o("o", q.size()), lse("lse", num_heads * seqlen);
  const dim3 grid((seqlen + block - 1) / block, num_heads);
  truth::launch(attention_forward, grid, block, 0, q, k, v, o, lse, seqlen, head_dim, scale);
  truth::expect("o", o.values(), r.o);
  truth::expect("lse", lse.values(), r.lse);

  const truth::gradients gradients = truth::reverse({{o, r.dout}});
  truth::expect("truth of q", gradients.of(q), r.dq);
  truth::expect("truth of k", gradients.of(k), r.dk);
  truth::expect("truth of v", gradients.of(v), r.dv);

  truth::array<> dout("dout", r.dout), dq("dq", q.size()), dk("dk", k.size()), dv("dv", v.size());
  dk.clear();
  dv.clear();
  truth::launch(attention_backward, grid, block, 0, q, k, v, o, lse, dout, dq, dk, dv, seqlen, head_dim, scale);
  truth::expect("dq", dq.values(), gradients.of(q));
  truth::expect("dk", dk.values(), gradients.of(k));
  truth::expect("dv", dv.values(), gradients.of(v));
  return truth::report();
}
