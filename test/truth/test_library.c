/*
 * The functions for C of flash_attention_truth.h, in a library that is loaded while the program runs: values,
 * gradients, derivatives along a direction, findings, and what is said of wrong calls. The argument is the
 * library.
 */
#include <dlfcn.h>
#include <math.h>

#include "check.h"
#include "flash_attention_truth.h"

enum { ROWS = 3, WIDTH = 37, COUNT = ROWS * WIDTH };
static const double epsilon = 1e-5;

static struct {
  __typeof__(&truth_array) array;
  __typeof__(&truth_launch) launch;
  __typeof__(&truth_values) values, gradient, tangent;
  __typeof__(&truth_seed) seed, direction;
  __typeof__(&truth_option) option;
  __typeof__(&truth_clear) clear;
  __typeof__(&truth_findings) findings, error;
} api;

/* ISO C converts no pointer to data into one to a function, which POSIX makes the same. */
static void load(void *library, const char *name, void *function) {
  void *found = library ? dlsym(library, name) : NULL;
  CHECK(found, "%s: %s", name, dlerror());
  memcpy(function, &found, sizeof found);
}

static void load_all(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  load(library, "truth_array", &api.array);
  load(library, "truth_launch", &api.launch);
  load(library, "truth_values", &api.values);
  load(library, "truth_gradient", &api.gradient);
  load(library, "truth_tangent", &api.tangent);
  load(library, "truth_seed", &api.seed);
  load(library, "truth_direction", &api.direction);
  load(library, "truth_option", &api.option);
  load(library, "truth_clear", &api.clear);
  load(library, "truth_findings", &api.findings);
  load(library, "truth_error", &api.error);
}

static void fill(double *numbers, size_t count, double step) {
  for (size_t i = 0; i < count; i++) numbers[i] = sin(step * (double)(i + 1));
}

static void check_near(const char *what, const double *got, const double *expected, size_t count) {
  double error = 0;
  for (size_t i = 0; i < count; i++) error = fmax(error, isnan(got[i]) ? INFINITY : fabs(got[i] - expected[i]));
  CHECK(error < 1e-12, "%s: off by %g", what, error);
}

/* y [ROWS, WIDTH] of x, and its derivative along dx where there is one. */
static void layer_norm(const double *x, const double *dx, double *y, double *dy) {
  for (int row = 0; row < ROWS; row++, x += WIDTH, y += WIDTH, dx += WIDTH, dy += WIDTH) {
    double mean = 0, variance = 0, dmean = 0, dvariance = 0;
    for (int i = 0; i < WIDTH; i++) mean += x[i] / WIDTH, dmean += dx[i] / WIDTH;
    for (int i = 0; i < WIDTH; i++) {
      variance += (x[i] - mean) * (x[i] - mean) / WIDTH;
      dvariance += 2 * (x[i] - mean) * (dx[i] - dmean) / WIDTH;
    }
    const double rstd = 1 / sqrt(variance + epsilon), drstd = -0.5 * rstd * rstd * rstd * dvariance;
    for (int i = 0; i < WIDTH; i++) {
      y[i] = (x[i] - mean) * rstd;
      dy[i] = (dx[i] - dmean) * rstd + (x[i] - mean) * drstd;
    }
  }
}

