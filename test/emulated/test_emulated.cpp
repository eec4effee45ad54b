// The emulated GPU itself: what its instructions compute, and that faults which are planted in kernels are
// found. Each planted fault runs in a process of its own, which must end with a report that names it.
#include "../../cuda/ptx.cuh"
#include "../c/check.h"

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int THREADS = 128;

template <class... Arguments>
void launch(void (*kernel)(Arguments...), int num_blocks, int num_threads, int shared_bytes,
            Arguments... arguments) {
  void *pointers[] = {&arguments..., nullptr};
  cudaLaunchKernel(fa::address_of_kernel(kernel), dim3(unsigned(num_blocks)), dim3(unsigned(num_threads)),
                   pointers, size_t(shared_bytes), nullptr);
}

template <class T>
struct Memory {
  T *data;
  explicit Memory(size_t count) { cudaMalloc(reinterpret_cast<void **>(&data), count * sizeof(T)); }
  ~Memory() { cudaFree(data); }
  T &operator[](size_t i) const { return data[i]; }
};

// ---- faults ----------------------------------------------------------------------------------------------

// Runs `body` in a child; true where it ends with a report that has the text.
bool is_reported(const char *text, void (*body)()) {
  int ends[2];
  char report[1 << 16];
  size_t length = 0;
  if (pipe(ends)) abort();
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    body();
    _exit(0);
  }
  close(ends[1]);
  for (ssize_t got; (got = read(ends[0], report + length, sizeof report - 1 - length)) > 0;)
    length += size_t(got);
  report[length] = 0;
  close(ends[0]);
  int status;
  waitpid(child, &status, 0);
  const bool found = WIFEXITED(status) && WEXITSTATUS(status) == 70 && strstr(report, text);
  if (!found) printf("expected '%s', status %d:\n%s", text, status, report);
  return found;
}

// to[i] becomes from[i + 1]; the last one's is the first.
__global__ void rotate(const int *from, int *to, bool waits) {
  __shared__ int all[THREADS];
  all[threadIdx.x] = from[threadIdx.x];
  if (waits) __syncthreads();
  to[threadIdx.x] = all[(threadIdx.x + 1) % THREADS];
}

int num_rotated(bool waits) {
  Memory<int> from(THREADS), to(THREADS);
  for (int i = 0; i < THREADS; i++) from[i] = i;
  launch(rotate, 1, THREADS, 0, (const int *)from.data, to.data, waits);
  int right = 0;
  for (int i = 0; i < THREADS; i++) right += to[i] == (i + 1) % THREADS;
  return right;
}

void test_barriers() {
  CHECK(num_rotated(true) == THREADS, "%d rotated", num_rotated(true));
  CHECK(num_rotated(false) < THREADS, "nobody misses the barrier");
}

__global__ void copy_late(const uint4 *from, uint4 *to, bool waits) {
  FA_DYNAMIC_SHARED(16, uint4, there);
  fa::copy_async(fa::shared_address(there + threadIdx.x), from + threadIdx.x, 12);
  if (waits) fa::copy_async_wait_all();
  to[threadIdx.x] = there[threadIdx.x];
}

void test_copies() {
  Memory<uint4> from(32), to(32);
  for (bool waits : {false, true}) {
    memset(from.data, 0, 32 * sizeof(uint4));
    for (unsigned i = 0; i < 32; i++) from[i].x = i + 1;
    launch(copy_late, 1, 32, 32 * int(sizeof(uint4)), (const uint4 *)from.data, to.data, waits);
    for (unsigned i = 0; i < 32; i++)
      CHECK((to[i].x == i + 1 && to[i].w == 0) == waits, "copy %u with wait %d: %u", i, waits, to[i].x);
  }
}

__global__ void store_at(int *to, int index) { to[index] = 1; }
__global__ void store_shared_at(uint32_t offset) {
  FA_DYNAMIC_SHARED(16, uint32_t, there);
  fa::store_shared(fa::shared_address(there) + offset, 1u);
}
__global__ void store_raw_at(int index) {
  FA_DYNAMIC_SHARED(16, int, there);
  there[index] = 1;
}
__global__ void leave_barrier_out() {
  if (threadIdx.x >= 32) __syncthreads();
  if (threadIdx.x < 32) emulated::barrier_wait(1, 64);
}
__global__ void disagree_on_lanes() {
  if (threadIdx.x < 16)
    __syncwarp(0xffff);
  else
    __syncwarp();
}
__global__ void disagree_on_threads() { emulated::barrier_wait(1, threadIdx.x < 32 ? 64 : 96); }
__global__ void await_block(int *flag, unsigned awaited) {
  if (blockIdx.x == awaited) fa::add_release(flag, 1);
  while (fa::load_acquire(flag) == 0) fa::let_others_run();
}

