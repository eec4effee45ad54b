// How often a call asks the runtime and the driver, once everything is at hand: what does not change is asked
// for once. A number here may fall; where one rises, a call has become slower for every caller.
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include "../../c_src/flash_attention.h"
#include "../c/check.h"
#include "calls.h"

namespace {

const fa_device gpu = {FA_DEVICE_CUDA, 0};
const fa_placement settled = [] {
  fa_placement placement{};
  placement.is_settled = true;
  return placement;
}();

// What a call may ask.
struct Limits {
  const char *what;
  int sm80, sm90;
};

bool is_hopper() {
  const char *sm = getenv("EMULATED_SM");
  return sm && atoi(sm) >= 90;
}

void must(fa_status status, const fa_error &error) {
  if (status) {
    printf("FAILED: %s\n", error.message);
    exit(1);
  }
}

// The third time, as the second one may still take memory that is at hand afterwards.
template <class Call>
void hold(const Limits &limits, Call call) {
  const int most = is_hopper() ? limits.sm90 : limits.sm80;
  for (int i = 0; i < 3; i++) emulated::forget_calls(), call();
  CHECK(emulated::num_calls() <= most, "%s: %d calls, %d are enough", limits.what, emulated::num_calls(), most);
  if (emulated::num_calls() > most) emulated::print_calls();
}

fa_problem problem_of(fa_dtype dtype, int64_t seqlen_k = 40) {
  fa_problem p;
  fa_problem_init(&p);
  p.dtype = dtype, p.batch = 2, p.seqlen_q = 40, p.seqlen_k = seqlen_k, p.num_heads = p.num_kv_heads = 2,
  p.head_dim = 16;
  p.window_right = 0;
  return p;
}

enum Home { ON_DEVICE, PAGEABLE, PINNED };

struct Tensors {
  fa_tensors tensors{};
  void *memory[FA_NUM_TENSORS]{};
  Home home;
  Tensors(const fa_problem &p, fa_pass pass, Home home) : home(home) {
    fa_error error;
    for (int i = 0; i < FA_NUM_TENSORS; i++) {
      const fa_tensor_id id = fa_tensor_id(i);
      const size_t bytes = size_t(fa_tensor_shape(&p, id).size_bytes);
      if (!fa_tensor_role_in(&p, pass, id) || !bytes) continue;
      if (home == PAGEABLE) memory[i] = calloc(1, bytes);
      if (home == PINNED) must(fa_host_alloc(gpu, bytes, &memory[i], &error), error);
      if (home == ON_DEVICE) {
        const std::vector<char> zeros(bytes);
        must(fa_device_alloc(gpu, bytes, &memory[i], &error), error);
        must(fa_device_copy(gpu, memory[i], zeros.data(), bytes, nullptr, &error), error);
      } else if (memory[i]) {
        memset(memory[i], 0, bytes);
      }
      *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&p, id, memory[i]);
    }
  }
  ~Tensors() {
    for (void *each : memory) {
      if (home == PAGEABLE) free(each);
      if (home == PINNED) fa_host_free(gpu, each, nullptr);
      if (home == ON_DEVICE) fa_device_free(gpu, each, nullptr);
    }
  }
};

fa_plan plan_of(const fa_problem &p, fa_pass pass) {
  fa_plan plan;
  fa_error error;
  must(fa_plan_init(&plan, &p, pass, gpu, &error), error);
  return plan;
}

// As XLA calls: a plan, and its run on memory of the device.
void test_device(const Limits &limits, fa_dtype dtype, fa_pass pass) {
  const fa_problem p = problem_of(dtype);
  const Tensors t(p, pass, ON_DEVICE);
  fa_execution execution{};
  fa_error error;
  execution.workspace_bytes = plan_of(p, pass).workspace_bytes;
  must(fa_device_alloc(gpu, execution.workspace_bytes, &execution.workspace, &error), error);
  hold(limits, [&] {
    const fa_plan plan = plan_of(p, pass);
    must(fa_run(&plan, &t.tensors, &execution, &error), error);
  });
  fa_device_free(gpu, execution.workspace, nullptr);
}

// As Elixir calls: the host path, wherever tensors lie.
void test_anywhere(const Limits &limits, fa_dtype dtype, fa_pass pass, Home home, int64_t seqlen_k = 40) {
  const fa_problem p = problem_of(dtype, seqlen_k);
  const Tensors t(p, pass, home);
  fa_error error;
  hold(limits, [&] {
    const fa_plan plan = plan_of(p, pass);
    must(fa_run_anywhere(&plan, &t.tensors, &settled, nullptr, &error), error);
  });
}

