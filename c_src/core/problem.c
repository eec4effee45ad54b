#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

static const char *const dtype_names[FA_NUM_DTYPES] = {"f32", "f64", "bf16", "f16"};
static const size_t dtype_bytes[FA_NUM_DTYPES] = {4, 8, 2, 2};

static bool dtype_known(fa_dtype dtype) { return (unsigned)dtype < FA_NUM_DTYPES; }

const char *fa_dtype_name(fa_dtype dtype) { return dtype_known(dtype) ? dtype_names[dtype] : "unknown"; }

size_t fa_dtype_bytes(fa_dtype dtype) { return dtype_known(dtype) ? dtype_bytes[dtype] : 0; }

void fa_problem_init(fa_problem *problem) {
  memset(problem, 0, sizeof *problem);
  problem->struct_size = sizeof *problem;
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  for (size_t i = 0; i < num_options; i++)
    fa_option_set_number(problem, &options[i], options[i].default_value, NULL);
}

/* Sizes in the order in which errors name them. */
static const struct {
  const char *name;
  size_t offset;
  int64_t minimum;
} sizes[] = {
    {"batch", offsetof(fa_problem, batch), 0},
    {"seqlen_q", offsetof(fa_problem, seqlen_q), 0},
    {"seqlen_k", offsetof(fa_problem, seqlen_k), 0},
    {"num_heads", offsetof(fa_problem, num_heads), 1},
    {"num_kv_heads", offsetof(fa_problem, num_kv_heads), 1},
    {"head_dim", offsetof(fa_problem, head_dim), 1},
    {"num_sinks", offsetof(fa_problem, num_sinks), 0},
};

/* Every tensor must be addressable in bytes, with room to spare for padding and workspaces. */
static bool product_fits(const int64_t *factors, int num_factors) {
  const int64_t limit = INT64_C(1) << 56;
  int64_t product = 1;
  for (int i = 0; i < num_factors; i++) {
    int64_t factor = factors[i] ? factors[i] : 1; /* strides and lse of an empty tensor must fit too */
    if (product > limit / factor) return false;
    product *= factor;
  }
  return true;
}

fa_status fa_problem_validate(const fa_problem *problem, fa_error *error) {
  if (problem->struct_size != sizeof *problem)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "problem",
                   FA_TEXT("struct_size %zu (fa_problem_init sets it)", sizeof *problem),
                   FA_TEXT("%zu", problem->struct_size));
  if (!dtype_known(problem->dtype))
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "dtype", "f32, f64, bf16 or f16",
                   FA_TEXT("%d", (int)problem->dtype));
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    int64_t value;
    memcpy(&value, (const char *)problem + sizes[i].offset, sizeof value);
    if (value < sizes[i].minimum)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, sizes[i].name,
                     FA_TEXT("at least %lld", (long long)sizes[i].minimum), FA_TEXT("%lld", (long long)value));
  }
  if (problem->num_heads % problem->num_kv_heads != 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "num_kv_heads",
                   FA_TEXT("a divisor of num_heads %lld", (long long)problem->num_heads),
                   FA_TEXT("%lld", (long long)problem->num_kv_heads));
  const fa_problem *p = problem;
  if (!product_fits((int64_t[]){p->batch, p->seqlen_q, p->num_heads, p->head_dim, 8}, 5) ||
      !product_fits((int64_t[]){p->batch, p->seqlen_k, p->num_kv_heads, p->head_dim, 8}, 5) ||
      !product_fits((int64_t[]){p->num_sinks, p->num_heads, 8}, 3))
    return fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, "problem",
                           "the product of the sizes of a tensor overflows");
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  for (size_t i = 0; i < num_options; i++) {
    fa_problem scratch = *problem;
    double value;
    const char *field = (const char *)problem + options[i].offset;
    if (options[i].kind == FA_OPTION_REAL) {
      memcpy(&value, field, sizeof value);
    } else if (options[i].kind == FA_OPTION_LENGTH) {
      int64_t length;
      memcpy(&length, field, sizeof length);
      value = length == FA_UNBOUNDED ? INFINITY : (double)length;
    } else {
      int32_t choice;
      memcpy(&choice, field, sizeof choice);
      value = choice;
    }
    fa_status status = fa_option_set_number(&scratch, &options[i], value, error);
    if (status) return status;
  }
  return fa_succeed(error);
}

void fa_problem_canonicalise(fa_problem *problem) {
  if (problem->scale == 0) problem->scale = 1 / sqrt((double)problem->head_dim);
  /* No row is further than seqlen_k from the first column, nor than seqlen_q from the last. */
  if (problem->window_left > problem->seqlen_k) problem->window_left = problem->seqlen_k;
  if (problem->window_right > problem->seqlen_q) problem->window_right = problem->seqlen_q;
}

int fa_problem_format(const fa_problem *p, char *text, size_t text_bytes) {
  char options[160] = "";
  size_t used = 0;
#define APPEND(...)                                                               \
  do {                                                                            \
    used += (size_t)snprintf(options + used, sizeof options - used, __VA_ARGS__); \
    if (used > sizeof options - 1) used = sizeof options - 1;                     \
  } while (0)
  if (p->num_sinks) APPEND(" sinks%lld", (long long)p->num_sinks);
  if (p->scale != 0) APPEND(" scale%g", p->scale);
  if (p->window_left != FA_UNBOUNDED) APPEND(" left%lld", (long long)p->window_left);
  if (p->window_right != FA_UNBOUNDED) APPEND(" right%lld", (long long)p->window_right);
  if (p->softcap != 0) APPEND(" softcap%g", p->softcap);
  if (p->precision) APPEND(" precision%d", p->precision);
  if (p->deterministic) APPEND(" deterministic");
  if (p->origin.batch || p->origin.head || p->origin.row)
    APPEND(" origin%lld,%lld,%lld", (long long)p->origin.batch, (long long)p->origin.head,
           (long long)p->origin.row);
#undef APPEND
  return snprintf(text, text_bytes, "%s b%lld sq%lld sk%lld h%lld kv%lld d%lld%s", fa_dtype_name(p->dtype),
                  (long long)p->batch, (long long)p->seqlen_q, (long long)p->seqlen_k, (long long)p->num_heads,
                  (long long)p->num_kv_heads, (long long)p->head_dim, options);
}
