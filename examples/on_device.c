/*
 * A training step's attention with tensors that lie on the device: q, k and v are uploaded once, the forward
 * and the backward move nothing over the bus, and the gradients come down at the end.
 *
 *   cc on_device.c $(pkg-config --cflags --libs flash_attention) && ./a.out [cpu | cuda]
 */
#include <flash_attention.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fa_error error;

static void must(fa_status status) {
  if (status == FA_STATUS_OK) return;
  fprintf(stderr, "%s\n", error.message);
  exit(1);
}

/* Memory on the device for a tensor of the problem. */
static fa_tensor place(const fa_problem *problem, fa_tensor_id id, fa_device device) {
  void *data;
  must(fa_device_alloc(device, (size_t)fa_tensor_shape(problem, id).size_bytes, &data, &error));
  return fa_tensor_contiguous(problem, id, data);
}

static void run(const fa_problem *problem, fa_pass pass, fa_device device, const fa_tensors *tensors) {
  fa_plan plan;
  fa_measurements measured;
  must(fa_plan_init(&plan, problem, pass, device, &error));
  /* It takes tensors wherever they lie and waits for the results. NULL: no stream of ours still writes them. */
  must(fa_run_anywhere(&plan, tensors, NULL, &measured, &error));
  printf("%s: %lld bytes up, %lld down\n", fa_pass_name(pass), (long long)measured.bytes_to_device,
         (long long)measured.bytes_from_device);
}

int main(int argc, char **argv) {
  const fa_device device = {argc > 1 && strcmp(argv[1], "cuda") == 0 ? FA_DEVICE_CUDA : FA_DEVICE_CPU, 0};
  if (fa_num_devices(device.kind, &error) == 0) return printf("skipped: %s\n", error.message), 0;

  fa_problem problem;
  fa_problem_init(&problem);
  problem.batch = 1, problem.seqlen_q = problem.seqlen_k = 2;
  problem.num_heads = problem.num_kv_heads = problem.head_dim = 1;
  problem.window_right = 0; /* causal */

  fa_tensors tensors = {0};
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id))
      *fa_tensor_at(&tensors, id) = place(&problem, id, device);

  const float q[] = {0, 0}, k[] = {1, 2}, v[] = {3, 5}, dout[] = {1, 2};
  must(fa_device_copy(device, tensors.q.data, q, sizeof q, NULL, &error));
  must(fa_device_copy(device, tensors.k.data, k, sizeof k, NULL, &error));
  must(fa_device_copy(device, tensors.v.data, v, sizeof v, NULL, &error));
  must(fa_device_copy(device, tensors.dout.data, dout, sizeof dout, NULL, &error));

  run(&problem, FA_PASS_FORWARD, device, &tensors); /* o and lse stay there for the backward */
  run(&problem, FA_PASS_BACKWARD, device, &tensors);

  float dv[2];
  must(fa_device_copy(device, dv, tensors.dv.data, sizeof dv, NULL, &error));
  printf("dv: %g %g\n", dv[0], dv[1]); /* 2 1: the first value is seen by both rows, the second by one */
  for (int id = 0; id < FA_NUM_TENSORS; id++)
    if (fa_tensor_role_in(&problem, FA_PASS_BACKWARD, id))
      must(fa_device_free(device, fa_tensor_at(&tensors, id)->data, &error));
  return 0;
}
