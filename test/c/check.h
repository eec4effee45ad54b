/* What every test program counts with. A program is one file that includes this, and ends in
 * `return report();`. */
#ifndef FA_TEST_CHECK_H
#define FA_TEST_CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static long num_passed, num_failed, num_skipped;

/* Counts one check; where it fails the rest, as printf takes it, says what was checked. */
#define CHECK(condition, ...)                       \
  do {                                              \
    if (condition) {                                \
      num_passed++;                                 \
    } else {                                        \
      num_failed++;                                 \
      printf("FAILED %s:%d: ", __FILE__, __LINE__); \
      printf(__VA_ARGS__);                          \
      printf("\n");                                 \
    }                                               \
  } while (0)

#define CHECK_TEXT(got, expected)                                                               \
  do {                                                                                          \
    const char *got_ = (got), *expected_ = (expected);                                          \
    CHECK(strcmp(got_, expected_) == 0, "got      \"%s\"\n  expected \"%s\"", got_, expected_); \
  } while (0)

/* Prints the summary that scripts read, and gives main's result. */
static inline int report(void) {
  printf("%ld passed, %ld failed, %ld skipped\n", num_passed, num_failed, num_skipped);
  return num_failed ? 1 : 0;
}

#endif
