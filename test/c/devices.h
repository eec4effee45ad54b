/* Test programs whose argument is a kind of device: without one they test each kind that is there. */
#ifndef FA_TEST_DEVICES_H
#define FA_TEST_DEVICES_H

#include "../../c_src/flash_attention.h"
#include "check.h"

/* Tests device 0 of these kinds, or of the one that the command line names; one that is not there is skipped.
 */
static inline void test_devices(int argc, char **argv, const fa_device_kind *kinds, size_t num_kinds,
                                void (*test_device)(fa_device device)) {
  for (size_t i = 0; i < num_kinds; i++) {
    if (argc > 1 && strcmp(argv[1], fa_device_kind_name(kinds[i])) != 0) continue;
    if (fa_num_devices(kinds[i], NULL) == 0)
      num_skipped++;
    else
      test_device((fa_device){kinds[i], 0});
  }
}

#endif
