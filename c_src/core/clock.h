/* The clock by which waits and kernels on the CPU are timed. */
#ifndef FA_CORE_CLOCK_H
#define FA_CORE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Counts from some fixed moment. Nobody sets this clock back, as they do the time of day. */
static inline int64_t fa_nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

#endif
