/*
 * The oracle: attention straight from its definition, naive and never to be optimised.
 *
 * In f64 it stands in for exact arithmetic. In the other types it is unfused attention in that type, whose
 * error is what tolerances are made of: f32 does every operation in f32, the 16-bit types multiply and sum in
 * f32 and round every tensor that unfused attention would keep.
 *
 * The build must not contract a * b + c into an FMA here; -std=c11 sees to that.
 */
#include <stdio.h>
#include <tgmath.h>

#include "../core/arena.h"
#include "../core/backend.h"
#include "../core/error.h"
#include "../core/tensors.h"
#include "half.h"
#include "sequence.h"

static double element(fa_dtype dtype, const void *data, int64_t index) {
  switch (dtype) {
    case FA_DTYPE_F64: return ((const double *)data)[index];
    case FA_DTYPE_BF16: return fa_bf16_to_f32(((const uint16_t *)data)[index]);
    case FA_DTYPE_F16: return fa_f16_to_f32(((const uint16_t *)data)[index]);
    case FA_DTYPE_U8: return ((const uint8_t *)data)[index];
    default: return ((const float *)data)[index];
  }
}

static void set_element(fa_dtype dtype, void *data, int64_t index, double value) {
  switch (dtype) {
    case FA_DTYPE_F64: ((double *)data)[index] = value; break;
    case FA_DTYPE_BF16: ((uint16_t *)data)[index] = fa_f32_to_bf16((float)value); break;
    case FA_DTYPE_F16: ((uint16_t *)data)[index] = fa_f32_to_f16((float)value); break;
    default: ((float *)data)[index] = (float)value; break;
  }
}

/* value as a tensor of that type would hold it */
static double stored(fa_dtype dtype, double value) {
  switch (dtype) {
    case FA_DTYPE_F64: return value;
    case FA_DTYPE_BF16: return fa_bf16_to_f32(fa_f32_to_bf16((float)value));
    case FA_DTYPE_F16: return fa_f16_to_f32(fa_f32_to_f16((float)value));
    default: return (float)value;
  }
}

/* The tensors whose numbers scores are made with, beside q and k. */
enum { BIAS, ALIBI_SLOPES, NUM_SCORE_INPUTS };
static const fa_tensor_id score_inputs[NUM_SCORE_INPUTS] = {
    [BIAS] = FA_TENSOR_BIAS,
    [ALIBI_SLOPES] = FA_TENSOR_ALIBI_SLOPES,
};

static bool has_score_input(const fa_problem *p, int input) {
  return fa_tensor_role_in(p, FA_PASS_FORWARD, score_inputs[input]) == FA_ROLE_INPUT;
}

#define REAL    double
#define T(name) name##_f64
#include "reference_template.h"
#undef REAL
#undef T

#define REAL    float
#define T(name) name##_f32
#include "reference_template.h"
#undef REAL
#undef T

#include "reference_bound.h"

static int32_t num_devices(fa_error *error) {
  fa_succeed(error);
  return 1;
}

static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  (void)index;
  *info = (fa_device_info){.name = "naive reference", .num_threads = 1};
  return fa_succeed(error);
}

static fa_status plan_reference(fa_plan *plan, fa_error *error) {
  static const char *const kernels[FA_NUM_FLOATS] = {"reference/f32", "reference/f64", "reference/bf16",
                                                     "reference/f16"};
  if (plan->pass == FA_PASS_TANGENT)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "pass", "forward, backward or bound on the reference",
                   fa_pass_name(plan->pass));
  plan->kernel = kernels[plan->problem.dtype];
  plan->workspace_bytes = plan->pass == FA_PASS_BOUND           ? workspace_bytes_bound(&plan->problem)
                          : plan->problem.dtype == FA_DTYPE_F64 ? workspace_bytes_f64(&plan->problem)
                                                                : workspace_bytes_f32(&plan->problem);
  return fa_succeed(error);
}

static fa_status run_reference(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                               fa_error *error) {
  const bool forward = plan->pass == FA_PASS_FORWARD, f64 = plan->problem.dtype == FA_DTYPE_F64;
  void (*const pass)(const fa_problem *, const fa_tensors *, void *) =
      plan->pass == FA_PASS_BOUND ? bound
      : forward                   ? (f64 ? forward_f64 : forward_f32)
                                  : (f64 ? backward_f64 : backward_f32);
  pass(&plan->problem, tensors, execution->workspace);
  return fa_succeed(error);
}

const fa_backend fa_reference_backend = {.kind = FA_DEVICE_REFERENCE,
                                         .num_devices = num_devices,
                                         .device_info = device_info,
                                         .plan = plan_reference,
                                         .run = run_reference};