void await_last_block(int num_blocks) {
  Memory<int> flag(1);
  flag[0] = 0;
  launch(await_block, num_blocks, 32, 0, flag.data, unsigned(num_blocks - 1));
}

void test_reports() {
  CHECK(is_reported("out of bounds", [] { launch(store_at, 1, 32, 0, Memory<int>(64).data, 64); }),
        "end of memory");
  CHECK(is_reported("written behind their end", [] { launch(store_at, 1, 32, 0, Memory<int>(63).data, 63); }),
        "end of memory that is no multiple of 256 bytes");
  CHECK(is_reported("written before their beginning",
                    [] { launch(store_at, 1, 32, 0, Memory<int>(64).data, -1); }),
        "before memory");
  CHECK(is_reported("of shared memory, which has 64", [] { launch(store_shared_at, 1, 32, 64, 64u); }),
        "shared");
  CHECK(is_reported("is no multiple of 4", [] { launch(store_shared_at, 1, 32, 64, 2u); }), "alignment");
  CHECK(is_reported("wrote behind its shared memory", [] { launch(store_raw_at, 1, 32, 64, 16); }),
        "raw shared");
  CHECK(is_reported("out of bounds", [] { launch(store_raw_at, 1, 32, 1024, 256); }), "raw shared, at a page");
  CHECK(is_reported("waits at barrier 1", [] { launch(leave_barrier_out, 1, 96, 0); }), "deadlock");
  CHECK(is_reported("while lanes", [] { launch(disagree_on_lanes, 1, 32, 0); }), "lanes");
  CHECK(is_reported("which others take for one of", [] { launch(disagree_on_threads, 1, 64, 0); }), "threads");
  CHECK(is_reported("waits for memory to change", [] { await_last_block(4); }), "a block that never begins");
}

// ---- instructions ----------------------------------------------------------------------------------------

template <class Element>
__global__ void multiply(const Element *a, const Element *b, float *c) {
  __shared__ __align__(16) Element tile[16 * 16];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = a[i];
  __syncwarp();
  const int lane = threadIdx.x;
  uint32_t left[4], right[4];
  fa::load_matrices<false>(left, fa::shared_address(tile + lane % 16 * 16 + lane / 16 * 8));
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = b[i];
  __syncwarp();
  fa::load_matrices<true>(right, fa::shared_address(tile + lane % 16 * 16 + lane / 16 * 8));
  for (int n = 0; n < 2; n++) {
    float sum[4] = {};
    fa::mma(Element(), sum, left, right[2 * n], right[2 * n + 1]);
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = sum[i];
  }
}

template <class Element>
void test_product() {
  Memory<Element> a(256), b(256);
  Memory<float> c(256);
  for (int i = 0; i < 256; i++) a[i] = Element(float(i % 7 - 3)), b[i] = Element(float(i % 11 - 5) / 4);
  launch(multiply<Element>, 1, 32, 0, (const Element *)a.data, (const Element *)b.data, c.data);
  for (int i = 0; i < 256; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += float(a[i / 16 * 16 + k]) * float(b[k * 16 + i % 16]);
    CHECK(c[i] == sum, "element %d: %g instead of %g", i, c[i], sum);
  }
}

__global__ void ask_lanes(int *got) {
  const int lane = threadIdx.x;
  int *own = got + lane * 8;
  own[0] = __shfl_xor_sync(~0u, lane, 5);
  own[1] = __shfl_up_sync(~0u, lane, 3);
  own[2] = __shfl_down_sync(~0u, lane, 3, 8);
  own[3] = __shfl_sync(~0u, lane, lane + 1);
  own[4] = int(__ballot_sync(~0u, lane % 3 == 0));
  own[5] = int(__match_any_sync(~0u, lane / 8));
  own[6] = __reduce_max_sync(~0u, lane ^ 21);
  own[7] = lane < 8 ? __reduce_add_sync(0xff, lane) : __reduce_add_sync(~0xffu, lane);
}

void test_lanes() {
  Memory<int> got(32 * 8);
  launch(ask_lanes, 1, 32, 0, got.data);
  for (int lane = 0; lane < 32; lane++) {
    const int wanted[] = {lane ^ 5,
                          lane >= 3 ? lane - 3 : lane,
                          lane % 8 < 5 ? lane + 3 : lane,
                          (lane + 1) % 32,
                          0x49249249,
                          int(0xffu << lane / 8 * 8),
                          31,
                          lane < 8 ? 28 : 468};
    for (int i = 0; i < 8; i++)
      CHECK(got[lane * 8 + i] == wanted[i], "lane %d, %d: %x", lane, i, got[lane * 8 + i]);
  }
}

