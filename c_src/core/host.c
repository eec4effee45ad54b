/* Running a plan on tensors in the host's memory, wherever the device keeps its own. */
#include <string.h>

#include "backend.h"
#include "error.h"

static size_t round_up(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

static bool same_layout(fa_tensor a, fa_tensor b) {
  return a.stride_batch == b.stride_batch && a.stride_row == b.stride_row && a.stride_head == b.stride_head;
}

/* One allocation on the device: the workspace, then every tensor of the pass. */
typedef struct placement {
  const fa_plan *plan;
  const fa_tensors *host;
  fa_tensors device;
  size_t bytes;
  char *memory;
} placement;

static fa_tensor host_tensor(const placement *p, int id) { return *fa_tensor_at((fa_tensors *)p->host, id); }

static size_t tensor_bytes(const placement *p, int id) {
  return (size_t)fa_tensor_shape(&p->plan->problem, id).size_bytes;
}

static fa_tensor_role role(const placement *p, int id) {
  return fa_tensor_role_in(&p->plan->problem, p->plan->pass, id);
}

static fa_status place(placement *p, fa_error *error) {
  p->bytes = round_up(p->plan->workspace_bytes);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (role(p, id) == FA_ROLE_NONE) continue;
    if (!same_layout(host_tensor(p, id), fa_tensor_contiguous(&p->plan->problem, id, NULL)))
      return fa_fail_message(error, FA_STATUS_INVALID_ARGUMENT, fa_tensor_name(id),
                             "expected a contiguous tensor, as it has to be copied to the device");
    p->bytes += round_up(tensor_bytes(p, id));
  }
  void *memory;
  fa_status status = fa_device_alloc(p->plan->device, p->bytes, &memory, error);
  if (status) return status;
  p->memory = memory;
  size_t used = round_up(p->plan->workspace_bytes);
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (role(p, id) == FA_ROLE_NONE) continue;
    *fa_tensor_at(&p->device, id) = fa_tensor_contiguous(&p->plan->problem, id, p->memory + used);
    used += round_up(tensor_bytes(p, id));
  }
  return FA_STATUS_OK;
}

static fa_status copy_all(placement *p, fa_tensor_role wanted, fa_error *error) {
  for (int id = 0; id < FA_NUM_TENSORS; id++) {
    if (role(p, id) != wanted) continue;
    void *host = host_tensor(p, id).data, *device = fa_tensor_at(&p->device, id)->data;
    bool up = wanted == FA_ROLE_INPUT;
    fa_status status = fa_device_copy(p->plan->device, up ? device : host, up ? host : device,
                                      tensor_bytes(p, id), NULL, error);
    if (status) return status;
  }
  return FA_STATUS_OK;
}

static fa_status run_placed(placement *p, fa_error *error) {
  fa_status status = place(p, error);
  if (!status) status = copy_all(p, FA_ROLE_INPUT, error);
  fa_execution execution = {.workspace = p->memory, .workspace_bytes = p->plan->workspace_bytes};
  if (!status) status = fa_run(p->plan, &p->device, &execution, error);
  if (!status) status = copy_all(p, FA_ROLE_OUTPUT, error);
  if (p->memory) fa_device_free(p->plan->device, p->memory, NULL);
  return status;
}

static fa_status run_in_place(const fa_plan *plan, const fa_tensors *tensors, fa_error *error) {
  fa_execution execution = {.workspace_bytes = plan->workspace_bytes};
  fa_status status = fa_device_alloc(plan->device, plan->workspace_bytes, &execution.workspace, error);
  if (status) return status;
  status = fa_run(plan, tensors, &execution, error);
  fa_device_free(plan->device, execution.workspace, NULL);
  return status;
}

fa_status fa_run_on_host(const fa_plan *plan, const fa_tensors *tensors, fa_error *error) {
  const fa_backend *backend = plan->backend;
  if (!backend->alloc) return run_in_place(plan, tensors, error);
  placement p = {.plan = plan, .host = tensors};
  return run_placed(&p, error);
}
