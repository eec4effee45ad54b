/* The processors of this process: its mask, its control group's quota, and an instruction set of theirs. */
#include "processors.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "integers.h"

/* ---- the mask ------------------------------------------------------------------------------------------ */

#if defined(__linux__)
/* The process's number is that of its first thread. */
bool fa_get_processors(cpu_set_t *processors) {
  return sched_getaffinity(getpid(), sizeof *processors, processors) == 0;
}
#endif

static int num_in_mask(void) {
#if defined(__linux__)
  cpu_set_t processors;
  if (fa_get_processors(&processors)) return CPU_COUNT(&processors);
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

/* ---- the quota ----------------------------------------------------------------------------------------- */

int fa_quota_processors(const char *quota) {
  long long microseconds, period;
  if (sscanf(quota, "%lld %lld", &microseconds, &period) != 2 || microseconds <= 0 || period <= 0)
    return INT_MAX;
  return (int)fa_min(fa_divide_up(microseconds, period), INT_MAX);
}

int fa_read_group(const char *line, char path[FA_MAX_GROUP_PATH]) {
  char controllers[FA_MAX_GROUP_PATH], *rest = controllers;
  if (sscanf(line, "0::%255[^\n]", path) == 1) return 2;
  if (sscanf(line, "%*d:%255[^:]:%255[^\n]", controllers, path) != 2) return 0;
  for (const char *name; (name = strtok_r(rest, ",", &rest));)
    if (strcmp(name, "cpu") == 0) return 1;
  return 0;
}

/* The first line of a file, or "" where there is none. */
static const char *read_line(char *line, size_t line_bytes, const char *path, const char *name) {
  char file_name[FA_MAX_GROUP_PATH + 64];
  snprintf(file_name, sizeof file_name, "/sys/fs/cgroup/%s/%s", path, name);
  FILE *file = fopen(file_name, "r");
  if (!file || !fgets(line, (int)line_bytes, file)) *line = '\0';
  if (file) fclose(file);
  return line;
}

static int quota_of_group(int version, const char *path) {
  char quota[128], period[64], folder[FA_MAX_GROUP_PATH + 8];
  if (version == 2) return fa_quota_processors(read_line(quota, sizeof quota, path, "cpu.max"));
  snprintf(folder, sizeof folder, "cpu/%s", path);
  read_line(quota, sizeof quota / 2, folder, "cpu.cfs_quota_us");
  strncat(quota, " ", 2);
  return fa_quota_processors(strcat(quota, read_line(period, sizeof period, folder, "cpu.cfs_period_us")));
}

/* The least of the group and those that it is in, up to the root, which is a container's own where the path is
 * the host's. */
static int least_quota(int version, char *path) {
  int least = quota_of_group(version, path);
  for (char *slash; (slash = strrchr(path, '/'));) {
    *slash = '\0';
    least = (int)fa_min(least, quota_of_group(version, path));
  }
  return least;
}

static int read_quota(void) {
  char line[2 * FA_MAX_GROUP_PATH + 32], path[FA_MAX_GROUP_PATH];
  int least = INT_MAX;
  FILE *groups = fopen("/proc/self/cgroup", "r");
  while (groups && fgets(line, sizeof line, groups)) {
    const int version = fa_read_group(line, path);
    if (version) least = (int)fa_min(least, least_quota(version, path));
  }
  if (groups) fclose(groups);
  return least;
}

int fa_num_processors(void) {
  static atomic_int quota; /* 0: not read yet */
  if (!atomic_load(&quota)) atomic_store(&quota, read_quota());
  return (int)fa_min(num_in_mask(), atomic_load(&quota));
}

/* ---- instructions -------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
bool fa_has_f16c(void) {
  static atomic_int known; /* 0: not yet; 1: no; 2: yes: a hypervisor takes its time to say so */
  unsigned a, b, c, d;
  if (!atomic_load(&known)) atomic_store(&known, __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C ? 2 : 1);
  return atomic_load(&known) == 2;
}
#endif
