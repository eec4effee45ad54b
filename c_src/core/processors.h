/* How many processors this process may use, whichever of its threads asks, and what they know. */
#ifndef FA_CORE_PROCESSORS_H
#define FA_CORE_PROCESSORS_H

#include <sched.h>
#include <stdbool.h>

/* The processors that the process may run on, as its first thread may now, or as many as its control group's
 * quota of their time is worth, where that is less. The quota is read once. */
int fa_num_processors(void);

#if defined(__linux__)
/* The processors that the process's first thread may run on now: a caller may have pinned itself. False where
 * the system does not say. */
bool fa_get_processors(cpu_set_t *processors);
#endif

#if defined(__x86_64__)
/* Whether they convert vectors of f16. Clang's __builtin_cpu_supports does not know that. */
bool fa_has_f16c(void);
#endif

/* How many processors a quota of "<microseconds> <period>" is worth, rounded up; INT_MAX of "max <period>", and
 * of what is no quota. */
int fa_quota_processors(const char *quota);

enum { FA_MAX_GROUP_PATH = 256 };

/* The version, 1 or 2, of the control groups in which a line of /proc/self/cgroup places the process, with its
 * path there; 0 where the line does not speak of processors' time. */
int fa_read_group(const char *line, char path[FA_MAX_GROUP_PATH]);

#endif
