/*
 * Runs a pass on a device and distrusts it: outputs, the gaps between their rows, what surrounds them and the
 * workspace are poisoned before, and looked at after. Tensors are kept as doubles, contiguous, whatever type
 * and layout the device sees.
 */
#ifndef FA_TEST_HARNESS_H
#define FA_TEST_HARNESS_H

#include "cases.h"

/* The number that lies at an address as dtype has it, and the other way, rounded. */
double get_element(fa_dtype dtype, const unsigned char *at);
void set_element(fa_dtype dtype, unsigned char *at, double value);

typedef struct fa_values {
  double *data[FA_NUM_TENSORS];
} fa_values;

fa_values values_new(const fa_problem *problem);
void values_free(fa_values *values);
int64_t values_count(const fa_problem *problem, fa_tensor_id id);

/* Draws q, k, v, sink, dout and the tangents, and rounds them to what tensors of type round_to hold. Sinks
 * and their tangents also lie on a coarse grid, so that f32 can hold sink + step * tangent exactly. */
void values_fill(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill, uint64_t seed);

typedef struct fa_setup {
  fa_device device;
  fa_layout layout;
  int32_t num_threads;
} fa_setup;

typedef enum fa_outcome {
  OUTCOME_RAN = 0,
  OUTCOME_UNSUPPORTED, /* the plan said so */
  OUTCOME_BROKEN,      /* an error, an element not written, or something written that is not an output */
} fa_outcome;

/* Reads the inputs of the pass from values and writes its outputs there. why says what was wrong. */
fa_outcome run_pass(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values,
                    char why[512]);

/* run_pass for what must work; ends the program where it does not. */
void must_run(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values);

/* max |x - expected|; infinity where one is NaN or infinite and the other is something else. */
double values_error(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *expected);

bool values_equal(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *y);

#endif