static double dot(const double *a, const double *b, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

static void test_derivatives(void) {
  double x[COUNT], along_x[COUNT], dy[COUNT], ones[WIDTH], zeros[WIDTH] = {0};
  double y[COUNT], along_y[COUNT], dx[COUNT], dgamma[WIDTH], got[COUNT];
  fill(x, COUNT, 1), fill(along_x, COUNT, 2.5), fill(dy, COUNT, 0.7);
  for (int i = 0; i < WIDTH; i++) ones[i] = 1;

  CHECK(api.array("x", x, COUNT) == 0 && api.array("gamma", ones, WIDTH) == 0, "%s", api.error());
  CHECK(api.array("beta", zeros, WIDTH) == 0 && api.array("y", NULL, COUNT) == 0, "%s", api.error());
  CHECK(api.array("mean", NULL, ROWS) == 0 && api.array("rstd", NULL, ROWS) == 0, "%s", api.error());
  CHECK(api.launch("layer_norm_forward grid=3 block=64 args=x,gamma,beta,y,mean,rstd,37,1e-5") == 0, "%s%s",
        api.error(), api.findings());
  layer_norm(x, along_x, y, along_y);
  CHECK(api.values("y", got, COUNT) == 0, "%s", api.error());
  check_near("y", got, y, COUNT);

  CHECK(api.direction("x", along_x, COUNT) == 0 && api.tangent("y", got, COUNT) == 0, "%s", api.error());
  check_near("y along a direction of x", got, along_y, COUNT);
  CHECK(api.seed("y", dy, COUNT) == 0 && api.gradient("x", dx, COUNT) == 0, "%s", api.error());
  const double expected = dot(dy, along_y, COUNT);
  CHECK(fabs(dot(dx, along_x, COUNT) - expected) < 1e-12, "dx . along_x: expected %g", expected);
  CHECK(api.gradient("gamma", dgamma, WIDTH) == 0, "%s", api.error());

  /* The backward kernel agrees, and what it computes does not change what is known of the forward. */
  CHECK(api.array("dy", dy, COUNT) == 0 && api.array("dx", NULL, COUNT) == 0, "%s", api.error());
  CHECK(api.array("dgamma", zeros, WIDTH) == 0 && api.array("dbeta", zeros, WIDTH) == 0, "%s", api.error());
  CHECK(api.launch("layer_norm_backward grid=3 block=32 args=x,gamma,mean,rstd,dy,dx,dgamma,dbeta,37") == 0,
        "%s%s", api.error(), api.findings());
  CHECK(api.values("dx", got, COUNT) == 0, "%s", api.error());
  check_near("dx", got, dx, COUNT);
  CHECK(api.values("dgamma", got, WIDTH) == 0, "%s", api.error());
  check_near("dgamma", got, dgamma, WIDTH);
  CHECK(api.gradient("x", got, COUNT) == 0, "%s", api.error());
  check_near("the gradient again", got, dx, COUNT);

  /* Other seeds replace the first, and numbers computed later have derivatives along the direction, too. */
  for (int i = 0; i < COUNT; i++) dy[i] *= -2, dx[i] *= -2;
  CHECK(api.seed("y", dy, COUNT) == 0 && api.gradient("x", got, COUNT) == 0, "%s", api.error());
  check_near("the gradient of other seeds", got, dx, COUNT);
  CHECK(api.tangent("mean", got, ROWS) == 0 && api.tangent("dx", got, COUNT) == 0, "%s", api.error());
  CHECK(dot(got, got, COUNT) > 0, "dx depends on x");
  CHECK_TEXT(api.findings(), "");
}

static void test_findings(void) {
  const double x[] = {1, 2, 3};
  double got[3];
  api.clear();
  CHECK(api.array("x", x, 3) == 0 && api.array("y", NULL, 3) == 0 && api.array("order", NULL, 3) == 0, "%s",
        api.error());
  CHECK(api.launch("reverse_carelessly block=3 shared=12 args=x,y,order,3") == 1, "expected findings");
  CHECK_TEXT(api.findings(),
             "unwritten: thread (0, 0, 0) of block (0, 0, 0) reads tile[2], which nobody wrote\n"
             "race: tile[2] is read by thread (0, 0, 0) of block (0, 0, 0) and written by thread (2, 0, 0) of "
             "block (0, 0, 0), without a barrier between them\n"
             "  and 1 more of these\n");
  CHECK(api.values("order", got, 3) == 0 && got[0] == 2 && got[2] == 0, "integers have values");
  CHECK(api.gradient("order", got, 3) == 2, "and no gradients");
  CHECK(api.array("y", NULL, 3) == 0 && api.values("y", got, 3) == 0 && isnan(got[0]),
        "what nobody wrote is NaN");
  api.clear();
  CHECK_TEXT(api.findings(), "");
}

static void test_wrong_calls(void) {
  double x[3] = {1.1, 2, 3};
  api.clear();
  CHECK(api.array("x", x, 3) == 0, "%s", api.error());
  CHECK(api.launch("forwards args=x") == 2, "no such kernel");
  CHECK_TEXT(api.error(), "forwards: expected the name of a kernel");
  CHECK(api.launch("reverse_carelessly args=x,x") == 2, "too few arguments");
  CHECK_TEXT(api.error(), "reverse_carelessly: expected args= with 4 arguments, got 2");
  CHECK(api.launch("reverse_carelessly args=x,y,x,3") == 2, "no such array");
  CHECK_TEXT(api.error(), "y: expected an array of that name");
  CHECK(api.launch("reverse_carelessly args=x,x,x,three") == 2, "no number");
  CHECK_TEXT(api.error(), "three: expected a number");
  CHECK(api.seed("x", x, 2) == 2, "a wrong count");
  CHECK_TEXT(api.error(), "x: expected 3 numbers, got 2");
  CHECK(api.values("x", x, 4) == 2, "a wrong count");
  CHECK_TEXT(api.error(), "x: expected 3 numbers, got 4");
  CHECK(api.option("--f16") == 2, "no such option");
  CHECK_TEXT(api.error(), "--f16: no such option");
  CHECK(api.option("--f32") == 0 && api.array("z", x, 1) == 0 && api.values("z", x, 1) == 0, "%s", api.error());
  CHECK(x[0] == (double)1.1f, "an option is taken");
}

int main(int count, char **words) {
  load_all(count > 1 ? words[1] : "");
  if (num_failed == 0) {
    test_derivatives();
    test_findings();
    test_wrong_calls();
  }
  return report();
}