// A step of generation: a row is appended to two sequences, and looks at what they have.
void test_cache(const Limits &append, const Limits &forward) {
  const fa_cache_layout layout = {FA_DTYPE_BF16, 64, 8, 2, 16};
  fa_cache *cache;
  fa_cache_sequence *sequences[2];
  fa_cache_view view;
  fa_error error;
  must(fa_cache_new(gpu, &layout, &cache, &error), error);
  for (auto &sequence : sequences) must(fa_cache_add_sequence(cache, &sequence, &error), error);
  std::vector<uint16_t> row(2 * 2 * 16);
  hold(append, [&] { must(fa_cache_append(sequences, 2, row.data(), row.data(), 1, &error), error); });
  must(fa_cache_view_begin(sequences, 2, &view, &error), error);
  fa_problem p = problem_of(FA_DTYPE_BF16);
  p.seqlen_q = 1, p.page_size = 8, p.num_pages = 64, p.max_pages = view.max_pages;
  p.seqlen_k = p.page_size * p.max_pages, p.lengths_batch = 2;
  Tensors t(p, FA_PASS_FORWARD, PAGEABLE);
  t.tensors.k.data = const_cast<void *>(view.k), t.tensors.v.data = const_cast<void *>(view.v);
  t.tensors.key_lengths.data = const_cast<int32_t *>(view.key_lengths);
  t.tensors.page_table.data = const_cast<int32_t *>(view.page_table);
  hold(forward, [&] {
    const fa_plan plan = plan_of(p, FA_PASS_FORWARD);
    must(fa_run_anywhere(&plan, &t.tensors, &settled, nullptr, &error), error);
  });
  fa_cache_view_end(&view);
  for (auto *sequence : sequences) fa_cache_free_sequence(sequence);
  fa_cache_free(cache);
}

// ---- what must stay as it is ------------------------------------------------------------------------------

// Runs `body` in a child, as devices wake up once a process.
template <class Body>
void in_child(const char *what, Body body) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s", what);
}

bool runs_on(int32_t index) {
  const fa_problem p = problem_of(FA_DTYPE_F32);
  std::vector<float> numbers(size_t(2 * 40 * 2 * 16), 0.5f), o(numbers.size());
  std::vector<float> lse(2 * 2 * 40);
  fa_tensors tensors{};
  for (const fa_tensor_id id : {FA_TENSOR_Q, FA_TENSOR_K, FA_TENSOR_V})
    *fa_tensor_at(&tensors, id) = fa_tensor_contiguous(&p, id, numbers.data());
  tensors.o = fa_tensor_contiguous(&p, FA_TENSOR_O, o.data());
  tensors.lse = fa_tensor_contiguous(&p, FA_TENSOR_LSE, lse.data());
  fa_plan plan;
  return !fa_plan_init(&plan, &p, FA_PASS_FORWARD, {FA_DEVICE_CUDA, index}, nullptr) &&
         !fa_run_anywhere(&plan, &tensors, nullptr, nullptr, nullptr) && o == numbers;
}

int current_device() {
  int index = -1;
  cudaGetDevice(&index);
  return index;
}

// Before this process uses any.
void test_waking() {
  in_child("a call on the second device wakes the first one up", [] {
    const bool runs = runs_on(1) && runs_on(1);
    return runs && emulated::is_device_awake(1) && !emulated::is_device_awake(0);
  });
}

void test_devices() {
  in_child("a thread has another device after calls than before", [] {
    bool right = runs_on(1);
    for (int index = 0; index < 2; index++) {
      cudaSetDevice(index);
      for (int other = 0; other < 2; other++) right = right && runs_on(other) && current_device() == index;
    }
    return right;
  });
  in_child("a child does not ask anew what its parent knew", [] {
    emulated::forget_calls();
    return runs_on(0) && emulated::num_calls("cudaGetDeviceCount") > 0 &&
           emulated::num_calls("cudaFuncSetAttribute") > 0 && emulated::num_calls("cudaDeviceGetAttribute") > 0;
  });
  static bool is_right[4] = {true, true, true, true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([i] {
      for (int n = 0; n < 6; n++) is_right[i] = is_right[i] && runs_on((i + n) % 2);
    });
  for (auto &thread : threads) thread.join();
  for (int i = 0; i < 4; i++) CHECK(is_right[i], "thread %d, of several on two devices, has other results", i);
}

}  // namespace

int main() {
  setenv("EMULATED_DEVICES", "2", 0);
  // One processor: the calling thread copies through pinned memory by itself.
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  test_waking();
  test_device({"bf16 forward of the device's tensors", 5, 6}, FA_DTYPE_BF16, FA_PASS_FORWARD);
  test_device({"bf16 backward of the device's tensors", 7, 6}, FA_DTYPE_BF16, FA_PASS_BACKWARD);
  test_device({"f32 forward of the device's tensors", 6, 7}, FA_DTYPE_F32, FA_PASS_FORWARD);
  test_device({"f32 backward of the device's tensors", 8, 8}, FA_DTYPE_F32, FA_PASS_BACKWARD);
  test_anywhere({"bf16 forward of the device's tensors, host path", 7, 8}, FA_DTYPE_BF16, FA_PASS_FORWARD,
                ON_DEVICE);
  test_anywhere({"bf16 forward of ordinary memory", 13, 14}, FA_DTYPE_BF16, FA_PASS_FORWARD, PAGEABLE);
  test_anywhere({"bf16 backward of ordinary memory", 20, 19}, FA_DTYPE_BF16, FA_PASS_BACKWARD, PAGEABLE);
  test_anywhere({"bf16 forward of more ordinary memory", 45, 46}, FA_DTYPE_BF16, FA_PASS_FORWARD, PAGEABLE,
                2000);
  test_anywhere({"bf16 forward of pinned memory", 10, 11}, FA_DTYPE_BF16, FA_PASS_FORWARD, PINNED);
  test_anywhere({"bf16 backward of pinned memory", 18, 17}, FA_DTYPE_BF16, FA_PASS_BACKWARD, PINNED);
  test_cache({"an append to a cache", 7, 7}, {"bf16 forward of a cache", 12, 12});
  test_devices();
  return report();
}
