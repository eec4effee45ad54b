/* layer_norm.cu: the forward against f64, its derivative against the formulas in f64, the backward against
 * both. */
#include "flash_attention_truth.h"
#include "reference.h"

#ifndef KERNELS
#define KERNELS "layer_norm.cu"
#endif
#define float truth::real
#include KERNELS
#undef float

struct layer_norm_reference {
  numbers y, dx, dgamma, dbeta;

  layer_norm_reference(const numbers &x, const numbers &gamma, const numbers &beta, const numbers &dy,
                       double epsilon)
      : y(x.size()), dx(x.size()), dgamma(gamma.size()), dbeta(gamma.size()) {
    const size_t width = gamma.size();
    for (size_t first = 0; first < x.size(); first += width) {
      double mean = 0, variance = 0, a = 0, b = 0;
      for (size_t i = 0; i < width; i++) mean += x[first + i] / width;
      for (size_t i = 0; i < width; i++) variance += (x[first + i] - mean) * (x[first + i] - mean) / width;
      const double rstd = 1 / std::sqrt(variance + epsilon);
      for (size_t i = 0; i < width; i++) {
        const double normal = (x[first + i] - mean) * rstd, g = dy[first + i] * gamma[i];
        y[first + i] = normal * gamma[i] + beta[i];
        a += g / width;
        b += g * normal / width;
        dgamma[i] += dy[first + i] * normal;
        dbeta[i] += dy[first + i];
      }
      for (size_t i = 0; i < width; i++)
        dx[first + i] = rstd * (dy[first + i] * gamma[i] - a - (x[first + i] - mean) * rstd * b);
    }
  }
};

int main() {
  const int rows = 3, width = 77, block = 64;
  const double epsilon = 1e-5;
  const numbers x_values = random_numbers(rows * width, 1), gamma_values = random_numbers(width, 2),
                beta_values = random_numbers(width, 3), dy_values = random_numbers(rows * width, 4);
  const layer_norm_reference r(x_values, gamma_values, beta_values, dy_values, epsilon);

  truth::array<> x("x", x_values), gamma("gamma", gamma_values), beta("beta", beta_values), y("y", x.size()),
      mean("mean", rows), rstd("rstd", rows);
  truth::launch(layer_norm_forward, rows, block, 0, x, gamma, beta, y, mean, rstd, width, epsilon);
  truth::expect("y", y.values(), r.y);

  const truth::gradients gradients = truth::reverse({{y, dy_values}});
  truth::expect("truth of x", gradients.of(x), r.dx);
  truth::expect("truth of gamma", gradients.of(gamma), r.dgamma);
  truth::expect("truth of beta", gradients.of(beta), r.dbeta);

  truth::array<> dy("dy", dy_values), dx("dx", x.size()), dgamma("dgamma", width), dbeta("dbeta", width);
  dgamma.clear();
  dbeta.clear();
  truth::launch(layer_norm_backward, rows, block, 0, x, gamma, mean, rstd, dy, dx, dgamma, dbeta, width);
  truth::expect("dx", dx.values(), gradients.of(x));
  truth::expect("dgamma", dgamma.values(), gradients.of(gamma));
  truth::expect("dbeta", dbeta.values(), gradients.of(beta));
  return truth::report();
}
