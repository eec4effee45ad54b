/* selective_scan.cu: the forward against f64, its derivative against complex steps through plain code, and the
 * backward against its derivative. */
#include <complex>

#include "flash_attention_truth.h"
#include "reference.h"

#ifndef KERNELS
#define KERNELS "selective_scan.cu"
#endif
#define float truth::real
#include KERNELS
#undef float

constexpr int seqlen = 9, channels = 5, num_states = 3;
enum { X, DELTA, A, B, C, SKIP, NUM_INPUTS };

/* y of the inputs, in any arithmetic. */
template <class T>
std::vector<T> scan(const std::vector<T> *of) {
  std::vector<T> y(seqlen * channels), h(channels * num_states);
  for (int t = 0; t < seqlen; t++)
    for (int d = 0; d < channels; d++) {
      const T x = of[X][t * channels + d], step = std::log(1.0 + std::exp(of[DELTA][t * channels + d]));
      T &sum = y[t * channels + d] = of[SKIP][d] * x;
      for (int n = d * num_states, i = 0; i < num_states; n++, i++) {
        h[n] = std::exp(step * of[A][n]) * h[n] + step * of[B][t * num_states + i] * x;
        sum += of[C][t * num_states + i] * h[n];
      }
    }
  return y;
}

/* d(<y, dy>)/d(of[input]): the imaginary part of a step along the imaginary axis, which nothing cancels. */
static numbers complex_steps(const numbers *of, int input, const numbers &dy) {
  std::vector<std::complex<double>> inputs[NUM_INPUTS];
  for (int i = 0; i < NUM_INPUTS; i++) inputs[i].assign(of[i].begin(), of[i].end());
  numbers gradient(of[input].size());
  for (size_t i = 0; i < gradient.size(); i++) {
    inputs[input][i] += std::complex<double>(0, 1e-30);
    const auto y = scan(inputs);
    for (size_t j = 0; j < y.size(); j++) gradient[i] += y[j].imag() * dy[j] / 1e-30;
    inputs[input][i] = of[input][i];
  }
  return gradient;
}

int main() {
  const int sizes[NUM_INPUTS] = {seqlen * channels,   seqlen * channels,   channels * num_states,
                                 seqlen * num_states, seqlen * num_states, channels};
  const char *names[NUM_INPUTS] = {"x", "delta", "a", "b", "c", "skip"};
  numbers values[NUM_INPUTS];
  std::unique_ptr<truth::array<>> in[NUM_INPUTS], out[NUM_INPUTS];
  for (int i = 0; i < NUM_INPUTS; i++) {
    values[i] = random_numbers(sizes[i], 10 + i);
    in[i] = std::make_unique<truth::array<>>(names[i], values[i]);
    out[i] = std::make_unique<truth::array<>>("d" + std::string(names[i]), sizes[i]);
  }
  const int block = 4, grid = (channels + block - 1) / block;
  truth::array<> y("y", seqlen * channels), states("states", seqlen * channels * num_states);
  truth::launch(scan_forward<num_states>, grid, block, 0, *in[X], *in[DELTA], *in[A], *in[B], *in[C], *in[SKIP],
                y, states, seqlen, channels);
  truth::expect("y", y.values(), scan(values));

  const numbers dy_values = random_numbers(seqlen * channels, 20);
  const truth::gradients gradients = truth::reverse({{y, dy_values}});
  for (int i = 0; i < NUM_INPUTS; i++)
    truth::expect("truth of " + in[i]->label(), gradients.of(*in[i]), complex_steps(values, i, dy_values));

  truth::array<> dy("dy", dy_values);
  out[B]->clear();
  out[C]->clear();
  truth::launch(scan_backward<num_states>, grid, block, 0, *in[X], *in[DELTA], *in[A], *in[B], *in[C],
                *in[SKIP], states, dy, *out[X], *out[DELTA], *out[A], *out[B], *out[C], *out[SKIP], seqlen,
                channels);
  for (int i = 0; i < NUM_INPUTS; i++) truth::expect(out[i]->label(), out[i]->values(), gradients.of(*in[i]));
  return truth::report();
}
