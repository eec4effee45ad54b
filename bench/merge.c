/*
 * What merges of parts, and sinks for any attention, take of the memory's bandwidth: make bench-merge.
 *
 *   bench_merge [cpu | cuda] [GB/s of the memory, as its maker says [batch]]
 *
 * Each line is the median of rounds of calls that follow one another on tensors larger than any cache, beside
 * the bytes that have to be moved once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../c_src/flash_attention.h"

enum { SEQLEN = 16384, HEADS = 32, HEAD_DIM = 128, MOST = 8, ROUNDS = 7 };
static int64_t batch = 1, rows;

static fa_device device = {FA_DEVICE_CPU, 0};
static double peak;

static void must(fa_status status, const fa_error *error) {
  if (status == FA_STATUS_OK) return;
  printf("%s\n", error->message);
  exit(1);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Memory of the device, filled with a word. */
static void *filled(size_t bytes, uint32_t word) {
  fa_error error;
  void *memory;
  uint32_t *words = malloc(bytes);
  for (size_t i = 0; i < bytes / 4; i++) words[i] = word;
  must(fa_device_alloc(device, bytes, &memory, &error), &error);
  must(fa_device_copy(device, memory, words, bytes, NULL, &error), &error);
  free(words);
  return memory;
}

static fa_part part_new(fa_dtype dtype) {
  fa_part part = {.dtype = dtype, .lse = filled((size_t)rows * 4, 0x3f800000)};
  part.o = (fa_tensor){.data = filled((size_t)rows * HEAD_DIM * fa_dtype_bytes(dtype), 0x3f803f80)};
  part.o.stride_batch = (int64_t)SEQLEN * HEADS * HEAD_DIM;
  part.o.stride_row = HEADS * HEAD_DIM, part.o.stride_head = HEAD_DIM;
  return part;
}

static double bytes_of(const fa_part *part) {
  return (double)rows *
         ((part->o.data ? HEAD_DIM * (double)fa_dtype_bytes(part->dtype) : 0) + (part->lse ? 4 : 0));
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void print_line(const char *name, double bytes, double times[ROUNDS]) {
  qsort(times, ROUNDS, sizeof *times, by_size);
  const double rate = bytes / times[ROUNDS / 2] / 1e9;
  printf("| %s | %.0f | %.1f | %.0f |", name, bytes / 1e6, times[ROUNDS / 2] * 1e6, rate);
  if (peak > 0) printf(" %.1f %% |", 100 * rate / peak);
  printf("\n");
}

static void line(const char *name, const fa_merge *merge, bool is_backward, double bytes) {
  fa_error error;
  fa_execution execution = {.workspace_bytes = fa_merge_workspace_bytes(merge)};
  must(fa_device_alloc(device, execution.workspace_bytes, &execution.workspace, &error), &error);
  const int calls = device.kind == FA_DEVICE_CPU ? 1 : 30;
  double times[ROUNDS];
  for (int round = -1; round < ROUNDS; round++) {
    const double begin = seconds();
    for (int i = 0; i < calls; i++)
      must((is_backward ? fa_merge_backward : fa_merge_forward)(merge, device, &execution, &error), &error);
    must(fa_device_synchronize(device, NULL, &error), &error);
    if (round >= 0) times[round] = (seconds() - begin) / calls;
  }
  print_line(name, bytes, times);
  fa_device_free(device, execution.workspace, NULL);
}

/* What the device itself copies at, beside which the lines are to be read. */
static void copy_line(void) {
  fa_error error;
  const size_t bytes = (size_t)1 << 30;
  void *memory[2];
  double times[ROUNDS];
  for (int i = 0; i < 2; i++) must(fa_device_alloc(device, bytes, &memory[i], &error), &error);
  for (int round = -1; round < ROUNDS; round++) {
    const double begin = seconds();
    must(fa_device_copy(device, memory[0], memory[1], bytes, NULL, &error), &error);
    if (round >= 0) times[round] = seconds() - begin;
  }
  print_line("a copy within the memory", 2.0 * (double)bytes, times);
  for (int i = 0; i < 2; i++) fa_device_free(device, memory[i], NULL);
}

int main(int argc, char **argv) {
  fa_error error;
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) device.kind = FA_DEVICE_CUDA;
  if (argc > 2) peak = atof(argv[2]);
  if (argc > 3) batch = atoll(argv[3]);
  rows = batch * SEQLEN * HEADS;
  if (fa_num_devices(device.kind, &error) == 0) return printf("skipped: %s\n", error.message), 0;
  fa_device_info info;
  must(fa_device_get_info(device, &info, &error), &error);
  printf("%s: o [%lld, %d, %d, %d]\n\n| call | MB | us | GB/s |%s\n|---|--:|--:|--:|%s\n", info.name,
         (long long)batch, SEQLEN, HEADS, HEAD_DIM, peak > 0 ? " of the memory's |" : "",
         peak > 0 ? "--:|" : "");
  copy_line();
  fa_part bf16[MOST], f32[2];
  for (int i = 0; i < MOST; i++) bf16[i] = part_new(FA_DTYPE_BF16);
  for (int i = 0; i < 2; i++) f32[i] = part_new(FA_DTYPE_F32);
  const float *sink = filled(HEADS * 4, 0x3f800000), *row_sink = filled((size_t)rows * 4, 0x3f800000);
  float *dsink = filled((size_t)rows * 4, 0);

  fa_merge m;
  fa_merge_init(&m);
  m.batch = batch, m.seqlen_q = SEQLEN, m.num_heads = HEADS, m.head_dim = HEAD_DIM;
  for (int i = 0; i < MOST - 1; i++) m.parts[i] = bf16[i];
  m.merged = bf16[MOST - 1];
  for (m.num_parts = 2; m.num_parts < MOST; m.num_parts = 2 * m.num_parts - 1) {
    char name[64];
    snprintf(name, sizeof name, "merge, %d parts of bf16", m.num_parts);
    line(name, &m, false, (m.num_parts + 1) * bytes_of(bf16));
  }
  m.num_parts = 2;
  m.parts[0] = m.merged = f32[0], m.parts[1] = bf16[0];
  line("merge, bf16 into f32 in place", &m, false, 2 * bytes_of(f32) + bytes_of(bf16));
  m.num_parts = 1, m.num_sinks = 1, m.sink = sink;
  m.parts[0] = m.merged = bf16[0];
  line("sinks, bf16 in place", &m, false, 2 * bytes_of(bf16));
  m.sink_per_row = 1, m.sink = row_sink;
  line("sinks of rows, bf16 in place", &m, false, 2 * bytes_of(bf16) + (double)rows * 4);
  m.parts[0] = m.merged = f32[0];
  line("sinks of rows, f32 in place", &m, false, 2 * bytes_of(f32) + (double)rows * 4);
  m.num_parts = 0, m.sink_per_row = 0, m.sink = sink, m.dsink = dsink;
  m.merged = bf16[0], m.dmerged = bf16[1], m.dmerged.lse = NULL;
  line("gradient of sinks, bf16", &m, true, bytes_of(bf16) + bytes_of(&m.dmerged) + 2 * 4 * (double)rows);
  m.num_parts = 2, m.num_sinks = 0, m.dsink = NULL;
  m.merged = bf16[0], m.dmerged = bf16[1];
  m.parts[0] = bf16[2], m.parts[1] = bf16[3], m.dparts[0] = bf16[4], m.dparts[1] = bf16[5];
  line("merge backward, 2 parts of bf16", &m, true, 6 * bytes_of(bf16));
  return 0;
}
