/* The problem: its types, its defaults, what is refused, and how it reads on one line. */
#include "problem.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "dropout.h"
#include "error.h"
#include "integers.h"
#include "tensors.h"

static const char *const dtype_names[FA_NUM_DTYPES] = {"f32", "f64", "bf16", "f16", "s32", "u32", "u8"};
static const size_t dtype_bytes[FA_NUM_DTYPES] = {4, 8, 2, 2, 4, 4, 1};

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

/* Every tensor must be addressable in bytes of f64, with room to spare for padding and workspaces. */
static bool tensor_fits(const fa_problem *problem, int id) {
  int64_t num_elements = 1;
  const fa_axis only_if = fa_tensor_only_if(id);
  if (only_if && fa_axis_size(problem, only_if) == 0) return true;
  for (int i = 0; fa_axis_at(problem, id, i); i++) {
    const int64_t size = fa_axis_size(problem, fa_axis_at(problem, id, i));
    /* Strides and lse of an empty tensor must fit, too. */
    if (__builtin_mul_overflow(num_elements, size ? size : 1, &num_elements)) return false;
  }
  return num_elements <= (INT64_C(1) << 56) / 8;
}

static fa_status check_pages(const fa_problem *p, fa_error *error) {
  if (p->max_pages == 0 && p->num_pages == 0 && p->page_size == 0) return FA_STATUS_OK;
  int64_t num_keys;
  if (p->max_pages == 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "page_table", "at least 1 page a batch", "0");
  if (p->page_size == 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "page_size", "at least 1 key a page", "0");
  if (!__builtin_mul_overflow(p->max_pages, p->page_size, &num_keys) && num_keys == p->seqlen_k)
    return FA_STATUS_OK;
  return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "seqlen_k", "max_pages * page_size",
                 FA_TEXT("%lld", (long long)p->seqlen_k));
}

fa_status fa_problem_validate(const fa_problem *problem, fa_error *error) {
  if (problem->struct_size != sizeof *problem)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "problem",
                   FA_TEXT("struct_size %zu (fa_problem_init sets it)", sizeof *problem),
                   FA_TEXT("%zu", problem->struct_size));
  if ((unsigned)problem->dtype >= FA_NUM_FLOATS)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "dtype", "f32, f64, bf16 or f16",
                   FA_TEXT("%d", (int)problem->dtype));
  for (fa_axis axis = FA_AXIS_NONE + 1; axis < FA_NUM_AXES; axis++) {
    const int64_t size = fa_axis_size(problem, axis);
    if (size < fa_axes[axis].minimum)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_axes[axis].name,
                     FA_TEXT("at least %lld", (long long)fa_axes[axis].minimum),
                     FA_TEXT("%lld", (long long)size));
    if (fa_axes[axis].along && size > 1 && size != fa_axis_size(problem, fa_axes[axis].along))
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_axes[axis].name,
                     FA_TEXT("1 or %s %lld", fa_axes[fa_axes[axis].along].name,
                             (long long)fa_axis_size(problem, fa_axes[axis].along)),
                     FA_TEXT("%lld", (long long)size));
  }
  fa_status tensors = fa_tensors_validate(problem, error);
  if (tensors) return tensors;
  if (problem->bands_batch > 0 && problem->num_bands == 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "bands", "at least 1 band, which may have no cells", "0");
  if (problem->num_seed_words != 0 && problem->num_seed_words != 2)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "dropout_seed", "2 words",
                   FA_TEXT("%lld", (long long)problem->num_seed_words));
  if (problem->dropout != 0 && problem->num_seed_words == 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "dropout_seed",
                   "a tensor of shape [2], as there is dropout", "none");
  fa_status pages = check_pages(problem, error);
  if (pages) return pages;
  if (problem->lengths_batch > 0 && problem->num_bands > 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "key_lengths",
                   "none beside bands, whose k_end says the same", "both");
  if (problem->num_heads % problem->num_kv_heads != 0)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "num_kv_heads",
                   FA_TEXT("a divisor of num_heads %lld", (long long)problem->num_heads),
                   FA_TEXT("%lld", (long long)problem->num_kv_heads));
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (!tensor_fits(problem, id))
      return fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, "problem",
                             "the product of the sizes of a tensor overflows");
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  fa_problem scratch = *problem; /* each is set to what it is, or refused */
  for (size_t i = 0; i < num_options; i++) {
    const double value = fa_option_get_number(problem, &options[i]);
    fa_status status = fa_option_set_number(&scratch, &options[i], value, error);
    if (status) return status;
  }
  return fa_succeed(error);
}

