/* portable_forward.cu: grouped heads, a window, softcap and sinks, forward and derivative against f64; once
 * without rounding to bf16, and once with it, whose derivative is that of no rounding. */
#include "flash_attention_truth.h"
#include "reference.h"

#ifndef KERNELS
#define KERNELS "portable_forward.cu"
#endif
#define float truth::real
#include KERNELS
#undef float

static void check(const std::string &which, double tolerance) {
  const int num_heads = 4, num_kv_heads = 2, seqlen = 21, head_dim = 6, window_left = 9, rows = 8, block = 4;
  const double scale = 0.5, softcap = 1.5;
  attention_reference r(num_heads, num_kv_heads, seqlen, head_dim, window_left, scale, softcap, true);
  for (numbers *x : {&r.q, &r.k, &r.v})
    for (double &number : *x) number = truth::bf16::nearest(number);
  r.forward();
  r.backward();

  truth::array<truth::bf16> q("q", r.q), k("k", r.k), v("v", r.v), o("o", q.size());
  truth::array<> sink("sink", r.sink), lse("lse", num_heads * seqlen);
  truth::launch(portable_forward<head_dim, rows, block>, dim3((seqlen + rows - 1) / rows, num_heads), rows, 0,
                q, k, v, sink, o, lse, num_kv_heads, seqlen, window_left, scale, softcap);
  truth::expect(which + "o", o.values(), r.o, tolerance);
  truth::expect(which + "lse", lse.values(), r.lse, 1e-7);

  const truth::gradients gradients = truth::reverse({{o, r.dout}});
  truth::expect(which + "truth of q", gradients.of(q), r.dq, tolerance);
  truth::expect(which + "truth of k", gradients.of(k), r.dk, tolerance);
  truth::expect(which + "truth of v", gradients.of(v), r.dv, tolerance);
  truth::expect(which + "truth of sink", gradients.of(sink), r.dsink, tolerance);
}

int main() {
  truth::options().round_halves = false;
  check("", 1e-7);  // log2e is an f32
  truth::options().round_halves = true;
  check("rounded: ", 0.01);
  return truth::report();
}
