/* The way from a problem to a backend's kernel: devices, plans and their runs. */
#include <string.h>

#include "backend.h"
#include "error.h"
#include "problem.h"
#include "tensors.h"

int32_t fa_num_devices(fa_device_kind kind, fa_error *error) {
  const fa_backend *backend = fa_backend_of(kind);
  if (backend) return backend->num_devices(error);
  fa_fail_message(error, FA_STATUS_NO_DEVICE, "device",
                  FA_TEXT("%s is not part of this build", fa_device_kind_name(kind)));
  return 0;
}

fa_status fa_backend_check_device(const fa_backend *backend, fa_device device, fa_error *error) {
  const int32_t num_devices = backend->num_devices(error);
  if (num_devices == 0) return FA_STATUS_NO_DEVICE;
  if (device.index >= 0 && device.index < num_devices) return FA_STATUS_OK;
  return fa_fail(error, FA_STATUS_NO_DEVICE, "device",
                 FA_TEXT("a %s device from 0 to %d", fa_device_kind_name(device.kind), num_devices - 1),
                 FA_TEXT("%d", device.index));
}

fa_status fa_backend_find(fa_device device, const fa_backend **backend, fa_error *error) {
  *backend = fa_backend_of(device.kind);
  if (*backend) return fa_backend_check_device(*backend, device, error);
  fa_num_devices(device.kind, error); /* says why there is none */
  return FA_STATUS_NO_DEVICE;
}

fa_status fa_device_get_info(fa_device device, fa_device_info *info, fa_error *error) {
  const fa_backend *backend;
  memset(info, 0, sizeof *info);
  fa_status status = fa_backend_find(device, &backend, error);
  return status ? status : backend->device_info(device.index, info, error);
}

/* Whether the pass has no element to write. */
static bool writes_nothing(const fa_plan *plan) {
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&plan->problem, plan->pass, id) == FA_ROLE_OUTPUT &&
        fa_tensor_shape(&plan->problem, id).size_bytes > 0)
      return false;
  return true;
}

fa_status fa_backend_plan(fa_plan *plan, fa_error *error) {
  fa_status status = ((const fa_backend *)plan->backend)->plan(plan, error);
  if (status) return status;
  if (writes_nothing(plan)) plan->workspace_bytes = 0;
  if (plan->workspace_bytes <= PTRDIFF_MAX) return FA_STATUS_OK;
  return fa_fail_message(error, FA_STATUS_UNSUPPORTED, "problem", "no memory could hold its workspace");
}

fa_status fa_plan_init(fa_plan *plan, const fa_problem *problem, fa_pass pass, fa_device device,
                       fa_error *error) {
  memset(plan, 0, sizeof *plan);
  fa_status status = fa_problem_validate(problem, error);
  if (status) return status;
  if ((unsigned)pass >= FA_NUM_PASSES)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "pass", "a pass of fa_pass", FA_TEXT("%d", (int)pass));
  if (problem->max_pages > 0 && pass != FA_PASS_FORWARD)
    return fa_fail(error, FA_STATUS_UNSUPPORTED, "page_table", FA_TEXT("none in the %s", fa_pass_name(pass)),
                   "a tensor");
  const fa_backend *backend;
  status = fa_backend_find(device, &backend, error);
  if (status) return status;
  plan->problem = *problem;
  fa_problem_canonicalise(&plan->problem);
  plan->pass = pass;
  plan->device = device;
  plan->num_threads = 1;
  plan->backend = backend;
  status = fa_backend_plan(plan, error);
  return status ? status : fa_succeed(error);
}

fa_status fa_workspace_check(const fa_execution *execution, size_t bytes, fa_error *error) {
  if (execution->workspace_bytes < bytes)
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "workspace", FA_TEXT("at least %zu bytes", bytes),
                   FA_TEXT("%zu", execution->workspace_bytes));
  if (bytes && (!execution->workspace || (uintptr_t)execution->workspace % 64 != 0))
    return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "workspace", "an address aligned to 64 bytes",
                   FA_TEXT("%p", execution->workspace));
  return FA_STATUS_OK;
}

fa_status fa_run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                 fa_error *error) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    const bool is_used = fa_tensor_role_in(&plan->problem, plan->pass, id) != FA_ROLE_NONE;
    if (is_used && !fa_tensor_get(tensors, id)->data && fa_tensor_shape(&plan->problem, id).size_bytes > 0)
      return fa_fail(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id), "a pointer", "NULL");
  }
  fa_status status = fa_workspace_check(execution, plan->workspace_bytes, error);
  if (status) return status;
  if (writes_nothing(plan)) return fa_succeed(error);
  const fa_backend *backend = plan->backend;
  status = backend->run(plan, tensors, execution, error);
  return status ? status : fa_succeed(error);
}
