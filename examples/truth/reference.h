/* What the examples are held against: plain loops in double, and numbers that are the same everywhere. */
#ifndef TRUTH_EXAMPLES_REFERENCE_H
#define TRUTH_EXAMPLES_REFERENCE_H

#include <cmath>
#include <cstdint>
#include <vector>

using numbers = std::vector<double>;

/* In [-1, 1). */
inline numbers random_numbers(int count, uint64_t seed) {
  numbers all(count);
  for (double &x : all) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x = double(int64_t(seed) >> 11) * 0x1p-52;
  }
  return all;
}

/* q, o, dout, dq [num_heads, seqlen, head_dim], k, v, dk, dv [num_kv_heads, seqlen, head_dim],
 * lse [num_heads, seqlen], sink, dsink [num_heads] or empty. Row i sees columns i - window_left to i. */
struct attention_reference {
  int num_heads, num_kv_heads, seqlen, head_dim, window_left;
  double scale, softcap; /* softcap 0: none */
  numbers q, k, v, sink, dout;
  numbers o, lse, dq, dk, dv, dsink;

  attention_reference(int num_heads, int num_kv_heads, int seqlen, int head_dim, int window_left, double scale,
                      double softcap, bool has_sink)
      : num_heads(num_heads),
        num_kv_heads(num_kv_heads),
        seqlen(seqlen),
        head_dim(head_dim),
        window_left(window_left),
        scale(scale),
        softcap(softcap) {
    const int size = num_heads * seqlen * head_dim, kv_size = num_kv_heads * seqlen * head_dim;
    q = random_numbers(size, 1);
    k = random_numbers(kv_size, 2);
    v = random_numbers(kv_size, 3);
    dout = random_numbers(size, 4);
    if (has_sink) sink = random_numbers(num_heads, 5);
  }

  bool sees(int i, int j) const { return j <= i && j >= i - window_left; }

  const double *row(const numbers &x, int head, int i) const { return &x[(head * seqlen + i) * head_dim]; }
  double *row(numbers &x, int head, int i) const { return &x[(head * seqlen + i) * head_dim]; }

  double dot(const double *x, const double *y) const {
    double sum = 0;
    for (int p = 0; p < head_dim; p++) sum += x[p] * y[p];
    return sum;
  }

  double score(int head, int i, int j) const {
    const double s = scale * dot(row(q, head, i), row(k, head * num_kv_heads / num_heads, j));
    return softcap ? softcap * std::tanh(s / softcap) : s;
  }

  void forward() {
    o.assign(q.size(), 0);
    lse.assign(num_heads * seqlen, 0);
    for (int head = 0; head < num_heads; head++)
      for (int i = 0; i < seqlen; i++) {
        double sum = sink.empty() ? 0 : std::exp(sink[head]);
        for (int j = 0; j <= i; j++) sum += sees(i, j) ? std::exp(score(head, i, j)) : 0;
        lse[head * seqlen + i] = std::log(sum);
        for (int j = 0; j <= i; j++)
          for (int p = 0; p < head_dim && sees(i, j); p++)
            row(o, head, i)[p] +=
                std::exp(score(head, i, j)) / sum * row(v, head * num_kv_heads / num_heads, j)[p];
      }
  }

  void backward() {
    dq.assign(q.size(), 0);
    dk.assign(k.size(), 0);
    dv.assign(v.size(), 0);
    dsink.assign(sink.size(), 0);
    for (int head = 0; head < num_heads; head++)
      for (int i = 0; i < seqlen; i++) {
        const int kv = head * num_kv_heads / num_heads;
        const double *dout_row = row(dout, head, i), delta = dot(row(o, head, i), dout_row);
        const double row_lse = lse[head * seqlen + i];
        if (!sink.empty()) dsink[head] -= std::exp(sink[head] - row_lse) * delta;
        for (int j = 0; j <= i; j++) {
          if (!sees(i, j)) continue;
          const double s = score(head, i, j), p = std::exp(s - row_lse);
          double ds = p * (dot(dout_row, row(v, kv, j)) - delta);
          if (softcap) ds *= 1 - s / softcap * s / softcap;
          for (int c = 0; c < head_dim; c++) {
            row(dv, kv, j)[c] += p * dout_row[c];
            row(dq, head, i)[c] += scale * ds * row(k, kv, j)[c];
            row(dk, kv, j)[c] += scale * ds * row(q, head, i)[c];
          }
        }
      }
  }
};

#endif