// Every f16 comes back, and what lies halfway between two of them becomes the even one.
void test_halves() {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x7c00; bits++) {
    const float x = emulated::halves[bits], next = emulated::halves[bits + 1];
    const float halfway = bits == 0x7bff ? 65520 : x + (next - x) / 2;
    wrong += emulated::half_of(x) != bits || emulated::half_of(-x) != (bits | 0x8000);
    wrong += emulated::half_of(halfway) != bits + (bits & 1);
    wrong += emulated::half_of(nextafterf(halfway, 0)) != bits;
  }
  CHECK(wrong == 0, "%d conversions are wrong", wrong);
  CHECK(__nv_bfloat16(1 + 0x1p-8f).bits == 0x3f80 && __nv_bfloat16(1 + 0x3p-8f).bits == 0x3f82, "ties of bf16");
}

__global__ void take_turns(int *ticket, int *turn, int *order) {
  __shared__ int mine;
  if (threadIdx.x == 0) mine = atomicAdd(ticket, 1);
  __syncthreads();
  if (threadIdx.x == 0)
    while (fa::load_acquire(turn) < mine) fa::let_others_run();
  __syncthreads();
  if (threadIdx.x == 63) order[mine] = blockIdx.x, fa::add_release(turn, 1);
}

// Blocks that wait for those with earlier tickets, more of them than there are multiprocessors.
void test_turns() {
  constexpr int BLOCKS = 50;
  Memory<int> counters(2), order(BLOCKS);
  counters[0] = counters[1] = 0;
  launch(take_turns, BLOCKS, 64, 0, &counters[0], &counters[1], order.data);
  bool has[BLOCKS] = {};
  for (int i = 0; i < BLOCKS; i++)
    if (order[i] >= 0 && order[i] < BLOCKS) has[order[i]] = true;
  for (int i = 0; i < BLOCKS; i++) CHECK(has[i], "block %d had no turn", i);
}

// Each block of a cluster tells the next one its number, twice; `to` gets what the blocks were told.
__global__ void tell_next(uint32_t *to, uint32_t cluster) {
  FA_DYNAMIC_SHARED(16, float2, told);
  const uint32_t next = (blockIdx.x + 1) % cluster, before = (blockIdx.x + cluster - 1) % cluster;
  for (int i = threadIdx.x; i < 2; i += blockDim.x) told[i] = make_float2(float(blockIdx.x), float(i));
  fa::cluster_barrier();
  const float2 of_next = fa::load_cluster_pair(fa::address_in_block(fa::shared_address(told), next));
  const float2 of_before = fa::load_cluster_pair(fa::address_in_block(fa::shared_address(told + 1), before));
  if (threadIdx.x == 0) to[blockIdx.x] = uint32_t(of_next.x) * 1000 + uint32_t(of_before.x);
  fa::cluster_barrier();
}

// More clusters of several sizes than multiprocessors hold at a time, whose blocks end one before the other.
void test_clusters() {
  constexpr uint32_t BLOCKS = 48;
  Memory<uint32_t> told(BLOCKS);
  for (uint32_t cluster : {8u, 2u, 16u, 4u, 3u}) {
    void *pointers[] = {&told.data, &cluster, nullptr};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    const cudaLaunchConfig_t config = {dim3(BLOCKS), dim3(64), 64, nullptr, &attribute, 1};
    for (int turn = 0; turn < 5; turn++) {
      memset(told.data, 0, BLOCKS * sizeof(uint32_t));
      cudaLaunchKernelExC(&config, fa::address_of_kernel(tell_next), pointers);
      for (uint32_t i = 0; i < BLOCKS; i++) {
        const uint32_t first = i / cluster * cluster;
        const uint32_t next = first + (i + 1) % cluster, before = first + (i + cluster - 1) % cluster;
        CHECK(told[i] == next * 1000 + before, "block %u of clusters of %u was told %u", i, cluster, told[i]);
      }
    }
  }
}

}  // namespace

int main() {
  test_reports();  // first: a process that forks has no threads yet
  test_barriers();
  test_copies();
  test_product<__half>();
  test_product<__nv_bfloat16>();
  test_lanes();
  test_halves();
  test_turns();
  test_clusters();
  return report();
}
