/*
 * GPUs without a GPU, for the tests of heaps and transfers: memory of its own kind, and streams whose work a
 * thread does later, one piece at a time, each from a stream that it draws by lot among those that may go on.
 * What forgets to wait for an event, or uses memory again too early, so gives wrong results sooner or later.
 * Its kernels are the reference's, whose results do not depend on what else is in a batch.
 */
#ifndef FA_TEST_FAKE_GPU_H
#define FA_TEST_FAKE_GPU_H

#include "../../c_src/core/backend.h"

extern const fa_backend fake_gpu;

enum { FAKE_DEVICES = 4, FAKE_PROBLEMS = 16 };

/* What tests set, between calls. */
extern struct fake_settings {
  size_t device_bytes, pinned_bytes; /* there are so many */
  long fail_at;                      /* of the operations that may fail, the one after so many does; -1: none */
  int32_t fail_device;               /* the device whose operations count for that; -1: all devices' */
  fa_status failure;
} fake_settings;

/* From now on this stream does its work only when no other can and somebody waits for the device. NULL: none is
 * late. */
void fake_set_late(void *stream);

/* What they look at. */
typedef struct fake_state {
  size_t device_bytes, pinned_bytes; /* allocated now */
  long num_streams, num_events;      /* that are there now */
  long num_pageable_copies;          /* of memory that the bus cannot read by itself */
  long num_copies, num_unpacked, num_runs;
  long num_runs_of[FAKE_DEVICES];
  long num_trespasses;                /* kernels on tensors, streams or events of another device */
  bool is_awake[FAKE_DEVICES];        /* memory was asked for, of the device or for it */
  fa_problem problems[FAKE_PROBLEMS]; /* of the last runs: that of run n at n % FAKE_PROBLEMS */
} fake_state;
fake_state fake_get_state(void);

#endif