/* Kernels that compute in f32 hold softcap and scale / softcap in it. A softcap so small that one of these
 * would be 0 or infinite becomes the smallest that is not: either leaves scores that are 0 beside 1. One so
 * large that the second would vanish becomes none: it is felt by dot products beyond 2^113 alone. */
static void canonicalise_softcap(fa_problem *problem) {
  if (problem->softcap == 0) return;
  const double factor = fabs(problem->scale);
  problem->softcap = fmax(problem->softcap, FLT_MIN * fmax(1, factor));
  if (factor < FLT_MIN * problem->softcap) problem->softcap = 0;
}

void fa_problem_canonicalise(fa_problem *problem) {
  if (problem->scale == 0) problem->scale = 1 / sqrt((double)problem->head_dim);
  if (problem->dtype != FA_DTYPE_F64) canonicalise_softcap(problem);
  problem->dropout = rint(problem->dropout * FA_DROPOUT_ONE) / FA_DROPOUT_ONE;
  /* No row is further than seqlen_k from the first column, nor than seqlen_q from the last. */
  problem->window_left = fa_min(problem->window_left, problem->seqlen_k);
  problem->window_right = fa_min(problem->window_right, problem->seqlen_q);
}

/* Appends to a text of that length. What does not fit is counted all the same, as snprintf does. */
__attribute__((format(printf, 4, 5))) static void append(char *text, size_t text_bytes, int *length,
                                                         const char *format, ...) {
  const size_t used = (size_t)*length < text_bytes ? (size_t)*length : text_bytes;
  va_list arguments;
  va_start(arguments, format);
  *length += vsnprintf(text ? text + used : NULL, text_bytes - used, format, arguments);
  va_end(arguments);
}

/* Whether a tensor that is never left out has the axis. */
static bool is_always_there(fa_axis axis) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (!fa_tensor_only_if(id) && fa_axis_of(id, axis) >= 0) return true;
  return false;
}

int fa_problem_format(const fa_problem *problem, char *text, size_t text_bytes) {
  int length = 0;
  append(text, text_bytes, &length, "%s", fa_dtype_name(problem->dtype));
  for (fa_axis axis = FA_AXIS_NONE + 1; axis < FA_NUM_AXES; axis++) {
    const int64_t size = fa_axis_size(problem, axis);
    if (fa_axes[axis].offset && (size || is_always_there(axis)))
      append(text, text_bytes, &length, " %s%lld", fa_axes[axis].short_name, (long long)size);
  }
  if (problem->bias_heads) append(text, text_bytes, &length, " of %s", fa_dtype_name(problem->bias_dtype));
  size_t num_options;
  const fa_option *options = fa_options(&num_options);
  for (const fa_option *option = options; option < options + num_options; option++) {
    const double value = fa_option_get_number(problem, option);
    if (value == option->default_value) continue;
    if (option->choices && value >= 0 && value <= option->maximum)
      append(text, text_bytes, &length, " %s=%s", option->name, option->choices[(int)value]);
    else
      append(text, text_bytes, &length, " %s=%g", option->name, value);
  }
  const fa_origin *origin = &problem->origin;
  if (origin->batch || origin->head || origin->row)
    append(text, text_bytes, &length, " origin%lld,%lld,%lld", (long long)origin->batch,
           (long long)origin->head, (long long)origin->row);
  return length;
}
