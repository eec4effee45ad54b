/* The option table, and how options are read and set by it. */
#include <math.h>
#include <string.h>

#include "error.h"

static const char *const precisions[] = {"highest", "high", "default", NULL};
static const char *const booleans[] = {"false", "true", NULL};

/* A new scalar option is a field of fa_problem and a row here; the bridges (NIF, XLA) loop over the rows. */
static const fa_option options[] = {
    {"scale", FA_OPTION_REAL, offsetof(fa_problem, scale), -1e30, 1e30, 0, NULL,
     "Factor of the scores; 0 stands for 1/sqrt(head_dim)."},
    {"window_left", FA_OPTION_LENGTH, offsetof(fa_problem, window_left), 0, 0x1p62, INFINITY, NULL,
     "How many keys before its own position a row sees."},
    {"window_right", FA_OPTION_LENGTH, offsetof(fa_problem, window_right), 0, 0x1p62, INFINITY, NULL,
     "How many keys after its own position a row sees; 0 is causal attention."},
    {"softcap", FA_OPTION_REAL, offsetof(fa_problem, softcap), 0, 1e30, 0, NULL,
     "Scores s become softcap * tanh(s / softcap); 0 stands for none."},
    {"dropout", FA_OPTION_REAL, offsetof(fa_problem, dropout), 0, 1 - 0x1p-16, 0, NULL,
     "The share of scores that are dropped after the softmax, by dropout_seed; a multiple of 2^-16."},
    {"precision", FA_OPTION_CHOICE, offsetof(fa_problem, precision), 0, 2, 0, precisions,
     "Arithmetic of f32 matrix products where a device offers a choice."},
    {"deterministic", FA_OPTION_CHOICE, offsetof(fa_problem, deterministic), 0, 1, 0, booleans,
     "Whether the backward must be bitwise repeatable."},
    {"constant_bias", FA_OPTION_CHOICE, offsetof(fa_problem, constant_bias), 0, 1, 0, booleans,
     "Whether the backward leaves dbias out."},
    {"constant_alibi_slopes", FA_OPTION_CHOICE, offsetof(fa_problem, constant_alibi_slopes), 0, 1, 0, booleans,
     "Whether the backward leaves dalibi_slopes out."},
    {"inference", FA_OPTION_CHOICE, offsetof(fa_problem, inference), 0, 1, 0, booleans,
     "Whether no backward follows; few rows of f32 then take a fraction of the time on CUDA."},
};

const fa_option *fa_options(size_t *num_options) {
  *num_options = sizeof options / sizeof *options;
  return options;
}

const fa_option *fa_option_find(const char *name) {
  for (size_t i = 0; i < sizeof options / sizeof *options; i++)
    if (strcmp(options[i].name, name) == 0) return &options[i];
  return NULL;
}

static const char *bounds_text(char *text, size_t text_bytes, const fa_option *option) {
  if (option->kind == FA_OPTION_LENGTH)
    return fa_text(text, text_bytes, "a whole number of at least %.0f, or infinity", option->minimum);
  return fa_text(text, text_bytes, "a number from %g to %g", option->minimum, option->maximum);
}

double fa_option_get_number(const fa_problem *problem, const fa_option *option) {
  const char *field = (const char *)problem + option->offset;
  double real;
  int64_t length;
  int32_t choice;
  switch (option->kind) {
    case FA_OPTION_REAL: return memcpy(&real, field, sizeof real), real;
    case FA_OPTION_LENGTH:
      memcpy(&length, field, sizeof length);
      return length == FA_UNBOUNDED ? INFINITY : (double)length;
    default: return memcpy(&choice, field, sizeof choice), choice;
  }
}

fa_status fa_option_set_number(fa_problem *problem, const fa_option *option, double value, fa_error *error) {
  char *field = (char *)problem + option->offset;
  bool unbounded = option->kind == FA_OPTION_LENGTH && value == INFINITY;
  bool whole = option->kind == FA_OPTION_REAL || unbounded || value == floor(value);
  /* Written so that NaN fails. */
  bool inside = unbounded || (value >= option->minimum && value <= option->maximum);
  if (!whole || !inside)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, option->name, bounds_text((char[160]){0}, 160, option),
                   FA_TEXT("%g", value));
  if (option->kind == FA_OPTION_REAL) {
    memcpy(field, &value, sizeof value);
  } else if (option->kind == FA_OPTION_LENGTH) {
    int64_t length = unbounded ? FA_UNBOUNDED : (int64_t)value;
    memcpy(field, &length, sizeof length);
  } else {
    int32_t choice = (int32_t)value;
    memcpy(field, &choice, sizeof choice);
  }
  return fa_succeed(error);
}

fa_status fa_option_set_choice(fa_problem *problem, const fa_option *option, const char *choice,
                               fa_error *error) {
  if (option->kind != FA_OPTION_CHOICE)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, option->name, bounds_text((char[160]){0}, 160, option),
                   choice);
  char expected[160] = "one of";
  for (int i = 0; option->choices[i]; i++) {
    if (strcmp(option->choices[i], choice) == 0) return fa_option_set_number(problem, option, i, error);
    strncat(expected, i ? ", " : " ", sizeof expected - strlen(expected) - 1);
    strncat(expected, option->choices[i], sizeof expected - strlen(expected) - 1);
  }
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, option->name, expected, choice);
}
