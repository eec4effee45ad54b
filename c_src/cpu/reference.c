/* The oracle. */
#include "../core/backend.h"
#include "../core/error.h"

static int32_t num_devices(fa_error *error) {
  fa_succeed(error);
  return 1;
}
static fa_status device_info(int32_t index, fa_device_info *info, fa_error *error) {
  (void)index, (void)info;
  return fa_succeed(error);
}
static fa_status plan_reference(fa_plan *plan, fa_error *error) {
  (void)plan;
  return fa_fail_message(error, FA_STATUS_UNSUPPORTED, "device", "not written yet");
}
static fa_status run(const fa_plan *plan, const fa_tensors *tensors, const fa_execution *execution,
                     fa_error *error) {
  (void)plan, (void)tensors, (void)execution;
  return fa_fail_message(error, FA_STATUS_UNSUPPORTED, "device", "not written yet");
}
const fa_backend fa_reference_backend = {FA_DEVICE_REFERENCE, num_devices, device_info, plan_reference, run};
