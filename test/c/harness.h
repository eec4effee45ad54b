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

/* Of zeros, and of what another has. */
fa_values values_new(const fa_problem *problem);
fa_values values_copy(const fa_problem *problem, const fa_values *from);
void values_free(fa_values *values);
int64_t values_count(const fa_problem *problem, fa_tensor_id id);

/* Draws q, k, v, sink, dout and so on, and rounds them to what tensors of type round_to hold; or their
 * tangents. Sinks and their tangents also lie on a coarse grid, so that f32 can hold sink + step * tangent
 * exactly. */
void values_fill(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill, uint64_t seed);
void values_fill_tangents(fa_values *values, const fa_problem *problem, fa_dtype round_to, fa_fill fill,
                          uint64_t seed);

/* Where keys lie on pages: the same problem with its keys in order, and what its inputs are then. Keys of a
 * page that is none are 0. */
fa_problem problem_in_order(const fa_problem *paged);
fa_values values_in_order(const fa_problem *paged, const fa_values *values);

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

/* run_pass in steps, for what runs more than once: a pass whose tensors lie on the device. trial_new reads the
 * inputs; *trial is NULL unless the outcome is OUTCOME_RAN. */
typedef struct fa_trial fa_trial;
fa_outcome trial_new(fa_trial **trial, const fa_setup *setup, const fa_problem *problem, fa_pass pass,
                     const fa_values *values, char why[512]);
void trial_free(fa_trial *trial);

/* Every run begins with poison in the outputs and in the workspace, and looks at the workspace's guards and at
 * the inputs. trial_keep keeps what the last run wrote; trial_repeats says of later ones whether an output is,
 * what surrounds its elements included, bitwise what was kept. */
fa_outcome trial_run(fa_trial *trial, int32_t num_threads, char why[512]);
void trial_keep(fa_trial *trial);
bool trial_repeats(const fa_trial *trial, fa_tensor_id id);

/* What follows runs as it does where plans for the CPU have so many threads. */
fa_outcome trial_plan(fa_trial *trial, int32_t num_threads, char why[512]);

/* Writes the outputs of the last run to values, once. */
fa_outcome trial_read(fa_trial *trial, fa_values *values, char why[512]);

/* run_pass for what must work; ends the program where it does not. */
void must_run(const fa_setup *setup, const fa_problem *problem, fa_pass pass, fa_values *values);

/* max |x - expected|; infinity where one is NaN or infinite and the other is something else. */
double values_error(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *expected);

bool values_equal(const fa_problem *problem, fa_tensor_id id, const fa_values *x, const fa_values *y);

/* Sets a variable of the environment, and returns what restore_environment gives back to it. */
char *set_environment(const char *name, const char *text);
void restore_environment(const char *name, char *before);

#endif
